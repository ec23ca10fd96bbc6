//! The fence: only the live lease can change a job. Each case makes a lease stale in
//! another way and tries every operation that takes a lease.

use longshore::store::{Beat, Claimed, Fenced, Settled};
use longshore::{
    Decision, Ending, InterruptedJob, JobId, Lease, NewJob, Outcome, RetryPolicy, Status, SweepOptions,
};

use crate::fixture::*;
use crate::settle::settlement;

cases! {
    a_holder_whose_job_runs_elsewhere_can_change_nothing,
    a_holder_whose_job_waits_again_can_change_nothing,
    a_late_settle_is_not_mistaken_for_the_recovery,
    a_late_settle_is_not_mistaken_for_the_quarantine,
    a_late_failure_is_not_mistaken_for_the_failure_a_hook_decided,
    a_holder_from_before_an_operators_retry_can_change_nothing,
    a_holder_that_settled_does_not_own_the_retried_job,
    the_right_lease_number_with_the_wrong_worker_can_change_nothing,
    an_old_lease_cannot_change_a_later_lease_of_the_same_worker,
    a_plain_success_of_an_old_lease_does_not_end_a_later_lease_of_the_same_worker,
    a_batch_of_plain_successes_ends_only_the_leases_of_its_worker,
    a_lease_number_from_the_future_can_change_nothing,
    a_waiting_job_has_no_holder,
    an_unknown_job_has_no_holder,
    a_deleted_job_has_no_holder,
    the_holder_of_the_live_lease_can_use_every_operation,
    a_claim_looked_up_by_its_live_lease_equals_the_original,
    a_claim_of_a_suspect_looked_up_by_its_lease_is_a_suspect,
    claims_are_returned_per_lease,
    progress_results_are_returned_per_report,
    the_last_of_two_progress_reports_in_one_batch_is_stored,
    json_that_the_database_cannot_store_is_refused_by_field,
    a_checkpoint_outlives_the_attempt_until_it_is_replaced,
    a_checkpoint_is_deleted_with_its_job,
    a_released_lease_is_lost_at_once,
}

