//! Worker processes: where they run, what they take, what they run, and whether they are alive.

use std::collections::BTreeMap;

use axum::response::Response;
use maud::{Markup, html};

use super::layout::Section;
use super::widgets::{self, Action, dash, empty, heading, job_link, since, snippet, time};
use super::{Frame, View, format};
use crate::api::problem::ApiResult;
use crate::job::{JobRecord, Status, WorkerId};
use crate::store::{ALL_QUEUES, ListFilter, Payloads, WorkerRecord};

/// How many running jobs of a worker are listed.
const SHOWN_JOBS: usize = 8;

/// What the page shows.
struct Workers {
    workers: Vec<WorkerRecord>,
    /// Running jobs, by the worker that holds them; not all if very many run.
    running: BTreeMap<WorkerId, Vec<JobRecord>>,
}

pub(super) async fn page(view: View) -> ApiResult<Response> {
    view.caller.may_use_all()?;
    let filter = ListFilter {
        statuses: vec![Status::Running],
        limit: ListFilter::MAX_LIMIT,
        payloads: Payloads::Omit,
        ..ListFilter::default()
    };
    let (workers, jobs) = tokio::try_join!(view.data.workers(), view.data.jobs(&filter))?;
    let mut running: BTreeMap<WorkerId, Vec<JobRecord>> = BTreeMap::new();
    for job in &jobs.jobs {
        if let Some(worker) = job.locked_by {
            running.entry(worker).or_default().push(job.clone());
        }
    }
    let content = render(&view.frame, &Workers { workers: workers.to_vec(), running });
    Ok(view.respond(Section::Workers, "Workers", content))
}

fn render(frame: &Frame, loaded: &Workers) -> Markup {
    let (dead, registered): (Vec<_>, Vec<_>) =
        loaded.workers.iter().partition(|worker| worker.dead_at.is_some());
    let sweep = Action::post(frame.url("/sweep"), "Sweep now", "The sweep is done.")
        .confirm("Return the jobs of dead workers to their queues now? Workers and servers also do this by themselves.");
    html! {
        (heading("Workers", format::counted(registered.len() as u64, "process", "processes"),
            html! { @if frame.rights.operate && !loaded.workers.is_empty() { (sweep) } }))
        @if registered.is_empty() {
            (empty("No workers", html! {
                p { "Jobs run when a worker takes them. Start one for the built-in kinds:" }
                (snippet("longshore worker"))
                p { "Your own kinds run in your own program: a Rust program with " code { "Worker::builder" }
                    ", or any language over the API." }
            }))
        } @else {
            div #workers .cards { @for worker in registered { (card(frame, worker, loaded.running.get(&worker.id))) } }
        }
        @if !dead.is_empty() {
            details #dead .panel .flush {
                summary .panel-head { h2 { "Signed off or dead" } span .faint { (dead.len()) } }
                table .list {
                    thead { tr { th { "Worker" } th { "Host" } th .c-time { "Started" } th .c-time { "Last heartbeat" } th .c-time { "Ended" } } }
                    tbody { @for worker in dead { tr {
                        td .strong { (worker.name) } td { (place(worker)) } td .c-time { (time(worker.started_at, frame)) }
                        td .c-time { (time(worker.heartbeat_at, frame)) } td .c-time { (widgets::optional_time(worker.dead_at, frame)) }
                    } } }
                }
            }
        }
    }
}

fn card(frame: &Frame, worker: &WorkerRecord, jobs: Option<&Vec<JobRecord>>) -> Markup {
    let jobs = jobs.map(Vec::as_slice).unwrap_or_default();
    let state = if worker.stale {
        widgets::state(Status::FailedPermanent, "no heartbeat")
    } else {
        widgets::state(Status::Succeeded, "alive")
    };
    let takes_nothing = worker.kinds.as_ref().is_some_and(Vec::is_empty);
    html! {
        section #(format!("worker-{}", worker.id)) .panel .worker {
            div .panel-head { h2 title=(worker.id) { (worker.name) } (state) }
            dl .facts {
                dt { "Running" } dd { (worker.running) " of " (worker.concurrency)
                    " " meter min="0" max=(worker.concurrency) value=(worker.running.min(worker.concurrency.into())) aria-label="Busy slots" {} }
                dt { "Heartbeat" } dd { (time(worker.heartbeat_at, frame)) span .faint { ", stale after " (format::duration(worker.stale_after)) } }
                dt { "Started" } dd { (time(worker.started_at, frame)) }
                dt { "Host" } dd { (place(worker)) }
                dt { "Version" } dd { @match &worker.version { Some(version) => (version), None => (dash()) } }
                dt { "Queues" } dd { @for queue in &worker.queues {
                    @if queue == ALL_QUEUES { span .tag { "all queues" } } @else { span .tag { (queue) } } " "
                } }
                dt { "Kinds" } dd { @match &worker.kinds {
                    None => span .tag { "any kind" },
                    Some(_) if takes_nothing => "none: it only does upkeep",
                    Some(kinds) => @for kind in kinds { span .tag { (kind) } " " },
                } }
            }
            @if !jobs.is_empty() {
                ul .mini { @for job in jobs.iter().take(SHOWN_JOBS) {
                    li { (job_link(job.id, frame)) " " (job.kind)
                        @if let Some(at) = job.locked_at { span .faint { (since(at, frame)) } } }
                }
                @if jobs.len() > SHOWN_JOBS { li .faint { "and " (jobs.len() - SHOWN_JOBS) " more" } }
                }
            }
        }
    }
}

fn place(worker: &WorkerRecord) -> Markup {
    html! {
        @match (&worker.host, worker.pid) {
            (Some(host), Some(pid)) => { (host) span .faint { ", process " (pid) } },
            (Some(host), None) => (host),
            (None, Some(pid)) => { "process " (pid) },
            (None, None) => (dash()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs::tests::hostile_job;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn worker(id: WorkerId) -> WorkerRecord {
        let at = "2031-05-06T07:00:00Z".parse().unwrap();
        WorkerRecord {
            id,
            name: HOSTILE.into(),
            queues: vec![HOSTILE.into()],
            kinds: Some(vec![HOSTILE.into()]),
            concurrency: 4,
            stale_after: std::time::Duration::from_secs(60),
            started_at: at,
            heartbeat_at: at,
            dead_at: None,
            stale: true,
            running: 1,
            host: Some(HOSTILE.into()),
            pid: Some(7),
            version: Some(HOSTILE.into()),
        }
    }

    #[test]
    fn names_hosts_and_kinds_are_escaped() {
        let id = WorkerId::new();
        let dead = WorkerRecord {
            dead_at: Some("2031-05-06T07:00:00Z".parse().unwrap()),
            ..worker(WorkerId::new())
        };
        let running = BTreeMap::from([(id, vec![hostile_job(Status::Running)])]);
        let page =
            render(&Frame::of_operator("/ui/workers"), &Workers { workers: vec![worker(id), dead], running });
        assert_escaped(&page);
        assert!(page.0.contains("no heartbeat") && page.0.contains("process 7"), "{}", page.0);
    }

    #[test]
    fn without_workers_the_page_says_how_to_start_one() {
        let page = render(
            &Frame::of_reader("/ui/workers"),
            &Workers { workers: Vec::new(), running: BTreeMap::new() },
        );
        assert!(page.0.contains("longshore worker") && !page.0.contains("<form"), "{}", page.0);
    }
}
