//! The rules of groups: how many jobs of a group may start now, and when it is its turn again.
//! Pure, without SQL; both engines store what this module decides.
//!
//! Groups with waiting jobs stand in line. A claim serves the first groups of the line: it divides the
//! jobs that it wants equally among them and sends each group that got jobs back to the end. So every
//! group gets its share, however many jobs the others have, and a million jobs of a group that may not
//! start are a single place in the line.

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// How many jobs a large claim takes from each group, about.
const PER_GROUP: usize = 8;
/// The maximum number of groups that one claim serves.
pub(crate) const MAX_GROUPS: usize = 64;
/// When a group at its limit is looked at again. Normally the end of one of its jobs adds a turn
/// sooner.
const LIMIT_FALLBACK: TimeDelta = TimeDelta::seconds(1);
/// When a paused group is looked at again. Normally its resumption adds a turn sooner.
const PAUSE_FALLBACK: TimeDelta = TimeDelta::seconds(10);

/// A rate: how many jobs may start in a period, and how many of them at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "RateFields")]
pub struct Rate {
    /// The number of jobs that may start in each period.
    pub starts: u32,
    /// The period in milliseconds.
    pub period_ms: u64,
    /// How many jobs may start at once after a pause.
    pub burst: u32,
}

/// A rate as callers write it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RateFields {
    starts: u32,
    period_ms: Option<u64>,
    burst: Option<u32>,
}

impl From<RateFields> for Rate {
    fn from(RateFields { starts, period_ms, burst }: RateFields) -> Self {
        let rate = Rate::per(starts, Duration::from_millis(period_ms.unwrap_or(1000)));
        burst.map_or(rate, |burst| rate.burst(burst))
    }
}

impl Rate {
    /// This many jobs per second.
    pub fn per_second(starts: u32) -> Self {
        Rate::per(starts, Duration::from_secs(1))
    }

    /// This many jobs per period. The burst is what may start in 50 ms, at least 1: a claim takes a
    /// moment, and without a burst a high rate could not be reached.
    pub fn per(starts: u32, period: Duration) -> Self {
        let period_ms = u64::try_from(period.as_millis()).unwrap_or(u64::MAX);
        let burst = (u64::from(starts) * 50).div_ceil(period_ms.max(1)).max(1);
        Rate { starts, period_ms, burst: u32::try_from(burst).unwrap_or(u32::MAX) }
    }

    /// Lets this many jobs start at once after a pause.
    pub fn burst(self, burst: u32) -> Self {
        Rate { burst, ..self }
    }

    /// Checks the numbers. The error names the first invalid one and the remedy.
    pub(crate) fn check(self, field: &'static str) -> Result<Self> {
        const MAX: u32 = 1_000_000;
        const MAX_PERIOD_MS: u64 = 366 * 24 * 60 * 60 * 1000;
        let wrong = |part: &str, value: u64, remedy: &str| {
            Err(Error::invalid(field, format!("{field}.{part}: {value} is out of range; use {remedy}")))
        };
        if !(1..=MAX).contains(&self.starts) {
            return wrong("starts", self.starts.into(), "1 to 1000000, or pause the group to start none");
        }
        if !(1..=MAX_PERIOD_MS).contains(&self.period_ms) {
            return wrong("period_ms", self.period_ms, "1 to 31622400000 (366 days)");
        }
        if !(1..=MAX).contains(&self.burst) {
            return wrong("burst", self.burst.into(), "1 to 1000000");
        }
        Ok(self)
    }

    /// The time that this many starts take at an even pace, in microseconds.
    fn micros(self, starts: u64) -> i128 {
        i128::from(starts) * i128::from(self.period_ms) * 1000 / i128::from(self.starts.max(1))
    }

    /// The same, rounded up, so that the rate is not exceeded.
    fn micros_rounded_up(self, starts: u64) -> i128 {
        (i128::from(starts) * i128::from(self.period_ms) * 1000).div_ceil_by(i128::from(self.starts.max(1)))
    }

    /// The state of the rate now. It is at most a burst ahead; a stored state may be further ahead if
    /// the rate was lower or the clock was set back.
    fn current(self, paced_until: Option<DateTime<Utc>>, now: DateTime<Utc>) -> DateTime<Utc> {
        let latest = later(now, self.micros_rounded_up(self.burst.into()));
        paced_until.map_or(now, |until| until.max(now).min(latest))
    }

