//! When a cron line ticks. Pure: maps (expression, zone, instant) to the next instant.
//!
//! croner parses the expression and walks the calendar in wall-clock time without a zone. This
//! module maps those wall-clock readings to instants, and decides what happens to readings that
//! a clock change skips or repeats.

use chrono::offset::LocalResult;
use chrono::{DateTime, Datelike, NaiveDateTime, TimeDelta, TimeZone, Utc};
use chrono_tz::{GapInfo, Tz};
use croner::Cron;
use croner::parser::{CronParser, Seconds, Year};

use crate::error::{Error, Result};
use crate::rules::enqueue::check_name;

/// A cron expression in a time zone: five fields (minute, hour, day of month,
/// month, day of week), six with seconds first, or a nickname (`@hourly`,
/// `@daily`, `@weekly`, `@monthly`, `@yearly`). Months and weekdays may be named
/// (`JAN`, `MON-FRI`); `L`, `W` and `#` are supported. If both day fields are restricted, a day
/// matches if either field matches.
///
/// The [module](crate::cron) documents what happens when clocks change.
///
/// ```
/// use longshore::CronLine;
///
/// let line = CronLine::parse("30 9 * * MON-FRI", "Europe/Berlin")?;
/// let friday = "2026-07-03T12:00:00Z".parse().unwrap();
/// let monday = line.next_after(friday).unwrap();
/// assert_eq!(monday.to_rfc3339(), "2026-07-06T07:30:00+00:00"); // 09:30 in Berlin
/// # Ok::<(), longshore::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CronLine {
    expression: String,
    zone: Tz,
    cron: Cron,
    pace: Pace,
}

/// How a line ticks on days when not every wall-clock reading occurs exactly once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    /// The line names hours: each time of day ticks once a day.
    TimesOfDay,
    /// The line matches every hour: it ticks whenever the wall clock shows a matching time.
    RealTime,
}

impl CronLine {
    /// Parses an expression and the name of an IANA time zone. Rejects expressions that never
    /// tick, such as 30 February.
    pub fn parse(expression: &str, zone: &str) -> Result<Self> {
        let expression = expression.split_whitespace().collect::<Vec<_>>().join(" ");
        check_name("expression", &expression)?;
        let parser = CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build();
        let cron = parser.parse(&expression).map_err(|error| {
            let error = error.to_string();
            Error::invalid(
                "expression",
                format!(
                    "expression: `{expression}` is not a cron line ({}); use five fields \
                     (minute hour day month weekday), or six with seconds first",
                    error.trim_end_matches('.')
                ),
            )
        })?;
        let zone = zone.parse().map_err(|_| {
            Error::invalid(
                "zone",
                format!("zone: `{zone}` is not a time zone; use an IANA name such as UTC or Europe/Berlin"),
            )
        })?;
        let every_hour = (0..24).all(|hour| cron.pattern.hour_match(hour).unwrap_or(false));
        let pace = if every_hour { Pace::RealTime } else { Pace::TimesOfDay };
        let line = CronLine { expression, zone, cron, pace };
        // The calendar repeats, so a line that ticks at all ticks again after any instant.
        match line.next_after(DateTime::UNIX_EPOCH) {
            Some(_) => Ok(line),
            None => Err(Error::invalid(
                "expression",
                format!(
                    "expression: `{}` never ticks; name a day that exists in its months",
                    line.expression
                ),
            )),
        }
    }

    /// The expression, with single spaces.
    pub fn expression(&self) -> &str {
        &self.expression
    }

    /// The zone's IANA name.
    pub fn zone(&self) -> &'static str {
        self.zone.name()
    }

    /// The first tick after this instant. `None` only after the year 4999, where the calendar
    /// ends.
    pub fn next_after(&self, instant: DateTime<Utc>) -> Option<DateTime<Utc>> {
        if !(1..croner::YEAR_UPPER_LIMIT).contains(&instant.year()) {
            return None;
        }
        let wall = instant.with_timezone(&self.zone).naive_local();
        match self.pace {
            Pace::TimesOfDay => self.first_after(instant, wall, |reading| self.single_instant(reading)),
            Pace::RealTime => {
                let instants = |reading: &NaiveDateTime| self.zone.from_local_datetime(reading);
                // During the first pass of a repeated hour, the second pass starts with
                // readings earlier than the current one.
                let repeated = match instants(&wall) {
                    LocalResult::Ambiguous(first, second) => second - first,
                    _ => TimeDelta::zero(),
                };
                let first = self.first_after(instant, wall, |reading| instants(reading).earliest());
                let second = self.first_after(instant, wall - repeated, |reading| instants(reading).latest());
                first.into_iter().chain(second).min()
            }
        }
    }

    /// The ticks after this instant, in order.
    pub(crate) fn ticks_after(&self, instant: DateTime<Utc>) -> impl Iterator<Item = DateTime<Utc>> {
        std::iter::successors(self.next_after(instant), |tick| self.next_after(*tick))
    }

    /// The first matching reading after `from` whose instant is after `instant`. `at` never
    /// decreases, so the first match is the earliest.
    fn first_after(
        &self,
        instant: DateTime<Utc>,
        from: NaiveDateTime,
        at: impl Fn(&NaiveDateTime) -> Option<DateTime<Tz>>,
    ) -> Option<DateTime<Utc>> {
        let mut reading = from;
        loop {
            reading = self.cron.find_next_occurrence(&reading, false).ok()?;
            if let Some(tick) = at(&reading).filter(|tick| *tick > instant) {
                return Some(tick.to_utc());
            }
        }
    }

    /// The one instant at which a reading ticks: the first if it occurs twice, the end of the
    /// gap if it does not occur.
    fn single_instant(&self, reading: &NaiveDateTime) -> Option<DateTime<Tz>> {
        match self.zone.from_local_datetime(reading) {
            LocalResult::Single(at) | LocalResult::Ambiguous(at, _) => Some(at),
            LocalResult::None => GapInfo::new(reading, &self.zone)?.end,
        }
    }
}

