//! Reads the claims behind live leases, and the flags of a lease. What else workers do under a lease is in
//! `store/lease.rs`.

use std::sync::Arc;

use rusqlite::params;

use super::claim::read_options;
use super::tx::{Columns, Sql, Tx};
use crate::rules::lifecycle::LeaseFlags;
use crate::store::{Claimed, Lease, shared};

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
