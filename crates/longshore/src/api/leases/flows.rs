//! Flows of HTTP workers: the results of the tasks that a leased job waited for, and children that it spawns and joins.
//! The rules are in [`crate::client::children`].

use std::collections::HashMap;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tracing::Instrument;
use utoipa::ToSchema;
use uuid::Uuid;

use super::steps::{check_journal_of, encode, ended_before, suspend};
use super::*;
use crate::api::extract::{Body, JobHeaders, LargeBody, check_range};
use crate::api::flows::{FlowJobBody, new_jobs};
use crate::api::problem::ProblemBody;
use crate::api::schemas::OutcomeSchema;
use crate::client::children::{
    Joined, Spawn, SpawnedChildren, is_child, no_children, refusal, waited_before,
};
use crate::client::job_metrics::{count_replayed_step, count_stored_steps};
use crate::client::{JoinState, batch_span, members};
use crate::job::{FlowId, Outcome};
use crate::rules::enqueue::check_name;
use crate::rules::flow::flow_event;
use crate::rules::lifecycle::PendingWait;
use crate::store::{
    Fenced, FlowRecord, NewChildren, NewMember, NewStep, ParentRecord, Scope, Spawned, StepState,
};

/// The maximum number of children in one response.
const MAX_CHILDREN: u32 = 1000;
/// A response ends after about this many bytes of results.
const MAX_RESULT_BYTES: usize = 4 * 1024 * 1024;

/// The leased job whose inputs are read.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct InputsRequest {
    worker_id: Uuid,
    /// The id of the job.
    id: Uuid,
    lease_no: i32,
}

/// The tasks that a leased job waited for.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct InputsResponse {
    /// In the order of their ids.
    inputs: Vec<TaskInput>,
}

/// A task that a leased job waited for.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct TaskInput {
    /// Its name in the flow.
    #[schema(required)]
    task: Option<String>,
    /// The id of its job.
    id: Uuid,
    /// How it ended; null if it has not.
    #[schema(required, nullable, value_type = Option<OutcomeSchema>)]
    outcome: Option<Outcome>,
    /// Its result, if it succeeded with one.
    #[schema(required, nullable, value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
}

/// Returns the tasks of the flow that a leased job waited for, with their results.
///
/// A lease that is lost, such as the one in the example, is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/inputs",
    operation_id = "read_inputs",
    tag = "leases",
    request_body(content = InputsRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "id": "01990000-0000-7000-8000-000000000001",
        "lease_no": 1,
    })),
    responses(
        (status = 200, description = "The tasks; none if the job waited for no other one.", body = InputsResponse),
        (status = 409, description = "The lease is lost, or the worker was declared dead.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn inputs(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<InputsRequest>,
) -> ApiResult<Json<InputsResponse>> {
    let lease = LeaseRef { id: body.id, lease_no: body.lease_no }.held_by(WorkerId(body.worker_id));
    check_worker_access(&server, &caller, lease.worker).await?;
    heartbeat(&server, lease.worker).await?;
    if server.client.assert_lease(&lease).await? == Fenced::LeaseLost {
        return Err(lease_lost(&lease));
    }
    let parents = server.client.parents(lease.id).await?;
    let input = |parent: ParentRecord| TaskInput {
        task: parent.task,
        id: parent.id.0,
        outcome: parent.outcome,
        result: parent.result,
    };
    Ok(Json(InputsResponse { inputs: parents.into_iter().map(input).collect() }))
}

/// Children of a leased job.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SpawnRequest {
    worker_id: Uuid,
    /// The id of the job.
    id: Uuid,
    lease_no: i32,
    /// The name of the step, unique within the job. The children have it as the name of their task.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    #[schema(value_type = Vec<FlowJobBody>, max_items = 10000)]
    jobs: Vec<Box<RawValue>>,
}

/// Whether children were stored.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SpawnResponse {
    status: SettleResult,
}

