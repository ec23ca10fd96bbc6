//! The worker process under test: handlers that misbehave, and an event log in a
//! file, which does not depend on the database.
//!
//! | Kind | Handler |
//! |---|---|
//! | `noop` | does nothing |
//! | `sleep` | waits, and returns early on a stop |
//! | `ignore_stop` | waits, and ignores stops |
//! | `block` | blocks its thread until the test opens the gate |
//! | `poison` | aborts the process |
//! | `durable` | does a step, waits for the event `go`, spawns three `noop` children, joins them, and does another step |
//!
//! The payload lists how many milliseconds each lease takes: with `[60000, 10]` the
//! first takes a minute and the second 10 ms. The last number applies to all later
//! leases. A lease with [`UNTIL_OPENED`] takes until the test opens the gate.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use longshore::store::Claimed;
use longshore::worker::{Context, Failure, Hooks, RecoverySettings, Settings, Worker};
use longshore::{Client, JobId, NewJob};
use serde::{Deserialize, Serialize};

/// The variable with the configuration; if it is set, this program is a worker process.
const CONFIG_VARIABLE: &str = "LONGSHORE_FAULTS_WORKER";

/// In a payload: the lease takes until [`crate::fleet::Fleet::open_gate`].
pub(crate) const UNTIL_OPENED: u64 = u64::MAX;

/// The configuration of a worker process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerConfig {
    pub(crate) url: String,
    /// The event log, to which all processes of a test append.
    pub(crate) events: String,
    pub(crate) queues: Vec<String>,
    pub(crate) concurrency: u32,
    /// The number of runtime threads.
    pub(crate) threads: usize,
    pub(crate) poll: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) threshold: Duration,
    pub(crate) sweep: Duration,
    pub(crate) recovery_delay: Duration,
    pub(crate) max_interruptions: u16,
    pub(crate) grace: Duration,
}

impl WorkerConfig {
    /// The gate is open if this file exists.
    pub(crate) fn gate(&self) -> PathBuf {
        PathBuf::from(format!("{}-gate", self.events))
    }

    /// The command that starts this program as a worker process.
    pub(crate) fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["worker_process", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(CONFIG_VARIABLE, serde_json::to_string(self).unwrap());
        command
    }

    fn settings(&self) -> Settings {
        Settings {
            queues: self.queues.clone(),
            concurrency: self.concurrency,
            poll_interval: self.poll,
            max_poll_interval: self.poll,
            heartbeat_interval: self.heartbeat,
            stale_after: self.threshold,
            sweep_interval: self.sweep,
            recovery: RecoverySettings {
                delay: self.recovery_delay,
                max_interruptions: self.max_interruptions,
                ..RecoverySettings::default()
            },
            shutdown_grace: self.grace,
            ..Settings::default()
        }
    }
}

/// One line of the event log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) kind: EventKind,
    pub(crate) job: JobId,
    pub(crate) attempt: u16,
    pub(crate) lease_no: i32,
    pub(crate) pid: u32,
    /// Milliseconds since 1970 on the host's clock.
    pub(crate) millis: u128,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EventKind {
    /// A handler started.
    Start,
    /// A handler received a stop for this reason.
    Stop(String),
    /// The work of the step with this name started.
    Step(String),
    /// The worker stored a success.
    Success,
}

pub(crate) fn millis_now() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()
}

/// Runs a worker until it is stopped, if the environment has a configuration for one.
pub(crate) fn run_if_requested() {
    let Ok(config) = std::env::var(CONFIG_VARIABLE) else { return };
    let config: WorkerConfig = serde_json::from_str(&config).unwrap();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.threads)
        .enable_all()
        .build()
        .unwrap();
    let result = runtime.block_on(run(config));
    // Exit at once: neither a blocked thread nor the test harness may delay it.
    std::process::exit(match result {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    });
}

async fn run(config: WorkerConfig) -> longshore::Result<()> {
    let client = Client::connect(&config.url).await?;
    let file = OpenOptions::new().append(true).create(true).open(&config.events).unwrap();
    let log = EventLog { file: Arc::new(file), gate: Arc::new(config.gate()) };
    let worker = Worker::builder(client)
        .settings(config.settings())
        .state(log.clone())
        .hooks(log)
        .function("noop", noop)
        .function("sleep", sleep)
        .function("ignore_stop", ignore_stop)
        .function("block", block)
        .function("poison", poison)
        .function("durable", durable)
        .build()?;
    worker.run().await?;
    Ok(())
}

