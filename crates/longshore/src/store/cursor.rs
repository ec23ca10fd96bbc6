//! The claim cursor: how far a claimer has read, so that its next claim resumes there
//! instead of starting over, and when a claim looks from the head again. Pure bookkeeping
//! without SQL, shared by both engines and tested without a database.
//!
//! # Why
//!
//! A claim reads due jobs from an index on (queue, priority, run_at, id). Entries that
//! it cannot claim collect at the head of that index: jobs of kinds that this worker
//! does not handle and, on Postgres, entries of jobs that were claimed long ago, which
//! vacuum cannot remove while any transaction pins the vacuum horizon. A claim that
//! always starts at the head reads all of them again every time.
//!
//! # How
//!
//! The waiting jobs of one queue with one priority are a *level*. For every level the
//! cursor keeps a *position* (run_at, id): everything at or before it has been claimed or
//! skipped. A claim normally **resumes**: it reads each level from its position on.
//!
//! A job can appear behind a position (its transaction committed late, a retry became
//! due) or in a level that the cursor does not have (a new priority). A **look** from the
//! head finds those: it lists the levels again and reads each from its first due job. A
//! claim looks
//!
//! - after a short claim, that is, one that found fewer jobs than it wanted,
//! - and otherwise every 250 ms,
//! - but only after a pause of at least ten times the duration of the last look, so that
//!   looks take at most about a tenth of the time, however expensive they are.
//!
//! After a wake-up, the new job is most likely in the level where the last one was found. If the cursor has only
//! that level, a claim resumes there even after a short claim, unless a job of a higher priority waits. It looks if
//! it finds nothing.
//!
//! A claim that has read all due jobs of a level leaves its position 100 ms before that
//! time, because a job with an earlier `run_at` may be committed just after the claim.
//! Resuming finds such a job; a position at the time of the claim would hide it until the
//! next look.
//!
//! # Groups
//!
//! The jobs of groups are found by the turns of their groups (`rules/turns.rs`). A level also has
//! a position in these turns, and `positions.rs` has one for each group that was served. A look forgets
//! the positions in turns.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::claim::ServedClaim;
use super::{ClaimRequest, Claims, Suspects};
use positions::GroupPositions;

mod positions;

/// The time between looks while claims find all the jobs they want.
const LOOK_INTERVAL: Duration = Duration::from_millis(250);
/// The minimum pause after a look, as a multiple of its duration.
const LOOK_PAUSE: u32 = 10;
/// How long a claimer waits for a look after a claim that found jobs.
const LOOK_AFTER_WORK: Duration = Duration::from_millis(5);
/// A look that takes longer than this is expensive.
#[cfg(feature = "api")]
const CHEAP_LOOK: Duration = Duration::from_millis(5);
/// How long levels without due turns are kept. While there are turns, every claim visits groups.
const KEEP_TURNS: Duration = Duration::from_secs(5);
/// A job that is committed up to this long after its `run_at` is found without a look.
const LATE_COMMIT: TimeDelta = TimeDelta::milliseconds(100);
/// The minimum pause before the next claim if a due job waits.
const MIN_PAUSE: Duration = Duration::from_millis(1);

/// How far one claimer has read. Keep one per worker and pass it to every [`claim`].
///
/// [`claim`]: super::Claiming::claim
#[derive(Debug, Default)]
pub struct ClaimCursor {
    /// What the levels were found for.
    filter: Option<Filter>,
    /// The levels with waiting jobs or due turns, highest priority first.
    levels: Vec<Level>,
    /// The last look from the head. `None`: the next claim looks.
    look: Option<Look>,
    /// Whether every claim looks.
    always_looks: bool,
    /// Whether the last claim found fewer jobs than it wanted.
    was_short: bool,
    /// Whether the next claim resumes, even if a look is due.
    resumes_next: bool,
    /// How many claims there were: queues with a cap take turns at being first.
    claims: usize,
    /// Positions in the groups that were served.
    pub(crate) groups: GroupPositions,
    /// Whether groups come first where jobs with and without a group have the same priority. The
    /// sides take turns.
    groups_first: bool,
    /// When a look last found due turns.
    saw_turns: Option<Instant>,
}

