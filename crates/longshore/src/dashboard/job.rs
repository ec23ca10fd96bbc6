//! One job: its timeline, payload and result, why it is not running, what it belongs to, and actions.

use std::sync::Arc;

use axum::extract::Path;
use axum::response::Response;
use chrono::TimeDelta;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::layout::Section;
use super::url::{Params, encoded};
use super::widgets::{
    self, Action, Look, copy_button, group_url, heading, job_link, json_block, kind_link, queue_link, time,
};
use super::{Frame, View, format, json, timeline, why};
use crate::api::explain::{Explanation, Reason};
use crate::api::problem::{ApiResult, Problem};
use crate::job::{FlowId, JobId, JobRecord, Status};
use crate::rules::fingerprint::Fingerprint;
use crate::rules::lifecycle::FAR_FUTURE;
use crate::store::{FlowRecord, StepRecord, StepState, WorkerRecord};

/// What the page shows.
struct OneJob {
    job: Arc<JobRecord>,
    /// Absent if the job has ended.
    explanation: Option<Arc<Explanation>>,
    steps: Arc<Vec<StepRecord>>,
    workers: Arc<Vec<WorkerRecord>>,
    /// The job that spawned this one.
    parent: Option<JobId>,
    /// The flow that it is a task of; absent if the caller may not see flows.
    flow: Option<Arc<FlowRecord>>,
    /// The flow of the jobs that this one spawned; absent if the caller may not see flows.
    children: Option<Arc<FlowRecord>>,
}

pub(super) async fn page(view: View, Path(id): Path<String>) -> ApiResult<Response> {
    let id: JobId = id.parse().map_err(Problem::in_url)?;
    let loaded = load(&view, id).await?;
    let title = format!("{} {}", name(&loaded.job), format::id_ends(id.0));
    Ok(view.respond(Section::Jobs, &title, render(&view.frame, &loaded)))
}

async fn load(view: &View, id: JobId) -> ApiResult<OneJob> {
    let data = &view.data;
    let job = data.job(id).await?;
    view.caller.may_access(&job.queue)?;
    let has_ended = job.finished_at.is_some();
    let explanation = async {
        if has_ended { Ok(None) } else { data.explanation(view.caller.queues(), &job).await.map(Some) }
    };
    let (explanation, steps, workers) = tokio::try_join!(explanation, data.steps(id), data.workers())?;
    let parent = match job.flow {
        Some(flow) => data.glance(JobId(flow.0)).await?.first().cloned(),
        None => None,
    };
    let parent =
        parent.filter(|parent| view.caller.may_access(&parent.queue).is_ok()).map(|parent| parent.id);
    let (children, flow) = tokio::try_join!(flow(view, Some(FlowId(id.0))), flow(view, job.flow))?;
    // Flows may have jobs of any queue.
    let covers_all = view.frame.rights.covers_all();
    let (flow, children) = (flow.filter(|_| covers_all), children.filter(|_| covers_all));
    Ok(OneJob { job, explanation, steps, workers, parent, flow, children })
}

