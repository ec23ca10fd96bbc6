//! Worker processes: registration, the list that operators see, and the reply to a
//! heartbeat.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::Lease;
use crate::enqueue::DEFAULT_QUEUE;
use crate::job::WorkerId;

/// In a worker's list of queues: every queue, including queues that have no job yet.
pub const ALL_QUEUES: &str = "*";

/// A worker process to register.
#[derive(Clone, Debug)]
pub struct NewWorker {
    /// Its id, new at every start.
    pub id: WorkerId,
    /// A name for display.
    pub name: String,
    /// The queues it claims from; [`ALL_QUEUES`] means every queue.
    pub queues: Vec<String>,
    /// The kinds it handles; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// The number of jobs it runs at once.
    pub concurrency: u32,
    /// The worker is dead after this time without a heartbeat.
    pub stale_after: Duration,
    /// The host it runs on, if known.
    pub host: Option<String>,
    /// Its process id, if known.
    pub pid: Option<u32>,
    /// The version of Longshore it was built with, if known.
    pub version: Option<String>,
}

impl NewWorker {
    /// A worker for the default queue that is stale after the default of 60 s.
    pub fn new(name: impl Into<String>) -> Self {
        NewWorker {
            id: WorkerId::new(),
            name: name.into(),
            queues: vec![DEFAULT_QUEUE.into()],
            kinds: None,
            concurrency: 4,
            stale_after: Duration::from_secs(60),
            host: None,
            pid: None,
            version: None,
        }
    }
}

/// What a worker registered with, as far as calls in its name depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// The queues it claims from.
    pub queues: Vec<String>,
    /// The time without a heartbeat after which it is dead.
    pub stale_after: Duration,
}

/// A worker as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct WorkerRecord {
    /// Its id, new at every start.
    pub id: WorkerId,
    /// A name for display.
    pub name: String,
    /// The queues it claims from; [`ALL_QUEUES`] means every queue.
    pub queues: Vec<String>,
    /// The kinds it handles; absent means any.
    pub kinds: Option<Vec<String>>,
    /// The number of jobs it runs at once.
    pub concurrency: u32,
    /// The time without a heartbeat after which it is dead.
    #[serde(rename = "stale_after_seconds", serialize_with = "in_seconds")]
    pub stale_after: Duration,
    /// When it registered.
    pub started_at: DateTime<Utc>,
    /// The time of its last heartbeat.
    pub heartbeat_at: DateTime<Utc>,
    /// When it was declared dead; `None` while it is alive.
    pub dead_at: Option<DateTime<Utc>>,
    /// Whether its heartbeat is older than the threshold. A stale worker is declared dead by
    /// the next sweep or, if it holds a resilient job, after a multiple of the threshold.
    pub stale: bool,
    /// The number of leases it holds.
    pub running: u64,
    /// The host it runs on; absent if unknown.
    pub host: Option<String>,
    /// Its process id; absent if unknown.
    pub pid: Option<u32>,
    /// The version of Longshore it was built with; absent if unknown.
    pub version: Option<String>,
}

impl WorkerRecord {
    /// Whether it claims from this queue.
    pub fn claims_from(&self, queue: &str) -> bool {
        self.queues.iter().any(|name| name == queue || name == ALL_QUEUES)
    }
}

fn in_seconds<S: serde::Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(duration.as_secs_f64())
}

/// A live lease of a worker, as a heartbeat returns it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveLease {
    /// The lease.
    pub lease: Lease,
    /// How long ago the job was claimed.
    pub age: Duration,
    /// Whether the job was interrupted before.
    pub is_suspect: bool,
    /// Whether the handler should stop, because the job is to be cancelled.
    pub cancel_requested: bool,
}

/// The reply to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beat {
    /// The worker is alive.
    Alive {
        /// Held leases that are no longer live.
        lost: Vec<Lease>,
        /// Held leases whose handlers should stop.
        cancel: Vec<Lease>,
    },
    /// The worker was declared dead or is unknown. It must stop its handlers and
    /// register again under a new id.
    Dead,
}
