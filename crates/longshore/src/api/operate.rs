//! Routes for operators: queues, workers, sweeps and dead letters.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::extract::{
    Body, JobIdPath, NamePath, OptionalBody, Query, check_range, clamped, duration, refuse_nul,
};
use super::jobs::{check_access, page_response, page_size, payloads, refusal, skipped};
use super::problem::{ApiResult, Problem, ProblemBody};
use super::returned::ReturnedJob;
use super::schemas::{JobSchema, QueueSchema, WorkerSchema};
use crate::client::Redriven;
use crate::client::recovery::{SweepMode, SweepReport};
use crate::job::{JobId, Status};
use crate::rules::enqueue::check_labels;
use crate::rules::lifecycle::Interruption;
use crate::store::{DeadFilter, ListFilter, QueueRecord, SweepScope, WorkerRecord};

// ---- queues ----------------------------------------------------------------

/// Lists queues that have settings or unfinished jobs, sorted by name.
#[utoipa::path(
    get,
    path = "/queues",
    operation_id = "list_queues",
    tag = "queues",
    responses((status = 200, description = "The queues that the token covers.", body = Vec<QueueSchema>)),
)]
pub(super) async fn queues(
    State(server): State<Server>,
    caller: Caller,
) -> ApiResult<Json<Vec<QueueRecord>>> {
    let mut queues = server.client.queues().await?;
    queues.retain(|queue| caller.may_use(&queue.name).is_ok());
    Ok(Json(queues))
}

/// Pauses a queue: no more jobs are claimed from it. Running jobs continue.
#[utoipa::path(
    post,
    path = "/queues/{name}/pause",
    operation_id = "pause_queue",
    tag = "queues",
    params(("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128)),
    responses((status = 200, description = "The queue after the change.", body = QueueSchema)),
)]
pub(super) async fn pause(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<QueueRecord>> {
    caller.may_use(&name)?;
    server.client.pause(&name).await.map_err(Problem::in_url)?;
    queue(&server, name).await
}

/// Resumes a paused queue.
#[utoipa::path(
    post,
    path = "/queues/{name}/resume",
    operation_id = "resume_queue",
    tag = "queues",
    params(("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128)),
    responses((status = 200, description = "The queue after the change.", body = QueueSchema)),
)]
pub(super) async fn resume(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<QueueRecord>> {
    caller.may_use(&name)?;
    server.client.resume(&name).await.map_err(Problem::in_url)?;
    queue(&server, name).await
}

/// The concurrency limit of a queue.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LimitRequest {
    /// How many jobs of the queue may run at once, over all processes. 1 makes the queue
    /// serial; null removes the limit.
    // Required, so that a request that forgets it does not remove the limit.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required, minimum = 1, maximum = 2147483647)]
    limit: Option<u32>,
}

/// Limits how many jobs of a queue run at once, over all processes.
#[utoipa::path(
    put,
    path = "/queues/{name}/limit",
    operation_id = "limit_queue",
    tag = "queues",
    params(("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128)),
    request_body(content = LimitRequest, example = json!({ "limit": 5 })),
    responses(
        (status = 200, description = "The queue after the change.", body = QueueSchema),
        (status = 422, description = "The limit is less than 1.", body = ProblemBody),
    ),
)]
pub(super) async fn limit(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    Body(body): Body<LimitRequest>,
) -> ApiResult<Json<QueueRecord>> {
    caller.may_use(&name)?;
    server.client.limit(&name, body.limit).await?;
    queue(&server, name).await
}

/// The queue; a default record if it has no settings and no jobs.
pub(super) async fn queue(server: &Server, name: String) -> ApiResult<Json<QueueRecord>> {
    let queues = server.client.queues().await?;
    let found = queues.into_iter().find(|queue| queue.name == name);
    Ok(Json(found.unwrap_or_else(|| QueueRecord::empty(&name))))
}

// ---- workers ---------------------------------------------------------------

/// When a worker counts as stale.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WorkersQuery {
    /// Overrides each worker's own threshold when deciding whether it is stale.
    #[param(minimum = 0)]
    threshold_seconds: Option<f64>,
}

