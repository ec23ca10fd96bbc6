//! Events: emitting them, and waking the jobs that wait for them. There is one writer at a
//! time, so an event and a wait cannot miss each other.

use rusqlite::params;
use serde_json::value::RawValue;

use super::operate::wake;
use super::tx::{Columns, Sql, Tx};
use crate::job::JobId;
use crate::store::{Delivered, Emitted, EventRecord, RETENTION_DAYS};

/// Whether an event counts as absent: its time has passed (`?1` is the oldest that is kept), and
/// no job that it woke still has to read it. A wait that is not woken does not keep it: that job
/// waits for the next one.
macro_rules! is_expired {
    () => {
        "(events.emitted_at < ?1
           and not events.fresh
           and not exists (
               select 1
                 from waits
                where waits.event = events.name
                  and waits.woken))"
    };
}

/// The oldest event that is kept.
pub(super) fn oldest_kept(tx: &Tx<'_>) -> Sql<i64> {
    const DAY: i64 = 24 * 60 * 60 * 1_000_000;
    Ok(tx.now()?.saturating_sub(RETENTION_DAYS * DAY))
}

pub(super) fn emit(tx: &Tx<'_>, name: &str, payload: &RawValue) -> Sql<Emitted> {
    const EMIT: &str = concat!(
        "insert into events (name, emitted_at, payload)
         values (?2, ?3, ?4)
             on conflict (name) do update
            set emitted_at = excluded.emitted_at,
                payload = excluded.payload,
                fresh = true
          where ",
        is_expired!()
    );
    let stored = tx.execute(EMIT, params![oldest_kept(tx)?, name, tx.now()?, payload.get()])?;
    Ok(if stored > 0 { Emitted::First } else { Emitted::Repeated })
}

pub(super) fn events(tx: &Tx<'_>, names: &[String]) -> Sql<Vec<EventRecord>> {
    const EVENT: &str = concat!(
        "select name,
                payload,
                emitted_at
           from events
          where name = ?2
            and not ",
        is_expired!()
    );
    let oldest = oldest_kept(tx)?;
    let mut events = Vec::new();
    for name in names {
        let event = tx.row(EVENT, params![oldest, name], |row| {
            Ok(EventRecord {
                name: row.get(0)?,
                payload: row.json(1)?.unwrap_or_default(),
                emitted_at: row.time(2)?,
            })
        })?;
        events.extend(event);
    }
    events.sort_by(|a, b| (a.emitted_at, &a.name).cmp(&(b.emitted_at, &b.name)));
    events.dedup_by(|a, b| a.name == b.name);
    Ok(events)
}

/// Whether one of these events has been emitted.
pub(super) fn is_any_emitted(tx: &Tx<'_>, names: &[String]) -> Sql<bool> {
    const EMITTED: &str = concat!(
        "select 1
           from events
          where name = ?2
            and not ",
        is_expired!()
    );
    let oldest = oldest_kept(tx)?;
    for name in names {
        if tx.row(EMITTED, params![oldest, name], |_| Ok(()))?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The maximum number of events per delivery.
const MAX_EVENTS: usize = 100;

/// Whether an event waits for delivery.
pub(super) fn has_fresh(tx: &Tx<'_>) -> Sql<bool> {
    const FRESH: &str = "
        select 1
          from events
         where fresh
         limit 1";
    Ok(tx.row(FRESH, [], |_| Ok(()))?.is_some())
}

pub(super) fn deliver(tx: &Tx<'_>, limit: u32) -> Sql<Delivered> {
    const FRESH: &str = "
        select name
          from events
         where fresh
         order by emitted_at
         limit 100";
    const PENDING: &str = "
        select job,
               lease_no
          from waits
         where event = ?1
           and not woken
         order by job
         limit ?2";
    const WOKEN: &str = "
        update waits
           set woken = true
         where event = ?1
           and job = ?2";
    const DELIVERED: &str = "
        update events
           set fresh = false
         where name = ?1";
    let names: Vec<String> = tx.rows(FRESH, [], |row| row.get(0))?;
    let mut queues = Vec::new();
    let mut left = limit;
    for name in &names {
        let pending: Vec<(JobId, i32)> =
            tx.rows(PENDING, params![name, left], |row| Ok((row.job(0)?, row.get(1)?)))?;
        for (id, lease_no) in &pending {
            queues.extend(wake(tx, *id, *lease_no)?);
            tx.execute(WOKEN, params![name, id.0.as_bytes()])?;
        }
        left -= pending.len() as u32;
        if left == 0 {
            // This event may have more waits.
            return Ok(Delivered { queues, more: true, after: None });
        }
        tx.execute(DELIVERED, [name])?;
    }
    Ok(Delivered { queues, more: names.len() == MAX_EVENTS, after: None })
}

pub(super) fn remove_events(tx: &Tx<'_>, limit: u32) -> Sql<u64> {
    const REMOVE: &str = concat!(
        "delete from events
          where name in (
                select name
                  from events
                 where ",
        is_expired!(),
        "
                 order by emitted_at
                 limit ?2)"
    );
    Ok(tx.execute(REMOVE, params![oldest_kept(tx)?, limit])? as u64)
}
