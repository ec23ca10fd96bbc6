//! The scenarios, the same for every peer and for Longshore (`bench worker`).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinHandle;

use crate::{Arguments, Peer, Result, Scenario, handler_probe};

/// The result of a run.
#[derive(Serialize)]
pub(crate) struct Outcome {
    jobs: u64,
    seconds: f64,
    /// The CPU time of this process during the run.
    cpu_seconds: Option<f64>,
    wal_bytes: Option<u64>,
    /// The pick-up latencies, in the order of the enqueues.
    latencies_micros: Vec<u64>,
}

/// Jobs per bulk enqueue.
const BULK: u64 = 5_000;
/// The maximum wait for a job that should have run.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);
/// Jobs that a new worker runs before the measurement.
const WARM_UP: u64 = 20;
/// How long the worker then gets to become idle.
const SLOW_DOWN: Duration = Duration::from_secs(1);
/// How long callers run before the measurement starts, so that their connections are open
/// and their statements prepared.
const RAMP_UP: Duration = Duration::from_millis(300);

pub(crate) async fn run<P: Peer>(arguments: &Arguments, peer: P) -> Result<Outcome> {
    let time = Duration::from_secs_f64(arguments.seconds);
    match arguments.scenario {
        Scenario::Drain => drain(&peer, arguments.jobs).await,
        Scenario::Sustained => sustained(&peer, arguments.callers, time).await,
        Scenario::Enqueue => enqueue(&peer, arguments.callers, time).await,
        Scenario::Pickup => pickup(&peer, arguments.jobs).await,
    }
}

async fn drain<P: Peer>(peer: &P, jobs: u64) -> Result<Outcome> {
    let mut next = 0;
    while next < jobs {
        let end = jobs.min(next + BULK);
        peer.enqueue_many(next..end).await?;
        next = end;
    }
    peer.checkpoint_and_vacuum().await?;
    let clock = Clock::start(peer).await?;
    let running = peer.start().await?;
    wait_until_run(jobs).await?;
    // The last jobs have run but may not be settled yet; the time includes their settles.
    while !peer.all_settled(jobs).await? {
        clock.check_timeout()?;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let outcome = clock.stop(peer, jobs).await?;
    peer.stop(running).await?;
    Ok(outcome)
}

/// Counts the handlers that run within `time`. For Longshore, settles are counted, which
/// come later.
async fn sustained<P: Peer>(peer: &P, callers: usize, time: Duration) -> Result<Outcome> {
    let running = start_warm(peer).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let callers = produce(peer, callers, &stop);
    tokio::time::sleep(RAMP_UP).await;
    let (clock, before) = (Clock::start(peer).await?, handler_probe::count());
    tokio::time::sleep(time).await;
    let outcome = clock.stop(peer, handler_probe::count() - before).await?;
    stop.store(true, Ordering::Relaxed);
    join_all(callers).await?;
    peer.stop(running).await?;
    Ok(outcome)
}

async fn enqueue<P: Peer>(peer: &P, callers: usize, time: Duration) -> Result<Outcome> {
    peer.enqueue_many(0..1000).await?;
    peer.checkpoint_and_vacuum().await?;
    let stop = Arc::new(AtomicBool::new(false));
    let warm_up = produce(peer, callers, &stop);
    tokio::time::sleep(RAMP_UP).await;
    stop.store(true, Ordering::Relaxed);
    join_all(warm_up).await?;
    stop.store(false, Ordering::Relaxed);
    let clock = Clock::start(peer).await?;
    let callers = produce(peer, callers, &stop);
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let stored = join_all(callers).await?;
    clock.stop(peer, stored).await
}

async fn pickup<P: Peer>(peer: &P, samples: u64) -> Result<Outcome> {
    let running = start_warm(peer).await?;
    handler_probe::time_pickups(samples);
    let before = handler_probe::count();
    let clock = Clock::start(peer).await?;
    let mut gaps = Gaps(0x9e37_79b9_7f4a_7c15);
    for n in 0..samples {
        handler_probe::record_enqueue(n);
        peer.enqueue(n).await?;
        tokio::time::sleep(gaps.next()).await;
    }
    wait_until_run(before + samples).await?;
    let mut outcome = clock.stop(peer, samples).await?;
    outcome.latencies_micros = handler_probe::pickup_micros();
    peer.stop(running).await?;
    Ok(outcome)
}

/// Starts a worker and lets it run some jobs, so that connections are open and statements
/// prepared, and then become idle.
async fn start_warm<P: Peer>(peer: &P) -> Result<P::Running> {
    peer.checkpoint_and_vacuum().await?;
    let running = peer.start().await?;
    for n in 0..WARM_UP {
        peer.enqueue(n).await?;
    }
    wait_until_run(WARM_UP).await?;
    tokio::time::sleep(SLOW_DOWN).await;
    Ok(running)
}

async fn wait_until_run(jobs: u64) -> Result<()> {
    let started = Instant::now();
    while handler_probe::count() < jobs {
        if started.elapsed() > RUN_TIMEOUT {
            return Err(format!(
                "only {} of {jobs} jobs ran within {} s",
                handler_probe::count(),
                RUN_TIMEOUT.as_secs()
            )
            .into());
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Starts callers that each enqueue one job after another until `stop` is set.
fn produce<P: Peer>(peer: &P, callers: usize, stop: &Arc<AtomicBool>) -> Vec<JoinHandle<Result<u64>>> {
    let call = |_| {
        let (peer, stop) = (peer.clone(), stop.clone());
        tokio::spawn(async move {
            let mut n = 0;
            while !stop.load(Ordering::Relaxed) {
                peer.enqueue(n).await?;
                n += 1;
            }
            Ok(n)
        })
    };
    (0..callers).map(call).collect()
}

async fn join_all(tasks: Vec<JoinHandle<Result<u64>>>) -> Result<u64> {
    let mut jobs = 0;
    for task in tasks {
        jobs += task.await??;
    }
    Ok(jobs)
}

/// Pauses of 5 to 15 milliseconds, the same ones in every run.
struct Gaps(u64);

impl Gaps {
    fn next(&mut self) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Duration::from_micros(5_000 + self.0 % 10_000)
    }
}

/// Measures the time, the CPU time and the WAL of a phase.
struct Clock {
    started: Instant,
    cpu: Option<Duration>,
    wal: Option<u64>,
}

impl Clock {
    async fn start<P: Peer>(peer: &P) -> Result<Self> {
        let wal = peer.wal_position().await?;
        Ok(Clock { started: Instant::now(), cpu: client_cpu(), wal })
    }

    fn check_timeout(&self) -> Result<()> {
        if self.started.elapsed() > RUN_TIMEOUT {
            return Err(format!("the last jobs were not settled within {} s", RUN_TIMEOUT.as_secs()).into());
        }
        Ok(())
    }

    async fn stop<P: Peer>(self, peer: &P, jobs: u64) -> Result<Outcome> {
        let (seconds, cpu) = (self.started.elapsed().as_secs_f64(), client_cpu());
        let wal = peer.wal_position().await?;
        Ok(Outcome {
            jobs,
            seconds,
            cpu_seconds: cpu.zip(self.cpu).map(|(after, before)| (after - before).as_secs_f64()),
            wal_bytes: wal.zip(self.wal).map(|(after, before)| after - before),
            latencies_micros: Vec::new(),
        })
    }
}

/// The CPU time of this process so far, with a resolution of 10 ms; Linux only.
fn client_cpu() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name, which may contain any character.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * 10))
}
