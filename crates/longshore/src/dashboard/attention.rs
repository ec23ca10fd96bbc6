//! What an operator should look at, with remedies. Pure: from what the client returned to a list.

use std::collections::{BTreeMap, HashSet};
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
/// How many names a finding lists.
const NAMED: usize = 4;
/// How many of them are shown at once; the others are folded.
const UNFOLDED: usize = 3;

/// What the rules look at.
#[derive(Clone, Copy)]
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
    // A fold with one entry would take as much space as the entry.
    let unfolded = if findings.len() == UNFOLDED + 1 { UNFOLDED + 1 } else { UNFOLDED };
    html! {
        section #attention .panel .attention {
            div .panel-head { h2 { "Needs attention" }
                @if !findings.is_empty() { span .count .is-warning { (findings.len()) } }
            }
            @if findings.is_empty() {
                p .all-good { (icons::good()) "Nothing. Queues move, workers are alive, and no job failed in the last hour." }
            } @else {
                ul { @for finding in findings.iter().take(unfolded) { (entry(finding)) } }
                @if findings.len() > unfolded {
                    details #attention-more {
                        summary { (findings.len() - unfolded) " more" }
                        ul { @for finding in findings.iter().take(MAX_SHOWN).skip(unfolded) { (entry(finding)) } }
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
    missing_workers(frame, situation, &mut found);
    failures(frame, situation, &mut found);
    backlogs(frame, situation, &mut found);
    paused_queues(frame, situation, &mut found);
    paused_groups(frame, situation, &mut found);
    late_schedules(frame, situation, &mut found);
    found.sort_by_key(|finding| finding.urgency);
    found
}

fn is_live(worker: &WorkerRecord) -> bool {
    worker.dead_at.is_none() && !worker.stale
}

/// Waiting jobs that no live worker takes, by queue and kind.
struct Stranded<'a> {
    queue: &'a str,
    kind: &'a str,
    jobs: u64,
    /// Whether a live worker takes other kinds from the queue.
    has_other_workers: bool,
}

fn stranded<'a>(situation: &Situation<'a>) -> Vec<Stranded<'a>> {
    let Some(workers) = situation.workers else { return Vec::new() };
    let paused = paused(situation);
    let mut waiting: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    for count in situation.counts {
        if matches!(count.status, Status::Queued | Status::Retrying) && !paused.contains(count.queue.as_str())
        {
            *waiting.entry((&count.queue, &count.kind)).or_default() += count.jobs;
        }
    }
    let live =
        |queue: &'a str| workers.iter().filter(move |worker| is_live(worker) && worker.claims_from(queue));
    waiting
        .into_iter()
        .filter(|((queue, kind), jobs)| *jobs > 0 && !live(queue).any(|worker| handles(worker, kind)))
        .map(|((queue, kind), jobs)| {
            // A server that only does upkeep registers as a worker without kinds.
            let takes_some =
                |worker: &WorkerRecord| worker.kinds.as_ref().is_none_or(|kinds| !kinds.is_empty());
            Stranded { queue, kind, jobs, has_other_workers: live(queue).any(takes_some) }
        })
        .collect()
}

fn handles(worker: &WorkerRecord, kind: &str) -> bool {
    worker.kinds.as_ref().is_none_or(|kinds| kinds.iter().any(|one| one == kind))
}

fn paused<'a>(situation: &Situation<'a>) -> HashSet<&'a str> {
    situation.queues.iter().filter(|queue| queue.paused).map(|queue| queue.name.as_str()).collect()
}

/// The queues of these jobs, each once.
fn queues_of<'a>(stranded: &[Stranded<'a>]) -> Vec<&'a str> {
    let mut queues: Vec<&str> = stranded.iter().map(|stranded| stranded.queue).collect();
    queues.dedup();
    queues
}

/// Workers without a heartbeat, and what does not run because of them; and other waiting jobs that no live
/// worker takes.
fn missing_workers(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let workers = situation.workers.unwrap_or_default();
    let took = |worker: &&WorkerRecord, stranded: &Stranded<'_>| {
        worker.claims_from(stranded.queue) && handles(worker, stranded.kind)
    };
    let all = stranded(situation);
    // A worker that was declared dead matters if no other one has taken over.
    let is_lost = |worker: &&WorkerRecord| {
        worker.stale && worker.dead_at.is_none()
            || super::workers::is_lost(worker) && all.iter().any(|stranded| took(worker, stranded))
    };
    let lost: Vec<&WorkerRecord> = workers.iter().filter(is_lost).collect();
    let (because, others): (Vec<Stranded<'_>>, Vec<Stranded<'_>>) =
        all.iter().map(Stranded::copy).partition(|stranded| lost.iter().any(|worker| took(worker, stranded)));
    if let Some(finding) = lost_workers(frame, &lost, &because) {
        found.push(finding);
    }
    let (of_kind, of_queue): (Vec<Stranded<'_>>, Vec<Stranded<'_>>) =
        others.into_iter().partition(|stranded| stranded.has_other_workers);
    if let Some(finding) = without_worker(frame, &of_queue) {
        found.push(finding);
    }
    if let Some(finding) = without_handler(frame, &of_kind) {
        found.push(finding);
    }
}

