//! Reading jobs: one job with its history, a page of jobs, and the newest jobs
//! without their payloads.

use std::collections::BTreeMap;
use std::time::Instant;

use rusqlite::types::Value;
use rusqlite::{Row, params};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::settle::newest_error;
use super::tx::{Columns, Sql, Tx, decoded};
use crate::job::{AttemptEnd, AttemptRecord, JobId, JobRecord, Status, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::keys::as_written;
use crate::store::operate::in_no_table;
use crate::store::{
    FinishedJobs, Found, Glance, ListFilter, Live, MAX_HISTORY, Page, PageBuilder, Payloads, Search,
    Searched, Step, Walk, Walked, merge,
};

pub(super) fn get(tx: &Tx<'_>, id: JobId) -> Sql<Option<JobRecord>> {
    let Some(mut record) = record(tx, id, Payloads::Include)? else { return Ok(None) };
    (record.errors, record.errors_omitted) = history(tx, id)?;
    Ok(Some(record))
}

/// A job without its history; `None` if it does not exist.
fn record(tx: &Tx<'_>, id: JobId, payloads: Payloads) -> Sql<Option<JobRecord>> {
    const RECORD: &str = "
        select j.kind,
               j.queue,
               j.priority,
               j.max_attempts,
               case when ?2 then j.payload else 'null' end,
               j.run_at,
               j.idempotency_key,
               j.unique_key,
               j.flags,
               j.options,
               j.timeout_ms,
               j.created_at,
               case
                 when w.id is not null then 'ready'
                 when r.id is not null then 'running'
                 else f.outcome
               end,
               coalesce(w.attempt, r.attempt, f.attempts, 0),
               coalesce(w.interruptions, r.interruptions, f.interruptions, 0),
               coalesce(w.lease_no, r.lease_no, f.lease_no, 0),
               w.run_at,
               coalesce(w.since, r.claimed_at, f.finished_at, j.created_at),
               r.claimed_at,
               r.worker,
               coalesce(r.cancel_requested, 0),
               r.progress,
               f.started_at,
               f.finished_at,
               f.last_error,
               case when ?2 then f.result end,
               (select name from workers where id = r.worker),
               j.grp,
               j.flow,
               j.task
          from jobs j
          left join ready w on w.id = j.id
          left join running r on r.id = j.id
          left join finished f on f.id = j.id
         where j.id = ?1";
    const NEWEST_ERROR: &str = "
        select error,
               ended_at
          from attempts
         where job = ?1
           and error is not null
         order by lease_no desc
         limit 1";
    const NEWEST_START: &str = "
        select started_at
          from attempts
         where job = ?1
         order by lease_no desc
         limit 1";
    let found = tx.row(RECORD, params![id.0.as_bytes(), payloads == Payloads::Include], |row| {
        let (attempts, interruptions) = (row.get(13)?, row.get(14)?);
        let status = match row.get_ref(12)?.as_str_or_null()? {
            None => return Ok(None),
            Some("ready") if attempts == 0 && interruptions == 0 => Status::Queued,
            Some("ready") => Status::Retrying,
            Some("running") => Status::Running,
            Some(_) => row.outcome(12)?.status(),
        };
        let options = row.get_ref(9)?.as_str_or_null()?;
        let options = Options::from_stored(options).unwrap_or_default();
        let locked_at = row.maybe_time(18)?;
        Ok(Some(JobRecord {
            id,
            kind: row.get(0)?,
            queue: row.get(1)?,
            status,
            priority: row.get(2)?,
            attempts,
            max_attempts: row.get(3)?,
            last_error: row.get(24)?,
            last_failed_at: None,
            payload: decoded(row.get_ref(4)?, |text| RawValue::from_string(text.to_owned()))?,
            result: row.json(25)?,
            run_at: row.maybe_time(16)?.map_or_else(|| row.time(5), Ok)?,
            locked_at,
            locked_by: row.get::<_, Option<[u8; 16]>>(19)?.map(|id| WorkerId(Uuid::from_bytes(id))),
            locked_by_name: row.get(26)?,
            cancel_requested: row.get(20)? || status == Status::Cancelled,
            idempotency_key: row.get::<_, Option<String>>(6)?.map(as_written),
            unique_key: row.get::<_, Option<String>>(7)?.map(as_written),
            group: row.get(27)?,
            flow: row.flow(28)?,
            task: row.get(29)?,
            tags: options.tags,
            flags: row.list(8)?,
            context: options.context,
            metadata: options.metadata,
            progress: row.json(21)?,
            timeout: row.timeout(10)?,
            retry: options.retry,
            interruptions,
            lease_no: row.get(15)?,
            created_at: row.time(11)?,
            updated_at: row.time(17)?,
            started_at: locked_at.or(row.maybe_time(22)?),
            finished_at: row.maybe_time(23)?,
            errors: Vec::new(),
            errors_omitted: 0,
        }))
    })?;
    let Some(found) = found else { return Ok(None) };
    let Some(mut record) = found else { return Err(in_no_table(id).into()) };
    if record.lease_no > 0 {
        let newest =
            tx.row(NEWEST_ERROR, [id.0.as_bytes()], |row| Ok((row.get::<_, String>(0)?, row.time(1)?)))?;
        record.last_failed_at = newest.as_ref().map(|(_, at)| *at);
        record.last_error = record.last_error.or(newest.map(|(error, _)| error));
        if record.started_at.is_none() {
            record.started_at = tx.row(NEWEST_START, [id.0.as_bytes()], |row| row.time(0))?;
        }
    }
    Ok(Some(record))
}

/// The attempts that are kept, and how many older ones are not.
fn history(tx: &Tx<'_>, id: JobId) -> Sql<(Vec<AttemptRecord>, u32)> {
    const HISTORY: &str = "
        select attempt,
               lease_no,
               worker,
               started_at,
               ended_at,
               what,
               error,
               omitted,
               count(*) over ()
          from attempts
         where job = ?1
         order by lease_no desc
         limit ?2";
    let (mut removed, mut stored) = (0, 0);
    let mut newest = tx.rows(HISTORY, params![id.0.as_bytes(), MAX_HISTORY + 1], |row| {
        removed = removed.max(row.get::<_, Option<u32>>(7)?.unwrap_or(0));
        stored = row.get::<_, u32>(8)?;
        Ok(AttemptRecord {
            attempt: row.get(0)?,
            lease_no: row.get(1)?,
            worker: row.get::<_, Option<[u8; 16]>>(2)?.map(|id| WorkerId(Uuid::from_bytes(id))),
            started_at: row.time(3)?,
            ended_at: row.time(4)?,
            what: decoded(row.get_ref(5)?, AttemptEnd::from_stored)?,
            error: row.get(6)?,
        })
    })?;
    newest.reverse();
    let omitted = removed + stored - newest.len() as u32;
    Ok((newest, omitted))
}

pub(super) fn list(tx: &Tx<'_>, filter: &ListFilter) -> Sql<Page> {
    let keys = filter.stored_keys();
    let found = match &keys {
        Some(keys) => by_key(tx, filter, keys)?,
        None => {
            let searched =
                filter.searches().iter().map(|filter| search(tx, filter)).collect::<Sql<Vec<_>>>()?;
            merge(filter, searched)
        }
    };
    let (mut page, mut end) = (PageBuilder::default(), None);
    for id in found.ids {
        if let Some(job) = record(tx, id, filter.payloads)?
            && !page.add(job)
        {
            end = page.last();
            break;
        }
    }
    let jobs = page.jobs();
    let page = match keys {
        Some(_) => filter.page_by_key(jobs),
        None => Page { jobs, next: found.next, next_offset: found.next_offset },
    };
    Ok(match end {
        Some(end) => Page { next: Some(end), next_offset: 0, ..page },
        None => page,
    })
}

/// The jobs of a key, newest first. The other conditions are tested on their records.
fn by_key(tx: &Tx<'_>, filter: &ListFilter, keys: &[String]) -> Sql<Found> {
    const BY_IDEMPOTENCY_KEY: &str = "
        select id
          from jobs
         where idempotency_key = ?1
         union all
        select job
          from merged_requests
         where idempotency_key = ?1";
    const BY_UNIQUE_KEY: &str = "
        select job
          from keys
         where key = ?1";
    let text = if filter.idempotency_key.is_some() { BY_IDEMPOTENCY_KEY } else { BY_UNIQUE_KEY };
    let mut ids = Vec::new();
    for key in keys {
        ids.extend(tx.rows(text, [key], |row| row.job(0))?);
    }
    ids.sort_unstable_by(|a, b| b.cmp(a));
    Ok(Found { ids, next: None, next_offset: 0 })
}

fn search(tx: &Tx<'_>, filter: &ListFilter) -> Sql<Searched> {
    let started = Instant::now();
    let finished = if filter.may_ask_tallies() { finished_jobs(tx, filter)? } else { FinishedJobs::Many };
    let live = filter.live(finished);
    let live_ids = live.map(|live| live_jobs(tx, filter, live)).transpose()?.flatten();
    let walk = filter.walk(live.filter(|_| live_ids.is_some()), finished);
    let mut search = Search::new(filter, live_ids.unwrap_or_default(), walk, started);
    while let (Some(walk), Some(step)) = (walk, search.next_step()) {
        let step_started = Instant::now();
        let walked = walk_step(tx, filter, walk, step)?;
        search.add_step(step, walked, step_started.elapsed());
    }
    Ok(search.finish())
}

fn finished_jobs(tx: &Tx<'_>, filter: &ListFilter) -> Sql<FinishedJobs> {
    const KEPT: &str = "
        select coalesce(sum(kept) filter (
                 where (?1 is null or queue = ?1)
                   and (?2 is null or kind = ?2)
                   and (?3 is null or outcome = ?3)), 0),
               coalesce(sum(kept), 0)
          from tallies";
    let params = params![filter.queue, filter.kind, filter.status().map(Status::as_str)];
    let (matching, all) = tx.row(KEPT, params, |row| Ok((row.get(0)?, row.get(1)?)))?.unwrap_or((0, 0));
    Ok(FinishedJobs::of(matching, all))
}

/// The live jobs that match; `None` if there are too many to sort them.
fn live_jobs(tx: &Tx<'_>, filter: &ListFilter, live: Live) -> Sql<Option<Vec<JobId>>> {
    const WAITING: &str = "
        select id,
               kind,
               attempt = 0 and interruptions = 0
          from (select id, kind, attempt, interruptions
                  from ready indexed by ready_claim
                 where queue = ?1
                   and interruptions = 0
                   and grp is null
                union all
                select id, kind, attempt, interruptions
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and interruptions > 0
                   and grp is null
                union all
                select id, kind, attempt, interruptions
                  from ready indexed by ready_groups
                 where queue = ?1
                   and grp is not null)
         limit ?2";
    const RUNNING: &str = "
        select id,
               kind,
               0
          from running
         where ?1 is null
            or queue = ?1
         limit ?2";
    let parts: &[&str] = match live {
        Live::Waiting => &[WAITING],
        Live::Running => &[RUNNING],
        Live::WaitingAndRunning => &[WAITING, RUNNING],
    };
    let (before, from) = filter.id_bounds();
    let (mut ids, mut count) = (Vec::new(), 0);
    for part in parts {
        let mut statement = tx.prepare(part)?;
        let mut rows = statement.query(params![filter.queue, ListFilter::MAX_SORTED + 1])?;
        while let Some(row) = rows.next()? {
            count += 1;
            let id = row.job(0)?;
            let is_fresh: bool = row.get(2)?;
            let is_match = before.is_none_or(|before| id.0 < before)
                && from.is_none_or(|from| id.0 >= from)
                && filter.status().is_none_or(|status| (status == Status::Queued) == is_fresh)
                && has_text(row, 1, &filter.kind)?;
            if is_match {
                ids.push(id);
            }
        }
    }
    Ok((count <= ListFilter::MAX_SORTED).then_some(ids))
}

fn walk_step(tx: &Tx<'_>, filter: &ListFilter, walk: Walk, step: Step) -> Sql<Walked> {
    let (text, value) = walk_statement(filter, walk);
    // Without an upper bound, 17 bytes of 0xff: greater than every id, which has 16 bytes.
    let before = step.before.map_or(vec![0xff; 17], |id| id.as_bytes().to_vec());
    let mut statement = tx.prepare(text)?;
    let mut rows = statement.query(params![before, value])?;
    let (mut walked, mut examined) = (Walked::default(), 0);
    while let Some(row) = rows.next()? {
        let id = row.job(0)?;
        examined += 1;
        if matches(tx, filter, walk, row, id)? {
            walked.ids.push(id);
        }
        if examined == step.rows || walked.ids.len() == step.wanted as usize {
            walked.reached = Some(id);
            break;
        }
    }
    Ok(walked)
}

/// The statement that returns the ids of a table, and what the filter needs of its other
/// columns.
fn walk_statement(filter: &ListFilter, walk: Walk) -> (&'static str, Value) {
    const JOBS: &str = "
        select id
          from jobs
         where id < ?1
           and ?2 is null
         order by id desc";
    const JOBS_WITH_REQUEST: &str = "
        select id,
               queue,
               kind,
               grp,
               options
          from jobs
         where id < ?1
           and ?2 is null
         order by id desc";
    const WAITING: &str = "
        select id,
               queue,
               kind,
               grp,
               attempt = 0 and interruptions = 0
          from ready
         where id < ?1
           and ?2 is null
         order by id desc";
    const RUNNING: &str = "
        select id,
               queue,
               kind,
               grp
          from running
         where id < ?1
           and ?2 is null
         order by id desc";
    const FINISHED: &str = "
        select id,
               outcome,
               finished_at,
               last_error
          from finished
         where id < ?1
           and ?2 is null
         order by id desc";
    const UNSUCCESSFUL: &str = "
        select id,
               outcome,
               finished_at,
               last_error
          from finished indexed by finished_unsuccessful
         where id < ?1
           and outcome = ?2
           and outcome <> 'succeeded'
         order by id desc";
    const FAILED: &str = "
        select id,
               outcome,
               finished_at,
               last_error
          from finished indexed by finished_error_groups
         where id < ?1
           and error_group = ?2
           and error_group is not null
         order by id desc";
    match (walk, filter.status(), filter.failure) {
        (Walk::Jobs, _, _) if filter.needs_request() => (JOBS_WITH_REQUEST, Value::Null),
        (Walk::Jobs, _, _) => (JOBS, Value::Null),
        (Walk::Waiting, _, _) => (WAITING, Value::Null),
        (Walk::Running, _, _) => (RUNNING, Value::Null),
        (Walk::Finished, _, Some(failure)) => (FAILED, failure.0.into()),
        (Walk::Finished, Some(status @ (Status::FailedPermanent | Status::Cancelled)), None) => {
            (UNSUCCESSFUL, status.as_str().to_owned().into())
        }
        (Walk::Finished, _, None) => (FINISHED, Value::Null),
    }
}

/// Tests a row of [`walk_statement`]. Reads the request only if the table does not have what
/// the filter needs, and the attempts only for the text of an error.
fn matches(tx: &Tx<'_>, filter: &ListFilter, walk: Walk, row: &Row<'_>, id: JobId) -> Sql<bool> {
    let has_state = match (walk, filter.status()) {
        (Walk::Waiting, Some(status)) => row.get::<_, bool>(4)? == (status == Status::Queued),
        (Walk::Finished, status) => {
            status.is_none_or(|status| {
                row.get_ref(1).is_ok_and(|outcome| outcome.as_str() == Ok(status.as_str()))
            }) && filter.has_end(Some(row.time(2)?))
        }
        _ => true,
    };
    Ok(has_state
        && has_request(tx, filter, walk, row, id)?
        && has_error(tx, filter, walk, row, id)?
        && has_failure(tx, filter, walk, id)?)
}

fn has_request(tx: &Tx<'_>, filter: &ListFilter, walk: Walk, row: &Row<'_>, id: JobId) -> Sql<bool> {
    const REQUEST: &str = "
        select id,
               queue,
               kind,
               grp,
               options
          from jobs
         where id = ?1";
    if !filter.needs_request() {
        return Ok(true);
    }
    let has_names = |row: &Row<'_>| -> rusqlite::Result<bool> {
        Ok(has_text(row, 1, &filter.queue)?
            && has_text(row, 2, &filter.kind)?
            && has_text(row, 3, &filter.group)?)
    };
    let is_request = |row: &Row<'_>| -> rusqlite::Result<bool> {
        if !has_names(row)? {
            return Ok(false);
        }
        let Some(tag) = &filter.tag else { return Ok(true) };
        let options = Options::from_stored(row.get_ref(4)?.as_str_or_null()?).unwrap_or_default();
        Ok(options.tags.contains(tag))
    };
    match walk {
        Walk::Jobs => Ok(is_request(row)?),
        Walk::Waiting | Walk::Running if !has_names(row)? => Ok(false),
        Walk::Waiting | Walk::Running if filter.tag.is_none() => Ok(true),
        _ => Ok(tx.row(REQUEST, [id.0.as_bytes()], is_request)?.unwrap_or(false)),
    }
}

