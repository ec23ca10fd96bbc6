//! The worker: claims due jobs, runs their handlers, settles how they ended, and
//! looks after the queue meanwhile.
//!
//! ```
//! use longshore::worker::{Context, Failure, Worker};
//! use longshore::{Client, NewJob};
//!
//! async fn greet(name: String, _ctx: Context) -> Result<(), Failure> {
//!     println!("hello, {name}");
//!     Ok(())
//! }
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let client = Client::connect("sqlite::memory:").await?;
//! client.migrate().await?;
//! client.enqueue(NewJob::new("greet", "Ada")).await?;
//! let done = Worker::builder(client).function("greet", greet).build()?.drain().await?;
//! assert_eq!(done.succeeded, 1);
//! # Ok::<(), longshore::Error>(())
//! # }).unwrap();
//! ```
//!
//! # The parts
//!
//! | File | Owns |
//! |---|---|
//! | `handler` | what users write: jobs, functions, executors, batches, failures |
//! | `context` | what a handler is given |
//! | `registry` | which handler runs which kind |
//! | `claim` | how many jobs to claim, and when |
//! | `execute` | one attempt: timeout, panic, stop |
//! | `settle`, `progress` | what attempts leave behind, in batches |
//! | `heartbeat` | the sign of life, on its own thread |
//! | `upkeep` | recovery, schedules, retention, gauges |
//! | `hooks` | the application's say |
//! | `signals` | being told to end |
//! | `shared` | what these have in common |

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use crate::client::Client;
use crate::cron::NewSchedule;
use crate::enqueue::{DEFAULT_QUEUE, check_name};
use crate::error::{Error, Result};
use crate::job::WorkerId;
use crate::lifecycle::Ending;
use crate::store::Retention;

mod claim;
mod context;
mod execute;
mod handler;
mod heartbeat;
mod hooks;
mod metrics;
mod progress;
mod registry;
mod settle;
mod shared;
mod signals;
mod upkeep;

pub use context::{Context, StopReason};
pub use handler::{Batched, Executor, Failure, Job};
pub use hooks::Hooks;
pub use signals::Signals;

use registry::{Entries, Registry, Route, States};
use shared::{EndsAll, Phase, Shared};

/// More tasks than this would wait for the database, not for work.
const MAX_CONCURRENCY: u32 = 100_000;
/// After the grace, handlers that were told to stop have this long.
const STOP_WITHIN: Duration = Duration::from_millis(800);
/// What has ended by then has this long to be stored.
const SETTLE_WITHIN: Duration = Duration::from_millis(500);

/// How a worker works; the defaults are the fast and safe ones.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The queues to claim from.
    pub queues: Vec<String>,
    /// How many jobs run at once.
    pub concurrency: u32,
    /// How many of a queue's jobs run at once in this process, at most.
    pub queue_concurrency: BTreeMap<String, u32>,
    /// Only jobs with at least one of these flags; empty means any job.
    pub accept_flags: Vec<String>,
    /// No job with any of these flags.
    pub forbid_flags: Vec<String>,
    /// How soon an idle worker looks for work that nobody announced.
    pub poll_interval: Duration,
    /// How far that doubles while there is none.
    pub max_poll_interval: Duration,
    /// How often the worker says that it lives.
    pub heartbeat_interval: Duration,
    /// Without a sign of life for this long it is dead.
    pub stale_after: Duration,
    /// How often dead workers are looked for.
    pub sweep_interval: Duration,
    /// How jobs of dead workers are treated.
    pub recovery: Recovery,
    /// How long running jobs may go on after a stop was asked for.
    pub shutdown_grace: Duration,
    /// What the worker's name begins with.
    pub name_prefix: String,
    /// How long finished jobs are kept.
    pub retention: Retention,
    /// How often what is past its time is removed.
    pub retention_interval: Duration,
    /// How often the gauges are refreshed.
    pub sample_interval: Duration,
    /// Whether it fires schedules that are due, as every worker does.
    pub schedules: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            queues: vec![DEFAULT_QUEUE.into()],
            concurrency: 4,
            queue_concurrency: BTreeMap::new(),
            accept_flags: Vec::new(),
            forbid_flags: Vec::new(),
            poll_interval: Duration::from_millis(500),
            max_poll_interval: Duration::from_secs(2),
            heartbeat_interval: Duration::from_secs(10),
            stale_after: Duration::from_secs(60),
            sweep_interval: Duration::from_secs(15),
            recovery: Recovery::default(),
            shutdown_grace: Duration::from_secs(30),
            name_prefix: "worker".into(),
            retention: Retention::default(),
            retention_interval: Duration::from_secs(60),
            sample_interval: Duration::from_secs(15),
            schedules: true,
        }
    }
}

