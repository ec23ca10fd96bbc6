//! Routes for operations: changes of any number of jobs that run in the background. Also executes them, so
//! that a server without workers finishes what it has accepted.
//!
//! A token that is limited to queues may start an operation whose filter names one of its queues, or one on a
//! list of ids; there, jobs of other queues are skipped as if they did not exist. It may use the operations that
//! change no jobs of other queues.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use tokio::sync::Notify;
use tokio::task::AbortHandle;
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::auth::Caller;
use super::extract::{Body, OperationIdPath, Query, clamped};
use super::jobs::{linked, page_size};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::{ActionSchema, AnyInteger, JobFilterSchema, OperationSchema, OperationStateSchema};
use super::{Server, Shared, reached_end};
use crate::job::{JobId, OperationId};
use crate::store::{Action, JobFilter, NewOperation, OperationFilter, OperationRecord, OperationState};

/// An operation to start. Give either `filter` or `ids`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewOperation)]
pub(super) struct NewOperationBody {
    /// An id of your choice, so that the request can be repeated if the response is lost.
    #[serde(default, deserialize_with = "id")]
    id: Option<Uuid>,
    #[serde(deserialize_with = "action")]
    #[schema(value_type = ActionSchema)]
    action: Action,
    /// Selects the jobs that match every field set here. Set at least one.
    #[schema(value_type = Option<JobFilterSchema>)]
    filter: Option<Box<RawValue>>,
    /// The ids of the jobs.
    #[schema(value_type = Option<Vec<Uuid>>, min_items = 1, max_items = 10000)]
    ids: Option<Box<RawValue>>,
}

fn id<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Uuid>, D::Error> {
    named(input, "id", "give a UUID, or leave it out")
}

fn action<'de, D: Deserializer<'de>>(input: D) -> Result<Action, D::Error> {
    named(input, "action", "use cancel, retry or delete")
}

/// Deserializes a field so that an error names it and the remedy.
fn named<'de, D: Deserializer<'de>, T: DeserializeOwned>(
    input: D,
    field: &str,
    remedy: &str,
) -> Result<T, D::Error> {
    let json = <&RawValue>::deserialize(input)?.get();
    serde_json::from_str(json).map_err(|_| D::Error::custom(format!("{field}: {json} is invalid; {remedy}")))
}

/// Starts an operation: cancels, retries or deletes any number of jobs in the background.
///
/// Jobs are visited from the newest to the oldest, each one once. Jobs that were created after the start are not
/// touched, and jobs that have ended since are not retried. The operation continues after a restart of
/// the server, and `GET /operations/{id}` returns its progress. If the response is lost, repeat the request with
/// the same `id`. A token that is limited to queues must name one of them in the filter; in a list of ids, jobs of
/// other queues are skipped.
#[utoipa::path(
    post,
    path = "/operations",
    operation_id = "start_operation",
    tag = "operations",
    request_body(content = NewOperationBody, example = json!({
        "action": "retry",
        "filter": { "status": ["failed_permanent"], "error": "connection refused" },
    })),
    responses(
        (status = 202, description = "The operation, which was started by this request or by an earlier one with the same id.",
         body = OperationSchema, headers(("Location" = String, description = "The path of the operation."))),
        (status = 409, description = "Another operation has this id.", body = ProblemBody),
        (status = 422, description = "The filter is empty, or a value is invalid. Nothing is stored.", body = ProblemBody),
    ),
)]
pub(super) async fn start(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Body(body): Body<NewOperationBody>,
) -> ApiResult<Response> {
    let mut operation = match (body.filter, body.ids) {
        (Some(filter), None) => {
            let filter = parse_filter(&filter)?;
            // An empty one is refused for every caller.
            if filter != JobFilter::default() {
                caller.may_use_queue_or_all(filter.queue.as_deref())?;
            }
            NewOperation::matching(body.action, filter)
        }
        (None, Some(ids)) => {
            let operation = NewOperation::of_jobs(body.action, parse_ids(&ids)?);
            match caller.queues() {
                Some(queues) => operation.only_in(queues),
                None => operation,
            }
        }
        (Some(_), Some(_)) => {
            return Err(Problem::validation("ids: the request also has a `filter`; give one of the two"));
        }
        (None, None) => {
            return Err(Problem::validation(
                "filter: is missing; give a `filter`, or the `ids` of the jobs to change",
            ));
        }
    };
    if let Some(id) = body.id {
        operation = operation.id(OperationId(id));
    }
    if let Caller::Token(token) = &caller {
        operation = operation.created_by(&token.name);
    }
    let operation = server.client.start_operation(operation).await?;
    server.execute_operations_soon();
    let location = format!("{}/{}", uri.path().trim_end_matches('/'), operation.id);
    let location = HeaderValue::from_str(&location).map_err(|_| Problem::bad_request("path: not ASCII"))?;
    Ok((StatusCode::ACCEPTED, [(header::LOCATION, location)], Json(operation)).into_response())
}

