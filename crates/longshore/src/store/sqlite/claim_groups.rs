//! Claim from groups: serves the groups whose [turn](crate::rules::turns) is next. This file owns visits and turns; `claim` leases. There
//! is one writer, so groups need no locks.

use std::collections::HashSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use rusqlite::{Row, params};
use uuid::Uuid;

use super::claim::{Candidate, ClaimRun};
use super::tx::{Columns, Sql, instant};
use crate::rules::turns::{Gate, MAX_GROUPS, Rate, Served, Turn, Visit, groups_to_serve, quantum};
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
            let quantum = quantum(self.wanted, page.seen);
            let suspect = self.first_suspect_of(&page.groups, priority, quantum)?;
            // Up to a group whose turn goes on, the line has been served.
            let mut may_pass = true;
            for in_line in page.groups {
                if self.wanted == 0 {
                    break;
                }
                let before = self.leased.len();
                let turn = self.serve(&in_line, priority, quantum, suspect)?;
                let is_skipped = self.leased.len() == before;
                may_pass &= is_skipped || !matches!(turn, Turn::Kept { .. });
                if may_pass {
                    self.cursor.pass_turn(in_line.queue, priority, in_line.place);
                }
                if is_skipped {
                    skipped.insert((in_line.queue.to_owned(), in_line.group));
                }
            }
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

    fn serve(&mut self, of: &InLine<'a>, priority: i16, quantum: usize, suspect: Option<Uuid>) -> Sql<Turn> {
        let now = instant(self.now);
        const DELETE_TURNS: &str = "
            delete from turns
             where queue = ?1
               and grp = ?2
               and priority = ?3";
        let Visited { visit, place, lower } = self.visit(of, priority)?;
        self.tx.execute(DELETE_TURNS, params![of.queue, &*of.group, priority])?;
        let room = visit.room(quantum, self.rooms.startable(), now);
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
        let turn = visit.next(quantum, &Served { started, next_job }, now);
        match turn {
            Turn::None => {}
            Turn::At { at, paced_until } => {
                self.insert_turn(of, priority, at.timestamp_micros(), paced_until, None)?;
                // Without a due job, the turn only keeps the state of the rate.
                if paced_until.is_some() && at > now && next_job.is_some_and(|job| job <= now) {
                    self.cursor.note_next_start(at);
                }
            }
            Turn::Kept { paced_until, allowance } => {
                let (at, id) = place.unwrap_or((of.place.at.timestamp_micros(), of.place.id));
                self.insert_turn(of, priority, at, paced_until, Some((id, allowance)))?;
            }
        }
        if visit.gate.max_running.is_some() {
            self.cursor.note_limited_group();
            // What this priority leaves, a lower one may use.
            let is_drained = started < room && next_job.is_none_or(|at| at > now);
            if let Some(lower) = lower.filter(|_| is_drained) {
                self.insert_turn(of, lower, self.now, None, None)?;
            }
        }
        Ok(turn)
    }

    /// Returns what limits a group, and its turns at one priority.
    fn visit(&self, of: &InLine<'_>, priority: i16) -> Sql<Visited> {
        const SETTINGS: &str = "
            select coalesce(g.paused, 0),
                   coalesce(g.max_running, s.group_max_running),
                   case when g.rate is null then s.group_rate else g.rate end,
                   case when g.rate is null then s.group_rate_ms else g.rate_ms end,
                   case when g.rate is null then s.group_burst else g.burst end,
                   coalesce(g.weight, 1)
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
                   id,
                   (select min(allowance)
                      from turns indexed by turns_group
                     where queue = ?1
                       and grp = ?2
                       and priority = ?3)
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
            Ok(Gate {
                paused: row.get(0)?,
                max_running: row.get(1)?,
                rate: rate(row, 2)?,
                weight: row.get(5)?,
            })
        })?;
        let gate = gate.unwrap_or(Gate { paused: false, max_running: None, rate: None, weight: 1 });
        let running = match gate.max_running {
            Some(_) => self.tx.row(RUNNING, params![queue, group], |row| row.get::<_, u32>(0))?.unwrap_or(0),
            None => 0,
        };
        let paced_until = self.tx.row(PACED_UNTIL, params![queue, group], |row| row.maybe_time(0))?.flatten();
        let first = self.tx.row(FIRST, params![queue, group, priority], |row| {
            let place: Option<(i64, i64)> = row.get::<_, Option<_>>(0)?.zip(row.get(1)?);
            Ok((place, row.get::<_, Option<u32>>(2)?))
        })?;
        let (place, allowance) = first.unwrap_or((None, None));
        let lower = self.tx.row(LOWER, params![queue, group, priority], |row| row.get(0))?.flatten();
        let allowance = allowance.map(|left| left as usize);
        Ok(Visited { visit: Visit { gate, running: running as usize, paced_until, allowance }, place, lower })
    }

    /// The suspect that was due first, of those groups that have room.
    fn first_suspect_of(&self, groups: &[InLine<'a>], priority: i16, quantum: usize) -> Sql<Option<Uuid>> {
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
        let mut found = Vec::<(i64, Uuid, &InLine<'a>)>::new();
        for of in groups {
            let mut statement = self.tx.prepare(SUSPECTS)?;
            let mut rows = statement.query(params![of.queue, &*of.group, priority, self.now])?;
            while let Some(row) = rows.next()? {
                let id = row.uuid(1)?;
                if self.handles(row.get_ref(2)?.as_str()?, id)? {
                    found.push((row.get(0)?, id, of));
                    break;
                }
            }
        }
        found.sort_unstable_by_key(|(run_at, id, _)| (*run_at, *id));
        for (_, id, of) in found {
            let Visited { visit, .. } = self.visit(of, priority)?;
            if visit.room(quantum, self.rooms.startable(), instant(self.now)) > 0 {
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

    /// Inserts a turn. A group that keeps its place keeps the id of its turn and what is left of it.
    fn insert_turn(
        &self,
        of: &InLine<'_>,
        priority: i16,
        at: i64,
        paced_until: Option<DateTime<Utc>>,
        kept: Option<(i64, Option<usize>)>,
    ) -> Sql<()> {
        const INSERT: &str = "
            insert into turns (id, at, tat, allowance, priority, queue, grp)
            values (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
        let (id, allowance) = kept.map(|(id, left)| (id, left.map(|left| left as i64))).unzip();
        let allowance = allowance.flatten();
        let tat = paced_until.map(|until| until.timestamp_micros());
        self.tx.execute(INSERT, params![id, at, tat, allowance, priority, of.queue, &*of.group])?;
        Ok(())
    }
}

/// A rate as it is stored, from three columns that are set together.
pub(super) fn rate(row: &Row<'_>, first: usize) -> rusqlite::Result<Option<Rate>> {
    let Some(starts) = row.get(first)? else { return Ok(None) };
    Ok(Some(Rate { starts, period_ms: row.get::<_, i64>(first + 1)? as u64, burst: row.get(first + 2)? }))
}
