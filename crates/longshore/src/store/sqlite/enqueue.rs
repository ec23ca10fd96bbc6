//! Enqueue: stores jobs in `jobs` and `ready`, in one commit or in the caller's own
//! transaction. [`keys`] decides what happens if a key is taken.

use async_trait::async_trait;
use rusqlite::params;

use super::SqliteStore;
use super::steps::delete_progress;
use super::turns::add_turn;
use super::tx::{Columns, Fault, Sql, Tx, instant, stored_list};
use crate::error::Result;
use crate::job::{FlowId, JobId};
use crate::rules::enqueue::{Enqueued, EnqueuedAs, EnqueuedBatch, ValidJob};
use crate::rules::keys::{self, Decision, Holders, Owner, RunAt};
use crate::rules::lifecycle::FAR_FUTURE;
use crate::rules::retry::millis;
use crate::store::{Enqueue, KeyWait, NewMember};

#[async_trait]
impl Enqueue for SqliteStore {
    async fn enqueue(&self, jobs: &[ValidJob], _: KeyWait) -> Result<EnqueuedBatch> {
        // There is one writer at a time, so no open transaction can hold a key.
        let jobs = jobs.to_vec();
        self.engine.write(move |tx| enqueue(tx, &jobs)).await
    }
}

pub(super) fn enqueue(tx: &Tx<'_>, jobs: &[ValidJob]) -> Sql<EnqueuedBatch> {
    let mut batch = EnqueuedBatch {
        results: Vec::with_capacity(jobs.len()),
        created_at: if jobs.is_empty() { None } else { Some(instant(tx.now()?)) },
    };
    for job in jobs {
        let (result, tried) = if job.is_keyed() { enqueue_keyed(tx, job) } else { enqueue_plain(tx, job) }?;
        batch.results.push(result);
        if tried == Tried::Before {
            batch.created_at = None;
        }
    }
    debug_assert_eq!(batch.results.len(), jobs.len(), "one result per job, in order");
    Ok(batch)
}

/// Whether an earlier try, whose reply was lost, had stored the job.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tried {
    Before,
    Now,
}

/// Stores jobs in the caller's own transaction, all or none.
pub(super) fn enqueue_in(tx: &Tx<'_>, jobs: &[ValidJob]) -> Sql<Vec<Enqueued>> {
    // On a connection without a transaction, the savepoint starts one.
    let run = |sql| tx.conn.execute_batch(sql).map_err(Fault::from);
    run("savepoint longshore_enqueue")?;
    let done = enqueue(tx, jobs).map(|batch| batch.results);
    if done.is_err() {
        run("rollback to longshore_enqueue")?;
    }
    run("release longshore_enqueue")?;
    done
}

fn enqueue_plain(tx: &Tx<'_>, job: &ValidJob) -> Sql<(Enqueued, Tried)> {
    Ok(match insert(tx, job)? {
        Tried::Now => (created(job), Tried::Now),
        Tried::Before => (Enqueued { id: job.id, how: job.stored_as() }, Tried::Before),
    })
}

/// Stores one job with keys. Nothing can change between the decision and storing it,
/// because both run in the writer's transaction.
fn enqueue_keyed(tx: &Tx<'_>, job: &ValidJob) -> Sql<(Enqueued, Tried)> {
    let mode = job.unique.as_ref().map(|(_, mode)| *mode).unwrap_or_default();
    let result = match keys::decide(holders(tx, job)?, mode) {
        Decision::Repeat(id, how) => return Ok((Enqueued { id, how }, Tried::Before)),
        Decision::Existing(id) => Enqueued { id, how: EnqueuedAs::Existing },
        Decision::Dedupe(owner) => {
            if job.idempotency_key.is_some() {
                merge(tx, job, owner, EnqueuedAs::Existing, job.idempotency_key.as_deref())?;
            }
            Enqueued { id: owner, how: EnqueuedAs::Existing }
        }
        Decision::Insert => return enqueue_plain(tx, job),
        Decision::Replace(owner, run_at) => {
            replace(tx, job, owner, run_at)?;
            Enqueued { id: owner, how: EnqueuedAs::Replaced }
        }
        Decision::Supersede(owner) => {
            supersede(tx, job, owner)?;
            created(job)
        }
    };
    Ok((result, Tried::Now))
}

