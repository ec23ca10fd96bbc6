//! Queues: how many jobs wait and run, how old the oldest is, limits, groups, pausing.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::Path;
use axum::response::Response;
use chrono::TimeDelta;
use maud::{Markup, html};

use super::cache::GROUPS;
use super::layout::Section;
use super::url::{Params, encoded};
use super::widgets::{self, Action, Look, dash, empty, heading, rate};
use super::{Frame, View, format};
use crate::api::problem::{ApiResult, Problem};
use crate::api::stats::{self, Percentiles};
use crate::job::{Outcome, Status};
use crate::store::{Count, GroupRecord, QueueRecord, Tallied, WorkerRecord, start_of};

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
    let queues = load(&view).await?;
    Ok(view.respond(Section::Queues, "Queues", render(&view.frame, &queues)))
}

async fn load(view: &View) -> ApiResult<Vec<QueueRow>> {
    let data = &view.data;
    let hour_ago = start_of(60, view.frame.now) - TimeDelta::minutes(59);
    let (queues, counts, tallied, overdue, workers) = tokio::try_join!(
        data.queues(),
        data.counts(),
        data.tallied(hour_ago),
        data.overdue(),
        data.workers(),
    )?;
    let rights = &view.frame.rights;
    let mut known: BTreeMap<String, QueueRecord> =
        queues.iter().map(|queue| (queue.name.clone(), queue.clone())).collect();
    // A queue without waiting jobs and settings has history, too.
    for name in counts.iter().map(|count| &count.queue).chain(tallied.iter().map(|tally| &tally.queue)) {
        known.entry(name.clone()).or_insert_with(|| QueueRecord::empty(name));
    }
    let row = |queue: QueueRecord| {
        let ended: Vec<Tallied> = tallied.iter().filter(|tally| tally.queue == queue.name).cloned().collect();
        QueueRow {
            retrying: jobs(&counts, &queue.name, Status::Retrying),
            failed: jobs(&counts, &queue.name, Status::FailedPermanent),
            per_second: stats::rate(&ended, view.frame.now),
            age: overdue.iter().find(|(name, _)| *name == queue.name).map(|(_, age)| *age),
            workers: rights.covers_all().then(|| live_workers(&workers, &queue.name)),
            run: stats::run_seconds(ended.iter().filter(|tally| tally.outcome == Outcome::Succeeded)),
            queue,
        }
    };
    Ok(known.into_values().filter(|queue| rights.covers(&queue.name)).map(row).collect())
}

fn jobs(counts: &[Count], queue: &str, status: Status) -> u64 {
    counts.iter().filter(|count| count.queue == queue && count.status == status).map(|count| count.jobs).sum()
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
        @if rows.is_empty() {
            (empty("No queues yet", html! {
                p { "A queue exists as soon as a job names it: " code { "{\"queue\": \"mail\", …}" }
                    ". Jobs without a queue are in " code { "default" } "." }
            }))
        } @else {
            div .panel .flush { table #queues .list {
                thead { tr {
                    th { "Queue" } th .c-number { "Waiting" } th .c-number { "Running" } th .c-number { "Retrying" }
                    th .c-number { "Failed" } th .c-number { "Per second" } th .c-number { "Oldest due" }
                    th .c-number { "95 % run within" } th .c-number { "Workers" } th { "Limit" } th .c-actions { span .unseen { "Actions" } }
                } }
                tbody { @for row in rows { (table_row(frame, row)) } }
            } }
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
            td .strong { a data-open href=(frame.url(&format!("/ui/queues/{}", encoded(&queue.name)))) { (queue.name) }
                @if queue.paused { " " span .tag .is-warning { "paused" } } }
            (cell("Waiting", Status::Queued, queue.waiting, queue.waiting_estimated))
            (cell("Running", Status::Running, queue.running, false))
            (cell("Retrying", Status::Retrying, row.retrying, false))
            (cell("Failed", Status::FailedPermanent, row.failed, false))
            td .c-number data-label="Per second" { (format!("{:.1}", row.per_second)) }
            td .c-number data-label="Oldest due" { @match row.age { Some(age) => (format::duration(age)), None => (dash()) } }
            td .c-number data-label="95 % run within" { @match row.run.p95 { Some(p95) => (format::seconds(p95)), None => (dash()) } }
            td .c-number data-label="Workers" { @match row.workers {
                Some(0) => span .tag .is-warning { "none" },
                Some(n) => (n),
                None => (dash()),
            } }
            td data-label="Limit" { (limits(queue.limit, queue.rate)) }
            td .c-actions { (pause(frame, queue)) }
        }
    }
}

