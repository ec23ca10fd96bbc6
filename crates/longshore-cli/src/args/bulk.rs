//! Which jobs an order is for: by their ids, or by what they have in common.

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{ArgGroup, Args};
use longshore::{JobId, Status};

use super::enqueue::rfc3339;
use crate::duration;

/// Some jobs, by id or by filter.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true)
    .args(["ids", "status", "kind", "queue", "tag", "older_than", "newer_than"]))]
pub(crate) struct BulkArgs {
    /// The jobs' ids
    #[arg(value_name = "ID", conflicts_with_all = ["status", "kind", "queue", "tag", "older_than", "newer_than"])]
    pub(crate) ids: Vec<JobId>,

    /// All in this status: queued, running, succeeded, retrying, failed_permanent or cancelled
    #[arg(long)]
    pub(crate) status: Option<Status>,

    #[command(flatten)]
    pub(crate) filter: Filter,

    #[command(flatten)]
    pub(crate) confirm: Confirm,
}

/// What jobs have in common.
#[derive(Debug, Default, Args)]
pub(crate) struct Filter {
    /// All of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// All of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// All with this tag
    #[arg(long)]
    pub(crate) tag: Option<String>,

    /// All that were enqueued longer ago, like 7d, or before a time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) older_than: Option<Since>,

    /// All that were enqueued since, like 1h, or after a time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) newer_than: Option<Since>,
}

/// How sure one is of an order by filter.
#[derive(Debug, Args)]
pub(crate) struct Confirm {
    /// How many at most
    #[arg(long, value_name = "N", conflicts_with = "ids", allow_negative_numbers = true)]
    pub(crate) limit: Option<u64>,

    /// Say how many it would be and change nothing
    #[arg(long, conflicts_with = "ids")]
    pub(crate) dry_run: bool,

    /// Do it without asking
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// A point in the past, by how long ago it is or as itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Since {
    Ago(Duration),
    At(DateTime<Utc>),
}

impl Since {
    /// By this machine's clock, as ids are made by those of who enqueues.
    pub(crate) fn instant(self) -> DateTime<Utc> {
        match self {
            Since::At(at) => at,
            Since::Ago(ago) => chrono::Duration::from_std(ago)
                .ok()
                .and_then(|ago| Utc::now().checked_sub_signed(ago))
                .unwrap_or(DateTime::UNIX_EPOCH),
        }
    }
}

fn since(text: &str) -> Result<Since, String> {
    if let Ok(at) = rfc3339(text) {
        return Ok(Since::At(at));
    }
    duration::parse(text)
        .map(Since::Ago)
        .map_err(|error| format!("{error}; or a time, like 2030-01-31T09:00:00Z"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_point_in_the_past_is_a_time_or_how_long_ago() {
        assert_eq!(since("7d").unwrap(), Since::Ago(Duration::from_secs(7 * 86_400)));
        let at = since("2001-02-03T04:05:06Z").unwrap().instant();
        assert_eq!(at.to_rfc3339(), "2001-02-03T04:05:06+00:00");
        let refused = since("lately").unwrap_err();
        assert!(refused.contains("like 500ms") && refused.contains("or a time"), "{refused}");
        assert_eq!(Since::Ago(Duration::MAX).instant(), DateTime::UNIX_EPOCH, "longer ago than any clock");
        assert!(since("1h").unwrap().instant() < Utc::now());
    }
}
