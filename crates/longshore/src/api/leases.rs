//! Workers in any language: lease jobs, renew the leases, settle them. The same
//! fence, recovery and cancellation as for workers in Rust: the first call
//! registers, every call is a heartbeat.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::body::{Body, maybe_objects, objects, up_to};
use super::jobs::{NewJobBody, admit, duration};
use super::problem::{Answer, Problem, ProblemBody, Slug};
use crate::client::Client;
use crate::enqueue::{DEFAULT_QUEUE, ValidJob};
use crate::job::{JobId, WorkerId};
use crate::lifecycle::Ending;
use crate::store::{Beat, ClaimCursor, ClaimRequest, Claimed, Fenced, Lease, NewKind, NewWorker, Suspects};

/// How many jobs one call leases at most.
const MAX_LEASES: u32 = 100;
/// How many leases one call renews or settles at most.
const MAX_ITEMS: usize = 1000;
/// How long a call waits for work at most; shorter than a request may take.
const LONGEST_WAIT: Duration = Duration::from_secs(20);
/// How soon a waiting call looks for work that nobody announced.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// The threshold of a worker that names none, and the least and most it may name.
const STALE_AFTER: Duration = Duration::from_secs(60);
const STALE_AFTER_FROM: Duration = Duration::from_secs(3);
const STALE_AFTER_TO: Duration = Duration::from_secs(3600);
/// An answer that has not arrived by now was lost: no request takes longer.
const ARRIVED_WITHIN: Duration = Duration::from_secs(30);
/// What is remembered of workers that have not called for so long is dropped.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(600);

/// What this server remembers of the workers that call it. Nothing of it is
/// needed: another server would do as well, only slower.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<WorkerId, Known>>);

/// When a worker last called, and what is remembered of it.
type Known = (Instant, Arc<tokio::sync::Mutex<Session>>);

#[derive(Default)]
struct Session {
    /// Where the last claim stopped, and for which queues and kinds.
    cursor: ClaimCursor,
    asked: (Vec<String>, Option<Vec<String>>),
    /// A job that was interrupted before and that this worker holds.
    suspect: Option<Lease>,
    /// As the worker registered it.
    stale_after: Option<Duration>,
}

impl Sessions {
    fn of(&self, worker: WorkerId) -> Arc<tokio::sync::Mutex<Session>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sessions.retain(|_, (called, _)| called.elapsed() < FORGOTTEN_AFTER);
        let (called, session) = sessions.entry(worker).or_insert_with(|| (Instant::now(), Arc::default()));
        *called = Instant::now();
        session.clone()
    }

    fn forget(&self, worker: WorkerId) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&worker);
    }
}

/// What a worker asks for.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseBody {
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
    /// The leases it still holds. What it does not name here is given back: the
    /// answer that brought it was lost.
    #[serde(default, deserialize_with = "maybe_objects")]
    #[schema(max_items = 1000)]
    held: Option<Vec<LeaseName>>,
}

/// One lease.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseName {
    /// The job.
    id: Uuid,
    /// Which lease of the job: the fence.
    lease_no: i32,
}

impl LeaseName {
    fn of(self, worker: WorkerId) -> Lease {
        Lease { id: JobId(self.id), lease_no: self.lease_no, worker }
    }
}

impl From<&Lease> for LeaseName {
    fn from(lease: &Lease) -> Self {
        LeaseName { id: lease.id.0, lease_no: lease.lease_no }
    }
}

/// What a worker gets.
#[derive(Serialize, ToSchema)]
pub(super) struct Leased {
    /// To be named in every further call.
    worker_id: Uuid,
    /// Call, or renew, at least this often.
    renew_within_seconds: f64,
    /// In the order in which they should start; empty if none was due.
    jobs: Vec<LeasedJob>,
}

