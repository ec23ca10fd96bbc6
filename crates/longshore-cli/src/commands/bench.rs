//! `longshore bench`: how fast is this queue? Jobs that do nothing, in a queue
//! of their own that nobody else takes from, and nothing left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use longshore::worker::{Context, Executor, Failure as Ended, Recovery, Running, Settings, Signals, Worker};
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
use crate::output::{Out, Progress, is_wanted, note};

/// How many jobs are enqueued one by one to see how soon each begins.
const PICK_UPS: usize = 100;
/// How often a bar moves.
const GLANCE: Duration = Duration::from_millis(100);
/// How long a bench that was stopped may take to stop.
const PATIENCE: Duration = Duration::from_secs(10);
const NEVER: Duration = Duration::from_secs(24 * 60 * 60);

/// What was measured; without a worker, what enqueueing tells.
#[derive(Serialize)]
struct Figures {
    jobs: u32,
    producers: u32,
    enqueued_per_second: f64,
    run_per_second: Option<f64>,
    pick_up_seconds: Option<Percentiles>,
}

/// From the call that enqueues a job to the first line of its handler.
#[derive(Serialize)]
struct Percentiles {
    p50: f64,
    p95: f64,
    p99: f64,
}

pub(super) async fn run(endpoint: &Endpoint, args: &BenchArgs, out: &Out) -> Outcome {
    let queue = format!("bench-{}", JobId::new());
    let mut signals = Signals::new()?;
    let mut crew = None;
    let stop = Arc::new(AtomicBool::new(false));
    let measured = {
        let mut measuring = std::pin::pin!(measure(endpoint, &queue, args, &stop, &mut crew));
        tokio::select! {
            measured = &mut measuring => measured,
            () = signals.next() => {
                // What is under way is let finish: a job could otherwise arrive
                // after all have been removed.
                stop.store(true, Ordering::Relaxed);
                note("stopping; the jobs of the bench are removed, which may take a while");
                let _ = tokio::time::timeout(PATIENCE, measuring).await;
                Err(stopped())
            }
        }
    };
    // However it ended: a worker that goes on would hold jobs that are to go.
    if let Some(Crew { worker, .. }) = crew {
        worker.stop_now().await;
    }
    clean_up(endpoint, &queue).await?;
    tell(&measured?, out);
    Ok(Code::Done)
}

fn stopped() -> Failure {
    Failure::new(Code::Problem, "stopped before all was measured")
}

async fn measure(
    endpoint: &Endpoint,
    queue: &str,
    args: &BenchArgs,
    stop: &Arc<AtomicBool>,
    crew: &mut Option<Crew>,
) -> Result<Figures, Failure> {
    let took = enqueue(endpoint, queue, args, stop).await?;
    let mut figures = Figures {
        jobs: args.jobs,
        producers: args.producers,
        enqueued_per_second: f64::from(args.jobs) / took.as_secs_f64(),
        run_per_second: None,
        pick_up_seconds: None,
    };
    // A server runs no jobs of strangers.
    let Some(client) = endpoint.client() else { return Ok(figures) };
    let began = Instant::now();
    let crew = crew.insert(Crew::start(client, queue, args.concurrency).await?);
    crew.run(args.jobs.into(), stop).await?;
    let took = began.elapsed();
    figures.run_per_second = Some(f64::from(args.jobs) / took.as_secs_f64());
    figures.pick_up_seconds = Some(crew.pick_up(client, queue, stop).await?);
    Ok(figures)
}

// ---- enqueue -----------------------------------------------------------------------

/// How long it takes to enqueue them all, one at a time from each producer.
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
            produced
                .map_err(|died| Failure::new(Code::Problem, format_args!("a producer died: {died}")))??;
        }
        Ok(began.elapsed())
    };
    shown(args.jobs.into(), || u64::from(args.jobs) - left.load(Ordering::Relaxed), all).await
}

fn take_one(left: &AtomicU64) -> bool {
    left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
}

/// As a program would: by the library, or by the API.
async fn enqueue_one(endpoint: &Endpoint, queue: &str) -> Result<(), Failure> {
    match endpoint.client() {
        Some(client) => {
            client.enqueue(NewJob::new("bench", &()).queue(queue)).await?;
        }
        None => {
            // A kind that every `longshore serve` knows; nobody will run it.
            let job =
                json!({ "kind": "summarize_text", "payload": { "text": "Ships come." }, "queue": queue });
            endpoint.post(&["jobs"]).body(&job).send().await?;
        }
    }
    Ok(())
}

// ---- run ---------------------------------------------------------------------------

/// A worker whose jobs tell when they begin.
struct Crew {
    worker: Running,
    begun: mpsc::UnboundedReceiver<Instant>,
}

/// Does nothing, and tells when.
struct Nothing {
    begun: mpsc::UnboundedSender<Instant>,
}

