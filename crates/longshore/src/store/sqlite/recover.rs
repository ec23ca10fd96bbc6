//! Recovery: which workers are dead, which leases may be taken from them, and
//! taking those leases.

use std::collections::HashSet;

use async_trait::async_trait;
use rusqlite::{Row, params};

use super::SqliteStore;
use super::settle::end_alone;
use super::tx::{Columns, HOUR, Sql, Tx, micros};
use crate::error::{Error, Result};
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::lifecycle::{LeaseFlags, Running};
use crate::rules::retry::RetryPolicy;
use crate::store::{
    EndedBy, Interrupted, Interruptor, Recovered, Recovery, Settlement, SweepScope, warn_of_refused_worker,
};

#[async_trait]
impl Recovery for SqliteStore {
    async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        let scope = scope.clone();
        self.engine.read(move |tx| presumed_dead(tx, &scope)).await
    }

    async fn mark_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        let scope = scope.clone();
        self.engine.write(move |tx| mark_dead(tx, &scope)).await
    }

    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>> {
        let scope = scope.clone();
        self.engine.read(move |tx| interrupted(tx, &scope)).await
    }

    async fn recover(&self, recoveries: &[Settlement]) -> Result<Vec<Recovered>> {
        let recoveries = recoveries.to_vec();
        self.engine.write(move |tx| recover(tx, &recoveries)).await
    }
}

fn presumed_dead(tx: &Tx<'_>, scope: &SweepScope) -> Sql<Vec<WorkerId>> {
    const LIVE: &str = "
        select id,
               heartbeat_at,
               stale_after_ms * 1000 as stale_after
          from workers
         where dead_at is null
         order by id";
    let holders = resilient_holders(tx, scope)?;
    let now = tx.now()?;
    let mut dead = Vec::new();
    let mut statement = tx.prepare(LIVE)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let worker = row.worker("id")?;
        let threshold = scope.threshold_of(row.get("stale_after")?, holders.contains(&worker));
        if now.saturating_sub(row.get("heartbeat_at")?) > threshold {
            dead.push(worker);
        }
    }
    Ok(dead)
}

fn mark_dead(tx: &Tx<'_>, scope: &SweepScope) -> Sql<Vec<WorkerId>> {
    const DECLARE: &str = "
        update workers
           set dead_at = ?2
         where id = ?1";
    // Dead workers stay listed for an hour, and for as long as they hold a lease.
    const DELETE_DEAD: &str = "
        delete from workers
         where dead_at < ?1
           and not exists (
               select 1
                 from running r
                where r.worker = workers.id)";
    let now = tx.now()?;
    let newly_dead = presumed_dead(tx, scope)?;
    let mut dead = Vec::with_capacity(newly_dead.len());
    for worker in newly_dead {
        // A worker that the database refuses to change must not keep the others from being declared dead.
        match tx.execute(DECLARE, params![worker.0.as_bytes(), now]) {
            Err(fault) if fault.is_refusal() => warn_of_refused_worker(worker, &fault.into()),
            done => {
                done?;
                dead.push(worker);
            }
        }
    }
    match tx.execute(DELETE_DEAD, [now - HOUR]) {
        Err(fault) if fault.is_refusal() => {
            let error = Error::from(fault);
            tracing::warn!(%error, "could not remove old dead workers; retrying at the next sweep");
        }
        done => drop(done?),
    }
    Ok(dead)
}

/// The workers that hold at least one resilient job.
fn resilient_holders(tx: &Tx<'_>, scope: &SweepScope) -> Sql<HashSet<WorkerId>> {
    const FLAGGED: &str = "
        select worker,
               flags
          from running
         where flags is not null";
    let mut holders = HashSet::new();
    let mut statement = tx.prepare(FLAGGED)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        if scope.is_resilient(&readable_flags(row)) {
            holders.insert(row.worker("worker")?);
        }
    }
    Ok(holders)
}

/// Flags that cannot be read count as none: one bad row must not stop the recovery of the
/// others.
fn readable_flags(row: &Row<'_>) -> Vec<String> {
    row.list("flags").unwrap_or_default()
}

