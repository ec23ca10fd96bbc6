//! What the upkeep goes by: leases to be taken from their holders, schedules,
//! and how long finished jobs are kept.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::Lease;
use super::claim::backoff;
use crate::enqueue::{MAX_PAYLOAD, check_json, check_name};
use crate::error::Result;
use crate::job::{JobId, Outcome};
use crate::lifecycle::Running;
use crate::retry::RetryPolicy;

// ---- recovery ------------------------------------------------------------

/// Which leases a sweep looks at.
#[derive(Clone, Debug)]
pub struct SweepScope {
    /// Overrides every worker's own threshold.
    pub threshold: Option<Duration>,
    /// The threshold for leases whose worker has no row, and the margin past
    /// a job's timeout after which its handler counts as hung.
    pub orphan_after: Duration,
    /// Jobs with one of these flags get `resilient_factor` times the threshold.
    pub resilient_flags: Vec<String>,
    /// See there.
    pub resilient_factor: u32,
    /// Only leases of jobs after this id.
    pub after: Option<JobId>,
    /// How many at most.
    pub limit: u32,
}

impl Default for SweepScope {
    fn default() -> Self {
        SweepScope {
            threshold: None,
            orphan_after: Duration::from_secs(60),
            resilient_flags: vec!["infrastructure_resilient".into()],
            resilient_factor: 3,
            after: None,
            limit: 1000,
        }
    }
}

/// A lease that may be taken from its holder.
#[derive(Clone, Debug)]
pub struct Interrupted {
    /// The job.
    pub id: JobId,
    /// Its kind.
    pub kind: String,
    /// Its queue.
    pub queue: String,
    /// Its flags.
    pub flags: Vec<String>,
    /// Its retry policy, when it is not the default.
    pub retry: Option<RetryPolicy>,
    /// The lease, its holder and what has been asked of it.
    pub running: Running,
    /// When the lease was taken.
    pub claimed_at: DateTime<Utc>,
    /// Why it may be taken.
    pub why: Interruptor,
}

impl Interrupted {
    /// The lease.
    pub fn lease(&self) -> Lease {
        Lease { id: self.id, lease_no: self.running.lease_no, worker: self.running.worker }
    }

    /// How long the next attempt waits if this one is charged.
    pub fn backoff(&self) -> Option<Duration> {
        backoff(self.retry.as_ref(), self.id, self.running.attempt)
    }
}

/// Why a lease may be taken from its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Interruptor {
    /// The worker's heartbeat is older than its threshold.
    DeadWorker,
    /// No such worker is known.
    UnknownWorker,
    /// The worker lives, but the job's timeout and the threshold have passed.
    HungHandler,
}

// ---- schedules -----------------------------------------------------------

/// A stored schedule. What the expression means is the scheduler's business;
/// the engine keeps the next tick and gives it to one caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// Its name.
    pub name: String,
    /// The cron line.
    pub expression: String,
    /// An IANA time zone.
    pub zone: String,
    /// What happens to missed ticks, as the scheduler wrote it down.
    pub missed: String,
    /// The job each tick enqueues, as the scheduler wrote it down: JSON text.
    pub template: String,
    /// Whether ticks are held back.
    pub paused: bool,
    /// The next tick. While the schedule is paused, or nobody is there to fire
    /// it, this stays at the first one that did not.
    pub next_at: DateTime<Utc>,
    /// The last tick that fired.
    pub last_at: Option<DateTime<Utc>>,
}

impl Schedule {
    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        check_name("expression", &self.expression)?;
        check_name("zone", &self.zone)?;
        check_name("missed", &self.missed)?;
        check_json("template", &self.template, MAX_PAYLOAD)
    }
}

/// Whether a schedule's ticks come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ticking {
    /// They come.
    Running,
    /// They are held back: the schedule is paused.
    Held,
}

// ---- retain --------------------------------------------------------------

/// How long finished jobs are kept; `None` keeps them for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Successes.
    pub succeeded: Option<Duration>,
    /// Cancelled jobs.
    pub cancelled: Option<Duration>,
    /// Dead letters.
    pub failed_permanent: Option<Duration>,
}

impl Retention {
    /// How long jobs with this outcome are kept.
    pub fn of(&self, outcome: Outcome) -> Option<Duration> {
        match outcome {
            Outcome::Succeeded => self.succeeded,
            Outcome::Cancelled => self.cancelled,
            Outcome::FailedPermanent => self.failed_permanent,
        }
    }
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Retention { succeeded: Some(7 * DAY), cancelled: Some(7 * DAY), failed_permanent: Some(90 * DAY) }
    }
}

/// What one step of retention did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retained {
    /// How many jobs were removed.
    pub removed: u64,
    /// Whether the walk has reached its end and will begin anew.
    pub done: bool,
}
