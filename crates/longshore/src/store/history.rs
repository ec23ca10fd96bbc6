//! History for charts: what processes have counted or seen, by minute. Jobs that ended are in the tallies.

use chrono::{DateTime, Utc};

use super::stats::bucket_end_ms;
use crate::error::{Error, Result};

/// What a measure is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum What {
    /// How many jobs were claimed after a time in this bucket since they were due.
    Waited,
    /// How many attempts failed.
    Failed,
    /// How many jobs waited.
    Depth,
    /// For how many milliseconds the oldest waiting job had been due.
    Overdue,
}

impl What {
    /// Everything that is measured.
    pub const ALL: [What; 4] = [What::Waited, What::Failed, What::Depth, What::Overdue];

    /// The name in the database.
    pub fn as_str(self) -> &'static str {
        match self {
            What::Waited => "waited",
            What::Failed => "failed",
            What::Depth => "depth",
            What::Overdue => "overdue",
        }
    }

    pub(crate) fn from_stored(name: &str) -> Result<Self> {
        What::ALL.into_iter().find(|what| what.as_str() == name).ok_or_else(|| {
            Error::internal(format!("the database has a measure of the unknown kind `{name}`"))
        })
    }
}

/// One value to add to the current minute.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NewMeasure {
    /// What was measured.
    pub what: What,
    /// The queue; empty for all queues together.
    pub queue: String,
    /// The kind; empty if the value is about the whole queue.
    pub kind: String,
    /// The bucket of a waiting time, as in the tallies; otherwise 0.
    pub bucket: i16,
    /// The value. Numbers of jobs and attempts are added up; of depths and ages, the largest is kept.
    pub value: i64,
}

/// Which part of the history to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryFilter {
    /// From when on. Starts with the whole minute or hour that contains this time.
    pub since: DateTime<Utc>,
    /// Only these queues; `None` means all.
    pub queues: Option<Vec<String>>,
    /// How much detail to return.
    pub detail: Detail,
}

impl HistoryFilter {
    /// Everything since then, by queue and kind.
    pub fn since(since: DateTime<Utc>) -> Self {
        HistoryFilter { since, queues: None, detail: Detail::QueuesAndKinds }
    }
}

/// What a history tells apart. Names that it does not tell apart are empty, and their values are added up. With
/// thousands of queues, this is what keeps charts fast.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// Nothing: one history of everything.
    Total,
    /// Queues.
    Queues,
    /// Kinds.
    Kinds,
    /// Queues and kinds.
    QueuesAndKinds,
}

impl Detail {
    pub(crate) fn has_queues(self) -> bool {
        matches!(self, Detail::Queues | Detail::QueuesAndKinds)
    }

    pub(crate) fn has_kinds(self) -> bool {
        matches!(self, Detail::Kinds | Detail::QueuesAndKinds)
    }
}

/// One value of a minute or an hour.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Measured {
    /// The start of the minute, or of the hour if its minutes were folded.
    pub minute: DateTime<Utc>,
    /// What was measured.
    pub what: What,
    /// The queue; empty for all queues together.
    pub queue: String,
    /// The kind; empty if the value is about the whole queue.
    pub kind: String,
    /// The upper bound of a waiting time, in milliseconds; otherwise 0.
    pub up_to_ms: f64,
    /// The value.
    pub value: u64,
}

/// One stored row.
pub(crate) struct Measure {
    pub(crate) minute: DateTime<Utc>,
    pub(crate) what: What,
    pub(crate) queue: String,
    pub(crate) kind: String,
    pub(crate) bucket: i16,
    pub(crate) value: i64,
}

impl From<Measure> for Measured {
    fn from(stored: Measure) -> Self {
        Measured {
            minute: stored.minute,
            what: stored.what,
            queue: stored.queue,
            kind: stored.kind,
            up_to_ms: if stored.what == What::Waited { bucket_end_ms(stored.bucket.into()) } else { 0.0 },
            value: stored.value.unsigned_abs(),
        }
    }
}

/// The bucket of a time, as in the tallies.
pub(crate) fn bucket_of(time: chrono::TimeDelta) -> i16 {
    let millis = time.num_microseconds().map_or(f64::MAX, |micros| micros.max(0) as f64 / 1000.0);
    (4.0 * (1.0 + millis).log2()).floor() as i16
}

/// How long measures are kept.
pub(crate) const KEPT_DAYS: i64 = 8;
/// Minutes that are older than this are folded into hours.
pub(crate) const MINUTES_KEPT_HOURS: i64 = 2;

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    #[test]
    fn a_time_is_in_a_bucket_that_ends_after_it() {
        for micros in [0, 1, 900, 1_000, 33_333, 59_000_000, 86_400_000_000] {
            let end = bucket_end_ms(bucket_of(TimeDelta::microseconds(micros)).into());
            let millis = micros as f64 / 1000.0;
            assert!(end > millis && end <= (millis + 1.0) * 1.2, "{micros}: {end}");
        }
        assert_eq!(bucket_of(TimeDelta::seconds(-5)), 0);
        assert!(bucket_of(TimeDelta::MAX) > 0);
    }
}
