//! Recovery: which workers are dead, which leases may be taken from them, and
//! taking those leases.

use std::time::Duration;

use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::settle::end_leases;
use super::tx::{Sql, Tx};
use crate::enqueue::Options;
use crate::job::{JobId, WorkerId};
use crate::lifecycle::{LeaseFlags, Running};
use crate::store::{EndedBy, Interrupted, Interruptor, Settled, Settlement, SweepScope, millis};

const MARK_DEAD: &str = "
    update longshore.workers
       set dead_at = longshore.clock()
     where id = any(array(
             select id
               from longshore.workers
              where dead_at is null
                and heartbeat_at < longshore.clock() - coalesce($1::int8, stale_after_ms) * interval '1 millisecond'
              order by id
                for update skip locked))
    returning id";

/// Dead workers stay listed for an hour, and for as long as they hold a lease.
const FORGET_DEAD: &str = "
    delete from longshore.workers w
     where w.dead_at < longshore.clock() - interval '1 hour'
       and not exists (
             select 1
               from longshore.running r
              where r.worker = w.id)";

pub(super) async fn mark_dead(tx: &mut Tx<'_>, threshold: Option<Duration>) -> Sql<Vec<WorkerId>> {
    sqlx::query(tx.sql(FORGET_DEAD)).execute(&mut *tx.connection).await?;
    let dead: Vec<Uuid> = sqlx::query_scalar(tx.sql(MARK_DEAD))
        .bind(threshold.map(millis))
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(dead.into_iter().map(WorkerId).collect())
}

const INTERRUPTED: &str = "
    select r.id, r.kind, r.queue, r.flags, r.lease_no, r.worker, r.attempt, r.max_attempts, r.interruptions,
           r.started_at is not null, r.cancel_requested, r.superseded, r.claimed_at, j.options::text, reason.name
      from longshore.running r
      join longshore.jobs j on j.id = r.id
      left join longshore.workers w on w.id = r.worker
     cross join lateral (
             select coalesce(r.flags && $3::text[], false) as is_resilient) as job
     cross join lateral (
             select case when job.is_resilient then $4::float8 else 1 end as factor) as resilience
     cross join lateral (   -- at most ten years: more makes no difference and may overflow
             select least(coalesce($1::int8, w.stale_after_ms) * resilience.factor, 315360000000)
                      * interval '1 millisecond' as stale_after,
                    least(coalesce($1::int8, $2::int8) * resilience.factor, 315360000000)
                      * interval '1 millisecond' as orphan_after) as threshold
     cross join lateral (
             select case
                      when w.id is null
                       and r.claimed_at < longshore.clock() - threshold.orphan_after
                      then 'unknown'
                      when w.heartbeat_at < longshore.clock() - threshold.stale_after
                        or (w.dead_at is not null and not job.is_resilient)
                      then 'dead'
                      when w.dead_at is null
                       and w.id is not null
                       and r.claimed_at < longshore.clock() - threshold.orphan_after
                                            - r.timeout_ms * interval '1 millisecond'
                      then 'hung'
                    end as name) as reason
     where reason.name is not null
       and r.id > coalesce($5, '00000000-0000-0000-0000-000000000000')
     order by r.id
     limit $6";

pub(super) async fn interrupted(tx: &mut Tx<'_>, scope: &SweepScope) -> Sql<Vec<Interrupted>> {
    let rows = sqlx::query(tx.sql(INTERRUPTED))
        .bind(scope.threshold.map(millis))
        .bind(millis(scope.orphan_after))
        .bind(&scope.resilient_flags)
        .bind(f64::from(scope.resilient_factor.max(1)))
        .bind(scope.after.map(|id| id.0))
        .bind(i64::from(scope.limit))
        .fetch_all(&mut *tx.connection)
        .await?;
    rows.iter().map(read_interrupted).collect()
}

fn read_interrupted(row: &PgRow) -> Sql<Interrupted> {
    let why = match row.try_get::<&str, _>(14)? {
        "unknown" => Interruptor::UnknownWorker,
        "dead" => Interruptor::DeadWorker,
        _ => Interruptor::HungHandler,
    };
    Ok(Interrupted {
        id: JobId(row.try_get(0)?),
        kind: row.try_get(1)?,
        queue: row.try_get(2)?,
        flags: row
            .try_get::<Option<Vec<Option<String>>>, _>(3)?
            .unwrap_or_default()
            .into_iter()
            .flatten()
            .collect(),
        running: Running {
            lease_no: row.try_get(4)?,
            worker: WorkerId(row.try_get(5)?),
            attempt: row.try_get::<i16, _>(6)? as u16,
            max_attempts: row.try_get::<i16, _>(7)? as u16,
            interruptions: row.try_get::<i16, _>(8)? as u16,
            started: row.try_get(9)?,
            flags: LeaseFlags { cancel_requested: row.try_get(10)?, superseded: row.try_get(11)? },
        },
        claimed_at: row.try_get(12)?,
        // One bad row must not stop the recovery of the others.
        retry: Options::from_stored(row.try_get(13)?).ok().and_then(|options| options.retry),
        why,
    })
}

pub(super) async fn recover(tx: &mut Tx<'_>, batch: &[(Interruptor, Settlement)]) -> Sql<Vec<Settled>> {
    end_leases(tx, batch.iter().map(|(why, settlement)| (EndedBy::Recovery(*why), settlement))).await
}
