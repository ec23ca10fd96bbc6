//! Retention: removing finished jobs whose retention has passed, and folding tallies.
//! Both work in bounded steps. A row lock ensures that one process at a time does so.

use std::collections::HashSet;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::Row;

use super::PostgresStore;
use super::flow_changes::delete_links;
use super::steps::delete_progress;
use super::tx::{Sql, Tx};
use crate::error::{Error, Result};
use crate::job::Outcome;
use crate::rules::retry::millis;
use crate::store::upkeep::lock_pass;
use crate::store::{Retained, Retaining, Retention};

/// The blocks of one row in `finished_ranges`: up to about 1,400 finished jobs. Rows that
/// are stored already depend on this number.
const BLOCKS_PER_RANGE: i64 = 16;
/// A step reads no further range when it has read this many ranges or jobs.
const MAX_RANGES: usize = 64;
const MAX_EXAMINED: u64 = 20_000;

#[async_trait]
impl Retaining for PostgresStore {
    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained> {
        self.run((*policy, step), |tx, (policy, step)| Box::pin(retain(tx, policy, *step))).await
    }

    async fn fold_tallies(&self, step: u32) -> Result<u64> {
        self.run(step, |tx, step| Box::pin(fold_tallies(tx, *step))).await
    }
}

/// The table that `finished_ranges` describes.
enum Ranges {
    Known,
    OfAnotherTable,
}

/// As [`lock_pass`] for `retain`. Also returns whether `finished_ranges` still describes this table: its numbers of
/// blocks mean nothing in a copy of the database.
async fn lock_retain(tx: &mut Tx<'_>) -> Sql<Option<Ranges>> {
    const LOCK: &str = "
        select storage is not distinct from longshore.storage_of_finished()
          from longshore.upkeep
         where name = 'retain'
           for update skip locked";
    let is_known: Option<bool> = sqlx::query_scalar(tx.sql(LOCK)).fetch_optional(&mut *tx.connection).await?;
    Ok(is_known.map(|is_known| if is_known { Ranges::Known } else { Ranges::OfAnotherTable }))
}

/// Forgets all ranges, so that retention reads the whole table once.
async fn forget_ranges(tx: &mut Tx<'_>) -> Sql<()> {
    const FORGET: &str = "
        with noted as (
          update longshore.upkeep
             set storage = longshore.storage_of_finished(), looked_at = null
           where name = 'retain')
        delete from longshore.finished_ranges";
    sqlx::query(tx.sql(FORGET)).execute(&mut *tx.connection).await?;
    Ok(())
}

/// The ranges in which a job may have expired. A job that ended after the range was read
/// cannot have expired before the shortest retention time (`$1`) has passed.
const DUE_RANGES: &str = "
    select first_block
      from longshore.finished_ranges
     where read_at > longshore.clock()   -- the clock was set back
        or read_at < longshore.clock() - interval '1 millisecond' * $1::int8
        or succeeded < longshore.clock() - interval '1 millisecond' * $2::int8
        or cancelled < longshore.clock() - interval '1 millisecond' * $3::int8
        or failed_permanent < longshore.clock() - interval '1 millisecond' * $4::int8
     order by read_at, first_block
     limit $5";

/// Adds the ranges by which the table has grown. What is in them ended after the last look,
/// so they need not be read now. `-infinity`: nothing is known about the first ones.
const ADD_RANGES: &str = "
    with looked as (
      update longshore.upkeep
         set looked_at = longshore.clock()
       where name = 'retain')
    insert into longshore.finished_ranges (first_block, read_at)
    select n * $1::int8, coalesce((select looked_at from longshore.upkeep where name = 'retain'), '-infinity')
      from generate_series(
             coalesce((select max(first_block) from longshore.finished_ranges) / $1::int8 + 1, 0),
             (pg_relation_size($2::regclass) / current_setting('block_size')::int8 - 1) / $1::int8) as n
        on conflict do nothing";

/// How long a job with this outcome is kept.
macro_rules! retention_of {
    ($outcome:literal) => {
        concat!(
            "interval '1 millisecond' * case ",
            $outcome,
            "
                 when 'succeeded' then $5::int8
                 when 'cancelled' then $6::int8
                 when 'failed_permanent' then $7::int8
               end"
        )
    };
}

