//! Moves of jobs between tables for operators' commands on single jobs. The rest of the commands is in
//! `store/operate.rs`.

use rusqlite::{Row, params};

use super::enqueue::Ready;
use super::flow_changes::note_reopened;
use super::retain::delete_request;
use super::settle::{Ended, enter_finished, free_key, newest_error, tally};
use super::steps::delete_progress;
use super::turns::add_turn_of_removed;
use super::tx::{Sql, Tx};
use crate::job::{JobId, Outcome};
use crate::rules::enqueue::ValidEdit;
use crate::rules::lifecycle::{Finished, Waiting};

pub(super) fn cancel(tx: &Tx<'_>, id: JobId, seen: &Waiting, attempts: u16) -> Sql<bool> {
    let Some(row) = leave_ready(tx, id, seen)? else { return Ok(false) };
    let last_error = newest_error(tx, id)?;
    enter_finished(
        tx,
        &Ended {
            id,
            started_at: None,
            finished_by: None,
            lease_no: row.lease_no,
            outcome: Outcome::Cancelled,
            attempts,
            max_attempts: row.max_attempts,
            interruptions: row.interruptions,
            last_error: last_error.as_deref(),
            result: None,
            flow: row.flow,
            is_skipped: false,
            failure: None,
        },
    )?;
    tally(tx, &row.queue, &row.kind, Outcome::Cancelled, 0, 1, 1)?;
    add_turn_of_removed(tx, &row)?;
    if row.keyed {
        free_key(tx, id)?;
    }
    Ok(true)
}

pub(super) fn run_now(tx: &Tx<'_>, id: JobId, seen: &Waiting) -> Sql<bool> {
    let Some(row) = leave_ready(tx, id, seen)? else { return Ok(false) };
    Ready { run_at: row.run_at.min(tx.now()?), ..row.as_ready(id) }.store(tx)?;
    Ok(true)
}

/// Makes a suspended job due, if it still waits as this lease left it. Returns its queue.
pub(super) fn wake(tx: &Tx<'_>, id: JobId, lease_no: i32) -> Sql<Option<String>> {
    const LEAVE: &str = "
        delete from ready
         where id = ?1
           and lease_no = ?2
           and held is not true   -- it waits for other tasks
        returning run_at, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions, keyed,
                  kind, queue, flags, grp, flow, held";
    let Some(row) = tx.row(LEAVE, params![id.0.as_bytes(), lease_no], was_ready)? else { return Ok(None) };
    Ready { run_at: row.run_at.min(tx.now()?), ..row.as_ready(id) }.store(tx)?;
    Ok(Some(row.queue))
}

pub(super) fn rewrite(tx: &Tx<'_>, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<bool> {
    const REWRITE: &str = "
        update jobs
           set priority = coalesce(?2, priority),
               run_at = coalesce(?3, run_at),
               payload = coalesce(?4, payload)
         where id = ?1";
    let Some(row) = leave_ready(tx, id, seen)? else { return Ok(false) };
    let due = edit.when.map(|when| tx.due(when)).transpose()?;
    tx.execute(REWRITE, params![id.0.as_bytes(), edit.priority, due, edit.payload])?;
    let was_suspended = edit.payload.is_some() && delete_progress(tx, id)?;
    let priority = edit.priority.unwrap_or(row.priority);
    let old = if was_suspended { row.run_at.min(tx.now()?) } else { row.run_at };
    let run_at = if row.is_held { row.run_at } else { due.unwrap_or(old) };
    Ready { run_at, priority, ..row.as_ready(id) }.store(tx)?;
    Ok(true)
}

/// The row deleted from `ready`.
pub(super) struct WasReady {
    pub(super) run_at: i64,
    timeout_ms: Option<i64>,
    pub(super) lease_no: i32,
    pub(super) priority: i16,
    pub(super) attempt: u16,
    pub(super) max_attempts: u16,
    pub(super) interruptions: u16,
    pub(super) keyed: bool,
    pub(super) kind: String,
    pub(super) queue: String,
    flags: Option<String>,
    pub(super) group: Option<String>,
    pub(super) flow: Option<[u8; 16]>,
    is_held: bool,
}

impl WasReady {
    pub(super) fn as_ready(&self, id: JobId) -> Ready<'_> {
        Ready {
            id,
            run_at: self.run_at,
            timeout_ms: self.timeout_ms,
            lease_no: self.lease_no,
            priority: self.priority,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
            interruptions: self.interruptions,
            keyed: self.keyed,
            kind: &self.kind,
            queue: &self.queue,
            flags: self.flags.as_deref(),
            group: self.group.as_deref(),
            flow: self.flow,
            is_held: self.is_held,
        }
    }
}

