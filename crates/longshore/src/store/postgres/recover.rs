//! Recovery: which workers are dead, which leases may be taken from them, and
//! taking those leases.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::PgRow;
use uuid::Uuid;

use super::PostgresStore;
use super::run::{QUICK, within};
use super::settle::{Item, end_together};
use super::tx::{Fault, Sql, Tx};
use crate::error::{Error, Result};
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::lifecycle::{LeaseFlags, Leave, Running};
use crate::rules::retry::millis;
use crate::store::{
    EndedBy, Interrupted, Interruptor, Lease, Recovered, Recovery, Settled, Settlement, SweepScope,
    warn_of_refused_worker,
};

#[async_trait]
impl Recovery for PostgresStore {
    async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        self.run_quick(scope.clone(), |tx, scope| Box::pin(presumed_dead(tx, scope))).await
    }

    async fn mark_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        self.run_quick(scope.clone(), |tx, scope| Box::pin(mark_dead(tx, scope))).await
    }

    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>> {
        self.run(scope.clone(), |tx, scope| {
            Box::pin(async move {
                let rows = sqlx::query(tx.sql(INTERRUPTED))
                    .bind(scope.threshold.map(millis))
                    .bind(millis(scope.orphan_after))
                    .bind(&scope.resilient_flags)
                    .bind(f64::from(scope.resilient_factor.max(1)))
                    .bind(scope.after.map(|id| id.0))
                    .bind(i64::from(scope.limit))
                    .bind(scope.stepped_at)
                    .fetch_all(&mut *tx.connection)
                    .await?;
                rows.iter().map(read_interrupted).collect()
            })
        })
        .await
    }

    async fn recover(&self, recoveries: &[Settlement]) -> Result<Vec<Recovered>> {
        self.run(recoveries.to_vec(), |tx, recoveries| Box::pin(recover(tx, recoveries))).await
    }
}

/// The live workers whose heartbeat is too old. A worker that holds a resilient job has
/// `$3` times as long, for all its leases.
macro_rules! presumed_dead {
    () => {
        "
             select w.id
               from longshore.workers w
              where w.dead_at is null
                and ($4::uuid is null or w.id = $4)
                and w.heartbeat_at < longshore.clock() - coalesce($1::int8, w.stale_after_ms) * interval '1 millisecond'
                and (w.heartbeat_at < longshore.clock()   -- at most ten years: more makes no difference and may overflow
                       - least(coalesce($1::int8, w.stale_after_ms) * $3::float8, 315360000000) * interval '1 millisecond'
                     or w.id not in (
                          select r.worker
                            from longshore.running r
                           where r.flags && $2::text[]))
              order by w.id"
    };
}

const PRESUMED_DEAD: &str = presumed_dead!();

const MARK_DEAD: &str = concat!(
    "
    update longshore.workers
       set dead_at = longshore.clock()
     where id = any(array(",
    presumed_dead!(),
    "
                for update skip locked))
    returning id"
);

/// Dead workers stay listed for an hour, and for as long as they hold a lease.
const FORGET_DEAD: &str = "
    delete from longshore.workers
     where id = any(array(
             select w.id
               from longshore.workers w
              where w.dead_at < longshore.clock() - interval '1 hour'
                and not exists (
                      select 1
                        from longshore.running r
                       where r.worker = w.id)
              order by w.id
                for update skip locked))";

async fn presumed_dead(tx: &mut Tx<'_>, scope: &SweepScope) -> Sql<Vec<WorkerId>> {
    select_workers(tx, PRESUMED_DEAD, scope, None).await
}

async fn mark_dead(tx: &mut Tx<'_>, scope: &SweepScope) -> Sql<Vec<WorkerId>> {
    let dead = match select_workers(tx, MARK_DEAD, scope, None).await {
        Err(fault) if fault.is_refusal() => mark_dead_one_by_one(tx, scope).await?,
        done => done?,
    };
    match sqlx::query(tx.sql(FORGET_DEAD)).execute(&mut *tx.connection).await.map_err(Fault::from) {
        Err(fault) if fault.is_refusal() => {
            let error = Error::from(fault);
            tracing::warn!(%error, "could not remove old dead workers; retrying at the next sweep");
        }
        done => {
            done?;
        }
    }
    Ok(dead)
}

