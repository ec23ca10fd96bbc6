//! The command line: every command, flag and help text, and how values are parsed.
//! See [`commands`](crate::commands) for what the commands do.

mod api;
mod builtin;
mod bulk;
mod config;
mod cron;
mod dead;
mod enqueue;
mod events;
mod flows;
mod jobs;
mod operate;
mod operations;
mod serve;
mod target;
mod tokens;
mod values;
mod worker;

use std::ffi::OsString;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use crate::duration;

pub(crate) use api::{ApiCommand, BenchArgs};
pub(crate) use bulk::{BulkArgs, Confirm, Filter, Since};
pub(crate) use config::{Config, Show, Shown};
pub(crate) use cron::{Cron, CronAdd};
pub(crate) use dead::{Dead, DeadGroups, DeadList, Purge, Redrive};
pub(crate) use enqueue::{Enqueue, EnqueueMany, WhenArgs};
pub(crate) use events::Events;
pub(crate) use flows::{FlowList, Flows};
pub(crate) use jobs::{Edit, Jobs, List, PageArgs};
pub(crate) use operate::{GroupSettings, Groups, Kinds, PutKind, Queues, Stats, Sweep, Workers};
pub(crate) use operations::{OperationList, Operations};
pub(crate) use serve::{Auth, Dev, Listen, Public, Redaction, Serve};
pub(crate) use target::{Target, TargetArgs};
pub(crate) use tokens::{CreateToken, Tokens};
pub(crate) use worker::{LogFormat, Logging, MetricsPort, Work, Worker};

/// Enqueue jobs, run them and operate a Longshore queue.
#[derive(Debug, Parser)]
#[command(
    color = crate::output::help_colours(),
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
  longshore jobs list                  # the same, through a server's API

Every setting is a flag, an environment variable or a key in the configuration file,
longshore.toml. A flag overrides the variable, and the variable overrides the file.
`longshore config show` prints every setting and where its value comes from.

Exit codes:
  0  done
  1  something is wrong: `check` found a problem, `migrate --check` found a pending
     migration, or the command failed for a reason that no other code covers
  2  usage: the command line, or a value in it, is invalid
  3  not found: no such job, flow, schedule or kind
  4  conflict: the job or flow exists, but its state does not allow this
  5  unavailable: the database or the server does not respond, or the database
     accepts no writes; try again
  6  schema: the tables are missing or too old (run `longshore migrate`), or
     newer than this program
  7  denied: the server requires a token, or a token with a scope that allows this
  8  ended without success: the job that `enqueue --wait` waited for failed
     permanently or was cancelled
  9  not ended: `enqueue --wait=TIME` timed out; the job continues
A command with several ids tries each of them; the first failure sets the code."
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) target: TargetArgs,

    /// The configuration file; '' for none [default: ./longshore.toml, else
    /// /etc/longshore/longshore.toml]
    // Not a PathBuf, because clap rejects an empty one.
    #[arg(
        long,
        global = true,
        env = "LONGSHORE_CONFIG",
        value_name = "FILE",
        help_heading = "Global options"
    )]
    pub(crate) config: Option<OsString>,

    /// Export traces to this OpenTelemetry collector (OTLP over HTTP), like http://127.0.0.1:4318
    #[arg(
        long,
        global = true,
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global options"
    )]
    pub(crate) otlp_endpoint: Option<String>,

    /// Print one JSON document instead of text
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,

    /// Show exact times in UTC instead of how long ago
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) utc: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run everything in one process, for trying things out
    ///
    /// Runs the API, upkeep and a worker with the built-in kinds on an SQLite file. Needs no other
    /// software. Prints its address and some commands to try.
    #[command(after_help = serve::DEV_EXAMPLES)]
    Dev(Box<Dev>),

    /// Serve the HTTP API
    ///
    /// The server also does the queue's upkeep: it recovers the jobs of dead workers, runs cron
    /// schedules and removes finished jobs after their retention time. On an address other than
    /// loopback it starts only with --auth tokens.
    #[command(after_help = serve::SERVE_EXAMPLES)]
    Serve(Box<Serve>),

    /// Create the tables or bring them up to date, and exit
    ///
    /// Safe to repeat, and safe to run from several processes at once. Does nothing if the database
    /// is up to date.
    #[command(after_help = "\
