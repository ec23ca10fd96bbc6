//! Recovery: which workers are dead, which leases may be taken from them, and
//! taking those leases.

use std::time::Duration;

use rusqlite::{Row, params};

use super::settle::end_leases;
use super::tx::{Columns, HOUR, Sql, Tx, micros};
use crate::enqueue::Options;
use crate::error::Result;
use crate::job::{JobId, WorkerId};
use crate::lifecycle::{Flags, Running};
use crate::retry::RetryPolicy;
use crate::store::{EndedBy, Interrupted, Interruptor, Settled, Settlement, SweepScope};

pub(super) fn mark_dead(tx: &Tx<'_>, threshold: Option<Duration>) -> Sql<Vec<WorkerId>> {
    const DECLARE: &str = "
        update workers
           set dead_at = ?1
         where dead_at is null
           and heartbeat_at < ?1 - coalesce(?2, stale_after_ms * 1000)
        returning id";
    // The freshly dead stay for people to see.
    const FORGET: &str = "
        delete from workers
         where dead_at < ?1
           and not exists (
               select 1
                 from running r
                where r.worker = workers.id)";
    let now = tx.now()?;
    let newly_dead = tx.rows(DECLARE, params![now, threshold.map(micros)], |row| row.worker(0))?;
    tx.execute(FORGET, [now - HOUR])?;
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
                flags: Flags { cancel_requested: row.get(12)?, superseded: row.get(13)? },
            },
            claimed_at: row.time(4)?,
            why,
        });
    }
    Ok(found)
}

/// Why the lease in this row of `interrupted` may be taken from its holder.
fn may_be_taken(row: &Row<'_>, flags: &[String], scope: &SweepScope, now: i64) -> Sql<Option<Interruptor>> {
    let is_resilient = flags.iter().any(|flag| scope.resilient_flags.contains(flag));
    let factor = if is_resilient { i64::from(scope.resilient_factor.max(1)) } else { 1 };
    let patience = |own: i64| scope.threshold.map_or(own, micros).saturating_mul(factor);
    let has_passed = |since: i64, patience: i64| now.saturating_sub(since) > patience;

    let claimed_at = row.get::<_, i64>(4)?;
    let margin = patience(micros(scope.orphan_after));
    let Some(heartbeat_at) = row.get::<_, Option<i64>>(14)? else {
        return Ok(has_passed(claimed_at, margin).then_some(Interruptor::UnknownWorker));
    };
    let is_silent = has_passed(heartbeat_at, patience(row.get(15)?));
    let is_dead = row.get::<_, bool>(16)?;
    // One that is declared dead has been judged already; only its resilient
    // jobs are given longer.
    if is_silent || (is_dead && !is_resilient) {
        return Ok(Some(Interruptor::DeadWorker));
    }
    let overdue = row.get::<_, Option<i64>>(5)?.map(|ms| ms.saturating_mul(1000).saturating_add(margin));
    let is_hung = !is_dead && overdue.is_some_and(|overdue| has_passed(claimed_at, overdue));
    Ok(is_hung.then_some(Interruptor::HungHandler))
}

fn retry_policy(tx: &Tx<'_>, id: JobId) -> Sql<Option<RetryPolicy>> {
    const OPTIONS: &str = "
        select options
          from jobs
         where id = ?1";
    let options = tx.row(OPTIONS, [id.0.as_bytes()], |row| row.get::<_, Option<String>>(0))?.flatten();
    // Options that do not decode must not stop a sweep.
    Ok(Options::from_stored(options.as_deref()).unwrap_or_default().retry)
}

pub(super) fn recover(tx: &Tx<'_>, recoveries: &[(Interruptor, Settlement)]) -> Sql<Result<Vec<Settled>>> {
    end_leases(tx, recoveries.iter().map(|(why, settlement)| (EndedBy::Recovery(*why), settlement)))
}
