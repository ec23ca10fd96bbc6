//! Enqueues one job: the request body, its checks and the response.
//!
//! The client checks kinds and payloads; the rules for the other fields are in
//! [`crate::rules::enqueue`].

use std::time::Duration;

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tracing::{Instrument, Span};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::extract::{Body, JobHeaders, duration, optional_object};
use super::kinds::{Defaults, defaults_of};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::returned::ReturnedJob;
use super::schemas::{JobSchema, RetrySchema};
use crate::client::kinds::Kind;
use crate::client::schedules::Template;
use crate::job::{JobId, JobRecord};
use crate::rules::enqueue::{Enqueued, EnqueuedAs, MAX_PAYLOAD, NewJob, UniqueMode, ValidJob};
use crate::rules::lifecycle::When;
use crate::rules::retry::RetryPolicy;

/// Whether the request created its job: `created`, `existing` or `replaced`. A header,
/// because the body is the job and nothing else.
pub(super) const ENQUEUED_AS: HeaderName = HeaderName::from_static("enqueued-as");

/// A job to enqueue. Only `kind` and `payload` are required.
#[derive(Clone, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewJob)]
pub(super) struct NewJobBody {
    /// Which handler runs the job.
    #[schema(min_length = 1, max_length = 128, example = "summarize_text")]
    pub(super) kind: String,
    /// Any JSON value up to 1 MiB. If the kind has a schema, the payload must match
    /// it.
    #[schema(value_type = serde_json::Value)]
    pub(super) payload: Box<RawValue>,
    /// The id of the job: a UUID v7 whose time is within a day of the server's clock. A second request with the same id
    /// returns the first job, unchanged, whatever else it contains. So a request whose response was lost can be
    /// repeated. If absent, the server chooses one. Only `POST /jobs` and `POST /jobs/batch` accept it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Uuid>)]
    pub(super) id: Option<String>,
    /// 3 by default, unless the kind sets a default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 32767)]
    pub(super) max_attempts: Option<i64>,
    /// A second request with the same key returns the first job, as long as that job
    /// is kept. The `Idempotency-Key` header overrides this field. With a token that is limited to queues, each queue has
    /// its own keys, also unique keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 512)]
    pub(super) idempotency_key: Option<String>,
    /// `default` if absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128)]
    pub(super) queue: Option<String>,
    /// A group of the queue, for example a customer. Groups take fair turns, and each can have a
    /// limit and a rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 128)]
    pub(super) group: Option<String>,
    /// Higher runs first; 0 by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = -32768, maximum = 32767)]
    pub(super) priority: Option<i64>,
    /// The job does not start before this time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) run_at: Option<DateTime<Utc>>,
    /// The job does not start before this many seconds have passed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0, maximum = 315360000)]
    pub(super) delay_seconds: Option<f64>,
    /// Only one job that has not finished may have this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1, max_length = 512)]
    pub(super) unique_key: Option<String>,
    /// What to do if an unfinished job already has the key. `dedupe` (the default)
    /// returns that job. `replace` gives a waiting job the new contents;
    /// `preserve_run_at` does too, but keeps its time. If the job is running, both
    /// create a new job that takes over the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<UniqueModeSchema>)]
    pub(super) unique_mode: Option<UniqueMode>,
    /// How long one attempt may take: seconds, or `none` for no limit. Two hours by
    /// default.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<TimeoutSchema>)]
    pub(super) timeout_seconds: Option<TimeoutSeconds>,
    /// How long the job waits after a failed attempt.
    #[serde(default, deserialize_with = "optional_object", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<RetrySchema>)]
    pub(super) retry: Option<RetryPolicy>,
    /// Labels for people.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub(super) tags: Vec<String>,
    /// Labels that workers and recovery act on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(max_items = 64)]
    pub(super) flags: Vec<String>,
    /// Why the job was enqueued.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) context: Option<String>,
    /// Your own data: any JSON value up to 64 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<serde_json::Value>)]
    pub(super) metadata: Option<Box<RawValue>>,
    /// The `traceparent` header of the request.
    #[serde(skip)]
    pub(super) trace: Option<String>,
}

/// Seconds, or the string `none`.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(untagged)]
pub(super) enum TimeoutSeconds {
    Seconds(f64),
    None(NoTimeout),
}

