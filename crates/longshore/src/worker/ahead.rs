//! Claiming ahead: which kinds, and how many jobs the worker buffers beyond its free slots. It does not claim.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::metrics::Kind;
use super::run_times::{Occupancy, START_WITHIN};
use super::settings::Settings;
use super::shared::Shared;
use crate::store::ClaimCursor;

/// The maximum number of jobs buffered in this process beyond the free slots.
const MAX_BUFFER: usize = 2000;
/// A kind is claimed ahead once its run time is at most this, until it is above [`START_WITHIN`].
/// The gap keeps the set of these kinds stable, because each change costs a look at the queue.
const MAX_RUN_TIME_AHEAD: Duration = Duration::from_millis(50);
/// After a claim ahead that found too few jobs, how long to wait for a wake-up before the next.
const PAUSE: Duration = Duration::from_millis(100);

pub(super) struct Ahead {
    pub(super) kinds: AheadKinds,
    pub(super) pace: Pace,
    /// The kinds of the jobs that the last successful claim found, with their numbers.
    last_found: Vec<(Arc<Kind>, usize)>,
    /// Until when not to claim ahead, because the last such claim found too few jobs.
    paused_until: Option<Instant>,
    /// For claims ahead, if not every kind is claimed ahead.
    pub(super) cursor: ClaimCursor,
}

impl Ahead {
    pub(super) fn new() -> Self {
        Ahead {
            kinds: AheadKinds::default(),
            pace: Pace::new(),
            last_found: Vec::new(),
            paused_until: None,
            cursor: ClaimCursor::default(),
        }
    }

    /// Records that a claim ahead found too few jobs.
    pub(super) fn pause(&mut self) {
        self.paused_until = Some(Instant::now() + PAUSE);
    }

    /// Records a wake-up: there may be jobs.
    pub(super) fn resume(&mut self) {
        self.paused_until = None;
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// Forgets the kinds of the jobs that the last claim found.
    pub(super) fn forget_found(&mut self) {
        self.last_found.clear();
    }

    /// Counts a claimed job of this kind.
    pub(super) fn count_found(&mut self, shared: &Shared, kind: &str) -> Arc<Kind> {
        let known = self.last_found.iter_mut().rev().find(|(known, _)| known.name == kind);
        if let Some((known, jobs)) = known {
            *jobs += 1;
            return known.clone();
        }
        let kind = shared.metrics.kind(kind);
        self.last_found.push((kind.clone(), 1));
        kind
    }

    /// How many jobs to buffer: as many as the handlers will end before the next claim returns,
    /// and no more than this many slots can start in time.
    pub(super) fn buffer_target(&mut self, shared: &Shared, free_soon: usize) -> usize {
        let target = self.pace.buffer_target(shared.buffer.ended(), &shared.settings);
        self.paused_until = self.paused_until.filter(|until| Instant::now() < *until);
        if self.is_paused() || self.kinds.names.is_empty() {
            return 0;
        }
        target.min(self.startable(free_soon))
    }

    /// How many jobs this many slots can start in time, if the next jobs are like the last ones.
    fn startable(&self, slots: usize) -> usize {
        let (mut time, mut jobs) = (Duration::ZERO, 0);
        for (kind, found) in &self.last_found {
            let known = kind.run_time.of_job().filter(|_| self.kinds.has(kind.index));
            if let Some(run_time) = known {
                time += run_time * *found as u32;
                jobs += found;
            }
        }
        if jobs == 0 {
            return slots;
        }
        let available = START_WITHIN.as_secs_f64() * slots as f64;
        // A division by zero is infinite, and the conversion limits it.
        (available / (time.as_secs_f64() / jobs as f64)) as usize
    }
}

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
    fn has(&self, index: usize) -> bool {
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

    fn new() -> Self {
        Pace { measured_at: Instant::now(), ended: 0, per_second: 0.0, claim_time: Duration::from_millis(5) }
    }

    pub(super) fn claimed(&mut self, took: Duration) {
        self.claim_time = (self.claim_time * 3 + took) / 4;
    }

    fn buffer_target(&mut self, ended: u64, settings: &Settings) -> usize {
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
