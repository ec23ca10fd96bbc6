//! What workers do with leases: register, claim, heartbeat, report progress,
//! release. `settle` owns how attempts end.
//!
//! The worker runtime and the API's lease endpoints are built on these methods.
//! Applications write handlers instead, so the methods are hidden from the
//! documentation and may change.

use std::pin::Pin;
use std::task::{Context, Poll};

use serde_json::value::RawValue;

use super::Client;
use super::settle::{Kept, Report};
use crate::error::Result;
use crate::job::{JobId, WorkerId};
use crate::rules::lifecycle::State;
use crate::store::{
    Beat, CancelNotices, ClaimCursor, ClaimRequest, Claimed, Claims, EventNotices, Fenced, Lease, LiveLease,
    NewWorker, Registration, SavedWork, Wakeups,
};

#[doc(hidden)]
impl Client {
    // ---- workers ---------------------------------------------------------

    /// Adds a worker, or updates the queues and kinds of one that is alive.
    pub async fn register(&self, worker: &NewWorker) -> Result<()> {
        self.store.register(worker).await
    }

    /// What a worker registered with; `None` if it is unknown.
    pub async fn registration(&self, worker: WorkerId) -> Result<Option<Registration>> {
        self.store.registration(worker).await
    }

    /// Whether a worker holds a job of a queue that is not one of these.
    pub async fn has_leases_outside(&self, worker: WorkerId, queues: &[String]) -> Result<bool> {
        self.store.has_leases_outside(worker, queues).await
    }

    /// Sends a worker's heartbeat with the leases it holds. Returns those it has
    /// lost and those to cancel.
    pub async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat> {
        self.store.beat(worker, held).await
    }

    /// Sends a worker's heartbeat. Returns every live lease of the worker; `None` if it is
    /// dead or unknown.
    pub async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>> {
        self.store.beat_and_list(worker).await
    }

    /// The live leases of a worker whose jobs are to be cancelled.
    pub async fn cancels(&self, worker: WorkerId) -> Result<Vec<Lease>> {
        self.store.cancels(worker).await
    }

    /// Whether the cancellation of the job behind a lease was requested; `None` if the
    /// lease is not live.
    pub async fn cancel_requested(&self, lease: &Lease) -> Result<Option<bool>> {
        let running = match self.store.locate(lease.id).await? {
            Some(State::Running(running)) => running,
            _ => return Ok(None),
        };
        let is_live = running.lease_no == lease.lease_no && running.worker == lease.worker;
        Ok(is_live.then_some(running.flags.cancel_requested))
    }

    /// Removes a worker that stopped cleanly.
    pub async fn retire(&self, worker: WorkerId) -> Result<()> {
        self.store.retire(worker).await
    }

    /// Subscribes to wake-ups. Subscribe before claiming: a job enqueued between
    /// the two would otherwise wait a full poll interval.
    pub async fn subscribe(&self) -> Result<Wakeups> {
        self.store.subscribe().await
    }

    /// Subscribes to cancels of running jobs. Read [`cancels`](Self::cancels) once after
    /// subscribing.
    pub async fn subscribe_to_cancels(&self) -> Result<CancelNotices> {
        self.store.subscribe_to_cancels().await
    }

    /// Subscribes to events that were emitted in SQL.
    pub async fn subscribe_to_events(&self) -> Result<EventNotices> {
        self.store.subscribe_to_events().await
    }

    /// A client of the same database with its own connection, for heartbeats that must
    /// not wait behind other work.
    pub fn with_own_connection(&self) -> Client {
        Client::new(self.store.with_own_connection())
    }

    // ---- claim -----------------------------------------------------------

