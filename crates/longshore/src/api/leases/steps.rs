//! Durable steps of HTTP workers: storing steps, reading the journal, and waiting for a time or
//! an event without a worker.

use std::collections::HashSet;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::*;
use crate::api::extract::{Body, duration, objects};
use crate::api::problem::ProblemBody;
use crate::api::steps::StepBody;
use crate::client::job_metrics::{count_replayed_step, count_stored_steps, count_timed_out_wait};
use crate::rules::enqueue::{check_event, check_json, check_name};
use crate::rules::lifecycle::PendingWait;
use crate::rules::waits::{WaitState, Winner};
use crate::store::{
    Claimed, Fenced, Journaled, MAX_STEP_VALUE, NewStep, StepRecord, StepState, check_journal,
};

/// Steps of a leased job that are done.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SaveStepsRequest {
    worker_id: Uuid,
    /// The id of the job.
    id: Uuid,
    lease_no: i32,
    #[serde(deserialize_with = "objects")]
    #[schema(min_items = 1, max_items = 1000)]
    steps: Vec<NewStepBody>,
}

/// A step that is done.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewStep)]
pub(in crate::api) struct NewStepBody {
    /// Its name, unique within the job.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// What the step returned: any JSON of at most 1 MiB; null if absent.
    #[schema(value_type = Option<Value>)]
    value: Option<Box<RawValue>>,
}

/// Whether steps were stored.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SaveStepsResponse {
    saved: SettleResult,
}

