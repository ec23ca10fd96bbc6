//! Claim from groups: serves the groups whose [turn](crate::rules::turns) is next. This file owns the locks of groups, their visits and their
//! turns; it leases with the same rows as `claim`.
//!
//! One claim at a time serves a group: it holds an advisory lock on the group until it commits.
//! It counts the group's running jobs in a statement after the lock, so that it sees the commit of
//! the previous claim. Other claims pass by the group meanwhile.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::Row;

use super::claim::ClaimRun;
use super::claim_rows::{Reader, bind_filter, jobs, rate, statement};
use super::claim_sql::{is_handled, lease_taken};
use super::tx::{Sql, Tx};
use crate::rules::turns::{Gate, MAX_GROUPS, Served, Turn, Visit, groups_to_serve, share};
use crate::store::Claimed;
use crate::store::cursor::{Level, Position, TurnPosition};

/// How many pages of a line one claim reads at most, and how many groups it locks. Groups that may not
/// start a job leave the line, so a second page is rarely needed. The next claim continues.
const MAX_PAGES: usize = 8;
const MAX_LOCKED: usize = 128;
/// How many turns of a group one claim merges, and the literal limit in [`VISIT`].
const MAX_MERGED: i64 = 1000;
/// How soon to claim again if another claim served a group.
const PASSED_BY_PAUSE: TimeDelta = TimeDelta::milliseconds(5);

/// Reads up to 1,000 due turns of the lines of priority `$5`, which have up to 128 groups, and locks up
/// to `$6` of these groups: those that no other claim serves at the moment. The groups are twice as many
/// as a claim serves, so that two claims at the same time both find enough on their first page. `$7` and
/// `$8` are groups to leave out.
const LOCK_GROUPS: &str = "
    with line as materialized (
      select t.queue, t.grp, t.at, t.id, row_number() over (order by t.at, t.id) as nth
        from unnest((select $1::text[]), (select $2::timestamptz[]), (select $3::int8[]), (select $9::bool[]))
          as l(queue, after_at, after_id, has_room)
        left join longshore.queues s on s.name = l.queue
       cross join lateral (
               select *
                 from (select w.queue, w.grp, w.at, w.id
                         from longshore.turns w
                        where w.queue = l.queue
                          and w.priority = (select $5::int2)
                          and (w.at, w.id) > (coalesce(l.after_at, '-infinity'), coalesce(l.after_id, 0))
                          and w.at <= longshore.clock()
                          and (w.queue, w.grp) not in (select * from unnest((select $7::text[]), (select $8::text[])))
                        order by w.at, w.id
                        limit 1000) as due) as t
       where s.paused is not true
         and ((s.max_running is null and s.rate is null) or l.has_room)
         and exists (
               select 1
                 from longshore.workers w
                where w.id = $4
                  and w.dead_at is null)
       order by t.at, t.id
       limit 1000),
    folded as materialized (
      select l.queue, l.grp, min(l.nth) as nth
        from line l
       group by l.queue, l.grp
       order by 3
       limit 128)
    select longshore.clock(), (select count(*) from folded), g.queue, g.grp, g.at, g.id
      from (select 1) as one_row
      left join (select *
                   from (select f.queue, f.grp, l.at, l.id
                           from folded f
                           join line l on l.nth = f.nth
                          order by f.nth
                         offset 0) as g
                  where pg_try_advisory_xact_lock(hashtextextended('longshore.groups:' || g.queue || chr(31) || g.grp, 0))
                  limit $6) as g on true";

