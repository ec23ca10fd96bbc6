//! Operations: changes of many jobs, and which process executes them.
//!
//! A process holds an operation until `held_until`, and every step holds it further. Another process takes
//! it after that. What the first one then stores changes nothing, because it names the holder.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::inspect::raw;
use super::tx::{Sql, Tx};
use crate::job::{JobId, OperationId};
use crate::store::{
    Action, HeldOperation, Holder, NewOperation, OperationFilter, OperationRecord, OperationState,
    OperationStep, Selection, clean, millis,
};

const PUT_OPERATION: &str = "
    insert into longshore.operations
           (id, action, filter, ids, queues, state, created_at, created_by, updated_at, expected)
    values ($1, $2, $3::text::json, $4, $5, 'running', longshore.clock(), $6, longshore.clock(), $7)
        on conflict do nothing";

/// Whether an earlier call stored this operation and only its reply was lost.
const IS_STORED: &str = "
    select exists (
             select 1
               from longshore.operations
              where id = $1
                and action = $2
                and filter::text is not distinct from $3
                and ids is not distinct from $4
                and queues is not distinct from $5)";

pub(super) async fn put_operation(tx: &mut Tx<'_>, operation: &NewOperation) -> Sql<()> {
    let filter = operation.stored_filter()?;
    let ids: Option<Vec<Uuid>> = match &operation.selection {
        Selection::Filter(_) => None,
        Selection::Ids(ids) => Some(ids.iter().map(|id| id.0).collect()),
    };
    let put = sqlx::query(tx.sql(PUT_OPERATION))
        .bind(operation.id.0)
        .bind(operation.action.as_str())
        .bind(&filter)
        .bind(&ids)
        .bind(&operation.queues)
        .bind(&operation.created_by)
        .bind(operation.expected.map(|expected| expected as i64))
        .execute(&mut *tx.connection)
        .await?;
    if put.rows_affected() > 0 {
        return Ok(());
    }
    let stored: bool = sqlx::query_scalar(tx.sql(IS_STORED))
        .bind(operation.id.0)
        .bind(operation.action.as_str())
        .bind(&filter)
        .bind(&ids)
        .bind(&operation.queues)
        .fetch_one(&mut *tx.connection)
        .await?;
    if stored { Ok(()) } else { Err(operation.conflict().into()) }
}

/// The columns of an [`OperationRecord`].
macro_rules! operation_columns {
    () => {
        "id, action, state, filter::text, queues, expected, examined, changed, skipped, cursor, error,
           created_at, created_by, updated_at, ended_at"
    };
}

const OPERATION: &str = concat!("select ", operation_columns!(), " from longshore.operations where id = $1");

pub(super) async fn operation(tx: &mut Tx<'_>, id: OperationId) -> Sql<Option<OperationRecord>> {
    let row = sqlx::query(tx.sql(OPERATION)).bind(id.0).fetch_optional(&mut *tx.connection).await?;
    row.as_ref().map(operation_record).transpose()
}

const OPERATIONS: &str = concat!(
    "
    select ",
    operation_columns!(),
    "
      from longshore.operations
     where ($1::text is null or state = $1)
       and ($2::text[] is null or queues <@ $2)
       and ($3::uuid is null or (created_at, id) < (
             select o.created_at, o.id
               from longshore.operations o
              where o.id = $3))
     order by created_at desc, id desc
     limit $4"
);

pub(super) async fn operations(tx: &mut Tx<'_>, filter: &OperationFilter) -> Sql<Vec<OperationRecord>> {
    let rows = sqlx::query(tx.sql(OPERATIONS))
        .bind(filter.state.map(OperationState::as_str))
        .bind(&filter.queues)
        .bind(filter.before.map(|id| id.0))
        .bind(i64::from(filter.limit))
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(operation_record).collect()
}

const HAS_FREE_OPERATION: &str = "
    select exists (
             select 1
               from longshore.operations
              where state = 'running'
                and (held_until is null or held_until <= longshore.clock()))";

