//! Events: emitting them, and waking the jobs that wait for them.
//!
//! An event must not be lost, whether it is emitted before a job waits for it, afterwards or
//! at the same moment. A suspension holds a shared lock on the names of its events, then reads
//! the events in a new statement. A delivery holds the exclusive lock on a name, then reads the
//! waits in a new statement. So either the suspension sees the event, or the delivery sees the
//! wait.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::Row;

use super::inspect::raw;
use super::operate::requeue_now;
use super::turns::add_turns;
use super::tx::{Fault, Sql, Tx};
use crate::error::Error;
use crate::store::{Delivered, Emitted, EventPlace, EventRecord};

/// Whether an event, `e`, counts as absent: its time has passed, and no job that it woke still
/// has to read it. A wait that is not woken does not keep it: that job waits for the next one.
macro_rules! is_expired {
    () => {
        "(e.emitted_at < longshore.clock() - interval '7 days'
             and not e.fresh
             and not exists (
                   select 1
                     from longshore.waits w
                    where w.event = e.name
                      and w.woken))"
    };
}

/// The setting ends with the statement.
const EMIT: &str = concat!(
    "
    insert into longshore.events as e (name, emitted_at, payload)
    select $1, longshore.clock(), $2::text::json
     where set_config('lock_timeout', $3, true) <> ''
        on conflict (name) do update
       set emitted_at = excluded.emitted_at,
           payload = excluded.payload,
           fresh = true
     where ",
    is_expired!()
);

/// `max_wait` limits how long the emit waits for another client's open transaction that
/// emits an event with the same name.
pub(super) async fn emit(
    tx: &mut Tx<'_>,
    name: &str,
    payload: &RawValue,
    max_wait: Duration,
) -> Sql<Emitted> {
    let query = sqlx::query(tx.sql(EMIT))
        .bind(name)
        .bind(payload.get())
        .bind(format!("{}ms", max_wait.as_millis().max(1)));
    match query.execute(&mut *tx.connection).await.map_err(Fault::from) {
        Ok(done) if done.rows_affected() > 0 => Ok(Emitted::First),
        Ok(_) => Ok(Emitted::Repeated),
        Err(fault) if fault.is_lock_timeout() => Err(Error::locked(
            "name: another client's open transaction emits this event, and did not end in time; \
             end that transaction, or try again later",
        )
        .into()),
        Err(fault) => Err(fault),
    }
}

const EVENTS: &str = concat!(
    "
    select e.name, e.payload::text, e.emitted_at
      from longshore.events e
     where e.name = any($1)
       and not ",
    is_expired!(),
    "
     order by e.emitted_at, e.name"
);

pub(super) async fn events(tx: &mut Tx<'_>, names: &[String]) -> Sql<Vec<EventRecord>> {
    let rows = sqlx::query(tx.sql(EVENTS)).bind(names).fetch_all(&mut *tx.connection).await?;
    let mut events = Vec::with_capacity(rows.len());
    for row in &rows {
        events.push(EventRecord {
            name: row.try_get(0)?,
            payload: raw(row.try_get(1)?)?,
            emitted_at: row.try_get(2)?,
        });
    }
    Ok(events)
}

/// The names are sorted, so that two transactions never wait for each other.
const LOCK_AWAITED: &str = "
    select count(pg_advisory_xact_lock_shared(hashtextextended('longshore.events:' || name, 0)))
      from (select name from unnest($1::text[]) as n(name) order by name) as sorted";

