//! Advance: what happens to the members of a flow when others end, and operators' commands on
//! flows. There is one writer at a time, so flows need no locks.
//!
//! The statements that end or reopen a member insert a row into `flow_changes`. [`advance`] follows
//! these rows. [`flow`] decides.

use std::collections::{BTreeMap, BTreeSet};

use chrono::{DateTime, Utc};
use rusqlite::params;
use uuid::Uuid;

use super::enqueue::Ready;
use super::operate::leave_ready_of;
use super::settle::{Ended, enter_finished, free_key, tally};
use super::tx::{Columns, Sql, Tx, micros};
use crate::flow::{
    self, CALLBACK_SKIPPED, Candidate, Change, Counts, End, FLOW_CANCELLED, FlowTurn, Follow, Held,
    ParentLink, Reopened,
};
use crate::job::{FlowId, JobId, Outcome};
use crate::lifecycle::FAR_FUTURE;
use crate::store::{
    Advanced, CancelledMembers, FlowRecord, Pending, Retention, RetriedMembers, flow_event,
    warn_of_refused_flow,
};

/// Notes that a member of a flow has ended.
pub(super) fn note_end(tx: &Tx<'_>, flow: [u8; 16], ended: &Ended<'_>) -> Sql<()> {
    const NOTE: &str = "
        insert into flow_changes (flow, job, succeeded, failure)
        values (?1, ?2, ?3, ?4)";
    let succeeded = ended.outcome == Outcome::Succeeded;
    tx.execute(NOTE, params![flow, ended.id.0.as_bytes(), succeeded, !succeeded && !ended.is_skipped])?;
    Ok(())
}

/// Notes that a member of a flow is open again.
pub(super) fn note_reopened(tx: &Tx<'_>, flow: [u8; 16], id: JobId, was_failure: bool) -> Sql<()> {
    const NOTE: &str = "
        insert into flow_changes (flow, job, failure)
        values (?1, ?2, ?3)";
    tx.execute(NOTE, params![flow, id.0.as_bytes(), was_failure])?;
    Ok(())
}

/// Deletes the links of a member that is removed.
pub(super) fn delete_links(tx: &Tx<'_>, id: JobId) -> Sql<()> {
    const OF_CHILD: &str = "
        delete from links
         where child = ?1";
    const OF_PARENT: &str = "
        delete from links
         where parent = ?1";
    for statement in [OF_CHILD, OF_PARENT] {
        tx.execute(statement, [id.0.as_bytes()])?;
    }
    Ok(())
}

pub(super) fn pending(tx: &Tx<'_>) -> Sql<Pending> {
    const PENDING: &str = "
        select exists (select 1 from events where fresh = 1),
               exists (select 1 from flow_changes),
               exists (select 1 from flows where cancelling_at < ?2)
                 or exists (
                      select 1
                        from flows
                       where deadline <= ?1
                         and ended_at is null
                         and cancelled = 0)";
    let now = tx.now()?;
    let read = tx.row(PENDING, [now, now - WALK_CUT_OFF], |row| {
        Ok(Pending { events: row.get(0)?, changes: row.get(1)?, cancels: row.get(2)? })
    })?;
    Ok(read.unwrap_or_default())
}

pub(super) fn has_changes(tx: &Tx<'_>) -> Sql<bool> {
    const CHANGES: &str = "
        select 1
          from flow_changes
         limit 1";
    Ok(tx.row(CHANGES, [], |_| Ok(()))?.is_some())
}

/// A flow with changes.
struct ChangedFlow {
    counts: Counts,
    /// Whether its members are the children of a job.
    is_owned: bool,
}

/// The maximum number of links that one step closes.
const MAX_CLOSED: usize = 2000;

pub(super) fn advance(tx: &Tx<'_>, limit: u32) -> Sql<Advanced> {
    match advance_together(tx, None, limit) {
        Err(fault) if fault.is_refusal() => advance_one_by_one(tx, limit),
        done => done,
    }
}

