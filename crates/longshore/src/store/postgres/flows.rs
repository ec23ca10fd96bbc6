//! Flows: storing them and their members, and reading them. `advance.rs` changes them afterwards.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::enqueue::{INSERT_STEP, insert_members, split};
use super::inspect::raw;
use super::listen::notify_due;
use super::steps::save_steps;
use super::tx::{Query, Sql, Tx};
use crate::job::{FlowId, JobId, Outcome, Status};
use crate::rules::enqueue::ValidJob;
use crate::rules::flow::{Condition, MAX_MEMBERS, flow_event};
use crate::rules::keys::as_written;
use crate::rules::lifecycle::When;
use crate::store::{
    Added, Fenced, FlowFilter, FlowRecord, Lease, LinkRecord, NewChildren, NewFlow, NewLink, NewMember,
    NewStep, ParentRecord, PutFlow, Spawned, TaskRecord,
};

const INSERT_FLOW: &str = "
    insert into longshore.flows (id, name, key, created_at, deadline, members, open, sealed, links)
    select $1, $2, $3, longshore.clock(), longshore.clock() + $4 * interval '1 microsecond', $5, $5, $6, $7
     where not exists (select 1 from longshore.jobs where id = $1)
        on conflict do nothing
    returning id";

/// The flow with this id or, without one, with this key.
const FLOW_BY_ID_OR_KEY: &str = "
    select id
      from longshore.flows
     where id = $1
        or key = $2
     order by id = $1 desc
     limit 1";

const IS_JOB: &str = "
    select id
      from longshore.jobs
     where id = $1";

pub(super) async fn put_flow(tx: &mut Tx<'_>, flow: &NewFlow, max_wait: Duration) -> Sql<PutFlow> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let stored = store_flow(tx, flow).await?;
    transaction.commit().await?;
    Ok(stored)
}

/// Stores a flow in the caller's own transaction: no commit and no retry.
pub(super) async fn put_flow_in(tx: &mut Tx<'_>, flow: &NewFlow) -> Sql<PutFlow> {
    let stored = store_flow(tx, flow).await?;
    let startable: Vec<ValidJob> = flow.startable().cloned().collect();
    notify_due(tx, &startable).await?;
    Ok(stored)
}

async fn store_flow(tx: &mut Tx<'_>, flow: &NewFlow) -> Sql<PutFlow> {
    let deadline_us = flow.deadline.and_then(|deadline| split(When::After(deadline)).1);
    let inserted = sqlx::query(tx.sql(INSERT_FLOW))
        .bind(flow.id.0)
        .bind(&flow.name)
        .bind(&flow.key)
        .bind(deadline_us)
        .bind(flow.members.len() as i64)
        .bind(flow.is_sealed)
        .bind(flow.links.len() as i64)
        .fetch_optional(&mut *tx.connection)
        .await?;
    if inserted.is_none() {
        let found: Option<Uuid> = sqlx::query_scalar(tx.sql(FLOW_BY_ID_OR_KEY))
            .bind(flow.id.0)
            .bind(&flow.key)
            .fetch_optional(&mut *tx.connection)
            .await?;
        return match found {
            Some(id) if id == flow.id.0 => Ok(PutFlow::Created),
            Some(id) => Ok(PutFlow::Existing(FlowId(id))),
            None if flow.key.is_none() => Ok(PutFlow::IdOfJob),
            // A job has the id, or the flow that had the key has just been removed.
            None => {
                match sqlx::query(tx.sql(IS_JOB)).bind(flow.id.0).fetch_optional(&mut *tx.connection).await? {
                    Some(_) => Ok(PutFlow::IdOfJob),
                    None => {
                        Err(crate::Error::unavailable("idempotency_key: taken at the same moment; try again")
                            .into())
                    }
                }
            }
        };
    }
    store_members(tx, flow.id, &flow.members).await?;
    let callbacks =
        flow.callbacks.iter().map(|job| NewMember { job: job.clone(), task: None, is_held: true });
    let callbacks: Vec<NewMember> = callbacks.collect();
    for step in callbacks.chunks(INSERT_STEP) {
        insert_members(tx, None, step).await?;
    }
    insert_links(tx, &flow.links).await?;
    Ok(PutFlow::Created)
}