const IS_ANY_EMITTED: &str = concat!(
    "
    select exists (
      select 1
        from longshore.events e
       where e.name = any($1)
         and not ",
    is_expired!(),
    ")"
);

/// Whether one of these events has been emitted. Until the transaction ends, none of them is
/// delivered.
pub(super) async fn is_any_emitted(tx: &mut Tx<'_>, names: &[String]) -> Sql<bool> {
    if names.is_empty() {
        return Ok(false);
    }
    sqlx::query(tx.sql(LOCK_AWAITED)).bind(names).execute(&mut *tx.connection).await?;
    Ok(sqlx::query_scalar(tx.sql(IS_ANY_EMITTED)).bind(names).fetch_one(&mut *tx.connection).await?)
}

const HAS_FRESH: &str = "
    select exists (
      select 1
        from longshore.events
       where fresh)";

/// Whether an event waits for delivery.
async fn has_fresh(tx: &mut Tx<'_>) -> Sql<bool> {
    Ok(sqlx::query_scalar(tx.sql(HAS_FRESH)).fetch_one(&mut *tx.connection).await?)
}

/// The maximum number of events per delivery, and the literal limit in [`FRESH`].
const MAX_EVENTS: usize = 100;

const FRESH: &str = "
    select name, emitted_at
      from longshore.events
     where fresh
       and ($1::timestamptz is null or (emitted_at, name) > ($1, $2))
     order by emitted_at, name
     limit 100
       for no key update skip locked";

/// In the order in which suspensions lock the names.
const LOCK_DELIVERED: &str = "
    select count(pg_advisory_xact_lock(hashtextextended('longshore.events:' || name, 0)))
      from (select name from unnest($1::text[]) as n(name) order by name) as sorted";

/// Wakes up to `$2` jobs that wait for these events. Each job is found by its primary key,
/// whatever the planner assumes about the tables. A wait that is locked by another
/// transaction, or whose job is, stays as it is, and its event stays fresh. So does an event with more waits.
const WAKE: &str = concat!(
    "
    with awaited as materialized (
      select p.event, p.job, w.row_id as wait_row, r.row_id as ready_row
        from (select event, job, lease_no
                from longshore.waits
               where event = any($1)
                 and not woken
               order by event, job
              offset 0) as p
       cross join lateral (
               select w.ctid as row_id
                 from longshore.waits w
                where w.event = p.event
                  and w.job = p.job
                limit 1
                  for no key update skip locked) as w
        left join lateral (
               select w.ctid as row_id
                 from longshore.ready w
                where w.id = p.job
                  and w.lease_no = p.lease_no
                  and w.held is not true   -- it waits for other tasks
                limit 1
                  for update skip locked) as r
          on true
        left join lateral (
               select true as is_waiting
                 from longshore.ready w
                where w.id = p.job
                  and w.lease_no = p.lease_no
                  and w.held is not true
                limit 1) as o
          on true
       where r.row_id is not null
          or o.is_waiting is null
       limit $2),
    deleted as (
      delete from longshore.ready
       where ctid = any(array(select ready_row from awaited))
      returning *),",
    requeue_now!(),
    ",
    marked as (
      update longshore.waits
         set woken = true
       where ctid = any(array(select wait_row from awaited))),
    delivered as (
      update longshore.events e
         set fresh = false
       where e.name = any($1)
         and not exists (
               select 1
                 from longshore.waits w
                where w.event = e.name
                  and not w.woken
                  and (w.event, w.job) not in (select event, job from awaited)))
    select array(select queue from deleted), (select count(*) from awaited)"
);

pub(super) async fn deliver(tx: &mut Tx<'_>, after: Option<&EventPlace>, limit: u32) -> Sql<Delivered> {
    // Almost always there is nothing to deliver, and no transaction is needed.
    if !has_fresh(tx).await? {
        return Ok(Delivered::default());
    }
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(Duration::from_secs(2)).await?;
    let fresh: Vec<(String, DateTime<Utc>)> = sqlx::query_as(tx.sql(FRESH))
        .bind(after.map(|after| after.0))
        .bind(after.map(|after| &after.1))
        .fetch_all(&mut *tx.connection)
        .await?;
    let names: Vec<&str> = fresh.iter().map(|(name, _)| name.as_str()).collect();
    sqlx::query(tx.sql(LOCK_DELIVERED)).bind(&names).execute(&mut *tx.connection).await?;
    let row =
        sqlx::query(tx.sql(WAKE)).bind(&names).bind(i64::from(limit)).fetch_one(&mut *tx.connection).await?;
    let (queues, waits): (Vec<String>, i64) = (row.try_get(0)?, row.try_get(1)?);
    transaction.commit().await?;
    if waits == i64::from(limit) {
        // These events may have more waits.
        return Ok(Delivered { queues, more: true, after: after.cloned() });
    }
    // What is left of these events is locked. The next ones must not wait for it.
    let more = fresh.len() == MAX_EVENTS;
    let last = fresh.into_iter().next_back().map(|(name, emitted_at)| (emitted_at, name));
    Ok(Delivered { queues, more, after: last })
}

const REMOVE_EVENTS: &str = concat!(
    "
    delete from longshore.events
     where name = any(array(
             select e.name
               from longshore.events e
              where ",
    is_expired!(),
    "
              order by e.emitted_at
              limit $1
                for update skip locked))"
);

pub(super) async fn remove_events(tx: &mut Tx<'_>, limit: u32) -> Sql<u64> {
    let done = sqlx::query(tx.sql(REMOVE_EVENTS)).bind(i64::from(limit)).execute(&mut *tx.connection).await?;
    Ok(done.rows_affected())
}
