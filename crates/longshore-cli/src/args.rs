//! The command line: what can be typed, and how each value is read. Owns no
//! behaviour; that is in [`commands`](crate::commands).

mod builtin;
mod config;
mod logging;
mod serve;
mod tokens;
mod worker;

use std::ffi::OsString;
use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{ArgGroup, Args, Parser, Subcommand};
use longshore::{JobId, Missed, RetryPolicy, Status, UniqueMode, When};

use crate::duration;

pub(crate) use config::{Config, Show, Shown};
pub(crate) use logging::{LogFormat, Logging};
pub(crate) use serve::{Auth, Dev, Listen, Public, Serve};
pub(crate) use tokens::{CreateToken, Tokens};
pub(crate) use worker::{Work, Worker};

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

Settings are flags, variables or keys of a configuration file, longshore.toml; the
first of them wins. `longshore config show` prints all, and where each comes from.

Exit codes:
  0  done
  1  something is wrong: `check` found a problem, `migrate --check` a pending
     migration, or the command failed for a reason that has no code of its own
  2  usage: the command line, or a value in it, cannot be right
  3  not found: no such job
  4  conflict: the job exists, but its state forbids this
  5  unavailable: the database does not answer or takes no writes; try again
  6  schema: the tables are missing or too old (run `longshore migrate`), or
     newer than this program
With several ids, each is tried, and the first failure decides the code."
)]
pub(crate) struct Cli {
    /// The database: postgres://user@host/database or sqlite:./jobs.db
    // Hidden values: the variable usually holds a password.
    #[arg(
        long,
        global = true,
        env = "DATABASE_URL",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global options"
    )]
    pub(crate) database_url: Option<String>,

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

    /// Put a job in the queue
    ///
    /// Prints `created` and the job's id; or `existing` or `replaced` when a key led to a job that
    /// was there before.
    #[command(after_help = "\
Examples:
  longshore enqueue send_email --payload '{\"to\":\"ada@example.com\",\"subject\":\"Hi\",\"body\":\"…\"}'
  longshore enqueue report --payload @report.json --delay 5m --queue slow --priority -5
  generate | longshore enqueue import --payload - --retry list:1s,10s,1m --max-attempts 4
  longshore enqueue sync --unique-key account-7 --unique-mode replace")]
    Enqueue(Box<Enqueue>),

    /// Look at jobs and change them
    #[command(subcommand)]
    Jobs(Jobs),

    /// Look at queues, pause, resume and limit them
    #[command(subcommand)]
    Queues(Queues),

    /// Look at dead letters (failed_permanent jobs) and let them run again
    #[command(subcommand)]
    Dead(Dead),

    /// Look at schedules, put, pause, resume, run and remove them
    ///
    /// Workers fire them: each tick makes one job, however many processes run.
    #[command(subcommand)]
    Cron(Cron),

    /// Look at worker processes
    #[command(subcommand)]
    Workers(Workers),

    /// Make, list and revoke tokens for the API
    #[command(subcommand)]
    Tokens(Tokens),

    /// Look at the settings: flags, variables and the configuration file
    #[command(subcommand)]
    Config(Config),

    /// Recover the jobs of dead workers and hung handlers, now
    ///
    /// Workers do this by themselves every few seconds; a manual sweep helps when none is left.
    #[command(after_help = "\
Examples:
  longshore sweep --dry-run                     # which workers, how many jobs
  longshore sweep
  longshore sweep --threshold 30s --recovery-delay 0s")]
    Sweep(Sweep),

    /// Count jobs by queue, kind and status
    #[command(
        alias = "stats",
        after_help = "\
Examples:
  longshore counts
  longshore counts --json

A number after ~ is an estimate, because very many jobs wait."
    )]
    Counts,

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

#[derive(Debug, Args)]
pub(crate) struct Enqueue {
    /// Which handler runs it
    pub(crate) kind: String,

    /// The payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "{}", allow_hyphen_values = true)]
    pub(crate) payload: String,

    /// The queue to wait in
    #[arg(long, default_value = longshore::enqueue::DEFAULT_QUEUE)]
    pub(crate) queue: String,

