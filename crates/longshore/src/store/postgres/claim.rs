//! Claim: moves due jobs from `ready` to `running`, in order, never one job twice.
//! The statements are in `claim_sql`.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::claim_groups::{rate, take_from_groups};
use super::claim_sql::{
    COUNT_LIMITED, DISCOVER, LOCK_LIMITED, MAX_CLAIM, PACE_QUEUES, TAKE, TAKE_FROM_ONE, TAKE_UNLOCKED,
    skipping_unsound,
};
use super::tx::{Fault, Query, Sql, Tx};
use crate::error::{Error, Result};
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::Options;
use crate::rules::turns::Rate;
use crate::store::cursor::{ClaimCursor, Line, Part, Position, Segment, Start, Taken};
use crate::store::{ClaimRequest, Claimed, Claims, Lease, Suspects, shared};

pub(super) async fn claim(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    match claim_once(tx, request, cursor).await {
        // Nothing is leased. The second try skips the rows that cannot be claimed, so that
        // they do not stop their queue.
        Err(fault) if fault.is_unsound_row() && !cursor.skips_unsound(Instant::now()) => {
            skip_unsound(cursor, fault);
            cursor.restart();
            claim_once(tx, request, cursor).await
        }
        done => done,
    }
    // What it took is rolled back, and must not be behind a position.
    .inspect_err(|_| cursor.restart())
}

fn skip_unsound(cursor: &mut ClaimCursor, fault: Fault) {
    if cursor.skip_unsound(Instant::now()) {
        let error = Error::from(fault);
        tracing::error!(%error, "skipping waiting jobs that cannot be claimed; run `longshore check`");
    }
}

async fn claim_once(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    let wanted = (request.limit as usize).min(MAX_CLAIM);
    let mut jobs = Vec::new();
    if wanted == 0 || request.queues.is_empty() {
        return Ok(Claims::NONE);
    }
    let start = cursor.start(request, Instant::now());
    if start != Start::Head {
        let limited = cursor.segments().iter().any(|segment| segment.limited)
            || cursor.lines().iter().any(|line| line.limited);
        let more = take_any(tx, request, cursor, &mut jobs, start, limited).await?;
        let may_scan_head = cursor.may_scan_head(Instant::now());
        // Return the jobs found so far before a head scan; the next claim can make it.
        if more || !jobs.is_empty() || !may_scan_head {
            return Ok(Claims {
                jobs,
                more: more || may_scan_head,
                again_in: cursor.again_in(Instant::now()),
            });
        }
    }
    let more = claim_from_head(tx, request, cursor, &mut jobs).await?;
    Ok(Claims { jobs, more, again_in: cursor.again_in(Instant::now()) })
}

async fn claim_from_head(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
) -> Sql<bool> {
    let (began, looked) = (Instant::now(), cursor.groups.looked());
    let found = discover(tx, request, cursor).await?;
    let mut more = false;
    if found.any {
        more = take_any(tx, request, cursor, jobs, Start::Head, found.limited).await?;
    } else {
        cursor.advance(&[], false, Some(found.now));
    }
    // Looks have a pause of their own.
    cursor.head_scanned(began + (cursor.groups.looked() - looked), Instant::now());
    Ok(more)
}

/// The result of looking for segments.
struct Discovered {
    now: DateTime<Utc>,
    /// Whether a requested queue has a limit.
    limited: bool,
    /// Whether any job waits.
    any: bool,
}

