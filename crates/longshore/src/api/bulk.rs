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
use super::body::{Body, an_object, refuse_nul, up_to};
use super::problem::{Answer, Problem, ProblemBody};
use super::wire::StatusShape;
use crate::client::Client;
use crate::error::Result;
use crate::job::{JobId, JobRecord, Outcome, Status, WorkerId};
use crate::lifecycle::{self, Event, Finished, Flags, Running, Waiting};
use crate::store::ListFilter;

/// How many jobs one request concerns at most.
const MOST: u32 = 10_000;
/// A request that has taken this long goes no further; `next` says where to go on.
const LONG_ENOUGH: Duration = Duration::from_secs(15);

/// What to do, and to which jobs.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct BulkBody {
    action: Action,
    /// Which jobs: all that fit everything named here. At least one thing must be
    /// named.
    #[serde(deserialize_with = "an_object")]
    filter: BulkFilter,
    /// Count what fits, and what of it would be passed over, and change nothing.
    #[serde(default)]
    dry_run: bool,
    /// How many at most, newest first; 1,000 by default.
    #[schema(minimum = 1, maximum = 10000)]
    limit: Option<u32>,
    /// Older than this job: the `next` of the answer before.
    cursor: Option<Uuid>,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Action {
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
    #[schema(value_type = Option<StatusShape>)]
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
pub(super) struct BulkAnswer {
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
    request_body = BulkBody,
    responses(
        (status = 200, description = "What was done.", body = BulkAnswer),
        (status = 422, description = "A filter that names nothing, or a value out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn bulk(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<BulkBody>,
) -> Answer<Json<BulkAnswer>> {
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
    caller.may_use_of(queue.as_deref())?;
    let limit = up_to("limit", body.limit.unwrap_or(1000), MOST)?;
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
    let mut answer = BulkAnswer { dry_run: body.dry_run, ..BulkAnswer::default() };
    loop {
        let left = u64::from(limit) - answer.matched;
        filter.limit = left.min(ListFilter::MAX_LIMIT.into()) as u32;
        let page = server.client.list(&filter).await?;
        for job in &page.jobs {
            answer.matched += 1;
            if body.dry_run {
                answer.skipped += u64::from(!body.action.would_change(job));
                continue;
            }
            match carry_out(&server.client, body.action, job.id).await {
                Ok(()) => answer.changed += 1,
                Err(error) if error.is_conflict() || error.is_not_found() => answer.skipped += 1,
                Err(error) => return Err(error.into()),
            }
        }
        filter.cursor = page.next;
        let enough = answer.matched >= u64::from(limit) || began.elapsed() > LONG_ENOUGH;
        if page.next.is_none() || enough {
            answer.next = page.next.map(|next| next.0);
            return Ok(Json(answer));
        }
    }
}

impl Action {
    /// Whether a job's state allows it. Whether another job has its unique key
    /// only trying can tell.
    fn would_change(self, job: &JobRecord) -> bool {
        let event = match self {
            Action::Cancel => Event::Cancel,
            Action::Retry => Event::Retry,
            Action::Delete => Event::Delete,
        };
        lifecycle::next(&standing(job), event).is_ok()
    }
}

/// Where a job of a list stands, as far as orders ask: a list does not tell
/// whether the handler has begun or the unique key was taken over.
fn standing(job: &JobRecord) -> lifecycle::State {
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

async fn carry_out(client: &Client, action: Action, id: JobId) -> Result<()> {
    match action {
        Action::Cancel => client.cancel(id).await.map(drop),
        Action::Retry => client.retry(id).await,
        Action::Delete => client.delete(id).await,
    }
}
