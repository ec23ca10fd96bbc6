//! Why a job does not run: the reasons one by one, with links to what they name and buttons that remove them.

use maud::{Markup, html};

use super::url::encoded;
use super::widgets::{Action, Look, group_url, linked, prose};
use super::{Frame, format};
use crate::api::explain::{Cause, Explanation, Reason};
use crate::job::JobRecord;

/// The box on the page of a job.
pub(super) fn render(frame: &Frame, job: &JobRecord, explanation: &Explanation) -> Markup {
    let causes = &explanation.causes;
    let class = if causes.iter().any(needs_operator) { "notice is-warning" } else { "notice is-info" };
    html! {
        section #why class=(class) {
            h2 { "Why it is not running" }
            @match causes.as_slice() {
                [cause] => p { (sentence(frame, job, cause)) },
                causes => ul { @for cause in causes { li { (sentence(frame, job, cause)) } } },
            }
            @if let Some(seconds) = explanation.estimated_seconds {
                p .faint { "It should start " @if seconds < 1.0 { "at any moment" } @else { "in about " (format::seconds(seconds)) } "." }
            }
            (buttons(frame, job, causes))
            (commands(causes))
        }
    }
}

/// Whether the job cannot start before somebody acts.
pub(super) fn needs_operator(cause: &Cause) -> bool {
    matches!(
        cause.reason,
        Reason::QueuePaused
            | Reason::GroupPaused
            | Reason::NoWorkerForQueue
            | Reason::NoWorkerForKind
            | Reason::WorkerLost
    )
}

fn sentence(frame: &Frame, job: &JobRecord, cause: &Cause) -> Markup {
    let mut message = cause.message.clone();
    if let Some(first) = message.get_mut(0..1) {
        first.make_ascii_uppercase();
    }
    html! { (with_links(frame, job, &message)) "." }
}

/// The message of a cause, with links to the queue, the group, the kind and the flow that it names.
pub(super) fn with_links(frame: &Frame, job: &JobRecord, message: &str) -> Markup {
    let flow = job.flow.filter(|_| frame.rights.covers_all());
    // The name of the flow is a link, so its id says nothing new.
    let message = flow.map_or_else(|| message.to_owned(), |flow| message.replace(&format!(" ({flow})"), ""));
    linked(&message, |word, name| {
        // At the start of a sentence the word has a capital letter.
        let page = match word.to_ascii_lowercase().as_str() {
            "queue" => format!("/ui/queues/{}", encoded(name)),
            "group" => return Some(group_url(&job.queue, name, frame)),
            "kind" => format!("/ui/kinds/{}", encoded(name)),
            "flow" => format!("/ui/flows/{}", flow?),
            _ => return None,
        };
        Some(frame.url(&page))
    })
}

/// A button for each reason that one request removes.
pub(super) fn buttons(frame: &Frame, job: &JobRecord, causes: &[Cause]) -> Markup {
    if !frame.rights.operate {
        return html! {};
    }
    let queue = &job.queue;
    let resume = |cause: &Cause| match (cause.reason, &job.group) {
        (Reason::QueuePaused, _) => Some(resume_queue(frame, queue)),
        (Reason::GroupPaused, Some(group)) => Some(resume_group(frame, queue, group)),
        _ => None,
    };
    let resume: Vec<Action> = causes.iter().filter_map(resume).collect();
    html! { @if !resume.is_empty() { div .buttons { @for action in resume { (action.look(Look::Small)) } } } }
}

fn resume_queue(frame: &Frame, queue: &str) -> Action {
    let url = frame.url(&format!("/queues/{}/resume", encoded(queue)));
    Action::post(url, format!("Resume queue {queue}"), format!("Queue {queue} runs again."))
}

fn resume_group(frame: &Frame, queue: &str, group: &str) -> Action {
    let url = frame.url(&format!("/queues/{}/groups/{}", encoded(queue), encoded(group)));
    Action::post(
        url,
        format!("Resume group {group} of {queue}"),
        format!("Group {group} of {queue} runs again."),
    )
    .method("PATCH")
    .fields(html! { input type="hidden" name="paused" value="false" data-json="raw"; })
}

/// What to type instead.
fn commands(causes: &[Cause]) -> Markup {
    let remedies: Vec<&String> = causes.iter().filter_map(|cause| cause.remedy.as_ref()).collect();
    html! {
        @if remedies.iter().any(|remedy| remedy.contains('`')) {
            details #why-commands { summary { "From the command line" }
                @for remedy in remedies { p { (prose(remedy)) } }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs::tests::hostile_job;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;
    use crate::job::{FlowId, Status};

    fn job() -> JobRecord {
        let mut job = hostile_job(Status::Queued);
        (job.queue, job.group) = ("web hooks".into(), Some("globex".into()));
        job.flow = Some(FlowId(uuid::Uuid::nil()));
        job
    }

    fn paused() -> Vec<Cause> {
        let cause = |reason, message: &str, remedy: &str| Cause {
            reason,
            message: message.into(),
            remedy: Some(remedy.into()),
        };
        vec![
            cause(
                Reason::QueuePaused,
                "queue `web hooks` is paused",
                "resume it with `longshore queues resume`",
            ),
            cause(Reason::GroupPaused, "group `globex` of queue `web hooks` is paused", "call `PATCH /x`"),
        ]
    }

    #[test]
    fn several_reasons_are_a_list_with_links_buttons_and_folded_commands() {
        let explanation = Explanation::of_causes(&job(), paused());
        let page = render(&Frame::of_operator("/ui/jobs/1"), &job(), &explanation).0;
        assert_eq!(page.matches("<li>").count(), 2, "{page}");
        assert!(
            page.contains("Queue <a href=\"/q/ui/queues/web%20hooks\">web hooks</a> is paused."),
            "{page}"
        );
        assert!(page.contains("href=\"/q/ui/queues/web%20hooks?group=globex#group-globex\""), "{page}");
        assert!(
            page.contains("Resume queue web hooks") && page.contains("Resume group globex of web hooks"),
            "{page}"
        );
        assert!(page.contains("is-warning") && page.contains("From the command line"), "{page}");
        let fold = page.find("From the command line").unwrap();
        assert!(page.find("longshore queues resume").unwrap() > fold, "{page}");
    }

    #[test]
    fn a_reader_has_no_buttons() {
        let explanation = Explanation::of_causes(&job(), paused());
        assert!(!render(&Frame::of_reader("/ui/jobs/1"), &job(), &explanation).0.contains("<form"));
    }

    #[test]
    fn names_are_escaped_and_a_flow_is_named_without_its_id() {
        let message = format!("it waits for task `{HOSTILE}` of flow `import` ({})", uuid::Uuid::nil());
        let cause = Cause { reason: Reason::WaitsForTasks, message, remedy: None };
        let page =
            render(&Frame::of_operator("/ui/jobs/1"), &job(), &Explanation::of_causes(&job(), vec![cause]));
        assert_escaped(&page);
        let link = format!("flow <a href=\"/q/ui/flows/{}\">import</a>.", uuid::Uuid::nil());
        assert!(page.0.contains(&link), "{}", page.0);
        assert!(!page.0.contains("From the command line"), "{}", page.0);
    }
}
