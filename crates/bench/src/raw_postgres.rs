//! The raw-SQL side of the comparisons on Postgres: the same tables without the library,
//! with the statements that an engineer who knows the tables would write. They do not
//! support pauses, limits, kinds, tallies or history; the ratios show what those cost.

use std::fmt::Write as _;
use std::hint::black_box;
use std::time::Instant;

use chrono::{DateTime, Utc};
use sqlx::{Connection, PgConnection, PgPool, Row};
use uuid::Uuid;

use crate::Result;
use crate::library::{KIND, payload};

/// The schema in the statements below.
pub(crate) const SCHEMA: &str = "bench_raw";

const TIMEOUT_MS: i64 = 2 * 60 * 60 * 1000;

// ---- bulk enqueue --------------------------------------------------------

const COPY_JOBS: &str = "
    copy bench_raw.jobs
         (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, flags, options)
    from stdin";

const COPY_READY: &str = "
    copy bench_raw.ready
         (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
          interruptions, keyed, kind, queue, flags)
    from stdin";

/// Inserts jobs with two COPYs in one transaction.
pub(crate) async fn copy_in(connection: &mut PgConnection, first: u64, jobs: u64) -> Result<()> {
    let now = Utc::now().format("%Y-%m-%d %H:%M:%S%.6f+00").to_string();
    let (mut requests, mut ready) = (String::new(), String::new());
    for n in first..first + jobs {
        let (id, payload) = (Uuid::now_v7(), payload(n).to_string());
        writeln!(
            requests,
            "{id}\t{now}\t{now}\t{TIMEOUT_MS}\t0\t3\t{KIND}\tdefault\t{}\t\\N\t\\N",
            payload.replace('\\', "\\\\")
        )?;
        writeln!(ready, "{id}\t{now}\t{now}\t{TIMEOUT_MS}\t0\t0\t0\t3\t0\tf\t{KIND}\tdefault\t\\N")?;
    }
    let mut tx = connection.begin().await?;
    for (statement, rows) in [(COPY_JOBS, requests), (COPY_READY, ready)] {
        let mut copy = tx.copy_in_raw(statement).await?;
        copy.send(rows.as_bytes()).await?;
        copy.finish().await?;
    }
    tx.commit().await?;
    Ok(())
}

const INSERT_MANY: &str = "
    with input as (
      select *
        from unnest($1::uuid[], $2::text[]) as input(id, payload)),
    requests as (
      insert into bench_raw.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload)
      select id, now(), now(), 7200000, 0, 3, 'bench', 'default', payload::json
        from input)
    insert into bench_raw.ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue)
    select id, now(), now(), 7200000, 0, 0, 0, 3, 0, false, 'bench', 'default'
      from input";

/// Inserts jobs with one `insert … select unnest` per table, in one statement.
pub(crate) async fn insert_many(connection: &mut PgConnection, first: u64, jobs: u64) -> Result<()> {
    let ids: Vec<Uuid> = (0..jobs).map(|_| Uuid::now_v7()).collect();
    let payloads: Vec<String> = (first..first + jobs).map(|n| payload(n).to_string()).collect();
    sqlx::query(INSERT_MANY).bind(ids).bind(payloads).execute(connection).await?;
    Ok(())
}

// ---- single enqueue ------------------------------------------------------

const INSERT_JOB: &str = "
    insert into bench_raw.jobs
           (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload)
    values ($1, now(), now(), 7200000, 0, 3, $2, 'default', $3::text::json)";

const INSERT_READY: &str = "
    insert into bench_raw.ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue)
    values ($1, now(), now(), 7200000, 0, 0, 0, 3, 0, false, $2, 'default')";

const INSERT_BOTH: &str = "
    with requests as (
      insert into bench_raw.jobs
             (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload)
      values ($1, now(), now(), 7200000, 0, 3, $2, 'default', $3::text::json))
    insert into bench_raw.ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue)
    values ($1, now(), now(), 7200000, 0, 0, 0, 3, 0, false, $2, 'default')";

/// How raw SQL stores a single job.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Single {
    /// begin, insert, insert, commit.
    TwoRows,
    /// Both rows in one statement, which is its own transaction.
    OneStatement,
    /// Only one row, as the fastest peer stores it.
    Plain,
}

impl Single {
    pub(crate) const ALL: [Single; 3] = [Single::TwoRows, Single::OneStatement, Single::Plain];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Single::TwoRows => "begin, two inserts, commit",
            Single::OneStatement => "one statement, two inserts",
            Single::Plain => "plain single insert",
        }
    }
}

/// Stores one job after another until the given time; returns how many.
pub(crate) async fn enqueue_singly(mut connection: PgConnection, how: Single, until: Instant) -> Result<u64> {
    let mut n = 0;
    while Instant::now() < until {
        enqueue_one(&mut connection, how, n).await?;
        n += 1;
    }
    Ok(n)
}

