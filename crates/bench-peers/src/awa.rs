//! awa, tuned as in its own offered-rate benchmark: 1,024 workers, no deadline (so that it
//! takes its short path for leases), and a poll every 50 ms.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use awa::{Client, InsertOpts, JobArgs, JobResult, QueueConfig, QueueStorage, QueueStorageConfig};
use serde::{Deserialize, Serialize};
use sqlx_0_8::PgPool;
use sqlx_0_8::postgres::PgPoolOptions;

use crate::handler_probe::{self, Payload};
use crate::{Peer, Result, postgres};

const QUEUE: &str = "default";

#[derive(Debug, Serialize, Deserialize, JobArgs)]
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

#[derive(Clone)]
pub(crate) struct Awa {
    pool: PgPool,
    store: Arc<QueueStorage>,
}

impl Awa {
    pub(crate) async fn install(url: &str, connections: u32) -> Result<Self> {
        let pool = PgPoolOptions::new().max_connections(connections).connect(url).await?;
        awa::migrations::run(&pool).await?;
        let store = QueueStorage::new(QueueStorageConfig::default())?;
        let awa = Awa { pool, store: Arc::new(store) };
        // The first worker on a new database decides which storage it uses. Jobs that are
        // enqueued before go to a storage that no worker reads.
        let client = awa.client()?;
        client.start().await?;
        client.shutdown(Duration::from_secs(5)).await;
        Ok(awa)
    }

    fn client(&self) -> Result<Client> {
        let queue = QueueConfig {
            max_workers: 1024,
            deadline_duration: Duration::ZERO,
            poll_interval: Duration::from_millis(50),
            ..QueueConfig::default()
        };
        let work = |job: Bench, _: &awa::JobContext| async move {
            handler_probe::record_run(job.n);
            Ok(JobResult::Completed)
        };
        Ok(Client::builder(self.pool.clone()).queue(QUEUE, queue).register::<Bench, _, _>(work).build()?)
    }
}

impl Peer for Awa {
    type Running = Client;

    async fn start(&self) -> Result<Client> {
        let client = self.client()?;
        client.start().await?;
        Ok(client)
    }

    async fn stop(&self, running: Client) -> Result<()> {
        running.shutdown(Duration::from_secs(5)).await;
        Ok(())
    }

    async fn enqueue(&self, n: u64) -> Result<()> {
        awa::insert(&self.pool, &Bench::new(n)).await?;
        Ok(())
    }

    async fn enqueue_many(&self, jobs: Range<u64>) -> Result<()> {
        let params = |n| awa::model::insert::params_with(&Bench::new(n), InsertOpts::default());
        let params = jobs.map(params).collect::<Result<Vec<_>, _>>()?;
        self.store.enqueue_params_copy(&self.pool, &params).await?;
        Ok(())
    }

    async fn all_settled(&self, jobs: u64) -> Result<bool> {
        Ok(self.store.queue_counts(&self.pool, QUEUE).await?.terminal as u64 >= jobs)
    }

    async fn checkpoint_and_vacuum(&self) -> Result<()> {
        postgres::checkpoint_and_vacuum_0_8(&self.pool).await
    }

    async fn wal_position(&self) -> Result<Option<u64>> {
        postgres::wal_position_0_8(&self.pool).await
    }
}
