//! What people and programs see: one job, a page of jobs, counts, and the
//! proof that nothing is out of place.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use uuid::Uuid;

use super::{Done, PostgresStore};
use crate::enqueue::Options;
use crate::error::{Error, Result};
use crate::job::{AttemptEnd, AttemptRecord, JobId, JobRecord, Outcome, Status, WorkerId};
use crate::store::{Ahead, CheckReport, Count, ListFilter, Page, Tallied, Tally, add_up, start_of};

/// What a [`JobRecord`] is made of; `from` gives a row `e(id)` per job.
const JOB: &str = "
    select j.id, j.kind, j.queue, j.priority, j.max_attempts, j.payload::text, j.flags, j.options::text,
           j.idempotency_key, j.unique_key, j.timeout_ms, j.created_at, j.run_at,
           w.run_at, w.since, w.attempt, w.interruptions, w.lease_no,
           r.claimed_at, r.worker, r.attempt, r.interruptions, r.lease_no, r.cancel_requested, r.progress::text,
           f.outcome::text, f.started_at, f.finished_at, f.attempts, f.interruptions, f.lease_no, f.last_error,
           f.result::text,
           a.error, a.ended_at, (
             select b.started_at
               from longshore.attempts b
              where b.job = j.id
              order by b.lease_no desc
              limit 1)
      from {from}
      join longshore.jobs j on j.id = e.id
      left join longshore.ready w on w.id = j.id
      left join longshore.running r on r.id = j.id
      left join longshore.finished f on f.id = j.id
      left join lateral (
             select error, ended_at
               from longshore.attempts
              where job = j.id
                and error is not null
              order by lease_no desc
              limit 1) a on true";

const ATTEMPTS: &str = "
    select attempt, lease_no, worker, started_at, ended_at, what, error
      from longshore.attempts
     where job = $1
     order by lease_no";

impl PostgresStore {
    pub(super) async fn get_on(&self, connection: &mut PgConnection, id: JobId) -> Done<Option<JobRecord>> {
        let text = JOB.replace("{from}", "(select $1::uuid as id) e");
        let query = sqlx::query(AssertSqlSafe(self.0.schema.fill(&text))).bind(id.0);
        let Some(row) = query.fetch_optional(&mut *connection).await? else { return Ok(None) };
        let mut job = record(&row)?;
        let rows = sqlx::query(self.sql(ATTEMPTS)).bind(id.0).fetch_all(connection).await?;
        job.errors = rows.iter().map(attempt).collect::<Done<_>>()?;
        Ok(Some(job))
    }

    pub(super) async fn list_on(&self, connection: &mut PgConnection, filter: &ListFilter) -> Done<Page> {
        let driver = driver(filter);
        let (before, from) = filter.id_bounds();
        // What was asked is read for those filters only that need it, and row by row:
        // the planner, who cannot know how soon a page is full, would rather read all
        // jobs once.
        let (asked, fits) = match filter.names_what_was_asked() {
            true => (
                "cross join lateral (
                   select kind, queue, options
                     from longshore.jobs
                    where id = e.id
                   offset 0) j",
                "($4::text is null or j.kind = $4)
                 and ($5::text is null or j.queue = $5)
                 and ($6::text is null or case json_typeof(j.options -> 'tags') when 'array' then exists (
                       select 1
                         from json_array_elements_text(j.options -> 'tags') as tag
                        where tag = $6) end)",
            ),
            false => ("", "$4::text is null and $5::text is null and $6::text is null"),
        };
        // The page is chosen before anything is joined to it. Where it ends is not
        // told to the walk: of a range with two ends the planner believes that it is
        // short, and reads it whole.
        let page = format!(
            "(select e.id
                from {driver}
                {asked}
               where {fits}
                 and ($9::uuid is null or e.id >= $9)
               order by e.id desc
              offset $7
               limit $8) e"
        );
        let text = JOB.replace("{from}", &page) + " order by e.id desc";
        let rows = sqlx::query(AssertSqlSafe(self.0.schema.fill(&text)))
            .bind(before)
            .bind(i64::from(filter.most_examined()))
            .bind(filter.unique_key.as_ref().or(filter.idempotency_key.as_ref()))
            .bind(&filter.kind)
            .bind(&filter.queue)
            .bind(&filter.tag)
            .bind(i64::from(filter.offset))
            .bind(i64::from(filter.page_size()))
            .bind(from)
            .fetch_all(&mut *connection)
            .await?;
        let mut jobs: Vec<JobRecord> = rows.iter().map(record).collect::<Done<_>>()?;
        if filter.unique_key.is_some() || filter.idempotency_key.is_some() {
            // A key names one job at most; the other conditions are tested on it.
            jobs.retain(|job| {
                filter.status.is_none_or(|status| job.status == status)
                    && (filter.idempotency_key.is_none() || job.idempotency_key == filter.idempotency_key)
                    && (filter.unique_key.is_none() || job.unique_key == filter.unique_key)
            });
            return Ok(Page { jobs, next: None });
        }
        if jobs.len() == filter.page_size() as usize {
            let next = jobs.last().map(|job| job.id);
            return Ok(Page { jobs, next });
        }
        // A short page: the end, or the bound on rows examined?
        let text = format!("select e.id from {driver} offset $2 - 1 limit 1");
        let next: Option<Uuid> = sqlx::query_scalar(AssertSqlSafe(self.0.schema.fill(&text)))
            .bind(before)
            .bind(i64::from(filter.most_examined()))
            .bind(filter.unique_key.as_ref().or(filter.idempotency_key.as_ref()))
            .fetch_optional(connection)
            .await?;
        let next = next.filter(|next| from.is_none_or(|from| *next >= from));
        Ok(Page { jobs, next: next.map(JobId) })
    }
}

