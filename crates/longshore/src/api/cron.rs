//! Schedules.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::enqueue::NewJobBody;
use super::extract::{Body, NamePath, object};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::EnqueuedAsSchema;
use crate::cron::NewSchedule;
use crate::enqueue::EnqueuedAs;
use crate::store::Schedule;

/// A schedule.
#[derive(Serialize, ToSchema)]
#[schema(as = Schedule)]
pub(super) struct ScheduleBody {
    name: String,
    /// The cron line.
    cron: String,
    /// An IANA time zone.
    zone: String,
    /// What happens to missed ticks: `skip`, `one` or `all:N`.
    missed: String,
    /// The job each tick enqueues.
    #[schema(value_type = serde_json::Value)]
    job: Box<RawValue>,
    paused: bool,
    next_at: DateTime<Utc>,
    #[schema(required)]
    last_at: Option<DateTime<Utc>>,
}

impl From<Schedule> for ScheduleBody {
    fn from(schedule: Schedule) -> Self {
        ScheduleBody {
            name: schedule.name,
            cron: schedule.expression,
            zone: schedule.zone,
            missed: schedule.missed,
            // Written down by us, so it is JSON.
            job: RawValue::from_string(schedule.template).unwrap_or_default(),
            paused: schedule.paused,
            next_at: schedule.next_at,
            last_at: schedule.last_at,
        }
    }
}

/// What to put.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewSchedule)]
pub(super) struct NewScheduleBody {
    /// Five fields, or six with seconds first.
    #[schema(example = "*/5 * * * *")]
    cron: String,
    /// An IANA time zone; UTC by default.
    zone: Option<String>,
    /// What happens to missed ticks: `skip`, `one` (the default) or `all:N`.
    missed: Option<String>,
    /// The job each tick enqueues; without a time and an idempotency key of its
    /// own.
    #[serde(deserialize_with = "object")]
    job: NewJobBody,
}

/// Schedules, by name.
#[utoipa::path(
    get,
    path = "/cron",
    tag = "cron",
    responses((status = 200, description = "By name.", body = Vec<ScheduleBody>)),
)]
pub(super) async fn list(State(server): State<Server>, caller: Caller) -> ApiResult<Json<Vec<ScheduleBody>>> {
    caller.may_use_all()?;
    Ok(Json(server.client.schedules().await?.into_iter().map(ScheduleBody::from).collect()))
}

/// One schedule.
#[utoipa::path(
    get,
    path = "/cron/{name}",
    tag = "cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 200, description = "The schedule.", body = ScheduleBody),
        (status = 404, description = "No such schedule.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    one(&server, &name).await
}

/// Creates a schedule or changes the one of that name.
#[utoipa::path(
    put,
    path = "/cron/{name}",
    tag = "cron",
    params(("name" = String, Path, description = "The schedule.", min_length = 1, max_length = 128)),
    request_body = NewScheduleBody,
    responses(
        (status = 200, description = "What is stored.", body = ScheduleBody),
        (status = 422, description = "A line, a zone, a policy or a job that cannot be.", body = ProblemBody),
    ),
)]
pub(super) async fn put(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    Body(body): Body<NewScheduleBody>,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    let known = server.kinds.check_payload(&server.client, body.job.kind(), body.job.payload()).await?;
    let mut schedule = NewSchedule::new(name, body.cron, body.job.into_job(&known.defaults)?);
    if let Some(zone) = body.zone {
        schedule = schedule.zone(zone);
    }
    if let Some(missed) = body.missed {
        schedule = schedule.missed(missed.parse()?);
    }
    Ok(Json(server.client.put_schedule(schedule).await?.into()))
}

/// Holds a schedule's ticks back.
#[utoipa::path(
    post,
    path = "/cron/{name}/pause",
    tag = "cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 200, description = "As it is now.", body = ScheduleBody),
        (status = 404, description = "No such schedule.", body = ProblemBody),
    ),
)]
pub(super) async fn pause(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    server.client.pause_schedule(&name).await?;
    one(&server, &name).await
}

/// Lets a schedule tick again.
#[utoipa::path(
    post,
    path = "/cron/{name}/resume",
    tag = "cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 200, description = "As it is now.", body = ScheduleBody),
        (status = 404, description = "No such schedule.", body = ProblemBody),
    ),
)]
pub(super) async fn resume(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    server.client.resume_schedule(&name).await?;
    one(&server, &name).await
}

/// The job that a run by hand made.
#[derive(Serialize, ToSchema)]
pub(super) struct ScheduleRun {
    job_id: Uuid,
    #[schema(value_type = EnqueuedAsSchema)]
    how: EnqueuedAs,
}

/// Enqueues a schedule's job now, as an extra.
#[utoipa::path(
    post,
    path = "/cron/{name}/run",
    tag = "cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 201, description = "Its job.", body = ScheduleRun),
        (status = 404, description = "No such schedule.", body = ProblemBody),
    ),
)]
pub(super) async fn run(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<(StatusCode, Json<ScheduleRun>)> {
    caller.may_use_all()?;
    let job = server.client.run_schedule_now(&name).await?;
    Ok((StatusCode::CREATED, Json(ScheduleRun { job_id: job.id.0, how: job.how })))
}

/// Removes a schedule. Jobs that it enqueued stay.
#[utoipa::path(
    delete,
    path = "/cron/{name}",
    tag = "cron",
    params(("name" = String, Path, description = "The schedule.")),
    responses(
        (status = 204, description = "It is gone."),
        (status = 404, description = "No such schedule.", body = ProblemBody),
    ),
)]
pub(super) async fn remove(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<StatusCode> {
    caller.may_use_all()?;
    server.client.remove_schedule(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn one(server: &Server, name: &str) -> ApiResult<Json<ScheduleBody>> {
    let found = server.client.schedules().await?.into_iter().find(|schedule| schedule.name == name);
    found
        .map(|schedule| Json(schedule.into()))
        .ok_or_else(|| Problem::new(Slug::NotFound, "there is no schedule of that name"))
}
