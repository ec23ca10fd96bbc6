//! Flows: graphs of jobs. The list, and one flow with its graph and tasks.

use std::sync::Arc;

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};

use super::layout::Section;
use super::widgets::{
    self, Action, Look, copy_button, empty, figure, heading, job_link, kind_link, optional_time, queue_link,
    segments, snippet, time,
};
use super::{Frame, View, flow_graph, format, why};
use crate::api::explain::Explanation;
use crate::api::problem::{ApiResult, Problem};
use crate::job::{FlowId, JobId, JobRecord, Status};
use crate::rules::flow::Condition;
use crate::store::{FlowFilter, FlowRecord, FlowStatus, LinkRecord, TaskRecord};

/// The number of flows on a page.
const PAGE_SIZE: u32 = 50;
/// The number of tasks that are read and drawn.
const MAX_TASKS: usize = 2_000;
const TASKS_PER_READ: u32 = 1_000;
/// The number of tasks in the table.
const LISTED_TASKS: usize = 200;

pub(super) async fn page(view: View) -> ApiResult<Response> {
    view.caller.may_use_all()?;
    let params = &view.frame.params;
    let filter = FlowFilter {
        name: params.get("name").map(str::to_owned),
        open: match params.get("open") {
            Some("true") => Some(true),
            Some("false") => Some(false),
            _ => None,
        },
        before: params.get("cursor").and_then(|cursor| cursor.parse::<FlowId>().ok()),
        limit: PAGE_SIZE,
    };
    let flows = view.data.flows(&filter).await?;
    Ok(view.respond(Section::Flows, "Flows", render(&view.frame, &filter, &flows)))
}

fn state(status: FlowStatus) -> Markup {
    let colour = match status {
        FlowStatus::Running => Status::Running,
        FlowStatus::Succeeded => Status::Succeeded,
        FlowStatus::Failed => Status::FailedPermanent,
        FlowStatus::Cancelled => Status::Cancelled,
    };
    widgets::state(colour, status.as_str())
}

fn render(frame: &Frame, filter: &FlowFilter, flows: &[FlowRecord]) -> Markup {
    let link = |name: &'static str, open: Option<bool>| {
        let params = frame.params.without(&["open", "cursor"]);
        let params = match open {
            Some(open) => params.with("open", open.to_string()),
            None => params,
        };
        (name, frame.here(&params), filter.open == open)
    };
    let links = [link("All", None), link("Open", Some(true)), link("Ended", Some(false))];
    let next = flows.last().filter(|_| flows.len() == PAGE_SIZE as usize);
    html! {
        (heading("Flows", "Jobs that wait for each other, newest first", segments("Which flows", links.into_iter())))
        form #filters .filters role="search" aria-label="Filter flows" action=(frame.url(&frame.path)) {
            @if let Some(open) = frame.params.get("open") { input type="hidden" name="open" value=(open); }
            label { span { "Name" } input name="name" value=[filter.name.as_ref()] placeholder="any" autocomplete="off"; }
            button .button { "Filter" }
        }
        @if flows.is_empty() { (none(frame)) } @else {
            div .panel .flush { table #flows .list {
                thead { tr { th .c-status { "Status" } th { "Name" } th .c-id { "Id" } th .c-number { "Tasks" } th .c-number { "Open" }
                    th .c-number { "Failed" } th .c-time { "Created" } th .c-time { "Ended" } th .c-time { "Deadline" } } }
                tbody { @for flow in flows { (row(frame, flow)) } }
            } }
        }
        nav #paging .paging aria-label="Older and newer" {
            @if filter.before.is_some() { a .button .small href=(frame.here(&frame.params.without(&["cursor"]))) { "Newest" } }
            @if let Some(last) = next { a .button .small rel="next" href=(frame.here(&frame.params.with("cursor", last.id.to_string()))) { "Older" } }
        }
    }
}

fn none(frame: &Frame) -> Markup {
    if frame.params != super::url::Params::default() {
        return empty(
            "No flow matches",
            html! { p { a href=(frame.url("/ui/flows")) { "Show all flows" } "." } },
        );
    }
    empty(
        "No flows yet",
        html! {
            p { "A flow is a graph of jobs: a task starts when those in its " code { "after" } " have ended as it needs." }
            (snippet(&format!(
                "curl -X POST http://localhost:8080{}/flows -H 'content-type: application/json' -d '{{\n  \
                 \"name\": \"import\",\n  \"tasks\": [\n    \
                 {{\"task\": \"fetch\", \"kind\": \"summarize_text\", \"payload\": {{\"text\": \"Ships come.\"}}}},\n    \
                 {{\"task\": \"parse\", \"after\": [\"fetch\"], \"kind\": \"summarize_text\", \"payload\": {{\"text\": \"Ships go.\"}}}}\n  ]\n}}'",
                frame.base
            )))
        },
    )
}

