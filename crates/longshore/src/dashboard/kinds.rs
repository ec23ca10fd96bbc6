//! Kinds of jobs: how many run and fail, how long they take, their schemas and defaults.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};

use super::layout::Section;
use super::overview::Range;
use super::url::{Params, encoded};
use super::widgets::{code_block, dash, empty, figure, heading, snippet, time};
use super::{Frame, View, format, json};
use crate::api::problem::ApiResult;
use crate::api::stats::{self, Percentiles};
use crate::job::{Outcome, Status};
use crate::store::{Count, KindRecord, Tallied, WorkerRecord};

/// A kind with its figures.
struct KindRow {
    name: String,
    registered: Option<KindRecord>,
    waiting: u64,
    running: u64,
    /// Ended in the range.
    ended: u64,
    failed: u64,
    run: Percentiles,
    /// The number of live workers that handle it; `None` if the caller may not see workers.
    workers: Option<usize>,
}

impl KindRow {
    /// The share of failures, in percent.
    fn failure_percent(&self) -> Option<f64> {
        (self.ended > 0).then(|| self.failed as f64 * 100.0 / self.ended as f64)
    }
}

pub(super) async fn page(view: View) -> ApiResult<Response> {
    let range = Range::of(&view.frame);
    let rows = load(&view, range).await?;
    Ok(view.respond(Section::Kinds, "Kinds", render(&view.frame, range, &rows)))
}

async fn load(view: &View, range: Range) -> ApiResult<Vec<KindRow>> {
    let (data, rights) = (&view.data, &view.frame.rights);
    let since = range.start(view.frame.now);
    let (kinds, counts, tallied, workers) =
        tokio::try_join!(data.kinds(), data.counts(), data.tallied(since), data.workers())?;
    let counts: Vec<&Count> = counts.iter().filter(|count| rights.covers(&count.queue)).collect();
    let tallied: Vec<&Tallied> = tallied.iter().filter(|tally| rights.covers(&tally.queue)).collect();
    let mut names: BTreeMap<&str, Option<&KindRecord>> =
        kinds.iter().map(|kind| (kind.name.as_str(), Some(kind))).collect();
    for name in counts.iter().map(|count| &count.kind).chain(tallied.iter().map(|tally| &tally.kind)) {
        names.entry(name).or_default();
    }
    let row = |(name, registered): (&str, Option<&KindRecord>)| {
        let jobs = |status| {
            counts
                .iter()
                .filter(|count| count.kind == name && count.status == status)
                .map(|count| count.jobs)
                .sum::<u64>()
        };
        let of_kind: Vec<&Tallied> = tallied.iter().copied().filter(|tally| tally.kind == name).collect();
        let ended = |outcome: Option<Outcome>| {
            let matching =
                of_kind.iter().filter(|tally| outcome.is_none_or(|outcome| tally.outcome == outcome));
            matching.map(|tally| tally.jobs).sum()
        };
        KindRow {
            name: name.to_owned(),
            registered: registered.cloned(),
            waiting: jobs(Status::Queued) + jobs(Status::Retrying),
            running: jobs(Status::Running),
            ended: ended(None),
            failed: ended(Some(Outcome::FailedPermanent)),
            run: stats::run_seconds(
                of_kind.iter().copied().filter(|tally| tally.outcome == Outcome::Succeeded),
            ),
            workers: rights.covers_all().then(|| handlers(&workers, name)),
        }
    };
    Ok(names.into_iter().map(row).collect())
}

/// How many live workers handle a kind.
fn handlers(workers: &[WorkerRecord], kind: &str) -> usize {
    let handles = |worker: &&WorkerRecord| {
        worker.dead_at.is_none()
            && !worker.stale
            && worker.kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|one| one == kind))
    };
    workers.iter().filter(handles).count()
}

/// A column to sort by, most first; without one, by name.
const SORTED: [(&str, &str); 5] = [
    ("waiting", "Waiting"),
    ("ended", "Ended"),
    ("failures", "Failures"),
    ("median", "Median"),
    ("p95", "95 % within"),
];

