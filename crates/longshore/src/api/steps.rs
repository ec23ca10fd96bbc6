//! Events that jobs wait for, and the journaled steps of a job.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::Server;
use super::auth::Caller;
use super::extract::{Body, JobIdPath, NamePath};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::returned::may_read;
use crate::store::{Emitted, EventRecord, StepRecord, StepState};

/// An event to emit.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewEvent)]
pub(super) struct NewEventBody {
    /// The name that jobs wait for.
    #[schema(min_length = 1, max_length = 128)]
    name: String,
    /// Any JSON of at most 64 KiB; null if absent.
    #[schema(value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
}

/// An event.
#[derive(Serialize, ToSchema)]
#[schema(as = Event)]
pub(super) struct EventBody {
    name: String,
    /// Absent if a token without the scope `read` emits an event that exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, value_type = Option<serde_json::Value>)]
    payload: Option<Box<RawValue>>,
    emitted_at: DateTime<Utc>,
}

impl From<EventRecord> for EventBody {
    fn from(event: EventRecord) -> Self {
        EventBody { name: event.name, payload: Some(event.payload), emitted_at: event.emitted_at }
    }
}

/// Emits an event. Jobs that wait for it continue.
///
/// The first event with a name wins. It is kept for 7 days, so a job may also wait for an event
/// that was emitted earlier. Events belong to no queue, so a token that is limited to queues
/// cannot emit them.
#[utoipa::path(
    post,
    path = "/events",
    operation_id = "emit_event",
    tag = "events",
    request_body(content = NewEventBody, example = json!({ "name": "approved:42", "payload": { "by": "ada" } })),
    responses(
        (status = 201, description = "The event is stored.", body = EventBody),
        (status = 200, description = "An event with this name exists; it is unchanged.", body = EventBody),
        (status = 422, description = "The name or the payload is invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn emit(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<NewEventBody>,
) -> ApiResult<(StatusCode, Json<EventBody>)> {
    caller.may_use_all()?;
    let emitted = server.client.emit(&body.name, &body.payload).await?;
    let event = find(&server, &body.name).await?;
    Ok(match emitted {
        Emitted::First => (StatusCode::CREATED, Json(event)),
        Emitted::Repeated => (
            StatusCode::OK,
            Json(EventBody { payload: event.payload.filter(|_| may_read(&caller)), ..event }),
        ),
    })
}

/// Returns an event.
#[utoipa::path(
    get,
    path = "/events/{name}",
    operation_id = "get_event",
    tag = "events",
    params(("name" = String, Path, description = "The name of the event.", example = "approved:42", min_length = 1, max_length = 128)),
    responses(
        (status = 200, description = "The event.", body = EventBody),
        (status = 404, description = "No event with this name was emitted in the last 7 days.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<EventBody>> {
    caller.may_use_all()?;
    find(&server, &name).await.map(Json)
}

async fn find(server: &Server, name: &str) -> ApiResult<EventBody> {
    let event = server.client.event(name).await?;
    let missing = || {
        let name = &name[..name.floor_char_boundary(200)];
        Problem::new(Slug::NotFound, format!("no event `{name}` was emitted in the last 7 days"))
    };
    event.map(EventBody::from).ok_or_else(missing)
}

/// A journaled step of a job.
#[derive(Serialize, ToSchema)]
#[schema(as = Step)]
pub(super) struct StepBody {
    name: String,
    status: StepStatus,
    /// What the step returned; null while the job waits here.
    #[schema(required, nullable, value_type = Option<serde_json::Value>)]
    value: Option<Box<RawValue>>,
    /// The deadline of a wait; null if it has none, or if the step is done.
    #[schema(required)]
    until: Option<DateTime<Utc>>,
    saved_at: DateTime<Utc>,
}

/// Whether a step is done.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum StepStatus {
    /// It is done and is not repeated.
    Done,
    /// The job waits here.
    Waiting,
}

impl From<StepRecord> for StepBody {
    fn from(step: StepRecord) -> Self {
        let (status, value, until) = match step.state {
            StepState::Done(value) => (StepStatus::Done, Some(value), None),
            StepState::Waiting { until } => (StepStatus::Waiting, None, until),
        };
        StepBody { name: step.name, status, value, until, saved_at: step.saved_at }
    }
}

/// Lists the journaled steps of a job, sorted by name.
#[utoipa::path(
    get,
    path = "/jobs/{id}/steps",
    operation_id = "list_steps",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The id of a job, as `POST /jobs` and `GET /jobs` return it.")),
    responses(
        (status = 200, description = "The steps.", body = Vec<StepBody>),
        (status = 404, description = "There is no such job.", body = ProblemBody),
    ),
)]
pub(super) async fn steps(
    State(server): State<Server>,
    caller: Caller,
    JobIdPath(id): JobIdPath,
) -> ApiResult<Json<Vec<StepBody>>> {
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    Ok(Json(server.client.steps(id).await?.into_iter().map(StepBody::from).collect()))
}
