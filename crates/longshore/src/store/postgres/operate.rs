//! Operators' commands on single jobs. Each is stored only if the job is still in
//! the state that the decision was made from.

use std::time::Duration;

use sqlx::Row;
use uuid::Uuid;

use super::advance::{delete_links, note_ends};
use super::enqueue::split;
use super::steps::{delete_progress, was_suspended};
use super::turns::{add_turns, add_turns_of_removed};
use super::tx::{Query, Sql, Tx};
use crate::error::Error;
use crate::job::{JobId, Outcome, WorkerId};
use crate::rules::enqueue::ValidEdit;
use crate::rules::lifecycle::{Finished, LeaseFlags, Running, State, Waiting, When};
use crate::store::operate::in_no_table;
use crate::store::{DeadFilter, Operated, Operation};

/// One statement, and so one snapshot: the job is in exactly one of the tables.
const LOCATE: &str = "
    select w.lease_no as waiting_lease_no, r.lease_no as running_lease_no, f.lease_no as finished_lease_no,
           coalesce(w.attempt, r.attempt) as attempt,
           coalesce(w.max_attempts, r.max_attempts) as max_attempts,
           coalesce(w.interruptions, r.interruptions) as interruptions,
           r.worker, r.started_at is not null as started, r.cancel_requested, r.superseded,
           f.outcome::text as outcome, coalesce(w.held, false) as held,
           exists (select 1 from longshore.flows o where o.id = j.flow and o.ended_at is null) as needed
      from longshore.jobs j
      left join longshore.ready w on w.id = j.id
      left join longshore.running r on r.id = j.id
      left join longshore.finished f on f.id = j.id
     where j.id = $1";

pub(super) async fn locate(tx: &mut Tx<'_>, id: JobId) -> Sql<Option<State>> {
    let Some(row) = sqlx::query(tx.sql(LOCATE)).bind(id.0).fetch_optional(&mut *tx.connection).await? else {
        return Ok(None);
    };
    let number = |column: &str| row.try_get::<i16, _>(column).map(|n| n as u16);
    if let Some(lease_no) = row.try_get("waiting_lease_no")? {
        return Ok(Some(State::Waiting(Waiting {
            lease_no,
            attempts: number("attempt")?,
            max_attempts: number("max_attempts")?,
            interruptions: number("interruptions")?,
            is_held: row.try_get("held")?,
        })));
    }
    if let Some(lease_no) = row.try_get("running_lease_no")? {
        return Ok(Some(State::Running(Running {
            lease_no,
            worker: WorkerId(row.try_get("worker")?),
            attempt: number("attempt")?,
            max_attempts: number("max_attempts")?,
            interruptions: number("interruptions")?,
            started: row.try_get("started")?,
            flags: LeaseFlags {
                cancel_requested: row.try_get("cancel_requested")?,
                superseded: row.try_get("superseded")?,
            },
        })));
    }
    if let Some(lease_no) = row.try_get("finished_lease_no")? {
        let outcome = Outcome::from_stored(row.try_get("outcome")?)?;
        let is_needed = row.try_get("needed")?;
        return Ok(Some(State::Finished(Finished { lease_no, outcome, is_needed })));
    }
    Err(in_no_table(id).into())
}

/// `max_wait` limits how long the command waits for the job, or a key that it needs, if
/// another client's open transaction has locked it.
pub(super) async fn operate(
    tx: &mut Tx<'_>,
    id: JobId,
    from: &State,
    to: &Operation,
    max_wait: Duration,
) -> Sql<Operated> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let done = match (from, to) {
        (State::Waiting(seen), Operation::Cancel { attempts }) => cancel(tx, id, seen, *attempts).await,
        (State::Waiting(seen), Operation::RunNow) => run_now(tx, id, seen).await,
        (State::Waiting(seen), Operation::Rewrite(edit)) => rewrite(tx, id, seen, edit).await,
        (State::Running(seen), Operation::RequestCancel) => request_cancel(tx, id, seen).await,
        (State::Finished(seen), Operation::Reopen) => reopen(tx, id, seen).await,
        (State::Finished(seen), Operation::ReopenWith(edit)) => reopen_with(tx, id, seen, edit).await,
        (State::Finished(seen), Operation::Remove) => remove(tx, id, seen).await,
        (from, to) => {
            Err(Error::internal(format!("the operation {to:?} does not apply to a job in state {from:?}"))
                .into())
        }
    }?;
    transaction.commit().await?;
    Ok(done)
}

/// Deletes a job from `ready`, if it is there in the state that was seen. The budget is
/// compared too: a key replacement renews it under the same lease number.
macro_rules! delete_waiting {
    () => {
        "
    with deleted as (
      delete from longshore.ready
       where id = $1
         and lease_no = $2
         and attempt = $3
         and max_attempts = $4
         and interruptions = $5
         and coalesce(held, false) = $6
      returning *),"
    };
}

