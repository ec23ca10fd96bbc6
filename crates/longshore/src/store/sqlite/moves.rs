//! Moves of jobs between tables, on SQLite.

use std::collections::BTreeSet;

use async_trait::async_trait;
use rusqlite::{Row, params};
use uuid::Uuid;

use super::db::Rows;
use super::enqueue::{Ready, enqueue, insert_member};
use super::flow_changes::note_reopened;
use super::operate::leave_ready_of;
use super::settle::{Ended, enter_finished, free_key, tally};
use super::turns::add_turn_of_removed;
use super::tx::{self, Columns, Tx, json_list, micros};
use super::{check, events, lease, operate, steps, workers};
use crate::job::{FlowId, JobId, Outcome, WorkerId};
use crate::rules::enqueue::{EnqueuedBatch, ValidEdit, ValidJob};
use crate::rules::flow::{Change, Counts, End, Reopened};
use crate::rules::lifecycle::{FAR_FUTURE, Finished, Waiting};
use crate::store::advance::{EndedParent, LockedFlows, MadeDue, StoredChange};
use crate::store::check::Dialect;
use crate::store::db::Sql;
use crate::store::events::Woken;
use crate::store::flows::{FLOW_BY_ID_OR_KEY, INSERT_FLOW};
use crate::store::moves::Moves;
use crate::store::operate_flows::ReopenedMembers;
use crate::store::{
    Beat, Claimed, Durability, Fenced, Lease, LiveLease, NewFlow, NewLink, NewMember, NewStep, PutFlow,
};

#[async_trait]
impl Moves for Rows<'_> {
    async fn insert_jobs(&mut self, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
        Ok(enqueue(&self.tx()?, jobs)?)
    }

    async fn wake(&mut self, events: &[String], limit: u32) -> Sql<Woken> {
        Ok(events::wake(&self.tx()?, events, limit)?)
    }

    async fn cancel_waiting(&mut self, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool> {
        Ok(operate::cancel(&self.tx()?, id, seen, attempts)?)
    }

    async fn run_now(&mut self, id: JobId, seen: &Waiting) -> Sql<bool> {
        Ok(operate::run_now(&self.tx()?, id, seen)?)
    }

    async fn rewrite(&mut self, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool> {
        Ok(operate::rewrite(&self.tx()?, id, seen, edit)?)
    }

    async fn reopen_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::reopen(&self.tx()?, id, seen)?)
    }

    async fn remove_finished(&mut self, id: JobId, seen: &Finished) -> Sql<bool> {
        Ok(operate::remove(&self.tx()?, id, seen)?)
    }

    async fn save_steps(&mut self, steps: &[NewStep]) -> Sql<Vec<Fenced>> {
        Ok(steps::save_steps(&self.tx()?, steps)?)
    }

    async fn claims(&mut self, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
        Ok(lease::claims(&self.tx()?, leases)?)
    }

    async fn beat(&mut self, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
        Ok(workers::beat(&self.tx()?, worker, held)?)
    }

    async fn beat_and_list(&mut self, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>> {
        Ok(workers::beat_and_list(&self.tx()?, worker)?)
    }

    fn dialect(&mut self) -> Sql<Dialect> {
        Ok(check::dialect(&self.tx()?)?)
    }

    async fn texts(&mut self, statement: String) -> Sql<Vec<Vec<String>>> {
        Ok(check::texts(&self.tx()?, &statement)?)
    }

    async fn durability(&mut self) -> Sql<Durability> {
        // The engine itself sets `synchronous = full` on every connection, so nothing can be relaxed.
        Ok(Durability::default())
    }

    // ---- flows ------------------------------------------------------------

    async fn insert_members(&mut self, flow: Option<FlowId>, members: &[NewMember]) -> Sql<()> {
        Ok(insert_members(&self.tx()?, flow, members)?)
    }

    async fn insert_links(&mut self, links: &[NewLink]) -> Sql<()> {
        Ok(insert_links(&self.tx()?, links)?)
    }

    async fn changes(&mut self, flows: &[Uuid], limit: u32) -> Sql<Vec<StoredChange>> {
        Ok(changes(&self.tx()?, flows, limit)?)
    }

    async fn close_links(&mut self, parents: &[EndedParent], limit: usize) -> Sql<Vec<(Uuid, Uuid)>> {
        Ok(close_links(&self.tx()?, parents, limit)?)
    }

    async fn open_links(&mut self, parents: &[Uuid], limit: usize) -> Sql<Vec<(Uuid, Uuid)>> {
        Ok(open_links(&self.tx()?, parents, limit)?)
    }

    async fn make_due(&mut self, jobs: &[Uuid]) -> Sql<MadeDue> {
        Ok(make_due(&self.tx()?, jobs)?)
    }

    async fn end_waiting(&mut self, jobs: &[Uuid], reasons: &[String]) -> Sql<Vec<Uuid>> {
        let tx = self.tx()?;
        let mut ended = Vec::new();
        for (id, reason) in jobs.iter().zip(reasons) {
            if end_waiting(&tx, JobId(*id), reason)? {
                ended.push(*id);
            }
        }
        Ok(ended)
    }

    async fn reopen(&mut self, jobs: &[Reopened]) -> Sql<ReopenedMembers> {
        Ok(reopen(&self.tx()?, jobs)?)
    }

    async fn store_counts(&mut self, flows: &LockedFlows, followed: &[i64]) -> Sql<()> {
        Ok(store_counts(&self.tx()?, flows, followed)?)
    }
}

