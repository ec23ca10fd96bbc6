//! The arguments of `longshore jobs`.

use clap::{ArgGroup, Args, Subcommand};
use longshore::{Fingerprint, JobId, Status};

use super::bulk::{BulkArgs, Since, since};
use super::{Repeat, WhenArgs, values};

#[derive(Debug, Subcommand)]
pub(crate) enum Jobs {
    /// List jobs, newest first
    ///
    /// If few jobs match, the search continues until the page is full, for at most 30 seconds; Ctrl-C
    /// stops it and shows the jobs found so far. The line below the table has the command for the next
    /// page; in JSON, `next` is its cursor.
    #[command(after_help = "\
Examples:
  longshore jobs list --status retrying --kind send_email
  longshore jobs list --tag nightly --limit 200
  longshore jobs list --status failed_permanent,retrying --error timeout --newer-than 1d
  longshore jobs list --status running --watch
  longshore jobs list --json | jq -r '.jobs[].id'")]
    List(Box<List>),

    /// Show one job with its history
    #[command(after_help = "\
Examples:
  longshore jobs show 01990000-0000-7000-8000-000000000000
  longshore jobs show 01990000-0000-7000-8000-000000000000 --json | jq .payload")]
    Show {
        /// The job's id
        id: JobId,
    },

    /// Explain why a job is not running, what to do about it, and when it is expected to start
    #[command(after_help = "\
Examples:
  longshore jobs explain 01990000-0000-7000-8000-000000000000
  longshore jobs explain 01990000-0000-7000-8000-000000000000 --json | jq -r .reason")]
    Explain {
        /// The job's id
        id: JobId,
    },

    /// List the journaled steps of a job: what is done, and what it waits for
    #[command(after_help = "\
Examples:
  longshore jobs steps 01990000-0000-7000-8000-000000000000
  longshore jobs steps 01990000-0000-7000-8000-000000000000 --json | jq '.[].name'")]
    Steps {
        /// The job's id
        id: JobId,
    },

    /// Cancel jobs
    ///
    /// A waiting job is cancelled at once. A running job receives a cancel request (`pending`) and ends
    /// as cancelled unless it succeeds first.
    #[command(after_help = "\
Examples:
  longshore jobs cancel 01990000-0000-7000-8000-000000000000
  longshore jobs cancel --kind import --status queued --dry-run
  longshore jobs cancel --tag nightly --older-than 1h --yes")]
    Cancel(BulkArgs),

    /// Run finished jobs again, or waiting jobs now
    ///
    /// A finished job runs again with a new set of attempts. A waiting job becomes due at once.
    #[command(after_help = "\
Examples:
  longshore jobs retry 01990000-0000-7000-8000-000000000000
  longshore jobs retry --status retrying --kind send_email      # do not wait for the retry delay
  longshore jobs retry --status cancelled --newer-than 2h --yes")]
    Retry(BulkArgs),

    /// Delete finished jobs and their history
    #[command(after_help = "\
Examples:
  longshore jobs delete 01990000-0000-7000-8000-000000000000
  longshore jobs delete --status succeeded --older-than 30d --dry-run
  longshore jobs delete --status succeeded --older-than 30d --yes")]
    Delete(BulkArgs),

    /// Change a waiting job
    ///
    /// Fields that are not given stay unchanged. A worker receives either the old job or the new one,
    /// never a mixture.
    #[command(after_help = "\
Examples:
  longshore jobs edit 01990000-0000-7000-8000-000000000000 --priority 10 --delay 0s
  longshore jobs edit 01990000-0000-7000-8000-000000000000 --payload @fixed.json")]
    Edit(Edit),
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only jobs in this status, or in one of several, separated by commas
    #[arg(long, value_delimiter = ',', value_parser = values::status())]
    pub(crate) status: Vec<Status>,

    /// Only jobs of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// Only jobs of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// Only jobs of this group
    #[arg(long)]
    pub(crate) group: Option<String>,

    /// Only jobs with this tag
    #[arg(long)]
    pub(crate) tag: Option<String>,

    /// Only jobs whose last error contains this text
    #[arg(long, value_name = "TEXT")]
    pub(crate) error: Option<String>,

    /// Only jobs whose last failure belongs to this group (see `longshore dead groups`)
    #[arg(long, value_name = "FINGERPRINT")]
    pub(crate) failure: Option<Fingerprint>,

    /// Only jobs that were enqueued longer ago than this, like 7d, or before this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) older_than: Option<Since>,

    /// Only jobs that were enqueued within this period, like 1h, or after this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) newer_than: Option<Since>,

    /// Only jobs that ended longer ago than this, or before this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) ended_before: Option<Since>,

    /// Only jobs that ended within this period, or after this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) ended_after: Option<Since>,

    /// Only the job with this idempotency key
    #[arg(long, value_name = "KEY")]
    pub(crate) idempotency_key: Option<String>,

    /// Only the unfinished job with this unique key
    #[arg(long, value_name = "KEY")]
    pub(crate) unique_key: Option<String>,

    #[command(flatten)]
    pub(crate) page: PageArgs,

    #[command(flatten)]
    pub(crate) every: Repeat,
}

/// Which part of a list.
#[derive(Debug, Args)]
pub(crate) struct PageArgs {
    /// The number of jobs per page, 1 to 200
    #[arg(long, value_name = "N", default_value_t = 50, allow_negative_numbers = true)]
    pub(crate) limit: u32,

    /// Only jobs older than this one, the last job of the previous page
    #[arg(long, value_name = "ID")]
    pub(crate) cursor: Option<JobId>,

    /// Skip this many jobs, up to 10000; use --cursor to go further
    #[arg(long, value_name = "N", default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) offset: u32,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("change").required(true).multiple(true).args(["priority", "delay", "run_at", "payload"]))]
pub(crate) struct Edit {
    /// The job's id
    pub(crate) id: JobId,

    /// The new priority; -32768 to 32767
    #[arg(long, allow_negative_numbers = true)]
    pub(crate) priority: Option<i64>,

    #[command(flatten)]
    pub(crate) when: WhenArgs,

    /// The new payload: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON|@FILE|-", allow_hyphen_values = true)]
    pub(crate) payload: Option<String>,
}
