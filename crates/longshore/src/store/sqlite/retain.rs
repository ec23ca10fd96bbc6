//! Retention: removing finished jobs whose retention has passed, and folding tallies.
//! Both work in bounded steps.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Row, params};

use super::SqliteStore;
use super::flow_changes::delete_links;
use super::settle::{add_tally, tally};
use super::steps::delete_progress;
use super::tx::{Columns, DAY, HOUR, Sql, Tx, in_order, micros};
use crate::error::Result;
use crate::job::{JobId, Outcome};
use crate::store::{Retained, Retaining, Retention};

/// The rows of `jobs` in one row of `finished_ranges`. Rows that are stored already depend on
/// this number.
const ROWS_PER_RANGE: i64 = 1000;
/// A step reads no further range when it has read this many.
const MAX_RANGES: usize = 16;
/// A step adds at most this many ranges.
const MAX_ADDED: u64 = 1000;

#[async_trait]
impl Retaining for SqliteStore {
    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        let policy = *policy;
        self.engine.write(move |tx| retain(tx, &policy, step)).await
    }

    async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.engine.write(move |tx| fold_tallies(tx, step)).await
    }
}

fn retain(tx: &Tx<'_>, policy: &Retention, step: u32) -> Sql<Retained> {
    let step = u64::from(step.max(1));
    let mut retained = Retained { removed: 0, examined: 0, done: true };
    let Some(shortest) = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min() else {
        return Ok(retained);
    };
    let mut read = HashSet::new();
    'step: loop {
        let due = due_ranges(tx, policy, shortest)?;
        let next: Vec<i64> = due.into_iter().filter(|first_row| !read.contains(first_row)).collect();
        if next.is_empty() && add_ranges(tx)? == 0 {
            break;
        }
        for first_row in next {
            let limit = step - retained.removed;
            let (removed, examined) = retain_range(tx, first_row, limit, policy)?;
            retained.removed += removed;
            retained.examined += examined;
            read.insert(first_row);
            if retained.removed == step || read.len() == MAX_RANGES {
                retained.done = false;
                break 'step;
            }
        }
    }
    Ok(retained)
}

/// The ranges in which a job may have expired. A job that ended after the range was read
/// cannot have expired before the shortest retention time has passed.
fn due_ranges(tx: &Tx<'_>, policy: &Retention, shortest: Duration) -> Sql<Vec<i64>> {
    const DUE: &str = "
        select first_row
          from finished_ranges
         where read_at > ?1   -- the clock was set back
            or read_at < ?2
            or succeeded < ?3
            or cancelled < ?4
            or failed_permanent < ?5
         order by read_at, first_row
         limit ?6";
    let now = tx.now()?;
    let before = |time| now.saturating_sub(micros(time));
    let params = params![
        now,
        before(shortest),
        policy.succeeded.map(before),
        policy.cancelled.map(before),
        policy.failed_permanent.map(before),
        MAX_RANGES as i64 + 1,
    ];
    tx.rows(DUE, params, |row| row.get("first_row"))
}

/// Adds the ranges by which the table has grown. What is in them ended after the last look,
/// so they need not be read now. Also adds those that were forgotten and have jobs again:
/// when the newest jobs are deleted, SQLite uses their row numbers and the ones before them
/// again. Nothing is known about these ranges.
fn add_ranges(tx: &Tx<'_>) -> Sql<u64> {
    const GAPS: &str = "
        select coalesce((
                 select max(b.first_row) + ?1
                   from finished_ranges b
                  where b.first_row < a.first_row), 0) as gap_start,
               a.first_row as gap_end
          from finished_ranges a
         where a.first_row > 0
           and not exists (
                 select 1
                   from finished_ranges b
                  where b.first_row = a.first_row - ?1)";
    const LAST: &str = "
        select max(first_row)
          from finished_ranges";
    const LOOKED_AT: &str = "
        select looked_at
          from upkeep
         where name = 'retain'";
    const LOOKED: &str = "
        update upkeep
           set looked_at = ?1
         where name = 'retain'";
    let mut added = 0;
    for (from, to) in
        tx.rows(GAPS, [ROWS_PER_RANGE], |row| Ok((row.get("gap_start")?, row.get("gap_end")?)))?
    {
        added += add_ranges_between(tx, from, to, 0, MAX_ADDED - added)?;
    }
    let last = tx.value::<Option<i64>>(LAST, [])?.flatten();
    let looked_at = tx.value::<Option<i64>>(LOOKED_AT, [])?.flatten();
    let from = last.map_or(0, |last| last + ROWS_PER_RANGE);
    added += add_ranges_between(tx, from, i64::MAX, looked_at.unwrap_or(0), MAX_ADDED - added)?;
    if added < MAX_ADDED {
        tx.execute(LOOKED, [tx.now()?])?;
    }
    Ok(added)
}