async fn flow(view: &View, id: Option<FlowId>) -> ApiResult<Option<Arc<FlowRecord>>> {
    let Some(id) = id else { return Ok(None) };
    match view.data.flow(id).await {
        Ok(flow) => Ok(Some(flow)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The name of the task; of a job without one, its kind.
fn name(job: &JobRecord) -> &str {
    job.task.as_deref().filter(|_| job.flow.is_some()).unwrap_or(&job.kind)
}

fn render(frame: &Frame, loaded: &OneJob) -> Markup {
    let job = &loaded.job;
    let id = job.id.to_string();
    let is_held =
        loaded.explanation.as_ref().is_some_and(|explanation| explanation.reason == Reason::WaitsForTasks);
    let title =
        html! { (name(job)) " " @if is_held { (widgets::held()) } @else { (widgets::status(job.status)) } };
    let note = html! { @if name(job) != job.kind { (kind_link(&job.kind, frame)) " · " } span .id { (id) } (copy_button(&id)) };
    html! {
        p .crumbs {
            @match &loaded.flow {
                Some(flow) => {
                    a href=(frame.url("/ui/flows")) { "Flows" }
                    a href=(frame.url(&format!("/ui/flows/{}", flow.id))) { (flow.name) }
                }
                None => a href=(frame.url("/ui/jobs")) data-list { "Jobs" },
            }
        }
        (heading(title, note, actions(frame, loaded)))
        @if let Some(explanation) = &loaded.explanation {
            @if job.status != Status::Running || job.cancel_requested || explanation.reason == Reason::WorkerLost {
                (why::render(frame, job, explanation))
            }
        }
        (progress(frame, job))
        div .columns {
            div {
                (timeline::render(frame, job, &loaded.workers))
                (documents(frame, job))
                (steps(frame, job, &loaded.steps))
                (editor(frame, job))
            }
            aside aria-label="Details" { (facts(frame, loaded)) }
        }
    }
}

/// The page's clock is kept with its data, so it may be this late.
const CLOCK_AGE: TimeDelta = TimeDelta::seconds(1);

// ---- actions ---------------------------------------------------------------

fn actions(frame: &Frame, loaded: &OneJob) -> Markup {
    let job = &loaded.job;
    let url = |action: &str| frame.url(&format!("/jobs/{}{action}", job.id));
    let can_act = frame.rights.operate;
    let (has_ended, is_running) = (job.finished_at.is_some(), job.status == Status::Running);
    let cancel = Action::post(url("/cancel"), "Cancel", format!("{} is cancelled.", name(job)));
    let is_due_later =
        !has_ended && !is_running && job.run_at > frame.now + CLOCK_AGE && job.run_at < FAR_FUTURE;
    html! {
        @if can_act && is_running && !job.cancel_requested {
            (Action { done: format!("{} is asked to stop.", name(job)), ..cancel }
                .confirm("Ask this running job to stop? Its handler sees the request at its next safe point."))
        } @else if can_act && !has_ended && !is_running {
            (cancel.confirm("Cancel this job? It will not run."))
        }
        @if can_act && !is_running && is_editable(frame, job) { a .button href="#edit" { (edit_label(job)) } }
        @if frame.rights.enqueue && is_editable(frame, job) {
            a .button href=(Params::default().with("from", job.id.to_string()).url(&frame.url("/ui/new"))) { "Clone and edit" }
        }
        @if can_act && has_ended {
            (Action::post(url(""), "Delete", format!("{} is deleted.", name(job))).method("DELETE").look(Look::Danger)
                .confirm("Delete this job and its history?").then(frame.url("/ui/jobs")))
        }
        @if can_act && has_ended {
            (Action::post(url("/retry"), "Retry", format!("{} waits again.", name(job))).look(Look::Primary))
        } @else if can_act && is_due_later {
            (Action::post(url("/retry"), "Run now", due_now(loaded)).look(Look::Primary))
        }
    }
}

/// What `Run now` achieves: a job that is due does not start if its queue is paused.
fn due_now(loaded: &OneJob) -> String {
    let causes = loaded.explanation.as_ref().map(|explanation| explanation.causes.as_slice());
    let blocked = causes.unwrap_or_default().iter().find(|cause| why::needs_operator(cause));
    match blocked {
        Some(cause) => {
            let reason = cause.message.replace('`', "");
            format!("{} is due now, but it cannot start yet: {reason}.", name(&loaded.job))
        }
        None => format!("{} is due now.", name(&loaded.job)),
    }
}

/// Whether the page shows the whole payload, so that it can be changed and stored again.
fn is_editable(frame: &Frame, job: &JobRecord) -> bool {
    !frame.dashboard.hides_payloads
        && frame.dashboard.redacted(&job.kind).is_empty()
        && json::indent(job.payload.get(), &[]).is_some()
}

fn edit_label(job: &JobRecord) -> &'static str {
    if job.finished_at.is_some() { "Edit and retry" } else { "Edit" }
}

fn editor(frame: &Frame, job: &JobRecord) -> Markup {
    if !frame.rights.operate || job.status == Status::Running || !is_editable(frame, job) {
        return html! {};
    }
    let Some(payload) = json::indent(job.payload.get(), &[]) else { return html! {} };
    let url = frame.url(&format!("/jobs/{}", job.id));
    let action = if job.finished_at.is_some() {
        Action::post(
            format!("{url}/retry"),
            "Retry with this payload",
            format!("{} waits again, with the new payload.", name(job)),
        )
    } else {
        Action::post(url, "Save", format!("{} is changed.", name(job))).method("PATCH")
    };
    let fields = html! {
        label { span { "Payload (JSON)" }
            textarea name="payload" data-json="raw" rows="10" spellcheck="false" data-keep { (payload) }
        }
        label .narrow { span { "Priority" }
            input name="priority" data-json="number" type="number" min="-32768" max="32767" value=(job.priority) data-keep;
        }
    };
    html! {
        // A link to `#edit` opens it.
        details #editor .panel {
            summary .panel-head { h2 { (edit_label(job)) } }
            div #edit .panel-body tabindex="-1" { (action.look(Look::Primary).fields(fields)) }
        }
    }
}

// ---- contents --------------------------------------------------------------

fn shown(frame: &Frame, job: &JobRecord, title: &str, value: &RawValue) -> Markup {
    let url = frame.url(&format!("/jobs/{}", job.id));
    json_block(title, value.get(), frame.dashboard.redacted(&job.kind), &url)
}

fn documents(frame: &Frame, job: &JobRecord) -> Markup {
    if frame.dashboard.hides_payloads {
        return html! { p .notice .is-info { "This dashboard does not show payloads and results." } };
    }
    html! {
        @if let Some(result) = &job.result { (shown(frame, job, "Result", result)) }
        (shown(frame, job, "Payload", &job.payload))
        @if let Some(metadata) = &job.metadata { (shown(frame, job, "Metadata", metadata)) }
    }
}

fn steps(frame: &Frame, job: &JobRecord, steps: &[StepRecord]) -> Markup {
    if steps.is_empty() {
        return html! {};
    }
    let value = |state: &StepState| match state {
        StepState::Waiting { until: Some(until) } => html! { "waits until " (time(*until, frame)) },
        StepState::Waiting { until: None } => html! { "waits for an event" },
        StepState::Done(_) if frame.dashboard.hides_payloads => html! { "done" },
        StepState::Done(value) => {
            html! { code { (json::beginning(value.get(), frame.dashboard.redacted(&job.kind), 200)) } }
        }
    };
    html! {
        section .panel .flush {
            div .panel-head { h2 { "Steps" } span .faint { (format::number(steps.len() as u64)) } }
            table .list { thead { tr { th { "Step" } th .c-time { "Stored" } th { "Value" } } }
                tbody { @for step in steps.iter().take(200) {
                    tr { td .strong { (step.name) } td .c-time { (time(step.saved_at, frame)) } td { (value(&step.state)) } }
                } }
            }
        }
    }
}

/// The newest progress report, with a bar if it is a share or a percentage.
fn progress(frame: &Frame, job: &JobRecord) -> Markup {
    let hidden = frame.dashboard.redacted(&job.kind);
    let Some(report) = job.progress.as_ref().filter(|_| job.finished_at.is_none()) else { return html! {} };
    html! {
        section #progress .panel .progress {
            div .panel-head { h2 { "Progress" }
                @if let Some(percent) = percent(report) { span .strong { (percent) " %" } }
            }
            div .panel-body {
                @if let Some(percent) = percent(report) { progress max="100" value=(percent) aria-label="Progress" {} }
                @if !frame.dashboard.hides_payloads { p { code { (json::beginning(report.get(), hidden, 300)) } } }
            }
        }
    }
}

