//! The claim cursor: how far a claimer has read, so that its next claim resumes there
//! instead of starting over. Pure bookkeeping without SQL, shared by both engines and
//! tested without a database.
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
//! The waiting jobs of one queue with one priority form a *segment* of the index. For
//! every segment the cursor keeps a *position* (run_at, id): everything at or before
//! it has been claimed or skipped. A claim normally **resumes**: it reads each segment
//! from its position on.
//!
//! A job can appear behind a position (its transaction committed late, a retry became
//! due) or in a segment that the cursor does not have (a new priority). A **head scan**
//! finds those: it lists the segments again and reads each from its first due job. Head
//! scans happen
//!
//! - after a short claim, that is, one that found fewer jobs than it wanted,
//! - and otherwise every 250 ms,
//! - but only after a pause of at least ten times the duration of the last head scan, so
//!   that they take at most about a tenth of the time, however expensive they are.
//!
//! Two rules make head scans rare when jobs arrive one by one:
//!
//! - A short claim has read everything that was due when it ran. It still leaves the
//!   positions 100 ms before that time, because a job with an earlier `run_at` may be
//!   committed just after the claim. Resuming finds such a job; a position at the
//!   time of the claim would hide it until the next head scan.
//! - After a wake-up the new job is most likely in the segment where the last one was
//!   found. If the cursor has only that segment, the claim **probes** it first and
//!   makes a head scan only if it finds nothing.
//!
//! # Groups
//!
//! The jobs of groups are not in segments. Their groups wait in lines (`rules/turns.rs`), one per queue
//! and priority. For the same reasons, the cursor keeps a position in each line, and one for each group
//! that it has served (`positions.rs`). A head scan forgets the positions in lines.

use std::collections::HashMap;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::ClaimRequest;
use positions::GroupPositions;

mod positions;

/// The time between head scans while claims find all the jobs they want.
const HEAD_SCAN_INTERVAL: Duration = Duration::from_millis(250);
/// The minimum pause after a head scan, as a multiple of its duration.
const HEAD_SCAN_PAUSE: u32 = 10;
/// How long a worker waits for a head scan after a claim that found jobs.
#[cfg(any(feature = "api", feature = "worker"))]
const HEAD_SCAN_AFTER_WORK: Duration = Duration::from_millis(5);
/// A head scan that takes longer than this is expensive.
#[cfg(feature = "api")]
const CHEAP_HEAD_SCAN: Duration = Duration::from_millis(5);
/// How long claims skip waiting rows that cannot be claimed, after one was found. Then a
/// claim tries without the test again.
const SKIP_UNSOUND_FOR: Duration = Duration::from_secs(60);
/// How long lines without due turns are kept. While there are lines, every claim looks for groups.
const KEEP_LINES: Duration = Duration::from_secs(5);
/// A job that is committed up to this long after its `run_at` is found without a head
/// scan.
const LATE_COMMIT: TimeDelta = TimeDelta::milliseconds(100);

/// How far one claimer has read. Keep one per worker and pass it to every [`claim`].
///
/// [`claim`]: super::Claiming::claim
#[derive(Debug, Default)]
pub struct ClaimCursor {
    /// What the segments were found for.
    filter: Option<Filter>,
    /// The segments with waiting jobs, highest priority first.
    segments: Vec<Segment>,
    last_head_scan: Option<HeadScan>,
    /// Whether suspects were waiting at the last head scan.
    saw_suspects: bool,
    /// Whether the last claim found fewer jobs than it wanted.
    was_short: bool,
    /// Whether a wake-up arrived since the last claim.
    woken: bool,
    /// Whether to ignore the positions.
    always_head: bool,
    /// Until when claims skip unsound rows.
    skips_unsound_until: Option<Instant>,
    /// Whether the next claim resumes, even if a head scan is due.
    resumes_next: bool,
    /// The lines with due turns at the last head scan that found any, highest priority first.
    lines: Vec<Line>,
    /// When a head scan last found one.
    saw_lines: Option<Instant>,
    /// Positions in the groups that were served.
    pub(crate) groups: GroupPositions,
    /// Whether groups come first where jobs with and without a group have the same priority. The
    /// sides take turns.
    groups_first: bool,
    /// Whether a due job was left in a group since the last head scan, perhaps behind the position.
    left_behind_position: bool,
    /// Whether a group with a limit was served since the last head scan.
    saw_limited_group: bool,
    /// When a rate lets a job start that waits for it, by the engine's clock.
    next_start: Option<DateTime<Utc>>,
    /// The engine's time of the last scan.
    scanned_at: Option<DateTime<Utc>>,
}