/// A worker that the database refuses to change must not keep the others from being declared dead.
async fn mark_dead_one_by_one(tx: &mut Tx<'_>, scope: &SweepScope) -> Sql<Vec<WorkerId>> {
    let mut dead = Vec::new();
    for worker in presumed_dead(tx, scope).await? {
        match select_workers(tx, MARK_DEAD, scope, Some(worker)).await {
            Err(fault) if fault.is_refusal() => warn_of_refused_worker(worker, &fault.into()),
            marked => dead.extend(marked?),
        }
    }
    Ok(dead)
}

async fn select_workers(
    tx: &mut Tx<'_>,
    sql: &'static str,
    scope: &SweepScope,
    only: Option<WorkerId>,
) -> Sql<Vec<WorkerId>> {
    let workers: Vec<Uuid> = sqlx::query_scalar(tx.sql(sql))
        .bind(scope.threshold.map(millis))
        .bind(&scope.resilient_flags)
        .bind(f64::from(scope.resilient_factor.max(1)))
        .bind(only.map(|worker| worker.0))
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(workers.into_iter().map(WorkerId).collect())
}

const INTERRUPTED: &str = "
    with resilient as (   -- the workers that hold a resilient job
      select distinct worker
        from longshore.running
       where flags && $3::text[])
    select r.id, r.kind, r.queue, r.flags, r.lease_no, r.worker, r.attempt, r.max_attempts, r.interruptions,
           r.started_at is not null as started, r.cancel_requested, r.superseded, r.claimed_at,
           j.options::text as options, reason.name as reason
      from longshore.running r
     cross join lateral (   -- one index probe per job, whatever the planner assumes
             select options
               from longshore.jobs
              where id = r.id
              limit 1) as j
      left join longshore.workers w on w.id = r.worker
      left join resilient on resilient.worker = r.worker
     cross join lateral (
             select case when resilient.worker is not null then $4::float8 else 1 end as worker,
                    case when r.flags && $3::text[] then $4::float8 else 1 end as job) as factor
     cross join lateral (   -- at most ten years: more makes no difference and may overflow
             select least(coalesce($1::int8, w.stale_after_ms) * factor.worker, 315360000000)
                      * interval '1 millisecond' as worker,
                    least(coalesce($1::int8, w.stale_after_ms, $2::int8) * factor.job, 315360000000)
                      * interval '1 millisecond' as lease) as threshold
     cross join lateral (
             select case
                      when w.id is null
                       and greatest(r.claimed_at, $7::timestamptz) < longshore.clock() - threshold.lease
                      then 'unknown'
                      when w.dead_at is not null
                        or w.heartbeat_at < longshore.clock() - threshold.worker
                      then 'dead'
                      when w.id is not null
                       and greatest(r.claimed_at, $7) < longshore.clock() - threshold.lease
                                            - r.timeout_ms * interval '1 millisecond'
                      then 'hung'
                    end as name) as reason
     where reason.name is not null
       and r.id > coalesce($5, '00000000-0000-0000-0000-000000000000')
     order by r.id
     limit $6";

fn read_interrupted(row: &PgRow) -> Sql<Interrupted> {
    let why = match row.try_get::<&str, _>("reason")? {
        "unknown" => Interruptor::UnknownWorker,
        "dead" => Interruptor::DeadWorker,
        _ => Interruptor::HungHandler,
    };
    Ok(Interrupted {
        id: JobId(row.try_get("id")?),
        kind: row.try_get("kind")?,
        queue: row.try_get("queue")?,
        flags: row
            .try_get::<Option<Vec<Option<String>>>, _>("flags")?
            .unwrap_or_default()
            .into_iter()
            .flatten()
            .collect(),
        running: Running {
            lease_no: row.try_get("lease_no")?,
            worker: WorkerId(row.try_get("worker")?),
            attempt: row.try_get::<i16, _>("attempt")? as u16,
            max_attempts: row.try_get::<i16, _>("max_attempts")? as u16,
            interruptions: row.try_get::<i16, _>("interruptions")? as u16,
            started: row.try_get("started")?,
            flags: LeaseFlags {
                cancel_requested: row.try_get("cancel_requested")?,
                superseded: row.try_get("superseded")?,
            },
        },
        claimed_at: row.try_get("claimed_at")?,
        // One bad row must not stop the recovery of the others.
        retry: Options::from_stored(row.try_get("options")?).ok().and_then(|options| options.retry),
        why,
    })
}

