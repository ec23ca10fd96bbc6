//! Small parts that several pages use: statuses, times, ids, buttons, empty states.

use std::time::Duration;

use chrono::{DateTime, Utc};
use maud::{Markup, Render, html};

use super::url::encoded;
use super::{Frame, format, icons};
use crate::job::{JobId, Status};
use crate::turns::Rate;

/// The word for a status. The others are as in the API.
pub(super) fn status_word(status: Status) -> &'static str {
    match status {
        Status::FailedPermanent => "failed",
        status => status.as_str(),
    }
}

/// A status by colour and word.
pub(super) fn status(status: Status) -> Markup {
    let class = format!("status is-{}", status_word(status));
    html! { span class=(class) { i {} (status_word(status)) } }
}

/// A state of something else than a job, in the colour of a status.
pub(super) fn state(colour: Status, word: &str) -> Markup {
    let class = format!("status is-{}", status_word(colour));
    html! { span class=(class) { i {} (word) } }
}

/// An instant, relative to now; the exact time is in the tooltip.
pub(super) fn time(at: DateTime<Utc>, frame: &Frame) -> Markup {
    html! {
        time datetime=(format::machine(at)) title=(format::exact(at)) data-relative {
            (format::relative(at, frame.now))
        }
    }
}

/// An instant, or a dash.
pub(super) fn optional_time(at: Option<DateTime<Utc>>, frame: &Frame) -> Markup {
    match at {
        Some(at) => time(at, frame),
        None => dash(),
    }
}

/// What an empty cell shows.
pub(super) fn dash() -> Markup {
    html! { span .faint { "–" } }
}

/// How long something has been going on; the script counts on.
pub(super) fn since(at: DateTime<Utc>, frame: &Frame) -> Markup {
    html! {
        time datetime=(format::machine(at)) title=(format!("since {}", format::exact(at))) data-since {
            (format::duration(format::between(at, frame.now)))
        }
    }
}

/// The short form of an id, as a link to the job.
pub(super) fn job_link(id: JobId, frame: &Frame) -> Markup {
    html! { a .id href=(frame.url(&format!("/ui/jobs/{id}"))) title=(id) { (id.short()) } }
}

pub(super) fn queue_link(queue: &str, frame: &Frame) -> Markup {
    html! { a .quiet href=(frame.url(&format!("/ui/queues/{}", encoded(queue)))) { (queue) } }
}

pub(super) fn kind_link(kind: &str, frame: &Frame) -> Markup {
    html! { a .quiet href=(frame.url(&format!("/ui/kinds/{}", encoded(kind)))) { (kind) } }
}

/// The heading of a page, with its buttons.
pub(super) fn heading(title: impl Render, note: impl Render, buttons: Markup) -> Markup {
    html! {
        div .head {
            div { h1 { (title) } p .note { (note) } }
            div .buttons { (buttons) }
        }
    }
}

/// What a page shows if there is nothing to list: what would be here, and how to get it.
pub(super) fn empty(title: &str, text: Markup) -> Markup {
    html! { div .empty { h2 { (title) } (text) } }
}

/// A command or request to copy.
pub(super) fn snippet(text: &str) -> Markup {
    html! { div .snippet { pre { code { (text) } } (copy_button(text)) } }
}

/// A button that copies a text. Needs the script, which shows it.
pub(super) fn copy_button(text: &str) -> Markup {
    html! {
        button .icon-button .copy type="button" data-copy=(text) aria-label="Copy" title="Copy" { (icons::copy()) }
    }
}

/// A rate: `100 per second`, `5 per 2 min`.
pub(super) fn rate(rate: Rate) -> String {
    let period = match rate.period_ms {
        1_000 => "second".to_owned(),
        60_000 => "minute".to_owned(),
        3_600_000 => "hour".to_owned(),
        86_400_000 => "day".to_owned(),
        ms => format::duration(Duration::from_millis(ms)),
    };
    format!("{} per {period}", format::number(rate.starts.into()))
}

