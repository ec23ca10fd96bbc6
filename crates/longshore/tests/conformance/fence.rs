//! Only the live lease counts. Each case makes a holder stale in another way
//! and lets it try everything a holder can do.

use longshore::store::{Beat, Claimed, Fenced, Interrupted, Lease, Settled};
use longshore::{Decision, Ending, JobId, NewJob, Outcome, RetryPolicy, Status, SweepOptions};

use crate::fixture::*;
use crate::settle::settlement;

cases! {
    a_holder_whose_job_runs_elsewhere_is_powerless,
    a_holder_whose_job_waits_again_is_powerless,
    a_late_settle_is_not_mistaken_for_the_sweepers,
    a_late_settle_is_not_mistaken_for_the_sweepers_quarantine,
    a_late_failure_is_not_mistaken_for_the_one_a_hook_decided,
    a_holder_from_before_an_operators_retry_is_powerless,
    a_finished_holder_does_not_own_the_retried_job,
    the_right_number_in_the_wrong_hands_is_powerless,
    a_holder_is_powerless_over_its_own_later_lease,
    a_plain_success_of_an_old_lease_does_not_end_a_later_one_of_its_worker,
    plain_successes_of_one_batch_end_what_their_worker_holds,
    a_number_from_the_future_is_powerless,
    a_waiting_job_has_no_holder,
    an_unknown_job_has_no_holder,
    a_deleted_job_has_no_holder,
    the_live_holder_can_do_everything,
    the_claims_behind_live_leases_are_as_they_were_given,
    a_suspect_is_found_by_its_lease_as_a_suspect,
    claims_are_answered_lease_by_lease,
    progress_is_answered_report_by_report,
    the_newest_of_two_reports_in_one_batch_shows,
    what_the_database_could_choke_on_is_refused_by_name_and_harms_nothing,
    a_checkpoint_outlives_the_attempt_and_is_replaced_by_the_next,
    a_checkpoint_goes_with_its_job,
    a_released_lease_is_gone_at_once,
}

