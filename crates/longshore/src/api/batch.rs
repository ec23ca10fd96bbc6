//! Many jobs in one request.

use axum::Json;
use axum::extract::{Request, State};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::enqueue::{NewJobBody, validate_job};
use super::extract::{MAX_BATCH_BODY, Subject, expect_content_type, parse, parse_object, read_body};
use super::jobs::check_access;
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use crate::enqueue::{EnqueuedAs, ValidJob};

/// How many jobs one request brings at most.
const MAX_JOBS: usize = 10_000;

/// What became of each job.
#[derive(Serialize, ToSchema)]
pub(super) struct BatchResponse {
    /// How many are new.
    created: usize,
    /// How many were there already, by their keys.
    existing: usize,
    /// How many were refused; the others are stored.
    refused: usize,
    /// In the order given.
    items: Vec<BatchItem>,
}

/// What became of one job.
#[derive(Serialize, ToSchema)]
#[serde(tag = "outcome", rename_all = "snake_case")]
pub(super) enum BatchItem {
    /// A new job.
    Created { id: Uuid },
    /// The job that already had the key.
    Existing { id: Uuid },
    /// The waiting job that already had the key, with the new contents.
    Replaced { id: Uuid },
    /// Not stored.
    Refused { error: Slug, message: String },
}

/// A job as it was sent.
struct Item {
    /// On which line, if it has one to itself.
    line: Option<usize>,
    job: ApiResult<NewJobBody>,
}

/// Enqueues many jobs in one commit; those that are wrong are refused one by
/// one.
#[utoipa::path(
    post,
    path = "/jobs/batch",
    tag = "jobs",
    request_body(
        description = "An array of jobs, each as in `POST /jobs`, or, as `application/x-ndjson`, one a line; up to \
                       10,000 jobs or 16 MiB.",
        content = Vec<serde_json::Value>,
    ),
    responses(
        (status = 200, description = "What became of each, in the order given.", body = BatchResponse),
        (status = 400, description = "Not JSON.", body = ProblemBody),
        (status = 413, description = "Too large, or too many.", body = ProblemBody),
        (status = 422, description = "An `Idempotency-Key` header: each job has a field for its own.",
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
            "Idempotency-Key: one key cannot stand for many jobs; give each its own idempotency_key",
        ));
    }
    let is_lines = expect_content_type(request.headers(), &["application/x-ndjson"]).is_ok();
    let bytes = read_body(request, MAX_BATCH_BODY).await?;
    let items: Vec<Item> = if is_lines {
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
    if items.len() > MAX_JOBS {
        return Err(Problem::new(
            Slug::TooLarge,
            format!("{} jobs; send at most {MAX_JOBS} in one request", items.len()),
        ));
    }
    let mut answers: Vec<Option<BatchItem>> = Vec::with_capacity(items.len());
    let (mut jobs, mut places) = (Vec::new(), Vec::new());
    let lines: Vec<Option<usize>> = items.iter().map(|item| item.line).collect();
    for (place, item) in items.into_iter().enumerate() {
        match take(&server, &caller, item.job).await {
            Ok(job) => {
                jobs.push(job);
                places.push(place);
                answers.push(None);
            }
            // The database's trouble is the whole request's.
            Err(problem) if problem.slug() == Slug::Unavailable || problem.slug() == Slug::Internal => {
                return Err(problem);
            }
            Err(problem) => answers.push(Some(refused(problem, lines[place]))),
        }
    }
    if !jobs.is_empty() {
        let stored = server.client.store_all(&jobs).await?;
        for (place, enqueued) in places.into_iter().zip(stored) {
            let id = enqueued.id.0;
            if enqueued.how != EnqueuedAs::Created
                && let Err(problem) = check_access(&server, &caller, enqueued.id).await
            {
                answers[place] = Some(refused(problem, lines[place]));
                continue;
            }
            answers[place] = Some(match enqueued.how {
                EnqueuedAs::Created => BatchItem::Created { id },
                EnqueuedAs::Existing => BatchItem::Existing { id },
                EnqueuedAs::Replaced => BatchItem::Replaced { id },
            });
        }
    }
    let items: Vec<BatchItem> = answers.into_iter().flatten().collect();
    let count = |is: fn(&BatchItem) -> bool| items.iter().filter(|item| is(item)).count();
    Ok(Json(BatchResponse {
        created: count(|item| matches!(item, BatchItem::Created { .. })),
        existing: count(|item| matches!(item, BatchItem::Existing { .. } | BatchItem::Replaced { .. })),
        refused: count(|item| matches!(item, BatchItem::Refused { .. })),
        items,
    }))
}

fn refused(problem: Problem, line: Option<usize>) -> BatchItem {
    // Empty lines are passed over, so a place among the items tells no line.
    let problem = match line {
        Some(line) => problem.at(format_args!("line {line}")),
        None => problem,
    };
    BatchItem::Refused { error: problem.slug(), message: problem.message().to_owned() }
}

async fn take(server: &Server, caller: &Caller, item: ApiResult<NewJobBody>) -> ApiResult<ValidJob> {
    let job = validate_job(server, caller, item?).await?;
    server.limiter.check_depth(&server.client, job.queue()).await?;
    Ok(job)
}
