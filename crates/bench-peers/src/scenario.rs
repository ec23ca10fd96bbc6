//! The scenarios, the same for every peer and the same as on our side.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::task::JoinHandle;

use crate::{Arguments, Peer, Result, Scenario, handler_probe};

/// What a run came to.
#[derive(Serialize)]
pub(crate) struct Outcome {
    jobs: u64,
    seconds: f64,
    /// What this process computed meanwhile.
    cpu_seconds: Option<f64>,
    wal_bytes: Option<u64>,
    /// Of the pick-ups, in the order of the enqueues.
    latencies_micros: Vec<u64>,
}

/// Jobs of a bulk call.
const BULK: u64 = 5_000;
/// Nobody waits longer for a job that should have run.
const LOST_AFTER: Duration = Duration::from_secs(300);
/// Jobs that a started worker runs first, and how long it is then given to come
/// to rest.
const WARM_UP: u64 = 20;
const COME_TO_REST: Duration = Duration::from_secs(1);
/// How long callers run before the clock does: their connections are open then,
/// and their statements prepared.
const GET_GOING: Duration = Duration::from_millis(300);

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
    all_ran(jobs).await?;
    // The settles of the last jobs are still on their way, and they count.
    while !peer.all_settled(jobs).await? {
        clock.in_time()?;
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let outcome = clock.stop(peer, jobs).await?;
    peer.stop(running).await?;
    Ok(outcome)
}

/// Counts handlers that ran within the time. Our side counts settlements,
/// which come later.
async fn sustained<P: Peer>(peer: &P, callers: usize, time: Duration) -> Result<Outcome> {
    let running = warm(peer).await?;
    let stop = Arc::new(AtomicBool::new(false));
    let callers = produce(peer, callers, &stop);
    tokio::time::sleep(GET_GOING).await;
    let (clock, before) = (Clock::start(peer).await?, handler_probe::count());
    tokio::time::sleep(time).await;
    let outcome = clock.stop(peer, handler_probe::count() - before).await?;
    stop.store(true, Ordering::Relaxed);
    together(callers).await?;
    peer.stop(running).await?;
    Ok(outcome)
}

async fn enqueue<P: Peer>(peer: &P, callers: usize, time: Duration) -> Result<Outcome> {
    peer.enqueue_many(0..1000).await?;
    peer.checkpoint_and_vacuum().await?;
    let stop = Arc::new(AtomicBool::new(false));
    let warm_up = produce(peer, callers, &stop);
    tokio::time::sleep(GET_GOING).await;
    stop.store(true, Ordering::Relaxed);
    together(warm_up).await?;
    stop.store(false, Ordering::Relaxed);
    let clock = Clock::start(peer).await?;
    let callers = produce(peer, callers, &stop);
    tokio::time::sleep(time).await;
    stop.store(true, Ordering::Relaxed);
    let stored = together(callers).await?;
    clock.stop(peer, stored).await
}

async fn pickup<P: Peer>(peer: &P, samples: u64) -> Result<Outcome> {
    let running = warm(peer).await?;
    handler_probe::time_pickups(samples);
    let before = handler_probe::count();
    let clock = Clock::start(peer).await?;
    let mut gaps = Gaps(0x9e37_79b9_7f4a_7c15);
    for n in 0..samples {
        handler_probe::record_enqueue(n);
        peer.enqueue(n).await?;
        tokio::time::sleep(gaps.next()).await;
    }
    all_ran(before + samples).await?;
    let mut outcome = clock.stop(peer, samples).await?;
    outcome.latencies_micros = handler_probe::pickup_micros();
    peer.stop(running).await?;
    Ok(outcome)
}

/// Starts a worker and has it run a few jobs, so that connections are open and
/// statements prepared; then lets it come to rest.
async fn warm<P: Peer>(peer: &P) -> Result<P::Running> {
    peer.checkpoint_and_vacuum().await?;
    let running = peer.start().await?;
    for n in 0..WARM_UP {
        peer.enqueue(n).await?;
    }
    all_ran(WARM_UP).await?;
    tokio::time::sleep(COME_TO_REST).await;
    Ok(running)
}

async fn all_ran(jobs: u64) -> Result<()> {
    let began = Instant::now();
    while handler_probe::count() < jobs {
        if began.elapsed() > LOST_AFTER {
            return Err(
                format!("{} of {jobs} jobs ran; giving up on the rest", handler_probe::count()).into()
            );
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Callers that each enqueue one job after another until told to stop.
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

async fn together(tasks: Vec<JoinHandle<Result<u64>>>) -> Result<u64> {
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

/// What a timed phase is measured by.
struct Clock {
    began: Instant,
    cpu: Option<Duration>,
    wal: Option<u64>,
}

impl Clock {
    async fn start<P: Peer>(peer: &P) -> Result<Self> {
        let wal = peer.wal_position().await?;
        Ok(Clock { began: Instant::now(), cpu: client_cpu(), wal })
    }

    fn in_time(&self) -> Result<()> {
        if self.began.elapsed() > LOST_AFTER {
            return Err(format!("the last jobs were not settled within {} s", LOST_AFTER.as_secs()).into());
        }
        Ok(())
    }

    async fn stop<P: Peer>(self, peer: &P, jobs: u64) -> Result<Outcome> {
        let (seconds, cpu) = (self.began.elapsed().as_secs_f64(), client_cpu());
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

/// The processor time of this process so far, to a hundredth of a second.
fn client_cpu() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The second field is the program's name and may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(Duration::from_millis((user + system) * 10))
}
