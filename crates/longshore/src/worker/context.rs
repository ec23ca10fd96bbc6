//! What a handler receives: its job, the application's state, a stop token with a reason, and
//! the means to store a result, follow-up jobs, progress and checkpoints.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tokio::sync::Notify;

use super::journal::{Journal, StepLane};
use super::metrics::Kind;
use super::progress::ProgressLane;
use crate::client::Client;
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::rules::enqueue::{MAX_PAYLOAD, NewJob, ValidJob, check_json};
use crate::rules::lifecycle::Ending;
use crate::store::{Claimed, Fenced};

/// How long [`Context::is_cancelled`] waits for the database.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

/// One attempt, from claim to settlement.
pub(super) struct Attempt {
    pub(super) claimed: Claimed,
    pub(super) control: Control,
    pub(super) kind: Arc<Kind>,
    /// When this process received the claim.
    pub(super) received_at: Instant,
    client: Client,
    progress: ProgressLane,
    pub(super) journal: Journal,
    result: Mutex<Option<Box<RawValue>>>,
    follow_ups: Mutex<Vec<ValidJob>>,
    reported: AtomicBool,
    /// A [`Stage`].
    stage: AtomicU8,
    /// The trace of the span that runs it, if the span is part of one.
    trace_id: OnceLock<String>,
}

/// How far an attempt has been counted in the metrics.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Stage {
    NotStarted = 0,
    Started = 1,
    Completed = 2,
}

impl Attempt {
    pub(super) fn new(
        claimed: Claimed,
        kind: Arc<Kind>,
        received_at: Instant,
        client: Client,
        progress: ProgressLane,
        steps: StepLane,
    ) -> Arc<Self> {
        Arc::new(Attempt {
            claimed,
            control: Control::default(),
            kind,
            received_at,
            client,
            progress,
            journal: Journal::new(steps),
            result: Mutex::default(),
            follow_ups: Mutex::default(),
            reported: AtomicBool::new(false),
            stage: AtomicU8::new(Stage::NotStarted as u8),
            trace_id: OnceLock::new(),
        })
    }

