//! Groups: their settings, the list that operators see, and their place in line.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::db::{Engine, How, Row, Rows, Sql, Statement, args, one};
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

    /// The count of waiting jobs, and whether there are more, from the rows found: at most one more than are
    /// counted.
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

/// The settings of groups, the list that operators see, and their place in line.
#[async_trait]
pub trait Groups {
    /// Changes a group's settings. Fields that are `None` stay as they are.
    async fn set_group(&self, queue: &str, group: &str, change: &GroupChange) -> Result<()>;

    /// Lists up to `limit` groups of a queue that have settings, waiting jobs or running jobs,
    /// ordered by name, after the name `after`.
    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>>;

    /// Returns one group, as [`groups`](Self::groups) does; `None` if it has neither settings nor
    /// live jobs.
    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>>;

    /// Returns the place of a group among those whose turn it is at this priority; `None` if it
    /// is not its turn. Reads up to 1,000 turns.
    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>>;
}

/// The search for groups. It walks an index in one statement on Postgres, and in a loop on SQLite.
#[async_trait]
pub trait GroupSearch {
    /// Finds up to `limit` groups whose names contain the text, in these queues (`None`: in all), first
    /// the one with exactly this name, then shorter names. The case of ASCII letters does not matter. Looks
    /// at a bounded number of groups.
    async fn find_groups(&self, text: &str, queues: Option<&[String]>, limit: u32)
    -> Result<Vec<FoundGroup>>;
}

#[async_trait]
impl<E: Engine> Groups for E {
    async fn set_group(&self, queue: &str, group: &str, change: &GroupChange) -> Result<()> {
        let args = (queue.to_owned(), group.to_owned(), change.clone());
        self.call(How::SLOW.together(), args, |rows, (queue, group, change)| {
            Box::pin(set_group(rows, queue, group, change))
        })
        .await
    }

    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>> {
        let args = (queue.to_owned(), after.to_owned(), limit);
        self.call(How::READ, args, |rows, (queue, after, limit)| Box::pin(groups(rows, queue, after, *limit)))
            .await
    }

    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>> {
        let args = (queue.to_owned(), group.to_owned());
        self.call(How::READ, args, |rows, (queue, name)| Box::pin(self::group(rows, queue, name))).await
    }

    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>> {
        let args = (queue.to_owned(), group.to_owned(), priority);
        self.call(How::READ, args, |rows, (queue, group, priority)| {
            Box::pin(place_in_line(rows, queue, group, *priority))
        })
        .await
    }
}

static SET_GROUP: Statement = Statement::new(
    "
    insert into longshore.groups as g (queue, name, paused, max_running, rate, rate_ms, burst)
    values ($1, $2, coalesce($3, false), $5, $7, $8, $9)
        on conflict (queue, name) do update
       set paused = coalesce($3, g.paused),
           max_running = case when $4 then $5 else g.max_running end,
           rate = case when $6 then $7 else g.rate end,
           rate_ms = case when $6 then $8 else g.rate_ms end,
           burst = case when $6 then $9 else g.burst end",
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
        change.rate.is_some(),
        rate.map(|rate| rate.starts),
        rate.map(|rate| rate.period_ms),
        rate.map(|rate| rate.burst),
    ];
    rows.execute(&SET_GROUP, args).await?;
    rows.execute(&ADD_TURNS, args![queue, group]).await.map(drop)
}

/// The columns of a [`GroupRecord`]; `page` has the names of the groups.
macro_rules! group_columns {
    () => {
        "
    select p.grp as name, coalesce(g.paused, false) as paused,
           coalesce(g.max_running, s.group_max_running) as max_running,
           case when g.rate is null then s.group_rate else g.rate end as rate,
           case when g.rate is null then s.group_rate_ms else g.rate_ms end as rate_ms,
           case when g.rate is null then s.group_burst else g.burst end as burst, (
             select count(*)
               from (select 1
                       from longshore.ready r
                      where r.queue = $1
                        and r.grp = p.grp
                        and r.grp is not null
                      limit 1001) as bounded) as waiting, (
             select count(*)
               from longshore.running r
              where r.queue = $1
                and r.grp = p.grp) as running, (
             select max(t.tat)
               from longshore.turns t
              where t.queue = $1
                and t.grp = p.grp
                and t.tat is not null) as paced_until, longshore.clock() as now, g.name is not null as has_settings
      from page p
      left join longshore.queues s on s.name = $1
      left join longshore.groups g on g.queue = $1 and g.name = p.grp
     order by p.grp"
    };
}

