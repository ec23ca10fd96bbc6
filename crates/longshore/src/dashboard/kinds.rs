//! Kinds of jobs: how many run and fail, how long they take, their schemas and defaults.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};

use super::layout::Section;
use super::overview::Range;
use super::url::{Params, encoded};
use super::widgets::{
    MAX_ROWS, dash, dash_because, empty, figure, heading, json_block, more_rows, name_filter, snippet, time,
    wanted_name,
};
use super::{Frame, Rights, View, format};
use crate::api::problem::ApiResult;
use crate::api::stats::{self, Percentiles};
use crate::job::{Outcome, Status};
use crate::store::{Detail, HistoryFilter, KindRecord, Tallied, WorkerRecord};

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
    /// The number of live workers that handle it and take jobs from a queue in which it waits; `None` if
    /// the caller may not see workers.
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
    let rows = load(&view, range, wanted_name(&view.frame)).await?;
    Ok(view.respond(Section::Kinds, "Kinds", render(&view.frame, range, &rows)))
}

/// The registered kinds that the caller may see: those of all queues, and of its queues.
pub(super) fn visible<'k>(
    kinds: &'k [KindRecord],
    rights: &Rights,
) -> impl DoubleEndedIterator<Item = &'k KindRecord> {
    kinds.iter().filter(|kind| kind.queue.as_ref().is_none_or(|queue| rights.covers(queue)))
}

/// The kinds whose names contain the text, with their figures.
async fn load(view: &View, range: Range, text: &str) -> ApiResult<Vec<KindRow>> {
    let (data, rights) = (&view.data, &view.frame.rights);
    let history = HistoryFilter {
        since: range.start(view.frame.now),
        queues: rights.queues.clone(),
        detail: Detail::Kinds,
    };
    let (kinds, counts, tallied, workers) =
        tokio::try_join!(data.kinds(), data.counts(), data.tallied(&history), data.workers())?;
    let mut jobs_of: BTreeMap<(&str, Status), u64> = BTreeMap::new();
    for count in counts.iter().filter(|count| rights.covers(&count.queue)) {
        *jobs_of.entry((&count.kind, count.status)).or_default() += count.jobs;
    }
    let mut queues_of: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for count in counts.iter().filter(|count| count.jobs > 0) {
        if matches!(count.status, Status::Queued | Status::Retrying) {
            queues_of.entry(&count.kind).or_default().insert(&count.queue);
        }
    }
    let mut ends_of: BTreeMap<&str, Vec<&Tallied>> = BTreeMap::new();
    for tally in tallied.iter() {
        ends_of.entry(&tally.kind).or_default().push(tally);
    }
    let mut names: BTreeMap<&str, Option<&KindRecord>> =
        // Reversed, so that of a name the one that applies to all queues remains.
        visible(&kinds, rights).rev().map(|kind| (kind.name.as_str(), Some(kind))).collect();
    for name in jobs_of.keys().map(|(kind, _)| *kind).chain(ends_of.keys().copied()) {
        names.entry(name).or_default();
    }
    let row = |(name, registered): (&str, Option<&KindRecord>)| {
        let jobs = |status| jobs_of.get(&(name, status)).copied().unwrap_or_default();
        let of_kind = ends_of.get(name).map(Vec::as_slice).unwrap_or_default();
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
            workers: rights.covers_all().then(|| handlers(&workers, name, queues_of.get(name))),
        }
    };
    Ok(names.into_iter().filter(|(name, _)| name.contains(text)).map(row).collect())
}

/// How many live workers handle a kind and take jobs from one of these queues, if there are any.
fn handlers(workers: &[WorkerRecord], kind: &str, queues: Option<&BTreeSet<&str>>) -> usize {
    let handles = |worker: &&WorkerRecord| {
        worker.dead_at.is_none()
            && !worker.stale
            && worker.kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|one| one == kind))
            && queues.is_none_or(|queues| queues.iter().any(|queue| worker.claims_from(queue)))
    };
    workers.iter().filter(handles).count()
}

/// A column to sort by, most first; without one, by name.
const SORTED: [(&str, &str); 5] = [
    ("waiting", "Waiting"),
    ("ended", "Ended"),
    ("failures", "Failures"),
    ("median", "Median run time"),
    ("p95", "95 % run within"),
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
                a .sort href=(frame.here(&params)) title=(if is_current { "Sort by name" } else { "Sort by this column" }) {
                    (label) span .arrow aria-hidden="true" { @if is_current { "↓" } @else { "↕" } }
                }
            }
        }
    };
    html! {
        (heading("Kinds", format!("Ended, failures and run times of the last {}", range.name()), range.links(frame)))
        (name_filter(frame, "Filter kinds", rows.len()))
        @if rows.is_empty() && !wanted_name(frame).is_empty() {
            (empty("No kind matches", html! { p { a href=(frame.url("/ui/kinds")) { "Show all kinds" } "." } }))
        } @else if rows.is_empty() {
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
                tbody { @for row in sorted.iter().take(MAX_ROWS) { (table_row(frame, range, row)) } }
            } }
            (more_rows(rows.len()))
        }
    }
}