/// How jobs of dead workers and hung handlers are treated.
#[derive(Clone, Debug)]
pub struct Recovery {
    /// Whether this process looks for them.
    pub enabled: bool,
    /// How long a recovered job waits.
    pub delay: Duration,
    /// The interruption with this number quarantines a job.
    pub max_interruptions: u16,
    /// Jobs with one of these flags get `resilient_factor` times the threshold.
    pub resilient_flags: Vec<String>,
    /// See there.
    pub resilient_factor: u32,
}

impl Default for Recovery {
    fn default() -> Self {
        Recovery {
            enabled: true,
            delay: Duration::from_secs(5),
            max_interruptions: 3,
            resilient_flags: vec!["infrastructure_resilient".into()],
            resilient_factor: 3,
        }
    }
}

impl Recovery {
    /// How many thresholds a job with these flags is given.
    fn patience_for(&self, flags: &[String]) -> u32 {
        match flags.iter().any(|flag| self.resilient_flags.contains(flag)) {
            true => self.resilient_factor.max(1),
            false => 1,
        }
    }
}

impl Settings {
    fn validate(&self) -> Result<()> {
        let wrong = |field: &str, message: String| Err(Error::invalid(field, format!("{field}: {message}")));
        if self.queues.is_empty() {
            return wrong("queues", "none named; name at least one, such as `default`".into());
        }
        for queue in &self.queues {
            check_name("queues", queue)?;
        }
        if self.concurrency == 0 {
            return wrong("concurrency", "must be at least 1".into());
        }
        if self.concurrency > MAX_CONCURRENCY {
            return wrong(
                "concurrency",
                format!("at most {MAX_CONCURRENCY} in one process; start more of them"),
            );
        }
        for (queue, most) in &self.queue_concurrency {
            if *most == 0 {
                return wrong(
                    "queue_concurrency",
                    format!("queue `{queue}`: must be at least 1; leave the queue out to run none"),
                );
            }
            if !self.queues.contains(queue) {
                return wrong(
                    "queue_concurrency",
                    format!("queue `{queue}` is not among the worker's queues; add it there"),
                );
            }
        }
        let positive = [
            ("poll_interval", self.poll_interval),
            ("heartbeat_interval", self.heartbeat_interval),
            ("sweep_interval", self.sweep_interval),
            ("retention_interval", self.retention_interval),
            ("sample_interval", self.sample_interval),
        ];
        for (field, value) in positive {
            if value.is_zero() {
                return wrong(field, "must be longer than nothing, such as `10s`".into());
            }
        }
        if self.max_poll_interval < self.poll_interval {
            return wrong(
                "max_poll_interval",
                format!(
                    "{:?} is below poll_interval ({:?}); raise it",
                    self.max_poll_interval, self.poll_interval
                ),
            );
        }
        if self.stale_after < self.heartbeat_interval.saturating_mul(3) {
            return wrong(
                "stale_after",
                format!(
                    "{:?} is under three heartbeats ({:?} each); one lost beat would cost the worker its jobs: raise it or beat more often",
                    self.stale_after, self.heartbeat_interval
                ),
            );
        }
        if self.recovery.max_interruptions == 0 {
            return wrong("max_interruptions", "must be at least 1".into());
        }
        check_name("name_prefix", &self.name_prefix)
    }
}

/// Puts a worker together.
pub struct Builder {
    client: Client,
    settings: Settings,
    states: States,
    entries: Entries,
    schedules: Vec<NewSchedule>,
    hooks: Option<Arc<dyn Hooks>>,
}