Examples:
  longshore migrate
  longshore migrate --check    # in a deploy script: exits 1 if a migration is pending")]
    Migrate(Migrate),

    /// Claim jobs and run them, until stopped by a signal
    ///
    /// On SIGINT or SIGTERM the worker claims no more jobs and lets running ones finish within
    /// --shutdown-grace. It then stops the rest and releases them to the queue, without counting an
    /// attempt. A second signal does that at once. If a worker dies, the other workers recover its jobs.
    ///
    /// Every setting is a flag, an environment variable and a key in the configuration file. A flag
    /// overrides the variable, and the variable overrides the file.
    #[command(after_help = worker::EXAMPLES)]
    Worker(Box<Worker>),

    #[command(flatten)]
    Api(ApiCommand),

    /// Create, list and revoke tokens for the API
    #[command(subcommand)]
    Tokens(Tokens),

    /// Show and check the settings: flags, environment variables and the configuration file
    #[command(subcommand)]
    Config(Config),

    /// Print a completion script for your shell
    ///
    /// The script goes to standard output. The examples show where each shell looks for it. In bash, zsh
    /// and fish, it also completes values: statuses, scopes and modes, and the kinds, queues and
    /// schedules of the queue that the command line or the environment names.
    #[command(after_help = "\
Examples:
  longshore completions bash > ~/.local/share/bash-completion/completions/longshore
  longshore completions zsh > \"${fpath[1]}/_longshore\"        # then start a new shell
  longshore completions fish > ~/.config/fish/completions/longshore.fish
  longshore completions powershell >> $PROFILE")]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },

    /// Print the words that can complete a command line, for the completion scripts
    #[command(
        hide = true,
        after_help = "\
Examples:
  longshore complete -- jobs list --status ''"
    )]
    Complete {
        /// The words so far, without the name of the program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },

    /// Print the manual page of a command, or write all pages to a folder
    #[command(after_help = "\
Examples:
  longshore man | man -l -
  longshore man jobs list | man -l -
  longshore man --output /usr/local/share/man/man1")]
    Man(Man),

    /// Check the consistency of the tables
    ///
    /// Verifies, for example, that every job has exactly one state. Prints each problem with its remedy: what
    /// to do, what it costs, and the SQL statements, if there are any. Exits 1 if there is any problem.
    /// Changes nothing. Warns if a crash of the database may lose stored jobs.
    ///
    /// Run the statements with psql or sqlite3, after a backup. Each one tests again that the problem
    /// exists. Then check again: one remedy can reveal the next problem.
    #[command(after_help = "\
Examples:
  longshore check
  longshore check --json | jq -r '.problems[].sql[]'    # only the statements")]
    Check,
}

