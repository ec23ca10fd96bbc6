//! Operations: background changes of any number of jobs, and their progress. The client executes them, in
//! `client/operations.rs`.
//!
//! A process takes an operation until `taken_until`, and extends that time with every step. After that time,
//! another process may take it. The first process can then no longer store anything, because every write
//! names the process that has taken the operation.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::clean;
use super::db::{Engine, How, Row, Rows, Sql, Statement, args, column};
use super::inspect::{ListFilter, Payloads};
use crate::error::{Error, Result};
use crate::job::{JobId, OperationId, Status};
use crate::rules::fingerprint::Fingerprint;

/// How long an operation is kept after it stopped running.
const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The maximum length of a text in a filter, in bytes.
const MAX_TEXT: usize = 1024;

/// What an operation does to each job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Action {
    /// Cancel waiting jobs, and request that running ones stop.
    Cancel,
    /// Run finished jobs again, and waiting ones now.
    Retry,
    /// Delete finished jobs.
    Delete,
}

impl Action {
    /// All actions.
    pub const ALL: [Action; 3] = [Action::Cancel, Action::Retry, Action::Delete];

    /// The action as text.
    pub fn as_str(self) -> &'static str {
        match self {
            Action::Cancel => "cancel",
            Action::Retry => "retry",
            Action::Delete => "delete",
        }
    }

    pub(crate) fn from_stored(text: &str) -> Result<Self> {
        let found = Action::ALL.into_iter().find(|action| action.as_str() == text);
        found.ok_or_else(|| Error::internal(format!("`{text}` is not an action of an operation")))
    }
}

/// The state of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OperationState {
    /// It is being executed, or waits for a process that executes it.
    Running,
    /// It was stopped, and can be resumed.
    Stopped,
    /// It has visited all of its jobs.
    Done,
    /// An error ended it. It can be resumed.
    Failed,
}

impl OperationState {
    /// All states.
    pub const ALL: [OperationState; 4] =
        [OperationState::Running, OperationState::Stopped, OperationState::Done, OperationState::Failed];

    /// The state as text.
    pub fn as_str(self) -> &'static str {
        match self {
            OperationState::Running => "running",
            OperationState::Stopped => "stopped",
            OperationState::Done => "done",
            OperationState::Failed => "failed",
        }
    }

    pub(crate) fn from_stored(text: &str) -> Result<Self> {
        let found = OperationState::ALL.into_iter().find(|state| state.as_str() == text);
        found.ok_or_else(|| Error::internal(format!("`{text}` is not the state of an operation")))
    }
}

/// Which jobs an operation changes: those that match every field that is set. The fields are those of
/// [`ListFilter`]. It is stored as JSON, in the format of the API.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct JobFilter {
    /// Jobs in one of these statuses. Empty means any.
    #[serde(rename = "status", skip_serializing_if = "Vec::is_empty")]
    pub statuses: Vec<Status>,
    /// Jobs of this kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Jobs of this queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Jobs of this group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Jobs with this tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Jobs whose last error contains this text, as in [`ListFilter::error`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Jobs whose last failure belongs to this group.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failure: Option<Fingerprint>,
    /// The job with this idempotency key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// The live job with this unique key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique_key: Option<String>,
    /// Jobs created before this instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub older_than: Option<DateTime<Utc>>,
    /// Jobs created at this instant or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub newer_than: Option<DateTime<Utc>>,
    /// Jobs that ended before this instant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_before: Option<DateTime<Utc>>,
    /// Jobs that ended at this instant or later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended_after: Option<DateTime<Utc>>,
}

impl JobFilter {
    /// Reads a stored filter. Refuses a field that this version does not know: without it, the operation
    /// would change more jobs than were meant.
    pub(crate) fn from_stored(json: &RawValue) -> Result<Self> {
        serde_json::from_str(json.get()).map_err(|error| {
            Error::invalid(
                "filter",
                format!(
                    "filter: this version of Longshore cannot read it ({error}); upgrade every process, then resume \
                     the operation"
                ),
            )
        })
    }

