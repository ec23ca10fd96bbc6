//! What the handlers of all peers do: nothing, and be counted.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// The payload: about 60 bytes of JSON, the same as on our side.
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

static RAN: AtomicU64 = AtomicU64::new(0);
static PICKUPS: OnceLock<Pickups> = OnceLock::new();

/// When each job was enqueued and picked up, in nanoseconds from the beginning.
struct Pickups {
    began: Instant,
    enqueued: Vec<AtomicU64>,
    picked_up: Vec<AtomicU64>,
}

impl Pickups {
    fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }
}

/// Called first thing by every handler.
pub(crate) fn record_run(n: u64) {
    if let Some(pickups) = PICKUPS.get()
        && let Some(slot) = pickups.picked_up.get(n as usize)
    {
        slot.store(pickups.now(), Ordering::Relaxed);
    }
    RAN.fetch_add(1, Ordering::Release);
}

/// How many handlers have run.
pub(crate) fn count() -> u64 {
    RAN.load(Ordering::Acquire)
}

/// From here on, jobs numbered below `jobs` are timed.
pub(crate) fn time_pickups(jobs: u64) {
    let slots = || (0..jobs).map(|_| AtomicU64::new(0)).collect();
    let _ = PICKUPS.set(Pickups { began: Instant::now(), enqueued: slots(), picked_up: slots() });
}

/// Called right before job `n` is enqueued.
pub(crate) fn record_enqueue(n: u64) {
    if let Some(pickups) = PICKUPS.get() {
        pickups.enqueued[n as usize].store(pickups.now(), Ordering::Relaxed);
    }
}

/// Microseconds from enqueue to pick-up, of every job that was timed.
pub(crate) fn pickup_micros() -> Vec<u64> {
    let Some(pickups) = PICKUPS.get() else { return Vec::new() };
    let read = |slot: &AtomicU64| slot.load(Ordering::Relaxed);
    let pairs = pickups.enqueued.iter().zip(&pickups.picked_up);
    pairs.map(|(from, to)| read(to).saturating_sub(read(from)) / 1000).collect()
}
