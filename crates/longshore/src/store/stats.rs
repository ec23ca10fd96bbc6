//! Statistics: jobs per status, jobs ahead of a job, and jobs that ended per minute.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::job::{Outcome, Status};
use crate::rules::lifecycle::FAR_FUTURE;

/// The number of jobs of one queue and kind in one status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Count {
    /// The status.
    pub status: Status,
    /// The queue.
    pub queue: String,
    /// The kind.
    pub kind: String,
    /// The number of jobs.
    pub jobs: u64,
    /// Whether `jobs` is an estimate, because too many jobs wait to count them.
    pub estimated: bool,
}

/// Counts in the order in which [`Store::counts`](crate::store::Store::counts) returns them.
pub(crate) fn in_order(mut counts: Vec<Count>) -> Vec<Count> {
    counts.sort_by(|a, b| (&a.queue, &a.kind, a.status).cmp(&(&b.queue, &b.kind, b.status)));
    counts
}

/// The number of jobs that would be claimed before another job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ahead {
    /// The number of jobs ahead, among those examined.
    pub jobs: u32,
    /// Whether there may be more, because the limit of jobs to examine was reached.
    pub or_more: bool,
}

/// The jobs of one queue, kind and outcome that ended in one minute or hour.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Tallied {
    /// The start of the minute, or of the hour if its minutes were folded.
    pub minute: DateTime<Utc>,
    /// The queue.
    pub queue: String,
    /// The kind.
    pub kind: String,
    /// The outcome.
    pub outcome: Outcome,
    /// The number of ends. A finished job that an operator retried and that ended
    /// again counts twice.
    pub jobs: u64,
    /// A histogram of how long the last attempts took: for each bucket, its upper
    /// bound in milliseconds and its number of jobs, in ascending order. Jobs that
    /// were cancelled while they waited are in the first bucket.
    pub run_ms: Vec<(f64, u64)>,
}

/// One row of the tallies.
pub(crate) struct Tally {
    pub(crate) minute: DateTime<Utc>,
    pub(crate) queue: String,
    pub(crate) kind: String,
    pub(crate) outcome: Outcome,
    pub(crate) run_bucket: i32,
    pub(crate) ended: i64,
}

/// Groups rows by minute, queue, kind and outcome, and sorts them in that order.
pub(crate) fn add_up(tallies: impl IntoIterator<Item = Tally>) -> Vec<Tallied> {
    let mut sums = BTreeMap::<_, BTreeMap<i32, u64>>::new();
    for tally in tallies {
        let group = (tally.minute, tally.queue, tally.kind, tally.outcome);
        *sums.entry(group).or_default().entry(tally.run_bucket).or_default() += tally.ended.unsigned_abs();
    }
    let tallied = |((minute, queue, kind, outcome), buckets): (_, BTreeMap<i32, u64>)| Tallied {
        minute,
        queue,
        kind,
        outcome,
        jobs: buckets.values().sum(),
        run_ms: buckets.into_iter().map(|(bucket, jobs)| (bucket_end_ms(bucket), jobs)).collect(),
    };
    sums.into_iter().map(tallied).collect()
}

/// The upper bound of a bucket. Buckets are logarithmic: four per doubling of
/// 1 + milliseconds.
pub(super) fn bucket_end_ms(run_bucket: i32) -> f64 {
    ((f64::from(run_bucket) + 1.0) / 4.0).exp2() - 1.0
}

/// The start of the period of `seconds` (a minute or an hour) that contains `at`,
/// clamped to the range that both engines store.
pub(crate) fn start_of(seconds: i64, at: DateTime<Utc>) -> DateTime<Utc> {
    let at = at.clamp(DateTime::UNIX_EPOCH, FAR_FUTURE).timestamp();
    DateTime::from_timestamp(at - at.rem_euclid(seconds), 0).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_ends_where_the_next_starts() {
        let bucket_of = |ms: f64| (4.0 * (1.0 + ms).log2()).floor() as i32;
        for bucket in [0, 1, 7, 40, 100] {
            assert_eq!(bucket_of(bucket_end_ms(bucket) * 0.999), bucket);
            assert_eq!(bucket_of(bucket_end_ms(bucket) * 1.001), bucket + 1);
        }
    }

    #[test]
    fn start_of_rounds_down_to_the_minute_or_hour_and_clamps() {
        let at = |text: &str| text.parse::<DateTime<Utc>>().unwrap();
        assert_eq!(start_of(60, at("2031-05-06T07:08:09.5Z")), at("2031-05-06T07:08:00Z"));
        assert_eq!(start_of(3600, at("2031-05-06T07:08:09Z")), at("2031-05-06T07:00:00Z"));
        assert_eq!(start_of(60, at("2031-05-06T07:08:00Z")), at("2031-05-06T07:08:00Z"));
        assert_eq!(start_of(60, DateTime::<Utc>::MIN_UTC), DateTime::UNIX_EPOCH);
        assert_eq!(start_of(60, DateTime::<Utc>::MAX_UTC), at("9999-12-31T23:59:00Z"));
    }
}
