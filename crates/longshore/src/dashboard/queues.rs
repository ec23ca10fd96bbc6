//! Queues: how many jobs wait and run, how old the oldest is, limits, groups, pausing.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use axum::extract::Path;
use axum::response::Response;
use chrono::TimeDelta;
use maud::{Markup, html};

use super::cache::GROUPS;
use super::layout::Section;
use super::url::{Params, encoded};
use super::widgets::{
    self, Action, Look, MAX_ROWS, dash, empty, heading, more_rows, name_filter, rate, wanted_name,
};
use super::{Frame, View, format};
use crate::api::problem::{ApiResult, Problem};
use crate::api::stats::{self, Percentiles};
use crate::job::{Outcome, Status};
use crate::store::{Detail, GroupRecord, HistoryFilter, QueueRecord, Tallied, WorkerRecord, start_of};

/// A queue with its figures.
struct QueueRow {
    queue: QueueRecord,
    retrying: u64,
    failed: u64,
    /// Ended per second over the last five minutes.
    per_second: f64,
    /// The age of the oldest due job.
    age: Option<Duration>,
    /// The number of live workers that take its jobs; `None` if the caller may not see workers.
    workers: Option<usize>,
    /// How long successes of the last hour ran.
    run: Percentiles,
}

pub(super) async fn page(view: View) -> ApiResult<Response> {
    let queues = load(&view, wanted_name(&view.frame)).await?;
    Ok(view.respond(Section::Queues, "Queues", render(&view.frame, &queues)))
}

/// The queues that the caller may see and whose names contain the text, with their figures.
async fn load(view: &View, text: &str) -> ApiResult<Vec<QueueRow>> {
    let (data, rights) = (&view.data, &view.frame.rights);
    let history = HistoryFilter {
        since: start_of(60, view.frame.now) - TimeDelta::minutes(59),
        queues: rights.queues.clone(),
        detail: Detail::Queues,
    };
    let (queues, counts, tallied, overdue, workers) = tokio::try_join!(
        data.queues(),
        data.counts(),
        data.tallied(&history),
        data.overdue(),
        data.workers(),
    )?;
    let mut jobs_of: BTreeMap<(&str, Status), u64> = BTreeMap::new();
    for count in counts.iter() {
        *jobs_of.entry((&count.queue, count.status)).or_default() += count.jobs;
    }
    let mut ends_of: BTreeMap<&str, Vec<&Tallied>> = BTreeMap::new();
    for tally in tallied.iter() {
        ends_of.entry(&tally.queue).or_default().push(tally);
    }
    let ages: BTreeMap<&str, Duration> = overdue.iter().map(|(queue, age)| (queue.as_str(), *age)).collect();
    let records: BTreeMap<&str, &QueueRecord> =
        queues.iter().map(|queue| (queue.name.as_str(), queue)).collect();
    let row = |name: &str| {
        let jobs = |status| jobs_of.get(&(name, status)).copied().unwrap_or_default();
        let ended = ends_of.get(name).map(Vec::as_slice).unwrap_or_default();
        let succeeded = ended.iter().copied().filter(|tally| tally.outcome == Outcome::Succeeded);
        QueueRow {
            retrying: jobs(Status::Retrying),
            failed: jobs(Status::FailedPermanent),
            per_second: stats::rate(ended.iter().copied(), view.frame.now),
            age: ages.get(name).copied(),
            workers: rights.covers_all().then(|| live_workers(&workers, name)),
            run: stats::run_seconds(succeeded),
            queue: records.get(name).map_or_else(|| QueueRecord::empty(name), |queue| (*queue).clone()),
        }
    };
    // A queue without waiting jobs and settings has history, too.
    let with_jobs = jobs_of.keys().map(|(queue, _)| *queue);
    let known: BTreeSet<&str> =
        records.keys().copied().chain(with_jobs).chain(ends_of.keys().copied()).collect();
    let shown = known.into_iter().filter(|name| rights.covers(name) && name.contains(text));
    Ok(shown.map(row).collect())
}

fn live_workers(workers: &[WorkerRecord], queue: &str) -> usize {
    let takes = |worker: &&WorkerRecord| {
        worker.dead_at.is_none()
            && !worker.stale
            && worker.claims_from(queue)
            && worker.kinds.as_ref().is_none_or(|kinds| !kinds.is_empty())
    };
    workers.iter().filter(takes).count()
}