/// Like [`enqueue_singly`] with one row per job, on any free connection of the pool.
pub(crate) async fn enqueue_pooled(pool: PgPool, until: Instant) -> Result<u64> {
    let mut n = 0;
    while Instant::now() < until {
        let mut connection = pool.acquire().await?;
        enqueue_one(&mut connection, Single::Plain, n).await?;
        n += 1;
    }
    Ok(n)
}

pub(crate) async fn enqueue_one(connection: &mut PgConnection, how: Single, n: u64) -> Result<()> {
    let (id, payload) = (Uuid::now_v7(), payload(n).to_string());
    let query = |statement: &'static str| sqlx::query(statement).bind(id).bind(KIND);
    match how {
        Single::TwoRows => {
            let mut tx = connection.begin().await?;
            query(INSERT_JOB).bind(payload).execute(&mut *tx).await?;
            query(INSERT_READY).execute(&mut *tx).await?;
            tx.commit().await?;
        }
        Single::OneStatement => {
            query(INSERT_BOTH).bind(payload).execute(connection).await?;
        }
        Single::Plain => {
            query(INSERT_JOB).bind(payload).execute(connection).await?;
        }
    }
    Ok(())
}

// ---- claim and settle ----------------------------------------------------

const CLAIM: &str = "
    with taken as (
      delete from bench_raw.ready
       where ctid = any(array(
               select ctid
                 from bench_raw.ready
                where queue = $1
                  and interruptions = 0
                  and grp is null
                  and run_at <= now()
                order by priority desc, run_at, id
                limit $2
                  for update skip locked))
      returning *),
    leased as (
      insert into bench_raw.running
             (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
              interruptions, keyed, kind, queue, flags)
      select id, $3, now(), timeout_ms, lease_no + 1, priority, attempt + 1, max_attempts,
             interruptions, keyed, kind, queue, flags
        from taken)
    select t.id, t.lease_no + 1, t.kind, t.attempt + 1, t.max_attempts, t.timeout_ms, t.run_at, j.payload::text
      from taken t
      join bench_raw.jobs j on j.id = t.id";

const SETTLE: &str = "
    with ended as (
      delete from bench_raw.running
       where id = any($1)
         and lease_no = 1        -- here every lease is the first one
         and worker = $2
      returning *)
    insert into bench_raw.finished
           (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts,
            interruptions, last_error, result)
    select id, claimed_at, now(), worker, lease_no, 'succeeded', attempt, max_attempts,
           interruptions, null, null
      from ended";

/// The decoded columns that a handler needs.
#[expect(dead_code, reason = "decoding is part of the measured work")]
struct Claimed {
    id: Uuid,
    lease_no: i32,
    kind: String,
    attempt: i32,
    max_attempts: i16,
    timeout_ms: Option<i64>,
    run_at: DateTime<Utc>,
    payload: String,
}

/// A claimer with its own connection.
pub(crate) struct Claimer {
    pub(crate) connection: PgConnection,
    worker: Uuid,
    batch: i64,
}

impl Claimer {
    pub(crate) fn new(connection: PgConnection, batch: u32) -> Self {
        Claimer { connection, worker: Uuid::now_v7(), batch: batch.into() }
    }

    /// Claims a batch and settles it; returns the number of jobs.
    pub(crate) async fn round(&mut self) -> Result<u64> {
        let rows = sqlx::query(CLAIM)
            .bind("default")
            .bind(self.batch)
            .bind(self.worker)
            .fetch_all(&mut self.connection)
            .await?;
        let mut claimed = Vec::with_capacity(rows.len());
        for row in &rows {
            claimed.push(Claimed {
                id: row.try_get(0)?,
                lease_no: row.try_get(1)?,
                kind: row.try_get(2)?,
                attempt: row.try_get(3)?,
                max_attempts: row.try_get(4)?,
                timeout_ms: row.try_get(5)?,
                run_at: row.try_get(6)?,
                payload: row.try_get(7)?,
            });
        }
        drop(rows);
        let claimed = black_box(claimed);
        if claimed.is_empty() {
            return Ok(0);
        }
        let stored = sqlx::query(SETTLE)
            .bind(claimed.iter().map(|job| job.id).collect::<Vec<_>>())
            .bind(self.worker)
            .execute(&mut self.connection)
            .await?;
        if stored.rows_affected() != claimed.len() as u64 {
            return Err("the raw settle did not find all its leases".into());
        }
        Ok(claimed.len() as u64)
    }

    /// Claims and settles until no jobs are left; returns how many.
    pub(crate) async fn drain(mut self) -> Result<u64> {
        let mut jobs = 0;
        loop {
            match self.round().await? {
                0 => return Ok(jobs),
                n => jobs += n,
            }
        }
    }
}
