//! Workers: registration, heartbeats, and the list that operators see.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::job::{JobId, WorkerId};
use crate::store::{Beat, Lease, LiveLease, NewWorker, Registration, SCHEMA_VERSION, WorkerRecord, millis};

const REGISTER: &str = "
    insert into longshore.workers
           (id, name, queues, kinds, concurrency, stale_after_ms, started_at, heartbeat_at, host, pid, version,
            schema_version)
    values ($1, $2, $3, $4, $5, $6, longshore.clock(), longshore.clock(), $7, $8, $9, $10)
        on conflict (id) do update
       set queues = excluded.queues, kinds = excluded.kinds, concurrency = excluded.concurrency,
           heartbeat_at = excluded.heartbeat_at, schema_version = excluded.schema_version
     where workers.dead_at is null";

pub(super) async fn register(tx: &mut Tx<'_>, worker: &NewWorker) -> Sql<()> {
    sqlx::query(tx.sql(REGISTER))
        .bind(worker.id.0)
        .bind(&worker.name)
        .bind(&worker.queues)
        .bind(&worker.kinds)
        .bind(worker.concurrency as i32)
        .bind(millis(worker.stale_after))
        .bind(&worker.host)
        .bind(worker.pid.map(i64::from))
        .bind(&worker.version)
        .bind(SCHEMA_VERSION)
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

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

const REGISTRATION: &str = "
    select queues, stale_after_ms
      from longshore.workers
     where id = $1";

pub(super) async fn registration(tx: &mut Tx<'_>, worker: WorkerId) -> Sql<Option<Registration>> {
    let found: Option<(Vec<String>, i64)> =
        sqlx::query_as(tx.sql(REGISTRATION)).bind(worker.0).fetch_optional(&mut *tx.connection).await?;
    Ok(found.map(|(queues, stale_after)| Registration {
        queues,
        stale_after: Duration::from_millis(stale_after as u64),
    }))
}

const HOLDS_OUTSIDE: &str = "
    select exists (
      select 1
        from longshore.running
       where worker = $1
         and queue <> all($2))";

pub(super) async fn holds_outside(tx: &mut Tx<'_>, worker: WorkerId, queues: &[String]) -> Sql<bool> {
    let found = sqlx::query_scalar(tx.sql(HOLDS_OUTSIDE)).bind(worker.0).bind(queues.to_vec());
    Ok(found.fetch_one(&mut *tx.connection).await?)
}

pub(super) async fn leases(tx: &mut Tx<'_>, worker: WorkerId) -> Sql<Vec<Lease>> {
    let rows: Vec<(Uuid, i32)> =
        sqlx::query_as(tx.sql("select id, lease_no from longshore.running where worker = $1 order by id"))
            .bind(worker.0)
            .fetch_all(&mut *tx.connection)
            .await?;
    Ok(rows.into_iter().map(|(id, lease_no)| Lease { id: JobId(id), lease_no, worker }).collect())
}

const CANCELS: &str = "
    select id, lease_no
      from longshore.running
     where worker = $1
       and cancel_requested
     order by id";

pub(super) async fn cancels(tx: &mut Tx<'_>, worker: WorkerId) -> Sql<Vec<Lease>> {
    let rows: Vec<(Uuid, i32)> =
        sqlx::query_as(tx.sql(CANCELS)).bind(worker.0).fetch_all(&mut *tx.connection).await?;
    Ok(rows.into_iter().map(|(id, lease_no)| Lease { id: JobId(id), lease_no, worker }).collect())
}

const RETIRE: &str = "
    delete from longshore.workers w
     where w.id = $1
       and not exists (
             select 1
               from longshore.running r
              where r.worker = w.id)";

const DECLARE_DEAD: &str = "
    update longshore.workers
       set dead_at = longshore.clock()
     where id = $1
       and dead_at is null";

pub(super) async fn retire(tx: &mut Tx<'_>, worker: WorkerId) -> Sql<()> {
    let deleted = sqlx::query(tx.sql(RETIRE)).bind(worker.0).execute(&mut *tx.connection).await?;
    if deleted.rows_affected() == 0 {
        sqlx::query(tx.sql(DECLARE_DEAD)).bind(worker.0).execute(&mut *tx.connection).await?;
    }
    Ok(())
}

const WORKERS: &str = "
    select w.id, w.name, w.queues, w.kinds, w.concurrency, w.stale_after_ms, w.started_at, w.heartbeat_at, w.dead_at,
           w.heartbeat_at < longshore.clock()
             - coalesce($1::int8, w.stale_after_ms) * interval '1 millisecond' as stale,
           coalesce(held.leases, 0) as running, w.host, w.pid, w.version
      from longshore.workers w
      left join (
             select worker, count(*) as leases
               from longshore.running
              group by worker) as held on held.worker = w.id
     order by w.started_at desc, w.id desc";

pub(super) async fn workers(tx: &mut Tx<'_>, threshold: Option<Duration>) -> Sql<Vec<WorkerRecord>> {
    let rows =
        sqlx::query(tx.sql(WORKERS)).bind(threshold.map(millis)).fetch_all(&mut *tx.connection).await?;
    let record = |row: &PgRow| -> Sql<WorkerRecord> {
        Ok(WorkerRecord {
            id: WorkerId(row.try_get("id")?),
            name: row.try_get("name")?,
            queues: row.try_get("queues")?,
            kinds: row.try_get("kinds")?,
            concurrency: row.try_get::<i32, _>("concurrency")? as u32,
            stale_after: Duration::from_millis(row.try_get::<i64, _>("stale_after_ms")? as u64),
            started_at: row.try_get("started_at")?,
            heartbeat_at: row.try_get("heartbeat_at")?,
            dead_at: row.try_get("dead_at")?,
            stale: row.try_get("stale")?,
            running: row.try_get::<i64, _>("running")? as u64,
            host: row.try_get("host")?,
            pid: row.try_get::<Option<i64>, _>("pid")?.map(|pid| pid as u32),
            version: row.try_get("version")?,
        })
    };
    rows.iter().map(record).collect()
}
