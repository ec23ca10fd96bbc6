//! Flows: storing them and their members, and reading them. `advance.rs` changes them afterwards.

use rusqlite::{Row, params};
use uuid::Uuid;

use super::enqueue::insert_member;
use super::steps::save_steps;
use super::tx::{Columns, Sql, Tx, json_list, micros};
use crate::job::{FlowId, JobId, Status};
use crate::rules::flow::{MAX_MEMBERS, flow_event};
use crate::rules::keys::as_written;
use crate::store::{
    Added, FlowFilter, FlowRecord, LinkRecord, NewChildren, NewFlow, NewLink, NewMember, NewStep,
    ParentRecord, PutFlow, Spawned, TaskRecord,
};

pub(super) fn put_flow(tx: &Tx<'_>, flow: &NewFlow) -> Sql<PutFlow> {
    const INSERT: &str = "
        insert into flows (id, name, key, created_at, deadline, members, open, sealed, links)
        select ?1, ?2, ?3, ?4, ?5, ?6, ?6, ?7, ?8
         where not exists (select 1 from jobs where id = ?1)
            on conflict do nothing";
    const BY_ID_OR_KEY: &str = "
        select id
          from flows
         where id = ?1
            or key = ?2
         order by id = ?1 desc
         limit 1";
    let now = tx.now()?;
    let deadline = flow.deadline.map(|deadline| now.saturating_add(micros(deadline)));
    let members = flow.members.len() as i64;
    let id = flow.id.0.as_bytes();
    let links = flow.links.len() as i64;
    let inserted =
        tx.execute(INSERT, params![id, flow.name, flow.key, now, deadline, members, flow.is_sealed, links])?;
    if inserted == 0 {
        let found = tx.row(BY_ID_OR_KEY, params![id, flow.key], |row| row.uuid(0))?;
        return Ok(match found {
            Some(id) if id != flow.id.0 => PutFlow::Existing(FlowId(id)),
            Some(_) => PutFlow::Created,
            None => PutFlow::IdOfJob,
        });
    }
    store_members(tx, flow.id, &flow.members)?;
    for job in &flow.callbacks {
        insert_member(tx, None, &NewMember { job: job.clone(), task: None, is_held: true })?;
    }
    insert_links(tx, &flow.links)?;
    Ok(PutFlow::Created)
}

fn store_members(tx: &Tx<'_>, flow: FlowId, members: &[NewMember]) -> Sql<()> {
    members.iter().try_for_each(|member| insert_member(tx, Some(flow), member))
}

fn insert_links(tx: &Tx<'_>, links: &[NewLink]) -> Sql<()> {
    const INSERT: &str = "
        insert into links (parent, child, condition)
        values (?1, ?2, ?3)";
    for link in links {
        let params = params![link.parent.as_bytes(), link.child.0.as_bytes(), link.condition.as_str()];
        tx.execute(INSERT, params)?;
    }
    Ok(())
}

const COUNT_ADDED: &str = "
    update flows
       set members = members + ?2,
           open = open + ?2
     where id = ?1";

