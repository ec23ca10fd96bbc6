//! A worker says how attempts ended.

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

/// How attempts ended.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SettleRequest {
    worker_id: Uuid,
    #[serde(deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    items: Vec<SettleItem>,
}

/// How one attempt ended.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::api) struct SettleItem {
    id: Uuid,
    lease_no: i32,
    outcome: AttemptOutcome,
    /// What the handler returned, if it succeeded.
    #[schema(value_type = Option<serde_json::Value>)]
    result: Option<Box<RawValue>>,
    /// What went wrong, or why it was cancelled.
    error: Option<String>,
    /// After a failure: exactly this long instead of what the job's policy says.
    #[schema(minimum = 0, maximum = 315360000)]
    retry_after_seconds: Option<f64>,
    /// After a failure: never again.
    #[serde(default)]
    permanent: bool,
    /// When snoozed: how much later.
    #[schema(minimum = 0, maximum = 315360000)]
    delay_seconds: Option<f64>,
    /// Jobs that exist only if this success is stored. Takes the scope `enqueue` as
    /// well.
    #[serde(default, deserialize_with = "objects")]
    #[schema(max_items = 1000)]
    follow_ups: Vec<NewJobBody>,
}

/// How an attempt ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum AttemptOutcome {
    /// Done.
    Succeeded,
    /// Charged; tried again by the job's policy.
    Failed,
    /// Ended by request.
    Cancelled,
    /// Run later; not charged.
    Snoozed,
    /// Given back unfinished; not charged, due at once.
    Released,
}

/// What became of each.
#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SettleResponse {
    /// In the order given.
    items: Vec<SettledItem>,
}

#[derive(Serialize, ToSchema)]
pub(in crate::api) struct SettledItem {
    id: Uuid,
    lease_no: i32,
    settled: SettleResult,
}

/// Whether an end was stored.
#[derive(Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(in crate::api) enum SettleResult {
    /// It is in the database, now or since an earlier try.
    Stored,
    /// Somebody else owns the job now, or it has ended; nothing changed.
    LeaseLost,
}

/// Ends attempts, each answered by itself. May be repeated when an answer was
/// lost.
#[utoipa::path(
    post,
    path = "/leases/settle",
    tag = "leases",
    request_body = SettleRequest,
    responses(
        (status = 200, description = "What became of each, in the order given.", body = SettleResponse),
        (status = 422, description = "An item that cannot be; nothing was stored.", body = ProblemBody),
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
    let names: Vec<LeaseRef> =
        body.items.iter().map(|item| LeaseRef { id: item.id, lease_no: item.lease_no }).collect();
    let leases: Vec<Lease> = names.iter().map(|name| name.of(worker)).collect();
    let claims = server.client.claims(&leases).await?;
    let mut reports = Vec::with_capacity(leases.len());
    for (i, ((mut item, lease), claimed)) in body.items.into_iter().zip(leases).zip(claims).enumerate() {
        let wrong = |problem: Problem| problem.at(format_args!("items[{i}]"));
        let follow_ups = follow_ups(&server, &caller, item.outcome, std::mem::take(&mut item.follow_ups))
            .await
            .map_err(wrong)?;
        reports.push((lease, ending(item, claimed.as_ref()).map_err(wrong)?, follow_ups));
    }
    let stored = server.client.settle_leases(reports).await?;
    let items = names.into_iter().zip(stored).map(|(LeaseRef { id, lease_no }, fenced)| SettledItem {
        id,
        lease_no,
        settled: match fenced {
            Fenced::Held => SettleResult::Stored,
            Fenced::LeaseLost => SettleResult::LeaseLost,
        },
    });
    Ok(Json(SettleResponse { items: items.collect() }))
}

fn ending(item: SettleItem, claimed: Option<&Claimed>) -> ApiResult<Ending> {
    let only = |given: bool, field: &str, with: &str| {
        if given {
            Err(Problem::validation(format!("{field}: is for the outcome {with}; leave it out")))
        } else {
            Ok(())
        }
    };
    let outcome = item.outcome;
    only(item.result.is_some() && outcome != AttemptOutcome::Succeeded, "result", "succeeded")?;
    only(item.permanent && outcome != AttemptOutcome::Failed, "permanent", "failed")?;
    only(
        item.retry_after_seconds.is_some() && outcome != AttemptOutcome::Failed,
        "retry_after_seconds",
        "failed",
    )?;
    only(item.delay_seconds.is_some() && outcome != AttemptOutcome::Snoozed, "delay_seconds", "snoozed")?;
    Ok(match outcome {
        AttemptOutcome::Succeeded => Ending::Succeeded { result: item.result },
        AttemptOutcome::Failed => Ending::Failed {
            error: item.error.unwrap_or_else(|| "the worker named no error".into()),
            retry_in: match (item.permanent, item.retry_after_seconds) {
                (true, Some(_)) => {
                    return Err(Problem::validation(
                        "permanent: retry_after_seconds is given as well; give one of the two",
                    ));
                }
                (true, None) => None,
                (false, Some(seconds)) => Some(duration("retry_after_seconds", seconds)?),
                // A lease that is lost has no policy, and needs none.
                (false, None) => claimed.and_then(Claimed::backoff),
            },
        },
        AttemptOutcome::Cancelled => Ending::Cancelled { reason: item.error },
        AttemptOutcome::Snoozed => match item.delay_seconds {
            Some(seconds) => Ending::Snoozed { delay: duration("delay_seconds", seconds)? },
            None => {
                return Err(Problem::validation("delay_seconds: is needed when snoozed; say how much later"));
            }
        },
        AttemptOutcome::Released => Ending::Released,
    })
}

async fn follow_ups(
    server: &Server,
    caller: &Caller,
    outcome: AttemptOutcome,
    bodies: Vec<NewJobBody>,
) -> ApiResult<Vec<ValidJob>> {
    if !bodies.is_empty() && outcome != AttemptOutcome::Succeeded {
        return Err(Problem::validation("follow_ups: are for the outcome succeeded; leave them out"));
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
