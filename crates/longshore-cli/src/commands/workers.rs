//! `longshore workers` and `longshore sweep`: lists worker processes and recovers the jobs of
//! dead ones.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Deserialize;
use serde_json::json;
use uuid::Uuid;

use super::repeat::repeat;
use crate::args::{Sweep, Workers};
use crate::duration;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Outcome};
use crate::output::{Fit, Out, RawObject, Table, counted, or_dash};

#[derive(Deserialize)]
struct Worker {
    id: Uuid,
    name: String,
    queues: Vec<String>,
    kinds: Option<Vec<String>>,
    concurrency: u32,
    stale_after_seconds: f64,
    started_at: DateTime<Utc>,
    heartbeat_at: DateTime<Utc>,
    dead_at: Option<DateTime<Utc>>,
    stale: bool,
    running: u64,
    // Servers before these fields existed do not send them.
    #[serde(default)]
    host: Option<String>,
    #[serde(default)]
    pid: Option<u32>,
    #[serde(default)]
    version: Option<String>,
}

/// The part of a worker that says whether it runs jobs.
#[derive(Deserialize)]
struct Handles {
    kinds: Option<Vec<String>>,
}

/// Whether a worker runs no jobs: a server that only does upkeep.
fn is_server(kinds: Option<&[String]>) -> bool {
    kinds.is_some_and(<[String]>::is_empty)
}

pub(super) async fn run(endpoint: &Endpoint, command: Workers, out: &Out) -> Outcome {
    match command {
        Workers::List { threshold, all, every } => {
            let which = if all { Which::All } else { Which::RunJobs };
            repeat(&every, out, async |out| list(endpoint, threshold, which, out).await).await
        }
    }
}

/// Which workers are listed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    RunJobs,
    /// Also servers that only do upkeep.
    All,
}

async fn list(endpoint: &Endpoint, threshold: Option<Duration>, which: Which, out: &Out) -> Outcome {
    let threshold = threshold.map(|threshold| threshold.as_secs_f64());
    let reply = endpoint.get(&["workers"]).query("threshold_seconds", threshold).send().await?;
    if out.json {
        let handles: Vec<Handles> = reply.read()?;
        let listed = handles.iter().map(|worker| which == Which::All || !is_server(worker.kinds.as_deref()));
        let workers: Vec<RawObject> = reply.read()?;
        let workers = workers.into_iter().zip(listed).filter_map(|(worker, listed)| listed.then_some(worker));
        out.document(&workers.collect::<Vec<_>>());
        return Ok(Code::Done);
    }
    let (servers, workers): (Vec<Worker>, Vec<Worker>) =
        reply.read::<Vec<Worker>>()?.into_iter().partition(|worker| is_server(worker.kinds.as_deref()));
    let when_empty = match (which, servers.len() as u64) {
        (Which::RunJobs, n @ 1..) => format!("no workers; {} only upkeep (see --all)", does(n)),
        _ => "no workers".to_owned(),
    };
    let listed = if which == Which::All { workers.into_iter().chain(servers).collect() } else { workers };
    out.table(&table(&listed, out), &when_empty);
    Ok(Code::Done)
}

fn does(servers: u64) -> String {
    format!("{} {}", counted(servers, "server"), if servers == 1 { "does" } else { "do" })
}

fn table(workers: &[Worker], out: &Out) -> Table {
    let mut table = Table::new([
        ("name", Fit::CutLast),
        ("state", Fit::Whole),
        ("running", Fit::Whole),
        ("host", Fit::Cut),
        ("pid", Fit::Whole),
        ("version", Fit::WholeOrOmitted),
        ("queues", Fit::CutOrOmitted),
        ("started", Fit::WholeOrOmitted),
        ("heartbeat", Fit::WholeOrOmitted),
        ("stale after", Fit::WholeOrOmitted),
        ("kinds", Fit::CutOrOmitted),
        ("id", Fit::WholeOrOmitted),
    ]);
    for worker in workers {
        let server = is_server(worker.kinds.as_deref());
        let kinds = worker.kinds.as_ref().map_or_else(|| "any".into(), |kinds| kinds.join(","));
        table.row([
            worker.name.clone(),
            state(worker),
            format!("{}/{}", worker.running, worker.concurrency),
            or_dash(worker.host.as_deref()).to_owned(),
            worker.pid.map_or_else(|| "-".into(), |pid| pid.to_string()),
            or_dash(worker.version.as_deref()).to_owned(),
            if server { "-".into() } else { worker.queues.join(",") },
            out.time(worker.started_at),
            out.time(worker.heartbeat_at),
            duration::show_seconds(worker.stale_after_seconds),
            if server { "-".into() } else { kinds },
            worker.id.to_string(),
        ]);
    }
    table
}

/// `alive`, `dead`, or how long a stale worker has sent no heartbeat.
fn state(worker: &Worker) -> String {
    if worker.dead_at.is_some() {
        "dead".into()
    } else if worker.stale {
        format!("silent for {} s", (Utc::now() - worker.heartbeat_at).num_seconds().max(0))
    } else {
        "alive".into()
    }
}

/// What a sweep did, or would do in a dry run.
#[derive(Deserialize)]
struct Swept {
    workers: Vec<Uuid>,
    recovered: u64,
    skipped: u64,
    /// Absent in the replies of older servers.
    #[serde(default)]
    deferred: u64,
}

pub(super) async fn sweep(endpoint: &Endpoint, args: &Sweep, out: &Out) -> Outcome {
    let mut body = json!({
        "threshold_seconds": args.threshold.map(|threshold| threshold.as_secs_f64()),
        "delay_seconds": args.recovery_delay.map(|delay| delay.as_secs_f64()),
        "dry_run": args.dry_run,
    });
    // Sent only if they are set: an older server does not know these fields.
    if let Some(flags) = &args.resilient_flags {
        body["resilient_flags"] = flags.iter().filter(|flag| !flag.is_empty()).cloned().collect();
    }
    if let Some(factor) = args.resilient_factor {
        body["resilient_factor"] = factor.into();
    }
    let reply = endpoint.post(&["sweep"]).body(&body).send().await?;
    if out.json {
        out.document(&reply.read::<RawObject>()?);
        return Ok(Code::Done);
    }
    let swept: Swept = reply.read()?;
    let verb = if args.dry_run { "would recover" } else { "recovered" };
    let skipped = if args.dry_run || swept.skipped == 0 {
        String::new()
    } else {
        format!("; skipped {}", swept.skipped)
    };
    let deferred = if swept.deferred == 0 {
        String::new()
    } else {
        format!(
            "; deferred {}, which are locked or rejected by the database; sweep again later",
            swept.deferred
        )
    };
    out.line(format_args!(
        "{verb} {} from {}{skipped}{deferred}",
        counted(swept.recovered, "job"),
        counted(swept.workers.len() as u64, "worker"),
    ));
    for worker in &swept.workers {
        out.line(format_args!("worker {worker}"));
    }
    Ok(Code::Done)
}