    /// Marks the attempt as started. Returns true for the first caller only, and only if the
    /// attempt has not completed.
    pub(super) fn mark_started(&self) -> bool {
        let (from, to) = (Stage::NotStarted as u8, Stage::Started as u8);
        self.stage.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Marks the attempt as completed. Returns whether it had started, for the first caller only.
    pub(super) fn mark_completed(&self) -> Option<bool> {
        match self.stage.swap(Stage::Completed as u8, Ordering::AcqRel) {
            before if before == Stage::Completed as u8 => None,
            before => Some(before == Stage::Started as u8),
        }
    }

    /// The number of this attempt for retries, which count since the last journaled step.
    pub(super) fn number(&self) -> u16 {
        if self.journal.has_progressed() { 1 } else { self.claimed.attempt() }
    }

    /// The delay before the next attempt if this one fails.
    pub(super) fn backoff(&self) -> Option<Duration> {
        self.claimed.backoff_after(self.number())
    }

    /// The ending of an attempt that returns to the queue unfinished.
    pub(super) fn released(&self) -> Ending {
        if self.stage.load(Ordering::Acquire) == Stage::NotStarted as u8 {
            Ending::NotStarted { run_at: self.claimed.run_at() }
        } else {
            Ending::Released
        }
    }

    /// Remembers the trace that `span` is part of, and records its id as the span's field
    /// `trace_id`, so that the lines that a handler logs have it.
    pub(super) fn record_trace(&self, span: &tracing::Span) {
        if span.is_disabled() {
            return;
        }
        if let Some(id) = crate::trace::id(span) {
            let _ = self.trace_id.set(id);
        }
        if let Some(id) = self.trace_id() {
            span.record("trace_id", id);
        }
    }

    /// The id of the trace that runs it; otherwise that of the trace that enqueued it.
    pub(super) fn trace_id(&self) -> Option<&str> {
        let enqueued_by = || self.claimed.trace().and_then(crate::client::job_log::trace_id);
        self.trace_id.get().map(String::as_str).or_else(enqueued_by)
    }

    pub(super) fn take_result(&self) -> Option<Box<RawValue>> {
        lock(&self.result).take()
    }

    pub(super) fn take_follow_ups(&self) -> Vec<ValidJob> {
        std::mem::take(&mut lock(&self.follow_ups))
    }

    /// Marks the attempt as ended. Returns true for the first caller only, so that an attempt
    /// is reported once.
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
#[non_exhaustive]
pub enum StopReason {
    /// The job was cancelled.
    Cancelled = 1,
    /// The attempt has taken longer than the job's timeout.
    TimedOut = 2,
    /// Another worker owns the job now, or it has ended.
    LeaseLost = 3,
    /// This process is shutting down; the job is released to the queue.
    Shutdown = 4,
    /// The worker has had no contact with the database for so long that another worker may
    /// soon recover the job.
    Disconnected = 5,
}

impl StopReason {
    fn from_code(code: u8) -> Option<StopReason> {
        use StopReason::*;
        [Cancelled, TimedOut, LeaseLost, Shutdown, Disconnected]
            .into_iter()
            .find(|reason| *reason as u8 == code)
    }
}

/// The stop token of one attempt: requests a stop, and forces it.
#[derive(Default)]
pub(super) struct Control {
    reason: AtomicU8,
    stop: Notify,
    aborted: AtomicBool,
    abort: Notify,
}

impl Control {
    /// Requests that the handler stop. The first reason is kept.
    pub(super) fn stop(&self, reason: StopReason) {
        if self.reason.compare_exchange(0, reason as u8, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.stop.notify_waiters();
        }
    }

    pub(super) fn reason(&self) -> Option<StopReason> {
        StopReason::from_code(self.reason.load(Ordering::Acquire))
    }

    pub(super) async fn stopped(&self) -> StopReason {
        loop {
            let notified = self.stop.notified();
            if let Some(reason) = self.reason() {
                return reason;
            }
            notified.await;
        }
    }

    /// Makes the runner drop the handler at its next await.
    pub(super) fn abort(&self, reason: StopReason) {
        // First, so that the runner finds a reason.
        self.stop(reason);
        self.aborted.store(true, Ordering::Release);
        self.abort.notify_waiters();
    }

    pub(super) async fn aborted(&self) {
        loop {
            let notified = self.abort.notified();
            if self.aborted.load(Ordering::Acquire) {
                return;
            }
            notified.await;
        }
    }
}

/// A handler's access to its attempt: the job, the application's state, the stop token and
/// everything it can store. Cheap to clone and to pass to other tasks.
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

    /// The job's id.
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

    /// A client of the queue.
    pub fn client(&self) -> &Client {
        &self.attempt.client
    }

    // ---- stopping --------------------------------------------------------

    /// Why the handler should stop; `None` while it may continue. Costs nothing: it reads what
    /// this process knows. A cancel usually arrives within milliseconds; if its notification is
    /// lost, with the next heartbeat.
    pub fn stop_reason(&self) -> Option<StopReason> {
        self.attempt.control.reason()
    }

    /// Asks the database whether the job was cancelled, so it also sees a cancel whose
    /// notification has not arrived. One query; for safe points between the steps of a job. In
    /// a tight loop, use [`stop_reason`](Self::stop_reason).
    ///
    /// From the first `true` on, the job ends as cancelled unless the handler succeeds. If the
    /// database does not reply within two seconds, this returns what this process knows. If
    /// the lease is lost, it returns `false` and the stop token fires with
    /// [`StopReason::LeaseLost`].
    ///
    /// ```
    /// # use longshore::worker::{Context, Failure};
    /// async fn import(pages: Vec<String>, ctx: Context) -> Result<(), Failure> {
    ///     for page in pages {
    ///         if ctx.is_cancelled().await {
    ///             return Err(Failure::cancelled(format!("stopped before {page}")));
    ///         }
    ///         // import the page
    ///     }
    ///     Ok(())
    /// }
    /// ```
    pub async fn is_cancelled(&self) -> bool {
        let control = &self.attempt.control;
        if control.reason().is_none() {
            let lease = self.job().lease();
            match tokio::time::timeout(CHECK_TIMEOUT, self.client().cancel_requested(&lease)).await {
                Ok(Ok(Some(true))) => control.stop(StopReason::Cancelled),
                Ok(Ok(Some(false))) => {}
                Ok(Ok(None)) => control.stop(StopReason::LeaseLost),
                Ok(Err(error)) => {
                    tracing::debug!(%error, job_id = %lease.id, "could not ask whether the job was cancelled");
                }
                Err(_) => {
                    tracing::debug!(job_id = %lease.id, "asking whether the job was cancelled timed out")
                }
            }
        }
        control.reason() == Some(StopReason::Cancelled)
    }

    /// Waits until the handler should stop. For `tokio::select!` next to long work.
    pub async fn stopped(&self) -> StopReason {
        self.attempt.control.stopped().await
    }

    /// Runs blocking work on a thread where blocking is allowed.
    pub async fn spawn_blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T> {
        let span = tracing::Span::current();
        tokio::task::spawn_blocking(move || span.in_scope(work))
            .await
            .map_err(|died| Error::internal("the blocking work panicked or was cancelled").with_source(died))
    }

    // ---- results, follow-ups, progress, checkpoints -----------------------

    /// Sets the result that is stored with the job if this attempt succeeds.
    pub fn set_result(&self, result: &(impl Serialize + ?Sized)) -> Result<()> {
        *lock(&self.attempt.result) = Some(json("result", result)?);
        Ok(())
    }

    /// Adds a follow-up job. It is enqueued only if this attempt succeeds, in the transaction
    /// that settles the attempt.
    pub fn enqueue(&self, job: impl Into<NewJob>) -> Result<JobId> {
        let job = job.into().validate()?;
        let id = job.id();
        let mut follow_ups = lock(&self.attempt.follow_ups);
        if self.attempt.has_ended() {
            return Err(Error::conflict(format!(
                "job {}: this attempt has ended, so it cannot add a follow-up; enqueue with the client instead",
                self.id()
            )));
        }
        follow_ups.push(job);
        Ok(id)
    }

    /// Reports the handler's progress. The newest report of each job is stored soon, in a batch
    /// with those of other jobs; older reports may be skipped.
    pub fn progress(&self, progress: &(impl Serialize + ?Sized)) -> Result<()> {
        let progress = json("progress", progress)?;
        check_json("progress", progress.get(), MAX_PAYLOAD)?;
        self.attempt.progress.put(&self.attempt, progress);
        Ok(())
    }

    /// Stores a checkpoint for later attempts of this job.
    pub async fn save_checkpoint(&self, data: &(impl Serialize + Sync + ?Sized)) -> Result<()> {
        let data = json("checkpoint", data)?;
        let fenced = self.client().save_checkpoint(&self.job().lease(), &data).await?;
        self.check_fence(fenced)
    }

    /// Reads the checkpoint that this attempt or an earlier one stored.
    pub async fn checkpoint<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let Some(data) = self.client().checkpoint(self.id()).await? else { return Ok(None) };
        serde_json::from_str(data.get()).map(Some).map_err(|error| {
            let why = super::handler::without_values(&error.to_string());
            Error::invalid(
                "checkpoint",
                format!("checkpoint of job {}: does not fit the requested type: {why}", self.id()),
            )
        })
    }

