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
use super::tx::{Fault, Sql, Tx};
use crate::error::Error;
use crate::store::{Delivered, Emitted, EventRecord};

/// The setting ends with the statement.
const EMIT: &str = "
    insert into longshore.events (name, emitted_at, payload)
    select $1, longshore.clock(), $2::text::json
     where set_config('lock_timeout', $3, true) <> ''
        on conflict (name) do nothing";

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

const EVENTS: &str = "
    select name, payload::text, emitted_at
      from longshore.events
     where name = any($1)
     order by emitted_at, name";

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

const IS_ANY_EMITTED: &str = "
    select exists (
      select 1
        from longshore.events
       where name = any($1))";

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

const FRESH: &str = "
    select name
      from longshore.events
     where fresh
     order by emitted_at
     limit $1
       for no key update skip locked";

/// In the order in which suspensions lock the names.
const LOCK_DELIVERED: &str = "
    select count(pg_advisory_xact_lock(hashtextextended('longshore.events:' || name, 0)))
      from (select name from unnest($1::text[]) as n(name) order by name) as sorted";

/// Wakes the jobs that wait for these events. A wait whose job is locked by another
/// transaction stays, and so does its event. Others are deleted, also those of jobs that no
/// longer wait.
const WAKE: &str = "
    with awaited as (
      select w.event, w.job, w.lease_no
        from longshore.waits w
       where w.event = any($1)),
    unlocked as materialized (
      select r.ctid as row_id, r.id
        from longshore.ready r
       where exists (
               select 1
                 from awaited a
                where a.job = r.id
                  and a.lease_no = r.lease_no)
         and r.id = any(array(select job from awaited))
       order by r.id
         for update skip locked),
    locked as materialized (
      select a.event, a.job
        from awaited a
        join longshore.ready r
          on r.id = a.job
         and r.lease_no = a.lease_no
       where not exists (
               select 1
                 from unlocked u
                where u.id = a.job)),
    deleted as (
      delete from longshore.ready
       where ctid = any(array(select row_id from unlocked))
      returning *),
    woken as (
      insert into longshore.ready
             (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select id, least(run_at, longshore.clock()), longshore.clock(), timeout_ms, lease_no, priority,
             attempt, max_attempts, interruptions, keyed, kind, queue, flags
        from deleted),
    forgotten as (
      delete from longshore.waits w
       where w.event = any($1)
         and not exists (
               select 1
                 from locked l
                where l.event = w.event
                  and l.job = w.job)),
    delivered as (
      update longshore.events e
         set fresh = false
       where e.name = any($1)
         and not exists (
               select 1
                 from locked l
                where l.event = e.name))
    select array(select queue from deleted), (select count(*) from locked)";

pub(super) async fn deliver(tx: &mut Tx<'_>, limit: u32) -> Sql<Delivered> {
    // Almost always there is nothing to deliver, and no transaction is needed.
    if !has_fresh(tx).await? {
        return Ok(Delivered::default());
    }
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    tx.limit_lock_waits(Duration::from_secs(2)).await?;
    let names: Vec<String> =
        sqlx::query_scalar(tx.sql(FRESH)).bind(i64::from(limit)).fetch_all(&mut *tx.connection).await?;
    sqlx::query(tx.sql(LOCK_DELIVERED)).bind(&names).execute(&mut *tx.connection).await?;
    let row = sqlx::query(tx.sql(WAKE)).bind(&names).fetch_one(&mut *tx.connection).await?;
    let (queues, locked): (Vec<String>, i64) = (row.try_get(0)?, row.try_get(1)?);
    transaction.commit().await?;
    Ok(Delivered { queues, more: locked == 0 && names.len() == limit as usize })
}

const REMOVE_EVENTS: &str = "
    delete from longshore.events
     where name = any(array(
             select name
               from longshore.events
              where emitted_at < longshore.clock() - $1 * interval '1 microsecond'
                and not fresh
              order by emitted_at
              limit $2
                for update skip locked))";

pub(super) async fn remove_events(tx: &mut Tx<'_>, age: Duration, limit: u32) -> Sql<u64> {
    let done = sqlx::query(tx.sql(REMOVE_EVENTS))
        .bind(i64::try_from(age.as_micros()).unwrap_or(i64::MAX))
        .bind(i64::from(limit))
        .execute(&mut *tx.connection)
        .await?;
    Ok(done.rows_affected())
}
