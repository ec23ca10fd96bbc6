//! Statistics: jobs per status, the age of the oldest due jobs, jobs ahead of a job, and
//! jobs that ended per minute.

use std::collections::HashSet;
use std::collections::hash_map::{Entry, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::PostgresStore;
use super::tx::{Sql, Tx};
use crate::error::Result;
use crate::job::{JobId, Outcome, Status};
use crate::store::queues::find_waiting_queues;
use crate::store::{Ahead, Count, HistoryFilter, Stats, Tallied, Tally, add_up, in_order, start_of};

#[async_trait]
impl Stats for PostgresStore {
    async fn counts(&self) -> Result<Vec<Count>> {
        self.run((), |tx, ()| Box::pin(counts(tx))).await
    }

    async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.run((), |tx, ()| {
            Box::pin(async move {
                let rows = sqlx::query(tx.sql(OVERDUE)).fetch_all(&mut *tx.connection).await?;
                let rows = rows.iter().map(|row| {
                    let seconds = row.try_get::<f64, _>(1)?.max(0.0);
                    Ok((row.try_get(0)?, Duration::from_secs_f64(seconds)))
                });
                rows.collect()
            })
        })
        .await
    }

    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, limit: u32) -> Result<Option<Ahead>> {
        self.run((id, kinds.map(<[_]>::to_vec), limit), |tx, (id, kinds, limit)| {
            Box::pin(async move {
                let counted: Option<(i64, i64)> = sqlx::query_as(tx.sql(AHEAD))
                    .bind(id.0)
                    .bind(i64::from(*limit))
                    .bind(kinds)
                    .fetch_optional(&mut *tx.connection)
                    .await?;
                Ok(counted.map(|(jobs, examined)| Ahead {
                    jobs: jobs as u32,
                    or_more: examined == i64::from(*limit),
                }))
            })
        })
        .await
    }

    async fn tallied(&self, filter: &HistoryFilter) -> Result<Vec<Tallied>> {
        self.run_view(filter.clone(), |tx, filter| Box::pin(tallied(tx, filter))).await
    }
}

const COUNT_FINISHED: &str = "
    select outcome::text, queue, kind, sum(kept)::int8
      from longshore.tallies
     group by outcome, queue, kind
    having sum(kept) > 0";

const COUNT_RUNNING: &str = "
    select queue, kind, count(*)
      from longshore.running
     group by queue, kind";

async fn counts(tx: &mut Tx<'_>) -> Sql<Vec<Count>> {
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
    counts.extend(waiting(tx).await?);
    Ok(in_order(counts))
}

/// The maximum number of waiting jobs that are counted without looking at their queues.
const MAX_COUNTED: i64 = 50_000;

/// Counts waiting jobs up to a bound.
const COUNT_WAITING: &str = "
    select s.queue, s.kind, s.is_fresh, count(*)
      from (select queue, kind, attempt = 0 and interruptions = 0 as is_fresh
              from longshore.ready
             limit $1) as s
     group by s.queue, s.kind, s.is_fresh";

/// Counts the waiting jobs of each queue except `$1` up to a bound, which is lower if there are
/// very many queues. Suspects are few and have their own index.
const COUNT_WAITING_BY_QUEUE: &str = concat!(
    "with recursive ",
    find_waiting_queues!(),
    ",
    bound as (
      select greatest(1000, least(10000, 100000 / greatest(count(*), 1))) as jobs
        from waiting_queues)
    select w.queue, s.kind, s.is_fresh, false as is_suspect, count(*), (select jobs from bound)
      from waiting_queues w
     cross join lateral (
             select *
               from ((select r.kind, r.attempt = 0 as is_fresh
                        from longshore.ready r
                       where r.queue = w.queue
                         and r.interruptions = 0
                         and r.grp is null
                       order by r.priority desc, r.run_at, r.id   -- the order of the index
                       limit (select jobs + 1 from bound))
                     union all
                     (select r.kind, r.attempt = 0 and r.interruptions = 0
                        from longshore.ready r
                       where r.queue = w.queue
                         and r.grp is not null
                       order by r.grp, r.priority desc, r.run_at, r.id
                       limit (select jobs + 1 from bound))) as bounded
              limit (select jobs + 1 from bound)) as s
     where w.queue <> all($1::text[])
     group by w.queue, s.kind, s.is_fresh
     union all
    select queue, kind, false, true, count(*), (select jobs from bound)
      from longshore.ready
     where interruptions > 0
       and grp is null
     group by queue, kind"
);