/// The part of a request that decides which jobs match. For another filter, the
/// positions are worthless: they may have skipped jobs that match it.
#[derive(Debug, PartialEq, Eq)]
struct Filter {
    queues: Vec<String>,
    kinds: Option<Vec<String>>,
    accept_flags: Vec<String>,
    forbid_flags: Vec<String>,
    min_priority: Option<i16>,
}

/// A look from the head, and what claims have found since.
#[derive(Debug)]
struct Look {
    ended: Instant,
    took: Duration,
    /// The engine's time.
    at: DateTime<Utc>,
    suspects: WaitingSuspects,
    /// When a rate lets a job start that waits for it, by the engine's clock.
    next_start: Option<DateTime<Utc>>,
    /// Whether a due job was left in a group, perhaps behind the position.
    left_behind_position: bool,
    /// Whether a group with a limit was served.
    saw_limited_group: bool,
}

/// The suspects without a group that waited at the last look.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WaitingSuspects {
    pub(crate) any: bool,
    /// Whether one of them is in a queue with a limit or a rate.
    pub(crate) any_limited: bool,
}

/// The jobs of one queue with one priority.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Level {
    pub(crate) queue: String,
    pub(crate) priority: i16,
    /// Whether the queue has a limit or a rate.
    pub(crate) limited: bool,
    /// Whether jobs without a group wait.
    pub(crate) has_jobs: bool,
    /// Every job without a group at or before this position has been claimed or skipped.
    /// `None` means that nothing has been read yet.
    pub(crate) jobs: Option<Position>,
    /// Whether groups have a due turn.
    pub(crate) has_turns: bool,
    /// Every turn at or before this position has been served or skipped.
    pub(crate) turns: Option<TurnPosition>,
}

/// A position in the order in which the jobs of one level are claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) id: Uuid,
}

/// A position among the turns of one level.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TurnPosition {
    pub(crate) at: DateTime<Utc>,
    pub(crate) id: i64,
}

/// How far a claim has read the jobs of a level that have no group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// Up to this job, which it took.
    UpTo(Position),
    /// Everything that was due at this time.
    AllDue(DateTime<Utc>),
}

/// Which jobs a claim takes next, in the order of priority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Jobs without a group, of these priorities.
    Plain(RangeInclusive<i16>),
    /// Jobs of groups, of this priority.
    Groups(i16),
    /// Both.
    Mixed(i16),
}

/// Where a claim starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Find the levels again and read each from its first due job.
    Look,
    /// Read each known level from its position on.
    Resume,
}

impl Level {
    /// A level in which jobs without a group wait.
    pub(crate) fn of_jobs(queue: impl Into<String>, priority: i16, limited: bool) -> Self {
        Level { queue: queue.into(), priority, limited, has_jobs: true, ..Level::default() }
    }

    /// A level in which groups have a due turn.
    pub(crate) fn of_turns(queue: impl Into<String>, priority: i16, limited: bool) -> Self {
        Level { queue: queue.into(), priority, limited, has_turns: true, ..Level::default() }
    }

    fn is_at(&self, queue: &str, priority: i16) -> bool {
        self.priority == priority && self.queue == queue
    }
}

// ---- where a claim starts ------------------------------------------------------

impl ClaimCursor {
    /// A cursor that never resumes: every claim starts at the head. For claims that are rare
    /// and differ from each other, and for comparison in benchmarks and tests.
    pub fn always_head() -> Self {
        ClaimCursor { always_looks: true, ..ClaimCursor::default() }
    }

    /// Decides where this claim starts. A request with another filter resets the
    /// cursor.
    pub(crate) fn start(&mut self, request: &ClaimRequest, now: Instant) -> Start {
        let queues = || request.queues.iter().map(|queue| &queue.name);
        let same_filter = self.filter.as_ref().is_some_and(|filter| {
            queues().eq(&filter.queues)
                && filter.kinds == request.kinds
                && filter.accept_flags == request.accept_flags
                && filter.forbid_flags == request.forbid_flags
                && filter.min_priority == request.min_priority
        });
        if !same_filter {
            *self = ClaimCursor {
                filter: Some(Filter {
                    queues: queues().cloned().collect(),
                    kinds: request.kinds.clone(),
                    accept_flags: request.accept_flags.clone(),
                    forbid_flags: request.forbid_flags.clone(),
                    min_priority: request.min_priority,
                }),
                always_looks: self.always_looks,
                claims: self.claims,
                ..ClaimCursor::default()
            };
        }
        self.claims = self.claims.wrapping_add(1);
        let resumes = std::mem::take(&mut self.resumes_next);
        let Some(look) = &self.look else { return Start::Look };
        if resumes {
            return Start::Resume;
        }
        if request.woken && self.was_short && self.has_only_jobs_of_one_level(request) {
            return Start::Resume;
        }
        let interval_passed = now.duration_since(look.ended) >= LOOK_INTERVAL;
        if self.always_looks || ((self.was_short || interval_passed) && self.may_look(now)) {
            Start::Look
        } else {
            Start::Resume
        }
    }

