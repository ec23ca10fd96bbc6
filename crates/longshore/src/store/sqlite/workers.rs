//! Heartbeats of workers. The rest is in `store/workers.rs`.

use std::time::Duration;

use rusqlite::params;

use super::lease::raised_flags;
use super::tx::{Columns, Sql, Tx};
use crate::job::WorkerId;
use crate::store::{Beat, Lease, LiveLease};

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