/// Stores steps of a leased job, all or none.
///
/// From then on, the attempts and interruptions of the job count from this attempt. If the response
/// is lost, repeat the call: a step that is stored with the same value counts as `stored`. A worker that
/// is not registered, such as the one in the example, is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/steps",
    operation_id = "save_steps",
    tag = "leases",
    request_body(content = SaveStepsRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "id": "01990000-0000-7000-8000-000000000001",
        "lease_no": 1,
        "steps": [{ "name": "charge", "value": { "receipt": 17 } }],
    })),
    responses(
        (status = 200, description = "Whether the steps are stored.", body = SaveStepsResponse),
        (status = 409, description = "A name is used for another step, or the worker was declared dead.",
         body = ProblemBody),
        (status = 413, description = "The body is too large.", body = ProblemBody),
        (status = 422, description = "A step is invalid; nothing was stored.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn save_steps(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<SaveStepsRequest>,
) -> ApiResult<Json<SaveStepsResponse>> {
    let lease = LeaseRef { id: body.id, lease_no: body.lease_no }.held_by(WorkerId(body.worker_id));
    let steps = checked_steps(lease, body.steps)?;
    check_worker_access(&server, &caller, lease.worker).await?;
    heartbeat(&server, lease.worker).await?;
    let saved = match check_journaled(&server, lease, steps).await? {
        Some(checked) => store_checked(&server, vec![checked]).await?.pop().unwrap_or(Fenced::LeaseLost),
        None => Fenced::LeaseLost,
    };
    Ok(Json(SaveStepsResponse { saved: saved.into() }))
}

/// Steps of a leased job whose names belong to no other step.
#[derive(Clone)]
pub(super) struct CheckedSteps {
    pub(super) lease: Lease,
    steps: Vec<NewStep>,
    /// How many of them are not stored yet.
    new: usize,
}

/// Checks steps of a leased job. Returns `None` if the lease is lost.
pub(super) async fn check_new(
    server: &Server,
    lease: Lease,
    steps: Vec<NewStepBody>,
) -> ApiResult<Option<CheckedSteps>> {
    let steps = checked_steps(lease, steps)?;
    check_journaled(server, lease, steps).await
}

fn checked_steps(lease: Lease, bodies: Vec<NewStepBody>) -> ApiResult<Vec<NewStep>> {
    check_count("steps", bodies.len())?;
    let mut steps = Vec::with_capacity(bodies.len());
    let mut names = HashSet::new();
    for (i, NewStepBody { name, value }) in bodies.into_iter().enumerate() {
        let in_step = |problem: Problem| problem.at(format_args!("steps[{i}]"));
        let value = value.unwrap_or_default();
        check_name("name", &name).map_err(|error| in_step(error.into()))?;
        check_json("value", value.get(), MAX_STEP_VALUE).map_err(|error| in_step(error.into()))?;
        if !names.insert(name.clone()) {
            return Err(in_step(Problem::validation(used_twice(&name))));
        }
        steps.push(NewStep { lease, name, value });
    }
    Ok(steps)
}

/// Checks steps against those that the job has stored. Returns `None` if the lease is lost.
async fn check_journaled(
    server: &Server,
    lease: Lease,
    steps: Vec<NewStep>,
) -> ApiResult<Option<CheckedSteps>> {
    let journal = server.client.journaled(lease.id, &names_of(&steps)).await?;
    let checked = new_steps(&journal, &steps);
    // Without a new step, nothing else compares the lease. If the lease is lost, the journal is that of another one.
    if (checked.is_err() || steps.is_empty())
        && server.client.assert_lease(&lease).await? == Fenced::LeaseLost
    {
        return Ok(None);
    }
    Ok(Some(CheckedSteps { lease, new: checked?, steps }))
}

/// The number of steps that are not stored yet. Refuses steps whose names belong to others, and too many of them.
fn new_steps(journal: &Journaled, steps: &[NewStep]) -> ApiResult<usize> {
    for (i, step) in steps.iter().enumerate() {
        let stored = journal.named.iter().find(|stored| stored.name == step.name);
        if let Some(stored) = stored {
            check_repetition(step, stored).map_err(|problem| problem.at(format_args!("steps[{i}]")))?;
        }
    }
    check_room(journal, steps)
}

/// Stores the steps of jobs in one commit. Returns one result per job.
pub(super) async fn store_checked(server: &Server, items: Vec<CheckedSteps>) -> ApiResult<Vec<Fenced>> {
    let steps: Vec<NewStep> = items.iter().flat_map(|item| item.steps.iter().cloned()).collect();
    let stored = if steps.is_empty() { Vec::new() } else { server.client.save_steps(&steps).await? };
    let mut rest = stored.as_slice();
    let mut results = Vec::with_capacity(items.len());
    for item in items {
        let (own, others) = rest.split_at(item.steps.len().min(rest.len()));
        rest = others;
        if own.contains(&Fenced::LeaseLost) {
            results.push(Fenced::LeaseLost);
        } else {
            count_stored_steps(item.new);
            results.push(Fenced::Held);
        }
    }
    Ok(results)
}

fn names_of(steps: &[NewStep]) -> Vec<String> {
    steps.iter().map(|step| step.name.clone()).collect()
}

fn used_twice(name: &str) -> String {
    format!("name: `{name}` is used twice; give each step its own name, for example with a number")
}

/// Refuses a step whose name belongs to another one.
fn check_repetition(step: &NewStep, stored: &StepRecord) -> ApiResult<()> {
    let parse = |value: &RawValue| serde_json::from_str::<Value>(value.get()).ok();
    let name = &step.name;
    match &stored.state {
        StepState::Done(value) if parse(value) == parse(&step.value) => Ok(()),
        StepState::Done(_) => Err(Problem::new(
            Slug::Conflict,
            format!("name: step `{name}` is stored with another value; give each step its own name"),
        )),
        StepState::Waiting { .. } => Err(Problem::new(
            Slug::Conflict,
            format!("name: the job waited under the name `{name}`; use another name for this step"),
        )),
    }
}

/// Refuses steps if the job would have too many. Returns how many are not stored yet.
fn check_room(journal: &Journaled, steps: &[NewStep]) -> ApiResult<usize> {
    let (mut count, mut bytes, mut new) = (journal.steps, journal.bytes, 0);
    for step in steps {
        let size = step.value.get().len();
        match journal.named.iter().find(|stored| stored.name == step.name).map(|stored| &stored.state) {
            Some(StepState::Done(_)) => continue,
            Some(StepState::Waiting { .. }) => bytes += size,
            None => (count, bytes) = (count + 1, bytes + size),
        }
        new += 1;
    }
    check_journal(count, bytes).map_err(|why| Problem::validation(format!("steps: {why}")))?;
    Ok(new)
}

/// Stores steps of one lease, if the job does not have too many.
async fn store(server: &Server, lease: Lease, journal: &Journaled, steps: Vec<NewStep>) -> ApiResult<Fenced> {
    let new = check_room(journal, &steps)?;
    let stored = store_checked(server, vec![CheckedSteps { lease, steps, new }]).await?;
    Ok(stored.first().copied().unwrap_or(Fenced::LeaseLost))
}

/// The job whose journal is read.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct JournalRequest {
    worker_id: Uuid,
    /// The id of the job.
    id: Uuid,
    lease_no: i32,
}

/// The journaled steps of a leased job.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct JournalResponse {
    /// The steps, sorted by name. Skip those that are `done`.
    steps: Vec<StepBody>,
}

