//! Events: facts with a name that jobs can wait for. Emits them, and wakes the jobs that wait.
//!
//! An event must not be lost, whether it is emitted before a job waits for it, afterwards or
//! at the same moment. A suspension holds a shared lock on the names of its events, then reads
//! the events in a new statement. A delivery holds the exclusive lock on a name, then reads the
//! waits in a new statement. So either the suspension sees the event, or the delivery sees the
//! wait. On SQLite, there is one writer at a time.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;

use super::KeyWait;
use super::db::{Engine, How, Row, Rows, Sql, Statement, args};
use crate::error::{Error, Result};

/// The maximum length of an event's payload, in bytes of JSON.
pub const MAX_EVENT: usize = 64 * 1024;

/// How long events are kept. The SQL function `emit` repeats this number.
pub(super) const RETENTION: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// The maximum number of events per delivery, and the literal limit in [`FRESH`].
const MAX_EVENTS: usize = 100;

/// An event.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct EventRecord {
    /// Its name.
    pub name: String,
    /// Its payload.
    pub payload: Box<RawValue>,
    /// When it was emitted.
    pub emitted_at: DateTime<Utc>,
}

/// Whether an emit stored the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Emitted {
    /// It is the first with its name.
    First,
    /// An event with this name exists. It stays as it is.
    Repeated,
}

/// The result of one step of delivery.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// The queues of the jobs that are due now, one item per job.
    pub queues: Vec<String>,
    /// Whether more events may wait for delivery.
    pub more: bool,
    /// Where the next step starts, if there is more; `None` at the first event.
    pub after: Option<EventPlace>,
}

/// The place of an event in the order in which events are delivered: when it was emitted, and its name.
pub type EventPlace = (DateTime<Utc>, String);

/// Events. An event that may be removed counts as absent: it was emitted more than 7 days ago, it is
/// delivered, and no job that it woke still has to read it.
#[async_trait]
pub trait Events {
    /// Stores an event, unless one with its name exists. Wakes nobody: [`deliver`](Events::deliver) does.
    async fn emit(&self, name: &str, payload: &RawValue) -> Result<Emitted>;

    /// Returns those of the named events that exist, the earliest first.
    async fn events(&self, names: &[String]) -> Result<Vec<EventRecord>>;

    /// Makes up to `limit` jobs due that wait for new events, those after the event `after` in the order in
    /// which they were emitted. Skips locked jobs; their events are delivered to them later.
    async fn deliver(&self, after: Option<&EventPlace>, limit: u32) -> Result<Delivered>;

    /// Removes up to `limit` events whose time has passed. Returns how many.
    async fn remove_events(&self, limit: u32) -> Result<u64>;
}

#[async_trait]
impl<E: Engine> Events for E {
    async fn emit(&self, name: &str, payload: &RawValue) -> Result<Emitted> {
        let how = How::SLOW.waiting_for_clients(KeyWait::Long);
        self.call(how, (name.to_owned(), payload.to_owned()), |rows, (name, payload)| {
            Box::pin(emit(rows, name, payload))
        })
        .await
    }

    async fn events(&self, names: &[String]) -> Result<Vec<EventRecord>> {
        self.call(How::READ, names.to_vec(), |rows, names| Box::pin(events(rows, names))).await
    }

    async fn deliver(&self, after: Option<&EventPlace>, limit: u32) -> Result<Delivered> {
        // Almost always there is nothing to deliver, and nothing is locked or written.
        if !self.call(How::READ, (), |rows, ()| Box::pin(has_fresh(rows))).await? {
            return Ok(Delivered::default());
        }
        let how = How::QUICK.waiting_up_to(Duration::from_secs(2));
        self.call(how, (after.cloned(), limit), |rows, (after, limit)| {
            Box::pin(deliver(rows, after.as_ref(), *limit))
        })
        .await
    }

    async fn remove_events(&self, limit: u32) -> Result<u64> {
        self.call(How::SLOW, limit, |rows, limit| Box::pin(remove_events(rows, *limit))).await
    }
}

/// Whether an event, `e`, counts as absent: its time ($retention) has passed, and no job that it woke still
/// has to read it. A wait that is not woken does not keep it: that job waits for the next one.
macro_rules! is_expired {
    ($retention:literal) => {
        concat!(
            "(e.emitted_at < longshore.clock() - ",
            $retention,
            "
             and not e.fresh
             and not exists (
                   select 1
                     from longshore.waits w
                    where w.event = e.name
                      and w.woken))"
        )
    };
}
pub(super) use is_expired;

