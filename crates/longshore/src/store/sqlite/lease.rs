//! Live leases: the claims behind them, progress, checkpoints, and whether a lease is
//! still held. How leases end is in `settle`.

use std::sync::Arc;

use rusqlite::params;
use serde_json::value::RawValue;

use super::claim::read_options;
use super::tx::{Columns, Sql, Tx};
use crate::job::JobId;
use crate::rules::lifecycle::LeaseFlags;
use crate::store::{Claimed, Fenced, Lease, shared};

pub(super) fn claims(tx: &Tx<'_>, leases: &[Lease]) -> Sql<Vec<Option<Claimed>>> {
    const HELD: &str = "
        select j.payload,
               j.options,
               r.kind,
               r.timeout_ms,
               r.queue,
               r.attempt,
               r.max_attempts,
               r.interruptions,
               r.priority,
               r.flags,
               j.run_at,
               r.claimed_at,
               r.grp,
               r.gate is not null,
               r.flow
          from running r
         cross join jobs j on j.id = r.id
         where r.id = ?1
           and r.lease_no = ?2   -- fence: a newer lease owns the row
           and r.worker = ?3";
    let (mut kind, mut queue) = <(Arc<str>, Arc<str>)>::default();
    let mut held = tx.prepare(HELD)?;
    let mut claims = Vec::with_capacity(leases.len());
    for lease in leases {
        let Lease { id, lease_no, worker } = lease;
        let mut rows = held.query(params![id.0.as_bytes(), lease_no, worker.0.as_bytes()])?;
        let Some(row) = rows.next()? else {
            claims.push(None);
            continue;
        };
        claims.push(Some(Claimed {
            lease: *lease,
            kind: shared(&mut kind, row.get_ref(2)?.as_str()?),
            queue: shared(&mut queue, row.get_ref(4)?.as_str()?),
            priority: row.get(8)?,
            payload: row.get(0)?,
            attempt: row.get(5)?,
            max_attempts: row.get(6)?,
            interruptions: row.get(7)?,
            timeout: row.timeout(3)?,
            flags: row.list(9)?,
            options: read_options(row, 1, *id)?,
            run_at: row.time(10)?,
            claimed_at: row.time(11)?,
            group: row.get_ref(12)?.as_str_or_null()?.map(Into::into),
            gated: row.get(13)?,
            flow: row.flow(14)?,
        }));
    }
    Ok(claims)
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

pub(super) fn save_checkpoints(tx: &Tx<'_>, checkpoints: &[(Lease, Box<RawValue>)]) -> Sql<Vec<Fenced>> {
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
    let save = |(lease, data): &(Lease, Box<RawValue>)| {
        let Lease { id, lease_no, worker } = lease;
        tx.execute(SAVE, params![id.0.as_bytes(), lease_no, worker.0.as_bytes(), data.get(), tx.now()?])
            .map(fenced)
    };
    checkpoints.iter().map(save).collect()
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

/// The flags raised for this lease; `None` if it is not live.
pub(super) fn raised_flags(tx: &Tx<'_>, lease: &Lease) -> Sql<Option<LeaseFlags>> {
    const FLAGS: &str = "
        select cancel_requested,
               superseded
          from running
         where id = ?1
           and lease_no = ?2
           and worker = ?3";
    let Lease { id, lease_no, worker } = lease;
    tx.row(FLAGS, params![id.0.as_bytes(), lease_no, worker.0.as_bytes()], |row| {
        Ok(LeaseFlags { cancel_requested: row.get(0)?, superseded: row.get(1)? })
    })
}

pub(super) fn fenced(changed: usize) -> Fenced {
    if changed > 0 { Fenced::Held } else { Fenced::LeaseLost }
}
