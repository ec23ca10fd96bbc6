//! The loop that claims: it waits for free slots, wake-ups and the next poll, and ends a drain. `claim` decides what to claim.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use super::claim::{Claimer, Found, MAX_BUFFER_WAIT, Wait};
use super::settings::Settings;
use super::shared::{Phase, Shared};
use crate::store::Wakeups;

/// Claims until the worker finishes; in a drain, until no job is due.
pub(super) async fn run(shared: Arc<Shared>) {
    if shared.registry.kinds().is_some_and(|kinds| kinds.is_empty()) && shared.phase() == Phase::Working {
        // Without handlers the worker only does upkeep.
        return shared.reached(Phase::Finishing).await;
    }
    // Subscribe before claiming: a job enqueued between the two would otherwise
    // wait a full poll interval.
    let mut wakeups = subscribe(&shared).await;
    let mut claimer = Claimer::new(shared.clone());
    loop {
        if shared.phase() >= Phase::Finishing {
            return;
        }
        if wakeups.is_none() {
            wakeups = subscribe(&shared).await;
        }
        // Checked before the claim: a job settled during the claim may be due again.
        let idle = shared.held.len() == 0;
        if idle && shared.phase() == Phase::Draining {
            claimer.restart_at_head();
            // The end of a job may have released others, which are part of the drain.
            if let Err(error) = shared.client.advance_flows().await {
                tracing::warn!(%error, "could not follow changes of flows");
            }
        }
        // Registered before the claim: jobs settled during the claim may free slots.
        let settled = shared.held.settled.notified();
        tokio::pin!(settled);
        settled.as_mut().enable();
        // Not cancelled by a stop: claimed jobs must be released before the worker
        // signs off.
        let found = claimer.claim(&mut wakeups).await;
        if found == Found::Nothing && idle && is_drained(&shared, &mut claimer).await {
            return;
        }
        if let Some(wait) = claimer.wait(found)
            && !wait_for_next(&shared, &mut claimer, &mut wakeups, settled.as_mut(), wait).await
        {
            return;
        }
        claimer.release_overdue_jobs();
    }
}

/// In a drain, lets the worker finish if no job is left.
async fn is_drained(shared: &Shared, claimer: &mut Claimer) -> bool {
    if shared.phase() != Phase::Draining || claimer.has_paused_jobs().await {
        return false;
    }
    shared.phase.send_if_modified(|phase| {
        let draining = *phase == Phase::Draining;
        if draining {
            *phase = Phase::Finishing;
        }
        draining
    });
    true
}

/// Waits until the next claim. Returns false if the worker finishes first.
async fn wait_for_next(
    shared: &Shared,
    claimer: &mut Claimer,
    wakeups: &mut Option<Wakeups>,
    mut settled: Pin<&mut tokio::sync::futures::Notified<'_>>,
    wait: Wait,
) -> bool {
    loop {
        tokio::select! {
            () = &mut settled, if wait.settled => {}
            () = shared.buffer.demand.notified(), if wait.demand => {}
            queue = woken(wakeups, &shared.settings), if wait.wake_up => claimer.on_wakeup(queue),
            () = sleep_until(wait.until) => {}
            () = sleep_until(shared.buffer.overdue_at(MAX_BUFFER_WAIT)) => {
                // No reason to claim: releasing jobs notifies this worker too.
                claimer.release_overdue_jobs();
                continue;
            }
            () = shared.reached(Phase::Finishing) => return false,
        }
        return true;
    }
}

/// Sleeps until this time; without one, forever.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

async fn subscribe(shared: &Shared) -> Option<Wakeups> {
    match shared.client.subscribe().await {
        Ok(wakeups) => Some(wakeups),
        Err(error) => {
            tracing::warn!(%error, "cannot subscribe to wake-ups; falling back to polling");
            None
        }
    }
}

/// Waits for a wake-up of one of the worker's queues. Returns the queue, or `None` if it can be
/// any queue.
async fn woken(wakeups: &mut Option<Wakeups>, settings: &Settings) -> Option<String> {
    let Some(wakeups) = wakeups else { return std::future::pending().await };
    loop {
        match wakeups.next().await {
            Some(queue) if !settings.claims_from(&queue) => {}
            queue => return queue,
        }
    }
}
