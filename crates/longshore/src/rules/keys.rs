//! What an enqueue does when one of its keys belongs to another job. Pure, like
//! [`lifecycle`](crate::rules::lifecycle): the engines read who holds the keys, this
//! module decides, and the engines store the decision if the holders have not
//! changed.
//!
//! The SQL function `longshore.enqueue`, for callers without the library, contains
//! the same rules; the conformance suite compares it with [`decide`].
//!
//! Also owns the stored form of keys. All callers share one set of keys, except those who may use only some
//! queues: their keys are in a namespace of the job's queue, so nobody can take a key of a queue that is not
//! theirs. The engines store and compare both kinds of keys in the same way.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::job::JobId;

/// Maximum length of an idempotency key or unique key, in bytes.
pub const MAX_KEY: usize = 512;

/// What an enqueue does if its unique key belongs to a live job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UniqueMode {
    /// Return the live job, whether it waits or runs. If it is being cancelled, store a new
    /// job that takes over the key.
    #[default]
    Dedupe,
    /// Give a waiting job the new contents and the new time. If the job is running, store
    /// a new job that takes over the key; the running job is not retried.
    Replace,
    /// As `Replace`, but a waiting job keeps its time.
    PreserveRunAt,
}

impl UniqueMode {
    /// The name used in the API, in SQL and in the command.
    pub fn as_str(self) -> &'static str {
        match self {
            UniqueMode::Dedupe => "dedupe",
            UniqueMode::Replace => "replace",
            UniqueMode::PreserveRunAt => "preserve_run_at",
        }
    }
}

impl std::str::FromStr for UniqueMode {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt]
            .into_iter()
            .find(|mode| mode.as_str() == word)
            .ok_or_else(|| {
                Error::invalid(
                    "unique_mode",
                    format!("unique_mode `{word}` does not exist; use dedupe, replace or preserve_run_at"),
                )
            })
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

/// Keys that start with this belong to the ticks of schedules. Callers cannot use them, so no
/// caller can prevent a tick from creating its job.
pub(crate) const TICK_PREFIX: &str = "cron:";

/// The first character of the stored form of a key in a namespace. Callers cannot use it, so they cannot write a key of
/// a namespace themselves.
const NAMESPACE: char = '\u{1f}';

/// Refuses a key that a caller cannot use, because it could be one of a namespace.
pub(crate) fn check_reserved(field: &'static str, key: &str) -> Result<()> {
    if key.starts_with(NAMESPACE) {
        return Err(Error::invalid(
            field,
            format!("{field}: starts with the control character U+001F, which is reserved; remove it"),
        ));
    }
    Ok(())
}

/// The stored form of a key in the namespace of this queue.
#[cfg(feature = "api")]
pub(crate) fn in_namespace(field: &'static str, queue: &str, key: &str) -> Result<String> {
    let stored = namespaced(queue, key);
    if stored.len() > MAX_KEY {
        return Err(Error::invalid(
            field,
            format!(
                "{field}: has {} bytes; with a token that covers only some queues, the name of the queue counts too: \
                 use at most {} for queue `{queue}`",
                key.len(),
                MAX_KEY - (stored.len() - key.len()),
            ),
        ));
    }
    Ok(stored)
}

// With the length of the queue's name, because both texts can contain any character.
fn namespaced(queue: &str, key: &str) -> String {
    format!("{NAMESPACE}{}:{queue}{key}", queue.len())
}

/// The stored forms of the keys that a list with this key and this queue looks for: the key that all callers share, and
/// the one in the namespace of the queue.
pub(crate) fn stored_forms(key: &str, queue: Option<&str>) -> Vec<String> {
    // Nobody can have written such a key.
    if key.starts_with(NAMESPACE) {
        return Vec::new();
    }
    std::iter::once(key.to_owned()).chain(queue.map(|queue| namespaced(queue, key))).collect()
}

/// A stored key as the caller wrote it.
pub(crate) fn as_written(stored: String) -> String {
    let written = || {
        let (length, rest) = stored.strip_prefix(NAMESPACE)?.split_once(':')?;
        rest.get(length.parse().ok()?..)
    };
    match written() {
        Some(key) => key.to_owned(),
        None => stored,
    }
}

/// Which jobs hold the id and the keys of a new job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    /// The result of an earlier try with the same id, whose reply was lost: the job
    /// itself is stored, or its request was merged into another job.
    pub earlier: Option<(JobId, EnqueuedAs)>,
    /// The job with the same idempotency key, in any state. The key may be that of a
    /// request that was merged into the job.
    pub idempotency: Option<JobId>,
    /// The live job that owns the unique key.
    pub unique: Option<(JobId, Owner)>,
}

/// The state of the live job that owns a unique key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// It waits.
    Waiting,
    /// It runs.
    Running,
    /// It runs, and its cancellation was requested.
    Cancelling,
}

/// What an enqueue does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Nothing: an earlier try had this result.
    Repeat(JobId, EnqueuedAs),
    /// Return this job, unchanged.
    Existing(JobId),
    /// Return this job, unchanged. If the request has an idempotency key, merge the
    /// request into the job, so that the key returns the job from now on.
    Dedupe(JobId),
    /// Store the new job. It owns its unique key, if it has one.
    Insert,
    /// Give this waiting job the new contents and a fresh budget of attempts. It keeps its
    /// interruptions: a job that kills its workers stays a suspect. Its checkpoint belongs
    /// to the old contents and is deleted. Merge the request into the job, so that its id
    /// and its idempotency key return the job from now on.
    Replace(JobId, RunAt),
    /// Store the new job and move the unique key to it. The running job may finish,
    /// but is not requeued.
    Supersede(JobId),
}

