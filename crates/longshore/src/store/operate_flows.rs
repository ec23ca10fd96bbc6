//! Commands on whole flows: cancel, retry, and the removal of flows that ended long ago. Each step of a
//! command holds the lock of the flow's row. [`flow`] decides which finished members a retry reopens.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::db::{Engine, How, Row, Rows, Sql, Statement, Work, args, column, one};
use super::flows::{FORGET_END, LOOK_AT, id_after, on_flow};
use super::{CancelledMembers, Retention, RetriedMembers};
use crate::error::Result;
use crate::job::{FlowId, JobId, Outcome, WorkerId};
use crate::rules::flow::{self, Candidate, FLOW_CANCELLED, ParentLink, Reopened, flow_event};
use crate::rules::retry::MAX_DELAY;

/// Commands on whole flows.
#[async_trait]
pub trait FlowCommands {
    /// Marks a flow as cancelled. Returns false if it has ended, was cancelled before or does not
    /// exist.
    async fn flag_cancelled(&self, flow: FlowId) -> Result<bool>;

    /// Visits up to `limit` members of a flow after `after`: cancels those that wait, and requests that those
    /// that run stop. Skips locked members. The last step ends the cancel, unless it or an earlier step
    /// (`skipped`) skipped a member: then upkeep repeats the cancel.
    async fn cancel_members(
        &self,
        flow: FlowId,
        after: Option<JobId>,
        skipped: u64,
        limit: u32,
    ) -> Result<CancelledMembers>;

    /// Returns up to `limit` flows whose deadline has passed, and as many whose cancel was cut off. Leaves
    /// out locked flows.
    async fn flows_to_cancel(&self, limit: u32) -> Result<Vec<FlowId>>;

    /// Visits up to `limit` members of a flow after `after`, and reopens those that ended without success
    /// before `before`, as [`flow::reopen`](crate::rules::flow::reopen) decides.
    async fn retry_members(
        &self,
        flow: FlowId,
        before: DateTime<Utc>,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<RetriedMembers>;

    /// Removes up to `limit` flows that have no members left and ended before the shortest retention
    /// time.
    async fn remove_flows(&self, policy: &Retention, limit: u32) -> Result<u64>;
}

#[async_trait]
impl<E: Engine> FlowCommands for E {
    async fn flag_cancelled(&self, flow: FlowId) -> Result<bool> {
        on_flow(self, How::QUICK, flow, flow, |rows, flow| Box::pin(flag_cancelled(rows, *flow))).await
    }

    async fn cancel_members(
        &self,
        flow: FlowId,
        after: Option<JobId>,
        skipped: u64,
        limit: u32,
    ) -> Result<CancelledMembers> {
        let cancel: Work<_, _> = |rows, (flow, after, skipped, limit)| {
            Box::pin(cancel_members(rows, *flow, *after, *skipped, *limit))
        };
        on_flow(self, How::SLOW.indexed(), flow, (flow, after, skipped, limit), cancel).await
    }

    async fn flows_to_cancel(&self, limit: u32) -> Result<Vec<FlowId>> {
        self.call(How::QUICK.together(), limit, |rows, limit| Box::pin(flows_to_cancel(rows, *limit))).await
    }

