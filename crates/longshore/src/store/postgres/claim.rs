//! Claim: moves due jobs from `ready` to `running`, in order, never one job twice.
//! The statements are in `claim_sql`.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row};
use uuid::Uuid;

use super::PostgresStore;
use super::claim_sql::{COUNT_LIMITED, DISCOVER, LOCK_LIMITED, MAX_CLAIM, TAKE, TAKE_FREE, TAKE_FROM_ONE};
use super::tx::{Fault, Query, Sql, Tx, translate};
use crate::enqueue::Options;
use crate::error::{Error, Result};
use crate::job::{JobId, WorkerId};
use crate::store::cursor::{ClaimCursor, Place, Position, Start, Taken};
use crate::store::{ClaimRequest, Claimed, Claims, Lease, Suspects, shared};

pub(super) async fn claim(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Claims> {
    let wanted = (request.limit as usize).min(MAX_CLAIM);
    let mut jobs = Vec::new();
    if wanted == 0 || request.queues.is_empty() {
        return Ok(Claims { jobs, more: false });
    }
    let start = cursor.start(request, Instant::now());
    if start != Start::Head {
        let limited = cursor.places().iter().any(|place| place.limited);
        let more = take_any(tx, request, cursor, &mut jobs, start, limited).await?;
        let head = cursor.may_scan_head(Instant::now());
        // What was found need not wait for another look at the head.
        if more || !jobs.is_empty() || !head {
            return Ok(Claims { jobs, more: more || head });
        }
    }
    let more = claim_from_head(tx, request, cursor, &mut jobs).await?;
    Ok(Claims { jobs, more })
}

async fn claim_from_head(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
) -> Sql<bool> {
    let began = Instant::now();
    let found = discover(tx, request, cursor).await?;
    let mut more = false;
    if found.any {
        more = take_any(tx, request, cursor, jobs, Start::Head, found.limited).await?;
    } else {
        cursor.advance(&[], false, Some(found.now));
    }
    cursor.head_scanned(began, Instant::now());
    Ok(more)
}

struct Discovered {
    now: DateTime<Utc>,
    limited: bool,
    /// Whether anything waits at all.
    any: bool,
}

async fn discover(tx: &mut Tx<'_>, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Sql<Discovered> {
    let rows = sqlx::query(tx.sql(DISCOVER)).bind(&request.queues).fetch_all(&mut *tx.connection).await?;
    let first = rows.first().ok_or_else(|| Error::internal("the discovery of queues gave no answer"))?;
    let (now, suspects, limited) = (first.try_get(0)?, first.try_get(1)?, first.try_get(2)?);
    let mut places = Vec::with_capacity(rows.len());
    for row in &rows {
        if let Some(queue) = row.try_get::<Option<String>, _>(3)? {
            places.push(Place { queue, limited: row.try_get(4)?, priority: row.try_get(5)?, after: None });
        }
    }
    let any = suspects || !places.is_empty();
    cursor.set_places(places, suspects, now);
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
    match limited {
        false => take(tx, request, cursor, jobs, start, Vec::new()).await,
        true => take_limited(tx, request, cursor, jobs, start).await,
    }
}

/// Limited queues are never overdrawn: whoever holds the queue's row counts
/// what runs, in a statement of its own that sees the last holder's
/// commit, and takes the rest. Others pass the queue over meanwhile.
async fn take_limited(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
    start: Start,
) -> Sql<bool> {
    let mut transaction = tx.begin().await?;
    let tx = &mut transaction.tx();
    let locked =
        sqlx::query(tx.sql(LOCK_LIMITED)).bind(&request.queues).fetch_all(&mut *tx.connection).await?;
    let mut free = BTreeMap::<String, i64>::new();
    for row in &locked {
        free.insert(row.try_get(0)?, row.try_get::<i32, _>(1)?.into());
    }
    let names: Vec<&str> = free.keys().map(String::as_str).collect();
    let running = sqlx::query(tx.sql(COUNT_LIMITED)).bind(&names).fetch_all(&mut *tx.connection).await?;
    for row in &running {
        if let Some(left) = free.get_mut(row.try_get::<&str, _>(0)?) {
            *left -= row.try_get::<i64, _>(1)?;
        }
    }
    let caps = free.into_iter().map(|(queue, left)| (queue, left.clamp(0, i32::MAX.into()) as i32)).collect();
    let more = take(tx, request, cursor, jobs, start, caps).await?;
    transaction.commit().await?;
    Ok(more)
}

/// Takes what the limit leaves room for from the cursor's places; says
/// whether there may be more.
async fn take(
    tx: &mut Tx<'_>,
    request: &ClaimRequest,
    cursor: &mut ClaimCursor,
    jobs: &mut Vec<Claimed>,
    start: Start,
    mut caps: Vec<(String, i32)>,
) -> Sql<bool> {
    let before = jobs.len();
    let wanted = (request.limit as usize).min(MAX_CLAIM) - before;
    let suspect = may_take_suspect(request, jobs);
    let single = match cursor.places() {
        [place] if caps.is_empty() && !(suspect && cursor.saw_suspects()) => Some(place),
        _ => None,
    };
    let query = match single {
        Some(place) => {
            let probe = start == Start::Probe;
            bind_take_from_one(sqlx::query(tx.sql(TAKE_FROM_ONE)), request, place, wanted, probe)
        }
        None => bind_take(sqlx::query(tx.sql(TAKE)), request, cursor, &caps, wanted, suspect),
    };
    let rows = query.fetch_all(&mut *tx.connection).await?;
    let Looked { at, chosen } = read_taken(&rows, request.worker, single, jobs)?;
    let missing = wanted - (jobs.len() - before);
    let mut full = chosen >= wanted;
    // Others hold some of what was chosen, perhaps for long. If that is not
    // all there is, what comes after it must not wait for them.
    let cut = full || !caps.is_empty() || (suspect && cursor.saw_suspects());
    if wanted - missing < chosen && cut {
        for (queue, left) in &mut caps {
            *left -= jobs[before..].iter().filter(|job| *job.queue == **queue).count() as i32;
        }
        let suspect = may_take_suspect(request, jobs);
        let query = bind_take(sqlx::query(tx.sql(TAKE_FREE)), request, cursor, &caps, missing, suspect);
        // The first step is stored: another round of both, after a fault that
        // may pass, would forget its leases. The caller asks for them.
        let rows =
            query.fetch_all(&mut *tx.connection).await.map_err(|error| Fault::Ours(translate(error)))?;
        full = read_taken(&rows, request.worker, None, jobs)?.chosen >= missing;
    }
    jobs[before..].sort_by_key(|job| (Reverse(job.priority), job.run_at, job.lease.id));
    let taken: Vec<Taken> = jobs[before..].iter().filter(|job| job.interruptions == 0).map(taken).collect();
    cursor.advance(&taken, full, Some(at));
    Ok(full)
}

/// One suspect at a time, counting one that this call took already.
fn may_take_suspect(request: &ClaimRequest, jobs: &[Claimed]) -> bool {
    request.suspects == Suspects::One && jobs.iter().all(|job| job.interruptions == 0)
}

fn bind_take_from_one<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    place: &Place,
    wanted: usize,
    probe: bool,
) -> Query<'q> {
    query
        .bind(place.queue.clone())
        .bind(place.priority)
        .bind(place.after.map(|after| after.run_at))
        .bind(place.after.map(|after| after.id))
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
        .bind(request.worker.0)
        .bind(wanted as i64)
        .bind(probe)
}

