//! Jobs that are there: look, cancel, retry, change, delete.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderValue, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::enqueue::{check_size, parse_when};
use super::extract::{Body, JobIdPath, Query, nullable, refuse_nul};
use super::problem::{ApiResult, Problem, ProblemBody};
use super::schemas::{JobSchema, StatusSchema};
use crate::client::Cancelled;
use crate::enqueue::Edit;
use crate::job::{JobId, JobRecord};
use crate::store::{ListFilter, Page};

/// One job with its history.
#[utoipa::path(
    get,
    path = "/jobs/{id}",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The job.")),
    responses(
        (status = 200, description = "The job.", body = JobSchema),
        (status = 404, description = "No such job, or no longer kept.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<Json<JobRecord>> {
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    Ok(Json(job))
}

/// Which jobs, and where the page begins.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// In this status.
    #[param(value_type = Option<StatusSchema>)]
    status: Option<String>,
    /// Of this kind.
    kind: Option<String>,
    /// Of this queue.
    queue: Option<String>,
    /// With this tag.
    tag: Option<String>,
    /// With this idempotency key.
    idempotency_key: Option<String>,
    /// With this unique key; live jobs only.
    unique_key: Option<String>,
    /// How many, 1 to 200; others are clamped. 50 by default.
    limit: Option<i64>,
    /// Past so many matches, up to 10,000; then use `cursor`.
    #[param(minimum = 0, maximum = 10000)]
    offset: Option<u64>,
    /// Older than this job; the `Link` header has it for the next page.
    cursor: Option<Uuid>,
}

/// Jobs, newest first.
#[utoipa::path(
    get,
    path = "/jobs",
    tag = "jobs",
    params(ListQuery),
    responses(
        (status = 200, description = "A page. `Link` names the next one, if there is one; a page may be short.",
         body = Vec<JobSchema>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
        (status = 400, description = "A parameter that is wrong.", body = ProblemBody),
    ),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<ListQuery>,
) -> ApiResult<Response> {
    caller.may_use_queue_or_all(query.queue.as_deref())?;
    let offset = query.offset.unwrap_or(0);
    let filter = ListFilter {
        status: query.status.as_deref().map(str::parse).transpose().map_err(Problem::in_url)?,
        kind: query.kind.clone(),
        queue: query.queue.clone(),
        tag: query.tag.clone(),
        idempotency_key: query.idempotency_key.clone(),
        unique_key: query.unique_key.clone(),
        cursor: query.cursor.map(JobId),
        offset: u32::try_from(offset).unwrap_or(u32::MAX),
        limit: page_size(query.limit),
        ..ListFilter::default()
    };
    refuse_nul(
        [&filter.kind, &filter.queue, &filter.tag, &filter.idempotency_key, &filter.unique_key]
            .map(|text| text.as_deref()),
    )?;
    let page = server.client.list(&filter).await.map_err(Problem::in_url)?;
    Ok(page_response(&page, &uri))
}

/// How many jobs a page holds, whatever was asked for.
pub(super) fn page_size(asked: Option<i64>) -> u32 {
    asked.unwrap_or(50).clamp(1, ListFilter::MAX_LIMIT.into()) as u32
}

/// A page of jobs, with the way to the next in its header.
pub(super) fn page_response(page: &Page, uri: &Uri) -> Response {
    let mut response = Json(&page.jobs).into_response();
    if let Some(next) = page.next {
        let link = format!("<{}>; rel=\"next\"", with_cursor(uri.path(), uri.query(), next));
        // What is in a request's own URL fits into a header.
        if let Ok(link) = HeaderValue::from_str(&link) {
            response.headers_mut().insert(header::LINK, link);
        }
    }
    response
}

/// The same query from another place on.
fn with_cursor(path: &str, query: Option<&str>, next: JobId) -> String {
    let kept = query.unwrap_or_default().split('&').filter(|pair| {
        let name = pair.split('=').next().unwrap_or_default();
        !name.is_empty() && name != "cursor" && name != "offset"
    });
    let mut all: Vec<String> = kept.map(str::to_owned).collect();
    all.push(format!("cursor={next}"));
    format!("{path}?{}", all.join("&"))
}

