//! Advance: what happens to the members of a flow when others end. Everything here that reads links to
//! decide holds the lock of the flow's row.
//!
//! The statements that end or reopen a member insert a row into `flow_changes`, without a lock.
//! [`advance`] follows these rows. [`flow`] decides.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use sqlx::Row;
use uuid::Uuid;

use super::reopen::{bring_back, locked_skipped};
use super::turns::{add_turns, add_turns_of_removed};
use super::tx::{Sql, Tx};
use crate::job::FlowId;
use crate::rules::flow::{
    self, CALLBACK_SKIPPED, Change, Condition, Counts, End, FLOW_CANCELLED, FlowTurn, Follow, Held, Pick,
    flow_event,
};
use crate::store::{Advanced, FlowRecord, Pending, warn_of_refused_flow};

/// Notes the end of members of flows in `$rows`: id, flow. `$succeeded` says how they ended. Sorted, so that
/// changes are in the same order on both engines.
macro_rules! note_ends {
    ($rows:literal, $succeeded:literal) => {
        concat!(
            "
    noted_ends as (
      insert into longshore.flow_changes (flow, job, succeeded, failure)
      select n.flow, n.id, ",
            $succeeded,
            ", not ",
            $succeeded,
            "
        from ",
            $rows,
            " n
       where n.flow is not null
       order by n.id)"
        )
    };
}
pub(super) use note_ends;