fn bind_waiting<'q>(query: Query<'q>, id: JobId, seen: &Waiting) -> Query<'q> {
    query
        .bind(id.0)
        .bind(seen.lease_no)
        .bind(seen.attempts as i16)
        .bind(seen.max_attempts as i16)
        .bind(seen.interruptions as i16)
        .bind(seen.is_held)
}

const CANCEL: &str = concat!(
    delete_waiting!(),
    "
    finished_job as (
      insert into longshore.finished
             (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error, flow)
      select d.id, longshore.clock(), d.lease_no, 'cancelled', $7::int2, d.max_attempts, d.interruptions, (
               select a.error
                 from longshore.attempts a
                where a.job = d.id
                  and a.error is not null
                order by a.lease_no desc
                limit 1), d.flow
        from deleted d),",
    note_ends!("deleted", "false"),
    ",
    deleted_keys as (
      delete from longshore.keys
       where job = any(array(select id from deleted where keyed))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 1, 1, 'cancelled', 0, queue, kind
        from deleted),",
    add_turns_of_removed!("deleted"),
    "
    select count(*) from deleted"
);

async fn cancel(tx: &mut Tx<'_>, id: JobId, seen: &Waiting, attempts: u16) -> Sql<Operated> {
    let query = bind_waiting(sqlx::query(tx.sql(CANCEL)), id, seen).bind(attempts as i16);
    operated(query, tx).await
}

/// Inserts the rows deleted from `ready` again, due now.
macro_rules! requeue_now {
    () => {
        concat!(
            "
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow)
      select id, least(run_at, longshore.clock()), longshore.clock(), timeout_ms, lease_no, priority,
             attempt, max_attempts, interruptions, keyed, kind, queue, flags, grp, flow
        from deleted
      returning run_at, priority, queue, grp),",
            add_turns!("requeued")
        )
    };
}
pub(super) use requeue_now;

const RUN_NOW: &str = concat!(
    delete_waiting!(),
    requeue_now!(),
    "
    select count(*) from deleted"
);

async fn run_now(tx: &mut Tx<'_>, id: JobId, seen: &Waiting) -> Sql<Operated> {
    operated(bind_waiting(sqlx::query(tx.sql(RUN_NOW)), id, seen), tx).await
}

const REWRITE: &str = concat!(
    delete_waiting!(),
    "
    updated as (
      update longshore.jobs j
         set priority = coalesce($7::int2, j.priority),
             run_at = case when $11 then coalesce($8::timestamptz, longshore.clock() + $9 * interval '1 microsecond')
                           else j.run_at end,
             payload = coalesce($10::text::json, j.payload)
        from deleted d
       where j.id = d.id),",
    delete_progress!("select id from deleted where $10::text is not null"),
    "
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow, held)
      select id,
             case when held then run_at
                  when $11 then coalesce($8::timestamptz, longshore.clock() + $9 * interval '1 microsecond')
                  when $10::text is not null and ", was_suspended!("deleted.id"), " then least(run_at, longshore.clock())
                  else run_at end,
             longshore.clock(), timeout_ms, lease_no, coalesce($7::int2, priority),
             attempt, max_attempts, interruptions, keyed, kind, queue, flags, grp, flow, held
        from deleted
      returning run_at, priority, queue, grp),",
    add_turns!("requeued"),
    "
    select count(*) from deleted"
);

async fn rewrite(tx: &mut Tx<'_>, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<Operated> {
    let (run_at, delay_us) = split(edit.when.unwrap_or(When::NOW));
    let query = bind_waiting(sqlx::query(tx.sql(REWRITE)), id, seen)
        .bind(edit.priority)
        .bind(run_at)
        .bind(delay_us)
        .bind(edit.payload.clone())
        .bind(edit.when.is_some());
    operated(query, tx).await
}

const REQUEST_CANCEL: &str = "
    with updated as (
      update longshore.running
         set cancel_requested = true
       where id = $1
         and lease_no = $2
      returning id)
    select count(*) from updated";

async fn request_cancel(tx: &mut Tx<'_>, id: JobId, seen: &Running) -> Sql<Operated> {
    operated(sqlx::query(tx.sql(REQUEST_CANCEL)).bind(id.0).bind(seen.lease_no), tx).await
}

/// Locks the finished row first; it is deleted once the key is taken. So two retries of
/// one job cannot both succeed.
const LOCK_FINISHED: &str = "
    select j.unique_key
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.id = $1
       and f.lease_no = $2
       and f.outcome = $3::text::longshore.outcome
       for update of f";

const TAKE_KEY: &str = "
    insert into longshore.keys (key, job)
    values ($1, $2)
        on conflict (key) do nothing";

const KEY_HOLDER: &str = "
    select job
      from longshore.keys
     where key = $1";

