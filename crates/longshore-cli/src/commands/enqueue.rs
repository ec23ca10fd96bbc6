//! `longshore enqueue`: builds the request, reads payloads from the command line, a file or
//! standard input, and warns about unregistered kinds.

mod many;
mod wait;

use std::fs::File;
use std::io::{self, Read};

use chrono::{DateTime, Utc};
use longshore::nearest::nearest;
use longshore::{JobId, MAX_PAYLOAD, RetryPolicy, UniqueMode, When, builtin};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;

use super::find;
use crate::args::Enqueue;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

pub(super) use many::enqueue_many;

/// A job in the API's format. The kind's defaults apply to fields that are absent.
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
    when: StartTime,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) group: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tags: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    flags: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Box<RawValue>>,
}

/// When a job may start, in the API's format.
#[derive(Default, Serialize)]
pub(super) struct StartTime {
    #[serde(skip_serializing_if = "Option::is_none")]
    run_at: Option<DateTime<Utc>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    delay_seconds: Option<f64>,
}

impl From<Option<When>> for StartTime {
    fn from(when: Option<When>) -> Self {
        match when {
            None => StartTime::default(),
            Some(When::At(at)) => StartTime { run_at: Some(at), delay_seconds: None },
            Some(When::After(delay)) => StartTime { run_at: None, delay_seconds: Some(delay.as_secs_f64()) },
        }
    }
}

/// A number of seconds, or `none`.
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
            group: args.group,
            tags: args.tags,
            flags: args.flags,
            context: args.context,
            metadata: args.metadata.map(|text| parse_json("metadata", text)).transpose()?,
            ..NewJob::new(args.kind, read_json("payload", &args.payload)?)
        })
    }
}

/// The job of an enqueue request, and whether it was created or already existed.
#[derive(Deserialize)]
pub(super) struct Enqueued {
    #[serde(alias = "id")]
    job_id: JobId,
    /// Not in the job that an enqueue returns: there it is a header.
    #[serde(default)]
    how: String,
}

pub(super) async fn enqueue(endpoint: &Endpoint, args: Enqueue, out: &Out) -> Outcome {
    let (wait, kind, queue) = (args.wait, args.kind.clone(), args.queue.clone());
    let reply = endpoint.post(&["jobs"]).body(&NewJob::of(args)?).send().await?;
    let mut enqueued: Enqueued = reply.read()?;
    if let Some(how) = reply.enqueued_as {
        enqueued.how = how;
    }
    warn_if_unknown(endpoint, &kind, out).await;
    if let Some(queue) = queue {
        find::warn_of_new_queue(endpoint, &queue, out).await;
    }
    match wait {
        Some(limit) => wait::until_ended(endpoint, &enqueued, limit.0, out).await,
        None => {
            print(&enqueued, out);
            Ok(Code::Done)
        }
    }
}

/// Warns if the kind is not registered: it may be mistyped, or its first worker may not have
/// started yet. With a server there is no warning, because the server rejects unregistered
/// kinds unless it is configured to accept them.
pub(super) async fn warn_if_unknown(endpoint: &Endpoint, kind: &str, out: &Out) {
    if out.json || endpoint.client().is_none() || builtin::is_built_in(kind) {
        return;
    }
    // The job is already stored, so a failure to list the kinds is not an error.
    let Ok(reply) = super::kinds::all(endpoint, false).await else { return };
    let Ok(kinds) = reply.read::<Vec<find::Named>>() else { return };
    if !kinds.iter().any(|known| known.name == kind) {
        let mut known: Vec<&str> = kinds.iter().map(|known| known.name.as_str()).collect();
        builtin::names().for_each(|name| known.push(name));
        let meant =
            nearest(kind, known).map(|found| format!(" (did you mean `{found}`?)")).unwrap_or_default();
        out.note(format_args!(
            "warning: kind `{kind}` is not registered{meant}; its jobs wait until a worker handles it. \
             `longshore kinds list` shows the registered kinds"
        ));
    }
}

/// Prints the job's id and whether it was created or already existed.
pub(super) fn print(enqueued: &Enqueued, out: &Out) {
    if out.json {
        out.document(&json!({ "job_id": enqueued.job_id, "how": enqueued.how }))
    } else {
        out.line(format_args!("{} {}", enqueued.how, enqueued.job_id))
    }
}

/// Reads JSON that is given literally, as `@FILE` or as `-`. The JSON stays text, so that
/// numbers beyond the range of any Rust type are stored unchanged.
pub(super) fn read_json(field: &str, argument: &str) -> Result<Box<RawValue>, Failure> {
    parse_json(field, read_argument(argument)?)
}

fn parse_json(field: &str, text: String) -> Result<Box<RawValue>, Failure> {
    RawValue::from_string(text)
        .map_err(|error| Failure::usage(format_args!("{field}: not JSON: {error}; give any JSON value")))
}

fn read_argument(argument: &str) -> Result<String, Failure> {
    match argument.strip_prefix('@') {
        Some(path) => {
            let file = File::open(path).map_err(|error| unreadable(path, &error))?;
            read_text(path, file)
        }
        None if argument == "-" => read_text("standard input", io::stdin().lock()),
        None => Ok(argument.to_owned()),
    }
}

fn read_text(source: &str, input: impl Read) -> Result<String, Failure> {
    // White space around the JSON does not count, so valid input may be longer than a
    // payload. But endless input must be rejected at some point.
    const MAX_INPUT: usize = 2 * MAX_PAYLOAD;
    let mut text = String::new();
    let read = input.take(MAX_INPUT as u64 + 1).read_to_string(&mut text);
    match read {
        Ok(bytes) if bytes > MAX_INPUT => Err(Failure::usage(format_args!(
            "payload: {source} is too long; a payload has at most {MAX_PAYLOAD} bytes of JSON"
        ))),
        Ok(_) => Ok(text),
        Err(error) => Err(unreadable(source, &error)),
    }
}

fn unreadable(source: &str, error: &io::Error) -> Failure {
    Failure::usage(format_args!(
        "payload: cannot read {source}: {error}; give JSON, @FILE, or - for standard input"
    ))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_a_payload_is_not_changed() {
        assert_eq!(read_json("payload", " {\"a\": 1.00}\n").unwrap().get(), r#"{"a": 1.00}"#);
        let failure = read_json("payload", "{oops").unwrap_err();
        assert!(failure.to_string().starts_with("payload: not JSON"), "{failure}");
    }

    #[test]
    fn a_request_has_only_the_fields_that_were_given() {
        let job = NewJob::new("greet".into(), read_json("payload", "1.00").unwrap());
        assert_eq!(serde_json::to_string(&job).unwrap(), r#"{"kind":"greet","payload":1.00}"#);
    }

    #[test]
    fn endless_and_invalid_input_is_rejected_and_named() {
        let endless = read_text("standard input", io::repeat(b' ')).unwrap_err();
        assert!(endless.to_string().starts_with("payload: standard input is too long"), "{endless}");
        let broken = read_text("x.json", &b"\xff"[..]).unwrap_err();
        assert!(broken.to_string().starts_with("payload: cannot read x.json"), "{broken}");
        assert_eq!(broken.code, Code::Usage);
    }
}
