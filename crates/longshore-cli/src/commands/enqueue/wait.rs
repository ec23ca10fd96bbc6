//! `longshore enqueue --wait`: until the job has ended, however it ends.

use std::time::{Duration, Instant};

use longshore::{JobId, Status};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Enqueued, tell};
use crate::duration;
use crate::endpoint::Endpoint;
use crate::failure::{Code, Failure, Outcome};
use crate::output::Out;

/// A quick job is seen to end at once, a slow one costs a look a second.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A server that is restarted is back within this.
const PATIENCE: Duration = Duration::from_secs(60);

/// How the job stands.
#[derive(Deserialize)]
struct Job {
    status: Status,
    attempts: u32,
    result: Option<Box<RawValue>>,
    last_error: Option<String>,
}

/// What programs are told.
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
    // Workers must hear of it while this process waits.
    endpoint.flush().await;
    if !out.json {
        tell(enqueued, out);
    }
    let id = enqueued.job_id;
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let mut pause = FIRST_PAUSE;
    loop {
        let job = look(endpoint, id).await?;
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        match job.status {
            Status::Succeeded | Status::FailedPermanent | Status::Cancelled => {
                return Ok(told(enqueued, &job, out));
            }
            _ if left.is_some_and(|left| left.is_zero()) => {
                if out.json {
                    document(enqueued, &job, out);
                }
                out.note(format_args!(
                    "error: job {id} has not ended within {}: it is {}, and goes on; \
                     `longshore jobs explain {id}` says what it waits for",
                    duration::show(limit.unwrap_or_default()),
                    job.status
                ));
                return Ok(Code::NotEnded);
            }
            _ => {}
        }
        tokio::time::sleep(left.map_or(pause, |left| pause.min(left))).await;
        pause = (pause * 3 / 2).min(LONGEST_PAUSE);
    }
}

/// How the job stands now; a queue that is away for a moment is waited for.
async fn look(endpoint: &Endpoint, id: JobId) -> Result<Job, Failure> {
    let began = Instant::now();
    loop {
        match endpoint.get(&["jobs", &id.to_string()]).send().await {
            Ok(reply) => return reply.read(),
            Err(failure) if failure.code == Code::Unavailable && began.elapsed() < PATIENCE => {
                tokio::time::sleep(LONGEST_PAUSE).await;
            }
            Err(failure) => {
                return Err(Failure::new(
                    failure.code,
                    format_args!("job {id} is enqueued, but how it does cannot be seen: {failure}"),
                ));
            }
        }
    }
}

fn told(enqueued: &Enqueued, job: &Job, out: &Out) -> Code {
    if out.json {
        document(enqueued, job, out);
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
    Code::EndedOtherwise
}

fn document(enqueued: &Enqueued, job: &Job, out: &Out) {
    out.document(&Document {
        job_id: enqueued.job_id,
        how: &enqueued.how,
        status: job.status,
        attempts: job.attempts,
        result: &job.result,
        last_error: &job.last_error,
    });
}