fn has_error(tx: &Tx<'_>, filter: &ListFilter, walk: Walk, row: &Row<'_>, id: JobId) -> Sql<bool> {
    if filter.error.is_none() {
        return Ok(true);
    }
    if walk == Walk::Finished
        && let Some(error) = row.get_ref(3)?.as_str_or_null()?
    {
        return Ok(filter.has_error(Some(error)));
    }
    Ok(filter.has_error(newest_error(tx, id)?.as_deref()))
}

/// The index has led to the finished jobs. The others are compared here.
fn has_failure(tx: &Tx<'_>, filter: &ListFilter, walk: Walk, id: JobId) -> Sql<bool> {
    const NEWEST: &str = "
        select error_group
          from attempts
         where job = ?1
           and error is not null
         order by lease_no desc
         limit 1";
    match filter.failure {
        Some(wanted) if walk != Walk::Finished => {
            let newest = tx.row(NEWEST, [id.0.as_bytes()], |row| row.get::<_, Option<i64>>(0))?;
            Ok(newest.flatten() == Some(wanted.0))
        }
        _ => Ok(true),
    }
}

/// Whether the column is equal to `wanted`. Without it, every row matches.
fn has_text(row: &Row<'_>, column: usize, wanted: &Option<String>) -> rusqlite::Result<bool> {
    let Some(wanted) = wanted else { return Ok(true) };
    Ok(row.get_ref(column)?.as_str_or_null()? == Some(wanted))
}

