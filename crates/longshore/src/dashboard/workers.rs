//! Worker processes: where they run, what they take, what they run, and whether they are alive.

use std::collections::BTreeMap;

use axum::response::Response;
use maud::{Markup, html};

use super::layout::Section;
use super::url::encoded;
use super::widgets::{self, Action, MAX_ROWS, dash, empty, heading, job_link, since, snippet, time};
use super::{Frame, View, format};
use crate::api::problem::ApiResult;
use crate::job::{JobRecord, Status, WorkerId};
use crate::rules::enqueue::ALL_QUEUES;
use crate::store::{ListFilter, Payloads, WorkerRecord};

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
    let sweep = Action::post(frame.url("/sweep"), "Sweep now", "The jobs of dead workers are back in their queues.")
        .confirm("Return the jobs of dead workers to their queues now? Live workers and servers also do this by themselves.");
    let note = html! {
        (format::counted(registered.len() as u64, "process", "processes"))
        @if frame.rights.operate && !loaded.workers.is_empty() { " · a sweep returns the jobs of dead workers to their queues" }
    };
    html! {
        (heading("Workers", note,
            html! { @if frame.rights.operate && !loaded.workers.is_empty() { (sweep) } }))
        @if registered.is_empty() {
            (empty("No workers", html! {
                p { "Jobs run when a worker takes them. Start one for the built-in kinds:" }
                (snippet("longshore worker"))
                p { "Your own kinds run in your own program: a Rust program with " code { "Worker::builder" }
                    ", or any language over the API." }
            }))
        } @else {
            div #workers .cards { @for worker in registered.iter().copied().take(MAX_ROWS) { (card(frame, worker, loaded.running.get(&worker.id))) } }
        }
        @if registered.len() > MAX_ROWS { p .faint { "The newest " (MAX_ROWS) " of " (format::number(registered.len() as u64)) " workers." } }
        @if !dead.is_empty() {
            details #dead .panel .flush {
                summary .panel-head { h2 { (past(&dead)) } }
                table .list {
                    thead { tr { th { "Worker" } th .c-status { "End" } th { "Host" } th .c-time { "Started" } th .c-time { "Last heartbeat" } th .c-time { "Ended" } } }
                    tbody { @for worker in dead.iter().copied().take(MAX_ROWS) { tr {
                        td .strong { (worker.name) }
                        td .c-status data-label="End" { @if is_lost(worker) { (widgets::state(Status::FailedPermanent, "declared dead")) }
                            @else { (widgets::state(Status::Cancelled, "signed off")) } }
                        td data-label="Host" { (place(worker)) } td .c-time data-label="Started" { (time(worker.started_at, frame)) }
                        td .c-time data-label="Last heartbeat" { (time(worker.heartbeat_at, frame)) } td .c-time data-label="Ended" { (widgets::optional_time(worker.dead_at, frame)) }
                    } } }
                }
            }
        }
    }
}

/// Whether a worker that is no longer alive stopped sending heartbeats. One that signs off has sent one shortly
/// before.
pub(super) fn is_lost(worker: &WorkerRecord) -> bool {
    worker.dead_at.is_some_and(|dead| format::between(worker.heartbeat_at, dead) >= worker.stale_after)
}

/// How the past workers ended: `3 signed off, 1 declared dead`.
fn past(dead: &[&WorkerRecord]) -> String {
    let lost = dead.iter().filter(|worker| is_lost(worker)).count();
    let parts = [(dead.len() - lost, "signed off"), (lost, "declared dead")];
    let parts: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, word)| format!("{n} {word}")).collect();
    parts.join(", ")
}

/// Whether a worker is alive. Half of the time after which it is stale is already late.
fn state(frame: &Frame, worker: &WorkerRecord) -> Markup {
    let silent = format::between(worker.heartbeat_at, frame.now);
    let late = || format!("no heartbeat for {}", format::duration(silent));
    if worker.stale {
        widgets::state(Status::FailedPermanent, &late())
    } else if silent > worker.stale_after / 2 {
        widgets::state(Status::Retrying, &late())
    } else {
        widgets::state(Status::Succeeded, "alive")
    }
}

fn card(frame: &Frame, worker: &WorkerRecord, jobs: Option<&Vec<JobRecord>>) -> Markup {
    let jobs = jobs.map(Vec::as_slice).unwrap_or_default();
    let takes_nothing = worker.kinds.as_ref().is_some_and(Vec::is_empty);
    html! {
        section #(format!("worker-{}", worker.id)) .panel .worker {
            div .panel-head { h2 title=(worker.id) { (worker.name) } (state(frame, worker)) }
            dl .facts {
                dt { "Running" } dd { (worker.running) " of " (worker.concurrency)
                    " " meter min="0" max=(worker.concurrency) value=(worker.running.min(worker.concurrency.into())) aria-label="Busy slots" {} }
                dt { "Heartbeat" } dd { (time(worker.heartbeat_at, frame)) span .faint { ", stale after " (format::duration(worker.stale_after)) } }
                dt { "Started" } dd { (time(worker.started_at, frame)) }
                dt { "Host" } dd { (place(worker)) }
                dt { "Version" } dd { @match &worker.version { Some(version) => (version), None => (dash()) } }
                dt { "Queues" } dd { @for queue in &worker.queues {
                    @if queue == ALL_QUEUES { span .tag { "all queues" } }
                    @else { a .tag href=(frame.url(&format!("/ui/queues/{}", encoded(queue)))) { (queue) } } " "
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
        assert!(page.0.contains("no heartbeat for 8 min 9 s") && page.0.contains("process 7"), "{}", page.0);
    }

    #[test]
    fn a_late_heartbeat_is_not_shown_as_alive() {
        let frame = Frame::of_operator("/ui/workers");
        let shown = |stale_after: u64| {
            let stale_after = std::time::Duration::from_secs(stale_after);
            let worker = WorkerRecord { stale: false, stale_after, ..worker(WorkerId::new()) };
            state(&frame, &worker).0
        };
        // Its last heartbeat is 489 s old.
        assert!(shown(1_000).contains("is-succeeded"), "{}", shown(1_000));
        assert!(shown(900).contains("is-retrying") && shown(900).contains("no heartbeat for 8 min 9 s"));
    }

    #[test]
    fn past_workers_have_signed_off_or_were_declared_dead() {
        let ended = |seconds: i64| {
            let worker = worker(WorkerId::new());
            let dead_at = Some(worker.heartbeat_at + chrono::TimeDelta::seconds(seconds));
            WorkerRecord { dead_at, ..worker }
        };
        let workers = vec![ended(3), ended(61), ended(59)];
        let page =
            render(&Frame::of_operator("/ui/workers"), &Workers { workers, running: BTreeMap::new() }).0;
        assert!(page.contains("2 signed off, 1 declared dead"), "{page}");
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