/// Deletes the turns of these groups at one priority from the group's place in line on, exactly those
/// that this statement sees, and returns what limits each group. Of very many turns, some stay in line
/// ([`MAX_MERGED`]). It does not look before the place: while a snapshot is held, all earlier turns of the
/// group are there, deleted but not removed. A turn that was committed there late is found by a look from the head.
///
/// The last column is when the first job behind the cursor's unchecked position (`$5`, `$6`) is due. A group
/// without one has nulls there, and nothing is read.
const VISIT: &str = concat!(
    "
    with visited as materialized (
      select *
        from unnest((select $1::text[]), (select $2::text[]), (select $4::timestamptz[]),
                    (select $5::timestamptz[]), (select $6::uuid[])) with ordinality
          as v(queue, grp, place_at, unchecked_run_at, unchecked_id, nth)),
    deleted as (
      delete from longshore.turns
       where ctid = any(array(
               select t.row_id
                 from visited v
                cross join lateral (
                        select w.ctid as row_id
                          from longshore.turns w
                         where w.queue = v.queue
                           and w.grp = v.grp
                           and w.priority = (select $3::int2)
                           and w.at >= v.place_at
                         order by w.at
                         limit 1000) as t))
      returning queue, grp, at, id),
    merged as materialized (
      select queue, grp, min(at) as at, min(id) as id, count(*) as turns
        from deleted
       group by queue, grp)
    select coalesce(g.paused, false), coalesce(g.max_running, s.group_max_running),
           case when g.rate is null then s.group_rate else g.rate end,
           case when g.rate is null then s.group_rate_ms else g.rate_ms end,
           case when g.rate is null then s.group_burst else g.burst end,
           case when coalesce(g.max_running, s.group_max_running) is not null then (
             select count(*)
               from longshore.running r
              where r.queue = v.queue
                and r.grp = v.grp) end,
           (select max(t.tat)
              from longshore.turns t
             where t.queue = v.queue
               and t.grp = v.grp
               and t.tat is not null),
           m.at,
           (select t.priority
              from longshore.turns t
             where t.queue = v.queue
               and t.grp = v.grp
               and t.priority < (select $3::int2)
             order by t.priority desc
             limit 1),
           exists (
             select 1
               from longshore.ready r
              where r.queue = v.queue
                and r.grp = v.grp
                and r.priority = (select $3::int2)
                and r.interruptions > 0
                and r.grp is not null
                and r.run_at <= longshore.clock()),
           m.id, coalesce(m.turns, 0),
           (select r.run_at
              from longshore.ready r
             where r.queue = v.queue
               and r.grp = v.grp
               and r.grp is not null
               and r.priority = (select $3::int2)
               and r.interruptions = 0
               and (r.run_at, r.id) <= (v.unchecked_run_at, v.unchecked_id)
               and ",
    is_handled!("$7", "$8", "$9"),
    "
             order by r.run_at, r.id
             limit 1)
      from visited v
      left join merged m on m.queue = v.queue and m.grp = v.grp
      left join longshore.queues s on s.name = v.queue
      left join longshore.groups g on g.queue = v.queue and g.name = v.grp
     order by v.nth"
);

/// The due jobs of one group (as `g`), in claim order, after the cursor's position.
macro_rules! due_in_group {
    ($columns:literal, $interruptions:literal) => {
        concat!(
            "(select ",
            $columns,
            "
                         from longshore.ready r
                        where r.queue = g.queue
                          and r.grp = g.grp
                          and r.grp is not null
                          and r.priority = (select $11::int2)
                          and r.interruptions ",
            $interruptions,
            " 0
                          and (r.run_at, r.id) > (g.after_run_at, g.after_id)
                          and r.run_at <= longshore.clock()
                          and ",
            is_handled!("$8", "$9", "$10"),
            "
                        order by r.run_at, r.id
                        limit 1000
                          for update skip locked) as due"
        )
    };
}

