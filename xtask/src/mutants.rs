//! `cargo xtask mutants`: checks that the conformance suite fails when a rule is
//! broken on purpose.
//!
//! Each mutant is one small bug in a rule, an engine or the API, together with the
//! test cases that must fail because of it. They are listed in `xtask/mutants`. The suite
//! is built once, in a copy of the tree under `target/mutants` that contains all mutants
//! behind switches, and then runs for each mutant with its switch on. The task fails if a
//! mutant survives, hangs, does not build, is not reached or no longer matches the code.
//!
//! `cargo xtask mutants --check` builds nothing: it only lists the mutants whose
//! search text or test cases no longer exist.
//!
//! | Module | Owns |
//! |---|---|
//! | `list` | reading the list |
//! | `switch`, `runtime` | putting all mutants into one copy of the library; turning one on |
//! | `lab` | the copy of the tree, its build, and runs of its tests |
//! | `cases` | the named test cases, and what their results say about a mutant |

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    path::PathBuf,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

mod cases;
mod lab;
mod list;
#[expect(dead_code, reason = "most of it is called only in the copy of the library")]
mod runtime;
mod switch;

use crate::{
    run::{Result, took, workspace},
    test::Database,
    tools::Missing,
};
use cases::Outcome;
use lab::{Ended, LIBRARY, Lab, Suite};
use list::Mutant;
use switch::Site;

/// Tests wait most of the time, so each core runs several of them.
const RUNS_PER_CORE: usize = 4;

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
    let mutants = list::read(&folder())?;
    let chosen: Vec<usize> = (0..mutants.len()).filter(|n| options.selects(&mutants[*n])).collect();
    if chosen.is_empty() {
        return Err(format!("no mutant's name contains `{}`", options.words.join(" ")).into());
    }
    if options.check { check(&mutants, &chosen) } else { run(&mutants, &chosen) }
}

/// Where the list is.
fn folder() -> PathBuf {
    workspace().join("xtask/mutants")
}

/// Lists every mutant that no longer matches the code or the test cases.
fn check(mutants: &[Mutant], chosen: &[usize]) -> Result {
    let problems: Vec<String> = chosen
        .iter()
        .filter_map(|n| Some(failure(&mutants[*n], Outcome::Stale, &stale(&mutants[*n])?)))
        .collect();
    if problems.is_empty() {
        eprintln!("==> mutants: all {} match the code", chosen.len());
        return Ok(());
    }
    Err(format!("{} mutants do not match the code:\n  {}", problems.len(), problems.join("\n  ")).into())
}

/// Why a mutant does not match the code or the test cases.
fn stale(mutant: &Mutant) -> Option<String> {
    let file = workspace().join(LIBRARY).join(&mutant.file);
    let site = fs::read_to_string(file)
        .map_err(|error| error.to_string())
        .and_then(|text| Site::find(mutant, &text));
    if let Err(problem) = site {
        return Some(format!("{}: {problem}", mutant.file));
    }
    let missing = mutant.caught_by.iter().find(|case| !cases::exists(case))?;
    Some(format!("there is no test case `{missing}`"))
}

/// Builds all mutants and tests the chosen ones.
fn run(mutants: &[Mutant], chosen: &[usize]) -> Result {
    Missing::after_installing()?;
    let database = Database::find()?.open()?;
    let mut results = Vec::new();
    // All mutants are built, so that the next run with other words has to build nothing.
    let mut live: BTreeSet<usize> = (0..mutants.len()).collect();
    for (n, mutant) in mutants.iter().enumerate() {
        if let Some(problem) = stale(mutant) {
            live.remove(&n);
            results.push(Judged { mutant: n, outcome: Outcome::Stale, details: problem });
        }
    }
    let started = Instant::now();
    let suite = loop {
        eprintln!("==> mutants: building {} of them", live.len());
        let files = switch::switch_all(&workspace().join(LIBRARY), live.iter().map(|n| (*n, &mutants[*n])))?;
        match Lab::new().build(&files, database.url())? {
            Ok(suite) => break suite,
            Err(errors) => {
                for (n, error) in errors {
                    eprintln!("    {}: {error}", mutants[n].name);
                    live.remove(&n);
                    results.push(Judged { mutant: n, outcome: Outcome::DidNotBuild, details: error });
                }
            }
        }
    };
    eprintln!("    built in {}", took(started.elapsed()));
    results.retain(|judged| chosen.contains(&judged.mutant));
    let ready: Vec<usize> = chosen.iter().copied().filter(|n| live.contains(n)).collect();
    check_cases(&suite, ready.iter().flat_map(|n| &mutants[*n].caught_by))?;
    results.extend(test_all(&suite, mutants, &ready)?);
    eprintln!("==> mutants: {}, {}", totals(&results), took(started.elapsed()));
    let failures = failures(mutants, &results);
    if failures.is_empty() {
        return Ok(());
    }
    Err(format!("not caught by the conformance suite:\n  {}", failures.join("\n  ")).into())
}

