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
use crate::output::{Fit, Out, RawObject, Table, counted, instant};

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
}

pub(super) async fn run(endpoint: &Endpoint, command: Workers, out: &Out) -> Outcome {
    match command {
        Workers::List { threshold, every } => {
            repeat(&every, out, async |out| list(endpoint, threshold, out).await).await
        }
    }
}

async fn list(endpoint: &Endpoint, threshold: Option<Duration>, out: &Out) -> Outcome {
    let threshold = threshold.map(|threshold| threshold.as_secs_f64());
    let reply = endpoint.get(&["workers"]).query("threshold_seconds", threshold).send().await?;
    if out.json {
        out.document(&reply.read::<Vec<RawObject>>()?);
    } else {
        out.table(&table(&reply.read::<Vec<Worker>>()?), "no workers");
    }
    Ok(Code::Done)
}

fn table(workers: &[Worker]) -> Table {
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("name", Fit::Cut),
        ("state", Fit::Whole),
        ("running", Fit::Whole),
        ("heartbeat at", Fit::WholeOrOmitted),
        ("started at", Fit::WholeOrOmitted),
        ("stale after", Fit::WholeOrOmitted),
        ("queues", Fit::CutOrOmitted),
        ("kinds", Fit::CutOrOmitted),
    ]);
    for worker in workers {
        table.row([
            worker.id.to_string(),
            worker.name.clone(),
            state(worker).to_owned(),
            format!("{}/{}", worker.running, worker.concurrency),
            instant(worker.heartbeat_at),
            instant(worker.started_at),
            duration::show_seconds(worker.stale_after_seconds),
            worker.queues.join(","),
            worker.kinds.as_ref().map_or_else(|| "any".into(), |kinds| kinds.join(",")),
        ]);
    }
    table
}

fn state(worker: &Worker) -> &'static str {
    if worker.dead_at.is_some() {
        "dead"
    } else if worker.stale {
        "stale"
    } else {
        "alive"
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
        "delay_seconds": args.recovery_delay.as_secs_f64(),
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