    /// Higher runs first; -32768 to 32767
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) priority: i64,

    /// How many attempts it may have
    #[arg(long, value_name = "N", default_value_t = i64::from(longshore::enqueue::DEFAULT_MAX_ATTEMPTS),
          allow_negative_numbers = true)]
    pub(crate) max_attempts: i64,

    #[command(flatten)]
    pub(crate) when: WhenArgs,

    /// A second enqueue with this key returns the first job, for as long as that is kept
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,

    /// At most one live job has this key
    #[arg(long, value_name = "KEY")]
    pub(crate) unique_key: Option<String>,

    /// When the unique key is taken: dedupe, replace or preserve_run_at
    #[arg(long, value_name = "MODE", default_value = "dedupe", requires = "unique_key")]
    pub(crate) unique_mode: UniqueMode,

    /// How long one attempt may take, like 90s or 2h; none means for ever
    #[arg(long, value_name = "DURATION|none", default_value = "2h", value_parser = timeout)]
    pub(crate) timeout: Timeout,

    /// When a failed attempt is tried again: jitter (the default), exponential, fixed:10s, list:1s,5s or none
    #[arg(long, value_name = "POLICY", value_parser = retry_policy)]
    pub(crate) retry: Option<RetryPolicy>,

    /// A label for people; may be repeated
    #[arg(long = "tag", value_name = "TAG")]
    pub(crate) tags: Vec<String>,

    /// A label that workers and recovery act on; may be repeated
    #[arg(long = "flag", value_name = "FLAG")]
    pub(crate) flags: Vec<String>,

    /// Why it is enqueued
    #[arg(long, value_name = "TEXT")]
    pub(crate) context: Option<String>,

    /// Your own data beside the payload
    #[arg(long, value_name = "JSON")]
    pub(crate) metadata: Option<String>,
}

/// When a job may start.
#[derive(Debug, Args)]
pub(crate) struct WhenArgs {
    /// Not before this long from now, like 500ms, 10s or 5m
    #[arg(long, value_name = "DURATION", value_parser = duration::parse, conflicts_with = "run_at")]
    delay: Option<Duration>,

    /// Not before this instant, like 2030-01-31T09:00:00Z
    #[arg(long, value_name = "RFC3339", value_parser = rfc3339)]
    run_at: Option<DateTime<Utc>>,
}

impl WhenArgs {
    /// What was asked, if anything.
    pub(crate) fn when(&self) -> Option<When> {
        self.delay.map(When::After).or(self.run_at.map(When::At))
    }
}

/// How long an attempt may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timeout(pub(crate) Option<Duration>);

#[derive(Debug, Subcommand)]
pub(crate) enum Jobs {
    /// List jobs, newest first
    ///
    /// A page looks at a bounded number of jobs, so with a rare filter it may be short and still
    /// have a next one; the hint below the table says so (`next` in JSON).
    #[command(after_help = "\
Examples:
  longshore jobs list --status retrying --kind send_email
  longshore jobs list --tag nightly --limit 200
  longshore jobs list --json | jq -r '.jobs[].id'")]
    List(List),

    /// Show one job with its history
    #[command(after_help = "\
Examples:
  longshore jobs show 01990000-0000-7000-8000-000000000000
  longshore jobs show 01990000-0000-7000-8000-000000000000 --json | jq .payload")]
    Show {
        /// The job's id
        id: JobId,
    },

    /// Cancel jobs
    ///
    /// A waiting job is cancelled at once; a running one is told to stop (`pending`) and ends as
    /// cancelled unless it succeeds first.
    #[command(after_help = "\
Examples:
  longshore jobs cancel 01990000-0000-7000-8000-000000000000
  longshore jobs list --kind import --json | jq -r '.jobs[].id' | xargs longshore jobs cancel")]
    Cancel(Ids),

    /// Run jobs again, or now
    ///
    /// A finished job runs again with a fresh budget of attempts; a waiting one is due at once.
    #[command(after_help = "\
Examples:
  longshore jobs retry 01990000-0000-7000-8000-000000000000")]
    Retry(Ids),

    /// Remove finished jobs and their history
    #[command(after_help = "\
Examples:
  longshore jobs delete 01990000-0000-7000-8000-000000000000")]
    Delete(Ids),

    /// Change a waiting job
    ///
    /// A worker gets the old job whole or the new one. What is not named stays.
    #[command(after_help = "\
Examples:
  longshore jobs edit 01990000-0000-7000-8000-000000000000 --priority 10 --delay 0s
  longshore jobs edit 01990000-0000-7000-8000-000000000000 --payload @fixed.json")]
    Edit(Edit),
}

/// One or more jobs.
#[derive(Debug, Args)]
pub(crate) struct Ids {
    /// The jobs' ids
    #[arg(required = true, value_name = "ID")]
    pub(crate) ids: Vec<JobId>,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only in this status: queued, running, succeeded, retrying, failed_permanent or cancelled
    #[arg(long)]
    pub(crate) status: Option<Status>,

    /// Only of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// Only of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Only with this tag
    #[arg(long)]
    pub(crate) tag: Option<String>,

    /// Only the job with this idempotency key
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,

    /// Only the live job with this unique key
    #[arg(long, value_name = "KEY")]
    pub(crate) unique_key: Option<String>,

    #[command(flatten)]
    pub(crate) page: PageArgs,
}

