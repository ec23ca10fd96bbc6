//! Reading jobs: one job with its history, a page of jobs, and the newest jobs
//! without their payloads.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::error::{Error, Result};
use crate::job::{AttemptEnd, AttemptRecord, FlowId, JobId, JobRecord, Outcome, Status, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::keys::as_written;
use crate::store::operate::in_no_table;
use crate::store::{
    FinishedJobs, Found, Glance, ListFilter, Live, MAX_HISTORY, Page, PageBuilder, Payloads, Search,
    Searched, Step, Walk, Walked, merge,
};

/// The columns of a [`JobRecord`]; `{from}` is a row `e(id)` per job. A column in braces
/// can be large: see [`whole`] and [`small_only`].
const JOB: &str = "
    select j.id, j.kind, j.queue, j.priority, j.max_attempts, {j.payload}, j.flags, {j.options},
           j.idempotency_key, j.unique_key, j.timeout_ms, j.created_at, j.run_at,
           w.run_at, w.since, w.attempt, w.interruptions, w.lease_no,
           r.claimed_at, r.worker, r.attempt, r.interruptions, r.lease_no, r.cancel_requested, {r.progress},
           f.outcome::text, f.started_at, f.finished_at, f.attempts, f.interruptions, f.lease_no, {f.last_error},
           {f.result},
           {a.error}, a.ended_at, (
             select b.started_at
               from longshore.attempts b
              where b.job = j.id
              order by b.lease_no desc
              limit 1), {is_large}, (
             select h.name
               from longshore.workers h
              where h.id = r.worker), j.grp, j.flow, j.task
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

/// The columns of [`JOB`] that can be large.
const LARGE_COLUMNS: [&str; 6] =
    ["j.payload", "j.options", "r.progress", "f.result", "f.last_error", "a.error"];

/// The columns that [`Payloads::Omit`] leaves out.
const PAYLOADS: [&str; 2] = ["j.payload", "f.result"];

/// [`JOB`] with all columns.
fn whole(payloads: Payloads) -> String {
    let mut text = JOB.replace("{is_large}", "false");
    for column in LARGE_COLUMNS {
        let is_read = payloads == Payloads::Include || !PAYLOADS.contains(&column);
        let value = if is_read { format!("{column}::text") } else { "null::text".into() };
        text = text.replace(&format!("{{{column}}}"), &value);
    }
    text
}

/// [`JOB`] without large values, and whether there are any. A value is small if it is
/// stored in the row as it is: neither its size nor its contents have to be fetched from
/// elsewhere.
fn small_only(payloads: Payloads) -> String {
    let mut text = JOB.to_owned();
    let mut is_large = Vec::new();
    for column in LARGE_COLUMNS {
        let is_read = payloads == Payloads::Include || !PAYLOADS.contains(&column);
        let small =
            format!("pg_column_size({column}) <= {MAX_SMALL} and pg_column_compression({column}) is null");
        let value = if is_read {
            is_large.push(format!("not coalesce({small}, true)"));
            format!("case when {small} then {column}::text end")
        } else {
            "null::text".into()
        };
        text = text.replace(&format!("{{{column}}}"), &value);
    }
    text.replace("{is_large}", &is_large.join(" or "))
}

/// The maximum size of a small value in bytes: most payloads are smaller, and 200 jobs
/// with six such values are not a large page.
const MAX_SMALL: u32 = 2000;

pub(super) async fn get(tx: &mut Tx<'_>, id: JobId) -> Sql<Option<JobRecord>> {
    let text = whole(Payloads::Include).replace("{from}", "(select $1::uuid as id) e");
    let query = sqlx::query(AssertSqlSafe(tx.fill(&text))).bind(id.0);
    let Some(row) = query.fetch_optional(&mut *tx.connection).await? else { return Ok(None) };
    let mut job = record(&row)?;
    (job.errors, job.errors_omitted) = history(tx, id).await?;
    Ok(Some(job))
}

fn record(row: &PgRow) -> Sql<JobRecord> {
    // Options that cannot be read are left out, so that the rest of the job is shown.
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
        payload: row.try_get::<Option<String>, _>(5)?.map_or_else(|| Ok(RawValue::NULL.to_owned()), raw)?,
        result: None,
        run_at: row.try_get(12)?,
        locked_at: None,
        locked_by: None,
        locked_by_name: None,
        cancel_requested: false,
        idempotency_key: row.try_get::<Option<String>, _>(8)?.map(as_written),
        unique_key: row.try_get::<Option<String>, _>(9)?.map(as_written),
        group: row.try_get(38)?,
        flow: row.try_get::<Option<Uuid>, _>(39)?.map(FlowId),
        task: row.try_get(40)?,
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
        errors_omitted: 0,
    };
    let number = |i: usize| row.try_get::<i16, _>(i).map(|n| n as u16);
    if let Some(run_at) = row.try_get(13)? {
        job.run_at = run_at;
        job.updated_at = row.try_get(14)?;
        (job.attempts, job.interruptions) = (number(15)?, number(16)?);
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
        job.locked_by_name = row.try_get(37)?;
        (job.attempts, job.interruptions) = (number(20)?, number(21)?);
        job.lease_no = row.try_get(22)?;
        job.cancel_requested = row.try_get(23)?;
        job.progress = row.try_get::<Option<String>, _>(24)?.map(raw).transpose()?;
    } else if let Some(outcome) = row.try_get::<Option<&str>, _>(25)? {
        job.status = Outcome::from_stored(outcome)?.status();
        job.cancel_requested = job.status == Status::Cancelled;
        job.started_at = row.try_get::<Option<_>, _>(26)?.or(job.started_at);
        job.updated_at = row.try_get(27)?;
        job.finished_at = Some(job.updated_at);
        (job.attempts, job.interruptions) = (number(28)?, number(29)?);
        job.lease_no = row.try_get(30)?;
        job.last_error = row.try_get::<Option<_>, _>(31)?.or(job.last_error);
        job.result = row.try_get::<Option<String>, _>(32)?.map(raw).transpose()?;
    } else {
        return Err(in_no_table(job.id).into());
    }
    Ok(job)
}

