//! What a caller enqueues: [`NewJob`], its checks, and the lanes in which concurrent
//! enqueues share commits.
//!
//! | File | Owns |
//! |---|---|
//! | `new_job` | what a caller can set, and the job that has passed every check |
//! | `edit` | what an operator can change while a job waits |
//! | `check` | the checks and their limits |
//! | `lanes`, `held_keys` | group commit; keys that another transaction holds |

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::client::Client;
use crate::error::Result;
use crate::job::{JobId, JobRecord};

mod check;
mod edit;
mod held_keys;
pub(crate) mod lanes;
mod new_job;

#[cfg(feature = "api")]
pub(crate) use check::check_text;
pub use check::{MAX_DEPTH, MAX_KEY, MAX_NAME, MAX_PAYLOAD};
pub(crate) use check::{check_event, check_json, check_key, check_labels, check_name, check_queue};
pub use edit::Edit;
pub(crate) use edit::ValidEdit;
pub(crate) use new_job::Options;
pub use new_job::{DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, DEFAULT_TIMEOUT, NewJob, UniqueMode, ValidJob};

/// The result of an enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Enqueued {
    /// The id of the job: the new one, or the one that already had the key.
    pub id: JobId,
    /// Whether the job was created or already existed.
    pub how: EnqueuedAs,
}

impl Enqueued {
    /// Reads the whole job. To get it from the enqueue itself, which costs no further query
    /// for a new job, use [`returning_job`](crate::Enqueueing::returning_job).
    pub async fn job(&self, client: &Client) -> Result<JobRecord> {
        client.get(self.id).await
    }
}

/// What [`enqueue`](crate::store::Enqueue::enqueue) stored.
#[derive(Clone, Debug)]
pub struct EnqueuedBatch {
    /// One result per job, in the order given.
    pub results: Vec<Enqueued>,
    /// When the created jobs were created: all at the same time, that of the commit's
    /// statement. `None` if an earlier try, whose reply was lost, had stored one of them.
    pub created_at: Option<DateTime<Utc>>,
}

/// A request that was stored, with its result.
#[derive(Debug)]
pub(crate) struct StoredRequest {
    pub(crate) enqueued: Enqueued,
    job: ValidJob,
    created_at: Option<DateTime<Utc>>,
}

impl StoredRequest {
    /// The job as it was created. `None` if the request did not create it, or if an
    /// earlier try did: then the job may have changed since, and must be read.
    pub(crate) fn into_created_job(self) -> Option<JobRecord> {
        let created_at = self.created_at.filter(|_| self.enqueued.how == EnqueuedAs::Created)?;
        self.job.into_record(created_at)
    }
}

/// Whether an enqueue created a job or found an existing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EnqueuedAs {
    /// A new job.
    Created,
    /// An existing job with the same key, unchanged.
    Existing,
    /// A waiting job with the same key, which now has the new contents.
    Replaced,
}
