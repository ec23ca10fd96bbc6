//! A job to enqueue, and the job that has passed every check.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::check::{
    MAX_ATTEMPTS_LIMIT, MAX_KEY, MAX_PAYLOAD, check_json, check_labels, check_name, check_options,
    check_text, check_when,
};
use crate::error::{Error, Result};
use crate::job::JobId;
use crate::lifecycle::When;
use crate::retry::{MAX_DELAY, RetryPolicy};

/// The queue of jobs that name none.
pub const DEFAULT_QUEUE: &str = "default";

/// How long one attempt may take when the job does not say.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);

/// How many attempts a job may have when it does not say.
pub const DEFAULT_MAX_ATTEMPTS: u16 = 3;

/// A job to be enqueued. Only the kind and the payload are needed; the rest
/// has the defaults that the field's documentation names.
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
    more: Options,
}

impl NewJob {
    /// A job of `kind` with `payload` as its JSON.
    pub fn new(kind: impl Into<String>, payload: &(impl Serialize + ?Sized)) -> Self {
        let payload = serde_json::to_string(payload).map_err(|error| error.to_string());
        NewJob::with_payload(kind.into(), payload)
    }

    /// A job whose payload is already JSON text.
    pub fn from_json(kind: impl Into<String>, payload: &str) -> Self {
        let payload = serde_json::from_str::<&RawValue>(payload)
            .map(|raw| raw.get().to_owned())
            .map_err(|error| error.to_string());
        NewJob::with_payload(kind.into(), payload)
    }

    fn with_payload(kind: String, payload: Result<String, String>) -> Self {
        NewJob {
            id: JobId::new(),
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
            more: Options::default(),
        }
    }

    /// Uses an id made earlier; by default a new one is made.
    pub fn id(mut self, id: JobId) -> Self {
        self.id = id;
        self
    }

    /// The queue to wait in; `default` if never called.
    pub fn queue(mut self, queue: impl Into<String>) -> Self {
        self.queue = queue.into();
        self
    }

    /// Higher runs first; 0 by default, -32768 to 32767.
    pub fn priority(mut self, priority: i64) -> Self {
        self.priority = priority;
        self
    }

    /// How many attempts it may have, at least 1; 3 by default.
    pub fn max_attempts(mut self, max_attempts: i64) -> Self {
        self.max_attempts = max_attempts;
        self
    }

    /// Not before this instant, by the database's clock.
    pub fn run_at(mut self, at: DateTime<Utc>) -> Self {
        self.when = When::At(at);
        self
    }

