//! Queues: the list that operators see.

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use rusqlite::params;

use super::SqliteStore;
use super::claim_groups::rate;
use super::stats::waiting;
use super::tx::{Columns, Sql, Tx, instant};
use crate::error::Result;
use crate::store::{QueueRecord, Queues, next_start};

#[async_trait]
impl Queues for SqliteStore {
    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.engine.read(queues).await
    }

    async fn depth(&self, queue: &str, limit: u64) -> Result<u64> {
        let queue = queue.to_owned();
        self.engine.read(move |tx| depth(tx, &queue, limit)).await
    }

    async fn waiting_queues(&self) -> Result<Vec<String>> {
        self.engine.read(waiting_queues).await
    }
}

pub(super) fn queues(tx: &Tx<'_>) -> Sql<Vec<QueueRecord>> {
    const SETTINGS: &str = "
        select name,
               paused,
               max_running,
               rate,
               rate_ms,
               burst,
               group_max_running,
               group_rate,
               group_rate_ms,
               group_burst,
               tat
          from queues";
    const RUNNING: &str = "
        select queue,
               count(*) as running
          from running
         group by queue";
    const PAUSED_GROUPS: &str = "
        select count(*)
          from (select 1
                  from groups
                 where queue = ?1
                   and paused
                 limit 1000)";
    let (waiting, now) = (waiting(tx)?, instant(tx.now()?));
    let mut queues = BTreeMap::<String, QueueRecord>::new();
    fn entry<'q>(queues: &'q mut BTreeMap<String, QueueRecord>, name: &str) -> &'q mut QueueRecord {
        queues.entry(name.to_owned()).or_insert_with(|| QueueRecord::empty(name))
    }
    for queue in tx.rows(SETTINGS, [], |row| {
        let own_rate = rate(row, 3)?;
        Ok(QueueRecord {
            paused: row.get(1)?,
            limit: row.get(2)?,
            rate: own_rate,
            next_start_at: next_start(own_rate, row.maybe_time(10)?, now),
            group_limit: row.get(6)?,
            group_rate: rate(row, 7)?,
            ..QueueRecord::empty(row.get_ref(0)?.as_str()?)
        })
    })? {
        queues.insert(queue.name.clone(), queue);
    }
    for (name, running) in
        tx.rows(RUNNING, [], |row| Ok((row.get::<_, String>("queue")?, row.get::<_, u32>("running")?)))?
    {
        entry(&mut queues, &name).running = running.into();
    }
    for name in waiting_queues(tx)? {
        entry(&mut queues, &name);
    }
    for queue in queues.values_mut() {
        let paused = tx.row(PAUSED_GROUPS, [&queue.name], |row| row.get::<_, u32>(0))?;
        queue.paused_groups = paused.unwrap_or(0).into();
    }
    for count in waiting {
        let queue = entry(&mut queues, &count.queue);
        queue.waiting += count.jobs;
        queue.waiting_estimated |= count.estimated;
    }
    // The total is exact, so the number of one queue is exact if all others are.
    let mut estimated: Vec<&mut QueueRecord> =
        queues.values_mut().filter(|queue| queue.waiting_estimated).collect();
    if let [queue] = &mut estimated[..] {
        queue.waiting_estimated = false;
    }
    Ok(queues.into_values().collect())
}

pub(super) fn depth(tx: &Tx<'_>, queue: &str, limit: u64) -> Sql<u64> {
    // Suspects and jobs with a group have indexes of their own.
    const DEPTH: &str = "
        select count(*)
          from (select 1
                  from ready indexed by ready_claim
                 where queue = ?1
                   and interruptions = 0
                   and grp is null
                union all
                select 1
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and interruptions > 0
                   and grp is null
                union all
                select 1
                  from ready indexed by ready_groups
                 where queue = ?1
                   and grp is not null
                 limit ?2)";
    let limit = i64::try_from(limit).unwrap_or(i64::MAX);
    Ok(tx.row(DEPTH, params![queue, limit], |row| row.get::<_, i64>(0))?.unwrap_or(0).unsigned_abs())
}

/// The queues with waiting jobs. Costs one index probe per queue, however many jobs wait.
pub(super) fn waiting_queues(tx: &Tx<'_>) -> Sql<Vec<String>> {
    const NEXT: [&str; 3] = [
        "
        select queue
          from ready indexed by ready_claim
         where interruptions = 0
           and grp is null
           and queue > ?1
         order by queue
         limit 1",
        "
        select queue
          from ready indexed by ready_suspects
         where interruptions > 0
           and grp is null
           and queue > ?1
         order by queue
         limit 1",
        "
        select queue
          from ready indexed by ready_groups
         where grp is not null
           and queue > ?1
         order by queue
         limit 1",
    ];
    let mut queues = BTreeSet::new();
    for next in NEXT {
        let mut last = String::new();
        while let Some(queue) = tx.row(next, [&last], |row| row.get::<_, String>(0))? {
            queues.insert(queue.clone());
            last = queue;
        }
    }
    Ok(queues.into_iter().collect())
}
