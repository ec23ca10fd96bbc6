//! A leased job as a response carries it.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::sessions::Session;
use super::waiting::{MAX_JOB_BYTES, Undelivered, job_bytes};
use super::*;
use crate::api::steps::StepBody;
use crate::store::{Claimed, SavedWork, StepRecord};

/// The maximum number of bytes of the steps in one response. Beyond it, the worker reads the steps of a job with
/// `/leases/journal`.
const MAX_STEPS_BYTES: usize = 1024 * 1024;
/// Of how many jobs one statement reads the checkpoints, each of which may have 1 MiB.
const READ_AT_ONCE: usize = 100;

/// A leased job with everything needed to run it.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct LeasedJob {
    id: Uuid,
    /// The number of the lease, to send when renewing or settling it.
    lease_no: i32,
    kind: String,
    queue: String,
    priority: i16,
    #[schema(value_type = serde_json::Value)]
    payload: Box<RawValue>,
    /// The number of this attempt, from 1.
    attempt: u16,
    max_attempts: u16,
    /// How often a worker died while it held this job.
    interruptions: u16,
    /// How long this attempt may take; null means no limit.
    #[schema(required)]
    timeout_seconds: Option<f64>,
    /// The flow that the job is a member of.
    #[schema(required)]
    flow: Option<Uuid>,
    flags: Vec<String>,
    tags: Vec<String>,
    /// Why the job was enqueued.
    #[schema(required)]
    context: Option<String>,
    /// The data that the caller attached.
    #[schema(required, nullable, value_type = Option<serde_json::Value>)]
    metadata: Option<Box<RawValue>>,
    /// What an earlier attempt saved last; null if none did.
    #[schema(required, nullable, value_type = Option<serde_json::Value>)]
    checkpoint: Option<Box<RawValue>>,
    /// The journaled steps, sorted by name. Skip those that are `done`. Null means that they are too large
    /// for this response: read them with `/leases/journal`.
    #[schema(required)]
    steps: Option<Vec<StepBody>>,
    /// The W3C trace context of the enqueue.
    #[schema(required)]
    traceparent: Option<String>,
    run_at: DateTime<Utc>,
    claimed_at: DateTime<Utc>,
}

impl LeasedJob {
    /// Takes what only the worker needs out of the claim.
    fn take(job: &mut Claimed, saved: SavedWork) -> Self {
        LeasedJob {
            id: job.lease.id.0,
            lease_no: job.lease.lease_no,
            kind: job.kind().into(),
            queue: job.queue().into(),
            priority: job.priority(),
            attempt: job.attempt(),
            max_attempts: job.max_attempts(),
            interruptions: job.interruptions(),
            timeout_seconds: job.timeout().map(|timeout| timeout.as_secs_f64()),
            flow: job.flow().map(|flow| flow.0),
            flags: std::mem::take(&mut job.flags),
            tags: std::mem::take(&mut job.options.tags),
            context: job.options.context.take(),
            metadata: job.options.metadata.take(),
            checkpoint: saved.checkpoint,
            steps: saved.steps.map(|steps| steps.into_iter().map(StepBody::from).collect()),
            traceparent: job.trace().map(str::to_owned),
            run_at: job.run_at(),
            claimed_at: job.claimed_at(),
            // Stored as JSON.
            payload: RawValue::from_string(std::mem::take(&mut job.payload)).unwrap_or_default(),
        }
    }
}

/// The jobs of a response, with what earlier attempts stored. The session keeps what a settle needs. Jobs that are too
/// large for the response are released.
pub(super) async fn deliver(
    server: &Server,
    session: &Session,
    mut leased: Undelivered,
) -> ApiResult<Vec<LeasedJob>> {
    let saved = read_saved(server, leased.jobs()).await?;
    let bytes = leased.jobs().iter().zip(&saved).map(|(job, saved)| job_bytes(job) + checkpoint_bytes(saved));
    let count = jobs_that_fit(bytes);
    leased.release_after(count);
    leased.jobs().iter().for_each(|job| server.kinds.register(job.kind()));
    let mut jobs = leased.into_delivered();
    let delivered = jobs.iter_mut().zip(saved).map(|(job, saved)| LeasedJob::take(job, saved)).collect();
    session.grant(jobs.into_iter().map(Arc::new));
    Ok(delivered)
}

/// How many of the jobs with these sizes fit into one response. The first one always does.
fn jobs_that_fit(bytes: impl Iterator<Item = usize>) -> usize {
    let mut total = 0;
    let fits = |(i, bytes): &(usize, usize)| {
        total += bytes;
        *i == 0 || total <= MAX_JOB_BYTES
    };
    bytes.enumerate().take_while(fits).count()
}

fn checkpoint_bytes(saved: &SavedWork) -> usize {
    saved.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.get().len())
}

/// What earlier attempts of these jobs saved, in the same order. Stops reading when the checkpoints have enough bytes for
/// one response, so the result may be shorter.
async fn read_saved(server: &Server, jobs: &[Claimed]) -> ApiResult<Vec<SavedWork>> {
    let mut all = Vec::with_capacity(jobs.len());
    let (mut bytes, mut steps_left) = (0, MAX_STEPS_BYTES);
    for part in jobs.chunks(READ_AT_ONCE) {
        // Only a job that was leased before can have steps or a checkpoint.
        let returned: Vec<JobId> =
            part.iter().filter(|job| is_returned(job)).map(|job| job.lease.id).collect();
        let read = match returned.is_empty() {
            true => Vec::new(),
            false => server.client.saved_work(&returned, steps_left).await?,
        };
        bytes += read.iter().map(checkpoint_bytes).sum::<usize>();
        steps_left = left_for_steps(steps_left, &read);
        let mut read = read.into_iter();
        all.extend(
            part.iter().map(|job| is_returned(job).then(|| read.next()).flatten().unwrap_or_default()),
        );
        if bytes >= MAX_JOB_BYTES {
            break;
        }
    }
    Ok(all)
}

fn is_returned(job: &Claimed) -> bool {
    job.lease.lease_no > 1
}

/// How many bytes of steps still fit. After a journal that did not fit, none do.
fn left_for_steps(before: usize, read: &[SavedWork]) -> usize {
    let mut left = before;
    for saved in read {
        let Some(steps) = &saved.steps else { return 0 };
        left = left.saturating_sub(steps.iter().map(StepRecord::bytes).sum());
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_job_always_fits() {
        let fit = |sizes: &[usize]| jobs_that_fit(sizes.iter().copied());
        assert_eq!(fit(&[]), 0);
        assert_eq!(fit(&[MAX_JOB_BYTES + 1, 1]), 1);
        assert_eq!(fit(&[MAX_JOB_BYTES - 1, 1, 1]), 2);
        assert_eq!(fit(&[1, MAX_JOB_BYTES, 1]), 1);
    }
}
