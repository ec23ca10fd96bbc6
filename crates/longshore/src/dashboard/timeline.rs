//! What happened to a job: its attempts, newest first, between its enqueueing and its present state.

use maud::{Markup, html};

use super::widgets::{self, since, time};
use super::{Frame, format};
use crate::job::{AttemptEnd, AttemptRecord, JobRecord, Status, WorkerId};
use crate::rules::lifecycle::FAR_FUTURE;
use crate::store::WorkerRecord;

pub(super) fn render(frame: &Frame, job: &JobRecord, workers: &[WorkerRecord]) -> Markup {
    let mut attempts: Vec<&AttemptRecord> = job.errors.iter().collect();
    attempts.sort_by_key(|attempt| std::cmp::Reverse((attempt.ended_at, attempt.lease_no)));
    html! {
        section .panel {
            div .panel-head { h2 { "Timeline" } span .faint { "newest first" } }
            ol #timeline .timeline {
                (present(frame, job))
                @if was_retried(job, attempts.first().copied()) { (retried(job)) }
                @for (i, attempt) in attempts.iter().enumerate() {
                    (entry(frame, attempt, workers, i == 0))
                    @if was_retried_between(attempt, attempts.get(i + 1).copied()) { (retried(job)) }
                }
                @if job.errors_omitted > 0 {
                    li .is-omitted { p { (format::counted(job.errors_omitted.into(), "older attempt is", "older attempts are"))
                        " no longer kept" } }
                }
                li .is-created {
                    p { b { "Enqueued" } " " (time(job.created_at, frame)) }
                    @if let Some(context) = &job.context { p .faint { (context) } }
                }
            }
        }
    }
}

/// An operator's retry has no record of its own, but the attempts count from 0 again.
fn retried(job: &JobRecord) -> Markup {
    html! {
        li .is-queued {
            p { b { "Retried by an operator" } }
            p .faint { "the attempts count from 0 again, up to " (job.max_attempts) }
        }
    }
}

/// Whether the job was retried after the newest attempt that failed.
pub(super) fn was_retried(job: &JobRecord, newest: Option<&AttemptRecord>) -> bool {
    let Some(failed) = newest.filter(|attempt| attempt.what == AttemptEnd::Failed) else { return false };
    match job.status {
        Status::Running | Status::Succeeded => job.attempts <= failed.attempt,
        _ => job.attempts < failed.attempt,
    }
}

/// Whether the job was retried between two attempts: the number did not grow after a failure.
fn was_retried_between(newer: &AttemptRecord, older: Option<&AttemptRecord>) -> bool {
    older.is_some_and(|older| older.what == AttemptEnd::Failed && newer.attempt <= older.attempt)
}

/// What the job does now, or how it ended.
fn present(frame: &Frame, job: &JobRecord) -> Markup {
    let class = format!("is-{}", widgets::status_word(job.status));
    html! {
        li class=(class) {
            @match job.status {
                Status::Running => {
                    p { b { "Attempt " (job.attempts) " is running" }
                        @if let Some(at) = job.locked_at { " for " (since(at, frame)) } }
                    p .faint {
                        @match (&job.locked_by_name, job.locked_by) {
                            (Some(name), _) => { "on " a .quiet href=(frame.url("/ui/workers")) { (name) } },
                            (None, Some(worker)) => { "on " code { (worker) } },
                            (None, None) => {}
                        }
                        @if job.cancel_requested { ", asked to stop" }
                    }
                }
                Status::Queued | Status::Retrying => {
                    p { b { @if job.status == Status::Queued { "Waiting" } @else { "Waiting for another attempt" } } }
                    p .faint {
                        @if job.run_at >= FAR_FUTURE { "held until other tasks have ended" }
                        @else if job.run_at > frame.now { "due " (time(job.run_at, frame)) }
                        @else { "due since " (time(job.run_at, frame)) }
                    }
                }
                Status::Succeeded | Status::FailedPermanent | Status::Cancelled => {
                    p { b { (ended_word(job)) }
                        @if let Some(at) = job.finished_at { " " (time(at, frame)) } }
                    @if let (Status::Succeeded, Some(from), Some(to)) = (job.status, job.started_at, job.finished_at) {
                        p .faint { "attempt " (job.attempts) ", ran for " (format::duration(format::between(from, to))) }
                    }
                }
            }
        }
    }
}

fn ended_word(job: &JobRecord) -> &'static str {
    match job.status {
        Status::Succeeded => "Succeeded",
        Status::Cancelled => "Cancelled",
        _ => "Failed",
    }
}