    /// The list of these jobs, newest first, after `cursor`.
    pub(crate) fn page(&self, cursor: Option<JobId>, limit: u32) -> ListFilter {
        let JobFilter {
            statuses,
            kind,
            queue,
            group,
            tag,
            error,
            failure,
            idempotency_key,
            unique_key,
            older_than,
            newer_than,
            ended_before,
            ended_after,
        } = self.clone();
        ListFilter {
            statuses,
            kind,
            queue,
            group,
            tag,
            error,
            failure,
            idempotency_key,
            unique_key,
            older_than,
            newer_than,
            ended_before,
            ended_after,
            cursor,
            limit,
            payloads: Payloads::Omit,
            ..ListFilter::default()
        }
    }

    /// Whether the filter matches every job.
    fn is_empty(&self) -> bool {
        *self == JobFilter::default()
    }

    /// Whether the filter uses nothing but statuses, a kind and a queue, so that the counts of jobs contain
    /// the number of matches.
    pub(crate) fn is_countable(&self) -> bool {
        let JobFilter { statuses, kind, queue, .. } = self.clone();
        *self == JobFilter { statuses, kind, queue, ..JobFilter::default() }
    }

    fn validate(&self) -> Result<()> {
        if self.is_empty() {
            return Err(Error::invalid(
                "filter",
                "filter: is empty and would match every job; set at least one of status, kind, queue, group, tag, \
                 error, failure, idempotency_key, unique_key, older_than, newer_than, ended_before and ended_after",
            ));
        }
        let texts = [
            ("filter.kind", &self.kind),
            ("filter.queue", &self.queue),
            ("filter.group", &self.group),
            ("filter.tag", &self.tag),
            ("filter.error", &self.error),
            ("filter.idempotency_key", &self.idempotency_key),
            ("filter.unique_key", &self.unique_key),
        ];
        texts.into_iter().try_for_each(|(field, text)| check_text(field, text.as_deref().unwrap_or("-")))
    }
}

fn check_text(field: &'static str, text: &str) -> Result<()> {
    let problem = match text.len() {
        0 => "is empty; leave it out, or give a text",
        1..=MAX_TEXT if !text.contains('\0') => return Ok(()),
        1..=MAX_TEXT => "contains a NUL character, which no stored text has; remove it",
        _ => "is longer than 1,024 bytes; shorten it",
    };
    Err(Error::invalid(field, format!("{field}: {problem}")))
}

/// The jobs of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Selection {
    /// Those that match a filter, if they exist when the operation is started.
    Filter(Box<JobFilter>),
    /// These. They are visited newest first.
    Ids(Vec<JobId>),
}

/// An operation to start.
///
/// ```
/// use longshore::{Action, JobFilter, NewOperation, Status};
///
/// let dead_letters = JobFilter { statuses: vec![Status::FailedPermanent], ..JobFilter::default() };
/// let operation = NewOperation::matching(Action::Retry, dead_letters).created_by("ada");
/// ```
#[derive(Clone, Debug)]
pub struct NewOperation {
    pub(crate) id: OperationId,
    pub(crate) action: Action,
    pub(crate) selection: Selection,
    pub(crate) queues: Option<Vec<String>>,
    pub(crate) created_by: Option<String>,
    pub(crate) expected: Option<u64>,
}

impl NewOperation {
    /// The maximum number of ids.
    pub const MAX_IDS: usize = 10_000;

    /// Changes every job that matches a filter.
    pub fn matching(action: Action, filter: JobFilter) -> Self {
        let queues = filter.queue.clone().map(|queue| vec![queue]);
        NewOperation::new(action, Selection::Filter(Box::new(filter)), queues)
    }

    /// Changes these jobs, 1 to 10,000.
    pub fn of_jobs(action: Action, ids: impl IntoIterator<Item = JobId>) -> Self {
        NewOperation::new(action, Selection::Ids(ids.into_iter().collect()), None)
    }

