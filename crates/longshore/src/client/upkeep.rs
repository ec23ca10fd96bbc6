//! Rounds of retention, and of folding tallies, notes and measures. A round makes steps until nothing is left
//! to do, with pauses, so that claims and settles are not delayed. `worker/upkeep.rs` decides when a round
//! begins.

use std::time::{Duration, Instant};

use super::Client;
use crate::error::Result;
use crate::store::{Retained, Retention};

#[doc(hidden)]
impl Client {
    /// Removes the finished jobs whose retention time has passed, in steps. `pause` waits between two steps,
    /// and ends the round early by returning `false`.
    pub async fn retain<Pause, Waiting>(&self, policy: &Retention, mut pause: Pause) -> Result<Retained>
    where
        Pause: FnMut(Duration) -> Waiting + Send,
        Waiting: Future<Output = bool> + Send,
    {
        let mut pace = Pace::default();
        let mut turn = Retained { removed: 0, examined: 0, done: false };
        loop {
            let started = Instant::now();
            let step = self.store.retain(policy, pace.rows()).await?;
            turn.removed += step.removed;
            turn.examined += step.examined;
            turn.done = step.done;
            if turn.done || !pause(pace.pause_after(step.removed, started.elapsed())).await {
                return Ok(turn);
            }
        }
    }

    /// Folds the tallies, so that counting stays fast; returns how many rows. `pause` is as
    /// in [`retain`](Client::retain).
    pub async fn fold_tallies<Pause, Waiting>(&self, pause: Pause) -> Result<u64>
    where
        Pause: FnMut(Duration) -> Waiting + Send,
        Waiting: Future<Output = bool> + Send,
    {
        in_steps(pause, |rows| self.store.fold_tallies(rows)).await
    }

    /// Folds the notes about failures and the measures, and removes old ones; returns how many rows. `pause` is as
    /// in [`retain`](Client::retain).
    pub async fn fold_history<Pause, Waiting>(&self, mut pause: Pause) -> Result<u64>
    where
        Pause: FnMut(Duration) -> Waiting + Send,
        Waiting: Future<Output = bool> + Send,
    {
        let failures = in_steps(&mut pause, |rows| self.store.fold_error_groups(rows)).await?;
        Ok(failures + in_steps(&mut pause, |rows| self.store.fold_measures(rows)).await?)
    }
}

/// Makes steps until one is not full, or a pause ends the round. A step that is not full leaves only what was
/// written since it began. On a busy queue there is always something, so waiting for an empty step would
/// never end.
async fn in_steps<Pause, Waiting, Step, Stepping>(mut pause: Pause, step: Step) -> Result<u64>
where
    Pause: FnMut(Duration) -> Waiting + Send,
    Waiting: Future<Output = bool> + Send,
    Step: Fn(u32) -> Stepping + Send,
    Stepping: Future<Output = Result<u64>> + Send,
{
    let mut pace = Pace::default();
    let mut total = 0;
    loop {
        let started = Instant::now();
        let rows = pace.rows();
        let done = step(rows).await?;
        total += done;
        let is_full = done >= u64::from(rows);
        if !is_full || !pause(pace.pause_after(done, started.elapsed())).await {
            return Ok(total);
        }
    }
}

/// How long a step should take. Long enough that its commit costs little, short enough
/// that a claim or settle behind it is not delayed noticeably.
const TARGET: Duration = Duration::from_millis(25);
/// With fewer rows, most of the time would be spent on round trips and the commit.
const MIN_ROWS: u32 = 1000;
const MAX_ROWS: u32 = 10_000;
const FIRST_ROWS: u32 = 2000;
const MIN_PAUSE: Duration = Duration::from_millis(1);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// A round that takes longer than this is late. Then its pauses are halved, so that it removes more than
/// arrives, and again after each further such period, up to `MAX_HALVINGS` times.
const LATE: Duration = Duration::from_secs(10);
const MAX_HALVINGS: u32 = 3;
/// The pause after a step that changed nothing. If an open transaction has locked many expired jobs, every
/// step reads them in vain, and the round lasts until they are free.
const IDLE_PAUSE: Duration = Duration::from_millis(250);