fn row(frame: &Frame, flow: &FlowRecord) -> Markup {
    let url = frame.url(&format!("/ui/flows/{}", flow.id));
    html! {
        tr #(format!("flow-{}", flow.id)) data-row {
            td .c-status { (state(flow.status)) }
            td .strong { a data-open href=(url) { (flow.name) } }
            td .c-id { a .id href=(url) title=(flow.id) { (format::id_ends(flow.id.0)) } }
            td .c-number data-label="Tasks" { (format::number(flow.members)) @if !flow.sealed { "+" } }
            td .c-number data-label="Open" { (format::number(flow.open)) }
            td .c-number data-label="Failed" { @if flow.failed > 0 { span .error { (format::number(flow.failed)) } } @else { span .faint { "0" } } }
            td .c-time data-label="Created" { (time(flow.created_at, frame)) }
            td .c-time data-label="Ended" { (optional_time(flow.ended_at, frame)) }
            td .c-time data-label="Deadline" { (optional_time(flow.deadline, frame)) }
        }
    }
}

// ---- one flow --------------------------------------------------------------

/// A flow with its tasks.
struct OneFlow {
    flow: Arc<FlowRecord>,
    /// The first ones.
    tasks: Vec<TaskRecord>,
    /// The job whose children these are.
    parent: Option<JobId>,
    /// The first task that waits, and why it does not run.
    blocked: Option<(Arc<JobRecord>, Arc<Explanation>)>,
}

pub(super) async fn one(view: View, Path(id): Path<String>) -> ApiResult<Response> {
    // A flow can have jobs of any queue.
    view.caller.may_use_all()?;
    let id: FlowId = id.parse().map_err(Problem::in_url)?;
    let flow = view.data.flow(id).await?;
    let mut tasks: Vec<TaskRecord> = Vec::new();
    while tasks.len() < MAX_TASKS {
        let page = view.data.tasks(id, tasks.last().map(|task| task.id), TASKS_PER_READ).await?;
        tasks.extend(page.iter().cloned());
        if page.len() < TASKS_PER_READ as usize {
            break;
        }
    }
    let parent = view.data.glance(JobId(id.0)).await?.first().map(|job| job.id);
    let title = format!("Flow {}", flow.name);
    let blocked = match blocked(&flow, &tasks) {
        Some(task) => {
            let job = view.data.job(task).await?;
            let explanation = view.data.explanation(view.caller.queues(), &job).await?;
            Some((job, explanation))
        }
        None => None,
    };
    let content = render_one(&view.frame, &OneFlow { flow, tasks, parent, blocked });
    Ok(view.respond(Section::Flows, &title, content))
}

fn render_one(frame: &Frame, one: &OneFlow) -> Markup {
    let flow = &one.flow;
    let id = flow.id.to_string();
    let title = html! { (flow.name) " " (state(flow.status)) };
    html! {
        p .crumbs { a href=(frame.url("/ui/flows")) { "Flows" } }
        (heading(title, html! { span .id { (id) } (copy_button(&id)) }, actions(frame, flow)))
        (waits_for(frame, one))
        dl #figures .figures {
            (figure("Tasks", format::number(flow.members), if flow.sealed { "no more can be added" } else { "more can be added" }))
            (figure("Open", format::number(flow.open), "have not ended"))
            (figure("Failed", format::number(flow.failed), "did not succeed"))
            (figure("Created", time(flow.created_at, frame), flow.created_at.format("%-d %b %H:%M UTC").to_string()))
            (figure("Ended", optional_time(flow.ended_at, frame), flow.ended_at.map_or("not yet".to_owned(), |at| at.format("%-d %b %H:%M UTC").to_string())))
            @if let Some(parent) = one.parent { (figure("Children of", job_link(parent, frame), "the job that spawned them")) }
            @if flow.deadline.is_some() { (figure("Deadline", optional_time(flow.deadline, frame), "then it is cancelled")) }
        }
        @if (one.tasks.len() as u64) < flow.members {
            p .notice .is-info { "Shows " (format::number(one.tasks.len() as u64)) " of " (format::number(flow.members)) " tasks." }
        }
        (flow_graph::render(frame, &one.tasks))
        (task_table(frame, &one.tasks))
    }
}

