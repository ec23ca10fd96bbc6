//! Flows: enqueuing them, following the ends of their members, and operators' commands on them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use serde::Serialize;
use tracing::Instrument;
use uuid::Uuid;

use super::Client;
use super::enqueue::batch_span;
use crate::client::graph::{Flow, member_job};
use crate::error::{Error, Result};
use crate::job::{FlowId, JobId};
use crate::rules::enqueue::{NewJob, ValidJob, check_name};
use crate::rules::flow::{MAX_MEMBERS, MAX_TASKS};
use crate::rules::lifecycle::When;
use crate::store::{
    Added, CallerTransaction, FlowFilter, FlowRecord, NewChildren, NewFlow, NewMember, ParentRecord, Pending,
    PutFlow, Retention, Spawned, TaskRecord,
};

/// How many changes one step follows.
const CHANGES: u32 = 1000;
/// How many members one step of a cancel visits.
const MEMBERS: u32 = 1000;
/// How many members one step of a retry visits. All tasks of a graph are reopened in one step: otherwise the
/// flow could end between two steps.
const RETRIED_MEMBERS: u32 = MAX_TASKS as u32;
/// How often a retry waits until the changes of the flow have been followed.
const MAX_RETRY_ROUNDS: u32 = 200;
const RETRY_PAUSE: Duration = Duration::from_millis(5);
/// How often a join looks again if a child runs although the flow of the children has ended.
#[cfg(any(feature = "api", feature = "worker"))]
const MAX_JOIN_ROUNDS: u32 = 50;
#[cfg(any(feature = "api", feature = "worker"))]
const JOIN_PAUSE: Duration = Duration::from_millis(20);
/// How many results are read at a time.
const RESULTS: u32 = 1000;
/// How many flows upkeep cancels at a time.
const FLOWS: u32 = 100;
/// The maximum number of members of one part of a flow.
const MAX_PART: usize = 10_000;

/// The result of cancelling a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct CancelledFlow {
    /// How many waiting members were cancelled.
    pub cancelled: u64,
    /// How many running members were requested to stop.
    pub requested: u64,
}

/// The state of a join whose flow of children has ended.
#[cfg(any(feature = "api", feature = "worker"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JoinState {
    /// All children have ended.
    Ended,
    /// A child runs again: the job waits.
    Open,
    /// A child was open a moment ago. Read the children again.
    Again,
}

/// The result of retrying a flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RetriedFlow {
    /// How many members are open again.
    pub reopened: u64,
}

impl Client {
    /// Enqueues a flow in one commit, with all of its tasks. Nothing is stored if a task is invalid or
    /// tasks wait for each other. A flow with the same idempotency key is returned unchanged.
    ///
    /// ```
    /// # use longshore::{Client, Flow, FlowStatus, NewJob, task};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let flow = Flow::new("import")
    ///     .task(task("fetch", NewJob::new("fetch", &7)))
    ///     .task(task("parse", NewJob::new("parse", &7)).after("fetch"))
    ///     .on_failure(NewJob::new("alert", "import 7"));
    /// let flow = client.enqueue_flow(flow).await?;
    /// assert_eq!((flow.status, flow.members), (FlowStatus::Running, 2));
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn enqueue_flow(&self, flow: Flow) -> Result<FlowRecord> {
        let span = batch_span();
        let flow = span.in_scope(|| flow.validate())?;
        span.record("jobs", flow.members.len());
        let storing = async {
            self.check_flow(&flow).await?;
            self.put_flow(&flow).await
        };
        Ok(storing.instrument(span).await?.1)
    }

