//! What happens to a lease while it lives: progress and checkpoints, and the
//! heartbeat that keeps it. How it ends is in `settle`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::value::RawValue;
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};
use uuid::Uuid;

use super::{Done, Fault, PostgresStore};
use crate::error::Result;
use crate::job::{JobId, WorkerId};
use crate::store::{Beat, Fenced, Lease, NewWorker, WorkerRecord, millis};

// ---- while it runs ------------------------------------------------------

/// Here as in `settle`, nobody waits long for a row that a transaction of the
/// user's own has locked: a statement that is given up on waits on in the server.
const MARK_STARTED: &str = "
    update longshore.running
       set started_at = longshore.clock()
     where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
       and lease_no = $2
       and worker = $3";

const PROGRESS: &str = "
    with input as (
      select *
        from unnest((select $1::uuid[] where set_config('lock_timeout', '2s', true) <> ''), (select $2::int4[]), (select $3::uuid[]), (select $4::text[])) as input(id, lease_no, worker, progress)),
    held as (
      select r.id, i.lease_no, i.progress
        from longshore.running r
        join input i
          on i.id = r.id
         and i.lease_no = r.lease_no   -- fence: a newer lease owns the row
         and i.worker = r.worker
       order by r.id
         for no key update of r)
    update longshore.running r
       set progress = h.progress::json
      from held h
     where r.id = h.id
    returning r.id, r.lease_no";

/// The lease's row is locked against being taken, so a checkpoint of a lost
/// lease cannot land on top of its successor's.
const SAVE_CHECKPOINT: &str = "
    with held as (
      select id, lease_no
        from longshore.running
       where id = $1
         and lease_no = $2
         and worker = $3
         for key share)
    insert into longshore.checkpoints (job, lease_no, data, saved_at)
    select id, lease_no, $4::text::json, longshore.clock()
      from held
        on conflict (job) do update
       set lease_no = excluded.lease_no,
           data = excluded.data,
           saved_at = excluded.saved_at";

const ASSERT_LEASE: &str = "
    select 1
      from longshore.running
     where id = $1
       and lease_no = $2
       and worker = $3
       for key share";

impl PostgresStore {
    pub(super) async fn mark_started_on(&self, connection: &mut PgConnection, lease: &Lease) -> Done<Fenced> {
        let done = sqlx::query(self.sql(MARK_STARTED))
            .bind(lease.id.0)
            .bind(lease.lease_no)
            .bind(lease.worker.0)
            .execute(connection)
            .await?;
        Ok(fenced(done.rows_affected() > 0))
    }

