//! What a job is: its id, the words for where it stands, and the record that
//! the API, the CLI and the dashboard show.
//!
//! Owns no rules: what may happen to a job is in [`lifecycle`](crate::lifecycle),
//! how one is made in [`enqueue`](crate::enqueue).

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::retry::RetryPolicy;

/// A job's name for life: a UUID v7, so that ids sort by the time they were
/// made and "newest first" is "by id, descending".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct JobId(pub Uuid);

impl JobId {
    /// A new id. Chosen by the caller before the first try, so that an insert
    /// whose answer was lost can be repeated without making a second job.
    #[expect(clippy::new_without_default, reason = "two defaults would differ")]
    pub fn new() -> Self {
        JobId(Uuid::now_v7())
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

/// One boot of one worker process. Never reused: a process that was declared
/// dead and comes back registers under a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub Uuid);

impl WorkerId {
    /// A fresh id for this boot.
    #[expect(clippy::new_without_default, reason = "two defaults would differ")]
    pub fn new() -> Self {
        WorkerId(Uuid::now_v7())
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where a job stands, in the words used by API, SQL, CLI and dashboard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Status {
    /// Waits for its first attempt.
    Queued,
    /// A worker holds its lease.
    Running,
    /// Done.
    Succeeded,
    /// Waits for another attempt after a failure or an interruption.
    Retrying,
    /// Failed for good: a dead letter until redriven or retained away.
    FailedPermanent,
    /// Ended by request.
    Cancelled,
}

impl Status {
    /// All of them, in the order of a job's life.
    pub const ALL: [Status; 6] = [
        Status::Queued,
        Status::Running,
        Status::Succeeded,
        Status::Retrying,
        Status::FailedPermanent,
        Status::Cancelled,
    ];

    /// The word.
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

    fn from_str(word: &str) -> Result<Self> {
        Status::ALL.into_iter().find(|status| status.as_str() == word).ok_or_else(|| {
            let words = Status::ALL.map(Status::as_str).join(", ");
            Error::invalid("status", format!("status `{word}` does not exist; use one of {words}"))
        })
    }
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// Its handler returned success.
    Succeeded,
    /// It used up its attempts, was failed for good, or was quarantined.
    FailedPermanent,
    /// It was cancelled before or while it ran.
    Cancelled,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Outcome; 3] = [Outcome::Succeeded, Outcome::FailedPermanent, Outcome::Cancelled];

    /// The word stored in the database.
    pub fn as_str(self) -> &'static str {
        self.status().as_str()
    }

    /// The status a job with this outcome shows.
    pub fn status(self) -> Status {
        match self {
            Outcome::Succeeded => Status::Succeeded,
            Outcome::FailedPermanent => Status::FailedPermanent,
            Outcome::Cancelled => Status::Cancelled,
        }
    }

    pub(crate) fn from_stored(word: &str) -> Result<Self> {
        Outcome::ALL
            .into_iter()
            .find(|outcome| outcome.as_str() == word)
            .ok_or_else(|| Error::internal(format!("the database holds an unknown outcome `{word}`")))
    }
}

/// A job as shown to people and programs: what was asked, where it stands and
/// what has happened so far.
#[derive(Clone, Debug, Serialize)]
pub struct JobRecord {
    /// Its id.
    pub id: JobId,
    /// Which handler runs it.
    pub kind: String,
    /// The queue it waits in.
    pub queue: String,
    /// Where it stands.
    pub status: Status,
    /// Higher runs first.
    pub priority: i16,
    /// Attempts charged so far, the running one included.
    pub attempts: u16,
    /// How many attempts it may have.
    pub max_attempts: u16,
    /// The newest error, kept after a later success.
    pub last_error: Option<String>,
    /// When that error happened.
    pub last_failed_at: Option<DateTime<Utc>>,
    /// The payload, exactly as it was given.
    pub payload: Box<RawValue>,
    /// What the handler returned.
    pub result: Option<Box<RawValue>>,
    /// When it may next start (while it waits), or was asked to.
    pub run_at: DateTime<Utc>,
    /// When the live lease was taken.
    pub locked_at: Option<DateTime<Utc>>,
    /// Who holds the live lease.
    pub locked_by: Option<WorkerId>,
    /// Whether a cancel waits for the handler's next safe point.
    pub cancel_requested: bool,
    /// One key, one job, for as long as the job is kept.
    pub idempotency_key: Option<String>,
    /// Unique among live jobs.
    pub unique_key: Option<String>,
    /// Labels for people.
    pub tags: Vec<String>,
    /// Labels that workers and recovery act on.
    pub flags: Vec<String>,
    /// Why it was enqueued.
    pub context: Option<String>,
    /// The enqueuer's own data.
    pub metadata: Option<Box<RawValue>>,
    /// What the running handler last reported.
    pub progress: Option<Box<RawValue>>,
    /// How long one attempt may take; none means for ever.
    #[serde(rename = "timeout_seconds", with = "seconds")]
    pub timeout: Option<Duration>,
    /// The retry policy, when it is not the default.
    pub retry: Option<RetryPolicy>,
    /// How often a worker died holding it.
    pub interruptions: u16,
    /// How often it has been claimed: the fence.
    pub lease_no: i32,
    /// When it was enqueued.
    pub created_at: DateTime<Utc>,
    /// When it last moved.
    pub updated_at: DateTime<Utc>,
    /// When its latest attempt started.
    pub started_at: Option<DateTime<Utc>>,
    /// When it ended.
    pub finished_at: Option<DateTime<Utc>>,
    /// Attempts that did not succeed, oldest first; filled for a single job,
    /// empty in lists.
    pub errors: Vec<AttemptRecord>,
}

/// One attempt that ended without success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AttemptRecord {
    /// Which attempt it was; 1 is the first.
    pub attempt: u16,
    /// The lease it ran under.
    pub lease_no: i32,
    /// Who ran it.
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
pub enum AttemptEnd {
    /// The handler failed; charged.
    Failed,
    /// The worker died or hung; counted, not charged.
    Interrupted,
    /// The handler asked to run later; not charged.
    Snoozed,
    /// The worker gave it back unfinished; not charged.
    Released,
}

impl AttemptEnd {
    /// All of them.
    pub const ALL: [AttemptEnd; 4] =
        [AttemptEnd::Failed, AttemptEnd::Interrupted, AttemptEnd::Snoozed, AttemptEnd::Released];

    /// The word stored in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            AttemptEnd::Failed => "failed",
            AttemptEnd::Interrupted => "interrupted",
            AttemptEnd::Snoozed => "snoozed",
            AttemptEnd::Released => "released",
        }
    }

    pub(crate) fn from_stored(word: &str) -> Result<Self> {
        AttemptEnd::ALL
            .into_iter()
            .find(|end| end.as_str() == word)
            .ok_or_else(|| Error::internal(format!("the database holds an unknown attempt end `{word}`")))
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