/// The percentage in a report: `0.4`, `{"percent": 40}` or `{"done": 4, "total": 10}`.
fn percent(report: &RawValue) -> Option<u8> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Report {
        Share(f64),
        Percent { percent: f64 },
        Part { done: f64, total: f64 },
    }
    let percent = match serde_json::from_str(report.get()).ok()? {
        Report::Share(share) if share <= 1.0 => share * 100.0,
        Report::Share(percent) | Report::Percent { percent } => percent,
        Report::Part { done, total } => done / total * 100.0,
    };
    (0.0..=100.0).contains(&percent).then_some(percent as u8)
}

// ---- facts -----------------------------------------------------------------

/// The schedule in the metadata of a job that cron enqueued.
fn schedule(job: &JobRecord) -> Option<String> {
    #[derive(Deserialize)]
    struct Metadata {
        cron: Cron,
    }
    #[derive(Deserialize)]
    struct Cron {
        schedule: String,
    }
    let metadata: Metadata = serde_json::from_str(job.metadata.as_ref()?.get()).ok()?;
    Some(metadata.cron.schedule)
}

fn facts(frame: &Frame, loaded: &OneJob) -> Markup {
    let job = &loaded.job;
    let newest = job.errors.iter().max_by_key(|attempt| (attempt.ended_at, attempt.lease_no));
    let is_retried = timeline::was_retried(job, newest);
    let jobs_with = |name: &str, value: &str| Params::default().with(name, value).url(&frame.url("/ui/jobs"));
    // With the queue, because the key may be in the namespace of the queue.
    let jobs_with_key = |name: &str, key: &str| {
        Params::default().with(name, key).with("queue", &job.queue).url(&frame.url("/ui/jobs"))
    };
    html! {
        section .panel {
            dl #facts .facts {
                dt { "Kind" } dd { (kind_link(&job.kind, frame)) }
                dt { "Queue" } dd { (queue_link(&job.queue, frame)) }
                @if let Some(group) = &job.group { dt { "Group" } dd { a .quiet href=(group_url(&job.queue, group, frame)) { (group) } } }
                dt { "Attempts" } dd { (job.attempts) " of " (job.max_attempts)
                    @if is_retried { span .faint { ", since an operator retried it" } } }
                @if job.interruptions > 0 { dt { "Interruptions" } dd { (job.interruptions) } }
                dt { "Priority" } dd { (job.priority) }
                dt { "Created" } dd { (time(job.created_at, frame)) }
                @if job.finished_at.is_none() && job.run_at < FAR_FUTURE { dt { "Due" } dd { (time(job.run_at, frame)) } }
                @if let Some(at) = job.started_at { dt { "Started" } dd { (time(at, frame)) } }
                @if let Some(at) = job.finished_at { dt { "Ended" } dd { (time(at, frame)) } }
                @if let (Some(from), Some(to)) = (job.started_at, job.finished_at) {
                    dt { "Ran for" } dd { (format::duration(format::between(from, to))) }
                }
                dt { "Timeout" } dd { @match job.timeout { Some(limit) => (format::duration(limit)), None => "none" } }
                @if let Some(name) = schedule(job) { dt { "Schedule" } dd { a .quiet href=(frame.url(&format!("/ui/cron#cron-{}", encoded(&name)))) { (name) } } }
                @if let Some(flow) = &loaded.flow { dt { "Flow" } dd { a .quiet href=(frame.url(&format!("/ui/flows/{}", flow.id))) { (flow.name) } } }
                @else if let Some(flow) = job.flow { dt { "Flow" } dd { span .id { (format::id_ends(flow.0)) } } }
                @if let Some(task) = &job.task { dt { "Task" } dd { (task) } }
                @if let Some(parent) = loaded.parent { dt { "Parent" } dd { (job_link(parent, frame)) } }
                @if let Some(children) = &loaded.children {
                    dt { "Children" } dd { a .quiet href=(frame.url(&format!("/ui/flows/{}", children.id))) {
                        (format::number(children.members)) @if children.open > 0 { ", " (format::number(children.open)) " open" }
                    } }
                }
                @if let Some(key) = &job.unique_key { dt { "Unique key" } dd { a .quiet href=(jobs_with_key("unique_key", key)) { (key) } } }
                @if let Some(key) = &job.idempotency_key { dt { "Idempotency key" } dd { a .quiet href=(jobs_with_key("idempotency_key", key)) { (key) } } }
                @if !job.tags.is_empty() { dt { "Tags" } dd { @for tag in &job.tags { a .tag href=(jobs_with("tag", tag)) { (tag) } " " } } }
                @if !job.flags.is_empty() { dt { "Flags" } dd { @for flag in &job.flags { span .tag { (flag) } " " } } }
                @if let Some(url) = same_error(frame, job) { dt { "Same error" } dd { a .quiet href=(url) { "all its jobs" } } }
                dt { "Lease" } dd title="How often a worker has claimed it" { (job.lease_no) }
            }
        }
    }
}