/// The twelve parameters of [`TAKE`] and [`TAKE_FREE`].
fn bind_take<'q>(
    query: Query<'q>,
    request: &ClaimRequest,
    cursor: &ClaimCursor,
    caps: &[(String, i32)],
    wanted: usize,
    suspect: bool,
) -> Query<'q> {
    let cap = |queue: &String| caps.iter().find(|(name, _)| name == queue).map(|(_, left)| *left);
    let places = cursor.places().iter();
    query
        .bind(request.queues.clone())
        .bind(request.queues.iter().map(cap).collect::<Vec<_>>())
        .bind(request.worker.0)
        .bind(places.clone().map(|place| place.queue.clone()).collect::<Vec<_>>())
        .bind(places.clone().map(|place| place.priority).collect::<Vec<_>>())
        .bind(places.clone().map(|place| place.after.map(|after| after.run_at)).collect::<Vec<_>>())
        .bind(places.map(|place| place.after.map(|after| after.id)).collect::<Vec<_>>())
        .bind(request.kinds.clone())
        .bind((!request.accept_flags.is_empty()).then(|| request.accept_flags.clone()))
        .bind((!request.forbid_flags.is_empty()).then(|| request.forbid_flags.clone()))
        .bind(wanted as i32)
        .bind(i32::from(suspect))
}

