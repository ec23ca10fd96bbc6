//! What a caller asks for: [`NewJob`], its checks, and the lanes by which
//! concurrent enqueues share commits.
//!
//! A [`ValidJob`] can only be made by [`NewJob::validate`], so the engines never
//! meet a payload or a key that one of them would refuse and the other take.

use std::time::Duration;

use chrono::{DateTime, Datelike, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::job::JobId;
use crate::lifecycle::When;
use crate::retry::{MAX_DELAY, RetryPolicy};

pub(crate) mod lanes;

/// The queue of jobs that name none.
pub const DEFAULT_QUEUE: &str = "default";
/// How long one attempt may take when the job does not say.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(2 * 60 * 60);
/// How many attempts a job may have when it does not say.
pub const DEFAULT_MAX_ATTEMPTS: u16 = 3;

/// The largest payload, in bytes of JSON.
pub const MAX_PAYLOAD: usize = 1024 * 1024;
/// The deepest nesting of arrays and objects in a payload.
pub const MAX_DEPTH: usize = 64;
/// The longest kind or queue name, in bytes.
pub const MAX_NAME: usize = 128;
/// The longest idempotency or unique key, in bytes.
pub const MAX_KEY: usize = 512;
const MAX_CONTEXT: usize = 16 * 1024;
const MAX_METADATA: usize = 64 * 1024;
const MAX_LABELS: usize = 64;

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
    priority: i64,
    max_attempts: i64,
    when: When,
    idempotency_key: Option<String>,
    unique: Option<(String, UniqueMode)>,
    timeout: Option<Duration>,
    flags: Vec<String>,
    more: Options,
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

const MAX_ATTEMPTS_LIMIT: u16 = i16::MAX as u16;

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

/// What became of an enqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Enqueued {
    /// The job that stands for the request.
    pub id: JobId,
    /// Whether it was there before.
    pub how: EnqueuedAs,
}

/// Whether an enqueue made a job or found one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EnqueuedAs {
    /// A new job.
    Created,
    /// The job that already had the key, unchanged.
    Existing,
    /// The waiting job that already had the key, with the new contents.
    Replaced,
}

/// What an operator may change while a job waits; absent fields stay.
///
/// ```
/// let edit = longshore::Edit::default().priority(5);
/// ```
#[derive(Clone, Debug, Default)]
pub struct Edit {
    priority: Option<i64>,
    when: Option<When>,
    payload: Option<String>,
}

impl Edit {
    /// Another priority.
    pub fn priority(mut self, priority: i64) -> Self {
        self.priority = Some(priority);
        self
    }

    /// Another time.
    pub fn when(mut self, when: When) -> Self {
        self.when = Some(when);
        self
    }

    /// Another payload, as JSON text.
    pub fn payload(mut self, json: impl Into<String>) -> Self {
        self.payload = Some(json.into());
        self
    }

    /// Checks the new values as [`NewJob::validate`] does.
    pub fn validate(self) -> Result<ValidEdit> {
        let mut probe = match &self.payload {
            Some(payload) => NewJob::from_json("edit", payload),
            None => NewJob::new("edit", &()),
        };
        probe.priority = self.priority.unwrap_or(0);
        probe.when = self.when.unwrap_or(When::NOW);
        let valid = probe.validate()?;
        Ok(ValidEdit {
            priority: self.priority.map(|_| valid.priority),
            when: self.when,
            payload: self.payload.map(|_| valid.payload),
        })
    }
}

/// An edit that has passed every check.
#[derive(Clone, Debug)]
pub struct ValidEdit {
    pub(crate) priority: Option<i16>,
    pub(crate) when: Option<When>,
    pub(crate) payload: Option<String>,
}

pub(crate) fn check_name(field: &'static str, name: &str) -> Result<()> {
    check_text(field, name, MAX_NAME)
}

fn check_text(field: &'static str, text: &str, most: usize) -> Result<()> {
    if text.is_empty() {
        return Err(Error::invalid(field, format!("{field}: is empty; give 1 to {most} bytes")));
    }
    check_long_text(field, text, most)
}