    /// Whether a new job is most likely in the only level that is known. Nothing else waited at the last look.
    fn has_only_jobs_of_one_level(&self, request: &ClaimRequest) -> bool {
        let has_one_level = matches!(&self.levels[..], [level] if !level.limited && !level.has_turns);
        has_one_level && request.queues.len() == 1 && !self.suspects().any && !self.always_looks
    }

    /// Whether enough time has passed since the last look, so that looks take only a small share of the time.
    pub(crate) fn may_look(&self, now: Instant) -> bool {
        self.look.as_ref().is_none_or(|look| now >= look.may_end_again())
    }

    /// Makes the next claim look, although the pause after the last look is not over, unless a look is expensive.
    /// Returns whether it does: not if the last claim looked, or found all the jobs that it wanted.
    #[cfg(feature = "api")]
    pub(crate) fn look_if_cheap(&mut self, last_claim: Instant) -> bool {
        let is_cheap = |look: &Look| look.took <= CHEAP_LOOK || self.levels.is_empty();
        let looks = self.was_short
            && self.look.as_ref().is_some_and(|look| look.ended < last_claim && is_cheap(look));
        if looks {
            self.restart();
        }
        looks
    }

    /// Makes the next claim look, because this one failed after it had moved positions.
    pub(crate) fn restart(&mut self) {
        self.look = None;
        self.resumes_next = false;
        self.groups.clear();
    }

    /// Whether the last claim found fewer jobs than it wanted.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "looks are cheap on SQLite"))]
    pub(crate) fn was_short(&self) -> bool {
        self.was_short
    }

    /// How often a claim has begun with this cursor.
    pub(crate) fn claims_begun(&self) -> usize {
        self.claims
    }
}

impl Look {
    /// When the pause after it is over.
    fn may_end_again(&self) -> Instant {
        self.ended + self.took * LOOK_PAUSE
    }
}

// ---- what a look finds -----------------------------------------------------------

impl ClaimCursor {
    /// Replaces the levels by those that a look found at `at`, to be read from their heads. If it found no jobs or no turns,
    /// those of the old levels stay, at the position after a look that found nothing: the next job most likely
    /// arrives there and is then found without a look. `next_start` is when a rate lets the next job start.
    pub(crate) fn set_levels(
        &mut self,
        mut levels: Vec<Level>,
        suspects: WaitingSuspects,
        next_start: Option<DateTime<Utc>>,
        at: DateTime<Utc>,
        now: Instant,
    ) {
        let has_turns = levels.iter().any(|level| level.has_turns);
        if has_turns {
            self.saw_turns = Some(now);
        }
        let keeps_jobs = !levels.iter().any(|level| level.has_jobs);
        let keeps_turns =
            !has_turns && self.saw_turns.is_some_and(|seen| now.duration_since(seen) <= KEEP_TURNS);
        for old in std::mem::take(&mut self.levels) {
            let (has_jobs, has_turns) = (old.has_jobs && keeps_jobs, old.has_turns && keeps_turns);
            if old.limited || !(has_jobs || has_turns) {
                continue;
            }
            let jobs = old.jobs.max(Some(exhausted_at(at))).filter(|_| has_jobs);
            let turns = old.turns.max(Some(served_until(at))).filter(|_| has_turns);
            levels.push(Level { has_jobs, jobs, has_turns, turns, ..old });
        }
        levels.sort_by(|a, b| b.priority.cmp(&a.priority).then_with(|| a.queue.cmp(&b.queue)));
        levels.dedup_by(|second, first| {
            let is_same = first.is_at(&second.queue, second.priority);
            if is_same {
                first.has_jobs |= second.has_jobs;
                first.has_turns |= second.has_turns;
                first.jobs = first.jobs.max(second.jobs);
                first.turns = first.turns.max(second.turns);
            }
            is_same
        });
        self.levels = levels;
        match self.always_looks {
            true => self.groups.clear(),
            false => self.groups.uncheck(now),
        }
        // Without a duration until the claim ends.
        self.look = Some(Look {
            ended: now,
            took: Duration::ZERO,
            at,
            suspects,
            next_start,
            left_behind_position: false,
            saw_limited_group: false,
        });
    }

