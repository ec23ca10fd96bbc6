//! Why is it not running? For any job the reason, what would change it, and,
//! where it only waits its turn, an estimate.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::body::IdInPath;
use super::problem::{Answer, ProblemBody};
use super::wire::StatusShape;
use crate::client::Client;
use crate::error::Result;
use crate::job::{JobRecord, Status};
use crate::store::{QueueRecord, WorkerRecord};

/// How far places in the queue are counted.
const MOST_AHEAD: u32 = 10_000;
/// The stretch by which an estimate is made.
const LOOK_BACK: chrono::Duration = chrono::Duration::minutes(10);

/// Why a job is not running.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Explanation {
    job_id: Uuid,
    #[schema(value_type = StatusShape)]
    status: Status,
    reason: Reason,
    /// The reason in words, and what would change it.
    message: String,
    /// When it is due, if that is yet to come.
    #[schema(required)]
    due_at: Option<DateTime<Utc>>,
    /// How many jobs of its queue come before it, counted up to 10,000; while it
    /// waits.
    #[schema(required)]
    ahead: Option<u32>,
    /// In how many seconds it should begin, going by the last ten minutes.
    #[schema(required)]
    estimated_seconds: Option<f64>,
}

/// The reasons, in the order in which they are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reason {
    /// It has ended.
    Finished,
    /// It runs.
    Running,
    /// It runs, and its handler has been told to stop.
    Stopping,
    /// Its time has not come.
    NotDue,
    /// It waits for its next attempt after a failure or an interruption.
    WaitsForRetry,
    /// Its queue is paused.
    QueuePaused,
    /// As many of its queue's jobs run as may.
    QueueLimit,
    /// No live worker takes jobs of its queue.
    NoWorkerForQueue,
    /// No live worker of its queue handles its kind.
    NoWorkerForKind,
    /// It was interrupted before, and its workers run such jobs one at a time.
    SuspectWaits,
    /// Others come first.
    WaitsItsTurn,
}

/// Why a job is not running, and when it will.
#[utoipa::path(
    get,
    path = "/jobs/{id}/explain",
    tag = "jobs",
    params(("id" = Uuid, Path, description = "The job.")),
    responses(
        (status = 200, description = "The reason.", body = Explanation),
        (status = 404, description = "No such job.", body = ProblemBody),
    ),
)]
pub(super) async fn explain(
    State(server): State<Server>,
    caller: Caller,
    IdInPath(id): IdInPath,
) -> Answer<Json<Explanation>> {
    let job = server.client.get(id).await?;
    caller.may_use(&job.queue)?;
    Ok(Json(why(&server.client, &job).await?))
}

async fn why(client: &Client, job: &JobRecord) -> Result<Explanation> {
    let say = |reason: Reason, message: String| Explanation {
        job_id: job.id.0,
        status: job.status,
        reason,
        message,
        due_at: None,
        ahead: None,
        estimated_seconds: None,
    };
    let waits = match job.status {
        Status::Succeeded | Status::FailedPermanent | Status::Cancelled => {
            let message = format!("it has ended as {}; retry it to run it again", job.status);
            return Ok(say(Reason::Finished, message));
        }
        Status::Running if job.cancel_requested => {
            let message = "its handler has been told to stop and has not yet".into();
            return Ok(say(Reason::Stopping, message));
        }
        Status::Running => {
            let holder = job.locked_by.map(|worker| worker.to_string()).unwrap_or_default();
            return Ok(say(Reason::Running, format!("it runs, on worker {holder}")));
        }
        Status::Queued => Reason::NotDue,
        Status::Retrying => Reason::WaitsForRetry,
    };
    let now = client.store().now().await?;
    if job.run_at > now {
        let message = match (waits, &job.last_error) {
            (Reason::WaitsForRetry, Some(error)) => {
                format!(
                    "it waits for its next attempt until {}; the last one ended with: {error}",
                    job.run_at
                )
            }
            _ => format!("it is due at {}; retry it to run it now", job.run_at),
        };
        let wait = (job.run_at - now).to_std().unwrap_or_default().as_secs_f64();
        let told = say(waits, message);
        return Ok(Explanation { due_at: Some(job.run_at), estimated_seconds: Some(wait), ..told });
    }
    let queues = client.queues().await?;
    let queue = queues.iter().find(|queue| queue.name == job.queue);
    let ahead = client.ahead(job.id, MOST_AHEAD).await?;
    let told = match blocked_by_queue(job, queue) {
        Some((reason, message)) => say(reason, message),
        None => {
            let workers = client.workers(None).await?;
            match blocked_for_want_of_workers(job, &workers) {
                Some((reason, message)) => say(reason, message),
                None => {
                    let estimated_seconds = estimate(client, job, ahead.unwrap_or(0), now).await?;
                    let (reason, message) = waits_its_turn(job, ahead.unwrap_or(0));
                    Explanation { estimated_seconds, ..say(reason, message) }
                }
            }
        }
    };
    Ok(Explanation { ahead, ..told })
}

