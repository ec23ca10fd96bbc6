//! The reports in a lease call: ends of attempts, progress, steps and checkpoints. They are stored before the
//! call claims, each independently of the others.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::renew::ProgressItem;
use super::sessions::Session;
use super::settle::{SettleItem, check_item, store_ends};
use super::steps::{NewStepBody, store_steps};
use super::*;
use crate::enqueue::{MAX_PAYLOAD, check_json};
use crate::store::Fenced;

/// Steps of one leased job that are done.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
// Not `StepsItem`: generated clients call the items of `steps` so.
#[schema(as = DoneSteps)]
pub(in crate::api) struct StepsItem {
    id: Uuid,
    lease_no: i32,
    /// Stored all or none.
    #[serde(deserialize_with = "crate::api::extract::objects")]
    #[schema(min_items = 1, max_items = 1000)]
    steps: Vec<NewStepBody>,
}

/// The checkpoint of one leased job.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct CheckpointItem {
    id: Uuid,
    lease_no: i32,
    /// Any JSON value up to 1 MiB. It replaces the last checkpoint of the job; null is a value too.
    #[schema(value_type = serde_json::Value)]
    checkpoint: Box<RawValue>,
}

/// The reports of a call.
pub(super) struct Reports {
    pub(super) settle: Vec<SettleItem>,
    pub(super) progress: Vec<ProgressItem>,
    pub(super) steps: Vec<StepsItem>,
    pub(super) checkpoints: Vec<CheckpointItem>,
}

/// Whether a report was stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum ReportResult {
    /// It is stored, by this call or by an earlier one.
    Stored,
    /// Another lease owns the job now, or the job has ended. Nothing changed.
    LeaseLost,
    /// It is invalid, and nothing changed. `message` says why.
    Rejected,
}

/// Whether the end of one attempt was stored.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SettledReport {
    id: Uuid,
    lease_no: i32,
    settled: ReportResult,
    /// Why the report was rejected.
    #[schema(required)]
    message: Option<String>,
}

/// Whether steps, a checkpoint or the progress of one job were stored.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SavedReport {
    id: Uuid,
    lease_no: i32,
    saved: ReportResult,
    /// Why the report was rejected.
    #[schema(required)]
    message: Option<String>,
}

/// The results of the reports of a call, in the order of the request.
#[derive(Default)]
pub(super) struct Stored {
    pub(super) settled: Vec<SettledReport>,
    pub(super) steps: Vec<SavedReport>,
    pub(super) checkpoints: Vec<SavedReport>,
    pub(super) progress: Vec<SavedReport>,
}

impl Reports {
    pub(super) fn is_empty(&self) -> bool {
        self.settle.is_empty()
            && self.progress.is_empty()
            && self.steps.is_empty()
            && self.checkpoints.is_empty()
    }

    /// Refuses lists with too many items.
    pub(super) fn check(&self) -> ApiResult<()> {
        check_count("settle", self.settle.len())?;
        check_count("progress", self.progress.len())?;
        check_count("steps", self.steps.len())?;
        check_count("checkpoints", self.checkpoints.len())
    }

    /// The leases that the reports are about. The worker knows them, even if it does not list them.
    pub(super) fn leases(&self, worker: WorkerId) -> Vec<Lease> {
        let settle = self.settle.iter().map(SettleItem::lease);
        let progress = self.progress.iter().map(ProgressItem::lease);
        let steps = self.steps.iter().map(StepsItem::lease);
        let checkpoints = self.checkpoints.iter().map(CheckpointItem::lease);
        settle.chain(progress).chain(steps).chain(checkpoints).map(|lease| lease.held_by(worker)).collect()
    }

    /// Stores the reports. The ends come last, because a job that has ended has no lease for the others.
    pub(super) async fn store(
        self,
        server: &Server,
        caller: &Caller,
        session: &Session,
        worker: WorkerId,
    ) -> ApiResult<Stored> {
        Ok(Stored {
            steps: save_steps(server, worker, self.steps).await?,
            checkpoints: save_checkpoints(server, worker, self.checkpoints).await?,
            progress: save_progress(server, worker, self.progress).await?,
            settled: settle(server, caller, session, worker, self.settle).await?,
        })
    }
}

impl StepsItem {
    fn lease(&self) -> LeaseRef {
        LeaseRef { id: self.id, lease_no: self.lease_no }
    }
}

impl CheckpointItem {
    fn lease(&self) -> LeaseRef {
        LeaseRef { id: self.id, lease_no: self.lease_no }
    }
}

