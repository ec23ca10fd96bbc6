//! `bench worker`: the worker as a program would run it, against hand-written
//! SQL on the same tables, a bare loop, and other job queues, in turns.

use std::future::Future;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use longshore::Client;
use serde_json::{Value, json};

use self::peers::{Outcome, Peers, Scenario};
use self::pickup::Pickups;
use self::scenarios::Sustained;
use crate::postgres_server::Admin;
use crate::report::{self, Cell, Limit, Sample, client_cpu, median, thousands};
use crate::sqlite_files::{File, Files};
use crate::{Engine, Result, ServerOptions, claim_and_settle, library, together};

mod idle;
mod peers;
mod pickup;
mod scenarios;

/// Databases of our own, because the server counts commits and statements by
/// database.
const OURS: &str = "bench_worker";
const PEERS: &str = "bench_peers";
const SCHEMA: &str = "bench_ours";
const BULK: u64 = 10_000;
/// How the raw loop and the claimers without a worker go about a drain.
const BATCH: u32 = 500;
const CLAIMERS: usize = 2;
const PRODUCERS: [usize; 2] = [4, 64];
const CALLERS: [usize; 2] = [8, 64];

/// What is measurement, by the names that the bars have.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Figure {
    /// What a worker costs that has nothing to do.
    #[value(alias = "p11")]
    Idle,
    /// No-op jobs wait; from the worker's start until the last is settled.
    #[value(alias = "p1")]
    W1,
    /// Producers enqueue one by one while the worker consumes.
    #[value(alias = "p2")]
    W3,
    /// Callers enqueue one by one; nobody consumes.
    #[value(alias = "p3")]
    Enqueue,
    /// Jobs that sleep, 200 at once.
    #[value(alias = "p8")]
    W9,
    /// From the enqueue call to the handler's first line, on an idle worker.
    #[value(alias = "p5")]
    W2,
}

/// Options of `bench worker`.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    server: ServerOptions,
    /// Jobs of a drain [default: 100000, 10000 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    jobs: Option<u64>,
    /// How long producers and consumer run [default: 10, 2 with --quick].
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
    /// Pick-ups of a round [default: 2000, 200 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    samples: Option<u64>,
    /// How often each figure is taken on each side, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Which engines.
    #[arg(long, value_enum, default_value = "both")]
    engine: Engine,
    /// Only these figures, such as `w1,w3`.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "FIGURES")]
    only: Vec<Figure>,
    /// The program that knows other job queues, to measure them in turns;
    /// `cargo xtask bench worker --peers` builds it and fills this in.
    #[arg(long, value_name = "PROGRAM")]
    peers: Option<PathBuf>,
    /// Where the figures go.
    #[arg(long, value_name = "FILE", default_value = "target/bench/worker.json")]
    json: PathBuf,
    /// Shorter phases: for trying things out, not for quoting.
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
        // Whole numbers of beats and of sweeps, which are 10 and 15 seconds apart.
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
        if server.is_durable() {
            let facts = server.settings_json();
            let admin = Admin::connect(&server.fresh_database(OURS).await?).await?;
            let backend = Backend::Postgres { server, admin };
            let mut measurement = Measurement::new(options, backend, peers.clone());
            let result = measurement.run_all().await;
            // However it went, nothing of ours stays on the server.
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

// ---- where it is measurement --------------------------------------------------

enum Backend {
    /// The server as it was given, and our own database on it.
    Postgres {
        server: Admin,
        admin: Admin,
    },
    Sqlite(Files),
}

/// A client of new tables. The file, if it is one, goes with it.
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

    /// New tables with jobs that wait.
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

    /// New tables and a client that is alone with them; the commits so far,
    /// where they can be told.
    async fn alone(&mut self) -> Result<(FreshTables, Option<u64>)> {
        let Backend::Postgres { admin, .. } = self else { return Ok((self.filled(0).await?, None)) };
        drop(admin.fresh_schema(SCHEMA).await?);
        let commits = admin.commits().await?;
        Ok((FreshTables { client: admin.client(SCHEMA).await?, _file: None }, Some(commits)))
    }

    async fn timed(&mut self, work: impl Future<Output = Result<u64>>) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, .. } => admin.timed(work).await,
            Backend::Sqlite(_) => {
                let (cpu, began) = (client_cpu(), Instant::now());
                let jobs = work.await?;
                let sample = Sample::since(began, jobs);
                let client_cpu = client_cpu().zip(cpu).map(|(after, before)| after - before);
                Ok(Sample { client_cpu, ..sample })
            }
        }
    }

    /// Claim and settle by hand.
    async fn raw_sql(&mut self, jobs: u64) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, .. } => {
                claim_and_settle::raw_on_postgres(admin, jobs, BATCH, CLAIMERS).await
            }
            Backend::Sqlite(files) => claim_and_settle::raw_on_sqlite(files, jobs, BATCH, CLAIMERS).await,
        }
    }

    /// Claim and settle by the library, without its worker.
    async fn without_worker(&mut self, jobs: u64) -> Result<Sample> {
        match self {
            Backend::Postgres { admin, .. } => {
                claim_and_settle::library_on_postgres(admin, SCHEMA, jobs, BATCH, CLAIMERS).await
            }
            Backend::Sqlite(files) => claim_and_settle::library_on_sqlite(files, jobs, BATCH, CLAIMERS).await,
        }
    }

    /// All commits so far, where that can be told.
    async fn commits(&mut self) -> Result<Option<u64>> {
        match self {
            Backend::Postgres { admin, .. } => Ok(Some(admin.commits().await?)),
            Backend::Sqlite(_) => Ok(None),
        }
    }

    async fn empty_peer_database(&mut self) -> Result<PeerDatabase> {
        match self {
            Backend::Postgres { server, .. } => {
                Ok(PeerDatabase { url: server.fresh_database(PEERS).await?, _file: None })
            }
            Backend::Sqlite(files) => {
                let file = files.unmade();
                Ok(PeerDatabase { url: file.url(), _file: Some(file) })
            }
        }
    }

    async fn clear(&mut self) -> Result<()> {
        if let Backend::Postgres { server, .. } = self {
            server.drop_database(PEERS).await?;
            server.drop_database(OURS).await?;
        }
        Ok(())
    }
}

