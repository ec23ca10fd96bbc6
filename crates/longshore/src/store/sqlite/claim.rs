//! Claim: moves due jobs from `ready` to `running`, in order, never one job twice.
//!
//! A claim visits every [segment](crate::store::cursor) once, from the highest priority
//! down, and reads the due jobs after the cursor's position. It stops as soon as it has
//! enough jobs, so it may not read lower priorities at all.

use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use rusqlite::{OptionalExtension, Row, params};
use uuid::Uuid;

use super::claim_groups::rate;
use super::tx::{Columns, Fault, Sql, Tx, instant};
use crate::error::Error;
use crate::job::{JobId, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::turns::Rate;
use crate::store::cursor::{ClaimCursor, Line, Part, Position, Segment, Start, Taken};
use crate::store::{ClaimRequest, Claimed, Claims, Lease, Suspects, shared};

/// Leases due jobs to a live worker, in the caller's transaction.
pub(super) fn claim(tx: &Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    // What a failed claim took is rolled back, and must not be behind a position.
    claim_once(tx, request, cursor).inspect_err(|_| cursor.restart())
}

fn claim_once(tx: &Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    if request.limit == 0 || !worker_is_alive(tx, request.worker)? {
        return Ok(Claims::NONE);
    }
    let mut run = ClaimRun::begin(tx, request)?;
    let mut start = cursor.start(request, Instant::now());
    // A head scan is so cheap here that a probe saves nothing.
    if start == Start::Probe || !run.is_current(cursor) {
        start = Start::Head;
    }
    if start == Start::Resume {
        run.take(cursor)?;
        run.replace_skipped(cursor)?;
        if !run.is_full() && !run.skipped_too_many() && cursor.may_scan_head(Instant::now()) {
            start = Start::Head;
        }
    }
    if start == Start::Head {
        run.take_from_head(cursor)?;
        run.replace_skipped(cursor)?;
    }
    if run.skipped_too_many() || (run.has_more && !run.is_full()) {
        cursor.resume_next();
    }
    run.store_rates(cursor)?;
    Ok(run.into_claims(cursor))
}

fn worker_is_alive(tx: &Tx<'_>, worker: WorkerId) -> Sql<bool> {
    const ALIVE: &str = "
        select 1
          from workers
         where id = ?1
           and dead_at is null";
    Ok(tx.row(ALIVE, [worker.0.as_bytes()], |_| Ok(()))?.is_some())
}

/// The due jobs of one segment after a position, read from the index only.
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
    kinds: Option<HashSet<&'a str>>,
    pub(super) now: i64,
    /// The queues that may be claimed from, each with the number of jobs it may still
    /// start; `None` means any number. Paused queues are left out.
    pub(super) slots: HashMap<&'a str, Option<u32>>,
    /// The rates of queues and their states.
    rates: HashMap<&'a str, QueueRate>,
    /// How many jobs can start at once; a rate admits no more.
    pub(super) startable: usize,
    /// The first due suspect of each queue, until one is taken.
    suspects: Vec<Candidate<'a>>,
    /// Whether this claim has taken a suspect.
    pub(super) has_suspect: bool,
    pub(super) wanted: usize,
    pub(super) leased: Vec<Claimed>,
    /// The number of index entries examined.
    examined: Cell<u32>,
    /// Rows that cannot be claimed: jobs that are also running, that have no request, or
    /// that cannot be read.
    unsound: HashSet<Uuid>,
    /// Whether a row was skipped since the last jobs were taken in its place.
    skipped: bool,
    /// Whether it stopped before the end of a line.
    pub(super) has_more: bool,
}

/// The rate of a queue and its state.
struct QueueRate {
    rate: Rate,
    paced_until: Option<DateTime<Utc>>,
    started: usize,
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

    pub(super) fn as_taken(&self) -> Taken<'_> {
        let at = Position { run_at: instant(self.run_at), id: self.id };
        Taken { queue: self.queue, priority: self.priority, at }
    }
}

impl<'a> ClaimRun<'a> {
    fn begin(tx: &'a Tx<'a>, request: &'a ClaimRequest) -> Sql<Self> {
        let mut run = ClaimRun {
            tx,
            request,
            kinds: request.kinds.as_ref().map(|kinds| kinds.iter().map(String::as_str).collect()),
            now: tx.now()?,
            slots: HashMap::new(),
            rates: HashMap::new(),
            startable: request.startable as usize,
            suspects: Vec::new(),
            has_suspect: false,
            wanted: request.limit as usize,
            leased: Vec::new(),
            examined: Cell::new(0),
            unsound: HashSet::new(),
            skipped: false,
            has_more: false,
        };
        for queue in &request.queues {
            let Some((slots, rate)) = free_slots(tx, queue)? else { continue };
            let by_rate = rate.as_ref().map(|rate| rate.rate.room(rate.paced_until, instant(run.now)));
            let by_rate = by_rate.map(|room| u32::try_from(room).unwrap_or(u32::MAX));
            run.slots.insert(queue, slots.into_iter().chain(by_rate).min());
            run.rates.extend(rate.map(|rate| (queue.as_str(), rate)));
        }
        run.find_suspects()?;
        Ok(run)
    }

