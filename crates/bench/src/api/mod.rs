//! `bench api`: `POST /jobs` and `POST /jobs/batch` over real sockets, compared with an
//! empty handler, single inserts, and the library, in alternating rounds.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use longshore::Client;
use longshore::api::Access;
use serde_json::{Value, json};
use sqlx::postgres::PgPoolOptions;

use self::load_generator::{Load, Outcome};
pub(crate) use self::test_server::TestServer;
use crate::postgres_server::Admin;
use crate::report::{self, Cell, Limit, Sample, client_cpu, median};
use crate::sqlite_files::{Files, blocking};
use crate::{Engine, Result, ServerOptions, join_all, library, raw_postgres, raw_sqlite};

pub(crate) mod load_generator;
mod test_server;

/// The schema for Longshore's side.
const SCHEMA: &str = "bench_ours";
const CLIENTS: usize = 64;
const BATCH: u64 = 10_000;
/// The library's default pool size.
const POOL_SIZE: u32 = 10;

const EMPTY_HANDLER: &str = "empty Axum handler";
const LIBRARY: &str = "the library, without HTTP";
const INSERTS: &str = "single inserts";

/// Options of `bench api`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// How long each side is measured in a round [default: 4, 1 with --quick].
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// How often each side is measured, in alternating rounds.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The engines to measure.
    #[arg(long, value_enum, default_value = "both")]
    engine: Engine,
    /// Only cells whose name contains this, such as `batch` or `open`.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/api.json")]
    json: PathBuf,
    /// Use shorter phases: good for experiments, too noisy to publish.
    #[arg(long)]
    quick: bool,
}

impl Options {
    fn time(&self) -> Duration {
        Duration::from_secs(self.seconds.unwrap_or(if self.quick { 1 } else { 4 }))
    }

    fn wants(&self, cell: &str) -> bool {
        self.only.as_deref().is_none_or(|only| cell.contains(only))
    }
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let mut engines = Vec::new();
    if options.engine != Engine::Sqlite {
        let mut admin = Admin::connect(options.server.url()?).await?;
        if admin.check_durability() {
            let facts = admin.settings_json();
            let backend = Backend::Postgres { admin: &mut admin, url: options.server.url()?.into() };
            engines.push(measure("Postgres", facts, options, backend).await?);
            admin.drop_schema(SCHEMA).await?;
            admin.drop_schema(raw_postgres::SCHEMA).await?;
        }
    }
    if options.engine != Engine::Postgres {
        let files = Files::new("api")?;
        let facts = files.print_durability()?;
        engines.push(measure("SQLite", facts, options, Backend::Sqlite { files }).await?);
    }
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "rounds": options.rounds,
        "quick": options.quick,
        "engines": engines,
    });
    report::write(&options.json, &figures)
}

async fn measure(engine: &str, facts: Value, options: &Options, mut backend: Backend<'_>) -> Result<Value> {
    let (mut cells, mut limits) = (Vec::new(), Vec::new());
    for (access, name) in
        [(Access::Tokens, "POST /jobs, 64 clients, tokens"), (Access::Open, "POST /jobs, 64 clients, open")]
    {
        if options.wants(name) {
            eprintln!("measuring: {engine}, {name}");
            let measured = single_jobs(options, &mut backend, access, name).await?;
            cells.push(measured.0);
            limits.extend(measured.1);
        }
    }
    let name = "POST /jobs/batch, 10,000 per request";
    if options.wants(name) {
        eprintln!("measuring: {engine}, {name}");
        let measured = batches(options, &mut backend, name).await?;
        cells.push(measured.0);
        limits.extend(measured.1);
    }
    let mut figures = report::compare(engine, facts, &cells);
    println!("(client µs/job is the CPU time of the server, or of the program that enqueues without one)");
    figures["limits"] = report::limits(&limits);
    Ok(figures)
}

/// Measures requests with one job each.
async fn single_jobs(
    options: &Options,
    backend: &mut Backend<'_>,
    access: Access,
    name: &str,
) -> Result<(Cell, Vec<Limit>)> {
    let mut cell =
        Cell::new(name).against(EMPTY_HANDLER, Some(0.3)).against(LIBRARY, None).against(INSERTS, None);
    let empty = TestServer::empty_handler().await?;
    let time = options.time();
    let (mut outcomes, mut empty_outcomes) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let (_keep, client) = backend.fresh().await?;
        let api = TestServer::api(&client, access).await?;
        let (sample, outcome) = measure_load(&api, CLIENTS, 1, time).await?;
        cell.longshore.samples.push(sample);
        outcomes.push(outcome);

        let (sample, outcome) = measure_load(&empty, CLIENTS, 1, time).await?;
        cell.baselines[0].samples.push(sample);
        empty_outcomes.push(outcome);

        let (_keep, client) = backend.fresh().await?;
        let cpu = client_cpu();
        let started = Instant::now();
        let call = |_| tokio::spawn(library::enqueue_singly(client.clone(), started + time));
        let jobs = join_all((0..CLIENTS).map(call).collect()).await?;
        cell.baselines[1].samples.push(sample_since(cpu, started, jobs));

        cell.baselines[2].samples.push(backend.inserts(time).await?);
    }
    let limits = [(50, "p50"), (99, "p99")].into_iter().flat_map(|(share, quantile)| {
        let of = |outcomes: &[Outcome]| {
            let each = outcomes.iter().map(|outcome| outcome.percentile(share).as_secs_f64() * 1000.0);
            median(each.collect()).unwrap_or(0.0)
        };
        [
            Limit::new(format!("{name}: {quantile}, ms"), of(&outcomes), None),
            Limit::new(format!("{EMPTY_HANDLER}: {quantile}, ms"), of(&empty_outcomes), None),
        ]
    });
    let limits = limits.collect();
    Ok((cell, limits))
}