/// For a member `f` of a flow, or a skipped callback, that stays although its own retention has passed: the
/// outcome and the time by which its retention counts instead. It stays while its flow is open, because
/// others may need its result; while the parent job of a flow of children is kept, because it may join them;
/// and, if it has links, for the retention of the ended flow, because the failed part may be retried.
macro_rules! kept_by_flow {
    () => {
        concat!(
            "
      select s.outcome, s.since
        from longshore.flows w
       cross join lateral (
               select w.ended_at is null
                      or w.owned and exists (select 1 from longshore.jobs j where j.id = w.id) as is_open,
                      exists (select 1 from longshore.links l where l.child = f.id)
                      or exists (select 1 from longshore.links l where l.parent = f.id) as is_linked,
                      case
                        when w.failed > 0 then 'failed_permanent'::longshore.outcome
                        when w.cancelled then 'cancelled'
                        else 'succeeded'
                      end as outcome) as o
       cross join lateral (   -- look again in an hour if it is open
               select case when o.is_open then f.outcome else o.outcome end as outcome,
                      case
                        when o.is_open then longshore.clock() + interval '1 hour' - ",
            retention_of!("f.outcome"),
            "
                        else w.ended_at
                      end as since) as s
       where w.id = coalesce(f.flow, (select l.parent from longshore.links l where l.child = f.id limit 1))
         and (o.is_open
              or o.is_linked
                 and (w.ended_at < longshore.clock() - ",
            retention_of!("o.outcome"),
            ") is not true)"
        )
    };
}

/// Removes up to `$4` expired jobs of the range that starts at block `$1`. If no more than
/// that have expired, stores what is left in the range.
const RETAIN: &str = concat!(
    "
    with page as materialized (
      select f.ctid as row_id, f.id, coalesce(k.outcome, f.outcome) as outcome,
             coalesce(k.since, f.finished_at) as since, e.is_expired and k.since is null as is_expired
        from longshore.finished f
       cross join lateral (
               select coalesce(f.finished_at < longshore.clock() - ",
    retention_of!("f.outcome"),
    ", false) as is_expired) as e
        left join lateral (",
    kept_by_flow!(),
    "
         and e.is_expired
         and (f.flow is not null or f.skipped)) as k
          on true
       where f.ctid >= $2::text::tid
         and f.ctid < $3::text::tid),
    deleted as (
      delete from longshore.finished
       where ctid = any(array(
               select f.ctid
                 from longshore.finished f
                where f.ctid = any(array(
                        select row_id
                          from page
                         where is_expired
                         order by row_id
                         limit $4))
                order by f.id
                  for update skip locked))   -- locked by an operator's retry: skip it this time
      returning id, outcome, flow),
    deleted_jobs as (
      delete from longshore.jobs
       where id = any(array(select id from deleted))
      returning id, queue, kind),
    deleted_attempts as (
      delete from longshore.attempts
       where job = any(array(select id from deleted))),",
    delete_progress!("select id from deleted"),
    delete_links!("select id from deleted where flow is not null"),
    "
    deleted_requests as (
      delete from longshore.merged_requests
       where job = any(array(select id from deleted))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -count(*), d.outcome, 0, j.queue, j.kind
        from deleted d
        join deleted_jobs j on j.id = d.id
       group by d.outcome, j.queue, j.kind),
    kept as (
      select min(p.since) filter (where p.outcome = 'succeeded') as succeeded,
             min(p.since) filter (where p.outcome = 'cancelled') as cancelled,
             min(p.since) filter (where p.outcome = 'failed_permanent') as failed_permanent
        from page p
        left join deleted d on d.id = p.id
       where d.id is null),
    stored as (
      update longshore.finished_ranges r
         set read_at = longshore.clock(),
             succeeded = kept.succeeded,
             cancelled = kept.cancelled,
             failed_permanent = kept.failed_permanent
        from kept
       where r.first_block = $1
         and (select count(*) from page where is_expired) <= $4)
    select (select count(*) from deleted) as removed, (select count(*) from page) as examined",
);

async fn retain(tx: &mut Tx<'_>, policy: &Retention, step: u32) -> Sql<Retained> {
    let step = u64::from(step.max(1));
    let mut retained = Retained { removed: 0, examined: 0, done: true };
    let Some(shortest) = Outcome::ALL.into_iter().filter_map(|outcome| policy.of(outcome)).min() else {
        return Ok(retained);
    };
    let times = [policy.succeeded, policy.cancelled, policy.failed_permanent].map(|time| time.map(millis));
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    match lock_retain(tx).await? {
        None => return Ok(retained),
        Some(Ranges::Known) => {}
        Some(Ranges::OfAnotherTable) => forget_ranges(tx).await?,
    }
    let mut read = HashSet::new();
    'step: loop {
        let due = due_ranges(tx, millis(shortest), times).await?;
        // A range that is still due has jobs that others hold locked.
        let next: Vec<i64> = due.into_iter().filter(|first_block| !read.contains(first_block)).collect();
        if next.is_empty() && add_ranges(tx).await? == 0 {
            break;
        }
        for first_block in next {
            let limit = step - retained.removed;
            let (removed, examined) = retain_range(tx, first_block, limit, times).await?;
            retained.removed += removed;
            retained.examined += examined;
            read.insert(first_block);
            if retained.removed == step || retained.examined >= MAX_EXAMINED || read.len() == MAX_RANGES {
                retained.done = false;
                break 'step;
            }
        }
    }
    transaction.commit().await?;
    Ok(retained)
}

async fn due_ranges(tx: &mut Tx<'_>, shortest: i64, times: [Option<i64>; 3]) -> Sql<Vec<i64>> {
    let [succeeded, cancelled, failed_permanent] = times;
    let due = sqlx::query_scalar(tx.sql(DUE_RANGES))
        .bind(shortest)
        .bind(succeeded)
        .bind(cancelled)
        .bind(failed_permanent)
        .bind(MAX_RANGES as i64 + 1)
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(due)
}

async fn add_ranges(tx: &mut Tx<'_>) -> Sql<u64> {
    let added = sqlx::query(tx.sql(ADD_RANGES))
        .bind(BLOCKS_PER_RANGE)
        .bind(tx.fill("longshore.finished"))
        .execute(&mut *tx.connection)
        .await?;
    Ok(added.rows_affected())
}

/// Removes expired jobs of one range; returns how many it removed and examined.
async fn retain_range(
    tx: &mut Tx<'_>,
    first_block: i64,
    limit: u64,
    times: [Option<i64>; 3],
) -> Sql<(u64, u64)> {
    let [succeeded, cancelled, failed_permanent] = times;
    let row = sqlx::query(tx.sql(RETAIN))
        .bind(first_block)
        .bind(format!("({first_block},0)"))
        .bind(format!("({},0)", first_block + BLOCKS_PER_RANGE))
        .bind(i64::try_from(limit).unwrap_or(i64::MAX))
        .bind(succeeded)
        .bind(cancelled)
        .bind(failed_permanent)
        .fetch_one(&mut *tx.connection)
        .await?;
    let count = |name| row.try_get::<i64, _>(name).map(i64::unsigned_abs);
    Ok((count("removed")?, count("examined")?))
}

/// Folds tallies of one level into the next: the rows that settles and retention wrote become one row per
/// minute; minutes more than two hours ago become hours; hours more than a week ago become one row for all
/// time. Rows of the next level for the same period are merged with the new ones, so a period never has two
/// rows for the same queue, kind, outcome and bucket, even if it is folded in parts. The sum of `kept` never
/// changes, because each step is one statement.
const FOLD: &str = "
    with deleted as (
      delete from longshore.tallies
       where ctid = any(array(
               select ctid
                 from longshore.tallies
                where level = $1
                  and minute < $2
                order by minute
                limit $3))
      returning case $1 when 0 then minute when 1 then date_trunc('hour', minute, 'UTC') else 'epoch' end as period,
                case when $1 < 2 then ended else 0 end as ended, kept, outcome,
                case when $1 < 2 then run_bucket else 0 end as run_bucket, queue, kind),
    absorbed as (
      delete from longshore.tallies
       where level = $1 + 1
         and minute = any(array(select distinct period from deleted))
      returning minute, ended, kept, outcome, run_bucket, queue, kind),
    merged as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)
      select period, sum(ended), sum(kept), outcome, run_bucket, $1 + 1, queue, kind
        from (select * from deleted union all select * from absorbed) as part
       group by period, outcome, run_bucket, queue, kind
      having sum(ended) <> 0 or sum(kept) <> 0)
    select count(*) from deleted";

async fn fold_tallies(tx: &mut Tx<'_>, step: u32) -> Sql<u64> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    if !lock_pass(tx, "fold").await? {
        return Ok(0);
    }
    let hour: DateTime<Utc> =
        sqlx::query_scalar(tx.sql("select date_trunc('hour', longshore.clock(), 'UTC')"))
            .fetch_one(&mut *tx.connection)
            .await?;
    let hours = |n| chrono::TimeDelta::hours(n);
    // The current minute is folded too: it may have thousands of rows.
    let bounds = [(0i16, hour + hours(2)), (1, hour - hours(2)), (2, hour - hours(24 * 7))];
    let mut folded = 0;
    for (level, before) in bounds {
        let rows: i64 = sqlx::query_scalar(tx.sql(FOLD))
            .bind(level)
            .bind(before)
            .bind(i64::from(step))
            .fetch_one(&mut *tx.connection)
            .await?;
        folded += u64::try_from(rows)
            .map_err(|_| Error::internal("the database returned a negative number of folded tallies"))?;
    }
    transaction.commit().await?;
    Ok(folded)
}
