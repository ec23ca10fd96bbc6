//! The checks of what a caller enqueues, and their limits. Both engines can store
//! everything that passes.

use chrono::Datelike;

use super::Options;
use crate::error::{Error, Result};
use crate::rules::flow::FLOW_EVENT;
use crate::rules::keys::{MAX_KEY, check_reserved};
use crate::rules::lifecycle::When;
use crate::rules::retry::MAX_DELAY;

/// Maximum size of a payload, in bytes of JSON.
pub const MAX_PAYLOAD: usize = 1024 * 1024;

/// Maximum nesting of arrays and objects in a payload.
pub const MAX_DEPTH: usize = 64;

/// Maximum length of a kind or queue name, in bytes.
pub const MAX_NAME: usize = 128;

/// In a worker's list of queues: every queue, including queues that have no job yet.
pub const ALL_QUEUES: &str = "*";

/// The maximum size of a kind's schema and of its defaults, in bytes of JSON.
pub(crate) const MAX_SCHEMA: usize = 64 * 1024;

const MAX_CONTEXT: usize = 16 * 1024;

const MAX_METADATA: usize = 64 * 1024;

const MAX_LABELS: usize = 64;

pub(super) const MAX_ATTEMPTS_LIMIT: u16 = i16::MAX as u16;

pub(crate) fn check_name(field: &'static str, name: &str) -> Result<()> {
    check_text(field, name, MAX_NAME)
}

/// Checks the name of one queue.
pub(crate) fn check_queue(field: &'static str, name: &str) -> Result<()> {
    check_name(field, name)?;
    if name == ALL_QUEUES {
        return Err(Error::invalid(
            field,
            format!(
                "{field}: `{ALL_QUEUES}` means every queue, and only a worker can use it; name one queue"
            ),
        ));
    }
    Ok(())
}

/// Checks the name of an event that a caller emits or waits for.
pub(crate) fn check_event(field: &'static str, name: &str) -> Result<()> {
    check_name(field, name)?;
    if name.starts_with(FLOW_EVENT) {
        return Err(Error::invalid(
            field,
            format!(
                "{field}: `{FLOW_EVENT}` is reserved for the ends of flows; use another prefix, and join only the \
                 children that the job has spawned itself"
            ),
        ));
    }
    Ok(())
}

pub(crate) fn check_text(field: &'static str, text: &str, limit: usize) -> Result<()> {
    if text.is_empty() {
        return Err(Error::invalid(field, format!("{field}: is empty; use 1 to {limit} bytes")));
    }
    check_long_text(field, text, limit)
}

/// Checks an idempotency key or a unique key as a caller wrote it.
pub(crate) fn check_key(field: &'static str, key: &str) -> Result<()> {
    check_text(field, key, MAX_KEY)?;
    check_reserved(field, key)
}

fn check_long_text(field: &'static str, text: &str, limit: usize) -> Result<()> {
    if text.len() > limit {
        return Err(Error::invalid(field, format!("{field}: has {} bytes; use at most {limit}", text.len())));
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
            format!("{field}: has {} items; use at most {MAX_LABELS}", labels.len()),
        ));
    }
    labels.iter().try_for_each(|label| check_name(field, label))
}

pub(super) fn check_options(options: &Options) -> Result<()> {
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

pub(super) fn check_when(when: &When) -> Result<()> {
    match when {
        When::After(delay) if *delay > MAX_DELAY => {
            Err(Error::invalid("delay", format!("delay: {delay:?} is too long; use at most ten years")))
        }
        When::At(at) if !(1970..=9999).contains(&at.year()) => Err(Error::invalid(
            "run_at",
            format!("run_at: year {} is out of range; use 1970 to 9999", at.year()),
        )),
        _ => Ok(()),
    }
}

/// Refuses JSON that a database could fail to store: too large, nested too deeply, with NUL
/// characters or unpaired surrogates. `text` must be valid JSON.
pub(crate) fn check_json(field: &'static str, text: &str, limit: usize) -> Result<()> {
    let refuse = |message: String| Err(Error::invalid(field, format!("{field}: {message}")));
    if text.len() > limit {
        return refuse(format!(
            "{} bytes of JSON exceed the limit of {limit}; store the data elsewhere and enqueue a reference",
            text.len()
        ));
    }
    let mut depth = 0usize;
    let mut in_string = false;
    let mut high_surrogate = false;
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        if high_surrogate && byte != b'\\' {
            return refuse("a string contains half a surrogate pair; send both halves".into());
        }
        match (in_string, byte) {
            (false, b'[' | b'{') => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return refuse(format!("nested more than {MAX_DEPTH} levels deep; flatten it"));
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
                        return refuse("a string contains half a surrogate pair; send both halves".into());
                    }
                    _ if high_surrogate => {
                        return refuse("a string contains half a surrogate pair; send both halves".into());
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
    use std::time::Duration;

    use chrono::{DateTime, Utc};

    use super::*;
    use crate::rules::enqueue::{NewJob, UniqueMode};
    use crate::rules::retry::RetryPolicy;

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
        assert_eq!(refused(job().queue("*")), "queue");
        assert_eq!(refused(job().max_attempts(0)), "max_attempts");
        assert_eq!(refused(job().max_attempts(-1)), "max_attempts");
        assert_eq!(refused(job().max_attempts(40_000)), "max_attempts");
        assert_eq!(refused(job().priority(32_768)), "priority");
        assert_eq!(refused(job().priority(-32_769)), "priority");
        assert_eq!(refused(job().idempotency_key("")), "idempotency_key");
        assert_eq!(refused(job().idempotency_key(key.as_str())), "idempotency_key");
        assert_eq!(refused(job().idempotency_key("cron:nightly")), "idempotency_key");
        assert_eq!(refused(job().idempotency_key("\u{1f}4:mailk")), "idempotency_key");
        assert_eq!(refused(job().unique_key("", UniqueMode::Dedupe)), "unique_key");
        assert_eq!(refused(job().unique_key("\u{1f}4:mailk", UniqueMode::Dedupe)), "unique_key");
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
    fn values_at_the_limits_are_accepted() {
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
    fn payloads_that_a_database_could_fail_to_store_are_refused() {
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
}
