//! Enqueues many jobs in one request, as a JSON array or as JSON lines.

use axum::Json;
use axum::extract::{Request, State};
use serde::Serialize;
use tracing::Instrument;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::enqueue::{NewJobBody, validate_job};
use super::extract::{MAX_BATCH_BODY, Subject, expect_content_type, parse, parse_object, read_body};
use super::jobs::check_access;
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use crate::client::batch_span;
use crate::rules::enqueue::{EnqueuedAs, ValidJob};

/// The maximum number of jobs in one request.
const MAX_JOBS: usize = 10_000;

/// The result of a batch.
#[derive(Serialize, ToSchema)]
pub(super) struct BatchResponse {
    /// How many jobs were created.
    created: usize,
    /// How many keys already had a job, including those whose job was replaced.
    existing: usize,
    /// How many jobs were refused; the others are stored.
    refused: usize,
    /// One result per job, in the order of the request.
    items: Vec<BatchItem>,
}

/// The result of one job in a batch.
#[derive(Serialize, ToSchema)]
pub(super) struct BatchItem {
    outcome: BatchOutcome,
    /// The id of the job. Absent if it was refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    id: Option<Uuid>,
    /// Why the job was refused, for programs. Absent if it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    error: Option<Slug>,
    /// Why the job was refused, for people. Absent if it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    message: Option<String>,
}

/// What happened to one job of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum BatchOutcome {
    /// The job was created.
    Created,
    /// A job with this key already existed and is unchanged.
    Existing,
    /// A waiting job with this key already existed and has the new contents.
    Replaced,
    /// The job was not stored.
    Refused,
}

/// A job of the request.
struct Item {
    /// Its line number, in JSON lines.
    line: Option<usize>,
    job: ApiResult<NewJobBody>,
}

/// Enqueues many jobs in one commit.
///
/// Invalid jobs are refused one by one; the others are stored.
#[utoipa::path(
    post,
    path = "/jobs/batch",
    operation_id = "enqueue_jobs",
    tag = "jobs",
    request_body(
        description = "An array of jobs, each as in `POST /jobs`, or one job per line as `application/x-ndjson`. \
                       At most 10,000 jobs and 16 MiB.",
        content = Vec<NewJobBody>,
        example = json!([
            { "kind": "summarize_text", "payload": { "text": "Ships come. Ships go." }, "tags": ["spring"] },
            { "kind": "summarize_text", "payload": { "text": "Nothing is lost." }, "priority": 5 },
        ]),
    ),
    responses(
        (status = 200, description = "One result per job, in the order of the request.", body = BatchResponse),
        (status = 400, description = "The body is not JSON.", body = ProblemBody),
        (status = 413, description = "Too many bytes or too many jobs.", body = ProblemBody),
        (status = 422, description = "An `Idempotency-Key` header was sent; set `idempotency_key` in each job instead.",
         body = ProblemBody),
    ),
)]
pub(super) async fn enqueue(
    State(server): State<Server>,
    caller: Caller,
    request: Request,
) -> ApiResult<Json<BatchResponse>> {
    expect_content_type(request.headers(), &["application/json", "application/x-ndjson"])?;
    if request.headers().contains_key("idempotency-key") {
        return Err(Problem::validation(
            "Idempotency-Key: one key cannot identify many jobs; set idempotency_key in each job instead",
        ));
    }
    let is_json_lines = expect_content_type(request.headers(), &["application/x-ndjson"]).is_ok();
    let bytes = read_body(request, MAX_BATCH_BODY).await?;
    let items: Vec<Item> = if is_json_lines {
        bytes
            .split(|byte| *byte == b'\n')
            .zip(1..)
            .filter(|(text, _)| !text.trim_ascii().is_empty())
            .map(|(text, line)| Item { line: Some(line), job: parse_object(Subject::Job, text) })
            .collect()
    } else {
        parse::<Vec<&serde_json::value::RawValue>>(Subject::Body, &bytes)?
            .into_iter()
            .map(|item| Item { line: None, job: parse_object(Subject::Job, item.get().as_bytes()) })
            .collect()
    };
    // The jobs have copies of all they need. The database may take long to store them.
    drop(bytes);
    if items.len() > MAX_JOBS {
        return Err(Problem::new(
            Slug::TooLarge,
            format!("the batch has {} jobs; send at most {MAX_JOBS} in one request", items.len()),
        ));
    }
    let mut results: Vec<Option<BatchItem>> = Vec::with_capacity(items.len());
    let (mut jobs, mut positions) = (Vec::new(), Vec::new());
    let lines: Vec<Option<usize>> = items.iter().map(|item| item.line).collect();
    let span = batch_span();
    for (position, item) in items.into_iter().enumerate() {
        match check(&server, &caller, item.job).instrument(span.clone()).await {
            Ok(job) => {
                jobs.push(job);
                positions.push(position);
                results.push(None);
            }
            // A database failure fails the whole request.
            Err(problem) if problem.slug() == Slug::Unavailable || problem.slug() == Slug::Internal => {
                return Err(problem);
            }
            Err(problem) => results.push(Some(refused(problem, lines[position]))),
        }
    }
    if !jobs.is_empty() {
        span.record("jobs", jobs.len());
        let stored = server.client.store_all(&jobs).instrument(span).await?;
        for (position, enqueued) in positions.into_iter().zip(stored) {
            let id = enqueued.id.0;
            if enqueued.how != EnqueuedAs::Created
                && let Err(problem) = check_access(&server, &caller, enqueued.id).await
            {
                results[position] = Some(refused(problem, lines[position]));
                continue;
            }
            let outcome = match enqueued.how {
                EnqueuedAs::Created => BatchOutcome::Created,
                EnqueuedAs::Existing => BatchOutcome::Existing,
                EnqueuedAs::Replaced => BatchOutcome::Replaced,
            };
            results[position] = Some(BatchItem { outcome, id: Some(id), error: None, message: None });
        }
    }
    let items: Vec<BatchItem> = results.into_iter().flatten().collect();
    let count = |outcome| items.iter().filter(|item| item.outcome == outcome).count();
    Ok(Json(BatchResponse {
        created: count(BatchOutcome::Created),
        existing: count(BatchOutcome::Existing) + count(BatchOutcome::Replaced),
        refused: count(BatchOutcome::Refused),
        items,
    }))
}

fn refused(problem: Problem, line: Option<usize>) -> BatchItem {
    // Empty lines are skipped, so a position in `items` is not a line number.
    let problem = match line {
        Some(line) => problem.at(format_args!("line {line}")),
        None => problem,
    };
    BatchItem {
        outcome: BatchOutcome::Refused,
        id: None,
        error: Some(problem.slug()),
        message: Some(problem.message().to_owned()),
    }
}

async fn check(server: &Server, caller: &Caller, item: ApiResult<NewJobBody>) -> ApiResult<ValidJob> {
    let job = validate_job(server, caller, item?).await?;
    server.limiter.check_depth(&server.client, job.queue()).await?;
    Ok(job)
}