fn interrupted(tx: &Tx<'_>, scope: &SweepScope) -> Sql<Vec<Interrupted>> {
    const LEASES: &str = "
        select r.id,
               r.kind,
               r.queue,
               r.flags,
               r.claimed_at,
               r.timeout_ms,
               r.worker,
               r.lease_no,
               r.attempt,
               r.max_attempts,
               r.interruptions,
               r.started_at is not null as started,
               r.cancel_requested,
               r.superseded,
               w.heartbeat_at,
               w.stale_after_ms * 1000 as stale_after,
               w.dead_at is not null as is_dead
          from running r
          left join workers w on w.id = r.worker
         where r.id > ?1
         order by r.id";
    let after = scope.after.map_or(Vec::new(), |id| id.0.as_bytes().to_vec());
    let now = tx.now()?;
    let holders = resilient_holders(tx, scope)?;
    let mut found = Vec::new();
    let mut statement = tx.prepare(LEASES)?;
    let mut rows = statement.query([after])?;
    while let Some(row) = rows.next()? {
        if found.len() == scope.limit as usize {
            break;
        }
        let flags = readable_flags(row);
        let Some(why) = may_be_taken(row, &flags, scope, &holders, now)? else { continue };
        let id = row.job("id")?;
        found.push(Interrupted {
            id,
            kind: row.get("kind")?,
            queue: row.get("queue")?,
            flags,
            retry: retry_policy(tx, id)?,
            running: Running {
                lease_no: row.get("lease_no")?,
                worker: row.worker("worker")?,
                attempt: row.get("attempt")?,
                max_attempts: row.get("max_attempts")?,
                interruptions: row.get("interruptions")?,
                started: row.get("started")?,
                flags: LeaseFlags {
                    cancel_requested: row.get("cancel_requested")?,
                    superseded: row.get("superseded")?,
                },
            },
            claimed_at: row.time("claimed_at")?,
            why,
        });
    }
    Ok(found)
}

/// Why the lease in this row of [`interrupted`] may be taken from its holder; `None` if it
/// may not.
fn may_be_taken(
    row: &Row<'_>,
    flags: &[String],
    scope: &SweepScope,
    holders: &HashSet<WorkerId>,
    now: i64,
) -> Sql<Option<Interruptor>> {
    let is_resilient = scope.is_resilient(flags);
    let has_passed = |since: i64, threshold: i64| now.saturating_sub(since) > threshold;

    let stepped_at = scope.stepped_at.map_or(i64::MIN, |at| at.timestamp_micros());
    let since = row.get::<_, i64>("claimed_at")?.max(stepped_at);
    let Some(heartbeat_at) = row.get::<_, Option<i64>>("heartbeat_at")? else {
        let orphan_after = scope.threshold_of(micros(scope.orphan_after), is_resilient);
        return Ok(has_passed(since, orphan_after).then_some(Interruptor::UnknownWorker));
    };
    let stale_after = row.get("stale_after")?;
    let holds_resilient = holders.contains(&row.worker("worker")?);
    let is_dead = row.get::<_, bool>("is_dead")?;
    if is_dead || has_passed(heartbeat_at, scope.threshold_of(stale_after, holds_resilient)) {
        return Ok(Some(Interruptor::DeadWorker));
    }
    let timeout = row.get::<_, Option<i64>>("timeout_ms")?.map(|ms| ms.saturating_mul(1000));
    let margin = scope.threshold_of(stale_after, is_resilient);
    let is_hung = timeout.is_some_and(|timeout| has_passed(since, timeout.saturating_add(margin)));
    Ok(is_hung.then_some(Interruptor::HungHandler))
}

fn retry_policy(tx: &Tx<'_>, id: JobId) -> Sql<Option<RetryPolicy>> {
    const OPTIONS: &str = "
        select options
          from jobs
         where id = ?1";
    let options = tx.value::<Option<String>>(OPTIONS, [id.0.as_bytes()])?.flatten();
    // One bad row must not stop the recovery of the others.
    Ok(Options::from_stored(options.as_deref()).unwrap_or_default().retry)
}

/// Ends each lease in its own savepoint, so that the items that the database refuses are
/// deferred alone.
fn recover(tx: &Tx<'_>, recoveries: &[Settlement]) -> Sql<Vec<Recovered>> {
    debug_assert!(recoveries.iter().all(|settlement| matches!(settlement.by, EndedBy::Recovery(_))));
    let mut results = Vec::with_capacity(recoveries.len());
    for settlement in recoveries {
        tx.conn.execute_batch("savepoint item")?;
        results.push(match end_alone(tx, settlement) {
            Ok(settled) => {
                tx.conn.execute_batch("release item")?;
                Recovered::Settled(settled)
            }
            // Some refusals end the whole transaction; then nothing can be stored here.
            Err(fault) if fault.is_refusal() && !tx.conn.is_autocommit() => {
                tx.conn.execute_batch("rollback to item; release item")?;
                Recovered::Deferred(Error::from(fault).to_string())
            }
            Err(fault) => return Err(fault),
        });
    }
    Ok(results)
}
