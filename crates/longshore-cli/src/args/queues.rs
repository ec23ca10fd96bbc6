//! What `longshore queues`, `longshore workers` and `longshore sweep` can be told.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::Watch;
use crate::duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Queues {
    /// List queues that have settings, or jobs that wait or run
    #[command(after_help = "\
Examples:
  longshore queues list
  longshore queues list --watch
  longshore queues list --json | jq -r '.[] | select(.paused) | .name'")]
    List(Watch),

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
        watch: Watch,
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