/// Stores a flow on the caller's connection, which cannot be sent to another thread as procedures are.
/// `put_flow` in `store/flows.rs` is the same procedure.
pub(super) fn put_flow_in(tx: &Tx<'_>, new: &NewFlow) -> tx::Sql<PutFlow> {
    let NewFlow { id, name, key, deadline, is_sealed, members, callbacks: _, links } = new;
    let put = params![
        id.0.as_bytes(),
        name,
        key,
        deadline.is_some(),
        micros(deadline.unwrap_or_default()),
        members.len() as i64,
        is_sealed,
        links.len() as i64,
        tx.now()?,
    ];
    if tx.execute(INSERT_FLOW.for_sqlite(), put)? == 0 {
        let found =
            tx.row(FLOW_BY_ID_OR_KEY.for_sqlite(), params![id.0.as_bytes(), key], |row| row.uuid(0))?;
        return Ok(found.map_or(PutFlow::IdOfJob, |found| new.found(FlowId(found))));
    }
    insert_members(tx, Some(*id), members)?;
    insert_members(tx, None, &new.held_callbacks())?;
    insert_links(tx, links)?;
    Ok(PutFlow::Created)
}

fn insert_members(tx: &Tx<'_>, flow: Option<FlowId>, members: &[NewMember]) -> tx::Sql<()> {
    members.iter().try_for_each(|member| insert_member(tx, flow, member))
}

fn insert_links(tx: &Tx<'_>, links: &[NewLink]) -> tx::Sql<()> {
    const INSERT: &str = "
        insert into links (parent, child, condition)
        values (?1, ?2, ?3)";
    for link in links {
        let params = params![link.parent.as_bytes(), link.child.0.as_bytes(), link.condition.as_str()];
        tx.execute(INSERT, params)?;
    }
    Ok(())
}

/// The rows are read in the order of their ids, not flow by flow: a step must not sort all changes of a large flow.
fn changes(tx: &Tx<'_>, flows: &[Uuid], limit: u32) -> tx::Sql<Vec<StoredChange>> {
    const ENDS: &str = "
        select id, flow, job, succeeded, failure, counted, 0
          from flow_changes
         where +flow in (select unhex(value) from json_each(?2))
           and not exists (
                 select 1
                   from flow_changes
                  where job is not null
                    and succeeded is null
                    and flow in (select unhex(value) from json_each(?2)))
         order by id
         limit ?1";
    const CHANGES: &str = "
        with chosen (flow) as materialized (
          select unhex(i.value)
            from json_each(?2) as i
           where exists (
                   select 1
                     from flow_changes c
                    where c.job is not null
                      and c.succeeded is null
                      and c.flow = unhex(i.value))),
        returns (id) as materialized (
          select id
            from flow_changes
           where job is not null
             and succeeded is null
             and flow in (select flow from chosen)
           order by id
           limit ?1)
        select id, flow, job, succeeded, failure, counted, 1
          from flow_changes
         where flow in (select flow from chosen)
           and id <= (select max(id) from returns)
         union all
        select *
          from (select id, flow, job, succeeded, failure, counted, 0
                  from flow_changes
                 where +flow in (select unhex(value) from json_each(?2))
                   and flow not in (select flow from chosen)
                 order by id
                 limit ?1)
         order by 1";
    let flows = json_list(&flows.iter().map(|flow| flow.simple()).collect::<Vec<_>>())?;
    let found = tx.rows(ENDS, params![limit, flows], stored_change)?;
    if found.is_empty() { tx.rows(CHANGES, params![limit, flows], stored_change) } else { Ok(found) }
}