/// Tries every verb that names a lease; none may succeed or change the job.
async fn assert_powerless(fixture: &Fixture, lease: Lease) {
    let id = lease.id;
    let before = picture(&fixture.job(id).await);
    let checkpoint = checkpoint(fixture, id).await;
    let store = fixture.store();
    for ending in endings().into_iter().chain([done_plainly(), gave_up_plainly()]) {
        for seen in [None, Some(Default::default())] {
            let late = settlement(lease, 1, ending.clone(), seen);
            let settled = store.settle(&[late]).await.expect("settle");
            assert!(settled == [Settled::LeaseLost] || same_word(&ending), "{ending:?} was {settled:?}");
        }
    }
    assert_eq!(store.mark_started(&lease).await.expect("mark_started"), Fenced::LeaseLost);
    assert_eq!(store.progress(&[(lease, raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
    assert_eq!(store.save_checkpoint(&lease, &raw("7")).await.expect("checkpoint"), Fenced::LeaseLost);
    assert_eq!(store.assert_lease(&lease).await.expect("assert"), Fenced::LeaseLost);
    assert!(store.claims(&[lease]).await.expect("claims")[0].is_none(), "a claim behind a stale lease");
    assert_eq!(picture(&fixture.job(id).await), before);
    assert_eq!(self::checkpoint(fixture, id).await, checkpoint);
}

/// A holder that reports its own interruption after the sweeper did says
/// nothing new: it may be told that this is stored, and it changes nothing.
fn same_word(ending: &Ending) -> bool {
    matches!(ending, Ending::Interrupted(_))
}

async fn checkpoint(fixture: &Fixture, id: JobId) -> Option<String> {
    fixture.store().checkpoint(id).await.expect("checkpoint").map(|data| data.get().to_owned())
}

async fn assert_lost_by_beat(fixture: &Fixture, lease: Lease) {
    let beat = fixture.store().beat(lease.worker, &[lease]).await.expect("beat");
    assert!(
        beat == Beat::Dead || beat == Beat::Alive { lost: vec![lease], cancel: Vec::new() },
        "a stale lease passes for live: {beat:?}"
    );
}

/// The job was taken from its dead worker and runs elsewhere.
async fn reclaimed(fixture: &Fixture) -> (Claimed, Claimed) {
    let stale = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    let next = fixture.worker().await;
    let live = fixture.claim_one(next).await;
    assert_eq!(live.lease().lease_no, stale.lease().lease_no + 1);
    (stale, live)
}

async fn a_holder_whose_job_runs_elsewhere_is_powerless(fixture: Fixture) {
    let (stale, live) = reclaimed(&fixture).await;
    assert_powerless(&fixture, stale.lease()).await;
    assert_lost_by_beat(&fixture, stale.lease()).await;
    fixture.must_finish(&live, done()).await;
    assert_powerless(&fixture, stale.lease()).await;
}

async fn a_holder_whose_job_waits_again_is_powerless(fixture: Fixture) {
    let stale = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    assert_eq!(fixture.status(stale.lease().id).await, Status::Retrying);
    assert_powerless(&fixture, stale.lease()).await;
    assert_lost_by_beat(&fixture, stale.lease()).await;
}

/// The sweeper's own entry in the history has the stale holder's (id, lease):
/// it must not pass for the holder's own, stored earlier.
async fn a_late_settle_is_not_mistaken_for_the_sweepers(fixture: Fixture) {
    let stale = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    for ending in endings() {
        let fenced = fixture.finish(&stale, ending.clone()).await;
        assert!(fenced == Fenced::LeaseLost || same_word(&ending), "{ending:?}");
    }
}

async fn a_late_settle_is_not_mistaken_for_the_sweepers_quarantine(fixture: Fixture) {
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
        assert!(fenced == Fenced::LeaseLost || same_word(&ending), "{ending:?}");
    }
    assert_powerless(&fixture, stale.lease()).await;
}

/// A hook may have charged the attempt: then the history says `failed`, as the
/// holder would.
async fn a_late_failure_is_not_mistaken_for_the_one_a_hook_decided(fixture: Fixture) {
    for max_attempts in [1, 3] {
        let stale = fixture.running(job("mail").max_attempts(max_attempts)).await;
        fixture.advance(61 * SECOND).await;
        let options = SweepOptions::default();
        let report = fixture
            .sweep_with(&options, &mut |_: &Interrupted| Decision::FailWithBackoff)
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

/// The ABA of job queues: ended, retried by an operator, running again, and
/// the attempt has the same number as before.
async fn a_holder_from_before_an_operators_retry_is_powerless(fixture: Fixture) {
    let stale = fixture.running(job("mail").max_attempts(1)).await;
    fixture.crash_all_workers().await;
    let id = stale.lease().id;
    fixture.cancel(id).await.expect("cancel");
    fixture.retry(id).await.expect("retry");
    let worker = fixture.worker().await;
    let live = fixture.claim_one(worker).await;
    assert_eq!((live.attempt(), live.lease().lease_no), (1, 2));
    assert_powerless(&fixture, stale.lease()).await;
    fixture.must_finish(&live, done()).await;
}

async fn a_finished_holder_does_not_own_the_retried_job(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let old = fixture.running(job("mail")).await;
        let ending = match outcome {
            Outcome::Succeeded => done(),
            Outcome::FailedPermanent => failed_for_good(),
            Outcome::Cancelled => gave_up(),
        };
        fixture.must_finish(&old, ending).await;
        fixture.retry(old.lease().id).await.expect("retry");
        let worker = fixture.worker().await;
        let live = fixture.claim_one(worker).await;
        assert_eq!(live.lease().lease_no, 2);
        let store = fixture.store();
        assert_eq!(store.assert_lease(&old.lease()).await.expect("assert"), Fenced::LeaseLost);
        assert_eq!(store.progress(&[(old.lease(), raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
        // It may be told that its own end was stored, but moves nothing.
        let _ = fixture.finish(&old, failed()).await;
        let _ = fixture.finish(&old, done()).await;
        assert_eq!(fixture.status(old.lease().id).await, Status::Running, "{outcome:?}");
        fixture.must_finish(&live, done()).await;
    }
}

async fn the_right_number_in_the_wrong_hands_is_powerless(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let thief = fixture.worker().await;
    assert_powerless(&fixture, stolen(live.lease(), thief)).await;
    assert_lost_by_beat(&fixture, stolen(live.lease(), thief)).await;
    fixture.must_finish(&live, done()).await;
}

/// The same worker got the job back after its handler had hung: the right
/// hands, but an old number.
async fn a_holder_is_powerless_over_its_own_later_lease(fixture: Fixture) {
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
    assert_powerless(&fixture, stale.lease()).await;
    assert_lost_by_beat(&fixture, stale.lease()).await;
    fixture.must_finish(&live, done()).await;
}

/// The same once more for ends that leave nothing behind: first the job ended
/// and an operator let it run again, then its holder gave it back.
async fn a_plain_success_of_an_old_lease_does_not_end_a_later_one_of_its_worker(fixture: Fixture) {
    let first = fixture.running(job("mail")).await;
    let (id, worker) = (first.lease().id, first.lease().worker);
    fixture.must_finish(&first, done_plainly()).await;
    fixture.retry(id).await.expect("retry");
    let second = fixture.claim_one(worker).await;
    assert_eq!(fixture.finish(&first, done_plainly()).await, Fenced::LeaseLost);
    fixture.must_finish(&second, Ending::Released).await;
    let third = fixture.claim_one(worker).await;
    assert_eq!((third.lease().worker, third.lease().lease_no), (worker, 3));
    for old in [&first, &second] {
        assert_eq!(fixture.finish(old, done_plainly()).await, Fenced::LeaseLost);
    }
    assert_eq!(fixture.store().assert_lease(&third.lease()).await.expect("assert"), Fenced::Held);
    fixture.must_finish(&third, done_plainly()).await;
}

/// Many at once, all with the same number; two of them are somebody else's.
async fn plain_successes_of_one_batch_end_what_their_worker_holds(fixture: Fixture) {
    let (honest, robbed) = (fixture.worker().await, fixture.worker().await);
    fixture.enqueue_many((0..6).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let (own, foreign) = (fixture.claim(honest, 4).await, fixture.claim(robbed, 9).await);
    let leases = own.iter().map(Claimed::lease).chain(foreign.iter().map(|job| stolen(job.lease(), honest)));
    let batch: Vec<_> = leases.map(|lease| settlement(lease, 1, done_plainly(), None)).collect();
    let (stored, lost) = (Settled::Stored, Settled::LeaseLost);
    let settled = fixture.store().settle(&batch).await.expect("settle");
    assert_eq!(settled, [stored, stored, stored, stored, lost, lost]);
    assert_eq!(fixture.counted(Status::Succeeded).await, 4);
    for held in &foreign {
        fixture.must_finish(held, done_plainly()).await;
    }
}

async fn a_number_from_the_future_is_powerless(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let future = Lease { lease_no: live.lease().lease_no + 1, ..live.lease() };
    assert_powerless(&fixture, future).await;
    assert_lost_by_beat(&fixture, future).await;
}

async fn a_waiting_job_has_no_holder(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    for lease_no in [0, 1] {
        assert_powerless(&fixture, Lease { id, lease_no, worker }).await;
    }
}

async fn an_unknown_job_has_no_holder(fixture: Fixture) {
    let lease = Lease { id: JobId::new(), lease_no: 1, worker: fixture.worker().await };
    let store = fixture.store();
    let late = settlement(lease, 1, done(), None);
    assert_eq!(store.settle(&[late]).await.expect("settle"), [Settled::LeaseLost]);
    assert_eq!(store.mark_started(&lease).await.expect("mark"), Fenced::LeaseLost);
    assert_eq!(store.progress(&[(lease, raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
    assert_eq!(store.save_checkpoint(&lease, &raw("7")).await.expect("save"), Fenced::LeaseLost);
    assert_eq!(store.assert_lease(&lease).await.expect("assert"), Fenced::LeaseLost);
    assert!(store.checkpoint(lease.id).await.expect("checkpoint").is_none());
}

async fn a_deleted_job_has_no_holder(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, failed_for_good()).await;
    fixture.delete(claimed.lease().id).await.expect("delete");
    let late = settlement(claimed.lease(), 1, failed_for_good(), None);
    assert_eq!(fixture.store().settle(&[late]).await.expect("settle"), [Settled::LeaseLost]);
}

// ---- and the live holder can ---------------------------------------------------

async fn the_live_holder_can_do_everything(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let (lease, store) = (live.lease(), fixture.store());
    assert_eq!(store.assert_lease(&lease).await.expect("assert"), Fenced::Held);
    assert_eq!(store.mark_started(&lease).await.expect("mark"), Fenced::Held);
    assert_eq!(store.progress(&[(lease, raw(r#"{"done":3}"#))]).await.expect("progress"), [Fenced::Held]);
    assert_eq!(fixture.job(lease.id).await.progress.expect("progress").get(), r#"{"done":3}"#);
    assert_eq!(store.save_checkpoint(&lease, &raw(r#"{"page":5}"#)).await.expect("save"), Fenced::Held);
    assert_eq!(checkpoint(&fixture, lease.id).await.as_deref(), Some(r#"{"page":5}"#));
    let beat = store.beat(lease.worker, &[lease]).await.expect("beat");
    assert_eq!(beat, Beat::Alive { lost: Vec::new(), cancel: Vec::new() });
}

/// All that a worker reads off its claim.
fn face(claimed: &Claimed) -> String {
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

async fn the_claims_behind_live_leases_are_as_they_were_given(fixture: Fixture) {
    let worker = fixture.worker().await;
    let everything = job("mail")
        .priority(9)
        .max_attempts(5)
        .timeout(Some(17 * SECOND))
        .retry(RetryPolicy::fixed(HOUR))
        .flags(["gpu", "eu"])
        .tags(["red"])
        .trace("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
    fixture.add(everything).await;
    fixture.add(job("sms").timeout(None)).await;
    let first = fixture.claim(worker, 2).await;
    fixture.must_finish(&first[1], failed()).await;
    fixture.advance(10 * SECOND).await;
    fixture.add(job("fax").queue("letters").priority(-3)).await;
    let second = fixture.claim_one(worker).await;
    let letters = fixture.claim_from("letters", worker, 1).await;
    let given = [&letters[0], &first[0], &second];
    let leases: Vec<_> = given.iter().map(|claimed| claimed.lease()).collect();
    let found = fixture.store().claims(&leases).await.expect("claims");
    for (given, found) in given.into_iter().zip(&found) {
        let found = found.as_ref().expect("a live lease");
        assert_eq!(face(found), face(given));
        // When a retry was due is not kept; when it was asked for is.
        assert_eq!(found.run_at(), fixture.job(given.lease().id).await.run_at);
    }
    let found = fixture.store().claims(&leases[..1]).await.expect("claims").remove(0).expect("live");
    fixture.must_finish(&found, done()).await;
}

async fn a_suspect_is_found_by_its_lease_as_a_suspect(fixture: Fixture) {
    fixture.suspect(job("mail")).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    let found = fixture.store().claims(&[claimed.lease()]).await.expect("claims").remove(0).expect("live");
    assert_eq!((found.interruptions(), face(&found)), (1, face(&claimed)));
}

async fn claims_are_answered_lease_by_lease(fixture: Fixture) {
    let (stale, live) = reclaimed(&fixture).await;
    let future = Lease { lease_no: live.lease().lease_no + 1, ..live.lease() };
    let thief = fixture.worker().await;
    let nobody = Lease { id: JobId::new(), ..live.lease() };
    let leases = [stale.lease(), live.lease(), future, stolen(live.lease(), thief), nobody, live.lease()];
    let found = fixture.store().claims(&leases).await.expect("claims");
    let found: Vec<_> = found.iter().map(|claimed| claimed.as_ref().map(Claimed::lease)).collect();
    assert_eq!(found, [None, Some(live.lease()), None, None, None, Some(live.lease())]);
    assert!(fixture.store().claims(&[]).await.expect("claims").is_empty());
    fixture.must_finish(&live, done()).await;
    assert!(fixture.store().claims(&[live.lease()]).await.expect("claims")[0].is_none());
}

async fn progress_is_answered_report_by_report(fixture: Fixture) {
    let (stale, live) = reclaimed(&fixture).await;
    let reports = [(stale.lease(), raw("1")), (live.lease(), raw("2")), (stale.lease(), raw("3"))];
    let answers = fixture.store().progress(&reports).await.expect("progress");
    assert_eq!(answers, [Fenced::LeaseLost, Fenced::Held, Fenced::LeaseLost]);
    assert_eq!(fixture.job(live.lease().id).await.progress.expect("progress").get(), "2");
}

async fn the_newest_of_two_reports_in_one_batch_shows(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    let reports = [(live.lease(), raw("1")), (live.lease(), raw("2"))];
    assert_eq!(fixture.store().progress(&reports).await.expect("progress"), [Fenced::Held; 2]);
    assert_eq!(fixture.job(live.lease().id).await.progress.expect("progress").get(), "2");
}

async fn what_the_database_could_choke_on_is_refused_by_name_and_harms_nothing(fixture: Fixture) {
    let live = fixture.running(job("mail")).await;
    for bad in [r#"{"a":"\u0000"}"#, r#""\ud800""#] {
        let reports = [(live.lease(), raw("1")), (live.lease(), raw(bad))];
        let error = fixture.store().progress(&reports).await.expect_err("progress");
        assert_eq!(error.field(), Some("progress"), "{error:?}");
        let error = fixture.store().save_checkpoint(&live.lease(), &raw(bad)).await.expect_err("checkpoint");
        assert_eq!(error.field(), Some("checkpoint"), "{error:?}");
    }
    assert!(fixture.job(live.lease().id).await.progress.is_none());
    fixture.must_finish(&live, done()).await;
}

async fn a_checkpoint_outlives_the_attempt_and_is_replaced_by_the_next(fixture: Fixture) {
    let first = fixture.running(job("mail")).await;
    let id = first.lease().id;
    assert!(checkpoint(&fixture, id).await.is_none());
    assert_eq!(fixture.store().save_checkpoint(&first.lease(), &raw("1")).await.expect("save"), Fenced::Held);
    assert_eq!(fixture.store().save_checkpoint(&first.lease(), &raw("2")).await.expect("save"), Fenced::Held);
    fixture.must_finish(&first, failed()).await;
    assert_eq!(checkpoint(&fixture, id).await.as_deref(), Some("2"));
    fixture.advance(MINUTE / 2).await;
    let second = fixture.claim_one(first.lease().worker).await;
    assert_eq!(
        fixture.store().save_checkpoint(&second.lease(), &raw("3")).await.expect("save"),
        Fenced::Held
    );
    assert_eq!(checkpoint(&fixture, id).await.as_deref(), Some("3"));
}

async fn a_checkpoint_goes_with_its_job(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    assert_eq!(
        fixture.store().save_checkpoint(&claimed.lease(), &raw("1")).await.expect("save"),
        Fenced::Held
    );
    fixture.must_finish(&claimed, done()).await;
    fixture.delete(id).await.expect("delete");
    assert!(checkpoint(&fixture, id).await.is_none());
}

async fn a_released_lease_is_gone_at_once(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, Ending::Released).await;
    let store = fixture.store();
    assert_eq!(store.assert_lease(&claimed.lease()).await.expect("assert"), Fenced::LeaseLost);
    assert_eq!(store.mark_started(&claimed.lease()).await.expect("mark"), Fenced::LeaseLost);
    assert_eq!(store.progress(&[(claimed.lease(), raw("7"))]).await.expect("progress"), [Fenced::LeaseLost]);
    assert_eq!(store.save_checkpoint(&claimed.lease(), &raw("7")).await.expect("save"), Fenced::LeaseLost);
    assert_lost_by_beat(&fixture, claimed.lease()).await;
}
