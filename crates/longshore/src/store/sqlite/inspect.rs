//! Looking: workers, queues, counts, and the proof that all is in order. Each
//! function reads one snapshot.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use rusqlite::params;

use super::upkeep::minutes_fold_before;
use super::*;
use crate::job::Status;

/// How many waiting jobs are counted one by one; past that, estimated.
const COUNTED: u32 = 50_000;
/// How many problems of a kind `check` lists.
const PROBLEMS: u32 = 100;

pub(super) fn workers(tx: &Tx<'_>, threshold: Option<Duration>) -> Sql<Vec<WorkerRecord>> {
    const ALL: &str = "
        select id,
               name,
               queues,
               kinds,
               concurrency,
               stale_after_ms,
               started_at,
               heartbeat_at,
               dead_at,
               heartbeat_at < ?1 - coalesce(?2, stale_after_ms * 1000),
               coalesce(held.leases, 0)
          from workers
          left join (
               select worker,
                      count(*) as leases
                 from running
                group by worker) held
            on held.worker = workers.id
         order by started_at desc, id desc";
    tx.rows(ALL, params![tx.now()?, threshold.map(micros)], |row| {
        Ok(WorkerRecord {
            id: row.worker(0)?,
            name: row.get(1)?,
            queues: row.list(2)?,
            kinds: row.maybe_list(3)?,
            concurrency: row.get(4)?,
            stale_after: row.timeout(5)?.unwrap_or_default(),
            started_at: row.time(6)?,
            heartbeat_at: row.time(7)?,
            dead_at: row.maybe_time(8)?,
            stale: row.get(9)?,
            running: row.get::<_, u32>(10)?.into(),
        })
    })
}

pub(super) fn queues(tx: &Tx<'_>) -> Sql<Vec<QueueRecord>> {
    const SETTINGS: &str = "
        select name,
               paused,
               max_running
          from queues";
    const RUNNING: &str = "
        select queue,
               count(*)
          from running
         group by queue";
    let waiting = waiting(tx, COUNTED)?;
    let mut queues = BTreeMap::<String, QueueRecord>::new();
    fn entry<'q>(queues: &'q mut BTreeMap<String, QueueRecord>, name: &str) -> &'q mut QueueRecord {
        queues.entry(name.to_owned()).or_insert_with(|| QueueRecord::empty(name))
    }
    for (name, paused, limit) in
        tx.rows(SETTINGS, [], |row| Ok((row.get::<_, String>(0)?, row.get(1)?, row.get(2)?)))?
    {
        let queue = entry(&mut queues, &name);
        (queue.paused, queue.limit) = (paused, limit);
    }
    for (name, running) in
        tx.rows(RUNNING, [], |row| Ok((row.get::<_, String>(0)?, row.get::<_, u32>(1)?)))?
    {
        entry(&mut queues, &name).running = running.into();
    }
    for name in waiting_queues(tx)? {
        entry(&mut queues, &name);
    }
    for count in waiting {
        let queue = entry(&mut queues, &count.queue);
        queue.waiting += count.jobs;
        queue.waiting_estimated = count.estimated;
    }
    Ok(queues.into_values().collect())
}

/// The queues with waiting jobs, however many those are: one probe for each.
fn waiting_queues(tx: &Tx<'_>) -> Sql<BTreeSet<String>> {
    const NEXT: [&str; 2] = [
        "
        select queue
          from ready indexed by ready_claim
         where interruptions = 0
           and queue > ?1
         order by queue
         limit 1",
        "
        select queue
          from ready indexed by ready_suspects
         where interruptions > 0
           and queue > ?1
         order by queue
         limit 1",
    ];
    let mut queues = BTreeSet::new();
    for next in NEXT {
        let mut last = String::new();
        while let Some(queue) = tx.row(next, [&last], |row| row.get::<_, String>(0))? {
            queues.insert(queue.clone());
            last = queue;
        }
    }
    Ok(queues)
}

// ---- counts --------------------------------------------------------------