async fn store_members(tx: &mut Tx<'_>, flow: FlowId, members: &[NewMember]) -> Sql<()> {
    for step in members.chunks(INSERT_STEP) {
        insert_members(tx, Some(flow), step).await?;
    }
    Ok(())
}

const INSERT_LINKS: &str = "
    insert into longshore.links (parent, child, condition)
    select *
      from unnest($1::uuid[], $2::uuid[], $3::text[])";

async fn insert_links(tx: &mut Tx<'_>, links: &[NewLink]) -> Sql<()> {
    for step in links.chunks(INSERT_STEP) {
        sqlx::query(tx.sql(INSERT_LINKS))
            .bind(step.iter().map(|link| link.parent).collect::<Vec<_>>())
            .bind(step.iter().map(|link| link.child.0).collect::<Vec<_>>())
            .bind(step.iter().map(|link| link.condition.as_str()).collect::<Vec<_>>())
            .execute(&mut *tx.connection)
            .await?;
    }
    Ok(())
}

const LOCK_FLOW: &str = "
    select sealed, cancelled, members
      from longshore.flows
     where id = $1
       for no key update";

const STORED_JOBS: &str = "
    select count(*)
      from longshore.jobs
     where id = any($1)
       and flow = $2";

const COUNT_ADDED: &str = "
    update longshore.flows
       set members = members + $2,
           open = open + $2
     where id = $1";

const IS_PART_STORED: &str = "
    select exists (
      select 1
        from longshore.flow_parts
       where flow = $1
         and id = $2)";

const INSERT_PART: &str = "
    insert into longshore.flow_parts (flow, id)
    values ($1, $2)";

pub(super) async fn add_members(
    tx: &mut Tx<'_>,
    flow: FlowId,
    part: Option<Uuid>,
    members: &[NewMember],
    max_wait: Duration,
) -> Sql<Added> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let locked: Option<(bool, bool, i64)> =
        sqlx::query_as(tx.sql(LOCK_FLOW)).bind(flow.0).fetch_optional(&mut *tx.connection).await?;
    let Some((is_sealed, is_cancelled, before)) = locked else { return Ok(Added::NotFound) };
    let ids: Vec<Uuid> = members.iter().map(|member| member.job.id.0).collect();
    let stored: i64 = sqlx::query_scalar(tx.sql(STORED_JOBS))
        .bind(&ids)
        .bind(flow.0)
        .fetch_one(&mut *tx.connection)
        .await?;
    let is_part_stored = sqlx::query_scalar(tx.sql(IS_PART_STORED)).bind(flow.0).bind(part);
    if stored == ids.len() as i64 || is_part_stored.fetch_one(&mut *tx.connection).await? {
        return Ok(Added::Stored);
    }
    if is_cancelled {
        return Ok(Added::Cancelled);
    }
    if is_sealed {
        return Ok(Added::Sealed);
    }
    if before as usize + members.len() > MAX_MEMBERS {
        return Ok(Added::Full);
    }
    store_members(tx, flow, members).await?;
    let count = sqlx::query(tx.sql(COUNT_ADDED)).bind(flow.0).bind(members.len() as i64);
    count.execute(&mut *tx.connection).await?;
    if let Some(part) = part {
        sqlx::query(tx.sql(INSERT_PART)).bind(flow.0).bind(part).execute(&mut *tx.connection).await?;
    }
    transaction.commit().await?;
    Ok(Added::Stored)
}

/// The change that makes `advance` look at the flow: it may have ended.
const SEAL: &str = "
    with sealed as (
      update longshore.flows
         set sealed = true
       where id = $1
         and not sealed
      returning id),
    noted as (
      insert into longshore.flow_changes (flow)
      select id from sealed)
    select exists (select 1 from longshore.flows where id = $1)";

