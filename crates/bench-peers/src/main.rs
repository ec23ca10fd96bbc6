//! Runs one scenario of `bench worker` once with another job queue, a peer, and prints one
//! line of JSON: jobs, seconds, CPU time of the client, WAL bytes, latencies.
//! `bench worker --peers` runs this program between its own rounds and compares the
//! figures.
//!
//! Every peer is tuned as its own documentation or benchmark recommends, with the same
//! settings for all scenarios, as in production. The settings are in the peer's module.

use std::future::Future;

use clap::{Parser, ValueEnum};

mod awa;
mod graphile;
mod handler_probe;
mod postgres;
mod river;
mod rust_job_queue;
mod scenario;

/// Any error ends the run; no caller handles it.
type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Runs one scenario once with another job queue and prints one line of JSON.
#[derive(Parser)]
#[command(name = "bench-peers", max_term_width = 100)]
struct Arguments {
    scenario: Scenario,
    peer: Name,
    /// An empty database for this run only: postgres://… or sqlite:FILE.
    #[arg(long, value_name = "URL")]
    database: String,
    /// drain: jobs in the backlog; pickup: number of samples.
    #[arg(long, default_value_t = 100_000)]
    jobs: u64,
    /// sustained, enqueue: callers that each await every enqueue.
    #[arg(long, default_value_t = 8)]
    callers: usize,
    /// sustained, enqueue: how long to measure.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Scenario {
    /// Drains a backlog of no-op jobs, from the worker's start to the last settle.
    Drain,
    /// Callers enqueue one by one while the worker runs the jobs.
    Sustained,
    /// Callers enqueue one by one without a worker.
    Enqueue,
    /// The time from the enqueue call to the handler's first line, on an idle worker.
    Pickup,
}

#[derive(Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Name {
    GraphileWorker,
    Riverqueue,
    RiverqueueSqlite,
    Awa,
    RustJobQueue,
}

/// What the scenarios need from a job queue. Its handlers call
/// [`handler_probe::record_run`].
trait Peer: Clone + Send + Sync + 'static {
    /// A running worker.
    type Running: Send;

    fn start(&self) -> impl Future<Output = Result<Self::Running>> + Send;

    fn stop(&self, running: Self::Running) -> impl Future<Output = Result<()>> + Send;

    fn enqueue(&self, n: u64) -> impl Future<Output = Result<()>> + Send;

    /// Enqueues many jobs in the peer's fastest way.
    fn enqueue_many(&self, jobs: std::ops::Range<u64>) -> impl Future<Output = Result<()>> + Send;

    /// Whether all `jobs` are stored as done. Called once all handlers have run.
    fn all_settled(&self, jobs: u64) -> impl Future<Output = Result<bool>> + Send;

    /// Makes a checkpoint and does what autovacuum would have done after a while.
    fn checkpoint_and_vacuum(&self) -> impl Future<Output = Result<()>> + Send;

    /// The number of bytes written to the WAL so far, if the engine reports it.
    fn wal_position(&self) -> impl Future<Output = Result<Option<u64>>> + Send;
}

/// The size of a peer's pool: one connection for each caller, and enough for the worker
/// and for the queries of the scenarios.
fn connections(callers: usize) -> u32 {
    callers as u32 + 32
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // As many threads as the benchmark uses for Longshore.
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let outcome = runtime.block_on(async {
        let (url, connections) = (arguments.database.as_str(), connections(arguments.callers));
        match arguments.peer {
            Name::GraphileWorker => {
                scenario::run(&arguments, graphile::Graphile::install(url, connections).await?).await
            }
            Name::Riverqueue => {
                scenario::run(&arguments, river::River::install_postgres(url, connections).await?).await
            }
            Name::RiverqueueSqlite => {
                scenario::run(&arguments, river::River::install_sqlite(url, connections).await?).await
            }
            Name::Awa => scenario::run(&arguments, awa::Awa::install(url, connections).await?).await,
            Name::RustJobQueue => {
                scenario::run(&arguments, rust_job_queue::JobQueue::install(url, connections).await?).await
            }
        }
    })?;
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}
