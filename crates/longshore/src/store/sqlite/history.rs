//! History for charts, by minute and later by hour.

use chrono::{DateTime, Utc};
use rusqlite::params;

use super::tx::{Columns, Sql, Tx, decoded, json_list};
use crate::store::{
    HistoryFilter, KEPT_DAYS, MINUTES_KEPT_HOURS, Measure, Measured, NewMeasure, What, start_of,
};

pub(super) fn put_measures(tx: &Tx<'_>, measures: &[NewMeasure]) -> Sql<()> {
    let minute = start_of(60, time(tx.now()?)).timestamp_micros();
    measures.iter().try_for_each(|measure| put(tx, minute, measure))
}

/// Numbers are added up; of depths and ages, the largest is kept.
fn put(tx: &Tx<'_>, minute: i64, measure: &NewMeasure) -> Sql<()> {
    const PUT: &str = "
        insert into measures (minute, what, queue, kind, bucket, value)
        values (?1, ?2, ?3, ?4, ?5, ?6)
            on conflict (minute, what, queue, kind, bucket) do update
           set value = case when what in ('waited', 'failed') then value + excluded.value
                            else max(value, excluded.value) end";
    let NewMeasure { what, queue, kind, bucket, value } = measure;
    tx.execute(PUT, params![minute, what.as_str(), queue, kind, bucket, value])?;
    Ok(())
}

fn time(micros: i64) -> DateTime<Utc> {
    DateTime::from_timestamp_micros(micros).unwrap_or_default()
}

pub(super) fn put_samples(tx: &Tx<'_>, samples: &[NewMeasure]) -> Sql<bool> {
    const TAKE_MINUTE: &str = "
        update upkeep
           set looked_at = ?1
         where name = 'samples'
           and looked_at is not ?1";
    let minute = start_of(60, time(tx.now()?)).timestamp_micros();
    let is_first = tx.execute(TAKE_MINUTE, [minute])? > 0;
    if is_first {
        put_measures(tx, samples)?;
    }
    Ok(is_first)
}

pub(super) fn measured(tx: &Tx<'_>, filter: &HistoryFilter) -> Sql<Vec<Measured>> {
    const MEASURED: &str = "
        select minute,
               what,
               case when ?4 then queue else '' end,
               case when ?5 then kind else '' end,
               bucket,
               case when what = 'overdue' then max(value) else sum(value) end
          from measures
         where (minute >= ?1
             or (minute = ?2 and minute < ?3))   -- minutes folded into an hour
           and (?6 is null or queue in (select value from json_each(?6)))
           -- Depths and ages are also stored for all queues together.
           and (what in ('waited', 'failed') or ?4 or ?6 is not null or queue = '')
         group by 1, 2, 3, 4, 5
         order by 1, 2, 3, 4, 5";
    let (minutes_from, _) = bounds(tx)?;
    let params = params![
        start_of(60, filter.since).timestamp_micros(),
        start_of(60 * 60, filter.since).timestamp_micros(),
        minutes_from,
        filter.detail.has_queues(),
        filter.detail.has_kinds(),
        filter.queues.as_deref().map(json_list).transpose()?,
    ];
    tx.rows(MEASURED, params, |row| {
        Ok(Measure {
            minute: row.time(0)?,
            what: decoded(row.get_ref(1)?, What::from_stored)?,
            queue: row.get(2)?,
            kind: row.get(3)?,
            bucket: row.get(4)?,
            value: row.get(5)?,
        }
        .into())
    })
}

/// From when on there are minutes, and from when on there are hours.
fn bounds(tx: &Tx<'_>) -> Sql<(i64, i64)> {
    let now = time(tx.now()?);
    let before = |hours| start_of(60 * 60, now - chrono::TimeDelta::hours(hours)).timestamp_micros();
    Ok((before(MINUTES_KEPT_HOURS), before(24 * KEPT_DAYS)))
}

pub(super) fn fold_measures(tx: &Tx<'_>, step: u32) -> Sql<u64> {
    const HOUR: i64 = 3_600_000_000;
    const OLD: &str = "
        select minute, what, queue, kind, bucket, value
          from measures
         where minute < ?1
         limit ?2";
    const MINUTES: &str = "
        select minute, what, queue, kind, bucket, value
          from measures
         where minute >= ?1
           and minute < ?2
           and minute % ?3 <> 0
         limit ?4";
    const TAKE: &str = "
        delete from measures
         where minute = ?1
           and what = ?2
           and queue = ?3
           and kind = ?4
           and bucket = ?5";
    let read = |row: &rusqlite::Row<'_>| -> rusqlite::Result<(i64, NewMeasure)> {
        let what = decoded(row.get_ref(1)?, What::from_stored)?;
        let (queue, kind, bucket, value) = (row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?);
        Ok((row.get(0)?, NewMeasure { what, queue, kind, bucket, value }))
    };
    let (minutes_from, hours_from) = bounds(tx)?;
    let old = tx.rows(OLD, params![hours_from, step], read)?;
    let minutes = tx.rows(MINUTES, params![hours_from, minutes_from, HOUR, step], read)?;
    for (minute, NewMeasure { what, queue, kind, bucket, .. }) in old.iter().chain(&minutes) {
        tx.execute(TAKE, params![minute, what.as_str(), queue, kind, bucket])?;
    }
    for (minute, measure) in &minutes {
        put(tx, minute - minute.rem_euclid(HOUR), measure)?;
    }
    Ok((old.len() + minutes.len()) as u64)
}