/// A leased job: all that is needed to run it.
#[derive(Serialize, ToSchema)]
pub(super) struct LeasedJob {
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
    request_body = LeaseBody,
    responses(
        (status = 200, description = "Jobs to run, or none.", body = Leased),
        (status = 409, description = "The worker was declared dead: stop what it runs and call without `worker_id`.",
         body = ProblemBody),
        (status = 422, description = "A value out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn lease(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<LeaseBody>,
) -> Answer<Json<Leased>> {
    let queues = body.queues.clone().unwrap_or_else(|| vec![DEFAULT_QUEUE.into()]);
    if queues.is_empty() || queues.len() > 64 {
        return Err(Problem::validation("queues: name 1 to 64, or leave it out for `default`"));
    }
    for queue in &queues {
        caller.may_use(queue)?;
    }
    at_most("kinds", body.kinds.as_ref().map_or(0, Vec::len))?;
    at_most("held", body.held.as_ref().map_or(0, Vec::len))?;
    names("queues", &queues)?;
    names("kinds", body.kinds.as_deref().unwrap_or_default())?;
    let limit = up_to("limit", body.limit.unwrap_or(1), MAX_LEASES)?;
    // Well within the time that a request has.
    let longest = LONGEST_WAIT.min(server.timeout * 2 / 3);
    let wait = duration("wait_seconds", body.wait_seconds.unwrap_or(0.0))?.min(longest);
    let stale_after = stale_after(body.stale_after_seconds)?;
    let worker = match body.worker_id {
        Some(id) => {
            own(&server, &caller, WorkerId(id)).await?;
            known(&server, WorkerId(id)).await?
        }
        None => register(&server, &body, &queues, stale_after, WorkerId::new()).await?,
    };
    let session = server.sessions.of(worker);
    let mut session = session.lock().await;
    // What it said when it registered holds, not what it says now.
    let stale_after = match (body.worker_id, session.stale_after) {
        (None, _) => stale_after,
        (Some(_), Some(registered)) => registered,
        (Some(_), None) => registered(&server, worker).await?,
    };
    session.stale_after = Some(stale_after);
    if let Some(held) = &body.held {
        let held: Vec<Lease> = held.iter().map(|lease| lease.of(worker)).collect();
        server.client.give_back_unknown(worker, &held).await?;
    }
    let asked = (queues, body.kinds.clone());
    if session.asked != asked {
        if body.worker_id.is_some() {
            // What it takes is shown to operators, and explains why jobs wait.
            register(&server, &body, &asked.0, stale_after, worker).await?;
        }
        *session = Session {
            asked,
            suspect: session.suspect,
            stale_after: session.stale_after,
            ..Session::default()
        };
    }
    let renew_within = stale_after / 4;
    let found = find(&server, &mut session, worker, limit, wait, renew_within).await?;
    Ok(Json(Leased {
        worker_id: worker.0,
        renew_within_seconds: renew_within.as_secs_f64(),
        jobs: found.told().into_iter().map(LeasedJob::from).collect(),
    }))
}

fn stale_after(seconds: Option<f64>) -> Answer<Duration> {
    let Some(seconds) = seconds else { return Ok(STALE_AFTER) };
    let asked = duration("stale_after_seconds", seconds)?;
    match (STALE_AFTER_FROM..=STALE_AFTER_TO).contains(&asked) {
        true => Ok(asked),
        false => Err(Problem::validation(format!(
            "stale_after_seconds: {seconds} is out of range; use {} to {}",
            STALE_AFTER_FROM.as_secs(),
            STALE_AFTER_TO.as_secs()
        ))),
    }
}

fn names(field: &'static str, names: &[String]) -> Answer<()> {
    for name in names {
        crate::enqueue::check_name(field, name)?;
    }
    Ok(())
}

async fn register(
    server: &Server,
    body: &LeaseBody,
    queues: &[String],
    stale_after: Duration,
    id: WorkerId,
) -> Answer<WorkerId> {
    let name = body.name.clone().unwrap_or_else(|| "http".into());
    names("name", std::slice::from_ref(&name))?;
    let worker = NewWorker {
        id,
        queues: queues.to_vec(),
        kinds: body.kinds.clone(),
        concurrency: body.limit.unwrap_or(1),
        stale_after,
        ..NewWorker::new(name)
    };
    let store = server.client.store();
    store.register(&worker).await?;
    if let Some(kinds) = &body.kinds {
        let kinds: Vec<NewKind> = kinds.iter().map(NewKind::new).collect();
        store.put_kinds(&kinds).await?;
        server.kinds.forget();
    }
    Ok(id)
}

/// Leases that the caller has not been told of. If it goes before it is, they are
/// given back.
struct Untold {
    client: Client,
    jobs: Vec<Claimed>,
}

impl Untold {
    fn told(mut self) -> Vec<Claimed> {
        std::mem::take(&mut self.jobs)
    }
}

impl Drop for Untold {
    fn drop(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let reports: Vec<_> =
            self.jobs.iter().map(|job| (job.lease(), Ending::Released, Vec::new())).collect();
        let client = self.client.clone();
        tokio::spawn(async move {
            if let Err(error) = client.settle_leases(reports).await {
                tracing::warn!(%error, "cannot give back the jobs of a caller that has gone; recovery will");
            }
        });
    }
}

/// Refuses a token for some queues that speaks for a worker of others.
async fn own(server: &Server, caller: &Caller, worker: WorkerId) -> Answer<()> {
    if caller.queues().is_none() {
        return Ok(());
    }
    let workers = server.client.workers(None).await?;
    let mut queues = workers.iter().filter(|known| known.id == worker).flat_map(|known| &known.queues);
    queues.try_for_each(|queue| caller.may_use(queue))
}

/// A call is a sign of life; one of a dead worker comes too late.
async fn known(server: &Server, worker: WorkerId) -> Answer<WorkerId> {
    match server.client.store().beat(worker, &[]).await? {
        Beat::Alive { .. } => Ok(worker),
        Beat::Dead => Err(dead(server, worker)),
    }
}

/// The threshold of a worker that registered with another server, or long ago.
async fn registered(server: &Server, worker: WorkerId) -> Answer<Duration> {
    let workers = server.client.workers(None).await?;
    let found = workers.into_iter().find(|record| record.id == worker);
    found.map(|record| record.stale_after).ok_or_else(|| dead(server, worker))
}

fn dead(server: &Server, worker: WorkerId) -> Problem {
    server.sessions.forget(worker);
    Problem::new(
        Slug::Conflict,
        format!(
            "worker {worker} was declared dead or never lived; stop what it runs, and call again without \
             worker_id to begin anew"
        ),
    )
}

async fn find(
    server: &Server,
    session: &mut Session,
    worker: WorkerId,
    limit: u32,
    wait: Duration,
    beat_every: Duration,
) -> Answer<Untold> {
    let client = &server.client;
    let mut beaten = Instant::now();
    let until = tokio::time::Instant::now() + wait;
    // Before the first look: a job enqueued in between would wait otherwise.
    let mut wakeups = match wait.is_zero() {
        true => None,
        false => Some(client.store().subscribe().await?),
    };
    loop {
        let began = Instant::now();
        let mut found = claim(client, session, worker, limit).await?;
        if found.jobs.is_empty() && session.cursor.head_due(began, false).is_some() {
            // What was given back may lie behind the cursor, and nobody looks
            // again soon.
            session.cursor = ClaimCursor::default();
            found = claim(client, session, worker, limit).await?;
        }
        let Some(wakeups) = wakeups.as_mut().filter(|_| found.jobs.is_empty()) else { return Ok(found) };
        let look = tokio::time::Instant::now() + LOOK_EVERY;
        loop {
            tokio::select! {
                queue = wakeups.next() => {
                    if queue.is_none_or(|queue| session.asked.0.contains(&queue)) {
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
        // Who waits here cannot renew: on its first call it has no id yet.
        if beaten.elapsed() >= beat_every {
            known(server, worker).await?;
            beaten = Instant::now();
        }
    }
}

async fn claim(client: &Client, session: &mut Session, worker: WorkerId, limit: u32) -> Answer<Untold> {
    let suspects = match session.suspect {
        Some(lease) if client.store().assert_lease(&lease).await? == Fenced::Held => Suspects::Leave,
        _ => Suspects::One,
    };
    if suspects == Suspects::One {
        session.suspect = None;
    }
    let (queues, kinds) = session.asked.clone();
    let request = ClaimRequest { queues, kinds, suspects, ..ClaimRequest::new(worker, limit) };
    let claims = client.store().claim(&request, &mut session.cursor).await?;
    let found = Untold { client: client.clone(), jobs: claims.jobs };
    // It begins as soon as the answer arrives, and nobody says so.
    if let Some(suspect) = found.jobs.iter().find(|job| job.interruptions() > 0) {
        session.suspect = Some(suspect.lease());
        let _ = client.store().mark_started(&suspect.lease()).await?;
    }
    Ok(found)
}

/// What a worker still holds.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RenewBody {
    worker_id: Uuid,
    /// The leases it holds, all of them. One that is not named half a minute after
    /// it was given is given back: the answer that brought it was lost. Absent
    /// says nothing about leases.
    #[serde(default, deserialize_with = "maybe_objects")]
    #[schema(max_items = 1000)]
    leases: Option<Vec<LeaseName>>,
    /// What handlers report meanwhile.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    progress: Vec<ProgressItem>,
}

/// What one handler reports.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ProgressItem {
    id: Uuid,
    lease_no: i32,
    /// Any JSON up to 64 KiB.
    #[schema(value_type = serde_json::Value)]
    progress: Box<RawValue>,
}

/// What a worker must know about its leases.
#[derive(Serialize, ToSchema)]
pub(super) struct Renewed {
    /// No longer its own: stop these, their ends will not be stored.
    lost: Vec<LeaseName>,
    /// To be cancelled: stop these and settle them as `cancelled`.
    cancel: Vec<LeaseName>,
}

/// The worker's heartbeat.
#[utoipa::path(
    post,
    path = "/leases/renew",
    tag = "leases",
    request_body = RenewBody,
    responses(
        (status = 200, description = "Leases that are lost, and leases to cancel.", body = Renewed),
        (status = 409, description = "The worker was declared dead: stop everything and begin anew.", body = ProblemBody),
    ),
)]
pub(super) async fn renew(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<RenewBody>,
) -> Answer<Json<Renewed>> {
    let named = body.leases.as_deref().unwrap_or_default();
    at_most("leases", named.len())?;
    at_most("progress", body.progress.len())?;
    let worker = WorkerId(body.worker_id);
    own(&server, &caller, worker).await?;
    let mut reports = Vec::with_capacity(body.progress.len());
    for ProgressItem { id, lease_no, progress } in body.progress {
        crate::enqueue::check_json("progress", progress.get(), 64 * 1024)?;
        reports.push((LeaseName { id, lease_no }.of(worker), progress));
    }
    let held: Vec<Lease> = named.iter().map(|lease| lease.of(worker)).collect();
    let (lost, cancel) = match server.client.store().beat(worker, &held).await? {
        Beat::Alive { lost, cancel } => (lost, cancel),
        Beat::Dead => return Err(dead(&server, worker)),
    };
    if !reports.is_empty() {
        // Whose lease is lost is told above.
        let _ = server.client.store().progress(&reports).await?;
    }
    // A longer list would not have fitted: who knows what it holds.
    if body.leases.is_some() && held.len() < MAX_ITEMS {
        give_back_untold(&server.client, worker, &held).await?;
    }
    let name = |leases: &[Lease]| leases.iter().map(LeaseName::from).collect();
    Ok(Json(Renewed { lost: name(&lost), cancel: name(&cancel) }))
}

/// Gives back what a worker does not know that it holds, once its answer can no
/// longer be on its way.
async fn give_back_untold(client: &Client, worker: WorkerId, held: &[Lease]) -> Answer<()> {
    let mut untold = client.store().leases(worker).await?;
    untold.retain(|lease| !held.contains(lease));
    if untold.is_empty() {
        return Ok(());
    }
    let now = client.store().now().await?;
    let on_its_way = |claimed_at| now - claimed_at < TimeDelta::from_std(ARRIVED_WITHIN).unwrap_or_default();
    let claims = client.store().claims(&untold).await?;
    let late = claims.into_iter().flatten().filter(|job| !on_its_way(job.claimed_at()));
    let reports: Vec<_> = late.map(|job| (job.lease(), Ending::Released, Vec::new())).collect();
    if !reports.is_empty() {
        client.settle_leases(reports).await?;
    }
    Ok(())
}

fn at_most(field: &str, items: usize) -> Answer<()> {
    match items > MAX_ITEMS {
        true => {
            Err(Problem::validation(format!("{field}: {items} of them; send at most {MAX_ITEMS} at a time")))
        }
        false => Ok(()),
    }
}

/// How attempts ended.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SettleBody {
    worker_id: Uuid,
    #[serde(deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    items: Vec<SettleItem>,
}

/// How one attempt ended.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct SettleItem {
    id: Uuid,
    lease_no: i32,
    outcome: HowEnded,
    /// What the handler returned, if it succeeded.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// What went wrong, or why it was cancelled.
    error: Option<String>,
    /// After a failure: exactly this long instead of what the job's policy says.
    #[schema(minimum = 0, maximum = 315360000)]
    retry_after_seconds: Option<f64>,
    /// After a failure: never again.
    #[serde(default)]
    permanent: bool,
    /// When snoozed: how much later.
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// Jobs that exist only if this success is stored.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    follow_ups: Vec<NewJobBody>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum HowEnded {
    /// Done.
    Succeeded,
    /// Charged; tried again by the job's policy.
    Failed,
    /// Ended by request.
    Cancelled,
    /// Run later; not charged.
    Snoozed,
    /// Given back unfinished; not charged, due at once.
    Released,
}