/// The result of a report. A failure of the server is not one: the worker repeats the call.
fn result_of(stored: ApiResult<Fenced>) -> ApiResult<(ReportResult, Option<String>)> {
    match stored {
        Ok(Fenced::Held) => Ok((ReportResult::Stored, None)),
        Ok(Fenced::LeaseLost) => Ok((ReportResult::LeaseLost, None)),
        Err(problem) if problem.is_servers_fault() => Err(problem),
        Err(problem) => Ok((ReportResult::Rejected, Some(problem.message().to_owned()))),
    }
}

fn saved(lease: LeaseRef, stored: ApiResult<Fenced>) -> ApiResult<SavedReport> {
    let (saved, message) = result_of(stored)?;
    Ok(SavedReport { id: lease.id, lease_no: lease.lease_no, saved, message })
}

async fn save_steps(server: &Server, worker: WorkerId, items: Vec<StepsItem>) -> ApiResult<Vec<SavedReport>> {
    let mut results = Vec::with_capacity(items.len());
    for item in items {
        let lease = item.lease();
        results.push(saved(lease, store_steps(server, lease.held_by(worker), item.steps).await)?);
    }
    Ok(results)
}

async fn save_checkpoints(
    server: &Server,
    worker: WorkerId,
    items: Vec<CheckpointItem>,
) -> ApiResult<Vec<SavedReport>> {
    let values = items.into_iter().map(|item| (item.lease(), item.checkpoint));
    let checked = check_values("checkpoint", values, MAX_PAYLOAD, worker);
    store_values(checked, |valid| async move { Ok(server.client.save_checkpoints(&valid).await?) }).await
}

async fn save_progress(
    server: &Server,
    worker: WorkerId,
    items: Vec<ProgressItem>,
) -> ApiResult<Vec<SavedReport>> {
    let values = items.into_iter().map(ProgressItem::into_value);
    let checked = check_values("progress", values, super::renew::MAX_PROGRESS, worker);
    store_values(checked, |valid| async move { Ok(server.client.progress(&valid).await?) }).await
}

type Value = (Lease, Box<RawValue>);

/// Checks JSON values of leases.
fn check_values(
    field: &'static str,
    values: impl Iterator<Item = (LeaseRef, Box<RawValue>)>,
    limit: usize,
    worker: WorkerId,
) -> Vec<(LeaseRef, ApiResult<Value>)> {
    let check = |(lease, value): (LeaseRef, Box<RawValue>)| {
        let checked = check_json(field, value.get(), limit).map_err(Problem::from);
        (lease, checked.map(|()| (lease.held_by(worker), value)))
    };
    values.map(check).collect()
}

/// Stores the values that are valid, in one commit.
async fn store_values<Storing: Future<Output = ApiResult<Vec<Fenced>>>>(
    checked: Vec<(LeaseRef, ApiResult<Value>)>,
    store: impl FnOnce(Vec<Value>) -> Storing,
) -> ApiResult<Vec<SavedReport>> {
    let valid: Vec<Value> = checked.iter().filter_map(|(_, value)| value.as_ref().ok()).cloned().collect();
    let mut stored = if valid.is_empty() { Vec::new() } else { store(valid).await? }.into_iter();
    let result = |(lease, value): (LeaseRef, ApiResult<Value>)| {
        saved(lease, value.map(|_| stored.next().unwrap_or(Fenced::LeaseLost)))
    };
    checked.into_iter().map(result).collect()
}

async fn settle(
    server: &Server,
    caller: &Caller,
    session: &Session,
    worker: WorkerId,
    items: Vec<SettleItem>,
) -> ApiResult<Vec<SettledReport>> {
    let refs: Vec<LeaseRef> = items.iter().map(SettleItem::lease).collect();
    let (items, rejected): (Vec<_>, Vec<_>) = items
        .into_iter()
        .map(|item| match check_item(&item) {
            Ok(()) => (Some(item), None),
            Err(problem) => (None, Some(problem)),
        })
        .unzip();
    let mut ends = store_ends(server, caller, Some(session), worker, items.into_iter().flatten().collect())
        .await?
        .into_iter();
    let mut results = Vec::with_capacity(refs.len());
    for (LeaseRef { id, lease_no }, rejected) in refs.into_iter().zip(rejected) {
        let stored = match rejected {
            Some(problem) => Err(problem),
            None => ends.next().unwrap_or(Ok(Fenced::LeaseLost)),
        };
        let (settled, message) = result_of(stored)?;
        results.push(SettledReport { id, lease_no, settled, message });
    }
    Ok(results)
}
