//! Positions in the groups that a claimer has served.
//!
//! A position is **unchecked** after a look from the head, and is not used. The next claim that serves the
//! group looks for jobs behind the position. If there are none, it uses the position again; otherwise the
//! position moves back to the first of them. On Postgres the look reads all entries behind the position,
//! and while a snapshot is held those become more and more. So a look from the head leaves the positions checked until
//! [`LOOK_PAUSE`] times the duration of the last looks has passed (but at most [`MAX_LOOK_PAUSE`]): looks take about a
//! fortieth of the time, and they do not make looks from the head rarer. A group without a position is new: its claim reads from the head,
//! as it has to, and that is no look.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{Position, exhausted_at};

/// More positions than this are not worth their memory.
const MAX_POSITIONS: usize = 10_000;
/// The minimum pause after a look, as a multiple of its duration.
const LOOK_PAUSE: u32 = 40;
/// The maximum. While a snapshot is held, looks can take longer than a fortieth of the time then, but a job
/// behind a position is not left there for minutes.
const MAX_LOOK_PAUSE: Duration = Duration::from_secs(30);

#[derive(Debug, Default)]
pub(crate) struct GroupPositions {
    /// By queue, group and priority.
    positions: HashMap<(String, String, i16), GroupPosition>,
    /// Until when looks from the head leave the positions checked.
    no_looks_until: Option<Instant>,
    /// How long all looks took.
    looked: Duration,
}

/// A position in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct GroupPosition {
    /// Everything at or before this position has been claimed or skipped.
    after: Position,
    /// Whether a claim has looked behind the position since the last look from the head.
    checked: bool,
}

impl GroupPositions {
    /// The position in a group, unless it is unchecked.
    pub(crate) fn position(&self, queue: &str, group: &str, priority: i16) -> Option<Position> {
        self.get(queue, group, priority).filter(|known| known.checked).map(|known| known.after)
    }

