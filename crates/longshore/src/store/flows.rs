//! Flows: graphs of jobs, with their members and links. Stores and reads them. `advance.rs` follows the ends
//! of their members, and `operate_flows.rs` has the commands on whole flows.

use std::collections::HashMap;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::db::{Engine, How, Row, Rows, Sql, Statement, Work, args, one};
use super::{Fenced, Lease, NewStep};
use crate::error::{Error, Result};
use crate::job::{FlowId, JobId, Outcome, Status, WorkerId};
use crate::rules::enqueue::ValidJob;
use crate::rules::flow::{Condition, MAX_MEMBERS, flow_event};
use crate::rules::keys::as_written;
#[cfg(feature = "api")]
use crate::rules::keys::in_namespace;

/// A flow to store. [`Flow::validate`](crate::Flow::validate) creates it.
#[derive(Clone, Debug)]
pub struct NewFlow {
    pub(crate) id: FlowId,
    pub(crate) name: String,
    /// In its stored form.
    pub(crate) key: Option<String>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) is_sealed: bool,
    pub(crate) members: Vec<NewMember>,
    /// Jobs outside of the flow that wait for its end.
    pub(crate) callbacks: Vec<ValidJob>,
    pub(crate) links: Vec<NewLink>,
}

impl NewFlow {
    /// Puts its key into the namespace of the queue of its first task, for a caller who may use only some queues.
    #[cfg(feature = "api")]
    pub(crate) fn with_key_in_namespace(mut self) -> Result<Self> {
        if let (Some(key), Some(first)) = (&mut self.key, self.members.first()) {
            *key = in_namespace("idempotency_key", first.job.queue(), key)?;
        }
        Ok(self)
    }

    /// The members that wait for nothing else.
    pub(crate) fn startable(&self) -> impl Iterator<Item = &ValidJob> {
        self.members.iter().filter(|member| !member.is_held).map(|member| &member.job)
    }
}

#[doc(hidden)]
impl NewFlow {
    /// The ids of the members.
    pub fn member_ids(&self) -> impl Iterator<Item = JobId> {
        self.members.iter().map(|member| member.job.id)
    }

    /// The ids of the callbacks.
    pub fn callback_ids(&self) -> impl Iterator<Item = JobId> {
        self.callbacks.iter().map(|job| job.id)
    }

    /// The links: parent, child and condition.
    pub fn link_ids(&self) -> impl Iterator<Item = (Uuid, JobId, Condition)> {
        self.links.iter().map(|link| (link.parent, link.child, link.condition))
    }
}

/// A job to store as a member of a flow.
#[derive(Clone, Debug)]
pub struct NewMember {
    pub(crate) job: ValidJob,
    /// Its name in the flow.
    pub(crate) task: Option<String>,
    /// Whether it waits for another member.
    pub(crate) is_held: bool,
}

/// A link to store: `child` waits for `parent`, a job or a flow.
#[derive(Clone, Copy, Debug)]
pub struct NewLink {
    pub(crate) parent: Uuid,
    pub(crate) child: JobId,
    pub(crate) condition: Condition,
}

/// The result of storing a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutFlow {
    /// It is stored, by this call or by an earlier one whose reply was lost.
    Created,
    /// This flow has the same idempotency key. Nothing changed.
    Existing(FlowId),
    /// Nothing changed: a job has this id, which is reserved for the flow of its children.
    IdOfJob,
}

/// The result of adding members to a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Added {
    /// They are stored, by this call or by an earlier one whose reply was lost.
    Stored,
    /// Nothing changed: the flow is sealed.
    Sealed,
    /// Nothing changed: the flow was cancelled.
    Cancelled,
    /// Nothing changed: the flow would have more members than are allowed.
    Full,
    /// There is no such flow.
    NotFound,
}

/// Children of a running job to store, with the step that journals them.
#[derive(Clone, Debug)]
pub struct NewChildren {
    /// The job's lease.
    pub lease: Lease,
    /// The kind of the job, which names the flow.
    pub kind: String,
    /// The name of the step.
    pub step: String,
    /// The value of the step.
    pub value: Box<RawValue>,
    /// The children.
    pub members: Vec<NewMember>,
}

