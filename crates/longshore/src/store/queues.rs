//! Queues: their settings, their waiting jobs, and the list that operators see.

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::db::{Engine, How, Rows, Sql, Statement, args, column, one};
use crate::error::Result;
use crate::rules::turns::Rate;

/// A change to a queue's settings.
#[derive(Clone, Debug, Default)]
pub struct QueueChange {
    /// Whether the queue is paused: no jobs are claimed from it.
    pub paused: Option<bool>,
    /// The maximum number of its jobs that run at once, in all processes together;
    /// the inner `None` removes the limit.
    pub limit: Option<Option<u32>>,
    /// How often its jobs may start, in all processes together; the inner `None` removes the rate.
    pub rate: Option<Option<Rate>>,
    /// The maximum number of running jobs of each of its groups, unless the group has its own; the
    /// inner `None` removes it.
    pub group_limit: Option<Option<u32>>,
    /// How often jobs of each of its groups may start, unless the group has its own rate; the inner
    /// `None` removes it.
    pub group_rate: Option<Option<Rate>>,
}

/// A queue as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct QueueRecord {
    /// Its name.
    pub name: String,
    /// Whether it is paused: no jobs are claimed from it.
    pub paused: bool,
    /// The maximum number of its jobs that run at once; `None` means no limit.
    pub limit: Option<u32>,
    /// How often its jobs may start; `None` means no limit.
    pub rate: Option<Rate>,
    /// The maximum number of running jobs of each of its groups, unless the group has its own.
    pub group_limit: Option<u32>,
    /// How often jobs of each of its groups may start, unless the group has its own rate.
    pub group_rate: Option<Rate>,
    /// When its rate lets the next job start; `None` means now.
    pub next_start_at: Option<DateTime<Utc>>,
    /// The number of waiting jobs.
    pub waiting: u64,
    /// Whether `waiting` is an estimate, because too many jobs wait to count them.
    pub waiting_estimated: bool,
    /// The number of running jobs.
    pub running: u64,
    /// The number of its groups that are paused, up to 1,000.
    pub paused_groups: u64,
}

impl QueueRecord {
    /// A queue without settings and without jobs.
    pub fn empty(name: &str) -> Self {
        QueueRecord {
            name: name.to_owned(),
            paused: false,
            limit: None,
            rate: None,
            group_limit: None,
            group_rate: None,
            next_start_at: None,
            waiting: 0,
            waiting_estimated: false,
            running: 0,
            paused_groups: 0,
        }
    }
}

/// The settings of queues, and their waiting jobs.
#[async_trait]
pub trait Queues {
    /// Changes a queue's settings. Fields that are `None` stay as they are.
    async fn set_queue(&self, name: &str, change: &QueueChange) -> Result<()>;

    /// Counts the waiting jobs of one queue, up to `limit`. Reads as many index entries
    /// as it counts.
    async fn depth(&self, queue: &str, limit: u64) -> Result<u64>;

    /// Lists the queues with waiting jobs, due or not, ordered by name. Costs one index
    /// probe per queue, however many jobs wait.
    async fn waiting_queues(&self) -> Result<Vec<String>>;
}

/// The list of queues. Each engine estimates large numbers in its own way.
#[async_trait]
pub trait QueueList {
    /// Lists the queues that have settings, waiting jobs or running jobs, ordered by
    /// name. Numbers of waiting jobs up to 10,000 per queue are exact (1,000 if there are
    /// very many queues); larger ones may be estimates, within about 20 %.
    async fn queues(&self) -> Result<Vec<QueueRecord>>;
}

#[async_trait]
impl<E: Engine> Queues for E {
    async fn set_queue(&self, name: &str, change: &QueueChange) -> Result<()> {
        let args = (name.to_owned(), change.clone());
        self.call(How::SLOW.together(), args, |rows, (name, change)| Box::pin(set_queue(rows, name, change)))
            .await
    }

    async fn depth(&self, queue: &str, limit: u64) -> Result<u64> {
        let args = (queue.to_owned(), limit);
        self.call(How::SLOW_READ, args, |rows, (queue, limit)| Box::pin(depth(rows, queue, *limit))).await
    }

    async fn waiting_queues(&self) -> Result<Vec<String>> {
        self.call(How::SLOW_READ, (), |rows, ()| Box::pin(waiting_queues(rows))).await
    }
}

