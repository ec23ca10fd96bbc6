//! What a caller enqueues: [`NewJob`], its checks, and the lanes in which concurrent
//! enqueues share commits.
//!
//! | File | Owns |
//! |---|---|
//! | `new_job` | what a caller can set, and the job that has passed every check |
//! | `edit` | what an operator can change while a job waits |
//! | `check` | the checks and their limits |
//! | `lanes`, `held_keys` | group commit; keys that another transaction holds |

use serde::Serialize;

use crate::job::JobId;

mod check;
mod edit;
mod held_keys;
pub(crate) mod lanes;
mod new_job;

pub use check::{MAX_DEPTH, MAX_KEY, MAX_NAME, MAX_PAYLOAD};
pub(crate) use check::{check_json, check_labels, check_name};
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
