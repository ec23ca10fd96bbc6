//! `bench flow --only claims`: claim + settle of jobs in groups without limits, against jobs
//! without a group.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use longshore::NewJob;
use serde_json::json;

use super::{BULK, Backend, Bar, Figure, GROUPS, Options, QUEUE, SCHEMA, grouped_job};
use crate::claim_and_settle::{warm_claimers, with_warm_up};
use crate::report::{Sample, median, thousands};
use crate::{Result, join_all, library};

const JOBS: u64 = 100_000;
const BATCH: u32 = 500;
const CLAIMERS: usize = 2;
/// How long a claimer waits if the other one serves all groups.
const PAUSE: Duration = Duration::from_micros(500);
const BAR: f64 = 0.3;

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let jobs = options.jobs(JOBS);
    let (mut grouped, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        grouped.push(drain(backend, jobs, grouped_job).await?);
        plain.push(drain(backend, jobs, library::job).await?);
    }
    let ratios: Vec<f64> = grouped.iter().zip(&plain).map(|(ours, base)| ours.rate() / base.rate()).collect();
    let rate = |samples: &[Sample]| median(samples.iter().map(Sample::rate).collect()).unwrap_or(0.0);
    let wal = |samples: &[Sample]| median(samples.iter().filter_map(Sample::wal_per_job).collect());
    let mut note = format!(
        "jobs/s, {CLAIMERS} × {BATCH}: {} with {GROUPS} groups, {} without",
        thousands(rate(&grouped)),
        thousands(rate(&plain))
    );
    if let Some((grouped, plain)) = wal(&grouped).zip(wal(&plain)) {
        note += &format!("; WAL {grouped:.0} and {plain:.0} bytes per job");
    }
    let details = json!({
        "ratios": ratios,
        "grouped_jobs_per_second": grouped.iter().map(Sample::rate).collect::<Vec<_>>(),
        "plain_jobs_per_second": plain.iter().map(Sample::rate).collect::<Vec<_>>(),
        "grouped_wal_bytes_per_job": wal(&grouped),
        "plain_wal_bytes_per_job": wal(&plain),
    });
    let figure = Figure::median("grouped / plain claim + settle", &ratios, Bar::AtLeast(BAR));
    Ok(vec![figure.note(note).details(details)])
}

async fn drain(backend: &mut Backend, jobs: u64, job: fn(u64) -> NewJob) -> Result<Sample> {
    let tables = backend.fresh(SCHEMA).await?;
    let all = with_warm_up(jobs, BATCH, CLAIMERS);
    library::enqueue_bulk_of(&tables.client, all, BULK, job).await?;
    backend.vacuum(SCHEMA).await?;
    let warm = warm_claimers(&tables.client, BATCH, CLAIMERS).await?;
    // Not a fixed number: a warm-up batch is short if the other claimer serves the groups.
    let left = Arc::new(AtomicU64::new(tables.client.depth(QUEUE, all).await?));
    let drain = |claimer| tokio::spawn(drain_all(claimer, left.clone()));
    backend.timed(async { join_all(warm.into_iter().map(drain).collect()).await }).await
}

/// Claims and settles until no job is left for any claimer; returns how many. An empty claim is not
/// the end: another claimer may have locked the groups.
async fn drain_all(mut claimer: library::Claimer, left: Arc<AtomicU64>) -> Result<u64> {
    let mut done = 0;
    while left.load(Ordering::Acquire) > 0 {
        let round = claimer.round().await?;
        left.fetch_sub(round.jobs, Ordering::AcqRel);
        done += round.jobs;
        if round.jobs == 0 {
            tokio::time::sleep(PAUSE).await;
        }
    }
    Ok(done)
}
