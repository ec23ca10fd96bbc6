//! `longshore operations`: lists, shows, stops and resumes changes of many jobs.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::OperationId;
use longshore::worker::Signals;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::repeat::repeat;
use crate::args::{OperationList, Operations};
use crate::endpoint::{Endpoint, Reply};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, RawObject, Table, counted};

/// How often `--follow` reads the operation.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(500);

/// An operation, in the API's format.
#[derive(Deserialize)]
struct Operation {
    id: OperationId,
    action: String,
    state: String,
    filter: Option<Box<RawValue>>,
    queues: Option<Vec<String>>,
    expected: Option<u64>,
    examined: u64,
    changed: u64,
    skipped: u64,
    error: Option<String>,
    created_at: DateTime<Utc>,
    created_by: Option<String>,
    updated_at: DateTime<Utc>,
    ended_at: Option<DateTime<Utc>>,
}

pub(super) async fn run(endpoint: &Endpoint, command: Operations, out: &Out) -> Outcome {
    match command {
        Operations::List(args) => {
            repeat(&args.every, out, async |out| list(endpoint, &args, out).await).await
        }
        Operations::Show { id, follow: false } => show(&get(endpoint, id).await?, out),
        Operations::Show { id, follow: true } => {
            let (mut signals, out) = (Signals::new()?, out.appended());
            tokio::select! {
                ended = follow(endpoint, id, &out) => ended,
                () = signals.next() => Ok(Code::Done),
            }
        }
        Operations::Stop(args) => {
            let reply = endpoint.post(&["operations", &args.id.to_string(), "stop"]).send().await?;
            changed(&reply, out)
        }
        Operations::Resume(args) => {
            let reply = endpoint.post(&["operations", &args.id.to_string(), "resume"]).send().await?;
            changed(&reply, out)
        }
    }
}

async fn get(endpoint: &Endpoint, id: OperationId) -> Result<Reply, Failure> {
    endpoint.get(&["operations", &id.to_string()]).send().await.map_err(|failure| match failure.code {
        Code::NotFound => Failure::new(
            Code::NotFound,
            format_args!("{failure}; `longshore operations list` shows the operations"),
        ),
        _ => failure,
    })
}

/// Prints the operation of a reply: JSON, or one line.
fn changed(reply: &Reply, out: &Out) -> Outcome {
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        let operation: Operation = reply.read()?;
        out.line(format_args!("{} {}: {}", operation.state, operation.id, progress(&operation)));
    }
    Ok(Code::Done)
}

/// How far an operation is.
fn progress(operation: &Operation) -> String {
    let Operation { examined, changed, skipped, .. } = operation;
    match operation.expected {
        Some(expected) => format!("{examined} of {expected} jobs; {changed} changed, {skipped} skipped"),
        None => format!("{}; {changed} changed, {skipped} skipped", counted(*examined, "job")),
    }
}

// ---- list --------------------------------------------------------------------

#[derive(Serialize)]
struct PageDocument {
    operations: Vec<RawObject>,
    next: Option<Uuid>,
}

async fn list(endpoint: &Endpoint, args: &OperationList, out: &Out) -> Outcome {
    let state = args.state.map(|state| state.as_str());
    let request = endpoint
        .get(&["operations"])
        .query("state", state)
        .query("limit", Some(args.limit))
        .query("cursor", args.cursor);
    let reply = request.send().await?;
    if out.json {
        out.document(&PageDocument { operations: reply.read()?, next: reply.next.map(|next| next.0) });
        return Ok(Code::Done);
    }
    let operations: Vec<Operation> = reply.read()?;
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("action", Fit::Whole),
        ("state", Fit::Whole),
        ("jobs", Fit::Whole),
        ("changed", Fit::WholeOrOmittedFirst),
        ("skipped", Fit::WholeOrOmittedFirst),
        ("age", Fit::WholeOrOmittedFirst),
        ("filter", Fit::CutOrOmitted),
    ]);
    for operation in &operations {
        table.row([
            operation.id.to_string(),
            operation.action.clone(),
            operation.state.clone(),
            match operation.expected {
                Some(expected) => format!("{} of {expected}", operation.examined),
                None => operation.examined.to_string(),
            },
            operation.changed.to_string(),
            operation.skipped.to_string(),
            out.age(operation.created_at),
            selection(operation),
        ]);
    }
    out.table(&table, "no operations match");
    if let Some(next) = reply.next {
        let mut line = "longshore operations list".to_owned();
        if let Some(state) = state {
            line += &format!(" --state {state}");
        }
        if args.limit != 50 {
            line += &format!(" --limit {}", args.limit);
        }
        out.note(format_args!("next page: {line} --cursor {next}"));
    }
    Ok(Code::Done)
}

/// Which jobs an operation changes.
fn selection(operation: &Operation) -> String {
    operation.filter.as_ref().map_or_else(|| "a list of ids".into(), |filter| filter.get().to_owned())
}

// ---- show --------------------------------------------------------------------

fn show(reply: &Reply, out: &Out) -> Outcome {
    if out.json {
        out.document(&reply.read::<RawObject>()?);
        return Ok(Code::Done);
    }
    let operation: Operation = reply.read()?;
    let fields = [
        ("operation", Some(operation.id.to_string())),
        ("action", Some(operation.action.clone())),
        ("state", Some(operation.state.clone())),
        ("progress", Some(progress(&operation))),
        ("filter", Some(selection(&operation))),
        ("queues", operation.queues.as_ref().map(|queues| queues.join(", "))),
        ("error", operation.error.clone()),
        ("started", Some(out.time(operation.created_at))),
        ("started by", operation.created_by.clone()),
        ("updated", Some(out.time(operation.updated_at))),
        ("ended", operation.ended_at.map(|at| out.time(at))),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            out.line(format_args!("{name:<11}{value}"));
        }
    }
    Ok(Code::Done)
}

/// Prints the operation whenever it has changed, until it no longer runs.
async fn follow(endpoint: &Endpoint, id: OperationId, out: &Out) -> Outcome {
    let mut shown = None;
    loop {
        let reply = match get(endpoint, id).await {
            // The operation continues while the server restarts.
            Err(failure) if failure.code == Code::Unavailable && shown.is_some() => {
                out.note(format_args!("error: {failure}; trying again"));
                tokio::time::sleep(FOLLOW_INTERVAL).await;
                continue;
            }
            reply => reply?,
        };
        let operation: Operation = reply.read()?;
        let now = (operation.state.clone(), operation.examined, operation.error.clone());
        if shown.as_ref() != Some(&now) {
            if out.json {
                out.document(&reply.read::<RawObject>()?);
            } else {
                let error = operation.error.as_ref().map_or_else(String::new, |error| format!(": {error}"));
                out.line(format_args!("{}  {}{error}", operation.state, progress(&operation)));
            }
            shown = Some(now);
        }
        match operation.state.as_str() {
            _ if out.is_closed() => return Ok(Code::Done),
            "running" => tokio::time::sleep(FOLLOW_INTERVAL).await,
            "done" => return Ok(Code::Done),
            _ => return Ok(Code::EndedWithoutSuccess),
        }
    }
}
