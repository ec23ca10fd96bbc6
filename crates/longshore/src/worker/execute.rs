//! Execute: one runner per slot takes the next job, runs its handler within the
//! job's timeout, and reports how the attempt ended.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tracing::Instrument;

use super::context::{Attempt, StopReason};
use super::handler::{BatchHandler, Failure, Handler, Verdict};
use super::hooks::{CatchPanic, Hooks, call, panic_message};
use super::registry::Route;
use super::shared::Shared;
use crate::lifecycle::Ending;
use crate::store::Fenced;

/// A handler that was told of its timeout may use this long to stop by itself.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// Runs jobs until there will be no more.
pub(super) async fn run(shared: Arc<Shared>) {
    while let Some(attempt) = shared.buffer.next().await {
        let mut slot = Slot { shared: &shared, first: attempt.clone(), others: Vec::new() };
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
                slot.others = shared.buffer.more_of(attempt.claimed.kind(), size - 1);
                let attempts = std::iter::once(attempt).chain(slot.others.iter().cloned()).collect();
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
    first: Arc<Attempt>,
    others: Vec<Arc<Attempt>>,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A bug of ours; even so no lease may be left without an end.
            for attempt in self.others.drain(..).chain([self.first.clone()]) {
                let error = "the worker panicked while it ran this attempt".to_owned();
                let retry_in = attempt.claimed.backoff();
                self.shared.report(attempt, Ending::Failed { error, retry_in }, None);
            }
        }
        self.shared.buffer.done(1 + self.others.len());
    }
}

async fn run_attempt(shared: &Arc<Shared>, handler: &dyn Handler, attempt: Arc<Attempt>) {
    let began = Instant::now();
    let claimed = &attempt.claimed;
    if attempt.control.reason().is_some() {
        // Told to stop before it began.
        let ending = unfinished(&attempt, None);
        return shared.report(attempt, ending, None);
    }
    if !may_start(shared, &attempt).await {
        return shared.report(attempt, Ending::Released, None);
    }
    shared.metrics.started(claimed.kind());
    let work = match shared.hooks.clone() {
        None => handler.run(attempt.clone()),
        Some(hooks) => {
            let (run, attempt) = (handler.run(attempt.clone()), attempt.clone());
            Box::pin(async move {
                before_run(&*hooks, &attempt).await?;
                run.await
            })
        }
    };
    let timeout = claimed.timeout();
    let timed_out = || attempt.control.stop(StopReason::TimedOut);
    let end = within_timeout(timeout, timed_out, attempt.control.aborted(), work).await;
    let ending = match end {
        End::Answered(answer) => ending(&attempt, answer, |attempt| handler.backoff(attempt)),
        End::Panicked(message) => {
            ending(&attempt, Err(panicked(&message)), |attempt| handler.backoff(attempt))
        }
        End::CutOff => unfinished(&attempt, timeout),
    };
    let ending = after_run(shared, &attempt, ending).await;
    shared.report(attempt, ending, Some(began.elapsed()));
}

async fn run_batch(shared: &Arc<Shared>, handler: &dyn BatchHandler, attempts: Vec<Arc<Attempt>>) {
    let began = Instant::now();
    let mut ready = Vec::with_capacity(attempts.len());
    for attempt in attempts {
        let stopped = attempt.control.reason().is_some();
        if stopped || !may_start(shared, &attempt).await {
            let ending = if stopped { unfinished(&attempt, None) } else { Ending::Released };
            shared.report(attempt, ending, None);
            continue;
        }
        shared.metrics.started(attempt.claimed.kind());
        match veto(shared, &attempt).await {
            None => ready.push(attempt),
            Some(failure) => {
                let ending = ending(&attempt, Err(failure), |_| None);
                shared.report(attempt, ending, Some(began.elapsed()));
            }
        }
    }
    if ready.is_empty() {
        return;
    }
    // One call has one end; the shortest timeout is that of all.
    let timeout = ready.iter().filter_map(|attempt| attempt.claimed.timeout()).min();
    let timed_out = || ready.iter().for_each(|attempt| attempt.control.stop(StopReason::TimedOut));
    let end = within_timeout(timeout, timed_out, none_may_go_on(&ready), handler.run(ready.clone())).await;
    let answers: Vec<Option<Result<(), Failure>>> = match end {
        End::Answered(answers) => answers.into_iter().map(Some).collect(),
        End::Panicked(message) => ready.iter().map(|_| Some(Err(panicked(&message)))).collect(),
        End::CutOff => ready.iter().map(|_| None).collect(),
    };
    for (attempt, answer) in ready.into_iter().zip(answers) {
        let ending = match answer {
            Some(answer) => ending(&attempt, answer, |_| None),
            None => unfinished(&attempt, timeout),
        };
        let ending = after_run(shared, &attempt, ending).await;
        shared.report(attempt, ending, Some(began.elapsed()));
    }
}

fn panicked(message: &str) -> Failure {
    Failure::retry(format!("panicked: {message}"))
}

