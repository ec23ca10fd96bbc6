//! Groups: their settings, the list that operators see, and their place in line.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::db::{Engine, How, Rows, Sql, Statement, args};
use super::queues::storable_limit;
use crate::error::Result;
use crate::rules::turns::Rate;

/// A change to a group's settings. Fields that are `None` stay as they are.
#[derive(Clone, Debug, Default)]
pub struct GroupChange {
    /// Whether the group is paused: none of its jobs are claimed.
    pub paused: Option<bool>,
    /// The maximum number of its jobs that run at once, in all processes together; the inner
    /// `None` means the default of its queue.
    pub limit: Option<Option<u32>>,
    /// How often its jobs may start; the inner `None` means the default of its queue.
    pub rate: Option<Option<Rate>>,
    /// How many jobs it starts per turn, compared with other groups: 1 to 100.
    pub weight: Option<u32>,
}

/// A group as operators see it. The settings are those in effect: its own or, where it has none, the
/// defaults of its queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GroupRecord {
    /// Its queue.
    pub queue: String,
    /// Its name.
    pub name: String,
    /// Whether it is paused: none of its jobs are claimed.
    pub paused: bool,
    /// The maximum number of its jobs that run at once; `None` means no limit.
    pub limit: Option<u32>,
    /// How often its jobs may start; `None` means no limit.
    pub rate: Option<Rate>,
    /// How many jobs it starts per turn, compared with other groups.
    pub weight: u32,
    /// The number of waiting jobs, up to 1,000.
    pub waiting: u64,
    /// Whether more jobs wait than were counted.
    pub waiting_or_more: bool,
    /// The number of running jobs.
    pub running: u64,
    /// When its rate lets the next job start; `None` means now.
    pub next_start_at: Option<DateTime<Utc>>,
}

impl GroupRecord {
    /// How many waiting jobs are counted at most.
    pub(crate) const MAX_WAITING: u64 = 1000;

    /// The count, if more than this many rows were not read.
    pub(crate) fn waiting(found: u64) -> (u64, bool) {
        (found.min(GroupRecord::MAX_WAITING), found > GroupRecord::MAX_WAITING)
    }
}

/// A group that a search by name found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FoundGroup {
    /// Its queue.
    pub queue: String,
    /// Its name.
    pub name: String,
    /// Whether it is paused: none of its jobs are claimed.
    pub paused: bool,
}

impl FoundGroup {
    /// How many groups with waiting jobs a search looks at. A group with exactly the name is found
    /// in any case.
    pub(crate) const MAX_WAITING: u32 = 2_000;
    /// How many groups with settings a search looks at, and how many running jobs with a group.
    pub(crate) const MAX_OTHERS: u32 = 10_000;
}

/// When a rate lets the next job start, if that is later than now.
pub(crate) fn next_start(
    rate: Option<Rate>,
    paced_until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    Some(rate?.next_start(paced_until, now)).filter(|at| *at > now)
}

/// The place of a group among those whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceInLine {
    /// Its place; 1 is the next one.
    pub place: u32,
    /// How many groups stand in line, up to 1,000 turns.
    pub groups: u32,
}

/// The settings of groups.
#[async_trait]
pub trait GroupSettings {
    /// Changes a group's settings. Fields that are `None` stay as they are.
    async fn set_group(&self, queue: &str, group: &str, change: &GroupChange) -> Result<()>;
}

#[async_trait]
impl<E: Engine> GroupSettings for E {
    async fn set_group(&self, queue: &str, group: &str, change: &GroupChange) -> Result<()> {
        let args = (queue.to_owned(), group.to_owned(), change.clone());
        self.call(How::SLOW.together(), args, |rows, (queue, group, change)| {
            Box::pin(set_group(rows, queue, group, change))
        })
        .await
    }
}

static SET_GROUP: Statement = Statement::new(
    "
    insert into longshore.groups as g (queue, name, paused, max_running, weight, rate, rate_ms, burst)
    values ($1, $2, coalesce($3, false), $5, coalesce($6, 1), $8, $9, $10)
        on conflict (queue, name) do update
       set paused = coalesce($3, g.paused),
           max_running = case when $4 then $5 else g.max_running end,
           weight = coalesce($6, g.weight),
           rate = case when $7 then $8 else g.rate end,
           rate_ms = case when $7 then $9 else g.rate_ms end,
           burst = case when $7 then $10 else g.burst end",
);

/// The settings have changed, so more of its jobs may start now.
static ADD_TURNS: Statement = Statement::new(
    "
    insert into longshore.turns (at, priority, queue, grp)
    select longshore.clock(), priority, queue, grp
      from longshore.turns
     where queue = $1
       and grp = $2
     group by priority, queue, grp",
);

async fn set_group(rows: &mut dyn Rows, queue: &str, group: &str, change: &GroupChange) -> Sql<()> {
    let rate = change.rate.flatten();
    let args = args![
        queue,
        group,
        change.paused,
        change.limit.is_some(),
        storable_limit(change.limit),
        change.weight,
        change.rate.is_some(),
        rate.map(|rate| rate.starts),
        rate.map(|rate| rate.period_ms),
        rate.map(|rate| rate.burst),
    ];
    rows.execute(&SET_GROUP, args).await?;
    rows.execute(&ADD_TURNS, args![queue, group]).await.map(drop)
}