    // ---- the lease -------------------------------------------------------

    /// Checks that this attempt still owns the job; a conflict error means that it does not.
    pub async fn assert_lease(&self) -> Result<()> {
        let fenced = self.client().assert_lease(&self.job().lease()).await?;
        self.check_fence(fenced)
    }

    /// Like [`assert_lease`](Self::assert_lease), inside the handler's own Postgres transaction.
    /// No other worker can take the lease until the transaction ends, so only the job's owner
    /// can commit it.
    #[cfg(feature = "postgres")]
    pub async fn assert_lease_in(&self, transaction: &mut sqlx::PgConnection) -> Result<()> {
        let store = self.postgres().ok_or_else(|| {
            Error::invalid(
                "transaction",
                "transaction: this is a Postgres transaction, but the client uses another engine; use assert_lease",
            )
        })?;
        let fenced = store.assert_lease_in(transaction, &self.job().lease()).await?;
        self.check_fence(fenced)
    }

    /// The engine, if it is Postgres.
    #[cfg(feature = "postgres")]
    pub(super) fn postgres(&self) -> Option<&crate::store::postgres::PostgresStore> {
        let any: &dyn std::any::Any = &**self.client().store();
        any.downcast_ref()
    }

    pub(super) fn journal(&self) -> &Journal {
        &self.attempt.journal
    }

    /// Stops the handler if the lease is lost.
    pub(super) fn check_fence(&self, fenced: Fenced) -> Result<()> {
        match fenced {
            Fenced::Held => Ok(()),
            Fenced::LeaseLost => Err(self.lease_lost()),
        }
    }

    /// Stops the handler, because the lease is lost.
    pub(super) fn lease_lost(&self) -> Error {
        self.attempt.control.stop(StopReason::LeaseLost);
        let id = self.id();
        Error::conflict(format!(
            "job {id}: this attempt has lost its lease; stop, another worker owns the job"
        ))
    }

    /// Runs `work` to its end, or returns the reason if the handler should stop first.
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