const ATTEMPTS: &str = "
    select attempt, lease_no, worker, started_at, ended_at, what, error, omitted, count(*) over () as stored
      from longshore.attempts
     where job = $1
     order by lease_no desc
     limit $2";

/// The newest attempts, and how many older ones there were.
async fn history(tx: &mut Tx<'_>, id: JobId) -> Sql<(Vec<AttemptRecord>, u32)> {
    let newest = sqlx::query(tx.sql(ATTEMPTS)).bind(id.0).bind(i64::from(MAX_HISTORY) + 1);
    let rows = newest.fetch_all(&mut *tx.connection).await?;
    let mut omitted = 0;
    for row in &rows {
        let removed = row.try_get::<Option<i32>, _>("omitted")?.unwrap_or(0);
        omitted = omitted.max(i64::from(removed) + row.try_get::<i64, _>("stored")? - rows.len() as i64);
    }
    let attempt = |row: &PgRow| -> Sql<AttemptRecord> {
        Ok(AttemptRecord {
            attempt: row.try_get::<i16, _>("attempt")? as u16,
            lease_no: row.try_get("lease_no")?,
            worker: row.try_get::<Option<Uuid>, _>("worker")?.map(WorkerId),
            started_at: row.try_get("started_at")?,
            ended_at: row.try_get("ended_at")?,
            what: AttemptEnd::from_stored(row.try_get("what")?)?,
            error: row.try_get("error")?,
        })
    };
    Ok((rows.iter().rev().map(attempt).collect::<Sql<_>>()?, u32::try_from(omitted).unwrap_or(u32::MAX)))
}

