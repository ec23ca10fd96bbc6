//! One job: its timeline, payload and result, why it is not running, what it belongs to, and actions.

use std::sync::Arc;

use axum::extract::Path;
use axum::response::Response;
use maud::{Markup, html};
use serde::Deserialize;
use serde_json::value::RawValue;

use super::layout::Section;
use super::url::{Params, encoded};
use super::widgets::{
    self, Action, Look, code_block, copy_button, heading, job_link, kind_link, queue_link, time,
};
use super::{Frame, View, format, json, timeline};
use crate::api::explain::Explanation;
use crate::api::problem::{ApiResult, Problem};
use crate::failure::Fingerprint;
use crate::job::{FlowId, JobId, JobRecord, Status};
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
    /// The flow of the jobs that this one spawned.
    children: Option<Arc<FlowRecord>>,
}

pub(super) async fn page(view: View, Path(id): Path<String>) -> ApiResult<Response> {
    let id: JobId = id.parse().map_err(Problem::in_url)?;
    let loaded = load(&view, id).await?;
    let title = format!("{} {}", loaded.job.kind, id.short());
    Ok(view.respond(Section::Jobs, &title, render(&view.frame, &loaded)))
}

async fn load(view: &View, id: JobId) -> ApiResult<OneJob> {
    let data = &view.data;
    let job = data.job(id).await?;
    view.caller.may_access(&job.queue)?;
    let has_ended = job.finished_at.is_some();
    let explanation = async { if has_ended { Ok(None) } else { data.explanation(&job).await.map(Some) } };
    let (explanation, steps, workers) = tokio::try_join!(explanation, data.steps(id), data.workers())?;
    let parent = match job.flow {
        Some(flow) => data.glance(JobId(flow.0)).await?.first().map(|parent| parent.id),
        None => None,
    };
    let children = match data.flow(FlowId(id.0)).await {
        Ok(flow) => Some(flow),
        Err(error) if error.is_not_found() => None,
        Err(error) => return Err(error.into()),
    };
    Ok(OneJob { job, explanation, steps, workers, parent, children })
}

fn render(frame: &Frame, loaded: &OneJob) -> Markup {
    let job = &loaded.job;
    let id = job.id.to_string();
    let title = html! { (job.kind) " " (widgets::status(job.status)) };
    let note = html! { span .id { (id) } (copy_button(&id)) };
    html! {
        p .crumbs { a href=(frame.url("/ui/jobs")) { "Jobs" } }
        (heading(title, note, actions(frame, job)))
        @if let Some(explanation) = &loaded.explanation {
            @if job.status != Status::Running || job.cancel_requested { (timeline::why(explanation)) }
            @else if explanation.reason == crate::api::explain::Reason::WorkerLost { (timeline::why(explanation)) }
        }
        (progress(job))
        div .columns {
            div {
                (timeline::render(frame, job, &loaded.workers))
                (documents(frame, job))
                (steps(frame, &loaded.steps))
                (editor(frame, job))
            }
            aside aria-label="Details" { (facts(frame, loaded)) }
        }
    }
}

// ---- actions ---------------------------------------------------------------

fn actions(frame: &Frame, job: &JobRecord) -> Markup {
    let url = |action: &str| frame.url(&format!("/jobs/{}{action}", job.id));
    let can_act = frame.rights.operate;
    let (has_ended, is_running) = (job.finished_at.is_some(), job.status == Status::Running);
    let cancel = Action::post(url("/cancel"), "Cancel", "The job is cancelled.");
    let (retry, retried) =
        if has_ended { ("Retry", "The job waits again.") } else { ("Run now", "The job is due now.") };
    html! {
        @if can_act && is_running && !job.cancel_requested {
            (Action { done: "The job is asked to stop.", ..cancel }
                .confirm("Ask this running job to stop? Its handler sees the request at its next safe point."))
        } @else if can_act && !has_ended && !is_running {
            (cancel.confirm("Cancel this job? It will not run."))
        }
        @if can_act && !is_running && is_editable(frame, job) { a .button href="#edit" { (edit_label(job)) } }
        @if frame.rights.enqueue && is_editable(frame, job) {
            a .button href=(Params::default().with("from", job.id.to_string()).url(&frame.url("/ui/new"))) { "Clone and edit" }
        }
        @if can_act && has_ended {
            (Action::post(url(""), "Delete", "The job is deleted.").method("DELETE").look(Look::Danger)
                .confirm("Delete this job and its history?").then(frame.url("/ui/jobs")))
        }
        @if can_act && !is_running {
            (Action::post(url("/retry"), retry, retried).look(Look::Primary))
        }
    }
}

/// Whether the page shows the whole payload, so that it can be changed and stored again.
fn is_editable(frame: &Frame, job: &JobRecord) -> bool {
    !frame.dashboard.hides_payloads && frame.dashboard.redacted(&job.kind).is_empty()
}

fn edit_label(job: &JobRecord) -> &'static str {
    if job.finished_at.is_some() { "Edit and retry" } else { "Edit" }
}

