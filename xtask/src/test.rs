//! `cargo xtask test`: runs the tests, and provides the database they run on.
//!
//! Tests find the database through `LONGSHORE_TEST_DATABASE_URL`, which is set here.

use std::{env, ffi::OsString, process::Command};

use crate::{
    browser, clients, pgbouncer,
    postgres::{Binaries, Location, TemporaryCluster, Tuning},
    run::{self, Result, cargo, last_step, step},
    schemathesis, sdks,
};

const URL_VARIABLE: &str = "LONGSHORE_TEST_DATABASE_URL";

/// `cargo xtask test`.
pub(crate) fn test(args: &[OsString]) -> Result {
    run(Database::find()?, args)
}

/// Runs the tests. The summary of the test runner is printed last, unless a step
/// failed.
pub(crate) fn run(database: Database, args: &[OsString]) -> Result {
    pgbouncer::install_if_missing();
    let database = database.open()?;
    let mut results = Vec::new();
    if args.is_empty() {
        // The doctests run first, so that the summary of the tests comes last. If
        // they fail, the tests run all the same.
        results.push(step(
            "doctests",
            cargo(["test", "--doc", "--workspace", "--all-features"]).env(URL_VARIABLE, database.url()),
        ));
        results.push(schemathesis::quick(&database));
        results.push(clients::quick());
        results.push(browser::quick(&database));
        results.push(sdks::quick(&database));
    } else {
        eprintln!(
            "==> doctests, schemathesis, clients, browser and sdks: SKIPPED, because arguments narrow the run"
        );
    }
    results.push(last_step("tests", runner(args).env(URL_VARIABLE, database.url())));
    let failed: Vec<String> =
        results.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\nxtask: ").into()) }
}

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
    let mut runner = if run::succeeds(&mut cargo(["nextest", "--version"])) {
        cargo(["nextest", "run", "--no-fail-fast"])
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
