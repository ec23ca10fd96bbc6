//! Statistics: jobs per status, the age of the oldest due jobs, jobs ahead of a job, and
//! jobs that ended per minute.

use std::time::Duration;

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::tx::{Sql, Tx};
use crate::job::{JobId, Outcome, Status};
use crate::store::{Ahead, Count, Tallied, Tally, add_up, start_of};

const COUNT_FINISHED: &str = "
    select outcome::text, queue, kind, sum(kept)::int8
      from longshore.tallies
     group by outcome, queue, kind
    having sum(kept) > 0";

const COUNT_RUNNING: &str = "
    select queue, kind, count(*)
      from longshore.running
     group by queue, kind";

/// Counts waiting jobs up to a bound. Above it, the counts are a sample, which is scaled
/// to the planner's estimate of the table's size.
const COUNT_WAITING: &str = "
    select s.queue, s.kind, s.is_fresh, count(*), (
             select greatest(c.reltuples, 0)::int8
               from pg_class c
              where c.oid = $2::regclass)
      from (select queue, kind, attempt = 0 and interruptions = 0 as is_fresh
              from longshore.ready
             limit $1) as s
     group by s.queue, s.kind, s.is_fresh";

const COUNT_BOUND: i64 = 50_000;

pub(super) async fn counts(tx: &mut Tx<'_>) -> Sql<Vec<Count>> {
    let mut counts = Vec::new();
    for row in sqlx::query(tx.sql(COUNT_FINISHED)).fetch_all(&mut *tx.connection).await? {
        let status = Outcome::from_stored(row.try_get(0)?)?.status();
        let jobs = row.try_get::<i64, _>(3)? as u64;
        counts.push(Count { status, queue: row.try_get(1)?, kind: row.try_get(2)?, jobs, estimated: false });
    }
    for row in sqlx::query(tx.sql(COUNT_RUNNING)).fetch_all(&mut *tx.connection).await? {
        let jobs = row.try_get::<i64, _>(2)? as u64;
        let (queue, kind) = (row.try_get(0)?, row.try_get(1)?);
        counts.push(Count { status: Status::Running, queue, kind, jobs, estimated: false });
    }
    let waiting = sqlx::query(tx.sql(COUNT_WAITING))
        .bind(COUNT_BOUND + 1)
        .bind(tx.fill("longshore.ready"))
        .fetch_all(&mut *tx.connection)
        .await?;
    let mut total = 0i64;
    for row in &waiting {
        total += row.try_get::<i64, _>(3)?;
    }
    for row in &waiting {
        let estimated = total > COUNT_BOUND;
        let table_size = row.try_get::<i64, _>(4)?.max(total);
        let sampled = row.try_get::<i64, _>(3)?;
        let jobs = if estimated {
            (sampled as f64 / total as f64 * table_size as f64) as u64
        } else {
            sampled as u64
        };
        let status = if row.try_get(2)? { Status::Queued } else { Status::Retrying };
        counts.push(Count { status, queue: row.try_get(0)?, kind: row.try_get(1)?, jobs, estimated });
    }
    counts.sort_by(|a, b| (a.status, &a.queue, &a.kind).cmp(&(b.status, &b.queue, &b.kind)));
    Ok(counts)
}

/// Finds each (queue, priority) with waiting jobs, as claims do, and the first job of
/// each. Costs one index probe per (queue, priority).
const OVERDUE: &str = "
    with recursive waiting_queues as (
      (select queue
         from longshore.ready
        where interruptions = 0
        order by queue
        limit 1)
      union all
      select (
               select r.queue
                 from longshore.ready r
                where r.interruptions = 0
                  and r.queue > w.queue
                order by r.queue
                limit 1)
        from waiting_queues w
       where w.queue is not null),
    priorities as (
      select w.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = w.queue
                  and r.interruptions = 0
                order by r.priority desc
                limit 1) as priority
        from waiting_queues w
       where w.queue is not null
      union all
      select p.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = p.queue
                  and r.interruptions = 0
                  and r.priority < p.priority
                order by r.priority desc
                limit 1)
        from priorities p
       where p.priority is not null),
    first_jobs as (
      select p.queue, longshore.clock() - (
               select r.run_at
                 from longshore.ready r
                where r.queue = p.queue
                  and r.priority = p.priority
                  and r.interruptions = 0
                order by r.run_at
                limit 1) as due_for
        from priorities p
       where p.priority is not null)
    select queue, extract(epoch from max(due_for))::float8
      from first_jobs
     where due_for >= interval '0'
     group by queue
     order by queue";

