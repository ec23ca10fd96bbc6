//! Moves of jobs between tables for operators' commands on single jobs. The rest of the commands is in
//! `store/operate.rs`.

use sqlx::Row;

use super::enqueue::split;
use super::flow_changes::{delete_links, note_ends};
use super::steps::{delete_progress, was_suspended};
use super::turns::{add_turns, add_turns_of_removed};
use super::tx::{Query, Sql, Tx};
use crate::job::JobId;
use crate::rules::enqueue::ValidEdit;
use crate::rules::lifecycle::{Finished, Waiting, When};

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

pub(super) async fn cancel(tx: &mut Tx<'_>, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool> {
    let query = bind_waiting(sqlx::query(tx.sql(CANCEL)), id, seen).bind(attempts as i16);
    has_changed(query, tx).await
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

pub(super) async fn run_now(tx: &mut Tx<'_>, id: JobId, seen: &Waiting) -> Sql<bool> {
    has_changed(bind_waiting(sqlx::query(tx.sql(RUN_NOW)), id, seen), tx).await
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

pub(super) async fn rewrite(tx: &mut Tx<'_>, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool> {
    let (run_at, delay_us) = split(edit.when.unwrap_or(When::NOW));
    let query = bind_waiting(sqlx::query(tx.sql(REWRITE)), id, seen)
        .bind(edit.priority)
        .bind(run_at)
        .bind(delay_us)
        .bind(edit.payload.clone())
        .bind(edit.when.is_some());
    has_changed(query, tx).await
}

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

/// Returns the job to `ready` with a fresh budget.
pub(super) async fn reopen(tx: &mut Tx<'_>, id: JobId, seen: &Finished) -> Sql<bool> {
    let query = sqlx::query(tx.sql(REOPEN))
        .bind(id.0)
        .bind(seen.lease_no)
        .bind(seen.outcome.as_str())
        .bind(seen.starts_over());
    has_changed(query, tx).await
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

pub(super) async fn remove(tx: &mut Tx<'_>, id: JobId, seen: &Finished) -> Sql<bool> {
    let query = sqlx::query(tx.sql(REMOVE)).bind(id.0).bind(seen.lease_no).bind(seen.outcome.as_str());
    has_changed(query, tx).await
}

/// Runs a statement that returns how many jobs it changed.
async fn has_changed(query: Query<'_>, tx: &mut Tx<'_>) -> Sql<bool> {
    let changed: i64 = query.fetch_one(&mut *tx.connection).await?.try_get(0)?;
    Ok(changed > 0)
}