pub(super) fn glance(tx: &Tx<'_>, limit: u32, also: &[JobId]) -> Sql<Vec<Glance>> {
    const NEWEST: &str = "
        select id, kind, queue, status, attempts, cancel_requested, created_at, finished_at
          from job_status
         where id in (select id from jobs order by id desc limit ?1)";
    const RUNNING: &str = "
        select id, kind, queue, status, attempts, cancel_requested, created_at, finished_at
          from job_status
         where id in (select id from running order by id desc limit ?1)";
    const ONE: &str = "
        select id, kind, queue, status, attempts, cancel_requested, created_at, finished_at
          from job_status
         where id = ?1";
    let read = |row: &Row<'_>| {
        let status = decoded(row.get_ref(3)?, str::parse::<Status>)?;
        Ok(Glance {
            id: row.job(0)?,
            kind: row.get(1)?,
            queue: row.get(2)?,
            status,
            attempts: row.get(4)?,
            // The view of an older version shows it only for running jobs.
            cancel_requested: row.get(5)? || status == Status::Cancelled,
            created_at: row.time(6)?,
            ended_at: row.maybe_time(7)?,
        })
    };
    let mut found = tx.rows(NEWEST, [limit], read)?;
    found.extend(tx.rows(RUNNING, [limit], read)?);
    for id in also {
        found.extend(tx.row(ONE, params![id.0.as_bytes()], read)?);
    }
    let by_id: BTreeMap<JobId, Glance> = found.into_iter().map(|job| (job.id, job)).collect();
    Ok(by_id.into_values().collect())
}
