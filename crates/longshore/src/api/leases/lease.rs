//! Leases due jobs to HTTP workers: registers a worker on its first call, claims for
//! it, and waits for work if the worker requests it.

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
use crate::enqueue::{DEFAULT_QUEUE, check_queue};
use crate::store::{
    CancelNotices, ClaimCursor, ClaimRequest, Claimed, NewKind, NewWorker, Suspects, Wakeups,
};

/// The maximum number of jobs that one call leases.
const MAX_LEASES: u32 = 100;
/// The longest time that a call waits for work; shorter than the request timeout.
const MAX_WAIT: Duration = Duration::from_secs(20);
/// How soon a waiting call polls for work without a wake-up. The interval doubles up to the
/// second value, as in a Rust worker.
/// The minimum pause before the next claim if a rate lets a job start.
const MIN_RATE_PAUSE: Duration = Duration::from_millis(1);
const POLL_INTERVAL: Duration = Duration::from_millis(500);
const MAX_POLL_INTERVAL: Duration = Duration::from_secs(2);
/// The longest time that a call is assumed to spend between the worker and the
/// server.
const MAX_DELIVERY_TIME: Duration = Duration::from_secs(2);
/// The default and the range of `stale_after_seconds`.
const STALE_AFTER: Duration = Duration::from_secs(60);
const MIN_STALE_AFTER: Duration = Duration::from_secs(3);
const MAX_STALE_AFTER: Duration = Duration::from_secs(3600);

/// A worker's request for jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct LeaseRequest {
    /// The id that the first call returned; absent on the first call.
    worker_id: Option<Uuid>,
    /// A display name. Only the first call sets it.
    #[schema(min_length = 1, max_length = 128)]
    name: Option<String>,
    /// The queues to lease from; `["default"]` if absent.
    #[schema(min_items = 1, max_items = 64)]
    queues: Option<Vec<String>>,
    /// The kinds that the worker handles; any if absent.
    #[schema(max_items = 1000)]
    kinds: Option<Vec<String>>,
    /// The maximum number of jobs to lease; 1 by default.
    #[schema(minimum = 1, maximum = 100)]
    limit: Option<u32>,
    /// How long to wait for the first job or for a cancel, up to 20; 0 by default.
    #[schema(minimum = 0, maximum = 20)]
    wait_seconds: Option<f64>,
    /// Without a call for this long, the worker is declared dead and its jobs are
    /// recovered. Only the first call sets it. 60 by default.
    #[schema(minimum = 3, maximum = 3600)]
    stale_after_seconds: Option<f64>,
    /// The leases the worker still holds. A lease that it got more than two seconds
    /// before this call and does not list is released, because the response that
    /// contained it was lost.
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(max_items = 1000)]
    held: Option<Vec<LeaseRef>>,
}

/// The leased jobs.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LeaseResponse {
    /// The worker's id, to send in every further call.
    worker_id: Uuid,
    /// Renew or make another call at least this often.
    renew_within_seconds: f64,
    /// The jobs, in the order in which to start them; empty if none was due.
    jobs: Vec<LeasedJob>,
    /// Leases of this worker whose jobs are to be cancelled. Stop these jobs and settle
    /// them as `cancelled`. A lease is listed until it is settled, but only ends the wait
    /// of a call once.
    cancel: Vec<LeaseRef>,
}

/// A leased job with everything needed to run it.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LeasedJob {
    id: Uuid,
    /// The number of the lease, to send when renewing or settling it.
    lease_no: i32,
    kind: String,
    queue: String,
    priority: i16,
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
    /// The number of this attempt, from 1.
    attempt: u16,
    max_attempts: u16,
    /// How often a worker died while it held this job.
    interruptions: u16,
    /// How long this attempt may take; null means no limit.
    #[schema(required)]
    timeout_seconds: Option<f64>,
    /// The flow that the job is a member of.
    #[schema(required)]
    flow: Option<Uuid>,
    flags: Vec<String>,
    tags: Vec<String>,
    /// The W3C trace context of the enqueue.
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
            flow: job.flow().map(|flow| flow.0),
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

