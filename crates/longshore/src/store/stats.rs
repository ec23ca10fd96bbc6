//! Numbers: jobs by status, jobs ahead of one, what has ended when, and the result of
//! the consistency check.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::job::{Outcome, Status};
use crate::lifecycle::FAR_FUTURE;

/// How many jobs of a queue and kind are in a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Count {
    /// The status.
    pub status: Status,
    /// The queue.
    pub queue: String,
    /// The kind.
    pub kind: String,
    /// How many.
    pub jobs: u64,
    /// Whether that is an estimate, because very many wait.
    pub estimated: bool,
}

/// How many jobs come before another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// How many of those looked at.
    pub jobs: u32,
    /// Whether there may be more: as many were looked at as might be.
    pub or_more: bool,
}

/// What ended in a minute or an hour, of one queue, kind and outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tallied {
    /// When the minute began, or the hour where minutes have been added up.
    pub minute: DateTime<Utc>,
    /// The queue.
    pub queue: String,
    /// The kind.
    pub kind: String,
    /// How they ended.
    pub outcome: Outcome,
    /// How many ends there were; a job that was retried and ended again counts
    /// again.
    pub jobs: u64,
    /// How long the last attempts took: the upper bound of each bucket in
    /// milliseconds, ascending, and how many jobs are in it. Jobs that were
    /// cancelled while they waited are in the first.
    pub run_ms: Vec<(f64, u64)>,
}

/// What ended, as a row of the tallies says it.
pub(crate) struct Tally {
    pub(crate) minute: DateTime<Utc>,
    pub(crate) queue: String,
    pub(crate) kind: String,
    pub(crate) outcome: Outcome,
    pub(crate) run_bucket: i32,
    pub(crate) ended: i64,
}

/// One item for each minute, queue, kind and outcome, in that order.
pub(crate) fn add_up(tallies: impl IntoIterator<Item = Tally>) -> Vec<Tallied> {
    let mut sums = BTreeMap::<_, BTreeMap<i32, u64>>::new();
    for tally in tallies {
        let of = (tally.minute, tally.queue, tally.kind, tally.outcome);
        *sums.entry(of).or_default().entry(tally.run_bucket).or_default() += tally.ended.unsigned_abs();
    }
    let tallied = |((minute, queue, kind, outcome), buckets): (_, BTreeMap<i32, u64>)| Tallied {
        minute,
        queue,
        kind,
        outcome,
        jobs: buckets.values().sum(),
        run_ms: buckets.into_iter().map(|(bucket, jobs)| (longest_ms(bucket), jobs)).collect(),
    };
    sums.into_iter().map(tallied).collect()
}

/// Where a bucket ends: there are four to an octave of 1 + milliseconds.
fn longest_ms(run_bucket: i32) -> f64 {
    ((f64::from(run_bucket) + 1.0) / 4.0).exp2() - 1.0
}

/// Where the minute or the hour, `seconds` long, that holds this instant begins;
/// no earlier and no later than both engines can store.
pub(crate) fn start_of(seconds: i64, at: DateTime<Utc>) -> DateTime<Utc> {
    let at = at.clamp(DateTime::UNIX_EPOCH, FAR_FUTURE).timestamp();
    DateTime::from_timestamp(at - at.rem_euclid(seconds), 0).unwrap_or_default()
}

/// What [`Store::check`](super::Store::check) found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// How many jobs were looked at.
    pub jobs: u64,
    /// What is wrong, one sentence each; empty when all is well. Lists stop at
    /// a hundred of a kind.
    pub problems: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_where_the_next_begins() {
        let bucket_of = |ms: f64| (4.0 * (1.0 + ms).log2()).floor() as i32;
        for bucket in [0, 1, 7, 40, 100] {
            assert_eq!(bucket_of(longest_ms(bucket) * 0.999), bucket);
            assert_eq!(bucket_of(longest_ms(bucket) * 1.001), bucket + 1);
        }
    }

    #[test]
    fn an_instant_is_in_the_minute_and_the_hour_that_began_before_it() {
        let at = |text: &str| text.parse::<DateTime<Utc>>().unwrap();
        assert_eq!(start_of(60, at("2031-05-06T07:08:09.5Z")), at("2031-05-06T07:08:00Z"));
        assert_eq!(start_of(3600, at("2031-05-06T07:08:09Z")), at("2031-05-06T07:00:00Z"));
        assert_eq!(start_of(60, at("2031-05-06T07:08:00Z")), at("2031-05-06T07:08:00Z"));
        assert_eq!(start_of(60, DateTime::<Utc>::MIN_UTC), DateTime::UNIX_EPOCH);
        assert_eq!(start_of(60, DateTime::<Utc>::MAX_UTC), at("9999-12-31T23:59:00Z"));
    }
}
