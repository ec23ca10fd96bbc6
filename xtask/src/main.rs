//! Longshore's project tasks, run as `cargo xtask <task>`.
//!
//! This file parses the command line and dispatches to one module per task.
//! `postgres` and `run` are shared by all of them.

mod bench;
mod browser;
mod ci;
mod clients;
mod debian;
mod features;
mod licences;
mod mutants;
mod nextest;
mod npm;
mod older_sqlx;
mod postgres;
mod python;
mod run;
mod schemathesis;
mod scratch_db;
mod sdks;
mod server;
mod steps;
mod suites;
mod test;
mod time_limit;
mod tools;

use std::{env, ffi::OsString, process::ExitCode};

const HELP: &str = "\
Longshore's project tasks. In a fresh clone, `cargo xtask test` runs all tests.

Usage: cargo xtask <task> [arguments]

  quick         Check the format and the types, and run the unit tests and the
                conformance cases on SQLite. Needs no Postgres, network or browser.
  test [args]   Run all tests: the Rust tests, and at the same time a short
                `schemathesis`, `clients`, `browser` and `sdks`. Ends with the time of
                each step, the slowest tests and what did not run. Arguments go to
                `cargo nextest run` and narrow the run to Rust tests:
                    cargo xtask test
                    cargo xtask test late_settle
                    cargo xtask test -p longshore --no-capture
  ci            Run every check that a change must pass: format, lints, each
                feature alone, docs, older versions of sqlx, licences, tests.
  schemathesis [--engine sqlite|postgres|both] [--short] [--examples N] [--seed S]
                Send requests generated from docs/openapi.json to the real server
                on both engines: at least 2,000 per engine with all checks, then
                some without a token. --short sends at least 500. Installs schemathesis
                from PyPI into target/python the first time.
  clients       Validate docs/openapi.json, generate a Python client and TypeScript
                types from it, check their types, and use them to enqueue, list,
                lease and settle jobs on the real server. Installs the generators
                from PyPI and npm into target the first time.
  browser [--engine sqlite|postgres|both] [--only TEXT] [--screenshots]
                Test the dashboard in headless Chromium on both engines. --only runs
                the tests whose names contain a text. --screenshots tests nothing and
                writes pictures of every page to docs/images/dashboard. Installs
                playwright-core and axe-core from npm into target the first time.
  sdks [python] [typescript]
                Check the SDKs: lints, types, wire types against docs/openapi.json,
                their tests on the real server with both engines, and an installation
                of the wheel and the npm packages into empty environments. Installs
                packages from PyPI and npm the first time.
  mutants [--check] [words]
                Break the code on purpose, one rule at a time in a copy of the
                tree, and verify that the conformance suite fails. The list is
                in xtask/mutants; words narrow it by name. --check builds
                nothing and lists the mutants that no longer match the code:
                    cargo xtask mutants sqlite lease
                    cargo xtask mutants --check
  bench [args]  Build the benchmark in release mode and run it:
                    cargo xtask bench -- --help
                `worker --peers` also builds and measures other job queues. They
                are outside the workspace because of their many dependencies:
                    cargo xtask bench worker --peers
  pg [action]   Manage a scratch database that is kept in target/pg:
                    start     start it, creating it the first time (the default)
                    stop      stop it and keep its data
                    status    print whether it is running, and its URL
                    url       print only its URL
                    psql      open psql on it; arguments go to psql
  help          Print this help.

Postgres is looked up on PATH, with pg_config, and where packages install it. If
it or another program is missing (Python 3.11, Node.js 20, Chromium, PgBouncer and
small ones) and apt-get can be used (as root, or with sudo without a password),
Debian's package is installed. `test` and `bench` start a temporary cluster on a free
port and remove it when they end, even if they are killed. Several clones can
therefore run at once.

Environment:
  LONGSHORE_TEST_DATABASE_URL   database for `test`, `ci`, `mutants`, `browser` and
                                `schemathesis` instead of a temporary cluster
  LONGSHORE_BIN                 server for `schemathesis`, `clients`, `browser` and
                                `sdks` instead of one that they build
  LONGSHORE_TEST_POSTGRES       `smoke` runs only a part of `browser` and `sdks` on
                                Postgres, as `test` and `ci` do; default: `full`
  CI=true                       fail if a program is missing, instead of running the
                                rest and listing what did not run
  LONGSHORE_CHROMIUM            browser for `test`, `ci` and `browser` instead of
                                the one on PATH
  DATABASE_URL                  database for `bench` instead of a temporary
                                cluster
";

