//! Counts, rates and latencies, without counting jobs one by one.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Duration, Utc};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use super::Server;
use super::auth::Caller;
use super::extract::Query;
use super::problem::ApiResult;
use super::schemas::CountSchema;
use crate::job::Outcome;
use crate::store::{Count, Tallied};

/// How far back one may ask.
const MAX_MINUTES: i64 = 24 * 60;
/// How far back the rate looks.
const RATE_MINUTES: i64 = 5;

/// How far back, and of what.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StatsQuery {
    /// How many minutes to look back, 1 to 1,440; others are clamped. 60 by
    /// default.
    minutes: Option<i64>,
    /// Of this queue only.
    queue: Option<String>,
    /// Of this kind only.
    kind: Option<String>,
}

/// How the queue does.
#[derive(Serialize, ToSchema)]
pub(super) struct Stats {
    /// By the database's clock.
    at: DateTime<Utc>,
    /// How many jobs are in each status, by queue and kind.
    #[schema(value_type = Vec<CountSchema>)]
    counts: Vec<Count>,
    /// How many ended in each minute, oldest first; minutes without any are left
    /// out. What is older than some hours may be by the hour.
    series: Vec<MinuteStats>,
    /// How long attempts ran, over all minutes.
    run_seconds: Percentiles,
    /// Jobs that ended in a second, over the last five minutes, however many
    /// minutes were asked for.
    per_second: f64,
}

/// One minute.
#[derive(Serialize, ToSchema)]
pub(super) struct MinuteStats {
    minute: DateTime<Utc>,
    succeeded: u64,
    failed_permanent: u64,
    cancelled: u64,
    /// How long successes ran.
    run_seconds: Percentiles,
}

/// Half, nearly all, all but one in a hundred; null where there was none. Within a
/// fifth of the true value.
#[derive(Default, Serialize, ToSchema)]
pub(super) struct Percentiles {
    #[schema(required)]
    p50: Option<f64>,
    #[schema(required)]
    p95: Option<f64>,
    #[schema(required)]
    p99: Option<f64>,
}

/// Counts, rates and latencies.
#[utoipa::path(
    get,
    path = "/stats",
    tag = "monitoring",
    params(StatsQuery),
    responses((status = 200, description = "How the queue does.", body = Stats)),
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
    let wanted = |filter: &Option<String>, value: &str| filter.as_ref().is_none_or(|filter| filter == value);
    counts.retain(|count| wanted(&query.queue, &count.queue) && wanted(&query.kind, &count.kind));
    for tallies in [&mut tallied, &mut recent] {
        tallies.retain(|tally| wanted(&query.queue, &tally.queue) && wanted(&query.kind, &tally.kind));
    }
    Ok(Json(Stats {
        at,
        counts,
        series: series(&tallied),
        run_seconds: percentiles(tallied.iter()),
        per_second: rate(&recent, at),
    }))
}

fn series(tallied: &[Tallied]) -> Vec<MinuteStats> {
    let mut minutes: BTreeMap<DateTime<Utc>, Vec<&Tallied>> = BTreeMap::new();
    for tally in tallied {
        minutes.entry(tally.minute).or_default().push(tally);
    }
    let point = |(minute, tallies): (DateTime<Utc>, Vec<&Tallied>)| {
        let of = |outcome: Outcome| {
            tallies.iter().filter(|tally| tally.outcome == outcome).map(|tally| tally.jobs).sum()
        };
        let successes = tallies.iter().copied().filter(|tally| tally.outcome == Outcome::Succeeded);
        MinuteStats {
            minute,
            succeeded: of(Outcome::Succeeded),
            failed_permanent: of(Outcome::FailedPermanent),
            cancelled: of(Outcome::Cancelled),
            run_seconds: percentiles(successes),
        }
    };
    minutes.into_iter().map(point).collect()
}

fn rate(tallied: &[Tallied], at: DateTime<Utc>) -> f64 {
    let since = at - Duration::minutes(RATE_MINUTES);
    let ended: u64 = tallied.iter().filter(|tally| tally.minute >= since).map(|tally| tally.jobs).sum();
    ended as f64 / (RATE_MINUTES * 60) as f64
}

fn percentiles<'a>(tallied: impl Iterator<Item = &'a Tallied>) -> Percentiles {
    let mut buckets: Vec<(f64, u64)> = tallied.flat_map(|tally| tally.run_ms.iter().copied()).collect();
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    let total: u64 = buckets.iter().map(|(_, jobs)| jobs).sum();
    let at = |share: f64| {
        let wanted = (total as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        buckets.iter().find_map(|(bound, jobs)| {
            seen += jobs;
            (seen >= wanted).then_some(bound / 1000.0)
        })
    };
    Percentiles { p50: at(0.5), p95: at(0.95), p99: at(0.99) }
}
