//! Retention: removing finished jobs whose retention has passed, and folding tallies.
//! Both work in bounded steps.

use std::time::Duration;

use rusqlite::{Row, params};

use super::settle::{add_tally, tally};
use super::tx::{Clock, Columns, DAY, HOUR, Sql, Tx, micros};
use crate::job::{JobId, Outcome};
use crate::store::{Retained, Retention};

pub(super) fn retain(tx: &Tx<'_>, policy: &Retention, step: u32) -> Sql<Retained> {
    const NEXT: &str = "
        select id,
               outcome,
               finished_at
          from finished
         where id > ?1
         order by id
         limit ?2";
    let clock = tx.clock()?;
    let recent = RecentIds::of(policy, clock);
    let mut cursor = read_cursor(tx, "retain")?;
    let mut remaining = step.max(1);
    let mut removed = 0;
    loop {
        let rows = tx.rows(NEXT, params![cursor, remaining], |row| {
            Ok((row.job(0)?, row.outcome(1)?, row.get::<_, i64>(2)?))
        })?;
        let at_end = rows.len() < remaining as usize;
        remaining -= rows.len() as u32;
        let mut skip_to = None;
        for (id, outcome, finished_at) in rows {
            skip_to = recent.as_ref().and_then(|recent| recent.skip_from(id));
            if skip_to.is_some() {
                break;
            }
            cursor = id.0.as_bytes().to_vec();
            let is_expired = |kept: Duration| finished_at < clock.now.saturating_sub(micros(kept));
            if policy.of(outcome).is_some_and(is_expired) {
                remove(tx, id, outcome)?;
                removed += 1;
            }
        }
        let done = skip_to.is_none() && at_end;
        if let Some(position) = skip_to {
            cursor = position;
        }
        if done || remaining == 0 {
            write_cursor(tx, "retain", if done { &[] } else { &cursor })?;
            return Ok(Retained { removed, done });
        }
    }
}

/// The ids of jobs that are too recent to be removed. Ids start with their creation time,
/// so the walk can skip this range without reading it. Both bounds have a day of margin,
/// because the clocks of enqueuing hosts may be wrong. There is no range while the clock is
/// pinned, because ids follow the real time.
struct RecentIds {
    from_ms: i64,
    to_ms: i64,
}

impl RecentIds {
    fn of(policy: &Retention, clock: Clock) -> Option<Self> {
        let shortest = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min();
        let shortest = shortest.map_or(i64::MAX, micros);
        (!clock.pinned).then(|| RecentIds {
            from_ms: clock.now.saturating_sub(shortest).saturating_add(DAY) / 1000,
            to_ms: (clock.now + DAY) / 1000,
        })
    }

    /// The position after the range, if it contains this id.
    fn skip_from(&self, id: JobId) -> Option<Vec<u8>> {
        let (seconds, nanos) = id.0.get_timestamp().filter(|_| id.0.get_version_num() == 7)?.to_unix();
        let created_ms = i64::try_from(seconds).ok()? * 1000 + i64::from(nanos / 1_000_000);
        (self.from_ms < created_ms && created_ms < self.to_ms).then(|| self.to_ms.to_be_bytes()[2..].to_vec())
    }
}

fn remove(tx: &Tx<'_>, id: JobId, outcome: Outcome) -> Sql<()> {
    const FINISHED: &str = "
        delete from finished
         where id = ?1";
    tx.execute(FINISHED, [id.0.as_bytes()])?;
    delete_request(tx, id, outcome)
}

/// Deletes the request, the history, the checkpoint and the merged requests of a job that is no longer in
/// `finished`, and updates the tallies.
pub(super) fn delete_request(tx: &Tx<'_>, id: JobId, outcome: Outcome) -> Sql<()> {
    const JOB: &str = "
        delete from jobs
         where id = ?1
        returning queue, kind";
    const ATTEMPTS: &str = "
        delete from attempts
         where job = ?1";
    const CHECKPOINT: &str = "
        delete from checkpoints
         where job = ?1";
    const REQUESTS: &str = "
        delete from merged_requests
         where job = ?1";
    let id = id.0.as_bytes();
    let deleted = tx.row(JOB, [id], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?;
    tx.execute(ATTEMPTS, [id])?;
    tx.execute(CHECKPOINT, [id])?;
    tx.execute(REQUESTS, [id])?;
    match deleted {
        Some((queue, kind)) => tally(tx, &queue, &kind, outcome, 0, 0, -1),
        None => Ok(()),
    }
}

fn read_cursor(tx: &Tx<'_>, name: &str) -> Sql<Vec<u8>> {
    const READ: &str = "
        select cursor
          from upkeep
         where name = ?1";
    Ok(tx.row(READ, [name], |row| row.get::<_, Option<Vec<u8>>>(0))?.flatten().unwrap_or_default())
}

fn write_cursor(tx: &Tx<'_>, name: &str, cursor: &[u8]) -> Sql<()> {
    const WRITE: &str = "
        update upkeep
           set cursor = ?2
         where name = ?1";
    tx.execute(WRITE, params![name, Some(cursor).filter(|cursor| !cursor.is_empty())])?;
    Ok(())
}

/// Minutes more than two hours ago become hours; hours more than a week ago become one
/// row per queue, kind and outcome with the number of jobs kept.
pub(super) fn fold_tallies(tx: &Tx<'_>, step: u32) -> Sql<u64> {
    const OLD: &str = "
        select minute,
               queue,
               kind,
               outcome,
               run_bucket,
               ended,
               kept
          from tallies
         where minute > 0
           and minute < ?1
         limit ?2";
    const MINUTES: &str = "
        select minute,
               queue,
               kind,
               outcome,
               run_bucket,
               ended,
               kept
          from tallies
         where minute >= ?1
           and minute < ?2
           and minute % ?3 <> 0
         limit ?4";
    const TAKE: &str = "
        delete from tallies
         where minute = ?1
           and queue = ?2
           and kind = ?3
           and outcome = ?4
           and run_bucket = ?5";
    const EMPTY: &str = "
        delete from tallies
         where minute = 0
           and kept = 0";
    type Tally = (i64, String, String, String, i64, i64, i64);
    let read = |row: &Row<'_>| -> rusqlite::Result<Tally> { row.try_into() };
    let now = tx.now()?;
    let (hours_from, hours_to) = (hour_of(now - 7 * DAY), minutes_fold_before(now));

    let mut rows = tx.rows(OLD, params![hours_from, step], read)?;
    let room = i64::from(step) - rows.len() as i64;
    rows.extend(tx.rows(MINUTES, params![hours_from.max(1), hours_to, HOUR, room], read)?);
    for (minute, queue, kind, outcome, bucket, ended, kept) in &rows {
        tx.execute(TAKE, params![minute, queue, kind, outcome, bucket])?;
        if *minute < hours_from {
            add_tally(tx, params![0, queue, kind, outcome, 0, 0, kept])?;
        } else {
            add_tally(tx, params![hour_of(*minute), queue, kind, outcome, bucket, ended, kept])?;
        }
    }
    tx.execute(EMPTY, [])?;
    Ok(rows.len() as u64)
}

/// Minutes before this instant are folded into hours.
pub(super) fn minutes_fold_before(now: i64) -> i64 {
    hour_of(now - 2 * HOUR)
}

fn hour_of(at: i64) -> i64 {
    at - at.rem_euclid(HOUR)
}