/// Whether an operation waits for a process that executes it.
pub(super) async fn has_free_operation(tx: &mut Tx<'_>) -> Sql<bool> {
    Ok(sqlx::query_scalar(tx.sql(HAS_FREE_OPERATION)).fetch_one(&mut *tx.connection).await?)
}

const TAKE_OPERATION: &str = concat!(
    "
    update longshore.operations
       set holder = $1,
           held_until = longshore.clock() + $2 * interval '1 millisecond'
     where id = (
             select o.id
               from longshore.operations o
              where o.state = 'running'
                and (o.held_until is null or o.held_until <= longshore.clock())
              order by o.held_until nulls first, o.created_at, o.id   -- operations take turns
              limit 1
                for update skip locked)
    returning ids, locked_cursor, ",
    operation_columns!()
);

pub(super) async fn take_operation(
    tx: &mut Tx<'_>,
    holder: Holder,
    hold: Duration,
) -> Sql<Option<HeldOperation>> {
    // Almost always there is nothing to take, and nothing needs to be locked.
    if !has_free_operation(tx).await? {
        return Ok(None);
    }
    let query = sqlx::query(tx.sql(TAKE_OPERATION)).bind(holder).bind(millis(hold));
    let Some(row) = query.fetch_optional(&mut *tx.connection).await? else { return Ok(None) };
    let ids: Option<Vec<Uuid>> = row.try_get("ids")?;
    let ids = ids.map(|ids| ids.into_iter().map(JobId).collect());
    let locked_cursor = row.try_get::<Option<Uuid>, _>("locked_cursor")?.map(JobId);
    Ok(Some(HeldOperation { record: operation_record(&row)?, ids, locked_cursor }))
}

const SAVE_STEP: &str = "
    with saved as (
      update longshore.operations
         set cursor = coalesce($3, cursor),
             examined = $4,   -- totals, because the statement may be repeated when its reply was lost
             changed = $5,
             skipped = $6,
             error = $7,
             locked_cursor = $9,
             updated_at = longshore.clock(),
             held_until = case when state = 'running' then longshore.clock() + $8 * interval '1 millisecond' end
       where id = $1
         and holder = $2   -- fence: another process may have taken it
      returning id, state),
    locked as (
      insert into longshore.operation_locked (operation, job)
      select s.id, l.job
        from saved s
       cross join unnest($10::uuid[]) as l(job)
          on conflict do nothing),
    unlocked as (
      delete from longshore.operation_locked
       where operation = (select id from saved)
         and job = any($11))
    select state
      from saved";

pub(super) async fn save_operation_step(
    tx: &mut Tx<'_>,
    id: OperationId,
    holder: Holder,
    step: &OperationStep,
) -> Sql<Option<OperationState>> {
    let state: Option<String> = sqlx::query_scalar(tx.sql(SAVE_STEP))
        .bind(id.0)
        .bind(holder)
        .bind(step.cursor.map(|id| id.0))
        .bind(step.examined as i64)
        .bind(step.changed as i64)
        .bind(step.skipped as i64)
        .bind(step.error.as_deref().map(clean))
        .bind(step.hold.as_millis() as i64)
        .bind(step.locked_cursor.map(|id| id.0))
        .bind(step.locked.iter().map(|id| id.0).collect::<Vec<_>>())
        .bind(step.unlocked.iter().map(|id| id.0).collect::<Vec<_>>())
        .fetch_optional(&mut *tx.connection)
        .await?;
    state_of(state)
}

const LOCKED_JOBS: &str = "
    select job
      from longshore.operation_locked
     where operation = $1
       and ($2::uuid is null or job < $2)
     order by job desc
     limit $3";

pub(super) async fn locked_jobs(
    tx: &mut Tx<'_>,
    id: OperationId,
    before: Option<JobId>,
    limit: u32,
) -> Sql<Vec<JobId>> {
    let query = sqlx::query_scalar::<_, Uuid>(tx.sql(LOCKED_JOBS));
    let query = query.bind(id.0).bind(before.map(|id| id.0)).bind(i64::from(limit));
    Ok(query.fetch_all(&mut *tx.connection).await?.into_iter().map(JobId).collect())
}

