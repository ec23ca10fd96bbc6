//! Commands on whole flows: cancel, retry, and the removal of flows that ended long ago. Each step holds the
//! lock of the flow's row. [`flow`] decides.

use std::time::Duration;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::advance::{FORGET_END, end_waiting};
use super::reopen::{bring_back, candidates, reopen_members};
use super::tx::{Sql, Tx};
use crate::job::{FlowId, JobId, Outcome, WorkerId};
use crate::rules::flow::{self, FLOW_CANCELLED, flow_event};
use crate::rules::retry::millis;
use crate::store::{CancelledMembers, Retention, RetriedMembers};

/// Flags a flow that has not ended. Nothing can be added to it any more, so that it ends.
const FLAG_CANCELLED: &str = "
    update longshore.flows
       set cancelled = true,
           cancelling_at = longshore.clock(),
           sealed = true
     where id = $1
       and ended_at is null
       and not cancelled";

pub(super) async fn flag_cancelled(tx: &mut Tx<'_>, flow: FlowId, max_wait: Duration) -> Sql<bool> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let flagged = sqlx::query(tx.sql(FLAG_CANCELLED)).bind(flow.0).execute(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(flagged.rows_affected() > 0)
}

const MEMBER_PAGE: &str = "
    select id
      from longshore.jobs
     where flow = $1
       and ($2::uuid is null or id > $2)
     order by id
     limit $3";

async fn member_page(tx: &mut Tx<'_>, flow: FlowId, after: Option<JobId>, limit: u32) -> Sql<Vec<Uuid>> {
    let query = sqlx::query_scalar(tx.sql(MEMBER_PAGE));
    let query = query.bind(flow.0).bind(after.map(|id| id.0)).bind(i64::from(limit));
    Ok(query.fetch_all(&mut *tx.connection).await?)
}

const REQUEST_STOP: &str = "
    update longshore.running
       set cancel_requested = true
     where id = any(array(
             select id
               from longshore.running
              where id = any($1)
                and not cancel_requested
                for update skip locked))
    returning worker";

const LOCK_WAITING: &str = "
    select id
      from longshore.ready
     where id = any($1)
     order by id
       for update skip locked";

/// How many of these jobs neither have ended nor are requested to stop.
const NOT_CANCELLED: &str = "
    select (select count(*) from longshore.ready where id = any($1))
         + (select count(*) from longshore.running where id = any($1) and not cancel_requested)";

/// The walk goes on. Others resume it if it makes no further step for 10 s.
const CONTINUE_WALK: &str = "
    update longshore.flows
       set cancelling_at = longshore.clock()
     where id = $1
       and cancelling_at is not null";

/// Ends the walk, and lets `advance` look at the flow: it may have no open member.
const END_WALK: &str = "
    with ended as (
      update longshore.flows
         set cancelling_at = null
       where id = $1
      returning id)
    insert into longshore.flow_changes (flow)
    select id from ended";

/// A retry that began meanwhile ends the cancel.
const LOCK_CANCELLED: &str = "
    select id
      from longshore.flows
     where id = $1
       and cancelled
       for no key update";

/// How often a page of members is read again, if one of them moved between the tables or is locked. Most hold such a
/// lock for milliseconds.
const MAX_ROUNDS: usize = 5;
const ROUND_PAUSE: Duration = Duration::from_millis(3);

pub(super) async fn cancel_members(
    tx: &mut Tx<'_>,
    flow: FlowId,
    after: Option<JobId>,
    skipped: u64,
    limit: u32,
    max_wait: Duration,
) -> Sql<CancelledMembers> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let cancelled =
        sqlx::query(tx.sql(LOCK_CANCELLED)).bind(flow.0).fetch_optional(&mut *tx.connection).await?;
    if cancelled.is_none() {
        return Ok(CancelledMembers::default());
    }
    let page = member_page(tx, flow, after, limit).await?;
    let mut done = CancelledMembers::default();
    let reasons = vec![FLOW_CANCELLED.to_owned(); page.len()];
    for round in 1..=MAX_ROUNDS {
        let workers: Vec<Uuid> =
            sqlx::query_scalar(tx.sql(REQUEST_STOP)).bind(&page).fetch_all(&mut *tx.connection).await?;
        done.requested += workers.len() as u64;
        done.workers.extend(workers.into_iter().map(WorkerId));
        let waiting: Vec<Uuid> =
            sqlx::query_scalar(tx.sql(LOCK_WAITING)).bind(&page).fetch_all(&mut *tx.connection).await?;
        done.cancelled += end_waiting(tx, &waiting, &reasons[..waiting.len()]).await?.len() as u64;
        let left: i64 =
            sqlx::query_scalar(tx.sql(NOT_CANCELLED)).bind(&page).fetch_one(&mut *tx.connection).await?;
        done.skipped = left.unsigned_abs();
        if left == 0 {
            break;
        }
        if round < MAX_ROUNDS {
            tokio::time::sleep(ROUND_PAUSE).await;
        }
    }
    done.next = page.last().filter(|_| page.len() == limit as usize).map(|id| JobId(*id));
    let is_complete = done.next.is_none() && skipped + done.skipped == 0;
    let step = if is_complete { END_WALK } else { CONTINUE_WALK };
    sqlx::query(tx.sql(step)).bind(flow.0).execute(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(done)
}

