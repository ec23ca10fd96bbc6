//! Groups of failures: what belongs to one, its numbers, its jobs, and when it is forgotten.

use longshore::store::Claimed;
use longshore::{
    Ending, FailureFilter, FailureRecord, Fingerprint, ListFilter, Outcome, Report, Retention, Status,
};

use crate::fixture::*;

cases! {
    failures_that_differ_in_numbers_are_one_group,
    the_newest_failure_is_the_sample_of_its_group,
    of_failures_at_one_time_that_of_the_latest_job_is_the_sample,
    attempts_that_are_tried_again_count_and_dead_letters_are_counted_apart,
    interrupted_jobs_have_a_group,
    cancelled_and_successful_jobs_have_none,
    folding_does_not_change_the_numbers,
    groups_are_listed_in_pages_and_by_kind,
    a_list_of_a_group_contains_its_jobs,
    a_retried_dead_letter_leaves_its_group,
    a_group_is_forgotten_after_thirty_days_without_dead_letters,
    a_batch_of_failures_is_counted_by_group,
    very_long_errors_are_cut,
    dead_letters_are_counted_up_to_a_thousand,
}

fn failed_with(error: &str, is_final: bool) -> Ending {
    let retry_in = (!is_final).then_some(MINUTE);
    Ending::Failed { error: error.into(), retry_in }
}

async fn fail(fixture: &Fixture, kind: &str, error: &str) -> longshore::JobId {
    let claimed = fixture.running(job(kind)).await;
    fixture.must_finish(&claimed, failed_with(error, true)).await;
    claimed.lease().id
}

fn report(claimed: &Claimed, ending: Ending) -> Report<'_> {
    Report { claimed, ending, follow_ups: Vec::new(), has_progressed: false }
}

async fn groups(fixture: &Fixture) -> Vec<FailureRecord> {
    fixture.failures(&FailureFilter::default()).await.expect("failures")
}

async fn fold(fixture: &Fixture) {
    fixture.fold_history(|_| async { true }).await.expect("fold_history");
}

async fn failures_that_differ_in_numbers_are_one_group(fixture: Fixture) {
    fail(&fixture, "mail", "order 17: timeout after 30.1s").await;
    fixture.advance(MINUTE).await;
    let last = fail(&fixture, "mail", "order 18: timeout after 29.7s").await;
    fail(&fixture, "mail", "order 18: refused").await;
    fail(&fixture, "sms", "order 19: timeout after 30.0s").await;
    let found = groups(&fixture).await;
    assert_eq!(found.len(), 3);
    let wanted = Fingerprint::of("mail", "order 1: timeout after 1s");
    let group = found.iter().find(|group| group.fingerprint == wanted).expect("the group");
    assert_eq!((group.attempts, group.dead, group.dead_or_more), (2, 2, false));
    assert_eq!((group.first_seen, group.last_seen), (start(), start() + MINUTE));
    assert_eq!((group.kind.as_str(), group.job), ("mail", last));
}

async fn the_newest_failure_is_the_sample_of_its_group(fixture: Fixture) {
    for (round, fold_between) in [true, false, true].into_iter().enumerate() {
        let id = fail(&fixture, "mail", &format!("timeout {round}")).await;
        let group = groups(&fixture).await.remove(0);
        assert_eq!((group.job, group.error), (id, format!("timeout {round}")));
        fixture.advance(SECOND).await;
        if fold_between {
            fold(&fixture).await;
        }
    }
    assert_eq!(groups(&fixture).await[0].attempts, 3);
}

