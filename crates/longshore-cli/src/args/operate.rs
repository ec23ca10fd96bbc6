//! The arguments of the operator's commands `queues`, `workers`, `sweep`, `kinds` and
//! `stats`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::Repeat;
use crate::duration;

#[derive(Debug, Subcommand)]
pub(crate) enum Queues {
    /// List queues that have settings, waiting jobs or running jobs
    #[command(after_help = "\
Examples:
  longshore queues list
  longshore queues list --watch
  longshore queues list --json | jq -r '.[] | select(.paused) | .name'")]
    List(Repeat),

    /// Pause a queue: workers claim no more of its jobs. Running jobs continue
    #[command(after_help = "\
Examples:
  longshore queues pause mail")]
    Pause(QueueName),

    /// Resume a queue: workers claim its jobs again
    #[command(after_help = "\
Examples:
  longshore queues resume mail")]
    Resume(QueueName),

    /// Limit how many jobs of a queue run at once, across all processes
    #[command(after_help = "\
Examples:
  longshore queues limit mail 10
  longshore queues limit ledger 1      # one at a time
  longshore queues limit mail none     # remove the limit")]
    Limit {
        /// The name of the queue
        queue: String,
        /// The limit, at least 1, or none to remove it
        #[arg(value_name = "N|none", value_parser = queue_limit)]
        limit: QueueLimit,
    },

    /// Limit how often jobs of a queue start, across all processes
    #[command(after_help = "\
Examples:
  longshore queues rate mail 100/s
  longshore queues rate mail 100/s --burst 10   # up to 10 at once after a pause
  longshore queues rate crawl 5/10m             # five in ten minutes
  longshore queues rate mail none               # remove the rate")]
    Rate {
        /// The name of the queue
        queue: String,
        #[command(flatten)]
        rate: RateArgs,
    },
}

/// A rate as a positional argument.
#[derive(Debug, Args)]
pub(crate) struct RateArgs {
    /// How many jobs may start in which time, like 100/s, 5/10m or 1000/d; none to remove the rate
    #[arg(value_name = "N/TIME|none", value_parser = rate)]
    pub(crate) rate: RateValue,

    /// How many jobs may start at once after a pause [default: what may start in 50 ms]
    #[arg(long, value_name = "N")]
    pub(crate) burst: Option<u32>,
}

impl RateArgs {
    /// The rate with its burst.
    pub(crate) fn rate(&self) -> Option<longshore::Rate> {
        self.rate.0.map(|rate| self.burst.map_or(rate, |burst| rate.burst(burst)))
    }
}

/// How often jobs may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RateValue(pub(crate) Option<longshore::Rate>);

