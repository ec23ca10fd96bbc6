//! `bench worker`: the worker as a program would run it, compared with hand-written SQL
//! on the same tables, a bare loop, and other job queues, in alternating rounds.

use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use longshore::Client;
use serde_json::{Value, json};

use self::mixed::Mixed;
use self::peers::{Outcome, Peers, Scenario};
use self::pickup::Pickups;
use self::scenarios::Sustained;
use crate::postgres_server::Admin;
use crate::report::{self, Cell, Limit, Sample, client_cpu, median, thousands};
use crate::sqlite_files::{File, Files};
use crate::{Engine, Result, ServerOptions, claim_and_settle, join_all, library};

mod idle;
mod mixed;
mod peers;
mod pickup;
pub(crate) mod scenarios;

/// Separate databases, because the server counts commits and statements per database.
const DATABASE: &str = "bench_worker";
const PEER_DATABASE: &str = "bench_peers";
const SCHEMA: &str = "bench_ours";
const BULK: u64 = 10_000;
/// How raw SQL, and the library without its worker, drain a backlog.
const BATCH: u32 = 500;
const CLAIMERS: usize = 2;
const PRODUCERS: [usize; 2] = [4, 64];
const CALLERS: [usize; 2] = [8, 64];

/// What to measure. The names are those of the performance targets.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Figure {
    /// What an idle worker costs.
    #[value(alias = "p11")]
    Idle,
    /// Drains a backlog of no-op jobs, from the worker's start to the last settle.
    #[value(alias = "p1")]
    W1,
    /// Producers enqueue one by one while the worker runs the jobs.
    #[value(alias = "p2")]
    W3,
    /// Callers enqueue one by one without a worker.
    #[value(alias = "p3")]
    Enqueue,
    /// Runs jobs that sleep, 200 at once.
    #[value(alias = "p8")]
    W9,
    /// The time from the enqueue call to the handler's first line, on an idle worker.
    #[value(alias = "p5")]
    W2,
    /// Two workers drain fast and slow kinds.
    Mixed,
}

/// Options of `bench worker`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Jobs in the backlog of W1 and W9 [default: 100000, 10000 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    jobs: Option<u64>,
    /// How long producers and the worker run in W3 [default: 10, 2 with --quick].
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// Pick-ups per round in W2 [default: 2000, 200 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// How often each side is measured, in alternating rounds.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The engines to measure.
    #[arg(long, value_enum, default_value = "both")]
    engine: Engine,
    /// Only these figures, such as `w1,w3`.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FIGURES")]
    only: Vec<Figure>,
    /// The program that measures other job queues;
    /// `cargo xtask bench worker --peers` builds it and sets this.
    #[arg(long, value_name = "PROGRAM")]
    peers: Option<PathBuf>,
    /// The file to write the figures to.
    #[arg(long, value_name = "FILE", default_value = "target/bench/worker.json")]
    json: PathBuf,
    /// Use shorter phases: good for experiments, too noisy to publish.
    #[arg(long)]
    quick: bool,
}

impl Options {
    fn jobs(&self) -> u64 {
        self.jobs.unwrap_or(if self.quick { 10_000 } else { 100_000 })
    }

    fn time(&self) -> Duration {
        Duration::from_secs(self.seconds.unwrap_or(if self.quick { 2 } else { 10 }))
    }

    fn enqueue_time(&self) -> Duration {
        Duration::from_millis(if self.quick { 500 } else { 2500 })
    }

    fn idle_time(&self) -> Duration {
        // A whole number of heartbeats and sweeps, which are 10 and 15 seconds apart.
        Duration::from_secs(if self.quick { 10 } else { 30 })
    }

    fn samples(&self) -> u64 {
        self.samples.unwrap_or(if self.quick { 200 } else { 2000 })
    }

