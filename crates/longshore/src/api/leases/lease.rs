//! The lease call: registers a worker on its first call, stores its reports, and leases due jobs to it.

use std::collections::HashSet;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue};
use axum::response::AppendHeaders;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::announced::{Announced, AnnouncedKind, check_announced};
use super::exchange::{CheckpointItem, Reports, SavedReport, SettledReport, StepsItem};
use super::granted::{LeasedJob, deliver};
use super::register::{NewRegistration, kind_queues, registered_stale_after, stale_after, store_kinds};
use super::sessions::{ClaimState, Wait};
use super::waiting::{OpenCall, Pulse, Undelivered, beat};
use super::*;
use crate::api::MAX_WAIT;
use crate::api::auth::Credential;
use crate::api::extract::{Arrived, LargeBody, duration, objects, optional_objects};
use crate::api::problem::ProblemBody;
use crate::api::waiting_calls::retry_after;
use crate::rules::enqueue::{DEFAULT_QUEUE, check_name, check_queue};
use crate::store::Scope;

/// The version of the protocol for workers in any language. A server also supports the version before its own.
const PROTOCOL: &str = "1.1";
/// The maximum number of jobs that one call leases.
const MAX_LEASES: u32 = 1000;
/// The longest time that a call is assumed to spend between the worker and the
/// server.
const MAX_DELIVERY_TIME: Duration = Duration::from_secs(2);

/// A worker's request for jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct LeaseRequest {
    /// The id that the first call returned; absent on the first call.
    worker_id: Option<Uuid>,
    /// A display name. Only the first call sets it.
    #[schema(min_length = 1, max_length = 128)]
    name: Option<String>,
    /// The host that the worker runs on, for display. Only the first call sets it.
    #[schema(min_length = 1, max_length = 255)]
    host: Option<String>,
    /// The id of the worker's process, for display. Only the first call sets it.
    #[schema(minimum = 0)]
    pid: Option<u32>,
    /// The name and version of the worker's library, for display. Only the first call sets it.
    #[schema(min_length = 1, max_length = 255, example = "longshore-python 0.1.0")]
    version: Option<String>,
    /// The queues to lease from; `["default"]` if absent.
    #[schema(min_items = 1, max_items = 64)]
    queues: Option<Vec<String>>,
    /// The kinds that the worker handles; any if absent.
    #[schema(max_items = 1000)]
    kinds: Option<Vec<String>>,
    /// Describes kinds that the worker handles. Send it with the first call. With a token that is limited to queues,
    /// kinds that exist keep their schema and their defaults.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    announce: Vec<AnnouncedKind>,
    /// The maximum number of jobs to lease; 1 by default. With 0, the call only waits for cancels and lost leases. A
    /// call with a higher limit ends the wait of earlier ones with a higher limit of the same worker; if it waits itself, after
    /// they have waited for a second.
    #[schema(minimum = 0, maximum = 1000)]
    limit: Option<u32>,
    /// How long to wait for the first job, a cancel or the loss of a lease, up to 20; 0 by default. A call with reports
    /// does not wait.
    #[schema(minimum = 0, maximum = 20)]
    wait_seconds: Option<f64>,
    /// Without a call for this long, the worker is declared dead and its jobs are
    /// recovered. Only the first call sets it. 60 by default.
    #[schema(minimum = 3, maximum = 3600)]
    stale_after_seconds: Option<f64>,
    /// The leases the worker still holds, including those whose end it has reported in a call that has not returned. A
    /// lease that it got more than two seconds before this call and does not list is released, because the response that
    /// contained it was lost.
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(max_items = 1000)]
    held: Option<Vec<LeaseRef>>,
    /// Results of attempts, as in `/leases/settle`.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    settle: Vec<SettleItem>,
    /// Progress of running jobs.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    progress: Vec<ProgressItem>,
    /// Steps that are done, by job.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    steps: Vec<StepsItem>,
    /// Checkpoints of running jobs. They are kept when the attempts end.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    checkpoints: Vec<CheckpointItem>,
}

