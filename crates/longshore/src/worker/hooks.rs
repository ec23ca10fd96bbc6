//! What an application may hear of, and have a say in.
//!
//! | Hook | When | If it fails (panics) |
//! |---|---|---|
//! | `before_run` | before each attempt; may veto it | the attempt fails with the panic's message |
//! | `after_run` | after each attempt; may change its end | logged; the end stands |
//! | `on_success`, `on_failure`, `on_permanent_failure`, `on_cancel` | after the end is stored | logged |
//! | `on_interrupted_job` | before a sweep recovers a job; decides | logged; the default applies |
//! | `on_interruption` | after a job was recovered | logged |
//! | `on_sweep` | after a sweep that found something | logged |
//! | `on_worker_start`, `on_worker_stop` | once each | logged |
//! | `on_cron_tick` | before a tick's job is enqueued; may veto or change it | logged; the tick fires |
//!
//! A hook that takes longer than half a minute is given up on, as if it had
//! failed; `before_run` has the job's own timeout.
//!
//! Hooks run outside any transaction. Those that come after something was stored
//! are told at most once: a process that dies in between has told nobody. Those
//! that decide may be asked twice about the same thing; one answer applies.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::handler::Failure;
use crate::enqueue::NewJob;
use crate::job::WorkerId;
use crate::lifecycle::Ending;
use crate::recovery::{Decision, SweepReport};
use crate::store::{Claimed, Interrupted, Schedule};

/// A say in what a worker does. Every method has a default that does nothing.
#[async_trait]
pub trait Hooks: Send + Sync + 'static {
    /// The worker has registered and begins to claim.
    async fn on_worker_start(&self, _worker: WorkerId) {}

    /// The worker has settled what it could and is gone.
    async fn on_worker_stop(&self, _worker: WorkerId) {}

    /// An attempt is about to start. An error is its end: the handler does not
    /// run.
    async fn before_run(&self, _job: &Claimed) -> Result<(), Failure> {
        Ok(())
    }

    /// An attempt has ended like this, and nothing is stored yet. What is
    /// returned is stored.
    async fn after_run(&self, _job: &Claimed, ending: Ending) -> Ending {
        ending
    }

    /// A success is stored.
    async fn on_success(&self, _job: &Claimed) {}

    /// A failed attempt is stored, and the job will be tried again.
    async fn on_failure(&self, _job: &Claimed, _error: &str) {}

    /// A job has failed for good.
    async fn on_permanent_failure(&self, _job: &Claimed, _error: &str) {}

    /// A job has ended as cancelled.
    async fn on_cancel(&self, _job: &Claimed) {}

    /// A lease is about to be taken from a dead worker or a hung handler.
    async fn on_interrupted_job(&self, _recovering: WorkerId, _job: &Interrupted) -> Decision {
        Decision::Default
    }

    /// A job was recovered from a dead worker or a hung handler.
    async fn on_interruption(&self, _job: &Interrupted) {}

    /// A sweep has recovered something.
    async fn on_sweep(&self, _report: &SweepReport) {}

    /// A tick is due and this is its job. An error holds the job back.
    async fn on_cron_tick(
        &self,
        _schedule: &Schedule,
        _tick: DateTime<Utc>,
        job: NewJob,
    ) -> Result<NewJob, Failure> {
        Ok(job)
    }
}

/// A hook that hangs must not stop the worker's own work.
const HOOK_WITHIN: Duration = Duration::from_secs(30);

/// Runs a hook; a panic is logged and answered with `None`, and so is a hook
/// that does not come to an end.
pub(super) async fn call<T>(name: &'static str, hook: impl Future<Output = T>) -> Option<T> {
    match tokio::time::timeout(HOOK_WITHIN, CatchPanic::new(Box::pin(hook))).await {
        Ok(Ok(answer)) => Some(answer),
        Ok(Err(panic)) => {
            tracing::error!(hook = name, panic = panic_message(&*panic), "a hook panicked");
            None
        }
        Err(_) => {
            tracing::error!(hook = name, "a hook took longer than {HOOK_WITHIN:?}; going on without it");
            None
        }
    }
}

/// A future whose panic is its answer. Dropped before its end, it does not
/// panic either.
pub(super) struct CatchPanic<F>(Option<Pin<Box<F>>>)
where
    F: Future + ?Sized;

impl<F: Future + ?Sized> CatchPanic<F> {
    pub(super) fn new(inner: Pin<Box<F>>) -> Self {
        CatchPanic(Some(inner))
    }
}

impl<F: Future + ?Sized> Drop for CatchPanic<F> {
    fn drop(&mut self) {
        let inner = self.0.take();
        if let Err(panic) = std::panic::catch_unwind(AssertUnwindSafe(|| drop(inner))) {
            tracing::error!(
                panic = panic_message(&*panic),
                "what a handler left behind panicked when it was dropped"
            );
        }
    }
}

impl<F: Future + ?Sized> Future for CatchPanic<F> {
    type Output = Result<F::Output, Box<dyn Any + Send>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let Some(inner) = self.0.as_mut() else { return Poll::Pending };
        match std::panic::catch_unwind(AssertUnwindSafe(|| inner.as_mut().poll(context))) {
            Ok(Poll::Pending) => Poll::Pending,
            Ok(Poll::Ready(done)) => Poll::Ready(Ok(done)),
            Err(panic) => Poll::Ready(Err(panic)),
        }
    }
}

pub(super) fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
