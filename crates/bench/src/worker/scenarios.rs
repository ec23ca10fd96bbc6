//! What our worker is put through, on whichever engine the client speaks to.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use longshore::Client;
use longshore::worker::{Context, Running, Worker};
use serde::Deserialize;

use crate::library::{self, KIND};
use crate::{Result, together};

/// How many jobs run at once, unless they sleep.
const CONCURRENCY: u32 = 24;
/// How many sleepers run at once, and for how long.
const SLEEPERS: u32 = 200;
const SLEEP: Duration = Duration::from_millis(10);
/// Nobody waits longer for a job that should have been settled.
const LOST_AFTER: Duration = Duration::from_secs(300);
/// Jobs that a started worker runs first, and how long it is then given to come
/// to rest.
const WARM_UP: u64 = 20;
const COME_TO_REST: Duration = Duration::from_secs(1);
/// How long producers run before the clock does.
pub(super) const GET_GOING: Duration = Duration::from_millis(300);

/// The payload, decoded as a handler would have it.
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

/// A worker of no-op jobs with the default settings.
pub(super) async fn start(client: &Client) -> Result<Running> {
    let worker = Worker::builder(client.clone()).function(KIND, no_op).concurrency(CONCURRENCY);
    Ok(worker.build()?.start().await?)
}

/// From the worker's start to the last settlement.
pub(super) async fn drain(client: &Client, jobs: u64) -> Result<Running> {
    let running = start(client).await?;
    settled(&running, jobs).await?;
    Ok(running)
}

/// As [`drain`], of jobs that sleep.
pub(super) async fn drain_sleepers(client: &Client, jobs: u64) -> Result<Running> {
    let worker = Worker::builder(client.clone()).function(KIND, sleep).concurrency(SLEEPERS);
    let running = worker.build()?.start().await?;
    settled(&running, jobs).await?;
    Ok(running)
}

/// What a runtime that costs nothing would do: sleep and count.
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
    together((0..SLEEPERS).map(sleeper).collect()).await
}

/// Producers that each await their enqueue, and a worker that consumes.
pub(super) struct Sustained {
    running: Running,
    producers: Vec<tokio::task::JoinHandle<Result<u64>>>,
    stop: Arc<AtomicBool>,
}

impl Sustained {
    /// A warm worker, and producers that have got going.
    pub(super) async fn start(client: &Client, producers: usize) -> Result<Self> {
        let running = start(client).await?;
        warm(client, &running, WARM_UP).await?;
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
        tokio::time::sleep(GET_GOING).await;
        Ok(Sustained { running, producers, stop })
    }

    /// How many are settled within the time.
    pub(super) async fn settled_within(&self, time: Duration) -> Result<u64> {
        let before = self.running.summary().succeeded;
        tokio::time::sleep(time).await;
        Ok(self.running.summary().succeeded - before)
    }

    /// Stops the producers, then the worker; how many were settled in its life.
    pub(super) async fn stop(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        together(self.producers).await?;
        Ok(self.running.stop().await.succeeded)
    }
}

/// Microseconds from the enqueue call to the handler's first line, on a worker
/// that has nothing else to do.
pub(super) async fn pickup(client: &Client, samples: u64) -> Result<Vec<u64>> {
    let began = Instant::now();
    let now = move || began.elapsed().as_nanos() as u64;
    let picked_up: Arc<Vec<AtomicU64>> = Arc::new((0..samples).map(|_| AtomicU64::new(0)).collect());
    let slots = picked_up.clone();
    let handler = move |mail: Mail, _: Context| {
        if let Some(slot) = slots.get(mail.n as usize) {
            slot.store(now(), Ordering::Relaxed);
        }
        async { Ok(()) }
    };
    let worker = Worker::builder(client.clone()).function(KIND, handler).concurrency(CONCURRENCY);
    let running = worker.build()?.start().await?;
    warm(client, &running, WARM_UP).await?;

    let (mut enqueued, mut gaps) = (Vec::new(), Gaps(0x9e37_79b9_7f4a_7c15));
    for n in 0..samples {
        enqueued.push(now());
        client.enqueue(library::job(n)).await?;
        tokio::time::sleep(gaps.next()).await;
    }
    settled(&running, WARM_UP + samples).await?;
    running.stop().await;
    let read = |(at, slot): (u64, &AtomicU64)| slot.load(Ordering::Relaxed).saturating_sub(at) / 1000;
    Ok(enqueued.into_iter().zip(picked_up.iter()).map(read).collect())
}

/// Has a worker run a few jobs, so that connections are open and statements
/// prepared; then lets it come to rest.
async fn warm(client: &Client, running: &Running, few: u64) -> Result<()> {
    for n in 0..few {
        client.enqueue(library::job(n)).await?;
    }
    settled(running, few).await?;
    tokio::time::sleep(COME_TO_REST).await;
    Ok(())
}

async fn settled(running: &Running, jobs: u64) -> Result<()> {
    let began = Instant::now();
    loop {
        let done = running.summary();
        if done.succeeded >= jobs {
            return Ok(());
        }
        if began.elapsed() > LOST_AFTER {
            return Err(format!("{} of {jobs} jobs settled; giving up on the rest", done.succeeded).into());
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
