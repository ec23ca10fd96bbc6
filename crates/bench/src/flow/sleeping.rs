//! `bench flow --only sleeping`: whether jobs that are suspended in a durable sleep use the
//! worker's memory.
//!
//! Measured is the resident memory of this process, which contains the worker, the client that
//! enqueues and, on SQLite, the database engine with its page caches. Nothing is subtracted. The
//! first reading comes after a warm-up that ends without a suspended job.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use longshore::Client;
use longshore::worker::{Context, RunningWorker, Summary, Worker};
use serde_json::{Value, json};

use super::{Backend, Bar, Figure, Options, QUEUE, SCHEMA};
use crate::Result;
use crate::library::{self, KIND};
use crate::report::{Memory, thousands};
use crate::worker::scenarios::CONCURRENCY;

/// The memory is read with this many suspended jobs. What grows with the jobs grows fourfold
/// between the first and the last reading, and what reaches a level does not.
const SUSPENDED: [u64; 3] = [50_000, 100_000, 200_000];
/// Jobs in one call, few enough that the calls themselves use little memory.
const STEP: u64 = 1000;
/// Jobs that are enqueued while the worker runs, before it becomes idle.
const BACKLOG: u64 = 25_000;
/// SQLite only: enough that the rows do not fit into the page caches, also with `--quick`.
const CACHE_FILLING_JOBS: u64 = 100_000;
/// The allocator's arenas reach their size after a few backlogs of the same length.
const WARM_UP_BACKLOGS: u64 = 3;
const WARM_UP_SLEEP: Duration = Duration::from_millis(100);
/// More calls at once than SQLite has reading connections, so that each connection gets one.
const COUNTS_AT_ONCE: usize = 12;
/// Longer than the measurement takes.
const SLEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// How long the worker gets to become idle.
const SLOW_DOWN: Duration = Duration::from_secs(3);
const SUSPEND_TIMEOUT: Duration = Duration::from_secs(600);
/// The growth that the allocator's own behaviour may cause.
const BAR: f64 = 1.1;

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let has_page_caches = matches!(backend, Backend::Sqlite(_));
    let tables = backend.fresh(SCHEMA).await?;
    let (client, backlog) = (&tables.client, options.jobs(BACKLOG));
    let sleep_millis = Arc::new(AtomicU64::new(WARM_UP_SLEEP.as_millis() as u64));
    let handler_millis = sleep_millis.clone();
    let sleep = move |_: Value, ctx: Context| {
        let time = Duration::from_millis(handler_millis.load(Ordering::Relaxed));
        async move { ctx.sleep("pause", time).await }
    };
    let worker = Worker::builder(client.clone()).function(KIND, sleep).concurrency(CONCURRENCY);

    // The warm-up's jobs sleep shortly and then succeed. The first ones fill the page caches while
    // all of them wait.
    let mut finished = 0;
    if has_page_caches {
        finished = CACHE_FILLING_JOBS;
        library::enqueue_bulk(client, finished, STEP).await?;
        fill_page_caches(client).await?;
    }
    let running = worker.build()?.start().await?;
    wait_for(&running, finished, |summary| summary.succeeded).await?;
    for _ in 0..WARM_UP_BACKLOGS {
        library::enqueue_bulk(client, backlog, STEP).await?;
        finished += backlog;
        wait_for(&running, finished, |summary| summary.succeeded).await?;
    }
    let none = read_memory(client).await?;

    sleep_millis.store(SLEEP.as_millis() as u64, Ordering::Relaxed);
    let put_back = running.summary().put_back;
    let (mut readings, mut suspended, mut took) = (Vec::new(), 0, Duration::ZERO);
    for jobs in SUSPENDED.map(|jobs| options.jobs(jobs)) {
        while suspended < jobs {
            let started = Instant::now();
            library::enqueue_bulk(client, backlog, STEP).await?;
            suspended += backlog;
            wait_for(&running, put_back + suspended, |summary| summary.put_back).await?;
            took += started.elapsed();
        }
        readings.push((jobs, read_memory(client).await?));
    }
    let waiting = client.depth(QUEUE, 2 * suspended).await?;
    running.stop().await;
    if waiting != suspended {
        return Err(format!("{waiting} jobs are suspended, and not {suspended}").into());
    }
    let Some(none) = none else {
        eprintln!("not measured: the resident memory is known only on Linux");
        return Ok(Vec::new());
    };
    let per_second = suspended as f64 / took.as_secs_f64();
    eprintln!("suspended per second: {}", thousands(per_second));
    let figures = readings.into_iter().filter_map(|(jobs, memory)| Some(figure(jobs, none, memory?)));
    Ok(figures.collect())
}

fn figure(jobs: u64, none: Memory, with_jobs: Memory) -> Figure {
    let name = format!("resident memory, {} suspended jobs / none", thousands(jobs as f64));
    let note = format!(
        "from {:.1} MB (anonymous {:.1}) to {:.1} MB (anonymous {:.1}), after a warm-up",
        none.resident_mb, none.anonymous_mb, with_jobs.resident_mb, with_jobs.anonymous_mb,
    );
    let details = json!({ "suspended_jobs": jobs, "none": none, "with_jobs": with_jobs });
    Figure::new(name, with_jobs.resident_mb / none.resident_mb, Bar::AtMost(BAR)).note(note).details(details)
}

/// Reads the memory of an idle worker, right after the counts that it refreshes every 15 seconds
/// for its gauges. Otherwise some readings would contain them and others would not.
async fn read_memory(client: &Client) -> Result<Option<Memory>> {
    tokio::time::sleep(SLOW_DOWN).await;
    fill_page_caches(client).await?;
    Ok(Memory::now())
}

/// Counts the waiting jobs on all reading connections. On SQLite each keeps the pages that it
/// has read, up to a fixed size.
async fn fill_page_caches(client: &Client) -> Result<()> {
    let counts: Vec<_> = (0..COUNTS_AT_ONCE)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.counts().await })
        })
        .collect();
    for count in counts {
        count.await??;
    }
    Ok(())
}

/// Waits until `count` of the worker's summary has reached `jobs`.
async fn wait_for(running: &RunningWorker, jobs: u64, count: impl Fn(&Summary) -> u64) -> Result<()> {
    let started = Instant::now();
    while count(&running.summary()) < jobs {
        if started.elapsed() > SUSPEND_TIMEOUT {
            let reached = count(&running.summary());
            return Err(format!("only {reached} of {jobs} jobs were run in time").into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}
