//! What a job is: its id, its status, and the record that the API, the CLI and the dashboard
//! show.
//!
//! This module owns no rules: [`lifecycle`](crate::rules::lifecycle) decides what may happen to a job,
//! and [`enqueue`](crate::rules::enqueue) checks new jobs.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::rules::retry::RetryPolicy;

/// A job's id: a UUID v7, so that ids sort by creation time and "newest first" is "by id,
/// descending".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub Uuid);

impl JobId {
    /// Creates a new id. Callers choose it before the first try, so that an insert whose reply
    /// was lost can be repeated without creating a second job.
    #[expect(clippy::new_without_default, reason = "two default values would differ")]
    pub fn new() -> Self {
        JobId(Uuid::now_v7())
    }

    /// The time in the id, by the clock of the process that created it; `None` if it is no UUID v7.
    ///
    /// ```
    /// let id: longshore::JobId = "01990a2b-0000-7000-8000-0123456789ab".parse()?;
    /// assert_eq!(id.created_at().unwrap().to_rfc3339(), "2025-09-02T11:23:34.272+00:00");
    /// # Ok::<(), longshore::Error>(())
    /// ```
    pub fn created_at(&self) -> Option<DateTime<Utc>> {
        let (seconds, nanos) = self.0.get_timestamp()?.to_unix();
        DateTime::from_timestamp(i64::try_from(seconds).ok()?, nanos)
    }
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for JobId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Uuid::from_str(text).map(JobId).map_err(|_| {
            Error::invalid(
                "id",
                format!("`{text}` is not a job id; ids are UUIDs, as `longshore jobs list` shows them"),
            )
        })
    }
}

/// The id of a flow: a UUID v7. The flow of a job's children has the id of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct FlowId(pub Uuid);

impl FlowId {
    /// Creates a new id. Callers choose it before the first try, so that an insert whose reply
    /// was lost can be repeated without creating a second flow.
    #[expect(clippy::new_without_default, reason = "two default values would differ")]
    pub fn new() -> Self {
        FlowId(Uuid::now_v7())
    }
}

impl fmt::Display for FlowId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for FlowId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Uuid::from_str(text).map(FlowId).map_err(|_| {
            Error::invalid(
                "id",
                format!(
                    "`{text}` is not the id of a flow; ids are UUIDs, as `longshore flows list` shows them"
                ),
            )
        })
    }
}

/// The id of an operation: a change of many jobs that runs in the background.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperationId(pub Uuid);

impl OperationId {
    /// Creates a new id. Callers choose it before the first try, so that a start whose reply was lost can be
    /// repeated without starting a second operation.
    #[expect(clippy::new_without_default, reason = "two default values would differ")]
    pub fn new() -> Self {
        OperationId(Uuid::now_v7())
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for OperationId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Uuid::from_str(text).map(OperationId).map_err(|_| {
            Error::invalid(
                "id",
                format!(
                    "`{text}` is not the id of an operation; ids are UUIDs, as `longshore operations list` shows \
                     them"
                ),
            )
        })
    }
}

/// The id of one worker process since it started. Never reused: a process that was declared dead
/// and comes back registers under a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub Uuid);

impl WorkerId {
    /// Creates a new id.
    #[expect(clippy::new_without_default, reason = "two default values would differ")]
    pub fn new() -> Self {
        WorkerId(Uuid::now_v7())
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A job's status. The API, SQL, the CLI and the dashboard use the same names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Waits for its first attempt.
    Queued,
    /// A worker holds its lease.
    Running,
    /// Its handler succeeded.
    Succeeded,
    /// Waits for another attempt after a failure or an interruption.
    Retrying,
    /// Failed permanently: a dead letter until it is redriven or its retention ends.
    FailedPermanent,
    /// Cancelled before or while it ran.
    Cancelled,
}

impl Status {
    /// Whether the job has ended.
    #[cfg(feature = "api")]
    pub(crate) fn has_ended(self) -> bool {
        matches!(self, Status::Succeeded | Status::FailedPermanent | Status::Cancelled)
    }

    /// All statuses, in the order of a job's life.
    pub const ALL: [Status; 6] = [
        Status::Queued,
        Status::Running,
        Status::Succeeded,
        Status::Retrying,
        Status::FailedPermanent,
        Status::Cancelled,
    ];