fn entry(frame: &Frame, attempt: &AttemptRecord, workers: &[WorkerRecord], is_newest: bool) -> Markup {
    let (class, word) = match attempt.what {
        AttemptEnd::Failed => ("is-failed", "failed"),
        AttemptEnd::Interrupted => ("is-retrying", "was interrupted"),
        AttemptEnd::Snoozed => ("is-queued", "snoozed"),
        AttemptEnd::Released => ("is-queued", "was released"),
    };
    html! {
        li class=(class) {
            p { b { "Attempt " (attempt.attempt) " " (word) } " " (time(attempt.ended_at, frame)) }
            p .faint {
                "ran for " (format::duration(format::between(attempt.started_at, attempt.ended_at)))
                @if let Some(worker) = attempt.worker { " on " (worker_name(worker, workers)) }
            }
            @if let Some(error) = &attempt.error { (full_error(error, is_newest)) }
        }
    }
}

fn worker_name(worker: WorkerId, workers: &[WorkerRecord]) -> Markup {
    let known = workers.iter().find(|known| known.id == worker);
    html! {
        @match known {
            Some(known) => span title=(worker) { (known.name) },
            None => code title="This worker is no longer registered." { (format::shortened(&worker.to_string(), 8)) },
        }
    }
}

/// The whole error. A long one is folded, except in the newest attempt.
fn full_error(error: &str, is_newest: bool) -> Markup {
    let first = error.lines().next().unwrap_or_default();
    let is_long = error.lines().count() > 3 || error.chars().count() > 300;
    html! {
        @if is_long && !is_newest {
            details .error-text {
                summary { (format::shortened(first, 160)) }
                pre tabindex="0" { (error) }
            }
        } @else { pre .error-text tabindex="0" { (error) } }
    }
}

#[cfg(test)]
mod tests {
    use super::super::jobs::tests::hostile_job;
    use super::super::{HOSTILE, assert_escaped};
    use super::*;

    fn attempt(number: u16, error: &str) -> AttemptRecord {
        let at = |text: &str| text.parse().unwrap();
        AttemptRecord {
            attempt: number,
            lease_no: number.into(),
            worker: None,
            started_at: at("2031-05-06T07:00:00Z"),
            ended_at: at(&format!("2031-05-06T07:0{number}:00Z")),
            what: AttemptEnd::Failed,
            error: Some(error.into()),
        }
    }

    #[test]
    fn attempts_are_listed_newest_first_with_their_full_errors() {
        let mut job = hostile_job(Status::FailedPermanent);
        let long = format!("first line\n{}", "x".repeat(400));
        job.errors = vec![attempt(1, &long), attempt(2, HOSTILE)];
        let page = render(&Frame::of_operator("/ui/jobs/1"), &job, &[]);
        assert_escaped(&page);
        let (newer, older) =
            (page.0.find("Attempt 2 failed").unwrap(), page.0.find("Attempt 1 failed").unwrap());
        assert!(newer < older && page.0.contains(&"x".repeat(400)), "{}", page.0);
        assert!(page.0.contains("ran for 2 min"), "{}", page.0);
    }

    #[test]
    fn a_retry_by_an_operator_is_an_entry_of_its_own() {
        let shown = |job: &JobRecord| render(&Frame::of_operator("/ui/jobs/1"), job, &[]).0;
        let retried = "Retried by an operator";
        let mut job = hostile_job(Status::Queued);
        (job.attempts, job.errors) = (0, vec![attempt(1, "a"), attempt(2, "b")]);
        let page = shown(&job);
        assert!(page.find(retried).unwrap() < page.find("Attempt 2 failed").unwrap(), "{page}");
        job.attempts = 2;
        assert!(!shown(&job).contains(retried), "it waits for attempt 3");
        (job.status, job.attempts) = (Status::Running, 1);
        assert!(shown(&job).contains(retried), "attempt 1 again");
        let mut again = attempt(1, "c");
        (again.lease_no, again.ended_at) = (3, "2031-05-06T07:03:00Z".parse().unwrap());
        job.errors.push(again);
        (job.status, job.attempts) = (Status::FailedPermanent, 1);
        let page = shown(&job);
        assert_eq!(page.matches(retried).count(), 1, "{page}");
        assert!(page.find(retried).unwrap() < page.find("Attempt 2 failed").unwrap(), "{page}");
    }

    #[test]
    fn hostile_names_are_escaped_in_every_state() {
        for status in Status::ALL {
            assert_escaped(&render(&Frame::of_operator("/ui/jobs/1"), &hostile_job(status), &[]));
        }
    }
}
