//! rust-job-queue-api-worker-system, with 16 workers, the maximum in its own
//! `benches/throughput.rs`, each with its own connection. It has no notifications and polls
//! every 500 ms by default. Here each worker polls every 10 ms, so that there is more than
//! one poll per millisecond. Its kinds are fixed; the jobs have the kind whose payload is
//! closest to that of the other peers.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rust_job_queue_api_worker_system::worker::{ExecutionContext, ExecutionOutcome, Executor, WorkerRuntime};
use rust_job_queue_api_worker_system::{Job, JobKind, NewJob, PoolConfig, connect, migrate, queue};
use serde_json::json;
use sqlx_0_8::PgPool;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::handler_probe::{self, Payload};
use crate::{Peer, Result, postgres};

const WORKERS: usize = 16;
const POLL: Duration = Duration::from_millis(10);
/// It has no bulk enqueue, so this many callers share the jobs.
const CALLERS: u64 = 8;

struct NoOp;

#[async_trait]
impl Executor for NoOp {
    async fn execute(&self, _: &ExecutionContext, job: &Job) -> ExecutionOutcome {
        match job.payload["n"].as_u64() {
            Some(n) => {
                handler_probe::record_run(n);
                ExecutionOutcome::Succeeded
            }
            None => ExecutionOutcome::Failed("the payload has no number".into()),
        }
    }
}

#[derive(Clone)]
pub(crate) struct JobQueue {
    pool: PgPool,
}

impl JobQueue {
    pub(crate) async fn install(url: &str, connections: u32) -> Result<Self> {
        let pool = connect(&PoolConfig::from_url(url).with_max_connections(connections)).await?;
        migrate(&pool).await?;
        Ok(JobQueue { pool })
    }
}

impl Peer for JobQueue {
    type Running = (CancellationToken, JoinHandle<()>);

    async fn start(&self) -> Result<Self::Running> {
        let stop = CancellationToken::new();
        let runtime = WorkerRuntime::new(self.pool.clone(), Arc::new(NoOp))
            .with_concurrency(WORKERS)
            .with_poll_interval(POLL, POLL);
        Ok((stop.clone(), tokio::spawn(runtime.run(stop))))
    }

    async fn stop(&self, (stop, task): Self::Running) -> Result<()> {
        stop.cancel();
        Ok(task.await?)
    }

    async fn enqueue(&self, n: u64) -> Result<()> {
        let Payload { to, template, n } = Payload::new(n);
        let job = NewJob {
            kind: JobKind::SendEmail,
            payload: json!({ "to": to, "subject": template, "body": "", "n": n }),
            max_attempts: None,
            idempotency_key: None,
        };
        queue::enqueue(&self.pool, job).await?;
        Ok(())
    }

    async fn enqueue_many(&self, jobs: Range<u64>) -> Result<()> {
        let call = |nth: u64| {
            let (queue, mine) = (self.clone(), jobs.clone().skip(nth as usize).step_by(CALLERS as usize));
            tokio::spawn(async move {
                for n in mine {
                    queue.enqueue(n).await?;
                }
                Ok::<_, Box<dyn std::error::Error + Send + Sync>>(())
            })
        };
        for caller in (0..CALLERS).map(call).collect::<Vec<_>>() {
            caller.await??;
        }
        Ok(())
    }

    async fn all_settled(&self, _: u64) -> Result<bool> {
        let unsettled = "select exists (select 1 from jobs where status <> 'succeeded')";
        let unsettled: bool = sqlx_0_8::query_scalar(unsettled).fetch_one(&self.pool).await?;
        Ok(!unsettled)
    }

    async fn checkpoint_and_vacuum(&self) -> Result<()> {
        postgres::checkpoint_and_vacuum_0_8(&self.pool).await
    }

    async fn wal_position(&self) -> Result<Option<u64>> {
        postgres::wal_position_0_8(&self.pool).await
    }
}