/// Parses a filter. An error names the field.
fn parse_filter(json: &RawValue) -> ApiResult<JobFilter> {
    let Ok(fields) = serde_json::from_str::<BTreeMap<String, Box<RawValue>>>(json.get()) else {
        return Err(Problem::validation("filter: expected an object with named fields"));
    };
    serde_json::from_str(json.get()).map_err(|error| {
        // Serde's message has the reason, but not always the field.
        // As text: a value of `serde_json` cannot hold every number and string that JSON can.
        let is_wrong = |name: &str, value: &RawValue| {
            let only = format!("{{{}:{}}}", serde_json::Value::from(name), value.get());
            serde_json::from_str::<JobFilter>(&only).is_err()
        };
        let wrong = fields.iter().find(|(name, value)| is_wrong(name, value)).map_or("", |(name, _)| name);
        let remedy = match wrong {
            "status" => "; give a list of statuses",
            "older_than" | "newer_than" | "ended_before" | "ended_after" => {
                "; give a time like 2030-01-02T03:04:05Z"
            }
            _ => "",
        };
        Problem::validation(format!("filter.{wrong}: {}{remedy}", super::extract::without_position(&error)))
    })
}

fn parse_ids(json: &RawValue) -> ApiResult<Vec<JobId>> {
    let Ok(ids) = serde_json::from_str::<Vec<String>>(json.get()) else {
        return Err(Problem::validation("ids: expected a list of job ids, each a string"));
    };
    let parse = |(i, id): (usize, &String)| {
        id.parse().map_err(|error: crate::Error| {
            Problem::validation(error.to_string()).at(format_args!("ids[{i}]"))
        })
    };
    ids.iter().enumerate().map(parse).collect()
}

/// Which operations to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct OperationsQuery {
    /// Only operations in this state.
    #[param(value_type = Option<OperationStateSchema>)]
    state: Option<OperationState>,
    /// The page size, clamped to 1 to 200. 50 by default.
    #[param(inline, value_type = Option<AnyInteger>)]
    #[serde(default, deserialize_with = "clamped")]
    limit: Option<i64>,
    /// Only operations that were started before this one. The `Link` header contains the cursor of the next page.
    cursor: Option<Uuid>,
}

/// Lists operations, newest first. They are kept for 7 days.
///
/// A token that is limited to queues lists the operations that change no jobs of other queues.
#[utoipa::path(
    get,
    path = "/operations",
    operation_id = "list_operations",
    tag = "operations",
    params(OperationsQuery),
    responses(
        (status = 200, description = "A page of operations. `Link` is the next page, if there may be one.",
         body = Vec<OperationSchema>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
        (status = 400, description = "A parameter is invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<OperationsQuery>,
) -> ApiResult<Response> {
    let limit = page_size(query.limit);
    let filter = OperationFilter {
        state: query.state,
        queues: caller.queues().map(<[String]>::to_vec),
        before: query.cursor.map(OperationId),
        limit,
    };
    let operations = server.client.operations(&filter).await?;
    let last = operations.last().filter(|_| operations.len() == limit as usize);
    Ok(linked(&operations, &uri, last.map(|operation| operation.id), 0))
}

/// Returns an operation with its progress.
#[utoipa::path(
    get,
    path = "/operations/{id}",
    operation_id = "get_operation",
    tag = "operations",
    params(("id" = Uuid, Path, description = "The id of an operation, as `POST /operations` returns it.")),
    responses(
        (status = 200, description = "The operation.", body = OperationSchema),
        (status = 404, description = "There is no such operation, or it is no longer kept.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    OperationIdPath(id): OperationIdPath,
) -> ApiResult<Json<OperationRecord>> {
    find(&server, &caller, id).await.map(Json)
}

/// Stops an operation after the jobs that it is changing now. It can be resumed.
///
/// An operation that has ended is refused with 409.
#[utoipa::path(
    post,
    path = "/operations/{id}/stop",
    operation_id = "stop_operation",
    tag = "operations",
    params(("id" = Uuid, Path, description = "The id of an operation, as `POST /operations` returns it.")),
    responses(
        (status = 200, description = "The operation after the change.", body = OperationSchema),
        (status = 404, description = "There is no such operation, or it is no longer kept.", body = ProblemBody),
        (status = 409, description = "The operation is done or has failed.", body = ProblemBody),
    ),
)]
pub(super) async fn stop(
    State(server): State<Server>,
    caller: Caller,
    OperationIdPath(id): OperationIdPath,
) -> ApiResult<Json<OperationRecord>> {
    find(&server, &caller, id).await?;
    Ok(Json(server.client.stop_operation(id).await?))
}

/// Lets an operation continue that was stopped or has failed. It visits no job again.
///
/// An operation that is done is refused with 409.
#[utoipa::path(
    post,
    path = "/operations/{id}/resume",
    operation_id = "resume_operation",
    tag = "operations",
    params(("id" = Uuid, Path, description = "The id of an operation, as `POST /operations` returns it.")),
    responses(
        (status = 200, description = "The operation after the change.", body = OperationSchema),
        (status = 404, description = "There is no such operation, or it is no longer kept.", body = ProblemBody),
        (status = 409, description = "The operation is done.", body = ProblemBody),
    ),
)]
pub(super) async fn resume(
    State(server): State<Server>,
    caller: Caller,
    OperationIdPath(id): OperationIdPath,
) -> ApiResult<Json<OperationRecord>> {
    find(&server, &caller, id).await?;
    let operation = server.client.resume_operation(id).await?;
    server.execute_operations_soon();
    Ok(Json(operation))
}