pub(super) async fn list(tx: &mut Tx<'_>, filter: &ListFilter) -> Sql<Page> {
    // A job that moves to another table meanwhile is listed once, with the status that
    // matched.
    let mut transaction = tx.begin_snapshot().await?;
    let tx = &mut transaction.tx();
    let keys = filter.stored_keys();
    let found = match &keys {
        Some(keys) => by_key(tx, filter, keys).await?,
        None => {
            let mut searched = Vec::new();
            for filter in filter.searches() {
                searched.push(search(tx, &filter).await?);
            }
            merge(filter, searched)
        }
    };
    let ids: Vec<Uuid> = found.ids.iter().map(|id| id.0).collect();
    let text =
        small_only(filter.payloads).replace("{from}", "unnest($1::uuid[]) as e(id)") + " order by e.id desc";
    let rows = sqlx::query(AssertSqlSafe(tx.fill(&text))).bind(ids).fetch_all(&mut *tx.connection).await?;
    let (jobs, end) = bounded(tx, &rows, filter.payloads).await?;
    transaction.commit().await?;
    let page = match keys {
        Some(_) => filter.page_by_key(jobs),
        None => Page { jobs, next: found.next, next_offset: found.next_offset },
    };
    Ok(match end {
        Some(end) => Page { next: Some(end), next_offset: 0, ..page },
        None => page,
    })
}

const BY_IDEMPOTENCY_KEY: &str = "
    select id
      from longshore.jobs
     where idempotency_key = any($1::text[])
     union all
    select job
      from longshore.merged_requests
     where idempotency_key = any($1::text[])";

const BY_UNIQUE_KEY: &str = "
    select job
      from longshore.keys
     where key = any($1::text[])";

/// The jobs of a key. The other conditions are tested on their records.
async fn by_key(tx: &mut Tx<'_>, filter: &ListFilter, keys: &[String]) -> Sql<Found> {
    let text = if filter.idempotency_key.is_some() { BY_IDEMPOTENCY_KEY } else { BY_UNIQUE_KEY };
    let ids: Vec<Uuid> = sqlx::query_scalar(tx.sql(text)).bind(keys).fetch_all(&mut *tx.connection).await?;
    Ok(Found { ids: ids.into_iter().map(JobId).collect(), next: None, next_offset: 0 })
}

async fn search(tx: &mut Tx<'_>, filter: &ListFilter) -> Sql<Searched> {
    let started = Instant::now();
    let finished =
        if filter.may_ask_tallies() { finished_jobs(tx, filter).await? } else { FinishedJobs::Many };
    let live = filter.live(finished);
    let live_ids = match live {
        Some(live) => live_jobs(tx, filter, live).await?,
        None => None,
    };
    let walk = filter.walk(live.filter(|_| live_ids.is_some()), finished);
    let mut search = Search::new(filter, live_ids.unwrap_or_default(), walk, started);
    while let (Some(walk), Some(step)) = (walk, search.next_step()) {
        let step_started = Instant::now();
        let walked = walk_step(tx, filter, walk, step).await?;
        search.add_step(step, walked, step_started.elapsed());
    }
    Ok(search.finish())
}

const COUNT_KEPT: &str = "
    select coalesce(sum(kept) filter (
             where ($1::text is null or queue = $1)
               and ($2::text is null or kind = $2)
               and ($3::text is null or outcome::text = $3)), 0)::int8,
           coalesce(sum(kept), 0)::int8
      from longshore.tallies";

async fn finished_jobs(tx: &mut Tx<'_>, filter: &ListFilter) -> Sql<FinishedJobs> {
    let (matching, all): (i64, i64) = sqlx::query_as(tx.sql(COUNT_KEPT))
        .bind(&filter.queue)
        .bind(&filter.kind)
        .bind(filter.status().map(Status::as_str))
        .fetch_one(&mut *tx.connection)
        .await?;
    Ok(FinishedJobs::of(matching, all))
}

/// The waiting jobs of the queue `$1`, read in the order of the indexes.
const WAITING_OF_QUEUE: &str = "
      (select id, kind, attempt = 0 as is_fresh
         from longshore.ready
        where queue = $1
          and interruptions = 0
          and grp is null
        order by priority desc, run_at, id
        limit $2)
      union all
      (select id, kind, false
         from longshore.ready
        where queue = $1
          and interruptions > 0
          and grp is null
        order by priority desc, run_at, id
        limit $2)
      union all
      (select id, kind, attempt = 0 and interruptions = 0
         from longshore.ready
        where queue = $1
          and grp is not null
        order by grp, priority desc, run_at, id
        limit $2)";

/// The running jobs of the queue `$1`, or of any queue.
const RUNNING_OF_QUEUE: &str = "
      (select id, kind, false as is_fresh
         from longshore.running
        where $1::text is null
           or queue = $1
        limit $2)";

