//! Queues: the list that operators see.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::SqliteStore;
use super::claim_groups::rate;
use super::stats::waiting;
use super::tx::{Columns, Sql, Tx, instant};
use crate::error::Result;
use crate::store::queues::WAITING_QUEUES;
use crate::store::{QueueList, QueueRecord, next_start};

#[async_trait]
impl QueueList for SqliteStore {
    async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.engine.read(queues).await
    }
}

fn queues(tx: &Tx<'_>) -> Sql<Vec<QueueRecord>> {
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

/// The queues with waiting jobs. Costs two index probes per queue, however many jobs wait.
pub(super) fn waiting_queues(tx: &Tx<'_>) -> Sql<Vec<String>> {
    tx.rows(WAITING_QUEUES.for_sqlite(), [], |row| row.get(0))
}
