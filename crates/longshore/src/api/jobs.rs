//! Existing jobs: get, list, cancel, retry, edit and delete them.

use std::fmt::Display;

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::response::{AppendHeaders, IntoResponse, Response};
use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::Server;
use super::auth::{Caller, Credential};
use super::enqueue::{check_size, parse_when};
use super::extract::{Body, JobIdPath, OptionalBody, Query, clamped, duration, nullable, refuse_nul};
use super::problem::{ApiResult, Problem, ProblemBody};
use super::returned::ReturnedJob;
use super::schemas::{JobSchema, StatusSchema};
use super::waiting_calls::retry_after;
use crate::client::Cancelled;
use crate::error::Error;
use crate::job::{JobId, JobRecord};
use crate::rules::enqueue::Edit;
use crate::store::{ListFilter, Page, Payloads, Scope};

/// How to return a job.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct GetQuery {
    /// How long to wait for the end of the job, up to 20; 0 by default.
    #[param(minimum = 0, maximum = 20)]
    wait_seconds: Option<f64>,
}

/// Returns a job, including the attempts that did not succeed.
///
/// With `wait_seconds`, the response comes when the job has ended, or as it is when the time is up. If too many calls wait
/// already, it comes at once, with the header `Retry-After`.
#[utoipa::path(
    get,
    path = "/jobs/{id}",
    operation_id = "get_job",
    tag = "jobs",
    params(
        ("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it."),
        GetQuery,
    ),
    responses(
        (status = 200, description = "The job.", body = JobSchema, headers(
            ("Retry-After" = u32, description = "Call again after this many seconds: too many calls wait already."),
        )),
        (status = 400, description = "A parameter is invalid.", body = ProblemBody),
        (status = 404, description = "There is no such job, or it is no longer kept.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    credential: Credential,
    JobIdPath(id): JobIdPath,
    Query(query): Query<GetQuery>,
) -> ApiResult<(AppendHeaders<Option<(HeaderName, HeaderValue)>>, Json<JobRecord>)> {
    let wait = duration("wait_seconds", query.wait_seconds.unwrap_or(0.0))
        .map_err(|problem| Problem::bad_request(problem.message()))?;
    if wait > MAX_WAIT {
        return Err(Problem::bad_request("wait_seconds: out of range; use 0 to 20, and repeat the request"));
    }
    let wait = wait.min(server.max_wait());
    let respond = |job: JobRecord, could_wait: bool| {
        let must_retry = !could_wait && !job.status.has_ended();
        (AppendHeaders(must_retry.then(retry_after)), Json(job))
    };
    let waiting = (!wait.is_zero()).then(|| server.waiting_calls.begin(&caller));
    let could_wait = !matches!(waiting, Some(None));
    // Listen before reading: an end between the two would otherwise be missed.
    let ended = waiting.flatten().map(|waiting| (waiting, server.listen_for_end(id)));
    let until = tokio::time::Instant::now() + wait;
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    let Some((_waiting, ended)) = ended.filter(|_| !job.status.has_ended()) else {
        return Ok(respond(job, could_wait));
    };
    tokio::select! {
        () = ended.ended() => {}
        () = tokio::time::sleep_until(until) => {}
        () = server.stopping() => {}
        problem = credential.refused(Scope::Read) => return Err(problem),
    }
    let job = server.client.get(id).await?;
    // Its queue may have changed with its contents.
    caller.may_access(&job.queue)?;
    Ok(respond(job, true))
}

/// The longest wait for the end of a job.
const MAX_WAIT: std::time::Duration = std::time::Duration::from_secs(20);
/// Filters and paging.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct ListQuery {
    /// Only jobs with this status, or with one of several, separated by commas.
    #[param(value_type = Option<Vec<StatusSchema>>, style = Form, explode = false)]
    status: Option<String>,
    /// Only jobs of this kind.
    kind: Option<String>,
    /// Only jobs of this queue.
    queue: Option<String>,
    /// Only jobs of this group.
    group: Option<String>,
    /// Only jobs with this tag.
    tag: Option<String>,
    /// Only jobs whose last error contains this text, in upper or lower case: of those that failed, were
    /// cancelled, run or are tried again.
    error: Option<String>,
    /// Only jobs whose last failure belongs to this group: dead letters, and jobs that run or are tried again.
    #[param(example = "9c33ef0a6b1d7f02", pattern = "^[0-9a-fA-F]{16}$")]
    failure: Option<String>,
    /// Only jobs created at this time or later.
    newer_than: Option<DateTime<Utc>>,
    /// Only jobs created before this time.
    older_than: Option<DateTime<Utc>>,
    /// Only jobs that ended at this time or later.
    ended_after: Option<DateTime<Utc>>,
    /// Only jobs that ended before this time.
    ended_before: Option<DateTime<Utc>>,
    /// Only the job with this idempotency key. With `queue`, also the one whose key belongs to this queue, because a token
    /// that is limited to queues has enqueued it.
    idempotency_key: Option<String>,
    /// Only the unfinished job with this unique key. With `queue`, also the one whose key belongs to this queue.
    unique_key: Option<String>,
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

/// Lists jobs, newest first.
#[utoipa::path(
    get,
    path = "/jobs",
    operation_id = "list_jobs",
    tag = "jobs",
    params(ListQuery),
    responses(
        (status = 200, description = "A page of jobs, which may be shorter than `limit`: it ends after about 4 MiB, and when the search for matching jobs has taken 80 ms. `Link` is the next page, if there is one.",
         body = Vec<JobSchema>, headers(
             ("Link" = String, description = "`<…>; rel=\"next\"`"),
             ("Longshore-Searched-Back-To" = DateTime<Utc>, description = "If the page is short because the search took too long: jobs created since this time were examined. The next page continues there."))),
        (status = 400, description = "A parameter is invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<ListQuery>,
) -> ApiResult<Response> {
    caller.may_use_queue_or_all(query.queue.as_deref())?;
    // A form that was not filled in sends an empty list.
    let statuses = query.status.as_deref().filter(|list| !list.is_empty());
    let statuses = statuses.into_iter().flat_map(|list| list.split(','));
    let filter = ListFilter {
        statuses: statuses.map(str::parse).collect::<Result<_, _>>().map_err(Problem::in_url)?,
        kind: query.kind.clone(),
        queue: query.queue.clone(),
        group: query.group.clone(),
        tag: query.tag.clone(),
        error: query.error.clone(),
        failure: query.failure.as_deref().map(str::parse).transpose().map_err(Problem::in_url)?,
        idempotency_key: query.idempotency_key.clone(),
        unique_key: query.unique_key.clone(),
        newer_than: query.newer_than,
        older_than: query.older_than,
        ended_after: query.ended_after,
        ended_before: query.ended_before,
        cursor: query.cursor.map(JobId),
        offset: skipped(query.offset),
        limit: page_size(query.limit),
        payloads: payloads(query.payload),
        ..ListFilter::default()
    };
    let ListFilter { kind, queue, group, tag, error, idempotency_key, unique_key, .. } = &filter;
    refuse_nul([kind, queue, group, tag, error, idempotency_key, unique_key].map(|text| text.as_deref()))?;
    let page = server.client.list(&filter).await.map_err(Problem::in_url)?;
    let mut response = page_response(&page, &uri);
    if page.jobs.len() < filter.limit as usize
        && let Some(searched) = page.next.and_then(|next| next.created_at())
        && let Ok(searched) = HeaderValue::from_str(&searched.to_rfc3339_opts(SecondsFormat::Millis, true))
    {
        response.headers_mut().insert("longshore-searched-back-to", searched);
    }
    Ok(response)
}

/// The page size for a requested `limit`.
pub(super) fn page_size(requested: Option<i64>) -> u32 {
    requested.unwrap_or(50).clamp(1, ListFilter::MAX_LIMIT.into()) as u32
}

/// The number of jobs to skip for a requested `offset`.
pub(super) fn skipped(requested: Option<i64>) -> u32 {
    u32::try_from(requested.unwrap_or(0).max(0)).unwrap_or(u32::MAX)
}

/// Whether to read payloads, for the parameter `payload`.
pub(super) fn payloads(requested: Option<bool>) -> Payloads {
    if requested == Some(false) { Payloads::Omit } else { Payloads::Include }
}

/// A page of jobs, with the URL of the next page in the `Link` header.
pub(super) fn page_response(page: &Page, uri: &Uri) -> Response {
    linked(&page.jobs, uri, page.next, page.next_offset)
}

/// A page of any list, with the URL of the next page in the `Link` header.
pub(super) fn linked<T: Serialize>(
    items: &[T],
    uri: &Uri,
    next: Option<impl Display>,
    next_offset: u32,
) -> Response {
    let mut response = Json(items).into_response();
    if let Some(next) = next {
        let link = format!("<{}>; rel=\"next\"", next_url(uri, next, next_offset));
        // The URL of a request always fits into a header.
        if let Ok(link) = HeaderValue::from_str(&link) {
            response.headers_mut().insert(header::LINK, link);
        }
    }
    response
}

/// The same URL with another cursor and offset.
fn next_url(uri: &Uri, next: impl Display, offset: u32) -> String {
    let others = uri.query().unwrap_or_default().split('&').filter(|pair| {
        let name = pair.split('=').next().unwrap_or_default();
        !name.is_empty() && name != "cursor" && name != "offset"
    });
    let mut pairs: Vec<String> = others.map(str::to_owned).collect();
    pairs.push(format!("cursor={next}"));
    if offset > 0 {
        pairs.push(format!("offset={offset}"));
    }
    format!("{}?{}", uri.path(), pairs.join("&"))
}

/// The result of a cancel request.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct CancelResponse {
    /// `cancelled`, or `pending` while the handler is still running.
    #[schema(example = "cancelled")]
    status: &'static str,
    job_id: Uuid,
}

/// Cancels a waiting job at once, and requests that a running one stops.
///
/// A job that has ended is refused with 409.
#[utoipa::path(
    post,
    path = "/jobs/{id}/cancel",
    operation_id = "cancel_job",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    responses(
        (status = 200, description = "The job was waiting and is cancelled.", body = CancelResponse),
        (status = 202, description = "The job is running; its handler sees the request at its next safe point.",
         body = CancelResponse),
        (status = 404, description = "There is no such job.", body = ProblemBody),
        (status = 409, description = "The job has already ended.", body = ProblemBody),
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

/// Runs a finished job again with a fresh attempt budget, or a waiting one now.
///
/// With a body, the job is also changed: no attempt starts between the retry and the change. A running job
/// is refused with 409.
#[utoipa::path(
    post,
    path = "/jobs/{id}/retry",
    operation_id = "retry_job",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    request_body(content = Option<EditRequest>, example = json!({ "priority": 10 })),
    responses(
        (status = 200, description = "The job after the change.", body = ReturnedJob),
        (status = 404, description = "There is no such job.", body = ProblemBody),
        (status = 409, description = "The job is running, or another job has its unique key.",
         body = ProblemBody),
        (status = 413, description = "The body or the payload is too large.", body = ProblemBody),
        (status = 422, description = "A value is out of range, or the schema of the kind does not allow the payload.",
         body = ProblemBody),
    ),
)]
pub(super) async fn retry(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
    OptionalBody(body): OptionalBody<EditRequest>,
) -> ApiResult<Json<ReturnedJob>> {
    check_access(&server, &caller, id).await?;
    let done = match body.into_edit()? {
        Some(edit) => server.client.retry_with(id, edit).await,
        None => server.client.retry(id).await,
    };
    if let Err(error) = done {
        return Err(refusal(&server, &caller, id, error).await);
    }
    ReturnedJob::changed(&server, &caller, id).await.map(Json)
}

