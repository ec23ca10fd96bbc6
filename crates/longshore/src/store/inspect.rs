//! Reading jobs: filters and pages. The record of one job is in
//! [`job`](crate::job).

use chrono::{DateTime, Utc};
use serde::Serialize;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, Status};

/// A short summary of a job, without its payload.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Glance {
    /// Its id.
    pub id: JobId,
    /// Its kind.
    pub kind: String,
    /// Its queue.
    pub queue: String,
    /// Its status.
    pub status: Status,
    /// The number of attempts, including one in progress.
    pub attempts: u16,
    /// Whether its cancellation was requested; true for every cancelled job.
    pub cancel_requested: bool,
}

/// Which jobs to list. A job must match every field that is set.
#[derive(Clone, Debug)]
pub struct ListFilter {
    /// Jobs in this status.
    pub status: Option<Status>,
    /// Jobs of this kind.
    pub kind: Option<String>,
    /// Jobs of this queue.
    pub queue: Option<String>,
    /// Jobs with this tag.
    pub tag: Option<String>,
    /// The job with this idempotency key, its own or that of a request merged into it.
    pub idempotency_key: Option<String>,
    /// The live job with this unique key.
    pub unique_key: Option<String>,
    /// Jobs created before this instant. The time is taken from the job's id and has
    /// millisecond precision.
    pub older_than: Option<DateTime<Utc>>,
    /// Jobs created at this instant or later, by the same time.
    pub newer_than: Option<DateTime<Utc>>,
    /// Continue after this job: jobs with lower ids.
    pub cursor: Option<JobId>,
    /// Skip this many matches; at most 10,000.
    pub offset: u32,
    /// The maximum number of jobs, 1 to 200.
    pub limit: u32,
    /// Whether to read payloads and results.
    pub payloads: Payloads,
}

/// Whether a list contains the payloads and results of its jobs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Payloads {
    /// It contains them.
    #[default]
    Include,
    /// They are not read. `payload` is JSON null and `result` is absent.
    Omit,
}

impl ListFilter {
    /// The largest `offset`. To list further jobs, use `cursor`.
    pub const MAX_OFFSET: u32 = 10_000;
    /// The maximum number of jobs on a page.
    pub const MAX_LIMIT: u32 = 200;
    /// The maximum size of a page in bytes: payloads, results, progress, metadata and
    /// errors together. A page ends before the job that would exceed it, but contains at
    /// least one job.
    pub const MAX_BYTES: usize = 4 * 1024 * 1024;
    /// The maximum number of rows examined for a page. With an `offset`, four times
    /// as many, because the skipped matches are counted one by one.
    pub const MAX_EXAMINED: u32 = 5_000;
}

impl ListFilter {
    pub(crate) fn validate(&self) -> Result<()> {
        if self.offset > ListFilter::MAX_OFFSET {
            return Err(Error::invalid(
                "offset",
                format!("offset: {} is above {}; use `cursor` instead", self.offset, ListFilter::MAX_OFFSET),
            ));
        }
        Ok(())
    }

    /// The range of ids to list: the upper bound (exclusive) and the lower bound
    /// (inclusive). Ids start with their creation time, so a time is a bound on ids.
    pub(crate) fn id_bounds(&self) -> (Option<Uuid>, Option<Uuid>) {
        let cursor = self.cursor.map(|id| id.0);
        let before = self.older_than.and_then(first_id_of).into_iter().chain(cursor).min();
        (before, self.newer_than.map(|at| first_id_of(at).unwrap_or(Uuid::max())))
    }

    /// Whether the filter needs columns of the request (the row in `jobs`).
    pub(crate) fn needs_request(&self) -> bool {
        self.kind.is_some() || self.queue.is_some() || self.tag.is_some()
    }

    /// The maximum number of rows examined for this page.
    pub(crate) fn max_examined(&self) -> u32 {
        if self.offset == 0 { ListFilter::MAX_EXAMINED } else { 4 * ListFilter::MAX_EXAMINED }
    }

    /// `limit`, clamped to 1..=200.
    pub(crate) fn page_size(&self) -> u32 {
        self.limit.clamp(1, ListFilter::MAX_LIMIT)
    }
}

/// The lowest possible id created in this millisecond; `None` if the time is too
/// late to fit in an id.
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
            payloads: Payloads::Include,
        }
    }
}

/// One page of a list.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Page {
    /// The jobs, newest first.
    pub jobs: Vec<JobRecord>,
    /// The `cursor` of the next page; `None` on the last page.
    pub next: Option<JobId>,
}

/// Collects the jobs of a page until it is large enough.
#[derive(Default)]
pub(crate) struct PageBuilder {
    jobs: Vec<JobRecord>,
    bytes: usize,
}

impl PageBuilder {
    /// Adds the next job, or returns false if the page ends before it.
    pub(crate) fn add(&mut self, job: JobRecord) -> bool {
        let bytes = size_of_texts(&job);
        if !self.jobs.is_empty() && self.bytes + bytes > ListFilter::MAX_BYTES {
            return false;
        }
        self.bytes += bytes;
        self.jobs.push(job);
        true
    }

    #[cfg(feature = "sqlite")]
    pub(crate) fn last(&self) -> Option<JobId> {
        self.jobs.last().map(|job| job.id)
    }

    pub(crate) fn jobs(self) -> Vec<JobRecord> {
        self.jobs
    }
}

/// The bytes of the fields of a job that can be large.
fn size_of_texts(job: &JobRecord) -> usize {
    let optional = [&job.result, &job.progress, &job.metadata];
    let json: usize = optional.into_iter().flatten().map(|json| json.get().len()).sum();
    job.payload.get().len() + json + job.last_error.as_ref().map_or(0, String::len)
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
        // A cursor inside the bounds replaces the upper one; one outside changes nothing.
        let within = Uuid::from_u128(0xffff << 80);
        let cursor = |id| ListFilter { cursor: Some(JobId(id)), ..both.clone() };
        assert_eq!(cursor(within).id_bounds(), (Some(within), from));
        assert_eq!(cursor(Uuid::max()).id_bounds(), (before, from));
    }

    #[test]
    fn an_id_is_within_the_bounds_of_its_creation_millisecond() {
        let id = Uuid::now_v7();
        let (seconds, nanos) = id.get_timestamp().unwrap().to_unix();
        let created = DateTime::from_timestamp(seconds as i64, nanos).unwrap();
        let next = created + chrono::TimeDelta::milliseconds(1);
        assert!(first_id_of(created).unwrap() <= id && id < first_id_of(next).unwrap());
    }

    #[test]
    fn times_outside_the_range_of_ids_are_before_or_after_all_ids() {
        let bounded = |at| ListFilter { older_than: Some(at), newer_than: Some(at), ..ListFilter::default() };
        assert_eq!(bounded(DateTime::<Utc>::MIN_UTC).id_bounds(), (Some(Uuid::nil()), Some(Uuid::nil())));
        assert_eq!(bounded(DateTime::<Utc>::MAX_UTC).id_bounds(), (None, Some(Uuid::max())));
    }
}
