//! What happens to a lease while it lives: progress and checkpoints, and the
//! heartbeat that keeps it. How it ends is in `settle`.

use rusqlite::params;

use super::*;
use crate::lifecycle::Flags;

// ---- while it runs -------------------------------------------------------

fn fenced(changed: usize) -> Fenced {
    match changed {
        0 => Fenced::LeaseLost,
        _ => Fenced::Held,
    }
}

pub(super) fn mark_started(tx: &Tx<'_>, lease: &Lease) -> Sql<Fenced> {
    const START: &str = "
        update running
           set started_at = coalesce(started_at, ?4)
         where id = ?1
           and lease_no = ?2
           and worker = ?3";
    let Lease { id, lease_no, worker } = lease;
    tx.execute(START, params![id.0.as_bytes(), lease_no, worker.0.as_bytes(), tx.now()?]).map(fenced)
}

pub(super) fn progress(tx: &Tx<'_>, reports: &[(Lease, Box<RawValue>)]) -> Sql<Vec<Fenced>> {
    const REPORT: &str = "
        update running
           set progress = ?4
         where id = ?1
           and lease_no = ?2
           and worker = ?3";
    let report = |(lease, data): &(Lease, Box<RawValue>)| {
        let Lease { id, lease_no, worker } = lease;
        tx.execute(REPORT, params![id.0.as_bytes(), lease_no, worker.0.as_bytes(), data.get()]).map(fenced)
    };
    reports.iter().map(report).collect()
}

pub(super) fn save_checkpoint(tx: &Tx<'_>, lease: &Lease, data: &RawValue) -> Sql<Fenced> {
    const SAVE: &str = "
        insert into checkpoints (job, lease_no, data, saved_at)
        select id, lease_no, ?4, ?5
          from running
         where id = ?1
           and lease_no = ?2
           and worker = ?3
            on conflict (job) do update
           set lease_no = excluded.lease_no,
               data = excluded.data,
               saved_at = excluded.saved_at";
    let Lease { id, lease_no, worker } = lease;
    tx.execute(SAVE, params![id.0.as_bytes(), lease_no, worker.0.as_bytes(), data.get(), tx.now()?])
        .map(fenced)
}

pub(super) fn checkpoint(tx: &Tx<'_>, id: JobId) -> Sql<Option<Box<RawValue>>> {
    const NEWEST: &str = "
        select data
          from checkpoints
         where job = ?1";
    Ok(tx.row(NEWEST, [id.0.as_bytes()], |row| row.json(0))?.flatten())
}

pub(super) fn assert_lease(tx: &Tx<'_>, lease: &Lease) -> Sql<Fenced> {
    Ok(match raised_flags(tx, lease)? {
        Some(_) => Fenced::Held,
        None => Fenced::LeaseLost,
    })
}

/// What has been asked of a job under this lease; `None` if it is not live.
pub(super) fn raised_flags(tx: &Tx<'_>, lease: &Lease) -> Sql<Option<Flags>> {
    const FLAGS: &str = "
        select cancel_requested,
               superseded
          from running
         where id = ?1
           and lease_no = ?2
           and worker = ?3";
    let Lease { id, lease_no, worker } = lease;
    tx.row(FLAGS, params![id.0.as_bytes(), lease_no, worker.0.as_bytes()], |row| {
        Ok(Flags { cancel_requested: row.get(0)?, superseded: row.get(1)? })
    })
}

// ---- workers -------------------------------------------------------------

pub(super) fn register(tx: &Tx<'_>, worker: &NewWorker) -> Sql<()> {
    const REGISTER: &str = "
        insert into workers (id, name, queues, kinds, concurrency, stale_after_ms, started_at, heartbeat_at)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7)
            on conflict (id) do update
           set queues = excluded.queues, kinds = excluded.kinds, concurrency = excluded.concurrency,
               heartbeat_at = excluded.heartbeat_at
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
        ],
    )?;
    Ok(())
}

pub(super) fn beat(tx: &Tx<'_>, worker: WorkerId, held: &[Lease]) -> Sql<Beat> {
    const REFRESH: &str = "
        update workers
           set heartbeat_at = ?2
         where id = ?1
           and dead_at is null";
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

pub(super) fn leases(tx: &Tx<'_>, worker: WorkerId) -> Sql<Vec<Lease>> {
    const NAMING: &str = "
        select id,
               lease_no
          from running
         where worker = ?1
         order by id";
    tx.rows(NAMING, [worker.0.as_bytes()], |row| Ok(Lease { id: row.job(0)?, lease_no: row.get(1)?, worker }))
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
    const FORGET: &str = "
        delete from workers
         where id = ?1";
    match tx.row(HOLDS_LEASES, [worker.0.as_bytes()], |_| Ok(()))? {
        Some(()) => tx.execute(DECLARE_DEAD, params![worker.0.as_bytes(), tx.now()?])?,
        None => tx.execute(FORGET, [worker.0.as_bytes()])?,
    };
    Ok(())
}