async fn of_failures_at_one_time_that_of_the_latest_job_is_the_sample(fixture: Fixture) {
    let worker = fixture.worker().await;
    for (attempts, fold_between) in [(2, false), (4, true)] {
        fixture.add(job("mail")).await;
        let last = fixture.add(job("mail")).await;
        let claimed = fixture.claim(worker, 2).await;
        // The earlier job fails last.
        for (nth, job) in claimed.iter().enumerate().rev() {
            fixture.must_finish(job, failed_with(&format!("timeout {nth}"), true)).await;
            if fold_between {
                fold(&fixture).await;
            }
        }
        for _ in 0..2 {
            let group = groups(&fixture).await.remove(0);
            assert_eq!((group.job, group.error.as_str(), group.attempts), (last, "timeout 1", attempts));
            fold(&fixture).await;
        }
        fixture.advance(SECOND).await;
    }
}

async fn attempts_that_are_tried_again_count_and_dead_letters_are_counted_apart(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    fixture.add(job("mail").max_attempts(3)).await;
    for is_final in [false, false, true] {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, failed_with("no route", is_final)).await;
        fixture.advance(HOUR).await;
        assert_eq!(groups(&fixture).await[0].dead, u64::from(is_final));
    }
    assert_eq!(groups(&fixture).await[0].attempts, 3);
}

async fn interrupted_jobs_have_a_group(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    assert_eq!(
        fixture.store().mark_started(&claimed.lease()).await.expect("started"),
        longshore::store::Fenced::Held
    );
    fixture.crash_all_workers().await;
    let found = groups(&fixture).await;
    assert_eq!((found.len(), found[0].attempts, found[0].dead), (1, 1, 0), "{found:?}");
    assert_eq!(found[0].kind, "mail");
}

async fn cancelled_and_successful_jobs_have_none(fixture: Fixture) {
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.ended(job("mail"), Outcome::Cancelled).await;
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, snoozed()).await;
    assert_eq!(groups(&fixture).await, []);
}

async fn folding_does_not_change_the_numbers(fixture: Fixture) {
    for round in 0..12 {
        fail(&fixture, ["mail", "sms"][round % 2], &format!("timeout {round}")).await;
        fixture.advance(SECOND).await;
    }
    let before = groups(&fixture).await;
    assert_eq!(before.iter().map(|group| group.attempts).collect::<Vec<_>>(), [6, 6]);
    while fixture.store().fold_error_groups(5).await.expect("fold") > 0 {
        assert_eq!(groups(&fixture).await, before);
    }
    assert_eq!(groups(&fixture).await, before);
}

async fn groups_are_listed_in_pages_and_by_kind(fixture: Fixture) {
    for letter in ["a", "b", "c", "d", "e"] {
        fail(&fixture, if letter < "c" { "mail" } else { "sms" }, &format!("reason {letter}")).await;
    }
    fold(&fixture).await;
    // Two groups with the same time.
    fail(&fixture, "push", "reason f").await;
    let all = groups(&fixture).await;
    assert_eq!(all.len(), 6);
    let mut filter = FailureFilter { limit: 2, ..FailureFilter::default() };
    let mut listed = Vec::new();
    loop {
        let page = fixture.failures(&filter).await.expect("failures");
        filter.after = page.last().map(|last| (last.last_seen, last.fingerprint));
        if page.is_empty() {
            break;
        }
        listed.extend(page);
    }
    assert_eq!(listed, all);
    let filter = FailureFilter { kind: Some("mail".into()), ..FailureFilter::default() };
    assert_eq!(fixture.failures(&filter).await.expect("failures").len(), 2);
    fixture.advance(HOUR).await;
    let filter = FailureFilter { seen_after: Some(fixture.now().await), ..FailureFilter::default() };
    assert_eq!(fixture.failures(&filter).await.expect("failures"), []);
}

