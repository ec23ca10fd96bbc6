//! The command line: what can be typed, and how each value is read. Owns no
//! behaviour; that is in [`commands`](crate::commands).

mod api;
mod builtin;
mod bulk;
mod config;
mod cron;
mod dead;
mod enqueue;
mod jobs;
mod operate;
mod serve;
mod target;
mod tokens;
mod worker;

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::duration;

pub(crate) use api::{ApiCommand, BenchArgs};
pub(crate) use bulk::{BulkArgs, Confirm, Filter};
pub(crate) use config::{Config, Show, Shown};
pub(crate) use cron::{Cron, CronAdd};
pub(crate) use dead::{Dead, DeadList, Purge, Redrive};
pub(crate) use enqueue::{Enqueue, EnqueueMany, WhenArgs};
pub(crate) use jobs::{Edit, Jobs, List, PageArgs};
pub(crate) use operate::{Kinds, PutKind, Queues, Stats, Sweep, Workers};
pub(crate) use serve::{Auth, Dev, Listen, Public, Serve};
pub(crate) use target::{Target, TargetArgs};
pub(crate) use tokens::{CreateToken, Tokens};
pub(crate) use worker::{LogFormat, Logging, Work, Worker};

/// Enqueue jobs, run them and operate a Longshore queue.
#[derive(Debug, Parser)]
#[command(
    name = "longshore",
    version,
    max_term_width = 100,
    after_long_help = "\
Examples:
  export DATABASE_URL=sqlite:./jobs.db
  longshore migrate
  longshore enqueue summarize_text --payload '{\"text\":\"Ships come in. Ships go out.\"}'
  longshore jobs list --status queued
  longshore worker

  export LONGSHORE_SERVER=http://127.0.0.1:8080 LONGSHORE_TOKEN=longshore_…
  longshore jobs list                  # the same by a server's API

Settings are flags, variables or keys of a configuration file, longshore.toml; the
first of them wins. `longshore config show` prints all, and where each comes from.

Exit codes:
  0  done
  1  something is wrong: `check` found a problem, `migrate --check` a pending
     migration, or the command failed for a reason that has no code of its own
  2  usage: the command line, or a value in it, cannot be right
  3  not found: no such job, schedule or kind
  4  conflict: the job exists, but its state forbids this
  5  unavailable: the database or the server does not answer, or the database
     takes no writes; try again
  6  schema: the tables are missing or too old (run `longshore migrate`), or
     newer than this program
  7  denied: the server asks for a token, or for one that may do this
  8  ended otherwise: the job that `enqueue --wait` waited for failed for good or
     was cancelled
  9  not ended: the time of `enqueue --wait=TIME` was over first; the job goes on
With several ids, each is tried, and the first failure decides the code."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// The configuration file [default: ./longshore.toml, else /etc/longshore/longshore.toml]; '' for none
    // Not a path: clap would refuse an empty one.
    #[arg(
        long,
        global = true,
        env = "LONGSHORE_CONFIG",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    pub(crate) config: Option<OsString>,

    /// Answer with one JSON document instead of text for people
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run everything in one process, with nothing to install
    ///
    /// The API, upkeep and a worker with the built-in kinds, on an SQLite file in a folder. Prints
    /// where it listens and what to try.
    #[command(after_help = serve::DEV_EXAMPLES)]
    Dev(Box<Dev>),

    /// Serve the HTTP API
    ///
    /// Looks after the queue as well: recovers jobs of dead workers, fires schedules, removes what is
    /// past its time. Off loopback it asks for tokens, or does not start.
    #[command(after_help = serve::SERVE_EXAMPLES)]
    Serve(Box<Serve>),

    /// Create the tables or bring them up to date, and exit
    ///
    /// Safe to run again and again, and from several processes at once; on an up-to-date database
    /// it does nothing.
    #[command(after_help = "\
Examples:
  longshore migrate
  longshore migrate --check    # in a deploy script: exits 1 if a migration is pending")]
    Migrate(Migrate),

    /// Claim jobs and run them, until told to end
    ///
    /// SIGINT or SIGTERM: claims no more, lets running jobs finish within the grace, then stops them
    /// and gives them back to the queue, uncharged. A second signal does so at once. The jobs of a
    /// worker that dies without a word are recovered by the others.
    ///
    /// Every setting is a flag, a variable and a key of the configuration file; the first of them wins.
    #[command(after_help = worker::EXAMPLES)]
    Worker(Box<Worker>),

    #[command(flatten)]
    Api(ApiCommand),

    /// Make, list and revoke tokens for the API
    #[command(subcommand)]
    Tokens(Tokens),

    /// Look at the settings: flags, variables and the configuration file
    #[command(subcommand)]
    Config(Config),

    /// Print what lets your shell complete this command
    ///
    /// Printed to standard output; the examples say where each shell looks for it.
    #[command(after_help = "\
Examples:
  longshore completions bash > ~/.local/share/bash-completion/completions/longshore
  longshore completions zsh > \"${fpath[1]}/_longshore\"        # then start a new shell
  longshore completions fish > ~/.config/fish/completions/longshore.fish
  longshore completions powershell >> $PROFILE")]
    Completions {
        /// Which shell
        shell: clap_complete::Shell,
    },

    /// Prove that every job is in exactly one place
    ///
    /// Exits 1 and names each problem if there is one.
    #[command(after_help = "\