    fn new(action: Action, selection: Selection, queues: Option<Vec<String>>) -> Self {
        let id = OperationId::new();
        NewOperation { id, action, selection, queues, created_by: None, expected: None }
    }

    /// Sets the id. Starting the same operation again with the same id changes nothing, so a call whose reply
    /// was lost can be repeated.
    pub fn id(mut self, id: OperationId) -> Self {
        self.id = id;
        self
    }

    /// Names who started it.
    pub fn created_by(mut self, name: impl Into<String>) -> Self {
        self.created_by = Some(name.into());
        self
    }

    /// Limits a list of ids to jobs of these queues. Others are skipped, as if they did not exist.
    pub fn only_in<S: Into<String>>(mut self, queues: impl IntoIterator<Item = S>) -> Self {
        self.queues = Some(queues.into_iter().map(Into::into).collect());
        self
    }

    /// Checks the operation, and sorts its ids in the order in which they are visited.
    pub(crate) fn validate(mut self) -> Result<Self> {
        match &mut self.selection {
            Selection::Filter(filter) => filter.validate()?,
            Selection::Ids(ids) => {
                if ids.is_empty() || ids.len() > NewOperation::MAX_IDS {
                    return Err(Error::invalid(
                        "ids",
                        format!(
                            "ids: {} ids are out of range; give 1 to {}, or use a filter",
                            ids.len(),
                            NewOperation::MAX_IDS
                        ),
                    ));
                }
                ids.sort_unstable_by(|a, b| b.cmp(a));
                ids.dedup();
                self.expected = Some(ids.len() as u64);
            }
        }
        if let Some(name) = &self.created_by {
            check_text("created_by", name)?;
        }
        Ok(self)
    }

    /// The filter as it is stored.
    pub(crate) fn stored_filter(&self) -> Result<Option<String>> {
        let Selection::Filter(filter) = &self.selection else { return Ok(None) };
        let json = serde_json::to_string(filter);
        json.map(Some)
            .map_err(|error| Error::internal("a filter cannot be encoded as JSON").with_source(error))
    }

    /// The error if another operation has the id.
    pub(crate) fn conflict(&self) -> Error {
        Error::conflict(format!(
            "id: another operation has the id {}, with another action or other jobs; use a new id, or leave it out",
            self.id
        ))
    }
}

/// An operation and its progress.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct OperationRecord {
    /// Its id.
    pub id: OperationId,
    /// What it does to each job.
    pub action: Action,
    /// Its state.
    pub state: OperationState,
    /// Which jobs it changes, as JSON; `None` if it has a list of ids.
    pub filter: Option<Box<RawValue>>,
    /// The only queues whose jobs it changes; `None` means all.
    pub queues: Option<Vec<String>>,
    /// How many jobs it will visit, if that was known when it was started.
    pub expected: Option<u64>,
    /// How many jobs it has visited.
    pub examined: u64,
    /// How many of them it has changed.
    pub changed: u64,
    /// How many of them it could not change: their state does not allow it, or they no longer exist.
    pub skipped: u64,
    /// It has visited all of its jobs down to this id.
    pub cursor: Option<JobId>,
    /// Why it failed, or why its last step has to be tried again.
    pub error: Option<String>,
    /// When it was started. It changes no jobs that were created later.
    pub created_at: DateTime<Utc>,
    /// Who started it.
    pub created_by: Option<String>,
    /// When it last made progress or changed its state.
    pub updated_at: DateTime<Utc>,
    /// When it was done or failed.
    pub ended_at: Option<DateTime<Utc>>,
}

/// Which operations to list.
#[derive(Clone, Debug, Default)]
pub struct OperationFilter {
    /// Only operations in this state.
    pub state: Option<OperationState>,
    /// Only operations that change jobs of these queues and no others.
    pub queues: Option<Vec<String>>,
    /// Only operations that were started before this one.
    pub before: Option<OperationId>,
    /// The maximum number of operations.
    pub limit: u32,
}

