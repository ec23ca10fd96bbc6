//! `bench core`: enqueue, claim and settle with the library and with raw SQL, in
//! alternating rounds.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::json;

use crate::claim_and_settle::{self, WARM_UP};
use crate::postgres_server::Admin;
use crate::report::{self, Cell, Sample};
use crate::sqlite_files::{Files, blocking};
use crate::{Engine, Result, ServerOptions, join_all, library, raw_postgres, raw_sqlite};

/// The schema for Longshore's side.
const SCHEMA: &str = "bench_ours";
const BULK: u64 = 10_000;
const CALLERS: [usize; 3] = [1, 8, 64];
const BATCHES: [u32; 4] = [1, 10, 100, 500];
const CLAIMERS: [usize; 2] = [1, 2];

/// Options of `bench core`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Jobs in the claim cells with the largest batches; cells with smaller batches use
    /// fewer [default: 60000, 8000 with --quick].
    #[arg(long, value_name = "N")]
    jobs: Option<u64>,
    /// How often each side of a cell is measured, in alternating rounds.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The engines to measure.
    #[arg(long, value_enum, default_value = "both")]
    engine: Engine,
    /// Only cells whose name contains this, such as `claim` or `500 per batch`.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/core.json")]
    json: PathBuf,
    /// Use shorter phases: good for experiments, too noisy to publish.
    #[arg(long)]
    quick: bool,
}

impl Options {
    fn claim_jobs(&self, batch: u32) -> u64 {
        let max = self.jobs.unwrap_or(if self.quick { 8_000 } else { 60_000 });
        let jobs = match batch {
            ..10 => max / 15,
            10..100 => max / 3,
            _ => max,
        };
        jobs.max(batch.into())
    }

    fn bulk_calls(&self) -> u64 {
        if self.quick { 3 } else { 20 }
    }

    fn single_time(&self) -> Duration {
        Duration::from_millis(if self.quick { 500 } else { 2500 })
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
            let cells = Postgres { options, admin: &mut admin }.measure().await?;
            engines.push(report::compare("Postgres", admin.settings_json(), &cells));
        }
    }
    if options.engine != Engine::Postgres {
        let files = Files::new("core")?;
        let facts = files.print_durability()?;
        let cells = Sqlite { options, files }.measure().await?;
        engines.push(report::compare("SQLite", facts, &cells));
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

fn bulk_cell() -> Cell {
    Cell::new("bulk enqueue, 10,000 per call")
}

fn single_name(callers: usize) -> String {
    format!("single enqueue, {callers} caller{}", if callers == 1 { "" } else { "s" })
}

fn claim_name(batch: u32, claimers: usize) -> String {
    format!("claim+settle, {batch} per batch, {claimers} claimer{}", if claimers == 1 { "" } else { "s" })
}

fn print_progress(cell: &str) {
    eprintln!("measuring: {cell}");
}

// ---- Postgres ------------------------------------------------------------

struct Postgres<'a> {
    options: &'a Options,
    admin: &'a mut Admin,
}

