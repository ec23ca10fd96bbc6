//! One order for many jobs: cancel, retry or delete whatever a filter finds.

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
use super::schemas::StatusSchema;
use crate::client::Client;
use crate::error::Result;
use crate::job::{JobId, JobRecord, Outcome, Status, WorkerId};
use crate::lifecycle::{self, Event, Finished, Flags, Running, Waiting};
use crate::store::ListFilter;

/// How many jobs one request concerns at most.
const MAX_JOBS: u32 = 10_000;
/// A request that has taken this long goes no further; `next` says where to go on.
const MAX_RUN_TIME: Duration = Duration::from_secs(15);

/// What to do, and to which jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BulkRequest {
    action: BulkAction,
    /// Which jobs: all that fit everything named here. At least one thing must be
    /// named.
    #[serde(deserialize_with = "object")]
    filter: BulkFilter,
    /// Count what fits, and what of it would be passed over, and change nothing.
    #[serde(default)]
    dry_run: bool,
    /// How many at most, newest first; 1,000 by default.
    #[schema(minimum = 1, maximum = 10000)]
    limit: Option<u32>,
    /// Older than this job: the `next` of the response before.
    cursor: Option<Uuid>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum BulkAction {
    /// Cancel waiting jobs and tell running ones to stop.
    Cancel,
    /// Let finished jobs run again, and waiting ones now.
    Retry,
    /// Remove finished jobs.
    Delete,
}

/// Which jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BulkFilter {
    #[schema(value_type = Option<StatusSchema>)]
    status: Option<Status>,
    kind: Option<String>,
    queue: Option<String>,
    tag: Option<String>,
    /// Made before this time.
    older_than: Option<DateTime<Utc>>,
    /// Made after this time.
    newer_than: Option<DateTime<Utc>>,
}

/// What was done.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct BulkResponse {
    /// How many fit.
    matched: u64,
    /// How many were changed; none in a dry run.
    changed: u64,
    /// How many could not be: they had moved on, or their state forbids it. In a
    /// dry run, how many the order would pass over; it would change the others.
    skipped: u64,
    /// Whether nothing was changed.
    dry_run: bool,
    /// Where to go on, if there may be more.
    #[schema(required)]
    next: Option<Uuid>,
}

/// Cancels, retries or deletes whatever a filter finds.
#[utoipa::path(
    post,
    path = "/jobs/bulk",
    tag = "jobs",
    request_body = BulkRequest,
    responses(
        (status = 200, description = "What was done.", body = BulkResponse),
        (status = 422, description = "A filter that names nothing, or a value out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn bulk(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<BulkRequest>,
) -> ApiResult<Json<BulkResponse>> {
    let BulkFilter { status, kind, queue, tag, older_than, newer_than } = body.filter;
    let texts = [&kind, &queue, &tag];
    let names_nothing = status.is_none()
        && texts.iter().all(|text| text.is_none())
        && older_than.is_none()
        && newer_than.is_none();
    if names_nothing {
        return Err(Problem::validation(
            "filter: names nothing, which would mean every job; name at least a status, a kind, a queue, a tag or a time",
        ));
    }
    refuse_nul(texts.map(|text| text.as_deref()))?;
    caller.may_use_queue_or_all(queue.as_deref())?;
    let limit = check_range("limit", body.limit.unwrap_or(1000), MAX_JOBS)?;
    let mut filter = ListFilter {
        status,
        kind,
        queue,
        tag,
        older_than,
        newer_than,
        cursor: body.cursor.map(JobId),
        ..ListFilter::default()
    };
    let began = Instant::now();
    let mut response = BulkResponse { dry_run: body.dry_run, ..BulkResponse::default() };
    loop {
        let left = u64::from(limit) - response.matched;
        filter.limit = left.min(ListFilter::MAX_LIMIT.into()) as u32;
        let page = server.client.list(&filter).await?;
        for job in &page.jobs {
            response.matched += 1;
            if body.dry_run {
                response.skipped += u64::from(!body.action.would_change(job));
                continue;
            }
            match apply(&server.client, body.action, job.id).await {
                Ok(()) => response.changed += 1,
                Err(error) if error.is_conflict() || error.is_not_found() => response.skipped += 1,
                Err(error) => return Err(error.into()),
            }
        }
        filter.cursor = page.next;
        let enough = response.matched >= u64::from(limit) || began.elapsed() > MAX_RUN_TIME;
        if page.next.is_none() || enough {
            response.next = page.next.map(|next| next.0);
            return Ok(Json(response));
        }
    }
}

impl BulkAction {
    /// Whether a job's state allows it. Whether another job has its unique key
    /// only trying can tell.
    fn would_change(self, job: &JobRecord) -> bool {
        let event = match self {
            BulkAction::Cancel => Event::Cancel,
            BulkAction::Retry => Event::Retry,
            BulkAction::Delete => Event::Delete,
        };
        lifecycle::next(&list_state(job), event).is_ok()
    }
}

/// Where a job of a list stands, as far as orders ask: a list does not tell
/// whether the handler has begun or the unique key was taken over.
fn list_state(job: &JobRecord) -> lifecycle::State {
    let &JobRecord { lease_no, attempts, max_attempts, interruptions, cancel_requested, .. } = job;
    let finished = |outcome| lifecycle::State::Finished(Finished { lease_no, outcome });
    match job.status {
        Status::Queued | Status::Retrying => {
            lifecycle::State::Waiting(Waiting { lease_no, attempts, max_attempts, interruptions })
        }
        Status::Running => lifecycle::State::Running(Running {
            lease_no,
            worker: job.locked_by.unwrap_or(WorkerId(Uuid::nil())),
            attempt: attempts,
            max_attempts,
            interruptions,
            started: false,
            flags: Flags { cancel_requested, superseded: false },
        }),
        Status::Succeeded => finished(Outcome::Succeeded),
        Status::FailedPermanent => finished(Outcome::FailedPermanent),
        Status::Cancelled => finished(Outcome::Cancelled),
    }
}

async fn apply(client: &Client, action: BulkAction, id: JobId) -> Result<()> {
    match action {
        BulkAction::Cancel => client.cancel(id).await.map(drop),
        BulkAction::Retry => client.retry(id).await,
        BulkAction::Delete => client.delete(id).await,
    }
}