/// Finds the jobs that have the id or the keys of this job.
fn holders(tx: &Tx<'_>, job: &ValidJob) -> Sql<Holders> {
    const SAME_ID: &str = "
        select 1
          from jobs
         where id = ?1";
    const MERGED: &str = "
        select j.id, m.replaced
          from merged_requests m
          join jobs j on j.id = m.job
         where m.id = ?1";
    const IDEMPOTENCY: &str = "
        select id
          from jobs
         where idempotency_key = ?1
         union all
        select j.id
          from merged_requests m
          join jobs j on j.id = m.job
         where m.idempotency_key = ?1";
    const UNIQUE: &str = "
        select k.job,
               w.id is not null as waiting,
               coalesce(r.cancel_requested, 0) as cancelling
          from keys k
          left join ready w on w.id = k.job
          left join running r on r.id = k.job
         where k.key = ?1";
    let id = job.id.0.as_bytes();
    let stored = tx.row(SAME_ID, [id], |_| Ok((job.id, job.stored_as())))?;
    let mut holders = Holders { earlier: stored, ..Holders::default() };
    if let Some(key) = &job.idempotency_key {
        holders.idempotency = tx.row(IDEMPOTENCY, [key], |row| row.job("id"))?;
    }
    if let Some((key, _)) = &job.unique {
        if stored.is_none() {
            holders.earlier = tx.row(MERGED, [id], |row| {
                let how = if row.get("replaced")? { EnqueuedAs::Replaced } else { EnqueuedAs::Existing };
                Ok((row.job("id")?, how))
            })?;
        }
        // A key belongs to a live job, so an owner that is not waiting is running.
        holders.unique = tx.row(UNIQUE, [key], |row| {
            let owner = match (row.get("waiting")?, row.get("cancelling")?) {
                (true, _) => Owner::Waiting,
                (false, false) => Owner::Running,
                (false, true) => Owner::Cancelling,
            };
            Ok((row.job("job")?, owner))
        })?;
    }
    Ok(holders)
}

/// Stores the new job. It owns its unique key, if it has one.
fn insert(tx: &Tx<'_>, job: &ValidJob) -> Sql<Tried> {
    const INSERT: &str = "
        insert into jobs
               (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue,
                payload, flags, options, idempotency_key, unique_key, grp)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)
            on conflict (id) do nothing";
    const OWN: &str = "
        insert into keys (key, job)
        values (?1, ?2)";
    let flags = stored_list(&job.flags)?;
    let unique_key = job.unique.as_ref().map(|(key, _)| key);
    let inserted = tx.execute(
        INSERT,
        params![
            job.id.0.as_bytes(),
            tx.now()?,
            tx.due(job.when)?,
            job.timeout.map(millis),
            job.priority,
            job.max_attempts,
            job.kind,
            job.queue,
            job.payload,
            flags,
            job.options,
            job.idempotency_key,
            unique_key,
            job.group,
        ],
    )?;
    if inserted == 0 {
        // An earlier try stored it; it may be in any state by now.
        return Ok(Tried::Before);
    }
    if let Some(key) = unique_key {
        tx.execute(OWN, params![key, job.id.0.as_bytes()])?;
    }
    Ready::of(tx, job.id, job, flags.as_deref())?.store(tx)?;
    Ok(Tried::Now)
}

/// Stores a job of a flow, or a callback that is not a member of one. One that waits for others is
/// held.
pub(super) fn insert_member(tx: &Tx<'_>, flow: Option<FlowId>, member: &NewMember) -> Sql<()> {
    const INSERT: &str = "
        insert into jobs
               (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue,
                payload, flags, options, grp, flow, task)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)";
    let NewMember { job, task, is_held } = member;
    let flags = stored_list(&job.flags)?;
    let flow = flow.map(|flow| flow.0.into_bytes());
    tx.execute(
        INSERT,
        params![
            job.id.0.as_bytes(),
            tx.now()?,
            tx.due(job.when)?,
            job.timeout.map(millis),
            job.priority,
            job.max_attempts,
            job.kind,
            job.queue,
            job.payload,
            flags,
            job.options,
            job.group,
            flow,
            task,
        ],
    )?;
    let ready = Ready::of(tx, job.id, job, flags.as_deref())?;
    let run_at = if *is_held { FAR_FUTURE.timestamp_micros() } else { ready.run_at };
    Ready { run_at, flow, is_held: *is_held, ..ready }.store(tx)
}