/// Takes up to `room` jobs from each group, `$12` in total. `$13` says whether one of them may be a
/// suspect; it is the one that was due first, and uses the room of its group.
const TAKE_FROM_GROUPS: &str = concat!(
    "
    with served as materialized (
      select v.queue, v.grp, v.room, v.gate, v.nth,
             coalesce(v.after_run_at, '-infinity') as after_run_at,
             coalesce(v.after_id, '00000000-0000-0000-0000-000000000000') as after_id
        from unnest((select $1::text[]), (select $2::text[]), (select $3::int4[]), (select $4::int4[]),
                    (select $5::timestamptz[]), (select $6::uuid[])) with ordinality
          as v(queue, grp, room, gate, after_run_at, after_id, nth)
       where v.room > 0),
    picked_suspect as materialized (
      select s.row_id, g.nth
        from (select queue, grp, nth, '-infinity'::timestamptz as after_run_at,
                     '00000000-0000-0000-0000-000000000000'::uuid as after_id
                from served
               where (select $13::bool)
               order by nth) as g
       cross join lateral (
               select *
                 from ",
    due_in_group!("r.ctid as row_id, r.run_at, r.id", ">"),
    "
                limit 1) as s
       order by s.run_at, s.id
       limit 1),
    picked as (
      select c.row_id
        from (select s.queue, s.grp, s.after_run_at, s.after_id,
                     s.room - case when s.nth = (select nth from picked_suspect) then 1 else 0 end as room
                from served s
               order by s.nth) as g
       cross join lateral (
               select due.row_id
                 from ",
    due_in_group!("r.ctid as row_id", "="),
    "
                limit g.room) as c
       limit (select $12::int8 - (select count(*) from picked_suspect))),
    taken as (
      delete from longshore.ready
       where ctid = any(array(select row_id from picked) || array(select row_id from picked_suspect))
      returning *),",
    lease_taken!(
        "$7",
        // Only if a group has a limit: the lookup reads all groups for every job.
        "case when (select bool_or(s.gate is not null) from served s) then (
               select s.gate
                 from served s
                where s.grp = t.grp
                  and s.queue = t.queue) end",
        ", t.grp"
    ),
);

/// When the first job that is left of each group at priority `$3` is due. Reads from the cursor's position
/// on and, if nothing is due there, from the head: a job before the position may have been committed late,
/// or be one that this worker does not take.
const FIRST_LEFT: &str = "
    select coalesce(
             (select r.run_at
                from longshore.ready r
               where r.queue = v.queue
                 and r.grp = v.grp
                 and r.grp is not null
                 and r.priority = (select $3::int2)
                 and (r.run_at, r.id) > (v.after_run_at, v.after_id)
                 and r.run_at <= longshore.clock()
               order by r.run_at, r.id
               limit 1),
             (select r.run_at
                from longshore.ready r
               where r.queue = v.queue
                 and r.grp = v.grp
                 and r.grp is not null
                 and r.priority = (select $3::int2)
               order by r.run_at, r.id
               limit 1))
      from unnest((select $1::text[]), (select $2::text[]), (select $4::timestamptz[]), (select $5::uuid[])) with ordinality
        as v(queue, grp, after_run_at, after_id, nth)
     order by v.nth";

/// A group that keeps its place keeps the id of its turn.
const INSERT_TURNS: &str = "
    insert into longshore.turns (id, at, tat, priority, queue, grp)
    select coalesce(id, nextval('longshore.turn_ids')), at, tat, priority, queue, grp
      from unnest($1::int8[], $2::timestamptz[], $3::timestamptz[], $4::int2[], $5::text[], $6::text[])
        as t(id, at, tat, priority, queue, grp)";

/// A group that this claim has locked.
struct Locked {
    queue: String,
    group: String,
    place: TurnPosition,
}

impl Locked {
    fn key(&self) -> (String, String) {
        (self.queue.clone(), self.group.clone())
    }
}

/// The locked groups of one page of a line.
struct Page {
    now: DateTime<Utc>,
    groups: Vec<Locked>,
    /// How many groups stand in line.
    seen: usize,
}

/// What limits a locked group, and the turns that it had.
struct Visited {
    visit: Visit,
    /// Its place in line.
    place: Option<TurnPosition>,
    /// The next lower priority at which it has a turn.
    lower: Option<i16>,
    has_suspects: bool,
    /// How many turns were merged.
    turns: i64,
    /// Whether the claim resumes at a position and does not look behind it.
    resumes: bool,
}

