//! The reports in a lease call: ends of attempts, progress, steps and checkpoints. They are stored before the
//! call claims, each independently of the others: one that is invalid, or whose job another client has locked, does not
//! affect the others.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::renew::ProgressItem;
use super::sessions::Session;
use super::settle::{SettleItem, check_item, store_ends};
use super::steps::{CheckedSteps, NewStepBody, check_new, store_checked};
use super::*;
use crate::rules::enqueue::{MAX_PAYLOAD, check_json};
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
    /// It cannot be stored now, for example because a transaction of another client has locked the job, or because the queue of
    /// a follow-up job is full. The worker still holds the lease: send the report again in a later call. `message` says why.
    Unavailable,
}

/// Whether the end of one attempt was stored.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SettledReport {
    id: Uuid,
    lease_no: i32,
    settled: ReportResult,
    /// Why the report was rejected, or is not stored now.
    #[schema(required)]
    message: Option<String>,
}

/// Whether steps, a checkpoint or the progress of one job were stored.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SavedReport {
    id: Uuid,
    lease_no: i32,
    saved: ReportResult,
    /// Why the report was rejected, or is not stored now.
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
        let steps = save_steps(server, worker, self.steps).await?;
        let checkpoints = save_checkpoints(server, worker, self.checkpoints).await?;
        let progress = save_progress(server, worker, self.progress).await?;
        let reports = steps.iter().chain(&checkpoints).chain(&progress);
        let unsaved = reports.filter(|report| report.saved == ReportResult::Unavailable);
        let unsaved: HashSet<(Uuid, i32)> = unsaved.map(|report| (report.id, report.lease_no)).collect();
        let settled = settle(server, caller, session, worker, self.settle, &unsaved).await?;
        Ok(Stored { settled, steps, checkpoints, progress })
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
        Err(problem) if problem.is_partial() => {
            problem.log_part();
            Ok((ReportResult::Unavailable, Some(problem.message().to_owned())))
        }
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
    let mut batch = Vec::new();
    for item in items {
        let lease = item.lease();
        // Steps of one job are checked against those that are stored before.
        if batch.iter().any(|checked: &CheckedSteps| checked.lease.id.0 == lease.id) {
            store_batch(server, std::mem::take(&mut batch), &mut results).await?;
        }
        let checked = check_new(server, lease.held_by(worker), item.steps).await;
        results.push((lease, checked.as_ref().map(|_| Fenced::LeaseLost).map_err(Problem::clone)));
        batch.extend(checked.ok().flatten());
    }
    store_batch(server, batch, &mut results).await?;
    results.into_iter().map(|(lease, stored)| saved(lease, stored)).collect()
}

/// Stores the checked steps of jobs in one commit, and their results.
async fn store_batch(
    server: &Server,
    batch: Vec<CheckedSteps>,
    results: &mut [(LeaseRef, ApiResult<Fenced>)],
) -> ApiResult<()> {
    let leases: Vec<Lease> = batch.iter().map(|checked| checked.lease).collect();
    let stored = store_each(batch, |batch| store_checked(server, batch)).await?;
    for (lease, stored) in leases.into_iter().zip(stored) {
        // The last item of the lease: earlier ones belong to earlier batches.
        let own = results.iter_mut().rfind(|(own, _)| own.id == lease.id.0 && own.lease_no == lease.lease_no);
        own.into_iter().for_each(|(_, result)| *result = stored.clone());
    }
    Ok(())
}

/// How long reports that cannot be stored together are stored one by one. The others are stored by a later call.
const MAX_TIME_ONE_BY_ONE: Duration = Duration::from_secs(8);

/// Stores reports in one commit. If one of them cannot be stored, stores each of them alone.
pub(super) async fn store_each<T: Clone, R, Storing: Future<Output = ApiResult<Vec<R>>>>(
    items: Vec<T>,
    store: impl Fn(Vec<T>) -> Storing,
) -> ApiResult<Vec<ApiResult<R>>> {
    if items.is_empty() {
        return Ok(Vec::new());
    }
    let refused = match store(items.clone()).await {
        Ok(stored) => return Ok(stored.into_iter().map(Ok).collect()),
        Err(problem) if problem.is_partial() => problem,
        Err(problem) => return Err(problem),
    };
    if items.len() == 1 {
        return Ok(vec![Err(refused)]);
    }
    let until = Instant::now() + MAX_TIME_ONE_BY_ONE;
    let mut results = Vec::with_capacity(items.len());
    for item in items {
        if Instant::now() >= until {
            results.push(Err(refused.clone()));
            continue;
        }
        match store(vec![item]).await {
            Ok(stored) => results.extend(stored.into_iter().map(Ok)),
            Err(problem) if problem.is_partial() => results.push(Err(problem)),
            Err(problem) => return Err(problem),
        }
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
    store: impl Fn(Vec<Value>) -> Storing,
) -> ApiResult<Vec<SavedReport>> {
    let valid: Vec<Value> = checked.iter().filter_map(|(_, value)| value.as_ref().ok()).cloned().collect();
    let mut stored = store_each(valid, store).await?.into_iter();
    let result = |(lease, value): (LeaseRef, ApiResult<Value>)| {
        saved(lease, value.and_then(|_| stored.next().unwrap_or(Ok(Fenced::LeaseLost))))
    };
    checked.into_iter().map(result).collect()
}

/// Stores the ends of attempts. `unsaved` are the leases of which another report cannot be stored now.
async fn settle(
    server: &Server,
    caller: &Caller,
    session: &Session,
    worker: WorkerId,
    items: Vec<SettleItem>,
    unsaved: &HashSet<(Uuid, i32)>,
) -> ApiResult<Vec<SettledReport>> {
    let refs: Vec<LeaseRef> = items.iter().map(SettleItem::lease).collect();
    let check = |item: &SettleItem| {
        let LeaseRef { id, lease_no } = item.lease();
        match unsaved.contains(&(id, lease_no)) {
            // Its job is locked. The next attempt would also repeat the steps that are not stored.
            true => Err(Problem::new(
                Slug::Unavailable,
                "another report about this job is not stored yet; send it again together with this one",
            )),
            false => check_item(item),
        }
    };
    let (items, rejected): (Vec<_>, Vec<_>) = items
        .into_iter()
        .map(|item| match check(&item) {
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