/// An operation that a process has taken to execute it.
#[derive(Clone, Debug)]
pub struct TakenOperation {
    /// The operation.
    pub record: OperationRecord,
    /// Its list of ids, highest first; `None` if it has a filter.
    pub ids: Option<Vec<JobId>>,
    /// It has visited the jobs that it passed by again down to this id; `None` if it has not begun.
    pub locked_cursor: Option<JobId>,
}

/// What one step of an operation has done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OperationStep {
    /// Every job down to this id was visited.
    pub cursor: Option<JobId>,
    /// How many jobs were visited so far, in all steps.
    pub examined: u64,
    /// How many of them were changed.
    pub changed: u64,
    /// How many of them could not be changed.
    pub skipped: u64,
    /// The jobs that it passed by, because another transaction has locked them. They are visited again.
    pub locked: Vec<JobId>,
    /// Jobs that an earlier step passed by and this step counted.
    pub unlocked: Vec<JobId>,
    /// The jobs that were passed by have been visited again down to this id.
    pub locked_cursor: Option<JobId>,
    /// Why the rest of the step has to be tried again.
    pub error: Option<String>,
    /// For how long no other process may take the operation.
    pub take_for: Duration,
}

/// The id of a process that executes operations. Each run has a new one.
pub type Executor = Uuid;

/// Operations.
#[async_trait]
pub trait Operations {
    /// Stores an operation, which runs from now on. Storing the same operation again changes nothing. Fails
    /// with a conflict if the id belongs to an operation with another action or other jobs.
    async fn put_operation(&self, operation: &NewOperation) -> Result<()>;

    /// Returns one operation.
    async fn operation(&self, id: OperationId) -> Result<Option<OperationRecord>>;

    /// Lists operations, newest first.
    async fn operations(&self, filter: &OperationFilter) -> Result<Vec<OperationRecord>>;

    /// Takes a running operation that no other process has taken, for this time; `None` if there is none. Takes the
    /// oldest one that nobody has taken yet, or the one whose time ended first.
    async fn take_operation(&self, by: Executor, take_for: Duration) -> Result<Option<TakenOperation>>;

    /// Stores what a step has done, and takes the operation for longer. Returns the state, so that the process
    /// notices a stop; an operation that is not running is no longer taken. `None` means that another process
    /// has taken the operation, and nothing changed.
    async fn save_operation_step(
        &self,
        id: OperationId,
        by: Executor,
        step: &OperationStep,
    ) -> Result<Option<OperationState>>;

    /// Lists up to `limit` jobs below `before` that an operation has passed by, highest first.
    async fn locked_jobs(&self, id: OperationId, before: Option<JobId>, limit: u32) -> Result<Vec<JobId>>;

    /// Ends a running operation: it is done, or failed with this error. Changes nothing and returns false
    /// if another process has taken it, or if it was stopped.
    async fn end_operation(&self, id: OperationId, by: Executor, error: Option<&str>) -> Result<bool>;

    /// Stops an operation if it is running. Returns its state; `None` if it does not exist.
    async fn stop_operation(&self, id: OperationId) -> Result<Option<OperationState>>;

    /// Lets an operation continue that was stopped or failed. Returns its state; `None` if it does not exist.
    async fn resume_operation(&self, id: OperationId) -> Result<Option<OperationState>>;

    /// Removes up to `limit` operations that have not been running for 7 days. Returns how many.
    async fn remove_operations(&self, limit: u32) -> Result<u64>;
}

#[async_trait]
impl<E: Engine> Operations for E {
    async fn put_operation(&self, operation: &NewOperation) -> Result<()> {
        self.call(How::SLOW, operation.clone(), |rows, operation| Box::pin(put_operation(rows, operation)))
            .await
    }

    async fn operation(&self, id: OperationId) -> Result<Option<OperationRecord>> {
        self.call(How::READ, id, |rows, id| Box::pin(operation(rows, *id))).await
    }