impl<'a> Stranded<'a> {
    fn copy(&self) -> Stranded<'a> {
        Stranded { ..*self }
    }
}

fn lost_workers(frame: &Frame, lost: &[&WorkerRecord], because: &[Stranded<'_>]) -> Option<Finding> {
    let newest = lost.iter().map(|worker| worker.heartbeat_at).max()?;
    let silent = format::duration(format::between(newest, frame.now));
    let names: Vec<&str> = lost.iter().map(|worker| worker.name.as_str()).collect();
    let held: u64 = lost.iter().map(|worker| worker.running).sum();
    let mut remedy = match lost {
        [_] => "Restart it if it should run.".to_owned(),
        _ => "Restart them if they should run.".to_owned(),
    };
    if !because.is_empty() {
        let jobs = because.iter().map(|stranded| stranded.jobs).sum();
        remedy += &format!(
            " Until then {} in {} {} not start.",
            format::counted(jobs, "job", "jobs"),
            format::listed(&queues_of(because), NAMED),
            if jobs == 1 { "does" } else { "do" }
        );
    }
    if held > 0 {
        remedy += &format!(
            " A sweep returns the {} that they hold to the queues; a live worker or server does one by itself.",
            format::counted(held, "job", "jobs")
        );
    }
    let what = match lost {
        [worker] => format!("Worker {} has sent no heartbeat for {silent}", worker.name),
        lost => format!(
            "{} workers have sent no heartbeat for {silent}: {}",
            lost.len(),
            format::listed(&names, NAMED)
        ),
    };
    Some(Finding { urgency: 0, what, remedy, href: frame.url("/ui/workers"), link: "Workers" })
}

/// Queues from which no live worker takes jobs.
fn without_worker(frame: &Frame, stranded: &[Stranded<'_>]) -> Option<Finding> {
    let queues = queues_of(stranded);
    let jobs = format::counted(stranded.iter().map(|stranded| stranded.jobs).sum(), "job waits", "jobs wait");
    let (href, link) = match queues.as_slice() {
        [] => return None,
        [queue] => (format!("/ui/queues/{}", encoded(queue)), "Queue"),
        _ => ("/ui/queues".to_owned(), "Queues"),
    };
    Some(Finding {
        urgency: 1,
        what: format!(
            "{jobs} in {}, and no live worker takes jobs from there",
            format::listed(&queues, NAMED)
        ),
        remedy: match queues.as_slice() {
            [queue] => format!("Start a worker that takes jobs from {queue}."),
            _ => "Start workers that take jobs from these queues.".into(),
        },
        href: frame.url(&href),
        link,
    })
}

/// Kinds that no live worker of their queue handles.
fn without_handler(frame: &Frame, stranded: &[Stranded<'_>]) -> Option<Finding> {
    let jobs: u64 = stranded.iter().map(|stranded| stranded.jobs).sum();
    let (what, href, link) = match stranded {
        [] => return None,
        [one] => {
            let jobs = format::counted(jobs, "job", "jobs");
            let what = format!(
                "{jobs} of {} wait in {}, and no live worker of this queue handles the kind",
                one.kind, one.queue
            );
            let params = Params::default()
                .with("status", "queued,retrying")
                .with("kind", one.kind)
                .with("queue", one.queue);
            (what, params.url("/ui/jobs"), "Jobs")
        }
        several => {
            let names: Vec<String> =
                several.iter().map(|one| format!("{} in {}", one.kind, one.queue)).collect();
            let jobs = format::counted(jobs, "job waits", "jobs wait");
            let what =
                format!("{jobs} for workers that handle their kinds: {}", format::listed(&names, NAMED));
            (what, "/ui/kinds".to_owned(), "Kinds")
        }
    };
    let remedy = match stranded {
        [one] => format!("Start a worker that handles {} and takes jobs from {}.", one.kind, one.queue),
        _ => "Start workers that handle these kinds.".into(),
    };
    Some(Finding { urgency: 1, what, remedy, href: frame.url(&href), link })
}

/// Kinds of which jobs failed in the last hour: those of which most failed one by one, the others together.
fn failures(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let mut kinds: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for tally in situation.tallied {
        let (failed, ended) = kinds.entry(&tally.kind).or_default();
        *ended += tally.jobs;
        if tally.outcome == Outcome::FailedPermanent {
            *failed += tally.jobs;
        }
    }
    let of_kind = |urgency: u8, kind: &str, failed: u64, ended: u64| {
        let href = Params::default()
            .with("status", Status::FailedPermanent.as_str())
            .with("kind", kind)
            .with("ended", "hour");
        Finding {
            urgency,
            what: format!("{} of {kind} failed in the last hour", format::counted(failed, "job", "jobs")),
            remedy: format!(
                "{} of those that ended. Read the errors; when the cause is fixed, select the jobs and retry them.",
                format::percent(failed, ended)
            ),
            href: href.url(&frame.url("/ui/jobs")),
            link: "Failed jobs",
        }
    };
    let kinds = kinds.into_iter().filter(|(_, (failed, _))| *failed > 0);
    let (most, mut some): (Vec<_>, Vec<_>) = kinds.partition(|(_, (failed, ended))| failed * 2 > *ended);
    found.extend(most.into_iter().map(|(kind, (failed, ended))| of_kind(2, kind, failed, ended)));
    match some.as_mut_slice() {
        [] => {}
        [(kind, (failed, ended))] => found.push(of_kind(4, kind, *failed, *ended)),
        some => {
            some.sort_by_key(|(_, (failed, _))| std::cmp::Reverse(*failed));
            let jobs: u64 = some.iter().map(|(_, (failed, _))| failed).sum();
            let names: Vec<String> = some
                .iter()
                .map(|(kind, (failed, ended))| {
                    format!("{} of {kind} ({})", format::number(*failed), format::percent(*failed, *ended))
                })
                .collect();
            found.push(Finding {
                urgency: 4,
                what: format!(
                    "{} of {} kinds failed in the last hour",
                    format::counted(jobs, "job", "jobs"),
                    some.len()
                ),
                remedy: format!(
                    "{}. Read the errors; when a cause is fixed, retry its jobs.",
                    format::listed(&names, NAMED)
                ),
                href: frame.url("/ui/failures?range=hour"),
                link: "Failures",
            });
        }
    }
}

/// Queues with old due jobs, except those that a missing worker or a pause explains.
fn backlogs(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let (paused, stranded) = (paused(situation), stranded(situation));
    let is_explained =
        |queue: &str| paused.contains(queue) || stranded.iter().any(|stranded| stranded.queue == queue);
    let mut old: Vec<&(String, Duration)> =
        situation.overdue.iter().filter(|(queue, age)| *age >= OLD && !is_explained(queue)).collect();
    old.sort_by_key(|(_, age)| std::cmp::Reverse(*age));
    let names: Vec<&str> = old.iter().map(|(queue, _)| queue.as_str()).collect();
    let Some((first, oldest)) = old.first() else { return };
    let oldest = format::duration(*oldest);
    let (what, href, link) = match names.as_slice() {
        [_] => (
            format!("The oldest due job of {first} has waited for {oldest}"),
            format!("/ui/queues/{}", encoded(first)),
            "Queue",
        ),
        names => (
            format!("Due jobs of {} have waited for up to {oldest}", format::listed(names, NAMED)),
            "/ui/queues".to_owned(),
            "Queues",
        ),
    };
    found.push(Finding {
        urgency: 3,
        what,
        remedy: "Add workers or raise their concurrency, or look at limits, rates and paused groups.".into(),
        href: frame.url(&href),
        link,
    });
}

fn paused_groups(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    for queue in situation.queues.iter().filter(|queue| queue.paused_groups > 0) {
        let groups = queue.paused_groups;
        found.push(Finding {
            urgency: 5,
            what: format!(
                "{} of {} {} paused",
                format::counted(groups, "group", "groups"),
                queue.name,
                if groups == 1 { "is" } else { "are" }
            ),
            remedy: match groups {
                1 => "Its jobs do not start. Resume the group when they may run again.".into(),
                _ => "Their jobs do not start. Resume the groups when they may run again.".into(),
            },
            href: frame.url(&format!("/ui/queues/{}#groups", encoded(&queue.name))),
            link: "Groups",
        });
    }
}

fn paused_queues(frame: &Frame, situation: &Situation<'_>, found: &mut Vec<Finding>) {
    let ages: BTreeMap<&str, Duration> =
        situation.overdue.iter().map(|(queue, age)| (queue.as_str(), *age)).collect();
    for queue in situation.queues.iter().filter(|queue| queue.paused && queue.waiting > 0) {
        let age = ages.get(queue.name.as_str());
        let age = age.map(|age| format!("; the oldest has waited for {}", format::duration(*age)));
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
pub(super) mod tests {
    use super::super::{HOSTILE, assert_escaped};
    use super::*;
    use crate::job::WorkerId;

    pub(in super::super) fn worker(kinds: Option<Vec<String>>, stale: bool) -> WorkerRecord {
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
    fn waiting_jobs_without_a_worker_are_grouped_by_cause() {
        let counts = [waiting("mail", "send"), waiting("images", "resize"), waiting("media", "cut")];
        let workers = [worker(Some(vec!["other".into()]), false)];
        let situation = Situation { counts: &counts, workers: Some(&workers), ..CALM };
        assert_eq!(
            whats(&situation),
            [
                "14 jobs wait in images and media, and no live worker takes jobs from there",
                "7 jobs of send wait in mail, and no live worker of this queue handles the kind",
            ]
        );
        let mut paused = QueueRecord::empty("images");
        (paused.paused, paused.waiting) = (true, 7);
        let queues = [paused];
        let overdue = [("media".to_owned(), OLD), ("images".to_owned(), OLD)];
        let found = whats(&Situation { queues: &queues, overdue: &overdue, ..situation });
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found[0], "7 jobs wait in media, and no live worker takes jobs from there");
        assert!(found[2].starts_with("images is paused with 7 waiting jobs"), "{found:?}");
        let unknown = Situation { workers: None, queues: &[], overdue: &[], ..situation };
        assert!(whats(&unknown).is_empty(), "unknown is no finding");
    }

    #[test]
    fn lost_workers_are_one_finding_that_explains_what_does_not_run() {
        let counts = [waiting("mail", "send"), waiting("mail", "greet")];
        let declared_dead = |kinds| {
            let mut dead = worker(kinds, true);
            dead.dead_at = Some(dead.heartbeat_at + TimeDelta::minutes(2));
            dead
        };
        let workers = [worker(None, true), declared_dead(None), worker(Some(Vec::new()), false)];
        let situation = Situation { counts: &counts, workers: Some(&workers), ..CALM };
        let found = findings(&Frame::of_operator("/ui"), &situation);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].what.starts_with("2 workers have sent no heartbeat for 8 min 9 s"), "{found:?}");
        assert!(found[0].remedy.contains("14 jobs in mail do not start"), "{found:?}");
        assert!(found[0].remedy.contains("the 4 jobs that they hold"), "{found:?}");
        let workers = [declared_dead(None), worker(None, false)];
        let replaced = Situation { workers: Some(&workers), ..situation };
        assert!(whats(&replaced).is_empty(), "another worker has taken over");
    }

    #[test]
    fn few_failures_of_many_kinds_are_one_finding_and_shares_are_not_zero() {
        let tally = |kind: &str, outcome, jobs| Tallied {
            minute: "2031-05-06T07:00:00Z".parse().unwrap(),
            queue: "mail".into(),
            kind: kind.into(),
            outcome,
            jobs,
            run_ms: Vec::new(),
        };
        let tallied = [
            tally("send", Outcome::Succeeded, 2_000),
            tally("send", Outcome::FailedPermanent, 18),
            tally("greet", Outcome::Succeeded, 5_000),
            tally("greet", Outcome::FailedPermanent, 1),
            tally("broken", Outcome::FailedPermanent, 3),
        ];
        let found = findings(&Frame::of_operator("/ui"), &Situation { tallied: &tallied, ..CALM });
        assert_eq!(found[0].what, "3 jobs of broken failed in the last hour");
        assert_eq!(found[1].what, "19 jobs of 2 kinds failed in the last hour");
        assert!(found[1].remedy.starts_with("18 of send (0.9 %) and 1 of greet (under 0.1 %)."), "{found:?}");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn paused_groups_are_found() {
        let mut queue = QueueRecord::empty("webhooks");
        queue.paused_groups = 2;
        let found = findings(&Frame::of_operator("/ui"), &Situation { queues: &[queue], ..CALM });
        assert_eq!(found[0].what, "2 groups of webhooks are paused");
        assert_eq!(found[0].href, "/q/ui/queues/webhooks#groups");
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
