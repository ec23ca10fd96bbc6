//! Events: emitting them, and waking the jobs that wait for them.
//!
//! An event must not be lost, whether it is emitted before a job waits for it, afterwards or
//! at the same moment. A suspension holds a shared lock on the names of its events, then reads
//! the events in a new statement. A delivery holds the exclusive lock on a name, then reads the
//! waits in a new statement. So either the suspension sees the event, or the delivery sees the
//! wait.

use std::time::Duration;

use serde_json::value::RawValue;
use sqlx::Row;

use super::inspect::raw;
use super::operate::requeue_now;
use super::turns::add_turns;
use super::tx::{Fault, Sql, Tx};
use crate::error::Error;
use crate::store::{Delivered, Emitted, EventRecord};

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
    select name
      from longshore.events
     where fresh
     order by emitted_at
     limit 100
       for no key update skip locked";

/// In the order in which suspensions lock the names.
const LOCK_DELIVERED: &str = "
    select count(pg_advisory_xact_lock(hashtextextended('longshore.events:' || name, 0)))
      from (select name from unnest($1::text[]) as n(name) order by name) as sorted";

/// Wakes up to `$2` jobs that wait for these events. Each job is found by its primary key,
/// whatever the planner assumes about the tables. A wait whose job is locked by another
/// transaction stays as it is, and its event stays fresh. So does an event with more waits.
const WAKE: &str = concat!(
    "
    with awaited as materialized (
      select event, job, lease_no
        from longshore.waits
       where event = any($1)
         and not woken
       order by event, job
       limit $2),
    unlocked as materialized (
      select a.job, r.row_id
        from (select distinct job, lease_no from awaited) as a
       cross join lateral (
               select w.ctid as row_id
                 from longshore.ready w
                where w.id = a.job
                  and w.lease_no = a.lease_no
                  and w.held is not true   -- it waits for other tasks
                limit 1
                  for update skip locked) as r),
    locked as materialized (
      select a.event, a.job
        from awaited a
       where a.job not in (select job from unlocked)
         and exists (
               select 1
                 from longshore.ready w
                where w.id = a.job
                  and w.lease_no = a.lease_no
                  and w.held is not true)),
    deleted as (
      delete from longshore.ready
       where ctid = any(array(select row_id from unlocked))
      returning *),",
    requeue_now!(),
    ",
    marked as (
      update longshore.waits w
         set woken = true
        from awaited a
       where w.event = a.event
         and w.job = a.job
         and a.job not in (select job from locked)),
    delivered as (
      update longshore.events e
         set fresh = false
       where e.name = any($1)
         and e.name not in (select event from locked)
         and not exists (
               select 1
                 from longshore.waits w
                where w.event = e.name
                  and not w.woken
                  and (w.event, w.job) not in (select event, job from awaited)))
    select array(select queue from deleted), (select count(*) from awaited), (select count(*) from locked)"
);

pub(super) async fn deliver(tx: &mut Tx<'_>, limit: u32) -> Sql<Delivered> {
    // Almost always there is nothing to deliver, and no transaction is needed.
    if !has_fresh(tx).await? {
        return Ok(Delivered::default());
    }
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(Duration::from_secs(2)).await?;
    let names: Vec<String> = sqlx::query_scalar(tx.sql(FRESH)).fetch_all(&mut *tx.connection).await?;
    sqlx::query(tx.sql(LOCK_DELIVERED)).bind(&names).execute(&mut *tx.connection).await?;
    let row =
        sqlx::query(tx.sql(WAKE)).bind(&names).bind(i64::from(limit)).fetch_one(&mut *tx.connection).await?;
    let (queues, waits, locked): (Vec<String>, i64, i64) =
        (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    transaction.commit().await?;
    let is_full = waits == i64::from(limit) || names.len() == MAX_EVENTS;
    Ok(Delivered { queues, more: is_full && locked == 0 })
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
