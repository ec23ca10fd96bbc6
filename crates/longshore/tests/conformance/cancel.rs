//! Cancel, in every state and against every ending.

use longshore::rules::lifecycle;
use longshore::store::Beat;
use longshore::{AttemptEnd, Cancelled, Ending, JobId, ListFilter, Outcome, Status};

use crate::fixture::*;

cases! {
    a_waiting_job_is_cancelled_at_once,
    a_job_due_tomorrow_is_cancelled_at_once,
    a_retrying_job_keeps_its_error_and_its_attempts_when_cancelled,
    a_cancelled_suspect_keeps_its_interruptions,
    a_cancel_keeps_the_time_of_the_last_failure,
    a_cancel_is_no_failure,
    a_cancel_of_a_running_job_is_pending_and_reaches_its_worker,
    a_second_cancel_of_a_running_job_is_pending_too,
    a_success_wins_over_a_requested_cancel,
    a_requested_cancel_wins_over_every_other_ending,
    a_requested_cancel_wins_over_recovery,
    releasing_a_claim_that_was_cancelled_meanwhile_ends_it_as_cancelled,
    an_operators_retry_clears_the_requested_cancel,
    a_cancel_of_a_finished_job_is_refused_and_names_the_remedy,
    a_cancel_of_an_unknown_job_is_not_found,
    a_heartbeat_reports_cancels_only_for_the_leases_it_names,
}

async fn a_waiting_job_is_cancelled_at_once(fixture: Fixture) {
    let id = fixture.add(job("mail").priority(4)).await;
    fixture.advance(3 * SECOND).await;
    assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Now);
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.cancel_requested), (Status::Cancelled, 0, true));
    assert_eq!((job.started_at, job.finished_at), (None, Some(start() + 3 * SECOND)));
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 0);
}

async fn a_job_due_tomorrow_is_cancelled_at_once(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(DAY)).await;
    assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Now);
    assert_eq!(fixture.status(id).await, Status::Cancelled);
}

async fn a_retrying_job_keeps_its_error_and_its_attempts_when_cancelled(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, failed()).await;
    assert_eq!(fixture.cancel(claimed.lease().id).await.expect("cancel"), Cancelled::Now);
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.lease_no), (Status::Cancelled, 1, 1));
    assert_eq!(job.last_error.as_deref(), Some("smtp said 451"));
}

async fn a_cancelled_suspect_keeps_its_interruptions(fixture: Fixture) {
    let id = fixture.suspect(job("mail")).await;
    assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Now);
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 0, 1));
}

/// Cancelled while it waits, and while it runs, with the handler's reason and without.
async fn a_cancel_keeps_the_time_of_the_last_failure(fixture: Fixture) {
    let ends = [None, Some(observed_cancel()), Some(observed_cancel_without_reason())];
    for (number, ending) in ends.into_iter().enumerate() {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        fixture.advance(7 * SECOND).await;
        let failed_at = fixture.now().await;
        fixture.must_finish(&claimed, failed()).await;
        fixture.advance(30 * SECOND).await;
        let mut error = "smtp said 451";
        match ending {
            None => assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Now),
            Some(ending) => {
                let claimed = fixture.claim_one(fixture.worker().await).await;
                assert_eq!(fixture.cancel(id).await.expect("cancel"), Cancelled::Pending);
                fixture.advance(SECOND).await;
                if number == 1 {
                    error = "saw the cancellation";
                }
                fixture.must_finish(&claimed, ending).await;
            }
        }
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.last_failed_at), (Status::Cancelled, Some(failed_at)), "{number}");
        assert_eq!(job.last_error.as_deref(), Some(error), "{number}");
        let listed = fixture.list(&ListFilter::default()).await.expect("list").jobs.remove(0);
        assert_eq!((listed.id, listed.last_failed_at), (id, Some(failed_at)), "{number}");
    }
}

async fn a_cancel_is_no_failure(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Cancelled).await;
    let job = fixture.job(id).await;
    assert_eq!((job.last_error.as_deref(), job.last_failed_at), (Some("saw the cancellation"), None));
}

async fn a_cancel_of_a_running_job_is_pending_and_reaches_its_worker(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let lease = claimed.lease();
    assert_eq!(fixture.cancel(lease.id).await.expect("cancel"), Cancelled::Pending);
    let job = fixture.job(lease.id).await;
    assert_eq!((job.status, job.cancel_requested), (Status::Running, true));
    let beat = fixture.store().beat(lease.worker, &[lease]).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: vec![lease] });
}

