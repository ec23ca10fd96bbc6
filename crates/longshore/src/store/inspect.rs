//! Reading jobs: filters and pages. The record of one job is in
//! [`job`](crate::job).

use chrono::{DateTime, Utc};
use serde::Serialize;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, Status};

/// A job at a glance: where it stands, and nothing of what it carries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Glance {
    /// Its id.
    pub id: JobId,
    /// Which handler runs it.
    pub kind: String,
    /// Where it waits or waited.
    pub queue: String,
    /// Where it stands.
    pub status: Status,
    /// How many attempts have begun or been charged.
    pub attempts: u16,
    /// Whether it was told to stop.
    pub cancel_requested: bool,
}

/// Which jobs to list.
#[derive(Clone, Debug)]
pub struct ListFilter {
    /// In this status.
    pub status: Option<Status>,
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// With this tag.
    pub tag: Option<String>,
    /// With this idempotency key.
    pub idempotency_key: Option<String>,
    /// With this unique key (live jobs only).
    pub unique_key: Option<String>,
    /// Made before this instant, to the millisecond, as its id says.
    pub older_than: Option<DateTime<Utc>>,
    /// Made at this instant or later, to the millisecond, as its id says.
    pub newer_than: Option<DateTime<Utc>>,
    /// Older than this job.
    pub cursor: Option<JobId>,
    /// Past this many matches, up to 10,000.
    pub offset: u32,
    /// How many, 1 to 200.
    pub limit: u32,
}

impl ListFilter {
    /// How far `offset` reaches; past it, use `cursor`.
    pub const MAX_OFFSET: u32 = 10_000;
    /// How many jobs a page holds at most.
    pub const MAX_LIMIT: u32 = 200;
    /// How many rows a page examines at most; four times as many with an `offset`,
    /// which has to be counted up to.
    pub const MAX_EXAMINED: u32 = 5_000;
}

impl ListFilter {
    pub(crate) fn validate(&self) -> Result<()> {
        if self.offset > ListFilter::MAX_OFFSET {
            return Err(Error::invalid(
                "offset",
                format!("offset: {} is past {}; use `cursor` to go on", self.offset, ListFilter::MAX_OFFSET),
            ));
        }
        Ok(())
    }

    /// The ids that the list is about: all before the first, from the second up.
    /// Ids begin with the time they were made, so a time bounds the walk.
    pub(crate) fn id_bounds(&self) -> (Option<Uuid>, Option<Uuid>) {
        let cursor = self.cursor.map(|id| id.0);
        let before = self.older_than.and_then(first_id_of).into_iter().chain(cursor).min();
        (before, self.newer_than.map(|at| first_id_of(at).unwrap_or(Uuid::max())))
    }

    /// Whether a job's request must be read to tell whether it fits.
    pub(crate) fn names_what_was_asked(&self) -> bool {
        self.kind.is_some() || self.queue.is_some() || self.tag.is_some()
    }

    /// How many rows this page examines at most.
    pub(crate) fn most_examined(&self) -> u32 {
        match self.offset {
            0 => ListFilter::MAX_EXAMINED,
            _ => 4 * ListFilter::MAX_EXAMINED,
        }
    }

    /// The page's size, within its bounds.
    pub(crate) fn page_size(&self) -> u32 {
        self.limit.clamp(1, ListFilter::MAX_LIMIT)
    }
}

/// The lowest id that can have been made in this millisecond; `None` past the
/// last one that ids can tell.
fn first_id_of(at: DateTime<Utc>) -> Option<Uuid> {
    let millis = u128::try_from(at.timestamp_millis()).unwrap_or(0);
    (millis < 1 << 48).then(|| Uuid::from_u128(millis << 80))
}

impl Default for ListFilter {
    fn default() -> Self {
        ListFilter {
            status: None,
            kind: None,
            queue: None,
            tag: None,
            idempotency_key: None,
            unique_key: None,
            older_than: None,
            newer_than: None,
            cursor: None,
            offset: 0,
            limit: 50,
        }
    }
}

/// One page of a list.
#[derive(Clone, Debug, Serialize)]
pub struct Page {
    /// The jobs, newest first.
    pub jobs: Vec<JobRecord>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<JobId>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_a_cursor_are_bounds_on_ids() {
        let at = |millis| DateTime::from_timestamp_millis(millis).unwrap();
        let id = |text: &str| Some(text.parse::<Uuid>().unwrap());
        let none = ListFilter::default();
        assert_eq!(none.id_bounds(), (None, None));
        let both =
            ListFilter { older_than: Some(at(0x1_0000)), newer_than: Some(at(0xabcd)), ..none.clone() };
        let (before, from) =
            (id("00000001-0000-0000-0000-000000000000"), id("00000000-abcd-0000-0000-000000000000"));
        assert_eq!(both.id_bounds(), (before, from));
        // A cursor within them goes on from there, one past them changes nothing.
        let within = Uuid::from_u128(0xffff << 80);
        let cursor = |id| ListFilter { cursor: Some(JobId(id)), ..both.clone() };
        assert_eq!(cursor(within).id_bounds(), (Some(within), from));
        assert_eq!(cursor(Uuid::max()).id_bounds(), (before, from));
    }

    #[test]
    fn an_id_is_within_the_millisecond_it_was_made_in() {
        let id = Uuid::now_v7();
        let (seconds, nanos) = id.get_timestamp().unwrap().to_unix();
        let made = DateTime::from_timestamp(seconds as i64, nanos).unwrap();
        let next = made + chrono::TimeDelta::milliseconds(1);
        assert!(first_id_of(made).unwrap() <= id && id < first_id_of(next).unwrap());
    }

    #[test]
    fn times_that_no_id_can_tell_are_before_or_after_all_ids() {
        let past = |at| ListFilter { older_than: Some(at), newer_than: Some(at), ..ListFilter::default() };
        assert_eq!(past(DateTime::<Utc>::MIN_UTC).id_bounds(), (Some(Uuid::nil()), Some(Uuid::nil())));
        assert_eq!(past(DateTime::<Utc>::MAX_UTC).id_bounds(), (None, Some(Uuid::max())));
    }
}
