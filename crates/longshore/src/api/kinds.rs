//! Registered kinds: the defaults of a kind, and the routes that list, register and
//! remove kinds. The client checks new jobs against them.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::Server;
use super::auth::Caller;
use super::enqueue::{NewJobBody, TimeoutSchema, TimeoutSeconds};
use super::extract::{Body, NamePath, Object, optional_object};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::RetrySchema;
use crate::client::kinds::Kind;
use crate::json_schema::JsonSchema;
use crate::retry::RetryPolicy;
use crate::store::{KindRecord, NewKind};

/// The maximum size of a schema, in bytes of JSON. Every process that enqueues keeps the schemas in memory.
const MAX_SCHEMA: usize = 256 * 1024;

/// Values for the fields that a request leaves out.
#[derive(Clone, Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = KindDefaults)]
pub(super) struct Defaults {
    #[schema(min_length = 1, max_length = 128)]
    pub(super) queue: Option<String>,
    #[schema(minimum = -32768, maximum = 32767)]
    pub(super) priority: Option<i64>,
    #[schema(minimum = 1, maximum = 32767)]
    pub(super) max_attempts: Option<i64>,
    #[schema(value_type = Option<TimeoutSchema>)]
    pub(super) timeout_seconds: Option<TimeoutSeconds>,
    #[serde(default, deserialize_with = "optional_object")]
    #[schema(value_type = Option<RetrySchema>)]
    pub(super) retry: Option<RetryPolicy>,
}

/// The defaults of a registered kind.
pub(super) fn defaults_of(kind: Option<&Kind>) -> Defaults {
    let Some(stored) = kind.and_then(|kind| kind.defaults.as_ref()) else { return Defaults::default() };
    serde_json::from_str(stored.get()).unwrap_or_else(|error| {
        tracing::warn!(%error, "the stored defaults of a kind are invalid and ignored");
        Defaults::default()
    })
}

// ---- routes ----------------------------------------------------------------

/// A registered kind.
#[derive(Serialize, ToSchema)]
#[schema(as = Kind)]
pub(super) struct KindBody {
    name: String,
    /// A JSON Schema that payloads must match.
    #[schema(required, value_type = Option<serde_json::Value>)]
    schema: Option<Box<RawValue>>,
    /// Values for the fields that a request leaves out.
    #[schema(required, value_type = Option<Defaults>)]
    defaults: Option<Box<RawValue>>,
    updated_at: DateTime<Utc>,
}

impl From<KindRecord> for KindBody {
    fn from(kind: KindRecord) -> Self {
        KindBody {
            name: kind.name,
            schema: kind.schema,
            defaults: kind.defaults,
            updated_at: kind.updated_at,
        }
    }
}

/// Lists registered kinds, sorted by name.
///
/// Workers register the kinds that they handle, and `PUT /kinds/{kind}` registers
/// others. Kinds belong to no queue, so every token with the scope sees all of them.
#[utoipa::path(
    get,
    path = "/kinds",
    operation_id = "list_kinds",
    tag = "kinds",
    responses((status = 200, description = "All registered kinds.", body = Vec<KindBody>)),
)]
pub(super) async fn list(State(server): State<Server>, _: Caller) -> ApiResult<Json<Vec<KindBody>>> {
    Ok(Json(server.client.kinds().await?.into_iter().map(KindBody::from).collect()))
}

/// The schema and defaults of a kind.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewKind)]
pub(super) struct NewKindBody {
    /// A JSON Schema that payloads must match. If absent, the stored one stays.
    #[schema(value_type = Option<serde_json::Value>)]
    schema: Option<Box<RawValue>>,
    /// Values for the fields that a request leaves out. If absent, the stored ones
    /// stay.
    #[schema(value_type = Option<Defaults>)]
    defaults: Option<Box<RawValue>>,
}

/// Registers a kind, so that its jobs are accepted and their payloads checked.
#[utoipa::path(
    put,
    path = "/kinds/{kind}",
    operation_id = "put_kind",
    tag = "kinds",
    params(("kind" = String, Path, description = "The name of the kind.", example = "greet", min_length = 1, max_length = 128)),
    request_body(content = NewKindBody, example = json!({
        "schema": { "type": "object", "required": ["name"] },
        "defaults": { "queue": "greetings", "max_attempts": 5 },
    })),
    responses(
        (status = 200, description = "The kind as stored.", body = KindBody),
        (status = 422, description = "The schema or the defaults are invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn put(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    Body(body): Body<NewKindBody>,
) -> ApiResult<Json<KindBody>> {
    caller.may_use_all()?;
    check_kind(&name, body.schema.as_deref(), body.defaults.as_deref())?;
    let kind = NewKind { name: name.clone(), schema: body.schema, defaults: body.defaults };
    server.client.put_kinds(&[kind]).await?;
    let stored = server.client.kinds().await?.into_iter().find(|kind| kind.name == name);
    let removed = || Problem::new(Slug::Conflict, format!("kind `{name}` was removed at the same time"));
    Ok(Json(stored.ok_or_else(removed)?.into()))
}

/// Checks the schema and the defaults of a kind. Returns the defaults.
pub(super) fn check_kind(
    name: &str,
    schema: Option<&RawValue>,
    defaults: Option<&RawValue>,
) -> ApiResult<Option<Defaults>> {
    if let Some(schema) = schema {
        if schema.get().len() > MAX_SCHEMA {
            return Err(Problem::validation(format!(
                "schema: has {} bytes; use at most {MAX_SCHEMA}",
                schema.get().len()
            )));
        }
        JsonSchema::compile(schema.get())
            .map_err(|error| Problem::validation(format!("schema: {}", truncated(&error))))?;
    }
    let Some(defaults) = defaults else { return Ok(None) };
    let Object(read) = serde_json::from_str::<Object<Defaults>>(defaults.get())
        .map_err(|error| Problem::validation(format!("defaults: {error}")))?;
    read.check(name)?;
    Ok(Some(read))
}

/// Removes a kind. Its jobs stay.
#[utoipa::path(
    delete,
    path = "/kinds/{kind}",
    operation_id = "delete_kind",
    tag = "kinds",
    params(("kind" = String, Path, description = "The name of the kind.", example = "greet")),
    responses(
        (status = 204, description = "The kind is removed."),
        (status = 404, description = "The kind is not registered.", body = ProblemBody),
    ),
)]
pub(super) async fn remove(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<StatusCode> {
    caller.may_use_all()?;
    let removed = server.client.remove_kind(&name).await?;
    if removed {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(Problem::new(Slug::NotFound, format!("kind `{}` is not registered", truncated(&name))))
    }
}

/// The first 200 bytes of a text.
fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(200)]
}

impl Defaults {
    /// Refuses defaults that would make every job invalid.
    fn check(&self, kind: &str) -> ApiResult<()> {
        let body = NewJobBody::of_kind(kind);
        let invalid = |message: &str| Problem::validation(format!("defaults: {message}"));
        let job = body.into_job(self).map_err(|problem| invalid(problem.message()))?;
        job.validate().map(drop).map_err(|error| invalid(&error.to_string()))
    }
}
