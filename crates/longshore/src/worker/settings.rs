//! A worker's settings: their defaults and their validation. How the settings can be given
//! on a command line or in a file belongs to the command.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::rules::enqueue::{ALL_QUEUES, DEFAULT_QUEUE, check_labels, check_name};
use crate::store::{INFRASTRUCTURE_RESILIENT_FLAG, Retention};

/// With more tasks than this, the tasks would wait for the database, not for work.
const MAX_CONCURRENCY: u32 = 100_000;

/// A worker's settings. The defaults suit most applications.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The queues to claim from. [`ALL_QUEUES`](crate::ALL_QUEUES), `*`, means every queue,
    /// including queues that get their first job later.
    pub queues: Vec<String>,
    /// How many jobs run at once.
    pub concurrency: u32,
    /// Per queue: the maximum number of its jobs that run at once in this process.
    pub queue_concurrency: BTreeMap<String, u32>,
    /// Claim only jobs with at least one of these flags; empty means any job.
    pub accept_flags: Vec<String>,
    /// Claim no job with any of these flags.
    pub forbid_flags: Vec<String>,
    /// How soon an idle worker polls for work when no wake-up arrives.
    pub poll_interval: Duration,
    /// The limit up to which the poll interval doubles while there is no work.
    pub max_poll_interval: Duration,
    /// How often the worker sends a heartbeat.
    pub heartbeat_interval: Duration,
    /// A worker without a heartbeat for this long is declared dead.
    pub stale_after: Duration,
    /// How often this process looks for dead workers.
    pub sweep_interval: Duration,
    /// How jobs of dead workers and hung handlers are recovered.
    pub recovery: RecoverySettings,
    /// How long running jobs may continue after a stop is requested.
    pub shutdown_grace: Duration,
    /// The prefix of the worker's name.
    pub name_prefix: String,
    /// How long finished jobs are kept.
    pub retention: Retention,
    /// How often finished jobs past their retention are removed.
    pub retention_interval: Duration,
    /// How often the gauges are refreshed.
    pub sample_interval: Duration,
    /// Whether this worker fires due schedules; by default every worker does.
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

/// How jobs of dead workers and hung handlers are recovered.
///
/// ```
/// use std::time::Duration;
/// use longshore::INFRASTRUCTURE_RESILIENT_FLAG;
/// use longshore::worker::RecoverySettings;
///
/// let recovery = RecoverySettings::default()
///     .delay(Duration::from_secs(30))
///     .resilient_flags([INFRASTRUCTURE_RESILIENT_FLAG, "migrates_disks"])
///     .resilient_factor(5);
/// assert!(recovery.enabled);
/// let off = RecoverySettings::default().enabled(false);
/// assert!(!off.enabled);
/// ```
#[derive(Clone, Debug)]
pub struct RecoverySettings {
    /// Whether this process recovers jobs.
    pub enabled: bool,
    /// How long a recovered job waits before it is due again.
    pub delay: Duration,
    /// A job is quarantined when its count of interruptions reaches this number.
    pub max_interruptions: u16,
    /// A worker that holds a job with one of these flags gets `resilient_factor` times the
    /// threshold.
    pub resilient_flags: Vec<String>,
    /// The factor for workers that hold a job with one of the `resilient_flags`.
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
    /// Sets whether this process recovers jobs; on by default.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Sets how long a recovered job waits before it is due again; 5 s by default.
    pub fn delay(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Sets after how many interruptions a job is quarantined; 3 by default.
    pub fn max_interruptions(mut self, max_interruptions: u16) -> Self {
        self.max_interruptions = max_interruptions;
        self
    }

    /// Sets the flags of resilient jobs; only [`INFRASTRUCTURE_RESILIENT_FLAG`] by default.
    pub fn resilient_flags<S: Into<String>>(mut self, flags: impl IntoIterator<Item = S>) -> Self {
        self.resilient_flags = flags.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the factor by which a resilient job multiplies the threshold of its worker; 3 by default.
    pub fn resilient_factor(mut self, factor: u32) -> Self {
        self.resilient_factor = factor;
        self
    }

    /// The factor by which the threshold is multiplied for a job with these flags.
    pub(super) fn threshold_factor(&self, flags: &[String]) -> u32 {
        let is_resilient = flags.iter().any(|flag| self.resilient_flags.contains(flag));
        if is_resilient { self.resilient_factor.max(1) } else { 1 }
    }
}

impl Settings {
    /// Whether the worker claims from every queue.
    pub(super) fn claims_from_all(&self) -> bool {
        self.queues.iter().any(|queue| queue == ALL_QUEUES)
    }

    /// Whether the worker claims from this queue.
    pub(super) fn claims_from(&self, queue: &str) -> bool {
        self.claims_from_all() || self.queues.iter().any(|name| name == queue)
    }

    pub(super) fn validate(&self) -> Result<()> {
        let invalid =
            |field: &str, message: String| Err(Error::invalid(field, format!("{field}: {message}")));
        if self.queues.is_empty() {
            return invalid("queues", "no queue is named; name at least one, such as `default`".into());
        }
        for queue in &self.queues {
            check_name("queues", queue)?;
        }
        if self.concurrency == 0 {
            return invalid("concurrency", "must be at least 1".into());
        }
        if self.concurrency > MAX_CONCURRENCY {
            return invalid(
                "concurrency",
                format!("at most {MAX_CONCURRENCY} in one process; start more processes instead"),
            );
        }
        for (queue, limit) in &self.queue_concurrency {
            if *limit == 0 {
                return invalid(
                    "queue_concurrency",
                    format!(
                        "queue `{queue}`: must be at least 1; remove the queue from `queues` to run none of its jobs"
                    ),
                );
            }
            if !self.claims_from(queue) {
                return invalid(
                    "queue_concurrency",
                    format!("queue `{queue}` is not among the worker's queues; add it to `queues`"),
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
                return invalid(field, "must be longer than zero, such as `10s`".into());
            }
        }
        if self.max_poll_interval < self.poll_interval {
            return invalid(
                "max_poll_interval",
                format!(
                    "{:?} is below poll_interval ({:?}); raise it",
                    self.max_poll_interval, self.poll_interval
                ),
            );
        }
        if self.stale_after < self.heartbeat_interval.saturating_mul(3) {
            return invalid(
                "stale_after",
                format!(
                    "{:?} is shorter than three heartbeats ({:?} each), so one lost heartbeat could cost the worker its jobs; raise it or send heartbeats more often",
                    self.stale_after, self.heartbeat_interval
                ),
            );
        }
        if self.recovery.max_interruptions == 0 {
            return invalid("max_interruptions", "must be at least 1".into());
        }
        if self.recovery.resilient_factor == 0 {
            return invalid(
                "resilient_factor",
                "must be at least 1; 1 gives resilient jobs no longer threshold".into(),
            );
        }
        check_labels("resilient_flags", &self.recovery.resilient_flags)?;
        check_name("name_prefix", &self.name_prefix)
    }
}