fn editor(frame: &Frame, job: &JobRecord) -> Markup {
    if !frame.rights.operate || job.status == Status::Running || !is_editable(frame, job) {
        return html! {};
    }
    let payload = json::indent(job.payload.get(), &[]);
    let url = frame.url(&format!("/jobs/{}", job.id));
    let action = if job.finished_at.is_some() {
        Action::post(
            format!("{url}/retry"),
            "Retry with this payload",
            "The job waits again, with the new payload.",
        )
    } else {
        Action::post(url, "Save", "The job is changed.").method("PATCH")
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

fn shown(frame: &Frame, kind: &str, value: &RawValue) -> String {
    json::indent(value.get(), frame.dashboard.redacted(kind))
}

fn documents(frame: &Frame, job: &JobRecord) -> Markup {
    if frame.dashboard.hides_payloads {
        return html! { p .notice .is-info { "This dashboard does not show payloads and results." } };
    }
    html! {
        @if let Some(result) = &job.result { (code_block("Result", &shown(frame, &job.kind, result))) }
        (code_block("Payload", &shown(frame, &job.kind, &job.payload)))
        @if let Some(metadata) = &job.metadata { (code_block("Metadata", &shown(frame, &job.kind, metadata))) }
    }
}

fn steps(frame: &Frame, steps: &[StepRecord]) -> Markup {
    if steps.is_empty() {
        return html! {};
    }
    let value = |state: &StepState| match state {
        StepState::Waiting { until: Some(until) } => html! { "waits until " (time(*until, frame)) },
        StepState::Waiting { until: None } => html! { "waits for an event" },
        StepState::Done(_) if frame.dashboard.hides_payloads => html! { "done" },
        StepState::Done(value) => html! { code { (format::shortened(value.get(), 200)) } },
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
fn progress(job: &JobRecord) -> Markup {
    let Some(report) = job.progress.as_ref().filter(|_| job.finished_at.is_none()) else { return html! {} };
    html! {
        section #progress .panel .progress {
            div .panel-head { h2 { "Progress" }
                @if let Some(percent) = percent(report) { span .strong { (percent) " %" } }
            }
            div .panel-body {
                @if let Some(percent) = percent(report) { progress max="100" value=(percent) aria-label="Progress" {} }
                p { code { (format::shortened(report.get(), 300)) } }
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
    let jobs_with = |name: &str, value: &str| Params::default().with(name, value).url(&frame.url("/ui/jobs"));
    let in_group = job.group.as_ref().map(|group| {
        Params::default().with("queue", &job.queue).with("group", group).url(&frame.url("/ui/jobs"))
    });
    html! {
        section .panel {
            dl #facts .facts {
                dt { "Kind" } dd { (kind_link(&job.kind, frame)) }
                dt { "Queue" } dd { (queue_link(&job.queue, frame)) }
                @if let Some((group, url)) = job.group.as_ref().zip(in_group) { dt { "Group" } dd { a .quiet href=(url) { (group) } } }
                dt { "Attempts" } dd { (job.attempts) " of " (job.max_attempts) }
                @if job.interruptions > 0 { dt { "Interruptions" } dd { (job.interruptions) } }
                dt { "Priority" } dd { (job.priority) }
                dt { "Created" } dd { (time(job.created_at, frame)) }
                @if job.finished_at.is_none() && job.run_at < crate::lifecycle::FAR_FUTURE { dt { "Due" } dd { (time(job.run_at, frame)) } }
                @if let Some(at) = job.started_at { dt { "Started" } dd { (time(at, frame)) } }
                @if let Some(at) = job.finished_at { dt { "Ended" } dd { (time(at, frame)) } }
                @if let (Some(from), Some(to)) = (job.started_at, job.finished_at) {
                    dt { "Ran for" } dd { (format::duration(format::between(from, to))) }
                }
                dt { "Timeout" } dd { @match job.timeout { Some(limit) => (format::duration(limit)), None => "none" } }
                @if let Some(name) = schedule(job) { dt { "Schedule" } dd { a .quiet href=(frame.url(&format!("/ui/cron#cron-{}", encoded(&name)))) { (name) } } }
                @if let Some(flow) = job.flow { dt { "Flow" } dd { a .id href=(frame.url(&format!("/ui/flows/{flow}"))) { (JobId(flow.0).short()) } } }
                @if let Some(task) = &job.task { dt { "Task" } dd { (task) } }
                @if let Some(parent) = loaded.parent { dt { "Parent" } dd { (job_link(parent, frame)) } }
                @if let Some(children) = &loaded.children {
                    dt { "Children" } dd { a .quiet href=(frame.url(&format!("/ui/flows/{}", children.id))) {
                        (format::number(children.members)) @if children.open > 0 { ", " (format::number(children.open)) " open" }
                    } }
                }
                @if let Some(key) = &job.unique_key { dt { "Unique key" } dd { a .quiet href=(jobs_with("unique_key", key)) { (key) } } }
                @if let Some(key) = &job.idempotency_key { dt { "Idempotency key" } dd { a .quiet href=(jobs_with("idempotency_key", key)) { (key) } } }
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
        assert!(queued.contains("/cancel\"") && queued.contains("Run now") && !queued.contains("Delete"));
        assert!(
            running.contains("/cancel\"") && !running.contains("/retry\"") && !running.contains("Delete")
        );
        assert!(!failed.contains("/cancel\"") && failed.contains("Retry") && failed.contains("Delete"));
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