    fn wants(&self, figure: Figure) -> bool {
        self.only.is_empty() || self.only.contains(&figure)
    }
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let peers = options.peers.as_deref().map(Peers::find).transpose()?;
    let mut engines = Vec::new();
    if options.engine != Engine::Sqlite {
        let mut server = Admin::connect(options.server.url()?).await?;
        if server.check_durability() {
            let facts = server.settings_json();
            let admin = Admin::connect(&server.fresh_database(DATABASE).await?).await?;
            let backend = Backend::Postgres { server, admin };
            let mut measurement = Measurement::new(options, backend, peers.clone());
            let result = measurement.run_all().await;
            // Drop the databases even if a measurement failed.
            measurement.backend.clear().await?;
            result?;
            engines.push(measurement.report("Postgres", facts));
        }
    }
    if options.engine != Engine::Postgres {
        let files = Files::new("worker")?;
        let facts = files.print_durability()?;
        let mut measurement = Measurement::new(options, Backend::Sqlite(files), peers);
        measurement.run_all().await?;
        engines.push(measurement.report("SQLite", facts));
    }
    let figures = json!({
        "taken_at": chrono::Utc::now().to_rfc3339(),
        "machine": report::machine(),
        "rounds": options.rounds,
        "quick": options.quick,
        "jobs": options.jobs(),
        "seconds": options.time().as_secs(),
        "engines": engines,
    });
    report::write(&options.json, &figures)
}

// ---- the databases to measure on -------------------------------------------

enum Backend {
    /// The given server, and a separate database on it.
    Postgres {
        server: Admin,
        admin: Admin,
    },
    Sqlite(Files),
}

/// A client for new tables. The SQLite file is removed when this is dropped.
struct FreshTables {
    client: Client,
    _file: Option<File>,
}

/// An empty database for a peer.
struct PeerDatabase {
    url: String,
    _file: Option<File>,
}

impl Backend {
    fn name(&self) -> &'static str {
        match self {
            Backend::Postgres { .. } => "Postgres",
            Backend::Sqlite(_) => "SQLite",
        }
    }

    /// Creates tables with waiting jobs.
    async fn filled(&mut self, jobs: u64) -> Result<FreshTables> {
        match self {
            Backend::Postgres { admin, .. } => {
                let client = admin.fresh_schema(SCHEMA).await?;
                library::enqueue_bulk(&client, jobs, BULK).await?;
                admin.vacuum_analyze(SCHEMA).await?;
                Ok(FreshTables { client, _file: None })
            }
            Backend::Sqlite(files) => {
                let file = files.filled(jobs).await?;
                Ok(FreshTables { client: file.client().await?, _file: Some(file) })
            }
        }
    }

    /// Creates empty tables. Returns a client that is their only user, and the commits so
    /// far if the engine counts them.
    async fn with_commit_count(&mut self) -> Result<(FreshTables, Option<u64>)> {
        let Backend::Postgres { admin, .. } = self else { return Ok((self.filled(0).await?, None)) };
        drop(admin.fresh_schema(SCHEMA).await?);
        let commits = admin.commits().await?;
        Ok((FreshTables { client: admin.client(SCHEMA).await?, _file: None }, Some(commits)))
    }

    async fn timed(&mut self, work: impl Future<Output = Result<u64>>) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, .. } => admin.timed(work).await,
            Backend::Sqlite(_) => {
                let (cpu, started) = (client_cpu(), Instant::now());
                let jobs = work.await?;
                let sample = Sample::since(started, jobs);
                let client_cpu = client_cpu().zip(cpu).map(|(after, before)| after - before);
                Ok(Sample { client_cpu, ..sample })
            }
        }
    }

    /// Claims and settles with raw SQL.
    async fn drain_with_raw_sql(&mut self, jobs: u64) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, .. } => {
                claim_and_settle::raw_on_postgres(admin, jobs, BATCH, CLAIMERS).await
            }
            Backend::Sqlite(files) => claim_and_settle::raw_on_sqlite(files, jobs, BATCH, CLAIMERS).await,
        }
    }

    /// Claims and settles with the library, without its worker.
    async fn drain_without_worker(&mut self, jobs: u64) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, .. } => {
                claim_and_settle::library_on_postgres(admin, SCHEMA, jobs, BATCH, CLAIMERS).await
            }
            Backend::Sqlite(files) => claim_and_settle::library_on_sqlite(files, jobs, BATCH, CLAIMERS).await,
        }
    }

    /// All commits so far, if the engine counts them.
    async fn commits(&mut self) -> Result<Option<u64>> {
        match self {
            Backend::Postgres { admin, .. } => Ok(Some(admin.commits().await?)),
            Backend::Sqlite(_) => Ok(None),
        }
    }

    async fn empty_peer_database(&mut self) -> Result<PeerDatabase> {
        match self {
            Backend::Postgres { server, .. } => {
                Ok(PeerDatabase { url: server.fresh_database(PEER_DATABASE).await?, _file: None })
            }
            Backend::Sqlite(files) => {
                let file = files.new_path();
                Ok(PeerDatabase { url: file.url(), _file: Some(file) })
            }
        }
    }

    async fn clear(&mut self) -> Result<()> {
        if let Backend::Postgres { server, .. } = self {
            server.drop_database(PEER_DATABASE).await?;
            server.drop_database(DATABASE).await?;
        }
        Ok(())
    }
}

