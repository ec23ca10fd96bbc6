//! Routes for flows: enqueue, list and show them, add jobs, seal, cancel and retry them.
//!
//! A token that is limited to queues may use only flows of which it covers every job: see
//! [`check_access`].

mod body;

use axum::Json;
use axum::extract::{OriginalUri, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tracing::Instrument;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::enqueue::ENQUEUED_AS;
use super::extract::{
    FlowIdPath, JobHeaders, MAX_BATCH_BODY, Query, Subject, clamped, expect_content_type, parse_object,
    read_body, refuse_nul, work_on,
};
use super::jobs::{linked, page_size};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::returned::ReturnedFlow;
use super::schemas::{AnyInteger, FlowSchema, TaskSchema};
use crate::client::{Client, batch_span, members};
use crate::job::{FlowId, JobId};
use crate::rules::enqueue::{EnqueuedAs, ValidJob};
use crate::store::{FlowFilter, FlowRecord, NewFlow, NewMember, PutFlow};

use body::{AddJobsBody, NewFlowBody};
pub(super) use body::{FlowJobBody, new_jobs};

/// The maximum number of tasks per page.
const MAX_TASKS: u32 = 1000;
/// The maximum number of jobs of a flow that a token which is limited to queues may use, because each
/// request counts them.
const MAX_CHECKED: u64 = 10_000;

/// Enqueues a flow: jobs that wait for each other.
///
/// All jobs are stored in one commit, or none. A task starts when the tasks in its `after` have ended as
/// it needs, and is skipped as soon as one of them has ended in another way. A token that is limited to
/// queues must cover the queue of every job, including those of the callbacks; its idempotency keys belong to the queue
/// of the first task. Without the scope `read`, the response for a flow that already existed has only its `id`, its
/// `status` and `enqueued_as`.
#[utoipa::path(
    post,
    path = "/flows",
    operation_id = "enqueue_flow",
    tag = "flows",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Overrides `idempotency_key` in the body.",
         max_length = 512),
        ("traceparent" = Option<String>, Header, description = "W3C trace context, stored with every job."),
    ),
    request_body(
        description = "At most 10,000 jobs and 16 MiB.",
        content = NewFlowBody,
        example = json!({
            "name": "import",
            "tasks": [
                { "task": "fetch", "kind": "summarize_text", "payload": { "text": "Ships come." } },
                { "task": "parse", "after": ["fetch"], "kind": "summarize_text", "payload": { "text": "Ships go." } },
                { "task": "clean up", "after": [{ "task": "parse", "condition": "ended" }],
                  "kind": "summarize_text", "payload": { "text": "Nothing is lost." } },
            ],
            "on_failure": { "kind": "summarize_text", "payload": { "text": "The import failed." } },
            "deadline_seconds": 3600,
        }),
    ),
    responses(
        (status = 201, description = "The flow was created.", body = FlowSchema,
         headers(("Location" = String, description = "The path of the flow."),
                 ("Enqueued-As" = String, description = "`created`."))),
        (status = 200, description = "A flow with this key or id already existed. It is unchanged.", body = ReturnedFlow,
         headers(("Location" = String, description = "The path of the flow."),
                 ("Enqueued-As" = String, description = "`existing`."))),
        (status = 400, description = "The body is not JSON, or there are several `Idempotency-Key` headers.",
         body = ProblemBody),
        (status = 409, description = "A job has this id.", body = ProblemBody),
        (status = 413, description = "Too many bytes or too many jobs, or a payload is too large.", body = ProblemBody),
        (status = 429, description = "Too many requests, or too many waiting jobs. `Retry-After` is the time to wait.",
         body = ProblemBody),
        (status = 422, description = "A task is invalid, tasks wait for each other, or a task waits for one that the flow \
                                      does not have. Nothing is stored.",
         body = ProblemBody),
    ),
)]
pub(super) async fn enqueue(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    JobHeaders { idempotency_key, trace }: JobHeaders,
    request: Request,
) -> ApiResult<Response> {
    expect_content_type(request.headers(), &["application/json"])?;
    let bytes = read_body(request, MAX_BATCH_BODY).await?;
    let body: NewFlowBody = parse_object(Subject::Body, &bytes)?;
    let chosen_id = body.id.map(FlowId);
    let span = batch_span();
    let flow = body.into_flow(&server, idempotency_key, trace.as_deref()).await?;
    let flow = span.in_scope(|| flow.validate())?;
    span.record("jobs", flow.members.len());
    let flow = for_caller(flow, &caller)?;
    let found = match chosen_id {
        Some(id) => flow_with_id(&server, id).await?,
        None => None,
    };
    let (how, flow) = match found {
        Some(found) => (EnqueuedAs::Existing, found),
        None => {
            for job in jobs_of(&flow) {
                server.limiter.check_depth(&server.client, job.queue()).await?;
            }
            match server.client.put_flow(&flow).instrument(span).await? {
                (PutFlow::Created, flow) => (EnqueuedAs::Created, flow),
                (_, flow) => (EnqueuedAs::Existing, flow),
            }
        }
    };
    let (status, enqueued_as) = match how {
        EnqueuedAs::Created => (StatusCode::CREATED, "created"),
        EnqueuedAs::Existing | EnqueuedAs::Replaced => (StatusCode::OK, "existing"),
    };
    if status == StatusCode::OK {
        check_access(&server, &caller, &flow).await?;
    }
    let location = format!("{}/{}", uri.path().trim_end_matches('/'), flow.id);
    let location = HeaderValue::from_str(&location).map_err(|_| Problem::bad_request("path: not ASCII"))?;
    let headers = [(header::LOCATION, location), (ENQUEUED_AS, HeaderValue::from_static(enqueued_as))];
    Ok((status, headers, Json(ReturnedFlow::enqueued(&caller, flow, how))).into_response())
}

