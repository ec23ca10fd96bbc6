//! `cargo xtask mutants`: checks that the conformance suite fails when a rule is
//! broken on purpose.
//!
//! Each mutant is one small bug in a rule, an engine or the API, together with the
//! test cases that must fail because of it. Mutants are built in copies of the tree
//! under `target/mutants`, never in the checkout. The task fails if a mutant
//! survives, hangs, does not build, or no longer matches the code.
//!
//! `cargo xtask mutants --check` builds nothing: it only lists the mutants whose
//! search text or test cases no longer exist.

use std::{
    collections::BTreeSet,
    ffi::OsString,
    fmt,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

mod api;
mod flows;
mod groups;
mod operations;
mod postgres;
mod protocol;
mod rules;
mod sqlite;
mod steps;
mod wake;
mod worker;

use crate::{
    pgbouncer,
    run::{Result, cargo, target_dir, took, workspace},
    test::Database,
    time_limit::status_within,
};

/// One bug: `find`, at its first occurrence after `anchor`, becomes `replace`.
struct Mutant {
    /// What the bug does, in the imperative.
    name: &'static str,
    file: &'static str,
    /// Occurs exactly once in the file.
    anchor: &'static str,
    find: &'static str,
    replace: &'static str,
    /// The test cases that must fail, as `module::engine::case`.
    caught_by: &'static [&'static str],
}

fn all_mutants() -> impl Iterator<Item = &'static Mutant> {
    [
        rules::MUTANTS,
        wake::MUTANTS,
        worker::MUTANTS,
        postgres::MUTANTS,
        sqlite::MUTANTS,
        steps::MUTANTS,
        groups::MUTANTS,
        flows::MUTANTS,
        operations::MUTANTS,
        api::MUTANTS,
        protocol::MUTANTS,
    ]
    .into_iter()
    .flatten()
}

/// Each lab holds its own build of the whole tree.
const MAX_LABS: usize = 4;

/// The tests of a mutant normally take seconds. Compiling is not included.
const TEST_TIME_LIMIT: Duration = Duration::from_secs(10 * 60);

/// The `find` text must start within this many lines after the anchor. Otherwise a
/// text that has gone from its statement could match in a later, unrelated one.
const MAX_LINES_AFTER_ANCHOR: usize = 60;

/// What was requested on the command line.
#[derive(Debug, PartialEq)]
pub(crate) struct Options {
    /// Only look for stale mutants.
    check: bool,
    /// Only mutants whose names contain all of these.
    words: Vec<String>,
}

impl Options {
    pub(crate) fn parse(args: Vec<OsString>) -> Result<Options, String> {
        let mut options = Options { check: false, words: Vec::new() };
        for arg in args {
            match arg.to_string_lossy().as_ref() {
                "--check" => options.check = true,
                flag if flag.starts_with('-') => {
                    return Err(format!("`mutants` takes --check, not `{flag}`"));
                }
                word => options.words.push(word.to_owned()),
            }
        }
        Ok(options)
    }

    fn selects(&self, mutant: &Mutant) -> bool {
        self.words.iter().all(|word| mutant.name.contains(word.as_str()))
    }
}

/// `cargo xtask mutants`.
pub(crate) fn mutants(options: &Options) -> Result {
    let chosen: Vec<_> = all_mutants().filter(|mutant| options.selects(mutant)).collect();
    if chosen.is_empty() {
        return Err(format!("no mutant's name contains `{}`", options.words.join(" ")).into());
    }
    if options.check { check(&chosen) } else { run(&chosen) }
}

/// Lists every mutant that no longer matches the code or the test cases.
fn check(chosen: &[&Mutant]) -> Result {
    let problems = stale(chosen);
    if problems.is_empty() {
        eprintln!("==> mutants: all {} match the code", chosen.len());
        return Ok(());
    }
    Err(format!("{} problems with mutants:\n  {}", problems.len(), problems.join("\n  ")).into())
}

fn stale(chosen: &[&Mutant]) -> Vec<String> {
    let mut problems = Vec::new();
    for mutant in chosen {
        let path = workspace().join(mutant.file);
        let applied = fs::read_to_string(path).map_err(|error| error.to_string()).and_then(|text| {
            let mutated = mutant.apply(&text)?;
            if mutated == text { Err("it changes nothing".into()) } else { Ok(()) }
        });
        if let Err(problem) = applied {
            problems.push(format!("{}\n      {}: {problem}", mutant.name, mutant.file));
        }
    }
    for mutant in chosen {
        for case in mutant.caught_by.iter().filter(|case| !exists(case)) {
            problems.push(format!("{}\n      there is no test case `{case}`", mutant.name));
        }
    }
    problems
}

