//! Queues: their settings, and the list that operators see.

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::turns::Rate;

/// A change to a queue's settings.
#[derive(Clone, Debug, Default)]
pub struct QueueChange {
    /// Whether the queue is paused: no jobs are claimed from it.
    pub paused: Option<bool>,
    /// The maximum number of its jobs that run at once, in all processes together;
    /// the inner `None` removes the limit.
    pub limit: Option<Option<u32>>,
    /// How often its jobs may start, in all processes together; the inner `None` removes the rate.
    pub rate: Option<Option<Rate>>,
    /// The maximum number of running jobs of each of its groups, unless the group has its own; the
    /// inner `None` removes it.
    pub group_limit: Option<Option<u32>>,
    /// How often jobs of each of its groups may start, unless the group has its own rate; the inner
    /// `None` removes it.
    pub group_rate: Option<Option<Rate>>,
}

/// A queue as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct QueueRecord {
    /// Its name.
    pub name: String,
    /// Whether it is paused: no jobs are claimed from it.
    pub paused: bool,
    /// The maximum number of its jobs that run at once; `None` means no limit.
    pub limit: Option<u32>,
    /// How often its jobs may start; `None` means no limit.
    pub rate: Option<Rate>,
    /// The maximum number of running jobs of each of its groups, unless the group has its own.
    pub group_limit: Option<u32>,
    /// How often jobs of each of its groups may start, unless the group has its own rate.
    pub group_rate: Option<Rate>,
    /// When its rate lets the next job start; `None` means now.
    pub next_start_at: Option<DateTime<Utc>>,
    /// The number of waiting jobs.
    pub waiting: u64,
    /// Whether `waiting` is an estimate, because too many jobs wait to count them.
    pub waiting_estimated: bool,
    /// The number of running jobs.
    pub running: u64,
    /// The number of its groups that are paused, up to 1,000.
    pub paused_groups: u64,
}

impl QueueRecord {
    /// A queue without settings and without jobs.
    pub fn empty(name: &str) -> Self {
        QueueRecord {
            name: name.to_owned(),
            paused: false,
            limit: None,
            rate: None,
            group_limit: None,
            group_rate: None,
            next_start_at: None,
            waiting: 0,
            waiting_estimated: false,
            running: 0,
            paused_groups: 0,
        }
    }
}