pub(crate) fn past_the_calendar() -> Error {
    Error::internal("the engine's clock is past the end of the calendar")
}

#[cfg(test)]
mod tests {
    use chrono::Timelike;
    use proptest::prelude::*;

    use super::*;

    const BERLIN: &str = "Europe/Berlin";
    const NEW_YORK: &str = "America/New_York";
    const LORD_HOWE: &str = "Australia/Lord_Howe";

    fn at(text: &str) -> DateTime<Utc> {
        format!("{text}:00Z").parse().unwrap()
    }

    /// The first `N` ticks after an instant, to the minute, in UTC.
    fn ticks<const N: usize>(expression: &str, zone: &str, after: &str) -> [String; N] {
        let line = CronLine::parse(expression, zone).unwrap();
        let mut ticks = line.ticks_after(at(after)).map(|tick| tick.format("%Y-%m-%dT%H:%M").to_string());
        std::array::from_fn(|_| ticks.next().unwrap())
    }

    // ---- parsing ---------------------------------------------------------

    #[test]
    fn five_fields_tick_at_the_start_of_the_minute() {
        let line = CronLine::parse("  */5 *  * * *", "UTC").unwrap();
        assert_eq!(line.expression(), "*/5 * * * *");
        assert_eq!(line.zone(), "UTC");
        let just_after_midnight = "2026-01-01T00:00:00.000001Z".parse().unwrap();
        assert_eq!(line.next_after(just_after_midnight), Some(at("2026-01-01T00:05")));
        assert_eq!(line.next_after(at("2026-01-01T00:05")), Some(at("2026-01-01T00:10")));
    }

    #[test]
    fn six_fields_start_with_seconds() {
        let line = CronLine::parse("*/20 0 * * * *", "UTC").unwrap();
        let seconds: Vec<_> = line
            .ticks_after(at("2026-01-01T00:00"))
            .take(3)
            .map(|tick| (tick.hour(), tick.second()))
            .collect();
        assert_eq!(seconds, [(0, 20), (0, 40), (1, 0)]);
    }

    #[test]
    fn names_and_nicknames_are_parsed() {
        let noon = "2026-01-01T12:00"; // a Thursday
        assert_eq!(ticks("0 8 * * MON", "UTC", noon), ["2026-01-05T08:00"]);
        assert_eq!(ticks("0 8 1 feb,DEC *", "UTC", noon), ["2026-02-01T08:00", "2026-12-01T08:00"]);
        assert_eq!(ticks("0 8 L * *", "UTC", noon), ["2026-01-31T08:00", "2026-02-28T08:00"]);
        assert_eq!(ticks("@hourly", "UTC", noon), ["2026-01-01T13:00"]);
        assert_eq!(ticks("@daily", "UTC", noon), ["2026-01-02T00:00"]);
        assert_eq!(ticks("@weekly", "UTC", noon), ["2026-01-04T00:00"]);
        assert_eq!(ticks("@monthly", "UTC", noon), ["2026-02-01T00:00"]);
        assert_eq!(ticks("@yearly", "UTC", noon), ["2027-01-01T00:00"]);
        assert_eq!(ticks("0 0 29 2 *", "UTC", noon), ["2028-02-29T00:00"]);
    }