async fn a_second_cancel_of_a_running_job_is_pending_too(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    for _ in 0..2 {
        assert_eq!(fixture.cancel(claimed.lease().id).await.expect("cancel"), Cancelled::Pending);
    }
}

async fn a_success_wins_over_a_requested_cancel(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    fixture.must_finish(&claimed, done()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.cancel_requested), (Status::Succeeded, false));
}

async fn a_requested_cancel_wins_over_every_other_ending(fixture: Fixture) {
    let endings = [
        (failed(), 1, vec![AttemptEnd::Failed], Some("smtp said 451")),
        (failed_permanently(), 1, vec![AttemptEnd::Failed], Some("no such mailbox")),
        (observed_cancel(), 1, vec![], Some("saw the cancellation")),
        (snoozed(), 0, vec![AttemptEnd::Snoozed], None),
        (Ending::Released, 0, vec![AttemptEnd::Released], None),
        (Ending::NotStarted { run_at: start() }, 0, vec![], None),
        (interrupted(), 0, vec![AttemptEnd::Interrupted], Some(lifecycle::INTERRUPTED)),
    ];
    for (ending, attempts, history, error) in endings {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        fixture.cancel(id).await.expect("cancel");
        fixture.must_finish(&claimed, ending.clone()).await;
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.attempts), (Status::Cancelled, attempts), "{ending:?}");
        assert!(job.cancel_requested, "{ending:?}");
        assert_eq!(fixture.history(id).await, history, "{ending:?}");
        assert_eq!(job.last_error.as_deref(), error, "{ending:?}");
    }
}

async fn a_requested_cancel_wins_over_recovery(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    assert_eq!(fixture.crash_all_workers().await.recovered, 1);
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 0, 1));
}

/// The worker never had the job: its claim's reply was lost, or it gave the job back.
async fn releasing_a_claim_that_was_cancelled_meanwhile_ends_it_as_cancelled(fixture: Fixture) {
    for path in ["release", "release_unknown"] {
        let lease = fixture.running(job("mail")).await.lease();
        assert_eq!(fixture.cancel(lease.id).await.expect("cancel"), Cancelled::Pending);
        let released = match path {
            "release" => fixture.release(&[lease]).await,
            _ => fixture.release_unknown(lease.worker, &[]).await,
        };
        assert_eq!(released.expect("release"), 1, "{path}");
        let job = fixture.job(lease.id).await;
        assert_eq!((job.status, job.attempts), (Status::Cancelled, 0), "{path}");
    }
}

async fn an_operators_retry_clears_the_requested_cancel(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.cancel(id).await.expect("cancel");
    fixture.must_finish(&claimed, failed()).await;
    fixture.retry(id).await.expect("retry");
    let again = fixture.claim_one(claimed.lease().worker).await;
    assert!(!fixture.job(id).await.cancel_requested);
    fixture.must_finish(&again, failed()).await;
    assert_eq!(fixture.status(id).await, Status::Retrying);
}

async fn a_cancel_of_a_finished_job_is_refused_and_names_the_remedy(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let id = fixture.ended(job("mail"), outcome).await;
        let before = snapshot(&fixture.job(id).await);
        let error = fixture.cancel(id).await.expect_err("it has ended");
        assert!(error.is_conflict(), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(outcome.as_str()) && message.contains("retry"), "{message}");
        assert_eq!(snapshot(&fixture.job(id).await), before);
    }
}

async fn a_cancel_of_an_unknown_job_is_not_found(fixture: Fixture) {
    let id = JobId::new();
    let error = fixture.cancel(id).await.expect_err("no such job");
    assert!(error.is_not_found() && error.to_string().contains(&id.to_string()), "{error:?}");
}

async fn a_heartbeat_reports_cancels_only_for_the_leases_it_names(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for kind in ["keep", "stop", "unheld"] {
        fixture.enqueue_kind(kind).await;
    }
    let claimed = fixture.claim(worker, 3).await;
    fixture.cancel(claimed[1].lease().id).await.expect("cancel");
    fixture.cancel(claimed[2].lease().id).await.expect("cancel");
    let held = [claimed[0].lease(), claimed[1].lease()];
    let beat = fixture.store().beat(worker, &held).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: vec![held[1]] });
}