    /// Records how long the look of this claim took.
    pub(crate) fn looked(&mut self, took: Duration, now: Instant) {
        if let Some(look) = &mut self.look {
            (look.ended, look.took) = (now, took);
        }
    }

    /// The levels to claim from, highest priority first.
    pub(crate) fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// Whether jobs of groups may be due.
    pub(crate) fn has_turns(&self) -> bool {
        self.levels.iter().any(|level| level.has_turns)
    }

    /// Whether jobs wait in a queue with a limit or a rate.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite has one writer"))]
    pub(crate) fn has_limits(&self) -> bool {
        self.suspects().any_limited || self.levels.iter().any(|level| level.limited)
    }

    /// The suspects that waited at the last look.
    pub(crate) fn suspects(&self) -> WaitingSuspects {
        self.look.as_ref().map_or_else(WaitingSuspects::default, |look| look.suspects)
    }

    /// The parts of a claim, in order. Without turns there is only one.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut below = Some(i16::MAX);
        for level in self.levels.iter().filter(|level| level.has_turns) {
            let Some(top) = below.filter(|top| level.priority <= *top) else { continue };
            if level.priority < top {
                parts.push(Part::Plain(level.priority + 1..=top));
            }
            // Suspects can have any priority.
            let has_jobs = |other: &Level| other.has_jobs && other.priority == level.priority;
            let is_mixed = self.suspects().any || self.levels.iter().any(has_jobs);
            parts.push(if is_mixed { Part::Mixed(level.priority) } else { Part::Groups(level.priority) });
            below = level.priority.checked_sub(1);
        }
        if let Some(top) = below {
            parts.push(Part::Plain(i16::MIN..=top));
        }
        parts
    }

    /// Whether groups come first in this claim, where both sides have the same priority.
    pub(crate) fn groups_come_first(&mut self) -> bool {
        self.groups_first = !self.groups_first;
        self.groups_first
    }
}

// ---- how far claims have read ------------------------------------------------------

impl ClaimCursor {
    /// Moves the position in the jobs of a level. It never moves back.
    pub(crate) fn pass(&mut self, queue: &str, priority: i16, read: Read) {
        let position = match read {
            Read::UpTo(last) => last,
            Read::AllDue(at) => exhausted_at(at),
        };
        if let Some(level) = self.levels.iter_mut().find(|level| level.is_at(queue, priority)) {
            level.jobs = level.jobs.max(Some(position));
        }
    }

    /// Moves the position in the turns of a level.
    pub(crate) fn pass_turn(&mut self, queue: &str, priority: i16, position: TurnPosition) {
        if let Some(level) = self.levels.iter_mut().find(|level| level.is_at(queue, priority)) {
            level.turns = level.turns.max(Some(position));
        }
    }

    /// Moves the position in the turns of a level after a group was served at `now`. Claims that run at the same time
    /// commit in any order, so turns that sort before this one may still be committed. A claim that
    /// did not see them would give their share to the few groups that it sees.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite has one writer"))]
    pub(crate) fn pass_served_turn(
        &mut self,
        queue: &str,
        priority: i16,
        position: TurnPosition,
        now: DateTime<Utc>,
    ) {
        self.pass_turn(queue, priority, position.min(served_until(now)));
    }

    /// Records a group with a limit.
    pub(crate) fn note_limited_group(&mut self) {
        if let Some(look) = &mut self.look {
            look.saw_limited_group = true;
        }
    }

    /// Records that a due job was left in a group and may be behind the position.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite reads from the head"))]
    pub(crate) fn note_job_behind_position(&mut self) {
        if let Some(look) = &mut self.look {
            look.left_behind_position = true;
        }
    }