/// Finds the groups with waiting jobs with one index probe each.
static GROUPS: Statement = Statement::new(concat!(
    "
    with recursive waiting as (
      select $2::text as grp, 0 as n
      union all
      select (
               select r.grp
                 from longshore.ready r
                where r.queue = $1
                  and r.grp > w.grp
                order by r.grp
                limit 1), w.n + 1
        from waiting w
       where w.grp is not null
         and w.n < $3),
    page as (
      select grp
        from (select grp
                from waiting
               where n > 0
                 and grp is not null
               union
              select grp
                from (select distinct r.grp
                        from longshore.running r
                       where r.queue = $1
                         and r.grp > $2
                       order by r.grp
                       limit $3) as with_running_jobs
               union
              select name
                from (select g.name
                        from longshore.groups g
                       where g.queue = $1
                         and g.name > $2
                       order by g.name
                       limit $3) as with_settings) as named
       order by grp
       limit $3)",
    group_columns!(),
));

async fn groups(rows: &mut dyn Rows, queue: &str, after: &str, limit: u32) -> Sql<Vec<GroupRecord>> {
    let mut groups = Vec::new();
    for mut row in rows.rows(&GROUPS, args![queue, after, limit]).await? {
        groups.push(read_group(queue, &mut row)?);
    }
    Ok(groups)
}

static GROUP: Statement =
    Statement::new(concat!("\n    with page as (select $2::text as grp)", group_columns!()));

async fn group(rows: &mut dyn Rows, queue: &str, group: &str) -> Sql<Option<GroupRecord>> {
    let mut row = one(rows.row(&GROUP, args![queue, group]).await?)?;
    let (group, has_settings) = (read_group(queue, &mut row)?, row.take("has_settings")?);
    Ok(Some(group).filter(|group| has_settings || group.waiting + group.running > 0))
}

fn read_group(queue: &str, row: &mut Row) -> Sql<GroupRecord> {
    let rate = read_rate(row)?;
    let (waiting, waiting_or_more) = GroupRecord::waiting(row.take("waiting")?);
    Ok(GroupRecord {
        queue: queue.to_owned(),
        name: row.take("name")?,
        paused: row.take("paused")?,
        limit: row.take("max_running")?,
        rate,
        waiting,
        waiting_or_more,
        running: row.take("running")?,
        next_start_at: next_start(rate, row.take("paced_until")?, row.take("now")?),
    })
}

/// The three columns are set together.
fn read_rate(row: &mut Row) -> Sql<Option<Rate>> {
    let Some(starts) = row.take("rate")? else { return Ok(None) };
    Ok(Some(Rate { starts, period_ms: row.take("rate_ms")?, burst: row.take("burst")? }))
}

static PLACE: Statement = Statement::new(
    "
    with line as (
      select t.grp, t.at, t.id
        from longshore.turns t
       where t.queue = $1
         and t.priority = $3
         and t.at <= longshore.clock()
       order by t.at, t.id
       limit 1000),
    folded as (
      select grp, row_number() over (order by min(at), min(id)) as place
        from line
       group by grp)
    select place, (select count(*) from folded) as groups
      from folded
     where grp = $2",
);

async fn place_in_line(
    rows: &mut dyn Rows,
    queue: &str,
    group: &str,
    priority: i16,
) -> Sql<Option<PlaceInLine>> {
    let Some(mut row) = rows.row(&PLACE, args![queue, group, priority]).await? else { return Ok(None) };
    Ok(Some(PlaceInLine { place: row.take("place")?, groups: row.take("groups")? }))
}