/// Adds the ranges from row `from` up to row `to` that have jobs, at most `limit`. Returns
/// how many.
fn add_ranges_between(tx: &Tx<'_>, mut from: i64, to: i64, read_at: i64, limit: u64) -> Sql<u64> {
    const NEXT_JOB: &str = "
        select min(rowid)
          from jobs
         where rowid >= ?1
           and rowid < ?2";
    const ADD: &str = "
        insert into finished_ranges (first_row, read_at)
        values (?1, ?2)";
    for added in 0..limit {
        let next = tx.value::<Option<i64>>(NEXT_JOB, [from, to])?.flatten();
        let Some(next) = next else { return Ok(added) };
        let first_row = next - next.rem_euclid(ROWS_PER_RANGE);
        tx.execute(ADD, [first_row, read_at])?;
        from = first_row + ROWS_PER_RANGE;
    }
    Ok(limit)
}

/// Removes expired jobs of one range; returns how many it removed and examined.
fn retain_range(tx: &Tx<'_>, first_row: i64, limit: u64, policy: &Retention) -> Sql<(u64, u64)> {
    const FINISHED: &str = "
        select f.id,
               f.outcome,
               f.finished_at,
               f.flow,
               f.skipped
          from jobs j
         cross join finished f on f.id = j.id
         where j.rowid >= ?1
           and j.rowid < ?2";
    const DELETE: &str = "
        delete from finished
         where id = ?1";
    const HAS_JOBS: &str = "
        select 1
          from jobs
         where rowid >= ?1
           and rowid < ?2
         limit 1";
    const STORE: &str = "
        update finished_ranges
           set read_at = ?2,
               succeeded = ?3,
               cancelled = ?4,
               failed_permanent = ?5
         where first_row = ?1";
    const FORGET: &str = "
        delete from finished_ranges
         where first_row = ?1";
    let now = tx.now()?;
    let end = first_row + ROWS_PER_RANGE;
    let rows = tx.rows(FINISHED, [first_row, end], |row| {
        let is_skipped = row.get::<_, Option<bool>>("skipped")?.unwrap_or(false);
        let is_of_flow = is_skipped || row.flow("flow")?.is_some();
        Ok((row.job("id")?, row.outcome("outcome")?, row.get::<_, i64>("finished_at")?, is_of_flow))
    })?;
    let examined = rows.len() as u64;
    let mut removed = 0;
    let mut kept = HashMap::<Outcome, i64>::new();
    let mut tallies = HashMap::<(String, String, Outcome), i64>::new();
    let mut is_complete = true;
    let is_expired =
        |since: i64, outcome| policy.of(outcome).is_some_and(|time| since < now.saturating_sub(micros(time)));
    // Decide about all jobs before one is removed, as Postgres does: a job may be kept for another one.
    let decided = rows.into_iter().map(|(id, outcome, finished_at, is_of_flow)| {
        let keeps = if !is_expired(finished_at, outcome) {
            Some((outcome, finished_at))
        } else if is_of_flow {
            kept_by_flow(tx, id, outcome, policy)?
        } else {
            None
        };
        Ok((id, outcome, keeps))
    });
    for (id, outcome, keeps) in decided.collect::<Sql<Vec<_>>>()? {
        if let Some((outcome, since)) = keeps {
            let oldest = kept.entry(outcome).or_insert(since);
            *oldest = since.min(*oldest);
        } else if removed < limit {
            tx.execute(DELETE, [id.0.as_bytes()])?;
            if let Some((queue, kind)) = delete_rows(tx, id)? {
                *tallies.entry((queue, kind, outcome)).or_default() += 1;
            }
            removed += 1;
        } else {
            is_complete = false;
            break;
        }
    }
    for ((queue, kind, outcome), jobs) in tallies {
        tally(tx, &queue, &kind, outcome, 0, 0, -jobs)?;
    }
    if !is_complete {
        return Ok((removed, examined));
    }
    if tx.row(HAS_JOBS, [first_row, end], |_| Ok(()))?.is_none() {
        tx.execute(FORGET, [first_row])?;
    } else {
        let [succeeded, cancelled, failed_permanent] =
            [Outcome::Succeeded, Outcome::Cancelled, Outcome::FailedPermanent]
                .map(|outcome| kept.get(&outcome));
        tx.execute(STORE, params![first_row, now, succeeded, cancelled, failed_permanent])?;
    }
    Ok((removed, examined))
}