/// What became of each.
#[derive(Serialize, ToSchema)]
pub(super) struct SettledBody {
    /// In the order given.
    items: Vec<SettledItem>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct SettledItem {
    id: Uuid,
    lease_no: i32,
    settled: WhetherStored,
}

/// Whether an end was stored.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum WhetherStored {
    /// It is in the database, now or since an earlier try.
    Stored,
    /// Somebody else owns the job now, or it has ended; nothing changed.
    LeaseLost,
}

/// Ends attempts, each answered by itself. May be repeated when an answer was
/// lost.
#[utoipa::path(
    post,
    path = "/leases/settle",
    tag = "leases",
    request_body = SettleBody,
    responses(
        (status = 200, description = "What became of each, in the order given.", body = SettledBody),
        (status = 422, description = "An item that cannot be; nothing was stored.", body = ProblemBody),
    ),
)]
pub(super) async fn settle(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<SettleBody>,
) -> Answer<Json<SettledBody>> {
    at_most("items", body.items.len())?;
    let worker = WorkerId(body.worker_id);
    own(&server, &caller, worker).await?;
    let names: Vec<LeaseName> =
        body.items.iter().map(|item| LeaseName { id: item.id, lease_no: item.lease_no }).collect();
    let leases: Vec<Lease> = names.iter().map(|name| name.of(worker)).collect();
    let claims = server.client.store().claims(&leases).await?;
    let mut reports = Vec::with_capacity(leases.len());
    for (i, ((mut item, lease), claimed)) in body.items.into_iter().zip(leases).zip(claims).enumerate() {
        let wrong = |problem: Problem| problem.at(format_args!("items[{i}]"));
        let follow_ups = follow_ups(&server, &caller, item.outcome, std::mem::take(&mut item.follow_ups))
            .await
            .map_err(wrong)?;
        reports.push((lease, ending(item, claimed.as_ref()).map_err(wrong)?, follow_ups));
    }
    let stored = server.client.settle_leases(reports).await?;
    let items = names.into_iter().zip(stored).map(|(LeaseName { id, lease_no }, fenced)| SettledItem {
        id,
        lease_no,
        settled: match fenced {
            Fenced::Held => WhetherStored::Stored,
            Fenced::LeaseLost => WhetherStored::LeaseLost,
        },
    });
    Ok(Json(SettledBody { items: items.collect() }))
}