/// The result of storing children.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spawned {
    /// They are stored, by this call or by an earlier one.
    Stored,
    /// Nothing changed: the lease is lost.
    LeaseLost,
    /// Nothing changed: the job's flow was cancelled.
    Cancelled,
    /// Nothing changed: the job would have more children than are allowed.
    Full,
    /// Nothing changed: another flow has the id of the job.
    IdOfFlow,
}

/// The status of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FlowStatus {
    /// It has not ended.
    Running,
    /// All members succeeded, or were skipped because they were not needed.
    Succeeded,
    /// A member failed or was cancelled.
    Failed,
    /// It was cancelled, or its deadline passed.
    Cancelled,
}

impl FlowStatus {
    /// All statuses.
    pub const ALL: [FlowStatus; 4] =
        [FlowStatus::Running, FlowStatus::Succeeded, FlowStatus::Failed, FlowStatus::Cancelled];

    /// The status as text.
    pub fn as_str(self) -> &'static str {
        match self {
            FlowStatus::Running => "running",
            FlowStatus::Succeeded => "succeeded",
            FlowStatus::Failed => "failed",
            FlowStatus::Cancelled => "cancelled",
        }
    }
}

/// A stored flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FlowRecord {
    /// Its id. The flow of a job's children has the id of the job.
    pub id: FlowId,
    /// Its name.
    pub name: String,
    /// Its status.
    pub status: FlowStatus,
    /// How many members it has.
    pub members: u64,
    /// How many of them have not ended.
    pub open: u64,
    /// How many of them failed.
    pub failed: u64,
    /// Whether no more members can be added.
    pub sealed: bool,
    /// Whether it is being cancelled, or was.
    pub cancelled: bool,
    /// Its idempotency key.
    pub idempotency_key: Option<String>,
    /// When it was created.
    pub created_at: DateTime<Utc>,
    /// When it is cancelled if it has not ended.
    pub deadline: Option<DateTime<Utc>>,
    /// When it ended.
    pub ended_at: Option<DateTime<Utc>>,
    /// Whether its members are the children of a job.
    #[serde(skip)]
    pub is_of_children: bool,
}

impl FlowRecord {
    /// The status of a flow with these numbers.
    pub(crate) fn status(failed: i64, is_cancelled: bool, has_ended: bool) -> FlowStatus {
        match (has_ended, is_cancelled, failed) {
            (false, ..) => FlowStatus::Running,
            (true, true, _) => FlowStatus::Cancelled,
            (true, false, 0) => FlowStatus::Succeeded,
            (true, false, _) => FlowStatus::Failed,
        }
    }
}

/// Which flows to list, newest first.
#[derive(Clone, Debug)]
pub struct FlowFilter {
    /// Only those with this name.
    pub name: Option<String>,
    /// `true`: only open flows; `false`: only flows that have ended.
    pub open: Option<bool>,
    /// Only those before this id.
    pub before: Option<FlowId>,
    /// The maximum number.
    pub limit: u32,
}

impl Default for FlowFilter {
    fn default() -> Self {
        FlowFilter { name: None, open: None, before: None, limit: 50 }
    }
}

/// A member of a flow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TaskRecord {
    /// The job.
    pub id: JobId,
    /// Its name in the flow, if it has one.
    pub task: Option<String>,
    /// Its kind.
    pub kind: String,
    /// Its queue.
    pub queue: String,
    /// Its status.
    pub status: Status,
    /// Whether it waits for other members.
    pub held: bool,
    /// Whether it was cancelled because it could never start.
    pub skipped: bool,
    /// What it waits or waited for.
    pub after: Vec<LinkRecord>,
}

/// What a member of a flow waits or waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct LinkRecord {
    /// The other member.
    pub id: JobId,
    /// Its name in the flow, if it has one.
    pub task: Option<String>,
    /// How it has to end.
    pub condition: Condition,
    /// Whether it ended like that; `None` if it has not ended.
    pub met: Option<bool>,
}