fn sort(rows: &mut [&KindRow], by: Option<&str>) {
    let thousandths = |value: Option<f64>| Reverse(value.map(|value| (value * 1000.0) as u64));
    match by {
        Some("waiting") => rows.sort_by_key(|row| Reverse(row.waiting)),
        Some("ended") => rows.sort_by_key(|row| Reverse(row.ended)),
        Some("failures") => rows.sort_by_key(|row| thousandths(row.failure_percent())),
        Some("median") => rows.sort_by_key(|row| thousandths(row.run.p50)),
        Some("p95") => rows.sort_by_key(|row| thousandths(row.run.p95)),
        _ => {}
    }
}

fn render(frame: &Frame, range: Range, rows: &[KindRow]) -> Markup {
    let by = frame.params.get("sort");
    let mut sorted: Vec<&KindRow> = rows.iter().collect();
    sort(&mut sorted, by);
    let column = |(name, label): (&str, &str)| {
        let is_current = by == Some(name);
        let params =
            if is_current { frame.params.without(&["sort"]) } else { frame.params.with("sort", name) };
        html! {
            th .c-number aria-sort=[is_current.then_some("descending")] {
                a .sort href=(frame.here(&params)) title="Sort by this column" { (label) @if is_current { " ↓" } }
            }
        }
    };
    html! {
        (heading("Kinds", format!("Ended, failures and run times of the last {}", range.name()), range.links(frame)))
        @if rows.is_empty() {
            (empty("No kinds yet", html! {
                p { "A kind names the handler of a job. Workers register the kinds that they handle. "
                    "For a worker in another language, register one with a schema for its payloads:" }
                (snippet(&format!(
                    "curl -X PUT http://localhost:8080{}/kinds/greet -H 'content-type: application/json' \\\n  \
                     -d '{{\"schema\": {{\"type\": \"object\", \"required\": [\"name\"]}}}}'",
                    frame.base
                )))
            }))
        } @else {
            div .panel .flush { table #kinds .list {
                thead { tr { th { "Kind" } @for sorted in SORTED { (column(sorted)) } th .c-number { "Workers" } th .c-status { "Schema" } th .c-actions { span .unseen { "Actions" } } } }
                tbody { @for row in sorted { (table_row(frame, row)) } }
            } }
        }
    }
}

fn percent(value: f64) -> String {
    if value > 0.0 && value < 10.0 { format!("{value:.1} %") } else { format!("{value:.0} %") }
}

fn seconds(value: Option<f64>) -> Markup {
    html! { @match value { Some(value) => (format::seconds(value)), None => (dash()) } }
}

fn new_url(frame: &Frame, kind: &str) -> String {
    Params::default().with("kind", kind).url(&frame.url("/ui/new"))
}

fn table_row(frame: &Frame, row: &KindRow) -> Markup {
    let jobs = |status: &str| {
        Params::default().with("status", status).with("kind", &row.name).url(&frame.url("/ui/jobs"))
    };
    let has_schema = row.registered.as_ref().is_some_and(|kind| kind.schema.is_some());
    html! {
        tr #(format!("kind-{}", encoded(&row.name))) data-row {
            td .strong { a data-open href=(frame.url(&format!("/ui/kinds/{}", encoded(&row.name)))) { (row.name) } }
            td .c-number data-label="Waiting" { @if row.waiting == 0 { span .faint { "0" } } @else {
                a .quiet href=(jobs("queued,retrying")) { (format::number(row.waiting)) } } }
            td .c-number data-label="Ended" { (format::number(row.ended)) }
            td .c-number data-label="Failures" { @match row.failure_percent() {
                Some(0.0) => span .faint { "0 %" },
                Some(value) => a .error href=(jobs(Status::FailedPermanent.as_str())) { (percent(value)) },
                None => (dash()),
            } }
            td .c-number data-label="Median" { (seconds(row.run.p50)) }
            td .c-number data-label="95 % within" { (seconds(row.run.p95)) }
            td .c-number data-label="Workers" { @match row.workers {
                Some(0) if row.waiting > 0 => span .tag .is-warning { "none" },
                Some(n) => (n),
                None => (dash()),
            } }
            td .c-status data-label="Schema" { @if has_schema { "yes" } @else { (dash()) } }
            td .c-actions { @if frame.rights.enqueue { a .button .small href=(new_url(frame, &row.name)) { "Enqueue" } } }
        }
    }
}

// ---- one kind --------------------------------------------------------------