/// Which part of a list.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// How many, 1 to 200
    #[arg(long, value_name = "N", default_value_t = 50, allow_negative_numbers = true)]
    pub(crate) limit: u32,

    /// Only jobs older than this one: where the last page ended
    #[arg(long, value_name = "ID")]
    pub(crate) cursor: Option<JobId>,

    /// Pass over this many first, up to 10000; use --cursor to go further
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) offset: u32,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["priority", "delay", "run_at", "payload"]))]
pub(crate) struct Edit {
    /// The job's id
    pub(crate) id: JobId,

    /// Another priority; -32768 to 32767
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) priority: Option<i64>,

    #[command(flatten)]
    pub(crate) when: WhenArgs,

    /// Another payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) payload: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Queues {
    /// List queues that have settings, or jobs that wait or run
    #[command(after_help = "\
Examples:
  longshore queues list
  longshore queues list --json | jq -r '.[] | select(.paused) | .name'")]
    List,

    /// Stop claims from a queue; running jobs go on
    #[command(after_help = "\
Examples:
  longshore queues pause mail")]
    Pause(QueueName),

    /// Let claims from a queue go on
    #[command(after_help = "\
Examples:
  longshore queues resume mail")]
    Resume(QueueName),

    /// Limit how many jobs of a queue run at once, in all processes together
    #[command(after_help = "\
Examples:
  longshore queues limit mail 10
  longshore queues limit ledger 1      # serial: one at a time
  longshore queues limit mail none     # lift the limit")]
    Limit {
        /// The queue
        queue: String,
        /// How many, at least 1; none lifts the limit
        #[arg(value_name = "N|none", value_parser = queue_limit)]
        limit: QueueLimit,
    },
}

#[derive(Debug, Args)]
pub(crate) struct QueueName {
    /// The queue
    pub(crate) queue: String,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Cron {
    /// List schedules with their next and last tick
    #[command(after_help = "\
Examples:
  longshore cron list
  longshore cron list --json | jq -r '.[] | select(.paused) | .name'")]
    List,

    /// Put a schedule, or change the one of that name
    ///
    /// An unchanged schedule keeps its next tick.
    #[command(after_help = "\
Examples:
  longshore cron add nightly '30 2 * * *' report --zone Europe/Berlin
  longshore cron add pulse '*/10 * * * * *' ping --missed skip           # six fields: seconds first
  longshore cron add backfill '0 * * * *' import --missed all:24 --payload @import.json")]
    Add(Box<CronAdd>),

    /// Hold back a schedule's ticks
    #[command(after_help = "\
Examples:
  longshore cron pause nightly")]
    Pause(ScheduleName),

    /// Let a schedule tick again, from its next tick on
    #[command(after_help = "\
Examples:
  longshore cron resume nightly")]
    Resume(ScheduleName),

    /// Enqueue a schedule's job now, beside its ticks
    #[command(after_help = "\
Examples:
  longshore cron run nightly")]
    Run(ScheduleName),

    /// Remove a schedule; jobs it has enqueued stay
    #[command(after_help = "\
Examples:
  longshore cron remove nightly")]
    Remove(ScheduleName),
}

#[derive(Debug, Args)]
pub(crate) struct ScheduleName {
    /// The schedule
    pub(crate) name: String,
}

#[derive(Debug, Args)]
pub(crate) struct CronAdd {
    /// What to call it
    pub(crate) name: String,

    /// The cron line: five fields, or six with seconds first
    pub(crate) line: String,

    /// The kind of the job that each tick enqueues
    pub(crate) kind: String,

    /// The job's payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", default_value = "{}", allow_hyphen_values = true)]
    pub(crate) payload: String,

    /// The time zone whose wall clocks the line means
    #[arg(long, default_value = "UTC")]
    pub(crate) zone: String,

    /// What becomes of missed ticks: skip, one, or all:N for the N newest
    #[arg(long, default_value = "one", value_name = "skip|one|all:N")]
    pub(crate) missed: Missed,

    /// The queue the jobs wait in
    #[arg(long, default_value = longshore::enqueue::DEFAULT_QUEUE)]
    pub(crate) queue: String,

    /// Their priority; higher runs first
    #[arg(long, default_value_t = 0, allow_hyphen_values = true)]
    pub(crate) priority: i64,

    /// How many attempts each may have
    #[arg(long, value_name = "N")]
    pub(crate) max_attempts: Option<i64>,
}

/// How many jobs of a queue may run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLimit(pub(crate) Option<u32>);

#[derive(Debug, Subcommand)]
pub(crate) enum Dead {
    /// List dead letters, newest first
    #[command(after_help = "\
Examples:
  longshore dead list --kind send_email
  longshore dead list --json | jq -r '.jobs[] | [.id, .last_error] | @tsv'")]
    List(DeadList),