/// Measures requests with ten thousand jobs each, from one client.
async fn batches(options: &Options, backend: &mut Backend<'_>, name: &str) -> Result<(Cell, Vec<Limit>)> {
    let mut cell = Cell::new(name).against("the library's enqueue_many", Some(0.5));
    let mut seconds = Vec::new();
    for _ in 0..options.rounds {
        let (_keep, client) = backend.fresh().await?;
        let api = TestServer::api(&client, Access::Tokens).await?;
        let (sample, outcome) = measure_load(&api, 1, BATCH, options.time()).await?;
        cell.longshore.samples.push(sample);
        seconds.push(outcome.percentile(50).as_secs_f64());

        let (_keep, client) = backend.fresh().await?;
        let cpu = client_cpu();
        let started = Instant::now();
        let mut jobs = 0;
        while started.elapsed() < options.time() {
            library::enqueue_bulk(&client, BATCH, BATCH).await?;
            jobs += BATCH;
        }
        cell.baselines[0].samples.push(sample_since(cpu, started, jobs));
    }
    let seconds = median(seconds).unwrap_or(0.0);
    Ok((cell, vec![Limit::new(format!("{name}: seconds"), seconds, None)]))
}

/// Sends load to a server: first to warm it up, then to measure it.
async fn measure_load(
    served: &TestServer,
    clients: usize,
    jobs: u64,
    time: Duration,
) -> Result<(Sample, Outcome)> {
    let load = Load { address: served.address, token: served.token.as_deref(), clients, jobs, time };
    Load { time: time / 8, ..load }.run().await?;
    let cpu = client_cpu();
    let outcome = load.run().await?;
    let cpu = client_cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    Ok((outcome.sample(cpu), outcome))
}

fn sample_since(cpu: Option<Duration>, started: Instant, jobs: u64) -> Sample {
    let cpu = client_cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    Sample { client_cpu: cpu, ..Sample::since(started, jobs) }
}

/// The database to measure on.
enum Backend<'a> {
    Postgres { admin: &'a mut Admin, url: String },
    Sqlite { files: Files },
}

impl Backend<'_> {
    /// Creates tables and returns a client for them. The SQLite file must not be dropped
    /// while the client is used.
    async fn fresh(&mut self) -> Result<(Option<crate::sqlite_files::File>, Client)> {
        match self {
            Backend::Postgres { admin, .. } => {
                let client = admin.fresh_schema(SCHEMA).await?;
                library::enqueue_bulk(&client, 1000, 1000).await?;
                admin.vacuum_analyze(SCHEMA).await?;
                Ok((None, client))
            }
            Backend::Sqlite { files } => {
                let file = files.fresh().await?;
                let client = file.client().await?;
                Ok((Some(file), client))
            }
        }
    }

    /// Inserts one row per transaction. On Postgres as many callers as the API has clients
    /// share a pool of the library's size; on SQLite there is one connection, because only
    /// one can write.
    async fn inserts(&mut self, time: Duration) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, url } => {
                admin.fresh_schema(raw_postgres::SCHEMA).await?;
                let pool = PgPoolOptions::new().max_connections(POOL_SIZE).connect(url).await?;
                let cpu = client_cpu();
                let started = Instant::now();
                let call = |_| tokio::spawn(raw_postgres::enqueue_pooled(pool.clone(), started + time));
                let jobs = join_all((0..CLIENTS).map(call).collect()).await?;
                let sample = sample_since(cpu, started, jobs);
                pool.close().await;
                Ok(sample)
            }
            Backend::Sqlite { files } => {
                let file = files.fresh().await?;
                blocking(move || {
                    let mut connection = raw_sqlite::open(&file.path)?;
                    let (cpu, started) = (client_cpu(), Instant::now());
                    let jobs = raw_sqlite::enqueue_singly(&mut connection, started + time)?;
                    Ok(sample_since(cpu, started, jobs))
                })
                .await
            }
        }
    }
}
