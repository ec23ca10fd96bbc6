//! Queues: settings, and what operators see.

use serde::Serialize;

/// What to change about a queue.
#[derive(Clone, Debug, Default)]
pub struct QueueChange {
    /// Whether claims leave it alone.
    pub paused: Option<bool>,
    /// How many of its jobs may run at once, in all processes together; the
    /// inner `None` lifts the limit.
    pub limit: Option<Option<u32>>,
}

/// A queue as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueueRecord {
    /// Its name.
    pub name: String,
    /// Whether claims leave it alone.
    pub paused: bool,
    /// How many of its jobs may run at once.
    pub limit: Option<u32>,
    /// How many wait.
    pub waiting: u64,
    /// Whether `waiting` is an estimate, because there are very many.
    pub waiting_estimated: bool,
    /// How many run.
    pub running: u64,
}

impl QueueRecord {
    /// One without settings or live jobs.
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