async fn a_list_of_a_group_contains_its_jobs(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let mut wanted = Vec::new();
    for round in 0..6 {
        let error = if round % 2 == 0 { format!("timeout {round}") } else { format!("refused by {round}") };
        let id = fixture.add(job("mail").max_attempts(9)).await;
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, failed_with(&error, round < 4)).await;
        wanted.extend((round % 2 == 0).then_some(id));
    }
    wanted.reverse();
    let failure = Some(Fingerprint::of("mail", "timeout 1"));
    let list = async |statuses: &[Status], limit| {
        let mut filter = ListFilter { failure, limit, statuses: statuses.to_vec(), ..ListFilter::default() };
        let mut found = Vec::new();
        loop {
            let page = fixture.list(&filter).await.expect("list");
            found.extend(page.jobs.iter().map(|job| job.id));
            filter.cursor = page.next;
            if page.next.is_none() {
                return found;
            }
        }
    };
    assert_eq!(list(&[], 200).await, wanted);
    assert_eq!(list(&[], 1).await, wanted);
    assert_eq!(list(&[Status::Retrying], 200).await, wanted[..1]);
    assert_eq!(list(&[Status::FailedPermanent], 1).await, wanted[1..]);
    assert_eq!(list(&[Status::Succeeded, Status::Queued, Status::Cancelled], 200).await, []);
    // A retried job runs: its last failure is still of the group.
    fixture.advance(HOUR).await;
    let running = fixture.claim(worker, 9).await;
    assert_eq!(list(&[Status::Running], 200).await, wanted[..1]);
    for claimed in &running {
        fixture.must_finish(claimed, done()).await;
    }
    assert_eq!(list(&[], 200).await, wanted[1..]);
}

async fn a_retried_dead_letter_leaves_its_group(fixture: Fixture) {
    let id = fail(&fixture, "mail", "timeout").await;
    fail(&fixture, "mail", "timeout").await;
    fixture.retry(id).await.expect("retry");
    let group = groups(&fixture).await.remove(0);
    assert_eq!((group.attempts, group.dead), (2, 1));
}

async fn a_group_is_forgotten_after_thirty_days_without_dead_letters(fixture: Fixture) {
    fail(&fixture, "mail", "timeout").await;
    fold(&fixture).await;
    fixture.advance(31 * DAY).await;
    fold(&fixture).await;
    assert_eq!(groups(&fixture).await.len(), 1, "it has a dead letter");
    let policy = Retention { failed_permanent: Some(DAY), ..Retention::default() };
    fixture.retain(&policy, |_| async { true }).await.expect("retain");
    fold(&fixture).await;
    assert_eq!(groups(&fixture).await, []);
}

async fn a_batch_of_failures_is_counted_by_group(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for _ in 0..20 {
        fixture.add(job("mail")).await;
    }
    let claimed = fixture.claim(worker, 20).await;
    let failure = |(nth, claimed)| report(claimed, failed_with(["timeout", "refused"][nth % 2], nth % 4 > 1));
    let reports = claimed.iter().enumerate().map(failure).collect();
    fixture.settle(reports).await.expect("settle");
    let mut numbers: Vec<_> =
        groups(&fixture).await.iter().map(|group| (group.attempts, group.dead)).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [(10, 5), (10, 5)]);
    fold(&fixture).await;
    assert_eq!(groups(&fixture).await.iter().map(|group| group.attempts).sum::<u64>(), 20);
}

async fn very_long_errors_are_cut(fixture: Fixture) {
    let error = "é".repeat(30_000);
    fail(&fixture, "mail", &error).await;
    let group = groups(&fixture).await.remove(0);
    assert_eq!(group.error, "é".repeat(2_000));
}

async fn dead_letters_are_counted_up_to_a_thousand(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let jobs: Vec<_> = (0..1_001).map(|_| job("mail")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue_many");
    let mut last = fixture.claim(worker, 1_000).await;
    last.extend(fixture.claim(worker, 1).await);
    let reports = last.iter().map(|job| report(job, failed_with("x", true))).collect();
    fixture.settle(reports).await.expect("settle");
    let group = groups(&fixture).await.remove(0);
    assert_eq!((group.attempts, group.dead, group.dead_or_more), (1_001, 1_000, true));
    fixture.retry(last[0].lease().id).await.expect("retry");
    let group = groups(&fixture).await.remove(0);
    assert_eq!((group.dead, group.dead_or_more), (1_000, false));
}
