//! Execute: one runner per slot takes the next job, runs its handler within the job's timeout,
//! and reports how the attempt ended. Storing that end belongs to `settle`.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use tracing::Instrument;
use tracing::field::Empty;

use super::context::{Attempt, StopReason};
use super::handler::{BatchHandler, Failure, Handler, Verdict};
use super::hooks::{Hooks, call};
use super::registry::Route;
use super::run_times::SlotClock;
use super::shared::Shared;
use crate::catch_panic::{CatchPanic, panic_message};
use crate::rules::lifecycle::Ending;
use crate::store::Fenced;

/// How long a handler may continue after its timeout fired its stop token.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);

/// Runs jobs until the buffer is closed and empty.
pub(super) async fn run(shared: Arc<Shared>) {
    let clock = shared.slots.open();
    while let Some(attempt) = shared.buffer.next().await {
        let mut slot = Slot { shared: &shared, clock: &clock, first: attempt.clone(), others: Vec::new() };
        match shared.registry.route(attempt.claimed.kind()) {
            Some(Route::One(handler)) => {
                let claimed = &attempt.claimed;
                let span = tracing::info_span!(
                    "job",
                    job_id = %claimed.lease().id,
                    kind = claimed.kind(),
                    attempt = claimed.attempt(),
                    worker_id = %claimed.lease().worker,
                    trace_id = Empty,
                    otel.status_code = Empty,
                );
                if let Some(traceparent) = claimed.trace() {
                    crate::trace::adopt(&span, traceparent);
                }
                attempt.record_trace(&span);
                let_woken_tasks_run().await;
                run_attempt(&shared, &clock, &*handler, attempt).instrument(span).await;
            }
            Some(Route::Batch { handler, size }) => {
                slot.others = shared.buffer.take_same_kind(attempt.claimed.kind(), size - 1);
                let attempts = std::iter::once(attempt).chain(slot.others.iter().cloned()).collect();
                let_woken_tasks_run().await;
                run_batch(&shared, &clock, &*handler, attempts).await;
            }
            None => {
                // Claims name the worker's kinds, so this is a bug; release the job.
                tracing::error!(
                    job_id = %attempt.claimed.lease().id,
                    kind = attempt.claimed.kind(),
                    worker_id = %attempt.claimed.lease().worker,
                    "claimed a job of a kind without a handler; releasing it"
                );
                shared.release(attempt);
            }
        }
    }
}

/// Yields before the handler starts. The settler or the claimer that this runner has just woken
/// waits in tokio's LIFO slot, from which only this thread takes tasks. A handler that blocks
/// the thread would delay that task until the handler ends.
///
/// Not with `tokio::task::yield_now`: it puts the runner into a list of this thread, where it would
/// wait as long as a handler that the thread runs in the meantime blocks it. A task that wakes
/// itself goes into the queue, from which other threads take tasks.
async fn let_woken_tasks_run() {
    let mut has_yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// A runner's slot. Dropping it frees the slot, regardless of how the attempt ended.
struct Slot<'a> {
    shared: &'a Shared,
    clock: &'a SlotClock,
    first: Arc<Attempt>,
    others: Vec<Arc<Attempt>>,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The worker itself has a bug. Even then every lease must be reported.
            for attempt in self.others.drain(..).chain([self.first.clone()]) {
                let error = "the worker panicked while running this attempt".to_owned();
                let retry_in = attempt.backoff();
                self.shared.report(attempt, Ending::Failed { error, retry_in }, None);
            }
        }
        self.clock.stop();
        self.shared.buffer.done(1 + self.others.len());
    }
}

async fn run_attempt(shared: &Arc<Shared>, clock: &SlotClock, handler: &dyn Handler, attempt: Arc<Attempt>) {
    let began = Instant::now();
    let claimed = &attempt.claimed;
    if !may_start(shared, &attempt).await {
        return shared.release(attempt);
    }
    start(shared, clock, began, &attempt);
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
    attempt.journal.suspension.allow();
    let suspended =
        async { Err(Failure(Verdict::Suspended { waits: attempt.journal.suspension.suspended().await })) };
    let panicked = |message: &str| Err(panicked(message));
    let result =
        within_timeout(timeout, timed_out, attempt.control.aborted(), suspended, panicked, work).await;
    attempt.journal.suspension.end();
    let ending = match result {
        Some(result) => ending(&attempt, result, |attempt| handler.backoff(attempt)),
        None => unfinished(&attempt, timeout),
    };
    let ending = after_run(shared, &attempt, ending).await;
    if let Ending::Failed { .. } = ending {
        tracing::Span::current().record("otel.status_code", "ERROR");
    }
    let ran = began.elapsed();
    attempt.kind.run_time.record(ran, 1);
    shared.report(attempt, ending, Some(ran));
}

