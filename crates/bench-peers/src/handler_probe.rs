//! The payload of all peers, and what their handlers do: count runs and record the time.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// The payload: about 60 bytes of JSON, the same as Longshore's.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Payload {
    pub(crate) to: String,
    pub(crate) template: String,
    pub(crate) n: u64,
}

impl Payload {
    pub(crate) fn new(n: u64) -> Self {
        Payload { to: "somebody@example.com".into(), template: "welcome".into(), n }
    }
}

static RUNS: AtomicU64 = AtomicU64::new(0);
static PICKUPS: OnceLock<Pickups> = OnceLock::new();

/// When each job was enqueued and picked up, in nanoseconds since `started`.
struct Pickups {
    started: Instant,
    enqueued: Vec<AtomicU64>,
    picked_up: Vec<AtomicU64>,
}

impl Pickups {
    fn now(&self) -> u64 {
        self.started.elapsed().as_nanos() as u64
    }
}

/// Every handler calls this first.
pub(crate) fn record_run(n: u64) {
    if let Some(pickups) = PICKUPS.get()
        && let Some(slot) = pickups.picked_up.get(n as usize)
    {
        slot.store(pickups.now(), Ordering::Relaxed);
    }
    RUNS.fetch_add(1, Ordering::Release);
}

/// How many handlers have run.
pub(crate) fn count() -> u64 {
    RUNS.load(Ordering::Acquire)
}

/// Starts to record the times of jobs with numbers below `jobs`.
pub(crate) fn time_pickups(jobs: u64) {
    let slots = || (0..jobs).map(|_| AtomicU64::new(0)).collect();
    let _ = PICKUPS.set(Pickups { started: Instant::now(), enqueued: slots(), picked_up: slots() });
}

/// Call this right before enqueueing job `n`.
pub(crate) fn record_enqueue(n: u64) {
    if let Some(pickups) = PICKUPS.get() {
        pickups.enqueued[n as usize].store(pickups.now(), Ordering::Relaxed);
    }
}

/// The microseconds from enqueue to pick-up of every recorded job.
pub(crate) fn pickup_micros() -> Vec<u64> {
    let Some(pickups) = PICKUPS.get() else { return Vec::new() };
    let read = |slot: &AtomicU64| slot.load(Ordering::Relaxed);
    let pairs = pickups.enqueued.iter().zip(&pickups.picked_up);
    pairs.map(|(from, to)| read(to).saturating_sub(read(from)) / 1000).collect()
}
