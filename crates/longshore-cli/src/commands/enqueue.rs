//! `longshore enqueue`, and how payloads are read.

mod many;
mod wait;

use std::fs::File;
use std::io::{self, Read};

use chrono::{DateTime, Utc};
use longshore::enqueue::MAX_PAYLOAD;
use longshore::{JobId, RetryPolicy, UniqueMode, When};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use crate::args::Enqueue;
use crate::builtin;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

pub(super) use many::enqueue_many;

/// A job as the API takes it. What is absent is for the kind to say.
#[derive(Default, Serialize)]
pub(super) struct NewJob {
    kind: String,
    payload: Box<RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) max_attempts: Option<i64>,
    #[serde(flatten)]
    when: Whenever,
    #[serde(skip_serializing_if = "Option::is_none")]
    idempotency_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    unique_mode: Option<UniqueMode>,
    #[serde(skip_serializing_if = "Option::is_none")]
    timeout_seconds: Option<Seconds>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry: Option<RetryPolicy>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tags: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flags: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Box<RawValue>>,
}

/// When it may start, as the API takes it.
#[derive(Default, Serialize)]
pub(super) struct Whenever {
    #[serde(skip_serializing_if = "Option::is_none")]
    run_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_seconds: Option<f64>,
}

impl From<Option<When>> for Whenever {
    fn from(when: Option<When>) -> Self {
        match when {
            None => Whenever::default(),
            Some(When::At(at)) => Whenever { run_at: Some(at), delay_seconds: None },
            Some(When::After(delay)) => Whenever { run_at: None, delay_seconds: Some(delay.as_secs_f64()) },
        }
    }
}

/// Seconds, or the word `none`.
#[derive(Serialize)]
#[serde(untagged)]
enum Seconds {
    Some(f64),
    None(&'static str),
}

impl NewJob {
    pub(super) fn new(kind: String, payload: Box<RawValue>) -> Self {
        NewJob { kind, payload, ..NewJob::default() }
    }

    fn of(args: Enqueue) -> Result<Self, Failure> {
        let timeout = args.timeout.map(|timeout| match timeout.0 {
            Some(timeout) => Seconds::Some(timeout.as_secs_f64()),
            None => Seconds::None("none"),
        });
        Ok(NewJob {
            queue: args.queue,
            priority: args.priority,
            max_attempts: args.max_attempts,
            when: args.when.when().into(),
            idempotency_key: args.idempotency_key,
            unique_key: args.unique_key,
            unique_mode: args.unique_mode,
            timeout_seconds: timeout,
            retry: args.retry,
            tags: args.tags,
            flags: args.flags,
            context: args.context,
            metadata: args.metadata.map(|text| json_of("metadata", text)).transpose()?,
            ..NewJob::new(args.kind, read_json("payload", &args.payload)?)
        })
    }
}

/// The job that stands for a request, and how it came to be.
#[derive(Deserialize)]
pub(super) struct Enqueued {
    #[serde(alias = "id")]
    job_id: JobId,
    how: String,
}

pub(super) async fn enqueue(endpoint: &Endpoint, args: Enqueue, out: &Out) -> Outcome {
    let (wait, kind) = (args.wait, args.kind.clone());
    let reply = endpoint.post(&["jobs"]).body(&NewJob::of(args)?).send().await?;
    let enqueued: Enqueued = reply.read()?;
    warn_if_unknown(endpoint, &kind, out).await;
    match wait {
        Some(limit) => wait::until_ended(endpoint, &enqueued, limit.0, out).await,
        None => {
            tell(&enqueued, out);
            Ok(Code::Done)
        }
    }
}

/// Warns of a kind that nobody has announced. A server refuses it, or was told not
/// to; whoever has the database may be about to deploy the first worker, or may
/// have mistyped.
pub(super) async fn warn_if_unknown(endpoint: &Endpoint, kind: &str, out: &Out) {
    #[derive(Deserialize)]
    struct Known {
        name: String,
    }

    if out.json || endpoint.client().is_none() || builtin::is_built_in(kind) {
        return;
    }
    // The job is stored; that a warning cannot be given is no reason to fail.
    let Ok(reply) = endpoint.get(&["kinds"]).send().await else { return };
    let Ok(known) = reply.read::<Vec<Known>>() else { return };
    if !known.iter().any(|known| known.name == kind) {
        out.note(format_args!(
            "warning: nobody has announced kind `{kind}`; its jobs wait until a worker handles it. \
             `longshore kinds list` shows the known ones"
        ));
    }
}

/// Says which job it is now, and how it came to be.
pub(super) fn tell(enqueued: &Enqueued, out: &Out) {
    if out.json {
        out.document(&json!({ "job_id": enqueued.job_id, "how": enqueued.how }))
    } else {
        out.line(format_args!("{} {}", enqueued.how, enqueued.job_id))
    }
}

/// Reads JSON given as itself, `@FILE` or `-`. Kept as text: a number that no
/// type of ours can hold reaches the queue as it is.
pub(super) fn read_json(field: &str, given: &str) -> Result<Box<RawValue>, Failure> {
    json_of(field, read_payload(given)?)
}

fn json_of(field: &str, text: String) -> Result<Box<RawValue>, Failure> {
    RawValue::from_string(text)
        .map_err(|error| Failure::usage(format_args!("{field}: not JSON: {error}; give any JSON value")))
}

fn read_payload(given: &str) -> Result<String, Failure> {
    match given.strip_prefix('@') {
        Some(path) => {
            let file = File::open(path).map_err(|error| unreadable(path, &error))?;
            read_text(path, file)
        }
        None if given == "-" => read_text("standard input", io::stdin().lock()),
        None => Ok(given.to_owned()),
    }
}

fn read_text(source: &str, input: impl Read) -> Result<String, Failure> {
    // White space around the JSON does not count, so more than the limit may
    // be legal; but an endless input must end somewhere.
    const MOST: usize = 2 * MAX_PAYLOAD;
    let mut text = String::new();
    let read = input.take(MOST as u64 + 1).read_to_string(&mut text);
    match read {
        Ok(bytes) if bytes > MOST => Err(Failure::usage(format_args!(
            "payload: {source} is too long; at most {MAX_PAYLOAD} bytes of JSON are kept"
        ))),
        Ok(_) => Ok(text),
        Err(error) => Err(unreadable(source, &error)),
    }
}

fn unreadable(source: &str, error: &io::Error) -> Failure {
    Failure::usage(format_args!(
        "payload: cannot read {source}: {error}; give JSON itself, @FILE, or - for standard input"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_payload_is_taken_as_it_is() {
        assert_eq!(read_json("payload", " {\"a\": 1.00}\n").unwrap().get(), r#"{"a": 1.00}"#);
        let refused = read_json("payload", "{oops").unwrap_err();
        assert!(refused.to_string().starts_with("payload: not JSON"), "{refused}");
    }

    #[test]
    fn a_job_says_only_what_was_said() {
        let job = NewJob::new("greet".into(), read_json("payload", "1.00").unwrap());
        assert_eq!(serde_json::to_string(&job).unwrap(), r#"{"kind":"greet","payload":1.00}"#);
    }

    #[test]
    fn endless_and_broken_input_is_refused_by_name() {
        let endless = read_text("standard input", io::repeat(b' ')).unwrap_err();
        assert!(endless.to_string().starts_with("payload: standard input is too long"), "{endless}");
        let broken = read_text("x.json", &b"\xff"[..]).unwrap_err();
        assert!(broken.to_string().starts_with("payload: cannot read x.json"), "{broken}");
        assert_eq!(broken.code, Code::Usage);
    }
}
