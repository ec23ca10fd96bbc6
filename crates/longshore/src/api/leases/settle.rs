//! Settles attempts of HTTP workers.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::exchange::store_each;
use super::sessions::Session;
use super::*;
use crate::api::enqueue::{NewJobBody, validate_job};
use crate::api::extract::{LargeBody, duration, objects};
use crate::api::problem::ProblemBody;
use crate::client::settle::LeaseReport;
use crate::rules::enqueue::{MAX_PAYLOAD, ValidJob, check_json};
use crate::rules::lifecycle::Ending;
use crate::store::{Claimed, Fenced, Scope};

/// The results of attempts.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SettleRequest {
    worker_id: Uuid,
    #[serde(deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    items: Vec<SettleItem>,
}

/// The result of one attempt.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SettleItem {
    id: Uuid,
    lease_no: i32,
    outcome: AttemptOutcome,
    /// What the handler returned. Only for the outcome `succeeded`.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// What went wrong, or why the job was cancelled.
    error: Option<String>,
    /// Retry after exactly this time instead of following the retry policy. Only for
    /// the outcome `failed`.
    #[schema(minimum = 0, maximum = 315360000)]
    retry_after_seconds: Option<f64>,
    /// Do not retry. Only for the outcome `failed`.
    #[serde(default)]
    permanent: bool,
    /// How much later to run the job. Only for the outcome `snoozed`, which needs it.
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// Jobs to enqueue with this success; they exist only if it is stored. Only for the
    /// outcome `succeeded`. Also requires the scope `enqueue`.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    follow_ups: Vec<NewJobBody>,
}

impl SettleItem {
    pub(super) fn lease(&self) -> LeaseRef {
        LeaseRef { id: self.id, lease_no: self.lease_no }
    }
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum AttemptOutcome {
    /// The job is done.
    Succeeded,
    /// The attempt failed and is charged. The job is retried if attempts are left.
    Failed,
    /// The job stopped because it was cancelled.
    Cancelled,
    /// The job runs again later. The attempt is not charged.
    Snoozed,
    /// The job was not completed and is due again at once. The attempt is not charged.
    Released,
    /// The worker did not start the job, for example because no slot became free. The job waits again as
    /// before the lease, and its history gets no entry. If the call is repeated, the result is `lease_lost`.
    NotStarted,
}

/// The result of a settle call.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SettleResponse {
    /// One result per item, in the order of the request.
    items: Vec<SettledItem>,
}

/// Whether one attempt was settled.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SettledItem {
    id: Uuid,
    lease_no: i32,
    settled: SettleResult,
}

/// Whether the outcome of an attempt was stored.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum SettleResult {
    /// The outcome is stored, by this call or by an earlier one.
    Stored,
    /// Another lease owns the job now, or the job has ended. Nothing changed.
    LeaseLost,
}

impl From<Fenced> for SettleResult {
    fn from(fenced: Fenced) -> Self {
        match fenced {
            Fenced::Held => SettleResult::Stored,
            Fenced::LeaseLost => SettleResult::LeaseLost,
        }
    }
}