/// The leased jobs.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LeaseResponse {
    /// The version of the protocol that this server speaks. It also supports the one before.
    #[schema(example = "1.1")]
    protocol: &'static str,
    /// The worker's id, to send in every further call.
    worker_id: Uuid,
    /// Renew or make another call at least this often.
    renew_within_seconds: f64,
    /// The jobs, in the order in which to start them; empty if none was due. There may be fewer than `limit` although more
    /// are due, because their payloads, metadata and checkpoints have at most 16 MiB together.
    jobs: Vec<LeasedJob>,
    /// Leases of this worker whose jobs are to be cancelled. Stop these jobs and settle
    /// them as `cancelled`. A lease is listed until it is settled, but only ends the wait
    /// of a call once.
    cancel: Vec<LeaseRef>,
    /// Leases in `held` that the worker has lost. Stop their jobs; they cannot be settled.
    lost: Vec<LeaseRef>,
    /// One result per item of `settle`, in the same order.
    settled: Vec<SettledReport>,
    /// One result per item of `steps`, in the same order.
    saved_steps: Vec<SavedReport>,
    /// One result per item of `checkpoints`, in the same order.
    saved_checkpoints: Vec<SavedReport>,
    /// One result per item of `progress`, in the same order.
    saved_progress: Vec<SavedReport>,
}