/// Why a job does not wait again. Does not name a job of a queue that the caller's token does not cover.
pub(super) async fn refusal(server: &Server, caller: &Caller, id: JobId, error: Error) -> Problem {
    match (error.other_job(), error.status()) {
        (Some(other), Some(status)) if check_access(server, caller, other).await.is_err() => {
            let message = format!(
                "job {id}: its unique key belongs to a job of another queue; wait for that job to end"
            );
            Error::conflict(message).with_status(status).into()
        }
        _ => error.into(),
    }
}

/// Changes to a job. Absent fields stay as they are.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EditRequest {
    #[schema(minimum = -32768, maximum = 32767)]
    priority: Option<i64>,
    run_at: Option<DateTime<Utc>>,
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// The new payload. Null is a payload; leave the field out to keep the old one.
    #[serde(default, deserialize_with = "nullable")]
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

impl EditRequest {
    /// The changes; `None` if there are none.
    fn into_edit(self) -> ApiResult<Option<Edit>> {
        let when = parse_when(self.run_at, self.delay_seconds)?;
        if self.priority.is_none() && when.is_none() && self.payload.is_none() {
            return Ok(None);
        }
        let mut edit = Edit::default();
        if let Some(priority) = self.priority {
            edit = edit.priority(priority);
        }
        if let Some(when) = when {
            edit = edit.when(when);
        }
        if let Some(payload) = self.payload {
            check_size(&payload)?;
            edit = edit.payload(payload.get());
        }
        Ok(Some(edit))
    }
}

