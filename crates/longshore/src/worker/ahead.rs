//! How far ahead a worker claims: which kinds, and how many jobs it buffers.

use std::time::{Duration, Instant};

use super::run_times::{Occupancy, START_WITHIN};
use super::settings::Settings;
use super::shared::Shared;

/// The maximum number of jobs buffered in this process beyond the free slots.
const MAX_BUFFER: usize = 2000;
/// A kind is claimed ahead once its run time is at most this, until it is above [`START_WITHIN`].
/// The gap keeps the set of these kinds stable, because each change costs a scan of the queue.
const MAX_RUN_TIME_AHEAD: Duration = Duration::from_millis(50);

/// The kinds that are claimed ahead.
#[derive(Default)]
pub(super) struct AheadKinds {
    /// By [`Kind::index`].
    members: Vec<bool>,
    pub(super) names: Vec<String>,
    /// Whether these are all kinds that the worker handles.
    pub(super) includes_all: bool,
}

impl AheadKinds {
    pub(super) fn has(&self, index: usize) -> bool {
        self.members.get(index).copied().unwrap_or_default()
    }

    pub(super) fn update(&mut self, shared: &Shared, handled: Option<&[String]>, occupancy: &Occupancy) {
        let mut changed = false;
        shared.metrics.for_each_kind(|kind| {
            let is_member = self.has(kind.index);
            let max_run_time = if is_member { START_WITHIN } else { MAX_RUN_TIME_AHEAD };
            let is_short = kind.run_time.of_call().is_some_and(|run_time| run_time <= max_run_time);
            let becomes_member = is_short && !occupancy.is_slow_now(kind.index);
            if becomes_member != is_member {
                self.members.resize(self.members.len().max(kind.index + 1), false);
                self.members[kind.index] = becomes_member;
                changed = true;
            }
        });
        if changed {
            self.names.clear();
            shared.metrics.for_each_kind(|kind| {
                if self.has(kind.index) {
                    self.names.push(kind.name.clone());
                }
            });
            self.includes_all = handled.is_some_and(|handled| handled.len() == self.names.len());
        }
    }
}

/// Computes how many jobs to buffer: as many as the handlers will end before the next claim
/// returns.
pub(super) struct Pace {
    measured_at: Instant,
    ended: u64,
    per_second: f64,
    /// Moving average of how long a claim takes.
    claim_time: Duration,
}

impl Pace {
    const WINDOW: Duration = Duration::from_millis(5);

    pub(super) fn new() -> Self {
        Pace { measured_at: Instant::now(), ended: 0, per_second: 0.0, claim_time: Duration::from_millis(5) }
    }

    pub(super) fn claimed(&mut self, took: Duration) {
        self.claim_time = (self.claim_time * 3 + took) / 4;
    }

    pub(super) fn buffer_target(&mut self, ended: u64, settings: &Settings) -> usize {
        let elapsed = self.measured_at.elapsed();
        if elapsed >= Pace::WINDOW {
            let rate = (ended - self.ended) as f64 / elapsed.as_secs_f64();
            self.per_second = (self.per_second + rate) / 2.0;
            (self.measured_at, self.ended) = (Instant::now(), ended);
        }
        let ahead = (self.claim_time * 4).clamp(Duration::from_millis(20), START_WITHIN);
        let ahead = ahead.min(settings.stale_after / 20);
        ((self.per_second * ahead.as_secs_f64()) as usize).min(MAX_BUFFER)
    }
}
