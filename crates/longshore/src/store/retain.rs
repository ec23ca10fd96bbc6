//! How long finished jobs are kept.

use std::time::Duration;

use crate::job::Outcome;

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
