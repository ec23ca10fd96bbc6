//! Claim from groups: serves the groups whose [turn](crate::rules::turns) is next. This file owns visits and turns; `claim` leases. There
//! is one writer, so groups need no locks.

use std::collections::HashSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use rusqlite::{Row, params};
use uuid::Uuid;

use super::claim::{Candidate, ClaimRun};
use super::tx::{Columns, Sql, instant};
use crate::rules::turns::{Gate, MAX_GROUPS, Rate, Served, Turn, Visit, groups_to_serve, share};
use crate::store::cursor::{Level, Position, TurnPosition};

/// How many pages of a line one claim reads at most. Groups that may not start a job leave the line,
/// so a second page is rarely needed. The next claim continues.
const MAX_PAGES: usize = 8;
/// How many turns of a line a page has at most.
const MAX_TURNS: usize = 1000;

/// A group in line.
struct InLine<'a> {
    queue: &'a str,
    group: Arc<str>,
    place: TurnPosition,
}

/// The groups of one page of a line.
struct Page<'a> {
    groups: Vec<InLine<'a>>,
    /// How many groups stand in line.
    seen: usize,
}

/// A turn to insert.
struct NewTurn<'a> {
    /// The id of the turn before, if the group keeps its place.
    id: Option<i64>,
    at: i64,
    tat: Option<DateTime<Utc>>,
    priority: i16,
    queue: &'a str,
    group: Arc<str>,
    /// How many jobs the group started.
    started: usize,
}

/// What limits a group, and the turns that it had.
struct Visited {
    visit: Visit,
    /// Its place in line: the time and the id of its first turn.
    place: Option<(i64, i64)>,
    /// The next lower priority at which it has a turn.
    lower: Option<i16>,
}

impl<'a> ClaimRun<'a> {
    /// Takes jobs of groups with one priority.
    pub(super) fn take_from_groups(&mut self, priority: i16) -> Sql<()> {
        let mut skipped = HashSet::<(String, Arc<str>)>::new();
        let mut groups = groups_to_serve(self.wanted);
        for _ in 0..MAX_PAGES {
            if self.wanted == 0 {
                return Ok(());
            }
            let page = self.read_turns(priority, groups, &skipped)?;
            if page.groups.is_empty() {
                return Ok(());
            }
            let first = self.leased.len();
            let wanted = self.wanted;
            let share = |(nth, of): (usize, &InLine<'_>)| {
                let slots = self.rooms.of(of.queue).unwrap_or(usize::MAX);
                share(wanted.min(slots), page.seen, nth)
            };
            let shares: Vec<usize> = page.groups.iter().enumerate().map(share).collect();
            let suspect = self.first_suspect_of(&page.groups, priority, &shares)?;
            let mut turns = Vec::new();
            for (in_line, share) in page.groups.into_iter().zip(shares) {
                if self.wanted == 0 {
                    break;
                }
                let has_slot = self.rooms.of(in_line.queue) != Some(0);
                let before = self.leased.len();
                self.serve(&in_line, priority, share, suspect, &mut turns)?;
                // A group without a slot in its queue comes first in the next claim.
                if has_slot {
                    self.cursor.pass_turn(in_line.queue, priority, in_line.place);
                }
                if self.leased.len() == before {
                    skipped.insert((in_line.queue.to_owned(), in_line.group));
                }
            }
            self.insert_turns(turns)?;
            // The groups have few jobs, or none for this worker.
            groups = if self.leased.len() == first { MAX_GROUPS } else { self.wanted.clamp(1, MAX_GROUPS) };
        }
        self.stopped_early |= self.wanted > 0;
        Ok(())
    }