fn render(frame: &Frame, rows: &[QueueRow]) -> Markup {
    html! {
        (heading("Queues", format::counted(rows.len() as u64, "queue", "queues"), html! {}))
        (name_filter(frame, "Filter queues", rows.len()))
        @let is_filtered = !wanted_name(frame).is_empty();
        @if rows.is_empty() && is_filtered {
            (empty("No queue matches", html! { p { a href=(frame.url("/ui/queues")) { "Show all queues" } "." } }))
        } @else if rows.is_empty() {
            (empty("No queues yet", html! {
                p { "A queue exists as soon as a job names it: " code { "{\"queue\": \"mail\", …}" }
                    ". Jobs without a queue are in " code { "default" } "." }
            }))
        } @else {
            div .panel .flush { table #queues .list {
                thead { tr {
                    th { "Queue" } th .c-number { "Waiting" } th .c-number { "Running" } th .c-number { "Retrying" }
                    th .c-number { "Failed" } th .c-number { "Per second" } th .c-number { "Oldest due" }
                    th .c-number .c-run { "95 % run within" } th .c-number { "Workers" } th { "Limit" } th .c-actions { span .unseen { "Actions" } }
                } }
                tbody { @for row in rows.iter().take(MAX_ROWS) { (table_row(frame, row)) } }
            } }
            (more_rows(rows.len()))
        }
    }
}

fn jobs_url(frame: &Frame, queue: &str, status: Status) -> String {
    Params::default().with("status", status.as_str()).with("queue", queue).url(&frame.url("/ui/jobs"))
}

fn table_row(frame: &Frame, row: &QueueRow) -> Markup {
    let queue = &row.queue;
    let cell = |label: &str, status: Status, jobs: u64, estimated: bool| {
        html! {
            td .c-number data-label=(label) {
                @if jobs == 0 { span .faint { "0" } } @else {
                    a .quiet href=(jobs_url(frame, &queue.name, status)) { @if estimated { "~" } (format::number(jobs)) }
                }
            }
        }
    };
    html! {
        tr #(format!("queue-{}", encoded(&queue.name))) data-row {
            td .strong .c-name { a data-open href=(frame.url(&format!("/ui/queues/{}", encoded(&queue.name)))) { (queue.name) }
                @if queue.paused { " " span .tag .is-warning { "paused" } }
                @if queue.paused_groups > 0 { " " span .tag .is-warning { (paused_groups(queue)) } } }
            (cell("Waiting", Status::Queued, queue.waiting, queue.waiting_estimated))
            (cell("Running", Status::Running, queue.running, false))
            (cell("Retrying", Status::Retrying, row.retrying, false))
            (cell("Failed", Status::FailedPermanent, row.failed, false))
            td .c-number data-label="Per second" { (format!("{:.1}", row.per_second)) }
            td .c-number data-label="Oldest due" { @match row.age { Some(age) => (format::duration(age)), None => (dash()) } }
            td .c-number .c-run data-label="95 % run within" { @match row.run.p95 { Some(p95) => (format::seconds(p95)), None => (dash()) } }
            td .c-number data-label="Workers" { @match row.workers {
                Some(0) => span .tag .is-warning title="No live worker takes jobs from this queue" { "none" },
                Some(n) => (n),
                None => (dash()),
            } }
            td .nowrap data-label="Limit" { (limits(queue.limit, queue.rate)) }
            td .c-actions { (pause(frame, queue, Look::Small)) }
        }
    }
}

fn limits(limit: Option<u32>, per: Option<crate::rules::turns::Rate>) -> Markup {
    html! {
        @match (limit, per) {
            (None, None) => (dash()),
            (limit, per) => {
                @if let Some(limit) = limit { (format::number(limit.into())) " at once" }
                @if limit.is_some() && per.is_some() { ", " }
                @if let Some(per) = per { (rate(per)) }
            }
        }
    }
}

fn pause(frame: &Frame, queue: &QueueRecord, look: Look) -> Markup {
    if !frame.rights.operate {
        return html! {};
    }
    let url = |action: &str| frame.url(&format!("/queues/{}/{action}", encoded(&queue.name)));
    // A row of the table names the queue.
    let object = if look == Look::Small { "" } else { " queue" };
    html! {
        @if queue.paused {
            (Action::post(url("resume"), format!("Resume{object}"), format!("Queue {} runs again.", queue.name)).look(look))
        } @else {
            (Action::post(url("pause"), format!("Pause{object}"), format!("Queue {} is paused.", queue.name)).look(look)
                .confirm(format!("Pause queue {}? Running jobs continue; no other job of it starts.", queue.name))
                .yes("Pause queue"))
        }
    }
}

