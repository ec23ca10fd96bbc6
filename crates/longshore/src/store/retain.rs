//! Retention: how long finished jobs are kept.

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::job::Outcome;

/// How long finished jobs are kept; `None` means forever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// For jobs that succeeded.
    pub succeeded: Option<Duration>,
    /// For cancelled jobs.
    pub cancelled: Option<Duration>,
    /// For dead letters.
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

/// The result of one retention step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retained {
    /// The number of jobs removed.
    pub removed: u64,
    /// The number of finished jobs examined, including those removed.
    pub examined: u64,
    /// Whether nothing is left to remove now, or what is left is locked by others.
    pub done: bool,
}

/// Removing finished jobs, and folding what counts them.
#[async_trait]
pub trait Retaining {
    /// Removes up to `step` finished jobs whose retention has passed. Does not examine
    /// jobs again before one of them may have expired. Jobs that are locked by others
    /// are skipped this time.
    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained>;

    /// Folds up to `step` rows of each level of tallies into fewer rows, so that counting
    /// stays fast. Returns how many rows it folded: none if there is nothing to fold, or
    /// while another process folds.
    async fn fold_tallies(&self, step: u32) -> Result<u64>;
}
