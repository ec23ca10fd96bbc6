//! `cargo xtask test`: runs all tests, and provides the database they run on. `cargo xtask quick`:
//! runs the tests that need nothing but cargo.
//!
//! Tests find the database through `LONGSHORE_TEST_DATABASE_URL`, which is set here.

use std::{env, ffi::OsString, process::Command};

use crate::{
    nextest,
    postgres::{Binaries, Location, TemporaryCluster, Tuning},
    run::{Result, cargo, last_step},
    server,
    steps::Steps,
    suites::Suites,
    tools::Missing,
};

pub(crate) const URL_VARIABLE: &str = "LONGSHORE_TEST_DATABASE_URL";

/// How many of the slowest tests the report lists.
const SLOWEST: usize = 30;

/// `cargo xtask test`.
pub(crate) fn test(args: &[OsString]) -> Result {
    if !args.is_empty() {
        return narrowed(args);
    }
    let missing = Missing::after_installing()?;
    let database = Database::find()?;
    let mut steps = Steps::new();
    Tests::begin(missing, database, &mut steps)?.finish(steps)
}

/// Runs only the Rust tests that the arguments select.
fn narrowed(args: &[OsString]) -> Result {
    let database = Database::find()?.open()?;
    eprintln!(
        "==> doctests, schemathesis, clients, browser and sdks: do not run, because arguments narrow the run"
    );
    last_step("tests", runner(args).env(URL_VARIABLE, database.url()))
}

/// The whole suite, in progress: the server is built, the database is open, and the suites that
/// test the server from outside are running.
pub(crate) struct Tests {
    // Stopped before the database is.
    suites: Suites,
    database: OpenDatabase,
}

impl Tests {
    pub(crate) fn begin(missing: Missing, database: Database, steps: &mut Steps) -> Result<Tests> {
        for (tests, reason) in missing.tests() {
            steps.leave_out(tests, &reason);
        }
        steps.run("build server", &mut server::build_command())?;
        let database = database.open()?;
        Ok(Tests { suites: Suites::start(&missing, &database, steps)?, database })
    }

    /// Runs the Rust tests and waits for the rest. The report about the run stands above the
    /// summary of the test runner, which is printed last.
    pub(crate) fn finish(self, mut steps: Steps) -> Result {
        let url = self.database.url();
        let mut failures = Vec::new();
        // If a step fails, the others run all the same.
        let doctests = &mut cargo(["test", "--doc", "--workspace", "--all-features"]);
        failures.extend(failure(steps.run("doctests", doctests.env(URL_VARIABLE, url))));
        let has_nextest = nextest::is_installed();
        let mut build =
            if has_nextest { cargo(["nextest", "run", "--no-run"]) } else { cargo(["test", "--no-run"]) };
        failures.extend(failure(steps.run("build tests", build.args(selection(&[])))));
        let tests = &mut runner(&[]);
        tests.env(URL_VARIABLE, url);
        if has_nextest {
            let ended = steps.time("tests", || nextest::run("tests", tests))?;
            let slowest = ended.slowest(SLOWEST);
            failures.extend(failure(ended.result));
            failures.extend(self.suites.collect(&mut steps));
            eprint!("{}{}", steps.report(&slowest, &failures), ended.summary);
        } else {
            // `cargo test` does not print the times of the tests.
            failures.extend(self.suites.collect(&mut steps));
            eprint!("{}", steps.report(&[], &failures));
            failures.extend(failure(last_step("tests", tests)));
        }
        if failures.is_empty() { Ok(()) } else { Err(failures.join("\nxtask: ").into()) }
    }
}

fn failure(result: Result) -> Option<String> {
    result.err().map(|error| error.to_string())
}

/// `cargo xtask quick`: format, types, unit tests and the conformance cases on SQLite.
pub(crate) fn quick() -> Result {
    let mut steps = Steps::new();
    steps.leave_out("Postgres, the command, the browser and the SDKs", "run `cargo xtask test` for them");
    steps.run("format", &mut cargo(["fmt", "--all", "--check"]))?;
    steps.run("check", &mut cargo(["check", "--workspace", "--all-features"]))?;
    let targets = ["--workspace", "--all-features", "--lib", "--bins", "--test", "conformance"];
    if nextest::is_installed() {
        let mut tests = nextest::command();
        tests.args(["--filterset", QUICK_TESTS]).args(targets);
        let ended = steps.time("tests", || nextest::run("tests", &mut tests))?;
        let failures: Vec<String> =
            ended.result.as_ref().err().into_iter().map(ToString::to_string).collect();
        eprint!("{}{}", steps.report(&ended.slowest(5), &failures), ended.summary);
        return ended.result;
    }
    let mut tests = cargo(["test", "--no-fail-fast"]);
    last_step("tests", tests.args(targets).args(["--", "--skip", "::postgres"]))
}

