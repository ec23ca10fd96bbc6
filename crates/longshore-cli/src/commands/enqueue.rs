//! `longshore enqueue`, and how payloads are read.

use std::fs::File;
use std::io::{self, Read};

use longshore::enqueue::MAX_PAYLOAD;
use longshore::{Client, Enqueued, EnqueuedAs, NewJob, When};
use serde_json::json;
use serde_json::value::RawValue;

use crate::args::Enqueue;
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

pub(crate) async fn enqueue(client: &Client, args: Enqueue, out: Out) -> Outcome {
    let queue = args.queue.clone();
    let due_now = args.when.when().is_none();
    let enqueued = client.enqueue(new_job(args)?).await?;
    if due_now && enqueued.how != EnqueuedAs::Existing {
        // The client announces new work in the background, and this process
        // may be gone before it has. A hint: polling finds the job anyway.
        let _ = client.store().wake(&[queue]).await;
    }
    tell(&enqueued, out);
    Ok(Code::Done)
}

/// Says which job it is now, and how it came to be.
pub(super) fn tell(enqueued: &Enqueued, out: Out) {
    match out.json {
        true => out.document(&json!({ "job_id": enqueued.id, "how": enqueued.how })),
        false => out.line(format_args!("{} {}", how(enqueued.how), enqueued.id)),
    }
}

fn how(how: EnqueuedAs) -> &'static str {
    match how {
        EnqueuedAs::Created => "created",
        EnqueuedAs::Existing => "existing",
        EnqueuedAs::Replaced => "replaced",
    }
}

fn new_job(args: Enqueue) -> Result<NewJob, Failure> {
    let when = args.when.when();
    let mut job = NewJob::from_json(args.kind, &read_payload(&args.payload)?)
        .queue(args.queue)
        .priority(args.priority)
        .max_attempts(args.max_attempts)
        .timeout(args.timeout.0)
        .tags(args.tags)
        .flags(args.flags);
    match when {
        Some(When::After(delay)) => job = job.delay(delay),
        Some(When::At(at)) => job = job.run_at(at),
        None => {}
    }
    if let Some(key) = args.idempotency_key {
        job = job.idempotency_key(key);
    }
    if let Some(key) = args.unique_key {
        job = job.unique_key(key, args.unique_mode);
    }
    if let Some(policy) = args.retry {
        job = job.retry(policy);
    }
    if let Some(context) = args.context {
        job = job.context(context);
    }
    if let Some(metadata) = args.metadata {
        let metadata = RawValue::from_string(metadata).map_err(|error| {
            Failure::usage(format_args!("metadata: not JSON: {error}; give any JSON value"))
        })?;
        job = job.metadata(metadata);
    }
    Ok(job)
}

/// Reads `JSON`, `@FILE` or `-`. Whether it is JSON is the library's question.
pub(super) fn read_payload(given: &str) -> Result<String, Failure> {
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
        assert_eq!(read_payload(r#"{"a": 1}"#).unwrap(), r#"{"a": 1}"#);
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
