//! Operators' commands on single jobs. Each is stored only if the job is still in
//! the state that the decision was made from.

use sqlx::Row;
use uuid::Uuid;

use super::enqueue::split;
use super::tx::{Sql, Tx};
use crate::enqueue::ValidEdit;
use crate::error::Error;
use crate::job::{JobId, Outcome, WorkerId};
use crate::lifecycle::{Finished, Flags, Running, State, Waiting, When};
use crate::store::{DeadFilter, Operated, Operation};

/// One statement, one snapshot: a job is seen in exactly one place.
const LOCATE: &str = "
    select w.lease_no, w.attempt, w.max_attempts, w.interruptions,
           r.lease_no, r.worker, r.attempt, r.max_attempts, r.interruptions, r.started_at is not null,
           r.cancel_requested, r.superseded,
           f.lease_no, f.outcome::text
      from longshore.jobs j
      left join longshore.ready w on w.id = j.id
      left join longshore.running r on r.id = j.id
      left join longshore.finished f on f.id = j.id
     where j.id = $1";

pub(super) async fn locate(tx: &mut Tx<'_>, id: JobId) -> Sql<Option<State>> {
    let Some(row) = sqlx::query(tx.sql(LOCATE)).bind(id.0).fetch_optional(&mut *tx.connection).await? else {
        return Ok(None);
    };
    let small = |i: usize| row.try_get::<i16, _>(i).map(|n| n as u16);
    if let Some(lease_no) = row.try_get(0)? {
        let (attempts, max_attempts, interruptions) = (small(1)?, small(2)?, small(3)?);
        return Ok(Some(State::Waiting(Waiting { lease_no, attempts, max_attempts, interruptions })));
    }
    if let Some(lease_no) = row.try_get(4)? {
        return Ok(Some(State::Running(Running {
            lease_no,
            worker: WorkerId(row.try_get(5)?),
            attempt: small(6)?,
            max_attempts: small(7)?,
            interruptions: small(8)?,
            started: row.try_get(9)?,
            flags: Flags { cancel_requested: row.try_get(10)?, superseded: row.try_get(11)? },
        })));
    }
    if let Some(lease_no) = row.try_get(12)? {
        let outcome = Outcome::from_stored(row.try_get(13)?)?;
        return Ok(Some(State::Finished(Finished { lease_no, outcome })));
    }
    Err(Error::internal(format!("job {id} is in no table; run `longshore check`")).into())
}

const CANCEL: &str = "
    with gone as (
      delete from longshore.ready
       where id = $1
         and lease_no = $2
         and attempt = $3   -- a replaced job begins anew under the same lease number
      returning *),
    ended as (
      insert into longshore.finished
             (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error)
      select g.id, longshore.clock(), g.lease_no, 'cancelled', $3::int2, g.max_attempts, g.interruptions, (
               select a.error
                 from longshore.attempts a
                where a.job = g.id
                  and a.error is not null
                order by a.lease_no desc
                limit 1)
        from gone g),
    freed as (
      delete from longshore.keys
       where job = any(array(select id from gone where keyed))),
    counted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 1, 1, 'cancelled', 0, queue, kind
        from gone)
    select count(*) from gone";

const REQUEST_CANCEL: &str = "
    with told as (
      update longshore.running
         set cancel_requested = true
       where id = $1
         and lease_no = $2
      returning id)
    select count(*) from told";

const RUN_NOW: &str = "
    with gone as (
      delete from longshore.ready
       where id = $1
         and lease_no = $2
      returning *),
    waiting as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select id, least(run_at, longshore.clock()), longshore.clock(), timeout_ms, lease_no, priority,
             attempt, max_attempts, interruptions, keyed, kind, queue, flags
        from gone)
    select count(*) from gone";

const REMOVE: &str = "
    with gone as (
      delete from longshore.finished
       where id = $1
         and lease_no = $2
      returning id, outcome),
    forgotten as (
      delete from longshore.jobs
       where id = any(array(select id from gone))
      returning id, queue, kind),
    history as (
      delete from longshore.attempts
       where job = any(array(select id from gone))),
    saved as (
      delete from longshore.checkpoints
       where job = any(array(select id from gone))),
    uncounted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -1, g.outcome, 0, j.queue, j.kind
        from gone g
        join forgotten j on j.id = g.id)
    select count(*) from gone";

pub(super) async fn operate(tx: &mut Tx<'_>, id: JobId, from: &State, to: &Operation) -> Sql<Operated> {
    let lease_no = match from {
        State::Waiting(job) => job.lease_no,
        State::Running(job) => job.lease_no,
        State::Finished(job) => job.lease_no,
    };
    let statement = match to {
        Operation::Reopen => return reopen(tx, id, lease_no).await,
        Operation::Rewrite(edit) => return rewrite(tx, id, lease_no, edit).await,
        Operation::Cancel { .. } => CANCEL,
        Operation::RequestCancel => REQUEST_CANCEL,
        Operation::RunNow => RUN_NOW,
        Operation::Remove => REMOVE,
    };
    let query = sqlx::query_scalar(tx.sql(statement)).bind(id.0).bind(lease_no);
    let query = match to {
        Operation::Cancel { attempts } => query.bind(*attempts as i16),
        _ => query,
    };
    Ok(operated(query.fetch_one(&mut *tx.connection).await?))
}

