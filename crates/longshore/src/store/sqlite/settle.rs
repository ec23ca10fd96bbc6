//! Settle: stores how attempts end, each under its own lease. Recovery (in `recover.rs`)
//! ends other workers' leases with the same statements.

use std::borrow::Cow;
use std::collections::HashMap;

use async_trait::async_trait;
use rusqlite::params;
use serde_json::value::RawValue;

use super::SqliteStore;
use super::enqueue::{Ready, enqueue};
use super::flow_changes::note_end;
use super::lease::raised_flags;
use super::steps::{is_any_emitted, save_waits};
use super::turns::add_turn_of_freed;
use super::tx::{Sql, Tx, in_order};
use crate::error::{Error, Result};
use crate::job::{AttemptEnd, JobId, Outcome};
use crate::rules::fingerprint::Fingerprint;
use crate::rules::lifecycle::{Finish, Leave, Requeue};
use crate::store::{EndedBy, FailureRecord, Lease, MAX_HISTORY, Settled, Settlement, Settling, clean};

#[async_trait]
impl Settling for SqliteStore {
    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>> {
        let settlements = settlements.to_vec();
        self.engine.write(move |tx| settle(tx, &settlements)).await?
    }
}

/// Ends each lease that is live. The tallies are written once for the whole batch.
///
/// The inner error means that the follow-up jobs of an item could not be stored. That
/// item is undone and the others stay, so the call may be repeated: the others return
/// `Stored` again.
fn settle(tx: &Tx<'_>, settlements: &[Settlement]) -> Sql<Result<Vec<Settled>>> {
    let mut tallies = Tallies::default();
    let mut results = Vec::new();
    let mut refused = None;
    for settlement in settlements {
        debug_assert!(settlement.is_sound() && settlement.by == EndedBy::Holder, "{settlement:?}");
        let end = if !settlement.is_alone() {
            end_lease(tx, settlement)?
        } else {
            tx.conn.execute_batch("savepoint item")?;
            let end = end_with_more(tx, settlement);
            let close = if end.is_err() { "rollback to item; release item" } else { "release item" };
            tx.conn.execute_batch(close)?;
            match end {
                Ok(end) => end,
                Err(fault) => {
                    refused = refused.or(Some(Error::from(fault)));
                    continue;
                }
            }
        };
        results.push(end.settled());
        tallies.add_end(tx, end)?;
    }
    tallies.store(tx)?;
    debug_assert!(refused.is_some() || results.len() == settlements.len(), "one result per item, in order");
    Ok(match refused {
        Some(error) => Err(error),
        None => Ok(results),
    })
}

/// Ends one lease and counts its outcome, without follow-up jobs.
pub(super) fn end_alone(tx: &Tx<'_>, settlement: &Settlement) -> Sql<Settled> {
    let end = end_lease(tx, settlement)?;
    let settled = end.settled();
    let mut tallies = Tallies::default();
    tallies.add_end(tx, end)?;
    tallies.store(tx)?;
    Ok(settled)
}

/// The result of ending a lease.
enum End {
    Finished {
        held: TakenLease,
        outcome: Outcome,
    },
    Requeued,
    /// This call did not end the lease.
    Other(Settled),
}

impl End {
    fn settled(&self) -> Settled {
        match self {
            End::Finished { .. } | End::Requeued => Settled::Stored,
            End::Other(settled) => *settled,
        }
    }
}

/// The row deleted from `running`.
struct TakenLease {
    queue: String,
    kind: String,
    flags: Option<String>,
    claimed_at: i64,
    timeout_ms: Option<i64>,
    priority: i16,
    attempt: u16,
    max_attempts: u16,
    keyed: bool,
    grp: Option<String>,
    flow: Option<[u8; 16]>,
    /// Whether the group had a limit when the job was claimed.
    gated: bool,
}

/// Ends one lease, and stores its follow-up jobs and waits.
fn end_with_more(tx: &Tx<'_>, settlement: &Settlement) -> Sql<End> {
    let is_emitted = is_any_emitted(tx, &settlement.awaited_events())?;
    let due_now;
    let settlement = if is_emitted {
        due_now = settlement.clone().due_now();
        &due_now
    } else {
        settlement
    };
    let end = end_lease(tx, settlement)?;
    // If an earlier call ended the lease and its reply was lost, that call also stored
    // the follow-up jobs.
    if !matches!(end, End::Other(_)) {
        enqueue(tx, &settlement.follow_ups)?;
        save_waits(tx, settlement)?;
    }
    Ok(end)
}