    pub(super) async fn progress_on(
        &self,
        connection: &mut PgConnection,
        reports: &[(Lease, Box<RawValue>)],
    ) -> Done<Vec<Fenced>> {
        // The last report of a lease stands; an update touches a row once.
        let newest: BTreeMap<Lease, &str> =
            reports.iter().map(|(lease, progress)| (*lease, progress.get())).collect();
        let rows = sqlx::query(self.sql(PROGRESS))
            .bind(newest.keys().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(newest.keys().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .bind(newest.keys().map(|lease| lease.worker.0).collect::<Vec<_>>())
            .bind(newest.values().copied().collect::<Vec<_>>())
            .fetch_all(connection)
            .await?;
        let mut held = Vec::with_capacity(rows.len());
        for row in rows {
            held.push((row.try_get::<Uuid, _>(0)?, row.try_get::<i32, _>(1)?));
        }
        Ok(reports.iter().map(|(lease, _)| fenced(held.contains(&(lease.id.0, lease.lease_no)))).collect())
    }

    pub(super) async fn save_checkpoint_on(
        &self,
        connection: &mut PgConnection,
        lease: &Lease,
        data: &RawValue,
    ) -> Done<Fenced> {
        let done = sqlx::query(self.sql(SAVE_CHECKPOINT))
            .bind(lease.id.0)
            .bind(lease.lease_no)
            .bind(lease.worker.0)
            .bind(data.get())
            .execute(connection)
            .await?;
        Ok(fenced(done.rows_affected() > 0))
    }

    pub(super) async fn checkpoint_on(
        &self,
        connection: &mut PgConnection,
        id: JobId,
    ) -> Done<Option<Box<RawValue>>> {
        let text: Option<String> =
            sqlx::query_scalar(self.sql("select data::text from longshore.checkpoints where job = $1"))
                .bind(id.0)
                .fetch_optional(connection)
                .await?;
        Ok(text.map(super::inspect::raw).transpose()?)
    }

    pub(super) async fn assert_lease_on(&self, connection: &mut PgConnection, lease: &Lease) -> Done<Fenced> {
        let held = sqlx::query(self.sql(ASSERT_LEASE))
            .bind(lease.id.0)
            .bind(lease.lease_no)
            .bind(lease.worker.0)
            .fetch_optional(connection)
            .await?;
        Ok(fenced(held.is_some()))
    }

    /// Whether a lease is live, inside the caller's own transaction: until that
    /// ends, nobody can take the lease, so what it commits was done by the
    /// job's only owner.
    pub async fn assert_lease_in(&self, connection: &mut PgConnection, lease: &Lease) -> Result<Fenced> {
        Ok(self.assert_lease_on(connection, lease).await?)
    }
}

fn fenced(held: bool) -> Fenced {
    if held { Fenced::Held } else { Fenced::LeaseLost }
}

// ---- workers ------------------------------------------------------------

const REGISTER: &str = "
    insert into longshore.workers
           (id, name, queues, kinds, concurrency, stale_after_ms, started_at, heartbeat_at)
    values ($1, $2, $3, $4, $5, $6, longshore.clock(), longshore.clock())
        on conflict (id) do update
       set queues = excluded.queues, kinds = excluded.kinds, concurrency = excluded.concurrency,
           heartbeat_at = excluded.heartbeat_at
     where workers.dead_at is null";

const BEAT: &str = "
    with alive as (
      update longshore.workers
         set heartbeat_at = longshore.clock()
       where id = (select $1::uuid where set_config('lock_timeout', '2s', true) <> '')
         and dead_at is null
      returning id)
    select exists (select 1 from alive), h.nth, r.id is null
      from (select 1) as always
      left join (unnest((select $2::uuid[]), (select $3::int4[])) with ordinality as h(id, lease_no, nth)
                 left join longshore.running r
                   on r.id = h.id
                  and r.lease_no = h.lease_no
                  and r.worker = $1)
        on r.id is null or r.cancel_requested";

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

const WORKERS: &str = "
    select w.id, w.name, w.queues, w.kinds, w.concurrency, w.stale_after_ms, w.started_at, w.heartbeat_at, w.dead_at,
           w.heartbeat_at < longshore.clock()
             - coalesce($1::int8, w.stale_after_ms) * interval '1 millisecond',
           (select count(*) from longshore.running r where r.worker = w.id)
      from longshore.workers w
     order by w.id desc";

impl PostgresStore {
    pub(super) async fn register_on(&self, connection: &mut PgConnection, worker: &NewWorker) -> Done<()> {
        sqlx::query(self.sql(REGISTER))
            .bind(worker.id.0)
            .bind(&worker.name)
            .bind(&worker.queues)
            .bind(&worker.kinds)
            .bind(worker.concurrency as i32)
            .bind(millis(worker.stale_after))
            .execute(connection)
            .await?;
        Ok(())
    }

    pub(super) async fn beat_on(
        &self,
        connection: &mut PgConnection,
        worker: WorkerId,
        held: &[Lease],
    ) -> Done<Beat> {
        let rows = sqlx::query(self.sql(BEAT))
            .bind(worker.0)
            .bind(held.iter().map(|lease| lease.id.0).collect::<Vec<_>>())
            .bind(held.iter().map(|lease| lease.lease_no).collect::<Vec<_>>())
            .fetch_all(connection)
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

    pub(super) async fn leases_on(
        &self,
        connection: &mut PgConnection,
        worker: WorkerId,
    ) -> Done<Vec<Lease>> {
        let rows: Vec<(Uuid, i32)> = sqlx::query_as(
            self.sql("select id, lease_no from longshore.running where worker = $1 order by id"),
        )
        .bind(worker.0)
        .fetch_all(connection)
        .await?;
        Ok(rows.into_iter().map(|(id, lease_no)| Lease { id: JobId(id), lease_no, worker }).collect())
    }

    pub(super) async fn retire_on(&self, connection: &mut PgConnection, worker: WorkerId) -> Done<()> {
        let gone = sqlx::query(self.sql(RETIRE)).bind(worker.0).execute(&mut *connection).await?;
        if gone.rows_affected() == 0 {
            sqlx::query(self.sql(DECLARE_DEAD)).bind(worker.0).execute(connection).await?;
        }
        Ok(())
    }

    pub(super) async fn workers_on(
        &self,
        connection: &mut PgConnection,
        threshold: Option<Duration>,
    ) -> Done<Vec<WorkerRecord>> {
        let rows = sqlx::query(self.sql(WORKERS)).bind(threshold.map(millis)).fetch_all(connection).await?;
        let record = |row: &PgRow| -> Result<WorkerRecord, Fault> {
            Ok(WorkerRecord {
                id: WorkerId(row.try_get(0)?),
                name: row.try_get(1)?,
                queues: row.try_get(2)?,
                kinds: row.try_get(3)?,
                concurrency: row.try_get::<i32, _>(4)? as u32,
                stale_after: Duration::from_millis(row.try_get::<i64, _>(5)? as u64),
                started_at: row.try_get(6)?,
                heartbeat_at: row.try_get(7)?,
                dead_at: row.try_get(8)?,
                stale: row.try_get(9)?,
                running: row.try_get::<i64, _>(10)? as u64,
            })
        };
        rows.iter().map(record).collect()
    }
}
