//! The loop that claims: waits for free slots, wake-ups and the next poll, and ends a drain.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::claim::{Claimer, Found, MAX_BUFFER_WAIT};
use super::settings::Settings;
use super::shared::{Phase, Shared};
use crate::store::Wakeups;

/// The pause after a failed claim.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(500);
/// In a drain, how soon to claim again while the last jobs run.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(50);

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
        let is_drained = found == Found::Nothing
            && idle
            && shared.phase() == Phase::Draining
            && !claimer.has_paused_jobs().await;
        match found {
            Found::Full => {
                tokio::select! {
                    () = shared.buffer.demand.notified() => {}
                    () = &mut settled => {}
                    queue = woken(&mut wakeups, &shared.settings), if claimer.listens_while_full() => {
                        claimer.on_wakeup(queue);
                    }
                    () = sleep_until(claimer.next_check()) => {}
                    () = shared.reached(Phase::Finishing) => return,
                }
            }
            Found::More => {}
            Found::Nothing if is_drained => {
                shared.phase.send_if_modified(|phase| {
                    let draining = *phase == Phase::Draining;
                    if draining {
                        *phase = Phase::Finishing;
                    }
                    draining
                });
                return;
            }
            Found::Some | Found::Nothing if shared.phase() == Phase::Draining => {
                tokio::select! {
                    () = &mut settled => {}
                    () = tokio::time::sleep(DRAIN_POLL_INTERVAL) => {}
                    () = shared.reached(Phase::Finishing) => return,
                }
            }
            Found::Some | Found::Nothing => {
                let poll_at = Instant::now() + claimer.next_poll_delay();
                loop {
                    tokio::select! {
                        queue = woken(&mut wakeups, &shared.settings) => claimer.on_wakeup(queue),
                        () = suspects_settled(&shared, claimer.skipped_suspects) => {}
                        () = &mut settled, if claimer.capped => {}
                        () = sleep_until(Some(poll_at)) => {}
                        () = sleep_until(shared.buffer.overdue_at(MAX_BUFFER_WAIT)) => {
                            // No reason to claim: releasing jobs notifies this worker too.
                            claimer.release_overdue_jobs();
                            continue;
                        }
                        () = shared.reached(Phase::Finishing) => return,
                    }
                    break;
                }
            }
            Found::Failed => {
                if !shared.sleep_unless(Phase::Finishing, PAUSE_AFTER_ERROR).await {
                    return;
                }
            }
        }
        claimer.release_overdue_jobs();
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

/// Waits until this worker holds no suspect, if the last claim may have skipped other suspects
/// because it held one; otherwise waits forever.
async fn suspects_settled(shared: &Shared, skipped_suspects: bool) {
    if !skipped_suspects {
        return std::future::pending().await;
    }
    loop {
        let settled = shared.held.settled.notified();
        if !shared.held.has_suspect() {
            return;
        }
        settled.await;
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
