//! Queues: their settings, and the list that operators see.

use serde::Serialize;

/// A change to a queue's settings.
#[derive(Clone, Debug, Default)]
pub struct QueueChange {
    /// Whether the queue is paused: no jobs are claimed from it.
    pub paused: Option<bool>,
    /// The maximum number of its jobs that run at once, in all processes together;
    /// the inner `None` removes the limit.
    pub limit: Option<Option<u32>>,
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
    /// The number of waiting jobs.
    pub waiting: u64,
    /// Whether `waiting` is an estimate, because too many jobs wait to count them.
    pub waiting_estimated: bool,
    /// The number of running jobs.
    pub running: u64,
}

impl QueueRecord {
    /// A queue without settings and without jobs.
    pub fn empty(name: &str) -> Self {
        QueueRecord {
            name: name.to_owned(),
            paused: false,
            limit: None,
            waiting: 0,
            waiting_estimated: false,
            running: 0,
        }
    }
}
