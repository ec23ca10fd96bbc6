//! Reading jobs: one job with its history, and lists: their filters, where they look for jobs, and their
//! pages. [`record`] has the columns of a job. The engines walk the tables and read the jobs of a page, each
//! with its own statements.

use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use uuid::Uuid;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, column, one};
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, Status};
use crate::rules::fingerprint::Fingerprint;
use crate::rules::keys::stored_forms;

pub(super) mod record;

/// Reading jobs.
#[async_trait]
pub trait Lists {
    /// Returns one job with its history.
    async fn get(&self, id: JobId) -> Result<Option<JobRecord>>;

    /// Lists a page of jobs, newest first, as they are at one moment. Looks for matches
    /// until the page is full or the filter's `search_time` has passed, so a page may be
    /// short although there is a next one. If at most 10,000 jobs of a queue wait or run, a
    /// list of its waiting or running jobs finds them at once, however many other jobs there
    /// are; so does a list of the queue while few jobs are finished.
    async fn list(&self, filter: &ListFilter) -> Result<Page>;

    /// Lists up to `limit` newest jobs, up to `limit` running ones, and `also`,
    /// without payloads. Each job is listed once, oldest first; ids in `also` that do
    /// not exist are left out.
    async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>>;
}

#[async_trait]
impl<E: Engine> Lists for E {
    async fn get(&self, id: JobId) -> Result<Option<JobRecord>> {
        self.call(How::READ, id, |rows, id| Box::pin(record::get(rows, *id))).await
    }

    async fn list(&self, filter: &ListFilter) -> Result<Page> {
        filter.validate()?;
        // A job that moves to another table meanwhile is listed once, with the status that matched.
        self.call(How::SLOW_READ.of_one_moment(), filter.clone(), |rows, filter| Box::pin(list(rows, filter)))
            .await
    }

    async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        self.call(How::SLOW_READ, (limit, also.to_vec()), |rows, (limit, also)| {
            Box::pin(glance(rows, *limit, also))
        })
        .await
    }
}

/// The parts of a list for which each engine has its own statements.
#[async_trait]
pub(crate) trait Pages: Send {
    /// The live jobs that match; `None` if there are too many to sort them.
    async fn live_jobs(&mut self, filter: &ListFilter, live: Live) -> Sql<Option<Vec<JobId>>>;

    /// One step of a walk through a table.
    async fn walk(&mut self, filter: &ListFilter, walk: Walk, step: Step) -> Sql<Walked>;

    /// Reads jobs until their size exceeds the limit of a page. Returns also the last one before the limit if it was
    /// exceeded.
    async fn page(&mut self, ids: &[JobId], payloads: Payloads) -> Sql<(Vec<JobRecord>, Option<JobId>)>;
}

async fn list(rows: &mut dyn Rows, filter: &ListFilter) -> Sql<Page> {
    let keys = filter.stored_keys();
    let found = match &keys {
        Some(keys) => by_key(rows, filter, keys).await?,
        None => {
            let mut searched = Vec::new();
            for filter in filter.searches() {
                searched.push(search(rows, &filter).await?);
            }
            merge(filter, searched)
        }
    };
    debug_assert!(found.ids.is_sorted_by(|a, b| a >= b), "a page is newest first");
    let (jobs, end) = rows.page(&found.ids, filter.payloads).await?;
    let page = match keys {
        Some(_) => filter.page_by_key(jobs),
        None => Page { jobs, next: found.next, next_offset: found.next_offset },
    };
    Ok(match end {
        Some(end) => Page { next: Some(end), next_offset: 0, ..page },
        None => page,
    })
}

static BY_IDEMPOTENCY_KEY: Statement = Statement::new(
    "
    select id
      from longshore.jobs
     where idempotency_key = any($1::text[])
     union all
    select job
      from longshore.merged_requests
     where idempotency_key = any($1::text[])",
);

static BY_UNIQUE_KEY: Statement = Statement::new(
    "
    select job as id
      from longshore.keys
     where key = any($1::text[])",
);

