//! Heartbeats of workers. The rest is in `store/workers.rs`.

use std::time::Duration;

use sqlx::Row;
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::job::{JobId, WorkerId};
use crate::store::{Beat, Lease, LiveLease};

const BEAT: &str = "
    with alive as (
      update longshore.workers
         set heartbeat_at = longshore.clock()
       where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
         and dead_at is null
      returning id)
    select exists (select 1 from alive), h.nth, r.id is null
      from (select 1) as one_row
      left join (unnest((select $2::uuid[]), (select $3::int4[])) with ordinality as h(id, lease_no, nth)
                 left join longshore.running r
                   on r.id = h.id
                  and r.lease_no = h.lease_no
                  and r.worker = $1)
        on r.id is null or r.cancel_requested";

pub(super) async fn beat(tx: &mut Tx<'_>, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
    let rows = sqlx::query(tx.sql(BEAT))
        .bind(worker.0)
        .bind(held.iter().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(held.iter().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let (mut lost, mut cancel) = (Vec::new(), Vec::new());
    for row in &rows {
        if !row.try_get::<bool, _>(0)? {
            return Ok(Beat::Dead);
        }
        if let Some(nth) = row.try_get::<Option<i64>, _>(1)? {
            let list = if row.try_get(2)? { &mut lost } else { &mut cancel };
            list.push(held[nth as usize - 1]);
        }
    }
    Ok(Beat::Alive { lost, cancel })
}

const BEAT_AND_LIST: &str = "
    with alive as (
      update longshore.workers
         set heartbeat_at = longshore.clock()
       where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
         and dead_at is null
      returning id)
    select exists (select 1 from alive), r.id, r.lease_no,
           (extract(epoch from longshore.clock() - r.claimed_at) * 1000)::int8,
           r.interruptions > 0, r.cancel_requested
      from (select 1) as one_row
      left join longshore.running r on r.worker = $1
     order by r.id";

pub(super) async fn beat_and_list(tx: &mut Tx<'_>, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>> {
    let rows = sqlx::query(tx.sql(BEAT_AND_LIST)).bind(worker.0).fetch_all(&mut *tx.connection).await?;
    let mut leases = Vec::with_capacity(rows.len());
    for row in &rows {
        if !row.try_get::<bool, _>(0)? {
            return Ok(None);
        }
        if let Some(id) = row.try_get::<Option<Uuid>, _>(1)? {
            leases.push(LiveLease {
                lease: Lease { id: JobId(id), lease_no: row.try_get(2)?, worker },
                age: Duration::from_millis(row.try_get::<i64, _>(3)?.max(0) as u64),
                is_suspect: row.try_get(4)?,
                cancel_requested: row.try_get(5)?,
            });
        }
    }
    Ok(Some(leases))
}
