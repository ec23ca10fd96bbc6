//! The arguments of bulk operations: which jobs they apply to, by id or by filter, and
//! how they are confirmed.

use std::time::Duration;

use chrono::{DateTime, Utc};
use clap::{ArgGroup, Args};
use longshore::{JobId, Status};

use super::enqueue::rfc3339;
use super::values;
use crate::duration;

/// The jobs of one operation, by id or by filter.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("which").required(true).multiple(true)
    .args(["ids", "status", "kind", "queue", "tag", "older_than", "newer_than"]))]
pub(crate) struct BulkArgs {
    /// The ids of the jobs
    #[arg(value_name = "ID", conflicts_with_all = ["status", "kind", "queue", "tag", "older_than", "newer_than"])]
    pub(crate) ids: Vec<JobId>,

    /// All jobs in this status
    #[arg(long, value_parser = values::status())]
    pub(crate) status: Option<Status>,

    #[command(flatten)]
    pub(crate) filter: Filter,

    #[command(flatten)]
    pub(crate) confirm: Confirm,
}

/// Conditions that all selected jobs meet.
#[derive(Debug, Default, Args)]
pub(crate) struct Filter {
    /// All jobs of this kind
    #[arg(long)]
    pub(crate) kind: Option<String>,

    /// All jobs of this queue
    #[arg(long)]
    pub(crate) queue: Option<String>,

    /// All jobs with this tag
    #[arg(long)]
    pub(crate) tag: Option<String>,

    /// All jobs that were enqueued longer ago than this, like 7d, or before this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) older_than: Option<Since>,

    /// All jobs that were enqueued within this period, like 1h, or after this time
    #[arg(long, value_name = "DURATION|RFC3339", value_parser = since)]
    pub(crate) newer_than: Option<Since>,
}

/// How an operation by filter is limited and confirmed.
#[derive(Debug, Args)]
pub(crate) struct Confirm {
    /// The maximum number of jobs
    #[arg(long, value_name = "N", conflicts_with = "ids", allow_negative_numbers = true)]
    pub(crate) limit: Option<u64>,

    /// Print how many jobs would be changed and change nothing
    #[arg(long, conflicts_with = "ids")]
    pub(crate) dry_run: bool,

    /// Do not ask for confirmation
    #[arg(long, short)]
    pub(crate) yes: bool,
}

/// A point in the past, given as an age or as a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Since {
    Ago(Duration),
    At(DateTime<Utc>),
}

impl Since {
    /// Uses this machine's clock, not the database's: the time of enqueueing is part of a job's id,
    /// and the id comes from the clock of the process that enqueued it.
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

pub(super) fn since(text: &str) -> Result<Since, String> {
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
    fn a_point_in_the_past_is_a_time_or_an_age() {
        assert_eq!(since("7d").unwrap(), Since::Ago(Duration::from_secs(7 * 86_400)));
        let at = since("2001-02-03T04:05:06Z").unwrap().instant();
        assert_eq!(at.to_rfc3339(), "2001-02-03T04:05:06+00:00");
        let error = since("lately").unwrap_err();
        assert!(error.contains("like 500ms") && error.contains("or a time"), "{error}");
        assert_eq!(
            Since::Ago(Duration::MAX).instant(),
            DateTime::UNIX_EPOCH,
            "an age beyond the clock's range"
        );
        assert!(since("1h").unwrap().instant() < Utc::now());
    }
}
