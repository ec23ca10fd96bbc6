//! `bench api`: `POST /jobs` and `POST /jobs/batch` over real sockets, against a
//! handler that does nothing, single inserts, and the library, in turns.

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
use crate::{Engine, Result, ServerOptions, library, raw_postgres, raw_sqlite, together};

pub(crate) mod load_generator;
mod test_server;

const OURS: &str = "bench_ours";
const CLIENTS: usize = 64;
const BATCH: u64 = 10_000;
/// As many as a client of the library has unless told otherwise.
const POOL: u32 = 10;

const EMPTY: &str = "empty Axum handler";
const LIBRARY: &str = "the library, without HTTP";
const INSERTS: &str = "single inserts";

/// Options of `bench api`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// How long each side is measure_load in a round [default: 4, 1 with --quick].
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// How often each side is measured, in turns.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Which engines.
    #[arg(long, value_enum, default_value = "both")]
    engine: Engine,
    /// Only cells whose name contains this, such as `batch` or `open`.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Where the figures go.
    #[arg(long, value_name = "FILE", default_value = "target/bench/api.json")]
    json: PathBuf,
    /// Shorter phases: for trying things out, not for quoting.
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
        if admin.is_durable() {
            let facts = admin.settings_json();
            let backend = Backend::Postgres { admin: &mut admin, url: options.server.url()?.into() };
            engines.push(measure("Postgres", facts, options, backend).await?);
            admin.drop_schema(OURS).await?;
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
            let measured = singles(options, &mut backend, access, name).await?;
            cells.push(measured.0);
            limits.extend(measured.1);
        }
    }
    let name = "POST /jobs/batch, 10,000 a request";
    if options.wants(name) {
        eprintln!("measuring: {engine}, {name}");
        let measured = batches(options, &mut backend, name).await?;
        cells.push(measured.0);
        limits.extend(measured.1);
    }
    let mut figures = report::compare(engine, facts, &cells);
    println!("(client µs/job is the processor time of the server, or of who enqueues without one)");
    figures["limits"] = report::limits(&limits);
    Ok(figures)
}

/// One job a request.
async fn singles(
    options: &Options,
    backend: &mut Backend<'_>,
    access: Access,
    name: &str,
) -> Result<(Cell, Vec<Limit>)> {
    let mut cell = Cell::new(name).against(EMPTY, Some(0.3)).against(LIBRARY, None).against(INSERTS, None);
    let empty = TestServer::empty().await?;
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
        let began = Instant::now();
        let call = |_| tokio::spawn(library::enqueue_singly(client.clone(), began + time));
        let jobs = together((0..CLIENTS).map(call).collect()).await?;
        cell.baselines[1].samples.push(since(cpu, began, jobs));

        cell.baselines[2].samples.push(backend.inserts(time).await?);
    }
    let limits = [(50, "p50"), (99, "p99")].into_iter().flat_map(|(share, word)| {
        let of = |outcomes: &[Outcome]| {
            let each = outcomes.iter().map(|outcome| outcome.percentile(share).as_secs_f64() * 1000.0);
            median(each.collect()).unwrap_or(0.0)
        };
        [
            Limit::new(format!("{name}: {word}, ms"), of(&outcomes), None),
            Limit::new(format!("{EMPTY}: {word}, ms"), of(&empty_outcomes), None),
        ]
    });
    let limits = limits.collect();
    Ok((cell, limits))
}

/// Ten thousand jobs a request, one client.
async fn batches(options: &Options, backend: &mut Backend<'_>, name: &str) -> Result<(Cell, Vec<Limit>)> {
    let mut cell = Cell::new(name).against("enqueue_many of the library", Some(0.5));
    let mut seconds = Vec::new();
    for _ in 0..options.rounds {
        let (_keep, client) = backend.fresh().await?;
        let api = TestServer::api(&client, Access::Tokens).await?;
        let (sample, outcome) = measure_load(&api, 1, BATCH, options.time()).await?;
        cell.longshore.samples.push(sample);
        seconds.push(outcome.percentile(50).as_secs_f64());

        let (_keep, client) = backend.fresh().await?;
        let cpu = client_cpu();
        let began = Instant::now();
        let mut jobs = 0;
        while began.elapsed() < options.time() {
            library::enqueue_bulk(&client, BATCH, BATCH).await?;
            jobs += BATCH;
        }
        cell.baselines[0].samples.push(since(cpu, began, jobs));
    }
    let seconds = median(seconds).unwrap_or(0.0);
    Ok((cell, vec![Limit::new(format!("{name}: seconds"), seconds, None)]))
}

/// Asks a server, once to warm it up and once to be measured.
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
    let used = client_cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    Ok((outcome.sample(used), outcome))
}

fn since(cpu: Option<Duration>, began: Instant, jobs: u64) -> Sample {
    let used = client_cpu().zip(cpu).map(|(after, before)| after.saturating_sub(before));
    Sample { client_cpu: used, ..Sample::since(began, jobs) }
}

/// Where jobs are stored.
enum Backend<'a> {
    Postgres { admin: &'a mut Admin, url: String },
    Sqlite { files: Files },
}

impl Backend<'_> {
    /// Empty tables, and what must not be dropped while they are used.
    async fn fresh(&mut self) -> Result<(Option<crate::sqlite_files::File>, Client)> {
        match self {
            Backend::Postgres { admin, .. } => {
                let client = admin.fresh_schema(OURS).await?;
                library::enqueue_bulk(&client, 1000, 1000).await?;
                admin.vacuum_analyze(OURS).await?;
                Ok((None, client))
            }
            Backend::Sqlite { files } => {
                let file = files.fresh().await?;
                let client = file.client().await?;
                Ok((Some(file), client))
            }
        }
    }

    /// One row a transaction: by as many callers through a pool as large as the
    /// library's on Postgres, by the one connection that can write on SQLite.
    async fn inserts(&mut self, time: Duration) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, url } => {
                admin.fresh_schema(raw_postgres::SCHEMA).await?;
                let pool = PgPoolOptions::new().max_connections(POOL).connect(url).await?;
                let cpu = client_cpu();
                let began = Instant::now();
                let call = |_| tokio::spawn(raw_postgres::enqueue_pooled(pool.clone(), began + time));
                let jobs = together((0..CLIENTS).map(call).collect()).await?;
                let sample = since(cpu, began, jobs);
                pool.close().await;
                Ok(sample)
            }
            Backend::Sqlite { files } => {
                let file = files.fresh().await?;
                blocking(move || {
                    let mut connection = raw_sqlite::open(&file.path)?;
                    let (cpu, began) = (client_cpu(), Instant::now());
                    let jobs = raw_sqlite::enqueue_singly(&mut connection, began + time)?;
                    Ok(since(cpu, began, jobs))
                })
                .await
            }
        }
    }
}
