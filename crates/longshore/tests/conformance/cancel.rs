//! Cancel, in every state and against every ending.

use longshore::lifecycle;
use longshore::store::Beat;
use longshore::{AttemptEnd, Cancelled, Ending, JobId, Outcome, Status};

use crate::bench::*;

cases! {
    a_waiting_job_is_cancelled_at_once,
    a_job_due_tomorrow_is_cancelled_at_once,
    a_retrying_job_keeps_its_error_and_its_attempts_when_cancelled,
    a_suspect_is_cancelled_with_its_interruptions,
    a_running_job_is_told_to_stop,
    a_second_cancel_of_a_running_job_is_pending_too,
    a_requested_cancel_yields_to_success,
    a_requested_cancel_outranks_every_other_ending,
    a_requested_cancel_outranks_recovery,
    a_cancel_does_not_stay_with_a_retried_job,
    a_finished_job_cannot_be_cancelled_and_the_refusal_names_the_remedy,
    an_unknown_job_is_not_found,
    a_beat_names_cancels_and_losses_of_held_leases_only,
}

async fn a_waiting_job_is_cancelled_at_once(bench: Bench) {
    let id = bench.add(job("mail").priority(4)).await;
    bench.advance(3 * SECOND).await;
    assert_eq!(bench.cancel(id).await.expect("cancel"), Cancelled::Now);
    let job = bench.job(id).await;
    assert_eq!((job.status, job.attempts, job.cancel_requested), (Status::Cancelled, 0, false));
    assert_eq!((job.started_at, job.finished_at), (None, Some(start() + 3 * SECOND)));
    let worker = bench.worker().await;
    assert_eq!(bench.claim(worker, 1).await.len(), 0);
}

async fn a_job_due_tomorrow_is_cancelled_at_once(bench: Bench) {
    let id = bench.add(job("mail").delay(DAY)).await;
    assert_eq!(bench.cancel(id).await.expect("cancel"), Cancelled::Now);
    assert_eq!(bench.status(id).await, Status::Cancelled);
}

async fn a_retrying_job_keeps_its_error_and_its_attempts_when_cancelled(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    bench.must_finish(&claimed, failed()).await;
    assert_eq!(bench.cancel(claimed.lease().id).await.expect("cancel"), Cancelled::Now);
    let job = bench.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.lease_no), (Status::Cancelled, 1, 1));
    assert_eq!(job.last_error.as_deref(), Some("smtp said 451"));
}

async fn a_suspect_is_cancelled_with_its_interruptions(bench: Bench) {
    let id = bench.suspect(job("mail")).await;
    assert_eq!(bench.cancel(id).await.expect("cancel"), Cancelled::Now);
    let job = bench.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 0, 1));
}

async fn a_running_job_is_told_to_stop(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    let lease = claimed.lease();
    assert_eq!(bench.cancel(lease.id).await.expect("cancel"), Cancelled::Pending);
    let job = bench.job(lease.id).await;
    assert_eq!((job.status, job.cancel_requested), (Status::Running, true));
    let beat = bench.store().beat(lease.worker, &[lease]).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: vec![lease] });
}

async fn a_second_cancel_of_a_running_job_is_pending_too(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    for _ in 0..2 {
        assert_eq!(bench.cancel(claimed.lease().id).await.expect("cancel"), Cancelled::Pending);
    }
}

async fn a_requested_cancel_yields_to_success(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    bench.cancel(claimed.lease().id).await.expect("cancel");
    bench.must_finish(&claimed, done()).await;
    let job = bench.job(claimed.lease().id).await;
    assert_eq!((job.status, job.cancel_requested), (Status::Succeeded, false));
}

async fn a_requested_cancel_outranks_every_other_ending(bench: Bench) {
    let endings = [
        (failed(), 1, vec![AttemptEnd::Failed], Some("smtp said 451")),
        (failed_for_good(), 1, vec![AttemptEnd::Failed], Some("no such mailbox")),
        (gave_up(), 1, vec![], Some("saw the cancellation")),
        (snoozed(), 0, vec![AttemptEnd::Snoozed], None),
        (Ending::Released, 0, vec![AttemptEnd::Released], None),
        (interrupted(), 0, vec![AttemptEnd::Interrupted], Some(lifecycle::INTERRUPTED)),
    ];
    for (ending, attempts, history, error) in endings {
        let claimed = bench.running(job("mail")).await;
        let id = claimed.lease().id;
        bench.cancel(id).await.expect("cancel");
        bench.must_finish(&claimed, ending.clone()).await;
        let job = bench.job(id).await;
        assert_eq!((job.status, job.attempts), (Status::Cancelled, attempts), "{ending:?}");
        assert_eq!(bench.history(id).await, history, "{ending:?}");
        assert_eq!(job.last_error.as_deref(), error, "{ending:?}");
    }
}

async fn a_requested_cancel_outranks_recovery(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    bench.cancel(claimed.lease().id).await.expect("cancel");
    assert_eq!(bench.crash_all_workers().await.recovered, 1);
    let job = bench.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 0, 1));
}

async fn a_cancel_does_not_stay_with_a_retried_job(bench: Bench) {
    let claimed = bench.running(job("mail")).await;
    let id = claimed.lease().id;
    bench.cancel(id).await.expect("cancel");
    bench.must_finish(&claimed, failed()).await;
    bench.retry(id).await.expect("retry");
    let again = bench.claim_one(claimed.lease().worker).await;
    assert!(!bench.job(id).await.cancel_requested);
    bench.must_finish(&again, failed()).await;
    assert_eq!(bench.status(id).await, Status::Retrying);
}

async fn a_finished_job_cannot_be_cancelled_and_the_refusal_names_the_remedy(bench: Bench) {
    for outcome in Outcome::ALL {
        let id = bench.ended(job("mail"), outcome).await;
        let before = picture(&bench.job(id).await);
        let error = bench.cancel(id).await.expect_err("it has ended");
        assert!(error.is_conflict(), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(outcome.as_str()) && message.contains("retry"), "{message}");
        assert_eq!(picture(&bench.job(id).await), before);
    }
}

async fn an_unknown_job_is_not_found(bench: Bench) {
    let id = JobId::new();
    let error = bench.cancel(id).await.expect_err("there is none");
    assert!(error.is_not_found() && error.to_string().contains(&id.to_string()), "{error:?}");
}

async fn a_beat_names_cancels_and_losses_of_held_leases_only(bench: Bench) {
    let worker = bench.worker_with(DAY).await;
    for kind in ["keep", "stop", "unheld"] {
        bench.enqueue_kind(kind).await;
    }
    let claimed = bench.claim(worker, 3).await;
    bench.cancel(claimed[1].lease().id).await.expect("cancel");
    bench.cancel(claimed[2].lease().id).await.expect("cancel");
    let held = [claimed[0].lease(), claimed[1].lease()];
    let beat = bench.store().beat(worker, &held).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: vec![held[1]] });
}