/// Leases due jobs. Waits up to `wait_seconds` for the first one, or until a job of this
/// worker is cancelled.
#[utoipa::path(
    post,
    path = "/leases",
    operation_id = "lease_jobs",
    tag = "leases",
    request_body(content = LeaseRequest, example = json!({
        "name": "my-worker",
        "queues": ["greetings"],
        "kinds": ["greet"],
        "limit": 10,
    })),
    responses(
        (status = 200, description = "The leased jobs; none if no job was due.", body = LeaseResponse),
        (status = 409, description = "The worker was declared dead. Stop its jobs and call again without `worker_id`.",
         body = ProblemBody),
        (status = 422, description = "A value is out of range.", body = ProblemBody),
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
        return Err(Problem::validation("queues: list 1 to 64 queues, or leave it out for `default`"));
    }
    for queue in &queues {
        caller.may_use(queue)?;
    }
    check_count("kinds", body.kinds.as_ref().map_or(0, Vec::len))?;
    check_count("held", body.held.as_ref().map_or(0, Vec::len))?;
    for queue in &queues {
        check_queue("queues", queue)?;
    }
    check_names("kinds", body.kinds.as_deref().unwrap_or_default())?;
    let limit = check_range("limit", body.limit.unwrap_or(1), MAX_LEASES)?;
    // Leave enough of the request timeout for the claim itself.
    let max_wait = MAX_WAIT.min(server.timeout * 2 / 3);
    let wait = duration("wait_seconds", body.wait_seconds.unwrap_or(0.0))?.min(max_wait);
    let stale_after = stale_after(body.stale_after_seconds)?;
    let worker = match body.worker_id {
        Some(id) => {
            check_worker_access(&server, &caller, WorkerId(id)).await?;
            heartbeat(&server, WorkerId(id)).await?
        }
        None => register(&server, &body, &queues, stale_after, WorkerId::new()).await?,
    };
    let session = server.sessions.of(worker);
    // A worker has one claim at a time. A second call waits for the first, but no
    // longer than its own `wait_seconds`.
    let Ok(mut session) = tokio::time::timeout_at(arrived + wait, session.lock()).await else {
        let renew_within_seconds = (registered_stale_after(&server, worker).await? / 4).as_secs_f64();
        return Ok(Json(LeaseResponse {
            worker_id: worker.0,
            renew_within_seconds,
            jobs: Vec::new(),
            cancel: Vec::new(),
        }));
    };
    // The value from the registration counts, not the one in this call.
    let stale_after = match (body.worker_id, session.stale_after) {
        (None, _) => stale_after,
        (Some(_), Some(registered)) => registered,
        (Some(_), None) => registered_stale_after(&server, worker).await?,
    };
    session.stale_after = Some(stale_after);
    if let Some(held) = &body.held {
        let held: Vec<Lease> = held.iter().map(|lease| lease.held_by(worker)).collect();
        // Another call may have returned leases after this one was sent.
        let min_age = arrived.elapsed() + MAX_DELIVERY_TIME;
        release_unknown(&server.client, worker, &held, min_age).await?;
    }
    let filter = (queues, body.kinds.clone());
    if session.filter != filter {
        if body.worker_id.is_some() {
            // Operators see the queues and kinds, and `explain` uses them.
            register(&server, &body, &filter.0, stale_after, worker).await?;
        }
        *session = Session {
            filter,
            held: std::mem::take(&mut session.held),
            reported_cancels: std::mem::take(&mut session.reported_cancels),
            stale_after: session.stale_after,
            ..Session::default()
        };
    }
    let renew_within = stale_after / 4;
    let (leased, cancel) =
        wait_for_jobs(&server, &mut session, worker, limit, arrived + wait, renew_within).await?;
    leased.jobs.iter().for_each(|job| server.kinds.register(job.kind()));
    let response = LeaseResponse {
        worker_id: worker.0,
        renew_within_seconds: renew_within.as_secs_f64(),
        jobs: leased.into_delivered().into_iter().map(LeasedJob::from).collect(),
        cancel: cancel.iter().map(LeaseRef::from).collect(),
    };
    session.reported_cancels = cancel.into_iter().collect();
    Ok(Json(response))
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
        kinds.iter().for_each(|kind| server.kinds.register(kind));
        let kinds: Vec<NewKind> = kinds.iter().map(NewKind::new).collect();
        client.put_kinds(&kinds).await?;
    }
    Ok(id)
}

/// Leases that are not yet in a response. If the caller disconnects first, this is
/// dropped and releases them.
struct Undelivered {
    client: Client,
    jobs: Vec<Claimed>,
}

impl Undelivered {
    /// The jobs, for the response. They are no longer released on drop.
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
                tracing::warn!(
                    %error,
                    jobs = leases.len(),
                    "could not release the jobs of a disconnected caller; recovery will"
                );
            }
        });
    }
}

/// The `stale_after` that a worker registered with, for a worker that this server has
/// no session of.
async fn registered_stale_after(server: &Server, worker: WorkerId) -> ApiResult<Duration> {
    let found = server.client.registration(worker).await?;
    found.map(|found| found.stale_after).ok_or_else(|| dead_worker(server, worker))
}

