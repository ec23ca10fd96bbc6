//! Operations: changes of any number of jobs that run in the background, and how far they are. The client
//! executes them, in `client/operations.rs`.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::inspect::{ListFilter, Payloads};
use crate::error::{Error, Result};
use crate::failure::Fingerprint;
use crate::job::{JobId, OperationId, Status};

/// For how many days operations are kept that are not running. The statement of Postgres repeats this
/// number.
#[cfg(feature = "sqlite")]
pub(crate) const OPERATION_RETENTION_DAYS: i64 = 7;

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

    /// Whether nothing but the status, the kind and the queue of a job decides.
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

/// An operation that a process executes.
#[derive(Clone, Debug)]
pub struct HeldOperation {
    /// The operation.
    pub record: OperationRecord,
    /// Its list of ids, highest first; `None` if it has a filter.
    pub ids: Option<Vec<JobId>>,
    /// Down to which of the jobs that it has passed by it has visited them again; `None` if it has not begun.
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
    /// The jobs that were passed by earlier, and count now.
    pub unlocked: Vec<JobId>,
    /// Down to which of the jobs that were passed by they have been visited again.
    pub locked_cursor: Option<JobId>,
    /// Why the rest of the step has to be tried again.
    pub error: Option<String>,
    /// For how long no other process may take the operation.
    pub hold: Duration,
}

/// The id of a process that executes operations. Each run has a new one.
pub type Holder = Uuid;

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