#[derive(Clone)]
struct EventLog {
    file: Arc<File>,
    gate: Arc<PathBuf>,
}

impl EventLog {
    fn write(&self, kind: EventKind, job: &Claimed) {
        let lease = job.lease();
        let event = Event {
            kind,
            job: lease.id,
            attempt: job.attempt(),
            lease_no: lease.lease_no,
            pid: std::process::id(),
            millis: millis_now(),
        };
        // A single write to a file in append mode, so that lines of several processes
        // do not mix.
        let line = serde_json::to_string(&event).unwrap() + "\n";
        (&*self.file).write_all(line.as_bytes()).unwrap();
    }
}

#[async_trait]
impl Hooks for EventLog {
    async fn on_success(&self, job: &Claimed) {
        self.write(EventKind::Success, job);
    }
}

/// How many milliseconds each lease of a job takes.
#[derive(Deserialize)]
struct Durations(Vec<u64>);

impl Durations {
    fn for_this_lease(&self, ctx: &Context<EventLog>) -> u64 {
        let nth = usize::try_from(ctx.job().lease().lease_no - 1).unwrap_or(0);
        self.0.get(nth).or(self.0.last()).copied().unwrap_or(0)
    }

    /// Waits for as long as this lease takes.
    async fn pass(&self, ctx: &Context<EventLog>) {
        match self.for_this_lease(ctx) {
            UNTIL_OPENED => {
                while !ctx.state().gate.exists() {
                    tokio::time::sleep(GATE_INTERVAL).await;
                }
            }
            millis => tokio::time::sleep(Duration::from_millis(millis)).await,
        }
    }
}

/// The time between two looks whether the gate is open.
const GATE_INTERVAL: Duration = Duration::from_millis(10);

async fn noop(_: Durations, ctx: Context<EventLog>) -> Result<(), Failure> {
    ctx.state().write(EventKind::Start, ctx.job());
    Ok(())
}

async fn sleep(durations: Durations, ctx: Context<EventLog>) -> Result<(), Failure> {
    ctx.state().write(EventKind::Start, ctx.job());
    match ctx.until_stopped(durations.pass(&ctx)).await {
        Ok(()) => Ok(()),
        Err(reason) => {
            ctx.state().write(EventKind::Stop(format!("{reason:?}")), ctx.job());
            Err(Failure::retry(format!("stopped: {reason:?}")))
        }
    }
}

async fn ignore_stop(durations: Durations, ctx: Context<EventLog>) -> Result<(), Failure> {
    ctx.state().write(EventKind::Start, ctx.job());
    durations.pass(&ctx).await;
    Ok(())
}

async fn block(_: Durations, ctx: Context<EventLog>) -> Result<(), Failure> {
    ctx.state().write(EventKind::Start, ctx.job());
    while !ctx.state().gate.exists() {
        std::thread::sleep(GATE_INTERVAL);
    }
    Ok(())
}

async fn poison(_: Durations, ctx: Context<EventLog>) -> Result<(), Failure> {
    ctx.state().write(EventKind::Start, ctx.job());
    std::process::abort();
}

async fn durable(durations: Durations, ctx: Context<EventLog>) -> Result<(), Failure> {
    ctx.state().write(EventKind::Start, ctx.job());
    let work = async |name: &str, durations: Durations| {
        ctx.state().write(EventKind::Step(name.to_owned()), ctx.job());
        durations.pass(&ctx).await;
        Ok(ctx.job().lease().lease_no)
    };
    // The value is the lease that did the work.
    let first: i32 = ctx.step("first", || work("first", durations)).await?;
    ctx.event::<()>("go").await?;
    ctx.spawn("children", (0..3).map(|_| NewJob::new("noop", &[0]))).await?;
    let children = ctx.join("joined").await?.len();
    let last: i32 = ctx.step("last", || work("last", Durations(vec![0]))).await?;
    Ok(ctx.set_result(&(first, children, last))?)
}