    #[test]
    fn an_invalid_line_or_zone_is_refused_by_field() {
        let long = format!("{} * * * *", "0,".repeat(100));
        let never = ["0 0 30 2 *", "0 0 31 4,6,9,11 *"];
        let garbled =
            ["", "* * * *", "* * * * * * *", "61 * * * *", "* 24 * * *", "a b c d e", "@reboot", &long];
        for expression in garbled.into_iter().chain(never) {
            let error = CronLine::parse(expression, "UTC").unwrap_err();
            assert_eq!(error.field(), Some("expression"), "{expression}: {error}");
        }
        for zone in ["", "Mars/Olympus", "CEST", "+02:00"] {
            let error = CronLine::parse("* * * * *", zone).unwrap_err();
            assert_eq!(error.field(), Some("zone"), "{zone}: {error}");
        }
    }

    #[test]
    fn outside_the_calendar_there_is_no_tick_and_no_panic() {
        let line = CronLine::parse("* * * * *", LORD_HOWE).unwrap();
        for instant in [DateTime::<Utc>::MIN_UTC, DateTime::<Utc>::MAX_UTC] {
            assert_eq!(line.next_after(instant), None);
        }
    }

    // ---- the skipped hour ------------------------------------------------

    #[test]
    fn a_time_in_the_skipped_hour_ticks_at_its_end() {
        // Berlin, 29 March 2026: 02:00 CET is 03:00 CEST, at 01:00 UTC.
        assert_eq!(
            ticks("30 2 * * *", BERLIN, "2026-03-27T12:00"),
            ["2026-03-28T01:30", "2026-03-29T01:00", "2026-03-30T00:30"]
        );
        // New York, 8 March 2026: 02:00 EST is 03:00 EDT, at 07:00 UTC.
        assert_eq!(
            ticks("30 2 * * *", NEW_YORK, "2026-03-06T12:00"),
            ["2026-03-07T07:30", "2026-03-08T07:00", "2026-03-09T06:30"]
        );
        // Lord Howe, 4 October 2026: 02:00 is 02:30, at 15:30 UTC the day before.
        assert_eq!(
            ticks("15 2 * * *", LORD_HOWE, "2026-10-02T12:00"),
            ["2026-10-02T15:45", "2026-10-03T15:30", "2026-10-04T15:15"]
        );
        // Cairo, 24 April 2026: midnight is 01:00, at 22:00 UTC the day before.
        assert_eq!(
            ticks("@daily", "Africa/Cairo", "2026-04-22T12:00"),
            ["2026-04-22T22:00", "2026-04-23T22:00", "2026-04-24T21:00"]
        );
    }

    #[test]
    fn several_times_in_the_skipped_hour_tick_once() {
        assert_eq!(
            ticks("*/10 2 * * *", BERLIN, "2026-03-29T00:00"),
            ["2026-03-29T01:00", "2026-03-30T00:00", "2026-03-30T00:10"]
        );
        // The end of the gap is also a time that the line names.
        assert_eq!(
            ticks("0 2,3 * * *", BERLIN, "2026-03-29T00:00"),
            ["2026-03-29T01:00", "2026-03-30T00:00", "2026-03-30T01:00"]
        );
    }

    #[test]
    fn a_line_for_every_hour_is_not_affected_by_the_skipped_hour() {
        assert_eq!(
            ticks("*/20 * * * *", BERLIN, "2026-03-29T00:30"),
            ["2026-03-29T00:40", "2026-03-29T01:00", "2026-03-29T01:20"]
        );
        assert_eq!(
            ticks("30 * * * *", NEW_YORK, "2026-03-08T06:00"),
            ["2026-03-08T06:30", "2026-03-08T07:30", "2026-03-08T08:30"]
        );
        // The clock on Lord Howe never shows 02:00 that day.
        assert_eq!(
            ticks("0 * * * *", LORD_HOWE, "2026-10-03T14:00"),
            ["2026-10-03T14:30", "2026-10-03T16:00", "2026-10-03T17:00"]
        );
    }

    // ---- the repeated hour -----------------------------------------------

    #[test]
    fn a_time_in_the_repeated_hour_ticks_the_first_time_only() {
        // Berlin, 25 October 2026: 03:00 CEST is 02:00 CET, at 01:00 UTC.
        assert_eq!(ticks("30 2 * * *", BERLIN, "2026-10-24T12:00"), ["2026-10-25T00:30", "2026-10-26T01:30"]);
        // New York, 1 November 2026: 02:00 EDT is 01:00 EST, at 06:00 UTC.
        assert_eq!(
            ticks("30 1 * * *", NEW_YORK, "2026-10-31T12:00"),
            ["2026-11-01T05:30", "2026-11-02T06:30"]
        );
        // Lord Howe, 5 April 2026: 02:00 is 01:30, at 15:00 UTC the day before.
        assert_eq!(
            ticks("45 1 * * *", LORD_HOWE, "2026-04-04T12:00"),
            ["2026-04-04T14:45", "2026-04-05T15:15"]
        );
    }

