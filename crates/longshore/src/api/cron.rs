//! Cron schedules: list, create, change, pause, run and delete them.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::enqueue::NewJobBody;
use super::extract::{Body, NamePath, object};
use super::kinds::defaults_of;
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::returned::may_read;
use super::schemas::EnqueuedAsSchema;
use crate::client::schedules::{NewSchedule, Template};
use crate::rules::enqueue::EnqueuedAs;
use crate::store::Schedule;

/// A schedule, which enqueues one job at each tick.
#[derive(Serialize, ToSchema)]
#[schema(as = Schedule)]
pub(super) struct ScheduleBody {
    name: String,
    /// The cron expression.
    cron: String,
    /// The IANA time zone of the expression.
    zone: String,
    /// What happens to missed ticks: `skip`, `one` or `all:N`.
    missed: String,
    /// The job that each tick enqueues. Null if the stored job cannot be read, and if a token without the scope `read`
    /// pauses or resumes the schedule.
    #[schema(required)]
    job: Option<NewJobBody>,
    paused: bool,
    /// The next tick.
    next_at: DateTime<Utc>,
    /// The last tick; null before the first.
    #[schema(required)]
    last_at: Option<DateTime<Utc>>,
}

impl From<Schedule> for ScheduleBody {
    fn from(schedule: Schedule) -> Self {
        let template = Template::parse(&schedule.template).inspect_err(|error| {
            tracing::warn!(schedule = schedule.name, %error, "the stored job of a schedule cannot be read");
        });
        ScheduleBody {
            name: schedule.name,
            cron: schedule.expression,
            zone: schedule.zone,
            missed: schedule.missed,
            job: template.ok().map(NewJobBody::of_template),
            paused: schedule.paused,
            next_at: schedule.next_at,
            last_at: schedule.last_at,
        }
    }
}

/// The contents of a schedule. A schedule can be stored as it was read: the fields that the
/// server computes are accepted too.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewSchedule)]
pub(super) struct NewScheduleBody {
    /// A cron expression of five fields, or of six with seconds first.
    #[schema(example = "*/5 * * * *")]
    cron: String,
    /// An IANA time zone; UTC by default.
    zone: Option<String>,
    /// What happens to missed ticks: `skip`, `one` (the default) or `all:N`.
    missed: Option<String>,
    /// The job that each tick enqueues. It must not set `id`, `run_at`,
    /// `delay_seconds` or `idempotency_key`.
    #[serde(deserialize_with = "object")]
    job: NewJobBody,
    /// The name in the path, if set.
    name: Option<String>,
    /// Whether the schedule is paused. If absent, a new schedule is not paused, and an
    /// existing one stays as it is.
    paused: Option<bool>,
    /// Ignored: the server computes the next tick.
    #[expect(dead_code, reason = "accepted, so that a schedule can be stored as it was read")]
    next_at: Option<DateTime<Utc>>,
    /// Ignored: the server records the last tick.
    #[expect(dead_code, reason = "accepted, so that a schedule can be stored as it was read")]
    last_at: Option<DateTime<Utc>>,
}

/// Lists schedules, sorted by name.
#[utoipa::path(
    get,
    path = "/cron",
    operation_id = "list_schedules",
    tag = "cron",
    responses((status = 200, description = "All schedules.", body = Vec<ScheduleBody>)),
)]
pub(super) async fn list(State(server): State<Server>, caller: Caller) -> ApiResult<Json<Vec<ScheduleBody>>> {
    caller.may_use_all()?;
    Ok(Json(server.client.schedules().await?.into_iter().map(ScheduleBody::from).collect()))
}

