//! The application's hooks: what an application can observe, veto and change.
//!
//! | Hook | When | If it panics |
//! |---|---|---|
//! | `before_run` | before each attempt; may veto it | the attempt fails with the panic's message |
//! | `after_run` | after each attempt; may change its ending | logged; the ending is unchanged |
//! | `on_success`, `on_failure`, `on_permanent_failure`, `on_cancel` | after the ending is stored | logged |
//! | `on_interrupted_job` | before a sweep recovers a job; decides what happens to it | logged; the default applies |
//! | `on_interruption` | after a job was recovered | logged |
//! | `on_sweep` | after a sweep that found something | logged |
//! | `on_worker_start`, `on_worker_stop` | once each | logged |
//! | `on_cron_tick` | before a tick's job is enqueued; may veto or change it | logged; the tick fires |
//!
//! A hook that takes longer than 30 seconds is abandoned, as if it had panicked; `before_run`
//! has the job's own timeout instead.
//!
//! Hooks run outside any transaction. Hooks that report something stored are called at most
//! once: if the process dies in between, they are not called. Hooks that decide may be called
//! twice for the same job or tick; one decision applies.

use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};

use super::handler::Failure;
use crate::catch_panic::{CatchPanic, panic_message};
use crate::client::recovery::{Decision, InterruptedJob, SweepReport};
use crate::job::WorkerId;
use crate::rules::enqueue::NewJob;
use crate::rules::lifecycle::Ending;
use crate::store::{Claimed, Schedule};

/// The application's hooks into a worker. Every method has a default that changes nothing.
#[async_trait]
pub trait Hooks: Send + Sync + 'static {
    /// Called when the worker has registered and is about to claim.
    async fn on_worker_start(&self, _worker: WorkerId) {}

    /// Called when the worker has settled what it could and has signed off.
    async fn on_worker_stop(&self, _worker: WorkerId) {}

    /// Called before an attempt starts. An error ends the attempt with that failure, and the
    /// handler does not run.
    async fn before_run(&self, _job: &Claimed) -> Result<(), Failure> {
        Ok(())
    }

    /// Called when an attempt has ended and nothing is stored yet. The returned ending is
    /// stored.
    async fn after_run(&self, _job: &Claimed, ending: Ending) -> Ending {
        ending
    }

    /// Called after a success is stored.
    async fn on_success(&self, _job: &Claimed) {}

    /// Called after a failed attempt is stored and the job will be retried.
    async fn on_failure(&self, _job: &Claimed, _error: &str) {}

    /// Called after a permanent failure is stored.
    async fn on_permanent_failure(&self, _job: &Claimed, _error: &str) {}

    /// Called after a job has ended as cancelled.
    async fn on_cancel(&self, _job: &Claimed) {}

    /// Called before a sweep takes a lease from a dead worker or a hung handler; decides what
    /// happens to the job. `recovering` is this worker; the job names the previous one.
    async fn on_interrupted_job(&self, _recovering: WorkerId, _job: &InterruptedJob) -> Decision {
        Decision::Default
    }

    /// Called after a job was recovered from a dead worker or a hung handler, with the job as it
    /// was before.
    async fn on_interruption(&self, _job: &InterruptedJob) {}

    /// Called after a sweep that recovered jobs or found dead workers.
    async fn on_sweep(&self, _report: &SweepReport) {}

    /// Called before a due tick's job is enqueued. The returned job is enqueued; an error vetoes
    /// the tick.
    async fn on_cron_tick(
        &self,
        _schedule: &Schedule,
        _tick: DateTime<Utc>,
        job: NewJob,
    ) -> Result<NewJob, Failure> {
        Ok(job)
    }
}

/// The longest a hook may take, so that a hook that hangs does not block the worker.
const HOOK_TIMEOUT: Duration = Duration::from_secs(30);

/// Runs a hook. Returns `None` and logs an error if it panics or takes too long.
pub(super) async fn call<T>(name: &'static str, hook: impl Future<Output = T>) -> Option<T> {
    match tokio::time::timeout(HOOK_TIMEOUT, CatchPanic::new(Box::pin(hook))).await {
        Ok(Ok(value)) => Some(value),
        Ok(Err(panic)) => {
            tracing::error!(hook = name, panic = panic_message(&*panic), "a hook panicked");
            None
        }
        Err(_) => {
            tracing::error!(hook = name, "a hook took longer than {HOOK_TIMEOUT:?}; continuing without it");
            None
        }
    }
}