/// The jobs of a key, newest first. The other conditions are tested on their records.
async fn by_key(rows: &mut dyn Rows, filter: &ListFilter, keys: &[String]) -> Sql<Found> {
    let statement = if filter.idempotency_key.is_some() { &BY_IDEMPOTENCY_KEY } else { &BY_UNIQUE_KEY };
    let mut ids: Vec<JobId> = column(rows.rows(statement, args![keys]).await?, "id")?;
    ids.sort_unstable_by(|a, b| b.cmp(a));
    ids.dedup();
    Ok(Found { ids, next: None, next_offset: 0 })
}

async fn search(rows: &mut dyn Rows, filter: &ListFilter) -> Sql<Searched> {
    let started = Instant::now();
    let finished =
        if filter.may_ask_tallies() { finished_jobs(rows, filter).await? } else { FinishedJobs::Many };
    let live = filter.live(finished);
    let live_ids = match live {
        Some(live) => rows.live_jobs(filter, live).await?,
        None => None,
    };
    let walk = filter.walk(live.filter(|_| live_ids.is_some()), finished);
    let mut search = Search::new(filter, live_ids.unwrap_or_default(), walk, started);
    while let (Some(walk), Some(step)) = (walk, search.next_step()) {
        let step_started = Instant::now();
        let walked = rows.walk(filter, walk, step).await?;
        debug_assert!(walked.ids.is_sorted_by(|a, b| a > b), "a walk finds its rows from new to old");
        debug_assert!(walked.ids.len() <= step.wanted as usize, "a walk stops when the page is full");
        search.add_step(step, walked, step_started.elapsed());
    }
    Ok(search.finish())
}

static COUNT_KEPT: Statement = Statement::new(
    "
    select coalesce(sum(kept) filter (
             where ($1::text is null or queue = $1)
               and ($2::text is null or kind = $2)
               and ($3::text is null or outcome::text = $3)), 0)::int8 as matching,
           coalesce(sum(kept), 0)::int8 as kept
      from longshore.tallies",
);

async fn finished_jobs(rows: &mut dyn Rows, filter: &ListFilter) -> Sql<FinishedJobs> {
    let status = filter.status().map(Status::as_str);
    let mut row = one(rows.row(&COUNT_KEPT, args![&filter.queue, &filter.kind, status]).await?)?;
    Ok(FinishedJobs::of(row.take("matching")?, row.take("kept")?))
}

static GLANCE: Statement = Statement::new(
    "
    select s.id, s.kind, s.queue, s.status, s.attempts, s.cancel_requested, s.created_at, s.finished_at
      from longshore.job_status s
     where s.id = any(array(
             select newest.id
               from (select id from longshore.jobs order by id desc limit $1) as newest
              union
             select live.id
               from (select id from longshore.running order by id desc limit $1) as live
              union
             select also.id
               from unnest($2::uuid[]) as also(id)))
       and s.status is not null   -- in no table: `check` reports it
     order by s.id",
);

async fn glance(rows: &mut dyn Rows, limit: u32, also: &[JobId]) -> Sql<Vec<Glance>> {
    let read = |mut row: Row| {
        let status = row.parse("status", str::parse)?;
        Ok(Glance {
            id: row.take("id")?,
            kind: row.take("kind")?,
            queue: row.take("queue")?,
            status,
            attempts: row.take("attempts")?,
            // The view of an older version shows it only for running jobs.
            cancel_requested: row.take("cancel_requested")? || status == Status::Cancelled,
            created_at: row.take("created_at")?,
            ended_at: row.take("finished_at")?,
        })
    };
    rows.rows(&GLANCE, args![limit, also]).await?.into_iter().map(read).collect()
}

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
    /// When it was created.
    #[serde(skip)]
    pub created_at: DateTime<Utc>,
    /// When it ended.
    #[serde(skip)]
    pub ended_at: Option<DateTime<Utc>>,
}

