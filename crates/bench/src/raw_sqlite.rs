//! The raw-SQL side of the comparisons on SQLite: the same tables through rusqlite, with
//! one prepared statement per row and the library's settings.

use std::hint::black_box;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rusqlite::{Connection, TransactionBehavior, params};
use uuid::Uuid;

use crate::Result;
use crate::library::{KIND, payload};

const TIMEOUT_MS: i64 = 2 * 60 * 60 * 1000;

/// A connection that commits as durably as the library's.
pub(crate) fn open(path: &Path) -> Result<Connection> {
    let connection = Connection::open(path)?;
    // SQLite's default busy handler sleeps up to 100 ms; a commit takes about 1 ms.
    connection.busy_handler(Some(|_| {
        std::thread::sleep(Duration::from_micros(250));
        true
    }))?;
    connection.set_prepared_statement_cache_capacity(32);
    connection.execute_batch(
        "pragma journal_mode = wal;
         pragma synchronous = full;
         pragma temp_store = memory;
         pragma cache_size = -65536;
         pragma wal_autocheckpoint = 4000;",
    )?;
    Ok(connection)
}

/// The effective `journal_mode` and `synchronous`.
pub(crate) fn durability(connection: &Connection) -> Result<(String, i64)> {
    Ok((
        connection.pragma_query_value(None, "journal_mode", |row| row.get(0))?,
        connection.pragma_query_value(None, "synchronous", |row| row.get(0))?,
    ))
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros() as i64
}

// ---- enqueue -------------------------------------------------------------

const INSERT_JOB: &str = "
    insert into jobs
           (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload)
    values (?1, ?2, ?2, ?3, 0, 3, ?4, 'default', ?5)";

const INSERT_READY: &str = "
    insert into ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue)
    values (?1, ?2, ?2, ?3, 0, 0, 0, 3, 0, 0, ?4, 'default')";

/// Inserts jobs in one transaction, with two inserts per job.
pub(crate) fn enqueue(connection: &mut Connection, first: u64, jobs: u64) -> Result<()> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    {
        let (mut requests, mut ready) = (tx.prepare_cached(INSERT_JOB)?, tx.prepare_cached(INSERT_READY)?);
        let now = now();
        for n in first..first + jobs {
            let (id, payload) = (Uuid::now_v7(), payload(n).to_string());
            requests.execute(params![id.as_bytes(), now, TIMEOUT_MS, KIND, payload])?;
            ready.execute(params![id.as_bytes(), now, TIMEOUT_MS, KIND])?;
        }
    }
    tx.commit()?;
    Ok(())
}

/// Inserts jobs, one per transaction, until the given time; returns how many.
pub(crate) fn enqueue_singly(connection: &mut Connection, until: Instant) -> Result<u64> {
    let mut n = 0;
    while Instant::now() < until {
        enqueue(connection, n, 1)?;
        n += 1;
    }
    Ok(n)
}

// ---- claim and settle ----------------------------------------------------

const SELECT_DUE: &str = "
    select r.id, r.timeout_ms, r.lease_no, r.priority, r.attempt, r.max_attempts, r.interruptions,
           r.keyed, r.kind, r.queue, r.flags, j.payload
      from ready r
      join jobs j on j.id = r.id
     where r.queue = ?1
       and r.interruptions = 0
       and r.grp is null
       and r.run_at <= ?2
     order by r.priority desc, r.run_at, r.id
     limit ?3";

const DELETE_READY: &str = "
    delete from ready
     where id = ?1";

const INSERT_RUNNING: &str = "
    insert into running
           (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue, flags)
    values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)";

const DELETE_RUNNING: &str = "
    delete from running
     where id = ?1
       and lease_no = ?2
    returning worker, claimed_at, attempt, max_attempts, interruptions";

const INSERT_FINISHED: &str = "
    insert into finished
           (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts,
            interruptions)
    values (?1, ?2, ?3, ?4, ?5, 'succeeded', ?6, ?7, ?8)";

