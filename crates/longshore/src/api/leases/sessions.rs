//! What a server remembers of the workers that call it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::job::WorkerId;
use crate::store::{ClaimCursor, Lease};

/// What is remembered of workers that have not called for so long is dropped.
const IDLE_TIMEOUT: Duration = Duration::from_secs(600);

/// What this server remembers of the workers that call it. Nothing of it is
/// needed: another server would do as well, only slower.
#[derive(Default)]
pub(in crate::api) struct Sessions(Mutex<HashMap<WorkerId, Known>>);

/// When a worker last called, and what is remembered of it.
type Known = (Instant, Arc<tokio::sync::Mutex<Session>>);

#[derive(Default)]
pub(super) struct Session {
    /// Where the last claim stopped, and for which queues and kinds.
    pub(super) cursor: ClaimCursor,
    pub(super) filter: (Vec<String>, Option<Vec<String>>),
    /// What it holds, as far as is known here, and which of it was interrupted
    /// before.
    pub(super) held: HashMap<Lease, bool>,
    /// As the worker registered it.
    pub(super) stale_after: Option<Duration>,
}

impl Sessions {
    pub(super) fn of(&self, worker: WorkerId) -> Arc<tokio::sync::Mutex<Session>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, (called, _)| called.elapsed() < IDLE_TIMEOUT);
        let (called, session) = sessions.entry(worker).or_insert_with(|| (Instant::now(), Arc::default()));
        *called = Instant::now();
        session.clone()
    }

    pub(super) fn forget(&self, worker: WorkerId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }
}