/// Takes up to `wanted` jobs of groups with one priority. Runs in the caller's transaction. Returns
/// whether it stopped before the end of the line.
pub(super) async fn take_from_groups(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    priority: i16,
    wanted: usize,
) -> Sql<()> {
    let before = run.jobs.len();
    let mut skipped = HashSet::<(String, String)>::new();
    let (mut groups, mut locked) = (groups_to_serve(wanted), 0);
    for _ in 0..MAX_PAGES {
        let left = wanted - (run.jobs.len() - before);
        if left == 0 {
            return Ok(());
        }
        let Some(page) = lock_groups(tx, run, priority, groups, &skipped).await? else { return Ok(()) };
        let passed_by = page.groups.len() < page.seen.min(groups);
        if passed_by {
            run.cursor.note_next_start(page.now + PASSED_BY_PAUSE);
        }
        if page.groups.is_empty() {
            return Ok(());
        }
        let first = run.jobs.len();
        run.stopped_early |= serve(tx, run, priority, left, &page).await?;
        let group = |job: &Claimed| job.group.as_deref().unwrap_or_default().to_owned();
        let started: HashSet<(String, String)> =
            run.jobs[first..].iter().map(|job| (job.queue.to_string(), group(job))).collect();
        // While another claim serves the rest of the line, no group is served twice: it would get more
        // than its share.
        let is_skipped = |locked: &&Locked| passed_by || !started.contains(&locked.key());
        skipped.extend(page.groups.iter().filter(is_skipped).map(Locked::key));
        locked += page.groups.len();
        if locked >= MAX_LOCKED {
            break;
        }
        // The groups have few jobs, or none for this worker.
        let left = wanted - (run.jobs.len() - before);
        groups = if run.jobs.len() == first { MAX_GROUPS } else { left.clamp(1, MAX_GROUPS) };
    }
    run.stopped_early |= run.jobs.len() - before < wanted;
    Ok(())
}

