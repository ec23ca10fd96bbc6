//! Stores progress reports in batches, only the newest report of each job. While one batch is
//! being stored, the next one gathers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::sync::Notify;

use super::context::{Attempt, StopReason};
use crate::client::Client;
use crate::store::{Fenced, Lease};

/// The pause between batches. Many handlers report in a loop, and no reader needs reports more
/// often than this.
const BATCH_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Clone, Default)]
pub(super) struct ProgressLane(Arc<Lane>);

#[derive(Default)]
struct Lane {
    newest: Mutex<HashMap<Lease, Newest>>,
    arrived: Notify,
}

/// The attempt and its newest report.
type Newest = (Weak<Attempt>, Box<RawValue>);

impl ProgressLane {
    pub(super) fn put(&self, attempt: &Arc<Attempt>, report: Box<RawValue>) {
        let mut newest = self.0.newest.lock().unwrap_or_else(PoisonError::into_inner);
        newest.insert(attempt.claimed.lease(), (Arc::downgrade(attempt), report));
        drop(newest);
        self.0.arrived.notify_one();
    }

    /// Stores reports until the task is dropped. A failed batch is not retried: newer reports
    /// replace it.
    pub(super) async fn run(self, client: Client) {
        loop {
            self.0.arrived.notified().await;
            let batch = std::mem::take(&mut *self.0.newest.lock().unwrap_or_else(PoisonError::into_inner));
            let (attempts, reports): (Vec<_>, Vec<_>) =
                batch.into_iter().map(|(lease, (attempt, report))| (attempt, (lease, report))).unzip();
            if reports.is_empty() {
                continue;
            }
            match client.progress(&reports).await {
                Ok(results) => stop_lost_attempts(&attempts, &results),
                Err(error) => tracing::debug!(%error, jobs = reports.len(), "could not store progress"),
            }
            tokio::time::sleep(BATCH_INTERVAL).await;
        }
    }
}

fn stop_lost_attempts(attempts: &[Weak<Attempt>], results: &[Fenced]) {
    for (attempt, result) in attempts.iter().zip(results) {
        if *result == Fenced::LeaseLost
            && let Some(attempt) = attempt.upgrade()
        {
            attempt.control.stop(StopReason::LeaseLost);
        }
    }
}
