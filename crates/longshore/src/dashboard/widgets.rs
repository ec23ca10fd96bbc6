//! Small parts that several pages use: statuses, times, ids, buttons, empty states.

use std::time::Duration;

use chrono::{DateTime, Utc};
use maud::{Markup, Render, html};

use super::url::{Params, encoded};
use super::{Frame, format, icons, json};

/// The number of characters of a JSON text that is too long to be indented.
const MAX_RAW: usize = 20_000;
use crate::job::{JobId, Status};
use crate::rules::turns::Rate;

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

/// A task that waits for earlier tasks of its flow.
pub(super) fn held() -> Markup {
    html! { span title=(HELD) { (state(Status::Cancelled, "held")) } }
}

/// What `held` means.
pub(super) const HELD: &str = "waits for earlier tasks of its flow";

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

/// What an empty cell shows, and why it is empty.
pub(super) fn dash_because(why: &str) -> Markup {
    html! { span .faint title=(why) { "–" } }
}

/// How long something has been going on; the script counts on.
pub(super) fn since(at: DateTime<Utc>, frame: &Frame) -> Markup {
    html! {
        time datetime=(format::machine(at)) title=(format!("since {}", format::exact(at))) data-since {
            (format::duration(format::between(at, frame.now)))
        }
    }
}

/// Both ends of an id, as a link to the job.
pub(super) fn job_link(id: JobId, frame: &Frame) -> Markup {
    html! { a .id href=(frame.url(&format!("/ui/jobs/{id}"))) title=(id) { (format::id_ends(id.0)) } }
}

pub(super) fn queue_link(queue: &str, frame: &Frame) -> Markup {
    html! { a .quiet href=(frame.url(&format!("/ui/queues/{}", encoded(queue)))) { (queue) } }
}

/// The page of the queue, at one of its groups.
pub(super) fn group_url(queue: &str, group: &str, frame: &Frame) -> String {
    let page = frame.url(&format!("/ui/queues/{}", encoded(queue)));
    format!("{}#group-{}", Params::default().with("group", group).url(&page), encoded(group))
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
pub(super) struct Action {
    /// The route.
    pub(super) url: String,
    pub(super) method: &'static str,
    pub(super) label: String,
    /// Asked before the request is sent.
    pub(super) confirm: Option<String>,
    /// The answer that sends the request; without one, the label.
    pub(super) yes: Option<String>,
    /// Shown after the request. Names its object.
    pub(super) done: String,
    /// The page to open afterwards; `None` stays here. `{field}` is replaced by a field of the response.
    pub(super) then: Option<String>,
    pub(super) look: Look,
    /// Fields of the request, and inputs for them.
    pub(super) fields: Markup,
    /// Tells apart actions that call the same route.
    pub(super) key: String,
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

impl Action {
    pub(super) fn post(url: String, label: impl Into<String>, done: impl Into<String>) -> Self {
        Action {
            url,
            method: "POST",
            label: label.into(),
            confirm: None,
            yes: None,
            done: done.into(),
            then: None,
            look: Look::Plain,
            fields: html! {},
            key: String::new(),
        }
    }

    pub(super) fn key(self, key: impl Into<String>) -> Self {
        Action { key: key.into(), ..self }
    }

    pub(super) fn method(self, method: &'static str) -> Self {
        Action { method, ..self }
    }

    pub(super) fn confirm(self, question: impl Into<String>) -> Self {
        Action { confirm: Some(question.into()), ..self }
    }

    pub(super) fn yes(self, answer: impl Into<String>) -> Self {
        Action { yes: Some(answer.into()), ..self }
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

impl Action {
    /// Identifies the form by what it does: a live update must not turn a button that has the focus into another one.
    fn id(&self) -> String {
        format!("do-{}-{}{}", self.method, encoded(&self.url), encoded(&self.key))
    }
}

impl Render for Action {
    fn render(&self) -> Markup {
        html! {
            form .action #(self.id()) method="post" action=(self.url) data-method=(self.method) data-confirm=[&self.confirm] data-yes=[&self.yes]
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

/// The maximum number of rows of a page that is not divided into pages.
pub(super) const MAX_ROWS: usize = 200;
/// From how many rows on such a page has a filter by name.
const FILTERED_FROM: usize = 20;

/// The text that names have to contain.
pub(super) fn wanted_name(frame: &Frame) -> &str {
    frame.params.get("name").unwrap_or_default()
}

/// A filter by name, if there are many rows or it is in use.
pub(super) fn name_filter(frame: &Frame, label: &str, rows: usize) -> Markup {
    let name = Some(wanted_name(frame)).filter(|name| !name.is_empty());
    html! {
        @if name.is_some() || rows >= FILTERED_FROM {
            form #filters .filters role="search" aria-label=(label) action=(frame.url(&frame.path)) {
                label { span { "Name contains" } input name="name" value=[name] placeholder="any" autocomplete="off"; }
                button .button { "Filter" }
            }
        }
    }
}

/// Says that rows are missing, if there are too many.
pub(super) fn more_rows(rows: usize) -> Markup {
    html! {
        @if rows > MAX_ROWS {
            p .faint { "The first " (MAX_ROWS) " of " (format::number(rows as u64)) ". Filter by name to find the others." }
        }
    }
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

/// A JSON value, indented if it is not too long, with the values at `hidden` hidden. `url` returns the whole of it.
pub(super) fn json_block(title: &str, value: &str, hidden: &[json::Path], url: &str) -> Markup {
    if let Some(text) = json::indent(value, hidden) {
        return code_block(title, &text);
    }
    html! {
        @if hidden.is_empty() { (code_block(title, &format::shortened(value, MAX_RAW))) }
        p .notice .is-info { (title) ": " (format::bytes(value.len())) " of JSON, too long to be shown here. "
            @if hidden.is_empty() { a href=(url) { "Open it as JSON" } "." } }
    }
}

/// A message of the API as a sentence; what is in backquotes is code.
pub(super) fn prose(message: &str) -> Markup {
    let mut sentence = message.to_owned();
    if let Some(first) = sentence.get_mut(0..1) {
        first.make_ascii_uppercase();
    }
    html! { (linked(&sentence, |_, _| None)) "." }
}

/// A message of the API in which names are links. `url` gets the word before a name, such as `queue`, and the
/// name. What is in backquotes and has no URL is code.
pub(super) fn linked(message: &str, url: impl Fn(&str, &str) -> Option<String>) -> Markup {
    let parts: Vec<&str> = message.split('`').collect();
    let word = |i: usize| parts[i - 1].trim_end().rsplit(' ').next().unwrap_or_default();
    html! {
        @for (i, part) in parts.iter().enumerate() {
            @if i % 2 == 0 { (part) }
            @else if let Some(url) = url(word(i), part) { a href=(url) { (part) } }
            @else { code { (part) } }
        }
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
