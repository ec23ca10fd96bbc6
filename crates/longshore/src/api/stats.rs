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
use super::extract::{Query, clamped, refuse_nul};
use super::problem::ApiResult;
use super::schemas::CountSchema;
use crate::job::Outcome;
use crate::store::{Count, Detail, HistoryFilter, Measured, Tallied, What, start_of};

/// The longest time range of a request.
const MAX_MINUTES: i64 = 7 * 24 * 60;
/// The time range of the rate.
pub(crate) const RATE_MINUTES: i64 = 5;

/// Time range and filters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct StatsQuery {
    /// The time range in minutes, clamped to 1 to 10,080 (a week). 60 by default.
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
    /// What happened in each minute, oldest first. Minutes in which nothing happened are left
    /// out. Minutes that are some hours old may be combined into hours.
    series: Vec<MinuteStats>,
    /// How long successful attempts ran, over the whole time range.
    run_seconds: Percentiles,
    /// How long jobs waited since they were due, over the whole time range.
    wait_seconds: Percentiles,
    /// Jobs that ended per second over the last five minutes, whatever the time range.
    per_second: f64,
}

/// One minute: the jobs that ended in it, and what was measured. Workers store what they measure every ten seconds; a
/// process that is killed loses the last of it.
#[derive(Serialize, ToSchema)]
pub(super) struct MinuteStats {
    minute: DateTime<Utc>,
    succeeded: u64,
    failed_permanent: u64,
    cancelled: u64,
    /// Attempts that failed, whether or not the job was tried again.
    failed_attempts: u64,
    /// How long successful attempts ran.
    run_seconds: Percentiles,
    /// How long the jobs that were claimed had waited since they were due.
    wait_seconds: Percentiles,
    /// How many jobs waited; in an hour, the most. Null if no worker looked, and for a `kind`.
    #[schema(required)]
    waiting: Option<u64>,
    /// For how long the oldest waiting job had been due; in an hour, the longest. Null as above.
    #[schema(required)]
    oldest_due_seconds: Option<f64>,
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
    refuse_nul([query.queue.as_deref(), query.kind.as_deref()])?;
    let at = server.client.now().await?;
    let minutes = query.minutes.unwrap_or(60).clamp(1, MAX_MINUTES);
    let since = at - Duration::minutes(minutes);
    let mut counts = server.client.counts().await?;
    let history = HistoryFilter { since, ..history_of(&query) };
    let recent = HistoryFilter { since: at - Duration::minutes(RATE_MINUTES), ..history_of(&query) };
    let mut tallied = server.client.history_of_ends(&history).await?;
    let mut recent = server.client.history_of_ends(&recent).await?;
    let mut measured = server.client.history_of_measures(&history).await?;
    let matches = |filter: &Option<String>, value: &str| filter.as_ref().is_none_or(|filter| filter == value);
    counts.retain(|count| matches(&query.queue, &count.queue) && matches(&query.kind, &count.kind));
    for tallies in [&mut tallied, &mut recent] {
        tallies.retain(|tally| matches(&query.kind, &tally.kind));
    }
    measured.retain(|measure| match measure.what {
        What::Waited | What::Failed => matches(&query.kind, &measure.kind),
        What::Depth | What::Overdue => true,
    });
    let all = Period { tallies: tallied.iter().collect(), measures: measured.iter().collect() };
    Ok(Json(Stats {
        at,
        counts,
        run_seconds: all.run_seconds(),
        wait_seconds: all.wait_seconds(),
        series: series(&tallied, &measured, &query),
        per_second: rate(&recent, at),
    }))
}

/// The part of the history that a query needs, with no more detail than it needs.
fn history_of(query: &StatsQuery) -> HistoryFilter {
    HistoryFilter {
        since: DateTime::UNIX_EPOCH,
        // The depth of all queues together, which has an empty name, says whether a minute was sampled.
        queues: query.queue.clone().map(|queue| vec![queue, String::new()]),
        detail: match (&query.queue, &query.kind) {
            (Some(_), _) => Detail::QueuesAndKinds,
            (None, Some(_)) => Detail::Kinds,
            (None, None) => Detail::Total,
        },
    }
}

