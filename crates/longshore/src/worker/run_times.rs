//! How long attempts take: a moving average per kind, and for how long the attempts in the slots
//! have been running. The claimer decides from both how many jobs it may claim before a slot is
//! free for them. It does not know how long one particular job will take.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A claimed job should start within this time.
pub(super) const START_WITHIN: Duration = Duration::from_millis(100);

/// The estimated run time of one kind.
#[derive(Default)]
pub(super) struct RunTime {
    /// The moving average of how long a handler's call takes, in nanoseconds; 0 until a call has
    /// ended.
    call: AtomicU64,
    /// How many jobs the last call had; more than one for a batch.
    jobs: AtomicU64,
}

impl RunTime {
    /// Adds the duration of a call. The average rises faster than it falls: a claim of too many
    /// jobs delays them, and a claim of too few only costs another claim.
    pub(super) fn record(&self, took: Duration, jobs: usize) {
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).max(1);
        let last = self.call.load(Ordering::Relaxed);
        let next = match last {
            0 => took,
            last if took > last => last + (took - last) / 2,
            last => last - (last - took) / 8,
        };
        // Of two updates at the same time, one is lost, which does no harm.
        self.call.store(next, Ordering::Relaxed);
        self.jobs.store(jobs as u64, Ordering::Relaxed);
    }

    /// How long a call takes; `None` until one has ended.
    pub(super) fn of_call(&self) -> Option<Duration> {
        let call = self.call.load(Ordering::Relaxed);
        (call > 0).then(|| Duration::from_nanos(call))
    }

    /// How long one job occupies a slot; `None` until a call has ended.
    pub(super) fn of_job(&self) -> Option<Duration> {
        let jobs = self.jobs.load(Ordering::Relaxed).clamp(1, u32::MAX.into());
        self.of_call().map(|call| call / jobs as u32)
    }

    /// Whether a slot that runs a job of this kind is probably free within [`START_WITHIN`].
    pub(super) fn is_short(&self) -> bool {
        self.of_call().is_some_and(|call| call <= START_WITHIN)
    }
}

/// The slots of a worker.
pub(super) struct Slots {
    opened_at: Instant,
    clocks: Mutex<Vec<Arc<SlotClock>>>,
}

/// What one slot runs. Its runner writes it and the claimer reads it. Both fields can be read while
/// they change; a wrong value affects only one claim.
#[derive(Default)]
pub(super) struct SlotClock {
    /// When the running attempt started, in nanoseconds after [`Slots::opened_at`]; 0 if none
    /// runs.
    started: AtomicU64,
    /// The index of its kind, times two, plus one if the kind was short at the start.
    kind: AtomicUsize,
}

impl SlotClock {
    pub(super) fn stop(&self) {
        self.started.store(0, Ordering::Relaxed);
    }
}

impl Slots {
    pub(super) fn new() -> Self {
        Slots { opened_at: Instant::now(), clocks: Mutex::default() }
    }

    /// Adds the slot of a runner. The slot is removed when the runner has dropped it.
    pub(super) fn open(&self) -> Arc<SlotClock> {
        let clock = Arc::new(SlotClock::default());
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner).push(clock.clone());
        clock
    }

    /// Records that an attempt of this kind starts in the slot.
    pub(super) fn start(&self, slot: &SlotClock, now: Instant, kind: usize, run_time: &RunTime) {
        slot.kind.store(kind * 2 + usize::from(run_time.is_short()), Ordering::Relaxed);
        let after = now.saturating_duration_since(self.opened_at).as_nanos();
        slot.started.store((after as u64).max(1), Ordering::Relaxed);
    }

    /// Looks at every slot.
    pub(super) fn occupancy(&self) -> Occupancy {
        let now = self.opened_at.elapsed().as_nanos() as u64;
        let mut occupancy = Occupancy::default();
        let mut clocks = self.clocks.lock().unwrap_or_else(PoisonError::into_inner);
        clocks.retain(|clock| Arc::strong_count(clock) > 1);
        for clock in clocks.iter() {
            let started = clock.started.load(Ordering::Relaxed);
            if started == 0 {
                continue;
            }
            let kind = clock.kind.load(Ordering::Relaxed);
            let is_old = Duration::from_nanos(now.saturating_sub(started)) > START_WITHIN;
            occupancy.add(kind / 2, kind % 2 == 1, is_old);
        }
        occupancy
    }
}

