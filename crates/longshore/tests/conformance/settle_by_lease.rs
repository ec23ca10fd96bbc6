//! Settling by lease, for workers that keep only their lease and not the whole claim. The
//! effect is the same as in `settle.rs`.

use longshore::rules::lifecycle::LeaseFlags;
use longshore::store::{Claimed, Fenced};
use longshore::{Ending, Interruption, JobId, Lease, NewJob, Status, UniqueMode, ValidJob};

use crate::fixture::*;

cases! {
    settling_by_lease_has_the_same_effect_as_settling_by_claim,
    settling_a_lease_again_returns_held_and_changes_nothing,
    settling_a_final_failure_or_a_quarantine_again_returns_held,
    settling_an_ended_lease_with_another_ending_returns_lease_lost,
    settling_a_lost_lease_stores_nothing,
    results_are_returned_per_lease,
    concurrent_identical_settles_all_return_held,
}

async fn settle(fixture: &Fixture, lease: Lease, ending: Ending, follow_ups: Vec<ValidJob>) -> Fenced {
    fixture.settle_leases(vec![(lease, ending, follow_ups)]).await.expect("settle_leases").remove(0)
}

/// Everything about a job that its end decides.
async fn summary(fixture: &Fixture, id: JobId) -> String {
    let job = fixture.job(id).await;
    let errors: Vec<_> = job.errors.iter().map(|attempt| (attempt.what, attempt.error.clone())).collect();
    let result = job.result.map(|result| result.get().to_owned());
    format!(
        "{} {} {} {} {:?} {:?} {errors:?}",
        job.status, job.attempts, job.interruptions, job.run_at, job.last_error, result
    )
}

/// A running job with these flags.
async fn running_with(fixture: &Fixture, flags: LeaseFlags) -> Claimed {
    let key = JobId::new().to_string();
    let keyed =
        |queue: &str| job("mail").queue(queue).max_attempts(2).unique_key(key.as_str(), UniqueMode::Replace);
    let claimed = fixture.running(keyed("default")).await;
    if flags.superseded {
        fixture.enqueue(keyed("other")).await.expect("enqueue");
    }
    if flags.cancel_requested {
        fixture.cancel(claimed.lease().id).await.expect("cancel");
    }
    claimed
}

fn all_flags() -> [LeaseFlags; 4] {
    [(false, false), (true, false), (false, true), (true, true)]
        .map(|(cancel_requested, superseded)| LeaseFlags { cancel_requested, superseded })
}

/// Empties the default queue for the next round.
async fn cancel_if_waiting(fixture: &Fixture, id: JobId) {
    if matches!(fixture.status(id).await, Status::Queued | Status::Retrying) {
        fixture.cancel(id).await.expect("cancel");
    }
}

async fn settling_by_lease_has_the_same_effect_as_settling_by_claim(fixture: Fixture) {
    for ending in endings().into_iter().chain([done_without_result(), observed_cancel_without_reason()]) {
        for flags in all_flags() {
            let by_claim = running_with(&fixture, flags).await;
            fixture.must_finish(&by_claim, ending.clone()).await;
            let expected = summary(&fixture, by_claim.lease().id).await;
            cancel_if_waiting(&fixture, by_claim.lease().id).await;
            let lease = running_with(&fixture, flags).await.lease();
            assert_eq!(settle(&fixture, lease, ending.clone(), Vec::new()).await, Fenced::Held);
            assert_eq!(summary(&fixture, lease.id).await, expected, "{ending:?} {flags:?}");
            cancel_if_waiting(&fixture, lease.id).await;
        }
    }
}

/// A holder that did not receive the reply settles again. For every ending and all flags
/// the result is that its settle is stored.
async fn settling_a_lease_again_returns_held_and_changes_nothing(fixture: Fixture) {
    for ending in endings().into_iter().chain([done_without_result(), observed_cancel_without_reason()]) {
        for flags in all_flags() {
            let lease = running_with(&fixture, flags).await.lease();
            let follow_up = || vec![job("next").queue("other").validate().expect("valid")];
            assert_eq!(settle(&fixture, lease, ending.clone(), follow_up()).await, Fenced::Held);
            let before = snapshot(&fixture.job(lease.id).await);
            for _ in 0..2 {
                let again = settle(&fixture, lease, ending.clone(), follow_up()).await;
                assert_eq!(again, Fenced::Held, "{ending:?} {flags:?}");
            }
            assert_eq!(snapshot(&fixture.job(lease.id).await), before);
            cancel_if_waiting(&fixture, lease.id).await;
        }
    }
    let next = fixture.counts().await.expect("counts");
    let next: u64 = next.iter().filter(|count| count.kind == "next").map(|count| count.jobs).sum();
    assert_eq!(next, 9 * 4, "one follow-up per end");
}

