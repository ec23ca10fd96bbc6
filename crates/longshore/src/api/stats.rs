//! Statistics: counts, rates and run times. They come from tallies, so no request
//! counts jobs one by one.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Duration, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Server;
use super::auth::Caller;
use super::extract::{Query, clamped};
use super::problem::ApiResult;
use super::schemas::CountSchema;
use crate::job::Outcome;
use crate::store::{Count, Tallied};

/// The longest time range of a request.
const MAX_MINUTES: i64 = 24 * 60;
/// The time range of the rate.
pub(crate) const RATE_MINUTES: i64 = 5;

/// Time range and filters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StatsQuery {
    /// The time range in minutes, clamped to 1 to 1,440. 60 by default.
    #[param(inline, value_type = Option<super::schemas::AnyInteger>)]
    #[serde(default, deserialize_with = "clamped")]
    minutes: Option<i64>,
    /// Only jobs of this queue.
    queue: Option<String>,
    /// Only jobs of this kind.
    kind: Option<String>,
}

/// Counts, rates and run times.
#[derive(Serialize, ToSchema)]
pub(super) struct Stats {
    /// The time of the statistics, by the database's clock.
    at: DateTime<Utc>,
    /// The number of jobs by status, queue and kind.
    #[schema(value_type = Vec<CountSchema>)]
    counts: Vec<Count>,
    /// The jobs that ended in each minute, oldest first. Minutes without any are left
    /// out. Minutes that are some hours old may be combined into hours.
    series: Vec<MinuteStats>,
    /// How long attempts ran, over the whole time range.
    run_seconds: Percentiles,
    /// Jobs that ended per second over the last five minutes, whatever the time range.
    per_second: f64,
}

/// The jobs that ended in one minute.
#[derive(Serialize, ToSchema)]
pub(super) struct MinuteStats {
    minute: DateTime<Utc>,
    succeeded: u64,
    failed_permanent: u64,
    cancelled: u64,
    /// How long successful attempts ran.
    run_seconds: Percentiles,
}

/// Percentiles, within 20 % of the true value; null if there was no attempt.
#[derive(Default, Serialize, ToSchema)]
pub(crate) struct Percentiles {
    #[schema(required)]
    pub(crate) p50: Option<f64>,
    #[schema(required)]
    pub(crate) p95: Option<f64>,
    #[schema(required)]
    pub(crate) p99: Option<f64>,
}

/// Returns counts, rates and run times.
#[utoipa::path(
    get,
    path = "/stats",
    operation_id = "get_stats",
    tag = "monitoring",
    params(StatsQuery),
    responses((status = 200, description = "The statistics.", body = Stats)),
)]
pub(super) async fn stats(
    State(server): State<Server>,
    caller: Caller,
    Query(query): Query<StatsQuery>,
) -> ApiResult<Json<Stats>> {
    caller.may_use_queue_or_all(query.queue.as_deref())?;
    let at = server.client.now().await?;
    let minutes = query.minutes.unwrap_or(60).clamp(1, MAX_MINUTES);
    let mut counts = server.client.counts().await?;
    let mut tallied = server.client.tallied(at - Duration::minutes(minutes)).await?;
    let mut recent = server.client.tallied(at - Duration::minutes(RATE_MINUTES)).await?;
    let matches = |filter: &Option<String>, value: &str| filter.as_ref().is_none_or(|filter| filter == value);
    counts.retain(|count| matches(&query.queue, &count.queue) && matches(&query.kind, &count.kind));
    for tallies in [&mut tallied, &mut recent] {
        tallies.retain(|tally| matches(&query.queue, &tally.queue) && matches(&query.kind, &tally.kind));
    }
    Ok(Json(Stats {
        at,
        counts,
        series: series(&tallied),
        run_seconds: percentiles(tallied.iter()),
        per_second: rate(&recent, at),
    }))
}

/// One entry per minute in which jobs ended.
fn series(tallied: &[Tallied]) -> Vec<MinuteStats> {
    let mut minutes: BTreeMap<DateTime<Utc>, Vec<&Tallied>> = BTreeMap::new();
    for tally in tallied {
        minutes.entry(tally.minute).or_default().push(tally);
    }
    let point = |(minute, tallies): (DateTime<Utc>, Vec<&Tallied>)| {
        let count = |outcome: Outcome| {
            tallies.iter().filter(|tally| tally.outcome == outcome).map(|tally| tally.jobs).sum()
        };
        let successes = tallies.iter().copied().filter(|tally| tally.outcome == Outcome::Succeeded);
        MinuteStats {
            minute,
            succeeded: count(Outcome::Succeeded),
            failed_permanent: count(Outcome::FailedPermanent),
            cancelled: count(Outcome::Cancelled),
            run_seconds: percentiles(successes),
        }
    };
    minutes.into_iter().map(point).collect()
}

/// Jobs that ended per second.
pub(crate) fn rate(tallied: &[Tallied], at: DateTime<Utc>) -> f64 {
    let since = at - Duration::minutes(RATE_MINUTES);
    let ended: u64 = tallied.iter().filter(|tally| tally.minute >= since).map(|tally| tally.jobs).sum();
    ended as f64 / (RATE_MINUTES * 60) as f64
}

pub(crate) fn percentiles<'a>(tallied: impl Iterator<Item = &'a Tallied>) -> Percentiles {
    let mut buckets: Vec<(f64, u64)> = tallied.flat_map(|tally| tally.run_ms.iter().copied()).collect();
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    let total: u64 = buckets.iter().map(|(_, jobs)| jobs).sum();
    let at = |share: f64| {
        let rank = (total as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        buckets.iter().find_map(|(bound, jobs)| {
            seen += jobs;
            (seen >= rank).then_some(bound / 1000.0)
        })
    };
    Percentiles { p50: at(0.5), p95: at(0.95), p99: at(0.99) }
}
