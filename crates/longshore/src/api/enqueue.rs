//! New jobs: what a request may say of one, and what it is answered.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::extract::{Body, JobHeaders, duration, optional_object};
use super::kinds::{Defaults, Kind};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::{EnqueuedAsSchema, RetrySchema, StatusSchema};
use crate::enqueue::{Enqueued, EnqueuedAs, MAX_PAYLOAD, NewJob, UniqueMode, ValidJob};
use crate::job::Status;
use crate::lifecycle::When;
use crate::retry::RetryPolicy;

/// A job to be enqueued. Only `kind` and `payload` are needed.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = NewJob)]
pub(super) struct NewJobBody {
    /// Which handler runs it.
    #[schema(min_length = 1, max_length = 128, example = "summarize_text")]
    kind: String,
    /// Any JSON up to 1 MiB, checked against the kind.
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
    /// 3 by default, or what the kind says.
    #[schema(minimum = 1, maximum = 32767)]
    max_attempts: Option<i64>,
    /// One key, one job, for as long as the job is kept. The `Idempotency-Key`
    /// header beats this.
    #[schema(min_length = 1, max_length = 512)]
    idempotency_key: Option<String>,
    /// `default` if absent.
    #[schema(min_length = 1, max_length = 128)]
    queue: Option<String>,
    /// Higher runs first; 0 by default.
    #[schema(minimum = -32768, maximum = 32767)]
    priority: Option<i64>,
    /// Not before this time.
    run_at: Option<DateTime<Utc>>,
    /// Not before so many seconds have passed.
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// Unique among live jobs.
    #[schema(min_length = 1, max_length = 512)]
    unique_key: Option<String>,
    /// What to do when a live job has the key: `dedupe` (the default),
    /// `replace` or `preserve_run_at`.
    #[schema(value_type = Option<UniqueModeSchema>)]
    unique_mode: Option<UniqueMode>,
    /// How long one attempt may take: seconds, or `none`. Two hours by default.
    #[schema(value_type = Option<TimeoutSchema>)]
    timeout_seconds: Option<TimeoutSeconds>,
    /// How long a failed attempt waits.
    #[serde(default, deserialize_with = "optional_object")]
    #[schema(value_type = Option<RetrySchema>)]
    retry: Option<RetryPolicy>,
    /// Labels for people.
    #[serde(default)]
    #[schema(max_items = 64)]
    tags: Vec<String>,
    /// Labels that workers and recovery act on.
    #[serde(default)]
    #[schema(max_items = 64)]
    flags: Vec<String>,
    /// Why it was enqueued.
    context: Option<String>,
    /// The enqueuer's own data: any JSON up to 64 KiB.
    #[schema(value_type = Option<serde_json::Value>)]
    metadata: Option<Box<RawValue>>,
    /// From the request's header.
    #[serde(skip)]
    trace: Option<String>,
}

/// Seconds, or the word `none`.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum TimeoutSeconds {
    Seconds(f64),
    Word(NoTimeout),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum NoTimeout {
    None,
}

#[derive(ToSchema)]
#[schema(as = Timeout)]
#[serde(untagged)]
#[derive(Serialize)]
#[expect(dead_code, reason = "describes `TimeoutSeconds`")]
pub(super) enum TimeoutSchema {
    Seconds(f64),
    Word(NoTimeoutSchema),
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

/// What became of an enqueue.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct EnqueuedJob {
    /// The job that stands for the request.
    id: Uuid,
    kind: String,
    queue: String,
    /// Where it stands: `queued`, or wherever an existing one is.
    #[schema(value_type = StatusSchema)]
    status: Status,
    priority: i16,
    attempts: u16,
    max_attempts: u16,
    #[schema(required)]
    idempotency_key: Option<String>,
    /// Whether this request made it.
    created: bool,
    #[schema(value_type = EnqueuedAsSchema)]
    how: EnqueuedAs,
}

