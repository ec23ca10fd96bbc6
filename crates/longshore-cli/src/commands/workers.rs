//! `longshore workers` and `longshore sweep`: who works, and whose jobs are to
//! be recovered.

use std::time::Duration;

use longshore::store::WorkerRecord;
use longshore::{Client, SweepMode, SweepOptions};

use crate::args::{Sweep, Workers};
use crate::duration;
use crate::failure::{Code, Outcome};
use crate::output::{Fit, Out, Table, instant};

pub(super) async fn run(client: &Client, command: Workers, out: Out) -> Outcome {
    match command {
        Workers::List { threshold } => list(client, threshold, out).await,
    }
}

async fn list(client: &Client, threshold: Option<Duration>, out: Out) -> Outcome {
    let workers = client.store().workers(threshold).await?;
    match out.json {
        true => out.document(&workers),
        false => out.table(&table(&workers), "no workers are known"),
    }
    Ok(Code::Done)
}

fn table(workers: &[WorkerRecord]) -> Table {
    let mut table = Table::new([
        ("id", Fit::Whole),
        ("name", Fit::Cut),
        ("state", Fit::Whole),
        ("running", Fit::Whole),
        ("heartbeat at", Fit::WholeOrOut),
        ("started at", Fit::WholeOrOut),
        ("stale after", Fit::WholeOrOut),
        ("queues", Fit::CutOrOut),
        ("kinds", Fit::CutOrOut),
    ]);
    for worker in workers {
        table.row([
            worker.id.to_string(),
            worker.name.clone(),
            state(worker).to_owned(),
            format!("{}/{}", worker.running, worker.concurrency),
            instant(worker.heartbeat_at),
            instant(worker.started_at),
            duration::show(worker.stale_after),
            worker.queues.join(","),
            worker.kinds.as_ref().map_or_else(|| "any".into(), |kinds| kinds.join(",")),
        ]);
    }
    table
}

fn state(worker: &WorkerRecord) -> &'static str {
    match worker {
        _ if worker.dead_at.is_some() => "dead",
        _ if worker.stale => "stale",
        _ => "alive",
    }
}

pub(super) async fn sweep(client: &Client, args: &Sweep, out: Out) -> Outcome {
    let mut options = SweepOptions::default();
    options.interruption.delay = args.recovery_delay;
    if let Some(threshold) = args.threshold {
        options = options.threshold(threshold);
        // One threshold for all: also for leases whose worker left no row, and
        // for handlers past their timeout.
        options.scope.orphan_after = threshold;
    }
    if args.dry_run {
        options.mode = SweepMode::DryRun;
    }
    let report = client.sweep(&options).await?;
    if out.json {
        out.document(&report);
        return Ok(Code::Done);
    }
    let (verb, skipped) = match args.dry_run {
        true => ("would recover", String::new()),
        false if report.skipped == 0 => ("recovered", String::new()),
        false => ("recovered", format!("; skipped {}", report.skipped)),
    };
    out.line(format_args!(
        "{verb} {} from {}{skipped}",
        counted(report.recovered, "job"),
        counted(report.workers.len() as u64, "worker"),
    ));
    for worker in &report.workers {
        out.line(format_args!("worker {worker}"));
    }
    Ok(Code::Done)
}

fn counted(n: u64, thing: &str) -> String {
    match n {
        1 => format!("1 {thing}"),
        n => format!("{n} {thing}s"),
    }
}
