//! Which due ticks get a job: the policy for missed ticks. Pure: no clock, no database.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};

use super::line::{CronLine, past_the_calendar};
use crate::error::{Error, Result};

/// A tick is on time until the next one is due, but for at most this long.
pub const ON_TIME: Duration = Duration::from_secs(60);
/// The maximum number of ticks that [`Missed::All`] backfills.
pub const MAX_BACKFILL: u32 = 1000;

/// What happens to ticks that no process fired in time.
///
/// ```
/// use longshore::Missed;
///
/// assert_eq!("all:24".parse::<Missed>()?, Missed::All { limit: 24 });
/// assert_eq!(Missed::One.to_string(), "one");
/// # Ok::<(), longshore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Missed {
    /// Missed ticks are dropped.
    Skip,
    /// One job covers all of them: the job of the newest due tick.
    #[default]
    One,
    /// Each missed tick gets its job, oldest first (a backfill). If there are more than `limit`,
    /// the newest get jobs and the others are dropped.
    All {
        /// The maximum number of missed ticks to backfill, from 1 to [`MAX_BACKFILL`].
        limit: u32,
    },
}

impl Missed {
    pub(crate) fn validate(self) -> Result<Self> {
        match self {
            Missed::All { limit } if !(1..=MAX_BACKFILL).contains(&limit) => Err(Error::invalid(
                "missed",
                format!(
                    "missed: a limit of {limit} is out of range; use all:1 to all:{MAX_BACKFILL}, or skip"
                ),
            )),
            policy => Ok(policy),
        }
    }
}

impl fmt::Display for Missed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missed::Skip => f.write_str("skip"),
            Missed::One => f.write_str("one"),
            Missed::All { limit } => write!(f, "all:{limit}"),
        }
    }
}

impl FromStr for Missed {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let limit = |number: &str| number.parse().ok().map(|limit| Missed::All { limit });
        let policy = match text {
            "skip" => Some(Missed::Skip),
            "one" => Some(Missed::One),
            _ => text.strip_prefix("all:").and_then(limit),
        };
        let unknown = || {
            Error::invalid("missed", format!("missed: `{text}` is not a policy; use skip, one or all:100"))
        };
        policy.ok_or_else(unknown)?.validate()
    }
}

/// The due ticks of one schedule.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Due {
    /// The ticks that get a job, oldest first, each with the oldest missed tick that it also
    /// covers.
    pub(crate) ticks: Vec<(DateTime<Utc>, Option<DateTime<Utc>>)>,
    /// The first tick after now.
    pub(crate) next: DateTime<Utc>,
}

impl Due {
    /// Decides about the ticks from `first`, the schedule's next tick, up to `now`.
    pub(crate) fn of(
        line: &CronLine,
        policy: Missed,
        first: DateTime<Utc>,
        now: DateTime<Utc>,
    ) -> Result<Due> {
        let next = line.next_after(now).ok_or_else(past_the_calendar)?;
        let last = newest(line, first, now, 1).next().unwrap_or(first);
        let on_time = now - last < TimeDelta::seconds(ON_TIME.as_secs() as i64);
        let ticks = match policy {
            Missed::Skip => on_time.then_some((last, None)).into_iter().collect(),
            Missed::One => vec![(last, Some(first).filter(|first| *first < last))],
            Missed::All { limit } => {
                let limit = limit as usize + usize::from(on_time);
                newest(line, first, now, limit).map(|tick| (tick, None)).collect()
            }
        };
        Ok(Due { ticks, next })
    }
}

