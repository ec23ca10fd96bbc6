//! `longshore flows`: enqueues, lists, shows and changes flows. `graph` draws them.

mod graph;

use std::fs::File;
use std::io::{self, Read};

use chrono::{DateTime, Utc};
use longshore::FlowId;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::repeat::repeat;
use crate::args::{FlowList, Flows};
use crate::endpoint::{Endpoint, Reply};
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Fit, Out, RawObject, Table, counted, quote};

use graph::Task;

/// The largest body that the API accepts.
const MAX_INPUT: u64 = 16 * 1024 * 1024;
/// How many jobs of a flow are read to show it.
const MAX_SHOWN: usize = 10_000;

/// A flow, in the API's format.
#[derive(Deserialize)]
struct Flow {
    id: FlowId,
    name: String,
    status: String,
    members: u64,
    open: u64,
    failed: u64,
    sealed: bool,
    cancelled: bool,
    idempotency_key: Option<String>,
    created_at: DateTime<Utc>,
    deadline: Option<DateTime<Utc>>,
    ended_at: Option<DateTime<Utc>>,
}

pub(super) async fn run(endpoint: &Endpoint, command: Flows, out: &Out) -> Outcome {
    match command {
        Flows::List(args) => repeat(&args.every, out, async |out| list(endpoint, &args, out).await).await,
        Flows::Show { id, every } => repeat(&every, out, async |out| show(endpoint, id, out).await).await,
        Flows::Enqueue { file } => enqueue(endpoint, &file, out).await,
        Flows::Add { id, file } => {
            let body = read(&file)?;
            let reply = endpoint.post(&["flows", &id.to_string(), "jobs"]).body(&body).send().await?;
            changed(&reply, out, |flow: &Flow| format!("the flow has {} now", counted(flow.members, "job")))
        }
        Flows::Seal(args) => {
            let reply = endpoint.post(&["flows", &args.id.to_string(), "seal"]).send().await?;
            changed(&reply, out, |flow: &Flow| format!("sealed {}", flow.id))
        }
        Flows::Cancel(args) => cancel(endpoint, args.id, out).await,
        Flows::Retry(args) => retry(endpoint, args.id, out).await,
    }
}

/// Prints the flow of a reply: JSON, or one line.
fn changed<Shown: DeserializeOwned>(reply: &Reply, out: &Out, line: impl Fn(&Shown) -> String) -> Outcome {
    if out.json {
        out.document(&reply.read::<RawObject>()?);
    } else {
        out.line(line(&reply.read()?));
    }
    Ok(Code::Done)
}

// ---- list --------------------------------------------------------------------

#[derive(Serialize)]
struct PageDocument {
    flows: Vec<RawObject>,
    next: Option<Uuid>,
}

async fn list(endpoint: &Endpoint, args: &FlowList, out: &Out) -> Outcome {
    let request = endpoint
        .get(&["flows"])
        .query("name", args.name.as_deref())
        .query("open", args.open.then_some(true))
        .query("limit", Some(args.limit))
        .query("cursor", args.cursor);
    let reply = request.send().await?;
    if out.json {
        out.document(&PageDocument { flows: reply.read()?, next: reply.next.map(|next| next.0) });
        return Ok(Code::Done);
    }
    let flows: Vec<Flow> = reply.read()?;
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("status", Fit::Whole),
        ("name", Fit::Cut),
        ("jobs", Fit::Whole),
        ("open", Fit::WholeOrOmitted),
        ("failed", Fit::WholeOrOmitted),
        ("age", Fit::WholeOrOmitted),
        ("deadline", Fit::WholeOrOmitted),
    ]);
    for flow in &flows {
        table.row([
            flow.id.to_string(),
            status(flow),
            flow.name.clone(),
            flow.members.to_string(),
            flow.open.to_string(),
            flow.failed.to_string(),
            out.age(flow.created_at),
            out.time(flow.deadline.filter(|_| flow.ended_at.is_none())),
        ]);
    }
    out.table(&table, "no flows match");
    if let Some(next) = reply.next {
        let mut line = "longshore flows list".to_owned();
        if let Some(name) = &args.name {
            line += &format!(" --name {}", quote(name));
        }
        if args.open {
            line += " --open";
        }
        if args.limit != 50 {
            line += &format!(" --limit {}", args.limit);
        }
        out.note(format_args!("next page: {line} --cursor {next}"));
    }
    Ok(Code::Done)
}

/// The status of a flow, and whether it is being cancelled.
fn status(flow: &Flow) -> String {
    match flow.cancelled && flow.ended_at.is_none() {
        true => format!("{} (cancelling)", flow.status),
        false => flow.status.clone(),
    }
}

// ---- show --------------------------------------------------------------------

#[derive(Serialize)]
struct FlowDocument {
    flow: RawObject,
    tasks: Vec<RawObject>,
    next: Option<Uuid>,
}