fn stored_change(row: &Row<'_>) -> rusqlite::Result<StoredChange> {
    let job = row.get::<_, Option<[u8; 16]>>(2)?.map(Uuid::from_bytes);
    let end = row.get::<_, Option<bool>>(3)?.map(End::of);
    let (is_failure, is_counted) = (row.get(4)?, row.get(5)?);
    let change = job.map(|job| Change { job, end, is_failure, is_counted });
    Ok(StoredChange { id: row.get(0)?, flow: row.uuid(1)?, change, is_of_reopened: row.get(6)? })
}

fn close_links(tx: &Tx<'_>, parents: &[EndedParent], limit: usize) -> tx::Sql<Vec<(Uuid, Uuid)>> {
    const OPEN: &str = "
        select child,
               condition
          from links
         where parent = ?1
           and met is null
         limit ?2";
    let mut closed = Vec::new();
    for EndedParent { id, end } in parents {
        let params = params![id.as_bytes(), (limit - closed.len()) as i64];
        for (child, condition) in tx.rows(OPEN, params, |row| Ok((row.uuid(0)?, row.condition(1)?)))? {
            set_met(tx, *id, child, Some(condition.is_met(*end)))?;
            closed.push((*id, child));
        }
    }
    Ok(closed)
}

fn open_links(tx: &Tx<'_>, parents: &[Uuid], limit: usize) -> tx::Sql<Vec<(Uuid, Uuid)>> {
    const CLOSED: &str = "
        select child
          from links
         where parent = ?1
           and met is not null
         limit ?2";
    let mut opened = Vec::new();
    for id in parents {
        let params = params![id.as_bytes(), (limit - opened.len()) as i64];
        for child in tx.rows(CLOSED, params, |row| row.uuid(0))? {
            set_met(tx, *id, child, None)?;
            opened.push((*id, child));
        }
    }
    Ok(opened)
}

fn set_met(tx: &Tx<'_>, parent: Uuid, child: Uuid, met: Option<bool>) -> tx::Sql<()> {
    const SET_MET: &str = "
        update links
           set met = ?3
         where parent = ?1
           and child = ?2";
    tx.execute(SET_MET, params![parent.as_bytes(), child.as_bytes(), met])?;
    Ok(())
}

fn make_due(tx: &Tx<'_>, jobs: &[Uuid]) -> tx::Sql<MadeDue> {
    const REQUESTED: &str = "
        select run_at
          from jobs
         where id = ?1";
    let now = tx.now()?;
    let (mut made_due, mut queues) = (Vec::new(), BTreeSet::new());
    for id in jobs {
        let Some(row) = leave_ready_of(tx, JobId(*id))? else { continue };
        let requested = tx.row(REQUESTED, [id.as_bytes()], |row| row.get::<_, i64>(0))?;
        let run_at = requested.unwrap_or(now).max(now);
        Ready { run_at, is_held: false, ..row.as_ready(JobId(*id)) }.store(tx)?;
        made_due.push(*id);
        if run_at <= now {
            queues.insert(row.queue);
        }
    }
    Ok(MadeDue { jobs: made_due, queues: queues.into_iter().collect() })
}

/// Returns whether the job waited.
fn end_waiting(tx: &Tx<'_>, id: JobId, reason: &str) -> tx::Sql<bool> {
    let Some(row) = leave_ready_of(tx, id)? else { return Ok(false) };
    enter_finished(
        tx,
        &Ended {
            id,
            started_at: None,
            finished_by: None,
            lease_no: row.lease_no,
            outcome: Outcome::Cancelled,
            attempts: row.attempt,
            max_attempts: row.max_attempts,
            interruptions: row.interruptions,
            last_error: Some(reason),
            result: None,
            flow: row.flow,
            is_skipped: true,
            failure: None,
        },
    )?;
    tally(tx, &row.queue, &row.kind, Outcome::Cancelled, 0, 1, 1)?;
    add_turn_of_removed(tx, &row)?;
    if row.keyed {
        free_key(tx, id)?;
    }
    Ok(true)
}

