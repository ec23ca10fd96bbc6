//! Operators' commands on single jobs. Each is stored only if the job is still in
//! the state that the decision was made from. All of it runs in the writer's
//! transaction, so nothing can change in between.

use rusqlite::{Row, params};
use uuid::Uuid;

use super::advance::note_reopened;
use super::enqueue::Ready;
use super::retain::delete_request;
use super::settle::{Ended, enter_finished, free_key, newest_error, tally};
use super::steps::delete_progress;
use super::turns::add_turn_of_removed;
use super::tx::{Columns, Sql, Tx};
use crate::error::Error;
use crate::job::{JobId, Outcome};
use crate::rules::enqueue::ValidEdit;
use crate::rules::lifecycle::{Finished, LeaseFlags, Running, State, Waiting};
use crate::store::operate::in_no_table;
use crate::store::{DeadFilter, Operated, Operation};

pub(super) fn locate(tx: &Tx<'_>, id: JobId) -> Sql<Option<State>> {
    const WAITING: &str = "
        select lease_no,
               attempt,
               max_attempts,
               interruptions,
               coalesce(held, 0) as held
          from ready
         where id = ?1";
    const RUNNING: &str = "
        select lease_no,
               worker,
               attempt,
               max_attempts,
               interruptions,
               started_at is not null as started,
               cancel_requested,
               superseded
          from running
         where id = ?1";
    const FINISHED: &str = "
        select lease_no,
               outcome,
               exists (select 1 from flows o where o.id = finished.flow and o.ended_at is null) as needed
          from finished
         where id = ?1";
    const REQUEST: &str = "
        select 1
          from jobs
         where id = ?1";
    let job = id;
    let id = id.0.as_bytes();
    let waiting = tx.row(WAITING, [id], |row| {
        Ok(State::Waiting(Waiting {
            lease_no: row.get("lease_no")?,
            attempts: row.get("attempt")?,
            max_attempts: row.get("max_attempts")?,
            interruptions: row.get("interruptions")?,
            is_held: row.get("held")?,
        }))
    })?;
    if waiting.is_some() {
        return Ok(waiting);
    }
    let running = tx.row(RUNNING, [id], |row| {
        Ok(State::Running(Running {
            lease_no: row.get("lease_no")?,
            worker: row.worker("worker")?,
            attempt: row.get("attempt")?,
            max_attempts: row.get("max_attempts")?,
            interruptions: row.get("interruptions")?,
            started: row.get("started")?,
            flags: LeaseFlags {
                cancel_requested: row.get("cancel_requested")?,
                superseded: row.get("superseded")?,
            },
        }))
    })?;
    if running.is_some() {
        return Ok(running);
    }
    let finished = tx.row(FINISHED, [id], |row| {
        Ok(State::Finished(Finished {
            lease_no: row.get("lease_no")?,
            outcome: row.outcome("outcome")?,
            is_needed: row.get("needed")?,
        }))
    })?;
    if finished.is_none() && tx.row(REQUEST, [id], |_| Ok(()))?.is_some() {
        return Err(in_no_table(job).into());
    }
    Ok(finished)
}

pub(super) fn operate(tx: &Tx<'_>, id: JobId, from: &State, to: &Operation) -> Sql<Operated> {
    match (from, to) {
        (State::Waiting(seen), Operation::Cancel { attempts }) => cancel(tx, id, seen, *attempts),
        (State::Waiting(seen), Operation::RunNow) => run_now(tx, id, seen),
        (State::Waiting(seen), Operation::Rewrite(edit)) => rewrite(tx, id, seen, edit),
        (State::Running(seen), Operation::RequestCancel) => request_cancel(tx, id, seen),
        (State::Finished(seen), Operation::Reopen) => reopen(tx, id, seen),
        (State::Finished(seen), Operation::ReopenWith(edit)) => reopen_with(tx, id, seen, edit),
        (State::Finished(seen), Operation::Remove) => remove(tx, id, seen),
        (from, to) => {
            Err(Error::internal(format!("the operation {to:?} does not apply to a job in state {from:?}"))
                .into())
        }
    }
}

