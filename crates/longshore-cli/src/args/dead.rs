//! What `longshore dead` can be told.

use clap::{ArgGroup, Args, Subcommand};
use longshore::JobId;

use super::bulk::{Confirm, Filter};
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

    /// Remove dead letters and their history, for good
    #[command(after_help = "\
Examples:
  longshore dead purge 01990000-0000-7000-8000-000000000000
  longshore dead purge --kind send_email --older-than 30d --dry-run
  longshore dead purge --all --yes")]
    Purge(Purge),
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

    #[command(flatten)]
    pub(crate) every: Repeat,
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

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true)
    .args(["ids", "kind", "queue", "tag", "older_than", "newer_than", "all"]))]
pub(crate) struct Purge {
    /// The jobs' ids
    #[arg(value_name = "ID", conflicts_with_all = ["kind", "queue", "tag", "older_than", "newer_than", "all"])]
    pub(crate) ids: Vec<JobId>,

    #[command(flatten)]
    pub(crate) filter: Filter,

    /// All of them
    #[arg(long, conflicts_with_all = ["kind", "queue", "tag", "older_than", "newer_than"])]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) confirm: Confirm,
}
