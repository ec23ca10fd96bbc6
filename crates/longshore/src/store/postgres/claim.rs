//! Claim: moves due jobs from `ready` to `running`, in order, never one job twice. This file owns the steps of a claim and its transaction:
//! it looks, or resumes from the cursor, and takes jobs without a group. `claim_limits` and `claim_groups` have what needs locks.
//!
//! A claim without limits and groups has no transaction: each of its statements is committed, so it ends with the first one that takes
//! jobs. A failure afterwards would lose their leases.

use std::ops::RangeInclusive;
use std::time::Instant;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::claim_groups::take_from_groups;
use super::claim_limits::{lock_queues, store_rates};
use super::claim_rows::{Reader, bind_filter, jobs, statement};
use super::claim_sql::{LOOK, LOOK_WITHIN_ROOM, MAX_CLAIM, TAKE};
use super::run::Mode;
use super::tx::{Query, Sql, Tx};
use crate::error::{Error, Result};
use crate::store::claim::ServedClaim;
use crate::store::cursor::{ClaimCursor, Level, Part, Position, Read, Start, WaitingSuspects};
use crate::store::rooms::Rooms;
use crate::store::{ClaimRequest, Claimed, Claiming, Claims, Suspects};

/// How often one claim plans again at most, if others have locked what it planned to take.
const MAX_ROUNDS: usize = 3;
const ALL: RangeInclusive<i16> = i16::MIN..=i16::MAX;

#[async_trait]
impl Claiming for PostgresStore {
    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims> {
        let args = (request.clone(), tokio::sync::Mutex::new(std::mem::take(cursor)));
        let (claims, moved) = self
            .run_here(Mode::QUICK, args, |tx, (request, cursor)| {
                Box::pin(async move {
                    let mut cursor = cursor.lock().await;
                    let claims = claim(tx, request, &mut cursor).await?;
                    Ok((claims, std::mem::take(&mut *cursor)))
                })
            })
            .await?;
        *cursor = moved;
        Ok(claims)
    }
}

async fn claim(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    match claim_once(tx, request, cursor).await {
        // Nothing is leased. The second try skips the rows that cannot be claimed, so that
        // they do not stop their queue.
        Err(fault) if fault.is_unsound_row() && !tx.store.unsound.are_skipped() => {
            tx.store.unsound.note(&Error::from(fault));
            cursor.restart();
            claim_once(tx, request, cursor).await
        }
        done => done,
    }
    // What it took is rolled back, and must not be behind a position.
    .inspect_err(|_| cursor.restart())
}

async fn claim_once(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    let began = Instant::now();
    let mut run = ClaimRun::new(request, cursor);
    if run.left() == 0 || request.queues.is_empty() {
        return Ok(Claims::NONE);
    }
    let mut looks = run.cursor.start(request, began) == Start::Look;
    if !looks {
        // New jobs may have arrived since a short claim, also some of a higher priority.
        let highest = run.cursor.levels().first().map(|level| level.priority);
        run.unless_above = highest.filter(|_| run.cursor.was_short());
        serve(tx, &mut run, None).await?;
        // Return the jobs found so far before a look; the next claim can make it.
        looks = run.jobs.is_empty() && !run.stopped_early && run.cursor.may_look(Instant::now());
    }
    if looks {
        let (began, looked_behind) = (Instant::now(), run.cursor.groups.looked());
        let (wanted, lowest) = (run.left(), request.lowest_priority());
        let plan = look(tx, &mut run, None, lowest, wanted, &LeftOut::default()).await?;
        serve(tx, &mut run, Some(plan)).await?;
        // Looks behind positions in groups have a pause of their own.
        let looked_behind = run.cursor.groups.looked() - looked_behind;
        run.cursor.looked(began.elapsed().saturating_sub(looked_behind), Instant::now());
    }
    let is_full = run.left() == 0;
    let ClaimRun { request, cursor, rooms, jobs, stopped_early, at, .. } = run;
    let claim = ServedClaim { request, rooms: &rooms, jobs, is_full, stopped_early, began, at };
    Ok(cursor.end(claim, Instant::now()))
}

/// A claim in progress.
pub(super) struct ClaimRun<'a> {
    pub(super) request: &'a ClaimRequest,
    pub(super) cursor: &'a mut ClaimCursor,
    pub(super) rooms: Rooms,
    pub(super) jobs: Vec<Claimed>,
    /// Whether it stopped although more jobs may be due.
    pub(super) stopped_early: bool,
    /// Take nothing without a look if a job of a higher priority than this waits.
    unless_above: Option<i16>,
    /// The engine's time.
    pub(super) at: Option<DateTime<Utc>>,
}

