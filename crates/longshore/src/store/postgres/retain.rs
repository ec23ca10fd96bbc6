//! Retention: removing finished jobs whose time has passed, and folding tallies.
//! Both walk in bounded steps by key. A row lock decides which process walks.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::tx::{Sql, Tx};
use crate::error::Error;
use crate::store::{Retained, Retention, millis};

/// Whoever holds the row walks; others find nothing to do.
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
    gone as (
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
                  for update skip locked))   -- somebody's retry: next time
      returning id, outcome),
    forgotten as (
      delete from longshore.jobs
       where id = any(array(select id from gone))
      returning id, queue, kind),
    history as (
      delete from longshore.attempts
       where job = any(array(select id from gone))),
    saved as (
      delete from longshore.checkpoints
       where job = any(array(select id from gone))),
    uncounted as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
      select date_trunc('minute', longshore.clock()), 0, -count(*), g.outcome, 0, j.queue, j.kind
        from gone g
        join forgotten j on j.id = g.id
       group by g.outcome, j.queue, j.kind),
    walked as (
      update longshore.upkeep
         set cursor = (
               select case when count(*) = $2 then (array_agg(id order by id desc))[1] end
                 from page)
       where name = 'retain')
    select (select count(*) from gone), (select count(*) from page)";

pub(super) async fn retain(tx: &mut Tx<'_>, policy: &Retention, step: u32) -> Sql<Retained> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let walk: Option<(Option<Uuid>,)> =
        sqlx::query_as(tx.sql(BEGIN_WALK)).bind("retain").fetch_optional(&mut *tx.connection).await?;
    let Some((cursor,)) = walk else { return Ok(Retained { removed: 0, done: true }) };
    let (removed, seen): (i64, i64) = sqlx::query_as(tx.sql(RETAIN))
        .bind(cursor)
        .bind(i64::from(step))
        .bind(policy.succeeded.map(millis))
        .bind(policy.cancelled.map(millis))
        .bind(policy.failed_permanent.map(millis))
        .fetch_one(&mut *tx.connection)
        .await?;
    transaction.commit().await?;
    Ok(Retained { removed: removed as u64, done: seen < i64::from(step) })
}

/// Raw rows of past minutes become one row a minute, minutes of two hours ago
/// hours, and hours of a week ago one row for all time. `kept` adds up to the
/// same at every instant, because each step is one statement.
const FOLD: &str = "
    with old as (
      select ctid
        from longshore.tallies
       where level = $1
         and minute < $2
       order by minute
       limit $3
         for update skip locked),
    gone as (
      delete from longshore.tallies
       where ctid = any(array(select ctid from old))
      returning *),
    merged as (
      insert into longshore.tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)
      select case $1 when 0 then minute when 1 then date_trunc('hour', minute) else 'epoch' end,
             case when $1 < 2 then sum(ended) else 0 end, sum(kept), outcome,
             case when $1 < 2 then run_bucket else 0 end, $1 + 1, queue, kind
        from gone
       group by 1, 4, 5, queue, kind)
    select count(*) from gone";

/// All time is one row a (queue, kind, outcome): merge what the last step added.
const FOLD_BASE: &str = "
    with gone as (
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
      from gone
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
        folded += u64::try_from(rows).map_err(|_| Error::internal("a count below zero"))?;
        if level == 2 && rows > 0 {
            sqlx::query(tx.sql(FOLD_BASE)).execute(&mut *tx.connection).await?;
        }
    }
    transaction.commit().await?;
    Ok(folded)
}