/// One flow that the database does not let us change must not keep the others from advancing.
fn advance_one_by_one(tx: &Tx<'_>, limit: u32) -> Sql<Advanced> {
    const CHANGED: &str = "
        select distinct flow
          from flow_changes
         limit 256";
    let mut all = Advanced::default();
    for flow in tx.rows(CHANGED, [], |row| row.uuid(0))? {
        match advance_together(tx, Some(flow), limit) {
            Err(fault) if fault.is_refusal() => warn_of_refused_flow(FlowId(flow), &fault.into()),
            done => all.add(done?),
        }
    }
    Ok(all)
}

/// Follows changes of several flows, or only of one. Undone as a whole if it fails.
fn advance_together(tx: &Tx<'_>, only: Option<Uuid>, limit: u32) -> Sql<Advanced> {
    tx.conn.execute_batch("savepoint flows")?;
    let done = follow_changes(tx, only, limit);
    let close = if done.is_err() { "rollback to flows; release flows" } else { "release flows" };
    tx.conn.execute_batch(close)?;
    done
}

fn follow_changes(tx: &Tx<'_>, only: Option<Uuid>, limit: u32) -> Sql<Advanced> {
    let (rows, changes, mut flows) = changes(tx, only, limit)?;
    if rows.is_empty() {
        return Ok(Advanced::default());
    }
    let mut followed = Followed::default();
    let parents: Vec<(Uuid, Option<End>)> =
        changes.iter().map(|(_, change)| (change.job, change.end)).collect();
    if !follow_parents(tx, &parents, &flows, &mut followed)? {
        // The rest of the children comes next; the changes are still there.
        return Ok(Advanced { queues: followed.queues(), more: true, ..Advanced::default() });
    }
    for (flow, change) in &changes {
        if let Some(flow) = flows.get_mut(flow) {
            flow.counts.add(change);
        }
    }
    let mut advanced = Advanced { more: true, ..Advanced::default() };
    store_turns(tx, &mut flows, &mut followed, &mut advanced)?;
    delete_changes(tx, &rows)?;
    advanced.queues = followed.queues();
    Ok(advanced)
}

type Changes = (Vec<i64>, Vec<(Uuid, Change)>, BTreeMap<Uuid, ChangedFlow>);

/// The changes to follow now, with the ids of their rows, and their flows. A row without a job
/// only says that the flow is to be looked at. Changes of flows that do not exist are ignored.
fn changes(tx: &Tx<'_>, only: Option<Uuid>, limit: u32) -> Sql<Changes> {
    const CHANGES: &str = "
        select id,
               flow,
               job,
               succeeded,
               failure
          from flow_changes
         where ?2 is null
            or flow = ?2
         order by id
         limit ?1";
    const FLOW: &str = "
        select open,
               failed,
               sealed,
               cancelled,
               ended_at is not null,
               owned
          from flows
         where id = ?1";
    let only = only.map(Uuid::into_bytes);
    let found = tx.rows(CHANGES, params![limit, only], |row| {
        let job = row.get::<_, Option<[u8; 16]>>(2)?.map(Uuid::from_bytes);
        let end = row.get::<_, Option<bool>>(3)?.map(End::of);
        let is_failure = row.get(4)?;
        let change = job.map(|job| Change { job, end, is_failure });
        Ok((row.get::<_, i64>(0)?, row.uuid(1)?, change))
    })?;
    let jobs: Vec<Change> = found.iter().filter_map(|(.., change)| *change).collect();
    let together = flow::followed_together(&jobs);
    let (mut rows, mut changes, mut flows) = (Vec::new(), Vec::new(), BTreeMap::new());
    for (row, flow, change) in found {
        if change.is_some() && changes.len() == together {
            break;
        }
        rows.push(row);
        changes.extend(change.map(|change| (flow, change)));
        let read = tx.row(FLOW, [flow.as_bytes()], |row| {
            let counts = Counts {
                open: row.get(0)?,
                failed: row.get(1)?,
                is_sealed: row.get(2)?,
                is_cancelled: row.get(3)?,
                has_ended: row.get(4)?,
            };
            Ok(ChangedFlow { counts, is_owned: row.get(5)? })
        })?;
        flows.extend(read.map(|read| (flow, read)));
    }
    Ok((rows, changes, flows))
}