async fn settling_a_final_failure_or_a_quarantine_again_returns_held(fixture: Fixture) {
    let last = fixture.running(job("mail").max_attempts(1)).await.lease();
    for _ in 0..2 {
        assert_eq!(settle(&fixture, last, failed(), Vec::new()).await, Fenced::Held);
        assert_eq!(fixture.status(last.id).await, Status::FailedPermanent);
    }
    fixture.suspect(job("mail")).await;
    let worker = fixture.worker().await;
    let suspect = fixture.claim_one(worker).await.lease();
    let ending = || Ending::Interrupted(Interruption { delay: SECOND, max_interruptions: 2 });
    for _ in 0..2 {
        assert_eq!(settle(&fixture, suspect, ending(), Vec::new()).await, Fenced::Held);
        assert_eq!(fixture.status(suspect.id).await, Status::FailedPermanent);
    }
}

async fn settling_an_ended_lease_with_another_ending_returns_lease_lost(fixture: Fixture) {
    let lease = fixture.running(job("mail")).await.lease();
    assert_eq!(settle(&fixture, lease, done(), Vec::new()).await, Fenced::Held);
    let before = snapshot(&fixture.job(lease.id).await);
    for ending in
        [failed(), failed_permanently(), observed_cancel(), snoozed(), Ending::Released, interrupted()]
    {
        assert_eq!(
            settle(&fixture, lease, ending.clone(), Vec::new()).await,
            Fenced::LeaseLost,
            "{ending:?}"
        );
    }
    assert_eq!(snapshot(&fixture.job(lease.id).await), before);
}

async fn settling_a_lost_lease_stores_nothing(fixture: Fixture) {
    let stale = fixture.running(job("mail")).await.lease();
    fixture.crash_all_workers().await;
    let worker = fixture.worker().await;
    let live = fixture.claim_one(worker).await.lease();
    let before = snapshot(&fixture.job(live.id).await);
    let follow_up = || vec![job("next").validate().expect("valid")];
    let wrong = [
        stale,
        held_by(live, stale.worker),
        Lease { lease_no: 7, ..live },
        Lease { id: JobId::new(), ..live },
    ];
    for lease in wrong {
        for ending in [done(), failed(), failed_permanently(), observed_cancel(), snoozed(), Ending::Released]
        {
            assert_eq!(
                settle(&fixture, lease, ending.clone(), follow_up()).await,
                Fenced::LeaseLost,
                "{ending:?}"
            );
        }
    }
    assert_eq!(snapshot(&fixture.job(live.id).await), before);
    assert_eq!(fixture.count(Status::Queued).await, 0, "no follow-up is stored");
    assert_eq!(settle(&fixture, live, done(), follow_up()).await, Fenced::Held);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn results_are_returned_per_lease(fixture: Fixture) {
    let ended = fixture.running(job("mail")).await.lease();
    assert_eq!(settle(&fixture, ended, snoozed(), Vec::new()).await, Fenced::Held);
    let worker = fixture.worker().await;
    fixture.enqueue_many((0..3).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let live: Vec<Lease> = fixture.claim(worker, 3).await.iter().map(Claimed::lease).collect();
    let unknown = Lease { id: JobId::new(), ..ended };
    let reports = vec![
        (live[2], failed(), Vec::new()),
        (unknown, done(), Vec::new()),
        (ended, snoozed(), Vec::new()),
        (live[0], done(), Vec::new()),
        (ended, done(), Vec::new()),
        (live[1], done_without_result(), Vec::new()),
    ];
    let (held, lost) = (Fenced::Held, Fenced::LeaseLost);
    let results = fixture.settle_leases(reports).await.expect("settle_leases");
    assert_eq!(results, [held, lost, held, held, lost, held]);
    assert_eq!(fixture.count(Status::Succeeded).await, 2);
    assert_eq!(fixture.settle_leases(Vec::new()).await.expect("settle_leases"), []);
}

async fn concurrent_identical_settles_all_return_held(fixture: Fixture) {
    for ending in endings() {
        for flags in all_flags() {
            let lease = running_with(&fixture, flags).await.lease();
            let sent: Vec<_> = (0..3)
                .map(|_| {
                    let (client, settle) = (fixture.client(), (lease, ending.clone(), Vec::new()));
                    tokio::spawn(async move { client.settle_leases(vec![settle]).await })
                })
                .collect();
            for sent in sent {
                let results = sent.await.expect("task").expect("settle_leases");
                assert_eq!(results, [Fenced::Held], "{ending:?} {flags:?}");
            }
            cancel_if_waiting(&fixture, lease.id).await;
        }
    }
}
