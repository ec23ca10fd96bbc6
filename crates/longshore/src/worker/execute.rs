//! Execute: one runner per slot takes the next job, runs its handler within the
//! job's timeout, and reports how the attempt ended.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Instrument;

use super::context::{Attempt, StopReason};
use super::handler::{Failure, Verdict};
use super::hooks::{CatchPanic, call, panic_message};
use super::registry::Route;
use super::shared::Shared;
use crate::lifecycle::{Ending, Interruption};
use crate::store::Fenced;

/// A handler that was told of its timeout may use this long to stop by itself.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// Runs jobs until there will be no more.
pub(super) async fn run(shared: Arc<Shared>) {
    while let Some(attempt) = shared.buffer.next().await {
        let mut slot = Slot { shared: &shared, jobs: 1 };
        match shared.registry.route(attempt.claimed.kind()) {
            Some(Route::One(handler)) => {
                let claimed = &attempt.claimed;
                let span = tracing::info_span!(
                    "job",
                    job_id = %claimed.lease().id,
                    kind = claimed.kind(),
                    attempt = claimed.attempt(),
                    worker_id = %claimed.lease().worker,
                );
                if let Some(traceparent) = claimed.trace() {
                    crate::trace::adopt(&span, traceparent);
                }
                step_aside().await;
                run_attempt(&shared, &*handler, attempt).instrument(span).await;
            }
            Some(Route::Batch { handler, size }) => {
                let mut attempts = shared.buffer.more_of(attempt.claimed.kind(), size - 1);
                attempts.insert(0, attempt);
                slot.jobs = attempts.len();
                step_aside().await;
                run_batch(&shared, &*handler, attempts).await;
            }
            None => {
                // Claimed by kind, so this is a bug; the job must not suffer.
                tracing::error!(
                    kind = attempt.claimed.kind(),
                    "claimed a job without a handler; giving it back"
                );
                shared.report(attempt, Ending::Released, None);
            }
        }
    }
}

/// Whom this runner has just woken, the settler or the claimer, waits where only
/// this thread looks for work; a handler that blocks the thread would hold them
/// up for as long as it takes.
async fn step_aside() {
    tokio::task::yield_now().await;
}

/// A runner's slot, given back however the attempt ends.
struct Slot<'a> {
    shared: &'a Shared,
    jobs: usize,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.shared.buffer.done(self.jobs);
    }
}

async fn run_attempt(shared: &Arc<Shared>, handler: &dyn super::handler::Handler, attempt: Arc<Attempt>) {
    let began = Instant::now();
    let claimed = &attempt.claimed;
    if attempt.control.reason().is_some() {
        // Told to stop before it began.
        let ending = unfinished(shared, &attempt);
        return shared.report(attempt, ending, None);
    }
    if !may_start(shared, &attempt).await {
        return shared.report(attempt, Ending::Released, None);
    }
    shared.metrics.started(claimed.kind());
    let end = match before_run(shared, &attempt).await {
        Err(failure) => End::Answered(Err(failure)),
        Ok(()) => within_timeout(&attempt, claimed.timeout(), handler.run(attempt.clone())).await,
    };
    let ending = match end {
        End::Answered(answer) => ending(shared, &attempt, answer, handler.backoff(claimed.attempt())),
        End::Panicked(message) => {
            let failure = Failure::retry(format!("panicked: {message}"));
            ending(shared, &attempt, Err(failure), handler.backoff(claimed.attempt()))
        }
        End::CutOff => unfinished(shared, &attempt),
    };
    let ending = after_run(shared, &attempt, ending).await;
    shared.report(attempt, ending, Some(began.elapsed()));
}

async fn run_batch(
    shared: &Arc<Shared>,
    handler: &dyn super::handler::BatchHandler,
    attempts: Vec<Arc<Attempt>>,
) {
    let began = Instant::now();
    let mut ready = Vec::with_capacity(attempts.len());
    for attempt in attempts {
        let stopped = attempt.control.reason().is_some();
        if stopped || !may_start(shared, &attempt).await {
            let ending = if stopped { unfinished(shared, &attempt) } else { Ending::Released };
            shared.report(attempt, ending, None);
            continue;
        }
        shared.metrics.started(attempt.claimed.kind());
        match before_run(shared, &attempt).await {
            Ok(()) => ready.push(attempt),
            Err(failure) => {
                let ending = ending(shared, &attempt, Err(failure), None);
                shared.report(attempt, ending, Some(began.elapsed()));
            }
        }
    }
    let Some(first) = ready.first().cloned() else { return };
    // One call has one end; the shortest timeout is that of all.
    let timeout = ready.iter().filter_map(|attempt| attempt.claimed.timeout()).min();
    let end = within_timeout(&first, timeout, handler.run(ready.clone())).await;
    let answers: Vec<Option<Result<(), Failure>>> = match end {
        End::Answered(answers) => answers.into_iter().map(Some).collect(),
        End::Panicked(message) => {
            ready.iter().map(|_| Some(Err(Failure::retry(format!("panicked: {message}"))))).collect()
        }
        End::CutOff => ready.iter().map(|_| None).collect(),
    };
    let reason = first.control.reason();
    for (attempt, answer) in ready.into_iter().zip(answers) {
        if let (None, Some(reason)) = (&answer, reason) {
            attempt.control.stop(reason);
        }
        let ending = match answer {
            Some(answer) => ending(shared, &attempt, answer, None),
            None => unfinished(shared, &attempt),
        };
        let ending = after_run(shared, &attempt, ending).await;
        shared.report(attempt, ending, Some(began.elapsed()));
    }
}