    async fn operations(&self, filter: &OperationFilter) -> Result<Vec<OperationRecord>> {
        self.call(How::VIEW, filter.clone(), |rows, filter| Box::pin(operations(rows, filter))).await
    }

    async fn take_operation(&self, by: Executor, take_for: Duration) -> Result<Option<TakenOperation>> {
        // Almost always there is nothing to take, and nothing needs to be locked or written.
        if !self.call(How::READ, (), |rows, ()| Box::pin(has_free_operation(rows))).await? {
            return Ok(None);
        }
        self.call(How::SLOW, (by, take_for), |rows, (by, take_for)| {
            Box::pin(take_operation(rows, *by, *take_for))
        })
        .await
    }

    async fn save_operation_step(
        &self,
        id: OperationId,
        by: Executor,
        step: &OperationStep,
    ) -> Result<Option<OperationState>> {
        let has_one_statement = step.locked.is_empty() && step.unlocked.is_empty();
        let how = if has_one_statement { How::SLOW } else { How::SLOW.together() };
        self.call(how, (id, by, step.clone()), |rows, (id, by, step)| {
            Box::pin(save_step(rows, *id, *by, step))
        })
        .await
    }

    async fn locked_jobs(&self, id: OperationId, before: Option<JobId>, limit: u32) -> Result<Vec<JobId>> {
        self.call(How::READ, (id, before, limit), |rows, (id, before, limit)| {
            Box::pin(locked_jobs(rows, *id, *before, *limit))
        })
        .await
    }

    async fn end_operation(&self, id: OperationId, by: Executor, error: Option<&str>) -> Result<bool> {
        let error = error.map(|error| clean(error).into_owned());
        self.call(How::SLOW, (id, by, error), |rows, (id, by, error)| {
            Box::pin(end_operation(rows, *id, *by, error))
        })
        .await
    }

    async fn stop_operation(&self, id: OperationId) -> Result<Option<OperationState>> {
        self.call(How::SLOW, id, |rows, id| Box::pin(change_state(rows, &STOP_OPERATION, *id))).await
    }

    async fn resume_operation(&self, id: OperationId) -> Result<Option<OperationState>> {
        self.call(How::SLOW, id, |rows, id| Box::pin(change_state(rows, &RESUME_OPERATION, *id))).await
    }

    async fn remove_operations(&self, limit: u32) -> Result<u64> {
        self.call(How::SLOW.together(), limit, |rows, limit| Box::pin(remove_operations(rows, *limit))).await
    }
}

static PUT_OPERATION: Statement = Statement::new(
    "
    insert into longshore.operations
           (id, action, filter, ids, queues, state, created_at, created_by, updated_at, expected)
    values ($1, $2, $3::text::json, $4, $5, 'running', longshore.clock(), $6, longshore.clock(), $7)
        on conflict do nothing",
);

/// Whether an earlier call stored this operation and only its reply was lost.
static IS_STORED: Statement = Statement::new(
    "
    select 1
      from longshore.operations
     where id = $1
       and action = $2
       and filter::text is not distinct from $3
       and ids is not distinct from $4
       and queues is not distinct from $5",
);

async fn put_operation(rows: &mut dyn Rows, operation: &NewOperation) -> Sql<()> {
    let NewOperation { id, action, selection, queues, created_by, expected } = operation;
    let filter = operation.stored_filter()?;
    let ids = match selection {
        Selection::Filter(_) => None,
        Selection::Ids(ids) => Some(ids.as_slice()),
    };
    let put = args![*id, action.as_str(), &filter, ids, queues, created_by, *expected];
    let is_stored = rows.execute(&PUT_OPERATION, put).await? > 0
        || rows.has_row(&IS_STORED, args![*id, action.as_str(), &filter, ids, queues]).await?;
    if is_stored { Ok(()) } else { Err(operation.conflict().into()) }
}

