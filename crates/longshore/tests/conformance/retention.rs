//! Finished jobs go when their time is up, and not before.

use std::time::Duration;

use longshore::store::{Retained, Retention};
use longshore::{JobId, Outcome, Status};

use crate::bench::*;

cases! {
    each_outcome_is_kept_for_its_own_time,
    the_defaults_are_a_week_and_ninety_days,
    age_counts_from_the_end_not_from_the_enqueue,
    for_ever_is_for_ever,
    live_jobs_are_never_removed,
    a_retried_job_is_live_again,
    history_and_checkpoint_go_with_the_job,
    a_step_looks_at_so_many_rows_and_the_walk_begins_anew,
    tallies_follow_what_is_removed,
    two_processes_may_retain_at_once,
    retention_works_by_a_running_clock,
}

const FOR_EVER: Retention = Retention { succeeded: None, cancelled: None, failed_permanent: None };

async fn retain(bench: &Bench, policy: &Retention) -> u64 {
    let mut removed = 0;
    loop {
        let step = bench.store().retain(policy, 100).await.expect("retain");
        removed += step.removed;
        if step.done {
            return removed;
        }
    }
}

async fn exists(bench: &Bench, id: JobId) -> bool {
    bench.store().get(id).await.expect("get").is_some()
}

async fn each_outcome_is_kept_for_its_own_time(bench: Bench) {
    for outcome in Outcome::ALL {
        let mut policy = FOR_EVER;
        match outcome {
            Outcome::Succeeded => policy.succeeded = Some(HOUR),
            Outcome::Cancelled => policy.cancelled = Some(HOUR),
            Outcome::FailedPermanent => policy.failed_permanent = Some(HOUR),
        }
        let mut kept = Vec::new();
        for other in Outcome::ALL {
            kept.push((other, bench.ended(job("mail"), other).await));
        }
        bench.advance(HOUR + SECOND).await;
        assert_eq!(retain(&bench, &policy).await, 1, "{outcome:?}");
        for (other, id) in kept {
            assert_eq!(exists(&bench, id).await, other != outcome, "{other:?} under {policy:?}");
            if other != outcome {
                bench.delete(id).await.expect("delete");
            }
        }
    }
}

async fn the_defaults_are_a_week_and_ninety_days(bench: Bench) {
    for outcome in Outcome::ALL {
        bench.ended(job("mail"), outcome).await;
    }
    let policy = Retention::default();
    bench.advance(7 * DAY - SECOND).await;
    assert_eq!(retain(&bench, &policy).await, 0);
    bench.advance(2 * SECOND).await;
    assert_eq!(retain(&bench, &policy).await, 2);
    assert_eq!(bench.counted(Status::FailedPermanent).await, 1);
    bench.advance(83 * DAY).await;
    assert_eq!(retain(&bench, &policy).await, 1);
    assert_eq!(bench.check().await.expect("check").jobs, 0);
}

/// A job may wait for a month and finish a second ago.
async fn age_counts_from_the_end_not_from_the_enqueue(bench: Bench) {
    let id = bench.add(job("mail").delay(30 * DAY)).await;
    bench.advance(30 * DAY).await;
    let worker = bench.worker().await;
    let claimed = bench.claim_one(worker).await;
    bench.must_finish(&claimed, done()).await;
    assert_eq!(retain(&bench, &Retention::default()).await, 0);
    assert!(exists(&bench, id).await);
}

async fn for_ever_is_for_ever(bench: Bench) {
    for outcome in Outcome::ALL {
        bench.ended(job("mail"), outcome).await;
    }
    bench.advance(4000 * DAY).await;
    assert_eq!(retain(&bench, &FOR_EVER).await, 0);
    assert_eq!(bench.check().await.expect("check").jobs, 3);
}

