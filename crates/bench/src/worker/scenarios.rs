//! What Longshore's worker runs, on the client's engine. `bench-peers` runs the same
//! scenarios with other job queues.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use longshore::worker::{Builder, Context, RunningWorker, Worker};
use longshore::{Client, NewJob};
use serde::Deserialize;

use crate::library::{self, KIND};
use crate::{Result, join_all};

/// How many no-op jobs run at once.
pub(crate) const CONCURRENCY: u32 = 24;
/// How many sleeping jobs run at once.
const SLEEPERS: u32 = 200;
/// How long each of them sleeps.
const SLEEP: Duration = Duration::from_millis(10);
/// The maximum wait for a job that should have been settled.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Jobs that a new worker runs before the measurement.
const WARM_UP: u64 = 20;
/// How long the worker then gets to become idle.
const SLOW_DOWN: Duration = Duration::from_secs(1);
/// How long producers run before the measurement starts.
pub(super) const RAMP_UP: Duration = Duration::from_millis(300);

/// The payload as a handler would decode it.
#[derive(Deserialize)]
struct Mail {
    #[serde(rename = "to")]
    _to: String,
    #[serde(rename = "template")]
    _template: String,
    n: u64,
}

async fn no_op(_: Mail, _: Context) -> Result<(), longshore::worker::Failure> {
    Ok(())
}

async fn sleep(_: Mail, _: Context) -> Result<(), longshore::worker::Failure> {
    tokio::time::sleep(SLEEP).await;
    Ok(())
}

/// Starts a worker for no-op jobs with default settings.
pub(super) async fn start(client: &Client) -> Result<RunningWorker> {
    let worker = Worker::builder(client.clone()).function(KIND, no_op).concurrency(CONCURRENCY);
    Ok(worker.build()?.start().await?)
}

/// Starts a worker and waits until it has settled `jobs` jobs.
pub(super) async fn drain(client: &Client, jobs: u64) -> Result<RunningWorker> {
    let running = start(client).await?;
    wait_until_settled(&running, jobs).await?;
    Ok(running)
}

/// Like [`drain`], with jobs that sleep.
pub(super) async fn drain_sleepers(client: &Client, jobs: u64) -> Result<RunningWorker> {
    let worker = Worker::builder(client.clone()).function(KIND, sleep).concurrency(SLEEPERS);
    let running = worker.build()?.start().await?;
    wait_until_settled(&running, jobs).await?;
    Ok(running)
}

/// The baseline for sleeping jobs: tasks that only sleep and count.
pub(super) async fn sleep_and_count(jobs: u64) -> Result<u64> {
    let left = Arc::new(AtomicU64::new(jobs));
    let sleeper = |_| {
        let left = left.clone();
        let take = move || left.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1));
        tokio::spawn(async move {
            let mut done = 0;
            while take().is_ok() {
                tokio::time::sleep(SLEEP).await;
                done += 1;
            }
            Ok(done)
        })
    };
    join_all((0..SLEEPERS).map(sleeper).collect()).await
}

/// Producers that each await every enqueue, and a worker that runs the jobs.
pub(super) struct Sustained {
    running: RunningWorker,
    producers: Vec<tokio::task::JoinHandle<Result<u64>>>,
    stop: Arc<AtomicBool>,
}

impl Sustained {
    /// Starts and warms up the worker, then starts the producers and lets them ramp up.
    pub(super) async fn start(client: &Client, producers: usize) -> Result<Self> {
        let running = start(client).await?;
        warm_up(client, &running, WARM_UP, library::job).await?;
        let stop = Arc::new(AtomicBool::new(false));
        let produce = |_| {
            let (client, stop) = (client.clone(), stop.clone());
            tokio::spawn(async move {
                let mut n = 0;
                while !stop.load(Ordering::Relaxed) {
                    client.enqueue(library::job(n)).await?;
                    n += 1;
                }
                Ok(n)
            })
        };
        let producers = (0..producers).map(produce).collect();
        tokio::time::sleep(RAMP_UP).await;
        Ok(Sustained { running, producers, stop })
    }

    /// Counts the jobs that are settled within `time`.
    pub(super) async fn settled_within(&self, time: Duration) -> Result<u64> {
        let before = self.running.summary().succeeded;
        tokio::time::sleep(time).await;
        Ok(self.running.summary().succeeded - before)
    }

    /// Stops the producers, then the worker; returns how many jobs the worker has settled.
    pub(super) async fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        join_all(self.producers).await?;
        Ok(self.running.stop().await.succeeded)
    }
}

/// The microseconds from each enqueue call to the handler's first line, on an otherwise
/// idle worker.
pub(super) async fn pickup(client: &Client, samples: u64) -> Result<Vec<u64>> {
    pickup_of(Worker::builder(client.clone()), client, samples, library::job).await
}

/// The same, of jobs that `job` makes; they are of the kind [`KIND`]. The worker may handle other
/// kinds too.
pub(crate) async fn pickup_of(
    worker: Builder,
    client: &Client,
    samples: u64,
    job: fn(u64) -> NewJob,
) -> Result<Vec<u64>> {
    let started = Instant::now();
    let now = move || started.elapsed().as_nanos() as u64;
    let picked_up: Arc<Vec<AtomicU64>> = Arc::new((0..samples).map(|_| AtomicU64::new(0)).collect());
    let slots = picked_up.clone();
    let handler = move |mail: Mail, _: Context| {
        if let Some(slot) = slots.get(mail.n as usize) {
            slot.store(now(), Ordering::Relaxed);
        }
        async { Ok(()) }
    };
    let running = worker.function(KIND, handler).concurrency(CONCURRENCY).build()?.start().await?;
    warm_up(client, &running, WARM_UP, job).await?;

    let (mut enqueued, mut gaps) = (Vec::new(), Gaps(0x9e37_79b9_7f4a_7c15));
    for n in 0..samples {
        enqueued.push(now());
        client.enqueue(job(n)).await?;
        tokio::time::sleep(gaps.next()).await;
    }
    wait_until_settled(&running, WARM_UP + samples).await?;
    running.stop().await;
    let read = |(at, slot): (u64, &AtomicU64)| slot.load(Ordering::Relaxed).saturating_sub(at) / 1000;
    Ok(enqueued.into_iter().zip(picked_up.iter()).map(read).collect())
}

/// Lets a worker run some jobs, so that connections are open and statements prepared,
/// and then become idle.
async fn warm_up(client: &Client, running: &RunningWorker, jobs: u64, job: fn(u64) -> NewJob) -> Result<()> {
    for n in 0..jobs {
        client.enqueue(job(n)).await?;
    }
    wait_until_settled(running, jobs).await?;
    tokio::time::sleep(SLOW_DOWN).await;
    Ok(())
}

async fn wait_until_settled(running: &RunningWorker, jobs: u64) -> Result<()> {
    let started = Instant::now();
    loop {
        let done = running.summary();
        if done.succeeded >= jobs {
            return Ok(());
        }
        if started.elapsed() > SETTLE_TIMEOUT {
            return Err(format!(
                "only {} of {jobs} jobs were settled within {} s",
                done.succeeded,
                SETTLE_TIMEOUT.as_secs()
            )
            .into());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Pauses of 5 to 15 milliseconds, the same ones for every system.
struct Gaps(u64);

impl Gaps {
    fn next(&mut self) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Duration::from_micros(5_000 + self.0 % 10_000)
    }
}
