//! What this server keeps in memory about HTTP workers. It only makes calls faster:
//! any other server can handle the next call without it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::job::WorkerId;
use crate::store::{ClaimCursor, Lease};

/// The session of a worker that has not called for this long is dropped.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);
/// The maximum number of sessions. Beyond it, the one whose worker has not called for the
/// longest time is dropped.
const MAX_SESSIONS: usize = if cfg!(test) { 100 } else { 10_000 };

/// The sessions of the workers that call this server.
#[derive(Default)]
pub(in crate::api) struct Sessions(Mutex<HashMap<WorkerId, Entry>>);

/// When a worker last called, and its session.
type Entry = (Instant, Arc<tokio::sync::Mutex<Session>>);

/// What is remembered of one worker.
#[derive(Default)]
pub(super) struct Session {
    /// Where the last claim stopped. Without it, every call would read past all due jobs
    /// that the worker does not handle.
    pub(super) cursor: ClaimCursor,
    /// The queues and kinds of the last claim.
    pub(super) filter: (Vec<String>, Option<Vec<String>>),
    /// The leases the worker holds, as far as this server knows, and whether each job
    /// is a suspect: interrupted before.
    pub(super) held: HashMap<Lease, bool>,
    /// The cancels in the last response. They do not end the wait of the next call.
    pub(super) reported_cancels: HashSet<Lease>,
    /// The value the worker registered with.
    pub(super) stale_after: Option<Duration>,
}

impl Sessions {
    /// The session of a worker, created on its first call.
    pub(super) fn of(&self, worker: WorkerId) -> Arc<tokio::sync::Mutex<Session>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, (called, _)| called.elapsed() < IDLE_TIMEOUT);
        if sessions.len() >= MAX_SESSIONS && !sessions.contains_key(&worker) {
            let oldest = sessions.iter().min_by_key(|(_, (called, _))| *called).map(|(worker, _)| *worker);
            oldest.map(|oldest| sessions.remove(&oldest));
        }
        let (called, session) = sessions.entry(worker).or_insert_with(|| (Instant::now(), Arc::default()));
        *called = Instant::now();
        session.clone()
    }

    pub(super) fn remove(&self, worker: WorkerId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sessions_is_limited() {
        let sessions = Sessions::default();
        let first = WorkerId::new();
        let kept = sessions.of(first);
        for _ in 0..MAX_SESSIONS {
            sessions.of(WorkerId::new());
        }
        assert_eq!(sessions.0.lock().map(|sessions| sessions.len()).ok(), Some(MAX_SESSIONS));
        assert!(!Arc::ptr_eq(&kept, &sessions.of(first)), "the session of the first worker was dropped");
    }
}
