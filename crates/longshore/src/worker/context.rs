//! What a handler is given: its job, the application's state, a token that says
//! when to stop and why, and what it can leave behind.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::Notify;

use super::progress::ProgressLane;
use crate::client::Client;
use crate::enqueue::{MAX_PAYLOAD, NewJob, ValidJob, check_json};
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::store::{Claimed, Fenced};

/// One attempt, from its claim to its settlement.
pub(super) struct Attempt {
    pub(super) claimed: Claimed,
    pub(super) control: Control,
    /// When it reached this process.
    pub(super) since: Instant,
    client: Client,
    progress: ProgressLane,
    result: Mutex<Option<Box<RawValue>>>,
    follow_ups: Mutex<Vec<ValidJob>>,
    reported: AtomicBool,
}

impl Attempt {
    pub(super) fn new(claimed: Claimed, client: Client, progress: ProgressLane) -> Arc<Self> {
        Arc::new(Attempt {
            claimed,
            control: Control::default(),
            since: Instant::now(),
            client,
            progress,
            result: Mutex::default(),
            follow_ups: Mutex::default(),
            reported: AtomicBool::new(false),
        })
    }

    pub(super) fn take_result(&self) -> Option<Box<RawValue>> {
        lock(&self.result).take()
    }

    pub(super) fn take_follow_ups(&self) -> Vec<ValidJob> {
        std::mem::take(&mut lock(&self.follow_ups))
    }

    /// True for the first caller: an attempt ends once, whoever ends it.
    pub(super) fn end(&self) -> bool {
        !self.reported.swap(true, Ordering::AcqRel)
    }

    fn has_ended(&self) -> bool {
        self.reported.load(Ordering::Acquire)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a handler should stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum StopReason {
    /// Somebody cancelled the job.
    Cancelled = 1,
    /// The attempt has taken longer than the job's timeout.
    TimedOut = 2,
    /// Another worker owns the job now, or it has ended.
    LeaseLost = 3,
    /// This process is shutting down; the job goes back to the queue.
    Shutdown = 4,
    /// The database has been out of reach for so long that the lease may soon
    /// be given away.
    Disconnected = 5,
}

impl StopReason {
    fn of(code: u8) -> Option<StopReason> {
        use StopReason::*;
        [Cancelled, TimedOut, LeaseLost, Shutdown, Disconnected]
            .into_iter()
            .find(|reason| *reason as u8 == code)
    }
}

/// Tells a handler to stop, and makes it.
#[derive(Default)]
pub(super) struct Control {
    reason: AtomicU8,
    stop: Notify,
    aborted: AtomicBool,
    abort: Notify,
}

impl Control {
    /// Asks the handler to stop. The first reason stands.
    pub(super) fn stop(&self, reason: StopReason) {
        if self.reason.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.stop.notify_waiters();
        }
    }

    pub(super) fn reason(&self) -> Option<StopReason> {
        StopReason::of(self.reason.load(Ordering::Acquire))
    }

    pub(super) async fn stopped(&self) -> StopReason {
        loop {
            let told = self.stop.notified();
            if let Some(reason) = self.reason() {
                return reason;
            }
            told.await;
        }
    }

    /// Drops the handler at its next await. Whoever sees that finds the reason.
    pub(super) fn abort(&self, reason: StopReason) {
        self.stop(reason);
        self.aborted.store(true, Ordering::Release);
        self.abort.notify_waiters();
    }

    pub(super) async fn aborted(&self) {
        loop {
            let told = self.abort.notified();
            if self.aborted.load(Ordering::Acquire) {
                return;
            }
            told.await;
        }
    }
}

/// What a handler knows about its attempt and can do in its name. Cheap to
/// clone and to send along.
pub struct Context<S = ()> {
    attempt: Arc<Attempt>,
    state: Arc<S>,
}

impl<S> Clone for Context<S> {
    fn clone(&self) -> Self {
        Context { attempt: self.attempt.clone(), state: self.state.clone() }
    }
}

impl<S> Context<S> {
    pub(super) fn new(attempt: Arc<Attempt>, state: Arc<S>) -> Self {
        Context { attempt, state }
    }

    /// The job: kind, queue, payload, attempt, tags and so on.
    pub fn job(&self) -> &Claimed {
        &self.attempt.claimed
    }

    /// Its id.
    pub fn id(&self) -> JobId {
        self.job().lease().id
    }

    /// Which attempt this is; 1 is the first.
    pub fn attempt(&self) -> u16 {
        self.job().attempt()
    }

    /// The application's state.
    pub fn state(&self) -> &S {
        &self.state
    }

