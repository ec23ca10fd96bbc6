//! A worker process with kinds that misbehave, and an event log outside the
//! database.
//!
//! | Kind | Does |
//! |---|---|
//! | `noop` | nothing |
//! | `sleep` | waits, and stops when told |
//! | `stubborn` | waits, whatever it is told |
//! | `block` | blocks its thread |
//! | `poison` | takes the process with it |
//!
//! A payload `[60000, 10]` is how many milliseconds the first lease takes and
//! the second; the last number holds for all further ones.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use longshore::store::Claimed;
use longshore::worker::{Context, Failure, Hooks, Recovery, Settings, Worker};
use longshore::{Client, JobId};
use serde::{Deserialize, Serialize};

/// Makes this program a worker process.
const ASKED: &str = "LONGSHORE_FAULTS_WORKER";

/// What a worker process is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) url: String,
    /// The file all processes of a case append their events to.
    pub(crate) events: String,
    pub(crate) queues: Vec<String>,
    pub(crate) concurrency: u32,
    /// Of the runtime.
    pub(crate) threads: usize,
    pub(crate) poll: Duration,
    pub(crate) heartbeat: Duration,
    pub(crate) threshold: Duration,
    pub(crate) sweep: Duration,
    pub(crate) recovery_delay: Duration,
    pub(crate) grace: Duration,
}

impl Orders {
    /// How to start this program as a worker process.
    pub(crate) fn command(&self) -> std::process::Command {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args(["worker_process", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(ASKED, serde_json::to_string(self).unwrap());
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
            recovery: Recovery { delay: self.recovery_delay, ..Recovery::default() },
            shutdown_grace: self.grace,
            ..Settings::default()
        }
    }
}

/// One line of the event log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) what: What,
    pub(crate) job: JobId,
    pub(crate) attempt: u16,
    pub(crate) lease_no: i32,
    pub(crate) pid: u32,
    /// On the host's clock.
    pub(crate) millis: u128,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    /// The handler was called.
    Start,
    /// It was told to stop, and why.
    Stop(String),
    /// Its success is stored.
    Success,
}

pub(crate) fn millis_now() -> u128 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_millis()
}

pub(crate) fn main_if_asked() {
    let Ok(orders) = std::env::var(ASKED) else { return };
    let orders: Orders = serde_json::from_str(&orders).unwrap();
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(orders.threads)
        .enable_all()
        .build()
        .unwrap();
    let ended = runtime.block_on(work(orders));
    // At once: a blocked thread must not keep the process, nor the test
    // harness have a word.
    std::process::exit(match ended {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("error: {error}");
            1
        }
    });
}

async fn work(orders: Orders) -> longshore::Result<()> {
    let client = Client::connect(&orders.url).await?;
    let log = Log(Arc::new(OpenOptions::new().append(true).create(true).open(&orders.events).unwrap()));
    let worker = Worker::builder(client)
        .settings(orders.settings())
        .state(log.clone())
        .hooks(log)
        .function("noop", noop)
        .function("sleep", sleep)
        .function("stubborn", stubborn)
        .function("block", block)
        .function("poison", poison)
        .build()?;
    worker.run().await?;
    Ok(())
}

#[derive(Clone)]
struct Log(Arc<File>);

impl Log {
    fn write(&self, what: What, job: &Claimed) {
        let lease = job.lease();
        let event = Event {
            what,
            job: lease.id,
            attempt: job.attempt(),
            lease_no: lease.lease_no,
            pid: std::process::id(),
            millis: millis_now(),
        };
        // One write to a file opened for appending: lines of many processes do
        // not mix.
        let line = serde_json::to_string(&event).unwrap() + "\n";
        (&*self.0).write_all(line.as_bytes()).unwrap();
    }
}

#[async_trait]
impl Hooks for Log {
    async fn on_success(&self, job: &Claimed) {
        self.write(What::Success, job);
    }
}

/// How long each lease of a job takes.
#[derive(Deserialize)]
struct Takes(Vec<u64>);

impl Takes {
    fn now(&self, ctx: &Context<Log>) -> Duration {
        let nth = usize::try_from(ctx.job().lease().lease_no - 1).unwrap_or(0);
        let millis = self.0.get(nth).or(self.0.last()).copied().unwrap_or(0);
        Duration::from_millis(millis)
    }
}

async fn noop(_: Takes, ctx: Context<Log>) -> Result<(), Failure> {
    ctx.state().write(What::Start, ctx.job());
    Ok(())
}

async fn sleep(takes: Takes, ctx: Context<Log>) -> Result<(), Failure> {
    ctx.state().write(What::Start, ctx.job());
    match ctx.until_stopped(tokio::time::sleep(takes.now(&ctx))).await {
        Ok(()) => Ok(()),
        Err(reason) => {
            ctx.state().write(What::Stop(format!("{reason:?}")), ctx.job());
            Err(Failure::retry(format!("told to stop: {reason:?}")))
        }
    }
}

async fn stubborn(takes: Takes, ctx: Context<Log>) -> Result<(), Failure> {
    ctx.state().write(What::Start, ctx.job());
    tokio::time::sleep(takes.now(&ctx)).await;
    Ok(())
}

async fn block(takes: Takes, ctx: Context<Log>) -> Result<(), Failure> {
    ctx.state().write(What::Start, ctx.job());
    std::thread::sleep(takes.now(&ctx));
    Ok(())
}

async fn poison(_: Takes, ctx: Context<Log>) -> Result<(), Failure> {
    ctx.state().write(What::Start, ctx.job());
    std::process::abort();
}
