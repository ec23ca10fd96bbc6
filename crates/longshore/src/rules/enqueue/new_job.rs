//! A job to enqueue, and the job that has passed every check.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::check::{
    MAX_ATTEMPTS_LIMIT, MAX_PAYLOAD, check_json, check_key, check_labels, check_name, check_options,
    check_queue, check_when,
};
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, Status};
use crate::rules::keys::{self, EnqueuedAs, TICK_PREFIX, UniqueMode};
use crate::rules::lifecycle::When;
use crate::rules::retry::{MAX_DELAY, RetryPolicy, millis};

/// The queue of a job that does not set one.
pub const DEFAULT_QUEUE: &str = "default";

/// How long one attempt may take if the job does not set a timeout.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);

/// How many attempts a job has if it does not set a number.
pub const DEFAULT_MAX_ATTEMPTS: u16 = 3;

/// A job to enqueue. Only the kind and the payload are required; the methods name the
/// defaults of everything else.
///
/// ```
/// use std::time::Duration;
/// use longshore::NewJob;
///
/// let job = NewJob::new("send_email", &serde_json::json!({ "to": "ada@example.com" }))
///     .queue("mail")
///     .priority(10)
///     .delay(Duration::from_secs(60))
///     .validate()?;
/// assert_eq!(job.queue(), "mail");
/// # Ok::<(), longshore::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct NewJob {
    id: JobId,
    id_is_key: bool,
    kind: String,
    queue: String,
    payload: Result<String, String>,
    pub(super) priority: i64,
    max_attempts: i64,
    pub(super) when: When,
    idempotency_key: Option<String>,
    unique: Option<(String, UniqueMode)>,
    timeout: Option<Duration>,
    flags: Vec<String>,
    group: Option<String>,
    more: Options,
}

impl NewJob {
    /// A job of this kind. The payload is serialized to JSON.
    pub fn new(kind: impl Into<String>, payload: &(impl Serialize + ?Sized)) -> Self {
        let payload = serde_json::to_string(payload).map_err(|error| error.to_string());
        NewJob::with_payload(kind.into(), payload)
    }

    /// A job of this kind whose payload is already JSON text.
    pub fn from_json(kind: impl Into<String>, payload: &str) -> Self {
        let payload = serde_json::from_str::<&RawValue>(payload)
            .map(|raw| raw.get().to_owned())
            .map_err(|error| error.to_string());
        NewJob::with_payload(kind.into(), payload)
    }

    fn with_payload(kind: String, payload: Result<String, String>) -> Self {
        NewJob {
            id: JobId::new(),
            id_is_key: false,
            kind,
            queue: DEFAULT_QUEUE.into(),
            payload,
            priority: 0,
            max_attempts: DEFAULT_MAX_ATTEMPTS.into(),
            when: When::NOW,
            idempotency_key: None,
            unique: None,
            timeout: Some(DEFAULT_TIMEOUT),
            flags: Vec::new(),
            group: None,
            more: Options::default(),
        }
    }

    /// Sets the id. By default a new one is generated.
    pub fn id(mut self, id: JobId) -> Self {
        self.id = id;
        self
    }

    /// Sets the id, and uses it as a key: a second enqueue with the same id returns the first job,
    /// as existing.
    #[cfg(feature = "api")]
    pub(crate) fn id_as_key(self, id: JobId) -> Self {
        NewJob { id_is_key: true, ..self.id(id) }
    }

    /// The kind of the job.
    pub(crate) fn kind(&self) -> &str {
        &self.kind
    }

