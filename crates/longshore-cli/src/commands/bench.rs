//! `longshore bench`: measures a queue with jobs that do nothing. The jobs are in a queue that
//! no other worker takes jobs from, and are removed at the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use longshore::worker::{
    Context, Executor, Failure as JobFailure, RecoverySettings, RunningWorker, Settings, Signals, Worker,
};
use longshore::{Client, JobId, NewJob};
use serde::Serialize;
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::bulk::{self, Action, JobFilter};
use super::stats::seconds;
use crate::args::{BenchArgs, Filter};
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::{Out, Progress, note};

/// How many jobs are enqueued one by one to measure how soon each starts.
const PICK_UPS: usize = 100;
/// How often the progress bar is updated.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// How long requests in progress may take after a signal.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// An interval that no bench reaches.
const NEVER: Duration = Duration::from_secs(24 * 60 * 60);

/// The measurements. With a server, only those of enqueueing.
#[derive(Serialize)]
struct Figures {
    jobs: u32,
    producers: u32,
    enqueued_per_second: f64,
    run_per_second: Option<f64>,
    pick_up_seconds: Option<Percentiles>,
}

/// The time from the enqueue call to the start of the handler.
#[derive(Serialize)]
struct Percentiles {
    p50: f64,
    p95: f64,
    p99: f64,
}

pub(super) async fn run(endpoint: &Endpoint, args: &BenchArgs, out: &Out) -> Outcome {
    let queue = format!("bench-{}", JobId::new());
    let mut signals = Signals::new()?;
    let mut bench_worker = None;
    let stop = Arc::new(AtomicBool::new(false));
    let measured = {
        let mut measuring = std::pin::pin!(measure(endpoint, &queue, args, &stop, &mut bench_worker));
        tokio::select! {
            measured = &mut measuring => measured,
            () = signals.next() => {
                // Let requests in progress finish. Otherwise a job could arrive after the
                // cleanup.
                stop.store(true, Ordering::Relaxed);
                note("stopping; removing the jobs of the bench, which may take a while");
                let _ = tokio::time::timeout(STOP_TIMEOUT, measuring).await;
                Err(stopped())
            }
        }
    };
    // Stop the worker in any case. While it runs it holds leases on jobs that must be removed.
    if let Some(BenchWorker { worker, .. }) = bench_worker {
        worker.stop_now().await;
    }
    clean_up(endpoint, &queue).await?;
    print(&measured?, out);
    Ok(Code::Done)
}

fn stopped() -> Failure {
    Failure::new(Code::Problem, "stopped before the measurement was complete")
}

async fn measure(
    endpoint: &Endpoint,
    queue: &str,
    args: &BenchArgs,
    stop: &Arc<AtomicBool>,
    bench_worker: &mut Option<BenchWorker>,
) -> Result<Figures, Failure> {
    let took = enqueue(endpoint, queue, args, stop).await?;
    let mut figures = Figures {
        jobs: args.jobs,
        producers: args.producers,
        enqueued_per_second: f64::from(args.jobs) / took.as_secs_f64(),
        run_per_second: None,
        pick_up_seconds: None,
    };
    // The bench's own worker needs the database.
    let Some(client) = endpoint.client() else { return Ok(figures) };
    let began = Instant::now();
    let bench_worker = bench_worker.insert(BenchWorker::start(client, queue, args.concurrency).await?);
    bench_worker.run(args.jobs.into(), stop).await?;
    let took = began.elapsed();
    figures.run_per_second = Some(f64::from(args.jobs) / took.as_secs_f64());
    figures.pick_up_seconds = Some(bench_worker.pick_up(client, queue, stop).await?);
    Ok(figures)
}

// ---- enqueue -----------------------------------------------------------------------

/// Enqueues all jobs and returns how long it took. Each producer enqueues one job at a time.
async fn enqueue(
    endpoint: &Endpoint,
    queue: &str,
    args: &BenchArgs,
    stop: &Arc<AtomicBool>,
) -> Result<Duration, Failure> {
    let left = Arc::new(AtomicU64::new(args.jobs.into()));
    let began = Instant::now();
    let mut producers = JoinSet::new();
    for _ in 0..args.producers {
        let (endpoint, queue) = (endpoint.clone(), queue.to_owned());
        let (left, stop) = (left.clone(), stop.clone());
        producers.spawn(async move {
            while !stop.load(Ordering::Relaxed) && take_one(&left) {
                enqueue_one(&endpoint, &queue).await?;
            }
            Ok::<(), Failure>(())
        });
    }
    let all = async {
        while let Some(produced) = producers.join_next().await {
            produced.map_err(|error| {
                Failure::new(Code::Problem, format_args!("a producer panicked: {error}"))
            })??;
        }
        Ok(began.elapsed())
    };
    with_progress(args.jobs.into(), || u64::from(args.jobs) - left.load(Ordering::Relaxed), all).await
}