async fn lock_groups(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    priority: i16,
    groups: usize,
    skipped: &HashSet<(String, String)>,
) -> Sql<Option<Page>> {
    let levels = levels_with_room(run, priority);
    if levels.is_empty() {
        return Ok(None);
    }
    let (skipped_queues, skipped_groups): (Vec<&str>, Vec<&str>) =
        skipped.iter().map(|(queue, group)| (queue.as_str(), group.as_str())).unzip();
    let rows = sqlx::query(tx.sql(LOCK_GROUPS))
        .bind(levels.iter().map(|level| level.queue.as_str()).collect::<Vec<_>>())
        .bind(levels.iter().map(|level| level.turns.map(|after| after.at)).collect::<Vec<_>>())
        .bind(levels.iter().map(|level| level.turns.map(|after| after.id)).collect::<Vec<_>>())
        .bind(run.request.worker.0)
        .bind(priority)
        .bind(groups as i64)
        .bind(skipped_queues)
        .bind(skipped_groups)
        .bind(levels.iter().map(|level| run.rooms.is_locked(&level.queue)).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    let Some(first) = rows.first() else { return Ok(None) };
    let mut page =
        Page { now: first.try_get(0)?, groups: Vec::new(), seen: first.try_get::<i64, _>(1)? as usize };
    run.at = Some(page.now);
    for row in &rows {
        if let Some(queue) = row.try_get(2)? {
            let place = TurnPosition { at: row.try_get(4)?, id: row.try_get(5)? };
            page.groups.push(Locked { queue, group: row.try_get(3)?, place });
        }
    }
    Ok(Some(page))
}

/// The levels of this priority whose groups may start jobs.
fn levels_with_room(run: &ClaimRun<'_>, priority: i16) -> Vec<Level> {
    let has_room = |level: &&Level| {
        level.has_turns && level.priority == priority && run.rooms.of(&level.queue) != Some(0)
    };
    run.cursor.levels().iter().filter(has_room).cloned().collect()
}

/// Serves the locked groups. Returns whether one of them has more turns than were merged.
async fn serve(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    priority: i16,
    wanted: usize,
    page: &Page,
) -> Sql<bool> {
    let (now, first_new) = (page.now, run.jobs.len());
    let visited = visit(tx, run, page, priority).await?;
    let mut startable = run.rooms.startable();
    let mut rooms = Vec::with_capacity(visited.len());
    let mut assigned = HashMap::<&str, usize>::new();
    let mut has_no_slot = vec![false; visited.len()];
    for (nth, (locked, group)) in page.groups.iter().zip(&visited).enumerate() {
        let of_queue = assigned.entry(&locked.queue).or_default();
        let slots = run.rooms.of(&locked.queue).unwrap_or(usize::MAX);
        // The share does not depend on how many groups another claim has left.
        let share = share(wanted.min(slots), page.seen.min(MAX_GROUPS), nth);
        let left = slots.saturating_sub(*of_queue);
        let own = group.visit.room(share, startable, now).min(left);
        startable = startable.saturating_sub(own);
        *of_queue += own;
        has_no_slot[nth] = left == 0;
        rooms.push(own);
    }
    if rooms.iter().any(|room| *room > 0) {
        take(tx, run, page, &visited, &rooms, priority, wanted).await?;
    }
    let mut started = HashMap::<(&str, &str), (usize, Option<Position>)>::new();
    for job in &run.jobs[first_new..] {
        // A suspect is taken out of order.
        let at = (job.interruptions == 0).then_some(Position { run_at: job.run_at, id: job.lease.id.0 });
        let key = (&*job.queue, job.group.as_deref().unwrap_or_default());
        let (count, last) = started.entry(key).or_insert((0, at));
        (*count, *last) = (*count + 1, at.max(*last));
    }
    for (locked, own) in page.groups.iter().zip(&rooms) {
        let (count, last) = match started.get(&(locked.queue.as_str(), locked.group.as_str())) {
            Some((count, last)) => (*count, *last),
            None => (0, None),
        };
        run.cursor.groups.served(&locked.queue, &locked.group, priority, last, count < *own, now);
    }
    let is_full = run.jobs.len() - first_new >= wanted;
    let served = |locked: &Locked| started.contains_key(&(locked.queue.as_str(), locked.group.as_str()));
    let last_served = page.groups.iter().rposition(served);
    let left = first_left(tx, run, page, priority).await?;
    let mut turns = Turns::default();
    for (nth, (((locked, group), own), next_job)) in
        page.groups.iter().zip(&visited).zip(&rooms).zip(left).enumerate()
    {
        let count =
            started.get(&(locked.queue.as_str(), locked.group.as_str())).map_or(0, |(count, _)| *count);
        let turn = group.visit.next(&Served { started: count, next_job }, now);
        match turn {
            Turn::None => {}
            Turn::At { at, paced_until } => turns.add(locked, priority, at, paced_until, count),
            Turn::Kept { paced_until } => {
                turns.keep(locked, priority, group.place.unwrap_or(locked.place), paced_until);
            }
        }
        // Groups that the claim did not reach come first in the next one.
        let is_reached = !has_no_slot[nth] && (!is_full || Some(nth) <= last_served);
        if count > 0 {
            run.cursor.pass_served_turn(&locked.queue, priority, locked.place, now);
        } else if is_reached {
            run.cursor.pass_turn(&locked.queue, priority, locked.place);
        }
        // Without a due job, the turn only keeps the state of the rate.
        if let Turn::At { at, paced_until: Some(_) } = turn
            && at > now
            && next_job.is_some_and(|job| job <= now)
        {
            run.cursor.note_next_start(at);
        }
        if group.resumes && count < *own && next_job.is_some_and(|at| at <= now) {
            run.cursor.note_job_behind_position();
        }
        if group.visit.gate.max_running.is_some() {
            run.cursor.note_limited_group();
        }
        // What this priority leaves, a lower one may use.
        if let Some(lower) = group.lower
            && count < *own
            && next_job.is_none_or(|at| at > now)
            && group.visit.gate.max_running.is_some()
        {
            turns.add(locked, lower, now, None, count);
        }
    }
    turns.insert(tx).await?;
    Ok(visited.iter().any(|group| group.turns >= MAX_MERGED))
}

async fn visit(tx: &mut Tx<'_>, run: &mut ClaimRun<'_>, page: &Page, priority: i16) -> Sql<Vec<Visited>> {
    let groups = || page.groups.iter();
    let unchecked: Vec<Option<Position>> =
        groups().map(|locked| run.cursor.groups.unchecked(&locked.queue, &locked.group, priority)).collect();
    let query = statement(tx, VISIT)
        .bind(groups().map(|locked| locked.queue.clone()).collect::<Vec<_>>())
        .bind(groups().map(|locked| locked.group.clone()).collect::<Vec<_>>())
        .bind(priority)
        .bind(groups().map(|locked| locked.place.at).collect::<Vec<_>>())
        .bind(unchecked.iter().map(|position| position.map(|at| at.run_at)).collect::<Vec<_>>())
        .bind(unchecked.iter().map(|position| position.map(|at| at.id)).collect::<Vec<_>>());
    let began = Instant::now();
    let rows = bind_filter(query, run.request).fetch_all(&mut *tx.connection).await?;
    if unchecked.iter().any(Option::is_some) {
        let now = Instant::now();
        run.cursor.groups.charge_look(now - began, now);
    }
    let mut visited = Vec::with_capacity(rows.len());
    for ((row, locked), unchecked) in rows.iter().zip(groups()).zip(unchecked) {
        let resumes = run.cursor.groups.position(&locked.queue, &locked.group, priority).is_some();
        if unchecked.is_some() {
            run.cursor.groups.looked_behind(&locked.queue, &locked.group, priority, row.try_get(12)?);
        }
        let gate = Gate {
            paused: row.try_get(0)?,
            max_running: row.try_get::<Option<i32>, _>(1)?.map(|limit| limit as u32),
            rate: rate(row.try_get(2)?, row.try_get(3)?, row.try_get(4)?),
        };
        let running = row.try_get::<Option<i64>, _>(5)?.unwrap_or(0) as usize;
        visited.push(Visited {
            visit: Visit { gate, running, paced_until: row.try_get(6)? },
            place: row
                .try_get::<Option<_>, _>(7)?
                .zip(row.try_get::<Option<_>, _>(10)?)
                .map(|(at, id)| TurnPosition { at, id }),
            lower: row.try_get(8)?,
            has_suspects: row.try_get(9)?,
            turns: row.try_get(11)?,
            resumes,
        });
    }
    Ok(visited)
}

async fn take(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    page: &Page,
    visited: &[Visited],
    rooms: &[usize],
    priority: i16,
    wanted: usize,
) -> Sql<()> {
    let suspect = run.may_take_suspect() && visited.iter().any(|group| group.has_suspects);
    let groups = || page.groups.iter();
    let positions: Vec<Option<Position>> =
        groups().map(|locked| run.cursor.groups.position(&locked.queue, &locked.group, priority)).collect();
    let query = statement(tx, TAKE_FROM_GROUPS)
        .bind(groups().map(|locked| locked.queue.clone()).collect::<Vec<_>>())
        .bind(groups().map(|locked| locked.group.clone()).collect::<Vec<_>>())
        .bind(rooms.iter().map(|room| jobs(*room)).collect::<Vec<_>>())
        .bind(
            visited
                .iter()
                .map(|group| group.visit.gate.max_running.map(|limit| limit as i32))
                .collect::<Vec<_>>(),
        )
        .bind(positions.iter().map(|position| position.map(|at| at.run_at)).collect::<Vec<_>>())
        .bind(positions.iter().map(|position| position.map(|at| at.id)).collect::<Vec<_>>())
        .bind(run.request.worker.0);
    let query = bind_filter(query, run.request).bind(priority).bind(wanted as i64).bind(suspect);
    let rows = query.fetch_all(&mut *tx.connection).await?;
    let gated: HashSet<(&str, &str)> = groups()
        .zip(visited)
        .filter(|(_, group)| group.visit.gate.max_running.is_some())
        .map(|(locked, _)| (locked.queue.as_str(), locked.group.as_str()))
        .collect();
    let mut reader = Reader::new(run.request.worker, page.now);
    for row in &rows {
        if let Some(mut job) = reader.read(row)? {
            let group = row.try_get::<Option<&str>, _>(15)?;
            job.gated = group.is_some_and(|group| gated.contains(&(&*job.queue, group)));
            job.group = group.map(Into::into);
            run.add(job);
        }
    }
    Ok(())
}

async fn first_left(
    tx: &mut Tx<'_>,
    run: &ClaimRun<'_>,
    page: &Page,
    priority: i16,
) -> Sql<Vec<Option<DateTime<Utc>>>> {
    let groups = || page.groups.iter();
    let positions: Vec<Option<Position>> =
        groups().map(|locked| run.cursor.groups.position(&locked.queue, &locked.group, priority)).collect();
    let left = sqlx::query_scalar(tx.sql(FIRST_LEFT))
        .bind(groups().map(|locked| locked.queue.as_str()).collect::<Vec<_>>())
        .bind(groups().map(|locked| locked.group.as_str()).collect::<Vec<_>>())
        .bind(priority)
        .bind(positions.iter().map(|position| position.map(|at| at.run_at)).collect::<Vec<_>>())
        .bind(positions.iter().map(|position| position.map(|at| at.id)).collect::<Vec<_>>())
        .fetch_all(&mut *tx.connection)
        .await?;
    Ok(left)
}

/// A turn to insert.
struct NewTurn<'a> {
    /// The id of the turn before, if the group keeps its place.
    id: Option<i64>,
    at: DateTime<Utc>,
    tat: Option<DateTime<Utc>>,
    priority: i16,
    of: &'a Locked,
    /// How many jobs the group started.
    started: usize,
}