fn ending(item: SettleItem, claimed: Option<&Claimed>) -> Answer<Ending> {
    let only = |given: bool, field: &str, with: &str| match given {
        true => Err(Problem::validation(format!("{field}: is for the outcome {with}; leave it out"))),
        false => Ok(()),
    };
    let outcome = item.outcome;
    only(item.result.is_some() && outcome != HowEnded::Succeeded, "result", "succeeded")?;
    only(item.permanent && outcome != HowEnded::Failed, "permanent", "failed")?;
    only(item.retry_after_seconds.is_some() && outcome != HowEnded::Failed, "retry_after_seconds", "failed")?;
    only(item.delay_seconds.is_some() && outcome != HowEnded::Snoozed, "delay_seconds", "snoozed")?;
    Ok(match outcome {
        HowEnded::Succeeded => Ending::Succeeded { result: item.result },
        HowEnded::Failed => Ending::Failed {
            error: item.error.unwrap_or_else(|| "the worker named no error".into()),
            retry_in: match (item.permanent, item.retry_after_seconds) {
                (true, Some(_)) => {
                    return Err(Problem::validation(
                        "permanent: retry_after_seconds is given as well; give one of the two",
                    ));
                }
                (true, None) => None,
                (false, Some(seconds)) => Some(duration("retry_after_seconds", seconds)?),
                // A lease that is lost has no policy, and needs none.
                (false, None) => claimed.and_then(Claimed::backoff),
            },
        },
        HowEnded::Cancelled => Ending::Cancelled { reason: item.error },
        HowEnded::Snoozed => match item.delay_seconds {
            Some(seconds) => Ending::Snoozed { delay: duration("delay_seconds", seconds)? },
            None => {
                return Err(Problem::validation("delay_seconds: is needed when snoozed; say how much later"));
            }
        },
        HowEnded::Released => Ending::Released,
    })
}

