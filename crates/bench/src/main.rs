//! Compares Longshore with hand-written SQL on the same tables, in the same run, with
//! durable commits. Ratios are comparable between machines; absolute figures are not.
//!
//! The benchmark does not fail if a target is missed; it marks the figure as MISSED and
//! exits successfully. People judge the figures, knowing the machine.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tokio::task::JoinHandle;

mod api;
mod claim_and_settle;
mod core_operations;
mod endurance;
mod flow;
mod held_snapshot;
mod library;
mod postgres_server;
mod raw_postgres;
mod raw_sqlite;
mod report;
mod sdks;
mod sqlite_files;
mod table_size;
mod views;
mod worker;

/// Any error ends the run; no caller handles it.
type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Compares Longshore with hand-written SQL on the same tables.
///
/// Postgres is the server in DATABASE_URL. It must commit durably (fsync and
/// synchronous_commit on); otherwise nothing is measured on it. Tables are created
/// in schemas and databases named bench_… and dropped afterwards. Use an otherwise
/// idle machine: rounds are interleaved and medians compared, but a compiler that
/// runs at the same time still affects every figure.
#[derive(Parser)]
#[command(name = "bench", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Subcommand)]
enum Benchmark {
    /// Enqueue, claim and settle, compared with raw SQL: jobs/s, ratio, WAL per job.
    Core(core_operations::Options),
    /// Throughput while an open transaction prevents vacuum from removing dead rows,
    /// with and without the claim cursor.
    Held(held_snapshot::Options),
    /// The worker: draining a backlog, sustained load, pick-up latency, sleeping jobs,
    /// idle cost; compared with raw SQL, a bare loop and, if given, other job queues.
    Worker(worker::Options),
    /// Claims, lookups and counts in tables with millions of other jobs.
    Flat(table_size::Options),
    /// A long run in fast motion: whether tables, tallies and statistics stay the same
    /// while jobs pass through the queue and retention removes them.
    Endurance(endurance::Options),
    /// `POST /jobs` and `POST /jobs/batch` over real sockets, compared with an empty
    /// handler, single inserts and the library.
    Api(api::Options),
    /// Groups, limits, rates and suspended jobs, compared with plain jobs: throughput, latency,
    /// fairness, memory.
    Flow(flow::Options),
    /// Every read-only page and list of the API, in tables with millions of jobs.
    Views(views::Options),
    /// Workers over HTTP: draining a backlog and pick-up latency, with the library, a bare HTTP client
    /// and worker processes of the SDKs.
    Sdks(sdks::Options),
    /// The HTTP clients of `api`, which starts this command itself.
    #[command(hide = true)]
    Load(api::load_generator::Options),
}

/// The Postgres server to measure on.
#[derive(Args, Clone)]
struct ServerOptions {
    /// The Postgres server to measure on, such as postgres://postgres@127.0.0.1/postgres.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
}

impl ServerOptions {
    fn url(&self) -> Result<&str> {
        match self.database_url.as_deref() {
            Some(url) if !url.is_empty() => Ok(url),
            _ => {
                Err("no Postgres server was given: set DATABASE_URL, run `cargo xtask bench` (which starts \
                      one), or measure only SQLite with `core --engine sqlite`"
                    .into())
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Engine {
    Postgres,
    Sqlite,
    Both,
}

/// The folder for figures and scratch files. It is not the system's temporary folder,
/// which may be in memory, where a sync costs nothing.
fn scratch_folder() -> Result<PathBuf> {
    let folder = PathBuf::from("target/bench");
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Waits for all tasks; returns the sum of their job counts.
async fn join_all(tasks: Vec<JoinHandle<Result<u64>>>) -> Result<u64> {
    let mut jobs = 0;
    for task in tasks {
        jobs += task.await??;
    }
    Ok(jobs)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Benchmark::Load(options) = arguments.benchmark {
        // One thread, so that the clients use as little of the machine as possible.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(api::load_generator::run(options));
    }
    report::print_machine();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match arguments.benchmark {
            Benchmark::Core(options) => core_operations::run(&options).await,
            Benchmark::Worker(options) => worker::run(&options).await,
            Benchmark::Held(options) => held_snapshot::run(&options).await,
            Benchmark::Flat(options) => table_size::run(&options).await,
            Benchmark::Endurance(options) => endurance::run(&options).await,
            Benchmark::Api(options) => api::run(&options).await,
            Benchmark::Flow(options) => flow::run(&options).await,
            Benchmark::Sdks(options) => sdks::run(&options).await,
            Benchmark::Views(options) => views::run(&options).await,
            Benchmark::Load(options) => api::load_generator::run(options).await,
        }
    })
}
