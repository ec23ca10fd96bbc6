//! Queues: the list that operators see.

use async_trait::async_trait;
use sqlx::Row;

use super::PostgresStore;
use super::claim_rows::rate;
use super::stats::sample;
use super::tx::{Sql, Tx};
use crate::error::Result;
use crate::store::queues::find_waiting_queues;
use crate::store::{QueueList, QueueRecord, next_start};

#[async_trait]
impl QueueList for PostgresStore {
    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.run_read((), |tx, ()| Box::pin(queues(tx))).await
    }
}

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

async fn queues(tx: &mut Tx<'_>) -> Sql<Vec<QueueRecord>> {
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