/// Waits until a batch has to be dropped: when one of its jobs has to stop for a
/// reason that concerns this process, or every one has. That one has lost its
/// lease is no harm to the others; its own end is fenced off.
async fn none_may_go_on(attempts: &[Arc<Attempt>]) {
    let mut waiting: Vec<_> =
        attempts.iter().map(|attempt| (attempt, Box::pin(attempt.control.aborted()))).collect();
    std::future::poll_fn(|context| {
        let mut all = false;
        waiting.retain_mut(|(attempt, aborted)| match aborted.as_mut().poll(context) {
            Poll::Pending => true,
            Poll::Ready(()) => {
                all |= attempt.control.reason() != Some(StopReason::LeaseLost);
                false
            }
        });
        if all || waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// A suspect's start is written down first: if this process dies now, the job
/// had a hand in it.
async fn may_start(shared: &Shared, attempt: &Attempt) -> bool {
    if attempt.claimed.interruptions() == 0 {
        return true;
    }
    match shared.client.mark_started(&attempt.claimed.lease()).await {
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
    timeout: Option<Duration>,
    timed_out: impl FnOnce(),
    aborted: impl Future<Output = ()>,
    work: super::handler::HandlerFuture<T>,
) -> End<T> {
    let mut work = CatchPanic::new(work);
    let answered = |done: Result<T, Box<dyn std::any::Any + Send>>| match done {
        Ok(answer) => End::Answered(answer),
        Err(panic) => End::Panicked(panic_message(&*panic).to_owned()),
    };
    tokio::pin!(aborted);
    tokio::select! {
        biased;
        done = &mut work => return answered(done),
        () = &mut aborted => return End::CutOff,
        () = sleep(timeout) => timed_out(),
    }
    tokio::select! {
        biased;
        done = &mut work => answered(done),
        () = &mut aborted => End::CutOff,
        () = tokio::time::sleep(STOP_WITHIN) => End::CutOff,
    }
}

async fn sleep(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// What a handler's answer means for the job. The handler's own backoff is asked
/// where it matters; if it panics, the job's policy decides.
fn ending(
    attempt: &Attempt,
    answer: Result<(), Failure>,
    backoff: impl FnOnce(u16) -> Option<Duration>,
) -> Ending {
    let claimed = &attempt.claimed;
    let verdict = match answer {
        Ok(()) => return Ending::Succeeded { result: attempt.take_result() },
        Err(Failure(verdict)) => verdict,
    };
    // Whatever it says after it was told to stop, it says because of that.
    match attempt.control.reason() {
        None | Some(StopReason::Cancelled) => {}
        Some(_) => return unfinished(attempt, claimed.timeout()),
    }
    match verdict {
        Verdict::Retry { error, after } => {
            let backoff = || {
                let asked = std::panic::catch_unwind(AssertUnwindSafe(|| backoff(claimed.attempt())));
                asked.unwrap_or_else(|panic| {
                    let panic = panic_message(&*panic);
                    tracing::error!(
                        kind = claimed.kind(),
                        panic,
                        "the job's backoff panicked; its policy applies"
                    );
                    None
                })
            };
            Ending::Failed { error, retry_in: after.or_else(backoff).or_else(|| claimed.backoff()) }
        }
        Verdict::Permanent { error } => Ending::Failed { error, retry_in: None },
        Verdict::Snooze { delay } => Ending::Snoozed { delay },
        Verdict::Cancelled { reason } => Ending::Cancelled { reason },
    }
}

/// What becomes of a job whose handler was stopped.
fn unfinished(attempt: &Attempt, timeout: Option<Duration>) -> Ending {
    match attempt.control.reason() {
        Some(StopReason::TimedOut) => Ending::Failed {
            error: format!("timed out after {:?}", timeout.unwrap_or_default()),
            retry_in: attempt.claimed.backoff(),
        },
        Some(StopReason::Cancelled) => Ending::Cancelled { reason: None },
        // If the lease is still ours when the database is back, the job lost
        // time through no fault of its own. Without a reason, it was dropped
        // together with another that had one.
        Some(StopReason::Shutdown | StopReason::Disconnected | StopReason::LeaseLost) | None => {
            Ending::Released
        }
    }
}

/// Why a hook does not let an attempt begin. For jobs of a batch, whose call has
/// not begun and so has no timeout yet.
async fn veto(shared: &Shared, attempt: &Attempt) -> Option<Failure> {
    let hooks = shared.hooks.as_ref()?;
    let said = tokio::select! {
        biased;
        said = before_run(&**hooks, attempt) => said,
        () = attempt.control.aborted() => Err(Failure::retry("dropped before it began")),
        () = sleep(attempt.claimed.timeout()) => Err(Failure::retry("a before_run hook took longer than the job may")),
    };
    said.err()
}

/// The hook's say before an attempt; its panic is a failed attempt.
async fn before_run(hooks: &dyn Hooks, attempt: &Attempt) -> Result<(), Failure> {
    match CatchPanic::new(hooks.before_run(&attempt.claimed)).await {
        Ok(said) => said,
        Err(panic) => Err(Failure::retry(format!("a before_run hook panicked: {}", panic_message(&*panic)))),
    }
}

/// The hook's say after it.
async fn after_run(shared: &Shared, attempt: &Attempt, ending: Ending) -> Ending {
    let Some(hooks) = &shared.hooks else { return ending };
    call("after_run", hooks.after_run(&attempt.claimed, ending.clone())).await.unwrap_or(ending)
}