/// The columns of an [`OperationRecord`].
macro_rules! operation_columns {
    () => {
        "id, action, state, filter::text as filter, queues, expected, examined, changed, skipped, cursor, error,
           created_at, created_by, updated_at, ended_at"
    };
}

static OPERATION: Statement =
    Statement::new(concat!("select ", operation_columns!(), " from longshore.operations where id = $1"));

async fn operation(rows: &mut dyn Rows, id: OperationId) -> Sql<Option<OperationRecord>> {
    let found = rows.row(&OPERATION, args![id]).await?;
    found.map(|mut row| operation_record(&mut row)).transpose()
}

static OPERATIONS: Statement = Statement::new(concat!(
    "
    select ",
    operation_columns!(),
    "
      from longshore.operations o
     where ($1::text is null or state = $1)
       and ($2::text[] is null or (o.queues is not null and not exists (
             select 1
               from unnest(o.queues) as q(name)
              where q.name <> all($2::text[]))))
       and ($3::uuid is null or (created_at, id) < (
             select b.created_at, b.id
               from longshore.operations b
              where b.id = $3))
     order by created_at desc, id desc
     limit $4"
));

async fn operations(rows: &mut dyn Rows, filter: &OperationFilter) -> Sql<Vec<OperationRecord>> {
    let OperationFilter { state, queues, before, limit } = filter;
    let args = args![state.map(OperationState::as_str), queues, *before, *limit];
    rows.rows(&OPERATIONS, args).await?.into_iter().map(|mut row| operation_record(&mut row)).collect()
}

static HAS_FREE_OPERATION: Statement = Statement::new(
    "
    select 1
      from longshore.operations
     where state = 'running'
       and (taken_until is null or taken_until <= longshore.clock())
     limit 1",
);

/// Whether an operation waits for a process that executes it.
async fn has_free_operation(rows: &mut dyn Rows) -> Sql<bool> {
    rows.has_row(&HAS_FREE_OPERATION, &[]).await
}

static TAKE_OPERATION: Statement = Statement::new(concat!(
    "
    update longshore.operations
       set taken_by = $1,
           taken_until = longshore.clock() + $2
     where id = (
             select o.id
               from longshore.operations o
              where o.state = 'running'
                and (o.taken_until is null or o.taken_until <= longshore.clock())
              order by o.taken_until nulls first, o.created_at, o.id   -- one after the other
              limit 1
                for update skip locked)
    returning ids, locked_cursor, ",
    operation_columns!()
));

async fn take_operation(
    rows: &mut dyn Rows,
    by: Executor,
    take_for: Duration,
) -> Sql<Option<TakenOperation>> {
    let Some(mut row) = rows.row(&TAKE_OPERATION, args![by, take_for]).await? else { return Ok(None) };
    let (ids, locked_cursor) = (row.take("ids")?, row.take("locked_cursor")?);
    Ok(Some(TakenOperation { record: operation_record(&mut row)?, ids, locked_cursor }))
}

static SAVE_STEP: Statement = Statement::new(
    "
    update longshore.operations
       set cursor = coalesce($3, cursor),
           examined = $4,   -- totals, because the statement may be repeated when its reply was lost
           changed = $5,
           skipped = $6,
           error = $7,
           locked_cursor = $9,
           updated_at = longshore.clock(),
           taken_until = case when state = 'running' then longshore.clock() + $8 end
     where id = $1
       and taken_by = $2   -- fence: another process may have taken it
    returning state",
);

static NOTE_LOCKED: Statement = Statement::new(
    "
    insert into longshore.operation_locked (operation, job)
    select $1, l.job
      from unnest($2::uuid[]) as l(job)
     where true
        on conflict do nothing",
);

static FORGET_LOCKED: Statement = Statement::new(
    "
    delete from longshore.operation_locked
     where operation = $1
       and job = any($2::uuid[])",
);