/// Counts the jobs of `{live}`, and returns the newest that match.
const NEWEST_LIVE: &str = "
    with live as materialized ({live})
    select count(*), array(
             select id
               from live
              where id < coalesce($3, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
                and id >= coalesce($4, '00000000-0000-0000-0000-000000000000')
                and ($5::text is null or kind = $5)
                and ($6::bool is null or is_fresh = $6)
              order by id desc
              limit $7)
      from live";

/// The live jobs that match; `None` if there are too many to sort them.
async fn live_jobs(tx: &mut Tx<'_>, filter: &ListFilter, live: Live) -> Sql<Option<Vec<JobId>>> {
    let parts = match live {
        Live::Waiting => WAITING_OF_QUEUE.to_owned(),
        Live::Running => RUNNING_OF_QUEUE.to_owned(),
        Live::WaitingAndRunning => format!("{WAITING_OF_QUEUE} union all {RUNNING_OF_QUEUE}"),
    };
    let (before, from) = filter.id_bounds();
    let (count, ids): (i64, Vec<Uuid>) =
        sqlx::query_as(AssertSqlSafe(tx.fill(&NEWEST_LIVE.replace("{live}", &parts))))
            .bind(&filter.queue)
            .bind(i64::from(ListFilter::MAX_SORTED) + 1)
            .bind(before)
            .bind(from)
            .bind(&filter.kind)
            .bind(filter.status().map(|status| status == Status::Queued))
            .bind(i64::from(filter.offset) + i64::from(filter.page_size()))
            .fetch_one(&mut *tx.connection)
            .await?;
    let is_complete = count <= i64::from(ListFilter::MAX_SORTED);
    Ok(is_complete.then(|| ids.into_iter().map(JobId).collect()))
}

/// Up to `$2` rows of `{rows}` below the id `$1`, newest first.
const ROWS: &str = "
           ({rows} id < coalesce($1, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
             order by id desc
             limit $2) as c";

/// Returns up to `$3` of these rows that match.
const WALK: &str = "
    select c.id
      from {rows}
           {request}
     where {matches}
     order by c.id desc
     limit $3";

/// Returns the last of these rows.
const LAST_ROW: &str = "
    select c.id
      from {rows}
     order by c.id desc
    offset $2 - 1";

/// The request of a row, for tables that do not have what the filter needs. Read row by row
/// (`offset 0`): the planner does not know how soon a page is full and would read all jobs
/// instead.
const REQUEST: &str = "
           cross join lateral (
             select kind, queue, grp, options
               from longshore.jobs
              where id = c.id
             offset 0) as j";

async fn walk_step(tx: &mut Tx<'_>, filter: &ListFilter, walk: Walk, step: Step) -> Sql<Walked> {
    let (walk, last_row) = walk_statement(filter, walk);
    let ids: Vec<Uuid> = sqlx::query_scalar(AssertSqlSafe(tx.fill(&walk)))
        .bind(step.before)
        .bind(i64::from(step.rows))
        .bind(i64::from(step.wanted))
        .bind(&filter.kind)
        .bind(&filter.queue)
        .bind(&filter.tag)
        .bind(&filter.group)
        .bind(filter.error.as_ref().map(|error| error.to_ascii_lowercase()))
        .bind(filter.ended_after)
        .bind(filter.ended_before)
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut walked = Walked { ids: ids.into_iter().map(JobId).collect(), reached: None };
    if walked.ids.len() == step.wanted as usize {
        walked.reached = walked.ids.last().copied();
    } else {
        let last: Option<Uuid> = sqlx::query_scalar(AssertSqlSafe(tx.fill(&last_row)))
            .bind(step.before)
            .bind(i64::from(step.rows))
            .fetch_optional(&mut *tx.connection)
            .await?;
        walked.reached = last.map(JobId);
    }
    Ok(walked)
}

/// The statement of a step, and the one that finds its last row.
fn walk_statement(filter: &ListFilter, walk: Walk) -> (String, String) {
    let (rows, status) = match (walk, filter.status()) {
        (Walk::Jobs, _) => ("select id, kind, queue, grp, options from longshore.jobs where", "true"),
        (Walk::Running, _) => ("select id, kind, queue, grp from longshore.running where", "true"),
        (Walk::Waiting, status) => (
            "select id, kind, queue, grp, attempt, interruptions from longshore.ready where",
            match status {
                Some(Status::Queued) => "c.attempt = 0 and c.interruptions = 0",
                Some(_) => "(c.attempt > 0 or c.interruptions > 0)",
                None => "true",
            },
        ),
        (Walk::Finished, Some(Status::FailedPermanent)) => (
            match filter.failure {
                Some(_) => {
                    "select id, finished_at, last_error from longshore.finished where error_group = {failure} and"
                }
                None => {
                    "select id, finished_at, last_error from longshore.finished where outcome = 'failed_permanent' and"
                }
            },
            "true",
        ),
        (Walk::Finished, Some(Status::Cancelled)) => (
            "select id, finished_at, last_error from longshore.finished where outcome = 'cancelled' and",
            "true",
        ),
        (Walk::Finished, Some(_)) => (
            "select id, finished_at, last_error, outcome from longshore.finished where",
            "c.outcome = 'succeeded'",
        ),
        (Walk::Finished, None) => {
            ("select id, finished_at, last_error from longshore.finished where", "true")
        }
    };
    let has_request = filter.tag.is_none() && walk != Walk::Finished;
    let (request, of) = match walk {
        _ if !filter.needs_request() => ("", "c"),
        Walk::Jobs => ("", "c"),
        _ if has_request => ("", "c"),
        _ => (REQUEST, "j"),
    };
    // Each parameter is in the statement, so that Postgres knows its type.
    let condition =
        |is_set: bool, condition: String, unset: &str| if is_set { condition } else { unset.to_owned() };
    // A number, and no parameter: the statement about the last row has no others.
    let failure = filter.failure.map(|fingerprint| format!("({})", fingerprint.0)).unwrap_or_default();
    let own_error = if walk == Walk::Finished { "c.last_error, " } else { "" };
    let matches = [
        status.to_owned(),
        condition(filter.kind.is_some(), format!("{of}.kind = $4"), "$4::text is null"),
        condition(filter.queue.is_some(), format!("{of}.queue = $5"), "$5::text is null"),
        condition(filter.tag.is_some(), TAGGED.replace("{of}", of), "$6::text is null"),
        condition(filter.group.is_some(), format!("{of}.grp = $7"), "$7::text is null"),
        condition(filter.error.is_some(), HAS_ERROR.replace("{own_error}", own_error), "$8::text is null"),
        condition(filter.ended_after.is_some(), "c.finished_at >= $9".into(), "$9::timestamptz is null"),
        condition(filter.ended_before.is_some(), "c.finished_at < $10".into(), "$10::timestamptz is null"),
        condition(
            filter.failure.is_some() && walk != Walk::Finished,
            HAS_FAILURE.replace("{failure}", &failure),
            "true",
        ),
    ];
    let rows = ROWS.replace("{rows}", &rows.replace("{failure}", &failure));
    let walk = WALK
        .replace("{rows}", &rows)
        .replace("{request}", request)
        .replace("{matches}", &matches.join(" and "));
    (walk, LAST_ROW.replace("{rows}", &rows))
}

const TAGGED: &str = "case json_typeof({of}.options -> 'tags') when 'array' then exists (
               select 1
                 from json_array_elements_text({of}.options -> 'tags') as tag
                where tag = $6) end";

/// Compares only the letters A to Z without their case, like SQLite.
const HAS_ERROR: &str = "position($8 in lower(coalesce({own_error}(
             select error
               from longshore.attempts
              where job = c.id
                and error is not null
              order by lease_no desc
              limit 1)) collate \"C\")) > 0";