/// Claims jobs until there are some, a job of this worker is cancelled, `until` has
/// passed, or the server stops. Sends the worker's heartbeat in between. Returns the jobs
/// and the leases to cancel.
async fn wait_for_jobs(
    server: &Server,
    session: &mut Session,
    worker: WorkerId,
    limit: u32,
    until: tokio::time::Instant,
    beat_every: Duration,
) -> ApiResult<(Undelivered, Vec<Lease>)> {
    let client = &server.client;
    let mut last_beat = Instant::now();
    let mut suspects = suspect_limit(client, session, worker).await?;
    // Subscribe before the first claim: a job enqueued between the two would otherwise
    // wait a full poll interval.
    let mut wakeups =
        if until > tokio::time::Instant::now() { Some(client.subscribe().await?) } else { None };
    let mut cancels = Cancels::of(client, session, worker, wakeups.is_some()).await?;
    let mut poll_interval = POLL_INTERVAL;
    loop {
        let started = Instant::now();
        let mut found = claim(client, session, worker, limit, suspects).await?;
        // Released jobs may be behind the cursor. The cursor limits how often the head is
        // scanned, because many jobs that this worker does not handle may wait there.
        let mut head_due = session.cursor.head_due(started, false).filter(|_| found.jobs.is_empty());
        if head_due.is_some() && wakeups.is_none() && session.cursor.is_head_cheap() {
            // The next call may not come soon.
            session.cursor = ClaimCursor::default();
            found = claim(client, session, worker, limit, suspects).await?;
            head_due = None;
        }
        if !found.jobs.is_empty() || cancels.has_unreported(session) {
            return Ok((found, cancels.leases));
        }
        let next_poll = tokio::time::Instant::now() + poll_interval.min(beat_every);
        let next_claim = head_due.map_or(next_poll, |due| next_poll.min(due.into())).min(until);
        // A job can start or be found sooner.
        let next_claim = match session.cursor.again_in(Instant::now()) {
            Some(again_in) => next_claim.min(tokio::time::Instant::now() + again_in.max(MIN_RATE_PAUSE)),
            None => next_claim,
        };
        poll_interval = (poll_interval * 2).min(MAX_POLL_INTERVAL);
        loop {
            tokio::select! {
                queue = woken(&mut wakeups) => {
                    if queue.is_none_or(|queue| session.filter.0.contains(&queue)) {
                        session.cursor.note_wake_up();
                        poll_interval = POLL_INTERVAL;
                        break;
                    }
                }
                () = cancels.notified() => {
                    cancels.read(client).await?;
                    if cancels.has_unreported(session) {
                        return Ok((found, cancels.leases));
                    }
                }
                () = tokio::time::sleep_until(next_claim) => break,
                () = server.stopping() => return Ok((found, cancels.leases)),
            }
        }
        if tokio::time::Instant::now() >= until {
            return Ok((found, cancels.leases));
        }
        if suspects == Suspects::Leave {
            suspects = suspect_limit(client, session, worker).await?;
        }
        // A waiting worker cannot renew: on its first call it has no id yet.
        if last_beat.elapsed() >= beat_every {
            heartbeat(server, worker).await?;
            last_beat = Instant::now();
        }
    }
}

/// Waits for a wake-up, as [`Wakeups::next`] does; forever without a subscription.
async fn woken(wakeups: &mut Option<Wakeups>) -> Option<String> {
    match wakeups {
        Some(wakeups) => wakeups.next().await,
        None => std::future::pending().await,
    }
}

/// The cancels of one worker while it waits.
struct Cancels {
    worker: WorkerId,
    /// `None` if the call does not wait, or the worker holds nothing that could be
    /// cancelled.
    notices: Option<CancelNotices>,
    /// The leases to cancel, as last read.
    leases: Vec<Lease>,
}

impl Cancels {
    async fn of(client: &Client, session: &Session, worker: WorkerId, waits: bool) -> ApiResult<Self> {
        let mut cancels = Cancels { worker, notices: None, leases: Vec::new() };
        if !session.held.is_empty() {
            // Subscribe before reading: a cancel between the two would otherwise be missed.
            cancels.notices = if waits { Some(client.subscribe_to_cancels().await?) } else { None };
            cancels.read(client).await?;
        }
        Ok(cancels)
    }

    async fn read(&mut self, client: &Client) -> ApiResult<()> {
        self.leases = client.cancels(self.worker).await?;
        Ok(())
    }

    /// Whether a cancel was not in the last response. Each ends one call only: a worker
    /// that stops its job slowly can wait for other jobs meanwhile.
    fn has_unreported(&self, session: &Session) -> bool {
        self.leases.iter().any(|lease| !session.reported_cancels.contains(lease))
    }

    async fn notified(&mut self) {
        match &mut self.notices {
            Some(notices) => notices.next(|worker| worker == self.worker).await,
            None => std::future::pending().await,
        }
    }
}

/// Whether the worker may get a suspect, which is a job that was interrupted before:
/// not while it already holds one, leased from any server.
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

/// A lease, and whether its job is a suspect.
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
    // Mark a suspect as started now: its handler starts when the response arrives, and
    // no call reports that.
    if let Some(suspect) = found.jobs.iter().find(|job| job.interruptions() > 0) {
        let _ = client.mark_started(&suspect.lease()).await?;
    }
    Ok(found)
}
