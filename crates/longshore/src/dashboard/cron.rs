//! Schedules: in words, with their next and last ticks; run now, pause, delete.

use axum::response::Response;
use chrono::{DateTime, Utc};
use maud::{Markup, html};

use super::cron_words::words;
use super::layout::Section;
use super::url::encoded;
use super::widgets::{
    Action, Look, MAX_ROWS, empty, heading, kind_link, more_rows, name_filter, optional_time, queue_link,
    snippet, time, wanted_name,
};
use super::{Frame, View, format};
use crate::api::problem::ApiResult;
use crate::client::schedules::{CronLine, Template};
use crate::store::Schedule;

/// How many ticks after the next one are shown.
const LATER_TICKS: usize = 3;

pub(super) async fn page(view: View) -> ApiResult<Response> {
    view.caller.may_use_all()?;
    let schedules = view.data.schedules().await?;
    Ok(view.respond(Section::Cron, "Cron", render(&view.frame, &schedules)))
}

fn render(frame: &Frame, schedules: &[Schedule]) -> Markup {
    let shown: Vec<&Schedule> =
        schedules.iter().filter(|schedule| schedule.name.contains(wanted_name(frame))).collect();
    html! {
        (heading("Cron", format::counted(schedules.len() as u64, "schedule", "schedules"), html! {}))
        (name_filter(frame, "Filter schedules", schedules.len()))
        @if schedules.is_empty() {
            (empty("No schedules", html! {
                p { "A schedule enqueues a job at each tick. Exactly one job per tick, however many processes run:" }
                (snippet(&format!(
                    "curl -X PUT http://localhost:8080{}/cron/nightly -H 'content-type: application/json' \\\n  \
                     -d '{{\"cron\": \"0 3 * * *\", \"job\": {{\"kind\": \"summarize_text\", \"payload\": {{\"text\": \"Good night.\"}}}}}}'",
                    frame.base
                )))
            }))
        } @else {
            div .panel .flush { table #cron .list {
                thead { tr { th { "Schedule" } th { "When" } th { "Job" } th .c-time { "Next" } th .c-time { "Last" } th .c-actions { span .unseen { "Actions" } } } }
                tbody { @for schedule in shown.iter().take(MAX_ROWS) { (row(frame, schedule)) } }
            } }
            (more_rows(shown.len()))
        }
    }
}

fn row(frame: &Frame, schedule: &Schedule) -> Markup {
    let template = Template::parse(&schedule.template).ok();
    let is_late = !schedule.paused && schedule.next_at < frame.now;
    html! {
        tr #(format!("cron-{}", schedule.name)) data-row {
            td .strong { (schedule.name) @if schedule.paused { " " span .tag .is-warning { "paused" } } }
            td data-label="When" {
                @match words(&schedule.expression) {
                    Some(words) => { span .nowrap { (words) } br; code .faint { (schedule.expression) } },
                    None => code { (schedule.expression) },
                }
                " " span .faint .nowrap title=(missed(&schedule.missed)) { (schedule.zone) }
            }
            td data-label="Job" { @if let Some(template) = &template {
                (kind_link(&template.kind, frame)) br; span .faint { "in " } (queue_link(&template.queue, frame))
            } @else { span .error { "cannot be read" } } }
            td .c-time data-label="Next" {
                @if schedule.paused { span .faint { "paused" } } @else {
                    span title=(later(schedule).unwrap_or_default()) { (time(schedule.next_at, frame)) }
                    @if is_late { " " span .tag .is-warning { "late" } }
                }
            }
            td .c-time data-label="Last" { (optional_time(schedule.last_at, frame)) }
            td .c-actions { (actions(frame, schedule)) }
        }
    }
}

/// What happens to ticks at which no process ran, for the tooltip.
fn missed(policy: &str) -> String {
    match policy {
        "skip" => "Ticks that were missed while no process ran are skipped.".into(),
        "one" => "Ticks that were missed while no process ran become one job.".into(),
        policy if policy.starts_with("all") => {
            "Each tick that was missed while no process ran becomes a job.".into()
        }
        policy => format!("Ticks that were missed while no process ran: {policy}."),
    }
}

/// The next ticks, for the tooltip.
fn later(schedule: &Schedule) -> Option<String> {
    let line = CronLine::parse(&schedule.expression, &schedule.zone).ok()?;
    let ticks = std::iter::successors(Some(schedule.next_at), |at: &DateTime<Utc>| line.next_after(*at));
    let ticks: Vec<String> =
        ticks.take(LATER_TICKS + 1).map(|at| at.format("%a %d %b %H:%M:%S UTC").to_string()).collect();
    Some(ticks.join("\n"))
}

fn actions(frame: &Frame, schedule: &Schedule) -> Markup {
    if !frame.rights.operate {
        return html! {};
    }
    let name = encoded(&schedule.name);
    let url = |action: &str| frame.url(&format!("/cron/{name}{action}"));
    html! {
        (Action::post(url("/run"), "Run now", format!("A job of {} is enqueued.", schedule.name)).look(Look::Small).then(frame.url("/ui/jobs/{job_id}")))
        @if schedule.paused { (Action::post(url("/resume"), "Resume", format!("{} runs again.", schedule.name)).look(Look::Small)) }
        @else { (Action::post(url("/pause"), "Pause", format!("{} is paused.", schedule.name)).look(Look::Small)) }
        (Action::post(url(""), "Delete", format!("{} is deleted.", schedule.name)).method("DELETE").look(Look::Small)
            .confirm(format!("Delete the schedule {}? Jobs that it has enqueued stay.", schedule.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn schedule(name: &str, expression: &str) -> Schedule {
        Schedule {
            name: name.into(),
            expression: expression.into(),
            zone: "Europe/Berlin".into(),
            missed: "one".into(),
            template: "{}".into(),
            paused: false,
            next_at: "2031-05-06T08:00:00Z".parse().unwrap(),
            last_at: None,
        }
    }

    #[test]
    fn schedules_are_told_in_words_with_their_next_ticks() {
        let page = render(&Frame::of_operator("/ui/cron"), &[schedule("report", "0 10 * * *")]).0;
        assert!(page.contains("every day at 10:00") && page.contains("Wed 07 May 08:00:00 UTC"), "{page}");
        assert!(page.contains("action=\"/q/cron/report/run\""), "{page}");
    }

    #[test]
    fn names_are_escaped_and_readers_cannot_act() {
        assert_escaped(&render(&Frame::of_operator("/ui/cron"), &[schedule(HOSTILE, HOSTILE)]));
        assert!(!render(&Frame::of_reader("/ui/cron"), &[schedule("a", "* * * * *")]).0.contains("<form"));
    }
}