    #[test]
    fn the_second_pass_of_the_repeated_hour_has_no_ticks_of_its_own() {
        assert_eq!(
            ticks("*/30 2,4 * * *", BERLIN, "2026-10-24T23:59"),
            ["2026-10-25T00:00", "2026-10-25T00:30", "2026-10-25T03:00", "2026-10-25T03:30"]
        );
        // Starting in the second pass: the time has already ticked.
        assert_eq!(ticks("30 2 * * *", BERLIN, "2026-10-25T01:10"), ["2026-10-26T01:30"]);
    }

    #[test]
    fn a_line_for_every_hour_is_not_affected_by_the_repeated_hour() {
        assert_eq!(
            ticks("*/20 * * * *", BERLIN, "2026-10-25T00:30"),
            [
                "2026-10-25T00:40",
                "2026-10-25T01:00",
                "2026-10-25T01:20",
                "2026-10-25T01:40",
                "2026-10-25T02:00"
            ]
        );
        assert_eq!(
            ticks("30 * * * *", NEW_YORK, "2026-11-01T05:00"),
            ["2026-11-01T05:30", "2026-11-01T06:30", "2026-11-01T07:30"]
        );
        // Lord Howe repeats half an hour, which starts at 01:30.
        assert_eq!(
            ticks("30 * * * *", LORD_HOWE, "2026-04-04T14:00"),
            ["2026-04-04T14:30", "2026-04-04T15:00", "2026-04-04T16:00"]
        );
    }

    // ---- properties ------------------------------------------------------

    #[test]
    fn a_line_for_every_hour_ticks_whenever_the_clock_matches() {
        const MINUTE: TimeDelta = TimeDelta::minutes(1);
        let changes = [
            (BERLIN, ["2026-03-29T01:00", "2026-10-25T01:00"]),
            (NEW_YORK, ["2026-03-08T07:00", "2026-11-01T06:00"]),
            (LORD_HOWE, ["2026-04-04T15:00", "2026-10-03T15:30"]),
        ];
        for (zone, change) in changes.iter().flat_map(|(zone, changes)| changes.map(|change| (zone, change)))
        {
            let line = CronLine::parse("*/7 * * * *", zone).unwrap();
            let (start, end) = (at(change) - MINUTE * 1000, at(change) + MINUTE * 1000);
            let minutes = std::iter::successors(Some(start), |minute| Some(*minute + MINUTE));
            let matching = minutes
                .take_while(|minute| *minute < end)
                .filter(|minute| minute.with_timezone(&line.zone).minute() % 7 == 0);
            let ticks = line.ticks_after(start - MINUTE).take_while(|tick| *tick < end);
            assert!(ticks.eq(matching), "{change} in {zone}");
        }
    }

    #[test]
    fn a_time_of_day_ticks_once_on_every_day_of_the_year() {
        for zone in [BERLIN, NEW_YORK, LORD_HOWE] {
            for time in ["45 1", "0 2", "15 2", "30 2", "0 3"] {
                let line = CronLine::parse(&format!("{time} * * *"), zone).unwrap();
                let tz: Tz = zone.parse().unwrap();
                let days = line.ticks_after(at("2026-01-01T12:00")).take(365);
                let days: Vec<_> = days.map(|tick| tick.with_timezone(&tz).ordinal()).collect();
                assert!(days.windows(2).all(|pair| pair[1] == pair[0] % 365 + 1), "{time} in {zone}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn every_instant_between_two_ticks_has_the_same_next_tick(
            expression in prop::sample::select(vec![
                "* * * * *", "*/7 * * * *", "30 * * * *", "30 2 * * *", "*/10 1-3 * * *",
                "0 */2 * * *", "15,45 0-2 * * SUN", "*/9 * * * * *", "*/13 30 1,2 * * *",
            ]),
            zone in prop::sample::select(vec![BERLIN, NEW_YORK, LORD_HOWE, "Africa/Cairo", "UTC"]),
            // Around the clock changes of 2026, and one date without a change.
            near in prop::sample::select(vec![
                "2026-03-29T01:00", "2026-10-25T01:00", "2026-03-08T07:00", "2026-11-01T06:00",
                "2026-10-03T15:30", "2026-04-04T15:00", "2026-04-23T22:00", "2026-07-01T00:00",
            ]),
            seconds in -90_000i64..90_000,
            part in 0.0f64..1.0,
        ) {
            let line = CronLine::parse(expression, zone).unwrap();
            let instant = at(near) + TimeDelta::seconds(seconds);
            let tick = line.next_after(instant).unwrap();
            prop_assert!(tick > instant);
            let between = instant + (tick - instant - TimeDelta::microseconds(1)) * ((part * 1000.0) as i32) / 1000;
            prop_assert_eq!(line.next_after(between), Some(tick));
            prop_assert!(line.next_after(tick).unwrap() > tick);
        }
    }
}