fn check_long_text(field: &'static str, text: &str, most: usize) -> Result<()> {
    if text.len() > most {
        return Err(Error::invalid(
            field,
            format!("{field}: {} bytes long; at most {most} are kept", text.len()),
        ));
    }
    if text.contains('\0') {
        return Err(Error::invalid(
            field,
            format!("{field}: contains a NUL character, which Postgres cannot store; remove it"),
        ));
    }
    Ok(())
}

pub(crate) fn check_labels(field: &'static str, labels: &[String]) -> Result<()> {
    if labels.len() > MAX_LABELS {
        return Err(Error::invalid(
            field,
            format!("{field}: {} of them; at most {MAX_LABELS} are kept", labels.len()),
        ));
    }
    labels.iter().try_for_each(|label| check_name(field, label))
}

fn check_options(options: &Options) -> Result<()> {
    check_labels("tags", &options.tags)?;
    if let Some(policy) = &options.retry {
        policy.validate()?;
    }
    if let Some(context) = &options.context {
        check_long_text("context", context, MAX_CONTEXT)?;
    }
    if let Some(trace) = &options.trace {
        check_text("trace", trace, MAX_KEY)?;
    }
    if let Some(metadata) = &options.metadata {
        check_json("metadata", metadata.get(), MAX_METADATA)?;
    }
    Ok(())
}

fn check_when(when: &When) -> Result<()> {
    match when {
        When::After(delay) if *delay > MAX_DELAY => {
            Err(Error::invalid("delay", format!("delay: {delay:?} is too long; at most ten years")))
        }
        When::At(at) if !(1970..=9999).contains(&at.year()) => Err(Error::invalid(
            "run_at",
            format!("run_at: year {} is out of range; use 1970 to 9999", at.year()),
        )),
        _ => Ok(()),
    }
}

