//! `longshore enqueue --wait`: polls the job until it has ended.

use std::time::{Duration, Instant};

use longshore::{JobId, Status};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Enqueued, print};
use crate::duration;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

/// The polling interval grows from the first to the second: the end of a quick job is seen at
/// once, and a slow job costs one request per second.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// After this time, the reason is printed if no worker can run the job.
const EXPLAIN_AFTER: Duration = Duration::from_secs(2);
/// How long the queue may be unavailable. A server restart takes less.
const MAX_OUTAGE: Duration = Duration::from_secs(60);

/// The state of the job.
#[derive(Deserialize)]
struct Job {
    status: Status,
    attempts: u32,
    result: Option<Box<RawValue>>,
    last_error: Option<String>,
}

/// The JSON output.
#[derive(Serialize)]
struct Document<'a> {
    job_id: JobId,
    how: &'a str,
    status: Status,
    attempts: u32,
    result: &'a Option<Box<RawValue>>,
    last_error: &'a Option<String>,
}

pub(super) async fn until_ended(
    endpoint: &Endpoint,
    enqueued: &Enqueued,
    limit: Option<Duration>,
    out: &Out,
) -> Outcome {
    // Wake workers now, not when this process exits.
    endpoint.flush().await;
    if !out.json {
        print(enqueued, out);
    }
    let id = enqueued.job_id;
    let began = Instant::now();
    let deadline = limit.and_then(|limit| began.checked_add(limit));
    let mut pause = FIRST_PAUSE;
    let mut is_explained = false;
    loop {
        let job = get(endpoint, id).await?;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match job.status {
            Status::Succeeded | Status::FailedPermanent | Status::Cancelled => {
                return Ok(print_end(enqueued, &job, out));
            }
            _ if left.is_some_and(|left| left.is_zero()) => {
                if out.json {
                    print_document(enqueued, &job, out);
                }
                out.note(format_args!(
                    "error: job {id} has not ended within {}: it is {} and continues; \
                     `longshore jobs explain {id}` shows what it waits for",
                    duration::show(limit.unwrap_or_default()),
                    job.status
                ));
                return Ok(Code::NotEnded);
            }
            Status::Queued | Status::Retrying if !is_explained && began.elapsed() >= EXPLAIN_AFTER => {
                is_explained = true;
                explain_if_stuck(endpoint, id, out).await;
            }
            _ => {}
        }
        let until_explained =
            Some(EXPLAIN_AFTER.saturating_sub(began.elapsed())).filter(|time| !time.is_zero());
        let next = [left, until_explained].into_iter().flatten().fold(pause, Duration::min);
        tokio::time::sleep(next).await;
        pause = (pause * 3 / 2).min(LONGEST_PAUSE);
    }
}

/// Prints why the job does not run, if that will not change by itself.
async fn explain_if_stuck(endpoint: &Endpoint, id: JobId, out: &Out) {
    #[derive(Deserialize)]
    struct Explanation {
        reason: String,
        message: String,
    }

    // The explanation is extra: the wait continues without it.
    let Ok(reply) = endpoint.get(&["jobs", &id.to_string(), "explain"]).send().await else { return };
    let Ok(Explanation { reason, message }) = reply.read() else { return };
    if matches!(reason.as_str(), "queue_paused" | "no_worker_for_queue" | "no_worker_for_kind") {
        out.note(format_args!("still waiting: {message}"));
    }
}

/// Gets the job. Retries for a while if the queue is unavailable.
async fn get(endpoint: &Endpoint, id: JobId) -> Result<Job, Failure> {
    let began = Instant::now();
    loop {
        match endpoint.get(&["jobs", &id.to_string()]).send().await {
            Ok(reply) => return reply.read(),
            Err(failure) if failure.code == Code::Unavailable && began.elapsed() < MAX_OUTAGE => {
                tokio::time::sleep(LONGEST_PAUSE).await;
            }
            Err(failure) => {
                return Err(Failure::new(
                    failure.code,
                    format_args!("job {id} is enqueued, but its status cannot be read: {failure}"),
                ));
            }
        }
    }
}

fn print_end(enqueued: &Enqueued, job: &Job, out: &Out) -> Code {
    if out.json {
        print_document(enqueued, job, out);
    }
    if job.status == Status::Succeeded {
        if !out.json {
            let result = job.result.as_ref().map(|result| format!(" {}", result.get())).unwrap_or_default();
            out.line(format_args!("succeeded{result}"));
        }
        return Code::Done;
    }
    let why = job.last_error.as_ref().map(|error| format!(": {error}")).unwrap_or_default();
    out.note(format_args!("error: job {} ended as {}{why}", enqueued.job_id, job.status));
    Code::EndedWithoutSuccess
}

fn print_document(enqueued: &Enqueued, job: &Job, out: &Out) {
    out.document(&Document {
        job_id: enqueued.job_id,
        how: &enqueued.how,
        status: job.status,
        attempts: job.attempts,
        result: &job.result,
        last_error: &job.last_error,
    });
}