async fn discover(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Discovered> {
    let query = sqlx::query(tx.sql(DISCOVER)).bind(&request.queues).bind(request.lowest_priority());
    let rows = query.fetch_all(&mut *tx.connection).await?;
    let first = rows
        .first()
        .ok_or_else(|| Error::internal("the statement that finds waiting queues returned no row"))?;
    let (now, suspects, limited) = (first.try_get(0)?, first.try_get(1)?, first.try_get(2)?);
    let mut segments = Vec::with_capacity(rows.len());
    let mut lines = Vec::new();
    for row in &rows {
        if let Some(queue) = row.try_get::<Option<String>, _>(3)? {
            let (limited, priority) = (row.try_get(4)?, row.try_get(5)?);
            if row.try_get(6)? {
                lines.push(Line { queue, limited, priority, after: None });
            } else {
                segments.push(Segment { queue, limited, priority, after: None });
            }
        }
    }
    let any = suspects || !segments.is_empty() || !lines.is_empty();
    cursor.set_segments(segments, suspects, now);
    cursor.set_lines(lines, first.try_get(7)?, Instant::now());
    Ok(Discovered { now, limited, any })
}

async fn take_any(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
    start: Start,
    limited: bool,
) -> Sql<bool> {
    let wanted = (request.limit as usize).min(MAX_CLAIM) - jobs.len();
    let mut room = Room::new(request);
    if !limited && cursor.lines().is_empty() {
        let all = i16::MIN..=i16::MAX;
        return take(tx, request, cursor, jobs, start, all, wanted, &mut room, Commits::EachStatement).await;
    }
    let mut transaction = tx.begin_indexed().await?;
    let tx = &mut transaction.tx();
    if limited {
        room.lock(tx, request).await?;
    }
    let (before, groups_first, mut has_more) = (jobs.len(), cursor.groups_come_first(), false);
    for part in cursor.parts() {
        let left = wanted - (jobs.len() - before);
        if left > 0 {
            has_more |= take_part(tx, request, cursor, jobs, part, groups_first, left, &mut room).await?;
        }
    }
    room.store(tx, cursor).await?;
    transaction.commit().await?;
    jobs[before..].sort_by_key(Claimed::order);
    let full = jobs.len() - before >= wanted;
    cursor.set_full(full);
    if has_more && !full {
        cursor.resume_next();
    }
    Ok(full || has_more)
}

/// Takes up to `wanted` jobs of a part. Returns whether it stopped before the end of a line. Where jobs with and without a group have the same
/// priority, each side gets half, and what the other leaves.
#[expect(clippy::too_many_arguments, reason = "the arguments of the claim, and which part of it this is")]
async fn take_part(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
    part: Part,
    groups_first: bool,
    wanted: usize,
    room: &mut Room,
) -> Sql<bool> {
    let (before, mut has_more) = (jobs.len(), false);
    let level = match part {
        Part::Plain(priorities) => {
            let (start, commits) = (Start::Resume, Commits::Together);
            take(tx, request, cursor, jobs, start, priorities, wanted, room, commits).await?;
            return Ok(false);
        }
        Part::Groups(priority) => {
            return take_from_groups(tx, request, cursor, jobs, priority, wanted, room).await;
        }
        Part::Mixed(priority) => priority,
    };
    let half = wanted.div_ceil(2);
    for (of_groups, share) in [(groups_first, half), (!groups_first, wanted), (groups_first, wanted)] {
        let left = share.min(wanted - (jobs.len() - before).min(wanted));
        if left == 0 {
            continue;
        }
        if of_groups {
            has_more = take_from_groups(tx, request, cursor, jobs, level, left, room).await?;
        } else {
            let (start, commits) = (Start::Resume, Commits::Together);
            take(tx, request, cursor, jobs, start, level..=level, left, room, commits).await?;
        }
    }
    Ok(has_more)
}

/// When the statements of a claim are committed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commits {
    EachStatement,
    Together,
}

/// How many jobs a claim may still start in queues with a limit or a rate, and in all. The claim
/// that locks the row of such a queue counts the queue's running jobs and takes only the rest. The
/// count is a separate statement, so that it sees the commit of the previous claim. Other claims
/// skip the queue meanwhile.
pub(super) struct Room {
    queues: BTreeMap<String, QueueRoom>,
    /// How many jobs can start at once; a rate admits no more.
    pub(super) startable: usize,
}

struct QueueRoom {
    by_limit: Option<i64>,
    rate: Option<Rate>,
    paced_until: Option<DateTime<Utc>>,
    now: DateTime<Utc>,
    started: usize,
}

impl Room {
    fn new(request: &ClaimRequest) -> Self {
        Room { queues: BTreeMap::new(), startable: request.startable as usize }
    }

