//! Enqueue: storing new jobs, and how long that waits for a key that is taken.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::rules::enqueue::{EnqueuedBatch, ValidJob};

/// Storing new jobs.
#[async_trait]
pub trait Enqueue {
    /// Stores jobs in one commit and returns, per job, whether it was created, already
    /// existed or replaced the contents of a waiting job. A repeated id, a taken
    /// idempotency key or a live unique key is a result, not an error, and does not
    /// affect the other jobs of the batch. If a unique key makes a request part of another
    /// job, the request's idempotency key, and the id of a replacement, return that job for
    /// as long as it is kept.
    async fn enqueue(&self, jobs: &[ValidJob], wait: KeyWait) -> Result<EnqueuedBatch>;
}

/// How long an operation waits for a key or a row that another client's open transaction
/// holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWait {
    /// Hardly at all: the caller skips what is locked, and comes back to it.
    Skip,
    /// A fraction of a second: the caller tries again in another way.
    Short,
    /// A few seconds, on one of the few connections for this purpose.
    Long,
    /// As `Long`, but at most this long.
    UpTo(Duration),
}
