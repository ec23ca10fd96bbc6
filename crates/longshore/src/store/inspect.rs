//! What people see: lists, counts, and the proof that nothing is lost. One job's
//! record is in [`job`](crate::job).

use serde::Serialize;

use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, Status};

/// Which jobs to list.
#[derive(Clone, Debug)]
pub struct ListFilter {
    /// In this status.
    pub status: Option<Status>,
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// With this tag.
    pub tag: Option<String>,
    /// With this idempotency key.
    pub idempotency_key: Option<String>,
    /// With this unique key (live jobs only).
    pub unique_key: Option<String>,
    /// Older than this job.
    pub cursor: Option<JobId>,
    /// Past this many matches, up to 10,000.
    pub offset: u32,
    /// How many, 1 to 200.
    pub limit: u32,
}

impl ListFilter {
    /// How far `offset` reaches; past it, use `cursor`.
    pub const MAX_OFFSET: u32 = 10_000;
    /// How many jobs a page holds at most.
    pub const MAX_LIMIT: u32 = 200;
    /// How many rows a page examines at most.
    pub const MAX_EXAMINED: u32 = 20_000;
}

impl ListFilter {
    pub(crate) fn validate(&self) -> Result<()> {
        if self.offset > ListFilter::MAX_OFFSET {
            return Err(Error::invalid(
                "offset",
                format!("offset: {} is past {}; use `cursor` to go on", self.offset, ListFilter::MAX_OFFSET),
            ));
        }
        Ok(())
    }

    /// The page's size, within its bounds.
    pub(crate) fn page_size(&self) -> u32 {
        self.limit.clamp(1, ListFilter::MAX_LIMIT)
    }
}

impl Default for ListFilter {
    fn default() -> Self {
        ListFilter {
            status: None,
            kind: None,
            queue: None,
            tag: None,
            idempotency_key: None,
            unique_key: None,
            cursor: None,
            offset: 0,
            limit: 50,
        }
    }
}

/// One page of a list.
#[derive(Clone, Debug, Serialize)]
pub struct Page {
    /// The jobs, newest first.
    pub jobs: Vec<JobRecord>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<JobId>,
}

/// How many jobs of a queue and kind are in a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Count {
    /// The status.
    pub status: Status,
    /// The queue.
    pub queue: String,
    /// The kind.
    pub kind: String,
    /// How many.
    pub jobs: u64,
    /// Whether that is an estimate, because very many wait.
    pub estimated: bool,
}

/// What [`Store::check`](super::Store::check) found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// How many jobs were looked at.
    pub jobs: u64,
    /// What is wrong, one sentence each; empty when all is well. Lists stop at
    /// a hundred of a kind.
    pub problems: Vec<String>,
}