impl Builder {
    /// Gives handlers a part of the application, one value of each type.
    pub fn state<S: Send + Sync + 'static>(mut self, state: S) -> Self {
        self.states.put(Arc::new(state));
        self
    }

    /// Runs jobs of this type.
    pub fn register<J: Job>(mut self) -> Self {
        let entry = |states: &States| -> Result<Route> {
            Ok(Route::One(Arc::new(handler::Typed::<J>::new(states.get(J::KIND)?))))
        };
        self.entries.add(J::KIND, J::schema(), entry);
        self
    }

    /// Runs jobs of `kind` by a function of their payload.
    pub fn function<P, S, F, Fut>(mut self, kind: &'static str, function: F) -> Self
    where
        P: DeserializeOwned + Send + 'static,
        S: Send + Sync + 'static,
        F: Fn(P, Context<S>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
    {
        let entry = move |states: &States| -> Result<Route> {
            Ok(Route::One(Arc::new(handler::Function::<P, S, F>::new(states.get(kind)?, function))))
        };
        self.entries.add(kind, None, entry);
        self
    }

    /// Runs up to `size` waiting jobs of `kind` in one call, which answers for
    /// each of them in the order given.
    pub fn batch<P, S, F, Fut>(mut self, kind: &'static str, size: usize, function: F) -> Self
    where
        P: DeserializeOwned + Send + 'static,
        S: Send + Sync + 'static,
        F: Fn(Vec<Batched<P, S>>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Vec<Result<(), Failure>>> + Send + 'static,
    {
        let entry = move |states: &States| -> Result<Route> {
            if size == 0 {
                return Err(Error::invalid(
                    "size",
                    format!("batch handler of `{kind}`: size must be at least 1"),
                ));
            }
            let handler = Arc::new(handler::BatchFunction::<P, S, F>::new(states.get(kind)?, function));
            Ok(Route::Batch { handler, size })
        };
        self.entries.add(kind, None, entry);
        self
    }

    /// Says by a JSON schema what jobs of a kind carry, as [`Job::schema`] does for
    /// typed ones: published when the worker starts, and servers check payloads
    /// by it.
    pub fn describe(mut self, kind: &str, schema: serde_json::Value) -> Self {
        self.entries.describe(kind, schema);
        self
    }

    /// Runs jobs of every kind that has no handler of its own.
    pub fn executor(mut self, executor: impl Executor) -> Self {
        self.entries.add_any(Arc::new(handler::Dynamic(Arc::new(executor))));
        self
    }

    /// Runs no jobs, and looks after the queue: recovery, schedules, retention.
    /// For servers, so that nothing is stuck while no other process of ours runs.
    pub fn upkeep_only(mut self) -> Self {
        self.entries.want_none();
        self
    }

    /// Puts a schedule in place when the worker starts. Declared alike by every
    /// process, it is stored once and keeps its next tick.
    pub fn cron(mut self, schedule: NewSchedule) -> Self {
        self.schedules.push(schedule);
        self
    }

    /// Gives the application a say in what the worker does.
    pub fn hooks(mut self, hooks: impl Hooks) -> Self {
        self.hooks = Some(Arc::new(hooks));
        self
    }

    /// All settings at once.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// The queues to claim from; `default` if never called.
    pub fn queues<S: Into<String>>(mut self, queues: impl IntoIterator<Item = S>) -> Self {
        self.settings.queues = queues.into_iter().map(Into::into).collect();
        self
    }

    /// How many jobs run at once; 4 by default.
    pub fn concurrency(mut self, concurrency: u32) -> Self {
        self.settings.concurrency = concurrency;
        self
    }

    /// How many of one queue's jobs run at once in this process, at most.
    pub fn queue_concurrency(mut self, queue: impl Into<String>, most: u32) -> Self {
        self.settings.queue_concurrency.insert(queue.into(), most);
        self
    }

    /// How long running jobs may go on after a stop was asked for; 30 s by
    /// default.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.settings.shutdown_grace = grace;
        self
    }

    /// Whether this process recovers the jobs of dead workers; it does by
    /// default.
    pub fn recovery(mut self, recovery: Recovery) -> Self {
        self.settings.recovery = recovery;
        self
    }

    /// Checks everything. What is wrong is named here, before the first job.
    pub fn build(self) -> Result<Worker> {
        self.settings.validate()?;
        let registry = self.entries.build(&self.states)?;
        Ok(Worker {
            client: self.client,
            settings: self.settings,
            registry,
            schedules: self.schedules,
            hooks: self.hooks,
        })
    }
}

/// A worker that has not begun.
pub struct Worker {
    client: Client,
    settings: Settings,
    registry: Registry,
    schedules: Vec<NewSchedule>,
    hooks: Option<Arc<dyn Hooks>>,
}

/// What a worker has done since it began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Summary {
    /// Attempts that succeeded.
    pub succeeded: u64,
    /// Attempts that failed and will be tried again.
    pub retrying: u64,
    /// Jobs that failed for good.
    pub failed_permanent: u64,
    /// Jobs that ended as cancelled.
    pub cancelled: u64,
    /// Attempts put off or given back.
    pub put_back: u64,
}

impl Worker {
    /// Begins to put one together.
    pub fn builder(client: Client) -> Builder {
        Builder {
            client,
            settings: Settings::default(),
            states: States::default(),
            entries: Entries::default(),
            schedules: Vec::new(),
            hooks: None,
        }
    }

    /// Begins to work; goes on until [stopped](Running::stop).
    pub async fn start(self) -> Result<Running> {
        self.begin(Phase::Working).await
    }

    /// Runs what is due, and what becomes due meanwhile, until nothing is; then
    /// stops.
    pub async fn drain(self) -> Result<Summary> {
        let running = self.begin(Phase::Draining).await?;
        Ok(running.wait().await)
    }

    /// Works until the process is told to end (SIGINT or SIGTERM); a second
    /// signal cuts the grace short.
    pub async fn run(self) -> Result<Summary> {
        self.run_as(Phase::Working).await
    }

    /// As [`drain`](Self::drain), and heeds signals as [`run`](Self::run) does.
    pub async fn run_drain(self) -> Result<Summary> {
        self.run_as(Phase::Draining).await
    }

    async fn run_as(self, phase: Phase) -> Result<Summary> {
        let mut signals = Signals::new()?;
        let running = tokio::select! {
            begun = self.begin(phase) => begun?,
            // Nothing has been claimed yet.
            () = signals.next() => return Ok(Summary::default()),
        };
        tokio::spawn(signals.stop(running.stopper(), || {}));
        Ok(running.wait().await)
    }

    async fn begin(self, phase: Phase) -> Result<Running> {
        let worker = WorkerId::new();
        let client = self.client.clone();
        for schedule in self.schedules {
            self.client.put_schedule(schedule).await?;
        }
        client.register(&heartbeat::registration(&self.settings, self.registry.kinds(), worker)).await?;
        let (reports, inbox) = mpsc::unbounded_channel();
        let shared =
            Shared::new(self.client, self.settings, self.registry, self.hooks, reports, worker, phase);
        let ends_all = EndsAll(shared.clone());
        heartbeat::spawn(shared.clone(), client.with_own_connection())?;
        if let Err(error) = client.put_kinds(shared.registry.published()).await {
            tracing::warn!(%error, "could not publish the worker's kinds; it works all the same");
        }
        if let Some(hooks) = &shared.hooks {
            hooks::call("on_worker_start", hooks.on_worker_start(worker)).await;
        }
        let now = watch::Sender::new(false);
        let task = tokio::spawn(supervise(ends_all, inbox, now.subscribe()));
        Ok(Running { shared, now, task })
    }
}

/// A worker at work. Dropping it does not stop it.
pub struct Running {
    shared: Arc<Shared>,
    now: watch::Sender<bool>,
    task: tokio::task::JoinHandle<()>,
}

/// Stops a worker from elsewhere.
#[derive(Clone)]
pub struct Stopper {
    shared: Arc<Shared>,
    now: watch::Sender<bool>,
}

impl Stopper {
    /// Claims no more; what runs may finish within the grace.
    pub fn stop(&self) {
        self.shared.phase.send_if_modified(|phase| {
            let before = *phase;
            *phase = before.max(Phase::Finishing);
            *phase != before
        });
    }

    /// As [`stop`](Self::stop), without grace.
    pub fn stop_now(&self) {
        self.stop();
        self.now.send_replace(true);
    }
}

impl Running {
    /// This boot's id.
    pub fn id(&self) -> WorkerId {
        self.shared.worker()
    }

    /// Something to stop it by from elsewhere.
    pub fn stopper(&self) -> Stopper {
        Stopper { shared: self.shared.clone(), now: self.now.clone() }
    }

    /// What it has done so far.
    pub fn summary(&self) -> Summary {
        self.shared.metrics.summary()
    }

    /// Stops: claims no more at once, lets running jobs finish within the grace,
    /// then tells them to stop, then drops them. What did not finish goes back to
    /// the queue at once, uncharged.
    pub async fn stop(self) -> Summary {
        self.stopper().stop();
        self.wait().await
    }

    /// Stops without grace.
    pub async fn stop_now(self) -> Summary {
        self.stopper().stop_now();
        self.wait().await
    }

    /// Waits until somebody has stopped it.
    pub async fn wait(self) -> Summary {
        if let Err(died) = self.task.await {
            tracing::error!(%died, "the worker's supervisor died");
        }
        self.shared.metrics.summary()
    }
}

/// Runs the parts of a worker, and takes them down in order.
async fn supervise(
    ends_all: EndsAll,
    inbox: mpsc::UnboundedReceiver<settle::Report>,
    mut now: watch::Receiver<bool>,
) {
    let shared = ends_all.0.clone();
    let mut runners = JoinSet::new();
    for _ in 0..shared.settings.concurrency {
        runners.spawn(execute::run(shared.clone()));
    }
    let mut upkeep = JoinSet::new();
    upkeep.spawn(upkeep::sweep(shared.clone()));
    if shared.settings.schedules {
        upkeep.spawn(upkeep::cron(shared.clone()));
    }
    upkeep.spawn(upkeep::retain(shared.clone()));
    upkeep.spawn(upkeep::sample(shared.clone()));
    upkeep.spawn(shared.progress.clone().run(shared.client.clone()));
    let mut settler = tokio::spawn(settle::run(shared.clone(), inbox));
    let mut claimer = tokio::spawn(claim::run(shared.clone()));

    loop {
        tokio::select! {
            () = shared.reached(Phase::Finishing) => break,
            Some(Err(died)) = runners.join_next() => {
                tracing::error!(%died, "a runner died; another takes its place");
                runners.spawn(execute::run(shared.clone()));
            }
        }
    }
    // A claim that is under way gives back what it found. One that hangs on the
    // database is left to its engine, which does the same when the answer comes.
    let grace_ends = tokio::time::Instant::now() + shared.settings.shutdown_grace;
    if tokio::time::timeout(STOP_WITHIN, &mut claimer).await.is_err() {
        claimer.abort();
    }
    for attempt in shared.buffer.take_all() {
        shared.report(attempt, Ending::Released, None);
    }
    shared.buffer.close();

    let all_done = async { while runners.join_next().await.is_some() {} };
    tokio::pin!(all_done);
    let in_time = tokio::select! {
        () = &mut all_done => true,
        () = tokio::time::sleep_until(grace_ends) => false,
        () = cut_short(&mut now) => false,
    };
    if !in_time {
        let running = shared.held.all();
        tracing::warn!(jobs = running.len(), "the grace is over; telling handlers to stop");
        running.iter().for_each(|attempt| attempt.control.stop(StopReason::Shutdown));
        if tokio::time::timeout(STOP_WITHIN, &mut all_done).await.is_err() {
            running.iter().for_each(|attempt| attempt.control.abort(StopReason::Shutdown));
            // A handler that blocks its thread cannot even be dropped; its job
            // goes back all the same, and the fence keeps it out.
            let _ = tokio::time::timeout(Duration::from_millis(100), &mut all_done).await;
            for attempt in shared.held.all() {
                shared.report(attempt, Ending::Released, None);
            }
        }
    }
    settle_the_rest(&shared).await;
    shared.phase.send_replace(Phase::Ended);
    upkeep.abort_all();
    if tokio::time::timeout(SETTLE_WITHIN, &mut settler).await.is_err() {
        settler.abort();
    }
    let worker = shared.worker();
    let retired = tokio::time::timeout(SETTLE_WITHIN, shared.client.retire(worker)).await;
    if !matches!(retired, Ok(Ok(()))) {
        tracing::debug!("could not sign off; recovery will clear the worker's row");
    }
    if let Some(hooks) = &shared.hooks {
        let telling = async {
            shared.telling.all().await;
            hooks::call("on_worker_stop", hooks.on_worker_stop(worker)).await;
        };
        let in_time = tokio::select! {
            () = telling => true,
            () = tokio::time::sleep(shared.settings.shutdown_grace) => false,
            () = cut_short(&mut now) => false,
        };
        if !in_time {
            tracing::warn!("stopped before every hook had heard what was stored");
        }
    }
}

/// Waits until somebody wants it to end without grace.
async fn cut_short(now: &mut watch::Receiver<bool>) {
    if now.wait_for(|now| *now).await.is_err() {
        // Nobody is left who could want it.
        std::future::pending().await
    }
}

/// Waits until every lease is settled, as long as the database answers.
async fn settle_the_rest(shared: &Shared) {
    let all_settled = async {
        loop {
            let settled = shared.held.settled.notified();
            if shared.held.len() == 0 {
                return;
            }
            settled.await;
        }
    };
    let _ = tokio::time::timeout(SETTLE_WITHIN, all_settled).await;
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn the_grace_is_cut_short_by_who_asks_for_it_and_not_by_who_goes_away() {
        let mut context = Context::from_waker(Waker::noop());
        let (asks, mut now) = watch::channel(false);
        let mut short = pin!(cut_short(&mut now));
        assert!(short.as_mut().poll(&mut context).is_pending());
        drop(asks);
        assert!(short.as_mut().poll(&mut context).is_pending(), "nobody has asked");

        let (asks, mut now) = watch::channel(false);
        asks.send_replace(true);
        assert!(pin!(cut_short(&mut now)).poll(&mut context).is_ready());
    }
}