pub(super) fn add_members(
    tx: &Tx<'_>,
    flow: FlowId,
    part: Option<Uuid>,
    members: &[NewMember],
) -> Sql<Added> {
    const FLOW: &str = "
        select sealed,
               cancelled,
               members
          from flows
         where id = ?1";
    const STORED: &str = "
        select 1
          from jobs
         where id = ?1
           and flow = ?2";
    const IS_PART_STORED: &str = "
        select 1
          from flow_parts
         where flow = ?1
           and id = ?2";
    const INSERT_PART: &str = "
        insert into flow_parts (flow, id)
        values (?1, ?2)";
    let id = flow.0.as_bytes();
    let found = tx.row(FLOW, [id], |row| Ok((row.get(0)?, row.get(1)?, row.get::<_, i64>(2)?)))?;
    let Some((is_sealed, is_cancelled, before)) = found else { return Ok(Added::NotFound) };
    let mut stored = 0;
    for member in members {
        stored += usize::from(tx.row(STORED, params![member.job.id.0.as_bytes(), id], |_| Ok(()))?.is_some());
    }
    let part = part.as_ref().map(Uuid::as_bytes);
    let is_part_stored = tx.row(IS_PART_STORED, params![id, part], |_| Ok(()))?.is_some();
    if stored == members.len() || is_part_stored {
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
    store_members(tx, flow, members)?;
    tx.execute(COUNT_ADDED, params![id, members.len() as i64])?;
    if part.is_some() {
        tx.execute(INSERT_PART, params![id, part])?;
    }
    Ok(Added::Stored)
}

pub(super) fn seal_flow(tx: &Tx<'_>, flow: FlowId) -> Sql<bool> {
    const SEAL: &str = "
        update flows
           set sealed = true
         where id = ?1
           and not sealed";
    // The change that makes `advance` look at the flow: it may have ended.
    const NOTE: &str = "
        insert into flow_changes (flow)
        values (?1)";
    const EXISTS: &str = "
        select 1
          from flows
         where id = ?1";
    let id = flow.0.as_bytes();
    if tx.execute(SEAL, [id])? > 0 {
        tx.execute(NOTE, [id])?;
    }
    Ok(tx.row(EXISTS, [id], |_| Ok(()))?.is_some())
}

pub(super) fn spawn(tx: &Tx<'_>, children: &NewChildren) -> Sql<Spawned> {
    const LEASE: &str = "
        select 1
          from running
         where id = ?1
           and lease_no = ?2   -- fence: a newer lease owns the row
           and worker = ?3";
    const IS_STEP_DONE: &str = "
        select 1
          from steps
         where job = ?1
           and name = ?2
           and value is not null";
    const FLOW: &str = "
        select cancelled,
               members,
               ended_at is not null,
               owned
          from flows
         where id = ?1";
    const INSERT: &str = "
        insert into flows (id, name, created_at, members, open, sealed, owned)
        values (?1, ?2, ?3, 0, 0, 1, 1)
            on conflict (id) do nothing";
    // A flow of children that had ended is open again, and so are the waits for its end.
    const FORGET_END: &str = "
        delete from events
         where name = ?1";
    const REOPEN: &str = "
        update flows
           set ended_at = null
         where id = ?1";
    // Lets `advance` look at the flow: without new children it may have ended.
    const LOOK_AT: &str = "
        insert into flow_changes (flow)
        values (?1)";
    let NewChildren { lease, kind, step, value, members } = children;
    let flow = FlowId(lease.id.0);
    let id = lease.id.0.as_bytes();
    if tx.row(LEASE, params![id, lease.lease_no, lease.worker.0.as_bytes()], |_| Ok(()))?.is_none() {
        return Ok(Spawned::LeaseLost);
    }
    if tx.row(IS_STEP_DONE, params![id, step], |_| Ok(()))?.is_some() {
        return Ok(Spawned::Stored);
    }
    let found =
        tx.row(FLOW, [id], |row| Ok((row.get(0)?, row.get::<_, i64>(1)?, row.get(2)?, row.get(3)?)))?;
    let (is_cancelled, before, has_ended, is_owned) = found.unwrap_or((false, 0, false, true));
    if !is_owned {
        return Ok(Spawned::IdOfFlow);
    }
    if is_cancelled {
        return Ok(Spawned::Cancelled);
    }
    if before as usize + members.len() > MAX_MEMBERS {
        return Ok(Spawned::Full);
    }
    tx.execute(INSERT, params![id, kind, tx.now()?])?;
    if has_ended {
        tx.execute(FORGET_END, [flow_event(flow)])?;
        tx.execute(REOPEN, [id])?;
    }
    store_members(tx, flow, members)?;
    tx.execute(COUNT_ADDED, params![id, members.len() as i64])?;
    if members.is_empty() {
        tx.execute(LOOK_AT, [id])?;
    }
    save_steps(tx, &[NewStep { lease: *lease, name: step.clone(), value: value.clone() }])?;
    Ok(Spawned::Stored)
}

macro_rules! flow_columns {
    () => {
        "id, name, members, open, failed, sealed, cancelled, key, created_at, deadline, ended_at, owned"
    };
}

pub(super) fn flow(tx: &Tx<'_>, id: FlowId) -> Sql<Option<FlowRecord>> {
    const FLOW: &str = concat!("select ", flow_columns!(), " from flows where id = ?1");
    tx.row(FLOW, [id.0.as_bytes()], flow_record)
}

pub(super) fn flows(tx: &Tx<'_>, filter: &FlowFilter) -> Sql<Vec<FlowRecord>> {
    const FLOWS: &str = concat!(
        "
        select ",
        flow_columns!(),
        "
          from flows
         where (?1 is null or name = ?1)
           and (?2 is null or (ended_at is null) = ?2)
           and (?3 is null or id < ?3)
         order by id desc
         limit ?4"
    );
    let before = filter.before.map(|id| id.0.into_bytes());
    tx.rows(FLOWS, params![filter.name, filter.open, before, filter.limit], flow_record)
}

fn flow_record(row: &Row<'_>) -> rusqlite::Result<FlowRecord> {
    let failed: i64 = row.get("failed")?;
    let cancelled = row.get("cancelled")?;
    let ended_at = row.maybe_time("ended_at")?;
    Ok(FlowRecord {
        id: FlowId(row.uuid("id")?),
        name: row.get("name")?,
        status: FlowRecord::status(failed, cancelled, ended_at.is_some()),
        members: row.get::<_, i64>("members")? as u64,
        open: row.get::<_, i64>("open")? as u64,
        failed: failed as u64,
        sealed: row.get("sealed")?,
        cancelled,
        idempotency_key: row.get::<_, Option<String>>("key")?.map(as_written),
        created_at: row.time("created_at")?,
        deadline: row.maybe_time("deadline")?,
        ended_at,
        is_of_children: row.get("owned")?,
    })
}

pub(super) fn tasks(tx: &Tx<'_>, flow: FlowId, after: Option<JobId>, limit: u32) -> Sql<Vec<TaskRecord>> {
    const TASKS: &str = "
        select j.id,
               j.task,
               j.kind,
               j.queue,
               w.held,
               f.outcome,
               f.skipped,
               w.id is not null as waits,
               coalesce(w.attempt > 0 or w.interruptions > 0, 0) as retries
          from jobs j
          left join ready w on w.id = j.id
          left join finished f on f.id = j.id
         where j.flow = ?1
           and j.id > ?2
         order by j.id
         limit ?3";
    const LINKS: &str = "
        select l.parent,
               j.task,
               l.condition,
               l.met
          from links l
          join jobs j on j.id = l.parent
         where l.child = ?1
         order by l.parent";
    let after = after.map_or(Vec::new(), |id| id.0.as_bytes().to_vec());
    let mut tasks = tx.rows(TASKS, params![flow.0.as_bytes(), after, limit], task_record)?;
    for task in &mut tasks {
        task.after = tx.rows(LINKS, [task.id.0.as_bytes()], |row| {
            Ok(LinkRecord {
                id: row.job(0)?,
                task: row.get(1)?,
                condition: row.condition(2)?,
                met: row.get(3)?,
            })
        })?;
    }
    Ok(tasks)
}

fn task_record(row: &Row<'_>) -> rusqlite::Result<TaskRecord> {
    let status = match row.get_ref("outcome")?.as_str_or_null()? {
        Some(_) => row.outcome("outcome")?.status(),
        None if !row.get::<_, bool>("waits")? => Status::Running,
        None if row.get("retries")? => Status::Retrying,
        None => Status::Queued,
    };
    Ok(TaskRecord {
        id: row.job("id")?,
        task: row.get("task")?,
        kind: row.get("kind")?,
        queue: row.get("queue")?,
        status,
        held: row.get::<_, Option<bool>>("held")?.unwrap_or(false),
        skipped: row.get::<_, Option<bool>>("skipped")?.unwrap_or(false),
        after: Vec::new(),
    })
}

pub(super) fn members_in(tx: &Tx<'_>, flow: FlowId, queues: &[String]) -> Sql<u64> {
    const MEMBERS_IN: &str = "
        select count(*)
          from jobs
         where flow = ?1
           and queue in (select value from json_each(?2))";
    let members =
        tx.row(MEMBERS_IN, params![flow.0.as_bytes(), json_list(queues)?], |row| row.get::<_, u32>(0))?;
    Ok(members.unwrap_or(0).into())
}

pub(super) fn parents(tx: &Tx<'_>, id: JobId) -> Sql<Vec<ParentRecord>> {
    const PARENTS: &str = "
        select l.parent,
               j.task,
               f.outcome,
               f.result,
               case when f.outcome <> 'succeeded' then f.last_error end
          from links l
          join jobs j on j.id = l.parent
          left join finished f on f.id = l.parent
         where l.child = ?1
         order by l.parent";
    tx.rows(PARENTS, [id.0.as_bytes()], parent_record)
}

pub(super) fn awaited_flow(tx: &Tx<'_>, id: JobId) -> Sql<Option<FlowId>> {
    // A callback is in no flow. A member's parent may have children of its own, and so be a flow as well.
    const AWAITED_FLOW: &str = "
        select f.id
          from jobs j
          join links l on l.child = j.id
          join flows f on f.id = l.parent
         where j.id = ?1
           and j.flow is null
           and l.met is null
        union all
        select job
          from waits
         where job = ?1
           and event = ?2
           and not woken
         limit 1";
    let params = params![id.0.as_bytes(), flow_event(FlowId(id.0))];
    tx.row(AWAITED_FLOW, params, |row| row.uuid(0).map(FlowId))
}

pub(super) fn results(tx: &Tx<'_>, flow: FlowId, after: Option<JobId>, limit: u32) -> Sql<Vec<ParentRecord>> {
    const CHILDREN: &str = "
        select j.id,
               j.task,
               f.outcome,
               f.result,
               case when f.outcome <> 'succeeded' then f.last_error end
          from jobs j
          left join finished f on f.id = j.id
         where j.flow = ?1
           and j.id > ?2
         order by j.id
         limit ?3";
    let after = after.map_or(Vec::new(), |id| id.0.as_bytes().to_vec());
    tx.rows(CHILDREN, params![flow.0.as_bytes(), after, limit], parent_record)
}

fn parent_record(row: &Row<'_>) -> rusqlite::Result<ParentRecord> {
    let has_ended = row.get_ref(2)?.as_str_or_null()?.is_some();
    Ok(ParentRecord {
        id: row.job(0)?,
        task: row.get(1)?,
        outcome: if has_ended { Some(row.outcome(2)?) } else { None },
        result: row.json(3)?,
        error: row.get(4)?,
    })
}