/// Every job of a new flow, including the callbacks.
fn jobs_of(flow: &NewFlow) -> impl Iterator<Item = &ValidJob> {
    flow.members.iter().map(|member| &member.job).chain(&flow.callbacks)
}

/// Checks that the caller may enqueue every job of the flow. As for a job, the key of a token that covers only some
/// queues is in a namespace.
fn for_caller(flow: NewFlow, caller: &Caller) -> ApiResult<NewFlow> {
    for NewMember { job, task, .. } in &flow.members {
        let name = task.as_deref().unwrap_or(job.kind());
        caller.may_use(job.queue()).map_err(|problem| problem.at(format_args!("task `{name}`")))?;
    }
    for job in &flow.callbacks {
        caller.may_use(job.queue()).map_err(|problem| problem.at("callback"))?;
    }
    if caller.queues().is_none() {
        return Ok(flow);
    }
    if flow.members.is_empty() {
        return Err(Problem::new(
            Slug::Forbidden,
            "tasks: the flow has none, and a token that covers only some queues cannot use such a flow; add one task",
        ));
    }
    Ok(flow.with_key_in_namespace()?)
}

/// The flow with an id that the caller chose, if it exists.
async fn flow_with_id(server: &Server, id: FlowId) -> ApiResult<Option<FlowRecord>> {
    match server.client.flow(id).await {
        Ok(flow) => Ok(Some(flow)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Refuses a flow of which the caller's token does not cover every job.
async fn check_access(server: &Server, caller: &Caller, flow: &FlowRecord) -> ApiResult<()> {
    let queues = caller.queues();
    if is_covered(&server.client, queues, flow).await? {
        return Ok(());
    }
    let queues = queues.unwrap_or_default().join(", ");
    let message = format!(
        "this token covers only the queues {queues}; the flow has, had or may have jobs of other queues, or more \
         than {MAX_CHECKED} jobs"
    );
    Err(Problem::new(Slug::Forbidden, message))
}

/// Whether these queues have every job of a flow. A token that is limited to queues must not learn about
/// jobs of other queues, or change them, through a flow. So everything that cannot be checked is not
/// covered: flows without jobs, flows whose jobs were removed, and very large ones.
pub(super) async fn is_covered(
    client: &Client,
    queues: Option<&[String]>,
    flow: &FlowRecord,
) -> crate::error::Result<bool> {
    let Some(queues) = queues else { return Ok(true) };
    if flow.members == 0 || flow.members > MAX_CHECKED {
        return Ok(false);
    }
    Ok(client.members_in(flow.id, queues).await? >= flow.members)
}

/// The flow, if the caller may use it.
async fn find(server: &Server, caller: &Caller, id: FlowId) -> ApiResult<FlowRecord> {
    let flow = server.client.flow(id).await?;
    check_access(server, caller, &flow).await?;
    Ok(flow)
}

/// Which flows to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FlowsQuery {
    /// Only flows with this name.
    name: Option<String>,
    /// Only flows that have not ended (`true`) or have (`false`).
    open: Option<bool>,
    /// The page size, clamped to 1 to 200. 50 by default.
    #[param(inline, value_type = Option<AnyInteger>)]
    #[serde(default, deserialize_with = "clamped")]
    limit: Option<i64>,
    /// Only flows older than this one. The `Link` header contains the cursor of the next page.
    cursor: Option<Uuid>,
}

/// Lists flows, newest first, including the children of jobs.
///
/// A flow may have jobs of any queue, so a token that is limited to queues cannot list flows.
#[utoipa::path(
    get,
    path = "/flows",
    operation_id = "list_flows",
    tag = "flows",
    params(FlowsQuery),
    responses(
        (status = 200, description = "A page of flows. `Link` is the next page, if there may be one.",
         body = Vec<FlowSchema>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
        (status = 400, description = "A parameter is invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<FlowsQuery>,
) -> ApiResult<Response> {
    caller.may_use_all()?;
    refuse_nul([query.name.as_deref()])?;
    let limit = page_size(query.limit);
    let before = query.cursor.map(FlowId);
    let filter = FlowFilter { name: query.name, open: query.open, before, limit };
    let flows = server.client.flows(&filter).await?;
    let next = flows.last().filter(|_| flows.len() == limit as usize).map(|flow| flow.id);
    Ok(linked(&flows, &uri, next, 0))
}

/// Returns a flow. The children of a job are the flow with the id of the job.
///
/// The numbers may lag behind the jobs by a moment.
#[utoipa::path(
    get,
    path = "/flows/{id}",
    operation_id = "get_flow",
    tag = "flows",
    params(("id" = Uuid, Path, description = "The id of a flow, as `POST /flows` and `GET /flows` return it.")),
    responses(
        (status = 200, description = "The flow.", body = FlowSchema),
        (status = 404, description = "There is no such flow, or it is no longer kept.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    FlowIdPath(id): FlowIdPath,
) -> ApiResult<Json<FlowRecord>> {
    find(&server, &caller, id).await.map(Json)
}

/// Which jobs of a flow to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct TasksQuery {
    /// The page size, clamped to 1 to 1000. 100 by default.
    #[param(inline, value_type = Option<AnyInteger>)]
    #[serde(default, deserialize_with = "clamped")]
    limit: Option<i64>,
    /// Only jobs after this one. The `Link` header contains the cursor of the next page.
    cursor: Option<Uuid>,
}

/// Lists the jobs of a flow in the order of their ids, with what they wait for.
///
/// Callbacks are not part of the flow.
#[utoipa::path(
    get,
    path = "/flows/{id}/tasks",
    operation_id = "list_tasks",
    tag = "flows",
    params(
        ("id" = Uuid, Path, description = "The id of a flow, as `POST /flows` and `GET /flows` return it."),
        TasksQuery,
    ),
    responses(
        (status = 200, description = "A page of jobs. `Link` is the next page, if there may be one.",
         body = Vec<TaskSchema>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
        (status = 404, description = "There is no such flow, or it is no longer kept.", body = ProblemBody),
    ),
)]
pub(super) async fn tasks(
    State(server): State<Server>,
    caller: Caller,
    FlowIdPath(id): FlowIdPath,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<TasksQuery>,
) -> ApiResult<Response> {
    find(&server, &caller, id).await?;
    let limit = query.limit.unwrap_or(100).clamp(1, MAX_TASKS.into()) as u32;
    let tasks = server.client.tasks(id, query.cursor.map(JobId), limit).await?;
    let next = tasks.last().filter(|_| tasks.len() == limit as usize).map(|task| task.id);
    Ok(linked(&tasks, &uri, next, 0))
}

/// Adds jobs to a flow that is not sealed. They start at once.
///
/// All jobs are stored, or none. With an `Idempotency-Key` header, repeat the request if the response is
/// lost: the same key with the same body adds the jobs once. A sealed flow is refused with 409.
#[utoipa::path(
    post,
    path = "/flows/{id}/jobs",
    operation_id = "add_jobs",
    tag = "flows",
    params(
        ("id" = Uuid, Path, description = "The id of a flow, as `POST /flows` and `GET /flows` return it."),
        ("Idempotency-Key" = Option<String>, Header, description = "Identifies this part of the flow.",
         max_length = 512),
        ("traceparent" = Option<String>, Header, description = "W3C trace context, stored with every job."),
    ),
    request_body(
        description = "At most 10,000 jobs and 16 MiB.",
        content = AddJobsBody,
        example = json!({ "jobs": [
            { "kind": "summarize_text", "payload": { "text": "Ships come." } },
            { "kind": "summarize_text", "payload": { "text": "Ships go." } },
        ] }),
    ),
    responses(
        (status = 200, description = "The flow after the change.", body = ReturnedFlow),
        (status = 404, description = "There is no such flow.", body = ProblemBody),
        (status = 409, description = "The flow is sealed or was cancelled.", body = ProblemBody),
        (status = 413, description = "Too many bytes or too many jobs, or a payload is too large.", body = ProblemBody),
        (status = 422, description = "A job is invalid. Nothing is stored.", body = ProblemBody),
    ),
)]
pub(super) async fn add(
    State(server): State<Server>,
    caller: Caller,
    FlowIdPath(id): FlowIdPath,
    JobHeaders { idempotency_key, trace }: JobHeaders,
    request: Request,
) -> ApiResult<Json<ReturnedFlow>> {
    expect_content_type(request.headers(), &["application/json"])?;
    let bytes = read_body(request, MAX_BATCH_BODY).await?;
    // A part belongs to a flow, and its id depends on the whole request. So one namespace is enough for all limited tokens.
    let namespace = if caller.queues().is_some() { "limited" } else { "" };
    let read = work_on(bytes, move |bytes| {
        let body: AddJobsBody = parse_object(Subject::Body, bytes)?;
        ApiResult::Ok((body, idempotency_key.map(|key| part_id(namespace, &key, bytes))))
    });
    let (body, part) = read.await??;
    find(&server, &caller, id).await?;
    let jobs = body.into_jobs(&server, trace.as_deref()).await?;
    let span = batch_span();
    let members = span.in_scope(|| members(None, jobs))?;
    span.record("jobs", members.len());
    for (i, NewMember { job, .. }) in members.iter().enumerate() {
        caller.may_use(job.queue()).map_err(|problem| problem.at(format_args!("jobs[{i}]")))?;
        server.limiter.check_depth(&server.client, job.queue()).await?;
    }
    server.client.add_members(id, part, &members).instrument(span).await?;
    ReturnedFlow::changed(&server, &caller, id).await.map(Json)
}

/// The id of a part that has a key: the same whenever the request is repeated.
fn part_id(namespace: &str, key: &str, body: &[u8]) -> Uuid {
    let mut hash = Sha256::new();
    for text in [namespace, key] {
        hash.update((text.len() as u64).to_be_bytes());
        hash.update(text);
    }
    hash.update(body);
    let mut id = [0; 16];
    id.copy_from_slice(&hash.finalize()[..16]);
    uuid::Builder::from_custom_bytes(id).into_uuid()
}

/// Seals a flow: no more jobs can be added, and it ends when all of its jobs have ended.
///
/// Sealing a sealed flow changes nothing.
#[utoipa::path(
    post,
    path = "/flows/{id}/seal",
    operation_id = "seal_flow",
    tag = "flows",
    params(("id" = Uuid, Path, description = "The id of a flow, as `POST /flows` and `GET /flows` return it.")),
    responses(
        (status = 200, description = "The flow after the change.", body = ReturnedFlow),
        (status = 404, description = "There is no such flow.", body = ProblemBody),
    ),
)]
pub(super) async fn seal(
    State(server): State<Server>,
    caller: Caller,
    FlowIdPath(id): FlowIdPath,
) -> ApiResult<Json<ReturnedFlow>> {
    find(&server, &caller, id).await?;
    server.client.seal_flow(id).await?;
    ReturnedFlow::changed(&server, &caller, id).await.map(Json)
}

