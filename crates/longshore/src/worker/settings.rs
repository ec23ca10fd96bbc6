//! A worker's settings, their defaults and their validation.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::enqueue::{DEFAULT_QUEUE, check_name};
use crate::error::{Error, Result};
use crate::recovery::INFRASTRUCTURE_RESILIENT_FLAG;
use crate::store::Retention;

/// More tasks than this would wait for the database, not for work.
const MAX_CONCURRENCY: u32 = 100_000;

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
    pub recovery: RecoverySettings,
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
            recovery: RecoverySettings::default(),
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
pub struct RecoverySettings {
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

impl Default for RecoverySettings {
    fn default() -> Self {
        RecoverySettings {
            enabled: true,
            delay: Duration::from_secs(5),
            max_interruptions: 3,
            resilient_flags: vec![INFRASTRUCTURE_RESILIENT_FLAG.into()],
            resilient_factor: 3,
        }
    }
}

impl RecoverySettings {
    /// How many thresholds a job with these flags is given.
    pub(super) fn patience_for(&self, flags: &[String]) -> u32 {
        let is_resilient = flags.iter().any(|flag| self.resilient_flags.contains(flag));
        if is_resilient { self.resilient_factor.max(1) } else { 1 }
    }
}

impl Settings {
    pub(super) fn validate(&self) -> Result<()> {
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
