//! Groups: their settings, the list that operators see, and their place in line.

use chrono::{DateTime, Utc};
use serde::Serialize;

use crate::turns::Rate;

/// A change to a group's settings. Fields that are `None` stay as they are.
#[derive(Clone, Debug, Default)]
pub struct GroupChange {
    /// Whether the group is paused: none of its jobs are claimed.
    pub paused: Option<bool>,
    /// The maximum number of its jobs that run at once, in all processes together; the inner
    /// `None` means the default of its queue.
    pub limit: Option<Option<u32>>,
    /// How often its jobs may start; the inner `None` means the default of its queue.
    pub rate: Option<Option<Rate>>,
    /// How many jobs it starts per turn, compared with other groups: 1 to 100.
    pub weight: Option<u32>,
}

/// A group as operators see it. The settings are those in effect: its own or, where it has none, the
/// defaults of its queue.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct GroupRecord {
    /// Its queue.
    pub queue: String,
    /// Its name.
    pub name: String,
    /// Whether it is paused: none of its jobs are claimed.
    pub paused: bool,
    /// The maximum number of its jobs that run at once; `None` means no limit.
    pub limit: Option<u32>,
    /// How often its jobs may start; `None` means no limit.
    pub rate: Option<Rate>,
    /// How many jobs it starts per turn, compared with other groups.
    pub weight: u32,
    /// The number of waiting jobs, up to 1,000.
    pub waiting: u64,
    /// Whether more jobs wait than were counted.
    pub waiting_or_more: bool,
    /// The number of running jobs.
    pub running: u64,
    /// When its rate lets the next job start; `None` means now.
    pub next_start_at: Option<DateTime<Utc>>,
}

impl GroupRecord {
    /// How many waiting jobs are counted at most.
    pub(crate) const MAX_WAITING: u64 = 1000;

    /// The count, if more than this many rows were not read.
    pub(crate) fn waiting(found: u64) -> (u64, bool) {
        (found.min(GroupRecord::MAX_WAITING), found > GroupRecord::MAX_WAITING)
    }
}

/// A group that a search by name found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FoundGroup {
    /// Its queue.
    pub queue: String,
    /// Its name.
    pub name: String,
    /// Whether it is paused: none of its jobs are claimed.
    pub paused: bool,
}

impl FoundGroup {
    /// How many groups with waiting jobs a search looks at. A group with exactly the name is found
    /// in any case.
    pub(crate) const MAX_WAITING: u32 = 2_000;
    /// How many groups with settings a search looks at, and how many running jobs with a group.
    pub(crate) const MAX_OTHERS: u32 = 10_000;
}

/// When a rate lets the next job start, if that is later than now.
pub(crate) fn next_start(
    rate: Option<Rate>,
    paced_until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
) -> Option<DateTime<Utc>> {
    Some(rate?.next_start(paced_until, now)).filter(|at| *at > now)
}

/// The place of a group among those whose turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceInLine {
    /// Its place; 1 is the next one.
    pub place: u32,
    /// How many groups stand in line, up to 1,000 turns.
    pub groups: u32,
}