/// Checks that the cases pass while no mutant is on, as many at a time as later with mutants.
/// Otherwise their failures would prove nothing.
fn check_cases<'c>(suite: &Suite, cases: impl Iterator<Item = &'c String>) -> Result {
    let cases: BTreeSet<&String> = cases.collect();
    eprintln!("==> mutants: running {} cases without a mutant", cases.len());
    let started = Instant::now();
    let runs: Vec<Run<'_>> = cases.into_iter().map(|case| Run { mutant: None, case }).collect();
    let ended = run_all(suite, &runs, &|_, _, _| {})?;
    let failed = runs.iter().zip(ended).filter(|(_, ended)| *ended != Ended::Passed);
    let failed: Vec<String> = failed.map(|(run, ended)| format!("{}: {ended:?}", run.case)).collect();
    if failed.is_empty() {
        eprintln!("    passed in {}", took(started.elapsed()));
        return Ok(());
    }
    Err(format!("these cases do not pass without a mutant:\n  {}", failed.join("\n  ")).into())
}

/// What became of one mutant.
struct Judged {
    mutant: usize,
    outcome: Outcome,
    details: String,
}

/// Tests the mutants.
fn test_all(suite: &Suite, mutants: &[Mutant], ready: &[usize]) -> Result<Vec<Judged>> {
    let runs_of = |n: &usize| {
        let mutant = Some(*n);
        mutants[*n].caught_by.iter().map(move |case| Run { mutant, case })
    };
    let runs: Vec<Run<'_>> = ready.iter().flat_map(runs_of).collect();
    // The results and the total time of each mutant whose cases have not all ended.
    let open: Mutex<BTreeMap<usize, (Vec<Ended>, Duration)>> = Mutex::default();
    let done = AtomicUsize::new(0);
    let report = |run: &Run<'_>, ended: Ended, duration: Duration| {
        let Some(mutant) = run.mutant else { return };
        let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
        let (cases, time) = open.entry(mutant).or_default();
        cases.push(ended);
        *time += duration;
        let Mutant { name, caught_by, .. } = &mutants[mutant];
        if cases.len() == caught_by.len() {
            let (n, outcome, time) =
                (1 + done.fetch_add(1, Ordering::Relaxed), Outcome::of(cases), took(*time));
            eprintln!("    {n}/{} {name}: {outcome}, {time}", ready.len());
        }
    };
    let mut ended = run_all(suite, &runs, &report)?;
    // Whether a race is lost depends on the speed of the machine. The last result counts.
    for (run, ended) in runs.iter().zip(&mut ended).filter(|(_, ended)| **ended != Ended::Failed) {
        eprintln!("    {ended:?}, so it runs again, alone: {}", run.case);
        *ended = suite.run(0, run.mutant, run.case)?;
    }
    let judge = |n: &usize| {
        let own = || runs.iter().zip(&ended).filter(|(run, _)| run.mutant == Some(*n));
        let outcome = Outcome::of(&own().map(|(_, ended)| *ended).collect::<Vec<_>>());
        let others = own().filter(|(_, ended)| **ended != Ended::Failed);
        let details: Vec<String> = others.map(|(run, ended)| format!("{ended:?}: {}", run.case)).collect();
        Judged { mutant: *n, outcome, details: details.join("\n      ") }
    };
    Ok(ready.iter().map(judge).collect())
}

/// A test case with at most one mutant on.
struct Run<'m> {
    mutant: Option<usize>,
    case: &'m str,
}