fn take_one(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// Enqueues a job as a program would: with the library, or through the API.
async fn enqueue_one(endpoint: &Endpoint, queue: &str) -> Result<(), Failure> {
    match endpoint.client() {
        Some(client) => {
            client.enqueue(NewJob::new("bench", &()).queue(queue)).await?;
        }
        None => {
            // A built-in kind, which every server accepts. No worker takes jobs from this queue.
            let job =
                json!({ "kind": "summarize_text", "payload": { "text": "Ships come." }, "queue": queue });
            endpoint.post(&["jobs"]).body(&job).send().await?;
        }
    }
    Ok(())
}

// ---- run ---------------------------------------------------------------------------

/// A worker whose handler reports when each job starts.
struct BenchWorker {
    worker: RunningWorker,
    starts: mpsc::UnboundedReceiver<Instant>,
}

/// A handler that only reports its start time.
struct ReportStart {
    starts: mpsc::UnboundedSender<Instant>,
}

#[async_trait]
impl Executor for ReportStart {
    async fn execute(&self, _: Context) -> Result<(), JobFailure> {
        // Fails only after the bench was stopped.
        let _ = self.starts.send(Instant::now());
        Ok(())
    }
}

impl BenchWorker {
    /// Starts a worker for this queue only.
    async fn start(client: &Client, queue: &str, concurrency: u32) -> Result<Self, Failure> {
        let (sender, starts) = mpsc::unbounded_channel();
        let settings = Settings {
            queues: vec![queue.into()],
            concurrency,
            name_prefix: "bench".into(),
            // No upkeep: it would affect other queues.
            recovery: RecoverySettings { enabled: false, ..RecoverySettings::default() },
            retention_interval: NEVER,
            sample_interval: NEVER,
            schedules: false,
            ..Settings::default()
        };
        let worker =
            Worker::builder(client.clone()).settings(settings).executor(ReportStart { starts: sender });
        Ok(BenchWorker { worker: worker.build()?.start().await?, starts })
    }

    /// Waits until this many jobs have succeeded.
    async fn run(&self, jobs: u64, stop: &AtomicBool) -> Result<(), Failure> {
        let done = || self.worker.summary().succeeded;
        with_progress(jobs, done, async {
            while done() < jobs {
                if stop.load(Ordering::Relaxed) {
                    return Err(stopped());
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Ok(())
        })
        .await
    }

    /// Measures how soon the idle worker starts a job, one job at a time.
    async fn pick_up(
        &mut self,
        client: &Client,
        queue: &str,
        stop: &AtomicBool,
    ) -> Result<Percentiles, Failure> {
        while self.starts.try_recv().is_ok() {}
        let mut waits = Vec::with_capacity(PICK_UPS);
        for _ in 0..PICK_UPS {
            if stop.load(Ordering::Relaxed) {
                return Err(stopped());
            }
            let enqueued = Instant::now();
            client.enqueue(NewJob::new("bench", &()).queue(queue)).await?;
            let Some(started) = self.starts.recv().await else { break };
            waits.push(started.saturating_duration_since(enqueued));
        }
        Ok(percentiles(waits))
    }
}

fn percentiles(mut waits: Vec<Duration>) -> Percentiles {
    waits.sort();
    let at = |share: f64| {
        let rank = (waits.len() as f64 * share).ceil() as usize;
        waits.get(rank.saturating_sub(1)).map_or(0.0, Duration::as_secs_f64)
    };
    Percentiles { p50: at(0.5), p95: at(0.95), p99: at(0.99) }
}

// ---- progress and cleanup -------------------------------------------------------------

/// Shows a progress bar while `work` runs.
async fn with_progress<T>(
    total: u64,
    done: impl Fn() -> u64,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut progress = Progress::of(total);
    let mut work = std::pin::pin!(work);
    let mut shown = 0;
    loop {
        tokio::select! {
            end = &mut work => return end,
            () = tokio::time::sleep(PROGRESS_INTERVAL) => {
                let now = done();
                progress.advance(now - shown);
                shown = now;
            }
        }
    }
}

/// Removes every job of the bench's queue.
async fn clean_up(endpoint: &Endpoint, queue: &str) -> Result<(), Failure> {
    let filter = Filter { queue: Some(queue.into()), ..Filter::default() };
    let filter = JobFilter::new(None, filter);
    let incomplete = |failure: Failure| {
        Failure::new(
            failure.code,
            format_args!(
                "could not remove all jobs of the bench from queue {queue}: {failure}; remove them with \
                 `longshore jobs cancel --queue {queue} --yes` and `longshore jobs delete --queue {queue} --yes`"
            ),
        )
    };
    const ACTIONS: [Action; 2] = [Action::Cancel, Action::Delete];
    let jobs = if Progress::is_visible() {
        bulk::count(endpoint, Action::Cancel, &filter, None).await.map_err(incomplete)?
    } else {
        0
    };
    let mut progress = Progress::of(jobs * ACTIONS.len() as u64);
    for action in ACTIONS {
        bulk::change_all_matching(endpoint, action, &filter, |step| progress.advance(step))
            .await
            .map_err(incomplete)?;
    }
    Ok(())
}

fn print(figures: &Figures, out: &Out) {
    if out.json {
        return out.document(figures);
    }
    let Figures { jobs, producers, enqueued_per_second, .. } = figures;
    out.line(format_args!(
        "enqueued  {enqueued_per_second:.0} jobs per second ({jobs} jobs, {producers} producers, one job per call)"
    ));
    match (figures.run_per_second, &figures.pick_up_seconds) {
        (Some(run), Some(Percentiles { p50, p95, p99 })) => {
            out.line(format_args!("run       {run:.0} jobs per second"));
            out.line(format_args!(
                "picked up p50 {}, p95 {}, p99 {} after the enqueue call",
                seconds(Some(*p50)),
                seconds(Some(*p95)),
                seconds(Some(*p99))
            ));
        }
        _ => out.note("only enqueueing was measured; to also measure running jobs, use --database-url instead of a server"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_measured_values() {
        let waits = (1..=100).rev().map(Duration::from_millis).collect();
        let Percentiles { p50, p95, p99 } = percentiles(waits);
        assert_eq!((p50, p95, p99), (0.050, 0.095, 0.099));
        assert_eq!(percentiles(Vec::new()).p50, 0.0);
    }
}
