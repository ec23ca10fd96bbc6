//! The test suite and the database it runs on.
//!
//! Test code knows one thing about databases, `LONGSHORE_TEST_DATABASE_URL`;
//! here is where it gets its value.

use std::{env, ffi::OsString, process::Command};

use crate::{
    postgres::{Binaries, Location, TemporaryCluster, Tuning},
    run::{self, Result, cargo, last_step, step},
    schemathesis,
};

const URL_VARIABLE: &str = "LONGSHORE_TEST_DATABASE_URL";

/// `cargo xtask test`.
pub(crate) fn test(args: &[OsString]) -> Result {
    run(Database::find()?, args)
}

/// Runs the suite; what the runner prints is the last that is printed, unless
/// something failed.
pub(crate) fn run(database: Database, args: &[OsString]) -> Result {
    let database = database.open()?;
    let mut done = Vec::new();
    if args.is_empty() {
        // First, so that the suite's summary comes last; but a broken example
        // is no reason to keep the suite's result back.
        done.push(step(
            "doctests",
            cargo(["test", "--doc", "--workspace", "--all-features"]).env(URL_VARIABLE, database.url()),
        ));
        done.push(schemathesis::quickly(&database));
    } else {
        eprintln!("==> doctests and schemathesis: left out, because arguments narrow the run");
    }
    done.push(last_step("tests", runner(args).env(URL_VARIABLE, database.url())));
    let failed: Vec<String> =
        done.into_iter().filter_map(Result::err).map(|error| error.to_string()).collect();
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\nxtask: ").into()) }
}

/// Where the tests' database comes from.
pub(crate) enum Database {
    /// The one in the environment.
    Given(String),
    /// One of our own, not started yet.
    Private(Binaries),
}

impl Database {
    /// Decides, and sees to it that the decision can be carried out.
    pub(crate) fn find() -> Result<Database> {
        match env::var(URL_VARIABLE) {
            Ok(url) if !url.is_empty() => Ok(Database::Given(url)),
            _ => Binaries::find_or_install(URL_VARIABLE).map(Database::Private),
        }
    }

    pub(crate) fn open(self) -> Result<OpenDatabase> {
        match self {
            Database::Given(url) => {
                eprintln!("==> postgres: the one {URL_VARIABLE} names");
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
            "==> tests: cargo-nextest is not installed, so `cargo test` runs them, more slowly \
             (cargo install cargo-nextest --locked)"
        );
        let mut test = cargo(["test", "--no-fail-fast"]);
        if args.is_empty() {
            // Everything but the doctests, which have been run.
            test.args(["--tests", "--examples"]);
        }
        test
    };
    runner.args(selection(args)).args(args);
    runner
}

/// What to select in addition to what `args` select. Cargo would take
/// `--workspace -p longshore` for the whole workspace.
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
    fn a_bare_run_selects_everything() {
        assert_eq!(selected(""), ["--workspace", "--all-features"]);
        assert_eq!(selected("late_settle"), ["--workspace", "--all-features"]);
    }

    #[test]
    fn a_named_package_narrows_the_run() {
        assert_eq!(selected("-p longshore"), ["--all-features"]);
        assert_eq!(selected("--package=longshore"), ["--all-features"]);
    }

    #[test]
    fn named_features_are_the_only_ones() {
        assert_eq!(selected("--features sqlite"), ["--workspace"]);
        assert_eq!(selected("-p longshore --no-default-features"), [""; 0]);
    }

    #[test]
    fn flags_behind_the_dashes_are_the_test_binarys_own() {
        assert_eq!(selected("-- -p"), ["--workspace", "--all-features"]);
    }
}