/// Settles attempts, each independently of the others.
///
/// If the response is lost, repeat the call: an outcome that is already stored counts
/// as `stored`.
#[utoipa::path(
    post,
    path = "/leases/settle",
    operation_id = "settle_leases",
    tag = "leases",
    request_body(content = SettleRequest, example = json!({
        "worker_id": "01990000-0000-7000-8000-000000000000",
        "items": [{
            "id": "01990000-0000-7000-8000-000000000001",
            "lease_no": 1,
            "outcome": "succeeded",
            "result": { "greeted": "Ada" },
        }],
    })),
    responses(
        (status = 200, description = "One result per item, in the order of the request.", body = SettleResponse),
        (status = 422, description = "An item is invalid; nothing was stored.", body = ProblemBody),
    ),
)]
pub(in crate::api) async fn settle(
    State(server): State<Server>,
    caller: Caller,
    LargeBody(body): LargeBody<SettleRequest>,
) -> ApiResult<Json<SettleResponse>> {
    check_count("items", body.items.len())?;
    let worker = WorkerId(body.worker_id);
    check_worker_access(&server, &caller, worker).await?;
    let session = server.sessions.find(worker);
    let refs: Vec<LeaseRef> = body.items.iter().map(SettleItem::lease).collect();
    let reports = prepare(&server, &caller, session.as_deref(), worker, body.items).await?;
    let at = |(i, report): (usize, ApiResult<LeaseReport>)| {
        report.map_err(|problem| problem.at(format_args!("items[{i}]")))
    };
    let reports = reports.into_iter().enumerate().map(at).collect::<ApiResult<_>>()?;
    let stored = store(&server, session.as_deref(), reports).await?;
    let items = refs.into_iter().zip(stored).map(|(LeaseRef { id, lease_no }, fenced)| SettledItem {
        id,
        lease_no,
        settled: fenced.into(),
    });
    Ok(Json(SettleResponse { items: items.collect() }))
}

/// Refuses a result that cannot be stored. In `/leases/settle`, the reason is stored instead of the result, because
/// that call has no place for it.
pub(super) fn check_item(item: &SettleItem) -> ApiResult<()> {
    match &item.result {
        Some(result) => Ok(check_json("result", result.get(), MAX_PAYLOAD)?),
        None => Ok(()),
    }
}

/// Stores the ends of attempts, each independently of the others. An item that is invalid, or that cannot be stored now,
/// has a problem as its result.
pub(super) async fn store_ends(
    server: &Server,
    caller: &Caller,
    session: Option<&Session>,
    worker: WorkerId,
    items: Vec<SettleItem>,
) -> ApiResult<Vec<ApiResult<Fenced>>> {
    let mut results = Vec::with_capacity(items.len());
    let mut valid = Vec::with_capacity(items.len());
    for report in prepare(server, caller, session, worker, items).await? {
        match report {
            Ok(report) => {
                valid.push(report);
                results.push(Ok(Fenced::LeaseLost));
            }
            Err(problem) => results.push(Err(problem)),
        }
    }
    let stored = store_each(valid, |reports| store(server, session, reports)).await?;
    results
        .iter_mut()
        .filter(|result| result.is_ok())
        .zip(stored)
        .for_each(|(result, stored)| *result = stored);
    Ok(results)
}

/// Converts items to reports. Reads the claims only of leases that this server does not keep.
async fn prepare(
    server: &Server,
    caller: &Caller,
    session: Option<&Session>,
    worker: WorkerId,
    items: Vec<SettleItem>,
) -> ApiResult<Vec<ApiResult<LeaseReport>>> {
    let leases: Vec<Lease> = items.iter().map(|item| item.lease().held_by(worker)).collect();
    let mut claims: Vec<Option<Arc<Claimed>>> = leases.iter().map(|lease| session?.granted(lease)).collect();
    let unknown: Vec<usize> = (0..leases.len()).filter(|i| claims[*i].is_none()).collect();
    if !unknown.is_empty() {
        let read: Vec<Lease> = unknown.iter().map(|i| leases[*i]).collect();
        for (i, claimed) in unknown.into_iter().zip(server.client.claims(&read).await?) {
            claims[i] = claimed.map(Arc::new);
        }
    }
    let mut reports = Vec::with_capacity(items.len());
    for ((mut item, lease), claimed) in items.into_iter().zip(leases).zip(claims) {
        let follow_ups = std::mem::take(&mut item.follow_ups);
        let report = match follow_ups_of(server, caller, item.outcome, follow_ups, claimed.as_deref()).await {
            Ok(follow_ups) => ending(item, claimed.as_deref()).map(|ending| LeaseReport {
                lease,
                claimed,
                ending,
                follow_ups,
            }),
            Err(problem) => Err(problem),
        };
        reports.push(report);
    }
    Ok(reports)
}