impl NewJobBody {
    /// A job of this kind with nothing said about it.
    pub(super) fn of_kind(kind: &str) -> Self {
        NewJobBody {
            kind: kind.into(),
            payload: RawValue::NULL.to_owned(),
            max_attempts: None,
            idempotency_key: None,
            queue: None,
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

    /// The job, with what the kind says where the request is silent.
    pub(super) fn into_job(self, defaults: &Defaults) -> ApiResult<NewJob> {
        check_size(&self.payload)?;
        let mut job = NewJob::from_json(self.kind, self.payload.get());
        if let Some(queue) = self.queue.or_else(|| defaults.queue.clone()) {
            job = job.queue(queue);
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
                return Err(Problem::validation("unique_mode: says nothing without a unique_key; give one"));
            }
            (None, None) => {}
        }
        match self.timeout_seconds.or(defaults.timeout_seconds) {
            Some(TimeoutSeconds::Seconds(seconds)) => {
                job = job.timeout(Some(duration("timeout_seconds", seconds)?));
            }
            Some(TimeoutSeconds::Word(NoTimeout::None)) => job = job.timeout(None),
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

    /// The job, if it is right and the caller may have it.
    fn validate(self, known: &Kind, caller: &Caller) -> ApiResult<ValidJob> {
        let job = self.into_job(&known.defaults)?.validate()?;
        caller.may_use(job.queue())?;
        caller.may_use_key(&job)?;
        Ok(job)
    }

    pub(super) fn kind(&self) -> &str {
        &self.kind
    }

    pub(super) fn payload(&self) -> &str {
        self.payload.get()
    }
}

/// Refuses a payload that is too large in the words, and with the status, of a
/// body that is.
pub(super) fn check_size(payload: &RawValue) -> ApiResult<()> {
    let bytes = payload.get().len();
    if bytes > MAX_PAYLOAD {
        Err(Problem::new(
            Slug::TooLarge,
            format!(
                "payload: {bytes} bytes of JSON; at most {MAX_PAYLOAD} are kept, so store the data elsewhere \
                 and enqueue a reference"
            ),
        ))
    } else {
        Ok(())
    }
}

pub(super) fn parse_when(
    run_at: Option<DateTime<Utc>>,
    delay_seconds: Option<f64>,
) -> ApiResult<Option<When>> {
    match (run_at, delay_seconds) {
        (Some(_), Some(_)) => {
            Err(Problem::validation("run_at: delay_seconds is given as well; give one of the two"))
        }
        (Some(at), None) => Ok(Some(When::At(at))),
        (None, Some(seconds)) => Ok(Some(When::After(duration("delay_seconds", seconds)?))),
        (None, None) => Ok(None),
    }
}

/// Enqueues a job.
#[utoipa::path(
    post,
    path = "/jobs",
    tag = "jobs",
    params(
        ("Idempotency-Key" = Option<String>, Header, description = "Beats the body's field.", max_length = 512),
        ("traceparent" = Option<String>, Header, description = "W3C trace context; travels with the job."),
    ),
    request_body = NewJobBody,
    responses(
        (status = 201, description = "A new job.", body = EnqueuedJob,
         headers(("Location" = String, description = "Where the job is."))),
        (status = 200, description = "The job that already had the key, unchanged or, by unique_mode, replaced.",
         body = EnqueuedJob),
        (status = 400, description = "Not JSON, or several `Idempotency-Key` headers.", body = ProblemBody),
        (status = 413, description = "Too large.", body = ProblemBody),
        (status = 415, description = "Not application/json.", body = ProblemBody),
        (status = 429, description = "Too many requests, or too many jobs wait; `Retry-After` says when to come back.",
         body = ProblemBody),
        (status = 422, description = "An unknown kind, a payload that is wrong for it, or a field out of range.",
         body = ProblemBody),
    ),
)]
pub(super) async fn enqueue(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    JobHeaders { idempotency_key, trace }: JobHeaders,
    // What is kept while the job is stored is small: it is moved from layer to layer.
    Body(mut body): Body<Box<NewJobBody>>,
) -> ApiResult<Response> {
    if let Some(key) = idempotency_key {
        let key = std::str::from_utf8(key.as_bytes());
        body.idempotency_key =
            Some(key.map_err(|_| Problem::bad_request("Idempotency-Key: not UTF-8"))?.into());
    }
    body.trace = trace.as_ref().and_then(|trace| trace.to_str().ok()).map(str::to_owned);
    let known = server.kinds.check_payload(&server.client, body.kind(), body.payload()).await?;
    let job = body.validate(&known, &caller)?;
    server.limiter.check_depth(&server.client, job.queue()).await?;
    let created = EnqueuedJob {
        id: job.id().0,
        kind: job.kind().into(),
        queue: job.queue().into(),
        status: Status::Queued,
        priority: job.priority,
        attempts: 0,
        max_attempts: job.max_attempts,
        idempotency_key: job.idempotency_key.clone(),
        created: true,
        how: EnqueuedAs::Created,
    };
    let enqueued = server.client.store_one(job).await?;
    let answer = match enqueued.how {
        EnqueuedAs::Created => created,
        EnqueuedAs::Existing | EnqueuedAs::Replaced => {
            Box::pin(existing_job(&server, &caller, enqueued)).await?
        }
    };
    let status = if answer.created { StatusCode::CREATED } else { StatusCode::OK };
    let place = format!("{}/{}", uri.path().trim_end_matches('/'), enqueued.id);
    let place = HeaderValue::from_str(&place).map_err(|_| Problem::bad_request("path: not ASCII"))?;
    Ok((status, [(header::LOCATION, place)], Json(answer)).into_response())
}

/// The job that a request asks for, if its kind takes the payload and the caller
/// may have it.
pub(super) async fn validate_job(server: &Server, caller: &Caller, body: NewJobBody) -> ApiResult<ValidJob> {
    let known = server.kinds.check_payload(&server.client, body.kind(), body.payload()).await?;
    body.validate(&known, caller)
}

async fn existing_job(server: &Server, caller: &Caller, enqueued: Enqueued) -> ApiResult<EnqueuedJob> {
    let job = server.client.get(enqueued.id).await?;
    caller.may_access(&job.queue)?;
    Ok(EnqueuedJob {
        id: job.id.0,
        kind: job.kind,
        queue: job.queue,
        status: job.status,
        priority: job.priority,
        attempts: job.attempts,
        max_attempts: job.max_attempts,
        idempotency_key: job.idempotency_key,
        created: false,
        how: enqueued.how,
    })
}
