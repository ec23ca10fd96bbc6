//! Advance: what happens to the members of a flow when others end. There is one writer at a time, so
//! flows need no locks.
//!
//! The statements that end or reopen a member insert a row into `flow_changes`. [`advance`] follows
//! these rows. [`flow`] decides.

use std::collections::{BTreeMap, BTreeSet};

use rusqlite::{Row, params};
use uuid::Uuid;

use super::enqueue::Ready;
use super::operate::leave_ready_of;
use super::operate_flows::WALK_CUT_OFF;
use super::reopen::bring_back;
use super::settle::{Ended, enter_finished, free_key, tally};
use super::turns::add_turn_of_removed;
use super::tx::{Columns, Sql, Tx};
use crate::job::{FlowId, JobId, Outcome};
use crate::rules::flow::{
    self, CALLBACK_SKIPPED, Change, Counts, End, FLOW_CANCELLED, FlowTurn, Follow, Held, Pick, flow_event,
};
use crate::store::{Advanced, FlowRecord, Pending, warn_of_refused_flow};

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
pub(super) fn note_reopened(
    tx: &Tx<'_>,
    flow: [u8; 16],
    id: JobId,
    was_failure: bool,
    is_counted: bool,
) -> Sql<()> {
    const NOTE: &str = "
        insert into flow_changes (flow, job, failure, counted)
        values (?1, ?2, ?3, ?4)";
    tx.execute(NOTE, params![flow, id.0.as_bytes(), was_failure, is_counted])?;
    Ok(())
}

/// Deletes the links of a member that is removed. Those that wait for it stay: they say how the parent ended.
pub(super) fn delete_links(tx: &Tx<'_>, id: JobId) -> Sql<()> {
    const DELETE: &str = "
        delete from links
         where child = ?1";
    tx.execute(DELETE, [id.0.as_bytes()])?;
    Ok(())
}