pub(super) async fn seal_flow(tx: &mut Tx<'_>, flow: FlowId, max_wait: Duration) -> Sql<bool> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let exists = sqlx::query_scalar(tx.sql(SEAL)).bind(flow.0).fetch_one(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(exists)
}

const LOCK_LEASE: &str = "
    select id
      from longshore.running
     where id = $1
       and lease_no = $2   -- fence: a newer lease owns the row
       and worker = $3
       for no key update";

const IS_STEP_DONE: &str = "
    select exists (
      select 1
        from longshore.steps
       where job = $1
         and name = $2
         and value is not null)";

const LOCK_CHILDREN: &str = "
    insert into longshore.flows as f (id, name, created_at, members, open, sealed, owned)
    values ($1, $2, longshore.clock(), 0, 0, true, true)
        on conflict (id) do update
       set owned = f.owned
    returning f.cancelled, f.members, f.ended_at is not null, f.owned";

/// A flow of children that had ended is open again, and so are the waits for its end.
const REOPEN_CHILDREN: &str = "
    with forgotten as (
      delete from longshore.events
       where name = $2)
    update longshore.flows
       set ended_at = null
     where id = $1";

/// Lets `advance` look at the flow: without new children it may have ended.
const LOOK_AT: &str = "
    insert into longshore.flow_changes (flow)
    values ($1)";

pub(super) async fn spawn(tx: &mut Tx<'_>, children: &NewChildren, max_wait: Duration) -> Sql<Spawned> {
    let NewChildren { lease, kind, step, value, members } = children;
    let flow = FlowId(lease.id.0);
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    if bind_lease(sqlx::query(tx.sql(LOCK_LEASE)), lease).fetch_optional(&mut *tx.connection).await?.is_none()
    {
        return Ok(Spawned::LeaseLost);
    }
    let is_done = sqlx::query_scalar(tx.sql(IS_STEP_DONE)).bind(lease.id.0).bind(step);
    if is_done.fetch_one(&mut *tx.connection).await? {
        return Ok(Spawned::Stored);
    }
    let (is_cancelled, before, has_ended, is_owned): (bool, i64, bool, bool) =
        sqlx::query_as(tx.sql(LOCK_CHILDREN)).bind(flow.0).bind(kind).fetch_one(&mut *tx.connection).await?;
    if !is_owned {
        return Ok(Spawned::IdOfFlow);
    }
    if is_cancelled {
        return Ok(Spawned::Cancelled);
    }
    if before as usize + members.len() > MAX_MEMBERS {
        return Ok(Spawned::Full);
    }
    if has_ended {
        let reopen = sqlx::query(tx.sql(REOPEN_CHILDREN)).bind(flow.0).bind(flow_event(flow));
        reopen.execute(&mut *tx.connection).await?;
    }
    store_members(tx, flow, members).await?;
    let count = sqlx::query(tx.sql(COUNT_ADDED)).bind(flow.0).bind(members.len() as i64);
    count.execute(&mut *tx.connection).await?;
    if members.is_empty() {
        sqlx::query(tx.sql(LOOK_AT)).bind(flow.0).execute(&mut *tx.connection).await?;
    }
    let step = NewStep { lease: *lease, name: step.clone(), value: value.clone() };
    if save_steps(tx, &[step]).await? != [Fenced::Held] {
        return Ok(Spawned::LeaseLost);
    }
    transaction.commit().await?;
    Ok(Spawned::Stored)
}

fn bind_lease<'q>(query: Query<'q>, lease: &Lease) -> Query<'q> {
    query.bind(lease.id.0).bind(lease.lease_no).bind(lease.worker.0)
}

macro_rules! flow_columns {
    () => {
        "id, name, members, open, failed, sealed, cancelled, key, created_at, deadline, ended_at, owned"
    };
}