/// The rows a list walks, newest first and bounded: those of the one table
/// that holds jobs of the wanted status. `$1` is the cursor, `$2` the bound,
/// `$3` a key.
fn driver(filter: &ListFilter) -> &'static str {
    if filter.unique_key.is_some() {
        return "(select job as id from longshore.keys
                  where key = $3 and job < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') limit $2) e";
    }
    if filter.idempotency_key.is_some() {
        return "(select id from longshore.jobs
                  where idempotency_key = $3 and id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') limit $2) e";
    }
    match filter.status {
        None => {
            "(select id from longshore.jobs
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
               order by id desc limit $2) e"
        }
        Some(Status::Queued) => {
            "(select id from longshore.ready
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
                 and attempt = 0 and interruptions = 0
               order by id desc limit $2) e"
        }
        Some(Status::Retrying) => {
            "(select id from longshore.ready
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
                 and (attempt > 0 or interruptions > 0)
               order by id desc limit $2) e"
        }
        Some(Status::Running) => {
            "(select id from longshore.running
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
               order by id desc limit $2) e"
        }
        Some(Status::Succeeded) => {
            "(select id from longshore.finished
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
                 and outcome = 'succeeded'
               order by id desc limit $2) e"
        }
        Some(Status::FailedPermanent) => {
            "(select id from longshore.finished
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
                 and outcome = 'failed_permanent'
               order by id desc limit $2) e"
        }
        Some(Status::Cancelled) => {
            "(select id from longshore.finished
               where id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff') and $3::text is null
                 and outcome = 'cancelled'
               order by id desc limit $2) e"
        }
    }
}

fn record(row: &PgRow) -> Done<JobRecord> {
    // What cannot be read is left out; the rest of the job is still worth seeing.
    let options = Options::from_stored(row.try_get(7)?).unwrap_or_default();
    let created_at = row.try_get(11)?;
    let mut job = JobRecord {
        id: JobId(row.try_get(0)?),
        kind: row.try_get(1)?,
        queue: row.try_get(2)?,
        status: Status::Queued,
        priority: row.try_get(3)?,
        attempts: 0,
        max_attempts: row.try_get::<i16, _>(4)? as u16,
        last_error: row.try_get(33)?,
        last_failed_at: row.try_get(34)?,
        payload: raw(row.try_get(5)?)?,
        result: None,
        run_at: row.try_get(12)?,
        locked_at: None,
        locked_by: None,
        cancel_requested: false,
        idempotency_key: row.try_get(8)?,
        unique_key: row.try_get(9)?,
        tags: options.tags,
        flags: row
            .try_get::<Option<Vec<Option<String>>>, _>(6)?
            .unwrap_or_default()
            .into_iter()
            .flatten()
            .collect(),
        context: options.context,
        metadata: options.metadata,
        progress: None,
        timeout: row.try_get::<Option<i64>, _>(10)?.map(|ms| Duration::from_millis(ms as u64)),
        retry: options.retry,
        interruptions: 0,
        lease_no: 0,
        created_at,
        updated_at: created_at,
        started_at: row.try_get(35)?,
        finished_at: None,
        errors: Vec::new(),
    };
    let small = |i: usize| row.try_get::<i16, _>(i).map(|n| n as u16);
    if let Some(run_at) = row.try_get(13)? {
        job.run_at = run_at;
        job.updated_at = row.try_get(14)?;
        (job.attempts, job.interruptions) = (small(15)?, small(16)?);
        job.lease_no = row.try_get(17)?;
        if job.attempts > 0 || job.interruptions > 0 {
            job.status = Status::Retrying;
        }
    } else if let Some(claimed_at) = row.try_get(18)? {
        job.status = Status::Running;
        job.updated_at = claimed_at;
        job.started_at = Some(claimed_at);
        job.locked_at = Some(claimed_at);
        job.locked_by = Some(WorkerId(row.try_get(19)?));
        (job.attempts, job.interruptions) = (small(20)?, small(21)?);
        job.lease_no = row.try_get(22)?;
        job.cancel_requested = row.try_get(23)?;
        job.progress = row.try_get::<Option<String>, _>(24)?.map(raw).transpose()?;
    } else if let Some(outcome) = row.try_get::<Option<&str>, _>(25)? {
        job.status = Outcome::from_stored(outcome)?.status();
        job.started_at = row.try_get::<Option<_>, _>(26)?.or(job.started_at);
        job.updated_at = row.try_get(27)?;
        job.finished_at = Some(job.updated_at);
        (job.attempts, job.interruptions) = (small(28)?, small(29)?);
        job.lease_no = row.try_get(30)?;
        job.last_error = row.try_get::<Option<_>, _>(31)?.or(job.last_error);
        job.result = row.try_get::<Option<String>, _>(32)?.map(raw).transpose()?;
    } else {
        return Err(Error::internal(format!("job {} is in no table; run `longshore check`", job.id)).into());
    }
    Ok(job)
}