/// Returns the journaled steps of a leased job.
///
/// Call this before the first step if the `lease_no` of the job is greater than 1: an earlier attempt
/// may have stored steps. A lease that is lost, such as the one in the example, is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/journal",
    operation_id = "read_journal",
    tag = "leases",
    request_body(content = JournalRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "id": "01990000-0000-7000-8000-000000000001",
        "lease_no": 2,
    })),
    responses(
        (status = 200, description = "The steps.", body = JournalResponse),
        (status = 409, description = "The lease is lost, or the worker was declared dead.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn journal(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<JournalRequest>,
) -> ApiResult<Json<JournalResponse>> {
    let lease = LeaseRef { id: body.id, lease_no: body.lease_no }.held_by(WorkerId(body.worker_id));
    check_worker_access(&server, &caller, lease.worker).await?;
    heartbeat(&server, lease.worker).await?;
    if server.client.assert_lease(&lease).await? == Fenced::LeaseLost {
        return Err(lease_lost(&lease));
    }
    let steps = server.client.steps(lease.id).await?;
    Ok(Json(JournalResponse { steps: steps.into_iter().map(StepBody::from).collect() }))
}

/// What a leased job waits for.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct WaitRequest {
    worker_id: Uuid,
    /// The id of the job.
    id: Uuid,
    lease_no: i32,
    /// The job continues when one of them is over.
    #[serde(deserialize_with = "objects")]
    #[schema(min_items = 1, max_items = 1000)]
    waits: Vec<WaitBody>,
}

/// A wait for a time, for the first of some events, or for both.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = Wait)]
pub(in crate::api) struct WaitBody {
    /// The name of the step, unique within the job.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// The first of these events ends the wait.
    #[serde(default)]
    #[schema(max_items = 1000)]
    events: Vec<String>,
    /// The wait ends after this time, counted from the first time that the job waits here. Without
    /// it, the job waits until an event is emitted.
    #[schema(minimum = 0, maximum = 315360000)]
    within_seconds: Option<f64>,
}

/// Whether the job continues.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct WaitResponse {
    status: WaitStatus,
    /// The waits that are over, with `continue`.
    done: Vec<DoneWait>,
}

/// What a worker does after it asked to wait.
#[derive(Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum WaitStatus {
    /// At least one of the waits is over, and this is stored. The worker keeps the lease and
    /// continues.
    Continue,
    /// The job waits without a worker, or was cancelled. The lease has ended: drop the job. When the
    /// wait is over, the job is leased again.
    Suspended,
    /// Another lease owns the job now, or the job has ended. Nothing changed.
    LeaseLost,
}

/// A wait that is over.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct DoneWait {
    /// The name of the step.
    name: String,
    /// The event that ended the wait; null if the time is up.
    #[schema(required)]
    event: Option<String>,
    /// The payload of the event.
    #[schema(required, nullable, value_type = Option<Value>)]
    payload: Option<Box<RawValue>>,
}

impl DoneWait {
    fn new(name: String, winner: Winner) -> Self {
        DoneWait { name, event: winner.event.clone(), payload: winner.into_payload() }
    }
}

