//! Wakes jobs that wait for events. The rest is in `store/events.rs`, and `steps.rs` reads the events of a job
//! that is suspended.

use rusqlite::params;

use super::operate::wake as wake_job;
use super::tx::{Columns, Sql, Tx};
use crate::job::JobId;
use crate::store::events::Woken;

pub(super) fn wake(tx: &Tx<'_>, events: &[String], limit: u32) -> Sql<Woken> {
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
    let (mut queues, mut waits) = (Vec::new(), 0);
    for event in events {
        let left = limit - waits;
        let pending: Vec<(JobId, i32)> =
            tx.rows(PENDING, params![event, left], |row| Ok((row.job(0)?, row.get(1)?)))?;
        for (id, lease_no) in &pending {
            queues.extend(wake_job(tx, *id, *lease_no)?);
            tx.execute(WOKEN, params![event, id.0.as_bytes()])?;
        }
        waits += pending.len() as u32;
    }
    Ok(Woken { queues, waits })
}