/// The ratios that Longshore should reach on an engine.
struct Targets {
    drain_raw_sql: Option<f64>,
    drain_peers: f64,
    /// One for each number of [`PRODUCERS`].
    sustained_peers: [f64; 2],
    /// One for each number of [`CALLERS`].
    enqueue_peers: [Option<f64>; 2],
    pickup_peers: Option<f64>,
}

const ON_POSTGRES: Targets = Targets {
    drain_raw_sql: Some(0.7),
    drain_peers: 1.2,
    sustained_peers: [2.0, 8.0],
    enqueue_peers: [Some(1.3), Some(4.0)],
    pickup_peers: Some(1.0),
};

const ON_SQLITE: Targets = Targets {
    drain_raw_sql: None,
    drain_peers: 3.0,
    sustained_peers: [3.0, 3.0],
    enqueue_peers: [None, None],
    pickup_peers: None,
};

// ---- the measurements ------------------------------------------------------

struct Measurement<'a> {
    options: &'a Options,
    backend: Backend,
    targets: Targets,
    peers: Option<Peers>,
    cells: Vec<Cell>,
    limits: Vec<Limit>,
    idle: Value,
    pickups: Option<(Pickups, Vec<Pickups>)>,
}

impl<'a> Measurement<'a> {
    fn new(options: &'a Options, backend: Backend, peers: Option<Peers>) -> Self {
        let targets = match &backend {
            Backend::Postgres { .. } => ON_POSTGRES,
            Backend::Sqlite(_) => ON_SQLITE,
        };
        let (cells, limits) = (Vec::new(), Vec::new());
        Measurement { options, backend, targets, peers, cells, limits, idle: Value::Null, pickups: None }
    }

    /// Idle comes first: its memory would include what other measurements have used.
    async fn run_all(&mut self) -> Result<()> {
        if self.options.wants(Figure::Idle) {
            self.idle().await?;
        }
        if self.options.wants(Figure::W1) {
            self.drain().await?;
        }
        for (nth, producers) in PRODUCERS.into_iter().enumerate() {
            if self.options.wants(Figure::W3) {
                self.sustained(producers, self.targets.sustained_peers[nth]).await?;
            }
        }
        for (nth, callers) in CALLERS.into_iter().enumerate() {
            // `bench core` compares it with raw inserts.
            if self.peers.is_some() && self.options.wants(Figure::Enqueue) {
                self.enqueue(callers, self.targets.enqueue_peers[nth]).await?;
            }
        }
        if self.options.wants(Figure::W9) {
            self.sleepers().await?;
        }
        if self.options.wants(Figure::W2) {
            self.pickup().await?;
        }
        if self.options.wants(Figure::Mixed) {
            self.mixed().await?;
        }
        Ok(())
    }

    fn report(mut self, engine: &str, facts: Value) -> Value {
        let cells: Vec<Cell> = self.cells.drain(..).map(Cell::without_unmeasured).collect();
        let mut figures = report::compare(engine, facts, &cells);
        figures["pickup"] = match &self.pickups {
            Some((longshore, peers)) => pickup::report(longshore, peers, self.targets.pickup_peers),
            None => Value::Null,
        };
        figures["limits"] = report::limits(&self.limits);
        figures["idle"] = self.idle;
        figures
    }

