//! What an operator should look at, with remedies. Pure: from what the client returned to a list.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::TimeDelta;
use maud::{Markup, html};

use super::url::{Params, encoded};
use super::{Frame, format, icons};
use crate::job::{Outcome, Status};
use crate::store::{Count, QueueRecord, Schedule, Tallied, WorkerRecord};

/// A due job that has waited for longer than this is a backlog.
const OLD: Duration = Duration::from_secs(5 * 60);
/// A schedule whose tick is later than this has no process that fires it.
const LATE_TICK: TimeDelta = TimeDelta::minutes(2);
/// The maximum number of entries.
const MAX_SHOWN: usize = 40;
/// How many of them are shown at once; the others are folded.
const UNFOLDED: usize = 3;

/// What the rules look at.
pub(super) struct Situation<'a> {
    pub(super) counts: &'a [Count],
    pub(super) overdue: &'a [(String, Duration)],
    pub(super) queues: &'a [QueueRecord],
    /// Empty if the caller may not see workers.
    pub(super) workers: Option<&'a [WorkerRecord]>,
    pub(super) schedules: &'a [Schedule],
    /// What ended in the last hour.
    pub(super) tallied: &'a [Tallied],
}

/// Something to look at.
#[derive(Debug, PartialEq, Eq)]
struct Finding {
    /// Lower is more urgent.
    urgency: u8,
    what: String,
    remedy: String,
    href: String,
    link: &'static str,
}

pub(super) fn render(frame: &Frame, situation: &Situation<'_>) -> Markup {
    let findings = findings(frame, situation);
    html! {
        section #attention .panel .attention {
            div .panel-head { h2 { "Needs attention" }
                @if !findings.is_empty() { span .count .is-warning { (findings.len()) } }
            }
            @if findings.is_empty() {
                p .all-good { (icons::good()) "Nothing. Queues move, workers are alive, and no job failed in the last hour." }
            } @else {
                ul { @for finding in findings.iter().take(UNFOLDED) { (entry(finding)) } }
                @if findings.len() > UNFOLDED {
                    details #attention-more {
                        summary { (findings.len() - UNFOLDED) " more" }
                        ul { @for finding in findings.iter().take(MAX_SHOWN).skip(UNFOLDED) { (entry(finding)) } }
                    }
                }
            }
        }
    }
}

fn entry(finding: &Finding) -> Markup {
    html! {
        li {
            (icons::warning())
            div { p .strong { (finding.what) } p .faint { (finding.remedy) } }
            a .button .small href=(finding.href) { (finding.link) }
        }
    }
}

fn findings(frame: &Frame, situation: &Situation<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    lost_workers(frame, situation, &mut found);
    missing_workers(frame, situation, &mut found);
    failures(frame, situation, &mut found);
    backlogs(frame, situation, &mut found);
    paused_queues(frame, situation, &mut found);
    late_schedules(frame, situation, &mut found);
    found.sort_by_key(|finding| finding.urgency);
    found
}

fn is_live(worker: &WorkerRecord) -> bool {
    worker.dead_at.is_none() && !worker.stale
}

fn lost_workers(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    for worker in situation.workers.unwrap_or_default() {
        if worker.dead_at.is_none() && worker.stale {
            let silent = format::duration(format::between(worker.heartbeat_at, frame.now));
            found.push(Finding {
                urgency: 0,
                what: format!("Worker {} has sent no heartbeat for {silent}", worker.name),
                remedy: match worker.running {
                    0 => "Restart it if it should run. It holds no jobs.".into(),
                    n => format!(
                        "Restart it. A sweep returns its {} to the queue; a live worker or server does one by itself.",
                        format::counted(n, "job", "jobs")
                    ),
                },
                href: frame.url("/ui/workers"),
                link: "Workers",
            });
        }
    }
}