fn reopen(tx: &Tx<'_>, reopened: &[Reopened]) -> tx::Sql<ReopenedMembers> {
    const LEAVE: &str = "
        delete from finished
         where id = ?1
        returning lease_no, outcome, flow, skipped";
    const REQUEST: &str = "
        select timeout_ms,
               priority,
               max_attempts,
               kind,
               queue,
               flags,
               grp
          from jobs
         where id = ?1";
    const PARENTS: &str = "
        select parent
          from links
         where child = ?1
           and met is not null";
    // A child must not start because of an end that no longer counts.
    const OPEN_LINK: &str = "
        update links
           set met = null
         where parent = ?1
           and child = ?2
           and met is not null";
    let ids: BTreeSet<[u8; 16]> = reopened.iter().map(|reopened| reopened.job.into_bytes()).collect();
    for child in &ids {
        for parent in tx.rows(PARENTS, [child], |row| row.get::<_, [u8; 16]>(0))? {
            if ids.contains(&parent) {
                tx.execute(OPEN_LINK, [parent, *child])?;
            }
        }
    }
    let now = tx.now()?;
    let (mut done, mut queues) = (ReopenedMembers::default(), BTreeSet::new());
    for Reopened { job, is_held } in reopened {
        let left = tx.row(LEAVE, [job.as_bytes()], |row| {
            let is_skipped = row.get::<_, Option<bool>>(3)?.unwrap_or(false);
            Ok((row.get::<_, i32>(0)?, row.outcome(1)?, row.get::<_, Option<[u8; 16]>>(2)?, is_skipped))
        })?;
        let Some((lease_no, outcome, flow, is_skipped)) = left else { continue };
        let mut request = tx.prepare(REQUEST)?;
        let mut rows = request.query([job.as_bytes()])?;
        let Some(row) = rows.next()? else { continue };
        let (kind, queue, flags, group): (String, String, Option<String>, Option<String>) =
            (row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?);
        let ready = Ready {
            id: JobId(*job),
            run_at: if *is_held { FAR_FUTURE.timestamp_micros() } else { now },
            timeout_ms: row.get(0)?,
            lease_no,
            priority: row.get(1)?,
            attempt: 0,
            max_attempts: row.get(2)?,
            interruptions: 0,
            keyed: false,
            kind: &kind,
            queue: &queue,
            flags: flags.as_deref(),
            group: group.as_deref(),
            flow,
            is_held: *is_held,
        };
        ready.store(tx)?;
        tally(tx, &queue, &kind, outcome, 0, 0, -1)?;
        if let Some(flow) = flow {
            let was_failure = outcome != Outcome::Succeeded && !is_skipped;
            note_reopened(tx, flow, JobId(*job), was_failure, true)?;
        }
        done.members += u64::from(flow.is_some());
        done.failures += u64::from(flow.is_some() && !is_skipped);
        if !is_held {
            queues.insert(queue);
        }
    }
    Ok(ReopenedMembers { queues: queues.into_iter().collect(), ..done })
}

fn store_counts(tx: &Tx<'_>, flows: &LockedFlows, followed: &[i64]) -> tx::Sql<()> {
    const DELETE_CHANGE: &str = "
        delete from flow_changes
         where id = ?1";
    const STORE: &str = "
        update flows
           set open = ?2,
               failed = ?3,
               ended_at = case when not ?4 then null else coalesce(ended_at, ?5) end,
               cancelling_at = case when not ?4 then cancelling_at end,   -- nothing is left to cancel
               deadline = case   -- a flow that is open again must not end because of a deadline that has passed
                            when ended_at is null or ?4 or deadline > ?5 then deadline
                          end
         where id = ?1";
    for change in followed {
        tx.execute(DELETE_CHANGE, [change])?;
    }
    let now = tx.now()?;
    for (id, flow) in flows {
        let Counts { open, failed, has_ended, .. } = flow.counts;
        tx.execute(STORE, params![id.as_bytes(), open, failed, has_ended, now])?;
    }
    Ok(())
}
