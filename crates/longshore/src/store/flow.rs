//! What happens to a lease: how it ends, and the workers whose heartbeat keeps
//! it.

use std::borrow::Cow;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use super::Lease;
use crate::enqueue::{DEFAULT_QUEUE, MAX_PAYLOAD, ValidJob, check_json};
use crate::job::WorkerId;
use crate::lifecycle::{Flags, Leave};

// ---- settle --------------------------------------------------------------

/// The end of one lease, and what it was decided from.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// Whose end it is.
    pub lease: Lease,
    /// The flags it was decided from; `None` if they make no difference.
    pub seen: Option<Flags>,
    /// What becomes of the job.
    pub leave: Leave,
    /// Jobs that exist only if this is stored.
    pub follow_ups: Vec<ValidJob>,
}

/// What became of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is in the database, now or since an earlier try.
    Stored,
    /// The lease lives, but these flags have been raised: decide again.
    Flagged(Flags),
    /// Somebody else owns the job now, or it has ended; nothing changed.
    LeaseLost,
}

/// The longest error text that is kept, in bytes.
pub(crate) const MAX_ERROR: usize = 64 * 1024;

/// Text from a handler, as both engines can store it, without NUL and cut:
/// content can never break settling.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    let cut = &text[..text.floor_char_boundary(MAX_ERROR)];
    match cut.contains('\0') {
        true => Cow::Owned(cut.replace('\0', "")),
        false => Cow::Borrowed(cut),
    }
}

/// A handler's result, as it may be stored; one that cannot be is replaced by
/// the reason, because the success itself must not be lost.
pub(crate) fn keepable(result: Box<RawValue>) -> Box<RawValue> {
    match check_json("result", result.get(), MAX_PAYLOAD) {
        Ok(()) => result,
        Err(error) => {
            let reason = serde_json::json!({ "not_kept": error.to_string() });
            RawValue::from_string(reason.to_string()).unwrap_or(result)
        }
    }
}

// ---- workers -------------------------------------------------------------

/// A worker process that begins.
#[derive(Clone, Debug)]
pub struct NewWorker {
    /// This boot's id.
    pub id: WorkerId,
    /// A name for people.
    pub name: String,
    /// The queues it claims from.
    pub queues: Vec<String>,
    /// The kinds it handles; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// How many jobs it runs at once.
    pub concurrency: u32,
    /// Without a heartbeat for this long it is dead.
    pub stale_after: Duration,
}

impl NewWorker {
    /// A worker of the default queue with the default threshold of 60 s.
    pub fn new(name: impl Into<String>) -> Self {
        NewWorker {
            id: WorkerId::new(),
            name: name.into(),
            queues: vec![DEFAULT_QUEUE.into()],
            kinds: None,
            concurrency: 4,
            stale_after: Duration::from_secs(60),
        }
    }
}

/// A worker as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerRecord {
    /// This boot's id.
    pub id: WorkerId,
    /// A name for people.
    pub name: String,
    /// The queues it claims from.
    pub queues: Vec<String>,
    /// The kinds it handles; absent means any.
    pub kinds: Option<Vec<String>>,
    /// How many jobs it runs at once.
    pub concurrency: u32,
    /// Its threshold.
    #[serde(rename = "stale_after_seconds", serialize_with = "in_seconds")]
    pub stale_after: Duration,
    /// When it registered.
    pub started_at: DateTime<Utc>,
    /// Its last sign of life.
    pub heartbeat_at: DateTime<Utc>,
    /// When it was declared dead.
    pub dead_at: Option<DateTime<Utc>>,
    /// Whether its heartbeat is older than the threshold.
    pub stale: bool,
    /// How many leases name it.
    pub running: u64,
}

fn in_seconds<S: serde::Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(duration.as_secs_f64())
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Alive; mind these.
    Alive {
        /// Held leases that are no longer live.
        lost: Vec<Lease>,
        /// Held leases whose handlers should stop.
        cancel: Vec<Lease>,
    },
    /// Declared dead, or unknown: stop everything and register anew.
    Dead,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_cleaned_and_cut_on_a_character() {
        let long = format!("x{}", "é".repeat(40_000));
        assert_eq!(clean(&long).len(), 64 * 1024 - 1);
        assert_eq!(clean("a\0b"), "ab");
    }
}