    /// Stores a flow in the caller's own transaction: it exists if and only if that commits.
    ///
    /// ```no_run
    /// # async fn example(client: longshore::Client, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use longshore::{NewJob, chain};
    ///
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("insert into orders (id) values (7)").execute(&mut *tx).await?;
    /// let flow = client.enqueue_flow_in(&mut tx, chain![NewJob::new("charge", &7), NewJob::new("ship", &7)]).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn enqueue_flow_in(&self, transaction: impl CallerTransaction, flow: Flow) -> Result<FlowId> {
        let span = batch_span();
        let flow = span.in_scope(|| flow.validate())?;
        span.record("jobs", flow.members.len());
        let storing = async {
            self.check_flow(&flow).await?;
            transaction.put_flow(&*self.store, &flow).await
        };
        match storing.instrument(span).await? {
            PutFlow::Created => Ok(flow.id),
            PutFlow::Existing(id) => Ok(id),
            PutFlow::IdOfJob => Err(id_of_job(flow.id)),
        }
    }

    /// Stores a flow whose kinds and payloads have been checked. Also returns whether it is new.
    pub(crate) async fn put_flow(&self, flow: &NewFlow) -> Result<(PutFlow, FlowRecord)> {
        let stored = self.store.put_flow(flow).await?;
        let id = match stored {
            PutFlow::Created => {
                self.notifier.notify(flow.startable().map(|job| (job.queue.as_str(), job.when)));
                flow.id
            }
            PutFlow::Existing(id) => id,
            PutFlow::IdOfJob => return Err(id_of_job(flow.id)),
        };
        Ok((stored, self.flow(id).await?))
    }

    async fn check_member(&self, job: &ValidJob) -> Result<()> {
        self.check_job(&job.kind, Some(&job.queue), &job.payload).await.map(drop)
    }

    async fn check_flow(&self, flow: &NewFlow) -> Result<()> {
        for member in &flow.members {
            let name = member.task.as_deref().unwrap_or(&member.job.kind);
            let checked = self.check_member(&member.job).await;
            checked.map_err(|error| error.in_task(name))?;
        }
        for job in &flow.callbacks {
            self.check_member(job).await.map_err(|error| error.in_task("callback"))?;
        }
        Ok(())
    }

    /// Adds jobs to a flow that was left [open](Flow::open), up to 10,000 per call and a million in
    /// all. They start at once. A call whose reply was lost can be repeated with the same jobs.
    ///
    /// ```
    /// # use longshore::{Client, Flow, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let batch = Flow::new("newsletter").open().on_end(NewJob::new("report", &()));
    /// let batch = client.enqueue_flow(batch).await?;
    /// for part in (0..300).collect::<Vec<i32>>().chunks(100) {
    ///     client.add_to_flow(batch.id, part.iter().map(|user| NewJob::new("send", user))).await?;
    /// }
    /// client.seal_flow(batch.id).await?;
    /// assert_eq!(client.flow(batch.id).await?.members, 300);
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn add_to_flow(
        &self,
        flow: FlowId,
        jobs: impl IntoIterator<Item = impl Into<NewJob>>,
    ) -> Result<()> {
        let members = members(None, jobs)?;
        for (i, member) in members.iter().enumerate() {
            let checked = self.check_member(&member.job).await;
            checked.map_err(|error| error.in_item("jobs", i))?;
        }
        self.add_members(flow, None, &members).await
    }

    /// Adds jobs whose kinds and payloads have been checked to a flow. A part with an id is added once.
    pub(crate) async fn add_members(
        &self,
        flow: FlowId,
        part: Option<Uuid>,
        members: &[NewMember],
    ) -> Result<()> {
        match self.store.add_members(flow, part, members).await? {
            Added::Stored => {}
            Added::NotFound => return Err(not_found(flow)),
            Added::Sealed => {
                return Err(Error::conflict(format!(
                    "flow {flow} is sealed; create flows with `sealed: false` (`Flow::open`) and seal them after the \
                     last part"
                )));
            }
            Added::Cancelled => {
                return Err(Error::conflict(format!("flow {flow} was cancelled; use a new flow")));
            }
            Added::Full => return Err(too_many(format!("flow {flow}"))),
        }
        self.notifier.notify(members.iter().map(|member| (member.job.queue.as_str(), member.job.when)));
        // Others skipped the flow while this held its lock.
        self.advance_soon();
        Ok(())
    }

    /// Seals a flow that was left [open](Flow::open): no more jobs can be added, and it ends when all of its
    /// members have ended.
    pub async fn seal_flow(&self, flow: FlowId) -> Result<()> {
        if !self.store.seal_flow(flow).await? {
            return Err(not_found(flow));
        }
        self.advance_soon();
        Ok(())
    }

    /// Returns a flow. The children of a job are the flow with the job's id.
    pub async fn flow(&self, id: FlowId) -> Result<FlowRecord> {
        self.store.flow(id).await?.ok_or_else(|| not_found(id))
    }

    /// Lists flows, newest first, up to 200.
    pub async fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowRecord>> {
        self.store.flows(&FlowFilter { limit: filter.limit.clamp(1, 200), ..filter.clone() }).await
    }

    /// Lists up to `limit` (at most 1,000) members of a flow after `after`, ordered by id, with what they
    /// wait for.
    pub async fn tasks(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<TaskRecord>> {
        self.store.tasks(flow, after, limit.clamp(1, 1000)).await
    }

    /// Counts the members of a flow that belong to one of these queues.
    #[doc(hidden)]
    pub async fn members_in(&self, flow: FlowId, queues: &[String]) -> Result<u64> {
        self.store.members_in(flow, queues).await
    }

    /// Cancels a flow: members that wait are cancelled, running ones are requested to stop, and
    /// nothing else starts. Callbacks run when the flow has ended. Members that another client's open transaction has
    /// locked are cancelled later. Returns a conflict error if the flow has ended.
    pub async fn cancel_flow(&self, id: FlowId) -> Result<CancelledFlow> {
        if !self.store.flag_cancelled(id).await? && self.flow(id).await?.ended_at.is_some() {
            // A retry may have reopened members, and these changes may not have been followed yet.
            self.advance_flows().await?;
            let is_flagged = self.store.flag_cancelled(id).await?;
            let flow = self.flow(id).await?;
            // A flow that was cancelled before and is open again has the flag already.
            if !is_flagged && flow.ended_at.is_some() {
                return Err(Error::conflict(format!(
                    "flow {id} has already ended as {}; retry it if its failed part should run again",
                    flow.status.as_str()
                )));
            }
        }
        let mut done = CancelledFlow::default();
        let (mut after, mut skipped, mut workers) = (None, 0, BTreeSet::new());
        loop {
            let step = self.store.cancel_members(id, after, skipped, MEMBERS).await?;
            skipped += step.skipped;
            done.cancelled += step.cancelled;
            done.requested += step.requested;
            workers.extend(step.workers);
            after = step.next;
            if after.is_none() {
                break;
            }
        }
        if skipped > 0 {
            tracing::info!(
                flow_id = %id, skipped,
                "skipped members that other transactions have locked; upkeep cancels them"
            );
        }
        workers.into_iter().for_each(|worker| self.notifier.notify_cancel(worker));
        self.advance_soon();
        Ok(done)
    }

    /// Retries the failed part of a flow: members that did not succeed wait again, with a fresh attempt
    /// budget. What succeeded is not repeated.
    pub async fn retry_flow(&self, id: FlowId) -> Result<RetriedFlow> {
        let before = self.now().await?;
        self.flow(id).await?;
        // A member that was skipped because of a task on a later page is reopened when the reopening of that
        // task is followed.
        let (mut done, mut after, mut rounds) = (RetriedFlow::default(), None, 0);
        loop {
            let step = self.store.retry_members(id, before, after, RETRIED_MEMBERS).await?;
            if step.advance_first {
                rounds += 1;
                if rounds > MAX_RETRY_ROUNDS {
                    return Err(Error::unavailable(format!("flow {id} could not be followed; try again")));
                }
                if self.advance_flows().await? == 0 {
                    // Another process is following the changes.
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
                continue;
            }
            done.reopened += step.reopened;
            self.notifier.notify(step.queues.iter().map(|queue| (queue.as_str(), When::NOW)));
            after = step.next;
            if after.is_none() {
                break;
            }
        }
        self.advance_soon();
        Ok(done)
    }
}

fn not_found(flow: FlowId) -> Error {
    Error::not_found(format!("flow {flow} does not exist, or is no longer kept"))
}

fn id_of_job(id: FlowId) -> Error {
    Error::conflict(format!("id: a job has the id {id}; use a new one, or leave it out"))
}

fn too_many(what: String) -> Error {
    Error::invalid(
        "jobs",
        format!("jobs: {what} would have more than {MAX_MEMBERS} members; use several flows"),
    )
}

/// Checks jobs that become members of a flow, without links.
pub(crate) fn members(
    task: Option<&str>,
    jobs: impl IntoIterator<Item = impl Into<NewJob>>,
) -> Result<Vec<NewMember>> {
    let mut members = Vec::new();
    for (i, job) in jobs.into_iter().enumerate() {
        if i == MAX_PART {
            return Err(Error::invalid(
                "jobs",
                format!("jobs: add at most {MAX_PART} at a time, in several parts"),
            ));
        }
        let job = job.into();
        let name = task.unwrap_or(job.kind()).to_owned();
        let job = member_job(&name, job).map_err(|error| error.in_item("jobs", i))?;
        members.push(NewMember { job, task: task.map(str::to_owned), is_held: false });
    }
    Ok(members)
}

#[doc(hidden)]
impl Client {
    /// Keeps this client from following changes of flows until the guard is dropped, so that a test can
    /// do it step by step.
    pub async fn hold_advances(&self) -> tokio::sync::OwnedMutexGuard<()> {
        self.advancer.lock.clone().lock_owned().await
    }

    /// Follows the changes of flows until there are none. Returns how many steps that took.
    pub async fn advance_flows(&self) -> Result<usize> {
        // Another task of this client may be following changes. They are stored when it releases the lock.
        let _one_at_a_time = self.advancer.lock.lock().await;
        let (mut steps, mut after) = (0, None);
        loop {
            let step = self.store.advance(after, CHANGES).await?;
            self.notifier.notify(step.queues.iter().map(|queue| (queue.as_str(), When::NOW)));
            #[cfg(any(feature = "api", feature = "worker"))]
            crate::client::job_metrics::count_ended_flows(&step.ended);
            if step.emitted {
                self.deliver_events().await?;
            }
            if !step.more {
                return Ok(steps);
            }
            after = step.after;
            steps += 1;
        }
    }

    /// Does what upkeep has to do now: delivers events, follows changes of flows, and cancels flows whose
    /// deadline has passed. Returns whether an operation waits too: executing it takes longer.
    ///
    /// If one of them fails, the others are done all the same.
    pub async fn do_pending(&self) -> Result<Pending> {
        let pending = self.store.pending().await?;
        let delivered = if pending.events { self.deliver_events().await.map(drop) } else { Ok(()) };
        let advanced = if pending.changes { self.advance_flows().await.map(drop) } else { Ok(()) };
        if pending.cancels {
            for flow in self.store.flows_to_cancel(FLOWS).await? {
                match self.cancel_flow(flow).await {
                    Err(error) if error.is_conflict() || error.is_not_found() => {}
                    // One flow must not keep the others from being cancelled.
                    Err(error) => {
                        tracing::warn!(flow_id = %flow, %error, "could not cancel the flow; trying again")
                    }
                    Ok(_) => {
                        tracing::info!(flow_id = %flow, "cancelled the flow: its deadline passed, or an earlier cancel was cut off");
                    }
                }
            }
        }
        delivered.and(advanced)?;
        Ok(pending)
    }

    /// Removes flows whose members have been removed. Returns how many.
    pub async fn remove_old_flows(&self, policy: &Retention) -> Result<u64> {
        let mut removed = 0;
        loop {
            let step = self.store.remove_flows(policy, MEMBERS).await?;
            removed += step;
            if step < MEMBERS.into() {
                return Ok(removed);
            }
        }
    }

    /// Returns the jobs that a job waited for, with their results.
    pub async fn parents(&self, id: JobId) -> Result<Vec<ParentRecord>> {
        self.store.parents(id).await
    }

    /// Returns all members of a flow with their results.
    pub async fn flow_results(&self, flow: FlowId) -> Result<Vec<ParentRecord>> {
        let mut results = Vec::new();
        loop {
            let after = results.last().map(|last: &ParentRecord| last.id);
            let page = self.flow_results_after(flow, after).await?;
            let is_last = page.len() < RESULTS as usize;
            results.extend(page);
            if is_last {
                return Ok(results);
            }
        }
    }

    /// Returns some members of a flow with their results: those after this id, in the order of their ids.
    pub async fn flow_results_after(&self, flow: FlowId, after: Option<JobId>) -> Result<Vec<ParentRecord>> {
        self.store.results(flow, after, RESULTS).await
    }
}

impl Client {
    /// Returns the flow whose end a waiting job waits for: that of a callback, or its own children.
    #[cfg(feature = "api")]
    pub(crate) async fn awaited_flow(&self, id: JobId) -> Result<Option<FlowId>> {
        self.store.awaited_flow(id).await
    }

    /// The state of a join of these children. `record` is the flow of the children, `round` counts the calls.
    #[cfg(any(feature = "api", feature = "worker"))]
    pub(crate) async fn join_state(
        &self,
        record: &FlowRecord,
        children: &[ParentRecord],
        round: u32,
    ) -> Result<JoinState> {
        if children.iter().all(|child| child.outcome.is_some()) {
            return Ok(JoinState::Ended);
        }
        if round == MAX_JOIN_ROUNDS {
            return Ok(JoinState::Open);
        }
        // An operator may have retried a child a moment ago, and that change may not have been followed yet.
        tokio::time::sleep(JOIN_PAUSE).await;
        self.advance_flows().await?;
        let is_open = self.flow(record.id).await?.ended_at.is_none();
        Ok(if is_open { JoinState::Open } else { JoinState::Again })
    }

    /// Stores children of a running job.
    #[cfg_attr(
        not(any(feature = "api", feature = "worker")),
        expect(dead_code, reason = "handlers and workers that call the API spawn children")
    )]
    pub(crate) async fn spawn_children(&self, children: NewChildren) -> Result<Spawned> {
        check_name("name", &children.step)?;
        for (i, member) in children.members.iter().enumerate() {
            let checked = self.check_member(&member.job).await;
            checked.map_err(|error| error.in_item("jobs", i))?;
        }
        let spawned = self.store.spawn(&children).await?;
        if spawned == Spawned::Stored {
            let members = children.members.iter();
            self.notifier.notify(members.map(|member| (member.job.queue.as_str(), member.job.when)));
            // Others skipped the flow while this held its lock.
            self.advance_soon();
        }
        Ok(spawned)
    }

    /// Follows changes of flows in the background, after a member of one has ended or was reopened. If that
    /// fails, upkeep does it.
    pub(crate) fn advance_soon(&self) {
        if self.advancer.state.swap(AGAIN, Ordering::AcqRel) != IDLE {
            return;
        }
        let client = self.clone();
        tokio::spawn(async move {
            let state = &client.advancer.state;
            loop {
                state.store(RUNNING, Ordering::Release);
                client.try_to_advance().await;
                if state.compare_exchange(RUNNING, IDLE, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return;
                }
            }
        });
    }
}

impl Client {
    /// Waits until the background task has followed the changes that this client has stored. If the task were
    /// dropped halfway, its flow would stay locked until the connection is closed.
    pub(super) async fn finish_advancing(&self) {
        while self.advancer.state.load(Ordering::Acquire) != IDLE {
            self.try_to_advance().await;
            tokio::task::yield_now().await;
        }
    }

    async fn try_to_advance(&self) {
        if let Err(error) = self.advance_flows().await {
            tracing::debug!(%error, "could not follow changes of flows now; upkeep tries again");
        }
    }
}

const IDLE: u8 = 0;
const RUNNING: u8 = 1;
/// Changes were stored since the task began.
const AGAIN: u8 = 2;

/// Follows changes of flows, in one task at a time.
#[derive(Debug, Default)]
pub(crate) struct Advancer {
    state: AtomicU8,
    lock: Arc<tokio::sync::Mutex<()>>,
}
