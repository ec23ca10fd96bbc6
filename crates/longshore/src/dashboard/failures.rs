//! Failures in groups: which errors there are, how often, since when, and what can be done with their jobs.

use axum::extract::Path;
use axum::response::Response;
use chrono::TimeDelta;
use maud::{Markup, html};
use serde_json::json;

use super::jobs::{operation, rows};
use super::layout::Section;
use super::url::Params;
use super::widgets::{Action, Look, code_block, empty, heading, job_link, kind_link, segments, time};
use super::{Frame, View, format};
use crate::api::problem::{ApiResult, Problem, Slug};
use crate::job::{JobRecord, Status};
use crate::rules::fingerprint::Fingerprint;
use crate::store::{FailureFilter, FailureRecord, ListFilter, Payloads};

/// The number of groups on a page.
const PAGE_SIZE: u32 = 50;
/// The number of jobs that the page of a group shows.
const SHOWN_JOBS: u32 = 20;
/// The choices of how recent the newest failure is.
const PERIODS: [(&str, &str, Option<TimeDelta>); 4] = [
    ("hour", "Hour", Some(TimeDelta::hours(1))),
    ("day", "Day", Some(TimeDelta::days(1))),
    ("week", "Week", Some(TimeDelta::weeks(1))),
    ("all", "All", None),
];

pub(super) async fn page(view: View) -> ApiResult<Response> {
    view.caller.may_use_all()?;
    let filter = filter_of(&view.frame);
    let groups = view.data.failures(&filter).await?;
    Ok(view.respond(Section::Failures, "Failures", render(&view.frame, &groups)))
}

/// The period that the URL names.
fn period(frame: &Frame) -> &'static (&'static str, &'static str, Option<TimeDelta>) {
    let named = frame.params.get("range");
    PERIODS.iter().find(|(name, ..)| named == Some(*name)).unwrap_or(&PERIODS[3])
}

fn filter_of(frame: &Frame) -> FailureFilter {
    FailureFilter {
        fingerprint: None,
        kind: frame.params.get("kind").map(str::to_owned),
        seen_after: period(frame).2.map(|period| frame.now - period),
        after: frame.params.get("after").and_then(FailureFilter::read_cursor),
        limit: PAGE_SIZE,
    }
}

fn render(frame: &Frame, groups: &[FailureRecord]) -> Markup {
    let links = PERIODS.iter().map(|(name, label, _)| {
        let url = frame.here(&frame.params.with("range", *name).without(&["after"]));
        (*label, url, *name == period(frame).0)
    });
    let note = html! {
        "Attempts of one kind that failed in the same way"
        @if let Some(kind) = frame.params.get("kind") {
            " · " span .tag { (kind) } " " a href=(frame.here(&frame.params.without(&["kind", "after"]))) { "all kinds" }
        }
    };
    html! {
        (heading("Failures", note, segments("Newest failure in the last", links)))
        (operation(frame))
        @if groups.is_empty() { (nothing(frame)) } @else {
            div .panel .flush {
                table #failures .list {
                    thead { tr {
                        th { "Error" } th .c-kind { "Kind" } th .c-number { "Failed attempts" } th .c-number { "Failed jobs" }
                        th .c-time { "First" } th .c-time { "Last" }
                        @if frame.rights.operate { th { span .unseen { "Actions" } } }
                    } }
                    tbody { @for group in groups { (row(frame, group)) } }
                }
            }
            @if let Some(last) = groups.last().filter(|_| groups.len() == PAGE_SIZE as usize) {
                nav .pages aria-label="Pages" {
                    a .button href=(frame.here(&frame.params.with("after", last.cursor()))) { "Older" }
                }
            }
        }
    }
}

fn row(frame: &Frame, group: &FailureRecord) -> Markup {
    html! {
        tr #(format!("f-{}", group.fingerprint)) data-row {
            td .c-text { a data-open .error href=(frame.url(&format!("/ui/failures/{}", group.fingerprint))) title=(group.fingerprint) {
                (format::shortened(first_line(&group.error), 160))
            } }
            td .c-kind { (kind_link(&group.kind, frame)) }
            td .c-number data-label="Failed attempts" { (format::number(group.attempts)) }
            td .c-number data-label="Failed jobs" { (failed(group)) }
            td .c-time data-label="First" { (time(group.first_seen, frame)) }
            td .c-time data-label="Last" { (time(group.last_seen, frame)) }
            @if frame.rights.operate { td .c-actions { @if group.dead > 0 { (retry(frame, group, "/ui/failures").look(Look::Small)) } } }
        }
    }
}