static SET_QUEUE: Statement = Statement::new(
    "
    insert into longshore.queues as q
           (name, paused, max_running, rate, rate_ms, burst, group_max_running, group_rate, group_rate_ms, group_burst)
    values ($1, coalesce($2, false), $4, $6, $7, $8, $10, $12, $13, $14)
        on conflict (name) do update
       set paused = coalesce($2, q.paused),
           max_running = case when $3 then $4 else q.max_running end,
           rate = case when $5 then $6 else q.rate end,
           rate_ms = case when $5 then $7 else q.rate_ms end,
           burst = case when $5 then $8 else q.burst end,
           group_max_running = case when $9 then $10 else q.group_max_running end,
           group_rate = case when $11 then $12 else q.group_rate end,
           group_rate_ms = case when $11 then $13 else q.group_rate_ms end,
           group_burst = case when $11 then $14 else q.group_burst end",
);

/// The settings of its groups have changed, so more of their jobs may start now.
static ADD_TURNS: Statement = Statement::new(
    "
    insert into longshore.turns (at, priority, queue, grp)
    select longshore.clock(), priority, queue, grp
      from longshore.turns
     where queue = $1
     group by priority, queue, grp",
);

async fn set_queue(rows: &mut dyn Rows, name: &str, change: &QueueChange) -> Sql<()> {
    let (rate, group_rate) = (change.rate.flatten(), change.group_rate.flatten());
    let args = args![
        name,
        change.paused,
        change.limit.is_some(),
        storable_limit(change.limit),
        change.rate.is_some(),
        rate.map(|rate| rate.starts),
        rate.map(|rate| rate.period_ms),
        rate.map(|rate| rate.burst),
        change.group_limit.is_some(),
        storable_limit(change.group_limit),
        change.group_rate.is_some(),
        group_rate.map(|rate| rate.starts),
        group_rate.map(|rate| rate.period_ms),
        group_rate.map(|rate| rate.burst),
    ];
    rows.execute(&SET_QUEUE, args).await?;
    if change.group_limit.is_some() || change.group_rate.is_some() {
        rows.execute(&ADD_TURNS, args![name]).await?;
    }
    Ok(())
}

/// Converts a limit to the type of its column.
pub(super) fn storable_limit(change: Option<Option<u32>>) -> Option<u32> {
    change.flatten().map(|limit| limit.min(i32::MAX as u32))
}

/// Suspects and jobs with a group have indexes of their own. Without the orders, Postgres may read a whole index into a
/// bitmap.
static DEPTH: Statement = Statement::new(
    "
    select count(*) as waiting
      from (select 1
              from (select 1
                      from longshore.ready
                     where queue = $1
                       and interruptions = 0
                       and grp is null
                     order by priority desc, run_at, id   -- the order of the index
                     limit $2) as plain
             union all
            select 1
              from (select 1
                      from longshore.ready
                     where queue = $1
                       and grp is not null
                     order by grp, priority desc, run_at, id
                     limit $2) as grouped
             union all
            select 1
              from (select 1
                      from longshore.ready
                     where queue = $1
                       and interruptions > 0
                       and grp is null
                     order by priority desc, run_at, id
                     limit $2) as suspects
             limit $2) as bounded",
);

async fn depth(rows: &mut dyn Rows, queue: &str, limit: u64) -> Sql<u64> {
    one(rows.row(&DEPTH, args![queue, limit]).await?)?.take("waiting")
}

/// The queues with waiting jobs that are not suspects, found one after the other. The first row is an empty
/// name, from which the search starts; the last row is null. Costs two index probes per queue, however many
/// jobs wait.
macro_rules! find_waiting_queues {
    () => {
        "waiting_queues as (
      select '' as queue
      union all
      select (
               select min(next.queue)
                 from (select plain.queue
                         from (select r.queue
                                 from longshore.ready r
                                where r.interruptions = 0
                                  and r.grp is null
                                  and r.queue > w.queue
                                order by r.queue
                                limit 1) as plain
                        union all
                       select grouped.queue
                         from (select r.queue
                                 from longshore.ready r
                                where r.grp is not null
                                  and r.queue > w.queue
                                order by r.queue
                                limit 1) as grouped) as next)
        from waiting_queues w
       where w.queue is not null)"
    };
}
#[cfg(feature = "postgres")]
pub(super) use find_waiting_queues;

/// Suspects have an index of their own, and are few.
pub(super) static WAITING_QUEUES: Statement = Statement::new(concat!(
    "
    with recursive ",
    find_waiting_queues!(),
    "
    select queue
      from (select queue
              from waiting_queues
             where queue <> ''
             union
            select queue
              from longshore.ready
             where interruptions > 0
               and grp is null) as waiting
     order by queue collate \"C\"",
));

async fn waiting_queues(rows: &mut dyn Rows) -> Sql<Vec<String>> {
    column(rows.rows(&WAITING_QUEUES, &[]).await?, "queue")
}