/// A parent of a job, with its result.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ParentRecord {
    /// The parent.
    pub id: JobId,
    /// Its name in the flow, if it has one.
    pub task: Option<String>,
    /// How it ended; `None` if it has not.
    pub outcome: Option<Outcome>,
    /// Its result, if it succeeded with one.
    pub result: Option<Box<RawValue>>,
    /// Its last error, if it did not succeed.
    pub error: Option<String>,
}

/// What one step of following changes did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Advanced {
    /// The queues with jobs that are due now.
    pub queues: Vec<String>,
    /// Whether a flow of children ended, so that an event waits for delivery.
    pub emitted: bool,
    /// The statuses of the flows that ended.
    pub ended: Vec<FlowStatus>,
    /// Whether to look again: there may be more changes.
    pub more: bool,
    /// Where the next step starts: changes of flows up to this one cannot be followed now.
    pub after: Option<FlowId>,
}

impl Advanced {
    /// Adds what another step did.
    pub(crate) fn add(&mut self, other: Advanced) {
        self.queues.extend(other.queues);
        self.ended.extend(other.ended);
        self.emitted |= other.emitted;
        self.more |= other.more;
    }
}

/// Logs that the database refused to follow the changes of a flow.
pub(crate) fn warn_of_refused_flow(flow_id: FlowId, error: &Error) {
    tracing::warn!(%flow_id, %error, "could not follow the changes of the flow; trying again later");
}

/// What one step of cancelling a flow did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CancelledMembers {
    /// How many waiting members were cancelled.
    pub cancelled: u64,
    /// How many running members were requested to stop.
    pub requested: u64,
    /// The workers that hold them.
    pub workers: Vec<WorkerId>,
    /// How many members were skipped, because another transaction has locked them.
    pub skipped: u64,
    /// Where the next step starts; `None` at the end.
    pub next: Option<JobId>,
}

/// What one step of retrying a flow did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RetriedMembers {
    /// How many members are open again.
    pub reopened: u64,
    /// The queues of those that are due.
    pub queues: Vec<String>,
    /// Where the next step starts; `None` at the end.
    pub next: Option<JobId>,
    /// Nothing was done: changes of the flow have to be followed first.
    pub advance_first: bool,
}

/// What upkeep has to do now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pending {
    /// Events wait for delivery.
    pub events: bool,
    /// Changes of flows wait to be followed.
    pub changes: bool,
    /// A flow's deadline has passed, or the cancel of a flow was cut off.
    pub cancels: bool,
    /// An operation waits for a process that executes it.
    pub operations: bool,
}

/// Storing flows, and reading them.
#[async_trait]
pub trait Flows {
    /// Stores a flow with its members, links and callbacks, all or nothing. If the id exists, nothing is
    /// stored again: an earlier reply may have been lost. If the idempotency key exists, the result is the
    /// flow that has it.
    async fn put_flow(&self, flow: &NewFlow) -> Result<PutFlow>;

    /// Adds members without links to a flow that is not sealed. Members that were stored by an earlier
    /// call are not stored again, nor is a part of the flow that has the id `part`.
    async fn add_members(&self, flow: FlowId, part: Option<Uuid>, members: &[NewMember]) -> Result<Added>;

    /// Seals a flow: no more members can be added, and it ends when all have ended. Returns whether it
    /// exists.
    async fn seal_flow(&self, flow: FlowId) -> Result<bool>;

    /// Stores children of a running job, as members of the flow with the job's id, and the step that
    /// journals them, in one transaction under the lease. If the step is journaled already, nothing
    /// is stored again.
    async fn spawn(&self, children: &NewChildren) -> Result<Spawned>;

    /// Returns one flow.
    async fn flow(&self, id: FlowId) -> Result<Option<FlowRecord>>;

    /// Lists flows, newest first.
    async fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowRecord>>;

