//! What a caller enqueues: [`NewJob`], its checks, and the result. The client stores it.
//!
//! | File | Owns |
//! |---|---|
//! | `new_job` | what a caller can set, and the job that has passed every check |
//! | `edit` | what an operator can change while a job waits |
//! | `check` | the checks and their limits |

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::job::JobId;

mod check;
mod edit;
mod new_job;

pub(crate) use check::MAX_SCHEMA;
#[cfg(feature = "api")]
pub(crate) use check::check_text;
pub use check::{ALL_QUEUES, MAX_DEPTH, MAX_NAME, MAX_PAYLOAD};
pub(crate) use check::{check_event, check_json, check_key, check_labels, check_name, check_queue};
pub use edit::Edit;
pub(crate) use edit::ValidEdit;
pub(crate) use new_job::Options;
pub use new_job::{DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE, DEFAULT_TIMEOUT, NewJob, ValidJob};

pub use super::keys::{EnqueuedAs, MAX_KEY, UniqueMode};

/// The result of an enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Enqueued {
    /// The id of the job: the new one, or the one that already had the key.
    pub id: JobId,
    /// Whether the job was created or already existed.
    pub how: EnqueuedAs,
}

/// What [`Store::enqueue`](crate::store::Store::enqueue) stored.
#[derive(Clone, Debug)]
pub struct EnqueuedBatch {
    /// One result per job, in the order given.
    pub results: Vec<Enqueued>,
    /// When the created jobs were created: all at the same time, that of the commit's
    /// statement. `None` if an earlier try, whose reply was lost, had stored one of them.
    pub created_at: Option<DateTime<Utc>>,
}
