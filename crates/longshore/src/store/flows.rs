//! Flows as they are stored: graphs of jobs, their members and links.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::Lease;
use crate::error::Error;
#[cfg(feature = "api")]
use crate::error::Result;
use crate::job::{FlowId, JobId, Outcome, Status, WorkerId};
use crate::rules::enqueue::ValidJob;
use crate::rules::flow::Condition;
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
    /// Nothing changed: a job has this id. The flow with its id is that of its children.
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
    /// Nothing changed: the flow would have more members than it can.
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
    /// Nothing changed: the job would have more children than it can.
    Full,
    /// Nothing changed: another flow has the id of the job.
    IdOfFlow,
}

/// How a flow stands.
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
    /// How it stands.
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
    /// Only those that have not ended (`true`) or have (`false`).
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
    /// What has to become of it.
    pub condition: Condition,
    /// Whether that has happened; `None` if the other member has not ended.
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
    /// How the flows ended that did.
    pub ended: Vec<FlowStatus>,
    /// Whether to look again: there may be more changes.
    pub more: bool,
    /// Where to go on then: no change of an earlier flow can be followed now.
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
    /// How many members were skipped, because others have locked them.
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