    fn find_suspects(&mut self) -> Sql<()> {
        self.suspects.clear();
        if self.may_take_suspect() {
            for queue in self.slots.keys().copied().collect::<Vec<_>>() {
                let first = self.first_suspect(queue)?;
                self.suspects.extend(first);
            }
        }
        Ok(())
    }

    pub(super) fn may_take_suspect(&self) -> bool {
        self.request.suspects == Suspects::One && !self.has_suspect
    }

    /// Takes other jobs in the place of those that were skipped.
    fn replace_skipped(&mut self, cursor: &mut ClaimCursor) -> Sql<()> {
        while std::mem::take(&mut self.skipped) && !self.is_full() && !self.skipped_too_many() {
            self.take(cursor)?;
        }
        Ok(())
    }

    fn skipped_too_many(&self) -> bool {
        self.unsound.len() >= MAX_UNSOUND
    }

    /// Whether the cursor's segments and lines can still be used. If a queue was paused, or its
    /// limit was set or removed, since they were found, the claim starts at the head.
    fn is_current(&self, cursor: &ClaimCursor) -> bool {
        let is_current = |queue: &str, limited: bool| {
            self.slots.get(queue).is_some_and(|slots| slots.is_some() == limited)
        };
        cursor.segments().iter().all(|segment| is_current(&segment.queue, segment.limited))
            && cursor.lines().iter().all(|line| is_current(&line.queue, line.limited))
    }

    fn count_entry(&self) {
        self.examined.set(self.examined.get().saturating_add(1));
    }

    fn is_full(&self) -> bool {
        self.wanted == 0
    }

    fn take_from_head(&mut self, cursor: &mut ClaimCursor) -> Sql<()> {
        let began = Instant::now();
        cursor.set_segments(self.find_segments()?, !self.suspects.is_empty(), instant(self.now));
        let (lines, next_start) = self.find_lines()?;
        let all = i16::MIN..=i16::MAX;
        cursor.set_lines(lines, next_start, Instant::now());
        let has_lines = !cursor.lines().is_empty();
        let picked = if has_lines { Vec::new() } else { self.pick(cursor.segments(), &all)? };
        // The duration of the scan does not include leasing the jobs. It is also limited
        // by the number of entries examined: waiting for a processor can make a scan of
        // three rows seem expensive.
        let ended = Instant::now();
        let latest_began = ended.checked_sub(MAX_TIME_PER_ENTRY * self.examined.get()).unwrap_or(began);
        cursor.head_scanned(began.max(latest_began), ended);
        if has_lines { self.take(cursor) } else { self.lease(&picked, all, cursor) }
    }

    fn take(&mut self, cursor: &mut ClaimCursor) -> Sql<()> {
        let groups_first = cursor.groups_come_first();
        self.has_more = false;
        for part in cursor.parts() {
            if !self.is_full() {
                self.take_part(part, groups_first, cursor)?;
            }
        }
        cursor.set_full(self.is_full());
        Ok(())
    }

    /// Takes jobs of a part. Where jobs with and without a group have the same priority, each side
    /// gets half, and what the other leaves.
    fn take_part(&mut self, part: Part, groups_first: bool, cursor: &mut ClaimCursor) -> Sql<()> {
        let level = match part {
            Part::Plain(priorities) => return self.take_plain(priorities, cursor),
            Part::Groups(priority) => return self.take_from_groups(priority, cursor),
            Part::Mixed(priority) => priority,
        };
        let other_half = self.wanted / 2;
        for (of_groups, reserved) in [(groups_first, other_half), (!groups_first, 0), (groups_first, 0)] {
            self.wanted -= reserved;
            if of_groups {
                self.take_from_groups(level, cursor)?;
            } else {
                self.take_plain(level..=level, cursor)?;
            }
            self.wanted += reserved;
        }
        Ok(())
    }

    fn take_plain(&mut self, priorities: RangeInclusive<i16>, cursor: &mut ClaimCursor) -> Sql<()> {
        let picked = self.pick(cursor.segments(), &priorities)?;
        self.lease(&picked, priorities, cursor)
    }

