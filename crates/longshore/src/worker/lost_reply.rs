//! The leases of a claim whose reply was lost: the database holds them for this worker, but the worker does not know them.

use std::time::{Duration, Instant};

use super::shared::Shared;

/// The server may still commit a claim within this time after the client gave up on it.
const COMMIT_TIME: Duration = Duration::from_secs(60);

/// When to look for such leases: after a failed claim, and a second time when the server can no longer commit it.
#[derive(Default)]
pub(super) struct LostReply {
    next_check: Option<Instant>,
    checks_left: u8,
}

impl LostReply {
    /// Records that a claim failed.
    pub(super) fn note(&mut self) {
        *self = LostReply { next_check: Some(Instant::now()), checks_left: 2 };
    }

    /// Releases them, if it is time to. Returns false if the database cannot be reached.
    pub(super) async fn release(&mut self, shared: &Shared) -> bool {
        if self.next_check.is_none_or(|at| at > Instant::now()) {
            return true;
        }
        let worker_id = shared.worker_id();
        let held = shared.held.leases(worker_id);
        match shared.client.release_unknown(worker_id, &held).await {
            Ok(released) => {
                if released > 0 {
                    tracing::info!(%worker_id, jobs = released, "released jobs whose claim's reply was lost");
                }
                self.checks_left -= 1;
                self.next_check = (self.checks_left > 0).then(|| Instant::now() + COMMIT_TIME);
                true
            }
            Err(error) => {
                tracing::warn!(%error, %worker_id, "could not check for leases of a lost claim; retrying");
                false
            }
        }
    }
}