const REOPEN: &str = concat!(
    "
    with deleted as (
      delete from longshore.finished
       where id = $1
         and lease_no = $2
         and outcome = $3::text::longshore.outcome
      returning id, lease_no, outcome, flow, skipped),
    noted as (   -- it counts as open again, and no longer as a failure
      insert into longshore.flow_changes (flow, job, failure)
      select flow, id, outcome <> 'succeeded' and skipped is not true
        from deleted
       where flow is not null),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -1, d.outcome, 0, j.queue, j.kind
        from deleted d
        join longshore.jobs j on j.id = d.id),
    deleted_steps as (
      delete from longshore.steps
       where job = any(array(select id from deleted where $4))),
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow)
      select d.id, longshore.clock(), longshore.clock(), j.timeout_ms, d.lease_no, j.priority, 0, j.max_attempts,
             0, j.unique_key is not null, j.kind, j.queue, j.flags, j.grp, j.flow
        from deleted d
        join longshore.jobs j on j.id = d.id
      returning run_at, priority, queue, grp),",
    add_turns!("requeued"),
    "
    select count(*) from deleted",
);

/// Returns the job to `ready` with a fresh budget, unless another live job owns its key.
async fn reopen(tx: &mut Tx<'_>, id: JobId, seen: &Finished) -> Sql<Operated> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let locked: Option<(Option<String>,)> = sqlx::query_as(tx.sql(LOCK_FINISHED))
        .bind(id.0)
        .bind(seen.lease_no)
        .bind(seen.outcome.as_str())
        .fetch_optional(&mut *tx.connection)
        .await?;
    let Some((unique_key,)) = locked else { return Ok(Operated::Moved) };
    if let Some(key) = unique_key {
        let taken = sqlx::query(tx.sql(TAKE_KEY)).bind(&key).bind(id.0).execute(&mut *tx.connection).await?;
        if taken.rows_affected() == 0 {
            let holder: Option<Uuid> =
                sqlx::query_scalar(tx.sql(KEY_HOLDER)).bind(&key).fetch_optional(&mut *tx.connection).await?;
            // The holder may have finished in between; then the caller reads the state
            // again.
            return Ok(holder.map_or(Operated::Moved, |holder| Operated::KeyTaken(JobId(holder))));
        }
    }
    let query = sqlx::query(tx.sql(REOPEN))
        .bind(id.0)
        .bind(seen.lease_no)
        .bind(seen.outcome.as_str())
        .bind(seen.starts_over());
    let done = operated(query, tx).await?;
    transaction.commit().await?;
    Ok(done)
}

/// Reopens a job and edits it. Nobody can claim it in between: both are in one transaction.
async fn reopen_with(tx: &mut Tx<'_>, id: JobId, seen: &Finished, edit: &ValidEdit) -> Sql<Operated> {
    match (reopen(tx, id, seen).await?, locate(tx, id).await?) {
        (Operated::Done, Some(State::Waiting(reopened))) => rewrite(tx, id, &reopened, edit).await,
        (Operated::Done, _) => Ok(Operated::Moved),
        (refused, _) => Ok(refused),
    }
}

const REMOVE: &str = concat!(
    "
    with deleted as (
      delete from longshore.finished
       where id = $1
         and lease_no = $2
         and outcome = $3::text::longshore.outcome
      returning id, outcome, flow),
    deleted_jobs as (
      delete from longshore.jobs
       where id = any(array(select id from deleted))
      returning id, queue, kind),
    deleted_attempts as (
      delete from longshore.attempts
       where job = any(array(select id from deleted))),",
    delete_progress!("select id from deleted"),
    delete_links!("select id from deleted where flow is not null"),
    "
    deleted_requests as (
      delete from longshore.merged_requests
       where job = any(array(select id from deleted))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -1, d.outcome, 0, j.queue, j.kind
        from deleted d
        join deleted_jobs j on j.id = d.id)
    select count(*) from deleted",
);

async fn remove(tx: &mut Tx<'_>, id: JobId, seen: &Finished) -> Sql<Operated> {
    let query = sqlx::query(tx.sql(REMOVE)).bind(id.0).bind(seen.lease_no).bind(seen.outcome.as_str());
    operated(query, tx).await
}

/// Runs a statement that returns how many jobs it changed.
async fn operated(query: Query<'_>, tx: &mut Tx<'_>) -> Sql<Operated> {
    let changed: i64 = query.fetch_one(&mut *tx.connection).await?.try_get(0)?;
    Ok(if changed > 0 { Operated::Done } else { Operated::Moved })
}

const DEAD_LETTERS: &str = "
    select f.id
      from longshore.finished f
      join longshore.jobs j on j.id = f.id
     where f.outcome = 'failed_permanent'
       and f.id > coalesce($1, '00000000-0000-0000-0000-000000000000')
       and ($2::text is null or j.kind = $2)
       and ($3::text is null or j.queue = $3)
       and ($5::int8 is null or f.error_group = $5)
     order by f.id
     limit $4";

pub(super) async fn dead_letters(tx: &mut Tx<'_>, filter: &DeadFilter) -> Sql<Vec<JobId>> {
    let ids: Vec<Uuid> = sqlx::query_scalar(tx.sql(DEAD_LETTERS))
        .bind(filter.after.map(|id| id.0))
        .bind(&filter.kind)
        .bind(&filter.queue)
        .bind(i64::from(filter.limit))
        .bind(filter.failure.map(|fingerprint| fingerprint.0))
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(ids.into_iter().map(JobId).collect())
}