/// Deletes the links of members that are removed. Those that wait for them stay: they say how the parent ended.
macro_rules! delete_links {
    ($ids:literal) => {
        concat!(
            "
    deleted_links as (
      delete from longshore.links
       where child = any(array(",
            $ids,
            "))),"
        )
    };
}
pub(super) use delete_links;

const PENDING: &str = "
    select exists (select 1 from longshore.events where fresh),
           exists (select 1 from longshore.flow_changes),
           exists (select 1 from longshore.flows where cancelling_at < longshore.clock() - interval '10 seconds')
             or exists (
                  select 1
                    from longshore.flows
                   where deadline <= longshore.clock()
                     and ended_at is null
                     and not cancelled),
           exists (
             select 1
               from longshore.operations
              where state = 'running'
                and (taken_until is null or taken_until <= longshore.clock()))";

pub(super) async fn pending(tx: &mut Tx<'_>) -> Sql<Pending> {
    let (events, changes, cancels, operations) =
        sqlx::query_as(tx.sql(PENDING)).fetch_one(&mut *tx.connection).await?;
    Ok(Pending { events, changes, cancels, operations })
}

const HAS_CHANGES: &str = "
    select exists (select 1 from longshore.flow_changes)";

async fn has_changes(tx: &mut Tx<'_>) -> Sql<bool> {
    Ok(sqlx::query_scalar(tx.sql(HAS_CHANGES)).fetch_one(&mut *tx.connection).await?)
}

/// The first 256 flows with changes after `$1`, the maximum of [`MAX_CHANGED`].
const CHANGED: &str = "
    with recursive changed as (
      (select flow, 1 as nth
         from longshore.flow_changes
        where flow > coalesce($1, '00000000-0000-0000-0000-000000000000')
        order by flow
        limit 1)
      union all
      select next.flow, changed.nth + 1
        from changed
       cross join lateral (
               select c.flow
                 from longshore.flow_changes c
                where c.flow > changed.flow
                order by c.flow
                limit 1) as next
       where changed.nth < 256)
    select flow from changed";

const MAX_CHANGED: usize = 256;

async fn changed(tx: &mut Tx<'_>, after: Option<Uuid>) -> Sql<Vec<Uuid>> {
    Ok(sqlx::query_scalar(tx.sql(CHANGED)).bind(after).fetch_all(&mut *tx.connection).await?)
}

/// Locks up to 32 of these flows. Those that others have locked are skipped:
/// the process that has locked one looks again after its commit. Only SQL that adds a task does not, and
/// leaves that to upkeep.
const LOCK_CHANGED: &str = "
    select f.id, f.open, f.failed, f.sealed, f.cancelled, f.ended_at is not null, f.owned
      from longshore.flows f
     where f.id = any($1)
     order by f.id
     limit 32
       for no key update skip locked";

/// A locked flow.
struct LockedFlow {
    counts: Counts,
    /// Whether its members are the children of a job.
    is_owned: bool,
}

/// Changes of flows that do not exist: nothing follows them.
const FORGET_CHANGES: &str = "
    delete from longshore.flow_changes c
     where c.flow = any($1)
       and not exists (select 1 from longshore.flows f where f.id = c.flow)";

/// The first `$2` changes, if no member was reopened, as is almost always the case.
const ENDS: &str = "
    select c.id, c.flow, c.job, c.succeeded, c.failure, c.counted, false as is_reopened
      from longshore.flow_changes c
     where c.flow = any($1)
       and not exists (
             select 1
               from longshore.flow_changes r
              where r.flow = any($1)
                and r.job is not null
                and r.succeeded is null)
     order by c.id
     limit $2";

/// The changes to choose from. Of flows with members that were reopened: those up to the `$2`-th return, which may be behind
/// many ends. Of the others: the first `$2`.
const CHANGES: &str = "
    with reopened as materialized (
      select i.flow
        from unnest($1::uuid[]) as i(flow)
       where exists (
               select 1
                 from longshore.flow_changes c
                where c.flow = i.flow
                  and c.job is not null
                  and c.succeeded is null)),
    returns as materialized (
      select c.id
        from longshore.flow_changes c
       where c.flow = any(array(select flow from reopened))
         and c.job is not null
         and c.succeeded is null
       order by c.id
       limit $2)
    select c.id, c.flow, c.job, c.succeeded, c.failure, c.counted, true as is_reopened
      from longshore.flow_changes c
     where c.flow = any(array(select flow from reopened))
       and c.id <= (select max(id) from returns)
     union all
    (select c.id, c.flow, c.job, c.succeeded, c.failure, c.counted, false as is_reopened
       from longshore.flow_changes c
      where c.flow = any($1)
        and c.flow <> all(array(select flow from reopened))
      order by c.id
      limit $2)
     order by id";

/// The maximum number of links that one step closes.
const MAX_CLOSED: usize = 2000;

/// How long a step waits for a row that another transaction has locked and that it cannot skip, such as a link. Most hold such
/// a lock for milliseconds. All other flows wait meanwhile, and upkeep tries again every second.
const MAX_LOCK_WAIT: Duration = Duration::from_millis(100);
/// The same for a step that follows only one of many flows.
const MAX_LOCK_WAIT_OF_ONE: Duration = Duration::from_millis(10);

pub(super) async fn advance(tx: &mut Tx<'_>, after: Option<FlowId>, limit: u32) -> Sql<Advanced> {
    // Almost always there is nothing to do, and no transaction is needed.
    if !has_changes(tx).await? {
        return Ok(Advanced::default());
    }
    match advance_together(tx, after.map(|flow| flow.0), limit).await {
        Err(fault) if fault.is_refusal() => advance_one_by_one(tx, limit).await,
        done => done,
    }
}

/// Follows changes of several flows behind `after`. It goes on without flows with a locked job, however many they are.
async fn advance_together(tx: &mut Tx<'_>, after: Option<Uuid>, limit: u32) -> Sql<Advanced> {
    let mut chosen = Chosen::After(after);
    loop {
        match try_step(tx, &chosen, limit).await? {
            Try::Done(advanced) => return Ok(advanced),
            Try::Blocked { free, last, .. } if free.is_empty() => chosen = Chosen::After(last),
            Try::Blocked { free, after, .. } => chosen = Chosen::These(free, after),
        }
    }
}

/// One flow that the database does not let us change must not keep the others from advancing.
async fn advance_one_by_one(tx: &mut Tx<'_>, limit: u32) -> Sql<Advanced> {
    let (mut all, mut after) = (Advanced::default(), None);
    loop {
        let flows = changed(tx, after).await?;
        for flow in &flows {
            match try_step(tx, &Chosen::One(*flow), limit).await {
                Err(fault) if fault.is_refusal() => warn_of_refused_flow(FlowId(*flow), &fault.into()),
                done => {
                    if let Try::Done(advanced) = done? {
                        all.add(advanced);
                    }
                }
            }
        }
        after = flows.last().copied();
        if flows.len() < MAX_CHANGED {
            return Ok(all);
        }
    }
}

/// The flows of a step.
enum Chosen {
    /// The first free ones behind this one.
    After(Option<Uuid>),
    /// These, which are the first free ones behind the last.
    These(Vec<Uuid>, Option<Uuid>),
    One(Uuid),
}

/// What came of a step.
enum Try {
    Done(Advanced),
    /// Another transaction has locked a job that the step would release or end. Nothing was stored.
    Blocked {
        /// Those of the step's flows without such a job, as far as the step got.
        free: Vec<Uuid>,
        /// Behind which flow they were found.
        after: Option<Uuid>,
        /// The last flow of the step.
        last: Option<Uuid>,
    },
}

/// Follows changes of these flows.
async fn try_step(tx: &mut Tx<'_>, chosen: &Chosen, limit: u32) -> Sql<Try> {
    let mut transaction = tx.begin_indexed().await?;
    let tx = &mut transaction.tx();
    let max_lock_wait = if matches!(chosen, Chosen::One(_)) { MAX_LOCK_WAIT_OF_ONE } else { MAX_LOCK_WAIT };
    tx.limit_lock_waits(max_lock_wait).await?;
    let (mut flows, after) = match chosen {
        Chosen::After(after) => lock_changed(tx, *after).await?,
        Chosen::These(flows, after) => (lock(tx, flows).await?, *after),
        Chosen::One(flow) => (lock(tx, &[*flow]).await?, None),
    };
    if flows.is_empty() {
        transaction.commit().await?;
        let more = matches!(chosen, Chosen::These(..));
        return Ok(Try::Done(Advanced { more, after: after.map(FlowId), ..Advanced::default() }));
    }
    let step = next_step(tx, &flows, limit).await?;
    let mut advanced = Advanced { more: true, after: after.map(FlowId), ..Advanced::default() };
    let mut followed = Followed::default();
    let is_complete = follow_parents(tx, &step.parents, &mut flows, &mut followed).await?;
    if is_complete && followed.blocked.is_empty() {
        for (flow, change) in &step.counted {
            if let Some(flow) = flows.get_mut(flow) {
                flow.counts.add(change);
            }
        }
        delete_changes(tx, &step.rows).await?;
        store_turns(tx, &mut flows, &mut followed, &mut advanced).await?;
    } else if followed.blocked.is_empty() {
        // The rest of the children comes next; the changes are still there.
        store_counts(tx, &flows).await?;
    }
    if !followed.blocked.is_empty() {
        transaction.rollback().await?;
        let last = flows.keys().next_back().copied();
        flows.retain(|flow, _| !followed.blocked.contains(flow));
        tracing::debug!(
            flows = followed.blocked.len(),
            "other transactions have locked jobs of flows; following them later"
        );
        return Ok(Try::Blocked { free: flows.into_keys().collect(), after, last });
    }
    transaction.commit().await?;
    advanced.queues = followed.queues.into_iter().collect();
    Ok(Try::Done(advanced))
}

/// Locks flows with changes behind `after`. It goes on behind those that others have locked, however many they are. Also
/// returns behind which flow it found them.
async fn lock_changed(
    tx: &mut Tx<'_>,
    mut after: Option<Uuid>,
) -> Sql<(BTreeMap<Uuid, LockedFlow>, Option<Uuid>)> {
    loop {
        let page = changed(tx, after).await?;
        let flows = lock(tx, &page).await?;
        if !flows.is_empty() {
            return Ok((flows, after));
        }
        sqlx::query(tx.sql(FORGET_CHANGES)).bind(&page).execute(&mut *tx.connection).await?;
        after = page.last().copied();
        if page.len() < MAX_CHANGED {
            return Ok((flows, after));
        }
    }
}

async fn lock(tx: &mut Tx<'_>, ids: &[Uuid]) -> Sql<BTreeMap<Uuid, LockedFlow>> {
    let mut flows = BTreeMap::new();
    for row in sqlx::query(tx.sql(LOCK_CHANGED)).bind(ids).fetch_all(&mut *tx.connection).await? {
        let counts = Counts {
            open: row.try_get(1)?,
            failed: row.try_get(2)?,
            is_sealed: row.try_get(3)?,
            is_cancelled: row.try_get(4)?,
            has_ended: row.try_get(5)?,
        };
        flows.insert(row.try_get(0)?, LockedFlow { counts, is_owned: row.try_get(6)? });
    }
    Ok(flows)
}

/// The changes that are followed together.
#[derive(Default)]
struct Step {
    /// The ids of their rows.
    rows: Vec<i64>,
    /// The changes, with their flows.
    counted: Vec<(Uuid, Change)>,
    /// The members whose children are followed.
    parents: Vec<Parent>,
}

/// A member whose children are followed, or a flow whose callbacks are.
struct Parent {
    id: Uuid,
    flow: Uuid,
    /// How it ended; `None` if it was reopened.
    end: Option<End>,
}

/// The changes to follow now. A row without a job only says that the flow is to be looked at.
async fn next_step(tx: &mut Tx<'_>, flows: &BTreeMap<Uuid, LockedFlow>, limit: u32) -> Sql<Step> {
    let ids: Vec<Uuid> = flows.keys().copied().collect();
    let mut found =
        sqlx::query(tx.sql(ENDS)).bind(&ids).bind(i64::from(limit)).fetch_all(&mut *tx.connection).await?;
    if found.is_empty() {
        let changes = sqlx::query(tx.sql(CHANGES)).bind(&ids).bind(i64::from(limit));
        found = changes.fetch_all(&mut *tx.connection).await?;
    }
    let (mut step, mut read) = (Step::default(), Vec::new());
    let (mut changes, mut reopened) = (Vec::new(), BTreeSet::new());
    for row in &found {
        let (id, flow): (i64, Uuid) = (row.try_get(0)?, row.try_get(1)?);
        let Some(job) = row.try_get(2)? else {
            step.rows.push(id);
            continue;
        };
        let end = row.try_get::<Option<bool>, _>(3)?.map(End::of);
        let (is_failure, is_counted) = (row.try_get(4)?, row.try_get(5)?);
        read.push(id);
        changes.push((flow, Change { job, end, is_failure, is_counted }));
        reopened.extend(row.try_get::<bool, _>(6)?.then_some(flow));
    }
    for ((id, (flow, change)), pick) in read.into_iter().zip(&changes).zip(flow::pick(&changes, &reopened)) {
        if pick != Pick::Leave {
            step.rows.push(id);
            step.counted.push((*flow, *change));
        }
        if pick == Pick::Follow {
            step.parents.push(Parent { id: change.job, flow: *flow, end: change.end });
        }
    }
    Ok(step)
}

/// What was decided about children.
#[derive(Default)]
struct Followed {
    queues: BTreeSet<String>,
    /// The flows of which another transaction has locked a job. What was decided about them cannot be stored now.
    blocked: BTreeSet<Uuid>,
}

const OPEN_LINKS: &str = "
    select l.parent, l.child, l.condition
      from longshore.links l
     where l.parent = any($1)
       and l.met is null
     limit $2";

const CLOSED_LINKS: &str = "
    select l.parent, l.child, l.condition
      from longshore.links l
     where l.parent = any($1)
       and l.met is not null
     limit $2";

/// Each link is found by its primary key, whatever the planner assumes about the table.
const SET_MET: &str = "
    update longshore.links
       set met = i.met
      from (select l.row_id, i.met
              from unnest((select $1::uuid[]), (select $2::uuid[]), (select $3::bool[])) as i(parent, child, met)
             cross join lateral (
                     select l.ctid as row_id
                       from longshore.links l
                      where l.parent = i.parent
                        and l.child = i.child
                      limit 1) as l) as i
     where links.ctid = i.row_id";

/// Closes the links of parents that ended, opens those of parents that were reopened, and follows
/// the children: those that wait, and those that were skipped because of a parent that was reopened. Returns whether all links of these parents are done.
async fn follow_parents(
    tx: &mut Tx<'_>,
    parents: &[Parent],
    flows: &mut BTreeMap<Uuid, LockedFlow>,
    followed: &mut Followed,
) -> Sql<bool> {
    let by_id: BTreeMap<Uuid, &Parent> = parents.iter().map(|parent| (parent.id, parent)).collect();
    let (ended, reopened): (Vec<_>, Vec<_>) = parents.iter().partition(|parent| parent.end.is_some());
    let ids = |parents: Vec<&Parent>| parents.into_iter().map(|parent| parent.id).collect::<Vec<_>>();
    let mut rows = Vec::new();
    for (statement, parents) in [(CLOSED_LINKS, ids(reopened)), (OPEN_LINKS, ids(ended))] {
        if !parents.is_empty() && rows.len() <= MAX_CLOSED {
            let left = MAX_CLOSED + 1 - rows.len();
            let query = sqlx::query(tx.sql(statement)).bind(parents).bind(left as i64);
            rows.extend(query.fetch_all(&mut *tx.connection).await?);
        }
    }
    let is_complete = rows.len() <= MAX_CLOSED;
    let (mut of_parent, mut of_child, mut met) = (Vec::new(), Vec::new(), Vec::new());
    // The children, and the flows whose changes are about them.
    let (mut children, mut of_reopened) = (BTreeMap::new(), BTreeMap::new());
    for row in rows.iter().take(MAX_CLOSED) {
        let (parent, child): (Uuid, Uuid) = (row.try_get(0)?, row.try_get(1)?);
        let condition = Condition::from_stored(row.try_get(2)?)?;
        let Some(Parent { flow, end, .. }) = by_id.get(&parent) else { continue };
        of_parent.push(parent);
        of_child.push(child);
        met.push(end.map(|end| condition.is_met(end)));
        match end {
            Some(_) => children.insert(child, *flow),
            None => of_reopened.insert(child, *flow),
        };
    }
    if !of_parent.is_empty() {
        let set = sqlx::query(tx.sql(SET_MET)).bind(of_parent).bind(of_child).bind(met);
        set.execute(&mut *tx.connection).await?;
    }
    follow_children(tx, &children, flows, followed).await?;
    let reopened: Vec<Uuid> = of_reopened.keys().copied().collect();
    let locked = locked_skipped(tx, &reopened).await?;
    followed.blocked.extend(locked.iter().filter_map(|job| of_reopened.get(job)));
    if !followed.blocked.is_empty() {
        return Ok(is_complete);
    }
    for flow in bring_back(tx, &reopened, |flow| is_cancelled(flows, flow)).await? {
        if let Some(flow) = flows.get_mut(&flow) {
            flow.counts.open += 1;
        }
    }
    Ok(is_complete)
}

/// The held ones of these jobs, with the numbers of their links and one parent whose end
/// they needed otherwise. Each row is found by its key. A join would read whole tables for each child while the
/// planner takes them for empty.
const HELD_CHILDREN: &str = "
    select c.id, w.flow, l.open, l.unmet, b.task, b.succeeded
      from unnest((select $1::uuid[])) as c(id)
     cross join lateral (
             select r.flow
               from longshore.ready r
              where r.id = c.id
                and r.held
              limit 1) as w
     cross join lateral (
             select count(*) filter (where met is null) as open, count(*) filter (where not met) as unmet
               from longshore.links
              where child = c.id) as l
      left join lateral (
             select j.task, f.succeeded
               from (select n.parent
                       from longshore.links n
                      where n.child = c.id
                        and not n.met
                        and l.unmet > 0
                      order by n.parent
                     offset 0) as n
              cross join lateral (
                      select task
                        from longshore.jobs
                       where id = n.parent
                       limit 1) as j
              cross join lateral (
                      select outcome = 'succeeded' as succeeded
                        from longshore.finished
                       where id = n.parent
                       limit 1) as f
              order by n.parent
              limit 1) as b
        on true
     order by c.id";

async fn follow_children(
    tx: &mut Tx<'_>,
    children: &BTreeMap<Uuid, Uuid>,
    flows: &BTreeMap<Uuid, LockedFlow>,
    followed: &mut Followed,
) -> Sql<()> {
    if children.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = children.keys().copied().collect();
    let (mut released, mut ended, mut reasons) = (Vec::new(), Vec::new(), Vec::new());
    for row in sqlx::query(tx.sql(HELD_CHILDREN)).bind(ids).fetch_all(&mut *tx.connection).await? {
        let id: Uuid = row.try_get(0)?;
        let flow: Option<Uuid> = row.try_get(1)?;
        let held = Held { open: row.try_get(2)?, unmet: row.try_get(3)? };
        match flow::follow(held, is_cancelled(flows, flow)) {
            Follow::Wait => {}
            Follow::Release => released.push(id),
            Follow::Cancel => {
                ended.push(id);
                reasons.push(FLOW_CANCELLED.to_owned());
            }
            Follow::Skip => {
                let end = End::of(row.try_get::<Option<bool>, _>(5)?.unwrap_or(false));
                ended.push(id);
                reasons.push(match flow {
                    None => CALLBACK_SKIPPED.to_owned(),
                    Some(_) => flow::skip_reason(row.try_get(4)?, end),
                });
            }
        }
    }
    let mut changed: BTreeSet<Uuid> = release(tx, &released, followed).await?.into_iter().collect();
    changed.extend(end_waiting(tx, &ended, &reasons).await?);
    let left = released.iter().chain(&ended).filter(|job| !changed.contains(job));
    followed.blocked.extend(left.filter_map(|job| children.get(job)));
    Ok(())
}

/// Whether the flow of a child was cancelled. A callback is not a member: it runs even then.
fn is_cancelled(flows: &BTreeMap<Uuid, LockedFlow>, flow: Option<Uuid>) -> bool {
    flow.and_then(|flow| flows.get(&flow)).is_some_and(|flow| flow.counts.is_cancelled)
}

const RELEASE: &str = concat!(
    "
    with deleted as (
      delete from longshore.ready
       where ctid = any(array(
               select w.row_id
                 from unnest((select $1::uuid[])) as i(id)
                cross join lateral (
                        select r.ctid as row_id
                          from longshore.ready r
                         where r.id = i.id
                           and r.held
                         limit 1
                           for update skip locked) as w))
      returning *),
    requeued as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags, grp, flow)
      select d.id, greatest(j.run_at, longshore.clock()), longshore.clock(), d.timeout_ms, d.lease_no, d.priority,
             d.attempt, d.max_attempts, d.interruptions, d.keyed, d.kind, d.queue, d.flags, d.grp, d.flow
        from deleted d
       cross join lateral (
               select run_at
                 from longshore.jobs
                where id = d.id
                limit 1) as j
      returning run_at, priority, queue, grp),",
    add_turns!("requeued"),
    "
    select array(select id from deleted),
           array(select distinct queue from requeued where run_at <= longshore.clock())"
);

/// Lets held jobs start, except those that others have locked. Returns which.
async fn release(tx: &mut Tx<'_>, ids: &[Uuid], followed: &mut Followed) -> Sql<Vec<Uuid>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let (released, queues): (Vec<Uuid>, Vec<String>) =
        sqlx::query_as(tx.sql(RELEASE)).bind(ids).fetch_one(&mut *tx.connection).await?;
    followed.queues.extend(queues);
    Ok(released)
}

/// Ends waiting jobs as cancelled, whatever they wait for, except those that others have locked. They do not count as
/// failures.
const END_WAITING: &str = concat!(
    "
    with deleted as (
      delete from longshore.ready
       where ctid = any(array(
               select w.row_id
                 from unnest((select $1::uuid[])) as i(id)
                cross join lateral (
                        select r.ctid as row_id
                          from longshore.ready r
                         where r.id = i.id
                         limit 1
                           for update skip locked) as w))
      returning *),
    finished_jobs as (
      insert into longshore.finished
             (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions, last_error, flow, skipped)
      select d.id, longshore.clock(), d.lease_no, 'cancelled', d.attempt, d.max_attempts, d.interruptions, i.reason,
             d.flow, true
        from deleted d
        join unnest((select $1::uuid[]), (select $2::text[])) as i(id, reason) using (id)),
    deleted_keys as (
      delete from longshore.keys
       where job = any(array(select id from deleted where keyed))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), count(*), count(*), 'cancelled', 0, queue, kind
        from deleted
       group by queue, kind),",
    add_turns_of_removed!("deleted"),
    ",
    noted_ends as (
      insert into longshore.flow_changes (flow, job, succeeded, failure)
      select flow, id, false, false
        from deleted
       where flow is not null
       order by id)
    select id from deleted"
);