/// Stores reports. Returns one result per report.
async fn store(
    server: &Server,
    session: Option<&Session>,
    reports: Vec<LeaseReport>,
) -> ApiResult<Vec<Fenced>> {
    if reports.is_empty() {
        return Ok(Vec::new());
    }
    let leases: Vec<Lease> = reports.iter().map(|report| report.lease).collect();
    let stored =
        server.client.settle_claimed(reports, |claimed, kept| note_end(server, claimed, kept)).await?;
    if let Some(session) = session {
        session.forget(leases.iter());
    }
    Ok(stored)
}

/// Converts an item. `claimed` has the retry policy of the job.
fn ending(item: SettleItem, claimed: Option<&Claimed>) -> ApiResult<Ending> {
    let refuse = |misplaced: bool, field: &str, outcome: &str| {
        if misplaced {
            Err(Problem::validation(format!(
                "{field}: only allowed with the outcome `{outcome}`; leave it out"
            )))
        } else {
            Ok(())
        }
    };
    let outcome = item.outcome;
    refuse(item.result.is_some() && outcome != AttemptOutcome::Succeeded, "result", "succeeded")?;
    refuse(item.permanent && outcome != AttemptOutcome::Failed, "permanent", "failed")?;
    refuse(
        item.retry_after_seconds.is_some() && outcome != AttemptOutcome::Failed,
        "retry_after_seconds",
        "failed",
    )?;
    refuse(item.delay_seconds.is_some() && outcome != AttemptOutcome::Snoozed, "delay_seconds", "snoozed")?;
    Ok(match outcome {
        AttemptOutcome::Succeeded => Ending::Succeeded { result: item.result },
        AttemptOutcome::Failed => Ending::Failed {
            error: item.error.unwrap_or_else(|| "the worker reported no error message".into()),
            retry_in: match (item.permanent, item.retry_after_seconds) {
                (true, Some(_)) => {
                    return Err(Problem::validation(
                        "permanent: retry_after_seconds is also set; set only one of the two",
                    ));
                }
                (true, None) => None,
                (false, Some(seconds)) => Some(duration("retry_after_seconds", seconds)?),
                // A lost lease has no claim, and its settle is not stored anyway.
                (false, None) => claimed.and_then(Claimed::backoff),
            },
        },
        AttemptOutcome::Cancelled => Ending::Cancelled { reason: item.error },
        AttemptOutcome::Snoozed => match item.delay_seconds {
            Some(seconds) => Ending::Snoozed { delay: duration("delay_seconds", seconds)? },
            None => {
                return Err(Problem::validation(
                    "delay_seconds: required with the outcome `snoozed`; set how much later to run",
                ));
            }
        },
        AttemptOutcome::Released => Ending::Released,
        // A lost lease has no claim, and its settle is not stored anyway.
        AttemptOutcome::NotStarted => claimed.map_or(Ending::Released, Claimed::not_started),
    })
}

/// Checks the follow-up jobs of an item as any other new job.
async fn follow_ups_of(
    server: &Server,
    caller: &Caller,
    outcome: AttemptOutcome,
    bodies: Vec<NewJobBody>,
    claimed: Option<&Claimed>,
) -> ApiResult<Vec<ValidJob>> {
    if !bodies.is_empty() && outcome != AttemptOutcome::Succeeded {
        return Err(Problem::validation(
            "follow_ups: only allowed with the outcome `succeeded`; leave them out",
        ));
    }
    if !bodies.is_empty() {
        caller.must_have(Scope::Enqueue)?;
    }
    let mut jobs = Vec::with_capacity(bodies.len());
    for body in bodies {
        body.refuse_id()?;
        let job = validate_job(server, caller, body).await?;
        // If the report is repeated, its lease has ended and its jobs are stored. Their queue may be full since then.
        if claimed.is_some() {
            server.limiter.check_depth(&server.client, job.queue()).await?;
        }
        jobs.push(job);
    }
    Ok(jobs)
}