/// Which `run_at` a waiting job has after its contents were replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunAt {
    /// That of the new request.
    New,
    /// That of the waiting job.
    Preserved,
}

/// Decides what an enqueue does. `mode` is that of the new job's unique key.
///
/// The idempotency key comes first: a repeated request returns the first job,
/// whatever its body and its unique key say.
pub fn decide(holders: Holders, mode: UniqueMode) -> Decision {
    match holders {
        // The unique key of a stored job may be free again, and a job that has
        // ended must not take it. A replacement must not be applied twice: the job may
        // have newer contents by now, or may have started.
        Holders { earlier: Some((id, how)), .. } => Decision::Repeat(id, how),
        Holders { idempotency: Some(id), .. } => Decision::Existing(id),
        Holders { unique: None, .. } => Decision::Insert,
        Holders { unique: Some((id, owner)), .. } => match (mode, owner) {
            (UniqueMode::Dedupe, Owner::Waiting | Owner::Running) => Decision::Dedupe(id),
            // The work of a job that is being cancelled may never be done.
            (UniqueMode::Dedupe, Owner::Cancelling) => Decision::Supersede(id),
            (UniqueMode::Replace, Owner::Waiting) => Decision::Replace(id, RunAt::New),
            (UniqueMode::PreserveRunAt, Owner::Waiting) => Decision::Replace(id, RunAt::Preserved),
            (UniqueMode::Replace | UniqueMode::PreserveRunAt, Owner::Running | Owner::Cancelling) => {
                Decision::Supersede(id)
            }
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_in_a_namespace_differs_from_every_other_key_and_is_shown_as_written() {
        let pairs = [
            ("a", "b:c"),
            ("a", "1:ac"),
            ("ab", "c"),
            ("a", "bc"),
            ("1:a", "c"),
            ("\u{1f}1:a", "c"),
            ("ü", "é"),
        ];
        let mut stored = Vec::new();
        for (queue, key) in pairs {
            let namespaced = namespaced(queue, key);
            assert_eq!(as_written(namespaced.clone()), key);
            assert!(check_reserved("unique_key", &namespaced).is_err());
            assert_eq!(stored_forms(key, Some(queue)), [key.to_owned(), namespaced.clone()]);
            assert_eq!(stored_forms(&namespaced, Some(queue)), Vec::<String>::new());
            stored.push(namespaced);
        }
        stored.sort_unstable();
        stored.dedup();
        assert_eq!(stored.len(), pairs.len());
        for key in ["plain", "1:a", ":", "cron:nightly"] {
            assert_eq!(as_written(key.into()), key);
            check_reserved("unique_key", key).unwrap();
        }
    }

    #[cfg(feature = "api")]
    #[test]
    fn the_name_of_the_queue_counts_for_the_length_of_a_key_in_its_namespace() {
        let longest = "k".repeat(MAX_KEY - "\u{1f}4:mail".len());
        assert_eq!(in_namespace("unique_key", "mail", &longest).unwrap().len(), MAX_KEY);
        let error = in_namespace("unique_key", "mail", &format!("{longest}k")).unwrap_err();
        assert_eq!(error.field(), Some("unique_key"));
        assert!(error.to_string().contains(&format!("use at most {}", longest.len())), "{error}");
    }

    const MODES: [UniqueMode; 3] = [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt];

    #[test]
    fn an_earlier_result_comes_before_every_key() {
        for how in [EnqueuedAs::Created, EnqueuedAs::Replaced, EnqueuedAs::Existing] {
            let id = JobId::new();
            let holders = Holders {
                earlier: Some((id, how)),
                idempotency: Some(JobId::new()),
                unique: Some((JobId::new(), Owner::Waiting)),
            };
            for mode in MODES {
                assert_eq!(decide(holders, mode), Decision::Repeat(id, how));
            }
        }
    }

    #[test]
    fn an_idempotency_key_comes_before_a_unique_key() {
        let first = JobId::new();
        let unique = Some((JobId::new(), Owner::Running));
        for mode in MODES {
            let holders = Holders { earlier: None, idempotency: Some(first), unique };
            assert_eq!(decide(holders, mode), Decision::Existing(first));
        }
    }

    #[test]
    fn a_job_with_a_free_unique_key_is_inserted() {
        for mode in MODES {
            assert_eq!(decide(Holders::default(), mode), Decision::Insert);
        }
    }

    #[test]
    fn the_mode_and_the_owners_state_decide_about_a_unique_key() {
        let id = JobId::new();
        let decide =
            |owner, mode| super::decide(Holders { unique: Some((id, owner)), ..Holders::default() }, mode);
        assert_eq!(decide(Owner::Waiting, UniqueMode::Dedupe), Decision::Dedupe(id));
        assert_eq!(decide(Owner::Running, UniqueMode::Dedupe), Decision::Dedupe(id));
        for mode in MODES {
            assert_eq!(decide(Owner::Cancelling, mode), Decision::Supersede(id));
        }
        assert_eq!(decide(Owner::Waiting, UniqueMode::Replace), Decision::Replace(id, RunAt::New));
        assert_eq!(
            decide(Owner::Waiting, UniqueMode::PreserveRunAt),
            Decision::Replace(id, RunAt::Preserved)
        );
        assert_eq!(decide(Owner::Running, UniqueMode::Replace), Decision::Supersede(id));
        assert_eq!(decide(Owner::Running, UniqueMode::PreserveRunAt), Decision::Supersede(id));
    }
}