    /// Records when a rate lets a job start that waits.
    pub(crate) fn note_next_start(&mut self, at: DateTime<Utc>) {
        if let Some(look) = &mut self.look {
            look.next_start = Some(look.next_start.map_or(at, |next| next.min(at)));
        }
    }
}

// ---- when to claim again -------------------------------------------------------------

impl ClaimCursor {
    /// Ends a claim: decides when to claim again.
    pub(crate) fn end(&mut self, claim: ServedClaim<'_>, now: Instant) -> Claims {
        let ServedClaim { request, rooms, mut jobs, is_full, stopped_early, began, at } = claim;
        // They were taken in parts.
        jobs.sort_by_key(super::Claimed::order);
        self.was_short = !is_full;
        let more = is_full || stopped_early;
        self.resumes_next = stopped_early && !is_full;
        let next_look = self.next_look(began, !jobs.is_empty()).filter(|_| !more);
        let next_look = next_look.map(|due| due.saturating_duration_since(now));
        let again_in =
            next_look.into_iter().chain(self.next_start(at)).chain(self.next_look_behind(now)).min();
        let took_suspect = jobs.iter().any(|job| job.interruptions > 0);
        let leaves_suspects = took_suspect || request.suspects == Suspects::Leave;
        let has_no_room =
            |level: &Level| rooms.is_full(&level.queue) || (level.limited && !rooms.is_locked(&level.queue));
        let after_settle = (leaves_suspects && (self.suspects().any || self.has_turns()))
            || self.look.as_ref().is_some_and(|look| look.saw_limited_group)
            || self.levels.iter().any(has_no_room);
        Claims { jobs, more, again_in: again_in.map(|pause| pause.max(MIN_PAUSE)), after_settle, at }
    }

    /// When to look, if a claim that began at `began` did not: a job that arrived since the last look may be
    /// behind a position. That is less likely if the claim found jobs, so the look can wait a little longer.
    fn next_look(&self, began: Instant, found_jobs: bool) -> Option<Instant> {
        let look = self.look.as_ref().filter(|look| look.ended < began)?;
        let due = look.may_end_again();
        Some(if found_jobs { due.max(began + LOOK_AFTER_WORK) } else { due })
    }

    /// How long until a rate lets a job start that waits.
    fn next_start(&self, at: Option<DateTime<Utc>>) -> Option<Duration> {
        let look = self.look.as_ref()?;
        let (next, at) = (look.next_start?, at.unwrap_or(look.at));
        // What could start before now has been claimed, or has no room for another reason.
        (next - at).to_std().ok().filter(|pause| !pause.is_zero())
    }

    /// How long until claims look behind the positions in groups, if a job may be there.
    fn next_look_behind(&self, now: Instant) -> Option<Duration> {
        let look = self.look.as_ref().filter(|look| look.left_behind_position)?;
        let look = look.may_end_again().saturating_duration_since(now);
        Some(self.groups.pause_of_looks(now).unwrap_or_default().max(look))
    }
}

/// The position after a claim at `now` that has read everything due.
fn exhausted_at(now: DateTime<Utc>) -> Position {
    Position { run_at: now - LATE_COMMIT, id: Uuid::nil() }
}

