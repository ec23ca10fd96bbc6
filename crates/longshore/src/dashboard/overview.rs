//! The first page: what runs, what failed, how fast, and what needs attention.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use chrono::{DateTime, TimeDelta, Utc};
use maud::{Markup, html};

use super::attention::{self, Situation};
use super::chart::{self, Bucket, Chart, Look, Series};
use super::jobs::first_curl;
use super::layout::Section;
use super::url::Params;
use super::widgets::{empty, figure, heading, segments, snippet};
use super::{Frame, View, format};
use crate::api::problem::ApiResult;
use crate::api::stats;
use crate::job::{Outcome, Status};
use crate::store::{
    Count, Detail, HistoryFilter, Measured, QueueRecord, Schedule, Tallied, What, WorkerRecord, start_of,
};

/// A time range of the charts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Range {
    Hour,
    Day,
    Week,
}

impl Range {
    pub(super) const ALL: [Range; 3] = [Range::Hour, Range::Day, Range::Week];

    /// The range that the URL names.
    pub(super) fn of(frame: &Frame) -> Self {
        let named = frame.params.get("range");
        Range::ALL.into_iter().find(|range| named == Some(range.name())).unwrap_or(Range::Hour)
    }

    /// The URL of another page, with this range.
    pub(super) fn keep(self, page: &str) -> String {
        match self {
            Range::Hour => page.to_owned(),
            range => Params::default().with("range", range.name()).url(page),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Range::Hour => "hour",
            Range::Day => "day",
            Range::Week => "week",
        }
    }

    /// The length of a bucket in seconds. Older tallies are kept per hour, so a bucket of a longer
    /// range has whole hours.
    fn seconds(self) -> i64 {
        match self {
            Range::Hour => 60,
            Range::Day => 3_600,
            Range::Week => 3 * 3_600,
        }
    }

    fn buckets(self) -> i64 {
        match self {
            Range::Hour => 60,
            Range::Day => 24,
            Range::Week => 56,
        }
    }

    fn width(self) -> TimeDelta {
        TimeDelta::seconds(self.seconds())
    }

    /// The start of the first bucket.
    pub(super) fn start(self, now: DateTime<Utc>) -> DateTime<Utc> {
        start_of(self.seconds(), now) - self.width() * (self.buckets() as i32 - 1)
    }

    /// Links to the same page with each range.
    pub(super) fn links(self, frame: &Frame) -> Markup {
        let name = |range: Range| match range {
            Range::Hour => "Hour",
            Range::Day => "Day",
            Range::Week => "Week",
        };
        let link = |range: Range| {
            (name(range), frame.here(&frame.params.with("range", range.name())), range == self)
        };
        segments("Time range", Range::ALL.into_iter().map(link))
    }
}

/// What the page shows.
struct Overview {
    range: Range,
    counts: Vec<Count>,
    /// What ended in the range.
    tallied: Arc<Vec<Tallied>>,
    /// What was measured in the range.
    measured: Arc<Vec<Measured>>,
    /// What ended in the last hour, by kind.
    last_hour: Arc<Vec<Tallied>>,
    per_second: f64,
    overdue: Vec<(String, Duration)>,
    queues: Vec<QueueRecord>,
    workers: Option<Arc<Vec<WorkerRecord>>>,
    schedules: Arc<Vec<Schedule>>,
}

pub(super) async fn page(view: View) -> ApiResult<Response> {
    let overview = load(&view).await?;
    Ok(view.respond(Section::Overview, "Overview", render(&view.frame, &overview)))
}

