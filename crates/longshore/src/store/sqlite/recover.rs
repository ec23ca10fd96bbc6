//! Recovery: which workers are dead, which leases may be taken from them, and
//! taking those leases.

use std::time::Duration;

use rusqlite::{Row, params};

use super::settle::end_leases;
use super::tx::{Columns, HOUR, Sql, Tx, micros};
use crate::enqueue::Options;
use crate::error::Result;
use crate::job::{JobId, WorkerId};
use crate::lifecycle::{LeaseFlags, Running};
use crate::retry::RetryPolicy;
use crate::store::{EndedBy, Interrupted, Interruptor, Settled, Settlement, SweepScope};

pub(super) fn mark_dead(tx: &Tx<'_>, threshold: Option<Duration>) -> Sql<Vec<WorkerId>> {
    const DECLARE: &str = "
        update workers
           set dead_at = ?1
         where dead_at is null
           and heartbeat_at < ?1 - coalesce(?2, stale_after_ms * 1000)
        returning id";
    // Dead workers stay listed for an hour, and for as long as they hold a lease.
    const DELETE_DEAD: &str = "
        delete from workers
         where dead_at < ?1
           and not exists (
               select 1
                 from running r
                where r.worker = workers.id)";
    let now = tx.now()?;
    let newly_dead = tx.rows(DECLARE, params![now, threshold.map(micros)], |row| row.worker(0))?;
    tx.execute(DELETE_DEAD, [now - HOUR])?;
    Ok(newly_dead)
}

pub(super) fn interrupted(tx: &Tx<'_>, scope: &SweepScope) -> Sql<Vec<Interrupted>> {
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
               r.started_at is not null,
               r.cancel_requested,
               r.superseded,
               w.heartbeat_at,
               w.stale_after_ms * 1000,
               w.dead_at is not null
          from running r
          left join workers w on w.id = r.worker
         where r.id > ?1
         order by r.id";
    let after = scope.after.map_or(Vec::new(), |id| id.0.as_bytes().to_vec());
    let now = tx.now()?;
    let mut found = Vec::new();
    let mut statement = tx.prepare(LEASES)?;
    let mut rows = statement.query([after])?;
    while let Some(row) = rows.next()? {
        if found.len() == scope.limit as usize {
            break;
        }
        let flags = row.list(3)?;
        let Some(why) = may_be_taken(row, &flags, scope, now)? else { continue };
        let id = row.job(0)?;
        found.push(Interrupted {
            id,
            kind: row.get(1)?,
            queue: row.get(2)?,
            flags,
            retry: retry_policy(tx, id)?,
            running: Running {
                lease_no: row.get(7)?,
                worker: row.worker(6)?,
                attempt: row.get(8)?,
                max_attempts: row.get(9)?,
                interruptions: row.get(10)?,
                started: row.get(11)?,
                flags: LeaseFlags { cancel_requested: row.get(12)?, superseded: row.get(13)? },
            },
            claimed_at: row.time(4)?,
            why,
        });
    }
    Ok(found)
}

/// Why the lease in this row of [`interrupted`] may be taken from its holder; `None` if it
/// may not.
fn may_be_taken(row: &Row<'_>, flags: &[String], scope: &SweepScope, now: i64) -> Sql<Option<Interruptor>> {
    let is_resilient = flags.iter().any(|flag| scope.resilient_flags.contains(flag));
    let factor = if is_resilient { i64::from(scope.resilient_factor.max(1)) } else { 1 };
    let threshold = |own: i64| scope.threshold.map_or(own, micros).saturating_mul(factor);
    let has_passed = |since: i64, threshold: i64| now.saturating_sub(since) > threshold;

    let claimed_at = row.get::<_, i64>(4)?;
    let orphan_after = threshold(micros(scope.orphan_after));
    let Some(heartbeat_at) = row.get::<_, Option<i64>>(14)? else {
        return Ok(has_passed(claimed_at, orphan_after).then_some(Interruptor::UnknownWorker));
    };
    let is_stale = has_passed(heartbeat_at, threshold(row.get(15)?));
    let is_dead = row.get::<_, bool>(16)?;
    // A worker that is already declared dead loses its leases at once, except those of
    // resilient jobs.
    if is_stale || (is_dead && !is_resilient) {
        return Ok(Some(Interruptor::DeadWorker));
    }
    let timeout = row.get::<_, Option<i64>>(5)?.map(|ms| ms.saturating_mul(1000));
    let is_hung = !is_dead
        && timeout.is_some_and(|timeout| has_passed(claimed_at, timeout.saturating_add(orphan_after)));
    Ok(is_hung.then_some(Interruptor::HungHandler))
}

fn retry_policy(tx: &Tx<'_>, id: JobId) -> Sql<Option<RetryPolicy>> {
    const OPTIONS: &str = "
        select options
          from jobs
         where id = ?1";
    let options = tx.row(OPTIONS, [id.0.as_bytes()], |row| row.get::<_, Option<String>>(0))?.flatten();
    // One bad row must not stop the recovery of the others.
    Ok(Options::from_stored(options.as_deref()).unwrap_or_default().retry)
}

pub(super) fn recover(tx: &Tx<'_>, recoveries: &[(Interruptor, Settlement)]) -> Sql<Result<Vec<Settled>>> {
    end_leases(tx, recoveries.iter().map(|(why, settlement)| (EndedBy::Recovery(*why), settlement)))
}
