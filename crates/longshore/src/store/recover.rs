//! Recovery: which leases a sweep examines, and those it may take.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::Lease;
use super::claim::backoff;
use crate::job::JobId;
use crate::lifecycle::Running;
use crate::recovery::INFRASTRUCTURE_RESILIENT_FLAG;
use crate::retry::RetryPolicy;

/// Which leases a sweep examines.
#[derive(Clone, Debug)]
pub struct SweepScope {
    /// Replaces every worker's own `stale_after`.
    pub threshold: Option<Duration>,
    /// The threshold for leases whose worker has no row. Also the time after a job's
    /// timeout at which its handler counts as hung.
    pub orphan_after: Duration,
    /// For jobs with one of these flags, thresholds are multiplied by
    /// `resilient_factor`.
    pub resilient_flags: Vec<String>,
    /// The factor for jobs with one of `resilient_flags`.
    pub resilient_factor: u32,
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
            after: None,
            limit: 1000,
        }
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

/// Why a lease may be taken from its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Interruptor {
    /// The worker's heartbeat is older than its threshold.
    DeadWorker,
    /// The worker has no row.
    UnknownWorker,
    /// The worker is alive, but the job's timeout and the threshold have passed.
    HungHandler,
}