/// Returns a schedule.
#[utoipa::path(
    get,
    path = "/cron/{name}",
    operation_id = "get_schedule",
    tag = "cron",
    params(("name" = String, Path, description = "The name of a schedule.", example = "nightly")),
    responses(
        (status = 200, description = "The schedule.", body = ScheduleBody),
        (status = 404, description = "There is no schedule with this name.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    find(&server, &name).await
}

/// Creates a schedule, or changes the one with this name.
///
/// Accepts what `GET /cron/{name}` returns.
#[utoipa::path(
    put,
    path = "/cron/{name}",
    operation_id = "put_schedule",
    tag = "cron",
    params(("name" = String, Path, description = "The name of the schedule.", example = "nightly", min_length = 1, max_length = 128)),
    request_body(content = NewScheduleBody, example = json!({
        "cron": "0 3 * * *",
        "zone": "Europe/Berlin",
        "missed": "one",
        "job": { "kind": "summarize_text", "payload": { "text": "Ships come. Ships go." } },
    })),
    responses(
        (status = 200, description = "The schedule as stored.", body = ScheduleBody),
        (status = 422, description = "The cron expression, the zone, the policy or the job is invalid.",
         body = ProblemBody),
    ),
)]
pub(super) async fn put(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    Body(body): Body<NewScheduleBody>,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    if let Some(other) = body.name.filter(|other| *other != name) {
        return Err(Problem::validation(format!(
            "name: `{other}` differs from `{name}` in the path; use the same name, or leave it out"
        )));
    }
    body.job.refuse_id().map_err(|problem| problem.at("job"))?;
    let kind = server.client.check_job(body.job.kind(), body.job.queue(), body.job.payload()).await?;
    let job = body.job.into_job(&defaults_of(kind.as_deref()))?;
    let mut schedule = NewSchedule::new(&name, body.cron, job);
    if let Some(zone) = body.zone {
        schedule = schedule.zone(zone);
    }
    if let Some(missed) = body.missed {
        schedule = schedule.missed(missed.parse()?);
    }
    let stored = server.client.put_schedule(schedule).await?;
    match body.paused {
        Some(true) if !stored.paused => server.client.pause_schedule(&name).await?,
        Some(false) if stored.paused => server.client.resume_schedule(&name).await?,
        _ => return Ok(Json(stored.into())),
    }
    find(&server, &name).await
}

/// Pauses a schedule: it enqueues no jobs until it is resumed.
#[utoipa::path(
    post,
    path = "/cron/{name}/pause",
    operation_id = "pause_schedule",
    tag = "cron",
    params(("name" = String, Path, description = "The name of a schedule.", example = "nightly")),
    responses(
        (status = 200, description = "The schedule after the change.", body = ScheduleBody),
        (status = 404, description = "There is no schedule with this name.", body = ProblemBody),
    ),
)]
pub(super) async fn pause(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    server.client.pause_schedule(&name).await?;
    changed(&server, &caller, &name).await
}

/// Resumes a paused schedule.
#[utoipa::path(
    post,
    path = "/cron/{name}/resume",
    operation_id = "resume_schedule",
    tag = "cron",
    params(("name" = String, Path, description = "The name of a schedule.", example = "nightly")),
    responses(
        (status = 200, description = "The schedule after the change.", body = ScheduleBody),
        (status = 404, description = "There is no schedule with this name.", body = ProblemBody),
    ),
)]
pub(super) async fn resume(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<Json<ScheduleBody>> {
    caller.may_use_all()?;
    server.client.resume_schedule(&name).await?;
    changed(&server, &caller, &name).await
}

/// The job of a manual run.
#[derive(Serialize, ToSchema)]
pub(super) struct ScheduleRun {
    job_id: Uuid,
    #[schema(value_type = EnqueuedAsSchema)]
    how: EnqueuedAs,
}

/// Enqueues a schedule's job now, in addition to its ticks.
#[utoipa::path(
    post,
    path = "/cron/{name}/run",
    operation_id = "run_schedule",
    tag = "cron",
    params(("name" = String, Path, description = "The name of a schedule.", example = "nightly")),
    responses(
        (status = 201, description = "The job was enqueued.", body = ScheduleRun),
        (status = 404, description = "There is no schedule with this name.", body = ProblemBody),
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

/// Deletes a schedule. Jobs that it has enqueued stay.
#[utoipa::path(
    delete,
    path = "/cron/{name}",
    operation_id = "delete_schedule",
    tag = "cron",
    params(("name" = String, Path, description = "The name of a schedule.", example = "nightly")),
    responses(
        (status = 204, description = "The schedule is deleted."),
        (status = 404, description = "There is no schedule with this name.", body = ProblemBody),
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

/// A schedule that the call has paused or resumed.
async fn changed(server: &Server, caller: &Caller, name: &str) -> ApiResult<Json<ScheduleBody>> {
    let Json(schedule) = find(server, name).await?;
    let job = schedule.job.filter(|_| may_read(caller));
    Ok(Json(ScheduleBody { job, ..schedule }))
}

async fn find(server: &Server, name: &str) -> ApiResult<Json<ScheduleBody>> {
    let found = server.client.schedules().await?.into_iter().find(|schedule| schedule.name == name);
    found
        .map(|schedule| Json(schedule.into()))
        .ok_or_else(|| Problem::new(Slug::NotFound, format!("there is no schedule `{name}`")))
}