/// Enqueues children of a leased job, as a durable step. They start at once.
///
/// All of them are stored, or none. If the response is lost, repeat the call: children that are stored under this name
/// count as `stored`, whatever the second call contains. Also requires the scope `enqueue`. A worker that is not
/// registered, such as the one in the example, is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/spawn",
    operation_id = "spawn_children",
    tag = "leases",
    params(("traceparent" = Option<String>, Header, description = "W3C trace context, stored with every job.")),
    request_body(
        description = "At most 10,000 jobs and 16 MiB.",
        content = SpawnRequest,
        example = json!({
            "worker_id": "01990000-0000-7000-8000-000000000000",
            "id": "01990000-0000-7000-8000-000000000001",
            "lease_no": 1,
            "name": "parcels",
            "jobs": [{ "kind": "summarize_text", "payload": { "text": "Ships come." } }],
        }),
    ),
    responses(
        (status = 200, description = "Whether the children are stored.", body = SpawnResponse),
        (status = 409, description = "The name is used for another step, the children of the job were cancelled, it would \
                                      have too many, or the worker was declared dead.",
         body = ProblemBody),
        (status = 413, description = "Too many bytes or too many jobs, or a payload is too large.", body = ProblemBody),
        (status = 422, description = "A job is invalid. Nothing is stored.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn spawn(
    State(server): State<Server>,
    caller: Caller,
    JobHeaders { trace, .. }: JobHeaders,
    LargeBody(body): LargeBody<SpawnRequest>,
) -> ApiResult<Json<SpawnResponse>> {
    caller.must_have(Scope::Enqueue)?;
    let SpawnRequest { worker_id, id, lease_no, name, jobs } = body;
    check_name("name", &name)?;
    let lease = LeaseRef { id, lease_no }.held_by(WorkerId(worker_id));
    check_worker_access(&server, &caller, lease.worker).await?;
    heartbeat(&server, lease.worker).await?;
    let respond = |status: Fenced| Ok(Json(SpawnResponse { status: status.into() }));
    let claim = server.client.claims(&[lease]).await?.pop().flatten();
    let Some(claim) = claim else { return respond(Fenced::LeaseLost) };
    let journal = server.client.journaled(lease.id, std::slice::from_ref(&name)).await?;
    match journal.named.first().map(|step| &step.state) {
        Some(StepState::Done(value)) if Spawn::read(value).is_some() => {
            count_replayed_step();
            return respond(Fenced::Held);
        }
        Some(StepState::Done(_)) => return Err(conflict(other_step("spawn", &name))),
        Some(StepState::Waiting { .. }) => return Err(conflict(waited_before(&name))),
        None => {}
    }
    let jobs = new_jobs(&server, &jobs, trace.as_deref()).await?;
    let span = batch_span();
    let members = span.in_scope(|| members(Some(&name), jobs))?;
    span.record("jobs", members.len());
    for (i, NewMember { job, .. }) in members.iter().enumerate() {
        caller.may_use(job.queue()).map_err(|problem| problem.at(format_args!("jobs[{i}]")))?;
        server.limiter.check_depth(&server.client, job.queue()).await?;
    }
    let value = encode(&Spawn::of(members.iter().map(|member| member.job.id)))?;
    check_journal_of(&journal, &value)?;
    let children = NewChildren { lease, kind: claim.kind().to_owned(), step: name.clone(), value, members };
    match server.client.spawn_children(children).instrument(span).await? {
        Spawned::Stored => respond(Fenced::Held),
        Spawned::LeaseLost => respond(Fenced::LeaseLost),
        refused => Err(conflict(refusal(&name, lease.id, refused).unwrap_or_default())),
    }
}

/// The leased job that waits for its children.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct JoinRequest {
    worker_id: Uuid,
    /// The id of the job.
    id: Uuid,
    lease_no: i32,
    /// The name of the step, unique within the job.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// Only children after this one: the `next` of the last response.
    after: Option<Uuid>,
    /// The maximum number of children in the response, 1 to 1000; 1000 by default.
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<u32>,
}

