//! What an operator may ask of a job or a queue, and the answers.

use serde::Serialize;

use crate::enqueue::ValidEdit;
use crate::job::JobId;

/// An operator's move, as [`lifecycle`](crate::lifecycle) decided it.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A waiting job ends as cancelled with these attempts charged.
    Cancel {
        /// See there.
        attempts: u16,
    },
    /// A running job is told to stop.
    RequestCancel,
    /// A finished job waits again with a fresh budget.
    Reopen,
    /// A waiting job is due now.
    RunNow,
    /// A waiting job gets other contents.
    Rewrite(ValidEdit),
    /// A finished job is removed.
    Remove,
}

/// What became of an operator's move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operated {
    /// Done.
    Done,
    /// The job has moved since it was located: look again.
    Moved,
    /// The job's unique key belongs to another live job.
    KeyTaken(JobId),
}

/// Which dead letters.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// After this id.
    pub after: Option<JobId>,
    /// How many at most.
    pub limit: u32,
}

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