/// Adapts the size of steps to the time they take. A busy database makes steps slow; they
/// become smaller, and the pauses after them longer.
#[derive(Debug)]
struct Pace {
    rows: u32,
    /// How long the round has taken so far.
    elapsed: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Pace { rows: FIRST_ROWS, elapsed: Duration::ZERO }
    }
}

impl Pace {
    /// How many rows the next step may change.
    fn rows(&self) -> u32 {
        self.rows
    }

    /// Adapts the next step to one that changed `changed` rows in this time. Returns how long to pause: as
    /// long as the step took, so that steps use at most half of the time of one connection, or less if the
    /// round is late.
    fn pause_after(&mut self, changed: u64, took: Duration) -> Duration {
        let factor = TARGET.as_secs_f64() / took.as_secs_f64().max(1e-6);
        // A step that found little to do says nothing about larger ones.
        let is_full = changed >= u64::from(self.rows / 2);
        if is_full || factor < 1.0 {
            let rows = f64::from(self.rows) * factor.clamp(0.5, 2.0);
            self.rows = (rows as u32).clamp(MIN_ROWS, MAX_ROWS);
        }
        let halvings = (self.elapsed.as_secs() / LATE.as_secs()).min(MAX_HALVINGS.into());
        let pause = match changed {
            0 => took.clamp(IDLE_PAUSE, MAX_PAUSE),
            _ => (took / (1 << halvings)).clamp(MIN_PAUSE, MAX_PAUSE),
        };
        self.elapsed += took + pause;
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps whose time is a fixed part and a part per row.
    fn settle_down(fixed: Duration, per_row: Duration) -> (u32, Duration) {
        let mut pace = Pace::default();
        let mut took = Duration::ZERO;
        for _ in 0..50 {
            let rows = pace.rows();
            took = fixed + per_row * rows;
            pace.pause_after(rows.into(), took);
        }
        (pace.rows(), took)
    }

    #[test]
    fn steps_take_about_the_target_time() {
        for per_row in [3, 6, 10, 20] {
            let (rows, took) = settle_down(Duration::from_millis(3), Duration::from_micros(per_row));
            assert!((MIN_ROWS..=MAX_ROWS).contains(&rows));
            assert!(
                (TARGET * 2 / 3..=TARGET * 3 / 2).contains(&took),
                "{rows} rows of {per_row} microseconds take {took:?}"
            );
        }
    }

    #[test]
    fn steps_stay_within_their_bounds() {
        assert_eq!(settle_down(Duration::ZERO, Duration::from_nanos(1)).0, MAX_ROWS);
        assert_eq!(settle_down(Duration::ZERO, Duration::from_millis(9)).0, MIN_ROWS);
        // If round trips take all the time, smaller steps would only remove less.
        assert_eq!(settle_down(Duration::from_millis(80), Duration::from_micros(9)).0, MIN_ROWS);
    }

    #[test]
    fn a_pause_is_as_long_as_its_step_within_bounds() {
        let pause_after = |took| Pace::default().pause_after(1000, Duration::from_millis(took));
        for (took, pause) in [(0, 1), (30, 30), (400, 400), (60_000, 1000)] {
            assert_eq!(pause_after(took), Duration::from_millis(pause));
        }
    }

    #[test]
    fn pauses_of_a_late_turn_are_shorter() {
        let mut pace = Pace::default();
        let took = Duration::from_millis(80);
        let pauses: Vec<Duration> = (0..1000).map(|_| pace.pause_after(9999, took)).collect();
        assert!(pauses.is_sorted_by(|a, b| a >= b));
        assert_eq!((pauses[0], pauses[999]), (took, took / 8));
    }

    #[test]
    fn a_turn_that_removes_nothing_stays_slow_however_long_it_takes() {
        let mut pace = Pace::default();
        let pauses = (0..1000).map(|_| pace.pause_after(0, Duration::from_millis(30)));
        assert!(pauses.into_iter().all(|pause| pause == IDLE_PAUSE));
    }

    #[test]
    fn a_step_with_little_to_do_does_not_enlarge_the_next() {
        let mut pace = Pace::default();
        pace.pause_after(3, Duration::from_micros(800));
        assert_eq!(pace.rows(), FIRST_ROWS);
    }
}
