//! What `longshore queues`, `longshore workers` and `longshore sweep` can be told.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::Repeat;
use crate::duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Queues {
    /// List queues that have settings, or jobs that wait or run
    #[command(after_help = "\
Examples:
  longshore queues list
  longshore queues list --watch
  longshore queues list --json | jq -r '.[] | select(.paused) | .name'")]
    List(Repeat),

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

/// How many jobs of a queue may run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLimit(pub(crate) Option<u32>);

#[derive(Debug, Subcommand)]
pub(crate) enum Workers {
    /// List worker processes, newest first
    #[command(after_help = "\
Examples:
  longshore workers list --watch
  longshore workers list --threshold 30s    # who has been silent for 30 s?")]
    List {
        /// Call a worker stale after this silence, whatever its own threshold
        #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
        threshold: Option<Duration>,

        #[command(flatten)]
        every: Repeat,
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

fn queue_limit(text: &str) -> Result<QueueLimit, String> {
    match text {
        "none" => Ok(QueueLimit(None)),
        _ => text
            .parse()
            .map(|limit| QueueLimit(Some(limit)))
            .map_err(|_| format!("`{text}` is not a limit; write a whole number of at least 1, or none")),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Kinds {
    /// List the kinds that workers or people have announced
    #[command(after_help = "\
Examples:
  longshore kinds list
  longshore kinds list --json | jq '.[] | select(.name == \"send_email\") | .schema'")]
    List,

    /// Announce a kind: what its payloads look like, and what its jobs get when nothing is said
    ///
    /// What is not named stays as it was. A server refuses jobs of kinds that nobody has announced, and
    /// payloads that do not fit.
    #[command(after_help = "\
Examples:
  longshore kinds put report
  longshore kinds put report --schema @report.schema.json
  longshore kinds put report --defaults '{\"queue\":\"slow\",\"max_attempts\":5,\"timeout_seconds\":600}'")]
    Put(PutKind),

    /// Forget a kind; its jobs stay
    #[command(after_help = "\
Examples:
  longshore kinds remove report")]
    Remove {
        /// The kind
        kind: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PutKind {
    /// The kind
    pub(crate) kind: String,

    /// A JSON Schema for payloads: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) schema: Option<String>,

    /// The defaults: queue, priority, max_attempts, timeout_seconds and retry, as JSON, @FILE or -
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) defaults: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// How many minutes to look back, 1 to 1440
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=1440))]
    pub(crate) minutes: u32,

    /// Only of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Only of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    #[command(flatten)]
    pub(crate) every: Repeat,
}