/// Which jobs to list. A job must match every field that is set.
#[derive(Clone, Debug)]
pub struct ListFilter {
    /// Jobs in one of these statuses. Empty means any.
    pub statuses: Vec<Status>,
    /// Jobs of this kind.
    pub kind: Option<String>,
    /// Jobs of this queue.
    pub queue: Option<String>,
    /// Jobs of this group.
    pub group: Option<String>,
    /// Jobs with this tag.
    pub tag: Option<String>,
    /// Jobs whose last error contains this text, whatever the case of the letters A to Z. Jobs that succeeded
    /// do not match, nor do jobs that wait for their first attempt; running jobs and jobs that wait for a
    /// retry do.
    pub error: Option<String>,
    /// Jobs whose last failure belongs to this group: dead letters, running jobs, and jobs that wait for a
    /// retry.
    pub failure: Option<Fingerprint>,
    /// The job with this idempotency key. The key may be that of a request that was merged into the job. If
    /// `queue` is set, also the job that has this key in the queue's namespace (see `rules/keys.rs`).
    pub idempotency_key: Option<String>,
    /// The live job with this unique key. If `queue` is set, also the job that has this key in the queue's
    /// namespace.
    pub unique_key: Option<String>,
    /// Jobs created before this instant. The time is taken from the job's id and has
    /// millisecond precision.
    pub older_than: Option<DateTime<Utc>>,
    /// Jobs created at this instant or later, by the same time.
    pub newer_than: Option<DateTime<Utc>>,
    /// Jobs that ended before this instant.
    pub ended_before: Option<DateTime<Utc>>,
    /// Jobs that ended at this instant or later.
    pub ended_after: Option<DateTime<Utc>>,
    /// Continue after this job: jobs with lower ids.
    pub cursor: Option<JobId>,
    /// Skip this many matches; at most 10,000.
    pub offset: u32,
    /// The maximum number of jobs, 1 to 200.
    pub limit: u32,
    /// Whether to read payloads and results.
    pub payloads: Payloads,
    /// How long to look for matching jobs; 80 ms by default. A page that is not full by
    /// then is short and has a `next`.
    pub search_time: Duration,
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
    /// The default of `search_time`. A page takes 100 ms at most if reading its jobs takes
    /// 20 ms.
    pub const SEARCH_TIME: Duration = Duration::from_millis(80);
    /// If at most this many jobs of a queue wait or run, a list reads all of them from the
    /// index of the queue and sorts them. If more do, it finds them soon by walking the
    /// table.
    pub(crate) const MAX_SORTED: u32 = 10_000;
    /// A job that has ended was created before that, unless the clock of the process that created
    /// its id was ahead by more than this.
    const CLOCK_SKEW: TimeDelta = TimeDelta::minutes(5);
    /// The statuses of jobs whose last error counts.
    const WITH_ERROR: [Status; 4] =
        [Status::Running, Status::Retrying, Status::FailedPermanent, Status::Cancelled];
    const WITH_FAILURE: [Status; 3] = [Status::Running, Status::Retrying, Status::FailedPermanent];
    const ENDED: [Status; 3] = [Status::Succeeded, Status::FailedPermanent, Status::Cancelled];
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
        let ended = self.ended_before.and_then(|at| at.checked_add_signed(ListFilter::CLOCK_SKEW));
        let before = [self.older_than.and_then(first_id_of), ended.and_then(first_id_of), cursor];
        let from = self.newer_than.map(|at| first_id_of(at).unwrap_or(Uuid::max()));
        (before.into_iter().flatten().min(), from)
    }

    /// The filters to search for one after the other: each has at most one status. Their results are
    /// [merged](merge). A search with several statuses would have to read the jobs of all others, too.
    pub(crate) fn searches(&self) -> Vec<ListFilter> {
        let is_possible = |status: &Status| {
            (self.error.is_none() || ListFilter::WITH_ERROR.contains(status))
                && (self.failure.is_none() || ListFilter::WITH_FAILURE.contains(status))
                && ((self.ended_before.is_none() && self.ended_after.is_none())
                    || ListFilter::ENDED.contains(status))
        };
        let mut statuses: Vec<Status> = Status::ALL
            .into_iter()
            .filter(|status| self.statuses.is_empty() || self.statuses.contains(status))
            .filter(is_possible)
            .collect();
        if statuses.len() == Status::ALL.len() {
            statuses.clear();
            return vec![ListFilter { statuses, ..self.clone() }];
        }
        let search_time = self.search_time / u32::try_from(statuses.len().max(1)).unwrap_or(1);
        let search = |status| ListFilter { statuses: vec![status], search_time, ..self.clone() };
        statuses.into_iter().map(search).collect()
    }

    /// The status of one of the [searches](Self::searches).
    pub(crate) fn status(&self) -> Option<Status> {
        self.statuses.first().copied()
    }

    /// Whether the filter needs columns of the request (the row in `jobs`).
    pub(crate) fn needs_request(&self) -> bool {
        self.kind.is_some() || self.queue.is_some() || self.group.is_some() || self.tag.is_some()
    }

    /// Whether this error contains the text of the filter.
    pub(crate) fn has_error(&self, error: Option<&str>) -> bool {
        let Some(wanted) = &self.error else { return true };
        error.is_some_and(|error| error.to_ascii_lowercase().contains(&wanted.to_ascii_lowercase()))
    }

    /// Whether the last failure of a job belongs to the group of the filter.
    fn has_failure(&self, job: &JobRecord) -> bool {
        let Some(wanted) = self.failure else { return true };
        ListFilter::WITH_FAILURE.contains(&job.status)
            && job.last_error.as_ref().is_some_and(|error| Fingerprint::of(&job.kind, error) == wanted)
    }

    /// Whether a job that ended then is in the range of the filter.
    pub(crate) fn has_end(&self, ended: Option<DateTime<Utc>>) -> bool {
        self.ended_before.is_none_or(|before| ended.is_some_and(|at| at < before))
            && self.ended_after.is_none_or(|after| ended.is_some_and(|at| at >= after))
    }

    /// Whether the filter selects a job that a key has led to. The idempotency key is not
    /// compared: it may belong to a request that was merged into the job.
    pub(crate) fn selects(&self, job: &JobRecord) -> bool {
        let (before, from) = self.id_bounds();
        (self.statuses.is_empty() || self.statuses.contains(&job.status))
            && self.kind.as_ref().is_none_or(|kind| job.kind == *kind)
            && self.queue.as_ref().is_none_or(|queue| job.queue == *queue)
            && (self.group.is_none() || job.group == self.group)
            && self.tag.as_ref().is_none_or(|tag| job.tags.contains(tag))
            && (self.error.is_none() || ListFilter::WITH_ERROR.contains(&job.status))
            && self.has_error(job.last_error.as_deref())
            && self.has_failure(job)
            && self.has_end(job.finished_at)
            && (self.unique_key.is_none() || (job.unique_key == self.unique_key && job.finished_at.is_none()))
            && before.is_none_or(|before| job.id.0 < before)
            && from.is_none_or(|from| job.id.0 >= from)
    }

    /// The page of the jobs that a key has led to, newest first.
    pub(crate) fn page_by_key(&self, mut jobs: Vec<JobRecord>) -> Page {
        jobs.retain(|job| self.selects(job));
        jobs.drain(..jobs.len().min(self.offset as usize));
        let has_more = jobs.len() > self.page_size() as usize;
        jobs.truncate(self.page_size() as usize);
        let next = jobs.last().filter(|_| has_more).map(|job| job.id);
        Page { jobs, next, next_offset: 0 }
    }

    /// The key that the list looks for, in the forms in which it may be stored; `None` if it looks for no key. An
    /// idempotency key comes before a unique key.
    pub(crate) fn stored_keys(&self) -> Option<Vec<String>> {
        let key = self.idempotency_key.as_ref().or(self.unique_key.as_ref())?;
        Some(stored_forms(key, self.queue.as_deref()))
    }

    /// Whether the tallies can say that no finished job has this queue and kind, so that a
    /// list of an unknown kind need not read millions of rows.
    pub(crate) fn may_ask_tallies(&self) -> bool {
        let includes_finished =
            !matches!(self.status(), Some(Status::Queued | Status::Retrying | Status::Running));
        includes_finished && (self.kind.is_some() || self.queue.is_some())
    }

    /// The jobs that the list reads completely and sorts, if there are not too many.
    pub(crate) fn live(&self, finished: FinishedJobs) -> Option<Live> {
        match (self.status(), &self.queue) {
            // These are read row by row.
            _ if self.tag.is_some() || self.group.is_some() => None,
            _ if self.error.is_some() || self.failure.is_some() => None,
            (Some(Status::Queued | Status::Retrying), Some(_)) => Some(Live::Waiting),
            (None, Some(_)) if finished != FinishedJobs::Many => Some(Live::WaitingAndRunning),
            (None, None) if finished == FinishedJobs::None => Some(Live::Running),
            _ => None,
        }
    }

    /// The table that the list walks from its newest row until the page is full. `live` are
    /// the jobs that it has read already.
    pub(crate) fn walk(&self, live: Option<Live>, finished: FinishedJobs) -> Option<Walk> {
        match (self.status(), live) {
            (Some(Status::Queued | Status::Retrying), Some(_)) => None,
            (Some(Status::Queued | Status::Retrying), None) | (None, Some(Live::Running)) => {
                Some(Walk::Waiting)
            }
            (Some(Status::Running), _) => Some(Walk::Running),
            (None, None) => Some(Walk::Jobs),
            (None | Some(Status::Succeeded | Status::FailedPermanent | Status::Cancelled), _) => {
                (finished != FinishedJobs::None).then_some(Walk::Finished)
            }
        }
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
            statuses: Vec::new(),
            kind: None,
            queue: None,
            group: None,
            tag: None,
            error: None,
            failure: None,
            idempotency_key: None,
            unique_key: None,
            older_than: None,
            newer_than: None,
            ended_before: None,
            ended_after: None,
            cursor: None,
            offset: 0,
            limit: 50,
            payloads: Payloads::Include,
            search_time: ListFilter::SEARCH_TIME,
        }
    }
}