/// Counts the attempt as started, and starts the slot's clock.
fn start(shared: &Shared, clock: &SlotClock, now: Instant, attempt: &Attempt) {
    shared.metrics.started(attempt);
    shared.slots.start(clock, now, attempt.kind.index, &attempt.kind.run_time);
}

async fn run_batch(
    shared: &Arc<Shared>,
    clock: &SlotClock,
    handler: &dyn BatchHandler,
    attempts: Vec<Arc<Attempt>>,
) {
    let began = Instant::now();
    let mut ready = Vec::with_capacity(attempts.len());
    for attempt in attempts {
        if !may_start(shared, &attempt).await {
            shared.release(attempt);
            continue;
        }
        start(shared, clock, began, &attempt);
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
    // The jobs share one call, so the shortest timeout applies to all of them.
    let timeout = ready.iter().filter_map(|attempt| attempt.claimed.timeout()).min();
    let timed_out = || ready.iter().for_each(|attempt| attempt.control.stop(StopReason::TimedOut));
    let (aborted, never) = (batch_aborted(&ready), std::future::pending());
    let panicked = |message: &str| ready.iter().map(|_| Err(panicked(message))).collect();
    let results =
        within_timeout(timeout, timed_out, aborted, never, panicked, handler.run(ready.clone())).await;
    let results: Vec<Option<Result<(), Failure>>> = match results {
        Some(results) => results.into_iter().map(Some).collect(),
        None => ready.iter().map(|_| None).collect(),
    };
    ready[0].kind.run_time.record(began.elapsed(), ready.len());
    for (attempt, result) in ready.into_iter().zip(results) {
        let ending = match result {
            Some(result) => ending(&attempt, result, |_| None),
            None => unfinished(&attempt, timeout),
        };
        let ending = after_run(shared, &attempt, ending).await;
        shared.report(attempt, ending, Some(began.elapsed()));
    }
}

fn panicked(message: &str) -> Failure {
    Failure::retry(format!("panicked: {message}"))
}

/// Waits until the batch must be dropped: when one of its jobs is aborted for a reason that
/// concerns the whole process, or when all are aborted. A single lost lease does not stop the
/// other jobs; the fence rejects that job's own settlement.
async fn batch_aborted(attempts: &[Arc<Attempt>]) {
    let mut waiting: Vec<_> =
        attempts.iter().map(|attempt| (attempt, Box::pin(attempt.control.aborted()))).collect();
    std::future::poll_fn(|context| {
        let mut drop_all = false;
        waiting.retain_mut(|(attempt, aborted)| match aborted.as_mut().poll(context) {
            Poll::Pending => true,
            Poll::Ready(()) => {
                drop_all |= attempt.control.reason() != Some(StopReason::LeaseLost);
                false
            }
        });
        if drop_all || waiting.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Whether the attempt may start. If its job was cancelled or its lease is lost, it may not; the
/// release then ends the job as cancelled, or changes nothing. A suspect's start is recorded
/// first: if the process then dies, the interruption counts against the job.
async fn may_start(shared: &Shared, attempt: &Attempt) -> bool {
    if attempt.control.reason().is_some() {
        return false;
    }
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
            tracing::warn!(%error, job_id = %attempt.claimed.lease().id, "cannot record the start of a suspect; releasing it");
            false
        }
    }
}

/// The result of a handler's call. It is `panicked`'s if the handler panics, and `suspended`'s if it is dropped because it
/// waits; `None` if it is dropped because it was aborted, or because it does not stop in time after its timeout.
async fn within_timeout<T>(
    timeout: Option<Duration>,
    timed_out: impl FnOnce(),
    aborted: impl Future<Output = ()>,
    suspended: impl Future<Output = T>,
    panicked: impl FnOnce(&str) -> T,
    work: super::handler::HandlerFuture<T>,
) -> Option<T> {
    let mut work = CatchPanic::new(work);
    let ended = |done: Result<T, Box<dyn std::any::Any + Send>>| {
        Some(done.unwrap_or_else(|panic| panicked(panic_message(&*panic))))
    };
    tokio::pin!(aborted, suspended);
    tokio::select! {
        biased;
        done = &mut work => return ended(done),
        () = &mut aborted => return None,
        suspended = &mut suspended => return Some(suspended),
        () = sleep(timeout) => timed_out(),
    }
    tokio::select! {
        biased;
        done = &mut work => ended(done),
        () = &mut aborted => None,
        () = tokio::time::sleep(STOP_TIMEOUT) => None,
    }
}

async fn sleep(time: Option<Duration>) {
    match time {
        Some(time) => tokio::time::sleep(time).await,
        None => std::future::pending().await,
    }
}

/// Converts a handler's result into the attempt's ending. For a retry without a delay the
/// handler's own backoff is called; if that panics, the job's policy applies.
fn ending(
    attempt: &Attempt,
    result: Result<(), Failure>,
    backoff: impl FnOnce(u16) -> Option<Duration>,
) -> Ending {
    let claimed = &attempt.claimed;
    let verdict = match result {
        Ok(()) => return Ending::Succeeded { result: attempt.take_result() },
        Err(Failure(verdict)) => verdict,
    };
    match (attempt.control.reason(), &verdict) {
        (None | Some(StopReason::Cancelled), _) | (Some(_), Verdict::Suspended { .. }) => {}
        // A failure after a stop was requested is a consequence of the stop.
        (Some(_), _) => return unfinished(attempt, claimed.timeout()),
    }
    match verdict {
        Verdict::Retry { error, after } => {
            let backoff = || {
                let delay = std::panic::catch_unwind(AssertUnwindSafe(|| backoff(attempt.number())));
                delay.unwrap_or_else(|panic| {
                    let panic = panic_message(&*panic);
                    tracing::error!(
                        job_id = %claimed.lease().id,
                        kind = claimed.kind(),
                        panic,
                        "the job's backoff function panicked; using its retry policy"
                    );
                    None
                })
            };
            Ending::Failed { error, retry_in: after.or_else(backoff).or_else(|| attempt.backoff()) }
        }
        Verdict::Permanent { error } => Ending::Failed { error, retry_in: None },
        Verdict::Snooze { delay } => Ending::Snoozed { delay },
        Verdict::Cancelled { reason } => Ending::Cancelled { reason },
        Verdict::Suspended { waits } => Ending::Suspended { waits },
    }
}

/// The ending of an attempt whose handler was stopped before it finished.
fn unfinished(attempt: &Attempt, timeout: Option<Duration>) -> Ending {
    match attempt.control.reason() {
        Some(StopReason::TimedOut) => Ending::Failed {
            error: format!("timed out after {:?}", timeout.unwrap_or_default()),
            retry_in: attempt.backoff(),
        },
        Some(StopReason::Cancelled) => Ending::Cancelled { reason: None },
        // Disconnected: if this worker still holds the lease when the database is back,
        // the job is not to blame, so it is released uncharged. None: the job was
        // dropped with its batch because of another job.
        Some(StopReason::Shutdown | StopReason::Disconnected | StopReason::LeaseLost) | None => {
            attempt.released()
        }
    }
}

/// Runs the `before_run` hook for a job of a batch and returns its veto, if any. The batch's call
/// has not started yet, so this function applies the job's timeout itself.
async fn veto(shared: &Shared, attempt: &Attempt) -> Option<Failure> {
    let hooks = shared.hooks.as_ref()?;
    let allowed = tokio::select! {
        biased;
        allowed = before_run(&**hooks, attempt) => allowed,
        () = attempt.control.aborted() => Err(Failure::retry("stopped before the handler started")),
        () = sleep(attempt.claimed.timeout()) => Err(Failure::retry("a before_run hook took longer than the job's timeout")),
    };
    allowed.err()
}

/// Calls the `before_run` hook; a panic in it fails the attempt.
async fn before_run(hooks: &dyn Hooks, attempt: &Attempt) -> Result<(), Failure> {
    match CatchPanic::new(hooks.before_run(&attempt.claimed)).await {
        Ok(allowed) => allowed,
        Err(panic) => Err(Failure::retry(format!("a before_run hook panicked: {}", panic_message(&*panic)))),
    }
}

/// Calls the `after_run` hook, which may change the ending.
async fn after_run(shared: &Shared, attempt: &Attempt, ending: Ending) -> Ending {
    let Some(hooks) = &shared.hooks else { return ending };
    call("after_run", hooks.after_run(&attempt.claimed, ending.clone())).await.unwrap_or(ending)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// A bound against hanging only.
    const MAX_WAIT: Duration = Duration::from_secs(60);

    /// One thread is busy. The other one polls a runner that yields, and then a handler that blocks
    /// it until the runner has started. Only the first thread can run the runner then.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[allow(clippy::unwrap_used)]
    async fn a_runner_that_yields_does_not_wait_for_a_handler_that_blocks_its_thread() {
        let (busy, is_busy) = tokio::sync::oneshot::channel();
        let (blocked, is_blocked) = mpsc::channel();
        let (started, has_started) = mpsc::channel();
        tokio::spawn(async move {
            busy.send(()).unwrap();
            is_blocked.recv_timeout(MAX_WAIT).unwrap();
        });
        is_busy.await.unwrap();
        let (waited, has_waited) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            tokio::spawn(async move {
                blocked.send(()).unwrap();
                waited.send(has_started.recv_timeout(MAX_WAIT)).unwrap();
            });
            // The newest task runs first.
            tokio::spawn(async move {
                let_woken_tasks_run().await;
                started.send(()).unwrap();
            });
        });
        assert_eq!(has_waited.await.unwrap(), Ok(()), "the runner waits until the handler ends");
    }
}