    async fn lock(&mut self, tx: &mut Tx<'_>, request: &ClaimRequest) -> Sql<()> {
        let locked =
            sqlx::query(tx.sql(LOCK_LIMITED)).bind(&request.queues).fetch_all(&mut *tx.connection).await?;
        for row in &locked {
            let room = QueueRoom {
                by_limit: row.try_get::<Option<i32>, _>(1)?.map(i64::from),
                rate: rate(row.try_get(2)?, row.try_get(3)?, row.try_get(4)?),
                paced_until: row.try_get(5)?,
                now: row.try_get(6)?,
                started: 0,
            };
            self.queues.insert(row.try_get(0)?, room);
        }
        let limited = self.queues.iter().filter(|(_, room)| room.by_limit.is_some());
        let names: Vec<&str> = limited.map(|(name, _)| name.as_str()).collect();
        let running = sqlx::query(tx.sql(COUNT_LIMITED)).bind(&names).fetch_all(&mut *tx.connection).await?;
        for row in &running {
            if let Some(room) = self.queues.get_mut(row.try_get::<&str, _>(0)?) {
                room.by_limit =
                    room.by_limit.zip(row.try_get(1)?).map(|(limit, running): (i64, i64)| limit - running);
            }
        }
        Ok(())
    }

    /// How many jobs the queue may still start; `None` if it has neither a limit nor a rate.
    pub(super) fn of(&self, queue: &str) -> Option<usize> {
        let room = self.queues.get(queue)?;
        let by_limit = room.by_limit.map_or(usize::MAX, |left| left.max(0) as usize);
        let by_rate = room.rate.map_or(usize::MAX, |rate| rate.room(room.paced_until, room.now));
        let left = by_limit.min(by_rate).saturating_sub(room.started);
        Some(if room.rate.is_some() { left.min(self.startable) } else { left })
    }

    /// Counts jobs that were claimed.
    pub(super) fn count(&mut self, jobs: &[Claimed]) {
        self.startable = self.startable.saturating_sub(jobs.len());
        for job in jobs {
            if let Some(room) = self.queues.get_mut(&*job.queue) {
                room.started += 1;
            }
        }
    }

    /// Stores the new state of the rates.
    async fn store(&self, tx: &mut Tx<'_>, cursor: &mut ClaimCursor) -> Sql<()> {
        let (mut names, mut paced) = (Vec::new(), Vec::new());
        for (name, room) in &self.queues {
            let Some(rate) = room.rate else { continue };
            let until = rate.paced_until(room.paced_until, room.now, room.started);
            let next = rate.next_start(Some(until), room.now);
            if next > room.now {
                cursor.note_next_start(next);
            }
            if room.started > 0 {
                names.push(name.as_str());
                paced.push(until);
            }
        }
        if !names.is_empty() {
            sqlx::query(tx.sql(PACE_QUEUES)).bind(&names).bind(&paced).execute(&mut *tx.connection).await?;
        }
        Ok(())
    }
}

/// Takes up to `wanted` jobs from the cursor's segments of these priorities. Returns whether more
/// jobs may be due.
#[expect(clippy::too_many_arguments, reason = "the arguments of the claim, and which part of it this is")]
async fn take(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
    start: Start,
    priorities: RangeInclusive<i16>,
    wanted: usize,
    room: &mut Room,
    commits: Commits,
) -> Sql<bool> {
    let before = jobs.len();
    let suspect = may_take_suspect(request, jobs);
    let segments: Vec<&Segment> =
        cursor.segments().iter().filter(|segment| priorities.contains(&segment.priority)).collect();
    if segments.is_empty() && !(suspect && cursor.saw_suspects()) {
        cursor.set_full(false);
        return Ok(false);
    }
    let single = match segments[..] {
        [segment] if room.queues.is_empty() && !(suspect && cursor.saw_suspects()) => Some(segment),
        _ => None,
    };
    let query = match single {
        Some(segment) => {
            let probe = start == Start::Probe;
            bind_take_from_one(statement(tx, cursor, TAKE_FROM_ONE), request, segment, wanted, probe)
        }
        None => {
            bind_take(statement(tx, cursor, TAKE), request, &segments, &priorities, room, wanted, suspect)
        }
    };
    let rows = query.fetch_all(&mut *tx.connection).await?;
    let Scan { at, chosen } = read_taken(&rows, request.worker, single, jobs)?;
    // The statement reads as many candidates as are wanted. If the limit of a queue left some of them out, it has
    // not read what comes after them.
    let is_cut = chosen < wanted && single.is_none() && candidates(&rows)? >= wanted;
    let missing = wanted - (jobs.len() - before);
    let mut full = chosen >= wanted;
    // Other transactions have locked some of the chosen rows, perhaps for long. If the
    // choice was limited, more jobs may be due after them, which must not wait.
    let limited = full || !room.queues.is_empty() || (suspect && cursor.saw_suspects());
    room.count(&jobs[before..]);
    if wanted - missing < chosen && limited {
        let first = jobs.len();
        let suspect = may_take_suspect(request, jobs);
        let statement = statement(tx, cursor, TAKE_UNLOCKED);
        let query = bind_take(statement, request, &segments, &priorities, room, missing, suspect);
        match query.fetch_all(&mut *tx.connection).await.map_err(Fault::from) {
            Ok(rows) => full = read_taken(&rows, request.worker, None, jobs)?.chosen >= missing,
            Err(fault) if fault.is_unsound_row() && commits == Commits::Together => return Err(fault),
            // The first statement is already stored; the next claim skips the row.
            Err(fault) if fault.is_unsound_row() => {
                skip_unsound(cursor, fault);
                full = true;
            }
            // A retry of both statements after a transient fault would lose the leases of the
            // first. So the fault is not retried; the caller finds the leases with
            // `Store::leases`.
            Err(fault) => return Err(Fault::Ours(fault.into())),
        }
        room.count(&jobs[first..]);
    }
    jobs[before..].sort_by_key(Claimed::order);
    let taken: Vec<Taken> = jobs[before..].iter().filter(|job| job.interruptions == 0).map(taken).collect();
    cursor.advance_in(priorities.clone(), &taken, full || is_cut, Some(at));
    let left = wanted.saturating_sub(jobs.len() - before);
    if is_cut && !full && jobs.len() > before {
        let start = Start::Resume;
        return Box::pin(take(tx, request, cursor, jobs, start, priorities, left, room, commits)).await;
    }
    Ok(full)
}