/// The groups of one queue with due jobs of one priority, in the order of their turns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Line {
    pub(crate) queue: String,
    pub(crate) priority: i16,
    /// Whether the queue has a limit or a rate.
    pub(crate) limited: bool,
    /// Every turn at or before this position has been served or skipped.
    pub(crate) after: Option<LinePosition>,
}

/// A position in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinePosition {
    pub(crate) at: DateTime<Utc>,
    pub(crate) id: i64,
}

/// A part of a claim: jobs of one or several priorities.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Jobs without a group, of these priorities.
    Plain(RangeInclusive<i16>),
    /// Jobs of groups, of this priority.
    Groups(i16),
    /// Both.
    Mixed(i16),
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

#[derive(Clone, Copy, Debug)]
struct HeadScan {
    ended: Instant,
    took: Duration,
}

/// A segment of the claim index: the waiting jobs of one queue with one priority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) queue: String,
    pub(crate) priority: i16,
    /// Whether the queue has a limit, so that a claim may leave due jobs unread.
    pub(crate) limited: bool,
    /// Everything at or before this position has been claimed or skipped. `None`
    /// means that nothing has been read yet.
    pub(crate) after: Option<Position>,
}

/// A position in the order in which the jobs of one segment are claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) id: Uuid,
}

/// A job that was just claimed: its segment and its position there.
#[derive(Clone, Debug)]
pub(crate) struct Taken<'a> {
    pub(crate) queue: &'a str,
    pub(crate) priority: i16,
    pub(crate) at: Position,
}

/// Where a claim starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Resume in the only known segment, unless a job with a higher priority waits. If
    /// that finds nothing, start at the head.
    Probe,
    /// Find the segments again and read each from its first due job.
    Head,
    /// Read each known segment from its position on.
    Resume,
}

impl ClaimCursor {
    /// A cursor that never resumes: every claim starts at the head. For claims that are rare
    /// and differ from each other, and for comparison in benchmarks and tests.
    pub fn always_head() -> Self {
        ClaimCursor { always_head: true, ..ClaimCursor::default() }
    }

    /// Decides where this claim starts. A request with another filter resets the
    /// cursor.
    pub(crate) fn start(&mut self, request: &ClaimRequest, now: Instant) -> Start {
        let same_filter = self.filter.as_ref().is_some_and(|filter| {
            filter.queues == request.queues
                && filter.kinds == request.kinds
                && filter.accept_flags == request.accept_flags
                && filter.forbid_flags == request.forbid_flags
                && filter.min_priority == request.min_priority
        });
        if !same_filter {
            *self = ClaimCursor {
                filter: Some(Filter {
                    queues: request.queues.clone(),
                    kinds: request.kinds.clone(),
                    accept_flags: request.accept_flags.clone(),
                    forbid_flags: request.forbid_flags.clone(),
                    min_priority: request.min_priority,
                }),
                always_head: self.always_head,
                skips_unsound_until: self.skips_unsound_until,
                ..ClaimCursor::default()
            };
        }
        let woken = std::mem::take(&mut self.woken);
        let resumes = std::mem::take(&mut self.resumes_next);
        let Some(last) = self.last_head_scan else { return Start::Head };
        if resumes {
            return Start::Resume;
        }
        if woken && self.was_short && !self.always_head && self.has_only_segment(request) {
            return Start::Probe;
        }
        let interval_passed = now.duration_since(last.ended) >= HEAD_SCAN_INTERVAL;
        if self.always_head || ((self.was_short || interval_passed) && self.may_scan_head(now)) {
            Start::Head
        } else {
            Start::Resume
        }
    }