/// How long one call splits batches that the database refuses. After that, the items that
/// were not tried are deferred, so that other pages get their turn.
const MAX_SPLITTING: Duration = Duration::from_secs(20);

/// Ends leases in batches. If the database refuses a batch, it is split in halves, so that
/// the items it refuses are deferred alone.
async fn recover(tx: &mut Tx<'_>, batch: &[Settlement]) -> Sql<Vec<Recovered>> {
    debug_assert!(batch.iter().all(|settlement| matches!(settlement.by, EndedBy::Recovery(_))));
    let started = Instant::now();
    let mut results = vec![Recovered::Settled(Settled::LeaseLost); batch.len()];
    // Lock rows in the order of their ids, as everywhere.
    let mut order: Vec<usize> = (0..batch.len()).collect();
    order.sort_by_key(|nth| batch[*nth].lease.id);
    let mut parts = vec![order.as_slice()];
    while let Some(part) = parts.pop() {
        let ended = if started.elapsed() > MAX_SPLITTING {
            vec![
                Recovered::Deferred("this sweep was busy with jobs that cannot be recovered".into());
                part.len()
            ]
        } else {
            let items: Vec<_> = part.iter().map(|nth| &batch[*nth]).collect();
            match within(QUICK, recover_together(tx, &items)).await {
                Ok(ended) => ended,
                Err(fault) if fault.is_refusal() && part.len() > 1 => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second, first]);
                    continue;
                }
                Err(fault) if fault.is_refusal() => vec![Recovered::Deferred(Error::from(fault).to_string())],
                Err(fault) => return Err(fault),
            }
        };
        for (nth, ended) in part.iter().zip(ended) {
            results[*nth] = ended;
        }
    }
    Ok(results)
}

/// Locks the leases that no other transaction has locked, and the unique keys of the jobs
/// that finish. Returns each live lease, and whether all its rows could be locked.
const LOCK_LEASES: &str = "
    with free as materialized (
      select r.id
        from unnest($1::uuid[], $2::int4[], $3::uuid[]) as i(id, lease_no, worker)
        join longshore.running r
          on r.id = i.id
         and r.lease_no = i.lease_no   -- fence: a newer lease owns the row
         and r.worker = i.worker
       order by r.id
         for update of r skip locked),
    free_keys as materialized (
      select k.job
        from longshore.keys k
       where k.job = any($4::uuid[])
       order by k.job
         for update skip locked)
    select r.id,
           r.id in (select id from free)
             and not exists (
                   select 1
                     from longshore.keys k
                    where k.job = r.id
                      and k.job = any($4::uuid[])
                      and k.job not in (select job from free_keys)) as is_free
      from unnest($1::uuid[], $2::int4[], $3::uuid[]) as i(id, lease_no, worker)
      join longshore.running r
        on r.id = i.id
       and r.lease_no = i.lease_no
       and r.worker = i.worker";

async fn recover_together(tx: &mut Tx<'_>, batch: &[&Settlement]) -> Sql<Vec<Recovered>> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let leases = || batch.iter().map(|settlement| settlement.lease);
    let finishing = batch.iter().filter(|settlement| matches!(settlement.leave, Leave::Finish(_)));
    let live = sqlx::query(tx.sql(LOCK_LEASES))
        .bind(leases().map(|lease| lease.id.0).collect::<Vec<_>>())
        .bind(leases().map(|lease| lease.lease_no).collect::<Vec<_>>())
        .bind(leases().map(|lease| lease.worker.0).collect::<Vec<_>>())
        .bind(finishing.map(|settlement| settlement.lease.id.0).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut locked_by_others = HashSet::<Uuid>::new();
    for row in live {
        if !row.try_get::<bool, _>("is_free")? {
            locked_by_others.insert(row.try_get("id")?);
        }
    }
    let items = batch.iter().copied().enumerate();
    let free: Vec<Item<'_>> =
        items.filter(|(_, settlement)| !locked_by_others.contains(&settlement.lease.id.0)).collect();
    let mut settled = vec![Settled::LeaseLost; batch.len()];
    end_together(tx, &free, &mut settled).await?;
    transaction.commit().await?;
    let recovered = |(lease, settled): (Lease, Settled)| {
        if locked_by_others.contains(&lease.id.0) {
            Recovered::Deferred("another transaction has locked the lease or its unique key".into())
        } else {
            Recovered::Settled(settled)
        }
    };
    Ok(leases().zip(settled).map(recovered).collect())
}