struct Claimed {
    id: Uuid,
    timeout_ms: Option<i64>,
    lease_no: i32,
    priority: i16,
    attempt: u16,
    max_attempts: u16,
    interruptions: u16,
    keyed: bool,
    kind: String,
    queue: String,
    flags: Option<String>,
    #[expect(dead_code, reason = "reading it is part of the measured work")]
    payload: String,
}

/// A claimer with its own connection.
pub(crate) struct Claimer {
    connection: Connection,
    worker: Uuid,
    batch: u32,
}

impl Claimer {
    pub(crate) fn open(path: &Path, batch: u32) -> Result<Self> {
        Ok(Claimer { connection: open(path)?, worker: Uuid::now_v7(), batch })
    }

    /// Claims a batch and settles it, each in a transaction; returns the number of jobs.
    pub(crate) fn round(&mut self) -> Result<u64> {
        let claimed = black_box(self.claim()?);
        if !claimed.is_empty() {
            self.settle(&claimed)?;
        }
        Ok(claimed.len() as u64)
    }

    fn claim(&mut self) -> Result<Vec<Claimed>> {
        let (now, worker) = (now(), self.worker);
        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        let claimed: Vec<Claimed> = {
            let mut select = tx.prepare_cached(SELECT_DUE)?;
            let rows = select.query_map(params!["default", now, self.batch], |row| {
                Ok(Claimed {
                    id: Uuid::from_bytes(row.get(0)?),
                    timeout_ms: row.get(1)?,
                    lease_no: row.get::<_, i32>(2)? + 1,
                    priority: row.get(3)?,
                    attempt: row.get::<_, u16>(4)? + 1,
                    max_attempts: row.get(5)?,
                    interruptions: row.get(6)?,
                    keyed: row.get(7)?,
                    kind: row.get(8)?,
                    queue: row.get(9)?,
                    flags: row.get(10)?,
                    payload: row.get(11)?,
                })
            })?;
            rows.collect::<rusqlite::Result<_>>()?
        };
        {
            let (mut delete, mut insert) =
                (tx.prepare_cached(DELETE_READY)?, tx.prepare_cached(INSERT_RUNNING)?);
            for job in &claimed {
                delete.execute([job.id.as_bytes()])?;
                insert.execute(params![
                    job.id.as_bytes(),
                    worker.as_bytes(),
                    now,
                    job.timeout_ms,
                    job.lease_no,
                    job.priority,
                    job.attempt,
                    job.max_attempts,
                    job.interruptions,
                    job.keyed,
                    job.kind,
                    job.queue,
                    job.flags,
                ])?;
            }
        }
        tx.commit()?;
        Ok(claimed)
    }

    fn settle(&mut self, claimed: &[Claimed]) -> Result<()> {
        let now = now();
        let tx = self.connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        {
            let (mut delete, mut insert) =
                (tx.prepare_cached(DELETE_RUNNING)?, tx.prepare_cached(INSERT_FINISHED)?);
            for job in claimed {
                let id = job.id.as_bytes();
                let (worker, claimed_at, attempt, max_attempts, interruptions) =
                    delete.query_row(params![id, job.lease_no], |row| {
                        Ok((
                            row.get::<_, [u8; 16]>(0)?,
                            row.get::<_, i64>(1)?,
                            row.get::<_, u16>(2)?,
                            row.get::<_, u16>(3)?,
                            row.get::<_, u16>(4)?,
                        ))
                    })?;
                insert.execute(params![
                    id,
                    claimed_at,
                    now,
                    worker,
                    job.lease_no,
                    attempt,
                    max_attempts,
                    interruptions
                ])?;
            }
        }
        tx.commit()?;
        Ok(())
    }

    /// Claims and settles until no jobs are left; returns how many.
    pub(crate) fn drain(mut self) -> Result<u64> {
        let mut jobs = 0;
        loop {
            match self.round()? {
                0 => return Ok(jobs),
                n => jobs += n,
            }
        }
    }
}