/// What was decided about children.
#[derive(Default)]
struct Followed {
    queues: BTreeSet<String>,
}

impl Followed {
    fn queues(self) -> Vec<String> {
        self.queues.into_iter().collect()
    }
}

/// Closes the links of parents that ended, opens those of parents that were reopened, and follows
/// the children. Returns whether all links of these parents are done.
fn follow_parents(
    tx: &Tx<'_>,
    parents: &[(Uuid, Option<End>)],
    flows: &BTreeMap<Uuid, ChangedFlow>,
    followed: &mut Followed,
) -> Sql<bool> {
    const OPEN_LINKS: &str = "
        select child,
               condition
          from links
         where parent = ?1
           and met is null
         limit ?2";
    const CLOSED_LINKS: &str = "
        select child,
               condition
          from links
         where parent = ?1
           and met is not null
         limit ?2";
    const SET_MET: &str = "
        update links
           set met = ?3
         where parent = ?1
           and child = ?2";
    let mut left = MAX_CLOSED;
    let mut is_complete = true;
    let mut children = BTreeSet::new();
    for (parent, end) in parents {
        let statement = if end.is_some() { OPEN_LINKS } else { CLOSED_LINKS };
        let limit = left as i64 + 1;
        let links = tx
            .rows(statement, params![parent.as_bytes(), limit], |row| Ok((row.job(0)?, row.condition(1)?)))?;
        if links.len() > left {
            is_complete = false;
        }
        for (child, condition) in links.into_iter().take(left) {
            let met = end.map(|end| condition.is_met(end));
            tx.execute(SET_MET, params![parent.as_bytes(), child.0.as_bytes(), met])?;
            left -= 1;
            if end.is_some() {
                children.insert(child);
            }
        }
    }
    follow_children(tx, &children, flows, followed)?;
    Ok(is_complete)
}

fn follow_children(
    tx: &Tx<'_>,
    children: &BTreeSet<JobId>,
    flows: &BTreeMap<Uuid, ChangedFlow>,
    followed: &mut Followed,
) -> Sql<()> {
    const HELD: &str = "
        select flow
          from ready
         where id = ?1
           and held = 1";
    const LINKS: &str = "
        select count(*) filter (where met is null),
               count(*) filter (where met = 0)
          from links
         where child = ?1";
    // One parent whose end it needed otherwise.
    const BLOCKER: &str = "
        select j.task,
               f.outcome
          from links l
          join jobs j on j.id = l.parent
          join finished f on f.id = l.parent
         where l.child = ?1
           and l.met = 0
         order by l.parent
         limit 1";
    for child in children {
        let id = child.0.as_bytes();
        let Some(flow) = tx.row(HELD, [id], |row| row.flow(0))? else { continue };
        let links = tx.row(LINKS, [id], |row| Ok(Held { open: row.get(0)?, unmet: row.get(1)? }))?;
        // A callback is not a member: it runs even if the flow was cancelled.
        let is_cancelled =
            flow.and_then(|flow| flows.get(&flow.0)).is_some_and(|flow| flow.counts.is_cancelled);
        match flow::follow(links.unwrap_or_default(), is_cancelled) {
            Follow::Wait => {}
            Follow::Release => release(tx, *child, followed)?,
            Follow::Cancel => {
                end_waiting(tx, *child, FLOW_CANCELLED)?;
            }
            Follow::Skip if flow.is_none() => {
                end_waiting(tx, *child, CALLBACK_SKIPPED)?;
            }
            Follow::Skip => {
                let blocker: Option<(Option<String>, Outcome)> =
                    tx.row(BLOCKER, [id], |row| Ok((row.get(0)?, row.outcome(1)?)))?;
                let end =
                    End::of(blocker.as_ref().is_some_and(|(_, outcome)| *outcome == Outcome::Succeeded));
                let task = blocker.and_then(|(task, _)| task);
                end_waiting(tx, *child, &flow::skip_reason(task.as_deref(), end))?;
            }
        }
    }
    Ok(())
}