fn taken(job: &Claimed) -> Taken<'_> {
    Taken {
        queue: &job.queue,
        priority: job.priority,
        at: Position { run_at: job.run_at, id: job.lease.id.0 },
    }
}

/// What a claim statement says beside the jobs.
struct Looked {
    at: DateTime<Utc>,
    /// How many were there to take, whether or not others had locked them.
    chosen: usize,
}

fn read_taken(
    rows: &[PgRow],
    worker: WorkerId,
    single: Option<&Place>,
    jobs: &mut Vec<Claimed>,
) -> Sql<Looked> {
    let first = rows.first().ok_or_else(|| Error::internal("a claim gave no answer"))?;
    let mut reader = Reader::new(worker, first.try_get(0)?, single);
    let before = jobs.len();
    jobs.reserve(rows.len());
    for row in rows {
        if let Some(id) = row.try_get::<Option<Uuid>, _>(1)? {
            jobs.push(reader.read(row, JobId(id))?);
        }
    }
    let chosen = match single {
        // Looks and locks in one.
        Some(_) => jobs.len() - before,
        None => first.try_get::<i64, _>(14)? as usize,
    };
    Ok(Looked { at: reader.claimed_at, chosen })
}

/// Reads the rows of a claim. Names that repeat from row to row are shared.
pub(super) struct Reader {
    worker: WorkerId,
    claimed_at: DateTime<Utc>,
    /// Queue and priority, where all rows have the same.
    single: Option<(Arc<str>, i16)>,
    queue: Arc<str>,
    kind: Arc<str>,
}

impl Reader {
    pub(super) fn new(worker: WorkerId, claimed_at: DateTime<Utc>, single: Option<&Place>) -> Self {
        let single = single.map(|place| (Arc::from(place.queue.as_str()), place.priority));
        Reader { worker, claimed_at, single, queue: "".into(), kind: "".into() }
    }

    pub(super) fn read(&mut self, row: &PgRow, id: JobId) -> Sql<Claimed> {
        let (queue, priority, interruptions) = match &self.single {
            Some((queue, priority)) => (queue.clone(), *priority, 0),
            None => {
                let queue = shared(&mut self.queue, row.try_get(11)?);
                (queue, row.try_get(12)?, row.try_get::<i16, _>(13)? as u16)
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
            // The claim is committed: one bad row must not take its neighbours with it.
            options: Options::from_stored(row.try_get(10)?).unwrap_or_else(|error| {
                tracing::error!(job_id = %id, %error, "running the job without its options");
                Options::default()
            }),
        })
    }
}

impl PostgresStore {
    /// The plan, with costs and buffers, by which Postgres would run this claim now
    /// from the head. Runs the claim and rolls it back. For benchmarks and tests.
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
    let query = bind_take(query, request, &cursor, &[], request.limit as usize, true);
    let rows = query.fetch_all(&mut *tx.connection).await?;
    transaction.rollback().await?;
    let lines: Vec<String> = rows.iter().map(|row| row.try_get(0)).collect::<sqlx::Result<_>>()?;
    Ok(lines.join("\n"))
}
