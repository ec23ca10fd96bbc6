//! Operations: changes of many jobs, and which process executes them.
//!
//! A process holds an operation until `held_until`, and every step holds it further. Another process takes
//! it after that. What the first one then stores changes nothing, because it names the holder.

use std::time::Duration;

use rusqlite::{Row, params};
use uuid::Uuid;

use super::tx::{Columns, DAY, Sql, Tx, decoded, json_list, micros};
use crate::job::{JobId, OperationId};
use crate::store::{
    Action, HeldOperation, Holder, NewOperation, OPERATION_RETENTION_DAYS, OperationFilter, OperationRecord,
    OperationState, OperationStep, Selection, clean,
};

pub(super) fn put_operation(tx: &Tx<'_>, operation: &NewOperation) -> Sql<()> {
    const PUT: &str = "
        insert into operations
               (id, action, filter, ids, queues, state, created_at, created_by, updated_at, expected)
        values (?1, ?2, ?3, ?4, ?5, 'running', ?6, ?7, ?6, ?8)
            on conflict do nothing";
    // Whether an earlier call stored this operation and only its reply was lost.
    const IS_STORED: &str = "
        select 1
          from operations
         where id = ?1
           and action = ?2
           and filter is ?3
           and ids is ?4
           and queues is ?5";
    let (id, action) = (operation.id.0.as_bytes(), operation.action.as_str());
    let filter = operation.stored_filter()?;
    let ids = match &operation.selection {
        Selection::Filter(_) => None,
        Selection::Ids(ids) => Some(json_list(&ids.iter().map(ToString::to_string).collect::<Vec<_>>())?),
    };
    let queues = operation.queues.as_deref().map(json_list).transpose()?;
    let expected = operation.expected.map(|expected| expected as i64);
    let params = params![id, action, filter, ids, queues, tx.now()?, operation.created_by, expected];
    if tx.execute(PUT, params)? > 0 {
        return Ok(());
    }
    match tx.row(IS_STORED, params![id, action, filter, ids, queues], |_| Ok(()))? {
        Some(()) => Ok(()),
        None => Err(operation.conflict().into()),
    }
}

/// The columns of an [`OperationRecord`].
macro_rules! operation_columns {
    () => {
        "id, action, state, filter, queues, expected, examined, changed, skipped, cursor, error,
               created_at, created_by, updated_at, ended_at"
    };
}

pub(super) fn operation(tx: &Tx<'_>, id: OperationId) -> Sql<Option<OperationRecord>> {
    const ONE: &str = concat!("select ", operation_columns!(), " from operations where id = ?1");
    tx.row(ONE, [id.0.as_bytes()], operation_record)
}

pub(super) fn operations(tx: &Tx<'_>, filter: &OperationFilter) -> Sql<Vec<OperationRecord>> {
    const PAGE: &str = concat!(
        "
        select ",
        operation_columns!(),
        "
          from operations
         where (?1 is null or state = ?1)
           and (?2 is null or (queues is not null and not exists (
                 select 1
                   from json_each(queues) q
                  where q.value not in (select value from json_each(?2)))))
           and (?3 is null or (created_at, id) < (
                 select o.created_at, o.id
                   from operations o
                  where o.id = ?3))
         order by created_at desc, id desc
         limit ?4"
    );
    let params = params![
        filter.state.map(OperationState::as_str),
        filter.queues.as_deref().map(json_list).transpose()?,
        filter.before.map(|id| *id.0.as_bytes()),
        filter.limit,
    ];
    tx.rows(PAGE, params, operation_record)
}

/// Whether an operation waits for a process that executes it.
pub(super) fn has_free_operation(tx: &Tx<'_>) -> Sql<bool> {
    const FREE: &str = "
        select 1
          from operations
         where state = 'running'
           and (held_until is null or held_until <= ?1)
         limit 1";
    Ok(tx.row(FREE, [tx.now()?], |_| Ok(()))?.is_some())
}

pub(super) fn take_operation(tx: &Tx<'_>, holder: Holder, hold: Duration) -> Sql<Option<HeldOperation>> {
    const TAKE: &str = concat!(
        "
        update operations
           set holder = ?1,
               held_until = ?3
         where id = (
               select id
                 from operations
                where state = 'running'
                  and (held_until is null or held_until <= ?2)
                order by held_until nulls first, created_at, id   -- operations take turns
                limit 1)
        returning ids, locked_cursor, ",
        operation_columns!()
    );
    let now = tx.now()?;
    tx.row(TAKE, params![holder.as_bytes(), now, now.saturating_add(micros(hold))], |row| {
        let ids = row.maybe_list("ids")?.map(|ids| {
            let parsed = ids.iter().map(|id| id.parse::<Uuid>().map(JobId));
            parsed.collect::<Result<Vec<JobId>, _>>()
        });
        let ids = ids
            .transpose()
            .map_err(|error| rusqlite::Error::from(rusqlite::types::FromSqlError::Other(Box::new(error))))?;
        let locked_cursor = row.get::<_, Option<[u8; 16]>>("locked_cursor")?;
        Ok(HeldOperation {
            record: operation_record(row)?,
            ids,
            locked_cursor: locked_cursor.map(|id| JobId(Uuid::from_bytes(id))),
        })
    })
}