fn attempt(row: &PgRow) -> Done<AttemptRecord> {
    Ok(AttemptRecord {
        attempt: row.try_get::<i16, _>(0)? as u16,
        lease_no: row.try_get(1)?,
        worker: row.try_get::<Option<Uuid>, _>(2)?.map(WorkerId),
        started_at: row.try_get(3)?,
        ended_at: row.try_get(4)?,
        what: AttemptEnd::from_stored(row.try_get(5)?)?,
        error: row.try_get(6)?,
    })
}

pub(super) fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text)
        .map_err(|error| Error::internal("the database holds text that is not JSON").with_source(error))
}

// ---- counts -------------------------------------------------------------

const COUNT_FINISHED: &str = "
    select outcome::text, queue, kind, sum(kept)::int8
      from longshore.tallies
     group by outcome, queue, kind
    having sum(kept) > 0";

const COUNT_RUNNING: &str = "
    select queue, kind, count(*)
      from longshore.running
     group by queue, kind";

/// Counted up to a bound; past it, the sample is scaled to what the planner
/// believes the table holds.
const COUNT_WAITING: &str = "
    select s.queue, s.kind, s.fresh, count(*), (
             select greatest(c.reltuples, 0)::int8
               from pg_class c
              where c.oid = $2::regclass)
      from (select queue, kind, attempt = 0 and interruptions = 0 as fresh
              from longshore.ready
             limit $1) as s
     group by s.queue, s.kind, s.fresh";

const COUNT_BOUND: i64 = 50_000;

impl PostgresStore {
    pub(super) async fn counts_on(&self, connection: &mut PgConnection) -> Done<Vec<Count>> {
        let mut counts = Vec::new();
        for row in sqlx::query(self.sql(COUNT_FINISHED)).fetch_all(&mut *connection).await? {
            let status = Outcome::from_stored(row.try_get(0)?)?.status();
            let jobs = row.try_get::<i64, _>(3)? as u64;
            counts.push(Count {
                status,
                queue: row.try_get(1)?,
                kind: row.try_get(2)?,
                jobs,
                estimated: false,
            });
        }
        for row in sqlx::query(self.sql(COUNT_RUNNING)).fetch_all(&mut *connection).await? {
            let jobs = row.try_get::<i64, _>(2)? as u64;
            let (queue, kind) = (row.try_get(0)?, row.try_get(1)?);
            counts.push(Count { status: Status::Running, queue, kind, jobs, estimated: false });
        }
        let waiting = sqlx::query(self.sql(COUNT_WAITING))
            .bind(COUNT_BOUND + 1)
            .bind(self.0.schema.fill("longshore.ready"))
            .fetch_all(connection)
            .await?;
        let mut seen = 0i64;
        for row in &waiting {
            seen += row.try_get::<i64, _>(3)?;
        }
        for row in &waiting {
            let estimated = seen > COUNT_BOUND;
            let believed = row.try_get::<i64, _>(4)?.max(seen);
            let sampled = row.try_get::<i64, _>(3)?;
            let jobs = if estimated {
                (sampled as f64 / seen as f64 * believed as f64) as u64
            } else {
                sampled as u64
            };
            let status = if row.try_get(2)? { Status::Queued } else { Status::Retrying };
            counts.push(Count { status, queue: row.try_get(0)?, kind: row.try_get(1)?, jobs, estimated });
        }
        counts.sort_by(|a, b| (a.status, &a.queue, &a.kind).cmp(&(b.status, &b.queue, &b.kind)));
        Ok(counts)
    }
}

