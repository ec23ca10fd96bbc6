//! A worker says that it lives and what it holds, and learns what it has lost.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::*;
use crate::api::extract::{Body, objects, optional_objects};
use crate::api::problem::ProblemBody;

/// An answer that has not arrived by now was lost: no request takes longer.
const RESPONSE_LOST_AFTER: Duration = Duration::from_secs(30);

/// What a worker still holds.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct RenewRequest {
    worker_id: Uuid,
    /// The leases it holds, all of them. One that is not named half a minute after
    /// it was given is given back: the answer that brought it was lost. Absent
    /// says nothing about leases.
    #[serde(default, deserialize_with = "optional_objects")]
    #[schema(max_items = 1000)]
    leases: Option<Vec<LeaseRef>>,
    /// What handlers report meanwhile.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    progress: Vec<ProgressItem>,
}

/// What one handler reports.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct ProgressItem {
    id: Uuid,
    lease_no: i32,
    /// Any JSON up to 64 KiB.
    #[schema(value_type = serde_json::Value)]
    progress: Box<RawValue>,
}

/// What a worker must know about its leases.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct RenewResponse {
    /// No longer its own: stop these, their ends will not be stored.
    lost: Vec<LeaseRef>,
    /// To be cancelled: stop these and settle them as `cancelled`.
    cancel: Vec<LeaseRef>,
}

/// The worker's heartbeat.
#[utoipa::path(
    post,
    path = "/leases/renew",
    tag = "leases",
    request_body = RenewRequest,
    responses(
        (status = 200, description = "Leases that are lost, and leases to cancel.", body = RenewResponse),
        (status = 409, description = "The worker was declared dead: stop everything and begin anew.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn renew(
    State(server): State<Server>,
    caller: Caller,
    Body(body): Body<RenewRequest>,
) -> ApiResult<Json<RenewResponse>> {
    let named = body.leases.as_deref().unwrap_or_default();
    check_count("leases", named.len())?;
    check_count("progress", body.progress.len())?;
    let worker = WorkerId(body.worker_id);
    check_worker_access(&server, &caller, worker).await?;
    let mut reports = Vec::with_capacity(body.progress.len());
    for ProgressItem { id, lease_no, progress } in body.progress {
        crate::enqueue::check_json("progress", progress.get(), 64 * 1024)?;
        reports.push((LeaseRef { id, lease_no }.of(worker), progress));
    }
    let held: Vec<Lease> = named.iter().map(|lease| lease.of(worker)).collect();
    let (lost, cancel) = match server.client.beat(worker, &held).await? {
        Beat::Alive { lost, cancel } => (lost, cancel),
        Beat::Dead => return Err(dead_worker(&server, worker)),
    };
    if !reports.is_empty() {
        // Whose lease is lost is told above.
        let _ = server.client.progress(&reports).await?;
    }
    if body.leases.is_some() {
        release_unknown(&server.client, worker, &held, RESPONSE_LOST_AFTER).await?;
    }
    let name = |leases: &[Lease]| leases.iter().map(LeaseRef::from).collect();
    Ok(Json(RenewResponse { lost: name(&lost), cancel: name(&cancel) }))
}