impl Command {
    /// The format of the command's log; `None` if the command does not log.
    pub(crate) fn log_format(&self) -> Option<LogFormat> {
        match self {
            Command::Dev(args) => Some(args.logging.log_format),
            Command::Serve(args) => Some(args.work.logging.log_format),
            Command::Worker(args) => Some(args.work.logging.log_format),
            _ => None,
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// The command, like `jobs list` [default: longshore itself]
    #[arg(conflicts_with = "output")]
    pub(crate) command: Vec<String>,

    /// Write the page of every command to this folder
    #[arg(long, value_name = "FOLDER", value_hint = clap::ValueHint::DirPath)]
    pub(crate) output: Option<std::path::PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct Migrate {
    /// Change nothing; exit 1 if a migration is pending
    #[arg(long)]
    pub(crate) check: bool,
}

/// Whether and how often to repeat the command: the `--watch` flag.
#[derive(Debug, Default, Args)]
pub(crate) struct Repeat {
    /// Repeat the command at this interval until Ctrl-C; 2s if none is given. With --json, prints one
    /// line each time
    #[arg(long = "watch", value_name = "INTERVAL", num_args = 0..=1, default_missing_value = "2s", value_parser = interval)]
    pub(crate) interval: Option<Duration>,
}

/// A shorter interval would only load the database; people cannot read that fast.
const MIN_INTERVAL: Duration = Duration::from_millis(100);

fn interval(text: &str) -> Result<Duration, String> {
    match duration::parse(text)? {
        interval if interval < MIN_INTERVAL => Err(format!("`{text}` is too short; give 100ms or more")),
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

    /// Splits like a shell: text in single quotes is one word.
    fn words(line: &str) -> Vec<&str> {
        let parts = line.split('\'').enumerate();
        parts
            .flat_map(|(nth, part)| match nth % 2 {
                0 => part.split_whitespace().collect(),
                _ => vec![part],
            })
            .collect()
    }

    fn error_of(line: &str) -> String {
        parse(line).unwrap_err()
    }

    #[test]
    fn the_clap_definition_passes_its_own_checks() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_an_example_that_parses() {
        fn walk(command: &clap::Command, path: &str, seen: &mut usize) {
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                let path = format!("{path} {}", sub.get_name());
                assert!(sub.get_about().is_some(), "{path}: has no description");
                if sub.has_subcommands() {
                    walk(sub, &path, seen);
                    continue;
                }
                let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                let examples: Vec<&str> =
                    help.lines().filter_map(|line| line.trim().strip_prefix(path.trim())).collect();
                assert!(!examples.is_empty(), "{path}: has no example");
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
    fn errors_name_the_field_and_the_remedy() {
        let cases = [
            ("enqueue greet --delay 5", "--delay", "like 500ms, 10s or 1h30m"),
            ("enqueue greet --run-at tomorrow", "--run-at", "like 2030-01-31T09:00:00Z"),
            ("enqueue greet --timeout never", "--timeout", "or none"),
            ("enqueue greet --retry often", "--retry", "fixed:10s"),
            (
                "enqueue greet --unique-key k --unique-mode first",
                "--unique-mode",
                "dedupe, replace, preserve_run_at",
            ),
            ("enqueue greet --delay 5s --run-at 2030-01-31T09:00:00Z", "--run-at", "cannot be used with"),
            ("jobs list --status done", "--status", "failed_permanent"),
            ("jobs show 17", "<ID>", "ids are UUIDs, as `longshore jobs list` shows them"),
            ("jobs list --status qeued", "--status", "a similar value exists: 'queued'"),
            ("jobs list --staus queued", "--staus", "a similar argument exists: '--status'"),
            ("tokens create ci --scope reed", "--scope", "enqueue, work, read, operate, admin"),
            ("jobs edit 01990000-0000-7000-8000-000000000000", "--priority", "--payload"),
            ("queues limit mail many", "N|none", "at least 1, or none"),
            ("dead redrive", "--kind", "--all"),
        ];
        for (line, field, remedy) in cases {
            let error = error_of(line);
            assert!(error.contains(field) && error.contains(remedy), "{line}: {error}");
        }
    }

    #[test]
    fn redrive_takes_ids_or_a_filter_or_all_but_no_mixture() {
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
    fn negative_priorities_and_a_dash_for_standard_input_are_accepted() {
        let Command::Api(ApiCommand::Enqueue(job)) =
            parse("enqueue greet --priority -5 --payload -").unwrap().command
        else {
            panic!("not parsed as enqueue");
        };
        assert_eq!((job.priority, job.payload.as_str()), (Some(-5), "-"));
    }

    #[test]
    fn the_help_never_shows_the_value_of_a_url_variable() {
        let command = Cli::command();
        for name in ["database_url", "server"] {
            let argument = command.get_arguments().find(|arg| arg.get_id() == name).unwrap();
            assert!(argument.is_hide_env_values_set(), "{name}");
        }
    }

    #[test]
    fn a_watch_interval_under_100ms_is_rejected() {
        assert_eq!(interval("100ms").unwrap(), MIN_INTERVAL);
        for text in ["99ms", "0s"] {
            assert!(interval(text).unwrap_err().contains("100ms or more"), "{text}");
        }
    }
}