/// What a cancel did.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CancelResponse {
    /// `cancelled`, or `pending` while the handler has yet to stop.
    #[schema(example = "cancelled")]
    status: &'static str,
    job_id: Uuid,
}

/// Cancels a waiting job at once and tells a running one to stop.
#[utoipa::path(
    post,
    path = "/jobs/{id}/cancel",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The job.")),
    responses(
        (status = 200, description = "It waited and is cancelled.", body = CancelResponse),
        (status = 202, description = "It runs; its handler will see it.", body = CancelResponse),
        (status = 404, description = "No such job.", body = ProblemBody),
        (status = 409, description = "It has ended.", body = ProblemBody),
    ),
)]
pub(super) async fn cancel(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<(StatusCode, Json<CancelResponse>)> {
    check_access(&server, &caller, id).await?;
    let (code, status) = match server.client.cancel(id).await? {
        Cancelled::Now => (StatusCode::OK, "cancelled"),
        Cancelled::Pending => (StatusCode::ACCEPTED, "pending"),
    };
    Ok((code, Json(CancelResponse { status, job_id: id.0 })))
}

/// Lets a finished job run again with a fresh budget, and a waiting one run now.
#[utoipa::path(
    post,
    path = "/jobs/{id}/retry",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The job.")),
    responses(
        (status = 200, description = "The job as it stands now.", body = JobSchema),
        (status = 404, description = "No such job.", body = ProblemBody),
        (status = 409, description = "It runs, or its unique key belongs to another.", body = ProblemBody),
    ),
)]
pub(super) async fn retry(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<Json<JobRecord>> {
    check_access(&server, &caller, id).await?;
    server.client.retry(id).await?;
    Ok(Json(server.client.get(id).await?))
}

/// What to change about a waiting job; what is absent stays.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EditRequest {
    #[schema(minimum = -32768, maximum = 32767)]
    priority: Option<i64>,
    run_at: Option<DateTime<Utc>>,
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// Another payload; null is one.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

/// Changes a waiting job: a claim gets the old job whole or the new one.
#[utoipa::path(
    patch,
    path = "/jobs/{id}",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The job.")),
    request_body = EditRequest,
    responses(
        (status = 200, description = "The job as it stands now.", body = JobSchema),
        (status = 404, description = "No such job.", body = ProblemBody),
        (status = 409, description = "It does not wait.", body = ProblemBody),
        (status = 413, description = "Too large.", body = ProblemBody),
        (status = 422, description = "A value out of range, or a payload that is wrong for the kind.", body = ProblemBody),
    ),
)]
pub(super) async fn edit(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
    Body(body): Body<EditRequest>,
) -> ApiResult<Json<JobRecord>> {
    let mut edit = Edit::default();
    if let Some(priority) = body.priority {
        edit = edit.priority(priority);
    }
    if let Some(when) = parse_when(body.run_at, body.delay_seconds)? {
        edit = edit.when(when);
    }
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    if let Some(payload) = body.payload {
        check_size(&payload)?;
        server.kinds.check_payload(&server.client, &job.kind, payload.get()).await?;
        edit = edit.payload(payload.get());
    }
    server.client.edit(id, edit).await?;
    Ok(Json(server.client.get(id).await?))
}

/// Removes a finished job and its history.
#[utoipa::path(
    delete,
    path = "/jobs/{id}",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The job.")),
    responses(
        (status = 204, description = "It is gone."),
        (status = 404, description = "No such job.", body = ProblemBody),
        (status = 409, description = "It has not ended; cancel it first.", body = ProblemBody),
    ),
)]
pub(super) async fn delete(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<StatusCode> {
    check_access(&server, &caller, id).await?;
    server.client.delete(id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Refuses jobs of queues that the caller may not touch.
pub(super) async fn check_access(server: &Server, caller: &Caller, id: JobId) -> ApiResult<()> {
    if caller.queues().is_some() {
        caller.may_access(&server.client.get(id).await?.queue)?;
    }
    Ok(())
}
