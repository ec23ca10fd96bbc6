//! A worker asks for jobs: registered on its first call, given what is due, or
//! kept waiting until something is.

use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::sessions::Session;
use super::*;
use crate::api::extract::{Body, check_range, duration, optional_objects};
use crate::api::problem::ProblemBody;
use crate::client::Client;
use crate::enqueue::DEFAULT_QUEUE;
use crate::store::{ClaimCursor, ClaimRequest, Claimed, NewKind, NewWorker, Suspects};

/// How many jobs one call leases at most.
const MAX_LEASES: u32 = 100;
/// How long a call waits for work at most; shorter than a request may take.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// How soon a waiting call looks for work that nobody announced.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// A call is never longer under way than this before it arrives.
const MAX_DELIVERY_TIME: Duration = Duration::from_secs(2);
/// The threshold of a worker that names none, and the least and most it may name.
const STALE_AFTER: Duration = Duration::from_secs(60);
const MIN_STALE_AFTER: Duration = Duration::from_secs(3);
const MAX_STALE_AFTER: Duration = Duration::from_secs(3600);

/// What a worker asks for.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct LeaseRequest {
    /// As the first call returned it; absent on the first.
    worker_id: Option<Uuid>,
    /// A name for people; read on the first call.
    #[schema(min_length = 1, max_length = 128)]
    name: Option<String>,
    /// `["default"]` if absent.
    #[schema(min_items = 1, max_items = 64)]
    queues: Option<Vec<String>>,
    /// The kinds it handles; any if absent.
    #[schema(max_items = 1000)]
    kinds: Option<Vec<String>>,
    /// How many jobs at most, 1 by default.
    #[schema(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// How long to wait for the first one, up to 20; 0 by default.
    #[schema(minimum = 0, maximum = 20)]
    wait_seconds: Option<f64>,
    /// Without a call for this long the worker is dead and its jobs are given
    /// to others; read on the first call. 60 by default.
    #[schema(minimum = 3, maximum = 3600)]
    stale_after_seconds: Option<f64>,
    /// The leases it still holds. What it was given more than two seconds before
    /// this call and does not name is given back: the answer was lost.
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(max_items = 1000)]
    held: Option<Vec<LeaseRef>>,
}

/// What a worker gets.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LeaseResponse {
    /// To be named in every further call.
    worker_id: Uuid,
    /// Call, or renew, at least this often.
    renew_within_seconds: f64,
    /// In the order in which they should start; empty if none was due.
    jobs: Vec<LeasedJob>,
}

/// A leased job: all that is needed to run it.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LeasedJob {
    id: Uuid,
    /// To be named when it is renewed or settled.
    lease_no: i32,
    kind: String,
    queue: String,
    priority: i16,
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
    /// Which attempt this is; 1 is the first.
    attempt: u16,
    max_attempts: u16,
    /// How often a worker died holding it.
    interruptions: u16,
    /// How long this attempt may take; null means for ever.
    #[schema(required)]
    timeout_seconds: Option<f64>,
    flags: Vec<String>,
    tags: Vec<String>,
    /// W3C trace context of the enqueuer.
    #[schema(required)]
    traceparent: Option<String>,
    run_at: DateTime<Utc>,
    claimed_at: DateTime<Utc>,
}

impl From<Claimed> for LeasedJob {
    fn from(job: Claimed) -> Self {
        LeasedJob {
            id: job.lease.id.0,
            lease_no: job.lease.lease_no,
            kind: job.kind().into(),
            queue: job.queue().into(),
            priority: job.priority(),
            attempt: job.attempt(),
            max_attempts: job.max_attempts(),
            interruptions: job.interruptions(),
            timeout_seconds: job.timeout().map(|timeout| timeout.as_secs_f64()),
            flags: job.flags().to_vec(),
            tags: job.tags().to_vec(),
            traceparent: job.trace().map(str::to_owned),
            run_at: job.run_at(),
            claimed_at: job.claimed_at(),
            // Stored as JSON.
            payload: RawValue::from_string(job.payload).unwrap_or_default(),
        }
    }
}