/// Whether the conformance suite has this case, given as `module::engine::case`.
fn exists(case: &str) -> bool {
    let mut parts = case.rsplitn(3, "::");
    let (Some(name), Some(engine), Some(module)) = (parts.next(), parts.next(), parts.next()) else {
        return false;
    };
    let file = format!("crates/longshore/tests/conformance/{}.rs", module.replace("::", "/"));
    let text = fs::read_to_string(workspace().join(file)).unwrap_or_default();
    is_registered(&text, engine, name)
}

/// Whether a module's invocations of `cases!` register the case for this engine.
fn is_registered(module: &str, engine: &str, name: &str) -> bool {
    let lists = module.split("\ncases! {").skip(1).filter_map(|rest| rest.split_once("\n}"));
    lists.map(|(list, _)| list).any(|list| {
        let is_for_engine = match engine {
            "postgres" | "sqlite" => !list.contains("only on "),
            "postgres_only" => list.contains("only on postgres:"),
            "sqlite_only" => list.contains("only on sqlite:"),
            _ => false,
        };
        is_for_engine && list.lines().any(|line| line.trim() == format!("{name},"))
    })
}

/// Builds and tests each mutant. Much of a build uses one core only, so there are
/// several labs, and each takes the next mutant when it has finished one.
fn run(chosen: &[&'static Mutant]) -> Result {
    pgbouncer::install_if_missing();
    let database = Database::find()?.open()?;
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let work = |lab: usize| -> Result<(), String> {
        let lab = Lab::new(lab, database.url()).map_err(|error| error.to_string())?;
        while let Some(mutant) = chosen.get(next.fetch_add(1, Ordering::Relaxed)) {
            let started = Instant::now();
            let outcome = lab.test(mutant).map_err(|error| error.to_string())?;
            let duration = took(started.elapsed());
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            results.push((mutant.name, outcome));
            eprintln!("    {}/{} {}: {outcome}, {duration}", results.len(), chosen.len(), mutant.name);
        }
        Ok(())
    };
    let labs = thread::available_parallelism().map_or(1, usize::from).min(MAX_LABS).min(chosen.len());
    thread::scope(|scope| {
        let labs: Vec<_> = (1..=labs).map(|lab| scope.spawn(move || work(lab))).collect();
        labs.into_iter().try_for_each(|lab| lab.join().unwrap_or_else(|_| Err("a lab panicked".into())))
    })?;
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    eprintln!("==> mutants: {}", totals(&results));
    let failures = failures(&results);
    if failures.is_empty() {
        return Ok(());
    }
    Err(format!("not caught by the conformance suite:\n  {}", failures.join("\n  ")).into())
}

/// What became of a mutant.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    /// Every test case that it names failed.
    Caught,
    /// At least one of them passed or was not run.
    Survived,
    /// Its tests were killed after [`TEST_TIME_LIMIT`].
    TimedOut,
    /// The test program ended without a result, for example by an abort.
    Crashed,
    /// The bug does not compile, so nothing is known about the suite.
    DidNotBuild,
    /// The code has changed, so the mutant has to be adapted.
    Stale,
}

impl Outcome {
    const ALL: [Outcome; 6] = [
        Outcome::Caught,
        Outcome::Survived,
        Outcome::TimedOut,
        Outcome::Crashed,
        Outcome::DidNotBuild,
        Outcome::Stale,
    ];
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Outcome::Caught => "caught",
            Outcome::Survived => "SURVIVED",
            Outcome::TimedOut => "TIMED OUT",
            Outcome::Crashed => "CRASHED",
            Outcome::DidNotBuild => "DID NOT BUILD",
            Outcome::Stale => "STALE",
        })
    }
}

/// How many mutants had each outcome, such as `3 caught, 1 TIMED OUT`.
fn totals(results: &[(&str, Outcome)]) -> String {
    let count = |outcome| results.iter().filter(|(_, had)| *had == outcome).count();
    let totals = Outcome::ALL.into_iter().map(|outcome| (count(outcome), outcome));
    let lines: Vec<String> =
        totals.filter(|(n, _)| *n > 0).map(|(n, outcome)| format!("{n} {outcome}")).collect();
    lines.join(", ")
}

/// The mutants that were not caught, grouped by outcome.
fn failures(results: &[(&str, Outcome)]) -> Vec<String> {
    let uncaught = Outcome::ALL.into_iter().filter(|outcome| *outcome != Outcome::Caught);
    uncaught
        .flat_map(|outcome| results.iter().filter(move |(_, had)| *had == outcome))
        .map(|(name, outcome)| format!("{outcome}: {name}"))
        .collect()
}

/// Judges a test run by its status (`None`: it was killed after the time limit) and
/// by what the test program printed.
fn judge(status: Option<ExitStatus>, stdout: &str, cases: usize) -> Outcome {
    if status.is_none() {
        return Outcome::TimedOut;
    }
    match stdout.lines().find(|line| line.starts_with("test result:")) {
        Some(summary) if summary.contains(&format!(" 0 passed; {cases} failed")) => Outcome::Caught,
        Some(_) => Outcome::Survived,
        None => Outcome::Crashed,
    }
}