/// Waits for a time or an event without a worker.
///
/// If one of the waits is over already, the worker keeps the job. Otherwise the job is suspended: its
/// lease ends, the attempt is not charged, and the job is leased again when one of the waits is over.
/// Make the same call then; its response says what came first. Events belong to no queue, so a token
/// that is limited to queues can only wait for a time. A worker that is not registered, such as the one in
/// the example, is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/wait",
    operation_id = "suspend_lease",
    tag = "leases",
    request_body(content = WaitRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "id": "01990000-0000-7000-8000-000000000001",
        "lease_no": 1,
        "waits": [{ "name": "approval", "events": ["approved:42", "rejected:42"], "within_seconds": 86400 }],
    })),
    responses(
        (status = 200, description = "Whether the job continues.", body = WaitResponse),
        (status = 409, description = "A name is used for another step, or the worker was declared dead.",
         body = ProblemBody),
        (status = 422, description = "A wait is invalid; nothing was stored.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn wait(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<WaitRequest>,
) -> ApiResult<Json<WaitResponse>> {
    let waits = checked_waits(body.waits)?;
    if waits.iter().any(|wait| !wait.events.is_empty()) {
        caller.may_use_all()?;
    }
    let lease = LeaseRef { id: body.id, lease_no: body.lease_no }.held_by(WorkerId(body.worker_id));
    check_worker_access(&server, &caller, lease.worker).await?;
    heartbeat(&server, lease.worker).await?;
    let names: Vec<String> = waits.iter().map(|wait| wait.name.clone()).collect();
    let journal = server.client.journaled(lease.id, &names).await?;
    if server.client.assert_lease(&lease).await? == Fenced::LeaseLost {
        return Ok(Json(WaitResponse { status: ended_before(&lease, &journal), done: Vec::new() }));
    }
    let (mut done, mut over, mut open) = (Vec::new(), Vec::new(), Vec::new());
    let mut timed_out = 0;
    for (i, wait) in waits.into_iter().enumerate() {
        let CheckedWait { name, events, .. } = &wait;
        let stored = journal.named.iter().find(|stored| stored.name == *name);
        let stand = stand_of(&server, &wait, stored).await;
        match stand.map_err(|problem| problem.at(format_args!("waits[{i}]")))? {
            Stand::Stored(winner) => {
                count_replayed_step();
                done.push(DoneWait::new(wait.name, winner));
            }
            Stand::Now(WaitState::Over(winner)) => {
                timed_out += usize::from(winner.event.is_none() && !events.is_empty());
                over.push(NewStep { lease, name: name.clone(), value: encode(&winner)? });
                done.push(DoneWait::new(wait.name, winner));
            }
            Stand::Now(WaitState::Open { until }) => {
                open.push(PendingWait { step: wait.name, until, events: wait.events });
            }
        }
    }
    if done.is_empty() {
        let status = suspend(&server, lease, open).await?;
        return Ok(Json(WaitResponse { status, done }));
    }
    match store(&server, lease, &journal, over).await? {
        Fenced::Held => {
            (0..timed_out).for_each(|_| count_timed_out_wait());
            Ok(Json(WaitResponse { status: WaitStatus::Continue, done }))
        }
        Fenced::LeaseLost => Ok(Json(WaitResponse { status: WaitStatus::LeaseLost, done: Vec::new() })),
    }
}

/// A wait whose fields have been checked.
struct CheckedWait {
    name: String,
    events: Vec<String>,
    time: Option<Duration>,
}

fn checked_waits(bodies: Vec<WaitBody>) -> ApiResult<Vec<CheckedWait>> {
    check_count("waits", bodies.len())?;
    if bodies.is_empty() {
        return Err(Problem::validation("waits: is empty; name at least one thing to wait for"));
    }
    let mut names = HashSet::new();
    let mut check = |WaitBody { name, events, within_seconds }: WaitBody| {
        check_name("name", &name)?;
        check_count("events", events.len())?;
        for event in &events {
            check_event("events", event)?;
        }
        let time = within_seconds.map(|seconds| duration("within_seconds", seconds)).transpose()?;
        if events.is_empty() && time.is_none() {
            return Err(Problem::validation("events: is empty; name an event, or set within_seconds"));
        }
        if !names.insert(name.clone()) {
            return Err(Problem::validation(used_twice(&name)));
        }
        Ok(CheckedWait { name, events, time })
    };
    let checked = bodies.into_iter().enumerate();
    checked.map(|(i, body)| check(body).map_err(|problem| problem.at(format_args!("waits[{i}]")))).collect()
}

/// How a wait stands.
enum Stand {
    /// This ended it, and is stored.
    Stored(Winner),
    Now(WaitState),
}

async fn stand_of(server: &Server, wait: &CheckedWait, stored: Option<&StepRecord>) -> ApiResult<Stand> {
    let earlier = match stored.map(|stored| &stored.state) {
        Some(StepState::Done(value)) => {
            let winner = serde_json::from_str(value.get()).map_err(|_| {
                let name = &wait.name;
                Problem::new(Slug::Conflict, format!("name: `{name}` is the name of a step; use another one"))
            })?;
            return Ok(Stand::Stored(winner));
        }
        Some(StepState::Waiting { until }) => *until,
        None => None,
    };
    Ok(Stand::Now(server.client.wait_state(&wait.events, wait.time, earlier).await?))
}

/// Ends a lease whose job waits.
pub(super) async fn suspend(server: &Server, lease: Lease, waits: Vec<PendingWait>) -> ApiResult<WaitStatus> {
    let reports = vec![(lease, Ending::Suspended { waits }, Vec::new())];
    let note_end = |claimed: &Claimed, kept| note_end(server, claimed, kept);
    let stored = server.client.settle_leases_with(reports, note_end).await?;
    Ok(if stored == [Fenced::Held] { WaitStatus::Suspended } else { WaitStatus::LeaseLost })
}

/// The status of a wait whose lease has ended: an earlier call may have suspended it, and its response
/// was lost.
pub(super) fn ended_before(lease: &Lease, journal: &Journaled) -> WaitStatus {
    let by_this_lease = |step: &StepRecord| {
        step.lease_no == lease.lease_no && matches!(step.state, StepState::Waiting { .. })
    };
    if !journal.named.is_empty() && journal.named.iter().all(by_this_lease) {
        WaitStatus::Suspended
    } else {
        WaitStatus::LeaseLost
    }
}

/// Refuses one more step with this value if the journal would become too large.
pub(super) fn check_journal_of(journal: &Journaled, value: &RawValue) -> ApiResult<()> {
    let added = usize::from(journal.named.is_empty());
    check_journal(journal.steps + added, journal.bytes + value.get().len())
        .map_err(|why| Problem::validation(format!("name: {why}")))
}

/// Encodes the value of a step.
pub(super) fn encode(value: &impl Serialize) -> ApiResult<Box<RawValue>> {
    serde_json::value::to_raw_value(value).map_err(|error| {
        crate::Error::internal("the value of a step cannot be encoded as JSON").with_source(error).into()
    })
}