/// All tests except those on Postgres. The unit tests of its engine need no database.
const QUICK_TESTS: &str = "not test(/::postgres(_only)?::/) or test(/^store::postgres::/)";

/// The source of the database for the tests.
pub(crate) enum Database {
    /// The database that the environment variable names.
    Given(String),
    /// A temporary cluster, not started yet.
    Private(Binaries),
}

impl Database {
    /// Chooses the source. Finds or installs Postgres if a cluster is needed.
    pub(crate) fn find() -> Result<Database> {
        match env::var(URL_VARIABLE) {
            Ok(url) if !url.is_empty() => Ok(Database::Given(url)),
            _ => Binaries::find_or_install(URL_VARIABLE).map(Database::Private),
        }
    }

    pub(crate) fn open(self) -> Result<OpenDatabase> {
        match self {
            Database::Given(url) => {
                eprintln!("==> postgres: using the database in {URL_VARIABLE}");
                Ok(OpenDatabase::Given(url))
            }
            Database::Private(binaries) => {
                TemporaryCluster::start(binaries, Tuning::Fast, Location::TempDir).map(OpenDatabase::Private)
            }
        }
    }
}

/// A database that accepts connections until it is dropped.
pub(crate) enum OpenDatabase {
    Given(String),
    Private(TemporaryCluster),
}

impl OpenDatabase {
    pub(crate) fn url(&self) -> &str {
        match self {
            OpenDatabase::Given(url) => url,
            OpenDatabase::Private(cluster) => cluster.url(),
        }
    }
}

fn runner(args: &[OsString]) -> Command {
    let mut runner = if nextest::is_installed() {
        nextest::command()
    } else {
        eprintln!(
            "==> tests: cargo-nextest is not installed; using `cargo test`, which is slower \
             (cargo install cargo-nextest --locked)"
        );
        let mut test = cargo(["test", "--no-fail-fast"]);
        if args.is_empty() {
            // Everything except the doctests, which ran before.
            test.args(["--tests", "--examples"]);
        }
        test
    };
    runner.args(selection(args)).args(args);
    runner
}

/// The defaults for what `args` do not select. `--workspace` must not be added to
/// `-p longshore`: cargo would then run the whole workspace.
fn selection(args: &[OsString]) -> Vec<&'static str> {
    let given = |flags: &[&str]| {
        args.iter().map(|arg| arg.to_string_lossy()).take_while(|arg| arg != "--").any(|arg| {
            let flag = arg.split('=').next().unwrap_or_default();
            flags.contains(&flag)
        })
    };
    let mut selection = Vec::new();
    if !given(&["-p", "--package", "--workspace"]) {
        selection.push("--workspace");
    }
    if !given(&["-F", "--features", "--no-default-features", "--all-features"]) {
        selection.push("--all-features");
    }
    selection
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(line: &str) -> Vec<&'static str> {
        let args: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        selection(&args)
    }

    #[test]
    fn a_run_without_selection_covers_everything() {
        assert_eq!(selected(""), ["--workspace", "--all-features"]);
        assert_eq!(selected("late_settle"), ["--workspace", "--all-features"]);
    }

    #[test]
    fn a_named_package_narrows_the_run() {
        assert_eq!(selected("-p longshore"), ["--all-features"]);
        assert_eq!(selected("--package=longshore"), ["--all-features"]);
    }

    #[test]
    fn named_features_replace_all_features() {
        assert_eq!(selected("--features sqlite"), ["--workspace"]);
        assert_eq!(selected("-p longshore --no-default-features"), [""; 0]);
    }

    #[test]
    fn flags_after_the_dashes_select_nothing() {
        assert_eq!(selected("-- -p"), ["--workspace", "--all-features"]);
    }
}