fn first_line(error: &str) -> &str {
    error.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or("(no message)")
}

/// How many jobs failed with this error and were not retried since. Very many are not counted.
fn failed(group: &FailureRecord) -> String {
    let more = if group.dead_or_more { "+" } else { "" };
    format!("{}{more}", format::number(group.dead))
}

fn jobs(group: &FailureRecord) -> String {
    format!("{} {}", failed(group), if group.dead == 1 { "job" } else { "jobs" })
}

fn failed_jobs(group: &FailureRecord) -> String {
    format!("{} failed {}", failed(group), if group.dead == 1 { "job" } else { "jobs" })
}

fn on_all(frame: &Frame, group: &FailureRecord, action: &str, label: String, back: &str) -> Action {
    let filter = json!({ "failure": group.fingerprint, "status": [Status::FailedPermanent.as_str()] });
    let then = frame.params.without(&["operation"]).url(&frame.url(back));
    let joined = if then.contains('?') { '&' } else { '?' };
    Action::post(frame.url("/operations"), label, "The operation has started.")
        .then(format!("{then}{joined}operation={{id}}"))
        .key(format!("{action}-{}", group.fingerprint))
        .fields(html! {
            input type="hidden" name="action" value=(action);
            input type="hidden" name="filter" data-json="raw" value=(filter.to_string());
        })
}

fn retry(frame: &Frame, group: &FailureRecord, back: &str) -> Action {
    let all = if group.dead == 1 { jobs(group) } else { format!("all {}", failed(group)) };
    on_all(frame, group, "retry", format!("Retry {all}…"), back)
        .confirm(format!(
            "Retry {} of {} with the error “{}”? The attempts of each count from 0 again.",
            failed_jobs(group),
            group.kind,
            format::shortened(first_line(&group.error), 80)
        ))
        .yes(format!("Retry {}", jobs(group)))
}

fn delete(frame: &Frame, group: &FailureRecord, back: &str) -> Action {
    let all = if group.dead == 1 { jobs(group) } else { format!("all {}", failed(group)) };
    on_all(frame, group, "delete", format!("Delete {all}…"), back)
        .confirm(format!(
            "Delete {} of {} with the error “{}”? Their history is lost.",
            failed_jobs(group),
            group.kind,
            format::shortened(first_line(&group.error), 80)
        ))
        .yes(format!("Delete {}", jobs(group)))
        .look(Look::Danger)
}

fn nothing(frame: &Frame) -> Markup {
    let is_filtered = frame.params.without(&["operation"]) != Params::default();
    if is_filtered {
        return empty(
            "No failures match",
            html! { p { a href=(frame.url("/ui/failures")) { "Show all failures" } } },
        );
    }
    empty(
        "Nothing has failed",
        html! { p { "When an attempt fails, its error appears here. Failures that differ only in numbers, ids, quoted "
        "text, addresses and paths are one group, so that one broken dependency is one line." } },
    )
}

pub(super) async fn one(view: View, Path(fingerprint): Path<String>) -> ApiResult<Response> {
    view.caller.may_use_all()?;
    let fingerprint: Fingerprint = fingerprint.parse().map_err(Problem::in_url)?;
    let filter = FailureFilter { fingerprint: Some(fingerprint), limit: 1, ..FailureFilter::default() };
    let jobs = ListFilter {
        failure: Some(fingerprint),
        limit: SHOWN_JOBS,
        payloads: Payloads::Omit,
        ..ListFilter::default()
    };
    let (groups, jobs) = tokio::try_join!(view.data.failures(&filter), view.data.jobs(&jobs))?;
    let group = groups.first().ok_or_else(|| {
        Problem::new(Slug::NotFound, format!("failure {fingerprint} does not exist, or is no longer kept"))
    })?;
    let content = render_one(&view.frame, group, &jobs.jobs, jobs.next.is_some());
    Ok(view.respond(Section::Failures, first_line(&group.error), content))
}