/// `2 groups paused`.
fn paused_groups(queue: &QueueRecord) -> String {
    format!("{} paused", format::counted(queue.paused_groups, "group", "groups"))
}

// ---- one queue -------------------------------------------------------------

/// One queue with its groups.
struct OneQueue {
    row: QueueRow,
    /// The group that the URL names, if it is not among the others.
    named: Option<GroupRecord>,
    groups: Vec<GroupRecord>,
}

pub(super) async fn one(view: View, Path(name): Path<String>) -> ApiResult<Response> {
    view.caller.may_use(&name)?;
    let after = view.frame.params.get("after").unwrap_or_default();
    let groups = view.data.groups(&name, after).await.map_err(Problem::in_url)?;
    let named = match view.frame.params.get("group") {
        Some(group) if groups.iter().all(|listed| listed.name != group) => {
            view.data.group(&name, group).await.map_err(Problem::in_url)?.as_ref().clone()
        }
        _ => None,
    };
    let found = load(&view, &name).await?.into_iter().find(|row| row.queue.name == name);
    let row = found.unwrap_or_else(|| QueueRow {
        queue: QueueRecord::empty(&name),
        retrying: 0,
        failed: 0,
        per_second: 0.0,
        age: None,
        workers: None,
        run: Percentiles::default(),
    });
    let content = render_one(&view.frame, &OneQueue { row, named, groups: groups.to_vec() });
    Ok(view.respond(Section::Queues, &name, content))
}

fn render_one(frame: &Frame, one: &OneQueue) -> Markup {
    let (row, queue) = (&one.row, &one.row.queue);
    let title = html! { (queue.name) @if queue.paused { " " (widgets::state(Status::Retrying, "paused")) }
    @if queue.paused_groups > 0 { " " span .tag .is-warning { (paused_groups(queue)) } } };
    let figure = |name: &str, status: Status, jobs: u64, estimated: bool, note: String| {
        let value = html! { a .quiet href=(jobs_url(frame, &queue.name, status)) { @if estimated { "~" } (format::number(jobs)) } };
        widgets::figure(name, value, note)
    };
    html! {
        p .crumbs { a href=(frame.url("/ui/queues")) { "Queues" } }
        (heading(title, "", pause(frame, queue, Look::Plain)))
        @if row.workers == Some(0) {
            p #no-worker .notice .is-warning {
                "No live worker takes jobs from this queue"
                @if queue.waiting > 0 { ", so its " (format::counted(queue.waiting, "waiting job does", "waiting jobs do")) " not start" }
                ". " a href=(frame.url("/ui/workers")) { "Workers" }
            }
        }
        dl #figures .figures {
            (figure("Waiting", Status::Queued, queue.waiting, queue.waiting_estimated,
                row.age.map(|age| format!("oldest due for {}", format::duration(age))).unwrap_or_default()))
            (figure("Running", Status::Running, queue.running, false,
                queue.limit.map(|limit| format!("limit {}", format::number(limit.into()))).unwrap_or_else(|| "no limit".into())))
            (figure("Retrying", Status::Retrying, row.retrying, false, String::new()))
            (figure("Failed", Status::FailedPermanent, row.failed, false, String::new()))
            (widgets::figure("Per second", format!("{:.1}", row.per_second), "ended, last 5 minutes"))
            (widgets::figure("Workers", row.workers.map_or("–".into(), |n| n.to_string()), "alive, take its jobs"))
        }
        div .columns {
            div { (groups(frame, one)) }
            aside aria-label="Settings" { (settings(frame, queue)) }
        }
    }
}

fn settings(frame: &Frame, queue: &QueueRecord) -> Markup {
    let url = |part: &str| frame.url(&format!("/queues/{}/{part}", encoded(&queue.name)));
    let limit = html! {
        label { span { "Jobs at once" }
            input name="limit" data-json="number-or-null" type="number" min="1" placeholder="no limit" value=[queue.limit] data-keep; }
    };
    let per_group = html! {
        label { span { "Jobs of each group at once" }
            input name="limit" data-json="number-or-null" type="number" min="1" placeholder="no limit" value=[queue.group_limit] data-keep; }
    };
    html! {
        section .panel {
            div .panel-head { h2 { "Limits" } }
            dl .facts {
                dt { "At once" } dd { @match queue.limit { Some(limit) => (limit), None => "no limit" } }
                dt { "Starts" } dd { @match queue.rate { Some(per) => (rate(per)), None => "no limit" } }
                dt { "Each group" } dd { (limits(queue.group_limit, queue.group_rate)) }
            }
            @if frame.rights.operate {
                div .panel-body .stack {
                    (Action::post(url("limit"), "Set", format!("The limit of {} is set.", queue.name)).method("PUT").fields(limit))
                    (rate_form(url("rate"), queue))
                    (Action::post(url("group-defaults"), "Set", format!("The limit of the groups of {} is set.", queue.name)).method("PATCH").fields(per_group))
                    p .faint { "Limits apply to all processes together and take effect at once. An empty field removes one." }
                }
            }
        }
    }
}