/// The newest `limit` ticks from `first` to `last`, oldest first. Searches backwards from the end
/// in growing steps, so that finding the last hundred ticks of a line that ticks every second
/// does not walk through a year of them.
fn newest(
    line: &CronLine,
    first: DateTime<Utc>,
    last: DateTime<Utc>,
    limit: usize,
) -> impl Iterator<Item = DateTime<Utc>> {
    let mut back = TimeDelta::minutes(1);
    loop {
        let from = first.max(last - back);
        let first_tick = (from == first).then_some(first);
        let ticks: Vec<_> =
            first_tick.into_iter().chain(line.ticks_after(from).take_while(|tick| *tick <= last)).collect();
        if from == first || ticks.len() >= limit {
            let dropped = ticks.len().saturating_sub(limit);
            return ticks.into_iter().skip(dropped);
        }
        back = back * 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> DateTime<Utc> {
        format!("2026-05-06T{text}Z").parse().unwrap()
    }

    fn due(expression: &str, policy: Missed, first: &str, now: &str) -> Vec<(String, Option<String>)> {
        let line = CronLine::parse(expression, "UTC").unwrap();
        let due = Due::of(&line, policy, at(first), at(now)).unwrap();
        assert_eq!(due.next, line.next_after(at(now)).unwrap());
        let time = |tick: DateTime<Utc>| tick.format("%T").to_string();
        due.ticks.into_iter().map(|(tick, since)| (time(tick), since.map(time))).collect()
    }

    fn times(due: &[(String, Option<String>)]) -> Vec<&str> {
        assert!(due.iter().all(|(_, since)| since.is_none()), "{due:?}");
        due.iter().map(|(tick, _)| tick.as_str()).collect()
    }

    const EVERY_POLICY: [Missed; 3] = [Missed::Skip, Missed::One, Missed::All { limit: 2 }];

    #[test]
    fn a_tick_less_than_a_minute_late_is_on_time_under_every_policy() {
        for policy in EVERY_POLICY {
            assert_eq!(times(&due("*/10 * * * *", policy, "08:00:00", "08:00:00")), ["08:00:00"]);
            assert_eq!(times(&due("*/10 * * * *", policy, "08:00:00", "08:00:59.999")), ["08:00:00"]);
        }
    }

    #[test]
    fn a_tick_is_missed_once_the_next_one_is_due() {
        let seconds = |policy| due("*/20 * * * * *", policy, "08:00:00", "08:00:45");
        assert_eq!(times(&seconds(Missed::Skip)), ["08:00:40"]);
        assert_eq!(seconds(Missed::One), [("08:00:40".into(), Some("08:00:00".into()))]);
        assert_eq!(times(&seconds(Missed::All { limit: 1 })), ["08:00:20", "08:00:40"]);
        assert_eq!(times(&seconds(Missed::All { limit: 9 })), ["08:00:00", "08:00:20", "08:00:40"]);
    }

    #[test]
    fn a_tick_a_minute_late_is_missed() {
        let missed = |policy| due("*/10 * * * *", policy, "08:00:00", "08:01:00");
        assert_eq!(times(&missed(Missed::Skip)), [""; 0]);
        assert_eq!(times(&missed(Missed::One)), ["08:00:00"]);
        assert_eq!(times(&missed(Missed::All { limit: 2 })), ["08:00:00"]);
    }

    #[test]
    fn after_an_outage_the_policy_decides() {
        let missed = |policy| due("*/10 * * * *", policy, "08:00:00", "11:05:00");
        assert_eq!(times(&missed(Missed::Skip)), [""; 0]);
        assert_eq!(missed(Missed::One), [("11:00:00".into(), Some("08:00:00".into()))]);
        assert_eq!(times(&missed(Missed::All { limit: 3 })), ["10:40:00", "10:50:00", "11:00:00"]);
        assert_eq!(missed(Missed::All { limit: 100 }).len(), 19);
    }

    #[test]
    fn a_tick_on_time_fires_in_addition_to_the_missed_ones() {
        let missed = |policy| due("*/10 * * * *", policy, "08:00:00", "11:00:30");
        assert_eq!(times(&missed(Missed::Skip)), ["11:00:00"]);
        assert_eq!(missed(Missed::One), [("11:00:00".into(), Some("08:00:00".into()))]);
        assert_eq!(times(&missed(Missed::All { limit: 2 })), ["10:40:00", "10:50:00", "11:00:00"]);
    }

    #[test]
    fn the_newest_ticks_of_a_year_of_seconds_are_found_without_walking_through_it() {
        let line = CronLine::parse("* * * * * *", "UTC").unwrap();
        let now = at("08:00:00");
        let due = Due::of(&line, Missed::All { limit: 1000 }, now - TimeDelta::days(365), now).unwrap();
        let ticks: Vec<_> = due.ticks.iter().map(|(tick, _)| *tick).collect();
        assert_eq!((ticks.len(), ticks[0], ticks[1000]), (1001, at("07:43:20"), now));
    }

    #[test]
    fn a_next_tick_that_the_line_does_not_match_still_fires() {
        // An operator changed it manually.
        assert_eq!(times(&due("0 * * * *", Missed::Skip, "08:12:34", "08:12:40")), ["08:12:34"]);
        assert_eq!(times(&due("0 * * * *", Missed::One, "08:12:34", "08:30:00")), ["08:12:34"]);
    }

    #[test]
    fn a_policy_parses_from_its_own_text() {
        for policy in EVERY_POLICY {
            assert_eq!(policy.to_string().parse::<Missed>().unwrap(), policy);
        }
        for text in ["", "none", "all", "all:", "all:x", "all:0", "all:1001", "all:-1"] {
            let error = text.parse::<Missed>().unwrap_err();
            assert_eq!(error.field(), Some("missed"), "{text}");
        }
    }
}