/// For a member of a flow, or a skipped callback, that stays although its own retention has passed: the
/// outcome and the time by which its retention counts instead. It stays while its flow is open, because
/// others may need its result; while the parent job of a flow of children is kept, because it may join them;
/// and, if it has links, for the retention of the ended flow, because the failed part may be retried.
fn kept_by_flow(tx: &Tx<'_>, id: JobId, outcome: Outcome, policy: &Retention) -> Sql<Option<(Outcome, i64)>> {
    const FLOW: &str = "
        select w.ended_at,
               w.failed,
               w.cancelled,
               w.owned
                 and exists (select 1 from jobs j where j.id = w.id) as is_joined,
               exists (select 1 from links l where l.child = ?1)
                 or exists (select 1 from links l where l.parent = ?1) as is_linked
          from flows w
         where w.id = coalesce((select j.flow from jobs j where j.id = ?1),
                               (select l.parent from links l where l.child = ?1 limit 1))";
    let found = tx.row(FLOW, [id.0.as_bytes()], |row| {
        let outcome = match (row.get::<_, i64>("failed")?, row.get::<_, bool>("cancelled")?) {
            (1.., _) => Outcome::FailedPermanent,
            (_, true) => Outcome::Cancelled,
            _ => Outcome::Succeeded,
        };
        let ended_at = row.get::<_, Option<i64>>("ended_at")?.filter(|_| row.get("is_joined") == Ok(false));
        Ok((ended_at, outcome, row.get::<_, bool>("is_linked")?))
    })?;
    let now = tx.now()?;
    let before = |outcome| policy.of(outcome).map(|time| now.saturating_sub(micros(time)));
    Ok(match found {
        // Look again in an hour.
        Some((None, ..)) => Some((outcome, before(outcome).unwrap_or(now).saturating_add(HOUR))),
        Some((Some(ended_at), outcome, true)) => match before(outcome) {
            Some(oldest) if ended_at < oldest => None,
            _ => Some((outcome, ended_at)),
        },
        _ => None,
    })
}

/// Deletes everything about a job that is no longer in `finished`, and updates the tallies.
pub(super) fn delete_request(tx: &Tx<'_>, id: JobId, outcome: Outcome) -> Sql<()> {
    match delete_rows(tx, id)? {
        Some((queue, kind)) => tally(tx, &queue, &kind, outcome, 0, 0, -1),
        None => Ok(()),
    }
}

/// Deletes the request, the history, the checkpoint, the merged requests and the links of a job;
/// returns its queue and kind.
pub(super) fn delete_rows(tx: &Tx<'_>, id: JobId) -> Sql<Option<(String, String)>> {
    const JOB: &str = "
        delete from jobs
         where id = ?1
        returning queue, kind, flow is not null as is_member";
    const ATTEMPTS: &str = "
        delete from attempts
         where job = ?1";
    const REQUESTS: &str = "
        delete from merged_requests
         where job = ?1";
    delete_progress(tx, id)?;
    let deleted = tx.row(JOB, [id.0.as_bytes()], |row| {
        Ok((row.get("queue")?, row.get("kind")?, row.get::<_, bool>("is_member")?))
    })?;
    tx.execute(ATTEMPTS, [id.0.as_bytes()])?;
    tx.execute(REQUESTS, [id.0.as_bytes()])?;
    if deleted.as_ref().is_some_and(|(.., is_member)| *is_member) {
        delete_links(tx, id)?;
    }
    Ok(deleted.map(|(queue, kind, _)| (queue, kind)))
}

/// Minutes more than two hours ago become hours; hours more than a week ago become one
/// row per queue, kind and outcome with the number of jobs kept.
fn fold_tallies(tx: &Tx<'_>, step: u32) -> Sql<u64> {
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
    struct Tally {
        minute: i64,
        queue: String,
        kind: String,
        outcome: String,
        run_bucket: i64,
        ended: i64,
        kept: i64,
    }
    let read =
        |row: &Row<'_>| in_order!(row, Tally { minute, queue, kind, outcome, run_bucket, ended, kept });
    let now = tx.now()?;
    let (hours_from, hours_to) = (hour_of(now - 7 * DAY), minutes_fold_before(now));

    let mut rows = tx.rows(OLD, params![hours_from, step], read)?;
    let room = i64::from(step) - rows.len() as i64;
    rows.extend(tx.rows(MINUTES, params![hours_from.max(1), hours_to, HOUR, room], read)?);
    for Tally { minute, queue, kind, outcome, run_bucket, ended, kept } in &rows {
        tx.execute(TAKE, params![minute, queue, kind, outcome, run_bucket])?;
        if *minute < hours_from {
            add_tally(tx, params![0, queue, kind, outcome, 0, 0, kept])?;
        } else {
            add_tally(tx, params![hour_of(*minute), queue, kind, outcome, run_bucket, ended, kept])?;
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
