//! Takes one other job queue through one scenario of `bench worker`, once, and
//! prints one line of JSON: jobs, seconds, what the client computed, how much
//! the log grew, latencies. `bench worker --peers` runs it, round by round
//! between its own; nothing is compared here.
//!
//! Every peer is tuned as its own documentation or benchmark advises, and each
//! in one way for all scenarios, as a program in production would be; the
//! figures are in the module of the peer.

use std::future::Future;

use clap::{Parser, ValueEnum};

mod awa;
mod graphile;
mod handler_probe;
mod postgres;
mod river;
mod rust_job_queue;
mod scenario;

/// Whatever goes wrong ends the run; nobody handles it.
type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Takes one other job queue through one scenario and prints one line of JSON.
#[derive(Parser)]
#[command(name = "bench-peers", max_term_width = 100)]
struct Arguments {
    scenario: Scenario,
    peer: Name,
    /// An empty database of the run's own: postgres://… or sqlite:FILE.
    #[arg(long, value_name = "URL")]
    database: String,
    /// drain: jobs that wait; pickup: samples.
    #[arg(long, default_value_t = 100_000)]
    jobs: u64,
    /// sustained, enqueue: callers that each await their enqueue.
    #[arg(long, default_value_t = 8)]
    callers: usize,
    /// sustained, enqueue: for how long.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Scenario {
    /// No-op jobs wait; from the worker's start until the last is settled.
    Drain,
    /// Callers enqueue one by one while the worker consumes.
    Sustained,
    /// Callers enqueue one by one; nobody consumes.
    Enqueue,
    /// From the enqueue call to the handler's first line, on an idle worker.
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

/// What the scenarios need of a queue. Handlers call [`handler_probe::record_run`].
trait Peer: Clone + Send + Sync + 'static {
    /// A worker at work.
    type Running: Send;

    fn start(&self) -> impl Future<Output = Result<Self::Running>> + Send;

    fn stop(&self, running: Self::Running) -> impl Future<Output = Result<()>> + Send;

    fn enqueue(&self, n: u64) -> impl Future<Output = Result<()>> + Send;

    /// The peer's fastest way to store many.
    fn enqueue_many(&self, jobs: std::ops::Range<u64>) -> impl Future<Output = Result<()>> + Send;

    /// Whether each of `jobs` is stored as done, asked once all handlers ran.
    fn all_settled(&self, jobs: u64) -> impl Future<Output = Result<bool>> + Send;

    /// What autovacuum would have done by now, and a fresh checkpoint.
    fn checkpoint_and_vacuum(&self) -> impl Future<Output = Result<()>> + Send;

    /// How many bytes the log has grown to so far, where that can be told.
    fn wal_position(&self) -> impl Future<Output = Result<Option<u64>>> + Send;
}

/// Connections of a peer's pool: one for each caller, what the worker needs, and
/// some for who looks on.
fn connections(callers: usize) -> u32 {
    callers as u32 + 32
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    // As many threads as the benchmark gives our side.
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
