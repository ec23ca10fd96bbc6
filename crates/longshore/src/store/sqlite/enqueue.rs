//! Enqueue: jobs into `jobs` and `ready`, in one transaction.

use rusqlite::params;

use super::*;
use crate::enqueue::{EnqueuedAs, UniqueMode};

pub(super) fn enqueue(tx: &Tx<'_>, jobs: &[ValidJob]) -> Sql<Vec<Enqueued>> {
    jobs.iter().map(|job| enqueue_one(tx, job)).collect()
}

fn enqueue_one(tx: &Tx<'_>, job: &ValidJob) -> Sql<Enqueued> {
    if job.is_keyed()
        && let Some(standing) = stand_in(tx, job)?
    {
        return Ok(standing);
    }
    insert_job(tx, job)?;
    Ok(Enqueued { id: job.id, how: EnqueuedAs::Created })
}

/// The job that stands for this one, if its keys say so. Idempotency comes
/// first: whatever the second body says, the first job answers.
fn stand_in(tx: &Tx<'_>, job: &ValidJob) -> Sql<Option<Enqueued>> {
    const SAME_JOB: &str = "
        select 1
          from jobs
         where id = ?1";
    const SAME_REQUEST: &str = "
        select id
          from jobs
         where idempotency_key = ?1";
    const OWNER: &str = "
        select job
          from keys
         where key = ?1";
    let as_is = |id, how| Ok(Some(Enqueued { id, how }));
    // This very job on an earlier try. Its unique key may be free again by
    // now, and must not be taken for a job that has ended.
    if tx.row(SAME_JOB, [job.id.0.as_bytes()], |_| Ok(()))?.is_some() {
        return as_is(job.id, EnqueuedAs::Created);
    }
    if let Some(key) = &job.idempotency_key
        && let Some(holder) = tx.row(SAME_REQUEST, [key], |row| row.job(0))?
    {
        return as_is(holder, EnqueuedAs::Existing);
    }
    let Some((key, mode)) = &job.unique else { return Ok(None) };
    let Some(owner) = tx.row(OWNER, [key], |row| row.job(0))? else { return Ok(None) };
    if *mode == UniqueMode::Dedupe {
        return as_is(owner, EnqueuedAs::Existing);
    }
    match replace(tx, owner, job, *mode)? {
        true => as_is(owner, EnqueuedAs::Replaced),
        false => {
            supersede(tx, key, owner)?;
            Ok(None)
        }
    }
}

/// Gives a waiting job new contents and a fresh budget; the lease number goes
/// on, so that whoever held it before stays locked out.
fn replace(tx: &Tx<'_>, owner: JobId, job: &ValidJob, mode: UniqueMode) -> Sql<bool> {
    const LEAVE_READY: &str = "
        delete from ready
         where id = ?1
        returning run_at, lease_no";
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
               -- the same request again must find the job that stands for it
               idempotency_key = coalesce(idempotency_key, ?11)
         where id = ?1";
    let was =
        tx.row(LEAVE_READY, [owner.0.as_bytes()], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i32>(1)?)))?;
    let Some((run_at, lease_no)) = was else { return Ok(false) };
    let due = match mode {
        UniqueMode::PreserveRunAt => None,
        UniqueMode::Dedupe | UniqueMode::Replace => Some(tx.due(job.when)?),
    };
    let (timeout_ms, flags) = (job.timeout.map(millis), stored_list(&job.flags)?);
    tx.execute(
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
        ],
    )?;
    let ready =
        Ready { run_at: due.unwrap_or(run_at), lease_no, ..Ready::of(tx, owner, job, flags.as_deref())? };
    ready.insert(tx)?;
    Ok(true)
}

/// Takes the key from a running job, which may finish but not wait again.
fn supersede(tx: &Tx<'_>, key: &str, owner: JobId) -> Sql<()> {
    const SUPERSEDE: &str = "
        update running
           set superseded = 1
         where id = ?1";
    const FREE: &str = "
        delete from keys
         where key = ?1";
    tx.execute(SUPERSEDE, [owner.0.as_bytes()])?;
    tx.execute(FREE, [key])?;
    Ok(())
}

fn insert_job(tx: &Tx<'_>, job: &ValidJob) -> Sql<()> {
    const INSERT: &str = "
        insert into jobs
               (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue,
                payload, flags, options, idempotency_key, unique_key)
        values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)
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
        ],
    )?;
    if inserted == 0 {
        // An earlier try has stored it; by now it may be anywhere.
        return Ok(());
    }
    if let Some(key) = unique_key {
        tx.execute(OWN, params![key, job.id.0.as_bytes()])?;
    }
    Ready::of(tx, job.id, job, flags.as_deref())?.insert(tx)
}

/// A row of `ready` on its way in.
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
        })
    }

    pub(super) fn insert(&self, tx: &Tx<'_>) -> Sql<()> {
        const INSERT: &str = "
            insert into ready
                   (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
                    interruptions, keyed, kind, queue, flags)
            values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";
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
            ],
        )?;
        Ok(())
    }
}
