//! Queues: their settings, and the list that operators see.

use sqlx::Row;

use super::claim_groups::rate;
use super::stats::sample;
use super::tx::{Query, Sql, Tx};
use crate::store::{QueueChange, QueueRecord, next_start};
use crate::turns::Rate;

const SET_QUEUE: &str = "
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
           group_burst = case when $11 then $14 else q.group_burst end";

/// The settings of its groups have changed, so more of their jobs may start now.
const ADD_TURNS: &str = "
    insert into longshore.turns (at, priority, queue, grp)
    select longshore.clock(), priority, queue, grp
      from longshore.turns
     where queue = $1
     group by priority, queue, grp";

pub(super) async fn set_queue(tx: &mut Tx<'_>, name: &str, change: &QueueChange) -> Sql<()> {
    let limit =
        |limit: Option<Option<u32>>| limit.flatten().map(|limit| i32::try_from(limit).unwrap_or(i32::MAX));
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let query = sqlx::query(tx.sql(SET_QUEUE))
        .bind(name)
        .bind(change.paused)
        .bind(change.limit.is_some())
        .bind(limit(change.limit));
    let query =
        bind_rate(query, change.rate).bind(change.group_limit.is_some()).bind(limit(change.group_limit));
    bind_rate(query, change.group_rate).execute(&mut *tx.connection).await?;
    if change.group_limit.is_some() || change.group_rate.is_some() {
        sqlx::query(tx.sql(ADD_TURNS)).bind(name).execute(&mut *tx.connection).await?;
    }
    transaction.commit().await
}

/// Binds whether to change a rate, and its three columns.
pub(super) fn bind_rate<'q>(query: Query<'q>, change: Option<Option<Rate>>) -> Query<'q> {
    let rate = change.flatten();
    query
        .bind(change.is_some())
        .bind(rate.map(|rate| rate.starts as i32))
        .bind(rate.map(|rate| rate.period_ms as i64))
        .bind(rate.map(|rate| rate.burst as i32))
}

/// The queues with waiting jobs that are not suspects, a first row with an empty name and a last
/// row without a queue. Costs two index probes per queue, however many jobs wait.
macro_rules! find_waiting_queues {
    () => {
        "waiting_queues as (
      select '' as queue
      union all
      select (
               select min(next.queue)
                 from ((select r.queue
                          from longshore.ready r
                         where r.interruptions = 0
                           and r.grp is null
                           and r.queue > w.queue
                         order by r.queue
                         limit 1)
                       union all
                       (select r.queue
                          from longshore.ready r
                         where r.grp is not null
                           and r.queue > w.queue
                         order by r.queue
                         limit 1)) as next)
        from waiting_queues w
       where w.queue is not null)"
    };
}
pub(super) use find_waiting_queues;

/// Counts the waiting jobs of each queue up to a bound, which is lower if there are very many
/// queues. Suspects are few and have their own index.
const QUEUES: &str = concat!(
    "with recursive ",
    find_waiting_queues!(),
    ",
    suspects as (
      select queue, count(*) as n
        from longshore.ready
       where interruptions > 0
         and grp is null
       group by queue),
    running as (
      select queue, count(*) as n
        from longshore.running
       group by queue),
    names as (
      select name from longshore.queues
      union
      select queue from waiting_queues where queue <> ''
      union
      select queue from suspects
      union
      select queue from running),
    bound as (
      select greatest(1000, least(10000, 100000 / greatest(count(*), 1))) as jobs
        from waiting_queues)
    select n.name, coalesce(s.paused, false) as paused, s.max_running, s.rate, s.rate_ms, s.burst,
           s.group_max_running, s.group_rate, s.group_rate_ms, s.group_burst, s.tat, longshore.clock() as now, coalesce(p.n, 0) as suspects, (
             select count(*)
               from ((select 1
                        from longshore.ready r
                       where r.queue = n.name
                         and r.interruptions = 0
                         and r.grp is null
                       order by r.priority desc, r.run_at, r.id   -- the order of the index
                       limit (select jobs + 1 from bound))
                     union all
                     (select 1
                        from longshore.ready r
                       where r.queue = n.name
                         and r.grp is not null
                       order by r.grp, r.priority desc, r.run_at, r.id
                       limit (select jobs + 1 from bound))
                     limit (select jobs + 1 from bound)) as bounded) as waiting,
           coalesce(r.n, 0) as running, (select jobs from bound) as bound, (
             select count(*)
               from (select 1
                       from longshore.groups g
                      where g.queue = n.name
                        and g.paused
                      limit 1000) as bounded) as paused_groups
      from names n
      left join longshore.queues s on s.name = n.name
      left join suspects p on p.queue = n.name
      left join running r on r.queue = n.name
     order by n.name collate \"C\""
);