/// Returns those that were ended.
pub(super) async fn end_waiting(tx: &mut Tx<'_>, ids: &[Uuid], reasons: &[String]) -> Sql<Vec<Uuid>> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let query = sqlx::query_scalar(tx.sql(END_WAITING)).bind(ids).bind(reasons);
    Ok(query.fetch_all(&mut *tx.connection).await?)
}

const STORE_COUNTS: &str = "
    update longshore.flows f
       set open = i.open,
           failed = i.failed,
           ended_at = case when not i.has_ended then null else coalesce(f.ended_at, longshore.clock()) end,
           cancelling_at = case when not i.has_ended then f.cancelling_at end,   -- nothing is left to cancel
           deadline = case   -- a flow that is open again must not end because of a deadline that has passed
                        when f.ended_at is null or i.has_ended or f.deadline > longshore.clock() then f.deadline
                      end
      from unnest((select $1::uuid[]), (select $2::int8[]), (select $3::int8[]), (select $4::bool[]))
        as i(id, open, failed, has_ended)
     where f.id = i.id";

/// The end of a flow of children is an event, which their parent may wait for.
const EMIT_END: &str = "
    insert into longshore.events (name, emitted_at, payload)
    select name, longshore.clock(), 'null'
      from unnest((select $1::text[])) as i(name)
        on conflict (name) do update
       set emitted_at = excluded.emitted_at,
           fresh = true";

