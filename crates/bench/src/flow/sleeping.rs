//! `bench flow --only sleeping`: whether jobs that are suspended in a durable sleep use the
//! worker's memory.

use std::time::{Duration, Instant};

use longshore::Client;
use longshore::worker::{Context, Failure, RunningWorker, Worker};
use serde_json::{Value, json};

use super::{Backend, Bar, Figure, Options, QUEUE, SCHEMA};
use crate::Result;
use crate::library::{self, KIND};
use crate::report::{resident_mb, thousands};
use crate::worker::scenarios::CONCURRENCY;

const JOBS: u64 = 100_000;
/// Jobs in one call, few enough that the calls themselves use little memory.
const STEP: u64 = 1000;
/// The jobs are enqueued in this many backlogs, and the memory is read after each.
const STEPS: u64 = 5;
const WARM_UP_STEPS: u64 = 2;
/// Longer than the measurement takes.
const SLEEP: Duration = Duration::from_secs(24 * 60 * 60);
/// How long the worker gets to become idle.
const SLOW_DOWN: Duration = Duration::from_secs(3);
const SUSPEND_TIMEOUT: Duration = Duration::from_secs(600);
/// The growth that the allocator's own behaviour may cause.
const BAR: f64 = 1.1;

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    let jobs = options.jobs(JOBS);
    let tables = backend.fresh(SCHEMA).await?;
    let sleep = async |_: Value, ctx: Context| -> Result<(), Failure> { ctx.sleep("pause", SLEEP).await };
    let worker = Worker::builder(tables.client.clone()).function(KIND, sleep).concurrency(CONCURRENCY);
    let running = worker.build()?.start().await?;
    // The first jobs open connections and prepare statements, and the allocator's arenas reach their
    // size after a few backlogs of the same length.
    let warm_up = WARM_UP_STEPS * (jobs / STEPS);
    for _ in 0..WARM_UP_STEPS {
        suspend(&tables.client, &running, jobs / STEPS).await?;
    }
    let before = resident_mb();
    // The memory at each step shows whether it grows with the jobs or reaches a level.
    let (started, mut at_each_step) = (Instant::now(), Vec::new());
    for _ in 0..STEPS {
        suspend(&tables.client, &running, jobs / STEPS).await?;
        at_each_step.push(resident_mb());
    }
    let took = started.elapsed().saturating_sub(SLOW_DOWN * STEPS as u32);
    let after = at_each_step.last().copied().flatten();
    let waiting = tables.client.depth(QUEUE, 2 * (jobs + warm_up)).await?;
    running.stop().await;
    if waiting != jobs + warm_up {
        return Err(format!("{waiting} jobs are suspended, and not {}", jobs + warm_up).into());
    }
    let Some((before, after)) = before.zip(after) else {
        eprintln!("not measured: the resident memory is known only on Linux");
        return Ok(Vec::new());
    };
    let note = format!(
        "from {before:.1} MB with {} suspended jobs to {after:.1} MB with {}; {:.0} suspended per second",
        thousands(warm_up as f64),
        thousands((jobs + warm_up) as f64),
        jobs as f64 / took.as_secs_f64()
    );
    let figure = Figure::new("resident memory, after / before", after / before, Bar::AtMost(BAR));
    let details = json!({ "before_mb": before, "after_mb": after, "mb_at_each_step": at_each_step, "waiting_jobs": waiting, "seconds": took.as_secs_f64() });
    Ok(vec![figure.note(note).details(details)])
}

/// Enqueues jobs and waits until the worker has suspended all of them and is idle.
async fn suspend(client: &Client, running: &RunningWorker, jobs: u64) -> Result<()> {
    let (started, before) = (Instant::now(), running.summary().put_back);
    library::enqueue_bulk(client, jobs, STEP).await?;
    while running.summary().put_back < before + jobs {
        if started.elapsed() > SUSPEND_TIMEOUT {
            let suspended = running.summary().put_back - before;
            return Err(format!("only {suspended} of {jobs} jobs were suspended in time").into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    tokio::time::sleep(SLOW_DOWN).await;
    Ok(())
}
