//! Stores durable steps: journals them under a lease, stores what a suspended job waits for, and deletes
//! both. `store/steps.rs` reads them.

use sqlx::Row;

use super::tx::{Sql, Tx};
use crate::store::events::is_expired;
use crate::store::{Fenced, NewStep, Settlement};

/// Locks the leases in the order of their ids, as everywhere. Like the statements of
/// `settle`, this waits only 2 s for a row that the user's own transaction has locked.
const SAVE_STEPS: &str = "
    with input as (
      select *
        from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''), (select $2::int4[]), (select $3::uuid[]), (select $4::text[]), (select $5::text[])) with ordinality
          as input(id, lease_no, worker, name, value, nth)),
    held as (
      select r.id, r.lease_no
        from longshore.running r
       where exists (
               select 1
                 from input i
                where i.id = r.id
                  and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
                  and i.worker = r.worker)
         and r.id = any((select $1::uuid[])::uuid[])
       order by r.id
         for no key update of r),
    progressed as (   -- attempts and interruptions count since the last step
      update longshore.running r
         set attempt = 1,
             interruptions = 0
        from held h
       where r.id = h.id
         and (r.attempt > 1 or r.interruptions > 0)),
    saved as (
      insert into longshore.steps (job, name, lease_no, saved_at, value)
      select distinct on (i.id, i.name) i.id, i.name, i.lease_no, longshore.clock(), i.value::json
        from input i
        join held h using (id, lease_no)
       order by i.id, i.name, i.nth
          on conflict (job, name) do update
         set lease_no = excluded.lease_no,
             saved_at = excluded.saved_at,
             until = null,
             value = excluded.value
       where steps.value is null)   -- a step that is done keeps its value
    select i.nth
      from input i
      join held h using (id, lease_no)";

pub(super) async fn save_steps(tx: &mut Tx<'_>, steps: &[NewStep]) -> Sql<Vec<Fenced>> {
    let rows = sqlx::query(tx.sql(SAVE_STEPS))
        .bind(steps.iter().map(|step| step.lease.id.0).collect::<Vec<_>>())
        .bind(steps.iter().map(|step| step.lease.lease_no).collect::<Vec<_>>())
        .bind(steps.iter().map(|step| step.lease.worker.0).collect::<Vec<_>>())
        .bind(steps.iter().map(|step| step.name.as_str()).collect::<Vec<_>>())
        .bind(steps.iter().map(|step| step.value.get()).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut results = vec![Fenced::LeaseLost; steps.len()];
    for row in rows {
        results[row.try_get::<i64, _>(0)? as usize - 1] = Fenced::Held;
    }
    Ok(results)
}

/// Deletes the checkpoints, journals and waits of jobs whose request was replaced or removed.
macro_rules! delete_progress {
    ($ids:literal) => {
        concat!(
            "
    deleted_checkpoints as (
      delete from longshore.checkpoints
       where job = any(array(",
            $ids,
            "))),
    deleted_steps as (
      delete from longshore.steps
       where job = any(array(",
            $ids,
            "))),
    deleted_waits as (
      delete from longshore.waits
       where job = any(array(",
            $ids,
            "))),"
        )
    };
}
pub(super) use delete_progress;

/// Whether a job waits in a step. When its journal is deleted, it must not keep waiting: nothing would wake
/// it.
macro_rules! was_suspended {
    ($id:literal) => {
        concat!("exists (select 1 from longshore.steps s where s.job = ", $id, " and s.value is null)")
    };
}
pub(super) use was_suspended;

/// Locks the lease, so that it cannot be taken before the settle ends it. Waits only 2 s for a locked row, as the
/// statements of `settle` do.
const SAVE_WAITS: &str = concat!(
    "
    with held as (
      select r.id
        from longshore.running r
       where r.id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
         and r.lease_no = $2   -- fence: a newer lease owns the row
         and r.worker = $3
         for no key update of r),
    emitted as (
      select exists (
        select 1
          from longshore.events e
         where e.name = any($6::text[])
           and not ",
    is_expired!("interval '7 days'"),
    ") as is_any),
    forgotten as (   -- waits that an earlier suspension left behind
      delete from longshore.waits
       where job = any(array(select id from held))
         and event <> all($6::text[])),
    journaled as (
      insert into longshore.steps (job, name, lease_no, saved_at, until)
      select h.id, i.step, $2, longshore.clock(), i.until
        from held h
       cross join unnest((select $4::text[]), (select $5::timestamptz[])) as i(step, until)
          on conflict (job, name) do update
         set lease_no = excluded.lease_no,
             until = excluded.until
       where steps.value is null),
    awaited as (
      insert into longshore.waits (event, job, lease_no, woken)
      select i.event, h.id, $2, $7 or m.is_any
        from held h
       cross join emitted m
       cross join unnest((select $6::text[])) as i(event)
          on conflict (event, job) do update
         set lease_no = excluded.lease_no,
             woken = excluded.woken)
    select is_any from emitted"
);

/// Journals what a suspended job waits for, if the lease is live. Returns whether one of the events has been emitted.
pub(super) async fn save_waits(tx: &mut Tx<'_>, settlement: &Settlement, events: &[String]) -> Sql<bool> {
    let Settlement { lease, waits, .. } = settlement;
    if waits.is_empty() {
        return Ok(false);
    }
    let row = sqlx::query(tx.sql(SAVE_WAITS))
        .bind(lease.id.0)
        .bind(lease.lease_no)
        .bind(lease.worker.0)
        .bind(waits.iter().map(|wait| wait.step.as_str()).collect::<Vec<_>>())
        .bind(waits.iter().map(|wait| wait.until).collect::<Vec<_>>())
        .bind(events)
        .bind(settlement.is_due_now())
        .fetch_one(&mut *tx.connection)
        .await?;
    Ok(row.try_get(0)?)
}