async fn load(view: &View) -> ApiResult<Overview> {
    let (frame, data) = (&view.frame, &view.data);
    let (range, rights) = (Range::of(frame), &frame.rights);
    let hour_ago = start_of(60, frame.now) - TimeDelta::minutes(59);
    let history = |since, detail| HistoryFilter { since, queues: rights.queues.clone(), detail };
    let of_range = history(range.start(frame.now), Detail::Total);
    let of_last_hour = history(hour_ago, Detail::Kinds);
    let measures = match &rights.queues {
        None => of_range.clone(),
        // A queue without waiting jobs has no sample. The sum of all queues says that there was one.
        Some(queues) => HistoryFilter {
            queues: Some(queues.iter().cloned().chain([String::new()]).collect()),
            ..history(range.start(frame.now), Detail::Queues)
        },
    };
    let (counts, tallied, measured, last_hour, overdue, queues) = tokio::try_join!(
        data.counts(),
        data.tallied(&of_range),
        data.measured(&measures),
        data.tallied(&of_last_hour),
        data.overdue(),
        data.queues(),
    )?;
    // Workers and schedules are shown only to those who may see all queues.
    let (workers, schedules) = if rights.covers_all() {
        let (workers, schedules) = tokio::try_join!(data.workers(), data.schedules())?;
        (Some(workers), schedules)
    } else {
        (None, Arc::default())
    };
    Ok(Overview {
        range,
        counts: counts.iter().filter(|count| rights.covers(&count.queue)).cloned().collect(),
        tallied,
        measured,
        per_second: stats::rate(last_hour.iter(), frame.now),
        last_hour,
        overdue: overdue.iter().filter(|(queue, _)| rights.covers(queue)).cloned().collect(),
        queues: queues.iter().filter(|queue| rights.covers(&queue.name)).cloned().collect(),
        workers,
        schedules,
    })
}

fn render(frame: &Frame, overview: &Overview) -> Markup {
    let situation = Situation {
        counts: &overview.counts,
        overdue: &overview.overdue,
        queues: &overview.queues,
        workers: overview.workers.as_ref().map(|workers| workers.as_slice()),
        schedules: &overview.schedules,
        tallied: &overview.last_hour,
    };
    html! {
        (heading("Overview", "", overview.range.links(frame)))
        @if overview.counts.is_empty() && overview.tallied.is_empty() { (welcome(frame)) } @else {
            (figures(frame, overview))
            (attention::render(frame, &situation))
            div .charts {
                (throughput(frame, overview)) (failures(frame, overview)) (run_times(frame, overview))
                (waits(frame, overview)) (depth(frame, overview)) (oldest_due(frame, overview))
            }
        }
    }
}

fn welcome(frame: &Frame) -> Markup {
    empty(
        "This queue is empty",
        html! {
            p { "Enqueue a first job with any HTTP client:" }
            (snippet(&first_curl(frame)))
            p { "A worker runs it: " code { "longshore worker" } ", or a program of yours. "
                "Then this page shows how many jobs run and fail, and how long they take." }
        },
    )
}

fn figures(frame: &Frame, overview: &Overview) -> Markup {
    let jobs = |statuses: &[Status]| {
        let matching = overview.counts.iter().filter(|count| statuses.contains(&count.status));
        matching.fold((0, false), |(sum, estimated), count| (sum + count.jobs, estimated || count.estimated))
    };
    let link = |status: Status, (jobs, estimated): (u64, bool)| {
        let url = Params::default().with("status", status.as_str()).url(&frame.url("/ui/jobs"));
        html! { a .quiet href=(url) { @if estimated { "~" } (format::number(jobs)) } }
    };
    let oldest = overview.overdue.iter().map(|(_, age)| *age).max();
    let oldest = oldest.map(|age| format!("oldest due for {}", format::duration(age)));
    let slots = overview.workers.as_ref().map(|workers| {
        let live = workers.iter().filter(|worker| worker.dead_at.is_none() && !worker.stale);
        let live: Vec<_> =
            live.filter(|worker| worker.kinds.as_ref().is_none_or(|kinds| !kinds.is_empty())).collect();
        let slots: u64 = live.iter().map(|worker| u64::from(worker.concurrency)).sum();
        format!(
            "{} in {}",
            format::counted(slots, "slot", "slots"),
            format::counted(live.len() as u64, "worker", "workers")
        )
    });
    let run = stats::run_seconds(overview.tallied.iter());
    let percentile = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), format::seconds);
    html! {
        dl #figures .figures {
            (figure("Waiting", link(Status::Queued, jobs(&[Status::Queued])), oldest.unwrap_or_default()))
            (figure("Running", link(Status::Running, jobs(&[Status::Running])), slots.unwrap_or_default()))
            (figure("Retrying", link(Status::Retrying, jobs(&[Status::Retrying])), "failed, will run again"))
            (figure("Failed", link(Status::FailedPermanent, jobs(&[Status::FailedPermanent])), "kept, can be retried"))
            (figure("Per second", per_second(overview.per_second), "ended, last 5 minutes"))
            (figure("Median run time", percentile(run.p50), format!("95 % within {}", percentile(run.p95))))
        }
    }
}

