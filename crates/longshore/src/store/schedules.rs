//! Stored cron schedules.

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::enqueue::{MAX_PAYLOAD, check_json, check_name};
use crate::error::Result;

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