/// Lets a held job start.
fn release(tx: &Tx<'_>, id: JobId, followed: &mut Followed) -> Sql<()> {
    const REQUESTED: &str = "
        select run_at
          from jobs
         where id = ?1";
    let Some(row) = leave_ready_of(tx, id)? else { return Ok(()) };
    let now = tx.now()?;
    let requested = tx.row(REQUESTED, [id.0.as_bytes()], |row| row.get::<_, i64>(0))?;
    let run_at = requested.unwrap_or(now).max(now);
    Ready { run_at, is_held: false, ..row.as_ready(id) }.store(tx)?;
    if run_at <= now {
        followed.queues.insert(row.queue);
    }
    Ok(())
}

/// Ends a waiting job as cancelled, whatever it waits for. It does not count as a failure. Returns
/// whether it waited.
fn end_waiting(tx: &Tx<'_>, id: JobId, reason: &str) -> Sql<bool> {
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
        },
    )?;
    tally(tx, &row.queue, &row.kind, Outcome::Cancelled, 0, 1, 1)?;
    if row.keyed {
        free_key(tx, id)?;
    }
    Ok(true)
}

const FORGET_END: &str = "
    delete from events
     where name = ?1";

/// Stores the numbers of the flows, and follows the ends of the flows themselves.
fn store_turns(
    tx: &Tx<'_>,
    flows: &mut BTreeMap<Uuid, ChangedFlow>,
    followed: &mut Followed,
    advanced: &mut Advanced,
) -> Sql<()> {
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
    // The end of a flow of children is an event, which their parent may wait for.
    const EMIT_END: &str = "
        insert into events (name, emitted_at, payload)
        values (?1, ?2, 'null')
            on conflict (name) do update
           set emitted_at = excluded.emitted_at,
               fresh = 1";
    let now = tx.now()?;
    let mut parents = Vec::new();
    for (id, flow) in flows.iter_mut() {
        // A flow of children has the id of their job. Links from that id wait for the job, not for the
        // flow.
        let event = flow.is_owned.then(|| flow_event(FlowId(*id)));
        match flow.counts.turn() {
            FlowTurn::Stays => {}
            FlowTurn::Ends(end) => {
                flow.counts.has_ended = true;
                parents.extend((!flow.is_owned).then_some((*id, Some(end))));
                if let Some(event) = event {
                    tx.execute(EMIT_END, params![event, now])?;
                    advanced.emitted = true;
                }
                advanced.ended.push(FlowRecord::status(flow.counts.failed, flow.counts.is_cancelled, true));
            }
            FlowTurn::Reopens => {
                flow.counts.has_ended = false;
                parents.extend((!flow.is_owned).then_some((*id, None)));
                if let Some(event) = event {
                    tx.execute(FORGET_END, [event])?;
                }
            }
        }
        let Counts { open, failed, has_ended, .. } = flow.counts;
        tx.execute(STORE, params![id.as_bytes(), open, failed, has_ended, now])?;
    }
    // A callback that is left out would wait forever, so all are followed here.
    while !parents.is_empty() && !follow_parents(tx, &parents, flows, followed)? {}
    Ok(())
}

fn delete_changes(tx: &Tx<'_>, rows: &[i64]) -> Sql<()> {
    const DELETE: &str = "
        delete from flow_changes
         where id = ?1";
    for row in rows {
        tx.execute(DELETE, [row])?;
    }
    Ok(())
}

/// If the walk of a cancel makes no further step for 10 s, others resume it.
const WALK_CUT_OFF: i64 = 10_000_000;

/// Flags a flow that has not ended. Nothing can be added to it any more, so that it ends.
pub(super) fn flag_cancelled(tx: &Tx<'_>, flow: FlowId) -> Sql<bool> {
    const FLAG: &str = "
        update flows
           set cancelled = 1,
               cancelling_at = ?2,
               sealed = 1
         where id = ?1
           and ended_at is null
           and cancelled = 0";
    Ok(tx.execute(FLAG, params![flow.0.as_bytes(), tx.now()?])? > 0)
}