/// Waiting jobs that no live worker takes.
fn missing_workers(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let Some(workers) = situation.workers else { return };
    let mut waiting: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for count in situation.counts {
        if matches!(count.status, Status::Queued | Status::Retrying) {
            *waiting.entry((&count.queue, &count.kind)).or_default() += count.jobs;
        }
    }
    for ((queue, kind), jobs) in waiting.into_iter().filter(|(_, jobs)| *jobs > 0) {
        let of_queue = || workers.iter().filter(|worker| is_live(worker) && worker.claims_from(queue));
        let takes = |worker: &WorkerRecord| {
            worker.kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|one| one == kind))
        };
        if !of_queue().any(takes) {
            let no_one = of_queue().next().is_none();
            let jobs = format::counted(jobs, "job", "jobs");
            let href =
                Params::default().with("status", "queued,retrying").with("kind", kind).with("queue", queue);
            found.push(Finding {
                urgency: 1,
                what: if no_one {
                    format!("{jobs} of {kind} wait in {queue}, and no live worker takes jobs from this queue")
                } else {
                    format!(
                        "{jobs} of {kind} wait in {queue}, and no live worker of this queue handles the kind"
                    )
                },
                remedy: format!("Start a worker that handles {kind} and takes jobs from {queue}."),
                href: href.url(&frame.url("/ui/jobs")),
                link: "Jobs",
            });
        }
    }
}

/// Kinds of which jobs failed for good in the last hour.
fn failures(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let mut kinds: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for tally in situation.tallied {
        let (failed, ended) = kinds.entry(&tally.kind).or_default();
        *ended += tally.jobs;
        if tally.outcome == Outcome::FailedPermanent {
            *failed += tally.jobs;
        }
    }
    for (kind, (failed, ended)) in kinds.into_iter().filter(|(_, (failed, _))| *failed > 0) {
        let href = Params::default()
            .with("status", Status::FailedPermanent.as_str())
            .with("kind", kind)
            .with("ended_after", format::machine(frame.now - TimeDelta::hours(1)));
        found.push(Finding {
            urgency: if failed * 2 > ended { 2 } else { 4 },
            what: format!("{} of {kind} failed in the last hour", format::counted(failed, "job", "jobs")),
            remedy: format!(
                "{} % of those that ended. Read the errors; when the cause is fixed, select the jobs and retry them.",
                failed * 100 / ended.max(1)
            ),
            href: href.url(&frame.url("/ui/jobs")),
            link: "Failed jobs",
        });
    }
}

fn is_paused(queues: &[QueueRecord], name: &str) -> bool {
    queues.iter().any(|queue| queue.name == name && queue.paused)
}

fn backlogs(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let old =
        situation.overdue.iter().filter(|(queue, age)| *age >= OLD && !is_paused(situation.queues, queue));
    for (queue, age) in old {
        found.push(Finding {
            urgency: 3,
            what: format!("The oldest due job of {queue} has waited for {}", format::duration(*age)),
            remedy: "Add workers or raise their concurrency, or look at the limit and the rate of the queue."
                .into(),
            href: frame.url(&format!("/ui/queues/{}", encoded(queue))),
            link: "Queue",
        });
    }
}

fn paused_queues(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    for queue in situation.queues.iter().filter(|queue| queue.paused && queue.waiting > 0) {
        let age = situation.overdue.iter().find(|(name, _)| *name == queue.name);
        let age = age.map(|(_, age)| format!("; the oldest has waited for {}", format::duration(*age)));
        found.push(Finding {
            urgency: 5,
            what: format!(
                "{} is paused with {}{}",
                queue.name,
                format::counted(queue.waiting, "waiting job", "waiting jobs"),
                age.unwrap_or_default()
            ),
            remedy: "Resume it when its jobs may run again.".into(),
            href: frame.url(&format!("/ui/queues/{}", encoded(&queue.name))),
            link: "Queue",
        });
    }
}

