//! Settle: stores how attempts ended, in batches. While one batch is being stored, the next
//! one gathers. A batch is retried until it is stored or the fence rejects it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::context::{Attempt, StopReason};
use super::hooks::call;
use super::shared::{Phase, Shared};
use crate::client::job_metrics::outcome_label;
use crate::client::settle::{Kept, Reported};
use crate::error::Error;
use crate::job::{AttemptEnd, Outcome};
use crate::rules::enqueue::ValidJob;
use crate::rules::lifecycle::Ending;
use crate::store::Claimed;

const MAX_BATCH: usize = 1000;
const MAX_BATCH_BYTES: usize = 8 << 20;
/// How often to try before an unclassified error counts as permanent.
const MAX_UNKNOWN_ERROR_TRIES: u32 = 5;
/// The delay between tries doubles from the first to the maximum.
const FIRST_RETRY_DELAY: Duration = Duration::from_millis(50);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(2);

/// The end of one attempt, before it is stored.
pub(super) struct AttemptReport {
    attempt: Arc<Attempt>,
    ending: Ending,
    follow_ups: Vec<ValidJob>,
    /// How long the handler ran, if it did.
    ran: Option<Duration>,
}

impl Reported for AttemptReport {
    fn claimed(&self) -> &Claimed {
        &self.attempt.claimed
    }

    fn ending(&self) -> &Ending {
        &self.ending
    }

    fn follow_ups(&self) -> &[ValidJob] {
        &self.follow_ups
    }

    fn has_progressed(&self) -> bool {
        self.attempt.journal.has_progressed()
    }
}

impl AttemptReport {
    /// Roughly how many bytes it adds to the batch.
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
    /// Sends an attempt's end to the settler. Only the first report of an attempt counts.
    pub(super) fn report(&self, attempt: Arc<Attempt>, ending: Ending, ran: Option<Duration>) {
        if !attempt.end() {
            return;
        }
        let follow_ups = match ending {
            Ending::Succeeded { .. } => attempt.take_follow_ups(),
            _ => Vec::new(),
        };
        // Fails only when the settler has ended; recovery then handles the job.
        let _ = self.reports.send(AttemptReport { attempt, ending, follow_ups, ran });
    }