/// Jobs that a list reads completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Live {
    /// The waiting jobs of a queue, from its index.
    Waiting,
    /// These and the running jobs of the queue.
    WaitingAndRunning,
    /// The running jobs.
    Running,
}

/// Which finished jobs there are, according to the tallies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FinishedJobs {
    /// None has the queue and kind of the filter.
    None,
    /// Some have, and there are few of other queues and kinds.
    Few,
    Many,
}

impl FinishedJobs {
    /// Walking `finished` also reads the request of each row, so walking `jobs` is faster
    /// unless most jobs wait.
    const FEW: i64 = 50_000;

    /// For the numbers of those that match, and of all.
    pub(crate) fn of(matching: i64, all: i64) -> Self {
        match matching {
            ..=0 => FinishedJobs::None,
            _ if all <= FinishedJobs::FEW => FinishedJobs::Few,
            _ => FinishedJobs::Many,
        }
    }
}

/// A table that a list walks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Walk {
    /// `jobs`: all jobs.
    Jobs,
    /// `ready`.
    Waiting,
    /// `running`.
    Running,
    /// `finished`.
    Finished,
}

/// Finds the ids of a page. It walks a table in steps and adds the live jobs that were read
/// before. A live job is newer than the rows that were not walked yet, or it has to wait for
/// a later step: pages are newest first.
pub(crate) struct Search {
    /// How many jobs are needed to fill the page.
    needed: usize,
    before: Option<Uuid>,
    from: Option<Uuid>,
    /// Newest first, like the next one.
    live: Vec<JobId>,
    walked: Vec<JobId>,
    position: Position,
    rows: u32,
    started: Instant,
    search_time: Duration,
}

