//! The lease: the right to run one attempt of one job.

use serde::Serialize;

use crate::job::{JobId, WorkerId};

/// The right to run one attempt of one job: the fence. A claim makes it; from
/// then on every word about the attempt names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Lease {
    /// The job.
    pub id: JobId,
    /// Which lease of the job; rises by one with every claim, for ever.
    pub lease_no: i32,
    /// Who holds it.
    pub worker: WorkerId,
}

/// Whether a lease was still live when something was done in its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Fenced {
    /// It was; the thing is done.
    Held,
    /// It was not; nothing changed.
    LeaseLost,
}