const REWRITE: &str = "
    with gone as (
      delete from longshore.ready
       where id = $1
         and lease_no = $2
      returning *),
    changed as (
      update longshore.jobs j
         set priority = coalesce($3::int2, j.priority),
             run_at = case when $7 then coalesce($4::timestamptz, longshore.clock() + $5 * interval '1 microsecond')
                           else j.run_at end,
             payload = coalesce($6::text::json, j.payload)
        from gone g
       where j.id = g.id),
    waiting as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select id,
             case when $7 then coalesce($4::timestamptz, longshore.clock() + $5 * interval '1 microsecond')
                  else run_at end,
             since, timeout_ms, lease_no, coalesce($3::int2, priority),
             attempt, max_attempts, interruptions, keyed, kind, queue, flags
        from gone)
    select count(*) from gone";

async fn rewrite(tx: &mut Tx<'_>, id: JobId, lease_no: i32, edit: &ValidEdit) -> Sql<Operated> {
    let (run_at, delay_us) = split(edit.when.unwrap_or(When::NOW));
    let done = sqlx::query_scalar(tx.sql(REWRITE))
        .bind(id.0)
        .bind(lease_no)
        .bind(edit.priority)
        .bind(run_at)
        .bind(delay_us)
        .bind(&edit.payload)
        .bind(edit.when.is_some())
        .fetch_one(&mut *tx.connection)
        .await?;
    Ok(operated(done))
}

/// The finished row is locked first and deleted after the key is won, so that
/// two retries of one job cannot both think they did it.
const LOCK_FINISHED: &str = "
    select j.unique_key
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.id = $1
       and f.lease_no = $2
       for update of f";

const TAKE_KEY: &str = "
    insert into longshore.keys (key, job)
    values ($1, $2)
        on conflict (key) do nothing";

const KEY_HOLDER: &str = "select job from longshore.keys where key = $1";

const REOPEN: &str = "
    with gone as (
      delete from longshore.finished
       where id = $1
         and lease_no = $2
      returning id, lease_no, outcome),
    uncounted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -1, g.outcome, 0, j.queue, j.kind
        from gone g
        join longshore.jobs j on j.id = g.id),
    waiting as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select g.id, longshore.clock(), longshore.clock(), j.timeout_ms, g.lease_no, j.priority, 0, j.max_attempts,
             0, j.unique_key is not null, j.kind, j.queue, j.flags
        from gone g
        join longshore.jobs j on j.id = g.id)
    select count(*) from gone";

async fn reopen(tx: &mut Tx<'_>, id: JobId, lease_no: i32) -> Sql<Operated> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let locked: Option<(Option<String>,)> = sqlx::query_as(tx.sql(LOCK_FINISHED))
        .bind(id.0)
        .bind(lease_no)
        .fetch_optional(&mut *tx.connection)
        .await?;
    let Some((unique_key,)) = locked else { return Ok(Operated::Moved) };
    if let Some(key) = unique_key {
        let won = sqlx::query(tx.sql(TAKE_KEY)).bind(&key).bind(id.0).execute(&mut *tx.connection).await?;
        if won.rows_affected() == 0 {
            let holder: Option<Uuid> =
                sqlx::query_scalar(tx.sql(KEY_HOLDER)).bind(&key).fetch_optional(&mut *tx.connection).await?;
            // The holder may have ended in between: then look again.
            return Ok(holder.map_or(Operated::Moved, |holder| Operated::KeyTaken(JobId(holder))));
        }
    }
    let done =
        sqlx::query_scalar(tx.sql(REOPEN)).bind(id.0).bind(lease_no).fetch_one(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(operated(done))
}

fn operated(rows: i64) -> Operated {
    if rows > 0 { Operated::Done } else { Operated::Moved }
}

const DEAD_LETTERS: &str = "
    select f.id
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.outcome = 'failed_permanent'
       and f.id > coalesce($1, '00000000-0000-0000-0000-000000000000')
       and ($2::text is null or j.kind = $2)
       and ($3::text is null or j.queue = $3)
     order by f.id
     limit $4";

pub(super) async fn dead_letters(tx: &mut Tx<'_>, filter: &DeadFilter) -> Sql<Vec<JobId>> {
    let ids: Vec<Uuid> = sqlx::query_scalar(tx.sql(DEAD_LETTERS))
        .bind(filter.after.map(|id| id.0))
        .bind(&filter.kind)
        .bind(&filter.queue)
        .bind(i64::from(filter.limit))
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(ids.into_iter().map(JobId).collect())
}