/// The position in turns after a claim at `now` that has served everything due.
fn served_until(now: DateTime<Utc>) -> TurnPosition {
    TurnPosition { at: now - LATE_COMMIT, id: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::WorkerId;
    use crate::store::rooms::Rooms;

    fn at(second: i64) -> Position {
        Position { run_at: DateTime::from_timestamp(second, 0).unwrap(), id: Uuid::from_u128(second as u128) }
    }

    fn time(second: i64) -> DateTime<Utc> {
        DateTime::from_timestamp(second, 0).unwrap()
    }

    fn level(queue: &str, priority: i16) -> Level {
        Level::of_jobs(queue, priority, false)
    }

    fn request() -> ClaimRequest {
        ClaimRequest::new(WorkerId::new(), 10)
    }

    const TOOK: Duration = Duration::from_millis(1);

    /// A cursor after a look that found these levels.
    fn cursor(levels: Vec<Level>, looked_at: Instant) -> ClaimCursor {
        let mut cursor = ClaimCursor::default();
        cursor.start(&request(), looked_at);
        cursor.set_levels(levels, WaitingSuspects::default(), None, time(0), looked_at);
        cursor.looked(TOOK, looked_at);
        cursor
    }

    /// Ends a claim that began at `began` and found nothing.
    fn end_short(cursor: &mut ClaimCursor, began: Instant) -> Claims {
        let (request, at) = (request(), Some(time(100)));
        let rooms = Rooms::new(&request);
        let claim = ServedClaim {
            request: &request,
            rooms: &rooms,
            jobs: Vec::new(),
            is_full: false,
            stopped_early: false,
            began,
            at,
        };
        cursor.end(claim, began)
    }

    #[test]
    fn a_position_moves_to_the_last_job_or_to_shortly_before_the_scan_and_never_back() {
        let mut cursor = cursor(vec![level("a", 0), level("a", 5)], Instant::now());
        cursor.pass("a", 0, Read::UpTo(at(50)));
        cursor.pass("a", 0, Read::UpTo(at(40)));
        // A job that is due before the last one taken may be committed later.
        cursor.pass("a", 5, Read::AllDue(time(100)));
        let late = Position { run_at: DateTime::from_timestamp_millis(99_900).unwrap(), id: Uuid::nil() };
        let positions = cursor.levels().iter().map(|level| level.jobs).collect::<Vec<_>>();
        assert_eq!(positions, [Some(late), Some(at(50))]);
    }

    #[test]
    fn after_a_wake_up_a_claim_resumes_in_the_only_level() {
        let t0 = Instant::now();
        let woken = ClaimRequest { woken: true, ..request() };
        let started = |levels: Vec<Level>, suspects: WaitingSuspects| {
            let mut cursor = cursor(levels.clone(), t0);
            cursor.set_levels(levels, suspects, None, time(0), t0);
            end_short(&mut cursor, t0 + TOOK);
            assert_eq!(cursor.start(&request(), t0 + 300 * TOOK), Start::Look);
            cursor.start(&woken, t0 + 300 * TOOK)
        };
        let none = WaitingSuspects::default();
        assert_eq!(started(vec![level("default", 0)], none), Start::Resume);
        assert_eq!(started(vec![level("default", 0), level("default", 9)], none), Start::Look);
        assert_eq!(started(vec![Level::of_jobs("default", 0, true)], none), Start::Look);
        assert_eq!(started(vec![Level::of_turns("default", 0, false)], none), Start::Look);
        let suspects = WaitingSuspects { any: true, ..none };
        assert_eq!(started(vec![level("default", 0)], suspects), Start::Look, "a suspect may come first");
    }

    #[test]
    fn levels_are_kept_while_no_job_waits() {
        let t0 = Instant::now();
        let limited = Level::of_jobs("serial", 9, true);
        let mut cursor = cursor(vec![limited, level("a", 0)], t0);
        cursor.pass("a", 0, Read::UpTo(at(50)));
        cursor.set_levels(Vec::new(), WaitingSuspects::default(), None, time(70), t0);
        assert_eq!(cursor.levels(), [Level { jobs: Some(exhausted_at(time(70))), ..level("a", 0) }]);
        cursor.set_levels(vec![level("b", 0)], WaitingSuspects::default(), None, time(70), t0);
        assert_eq!(cursor.levels(), [level("b", 0)], "a look that finds levels replaces them");
    }

    #[test]
    fn levels_with_turns_are_kept_for_a_while() {
        let (t0, none) = (Instant::now(), WaitingSuspects::default());
        let mut cursor = cursor(vec![level("a", 0), Level::of_turns("a", 0, false)], t0);
        assert_eq!(cursor.parts(), [Part::Plain(1..=i16::MAX), Part::Mixed(0), Part::Plain(i16::MIN..=-1)]);
        cursor.set_levels(vec![level("a", 0)], none, None, time(70), t0 + KEEP_TURNS);
        let turns = Some(served_until(time(70)));
        assert_eq!(cursor.levels(), [Level { has_turns: true, turns, ..level("a", 0) }]);
        cursor.set_levels(vec![level("a", 0)], none, None, time(70), t0 + 2 * KEEP_TURNS);
        assert_eq!(cursor.levels(), [level("a", 0)]);
    }

    #[test]
    fn full_claims_resume_until_250_ms_have_passed() {
        let t0 = Instant::now();
        let mut cursor = cursor(vec![level("a", 0)], t0);
        assert_eq!(cursor.start(&request(), t0 + 100 * TOOK), Start::Resume);
        assert_eq!(cursor.start(&request(), t0 + 251 * TOOK), Start::Look);
    }

    #[test]
    fn a_look_follows_a_short_claim_unless_looks_are_expensive() {
        let t0 = Instant::now();
        let mut cursor = cursor(vec![level("a", 0)], t0);
        cursor.looked(100 * TOOK, t0);
        end_short(&mut cursor, t0);
        assert_eq!(cursor.start(&request(), t0 + 500 * TOOK), Start::Resume);
        assert_eq!(cursor.start(&request(), t0 + 1100 * TOOK), Start::Look);
    }

    #[test]
    fn a_short_claim_without_a_look_says_when_to_look() {
        let t0 = Instant::now();
        let mut cursor = cursor(vec![level("a", 0)], t0);
        assert_eq!(end_short(&mut cursor, t0).again_in, None, "it looked");
        cursor.looked(2 * TOOK, t0);
        let claims = end_short(&mut cursor, t0 + TOOK);
        assert_eq!((claims.more, claims.again_in), (false, Some(19 * TOOK)));
        assert_eq!(end_short(&mut cursor, t0 + 50 * TOOK).again_in, Some(MIN_PAUSE), "it is due");
    }

    #[test]
    fn a_claim_says_when_a_rate_lets_the_next_job_start() {
        let t0 = Instant::now();
        let mut cursor = cursor(Vec::new(), t0);
        cursor.note_next_start(time(103));
        cursor.note_next_start(time(102));
        assert_eq!(end_short(&mut cursor, t0).again_in, Some(Duration::from_secs(2)));
        cursor.set_levels(Vec::new(), WaitingSuspects::default(), Some(time(99)), time(0), t0);
        cursor.looked(TOOK, t0);
        assert_eq!(end_short(&mut cursor, t0).again_in, None, "its time has passed");
    }

    #[test]
    fn a_claim_without_room_is_repeated_after_a_settle() {
        let after_settle = |cap| {
            let mut cursor = cursor(vec![level("default", 0)], Instant::now());
            let mut request = request();
            request.queues[0].cap = cap;
            let (rooms, jobs) = (Rooms::new(&request), Vec::new());
            let (began, at) = (Instant::now(), Some(time(100)));
            let claim = ServedClaim {
                request: &request,
                rooms: &rooms,
                jobs,
                is_full: false,
                stopped_early: false,
                began,
                at,
            };
            cursor.end(claim, began).after_settle
        };
        assert!(!after_settle(None));
        assert!(!after_settle(Some(1)));
        assert!(after_settle(Some(0)));
    }

    #[test]
    fn a_look_unchecks_positions_in_groups_and_a_failed_claim_forgets_them() {
        let served = |always_looks| {
            let mut cursor = ClaimCursor { always_looks, ..ClaimCursor::default() };
            cursor.groups.served("default", "acme", 0, Some(at(50)), false, time(0));
            cursor.set_levels(Vec::new(), WaitingSuspects::default(), None, time(0), Instant::now());
            cursor
        };
        let mut cursor = served(false);
        assert_eq!(cursor.groups.position("default", "acme", 0), None);
        assert_eq!(cursor.groups.unchecked("default", "acme", 0), Some(at(50)));
        cursor.restart();
        assert_eq!(cursor.groups.unchecked("default", "acme", 0), None);
        assert_eq!(served(true).groups.unchecked("default", "acme", 0), None, "it always starts at the head");
    }

    #[test]
    fn another_filter_starts_at_the_head() {
        let t0 = Instant::now();
        let mut cursor = cursor(vec![level("a", 0)], t0);
        let mut other = request();
        other.queues[0].cap = Some(3);
        assert_eq!(cursor.start(&other, t0 + 2 * TOOK), Start::Resume, "a cap is no filter");
        other.kinds = Some(vec!["mail".into()]);
        assert_eq!(cursor.start(&other, t0 + 2 * TOOK), Start::Look);
        assert!(cursor.levels().is_empty());
    }
}