/// How far a search has walked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Start,
    /// Every row down to this one.
    At(JobId),
    End,
}

/// The next step of a search: examine up to `rows` rows below the id `before`, and stop
/// after `wanted` matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub(crate) before: Option<Uuid>,
    pub(crate) rows: u32,
    pub(crate) wanted: u32,
}

/// What a step found.
#[derive(Debug, Default)]
pub(crate) struct Walked {
    /// The matches, newest first.
    pub(crate) ids: Vec<JobId>,
    /// The last row that was examined; `None` at the end of the table.
    pub(crate) reached: Option<JobId>,
}

/// The ids of a page.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub(crate) ids: Vec<JobId>,
    pub(crate) next: Option<JobId>,
    /// The `offset` of the next page.
    pub(crate) next_offset: u32,
}

impl Search {
    /// The rows of the first step. A page that is full soon should not read many rows.
    const FIRST_ROWS: u32 = 1_000;
    /// The rows of the other steps, however slow or fast the table is read.
    const ROWS: std::ops::RangeInclusive<u32> = 500..=20_000;
    /// How long a step should take, so that the search ends in time.
    const STEP_TIME: Duration = Duration::from_millis(20);

    /// `started` is the time at which the operation started: reading the live jobs belongs to
    /// the search.
    pub(crate) fn new(
        filter: &ListFilter,
        mut live: Vec<JobId>,
        walk: Option<Walk>,
        started: Instant,
    ) -> Self {
        let (before, from) = filter.id_bounds();
        live.sort_unstable_by(|a, b| b.cmp(a));
        Search {
            needed: filter.offset as usize + filter.page_size() as usize,
            before,
            from,
            live,
            walked: Vec::new(),
            position: if walk.is_some() { Position::Start } else { Position::End },
            rows: Search::FIRST_ROWS,
            started,
            search_time: filter.search_time,
        }
    }

