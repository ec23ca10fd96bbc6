//! Registered kinds: the defaults of a kind, and the routes that list, register and
//! remove kinds. The client checks new jobs against them.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};

use super::Server;
use super::auth::Caller;
use super::enqueue::{NewJobBody, TimeoutSchema, TimeoutSeconds};
use super::extract::{Body, NamePath, Object, Query, clamped, optional_object};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::{AnyInteger, RetrySchema};
use crate::client::kinds::Kind;
use crate::json_schema::JsonSchema;
use crate::rules::retry::RetryPolicy;
use crate::store::{KindFilter, KindRecord, NewKind, Schemas};

/// The maximum number of kinds per page, and of kinds with their schemas.
const MAX_PAGE: i64 = 1000;
const MAX_PAGE_OF_SCHEMAS: i64 = 100;

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
    let defaults = serde_json::from_str(stored.get()).unwrap_or_else(|error| {
        tracing::warn!(%error, "the stored defaults of a kind are invalid and ignored");
        Defaults::default()
    });
    // A kind of one queue applies to jobs that name this queue.
    let is_of_one_queue = kind.is_some_and(|kind| kind.queue.is_some());
    Defaults { queue: defaults.queue.filter(|_| !is_of_one_queue), ..defaults }
}

// ---- routes ----------------------------------------------------------------

/// A registered kind.
#[derive(Serialize, ToSchema)]
#[schema(as = Kind)]
pub(super) struct KindBody {
    name: String,
    /// The queue to whose jobs the kind applies; null for jobs of all queues.
    #[schema(required)]
    queue: Option<String>,
    /// Whether payloads must match a JSON Schema.
    has_schema: bool,
    /// A JSON Schema that payloads must match. Lists have it only with `schemas=true`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    schema: Option<Option<Box<RawValue>>>,
    /// Values for the fields that a request leaves out.
    #[schema(required, value_type = Option<Defaults>)]
    defaults: Option<Box<RawValue>>,
    updated_at: DateTime<Utc>,
}

impl KindBody {
    fn new(kind: KindRecord, schemas: Schemas) -> Self {
        KindBody {
            name: kind.name,
            queue: kind.queue,
            has_schema: kind.has_schema,
            schema: (schemas == Schemas::Include).then_some(kind.schema),
            defaults: kind.defaults,
            updated_at: kind.updated_at,
        }
    }
}

/// Which kinds to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct KindsQuery {
    /// Continue after the previous page. The `Link` header has the URL of the next page.
    #[param(pattern = "^([0-9a-f]{2}){1,128}\\.([0-9a-f]{2}){0,128}$", example = "6772656574.")]
    cursor: Option<String>,
    /// The maximum number of kinds, 1 to 1000; 100 by default. With schemas, at most 100. Values outside are clamped.
    #[serde(default, deserialize_with = "clamped")]
    #[param(inline, value_type = Option<AnyInteger>)]
    limit: Option<i64>,
    /// Whether to include the JSON Schemas; false by default.
    schemas: Option<bool>,
}

/// Lists registered kinds, sorted by name and queue.
///
/// Workers register the kinds that they handle, and `PUT /kinds/{kind}` registers others. A kind applies to the jobs of
/// all queues, and every token with the scope sees it. Kinds that a worker registers with a token that is limited to
/// queues apply only to jobs of these queues, and tokens for other queues do not see them.
#[utoipa::path(
    get,
    path = "/kinds",
    operation_id = "list_kinds",
    tag = "kinds",
    params(KindsQuery),
    responses(
        (status = 200, description = "A page of kinds. `Link` is the next page, if there may be one.",
         body = Vec<KindBody>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
        (status = 400, description = "A parameter is invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<KindsQuery>,
) -> ApiResult<Response> {
    let after = query.cursor.as_deref().map(position).transpose()?;
    let (schemas, max) = match query.schemas {
        Some(true) => (Schemas::Include, MAX_PAGE_OF_SCHEMAS),
        _ => (Schemas::Omit, MAX_PAGE),
    };
    let limit = query.limit.unwrap_or(100).clamp(1, max) as u32;
    let filter =
        KindFilter { after, limit: Some(limit), queues: caller.queues().map(<[String]>::to_vec), schemas };
    let kinds = server.client.kinds_page(&filter).await?;
    let next = kinds.last().filter(|_| kinds.len() == limit as usize).map(cursor);
    let kinds: Vec<KindBody> = kinds.into_iter().map(|kind| KindBody::new(kind, schemas)).collect();
    let mut response = Json(kinds).into_response();
    if let Some(next) = next {
        let with_schemas = if schemas == Schemas::Include { "&schemas=true" } else { "" };
        let link = format!("<{}?cursor={next}&limit={limit}{with_schemas}>; rel=\"next\"", uri.path());
        if let Ok(link) = HeaderValue::from_str(&link) {
            response.headers_mut().insert(header::LINK, link);
        }
    }
    Ok(response)
}

/// The cursor of the page after this kind: its name and its queue, in hexadecimal digits.
fn cursor(kind: &KindRecord) -> String {
    let digits = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("{}.{}", digits(&kind.name), digits(kind.queue.as_deref().unwrap_or_default()))
}

/// The name and the queue of a cursor.
fn position(cursor: &str) -> ApiResult<(String, String)> {
    let text = |digits: &str| {
        let byte = |at| u8::from_str_radix(digits.get(at..at + 2)?, 16).ok();
        let bytes = (0..digits.len()).step_by(2).map(byte).collect::<Option<Vec<u8>>>()?;
        // Only a position: any text will do, except for a character that Postgres does not take.
        Some(String::from_utf8_lossy(&bytes).replace('\0', ""))
    };
    let parts = || {
        let (name, queue) = cursor.split_once('.')?;
        Some((text(name)?, text(queue)?))
    };
    parts().ok_or_else(|| {
        Problem::bad_request("cursor: is not the cursor of a page; use the URL in the `Link` header")
    })
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
    check_kind(&name, body.schema.as_deref(), body.defaults.as_deref()).await?;
    let kind = NewKind { name: name.clone(), schema: body.schema, defaults: body.defaults };
    server.client.put_kinds(&[kind]).await?;
    let filter = KindFilter { queues: Some(Vec::new()), ..KindFilter::default() };
    let stored = server.client.kinds_page(&filter).await?.into_iter().find(|kind| kind.name == name);
    let removed = || Problem::new(Slug::Conflict, format!("kind `{name}` was removed at the same time"));
    Ok(Json(KindBody::new(stored.ok_or_else(removed)?, Schemas::Include)))
}

/// Checks the schema and the defaults of a kind. Returns the defaults.
pub(super) async fn check_kind(
    name: &str,
    schema: Option<&RawValue>,
    defaults: Option<&RawValue>,
) -> ApiResult<Option<Defaults>> {
    if let Some(schema) = schema {
        JsonSchema::compile(schema.get())
            .await
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