fn rate(text: &str) -> Result<RateValue, String> {
    let parse = || {
        let (starts, period) = text.split_once('/')?;
        let period = if period.starts_with(|c: char| c.is_ascii_digit()) {
            duration::parse(period).ok()?
        } else {
            duration::parse(&format!("1{period}")).ok()?
        };
        Some(longshore::Rate::per(starts.trim().parse().ok()?, period))
    };
    match text {
        "none" => Ok(RateValue(None)),
        _ => parse().map(|rate| RateValue(Some(rate))).ok_or_else(|| {
            format!("`{text}` is not a rate; write a number and a time, like 100/s, 5/10m or 1000/d, or none")
        }),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Groups {
    /// List the groups of a queue that have settings, waiting jobs or running jobs
    #[command(after_help = "\
Examples:
  longshore groups list mail
  longshore groups list mail --watch
  longshore groups list mail --json | jq -r '.[] | select(.running == .limit) | .name'")]
    List {
        /// The name of the queue
        queue: String,
        /// List groups after this name
        #[arg(long, value_name = "NAME")]
        after: Option<String>,
        /// The maximum number of groups, 1 to 1000
        #[arg(long, value_name = "N", default_value_t = 100)]
        limit: u32,
        #[command(flatten)]
        every: Repeat,
    },

    /// Set the limit and the rate of a group
    ///
    /// What is not given stays as it is. A group without its own limit or rate has those of `longshore
    /// groups default`.
    #[command(after_help = "\
Examples:
  longshore groups set mail acme --limit 5
  longshore groups set mail acme --rate 100/s --burst 10
  longshore groups set mail acme --limit none     # the default of the queue again")]
    Set {
        /// The name of the queue
        queue: String,
        /// The name of the group
        group: String,
        #[command(flatten)]
        settings: GroupSettings,
    },

    /// Set the limit and the rate of each group of a queue that has none of its own
    ///
    /// What is not given stays as it is.
    #[command(after_help = "\
Examples:
  longshore groups default mail --limit 5
  longshore groups default mail --rate 100/s --burst 10
  longshore groups default mail --limit none --rate none")]
    Default {
        /// The name of the queue
        queue: String,
        #[command(flatten)]
        settings: GroupSettings,
    },

    /// Pause a group: workers claim no more of its jobs. Running jobs continue
    #[command(after_help = "\
Examples:
  longshore groups pause mail acme")]
    Pause(GroupName),

    /// Resume a group: workers claim its jobs again
    #[command(after_help = "\
Examples:
  longshore groups resume mail acme")]
    Resume(GroupName),
}

#[derive(Debug, Args)]
pub(crate) struct GroupName {
    /// The name of the queue
    pub(crate) queue: String,
    /// The name of the group
    pub(crate) group: String,
}

#[derive(Debug, Args)]
pub(crate) struct GroupSettings {
    /// How many jobs of the group may run at once, across all processes; none to remove the limit
    #[arg(long, value_name = "N|none", value_parser = queue_limit)]
    pub(crate) limit: Option<QueueLimit>,

    /// How many jobs of the group may start in which time, like 100/s or 5/10m; none to remove the rate
    #[arg(long, value_name = "N/TIME|none", value_parser = rate)]
    pub(crate) rate: Option<RateValue>,

    /// How many jobs may start at once after a pause [default: what may start in 50 ms]
    #[arg(long, value_name = "N", requires = "rate")]
    pub(crate) burst: Option<u32>,
}

impl GroupSettings {
    /// The rate with its burst; the outer `None` if it is not given.
    pub(crate) fn rate(&self) -> Option<Option<longshore::Rate>> {
        self.rate.map(|rate| rate.0.map(|rate| self.burst.map_or(rate, |burst| rate.burst(burst))))
    }
}

#[derive(Debug, Args)]
pub(crate) struct QueueName {
    /// The name of the queue
    pub(crate) queue: String,
}

/// How many jobs of a queue may run at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueLimit(pub(crate) Option<u32>);

#[derive(Debug, Subcommand)]
pub(crate) enum Workers {
    /// List worker processes, newest first
    ///
    /// A server without a worker runs no jobs and only does upkeep. It is listed with --all.
    #[command(after_help = "\
Examples:
  longshore workers list --watch
  longshore workers list --threshold 30s    # stale: no heartbeat for 30 seconds")]
    List {
        /// Show a worker as stale after this long without a heartbeat; overrides each worker's own
        /// threshold
        #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
        threshold: Option<Duration>,

        /// List servers too, which do only upkeep
        #[arg(long)]
        all: bool,

        #[command(flatten)]
        every: Repeat,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Sweep {
    /// Print what would be recovered and change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,

    /// Treat a worker as dead after this long without a heartbeat; overrides each worker's own
    /// threshold
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) threshold: Option<Duration>,

    /// How long recovered jobs wait before they are due again [default: the server's, or 5s]
    #[arg(long, value_name = "DURATION", value_parser = duration::parse)]
    pub(crate) recovery_delay: Option<Duration>,

    /// The flags of resilient jobs; '' for none. A worker that holds such a job is declared dead only
    /// after --resilient-factor times its threshold [default: the server's, or infrastructure_resilient]
    #[arg(long, value_name = "A,B", value_delimiter = ',', env = "LONGSHORE_RESILIENT_FLAGS")]
    pub(crate) resilient_flags: Option<Vec<String>>,

    /// The factor for workers that hold a resilient job [default: the server's, or 3]
    #[arg(long, value_name = "N", env = "LONGSHORE_RESILIENT_FACTOR")]
    pub(crate) resilient_factor: Option<u32>,
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
    /// List the registered kinds, and the queues to whose jobs they apply
    #[command(after_help = "\
Examples:
  longshore kinds list
  longshore kinds list --schemas --json | jq '.[] | select(.name == \"send_email\") | .schema'")]
    List {
        /// Include the JSON Schemas (with --json)
        #[arg(long)]
        schemas: bool,
    },

    /// Register a kind, with a schema for its payloads and defaults for its jobs
    ///
    /// What is not given stays unchanged. A server rejects jobs of unregistered kinds, and payloads that
    /// do not match the kind's schema. Workers register the kinds they handle when they start.
    #[command(after_help = "\
Examples:
  longshore kinds put report
  longshore kinds put report --schema @report.schema.json
  longshore kinds put report --defaults '{\"queue\":\"slow\",\"max_attempts\":5,\"timeout_seconds\":600}'")]
    Put(PutKind),

    /// Remove a kind's registration. Its jobs remain
    #[command(after_help = "\
Examples:
  longshore kinds remove report")]
    Remove {
        /// The name of the kind
        kind: String,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PutKind {
    /// The name of the kind
    pub(crate) kind: String,

    /// A JSON Schema for the payloads: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) schema: Option<String>,

    /// Defaults for the jobs (queue, priority, max_attempts, timeout_seconds, retry): JSON, @FILE, or -
    /// for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) defaults: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// The period to show, in minutes, 1 to 1440
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=1440))]
    pub(crate) minutes: u32,

    /// Only jobs of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Only jobs of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    #[command(flatten)]
    pub(crate) every: Repeat,
}