/// Lists worker processes, newest first.
#[utoipa::path(
    get,
    path = "/workers",
    operation_id = "list_workers",
    tag = "workers",
    params(WorkersQuery),
    responses((status = 200, description = "Live and dead workers.", body = Vec<WorkerSchema>)),
)]
pub(super) async fn workers(
    State(server): State<Server>,
    caller: Caller,
    Query(query): Query<WorkersQuery>,
) -> ApiResult<Json<Vec<WorkerRecord>>> {
    caller.may_use_all()?;
    let threshold = query.threshold_seconds.map(|seconds| duration("threshold_seconds", seconds));
    Ok(Json(server.client.workers(threshold.transpose()?).await?))
}

/// Options of a sweep. The defaults are the server's recovery settings.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub(super) struct SweepRequest {
    /// Overrides each worker's own threshold.
    #[schema(minimum = 0, maximum = 315360000)]
    threshold_seconds: Option<f64>,
    /// How long recovered jobs wait before they are due; 5 by default, unless the server sets it.
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// The flags of resilient jobs. A worker that holds one is declared dead only after
    /// `resilient_factor` times its threshold. `infrastructure_resilient` by default.
    #[schema(max_items = 64)]
    resilient_flags: Option<Vec<String>>,
    /// The factor for workers that hold a resilient job; 3 by default.
    #[schema(minimum = 1, maximum = 2147483647)]
    resilient_factor: Option<u32>,
    /// Only report what would be done; change nothing.
    dry_run: bool,
}

/// What a sweep did, or would do in a dry run.
#[derive(Serialize, ToSchema)]
pub(super) struct SweepResponse {
    /// The workers whose leases were taken or that were newly declared dead.
    workers: Vec<Uuid>,
    /// How many jobs were recovered.
    recovered: u64,
    /// How many jobs were skipped.
    skipped: u64,
    /// How many jobs could not be recovered now, because another transaction has locked
    /// them or the database rejects the change. The log has the reasons, and later sweeps
    /// try again.
    deferred: u64,
    /// Whether this was a dry run.
    dry_run: bool,
}

/// Recovers the jobs of dead workers and hung handlers now.
#[utoipa::path(
    post,
    path = "/sweep",
    operation_id = "sweep_workers",
    tag = "workers",
    request_body(content = Option<SweepRequest>, example = json!({ "dry_run": true })),
    responses((status = 200, description = "What the sweep did.", body = SweepResponse)),
)]
pub(super) async fn sweep(
    State(server): State<Server>,
    caller: Caller,
    OptionalBody(body): OptionalBody<SweepRequest>,
) -> ApiResult<Json<SweepResponse>> {
    caller.may_use_all()?;
    let mut options = server.sweep.clone();
    if let Some(seconds) = body.threshold_seconds {
        let threshold = duration("threshold_seconds", seconds)?;
        options.scope = SweepScope { threshold: Some(threshold), orphan_after: threshold, ..options.scope };
    }
    if let Some(seconds) = body.delay_seconds {
        options.interruption =
            Interruption { delay: duration("delay_seconds", seconds)?, ..options.interruption };
    }
    if let Some(flags) = body.resilient_flags {
        check_labels("resilient_flags", &flags)?;
        options.scope.resilient_flags = flags;
    }
    if let Some(factor) = body.resilient_factor {
        options.scope.resilient_factor = check_range("resilient_factor", factor, i32::MAX as u32)?;
    }
    if body.dry_run {
        options.mode = SweepMode::DryRun;
    }
    let SweepReport { workers, recovered, skipped, deferred } = server.client.sweep(&options).await?;
    let workers = workers.into_iter().map(|worker| worker.0).collect();
    Ok(Json(SweepResponse { workers, recovered, skipped, deferred, dry_run: body.dry_run }))
}

// ---- dead letters ------------------------------------------------------------

/// Filters and paging.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct DeadQuery {
    /// Only jobs of this kind.
    kind: Option<String>,
    /// Only jobs of this queue.
    queue: Option<String>,
    /// The page size, clamped to 1 to 200. 50 by default.
    #[param(inline, value_type = Option<super::schemas::AnyInteger>)]
    #[serde(default, deserialize_with = "clamped")]
    limit: Option<i64>,
    /// Skip this many matches, at most 10,000. Beyond that, use `cursor`. A negative number
    /// counts as 0.
    #[param(inline, value_type = Option<super::schemas::Offset>)]
    #[serde(default, deserialize_with = "clamped")]
    offset: Option<i64>,
    /// Only jobs older than this one. The `Link` header contains the cursor of the next
    /// page.
    cursor: Option<Uuid>,
    /// `false` leaves out payloads and results: both fields are null. `true` by default.
    #[param(default = true)]
    payload: Option<bool>,
}