fn blocked_by_queue(job: &JobRecord, queue: Option<&QueueRecord>) -> Option<(Reason, String)> {
    let queue = queue?;
    if queue.paused {
        let message = format!("queue `{}` is paused; resume it", job.queue);
        return Some((Reason::QueuePaused, message));
    }
    let limit = queue.limit.filter(|limit| queue.running >= u64::from(*limit))?;
    let message = format!(
        "{} jobs of queue `{}` run, and no more than {limit} may; it begins when one of them ends",
        queue.running, job.queue
    );
    Some((Reason::QueueLimit, message))
}

fn blocked_for_want_of_workers(job: &JobRecord, workers: &[WorkerRecord]) -> Option<(Reason, String)> {
    let live = |worker: &&WorkerRecord| worker.dead_at.is_none() && !worker.stale;
    let of_queue: Vec<&WorkerRecord> =
        workers.iter().filter(live).filter(|worker| worker.queues.contains(&job.queue)).collect();
    // A server that only looks after the queue takes no jobs.
    let takes_some = |worker: &&WorkerRecord| worker.kinds.as_ref().is_none_or(|kinds| !kinds.is_empty());
    if !of_queue.iter().any(takes_some) {
        let message =
            format!("no live worker takes jobs of queue `{}`; start one with --queues {0}", job.queue);
        return Some((Reason::NoWorkerForQueue, message));
    }
    let handles =
        |worker: &&WorkerRecord| worker.kinds.as_ref().is_none_or(|kinds| kinds.contains(&job.kind));
    if !of_queue.iter().any(handles) {
        let message = format!(
            "no live worker of queue `{}` handles kind `{}`; start one that does",
            job.queue, job.kind
        );
        return Some((Reason::NoWorkerForKind, message));
    }
    None
}

fn waits_its_turn(job: &JobRecord, ahead: u32) -> (Reason, String) {
    match job.interruptions {
        0 => (Reason::WaitsItsTurn, format!("it is due; {ahead} jobs of its queue come first")),
        n => (
            Reason::SuspectWaits,
            format!(
                "a worker died {n} times holding it, so a worker runs it only while it runs no other such job; \
                 {ahead} jobs of its queue come first"
            ),
        ),
    }
}

/// By how many of the queue's jobs ended lately.
async fn estimate(client: &Client, job: &JobRecord, ahead: u32, now: DateTime<Utc>) -> Result<Option<f64>> {
    let tallied = client.tallied(now - LOOK_BACK).await?;
    let of_queue = tallied.iter().filter(|tally| tally.queue == job.queue);
    let oldest = of_queue.clone().map(|tally| tally.minute).min();
    let ended: u64 = of_queue.map(|tally| tally.jobs).sum();
    let Some(oldest) = oldest.filter(|_| ended > 0) else { return Ok(None) };
    let seconds = (now - oldest).to_std().unwrap_or_default().as_secs_f64().max(1.0);
    Ok(Some(f64::from(ahead) * seconds / ended as f64))
}