pub(super) async fn one(view: View, Path(name): Path<String>) -> ApiResult<Response> {
    let range = Range::of(&view.frame);
    let found = load(&view, range).await?.into_iter().find(|row| row.name == name);
    let row = found.unwrap_or_else(|| KindRow {
        name: name.clone(),
        registered: None,
        waiting: 0,
        running: 0,
        ended: 0,
        failed: 0,
        run: Percentiles::default(),
        workers: None,
    });
    Ok(view.respond(Section::Kinds, &name, render_one(&view.frame, range, &row)))
}

fn render_one(frame: &Frame, range: Range, row: &KindRow) -> Markup {
    let jobs = |status: &str, number: u64| {
        let url =
            Params::default().with("status", status).with("kind", &row.name).url(&frame.url("/ui/jobs"));
        html! { a .quiet href=(url) { (format::number(number)) } }
    };
    let last = format!("in the last {}", range.name());
    let failures = row.failure_percent().map(|value| format!("{} of all ended", percent(value)));
    let buttons = html! {
        (range.links(frame))
        @if frame.rights.enqueue { a .button .primary href=(new_url(frame, &row.name)) { "Enqueue a job" } }
    };
    html! {
        p .crumbs { a href=(frame.url("/ui/kinds")) { "Kinds" } }
        (heading(html! { (row.name) }, "", buttons))
        dl #figures .figures {
            (figure("Waiting", jobs("queued,retrying", row.waiting), ""))
            (figure("Running", jobs("running", row.running), row.workers.map(|n| format!("{} handle it", format::counted(n as u64, "worker", "workers"))).unwrap_or_default()))
            (figure("Ended", format::number(row.ended), last))
            (figure("Failed", jobs(Status::FailedPermanent.as_str(), row.failed), failures.unwrap_or_default()))
            (figure("Median", seconds(row.run.p50), "run time of successes"))
            (figure("95 % within", seconds(row.run.p95), html! { "99 % within " (seconds(row.run.p99)) }))
        }
        @match &row.registered {
            Some(kind) => {
                p .faint .registered { "Registered " (time(kind.updated_at, frame)) "." }
                @if let Some(defaults) = &kind.defaults { (code_block("Defaults", &json::indent(defaults.get(), &[]))) }
                @match &kind.schema {
                    Some(schema) => (code_block("Schema of the payload", &json::indent(schema.get(), &[]))),
                    None => p .notice .is-info { "This kind has no schema, so any payload is accepted." },
                }
            }
            None => p .notice .is-info { "This kind is not registered: no worker of it has started, and nobody has registered it." },
        }
        p { a .button href=(Params::default().with("kind", &row.name).url(&frame.url("/ui/jobs"))) { "All jobs of this kind" } }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn row(name: &str, p95: f64, failed: u64) -> KindRow {
        KindRow {
            name: name.into(),
            registered: None,
            waiting: 3,
            running: 1,
            ended: 40,
            failed,
            run: Percentiles { p50: Some(p95 / 2.0), p95: Some(p95), p99: None },
            workers: Some(0),
        }
    }

    #[test]
    fn the_slowest_kind_is_found_by_sorting() {
        let rows = [row("fast", 0.1, 0), row("slow", 9.0, 1), row("medium", 2.0, 20)];
        let order = |by: &str| {
            let mut sorted: Vec<&KindRow> = rows.iter().collect();
            sort(&mut sorted, Some(by));
            sorted.into_iter().map(|row| row.name.as_str()).collect::<Vec<_>>()
        };
        assert_eq!(order("p95"), ["slow", "medium", "fast"]);
        assert_eq!(order("failures"), ["medium", "slow", "fast"]);
        assert_eq!(order(HOSTILE), ["fast", "slow", "medium"]);
    }

    #[test]
    fn names_are_escaped() {
        let mut frame = Frame::of_operator("/ui/kinds");
        frame.params = Params::new(vec![("sort".into(), HOSTILE.into())]);
        let page = render(&frame, Range::Hour, &[row(HOSTILE, 1.0, 1)]);
        assert_escaped(&page);
        assert!(page.0.contains("2.5 %"), "{}", page.0);
        assert_escaped(&render_one(&frame, Range::Hour, &row(HOSTILE, 1.0, 1)));
    }
}