    /// Reads due turns of the lines of one priority, and returns the groups to serve.
    fn read_turns(
        &self,
        priority: i16,
        groups: usize,
        skipped: &HashSet<(String, Arc<str>)>,
    ) -> Sql<Page<'a>> {
        const LINE: &str = "
            select at,
                   id,
                   grp
              from turns indexed by turns_line
             where queue = ?1
               and priority = ?2
               and (at, id) > (?3, ?4)
               and at <= ?5
             order by at, id";
        let mut turns = Vec::new();
        let has_turns = |level: &&Level| level.has_turns && level.priority == priority;
        for level in self.cursor.levels().iter().filter(has_turns) {
            let Some((&queue, _)) = self.queues.get_key_value(level.queue.as_str()) else { continue };
            if self.rooms.of(queue) == Some(0) {
                continue;
            }
            let (at, id) = level.turns.map_or((i64::MIN, 0), |after| (after.at.timestamp_micros(), after.id));
            let mut statement = self.tx.prepare(LINE)?;
            let mut rows = statement.query(params![queue, priority, at, id, self.now])?;
            let (mut known, mut read) = (HashSet::<Arc<str>>::new(), 0);
            while read < MAX_TURNS
                && known.len() < MAX_GROUPS
                && let Some(row) = rows.next()?
            {
                let group: Arc<str> = row.get_ref(2)?.as_str()?.into();
                if skipped.contains(&(queue.to_owned(), group.clone())) {
                    continue;
                }
                read += 1;
                if known.insert(group.clone()) {
                    let place = TurnPosition { at: row.time(0)?, id: row.get(1)? };
                    turns.push(InLine { queue, group, place });
                }
            }
        }
        turns.sort_by_key(|turn| turn.place);
        turns.truncate(MAX_GROUPS);
        let seen = turns.len();
        turns.truncate(groups);
        Ok(Page { groups: turns, seen })
    }

    /// Serves a group, and adds its next turns to `turns`.
    fn serve(
        &mut self,
        of: &InLine<'a>,
        priority: i16,
        share: usize,
        suspect: Option<Uuid>,
        turns: &mut Vec<NewTurn<'a>>,
    ) -> Sql<()> {
        let now = instant(self.now);
        const DELETE_TURNS: &str = "
            delete from turns
             where queue = ?1
               and grp = ?2
               and priority = ?3";
        let Visited { visit, place, lower } = self.visit(of, priority)?;
        self.tx.execute(DELETE_TURNS, params![of.queue, &*of.group, priority])?;
        let room = visit.room(share, self.rooms.startable(), now);
        let before = self.leased.len();
        if room > 0 {
            self.take_from_group(of, priority, room, visit.gate.max_running, suspect)?;
        }
        let taken = &self.leased[before..];
        let started = taken.len();
        // A suspect is taken out of order.
        let in_order = taken.iter().filter(|job| job.interruptions == 0);
        let last = in_order.map(|job| Position { run_at: job.run_at, id: job.lease.id.0 }).max();
        self.cursor.groups.served(of.queue, &of.group, priority, last, started < room, now);
        let next_job = self.first_left(of, priority)?;
        let (queue, group) = (of.queue, of.group.clone());
        match visit.next(&Served { started, next_job }, now) {
            Turn::None => {}
            Turn::At { at, paced_until: tat } => {
                let due = at.timestamp_micros();
                turns.push(NewTurn { id: None, at: due, tat, priority, queue, group, started });
                // Without a due job, the turn only keeps the state of the rate.
                if tat.is_some() && at > now && next_job.is_some_and(|job| job <= now) {
                    self.cursor.note_next_start(at);
                }
            }
            Turn::Kept { paced_until: tat } => {
                let (at, id) = place.unwrap_or((of.place.at.timestamp_micros(), of.place.id));
                turns.push(NewTurn { id: Some(id), at, tat, priority, queue, group, started });
            }
        }
        if visit.gate.max_running.is_some() {
            self.cursor.note_limited_group();
            // What this priority leaves, a lower one may use.
            let is_drained = started < room && next_job.is_none_or(|at| at > now);
            if let Some(priority) = lower.filter(|_| is_drained) {
                let (at, group) = (self.now, of.group.clone());
                turns.push(NewTurn { id: None, at, tat: None, priority, queue, group, started });
            }
        }
        Ok(())
    }

    /// Returns what limits a group, and its turns at one priority.
    fn visit(&self, of: &InLine<'_>, priority: i16) -> Sql<Visited> {
        const SETTINGS: &str = "
            select coalesce(g.paused, 0),
                   coalesce(g.max_running, s.group_max_running),
                   case when g.rate is null then s.group_rate else g.rate end,
                   case when g.rate is null then s.group_rate_ms else g.rate_ms end,
                   case when g.rate is null then s.group_burst else g.burst end
              from (select ?1 as queue, ?2 as name) as v
              left join queues s on s.name = v.queue
              left join groups g on g.queue = v.queue and g.name = v.name";
        const RUNNING: &str = "
            select count(*)
              from running indexed by running_groups
             where queue = ?1
               and grp = ?2";
        const PACED_UNTIL: &str = "
            select max(tat)
              from turns indexed by turns_paced
             where queue = ?1
               and grp = ?2
               and tat is not null";
        const FIRST: &str = "
            select at,
                   id
              from turns indexed by turns_group
             where queue = ?1
               and grp = ?2
               and priority = ?3
             order by at, id
             limit 1";
        const LOWER: &str = "
            select max(priority)
              from turns indexed by turns_group
             where queue = ?1
               and grp = ?2
               and priority < ?3";
        let (queue, group) = (of.queue, &*of.group);
        let gate = self.tx.row(SETTINGS, params![queue, group], |row| {
            Ok(Gate { paused: row.get(0)?, max_running: row.get(1)?, rate: rate(row, 2)? })
        })?;
        let gate = gate.unwrap_or(Gate { paused: false, max_running: None, rate: None });
        let running = match gate.max_running {
            Some(_) => self.tx.row(RUNNING, params![queue, group], |row| row.get::<_, u32>(0))?.unwrap_or(0),
            None => 0,
        };
        let paced_until = self.tx.row(PACED_UNTIL, params![queue, group], |row| row.maybe_time(0))?.flatten();
        let place =
            self.tx.row(FIRST, params![queue, group, priority], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let lower = self.tx.row(LOWER, params![queue, group, priority], |row| row.get(0))?.flatten();
        Ok(Visited { visit: Visit { gate, running: running as usize, paced_until }, place, lower })
    }

    /// The suspect that was due first, of those groups that have room.
    fn first_suspect_of(&self, groups: &[InLine<'a>], priority: i16, shares: &[usize]) -> Sql<Option<Uuid>> {
        const SUSPECTS: &str = "
            select run_at,
                   id,
                   kind
              from ready indexed by ready_group_suspects
             where queue = ?1
               and grp = ?2
               and priority = ?3
               and run_at <= ?4
               and interruptions > 0
             order by run_at, id";
        if !self.may_take_suspect() {
            return Ok(None);
        }
        let mut found = Vec::<(i64, Uuid, &InLine<'a>, usize)>::new();
        for (of, share) in groups.iter().zip(shares) {
            let mut statement = self.tx.prepare(SUSPECTS)?;
            let mut rows = statement.query(params![of.queue, &*of.group, priority, self.now])?;
            while let Some(row) = rows.next()? {
                let id = row.uuid(1)?;
                if self.handles(row.get_ref(2)?.as_str()?, id)? {
                    found.push((row.get(0)?, id, of, *share));
                    break;
                }
            }
        }
        found.sort_unstable_by_key(|(run_at, id, ..)| (*run_at, *id));
        for (_, id, of, share) in found {
            let Visited { visit, .. } = self.visit(of, priority)?;
            if visit.room(share, self.rooms.startable(), instant(self.now)) > 0 {
                return Ok(Some(id));
            }
        }
        Ok(None)
    }

    /// Takes up to `room` due jobs of a group after the cursor's position. One of them may be `suspect`,
    /// which comes first.
    fn take_from_group(
        &mut self,
        of: &InLine<'a>,
        priority: i16,
        room: usize,
        limit: Option<u32>,
        suspect: Option<Uuid>,
    ) -> Sql<()> {
        const SUSPECT: &str = "
            select run_at
              from ready
             where queue = ?1
               and grp = ?2
               and id = ?3";
        const DUE: &str = "
            select run_at,
                   id,
                   kind
              from ready indexed by ready_groups
             where queue = ?1
               and grp = ?2
               and priority = ?3
               and run_at <= ?4
               and (run_at, id) > (?5, ?6)
               and interruptions = 0
             order by run_at, id";
        let candidate = |run_at, id, is_suspect| {
            let group = Some((of.group.clone(), limit));
            Candidate { queue: of.queue, priority, run_at, id, is_suspect, group }
        };
        let mut picked = Vec::new();
        if let Some(id) = suspect
            && let Some(run_at) =
                self.tx.row(SUSPECT, params![of.queue, &*of.group, id.as_bytes()], |row| row.get(0))?
        {
            let found = candidate(run_at, id, true);
            picked.extend(self.admit(&found).then_some(found));
        }
        let after = self.cursor.groups.position(of.queue, &of.group, priority);
        let (after, after_id) = match after {
            Some(position) => (position.run_at.timestamp_micros(), position.id.as_bytes().to_vec()),
            None => (i64::MIN, Vec::new()),
        };
        let tx = self.tx;
        let mut statement = tx.prepare(DUE)?;
        let mut rows = statement.query(params![of.queue, &*of.group, priority, self.now, after, after_id])?;
        while picked.len() < room
            && let Some(row) = rows.next()?
        {
            let found = candidate(row.get(0)?, row.uuid(1)?, false);
            if self.handles(row.get_ref(2)?.as_str()?, found.id)? {
                if !self.admit(&found) {
                    break;
                }
                picked.push(found);
            }
        }
        self.enter_running(&picked)
    }

    /// When the first job of the group that is left is due. Reads from the cursor's position on and, if
    /// nothing is due there, from the head: a job before the position may have been committed late, or be
    /// one that this worker does not take.
    fn first_left(&self, of: &InLine<'_>, priority: i16) -> Sql<Option<DateTime<Utc>>> {
        const FIRST: &str = "
            select run_at
              from ready indexed by ready_groups
             where queue = ?1
               and grp = ?2
               and priority = ?3
               and (run_at, id) > (?4, ?5)
             order by run_at, id
             limit 1";
        if let Some(after) = self.cursor.groups.position(of.queue, &of.group, priority) {
            let (run_at, id) = (after.run_at.timestamp_micros(), after.id.as_bytes().to_vec());
            let first =
                self.tx.row(FIRST, params![of.queue, &*of.group, priority, run_at, id], |row| row.time(0))?;
            if first.is_some_and(|at| at <= instant(self.now)) {
                return Ok(first);
            }
        }
        let head = Vec::<u8>::new();
        self.tx.row(FIRST, params![of.queue, &*of.group, priority, i64::MIN, head], |row| row.time(0))
    }

    /// Inserts the turns of the groups that were served. Of those that go to the end of the line, the groups
    /// that got fewer jobs come first.
    fn insert_turns(&self, mut turns: Vec<NewTurn<'_>>) -> Sql<()> {
        const INSERT: &str = "
            insert into turns (id, at, tat, priority, queue, grp)
            values (?1, ?2, ?3, ?4, ?5, ?6)";
        turns.sort_by_key(|turn| turn.started);
        for NewTurn { id, at, tat, priority, queue, group, .. } in turns {
            let tat = tat.map(|until| until.timestamp_micros());
            self.tx.execute(INSERT, params![id, at, tat, priority, queue, &*group])?;
        }
        Ok(())
    }
}

/// A rate as it is stored, from three columns that are set together.
pub(super) fn rate(row: &Row<'_>, first: usize) -> rusqlite::Result<Option<Rate>> {
    let Some(starts) = row.get(first)? else { return Ok(None) };
    Ok(Some(Rate { starts, period_ms: row.get::<_, i64>(first + 1)? as u64, burst: row.get(first + 2)? }))
}