// ---- overdue ------------------------------------------------------------

/// Which (queue, priority) have waiting jobs, and the first of each: one index
/// probe a place, as claims discover them.
const OVERDUE: &str = "
    with recursive waiting_queues as (
      (select queue
         from longshore.ready
        where interruptions = 0
        order by queue
        limit 1)
      union all
      select (
               select r.queue
                 from longshore.ready r
                where r.interruptions = 0
                  and r.queue > w.queue
                order by r.queue
                limit 1)
        from waiting_queues w
       where w.queue is not null),
    places as (
      select w.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = w.queue
                  and r.interruptions = 0
                order by r.priority desc
                limit 1) as priority
        from waiting_queues w
       where w.queue is not null
      union all
      select p.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = p.queue
                  and r.interruptions = 0
                  and r.priority < p.priority
                order by r.priority desc
                limit 1)
        from places p
       where p.priority is not null),
    firsts as (
      select p.queue, longshore.clock() - (
               select r.run_at
                 from longshore.ready r
                where r.queue = p.queue
                  and r.priority = p.priority
                  and r.interruptions = 0
                order by r.run_at
                limit 1) as due_for
        from places p
       where p.priority is not null)
    select queue, extract(epoch from max(due_for))::float8
      from firsts
     where due_for >= interval '0'
     group by queue
     order by queue";

impl PostgresStore {
    pub(super) async fn overdue_on(&self, connection: &mut PgConnection) -> Done<Vec<(String, Duration)>> {
        let rows = sqlx::query(self.sql(OVERDUE)).fetch_all(connection).await?;
        let rows = rows.iter().map(|row| {
            let seconds = row.try_get::<f64, _>(1)?.max(0.0);
            Ok((row.try_get(0)?, Duration::from_secs_f64(seconds)))
        });
        rows.collect()
    }
}

// ---- ahead --------------------------------------------------------------

/// In the order of a claim. Jobs that were interrupted before wait in an index of
/// their own. Each part is read in the order of its index, which the planner would
/// else read whole into a bitmap, and all together no further than `$2`: those that
/// do not count must cost no more than those that do.
const AHEAD: &str = "
    select counted.jobs, counted.looked_at
      from longshore.ready m
     cross join lateral (
             select count(*) filter (
                      where ($3::text[] is null or earlier.kind = any($3::text[]))
                        and earlier.run_at <= greatest((select longshore.clock()), m.run_at)) as jobs,
                    count(*) as looked_at
               from (select *
                       from ((select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority > m.priority
                                 and r.interruptions = 0
                               order by r.priority desc, r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority = m.priority
                                 and (r.run_at, r.id) < (m.run_at, m.id)
                                 and r.interruptions = 0
                               order by r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority > m.priority
                                 and r.interruptions > 0
                               order by r.priority desc, r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority = m.priority
                                 and (r.run_at, r.id) < (m.run_at, m.id)
                                 and r.interruptions > 0
                               order by r.run_at, r.id
                               limit $2)) as part
                      limit $2) as earlier) as counted
     where m.id = $1";

impl PostgresStore {
    pub(super) async fn ahead_on(
        &self,
        connection: &mut PgConnection,
        id: JobId,
        kinds: Option<&[String]>,
        most: u32,
    ) -> Done<Option<Ahead>> {
        let counted: Option<(i64, i64)> = sqlx::query_as(self.sql(AHEAD))
            .bind(id.0)
            .bind(i64::from(most))
            .bind(kinds)
            .fetch_optional(connection)
            .await?;
        Ok(counted
            .map(|(jobs, looked_at)| Ahead { jobs: jobs as u32, or_more: looked_at == i64::from(most) }))
    }
}

// ---- tallied ------------------------------------------------------------

const TALLIED: &str = "
    select minute, queue, kind, outcome::text, run_bucket, sum(ended)::int8
      from longshore.tallies
     where ended > 0
       and ((level in (0, 1) and minute >= $1)
         or (level = 2 and minute >= $2))   -- an hour, added up
     group by minute, queue, kind, outcome, run_bucket";