/// Where mutants are built and tested.
struct Lab {
    tree: Tree,
    home: PathBuf,
    database_url: String,
}

impl Lab {
    fn new(number: usize, database_url: &str) -> Result<Lab> {
        let home = target_dir().join("mutants").join(number.to_string());
        Ok(Lab { tree: Tree::copy(home.join("tree"))?, home, database_url: database_url.to_owned() })
    }

    fn test(&self, mutant: &Mutant) -> Result<Outcome> {
        let path = self.tree.root.join(mutant.file);
        let original = match fs::read_to_string(&path) {
            Ok(original) => original,
            Err(error) => {
                eprintln!("    {}: {error}", mutant.file);
                return Ok(Outcome::Stale);
            }
        };
        let mutated = match mutant.apply(&original) {
            Ok(mutated) => mutated,
            Err(problem) => {
                eprintln!("    {}: {problem}", mutant.file);
                return Ok(Outcome::Stale);
            }
        };
        fs::write(&path, mutated)?;
        let outcome = self.build_and_test(mutant);
        fs::write(&path, original)?;
        outcome
    }

    /// Builds first and without a time limit: a first build takes many minutes.
    fn build_and_test(&self, mutant: &Mutant) -> Result<Outcome> {
        let built = self.suite().arg("--no-run").output()?;
        if !built.status.success() {
            eprintln!("{}", String::from_utf8_lossy(&built.stderr));
            return Ok(Outcome::DidNotBuild);
        }
        let (stdout, stderr) = (self.home.join("test-stdout.log"), self.home.join("test-stderr.log"));
        let mut tests = self.suite();
        tests.args(["--", "--exact"]).args(mutant.caught_by);
        tests.stdin(Stdio::null()).stdout(File::create(&stdout)?).stderr(File::create(&stderr)?);
        let status = status_within(TEST_TIME_LIMIT, &mut tests)?;
        let outcome = judge(status, &String::from_utf8_lossy(&fs::read(stdout)?), mutant.caught_by.len());
        if outcome == Outcome::Crashed {
            eprintln!("{}", String::from_utf8_lossy(&fs::read(stderr)?));
        }
        Ok(outcome)
    }

    fn suite(&self) -> Command {
        let mut suite = cargo(["test", "--package", "longshore", "--all-features", "--test", "conformance"]);
        suite
            .current_dir(&self.tree.root)
            .env("CARGO_TARGET_DIR", self.home.join("target"))
            // Nobody debugs a mutant, and it builds faster without.
            .env("CARGO_PROFILE_DEV_DEBUG", "0")
            .env("CARGO_INCREMENTAL", "1")
            .env("LONGSHORE_TEST_DATABASE_URL", &self.database_url);
        suite
    }
}

/// A copy of the files that git tracks or would add.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn copy(root: PathBuf) -> Result<Self> {
        let listed = Command::new("git")
            .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
            .current_dir(workspace())
            .output()?;
        if !listed.status.success() {
            return Err("cannot list the tree: `git ls-files` failed".into());
        }
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        // Git also lists files that were deleted but not committed.
        let is_file = |name: &&str| workspace().join(name).is_file();
        let names: BTreeSet<&str> = listed.split('\0').filter(is_file).collect();
        for name in &names {
            copy_if_changed(&workspace().join(name), &root.join(name))?;
        }
        remove_others(&root, &|file| file.to_str().is_some_and(|name| names.contains(name)))?;
        Ok(Tree { root })
    }
}

/// Removes files of an earlier copy that are no longer in the checkout. The old file of
/// a renamed module could otherwise keep the copy from compiling.
fn remove_others(root: &Path, is_listed: &dyn Fn(&Path) -> bool) -> Result {
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.strip_prefix(root).is_ok_and(is_listed) {
                fs::remove_file(path)?;
            }
        }
    }
    Ok(())
}

/// Does not touch files that are already equal, so that cargo does not rebuild
/// them.
fn copy_if_changed(from: &Path, to: &Path) -> Result {
    let wanted = fs::read(from)?;
    if fs::read(to).is_ok_and(|found| found == wanted) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    Ok(fs::write(to, wanted)?)
}

