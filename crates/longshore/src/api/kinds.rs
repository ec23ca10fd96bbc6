//! What is known about kinds: whether somebody has announced one, what its
//! payloads must look like, and what its jobs get when a request is silent.

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

/// How old what is known may be; a change made elsewhere is noticed this soon.
const KINDS_CACHE_TTL: Duration = Duration::from_secs(2);

/// What a job gets when its request is silent.
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

/// A kind that somebody has announced.
#[derive(Default)]
pub(super) struct Kind {
    schema: Schema,
    pub(super) defaults: Defaults,
}

/// What payloads are checked by.
#[derive(Default)]
enum Schema {
    #[default]
    None,
    Usable(Box<jsonschema::Validator>),
    /// Stored without a check: a worker may publish what is no schema.
    Unusable,
}

/// What is known, and since when.
pub(super) struct KindRegistry {
    check: Option<Arc<CheckPayload>>,
    unknown: UnknownKinds,
    cache: Mutex<Option<(Instant, Arc<KindMap>)>>,
}

type KindMap = HashMap<String, Arc<Kind>>;

impl KindRegistry {
    pub(super) fn new(check: Option<Arc<CheckPayload>>, unknown: UnknownKinds) -> Self {
        KindRegistry { check, unknown, cache: Mutex::default() }
    }

    /// Refuses an unknown kind, and a payload that is wrong for a known one.
    pub(super) async fn check_payload(
        &self,
        client: &Client,
        kind: &str,
        payload: &str,
    ) -> ApiResult<Arc<Kind>> {
        let own = self.check.as_ref().and_then(|check| check(kind, payload));
        let announced = self.registered(client, kind).await?;
        match (own, announced) {
            (Some(Err(why)), _) => Err(Problem::validation(format!("payload: {why}"))),
            (_, Some(known)) => known.check_payload(kind, payload).map(|()| known),
            (Some(Ok(())), None) => Ok(Arc::default()),
            (None, None) if self.unknown == UnknownKinds::Allow => Ok(Arc::default()),
            (None, None) => Err(Problem::validation(format!(
                "kind: nobody has announced `{}`; start a worker that handles it, describe it with \
                 PUT /kinds/{{kind}}, or let the server allow unknown kinds",
                truncated(kind)
            ))),
        }
    }

    async fn registered(&self, client: &Client, kind: &str) -> ApiResult<Option<Arc<Kind>>> {
        let remembered = self.cache.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some((at, known)) = remembered
            && at.elapsed() < KINDS_CACHE_TTL
        {
            return Ok(known.get(kind).cloned());
        }
        let known = Arc::new(Box::pin(load(client)).await?);
        let found = known.get(kind).cloned();
        *self.cache.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), known));
        Ok(found)
    }

    /// After a change made here, nothing is taken for known.
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
            Some(Err(why)) => {
                tracing::error!(
                    kind = record.name,
                    why,
                    "a kind's stored schema cannot be used, so its jobs are refused; store another"
                );
                Schema::Unusable
            }
        };
        let defaults = record.defaults.as_deref().and_then(|defaults| {
            let read = serde_json::from_str(defaults.get());
            if let Err(error) = &read {
                tracing::warn!(kind = record.name, %error, "a kind's stored defaults cannot be used");
            }
            read.ok()
        });
        (record.name, Arc::new(Kind { schema, defaults: defaults.unwrap_or_default() }))
    };
    Ok(client.kinds().await?.into_iter().map(read).collect())
}

/// A schema that payloads can be checked by, or why it is none.
pub(super) fn compile_schema(schema: &str) -> Result<jsonschema::Validator, String> {
    let schema: serde_json::Value = serde_json::from_str(schema).map_err(|error| error.to_string())?;
    // In time that grows with the text alone; what would need more is refused.
    let patterns = jsonschema::PatternOptions::regex();
    jsonschema::options().with_pattern_options(patterns).build(&schema).map_err(|error| error.to_string())
}