/// What our side must reach, which depends on the engine.
struct Bars {
    drain_by_hand: Option<f64>,
    drain_peers: f64,
    /// By the number of [`PRODUCERS`].
    sustained_peers: [f64; 2],
    /// By the number of [`CALLERS`].
    enqueue_peers: [Option<f64>; 2],
    pickup_peers: Option<f64>,
}

const ON_POSTGRES: Bars = Bars {
    drain_by_hand: Some(0.7),
    drain_peers: 1.2,
    sustained_peers: [2.0, 8.0],
    enqueue_peers: [Some(1.3), Some(4.0)],
    pickup_peers: Some(1.0),
};

const ON_SQLITE: Bars = Bars {
    drain_by_hand: None,
    drain_peers: 3.0,
    sustained_peers: [3.0, 3.0],
    enqueue_peers: [None, None],
    pickup_peers: None,
};

// ---- what is measurement ------------------------------------------------------

struct Measurement<'a> {
    options: &'a Options,
    backend: Backend,
    bars: Bars,
    peers: Option<Peers>,
    cells: Vec<Cell>,
    limits: Vec<Limit>,
    idle: Value,
    pickups: Option<(Pickups, Vec<Pickups>)>,
}

impl<'a> Measurement<'a> {
    fn new(options: &'a Options, backend: Backend, peers: Option<Peers>) -> Self {
        let bars = match &backend {
            Backend::Postgres { .. } => ON_POSTGRES,
            Backend::Sqlite(_) => ON_SQLITE,
        };
        let (cells, limits) = (Vec::new(), Vec::new());
        Measurement { options, backend, bars, peers, cells, limits, idle: Value::Null, pickups: None }
    }

    /// In this order: the idle worker's memory is what the process has used.
    async fn run_all(&mut self) -> Result<()> {
        if self.options.wants(Figure::Idle) {
            self.idle().await?;
        }
        if self.options.wants(Figure::W1) {
            self.drain().await?;
        }
        for (nth, producers) in PRODUCERS.into_iter().enumerate() {
            if self.options.wants(Figure::W3) {
                self.sustained(producers, self.bars.sustained_peers[nth]).await?;
            }
        }
        for (nth, callers) in CALLERS.into_iter().enumerate() {
            // Against raw inserts, `bench core` has it.
            if self.peers.is_some() && self.options.wants(Figure::Enqueue) {
                self.enqueue(callers, self.bars.enqueue_peers[nth]).await?;
            }
        }
        if self.options.wants(Figure::W9) {
            self.sleepers().await?;
        }
        if self.options.wants(Figure::W2) {
            self.pickup().await?;
        }
        Ok(())
    }

    fn report(mut self, engine: &str, facts: Value) -> Value {
        let cells: Vec<Cell> = self.cells.drain(..).map(Cell::measured).collect();
        let mut figures = report::compare(engine, facts, &cells);
        figures["pickup"] = match &self.pickups {
            Some((ours, peers)) => pickup::report(ours, peers, self.bars.pickup_peers),
            None => Value::Null,
        };
        figures["limits"] = report::limits(&self.limits);
        figures["idle"] = self.idle;
        figures
    }