fn end_lease(tx: &Tx<'_>, settlement: &Settlement) -> Sql<End> {
    let Settlement { lease, leave, failure, .. } = settlement;
    let Some(held) = take_lease(tx, settlement)? else {
        return diagnose(tx, settlement).map(End::Other);
    };
    let (error, history) = match leave {
        Leave::Finish(end) => (end.error.as_deref().map(clean), end.history),
        Leave::Requeue(end) => (end.error.as_deref().map(clean), end.history),
    };
    if let Some(what) = history {
        record_attempt(tx, settlement, &held, what, error.as_deref())?;
    }
    if let (Some(failure), Some(error)) = (failure, &error) {
        note_error(tx, *failure, lease.id, &held.kind, error)?;
    }
    match leave {
        Leave::Finish(end) => {
            let outcome = end.outcome;
            finish(tx, settlement, &held, end, error)?;
            Ok(End::Finished { held, outcome })
        }
        Leave::Requeue(end) => {
            requeue(tx, lease, &held, end)?;
            Ok(End::Requeued)
        }
    }
}

/// Deletes the row from `running` if the lease is live and is as decided.
fn take_lease(tx: &Tx<'_>, settlement: &Settlement) -> Sql<Option<TakenLease>> {
    const HELD: &str = "
        select queue,
               kind,
               flags,
               claimed_at,
               timeout_ms,
               priority,
               attempt,
               max_attempts,
               keyed,
               grp,
               flow,
               gate is not null as gated
          from running
         where id = ?1
           and lease_no = ?2   -- fence: a newer lease owns the row
           and worker = ?3
           and (?4 is null or (cancel_requested = ?4 and superseded = ?5))
           and (?6 or not exists (
                select 1
                  from workers w
                 where w.id = ?3
                   and w.dead_at is null))";
    // Separate from the read, as in a claim: `returning` costs twice as much, and nothing
    // can change in between.
    const LEAVE: &str = "
        delete from running
         where id = ?1";
    let Settlement { lease, by, seen, .. } = settlement;
    let params = params![
        lease.id.0.as_bytes(),
        lease.lease_no,
        lease.worker.0.as_bytes(),
        seen.map(|flags| flags.cancel_requested),
        seen.map(|flags| flags.superseded),
        !by.requires_dead_holder(),
    ];
    let held = tx.row(HELD, params, |row| {
        in_order!(
            row,
            TakenLease {
                queue,
                kind,
                flags,
                claimed_at,
                timeout_ms,
                priority,
                attempt,
                max_attempts,
                keyed,
                grp,
                flow,
                gated,
            }
        )
    })?;
    if let Some(held) = &held {
        tx.execute(LEAVE, [lease.id.0.as_bytes()])?;
        if let Some(group) = held.grp.as_deref().filter(|_| held.gated) {
            add_turn_of_freed(tx, &held.queue, group, held.priority)?;
        }
    }
    Ok(held)
}

/// Notes one failure. Only the beginning of its error is kept.
fn note_error(tx: &Tx<'_>, group: Fingerprint, job: JobId, kind: &str, error: &str) -> Sql<()> {
    const NOTE: &str = "
        insert into error_notes (fingerprint, attempts, seen_at, job, kind, error)
        values (?1, 1, ?2, ?3, ?4, ?5)";
    let end = error.char_indices().nth(FailureRecord::MAX_ERROR).map_or(error.len(), |(end, _)| end);
    tx.execute(NOTE, params![group.0, tx.now()?, job.0.as_bytes(), kind, &error[..end]])?;
    Ok(())
}

fn record_attempt(
    tx: &Tx<'_>,
    Settlement { lease, failure, .. }: &Settlement,
    held: &TakenLease,
    what: AttemptEnd,
    error: Option<&str>,
) -> Sql<()> {
    const RECORD: &str = "
        insert into attempts (job, lease_no, attempt, what, worker, started_at, ended_at, error, error_group, omitted)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, nullif(?10, 0))";
    // A job with at most this many leases cannot have more rows.
    let omitted = if lease.lease_no > MAX_HISTORY { prune_history(tx, lease.id, error)? } else { 0 };
    tx.execute(
        RECORD,
        params![
            lease.id.0.as_bytes(),
            lease.lease_no,
            held.attempt,
            what.as_str(),
            lease.worker.0.as_bytes(),
            held.claimed_at,
            tx.now()?,
            error,
            failure.map(|fingerprint| fingerprint.0),
            omitted,
        ],
    )?;
    Ok(())
}