    /// Reports an unfinished attempt as released, so that its job returns to the queue.
    pub(super) fn release(&self, attempt: Arc<Attempt>) {
        let ending = attempt.released();
        self.report(attempt, ending, None);
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
            // Let runners that are about to report join this batch.
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

/// Stores a batch. While the database cannot be reached, the whole batch is retried. If the
/// database can be reached but rejects the batch (a locked row, a refused value), each report is
/// retried on its own task, so that it does not hold up the others.
async fn settle(shared: &Arc<Shared>, batch: Vec<AttemptReport>) {
    let mut delay = FIRST_RETRY_DELAY;
    loop {
        let began = Instant::now();
        let error = match shared.client.settle_reports(&batch).await {
            Ok(kept) => {
                shared.metrics.settled(batch.len(), began.elapsed());
                return finish(shared, batch, kept);
            }
            Err(error) => error,
        };
        if !affects_every_batch(shared, &error).await {
            for report in batch {
                tokio::spawn(settle_alone(shared.clone(), report));
            }
            return;
        }
        tracing::warn!(%error, jobs = batch.len(), "could not settle; retrying");
        if !shared.sleep_unless(Phase::Ended, delay).await {
            return give_up(shared, batch, &error);
        }
        delay = (delay * 2).min(MAX_RETRY_DELAY);
    }
}

/// Whether any other batch would fail in the same way.
async fn affects_every_batch(shared: &Shared, error: &Error) -> bool {
    if error.is_read_only() || error.is_schema() {
        return true;
    }
    error.is_unavailable() && shared.client.now().await.is_err()
}

async fn settle_alone(shared: Arc<Shared>, mut report: AttemptReport) {
    let (mut delay, mut tries) = (FIRST_RETRY_DELAY, 0);
    loop {
        tries += 1;
        let error = match shared.client.settle_reports(std::slice::from_ref(&report)).await {
            Ok(kept) => return finish(&shared, vec![report], kept),
            Err(error) => error,
        };
        let may_clear = error.is_unavailable() || error.is_read_only() || error.is_schema();
        let refused = error.is_invalid() || (!may_clear && tries >= MAX_UNKNOWN_ERROR_TRIES);
        if refused && convert_to_failure(&mut report, &error) {
            continue;
        }
        let job_id = report.attempt.claimed.lease().id;
        tracing::warn!(%error, %job_id, "could not settle; retrying");
        if !shared.sleep_unless(Phase::Ended, delay).await {
            return give_up(&shared, vec![report], &error);
        }
        delay = (delay * 2).min(MAX_RETRY_DELAY);
    }
}

/// Turns a success into a failed attempt, because the database refuses its result or its
/// follow-ups. Returns false if the report has neither, so that nothing can be dropped.
fn convert_to_failure(report: &mut AttemptReport, error: &Error) -> bool {
    let has_output =
        matches!(&report.ending, Ending::Succeeded { result: Some(_) }) || !report.follow_ups.is_empty();
    if has_output {
        report.ending = Ending::Failed {
            error: format!("the handler's result or follow-up jobs could not be stored: {error}"),
            retry_in: report.attempt.backoff(),
        };
        report.follow_ups = Vec::new();
    }
    has_output
}

/// Gives up on a batch when the worker has ended; recovery takes its leases.
fn give_up(shared: &Shared, batch: Vec<AttemptReport>, error: &Error) {
    for report in &batch {
        let job_id = report.attempt.claimed.lease().id;
        tracing::error!(%job_id, %error, "could not store how the attempt ended; recovery will handle the job");
        shared.metrics.completed(&report.attempt, "error", report.ran);
    }
    shared.held.remove(batch.iter().map(|report| &report.attempt));
}

fn finish(shared: &Arc<Shared>, batch: Vec<AttemptReport>, kept: Vec<Kept>) {
    shared.held.remove(batch.iter().map(|report| &report.attempt));
    for (report, kept) in batch.into_iter().zip(kept) {
        let claimed = &report.attempt.claimed;
        shared.metrics.completed(&report.attempt, outcome_label(kept), report.ran);
        let trace_id = report.attempt.trace_id();
        shared.client.job_log.settled(claimed, &report.ending, kept, report.ran, trace_id);
        // These leave no history, so a repetition returns `LeaseLost`: nothing is lost.
        let leaves_no_row = matches!(report.ending, Ending::NotStarted { .. } | Ending::Suspended { .. });
        if kept == Kept::LeaseLost && !leaves_no_row {
            report.attempt.control.stop(StopReason::LeaseLost);
        }
        if shared.hooks.is_some() {
            let shared = shared.clone();
            shared.hook_calls.begin();
            tokio::spawn(async move {
                call_hooks(&shared, &report, kept).await;
                shared.hook_calls.end();
            });
        }
    }
}

async fn call_hooks(shared: &Shared, report: &AttemptReport, kept: Kept) {
    let Some(hooks) = &shared.hooks else { return };
    let job = &report.attempt.claimed;
    let error = match &report.ending {
        Ending::Failed { error, .. } => error.as_str(),
        _ => "",
    };
    let called = match kept {
        Kept::Finished(Outcome::Succeeded) => call("on_success", hooks.on_success(job)).await,
        Kept::Finished(Outcome::FailedPermanent) => {
            call("on_permanent_failure", hooks.on_permanent_failure(job, error)).await
        }
        Kept::Finished(Outcome::Cancelled) => call("on_cancel", hooks.on_cancel(job)).await,
        Kept::Requeued { history: Some(AttemptEnd::Failed), .. } => {
            call("on_failure", hooks.on_failure(job, error)).await
        }
        Kept::Requeued { .. } | Kept::Suspended | Kept::LeaseLost => Some(()),
    };
    if called.is_none() {
        tracing::warn!(job_id = %job.lease().id, "the attempt is settled, but its hook failed");
    }
}