fn per_second(rate: f64) -> String {
    if rate >= 100.0 { format::number(rate as u64) } else { format!("{rate:.1}") }
}

// ---- charts ----------------------------------------------------------------

/// What belongs to a minute.
trait Timed {
    fn minute(&self) -> DateTime<Utc>;
}

impl Timed for Tallied {
    fn minute(&self) -> DateTime<Utc> {
        self.minute
    }
}

impl Timed for Measured {
    fn minute(&self) -> DateTime<Utc> {
        self.minute
    }
}

/// The start of a bucket, and its values.
type Period<'v, T> = (DateTime<Utc>, Vec<&'v T>);

/// The values of each bucket of a range.
fn buckets<T: Timed>(range: Range, now: DateTime<Utc>, values: &[T]) -> Vec<Period<'_, T>> {
    let start = range.start(now);
    let mut buckets: Vec<Period<'_, T>> =
        (0..range.buckets()).map(|i| (start + range.width() * i as i32, Vec::new())).collect();
    for value in values {
        let i = (value.minute() - start).num_seconds().div_euclid(range.seconds());
        if let Some((_, of_bucket)) = usize::try_from(i).ok().and_then(|i| buckets.get_mut(i)) {
            of_bucket.push(value);
        }
    }
    buckets
}

/// The list of the jobs that ended in a bucket.
fn ended_in(frame: &Frame, from: DateTime<Utc>, range: Range, status: Option<Status>) -> String {
    let params = Params::default()
        .with("ended_after", format::machine(from))
        .with("ended_before", format::machine(from + range.width()));
    let params = match status {
        Some(status) => params.with("status", status.as_str()),
        None => params,
    };
    params.url(&frame.url("/ui/jobs"))
}

fn count(tallied: &[&Tallied], outcome: Outcome) -> Option<f64> {
    let jobs: u64 = tallied.iter().filter(|tally| tally.outcome == outcome).map(|tally| tally.jobs).sum();
    (jobs > 0).then_some(jobs as f64)
}

fn throughput(frame: &Frame, overview: &Overview) -> Markup {
    let bucket = |(from, tallied): (DateTime<Utc>, Vec<&Tallied>)| Bucket {
        from,
        href: (!tallied.is_empty()).then(|| ended_in(frame, from, overview.range, None)),
        values: vec![
            count(&tallied, Outcome::Succeeded),
            count(&tallied, Outcome::Cancelled),
            count(&tallied, Outcome::FailedPermanent),
        ],
    };
    let series = [
        Series { name: "succeeded", class: "c-succeeded" },
        Series { name: "cancelled", class: "c-cancelled" },
        Series { name: "failed", class: "c-failed" },
    ];
    let buckets: Vec<Bucket> =
        buckets(overview.range, frame.now, &overview.tallied).into_iter().map(bucket).collect();
    show(overview.range, "throughput", "Jobs that ended", &series, &buckets, Unit::Jobs, Look::StackedBars)
}

/// Attempts that failed. A failed job had failed attempts, so the two are not added.
fn failures(frame: &Frame, overview: &Overview) -> Markup {
    let measured = buckets(overview.range, frame.now, &overview.measured);
    let bucket = |((from, tallied), (_, measured)): (Period<'_, Tallied>, Period<'_, Measured>)| {
        let failed = count(&tallied, Outcome::FailedPermanent);
        let attempts: u64 = values(&measured, What::Failed).map(|measure| measure.value).sum();
        let href = failed.map(|_| ended_in(frame, from, overview.range, Some(Status::FailedPermanent)));
        Bucket { from, href, values: vec![(attempts > 0).then_some(attempts as f64), failed] }
    };
    let series = [
        Series { name: "failed attempts", class: "c-retrying" },
        Series { name: "failed jobs", class: "c-failed" },
    ];
    let tallied = buckets(overview.range, frame.now, &overview.tallied);
    let buckets: Vec<Bucket> = tallied.into_iter().zip(measured).map(bucket).collect();
    show(overview.range, "failures", "Failures", &series, &buckets, Unit::Jobs, Look::Steps)
}