/// Makes room for one more row in a job's history. Keeps the newest rows, and the newest
/// error unless `error` replaces it. Returns how many rows have been removed in total.
fn prune_history(tx: &Tx<'_>, id: JobId, error: Option<&str>) -> Sql<i64> {
    const REMOVED: &str = "
        select coalesce(max(omitted), 0)
          from attempts
         where job = ?1";
    const PRUNE: &str = "
        delete from attempts
         where job = ?1
           and lease_no in (
               select lease_no
                 from attempts
                where job = ?1
                order by lease_no desc
                limit -1 offset ?2)
           and (?3 is not null
             or lease_no is not (
                select max(lease_no)
                  from attempts
                 where job = ?1
                   and error is not null))";
    let id = id.0.as_bytes();
    let removed: Option<i64> = tx.value(REMOVED, [id])?;
    let pruned = tx.execute(PRUNE, params![id, MAX_HISTORY - 1, error])?;
    Ok(removed.unwrap_or(0) + pruned as i64)
}

fn finish(
    tx: &Tx<'_>,
    Settlement { lease, by, failure, .. }: &Settlement,
    held: &TakenLease,
    finish: &Finish,
    error: Option<Cow<'_, str>>,
) -> Sql<()> {
    // Only a job that was leased before can have an older error.
    let last_error = match error {
        None if lease.lease_no > 1 => newest_error(tx, lease.id)?.map(Cow::Owned),
        error => error,
    };
    enter_finished(
        tx,
        &Ended {
            id: lease.id,
            started_at: Some(held.claimed_at),
            finished_by: finished_by(*by, lease),
            lease_no: lease.lease_no,
            outcome: finish.outcome,
            attempts: finish.attempts,
            max_attempts: held.max_attempts,
            interruptions: finish.interruptions,
            last_error: last_error.as_deref(),
            result: finish.result.as_deref().map(RawValue::get),
            flow: held.flow,
            is_skipped: false,
            failure: *failure,
        },
    )?;
    if held.keyed { free_key(tx, lease.id) } else { Ok(()) }
}

/// A row to insert into `finished`.
pub(super) struct Ended<'a> {
    pub(super) id: JobId,
    pub(super) started_at: Option<i64>,
    pub(super) finished_by: Option<[u8; 16]>,
    pub(super) lease_no: i32,
    pub(super) outcome: Outcome,
    pub(super) attempts: u16,
    pub(super) max_attempts: u16,
    pub(super) interruptions: u16,
    pub(super) last_error: Option<&'a str>,
    pub(super) result: Option<&'a str>,
    pub(super) flow: Option<[u8; 16]>,
    /// Whether it is a task that could never start.
    pub(super) is_skipped: bool,
    pub(super) failure: Option<Fingerprint>,
}

pub(super) fn enter_finished(tx: &Tx<'_>, ended: &Ended<'_>) -> Sql<()> {
    debug_assert!(ended.attempts <= ended.max_attempts, "job {}", ended.id);
    debug_assert!(ended.failure.is_none() || ended.last_error.is_some(), "a failure has an error");
    const INSERT: &str = "
        insert into finished
               (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts,
                interruptions, last_error, result, flow, skipped, error_group)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)";
    tx.execute(
        INSERT,
        params![
            ended.id.0.as_bytes(),
            ended.started_at,
            tx.now()?,
            ended.finished_by,
            ended.lease_no,
            ended.outcome.as_str(),
            ended.attempts,
            ended.max_attempts,
            ended.interruptions,
            ended.last_error,
            ended.result,
            ended.flow,
            ended.is_skipped.then_some(true),
            ended.failure.map(|fingerprint| fingerprint.0),
        ],
    )?;
    match ended.flow {
        Some(flow) => note_end(tx, flow, ended),
        None => Ok(()),
    }
}

fn finished_by(by: EndedBy, lease: &Lease) -> Option<[u8; 16]> {
    (by == EndedBy::Holder).then_some(lease.worker.0.into_bytes())
}

pub(super) fn newest_error(tx: &Tx<'_>, id: JobId) -> Sql<Option<String>> {
    const NEWEST: &str = "
        select error
          from attempts
         where job = ?1
           and error is not null
         order by lease_no desc
         limit 1";
    tx.value(NEWEST, [id.0.as_bytes()])
}

/// Frees the unique key of a job that finishes. A superseded job no longer owns one.
pub(super) fn free_key(tx: &Tx<'_>, owner: JobId) -> Sql<()> {
    const FREE: &str = "
        delete from keys
         where job = ?1";
    tx.execute(FREE, [owner.0.as_bytes()])?;
    Ok(())
}

