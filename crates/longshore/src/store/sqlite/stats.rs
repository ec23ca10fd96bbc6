//! Statistics: jobs per status, the age of the oldest due jobs, jobs ahead of a job, and
//! jobs that ended per minute.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use rusqlite::params;

use super::retain::minutes_fold_before;
use super::tx::{Columns, Sql, Tx, json_list};
use crate::job::{JobId, Outcome, Status};
use crate::store::{Ahead, Count, Tallied, Tally, add_up, start_of};

/// The maximum number of waiting jobs that are counted one by one. Above it, the numbers
/// are estimated.
const MAX_COUNTED: u32 = 50_000;

pub(super) fn counts(tx: &Tx<'_>) -> Sql<Vec<Count>> {
    const RUNNING: &str = "
        select queue,
               kind,
               count(*)
          from running
         group by queue, kind";
    // Summed here: `group by` would sort all rows to compute a few sums.
    const FINISHED: &str = "
        select queue,
               kind,
               outcome,
               kept
          from tallies";
    let mut counts = waiting(tx, MAX_COUNTED)?;
    counts.extend(tx.rows(RUNNING, [], |row| {
        Ok(Count {
            status: Status::Running,
            queue: row.get(0)?,
            kind: row.get(1)?,
            jobs: row.get::<_, u32>(2)?.into(),
            estimated: false,
        })
    })?);
    let mut finished = HashMap::<(String, String, Outcome), i64>::new();
    let mut statement = tx.prepare(FINISHED)?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let group = (row.get(0)?, row.get(1)?, row.outcome(2)?);
        *finished.entry(group).or_default() += row.get::<_, i64>(3)?;
    }
    for ((queue, kind, outcome), kept) in finished {
        if let Ok(jobs @ 1..) = u64::try_from(kept) {
            counts.push(Count { status: outcome.status(), queue, kind, jobs, estimated: false });
        }
    }
    counts.sort_by(|a, b| (&a.queue, &a.kind, a.status).cmp(&(&b.queue, &b.kind, b.status)));
    Ok(counts)
}

/// The waiting jobs per queue, kind and status: counted up to `limit`, above it estimated
/// from the oldest and the newest jobs. Their total is exact either way, because SQLite
/// counts rows without reading them.
pub(super) fn waiting(tx: &Tx<'_>, limit: u32) -> Sql<Vec<Count>> {
    const ALL: &str = "
        select count(*)
          from ready";
    const OLDEST: &str = "
        select queue,
               kind,
               attempt = 0 and interruptions = 0
          from ready
         order by id
         limit ?1";
    const NEWEST: &str = "
        select queue,
               kind,
               attempt = 0 and interruptions = 0
          from ready
         order by id desc
         limit ?1";
    let total: u32 = tx.row(ALL, [], |row| row.get(0))?.unwrap_or(0);
    let estimated = total > limit;
    let samples: &[(&str, u32)] =
        if estimated { &[(OLDEST, limit / 2), (NEWEST, limit / 2)] } else { &[(OLDEST, limit)] };
    let mut counted = HashMap::<(String, String, bool), u64>::new();
    for (sample, size) in samples {
        let mut statement = tx.prepare(sample)?;
        let mut rows = statement.query([size])?;
        while let Some(row) = rows.next()? {
            *counted.entry((row.get(0)?, row.get(1)?, row.get(2)?)).or_default() += 1;
        }
    }
    let sampled: u64 = counted.values().sum();
    let count = |((queue, kind, is_fresh), jobs): (_, u64)| Count {
        status: if is_fresh { Status::Queued } else { Status::Retrying },
        queue,
        kind,
        jobs: jobs * u64::from(total) / sampled,
        estimated,
    };
    Ok(counted.into_iter().map(count).collect())
}