    /// Not before this long from now, by the database's clock.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.when = When::After(delay);
        self
    }

    /// Not before this point, in either form.
    pub fn when(mut self, when: When) -> Self {
        self.when = when;
        self
    }

    /// A second enqueue with this key returns the first job, unchanged, for as
    /// long as that is kept.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Self {
        self.idempotency_key = Some(key.into());
        self
    }

    /// At most one live job has this key; `mode` says what a second does.
    pub fn unique_key(mut self, key: impl Into<String>, mode: UniqueMode) -> Self {
        self.unique = Some((key.into(), mode));
        self
    }

    /// How long one attempt may take; `None` means for ever, 2 h by default.
    pub fn timeout(mut self, timeout: Option<Duration>) -> Self {
        self.timeout = timeout;
        self
    }

    /// When failed attempts are tried again.
    pub fn retry(mut self, policy: RetryPolicy) -> Self {
        self.more.retry = Some(policy);
        self
    }

    /// Labels that workers and recovery act on.
    pub fn flags<S: Into<String>>(mut self, flags: impl IntoIterator<Item = S>) -> Self {
        self.flags = flags.into_iter().map(Into::into).collect();
        self
    }

    /// Labels for people.
    pub fn tags<S: Into<String>>(mut self, tags: impl IntoIterator<Item = S>) -> Self {
        self.more.tags = tags.into_iter().map(Into::into).collect();
        self
    }

    /// Why it is enqueued.
    pub fn context(mut self, context: impl Into<String>) -> Self {
        self.more.context = Some(context.into());
        self
    }

    /// The caller's own data, kept beside the payload.
    pub fn metadata(mut self, metadata: Box<RawValue>) -> Self {
        self.more.metadata = Some(metadata);
        self
    }

    /// W3C trace context of the caller.
    pub fn trace(mut self, traceparent: impl Into<String>) -> Self {
        self.more.trace = Some(traceparent.into());
        self
    }

    /// Checks everything that both engines rely on. The first thing that is
    /// wrong is named, with what would be right. A job that names no trace
    /// context gets that of the current span, where there is one.
    pub fn validate(mut self) -> Result<ValidJob> {
        self.more.trace = self.more.trace.or_else(crate::trace::current);
        // The ends of the range are where walks by id begin and end.
        if self.id.0.is_nil() || self.id.0.is_max() {
            return Err(Error::invalid(
                "id",
                "id: neither the nil nor the max UUID names a job; use JobId::new()",
            ));
        }
        check_name("kind", &self.kind)?;
        check_name("queue", &self.queue)?;
        let payload = self.payload.map_err(|error| {
            Error::invalid("payload", format!("payload: not JSON: {error}; give any JSON value"))
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
            check_text("idempotency_key", key, MAX_KEY)?;
        }
        if let Some((key, _)) = &self.unique {
            check_text("unique_key", key, MAX_KEY)?;
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
            options,
        })
    }
}

/// A job that has passed every check: what the engines store.
#[derive(Clone, Debug)]
pub struct ValidJob {
    pub(crate) id: JobId,
    pub(crate) kind: String,
    pub(crate) queue: String,
    pub(crate) payload: String,
    pub(crate) priority: i16,
    pub(crate) max_attempts: u16,
    pub(crate) when: When,
    pub(crate) idempotency_key: Option<String>,
    pub(crate) unique: Option<(String, UniqueMode)>,
    pub(crate) timeout: Option<Duration>,
    pub(crate) flags: Vec<String>,
    pub(crate) options: Option<String>,
}

impl ValidJob {
    /// The id it will have.
    pub fn id(&self) -> JobId {
        self.id
    }

    /// Which handler will run it.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The queue it will wait in.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// Whether another job may stand in for it.
    pub(crate) fn is_keyed(&self) -> bool {
        self.idempotency_key.is_some() || self.unique.is_some()
    }
}

/// What an enqueue does when its unique key belongs to a live job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum UniqueMode {
    /// The live job stands, waiting or running; the enqueue returns it.
    #[default]
    Dedupe,
    /// A waiting job takes over the new contents and the new time. A running
    /// one loses the key to a new job and does not wait again.
    Replace,
    /// As replace, but a waiting job keeps its time.
    PreserveRunAt,
}

impl UniqueMode {
    /// The word used in API, SQL and CLI.
    pub fn as_str(self) -> &'static str {
        match self {
            UniqueMode::Dedupe => "dedupe",
            UniqueMode::Replace => "replace",
            UniqueMode::PreserveRunAt => "preserve_run_at",
        }
    }
}

impl std::str::FromStr for UniqueMode {
    type Err = Error;

    fn from_str(word: &str) -> Result<Self> {
        [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt]
            .into_iter()
            .find(|mode| mode.as_str() == word)
            .ok_or_else(|| {
                Error::invalid(
                    "unique_mode",
                    format!("unique_mode `{word}` does not exist; use dedupe, replace or preserve_run_at"),
                )
            })
    }
}

/// What is stored with a job but never steers a claim; one JSON column, absent
/// when there is nothing in it.
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
            Some(text) => serde_json::from_str(text)
                .map_err(|error| Error::internal("a job's stored options do not decode").with_source(error)),
        }
    }
}