impl PostgresStore {
    pub(super) async fn tallied_on(
        &self,
        connection: &mut PgConnection,
        since: DateTime<Utc>,
    ) -> Done<Vec<Tallied>> {
        let rows = sqlx::query(self.sql(TALLIED))
            .bind(start_of(60, since))
            .bind(start_of(60 * 60, since))
            .fetch_all(connection)
            .await?;
        let tally = |row: &PgRow| -> Done<Tally> {
            Ok(Tally {
                minute: row.try_get(0)?,
                queue: row.try_get(1)?,
                kind: row.try_get(2)?,
                outcome: Outcome::from_stored(row.try_get(3)?)?,
                run_bucket: row.try_get::<i16, _>(4)?.into(),
                ended: row.try_get(5)?,
            })
        };
        Ok(add_up(rows.iter().map(tally).collect::<Done<Vec<_>>>()?))
    }
}

// ---- check --------------------------------------------------------------

/// Each finds rows that must not exist and says so in a sentence.
const CHECKS: &[&str] = &[
    "select format('job %s is in %s places, not one', j.id,
                   (w.id is not null)::int + (r.id is not null)::int + (f.id is not null)::int)
       from longshore.jobs j
       left join longshore.ready w on w.id = j.id
       left join longshore.running r on r.id = j.id
       left join longshore.finished f on f.id = j.id
      where (w.id is not null)::int + (r.id is not null)::int + (f.id is not null)::int <> 1
      limit 100",
    "select format('job %s is in %s but nothing says what was asked', p.id, p.place)
       from (select id, 'ready' as place from longshore.ready
             union all
             select id, 'running' from longshore.running
             union all
             select id, 'finished' from longshore.finished) p
      where not exists (select 1 from longshore.jobs j where j.id = p.id)
      limit 100",
    "select format('waiting job %s differs from what was asked in its queue, kind, priority or attempts', w.id)
       from longshore.ready w
       join longshore.jobs j on j.id = w.id
      where (w.queue, w.kind, w.priority, w.max_attempts, w.keyed)
            is distinct from (j.queue, j.kind, j.priority, j.max_attempts, j.unique_key is not null)
      limit 100",
    "select format('unique key `%s` belongs to job %s, which is not live or has another key', k.key, k.job)
       from longshore.keys k
      where not exists (
              select 1
                from longshore.jobs j
                left join longshore.ready w on w.id = j.id
                left join longshore.running r on r.id = j.id and not r.superseded
               where j.id = k.job
                 and j.unique_key = k.key
                 and (w.id is not null or r.id is not null))
      limit 100",
    "select format('live job %s does not own its unique key', j.id)
       from longshore.jobs j
       left join longshore.ready w on w.id = j.id
       left join longshore.running r on r.id = j.id and not r.superseded
      where j.unique_key is not null
        and (w.id is not null or r.id is not null)
        and not exists (select 1 from longshore.keys k where k.job = j.id and k.key = j.unique_key)
      limit 100",
    "select format('tallies say %s %s jobs of kind `%s` in queue `%s`, the rows say %s',
                   coalesce(t.n, 0), coalesce(t.outcome, f.outcome), coalesce(t.kind, f.kind),
                   coalesce(t.queue, f.queue), coalesce(f.n, 0))
       from (select outcome, queue, kind, sum(kept) as n
               from longshore.tallies
              group by outcome, queue, kind) t
       full join (select e.outcome, j.queue, j.kind, count(*) as n
                    from longshore.finished e
                    join longshore.jobs j on j.id = e.id
                   group by e.outcome, j.queue, j.kind) f
         on f.outcome = t.outcome
        and f.queue = t.queue
        and f.kind = t.kind
      where coalesce(t.n, 0) <> coalesce(f.n, 0)
      limit 100",
];

impl PostgresStore {
    pub(super) async fn check_on(&self, connection: &mut PgConnection) -> Done<CheckReport> {
        let mut tx = connection.begin().await?;
        // One snapshot for all, or a moving job would be seen twice.
        sqlx::query("set transaction isolation level repeatable read, read only").execute(&mut *tx).await?;
        let jobs: i64 =
            sqlx::query_scalar(self.sql("select count(*) from longshore.jobs")).fetch_one(&mut *tx).await?;
        let mut report = CheckReport { jobs: jobs as u64, problems: Vec::new() };
        for check in CHECKS {
            let found: Vec<String> = sqlx::query_scalar(self.sql(check)).fetch_all(&mut *tx).await?;
            report.problems.extend(found);
        }
        tx.commit().await?;
        Ok(report)
    }
}