/// A claim statement, in the variant that the cursor requires.
pub(super) fn statement<'q>(tx: &Tx<'_>, cursor: &ClaimCursor, text: &'static str) -> Query<'q> {
    if cursor.skips_unsound(Instant::now()) {
        sqlx::query(AssertSqlSafe(tx.fill(&skipping_unsound(text))))
    } else {
        sqlx::query(tx.sql(text))
    }
}

/// Whether this call may take a suspect: one at a time, including one it already took.
pub(super) fn may_take_suspect(request: &ClaimRequest, jobs: &[Claimed]) -> bool {
    request.suspects == Suspects::One && jobs.iter().all(|job| job.interruptions == 0)
}

fn bind_take_from_one<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    segment: &Segment,
    wanted: usize,
    probe: bool,
) -> Query<'q> {
    let query = query
        .bind(segment.queue.clone())
        .bind(segment.priority)
        .bind(segment.after.map(|after| after.run_at))
        .bind(segment.after.map(|after| after.id));
    bind_filter(query, request).bind(request.worker.0).bind(wanted as i64).bind(probe)
}

/// Binds the three parameters that decide which jobs the worker takes.
pub(super) fn bind_filter<'q>(query: Query<'q>, request: &ClaimRequest) -> Query<'q> {
    query
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
}

/// Binds the thirteen parameters of [`TAKE`] and [`TAKE_UNLOCKED`].
fn bind_take<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    segments: &[&Segment],
    priorities: &RangeInclusive<i16>,
    room: &Room,
    wanted: usize,
    suspect: bool,
) -> Query<'q> {
    let cap = |queue: &String| room.of(queue).map(|left| i32::try_from(left).unwrap_or(i32::MAX));
    let segments = segments.iter();
    let query = query
        .bind(request.queues.clone())
        .bind(request.queues.iter().map(cap).collect::<Vec<_>>())
        .bind(request.worker.0)
        .bind(segments.clone().map(|segment| segment.queue.clone()).collect::<Vec<_>>())
        .bind(segments.clone().map(|segment| segment.priority).collect::<Vec<_>>())
        .bind(segments.clone().map(|segment| segment.after.map(|after| after.run_at)).collect::<Vec<_>>())
        .bind(segments.map(|segment| segment.after.map(|after| after.id)).collect::<Vec<_>>());
    bind_filter(query, request)
        .bind(wanted as i32)
        .bind(i32::from(suspect))
        .bind(request.lowest_priority().max(*priorities.start()))
}

fn taken(job: &Claimed) -> Taken<'_> {
    Taken {
        queue: &job.queue,
        priority: job.priority,
        at: Position { run_at: job.run_at, id: job.lease.id.0 },
    }
}

