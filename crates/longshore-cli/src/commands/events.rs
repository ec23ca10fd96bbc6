//! `longshore events`: what happens, as it happens, a line for each event.

mod sse;

use std::time::Duration;

use chrono::Utc;
use longshore::worker::Signals;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::endpoint::{Endpoint, Follow};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, instant};

use sse::{Event, Parser};

/// What the API asks of clients that lost it.
const COME_BACK: Duration = Duration::from_secs(2);
/// The API breaks its silence every ten seconds.
const SILENCE: Duration = Duration::from_secs(30);

/// An event for programs.
#[derive(Serialize)]
struct Document<'a> {
    id: Option<&'a str>,
    event: &'a str,
    data: &'a RawValue,
}

/// Follows until told to end, or nobody reads.
pub(super) async fn run(endpoint: &Endpoint, out: &Out) -> Outcome {
    let mut signals = Signals::new()?;
    let out = out.appended();
    tokio::select! {
        outcome = follow(endpoint, &out) => outcome,
        () = signals.next() => Ok(Code::Done),
    }
}

async fn follow(endpoint: &Endpoint, out: &Out) -> Outcome {
    let mut seen: Option<String> = None;
    // Whoever mistyped an address should hear so; later on it is waited for.
    let mut source = endpoint.follow(&["events"], None).await?;
    if !out.json {
        out.note("what happens from now on; Ctrl-C ends it");
    }
    loop {
        let lost = read(&mut source, &mut seen, out).await;
        if out.reader_left() {
            return Ok(Code::Done);
        }
        out.note(format_args!(
            "{}; coming back",
            lost.unwrap_or_else(|| "the server ended the events".into())
        ));
        source = come_back(endpoint, seen.as_deref()).await?;
    }
}

/// Shows what comes until no more does; why, if anybody knows.
async fn read(source: &mut Follow, seen: &mut Option<String>, out: &Out) -> Option<String> {
    let mut parser = Parser::default();
    loop {
        let chunk = match tokio::time::timeout(SILENCE, source.next()).await {
            Err(_) => return Some("the server has fallen silent".into()),
            Ok(Err(failure)) => return Some(failure.to_string()),
            Ok(Ok(None)) => return None,
            Ok(Ok(Some(chunk))) => chunk,
        };
        for event in parser.push(&chunk) {
            show(&event, out);
            if event.id.is_some() {
                *seen = event.id;
            }
            if out.reader_left() {
                return None;
            }
        }
    }
}

/// A server that is restarted is waited for; one that refuses is not.
async fn come_back(endpoint: &Endpoint, seen: Option<&str>) -> Result<Follow, Failure> {
    loop {
        tokio::time::sleep(COME_BACK).await;
        match endpoint.follow(&["events"], seen).await {
            Err(failure) if failure.code == Code::Unavailable => {}
            answer => return answer,
        }
    }
}

fn show(event: &Event, out: &Out) {
    if out.json {
        match serde_json::from_str(&event.data) {
            Ok(data) => out.document(&Document { id: event.id.as_deref(), event: &event.name, data }),
            Err(error) => out.note(format_args!("error: an event is not JSON: {error}")),
        }
    } else {
        out.line(format_args!("{}  {}", instant(Utc::now()), sentence(event)))
    }
}

/// An event in words. One that this program does not know is shown as it came.
fn sentence(event: &Event) -> String {
    let data: Value = serde_json::from_str(&event.data).unwrap_or_default();
    let text = |field: &str| data[field].as_str().unwrap_or("-").to_owned();
    let number = |field: &str| data[field].as_u64().unwrap_or(0);
    match event.name.as_str() {
        "job" => {
            let stops = if data["cancel_requested"] == true { ", told to stop" } else { "" };
            format!(
                "job {} {}{stops}  {} in {}, attempts {}",
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
            format!("worker {} {}  takes {}", text("name"), text("state"), queues.join(", "))
        }
        "gap" => "more jobs were made than are told of one by one".into(),
        "reset" => "some events were missed; look again at what matters".into(),
        name => format!("{name} {}", event.data),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_is_a_sentence() {
        let cases = [
            (
                "job",
                r#"{"id":"7","kind":"greet","queue":"mail","status":"running","attempts":2,"cancel_requested":true}"#,
                "job 7 running, told to stop  greet in mail, attempts 2",
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
                "worker crane stale  takes mail, slow",
            ),
            ("gap", "{}", "more jobs were made than are told of one by one"),
            ("reset", "{}", "some events were missed; look again at what matters"),
            ("moon", r#"{"phase":1}"#, r#"moon {"phase":1}"#),
        ];
        for (name, data, told) in cases {
            let event = Event { id: None, name: name.into(), data: data.into() };
            assert_eq!(sentence(&event), told);
        }
    }
}