    /// Lists up to `limit` members of a flow after `after`, ordered by id, with what they wait for.
    async fn tasks(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<TaskRecord>>;

    /// Counts the members of a flow that belong to one of these queues.
    async fn members_in(&self, flow: FlowId, queues: &[String]) -> Result<u64>;

    /// Returns the jobs that a job waited for, with their results.
    async fn parents(&self, id: JobId) -> Result<Vec<ParentRecord>>;

    /// Returns the flow whose end a waiting job waits for: a callback waits for its flow, and a job
    /// that joins its children for the flow with its own id.
    async fn awaited_flow(&self, id: JobId) -> Result<Option<FlowId>>;

    /// Lists up to `limit` members of a flow after `after`, ordered by id, with their results.
    async fn results(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<ParentRecord>>;
}

#[async_trait]
impl<E: Engine> Flows for E {
    async fn put_flow(&self, flow: &NewFlow) -> Result<PutFlow> {
        let put: Work<_, _> = |rows, flow| Box::pin(put_flow(rows, flow));
        on_flow(self, How::SLOW, flow.id, flow.clone(), put).await
    }

    async fn add_members(&self, flow: FlowId, part: Option<Uuid>, members: &[NewMember]) -> Result<Added> {
        let add: Work<_, _> =
            |rows, (flow, part, members): &(_, _, Vec<_>)| Box::pin(add_members(rows, *flow, *part, members));
        on_flow(self, How::SLOW, flow, (flow, part, members.to_vec()), add).await
    }

    async fn seal_flow(&self, flow: FlowId) -> Result<bool> {
        on_flow(self, How::QUICK, flow, flow, |rows, flow| Box::pin(seal_flow(rows, *flow))).await
    }

    async fn spawn(&self, children: &NewChildren) -> Result<Spawned> {
        let flow = FlowId(children.lease.id.0);
        let spawn: Work<_, _> = |rows, children| Box::pin(spawn(rows, children));
        on_flow(self, How::SLOW, flow, children.clone(), spawn).await
    }

    async fn flow(&self, id: FlowId) -> Result<Option<FlowRecord>> {
        self.call(How::READ, id, |rows, id| Box::pin(flow(rows, *id))).await
    }

    async fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowRecord>> {
        self.call(How::READ, filter.clone(), |rows, filter| Box::pin(flows(rows, filter))).await
    }

    async fn tasks(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<TaskRecord>> {
        self.call(How::READ, (flow, after, limit), |rows, (flow, after, limit)| {
            Box::pin(tasks(rows, *flow, *after, *limit))
        })
        .await
    }

    async fn members_in(&self, flow: FlowId, queues: &[String]) -> Result<u64> {
        self.call(How::READ, (flow, queues.to_vec()), |rows, (flow, queues)| {
            Box::pin(members_in(rows, *flow, queues))
        })
        .await
    }

    async fn parents(&self, id: JobId) -> Result<Vec<ParentRecord>> {
        self.call(How::READ, id, |rows, id| Box::pin(parents(rows, *id))).await
    }

    async fn awaited_flow(&self, id: JobId) -> Result<Option<FlowId>> {
        self.call(How::READ, id, |rows, id| Box::pin(awaited_flow(rows, *id))).await
    }

    async fn results(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<ParentRecord>> {
        self.call(How::READ, (flow, after, limit), |rows, (flow, after, limit)| {
            Box::pin(results(rows, *flow, *after, *limit))
        })
        .await
    }
}

/// Runs a procedure that changes one flow. It fails if another client's open transaction has locked the flow and does not
/// end in time.
pub(super) async fn on_flow<E, A, T>(
    engine: &E,
    how: How,
    flow: FlowId,
    args: A,
    work: Work<A, T>,
) -> Result<T>
where
    E: Engine,
    A: Send + Sync + 'static,
    T: Send + 'static,
{
    engine.call(how.waiting_aside(), args, work).await.map_err(|error| match error.is_locked() {
        true => Error::locked(format!(
            "flow {flow}: other transactions have locked it or one of its jobs for too long; try again later, or \
             end a client's transaction that stays open"
        )),
        false => error,
    })
}

pub(super) static INSERT_FLOW: Statement = Statement::new(
    "
    insert into longshore.flows (id, name, key, created_at, deadline, members, open, sealed, links)
    select $1, $2, $3, longshore.clock(), case when $4 then longshore.clock() + $5 end, $6, $6, $7, $8
     where not exists (select 1 from longshore.jobs where id = $1)
        on conflict do nothing",
);

/// The flow with this id or, without one, with this key.
pub(super) static FLOW_BY_ID_OR_KEY: Statement = Statement::new(
    "
    select id
      from longshore.flows
     where id = $1
        or key = $2
     order by id = $1 desc
     limit 1",
);

static IS_JOB: Statement = Statement::new(
    "
    select 1
      from longshore.jobs
     where id = $1",
);

/// Stores a flow in the open transaction.
pub(super) async fn put_flow(rows: &mut dyn Rows, new: &NewFlow) -> Sql<PutFlow> {
    let NewFlow { id, name, key, deadline, is_sealed, members, callbacks: _, links } = new;
    let (count, links_count) = (members.len() as u64, links.len() as u64);
    let deadline = (deadline.is_some(), deadline.unwrap_or_default());
    let put = args![*id, name, key, deadline.0, deadline.1, count, *is_sealed, links_count];
    if rows.execute(&INSERT_FLOW, put).await? == 0 {
        return match rows.row(&FLOW_BY_ID_OR_KEY, args![*id, key]).await? {
            Some(mut found) => Ok(new.found(found.take("id")?)),
            None if key.is_none() || rows.has_row(&IS_JOB, args![*id]).await? => Ok(PutFlow::IdOfJob),
            // The flow that had the key has just been removed.
            None => Err(Error::unavailable("idempotency_key: taken at the same moment; try again").into()),
        };
    }
    rows.insert_members(Some(*id), members).await?;
    rows.insert_members(None, &new.held_callbacks()).await?;
    rows.insert_links(links).await?;
    Ok(PutFlow::Created)
}

impl NewFlow {
    /// The result if this flow, with its id or its key, is stored already.
    pub(super) fn found(&self, id: FlowId) -> PutFlow {
        if id == self.id { PutFlow::Created } else { PutFlow::Existing(id) }
    }

    /// The callbacks, which wait for the flow.
    pub(super) fn held_callbacks(&self) -> Vec<NewMember> {
        let held = |job: &ValidJob| NewMember { job: job.clone(), task: None, is_held: true };
        self.callbacks.iter().map(held).collect()
    }
}

static LOCK_FLOW: Statement = Statement::new(
    "
    select sealed, cancelled, members
      from longshore.flows
     where id = $1
       for no key update",
);

static STORED_JOBS: Statement = Statement::new(
    "
    select count(*) as stored
      from longshore.jobs
     where id = any($1::uuid[])
       and flow = $2",
);

static COUNT_ADDED: Statement = Statement::new(
    "
    update longshore.flows
       set members = members + $2,
           open = open + $2
     where id = $1",
);

static IS_PART_STORED: Statement = Statement::new(
    "
    select 1
      from longshore.flow_parts
     where flow = $1
       and id = $2",
);

static INSERT_PART: Statement = Statement::new(
    "
    insert into longshore.flow_parts (flow, id)
    values ($1, $2)",
);

async fn add_members(
    rows: &mut dyn Rows,
    flow: FlowId,
    part: Option<Uuid>,
    members: &[NewMember],
) -> Sql<Added> {
    let Some(mut locked) = rows.row(&LOCK_FLOW, args![flow]).await? else { return Ok(Added::NotFound) };
    let ids: Vec<Uuid> = members.iter().map(|member| member.job.id.0).collect();
    let stored: u64 = one(rows.row(&STORED_JOBS, args![ids, flow]).await?)?.take("stored")?;
    if stored == members.len() as u64 || rows.has_row(&IS_PART_STORED, args![flow, part]).await? {
        return Ok(Added::Stored);
    }
    if locked.take("cancelled")? {
        return Ok(Added::Cancelled);
    }
    if locked.take("sealed")? {
        return Ok(Added::Sealed);
    }
    let before: u64 = locked.take("members")?;
    if before as usize + members.len() > MAX_MEMBERS {
        return Ok(Added::Full);
    }
    rows.insert_members(Some(flow), members).await?;
    rows.execute(&COUNT_ADDED, args![flow, members.len() as u64]).await?;
    if let Some(part) = part {
        rows.execute(&INSERT_PART, args![flow, part]).await?;
    }
    Ok(Added::Stored)
}

static SEAL: Statement = Statement::new(
    "
    update longshore.flows
       set sealed = true
     where id = $1
       and not sealed",
);

/// Makes `advance` check the flow: it may have ended.
pub(super) static LOOK_AT: Statement = Statement::new(
    "
    insert into longshore.flow_changes (flow)
    values ($1)",
);

static EXISTS: Statement = Statement::new(
    "
    select 1
      from longshore.flows
     where id = $1",
);

async fn seal_flow(rows: &mut dyn Rows, flow: FlowId) -> Sql<bool> {
    if rows.execute(&SEAL, args![flow]).await? > 0 {
        rows.execute(&LOOK_AT, args![flow]).await?;
        return Ok(true);
    }
    rows.has_row(&EXISTS, args![flow]).await
}

static LOCK_LEASE: Statement = Statement::new(
    "
    select 1
      from longshore.running
     where id = $1
       and lease_no = $2   -- fence: a newer lease owns the row
       and worker = $3
       for no key update",
);

static IS_STEP_DONE: Statement = Statement::new(
    "
    select 1
      from longshore.steps
     where job = $1
       and name = $2
       and value is not null",
);

static LOCK_CHILDREN: Statement = Statement::new(
    "
    insert into longshore.flows as f (id, name, created_at, members, open, sealed, owned)
    values ($1, $2, longshore.clock(), 0, 0, true, true)
        on conflict (id) do update
       set owned = f.owned
    returning cancelled, members, ended_at is not null as has_ended, owned",
);

static REOPEN_CHILDREN: Statement = Statement::new(
    "
    update longshore.flows
       set ended_at = null
     where id = $1",
);

/// Deletes the events that announced the ends of flows of children: these flows are open again.
pub(super) static FORGET_END: Statement = Statement::new(
    "
    delete from longshore.events
     where name = any($1::text[])",
);

async fn spawn(rows: &mut dyn Rows, children: &NewChildren) -> Sql<Spawned> {
    let NewChildren { lease, kind, step, value, members } = children;
    let flow = FlowId(lease.id.0);
    if !rows.has_row(&LOCK_LEASE, args![lease.id, i64::from(lease.lease_no), lease.worker]).await? {
        return Ok(Spawned::LeaseLost);
    }
    if rows.has_row(&IS_STEP_DONE, args![lease.id, step]).await? {
        return Ok(Spawned::Stored);
    }
    if members.len() > MAX_MEMBERS {
        // Before the flow of the children is stored.
        return Ok(Spawned::Full);
    }
    let mut locked = one(rows.row(&LOCK_CHILDREN, args![flow, kind]).await?)?;
    if !locked.take::<bool>("owned")? {
        return Ok(Spawned::IdOfFlow);
    }
    if locked.take("cancelled")? {
        return Ok(Spawned::Cancelled);
    }
    let before: u64 = locked.take("members")?;
    if before as usize + members.len() > MAX_MEMBERS {
        return Ok(Spawned::Full);
    }
    if locked.take("has_ended")? {
        rows.execute(&FORGET_END, args![&vec![flow_event(flow)]]).await?;
        rows.execute(&REOPEN_CHILDREN, args![flow]).await?;
    }
    rows.insert_members(Some(flow), members).await?;
    rows.execute(&COUNT_ADDED, args![flow, members.len() as u64]).await?;
    if members.is_empty() {
        rows.execute(&LOOK_AT, args![flow]).await?;
    }
    let step = NewStep { lease: *lease, name: step.clone(), value: value.clone() };
    if rows.save_steps(&[step]).await? != [Fenced::Held] {
        return Err(
            Error::internal(format!("job {}: the lease was lost while it was locked", lease.id)).into()
        );
    }
    Ok(Spawned::Stored)
}

/// The columns of a [`FlowRecord`].
macro_rules! flow_columns {
    () => {
        "id, name, members, open, failed, sealed, cancelled, key, created_at, deadline, ended_at, owned"
    };
}

static FLOW: Statement =
    Statement::new(concat!("select ", flow_columns!(), " from longshore.flows where id = $1"));

async fn flow(rows: &mut dyn Rows, id: FlowId) -> Sql<Option<FlowRecord>> {
    rows.row(&FLOW, args![id]).await?.map(flow_record).transpose()
}

static FLOWS: Statement = Statement::new(concat!(
    "
    select ",
    flow_columns!(),
    "
      from longshore.flows
     where ($1::text is null or name = $1)
       and ($2::bool is null or (ended_at is null) = $2)
       and id < $3
     order by id desc
     limit $4"
));

async fn flows(rows: &mut dyn Rows, filter: &FlowFilter) -> Sql<Vec<FlowRecord>> {
    let FlowFilter { name, open, before, limit } = filter;
    let before = before.map_or(Uuid::max(), |id| id.0);
    let found = rows.rows(&FLOWS, args![name, *open, before, *limit]).await?;
    found.into_iter().map(flow_record).collect()
}

fn flow_record(mut row: Row) -> Sql<FlowRecord> {
    // A wrong number of one flow must not hide the others.
    let mut count = |name: &str| row.take::<i64>(name).map(|count| u64::try_from(count).unwrap_or(0));
    let (failed, members, open) = (count("failed")?, count("members")?, count("open")?);
    let cancelled = row.take("cancelled")?;
    let ended_at: Option<_> = row.take("ended_at")?;
    Ok(FlowRecord {
        id: row.take("id")?,
        name: row.take("name")?,
        status: FlowRecord::status(failed as i64, cancelled, ended_at.is_some()),
        members,
        open,
        failed,
        sealed: row.take("sealed")?,
        cancelled,
        idempotency_key: row.take::<Option<String>>("key")?.map(as_written),
        created_at: row.take("created_at")?,
        deadline: row.take("deadline")?,
        ended_at,
        is_of_children: row.take("owned")?,
    })
}

static TASKS: Statement = Statement::new(
    "
    select j.id, j.task, j.kind, j.queue, w.held, f.outcome::text as outcome, f.skipped, w.id is not null as waits,
           coalesce(w.attempt > 0 or w.interruptions > 0, false) as retries
      from (select id, task, kind, queue
              from longshore.jobs
             where flow = $1
               and id > $2
             order by id
             limit $3) j
      left join longshore.ready w on w.id = j.id
      left join longshore.finished f on f.id = j.id
     order by j.id",
);

static LINKS_OF: Statement = Statement::new(
    "
    select l.child, l.parent, j.task, l.condition, l.met
      from longshore.links l
      join longshore.jobs j on j.id = l.parent
     where l.child = any($1::uuid[])
     order by l.parent",
);

async fn tasks(rows: &mut dyn Rows, flow: FlowId, after: Option<JobId>, limit: u32) -> Sql<Vec<TaskRecord>> {
    let found = rows.rows(&TASKS, args![flow, id_after(after), limit]).await?;
    let mut tasks = found.into_iter().map(task_record).collect::<Sql<Vec<_>>>()?;
    let places: HashMap<JobId, usize> = tasks.iter().enumerate().map(|(nth, task)| (task.id, nth)).collect();
    let ids: Vec<Uuid> = tasks.iter().map(|task| task.id.0).collect();
    for mut row in rows.rows(&LINKS_OF, args![ids]).await? {
        let child: JobId = row.take("child")?;
        tasks[places[&child]].after.push(LinkRecord {
            id: row.take("parent")?,
            task: row.take("task")?,
            condition: row.parse("condition", Condition::from_stored)?,
            met: row.take("met")?,
        });
    }
    Ok(tasks)
}

/// For a condition `id > $1`, which uses an index with or without an id.
pub(super) fn id_after(after: Option<JobId>) -> Uuid {
    after.map_or(Uuid::nil(), |id| id.0)
}

fn task_record(mut row: Row) -> Sql<TaskRecord> {
    let status = match outcome(&mut row)? {
        Some(outcome) => outcome.status(),
        None if !row.take::<bool>("waits")? => Status::Running,
        None if row.take("retries")? => Status::Retrying,
        None => Status::Queued,
    };
    Ok(TaskRecord {
        id: row.take("id")?,
        task: row.take("task")?,
        kind: row.take("kind")?,
        queue: row.take("queue")?,
        status,
        held: row.take::<Option<bool>>("held")?.unwrap_or(false),
        skipped: row.take::<Option<bool>>("skipped")?.unwrap_or(false),
        after: Vec::new(),
    })
}

/// The column `outcome` of a job that may not have ended.
fn outcome(row: &mut Row) -> Sql<Option<Outcome>> {
    let outcome: Option<String> = row.take("outcome")?;
    Ok(outcome.as_deref().map(Outcome::from_stored).transpose()?)
}

static MEMBERS_IN: Statement = Statement::new(
    "
    select count(*) as members
      from longshore.jobs
     where flow = $1
       and queue = any($2::text[])",
);

async fn members_in(rows: &mut dyn Rows, flow: FlowId, queues: &[String]) -> Sql<u64> {
    one(rows.row(&MEMBERS_IN, args![flow, queues]).await?)?.take("members")
}

static PARENTS: Statement = Statement::new(
    "
    select l.parent as id, j.task, f.outcome::text as outcome, f.result::text as result,
           case when f.outcome <> 'succeeded' then f.last_error end as error
      from longshore.links l
      join longshore.jobs j on j.id = l.parent
      left join longshore.finished f on f.id = l.parent
     where l.child = $1
     order by l.parent",
);

async fn parents(rows: &mut dyn Rows, id: JobId) -> Sql<Vec<ParentRecord>> {
    rows.rows(&PARENTS, args![id]).await?.into_iter().map(parent_record).collect()
}

/// A callback is in no flow. A member's parent may have children of its own, and so be a flow as well.
static AWAITED_FLOW: Statement = Statement::new(
    "
    select f.id as id
      from longshore.jobs j
      join longshore.links l on l.child = j.id
      join longshore.flows f on f.id = l.parent
     where j.id = $1
       and j.flow is null
       and l.met is null
    union all
    select job
      from longshore.waits
     where job = $1
       and event = $2
       and not woken
     limit 1",
);

async fn awaited_flow(rows: &mut dyn Rows, id: JobId) -> Sql<Option<FlowId>> {
    let found = rows.row(&AWAITED_FLOW, args![id, &flow_event(FlowId(id.0))]).await?;
    found.map(|mut row| row.take("id")).transpose()
}

static RESULTS: Statement = Statement::new(
    "
    select j.id, j.task, f.outcome::text as outcome, f.result::text as result,
           case when f.outcome <> 'succeeded' then f.last_error end as error
      from (select id, task
              from longshore.jobs
             where flow = $1
               and id > $2
             order by id
             limit $3) j
      left join longshore.finished f on f.id = j.id
     order by j.id",
);

async fn results(
    rows: &mut dyn Rows,
    flow: FlowId,
    after: Option<JobId>,
    limit: u32,
) -> Sql<Vec<ParentRecord>> {
    let found = rows.rows(&RESULTS, args![flow, id_after(after), limit]).await?;
    found.into_iter().map(parent_record).collect()
}

fn parent_record(mut row: Row) -> Sql<ParentRecord> {
    Ok(ParentRecord {
        id: row.take("id")?,
        task: row.take("task")?,
        outcome: outcome(&mut row)?,
        result: row.take("result")?,
        error: row.take("error")?,
    })
}
