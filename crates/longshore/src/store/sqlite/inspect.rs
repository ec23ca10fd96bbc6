//! Reading jobs: one job with its history, a page of jobs, and the newest jobs
//! without their payloads.

use std::collections::BTreeMap;

use rusqlite::{Row, params};
use serde_json::value::RawValue;
use uuid::Uuid;

use super::tx::{Columns, Sql, Tx, decoded};
use crate::enqueue::Options;
use crate::job::{AttemptEnd, AttemptRecord, JobId, JobRecord, Status, WorkerId};
use crate::store::{Glance, ListFilter, MAX_HISTORY, Page, PageBuilder, Payloads};

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
               case when ?2 then f.result end
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
            cancel_requested: row.get(20)? || status == Status::Cancelled,
            idempotency_key: row.get(6)?,
            unique_key: row.get(7)?,
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
    let Some(mut record) = found else {
        tracing::error!(job_id = %id, "the job is in none of the tables ready, running and finished; run `longshore check`");
        return Ok(None);
    };
    if record.lease_no > 0 {
        let newest =
            tx.row(NEWEST_ERROR, [id.0.as_bytes()], |row| Ok((row.get::<_, String>(0)?, row.time(1)?)))?;
        record.last_failed_at = match (&record.last_error, &newest) {
            // The job finished with an error of its own, such as the reason it was cancelled.
            (Some(last), newest) if newest.as_ref().is_none_or(|(error, _)| error != last) => {
                record.finished_at
            }
            (_, newest) => newest.as_ref().map(|(_, at)| *at),
        };
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
    let limit = filter.page_size() as usize;
    let (ids, next) = matching(tx, filter, limit)?;
    let mut page = PageBuilder::default();
    for id in ids {
        if let Some(job) = record(tx, id, filter.payloads)?
            && !page.add(job)
        {
            let next = page.last();
            return Ok(Page { jobs: page.jobs(), next });
        }
    }
    Ok(Page { jobs: page.jobs(), next })
}

/// The ids of one page, and the cursor of the next. Walks the table that has the jobs of
/// the wanted status, newest first, and filters row by row.
fn matching(tx: &Tx<'_>, filter: &ListFilter, limit: usize) -> Sql<(Vec<JobId>, Option<JobId>)> {
    let (walk, outcome) = walk(filter);
    let (before, from) = filter.id_bounds();
    // Without an upper bound, 17 bytes of 0xff: greater than every id, which has 16 bytes.
    let before = before.map_or(vec![0xff; 17], |id| id.as_bytes().to_vec());
    let from = from.unwrap_or_default().into_bytes();
    let mut statement = tx.prepare(walk)?;
    let mut rows = match (&filter.idempotency_key, &filter.unique_key) {
        (Some(key), _) | (None, Some(key)) => statement.query(params![before, key, from])?,
        (None, None) => statement.query(params![before, outcome, from])?,
    };
    let (mut ids, mut skipped, mut examined) = (Vec::new(), 0, 0);
    while let Some(row) = rows.next()? {
        let id = row.job(0)?;
        examined += 1;
        if matches(tx, filter, row, id)? {
            if skipped < filter.offset {
                skipped += 1;
            } else {
                ids.push(id);
            }
        }
        if ids.len() == limit || examined == filter.max_examined() {
            return Ok((ids, Some(id)));
        }
    }
    Ok((ids, None))
}

