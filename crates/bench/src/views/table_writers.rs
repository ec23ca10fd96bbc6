//! Writes the dataset to the tables of each engine: with COPY on Postgres, with prepared
//! inserts on SQLite.

use std::fmt::Write as _;
use std::path::Path;

use chrono::DateTime;
use rusqlite::params;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use super::dataset::{Job, JobState, TableWriter, Tallies, failed_attempts, failure, last_error};
use super::history::{failure_groups, measures};
use crate::{Result, raw_sqlite};

/// Jobs per transaction.
const STEP: u64 = 50_000;
const TIMEOUT_MS: i64 = 2 * 60 * 60 * 1000;

// ---- Postgres ------------------------------------------------------------

const COPIES: [(&str, &str); 5] = [
    ("jobs", "id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, options"),
    (
        "finished",
        "id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts, interruptions, \
         last_error, error_group",
    ),
    (
        "ready",
        "id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions, keyed, kind, \
         queue",
    ),
    (
        "running",
        "id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions, keyed, \
         kind, queue",
    ),
    ("attempts", "job, lease_no, attempt, what, worker, started_at, ended_at, error"),
];

pub(super) struct PostgresWriter {
    connection: PgConnection,
    schema: &'static str,
    worker: Uuid,
    /// The rows to send, one text for each of [`COPIES`].
    rows: [String; 5],
    jobs: u64,
}

impl PostgresWriter {
    pub(super) fn new(connection: PgConnection, schema: &'static str, worker: Uuid) -> Self {
        PostgresWriter { connection, schema, worker, rows: Default::default(), jobs: 0 }
    }

    async fn flush(&mut self) -> Result<()> {
        let mut tx = self.connection.begin().await?;
        for ((table, columns), rows) in COPIES.into_iter().zip(&mut self.rows) {
            let statement = format!("copy {}.{table} ({columns}) from stdin", self.schema);
            let mut copy = tx.copy_in_raw(&statement).await?;
            copy.send(rows.as_bytes()).await?;
            copy.finish().await?;
            rows.clear();
        }
        tx.commit().await?;
        Ok(())
    }
}

impl PostgresWriter {
    async fn write_history(&mut self, now: i64) -> Result<()> {
        let mut rows = String::new();
        for one in measures(now) {
            let minute = time(one.minute);
            writeln!(
                rows,
                "{minute}\t{}\t{}\t{}\t{}\t{}",
                one.value, one.bucket, one.what, one.queue, one.kind
            )?;
        }
        self.copy("measures (minute, value, bucket, what, queue, kind)", &rows).await?;
        rows.clear();
        let job = Uuid::nil();
        for group in failure_groups(now) {
            let (kind, seen) = (group.kind, time(group.last_seen));
            let (fingerprint, attempts, error) = (group.fingerprint, group.attempts, &group.error);
            writeln!(rows, "{fingerprint}\t{kind}\t{attempts}\t{seen}\t{seen}\t{job}\t{error}")?;
        }
        self.copy("error_groups (fingerprint, kind, attempts, first_seen, last_seen, job, error)", &rows)
            .await
    }

    async fn copy(&mut self, table: &str, rows: &str) -> Result<()> {
        let statement = format!("copy {}.{table} from stdin", self.schema);
        let mut copy = self.connection.copy_in_raw(&statement).await?;
        copy.send(rows.as_bytes()).await?;
        copy.finish().await?;
        Ok(())
    }
}

fn time(micros: i64) -> String {
    DateTime::from_timestamp_micros(micros).unwrap_or_default().format("%Y-%m-%d %H:%M:%S%.6f+00").to_string()
}

impl TableWriter for PostgresWriter {
    async fn write(&mut self, job: &Job) -> Result<()> {
        let [requests, finished, ready, running, attempts] = &mut self.rows;
        let Job { id, kind, queue, priority, failures, .. } = job;
        let (created, worker) = (time(job.created), self.worker);
        let options = job.options.as_deref().unwrap_or("\\N");
        writeln!(
            requests,
            "{id}\t{created}\t{created}\t{TIMEOUT_MS}\t{priority}\t3\t{kind}\t{queue}\t{}\t{options}",
            job.payload
        )?;
        match job.state {
            JobState::Finished { outcome, started, finished: at } => writeln!(
                finished,
                "{id}\t{}\t{}\t{worker}\t1\t{outcome}\t{}\t3\t0\t{}\t{}",
                time(started),
                time(at),
                failures.max(&1),
                last_error(job).unwrap_or("\\N"),
                failure(job).map_or_else(|| "\\N".into(), |failure| failure.to_string())
            )?,
            JobState::Waiting { run_at, interruptions } => writeln!(
                ready,
                "{id}\t{}\t{created}\t{TIMEOUT_MS}\t{}\t{priority}\t{failures}\t3\t{interruptions}\tf\t{kind}\t{queue}",
                time(run_at),
                failures + interruptions
            )?,
            JobState::Running { claimed } => writeln!(
                running,
                "{id}\t{worker}\t{}\t{TIMEOUT_MS}\t1\t{priority}\t1\t3\t0\tf\t{kind}\t{queue}",
                time(claimed)
            )?,
        }
        for (nth, started, ended, error) in failed_attempts(job) {
            writeln!(
                attempts,
                "{id}\t{nth}\t{nth}\tfailed\t{worker}\t{}\t{}\t{error}",
                time(started),
                time(ended)
            )?;
        }
        self.jobs += 1;
        if self.jobs.is_multiple_of(STEP) {
            self.flush().await?;
        }
        Ok(())
    }