fn requeue(tx: &Tx<'_>, lease: &Lease, held: &TakenLease, requeue: &Requeue) -> Sql<()> {
    let ready = Ready {
        id: lease.id,
        run_at: tx.due(requeue.when)?,
        timeout_ms: held.timeout_ms,
        lease_no: lease.lease_no,
        priority: held.priority,
        attempt: requeue.attempts,
        max_attempts: held.max_attempts,
        interruptions: requeue.interruptions,
        keyed: held.keyed,
        kind: &held.kind,
        queue: &held.queue,
        flags: held.flags.as_deref(),
        group: held.grp.as_deref(),
        flow: held.flow,
        is_held: false,
    };
    ready.store(tx)
}

/// Finds out why a settlement found no matching lease: the lease is live with other
/// flags, the same end was stored before and the reply was lost, or the lease is lost.
fn diagnose(tx: &Tx<'_>, settlement: &Settlement) -> Sql<Settled> {
    const FINISHED: &str = "
        select 1
          from finished
         where id = ?1
           and lease_no = ?2
           and finished_by is ?3
           and outcome = ?4";
    // The error is compared too, because a sweeper may have recorded a
    // failed attempt with the holder's worker id.
    const ATTEMPTED: &str = "
        select 1
          from attempts
         where job = ?1
           and lease_no = ?2
           and worker = ?3
           and what = ?4
           and error is ?5";
    let Settlement { lease, by, seen, leave, .. } = settlement;
    if let Some(flags) = raised_flags(tx, lease)? {
        // For recovery, unchanged flags mean that the holder is alive and keeps its lease.
        let is_flagged = *by == EndedBy::Holder || *seen != Some(flags);
        return Ok(if is_flagged { Settled::Flagged(flags) } else { Settled::LeaseLost });
    }
    if *by != EndedBy::Holder {
        // Another sweeper has already recovered the job.
        return Ok(Settled::LeaseLost);
    }
    let (id, worker) = (lease.id.0.as_bytes(), lease.worker.0.as_bytes());
    let (history, error) = match leave {
        Leave::Finish(finish) => {
            let params = params![id, lease.lease_no, finished_by(*by, lease), finish.outcome.as_str()];
            if tx.row(FINISHED, params, |_| Ok(()))?.is_some() {
                return Ok(Settled::Stored);
            }
            (finish.history, &finish.error)
        }
        Leave::Requeue(requeue) => (requeue.history, &requeue.error),
    };
    let Some(what) = history else { return Ok(Settled::LeaseLost) };
    let params = params![id, lease.lease_no, worker, what.as_str(), error.as_deref().map(clean)];
    Ok(match tx.row(ATTEMPTED, params, |_| Ok(()))? {
        Some(()) => Settled::Stored,
        None => Settled::LeaseLost,
    })
}

/// The jobs that finished in this transaction, per queue, kind, outcome and bucket.
#[derive(Default)]
struct Tallies(HashMap<(String, String, Outcome, i32), i64>);

impl Tallies {
    fn add_end(&mut self, tx: &Tx<'_>, end: End) -> Sql<()> {
        if let End::Finished { held, outcome } = end {
            let bucket = run_bucket(held.claimed_at, tx.now()?);
            *self.0.entry((held.queue, held.kind, outcome, bucket)).or_default() += 1;
        }
        Ok(())
    }

    fn store(self, tx: &Tx<'_>) -> Sql<()> {
        for ((queue, kind, outcome, run_bucket), n) in self.0 {
            tally(tx, &queue, &kind, outcome, run_bucket, n, n)?;
        }
        Ok(())
    }
}

/// Adds to the tallies: `ended` jobs finished, and the number of finished jobs kept
/// changed by `kept`.
pub(super) fn tally(
    tx: &Tx<'_>,
    queue: &str,
    kind: &str,
    outcome: Outcome,
    run_bucket: i32,
    ended: i64,
    kept: i64,
) -> Sql<()> {
    let now = tx.now()?;
    let minute = now - now.rem_euclid(60 * 1_000_000);
    add_tally(tx, params![minute, queue, kind, outcome.as_str(), run_bucket, ended, kept])
}

pub(super) fn add_tally(tx: &Tx<'_>, row: &[&dyn rusqlite::ToSql]) -> Sql<()> {
    const ADD: &str = "
        insert into tallies (minute, queue, kind, outcome, run_bucket, ended, kept)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7)
            on conflict do update
           set ended = ended + excluded.ended,
               kept = kept + excluded.kept";
    tx.execute(ADD, row)?;
    Ok(())
}

/// The histogram bucket of a duration: four per doubling of milliseconds, so a bucket is
/// within a fifth of the duration.
fn run_bucket(started: i64, ended: i64) -> i32 {
    let ms = (ended - started).max(0) as f64 / 1000.0;
    (4.0 * (1.0 + ms).log2()).floor() as i32
}