    /// The next step; `None` if the page is full, the search has ended or its time is over.
    /// There is always a first step, so that a list that follows `next` ends.
    pub(crate) fn next_step(&self) -> Option<Step> {
        let before = match self.position {
            Position::Start => self.before,
            Position::At(reached) => Some(reached.0),
            Position::End => return None,
        };
        let is_over = self.position != Position::Start && self.started.elapsed() >= self.search_time;
        if is_over || self.found().len() + self.walked.len() >= self.needed {
            return None;
        }
        let wanted = (self.needed - self.walked.len()) as u32;
        Some(Step { before, rows: self.rows, wanted })
    }

    /// Adds the result of a step that took this long.
    pub(crate) fn add_step(&mut self, step: Step, walked: Walked, took: Duration) {
        let is_within = |id: &JobId| self.from.is_none_or(|from| id.0 >= from);
        self.position = walked.reached.filter(is_within).map_or(Position::End, Position::At);
        let found: Vec<JobId> = walked.ids.into_iter().filter(is_within).collect();
        self.walked.extend(found);
        let left = self.search_time.saturating_sub(self.started.elapsed()).min(Search::STEP_TIME);
        let rows = f64::from(step.rows) * left.as_secs_f64() / took.as_secs_f64().max(1e-6);
        self.rows = (rows as u32).clamp(*Search::ROWS.start(), *Search::ROWS.end());
    }

    /// The live jobs that are newer than the rows that were not walked yet.
    fn found(&self) -> &[JobId] {
        match self.position {
            Position::Start => &[],
            Position::At(reached) => &self.live[..self.live.partition_point(|id| *id >= reached)],
            Position::End => &self.live,
        }
    }

    pub(crate) fn finish(self) -> Searched {
        let mut ids = [self.found(), &self.walked].concat();
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let reached = match self.position {
            Position::At(reached) => Some(reached),
            Position::Start | Position::End => None,
        };
        Searched { ids, reached }
    }
}

/// The result of one search.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Searched {
    /// Newest first.
    pub(crate) ids: Vec<JobId>,
    /// Every job down to this one was searched; `None` means all.
    pub(crate) reached: Option<JobId>,
}

/// The page of a filter from the results of its [searches](ListFilter::searches). It contains no job that
/// is older than where one of them stopped: that one may find more jobs in between.
pub(crate) fn merge(filter: &ListFilter, searches: impl IntoIterator<Item = Searched>) -> Found {
    let searches: Vec<Searched> = searches.into_iter().collect();
    let reached = searches.iter().filter_map(|search| search.reached).max();
    let mut ids: Vec<JobId> = searches.into_iter().flat_map(|search| search.ids).collect();
    ids.retain(|id| reached.is_none_or(|reached| *id >= reached));
    ids.sort_unstable_by(|a, b| b.cmp(a));
    let (offset, limit) = (filter.offset as usize, filter.page_size() as usize);
    let is_full = ids.len() >= offset + limit;
    let next_offset = offset.saturating_sub(ids.len()) as u32;
    let ids: Vec<JobId> = ids.into_iter().skip(offset).take(limit).collect();
    let next = if is_full { ids.last().copied() } else { reached };
    Found { ids, next, next_offset }
}