async fn live_jobs_are_never_removed(bench: Bench) {
    let waiting = bench.add(job("mail").delay(DAY)).await;
    let retrying = bench.running(job("mail")).await;
    bench.must_finish(&retrying, failed()).await;
    let running = bench.running(job("mail").timeout(None)).await;
    bench.advance(4000 * DAY).await;
    let at_once = Some(Duration::ZERO);
    let policy = Retention { succeeded: at_once, cancelled: at_once, failed_permanent: at_once };
    assert_eq!(retain(&bench, &policy).await, 0);
    for id in [waiting, retrying.lease().id, running.lease().id] {
        assert!(exists(&bench, id).await);
    }
}

async fn a_retried_job_is_live_again(bench: Bench) {
    let id = bench.ended(job("mail"), Outcome::Succeeded).await;
    bench.advance(8 * DAY).await;
    bench.retry(id).await.expect("retry");
    assert_eq!(retain(&bench, &Retention::default()).await, 0);
    assert_eq!(bench.status(id).await, Status::Queued);
}

async fn history_and_checkpoint_go_with_the_job(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    let saved = bench.store().save_checkpoint(&claimed.lease(), &raw("5")).await.expect("save");
    assert_eq!(saved, longshore::store::Fenced::Held);
    bench.must_finish(&claimed, failed_for_good()).await;
    bench.advance(91 * DAY).await;
    assert_eq!(retain(&bench, &Retention::default()).await, 1);
    for table in ["jobs", "finished", "attempts", "checkpoints"] {
        assert_eq!(bench.ask(&format!("select count(*) from {table}"), None).await, 0, "{table}");
    }
}

async fn a_step_looks_at_so_many_rows_and_the_walk_begins_anew(bench: Bench) {
    for _ in 0..5 {
        bench.ended(job("mail"), Outcome::Succeeded).await;
    }
    let policy = Retention::default();
    let step = async || bench.store().retain(&policy, 2).await.expect("retain");
    // Nothing is due: the walk goes to its end all the same, two rows a step.
    for done in [false, false, true] {
        assert_eq!(step().await, Retained { removed: 0, done });
    }
    bench.advance(8 * DAY).await;
    for (removed, done) in [(2, false), (2, false), (1, true)] {
        assert_eq!(step().await, Retained { removed, done });
    }
    assert_eq!(step().await, Retained { removed: 0, done: true });
}

async fn tallies_follow_what_is_removed(bench: Bench) {
    for _ in 0..3 {
        bench.ended(job("mail"), Outcome::Succeeded).await;
    }
    bench.advance(DAY).await;
    bench.ended(job("mail"), Outcome::Succeeded).await;
    bench.advance(6 * DAY + SECOND).await;
    assert_eq!(retain(&bench, &Retention::default()).await, 3);
    assert_eq!(bench.counted(Status::Succeeded).await, 1);
}

async fn two_processes_may_retain_at_once(bench: Bench) {
    for _ in 0..20 {
        bench.ended(job("mail"), Outcome::Succeeded).await;
    }
    bench.advance(8 * DAY).await;
    let walkers: Vec<_> = [bench.handle(), bench.second().await]
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
    for walker in walkers {
        removed += walker.await.expect("task");
    }
    removed += retain(&bench, &Retention::default()).await;
    removed += retain(&bench, &Retention::default()).await;
    assert_eq!(removed, 20);
    assert_eq!(bench.counted(Status::Succeeded).await, 0);
}

/// Everything else here stops the clock; a walk may take short cuts when it
/// runs.
async fn retention_works_by_a_running_clock(bench: Bench) {
    bench.store().pin_clock(None).await.expect("unpin");
    for outcome in Outcome::ALL {
        bench.ended(job("mail"), outcome).await;
    }
    let waiting = bench.enqueue_kind("mail").await;
    assert_eq!(retain(&bench, &Retention::default()).await, 0);
    let at_once = Retention { succeeded: Some(Duration::ZERO), ..Retention::default() };
    assert_eq!(retain(&bench, &at_once).await, 1);
    assert_eq!(bench.counted(Status::FailedPermanent).await, 1);
    assert!(exists(&bench, waiting).await);
}
