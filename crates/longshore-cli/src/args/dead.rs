//! The arguments of `longshore dead`.

use clap::{ArgGroup, Args, Subcommand};
use longshore::{Fingerprint, JobId};

use super::bulk::{Confirm, Filter, Since, since};
use super::{PageArgs, Repeat};

#[derive(Debug, Subcommand)]
pub(crate) enum Dead {
    /// List dead letters, newest first
    #[command(after_help = "\
Examples:
  longshore dead list --kind send_email
  longshore dead list --watch 5s
  longshore dead list --json | jq -r '.jobs[] | [.id, .last_error] | @tsv'")]
    List(DeadList),

    /// List failures in groups: which errors there are, how often, and since when
    ///
    /// Failures belong to one group if their kinds are equal and their errors differ only in numbers, ids, quoted text,
    /// addresses and paths. The group with the newest failure comes first. A group is kept for 30 days, and longer
    /// while it has dead letters.
    #[command(after_help = "\
Examples:
  longshore dead groups
  longshore dead groups --kind send_email --since 1d
  longshore jobs list --failure 9c33ef0a6b1d7f02
  longshore dead redrive --failure 9c33ef0a6b1d7f02")]
    Groups(DeadGroups),

    /// Enqueue dead letters again, with a new set of attempts
    ///
    /// Select them by id, or with --kind, --queue, --failure or --all (oldest first). With a filter, jobs whose
    /// unique key now belongs to another live job are skipped.
    #[command(after_help = "\
Examples:
  longshore dead redrive 01990000-0000-7000-8000-000000000000
  longshore dead redrive --kind send_email --limit 100
  longshore dead redrive --failure 9c33ef0a6b1d7f02
  longshore dead redrive --all")]
    Redrive(Redrive),

    /// Delete dead letters and their history permanently
    #[command(after_help = "\
Examples:
  longshore dead purge 01990000-0000-7000-8000-000000000000
  longshore dead purge --kind send_email --older-than 30d --dry-run
  longshore dead purge --all --yes")]
    Purge(Purge),
}

#[derive(Debug, Args)]
pub(crate) struct DeadList {
    /// Only jobs of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// Only jobs of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    #[command(flatten)]
    pub(crate) page: PageArgs,

    #[command(flatten)]
    pub(crate) every: Repeat,
}

#[derive(Debug, Args)]
pub(crate) struct DeadGroups {
    /// Only groups of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// Only groups with a failure within this period, like 1d, or after this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) since: Option<Since>,

    /// The maximum number of groups, at most 200
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub(crate) limit: u32,

    #[command(flatten)]
    pub(crate) every: Repeat,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true).args(["ids", "kind", "queue", "failure", "all"]))]
pub(crate) struct Redrive {
    /// The ids of the jobs
    #[arg(value_name = "ID", conflicts_with_all = ["kind", "queue", "failure", "all", "limit"])]
    pub(crate) ids: Vec<JobId>,

    /// All dead letters of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// All dead letters of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// All dead letters of this group of failures (see `longshore dead groups`)
    #[arg(long, value_name = "FINGERPRINT")]
    pub(crate) failure: Option<Fingerprint>,

    /// All dead letters
    #[arg(long, conflicts_with_all = ["kind", "queue", "failure"])]
    pub(crate) all: bool,

    /// The maximum number of jobs
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub(crate) limit: Option<u32>,
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true)
    .args(["ids", "kind", "queue", "tag", "older_than", "newer_than", "all"]))]
pub(crate) struct Purge {
    /// The ids of the jobs
    #[arg(value_name = "ID", conflicts_with_all = ["kind", "queue", "tag", "older_than", "newer_than", "all"])]
    pub(crate) ids: Vec<JobId>,

    #[command(flatten)]
    pub(crate) filter: Filter,

    /// All dead letters
    #[arg(long, conflicts_with_all = ["kind", "queue", "tag", "older_than", "newer_than"])]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) confirm: Confirm,
}