impl Mutant {
    /// Returns `text` with the bug in it, or what is stale about the mutant.
    fn apply(&self, text: &str) -> Result<String, String> {
        let Mutant { anchor, find, replace, .. } = self;
        let anchored = match text.matches(anchor).count() {
            0 => return Err(format!("the anchor `{anchor}` is gone")),
            1 => text.find(anchor).unwrap_or_default(),
            n => return Err(format!("the anchor `{anchor}` occurs {n} times; it must be unique")),
        };
        let at = text[anchored..].find(find).map(|distance| anchored + distance);
        let near = at.filter(|at| text[anchored..*at].matches('\n').count() <= MAX_LINES_AFTER_ANCHOR);
        let Some(at) = near else {
            return Err(format!(
                "`{find}` does not occur within {MAX_LINES_AFTER_ANCHOR} lines after `{anchor}`"
            ));
        };
        Ok(format!("{}{replace}{}", &text[..at], &text[at + find.len()..]))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    fn mutant(anchor: &'static str, find: &'static str) -> Mutant {
        Mutant { name: "", file: "", anchor, find, replace: "y", caught_by: &[] }
    }

    #[test]
    fn every_mutant_matches_the_code_and_the_test_cases() {
        let problems = stale(&all_mutants().collect::<Vec<_>>());
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    #[test]
    fn a_case_is_registered_only_in_its_module_and_for_its_engines() {
        let module =
            "use x;\n\ncases! {\n    one,\n}\n\ncases! {\n    only on sqlite:\n    two,\n}\n\nthree,\n";
        let is_registered = |engine, name| super::is_registered(module, engine, name);
        assert!(is_registered("postgres", "one") && is_registered("sqlite", "one"));
        assert!(is_registered("sqlite_only", "two"));
        assert!(!is_registered("sqlite", "two") && !is_registered("postgres_only", "two"));
        assert!(!is_registered("postgres", "on") && !is_registered("postgres", "three"));
        assert!(exists("wake::postgres::an_enqueue_notifies_subscribers"));
        assert!(!exists("wake_paths::postgres::an_enqueue_notifies_subscribers"));
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = all_mutants().map(|mutant| mutant.name).collect();
        names.sort_unstable();
        let all = names.len();
        names.dedup();
        assert_eq!(names.len(), all);
    }

    #[test]
    fn only_the_first_match_after_the_anchor_is_replaced() {
        assert_eq!(mutant("b", "x").apply("x b x x").expect("it applies"), "x b y x");
    }

    #[test]
    fn a_missing_anchor_a_repeated_anchor_and_a_missing_text_are_stale() {
        assert!(mutant("b", "x").apply("x x").is_err_and(|why| why.contains("is gone")));
        assert!(mutant("b", "x").apply("b x b x").is_err_and(|why| why.contains("2 times")));
        assert!(mutant("b", "x").apply("x b").is_err_and(|why| why.contains("`x` does not occur")));
    }

    #[test]
    fn a_text_far_from_its_anchor_is_stale() {
        let near = format!("b{}x", "\n".repeat(MAX_LINES_AFTER_ANCHOR));
        assert!(mutant("b", "x").apply(&near).is_ok());
        let far = format!("b{}x", "\n".repeat(MAX_LINES_AFTER_ANCHOR + 1));
        assert!(mutant("b", "x").apply(&far).is_err());
    }

    #[test]
    fn a_mutant_is_caught_only_if_all_its_cases_fail() {
        let summary = |passed, failed| {
            format!("running 2 tests\n\ntest result: FAILED. {passed} passed; {failed} failed; 0 ignored\n")
        };
        let ended = Some(ExitStatus::from_raw(0));
        assert_eq!(judge(ended, &summary(0, 2), 2), Outcome::Caught);
        assert_eq!(judge(ended, &summary(1, 1), 2), Outcome::Survived);
        assert_eq!(judge(ended, &summary(0, 1), 2), Outcome::Survived, "one case was not run");
        assert_eq!(judge(ended, "running 2 tests\n", 2), Outcome::Crashed);
        assert_eq!(judge(None, &summary(0, 2), 2), Outcome::TimedOut);
    }

    #[test]
    fn outcomes_are_reported_separately() {
        let results = [
            ("one", Outcome::Caught),
            ("two", Outcome::DidNotBuild),
            ("three", Outcome::TimedOut),
            ("four", Outcome::Survived),
            ("five", Outcome::Caught),
        ];
        assert_eq!(totals(&results), "2 caught, 1 SURVIVED, 1 TIMED OUT, 1 DID NOT BUILD");
        assert_eq!(failures(&results), ["SURVIVED: four", "TIMED OUT: three", "DID NOT BUILD: two"]);
    }

    #[test]
    fn words_narrow_the_list_and_unknown_flags_are_refused() {
        let parsed = |line: &str| Options::parse(line.split_whitespace().map(OsString::from).collect());
        let words = vec!["sqlite".to_owned(), "lease".to_owned()];
        assert_eq!(parsed("sqlite --check lease"), Ok(Options { check: true, words }));
        assert_eq!(parsed(""), Ok(Options { check: false, words: Vec::new() }));
        assert!(parsed("--chekc").is_err());
    }
}
