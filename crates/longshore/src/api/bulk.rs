//! Bulk operations: cancel, retry or delete every job that matches a filter.

use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::extract::{Body, check_range, object, refuse_nul};
use super::problem::{ApiResult, Problem, ProblemBody};
use super::schemas::{ActionSchema, StatusSchema};
use crate::client::{Target, also_in};
use crate::job::{JobId, JobRecord, Outcome, Status, WorkerId};
use crate::rules::lifecycle::{self, Event, Finished, LeaseFlags, Running, Waiting};
use crate::store::{Action, KeyWait, ListFilter, Payloads};

/// The maximum number of jobs that one request processes.
const MAX_JOBS: u32 = 10_000;
/// A request stops after this time and returns in `next` where to continue.
const MAX_RUN_TIME: Duration = Duration::from_secs(15);

/// A bulk operation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BulkRequest {
    #[schema(value_type = ActionSchema)]
    action: Action,
    /// Selects the jobs that match every field set here. Set at least one.
    #[serde(deserialize_with = "object")]
    filter: BulkFilter,
    /// Only count the jobs that match and those that would be skipped; change
    /// nothing.
    #[serde(default)]
    dry_run: bool,
    /// The maximum number of jobs to process, newest first. 1,000 by default.
    #[schema(minimum = 1, maximum = 10000)]
    limit: Option<u32>,
    /// Process only jobs older than this one: the `next` of the previous response.
    cursor: Option<Uuid>,
}

/// Selects jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BulkFilter {
    #[schema(value_type = Option<StatusSchema>)]
    status: Option<Status>,
    kind: Option<String>,
    queue: Option<String>,
    tag: Option<String>,
    /// Created before this time.
    older_than: Option<DateTime<Utc>>,
    /// Created after this time.
    newer_than: Option<DateTime<Utc>>,
}

/// The result of a bulk operation.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct BulkResponse {
    /// How many jobs matched the filter.
    matched: u64,
    /// How many jobs were changed; 0 in a dry run.
    changed: u64,
    /// How many jobs could not be changed because of their state. In a dry run, how
    /// many would be skipped; the others would be changed.
    skipped: u64,
    /// Whether this was a dry run.
    dry_run: bool,
    /// The `cursor` to continue with; null if no more jobs match.
    #[schema(required)]
    next: Option<Uuid>,
}

/// Cancels, retries or deletes every job that matches a filter.
#[utoipa::path(
    post,
    path = "/jobs/bulk",
    operation_id = "change_jobs",
    tag = "jobs",
    request_body(content = BulkRequest, example = json!({
        "action": "cancel",
        "filter": { "tag": "spring", "status": "queued" },
        "dry_run": true,
    })),
    responses(
        (status = 200, description = "How many jobs matched, were changed and were skipped.",
         body = BulkResponse),
        (status = 422, description = "The filter is empty, or a value is out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn bulk(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<BulkRequest>,
) -> ApiResult<Json<BulkResponse>> {
    let BulkFilter { status, kind, queue, tag, older_than, newer_than } = body.filter;
    let texts = [&kind, &queue, &tag];
    let is_empty = status.is_none()
        && texts.iter().all(|text| text.is_none())
        && older_than.is_none()
        && newer_than.is_none();
    if is_empty {
        return Err(Problem::validation(
            "filter: is empty and would match every job; set status, kind, queue, tag, older_than or newer_than",
        ));
    }
    refuse_nul(texts.map(|text| text.as_deref()))?;
    caller.may_use_queue_or_all(queue.as_deref())?;
    let limit = check_range("limit", body.limit.unwrap_or(1000), MAX_JOBS)?;
    let mut filter = ListFilter {
        statuses: status.into_iter().collect(),
        kind,
        queue,
        tag,
        older_than,
        newer_than,
        cursor: body.cursor.map(JobId),
        payloads: Payloads::Omit,
        ..ListFilter::default()
    };
    let also_in = also_in(body.action, &filter.statuses);
    let started = Instant::now();
    let mut response = BulkResponse { dry_run: body.dry_run, ..BulkResponse::default() };
    loop {
        let left = u64::from(limit) - response.matched;
        filter.limit = left.min(ListFilter::MAX_LIMIT.into()) as u32;
        let page = server.client.list(&filter).await?;
        let mut next = page.next;
        if body.dry_run {
            response.matched += page.jobs.len() as u64;
            let skipped = page.jobs.iter().filter(|job| !would_change(body.action, job));
            response.skipped += skipped.count() as u64;
        } else {
            let jobs: Vec<Target> = page.jobs.iter().map(|job| Target::listed(job, &also_in)).collect();
            let changes = server.client.change_jobs(body.action, &jobs, KeyWait::Long).await;
            if let Some((_, error)) = changes.failed {
                return Err(error.into());
            }
            response.matched += changes.changed + changes.skipped;
            response.changed += changes.changed;
            response.skipped += changes.skipped;
            if changes.last != page.jobs.last().map(|job| job.id) {
                // The time was over before the end of the page.
                next = changes.last;
            }
        }
        filter.cursor = next;
        let enough = response.matched >= u64::from(limit) || started.elapsed() > MAX_RUN_TIME;
        if next.is_none() || enough {
            response.next = next.map(|next| next.0);
            return Ok(Json(response));
        }
    }
}

/// Whether the state of a listed job allows the action. A retry can still be refused later because another
/// job has the unique key.
fn would_change(action: Action, job: &JobRecord) -> bool {
    let event = match action {
        Action::Cancel => Event::Cancel,
        Action::Retry => Event::Retry,
        Action::Delete => Event::Delete,
    };
    lifecycle::next(&list_state(job), event).is_ok()
}

/// The state of a listed job, as far as these actions depend on it. A list does not
/// include whether the handler has started, the unique key has moved to another job, or a
/// job waits for other tasks of its flow.
fn list_state(job: &JobRecord) -> lifecycle::State {
    let &JobRecord { lease_no, attempts, max_attempts, interruptions, cancel_requested, .. } = job;
    let finished = |outcome| lifecycle::State::Finished(Finished { lease_no, outcome, is_needed: false });
    match job.status {
        Status::Queued | Status::Retrying => lifecycle::State::Waiting(Waiting {
            lease_no,
            attempts,
            max_attempts,
            interruptions,
            is_held: false,
        }),
        Status::Running => lifecycle::State::Running(Running {
            lease_no,
            worker: job.locked_by.unwrap_or(WorkerId(Uuid::nil())),
            attempt: attempts,
            max_attempts,
            interruptions,
            started: false,
            flags: LeaseFlags { cancel_requested, superseded: false },
        }),
        Status::Succeeded => finished(Outcome::Succeeded),
        Status::FailedPermanent => finished(Outcome::FailedPermanent),
        Status::Cancelled => finished(Outcome::Cancelled),
    }
}