pub(super) const FORGET_END: &str = "
    delete from longshore.events
     where name = any($1)";

const WITH_CHANGES: &str = "
    select i.flow
      from unnest($1::uuid[]) as i(flow)
     where exists (select 1 from longshore.flow_changes c where c.flow = i.flow)";

/// Those of the flows that could end now and have changes which were not followed. They do not end: one of the changes may be
/// a member that runs again.
async fn with_changes(tx: &mut Tx<'_>, flows: &BTreeMap<Uuid, LockedFlow>) -> Sql<BTreeSet<Uuid>> {
    let over = flows.iter().filter(|(_, flow)| matches!(flow.counts.turn(), FlowTurn::Ends(_)));
    let over: Vec<Uuid> = over.map(|(id, _)| *id).collect();
    if over.is_empty() {
        return Ok(BTreeSet::new());
    }
    let found = sqlx::query_scalar(tx.sql(WITH_CHANGES)).bind(over).fetch_all(&mut *tx.connection).await?;
    Ok(found.into_iter().collect())
}

/// Stores the numbers of the flows, and follows the ends of the flows themselves. The changes that were followed have been
/// deleted.
async fn store_turns(
    tx: &mut Tx<'_>,
    flows: &mut BTreeMap<Uuid, LockedFlow>,
    followed: &mut Followed,
    advanced: &mut Advanced,
) -> Sql<()> {
    let with_changes = with_changes(tx, flows).await?;
    let (mut parents, mut emitted, mut forgotten) = (Vec::new(), Vec::new(), Vec::new());
    for (id, flow) in flows.iter_mut() {
        // A flow of children has the id of their job. Links from that id wait for the job, not for the
        // flow.
        let event = flow.is_owned.then(|| flow_event(FlowId(*id)));
        match flow.counts.turn() {
            FlowTurn::Stays => continue,
            FlowTurn::Ends(_) if with_changes.contains(id) => continue,
            FlowTurn::Ends(end) => {
                flow.counts.has_ended = true;
                parents.extend((!flow.is_owned).then_some(Parent { id: *id, flow: *id, end: Some(end) }));
                emitted.extend(event);
                advanced.ended.push(FlowRecord::status(flow.counts.failed, flow.counts.is_cancelled, true));
            }
            FlowTurn::Reopens => {
                flow.counts.has_ended = false;
                parents.extend((!flow.is_owned).then_some(Parent { id: *id, flow: *id, end: None }));
                forgotten.extend(event);
            }
        }
    }
    store_counts(tx, flows).await?;
    if !emitted.is_empty() {
        sqlx::query(tx.sql(EMIT_END)).bind(emitted).execute(&mut *tx.connection).await?;
        advanced.emitted = true;
    }
    if !forgotten.is_empty() {
        sqlx::query(tx.sql(FORGET_END)).bind(forgotten).execute(&mut *tx.connection).await?;
    }
    // At most 32 flows with a hundred callbacks each, which is not much more than one step closes. A
    // callback that is left out would wait forever, so all are followed here.
    while !parents.is_empty()
        && !follow_parents(tx, &parents, flows, followed).await?
        && followed.blocked.is_empty()
    {}
    Ok(())
}

async fn store_counts(tx: &mut Tx<'_>, flows: &BTreeMap<Uuid, LockedFlow>) -> Sql<()> {
    let counts = || flows.values().map(|flow| flow.counts);
    sqlx::query(tx.sql(STORE_COUNTS))
        .bind(flows.keys().copied().collect::<Vec<_>>())
        .bind(counts().map(|counts| counts.open).collect::<Vec<_>>())
        .bind(counts().map(|counts| counts.failed).collect::<Vec<_>>())
        .bind(counts().map(|counts| counts.has_ended).collect::<Vec<_>>())
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

const DELETE_CHANGES: &str = "
    delete from longshore.flow_changes
     where id = any($1)";

async fn delete_changes(tx: &mut Tx<'_>, rows: &[i64]) -> Sql<()> {
    sqlx::query(tx.sql(DELETE_CHANGES)).bind(rows).execute(&mut *tx.connection).await?;
    Ok(())
}