pub(super) fn counts(tx: &Tx<'_>) -> Sql<Vec<Count>> {
    const RUNNING: &str = "
        select queue,
               kind,
               count(*)
          from running
         group by queue, kind";
    // Added up here: `group by` would sort all rows to make a few sums of them.
    const FINISHED: &str = "
        select queue,
               kind,
               outcome,
               kept
          from tallies";
    let mut counts = waiting(tx, COUNTED)?;
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
        let of = (row.get(0)?, row.get(1)?, row.outcome(2)?);
        *finished.entry(of).or_default() += row.get::<_, i64>(3)?;
    }
    for ((queue, kind, outcome), kept) in finished {
        if let Ok(jobs @ 1..) = u64::try_from(kept) {
            counts.push(Count { status: outcome.status(), queue, kind, jobs, estimated: false });
        }
    }
    counts.sort_by(|a, b| (&a.queue, &a.kind, a.status).cmp(&(&b.queue, &b.kind, b.status)));
    Ok(counts)
}

/// What waits, by queue, kind and status: counted up to `most`, else estimated
/// from the oldest and the newest. How many wait in all is known either way,
/// because SQLite counts rows without reading them.
pub(super) fn waiting(tx: &Tx<'_>, most: u32) -> Sql<Vec<Count>> {
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
    let all: u32 = tx.row(ALL, [], |row| row.get(0))?.unwrap_or(0);
    let samples: &[(&str, u32)] = match all > most {
        true => &[(OLDEST, most / 2), (NEWEST, most / 2)],
        false => &[(OLDEST, most)],
    };
    let mut counted = HashMap::<(String, String, bool), u64>::new();
    for (sample, limit) in samples {
        let mut statement = tx.prepare(sample)?;
        let mut rows = statement.query([limit])?;
        while let Some(row) = rows.next()? {
            *counted.entry((row.get(0)?, row.get(1)?, row.get(2)?)).or_default() += 1;
        }
    }
    let sampled: u64 = counted.values().sum();
    let count = |((queue, kind, is_fresh), jobs): (_, u64)| Count {
        status: if is_fresh { Status::Queued } else { Status::Retrying },
        queue,
        kind,
        jobs: jobs * u64::from(all) / sampled,
        estimated: all > most,
    };
    Ok(counted.into_iter().map(count).collect())
}

// ---- ahead ---------------------------------------------------------------

/// Which (queue, priority) have waiting jobs, and the first of each: one index
/// probe a place, as claims discover them.
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
        places as (
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
            from places p
           where p.priority is not null),
        firsts as (
          select p.queue, (
                   select min(r.run_at)
                     from ready r indexed by ready_claim
                    where r.queue = p.queue
                      and r.priority = p.priority
                      and r.interruptions = 0) as run_at
            from places p
           where p.priority is not null)
        select queue,
               ?1 - min(run_at)
          from firsts
         where run_at <= ?1
         group by queue
         order by queue";
    tx.rows(OVERDUE, [tx.now()?], |row| {
        Ok((row.get(0)?, Duration::from_micros(row.get::<_, i64>(1)?.unsigned_abs())))
    })
}

/// In the order of a claim. Jobs that were interrupted before wait in an index of
/// their own; each index is read from its head, all together up to `most` entries:
/// those that do not count must cost no more than those that do.
pub(super) fn ahead(tx: &Tx<'_>, id: JobId, kinds: Option<&[String]>, most: u32) -> Sql<Option<Ahead>> {
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
    tx.row(AHEAD, params![queue, priority, run_at, id, most, kinds, tx.now()?], |row| {
        Ok(Ahead { jobs: row.get(0)?, or_more: row.get::<_, u32>(1)? == most })
    })
}

// ---- tallied -------------------------------------------------------------

