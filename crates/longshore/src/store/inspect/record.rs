//! The record of one job: the columns that it is read from, and how they become a [`JobRecord`].

use std::time::Duration;

use serde_json::value::RawValue;

use super::super::db::{Row, Rows, Sql, Statement, args};
use super::super::operate::in_no_table;
use super::super::settle::MAX_HISTORY;
use super::{ListFilter, Payloads};
use crate::error::{Error, Result};
use crate::job::{AttemptEnd, AttemptRecord, JobId, JobRecord, Outcome, Status};
use crate::rules::enqueue::Options;
use crate::rules::keys::as_written;

/// Selects what [`record`] reads. The parameters are the columns that can be large, and those of the newest error: `w`,
/// `r` and `f` are the tables that the job may be in.
macro_rules! select_jobs {
    (
        payload: $payload:expr,
        options: $options:expr,
        progress: $progress:expr,
        result: $result:expr,
        last_error: $last_error:expr,
        last_failed_at: $last_failed_at:expr,
        $(also: $also:expr,)?
        from: $from:expr $(,)?
    ) => {
        concat!(
            "
    select j.id, j.kind, j.queue, j.priority, j.max_attempts, j.flags, j.idempotency_key, j.unique_key, j.timeout_ms,
           j.created_at, j.grp, j.flow, j.task,
           ", $payload, " as payload,
           ", $options, " as options,
           w.id is not null as is_waiting,
           r.id is not null as is_running,
           f.outcome::text as outcome,
           coalesce(w.attempt, r.attempt, f.attempts) as attempts,
           coalesce(w.interruptions, r.interruptions, f.interruptions) as interruptions,
           coalesce(w.lease_no, r.lease_no, f.lease_no) as lease_no,
           coalesce(w.run_at, j.run_at) as run_at,
           coalesce(w.since, r.claimed_at, f.finished_at) as updated_at,
           r.claimed_at,
           r.worker,
           (select h.name
              from longshore.workers h
             where h.id = r.worker) as worker_name,
           r.cancel_requested,
           ", $progress, " as progress,
           coalesce(f.started_at, (
             select b.started_at
               from longshore.attempts b
              where b.job = j.id
              order by b.lease_no desc
              limit 1)) as started_at,
           f.finished_at,
           ", $result, " as result,
           ", $last_error, " as last_error,
           ", $last_failed_at, " as last_failed_at", $(", ", $also,)? "
      from ", $from, "
      left join longshore.ready w on w.id = j.id
      left join longshore.running r on r.id = j.id
      left join longshore.finished f on f.id = j.id"
        )
    };
}
#[cfg(feature = "postgres")]
pub(in crate::store) use select_jobs;

/// The job `$1`; with its payload and its result if `$2`.
static JOB: Statement = Statement::new(concat!(
    select_jobs!(
        payload: "case when $2 then j.payload::text end",
        options: "j.options::text",
        progress: "r.progress::text",
        result: "case when $2 then f.result::text end",
        last_error: "coalesce(f.last_error, (
             select a.error
               from longshore.attempts a
              where a.job = j.id
                and a.error is not null
              order by a.lease_no desc
              limit 1))",
        last_failed_at: "(
             select a.ended_at
               from longshore.attempts a
              where a.job = j.id
                and a.error is not null
              order by a.lease_no desc
              limit 1)",
        from: "longshore.jobs j",
    ),
    "
     where j.id = $1"
));

/// One job with its history.
pub(super) async fn get(rows: &mut dyn Rows, id: JobId) -> Sql<Option<JobRecord>> {
    let Some(mut job) = job(rows, id, Payloads::Include).await? else { return Ok(None) };
    (job.errors, job.errors_omitted) = history(rows, id).await?;
    Ok(Some(job))
}

/// One job without its history.
pub(in crate::store) async fn job(
    rows: &mut dyn Rows,
    id: JobId,
    payloads: Payloads,
) -> Sql<Option<JobRecord>> {
    rows.row(&JOB, args![id, payloads == Payloads::Include]).await?.map(|row| record(id, row)).transpose()
}