/// Tries every operation that takes a lease. None may succeed or change the job.
async fn assert_changes_nothing(fixture: &Fixture, lease: Lease) {
    let id = lease.id;
    let before = snapshot(&fixture.job(id).await);
    let checkpoint = checkpoint(fixture, id).await;
    let store = fixture.store();
    for ending in endings().into_iter().chain([done_without_result(), observed_cancel_without_reason()]) {
        for seen in [None, Some(Default::default())] {
            let late = settlement(lease, 1, ending.clone(), seen);
            let settled = store.settle(&[late]).await.expect("settle");
            assert!(
                settled == [Settled::LeaseLost] || repeats_the_interruption(&ending),
                "{ending:?} was {settled:?}"
            );
        }
    }
    assert_eq!(store.mark_started(&lease).await.expect("mark_started"), Fenced::LeaseLost);
    assert_eq!(store.progress(&[(lease, raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
    assert_eq!(fixture.save_checkpoint(&lease, &raw("7")).await.expect("checkpoint"), Fenced::LeaseLost);
    assert_eq!(store.assert_lease(&lease).await.expect("assert"), Fenced::LeaseLost);
    assert!(
        store.claims(&[lease]).await.expect("claims")[0].is_none(),
        "a stale lease still returns a claim"
    );
    assert_eq!(snapshot(&fixture.job(id).await), before);
    assert_eq!(self::checkpoint(fixture, id).await, checkpoint);
}

/// A holder that reports its interruption after the sweeper did repeats what is
/// already stored: the result may be `Stored`, and nothing changes.
fn repeats_the_interruption(ending: &Ending) -> bool {
    matches!(ending, Ending::Interrupted(_))
}

async fn checkpoint(fixture: &Fixture, id: JobId) -> Option<String> {
    fixture.store().checkpoint(id).await.expect("checkpoint").map(|data| data.get().to_owned())
}

async fn assert_heartbeat_reports_lost(fixture: &Fixture, lease: Lease) {
    let beat = fixture.store().beat(lease.worker, &[lease]).await.expect("beat");
    assert!(
        beat == Beat::Dead || beat == Beat::Alive { lost: vec![lease], cancel: Vec::new() },
        "the heartbeat accepts a stale lease: {beat:?}"
    );
}

/// A job that was recovered from a dead worker and runs again: the stale claim and
/// the live one.
async fn reclaimed(fixture: &Fixture) -> (Claimed, Claimed) {
    let stale = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    let next = fixture.worker().await;
    let live = fixture.claim_one(next).await;
    assert_eq!(live.lease().lease_no, stale.lease().lease_no + 1);
    (stale, live)
}

async fn a_holder_whose_job_runs_elsewhere_can_change_nothing(fixture: Fixture) {
    let (stale, live) = reclaimed(&fixture).await;
    assert_changes_nothing(&fixture, stale.lease()).await;
    assert_heartbeat_reports_lost(&fixture, stale.lease()).await;
    fixture.must_finish(&live, done()).await;
    assert_changes_nothing(&fixture, stale.lease()).await;
}

async fn a_holder_whose_job_waits_again_can_change_nothing(fixture: Fixture) {
    let stale = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    assert_eq!(fixture.status(stale.lease().id).await, Status::Retrying);
    assert_changes_nothing(&fixture, stale.lease()).await;
    assert_heartbeat_reports_lost(&fixture, stale.lease()).await;
}

/// The sweeper's entry in the history has the same (id, lease) as the stale holder's
/// settle. It must not be taken for a settle that the holder stored earlier.
async fn a_late_settle_is_not_mistaken_for_the_recovery(fixture: Fixture) {
    let stale = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    for ending in endings() {
        let fenced = fixture.finish(&stale, ending.clone()).await;
        assert!(fenced == Fenced::LeaseLost || repeats_the_interruption(&ending), "{ending:?}");
    }
}

async fn a_late_settle_is_not_mistaken_for_the_quarantine(fixture: Fixture) {
    let mut stale = fixture.running(job("mail")).await;
    for _ in 0..2 {
        fixture.crash_all_workers().await;
        let next = fixture.worker().await;
        stale = fixture.claim_one(next).await;
        assert_eq!(fixture.store().mark_started(&stale.lease()).await.expect("mark"), Fenced::Held);
    }
    fixture.crash_all_workers().await;
    assert_eq!(fixture.status(stale.lease().id).await, Status::FailedPermanent);
    for ending in endings() {
        let fenced = fixture.finish(&stale, ending.clone()).await;
        assert!(fenced == Fenced::LeaseLost || repeats_the_interruption(&ending), "{ending:?}");
    }
    assert_changes_nothing(&fixture, stale.lease()).await;
}

/// A hook may decide to charge the attempt. Then the history contains `failed`, as
/// after a failure reported by the holder.
async fn a_late_failure_is_not_mistaken_for_the_failure_a_hook_decided(fixture: Fixture) {
    for max_attempts in [1, 3] {
        let stale = fixture.running(job("mail").max_attempts(max_attempts)).await;
        fixture.advance(61 * SECOND).await;
        let options = SweepOptions::default();
        let report = fixture
            .sweep_with(&options, &mut |_: &InterruptedJob| Decision::FailWithBackoff)
            .await
            .expect("sweep");
        assert_eq!(report.recovered, 1);
        for ending in endings() {
            assert_eq!(fixture.finish(&stale, ending.clone()).await, Fenced::LeaseLost, "{ending:?}");
        }
        if max_attempts > 1 {
            fixture.cancel(stale.lease().id).await.expect("cancel");
        }
    }
}

/// The ABA problem: the job ended, an operator retried it, and it runs again with
/// the same attempt number as before.
async fn a_holder_from_before_an_operators_retry_can_change_nothing(fixture: Fixture) {
    let stale = fixture.running(job("mail").max_attempts(1)).await;
    fixture.crash_all_workers().await;
    let id = stale.lease().id;
    fixture.cancel(id).await.expect("cancel");
    fixture.retry(id).await.expect("retry");
    let worker = fixture.worker().await;
    let live = fixture.claim_one(worker).await;
    assert_eq!((live.attempt(), live.lease().lease_no), (1, 2));
    assert_changes_nothing(&fixture, stale.lease()).await;
    fixture.must_finish(&live, done()).await;
}

async fn a_holder_that_settled_does_not_own_the_retried_job(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let old = fixture.running(job("mail")).await;
        let ending = match outcome {
            Outcome::Succeeded => done(),
            Outcome::FailedPermanent => failed_permanently(),
            Outcome::Cancelled => observed_cancel(),
        };
        fixture.must_finish(&old, ending).await;
        fixture.retry(old.lease().id).await.expect("retry");
        let worker = fixture.worker().await;
        let live = fixture.claim_one(worker).await;
        assert_eq!(live.lease().lease_no, 2);
        let store = fixture.store();
        assert_eq!(store.assert_lease(&old.lease()).await.expect("assert"), Fenced::LeaseLost);
        assert_eq!(store.progress(&[(old.lease(), raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
        // The result may be that its own end is stored, but nothing changes.
        let _ = fixture.finish(&old, failed()).await;
        let _ = fixture.finish(&old, done()).await;
        assert_eq!(fixture.status(old.lease().id).await, Status::Running, "{outcome:?}");
        fixture.must_finish(&live, done()).await;
    }
}

async fn the_right_lease_number_with_the_wrong_worker_can_change_nothing(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let other = fixture.worker().await;
    assert_changes_nothing(&fixture, held_by(live.lease(), other)).await;
    assert_heartbeat_reports_lost(&fixture, held_by(live.lease(), other)).await;
    fixture.must_finish(&live, done()).await;
}

/// The same worker claims the job again after its handler hung: the worker is right,
/// but the lease number is old.
async fn an_old_lease_cannot_change_a_later_lease_of_the_same_worker(fixture: Fixture) {
    let stale = fixture.running(job("mail").timeout(Some(MINUTE))).await;
    let worker = stale.lease().worker;
    for _ in 0..3 {
        fixture.advance(50 * SECOND).await;
        let _ = fixture.store().beat(worker, &[]).await.expect("beat");
    }
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    fixture.advance(5 * SECOND).await;
    let live = fixture.claim_one(worker).await;
    assert_eq!((live.lease().worker, live.lease().lease_no), (worker, 2));
    assert_changes_nothing(&fixture, stale.lease()).await;
    assert_heartbeat_reports_lost(&fixture, stale.lease()).await;
    fixture.must_finish(&live, done()).await;
}

/// The same for ends without further data. First the job ended and an operator
/// retried it, then its holder released it.
async fn a_plain_success_of_an_old_lease_does_not_end_a_later_lease_of_the_same_worker(fixture: Fixture) {
    let first = fixture.running(job("mail")).await;
    let (id, worker) = (first.lease().id, first.lease().worker);
    fixture.must_finish(&first, done_without_result()).await;
    fixture.retry(id).await.expect("retry");
    let second = fixture.claim_one(worker).await;
    assert_eq!(fixture.finish(&first, done_without_result()).await, Fenced::LeaseLost);
    fixture.must_finish(&second, Ending::Released).await;
    let third = fixture.claim_one(worker).await;
    assert_eq!((third.lease().worker, third.lease().lease_no), (worker, 3));
    for old in [&first, &second] {
        assert_eq!(fixture.finish(old, done_without_result()).await, Fenced::LeaseLost);
    }
    assert_eq!(fixture.store().assert_lease(&third.lease()).await.expect("assert"), Fenced::Held);
    fixture.must_finish(&third, done_without_result()).await;
}

/// All leases have the same number, but two of them belong to another worker.
async fn a_batch_of_plain_successes_ends_only_the_leases_of_its_worker(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.worker().await);
    fixture.enqueue_many((0..6).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let (own, others) = (fixture.claim(worker, 4).await, fixture.claim(other, 9).await);
    let leases = own.iter().map(Claimed::lease).chain(others.iter().map(|job| held_by(job.lease(), worker)));
    let batch: Vec<_> = leases.map(|lease| settlement(lease, 1, done_without_result(), None)).collect();
    let (stored, lost) = (Settled::Stored, Settled::LeaseLost);
    let settled = fixture.store().settle(&batch).await.expect("settle");
    assert_eq!(settled, [stored, stored, stored, stored, lost, lost]);
    assert_eq!(fixture.count(Status::Succeeded).await, 4);
    for held in &others {
        fixture.must_finish(held, done_without_result()).await;
    }
}

async fn a_lease_number_from_the_future_can_change_nothing(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let future = Lease { lease_no: live.lease().lease_no + 1, ..live.lease() };
    assert_changes_nothing(&fixture, future).await;
    assert_heartbeat_reports_lost(&fixture, future).await;
}

async fn a_waiting_job_has_no_holder(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    for lease_no in [0, 1] {
        assert_changes_nothing(&fixture, Lease { id, lease_no, worker }).await;
    }
}

async fn an_unknown_job_has_no_holder(fixture: Fixture) {
    let lease = Lease { id: JobId::new(), lease_no: 1, worker: fixture.worker().await };
    let store = fixture.store();
    let late = settlement(lease, 1, done(), None);
    assert_eq!(store.settle(&[late]).await.expect("settle"), [Settled::LeaseLost]);
    assert_eq!(store.mark_started(&lease).await.expect("mark"), Fenced::LeaseLost);
    assert_eq!(store.progress(&[(lease, raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
    assert_eq!(fixture.save_checkpoint(&lease, &raw("7")).await.expect("save"), Fenced::LeaseLost);
    assert_eq!(store.assert_lease(&lease).await.expect("assert"), Fenced::LeaseLost);
    assert!(store.checkpoint(lease.id).await.expect("checkpoint").is_none());
}

async fn a_deleted_job_has_no_holder(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, failed_permanently()).await;
    fixture.delete(claimed.lease().id).await.expect("delete");
    let late = settlement(claimed.lease(), 1, failed_permanently(), None);
    assert_eq!(fixture.store().settle(&[late]).await.expect("settle"), [Settled::LeaseLost]);
}

// ---- the live lease ------------------------------------------------------------

async fn the_holder_of_the_live_lease_can_use_every_operation(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let (lease, store) = (live.lease(), fixture.store());
    assert_eq!(store.assert_lease(&lease).await.expect("assert"), Fenced::Held);
    assert_eq!(store.mark_started(&lease).await.expect("mark"), Fenced::Held);
    assert_eq!(store.progress(&[(lease, raw(r#"{"done":3}"#))]).await.expect("progress"), [Fenced::Held]);
    assert_eq!(fixture.job(lease.id).await.progress.expect("progress").get(), r#"{"done":3}"#);
    assert_eq!(fixture.save_checkpoint(&lease, &raw(r#"{"page":5}"#)).await.expect("save"), Fenced::Held);
    assert_eq!(checkpoint(&fixture, lease.id).await.as_deref(), Some(r#"{"page":5}"#));
    let beat = store.beat(lease.worker, &[lease]).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: Vec::new() });
}

/// Everything that a worker reads from its claim.
fn description(claimed: &Claimed) -> String {
    format!(
        "{:?} {} {} {} {} {} {} {} {:?} {:?} {:?} {:?} {} {:?}",
        claimed.lease(),
        claimed.kind(),
        claimed.queue(),
        claimed.priority(),
        claimed.payload(),
        claimed.attempt(),
        claimed.max_attempts(),
        claimed.interruptions(),
        claimed.timeout(),
        claimed.flags(),
        claimed.tags(),
        claimed.trace(),
        claimed.claimed_at(),
        claimed.backoff(),
    )
}

async fn a_claim_looked_up_by_its_live_lease_equals_the_original(fixture: Fixture) {
    let worker = fixture.worker().await;
    let with_all_options = job("mail")
        .priority(9)
        .max_attempts(5)
        .timeout(Some(17 * SECOND))
        .retry(RetryPolicy::fixed(HOUR))
        .flags(["gpu", "eu"])
        .tags(["red"])
        .trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    fixture.add(with_all_options).await;
    fixture.add(job("sms").timeout(None)).await;
    let first = fixture.claim(worker, 2).await;
    fixture.must_finish(&first[1], failed()).await;
    fixture.advance(10 * SECOND).await;
    fixture.add(job("fax").queue("letters").priority(-3)).await;
    let second = fixture.claim_one(worker).await;
    let letters = fixture.claim_from("letters", worker, 1).await;
    let original = [&letters[0], &first[0], &second];
    let leases: Vec<_> = original.iter().map(|claimed| claimed.lease()).collect();
    let found = fixture.store().claims(&leases).await.expect("claims");
    for (original, found) in original.into_iter().zip(&found) {
        let found = found.as_ref().expect("a live lease");
        assert_eq!(description(found), description(original));
        // The due time of a retry is not kept; the requested time is.
        assert_eq!(found.run_at(), fixture.job(original.lease().id).await.run_at);
    }
    let found = fixture.store().claims(&leases[..1]).await.expect("claims").remove(0).expect("live");
    fixture.must_finish(&found, done()).await;
}

async fn a_claim_of_a_suspect_looked_up_by_its_lease_is_a_suspect(fixture: Fixture) {
    fixture.suspect(job("mail")).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    let found = fixture.store().claims(&[claimed.lease()]).await.expect("claims").remove(0).expect("live");
    assert_eq!((found.interruptions(), description(&found)), (1, description(&claimed)));
}

async fn claims_are_returned_per_lease(fixture: Fixture) {
    let (stale, live) = reclaimed(&fixture).await;
    let future = Lease { lease_no: live.lease().lease_no + 1, ..live.lease() };
    let other = fixture.worker().await;
    let unknown = Lease { id: JobId::new(), ..live.lease() };
    let leases = [stale.lease(), live.lease(), future, held_by(live.lease(), other), unknown, live.lease()];
    let found = fixture.store().claims(&leases).await.expect("claims");
    let found: Vec<_> = found.iter().map(|claimed| claimed.as_ref().map(Claimed::lease)).collect();
    assert_eq!(found, [None, Some(live.lease()), None, None, None, Some(live.lease())]);
    assert!(fixture.store().claims(&[]).await.expect("claims").is_empty());
    fixture.must_finish(&live, done()).await;
    assert!(fixture.store().claims(&[live.lease()]).await.expect("claims")[0].is_none());
}

async fn progress_results_are_returned_per_report(fixture: Fixture) {
    let (stale, live) = reclaimed(&fixture).await;
    let reports = [(stale.lease(), raw("1")), (live.lease(), raw("2")), (stale.lease(), raw("3"))];
    let results = fixture.store().progress(&reports).await.expect("progress");
    assert_eq!(results, [Fenced::LeaseLost, Fenced::Held, Fenced::LeaseLost]);
    assert_eq!(fixture.job(live.lease().id).await.progress.expect("progress").get(), "2");
}

async fn the_last_of_two_progress_reports_in_one_batch_is_stored(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let reports = [(live.lease(), raw("1")), (live.lease(), raw("2"))];
    assert_eq!(fixture.store().progress(&reports).await.expect("progress"), [Fenced::Held; 2]);
    assert_eq!(fixture.job(live.lease().id).await.progress.expect("progress").get(), "2");
}

async fn json_that_the_database_cannot_store_is_refused_by_field(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    for bad in [r#"{"a":"\u0000"}"#, r#""\ud800""#] {
        let reports = [(live.lease(), raw("1")), (live.lease(), raw(bad))];
        let error = fixture.store().progress(&reports).await.expect_err("progress");
        assert_eq!(error.field(), Some("progress"), "{error:?}");
        let error = fixture.save_checkpoint(&live.lease(), &raw(bad)).await.expect_err("checkpoint");
        assert_eq!(error.field(), Some("checkpoint"), "{error:?}");
    }
    assert!(fixture.job(live.lease().id).await.progress.is_none());
    fixture.must_finish(&live, done()).await;
}

async fn a_checkpoint_outlives_the_attempt_until_it_is_replaced(fixture: Fixture) {
    let first = fixture.running(job("mail")).await;
    let id = first.lease().id;
    assert!(checkpoint(&fixture, id).await.is_none());
    assert_eq!(fixture.save_checkpoint(&first.lease(), &raw("1")).await.expect("save"), Fenced::Held);
    assert_eq!(fixture.save_checkpoint(&first.lease(), &raw("2")).await.expect("save"), Fenced::Held);
    fixture.must_finish(&first, failed()).await;
    assert_eq!(checkpoint(&fixture, id).await.as_deref(), Some("2"));
    fixture.advance(MINUTE / 2).await;
    let second = fixture.claim_one(first.lease().worker).await;
    assert_eq!(fixture.save_checkpoint(&second.lease(), &raw("3")).await.expect("save"), Fenced::Held);
    assert_eq!(checkpoint(&fixture, id).await.as_deref(), Some("3"));
}

async fn a_checkpoint_is_deleted_with_its_job(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    assert_eq!(fixture.save_checkpoint(&claimed.lease(), &raw("1")).await.expect("save"), Fenced::Held);
    fixture.must_finish(&claimed, done()).await;
    fixture.delete(id).await.expect("delete");
    assert!(checkpoint(&fixture, id).await.is_none());
}

async fn a_released_lease_is_lost_at_once(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, Ending::Released).await;
    let store = fixture.store();
    assert_eq!(store.assert_lease(&claimed.lease()).await.expect("assert"), Fenced::LeaseLost);
    assert_eq!(store.mark_started(&claimed.lease()).await.expect("mark"), Fenced::LeaseLost);
    assert_eq!(store.progress(&[(claimed.lease(), raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
    assert_eq!(fixture.save_checkpoint(&claimed.lease(), &raw("7")).await.expect("save"), Fenced::LeaseLost);
    assert_heartbeat_reports_lost(&fixture, claimed.lease()).await;
}