pub(super) fn save_operation_step(
    tx: &Tx<'_>,
    id: OperationId,
    holder: Holder,
    step: &OperationStep,
) -> Sql<Option<OperationState>> {
    const SAVE: &str = "
        update operations
           set cursor = coalesce(?3, cursor),
               examined = ?4,   -- totals, because the statement may be repeated when its reply was lost
               changed = ?5,
               skipped = ?6,
               error = ?7,
               updated_at = ?8,
               held_until = case when state = 'running' then ?9 end,
               locked_cursor = ?10
         where id = ?1
           and holder = ?2   -- fence: another process may have taken it
        returning state";
    const LOCKED: &str = "
        insert into operation_locked (operation, job)
        values (?1, ?2)
            on conflict do nothing";
    const UNLOCKED: &str = "
        delete from operation_locked
         where operation = ?1
           and job = ?2";
    let now = tx.now()?;
    let params = params![
        id.0.as_bytes(),
        holder.as_bytes(),
        step.cursor.map(|id| *id.0.as_bytes()),
        step.examined as i64,
        step.changed as i64,
        step.skipped as i64,
        step.error.as_deref().map(clean),
        now,
        now.saturating_add(micros(step.hold)),
        step.locked_cursor.map(|id| *id.0.as_bytes()),
    ];
    let state = tx.row(SAVE, params, state_of)?;
    if state.is_some() {
        for (statement, jobs) in [(LOCKED, &step.locked), (UNLOCKED, &step.unlocked)] {
            for job in jobs {
                tx.execute(statement, [id.0.as_bytes(), job.0.as_bytes()])?;
            }
        }
    }
    Ok(state)
}

pub(super) fn locked_jobs(
    tx: &Tx<'_>,
    id: OperationId,
    before: Option<JobId>,
    limit: u32,
) -> Sql<Vec<JobId>> {
    const LOCKED: &str = "
        select job
          from operation_locked
         where operation = ?1
           and (?2 is null or job < ?2)
         order by job desc
         limit ?3";
    let params = params![id.0.as_bytes(), before.map(|id| *id.0.as_bytes()), limit];
    tx.rows(LOCKED, params, |row| row.uuid(0).map(JobId))
}

pub(super) fn end_operation(tx: &Tx<'_>, id: OperationId, holder: Holder, error: Option<&str>) -> Sql<bool> {
    const END: &str = "
        update operations
           set state = case when ?3 is null then 'done' else 'failed' end,
               error = ?3,
               updated_at = ?4,
               ended_at = ?4,
               held_until = null
         where id = ?1
           and holder = ?2
           and state = 'running'";
    let params = params![id.0.as_bytes(), holder.as_bytes(), error.map(clean), tx.now()?];
    Ok(tx.execute(END, params)? > 0)
}

/// The holder keeps what it holds until it has stored its step and noticed the stop.
pub(super) fn stop_operation(tx: &Tx<'_>, id: OperationId) -> Sql<Option<OperationState>> {
    const STOP: &str = "
        update operations
           set updated_at = case when state = 'running' then ?2 else updated_at end,
               state = case when state = 'running' then 'stopped' else state end
         where id = ?1
        returning state";
    tx.row(STOP, params![id.0.as_bytes(), tx.now()?], state_of)
}

pub(super) fn resume_operation(tx: &Tx<'_>, id: OperationId) -> Sql<Option<OperationState>> {
    const RESUME: &str = "
        update operations
           set updated_at = case when state in ('stopped', 'failed') then ?2 else updated_at end,
               ended_at = case when state = 'failed' then null else ended_at end,
               error = case when state in ('stopped', 'failed') then null else error end,
               state = case when state in ('stopped', 'failed') then 'running' else state end
         where id = ?1
        returning state";
    tx.row(RESUME, params![id.0.as_bytes(), tx.now()?], state_of)
}

pub(super) fn remove_operations(tx: &Tx<'_>, limit: u32) -> Sql<u64> {
    const REMOVE: &str = "
        delete from operations
         where id in (
               select id
                 from operations
                where state <> 'running'
                  and updated_at < ?1
                order by updated_at
                limit ?2)
        returning id";
    const REMOVE_LOCKED: &str = "
        delete from operation_locked
         where operation = ?1";
    let oldest = tx.now()?.saturating_sub(OPERATION_RETENTION_DAYS * DAY);
    let removed = tx.rows(REMOVE, params![oldest, limit], |row| row.get::<_, [u8; 16]>(0))?;
    for id in &removed {
        // Of those that were stopped or failed.
        tx.execute(REMOVE_LOCKED, [id])?;
    }
    Ok(removed.len() as u64)
}

fn state_of(row: &Row<'_>) -> rusqlite::Result<OperationState> {
    decoded(row.get_ref("state")?, OperationState::from_stored)
}

fn operation_record(row: &Row<'_>) -> rusqlite::Result<OperationRecord> {
    let number = |column: &str| row.get::<_, i64>(column).map(|n| n as u64);
    Ok(OperationRecord {
        id: OperationId(row.uuid("id")?),
        action: decoded(row.get_ref("action")?, Action::from_stored)?,
        state: state_of(row)?,
        filter: row.json("filter")?,
        queues: row.maybe_list("queues")?,
        expected: row.get::<_, Option<i64>>("expected")?.map(|n| n as u64),
        examined: number("examined")?,
        changed: number("changed")?,
        skipped: number("skipped")?,
        cursor: row.get::<_, Option<[u8; 16]>>("cursor")?.map(|id| JobId(Uuid::from_bytes(id))),
        error: row.get("error")?,
        created_at: row.time("created_at")?,
        created_by: row.get("created_by")?,
        updated_at: row.time("updated_at")?,
        ended_at: row.maybe_time("ended_at")?,
    })
}