async fn save_step(
    rows: &mut dyn Rows,
    id: OperationId,
    by: Executor,
    step: &OperationStep,
) -> Sql<Option<OperationState>> {
    let OperationStep {
        cursor,
        examined,
        changed,
        skipped,
        locked,
        unlocked,
        locked_cursor,
        error,
        take_for,
    } = step;
    let error = error.as_deref().map(clean);
    let args =
        args![id, by, *cursor, *examined, *changed, *skipped, error.as_deref(), *take_for, *locked_cursor];
    let Some(mut row) = rows.row(&SAVE_STEP, args).await? else { return Ok(None) };
    for (statement, jobs) in [(&NOTE_LOCKED, locked), (&FORGET_LOCKED, unlocked)] {
        if !jobs.is_empty() {
            rows.execute(statement, args![id, jobs]).await?;
        }
    }
    row.parse("state", OperationState::from_stored).map(Some)
}

static LOCKED_JOBS: Statement = Statement::new(
    "
    select job
      from longshore.operation_locked
     where operation = $1
       and ($2::uuid is null or job < $2)
     order by job desc
     limit $3",
);

async fn locked_jobs(
    rows: &mut dyn Rows,
    id: OperationId,
    before: Option<JobId>,
    limit: u32,
) -> Sql<Vec<JobId>> {
    column(rows.rows(&LOCKED_JOBS, args![id, before, limit]).await?, "job")
}

static END_OPERATION: Statement = Statement::new(
    "
    update longshore.operations
       set state = case when $3::text is null then 'done' else 'failed' end,
           error = $3,
           updated_at = longshore.clock(),
           ended_at = longshore.clock(),
           taken_until = null
     where id = $1
       and taken_by = $2
       and state = 'running'",
);

async fn end_operation(
    rows: &mut dyn Rows,
    id: OperationId,
    by: Executor,
    error: &Option<String>,
) -> Sql<bool> {
    Ok(rows.execute(&END_OPERATION, args![id, by, error]).await? > 0)
}

/// The process that has taken it keeps it until it has stored its step and noticed the stop.
static STOP_OPERATION: Statement = Statement::new(
    "
    update longshore.operations
       set updated_at = case when state = 'running' then longshore.clock() else updated_at end,
           state = case when state = 'running' then 'stopped' else state end
     where id = $1
    returning state",
);

static RESUME_OPERATION: Statement = Statement::new(
    "
    update longshore.operations
       set updated_at = case when state in ('stopped', 'failed') then longshore.clock() else updated_at end,
           ended_at = case when state = 'failed' then null else ended_at end,
           error = case when state in ('stopped', 'failed') then null else error end,
           state = case when state in ('stopped', 'failed') then 'running' else state end
     where id = $1
    returning state",
);

async fn change_state(
    rows: &mut dyn Rows,
    change: &'static Statement,
    id: OperationId,
) -> Sql<Option<OperationState>> {
    let changed = rows.row(change, args![id]).await?;
    changed.map(|mut row| row.parse("state", OperationState::from_stored)).transpose()
}

static REMOVE_OPERATIONS: Statement = Statement::new(
    "
    delete from longshore.operations
     where id = any(array(
             select id
               from longshore.operations
              where state <> 'running'
                and updated_at < longshore.clock() - $1
              order by updated_at
              limit $2
                for update skip locked))
    returning id",
);

static REMOVE_LOCKED: Statement = Statement::new(
    "
    delete from longshore.operation_locked
     where operation = any($1::uuid[])",
);

async fn remove_operations(rows: &mut dyn Rows, limit: u32) -> Sql<u64> {
    let removed: Vec<OperationId> =
        column(rows.rows(&REMOVE_OPERATIONS, args![RETENTION, limit]).await?, "id")?;
    if !removed.is_empty() {
        // Of those that were stopped or failed.
        rows.execute(&REMOVE_LOCKED, args![&removed]).await?;
    }
    Ok(removed.len() as u64)
}