fn render_one(frame: &Frame, group: &FailureRecord, jobs: &[JobRecord], has_more: bool) -> Markup {
    let here = format!("/ui/failures/{}", group.fingerprint);
    let list = Params::default().with("failure", group.fingerprint.to_string()).url(&frame.url("/ui/jobs"));
    html! {
        p .crumbs { a href=(frame.url("/ui/failures")) { "Failures" } }
        (heading(format::shortened(first_line(&group.error), 120),
            html! { (kind_link(&group.kind, frame)) " · " (failed_jobs(group)) },
            html! { @if frame.rights.operate && group.dead > 0 {
                (delete(frame, group, &here)) (retry(frame, group, &here).look(Look::Primary))
            } }))
        (operation(frame))
        section #facts .panel {
            dl .facts .wide {
                dt { "Kind" } dd { (kind_link(&group.kind, frame)) }
                dt { "Failed attempts" } dd { (format::number(group.attempts)) }
                dt { "Failed jobs" } dd { (failed(group)) @if group.dead > 0 { span .faint { ", not retried since" } } }
                dt { "First seen" } dd { (time(group.first_seen, frame)) }
                dt { "Last seen" } dd { (time(group.last_seen, frame)) ", " (job_link(group.job, frame)) }
                dt { "Fingerprint" } dd { code { (group.fingerprint) } }
            }
        }
        (code_block("Newest error", &group.error))
        section .panel .flush {
            div .panel-head { h2 { "Jobs" } @if has_more || !jobs.is_empty() { a href=(list) { "Open as a list" } } }
            @if jobs.is_empty() && has_more { p .faint .padded { "The search took too long. The list continues it." } }
            @else if jobs.is_empty() { p .faint .padded { "No job with this error is kept: they were retried, deleted or succeeded later." } }
            @else { (rows(frame, jobs)) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs::tests::hostile_job;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn group(dead: u64) -> FailureRecord {
        FailureRecord {
            fingerprint: Fingerprint::of("mail", "x"),
            kind: HOSTILE.into(),
            attempts: 1_234,
            dead,
            dead_or_more: dead == 1_000,
            first_seen: "2031-05-06T06:00:00Z".parse().unwrap(),
            last_seen: "2031-05-06T07:00:00Z".parse().unwrap(),
            job: crate::job::JobId::new(),
            error: format!("\n{HOSTILE}\nat line 7"),
        }
    }

    #[test]
    fn kinds_and_errors_are_escaped() {
        assert_escaped(&render(&Frame::of_operator("/ui/failures"), &[group(3)]));
        let job = hostile_job(Status::FailedPermanent);
        assert_escaped(&render_one(&Frame::of_operator("/ui/failures/x"), &group(3), &[job], true));
    }

    #[test]
    fn only_operators_of_groups_with_failed_jobs_can_act() {
        let page = |frame: Frame, dead| render(&frame, &[group(dead)]).0;
        let operator = page(Frame::of_operator("/ui/failures"), 1_000);
        assert!(
            operator.contains("/q/operations") && operator.contains("Retry 1,000+ failed jobs of"),
            "{operator}"
        );
        assert!(operator.contains("Retry all 1,000+…"), "{operator}");
        assert!(!page(Frame::of_operator("/ui/failures"), 0).contains("/operations"));
        assert!(!page(Frame::of_reader("/ui/failures"), 5).contains("<form"));
        assert!(!render_one(&Frame::of_reader("/ui/failures/x"), &group(5), &[], false).0.contains("<form"));
    }

    #[test]
    fn an_action_returns_to_the_filtered_page() {
        let params = Params::new(vec![("range".into(), "day".into()), ("operation".into(), "old".into())]);
        let frame = Frame { params, ..Frame::of_operator("/ui/failures") };
        let page = render(&frame, &[group(1)]).0;
        assert!(page.contains("data-then=\"/q/ui/failures?range=day&amp;operation={id}\""), "{page}");
    }
}