/// The waiting jobs per queue, kind and status. All are counted if there are not many.
/// Otherwise the jobs of queues with few jobs are counted, and the others are estimated from
/// a sample.
pub(super) async fn waiting(tx: &mut Tx<'_>) -> Sql<Vec<Count>> {
    let rows =
        sqlx::query(tx.sql(COUNT_WAITING)).bind(MAX_COUNTED + 1).fetch_all(&mut *tx.connection).await?;
    let (mut counts, mut total) = (Vec::with_capacity(rows.len()), 0);
    for row in &rows {
        let jobs: i64 = row.try_get(3)?;
        total += jobs;
        counts.push(waiting_count(row, jobs as f64, false)?);
    }
    if total <= MAX_COUNTED {
        return Ok(counts);
    }
    let mut transaction = tx.begin_snapshot().await?;
    let tx = &mut transaction.tx();
    let (mut sampled, scale) = sample(tx).await?;
    let mut estimates = HashMap::<String, u64>::new();
    for count in &sampled {
        *estimates.entry(count.queue.clone()).or_default() += count.jobs;
    }
    let is_surely_large = |queue: &&String| {
        let jobs = estimates[*queue];
        jobs > SURELY_LARGE && jobs as f64 / scale >= MIN_SAMPLED_OF_QUEUE
    };
    let mut large: HashSet<String> = estimates.keys().filter(is_surely_large).cloned().collect();
    let rows = sqlx::query(tx.sql(COUNT_WAITING_BY_QUEUE))
        .bind(large.iter().collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    transaction.commit().await?;
    let mut by_queue = HashMap::<&str, i64>::new();
    for row in &rows {
        let (is_suspect, bound): (bool, i64) = (row.try_get(3)?, row.try_get(5)?);
        let queue: &str = row.try_get(0)?;
        let jobs = by_queue.entry(queue).or_default();
        *jobs += if is_suspect { 0 } else { row.try_get::<i64, _>(4)? };
        if *jobs > bound && estimates.contains_key(queue) {
            large.insert(queue.to_owned());
        }
    }
    sampled.retain(|count| large.contains(&count.queue));
    let mut counts = HashMap::<(Status, String, String), Count>::new();
    for row in &rows {
        let is_suspect: bool = row.try_get(3)?;
        if is_suspect || !large.contains(row.try_get::<&str, _>(0)?) {
            sampled.push(waiting_count(row, row.try_get::<i64, _>(4)? as f64, false)?);
        }
    }
    for count in sampled {
        let group = (count.status, count.queue.clone(), count.kind.clone());
        match counts.entry(group) {
            Entry::Vacant(entry) => {
                entry.insert(count);
            }
            Entry::Occupied(mut entry) => {
                entry.get_mut().jobs += count.jobs;
                entry.get_mut().estimated |= count.estimated;
            }
        }
    }
    Ok(counts.into_values().collect())
}

/// A queue is not counted if its estimate is above this: twice the number up to which it is
/// counted.
const SURELY_LARGE: u64 = 20_000;
/// The estimate must be based on this many jobs: more than a few pages have.
const MIN_SAMPLED_OF_QUEUE: f64 = 500.0;

/// The rows of every nth page, if the table has more than `$1` pages, and otherwise all. What
/// was enqueued together is stored together, so pages at equal distances represent the queues
/// better than random ones. The pages of a table are known exactly, but not its rows: the
/// planner's statistics can be minutes old, or missing.
const SAMPLE_WAITING: &str = "
    with pages as (
      select size.pages, least($1, size.pages) as sampled
        from (select pg_relation_size($2::regclass) / current_setting('block_size')::int8 as pages) as size)
    select s.queue, s.kind, s.is_fresh, count(*), (select pages::float8 / sampled from pages)
      from pages
     cross join lateral generate_series(0, pages.sampled - 1) as n
     cross join lateral (
             select r.queue, r.kind, r.attempt = 0 and r.interruptions = 0 as is_fresh
               from longshore.ready r
              where r.ctid >= format('(%s,0)', n * pages.pages / pages.sampled)::tid
                and r.ctid < format('(%s,0)', n * pages.pages / pages.sampled + 1)::tid
                and (r.interruptions = 0 or r.grp is not null)
             offset 0) as s
     group by s.queue, s.kind, s.is_fresh";

/// How many pages are read for an estimate.
const SAMPLED_PAGES: i64 = 250;
/// If the pages contain fewer jobs, more pages are read: the table has free space of an
/// earlier backlog.
const MIN_SAMPLED_JOBS: i64 = 5_000;
const MAX_SAMPLED_PAGES: i64 = 2_000;

/// Estimates the waiting jobs per queue, kind and status, without suspects. Also returns how
/// many jobs each sampled one stands for.
pub(super) async fn sample(tx: &mut Tx<'_>) -> Sql<(Vec<Count>, f64)> {
    let (mut rows, mut scale) = (Vec::new(), 1.0);
    for pages in [SAMPLED_PAGES, MAX_SAMPLED_PAGES] {
        rows = sqlx::query(tx.sql(SAMPLE_WAITING))
            .bind(pages)
            .bind(tx.fill("longshore.ready"))
            .fetch_all(&mut *tx.connection)
            .await?;
        let mut jobs = 0;
        for row in &rows {
            jobs += row.try_get::<i64, _>(3)?;
            scale = row.try_get(4)?;
        }
        if jobs >= MIN_SAMPLED_JOBS {
            break;
        }
    }
    let count = |row: &PgRow| waiting_count(row, row.try_get::<i64, _>(3)? as f64 * scale, scale > 1.0);
    Ok((rows.iter().map(count).collect::<Sql<_>>()?, scale))
}

fn waiting_count(row: &PgRow, jobs: f64, estimated: bool) -> Sql<Count> {
    let status = if row.try_get(2)? { Status::Queued } else { Status::Retrying };
    Ok(Count { status, queue: row.try_get(0)?, kind: row.try_get(1)?, jobs: jobs.round() as u64, estimated })
}

/// Finds each (queue, priority) with waiting jobs, as claims do, and the first job of
/// each. Costs one index probe per (queue, priority) and per (group, priority). Looks at
/// 10,000 groups at most.
const OVERDUE: &str = concat!(
    "with recursive ",
    find_waiting_queues!(),
    ",
    priorities as (
      select w.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = w.queue
                  and r.interruptions = 0
                  and r.grp is null
                order by r.priority desc
                limit 1) as priority
        from waiting_queues w
       where w.queue <> ''
      union all
      select p.queue, (
               select r.priority
                 from longshore.ready r
                where r.queue = p.queue
                  and r.interruptions = 0
                  and r.grp is null
                  and r.priority < p.priority
                order by r.priority desc
                limit 1)
        from priorities p
       where p.priority is not null),
    waiting_groups as (
      select w.queue, '' as grp
        from waiting_queues w
       where w.queue <> ''
      union all
      select g.queue, (
               select r.grp
                 from longshore.ready r
                where r.queue = g.queue
                  and r.grp > g.grp
                order by r.grp
                limit 1)
        from waiting_groups g
       where g.grp is not null),
    group_priorities as (
      select g.queue, g.grp, (
               select r.priority
                 from longshore.ready r
                where r.queue = g.queue
                  and r.grp = g.grp
                  and r.grp is not null
                order by r.priority desc
                limit 1) as priority
        from (select * from waiting_groups limit 10000) as g
       where g.grp <> ''
      union all
      select p.queue, p.grp, (
               select r.priority
                 from longshore.ready r
                where r.queue = p.queue
                  and r.grp = p.grp
                  and r.grp is not null
                  and r.priority < p.priority
                order by r.priority desc
                limit 1)
        from group_priorities p
       where p.priority is not null),
    first_jobs as (
      select p.queue, longshore.clock() - (
               select r.run_at
                 from longshore.ready r
                where r.queue = p.queue
                  and r.priority = p.priority
                  and r.interruptions = 0
                  and r.grp is null
                order by r.run_at
                limit 1) as due_for
        from priorities p
       where p.priority is not null
      union all
      select p.queue, longshore.clock() - (
               select r.run_at
                 from longshore.ready r
                where r.queue = p.queue
                  and r.grp = p.grp
                  and r.grp is not null
                  and r.priority = p.priority
                order by r.run_at
                limit 1)
        from group_priorities p
       where p.priority is not null)
    select queue, extract(epoch from max(due_for))::float8
      from first_jobs
     where due_for >= interval '0'
     group by queue
     order by queue"
);