    /// Records a wake-up: a new job is due, most likely in the segment where the last
    /// one was found.
    #[cfg(any(feature = "api", feature = "worker"))]
    pub(crate) fn note_wake_up(&mut self) {
        self.woken = true;
    }

    /// Whether a known segment belongs to a queue with a limit, where more jobs may be
    /// due than could be claimed, or whether a group has one.
    #[cfg(feature = "worker")]
    pub(crate) fn has_limited_queue(&self) -> bool {
        self.saw_limited_group
            || self.segments.iter().any(|segment| segment.limited)
            || self.lines.iter().any(|line| line.limited)
    }

    /// Whether the cursor has exactly one segment, and nothing else can come before it:
    /// no other queue, no limit, no suspect.
    fn has_only_segment(&self, request: &ClaimRequest) -> bool {
        let single = matches!(&self.segments[..], [segment] if !segment.limited);
        single && request.queues.len() == 1 && !self.saw_suspects && self.lines.is_empty()
    }

    /// Whether enough time has passed since the last head scan, so that head scans take
    /// only a small share of the time.
    pub(crate) fn may_scan_head(&self, now: Instant) -> bool {
        self.last_head_scan.is_none_or(|last| now.duration_since(last.ended) >= last.took * HEAD_SCAN_PAUSE)
    }

    /// The time of the next head scan, if a claim that began at `began` made none: a job
    /// that caused a wake-up since then may be behind the position. That is less likely
    /// if the claim `found_jobs`, so the scan can wait a little longer.
    #[cfg(any(feature = "api", feature = "worker"))]
    pub(crate) fn head_due(&self, began: Instant, found_jobs: bool) -> Option<Instant> {
        let last = self.last_head_scan.filter(|last| last.ended < began)?;
        let due = last.ended + last.took * HEAD_SCAN_PAUSE;
        Some(if found_jobs { due.max(began + HEAD_SCAN_AFTER_WORK) } else { due })
    }

    /// Whether a head scan is cheap: no job waited at the last one, or it was short.
    #[cfg(feature = "api")]
    pub(crate) fn is_head_cheap(&self) -> bool {
        self.segments.is_empty() || self.last_head_scan.is_none_or(|last| last.took <= CHEAP_HEAD_SCAN)
    }

    /// Whether claims test each row and skip the unsound ones: waiting jobs that are also
    /// running or finished, or that have no request.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite finds them while it claims"))]
    pub(crate) fn skips_unsound(&self, now: Instant) -> bool {
        self.skips_unsound_until.is_some_and(|until| now < until)
    }

    /// Records that a claim found an unsound row. Returns whether it is the first for a
    /// while and should be logged.
    pub(crate) fn skip_unsound(&mut self, now: Instant) -> bool {
        let is_new = self.skips_unsound_until.is_none_or(|until| now >= until);
        if is_new {
            self.skips_unsound_until = Some(now + SKIP_UNSOUND_FOR);
        }
        is_new
    }

    /// Makes the next claim resume: this one stopped at unsound rows, or at groups that it could not
    /// serve, and from the head the next one would stop at the same ones.
    pub(crate) fn resume_next(&mut self) {
        self.resumes_next = true;
    }

    /// The segments to claim from, highest priority first.
    pub(crate) fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Whether suspects were waiting at the last head scan.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite looks for them in every claim"))]
    pub(crate) fn saw_suspects(&self) -> bool {
        self.saw_suspects
    }

