//! Retention: finished jobs are removed after their retention time and not before.

use std::time::Duration;

use longshore::store::Retained;
use longshore::{JobId, Outcome, Retention, Status};

use crate::fixture::*;

cases! {
    each_outcome_is_kept_for_its_own_time,
    the_default_is_a_week_and_ninety_days_for_dead_letters,
    the_age_of_a_job_counts_from_its_end_and_not_from_its_enqueue,
    jobs_without_a_retention_time_are_kept_forever,
    live_jobs_are_never_removed,
    a_retried_job_is_not_removed,
    history_and_checkpoint_are_removed_with_the_job,
    a_step_examines_a_limited_number_of_rows_and_the_walk_starts_again,
    counts_decrease_when_jobs_are_removed,
    two_processes_can_run_retention_concurrently,
    retention_works_with_a_running_clock,
}

const FOREVER: Retention = Retention { succeeded: None, cancelled: None, failed_permanent: None };

async fn retain(fixture: &Fixture, policy: &Retention) -> u64 {
    let mut removed = 0;
    loop {
        let step = fixture.store().retain(policy, 100).await.expect("retain");
        removed += step.removed;
        if step.done {
            return removed;
        }
    }
}

async fn exists(fixture: &Fixture, id: JobId) -> bool {
    fixture.store().get(id).await.expect("get").is_some()
}

async fn each_outcome_is_kept_for_its_own_time(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let mut policy = FOREVER;
        match outcome {
            Outcome::Succeeded => policy.succeeded = Some(HOUR),
            Outcome::Cancelled => policy.cancelled = Some(HOUR),
            Outcome::FailedPermanent => policy.failed_permanent = Some(HOUR),
        }
        let mut kept = Vec::new();
        for other in Outcome::ALL {
            kept.push((other, fixture.ended(job("mail"), other).await));
        }
        fixture.advance(HOUR + SECOND).await;
        assert_eq!(retain(&fixture, &policy).await, 1, "{outcome:?}");
        for (other, id) in kept {
            assert_eq!(exists(&fixture, id).await, other != outcome, "{other:?} under {policy:?}");
            if other != outcome {
                fixture.delete(id).await.expect("delete");
            }
        }
    }
}

async fn the_default_is_a_week_and_ninety_days_for_dead_letters(fixture: Fixture) {
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    let policy = Retention::default();
    fixture.advance(7 * DAY - SECOND).await;
    assert_eq!(retain(&fixture, &policy).await, 0);
    fixture.advance(2 * SECOND).await;
    assert_eq!(retain(&fixture, &policy).await, 2);
    assert_eq!(fixture.count(Status::FailedPermanent).await, 1);
    fixture.advance(83 * DAY).await;
    assert_eq!(retain(&fixture, &policy).await, 1);
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
}

/// A job may wait for a month before it runs.
async fn the_age_of_a_job_counts_from_its_end_and_not_from_its_enqueue(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(30 * DAY)).await;
    fixture.advance(30 * DAY).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    assert!(exists(&fixture, id).await);
}

async fn jobs_without_a_retention_time_are_kept_forever(fixture: Fixture) {
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    fixture.advance(4000 * DAY).await;
    assert_eq!(retain(&fixture, &FOREVER).await, 0);
    assert_eq!(fixture.check().await.expect("check").jobs, 3);
}

async fn live_jobs_are_never_removed(fixture: Fixture) {
    let waiting = fixture.add(job("mail").delay(DAY)).await;
    let retrying = fixture.running(job("mail")).await;
    fixture.must_finish(&retrying, failed()).await;
    let running = fixture.running(job("mail").timeout(None)).await;
    fixture.advance(4000 * DAY).await;
    let immediately = Some(Duration::ZERO);
    let policy = Retention { succeeded: immediately, cancelled: immediately, failed_permanent: immediately };
    assert_eq!(retain(&fixture, &policy).await, 0);
    for id in [waiting, retrying.lease().id, running.lease().id] {
        assert!(exists(&fixture, id).await);
    }
}

async fn a_retried_job_is_not_removed(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.advance(8 * DAY).await;
    fixture.retry(id).await.expect("retry");
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    assert_eq!(fixture.status(id).await, Status::Queued);
}

async fn history_and_checkpoint_are_removed_with_the_job(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let saved = fixture.store().save_checkpoint(&claimed.lease(), &raw("5")).await.expect("save");
    assert_eq!(saved, longshore::store::Fenced::Held);
    fixture.must_finish(&claimed, failed_permanently()).await;
    fixture.advance(91 * DAY).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 1);
    for table in ["jobs", "finished", "attempts", "checkpoints"] {
        assert_eq!(fixture.query_number(&format!("select count(*) from {table}"), None).await, 0, "{table}");
    }
}

async fn a_step_examines_a_limited_number_of_rows_and_the_walk_starts_again(fixture: Fixture) {
    for _ in 0..5 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    let policy = Retention::default();
    let step = async || fixture.store().retain(&policy, 2).await.expect("retain");
    // Nothing is old enough. The walk still goes to its end, two rows per step.
    for done in [false, false, true] {
        assert_eq!(step().await, Retained { removed: 0, done });
    }
    fixture.advance(8 * DAY).await;
    for (removed, done) in [(2, false), (2, false), (1, true)] {
        assert_eq!(step().await, Retained { removed, done });
    }
    assert_eq!(step().await, Retained { removed: 0, done: true });
}

async fn counts_decrease_when_jobs_are_removed(fixture: Fixture) {
    for _ in 0..3 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    fixture.advance(DAY).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.advance(6 * DAY + SECOND).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 3);
    assert_eq!(fixture.count(Status::Succeeded).await, 1);
}

async fn two_processes_can_run_retention_concurrently(fixture: Fixture) {
    for _ in 0..20 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    fixture.advance(8 * DAY).await;
    let processes: Vec<_> = [fixture.client(), fixture.second_client().await]
        .into_iter()
        .map(|client| {
            tokio::spawn(async move {
                let mut removed = 0;
                for _ in 0..12 {
                    removed += client.store().retain(&Retention::default(), 3).await.expect("retain").removed;
                }
                removed
            })
        })
        .collect();
    let mut removed = 0;
    for process in processes {
        removed += process.await.expect("task");
    }
    removed += retain(&fixture, &Retention::default()).await;
    removed += retain(&fixture, &Retention::default()).await;
    assert_eq!(removed, 20);
    assert_eq!(fixture.count(Status::Succeeded).await, 0);
}

/// The other cases pin the clock. A walk may take shortcuts when the clock runs.
async fn retention_works_with_a_running_clock(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("unpin");
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    let waiting = fixture.enqueue_kind("mail").await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    let immediately = Retention { succeeded: Some(Duration::ZERO), ..Retention::default() };
    assert_eq!(retain(&fixture, &immediately).await, 1);
    assert_eq!(fixture.count(Status::FailedPermanent).await, 1);
    assert!(exists(&fixture, waiting).await);
}
