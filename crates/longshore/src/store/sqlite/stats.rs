//! Statistics: jobs per status, the age of the oldest due jobs, jobs ahead of a job, and
//! jobs that ended per minute.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{OptionalExtension, Row, params};

use super::SqliteStore;
use super::queues::waiting_queues;
use super::retain::minutes_fold_before;
use super::tx::{Columns, Sql, Tx, json_list};
use crate::error::Result;
use crate::job::{JobId, Outcome, Status};
use crate::store::{Ahead, Count, HistoryFilter, Stats, Tallied, Tally, add_up, in_order, start_of};

/// The maximum number of waiting jobs that are counted without looking at their queues.
const MAX_COUNTED: u64 = 50_000;

#[async_trait]
impl Stats for SqliteStore {
    async fn counts(&self) -> Result<Vec<Count>> {
        self.engine.read(counts).await
    }

    async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.engine.read(overdue).await
    }

    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, limit: u32) -> Result<Option<Ahead>> {
        let kinds = kinds.map(<[_]>::to_vec);
        self.engine.read(move |tx| ahead(tx, id, kinds.as_deref(), limit)).await
    }

    async fn tallied(&self, filter: &HistoryFilter) -> Result<Vec<Tallied>> {
        let filter = filter.clone();
        self.engine.read(move |tx| tallied(tx, &filter)).await
    }
}

fn counts(tx: &Tx<'_>) -> Sql<Vec<Count>> {
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
    let mut counts = waiting(tx)?;
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
    Ok(in_order(counts))
}

/// The waiting jobs per queue, kind and status. All are counted if there are not many.
/// Otherwise the jobs of queues with few jobs are counted, and the others are estimated from
/// a sample. The total is exact either way, because SQLite counts rows without reading them.
pub(super) fn waiting(tx: &Tx<'_>) -> Sql<Vec<Count>> {
    const TOTAL: &str = "
        select count(*)
          from ready";
    const ALL: &str = "
        select queue,
               kind,
               attempt = 0 and interruptions = 0
          from ready";
    const OF_QUEUE: &str = "
        select queue,
               kind,
               attempt = 0 and interruptions = 0
          from (select queue, kind, attempt, interruptions
                  from ready indexed by ready_claim
                 where queue = ?1
                   and interruptions = 0
                   and grp is null
                union all
                select queue, kind, attempt, interruptions
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and interruptions > 0
                   and grp is null
                union all
                select queue, kind, attempt, interruptions
                  from ready indexed by ready_groups
                 where queue = ?1
                   and grp is not null)
         limit ?2";
    let grouped = |text: &str, params: &[&dyn rusqlite::ToSql]| -> Sql<Groups> {
        // There are many rows and few groups, so names are copied only for a new group.
        let mut queues = BTreeMap::<String, BTreeMap<String, [u64; 2]>>::new();
        let mut statement = tx.prepare(text)?;
        let mut rows = statement.query(params)?;
        while let Some(row) = rows.next()? {
            let (queue, kind) = (row.get_ref(0)?.as_str()?, row.get_ref(1)?.as_str()?);
            let is_fresh = usize::from(row.get::<_, bool>(2)?);
            match queues.get_mut(queue).and_then(|kinds| kinds.get_mut(kind)) {
                Some(jobs) => jobs[is_fresh] += 1,
                None => {
                    queues.entry(queue.into()).or_default().entry(kind.into()).or_default()[is_fresh] += 1
                }
            }
        }
        let mut groups = Groups::new();
        for (queue, kinds) in queues {
            for (kind, [tried, fresh]) in kinds {
                for (is_fresh, jobs) in
                    [(false, tried), (true, fresh)].into_iter().filter(|(_, jobs)| *jobs > 0)
                {
                    groups.insert((queue.clone(), kind.clone(), is_fresh), jobs);
                }
            }
        }
        Ok(groups)
    };
    let total = tx.row(TOTAL, [], |row| row.get::<_, i64>(0))?.unwrap_or(0).unsigned_abs();
    if total <= MAX_COUNTED {
        let groups = grouped(ALL, &[])?;
        return Ok(groups.into_iter().map(|group| waiting_count(group, false)).collect());
    }
    let mut sampled = sample(tx)?;
    let scale = total as f64 / sampled.values().sum::<u64>().max(1) as f64;
    let of_queue = |queue: &str| -> u64 {
        sampled.iter().filter(|((other, ..), _)| other == queue).map(|(_, jobs)| *jobs).sum()
    };
    let queues = waiting_queues(tx)?;
    let bound = (100_000 / queues.len().max(1)).clamp(1_000, 10_000) as u64;
    let (mut counts, mut counted, mut large) = (Vec::new(), 0, BTreeSet::new());
    for queue in queues {
        let in_sample = of_queue(&queue);
        if is_surely_above(bound, in_sample, scale) {
            large.insert(queue);
            continue;
        }
        let groups = grouped(OF_QUEUE, &[&queue, &(bound as i64 + 1)])?;
        let jobs: u64 = groups.values().sum();
        if jobs > bound && in_sample > 0 {
            large.insert(queue);
        } else {
            counted += jobs;
            counts.extend(groups.into_iter().map(|group| waiting_count(group, jobs > bound)));
        }
    }
    sampled.retain(|(queue, ..), _| large.contains(queue));
    let rest = total.saturating_sub(counted);
    counts.extend(scaled(sampled, rest).into_iter().map(|group| waiting_count(group, true)));
    Ok(counts)
}