    /// Replaces the segments by those that a head scan found at `now`, to be read from
    /// their heads. If it found none, the old segments stay, at the position after a
    /// scan that found nothing: the next job most likely arrives there and is then found
    /// without a head scan.
    pub(crate) fn set_segments(&mut self, mut segments: Vec<Segment>, suspects: bool, now: DateTime<Utc>) {
        self.saw_suspects = suspects;
        self.scanned_at = Some(now);
        if segments.is_empty() {
            self.segments.retain(|segment| !segment.limited);
            let exhausted = Some(exhausted_at(now));
            self.segments.iter_mut().for_each(|segment| segment.after = segment.after.max(exhausted));
            return;
        }
        segments.sort_by(|a, b| b.priority.cmp(&a.priority).then_with(|| a.queue.cmp(&b.queue)));
        self.segments = segments;
    }

    /// Replaces the lines by those that a head scan found, to be read from their heads. If it found
    /// none, the old lines stay for a while: the next job of a group most likely arrives there and is then
    /// found without a head scan. `next_start` is when a rate lets the next job start.
    pub(crate) fn set_lines(
        &mut self,
        mut lines: Vec<Line>,
        next_start: Option<DateTime<Utc>>,
        now: Instant,
    ) {
        if !lines.is_empty() {
            lines.sort_by(|a, b| b.priority.cmp(&a.priority).then_with(|| a.queue.cmp(&b.queue)));
            (self.lines, self.saw_lines) = (lines, Some(now));
        } else if self.saw_lines.is_none_or(|at| now.duration_since(at) > KEEP_LINES) {
            self.lines.clear();
        } else {
            self.lines.retain(|line| !line.limited);
            let served = self.scanned_at.map(|at| LinePosition { at: at - LATE_COMMIT, id: 0 });
            self.lines.iter_mut().for_each(|line| line.after = line.after.max(served));
        }
        match self.always_head {
            true => self.groups.clear(),
            false => self.groups.uncheck(now),
        }
        self.saw_limited_group = false;
        self.left_behind_position = false;
        self.next_start = next_start;
    }