/// Edits a waiting job.
///
/// A concurrent claim gets either the old job or the new one, never a mixture. A job that is
/// not waiting is refused with 409.
#[utoipa::path(
    patch,
    path = "/jobs/{id}",
    operation_id = "edit_job",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    request_body(content = EditRequest, example = json!({ "priority": 10 })),
    responses(
        (status = 200, description = "The job after the change.", body = ReturnedJob),
        (status = 404, description = "There is no such job.", body = ProblemBody),
        (status = 409, description = "The job is not waiting.", body = ProblemBody),
        (status = 413, description = "The body or the payload is too large.", body = ProblemBody),
        (status = 422, description = "A value is out of range, or the schema of the kind does not allow the payload.",
         body = ProblemBody),
    ),
)]
pub(super) async fn edit(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
    Body(body): Body<EditRequest>,
) -> ApiResult<Json<ReturnedJob>> {
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    server.client.edit(id, body.into_edit()?.unwrap_or_default()).await?;
    ReturnedJob::changed(&server, &caller, id).await.map(Json)
}

/// Deletes a finished job and its history.
///
/// A job that has not ended is refused with 409; cancel it first.
#[utoipa::path(
    delete,
    path = "/jobs/{id}",
    operation_id = "delete_job",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    responses(
        (status = 204, description = "The job is deleted."),
        (status = 404, description = "There is no such job.", body = ProblemBody),
        (status = 409, description = "The job has not ended; cancel it first.", body = ProblemBody),
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

/// Refuses a job in a queue that the caller's token does not cover.
pub(super) async fn check_access(server: &Server, caller: &Caller, id: JobId) -> ApiResult<()> {
    if caller.queues().is_some() {
        caller.may_access(&server.client.get(id).await?.queue)?;
    }
    Ok(())
}