pub(super) fn pending(tx: &Tx<'_>) -> Sql<Pending> {
    const PENDING: &str = "
        select exists (select 1 from events where fresh),
               exists (select 1 from flow_changes),
               exists (select 1 from flows where cancelling_at < ?2)
                 or exists (
                      select 1
                        from flows
                       where deadline <= ?1
                         and ended_at is null
                         and not cancelled),
               exists (
                 select 1
                   from operations
                  where state = 'running'
                    and (taken_until is null or taken_until <= ?1))";
    let now = tx.now()?;
    let read = tx.row(PENDING, [now, now - WALK_CUT_OFF], |row| {
        Ok(Pending {
            events: row.get(0)?,
            changes: row.get(1)?,
            cancels: row.get(2)?,
            operations: row.get(3)?,
        })
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
    let (step, mut flows) = next_step(tx, only, limit)?;
    if step.rows.is_empty() {
        return Ok(Advanced::default());
    }
    let mut followed = Followed::default();
    if !follow_parents(tx, &step.parents, &mut flows, &mut followed)? {
        // The rest of the children comes next; the changes are still there.
        store_counts(tx, &flows)?;
        return Ok(Advanced { queues: followed.queues(), more: true, ..Advanced::default() });
    }
    for (flow, change) in &step.counted {
        if let Some(flow) = flows.get_mut(flow) {
            flow.counts.add(change);
        }
    }
    let mut advanced = Advanced { more: true, ..Advanced::default() };
    delete_changes(tx, &step.rows)?;
    store_turns(tx, &mut flows, &mut followed, &mut advanced)?;
    advanced.queues = followed.queues();
    Ok(advanced)
}

/// The changes that are followed together.
#[derive(Default)]
struct Step {
    /// The ids of their rows.
    rows: Vec<i64>,
    /// The changes, with their flows.
    counted: Vec<(Uuid, Change)>,
    /// The members whose children are followed.
    parents: Vec<(Uuid, Option<End>)>,
}

/// The changes to follow now, with their flows. A row without a job only says that the flow is to be looked at. Changes of
/// flows that do not exist are ignored.
fn next_step(tx: &Tx<'_>, only: Option<Uuid>, limit: u32) -> Sql<(Step, BTreeMap<Uuid, ChangedFlow>)> {
    // The first changes, if no member was reopened, as is almost always the case.
    const ENDS: &str = "
        select id, flow, job, succeeded, failure, counted, 0
          from flow_changes
         where (?2 is null or flow = ?2)
           and not exists (
                 select 1
                   from flow_changes
                  where job is not null
                    and succeeded is null
                    and (?2 is null or flow = ?2))
         order by id
         limit ?1";
    // The changes to choose from. Of flows with members that were reopened: those up to the `limit`-th return, which
    // may be behind many ends. Of the others: the first `limit`.
    const CHANGES: &str = "
        with recursive reopened (flow) as (
          select min(flow)
            from flow_changes
           where job is not null
             and succeeded is null
           union all
          select (select min(c.flow)
                    from flow_changes c
                   where c.job is not null
                     and c.succeeded is null
                     and c.flow > reopened.flow)
            from reopened
           where flow is not null),
        chosen (flow) as materialized (
          select flow
            from reopened
           where flow is not null
             and (?2 is null or flow = ?2)),
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
                 where (?2 is null or flow = ?2)
                   and flow not in (select flow from chosen)
                 order by id
                 limit ?1)
         order by 1";
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
    let read_change = |row: &Row<'_>| {
        let job = row.get::<_, Option<[u8; 16]>>(2)?.map(Uuid::from_bytes);
        let end = row.get::<_, Option<bool>>(3)?.map(End::of);
        let (is_failure, is_counted) = (row.get(4)?, row.get(5)?);
        let change = job.map(|job| Change { job, end, is_failure, is_counted });
        Ok((row.get::<_, i64>(0)?, row.uuid(1)?, change, row.get::<_, bool>(6)?))
    };
    let mut found = tx.rows(ENDS, params![limit, only], read_change)?;
    if found.is_empty() {
        found = tx.rows(CHANGES, params![limit, only], read_change)?;
    }
    let (mut step, mut read, mut of_rows) = (Step::default(), Vec::new(), BTreeSet::new());
    let (mut changes, mut reopened) = (Vec::new(), BTreeSet::new());
    for (id, flow, change, is_reopened) in found {
        of_rows.insert(flow);
        let Some(change) = change else {
            step.rows.push(id);
            continue;
        };
        read.push(id);
        changes.push((flow, change));
        reopened.extend(is_reopened.then_some(flow));
    }
    for ((id, (flow, change)), pick) in read.into_iter().zip(&changes).zip(flow::pick(&changes, &reopened)) {
        if pick != Pick::Leave {
            step.rows.push(id);
            step.counted.push((*flow, *change));
        }
        step.parents.extend((pick == Pick::Follow).then_some((change.job, change.end)));
    }
    let mut flows = BTreeMap::new();
    for flow in of_rows {
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
    Ok((step, flows))
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
/// the children: those that wait, and those that were skipped because of a parent that was reopened. Returns whether all links of these parents are done.
fn follow_parents(
    tx: &Tx<'_>,
    parents: &[(Uuid, Option<End>)],
    flows: &mut BTreeMap<Uuid, ChangedFlow>,
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
    let (mut children, mut of_reopened) = (BTreeSet::new(), BTreeSet::new());
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
            match end {
                Some(_) => children.insert(child),
                None => of_reopened.insert(child),
            };
        }
    }
    follow_children(tx, &children, flows, followed)?;
    for flow in bring_back(tx, &of_reopened, |flow| is_cancelled(flows, flow))? {
        if let Some(flow) = flows.get_mut(&flow.0) {
            flow.counts.open += 1;
        }
    }
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
           and held";
    const LINKS: &str = "
        select count(*) filter (where met is null),
               count(*) filter (where not met)
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
           and not l.met
         order by l.parent
         limit 1";
    for child in children {
        let id = child.0.as_bytes();
        let Some(flow) = tx.row(HELD, [id], |row| row.flow(0))? else { continue };
        let links = tx.row(LINKS, [id], |row| Ok(Held { open: row.get(0)?, unmet: row.get(1)? }))?;
        match flow::follow(links.unwrap_or_default(), is_cancelled(flows, flow)) {
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

/// Whether the flow of a child was cancelled. A callback is not a member: it runs even then.
fn is_cancelled(flows: &BTreeMap<Uuid, ChangedFlow>, flow: Option<FlowId>) -> bool {
    flow.and_then(|flow| flows.get(&flow.0)).is_some_and(|flow| flow.counts.is_cancelled)
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
pub(super) fn end_waiting(tx: &Tx<'_>, id: JobId, reason: &str) -> Sql<bool> {
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

pub(super) const FORGET_END: &str = "
    delete from events
     where name = ?1";

/// Those of the flows that could end now and have changes which were not followed. They do not end: one of the changes may be
/// a member that runs again.
fn with_changes(tx: &Tx<'_>, flows: &BTreeMap<Uuid, ChangedFlow>) -> Sql<BTreeSet<Uuid>> {
    const WITH_CHANGES: &str = "
        select 1
          from flow_changes
         where flow = ?1
         limit 1";
    let mut found = BTreeSet::new();
    for (id, _) in flows.iter().filter(|(_, flow)| matches!(flow.counts.turn(), FlowTurn::Ends(_))) {
        found.extend(tx.row(WITH_CHANGES, [id.as_bytes()], |_| Ok(*id))?);
    }
    Ok(found)
}

/// Stores the numbers of the flows, and follows the ends of the flows themselves. The changes that were followed have been
/// deleted.
fn store_turns(
    tx: &Tx<'_>,
    flows: &mut BTreeMap<Uuid, ChangedFlow>,
    followed: &mut Followed,
    advanced: &mut Advanced,
) -> Sql<()> {
    // The end of a flow of children is an event, which their parent may wait for.
    const EMIT_END: &str = "
        insert into events (name, emitted_at, payload)
        values (?1, ?2, 'null')
            on conflict (name) do update
           set emitted_at = excluded.emitted_at,
               fresh = true";
    let with_changes = with_changes(tx, flows)?;
    let now = tx.now()?;
    let mut parents = Vec::new();
    for (id, flow) in flows.iter_mut() {
        // A flow of children has the id of their job. Links from that id wait for the job, not for the
        // flow.
        let event = flow.is_owned.then(|| flow_event(FlowId(*id)));
        match flow.counts.turn() {
            FlowTurn::Stays => {}
            FlowTurn::Ends(_) if with_changes.contains(id) => {}
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
    }
    store_counts(tx, flows)?;
    // A callback that is left out would wait forever, so all are followed here.
    while !parents.is_empty() && !follow_parents(tx, &parents, flows, followed)? {}
    Ok(())
}

fn store_counts(tx: &Tx<'_>, flows: &BTreeMap<Uuid, ChangedFlow>) -> Sql<()> {
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
    let now = tx.now()?;
    for (id, flow) in flows {
        let Counts { open, failed, has_ended, .. } = flow.counts;
        tx.execute(STORE, params![id.as_bytes(), open, failed, has_ended, now])?;
    }
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
