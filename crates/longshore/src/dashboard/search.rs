//! The search box without the script, and the list of shortcuts. With the script, `/` and ⌘K open a palette.

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};

use super::layout::Section;
use super::url::{Params, encoded};
use super::widgets::{group_url, heading};
use super::{Frame, View};
use crate::api::problem::ApiResult;
use crate::job::{FlowId, JobId};

/// Opens what the text means: the job or flow with this id, a queue, a group, a kind, or else the jobs whose error contains it.
pub(super) async fn page(view: View) -> ApiResult<Response> {
    let text = view.frame.params.get("q").unwrap_or_default().trim();
    let location = find(&view, text).await?;
    Ok((StatusCode::SEE_OTHER, [(header::LOCATION, location)]).into_response())
}

async fn find(view: &View, text: &str) -> ApiResult<String> {
    let frame = &view.frame;
    if let Ok(id) = text.parse::<JobId>() {
        let found = view.data.glance(id).await?;
        if found.iter().any(|job| frame.rights.covers(&job.queue)) {
            return Ok(frame.url(&format!("/ui/jobs/{id}")));
        }
        if frame.rights.covers_all() && view.data.flow(FlowId(id.0)).await.is_ok() {
            return Ok(frame.url(&format!("/ui/flows/{id}")));
        }
    }
    let queues = view.data.queues().await?;
    if queues.iter().any(|queue| queue.name == text && frame.rights.covers(text)) {
        return Ok(frame.url(&format!("/ui/queues/{}", encoded(text))));
    }
    if let Some(group) = group(view, text).await? {
        return Ok(group);
    }
    let counts = view.data.counts().await?;
    let is_registered = view.data.kinds().await?.iter().any(|kind| kind.name == text);
    // Somebody who may see some queues must not learn which kinds others have.
    let is_kind = counts.iter().any(|count| count.kind == text && frame.rights.covers(&count.queue))
        || (is_registered && frame.rights.covers_all());
    Ok(match text {
        "" => frame.url("/ui/jobs"),
        text if is_kind => jobs(frame, "kind", text),
        text => jobs(frame, "error", text),
    })
}

/// The page of the queue that has a group with exactly this name.
async fn group(view: &View, text: &str) -> ApiResult<Option<String>> {
    if text.is_empty() {
        return Ok(None);
    }
    let found = view.data.find_groups(text, view.frame.rights.queues.as_deref()).await?;
    let exact = found.iter().find(|group| group.name == text);
    Ok(exact.map(|group| group_url(&group.queue, &group.name, &view.frame)))
}

fn jobs(frame: &Frame, name: &str, value: &str) -> String {
    Params::default().with(name, value).url(&frame.url("/ui/jobs"))
}

pub(super) async fn keys(view: View) -> ApiResult<Response> {
    let content =
        html! { (heading("Keyboard shortcuts", "", html! {})) div .panel .panel-body { (key_table()) } };
    Ok(view.respond(Section::Other, "Keyboard shortcuts", content))
}

/// The shortcuts.
pub(super) fn key_table() -> Markup {
    let keys: [(&[&str], &str); 12] = [
        (&["/"], "Search"),
        (&["⌘ K", "Ctrl K"], "Search and commands"),
        (&["j", "k"], "Next and previous row"),
        (&["↵"], "Open the row"),
        (&["x"], "Select the row"),
        (&["g o"], "Overview"),
        (&["g j"], "Jobs"),
        (&["g q"], "Queues"),
        (&["g f"], "Flows"),
        (&["g w"], "Workers"),
        (&["g c"], "Cron"),
        (&["?"], "This list"),
    ];
    html! {
        dl .keys {
            @for (keys, meaning) in keys {
                dt { @for (i, key) in keys.iter().enumerate() { @if i > 0 { " or " } kbd { (key) } } }
                dd { (meaning) }
            }
        }
    }
}