impl Postgres<'_> {
    async fn measure(mut self) -> Result<Vec<Cell>> {
        let mut cells = Vec::new();
        let cell = bulk_cell().against("COPY", Some(0.6)).against("insert … select unnest", None);
        if self.options.wants("bulk enqueue, 10,000 per call") {
            cells.push(self.bulk(cell).await?);
        }
        for callers in CALLERS {
            if self.options.wants(&single_name(callers)) {
                cells.push(self.single(callers).await?);
            }
        }
        for claimers in CLAIMERS {
            for batch in BATCHES {
                if self.options.wants(&claim_name(batch, claimers)) {
                    cells.push(self.claim(batch, claimers).await?);
                }
            }
        }
        self.admin.drop_schema(SCHEMA).await?;
        self.admin.drop_schema(raw_postgres::SCHEMA).await?;
        Ok(cells)
    }

    async fn bulk(&mut self, mut cell: Cell) -> Result<Cell> {
        print_progress("Postgres, bulk enqueue");
        let calls = self.options.bulk_calls();
        for _ in 0..self.options.rounds {
            let client = self.admin.fresh_schema(SCHEMA).await?;
            library::enqueue_bulk(&client, BULK, BULK).await?;
            self.admin.vacuum_analyze(SCHEMA).await?;
            let work = async {
                library::enqueue_bulk(&client, calls * BULK, BULK).await?;
                Ok(calls * BULK)
            };
            let sample = self.admin.timed(work).await?;
            cell.longshore.samples.push(sample);

            let mut connection = self.fresh_raw().await?;
            raw_postgres::copy_in(&mut connection, 0, BULK).await?;
            self.admin.vacuum_analyze(raw_postgres::SCHEMA).await?;
            let work = async {
                for call in 0..calls {
                    raw_postgres::copy_in(&mut connection, call * BULK, BULK).await?;
                }
                Ok(calls * BULK)
            };
            let sample = self.admin.timed(work).await?;
            cell.baselines[0].samples.push(sample);

            let mut connection = self.fresh_raw().await?;
            raw_postgres::insert_many(&mut connection, 0, BULK).await?;
            self.admin.vacuum_analyze(raw_postgres::SCHEMA).await?;
            let work = async {
                for call in 0..calls {
                    raw_postgres::insert_many(&mut connection, call * BULK, BULK).await?;
                }
                Ok(calls * BULK)
            };
            let sample = self.admin.timed(work).await?;
            cell.baselines[1].samples.push(sample);
        }
        Ok(cell)
    }

    async fn single(&mut self, callers: usize) -> Result<Cell> {
        let name = single_name(callers);
        print_progress(&format!("Postgres, {name}"));
        let mut cell = Cell::new(name);
        for how in raw_postgres::Single::ALL {
            let target = match (callers, how) {
                (1, raw_postgres::Single::TwoRows) => Some(0.8),
                // The best peer's single enqueue reaches 0.66 of this insert's rate on the
                // same machine. The targets are 1.3 and 4 times that.
                (8, raw_postgres::Single::Plain) => Some(0.86),
                (64, raw_postgres::Single::Plain) => Some(2.64),
                _ => None,
            };
            cell = cell.against(how.name(), target);
        }
        let time = self.options.single_time();
        for _ in 0..self.options.rounds {
            let client = self.admin.fresh_schema(SCHEMA).await?;
            library::enqueue_bulk(&client, 1000, 1000).await?;
            join_all(vec![tokio::spawn(library::enqueue_singly(
                client.clone(),
                Instant::now() + Duration::from_millis(100),
            ))])
            .await?;
            self.admin.vacuum_analyze(SCHEMA).await?;
            let work = async {
                let until = Instant::now() + time;
                let call = |_| tokio::spawn(library::enqueue_singly(client.clone(), until));
                join_all((0..callers).map(call).collect()).await
            };
            let sample = self.admin.timed(work).await?;
            cell.longshore.samples.push(sample);

            for (nth, how) in raw_postgres::Single::ALL.into_iter().enumerate() {
                let mut connection = self.fresh_raw().await?;
                raw_postgres::insert_many(&mut connection, 0, 1000).await?;
                self.admin.vacuum_analyze(raw_postgres::SCHEMA).await?;
                let mut connections = Vec::new();
                for _ in 0..callers {
                    let mut connection = self.admin.raw_connection().await?;
                    for n in 0..WARM_UP {
                        raw_postgres::enqueue_one(&mut connection, how, n).await?;
                    }
                    connections.push(connection);
                }
                let work = async {
                    let until = Instant::now() + time;
                    let call =
                        |connection| tokio::spawn(raw_postgres::enqueue_singly(connection, how, until));
                    join_all(connections.into_iter().map(call).collect()).await
                };
                let sample = self.admin.timed(work).await?;
                cell.baselines[nth].samples.push(sample);
            }
        }
        Ok(cell)
    }

    async fn claim(&mut self, batch: u32, claimers: usize) -> Result<Cell> {
        let name = claim_name(batch, claimers);
        print_progress(&format!("Postgres, {name}"));
        let target = (batch == 500).then_some(0.85);
        let mut cell = Cell::new(name).against("four-table SQL", target);
        let jobs = self.options.claim_jobs(batch);
        for _ in 0..self.options.rounds {
            cell.longshore.samples.push(
                claim_and_settle::library_on_postgres(self.admin, SCHEMA, jobs, batch, claimers).await?,
            );
            cell.baselines[0]
                .samples
                .push(claim_and_settle::raw_on_postgres(self.admin, jobs, batch, claimers).await?);
        }
        Ok(cell)
    }

    /// Creates empty tables for raw SQL, with the library's migrations.
    async fn fresh_raw(&mut self) -> Result<sqlx::PgConnection> {
        self.admin.fresh_schema(raw_postgres::SCHEMA).await?;
        self.admin.raw_connection().await
    }
}