fn operation_record(row: &mut Row) -> Sql<OperationRecord> {
    Ok(OperationRecord {
        id: row.take("id")?,
        action: row.parse("action", Action::from_stored)?,
        state: row.parse("state", OperationState::from_stored)?,
        filter: row.take("filter")?,
        queues: row.take("queues")?,
        expected: row.take("expected")?,
        examined: row.take("examined")?,
        changed: row.take("changed")?,
        skipped: row.take("skipped")?,
        cursor: row.take("cursor")?,
        error: row.take("error")?,
        created_at: row.take("created_at")?,
        created_by: row.take("created_by")?,
        updated_at: row.take("updated_at")?,
        ended_at: row.take("ended_at")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled() -> JobFilter {
        let at = |millis| DateTime::from_timestamp_millis(millis);
        JobFilter {
            statuses: vec![Status::Queued, Status::FailedPermanent],
            kind: Some("mail".into()),
            queue: Some("letters".into()),
            group: Some("acme".into()),
            tag: Some("red".into()),
            error: Some("timeout".into()),
            failure: Some(Fingerprint::of("mail", "timeout")),
            idempotency_key: Some("request 7".into()),
            unique_key: Some("account 8".into()),
            older_than: at(1),
            newer_than: at(2),
            ended_before: at(3),
            ended_after: at(4),
        }
    }

    #[test]
    fn a_filter_is_read_as_it_was_stored() {
        let operation = NewOperation::matching(Action::Retry, filled());
        let json = RawValue::from_string(operation.stored_filter().unwrap().unwrap()).unwrap();
        assert_eq!(JobFilter::from_stored(&json).unwrap(), filled());
        assert!(json.get().contains(r#""status":["queued","failed_permanent"]"#), "{json}");
        let short = JobFilter { kind: Some("mail".into()), ..JobFilter::default() };
        let operation = NewOperation::matching(Action::Retry, short);
        assert_eq!(operation.stored_filter().unwrap().unwrap(), r#"{"kind":"mail"}"#);
    }

    #[test]
    fn a_filter_of_a_later_version_is_refused() {
        let json = RawValue::from_string(r#"{"kind":"mail","colour":"red"}"#.into()).unwrap();
        let error = JobFilter::from_stored(&json).unwrap_err();
        assert!(error.to_string().contains("colour") && error.to_string().contains("resume"), "{error}");
    }

    #[test]
    fn a_page_has_every_field_of_the_filter() {
        let page = filled().page(None, 7);
        let read = format!("{page:?}");
        assert!(!read.replace("cursor: None", "").contains("None"), "{read}");
        assert_eq!((page.limit, page.payloads), (7, Payloads::Omit));
    }

    #[test]
    fn ids_are_visited_once_and_newest_first() {
        let id = |n| JobId(Uuid::from_u128(n));
        let operation = NewOperation::of_jobs(Action::Cancel, [2, 9, 2, 5].map(id)).validate().unwrap();
        assert_eq!(operation.selection, Selection::Ids([9, 5, 2].map(id).to_vec()));
        assert_eq!(operation.expected, Some(3));
    }

    #[test]
    fn bad_input_is_refused_by_field() {
        let refused = |operation: NewOperation| operation.validate().unwrap_err().field().unwrap().to_owned();
        let matching = |filter| refused(NewOperation::matching(Action::Delete, filter));
        assert_eq!(matching(JobFilter::default()), "filter");
        assert_eq!(matching(JobFilter { kind: Some("a\0".into()), ..filled() }), "filter.kind");
        assert_eq!(matching(JobFilter { error: Some("e".repeat(1025)), ..filled() }), "filter.error");
        assert_eq!(matching(JobFilter { tag: Some(String::new()), ..filled() }), "filter.tag");
        let id = JobId::new();
        assert_eq!(refused(NewOperation::of_jobs(Action::Delete, [])), "ids");
        assert_eq!(refused(NewOperation::of_jobs(Action::Delete, vec![id; 10_001])), "ids");
        assert!(NewOperation::of_jobs(Action::Delete, vec![id; 10_000]).validate().is_ok());
    }
}