    /// Let dead letters run again with a fresh budget of attempts
    ///
    /// Name them by id or by --kind, --queue or --all, oldest first. By filter, jobs whose unique
    /// key meanwhile belongs to another live job are passed over.
    #[command(after_help = "\
Examples:
  longshore dead redrive 01990000-0000-7000-8000-000000000000
  longshore dead redrive --kind send_email --limit 100
  longshore dead redrive --all")]
    Redrive(Redrive),
}

#[derive(Debug, Args)]
pub(crate) struct DeadList {
    /// Only of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// Only of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    #[command(flatten)]
    pub(crate) page: PageArgs,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args(["ids", "kind", "queue", "all"]))]
pub(crate) struct Redrive {
    /// The jobs' ids
    #[arg(value_name = "ID", conflicts_with_all = ["kind", "queue", "all", "limit"])]
    pub(crate) ids: Vec<JobId>,

    /// Those of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// Those of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// All of them
    #[arg(long, conflicts_with_all = ["kind", "queue"])]
    pub(crate) all: bool,

    /// How many at most
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) limit: Option<u32>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Workers {
    /// List worker processes, newest first
    #[command(after_help = "\
Examples:
  longshore workers list
  longshore workers list --threshold 30s    # who has been silent for 30 s?")]
    List {
        /// Call a worker stale after this silence, whatever its own threshold
        #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
        threshold: Option<Duration>,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Sweep {
    /// Say what would be recovered and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Call a worker dead after this silence, whatever its own threshold
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) threshold: Option<Duration>,

    /// How long recovered jobs wait before they are due again
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = duration::parse)]
    pub(crate) recovery_delay: Duration,
}

fn timeout(text: &str) -> Result<Timeout, String> {
    duration::parse_or_none(text).map(Timeout)
}

fn rfc3339(text: &str) -> Result<DateTime<Utc>, String> {
    DateTime::parse_from_rfc3339(text).map(|at| at.to_utc()).map_err(|_| {
        format!("`{text}` is not a time; write it as RFC 3339 with its zone, like 2030-01-31T09:00:00Z")
    })
}

fn queue_limit(text: &str) -> Result<QueueLimit, String> {
    match text {
        "none" => Ok(QueueLimit(None)),
        _ => text
            .parse()
            .map(|limit| QueueLimit(Some(limit)))
            .map_err(|_| format!("`{text}` is not a limit; write a whole number of at least 1, or none")),
    }
}

fn retry_policy(text: &str) -> Result<RetryPolicy, String> {
    let policy = match text.split_once(':') {
        None if text == "jitter" => RetryPolicy::default(),
        None if text == "exponential" => RetryPolicy::exponential(),
        None if text == "none" => RetryPolicy::None,
        Some(("fixed", delay)) => RetryPolicy::fixed(duration::parse(delay)?),
        Some(("list", delays)) => {
            let delays: Result<Vec<_>, _> = delays.split(',').map(duration::parse).collect();
            RetryPolicy::list(delays?)
        }
        _ => {
            return Err(format!(
                "`{text}` is not a retry policy; use jitter, exponential, fixed:10s, list:1s,5s or none"
            ));
        }
    };
    Ok(policy)
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
                    let words = example.split(['#', '|']).next().unwrap();
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
    fn retry_policies_are_read() {
        let second = Duration::from_secs(1);
        assert_eq!(retry_policy("jitter").unwrap(), RetryPolicy::default());
        assert_eq!(retry_policy("exponential").unwrap(), RetryPolicy::exponential());
        assert_eq!(retry_policy("fixed:10s").unwrap(), RetryPolicy::fixed(10 * second));
        assert_eq!(retry_policy("list:1s,5s").unwrap(), RetryPolicy::list([second, 5 * second]));
        assert_eq!(retry_policy("none").unwrap(), RetryPolicy::None);
        for text in ["", "fixed", "linear", "jitter:1s", "none:"] {
            assert!(retry_policy(text).unwrap_err().contains("is not a retry policy; use jitter"), "{text}");
        }
        for text in ["fixed:", "fixed:10", "list:", "list:1s,,5s"] {
            assert!(retry_policy(text).unwrap_err().contains("is not a duration"), "{text}");
        }
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
        let Command::Enqueue(job) = parse("enqueue greet --priority -5 --payload -").unwrap().command else {
            panic!("an enqueue");
        };
        assert_eq!((job.priority, job.payload.as_str()), (-5, "-"));
    }

    #[test]
    fn the_help_never_shows_the_database_url() {
        let argument = Cli::command();
        let argument = argument.get_arguments().find(|arg| arg.get_id() == "database_url").unwrap();
        assert!(argument.is_hide_env_values_set());
    }
}
