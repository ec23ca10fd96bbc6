//! A leased job as a response carries it.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::sessions::Session;
use super::waiting::Undelivered;
use super::*;
use crate::api::steps::StepBody;
use crate::store::{Claimed, SavedWork};

/// The maximum number of bytes of the steps in one response. Beyond it, the worker reads the steps of a job with
/// `/leases/journal`.
const MAX_STEPS_BYTES: usize = 1024 * 1024;

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

/// The jobs of a response, with what earlier attempts stored. The session keeps what a settle needs.
pub(super) async fn deliver(
    server: &Server,
    session: &Session,
    leased: Undelivered,
) -> ApiResult<Vec<LeasedJob>> {
    // Only a job that was leased before can have steps or a checkpoint.
    let returned = leased.jobs().iter().map(Claimed::lease).filter(|lease| lease.lease_no > 1);
    let returned: Vec<JobId> = returned.map(|lease| lease.id).collect();
    let saved = match returned.is_empty() {
        true => Vec::new(),
        false => server.client.saved_work(&returned, MAX_STEPS_BYTES).await?,
    };
    let mut saved = saved.into_iter();
    leased.jobs().iter().for_each(|job| server.kinds.register(job.kind()));
    let mut jobs = leased.into_delivered();
    let take = |job: &mut Claimed| {
        let saved = if job.lease.lease_no > 1 { saved.next() } else { None };
        LeasedJob::take(job, saved.unwrap_or_default())
    };
    let delivered = jobs.iter_mut().map(take).collect();
    session.grant(jobs.into_iter().map(Arc::new));
    Ok(delivered)
}