#[async_trait]
impl Executor for Nothing {
    async fn execute(&self, _: Context) -> Result<(), Ended> {
        // Nobody listens any more once the bench was stopped.
        let _ = self.begun.send(Instant::now());
        Ok(())
    }
}

impl Crew {
    /// A worker for this queue and nothing else.
    async fn start(client: &Client, queue: &str, concurrency: u32) -> Result<Self, Failure> {
        let (tell, begun) = mpsc::unbounded_channel();
        let settings = Settings {
            queues: vec![queue.into()],
            concurrency,
            name_prefix: "bench".into(),
            // Other queues are none of its business.
            recovery: Recovery { enabled: false, ..Recovery::default() },
            retention_interval: NEVER,
            sample_interval: NEVER,
            schedules: false,
            ..Settings::default()
        };
        let worker = Worker::builder(client.clone()).settings(settings).executor(Nothing { begun: tell });
        Ok(Crew { worker: worker.build()?.start().await?, begun })
    }

    /// Waits until so many jobs are done.
    async fn run(&self, jobs: u64, stop: &AtomicBool) -> Result<(), Failure> {
        let done = || self.worker.summary().succeeded;
        shown(jobs, done, async {
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

    /// How soon the idle worker begins a job, again and again.
    async fn pick_up(
        &mut self,
        client: &Client,
        queue: &str,
        stop: &AtomicBool,
    ) -> Result<Percentiles, Failure> {
        while self.begun.try_recv().is_ok() {}
        let mut waits = Vec::with_capacity(PICK_UPS);
        for _ in 0..PICK_UPS {
            if stop.load(Ordering::Relaxed) {
                return Err(stopped());
            }
            let asked = Instant::now();
            client.enqueue(NewJob::new("bench", &()).queue(queue)).await?;
            let Some(begun) = self.begun.recv().await else { break };
            waits.push(begun.saturating_duration_since(asked));
        }
        Ok(percentiles(waits))
    }
}

fn percentiles(mut waits: Vec<Duration>) -> Percentiles {
    waits.sort();
    let at = |share: f64| {
        let place = (waits.len() as f64 * share).ceil() as usize;
        waits.get(place.saturating_sub(1)).map_or(0.0, Duration::as_secs_f64)
    };
    Percentiles { p50: at(0.5), p95: at(0.95), p99: at(0.99) }
}

// ---- before and after ----------------------------------------------------------------

/// Shows how far some work is while it goes on.
async fn shown<T>(
    total: u64,
    done: impl Fn() -> u64,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut progress = Progress::of(total);
    let mut work = std::pin::pin!(work);
    let mut told = 0;
    loop {
        tokio::select! {
            end = &mut work => return end,
            () = tokio::time::sleep(GLANCE) => {
                let now = done();
                progress.advance(now - told);
                told = now;
            }
        }
    }
}

/// Removes every job of the bench's own queue.
async fn clean_up(endpoint: &Endpoint, queue: &str) -> Result<(), Failure> {
    let filter = Filter { queue: Some(queue.into()), ..Filter::default() };
    let which = JobFilter::new(None, filter);
    let left = |failure: Failure| {
        Failure::new(
            failure.code,
            format_args!(
                "jobs of the bench are left in queue {queue}: {failure}; remove them with \
                 `longshore jobs cancel --queue {queue} --yes` and `longshore jobs delete --queue {queue} --yes`"
            ),
        )
    };
    const ORDERS: [Action; 2] = [Action::Cancel, Action::Delete];
    let jobs = if is_wanted() {
        bulk::count(endpoint, Action::Cancel, &which, None).await.map_err(left)?
    } else {
        0
    };
    let mut progress = Progress::of(jobs * ORDERS.len() as u64);
    for action in ORDERS {
        bulk::change_all_matching(endpoint, action, &which, |step| progress.advance(step))
            .await
            .map_err(left)?;
    }
    Ok(())
}

fn tell(figures: &Figures, out: &Out) {
    if out.json {
        return out.document(figures);
    }
    let Figures { jobs, producers, enqueued_per_second, .. } = figures;
    out.line(format_args!(
        "enqueued  {enqueued_per_second:.0} jobs a second ({jobs} jobs, {producers} at once, one by one)"
    ));
    match (figures.run_per_second, &figures.pick_up_seconds) {
        (Some(run), Some(Percentiles { p50, p95, p99 })) => {
            out.line(format_args!("run       {run:.0} jobs a second"));
            out.line(format_args!(
                "picked up p50 {}, p95 {}, p99 {} after the call that enqueues",
                seconds(Some(*p50)),
                seconds(Some(*p95)),
                seconds(Some(*p99))
            ));
        }
        _ => out.note("a server runs no jobs of strangers; give --database-url to measure that as well"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let waits = (1..=100).rev().map(Duration::from_millis).collect();
        let Percentiles { p50, p95, p99 } = percentiles(waits);
        assert_eq!((p50, p95, p99), (0.050, 0.095, 0.099));
        assert_eq!(percentiles(Vec::new()).p50, 0.0);
    }
}
