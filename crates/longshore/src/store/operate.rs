//! Operators' commands on single jobs, and their results.

use crate::error::Error;
use crate::job::JobId;
use crate::rules::enqueue::ValidEdit;
use crate::rules::fingerprint::Fingerprint;

/// An operator's command, as [`lifecycle`](crate::rules::lifecycle) decided it.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A waiting job becomes `cancelled`.
    Cancel {
        /// The number of attempts charged so far.
        attempts: u16,
    },
    /// The cancellation of a running job is requested.
    RequestCancel,
    /// A finished job returns to the queue with a fresh attempt budget.
    Reopen,
    /// As `Reopen`, and its request is edited in the same transaction.
    ReopenWith(ValidEdit),
    /// A waiting job becomes due now.
    RunNow,
    /// A waiting job's request is edited.
    Rewrite(ValidEdit),
    /// A finished job is removed.
    Remove,
}

/// The result of an operator's command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operated {
    /// It is done.
    Done,
    /// Nothing changed: the job's state has changed since it was read. Read it again.
    Moved,
    /// Nothing changed: the job's unique key belongs to this other live job.
    KeyTaken(JobId),
}

/// The error of a job whose request exists, but that is in none of the tables `ready`, `running` and
/// `finished`, for example because rows were deleted by hand. It is not "not found": it still has its
/// keys, and an operator can let it wait again.
pub(crate) fn in_no_table(id: JobId) -> Error {
    Error::internal(format!(
        "job {id} is in none of the tables ready, running and finished; `longshore check` prints the remedy"
    ))
}

/// Which dead letters to list.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Jobs of this kind.
    pub kind: Option<String>,
    /// Jobs of this queue.
    pub queue: Option<String>,
    /// Jobs whose failure belongs to this group.
    pub failure: Option<Fingerprint>,
    /// Jobs with ids after this one.
    pub after: Option<JobId>,
    /// The maximum number of ids.
    pub limit: u32,
}