pub(super) async fn overdue(tx: &mut Tx<'_>) -> Sql<Vec<(String, Duration)>> {
    let rows = sqlx::query(tx.sql(OVERDUE)).fetch_all(&mut *tx.connection).await?;
    let rows = rows.iter().map(|row| {
        let seconds = row.try_get::<f64, _>(1)?.max(0.0);
        Ok((row.try_get(0)?, Duration::from_secs_f64(seconds)))
    });
    rows.collect()
}

/// Reads the jobs that come before the job `m` in claim order. Suspects have an index of
/// their own, so there are four parts. Each is read in the order of its index; otherwise
/// the planner would read all of it into a bitmap. All parts together read at most `$2`
/// entries, including jobs that do not count.
const AHEAD: &str = "
    select counted.jobs, counted.examined
      from longshore.ready m
     cross join lateral (
             select count(*) filter (
                      where ($3::text[] is null or earlier.kind = any($3::text[]))
                        and earlier.run_at <= greatest((select longshore.clock()), m.run_at)) as jobs,
                    count(*) as examined
               from (select *
                       from ((select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority > m.priority
                                 and r.interruptions = 0
                               order by r.priority desc, r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority = m.priority
                                 and (r.run_at, r.id) < (m.run_at, m.id)
                                 and r.interruptions = 0
                               order by r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority > m.priority
                                 and r.interruptions > 0
                               order by r.priority desc, r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.priority = m.priority
                                 and (r.run_at, r.id) < (m.run_at, m.id)
                                 and r.interruptions > 0
                               order by r.run_at, r.id
                               limit $2)) as part
                      limit $2) as earlier) as counted
     where m.id = $1";

pub(super) async fn ahead(
    tx: &mut Tx<'_>,
    id: JobId,
    kinds: Option<&[String]>,
    limit: u32,
) -> Sql<Option<Ahead>> {
    let counted: Option<(i64, i64)> = sqlx::query_as(tx.sql(AHEAD))
        .bind(id.0)
        .bind(i64::from(limit))
        .bind(kinds)
        .fetch_optional(&mut *tx.connection)
        .await?;
    Ok(counted.map(|(jobs, examined)| Ahead { jobs: jobs as u32, or_more: examined == i64::from(limit) }))
}

const TALLIED: &str = "
    select minute, queue, kind, outcome::text, run_bucket, sum(ended)::int8
      from longshore.tallies
     where ended > 0
       and ((level in (0, 1) and minute >= $1)
         or (level = 2 and minute >= $2))   -- minutes folded into an hour
     group by minute, queue, kind, outcome, run_bucket";

pub(super) async fn tallied(tx: &mut Tx<'_>, since: DateTime<Utc>) -> Sql<Vec<Tallied>> {
    let rows = sqlx::query(tx.sql(TALLIED))
        .bind(start_of(60, since))
        .bind(start_of(60 * 60, since))
        .fetch_all(&mut *tx.connection)
        .await?;
    let tally = |row: &PgRow| -> Sql<Tally> {
        Ok(Tally {
            minute: row.try_get(0)?,
            queue: row.try_get(1)?,
            kind: row.try_get(2)?,
            outcome: Outcome::from_stored(row.try_get(3)?)?,
            run_bucket: row.try_get::<i16, _>(4)?.into(),
            ended: row.try_get(5)?,
        })
    };
    Ok(add_up(rows.iter().map(tally).collect::<Sql<Vec<_>>>()?))
}