fn cancel(tx: &Tx<'_>, id: JobId, seen: &Waiting, attempts: u16) -> Sql<Operated> {
    let Some(row) = leave_ready(tx, id, seen)? else { return Ok(Operated::Moved) };
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
    Ok(Operated::Done)
}

fn run_now(tx: &Tx<'_>, id: JobId, seen: &Waiting) -> Sql<Operated> {
    let Some(row) = leave_ready(tx, id, seen)? else { return Ok(Operated::Moved) };
    Ready { run_at: row.run_at.min(tx.now()?), ..row.as_ready(id) }.store(tx)?;
    Ok(Operated::Done)
}

/// Makes a suspended job due, if it still waits as this lease left it. Returns its queue.
pub(super) fn wake(tx: &Tx<'_>, id: JobId, lease_no: i32) -> Sql<Option<String>> {
    match locate(tx, id)? {
        Some(State::Waiting(seen)) if seen.lease_no == lease_no && !seen.is_held => {
            let Some(row) = leave_ready(tx, id, &seen)? else { return Ok(None) };
            Ready { run_at: row.run_at.min(tx.now()?), ..row.as_ready(id) }.store(tx)?;
            Ok(Some(row.queue))
        }
        _ => Ok(None),
    }
}

fn rewrite(tx: &Tx<'_>, id: JobId, seen: &Waiting, edit: &ValidEdit) -> Sql<Operated> {
    const REWRITE: &str = "
        update jobs
           set priority = coalesce(?2, priority),
               run_at = coalesce(?3, run_at),
               payload = coalesce(?4, payload)
         where id = ?1";
    let Some(row) = leave_ready(tx, id, seen)? else { return Ok(Operated::Moved) };
    let due = edit.when.map(|when| tx.due(when)).transpose()?;
    tx.execute(REWRITE, params![id.0.as_bytes(), edit.priority, due, edit.payload])?;
    let was_suspended = edit.payload.is_some() && delete_progress(tx, id)?;
    let priority = edit.priority.unwrap_or(row.priority);
    let old = if was_suspended { row.run_at.min(tx.now()?) } else { row.run_at };
    let run_at = if row.is_held { row.run_at } else { due.unwrap_or(old) };
    Ready { run_at, priority, ..row.as_ready(id) }.store(tx)?;
    Ok(Operated::Done)
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

fn request_cancel(tx: &Tx<'_>, id: JobId, seen: &Running) -> Sql<Operated> {
    const REQUEST: &str = "
        update running
           set cancel_requested = true
         where id = ?1
           and lease_no = ?2";
    let updated = tx.execute(REQUEST, params![id.0.as_bytes(), seen.lease_no])?;
    Ok(if updated > 0 { Operated::Done } else { Operated::Moved })
}

/// Moves a job back to `ready` with a fresh attempt budget, unless another live job owns
/// its key.
fn reopen(tx: &Tx<'_>, id: JobId, seen: &Finished) -> Sql<Operated> {
    const REQUEST: &str = "
        select j.unique_key,
               k.job,
               j.timeout_ms,
               j.priority,
               j.max_attempts,
               j.kind,
               j.queue,
               j.flags,
               j.grp,
               j.flow
          from jobs j
          left join keys k on k.key = j.unique_key
         where j.id = ?1";
    const OWN: &str = "
        insert into keys (key, job)
        values (?1, ?2)";
    const STEPS: &str = "
        delete from steps
         where job = ?1";
    let request = tx.row(REQUEST, [id.0.as_bytes()], |row| {
        let ready = WasReady {
            run_at: 0,
            timeout_ms: row.get(2)?,
            lease_no: seen.lease_no,
            priority: row.get(3)?,
            attempt: 0,
            max_attempts: row.get(4)?,
            interruptions: 0,
            keyed: false,
            kind: row.get(5)?,
            queue: row.get(6)?,
            flags: row.get(7)?,
            group: row.get(8)?,
            flow: row.get(9)?,
            is_held: false,
        };
        let owner = row.get::<_, Option<[u8; 16]>>(1)?.map(|id| JobId(Uuid::from_bytes(id)));
        Ok((row.get::<_, Option<String>>(0)?, owner, ready))
    })?;
    let Some((key, owner, ready)) = request else { return Ok(Operated::Moved) };
    if let Some(owner) = owner {
        return Ok(if is_still_finished(tx, id, seen)? {
            Operated::KeyTaken(owner)
        } else {
            Operated::Moved
        });
    }
    let Some(is_skipped) = leave_finished(tx, id, seen)? else { return Ok(Operated::Moved) };
    if let Some(flow) = ready.flow {
        // It counts as open again, and no longer as a failure.
        note_reopened(tx, flow, id, seen.outcome != Outcome::Succeeded && !is_skipped, false)?;
    }
    if let Some(key) = &key {
        tx.execute(OWN, params![key, id.0.as_bytes()])?;
    }
    tally(tx, &ready.queue, &ready.kind, seen.outcome, 0, 0, -1)?;
    if seen.starts_over() {
        tx.execute(STEPS, [id.0.as_bytes()])?;
    }
    Ready { run_at: tx.now()?, keyed: key.is_some(), ..ready.as_ready(id) }.store(tx)?;
    Ok(Operated::Done)
}

/// Reopens a job and edits it. Nobody can claim it in between: both are in one transaction.
fn reopen_with(tx: &Tx<'_>, id: JobId, seen: &Finished, edit: &ValidEdit) -> Sql<Operated> {
    match (reopen(tx, id, seen)?, locate(tx, id)?) {
        (Operated::Done, Some(State::Waiting(reopened))) => rewrite(tx, id, &reopened, edit),
        (Operated::Done, _) => Ok(Operated::Moved),
        (refused, _) => Ok(refused),
    }
}

fn remove(tx: &Tx<'_>, id: JobId, seen: &Finished) -> Sql<Operated> {
    if leave_finished(tx, id, seen)?.is_none() {
        return Ok(Operated::Moved);
    }
    delete_request(tx, id, seen.outcome)?;
    Ok(Operated::Done)
}

fn is_still_finished(tx: &Tx<'_>, id: JobId, seen: &Finished) -> Sql<bool> {
    const STILL_FINISHED: &str = "
        select 1
          from finished
         where id = ?1
           and lease_no = ?2
           and outcome = ?3";
    let found =
        tx.row(STILL_FINISHED, params![id.0.as_bytes(), seen.lease_no, seen.outcome.as_str()], |_| Ok(()))?;
    Ok(found.is_some())
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

pub(super) fn dead_letters(tx: &Tx<'_>, filter: &DeadFilter) -> Sql<Vec<JobId>> {
    const DEAD: &str = "
        select f.id
          from finished f indexed by finished_unsuccessful
          join jobs j on j.id = f.id
         where f.outcome = 'failed_permanent'
           and f.outcome <> 'succeeded'   -- required to use the partial index
           and f.id > ?1
           and (?2 is null or j.kind = ?2)
           and (?3 is null or j.queue = ?3)
         order by f.id
         limit ?4";
    const OF_GROUP: &str = "
        select f.id
          from finished f indexed by finished_error_groups
          join jobs j on j.id = f.id
         where f.error_group = ?5
           and f.error_group is not null   -- required to use the partial index
           and f.id > ?1
           and (?2 is null or j.kind = ?2)
           and (?3 is null or j.queue = ?3)
         order by f.id
         limit ?4";
    let after = filter.after.map_or(Vec::new(), |id| id.0.as_bytes().to_vec());
    match filter.failure {
        None => tx.rows(DEAD, params![after, filter.kind, filter.queue, filter.limit], |row| row.job(0)),
        Some(failure) => {
            let params = params![after, filter.kind, filter.queue, filter.limit, failure.0];
            tx.rows(OF_GROUP, params, |row| row.job(0))
        }
    }
}
