//! Cancellation: when this worker is notified of a cancel, it reads from the database which of
//! its jobs are affected and stops their handlers. A notification may be lost; then the next
//! heartbeat returns the job.

use std::sync::Arc;
use std::time::Duration;

use super::shared::Shared;
use crate::client::Client;

/// The pause between two checks, so that many cancels cost few queries.
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// How long a check may take. It uses the heartbeat's connection, so it must end long before
/// the worker could be declared dead.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// The pause after a failed subscription.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(1);

/// Waits for notifications and requests a check for each. Runs on the runtime of the handlers,
/// because the engine's listening task belongs to the runtime of its first subscriber.
pub(super) async fn listen(shared: Arc<Shared>) {
    if shared.registry.kinds().is_some_and(|kinds| kinds.is_empty()) {
        // Without handlers the worker holds no jobs.
        return;
    }
    loop {
        match shared.client.subscribe_to_cancels().await {
            Ok(mut notices) => loop {
                // First of all, find the cancels that came before the subscription.
                shared.held.request_cancel_check();
                notices.next(|worker| worker == shared.worker_id()).await;
            },
            Err(error) => {
                tracing::warn!(%error, "cannot subscribe to cancels; heartbeats return them");
                tokio::time::sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }
}

/// Carries out the requested checks, one at a time. Runs on the heartbeat's thread with the
/// heartbeat's connection, which no other work can occupy.
pub(super) async fn check(shared: &Shared, client: &Client) {
    loop {
        shared.held.cancel_check.notified().await;
        match tokio::time::timeout(CHECK_TIMEOUT, client.cancels(shared.worker_id())).await {
            Ok(Ok(leases)) => shared.held.cancel(&leases),
            Ok(Err(error)) => {
                tracing::debug!(%error, "could not look for cancelled jobs; the next heartbeat does")
            }
            Err(_) => tracing::debug!("looking for cancelled jobs timed out; the next heartbeat looks again"),
        }
        tokio::time::sleep(MIN_PAUSE).await;
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::time::Instant;

    use super::super::context::{Attempt, StopReason};
    use super::super::journal::StepLane;
    use super::super::metrics::Metrics;
    use super::super::progress::ProgressLane;
    use super::super::shared::HeldLeases;
    use super::*;
    use crate::rules::enqueue::NewJob;
    use crate::store::{ClaimCursor, ClaimRequest, Lease, NewWorker};

    /// A claimed job whose cancellation is requested, and the leases to cancel.
    async fn cancelled() -> (Arc<Attempt>, Vec<Lease>) {
        let client = Client::connect("sqlite::memory:").await.unwrap();
        client.migrate().await.unwrap();
        let id = client.enqueue(NewJob::new("mail", &1)).await.unwrap().id;
        let worker = NewWorker::new("test");
        client.register(&worker).await.unwrap();
        let request = ClaimRequest::new(worker.id, 1);
        let claimed = client.claim(&request, &mut ClaimCursor::default()).await.unwrap().jobs.remove(0);
        client.cancel(id).await.unwrap();
        let leases = client.cancels(worker.id).await.unwrap();
        let kind = Metrics::default().kind("mail");
        (
            Attempt::new(
                claimed,
                kind,
                Instant::now(),
                client.clone(),
                ProgressLane::default(),
                StepLane::start(client),
            ),
            leases,
        )
    }

    async fn is_check_requested(held: &HeldLeases) -> bool {
        tokio::time::timeout(Duration::ZERO, held.cancel_check.notified()).await.is_ok()
    }

    #[tokio::test]
    async fn a_cancel_of_a_lease_whose_claim_is_in_flight_is_read_again_after_the_claim() {
        let (attempt, leases) = cancelled().await;
        let held = HeldLeases::default();
        held.cancel(&leases);
        assert!(!is_check_requested(&held).await, "it would not find the lease yet");
        held.insert(std::slice::from_ref(&attempt));
        assert!(is_check_requested(&held).await);
        held.cancel(&leases);
        assert_eq!(attempt.control.reason(), Some(StopReason::Cancelled));
        held.insert(&[]);
        assert!(!is_check_requested(&held).await, "every lease was found");
    }

    #[tokio::test]
    async fn a_worker_without_leases_checks_only_after_its_next_claim() {
        let (attempt, _) = cancelled().await;
        let held = HeldLeases::default();
        held.request_cancel_check();
        assert!(!is_check_requested(&held).await);
        held.insert(&[attempt]);
        assert!(is_check_requested(&held).await);
        held.request_cancel_check();
        held.request_cancel_check();
        assert!(is_check_requested(&held).await);
        assert!(!is_check_requested(&held).await, "requests are combined");
    }
}