Examples:
  longshore check
  longshore check --json")]
    Check,
}

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// Change nothing; exit 1 if a migration is pending
    #[arg(long)]
    pub(crate) check: bool,
}

/// How often to look again, if at all.
#[derive(Debug, Default, Args)]
pub(crate) struct Repeat {
    /// Look again every so often, 2s unless told; with --json a line each time. Ctrl-C ends it
    #[arg(long = "watch", value_name = "INTERVAL", num_args = 0..=1, default_missing_value = "2s", value_parser = interval)]
    pub(crate) interval: Option<Duration>,
}

/// More often than people can look only keeps the database busy.
const LEAST: Duration = Duration::from_millis(100);

fn interval(text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        interval if interval < LEAST => Err(format!("`{text}` is too often; give 100ms or more")),
        interval => Ok(interval),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Cli, String> {
        let words = std::iter::once("longshore").chain(words(line));
        Cli::try_parse_from(words).map_err(|error| error.to_string())
    }

    /// As a shell would: what is in quotes is one word.
    fn words(line: &str) -> Vec<&str> {
        let parts = line.split('\'').enumerate();
        parts
            .flat_map(|(nth, part)| match nth % 2 {
                0 => part.split_whitespace().collect(),
                _ => vec![part],
            })
            .collect()
    }

    fn refused(line: &str) -> String {
        parse(line).unwrap_err()
    }

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_teaches_with_an_example_that_parses() {
        fn walk(command: &clap::Command, path: &str, seen: &mut usize) {
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                let path = format!("{path} {}", sub.get_name());
                assert!(sub.get_about().is_some(), "{path}: says what it does");
                if sub.has_subcommands() {
                    walk(sub, &path, seen);
                    continue;
                }
                let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                let examples: Vec<&str> =
                    help.lines().filter_map(|line| line.trim().strip_prefix(path.trim())).collect();
                assert!(!examples.is_empty(), "{path}: shows an example");
                for example in examples {
                    let words = example.split(['#', '|', '>']).next().unwrap();
                    parse(&format!("{} {words}", path.trim().strip_prefix("longshore").unwrap()))
                        .unwrap_or_else(|error| panic!("{path}{example}: {error}"));
                    *seen += 1;
                }
            }
        }
        let mut seen = 0;
        walk(&Cli::command(), "longshore", &mut seen);
        assert!(seen > 20, "{seen} examples");
    }

    #[test]
    fn refusals_name_the_field_and_the_remedy() {
        let cases = [
            ("enqueue greet --delay 5", "--delay", "like 500ms, 10s or 1h30m"),
            ("enqueue greet --run-at tomorrow", "--run-at", "like 2030-01-31T09:00:00Z"),
            ("enqueue greet --timeout never", "--timeout", "or none"),
            ("enqueue greet --retry often", "--retry", "fixed:10s"),
            (
                "enqueue greet --unique-key k --unique-mode first",
                "--unique-mode",
                "dedupe, replace or preserve_run_at",
            ),
            ("enqueue greet --delay 5s --run-at 2030-01-31T09:00:00Z", "--run-at", "cannot be used with"),
            ("jobs list --status done", "--status", "failed_permanent"),
            ("jobs show 17", "<ID>", "`longshore jobs list` shows them"),
            ("jobs edit 01990000-0000-7000-8000-000000000000", "--priority", "--payload"),
            ("queues limit mail many", "N|none", "at least 1, or none"),
            ("dead redrive", "--kind", "--all"),
        ];
        for (line, field, remedy) in cases {
            let refused = refused(line);
            assert!(refused.contains(field) && refused.contains(remedy), "{line}: {refused}");
        }
    }

    #[test]
    fn a_redrive_names_its_jobs_one_way() {
        let id = "01990000-0000-7000-8000-000000000000";
        for line in [
            format!("dead redrive {id} --all"),
            format!("dead redrive {id} --limit 3"),
            "dead redrive --all --kind a".into(),
            "dead redrive --limit 3".into(),
        ] {
            assert!(parse(&line).is_err(), "{line}");
        }
        assert!(parse("dead redrive --kind a --queue b --limit 3").is_ok());
    }

    #[test]
    fn negative_priorities_and_dashes_for_standard_input_are_read() {
        let Command::Api(ApiCommand::Enqueue(job)) =
            parse("enqueue greet --priority -5 --payload -").unwrap().command
        else {
            panic!("an enqueue");
        };
        assert_eq!((job.priority, job.payload.as_str()), (Some(-5), "-"));
    }

    #[test]
    fn the_help_never_shows_where_the_queue_is() {
        let command = Cli::command();
        for name in ["database_url", "server"] {
            let argument = command.get_arguments().find(|arg| arg.get_id() == name).unwrap();
            assert!(argument.is_hide_env_values_set(), "{name}");
        }
    }

    #[test]
    fn an_interval_is_long_enough_to_look() {
        assert_eq!(interval("100ms").unwrap(), LEAST);
        for text in ["99ms", "0s"] {
            assert!(interval(text).unwrap_err().contains("100ms or more"), "{text}");
        }
    }
}
