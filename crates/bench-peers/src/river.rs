//! riverqueue, tuned as in its own `riverqueue bench`: 2,000 workers, at least 2 ms between
//! fetches, and a poll every 20 ms. The client's own fetch cooldown, which limits its
//! notifications, is also 2 ms, because the default would dominate the pick-up latency.
//! On SQLite it uses the write-ahead log and a full sync at each commit, as Longshore does.

use std::ops::Range;
use std::str::FromStr;
use std::time::Duration;

use riverqueue::migrate::{PostgresMigrator, SqliteMigrator};
use riverqueue::{Client, Job, JobArgs, QueueConfig, RunHandle, WorkContext, WorkOutcome, Workers};
use serde::{Deserialize, Serialize};
use sqlx::postgres::PgPoolOptions;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{PgPool, SqlitePool};

use crate::handler_probe::{self, Payload};
use crate::{Peer, Result, postgres};

/// Waiting for SQLite's only writer must not fail.
const BUSY_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, Serialize, Deserialize, JobArgs)]
#[river(kind = "bench")]
struct Bench {
    to: String,
    template: String,
    n: u64,
}

impl Bench {
    fn new(n: u64) -> Self {
        let Payload { to, template, n } = Payload::new(n);
        Bench { to, template, n }
    }
}

async fn work(_: WorkContext, job: Job<Bench>) -> Result<WorkOutcome, std::io::Error> {
    handler_probe::record_run(job.args.n);
    Ok(WorkOutcome::Complete)
}

#[derive(Clone)]
enum Pool {
    Postgres(PgPool),
    Sqlite(SqlitePool),
}

#[derive(Clone)]
pub(crate) struct River {
    pool: Pool,
    client: Client,
}

impl River {
    pub(crate) async fn install_postgres(url: &str, connections: u32) -> Result<Self> {
        let pool = PgPoolOptions::new().max_connections(connections).connect(url).await?;
        PostgresMigrator::new(pool.clone()).migrate_up().await?;
        Self::with_pool(Pool::Postgres(pool))
    }

    pub(crate) async fn install_sqlite(url: &str, connections: u32) -> Result<Self> {
        let options = SqliteConnectOptions::from_str(url)?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT);
        // More connections would only wait for the writer.
        let pool = SqlitePoolOptions::new()
            .max_connections(connections.min(5))
            .acquire_timeout(BUSY_TIMEOUT)
            .connect_with(options)
            .await?;
        SqliteMigrator::new(pool.clone()).migrate_up().await?;
        Self::with_pool(Pool::Sqlite(pool))
    }

    fn with_pool(pool: Pool) -> Result<Self> {
        let mut workers = Workers::new();
        workers.add_fn(work)?;
        let builder = match &pool {
            Pool::Postgres(pool) => Client::builder(pool.clone()),
            Pool::Sqlite(pool) => Client::builder(pool.clone()),
        };
        let (cooldown, poll) = (Duration::from_millis(2), Duration::from_millis(20));
        let queue = QueueConfig::new(2000).with_fetch_cooldown(cooldown).with_fetch_poll_interval(poll);
        let client = builder.workers(workers).fetch_cooldown(cooldown).queue("default", queue).build()?;
        Ok(River { pool, client })
    }
}

impl Peer for River {
    type Running = RunHandle;

    async fn start(&self) -> Result<RunHandle> {
        Ok(self.client.start()?)
    }

    async fn stop(&self, mut running: RunHandle) -> Result<()> {
        Ok(running.stop_and_cancel().await?)
    }

    async fn enqueue(&self, n: u64) -> Result<()> {
        self.client.insert(Bench::new(n)).await?;
        Ok(())
    }

    async fn enqueue_many(&self, jobs: Range<u64>) -> Result<()> {
        self.client.insert_many(jobs.map(Bench::new)).await?;
        Ok(())
    }

    async fn all_settled(&self, _: u64) -> Result<bool> {
        let unsettled = "select exists (select 1 from river_job where state <> 'completed')";
        let unsettled: bool = match &self.pool {
            Pool::Postgres(pool) => sqlx::query_scalar(unsettled).fetch_one(pool).await?,
            Pool::Sqlite(pool) => sqlx::query_scalar(unsettled).fetch_one(pool).await?,
        };
        Ok(!unsettled)
    }

    async fn checkpoint_and_vacuum(&self) -> Result<()> {
        match &self.pool {
            Pool::Postgres(pool) => postgres::checkpoint_and_vacuum(pool).await,
            Pool::Sqlite(pool) => {
                sqlx::query("pragma wal_checkpoint(truncate)").execute(pool).await?;
                Ok(())
            }
        }
    }

    async fn wal_position(&self) -> Result<Option<u64>> {
        match &self.pool {
            Pool::Postgres(pool) => postgres::wal_position(pool).await,
            Pool::Sqlite(_) => Ok(None),
        }
    }
}