    /// Sets the queue; `default` by default.
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = queue.into();
        self
    }

    /// Puts the job into a group of its queue, for example a customer. Groups take fair turns, and
    /// each can have a limit and a rate of its own.
    pub fn group(mut self, group: impl Into<String>) -> Self {
        self.group = Some(group.into());
        self
    }

    /// Sets the priority, -32768 to 32767; 0 by default. Higher runs first.
    pub fn priority(mut self, priority: i64) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the number of attempts, at least 1; 3 by default.
    pub fn max_attempts(mut self, max_attempts: i64) -> Self {
        self.max_attempts = max_attempts;
        self
    }

    /// Does not start the job before this instant, by the database's clock.
    pub fn run_at(mut self, at: DateTime<Utc>) -> Self {
        self.when = When::At(at);
        self
    }

    /// Does not start the job before this much time has passed, by the database's clock.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.when = When::After(delay);
        self
    }

    /// Sets when the job is due, as an instant or a delay.
    pub fn when(mut self, when: When) -> Self {
        self.when = when;
        self
    }

    /// Sets an idempotency key: a second enqueue with the same key returns the first job,
    /// unchanged, for as long as that job is kept. Keys that start with `cron:` are reserved.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// Sets a unique key: at most one live job has it. `mode` says what a second enqueue
    /// does.
    pub fn unique_key(mut self, key: impl Into<String>, mode: UniqueMode) -> Self {
        self.unique = Some((key.into(), mode));
        self
    }

    /// Sets how long one attempt may take; 2 h by default. `None` means no limit.
    pub fn timeout(mut self, timeout: Option<Duration>) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the retry policy.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.more.retry = Some(policy);
        self
    }

    /// Sets flags: labels that workers and recovery act on.
    pub fn flags<S: Into<String>>(mut self, flags: impl IntoIterator<Item = S>) -> Self {
        self.flags = flags.into_iter().map(Into::into).collect();
        self
    }

    /// Sets tags: labels for people.
    pub fn tags<S: Into<String>>(mut self, tags: impl IntoIterator<Item = S>) -> Self {
        self.more.tags = tags.into_iter().map(Into::into).collect();
        self
    }

    /// Records why the job is enqueued.
    pub fn context(mut self, context: impl Into<String>) -> Self {
        self.more.context = Some(context.into());
        self
    }

    /// Attaches the caller's own data, as JSON.
    pub fn metadata(mut self, metadata: Box<RawValue>) -> Self {
        self.more.metadata = Some(metadata);
        self
    }

    /// Sets the W3C trace context (`traceparent`).
    pub fn trace(mut self, traceparent: impl Into<String>) -> Self {
        self.more.trace = Some(traceparent.into());
        self
    }

    /// The span of enqueuing it. It continues the job's trace, if there is one: as a child of the
    /// current span if that is part of the trace, otherwise of the span that the job names.
    pub(crate) fn span(&self) -> tracing::Span {
        let span = tracing::info_span!(
            "enqueue",
            otel.kind = "producer",
            job_id = %self.id,
            kind = self.kind.as_str(),
            queue = self.queue.as_str(),
        );
        if let Some(traceparent) = self.more.trace.as_deref().filter(|trace| !crate::trace::is_current(trace))
        {
            crate::trace::adopt(&span, traceparent);
        }
        span
    }

    /// Checks every field. The error names the first invalid field and the remedy. A job
    /// without a trace context gets that of the current span, if there is one.
    pub fn validate(mut self) -> Result<ValidJob> {
        if self.more.trace.as_deref().is_none_or(crate::trace::is_current) {
            self.more.trace = crate::trace::current();
        }
        // Walks over all ids start at the nil UUID and end at the max UUID.
        if self.id.0.is_nil() || self.id.0.is_max() {
            return Err(Error::invalid(
                "id",
                "id: a job cannot have the nil or the max UUID; use JobId::new()",
            ));
        }
        check_name("kind", &self.kind)?;
        check_queue("queue", &self.queue)?;
        if let Some(group) = &self.group {
            check_name("group", group)?;
        }
        let payload = self.payload.map_err(|error| {
            Error::invalid("payload", format!("payload: not JSON: {error}; use any JSON value"))
        })?;
        check_json("payload", &payload, MAX_PAYLOAD)?;
        let priority = i16::try_from(self.priority).map_err(|_| {
            Error::invalid(
                "priority",
                format!("priority: {} is out of range; use -32768 to 32767", self.priority),
            )
        })?;
        let max_attempts = match u16::try_from(self.max_attempts) {
            Ok(n @ 1..=MAX_ATTEMPTS_LIMIT) => n,
            _ => {
                return Err(Error::invalid(
                    "max_attempts",
                    format!(
                        "max_attempts: {} is out of range; use 1 to {MAX_ATTEMPTS_LIMIT}",
                        self.max_attempts
                    ),
                ));
            }
        };
        check_when(&self.when)?;
        if let Some(key) = &self.idempotency_key {
            check_key("idempotency_key", key)?;
            if key.starts_with(TICK_PREFIX) {
                return Err(Error::invalid(
                    "idempotency_key",
                    format!(
                        "idempotency_key: `{TICK_PREFIX}` is reserved for the ticks of schedules; use another prefix"
                    ),
                ));
            }
        }
        if let Some((key, _)) = &self.unique {
            check_key("unique_key", key)?;
        }
        if let Some(timeout) = self.timeout
            && !(Duration::from_millis(1)..=MAX_DELAY).contains(&timeout)
        {
            return Err(Error::invalid(
                "timeout",
                format!("timeout: {timeout:?} is out of range; use 1 ms to ten years, or none"),
            ));
        }
        check_labels("flags", &self.flags)?;
        check_options(&self.more)?;
        let options = match self.more.is_empty() {
            true => None,
            false => Some(
                serde_json::to_string(&self.more)
                    .map_err(|error| Error::invalid("metadata", format!("metadata: not JSON: {error}")))?,
            ),
        };
        Ok(ValidJob {
            id: self.id,
            id_is_key: self.id_is_key,
            kind: self.kind,
            queue: self.queue,
            payload,
            priority,
            max_attempts,
            when: self.when,
            idempotency_key: self.idempotency_key,
            unique: self.unique,
            timeout: self.timeout,
            flags: self.flags,
            group: self.group,
            options,
        })
    }

    /// Checks every field and sets the idempotency key of a tick, which callers cannot use.
    #[cfg(feature = "cron")]
    pub(crate) fn validate_tick(self, key: String) -> Result<ValidJob> {
        let job = NewJob { idempotency_key: None, ..self }.validate()?;
        Ok(ValidJob { idempotency_key: Some(key), ..job })
    }
}