    /// The queue's client.
    pub fn client(&self) -> &Client {
        &self.attempt.client
    }

    // ---- when to stop ----------------------------------------------------

    /// Why the handler should stop, once it should.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.attempt.control.reason()
    }

    /// Waits until the handler should stop. For `tokio::select!` beside long
    /// work.
    pub async fn stopped(&self) -> StopReason {
        self.attempt.control.stopped().await
    }

    /// Runs work that blocks on a thread where it may.
    pub async fn spawn_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let span = tracing::Span::current();
        tokio::task::spawn_blocking(move || span.in_scope(work))
            .await
            .map_err(|died| Error::internal("the blocking work panicked or was cut off").with_source(died))
    }

    // ---- what to leave behind --------------------------------------------

    /// The result to keep with the job if this attempt succeeds.
    pub fn set_result(&self, result: &(impl Serialize + ?Sized)) -> Result<()> {
        *lock(&self.attempt.result) = Some(json("result", result)?);
        Ok(())
    }

    /// Adds a job that comes to exist only if this attempt succeeds: in the
    /// transaction that settles it.
    pub fn enqueue(&self, job: impl Into<NewJob>) -> Result<JobId> {
        let job = job.into().validate()?;
        let id = job.id();
        let mut follow_ups = lock(&self.attempt.follow_ups);
        if self.attempt.has_ended() {
            return Err(Error::conflict(format!(
                "job {}: this attempt has ended, so nothing can follow from it; enqueue with the client",
                self.id()
            )));
        }
        follow_ups.push(job);
        Ok(id)
    }

    /// Shows how far the work has come. The newest report of each job is stored
    /// soon, together with others'; older ones may be passed over.
    pub fn progress(&self, progress: &(impl Serialize + ?Sized)) -> Result<()> {
        let progress = json("progress", progress)?;
        check_json("progress", progress.get(), MAX_PAYLOAD)?;
        self.attempt.progress.put(&self.attempt, progress);
        Ok(())
    }

    /// Keeps something for later attempts of this job.
    pub async fn save_checkpoint(&self, data: &(impl Serialize + Sync + ?Sized)) -> Result<()> {
        let data = json("checkpoint", data)?;
        let kept = self.client().save_checkpoint(&self.job().lease(), &data).await?;
        self.held(kept)
    }

    /// What an earlier attempt, or this one, kept.
    pub async fn checkpoint<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let Some(data) = self.client().checkpoint(self.id()).await? else { return Ok(None) };
        serde_json::from_str(data.get()).map(Some).map_err(|error| {
            let why = super::handler::without_values(&error.to_string());
            Error::invalid("checkpoint", format!("checkpoint of job {}: another shape: {why}", self.id()))
        })
    }

    // ---- the lease -------------------------------------------------------

    /// Makes sure that this attempt still owns the job.
    pub async fn assert_lease(&self) -> Result<()> {
        let held = self.client().assert_lease(&self.job().lease()).await?;
        self.held(held)
    }

    /// As [`assert_lease`](Self::assert_lease), inside the handler's own Postgres
    /// transaction: until that ends nobody can take the lease, so what it
    /// commits was done by the job's only owner.
    #[cfg(feature = "postgres")]
    pub async fn assert_lease_in(&self, transaction: &mut sqlx::PgConnection) -> Result<()> {
        let any: &dyn std::any::Any = &**self.client().store();
        let store = any.downcast_ref::<crate::store::postgres::PostgresStore>().ok_or_else(|| {
            Error::invalid(
                "transaction",
                "transaction: a Postgres transaction, but this client uses another engine",
            )
        })?;
        let held = store.assert_lease_in(transaction, &self.job().lease()).await?;
        self.held(held)
    }

    fn held(&self, fenced: Fenced) -> Result<()> {
        match fenced {
            Fenced::Held => Ok(()),
            Fenced::LeaseLost => {
                self.attempt.control.stop(StopReason::LeaseLost);
                Err(Error::conflict(format!(
                    "job {}: this attempt has lost its lease; stop, another worker owns the job",
                    self.id()
                )))
            }
        }
    }

    /// Runs `work` unless told to stop first; then says why.
    pub async fn until_stopped<T>(&self, work: impl Future<Output = T>) -> Result<T, StopReason> {
        tokio::select! {
            done = work => Ok(done),
            reason = self.stopped() => Err(reason),
        }
    }
}

fn json(field: &'static str, value: &(impl Serialize + ?Sized)) -> Result<Box<RawValue>> {
    serde_json::value::to_raw_value(value)
        .map_err(|error| Error::invalid(field, format!("{field}: not JSON: {error}")))
}