/// A suspect's start is written down first: if this process dies now, the job
/// had a hand in it.
async fn may_start(shared: &Shared, attempt: &Attempt) -> bool {
    if attempt.claimed.interruptions() == 0 {
        return true;
    }
    match shared.client.store().mark_started(&attempt.claimed.lease()).await {
        Ok(Fenced::Held) => true,
        Ok(Fenced::LeaseLost) => {
            attempt.control.stop(StopReason::LeaseLost);
            false
        }
        Err(error) => {
            tracing::warn!(%error, job_id = %attempt.claimed.lease().id, "cannot record the start of a suspect; giving it back");
            false
        }
    }
}

/// How a handler's call came to its end.
enum End<T> {
    Answered(T),
    Panicked(String),
    /// It did not stop when it was told to.
    CutOff,
}

async fn within_timeout<T>(
    attempt: &Attempt,
    timeout: Option<Duration>,
    work: super::handler::Running<T>,
) -> End<T> {
    let mut work = CatchPanic(work);
    let answered = |done: Result<T, Box<dyn std::any::Any + Send>>| match done {
        Ok(answer) => End::Answered(answer),
        Err(panic) => End::Panicked(panic_message(&*panic).to_owned()),
    };
    tokio::select! {
        biased;
        done = &mut work => return answered(done),
        () = attempt.control.aborted() => return End::CutOff,
        () = sleep(timeout) => attempt.control.stop(StopReason::TimedOut),
    }
    tokio::select! {
        biased;
        done = &mut work => answered(done),
        () = attempt.control.aborted() => End::CutOff,
        () = tokio::time::sleep(STOP_WITHIN) => End::CutOff,
    }
}

async fn sleep(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// What a handler's answer means for the job.
fn ending(
    shared: &Shared,
    attempt: &Attempt,
    answer: Result<(), Failure>,
    backoff: Option<Duration>,
) -> Ending {
    let claimed = &attempt.claimed;
    let verdict = match answer {
        Ok(()) => return Ending::Succeeded { result: attempt.take_result() },
        Err(Failure(verdict)) => verdict,
    };
    // Whatever it says after it was told to stop, it says because of that.
    match attempt.control.reason() {
        None | Some(StopReason::Cancelled) => {}
        Some(_) => return unfinished(shared, attempt),
    }
    match verdict {
        Verdict::Retry { error, after } => {
            Ending::Failed { error, retry_in: after.or(backoff).or_else(|| claimed.backoff()) }
        }
        Verdict::Permanent { error } => Ending::Failed { error, retry_in: None },
        Verdict::Snooze { delay } => Ending::Snoozed { delay },
        Verdict::Cancelled { reason } => Ending::Cancelled { reason },
    }
}

/// What becomes of a job whose handler was stopped.
fn unfinished(shared: &Shared, attempt: &Attempt) -> Ending {
    let claimed = &attempt.claimed;
    match attempt.control.reason() {
        Some(StopReason::TimedOut) => Ending::Failed {
            error: format!("timed out after {:?}", claimed.timeout().unwrap_or_default()),
            retry_in: claimed.backoff(),
        },
        Some(StopReason::Cancelled) => Ending::Cancelled { reason: None },
        // If the lease is still ours when the database is back, the job lost
        // time through no fault of its own.
        Some(StopReason::Shutdown | StopReason::Disconnected | StopReason::LeaseLost) => Ending::Released,
        None => Ending::Interrupted(Interruption {
            delay: shared.settings.recovery.delay,
            max_interruptions: shared.settings.recovery.max_interruptions,
        }),
    }
}

/// The hook's say before an attempt; its panic is a failed attempt.
async fn before_run(shared: &Shared, attempt: &Attempt) -> Result<(), Failure> {
    let Some(hooks) = &shared.hooks else { return Ok(()) };
    match CatchPanic(hooks.before_run(&attempt.claimed)).await {
        Ok(said) => said,
        Err(panic) => Err(Failure::retry(format!("a before_run hook panicked: {}", panic_message(&*panic)))),
    }
}

/// The hook's say after it.
async fn after_run(shared: &Shared, attempt: &Attempt, ending: Ending) -> Ending {
    let Some(hooks) = &shared.hooks else { return ending };
    call("after_run", hooks.after_run(&attempt.claimed, ending.clone())).await.unwrap_or(ending)
}