/// What was requested on the command line.
#[derive(Debug, PartialEq)]
enum Task {
    Help,
    Quick,
    Test(Vec<OsString>),
    Ci,
    Schemathesis(schemathesis::Options),
    Clients,
    Browser(browser::Options),
    Sdks(sdks::Options),
    Mutants(mutants::Options),
    Bench(Vec<OsString>),
    Pg(scratch_db::Action),
}

fn main() -> ExitCode {
    let task = match parse(env::args_os().skip(1).collect()) {
        Ok(task) => task,
        Err(problem) => {
            eprintln!("xtask: {problem}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    let result = match task {
        Task::Help => {
            print!("{HELP}");
            Ok(())
        }
        Task::Quick => test::quick(),
        Task::Test(args) => test::test(&args),
        Task::Ci => ci::ci(),
        Task::Schemathesis(options) => schemathesis::schemathesis(&options),
        Task::Clients => clients::clients(),
        Task::Browser(options) => browser::browser(&options),
        Task::Sdks(options) => sdks::sdks(&options),
        Task::Mutants(options) => mutants::mutants(&options),
        Task::Bench(args) => bench::bench(&args),
        Task::Pg(action) => scratch_db::run(action),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            if error.is::<run::Unavailable>() {
                ExitCode::from(suites::UNAVAILABLE)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}

fn parse(mut args: Vec<OsString>) -> Result<Task, String> {
    if args.is_empty() {
        return Err("no task was given".into());
    }
    let task = args.remove(0);
    let wants_help = |arg: &OsString| arg == "--help" || arg == "-h";
    if task == "help" || wants_help(&task) || args.first().is_some_and(wants_help) {
        return Ok(Task::Help);
    }
    match task.to_string_lossy().as_ref() {
        "quick" if args.is_empty() => Ok(Task::Quick),
        "quick" => Err("`quick` takes no arguments; use `test` to run only some tests".into()),
        "test" => Ok(Task::Test(args)),
        "ci" if args.is_empty() => Ok(Task::Ci),
        "ci" => Err("`ci` takes no arguments; use `test` to run only some tests".into()),
        "schemathesis" => schemathesis::Options::parse(args).map(Task::Schemathesis),
        "clients" if args.is_empty() => Ok(Task::Clients),
        "clients" => Err("`clients` takes no arguments".into()),
        "browser" => browser::Options::parse(args).map(Task::Browser),
        "sdks" => sdks::Options::parse(args).map(Task::Sdks),
        "mutants" => mutants::Options::parse(args).map(Task::Mutants),
        "bench" => {
            // `cargo xtask bench -- --help` works as with cargo: the dashes are not
            // passed on to the benchmark.
            if args.first().is_some_and(|arg| arg == "--") {
                args.remove(0);
            }
            Ok(Task::Bench(args))
        }
        "pg" => scratch_db::Action::parse(args).map(Task::Pg),
        other => Err(format!("unknown task `{other}`")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Task, String> {
        parse(line.split_whitespace().map(OsString::from).collect())
    }

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    #[test]
    fn test_passes_its_arguments_on_unchanged() {
        assert_eq!(parsed("test late_settle -- --exact"), Ok(Task::Test(words("late_settle -- --exact"))));
    }

    #[test]
    fn bench_removes_the_leading_dashes() {
        assert_eq!(
            parsed("bench -- --help"),
            Ok(Task::Bench(words("--help"))),
            "the benchmark prints its own help"
        );
        assert_eq!(parsed("bench worker --only w1"), Ok(Task::Bench(words("worker --only w1"))));
    }

    #[test]
    fn help_works_as_a_task_and_as_a_flag() {
        for line in ["help", "--help", "-h", "test --help", "ci -h", "pg --help"] {
            assert_eq!(parsed(line), Ok(Task::Help), "{line}");
        }
    }

    #[test]
    fn the_error_names_an_unknown_task() {
        assert_eq!(parsed("tset"), Err("unknown task `tset`".into()));
        assert!(parsed("").is_err());
    }

    #[test]
    fn ci_refuses_arguments() {
        assert!(parsed("ci late_settle").is_err());
    }

    #[test]
    fn pg_without_an_action_starts_the_database() {
        assert_eq!(parsed("pg"), Ok(Task::Pg(scratch_db::Action::Start)));
        assert_eq!(parsed("pg psql -c select"), Ok(Task::Pg(scratch_db::Action::Psql(words("-c select")))));
        assert!(parsed("pg strat").is_err());
        assert!(parsed("pg stop now").is_err());
    }
}