impl<'a> ClaimRun<'a> {
    fn new(request: &'a ClaimRequest, cursor: &'a mut ClaimCursor) -> Self {
        let rooms = Rooms::new(request);
        ClaimRun {
            request,
            cursor,
            rooms,
            jobs: Vec::new(),
            stopped_early: false,
            unless_above: None,
            at: None,
        }
    }

    /// How many jobs are still wanted.
    fn left(&self) -> usize {
        (self.request.limit as usize).min(MAX_CLAIM).saturating_sub(self.jobs.len())
    }

    /// Whether it may take a suspect: one at a time, including one that it already took.
    pub(super) fn may_take_suspect(&self) -> bool {
        self.request.suspects == Suspects::One && self.jobs.iter().all(|job| job.interruptions == 0)
    }

    pub(super) fn add(&mut self, job: Claimed) {
        self.rooms.start(&job.queue);
        self.jobs.push(job);
    }

    /// The room of a queue as a parameter.
    fn cap(&self, queue: &str) -> Option<i32> {
        self.rooms.of(queue).map(jobs)
    }

    /// The levels of these priorities from which jobs without a group may be taken.
    fn open_levels(&self, priorities: &RangeInclusive<i16>, left_out: &LeftOut) -> Vec<&Level> {
        let is_open = |level: &&Level| {
            level.has_jobs
                && priorities.contains(&level.priority)
                && (!level.limited || self.rooms.is_locked(&level.queue))
                && self.rooms.of(&level.queue) != Some(0)
                && !left_out
                    .levels
                    .iter()
                    .any(|(queue, priority)| *priority == level.priority && *queue == level.queue)
        };
        self.cursor.levels().iter().filter(is_open).collect()
    }
}

/// Takes jobs from the cursor's levels. `plan` is from a look at all of them.
async fn serve(tx: &mut Tx<'_>, run: &mut ClaimRun<'_>, plan: Option<Plan>) -> Sql<()> {
    if !run.cursor.has_limits() && !run.cursor.has_turns() {
        let wanted = run.left();
        return take_plain(tx, run, ALL, wanted, plan, Commits::EachStatement).await;
    }
    run.unless_above = None;
    let mut transaction = tx.begin_indexed().await?;
    let tx = &mut transaction.tx();
    if run.cursor.has_limits() {
        let queues: Vec<String> = run.request.queues.iter().map(|queue| queue.name.clone()).collect();
        run.at = lock_queues(tx, &queues, &mut run.rooms).await?.or(run.at);
    }
    let groups_first = run.cursor.groups_come_first();
    for part in run.cursor.parts() {
        if run.left() > 0 {
            take_part(tx, run, part, groups_first).await?;
        }
    }
    store_rates(tx, &run.rooms).await?;
    if let Some(next) = run.rooms.next_start() {
        run.cursor.note_next_start(next);
    }
    transaction.commit().await
}

/// Takes jobs of a part. Where jobs with and without a group have the same priority, each side gets half, and what the other
/// leaves.
async fn take_part(tx: &mut Tx<'_>, run: &mut ClaimRun<'_>, part: Part, groups_first: bool) -> Sql<()> {
    let (wanted, together) = (run.left(), Commits::Together);
    let level = match part {
        Part::Plain(priorities) => return take_plain(tx, run, priorities, wanted, None, together).await,
        Part::Groups(priority) => return take_from_groups(tx, run, priority, wanted).await,
        Part::Mixed(priority) => priority,
    };
    let reserved = wanted / 2;
    for (of_groups, reserved) in [(groups_first, reserved), (!groups_first, 0), (groups_first, 0)] {
        let wanted = run.left().saturating_sub(reserved);
        if wanted == 0 {
            continue;
        }
        if of_groups {
            take_from_groups(tx, run, level, wanted).await?;
        } else {
            take_plain(tx, run, level..=level, wanted, None, together).await?;
        }
    }
    Ok(())
}

/// When the statements of a claim are committed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commits {
    EachStatement,
    Together,
}

/// Levels and suspects that others have locked. This claim leaves them out.
#[derive(Default)]
struct LeftOut {
    levels: Vec<(String, i16)>,
    suspects: Vec<Uuid>,
}