    /// How many jobs may start now. `paced_until` is when the jobs so far would have started at an
    /// even pace.
    pub(crate) fn room(self, paced_until: Option<DateTime<Utc>>, now: DateTime<Utc>) -> usize {
        let ahead = (self.current(paced_until, now) - now).num_microseconds().unwrap_or(i64::MAX);
        let starts_ahead = (i128::from(ahead) * i128::from(self.starts))
            .div_ceil_by(i128::from(self.period_ms.max(1)) * 1000);
        usize::try_from(i128::from(self.burst) - starts_ahead).unwrap_or(0)
    }

    /// Until when the jobs are paced after `started` more of them.
    pub(crate) fn paced_until(
        self,
        paced_until: Option<DateTime<Utc>>,
        now: DateTime<Utc>,
        started: usize,
    ) -> DateTime<Utc> {
        later(self.current(paced_until, now), self.micros_rounded_up(started as u64))
    }

    /// When the next job may start.
    pub(crate) fn next_start(self, paced_until: Option<DateTime<Utc>>, now: DateTime<Utc>) -> DateTime<Utc> {
        later(self.current(paced_until, now), -self.micros(u64::from(self.burst) - 1)).max(now)
    }
}

fn later(at: DateTime<Utc>, micros: i128) -> DateTime<Utc> {
    let limit = i128::from(i64::MAX / 4);
    let micros = TimeDelta::microseconds(micros.clamp(-limit, limit) as i64);
    let furthest =
        if micros < TimeDelta::zero() { DateTime::<Utc>::MIN_UTC } else { DateTime::<Utc>::MAX_UTC };
    at.checked_add_signed(micros).unwrap_or(furthest)
}

/// A division that rounds up, of numbers that are not negative.
trait DivCeil {
    fn div_ceil_by(self, by: Self) -> Self;
}

impl DivCeil for i128 {
    fn div_ceil_by(self, by: i128) -> i128 {
        (self + by - 1) / by
    }
}

/// What limits a group, from its own settings and the defaults of its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gate {
    pub(crate) paused: bool,
    pub(crate) max_running: Option<u32>,
    pub(crate) rate: Option<Rate>,
}

/// A group whose turn it is, under its lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    pub(crate) gate: Gate,
    /// The number of its running jobs; not counted if it has no limit.
    pub(crate) running: usize,
    /// The state of its rate.
    pub(crate) paced_until: Option<DateTime<Utc>>,
}

/// How many jobs the `nth` group of a claim may start (from 0), if the claim wants this many and this many
/// groups stand in line. If they cannot be divided equally, the first groups get one more, and stand
/// behind the others at the end of the line.
pub(crate) fn share(wanted: usize, groups: usize, nth: usize) -> usize {
    let groups = groups.clamp(1, groups_to_serve(wanted));
    wanted / groups + usize::from(nth < wanted % groups)
}

/// How many groups a claim serves, so that it gets the jobs it wants if each has enough.
pub(crate) fn groups_to_serve(wanted: usize) -> usize {
    wanted.div_ceil(PER_GROUP).clamp(1, MAX_GROUPS)
}

impl Visit {
    /// How many jobs of the group may start now. `startable` limits the jobs of a group with a
    /// rate: a claim counts as a start, so they are not claimed ahead of time.
    pub(crate) fn room(&self, share: usize, startable: usize, now: DateTime<Utc>) -> usize {
        let Gate { paused, max_running, rate } = self.gate;
        if paused {
            return 0;
        }
        let by_limit = max_running.map_or(usize::MAX, |limit| (limit as usize).saturating_sub(self.running));
        let by_rate = rate.map_or(usize::MAX, |rate| rate.room(self.paced_until, now).min(startable));
        share.min(by_limit).min(by_rate)
    }

    /// What becomes of the group's turn.
    pub(crate) fn next(&self, served: &Served, now: DateTime<Utc>) -> Turn {
        let Gate { paused, max_running, rate } = self.gate;
        let paced_until = rate.map(|rate| rate.paced_until(self.paced_until, now, served.started));
        let paced_until = paced_until.filter(|until| *until > now);
        let at = match served.next_job {
            // Kept until then, because the rate's state would be lost.
            None => return paced_until.map_or(Turn::None, |at| Turn::At { at, paced_until }),
            Some(at) if at > now => return Turn::At { at, paced_until },
            Some(_) if paused => now + PAUSE_FALLBACK,
            Some(_) => match rate.map(|rate| rate.next_start(paced_until, now)) {
                Some(next_start) if next_start > now => next_start,
                _ if max_running.is_some_and(|limit| self.running + served.started >= limit as usize) => {
                    now + LIMIT_FALLBACK
                }
                // Jobs are due and may start, but the claim had enough, or could not take them: they
                // are locked, or of kinds that the worker does not handle.
                _ if served.started == 0 => return Turn::Kept { paced_until },
                _ => now,
            },
        };
        Turn::At { at, paced_until }
    }
}