fn member_page(tx: &Tx<'_>, flow: FlowId, after: Option<JobId>, limit: u32) -> Sql<Vec<JobId>> {
    const PAGE: &str = "
        select id
          from jobs
         where flow = ?1
           and id > ?2
         order by id
         limit ?3";
    let after = after.map_or(Vec::new(), |id| id.0.as_bytes().to_vec());
    tx.rows(PAGE, params![flow.0.as_bytes(), after, limit], |row| row.job(0))
}

pub(super) fn cancel_members(
    tx: &Tx<'_>,
    flow: FlowId,
    after: Option<JobId>,
    limit: u32,
) -> Sql<CancelledMembers> {
    const REQUEST_STOP: &str = "
        update running
           set cancel_requested = 1
         where id = ?1
           and cancel_requested = 0
        returning worker";
    const CONTINUE_WALK: &str = "
        update flows
           set cancelling_at = ?2
         where id = ?1
           and cancelling_at is not null";
    // Ends the walk, and lets `advance` look at the flow: it may have no open member.
    const END_WALK: &str = "
        update flows
           set cancelling_at = null
         where id = ?1";
    const NOTE: &str = "
        insert into flow_changes (flow)
        values (?1)";
    // A retry that began meanwhile ends the cancel.
    const CANCELLED: &str = "
        select 1
          from flows
         where id = ?1
           and cancelled = 1";
    if tx.row(CANCELLED, [flow.0.as_bytes()], |_| Ok(()))?.is_none() {
        return Ok(CancelledMembers::default());
    }
    let page = member_page(tx, flow, after, limit)?;
    let mut done = CancelledMembers::default();
    for id in &page {
        if let Some(worker) = tx.row(REQUEST_STOP, [id.0.as_bytes()], |row| row.worker(0))? {
            done.requested += 1;
            done.workers.push(worker);
        }
        done.cancelled += u64::from(end_waiting(tx, *id, FLOW_CANCELLED)?);
    }
    done.next = page.last().filter(|_| page.len() == limit as usize).copied();
    if done.next.is_some() {
        tx.execute(CONTINUE_WALK, params![flow.0.as_bytes(), tx.now()?])?;
    } else if tx.execute(END_WALK, [flow.0.as_bytes()])? > 0 {
        tx.execute(NOTE, [flow.0.as_bytes()])?;
    }
    Ok(done)
}

pub(super) fn flows_to_cancel(tx: &Tx<'_>, limit: u32) -> Sql<Vec<FlowId>> {
    const TO_CANCEL: &str = "
        select id
          from flows
         where cancelling_at < ?3
         union
        select id
          from flows
         where deadline <= ?1
           and ended_at is null
           and cancelled = 0
         limit ?2";
    let now = tx.now()?;
    tx.rows(TO_CANCEL, params![now, limit, now - WALK_CUT_OFF], |row| row.uuid(0).map(FlowId))
}