/// Takes up to `wanted` jobs without a group, of these priorities. If others have locked some of those that were planned, perhaps for
/// long, it takes the next ones, which must not wait.
async fn take_plain(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    priorities: RangeInclusive<i16>,
    wanted: usize,
    mut first: Option<Plan>,
    commits: Commits,
) -> Sql<()> {
    let (before, mut left_out) = (run.jobs.len(), LeftOut::default());
    for _ in 0..MAX_ROUNDS {
        let taken = run.jobs.len() - before;
        if taken == wanted {
            return Ok(());
        }
        if taken > 0 && commits == Commits::EachStatement {
            break;
        }
        let plan = match first.take() {
            Some(plan) => plan,
            None => plan(tx, run, &priorities, wanted - taken, &left_out).await?,
        };
        run.unless_above = None;
        if plan.is_empty() {
            return Ok(());
        }
        let locked = take(tx, run, &plan).await?;
        let nothing_left = locked.levels.is_empty() || !plan.may_leave_more;
        if nothing_left && locked.suspects.is_empty() && !plan.is_cut {
            return Ok(());
        }
        left_out.levels.extend(locked.levels);
        left_out.suspects.extend(locked.suspects);
    }
    run.stopped_early |= run.jobs.len() - before < wanted;
    Ok(())
}

// ---- look ----------------------------------------------------------------------

/// Which jobs without a group to take.
#[derive(Default)]
struct Plan {
    levels: Vec<Planned>,
    suspect: Option<Uuid>,
    /// How many jobs to take in total.
    jobs: usize,
    /// Whether due jobs may be left besides those that were planned.
    may_leave_more: bool,
    /// Whether the room of a queue left candidates out, so that others come after them.
    is_cut: bool,
    /// Take nothing if a job of a higher priority than this waits. A look has to find it first.
    unless_above: Option<i16>,
}

/// How many jobs to take from a level.
struct Planned {
    queue: String,
    priority: i16,
    after: Option<Position>,
    quota: usize,
    /// The engine's time, if the plan has all that is due in the level.
    has_all_due: Option<DateTime<Utc>>,
}

impl Plan {
    fn is_empty(&self) -> bool {
        self.levels.is_empty() && self.suspect.is_none()
    }
}

/// Plans to take up to `wanted` jobs from the levels that the cursor knows. Looks at them only if it has to.
async fn plan(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    priorities: &RangeInclusive<i16>,
    wanted: usize,
    left_out: &LeftOut,
) -> Sql<Plan> {
    let levels: Vec<Level> = run.open_levels(priorities, left_out).into_iter().cloned().collect();
    let has_suspects = run.may_take_suspect() && run.cursor.suspects().any;
    if levels.is_empty() && !has_suspects {
        return Ok(Plan::default());
    }
    if has_suspects || are_shared(&levels, &run.rooms) {
        let lowest = run.request.lowest_priority().max(*priorities.start());
        return look(tx, run, Some(levels), lowest, wanted, left_out).await;
    }
    let quota = |queue: &str| run.rooms.of(queue).map_or(wanted, |room| room.min(wanted));
    let planned = levels.into_iter().map(|Level { queue, priority, jobs, .. }| {
        let quota = quota(&queue);
        Planned { queue, priority, after: jobs, quota, has_all_due: None }
    });
    Ok(Plan { levels: planned.collect(), jobs: wanted, unless_above: run.unless_above, ..Plan::default() })
}

/// Whether some of the levels have to be merged: those of one priority, and those of one queue that share its room.
fn are_shared(levels: &[Level], rooms: &Rooms) -> bool {
    let shares = |one: &Level, other: &Level| {
        one.priority == other.priority || (one.queue == other.queue && rooms.of(&one.queue).is_some())
    };
    levels.iter().enumerate().any(|(nth, one)| levels[..nth].iter().any(|other| shares(one, other)))
}

