//! Stored cron schedules.

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::enqueue::{Enqueued, MAX_PAYLOAD, check_json, check_name};
use crate::error::Result;

/// A stored schedule. The engine stores the next tick and lets one caller fire it; the
/// scheduler (`cron`) interprets the expression.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// Its name.
    pub name: String,
    /// The cron expression.
    pub expression: String,
    /// The IANA time zone of the expression.
    pub zone: String,
    /// The policy for missed ticks, as the scheduler encodes it.
    pub missed: String,
    /// The job that each tick enqueues, as the scheduler encodes it: JSON text.
    pub template: String,
    /// Whether the schedule is paused: its ticks do not fire.
    pub paused: bool,
    /// The next tick. While the schedule is paused, or no process fires it, this stays
    /// at the first tick that did not fire.
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

/// Whether a schedule's ticks fire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ticking {
    /// They fire.
    Running,
    /// They do not fire: the schedule is paused.
    Held,
}

/// The result of firing a schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ticked {
    /// The schedule moved to its next tick, and these are the results of its jobs.
    Fired(Vec<Enqueued>),
    /// Nothing changed: the schedule is paused, or is no longer as it was seen.
    Moved,
    /// Nothing changed: another client's open transaction has locked the schedule or holds
    /// a key of its jobs. Try again later.
    Locked,
}