/// The statement that returns the ids of candidates. If it walks `jobs` and the filter
/// needs the request, it also returns those columns.
fn walk(filter: &ListFilter) -> (&'static str, Option<&'static str>) {
    const ALL: &str = "
        select id
          from jobs
         where id < ?1
           and id >= ?3
           and ?2 is null
         order by id desc";
    const ALL_WITH_REQUEST: &str = "
        select id,
               queue,
               kind,
               options
          from jobs
         where id < ?1
           and id >= ?3
           and ?2 is null
         order by id desc";
    const BY_IDEMPOTENCY_KEY: &str = "
        select id
          from jobs
         where id < ?1
           and id >= ?3
           and idempotency_key = ?2
         union all
        select job
          from merged_requests
         where job < ?1
           and job >= ?3
           and idempotency_key = ?2";
    const BY_UNIQUE_KEY: &str = "
        select job
          from keys
         where job < ?1
           and job >= ?3
           and key = ?2";
    const QUEUED: &str = "
        select id
          from ready
         where id < ?1
           and id >= ?3
           and ?2 is null
           and attempt = 0
           and interruptions = 0
         order by id desc";
    const RETRYING: &str = "
        select id
          from ready
         where id < ?1
           and id >= ?3
           and ?2 is null
           and (attempt > 0 or interruptions > 0)
         order by id desc";
    const RUNNING: &str = "
        select id
          from running
         where id < ?1
           and id >= ?3
           and ?2 is null
         order by id desc";
    const SUCCEEDED: &str = "
        select id
          from finished
         where id < ?1
           and id >= ?3
           and outcome = ?2
         order by id desc";
    const UNSUCCESSFUL: &str = "
        select id
          from finished indexed by finished_unsuccessful
         where id < ?1
           and id >= ?3
           and outcome = ?2
           and outcome <> 'succeeded'
         order by id desc";
    if filter.idempotency_key.is_some() {
        return (BY_IDEMPOTENCY_KEY, None);
    }
    if filter.unique_key.is_some() {
        return (BY_UNIQUE_KEY, None);
    }
    match filter.status {
        None if filter.needs_request() => (ALL_WITH_REQUEST, None),
        None => (ALL, None),
        Some(Status::Queued) => (QUEUED, None),
        Some(Status::Retrying) => (RETRYING, None),
        Some(Status::Running) => (RUNNING, None),
        Some(Status::Succeeded) => (SUCCEEDED, Some("succeeded")),
        Some(status) => (UNSUCCESSFUL, Some(status.as_str())),
    }
}

/// Tests the parts of the filter that the walk did not. Reads the request only if the
/// filter needs it.
fn matches(tx: &Tx<'_>, filter: &ListFilter, candidate: &Row<'_>, id: JobId) -> Sql<bool> {
    const REQUEST: &str = "
        select id,
               queue,
               kind,
               options
          from jobs
         where id = ?1";
    if filter.needs_request() {
        let passes = |row: &Row<'_>| {
            let equals = |wanted: &Option<String>, column| -> rusqlite::Result<bool> {
                let text = row.get_ref(column)?.as_str()?;
                Ok(wanted.as_deref().is_none_or(|wanted| wanted == text))
            };
            if !equals(&filter.queue, 1)? || !equals(&filter.kind, 2)? {
                return Ok(false);
            }
            let Some(tag) = &filter.tag else { return Ok(true) };
            let options = Options::from_stored(row.get_ref(3)?.as_str_or_null()?).unwrap_or_default();
            Ok(options.tags.contains(tag))
        };
        let has_request = candidate.as_ref().column_count() > 1;
        let is_match = if has_request {
            passes(candidate)?
        } else {
            tx.row(REQUEST, [id.0.as_bytes()], passes)?.unwrap_or(false)
        };
        if !is_match {
            return Ok(false);
        }
    }
    // A walk by key finds one job in any status. If both keys were given, the other one
    // must still be compared.
    if filter.idempotency_key.is_none() && filter.unique_key.is_none() {
        return Ok(true);
    }
    let Some(record) = record(tx, id, Payloads::Omit)? else { return Ok(false) };
    let is_live = matches!(record.status, Status::Queued | Status::Retrying | Status::Running);
    Ok(filter.status.is_none_or(|status| status == record.status)
        && (filter.unique_key.is_none() || (filter.unique_key == record.unique_key && is_live)))
}

pub(super) fn glance(tx: &Tx<'_>, limit: u32, also: &[JobId]) -> Sql<Vec<Glance>> {
    const NEWEST: &str = "
        select id, kind, queue, status, attempts, cancel_requested
          from job_status
         where id in (select id from jobs order by id desc limit ?1)";
    const RUNNING: &str = "
        select id, kind, queue, status, attempts, cancel_requested
          from job_status
         where id in (select id from running order by id desc limit ?1)";
    const ONE: &str = "
        select id, kind, queue, status, attempts, cancel_requested
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