/// Leases due jobs. Waits up to `wait_seconds` for the first one, or until a job of this
/// worker is cancelled. If too many calls wait already, it does not wait: the response has the header `Retry-After`.
///
/// The call may also contain reports: `settle`, `progress`, `steps` and `checkpoints`. They are stored before jobs are
/// leased. A report that is invalid is `rejected`, and one that cannot be stored now is `unavailable`; they do not affect the
/// others. If the response is lost, repeat the reports: what is already stored counts as `stored`. Follow-up jobs also
/// require the scope `enqueue`.
#[utoipa::path(
    post,
    path = "/leases",
    operation_id = "lease_jobs",
    tag = "leases",
    request_body(
        description = "At most 16 MiB.",
        content = LeaseRequest,
        example = json!({
            "name": "my-worker",
            "queues": ["greetings"],
            "kinds": ["greet"],
            "limit": 10,
        }),
    ),
    responses(
        (status = 200, description = "The leased jobs; none if no job was due.", body = LeaseResponse, headers(
            ("Retry-After" = u32, description = "Call again after this many seconds: too many calls wait already."),
        )),
        (status = 409, description = "The worker was declared dead. Stop its jobs and call again without `worker_id`.",
         body = ProblemBody),
        (status = 413, description = "The body is too large.", body = ProblemBody),
        (status = 422, description = "A value is out of range.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn lease(
    State(server): State<Server>,
    caller: Caller,
    credential: Credential,
    // A large body may take long to arrive, and its list of leases is as old as its first byte.
    Arrived(arrived): Arrived,
    // Boxed, because the future of this handler is moved through every layer and
    // should stay small.
    LargeBody(body): LargeBody<Box<LeaseRequest>>,
) -> ApiResult<(AppendHeaders<Option<(HeaderName, HeaderValue)>>, Json<LeaseResponse>)> {
    let (mut request, reports) = CheckedRequest::new(&server, &caller, *body).await?;
    let worker = request.worker(&server, &caller).await?;
    let session = server.sessions.of(worker);
    let may_wait = reports.is_empty() && !request.wait.is_zero();
    let waiting = may_wait.then(|| server.waiting_calls.begin(&caller));
    let waits = matches!(waiting, Some(Some(_)));
    let mut known: HashSet<Lease> = reports.leases(worker).into_iter().collect();
    let ends: HashSet<Lease> = reports.settle.iter().map(|item| item.lease().held_by(worker)).collect();
    let stored = reports.store(&server, &caller, &session, worker).await?;
    let stale_after = match (request.worker_id, session.stale_after()) {
        (None, _) => request.stale_after,
        // The value from the registration counts, not the one in this call.
        (Some(_), Some(registered)) => registered,
        (Some(_), None) => registered_stale_after(&server, worker).await?,
    };
    session.set_stale_after(stale_after);
    // Subscribe before the heartbeat: a cancel between the two would otherwise be missed.
    let cancels = if waits { Some(server.client.subscribe_to_cancels().await?) } else { None };
    let wait = if waits { Wait::ForWork } else { Wait::No };
    let until = if waits { arrived + request.wait } else { arrived };
    let call = (request.limit > 0).then(|| session.begin_claiming_call(wait));
    // A worker has one claim at a time. A second call that waits does so no longer than it may.
    let mut claims = match (&call, wait) {
        (None, _) => None,
        (Some(_), Wait::No) => Some(session.claims.lock().await),
        (Some(_), Wait::ForWork) => tokio::time::timeout_at(until, session.claims.lock()).await.ok(),
    };
    let listed = request.held.as_deref().unwrap_or_default();
    let listed: Vec<Lease> = listed.iter().map(|lease| lease.held_by(worker)).collect();
    // A new worker has no leases, and its registration was its heartbeat.
    let mut live = match request.worker_id {
        Some(_) => beat(&server, &session, worker).await?,
        None => Vec::new(),
    };
    if request.held.is_some() && is_complete(&listed) {
        known.extend(&listed);
        // Another call may have returned leases after this one was sent.
        let min_age = arrived.elapsed() + MAX_DELIVERY_TIME;
        live = release_unknown(&server.client, live, &known, min_age).await?;
    }
    // What this call has settled is not lost.
    let held: Vec<Lease> = listed.into_iter().filter(|lease| !ends.contains(lease)).collect();
    let renew_within = stale_after / 4;
    let mut open = OpenCall {
        server: &server,
        session: &session,
        worker,
        pulse: Pulse::of(&live, &held),
        held: &held,
        cancels,
        until,
        beat_every: renew_within,
    };
    let call = async {
        match (claims.as_deref_mut(), call) {
            (Some(state), Some(call)) => {
                request.update_filter(&server, &caller, worker, stale_after, state).await?;
                open.claim(state, call, request.limit).await
            }
            _ => open.watch().await.map(|()| Undelivered::none(&server.client)),
        }
    };
    let leased = tokio::select! {
        biased;
        leased = call => leased?,
        problem = credential.refused(Scope::Work), if waits => return Err(problem),
    };
    let Pulse { lost, cancel, .. } = open.pulse;
    let found = leased.jobs().len();
    let jobs = deliver(&server, &session, leased).await?;
    if let Some(state) = claims.as_deref_mut().filter(|_| jobs.len() < found) {
        state.batch.shrink_to(jobs.len());
    }
    let refs = |leases: &[Lease]| leases.iter().map(LeaseRef::from).collect();
    let response = LeaseResponse {
        protocol: PROTOCOL,
        worker_id: worker.0,
        renew_within_seconds: renew_within.as_secs_f64(),
        jobs,
        cancel: refs(&cancel),
        lost: refs(&lost),
        settled: stored.settled,
        saved_steps: stored.steps,
        saved_checkpoints: stored.checkpoints,
        saved_progress: stored.progress,
    };
    session.set_reported(lost.iter().chain(&cancel));
    let must_retry = may_wait && !waits && response.jobs.is_empty();
    Ok((AppendHeaders(must_retry.then(retry_after)), Json(response)))
}

/// A request whose fields have been checked.
struct CheckedRequest {
    worker_id: Option<WorkerId>,
    name: Option<String>,
    host: Option<String>,
    pid: Option<u32>,
    version: Option<String>,
    queues: Vec<String>,
    kinds: Option<Vec<String>>,
    announced: Announced,
    limit: u32,
    wait: Duration,
    stale_after: Duration,
    held: Option<Vec<LeaseRef>>,
}

impl CheckedRequest {
    async fn new(server: &Server, caller: &Caller, body: LeaseRequest) -> ApiResult<(Self, Reports)> {
        let limit = body.limit.unwrap_or(1);
        if limit > MAX_LEASES {
            return Err(Problem::validation(format!(
                "limit: {limit} is out of range; use 0 to {MAX_LEASES}"
            )));
        }
        // A call that neither claims nor registers needs no queues.
        let default_queues = || match limit == 0 && body.worker_id.is_some() {
            true => Vec::new(),
            false => vec![DEFAULT_QUEUE.into()],
        };
        if body.queues.as_ref().is_some_and(|queues| queues.is_empty() || queues.len() > 64) {
            return Err(Problem::validation("queues: list 1 to 64 queues, or leave it out for `default`"));
        }
        let queues = body.queues.clone().unwrap_or_else(default_queues);
        for queue in &queues {
            caller.may_use(queue)?;
        }
        check_count("kinds", body.kinds.as_ref().map_or(0, Vec::len))?;
        check_count("held", body.held.as_ref().map_or(0, Vec::len))?;
        for queue in &queues {
            check_queue("queues", queue)?;
        }
        for kind in body.kinds.iter().flatten() {
            check_name("kinds", kind)?;
        }
        let announced = check_announced(server, caller, body.kinds.as_deref(), body.announce).await?;
        let wait = duration("wait_seconds", body.wait_seconds.unwrap_or(0.0))?;
        if wait > MAX_WAIT {
            let (seconds, longest) = (wait.as_secs_f64(), MAX_WAIT.as_secs());
            return Err(Problem::validation(format!(
                "wait_seconds: {seconds} is out of range; use 0 to {longest}, and repeat the call"
            )));
        }
        let wait = wait.min(server.max_wait());
        let stale_after = stale_after(body.stale_after_seconds)?;
        let reports = Reports {
            settle: body.settle,
            progress: body.progress,
            steps: body.steps,
            checkpoints: body.checkpoints,
        };
        reports.check()?;
        if body.worker_id.is_none() && !reports.is_empty() {
            return Err(Problem::validation(
                "worker_id: a call with settle, progress, steps or checkpoints needs it; send the id that the first call \
                 returned",
            ));
        }
        let request = CheckedRequest {
            worker_id: body.worker_id.map(WorkerId),
            name: body.name,
            host: body.host,
            pid: body.pid,
            version: body.version,
            queues,
            kinds: body.kinds,
            announced,
            limit,
            wait,
            stale_after,
            held: body.held,
        };
        Ok((request, reports))
    }

    /// The worker that makes the call. The first call registers it.
    async fn worker(&mut self, server: &Server, caller: &Caller) -> ApiResult<WorkerId> {
        match self.worker_id {
            Some(worker) => {
                check_worker_access(server, caller, worker).await?;
                let announced = std::mem::take(&mut self.announced);
                store_kinds(server, &announced.kinds, &kind_queues(caller)).await?;
                Ok(worker)
            }
            None => {
                let announced = std::mem::take(&mut self.announced);
                let registration = self.registration(announced, self.stale_after);
                registration.store(server, WorkerId::new(), &kind_queues(caller)).await
            }
        }
    }

    fn registration(&self, announced: Announced, stale_after: Duration) -> NewRegistration<'_> {
        NewRegistration {
            name: self.name.as_deref(),
            queues: &self.queues,
            kinds: self.kinds.as_deref(),
            announced,
            // A worker that claims nothing now runs at least one job later.
            concurrency: self.limit.max(1),
            stale_after,
            host: self.host.as_deref(),
            pid: self.pid,
            version: self.version.as_deref(),
        }
    }

    /// Starts over with another cursor if the worker has changed its queues or kinds.
    async fn update_filter(
        &self,
        server: &Server,
        caller: &Caller,
        worker: WorkerId,
        stale_after: Duration,
        state: &mut ClaimState,
    ) -> ApiResult<()> {
        let filter = (self.queues.clone(), self.kinds.clone());
        if state.filter == filter {
            return Ok(());
        }
        if self.worker_id.is_some() {
            // Operators see the queues and kinds, and `explain` uses them.
            let registration = self.registration(Announced::default(), stale_after);
            registration.store(server, worker, &kind_queues(caller)).await?;
        }
        *state = ClaimState { filter, ..ClaimState::default() };
        Ok(())
    }
}