/// One page of a list.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Page {
    /// The jobs, newest first.
    pub jobs: Vec<JobRecord>,
    /// The `cursor` of the next page; `None` on the last page. This page has searched back to the creation
    /// time in its id.
    pub next: Option<JobId>,
    /// The `offset` of the next page: the matches that are still to be skipped, because the
    /// search ended before.
    pub next_offset: u32,
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

    fn id(n: u128) -> JobId {
        JobId(Uuid::from_u128(n))
    }

    fn ids(numbers: &[u128]) -> Vec<JobId> {
        numbers.iter().map(|n| id(*n)).collect()
    }

    /// Walks the rows `1..=newest`, of which those in `matching` match.
    fn searched(filter: &ListFilter, live: &[u128], newest: u128, matching: &[u128]) -> Found {
        let mut search = Search::new(filter, ids(live), Some(Walk::Finished), Instant::now());
        while let Some(step) = search.next_step() {
            let first = step.before.map_or(newest, |before| before.as_u128() - 1);
            let mut walked = Walked::default();
            for row in (1..=first).rev().take(step.rows as usize) {
                walked.reached = (row > 1).then_some(id(row));
                if matching.contains(&row) {
                    walked.ids.push(id(row));
                }
                if walked.ids.len() == step.wanted as usize {
                    walked.reached = Some(id(row));
                    break;
                }
            }
            search.add_step(step, walked, Duration::from_millis(1));
        }
        merge(filter, [search.finish()])
    }

    #[test]
    fn a_search_walks_until_the_page_is_full_and_merges_live_jobs() {
        let filter = ListFilter { limit: 4, search_time: Duration::from_secs(60), ..ListFilter::default() };
        let found = searched(&filter, &[5, 49_000], 50_000, &[2, 3, 40_000]);
        assert_eq!(found, Found { ids: ids(&[49_000, 40_000, 5, 3]), next: Some(id(3)), next_offset: 0 });
        let found = searched(&ListFilter { limit: 5, ..filter.clone() }, &[5, 49_000], 50_000, &[3, 40_000]);
        assert_eq!(found, Found { ids: ids(&[49_000, 40_000, 5, 3]), next: None, next_offset: 0 });
        let skipped = ListFilter { offset: 3, ..filter };
        assert_eq!(searched(&skipped, &[5, 49_000], 50_000, &[3, 40_000]).ids, ids(&[3]));
    }

    #[test]
    fn a_search_without_time_makes_one_step_and_keeps_the_rest_of_the_offset() {
        let filter = ListFilter { offset: 3, search_time: Duration::ZERO, ..ListFilter::default() };
        // The live job 5 is older than the rows that were walked.
        let found = searched(&filter, &[5, 49_990], 50_000, &[2, 3, 49_500]);
        assert_eq!(found, Found { ids: Vec::new(), next: Some(id(49_001)), next_offset: 1 });
    }

    #[test]
    fn merged_searches_end_where_the_first_of_them_ended() {
        let filter = ListFilter { limit: 3, ..ListFilter::default() };
        let stopped = || Searched { ids: ids(&[90, 50]), reached: Some(id(40)) };
        let complete = || Searched { ids: ids(&[80, 39, 2]), reached: None };
        let found = merge(&filter, [stopped(), complete()]);
        assert_eq!(found, Found { ids: ids(&[90, 80, 50]), next: Some(id(50)), next_offset: 0 });
        let five = ListFilter { limit: 5, offset: 1, ..ListFilter::default() };
        let found = merge(&five, [stopped(), complete()]);
        assert_eq!(found, Found { ids: ids(&[80, 50]), next: Some(id(40)), next_offset: 0 });
        let found = merge(&five, [complete()]);
        assert_eq!(found, Found { ids: ids(&[39, 2]), next: None, next_offset: 0 });
        assert_eq!(merge(&filter, []), Found { ids: Vec::new(), next: None, next_offset: 0 });
    }

    #[test]
    fn a_filter_searches_only_statuses_that_are_possible() {
        use Status::*;
        let all = ListFilter::default();
        let statuses = |filter: &ListFilter| -> Vec<Option<Status>> {
            filter.searches().iter().map(ListFilter::status).collect()
        };
        assert_eq!(statuses(&all), [None]);
        let some = ListFilter { statuses: vec![Succeeded, Queued], ..all.clone() };
        assert_eq!(statuses(&some), [Some(Queued), Some(Succeeded)]);
        let each = ListFilter { statuses: Status::ALL.to_vec(), ..all.clone() };
        assert_eq!(statuses(&each), [None]);
        let error = ListFilter { error: Some("timeout".into()), ..all.clone() };
        assert_eq!(statuses(&error), ListFilter::WITH_ERROR.map(Some));
        let ended = ListFilter { ended_after: Some(DateTime::UNIX_EPOCH), ..error.clone() };
        assert_eq!(statuses(&ended), [Some(FailedPermanent), Some(Cancelled)]);
        let none = ListFilter { statuses: vec![Queued], ..error };
        assert_eq!(statuses(&none), []);
    }

    #[test]
    fn a_search_ends_at_its_lower_bound() {
        let filter = ListFilter { search_time: Duration::from_secs(60), ..ListFilter::default() };
        let mut search = Search::new(&filter, Vec::new(), Some(Walk::Jobs), Instant::now());
        search.from = Some(Uuid::from_u128(40));
        let step = search.next_step().unwrap();
        search.add_step(step, Walked { ids: ids(&[41, 39]), reached: Some(id(30)) }, Duration::ZERO);
        assert_eq!(search.next_step(), None);
        assert_eq!(search.finish(), Searched { ids: ids(&[41]), reached: None });
    }

    #[test]
    fn a_list_reads_few_live_jobs_completely_and_asks_the_tallies_before_it_walks() {
        let all = ListFilter::default();
        let queue = ListFilter { queue: Some("mail".into()), ..all.clone() };
        let kind = ListFilter { kind: Some("mail".into()), ..all.clone() };
        let of = |status, filter: &ListFilter| ListFilter { statuses: vec![status], ..filter.clone() };
        let sources = |filter: &ListFilter, finished| {
            let live = filter.live(finished);
            (live, filter.walk(live, finished))
        };
        let [none, few, many] =
            [(0, 9), (1, 50_000), (1, 50_001)].map(|(own, all)| FinishedJobs::of(own, all));
        assert_eq!(sources(&all, many), (None, Some(Walk::Jobs)));
        assert_eq!(sources(&queue, few), (Some(Live::WaitingAndRunning), Some(Walk::Finished)));
        assert_eq!(sources(&queue, many), (None, Some(Walk::Jobs)));
        assert_eq!(sources(&queue, none), (Some(Live::WaitingAndRunning), None));
        assert_eq!(queue.walk(None, none), Some(Walk::Jobs), "too many live jobs");
        assert_eq!(sources(&kind, few), (None, Some(Walk::Jobs)));
        assert_eq!(sources(&kind, none), (Some(Live::Running), Some(Walk::Waiting)));
        assert_eq!(sources(&of(Status::Queued, &queue), many), (Some(Live::Waiting), None));
        assert_eq!(sources(&of(Status::Queued, &kind), many), (None, Some(Walk::Waiting)));
        assert_eq!(sources(&of(Status::Running, &queue), many), (None, Some(Walk::Running)));
        assert_eq!(sources(&of(Status::Cancelled, &queue), many), (None, Some(Walk::Finished)));
        assert_eq!(sources(&of(Status::Cancelled, &queue), none), (None, None));
        let tagged = ListFilter { tag: Some("red".into()), ..queue };
        assert_eq!(sources(&tagged, many), (None, Some(Walk::Jobs)));
        assert!(!all.may_ask_tallies() && kind.may_ask_tallies());
        assert!(!of(Status::Running, &kind).may_ask_tallies());
    }
}
