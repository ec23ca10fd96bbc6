//! Workers in any language: they lease jobs, renew the leases and settle them over
//! HTTP. They can do durable steps and wait like Rust handlers. Fence, recovery and cancellation are the same as for
//! workers in Rust. A worker's first call registers it, and every call is a heartbeat.
//!
//! | File | Owns |
//! |---|---|
//! | `lease` | the lease call: the request, the response, and the order of its parts |
//! | `register` | registering workers and kinds |
//! | `announced` | the kinds that a worker describes, and their cost |
//! | `exchange` | the reports in a lease call |
//! | `waiting` | claiming, and waiting for work and cancels |
//! | `granted` | a leased job as the response carries it |
//! | `sessions` | what is kept in memory, as a cache |
//! | `renew`, `settle`, `steps`, `flows` | the other calls |

mod announced;
mod exchange;
mod flows;
mod granted;
mod lease;
mod register;
mod renew;
mod sessions;
mod settle;
mod steps;
mod waiting;

use std::collections::HashSet;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::attempt_metrics::count_http_attempt;
use super::auth::Caller;
use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;
use crate::client::settle::Kept;
use crate::job::{JobId, WorkerId};
use crate::rules::lifecycle::Ending;
use crate::store::{Beat, Claimed, Lease, LiveLease};

// Glob imports, because `routes!` also needs the items that `utoipa::path` generates.
pub(super) use announced::Announcements;
pub(super) use flows::*;
pub(super) use lease::*;
pub(super) use renew::*;
pub(super) use sessions::Sessions;
pub(super) use settle::*;
pub(super) use steps::*;

/// The maximum number of leases that one call renews or settles.
const MAX_ITEMS: usize = 1000;

/// Identifies a lease.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LeaseRef {
    /// The id of the job.
    id: Uuid,
    /// The number of the lease; every claim of the job has a new one.
    lease_no: i32,
}

impl LeaseRef {
    fn held_by(self, worker: WorkerId) -> Lease {
        Lease { id: JobId(self.id), lease_no: self.lease_no, worker }
    }
}

impl From<&Lease> for LeaseRef {
    fn from(lease: &Lease) -> Self {
        LeaseRef { id: lease.id.0, lease_no: lease.lease_no }
    }
}

/// Refuses a token that does not cover all queues of the worker and of the jobs that it holds. A worker keeps
/// its jobs when it changes its queues.
async fn check_worker_access(server: &Server, caller: &Caller, worker: WorkerId) -> ApiResult<()> {
    let Some(covered) = caller.queues() else { return Ok(()) };
    let known = server.client.registration(worker).await?;
    known.iter().flat_map(|known| &known.queues).try_for_each(|queue| caller.may_access(queue))?;
    match server.client.has_leases_outside(worker, covered).await? {
        true => Err(caller.refuse_access()),
        false => Ok(()),
    }
}

/// Records a call of the worker as its heartbeat. Refuses a dead worker.
async fn heartbeat(server: &Server, worker: WorkerId) -> ApiResult<WorkerId> {
    match server.client.beat(worker, &[]).await? {
        Beat::Alive { .. } => Ok(worker),
        Beat::Dead => Err(dead_worker(server, worker)),
    }
}

fn lease_lost(lease: &Lease) -> Problem {
    Problem::new(
        Slug::Conflict,
        format!("lease {} of job {} is lost; stop, another worker owns the job", lease.lease_no, lease.id),
    )
}

fn dead_worker(server: &Server, worker: WorkerId) -> Problem {
    server.sessions.remove(worker);
    Problem::new(
        Slug::Conflict,
        format!(
            "worker {worker} was declared dead or never registered; stop its jobs, then call POST /leases \
             without worker_id to register again"
        ),
    )
}

/// Counts the stored end of an attempt, and wakes calls that wait for the end of the job.
fn note_end(server: &Server, claimed: &Claimed, kept: Kept) {
    count_http_attempt(claimed, kept);
    if matches!(kept, Kept::Finished(_)) {
        server.job_ends.notify(claimed.lease().id);
    }
}

/// Releases the leases that a worker does not list and that are older than `min_age`: the response that carried them
/// was lost. Returns those that it keeps.
async fn release_unknown(
    client: &Client,
    live: Vec<LiveLease>,
    known: &HashSet<Lease>,
    min_age: Duration,
) -> ApiResult<Vec<LiveLease>> {
    let is_unknown = |live: &LiveLease| !known.contains(&live.lease) && live.age >= min_age;
    let (unknown, kept): (Vec<LiveLease>, Vec<LiveLease>) = live.into_iter().partition(is_unknown);
    let unknown: Vec<Lease> = unknown.iter().map(|unknown| unknown.lease).collect();
    match client.release(&unknown).await.map_err(Problem::from) {
        // A later call releases those that another client has locked.
        Err(problem) if problem.is_partial() => problem.log_part(),
        released => drop(released?),
    }
    Ok(kept)
}

/// Whether a list of leases is complete, so that leases which it does not contain are unknown to the worker.
fn is_complete(held: &[Lease]) -> bool {
    held.len() < MAX_ITEMS
}

/// Refuses a list with too many items.
fn check_count(field: &str, items: usize) -> ApiResult<()> {
    if items > MAX_ITEMS {
        Err(Problem::validation(format!("{field}: {items} items; send at most {MAX_ITEMS} in one call")))
    } else {
        Ok(())
    }
}

/// Signs a worker off.
///
/// The leases it still holds are released at once, and their attempts are not charged.
#[utoipa::path(
    delete,
    path = "/leases/{worker_id}",
    operation_id = "sign_off_worker",
    tag = "leases",
    params(("worker_id" = Uuid, Path, description = "The id that the worker's first call returned.")),
    responses((status = 204, description = "The worker is signed off.")),
)]
pub(super) async fn sign_off(
    State(server): State<Server>,
    caller: Caller,
    worker: Result<Path<Uuid>, axum::extract::rejection::PathRejection>,
) -> ApiResult<StatusCode> {
    let Path(worker) = worker
        .map_err(|_| Problem::bad_request("worker_id: not a UUID; use the id that POST /leases returned"))?;
    let worker = WorkerId(worker);
    check_worker_access(&server, &caller, worker).await?;
    // End its waiting calls first: they would claim the jobs that are released now. Calls that arrive meanwhile get this
    // session and wait.
    let session = server.sessions.of(worker);
    session.end();
    let claims = session.claims.lock().await;
    let signed_off = release_and_retire(&server, worker).await;
    server.sessions.remove(worker);
    drop(claims);
    signed_off?;
    Ok(StatusCode::NO_CONTENT)
}

async fn release_and_retire(server: &Server, worker: WorkerId) -> ApiResult<()> {
    // These attempts may have started, so their history gets an entry.
    let held = server.client.leases(worker).await?;
    let released = held.into_iter().map(|lease| (lease, Ending::Released, Vec::new()));
    let note_end = |claimed: &Claimed, kept| note_end(server, claimed, kept);
    server.client.settle_leases_with(released.collect(), note_end).await?;
    Ok(server.client.retire(worker).await?)
}