const FLOW: &str = concat!("select ", flow_columns!(), " from longshore.flows where id = $1");

pub(super) async fn flow(tx: &mut Tx<'_>, id: FlowId) -> Sql<Option<FlowRecord>> {
    let row = sqlx::query(tx.sql(FLOW)).bind(id.0).fetch_optional(&mut *tx.connection).await?;
    row.as_ref().map(flow_record).transpose()
}

const FLOWS: &str = concat!(
    "
    select ",
    flow_columns!(),
    "
      from longshore.flows
     where ($1::text is null or name = $1)
       and ($2::bool is null or (ended_at is null) = $2)
       and ($3::uuid is null or id < $3)
     order by id desc
     limit $4"
);

pub(super) async fn flows(tx: &mut Tx<'_>, filter: &FlowFilter) -> Sql<Vec<FlowRecord>> {
    let rows = sqlx::query(tx.sql(FLOWS))
        .bind(&filter.name)
        .bind(filter.open)
        .bind(filter.before.map(|id| id.0))
        .bind(i64::from(filter.limit))
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(flow_record).collect()
}

fn flow_record(row: &PgRow) -> Sql<FlowRecord> {
    let failed: i64 = row.try_get("failed")?;
    let cancelled = row.try_get("cancelled")?;
    let ended_at: Option<_> = row.try_get("ended_at")?;
    Ok(FlowRecord {
        id: FlowId(row.try_get("id")?),
        name: row.try_get("name")?,
        status: FlowRecord::status(failed, cancelled, ended_at.is_some()),
        members: row.try_get::<i64, _>("members")? as u64,
        open: row.try_get::<i64, _>("open")? as u64,
        failed: failed as u64,
        sealed: row.try_get("sealed")?,
        cancelled,
        idempotency_key: row.try_get::<Option<String>, _>("key")?.map(as_written),
        created_at: row.try_get("created_at")?,
        deadline: row.try_get("deadline")?,
        ended_at,
        is_of_children: row.try_get("owned")?,
    })
}

const TASKS: &str = "
    select j.id, j.task, j.kind, j.queue, w.held, f.outcome::text, f.skipped, w.id is not null as waits,
           coalesce(w.attempt > 0 or w.interruptions > 0, false) as retries
      from (select id, task, kind, queue
              from longshore.jobs
             where flow = $1
               and ($2::uuid is null or id > $2)
             order by id
             limit $3) j
      left join longshore.ready w on w.id = j.id
      left join longshore.finished f on f.id = j.id
     order by j.id";

const LINKS_OF: &str = "
    select l.child, l.parent, j.task, l.condition, l.met
      from longshore.links l
      join longshore.jobs j on j.id = l.parent
     where l.child = any($1)
     order by l.parent";

pub(super) async fn tasks(
    tx: &mut Tx<'_>,
    flow: FlowId,
    after: Option<JobId>,
    limit: u32,
) -> Sql<Vec<TaskRecord>> {
    let rows = sqlx::query(tx.sql(TASKS))
        .bind(flow.0)
        .bind(after.map(|id| id.0))
        .bind(i64::from(limit))
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut tasks = rows.iter().map(task_record).collect::<Sql<Vec<_>>>()?;
    let places: HashMap<JobId, usize> = tasks.iter().enumerate().map(|(nth, task)| (task.id, nth)).collect();
    let ids: Vec<Uuid> = tasks.iter().map(|task| task.id.0).collect();
    for row in sqlx::query(tx.sql(LINKS_OF)).bind(ids).fetch_all(&mut *tx.connection).await? {
        let child = JobId(row.try_get(0)?);
        let link = LinkRecord {
            id: JobId(row.try_get(1)?),
            task: row.try_get(2)?,
            condition: Condition::from_stored(row.try_get(3)?)?,
            met: row.try_get(4)?,
        };
        tasks[places[&child]].after.push(link);
    }
    Ok(tasks)
}

