//! Retention: removing finished jobs whose retention has passed, and folding tallies.
//! Both work in bounded steps. A row lock ensures that one process at a time does so.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::error::Error;
use crate::store::{Retained, Retention, millis};

/// The process that locks the row continues the walk; others find no row and do nothing.
const BEGIN_WALK: &str = "
    select cursor
      from longshore.upkeep
     where name = $1
       for update skip locked";

const RETAIN: &str = "
    with page as materialized (
      select id, outcome, finished_at
        from longshore.finished
       where id > coalesce($1, '00000000-0000-0000-0000-000000000000')
       order by id
       limit $2),
    deleted as (
      delete from longshore.finished
       where id = any(array(
               select f.id
                 from longshore.finished f
                where f.id = any(array(
                        select id
                          from page
                         where finished_at < longshore.clock() - interval '1 millisecond'
                                 * case outcome
                                     when 'succeeded' then $3::int8
                                     when 'cancelled' then $4::int8
                                     when 'failed_permanent' then $5::int8
                                   end))
                order by f.id
                  for update skip locked))   -- locked by an operator's retry: skip it this time
      returning id, outcome),
    deleted_jobs as (
      delete from longshore.jobs
       where id = any(array(select id from deleted))
      returning id, queue, kind),
    deleted_attempts as (
      delete from longshore.attempts
       where job = any(array(select id from deleted))),
    deleted_checkpoints as (
      delete from longshore.checkpoints
       where job = any(array(select id from deleted))),
    deleted_requests as (
      delete from longshore.merged_requests
       where job = any(array(select id from deleted))),
    tallied as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -count(*), d.outcome, 0, j.queue, j.kind
        from deleted d
        join deleted_jobs j on j.id = d.id
       group by d.outcome, j.queue, j.kind),
    moved_cursor as (
      update longshore.upkeep
         set cursor = (
               select case when count(*) = $2 then (array_agg(id order by id desc))[1] end
                 from page)
       where name = 'retain')
    select (select count(*) from deleted), (select count(*) from page)";

pub(super) async fn retain(tx: &mut Tx<'_>, policy: &Retention, step: u32) -> Sql<Retained> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let walk: Option<(Option<Uuid>,)> =
        sqlx::query_as(tx.sql(BEGIN_WALK)).bind("retain").fetch_optional(&mut *tx.connection).await?;
    let Some((cursor,)) = walk else { return Ok(Retained { removed: 0, done: true }) };
    let (removed, examined): (i64, i64) = sqlx::query_as(tx.sql(RETAIN))
        .bind(cursor)
        .bind(i64::from(step))
        .bind(policy.succeeded.map(millis))
        .bind(policy.cancelled.map(millis))
        .bind(policy.failed_permanent.map(millis))
        .fetch_one(&mut *tx.connection)
        .await?;
    transaction.commit().await?;
    Ok(Retained { removed: removed as u64, done: examined < i64::from(step) })
}

/// Folds tallies of one level into the next. The rows of a past minute become one row;
/// minutes more than two hours ago become hours; hours more than a week ago become one
/// row for all time. The sum of `kept` never changes, because each step is one statement.
const FOLD: &str = "
    with old as (
      select ctid
        from longshore.tallies
       where level = $1
         and minute < $2
       order by minute
       limit $3
         for update skip locked),
    deleted as (
      delete from longshore.tallies
       where ctid = any(array(select ctid from old))
      returning *),
    merged as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)
      select case $1 when 0 then minute when 1 then date_trunc('hour', minute) else 'epoch' end,
             case when $1 < 2 then sum(ended) else 0 end, sum(kept), outcome,
             case when $1 < 2 then run_bucket else 0 end, $1 + 1, queue, kind
        from deleted
       group by 1, 4, 5, queue, kind)
    select count(*) from deleted";

/// Merges the rows for all time, so that there is one per queue, kind and outcome.
const FOLD_BASE: &str = "
    with deleted as (
      delete from longshore.tallies t
       where t.level = 3
         and (t.queue, t.kind, t.outcome) in (
               select queue, kind, outcome
                 from longshore.tallies
                where level = 3
                group by queue, kind, outcome
               having count(*) > 1)
      returning *)
    insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)
    select 'epoch', 0, sum(kept), outcome, 0, 3, queue, kind
      from deleted
     group by outcome, queue, kind
    having sum(kept) <> 0";

pub(super) async fn fold_tallies(tx: &mut Tx<'_>, step: u32) -> Sql<u64> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let walk = sqlx::query(tx.sql(BEGIN_WALK)).bind("fold").fetch_optional(&mut *tx.connection).await?;
    if walk.is_none() {
        return Ok(0);
    }
    let now: DateTime<Utc> = sqlx::query_scalar(tx.sql("select date_trunc('minute', longshore.clock())"))
        .fetch_one(&mut *tx.connection)
        .await?;
    let hour = chrono::TimeDelta::hours(1);
    let bounds = [(0i16, now), (1, now - hour * 2), (2, now - hour * 24 * 7)];
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
        if level == 2 && rows > 0 {
            sqlx::query(tx.sql(FOLD_BASE)).execute(&mut *tx.connection).await?;
        }
    }
    transaction.commit().await?;
    Ok(folded)
}
