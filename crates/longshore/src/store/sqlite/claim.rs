//! Claim: moves due jobs from `ready` to `running`, in order, never one job twice. This file owns the steps of a claim, jobs without a
//! group and leasing; `claim_groups` has jobs of groups. There is one writer, so nothing is locked.
//!
//! A claim reads every [level](crate::store::cursor) once, from the highest priority
//! down, and reads the due jobs after the cursor's position. It stops as soon as it has
//! enough jobs, so it may not read lower priorities at all.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use rusqlite::{OptionalExtension, Row, params};
use uuid::Uuid;

use super::SqliteStore;
use super::claim_groups::rate;
use super::tx::{Columns, Fault, Sql, Tx, instant};
use crate::error::{Error, Result};
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::Options;
use crate::store::claim::{ServedClaim, UnsoundRows};
use crate::store::cursor::{ClaimCursor, Level, Part, Position, Read, Start, WaitingSuspects};
use crate::store::rooms::Rooms;
use crate::store::{ClaimRequest, Claimed, Claiming, Claims, Lease, Suspects, shared};

#[async_trait]
impl Claiming for SqliteStore {
    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        // A look is cheap here.
        let request = ClaimRequest { woken: false, ..request.clone() };
        let (mut moved, unsound) = (std::mem::take(cursor), self.unsound.clone());
        let work = move |tx: &Tx<'_>| {
            let claims = claim(tx, &request, &mut moved, &unsound)?;
            Ok((claims, moved))
        };
        let (claims, moved) = self.engine.write(work).await?;
        *cursor = moved;
        Ok(claims)
    }
}

/// Leases due jobs to a live worker, in the caller's transaction.
fn claim(
    tx: &Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    unsound: &UnsoundRows,
) -> Sql<Claims> {
    // What a failed claim took is rolled back, and must not be behind a position.
    claim_once(tx, request, cursor, unsound).inspect_err(|_| cursor.restart())
}

fn claim_once(
    tx: &Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    unsound: &UnsoundRows,
) -> Sql<Claims> {
    let began = Instant::now();
    if request.limit == 0 || !worker_is_alive(tx, request.worker)? {
        return Ok(Claims::NONE);
    }
    let mut looks = cursor.start(request, began) == Start::Look;
    let mut run = ClaimRun::begin(tx, request, cursor, unsound)?;
    looks |= !run.knows_queues();
    if !looks {
        run.take()?;
        run.replace_skipped()?;
        looks = !run.is_full() && !run.skipped_too_many() && run.cursor.may_look(Instant::now());
    }
    if looks {
        run.take_from_head()?;
        run.replace_skipped()?;
    }
    run.store_rates()?;
    let (is_full, stopped_early) = (run.is_full(), run.stopped_early || run.skipped_too_many());
    let ClaimRun { cursor, rooms, leased: jobs, now, .. } = run;
    let at = Some(instant(now));
    let claim = ServedClaim { request, rooms: &rooms, jobs, is_full, stopped_early, began, at };
    Ok(cursor.end(claim, Instant::now()))
}

fn worker_is_alive(tx: &Tx<'_>, worker: WorkerId) -> Sql<bool> {
    const ALIVE: &str = "
        select 1
          from workers
         where id = ?1
           and dead_at is null";
    Ok(tx.row(ALIVE, [worker.0.as_bytes()], |_| Ok(()))?.is_some())
}

/// The due jobs of one level after a position, read from the index only.
pub(super) const NEXT_DUE: &str = "
    select run_at,
           id,
           kind
      from ready indexed by ready_claim
     where queue = ?1
       and priority = ?2
       and interruptions = 0
       and grp is null
       and (run_at, id) > (?3, ?4)
       and run_at <= ?5
     order by run_at, id";

/// The maximum time counted for examining one index entry.
const MAX_TIME_PER_ENTRY: Duration = Duration::from_micros(5);

/// The maximum number of rows that one claim replaces because they cannot be claimed. The
/// next claim continues after them.
const MAX_UNSOUND: usize = 1000;