/// The page of the group of failures to which the last failure of the job belongs.
fn same_error(frame: &Frame, job: &JobRecord) -> Option<String> {
    let has_failed = matches!(job.status, Status::Running | Status::Retrying | Status::FailedPermanent);
    let error = job.last_error.as_deref().filter(|_| has_failed && frame.rights.covers_all())?;
    Some(frame.url(&format!("/ui/failures/{}", Fingerprint::of(&job.kind, error))))
}

#[cfg(test)]
mod tests {
    use super::super::jobs::tests::hostile_job;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn loaded(status: Status) -> OneJob {
        let mut job = hostile_job(status);
        if !matches!(status, Status::Succeeded | Status::FailedPermanent | Status::Cancelled) {
            job.finished_at = None;
        }
        OneJob {
            job: Arc::new(job),
            explanation: None,
            steps: Arc::default(),
            workers: Arc::default(),
            parent: None,
            flow: None,
            children: None,
        }
    }

    #[test]
    fn hostile_texts_are_escaped_in_every_status() {
        for status in Status::ALL {
            assert_escaped(&render(&Frame::of_operator("/ui/jobs/1"), &loaded(status)));
        }
    }

    #[test]
    fn a_reader_sees_no_actions() {
        for status in Status::ALL {
            let page = render(&Frame::of_reader("/ui/jobs/1"), &loaded(status)).0;
            assert!(!page.contains("<form") && !page.contains("<textarea"), "{page}");
        }
    }

