//! `bench flow --only graph`: a flow of 10,000 tasks, against the same jobs without links, and how long
//! a task starts after the one before it, against the pick-up of a single job.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use longshore::worker::{Context, Worker};
use longshore::{Client, NewJob, chain, fan_out};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{Backend, Bar, Figure, Options, SCHEMA};
use crate::report::{median, quantile, thousands};
use crate::worker::scenarios::pickup_of;
use crate::{Result, library};

const TASKS: u64 = 10_000;
const CONCURRENCY: u32 = 24;
/// How many times the time of the jobs without links.
const TIME_BAR: f64 = 3.0;
const SAMPLES: u64 = 1000;
/// How much later than the pick-up of a single job, in milliseconds.
const LATENCY_BAR: f64 = 5.0;
/// A sample that takes longer means that a task was not released.
const LOST: Duration = Duration::from_secs(30);

const FIRST: &str = "first";
const SECOND: &str = "second";

pub(super) async fn measure(options: &Options, backend: &mut Backend) -> Result<Vec<Figure>> {
    Ok(vec![whole_flow(options, backend).await?, next_task(options, backend).await?])
}

/// One task, then all others in parallel, then one more.
async fn whole_flow(options: &Options, backend: &mut Backend) -> Result<Figure> {
    let tasks = options.jobs(TASKS);
    let (mut linked, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let tables = backend.fresh(SCHEMA).await?;
        let began = Instant::now();
        let flow = chain![library::job(0)].then_all((2..tasks).map(library::job)).then(library::job(1));
        let flow = tables.client.enqueue_flow(flow).await?;
        run_all(&tables.client, tasks).await?;
        linked.push(began.elapsed().as_secs_f64());
        let ended = tables.client.flow(flow.id).await?;
        if ended.open > 0 || ended.failed > 0 {
            return Err(format!("the flow did not succeed: {ended:?}").into());
        }

        let tables = backend.fresh(SCHEMA).await?;
        let began = Instant::now();
        tables.client.enqueue_many((0..tasks).map(library::job)).await?;
        run_all(&tables.client, tasks).await?;
        plain.push(began.elapsed().as_secs_f64());
    }
    let ratios: Vec<f64> = linked.iter().zip(&plain).map(|(linked, plain)| linked / plain).collect();
    let seconds = |rounds: &[f64]| median(rounds.to_vec()).unwrap_or(0.0);
    let note = format!(
        "enqueue and run {} tasks: {:.2} s, without links {:.2} s",
        thousands(tasks as f64),
        seconds(&linked),
        seconds(&plain)
    );
    let details = json!({ "ratios": ratios, "linked_seconds": linked, "plain_seconds": plain });
    let figure = Figure::median("time of a flow / of the same jobs", &ratios, Bar::AtMost(TIME_BAR));
    Ok(figure.note(note).details(details))
}

/// Runs all jobs, including those that are released meanwhile.
async fn run_all(client: &Client, jobs: u64) -> Result<()> {
    let worker = Worker::builder(client.clone()).concurrency(CONCURRENCY);
    let done =
        worker.function(library::KIND, |_: Value, _: Context| async { Ok(()) }).build()?.drain().await?;
    if done.succeeded != jobs {
        return Err(format!("{} of {jobs} jobs succeeded", done.succeeded).into());
    }
    Ok(())
}

/// From the end of a handler to the start of the next one.
async fn next_task(options: &Options, backend: &mut Backend) -> Result<Figure> {
    let samples = if options.quick { 200 } else { SAMPLES };
    let (mut later, mut single) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let tables = backend.fresh(SCHEMA).await?;
        later.push(quantile(&starts_after(&tables.client, samples).await?, 0.99) / 1000.0);
        let tables = backend.fresh(SCHEMA).await?;
        let worker = Worker::builder(tables.client.clone());
        let pickup = pickup_of(worker, &tables.client, samples, library::job).await?;
        single.push(quantile(&pickup, 0.99) / 1000.0);
    }
    let longer: Vec<f64> = later.iter().zip(&single).map(|(later, single)| later - single).collect();
    let ms = |rounds: &[f64]| median(rounds.to_vec()).unwrap_or(0.0);
    let note = format!("p99 {:.1} ms, pick-up of a single job {:.1} ms", ms(&later), ms(&single));
    let details = json!({ "longer_ms": longer, "p99_ms": later, "pickup_p99_ms": single });
    let figure =
        Figure::median("task after task p99, ms longer than a pick-up", &longer, Bar::AtMost(LATENCY_BAR));
    Ok(figure.note(note).details(details))
}

/// The microseconds between the two tasks of a flow, for flows that run one after the other.
async fn starts_after(client: &Client, samples: u64) -> Result<Vec<u64>> {
    const WARM_UP: u64 = 100;
    let ended = Arc::new(Mutex::new(Instant::now()));
    let (sender, mut measured) = mpsc::unbounded_channel();
    let end = ended.clone();
    let first = move |_: Value, _: Context| {
        *end.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        async { Ok(()) }
    };
    let second = move |_: Value, _: Context| {
        let since = ended.lock().unwrap_or_else(PoisonError::into_inner).elapsed();
        let _ = sender.send(since.as_micros() as u64);
        async { Ok(()) }
    };
    let worker = Worker::builder(client.clone()).concurrency(CONCURRENCY);
    let running = worker.function(FIRST, first).function(SECOND, second).build()?.start().await?;
    let mut all = Vec::new();
    for n in 0..WARM_UP + samples {
        let job = |kind| NewJob::new(kind, &library::payload(n));
        client.enqueue_flow(fan_out([job(FIRST)]).then(job(SECOND))).await?;
        let micros = tokio::time::timeout(LOST, measured.recv()).await?;
        all.push(micros.ok_or("the worker stopped")?);
    }
    running.stop().await;
    Ok(all.split_off(WARM_UP as usize))
}