/// One claim in progress.
pub(super) struct ClaimRun<'a> {
    pub(super) tx: &'a Tx<'a>,
    pub(super) request: &'a ClaimRequest,
    pub(super) cursor: &'a mut ClaimCursor,
    all_unsound: &'a UnsoundRows,
    kinds: Option<HashSet<&'a str>>,
    pub(super) now: i64,
    /// The queues that may be claimed from. Paused queues are left out.
    pub(super) queues: BTreeMap<&'a str, Queue>,
    pub(super) rooms: Rooms,
    /// The first due suspect of each queue, until one is taken.
    suspects: Vec<Candidate<'a>>,
    /// Whether this claim has taken a suspect.
    has_suspect: bool,
    pub(super) wanted: usize,
    pub(super) leased: Vec<Claimed>,
    /// The number of index entries examined.
    examined: Cell<u32>,
    /// Rows that cannot be claimed: jobs that are also running, that have no request, or
    /// that cannot be read.
    unsound: HashSet<Uuid>,
    /// Whether a row was skipped since the last jobs were taken in its place.
    skipped: bool,
    /// Whether it stopped although more jobs may be due.
    pub(super) stopped_early: bool,
}

/// A queue that may be claimed from.
pub(super) struct Queue {
    /// Whether it has a limit or a rate.
    limited: bool,
    /// Its place among the queues that take turns.
    place: usize,
}

/// A due job, as read from the index.
#[derive(Clone, Debug)]
pub(super) struct Candidate<'a> {
    pub(super) queue: &'a str,
    pub(super) priority: i16,
    pub(super) run_at: i64,
    pub(super) id: Uuid,
    pub(super) is_suspect: bool,
    /// Its group, and the limit of the group.
    pub(super) group: Option<(Arc<str>, Option<u32>)>,
}

impl Candidate<'_> {
    fn order(&self) -> (i64, Uuid) {
        (self.run_at, self.id)
    }

    fn position(&self) -> Position {
        Position { run_at: instant(self.run_at), id: self.id }
    }
}

impl<'a> ClaimRun<'a> {
    fn begin(
        tx: &'a Tx<'a>,
        request: &'a ClaimRequest,
        cursor: &'a mut ClaimCursor,
        all_unsound: &'a UnsoundRows,
    ) -> Sql<Self> {
        let places = request.places(cursor.claims_begun());
        let mut run = ClaimRun {
            tx,
            request,
            cursor,
            all_unsound,
            kinds: request.kinds.as_ref().map(|kinds| kinds.iter().map(String::as_str).collect()),
            now: tx.now()?,
            queues: BTreeMap::new(),
            rooms: Rooms::new(request),
            suspects: Vec::new(),
            has_suspect: false,
            wanted: request.limit as usize,
            leased: Vec::new(),
            examined: Cell::new(0),
            unsound: HashSet::new(),
            skipped: false,
            stopped_early: false,
        };
        for (queue, place) in request.queues.iter().zip(places) {
            let Some(limited) = read_room(tx, &queue.name, &mut run.rooms, run.now)? else { continue };
            run.queues.insert(&queue.name, Queue { limited, place });
        }
        run.find_suspects()?;
        Ok(run)
    }

    fn find_suspects(&mut self) -> Sql<()> {
        self.suspects.clear();
        if self.may_take_suspect() {
            for queue in self.queues.keys().copied().collect::<Vec<_>>() {
                let first = self.first_suspect(queue)?;
                self.suspects.extend(first);
            }
        }
        Ok(())
    }