const END_OPERATION: &str = "
    update longshore.operations
       set state = case when $3::text is null then 'done' else 'failed' end,
           error = $3,
           updated_at = longshore.clock(),
           ended_at = longshore.clock(),
           held_until = null
     where id = $1
       and holder = $2
       and state = 'running'";

pub(super) async fn end_operation(
    tx: &mut Tx<'_>,
    id: OperationId,
    holder: Holder,
    error: Option<&str>,
) -> Sql<bool> {
    let ended = sqlx::query(tx.sql(END_OPERATION))
        .bind(id.0)
        .bind(holder)
        .bind(error.map(clean))
        .execute(&mut *tx.connection)
        .await?;
    Ok(ended.rows_affected() > 0)
}

/// The holder keeps what it holds until it has stored its step and noticed the stop.
const STOP_OPERATION: &str = "
    update longshore.operations
       set updated_at = case when state = 'running' then longshore.clock() else updated_at end,
           state = case when state = 'running' then 'stopped' else state end
     where id = $1
    returning state";

pub(super) async fn stop_operation(tx: &mut Tx<'_>, id: OperationId) -> Sql<Option<OperationState>> {
    let query = sqlx::query_scalar(tx.sql(STOP_OPERATION)).bind(id.0);
    state_of(query.fetch_optional(&mut *tx.connection).await?)
}

const RESUME_OPERATION: &str = "
    update longshore.operations
       set updated_at = case when state in ('stopped', 'failed') then longshore.clock() else updated_at end,
           ended_at = case when state = 'failed' then null else ended_at end,
           error = case when state in ('stopped', 'failed') then null else error end,
           state = case when state in ('stopped', 'failed') then 'running' else state end
     where id = $1
    returning state";

pub(super) async fn resume_operation(tx: &mut Tx<'_>, id: OperationId) -> Sql<Option<OperationState>> {
    let query = sqlx::query_scalar(tx.sql(RESUME_OPERATION)).bind(id.0);
    state_of(query.fetch_optional(&mut *tx.connection).await?)
}

const REMOVE_OPERATIONS: &str = "
    with deleted as (
      delete from longshore.operations
       where id = any(array(
               select id
                 from longshore.operations
                where state <> 'running'
                  and updated_at < longshore.clock() - interval '7 days'
                order by updated_at
                limit $1
                  for update skip locked))
      returning id),
    deleted_locked as (   -- of those that were stopped or failed
      delete from longshore.operation_locked
       where operation = any(array(select id from deleted)))
    select count(*) from deleted";

pub(super) async fn remove_operations(tx: &mut Tx<'_>, limit: u32) -> Sql<u64> {
    let query = sqlx::query_scalar::<_, i64>(tx.sql(REMOVE_OPERATIONS)).bind(i64::from(limit));
    Ok(query.fetch_one(&mut *tx.connection).await?.unsigned_abs())
}

fn state_of(stored: Option<String>) -> Sql<Option<OperationState>> {
    Ok(stored.map(|state| OperationState::from_stored(&state)).transpose()?)
}

fn operation_record(row: &PgRow) -> Sql<OperationRecord> {
    let number = |column: &str| row.try_get::<i64, _>(column).map(|n| n as u64);
    Ok(OperationRecord {
        id: OperationId(row.try_get("id")?),
        action: Action::from_stored(row.try_get("action")?)?,
        state: OperationState::from_stored(row.try_get("state")?)?,
        filter: row.try_get::<Option<String>, _>("filter")?.map(raw).transpose()?,
        queues: row.try_get("queues")?,
        expected: row.try_get::<Option<i64>, _>("expected")?.map(|n| n as u64),
        examined: number("examined")?,
        changed: number("changed")?,
        skipped: number("skipped")?,
        cursor: row.try_get::<Option<Uuid>, _>("cursor")?.map(JobId),
        error: row.try_get("error")?,
        created_at: row.try_get("created_at")?,
        created_by: row.try_get("created_by")?,
        updated_at: row.try_get("updated_at")?,
        ended_at: row.try_get("ended_at")?,
    })
}