fn values<'a>(measured: &[&'a Measured], what: What) -> impl Iterator<Item = &'a Measured> {
    measured.iter().copied().filter(move |measure| measure.what == what)
}

/// A chart of what was measured.
fn of_measured(
    frame: &Frame,
    overview: &Overview,
    (id, title): (&str, &str),
    series: &[Series],
    unit: Unit,
    read: impl Fn(&[&Measured]) -> Vec<Option<f64>>,
) -> Markup {
    let bucket = |(from, measured): (DateTime<Utc>, Vec<&Measured>)| Bucket {
        from,
        href: None,
        values: read(&measured),
    };
    let buckets: Vec<Bucket> =
        buckets(overview.range, frame.now, &overview.measured).into_iter().map(bucket).collect();
    show(overview.range, id, title, series, &buckets, unit, Look::Steps)
}

const PERCENTILES: [Series; 3] = [
    Series { name: "median", class: "c-p50" },
    Series { name: "95 %", class: "c-p95" },
    Series { name: "99 %", class: "c-p99" },
];

fn waits(frame: &Frame, overview: &Overview) -> Markup {
    let title = ("waits", "Wait until the start");
    of_measured(frame, overview, title, &PERCENTILES, Unit::Seconds, |measured| {
        let waited = values(measured, What::Waited).map(|measure| (measure.up_to_ms, measure.value));
        let waited = stats::percentiles(waited);
        vec![waited.p50, waited.p95, waited.p99]
    })
}

fn depth(frame: &Frame, overview: &Overview) -> Markup {
    let series = [Series { name: "waiting", class: "c-queued" }];
    of_measured(frame, overview, ("depth", "Jobs that wait"), &series, Unit::Jobs, |measured| {
        vec![largest(frame, measured, What::Depth, |sum, value| sum + value)]
    })
}

fn oldest_due(frame: &Frame, overview: &Overview) -> Markup {
    let series = [Series { name: "oldest due job", class: "c-queued" }];
    of_measured(
        frame,
        overview,
        ("oldest-due", "Age of the oldest due job"),
        &series,
        Unit::Seconds,
        |measured| vec![largest(frame, measured, What::Overdue, u64::max).map(|millis| millis / 1000.0)],
    )
}

/// The largest sample of a bucket. The sample of all queues has no name. For a token that is limited to queues, the
/// samples of its queues are joined; those that are missing are 0.
fn largest(frame: &Frame, measured: &[&Measured], what: What, join: fn(u64, u64) -> u64) -> Option<f64> {
    let (of_all, of_queues): (Vec<_>, Vec<_>) =
        values(measured, what).partition(|sample| sample.queue.is_empty());
    if frame.rights.covers_all() {
        return of_all.iter().map(|sample| sample.value).max().map(|largest| largest as f64);
    }
    let mut minutes: BTreeMap<DateTime<Utc>, u64> = of_all.iter().map(|sample| (sample.minute, 0)).collect();
    for sample in of_queues {
        let of_minute = minutes.entry(sample.minute).or_default();
        *of_minute = join(*of_minute, sample.value);
    }
    minutes.into_values().max().map(|largest| largest as f64)
}

fn run_times(frame: &Frame, overview: &Overview) -> Markup {
    let bucket = |(from, tallied): (DateTime<Utc>, Vec<&Tallied>)| {
        let successes = tallied.iter().copied().filter(|tally| tally.outcome == Outcome::Succeeded);
        let run = stats::run_seconds(successes);
        let href = run.p50.map(|_| ended_in(frame, from, overview.range, Some(Status::Succeeded)));
        Bucket { from, href, values: vec![run.p50, run.p95, run.p99] }
    };
    let buckets: Vec<Bucket> =
        buckets(overview.range, frame.now, &overview.tallied).into_iter().map(bucket).collect();
    show(
        overview.range,
        "run-times",
        "Run time of successes",
        &PERCENTILES,
        &buckets,
        Unit::Seconds,
        Look::Steps,
    )
}

/// What a chart shows.
#[derive(Clone, Copy)]
enum Unit {
    Jobs,
    Seconds,
}

