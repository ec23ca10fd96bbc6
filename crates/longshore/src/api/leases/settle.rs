//! Settles attempts of HTTP workers.

use axum::Json;
use axum::extract::State;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;
use uuid::Uuid;

use super::*;
use crate::api::enqueue::{NewJobBody, validate_job};
use crate::api::extract::{Body, duration, objects};
use crate::api::problem::ProblemBody;
use crate::enqueue::ValidJob;
use crate::lifecycle::Ending;
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
    Body(body): Body<SettleRequest>,
) -> ApiResult<Json<SettleResponse>> {
    check_count("items", body.items.len())?;
    let worker = WorkerId(body.worker_id);
    check_worker_access(&server, &caller, worker).await?;
    let refs: Vec<LeaseRef> =
        body.items.iter().map(|item| LeaseRef { id: item.id, lease_no: item.lease_no }).collect();
    let leases: Vec<Lease> = refs.iter().map(|lease| lease.held_by(worker)).collect();
    let claims = server.client.claims(&leases).await?;
    let mut reports = Vec::with_capacity(leases.len());
    for (i, ((mut item, lease), claimed)) in body.items.into_iter().zip(leases).zip(claims).enumerate() {
        let in_item = |problem: Problem| problem.at(format_args!("items[{i}]"));
        let follow_ups = follow_ups(&server, &caller, item.outcome, std::mem::take(&mut item.follow_ups))
            .await
            .map_err(in_item)?;
        reports.push((lease, ending(item, claimed.as_ref()).map_err(in_item)?, follow_ups));
    }
    let stored = server.client.settle_leases_with(reports, count_http_attempt).await?;
    let items = refs.into_iter().zip(stored).map(|(LeaseRef { id, lease_no }, fenced)| SettledItem {
        id,
        lease_no,
        settled: fenced.into(),
    });
    Ok(Json(SettleResponse { items: items.collect() }))
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
    })
}

/// Checks the follow-up jobs of an item as any other new job.
async fn follow_ups(
    server: &Server,
    caller: &Caller,
    outcome: AttemptOutcome,
    bodies: Vec<NewJobBody>,
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
        let job = validate_job(server, caller, body).await?;
        server.limiter.check_depth(&server.client, job.queue()).await?;
        jobs.push(job);
    }
    Ok(jobs)
}