    #[test]
    fn each_status_has_the_actions_that_the_api_allows() {
        let page = |status| render(&Frame::of_operator("/ui/jobs/1"), &loaded(status)).0;
        let (queued, running, failed) =
            (page(Status::Queued), page(Status::Running), page(Status::FailedPermanent));
        assert!(queued.contains("/cancel\"") && !queued.contains("Delete"));
        assert!(
            running.contains("/cancel\"") && !running.contains("/retry\"") && !running.contains("Delete")
        );
        assert!(!failed.contains("/cancel\"") && failed.contains("Retry") && failed.contains("Delete"));
    }

    #[test]
    fn only_a_job_that_is_due_later_can_be_run_now() {
        let frame = Frame::of_operator("/ui/jobs/1");
        let mut loaded = loaded(Status::Queued);
        assert!(!render(&frame, &loaded).0.contains("Run now"), "it is due");
        Arc::make_mut(&mut loaded.job).run_at = frame.now + CLOCK_AGE;
        assert!(
            !render(&frame, &loaded).0.contains("Run now"),
            "it is due, and the clock of the page is late"
        );
        Arc::make_mut(&mut loaded.job).run_at = FAR_FUTURE;
        assert!(!render(&frame, &loaded).0.contains("Run now"), "it is held");
        Arc::make_mut(&mut loaded.job).run_at = frame.now + TimeDelta::hours(1);
        assert!(render(&frame, &loaded).0.contains("is due now.\""));
        let message = "queue `mail` is paused".to_owned();
        let cause = crate::api::explain::Cause { reason: Reason::QueuePaused, message, remedy: None };
        loaded.explanation = Some(Arc::new(Explanation::of_causes(&loaded.job, vec![cause])));
        let page = render(&frame, &loaded).0;
        assert!(page.contains("is due now, but it cannot start yet: queue mail is paused."), "{page}");
    }

    #[test]
    fn a_task_is_shown_with_its_name_and_its_flow() {
        let mut loaded = loaded(Status::Queued);
        loaded.flow = Some(Arc::new(super::super::flows::tests::flow(crate::store::FlowStatus::Running)));
        let job = Arc::make_mut(&mut loaded.job);
        (job.flow, job.task) = (Some(FlowId(uuid::Uuid::nil())), Some("validate".into()));
        let page = render(&Frame::of_operator("/ui/jobs/1"), &loaded);
        assert!(page.0.contains("<h1>validate "), "{}", page.0);
        assert_eq!(page.0.matches("/q/ui/flows/00000000-0000-0000-0000-000000000000").count(), 2);
        assert_escaped(&page);
    }

    #[test]
    fn redacted_payloads_are_hidden_and_cannot_be_edited() {
        let mut frame = Frame::of_operator("/ui/jobs/1");
        let mut loaded = loaded(Status::FailedPermanent);
        let job = Arc::make_mut(&mut loaded.job);
        job.payload = RawValue::from_string(r#"{"user":"grace","password":"s3cret"}"#.into()).unwrap();
        job.metadata = Some(job.payload.clone());
        frame.dashboard = Arc::new(super::super::Dashboard::new().redact(HOSTILE, ["password"]));
        let page = render(&frame, &loaded).0;
        assert!(page.contains("grace") && !page.contains("s3cret") && !page.contains("<textarea"), "{page}");
        frame.dashboard = Arc::new(super::super::Dashboard::new().hide_payloads());
        let page = render(&frame, &loaded).0;
        assert!(!page.contains("grace") && page.contains("does not show payloads"), "{page}");
    }

    #[test]
    fn progress_is_a_percentage_if_it_can_be_one() {
        let percent = |text: &str| percent(&RawValue::from_string(text.into()).unwrap());
        assert_eq!(percent("0.4"), Some(40));
        assert_eq!(percent("40"), Some(40));
        assert_eq!(percent(r#"{"percent": 99.9}"#), Some(99));
        assert_eq!(percent(r#"{"done": 1, "total": 8, "file": "x"}"#), Some(12));
        assert_eq!(percent(r#"{"done": 1, "total": 0}"#), None);
        assert_eq!(percent("\"half\""), None);
    }
}
