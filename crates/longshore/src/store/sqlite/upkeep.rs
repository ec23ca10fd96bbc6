//! What keeps the queue in order: taking leases from the dead, schedules,
//! retention, tallies. Reads no payloads and works in bounded steps.

use rusqlite::params;

use super::enqueue::enqueue;
use super::settle::{By, add_tally, end_leases, tally};
use super::*;
use crate::enqueue::Options;
use crate::lifecycle::{Flags, Running};
use crate::retry::RetryPolicy;

const SECOND: i64 = 1_000_000;
const HOUR: i64 = 60 * 60 * SECOND;
const DAY: i64 = 24 * HOUR;

// ---- recovery ------------------------------------------------------------

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
    end_leases(tx, recoveries.iter().map(|(why, settlement)| (By::Sweeper(*why), settlement)))
}

// ---- schedules -----------------------------------------------------------

pub(super) fn put_schedule(tx: &Tx<'_>, schedule: &Schedule) -> Sql<Schedule> {
    const PUT: &str = "
        insert into schedules
               (name, expression, zone, missed, template, paused, next_at, last_at)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)
            on conflict (name) do update
           set expression = excluded.expression,
               zone = excluded.zone,
               missed = excluded.missed,
               template = excluded.template,
               next_at = case
                 when (expression, zone) = (excluded.expression, excluded.zone) then next_at
                 else excluded.next_at
               end
        returning name, expression, zone, missed, template, paused, next_at, last_at";
    let mut put = tx.prepare(PUT)?;
    let stored = put.query_row(
        params![
            schedule.name,
            schedule.expression,
            schedule.zone,
            schedule.missed,
            schedule.template,
            schedule.paused,
            schedule.next_at.timestamp_micros(),
            schedule.last_at.map(|at| at.timestamp_micros()),
        ],
        read_schedule,
    )?;
    Ok(stored)
}

pub(super) fn schedules(tx: &Tx<'_>) -> Sql<Vec<Schedule>> {
    const ALL: &str = "
        select name,
               expression,
               zone,
               missed,
               template,
               paused,
               next_at,
               last_at
          from schedules
         order by name";
    tx.rows(ALL, [], read_schedule)
}

pub(super) fn set_ticking(tx: &Tx<'_>, name: &str, ticking: Ticking) -> Sql<bool> {
    const SET: &str = "
        update schedules
           set paused = ?2
         where name = ?1";
    Ok(tx.execute(SET, params![name, ticking == Ticking::Held])? > 0)
}

pub(super) fn remove_schedule(tx: &Tx<'_>, name: &str) -> Sql<bool> {
    const REMOVE: &str = "
        delete from schedules
         where name = ?1";
    Ok(tx.execute(REMOVE, [name])? > 0)
}

pub(super) fn fire(
    tx: &Tx<'_>,
    seen: &Schedule,
    next: DateTime<Utc>,
    fired: Option<DateTime<Utc>>,
    jobs: &[ValidJob],
) -> Sql<Option<Vec<Enqueued>>> {
    // Compare and set: of all who saw this tick, one moves it. The rest of
    // what it was decided from is compared too, because a tick after an old
    // line would be none of the new one's.
    const MOVE_ON: &str = "
        update schedules
           set next_at = ?3,
               last_at = coalesce(?4, last_at)
         where name = ?1
           and next_at = ?2
           and expression = ?5
           and zone = ?6
           and missed = ?7
           and template = ?8
           and paused = 0";
    let moved = tx.execute(
        MOVE_ON,
        params![
            seen.name,
            seen.next_at.timestamp_micros(),
            next.timestamp_micros(),
            fired.map(|at| at.timestamp_micros()),
            seen.expression,
            seen.zone,
            seen.missed,
            seen.template,
        ],
    )?;
    match moved {
        0 => Ok(None),
        _ => enqueue(tx, jobs).map(Some),
    }
}

fn read_schedule(row: &Row<'_>) -> rusqlite::Result<Schedule> {
    Ok(Schedule {
        name: row.get(0)?,
        expression: row.get(1)?,
        zone: row.get(2)?,
        missed: row.get(3)?,
        template: row.get(4)?,
        paused: row.get(5)?,
        next_at: row.time(6)?,
        last_at: row.maybe_time(7)?,
    })
}

// ---- retain --------------------------------------------------------------

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