/// Whether a queue has more jobs than `bound`, as far as a sample can tell: its estimate, less
/// three standard errors, is above the bound. Then counting the jobs would be in vain.
fn is_surely_above(bound: u64, in_sample: u64, scale: f64) -> bool {
    let error = 3.0 / (in_sample as f64).sqrt();
    in_sample as f64 * scale * (1.0 - error) > bound as f64
}

/// Numbers of waiting jobs by queue, kind, and whether they have not been tried yet.
type Groups = BTreeMap<(String, String, bool), u64>;

/// How many jobs are read for an estimate.
const SAMPLED_JOBS: u64 = 4_000;

/// Reads jobs at about equal distances in the order of their arrival, from the oldest
/// waiting one on, and counts those that wait. The distances vary, because producers may
/// take turns.
fn sample(tx: &Tx<'_>) -> Sql<Groups> {
    const RANGE: &str = "
        select coalesce(
                 (select rowid from jobs where id = (select min(id) from ready)),
                 (select min(rowid) from jobs),
                 0),
               coalesce((select max(rowid) from jobs), -1)";
    const AT: &str = "
        select w.queue,
               w.kind,
               w.attempt = 0 and w.interruptions = 0
          from jobs j
         cross join ready w on w.id = j.id
         where j.rowid = ?1";
    let (first, last) =
        tx.row(RANGE, [], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)))?.unwrap_or((0, -1));
    let distance = ((last - first + 1) / SAMPLED_JOBS as i64).max(1);
    let mut groups = Groups::new();
    let mut statement = tx.prepare(AT)?;
    for start in (first..=last).step_by(distance as usize) {
        // A number that looks random and is the same for the same table.
        let offset = (start as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
        let rowid = start + (offset % distance as u64) as i64;
        let group = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?));
        if let Some(group) = statement.query_row([rowid], group).optional()? {
            *groups.entry(group).or_default() += 1;
        }
    }
    Ok(groups)
}

/// Scales the numbers of a sample to this total.
fn scaled(mut sampled: Groups, total: u64) -> Groups {
    let jobs = sampled.values().sum::<u64>().max(1);
    let mut rest = total;
    for number in sampled.values_mut() {
        *number = (u128::from(*number) * u128::from(total) / u128::from(jobs)) as u64;
        rest -= *number;
    }
    if let Some(largest) = sampled.values_mut().max() {
        *largest += rest;
    }
    sampled
}

fn waiting_count(((queue, kind, is_fresh), jobs): ((String, String, bool), u64), estimated: bool) -> Count {
    let status = if is_fresh { Status::Queued } else { Status::Retrying };
    Count { status, queue, kind, jobs, estimated }
}