    /// The lines to claim from, highest priority first.
    pub(crate) fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// The parts of a claim, in order. Without lines there is only one.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        let mut below = Some(i16::MAX);
        for line in &self.lines {
            let Some(top) = below.filter(|top| line.priority <= *top) else { continue };
            if line.priority < top {
                parts.push(Part::Plain(line.priority + 1..=top));
            }
            // Suspects can have any priority.
            let is_mixed =
                self.saw_suspects || self.segments.iter().any(|segment| segment.priority == line.priority);
            parts.push(if is_mixed { Part::Mixed(line.priority) } else { Part::Groups(line.priority) });
            below = line.priority.checked_sub(1);
        }
        if let Some(top) = below {
            parts.push(Part::Plain(i16::MIN..=top));
        }
        parts
    }

    /// Makes the next claim start at the head, because this one failed after it had moved positions.
    pub(crate) fn restart(&mut self) {
        self.last_head_scan = None;
        self.resumes_next = false;
        self.groups.clear();
    }

    /// The engine's time of the last scan.
    #[cfg(feature = "worker")]
    pub(crate) fn scanned_at(&self) -> Option<DateTime<Utc>> {
        self.scanned_at
    }

    /// Whether groups come first in this claim, where both sides have the same priority.
    pub(crate) fn groups_come_first(&mut self) -> bool {
        self.groups_first = !self.groups_first;
        self.groups_first
    }

    /// Moves the position in a line.
    pub(crate) fn pass_turn(&mut self, queue: &str, priority: i16, position: LinePosition) {
        let line = self.lines.iter_mut().find(|line| line.queue == queue && line.priority == priority);
        if let Some(line) = line {
            line.after = line.after.max(Some(position));
        }
    }

    /// Moves the position in a line after a group was served at `now`. Claims that run at the same time
    /// commit in any order, so turns that sort before this one may still be committed. A claim that
    /// did not see them would give their share to the few groups that it sees.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite has one writer"))]
    pub(crate) fn pass_served_turn(
        &mut self,
        queue: &str,
        priority: i16,
        position: LinePosition,
        now: DateTime<Utc>,
    ) {
        self.pass_turn(queue, priority, position.min(LinePosition { at: now - LATE_COMMIT, id: 0 }));
    }

    /// Records a group with a limit.
    pub(crate) fn note_limited_group(&mut self) {
        self.saw_limited_group = true;
    }

    /// Records that a due job was left in a group and may be behind the position.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite reads from the head"))]
    pub(crate) fn note_job_behind_position(&mut self) {
        self.left_behind_position = true;
    }

    /// Records when a rate lets a job start that waits.
    pub(crate) fn note_next_start(&mut self, at: DateTime<Utc>) {
        self.next_start = Some(self.next_start.map_or(at, |next| next.min(at)));
    }

    /// How long to wait before claiming again: until a rate lets the next job start or, if a job may be behind the position in
    /// a group, until a head scan makes claims look there.
    pub(crate) fn again_in(&self, now: Instant) -> Option<Duration> {
        let start = self.next_start.zip(self.scanned_at);
        let start = start.map(|(next, scanned_at)| (next - scanned_at).to_std().unwrap_or(Duration::ZERO));
        let look = self.left_behind_position.then(|| {
            let head = self.last_head_scan.map(|last| last.ended + last.took * HEAD_SCAN_PAUSE);
            let head = head.map_or(Duration::ZERO, |due| due.saturating_duration_since(now));
            self.groups.pause_of_looks(now).unwrap_or_default().max(head)
        });
        start.into_iter().chain(look).min()
    }

    /// Records whether the claim got as many jobs as it wanted.
    pub(crate) fn set_full(&mut self, full: bool) {
        self.was_short = !full;
    }

    /// Records a head scan that ended at `now`.
    pub(crate) fn head_scanned(&mut self, began: Instant, now: Instant) {
        self.last_head_scan = Some(HeadScan { ended: now, took: now.duration_since(began) });
    }

    /// Moves the positions after a claim from [`segments`](Self::segments). `taken` is
    /// in claim order. `full` means that the claim got as many jobs as it wanted, so
    /// that more may be due. `scanned_at` is the engine's time of the claim, if known.
    #[cfg_attr(not(any(feature = "postgres", test)), expect(dead_code, reason = "SQLite advances in parts"))]
    pub(crate) fn advance(&mut self, taken: &[Taken<'_>], full: bool, scanned_at: Option<DateTime<Utc>>) {
        self.advance_in(i16::MIN..=i16::MAX, taken, full, scanned_at);
    }

    /// The same, for a claim from the segments of these priorities.
    pub(crate) fn advance_in(
        &mut self,
        priorities: RangeInclusive<i16>,
        taken: &[Taken<'_>],
        full: bool,
        scanned_at: Option<DateTime<Utc>>,
    ) {
        self.was_short = !full;
        self.scanned_at = scanned_at.or(self.scanned_at);
        let mut last_taken = HashMap::<(&str, i16), Position>::new();
        for job in taken {
            let last = last_taken.entry((job.queue, job.priority)).or_insert(job.at);
            *last = job.at.max(*last);
        }
        // A full claim took everything that comes before its last job in claim order.
        // Segments of a higher priority are therefore exhausted, and segments of the
        // same priority are exhausted up to that job.
        let last_of_full = taken.last().filter(|_| full);
        let exhausted = scanned_at.map(exhausted_at);
        for segment in self.segments.iter_mut().filter(|segment| priorities.contains(&segment.priority)) {
            let own = last_taken.get(&(segment.queue.as_str(), segment.priority)).copied();
            // After a short claim, jobs that sort before the last one taken may still be
            // committed.
            let own = if full || segment.limited { own } else { own.min(exhausted) };
            let passed = match last_of_full {
                _ if segment.limited => None,
                // A full claim that took nothing here says nothing about what comes next.
                None if full => None,
                None => exhausted,
                Some(last) if segment.priority > last.priority => exhausted,
                Some(last) if segment.priority == last.priority => Some(last.at),
                Some(_) => None,
            };
            segment.after = segment.after.max(own).max(passed);
        }
    }
}

/// The position after a scan at `now` that took everything due.
fn exhausted_at(now: DateTime<Utc>) -> Position {
    Position { run_at: now - LATE_COMMIT, id: Uuid::nil() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::WorkerId;

    fn at(second: i64) -> Position {
        Position { run_at: DateTime::from_timestamp(second, 0).unwrap(), id: Uuid::from_u128(second as u128) }
    }

    fn segment(queue: &str, priority: i16) -> Segment {
        Segment { queue: queue.into(), priority, limited: false, after: None }
    }

    fn taken(queue: &str, priority: i16, second: i64) -> Taken<'_> {
        Taken { queue, priority, at: at(second) }
    }

    fn cursor(segments: Vec<Segment>) -> ClaimCursor {
        let mut cursor = ClaimCursor::default();
        cursor.set_segments(segments, false, NOW);
        cursor
    }

    const NOW: DateTime<Utc> = DateTime::UNIX_EPOCH;

    fn after(cursor: &ClaimCursor) -> Vec<Option<i64>> {
        cursor.segments().iter().map(|segment| segment.after.map(|at| at.run_at.timestamp())).collect()
    }

    fn request() -> ClaimRequest {
        ClaimRequest::new(WorkerId::new(), 10)
    }

    const TOOK: Duration = Duration::from_millis(1);

    #[test]
    fn a_full_claim_exhausts_higher_priorities_and_leaves_lower_ones() {
        let mut cursor = cursor(vec![segment("a", 0), segment("a", 5), segment("b", 5), segment("a", 9)]);
        let now = DateTime::from_timestamp(100, 0);
        cursor.advance(&[taken("a", 5, 20), taken("b", 5, 30)], true, now);
        assert_eq!(after(&cursor), [Some(99), Some(30), Some(30), None]);
    }

    #[test]
    fn a_short_claim_moves_every_position_to_shortly_before_the_scan() {
        let mut cursor = cursor(vec![segment("a", 0), segment("a", 5)]);
        cursor.advance(&[taken("a", 5, 20)], false, DateTime::from_timestamp(100, 0));
        let late = Position { run_at: DateTime::from_timestamp_millis(99_900).unwrap(), id: Uuid::nil() };
        assert_eq!(
            cursor.segments().iter().map(|segment| segment.after).collect::<Vec<_>>(),
            [Some(late); 2]
        );
        // A job that is due before the last one taken may be committed later.
        cursor.advance(&[taken("a", 5, 200)], false, DateTime::from_timestamp(200, 0));
        assert_eq!(after(&cursor), [Some(199), Some(199)]);
    }

    #[test]
    fn the_position_in_a_limited_queue_moves_only_to_the_last_job_taken() {
        let limited = Segment { limited: true, ..segment("serial", 9) };
        let mut cursor = cursor(vec![limited, segment("a", 0)]);
        cursor.advance(&[taken("serial", 9, 20), taken("a", 0, 30)], false, DateTime::from_timestamp(100, 0));
        assert_eq!(after(&cursor), [Some(20), Some(99)]);
    }

    #[test]
    fn segments_are_kept_while_no_job_waits() {
        let limited = Segment { limited: true, ..segment("serial", 9) };
        let mut cursor = cursor(vec![limited, segment("a", 0)]);
        cursor.advance(&[taken("a", 0, 50)], false, DateTime::from_timestamp(60, 0));
        let now = DateTime::from_timestamp(70, 0).unwrap();
        cursor.set_segments(Vec::new(), false, now);
        assert_eq!(cursor.segments(), [Segment { after: Some(exhausted_at(now)), ..segment("a", 0) }]);
        cursor.set_segments(vec![segment("b", 0)], false, now);
        assert_eq!(cursor.segments(), [segment("b", 0)], "a head scan that finds segments replaces them");
    }

    #[test]
    fn a_position_never_moves_back() {
        let mut cursor = cursor(vec![segment("a", 0)]);
        cursor.advance(&[taken("a", 0, 50)], true, None);
        cursor.advance(&[taken("a", 0, 40)], true, None);
        assert_eq!(after(&cursor), [Some(50)]);
    }

    #[test]
    fn full_claims_resume_until_250_ms_have_passed() {
        let (mut cursor, t0) = (cursor(vec![segment("a", 0)]), Instant::now());
        assert_eq!(cursor.start(&request(), t0), Start::Head);
        cursor.head_scanned(t0, t0 + TOOK);
        cursor.advance(&[taken("a", 0, 1)], true, None);
        assert_eq!(cursor.start(&request(), t0 + 100 * TOOK), Start::Resume);
        assert_eq!(cursor.start(&request(), t0 + 251 * TOOK), Start::Head);
    }

    #[test]
    fn a_head_scan_follows_a_short_claim_unless_head_scans_are_expensive() {
        let (mut cursor, t0) = (cursor(vec![segment("a", 0)]), Instant::now());
        assert_eq!(cursor.start(&request(), t0), Start::Head);
        cursor.head_scanned(t0, t0 + 100 * TOOK);
        cursor.advance(&[], false, None);
        assert_eq!(cursor.start(&request(), t0 + 500 * TOOK), Start::Resume);
        assert_eq!(cursor.start(&request(), t0 + 1100 * TOOK), Start::Head);
    }

    #[test]
    #[cfg(any(feature = "api", feature = "worker"))]
    fn a_wake_up_after_a_short_claim_probes_the_only_segment_once() {
        let (mut cursor, t0) = (ClaimCursor::default(), Instant::now());
        cursor.start(&request(), t0);
        cursor.set_segments(vec![segment("default", 0)], false, NOW);
        cursor.head_scanned(t0, t0 + TOOK);
        cursor.advance(&[taken("default", 0, 1)], true, None);
        cursor.note_wake_up();
        assert_eq!(cursor.start(&request(), t0 + 20 * TOOK), Start::Resume, "the last claim was full");
        cursor.advance(&[], false, DateTime::from_timestamp(100, 0));
        cursor.note_wake_up();
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Probe);
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Head);
        cursor.set_segments(vec![segment("default", 0), segment("default", 9)], false, NOW);
        cursor.note_wake_up();
        assert_eq!(
            cursor.start(&request(), t0 + 400 * TOOK),
            Start::Head,
            "the job may be in either segment"
        );
        cursor.set_segments(vec![segment("default", 0)], true, NOW);
        cursor.note_wake_up();
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Head, "a suspect may come first");
    }

    #[test]
    fn a_head_scan_unchecks_positions_in_groups_and_a_failed_claim_forgets_them() {
        let served = |always_head| {
            let mut cursor = ClaimCursor { always_head, ..ClaimCursor::default() };
            cursor.groups.served("default", "acme", 0, Some(at(50)), false, NOW);
            cursor
        };
        let mut cursor = served(false);
        cursor.set_lines(Vec::new(), None, Instant::now());
        assert_eq!(cursor.groups.position("default", "acme", 0), None);
        assert_eq!(cursor.groups.unchecked("default", "acme", 0), Some(at(50)));
        cursor.restart();
        assert_eq!(cursor.groups.unchecked("default", "acme", 0), None);
        let mut cursor = served(true);
        cursor.set_lines(Vec::new(), None, Instant::now());
        assert_eq!(cursor.groups.unchecked("default", "acme", 0), None, "it always starts at the head");
    }

    #[test]
    fn another_filter_starts_at_the_head() {
        let (mut cursor, t0) = (cursor(vec![segment("a", 0)]), Instant::now());
        cursor.start(&request(), t0);
        cursor.head_scanned(t0, t0 + TOOK);
        cursor.advance(&[taken("a", 0, 1)], true, None);
        let mut other = request();
        other.kinds = Some(vec!["mail".into()]);
        assert_eq!(cursor.start(&other, t0 + 2 * TOOK), Start::Head);
        assert!(cursor.segments().is_empty());
    }
}