pub(super) async fn queues(tx: &mut Tx<'_>) -> Sql<Vec<QueueRecord>> {
    let mut transaction = tx.begin_snapshot().await?;
    let tx = &mut transaction.tx();
    let rows = sqlx::query(tx.sql(QUEUES)).fetch_all(&mut *tx.connection).await?;
    let mut queues = Vec::with_capacity(rows.len());
    let mut estimates = None;
    for row in rows {
        let (waiting, bound): (i64, i64) = (row.try_get("waiting")?, row.try_get("bound")?);
        let own_rate = rate(row.try_get("rate")?, row.try_get("rate_ms")?, row.try_get("burst")?);
        let mut queue = QueueRecord {
            name: row.try_get("name")?,
            paused: row.try_get("paused")?,
            limit: row.try_get::<Option<i32>, _>("max_running")?.map(|limit| limit as u32),
            rate: own_rate,
            next_start_at: next_start(own_rate, row.try_get("tat")?, row.try_get("now")?),
            group_limit: row.try_get::<Option<i32>, _>("group_max_running")?.map(|limit| limit as u32),
            group_rate: rate(
                row.try_get("group_rate")?,
                row.try_get("group_rate_ms")?,
                row.try_get("group_burst")?,
            ),
            waiting: waiting as u64,
            waiting_estimated: false,
            running: row.try_get::<i64, _>("running")? as u64,
            paused_groups: row.try_get::<i64, _>("paused_groups")? as u64,
        };
        if waiting > bound {
            let counts = match &mut estimates {
                Some(counts) => counts,
                None => estimates.insert(sample(tx).await?.0),
            };
            let own = counts.iter().filter(|count| count.queue == queue.name);
            let (jobs, estimated) = own.fold((0, false), |(jobs, estimated), count| {
                (jobs + count.jobs, estimated || count.estimated)
            });
            // At least as many as were counted, also if the sample missed the queue.
            queue.waiting = jobs.max(queue.waiting);
            queue.waiting_estimated = estimated || jobs < queue.waiting;
        }
        queue.waiting += row.try_get::<i64, _>("suspects")? as u64;
        queues.push(queue);
    }
    transaction.commit().await?;
    Ok(queues)
}

/// Suspects and jobs with a group have indexes of their own.
const DEPTH: &str = "
    select count(*)
      from (select 1
              from ((select 1
                       from longshore.ready
                      where queue = $1
                        and interruptions = 0
                        and grp is null
                      limit $2)
                    union all
                    (select 1
                       from longshore.ready
                      where queue = $1
                        and grp is not null
                      limit $2)
                    union all
                    (select 1
                       from longshore.ready
                      where queue = $1
                        and interruptions > 0
                        and grp is null
                      limit $2)) as waiting
             limit $2) as bounded";

pub(super) async fn depth(tx: &mut Tx<'_>, queue: &str, limit: u64) -> Sql<u64> {
    let waiting: i64 = sqlx::query_scalar(tx.sql(DEPTH))
        .bind(queue)
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .fetch_one(&mut *tx.connection)
        .await?;
    Ok(waiting.unsigned_abs())
}

/// Suspects have an index of their own, and are few.
const WAITING_QUEUES: &str = concat!(
    "with recursive ",
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
     order by queue collate \"C\""
);

pub(super) async fn waiting_queues(tx: &mut Tx<'_>) -> Sql<Vec<String>> {
    Ok(sqlx::query_scalar(tx.sql(WAITING_QUEUES)).fetch_all(&mut *tx.connection).await?)
}