/// Lists dead letters, newest first: jobs that failed permanently.
#[utoipa::path(
    get,
    path = "/dead-letters",
    operation_id = "list_dead_letters",
    tag = "dead letters",
    params(DeadQuery),
    responses(
        (status = 200, description = "A page of jobs, which may be shorter than `limit`: it ends after about 4 MiB, and when the search for matching jobs has taken 80 ms. `Link` is the next page, if there is one.",
         body = Vec<JobSchema>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
    ),
)]
pub(super) async fn dead_letters(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<DeadQuery>,
) -> ApiResult<Response> {
    caller.may_use_queue_or_all(query.queue.as_deref())?;
    let filter = ListFilter {
        statuses: vec![Status::FailedPermanent],
        kind: query.kind,
        queue: query.queue,
        cursor: query.cursor.map(JobId),
        offset: skipped(query.offset),
        limit: page_size(query.limit),
        payloads: payloads(query.payload),
        ..ListFilter::default()
    };
    refuse_nul([filter.kind.as_deref(), filter.queue.as_deref()])?;
    let page = server.client.list(&filter).await.map_err(Problem::in_url)?;
    Ok(page_response(&page, &uri))
}

/// The maximum number of dead letters that one request redrives.
const MAX_REDRIVEN: u32 = 5_000;

/// Selects the dead letters to redrive.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RedriveRequest {
    /// Only jobs of this kind.
    kind: Option<String>,
    /// Only jobs of this queue.
    queue: Option<String>,
    /// Only jobs whose failure belongs to this group: a `fingerprint` of `GET /failures`.
    #[schema(value_type = Option<String>, pattern = "^[0-9a-fA-F]{16}$")]
    failure: Option<String>,
    /// The maximum number of jobs to redrive; 1,000 by default.
    #[schema(minimum = 1, maximum = 5000)]
    limit: Option<u32>,
    /// Redrive only jobs newer than this one: the `next` of the previous response.
    after: Option<Uuid>,
}

/// The result of a redrive.
#[derive(ToSchema)]
#[schema(as = RedriveResponse)]
#[expect(dead_code, reason = "describes what `Redriven` serialises to")]
pub(super) struct RedrivenSchema {
    /// How many jobs wait to run again.
    redriven: u64,
    /// How many jobs were skipped, because another job has their unique key or another
    /// request redrove them first.
    skipped: u64,
    /// The `after` to continue with; null if there are no more.
    #[schema(required)]
    next: Option<Uuid>,
}

/// Redrives dead letters, oldest first: they run again with a fresh attempt budget.
#[utoipa::path(
    post,
    path = "/dead-letters/redrive",
    operation_id = "redrive_dead_letters",
    tag = "dead letters",
    request_body(content = RedriveRequest, example = json!({ "kind": "summarize_text", "limit": 100 })),
    responses((status = 200, description = "How many jobs were redriven and skipped.", body = RedrivenSchema)),
)]
pub(super) async fn redrive_all(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<RedriveRequest>,
) -> ApiResult<Json<Redriven>> {
    caller.may_use_queue_or_all(body.queue.as_deref())?;
    refuse_nul([body.kind.as_deref(), body.queue.as_deref()])?;
    let limit = check_range("limit", body.limit.unwrap_or(1000), MAX_REDRIVEN)?;
    let filter = DeadFilter {
        kind: body.kind,
        queue: body.queue,
        failure: body.failure.as_deref().map(str::parse).transpose()?,
        after: body.after.map(JobId),
        limit,
    };
    Ok(Json(server.client.redrive_some(&filter).await?))
}

/// Redrives one dead letter: it runs again with a fresh attempt budget.
///
/// A job that is not a dead letter is refused with 409.
#[utoipa::path(
    post,
    path = "/dead-letters/{id}/redrive",
    operation_id = "redrive_dead_letter",
    tag = "dead letters",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    responses(
        (status = 200, description = "The job after the change.", body = ReturnedJob),
        (status = 404, description = "There is no such job.", body = ProblemBody),
        (status = 409, description = "The job is not a dead letter.", body = ProblemBody),
    ),
)]
pub(super) async fn redrive(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<Json<ReturnedJob>> {
    check_access(&server, &caller, id).await?;
    if let Err(error) = server.client.redrive(id).await {
        return Err(refusal(&server, &caller, id, error).await);
    }
    ReturnedJob::changed(&server, &caller, id).await.map(Json)
}