/// Sets the starts per second. Other periods and bursts are set with the API, and must not be replaced by accident.
fn rate_form(url: String, queue: &QueueRecord) -> Markup {
    let current = queue.rate;
    if let Some(other) = current.filter(|rate| *rate != crate::rules::turns::Rate::per_second(rate.starts)) {
        return html! {
            p .faint { "The rate is " (rate(other)) ". Change a rate with another period or burst with "
                code { "longshore queues rate" } " or the API." }
        };
    }
    let field = html! {
        label { span { "Starts per second" }
            input name="rate" data-json="rate" type="number" min="1" placeholder="no limit" value=[current.map(|rate| rate.starts)] data-keep; }
    };
    html! { (Action::post(url, "Set", format!("The rate of {} is set.", queue.name)).method("PUT").fields(field)) }
}

fn groups(frame: &Frame, one: &OneQueue) -> Markup {
    let queue = &one.row.queue.name;
    if one.groups.is_empty() && one.named.is_none() {
        return html! {
            section .panel { (empty("No groups", html! {
                p { "A group is a part of a queue, for example a customer. Groups take fair turns, and each can be "
                    "paused and limited. A job names its group: " code { "{\"group\": \"acme\", …}" } "." }
            })) }
        };
    }
    let is_full = one.groups.len() == GROUPS as usize;
    let next =
        one.groups.last().filter(|_| is_full).map(|last| frame.here(&frame.params.with("after", &last.name)));
    html! {
        section .panel .flush {
            div .panel-head { h2 { "Groups" } span .faint { (one.groups.len()) @if next.is_some() { "+" } } }
            p .panel-body .faint {
                "A group is a part of the queue, for example one tenant or customer. Groups take fair turns. "
                "In a paused group no further job starts; those that run continue."
            }
            table #groups .list {
                thead { tr { th { "Group" } th .c-number { "Waiting" } th .c-number { "Running" } th { "Limit" }
                    th .c-actions { span .unseen { "Actions" } } } }
                tbody { @for group in one.named.iter().chain(&one.groups) { (group_row(frame, queue, group)) } }
            }
        }
        @if let Some(next) = next { nav .paging aria-label="More groups" { a .button .small href=(next) { "More groups" } } }
    }
}