async fn follow_ups(
    server: &Server,
    caller: &Caller,
    outcome: HowEnded,
    bodies: Vec<NewJobBody>,
) -> Answer<Vec<ValidJob>> {
    if !bodies.is_empty() && outcome != HowEnded::Succeeded {
        return Err(Problem::validation("follow_ups: are for the outcome succeeded; leave them out"));
    }
    let mut jobs = Vec::with_capacity(bodies.len());
    for body in bodies {
        let job = admit(server, caller, body).await?;
        server.gate.enqueue(&server.client, job.queue()).await?;
        jobs.push(job);
    }
    Ok(jobs)
}

/// Signs a worker off. Leases that it still holds are given to others.
#[utoipa::path(
    delete,
    path = "/leases/{worker_id}",
    tag = "leases",
    params(("worker_id" = Uuid, Path, description = "As the first call returned it.")),
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn sign_off(
    State(server): State<Server>,
    caller: Caller,
    worker: Result<Path<Uuid>, axum::extract::rejection::PathRejection>,
) -> Answer<StatusCode> {
    let Path(worker) = worker.map_err(|_| Problem::bad_request("worker_id: not a UUID"))?;
    let worker = WorkerId(worker);
    own(&server, &caller, worker).await?;
    server.client.store().retire(worker).await?;
    server.sessions.forget(worker);
    Ok(StatusCode::NO_CONTENT)
}
