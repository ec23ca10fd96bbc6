//! Where a claimer left off. Pure bookkeeping, shared by both engines.
//!
//! A claim that always begins at the head of the ready index pays again and
//! again for what lies there and cannot be claimed: index entries of jobs long
//! claimed while some transaction pins the vacuum horizon, and jobs of kinds
//! the worker does not handle. So each claimer remembers, for every (queue,
//! priority) it knows of, how far it has looked, and resumes there. What
//! arrives behind that point (late commits, retries, a new priority) is found
//! by starting at the head again: at once when a claim comes back short, and
//! otherwise every 250 ms; but never so often that head scans take more than
//! about a tenth of the time. A claim that comes back short leaves its cursor a
//! little behind the present, so that a job which was dated before the scan and
//! committed after it needs no head scan.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chrono::{DateTime, TimeDelta, Utc};
use uuid::Uuid;

use super::ClaimRequest;

const HEAD_EVERY: Duration = Duration::from_millis(250);
const HEAD_SHARE: u32 = 10;
#[cfg(any(feature = "api", feature = "worker"))]
const HEAD_AFTER_WORK: Duration = Duration::from_millis(5);
/// How long after it was dated a job may be committed and still be found without
/// a head scan.
const LATE_COMMIT: TimeDelta = TimeDelta::milliseconds(100);

/// A claimer's memory; one per worker, handed to every [`claim`].
///
/// [`claim`]: super::Store::claim
#[derive(Debug, Default)]
pub struct ClaimCursor {
    asked: Option<Asked>,
    places: Vec<Place>,
    head: Option<Head>,
    suspects: bool,
    short: bool,
    announced: bool,
    always_head: bool,
}

/// What the places were found for; a cursor of another question is worthless.
#[derive(Debug, PartialEq, Eq)]
struct Asked {
    queues: Vec<String>,
    kinds: Option<Vec<String>>,
    accept_flags: Vec<String>,
    forbid_flags: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
struct Head {
    ended: Instant,
    took: Duration,
}

/// One (queue, priority) with waiting jobs, and how far it has been claimed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) queue: String,
    pub(crate) priority: i16,
    /// Whether the queue has a limit, so that jobs may be left behind unseen.
    pub(crate) limited: bool,
    pub(crate) after: Option<Position>,
}

/// A point in the order in which jobs of one place are claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) id: Uuid,
}

/// A job that was just claimed, as far as the cursor cares.
#[derive(Clone, Debug)]
pub(crate) struct Taken<'a> {
    pub(crate) queue: &'a str,
    pub(crate) priority: i16,
    pub(crate) at: Position,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Look whether what was announced lies in the one known place, unless some
    /// of a higher priority wait; then at the head.
    Probe,
    /// Find the places anew and claim each from its first due job.
    Head,
    /// Go on in the known places.
    Resume,
}

impl ClaimCursor {
    /// A cursor that never resumes: every claim starts at the head. For
    /// comparison in benchmarks.
    pub fn always_head() -> Self {
        ClaimCursor { always_head: true, ..ClaimCursor::default() }
    }

    /// Where this claim begins.
    pub(crate) fn start(&mut self, request: &ClaimRequest, now: Instant) -> Start {
        let same = self.asked.as_ref().is_some_and(|asked| {
            asked.queues == request.queues
                && asked.kinds == request.kinds
                && asked.accept_flags == request.accept_flags
                && asked.forbid_flags == request.forbid_flags
        });
        if !same {
            *self = ClaimCursor {
                asked: Some(Asked {
                    queues: request.queues.clone(),
                    kinds: request.kinds.clone(),
                    accept_flags: request.accept_flags.clone(),
                    forbid_flags: request.forbid_flags.clone(),
                }),
                always_head: self.always_head,
                ..ClaimCursor::default()
            };
        }
        let announced = std::mem::take(&mut self.announced);
        let Some(head) = self.head else { return Start::Head };
        if announced && self.short && !self.always_head && self.knows_the_only_place(request) {
            return Start::Probe;
        }
        let due = now.duration_since(head.ended) >= HEAD_EVERY;
        if self.always_head || ((self.short || due) && self.may_scan_head(now)) {
            Start::Head
        } else {
            Start::Resume
        }
    }

    /// Work was announced, and is likely to lie where the last was found.
    #[cfg(any(feature = "api", feature = "worker"))]
    pub(crate) fn announce(&mut self) {
        self.announced = true;
    }

    /// Whether a queue that was found has a limit, so that more may wait there
    /// than could be claimed.
    #[cfg(feature = "worker")]
    pub(crate) fn knows_a_limit(&self) -> bool {
        self.places.iter().any(|place| place.limited)
    }

    fn knows_the_only_place(&self, request: &ClaimRequest) -> bool {
        let single = matches!(&self.places[..], [place] if !place.limited);
        single && request.queues.len() == 1 && !self.suspects
    }

    /// Whether another head scan now would keep their share of time small.
    pub(crate) fn may_scan_head(&self, now: Instant) -> bool {
        self.head.is_none_or(|head| now.duration_since(head.ended) >= head.took * HEAD_SHARE)
    }