/// Finds each (queue, priority) with waiting jobs, as claims do, and the first job of
/// each. Costs one index probe per (queue, priority) and per (group, priority). Looks at
/// 10,000 groups at most.
fn overdue(tx: &Tx<'_>) -> Sql<Vec<(String, Duration)>> {
    const OVERDUE: &str = "
        with recursive waiting_queues as (
          select min(queue) as queue
            from ready indexed by ready_claim
           where interruptions = 0
             and grp is null
          union all
          select (
                   select min(r.queue)
                     from ready r indexed by ready_claim
                    where r.interruptions = 0
                      and r.grp is null
                      and r.queue > w.queue)
            from waiting_queues w
           where w.queue is not null),
        priorities as (
          select w.queue, (
                   select max(r.priority)
                     from ready r indexed by ready_claim
                    where r.queue = w.queue
                      and r.interruptions = 0
                      and r.grp is null) as priority
            from waiting_queues w
           where w.queue is not null
          union all
          select p.queue, (
                   select max(r.priority)
                     from ready r indexed by ready_claim
                    where r.queue = p.queue
                      and r.interruptions = 0
                      and r.grp is null
                      and r.priority < p.priority)
            from priorities p
           where p.priority is not null),
        grouped_queues as (
          select min(queue) as queue
            from ready indexed by ready_groups
           where grp is not null
          union all
          select (
                   select min(r.queue)
                     from ready r indexed by ready_groups
                    where r.grp is not null
                      and r.queue > w.queue)
            from grouped_queues w
           where w.queue is not null),
        waiting_groups as (
          select w.queue, '' as grp
            from grouped_queues w
           where w.queue is not null
          union all
          select g.queue, (
                   select min(r.grp)
                     from ready r indexed by ready_groups
                    where r.queue = g.queue
                      and r.grp > g.grp)
            from waiting_groups g
           where g.grp is not null),
        group_priorities as (
          select g.queue, g.grp, (
                   select max(r.priority)
                     from ready r indexed by ready_groups
                    where r.queue = g.queue
                      and r.grp = g.grp) as priority
            from (select * from waiting_groups limit 10000) as g
           where g.grp <> ''
          union all
          select p.queue, p.grp, (
                   select max(r.priority)
                     from ready r indexed by ready_groups
                    where r.queue = p.queue
                      and r.grp = p.grp
                      and r.priority < p.priority)
            from group_priorities p
           where p.priority is not null),
        first_jobs as (
          select p.queue, (
                   select min(r.run_at)
                     from ready r indexed by ready_claim
                    where r.queue = p.queue
                      and r.priority = p.priority
                      and r.interruptions = 0
                      and r.grp is null) as run_at
            from priorities p
           where p.priority is not null
          union all
          select p.queue, (
                   select min(r.run_at)
                     from ready r indexed by ready_groups
                    where r.queue = p.queue
                      and r.grp = p.grp
                      and r.priority = p.priority)
            from group_priorities p
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

/// Reads the jobs that come before this one in claim order; for a job with a group, those of its
/// group. Suspects have an index of their own, so there are four parts for jobs without a group,
/// each read from the head of its index. All parts
/// together read at most `limit` entries, including jobs that do not count.
fn ahead(tx: &Tx<'_>, id: JobId, kinds: Option<&[String]>, limit: u32) -> Sql<Option<Ahead>> {
    const WAITING: &str = "
        select queue,
               priority,
               run_at,
               grp
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
                   and grp is null
                union all
                select kind, run_at
                  from ready indexed by ready_claim
                 where queue = ?1
                   and priority = ?2
                   and (run_at, id) < (?3, ?4)
                   and interruptions = 0
                   and grp is null
                union all
                select kind, run_at
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and priority > ?2
                   and interruptions > 0
                   and grp is null
                union all
                select kind, run_at
                  from ready indexed by ready_suspects
                 where queue = ?1
                   and priority = ?2
                   and (run_at, id) < (?3, ?4)
                   and interruptions > 0
                   and grp is null
                 limit ?5)";
    const AHEAD_IN_GROUP: &str = "
        select count(*) filter (
                 where (?6 is null or kind in (select value from json_each(?6)))
                   and run_at <= max(?7, ?3)),
               count(*)
          from (select kind, run_at
                  from ready indexed by ready_groups
                 where queue = ?1
                   and grp = ?8
                   and priority > ?2
                union all
                select kind, run_at
                  from ready indexed by ready_groups
                 where queue = ?1
                   and grp = ?8
                   and priority = ?2
                   and (run_at, id) < (?3, ?4)
                 limit ?5)";
    let id = id.0.as_bytes();
    let waiting = tx.row(WAITING, [id], |row| {
        Ok((
            row.get::<_, String>(0)?,
            row.get::<_, i16>(1)?,
            row.get::<_, i64>(2)?,
            row.get::<_, Option<String>>(3)?,
        ))
    })?;
    let Some((queue, priority, run_at, group)) = waiting else { return Ok(None) };
    let (kinds, now) = (kinds.map(json_list).transpose()?, tx.now()?);
    let read = |row: &Row<'_>| Ok(Ahead { jobs: row.get(0)?, or_more: row.get::<_, u32>(1)? == limit });
    match group {
        Some(group) => {
            tx.row(AHEAD_IN_GROUP, params![queue, priority, run_at, id, limit, kinds, now, group], read)
        }
        None => tx.row(AHEAD, params![queue, priority, run_at, id, limit, kinds, now], read),
    }
}

fn tallied(tx: &Tx<'_>, filter: &HistoryFilter) -> Sql<Vec<Tallied>> {
    // A row at a full hour may be that minute or the whole hour. It is the whole hour only
    // if it is old enough for its minutes to be folded.
    const ENDED: &str = "
        select minute,
               case when ?4 then queue else '' end,
               case when ?5 then kind else '' end,
               outcome,
               run_bucket,
               sum(ended)
          from tallies
         where ended > 0
           and (minute >= ?1 or (minute = ?2 and minute < ?3))
           and (?6 is null or queue in (select value from json_each(?6)))
         group by 1, 2, 3, 4, 5";
    let params = params![
        start_of(60, filter.since).timestamp_micros(),
        start_of(60 * 60, filter.since).timestamp_micros(),
        minutes_fold_before(tx.now()?),
        filter.detail.has_queues(),
        filter.detail.has_kinds(),
        filter.queues.as_deref().map(json_list).transpose()?,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_a_sample_are_scaled_to_the_exact_total() {
        let sampled =
            Groups::from([(("a".into(), "mail".into(), true), 3), (("b".into(), "mail".into(), false), 4)]);
        let scaled: Vec<u64> = scaled(sampled, 1_000).into_values().collect();
        assert_eq!(scaled, [428, 572]);
        assert_eq!(super::scaled(Groups::new(), 5), Groups::new());
    }
}
