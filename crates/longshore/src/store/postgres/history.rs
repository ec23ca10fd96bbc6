//! History for charts, by minute and later by hour.

use chrono::{DateTime, Utc};
use sqlx::Row;
use sqlx::postgres::PgRow;

use super::retain::takes_turn;
use super::tx::{Sql, Tx};
use crate::store::{
    HistoryFilter, KEPT_DAYS, MINUTES_KEPT_HOURS, Measure, Measured, NewMeasure, What, start_of,
};

/// Numbers are added up; of depths and ages, the largest is kept.
macro_rules! merge {
    () => {
        "on conflict (minute, what, queue, kind, bucket) do update
         set value = case when m.what in ('waited', 'failed') then m.value + excluded.value
                          else greatest(m.value, excluded.value) end"
    };
}

/// The rows are sorted, so that two processes lock them in the same order.
const PUT: &str = concat!(
    "
    insert into longshore.measures as m (minute, what, queue, kind, bucket, value)
    select date_trunc('minute', longshore.clock()), i.*
      from unnest($1::text[], $2::text[], $3::text[], $4::int2[], $5::int8[]) as i(what, queue, kind, bucket, value)
     order by i.what, i.queue, i.kind, i.bucket
        ",
    merge!()
);

pub(super) async fn put_measures(tx: &mut Tx<'_>, measures: &[NewMeasure]) -> Sql<()> {
    sqlx::query(tx.sql(PUT))
        .bind(measures.iter().map(|measure| measure.what.as_str()).collect::<Vec<_>>())
        .bind(measures.iter().map(|measure| measure.queue.as_str()).collect::<Vec<_>>())
        .bind(measures.iter().map(|measure| measure.kind.as_str()).collect::<Vec<_>>())
        .bind(measures.iter().map(|measure| measure.bucket).collect::<Vec<_>>())
        .bind(measures.iter().map(|measure| measure.value).collect::<Vec<_>>())
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

const TAKE_MINUTE: &str = "
    update longshore.upkeep
       set looked_at = date_trunc('minute', longshore.clock())
     where name = 'samples'
       and looked_at is distinct from date_trunc('minute', longshore.clock())";

pub(super) async fn put_samples(tx: &mut Tx<'_>, samples: &[NewMeasure]) -> Sql<bool> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let is_first = sqlx::query(tx.sql(TAKE_MINUTE)).execute(&mut *tx.connection).await?.rows_affected() > 0;
    if is_first {
        put_measures(tx, samples).await?;
    }
    transaction.commit().await?;
    Ok(is_first)
}

const MEASURED: &str = "
    select minute,
           what,
           case when $4 then queue else '' end,
           case when $5 then kind else '' end,
           bucket,
           case when what = 'overdue' then max(value) else sum(value)::int8 end
      from longshore.measures
     where (minute >= $1
         or (minute = $2 and minute < $3))   -- minutes folded into an hour
       and ($6::text[] is null or queue = any($6))
       -- Depths and ages are also stored for all queues together.
       and (what in ('waited', 'failed') or $4 or $6 is not null or queue = '')
     group by 1, 2, 3, 4, 5
     order by 1, 2, 3, 4, 5";

pub(super) async fn measured(tx: &mut Tx<'_>, filter: &HistoryFilter) -> Sql<Vec<Measured>> {
    let (minutes_from, _) = bounds(tx).await?;
    let rows = sqlx::query(tx.sql(MEASURED))
        .bind(start_of(60, filter.since))
        .bind(start_of(60 * 60, filter.since))
        .bind(minutes_from)
        .bind(filter.detail.has_queues())
        .bind(filter.detail.has_kinds())
        .bind(&filter.queues)
        .fetch_all(&mut *tx.connection)
        .await?;
    let measured = |row: &PgRow| -> Sql<Measured> {
        Ok(Measure {
            minute: row.try_get(0)?,
            what: What::from_stored(row.try_get(1)?)?,
            queue: row.try_get(2)?,
            kind: row.try_get(3)?,
            bucket: row.try_get(4)?,
            value: row.try_get(5)?,
        }
        .into())
    };
    rows.iter().map(measured).collect()
}

/// From when on there are minutes, and from when on there are hours.
async fn bounds(tx: &mut Tx<'_>) -> Sql<(DateTime<Utc>, DateTime<Utc>)> {
    let now: DateTime<Utc> =
        sqlx::query_scalar(tx.sql("select longshore.clock()")).fetch_one(&mut *tx.connection).await?;
    let before = |hours| start_of(60 * 60, now - chrono::TimeDelta::hours(hours));
    Ok((before(MINUTES_KEPT_HOURS), before(24 * KEPT_DAYS)))
}

const REMOVE: &str = "
    delete from longshore.measures
     where ctid = any(array(
             select ctid
               from longshore.measures
              where minute < $1
              limit $2))";

const FOLD: &str = concat!(
    "
    with deleted as (
      delete from longshore.measures
       where ctid = any(array(
               select ctid
                 from longshore.measures
                where minute < $1
                  and minute <> date_trunc('hour', minute, 'UTC')
                order by minute
                limit $2))
      returning date_trunc('hour', minute, 'UTC') as hour, what, queue, kind, bucket, value),
    folded as (
      insert into longshore.measures as m (minute, what, queue, kind, bucket, value)
      select hour, what, queue, kind, bucket,
             case when what in ('waited', 'failed') then sum(value) else max(value) end
        from deleted
       group by hour, what, queue, kind, bucket
          ",
    merge!(),
    ")
    select count(*) from deleted"
);

pub(super) async fn fold_measures(tx: &mut Tx<'_>, step: u32) -> Sql<u64> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    if !takes_turn(tx, "measures").await? {
        return Ok(0);
    }
    let (minutes_from, hours_from) = bounds(tx).await?;
    let remove = sqlx::query(tx.sql(REMOVE)).bind(hours_from).bind(i64::from(step));
    let removed = remove.execute(&mut *tx.connection).await?.rows_affected();
    let fold = sqlx::query_scalar::<_, i64>(tx.sql(FOLD)).bind(minutes_from).bind(i64::from(step));
    let folded = fold.fetch_one(&mut *tx.connection).await?;
    transaction.commit().await?;
    Ok(removed + folded.unsigned_abs())
}