    /// When the head should be looked at again, if it has not been since `began`:
    /// what was announced meanwhile may lie there unseen. That is less likely
    /// after a claim that found `some`.
    #[cfg(any(feature = "api", feature = "worker"))]
    pub(crate) fn head_due(&self, began: Instant, some: bool) -> Option<Instant> {
        let head = self.head.filter(|head| head.ended < began)?;
        let due = head.ended + head.took * HEAD_SHARE;
        Some(if some { due.max(began + HEAD_AFTER_WORK) } else { due })
    }

    /// The places to claim from, highest priority first.
    pub(crate) fn places(&self) -> &[Place] {
        &self.places
    }

    /// Whether jobs that were interrupted before waited when the places were
    /// found.
    #[cfg_attr(not(feature = "postgres"), expect(dead_code, reason = "SQLite looks for them in every claim"))]
    pub(crate) fn saw_suspects(&self) -> bool {
        self.suspects
    }

    /// Begins at the head with these places, which were found at `now`. If there
    /// are none, the old ones stay: what comes next will most likely lie there,
    /// and is then found without another look at the head.
    pub(crate) fn set_places(&mut self, mut places: Vec<Place>, suspects: bool, now: DateTime<Utc>) {
        self.suspects = suspects;
        if places.is_empty() {
            self.places.retain(|place| !place.limited);
            self.places.iter_mut().for_each(|place| place.after = place.after.max(Some(exhausted(now))));
            return;
        }
        places.sort_by(|a, b| b.priority.cmp(&a.priority).then_with(|| a.queue.cmp(&b.queue)));
        self.places = places;
    }

    /// A head scan ended at `now`.
    pub(crate) fn head_scanned(&mut self, began: Instant, now: Instant) {
        self.head = Some(Head { ended: now, took: now.duration_since(began) });
    }

