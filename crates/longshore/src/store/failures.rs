//! Groups of failures: filters and records. What belongs to one group is decided in [`failure`](crate::failure).

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::failure::Fingerprint;
use crate::job::JobId;

/// Which groups of failures to list.
#[derive(Clone, Debug)]
pub struct FailureFilter {
    /// Only this group.
    pub fingerprint: Option<Fingerprint>,
    /// Only groups of this kind.
    pub kind: Option<String>,
    /// Only groups with a failure at this instant or later.
    pub seen_after: Option<DateTime<Utc>>,
    /// Continue after this group: those that were last seen earlier.
    pub after: Option<(DateTime<Utc>, Fingerprint)>,
    /// The maximum number of groups, 1 to 200.
    pub limit: u32,
}

impl FailureFilter {
    /// The maximum number of groups on a page.
    pub const MAX_LIMIT: u32 = 200;

    /// Reads what [`FailureRecord::cursor`] wrote; `None` if it is something else, or a time that Postgres cannot store.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "for URLs"))]
    pub(crate) fn read_cursor(text: &str) -> Option<(DateTime<Utc>, Fingerprint)> {
        // The year 5138, in microseconds.
        const MAX_CURSOR: i64 = 100_000_000_000_000_000;
        let (micros, fingerprint) = text.split_once('.')?;
        let micros = micros.parse().ok().filter(|micros| (0..MAX_CURSOR).contains(micros))?;
        Some((DateTime::from_timestamp_micros(micros)?, fingerprint.parse().ok()?))
    }

    /// `limit`, clamped to 1..=200.
    pub(crate) fn page_size(&self) -> u32 {
        self.limit.clamp(1, FailureFilter::MAX_LIMIT)
    }
}

impl Default for FailureFilter {
    fn default() -> Self {
        FailureFilter { fingerprint: None, kind: None, seen_after: None, after: None, limit: 50 }
    }
}

/// A group of failures: attempts of one kind that failed in the same way.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FailureRecord {
    /// What the failures have in common.
    pub fingerprint: Fingerprint,
    /// The kind of their jobs.
    pub kind: String,
    /// How many attempts have failed.
    pub attempts: u64,
    /// How many dead letters belong to the group now. At most [`MAX_DEAD`](Self::MAX_DEAD) are counted.
    pub dead: u64,
    /// Whether there are more dead letters than `dead`.
    pub dead_or_more: bool,
    /// When the first attempt failed.
    pub first_seen: DateTime<Utc>,
    /// When the newest attempt failed.
    pub last_seen: DateTime<Utc>,
    /// The job of the newest failure. It may no longer be kept.
    pub job: JobId,
    /// The error of the newest failure, or its beginning.
    pub error: String,
}

impl FailureRecord {
    /// Where a list continues after this group, for URLs.
    #[cfg_attr(not(feature = "api"), expect(dead_code, reason = "for URLs"))]
    pub(crate) fn cursor(&self) -> String {
        format!("{}.{}", self.last_seen.timestamp_micros(), self.fingerprint)
    }

    /// How many dead letters of a group are counted. An exact number of a million would take too long.
    pub const MAX_DEAD: u64 = 1_000;
    /// How much of an error is kept with its group, in characters.
    #[cfg_attr(
        not(feature = "sqlite"),
        expect(dead_code, reason = "a literal in the statements of Postgres")
    )]
    pub(crate) const MAX_ERROR: usize = 2_000;
    /// The maximum number of groups. If there are more, because errors contain words that differ from job to job, those that
    /// were last seen earliest are forgotten.
    pub(crate) const MAX_GROUPS: i64 = 10_000;
    /// A group is forgotten when this time has passed since its newest failure and no dead letter is left.
    pub(crate) const KEPT_DAYS: i64 = 30;
}

#[cfg(all(test, feature = "api"))]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_is_read_as_it_was_written() {
        let at = "2031-05-06T07:00:00.123456Z".parse().unwrap();
        let group = FailureRecord {
            fingerprint: Fingerprint::of("mail", "x"),
            kind: "mail".into(),
            attempts: 1,
            dead: 0,
            dead_or_more: false,
            first_seen: at,
            last_seen: at,
            job: JobId::new(),
            error: "x".into(),
        };
        assert_eq!(FailureFilter::read_cursor(&group.cursor()), Some((at, group.fingerprint)));
        for text in
            ["x", "1.2", "-569079415675717826.06f70e3890ab79ad", "100000000000000000.06f70e3890ab79ad"]
        {
            assert_eq!(FailureFilter::read_cursor(text), None, "{text}");
        }
    }
}
