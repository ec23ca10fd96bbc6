//! Detects that the database's clock was moved forward, or that the host was suspended, so
//! that a sweep does not declare live workers dead.
//!
//! Heartbeats are compared with the database's clock. If that clock jumps by an hour, every
//! heartbeat is an hour old until the workers have sent the next one. A sweeper compares how
//! much time has passed since its last reading on the database's clock and on its own monotonic
//! clock, which neither jumps nor runs while the host is suspended. If more time has passed
//! on the database's clock, it waits two heartbeats. A clock that is moved back makes no
//! heartbeat look old.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use crate::client::Client;
use crate::error::Result;

/// Both clocks at one moment. The database's clock was read between `before` and `after`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    before: Instant,
    after: Instant,
    database: DateTime<Utc>,
}

impl Reading {
    pub(super) async fn take(client: &Client) -> Result<Self> {
        let before = Instant::now();
        let database = client.now().await?;
        Ok(Reading { before, after: Instant::now(), database })
    }
}

/// Whether heartbeats can be compared with the database's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clock {
    /// They can.
    Steady,
    /// The clock was moved since the last reading.
    Stepped,
    /// Two heartbeats have not passed since the last step or the first reading.
    Settling,
}

/// What a sweeper remembers between its readings of the clocks.
#[derive(Debug, Default)]
pub(super) struct ClockSteps {
    last: Option<Reading>,
    /// When the current wait started.
    waits_since: Option<Instant>,
    /// The database's clock after the last step.
    stepped_at: Option<DateTime<Utc>>,
}

impl ClockSteps {
    /// The database's clock after the last step; `None` if there was none. A lease from before
    /// the step looks older than it is. Unlike a heartbeat, the time of a claim is never
    /// refreshed, so no lease counts as older than this.
    pub(super) fn stepped_at(&self) -> Option<DateTime<Utc>> {
        self.stepped_at
    }

    /// Compares this reading with the last one. After the first one, the process waits too,
    /// because it may have started just after a step.
    pub(super) fn observe(&mut self, reading: Reading, heartbeat: Duration) -> Clock {
        let Some(last) = self.last.replace(reading) else {
            self.waits_since = Some(reading.after);
            return Clock::Settling;
        };
        // If the clock was set back after a step, no lease would otherwise count as old until
        // the clock reaches the wrong time again.
        self.stepped_at = self.stepped_at.map(|at| at.min(reading.database));
        // A live worker's heartbeat is at most one interval old and `stale_after` is at
        // least three, so a step of one interval does no harm.
        if is_step(&last, &reading, heartbeat) {
            self.waits_since = Some(reading.after);
            self.stepped_at = Some(reading.database);
            return Clock::Stepped;
        }
        let waited = self.waits_since.map(|at| reading.before.saturating_duration_since(at));
        match waited {
            Some(waited) if waited < heartbeat.saturating_mul(2) => Clock::Settling,
            _ => Clock::Steady,
        }
    }
}

/// Whether more time has passed on the database's clock than on the monotonic one. The
/// time that the readings took counts as passed.
fn is_step(last: &Reading, now: &Reading, tolerance: Duration) -> bool {
    let database = (now.database - last.database).to_std().unwrap_or_default();
    let monotonic = now.after.saturating_duration_since(last.before);
    database > monotonic.saturating_add(tolerance)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEARTBEAT: Duration = Duration::from_secs(10);

    /// Readings that each take a second on a monotonic clock that starts at `origin`.
    struct Clocks {
        origin: Instant,
        steps: ClockSteps,
    }

    impl Clocks {
        fn new() -> Self {
            Clocks { origin: Instant::now(), steps: ClockSteps::default() }
        }

        fn look(&mut self, monotonic: u64, database: i64) -> Clock {
            let before = self.origin + Duration::from_secs(monotonic);
            let database = DateTime::from_timestamp(2_000_000_000 + database, 0).unwrap();
            let reading = Reading { before, after: before + Duration::from_secs(1), database };
            self.steps.observe(reading, HEARTBEAT)
        }
    }

    #[test]
    fn a_process_that_has_just_started_waits_two_heartbeats() {
        let mut clocks = Clocks::new();
        assert_eq!(clocks.look(0, 0), Clock::Settling);
        assert_eq!(clocks.look(15, 15), Clock::Settling);
        assert_eq!(clocks.look(21, 21), Clock::Steady);
    }

    #[test]
    fn a_step_forward_restarts_the_wait() {
        let mut clocks = Clocks::new();
        clocks.look(0, 0);
        assert_eq!(clocks.look(30, 30), Clock::Steady);
        assert_eq!(clocks.look(45, 3645), Clock::Stepped);
        assert_eq!(clocks.look(60, 3660), Clock::Settling);
        assert_eq!(clocks.look(75, 3675), Clock::Steady);
    }

    #[test]
    fn a_second_step_during_the_wait_restarts_it() {
        let mut clocks = Clocks::new();
        clocks.look(0, 0);
        assert_eq!(clocks.look(30, 3600), Clock::Stepped);
        assert_eq!(clocks.look(45, 7200), Clock::Stepped);
        assert_eq!(clocks.look(60, 7215), Clock::Settling);
        assert_eq!(clocks.look(66, 7221), Clock::Steady);
    }

    /// The monotonic clock stands still while the host is suspended.
    #[test]
    fn a_suspended_host_is_a_step() {
        let mut clocks = Clocks::new();
        clocks.look(0, 0);
        assert_eq!(clocks.look(30, 30), Clock::Steady);
        assert_eq!(clocks.steps.stepped_at(), None);
        assert_eq!(clocks.look(31, 8 * 3600), Clock::Stepped);
        let database = DateTime::from_timestamp(2_000_000_000 + 8 * 3600, 0);
        assert_eq!(clocks.steps.stepped_at(), database);
    }

    #[test]
    fn a_step_that_was_corrected_does_not_make_leases_young_until_the_wrong_time() {
        let at = |database: i64| DateTime::from_timestamp(2_000_000_000 + database, 0);
        let mut clocks = Clocks::new();
        clocks.look(0, 0);
        assert_eq!(clocks.look(30, 365 * 86_400), Clock::Stepped);
        assert_eq!(clocks.steps.stepped_at(), at(365 * 86_400));
        assert_eq!(clocks.look(60, 60), Clock::Steady);
        assert_eq!(clocks.steps.stepped_at(), at(60));
        clocks.look(75, 75);
        assert_eq!(clocks.steps.stepped_at(), at(60));
    }

    #[test]
    fn a_difference_of_up_to_one_heartbeat_is_no_step() {
        let mut clocks = Clocks::new();
        clocks.look(0, 0);
        assert_eq!(clocks.look(30, 30 + 11), Clock::Steady, "the reading itself took a second");
        assert_eq!(clocks.look(60, 71 + 12), Clock::Stepped);
    }

    #[test]
    fn neither_a_step_back_nor_a_slow_reading_is_a_step() {
        let mut clocks = Clocks::new();
        clocks.look(0, 0);
        assert_eq!(clocks.look(30, -7200), Clock::Steady);
        assert_eq!(clocks.look(300, -7170), Clock::Steady);
        let (before, after) = (clocks.origin, clocks.origin + Duration::from_secs(400));
        let database = DateTime::from_timestamp(2_000_000_000 - 7170 + 100, 0).unwrap();
        assert_eq!(clocks.steps.observe(Reading { before, after, database }, HEARTBEAT), Clock::Settling);
    }
}