    /// Moves on after a claim from [`places`](Self::places). `taken` is in
    /// claim order; `full` says that it was cut by the limit, so that there may
    /// be more; `scanned_at` is the engine's time of the scan, if known.
    pub(crate) fn advance(&mut self, taken: &[Taken<'_>], full: bool, scanned_at: Option<DateTime<Utc>>) {
        self.short = !full;
        let mut own = HashMap::<(&str, i16), Position>::new();
        for job in taken {
            let last = own.entry((job.queue, job.priority)).or_insert(job.at);
            *last = job.at.max(*last);
        }
        // In claim order nothing due before the last job of a full claim was
        // left: places above its priority are exhausted, places of its
        // priority are exhausted up to it.
        let last = taken.last().filter(|_| full);
        let exhausted = scanned_at.map(exhausted);
        for place in &mut self.places {
            let reached = own.get(&(place.queue.as_str(), place.priority)).copied();
            // What this claim took is gone, but others may still come before it.
            let reached = if full || place.limited { reached } else { reached.min(exhausted) };
            let passed = match last {
                _ if place.limited => None,
                None => exhausted,
                Some(last) if place.priority > last.priority => exhausted,
                Some(last) if place.priority == last.priority => Some(last.at),
                Some(_) => None,
            };
            place.after = place.after.max(reached).max(passed);
        }
    }
}

/// How far a place is done with after a scan at `now` that took all there was.
fn exhausted(now: DateTime<Utc>) -> Position {
    Position { run_at: now - LATE_COMMIT, id: Uuid::nil() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::WorkerId;

    fn at(second: i64) -> Position {
        Position { run_at: DateTime::from_timestamp(second, 0).unwrap(), id: Uuid::from_u128(second as u128) }
    }

    fn place(queue: &str, priority: i16) -> Place {
        Place { queue: queue.into(), priority, limited: false, after: None }
    }

    fn taken(queue: &str, priority: i16, second: i64) -> Taken<'_> {
        Taken { queue, priority, at: at(second) }
    }

    fn cursor(places: Vec<Place>) -> ClaimCursor {
        let mut cursor = ClaimCursor::default();
        cursor.set_places(places, false, NOW);
        cursor
    }

    const NOW: DateTime<Utc> = DateTime::UNIX_EPOCH;

    fn after(cursor: &ClaimCursor) -> Vec<Option<i64>> {
        cursor.places().iter().map(|place| place.after.map(|at| at.run_at.timestamp())).collect()
    }

    fn request() -> ClaimRequest {
        ClaimRequest::new(WorkerId::new(), 10)
    }

    const TOOK: Duration = Duration::from_millis(1);

    #[test]
    fn a_full_claim_passes_higher_places_and_leaves_lower_ones() {
        let mut cursor = cursor(vec![place("a", 0), place("a", 5), place("b", 5), place("a", 9)]);
        let now = DateTime::from_timestamp(100, 0);
        cursor.advance(&[taken("a", 5, 20), taken("b", 5, 30)], true, now);
        assert_eq!(after(&cursor), [Some(99), Some(30), Some(30), None]);
    }

    #[test]
    fn a_short_claim_passes_every_place_up_to_shortly_before_the_scan() {
        let mut cursor = cursor(vec![place("a", 0), place("a", 5)]);
        cursor.advance(&[taken("a", 5, 20)], false, DateTime::from_timestamp(100, 0));
        let late = Position { run_at: DateTime::from_timestamp_millis(99_900).unwrap(), id: Uuid::nil() };
        assert_eq!(cursor.places().iter().map(|place| place.after).collect::<Vec<_>>(), [Some(late); 2]);
        // What was dated before the last job that it took may be committed later.
        cursor.advance(&[taken("a", 5, 200)], false, DateTime::from_timestamp(200, 0));
        assert_eq!(after(&cursor), [Some(199), Some(199)]);
    }

    #[test]
    fn a_limited_queue_is_passed_only_up_to_what_was_taken() {
        let limited = Place { limited: true, ..place("serial", 9) };
        let mut cursor = cursor(vec![limited, place("a", 0)]);
        cursor.advance(&[taken("serial", 9, 20), taken("a", 0, 30)], false, DateTime::from_timestamp(100, 0));
        assert_eq!(after(&cursor), [Some(20), Some(99)]);
    }

    #[test]
    fn a_place_is_remembered_while_nothing_waits_anywhere() {
        let limited = Place { limited: true, ..place("serial", 9) };
        let mut cursor = cursor(vec![limited, place("a", 0)]);
        cursor.advance(&[taken("a", 0, 50)], false, DateTime::from_timestamp(60, 0));
        let now = DateTime::from_timestamp(70, 0).unwrap();
        cursor.set_places(Vec::new(), false, now);
        assert_eq!(cursor.places(), [Place { after: Some(exhausted(now)), ..place("a", 0) }]);
        cursor.set_places(vec![place("b", 0)], false, now);
        assert_eq!(cursor.places(), [place("b", 0)], "and no longer");
    }

    #[test]
    fn a_position_never_goes_back() {
        let mut cursor = cursor(vec![place("a", 0)]);
        cursor.advance(&[taken("a", 0, 50)], true, None);
        cursor.advance(&[taken("a", 0, 40)], true, None);
        assert_eq!(after(&cursor), [Some(50)]);
    }

    #[test]
    fn full_claims_resume_until_a_quarter_second_has_passed() {
        let (mut cursor, t0) = (cursor(vec![place("a", 0)]), Instant::now());
        assert_eq!(cursor.start(&request(), t0), Start::Head);
        cursor.head_scanned(t0, t0 + TOOK);
        cursor.advance(&[taken("a", 0, 1)], true, None);
        assert_eq!(cursor.start(&request(), t0 + 100 * TOOK), Start::Resume);
        assert_eq!(cursor.start(&request(), t0 + 251 * TOOK), Start::Head);
    }

    #[test]
    fn a_short_claim_starts_at_the_head_unless_that_is_dear() {
        let (mut cursor, t0) = (cursor(vec![place("a", 0)]), Instant::now());
        assert_eq!(cursor.start(&request(), t0), Start::Head);
        cursor.head_scanned(t0, t0 + 100 * TOOK);
        cursor.advance(&[], false, None);
        assert_eq!(cursor.start(&request(), t0 + 500 * TOOK), Start::Resume);
        assert_eq!(cursor.start(&request(), t0 + 1100 * TOOK), Start::Head);
    }

    #[test]
    #[cfg(any(feature = "api", feature = "worker"))]
    fn what_was_announced_is_looked_for_in_the_only_place_once() {
        let (mut cursor, t0) = (ClaimCursor::default(), Instant::now());
        cursor.start(&request(), t0);
        cursor.set_places(vec![place("default", 0)], false, NOW);
        cursor.head_scanned(t0, t0 + TOOK);
        cursor.advance(&[taken("default", 0, 1)], true, None);
        cursor.announce();
        assert_eq!(cursor.start(&request(), t0 + 20 * TOOK), Start::Resume, "there was more anyway");
        cursor.advance(&[], false, DateTime::from_timestamp(100, 0));
        cursor.announce();
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Probe);
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Head);
        cursor.set_places(vec![place("default", 0), place("default", 9)], false, NOW);
        cursor.announce();
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Head, "it may lie in either");
        cursor.set_places(vec![place("default", 0)], true, NOW);
        cursor.announce();
        assert_eq!(cursor.start(&request(), t0 + 400 * TOOK), Start::Head, "a suspect may come first");
    }

    #[test]
    fn another_question_starts_at_the_head() {
        let (mut cursor, t0) = (cursor(vec![place("a", 0)]), Instant::now());
        cursor.start(&request(), t0);
        cursor.head_scanned(t0, t0 + TOOK);
        cursor.advance(&[taken("a", 0, 1)], true, None);
        let mut other = request();
        other.kinds = Some(vec!["mail".into()]);
        assert_eq!(cursor.start(&other, t0 + 2 * TOOK), Start::Head);
        assert!(cursor.places().is_empty());
    }
}
