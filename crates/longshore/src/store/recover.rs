//! Recovery: which leases a sweep examines, and those it may take.

use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;

use super::claim::backoff;
use super::{Lease, Settled, Settlement};
use crate::error::{Error, Result};
use crate::job::{JobId, WorkerId};
use crate::rules::lifecycle::Running;
use crate::rules::retry::RetryPolicy;

/// The flag of resilient jobs. A worker that holds one is declared dead only after a multiple of
/// the usual threshold, and keeps all its leases until then. Workers and sweeps use this flag by
/// default.
pub const INFRASTRUCTURE_RESILIENT_FLAG: &str = "infrastructure_resilient";

/// Which leases a sweep examines.
#[derive(Clone, Debug)]
pub struct SweepScope {
    /// Replaces every worker's own `stale_after`.
    pub threshold: Option<Duration>,
    /// The threshold for leases whose worker has no row.
    pub orphan_after: Duration,
    /// Jobs with one of these flags are resilient: a worker that holds one is declared
    /// dead only after `resilient_factor` times its threshold, and keeps all its leases
    /// until then.
    pub resilient_flags: Vec<String>,
    /// The factor for workers that hold a job with one of `resilient_flags`.
    pub resilient_factor: u32,
    /// When the database's clock was last moved forward, if it was: no lease counts as
    /// older than this when the sweep looks for hung handlers and unknown workers.
    pub stepped_at: Option<DateTime<Utc>>,
    /// Only leases of jobs after this id.
    pub after: Option<JobId>,
    /// The maximum number of leases.
    pub limit: u32,
}

impl Default for SweepScope {
    fn default() -> Self {
        SweepScope {
            threshold: None,
            orphan_after: Duration::from_secs(60),
            resilient_flags: vec![INFRASTRUCTURE_RESILIENT_FLAG.into()],
            resilient_factor: 3,
            stepped_at: None,
            after: None,
            limit: 1000,
        }
    }
}

#[cfg(feature = "sqlite")]
impl SweepScope {
    /// Whether a job with these flags is resilient.
    pub(crate) fn is_resilient(&self, flags: &[String]) -> bool {
        flags.iter().any(|flag| self.resilient_flags.contains(flag))
    }

    /// The threshold in microseconds: `own`, unless the sweep overrides it, times the
    /// factor of resilient jobs.
    pub(crate) fn threshold_of(&self, own: i64, is_resilient: bool) -> i64 {
        let threshold =
            self.threshold.map_or(own, |threshold| i64::try_from(threshold.as_micros()).unwrap_or(i64::MAX));
        if is_resilient { threshold.saturating_mul(self.resilient_factor.max(1).into()) } else { threshold }
    }
}

/// A lease that may be taken from its holder.
#[derive(Clone, Debug)]
#[non_exhaustive]
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
    /// The row in `running`: the lease, its holder and its flags.
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

    /// The delay before the next attempt if this one is charged; `None` if the job's
    /// retry policy allows no further attempt.
    pub fn backoff(&self) -> Option<Duration> {
        backoff(self.retry.as_ref(), self.id, self.running.attempt)
    }
}

/// The result of a recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Recovered {
    /// It was handled as a settlement: stored, or refused because the lease has changed.
    Settled(Settled),
    /// Nothing changed: another transaction has locked the lease, or the database rejects
    /// the change. Contains the reason. A later sweep tries again.
    Deferred(String),
}

/// Why a lease may be taken from its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Interruptor {
    /// The worker is dead: its heartbeat is older than its threshold, or it signed off.
    DeadWorker,
    /// The worker has no row.
    UnknownWorker,
    /// The worker is alive, but the job's timeout and the worker's threshold have passed.
    HungHandler,
}

/// Dead workers and their leases.
#[async_trait]
pub trait Recovery {
    /// Lists the workers that [`mark_dead`](Self::mark_dead) would declare dead, without
    /// locking them.
    async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>>;

    /// Declares dead every live worker whose heartbeat is older than the scope's threshold
    /// or, without one, than the worker's own `stale_after`. For a worker that holds at
    /// least one resilient job, that time is multiplied by the scope's factor. Returns
    /// those workers. Also deletes workers that have been dead for an hour and hold no
    /// lease.
    async fn mark_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>>;

    /// Lists leases that may be taken from their holders, ordered by job id, without
    /// locking them: those of dead workers, including workers that
    /// [`mark_dead`](Self::mark_dead) would declare dead now, so that a dry run lists
    /// what a sweep would take; those without a worker row, past `orphan_after`; and those
    /// older than the job's timeout plus the holder's threshold (a hung handler). The
    /// factor of resilient jobs applies to all three.
    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>>;

    /// Takes leases from their holders. Works like [`settle`](super::Settling::settle), with
    /// one more condition: unless the handler hung, the holder must be dead or
    /// unknown when the item is stored. Does not wait for locked rows. An item that
    /// cannot be stored now is deferred and does not affect the others.
    async fn recover(&self, recoveries: &[Settlement]) -> Result<Vec<Recovered>>;
}

/// Logs that the database refused to declare a worker dead.
pub(crate) fn warn_of_refused_worker(worker_id: WorkerId, error: &Error) {
    tracing::warn!(%worker_id, %error, "could not declare the worker dead; retrying at the next sweep");
}
