//! Commands on whole flows: cancel, retry, and the removal of flows that ended long ago. [`flow`] decides.

use chrono::{DateTime, Utc};
use rusqlite::params;

use super::advance::{FORGET_END, end_waiting};
use super::reopen::{bring_back, candidates, reopen_members};
use super::tx::{Columns, Sql, Tx, micros};
use crate::job::{FlowId, JobId, Outcome};
use crate::rules::flow::{self, FLOW_CANCELLED, flow_event};
use crate::store::{CancelledMembers, Retention, RetriedMembers};

/// If the walk of a cancel makes no further step for 10 s, others resume it.
pub(super) const WALK_CUT_OFF: i64 = 10_000_000;

/// Flags a flow that has not ended. Nothing can be added to it any more, so that it ends.
pub(super) fn flag_cancelled(tx: &Tx<'_>, flow: FlowId) -> Sql<bool> {
    const FLAG: &str = "
        update flows
           set cancelled = true,
               cancelling_at = ?2,
               sealed = true
         where id = ?1
           and ended_at is null
           and not cancelled";
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
           set cancel_requested = true
         where id = ?1
           and not cancel_requested
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
           and cancelled";
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
           and not cancelled
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
    // Also whether the end of a member that the retry is to reopen has not been followed yet, or the return of any
    // member: its children would start because of what it was before.
    const FLOW: &str = "
        select w.owned,
               exists (
                 select 1
                   from flow_changes c
                  where c.flow = w.id
                    and c.job is not null
                    and c.succeeded is null)
            or exists (
                 select 1
                   from flow_changes c
                   join finished f on f.id = c.job
                  where c.flow = w.id
                    and f.outcome <> 'succeeded'
                    and (f.finished_at <= ?2 or f.skipped))
          from flows w
         where w.id = ?1";
    // A flow that is retried is no longer cancelled and has not ended.
    const REOPEN: &str = "
        update flows
           set open = open + ?2,
               failed = failed - ?3,
               cancelled = false,
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
    let Some((is_owned, has_changes)) =
        tx.row(FLOW, params![id, before.timestamp_micros()], |row| Ok((row.get(0)?, row.get(1)?)))?
    else {
        return Ok(RetriedMembers::default());
    };
    if has_changes {
        return Ok(RetriedMembers { advance_first: true, ..RetriedMembers::default() });
    }
    let page = member_page(tx, flow, after, limit)?;
    let next = page.last().filter(|_| page.len() == limit as usize).copied();
    let reopened = flow::reopen(&candidates(tx, &page, before)?);
    let (members, failures, queues) = reopen_members(tx, &reopened)?;
    if members > 0 {
        tx.execute(REOPEN, params![id, members, failures, tx.now()?])?;
    }
    if members > 0 && is_owned {
        tx.execute(FORGET_END, [flow_event(flow)])?;
    } else if members > 0 {
        // The flow has not ended any more, so callbacks that were skipped wait again.
        tx.execute(OPEN_LINKS, [id])?;
        let callbacks = tx.rows(CALLBACKS, [id], |row| row.job(0))?;
        bring_back(tx, &callbacks.into_iter().collect(), |_| false)?;
    }
    let queues = queues.into_iter().collect();
    Ok(RetriedMembers { reopened: members as u64, queues, next, advance_first: false })
}

/// Removes flows that ended some time ago and have no members left. The job of children may join
/// them, even if there are none, as long as it is kept.
pub(super) fn remove_flows(tx: &Tx<'_>, policy: &Retention, limit: u32) -> Sql<u64> {
    const REMOVE: &str = "
        delete from flows
         where id in (
               select f.id
                 from flows f
                where f.ended_at < ?1
                  and not exists (select 1 from jobs j where j.flow = f.id)
                  and not (f.owned and exists (select 1 from jobs j where j.id = f.id))
                order by f.ended_at
                limit ?2)
        returning id, owned";
    // Links from a flow of children wait for their job.
    const LINKS: &str = "
        delete from links
         where parent = ?1";
    const PARTS: &str = "
        delete from flow_parts
         where flow = ?1";
    let Some(shortest) = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min() else {
        return Ok(0);
    };
    let before = tx.now()?.saturating_sub(micros(shortest));
    let removed: Vec<([u8; 16], bool)> =
        tx.rows(REMOVE, params![before, limit], |row| Ok((row.get(0)?, row.get(1)?)))?;
    for (id, _) in removed.iter().filter(|(_, is_owned)| !is_owned) {
        tx.execute(LINKS, [id])?;
        tx.execute(PARTS, [id])?;
    }
    Ok(removed.len() as u64)
}