/// A cancel that was cut off is taken for as long as a step of it would be: those that cannot continue, because a member
/// is locked, must not come first each time.
const FLOWS_TO_CANCEL: &str = "
    with cut_off as (
      update longshore.flows
         set cancelling_at = longshore.clock()
       where id = any(array(
               select id
                 from longshore.flows
                where cancelling_at < longshore.clock() - interval '10 seconds'
                order by cancelling_at
                limit $1
                  for no key update skip locked))
      returning id),
    overdue as (
      select id
        from longshore.flows
       where deadline <= longshore.clock()
         and ended_at is null
         and not cancelled
       order by deadline
       limit $1
         for no key update skip locked)
    select id from cut_off
     union
    select id from overdue";

pub(super) async fn flows_to_cancel(tx: &mut Tx<'_>, limit: u32) -> Sql<Vec<FlowId>> {
    let query = sqlx::query_scalar::<_, Uuid>(tx.sql(FLOWS_TO_CANCEL)).bind(i64::from(limit));
    Ok(query.fetch_all(&mut *tx.connection).await?.into_iter().map(FlowId).collect())
}

const LOCK_FOR_RETRY: &str = "
    select owned
      from longshore.flows
     where id = $1
       for no key update";

/// Whether the end of a member that the retry is to reopen has not been followed yet, or the return of any member: its
/// children would start because of what it was before.
const HAS_UNFOLLOWED: &str = "
    select exists (
             select 1
               from longshore.flow_changes c
              where c.flow = $1
                and c.job is not null
                and c.succeeded is null)
        or exists (
             select 1
               from longshore.flow_changes c
               join longshore.finished f on f.id = c.job
              where c.flow = $1
                and f.outcome <> 'succeeded'
                and (f.finished_at <= $2 or f.skipped))";

const CALLBACKS: &str = "
    select child
      from longshore.links
     where parent = $1";

/// A flow that is retried is no longer cancelled and has not ended.
const REOPEN_FLOW: &str = "
    update longshore.flows
       set open = open + $2,
           failed = failed - $3,
           cancelled = false,
           cancelling_at = null,
           deadline = case when deadline > longshore.clock() then deadline end,
           ended_at = null
     where id = $1";

const OPEN_LINKS: &str = "
    update longshore.links
       set met = null
     where parent = $1
       and met is not null";

pub(super) async fn retry_members(
    tx: &mut Tx<'_>,
    flow: FlowId,
    before: DateTime<Utc>,
    after: Option<JobId>,
    limit: u32,
    max_wait: Duration,
) -> Sql<RetriedMembers> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(max_wait).await?;
    let locked: Option<bool> =
        sqlx::query_scalar(tx.sql(LOCK_FOR_RETRY)).bind(flow.0).fetch_optional(&mut *tx.connection).await?;
    let Some(is_owned) = locked else { return Ok(RetriedMembers::default()) };
    // A statement of its own, so that it sees what was committed while this one waited for the lock.
    let has_unfollowed = sqlx::query_scalar(tx.sql(HAS_UNFOLLOWED)).bind(flow.0).bind(before);
    if has_unfollowed.fetch_one(&mut *tx.connection).await? {
        return Ok(RetriedMembers { advance_first: true, ..RetriedMembers::default() });
    }
    let page = member_page(tx, flow, after, limit).await?;
    let next = page.last().filter(|_| page.len() == limit as usize).map(|id| JobId(*id));
    let reopened = flow::reopen(&candidates(tx, &page, before).await?);
    let (members, failures, queues) = reopen_members(tx, &reopened).await?;
    if members > 0 {
        let reopen = sqlx::query(tx.sql(REOPEN_FLOW)).bind(flow.0).bind(members).bind(failures);
        reopen.execute(&mut *tx.connection).await?;
    }
    if members > 0 && is_owned {
        let events = vec![flow_event(flow)];
        sqlx::query(tx.sql(FORGET_END)).bind(events).execute(&mut *tx.connection).await?;
    } else if members > 0 {
        // The flow has not ended any more, so callbacks that were skipped wait again.
        sqlx::query(tx.sql(OPEN_LINKS)).bind(flow.0).execute(&mut *tx.connection).await?;
        let callbacks: Vec<Uuid> =
            sqlx::query_scalar(tx.sql(CALLBACKS)).bind(flow.0).fetch_all(&mut *tx.connection).await?;
        bring_back(tx, &callbacks, |_| false).await?;
    }
    transaction.commit().await?;
    Ok(RetriedMembers { reopened: members as u64, queues, next, advance_first: false })
}

/// Removes flows that ended some time ago and have no members left. The job of children may join
/// them, even if there are none, as long as it is kept.
const REMOVE_FLOWS: &str = "
    with deleted as (
      delete from longshore.flows
       where id = any(array(
               select f.id
                 from longshore.flows f
                where f.ended_at < longshore.clock() - interval '1 millisecond' * $1::int8
                  and not exists (select 1 from longshore.jobs j where j.flow = f.id)
                  and not (f.owned and exists (select 1 from longshore.jobs j where j.id = f.id))
                order by f.ended_at
                limit $2
                  for update skip locked))
      returning id, owned),
    deleted_parts as (
      delete from longshore.flow_parts
       where flow = any(array(select id from deleted))),
    deleted_links as (   -- links from a flow of children wait for their job
      delete from longshore.links
       where parent = any(array(select id from deleted where not owned)))
    select count(*) from deleted";

pub(super) async fn remove_flows(tx: &mut Tx<'_>, policy: &Retention, limit: u32) -> Sql<u64> {
    let Some(shortest) = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min() else {
        return Ok(0);
    };
    let query =
        sqlx::query_scalar::<_, i64>(tx.sql(REMOVE_FLOWS)).bind(millis(shortest)).bind(i64::from(limit));
    Ok(query.fetch_one(&mut *tx.connection).await?.unsigned_abs())
}