const HAS_FAILURE: &str = "(
             select error_group
               from longshore.attempts
              where job = c.id
                and error is not null
              order by lease_no desc
              limit 1) = {failure}";

/// How many of these jobs to read: up to the one with which their large columns exceed `$2`
/// bytes. The walk ends there, because the size of a compressed value is known only after
/// it is decompressed.
const COUNT_UP_TO_BYTES: &str = "
    with recursive walk(jobs, bytes) as (
      select 0, 0::int8
      union all
      select w.jobs + 1, w.bytes + coalesce((
               select case when $3 then octet_length(j.payload::text) + coalesce(octet_length(f.result::text), 0)
                           else 0 end
                      + coalesce(octet_length(r.progress::text), 0)
                      + coalesce(octet_length((j.options -> 'metadata')::text), 0)
                      + coalesce(octet_length(coalesce(f.last_error, (
                          select error
                            from longshore.attempts
                           where job = j.id
                             and error is not null
                           order by lease_no desc
                           limit 1))), 0)
                 from longshore.jobs j
                 left join longshore.running r on r.id = j.id
                 left join longshore.finished f on f.id = j.id
                where j.id = ($1::uuid[])[w.jobs + 1]), 0)
        from walk w
       where w.bytes <= $2
         and w.jobs < cardinality($1::uuid[]))
    select max(jobs)
      from walk";