/// Turns to insert.
#[derive(Default)]
struct Turns<'a>(Vec<NewTurn<'a>>);

impl<'a> Turns<'a> {
    fn add(
        &mut self,
        of: &'a Locked,
        priority: i16,
        at: DateTime<Utc>,
        tat: Option<DateTime<Utc>>,
        started: usize,
    ) {
        self.0.push(NewTurn { id: None, at, tat, priority, of, started });
    }

    fn keep(&mut self, of: &'a Locked, priority: i16, place: TurnPosition, tat: Option<DateTime<Utc>>) {
        self.0.push(NewTurn { id: Some(place.id), at: place.at, tat, priority, of, started: 0 });
    }

    /// Of the groups that go to the end of the line, those that got fewer jobs come first.
    async fn insert(mut self, tx: &mut Tx<'_>) -> Sql<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        self.0.sort_by_key(|turn| turn.started);
        let turns = || self.0.iter();
        sqlx::query(tx.sql(INSERT_TURNS))
            .bind(turns().map(|turn| turn.id).collect::<Vec<_>>())
            .bind(turns().map(|turn| turn.at).collect::<Vec<_>>())
            .bind(turns().map(|turn| turn.tat).collect::<Vec<_>>())
            .bind(turns().map(|turn| turn.priority).collect::<Vec<_>>())
            .bind(turns().map(|turn| turn.of.queue.as_str()).collect::<Vec<_>>())
            .bind(turns().map(|turn| turn.of.group.as_str()).collect::<Vec<_>>())
            .execute(&mut *tx.connection)
            .await?;
        Ok(())
    }
}
