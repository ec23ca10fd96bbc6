//! The lease: the right to run one attempt of one job.

use serde::Serialize;

use crate::job::{JobId, WorkerId};

/// The right to run one attempt of one job. A claim creates it. Every later operation
/// on the attempt names it, and changes nothing if it is no longer live: the lease is
/// the fence against stale workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Lease {
    /// The job.
    pub id: JobId,
    /// The number of the lease. Every claim of the job increases it by one; it never
    /// decreases.
    pub lease_no: i32,
    /// The worker that holds it.
    pub worker: WorkerId,
}

/// Whether the lease was live when an operation ran under it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Fenced {
    /// The lease was live, and the operation is done.
    Held,
    /// The lease was not live, and nothing changed.
    LeaseLost,
}
