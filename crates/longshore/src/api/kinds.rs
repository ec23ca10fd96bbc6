//! Registered kinds: the check of a new job's kind and payload, the defaults of a
//! kind, and the routes that list, register and remove kinds.
//!
//! [`KindRegistry::check_payload`] is the whole rule for kinds and payloads.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::auth::Caller;
use super::enqueue::{NewJobBody, TimeoutSchema, TimeoutSeconds};
use super::extract::{Body, NamePath, Object, optional_object};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::RetrySchema;
use super::{CheckPayload, Server, UnknownKinds};
use crate::client::Client;
use crate::error::Result;
use crate::retry::RetryPolicy;
use crate::store::{KindRecord, NewKind};

/// How long the registered kinds are cached. A change made by another process takes
/// effect within this time.
const KINDS_CACHE_TTL: Duration = Duration::from_secs(2);

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

/// A registered kind. The default has no schema and no defaults.
#[derive(Default)]
pub(super) struct Kind {
    schema: Schema,
    pub(super) defaults: Defaults,
}

/// The JSON Schema that payloads must match.
#[derive(Default)]
enum Schema {
    #[default]
    None,
    Usable(Box<jsonschema::Validator>),
    /// What is stored is not a valid schema. A worker's schema is stored without a
    /// check.
    Unusable,
}

/// The registered kinds, cached, and the settings for checking payloads.
pub(super) struct KindRegistry {
    builtin: Option<Arc<CheckPayload>>,
    unknown: UnknownKinds,
    cache: Mutex<Option<(Instant, Arc<KindMap>)>>,
}

type KindMap = HashMap<String, Arc<Kind>>;

impl KindRegistry {
    pub(super) fn new(builtin: Option<Arc<CheckPayload>>, unknown: UnknownKinds) -> Self {
        KindRegistry { builtin, unknown, cache: Mutex::default() }
    }

    /// Checks the kind and the payload of a new job. A payload must pass the built-in
    /// check of its kind, if there is one, and match the schema of the registered
    /// kind, if there is one. A kind that is neither built in nor registered is
    /// refused, unless unknown kinds are allowed.
    pub(super) async fn check_payload(
        &self,
        client: &Client,
        kind: &str,
        payload: &str,
    ) -> ApiResult<Arc<Kind>> {
        let builtin = self.builtin.as_ref().and_then(|check| check(kind, payload));
        let registered = self.registered(client, kind).await?;
        match (builtin, registered) {
            (Some(Err(reason)), _) => Err(Problem::validation(format!("payload: {reason}"))),
            (_, Some(registered)) => registered.check_payload(kind, payload).map(|()| registered),
            (Some(Ok(())), None) => Ok(Arc::default()),
            (None, None) if self.unknown == UnknownKinds::Allow => Ok(Arc::default()),
            (None, None) => Err(Problem::validation(format!(
                "kind: `{}` is not registered; start a worker that handles it, register it with \
                 PUT /kinds/{{kind}}, or allow unknown kinds on the server",
                truncated(kind)
            ))),
        }
    }

    /// The registered kind of this name.
    async fn registered(&self, client: &Client, kind: &str) -> ApiResult<Option<Arc<Kind>>> {
        let cached = self.cache.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((loaded_at, kinds)) = cached
            && loaded_at.elapsed() < KINDS_CACHE_TTL
        {
            return Ok(kinds.get(kind).cloned());
        }
        let kinds = Arc::new(Box::pin(load(client)).await?);
        let found = kinds.get(kind).cloned();
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), kinds));
        Ok(found)
    }

    /// Empties the cache, after this server has changed a kind.
    pub(super) fn invalidate(&self) {
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

async fn load(client: &Client) -> Result<KindMap> {
    let read = |record: KindRecord| {
        let schema = record.schema.as_deref().map(|schema| compile_schema(schema.get()));
        let schema = match schema {
            None => Schema::None,
            Some(Ok(schema)) => Schema::Usable(Box::new(schema)),
            Some(Err(error)) => {
                tracing::error!(
                    kind = record.name,
                    error,
                    "the stored schema of a kind is invalid; its jobs are refused until a valid one is stored"
                );
                Schema::Unusable
            }
        };
        let defaults = record.defaults.as_deref().and_then(|defaults| {
            let read = serde_json::from_str(defaults.get());
            if let Err(error) = &read {
                tracing::warn!(kind = record.name, %error, "the stored defaults of a kind are invalid and ignored");
            }
            read.ok()
        });
        (record.name, Arc::new(Kind { schema, defaults: defaults.unwrap_or_default() }))
    };
    Ok(client.kinds().await?.into_iter().map(read).collect())
}

/// Compiles a JSON Schema, or returns what is wrong with it.
fn compile_schema(schema: &str) -> Result<jsonschema::Validator, String> {
    let schema: serde_json::Value = serde_json::from_str(schema).map_err(|error| error.to_string())?;
    // This regex engine runs in linear time. Patterns that it does not support are
    // refused.
    let patterns = jsonschema::PatternOptions::regex();
    jsonschema::options().with_pattern_options(patterns).build(&schema).map_err(|error| error.to_string())
}

impl Kind {
    /// Checks a payload against the schema. `name` is the kind, for messages.
    fn check_payload(&self, name: &str, payload: &str) -> ApiResult<()> {
        let schema = match &self.schema {
            Schema::None => return Ok(()),
            Schema::Usable(schema) => schema,
            // Fail closed: an unchecked payload could be wrong.
            Schema::Unusable => {
                return Err(Problem::validation(format!(
                    "kind: the stored schema of `{name}` is invalid, so payloads cannot be checked; \
                     store a valid one with PUT /kinds/{{kind}}"
                )));
            }
        };
        let payload = serde_json::from_str(payload)
            .map_err(|error| Problem::validation(format!("payload: not valid JSON: {error}")))?;
        // Most payloads are valid, and `is_valid` is faster than collecting errors.
        if schema.is_valid(&payload) {
            return Ok(());
        }
        match schema.iter_errors(&payload).next() {
            None => Ok(()),
            Some(error) => Err(Problem::validation(format!(
                "payload{}: {}",
                error.instance_path,
                truncated(&error.to_string())
            ))),
        }
    }
}

/// The first 200 bytes of a text.
fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(200)]
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
    tag = "kinds",
    params(("kind" = String, Path, description = "The name of the kind.", min_length = 1, max_length = 128)),
    request_body = NewKindBody,
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
    if let Some(schema) = &body.schema {
        compile_schema(schema.get())
            .map_err(|error| Problem::validation(format!("schema: {}", truncated(&error))))?;
    }
    if let Some(defaults) = &body.defaults {
        let Object(read) = serde_json::from_str::<Object<Defaults>>(defaults.get())
            .map_err(|error| Problem::validation(format!("defaults: {error}")))?;
        read.check(&name)?;
    }
    let kind = NewKind { name: name.clone(), schema: body.schema, defaults: body.defaults };
    server.client.put_kinds(&[kind]).await?;
    server.kinds.invalidate();
    let stored = server.client.kinds().await?.into_iter().find(|kind| kind.name == name);
    let removed = || Problem::new(Slug::Conflict, format!("kind `{name}` was removed at the same time"));
    Ok(Json(stored.ok_or_else(removed)?.into()))
}

/// Removes a kind. Its jobs stay.
#[utoipa::path(
    delete,
    path = "/kinds/{kind}",
    tag = "kinds",
    params(("kind" = String, Path, description = "The name of the kind.")),
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
    server.kinds.invalidate();
    if removed {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(Problem::new(Slug::NotFound, format!("kind `{}` is not registered", truncated(&name))))
    }
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