fn limits(limit: Option<u32>, per: Option<crate::turns::Rate>) -> Markup {
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

fn pause(frame: &Frame, queue: &QueueRecord) -> Markup {
    if !frame.rights.operate {
        return html! {};
    }
    let url = |action: &str| frame.url(&format!("/queues/{}/{action}", encoded(&queue.name)));
    html! {
        @if queue.paused {
            (Action::post(url("resume"), "Resume", "The queue runs again.").look(Look::Small))
        } @else {
            (Action::post(url("pause"), "Pause", "The queue is paused.").look(Look::Small)
                .confirm(format!("Pause {}? Running jobs continue; no other job of it starts.", queue.name)))
        }
    }
}

// ---- one queue -------------------------------------------------------------

/// One queue with its groups.
struct OneQueue {
    row: QueueRow,
    groups: Vec<GroupRecord>,
}

pub(super) async fn one(view: View, Path(name): Path<String>) -> ApiResult<Response> {
    view.caller.may_use(&name)?;
    let after = view.frame.params.get("after").unwrap_or_default();
    let groups = view.data.groups(&name, after).await.map_err(Problem::in_url)?;
    let found = load(&view).await?.into_iter().find(|row| row.queue.name == name);
    let row = found.unwrap_or_else(|| QueueRow {
        queue: QueueRecord::empty(&name),
        retrying: 0,
        failed: 0,
        per_second: 0.0,
        age: None,
        workers: None,
        run: Percentiles::default(),
    });
    let content = render_one(&view.frame, &OneQueue { row, groups: groups.to_vec() });
    Ok(view.respond(Section::Queues, &name, content))
}

fn render_one(frame: &Frame, one: &OneQueue) -> Markup {
    let (row, queue) = (&one.row, &one.row.queue);
    let title = html! { (queue.name) @if queue.paused { " " (widgets::state(Status::Retrying, "paused")) } };
    let figure = |name: &str, status: Status, jobs: u64, estimated: bool, note: String| {
        let value = html! { a .quiet href=(jobs_url(frame, &queue.name, status)) { @if estimated { "~" } (format::number(jobs)) } };
        widgets::figure(name, value, note)
    };
    html! {
        p .crumbs { a href=(frame.url("/ui/queues")) { "Queues" } }
        (heading(title, "", pause(frame, queue)))
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
                    (Action::post(url("limit"), "Set", "The limit is set.").method("PUT").fields(limit))
                    (Action::post(url("rate"), "Set", "The rate is set.").method("PUT").fields(rate_field(queue.rate)))
                    (Action::post(url("group-defaults"), "Set", "The limit is set.").method("PATCH").fields(per_group))
                    p .faint { "Limits apply to all processes together and take effect at once. An empty field removes one." }
                }
            }
        }
    }
}

/// Starts per second; other periods are set with the API.
fn rate_field(current: Option<crate::turns::Rate>) -> Markup {
    let per_second = current.filter(|rate| rate.period_ms == 1_000).map(|rate| rate.starts);
    html! {
        label { span { "Starts per second" }
            input name="rate" data-json="rate" type="number" min="1" placeholder="no limit" value=[per_second] data-keep; }
    }
}

fn groups(frame: &Frame, one: &OneQueue) -> Markup {
    let queue = &one.row.queue.name;
    if one.groups.is_empty() {
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
            table #groups .list {
                thead { tr { th { "Group" } th .c-number { "Waiting" } th .c-number { "Running" } th { "Limit" }
                    th .c-number { "Weight" } th .c-actions { span .unseen { "Actions" } } } }
                tbody { @for group in &one.groups { (group_row(frame, queue, group)) } }
            }
        }
        @if let Some(next) = next { nav .paging aria-label="More groups" { a .button .small href=(next) { "More groups" } } }
    }
}

fn group_row(frame: &Frame, queue: &str, group: &GroupRecord) -> Markup {
    let jobs = Params::default().with("queue", queue).with("group", &group.name);
    let url = frame.url(&format!("/queues/{}/groups/{}", encoded(queue), encoded(&group.name)));
    let (label, done, paused) = if group.paused {
        ("Resume", "The group runs again.", "false")
    } else {
        ("Pause", "The group is paused.", "true")
    };
    html! {
        tr #(format!("group-{}", encoded(&group.name))) data-row {
            td .strong { a data-open href=(jobs.url(&frame.url("/ui/jobs"))) { (group.name) }
                @if group.paused { " " span .tag .is-warning { "paused" } } }
            td .c-number data-label="Waiting" { (format::number(group.waiting)) @if group.waiting_or_more { "+" } }
            td .c-number data-label="Running" { (format::number(group.running)) }
            td data-label="Limit" { (limits(group.limit, group.rate)) }
            td .c-number data-label="Weight" { (group.weight) }
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
        (queue.waiting, queue.limit, queue.rate) = (12_345, Some(5), Some(crate::turns::Rate::per_second(9)));
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
            weight: 1,
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
            &OneQueue { row: row(), groups: vec![group()] },
        ));
    }

    #[test]
    fn a_reader_cannot_pause_or_limit() {
        let frame = Frame::of_reader("/ui/queues");
        assert!(!render(&frame, &[row()]).0.contains("<form"));
        let one = OneQueue { row: row(), groups: vec![group()] };
        assert!(!render_one(&frame, &one).0.contains("<form"));
    }
}