/// The job of a row of [`select_jobs`], without its history.
pub(in crate::store) fn record(id: JobId, mut row: Row) -> Sql<JobRecord> {
    let (attempts, interruptions): (Option<u16>, Option<u16>) =
        (row.take("attempts")?, row.take("interruptions")?);
    let outcome: Option<String> = row.take("outcome")?;
    let status = match (row.take("is_waiting")?, row.take("is_running")?, outcome) {
        (true, ..) if attempts == Some(0) && interruptions == Some(0) => Status::Queued,
        (true, ..) => Status::Retrying,
        (false, true, _) => Status::Running,
        (false, false, Some(outcome)) => Outcome::from_stored(&outcome)?.status(),
        (false, false, None) => return Err(in_no_table(id).into()),
    };
    // Options that cannot be read are left out, so that the rest of the job is shown.
    let options = Options::from_stored(row.take::<Option<String>>("options")?.as_deref()).unwrap_or_default();
    let timeout_ms: Option<i64> = row.take("timeout_ms")?;
    let mut job = JobRecord {
        id,
        kind: row.take("kind")?,
        queue: row.take("queue")?,
        status,
        priority: row.take("priority")?,
        attempts: attempts.unwrap_or_default(),
        max_attempts: row.take("max_attempts")?,
        last_error: row.take("last_error")?,
        last_failed_at: row.take("last_failed_at")?,
        payload: json(&mut row, "payload")?.unwrap_or_else(|| RawValue::NULL.to_owned()),
        result: json(&mut row, "result")?,
        run_at: row.take("run_at")?,
        locked_at: None,
        locked_by: None,
        locked_by_name: None,
        cancel_requested: status == Status::Cancelled,
        idempotency_key: row.take::<Option<String>>("idempotency_key")?.map(as_written),
        unique_key: row.take::<Option<String>>("unique_key")?.map(as_written),
        group: row.take("grp")?,
        flow: row.take("flow")?,
        task: row.take("task")?,
        tags: options.tags,
        flags: row.take::<Option<Vec<String>>>("flags")?.unwrap_or_default(),
        context: options.context,
        metadata: options.metadata,
        progress: None,
        timeout: timeout_ms.and_then(|ms| u64::try_from(ms).ok()).map(Duration::from_millis),
        retry: options.retry,
        interruptions: interruptions.unwrap_or_default(),
        lease_no: row.take("lease_no")?,
        created_at: row.take("created_at")?,
        updated_at: row.take("updated_at")?,
        started_at: row.take("started_at")?,
        finished_at: if ListFilter::ENDED.contains(&status) { row.take("finished_at")? } else { None },
        errors: Vec::new(),
        errors_omitted: 0,
    };
    if status == Status::Running {
        job.locked_at = row.take("claimed_at")?;
        job.started_at = job.locked_at;
        job.locked_by = row.take("worker")?;
        job.locked_by_name = row.take("worker_name")?;
        job.cancel_requested = row.take("cancel_requested")?;
        job.progress = json(&mut row, "progress")?;
    }
    Ok(job)
}

static HISTORY: Statement = Statement::new(
    "
    select attempt, lease_no, worker, started_at, ended_at, what, error, omitted, count(*) over () as stored
      from longshore.attempts
     where job = $1
     order by lease_no desc
     limit $2",
);

/// The newest attempts, oldest first, and how many older ones there were.
async fn history(rows: &mut dyn Rows, id: JobId) -> Sql<(Vec<AttemptRecord>, u32)> {
    let (mut removed, mut stored) = (0, 0);
    let mut newest = Vec::new();
    for mut row in rows.rows(&HISTORY, args![id, i64::from(MAX_HISTORY) + 1]).await? {
        removed = removed.max(row.take::<Option<u32>>("omitted")?.unwrap_or(0));
        stored = row.take("stored")?;
        newest.push(AttemptRecord {
            attempt: row.take("attempt")?,
            lease_no: row.take("lease_no")?,
            worker: row.take("worker")?,
            started_at: row.take("started_at")?,
            ended_at: row.take("ended_at")?,
            what: row.parse("what", AttemptEnd::from_stored)?,
            error: row.take("error")?,
        });
    }
    debug_assert!(
        newest.is_sorted_by(|a: &AttemptRecord, b| a.lease_no > b.lease_no),
        "each lease of job {id} has at most one entry"
    );
    let omitted = removed + stored - newest.len() as u32;
    newest.reverse();
    Ok((newest, omitted))
}

fn json(row: &mut Row, name: &str) -> Sql<Option<Box<RawValue>>> {
    Ok(row.take::<Option<String>>(name)?.map(raw).transpose()?)
}

/// A text from a JSON column.
pub(in crate::store) fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|error| {
        Error::internal("a JSON column of the database contains text that is not JSON").with_source(error)
    })
}