/// Finds each (queue, priority) with waiting jobs, as claims do, and the first job of
/// each. Costs one index probe per (queue, priority).
pub(super) fn overdue(tx: &Tx<'_>) -> Sql<Vec<(String, Duration)>> {
    const OVERDUE: &str = "
        with recursive waiting_queues as (
          select min(queue) as queue
            from ready indexed by ready_claim
           where interruptions = 0
          union all
          select (
                   select min(r.queue)
                     from ready r indexed by ready_claim
                    where r.interruptions = 0
                      and r.queue > w.queue)
            from waiting_queues w
           where w.queue is not null),
        priorities as (
          select w.queue, (
                   select max(r.priority)
                     from ready r indexed by ready_claim
                    where r.queue = w.queue
                      and r.interruptions = 0) as priority
            from waiting_queues w
           where w.queue is not null
          union all
          select p.queue, (
                   select max(r.priority)
                     from ready r indexed by ready_claim
                    where r.queue = p.queue
                      and r.interruptions = 0
                      and r.priority < p.priority)
            from priorities p
           where p.priority is not null),
        first_jobs as (
          select p.queue, (
                   select min(r.run_at)
                     from ready r indexed by ready_claim
                    where r.queue = p.queue
                      and r.priority = p.priority
                      and r.interruptions = 0) as run_at
            from priorities p
           where p.priority is not null)
        select queue,
               ?1 - min(run_at)
          from first_jobs
         where run_at <= ?1
         group by queue
         order by queue";
    tx.rows(OVERDUE, [tx.now()?], |row| {
        Ok((row.get(0)?, Duration::from_micros(row.get::<_, i64>(1)?.unsigned_abs())))
    })
}

/// Reads the jobs that come before this one in claim order. Suspects have an index of
/// their own, so there are four parts, each read from the head of its index. All parts
/// together read at most `limit` entries, including jobs that do not count.
pub(super) fn ahead(tx: &Tx<'_>, id: JobId, kinds: Option<&[String]>, limit: u32) -> Sql<Option<Ahead>> {
    const WAITING: &str = "
        select queue,
               priority,
               run_at
          from ready
         where id = ?1";
    const AHEAD: &str = "
        select count(*) filter (
                 where (?6 is null or kind in (select value from json_each(?6)))
                   and run_at <= max(?7, ?3)),
               count(*)
          from (select kind, run_at
                  from ready indexed by ready_claim
                 where queue = ?1
                   and priority > ?2
                   and interruptions = 0
                union all
                select kind, run_at
                  from ready indexed by ready_claim
                 where queue = ?1
                   and priority = ?2
                   and (run_at, id) < (?3, ?4)
                   and interruptions = 0
                union all
                select kind, run_at
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and priority > ?2
                   and interruptions > 0
                union all
                select kind, run_at
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and priority = ?2
                   and (run_at, id) < (?3, ?4)
                   and interruptions > 0
                 limit ?5)";
    let id = id.0.as_bytes();
    let waiting = tx.row(WAITING, [id], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, i16>(1)?, row.get::<_, i64>(2)?))
    })?;
    let Some((queue, priority, run_at)) = waiting else { return Ok(None) };
    let kinds = kinds.map(json_list).transpose()?;
    tx.row(AHEAD, params![queue, priority, run_at, id, limit, kinds, tx.now()?], |row| {
        Ok(Ahead { jobs: row.get(0)?, or_more: row.get::<_, u32>(1)? == limit })
    })
}

pub(super) fn tallied(tx: &Tx<'_>, since: DateTime<Utc>) -> Sql<Vec<Tallied>> {
    // A row at a full hour may be that minute or the whole hour. It is the whole hour only
    // if it is old enough for its minutes to be folded.
    const ENDED: &str = "
        select minute,
               queue,
               kind,
               outcome,
               run_bucket,
               ended
          from tallies
         where ended > 0
           and (minute >= ?1 or (minute = ?2 and minute < ?3))";
    let params = params![
        start_of(60, since).timestamp_micros(),
        start_of(60 * 60, since).timestamp_micros(),
        minutes_fold_before(tx.now()?),
    ];
    let tallies = tx.rows(ENDED, params, |row| {
        Ok(Tally {
            minute: row.time(0)?,
            queue: row.get(1)?,
            kind: row.get(2)?,
            outcome: row.outcome(3)?,
            run_bucket: row.get(4)?,
            ended: row.get(5)?,
        })
    })?;
    Ok(add_up(tallies))
}