/// The tasks of an open flow that have not ended and wait for no other task: those that run, then the others.
fn open(tasks: &[TaskRecord]) -> Vec<&TaskRecord> {
    let with = |status: Status| tasks.iter().filter(move |task| task.status == status && !task.held);
    with(Status::Running).chain(with(Status::Retrying)).chain(with(Status::Queued)).collect()
}

/// The first open task that does not run. Only one is explained: an explanation costs several reads.
fn blocked(flow: &FlowRecord, tasks: &[TaskRecord]) -> Option<JobId> {
    let is_open = flow.status == FlowStatus::Running;
    let open = open(tasks);
    open.iter().find(|task| is_open && task.status != Status::Running).map(|task| task.id)
}

/// What an open flow waits for, and why that does not run.
fn waits_for(frame: &Frame, one: &OneFlow) -> Markup {
    if one.flow.status != FlowStatus::Running {
        return html! {};
    }
    let open = open(&one.tasks);
    let link = |task: &TaskRecord| {
        html! { a .strong href=(frame.url(&format!("/ui/jobs/{}", task.id))) { (name(task)) } }
    };
    // The task may have started since the tasks were read.
    let blocked =
        one.blocked.as_ref().filter(|(job, _)| job.finished_at.is_none() && job.status != Status::Running);
    let reason = blocked.and_then(|(job, explanation)| {
        let task = one.tasks.iter().find(|task| task.id == job.id)?;
        let causes = &explanation.causes;
        let cause = causes.first()?;
        Some(html! {
            p { (link(task)) " is " (widgets::status_word(task.status)) ": " (why::with_links(frame, job, &cause.message)) "." }
            (why::buttons(frame, job, causes))
        })
    });
    let needs_operator =
        blocked.is_some_and(|(_, explanation)| explanation.causes.iter().any(why::needs_operator));
    let class = if needs_operator { "notice is-warning" } else { "notice is-info" };
    html! {
        section #why class=(class) {
            h2 { "What it waits for" }
            @if open.is_empty() {
                p { @if one.flow.sealed { "The tasks that can run have ended; the next ones are released in a moment." }
                    @else { "Its seal: more tasks can be added." } }
            }
            @if open.len() > 1 || reason.is_none() && !open.is_empty() {
                p {
                    @for (i, task) in open.iter().take(5).enumerate() {
                        @if i > 0 { ", " }
                        (link(task)) " (" (widgets::status_word(task.status)) ")"
                    }
                    @if open.len() > 5 { " and " (open.len() - 5) " more" }
                }
            }
            @if let Some(reason) = reason { (reason) }
        }
    }
}

fn actions(frame: &Frame, flow: &FlowRecord) -> Markup {
    if !frame.rights.operate {
        return html! {};
    }
    let url = |action: &str| frame.url(&format!("/flows/{}/{action}", flow.id));
    html! {
        @if flow.ended_at.is_none() && !flow.cancelled {
            (Action::post(url("cancel"), "Cancel flow", format!("{} is being cancelled.", flow.name)).look(Look::Danger)
                .confirm("Cancel this flow? Waiting tasks are cancelled, and running ones are asked to stop."))
        }
        @if flow.failed > 0 || flow.status == FlowStatus::Cancelled {
            (Action::post(url("retry"), "Retry failed part", format!("What had not succeeded of {} runs again.", flow.name)).look(Look::Primary)
                .confirm("Run every task again that did not succeed? What succeeded is not repeated."))
        }
    }
}

/// The name of a task; without one, its kind.
pub(super) fn name(task: &TaskRecord) -> &str {
    task.task.as_deref().unwrap_or(&task.kind)
}