    async fn retry_members(
        &self,
        flow: FlowId,
        before: DateTime<Utc>,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<RetriedMembers> {
        let retry: Work<_, _> = |rows, (flow, before, after, limit)| {
            Box::pin(retry_members(rows, *flow, *before, *after, *limit))
        };
        on_flow(self, How::SLOW.indexed(), flow, (flow, before, after, limit), retry).await
    }

    async fn remove_flows(&self, policy: &Retention, limit: u32) -> Result<u64> {
        self.call(How::SLOW.together(), (*policy, limit), |rows, (policy, limit)| {
            Box::pin(remove_flows(rows, policy, *limit))
        })
        .await
    }
}

/// A cancel that makes no step for this long was cut off, and another process resumes it.
pub(super) const WALK_CUT_OFF: Duration = Duration::from_secs(10);

/// Flags a flow that has not ended. Nothing can be added to it any more, so that it ends.
static FLAG_CANCELLED: Statement = Statement::new(
    "
    update longshore.flows
       set cancelled = true,
           cancelling_at = longshore.clock(),
           sealed = true
     where id = $1
       and ended_at is null
       and not cancelled",
);

async fn flag_cancelled(rows: &mut dyn Rows, flow: FlowId) -> Sql<bool> {
    Ok(rows.execute(&FLAG_CANCELLED, args![flow]).await? > 0)
}

static MEMBER_PAGE: Statement = Statement::new(
    "
    select id
      from longshore.jobs
     where flow = $1
       and id > $2
     order by id
     limit $3",
);

/// Some members of a flow, and where the next page starts.
async fn member_page(
    rows: &mut dyn Rows,
    flow: FlowId,
    after: Option<JobId>,
    limit: u32,
) -> Sql<(Vec<Uuid>, Option<JobId>)> {
    let page = rows.rows(&MEMBER_PAGE, args![flow, id_after(after), limit]).await?;
    let page: Vec<Uuid> = column(page, "id")?;
    debug_assert!(page.is_sorted(), "jobs are locked in the order of their ids");
    let next = page.last().filter(|_| page.len() == limit as usize).map(|id| JobId(*id));
    Ok((page, next))
}

/// A retry that began meanwhile ends the cancel.
static LOCK_CANCELLED: Statement = Statement::new(
    "
    select id
      from longshore.flows
     where id = $1
       and cancelled
       for no key update",
);

static REQUEST_STOP: Statement = Statement::new(
    "
    update longshore.running
       set cancel_requested = true
     where id = any(array(
             select id
               from longshore.running
              where id = any($1::uuid[])
                and not cancel_requested
                for update skip locked))
    returning worker",
);

/// How many of these jobs have not ended and were not requested to stop.
static NOT_CANCELLED: Statement = Statement::new(
    "
    select (select count(*) from longshore.ready where id = any($1::uuid[]))
         + (select count(*) from longshore.running where id = any($1::uuid[]) and not cancel_requested) as jobs",
);

/// Records a step of the cancel. Another process resumes it if there is no further step within
/// [`WALK_CUT_OFF`].
static CONTINUE_WALK: Statement = Statement::new(
    "
    update longshore.flows
       set cancelling_at = longshore.clock()
     where id = $1
       and cancelling_at is not null",
);

static END_WALK: Statement = Statement::new(
    "
    update longshore.flows
       set cancelling_at = null
     where id = $1",
);

/// How often a page of members is read again, if one of them moved between the tables or is locked. Most
/// transactions hold such a lock for milliseconds. On SQLite neither happens.
const MAX_ROUNDS: usize = 5;
const ROUND_PAUSE: Duration = Duration::from_millis(3);

async fn cancel_members(
    rows: &mut dyn Rows,
    flow: FlowId,
    after: Option<JobId>,
    skipped: u64,
    limit: u32,
) -> Sql<CancelledMembers> {
    if !rows.has_row(&LOCK_CANCELLED, args![flow]).await? {
        return Ok(CancelledMembers::default());
    }
    let (page, next) = member_page(rows, flow, after, limit).await?;
    let mut done = CancelledMembers { next, ..CancelledMembers::default() };
    let reasons = vec![FLOW_CANCELLED.to_owned(); page.len()];
    for round in 1..=MAX_ROUNDS {
        let workers: Vec<WorkerId> = column(rows.rows(&REQUEST_STOP, args![&page]).await?, "worker")?;
        done.requested += workers.len() as u64;
        done.workers.extend(workers);
        done.cancelled += rows.end_waiting(&page, &reasons).await?.len() as u64;
        done.skipped = one(rows.row(&NOT_CANCELLED, args![&page]).await?)?.take("jobs")?;
        if done.skipped == 0 {
            break;
        }
        if round < MAX_ROUNDS {
            tokio::time::sleep(ROUND_PAUSE).await;
        }
    }
    if next.is_some() || skipped + done.skipped > 0 {
        rows.execute(&CONTINUE_WALK, args![flow]).await?;
    } else if rows.execute(&END_WALK, args![flow]).await? > 0 {
        // The flow may have no open member.
        rows.execute(&LOOK_AT, args![flow]).await?;
    }
    Ok(done)
}

/// Takes cancels that were cut off, each for as long as one of its steps would. A cancel that cannot
/// continue, because a member is locked, must not come first again.
static TAKE_CUT_OFF: Statement = Statement::new(
    "
    update longshore.flows
       set cancelling_at = longshore.clock()
     where id = any(array(
             select id
               from longshore.flows
              where cancelling_at < longshore.clock() - $1
              order by cancelling_at
              limit $2
                for no key update skip locked))
    returning id",
);

static OVERDUE: Statement = Statement::new(
    "
    select id
      from longshore.flows
     where deadline <= longshore.clock()
       and ended_at is null
       and not cancelled
     order by deadline
     limit $1
       for no key update skip locked",
);

async fn flows_to_cancel(rows: &mut dyn Rows, limit: u32) -> Sql<Vec<FlowId>> {
    let mut flows: Vec<FlowId> = column(rows.rows(&TAKE_CUT_OFF, args![WALK_CUT_OFF, limit]).await?, "id")?;
    let overdue: Vec<FlowId> = column(rows.rows(&OVERDUE, args![limit]).await?, "id")?;
    flows.extend(overdue);
    Ok(flows)
}

static LOCK_FOR_RETRY: Statement = Statement::new(
    "
    select owned
      from longshore.flows
     where id = $1
       for no key update",
);

/// Whether changes have to be followed before the retry: the end of a member that the retry would reopen, or
/// an earlier reopening of any member. Otherwise children would start because of an end that no longer
/// counts.
static HAS_UNFOLLOWED: Statement = Statement::new(
    "
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
                and (f.finished_at <= $2 or f.skipped)) as has_unfollowed",
);

static CALLBACKS: Statement = Statement::new(
    "
    select child
      from longshore.links
     where parent = $1",
);

/// A flow that is retried is no longer cancelled and has not ended.
static REOPEN_FLOW: Statement = Statement::new(
    "
    update longshore.flows
       set open = open + $2,
           failed = failed - $3,
           cancelled = false,
           cancelling_at = null,
           deadline = case when deadline > longshore.clock() then deadline end,
           ended_at = null
     where id = $1",
);

static OPEN_LINKS: Statement = Statement::new(
    "
    update longshore.links
       set met = null
     where parent = $1
       and met is not null",
);

async fn retry_members(
    rows: &mut dyn Rows,
    flow: FlowId,
    before: DateTime<Utc>,
    after: Option<JobId>,
    limit: u32,
) -> Sql<RetriedMembers> {
    let Some(mut locked) = rows.row(&LOCK_FOR_RETRY, args![flow]).await? else {
        return Ok(RetriedMembers::default());
    };
    // A separate statement, so that it sees what was committed while the first one waited for the lock.
    if one(rows.row(&HAS_UNFOLLOWED, args![flow, before]).await?)?.take("has_unfollowed")? {
        return Ok(RetriedMembers { advance_first: true, ..RetriedMembers::default() });
    }
    let (page, next) = member_page(rows, flow, after, limit).await?;
    let reopened = flow::reopen(&candidates(rows, &page, before).await?);
    let ReopenedMembers { members, failures, queues } = reopen(rows, &reopened).await?;
    debug_assert!(failures <= members, "only members count as failures");
    if members > 0 {
        rows.execute(&REOPEN_FLOW, args![flow, members, failures]).await?;
        if locked.take("owned")? {
            rows.execute(&FORGET_END, args![&vec![flow_event(flow)]]).await?;
        } else {
            // The flow is open again, so callbacks that were skipped wait again.
            rows.execute(&OPEN_LINKS, args![flow]).await?;
            let callbacks: Vec<Uuid> = column(rows.rows(&CALLBACKS, args![flow]).await?, "child")?;
            let skipped = skipped_jobs(rows, &SKIPPED, &callbacks).await?;
            bring_back(rows, &skipped, &BTreeSet::new()).await?;
        }
    }
    Ok(RetriedMembers { reopened: members, queues, next, advance_first: false })
}

/// The result of reopening members.
#[derive(Default)]
pub(crate) struct ReopenedMembers {
    /// How many members of flows.
    pub(super) members: u64,
    /// How many of them counted as failures.
    pub(super) failures: u64,
    /// The queues of those that are due.
    pub(super) queues: Vec<String>,
}

async fn reopen(rows: &mut dyn Rows, jobs: &[Reopened]) -> Sql<ReopenedMembers> {
    if jobs.is_empty() { Ok(ReopenedMembers::default()) } else { rows.reopen(jobs).await }
}

/// The members of a page that finished without success. Leaves out a member whose end was stored a moment
/// ago: that end is followed first. Locks the rows, so that no member is removed while others are about to
/// wait for it. `is not true` keeps Postgres from reading the index of all unsuccessful jobs when its planner
/// believes that the table is empty.
static CANDIDATES: Statement = Statement::new(
    "
    select f.id
      from longshore.finished f
     where f.id = any($1::uuid[])
       and (f.outcome = 'succeeded') is not true
       and (f.finished_at <= $2 or f.skipped)
       and f.flow is not null
       and not exists (
             select 1
               from longshore.flow_changes c
              where c.flow = f.flow
                and c.job = f.id)
       for update",
);

async fn candidates(rows: &mut dyn Rows, ids: &[Uuid], before: DateTime<Utc>) -> Sql<Vec<Candidate>> {
    let mut found: Vec<Uuid> = column(rows.rows(&CANDIDATES, args![ids, before]).await?, "id")?;
    found.sort_unstable();
    let mut links = links_of(rows, &found).await?;
    let candidate = |job| Candidate { job, links: links.remove(&job).unwrap_or_default() };
    Ok(found.into_iter().map(candidate).collect())
}

static LINKS_OF: Statement = Statement::new(
    "
    select child, parent, met
      from longshore.links
     where child = any($1::uuid[])",
);

async fn links_of(rows: &mut dyn Rows, children: &[Uuid]) -> Sql<BTreeMap<Uuid, Vec<ParentLink>>> {
    let mut links = BTreeMap::<Uuid, Vec<ParentLink>>::new();
    for mut row in rows.rows(&LINKS_OF, args![children]).await? {
        let link = ParentLink { parent: row.take("parent")?, met: row.take("met")? };
        links.entry(row.take("child")?).or_default().push(link);
    }
    Ok(links)
}

macro_rules! skipped {
    () => {
        "
    select id, flow
      from longshore.finished
     where id = any($1::uuid[])
       and skipped
       for update"
    };
}

/// The skipped jobs among these, with their flows. Locks the rows, so that none is removed.
static SKIPPED: Statement = Statement::new(skipped!());

/// As [`SKIPPED`], without locked rows.
pub(super) static LOCK_SKIPPED: Statement = Statement::new(concat!(skipped!(), " skip locked"));

pub(super) async fn skipped_jobs(
    rows: &mut dyn Rows,
    statement: &'static Statement,
    ids: &[Uuid],
) -> Sql<BTreeMap<Uuid, Option<Uuid>>> {
    if ids.is_empty() {
        return Ok(BTreeMap::new());
    }
    let read = |mut row: Row| Ok((row.take("id")?, row.take("flow")?));
    rows.rows(statement, args![ids]).await?.into_iter().map(read).collect()
}

/// Makes skipped tasks and callbacks wait again, because a parent was reopened. Leaves out tasks of cancelled
/// flows. Returns the flow of each task, for the caller to count.
pub(super) async fn bring_back(
    rows: &mut dyn Rows,
    skipped: &BTreeMap<Uuid, Option<Uuid>>,
    cancelled: &BTreeSet<Uuid>,
) -> Sql<Vec<Uuid>> {
    if skipped.is_empty() {
        return Ok(Vec::new());
    }
    let ids: Vec<Uuid> = skipped.keys().copied().collect();
    let links = links_of(rows, &ids).await?;
    let (mut reopened, mut flows) = (Vec::new(), Vec::new());
    for (job, flow) in skipped {
        let links = links.get(job).map_or(&[][..], Vec::as_slice);
        if flow::comes_back(links, flow.is_some_and(|flow| cancelled.contains(&flow))) {
            reopened.push(Reopened { job: *job, is_held: true });
            flows.extend(*flow);
        }
    }
    reopen(rows, &reopened).await?;
    Ok(flows)
}

/// Keeps a flow of children for as long as their parent job is kept: the job may join them, even if none is
/// left.
static REMOVE_FLOWS: Statement = Statement::new(
    "
    delete from longshore.flows
     where id = any(array(
             select f.id
               from longshore.flows f
              where f.ended_at < longshore.clock() - $1
                and not exists (select 1 from longshore.jobs j where j.flow = f.id)
                and not (f.owned and exists (select 1 from longshore.jobs j where j.id = f.id))
              order by f.ended_at
              limit $2
                for update skip locked))
    returning id, owned",
);

static REMOVE_PARTS: Statement = Statement::new(
    "
    delete from longshore.flow_parts
     where flow = any($1::uuid[])",
);

static REMOVE_LINKS: Statement = Statement::new(
    "
    delete from longshore.links
     where parent = any($1::uuid[])",
);

async fn remove_flows(rows: &mut dyn Rows, policy: &Retention, limit: u32) -> Sql<u64> {
    let Some(shortest) = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min() else {
        return Ok(0);
    };
    let (mut removed, mut others) = (Vec::<Uuid>::new(), Vec::<Uuid>::new());
    for mut row in rows.rows(&REMOVE_FLOWS, args![shortest.min(MAX_DELAY), limit]).await? {
        let id = row.take("id")?;
        removed.push(id);
        // Links from the id of a flow of children belong to their parent job.
        others.extend((!row.take::<bool>("owned")?).then_some(id));
    }
    if !removed.is_empty() {
        rows.execute(&REMOVE_PARTS, args![&removed]).await?;
        rows.execute(&REMOVE_LINKS, args![&others]).await?;
    }
    Ok(removed.len() as u64)
}