    /// The status as text.
    pub fn as_str(self) -> &'static str {
        match self {
            Status::Queued => "queued",
            Status::Running => "running",
            Status::Succeeded => "succeeded",
            Status::Retrying => "retrying",
            Status::FailedPermanent => "failed_permanent",
            Status::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl FromStr for Status {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Status::ALL.into_iter().find(|status| status.as_str() == text).ok_or_else(|| {
            let known = Status::ALL.map(Status::as_str).join(", ");
            Error::invalid("status", format!("status `{text}` does not exist; use one of {known}"))
        })
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its handler succeeded.
    Succeeded,
    /// It used up its attempts, failed permanently, or was quarantined.
    FailedPermanent,
    /// It was cancelled before or while it ran.
    Cancelled,
}

impl Outcome {
    /// All outcomes.
    pub const ALL: [Outcome; 3] = [Outcome::Succeeded, Outcome::FailedPermanent, Outcome::Cancelled];

    /// The text stored in the database.
    pub fn as_str(self) -> &'static str {
        self.status().as_str()
    }

    /// The status of a job with this outcome.
    pub fn status(self) -> Status {
        match self {
            Outcome::Succeeded => Status::Succeeded,
            Outcome::FailedPermanent => Status::FailedPermanent,
            Outcome::Cancelled => Status::Cancelled,
        }
    }

    pub(crate) fn from_stored(text: &str) -> Result<Self> {
        Outcome::ALL
            .into_iter()
            .find(|outcome| outcome.as_str() == text)
            .ok_or_else(|| Error::internal(format!("the database contains an unknown outcome `{text}`")))
    }
}

/// A job as shown to people and programs: the request, its status and its history.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct JobRecord {
    /// The job's id.
    pub id: JobId,
    /// The kind, which selects the handler.
    pub kind: String,
    /// The queue it belongs to.
    pub queue: String,
    /// Its status.
    pub status: Status,
    /// Higher runs first.
    pub priority: i16,
    /// Attempts charged so far, including the running one.
    pub attempts: u16,
    /// The maximum number of attempts.
    pub max_attempts: u16,
    /// The newest error, kept after a later success.
    pub last_error: Option<String>,
    /// When that error happened.
    pub last_failed_at: Option<DateTime<Utc>>,
    /// The payload, exactly as it was enqueued.
    pub payload: Box<RawValue>,
    /// The handler's result.
    pub result: Option<Box<RawValue>>,
    /// While it waits: when it may next start. Otherwise: the requested start time.
    pub run_at: DateTime<Utc>,
    /// When the live lease was taken.
    pub locked_at: Option<DateTime<Utc>>,
    /// The worker that holds the live lease.
    pub locked_by: Option<WorkerId>,
    /// The name of that worker; `None` if the worker is no longer registered.
    pub locked_by_name: Option<String>,
    /// Whether its cancellation was requested; true for every cancelled job.
    pub cancel_requested: bool,
    /// The idempotency key: one job per key, for as long as the job is kept.
    pub idempotency_key: Option<String>,
    /// The unique key: at most one live job has it.
    pub unique_key: Option<String>,
    /// Its group, if it has one.
    pub group: Option<String>,
    /// The flow that it is a member of, if it is one.
    pub flow: Option<FlowId>,
    /// Its name in the flow, if it has one.
    pub task: Option<String>,
    /// Labels for people.
    pub tags: Vec<String>,
    /// Labels that workers and recovery act on.
    pub flags: Vec<String>,
    /// Why it was enqueued.
    pub context: Option<String>,
    /// Data that the caller attached.
    pub metadata: Option<Box<RawValue>>,
    /// The handler's newest progress report.
    pub progress: Option<Box<RawValue>>,
    /// How long one attempt may take; `None` means no limit.
    #[serde(rename = "timeout_seconds", with = "seconds")]
    pub timeout: Option<Duration>,
    /// The retry policy, when it is not the default.
    pub retry: Option<RetryPolicy>,
    /// How often it was interrupted: its worker died or hung.
    pub interruptions: u16,
    /// The number of its newest lease (the fence): how often it has been claimed.
    pub lease_no: i32,
    /// When it was enqueued.
    pub created_at: DateTime<Utc>,
    /// When its state last changed.
    pub updated_at: DateTime<Utc>,
    /// When its latest attempt started.
    pub started_at: Option<DateTime<Utc>>,
    /// When it ended.
    pub finished_at: Option<DateTime<Utc>>,
    /// Attempts that did not succeed, oldest first; filled for a single job,
    /// empty in lists. A job keeps the newest hundred and its newest error.
    pub errors: Vec<AttemptRecord>,
    /// How many older attempts are no longer in `errors`; zero in lists.
    pub errors_omitted: u32,
}

/// One attempt that ended without success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AttemptRecord {
    /// Which attempt it was; 1 is the first.
    pub attempt: u16,
    /// The number of the lease it ran under.
    pub lease_no: i32,
    /// The worker that ran it.
    pub worker: Option<WorkerId>,
    /// When it was claimed.
    pub started_at: DateTime<Utc>,
    /// When it ended.
    pub ended_at: DateTime<Utc>,
    /// How it ended.
    pub what: AttemptEnd,
    /// The error, if there was one.
    pub error: Option<String>,
}

/// How an attempt ended when it did not succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AttemptEnd {
    /// The handler failed; charged.
    Failed,
    /// The worker died or hung; counted, not charged.
    Interrupted,
    /// The handler snoozed the job; not charged.
    Snoozed,
    /// The worker released it unfinished; not charged.
    Released,
}

impl AttemptEnd {
    /// All of these ends.
    pub const ALL: [AttemptEnd; 4] =
        [AttemptEnd::Failed, AttemptEnd::Interrupted, AttemptEnd::Snoozed, AttemptEnd::Released];

    /// The text stored in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            AttemptEnd::Failed => "failed",
            AttemptEnd::Interrupted => "interrupted",
            AttemptEnd::Snoozed => "snoozed",
            AttemptEnd::Released => "released",
        }
    }

    pub(crate) fn from_stored(text: &str) -> Result<Self> {
        AttemptEnd::ALL
            .into_iter()
            .find(|end| end.as_str() == text)
            .ok_or_else(|| Error::internal(format!("the database contains an unknown attempt end `{text}`")))
    }
}

mod seconds {
    use std::time::Duration;

    use serde::Serializer;

    pub(super) fn serialize<S: Serializer>(value: &Option<Duration>, out: S) -> Result<S::Ok, S::Error> {
        match value {
            Some(duration) => out.serialize_some(&duration.as_secs_f64()),
            None => out.serialize_none(),
        }
    }
}