fn task_record(row: &PgRow) -> Sql<TaskRecord> {
    let outcome = row.try_get::<Option<&str>, _>("outcome")?.map(Outcome::from_stored).transpose()?;
    let status = match outcome {
        Some(outcome) => outcome.status(),
        None if !row.try_get("waits")? => Status::Running,
        None if row.try_get("retries")? => Status::Retrying,
        None => Status::Queued,
    };
    Ok(TaskRecord {
        id: JobId(row.try_get("id")?),
        task: row.try_get("task")?,
        kind: row.try_get("kind")?,
        queue: row.try_get("queue")?,
        status,
        held: row.try_get::<Option<bool>, _>("held")?.unwrap_or(false),
        skipped: row.try_get::<Option<bool>, _>("skipped")?.unwrap_or(false),
        after: Vec::new(),
    })
}

const MEMBERS_IN: &str = "
    select count(*)
      from longshore.jobs
     where flow = $1
       and queue = any($2)";

pub(super) async fn members_in(tx: &mut Tx<'_>, flow: FlowId, queues: &[String]) -> Sql<u64> {
    let members = sqlx::query_scalar::<_, i64>(tx.sql(MEMBERS_IN)).bind(flow.0).bind(queues.to_vec());
    Ok(members.fetch_one(&mut *tx.connection).await? as u64)
}

const PARENTS: &str = "
    select l.parent, j.task, f.outcome::text, f.result::text,
           case when f.outcome <> 'succeeded' then f.last_error end
      from longshore.links l
      join longshore.jobs j on j.id = l.parent
      left join longshore.finished f on f.id = l.parent
     where l.child = $1
     order by l.parent";

pub(super) async fn parents(tx: &mut Tx<'_>, id: JobId) -> Sql<Vec<ParentRecord>> {
    let rows = sqlx::query(tx.sql(PARENTS)).bind(id.0).fetch_all(&mut *tx.connection).await?;
    rows.iter().map(parent_record).collect()
}

/// A callback is in no flow. A member's parent may have children of its own, and so be a flow as well.
const AWAITED_FLOW: &str = "
    select f.id
      from longshore.jobs j
      join longshore.links l on l.child = j.id
      join longshore.flows f on f.id = l.parent
     where j.id = $1
       and j.flow is null
       and l.met is null
    union all
    select job
      from longshore.waits
     where job = $1
       and event = $2
       and not woken
     limit 1";

pub(super) async fn awaited_flow(tx: &mut Tx<'_>, id: JobId) -> Sql<Option<FlowId>> {
    let found: Option<Uuid> = sqlx::query_scalar(tx.sql(AWAITED_FLOW))
        .bind(id.0)
        .bind(flow_event(FlowId(id.0)))
        .fetch_optional(&mut *tx.connection)
        .await?;
    Ok(found.map(FlowId))
}

const CHILDREN: &str = "
    select j.id, j.task, f.outcome::text, f.result::text,
           case when f.outcome <> 'succeeded' then f.last_error end
      from (select id, task
              from longshore.jobs
             where flow = $1
               and ($2::uuid is null or id > $2)
             order by id
             limit $3) j
      left join longshore.finished f on f.id = j.id
     order by j.id";

pub(super) async fn results(
    tx: &mut Tx<'_>,
    flow: FlowId,
    after: Option<JobId>,
    limit: u32,
) -> Sql<Vec<ParentRecord>> {
    let rows = sqlx::query(tx.sql(CHILDREN))
        .bind(flow.0)
        .bind(after.map(|id| id.0))
        .bind(i64::from(limit))
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(parent_record).collect()
}

fn parent_record(row: &PgRow) -> Sql<ParentRecord> {
    Ok(ParentRecord {
        id: JobId(row.try_get(0)?),
        task: row.try_get(1)?,
        outcome: row.try_get::<Option<&str>, _>(2)?.map(Outcome::from_stored).transpose()?,
        result: row.try_get::<Option<String>, _>(3)?.map(raw).transpose()?,
        error: row.try_get(4)?,
    })
}