#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum NoTimeout {
    None,
}

/// Seconds, or `none` for no limit.
#[derive(ToSchema)]
#[schema(as = Timeout)]
#[serde(untagged)]
#[derive(Serialize)]
#[expect(dead_code, reason = "describes `TimeoutSeconds`")]
pub(super) enum TimeoutSchema {
    Seconds(f64),
    None(NoTimeoutSchema),
}

#[derive(Serialize, ToSchema)]
#[schema(as = NoTimeout)]
#[serde(rename_all = "lowercase")]
#[expect(dead_code, reason = "describes `NoTimeout`")]
pub(super) enum NoTimeoutSchema {
    None,
}

#[derive(ToSchema)]
#[schema(as = UniqueMode, rename_all = "snake_case")]
#[expect(dead_code, reason = "describes `UniqueMode`")]
pub(super) enum UniqueModeSchema {
    Dedupe,
    Replace,
    PreserveRunAt,
}

impl NewJobBody {
    /// A job of this kind with a null payload and no other fields.
    pub(super) fn of_kind(kind: &str) -> Self {
        NewJobBody {
            kind: kind.into(),
            payload: RawValue::NULL.to_owned(),
            id: None,
            max_attempts: None,
            idempotency_key: None,
            queue: None,
            group: None,
            priority: None,
            run_at: None,
            delay_seconds: None,
            unique_key: None,
            unique_mode: None,
            timeout_seconds: None,
            retry: None,
            tags: Vec::new(),
            flags: Vec::new(),
            context: None,
            metadata: None,
            trace: None,
        }
    }

    /// The request that stores this job of a schedule again.
    pub(super) fn of_template(template: Template) -> Self {
        let (unique_key, unique_mode) = template.unique.map(|unique| (unique.key, unique.mode)).unzip();
        let metadata = (!template.metadata.is_empty())
            .then(|| serde_json::value::to_raw_value(&template.metadata).unwrap_or_default());
        NewJobBody {
            payload: template.payload,
            max_attempts: Some(template.max_attempts.into()),
            queue: Some(template.queue),
            group: template.group,
            priority: Some(template.priority.into()),
            unique_key,
            unique_mode,
            timeout_seconds: Some(match template.timeout_ms {
                Some(ms) => TimeoutSeconds::Seconds(Duration::from_millis(ms).as_secs_f64()),
                None => TimeoutSeconds::None(NoTimeout::None),
            }),
            retry: template.retry,
            tags: template.tags,
            flags: template.flags,
            context: template.context,
            metadata,
            ..NewJobBody::of_kind(&template.kind)
        }
    }

    /// Converts the request, with the kind's defaults for absent fields.
    pub(super) fn into_job(self, defaults: &Defaults) -> ApiResult<NewJob> {
        check_size(&self.payload)?;
        let mut job = NewJob::from_json(self.kind, self.payload.get());
        if let Some(id) = &self.id {
            job = job.id_as_key(parse_id(id)?);
        }
        if let Some(queue) = self.queue.or_else(|| defaults.queue.clone()) {
            job = job.queue(queue);
        }
        if let Some(group) = self.group {
            job = job.group(group);
        }
        if let Some(priority) = self.priority.or(defaults.priority) {
            job = job.priority(priority);
        }
        if let Some(max_attempts) = self.max_attempts.or(defaults.max_attempts) {
            job = job.max_attempts(max_attempts);
        }
        match parse_when(self.run_at, self.delay_seconds)? {
            Some(When::At(at)) => job = job.run_at(at),
            Some(When::After(delay)) => job = job.delay(delay),
            None => {}
        }
        if let Some(key) = self.idempotency_key {
            job = job.idempotency_key(key);
        }
        match (self.unique_key, self.unique_mode) {
            (Some(key), mode) => job = job.unique_key(key, mode.unwrap_or_default()),
            (None, Some(_)) => {
                return Err(Problem::validation(
                    "unique_mode: needs a unique_key; set one, or leave unique_mode out",
                ));
            }
            (None, None) => {}
        }
        match self.timeout_seconds.or(defaults.timeout_seconds) {
            Some(TimeoutSeconds::Seconds(seconds)) => {
                job = job.timeout(Some(duration("timeout_seconds", seconds)?));
            }
            Some(TimeoutSeconds::None(NoTimeout::None)) => job = job.timeout(None),
            None => {}
        }
        if let Some(policy) = self.retry.or_else(|| defaults.retry.clone()) {
            job = job.retry(policy);
        }
        job = job.tags(self.tags).flags(self.flags);
        if let Some(context) = self.context {
            job = job.context(context);
        }
        if let Some(metadata) = self.metadata {
            job = job.metadata(metadata);
        }
        if let Some(trace) = self.trace {
            job = job.trace(trace);
        }
        Ok(job)
    }