/// The result of cancelling a flow.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = CancelledFlow)]
pub(super) struct CancelFlowResponse {
    /// How many waiting jobs were cancelled.
    cancelled: u64,
    /// How many running jobs were requested to stop.
    requested: u64,
}

/// Cancels a flow: waiting jobs are cancelled, running ones are requested to stop, and nothing else
/// starts. Callbacks are enqueued when the flow has ended.
///
/// A flow that has ended is refused with 409. If the request times out, upkeep cancels the rest.
#[utoipa::path(
    post,
    path = "/flows/{id}/cancel",
    operation_id = "cancel_flow",
    tag = "flows",
    params(("id" = Uuid, Path, description = "The id of a flow, as `POST /flows` and `GET /flows` return it.")),
    responses(
        (status = 200, description = "What was cancelled.", body = CancelFlowResponse),
        (status = 404, description = "There is no such flow.", body = ProblemBody),
        (status = 409, description = "The flow has already ended.", body = ProblemBody),
    ),
)]
pub(super) async fn cancel(
    State(server): State<Server>,
    caller: Caller,
    FlowIdPath(id): FlowIdPath,
) -> ApiResult<Json<CancelFlowResponse>> {
    find(&server, &caller, id).await?;
    let done = server.client.cancel_flow(id).await?;
    Ok(Json(CancelFlowResponse { cancelled: done.cancelled, requested: done.requested }))
}

/// The result of retrying a flow.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RetriedFlow)]
pub(super) struct RetryFlowResponse {
    /// How many jobs are open again.
    reopened: u64,
}

/// Retries the failed part of a flow: jobs that did not succeed wait again, with a fresh attempt budget.
/// What succeeded is not repeated.
///
/// If the request times out, repeat it.
#[utoipa::path(
    post,
    path = "/flows/{id}/retry",
    operation_id = "retry_flow",
    tag = "flows",
    params(("id" = Uuid, Path, description = "The id of a flow, as `POST /flows` and `GET /flows` return it.")),
    responses(
        (status = 200, description = "How many jobs are open again; 0 if none had failed.", body = RetryFlowResponse),
        (status = 404, description = "There is no such flow.", body = ProblemBody),
    ),
)]
pub(super) async fn retry(
    State(server): State<Server>,
    caller: Caller,
    FlowIdPath(id): FlowIdPath,
) -> ApiResult<Json<RetryFlowResponse>> {
    find(&server, &caller, id).await?;
    let done = server.client.retry_flow(id).await?;
    Ok(Json(RetryFlowResponse { reopened: done.reopened }))
}