/// The setting ends with the statement.
static EMIT: Statement = Statement::new(concat!(
    "
    insert into longshore.events as e (name, emitted_at, payload)
    select $1, longshore.clock(), $2::text::json
     where set_config('lock_timeout', $3, true) <> ''
        on conflict (name) do update
       set emitted_at = excluded.emitted_at,
           payload = excluded.payload,
           fresh = true
     where ",
    is_expired!("$4")
));

async fn emit(rows: &mut dyn Rows, name: &str, payload: &RawValue) -> Sql<Emitted> {
    let lock_timeout = rows.lock_timeout();
    match rows.execute(&EMIT, args![name, payload, &lock_timeout, RETENTION]).await {
        Ok(0) => Ok(Emitted::Repeated),
        Ok(_) => Ok(Emitted::First),
        Err(fault) if fault.is_lock_timeout() => Err(Error::locked(
            "name: another client's open transaction emits this event, and did not end in time; \
             end that transaction, or try again later",
        )
        .into()),
        Err(fault) => Err(fault),
    }
}

static EVENTS: Statement = Statement::new(concat!(
    "
    select e.name, e.payload::text as payload, e.emitted_at
      from longshore.events e
     where e.name = any($1::text[])
       and not ",
    is_expired!("$2"),
    "
     order by e.emitted_at, e.name"
));

async fn events(rows: &mut dyn Rows, names: &[String]) -> Sql<Vec<EventRecord>> {
    let read = |mut row: Row| {
        Ok(EventRecord {
            name: row.take("name")?,
            payload: row.take("payload")?,
            emitted_at: row.take("emitted_at")?,
        })
    };
    rows.rows(&EVENTS, args![names, RETENTION]).await?.into_iter().map(read).collect()
}

static HAS_FRESH: Statement = Statement::new(
    "
    select 1
      from longshore.events
     where fresh
     limit 1",
);

/// Whether an event waits for delivery.
async fn has_fresh(rows: &mut dyn Rows) -> Sql<bool> {
    rows.has_row(&HAS_FRESH, &[]).await
}

static FRESH: Statement = Statement::new(
    "
    select name, emitted_at
      from longshore.events
     where fresh
       and ($1::timestamptz is null or (emitted_at, name) > ($1, $2))
     order by emitted_at, name
     limit 100
       for no key update skip locked",
);

/// Waits that are left are locked, or more than the step may wake.
static DELIVERED: Statement = Statement::new(
    "
    update longshore.events as e
       set fresh = false
     where e.name = any($1::text[])
       and not exists (
             select 1
               from longshore.waits w
              where w.event = e.name
                and not w.woken)",
);

/// What a step of delivery has done.
pub(crate) struct Woken {
    /// The queues of the jobs that are due now, one item per job.
    pub(super) queues: Vec<String>,
    /// How many waits are woken, including those whose job has moved on.
    pub(super) waits: u32,
}

async fn deliver(rows: &mut dyn Rows, after: Option<&EventPlace>, limit: u32) -> Sql<Delivered> {
    let args = args![after.map(|after| after.0), after.map(|after| after.1.as_str())];
    let fresh = rows.rows(&FRESH, args).await?;
    let place = |mut row: Row| Ok((row.take("emitted_at")?, row.take("name")?));
    let fresh: Vec<EventPlace> = fresh.into_iter().map(place).collect::<Sql<_>>()?;
    let names: Vec<String> = fresh.iter().map(|(_, name)| name.clone()).collect();
    rows.lock_each("events", &names).await?;
    let Woken { queues, waits } = rows.wake(&names, limit).await?;
    rows.execute(&DELIVERED, args![&names]).await?;
    if waits == limit {
        // These events may have more waits.
        return Ok(Delivered { queues, more: true, after: after.cloned() });
    }
    // What is left of these events is locked. The next ones must not wait for it.
    Ok(Delivered { queues, more: fresh.len() == MAX_EVENTS, after: fresh.into_iter().next_back() })
}

static REMOVE_EVENTS: Statement = Statement::new(concat!(
    "
    delete from longshore.events
     where name = any(array(
             select e.name
               from longshore.events e
              where ",
    is_expired!("$2"),
    "
              order by e.emitted_at
              limit $1
                for update skip locked))"
));

async fn remove_events(rows: &mut dyn Rows, limit: u32) -> Sql<u64> {
    rows.execute(&REMOVE_EVENTS, args![limit, RETENTION]).await
}
