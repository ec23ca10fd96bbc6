//! Settle: ended attempts are stored in batches by back-pressure, and tried
//! again until they are stored or turn out to be fenced off.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::context::{Attempt, StopReason};
use super::hooks::call;
use super::shared::{Phase, Shared};
use crate::client::{self, Kept};
use crate::enqueue::ValidJob;
use crate::error::Error;
use crate::job::{AttemptEnd, Outcome};
use crate::lifecycle::Ending;

const MAX_BATCH: usize = 1000;
/// Between tries while the database cannot be reached.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// The end of one attempt, on its way to the database.
pub(super) struct Report {
    attempt: Arc<Attempt>,
    ending: Ending,
    follow_ups: Vec<ValidJob>,
    /// How long the handler ran, if it did.
    ran: Option<Duration>,
}

impl Shared {
    /// Hands an attempt's end to the settler. Only the first word counts.
    pub(super) fn report(&self, attempt: Arc<Attempt>, ending: Ending, ran: Option<Duration>) {
        if !attempt.end() {
            return;
        }
        let follow_ups = match ending {
            Ending::Succeeded { .. } => attempt.take_follow_ups(),
            _ => Vec::new(),
        };
        // Fails only when the settler is gone, and then recovery takes over.
        let _ = self.reports.send(Report { attempt, ending, follow_ups, ran });
    }
}

/// Settles until the worker has ended.
pub(super) async fn run(shared: Arc<Shared>, mut reports: mpsc::UnboundedReceiver<Report>) {
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            biased;
            _ = reports.recv_many(&mut batch, MAX_BATCH) => {}
            () = shared.reached(Phase::Ended) => return,
        }
        // Runners that are about to report still join.
        tokio::task::yield_now().await;
        while batch.len() < MAX_BATCH
            && let Ok(report) = reports.try_recv()
        {
            batch.push(report);
        }
        settle(&shared, std::mem::take(&mut batch)).await;
    }
}

async fn settle(shared: &Arc<Shared>, mut batch: Vec<Report>) {
    let mut wait = FIRST_WAIT;
    loop {
        let began = Instant::now();
        match store(shared, &batch).await {
            Ok(kept) => {
                shared.metrics.settled(batch.len(), began.elapsed());
                return finish(shared, batch, kept);
            }
            // One of many was refused: each goes alone, so that it fails alone.
            Err(error) if !error.is_unavailable() && batch.len() > 1 => {
                for report in batch {
                    Box::pin(settle(shared, vec![report])).await;
                }
                return;
            }
            Err(error) if !error.is_unavailable() => match without_what_was_refused(&mut batch[0], &error) {
                true => {}
                false => return give_up(shared, batch, &error),
            },
            Err(error) => {
                tracing::warn!(%error, jobs = batch.len(), "could not settle; trying again");
                if !shared.sleep_unless(Phase::Ended, wait).await {
                    return give_up(shared, batch, &error);
                }
                wait = (wait * 2).min(LONGEST_WAIT);
            }
        }
    }
}

async fn store(shared: &Shared, batch: &[Report]) -> crate::Result<Vec<Kept>> {
    // `Report` borrows the claim, so the list is made anew for each try.
    let reports: Vec<client::Report<'_>> = batch
        .iter()
        .map(|item| client::Report {
            claimed: &item.attempt.claimed,
            ending: item.ending.clone(),
            follow_ups: item.follow_ups.clone(),
        })
        .collect();
    shared.client.settle_as(&reports).await
}

/// The database will not have what the handler left behind: the attempt has
/// failed then. Says whether anything could be left out.
fn without_what_was_refused(report: &mut Report, error: &Error) -> bool {
    let plain = Ending::Failed {
        error: format!("what the handler left behind could not be stored: {error}"),
        retry_in: report.attempt.claimed.backoff(),
    };
    match (&report.ending, report.follow_ups.is_empty()) {
        (Ending::Failed { .. }, true) => false,
        _ => {
            report.ending = plain;
            report.follow_ups = Vec::new();
            true
        }
    }
}

/// The leases are left to recovery.
fn give_up(shared: &Shared, batch: Vec<Report>, error: &Error) {
    for report in &batch {
        let job_id = report.attempt.claimed.lease().id;
        tracing::error!(%job_id, %error, "an attempt's end could not be stored; recovery will find the job");
        shared.metrics.completed(report.attempt.claimed.kind(), "error", report.ran);
    }
    shared.held.remove(batch.iter().map(|report| &report.attempt));
}

fn finish(shared: &Arc<Shared>, batch: Vec<Report>, kept: Vec<Kept>) {
    shared.held.remove(batch.iter().map(|report| &report.attempt));
    for (report, kept) in batch.into_iter().zip(kept) {
        let claimed = &report.attempt.claimed;
        shared.metrics.completed(claimed.kind(), word(kept), report.ran);
        if kept == Kept::LeaseLost {
            report.attempt.control.stop(StopReason::LeaseLost);
            let lease = claimed.lease();
            tracing::warn!(job_id = %lease.id, lease_no = lease.lease_no, "lost the lease; another worker owns the job");
        }
        if shared.hooks.is_some() {
            let shared = shared.clone();
            tokio::spawn(async move { tell(&shared, &report, kept).await });
        }
    }
}

/// The metrics' word for what became of an attempt.
fn word(kept: Kept) -> &'static str {
    match kept {
        Kept::Finished(Outcome::Succeeded) => "succeeded",
        Kept::Finished(Outcome::FailedPermanent) => "failed_permanent",
        Kept::Finished(Outcome::Cancelled) => "cancelled",
        Kept::Requeued(AttemptEnd::Snoozed) => "snoozed",
        Kept::Requeued(AttemptEnd::Released | AttemptEnd::Interrupted) => "released",
        Kept::Requeued(_) => "retrying",
        Kept::LeaseLost => "lease_lost",
    }
}

async fn tell(shared: &Shared, report: &Report, kept: Kept) {
    let Some(hooks) = &shared.hooks else { return };
    let job = &report.attempt.claimed;
    let error = match &report.ending {
        Ending::Failed { error, .. } => error.as_str(),
        _ => "",
    };
    let told = match kept {
        Kept::Finished(Outcome::Succeeded) => call("on_success", hooks.on_success(job)).await,
        Kept::Finished(Outcome::FailedPermanent) => {
            call("on_permanent_failure", hooks.on_permanent_failure(job, error)).await
        }
        Kept::Finished(Outcome::Cancelled) => call("on_cancel", hooks.on_cancel(job)).await,
        Kept::Requeued(AttemptEnd::Failed) => call("on_failure", hooks.on_failure(job, error)).await,
        Kept::Requeued(_) | Kept::LeaseLost => Some(()),
    };
    if told.is_none() {
        tracing::warn!(job_id = %job.lease().id, "the job's end is stored, but a hook did not hear of it");
    }
}