// ---- SQLite --------------------------------------------------------------

struct Sqlite<'a> {
    options: &'a Options,
    files: Files,
}

impl Sqlite<'_> {
    async fn measure(mut self) -> Result<Vec<Cell>> {
        let mut cells = Vec::new();
        if self.options.wants("bulk enqueue, 10,000 per call") {
            cells.push(self.bulk().await?);
        }
        for callers in CALLERS {
            if self.options.wants(&single_name(callers)) {
                cells.push(self.single(callers).await?);
            }
        }
        for claimers in CLAIMERS {
            for batch in BATCHES {
                if self.options.wants(&claim_name(batch, claimers)) {
                    cells.push(self.claim(batch, claimers).await?);
                }
            }
        }
        Ok(cells)
    }

    async fn bulk(&mut self) -> Result<Cell> {
        print_progress("SQLite, bulk enqueue");
        let mut cell = bulk_cell().against("two inserts per job, one transaction", None);
        let calls = self.options.bulk_calls();
        for _ in 0..self.options.rounds {
            let file = self.files.fresh().await?;
            let client = file.client().await?;
            let started = Instant::now();
            library::enqueue_bulk(&client, calls * BULK, BULK).await?;
            cell.longshore.samples.push(Sample::since(started, calls * BULK));

            let file = self.files.fresh().await?;
            let raw = blocking(move || {
                let mut connection = raw_sqlite::open(&file.path)?;
                let started = Instant::now();
                for call in 0..calls {
                    raw_sqlite::enqueue(&mut connection, call * BULK, BULK)?;
                }
                Ok(Sample::since(started, calls * BULK))
            });
            cell.baselines[0].samples.push(raw.await?);
        }
        Ok(cell)
    }

    async fn single(&mut self, callers: usize) -> Result<Cell> {
        let name = single_name(callers);
        print_progress(&format!("SQLite, {name}"));
        let mut cell = Cell::new(name).against("one transaction per job, 1 connection", None);
        let time = self.options.single_time();
        for _ in 0..self.options.rounds {
            let file = self.files.fresh().await?;
            let client = file.client().await?;
            let started = Instant::now();
            let call = |_| tokio::spawn(library::enqueue_singly(client.clone(), started + time));
            let jobs = join_all((0..callers).map(call).collect()).await?;
            cell.longshore.samples.push(Sample::since(started, jobs));

            let file = self.files.fresh().await?;
            let raw = blocking(move || {
                let mut connection = raw_sqlite::open(&file.path)?;
                let started = Instant::now();
                let jobs = raw_sqlite::enqueue_singly(&mut connection, started + time)?;
                Ok(Sample::since(started, jobs))
            });
            cell.baselines[0].samples.push(raw.await?);
        }
        Ok(cell)
    }

    async fn claim(&mut self, batch: u32, claimers: usize) -> Result<Cell> {
        let name = claim_name(batch, claimers);
        print_progress(&format!("SQLite, {name}"));
        let target = (batch == 100).then_some(0.7);
        let mut cell = Cell::new(name).against("four-table SQL, one statement per row", target);
        let jobs = self.options.claim_jobs(batch);
        for _ in 0..self.options.rounds {
            cell.longshore
                .samples
                .push(claim_and_settle::library_on_sqlite(&mut self.files, jobs, batch, claimers).await?);
            cell.baselines[0]
                .samples
                .push(claim_and_settle::raw_on_sqlite(&mut self.files, jobs, batch, claimers).await?);
        }
        Ok(cell)
    }
}