pub(super) fn tallied(tx: &Tx<'_>, since: DateTime<Utc>) -> Sql<Vec<Tallied>> {
    // A row of the full hour may be its first minute or all of it: there are
    // whole hours only as far back as minutes fold.
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

// ---- check ---------------------------------------------------------------

pub(super) fn check(tx: &Tx<'_>) -> Sql<CheckReport> {
    const JOBS: &str = "
        select count(*)
          from jobs";
    const PLACES: &str = "
        select j.id,
               (select count(*) from ready w where w.id = j.id),
               (select count(*) from running r where r.id = j.id),
               (select count(*) from finished f where f.id = j.id)
          from jobs j
         where 1 <> (select count(*) from ready w where w.id = j.id)
                  + (select count(*) from running r where r.id = j.id)
                  + (select count(*) from finished f where f.id = j.id)
         limit ?1";
    const ORPHANS: &str = "
        select 'ready', id from ready where id not in (select id from jobs)
         union all
        select 'running', id from running where id not in (select id from jobs)
         union all
        select 'finished', id from finished where id not in (select id from jobs)
         limit ?1";
    const STRAYED: &str = "
        select w.id
          from ready w
          join jobs j on j.id = w.id
         where w.queue <> j.queue
            or w.kind <> j.kind
            or w.priority <> j.priority
            or w.max_attempts <> j.max_attempts
            or w.keyed <> (j.unique_key is not null)
         limit ?1";
    const IDLE_KEYS: &str = "
        select k.key,
               k.job
          from keys k
          left join jobs j on j.id = k.job
         where j.unique_key is not k.key
            or (not exists (select 1 from ready w where w.id = k.job)
                and not exists (select 1 from running r where r.id = k.job and not r.superseded))
         limit ?1";
    const KEYLESS: &str = "
        select j.id,
               j.unique_key
          from (select id, keyed from ready
                 union all
                select id, keyed from running where not superseded) live
          join jobs j on j.id = live.id
          left join keys k on k.job = live.id
         where (j.unique_key is not null or live.keyed)
           and k.key is not j.unique_key
         limit ?1";
    const MISCOUNTED: &str = "
        select queue,
               kind,
               outcome,
               sum(told),
               sum(found)
          from (select queue, kind, outcome, kept as told, 0 as found
                  from tallies
                 union all
                select j.queue, j.kind, f.outcome, 0, 1
                  from finished f
                  join jobs j on j.id = f.id)
         group by queue, kind, outcome
        having sum(told) <> sum(found)
         limit ?1";
    let jobs = tx.row(JOBS, [], |row| row.get::<_, i64>(0))?.unwrap_or(0);
    let mut problems = tx.rows(PLACES, [PROBLEMS], |row| {
        let (ready, running, finished): (u32, u32, u32) = (row.get(1)?, row.get(2)?, row.get(3)?);
        Ok(format!(
            "job {} is in ready {ready}, in running {running} and in finished {finished} times; it should be in one, once",
            row.job(0)?
        ))
    })?;
    problems.extend(tx.rows(ORPHANS, [PROBLEMS], |row| {
        Ok(format!("job {} is in {} but not in jobs", row.job(1)?, row.get::<_, String>(0)?))
    })?);
    problems.extend(tx.rows(STRAYED, [PROBLEMS], |row| {
        Ok(format!(
            "waiting job {} differs from what was asked in its queue, kind, priority or attempts",
            row.job(0)?
        ))
    })?);
    problems.extend(tx.rows(IDLE_KEYS, [PROBLEMS], |row| {
        Ok(format!(
            "unique key `{}` belongs to job {}, which is not live or has another key",
            row.get::<_, String>(0)?,
            row.job(1)?
        ))
    })?);
    problems.extend(tx.rows(KEYLESS, [PROBLEMS], |row| {
        let key = row.get::<_, Option<String>>(1)?.unwrap_or_default();
        Ok(format!("job {} is live but does not own its unique key `{key}`", row.job(0)?))
    })?);
    problems.extend(tx.rows(MISCOUNTED, [PROBLEMS], |row| {
        Ok(format!(
            "the tallies of queue `{}`, kind `{}` say {} {} jobs, but there are {}",
            row.get::<_, String>(0)?,
            row.get::<_, String>(1)?,
            row.get::<_, i64>(3)?,
            row.get::<_, String>(2)?,
            row.get::<_, i64>(4)?
        ))
    })?);
    Ok(CheckReport { jobs: jobs.unsigned_abs(), problems })
}
