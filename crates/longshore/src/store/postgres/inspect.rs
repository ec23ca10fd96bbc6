//! Pages of jobs: walking the tables, and reading the jobs of a page.

use std::collections::HashMap;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Row as _};
use uuid::Uuid;

use super::db::rows_of;
use super::tx::{Sql, Tx};
use crate::job::{JobId, JobRecord, Status};
use crate::store::db::{self, Row};
use crate::store::inspect::record::{record, select_jobs};
use crate::store::inspect::{ListFilter, Live, PageBuilder, Pages, Payloads, Step, Walk, Walked};

#[async_trait]
impl Pages for Tx<'_> {
    async fn live_jobs(&mut self, filter: &ListFilter, live: Live) -> db::Sql<Option<Vec<JobId>>> {
        Ok(live_jobs(self, filter, live).await?)
    }

    async fn walk(&mut self, filter: &ListFilter, walk: Walk, step: Step) -> db::Sql<Walked> {
        Ok(walk_step(self, filter, walk, step).await?)
    }

    async fn page(&mut self, ids: &[JobId], payloads: Payloads) -> db::Sql<(Vec<JobRecord>, Option<JobId>)> {
        Ok(page(self, ids, payloads).await?)
    }
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
    select count(*) as count, array(
             select id
               from live
              where id < coalesce($3, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
                and id >= coalesce($4, '00000000-0000-0000-0000-000000000000')
                and ($5::text is null or kind = $5)
                and ($6::bool is null or is_fresh = $6)
              order by id desc
              limit $7) as newest
      from live";

/// The live jobs that match; `None` if there are too many to sort them.
async fn live_jobs(tx: &mut Tx<'_>, filter: &ListFilter, live: Live) -> Sql<Option<Vec<JobId>>> {
    let parts = match live {
        Live::Waiting => WAITING_OF_QUEUE.to_owned(),
        Live::Running => RUNNING_OF_QUEUE.to_owned(),
        Live::WaitingAndRunning => format!("{WAITING_OF_QUEUE} union all {RUNNING_OF_QUEUE}"),
    };
    let (before, from) = filter.id_bounds();
    let row = sqlx::query(AssertSqlSafe(tx.fill(&NEWEST_LIVE.replace("{live}", &parts))))
        .bind(&filter.queue)
        .bind(i64::from(ListFilter::MAX_SORTED) + 1)
        .bind(before)
        .bind(from)
        .bind(&filter.kind)
        .bind(filter.status().map(|status| status == Status::Queued))
        .bind(i64::from(filter.offset) + i64::from(filter.page_size()))
        .fetch_one(&mut *tx.connection)
        .await?;
    let ids: Vec<Uuid> = row.try_get("newest")?;
    let is_complete = row.try_get::<i64, _>("count")? <= i64::from(ListFilter::MAX_SORTED);
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

/// The statement of a step, and the statement that finds the last row that the step examines.
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

/// Selects the jobs `$1`, newest first; with their payloads and results if `$2`. `$value` selects a column that can be
/// large.
macro_rules! select_page {
    ($value:ident $(, also: $also:expr)?) => {
        concat!(
            select_jobs!(
                payload: concat!("case when $2 then ", $value!("j.payload"), " end"),
                options: $value!("j.options"),
                progress: $value!("r.progress"),
                result: concat!("case when $2 then ", $value!("f.result"), " end"),
                last_error: concat!("coalesce(", $value!("f.last_error"), ", ", $value!("a.error"), ")"),
                last_failed_at: "a.ended_at",
                $(also: $also,)?
                from: "unnest($1::uuid[]) as e(id)
      join longshore.jobs j on j.id = e.id
      left join lateral (
             select error, ended_at
               from longshore.attempts
              where job = j.id
                and error is not null
              order by lease_no desc
              limit 1) a on true",
            ),
            "
     order by e.id desc"
        )
    };
}

macro_rules! whole {
    ($column:literal) => {
        concat!($column, "::text")
    };
}

/// Whether a value is stored in the row as it is: neither its size nor its contents have to be fetched from elsewhere. Most
/// payloads have fewer than 2,000 bytes, and 200 jobs with six such values are not a large page.
macro_rules! is_small {
    ($column:literal) => {
        concat!("(pg_column_size(", $column, ") <= 2000 and pg_column_compression(", $column, ") is null)")
    };
}

macro_rules! if_small {
    ($column:literal) => {
        concat!("case when ", is_small!($column), " then ", $column, "::text end")
    };
}

/// Whether there is a value that is not small.
macro_rules! is_large {
    ($column:literal) => {
        concat!("not coalesce(", is_small!($column), ", true)")
    };
}

const WHOLE_JOBS: &str = select_page!(whole);

/// Without large values, and whether there are any.
const SMALL_JOBS: &str = select_page!(
    if_small,
    also: concat!(
        "$2 and (", is_large!("j.payload"), " or ", is_large!("f.result"), ")
             or ", is_large!("j.options"), "
             or ", is_large!("r.progress"), "
             or ", is_large!("f.last_error"), "
             or ", is_large!("a.error"), " as is_large"
    )
);

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

async fn page(tx: &mut Tx<'_>, ids: &[JobId], payloads: Payloads) -> Sql<(Vec<JobRecord>, Option<JobId>)> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let mut rows = Vec::with_capacity(ids.len());
    for mut row in select(tx, SMALL_JOBS, &ids, payloads).await? {
        rows.push((row.take::<JobId>("id")?, row.take::<bool>("is_large")?, row));
    }
    let mut large: Vec<Uuid> =
        rows.iter().filter(|(_, is_large, _)| *is_large).map(|(id, ..)| id.0).collect();
    let mut read = HashMap::new();
    if !large.is_empty() {
        let count: i32 = sqlx::query_scalar(tx.sql(COUNT_UP_TO_BYTES))
            .bind(&large)
            .bind(ListFilter::MAX_BYTES as i64)
            .bind(payloads == Payloads::Include)
            .fetch_one(&mut *tx.connection)
            .await?;
        for mut row in select(tx, WHOLE_JOBS, &large[..count as usize], payloads).await? {
            let id = row.take("id")?;
            read.insert(id, record(id, row)?);
        }
        large.drain(..count as usize);
    }
    let mut page = PageBuilder::default();
    let mut last = None;
    for (id, is_large, row) in rows {
        let job = if !is_large {
            record(id, row)?
        } else if let Some(job) = read.remove(&id) {
            job
        } else if large.first() == Some(&id.0) {
            return Ok((page.jobs(), last));
        } else {
            // Deleted since the page was chosen.
            last = Some(id);
            continue;
        };
        if !page.add(job) {
            return Ok((page.jobs(), last));
        }
        last = Some(id);
    }
    Ok((page.jobs(), None))
}

async fn select(tx: &mut Tx<'_>, text: &'static str, ids: &[Uuid], payloads: Payloads) -> Sql<Vec<Row>> {
    let query = sqlx::query(tx.sql(text)).bind(ids).bind(payloads == Payloads::Include);
    Ok(rows_of(&query.fetch_all(&mut *tx.connection).await?)?)
}