impl Kind {
    fn check_payload(&self, name: &str, payload: &str) -> ApiResult<()> {
        let schema = match &self.schema {
            Schema::None => return Ok(()),
            Schema::Usable(schema) => schema,
            // Not checked is not right.
            Schema::Unusable => {
                return Err(Problem::validation(format!(
                    "kind: the schema that is stored for `{name}` cannot be used, so no payload can be \
                     checked; store another with PUT /kinds/{{kind}}"
                )));
            }
        };
        let payload = serde_json::from_str(payload)
            .map_err(|error| Problem::validation(format!("payload: cannot be checked: {error}")))?;
        // Most are right, and that is quicker told than what is wrong.
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

/// The beginning of a text that may be long.
fn truncated(text: &str) -> &str {
    &text[..text.floor_char_boundary(200)]
}

// ---- routes ----------------------------------------------------------------

/// A kind that somebody has announced.
#[derive(Serialize, ToSchema)]
#[schema(as = Kind)]
pub(super) struct KindBody {
    name: String,
    /// A JSON Schema that payloads are checked by.
    #[schema(required, value_type = Option<serde_json::Value>)]
    schema: Option<Box<RawValue>>,
    /// What a job gets when its request is silent.
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

/// Kinds that workers or PUT have announced, by name. They belong to no queue, so
/// a token for some queues sees them all.
#[utoipa::path(
    get,
    path = "/kinds",
    tag = "kinds",
    responses((status = 200, description = "By name.", body = Vec<KindBody>)),
)]
pub(super) async fn list(State(server): State<Server>, _: Caller) -> ApiResult<Json<Vec<KindBody>>> {
    Ok(Json(server.client.kinds().await?.into_iter().map(KindBody::from).collect()))
}

/// What to say about a kind.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewKind)]
pub(super) struct NewKindBody {
    /// A JSON Schema for payloads; what is absent stays as it is.
    #[schema(value_type = Option<serde_json::Value>)]
    schema: Option<Box<RawValue>>,
    /// What a job gets when its request is silent; what is absent stays as it is.
    #[schema(value_type = Option<Defaults>)]
    defaults: Option<Box<RawValue>>,
}

/// Announces a kind, so that its jobs are taken and its payloads checked.
#[utoipa::path(
    put,
    path = "/kinds/{kind}",
    tag = "kinds",
    params(("kind" = String, Path, description = "The kind.", min_length = 1, max_length = 128)),
    request_body = NewKindBody,
    responses(
        (status = 200, description = "What is stored.", body = KindBody),
        (status = 422, description = "A schema or defaults that cannot be.", body = ProblemBody),
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
            .map_err(|why| Problem::validation(format!("schema: {}", truncated(&why))))?;
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
    let gone = || Problem::new(Slug::Conflict, "the kind was removed at the same moment");
    Ok(Json(stored.ok_or_else(gone)?.into()))
}

/// Forgets a kind. Its jobs stay.
#[utoipa::path(
    delete,
    path = "/kinds/{kind}",
    tag = "kinds",
    params(("kind" = String, Path, description = "The kind.")),
    responses(
        (status = 204, description = "It is forgotten."),
        (status = 404, description = "Nobody had announced it.", body = ProblemBody),
    ),
)]
pub(super) async fn remove(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
) -> ApiResult<StatusCode> {
    caller.may_use_all()?;
    let there = server.client.remove_kind(&name).await?;
    server.kinds.invalidate();
    if there {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(Problem::new(Slug::NotFound, "nobody has announced a kind of that name"))
    }
}

impl Defaults {
    /// Whether a job could be made of them.
    fn check(&self, kind: &str) -> ApiResult<()> {
        let body = NewJobBody::of_kind(kind);
        let wrong = |message: &str| Problem::validation(format!("defaults: {message}"));
        let job = body.into_job(self).map_err(|problem| wrong(problem.message()))?;
        job.validate().map(drop).map_err(|error| wrong(&error.to_string()))
    }
}