/// A job that has passed every check. Only [`NewJob`] creates one, so the engines do not
/// check it again.
#[derive(Clone, Debug)]
pub struct ValidJob {
    pub(crate) id: JobId,
    /// Whether the caller uses the id as a key.
    pub(crate) id_is_key: bool,
    pub(crate) kind: String,
    pub(crate) queue: String,
    pub(crate) payload: String,
    pub(crate) priority: i16,
    pub(crate) max_attempts: u16,
    pub(crate) when: When,
    /// In its stored form, as the unique key.
    pub(crate) idempotency_key: Option<String>,
    pub(crate) unique: Option<(String, UniqueMode)>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) flags: Vec<String>,
    pub(crate) group: Option<String>,
    pub(crate) options: Option<String>,
}

impl ValidJob {
    /// Puts its keys into the namespace of its queue, for a caller who may use only some queues.
    #[cfg(feature = "api")]
    pub(crate) fn with_keys_in_namespace(mut self) -> Result<Self> {
        if let Some(key) = &mut self.idempotency_key {
            *key = keys::in_namespace("idempotency_key", &self.queue, key)?;
        }
        if let Some((key, _)) = &mut self.unique {
            *key = keys::in_namespace("unique_key", &self.queue, key)?;
        }
        Ok(self)
    }

    /// The id of the job.
    pub fn id(&self) -> JobId {
        self.id
    }

    /// The kind of the job.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The queue of the job.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// The record of this job if it was created at this time: what
    /// [`Client::get`](crate::Client::get) returns until the job changes. Times and
    /// durations have the precision of the database. `None` if a stored text would not be
    /// JSON, which cannot happen to a valid job.
    pub(crate) fn into_record(self, created_at: DateTime<Utc>) -> Option<JobRecord> {
        let options = Options::from_stored(self.options.as_deref()).ok()?;
        let run_at = match self.when {
            When::At(at) => DateTime::from_timestamp_micros(at.timestamp_micros())?,
            When::After(delay) => {
                let micros = i64::try_from(delay.as_micros()).ok()?;
                created_at.checked_add_signed(TimeDelta::microseconds(micros))?
            }
        };
        Some(JobRecord {
            id: self.id,
            kind: self.kind,
            queue: self.queue,
            status: Status::Queued,
            priority: self.priority,
            attempts: 0,
            max_attempts: self.max_attempts,
            last_error: None,
            last_failed_at: None,
            payload: RawValue::from_string(self.payload).ok()?,
            result: None,
            run_at,
            locked_at: None,
            locked_by: None,
            locked_by_name: None,
            cancel_requested: false,
            idempotency_key: self.idempotency_key.map(keys::as_written),
            unique_key: self.unique.map(|(key, _)| keys::as_written(key)),
            group: self.group,
            flow: None,
            task: None,
            tags: options.tags,
            flags: self.flags,
            context: options.context,
            metadata: options.metadata,
            progress: None,
            timeout: self.timeout.map(|timeout| Duration::from_millis(millis(timeout) as u64)),
            retry: options.retry,
            interruptions: 0,
            lease_no: 0,
            created_at,
            updated_at: created_at,
            started_at: None,
            finished_at: None,
            errors: Vec::new(),
            errors_omitted: 0,
        })
    }

    /// The result of an enqueue whose id belongs to a stored job. Either an earlier try created the job and
    /// its reply was lost, or the caller uses the id as a key.
    pub(crate) fn stored_as(&self) -> EnqueuedAs {
        if self.id_is_key { EnqueuedAs::Existing } else { EnqueuedAs::Created }
    }

    /// Whether it has a key, so that an existing job may be returned instead.
    pub(crate) fn is_keyed(&self) -> bool {
        self.idempotency_key.is_some() || self.unique.is_some()
    }
}

/// Options that are stored with a job but do not affect claims: one JSON column, null if
/// no option is set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Options {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) retry: Option<RetryPolicy>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) tags: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) context: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) metadata: Option<Box<RawValue>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trace: Option<String>,
}

impl Options {
    fn is_empty(&self) -> bool {
        self.retry.is_none()
            && self.tags.is_empty()
            && self.context.is_none()
            && self.metadata.is_none()
            && self.trace.is_none()
    }

    pub(crate) fn from_stored(text: Option<&str>) -> Result<Self> {
        match text {
            None => Ok(Options::default()),
            Some(text) => serde_json::from_str(text).map_err(|error| {
                Error::internal("the stored options of a job cannot be decoded").with_source(error)
            }),
        }
    }
}
