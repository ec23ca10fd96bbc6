//! Progress reports on their way: the newest of each job, stored in batches by
//! back-pressure. While one batch is being stored the next gathers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::Notify;

use super::context::{Attempt, StopReason};
use crate::client::Client;
use crate::store::{Fenced, Lease};

/// Many handlers report in a loop; nobody reads faster than this.
const EVERY: Duration = Duration::from_millis(200);

#[derive(Clone, Default)]
pub(super) struct ProgressLane(Arc<Lane>);

#[derive(Default)]
struct Lane {
    newest: Mutex<HashMap<Lease, Newest>>,
    arrived: Notify,
}

/// Whose report, and what it says.
type Newest = (Weak<Attempt>, Box<RawValue>);

impl ProgressLane {
    pub(super) fn put(&self, attempt: &Arc<Attempt>, report: Box<RawValue>) {
        let mut newest = self.0.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.insert(attempt.claimed.lease(), (Arc::downgrade(attempt), report));
        drop(newest);
        self.0.arrived.notify_one();
    }

    /// Stores reports until the task is dropped. One that could not be stored
    /// is not tried again: the next will say more.
    pub(super) async fn run(self, client: Client) {
        loop {
            self.0.arrived.notified().await;
            let batch = std::mem::take(&mut *self.0.newest.lock().unwrap_or_else(PoisonError::into_inner));
            let (owners, reports): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|(lease, (owner, report))| (owner, (lease, report))).unzip();
            if reports.is_empty() {
                continue;
            }
            match client.progress(&reports).await {
                Ok(answers) => tell(&owners, &answers),
                Err(error) => tracing::debug!(%error, jobs = reports.len(), "progress was not stored"),
            }
            tokio::time::sleep(EVERY).await;
        }
    }
}

fn tell(owners: &[Weak<Attempt>], answers: &[Fenced]) {
    for (owner, answer) in owners.iter().zip(answers) {
        if *answer == Fenced::LeaseLost
            && let Some(attempt) = owner.upgrade()
        {
            attempt.control.stop(StopReason::LeaseLost);
        }
    }
}