/// The jobs of these rows until their size exceeds the limit of a page, and the last job
/// before the limit if it was exceeded. Large values are not in the rows and are read here.
async fn bounded(
    tx: &mut Tx<'_>,
    rows: &[PgRow],
    payloads: Payloads,
) -> Sql<(Vec<JobRecord>, Option<JobId>)> {
    let mut large: Vec<Uuid> = Vec::new();
    for row in rows {
        if row.try_get(36)? {
            large.push(row.try_get(0)?);
        }
    }
    let mut read = HashMap::new();
    if !large.is_empty() {
        let count: i32 = sqlx::query_scalar(tx.sql(COUNT_UP_TO_BYTES))
            .bind(&large)
            .bind(ListFilter::MAX_BYTES as i64)
            .bind(payloads == Payloads::Include)
            .fetch_one(&mut *tx.connection)
            .await?;
        let text = whole(payloads).replace("{from}", "unnest($1::uuid[]) as e(id)");
        let wanted = &large[..count as usize];
        let query = sqlx::query(AssertSqlSafe(tx.fill(&text))).bind(wanted);
        for row in query.fetch_all(&mut *tx.connection).await? {
            let job = record(&row)?;
            read.insert(job.id.0, job);
        }
        large.drain(..count as usize);
    }
    let mut page = PageBuilder::default();
    let mut last = None;
    for row in rows {
        let id: Uuid = row.try_get(0)?;
        let job = if !row.try_get::<bool, _>(36)? {
            record(row)?
        } else if let Some(job) = read.remove(&id) {
            job
        } else if large.first() == Some(&id) {
            return Ok((page.jobs(), last));
        } else {
            // Deleted since the page was chosen.
            last = Some(JobId(id));
            continue;
        };
        if !page.add(job) {
            return Ok((page.jobs(), last));
        }
        last = Some(JobId(id));
    }
    Ok((page.jobs(), None))
}

const GLANCE: &str = "
    select s.id, s.kind, s.queue, s.status, s.attempts, s.cancel_requested, s.created_at, s.finished_at
      from ((select id from longshore.jobs order by id desc limit $1)
            union
            (select id from longshore.running order by id desc limit $1)
            union
            select unnest($2::uuid[])) e
      join longshore.job_status s on s.id = e.id
     where s.status is not null   -- in no table: `check` reports it
     order by s.id";

pub(super) async fn glance(tx: &mut Tx<'_>, limit: u32, also: &[JobId]) -> Sql<Vec<Glance>> {
    let also: Vec<Uuid> = also.iter().map(|id| id.0).collect();
    let rows =
        sqlx::query(tx.sql(GLANCE)).bind(i64::from(limit)).bind(also).fetch_all(&mut *tx.connection).await?;
    let glance = |row: sqlx::postgres::PgRow| {
        let status = row.try_get::<String, _>(3)?.parse()?;
        Ok(Glance {
            id: JobId(row.try_get(0)?),
            kind: row.try_get(1)?,
            queue: row.try_get(2)?,
            status,
            attempts: row.try_get::<i16, _>(4)? as u16,
            // The view of an older version shows it only for running jobs.
            cancel_requested: row.try_get::<bool, _>(5)? || status == Status::Cancelled,
            created_at: row.try_get(6)?,
            ended_at: row.try_get(7)?,
        })
    };
    rows.into_iter().map(glance).collect()
}

pub(super) fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|error| {
        Error::internal("a JSON column of the database contains text that is not JSON").with_source(error)
    })
}