/// Looks at the due jobs without a group and plans to take up to `wanted` of them, or of the suspects with at least the priority
/// `lowest`. If no levels are known, it finds them.
async fn look(
    tx: &mut Tx<'_>,
    run: &mut ClaimRun<'_>,
    known: Option<Vec<Level>>,
    lowest: i16,
    wanted: usize,
    left_out: &LeftOut,
) -> Sql<Plan> {
    let has_room = run.request.queues.iter().all(|queue| run.rooms.of(&queue.name).is_none());
    let text = if has_room { LOOK } else { LOOK_WITHIN_ROOM };
    let query = bind_look(statement(tx, text), run, known.as_deref(), lowest, wanted, &left_out.suspects);
    let rows = query.fetch_all(&mut *tx.connection).await?;
    let first = rows.first().ok_or_else(|| Error::internal("the statement that looks returned no row"))?;
    let at: DateTime<Utc> = first.try_get(0)?;
    run.at = Some(at);
    let mut found = Vec::with_capacity(rows.len());
    let mut seen = Vec::new();
    for row in &rows {
        let Some(queue) = row.try_get::<Option<String>, _>(5)? else { continue };
        let (priority, limited) = (row.try_get(6)?, row.try_get(7)?);
        if row.try_get(8)? {
            found.push(Level::of_turns(queue, priority, limited));
            continue;
        }
        let (due, quota) = (row.try_get::<i64, _>(9)? as usize, row.try_get::<i64, _>(11)? as usize);
        let first_due = row.try_get::<Option<DateTime<Utc>>, _>(10)?;
        // Whatever comes before the first due job has been skipped.
        let before_first = first_due.map(|run_at| Position { run_at, id: Uuid::nil() });
        found.push(Level { jobs: before_first, ..Level::of_jobs(&queue, priority, limited) });
        seen.push(Seen { queue, priority, due, quota, before_first });
    }
    if known.is_none() {
        let suspects = WaitingSuspects { any: first.try_get(1)?, any_limited: first.try_get(2)? };
        run.cursor.set_levels(found, suspects, first.try_get(3)?, at, Instant::now());
    }
    Ok(read_plan(run, seen, first.try_get(4)?, wanted, at))
}

/// What a look has seen in a level.
struct Seen {
    queue: String,
    priority: i16,
    /// How many due jobs it read.
    due: usize,
    quota: usize,
    before_first: Option<Position>,
}

fn read_plan(
    run: &mut ClaimRun<'_>,
    mut seen: Vec<Seen>,
    suspect: Option<Uuid>,
    wanted: usize,
    at: DateTime<Utc>,
) -> Plan {
    seen.sort_by(|a, b| b.priority.cmp(&a.priority).then_with(|| a.queue.cmp(&b.queue)));
    let candidates: usize = seen.iter().map(|level| level.due).sum();
    let chosen = seen.iter().map(|level| level.quota).sum::<usize>() + usize::from(suspect.is_some());
    // It reads from the highest priority down, until it has enough candidates.
    let lowest = seen.iter().filter(|level| level.due > 0).map(|level| level.priority).min();
    let lowest_read = lowest.filter(|_| candidates >= wanted).unwrap_or(i16::MIN);
    let mut plan =
        Plan { suspect, jobs: chosen, is_cut: candidates >= wanted && chosen < wanted, ..Plan::default() };
    for Seen { queue, priority, due, quota, before_first } in seen {
        let limit = run.rooms.of(&queue).map_or(wanted, |room| room.min(wanted));
        let is_all_due = due < limit && priority >= lowest_read;
        plan.may_leave_more |= !is_all_due || quota < due;
        if quota > 0 {
            let has_all_due = (is_all_due && quota == due).then_some(at);
            plan.levels.push(Planned { queue, priority, after: before_first, quota, has_all_due });
        } else if is_all_due && due == 0 {
            run.cursor.pass(&queue, priority, Read::AllDue(at));
        }
    }
    plan
}

/// Binds the fourteen parameters of [`LOOK`].
fn bind_look<'q>(
    query: Query<'q>,
    run: &ClaimRun<'_>,
    levels: Option<&[Level]>,
    lowest: i16,
    wanted: usize,
    left_out: &[Uuid],
) -> Query<'q> {
    let places = run.request.places(run.cursor.claims_begun());
    let (mut names, mut named_places) = (Vec::<&str>::new(), Vec::new());
    for (queue, place) in run.request.queues.iter().zip(places) {
        // A queue that is named twice counts once.
        if !names.contains(&queue.name.as_str()) {
            names.push(&queue.name);
            named_places.push(jobs(place));
        }
    }
    let caps: Vec<Option<i32>> = names.iter().map(|name| run.cap(name)).collect();
    let query = query
        .bind(names.into_iter().map(str::to_owned).collect::<Vec<_>>())
        .bind(caps)
        .bind(named_places)
        .bind(lowest)
        .bind(levels.map(|levels| levels.iter().map(|level| level.queue.clone()).collect::<Vec<_>>()))
        .bind(levels.map(|levels| levels.iter().map(|level| level.priority).collect::<Vec<_>>()))
        .bind(
            levels
                .map(|levels| levels.iter().map(|level| level.jobs.map(|at| at.run_at)).collect::<Vec<_>>()),
        )
        .bind(levels.map(|levels| levels.iter().map(|level| level.jobs.map(|at| at.id)).collect::<Vec<_>>()));
    bind_filter(query, run.request)
        .bind(jobs(wanted))
        .bind(i32::from(run.may_take_suspect()))
        .bind(left_out.to_vec())
}

// ---- take ----------------------------------------------------------------------

