//! Longshore's project tasks, run as `cargo xtask <task>`.
//!
//! This file knows the tasks' names and arguments and nothing about how they
//! work: `test`, `ci`, `mutants` and `bench` run cargo, `schemathesis` asks a real
//! server what the API's document makes it ask, `play` keeps a database to play
//! with, and `postgres` is the private cluster under all of them.

mod bench;
mod ci;
mod features;
mod mutants;
mod postgres;
mod python;
mod run;
mod schemathesis;
mod scratch_db;
mod test;
mod time_limit;

use std::{env, ffi::OsString, process::ExitCode};

const HELP: &str = "\
Longshore's project tasks. From a fresh clone, `cargo xtask test` is all it takes.

Usage: cargo xtask <task> [arguments]

  test [args]   Run the doctests, a short `schemathesis`, then the whole suite.
                Arguments go to `cargo nextest run` and narrow the run, which
                then leaves the first two out:
                    cargo xtask test
                    cargo xtask test late_settle
                    cargo xtask test -p longshore --no-capture
  ci            Everything a change has to pass, in the order that fails soonest:
                format, lints, every feature alone, docs, licences, tests.
  schemathesis [--engine sqlite|postgres] [--examples N] [--seed S]
                Requests made up from docs/openapi.json against the real server,
                both engines, at least 2,000 each with all checks, and once more
                without a token. Python 3 gets schemathesis from PyPI, once,
                under target/python.
  mutants [--check] [words]
                Break the code on purpose, one rule at a time in a copy of the
                tree, and verify that the conformance suite fails. Words narrow
                the list by name. --check builds nothing and lists the mutants
                that no longer match the code:
                    cargo xtask mutants sqlite lease
                    cargo xtask mutants --check
  bench [args]  Build the benchmark in release mode and run it:
                    cargo xtask bench -- --help
                `worker --peers` also builds and measures other job queues,
                whose many dependencies stay out of the workspace:
                    cargo xtask bench worker --peers
  pg [verb]     A database to play with, kept under target/pg between runs:
                    start     start it, making it the first time (the default)
                    stop      stop it; the data stays
                    status    say whether it runs, and where
                    url       print its URL and nothing else
                    psql      open psql on it; arguments go to psql
  help          Print this.

Postgres is found on PATH, by pg_config, or where packages put it. Where there is
none, root (or sudo without a password) gets Debian's `postgresql` by apt-get.
`test` and `bench` start a throw-away cluster of their own on a free port and
remove it however they end, so several clones can run at once.

Environment:
  LONGSHORE_TEST_DATABASE_URL   `test` and `ci` use this database instead
  DATABASE_URL                  `bench` uses this database instead
";

/// What was asked for on the command line.
#[derive(Debug, PartialEq)]
enum Task {
    Help,
    Test(Vec<OsString>),
    Ci,
    Schemathesis(schemathesis::Options),
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
    let done = match task {
        Task::Help => {
            print!("{HELP}");
            Ok(())
        }
        Task::Test(args) => test::test(&args),
        Task::Ci => ci::ci(),
        Task::Schemathesis(options) => schemathesis::schemathesis(&options),
        Task::Mutants(options) => mutants::mutants(&options),
        Task::Bench(args) => bench::bench(&args),
        Task::Pg(action) => scratch_db::run(action),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut args: Vec<OsString>) -> Result<Task, String> {
    if args.is_empty() {
        return Err("which task?".into());
    }
    let task = args.remove(0);
    let wants_help = |arg: &OsString| arg == "--help" || arg == "-h";
    if task == "help" || wants_help(&task) || args.first().is_some_and(wants_help) {
        return Ok(Task::Help);
    }
    match task.to_string_lossy().as_ref() {
        "test" => Ok(Task::Test(args)),
        "ci" if args.is_empty() => Ok(Task::Ci),
        "ci" => Err("`ci` takes no arguments; to narrow a run use `test`".into()),
        "schemathesis" => schemathesis::Options::parse(args).map(Task::Schemathesis),
        "mutants" => mutants::Options::parse(args).map(Task::Mutants),
        "bench" => {
            // `cargo xtask bench -- --help` reads as it would with cargo; the
            // dashes are ours, not the benchmark's.
            if args.first().is_some_and(|arg| arg == "--") {
                args.remove(0);
            }
            Ok(Task::Bench(args))
        }
        "pg" => scratch_db::Action::parse(args).map(Task::Pg),
        other => Err(format!("there is no task `{other}`")),
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
    fn test_hands_its_arguments_on_untouched() {
        assert_eq!(parsed("test late_settle -- --exact"), Ok(Task::Test(words("late_settle -- --exact"))));
    }

    #[test]
    fn bench_takes_the_leading_dashes_off() {
        assert_eq!(
            parsed("bench -- --help"),
            Ok(Task::Bench(words("--help"))),
            "the benchmark's own help stays reachable"
        );
        assert_eq!(parsed("bench claim --jobs 7"), Ok(Task::Bench(words("claim --jobs 7"))));
    }

    #[test]
    fn help_is_found_wherever_one_would_look_for_it() {
        for line in ["help", "--help", "-h", "test --help", "ci -h", "pg --help"] {
            assert_eq!(parsed(line), Ok(Task::Help), "{line}");
        }
    }

    #[test]
    fn an_unknown_task_is_named_in_the_refusal() {
        assert_eq!(parsed("tset"), Err("there is no task `tset`".into()));
        assert!(parsed("").is_err());
    }

    #[test]
    fn ci_refuses_arguments_it_would_not_heed() {
        assert!(parsed("ci late_settle").is_err());
    }

    #[test]
    fn pg_without_a_verb_starts_the_database() {
        assert_eq!(parsed("pg"), Ok(Task::Pg(scratch_db::Action::Start)));
        assert_eq!(parsed("pg psql -c select"), Ok(Task::Pg(scratch_db::Action::Psql(words("-c select")))));
        assert!(parsed("pg strat").is_err());
        assert!(parsed("pg stop now").is_err());
    }
}