/// What happened in one minute, or in the whole time range.
#[derive(Default)]
struct Period<'a> {
    tallies: Vec<&'a Tallied>,
    measures: Vec<&'a Measured>,
}

impl Period<'_> {
    fn ended(&self, outcome: Outcome) -> u64 {
        self.tallies.iter().filter(|tally| tally.outcome == outcome).map(|tally| tally.jobs).sum()
    }

    fn run_seconds(&self) -> Percentiles {
        run_seconds(self.tallies.iter().copied())
    }

    fn measured(&self, what: What) -> impl Iterator<Item = &Measured> {
        self.measures.iter().copied().filter(move |measure| measure.what == what)
    }

    fn failed_attempts(&self) -> u64 {
        self.measured(What::Failed).map(|measure| measure.value).sum()
    }

    fn wait_seconds(&self) -> Percentiles {
        percentiles(self.measured(What::Waited).map(|measure| (measure.up_to_ms, measure.value)))
    }

    /// The depth or age of a queue. A queue that has no value while there is a sum of all queues has no waiting job.
    fn sample(&self, what: What, queue: Option<&str>) -> Option<u64> {
        let of = |queue: &str| self.measured(what).find(|measure| measure.queue == queue);
        let sum = of("")?.value;
        Some(queue.map_or(sum, |queue| of(queue).map_or(0, |measure| measure.value)))
    }
}

/// One entry per minute in which jobs ended or something was measured.
fn series(tallied: &[Tallied], measured: &[Measured], query: &StatsQuery) -> Vec<MinuteStats> {
    let mut minutes: BTreeMap<DateTime<Utc>, Period<'_>> = BTreeMap::new();
    for tally in tallied {
        minutes.entry(tally.minute).or_default().tallies.push(tally);
    }
    for measure in measured {
        minutes.entry(measure.minute).or_default().measures.push(measure);
    }
    let sample = |period: &Period<'_>, what| {
        // There are no samples by kind.
        query.kind.is_none().then(|| period.sample(what, query.queue.as_deref())).flatten()
    };
    let point = |(minute, period): (DateTime<Utc>, Period<'_>)| MinuteStats {
        minute,
        succeeded: period.ended(Outcome::Succeeded),
        failed_permanent: period.ended(Outcome::FailedPermanent),
        cancelled: period.ended(Outcome::Cancelled),
        failed_attempts: period.failed_attempts(),
        run_seconds: period.run_seconds(),
        wait_seconds: period.wait_seconds(),
        waiting: sample(&period, What::Depth),
        oldest_due_seconds: sample(&period, What::Overdue).map(|millis| millis as f64 / 1000.0),
    };
    minutes.into_iter().map(point).collect()
}

/// Jobs that ended per second in the last minutes, from the start of the first of them.
pub(crate) fn rate<'a>(tallied: impl IntoIterator<Item = &'a Tallied>, at: DateTime<Utc>) -> f64 {
    let since = start_of(60, at - Duration::minutes(RATE_MINUTES));
    let ended: u64 = tallied.into_iter().filter(|tally| tally.minute >= since).map(|tally| tally.jobs).sum();
    ended as f64 / (at - since).as_seconds_f64()
}

/// How long the successful attempts of these jobs ran. Jobs that were cancelled while they waited did not run.
pub(crate) fn run_seconds<'a>(tallied: impl Iterator<Item = &'a Tallied>) -> Percentiles {
    let succeeded = tallied.filter(|tally| tally.outcome == Outcome::Succeeded);
    percentiles(succeeded.flat_map(|tally| tally.run_ms.iter().copied()))
}

/// Percentiles of a histogram: upper bounds in milliseconds, and numbers.
pub(crate) fn percentiles(buckets: impl Iterator<Item = (f64, u64)>) -> Percentiles {
    let mut buckets: Vec<(f64, u64)> = buckets.collect();
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