    async fn finish(mut self, tallies: &Tallies, now: i64) -> Result<()> {
        self.flush().await?;
        self.write_history(now).await?;
        let mut rows = String::new();
        for (key, ended, kept) in tallies.rows() {
            let (minute, bucket) = (time(key.minute), key.run_bucket);
            writeln!(
                rows,
                "{minute}\t{ended}\t{kept}\t{}\t{bucket}\t{}\t{}\t{}",
                key.outcome, key.level, key.queue, key.kind
            )?;
        }
        self.copy("tallies (minute, ended, kept, outcome, run_bucket, level, queue, kind)", &rows).await?;
        let vacuum = format!("vacuum (analyze) {}.attempts", self.schema);
        sqlx::raw_sql(AssertSqlSafe(vacuum)).execute(&mut self.connection).await?;
        Ok(())
    }
}

// ---- SQLite --------------------------------------------------------------

const INSERT_JOB: &str = "
    insert into jobs
           (id, created_at, run_at, timeout_ms, priority, max_attempts, kind, queue, payload, options)
    values (?1, ?2, ?2, ?3, ?4, 3, ?5, ?6, ?7, ?8)";

const INSERT_FINISHED: &str = "
    insert into finished
           (id, started_at, finished_at, finished_by, lease_no, outcome, attempts, max_attempts,
            interruptions, last_error, error_group)
    values (?1, ?2, ?3, ?4, 1, ?5, ?6, 3, 0, ?7, ?8)";

const INSERT_READY: &str = "
    insert into ready
           (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue)
    values (?1, ?2, ?3, ?4, ?5 + ?7, ?6, ?5, 3, ?7, 0, ?8, ?9)";

const INSERT_RUNNING: &str = "
    insert into running
           (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
            interruptions, keyed, kind, queue)
    values (?1, ?2, ?3, ?4, 1, ?5, 1, 3, 0, 0, ?6, ?7)";

const INSERT_ATTEMPT: &str = "
    insert into attempts
           (job, lease_no, attempt, what, worker, started_at, ended_at, error)
    values (?1, ?2, ?2, 'failed', ?3, ?4, ?5, ?6)";

const INSERT_TALLY: &str = "
    insert into tallies
           (minute, queue, kind, outcome, run_bucket, ended, kept)
    values (?1, ?2, ?3, ?4, ?5, ?6, ?7)";

const INSERT_MEASURE: &str = "
    insert into measures
           (minute, what, queue, kind, bucket, value)
    values (?1, ?2, ?3, ?4, ?5, ?6)";

const INSERT_FAILURE: &str = "
    insert into error_groups
           (fingerprint, kind, attempts, first_seen, last_seen, job, error)
    values (?1, ?2, ?3, ?4, ?4, ?5, ?6)";

pub(super) struct SqliteWriter {
    connection: rusqlite::Connection,
    worker: Uuid,
    jobs: u64,
}

impl SqliteWriter {
    pub(super) fn open(path: &Path, worker: Uuid) -> Result<Self> {
        let connection = raw_sqlite::open(path)?;
        connection.execute_batch("pragma synchronous = off; begin")?;
        Ok(SqliteWriter { connection, worker, jobs: 0 })
    }
}

impl TableWriter for SqliteWriter {
    async fn write(&mut self, job: &Job) -> Result<()> {
        let db = &self.connection;
        let (id, worker) = (job.id.as_bytes(), self.worker.as_bytes());
        let Job { created, kind, queue, priority, failures, .. } = job;
        db.prepare_cached(INSERT_JOB)?.execute(params![
            id,
            created,
            TIMEOUT_MS,
            priority,
            kind,
            queue,
            job.payload,
            job.options
        ])?;
        match job.state {
            JobState::Finished { outcome, started, finished } => {
                db.prepare_cached(INSERT_FINISHED)?.execute(params![
                    id,
                    started,
                    finished,
                    worker,
                    outcome,
                    failures.max(&1),
                    last_error(job),
                    failure(job)
                ])?
            }
            JobState::Waiting { run_at, interruptions } => {
                db.prepare_cached(INSERT_READY)?.execute(params![
                    id,
                    run_at,
                    created,
                    TIMEOUT_MS,
                    failures,
                    priority,
                    interruptions,
                    kind,
                    queue
                ])?
            }
            JobState::Running { claimed } => db
                .prepare_cached(INSERT_RUNNING)?
                .execute(params![id, worker, claimed, TIMEOUT_MS, priority, kind, queue])?,
        };
        for (nth, started, ended, error) in failed_attempts(job) {
            db.prepare_cached(INSERT_ATTEMPT)?.execute(params![id, nth, worker, started, ended, error])?;
        }
        self.jobs += 1;
        if self.jobs.is_multiple_of(STEP) {
            db.execute_batch("commit; begin")?;
        }
        Ok(())
    }

    async fn finish(self, tallies: &Tallies, now: i64) -> Result<()> {
        for one in measures(now) {
            let (what, queue, kind) = (one.what, one.queue, one.kind);
            let row = params![one.minute, what, queue, kind, one.bucket, one.value];
            self.connection.prepare_cached(INSERT_MEASURE)?.execute(row)?;
        }
        for group in failure_groups(now) {
            let (kind, seen, job) = (group.kind, group.last_seen, Uuid::nil());
            let row = params![group.fingerprint, kind, group.attempts, seen, job.as_bytes(), group.error];
            self.connection.prepare_cached(INSERT_FAILURE)?.execute(row)?;
        }
        for (key, ended, kept) in tallies.rows() {
            self.connection.prepare_cached(INSERT_TALLY)?.execute(params![
                key.minute,
                key.queue,
                key.kind,
                key.outcome,
                key.run_bucket,
                ended,
                kept
            ])?;
        }
        self.connection.execute_batch("commit")?;
        self.connection.query_row("pragma wal_checkpoint(truncate)", [], |_| Ok(()))?;
        Ok(())
    }
}