    /// Whether a due suspect waits, although this claim may not take it.
    fn has_suspects(&self) -> Sql<bool> {
        if self.may_take_suspect() || self.has_suspect {
            return Ok(!self.suspects.is_empty());
        }
        for queue in self.queues.keys() {
            if self.first_suspect(queue)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn may_take_suspect(&self) -> bool {
        self.request.suspects == Suspects::One && !self.has_suspect
    }

    /// Takes other jobs in the place of those that were skipped.
    fn replace_skipped(&mut self) -> Sql<()> {
        while std::mem::take(&mut self.skipped) && !self.is_full() && !self.skipped_too_many() {
            self.take()?;
        }
        Ok(())
    }

    fn skipped_too_many(&self) -> bool {
        self.unsound.len() >= MAX_UNSOUND
    }

    /// Whether the cursor's levels can still be used. If a queue was paused, or its
    /// limit was set or removed, since they were found, the claim starts at the head.
    fn knows_queues(&self) -> bool {
        let is_current = |level: &Level| {
            self.queues.get(&*level.queue).is_some_and(|queue| queue.limited == level.limited)
        };
        self.cursor.levels().iter().all(is_current)
    }

    fn count_entry(&self) {
        self.examined.set(self.examined.get().saturating_add(1));
    }

    fn is_full(&self) -> bool {
        self.wanted == 0
    }

    fn take_from_head(&mut self) -> Sql<()> {
        let began = Instant::now();
        let (levels, next_start) = self.find_levels()?;
        let suspects = WaitingSuspects { any: self.has_suspects()?, any_limited: false };
        self.cursor.set_levels(levels, suspects, next_start, instant(self.now), Instant::now());
        let all = i16::MIN..=i16::MAX;
        let has_turns = self.cursor.has_turns();
        let picked = if has_turns { Vec::new() } else { self.pick(&all)? };
        // The duration of the look does not include leasing the jobs. It is also limited
        // by the number of entries examined: waiting for a processor can make a look at
        // three rows seem expensive.
        let took = began.elapsed().min(MAX_TIME_PER_ENTRY * self.examined.get());
        self.cursor.looked(took, Instant::now());
        if has_turns { self.take() } else { self.enter_running(&picked) }
    }

    fn take(&mut self) -> Sql<()> {
        let groups_first = self.cursor.groups_come_first();
        self.stopped_early = false;
        for part in self.cursor.parts() {
            if !self.is_full() {
                self.take_part(part, groups_first)?;
            }
        }
        Ok(())
    }

    /// Takes jobs of a part. Where jobs with and without a group have the same priority, each side
    /// gets half, and what the other leaves.
    fn take_part(&mut self, part: Part, groups_first: bool) -> Sql<()> {
        let level = match part {
            Part::Plain(priorities) => return self.take_plain(priorities),
            Part::Groups(priority) => return self.take_from_groups(priority),
            Part::Mixed(priority) => priority,
        };
        let other_half = self.wanted / 2;
        for (of_groups, reserved) in [(groups_first, other_half), (!groups_first, 0), (groups_first, 0)] {
            self.wanted -= reserved;
            if of_groups {
                self.take_from_groups(level)?;
            } else {
                self.take_plain(level..=level)?;
            }
            self.wanted += reserved;
        }
        Ok(())
    }

    fn take_plain(&mut self, priorities: RangeInclusive<i16>) -> Sql<()> {
        let picked = self.pick(&priorities)?;
        self.enter_running(&picked)
    }

    /// Finds the levels with waiting jobs, with one index probe each, and those with due turns, with two, and when a rate lets
    /// the next job start.
    fn find_levels(&self) -> Sql<(Vec<Level>, Option<DateTime<Utc>>)> {
        const NEXT_OF_JOBS: &str = "
            select priority
              from ready indexed by ready_claim
             where queue = ?1
               and interruptions = 0
               and grp is null
               and priority < ?2
               and priority >= ?3
             order by priority desc
             limit 1";
        const NEXT_OF_TURNS: &str = "
            select priority
              from turns indexed by turns_line
             where queue = ?1
               and priority < ?2
               and priority >= ?3
             order by priority desc
             limit 1";
        const IS_DUE: &str = "
            select 1
              from turns indexed by turns_line
             where queue = ?1
               and priority = ?2
               and at <= ?3
             limit 1";
        const NEXT_START: &str = "
            select min(at)
              from turns indexed by turns_paced_at
             where queue = ?1
               and at > ?2
               and tat is not null";
        let (mut levels, mut next_start) = (Vec::new(), None);
        for (&name, queue) in &self.queues {
            for priority in self.priorities(NEXT_OF_JOBS, name)? {
                levels.push(Level::of_jobs(name, priority, queue.limited));
            }
            let of_turns = self.priorities(NEXT_OF_TURNS, name)?;
            if of_turns.is_empty() {
                continue;
            }
            for priority in of_turns {
                if self.tx.row(IS_DUE, params![name, priority, self.now], |_| Ok(()))?.is_some() {
                    levels.push(Level::of_turns(name, priority, queue.limited));
                }
            }
            let next: Option<Option<i64>> =
                self.tx.row(NEXT_START, params![name, self.now], |row| row.get(0))?;
            next_start = next_start.into_iter().chain(next.flatten()).min();
        }
        Ok((levels, next_start.map(instant)))
    }

    /// The priorities of a queue that `next` finds one by one, highest first.
    fn priorities(&self, next: &'static str, queue: &str) -> Sql<Vec<i16>> {
        let lowest = self.request.lowest_priority();
        let (mut found, mut below) = (Vec::new(), i32::from(i16::MAX) + 1);
        let mut probe = self.tx.prepare(next)?;
        while let Some(priority) =
            probe.query_row(params![queue, below, lowest], |row| row.get::<_, i16>(0)).optional()?
        {
            found.push(priority);
            below = priority.into();
            self.count_entry();
        }
        self.count_entry();
        Ok(found)
    }

    /// Picks the jobs without a group to take from the levels of these priorities, in claim order, and moves the positions.
    fn pick(&mut self, priorities: &RangeInclusive<i16>) -> Sql<Vec<Candidate<'a>>> {
        let mut levels = BTreeMap::<Reverse<i16>, Vec<Level>>::new();
        let in_range = |level: &&Level| level.has_jobs && priorities.contains(&level.priority);
        for level in self.cursor.levels().iter().filter(in_range) {
            levels.entry(Reverse(level.priority)).or_default().push(level.clone());
        }
        for suspect in self.suspects.iter().filter(|suspect| suspect.priority >= *priorities.start()) {
            levels.entry(Reverse(suspect.priority)).or_default();
        }
        let mut picked = Vec::new();
        for (Reverse(priority), levels) in levels {
            if self.is_full() {
                break;
            }
            let mut found = Vec::new();
            let mut all_due = HashSet::new();
            for level in &levels {
                if self.read_due(level, &mut found)? {
                    all_due.insert(level.queue.as_str());
                }
            }
            found.extend(self.suspects.iter().filter(|suspect| suspect.priority == priority).cloned());
            found.sort_unstable_by_key(Candidate::order);
            self.let_queues_take_turns(&mut found);
            let mut last = HashMap::<&str, Position>::new();
            for candidate in found {
                let is_admitted = self.admit(&candidate);
                if !is_admitted && !candidate.is_suspect {
                    all_due.remove(candidate.queue);
                } else if !candidate.is_suspect {
                    last.insert(candidate.queue, candidate.position());
                }
                picked.extend(is_admitted.then_some(candidate));
            }
            for level in &levels {
                if all_due.contains(level.queue.as_str()) {
                    self.cursor.pass(&level.queue, priority, Read::AllDue(instant(self.now)));
                } else if let Some(last) = last.get(level.queue.as_str()) {
                    self.cursor.pass(&level.queue, priority, Read::UpTo(*last));
                }
            }
        }
        Ok(picked)
    }

    /// Orders candidates of one priority so that queues with a cap and all the others together take turns.
    fn let_queues_take_turns(&self, found: &mut [Candidate<'a>]) {
        if !self.request.has_caps() {
            return;
        }
        let mut rounds = HashMap::<usize, usize>::new();
        let mut turn = |candidate: &Candidate<'a>| {
            let place = self.queues.get(candidate.queue).map_or(0, |queue| queue.place);
            let round = rounds.entry(place).or_default();
            *round += 1;
            (*round, place)
        };
        found.sort_by_cached_key(|candidate| turn(candidate));
    }

    /// Adds the due jobs of one more level of the same priority to `found`, which is
    /// sorted. Adds only jobs that can still be among those wanted. Returns whether these are all that are due.
    fn read_due(&self, level: &Level, found: &mut Vec<Candidate<'a>>) -> Sql<bool> {
        let Some((&queue, _)) = self.queues.get_key_value(level.queue.as_str()) else { return Ok(false) };
        let limit = self.rooms.of(queue).map_or(self.wanted, |room| room.min(self.wanted));
        if limit == 0 {
            return Ok(false);
        }
        let (after, after_id) = match level.jobs {
            Some(position) => (position.run_at.timestamp_micros(), position.id.as_bytes().to_vec()),
            None => (i64::MIN, Vec::new()),
        };
        let furthest = found.get(self.wanted).map(Candidate::order).filter(|_| !self.request.has_caps());
        let (mut added, mut all_due) = (0, true);
        let mut statement = self.tx.prepare(NEXT_DUE)?;
        let mut rows = statement.query(params![queue, level.priority, after, after_id, self.now])?;
        while let Some(row) = rows.next()? {
            let candidate = Candidate {
                queue,
                priority: level.priority,
                run_at: row.get(0)?,
                id: row.uuid(1)?,
                is_suspect: false,
                group: None,
            };
            if furthest.is_some_and(|furthest| candidate.order() > furthest) {
                all_due = false;
                break;
            }
            if self.handles(row.get_ref(2)?.as_str()?, candidate.id)? {
                found.push(candidate);
                added += 1;
                if added == limit {
                    all_due = false;
                    break;
                }
            }
        }
        found.sort_unstable_by_key(Candidate::order);
        Ok(all_due)
    }

    /// The first due suspect of this queue, in claim order.
    fn first_suspect(&self, queue: &'a str) -> Sql<Option<Candidate<'a>>> {
        const NEXT_PRIORITY: &str = "
            select priority
              from ready indexed by ready_suspects
             where queue = ?1
               and interruptions > 0
               and grp is null
               and priority < ?2
               and priority >= ?3
             order by priority desc
             limit 1";
        const DUE: &str = "
            select run_at,
                   id,
                   kind
              from ready indexed by ready_suspects
             where queue = ?1
               and priority = ?2
               and interruptions > 0
               and grp is null
               and run_at <= ?3
             order by run_at, id";
        let lowest = self.request.lowest_priority();
        let mut below = i32::from(i16::MAX) + 1;
        while let Some(priority) =
            self.tx.row(NEXT_PRIORITY, params![queue, below, lowest], |row| row.get::<_, i16>(0))?
        {
            let mut statement = self.tx.prepare(DUE)?;
            let mut rows = statement.query(params![queue, priority, self.now])?;
            while let Some(row) = rows.next()? {
                let (run_at, id) = (row.get(0)?, row.uuid(1)?);
                if self.handles(row.get_ref(2)?.as_str()?, id)? {
                    let group = None;
                    return Ok(Some(Candidate { queue, priority, run_at, id, is_suspect: true, group }));
                }
            }
            below = priority.into();
        }
        Ok(None)
    }

    /// Whether this worker takes the job, by its kind and flags. Tested here and not in
    /// SQL, where it could keep the planner from using the index.
    pub(super) fn handles(&self, kind: &str, id: Uuid) -> Sql<bool> {
        const FLAGS: &str = "
            select flags
              from ready
             where id = ?1";
        self.count_entry();
        if !self.unsound.is_empty() && self.unsound.contains(&id) {
            return Ok(false);
        }
        if self.kinds.as_ref().is_some_and(|kinds| !kinds.contains(kind)) {
            return Ok(false);
        }
        let ClaimRequest { accept_flags, forbid_flags, .. } = self.request;
        if accept_flags.is_empty() && forbid_flags.is_empty() {
            return Ok(true);
        }
        let flags = match self.tx.row(FLAGS, [id.as_bytes()], |row| row.list(0)) {
            // Unreadable flags may be among the forbidden ones.
            Err(fault) if fault.is_refusal() => return Ok(false),
            flags => flags?.unwrap_or_default(),
        };
        let wanted = accept_flags.is_empty() || flags.iter().any(|flag| accept_flags.contains(flag));
        Ok(wanted && !flags.iter().any(|flag| forbid_flags.contains(flag)))
    }

    /// Decides whether a candidate is taken, and counts it. Call in claim order.
    pub(super) fn admit(&mut self, candidate: &Candidate<'a>) -> bool {
        if self.wanted == 0 || self.rooms.of(candidate.queue) == Some(0) {
            return false;
        }
        if candidate.is_suspect {
            if self.has_suspect {
                return false;
            }
            self.has_suspect = true;
            self.suspects.clear();
        }
        self.rooms.start(candidate.queue);
        self.wanted -= 1;
        true
    }

    /// Stores the new state of the rates.
    fn store_rates(&mut self) -> Sql<()> {
        const PACE: &str = "
            update queues
               set tat = ?2
             where name = ?1";
        for (queue, until) in self.rooms.paced() {
            self.tx.execute(PACE, params![queue, until.timestamp_micros()])?;
        }
        if let Some(next) = self.rooms.next_start() {
            self.cursor.note_next_start(next);
        }
        Ok(())
    }

    /// Moves the picked jobs from `ready` to `running`.
    pub(super) fn enter_running(&mut self, picked: &[Candidate<'a>]) -> Sql<()> {
        // Read, then delete: `returning` would create and drop a temporary table for
        // every row, at twice the cost.
        const WAITING: &str = "
            select j.payload,
                   j.options,
                   w.kind,
                   w.timeout_ms,
                   w.lease_no,
                   w.attempt,
                   w.max_attempts,
                   w.interruptions,
                   w.keyed,
                   w.flags,
                   w.flow
              from ready w
             cross join jobs j on j.id = w.id
             where w.id = ?1";
        const LEAVE_READY: &str = "
            delete from ready
             where id = ?1";
        const ENTER_RUNNING: &str = "
            insert into running
                   (id, worker, claimed_at, timeout_ms, lease_no, priority, attempt, max_attempts,
                    interruptions, keyed, kind, queue, flags, flow, grp, gate)
            values (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)";
        let mut waiting = self.tx.prepare(WAITING)?;
        let mut leave = self.tx.prepare(LEAVE_READY)?;
        let mut enter = self.tx.prepare(ENTER_RUNNING)?;
        let worker = self.request.worker;
        for candidate in picked {
            let id = candidate.id.as_bytes();
            let mut rows = waiting.query([id])?;
            let Some(row) = rows.next()? else {
                self.skip(candidate, "it has no row in jobs")?;
                continue;
            };
            let claimed = match self.claimed(candidate, row) {
                Err(fault) if fault.is_refusal() => {
                    let error = Error::from(fault);
                    self.skip(candidate, &format!("it cannot be read: {error}"))?;
                    continue;
                }
                claimed => claimed?,
            };
            let entered = enter.execute(params![
                id,
                worker.0.as_bytes(),
                self.now,
                row.get::<_, Option<i64>>(3)?,
                claimed.lease.lease_no,
                claimed.priority,
                claimed.attempt,
                claimed.max_attempts,
                claimed.interruptions,
                row.get::<_, bool>(8)?,
                &*claimed.kind,
                &*claimed.queue,
                row.get_ref(9)?.as_str_or_null()?,
                row.get_ref(10)?.as_blob_or_null()?,
                claimed.group.as_deref(),
                candidate.group.as_ref().and_then(|(_, limit)| *limit),
            ]);
            drop(rows);
            match entered.map_err(Fault::from) {
                Err(fault) if fault.is_refusal() => {
                    let error = Error::from(fault);
                    self.skip(candidate, &format!("it cannot be leased: {error}"))?;
                    continue;
                }
                entered => drop(entered?),
            }
            leave.execute([id])?;
            self.leased.push(claimed);
        }
        Ok(())
    }

    /// Leaves a row that cannot be claimed where it is. One bad row must not stop the queue.
    fn skip(&mut self, candidate: &Candidate<'a>, reason: &str) -> Sql<()> {
        self.all_unsound.note(&format_args!("job {}: {reason}", candidate.id));
        self.unsound.insert(candidate.id);
        self.skipped = true;
        self.wanted += 1;
        self.rooms.take_back(candidate.queue);
        if candidate.is_suspect {
            self.has_suspect = false;
            self.find_suspects()?;
        }
        Ok(())
    }

    fn claimed(&self, candidate: &Candidate<'_>, row: &Row<'_>) -> Sql<Claimed> {
        let (mut kind, mut queue): (Arc<str>, Arc<str>) =
            self.leased.last().map_or_else(Default::default, |job| (job.kind.clone(), job.queue.clone()));
        let kind = shared(&mut kind, row.get_ref(2)?.as_str()?);
        let queue = shared(&mut queue, candidate.queue);
        Ok(Claimed {
            lease: Lease {
                id: JobId(candidate.id),
                lease_no: row.get::<_, i32>(4)? + 1,
                worker: self.request.worker,
            },
            kind,
            queue,
            priority: candidate.priority,
            payload: row.get(0)?,
            attempt: row.get::<_, u16>(5)? + 1,
            max_attempts: row.get(6)?,
            interruptions: row.get(7)?,
            timeout: row.timeout(3)?,
            flags: row.list(9)?,
            options: read_options(row, 1, JobId(candidate.id))?,
            run_at: instant(candidate.run_at),
            claimed_at: instant(self.now),
            group: candidate.group.as_ref().map(|(group, _)| group.clone()),
            gated: candidate.group.as_ref().is_some_and(|(_, limit)| limit.is_some()),
            flow: row.flow(10)?,
        })
    }
}

pub(super) fn read_options(row: &Row<'_>, column: usize, id: JobId) -> Sql<Options> {
    let options = Options::from_stored(row.get_ref(column)?.as_str_or_null()?);
    Ok(options.unwrap_or_else(|error| {
        tracing::error!(job_id = %id, %error, "cannot read the options of the job; running it without them");
        Options::default()
    }))
}

/// Adds the room of a queue. Returns whether it has a limit or a rate; `None` if it is paused.
fn read_room(tx: &Tx<'_>, queue: &str, rooms: &mut Rooms, now: i64) -> Sql<Option<bool>> {
    const SETTINGS: &str = "
        select paused,
               max_running,
               rate,
               rate_ms,
               burst,
               tat
          from queues
         where name = ?1";
    const RUNNING: &str = "
        select count(*)
          from running
         where queue = ?1";
    let settings = tx.row(SETTINGS, [queue], |row| {
        let (paused, limit) = (row.get::<_, bool>(0)?, row.get::<_, Option<u32>>(1)?);
        Ok((paused, limit, rate(row, 2)?, row.maybe_time(5)?))
    })?;
    let Some((paused, limit, rate, paced_until)) = settings else { return Ok(Some(false)) };
    if paused {
        return Ok(None);
    }
    if let Some(rate) = rate {
        rooms.pace(queue, rate, paced_until, instant(now));
    }
    if let Some(limit) = limit {
        let running = tx.row(RUNNING, [queue], |row| row.get::<_, u32>(0))?.unwrap_or(0);
        rooms.limit(queue, limit as usize, running as usize);
    }
    Ok(Some(limit.is_some() || rate.is_some()))
}