/// Replaces the contents of the waiting owner of the key, resets its attempts and merges
/// the request into it. The lease number stays, so that earlier holders of a lease remain
/// fenced off.
fn replace(tx: &Tx<'_>, job: &ValidJob, owner: JobId, run_at: RunAt) -> Sql<()> {
    const LEAVE_READY: &str = "
        delete from ready
         where id = ?1
        returning run_at, lease_no, interruptions";
    const REWRITE: &str = "
        update jobs
           set kind = ?2,
               payload = ?3,
               queue = ?4,
               priority = ?5,
               max_attempts = ?6,
               run_at = coalesce(?7, run_at),
               timeout_ms = ?8,
               flags = ?9,
               options = ?10,
               grp = ?12,
               -- a repeated request must find this job
               idempotency_key = coalesce(idempotency_key, ?11)
         where id = ?1
        returning idempotency_key";
    let mut leave = tx.prepare(LEAVE_READY)?;
    let (old_run_at, lease_no, interruptions) = leave.query_row([owner.0.as_bytes()], |row| {
        Ok((row.get::<_, i64>("run_at")?, row.get::<_, i32>("lease_no")?, row.get("interruptions")?))
    })?;
    let old_run_at = if delete_progress(tx, owner)? { old_run_at.min(tx.now()?) } else { old_run_at };
    let due = match run_at {
        RunAt::Preserved => None,
        RunAt::New => Some(tx.due(job.when)?),
    };
    let (timeout_ms, flags) = (job.timeout.map(millis), stored_list(&job.flags)?);
    let own_key: Option<Option<String>> = tx.row(
        REWRITE,
        params![
            owner.0.as_bytes(),
            job.kind,
            job.payload,
            job.queue,
            job.priority,
            job.max_attempts,
            due,
            timeout_ms,
            flags,
            job.options,
            job.idempotency_key,
            job.group,
        ],
        |row| row.get("idempotency_key"),
    )?;
    let ready = Ready {
        run_at: due.unwrap_or(old_run_at),
        lease_no,
        interruptions,
        ..Ready::of(tx, owner, job, flags.as_deref())?
    };
    ready.store(tx)?;
    let own_key = own_key.flatten();
    let other_key = job.idempotency_key.as_deref().filter(|key| own_key.as_deref() != Some(*key));
    merge(tx, job, owner, EnqueuedAs::Replaced, other_key)
}

/// Stores the new job and moves the key of a running owner to it.
fn supersede(tx: &Tx<'_>, job: &ValidJob, owner: JobId) -> Sql<()> {
    const SUPERSEDE: &str = "
        update running
           set superseded = true
         where id = ?1";
    const FREE: &str = "
        delete from keys
         where job = ?1";
    tx.execute(SUPERSEDE, [owner.0.as_bytes()])?;
    tx.execute(FREE, [owner.0.as_bytes()])?;
    insert(tx, job).map(drop)
}

/// Stores that the request became part of `owner`, so that its id and this key return
/// that job from now on.
fn merge(tx: &Tx<'_>, job: &ValidJob, owner: JobId, how: EnqueuedAs, key: Option<&str>) -> Sql<()> {
    // Replaces a row of a job that no longer exists: a process of an older version may have
    // removed the job without it.
    const MERGE: &str = "
        insert or replace into merged_requests (id, job, replaced, idempotency_key)
        values (?1, ?2, ?3, ?4)";
    let replaced = how == EnqueuedAs::Replaced;
    tx.execute(MERGE, params![job.id.0.as_bytes(), owner.0.as_bytes(), replaced, key])?;
    Ok(())
}

fn created(job: &ValidJob) -> Enqueued {
    Enqueued { id: job.id, how: EnqueuedAs::Created }
}

/// A row to insert into `ready`.
pub(super) struct Ready<'a> {
    pub(super) id: JobId,
    pub(super) run_at: i64,
    pub(super) timeout_ms: Option<i64>,
    pub(super) lease_no: i32,
    pub(super) priority: i16,
    pub(super) attempt: u16,
    pub(super) max_attempts: u16,
    pub(super) interruptions: u16,
    pub(super) keyed: bool,
    pub(super) kind: &'a str,
    pub(super) queue: &'a str,
    pub(super) flags: Option<&'a str>,
    pub(super) group: Option<&'a str>,
    pub(super) flow: Option<[u8; 16]>,
    pub(super) is_held: bool,
}

impl<'a> Ready<'a> {
    fn of(tx: &Tx<'_>, id: JobId, job: &'a ValidJob, flags: Option<&'a str>) -> Sql<Self> {
        Ok(Ready {
            id,
            run_at: tx.due(job.when)?,
            timeout_ms: job.timeout.map(millis),
            lease_no: 0,
            priority: job.priority,
            attempt: 0,
            max_attempts: job.max_attempts,
            interruptions: 0,
            keyed: job.unique.is_some(),
            kind: &job.kind,
            queue: &job.queue,
            flags,
            group: job.group.as_deref(),
            flow: None,
            is_held: false,
        })
    }

    pub(super) fn store(&self, tx: &Tx<'_>) -> Sql<()> {
        const INSERT: &str = "
            insert into ready
                   (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
                    interruptions, keyed, kind, queue, flags, grp, flow, held)
            values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)";
        debug_assert!(self.attempt < self.max_attempts, "job {} waits without an attempt left", self.id);
        tx.execute(
            INSERT,
            params![
                self.id.0.as_bytes(),
                self.run_at,
                tx.now()?,
                self.timeout_ms,
                self.lease_no,
                self.priority,
                self.attempt,
                self.max_attempts,
                self.interruptions,
                self.keyed,
                self.kind,
                self.queue,
                self.flags,
                self.group,
                self.flow,
                self.is_held.then_some(true),
            ],
        )?;
        match self.group {
            Some(group) => add_turn(tx, self.queue, group, self.priority, self.run_at),
            None => Ok(()),
        }
    }
}