async fn show(endpoint: &Endpoint, id: FlowId, out: &Out) -> Outcome {
    let reply =
        endpoint.get(&["flows", &id.to_string()]).send().await.map_err(|failure| match failure.code {
            Code::NotFound => Failure::new(
                Code::NotFound,
                format_args!("{failure}; `longshore flows list` shows the flows"),
            ),
            _ => failure,
        })?;
    let tasks = tasks(endpoint, id).await?;
    if out.json {
        let next = tasks.next.map(|next| next.0);
        out.document(&FlowDocument { flow: reply.read()?, tasks: tasks.read()?, next });
        return Ok(Code::Done);
    }
    let flow: Flow = reply.read()?;
    let open = if flow.sealed { "" } else { "; not sealed: more can be added" };
    let fields = [
        ("flow", Some(flow.id.to_string())),
        ("name", Some(flow.name.clone())),
        ("status", Some(status(&flow))),
        (
            "jobs",
            Some(format!(
                "{}, of which {} have not ended and {} failed{open}",
                flow.members, flow.open, flow.failed
            )),
        ),
        ("created", Some(out.time(flow.created_at))),
        ("deadline", flow.deadline.map(|at| out.time(at))),
        ("ended", flow.ended_at.map(|at| out.time(at))),
        ("key", flow.idempotency_key),
    ];
    for (name, value) in fields {
        if let Some(value) = value {
            out.line(format_args!("{name:<11}{value}"));
        }
    }
    out.line("");
    let shown: Vec<Task> = tasks.read()?;
    out.table(&graph::draw(&shown), "the flow has no jobs, or they are no longer kept");
    if tasks.next.is_some() {
        out.note(format_args!(
            "only the first {} jobs are drawn; `GET /flows/{id}/tasks` lists all",
            shown.len()
        ));
    }
    Ok(Code::Done)
}

/// The jobs of a flow, up to [`MAX_SHOWN`].
async fn tasks(endpoint: &Endpoint, id: FlowId) -> Result<Reply, Failure> {
    let get = async |cursor: Option<longshore::JobId>| {
        let request = endpoint.get(&["flows", &id.to_string(), "tasks"]).query("limit", Some(1000));
        request.query("cursor", cursor).send().await
    };
    let mut reply = get(None).await?;
    while let Some(next) = reply.next.filter(|_| reply.items().is_ok_and(|items| items < MAX_SHOWN)) {
        reply.append(get(Some(next)).await?)?;
    }
    Ok(reply)
}

// ---- changes -----------------------------------------------------------------

async fn enqueue(endpoint: &Endpoint, file: &str, out: &Out) -> Outcome {
    let reply = endpoint.post(&["flows"]).body(&read(file)?).send().await?;
    let how = reply.enqueued_as.clone().unwrap_or_else(|| "created".into());
    changed(&reply, out, |flow: &Enqueued| {
        let jobs = flow.members.map(|members| format!(" ({})", counted(members, "job")));
        format!("{how} {}{}", flow.id, jobs.unwrap_or_default())
    })
}

/// The flow of an enqueue request.
#[derive(Deserialize)]
struct Enqueued {
    id: FlowId,
    /// Absent if the flow existed and the token may not read it.
    members: Option<u64>,
}

/// Reads one JSON document from a file or from standard input. The JSON stays text, so that payloads are
/// stored unchanged.
fn read(path: &str) -> Result<Box<RawValue>, Failure> {
    let source = if path == "-" { "standard input" } else { path };
    let unreadable = |error: io::Error| {
        Failure::usage(format_args!("cannot read {source}: {error}; give a file, or - for standard input"))
    };
    let mut text = String::new();
    let input: Box<dyn Read> = match path {
        "-" => Box::new(io::stdin().lock()),
        path => Box::new(File::open(path).map_err(unreadable)?),
    };
    let bytes = input.take(MAX_INPUT + 1).read_to_string(&mut text).map_err(unreadable)?;
    if bytes as u64 > MAX_INPUT {
        return Err(Failure::usage(format_args!(
            "{source} is too long; a request has at most {MAX_INPUT} bytes. Leave the flow open (`\"sealed\": false`) and \
             add jobs with `longshore flows add`"
        )));
    }
    RawValue::from_string(text).map_err(|error| {
        Failure::usage(format_args!("{source}: not JSON: {error}; `--help` shows an example"))
    })
}

/// The response to a cancel request.
#[derive(Deserialize)]
struct Cancelled {
    cancelled: u64,
    requested: u64,
}

async fn cancel(endpoint: &Endpoint, id: FlowId, out: &Out) -> Outcome {
    let reply = endpoint.post(&["flows", &id.to_string(), "cancel"]).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
        return Ok(Code::Done);
    }
    let Cancelled { cancelled, requested } = reply.read()?;
    let stopping = match requested {
        0 => String::new(),
        requested => format!("; {} requested to stop", counted(requested, "running job")),
    };
    out.line(format_args!("cancelled {id}: {}{stopping}", counted(cancelled, "waiting job")));
    Ok(Code::Done)
}

/// The response to a retry request.
#[derive(Deserialize)]
struct Retried {
    reopened: u64,
}

async fn retry(endpoint: &Endpoint, id: FlowId, out: &Out) -> Outcome {
    let reply = endpoint.post(&["flows", &id.to_string(), "retry"]).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
        return Ok(Code::Done);
    }
    match reply.read::<Retried>()?.reopened {
        0 => out.line(format_args!("nothing to retry in {id}: no job has ended without success")),
        reopened => out.line(format_args!("retried {id}: {} run again", counted(reopened, "job"))),
    }
    Ok(Code::Done)
}