    /// Checks every field, and that the caller may enqueue this job.
    fn validate(self, kind: Option<&Kind>, caller: &Caller) -> ApiResult<ValidJob> {
        for_caller(self.into_job(&defaults_of(kind))?.validate()?, caller)
    }

    /// As [`validate`](Self::validate), and returns the span of the enqueue. A job without a
    /// `traceparent` gets the trace context of that span.
    fn validate_in_span(self, kind: Option<&Kind>, caller: &Caller) -> ApiResult<(ValidJob, Span)> {
        let job = self.into_job(&defaults_of(kind))?;
        let span = job.span();
        let job = span.in_scope(|| job.validate())?;
        Ok((for_caller(job, caller)?, span))
    }

    /// Refuses an id where it would have no use.
    pub(super) fn refuse_id(&self) -> ApiResult<()> {
        match self.id {
            Some(_) => Err(Problem::validation(
                "id: only POST /jobs and POST /jobs/batch accept an id; leave it out",
            )),
            None => Ok(()),
        }
    }

    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    pub(super) fn queue(&self) -> Option<&str> {
        self.queue.as_deref()
    }

    pub(super) fn payload(&self) -> &str {
        self.payload.get()
    }
}

/// Checks that the caller may enqueue this job. A token that covers only some queues cannot take the keys of others: its
/// keys are in the namespace of the job's queue.
fn for_caller(job: ValidJob, caller: &Caller) -> ApiResult<ValidJob> {
    caller.may_use(job.queue())?;
    Ok(if caller.queues().is_some() { job.with_keys_in_namespace()? } else { job })
}

/// Refuses a payload that is too large with 413, as for a body that is too large.
pub(super) fn check_size(payload: &RawValue) -> ApiResult<()> {
    let bytes = payload.get().len();
    if bytes > MAX_PAYLOAD {
        Err(Problem::new(
            Slug::TooLarge,
            format!(
                "payload: {bytes} bytes of JSON exceed the limit of {MAX_PAYLOAD}; store the data elsewhere \
                 and enqueue a reference"
            ),
        ))
    } else {
        Ok(())
    }
}

/// How far the time of an id may be from the server's clock.
const MAX_ID_SKEW: TimeDelta = TimeDelta::days(1);

/// Parses an id that a client chose. Jobs are listed by id and found by the time in it, so the time must be about that of
/// the request.
fn parse_id(text: &str) -> ApiResult<JobId> {
    let refuse = |reason: &str| {
        let text = &text[..text.floor_char_boundary(100)];
        Err(Problem::validation(format!("id: `{text}` {reason}")))
    };
    let Ok(id) = Uuid::parse_str(text) else { return refuse("is not a UUID; use a new UUID v7") };
    let created_at = JobId(id).created_at().filter(|_| id.get_version_num() == 7);
    let Some(created_at) = created_at else { return refuse("is not a UUID v7; use a new one") };
    if (Utc::now() - created_at).abs() > MAX_ID_SKEW {
        return refuse(
            "has a time that is more than a day from the server's clock; check the clock, and use an idempotency_key \
             to repeat a request after such a long time",
        );
    }
    Ok(JobId(id))
}

/// When the job is due, from the two fields that can set it.
pub(super) fn parse_when(
    run_at: Option<DateTime<Utc>>,
    delay_seconds: Option<f64>,
) -> ApiResult<Option<When>> {
    match (run_at, delay_seconds) {
        (Some(_), Some(_)) => {
            Err(Problem::validation("run_at: delay_seconds is also set; set only one of the two"))
        }
        (Some(at), None) => Ok(Some(When::At(at))),
        (None, Some(seconds)) => Ok(Some(When::After(duration("delay_seconds", seconds)?))),
        (None, None) => Ok(None),
    }
}