/// Deletes a job from `ready` if it is still as `seen`. The attempts are compared too: a
/// replacement by key resets them under the same lease number.
fn leave_ready(tx: &Tx<'_>, id: JobId, seen: &Waiting) -> Sql<Option<WasReady>> {
    const LEAVE: &str = "
        delete from ready
         where id = ?1
           and lease_no = ?2
           and attempt = ?3
           and max_attempts = ?4
           and interruptions = ?5
           and coalesce(held, 0) = ?6
        returning run_at, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions, keyed,
                  kind, queue, flags, grp, flow, held";
    let params = params![
        id.0.as_bytes(),
        seen.lease_no,
        seen.attempts,
        seen.max_attempts,
        seen.interruptions,
        seen.is_held,
    ];
    tx.row(LEAVE, params, was_ready)
}

/// Deletes a job from `ready`, whatever it waits for.
pub(super) fn leave_ready_of(tx: &Tx<'_>, id: JobId) -> Sql<Option<WasReady>> {
    const LEAVE: &str = "
        delete from ready
         where id = ?1
        returning run_at, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions, keyed,
                  kind, queue, flags, grp, flow, held";
    tx.row(LEAVE, [id.0.as_bytes()], was_ready)
}

fn was_ready(row: &Row<'_>) -> rusqlite::Result<WasReady> {
    Ok(WasReady {
        run_at: row.get(0)?,
        timeout_ms: row.get(1)?,
        lease_no: row.get(2)?,
        priority: row.get(3)?,
        attempt: row.get(4)?,
        max_attempts: row.get(5)?,
        interruptions: row.get(6)?,
        keyed: row.get(7)?,
        kind: row.get(8)?,
        queue: row.get(9)?,
        flags: row.get(10)?,
        group: row.get(11)?,
        flow: row.get(12)?,
        is_held: row.get::<_, Option<bool>>(13)?.unwrap_or(false),
    })
}

/// Moves a job back to `ready` with a fresh attempt budget.
pub(super) fn reopen(tx: &Tx<'_>, id: JobId, seen: &Finished) -> Sql<bool> {
    const REQUEST: &str = "
        select timeout_ms,
               priority,
               max_attempts,
               unique_key is not null,
               kind,
               queue,
               flags,
               grp,
               flow
          from jobs
         where id = ?1";
    const STEPS: &str = "
        delete from steps
         where job = ?1";
    let request = tx.row(REQUEST, [id.0.as_bytes()], |row| {
        Ok(WasReady {
            run_at: 0,
            timeout_ms: row.get(0)?,
            lease_no: seen.lease_no,
            priority: row.get(1)?,
            attempt: 0,
            max_attempts: row.get(2)?,
            interruptions: 0,
            keyed: row.get(3)?,
            kind: row.get(4)?,
            queue: row.get(5)?,
            flags: row.get(6)?,
            group: row.get(7)?,
            flow: row.get(8)?,
            is_held: false,
        })
    })?;
    let Some(ready) = request else { return Ok(false) };
    let Some(is_skipped) = leave_finished(tx, id, seen)? else { return Ok(false) };
    if let Some(flow) = ready.flow {
        // It counts as open again, and no longer as a failure.
        note_reopened(tx, flow, id, seen.outcome != Outcome::Succeeded && !is_skipped, false)?;
    }
    tally(tx, &ready.queue, &ready.kind, seen.outcome, 0, 0, -1)?;
    if seen.starts_over() {
        tx.execute(STEPS, [id.0.as_bytes()])?;
    }
    Ready { run_at: tx.now()?, ..ready.as_ready(id) }.store(tx)?;
    Ok(true)
}

pub(super) fn remove(tx: &Tx<'_>, id: JobId, seen: &Finished) -> Sql<bool> {
    if leave_finished(tx, id, seen)?.is_none() {
        return Ok(false);
    }
    delete_request(tx, id, seen.outcome)?;
    Ok(true)
}

/// Returns whether it was a task that could never start; `None` if the job is not as `seen`.
fn leave_finished(tx: &Tx<'_>, id: JobId, seen: &Finished) -> Sql<Option<bool>> {
    const LEAVE: &str = "
        delete from finished
         where id = ?1
           and lease_no = ?2
           and outcome = ?3
        returning coalesce(skipped, 0)";
    tx.row(LEAVE, params![id.0.as_bytes(), seen.lease_no, seen.outcome.as_str()], |row| row.get(0))
}
