//! The heartbeat of an HTTP worker: it sends the leases it holds, and receives those
//! it has lost and those to cancel.

use std::collections::HashSet;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::waiting::Pulse;
use super::*;
use crate::api::extract::{Body, objects, optional_objects};
use crate::api::problem::ProblemBody;

/// A lease older than this that the worker does not list was in a response that got
/// lost: no request takes longer.
const RESPONSE_LOST_AFTER: Duration = Duration::from_secs(30);

/// The maximum size of a progress report, in bytes of JSON.
pub(super) const MAX_PROGRESS: usize = 64 * 1024;

/// The heartbeat of a worker.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct RenewRequest {
    worker_id: Uuid,
    /// All leases the worker holds. A lease that is older than 30 seconds and not
    /// listed is released, because the response that contained it was lost. If the
    /// field is absent, no lease is released.
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(max_items = 1000)]
    leases: Option<Vec<LeaseRef>>,
    /// Progress of running jobs.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    progress: Vec<ProgressItem>,
}

/// The progress of one running job.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ProgressItem {
    id: Uuid,
    lease_no: i32,
    /// Any JSON value up to 64 KiB.
    #[schema(value_type = serde_json::Value)]
    progress: Box<RawValue>,
}

impl ProgressItem {
    pub(super) fn lease(&self) -> LeaseRef {
        LeaseRef { id: self.id, lease_no: self.lease_no }
    }

    pub(super) fn into_value(self) -> (LeaseRef, Box<RawValue>) {
        (self.lease(), self.progress)
    }
}

/// The leases that need the worker's attention.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct RenewResponse {
    /// Leases that the worker has lost. Stop their jobs; they cannot be settled.
    lost: Vec<LeaseRef>,
    /// Leases whose jobs are to be cancelled. Stop these jobs and settle them as
    /// `cancelled`.
    cancel: Vec<LeaseRef>,
}

/// Sends a worker's heartbeat and the leases it holds.
///
/// `worker_id` is the id that `POST /leases` returned. A worker that is dead or was never
/// registered, such as the one in the example, is refused with 409.
#[utoipa::path(
    post,
    path = "/leases/renew",
    operation_id = "renew_leases",
    tag = "leases",
    request_body(content = RenewRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "leases": [{ "id": "01990000-0000-7000-8000-000000000001", "lease_no": 1 }],
    })),
    responses(
        (status = 200, description = "The leases that are lost and those to cancel.", body = RenewResponse),
        (status = 409, description = "The worker was declared dead. Stop its jobs and register again.",
         body = ProblemBody),
    ),
)]
pub(in crate::api) async fn renew(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<RenewRequest>,
) -> ApiResult<Json<RenewResponse>> {
    let listed = body.leases.as_deref().unwrap_or_default();
    check_count("leases", listed.len())?;
    check_count("progress", body.progress.len())?;
    let worker = WorkerId(body.worker_id);
    check_worker_access(&server, &caller, worker).await?;
    let mut reports = Vec::with_capacity(body.progress.len());
    for ProgressItem { id, lease_no, progress } in body.progress {
        crate::rules::enqueue::check_json("progress", progress.get(), MAX_PROGRESS)?;
        reports.push((LeaseRef { id, lease_no }.held_by(worker), progress));
    }
    let held: Vec<Lease> = listed.iter().map(|lease| lease.held_by(worker)).collect();
    let live = server.client.beat_and_list(worker).await?.ok_or_else(|| dead_worker(&server, worker))?;
    let known: HashSet<Lease> = held.iter().copied().collect();
    let Pulse { lost, mut cancel, .. } = Pulse::of(&live, &held);
    cancel.retain(|lease| known.contains(lease));
    if !reports.is_empty() {
        // Lost leases are already in `lost`.
        let _ = server.client.progress(&reports).await?;
    }
    if body.leases.is_some() && is_complete(&held) {
        release_unknown(&server.client, live, &known, RESPONSE_LOST_AFTER).await?;
    }
    let refs = |leases: &[Lease]| leases.iter().map(LeaseRef::from).collect();
    Ok(Json(RenewResponse { lost: refs(&lost), cancel: refs(&cancel) }))
}