    /// Finds the segments with waiting jobs, with one index probe each.
    fn find_segments(&self) -> Sql<Vec<Segment>> {
        const NEXT_PRIORITY: &str = "
            select priority
              from ready indexed by ready_claim
             where queue = ?1
               and interruptions = 0
               and grp is null
               and priority < ?2
               and priority >= ?3
             order by priority desc
             limit 1";
        let lowest = self.request.lowest_priority();
        let mut segments = Vec::new();
        let mut probe = self.tx.prepare(NEXT_PRIORITY)?;
        for (&queue, slots) in &self.slots {
            let mut below = i32::from(i16::MAX) + 1;
            while let Some(priority) =
                probe.query_row(params![queue, below, lowest], |row| row.get::<_, i16>(0)).optional()?
            {
                segments.push(Segment {
                    queue: queue.into(),
                    priority,
                    limited: slots.is_some(),
                    after: None,
                });
                below = priority.into();
                self.count_entry();
            }
            self.count_entry();
        }
        Ok(segments)
    }

    /// Finds the lines with due turns, with two index probes each, and when a rate lets the next job
    /// start.
    fn find_lines(&self) -> Sql<(Vec<Line>, Option<DateTime<Utc>>)> {
        const NEXT_PRIORITY: &str = "
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
        let lowest = self.request.lowest_priority();
        let (mut lines, mut next_start) = (Vec::new(), None);
        let mut probe = self.tx.prepare(NEXT_PRIORITY)?;
        for (&queue, slots) in &self.slots {
            let mut below = i32::from(i16::MAX) + 1;
            while let Some(priority) =
                probe.query_row(params![queue, below, lowest], |row| row.get::<_, i16>(0)).optional()?
            {
                if self.tx.row(IS_DUE, params![queue, priority, self.now], |_| Ok(()))?.is_some() {
                    lines.push(Line { queue: queue.into(), priority, limited: slots.is_some(), after: None });
                }
                below = priority.into();
                self.count_entry();
            }
            if below <= i32::from(i16::MAX) {
                let next: Option<Option<i64>> =
                    self.tx.row(NEXT_START, params![queue, self.now], |row| row.get(0))?;
                next_start = next_start.into_iter().chain(next.flatten()).min();
            }
        }
        Ok((lines, next_start.map(instant)))
    }