fn task_table(frame: &Frame, tasks: &[TaskRecord]) -> Markup {
    html! {
        section .panel .flush {
            div .panel-head { h2 { "Tasks" } span .faint { (format::number(tasks.len() as u64)) } }
            table #tasks .list {
                thead { tr { th .c-status { "Status" } th .c-name { "Task" } th .c-name { "Kind" } th .c-name { "Queue" } th { "Waits for" } th .c-id { "Id" } } }
                tbody { @for task in tasks.iter().take(LISTED_TASKS) { tr #(format!("task-{}", task.id)) data-row {
                    td .c-status { @if task.held { (widgets::held()) }
                        @else if task.skipped { (widgets::state(Status::Cancelled, "skipped")) }
                        @else { (widgets::status(task.status)) } }
                    td .strong .c-name { a data-open href=(frame.url(&format!("/ui/jobs/{}", task.id))) { (name(task)) } }
                    td .c-name data-label="Kind" { (kind_link(&task.kind, frame)) }
                    td .c-name data-label="Queue" { (queue_link(&task.queue, frame)) }
                    td data-label="Waits for" { @for link in task.after.iter().take(10) { (waited(link)) " " }
                        @if task.after.len() > 10 { "and " (task.after.len() - 10) " more" } }
                    td .c-id { (job_link(task.id, frame)) }
                } } }
            }
            @if tasks.len() > LISTED_TASKS { p .panel-body .faint { "The first " (LISTED_TASKS) " are listed." } }
        }
    }
}

fn waited(link: &LinkRecord) -> Markup {
    let (class, mark) = match link.met {
        Some(true) => ("tag is-met", "✓ "),
        Some(false) => ("tag is-unmet", "✗ "),
        None => ("tag", ""),
    };
    let name = link.task.clone().unwrap_or_else(|| format::id_ends(link.id.0));
    let condition = match link.condition {
        Condition::Succeeded => "",
        Condition::Ended => " ended",
        Condition::Failed => " failed",
    };
    html! { span class=(class) { (mark) (name) (condition) } }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    pub(in super::super) fn task(n: u128, name: &str, after: &[u128]) -> TaskRecord {
        let id = |n: u128| JobId(uuid::Uuid::from_u128(n));
        let link = |parent: &u128| LinkRecord {
            id: id(*parent),
            task: Some(format!("task {parent}")),
            condition: Condition::Succeeded,
            met: None,
        };
        TaskRecord {
            id: id(n),
            task: Some(name.into()),
            kind: HOSTILE.into(),
            queue: HOSTILE.into(),
            status: Status::Queued,
            held: !after.is_empty(),
            skipped: false,
            after: after.iter().map(link).collect(),
        }
    }

    pub(in super::super) fn flow(status: FlowStatus) -> FlowRecord {
        FlowRecord {
            id: FlowId(uuid::Uuid::nil()),
            name: HOSTILE.into(),
            status,
            members: 2,
            open: 1,
            failed: 1,
            sealed: true,
            cancelled: false,
            idempotency_key: None,
            created_at: "2031-05-06T07:00:00Z".parse().unwrap(),
            deadline: None,
            ended_at: None,
            is_of_children: false,
        }
    }

    #[test]
    fn names_are_escaped_and_the_page_says_what_the_flow_waits_for() {
        let tasks = vec![task(1, HOSTILE, &[]), task(2, "second", &[1])];
        assert_eq!(blocked(&flow(FlowStatus::Running), &tasks), Some(tasks[0].id));
        let mut job = super::super::jobs::tests::hostile_job(Status::Queued);
        (job.id, job.finished_at) = (tasks[0].id, None);
        let cause = crate::api::explain::Cause {
            reason: crate::api::explain::Reason::NoWorkerForQueue,
            message: "no live worker takes jobs from queue `search`".into(),
            remedy: None,
        };
        let explanation = Arc::new(Explanation::of_causes(&job, vec![cause]));
        let blocked = Some((Arc::new(job), explanation));
        let one = OneFlow { flow: Arc::new(flow(FlowStatus::Running)), tasks, parent: None, blocked };
        let page = render_one(&Frame::of_operator("/ui/flows/x"), &one);
        assert_escaped(&page);
        assert!(page.0.contains("What it waits for") && page.0.contains("is-warning"), "{}", page.0);
        let reason = "</a> is queued: no live worker takes jobs from queue <a href=\"/q/ui/queues/search\">search</a>.";
        assert!(page.0.contains(reason), "{}", page.0);
        assert_escaped(&render(
            &Frame::of_operator("/ui/flows"),
            &FlowFilter::default(),
            &[flow(FlowStatus::Failed)],
        ));
    }

    #[test]
    fn a_reader_cannot_cancel_or_retry() {
        let one = OneFlow {
            flow: Arc::new(flow(FlowStatus::Failed)),
            tasks: Vec::new(),
            parent: None,
            blocked: None,
        };
        assert!(!render_one(&Frame::of_reader("/ui/flows/x"), &one).0.contains("<form"));
    }
}
