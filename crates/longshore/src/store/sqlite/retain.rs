//! Retention: removing finished jobs whose time has passed, and folding tallies.
//! Both walk in bounded steps by key.

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
    let horizon = Horizon::of(policy, clock);
    let mut cursor = read_cursor(tx, "retain")?;
    let mut left = step.max(1);
    let mut removed = 0;
    loop {
        let rows = tx.rows(NEXT, params![cursor, left], |row| {
            Ok((row.job(0)?, row.outcome(1)?, row.get::<_, i64>(2)?))
        })?;
        let at_end = rows.len() < left as usize;
        left -= rows.len() as u32;
        let mut leap = None;
        for (id, outcome, finished_at) in rows {
            leap = horizon.as_ref().and_then(|horizon| horizon.leap_from(id));
            if leap.is_some() {
                break;
            }
            cursor = id.0.as_bytes().to_vec();
            let is_past = |kept: Duration| finished_at < clock.now.saturating_sub(micros(kept));
            if policy.of(outcome).is_some_and(is_past) {
                remove(tx, id, outcome)?;
                removed += 1;
            }
        }
        let done = leap.is_none() && at_end;
        if let Some(leap) = leap {
            cursor = leap;
        }
        if done || left == 0 {
            write_cursor(tx, "retain", if done { &[] } else { &cursor })?;
            return Ok(Retained { removed, done });
        }
    }
}

/// Ids begin with the time they were made, so most of what is within every
/// kept age can be leapt over unread. A day of margin is left on both sides for
/// enqueuers whose clocks are off; a pinned clock has nothing to do with ids.
struct Horizon {
    young_ms: i64,
    future_ms: i64,
}

impl Horizon {
    fn of(policy: &Retention, clock: Clock) -> Option<Self> {
        let shortest = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min();
        let shortest = shortest.map_or(i64::MAX, micros);
        (!clock.pinned).then(|| Horizon {
            young_ms: clock.now.saturating_sub(shortest).saturating_add(DAY) / 1000,
            future_ms: (clock.now + DAY) / 1000,
        })
    }

    /// Where to go on if this id is young enough to leap.
    fn leap_from(&self, id: JobId) -> Option<Vec<u8>> {
        let (seconds, nanos) = id.0.get_timestamp().filter(|_| id.0.get_version_num() == 7)?.to_unix();
        let made_ms = i64::try_from(seconds).ok()? * 1000 + i64::from(nanos / 1_000_000);
        (self.young_ms < made_ms && made_ms < self.future_ms)
            .then(|| self.future_ms.to_be_bytes()[2..].to_vec())
    }
}

fn remove(tx: &Tx<'_>, id: JobId, outcome: Outcome) -> Sql<()> {
    const FINISHED: &str = "
        delete from finished
         where id = ?1";
    tx.execute(FINISHED, [id.0.as_bytes()])?;
    forget(tx, id, outcome)
}

/// Removes what is left of a job that is no longer in `finished`.
pub(super) fn forget(tx: &Tx<'_>, id: JobId, outcome: Outcome) -> Sql<()> {
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
    let id = id.0.as_bytes();
    let was = tx.row(JOB, [id], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)))?;
    tx.execute(ATTEMPTS, [id])?;
    tx.execute(CHECKPOINT, [id])?;
    match was {
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

/// After two hours minutes fold into their hour; after seven days everything
/// folds into one row per queue, kind and outcome, which says how many of those
/// jobs are kept.
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

/// Minutes before this instant are added up to hours.
pub(super) fn minutes_fold_before(now: i64) -> i64 {
    hour_of(now - 2 * HOUR)
}

fn hour_of(at: i64) -> i64 {
    at - at.rem_euclid(HOUR)
}
