//! Workers: registration, heartbeats, and the list that operators see.

use std::time::Duration;

use rusqlite::params;

use super::lease::raised_flags;
use super::tx::{Columns, Sql, Tx, json_list, micros};
use crate::job::WorkerId;
use crate::store::{Beat, Lease, LiveLease, NewWorker, Registration, SCHEMA_VERSION, WorkerRecord, millis};

pub(super) fn register(tx: &Tx<'_>, worker: &NewWorker) -> Sql<()> {
    const REGISTER: &str = "
        insert into workers
               (id, name, queues, kinds, concurrency, stale_after_ms, started_at, heartbeat_at, host, pid, version,
                schema_version)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9, ?10, ?11)
            on conflict (id) do update
           set queues = excluded.queues, kinds = excluded.kinds, concurrency = excluded.concurrency,
               heartbeat_at = excluded.heartbeat_at, schema_version = excluded.schema_version
         where workers.dead_at is null";
    let kinds = worker.kinds.as_deref().map(json_list).transpose()?;
    tx.execute(
        REGISTER,
        params![
            worker.id.0.as_bytes(),
            worker.name,
            json_list(&worker.queues)?,
            kinds,
            worker.concurrency,
            millis(worker.stale_after).max(1),
            tx.now()?,
            worker.host,
            worker.pid,
            worker.version,
            SCHEMA_VERSION,
        ],
    )?;
    Ok(())
}

const REFRESH: &str = "
    update workers
       set heartbeat_at = ?2
     where id = ?1
       and dead_at is null";

pub(super) fn beat(tx: &Tx<'_>, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
    if tx.execute(REFRESH, params![worker.0.as_bytes(), tx.now()?])? == 0 {
        return Ok(Beat::Dead);
    }
    let (mut lost, mut cancel) = (Vec::new(), Vec::new());
    for lease in held {
        match raised_flags(tx, lease)? {
            None => lost.push(*lease),
            Some(flags) if flags.cancel_requested => cancel.push(*lease),
            Some(_) => {}
        }
    }
    Ok(Beat::Alive { lost, cancel })
}

pub(super) fn beat_and_list(tx: &Tx<'_>, worker: WorkerId) -> Sql<Option<Vec<LiveLease>>> {
    const HELD: &str = "
        select id,
               lease_no,
               ?2 - claimed_at,
               interruptions > 0,
               cancel_requested
          from running
         where worker = ?1
         order by id";
    if tx.execute(REFRESH, params![worker.0.as_bytes(), tx.now()?])? == 0 {
        return Ok(None);
    }
    let leases = tx.rows(HELD, params![worker.0.as_bytes(), tx.now()?], |row| {
        Ok(LiveLease {
            lease: Lease { id: row.job(0)?, lease_no: row.get(1)?, worker },
            age: Duration::from_micros(row.get::<_, i64>(2)?.max(0) as u64),
            is_suspect: row.get(3)?,
            cancel_requested: row.get(4)?,
        })
    })?;
    Ok(Some(leases))
}

pub(super) fn registration(tx: &Tx<'_>, worker: WorkerId) -> Sql<Option<Registration>> {
    const REGISTRATION: &str = "
        select queues,
               stale_after_ms
          from workers
         where id = ?1";
    tx.row(REGISTRATION, [worker.0.as_bytes()], |row| {
        Ok(Registration {
            queues: row.list("queues")?,
            stale_after: row.timeout("stale_after_ms")?.unwrap_or_default(),
        })
    })
}

pub(super) fn holds_outside(tx: &Tx<'_>, worker: WorkerId, queues: &[String]) -> Sql<bool> {
    const HOLDS_OUTSIDE: &str = "
        select 1
          from running
         where worker = ?1
           and queue not in (select value from json_each(?2))
         limit 1";
    Ok(tx.row(HOLDS_OUTSIDE, params![worker.0.as_bytes(), json_list(queues)?], |_| Ok(()))?.is_some())
}

pub(super) fn leases(tx: &Tx<'_>, worker: WorkerId) -> Sql<Vec<Lease>> {
    const HELD: &str = "
        select id,
               lease_no
          from running
         where worker = ?1
         order by id";
    tx.rows(HELD, [worker.0.as_bytes()], |row| Ok(Lease { id: row.job(0)?, lease_no: row.get(1)?, worker }))
}

pub(super) fn cancels(tx: &Tx<'_>, worker: WorkerId) -> Sql<Vec<Lease>> {
    const CANCELS: &str = "
        select id,
               lease_no
          from running
         where worker = ?1
           and cancel_requested
         order by id";
    tx.rows(CANCELS, [worker.0.as_bytes()], |row| {
        Ok(Lease { id: row.job(0)?, lease_no: row.get(1)?, worker })
    })
}

pub(super) fn retire(tx: &Tx<'_>, worker: WorkerId) -> Sql<()> {
    const HOLDS_LEASES: &str = "
        select 1
          from running
         where worker = ?1
         limit 1";
    const DECLARE_DEAD: &str = "
        update workers
           set dead_at = ?2
         where id = ?1
           and dead_at is null";
    const DELETE: &str = "
        delete from workers
         where id = ?1";
    match tx.row(HOLDS_LEASES, [worker.0.as_bytes()], |_| Ok(()))? {
        Some(()) => tx.execute(DECLARE_DEAD, params![worker.0.as_bytes(), tx.now()?])?,
        None => tx.execute(DELETE, [worker.0.as_bytes()])?,
    };
    Ok(())
}

pub(super) fn workers(tx: &Tx<'_>, threshold: Option<Duration>) -> Sql<Vec<WorkerRecord>> {
    const ALL: &str = "
        select id,
               name,
               queues,
               kinds,
               concurrency,
               stale_after_ms,
               started_at,
               heartbeat_at,
               dead_at,
               heartbeat_at < ?1 - coalesce(?2, stale_after_ms * 1000) as stale,
               coalesce(held.leases, 0) as running,
               host,
               pid,
               version
          from workers
          left join (
               select worker,
                      count(*) as leases
                 from running
                group by worker) held
            on held.worker = workers.id
         order by started_at desc, id desc";
    tx.rows(ALL, params![tx.now()?, threshold.map(micros)], |row| {
        Ok(WorkerRecord {
            id: row.worker("id")?,
            name: row.get("name")?,
            queues: row.list("queues")?,
            kinds: row.maybe_list("kinds")?,
            concurrency: row.get("concurrency")?,
            stale_after: row.timeout("stale_after_ms")?.unwrap_or_default(),
            started_at: row.time("started_at")?,
            heartbeat_at: row.time("heartbeat_at")?,
            dead_at: row.maybe_time("dead_at")?,
            stale: row.get("stale")?,
            running: row.get::<_, u32>("running")?.into(),
            host: row.get("host")?,
            pid: row.get("pid")?,
            version: row.get("version")?,
        })
    })
}
