//! Advance: what happens to the members of a flow when other members end. All code here that reads links to
//! decide holds the lock of the flow's row.
//!
//! The statements that end or reopen a member insert a row into `flow_changes`, without a lock.
//! [`advance`](FlowUpkeep::advance) follows these rows: it counts each change, and does with the children
//! what [`flow`] decides.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, column, one};
use super::flows::{FORGET_END, warn_of_refused_flow};
use super::operate_flows::{LOCK_SKIPPED, WALK_CUT_OFF, bring_back, skipped_jobs};
use super::{Advanced, FlowRecord, Pending};
use crate::error::Result;
use crate::job::{FlowId, Outcome};
use crate::rules::flow::{
    self, CALLBACK_SKIPPED, Change, Counts, End, FLOW_CANCELLED, FlowTurn, Follow, Held, Pick, flow_event,
};

/// What upkeep does for flows.
#[async_trait]
pub trait FlowUpkeep {
    /// Returns what upkeep has to do now: deliver events, follow changes, cancel flows, execute operations.
    /// One statement.
    async fn pending(&self) -> Result<Pending>;

    /// Follows up to `limit` changes of flows: members that ended or were reopened. Starts or ends their
    /// children as [`flow::follow`](crate::rules::flow::follow) decides, and ends flows without an open
    /// member. Skips locked flows, because the process that has locked one looks again itself, and flows with
    /// a locked job, which a later call follows. `after` is where the last step stopped: flows up to that one
    /// could not be followed, and are not read again.
    async fn advance(&self, after: Option<FlowId>, limit: u32) -> Result<Advanced>;
}

/// The maximum number of links that one step closes.
const MAX_CLOSED: usize = 2000;

/// How a step runs. It waits for a locked row that it cannot skip, such as a link, because most transactions
/// hold such a lock for milliseconds. The wait is short, because it delays all other flows, and upkeep tries
/// again every second.
const STEP: How = How::SLOW.waiting_up_to(Duration::from_millis(100)).indexed();
/// As [`STEP`], for a step that follows one of many flows.
const STEP_OF_ONE: How = How::SLOW.waiting_up_to(Duration::from_millis(10)).indexed();

#[async_trait]
impl<E: Engine> FlowUpkeep for E {
    async fn pending(&self) -> Result<Pending> {
        self.call(How::READ, (), |rows, ()| Box::pin(pending(rows))).await
    }

    async fn advance(&self, after: Option<FlowId>, limit: u32) -> Result<Advanced> {
        // Almost always there is nothing to do, and no transaction is needed.
        if !self.call(How::READ, (), |rows, ()| Box::pin(rows.has_row(&HAS_CHANGES, &[]))).await? {
            return Ok(Advanced::default());
        }
        match advance_together(self, after.map(|flow| flow.0), limit).await {
            Err(error) if E::is_refusal(&error) => advance_one_by_one(self, limit).await,
            done => done,
        }
    }
}

/// Follows changes of several flows after `after`. Leaves out flows with a locked job, however many there
/// are.
async fn advance_together<E: Engine>(engine: &E, after: Option<Uuid>, limit: u32) -> Result<Advanced> {
    let mut chosen = Chosen::After(after);
    loop {
        match try_step(engine, STEP, chosen, limit).await? {
            Try::Done(advanced) => return Ok(advanced),
            Try::Blocked { free, last, .. } if free.is_empty() => chosen = Chosen::After(last),
            Try::Blocked { free, after, .. } => chosen = Chosen::These(free, after),
        }
    }
}