    /// The position in a group, if a claim has to look behind it before it is used again.
    #[cfg_attr(
        not(any(feature = "postgres", test)),
        expect(dead_code, reason = "SQLite reads from the head")
    )]
    pub(crate) fn unchecked(&self, queue: &str, group: &str, priority: i16) -> Option<Position> {
        self.get(queue, group, priority).filter(|known| !known.checked).map(|known| known.after)
    }

    fn get(&self, queue: &str, group: &str, priority: i16) -> Option<GroupPosition> {
        if self.positions.is_empty() {
            return None;
        }
        self.positions.get(&(queue.to_owned(), group.to_owned(), priority)).copied()
    }

    /// Records a look behind the unchecked position in a group. `first` is when the first job there is due.
    #[cfg_attr(
        not(any(feature = "postgres", test)),
        expect(dead_code, reason = "SQLite reads from the head")
    )]
    pub(crate) fn looked_behind(
        &mut self,
        queue: &str,
        group: &str,
        priority: i16,
        first: Option<DateTime<Utc>>,
    ) {
        if let Some(known) = self.positions.get_mut(&(queue.to_owned(), group.to_owned(), priority)) {
            let before_first = first.map(|run_at| Position { run_at, id: Uuid::nil() });
            let after = before_first.map_or(known.after, |before| before.min(known.after));
            *known = GroupPosition { after, checked: true };
        }
    }

    /// Moves the position in a group to the last job that was taken from it. After a `short` claim,
    /// jobs that sort before it may still be committed. If the position was unchecked, the claim has read
    /// from the head.
    pub(crate) fn served(
        &mut self,
        queue: &str,
        group: &str,
        priority: i16,
        last: Option<Position>,
        short: bool,
        now: DateTime<Utc>,
    ) {
        let position = if short { last.map(|last| last.min(exhausted_at(now))) } else { last };
        let Some(position) = position else { return };
        let key = (queue.to_owned(), group.to_owned(), priority);
        let after = match self.positions.get(&key) {
            Some(known) if known.checked => position.max(known.after),
            None if self.positions.len() >= MAX_POSITIONS => return,
            _ => position,
        };
        self.positions.insert(key, GroupPosition { after, checked: true });
    }

    /// Records how long a look took that ended at `now`.
    #[cfg_attr(
        not(any(feature = "postgres", test)),
        expect(dead_code, reason = "SQLite reads from the head")
    )]
    pub(crate) fn charge_look(&mut self, took: Duration, now: Instant) {
        let from = self.no_looks_until.map_or(now, |until| until.max(now));
        self.no_looks_until = Some((from + took * LOOK_PAUSE).min(now + MAX_LOOK_PAUSE));
        self.looked += took;
    }

    /// For how long looks from the head leave the positions checked.
    pub(super) fn pause_of_looks(&self, now: Instant) -> Option<Duration> {
        self.no_looks_until
            .and_then(|until| until.checked_duration_since(now))
            .filter(|pause| !pause.is_zero())
    }

    /// How long all looks took so far.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite reads from the head"))]
    pub(crate) fn looked(&self) -> Duration {
        self.looked
    }

    /// Makes claims look behind the positions again, after a look from the head at `now`, unless that takes too much of the
    /// time. If there are too many positions, those of groups that were not served since the last time make room
    /// for others.
    pub(super) fn uncheck(&mut self, now: Instant) {
        if self.pause_of_looks(now).is_some() {
            return;
        }
        if self.positions.len() >= MAX_POSITIONS {
            self.positions.retain(|_, position| position.checked);
        }
        self.positions.values_mut().for_each(|position| position.checked = false);
    }

    pub(super) fn clear(&mut self) {
        self.positions.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: i64) -> Position {
        Position { run_at: DateTime::from_timestamp(second, 0).unwrap(), id: Uuid::from_u128(second as u128) }
    }

    /// The job of second 50 was taken from the group `acme`.
    fn served() -> GroupPositions {
        let mut positions = GroupPositions::default();
        serve(&mut positions, "acme", 50);
        positions
    }

    fn serve(positions: &mut GroupPositions, group: &str, second: i64) {
        let now = DateTime::from_timestamp(1000, 0).unwrap();
        positions.served("default", group, 0, Some(at(second)), false, now);
    }

    /// The position in the group `acme` that a claim may use, and the one that it has to look behind.
    fn acme(positions: &GroupPositions) -> (Option<Position>, Option<Position>) {
        (positions.position("default", "acme", 0), positions.unchecked("default", "acme", 0))
    }

    #[test]
    fn looks_take_a_fortieth_of_the_time() {
        const TOOK: Duration = Duration::from_millis(1);
        let (mut positions, t0) = (served(), Instant::now());
        positions.uncheck(t0);
        // Two claims serve the group's priorities one after the other.
        positions.charge_look(2 * TOOK, t0 + 10 * TOOK);
        positions.looked_behind("default", "acme", 0, None);
        positions.charge_look(3 * TOOK, t0 + 20 * TOOK);
        positions.uncheck(t0 + 209 * TOOK);
        assert_eq!(positions.pause_of_looks(t0 + 209 * TOOK), Some(TOOK));
        assert_eq!(acme(&positions), (Some(at(50)), None), "another look would be too early");
        positions.uncheck(t0 + 210 * TOOK);
        assert_eq!(acme(&positions), (None, Some(at(50))));
        positions.charge_look(TOOK, t0 + 1000 * TOOK);
        positions.looked_behind("default", "acme", 0, None);
        positions.uncheck(t0 + 1039 * TOOK);
        assert_eq!(acme(&positions), (Some(at(50)), None), "unused time is not saved up");
        positions.uncheck(t0 + 1040 * TOOK);
        assert_eq!(acme(&positions), (None, Some(at(50))));
        assert_eq!(positions.looked(), 6 * TOOK);
        positions.charge_look(5000 * TOOK, t0 + 9000 * TOOK);
        assert_eq!(positions.pause_of_looks(t0 + 9000 * TOOK), Some(MAX_LOOK_PAUSE));
    }

    #[test]
    fn a_position_is_used_after_a_head_scan_once_a_look_finds_nothing_behind_it() {
        let mut positions = served();
        assert_eq!(acme(&positions), (Some(at(50)), None));
        positions.uncheck(Instant::now());
        assert_eq!(acme(&positions), (None, Some(at(50))));
        positions.looked_behind("default", "acme", 0, None);
        assert_eq!(acme(&positions), (Some(at(50)), None));
        positions.uncheck(Instant::now());
        assert_eq!(acme(&positions), (None, Some(at(50))), "every look from the head asks for a look");
    }

    #[test]
    fn a_job_behind_the_position_moves_it_back() {
        let mut positions = served();
        positions.uncheck(Instant::now());
        positions.looked_behind("default", "acme", 0, Some(at(20).run_at));
        let (after, _) = acme(&positions);
        assert!(after < Some(at(20)), "{after:?}");
        serve(&mut positions, "acme", 20);
        assert_eq!(acme(&positions), (Some(at(20)), None), "more late jobs may follow");
    }

    #[test]
    fn a_claim_that_reads_a_group_from_its_head_replaces_the_unchecked_position() {
        let mut positions = served();
        positions.uncheck(Instant::now());
        serve(&mut positions, "acme", 20);
        assert_eq!(acme(&positions), (Some(at(20)), None));
        serve(&mut positions, "acme", 10);
        assert_eq!(acme(&positions), (Some(at(20)), None), "a checked position never moves back");
    }

    #[test]
    fn positions_of_groups_that_were_not_served_make_room_for_others() {
        let mut positions = served();
        for group in 1..MAX_POSITIONS {
            serve(&mut positions, &format!("group-{group}"), 50);
        }
        serve(&mut positions, "one more", 50);
        assert_eq!(positions.position("default", "one more", 0), None);
        positions.uncheck(Instant::now());
        positions.looked_behind("default", "acme", 0, None);
        positions.uncheck(Instant::now());
        assert_eq!(acme(&positions), (None, Some(at(50))), "it was served");
        serve(&mut positions, "one more", 50);
        assert_eq!(positions.position("default", "one more", 0), Some(at(50)));
    }
}
