//! The builder: collects handlers, state, hooks and settings, and checks them.

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
use crate::cron::NewSchedule;
use crate::error::{Error, Result};

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
    pub(super) fn new(client: Client) -> Self {
        Builder {
            client,
            settings: Settings::default(),
            states: States::default(),
            entries: Entries::default(),
            schedules: Vec::new(),
            hooks: None,
        }
    }

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
    pub fn recovery(mut self, recovery: RecoverySettings) -> Self {
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