/// Reads the jobs that come before the job `m` in claim order; for a job with a group, those of
/// its group. Suspects have an index of their own, so there are four parts for jobs without a
/// group. Each is read in the order of its index; otherwise
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
                                 and m.grp is null
                                 and r.priority > m.priority
                                 and r.interruptions = 0
                                 and r.grp is null
                               order by r.priority desc, r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and m.grp is null
                                 and r.priority = m.priority
                                 and (r.run_at, r.id) < (m.run_at, m.id)
                                 and r.interruptions = 0
                                 and r.grp is null
                               order by r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and m.grp is null
                                 and r.priority > m.priority
                                 and r.interruptions > 0
                                 and r.grp is null
                               order by r.priority desc, r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and m.grp is null
                                 and r.priority = m.priority
                                 and (r.run_at, r.id) < (m.run_at, m.id)
                                 and r.interruptions > 0
                                 and r.grp is null
                               order by r.run_at, r.id
                               limit $2)
                             union all
                             (select r.kind, r.run_at
                                from longshore.ready r
                               where r.queue = m.queue
                                 and r.grp = m.grp
                                 and r.grp is not null
                                 and (r.priority > m.priority
                                   or (r.priority = m.priority and (r.run_at, r.id) < (m.run_at, m.id)))
                               order by r.priority desc, r.run_at, r.id
                               limit $2)) as part
                      limit $2) as earlier) as counted
     where m.id = $1";

const TALLIED: &str = "
    select minute,
           case when $3 then queue else '' end,
           case when $4 then kind else '' end,
           outcome::text,
           run_bucket,
           sum(ended)::int8
      from longshore.tallies
     where ended > 0
       and ((level in (0, 1) and minute >= $1)
         or (level = 2 and minute >= $2))   -- minutes folded into an hour
       and ($5::text[] is null or queue = any($5))
     group by 1, 2, 3, 4, 5";

async fn tallied(tx: &mut Tx<'_>, filter: &HistoryFilter) -> Sql<Vec<Tallied>> {
    let rows = sqlx::query(tx.sql(TALLIED))
        .bind(start_of(60, filter.since))
        .bind(start_of(60 * 60, filter.since))
        .bind(filter.detail.has_queues())
        .bind(filter.detail.has_kinds())
        .bind(&filter.queues)
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
