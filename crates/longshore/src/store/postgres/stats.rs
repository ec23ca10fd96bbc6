//! Numbers: jobs by status, how long due jobs have waited, how many jobs are ahead
//! of one, and what has ended when.

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

/// Counted up to a bound; past it, the sample is scaled to what the planner
/// believes the table holds.
const COUNT_WAITING: &str = "
    select s.queue, s.kind, s.fresh, count(*), (
             select greatest(c.reltuples, 0)::int8
               from pg_class c
              where c.oid = $2::regclass)
      from (select queue, kind, attempt = 0 and interruptions = 0 as fresh
              from longshore.ready
             limit $1) as s
     group by s.queue, s.kind, s.fresh";

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
    let mut seen = 0i64;
    for row in &waiting {
        seen += row.try_get::<i64, _>(3)?;
    }
    for row in &waiting {
        let estimated = seen > COUNT_BOUND;
        let believed = row.try_get::<i64, _>(4)?.max(seen);
        let sampled = row.try_get::<i64, _>(3)?;
        let jobs =
            if estimated { (sampled as f64 / seen as f64 * believed as f64) as u64 } else { sampled as u64 };
        let status = if row.try_get(2)? { Status::Queued } else { Status::Retrying };
        counts.push(Count { status, queue: row.try_get(0)?, kind: row.try_get(1)?, jobs, estimated });
    }
    counts.sort_by(|a, b| (a.status, &a.queue, &a.kind).cmp(&(b.status, &b.queue, &b.kind)));
    Ok(counts)
}

/// Which (queue, priority) have waiting jobs, and the first of each: one index
/// probe a place, as claims discover them.
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
    places as (
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
        from places p
       where p.priority is not null),
    firsts as (
      select p.queue, longshore.clock() - (
               select r.run_at
                 from longshore.ready r
                where r.queue = p.queue
                  and r.priority = p.priority
                  and r.interruptions = 0
                order by r.run_at
                limit 1) as due_for
        from places p
       where p.priority is not null)
    select queue, extract(epoch from max(due_for))::float8
      from firsts
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

/// In the order of a claim. Jobs that were interrupted before wait in an index of
/// their own. Each part is read in the order of its index, which the planner would
/// else read whole into a bitmap, and all together no further than `$2`: those that
/// do not count must cost no more than those that do.
const AHEAD: &str = "
    select counted.jobs, counted.looked_at
      from longshore.ready m
     cross join lateral (
             select count(*) filter (
                      where ($3::text[] is null or earlier.kind = any($3::text[]))
                        and earlier.run_at <= greatest((select longshore.clock()), m.run_at)) as jobs,
                    count(*) as looked_at
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
    most: u32,
) -> Sql<Option<Ahead>> {
    let counted: Option<(i64, i64)> = sqlx::query_as(tx.sql(AHEAD))
        .bind(id.0)
        .bind(i64::from(most))
        .bind(kinds)
        .fetch_optional(&mut *tx.connection)
        .await?;
    Ok(counted.map(|(jobs, looked_at)| Ahead { jobs: jobs as u32, or_more: looked_at == i64::from(most) }))
}

const TALLIED: &str = "
    select minute, queue, kind, outcome::text, run_bucket, sum(ended)::int8
      from longshore.tallies
     where ended > 0
       and ((level in (0, 1) and minute >= $1)
         or (level = 2 and minute >= $2))   -- an hour, added up
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