/// Enqueues a job.
///
/// The response is the whole job, as `GET /jobs/{id}` returns it. Without the scope `read`, the response for a job that
/// already existed has only its `id`, its `status` and `enqueued_as`.
#[utoipa::path(
    post,
    path = "/jobs",
    operation_id = "enqueue_job",
    tag = "jobs",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Overrides `idempotency_key` in the body.",
         max_length = 512),
        ("traceparent" = Option<String>, Header, description = "W3C trace context, stored with the job."),
    ),
    request_body(content = NewJobBody, example = json!({
        "kind": "summarize_text",
        "payload": { "text": "Ships bring goods. Longshoremen unload ships. Nothing is lost.", "max_words": 5 },
        "tags": ["spring"],
    })),
    responses(
        (status = 201, description = "The job was created.", body = JobSchema,
         headers(("Location" = String, description = "The path of the job."),
                 ("Enqueued-As" = String, description = "`created`."))),
        (status = 200, description = "A job with this id or key already existed. It is unchanged or replaced, depending on `unique_mode`.",
         body = ReturnedJob,
         headers(("Location" = String, description = "The path of the job."),
                 ("Enqueued-As" = String, description = "`existing`, or `replaced` if the job has the new contents."))),
        (status = 400, description = "The body is not JSON, or there are several `Idempotency-Key` headers.",
         body = ProblemBody),
        (status = 413, description = "The body or the payload is too large.", body = ProblemBody),
        (status = 415, description = "The content type is not `application/json`.", body = ProblemBody),
        (status = 429, description = "Too many requests, or too many waiting jobs. `Retry-After` is the time to wait.",
         body = ProblemBody),
        (status = 422, description = "The kind is unknown, its schema does not allow the payload, or a field is invalid.",
         body = ProblemBody),
    ),
)]
pub(super) async fn enqueue(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    JobHeaders { idempotency_key, trace }: JobHeaders,
    // Boxed, because the future of this handler is moved through every layer and
    // should stay small.
    Body(mut body): Body<Box<NewJobBody>>,
) -> ApiResult<Response> {
    if let Some(key) = idempotency_key {
        body.idempotency_key = Some(key);
    }
    body.trace = trace;
    let kind = server.client.check_job(body.kind(), body.queue(), body.payload()).await?;
    let (job, span) = body.validate_in_span(kind.as_deref(), &caller)?;
    server.limiter.check_depth(&server.client, job.queue()).await?;
    let stored = server.client.store_one(job).instrument(span).await?;
    let Enqueued { id, how } = stored.enqueued;
    let job = match stored.into_created_job() {
        Some(job) => job,
        None => Box::pin(existing_job(&server, &caller, id)).await?,
    };
    let job = ReturnedJob::enqueued(&caller, job, how);
    let (status, enqueued_as) = match how {
        EnqueuedAs::Created => (StatusCode::CREATED, "created"),
        EnqueuedAs::Existing => (StatusCode::OK, "existing"),
        EnqueuedAs::Replaced => (StatusCode::OK, "replaced"),
    };
    let location = format!("{}/{id}", uri.path().trim_end_matches('/'));
    let location = HeaderValue::from_str(&location).map_err(|_| Problem::bad_request("path: not ASCII"))?;
    let headers = [(header::LOCATION, location), (ENQUEUED_AS, HeaderValue::from_static(enqueued_as))];
    Ok((status, headers, Json(job)).into_response())
}

/// Checks a requested job: the payload against its kind, every field, and that the
/// caller may enqueue it.
pub(super) async fn validate_job(server: &Server, caller: &Caller, body: NewJobBody) -> ApiResult<ValidJob> {
    let kind = server.client.check_job(body.kind(), body.queue(), body.payload()).await?;
    body.validate(kind.as_deref(), caller)
}

/// The job of a request that did not create one, because its key already had a job.
async fn existing_job(server: &Server, caller: &Caller, id: JobId) -> ApiResult<JobRecord> {
    let job = server.client.get(id).await?;
    caller.may_access(&job.queue)?;
    Ok(job)
}