/// Runs test cases, several at a time.
fn run_all(
    suite: &Suite,
    runs: &[Run<'_>],
    report: &(dyn Fn(&Run<'_>, Ended, Duration) + Sync),
) -> Result<Vec<Ended>> {
    let next = AtomicUsize::new(0);
    let work = |slot: usize| -> Result<Vec<(usize, Ended)>, String> {
        let mut results = Vec::new();
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(run) = runs.get(n) else { return Ok(results) };
            let started = Instant::now();
            let ended = suite.run(slot, run.mutant, run.case).map_err(|error| error.to_string())?;
            report(run, ended, started.elapsed());
            results.push((n, ended));
        }
    };
    let slots = RUNS_PER_CORE * thread::available_parallelism().map_or(1, usize::from);
    let results: Result<Vec<Vec<_>>, String> = thread::scope(|scope| {
        let slots: Vec<_> = (0..slots).map(|slot| scope.spawn(move || work(slot))).collect();
        slots
            .into_iter()
            .map(|slot| slot.join().unwrap_or_else(|_| Err("a thread panicked".into())))
            .collect()
    });
    let ended: BTreeMap<usize, Ended> = results?.into_iter().flatten().collect();
    Ok(ended.into_values().collect())
}

/// How many mutants had each outcome, such as `3 caught, 1 TIMED OUT`.
fn totals(results: &[Judged]) -> String {
    let count = |outcome| results.iter().filter(|judged| judged.outcome == outcome).count();
    let totals = Outcome::ALL.into_iter().map(|outcome| (count(outcome), outcome));
    let lines: Vec<String> =
        totals.filter(|(n, _)| *n > 0).map(|(n, outcome)| format!("{n} {outcome}")).collect();
    lines.join(", ")
}

/// The mutants that were not caught, grouped by outcome.
fn failures(mutants: &[Mutant], results: &[Judged]) -> Vec<String> {
    let uncaught = Outcome::ALL.into_iter().filter(|outcome| *outcome != Outcome::Caught);
    uncaught
        .flat_map(|outcome| results.iter().filter(move |judged| judged.outcome == outcome))
        .map(|judged| failure(&mutants[judged.mutant], judged.outcome, &judged.details))
        .collect()
}

fn failure(mutant: &Mutant, outcome: Outcome, details: &str) -> String {
    let details = if details.is_empty() { String::new() } else { format!("\n      {}", details.trim_end()) };
    format!("{outcome}: {} ({}){details}", mutant.name, mutant.listed_at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutant_matches_the_code_and_the_test_cases() {
        let mutants = list::read(&folder()).expect("the list is valid");
        assert!(!mutants.is_empty());
        let problems: Vec<String> = mutants
            .iter()
            .filter_map(|mutant| Some(failure(mutant, Outcome::Stale, &stale(mutant)?)))
            .collect();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    #[test]
    fn every_mutant_can_be_switched_and_no_two_are_the_same_bug() {
        let mutants = list::read(&folder()).expect("the list is valid");
        let library = workspace().join(LIBRARY);
        let files = switch::switch_all(&library, mutants.iter().enumerate()).expect("all are switched");
        assert!(files.len() > 2, "the library has files with mutants");

        let mut bugs = BTreeSet::new();
        for mutant in &mutants {
            let text = fs::read_to_string(library.join(&mutant.file)).expect("the file exists");
            let range = Site::find(mutant, &text).unwrap_or_else(|problem| panic!("{problem}")).range;
            let mutated = format!("{}{}{}", &text[..range.start], mutant.replace, &text[range.end..]);
            assert!(bugs.insert((&mutant.file, mutated)), "{} exists twice", mutant.name);
        }
    }

    #[test]
    fn outcomes_are_reported_separately() {
        let named = |name: &str| Mutant { name: name.into(), listed_at: "l:1".into(), ..Mutant::default() };
        let mutants: Vec<Mutant> = ["one", "two", "three", "four", "five"].map(named).into();
        let outcomes =
            [Outcome::Caught, Outcome::DidNotBuild, Outcome::TimedOut, Outcome::Survived, Outcome::Caught];
        let results: Vec<Judged> = (0..5)
            .map(|mutant| Judged { mutant, outcome: outcomes[mutant], details: "why\n".into() })
            .collect();
        assert_eq!(totals(&results), "2 caught, 1 SURVIVED, 1 TIMED OUT, 1 DID NOT BUILD");
        assert_eq!(
            failures(&mutants, &results),
            [
                "SURVIVED: four (l:1)\n      why",
                "TIMED OUT: three (l:1)\n      why",
                "DID NOT BUILD: two (l:1)\n      why"
            ]
        );
    }

    #[test]
    fn words_narrow_the_list_and_unknown_flags_are_refused() {
        let parsed = |line: &str| Options::parse(line.split_whitespace().map(OsString::from).collect());
        let words = vec!["sqlite".to_owned(), "lease".to_owned()];
        assert_eq!(parsed("sqlite --check lease"), Ok(Options { check: true, words }));
        assert_eq!(parsed(""), Ok(Options { check: false, words: Vec::new() }));
        assert!(parsed("--chekc").is_err());
        let options = parsed("sqlite lease").expect("words");
        let named = |name: &str| Mutant { name: name.into(), ..Mutant::default() };
        assert!(options.selects(&named("sqlite: ignore the lease")));
        assert!(!options.selects(&named("sqlite: ignore the worker")));
    }
}