fn group_row(frame: &Frame, queue: &str, group: &GroupRecord) -> Markup {
    let jobs = Params::default().with("queue", queue).with("group", &group.name);
    let url = frame.url(&format!("/queues/{}/groups/{}", encoded(queue), encoded(&group.name)));
    let (label, done, paused) = if group.paused {
        ("Resume", format!("{} runs again.", group.name), "false")
    } else {
        ("Pause", format!("{} is paused.", group.name), "true")
    };
    let is_named = frame.params.get("group") == Some(group.name.as_str());
    html! {
        tr #(format!("group-{}", encoded(&group.name))) .is-named[is_named] data-row {
            td .strong .c-name { a data-open href=(jobs.url(&frame.url("/ui/jobs"))) title="List the jobs of this group" { (group.name) }
                @if group.paused { " " span .tag .is-warning { "paused" } } }
            td .c-number data-label="Waiting" { (format::number(group.waiting)) @if group.waiting_or_more { "+" } }
            td .c-number data-label="Running" { (format::number(group.running)) }
            td data-label="Limit" { (limits(group.limit, group.rate)) }
            td .c-actions { @if frame.rights.operate {
                (Action::post(url, label, done).method("PATCH").look(Look::Small)
                    .fields(html! { input type="hidden" name="paused" value=(paused) data-json="raw"; }))
            } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn row() -> QueueRow {
        let mut queue = QueueRecord::empty(HOSTILE);
        (queue.waiting, queue.limit, queue.rate) =
            (12_345, Some(5), Some(crate::rules::turns::Rate::per_second(9)));
        QueueRow {
            queue,
            retrying: 2,
            failed: 3,
            per_second: 1.0,
            age: Some(Duration::from_secs(61)),
            workers: Some(0),
            run: Percentiles::default(),
        }
    }

    fn group() -> GroupRecord {
        GroupRecord {
            queue: HOSTILE.into(),
            name: HOSTILE.into(),
            paused: true,
            limit: None,
            rate: None,
            waiting: 1000,
            waiting_or_more: true,
            running: 1,
            next_start_at: None,
        }
    }

    #[test]
    fn names_are_escaped_and_figures_are_shown() {
        let page = render(&Frame::of_operator("/ui/queues"), &[row()]);
        assert_escaped(&page);
        assert!(page.0.contains("12,345") && page.0.contains("5 at once, 9 per second"), "{}", page.0);
        assert_escaped(&render_one(
            &Frame::of_operator("/ui/queues/x"),
            &OneQueue { row: row(), named: None, groups: vec![group()] },
        ));
    }

    #[test]
    fn paused_groups_and_missing_workers_are_marked() {
        let mut row = row();
        (row.queue.name, row.queue.paused_groups) = ("mail".into(), 2);
        let page = render(&Frame::of_operator("/ui/queues"), std::slice::from_ref(&row)).0;
        assert!(page.contains("2 groups paused") && page.contains(">none<"), "{page}");
        let page = render_one(
            &Frame::of_operator("/ui/queues/mail"),
            &OneQueue { row, named: None, groups: Vec::new() },
        );
        assert!(
            page.0.contains(
                "No live worker takes jobs from this queue, so its 12,345 waiting jobs do not start"
            )
        );
        assert!(page.0.contains(">Pause queue<") && page.0.contains("Queue mail is paused."), "{}", page.0);
    }

    #[test]
    fn the_group_that_the_url_names_is_shown_and_marked() {
        let named = GroupRecord { name: "globex".into(), paused: false, ..group() };
        let frame = Frame {
            params: Params::default().with("group", "globex"),
            ..Frame::of_operator("/ui/queues/mail")
        };
        let one = OneQueue { row: row(), named: Some(named.clone()), groups: vec![group()] };
        let page = render_one(&frame, &one).0;
        assert_eq!(page.matches("is-named").count(), 1, "{page}");
        assert!(page.contains("id=\"group-globex\"") && page.contains("globex is paused."), "{page}");
        let one = OneQueue { row: row(), named: None, groups: vec![named, group()] };
        assert_eq!(render_one(&frame, &one).0.matches("is-named").count(), 1);
    }

    #[test]
    fn many_queues_can_be_filtered_and_are_not_all_shown() {
        let rows = |count| {
            let name = |n: usize| QueueRow { queue: QueueRecord::empty(&format!("q{n:03}")), ..row() };
            (0..count).map(name).collect::<Vec<_>>()
        };
        let frame = Frame::of_operator("/ui/queues");
        assert!(!render(&frame, &rows(19)).0.contains("Filter queues"));
        let page = render(&frame, &rows(201)).0;
        assert!(page.contains("Filter queues") && page.contains("The first 200 of 201"), "{page}");
        assert!(page.contains("queue-q199") && !page.contains("queue-q200"));
        let frame = Frame { params: Params::default().with("name", HOSTILE), ..frame };
        let page = render(&frame, &[]);
        assert!(page.0.contains("No queue matches"), "{}", page.0);
        assert_escaped(&page);
    }

    #[test]
    fn a_rate_that_the_form_cannot_represent_has_no_form() {
        let frame = Frame::of_operator("/ui/queues/x");
        let page = |rate| {
            let mut row = row();
            row.queue.rate = Some(rate);
            render_one(&frame, &OneQueue { row, groups: Vec::new(), named: None }).0
        };
        assert!(page(crate::rules::turns::Rate::per_second(9)).contains("/rate\""));
        let other = page(crate::rules::turns::Rate::per(100, Duration::from_secs(3600)));
        assert!(!other.contains("/rate\"") && other.contains("100 per hour"), "{other}");
    }

    #[test]
    fn a_reader_cannot_pause_or_limit() {
        let frame = Frame::of_reader("/ui/queues");
        assert!(!render(&frame, &[row()]).0.contains("<form"));
        let one = OneQueue { row: row(), named: Some(group()), groups: vec![group()] };
        assert!(!render_one(&frame, &one).0.contains("<form"));
    }
}