const NOTHING_ENDED: &str = "no job ended in this time";

fn seconds(value: Option<f64>) -> Markup {
    html! { @match value { Some(value) => (format::seconds(value)), None => (dash_because(NOTHING_ENDED)) } }
}

/// The list of jobs of the kind that failed in the range.
fn failed_url(frame: &Frame, range: Range, kind: &str) -> String {
    let params = Params::default().with("status", Status::FailedPermanent.as_str()).with("kind", kind);
    params.with("ended_after", format::machine(range.start(frame.now))).url(&frame.url("/ui/jobs"))
}

fn new_url(frame: &Frame, kind: &str) -> String {
    Params::default().with("kind", kind).url(&frame.url("/ui/new"))
}

fn table_row(frame: &Frame, range: Range, row: &KindRow) -> Markup {
    let jobs = |status: &str| {
        Params::default().with("status", status).with("kind", &row.name).url(&frame.url("/ui/jobs"))
    };
    let has_schema = row.registered.as_ref().is_some_and(|kind| kind.schema.is_some());
    html! {
        tr #(format!("kind-{}", encoded(&row.name))) data-row {
            td .strong { a data-open href=(range.keep(&frame.url(&format!("/ui/kinds/{}", encoded(&row.name))))) { (row.name) } }
            td .c-number data-label="Waiting" { @if row.waiting == 0 { span .faint { "0" } } @else {
                a .quiet href=(jobs("queued,retrying")) { (format::number(row.waiting)) } } }
            td .c-number data-label="Ended" { (format::number(row.ended)) }
            td .c-number data-label="Failures" { @match (row.failed, row.ended) {
                (_, 0) => (dash_because(NOTHING_ENDED)),
                (0, _) => span .faint { "0 %" },
                (failed, ended) => a .error href=(failed_url(frame, range, &row.name)) { (format::percent(failed, ended)) },
            } }
            td .c-number data-label="Median run time" { (seconds(row.run.p50)) }
            td .c-number data-label="95 % run within" { (seconds(row.run.p95)) }
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
    let found = load(&view, range, &name).await?.into_iter().find(|row| row.name == name);
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
    let failures = format!("{} of all ended", format::percent(row.failed, row.ended));
    let buttons = html! {
        (range.links(frame))
        @if frame.rights.enqueue { a .button .primary href=(new_url(frame, &row.name)) { "Enqueue a job" } }
    };
    html! {
        p .crumbs { a href=(range.keep(&frame.url("/ui/kinds"))) { "Kinds" } }
        (heading(html! { (row.name) }, "", buttons))
        dl #figures .figures {
            (figure("Waiting", jobs("queued,retrying", row.waiting), ""))
            (figure("Running", jobs("running", row.running), row.workers.map(|n| format::counted(n as u64, "worker handles it", "workers handle it")).unwrap_or_default()))
            (figure("Ended", format::number(row.ended), last))
            (figure("Failed", html! { a .quiet href=(failed_url(frame, range, &row.name)) { (format::number(row.failed)) } }, failures))
            (figure("Median run time", seconds(row.run.p50), "of successes"))
            (figure("95 % run within", seconds(row.run.p95), html! { "99 % within " (seconds(row.run.p99)) }))
        }
        @match &row.registered {
            Some(kind) => {
                p .faint .registered { "Registered " (time(kind.updated_at, frame)) "." }
                @if let Some(defaults) = &kind.defaults { (json_block("Defaults", defaults.get(), &[], &frame.url("/kinds"))) }
                @match &kind.schema {
                    Some(schema) => (json_block("Schema of the payload", schema.get(), &[], &frame.url("/kinds"))),
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
    fn links_keep_the_range_and_headers_look_sortable() {
        let mut frame = Frame::of_operator("/ui/kinds");
        frame.params = Params::new(vec![("range".into(), "day".into()), ("sort".into(), "median".into())]);
        let page = render(&frame, Range::Day, &[row("mail", 1.0, 1)]).0;
        assert!(page.contains("href=\"/q/ui/kinds/mail?range=day\""), "{page}");
        assert!(
            page.contains("status=failed_permanent&amp;kind=mail&amp;ended_after=2031-05-05T08"),
            "{page}"
        );
        assert_eq!((page.matches('↕').count(), page.matches('↓').count()), (4, 1), "{page}");
        let idle = KindRow { ended: 0, run: Percentiles::default(), ..row("idle", 1.0, 0) };
        assert!(render(&frame, Range::Day, &[idle]).0.contains(NOTHING_ENDED));
    }

    #[test]
    fn only_workers_that_take_a_queue_in_which_the_kind_waits_count() {
        let worker = |queue: &str| {
            let mut worker = super::super::attention::tests::worker(None, false);
            worker.queues = vec![queue.into()];
            worker
        };
        let workers = [worker("mail"), worker("images")];
        assert_eq!(handlers(&workers, "send", Some(&BTreeSet::from(["mail"]))), 1);
        assert_eq!(handlers(&workers, "send", Some(&BTreeSet::from(["reports"]))), 0);
        assert_eq!(handlers(&workers, "send", None), 2);
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