    /// Picks the jobs to take from these segments, in claim order.
    fn pick(&mut self, segments: &[Segment], priorities: &RangeInclusive<i16>) -> Sql<Vec<Candidate<'a>>> {
        let mut levels = BTreeMap::<Reverse<i16>, Vec<&Segment>>::new();
        for segment in segments.iter().filter(|segment| priorities.contains(&segment.priority)) {
            levels.entry(Reverse(segment.priority)).or_default().push(segment);
        }
        for suspect in self.suspects.iter().filter(|suspect| suspect.priority >= *priorities.start()) {
            levels.entry(Reverse(suspect.priority)).or_default();
        }
        let mut picked = Vec::new();
        for (Reverse(priority), segments) in levels {
            if self.is_full() {
                break;
            }
            let mut found = Vec::new();
            for segment in segments {
                self.next_due(segment, &mut found)?;
            }
            found.extend(self.suspects.iter().filter(|suspect| suspect.priority == priority).cloned());
            found.sort_unstable_by_key(Candidate::order);
            picked.extend(found.into_iter().filter(|candidate| self.admit(candidate)));
        }
        Ok(picked)
    }

    /// Adds the due jobs of one more segment of the same priority to `found`, which is
    /// sorted. Adds only jobs that can still be among those wanted.
    fn next_due(&self, segment: &Segment, found: &mut Vec<Candidate<'a>>) -> Sql<()> {
        let Some((&queue, slots)) = self.slots.get_key_value(segment.queue.as_str()) else { return Ok(()) };
        let limit = slots.map_or(self.wanted, |slots| self.wanted.min(slots as usize));
        if limit == 0 {
            return Ok(());
        }
        let (after, after_id) = match segment.after {
            Some(position) => (position.run_at.timestamp_micros(), position.id.as_bytes().to_vec()),
            None => (i64::MIN, Vec::new()),
        };
        let furthest = found.get(self.wanted).map(Candidate::order);
        let mut added = 0;
        let mut statement = self.tx.prepare(NEXT_DUE)?;
        let mut rows = statement.query(params![queue, segment.priority, after, after_id, self.now])?;
        while let Some(row) = rows.next()? {
            let candidate = Candidate {
                queue,
                priority: segment.priority,
                run_at: row.get(0)?,
                id: row.uuid(1)?,
                is_suspect: false,
                group: None,
            };
            if furthest.is_some_and(|furthest| candidate.order() > furthest) {
                break;
            }
            if self.handles(row.get_ref(2)?.as_str()?, candidate.id)? {
                found.push(candidate);
                added += 1;
                if added == limit {
                    break;
                }
            }
        }
        found.sort_unstable_by_key(Candidate::order);
        Ok(())
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
        let Some(slots) = self.slots.get_mut(candidate.queue) else { return false };
        let rate = self.rates.get_mut(candidate.queue);
        if self.wanted == 0 || *slots == Some(0) || (rate.is_some() && self.startable == 0) {
            return false;
        }
        if candidate.is_suspect {
            if self.has_suspect {
                return false;
            }
            self.has_suspect = true;
            self.suspects.clear();
        }
        if let Some(rate) = rate {
            rate.started += 1;
        }
        *slots = slots.map(|slots| slots - 1);
        self.wanted -= 1;
        self.startable = self.startable.saturating_sub(1);
        true
    }

    /// Stores the new state of the rates.
    fn store_rates(&self, cursor: &mut ClaimCursor) -> Sql<()> {
        const PACE: &str = "
            update queues
               set tat = ?2
             where name = ?1";
        for (queue, QueueRate { rate, paced_until, started }) in &self.rates {
            let until = rate.paced_until(*paced_until, instant(self.now), *started);
            let next = rate.next_start(Some(until), instant(self.now));
            if next > instant(self.now) {
                cursor.note_next_start(next);
            }
            if *started > 0 {
                self.tx.execute(PACE, params![queue, until.timestamp_micros()])?;
            }
        }
        Ok(())
    }

    /// Moves the picked jobs from `ready` to `running` and advances the cursor.
    fn lease(
        &mut self,
        picked: &[Candidate<'a>],
        priorities: RangeInclusive<i16>,
        cursor: &mut ClaimCursor,
    ) -> Sql<()> {
        let taken = picked.iter().map(Candidate::as_taken).collect::<Vec<_>>();
        cursor.advance_in(priorities, &taken, self.is_full(), Some(instant(self.now)));
        self.enter_running(picked, cursor)
    }

    pub(super) fn enter_running(&mut self, picked: &[Candidate<'a>], cursor: &mut ClaimCursor) -> Sql<()> {
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
                self.skip(candidate, "it has no row in jobs", cursor)?;
                continue;
            };
            let claimed = match self.claimed(candidate, row) {
                Err(fault) if fault.is_refusal() => {
                    let error = Error::from(fault);
                    self.skip(candidate, &format!("it cannot be read: {error}"), cursor)?;
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
                    self.skip(candidate, &format!("it cannot be leased: {error}"), cursor)?;
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
    fn skip(&mut self, candidate: &Candidate<'a>, reason: &str, cursor: &mut ClaimCursor) -> Sql<()> {
        if cursor.skip_unsound(Instant::now()) {
            tracing::error!(
                job_id = %candidate.id,
                reason,
                "skipping waiting jobs that cannot be claimed; run `longshore check`"
            );
        }
        self.unsound.insert(candidate.id);
        self.skipped = true;
        self.wanted += 1;
        if let Some(Some(slots)) = self.slots.get_mut(candidate.queue) {
            *slots += 1;
        }
        if let Some(rate) = self.rates.get_mut(candidate.queue) {
            rate.started -= 1;
        }
        self.startable += 1;
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

    fn into_claims(mut self, cursor: &ClaimCursor) -> Claims {
        // They were taken in parts, and if this claim resumed and then scanned the head, the head may have had jobs that
        // come before the first ones.
        self.leased.sort_by_key(Claimed::order);
        let more = self.wanted == 0 || self.has_more;
        Claims { jobs: self.leased, more, again_in: cursor.again_in(Instant::now()) }
    }
}

pub(super) fn read_options(row: &Row<'_>, column: usize, id: JobId) -> Sql<Options> {
    let options = Options::from_stored(row.get_ref(column)?.as_str_or_null()?);
    Ok(options.unwrap_or_else(|error| {
        tracing::error!(job_id = %id, %error, "cannot read the options of the job; running it without them");
        Options::default()
    }))
}

/// The number of jobs that a queue may still start because of its limit (`None`: any number), and
/// its rate. Returns `None` if the queue is paused.
fn free_slots(tx: &Tx<'_>, queue: &str) -> Sql<Option<(Option<u32>, Option<QueueRate>)>> {
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
        let paced_until = row.maybe_time(5)?;
        let rate = rate(row, 2)?.map(|rate| QueueRate { rate, paced_until, started: 0 });
        Ok((row.get::<_, bool>(0)?, row.get::<_, Option<u32>>(1)?, rate))
    })?;
    Ok(match settings {
        Some((true, ..)) => None,
        None => Some((None, None)),
        Some((false, None, rate)) => Some((None, rate)),
        Some((false, Some(limit), rate)) => {
            let running = tx.row(RUNNING, [queue], |row| row.get::<_, u32>(0))?.unwrap_or(0);
            Some((Some(limit.saturating_sub(running)), rate))
        }
    })
}