/// A button that calls a route of the API. Without the script it is not shown.
pub(super) struct Action<'a> {
    /// The route.
    pub(super) url: String,
    pub(super) method: &'static str,
    pub(super) label: &'a str,
    /// Asked before the request is sent.
    pub(super) confirm: Option<String>,
    /// Shown after the request.
    pub(super) done: &'a str,
    /// The page to open afterwards; `None` stays here. `{field}` is replaced by a field of the response.
    pub(super) then: Option<String>,
    pub(super) look: Look,
    /// Fields of the request, and inputs for them.
    pub(super) fields: Markup,
}

/// How important a button is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Plain,
    Primary,
    /// It destroys something.
    Danger,
    /// In a row of a table.
    Small,
}

impl Look {
    fn class(self) -> &'static str {
        match self {
            Look::Plain => "button",
            Look::Primary => "button primary",
            Look::Danger => "button danger",
            Look::Small => "button small",
        }
    }
}

impl<'a> Action<'a> {
    pub(super) fn post(url: String, label: &'a str, done: &'a str) -> Self {
        Action {
            url,
            method: "POST",
            label,
            confirm: None,
            done,
            then: None,
            look: Look::Plain,
            fields: html! {},
        }
    }

    pub(super) fn method(self, method: &'static str) -> Self {
        Action { method, ..self }
    }

    pub(super) fn confirm(self, question: impl Into<String>) -> Self {
        Action { confirm: Some(question.into()), ..self }
    }

    pub(super) fn then(self, page: String) -> Self {
        Action { then: Some(page), ..self }
    }

    pub(super) fn look(self, look: Look) -> Self {
        Action { look, ..self }
    }

    pub(super) fn fields(self, fields: Markup) -> Self {
        Action { fields, ..self }
    }
}

impl Render for Action<'_> {
    fn render(&self) -> Markup {
        html! {
            form .action method="post" action=(self.url) data-method=(self.method) data-confirm=[&self.confirm]
                data-done=(self.done) data-then=[&self.then] {
                (self.fields)
                button class=(self.look.class()) { (self.label) }
            }
        }
    }
}

/// Links of which one is current, like Hour, Day, Week.
pub(super) fn segments<'a>(label: &str, links: impl Iterator<Item = (&'a str, String, bool)>) -> Markup {
    html! {
        div .segments role="group" aria-label=(label) {
            @for (name, url, is_current) in links {
                a href=(url) aria-current=[is_current.then_some("true")] { (name) }
            }
        }
    }
}

/// A number with a name.
pub(super) fn figure(name: &str, value: impl Render, note: impl Render) -> Markup {
    html! { div .figure { dt { (name) } dd { (value) } dd .faint { (note) } } }
}

/// JSON or another long text, with a button to copy it.
pub(super) fn code_block(title: &str, text: &str) -> Markup {
    html! {
        section .panel {
            div .panel-head {
                h2 { (title) }
                button .icon-button .copy type="button" data-copy-code aria-label="Copy" title="Copy" { (icons::copy()) }
            }
            pre .code tabindex="0" { code { (text) } }
        }
    }
}

/// A message of the API as a sentence; what is in backquotes is code.
pub(super) fn prose(message: &str) -> Markup {
    let mut sentence = message.to_owned();
    if let Some(first) = sentence.get_mut(0..1) {
        first.make_ascii_uppercase();
    }
    html! {
        @for (i, part) in sentence.split('`').enumerate() {
            @if i % 2 == 1 { code { (part) } } @else { (part) }
        }
        "."
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    #[test]
    fn names_in_buttons_and_links_are_escaped() {
        let frame = Frame::of_operator("/ui");
        let action = Action::post(frame.url(HOSTILE), HOSTILE, HOSTILE).confirm(HOSTILE);
        assert_escaped(&action.render());
        assert_escaped(&queue_link(HOSTILE, &frame));
        assert_escaped(&snippet(HOSTILE));
        assert_escaped(&empty(HOSTILE, html! {}));
    }

    #[test]
    fn rates_are_told_in_words() {
        assert_eq!(rate(Rate::per_second(100)), "100 per second");
        assert_eq!(rate(Rate::per(5, Duration::from_secs(120))), "5 per 2 min");
    }
}