/// What runs in the slots at one moment.
#[derive(Default)]
pub(super) struct Occupancy {
    /// Slots that are probably not free within [`START_WITHIN`].
    pub(super) long: usize,
    /// Per kind: the running attempts, and those that have run for longer than [`START_WITHIN`].
    kinds: Vec<(usize, usize, usize)>,
}

impl Occupancy {
    fn add(&mut self, kind: usize, is_short: bool, is_old: bool) {
        self.long += usize::from(is_old || !is_short);
        let at = self.kinds.iter().position(|(index, ..)| *index == kind).unwrap_or_else(|| {
            self.kinds.push((kind, 0, 0));
            self.kinds.len() - 1
        });
        self.kinds[at].1 += 1;
        self.kinds[at].2 += usize::from(is_old);
    }

    /// Whether a kind takes longer now than its finished attempts did: at least half of its
    /// running attempts have run for longer than [`START_WITHIN`]. One slow job among many fast
    /// ones does not make a kind slow.
    pub(super) fn is_slow_now(&self, kind: usize) -> bool {
        let of_kind = self.kinds.iter().find(|(index, ..)| *index == kind);
        of_kind.is_some_and(|(_, running, old)| *old > 0 && old * 2 >= *running)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_run_time_rises_at_once_and_falls_slowly() {
        let run_time = RunTime::default();
        assert!(run_time.of_call().is_none() && !run_time.is_short());
        run_time.record(MS, 1);
        assert_eq!(run_time.of_call(), Some(MS));
        run_time.record(1001 * MS, 1);
        assert_eq!(run_time.of_call(), Some(501 * MS));
        assert!(!run_time.is_short());
        for _ in 0..20 {
            run_time.record(MS, 1);
        }
        assert!(run_time.is_short(), "{:?}", run_time.of_call());
    }

    #[test]
    fn the_jobs_of_a_batch_share_its_run_time() {
        let run_time = RunTime::default();
        run_time.record(80 * MS, 20);
        assert_eq!((run_time.of_call(), run_time.of_job()), (Some(80 * MS), Some(4 * MS)));
    }

    #[test]
    fn a_slot_is_long_while_its_kind_has_no_history_or_its_attempt_is_old() {
        let slots = Slots { opened_at: Instant::now() - 10 * START_WITHIN, clocks: Mutex::default() };
        let (short, unknown) = (RunTime::default(), RunTime::default());
        short.record(MS, 1);
        let (first, second, third) = (slots.open(), slots.open(), slots.open());
        let (now, before) = (Instant::now(), Instant::now() - 2 * START_WITHIN);
        slots.start(&first, now, 7, &short);
        assert_eq!(slots.occupancy().long, 0);
        slots.start(&second, now, 8, &unknown);
        assert_eq!(slots.occupancy().long, 1);
        slots.start(&third, before, 7, &short);
        let occupancy = slots.occupancy();
        assert_eq!(occupancy.long, 2);
        assert!(occupancy.is_slow_now(7) && !occupancy.is_slow_now(8) && !occupancy.is_slow_now(9));
        slots.start(&second, now, 7, &short);
        assert!(!slots.occupancy().is_slow_now(7), "one of three");
        third.stop();
        drop((first, second));
        assert_eq!(slots.occupancy().long, 0);
        assert_eq!(slots.clocks.lock().unwrap().len(), 1);
    }
}
