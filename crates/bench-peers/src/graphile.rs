//! graphile_worker, tuned as in its own `benches/perf_test.rs`: a local queue of 5,000,
//! completions stored in batches every 5 ms, and a poll every 5 ms. It runs 24 jobs at once,
//! like Longshore, instead of 500: in alternating runs it is faster that way in every
//! scenario and uses at most two thirds of the CPU time.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use graphile_worker::{
    IntoTaskHandlerResult, JobSpec, LocalQueueConfig, RawJobSpec, TaskHandler, Worker, WorkerContext,
    WorkerOptions, WorkerUtils,
};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;
use tokio::task::JoinHandle;

use crate::handler_probe::{self, Payload};
use crate::{Peer, Result, postgres};

const SCHEMA: &str = "graphile_worker";

#[derive(Clone, Serialize, Deserialize)]
struct Bench(Payload);

impl TaskHandler for Bench {
    const IDENTIFIER: &'static str = "bench";

    async fn run(self, _: WorkerContext) -> impl IntoTaskHandlerResult {
        handler_probe::record_run(self.0.n);
        Ok::<(), String>(())
    }
}

#[derive(Clone)]
pub(crate) struct Graphile {
    pool: PgPool,
    utils: Arc<WorkerUtils>,
}

impl Graphile {
    pub(crate) async fn install(url: &str, connections: u32) -> Result<Self> {
        let pool = PgPoolOptions::new().max_connections(connections).connect(url).await?;
        let utils = WorkerUtils::new(pool.clone(), SCHEMA);
        utils.migrate().await?;
        Ok(Graphile { pool, utils: Arc::new(utils) })
    }
}

impl Peer for Graphile {
    type Running = (Arc<Worker>, JoinHandle<Result<()>>);

    async fn start(&self) -> Result<Self::Running> {
        let options = WorkerOptions::default()
            .database(self.pool.clone())
            .schema(SCHEMA)
            .concurrency(24)
            .poll_interval(Duration::from_millis(5))
            .complete_job_batch_delay(Duration::from_millis(5))
            .local_queue(LocalQueueConfig::default().with_size(5000))
            .listen_os_shutdown_signals(false)
            .define_job::<Bench>();
        let worker = Arc::new(options.init().await?);
        let running = worker.clone();
        Ok((worker, tokio::spawn(async move { Ok(running.run().await?) })))
    }

    async fn stop(&self, (worker, task): Self::Running) -> Result<()> {
        worker.request_shutdown();
        task.await?
    }

    async fn enqueue(&self, n: u64) -> Result<()> {
        self.utils.add_job(Bench(Payload::new(n)), JobSpec::default()).await?;
        Ok(())
    }

    async fn enqueue_many(&self, jobs: Range<u64>) -> Result<()> {
        let mut specs = Vec::new();
        for n in jobs {
            specs.push(RawJobSpec {
                identifier: Bench::IDENTIFIER.into(),
                payload: serde_json::to_value(Payload::new(n))?,
                spec: JobSpec::default(),
            });
        }
        self.utils.add_raw_jobs(&specs).await?;
        Ok(())
    }

    /// Jobs that are done are deleted.
    async fn all_settled(&self, _: u64) -> Result<bool> {
        let unsettled = "select exists (select 1 from graphile_worker._private_jobs)";
        let unsettled: bool = sqlx::query_scalar(unsettled).fetch_one(&self.pool).await?;
        Ok(!unsettled)
    }

    async fn checkpoint_and_vacuum(&self) -> Result<()> {
        postgres::checkpoint_and_vacuum(&self.pool).await
    }

    async fn wal_position(&self) -> Result<Option<u64>> {
        postgres::wal_position(&self.pool).await
    }
}