/// What a claim statement returns in addition to the jobs.
struct Scan {
    /// The engine's time of the statement.
    at: DateTime<Utc>,
    /// The number of jobs chosen, including those that others had locked.
    chosen: usize,
}

fn read_taken(
    rows: &[PgRow],
    worker: WorkerId,
    single: Option<&Segment>,
    jobs: &mut Vec<Claimed>,
) -> Sql<Scan> {
    let first = rows.first().ok_or_else(|| Error::internal("a claim statement returned no row"))?;
    let mut reader = Reader::new(worker, first.try_get(0)?, single);
    let before = jobs.len();
    jobs.reserve(rows.len());
    for row in rows {
        if let Some(id) = row.try_get::<Option<Uuid>, _>(1)? {
            jobs.push(reader.read(row, JobId(id))?);
        }
    }
    let chosen = match single {
        // This statement chooses and locks in one step.
        Some(_) => jobs.len() - before,
        None => first.try_get::<i64, _>(15)? as usize,
    };
    Ok(Scan { at: reader.claimed_at, chosen })
}

/// How many due jobs the statement read, before the limits of their queues.
fn candidates(rows: &[PgRow]) -> Sql<usize> {
    let first = rows.first().ok_or_else(|| Error::internal("a claim statement returned no row"))?;
    Ok(first.try_get::<i64, _>(16)? as usize)
}

/// Reads the rows of a claim. Kinds and queues that repeat from row to row share memory.
pub(super) struct Reader {
    worker: WorkerId,
    claimed_at: DateTime<Utc>,
    /// The queue and priority of a claim from a single segment, whose rows lack them.
    single: Option<(Arc<str>, i16)>,
    queue: Arc<str>,
    kind: Arc<str>,
}

impl Reader {
    pub(super) fn new(worker: WorkerId, claimed_at: DateTime<Utc>, single: Option<&Segment>) -> Self {
        let single = single.map(|segment| (Arc::from(segment.queue.as_str()), segment.priority));
        Reader { worker, claimed_at, single, queue: "".into(), kind: "".into() }
    }

    pub(super) fn read(&mut self, row: &PgRow, id: JobId) -> Sql<Claimed> {
        let (queue, priority, interruptions) = match &self.single {
            Some((queue, priority)) => (queue.clone(), *priority, 0),
            None => {
                let queue = shared(&mut self.queue, row.try_get(12)?);
                (queue, row.try_get(13)?, row.try_get::<i16, _>(14)? as u16)
            }
        };
        Ok(Claimed {
            kind: shared(&mut self.kind, row.try_get(2)?),
            queue,
            priority,
            attempt: row.try_get::<i32, _>(3)? as u16,
            max_attempts: row.try_get::<i16, _>(4)? as u16,
            interruptions,
            lease: Lease { id, lease_no: row.try_get(5)?, worker: self.worker },
            timeout: row.try_get::<Option<i64>, _>(6)?.map(|ms| Duration::from_millis(ms as u64)),
            flags: row
                .try_get::<Option<Vec<Option<String>>>, _>(7)?
                .unwrap_or_default()
                .into_iter()
                .flatten()
                .collect(),
            run_at: row.try_get(8)?,
            claimed_at: self.claimed_at,
            payload: row.try_get(9)?,
            // The claim is committed: one bad row must not affect the others.
            options: Options::from_stored(row.try_get(10)?).unwrap_or_else(|error| {
                tracing::error!(job_id = %id, %error, "cannot read the options of the job; running it without them");
                Options::default()
            }),
            group: None,
            gated: false,
            flow: row.try_get::<Option<uuid::Uuid>, _>(11)?.map(FlowId),
        })
    }
}

impl PostgresStore {
    /// Returns the plan, with costs and buffers, of this claim from the head. Runs the
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
    discover(tx, request, &mut cursor).await?;
    let query = sqlx::query(AssertSqlSafe(format!("explain (analyze, buffers, settings) {}", tx.fill(TAKE))));
    let segments: Vec<&Segment> = cursor.segments().iter().collect();
    let (all, room) = (i16::MIN..=i16::MAX, Room::new(request));
    let query = bind_take(query, request, &segments, &all, &room, request.limit as usize, true);
    let rows = query.fetch_all(&mut *tx.connection).await?;
    transaction.rollback().await?;
    let lines: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>()?;
    Ok(lines.join("\n"))
}
