//! riverqueue, tuned as in its own `riverqueue bench`: 2,000 workers, fetches 2
//! milliseconds apart, a poll every 20. The pace of its notifications is set to
//! the same 2 milliseconds, because at its default they would be the limit of
//! the pick-ups. On SQLite with the write-ahead log and a full sync at each
//! commit, as durable as our side.

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

/// A wait for the one writer of SQLite is no failure.
const BUSY: Duration = Duration::from_secs(30);

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
        Self::over(Pool::Postgres(pool))
    }

    pub(crate) async fn install_sqlite(url: &str, connections: u32) -> Result<Self> {
        let options = SqliteConnectOptions::from_str(url)?
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY);
        // More connections only queue for the one writer.
        let pool = SqlitePoolOptions::new()
            .max_connections(connections.min(5))
            .acquire_timeout(BUSY)
            .connect_with(options)
            .await?;
        SqliteMigrator::new(pool.clone()).migrate_up().await?;
        Self::over(Pool::Sqlite(pool))
    }

    fn over(pool: Pool) -> Result<Self> {
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
        let open = "select exists (select 1 from river_job where state <> 'completed')";
        let open: bool = match &self.pool {
            Pool::Postgres(pool) => sqlx::query_scalar(open).fetch_one(pool).await?,
            Pool::Sqlite(pool) => sqlx::query_scalar(open).fetch_one(pool).await?,
        };
        Ok(!open)
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
