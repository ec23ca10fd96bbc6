//! Operators' commands on jobs, and what became of them.

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