/// Whether the job continues, and its children.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct JoinResponse {
    status: WaitStatus,
    /// With `continue`: the children, all of which have ended, in the order of their ids.
    children: Vec<EndedChild>,
    /// If there are more children: the value of `after` for the next call.
    #[schema(required)]
    next: Option<Uuid>,
}

/// A child that has ended.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct EndedChild {
    id: Uuid,
    /// The name of the step that spawned it.
    #[schema(required)]
    task: Option<String>,
    /// How it ended.
    #[schema(required, nullable, value_type = Option<OutcomeSchema>)]
    outcome: Option<Outcome>,
    /// Its result, if it succeeded with one.
    #[schema(required, nullable, value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// Its last error, if it did not succeed.
    #[schema(required)]
    error: Option<String>,
}

impl From<ParentRecord> for EndedChild {
    fn from(child: ParentRecord) -> Self {
        let ParentRecord { id, task, outcome, result, error } = child;
        EndedChild { id: id.0, task, outcome, result, error }
    }
}

/// Waits without a worker until all children that a leased job has spawned have ended.
///
/// If they have ended already, the worker keeps the job and gets a page of the children. Otherwise the job is suspended,
/// as by `/leases/wait`, and is leased again when they have ended; make the same call then. Which children it has waited
/// for is stored, so a later attempt gets the same ones. A worker that is not registered, such as the one in the example,
/// is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/join",
    operation_id = "join_children",
    tag = "leases",
    request_body(content = JoinRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "id": "01990000-0000-7000-8000-000000000001",
        "lease_no": 1,
        "name": "all shipped",
    })),
    responses(
        (status = 200, description = "Whether the job continues, and its children.", body = JoinResponse),
        (status = 409, description = "The job has spawned no children, some were deleted, the name is used for another step, \
                                      or the worker was declared dead.",
         body = ProblemBody),
        (status = 422, description = "A value is out of range.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn join(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<JoinRequest>,
) -> ApiResult<Json<JoinResponse>> {
    let JoinRequest { worker_id, id, lease_no, name, after, limit } = body;
    check_name("name", &name)?;
    let limit = check_range("limit", limit.unwrap_or(MAX_CHILDREN), MAX_CHILDREN)?;
    let page = Page { after: after.map(JobId), limit };
    let lease = LeaseRef { id, lease_no }.held_by(WorkerId(worker_id));
    check_worker_access(&server, &caller, lease.worker).await?;
    heartbeat(&server, lease.worker).await?;
    let respond = |status| Json(JoinResponse { status, children: Vec::new(), next: None });
    let flow = FlowId(lease.id.0);
    let record = match server.client.flow(flow).await {
        // A job can be enqueued with the id of a flow. The members of that flow are not its children.
        Ok(record) if !record.is_of_children => return Err(conflict(no_children(&name))),
        Ok(record) => Some(record),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error.into()),
    };
    let journal = server.client.journaled(lease.id, std::slice::from_ref(&name)).await?;
    if server.client.assert_lease(&lease).await? == Fenced::LeaseLost {
        return Ok(respond(ended_before(&lease, &journal)));
    }
    if let Some(StepState::Done(value)) = journal.named.first().map(|step| &step.state) {
        let joined: Joined =
            serde_json::from_str(value.get()).map_err(|_| conflict(other_step("join", &name)))?;
        count_replayed_step();
        return joined_page(&server, &name, lease, &joined, page).await.map(Json);
    }
    let record = record.ok_or_else(|| conflict(no_children(&name)))?;
    let Some(all) = ended_children(&server, &name, lease, &record).await? else {
        let waits = vec![PendingWait { step: name, until: None, events: vec![flow_event(flow)] }];
        return Ok(respond(suspend(&server, lease, waits).await?));
    };
    let value = encode(&Joined::of(&all))?;
    check_journal_of(&journal, &value)?;
    let step = NewStep { lease, name, value };
    if server.client.save_steps(&[step]).await? != [Fenced::Held] {
        return Ok(respond(WaitStatus::LeaseLost));
    }
    count_stored_steps(1);
    Ok(Json(page.of(all)))
}