fn show(
    range: Range,
    id: &str,
    title: &str,
    series: &[Series],
    buckets: &[Bucket],
    unit: Unit,
    look: Look,
) -> Markup {
    let value = match unit {
        Unit::Jobs => chart::jobs,
        Unit::Seconds => format::seconds,
    };
    let scale = match unit {
        Unit::Jobs => chart::of_jobs,
        Unit::Seconds => chart::of_seconds,
    };
    Chart { id, title, series, buckets, width: range.width(), value, scale, look }.render()
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, Rights, assert_escaped};
    use super::*;

    fn tally(minute: &str, outcome: Outcome, jobs: u64) -> Tallied {
        Tallied {
            minute: minute.parse().unwrap(),
            queue: HOSTILE.into(),
            kind: HOSTILE.into(),
            outcome,
            jobs,
            run_ms: vec![(100.0, jobs)],
        }
    }

    fn overview(range: Range, tallied: Vec<Tallied>) -> Overview {
        let tallied = Arc::new(tallied);
        Overview {
            range,
            counts: Vec::new(),
            last_hour: tallied.clone(),
            tallied,
            measured: Arc::default(),
            per_second: 1.5,
            overdue: vec![(HOSTILE.into(), Duration::from_secs(900))],
            queues: Vec::new(),
            workers: None,
            schedules: Arc::default(),
        }
    }

    #[test]
    fn tallies_fall_into_the_bucket_of_their_time() {
        let now = "2031-05-06T07:08:09Z".parse().unwrap();
        let tallied = [
            tally("2031-05-06T07:08:00Z", Outcome::Succeeded, 1),
            tally("2031-05-06T06:09:00Z", Outcome::Succeeded, 2),
            tally("2031-05-06T06:08:00Z", Outcome::Succeeded, 4),
        ];
        let hour = buckets(Range::Hour, now, &tallied);
        assert_eq!((hour.len(), hour[59].1.len(), hour[0].1.len()), (60, 1, 1), "the oldest is outside");
        assert_eq!(hour[59].0.to_rfc3339(), "2031-05-06T07:08:00+00:00");
        let day = buckets(Range::Day, now, &tallied);
        assert_eq!((day[23].1.len(), day[22].1.len()), (1, 2));
    }

    #[test]
    fn the_page_links_periods_to_their_jobs_and_escapes_names() {
        let tallied = vec![tally("2031-05-06T07:08:00Z", Outcome::FailedPermanent, 3)];
        let page = render(&Frame::of_operator("/ui"), &overview(Range::Hour, tallied));
        assert_escaped(&page);
        let link = "ended_after=2031-05-06T07%3A08%3A00.000Z&amp;ended_before=2031-05-06T07%3A09%3A00.000Z";
        assert!(page.0.contains(link), "{}", page.0);
    }

    #[test]
    fn a_queue_without_a_sample_had_no_waiting_job_if_there_was_one_of_all_queues() {
        let sample = |minute: &str, queue: &str, value| Measured {
            minute: minute.parse().unwrap(),
            what: What::Depth,
            queue: queue.into(),
            kind: String::new(),
            up_to_ms: 0.0,
            value,
        };
        let (first, second) = ("2031-05-06T07:08:00Z", "2031-05-06T07:09:00Z");
        let samples =
            [sample(first, "", 9), sample(first, "mail", 2), sample(first, "sms", 3), sample(second, "", 7)];
        let of = |frame: &Frame, samples: &[Measured]| {
            largest(frame, &samples.iter().collect::<Vec<_>>(), What::Depth, |sum, value| sum + value)
        };
        let all = Frame::of_operator("/ui");
        let rights = Rights { queues: Some(vec!["mail".into(), "sms".into()]), ..all.rights.clone() };
        let limited = Frame { rights, ..all.clone() };
        assert_eq!((of(&all, &samples), of(&limited, &samples)), (Some(9.0), Some(5.0)));
        assert_eq!((of(&limited, &samples[3..]), of(&limited, &[])), (Some(0.0), None));
    }

    #[test]
    fn an_empty_queue_shows_the_first_request() {
        let page = render(&Frame::of_operator("/ui"), &overview(Range::Hour, Vec::new())).0;
        assert!(page.contains("curl -X POST http://localhost:8080/q/jobs"), "{page}");
    }
}
