//! Worker processes: what they register with, what operators see, and the reply to
//! a heartbeat.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::Lease;
use crate::enqueue::DEFAULT_QUEUE;
use crate::job::WorkerId;

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