/// Leases due jobs, waiting for some if asked to.
#[utoipa::path(
    post,
    path = "/leases",
    tag = "leases",
    request_body = LeaseRequest,
    responses(
        (status = 200, description = "Jobs to run, or none.", body = LeaseResponse),
        (status = 409, description = "The worker was declared dead: stop what it runs and call without `worker_id`.",
         body = ProblemBody),
        (status = 422, description = "A value out of range.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn lease(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<LeaseRequest>,
) -> ApiResult<Json<LeaseResponse>> {
    let arrived = tokio::time::Instant::now();
    let queues = body.queues.clone().unwrap_or_else(|| vec![DEFAULT_QUEUE.into()]);
    if queues.is_empty() || queues.len() > 64 {
        return Err(Problem::validation("queues: name 1 to 64, or leave it out for `default`"));
    }
    for queue in &queues {
        caller.may_use(queue)?;
    }
    check_count("kinds", body.kinds.as_ref().map_or(0, Vec::len))?;
    check_count("held", body.held.as_ref().map_or(0, Vec::len))?;
    check_names("queues", &queues)?;
    check_names("kinds", body.kinds.as_deref().unwrap_or_default())?;
    let limit = check_range("limit", body.limit.unwrap_or(1), MAX_LEASES)?;
    // Well within the time that a request has.
    let longest = MAX_WAIT.min(server.timeout * 2 / 3);
    let wait = duration("wait_seconds", body.wait_seconds.unwrap_or(0.0))?.min(longest);
    let stale_after = stale_after(body.stale_after_seconds)?;
    let worker = match body.worker_id {
        Some(id) => {
            check_worker_access(&server, &caller, WorkerId(id)).await?;
            heartbeat(&server, WorkerId(id)).await?
        }
        None => register(&server, &body, &queues, stale_after, WorkerId::new()).await?,
    };
    let session = server.sessions.of(worker);
    // One call of a worker at a time; who waits for another of its own waits no
    // longer than it asked to.
    let Ok(mut session) = tokio::time::timeout_at(arrived + wait, session.lock()).await else {
        let renew_within_seconds = (registered_stale_after(&server, worker).await? / 4).as_secs_f64();
        return Ok(Json(LeaseResponse { worker_id: worker.0, renew_within_seconds, jobs: Vec::new() }));
    };
    // What it said when it registered holds, not what it says now.
    let stale_after = match (body.worker_id, session.stale_after) {
        (None, _) => stale_after,
        (Some(_), Some(registered)) => registered,
        (Some(_), None) => registered_stale_after(&server, worker).await?,
    };
    session.stale_after = Some(stale_after);
    if let Some(held) = &body.held {
        let held: Vec<Lease> = held.iter().map(|lease| lease.of(worker)).collect();
        // Another call may have been answered since this one was written.
        let since = arrived.elapsed() + MAX_DELIVERY_TIME;
        release_unknown(&server.client, worker, &held, since).await?;
    }
    let filter = (queues, body.kinds.clone());
    if session.filter != filter {
        if body.worker_id.is_some() {
            // What it takes is shown to operators, and explains why jobs wait.
            register(&server, &body, &filter.0, stale_after, worker).await?;
        }
        *session = Session {
            filter,
            held: std::mem::take(&mut session.held),
            stale_after: session.stale_after,
            ..Session::default()
        };
    }
    let renew_within = stale_after / 4;
    let found = wait_for_jobs(&server, &mut session, worker, limit, arrived + wait, renew_within).await?;
    Ok(Json(LeaseResponse {
        worker_id: worker.0,
        renew_within_seconds: renew_within.as_secs_f64(),
        jobs: found.into_delivered().into_iter().map(LeasedJob::from).collect(),
    }))
}

fn stale_after(seconds: Option<f64>) -> ApiResult<Duration> {
    let Some(seconds) = seconds else { return Ok(STALE_AFTER) };
    let requested = duration("stale_after_seconds", seconds)?;
    if (MIN_STALE_AFTER..=MAX_STALE_AFTER).contains(&requested) {
        Ok(requested)
    } else {
        Err(Problem::validation(format!(
            "stale_after_seconds: {seconds} is out of range; use {} to {}",
            MIN_STALE_AFTER.as_secs(),
            MAX_STALE_AFTER.as_secs()
        )))
    }
}

fn check_names(field: &'static str, names: &[String]) -> ApiResult<()> {
    for name in names {
        crate::enqueue::check_name(field, name)?;
    }
    Ok(())
}

async fn register(
    server: &Server,
    body: &LeaseRequest,
    queues: &[String],
    stale_after: Duration,
    id: WorkerId,
) -> ApiResult<WorkerId> {
    let name = body.name.clone().unwrap_or_else(|| "http".into());
    check_names("name", std::slice::from_ref(&name))?;
    let worker = NewWorker {
        id,
        queues: queues.to_vec(),
        kinds: body.kinds.clone(),
        concurrency: body.limit.unwrap_or(1),
        stale_after,
        ..NewWorker::new(name)
    };
    let client = &server.client;
    client.register(&worker).await?;
    if let Some(kinds) = &body.kinds {
        let kinds: Vec<NewKind> = kinds.iter().map(NewKind::new).collect();
        client.put_kinds(&kinds).await?;
        server.kinds.invalidate();
    }
    Ok(id)
}

/// Leases that the caller has not been told of. If it goes before it is, they are
/// given back.
struct Undelivered {
    client: Client,
    jobs: Vec<Claimed>,
}

impl Undelivered {
    fn into_delivered(mut self) -> Vec<Claimed> {
        std::mem::take(&mut self.jobs)
    }
}

impl Drop for Undelivered {
    fn drop(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let leases: Vec<Lease> = self.jobs.iter().map(Claimed::lease).collect();
        let client = self.client.clone();
        tokio::spawn(async move {
            if let Err(error) = client.release(&leases).await {
                tracing::warn!(%error, jobs = leases.len(), "could not release the jobs of a disconnected caller; recovery will");
            }
        });
    }
}

/// The threshold of a worker that registered with another server, or long ago.
async fn registered_stale_after(server: &Server, worker: WorkerId) -> ApiResult<Duration> {
    let workers = server.client.workers(None).await?;
    let found = workers.into_iter().find(|record| record.id == worker);
    found.map(|record| record.stale_after).ok_or_else(|| dead_worker(server, worker))
}

async fn wait_for_jobs(
    server: &Server,
    session: &mut Session,
    worker: WorkerId,
    limit: u32,
    until: tokio::time::Instant,
    beat_every: Duration,
) -> ApiResult<Undelivered> {
    let client = &server.client;
    let mut beaten = Instant::now();
    let mut suspects = suspect_limit(client, session, worker).await?;
    // Before the first look: a job enqueued in between would wait otherwise.
    let mut wakeups =
        if until > tokio::time::Instant::now() { Some(client.subscribe().await?) } else { None };
    loop {
        let began = Instant::now();
        let mut found = claim(client, session, worker, limit, suspects).await?;
        if found.jobs.is_empty() && session.cursor.head_due(began, false).is_some() {
            // What was given back may lie behind the cursor, and nobody looks
            // again soon.
            session.cursor = ClaimCursor::default();
            found = claim(client, session, worker, limit, suspects).await?;
        }
        let Some(wakeups) = wakeups.as_mut().filter(|_| found.jobs.is_empty()) else { return Ok(found) };
        let look = tokio::time::Instant::now() + POLL_INTERVAL;
        loop {
            tokio::select! {
                queue = wakeups.next() => {
                    if queue.is_none_or(|queue| session.filter.0.contains(&queue)) {
                        session.cursor.announce();
                        break;
                    }
                }
                () = tokio::time::sleep_until(look.min(until)) => break,
                () = server.ends() => return Ok(found),
            }
        }
        if tokio::time::Instant::now() >= until {
            return Ok(found);
        }
        if suspects == Suspects::Leave {
            suspects = suspect_limit(client, session, worker).await?;
        }
        // Who waits here cannot renew: on its first call it has no id yet.
        if beaten.elapsed() >= beat_every {
            heartbeat(server, worker).await?;
            beaten = Instant::now();
        }
    }
}

/// Whether one that was interrupted before may be given: not while the worker holds
/// one, from whichever server.
async fn suspect_limit(client: &Client, session: &mut Session, worker: WorkerId) -> ApiResult<Suspects> {
    let leases = client.leases(worker).await?;
    session.held.retain(|lease, _| leases.contains(lease));
    let unknown: Vec<Lease> = leases.into_iter().filter(|lease| !session.held.contains_key(lease)).collect();
    if !unknown.is_empty() {
        let claims = client.claims(&unknown).await?;
        session.held.extend(claims.iter().flatten().map(lease_and_suspect));
    }
    Ok(if session.held.values().any(|is_suspect| *is_suspect) { Suspects::Leave } else { Suspects::One })
}

/// A lease, and whether its job was interrupted before.
fn lease_and_suspect(job: &Claimed) -> (Lease, bool) {
    (job.lease(), job.interruptions() > 0)
}

async fn claim(
    client: &Client,
    session: &mut Session,
    worker: WorkerId,
    limit: u32,
    suspects: Suspects,
) -> ApiResult<Undelivered> {
    let (queues, kinds) = session.filter.clone();
    let request = ClaimRequest { queues, kinds, suspects, ..ClaimRequest::new(worker, limit) };
    let claims = client.claim(&request, &mut session.cursor).await?;
    let found = Undelivered { client: client.clone(), jobs: claims.jobs };
    session.held.extend(found.jobs.iter().map(lease_and_suspect));
    // It begins as soon as the answer arrives, and nobody says so.
    if let Some(suspect) = found.jobs.iter().find(|job| job.interruptions() > 0) {
        let _ = client.mark_started(&suspect.lease()).await?;
    }
    Ok(found)
}