/// What a claim found and took in one group.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Served {
    pub(crate) started: usize,
    /// When the first job that is left is due.
    pub(crate) next_job: Option<DateTime<Utc>>,
}

/// The turn of a group after a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// No job is left, and there is nothing to remember.
    None,
    /// At this time.
    At { at: DateTime<Utc>, paced_until: Option<DateTime<Utc>> },
    /// At the same place as before, because the claim took nothing.
    Kept { paced_until: Option<DateTime<Utc>> },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: i64) -> DateTime<Utc> {
        DateTime::from_timestamp_millis(1_700_000_000_000 + ms).expect("time")
    }

    fn visit(gate: Gate) -> Visit {
        Visit { gate, running: 0, paced_until: None }
    }

    const FREE: Gate = Gate { paused: false, max_running: None, rate: None };

    #[test]
    fn a_rate_admits_the_burst_and_then_an_even_pace() {
        let rate = Rate::per_second(100).burst(10);
        let (mut until, mut starts) = (None, Vec::new());
        for ms in 0..3000 {
            let started = rate.room(until, at(ms));
            if started > 0 {
                until = Some(rate.paced_until(until, at(ms), started));
                starts.extend(std::iter::repeat_n(ms, started));
            }
        }
        assert_eq!(starts.iter().filter(|ms| **ms == 0).count(), 10);
        for start in 0..2000 {
            let window = starts.iter().filter(|ms| (start..start + 1000).contains(*ms)).count();
            assert!(window <= 109, "{window} starts in the second from {start} ms");
        }
        assert_eq!(starts.iter().filter(|ms| (1000..3000).contains(*ms)).count(), 200);
    }

    #[test]
    fn a_rate_that_does_not_divide_the_period_is_reached_and_not_exceeded() {
        let rate = Rate::per_second(3);
        let (mut until, mut now, mut starts) = (None, at(0), 0);
        while now < at(100_000) {
            assert_eq!(rate.room(until, now), 1);
            let paced = rate.paced_until(until, now, 1);
            starts += 1;
            until = Some(paced);
            let next = rate.next_start(until, now);
            assert_eq!(rate.room(until, next - TimeDelta::microseconds(1)), 0);
            assert_eq!(next, paced, "without a burst");
            now = next;
        }
        assert_eq!(starts, 300);
    }

    #[test]
    fn an_idle_group_collects_no_credit_beyond_its_burst() {
        let rate = Rate::per_second(10).burst(3);
        let until = rate.paced_until(None, at(0), 3);
        assert_eq!(rate.room(Some(until), at(0)), 0);
        assert_eq!(rate.room(Some(until), at(3_600_000)), 3);
    }

    #[test]
    fn a_raised_rate_takes_effect_after_its_own_pace() {
        let slow = Rate::per(1, Duration::from_secs(24 * 60 * 60));
        let until = Some(slow.paced_until(None, at(0), 1));
        assert_eq!(slow.room(until, at(1000)), 0);
        let fast = Rate::per_second(10).burst(1);
        assert_eq!(fast.next_start(until, at(1000)), at(1100));
        let until = Some(fast.paced_until(until, at(1000), 0));
        assert_eq!(fast.room(until, at(1099)), 0);
        assert_eq!(fast.room(until, at(1100)), 1);
    }

    #[test]
    fn a_long_burst_of_a_slow_rate_does_not_overflow() {
        let rate = Rate::per(1, Duration::from_secs(366 * 24 * 60 * 60)).burst(1_000_000);
        let until = Some(rate.paced_until(None, at(0), 1));
        assert_eq!(rate.room(until, at(0)), 999_999);
        assert_eq!(rate.next_start(until, at(0)), at(0));
    }

    #[test]
    fn the_default_burst_is_what_may_start_in_50_ms() {
        assert_eq!(Rate::per_second(3).burst, 1);
        assert_eq!(Rate::per_second(100).burst, 5);
        let read = |text: &str| serde_json::from_str::<Rate>(text);
        assert_eq!(read(r#"{"starts":100}"#).expect("rate"), Rate::per_second(100));
        assert_eq!(read(r#"{"starts":100,"burst":1}"#).expect("rate"), Rate::per_second(100).burst(1));
        read(r#"{"starts":5,"period":60000}"#).expect_err("an unknown field");
    }

    #[test]
    fn the_room_is_the_smallest_of_share_limit_and_rate() {
        let room = |gate, running| Visit { running, ..visit(gate) }.room(8, 1000, at(0));
        assert_eq!(room(FREE, 0), 8);
        assert_eq!(room(Gate { max_running: Some(5), ..FREE }, 3), 2);
        assert_eq!(room(Gate { max_running: Some(5), ..FREE }, 7), 0);
        assert_eq!(room(Gate { paused: true, ..FREE }, 0), 0);
        let rate = Some(Rate::per_second(10).burst(4));
        assert_eq!(room(Gate { rate, ..FREE }, 0), 4);
        assert_eq!(visit(Gate { rate, ..FREE }).room(8, 2, at(0)), 2);
        assert_eq!(visit(FREE).room(8, 0, at(0)), 8);
    }

    #[test]
    fn every_group_with_jobs_keeps_a_turn() {
        let next = |visit: Visit, started, next_job| visit.next(&Served { started, next_job }, at(0));
        let turn = |at| Turn::At { at, paced_until: None };
        let kept = Turn::Kept { paced_until: None };
        assert_eq!(next(visit(FREE), 3, None), Turn::None);
        assert_eq!(next(visit(FREE), 1, Some(at(-5))), turn(at(0)));
        assert_eq!(next(visit(FREE), 0, Some(at(-5))), kept);
        assert_eq!(next(visit(FREE), 0, Some(at(700))), turn(at(700)));
        let limited = visit(Gate { max_running: Some(3), ..FREE });
        assert_eq!(next(limited, 3, Some(at(-5))), turn(at(1000)));
        assert_eq!(next(limited, 2, Some(at(-5))), turn(at(0)));
        assert_eq!(next(limited, 0, Some(at(-5))), kept);
        let paused = visit(Gate { paused: true, ..FREE });
        assert_eq!(next(paused, 0, Some(at(-5))), turn(at(10_000)));
        let rated = visit(Gate { rate: Some(Rate::per_second(10)), ..FREE });
        let paced_until = Some(at(100));
        assert_eq!(next(rated, 1, Some(at(-5))), Turn::At { at: at(100), paced_until });
        // Without a job, the turn only keeps the state of the rate.
        assert_eq!(next(rated, 1, None), Turn::At { at: at(100), paced_until });
        assert_eq!(next(rated, 0, None), Turn::None);
    }

    #[test]
    fn a_claim_serves_as_many_groups_as_it_needs() {
        assert_eq!(groups_to_serve(500), 63);
        assert_eq!(groups_to_serve(1), 1);
        assert_eq!(groups_to_serve(1000), 64);
    }

    #[test]
    fn a_claim_is_divided_equally_among_the_groups_that_it_serves() {
        for wanted in 1..600 {
            for groups in [1, 2, 3, 4, 7, 64, 1000] {
                let served = groups.min(groups_to_serve(wanted));
                let shares: Vec<usize> = (0..served).map(|nth| share(wanted, groups, nth)).collect();
                assert_eq!(shares.iter().sum::<usize>(), wanted);
                assert!(shares[0] - shares[served - 1] <= 1, "{shares:?}");
            }
        }
        let shares = |wanted, groups| [0, 1, 2, 3].map(|nth| share(wanted, groups, nth));
        assert_eq!(shares(33, 4), [9, 8, 8, 8]);
        assert_eq!(shares(500, 2)[..2], [250, 250]);
        assert_eq!(shares(10, 1000)[..2], [5, 5]);
        assert_eq!(share(1, 1000, 0), 1);
    }

    #[test]
    fn a_rate_of_zero_is_refused_with_a_remedy() {
        let error = Rate::per_second(0).check("rate").expect_err("rate");
        assert_eq!(
            error.to_string(),
            "rate.starts: 0 is out of range; use 1 to 1000000, or pause the group to start none"
        );
        Rate::per_second(1).burst(0).check("rate").expect_err("burst");
        Rate::per(1, Duration::ZERO).check("rate").expect_err("period");
    }
}
