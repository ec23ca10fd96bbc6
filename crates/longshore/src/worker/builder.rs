//! The builder: collects handlers, state, hooks, schedules and settings, and checks them in
//! [`Builder::build`]. Starting the worker belongs to `supervise`.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::context::Context;
use super::handler::{self, Batched, Executor, Failure, Job};
use super::hooks::Hooks;
use super::registry::{Entries, Route, States};
use super::settings::{RecoverySettings, Settings};
use super::supervise::Worker;
use crate::client::Client;
use crate::client::schedules::{NewSchedule, Undeclared};
use crate::error::{Error, Result};

/// Builds a worker: handlers, their state, hooks, schedules and settings.
pub struct Builder {
    client: Client,
    settings: Settings,
    states: States,
    entries: Entries,
    schedules: Vec<NewSchedule>,
    undeclared: Undeclared,
    hooks: Option<Arc<dyn Hooks>>,
}

impl Builder {
    pub(super) fn new(client: Client) -> Self {
        Builder {
            client,
            settings: Settings::default(),
            states: States::default(),
            entries: Entries::default(),
            schedules: Vec::new(),
            undeclared: Undeclared::default(),
            hooks: None,
        }
    }

    /// Adds application state for handlers. There is one value per type; a handler names the
    /// type it needs.
    pub fn state<S: Send + Sync + 'static>(mut self, state: S) -> Self {
        self.states.put(Arc::new(state));
        self
    }

    /// Registers a typed [`Job`]: the worker runs jobs of its kind.
    pub fn register<J: Job>(mut self) -> Self {
        let entry = |states: &States| -> Result<Route> {
            Ok(Route::One(Arc::new(handler::Typed::<J>::new(states.get(J::KIND)?))))
        };
        self.entries.add(J::KIND, J::schema(), entry);
        self
    }

    /// Registers an async function that runs jobs of `kind`; it receives the decoded payload.
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

    /// Registers a batch handler: one call runs up to `size` waiting jobs of `kind` and returns
    /// one result per job, in the same order.
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
                    format!("batch handler of `{kind}`: the size must be at least 1"),
                ));
            }
            let handler = Arc::new(handler::BatchFunction::<P, S, F>::new(states.get(kind)?, function));
            Ok(Route::Batch { handler, size })
        };
        self.entries.add(kind, None, entry);
        self
    }

    /// Sets the JSON schema of a kind's payload, as [`Job::schema`] does for typed jobs. It is
    /// published when the worker starts, and servers check payloads against it.
    pub fn describe(mut self, kind: &str, schema: serde_json::Value) -> Self {
        self.entries.describe(kind, schema);
        self
    }

    /// Registers an [`Executor`] for every kind that has no other handler.
    pub fn executor(mut self, executor: impl Executor) -> Self {
        self.entries.add_catch_all(Arc::new(handler::Dynamic(Arc::new(executor))));
        self
    }

    /// Makes a worker that runs no jobs and only does upkeep: recovery, schedules, retention.
    /// Servers use it, so that upkeep continues while no other worker process is running.
    pub fn upkeep_only(mut self) -> Self {
        self.entries.upkeep_only();
        self
    }

    /// Declares a schedule: it is stored when the worker starts. When every process declares the
    /// same schedule, it is stored once and keeps its next tick. When the code no longer declares
    /// it, the schedule still ticks; see [`undeclared_schedules`](Self::undeclared_schedules).
    pub fn cron(mut self, schedule: NewSchedule) -> Self {
        self.schedules.push(schedule);
        self
    }

    /// Sets what happens at the start to schedules that earlier versions of this program declared
    /// with [`cron`](Self::cron) and this one does not. By default they are
    /// [reported](Undeclared::Report). Schedules stored in other ways are not affected.
    ///
    /// A program is identified by the prefix of its workers' names (`Settings::name_prefix`). If
    /// several programs with schedules share a queue, give each of them its own prefix.
    pub fn undeclared_schedules(mut self, undeclared: Undeclared) -> Self {
        self.undeclared = undeclared;
        self
    }

    /// Sets the application's [`Hooks`].
    pub fn hooks(mut self, hooks: impl Hooks) -> Self {
        self.hooks = Some(Arc::new(hooks));
        self
    }

    /// Replaces all settings.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = settings;
        self
    }

    /// Sets the queues to claim from; `default` if never called. `*` means every queue.
    pub fn queues<S: Into<String>>(mut self, queues: impl IntoIterator<Item = S>) -> Self {
        self.settings.queues = queues.into_iter().map(Into::into).collect();
        self
    }

    /// Sets how many jobs run at once; 4 by default.
    pub fn concurrency(mut self, concurrency: u32) -> Self {
        self.settings.concurrency = concurrency;
        self
    }

    /// Limits how many jobs of one queue run at once in this process.
    pub fn queue_concurrency(mut self, queue: impl Into<String>, limit: u32) -> Self {
        self.settings.queue_concurrency.insert(queue.into(), limit);
        self
    }

    /// Sets how long running jobs may continue after a stop is requested; 30 s by default.
    pub fn shutdown_grace(mut self, grace: Duration) -> Self {
        self.settings.shutdown_grace = grace;
        self
    }

    /// Sets how often the worker sends a heartbeat; 10 s by default.
    pub fn heartbeat_interval(mut self, interval: Duration) -> Self {
        self.settings.heartbeat_interval = interval;
        self
    }

    /// Sets how long this worker may go without a heartbeat before it is declared dead and its
    /// jobs are recovered: at least three heartbeats; 60 s by default.
    pub fn stale_after(mut self, threshold: Duration) -> Self {
        self.settings.stale_after = threshold;
        self
    }

    /// Sets how often this process looks for dead workers; 15 s by default.
    pub fn sweep_interval(mut self, interval: Duration) -> Self {
        self.settings.sweep_interval = interval;
        self
    }

    /// Sets whether and how this process recovers the jobs of dead workers; on by default.
    ///
    /// ```
    /// # use longshore::{Client, Worker, worker::RecoverySettings};
    /// # fn example(client: Client) {
    /// let recovery = RecoverySettings::default().enabled(false); // other processes recover jobs
    /// let builder = Worker::builder(client).recovery(recovery);
    /// # }
    /// ```
    pub fn recovery(mut self, recovery: RecoverySettings) -> Self {
        self.settings.recovery = recovery;
        self
    }

    /// Checks handlers, state, schedules and settings, and returns the worker. Mistakes are
    /// reported here, before the first job runs.
    pub fn build(self) -> Result<Worker> {
        self.settings.validate()?;
        self.schedules.iter().try_for_each(NewSchedule::check)?;
        let registry = self.entries.build(&self.states)?;
        Ok(Worker {
            client: self.client,
            settings: self.settings,
            registry,
            schedules: self.schedules,
            undeclared: self.undeclared,
            hooks: self.hooks,
        })
    }
}
