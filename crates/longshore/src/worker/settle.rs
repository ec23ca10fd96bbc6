//! Settle: ended attempts are stored in batches by back-pressure, and tried
//! again until they are stored or turn out to be fenced off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::context::{Attempt, StopReason};
use super::hooks::call;
use super::shared::{Phase, Shared};
use crate::client::{self, settle::Kept};
use crate::enqueue::ValidJob;
use crate::error::Error;
use crate::job::{AttemptEnd, Outcome};
use crate::lifecycle::Ending;

const MAX_BATCH: usize = 1000;
const MAX_BATCH_BYTES: usize = 8 << 20;
/// How often a refusal that has no name is taken for a passing one.
const GIVE_IT: u32 = 5;
/// Between tries while the database cannot be reached.
const FIRST_WAIT: Duration = Duration::from_millis(50);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// The end of one attempt, on its way to the database.
pub(super) struct AttemptReport {
    attempt: Arc<Attempt>,
    ending: Ending,
    follow_ups: Vec<ValidJob>,
    /// How long the handler ran, if it did.
    ran: Option<Duration>,
}

impl AttemptReport {
    /// How much it adds to a message, roughly.
    fn size(&self) -> usize {
        let result = match &self.ending {
            Ending::Succeeded { result: Some(result) } => result.get().len(),
            Ending::Failed { error, .. } => error.len(),
            _ => 0,
        };
        result + self.follow_ups.iter().map(|job| job.payload.len()).sum::<usize>()
    }
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
        let _ = self.reports.send(AttemptReport { attempt, ending, follow_ups, ran });
    }
}

/// Settles until the worker has ended.
pub(super) async fn run(shared: Arc<Shared>, mut reports: mpsc::UnboundedReceiver<AttemptReport>) {
    let mut inbox = VecDeque::new();
    let mut batch = Vec::new();
    loop {
        if inbox.is_empty() {
            tokio::select! {
                biased;
                _ = reports.recv_many(&mut batch, MAX_BATCH) => {}
                () = shared.reached(Phase::Ended) => return,
            }
            inbox.extend(batch.drain(..));
            // Runners that are about to report still join.
            tokio::task::yield_now().await;
        }
        while inbox.len() < MAX_BATCH
            && let Ok(report) = reports.try_recv()
        {
            inbox.push_back(report);
        }
        let mut bytes = 0;
        while batch.len() < MAX_BATCH
            && bytes < MAX_BATCH_BYTES
            && let Some(report) = inbox.pop_front()
        {
            bytes += report.size();
            batch.push(report);
        }
        settle(&shared, std::mem::take(&mut batch)).await;
    }
}

/// Stores a batch. As long as the database cannot be reached there is nothing
/// else to do; but if it can, what it will not take now (a row that somebody has
/// locked, a value it refuses) is tried again apart, and holds up nobody.
async fn settle(shared: &Arc<Shared>, batch: Vec<AttemptReport>) {
    let mut wait = FIRST_WAIT;
    loop {
        let began = Instant::now();
        let error = match store(shared, &batch).await {
            Ok(kept) => {
                shared.metrics.settled(batch.len(), began.elapsed());
                return finish(shared, batch, kept);
            }
            Err(error) => error,
        };
        if !is_for_all(shared, &error).await {
            for report in batch {
                tokio::spawn(settle_alone(shared.clone(), report));
            }
            return;
        }
        tracing::warn!(%error, jobs = batch.len(), "could not settle; trying again");
        if !shared.sleep_unless(Phase::Ended, wait).await {
            return give_up(shared, batch, &error);
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// Whether any other batch would fare the same.
async fn is_for_all(shared: &Shared, error: &Error) -> bool {
    if error.is_read_only() || error.is_schema() {
        return true;
    }
    error.is_unavailable() && shared.client.now().await.is_err()
}

async fn settle_alone(shared: Arc<Shared>, mut report: AttemptReport) {
    let (mut wait, mut tries) = (FIRST_WAIT, 0);
    loop {
        tries += 1;
        let error = match store(&shared, std::slice::from_ref(&report)).await {
            Ok(kept) => return finish(&shared, vec![report], kept),
            Err(error) => error,
        };
        let may_pass = error.is_unavailable() || error.is_read_only() || error.is_schema();
        let refused = error.is_invalid() || (!may_pass && tries >= GIVE_IT);
        if refused && without_what_was_refused(&mut report, &error) {
            continue;
        }
        let job_id = report.attempt.claimed.lease().id;
        tracing::warn!(%error, %job_id, "could not settle; trying again");
        if !shared.sleep_unless(Phase::Ended, wait).await {
            return give_up(&shared, vec![report], &error);
        }
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

async fn store(shared: &Shared, batch: &[AttemptReport]) -> crate::Result<Vec<Kept>> {
    // `client::Report` borrows the claim, so the list is made anew for each try.
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
/// failed then. Says whether there was anything to leave out.
fn without_what_was_refused(report: &mut AttemptReport, error: &Error) -> bool {
    let left_behind =
        matches!(&report.ending, Ending::Succeeded { result: Some(_) }) || !report.follow_ups.is_empty();
    if left_behind {
        report.ending = Ending::Failed {
            error: format!("what the handler left behind could not be stored: {error}"),
            retry_in: report.attempt.claimed.backoff(),
        };
        report.follow_ups = Vec::new();
    }
    left_behind
}

/// The leases are left to recovery.
fn give_up(shared: &Shared, batch: Vec<AttemptReport>, error: &Error) {
    for report in &batch {
        let job_id = report.attempt.claimed.lease().id;
        tracing::error!(%job_id, %error, "an attempt's end could not be stored; recovery will find the job");
        shared.metrics.completed(report.attempt.claimed.kind(), "error", report.ran);
    }
    shared.held.remove(batch.iter().map(|report| &report.attempt));
}

fn finish(shared: &Arc<Shared>, batch: Vec<AttemptReport>, kept: Vec<Kept>) {
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
            shared.telling.begin();
            tokio::spawn(async move {
                tell(&shared, &report, kept).await;
                shared.telling.end();
            });
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

async fn tell(shared: &Shared, report: &AttemptReport, kept: Kept) {
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