    fn print_progress(&self, figure: &str) {
        eprintln!("measuring: {}, {figure}", self.backend.name());
    }

    async fn idle(&mut self) -> Result<()> {
        let Backend::Postgres { admin, .. } = &mut self.backend else { return Ok(()) };
        eprintln!("measuring: Postgres, idle worker");
        let (limits, facts) = idle::measure(admin, SCHEMA, self.options.idle_time()).await?;
        self.limits.extend(limits);
        self.idle = facts;
        Ok(())
    }

    async fn drain(&mut self) -> Result<()> {
        let jobs = self.options.jobs();
        let name = format!("W1 drain, {} no-op jobs", thousands(jobs as f64));
        self.print_progress(&name);
        let mut cell = Cell::new(name)
            .against("four-table SQL", self.targets.drain_raw_sql)
            .against("claim+settle, no worker", Some(0.8));
        let scenario = Scenario::Drain { jobs };
        cell = self.with_peers(cell, scenario, Some(self.targets.drain_peers));
        for round in 0..self.options.rounds {
            let tables = self.backend.filled(jobs).await?;
            let mut running = None;
            let work = async {
                running = Some(scenarios::drain(&tables.client, jobs).await?);
                Ok(jobs)
            };
            let sample = self.backend.timed(work).await?;
            cell.longshore.samples.push(sample);
            if let Some(running) = running {
                running.stop().await;
            }
            drop(tables);
            let sample = self.backend.drain_with_raw_sql(jobs).await?;
            cell.baselines[0].samples.push(sample);
            let sample = self.backend.drain_without_worker(jobs).await?;
            cell.baselines[1].samples.push(sample);
            self.run_peers(&mut cell, round, scenario).await?;
        }
        if let Backend::Postgres { .. } = self.backend {
            let cpu = cell.longshore.client_micros_per_job();
            self.limits.extend(cpu.map(|cpu| Limit::new("W1 drain, client µs per job", cpu, 12.0)));
            let wal = cell.longshore.wal_per_job();
            self.limits.extend(wal.map(|wal| Limit::new("W1 drain, WAL bytes per job", wal, 600.0)));
        }
        self.cells.push(cell);
        Ok(())
    }

    async fn sustained(&mut self, producers: usize, target: f64) -> Result<()> {
        let name = format!("W3 sustained, {producers} producers");
        self.print_progress(&name);
        let time = self.options.time();
        let scenario = Scenario::Sustained { callers: producers, time };
        let mut cell = self.with_peers(Cell::new(name.clone()), scenario, Some(target));
        let mut commits_per_job = Vec::new();
        for round in 0..self.options.rounds {
            let (tables, before) = self.backend.with_commit_count().await?;
            let work = Sustained::start(&tables.client, producers).await?;
            let sample = self.backend.timed(work.settled_within(time)).await?;
            cell.longshore.samples.push(sample);
            let settled = work.stop().await?;
            drop(tables);
            if let Some((after, before)) = self.backend.commits().await?.zip(before) {
                commits_per_job.push((after - before) as f64 / settled.max(1) as f64);
            }
            self.run_peers(&mut cell, round, scenario).await?;
        }
        if let Some(commits) = median(commits_per_job) {
            let target = (producers == 64).then_some(0.1);
            self.limits.push(Limit::new(format!("{name}, commits per job"), commits, target));
        }
        self.cells.push(cell);
        Ok(())
    }

    async fn enqueue(&mut self, callers: usize, target: Option<f64>) -> Result<()> {
        let name = format!("single enqueue, {callers} callers");
        self.print_progress(&name);
        let time = self.options.enqueue_time();
        let scenario = Scenario::Enqueue { callers, time };
        let mut cell = self.with_peers(Cell::new(name), scenario, target);
        for round in 0..self.options.rounds {
            let tables = self.backend.filled(1000).await?;
            let call = |time: Duration| {
                let until = Instant::now() + time;
                let call = |_| tokio::spawn(library::enqueue_singly(tables.client.clone(), until));
                join_all((0..callers).map(call).collect())
            };
            call(scenarios::RAMP_UP).await?;
            let sample = self.backend.timed(async { call(time).await }).await?;
            cell.longshore.samples.push(sample);
            self.run_peers(&mut cell, round, scenario).await?;
        }
        self.cells.push(cell);
        Ok(())
    }