/// Takes the planned jobs and moves the positions. Returns what others have locked.
async fn take(tx: &mut Tx<'_>, run: &mut ClaimRun<'_>, plan: &Plan) -> Sql<LeftOut> {
    let query = bind_take(statement(tx, TAKE), run, plan);
    let rows = query.fetch_all(&mut *tx.connection).await?;
    let first = rows.first().ok_or_else(|| Error::internal("a claim statement returned no row"))?;
    let at: DateTime<Utc> = first.try_get(0)?;
    run.at = Some(at);
    if plan.unless_above.is_some() && rows.len() == 1 && first.try_get::<Option<Uuid>, _>(1)?.is_none() {
        return Ok(LeftOut::default());
    }
    let before = run.jobs.len();
    let mut reader = Reader::new(run.request.worker, at);
    for row in &rows {
        if let Some(job) = reader.read(row)? {
            run.add(job);
        }
    }
    let taken = &run.jobs[before..];
    let has_suspect = taken.iter().any(|job| job.interruptions > 0);
    let suspects = plan.suspect.filter(|_| !has_suspect).into_iter().collect();
    let mut locked = LeftOut { levels: Vec::new(), suspects };
    let mut left = plan.jobs - usize::from(plan.suspect.is_some());
    for level in &plan.levels {
        let own = || {
            let is_own = |job: &&Claimed| {
                job.interruptions == 0 && job.priority == level.priority && *job.queue == *level.queue
            };
            taken.iter().filter(is_own)
        };
        let quota = level.quota.min(left);
        let count = own().count();
        left -= count.min(left);
        if count < quota {
            locked.levels.push((level.queue.clone(), level.priority));
            run.cursor.pass(&level.queue, level.priority, Read::AllDue(at));
        } else if let Some(at) = level.has_all_due {
            run.cursor.pass(&level.queue, level.priority, Read::AllDue(at));
        } else if let Some(last) = own().map(position).max() {
            run.cursor.pass(&level.queue, level.priority, Read::UpTo(last));
        }
    }
    Ok(locked)
}

fn position(job: &Claimed) -> Position {
    Position { run_at: job.run_at, id: job.lease.id.0 }
}

/// Binds the thirteen parameters of [`TAKE`].
fn bind_take<'q>(query: Query<'q>, run: &ClaimRun<'_>, plan: &Plan) -> Query<'q> {
    let levels = || plan.levels.iter();
    let query = query
        .bind(levels().map(|level| level.queue.clone()).collect::<Vec<_>>())
        .bind(levels().map(|level| level.priority).collect::<Vec<_>>())
        .bind(levels().map(|level| level.after.map(|after| after.run_at)).collect::<Vec<_>>())
        .bind(levels().map(|level| level.after.map(|after| after.id)).collect::<Vec<_>>())
        .bind(levels().map(|level| jobs(level.quota)).collect::<Vec<_>>())
        .bind(run.request.worker.0);
    let locked: Vec<String> = run.rooms.locked().into_iter().map(str::to_owned).collect();
    bind_filter(query, run.request)
        .bind((plan.jobs - usize::from(plan.suspect.is_some())) as i64)
        .bind(plan.suspect)
        .bind(locked)
        .bind(plan.unless_above)
}

impl PostgresStore {
    /// Returns the plans, with costs and buffers, of the two statements of this claim from the head. Runs the
    /// claim and rolls it back. For benchmarks and tests.
    #[doc(hidden)]
    pub async fn explain_claim(&self, request: &ClaimRequest) -> Result<String> {
        self.run(request.clone(), |tx, request| Box::pin(explain(tx, request))).await
    }
}

async fn explain(tx: &mut Tx<'_>, request: &ClaimRequest) -> Sql<String> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let mut cursor = ClaimCursor::default();
    cursor.start(request, Instant::now());
    let mut run = ClaimRun::new(request, &mut cursor);
    let explained = |tx: &Tx<'_>, text: &str| {
        sqlx::query(AssertSqlSafe(format!("explain (analyze, buffers, settings) {}", tx.fill(text))))
    };
    let (wanted, lowest) = (run.left(), request.lowest_priority());
    let mut rows = bind_look(explained(tx, LOOK), &run, None, lowest, wanted, &[])
        .fetch_all(&mut *tx.connection)
        .await?;
    let plan = look(tx, &mut run, None, lowest, wanted, &LeftOut::default()).await?;
    rows.extend(bind_take(explained(tx, TAKE), &run, &plan).fetch_all(&mut *tx.connection).await?);
    transaction.rollback().await?;
    let lines: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>()?;
    Ok(lines.join("\n"))
}
