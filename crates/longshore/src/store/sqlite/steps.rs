//! Stores durable steps: journals them under a lease, stores what a suspended job waits for, and deletes
//! both. `store/steps.rs` reads them.

use rusqlite::params;

use super::tx::{Sql, Tx};
use crate::job::JobId;
use crate::store::db::{Statement, args};
use crate::store::events::{RETENTION, is_expired};
use crate::store::{Fenced, Lease, NewStep, Settlement};

pub(super) fn save_steps(tx: &Tx<'_>, steps: &[NewStep]) -> Sql<Vec<Fenced>> {
    // Attempts and interruptions count since the last step.
    const PROGRESS: &str = "
        update running
           set attempt = 1,
               interruptions = 0
         where id = ?1
           and lease_no = ?2   -- fence: a newer lease owns the row
           and worker = ?3";
    // A step that is done keeps its value.
    const SAVE: &str = "
        insert into steps (job, name, lease_no, saved_at, value)
        values (?1, ?2, ?3, ?4, ?5)
            on conflict (job, name) do update
           set lease_no = excluded.lease_no,
               saved_at = excluded.saved_at,
               until = null,
               value = excluded.value
         where value is null";
    let save = |step: &NewStep| {
        let Lease { id, lease_no, worker } = step.lease;
        let held = tx.execute(PROGRESS, params![id.0.as_bytes(), lease_no, worker.0.as_bytes()])?;
        let held = Fenced::of(held > 0);
        if held == Fenced::Held {
            let params = params![id.0.as_bytes(), step.name, lease_no, tx.now()?, step.value.get()];
            tx.execute(SAVE, params)?;
        }
        Ok(held)
    };
    steps.iter().map(save).collect()
}

/// Deletes the job's checkpoint, journal and waits: they belong to a request that was replaced or removed.
/// Returns whether the job waited in a step. Then it must not keep waiting: nothing would wake it.
pub(super) fn delete_progress(tx: &Tx<'_>, id: JobId) -> Sql<bool> {
    const WAITING: &str = "
        select 1
          from steps
         where job = ?1
           and value is null";
    const CHECKPOINT: &str = "
        delete from checkpoints
         where job = ?1";
    const STEPS: &str = "
        delete from steps
         where job = ?1";
    const WAITS: &str = "
        delete from waits
         where job = ?1";
    let was_suspended = tx.row(WAITING, [id.0.as_bytes()], |_| Ok(()))?.is_some();
    for statement in [CHECKPOINT, STEPS, WAITS] {
        tx.execute(statement, [id.0.as_bytes()])?;
    }
    Ok(was_suspended)
}

static IS_ANY_EMITTED: Statement = Statement::new(concat!(
    "
    select 1
      from longshore.events e
     where e.name = any($1::text[])
       and not ",
    is_expired!("$2")
));

/// Whether one of these events has been emitted.
pub(super) fn is_any_emitted(tx: &Tx<'_>, names: &[String]) -> Sql<bool> {
    Ok(!names.is_empty() && tx.has_row(&IS_ANY_EMITTED, args![names, RETENTION])?)
}

/// Journals what a suspended job waits for.
pub(super) fn save_waits(tx: &Tx<'_>, settlement: &Settlement) -> Sql<()> {
    // Waits that an earlier suspension left behind.
    const FORGET: &str = "
        delete from waits
         where job = ?1";
    const JOURNAL: &str = "
        insert into steps (job, name, lease_no, saved_at, until)
        values (?1, ?2, ?3, ?4, ?5)
            on conflict (job, name) do update
           set lease_no = excluded.lease_no,
               until = excluded.until
         where value is null";
    const WAIT: &str = "
        insert into waits (event, job, lease_no, woken)
        values (?1, ?2, ?3, ?4)";
    let Settlement { lease, waits, .. } = settlement;
    let id = lease.id.0.as_bytes();
    if !waits.is_empty() {
        tx.execute(FORGET, [id])?;
    }
    for wait in waits {
        let until = wait.until.map(|until| until.timestamp_micros());
        tx.execute(JOURNAL, params![id, wait.step, lease.lease_no, tx.now()?, until])?;
    }
    for event in settlement.awaited_events() {
        tx.execute(WAIT, params![event, id, lease.lease_no, settlement.is_due_now()])?;
    }
    Ok(())
}