/// The operation, if the caller may use it.
async fn find(server: &Server, caller: &Caller, id: OperationId) -> ApiResult<OperationRecord> {
    let operation = server.client.operation(id).await?;
    let Some(covered) = caller.queues() else { return Ok(operation) };
    let is_covered = |queues: &Vec<String>| queues.iter().all(|queue| covered.contains(queue));
    if operation.queues.as_ref().is_some_and(is_covered) {
        return Ok(operation);
    }
    let message = format!(
        "this token covers only the queues {}; the operation changes, or may change, jobs of other queues",
        covered.join(", ")
    );
    Err(Problem::new(Slug::Forbidden, message))
}

// ---- executing -------------------------------------------------------------

/// How often a server looks for operations that no process executes, for example after a restart.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);

/// Who executes the operations of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Operations {
    /// The server and the workers.
    #[default]
    Execute,
    /// Only workers and other servers. For a process that ends soon.
    Leave,
}

/// The task that executes operations.
pub(super) struct Executor {
    mode: Operations,
    wake: Arc<Notify>,
    task: Mutex<Option<AbortHandle>>,
}

impl Executor {
    pub(super) fn new(mode: Operations) -> Self {
        Executor { mode, wake: Arc::default(), task: Mutex::default() }
    }
}

impl Server {
    /// Starts the task that looks for operations, if it is not running. The task ends with the router.
    pub(super) fn start_executor(&self) {
        let mut task = self.operations.task.lock().unwrap_or_else(PoisonError::into_inner);
        if self.operations.mode == Operations::Execute && task.as_ref().is_none_or(AbortHandle::is_finished) {
            let (wake, ending) = (self.operations.wake.clone(), self.ending.clone());
            let executing = execute(Arc::downgrade(&self.0), wake, ending);
            *task = Some(tokio::spawn(executing).abort_handle());
        }
    }

    fn execute_operations_soon(&self) {
        self.start_executor();
        self.operations.wake.notify_one();
    }
}

async fn execute(
    shared: Weak<Shared>,
    wake: Arc<Notify>,
    ending: Option<tokio::sync::watch::Receiver<bool>>,
) {
    loop {
        tokio::select! {
            () = wake.notified() => {}
            () = tokio::time::sleep(LOOK_INTERVAL) => {}
            () = reached_end(ending.clone()) => return,
        }
        let Some(client) = shared.upgrade().map(|shared| shared.client.clone()) else { return };
        let pause = |time| {
            let (shared, ending) = (shared.clone(), ending.clone());
            async move {
                tokio::select! {
                    () = tokio::time::sleep(time) => shared.strong_count() > 0,
                    () = reached_end(ending) => false,
                }
            }
        };
        if let Err(error) = client.run_operations(pause).await {
            tracing::debug!(%error, "could not continue an operation; trying again");
        }
    }
}