fn late_schedules(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    for schedule in situation.schedules.iter().filter(|schedule| !schedule.paused) {
        if frame.now - schedule.next_at > LATE_TICK {
            let late = format::duration(format::between(schedule.next_at, frame.now));
            found.push(Finding {
                urgency: 1,
                what: format!("Schedule {} is {late} late", schedule.name),
                remedy: "No process fires schedules. Start a worker, or a server with cron.".into(),
                href: frame.url("/ui/cron"),
                link: "Cron",
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;
    use crate::job::WorkerId;

    fn worker(kinds: Option<Vec<String>>, stale: bool) -> WorkerRecord {
        let at = "2031-05-06T07:00:00Z".parse().unwrap();
        WorkerRecord {
            id: WorkerId::new(),
            name: HOSTILE.into(),
            queues: vec!["mail".into()],
            kinds,
            concurrency: 4,
            stale_after: Duration::from_secs(60),
            started_at: at,
            heartbeat_at: at,
            dead_at: None,
            stale,
            running: 2,
            host: None,
            pid: None,
            version: None,
        }
    }

    fn waiting(queue: &str, kind: &str) -> Count {
        Count { status: Status::Queued, queue: queue.into(), kind: kind.into(), jobs: 7, estimated: false }
    }

    const CALM: Situation<'_> = Situation {
        counts: &[],
        overdue: &[],
        queues: &[],
        workers: Some(&[]),
        schedules: &[],
        tallied: &[],
    };

    fn whats(situation: &Situation<'_>) -> Vec<String> {
        findings(&Frame::of_operator("/ui"), situation).into_iter().map(|finding| finding.what).collect()
    }

    #[test]
    fn a_calm_queue_needs_nothing() {
        assert!(whats(&CALM).is_empty());
        let counts = [waiting("mail", "send")];
        let workers = [worker(Some(vec!["send".into()]), false)];
        assert!(whats(&Situation { counts: &counts, workers: Some(&workers), ..CALM }).is_empty());
    }

    #[test]
    fn waiting_jobs_without_a_worker_are_told_apart_by_queue_and_kind() {
        let counts = [waiting("mail", "send"), waiting("images", "resize")];
        let workers = [worker(Some(vec!["other".into()]), false)];
        let whats = whats(&Situation { counts: &counts, workers: Some(&workers), ..CALM });
        assert!(whats[0].contains("images") && whats[0].contains("takes jobs from this queue"), "{whats:?}");
        assert!(whats[1].contains("mail") && whats[1].contains("handles the kind"), "{whats:?}");
        assert!(
            self::whats(&Situation { counts: &counts, workers: None, ..CALM }).is_empty(),
            "unknown is no finding"
        );
    }

    #[test]
    fn stale_workers_paused_queues_old_backlogs_and_failures_are_found() {
        let workers = [worker(None, true)];
        let mut paused = QueueRecord::empty("mail");
        (paused.paused, paused.waiting) = (true, 3);
        let overdue = [("mail".to_owned(), OLD * 2), ("images".to_owned(), OLD), ("new".to_owned(), OLD / 2)];
        let tallied = [Tallied {
            minute: "2031-05-06T07:00:00Z".parse().unwrap(),
            queue: "mail".into(),
            kind: HOSTILE.into(),
            outcome: Outcome::FailedPermanent,
            jobs: 3,
            run_ms: Vec::new(),
        }];
        let situation = Situation {
            workers: Some(&workers),
            queues: &[paused],
            overdue: &overdue,
            tallied: &tallied,
            ..CALM
        };
        let whats = whats(&situation);
        assert_eq!(whats.len(), 4, "a paused queue is not also a backlog: {whats:?}");
        assert!(whats[0].contains("no heartbeat for 8 min"), "{whats:?}");
        assert!(whats[2].contains("images has waited for 5 min"), "{whats:?}");
        assert_escaped(&render(&Frame::of_operator("/ui"), &situation));
    }
}
