//! Workers in any language: lease jobs, renew the leases, settle them. The same
//! fence, recovery and cancellation as for workers in Rust: the first call
//! registers, every call is a heartbeat.

mod lease;
mod renew;
mod sessions;
mod settle;

use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;
use crate::job::{JobId, WorkerId};
use crate::store::{Beat, Lease};

// With what the macros made beside them, which routes are built from.
pub(super) use lease::*;
pub(super) use renew::*;
pub(super) use sessions::Sessions;
pub(super) use settle::*;

/// How many leases one call renews or settles at most.
const MAX_ITEMS: usize = 1000;

/// One lease.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseRef {
    /// The job.
    id: Uuid,
    /// Which lease of the job: the fence.
    lease_no: i32,
}

impl LeaseRef {
    fn of(self, worker: WorkerId) -> Lease {
        Lease { id: JobId(self.id), lease_no: self.lease_no, worker }
    }
}

impl From<&Lease> for LeaseRef {
    fn from(lease: &Lease) -> Self {
        LeaseRef { id: lease.id.0, lease_no: lease.lease_no }
    }
}

/// Refuses a token for some queues that speaks for a worker of others.
async fn check_worker_access(server: &Server, caller: &Caller, worker: WorkerId) -> ApiResult<()> {
    if caller.queues().is_none() {
        return Ok(());
    }
    let workers = server.client.workers(None).await?;
    let mut queues = workers.iter().filter(|known| known.id == worker).flat_map(|known| &known.queues);
    queues.try_for_each(|queue| caller.may_access(queue))
}

/// A call is a sign of life; one of a dead worker comes too late.
async fn heartbeat(server: &Server, worker: WorkerId) -> ApiResult<WorkerId> {
    match server.client.beat(worker, &[]).await? {
        Beat::Alive { .. } => Ok(worker),
        Beat::Dead => Err(dead_worker(server, worker)),
    }
}

fn dead_worker(server: &Server, worker: WorkerId) -> Problem {
    server.sessions.forget(worker);
    Problem::new(
        Slug::Conflict,
        format!(
            "worker {worker} was declared dead or never lived; stop what it runs, and call again without \
             worker_id to begin anew"
        ),
    )
}

/// Releases the leases that a worker does not list and that are older than
/// `min_age`: the response that carried them was lost.
async fn release_unknown(
    client: &Client,
    worker: WorkerId,
    held: &[Lease],
    min_age: Duration,
) -> ApiResult<()> {
    // A full list may be incomplete, so it does not prove that a response was lost.
    if held.len() < MAX_ITEMS {
        client.release_unknown(worker, held, min_age).await?;
    }
    Ok(())
}

fn check_count(field: &str, items: usize) -> ApiResult<()> {
    if items > MAX_ITEMS {
        Err(Problem::validation(format!("{field}: {items} of them; send at most {MAX_ITEMS} at a time")))
    } else {
        Ok(())
    }
}

/// Signs a worker off. What it still holds is given back at once, uncharged.
#[utoipa::path(
    delete,
    path = "/leases/{worker_id}",
    tag = "leases",
    params(("worker_id" = Uuid, Path, description = "As the first call returned it.")),
    responses((status = 204, description = "It is gone.")),
)]
pub(super) async fn sign_off(
    State(server): State<Server>,
    caller: Caller,
    worker: Result<Path<Uuid>, axum::extract::rejection::PathRejection>,
) -> ApiResult<StatusCode> {
    let Path(worker) = worker.map_err(|_| Problem::bad_request("worker_id: not a UUID"))?;
    let worker = WorkerId(worker);
    check_worker_access(&server, &caller, worker).await?;
    release_unknown(&server.client, worker, &[], Duration::ZERO).await?;
    server.client.retire(worker).await?;
    server.sessions.forget(worker);
    Ok(StatusCode::NO_CONTENT)
}