    /// Leases due jobs to a live worker, as [`Store::claim`] does. If the caller
    /// drops this future, the claim still completes and its jobs are released.
    ///
    /// [`Store::claim`]: crate::store::Store::claim
    pub async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        // The cursor moves with the work. If the caller goes away or the claim
        // fails, an empty cursor stays behind, and the next claim starts at the
        // head.
        let (store, request, mut moved) = (self.store.clone(), request.clone(), std::mem::take(cursor));
        let work = Box::pin(async move {
            let claims = store.claim(&request, &mut moved).await?;
            Ok((claims, moved))
        });
        let runtime = tokio::runtime::Handle::current();
        let (claims, moved) = Claiming { client: self.clone(), runtime, work: Some(work) }.await?;
        *cursor = moved;
        self.measure_waits(&claims.jobs);
        Ok(claims)
    }

    /// The claims behind live leases, in the order given; `None` where the lease is
    /// not live. For workers that keep nothing in memory.
    pub async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>> {
        self.store.claims(leases).await
    }

    /// Every live lease of this worker.
    pub async fn leases(&self, worker: WorkerId) -> Result<Vec<Lease>> {
        self.store.leases(worker).await
    }

    // ---- release ---------------------------------------------------------

    /// Releases leases whose jobs never started: the jobs wait again as before the
    /// claim, without a charge or a history entry. Skips leases that are no longer
    /// live. Returns how many were released.
    pub async fn release(&self, leases: &[Lease]) -> Result<usize> {
        if leases.is_empty() {
            return Ok(0);
        }
        let claims = self.store.claims(leases).await?;
        let report = |claimed| Report {
            claimed,
            ending: claimed.not_started(),
            follow_ups: Vec::new(),
            has_progressed: false,
        };
        let reports: Vec<Report<'_>> = claims.iter().flatten().map(report).collect();
        let kept = self.settle_reports(&reports).await?;
        Ok(kept.into_iter().filter(|kept| *kept != Kept::LeaseLost).count())
    }

    /// Releases the leases of a worker that it does not list in `held`: the reply to their claim was lost. No claim of
    /// that worker may be in flight. Returns how many.
    pub async fn release_unknown(&self, worker: WorkerId, held: &[Lease]) -> Result<usize> {
        let mut unknown = self.store.leases(worker).await?;
        unknown.retain(|lease| !held.contains(lease));
        self.release(&unknown).await
    }

    // ---- while a job runs ------------------------------------------------

    /// Records that the handler of a suspect job is about to start.
    pub async fn mark_started(&self, lease: &Lease) -> Result<Fenced> {
        self.store.mark_started(lease).await
    }

    /// Replaces the progress shown for running jobs.
    pub async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        self.store.progress(reports).await
    }

    /// Saves a job's checkpoint, which outlives the attempt.
    pub async fn save_checkpoint(&self, lease: &Lease, data: &RawValue) -> Result<Fenced> {
        let saved = self.store.save_checkpoints(&[(*lease, data.to_owned())]).await?;
        Ok(saved.first().copied().unwrap_or(Fenced::LeaseLost))
    }

    /// Saves the checkpoints of several jobs in one commit.
    pub async fn save_checkpoints(&self, checkpoints: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>> {
        self.store.save_checkpoints(checkpoints).await
    }

    /// The newest checkpoint of a job.
    pub async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>> {
        self.store.checkpoint(id).await
    }

    /// What earlier attempts of jobs saved, with at most `max_bytes` of steps.
    pub async fn saved_work(&self, ids: &[JobId], max_bytes: usize) -> Result<Vec<SavedWork>> {
        self.store.saved_work(ids, max_bytes).await
    }

    /// Whether this lease is live now.
    pub async fn assert_lease(&self, lease: &Lease) -> Result<Fenced> {
        self.store.assert_lease(lease).await
    }
}

type Work = Pin<Box<dyn Future<Output = Result<(Claims, ClaimCursor)>> + Send>>;

/// A claim in progress. It runs in the caller's task, which saves two thread
/// switches. If the caller drops it, it completes in its own task and releases what
/// it claimed, because nobody would run those jobs.
struct Claiming {
    client: Client,
    runtime: tokio::runtime::Handle,
    work: Option<Work>,
}

impl Future for Claiming {
    type Output = Result<(Claims, ClaimCursor)>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = self.work.as_mut() else { return Poll::Pending };
        let result = std::task::ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(result)
    }
}

impl Drop for Claiming {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // A future that panicked must not be polled again.
        if std::thread::panicking() {
            return;
        }
        let client = self.client.clone();
        self.runtime.spawn(async move {
            let Ok((claims, _)) = work.await else { return };
            let leases: Vec<Lease> = claims.jobs.iter().map(Claimed::lease).collect();
            if let Err(error) = client.release(&leases).await {
                tracing::warn!(%error, jobs = leases.len(), "could not release the jobs of an abandoned claim; recovery will");
            }
        });
    }
}
