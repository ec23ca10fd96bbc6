//! Measures Longshore against hand-written SQL on the same tables, in the same
//! run, with durable commits. Ratios carry from one machine to the next;
//! absolute figures do not.
//!
//! Nothing here passes or fails: a bar that is missed is marked and the
//! program ends well. Judging is for people, and for the machine they chose.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tokio::task::JoinHandle;

mod api;
mod claim_and_settle;
mod core_operations;
mod held_snapshot;
mod library;
mod postgres_server;
mod raw_postgres;
mod raw_sqlite;
mod report;
mod sqlite_files;
mod table_size;
mod views;
mod worker;

/// Whatever goes wrong ends the run; nobody handles it.
type Result<T, E = Box<dyn std::error::Error + Send + Sync>> = std::result::Result<T, E>;

/// Measures Longshore against hand-written SQL on the same tables.
///
/// Postgres is the server that DATABASE_URL names; it must commit durably
/// (fsync and synchronous_commit on), or nothing is reported. Tables are made
/// in schemas called bench_… and dropped again. Use a quiet machine: the rounds
/// are interleaved and the medians compared, but a compiler running beside them
/// is still in every figure.
#[derive(Parser)]
#[command(name = "bench", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Enqueue, claim and settle, against raw SQL: jobs/s, ratio, WAL per job.
    Core(core_operations::Options),
    /// Throughput while a transaction elsewhere holds back vacuum, with and
    /// without the claim cursor.
    Held(held_snapshot::Options),
    /// The worker: drain, produce and consume, pick-up, sleeping jobs, idle cost;
    /// against raw SQL, a bare loop and, if given, other job queues.
    Worker(worker::Options),
    /// Claims, lookups and counts beside millions of other jobs.
    Flat(table_size::Options),
    /// `POST /jobs` and `POST /jobs/batch` over real sockets, against an empty
    /// handler, single inserts and the library.
    Api(api::Options),
    /// Every page that people look at, over HTTP, beside millions of jobs.
    Views(views::Options),
    /// The clients of `api`, which runs this by itself.
    #[command(hide = true)]
    Load(api::load_generator::Options),
}

/// Where Postgres is.
#[derive(Args, Clone)]
struct ServerOptions {
    /// The Postgres to measure on, such as postgres://postgres@127.0.0.1/postgres.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<String>,
}

impl ServerOptions {
    fn url(&self) -> Result<&str> {
        match self.database_url.as_deref() {
            Some(url) if !url.is_empty() => Ok(url),
            _ => Err(
                "no Postgres to measure on: set DATABASE_URL, run `cargo xtask bench` (which starts one), \
                      or leave Postgres out with `core --engine sqlite`"
                    .into(),
            ),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Engine {
    Postgres,
    Sqlite,
    Both,
}

/// Where figures and scratch files go. Not the system's temporary folder,
/// which may be in memory, where a sync costs nothing.
fn scratch_folder() -> Result<PathBuf> {
    let folder = PathBuf::from("target/bench");
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Waits for all of them; the jobs they did.
async fn together(tasks: Vec<JoinHandle<Result<u64>>>) -> Result<u64> {
    let mut jobs = 0;
    for task in tasks {
        jobs += task.await??;
    }
    Ok(jobs)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let What::Load(options) = arguments.what {
        // One thread: a client must not take more of the machine than it needs.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(api::load_generator::run(options));
    }
    report::introduce();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        match arguments.what {
            What::Core(options) => core_operations::run(&options).await,
            What::Worker(options) => worker::run(&options).await,
            What::Held(options) => held_snapshot::run(&options).await,
            What::Flat(options) => table_size::run(&options).await,
            What::Api(options) => api::run(&options).await,
            What::Views(options) => views::run(&options).await,
            What::Load(options) => api::load_generator::run(options).await,
        }
    })
}
