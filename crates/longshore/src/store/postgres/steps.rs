//! Durable steps: the journal of a job, and what it waits for.

use std::collections::HashMap;

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::inspect::raw;
use super::lease::fenced;
use super::tx::{Sql, Tx};
use crate::job::JobId;
use crate::store::{
    Fenced, Journaled, NewStep, SavedWork, Settlement, StepRecord, StepState, journals_that_fit,
};

const STEPS: &str = "
    select name, lease_no, saved_at, until, value::text
      from longshore.steps
     where job = $1
     order by name";

pub(super) async fn steps(tx: &mut Tx<'_>, id: JobId) -> Sql<Vec<StepRecord>> {
    let rows = sqlx::query(tx.sql(STEPS)).bind(id.0).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(step).collect()
}

fn step(row: &PgRow) -> Sql<StepRecord> {
    Ok(StepRecord {
        name: row.try_get(0)?,
        lease_no: row.try_get(1)?,
        saved_at: row.try_get(2)?,
        state: match row.try_get::<Option<String>, _>(4)? {
            Some(value) => StepState::Done(raw(value)?),
            None => StepState::Waiting { until: row.try_get(3)? },
        },
    })
}

const SAVED_WORK: &str = "
    select c.data::text, coalesce(s.bytes, 0)
      from unnest((select $1::uuid[])) with ordinality as i(id, nth)
      left join longshore.checkpoints c on c.job = i.id
      left join lateral (
             select sum(octet_length(name) + coalesce(octet_length(value::text), 0))::int8 as bytes
               from longshore.steps
              where job = i.id) as s on true
     order by i.nth";

const STEPS_OF: &str = "
    select name, lease_no, saved_at, until, value::text, job
      from longshore.steps
     where job = any($1::uuid[])
     order by name";

pub(super) async fn saved_work(tx: &mut Tx<'_>, ids: &[JobId], max_bytes: usize) -> Sql<Vec<SavedWork>> {
    let ids: Vec<Uuid> = ids.iter().map(|id| id.0).collect();
    let found: Vec<(Option<String>, i64)> =
        sqlx::query_as(tx.sql(SAVED_WORK)).bind(&ids).fetch_all(&mut *tx.connection).await?;
    let fits = journals_that_fit(found.iter().map(|(_, bytes)| *bytes as usize), max_bytes);
    let is_read = |i: &usize| fits[*i] && found[*i].1 > 0;
    let read: Vec<Uuid> = (0..ids.len()).filter(is_read).map(|i| ids[i]).collect();
    let mut steps = HashMap::<Uuid, Vec<StepRecord>>::new();
    if !read.is_empty() {
        let rows = sqlx::query(tx.sql(STEPS_OF)).bind(&read).fetch_all(&mut *tx.connection).await?;
        for row in &rows {
            steps.entry(row.try_get(5)?).or_default().push(step(row)?);
        }
    }
    let mut saved = Vec::with_capacity(ids.len());
    for ((id, fits), (checkpoint, _)) in ids.iter().zip(fits).zip(found) {
        saved.push(SavedWork {
            checkpoint: checkpoint.map(raw).transpose()?,
            steps: fits.then(|| steps.remove(id).unwrap_or_default()),
        });
    }
    Ok(saved)
}

/// The length of a value is known without reading the value.
const JOURNAL_SIZE: &str = "
    select count(*), coalesce(sum(octet_length(value::text)), 0)::int8
      from longshore.steps
     where job = $1";

const NAMED_STEPS: &str = "
    select name, lease_no, saved_at, until, value::text
      from longshore.steps
     where job = $1
       and name = any($2)
     order by name";

pub(super) async fn journaled(tx: &mut Tx<'_>, id: JobId, names: &[String]) -> Sql<Journaled> {
    let (steps, bytes): (i64, i64) =
        sqlx::query_as(tx.sql(JOURNAL_SIZE)).bind(id.0).fetch_one(&mut *tx.connection).await?;
    let rows = sqlx::query(tx.sql(NAMED_STEPS)).bind(id.0).bind(names).fetch_all(&mut *tx.connection).await?;
    let named = rows.iter().map(step).collect::<Sql<_>>()?;
    Ok(Journaled { steps: steps as usize, bytes: bytes as usize, named })
}

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
        results[row.try_get::<i64, _>(0)? as usize - 1] = fenced(true);
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

/// Whether a job waits in a step. When its journal is deleted, it must not wait on: nothing would
/// wake it.
macro_rules! was_suspended {
    ($id:literal) => {
        concat!("exists (select 1 from longshore.steps s where s.job = ", $id, " and s.value is null)")
    };
}
pub(super) use was_suspended;

const SAVE_WAITS: &str = "
    with forgotten as (   -- waits that an earlier suspension left behind
      delete from longshore.waits
       where job = $1
         and event <> all($5::text[])),
    journaled as (
      insert into longshore.steps (job, name, lease_no, saved_at, until)
      select $1, i.step, $2, longshore.clock(), i.until
        from unnest((select $3::text[]), (select $4::timestamptz[])) as i(step, until)
          on conflict (job, name) do update
         set lease_no = excluded.lease_no,
             until = excluded.until
       where steps.value is null)
    insert into longshore.waits (event, job, lease_no, woken)
    select event, $1, $2, $6
      from unnest((select $5::text[])) as i(event)
        on conflict (event, job) do update
       set lease_no = excluded.lease_no,
           woken = excluded.woken";

/// Journals what a suspended job waits for.
pub(super) async fn save_waits(tx: &mut Tx<'_>, settlement: &Settlement) -> Sql<()> {
    let Settlement { lease, waits, .. } = settlement;
    if waits.is_empty() {
        return Ok(());
    }
    sqlx::query(tx.sql(SAVE_WAITS))
        .bind(lease.id.0)
        .bind(lease.lease_no)
        .bind(waits.iter().map(|wait| wait.step.as_str()).collect::<Vec<_>>())
        .bind(waits.iter().map(|wait| wait.until).collect::<Vec<_>>())
        .bind(settlement.awaited_events())
        .bind(settlement.is_due_now())
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}