    fn progress(&self, figure: &str) {
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
        self.progress(&name);
        let mut cell = Cell::new(name)
            .against("four-table SQL", self.bars.drain_by_hand)
            .against("claim+settle, no worker", Some(0.8));
        let scenario = Scenario::Drain { jobs };
        cell = self.against_peers(cell, scenario, Some(self.bars.drain_peers));
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
            let sample = self.backend.raw_sql(jobs).await?;
            cell.baselines[0].samples.push(sample);
            let sample = self.backend.without_worker(jobs).await?;
            cell.baselines[1].samples.push(sample);
            self.peers_round(&mut cell, round, scenario).await?;
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

    async fn sustained(&mut self, producers: usize, bar: f64) -> Result<()> {
        let name = format!("W3 sustained, {producers} producers");
        self.progress(&name);
        let time = self.options.time();
        let scenario = Scenario::Sustained { callers: producers, time };
        let mut cell = self.against_peers(Cell::new(name.clone()), scenario, Some(bar));
        let mut commits_per_job = Vec::new();
        for round in 0..self.options.rounds {
            let (tables, before) = self.backend.alone().await?;
            let work = Sustained::start(&tables.client, producers).await?;
            let sample = self.backend.timed(work.settled_within(time)).await?;
            cell.longshore.samples.push(sample);
            let settled = work.stop().await?;
            drop(tables);
            if let Some((after, before)) = self.backend.commits().await?.zip(before) {
                commits_per_job.push((after - before) as f64 / settled.max(1) as f64);
            }
            self.peers_round(&mut cell, round, scenario).await?;
        }
        if let Some(commits) = median(commits_per_job) {
            let bar = (producers == 64).then_some(0.1);
            self.limits.push(Limit::new(format!("{name}, commits per job"), commits, bar));
        }
        self.cells.push(cell);
        Ok(())
    }

    async fn enqueue(&mut self, callers: usize, bar: Option<f64>) -> Result<()> {
        let name = format!("single enqueue, {callers} callers");
        self.progress(&name);
        let time = self.options.enqueue_time();
        let scenario = Scenario::Enqueue { callers, time };
        let mut cell = self.against_peers(Cell::new(name), scenario, bar);
        for round in 0..self.options.rounds {
            let tables = self.backend.filled(1000).await?;
            let call = |time: Duration| {
                let until = Instant::now() + time;
                let call = |_| tokio::spawn(library::enqueue_singly(tables.client.clone(), until));
                together((0..callers).map(call).collect())
            };
            call(scenarios::GET_GOING).await?;
            let sample = self.backend.timed(async { call(time).await }).await?;
            cell.longshore.samples.push(sample);
            self.peers_round(&mut cell, round, scenario).await?;
        }
        self.cells.push(cell);
        Ok(())
    }

    async fn sleepers(&mut self) -> Result<()> {
        let jobs = self.options.jobs();
        let name = format!("W9 sleeping, {} jobs of 10 ms, 200 at once", thousands(jobs as f64));
        self.progress(&name);
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
        self.progress("W2 pick-up");
        let samples = self.options.samples();
        let mut ours = Pickups::new("longshore");
        let scenario = Scenario::Pickup { samples };
        let mut peers: Vec<Pickups> = self.names(scenario).iter().copied().map(Pickups::new).collect();
        for round in 0..self.options.rounds {
            let tables = self.backend.filled(0).await?;
            ours.rounds.push(scenarios::pickup(&tables.client, samples).await?);
            drop(tables);
            for peer in &mut peers {
                if peer.rounds.len() == round as usize
                    && let Some(outcome) = self.peer(peer.system, scenario).await?
                {
                    peer.rounds.push(outcome.latencies_micros);
                }
            }
        }
        peers.retain(|peer| !peer.rounds.is_empty());
        self.pickups = Some((ours, peers));
        Ok(())
    }

    // ---- peers -------------------------------------------------------------

    /// Those that are put through the scenario, if there are any.
    fn names(&self, scenario: Scenario) -> &'static [&'static str] {
        match (&self.peers, &self.backend) {
            (None, _) => &[],
            (Some(_), Backend::Postgres { .. }) => scenario.peers_on_postgres(),
            (Some(_), Backend::Sqlite(_)) => peers::ON_SQLITE,
        }
    }

    fn against_peers(&self, cell: Cell, scenario: Scenario, bar: Option<f64>) -> Cell {
        self.names(scenario).iter().fold(cell, |cell, peer| cell.against(*peer, bar))
    }

    /// Takes every peer through a round. One that failed in an earlier round is
    /// left out, so that what remains is still paired round by round.
    async fn peers_round(&mut self, cell: &mut Cell, round: u32, scenario: Scenario) -> Result<()> {
        for peer in self.names(scenario) {
            let Some(side) = cell.side(peer) else { continue };
            if side.samples.len() == round as usize
                && let Some(outcome) = self.peer(peer, scenario).await?
            {
                side.samples.push(outcome.sample());
            }
        }
        Ok(())
    }

    /// Runs a peer once. A peer that fails costs its own figures, not ours.
    async fn peer(&mut self, peer: &str, scenario: Scenario) -> Result<Option<Outcome>> {
        let Some(peers) = self.peers.clone() else { return Ok(None) };
        let database = self.backend.empty_peer_database().await?;
        match peers.run(peer, scenario, &database.url).await {
            Ok(outcome) => Ok(Some(outcome)),
            Err(error) => {
                eprintln!("warning: {peer} is left out here: {error}");
                Ok(None)
            }
        }
    }
}
