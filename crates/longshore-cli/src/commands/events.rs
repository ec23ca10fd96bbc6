//! `longshore events`: prints one line per event and reconnects when the server goes away.

mod sse;

use std::time::Duration;

use chrono::Utc;
use longshore::worker::Signals;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::endpoint::{Endpoint, EventStream};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, instant};

use sse::{Event, Parser};

/// The reconnect delay that the API recommends.
const RECONNECT_DELAY: Duration = Duration::from_secs(2);
/// How long the stream may be silent. The API sends a keep-alive every ten seconds.
const MAX_SILENCE: Duration = Duration::from_secs(30);

/// An event in JSON output.
#[derive(Serialize)]
struct Document<'a> {
    id: Option<&'a str>,
    event: &'a str,
    data: &'a RawValue,
}

/// Follows events until a signal, or until the reader closes the pipe.
pub(super) async fn run(endpoint: &Endpoint, out: &Out) -> Outcome {
    let mut signals = Signals::new()?;
    let out = out.appended();
    tokio::select! {
        outcome = follow(endpoint, &out) => outcome,
        () = signals.next() => Ok(Code::Done),
    }
}

async fn follow(endpoint: &Endpoint, out: &Out) -> Outcome {
    let mut last_id: Option<String> = None;
    // The first connection is not retried, because the address may be mistyped.
    let mut stream = endpoint.follow(&["events"], None).await?;
    if !out.json {
        out.note("waiting for events; press Ctrl-C to stop");
    }
    loop {
        let cause = read(&mut stream, &mut last_id, out).await;
        if out.is_closed() {
            return Ok(Code::Done);
        }
        out.note(format_args!(
            "{}; reconnecting",
            cause.unwrap_or_else(|| "the server closed the event stream".into())
        ));
        // The server counts streams, and this one may still be open.
        drop(stream);
        stream = reconnect(endpoint, last_id.as_deref()).await?;
    }
}

/// Prints events until the stream ends. Returns the cause, or `None` if the server closed the
/// stream.
async fn read(stream: &mut EventStream, last_id: &mut Option<String>, out: &Out) -> Option<String> {
    let mut parser = Parser::default();
    loop {
        let chunk = match tokio::time::timeout(MAX_SILENCE, stream.next()).await {
            Err(_) => return Some("the server sends nothing".into()),
            Ok(Err(failure)) => return Some(failure.to_string()),
            Ok(Ok(None)) => return None,
            Ok(Ok(Some(chunk))) => chunk,
        };
        let events = parser.push(&chunk);
        if parser.is_too_large() {
            return Some("the server sends an event without an end".into());
        }
        for event in events {
            show(&event, out);
            if event.id.is_some() {
                *last_id = event.id;
            }
            if out.is_closed() {
                return None;
            }
        }
    }
}

/// Retries while the server is unavailable; any other failure is final.
async fn reconnect(endpoint: &Endpoint, last_id: Option<&str>) -> Result<EventStream, Failure> {
    loop {
        tokio::time::sleep(RECONNECT_DELAY).await;
        match endpoint.follow(&["events"], last_id).await {
            Err(failure) if failure.code == Code::Unavailable => {}
            result => return result,
        }
    }
}

fn show(event: &Event, out: &Out) {
    if out.json {
        match serde_json::from_str(&event.data) {
            Ok(data) => out.document(&Document { id: event.id.as_deref(), event: &event.name, data }),
            Err(error) => out.note(format_args!("error: received an event that is not JSON: {error}")),
        }
    } else {
        out.line(format_args!("{}  {}", instant(Utc::now()), describe(event)))
    }
}

/// An event as text. An event of an unknown type is shown unchanged.
fn describe(event: &Event) -> String {
    let data: Value = serde_json::from_str(&event.data).unwrap_or_default();
    let text = |field: &str| data[field].as_str().unwrap_or("-").to_owned();
    let number = |field: &str| data[field].as_u64().unwrap_or(0);
    match event.name.as_str() {
        "job" => {
            let cancel = if data["cancel_requested"] == true { ", cancel requested" } else { "" };
            format!(
                "job {} {}{cancel}  {} in {}, attempts {}",
                text("id"),
                text("status"),
                text("kind"),
                text("queue"),
                number("attempts")
            )
        }
        "job_removed" => format!("job {} removed  {} in {}", text("id"), text("kind"), text("queue")),
        "queue" => {
            let paused = if data["paused"] == true { ", paused" } else { "" };
            let about = if data["waiting_estimated"] == true { "~" } else { "" };
            let limit = data["limit"].as_u64().map(|limit| format!(", limit {limit}")).unwrap_or_default();
            let (waiting, running) = (number("waiting"), number("running"));
            format!("queue {}  waiting {about}{waiting}, running {running}{limit}{paused}", text("name"))
        }
        "worker" => {
            let queues: Vec<&str> =
                data["queues"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            format!("worker {} {}  queues {}", text("name"), text("state"), queues.join(", "))
        }
        "gap" => "too many new jobs to show each one".into(),
        "reset" => "some events were missed; list the jobs again to see the current state".into(),
        name => format!("{name} {}", event.data),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_described() {
        let cases = [
            (
                "job",
                r#"{"id":"7","kind":"greet","queue":"mail","status":"running","attempts":2,"cancel_requested":true}"#,
                "job 7 running, cancel requested  greet in mail, attempts 2",
            ),
            ("job_removed", r#"{"id":"7","kind":"greet","queue":"mail"}"#, "job 7 removed  greet in mail"),
            (
                "queue",
                r#"{"name":"mail","paused":true,"limit":3,"waiting":5,"waiting_estimated":true,"running":1}"#,
                "queue mail  waiting ~5, running 1, limit 3, paused",
            ),
            (
                "worker",
                r#"{"id":"9","name":"crane","queues":["mail","slow"],"state":"stale"}"#,
                "worker crane stale  queues mail, slow",
            ),
            ("gap", "{}", "too many new jobs to show each one"),
            ("reset", "{}", "some events were missed; list the jobs again to see the current state"),
            ("moon", r#"{"phase":1}"#, r#"moon {"phase":1}"#),
        ];
        for (name, data, expected) in cases {
            let event = Event { id: None, name: name.into(), data: data.into() };
            assert_eq!(describe(&event), expected);
        }
    }
}