/// Follows the flows one at a time: a flow that the database refuses to change must not stop the others.
async fn advance_one_by_one<E: Engine>(engine: &E, limit: u32) -> Result<Advanced> {
    let (mut all, mut after) = (Advanced::default(), None);
    loop {
        let flows = engine.call(How::READ, after, |rows, after| Box::pin(changed(rows, *after))).await?;
        for flow in &flows {
            match try_step(engine, STEP_OF_ONE, Chosen::One(*flow), limit).await {
                Err(error) if E::is_refusal(&error) => warn_of_refused_flow(FlowId(*flow), &error),
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
    /// The first unlocked flows after this one.
    After(Option<Uuid>),
    /// These flows, which were found after the flow in the second field.
    These(Vec<Uuid>, Option<Uuid>),
    One(Uuid),
}

/// The result of a step.
enum Try {
    Done(Advanced),
    /// Another transaction has locked a job that the step would start or end. Nothing was stored.
    Blocked {
        /// The flows of the step in which it had found no such job when it stopped.
        free: Vec<Uuid>,
        /// The flow after which they were found.
        after: Option<Uuid>,
        /// The last flow of the step.
        last: Option<Uuid>,
    },
}

async fn try_step<E: Engine>(engine: &E, how: How, chosen: Chosen, limit: u32) -> Result<Try> {
    let args = (chosen, limit, E::FLOWS_PER_STEP);
    engine.call(how, args, |rows, (chosen, limit, flows)| Box::pin(step(rows, chosen, *limit, *flows))).await
}

/// Follows changes of these flows.
async fn step(rows: &mut dyn Rows, chosen: &Chosen, limit: u32, max_flows: u32) -> Sql<Try> {
    let (flows, after) = match chosen {
        Chosen::After(after) => lock_changed(rows, *after, max_flows).await?,
        Chosen::These(flows, after) => (lock(rows, flows, max_flows).await?, *after),
        Chosen::One(flow) => (lock(rows, &[*flow], max_flows).await?, None),
    };
    let mut advanced = Advanced { more: true, after: after.map(FlowId), ..Advanced::default() };
    if flows.is_empty() {
        advanced.more = matches!(chosen, Chosen::These(..));
        return Ok(Try::Done(advanced));
    }
    let mut advance = Advance { rows, flows, queues: BTreeSet::new(), blocked: BTreeSet::new() };
    let step = advance.next_step(limit).await?;
    let is_complete = advance.follow_parents(&step.parents).await?;
    if is_complete && advance.blocked.is_empty() {
        advance.count(&step, &mut advanced).await?;
    }
    let Advance { rows, mut flows, queues, blocked } = advance;
    if !blocked.is_empty() {
        rows.undo()?;
        let last = flows.keys().next_back().copied();
        flows.retain(|flow, _| !blocked.contains(flow));
        tracing::debug!(
            flows = blocked.len(),
            "other transactions have locked jobs of flows; following them later"
        );
        return Ok(Try::Blocked { free: flows.into_keys().collect(), after, last });
    }
    if !is_complete {
        // The next step follows the other children. The changes stay until then.
        rows.store_counts(&flows, &[]).await?;
    }
    advanced.queues = queues.into_iter().collect();
    Ok(Try::Done(advanced))
}

/// Flows that advance in one transaction.
struct Advance<'r> {
    rows: &'r mut dyn Rows,
    flows: LockedFlows,
    /// The queues with jobs that are due now.
    queues: BTreeSet<String>,
    /// The flows of which another transaction has locked a job. What was decided about them cannot be stored now.
    blocked: BTreeSet<Uuid>,
}

/// Locked flows by id.
pub(crate) type LockedFlows = BTreeMap<Uuid, LockedFlow>;

/// A locked flow.
pub(crate) struct LockedFlow {
    pub(super) counts: Counts,
    /// Whether its members are the children of a job.
    is_owned: bool,
}

/// A row of `flow_changes`.
pub(crate) struct StoredChange {
    pub(super) id: i64,
    pub(super) flow: Uuid,
    /// `None` is a request to check the flow: it may have ended.
    pub(super) change: Option<Change>,
    /// Whether a member of the flow was reopened, in this change or in another one.
    pub(super) is_of_reopened: bool,
}

/// A member or a flow that has ended, whose links are closed.
#[derive(Clone, Copy)]
pub(crate) struct EndedParent {
    pub(super) id: Uuid,
    pub(super) end: End,
}

/// Jobs that no longer wait for others.
pub(crate) struct MadeDue {
    pub(super) jobs: Vec<Uuid>,
    /// The queues of those that are due now.
    pub(super) queues: Vec<String>,
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

impl Advance<'_> {
    /// The changes to follow now. A row without a job is only a request to check the flow.
    async fn next_step(&mut self, limit: u32) -> Sql<Step> {
        let flows: Vec<Uuid> = self.flows.keys().copied().collect();
        let (mut step, mut read) = (Step::default(), Vec::new());
        let (mut changes, mut reopened) = (Vec::new(), BTreeSet::new());
        for StoredChange { id, flow, change, is_of_reopened } in self.rows.changes(&flows, limit).await? {
            debug_assert!(self.flows.contains_key(&flow), "a change of a flow that is not locked");
            let Some(change) = change else {
                step.rows.push(id);
                continue;
            };
            read.push(id);
            changes.push((flow, change));
            reopened.extend(is_of_reopened.then_some(flow));
        }
        debug_assert!(read.is_sorted(), "the changes of a member are followed in order");
        for ((id, (flow, change)), pick) in
            read.into_iter().zip(&changes).zip(flow::pick(&changes, &reopened))
        {
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

    /// Closes the links of parents that ended, opens the links of parents that were reopened, and decides
    /// about the children: those that wait, and those that were skipped because of a parent that is now
    /// reopened. Returns false if more links are left than one step may change.
    async fn follow_parents(&mut self, parents: &[Parent]) -> Sql<bool> {
        let flow_of: BTreeMap<Uuid, Uuid> = parents.iter().map(|parent| (parent.id, parent.flow)).collect();
        let (mut ended, mut reopened) = (Vec::new(), Vec::new());
        for Parent { id, end, .. } in parents {
            match end {
                Some(end) => ended.push(EndedParent { id: *id, end: *end }),
                None => reopened.push(*id),
            }
        }
        let mut left = MAX_CLOSED;
        let (mut opened, mut closed) = (Vec::new(), Vec::new());
        if !reopened.is_empty() {
            opened = self.rows.open_links(&reopened, left).await?;
            left -= opened.len();
        }
        if !ended.is_empty() && left > 0 {
            closed = self.rows.close_links(&ended, left).await?;
            left -= closed.len();
        }
        // Each child, with the flow of its parent.
        let with_flows = |links: Vec<(Uuid, Uuid)>| -> BTreeMap<Uuid, Uuid> {
            debug_assert!(links.iter().all(|(parent, _)| flow_of.contains_key(parent)));
            let with_flow = |(parent, child)| flow_of.get(&parent).map(|flow| (child, *flow));
            links.into_iter().filter_map(with_flow).collect()
        };
        self.follow_children(&with_flows(closed)).await?;
        self.follow_reopened(&with_flows(opened)).await?;
        Ok(left > 0)
    }

    async fn follow_children(&mut self, children: &BTreeMap<Uuid, Uuid>) -> Sql<()> {
        if children.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = children.keys().copied().collect();
        let (mut released, mut ended) = (Vec::new(), BTreeMap::new());
        let mut skipped = Vec::new();
        for HeldChild { id, flow, links } in held_children(self.rows, &ids).await? {
            match flow::follow(links, is_cancelled(&self.flows, flow)) {
                Follow::Wait => {}
                Follow::Release => released.push(id),
                Follow::Cancel => drop(ended.insert(id, FLOW_CANCELLED.to_owned())),
                Follow::Skip if flow.is_none() => drop(ended.insert(id, CALLBACK_SKIPPED.to_owned())),
                Follow::Skip => skipped.push(id),
            }
        }
        if !skipped.is_empty() {
            ended.extend(skip_reasons(self.rows, &skipped).await?);
        }
        let mut changed = BTreeSet::new();
        if !released.is_empty() {
            let MadeDue { jobs, queues } = self.rows.make_due(&released).await?;
            changed.extend(jobs);
            self.queues.extend(queues);
        }
        if !ended.is_empty() {
            let ids: Vec<Uuid> = ended.keys().copied().collect();
            let reasons: Vec<String> = ended.values().cloned().collect();
            changed.extend(self.rows.end_waiting(&ids, &reasons).await?);
        }
        debug_assert!(changed.len() <= released.len() + ended.len(), "a child starts or ends, and once");
        let left = released.iter().chain(ended.keys()).filter(|job| !changed.contains(job));
        self.blocked.extend(left.filter_map(|job| children.get(job)));
        Ok(())
    }

    /// Makes children wait again that were skipped because of a parent that is now reopened.
    async fn follow_reopened(&mut self, children: &BTreeMap<Uuid, Uuid>) -> Sql<()> {
        if children.is_empty() {
            return Ok(());
        }
        let ids: Vec<Uuid> = children.keys().copied().collect();
        let free = skipped_jobs(self.rows, &LOCK_SKIPPED, &ids).await?;
        let all: Vec<Uuid> = column(self.rows.rows(&SKIPPED, args![ids]).await?, "id")?;
        let locked = all.iter().filter(|job| !free.contains_key(job));
        self.blocked.extend(locked.filter_map(|job| children.get(job)));
        if !self.blocked.is_empty() {
            return Ok(());
        }
        let cancelled = self.flows.iter().filter(|(_, flow)| flow.counts.is_cancelled);
        let cancelled = cancelled.map(|(id, _)| *id).collect();
        for flow in bring_back(self.rows, &free, &cancelled).await? {
            if let Some(flow) = self.flows.get_mut(&flow) {
                flow.counts.open += 1;
            }
        }
        Ok(())
    }

    /// Adds the changes to the counts of their flows. A flow that ended or is open again is the parent of its
    /// callbacks, so their links are followed too.
    async fn count(&mut self, step: &Step, advanced: &mut Advanced) -> Sql<()> {
        for (flow, change) in &step.counted {
            if let Some(flow) = self.flows.get_mut(flow) {
                flow.counts.add(change);
            }
        }
        let with_changes = self.with_changes(&step.rows).await?;
        let (mut parents, mut emitted, mut forgotten) = (Vec::new(), Vec::new(), Vec::new());
        for (id, flow) in &mut self.flows {
            // A flow of children has the id of their parent job. Links from that id belong to the job, not to
            // the flow.
            let event = flow.is_owned.then(|| flow_event(FlowId(*id)));
            match flow.counts.turn() {
                FlowTurn::Stays => continue,
                FlowTurn::Ends(_) if with_changes.contains(id) => continue,
                FlowTurn::Ends(end) => {
                    flow.counts.has_ended = true;
                    parents.extend((!flow.is_owned).then_some(Parent { id: *id, flow: *id, end: Some(end) }));
                    emitted.extend(event);
                    advanced.ended.push(FlowRecord::status(
                        flow.counts.failed,
                        flow.counts.is_cancelled,
                        true,
                    ));
                }
                FlowTurn::Reopens => {
                    flow.counts.has_ended = false;
                    parents.extend((!flow.is_owned).then_some(Parent { id: *id, flow: *id, end: None }));
                    forgotten.extend(event);
                }
            }
        }
        self.rows.store_counts(&self.flows, &step.rows).await?;
        if !emitted.is_empty() {
            self.rows.execute(&EMIT_END, args![&emitted]).await?;
            advanced.emitted = true;
        }
        if !forgotten.is_empty() {
            self.rows.execute(&FORGET_END, args![&forgotten]).await?;
        }
        // At most a few hundred flows with a hundred callbacks each. A callback that is left out would wait forever,
        // so all are followed here.
        while !parents.is_empty() && !self.follow_parents(&parents).await? && self.blocked.is_empty() {}
        Ok(())
    }

    /// The flows that could end now but have changes besides `followed`. They stay open: by one of these
    /// changes, a member may run again.
    async fn with_changes(&mut self, followed: &[i64]) -> Sql<BTreeSet<Uuid>> {
        let over = self.flows.iter().filter(|(_, flow)| matches!(flow.counts.turn(), FlowTurn::Ends(_)));
        let over: Vec<Uuid> = over.map(|(id, _)| *id).collect();
        if over.is_empty() {
            return Ok(BTreeSet::new());
        }
        let found: Vec<Uuid> = column(self.rows.rows(&WITH_CHANGES, args![over, followed]).await?, "flow")?;
        Ok(found.into_iter().collect())
    }
}

/// Whether the flow of a child was cancelled. A callback is not a member: it runs even then.
fn is_cancelled(flows: &LockedFlows, flow: Option<Uuid>) -> bool {
    flow.and_then(|flow| flows.get(&flow)).is_some_and(|flow| flow.counts.is_cancelled)
}

static PENDING: Statement = Statement::new(
    "
    select exists (select 1 from longshore.events where fresh) as events,
           exists (select 1 from longshore.flow_changes) as changes,
           exists (select 1 from longshore.flows where cancelling_at < longshore.clock() - $1)
             or exists (
                  select 1
                    from longshore.flows
                   where deadline <= longshore.clock()
                     and ended_at is null
                     and not cancelled) as cancels,
           exists (
             select 1
               from longshore.operations
              where state = 'running'
                and (taken_until is null or taken_until <= longshore.clock())) as operations",
);

async fn pending(rows: &mut dyn Rows) -> Sql<Pending> {
    let mut row = one(rows.row(&PENDING, args![WALK_CUT_OFF]).await?)?;
    Ok(Pending {
        events: row.take("events")?,
        changes: row.take("changes")?,
        cancels: row.take("cancels")?,
        operations: row.take("operations")?,
    })
}

static HAS_CHANGES: Statement = Statement::new(
    "
    select 1
      from longshore.flow_changes
     limit 1",
);

/// The first 256 ([`MAX_CHANGED`]) flows after `$1` that have changes. If there are fewer, the last row is
/// null.
macro_rules! changed_flows {
    () => {
        "
    with recursive changed (flow, nth) as (
      select (select c.flow
                from longshore.flow_changes c
               where c.flow > $1
               order by c.flow
               limit 1), 1
       union all
      select (select c.flow
                from longshore.flow_changes c
               where c.flow > changed.flow
               order by c.flow
               limit 1), changed.nth + 1
        from changed
       where changed.flow is not null
         and changed.nth < 256)"
    };
}

const MAX_CHANGED: usize = 256;

static CHANGED: Statement = Statement::new(concat!(
    changed_flows!(),
    "
    select flow
      from changed
     where flow is not null"
));

async fn changed(rows: &mut dyn Rows, after: Option<Uuid>) -> Sql<Vec<Uuid>> {
    column(rows.rows(&CHANGED, args![after.unwrap_or_default()]).await?, "flow")
}

macro_rules! locked_columns {
    () => {
        "f.id, f.open, f.failed, f.sealed, f.cancelled, f.ended_at is not null as has_ended, f.owned"
    };
}

/// Skips locked flows: the process that has locked one looks again after its commit. The exception is SQL
/// that adds a task; upkeep follows that flow.
static LOCK_CHANGED: Statement = Statement::new(concat!(
    changed_flows!(),
    "
    select ",
    locked_columns!(),
    "
      from longshore.flows f
     where f.id = any(array(select flow from changed))
     order by f.id
     limit $2
       for no key update skip locked"
));

static LOCK: Statement = Statement::new(concat!(
    "
    select ",
    locked_columns!(),
    "
      from longshore.flows f
     where f.id = any($1::uuid[])
     order by f.id
     limit $2
       for no key update skip locked"
));

/// Locks flows with changes after `after`. If all flows of a page are locked, continues with the next page.
/// Also returns the flow after which it found them.
async fn lock_changed(
    rows: &mut dyn Rows,
    mut after: Option<Uuid>,
    max_flows: u32,
) -> Sql<(LockedFlows, Option<Uuid>)> {
    loop {
        let locked = rows.rows(&LOCK_CHANGED, args![after.unwrap_or_default(), max_flows]).await?;
        if !locked.is_empty() {
            return Ok((locked.into_iter().map(locked_flow).collect::<Sql<_>>()?, after));
        }
        let page = changed(rows, after).await?;
        if !page.is_empty() {
            // Since the first look, a flow may have been unlocked, and the page may have moved on to later
            // flows.
            let locked = lock(rows, &page, max_flows).await?;
            if !locked.is_empty() {
                return Ok((locked, after));
            }
            rows.execute(&FORGET_CHANGES, args![&page]).await?;
        }
        after = page.last().copied();
        if page.len() < MAX_CHANGED {
            return Ok((LockedFlows::new(), after));
        }
    }
}

async fn lock(rows: &mut dyn Rows, flows: &[Uuid], max_flows: u32) -> Sql<LockedFlows> {
    rows.rows(&LOCK, args![flows, max_flows]).await?.into_iter().map(locked_flow).collect()
}

fn locked_flow(mut row: Row) -> Sql<(Uuid, LockedFlow)> {
    let counts = Counts {
        open: row.take("open")?,
        failed: row.take("failed")?,
        is_sealed: row.take("sealed")?,
        is_cancelled: row.take("cancelled")?,
        has_ended: row.take("has_ended")?,
    };
    Ok((row.take("id")?, LockedFlow { counts, is_owned: row.take("owned")? }))
}

/// Deletes changes of flows that do not exist: nothing would follow them.
static FORGET_CHANGES: Statement = Statement::new(
    "
    delete from longshore.flow_changes
     where flow = any($1::uuid[])
       and not exists (select 1 from longshore.flows f where f.id = flow_changes.flow)",
);

/// The flows that have changes besides `$2`, which are followed now and will be deleted.
static WITH_CHANGES: Statement = Statement::new(
    "
    select i.flow
      from unnest($1::uuid[]) as i(flow)
     where exists (
             select 1
               from longshore.flow_changes c
              where c.flow = i.flow
                and c.id <> all($2::int8[]))",
);

/// A job that waits for others.
struct HeldChild {
    id: Uuid,
    /// `None`: a callback.
    flow: Option<Uuid>,
    links: Held,
}

/// The held jobs among these. Without a join and an `order by`, Postgres has no other plan than to find each
/// row by its key, even if its planner believes that the tables are empty.
static HELD_CHILDREN: Statement = Statement::new(
    "
    select r.id, r.flow,
           (select count(*) from longshore.links l where l.child = r.id and l.met is null) as open,
           (select count(*) from longshore.links l where l.child = r.id and not l.met) as unmet
      from longshore.ready r
     where r.id = any($1::uuid[])
       and r.held",
);

async fn held_children(rows: &mut dyn Rows, ids: &[Uuid]) -> Sql<Vec<HeldChild>> {
    let read = |mut row: Row| {
        let links = Held { open: row.take("open")?, unmet: row.take("unmet")? };
        Ok(HeldChild { id: row.take("id")?, flow: row.take("flow")?, links })
    };
    let mut held =
        rows.rows(&HELD_CHILDREN, args![ids]).await?.into_iter().map(read).collect::<Sql<Vec<_>>>()?;
    held.sort_by_key(|child| child.id);
    Ok(held)
}

/// For each of these jobs, one parent whose end does not meet the condition of the link.
static BLOCKERS: Statement = Statement::new(
    "
    select b.child,
           (select j.task from longshore.jobs j where j.id = b.parent) as task,
           (select f.outcome::text from longshore.finished f where f.id = b.parent) as outcome
      from (select i.child,
                   (select l.parent
                      from longshore.links l
                     where l.child = i.child
                       and not l.met
                       and (select f.id from longshore.finished f where f.id = l.parent) is not null
                     order by l.parent
                     limit 1) as parent
              from unnest($1::uuid[]) as i(child)) as b",
);

async fn skip_reasons(rows: &mut dyn Rows, ids: &[Uuid]) -> Sql<Vec<(Uuid, String)>> {
    let read = |mut row: Row| {
        let (task, outcome) = (row.take::<Option<String>>("task")?, row.take::<Option<String>>("outcome")?);
        let end = End::of(outcome.is_some_and(|outcome| outcome == Outcome::Succeeded.as_str()));
        Ok((row.take("child")?, flow::skip_reason(task.as_deref(), end)))
    };
    rows.rows(&BLOCKERS, args![ids]).await?.into_iter().map(read).collect()
}

/// The skipped jobs among these.
static SKIPPED: Statement = Statement::new(
    "
    select id
      from longshore.finished
     where id = any($1::uuid[])
       and skipped",
);

/// The end of a flow of children is an event, which their parent may wait for.
static EMIT_END: Statement = Statement::new(
    "
    insert into longshore.events (name, emitted_at, payload)
    select i.name, longshore.clock(), 'null'
      from unnest($1::text[]) as i(name)
     where true
        on conflict (name) do update
       set emitted_at = excluded.emitted_at,
           fresh = true",
);