pub(super) fn retry_members(
    tx: &Tx<'_>,
    flow: FlowId,
    before: DateTime<Utc>,
    after: Option<JobId>,
    limit: u32,
) -> Sql<RetriedMembers> {
    const FLOW: &str = "
        select owned,
               exists (select 1 from flow_changes c where c.flow = flows.id)
          from flows
         where id = ?1";
    // A flow that is retried is no longer cancelled and has not ended.
    const REOPEN: &str = "
        update flows
           set open = open + ?2,
               failed = failed - ?3,
               cancelled = 0,
               cancelling_at = null,
               deadline = case when deadline > ?4 then deadline end,
               ended_at = null
         where id = ?1";
    const OPEN_LINKS: &str = "
        update links
           set met = null
         where parent = ?1
           and met is not null";
    const CALLBACKS: &str = "
        select child
          from links
         where parent = ?1";
    let id = flow.0.as_bytes();
    let Some((is_owned, has_changes)) = tx.row(FLOW, [id], |row| Ok((row.get(0)?, row.get(1)?)))? else {
        return Ok(RetriedMembers::default());
    };
    if has_changes {
        return Ok(RetriedMembers { advance_first: true, ..RetriedMembers::default() });
    }
    let page = member_page(tx, flow, after, limit)?;
    let next = page.last().filter(|_| page.len() == limit as usize).copied();
    let reopened = flow::reopen(&candidates(tx, &page, before)?);
    let (members, failures, mut queues) = reopen_members(tx, &reopened)?;
    if members > 0 {
        tx.execute(REOPEN, params![id, members, failures, tx.now()?])?;
    }
    if members > 0 && is_owned {
        tx.execute(FORGET_END, [flow_event(flow)])?;
    } else if members > 0 {
        // The flow has not ended any more, so callbacks that were skipped wait again.
        tx.execute(OPEN_LINKS, [id])?;
        let callbacks = tx.rows(CALLBACKS, [id], |row| row.job(0))?;
        let held = flow::reopen(&candidates(tx, &callbacks, before)?);
        queues.extend(reopen_members(tx, &held)?.2);
    }
    let queues = queues.into_iter().collect();
    Ok(RetriedMembers { reopened: members as u64, queues, next, advance_first: false })
}

/// The finished ones of these members that did not succeed, or of callbacks that were skipped.
fn candidates(tx: &Tx<'_>, ids: &[JobId], before: DateTime<Utc>) -> Sql<Vec<Candidate>> {
    const FINISHED: &str = "
        select 1
          from finished
         where id = ?1
           and outcome <> 'succeeded'
           and finished_at <= ?2
           and (flow is not null or skipped = 1)";
    const LINKS: &str = "
        select parent,
               met
          from links
         where child = ?1";
    let mut candidates = Vec::new();
    for id in ids {
        let finished = tx.row(FINISHED, params![id.0.as_bytes(), before.timestamp_micros()], |_| Ok(()))?;
        if finished.is_some() {
            let links = tx.rows(LINKS, [id.0.as_bytes()], |row| {
                Ok(ParentLink { parent: row.uuid(0)?, met: row.get(1)? })
            })?;
            candidates.push(Candidate { job: id.0, links });
        }
    }
    Ok(candidates)
}

/// Returns how many members of the flow were reopened, how many of them counted as failures, and the
/// queues of those that are due.
fn reopen_members(tx: &Tx<'_>, reopened: &[Reopened]) -> Sql<(i64, i64, BTreeSet<String>)> {
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
    const OPEN_LINKS: &str = "
        update links
           set met = null
         where parent = ?1
           and met is not null";
    let now = tx.now()?;
    let (mut members, mut failures, mut queues) = (0, 0, BTreeSet::new());
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
        tx.execute(OPEN_LINKS, [job.as_bytes()])?;
        members += i64::from(flow.is_some());
        failures += i64::from(flow.is_some() && !is_skipped);
        if !is_held {
            queues.insert(queue);
        }
    }
    Ok((members, failures, queues))
}

/// Removes flows that ended some time ago and have no members left.
pub(super) fn remove_flows(tx: &Tx<'_>, policy: &Retention, limit: u32) -> Sql<u64> {
    const REMOVE: &str = "
        delete from flows
         where id in (
               select f.id
                 from flows f
                where f.ended_at < ?1
                  and not exists (select 1 from jobs j where j.flow = f.id)
                order by f.ended_at
                limit ?2)
        returning id, owned";
    // Links from a flow of children wait for their job.
    const LINKS: &str = "
        delete from links
         where parent = ?1";
    let Some(shortest) = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min() else {
        return Ok(0);
    };
    let before = tx.now()?.saturating_sub(micros(shortest));
    let removed: Vec<([u8; 16], bool)> =
        tx.rows(REMOVE, params![before, limit], |row| Ok((row.get(0)?, row.get(1)?)))?;
    for (id, _) in removed.iter().filter(|(_, is_owned)| !is_owned) {
        tx.execute(LINKS, [id])?;
    }
    Ok(removed.len() as u64)
}