/// The children of a leased job, once all of them have ended; `None` while one has not.
async fn ended_children(
    server: &Server,
    join: &str,
    lease: Lease,
    record: &FlowRecord,
) -> ApiResult<Option<Vec<ParentRecord>>> {
    if record.ended_at.is_none() {
        return Ok(None);
    }
    let mut round = 0;
    loop {
        let children = spawned_children(server, lease).await?.of(join, None).map_err(conflict)?;
        match server.client.join_state(record, &children, round).await? {
            JoinState::Ended => return Ok(Some(children)),
            JoinState::Open => return Ok(None),
            JoinState::Again => round += 1,
        }
    }
}

/// A part of the children.
#[derive(Clone, Copy)]
struct Page {
    after: Option<JobId>,
    limit: u32,
}

impl Page {
    /// The part of these children, which are in the order of their ids.
    fn of(self, children: Vec<ParentRecord>) -> JoinResponse {
        let mut rest =
            children.into_iter().filter(|child| self.after.is_none_or(|after| child.id > after)).peekable();
        let mut page: Vec<EndedChild> = Vec::new();
        let mut bytes = 0;
        while page.len() < self.limit as usize && (page.is_empty() || bytes < MAX_RESULT_BYTES) {
            let Some(child) = rest.next() else { break };
            bytes += child.result.as_deref().map_or(0, |result| result.get().len());
            page.push(child.into());
        }
        let next = page.last().map(|last| last.id).filter(|_| rest.peek().is_some());
        JoinResponse { status: WaitStatus::Continue, children: page, next }
    }
}

/// A page of the children that a join has waited for. Only the first page checks that none was deleted.
async fn joined_page(
    server: &Server,
    name: &str,
    lease: Lease,
    joined: &Joined,
    page: Page,
) -> ApiResult<JoinResponse> {
    let Page { after: Some(after), limit } = page else {
        let children = spawned_children(server, lease).await?;
        return Ok(page.of(children.of(name, Some(&joined.spawned)).map_err(conflict)?));
    };
    let spawns = spawns(server, lease).await?;
    let is_wanted = |child: &ParentRecord| {
        child.task.as_ref().is_some_and(|task| joined.spawned.contains(task)) && is_child(child, &spawns)
    };
    // One more than the page has, to know whether there is a next one.
    let (mut found, mut last) = (Vec::new(), after);
    while found.len() <= limit as usize {
        let more = server.client.flow_results_after(FlowId(lease.id.0), Some(last)).await?;
        let Some(end) = more.last().map(|child| child.id) else { break };
        last = end;
        found.extend(more.into_iter().filter(is_wanted));
    }
    Ok(page.of(found))
}

/// The children that this run of a job has spawned.
async fn spawned_children(server: &Server, lease: Lease) -> ApiResult<SpawnedChildren> {
    let children = server.client.flow_results(FlowId(lease.id.0)).await?;
    Ok(SpawnedChildren::new(children, spawns(server, lease).await?))
}

/// What this run of a job has spawned, by the name of the step.
async fn spawns(server: &Server, lease: Lease) -> ApiResult<HashMap<String, Spawn>> {
    let steps = server.client.steps(lease.id).await?;
    let spawns = steps.into_iter().filter_map(|step| match &step.state {
        StepState::Done(value) => Spawn::read(value).map(|spawn| (step.name, spawn)),
        StepState::Waiting { .. } => None,
    });
    Ok(spawns.collect())
}

fn other_step(what: &str, name: &str) -> String {
    format!("{what} `{name}`: the name belongs to another step; use another one")
}

fn conflict(message: String) -> Problem {
    Problem::new(Slug::Conflict, message)
}