/// Refuses what a database could choke on after the job was accepted: too
/// much, too deep, NUL, half a surrogate pair. `text` is known to be JSON.
pub(crate) fn check_json(field: &'static str, text: &str, most: usize) -> Result<()> {
    let refuse = |message: String| Err(Error::invalid(field, format!("{field}: {message}")));
    if text.len() > most {
        return refuse(format!(
            "{} bytes of JSON; at most {most} are kept, so store the data elsewhere and enqueue a reference",
            text.len()
        ));
    }
    let mut depth = 0usize;
    let mut in_string = false;
    let mut high_surrogate = false;
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        if high_surrogate && byte != b'\\' {
            return refuse("half a surrogate pair in a string; send the whole character".into());
        }
        match (in_string, byte) {
            (false, b'[' | b'{') => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return refuse(format!("nested more than {MAX_DEPTH} deep; flatten it"));
                }
            }
            (false, b']' | b'}') => depth -= 1,
            (_, b'"') => in_string = !in_string,
            (true, b'\\') => {
                let code = match bytes.next() {
                    Some((_, b'u')) => u16::from_str_radix(text.get(at + 2..at + 6).unwrap_or(""), 16).ok(),
                    _ => None,
                };
                match code {
                    Some(0) => {
                        return refuse("a string contains a NUL character (\\u0000); remove it".into());
                    }
                    Some(0xdc00..=0xdfff) if high_surrogate => high_surrogate = false,
                    Some(0xd800..=0xdbff) if !high_surrogate => high_surrogate = true,
                    Some(0xd800..=0xdfff) => {
                        return refuse("half a surrogate pair in a string; send the whole character".into());
                    }
                    _ if high_surrogate => {
                        return refuse("half a surrogate pair in a string; send the whole character".into());
                    }
                    _ => {}
                }
                if code.is_some() {
                    bytes.nth(3);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(job: NewJob) -> String {
        job.validate().unwrap_err().field().unwrap().to_owned()
    }

    fn job() -> NewJob {
        NewJob::new("greet", &serde_json::json!({ "name": "Ada" }))
    }

    #[test]
    fn every_bad_field_is_refused_by_name() {
        let long = "x".repeat(MAX_NAME + 1);
        let key = "k".repeat(MAX_KEY + 1);
        assert_eq!(refused(NewJob::new("", &1)), "kind");
        assert_eq!(refused(NewJob::new(long.as_str(), &1)), "kind");
        assert_eq!(refused(NewJob::new("a\0b", &1)), "kind");
        assert_eq!(refused(job().queue("")), "queue");
        assert_eq!(refused(job().queue(long.as_str())), "queue");
        assert_eq!(refused(job().max_attempts(0)), "max_attempts");
        assert_eq!(refused(job().max_attempts(-1)), "max_attempts");
        assert_eq!(refused(job().max_attempts(40_000)), "max_attempts");
        assert_eq!(refused(job().priority(32_768)), "priority");
        assert_eq!(refused(job().priority(-32_769)), "priority");
        assert_eq!(refused(job().idempotency_key("")), "idempotency_key");
        assert_eq!(refused(job().idempotency_key(key.as_str())), "idempotency_key");
        assert_eq!(refused(job().unique_key("", UniqueMode::Dedupe)), "unique_key");
        assert_eq!(refused(job().unique_key(key.as_str(), UniqueMode::Dedupe)), "unique_key");
        assert_eq!(refused(job().timeout(Some(Duration::ZERO))), "timeout");
        assert_eq!(refused(job().flags([""])), "flags");
        assert_eq!(refused(job().tags([long.as_str()])), "tags");
        assert_eq!(refused(job().context("x\0")), "context");
        assert_eq!(refused(job().delay(Duration::MAX)), "delay");
        assert_eq!(refused(job().run_at(DateTime::<Utc>::MAX_UTC)), "run_at");
        assert_eq!(refused(job().retry(RetryPolicy::list([]))), "retry");
        assert_eq!(refused(NewJob::from_json("greet", "{oops")), "payload");
    }

    #[test]
    fn the_limits_themselves_are_accepted() {
        let name = "x".repeat(MAX_NAME);
        let key = "k".repeat(MAX_KEY);
        let payload = format!("\"{}\"", "p".repeat(MAX_PAYLOAD - 2));
        NewJob::from_json(name.as_str(), &payload)
            .queue(name)
            .priority(i16::MIN.into())
            .max_attempts(MAX_ATTEMPTS_LIMIT.into())
            .idempotency_key(key.as_str())
            .unique_key(key, UniqueMode::Replace)
            .validate()
            .unwrap();
    }

    #[test]
    fn payloads_the_database_could_choke_on_are_refused() {
        let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        let bad = [
            format!("\"{}\"", "p".repeat(MAX_PAYLOAD - 1)),
            deep(MAX_DEPTH + 1),
            r#"{"a":"x\u0000y"}"#.into(),
            r#"{"a\u0000":1}"#.into(),
            r#""\ud800""#.into(),
            r#""\ud800x""#.into(),
            r#""\ud800\n""#.into(),
            r#""\ud800\ud800""#.into(),
            r#""\udc00""#.into(),
        ];
        for payload in bad {
            assert_eq!(refused(NewJob::from_json("greet", &payload)), "payload", "{payload:.40}");
        }
        let good = [
            deep(MAX_DEPTH),
            r#""\\u0000""#.into(),
            r#""[[[\"{{""#.into(),
            r#""\ud83d\ude00 \u00e9""#.into(),
        ];
        for payload in good {
            NewJob::from_json("greet", &payload).validate().unwrap();
        }
    }

    #[test]
    fn an_edit_is_checked_like_a_new_job() {
        let field = |edit: Edit| edit.validate().unwrap_err().field().unwrap().to_owned();
        assert_eq!(field(Edit::default().priority(99_999)), "priority");
        assert_eq!(field(Edit::default().payload("{oops")), "payload");
        assert_eq!(field(Edit::default().when(When::After(Duration::MAX))), "delay");
    }
}
