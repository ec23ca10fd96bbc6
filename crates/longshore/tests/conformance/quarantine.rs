//! Suspects: jobs whose worker died. A job that kills its workers again and again is quarantined.

use longshore::rules::lifecycle;
use longshore::store::Fenced;
use longshore::{AttemptEnd, Status, SweepOptions};

use crate::fixture::*;

cases! {
    after_the_first_interruption_only_started_runs_are_counted,
    a_poison_job_is_quarantined_with_a_reason_that_says_so,
    jobs_interrupted_with_a_poison_job_are_not_quarantined,
    the_maximum_number_of_interruptions_is_configurable,
    mark_started_sets_the_started_flag,
    marking_a_lease_as_started_again_keeps_the_first_time,
}

async fn interrupt(fixture: &Fixture, started: bool) {
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    if started {
        assert_eq!(fixture.store().mark_started(&claimed.lease()).await.expect("mark"), Fenced::Held);
    }
    assert_eq!(fixture.crash_all_workers().await.recovered, 1);
}

async fn after_the_first_interruption_only_started_runs_are_counted(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    for (started, counted) in [(false, 1), (false, 1), (true, 2), (false, 2)] {
        interrupt(&fixture, started).await;
        assert_eq!(fixture.job(id).await.interruptions, counted);
    }
    assert_eq!(fixture.status(id).await, Status::Retrying);
}

async fn a_poison_job_is_quarantined_with_a_reason_that_says_so(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    for _ in 0..3 {
        interrupt(&fixture, true).await;
    }
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::FailedPermanent, 0, 3));
    let reason = job.last_error.expect("a reason");
    assert!(reason.contains("Quarantined after 3"), "{reason}");
    assert_eq!(fixture.history(id).await, [AttemptEnd::Interrupted; 3]);
}

/// Ten jobs share a process with a job that crashes it every time.
async fn jobs_interrupted_with_a_poison_job_are_not_quarantined(fixture: Fixture) {
    let poison = fixture.add(job("poison").priority(9)).await;
    let mut others = Vec::new();
    for _ in 0..10 {
        others.push(fixture.enqueue_kind("other").await);
    }
    for _ in 0..30 {
        let worker = fixture.worker().await;
        let claimed = fixture.claim(worker, 20).await;
        if claimed.is_empty() {
            break;
        }
        // A process starts one suspect at a time and records that it started.
        for suspect in claimed.iter().filter(|job| job.interruptions() > 0) {
            assert_eq!(fixture.store().mark_started(&suspect.lease()).await.expect("mark"), Fenced::Held);
        }
        if claimed.iter().any(|job| job.lease().id == poison) {
            fixture.crash_all_workers().await;
        } else {
            for job in &claimed {
                fixture.must_finish(job, done()).await;
            }
        }
    }
    assert_eq!(fixture.status(poison).await, Status::FailedPermanent);
    for id in others {
        assert_eq!(fixture.status(id).await, Status::Succeeded);
    }
}

async fn the_maximum_number_of_interruptions_is_configurable(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    let mut options = SweepOptions::default();
    options.interruption.max_interruptions = 1;
    fixture.sweep(&options).await.expect("sweep");
    assert_eq!(fixture.status(claimed.lease().id).await, Status::FailedPermanent);
}

async fn mark_started_sets_the_started_flag(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let started = async || match fixture.state(claimed.lease().id).await {
        lifecycle::State::Running(running) => running.started,
        other => panic!("{other:?}"),
    };
    assert!(!started().await);
    for _ in 0..2 {
        assert_eq!(fixture.store().mark_started(&claimed.lease()).await.expect("mark"), Fenced::Held);
        assert!(started().await);
    }
}

async fn marking_a_lease_as_started_again_keeps_the_first_time(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let lease = claimed.lease();
    let at_claim = "select count(*) from running where id = {id} and started_at = claimed_at";
    for _ in 0..2 {
        assert_eq!(fixture.store().mark_started(&lease).await.expect("mark"), Fenced::Held);
        assert_eq!(fixture.query_number(at_claim, Some(lease.id)).await, 1);
        fixture.advance(SECOND).await;
    }
}