    async fn sleepers(&mut self) -> Result<()> {
        let jobs = self.options.jobs();
        let name = format!("W9 sleeping, {} jobs of 10 ms, 200 at once", thousands(jobs as f64));
        self.print_progress(&name);
        let mut cell = Cell::new(name).against("bare tokio loop", Some(0.95));
        for _ in 0..self.options.rounds {
            let tables = self.backend.filled(jobs).await?;
            let mut running = None;
            let work = async {
                running = Some(scenarios::drain_sleepers(&tables.client, jobs).await?);
                Ok(jobs)
            };
            let sample = self.backend.timed(work).await?;
            cell.longshore.samples.push(sample);
            if let Some(running) = running {
                running.stop().await;
            }
            let sample = self.backend.timed(scenarios::sleep_and_count(jobs)).await?;
            cell.baselines[0].samples.push(sample);
        }
        self.cells.push(cell);
        Ok(())
    }

    async fn pickup(&mut self) -> Result<()> {
        self.print_progress("W2 pick-up");
        let samples = self.options.samples();
        let mut longshore = Pickups::new("longshore");
        let scenario = Scenario::Pickup { samples };
        let mut peers: Vec<Pickups> = self.peer_names(scenario).iter().copied().map(Pickups::new).collect();
        for round in 0..self.options.rounds {
            let tables = self.backend.filled(0).await?;
            longshore.rounds.push(scenarios::pickup(&tables.client, samples).await?);
            drop(tables);
            for peer in &mut peers {
                if peer.rounds.len() == round as usize
                    && let Some(outcome) = self.run_peer(peer.system, scenario).await?
                {
                    peer.rounds.push(outcome.latencies_micros);
                }
            }
        }
        peers.retain(|peer| !peer.rounds.is_empty());
        self.pickups = Some((longshore, peers));
        Ok(())
    }

    async fn mixed(&mut self) -> Result<()> {
        self.print_progress("mixed drain, two workers");
        let mut mixed = Mixed::default();
        for _ in 0..self.options.rounds {
            let tables = self.backend.filled(0).await?;
            mixed.round(&tables.client).await?;
        }
        self.limits.extend(mixed.limits());
        Ok(())
    }

    // ---- peers -------------------------------------------------------------

    /// The peers that run the scenario, if any.
    fn peer_names(&self, scenario: Scenario) -> &'static [&'static str] {
        match (&self.peers, &self.backend) {
            (None, _) => &[],
            (Some(_), Backend::Postgres { .. }) => scenario.peers_on_postgres(),
            (Some(_), Backend::Sqlite(_)) => peers::ON_SQLITE,
        }
    }

    fn with_peers(&self, cell: Cell, scenario: Scenario, target: Option<f64>) -> Cell {
        self.peer_names(scenario).iter().fold(cell, |cell, peer| cell.against(*peer, target))
    }

    /// Runs a round of every peer. A peer that failed in an earlier round is skipped, so
    /// that its samples stay paired with Longshore's rounds.
    async fn run_peers(&mut self, cell: &mut Cell, round: u32, scenario: Scenario) -> Result<()> {
        for peer in self.peer_names(scenario) {
            let Some(side) = cell.side(peer) else { continue };
            if side.samples.len() == round as usize
                && let Some(outcome) = self.run_peer(peer, scenario).await?
            {
                side.samples.push(outcome.sample());
            }
        }
        Ok(())
    }

    /// Runs a peer once. If it fails, only its own figures are missing.
    async fn run_peer(&mut self, peer: &str, scenario: Scenario) -> Result<Option<Outcome>> {
        let Some(peers) = self.peers.clone() else { return Ok(None) };
        let database = self.backend.empty_peer_database().await?;
        match peers.run(peer, scenario, &database.url).await {
            Ok(outcome) => Ok(Some(outcome)),
            Err(error) => {
                eprintln!("warning: {peer} is skipped: {error}");
                Ok(None)
            }
        }
    }
}
