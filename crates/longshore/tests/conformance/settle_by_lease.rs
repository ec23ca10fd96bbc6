//! Holders that keep nothing but their leases: what they report is stored as if
//! they had kept the whole claim, once.

use longshore::lifecycle::Flags;
use longshore::store::{Claimed, Fenced, Lease};
use longshore::{Ending, Interruption, JobId, NewJob, Status, UniqueMode, ValidJob};

use crate::fixture::*;

cases! {
    a_lease_alone_settles_as_its_claim_does,
    a_lease_settled_again_is_held_again_and_nothing_changes,
    a_last_failure_and_a_quarantine_settled_again_are_held_again,
    another_word_about_an_ended_lease_is_lost,
    a_lost_lease_alone_settles_nothing,
    leases_settled_in_one_batch_are_answered_one_by_one,
    a_report_that_comes_in_twice_at_once_is_held_twice,
}

/// Reports an end as a holder does that kept nothing but its lease.
async fn report(fixture: &Fixture, lease: Lease, ending: Ending, follow_ups: Vec<ValidJob>) -> Fenced {
    fixture.settle_leases(vec![(lease, ending, follow_ups)]).await.expect("settle_leases").remove(0)
}

/// Everything an end decides.
async fn left(fixture: &Fixture, id: JobId) -> String {
    let job = fixture.job(id).await;
    let errors: Vec<_> = job.errors.iter().map(|attempt| (attempt.what, attempt.error.clone())).collect();
    let result = job.result.map(|result| result.get().to_owned());
    format!(
        "{} {} {} {} {:?} {:?} {errors:?}",
        job.status, job.attempts, job.interruptions, job.run_at, job.last_error, result
    )
}

/// The ways a job can stand when its holder reports.
async fn flagged(fixture: &Fixture, flags: Flags) -> Claimed {
    let key = JobId::new().to_string();
    let keyed =
        |queue: &str| job("mail").queue(queue).max_attempts(2).unique_key(key.as_str(), UniqueMode::Replace);
    let claimed = fixture.running(keyed("default")).await;
    if flags.superseded {
        fixture.enqueue(keyed("elsewhere")).await.expect("enqueue");
    }
    if flags.cancel_requested {
        fixture.cancel(claimed.lease().id).await.expect("cancel");
    }
    claimed
}

fn all_flags() -> [Flags; 4] {
    [(false, false), (true, false), (false, true), (true, true)]
        .map(|(cancel_requested, superseded)| Flags { cancel_requested, superseded })
}

/// Clears the default queue for the next round.
async fn put_away(fixture: &Fixture, id: JobId) {
    if matches!(fixture.status(id).await, Status::Queued | Status::Retrying) {
        fixture.cancel(id).await.expect("cancel");
    }
}

async fn a_lease_alone_settles_as_its_claim_does(fixture: Fixture) {
    for ending in endings().into_iter().chain([done_without_result(), observed_cancel_without_reason()]) {
        for flags in all_flags() {
            let by_claim = flagged(&fixture, flags).await;
            fixture.must_finish(&by_claim, ending.clone()).await;
            let expected = left(&fixture, by_claim.lease().id).await;
            put_away(&fixture, by_claim.lease().id).await;
            let lease = flagged(&fixture, flags).await.lease();
            assert_eq!(report(&fixture, lease, ending.clone(), Vec::new()).await, Fenced::Held);
            assert_eq!(left(&fixture, lease.id).await, expected, "{ending:?} {flags:?}");
            put_away(&fixture, lease.id).await;
        }
    }
}

/// The answer was lost and the holder asks again: whatever the end was, and
/// whatever had been asked of the job, it is told that its word is stored.
async fn a_lease_settled_again_is_held_again_and_nothing_changes(fixture: Fixture) {
    for ending in endings().into_iter().chain([done_without_result(), observed_cancel_without_reason()]) {
        for flags in all_flags() {
            let lease = flagged(&fixture, flags).await.lease();
            let follow_up = || vec![job("next").queue("elsewhere").validate().expect("valid")];
            assert_eq!(report(&fixture, lease, ending.clone(), follow_up()).await, Fenced::Held);
            let before = snapshot(&fixture.job(lease.id).await);
            for _ in 0..2 {
                let again = report(&fixture, lease, ending.clone(), follow_up()).await;
                assert_eq!(again, Fenced::Held, "{ending:?} {flags:?}");
            }
            assert_eq!(snapshot(&fixture.job(lease.id).await), before);
            put_away(&fixture, lease.id).await;
        }
    }
    let next = fixture.counts().await.expect("counts");
    let next: u64 = next.iter().filter(|count| count.kind == "next").map(|count| count.jobs).sum();
    assert_eq!(next, 9 * 4, "a follow-up for each end, and no second one");
}

async fn a_last_failure_and_a_quarantine_settled_again_are_held_again(fixture: Fixture) {
    let last = fixture.running(job("mail").max_attempts(1)).await.lease();
    for _ in 0..2 {
        assert_eq!(report(&fixture, last, failed(), Vec::new()).await, Fenced::Held);
        assert_eq!(fixture.status(last.id).await, Status::FailedPermanent);
    }
    fixture.suspect(job("mail")).await;
    let worker = fixture.worker().await;
    let suspect = fixture.claim_one(worker).await.lease();
    let ending = || Ending::Interrupted(Interruption { delay: SECOND, max_interruptions: 2 });
    for _ in 0..2 {
        assert_eq!(report(&fixture, suspect, ending(), Vec::new()).await, Fenced::Held);
        assert_eq!(fixture.status(suspect.id).await, Status::FailedPermanent);
    }
}

async fn another_word_about_an_ended_lease_is_lost(fixture: Fixture) {
    let lease = fixture.running(job("mail")).await.lease();
    assert_eq!(report(&fixture, lease, done(), Vec::new()).await, Fenced::Held);
    let before = snapshot(&fixture.job(lease.id).await);
    for ending in
        [failed(), failed_permanently(), observed_cancel(), snoozed(), Ending::Released, interrupted()]
    {
        assert_eq!(
            report(&fixture, lease, ending.clone(), Vec::new()).await,
            Fenced::LeaseLost,
            "{ending:?}"
        );
    }
    assert_eq!(snapshot(&fixture.job(lease.id).await), before);
}

async fn a_lost_lease_alone_settles_nothing(fixture: Fixture) {
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
                report(&fixture, lease, ending.clone(), follow_up()).await,
                Fenced::LeaseLost,
                "{ending:?}"
            );
        }
    }
    assert_eq!(snapshot(&fixture.job(live.id).await), before);
    assert_eq!(fixture.count(Status::Queued).await, 0, "no follow-up of theirs is stored");
    assert_eq!(report(&fixture, live, done(), follow_up()).await, Fenced::Held);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn leases_settled_in_one_batch_are_answered_one_by_one(fixture: Fixture) {
    let ended = fixture.running(job("mail")).await.lease();
    assert_eq!(report(&fixture, ended, snoozed(), Vec::new()).await, Fenced::Held);
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
    let answers = fixture.settle_leases(reports).await.expect("settle_leases");
    assert_eq!(answers, [held, lost, held, held, lost, held]);
    assert_eq!(fixture.count(Status::Succeeded).await, 2);
    assert_eq!(fixture.settle_leases(Vec::new()).await.expect("settle_leases"), []);
}

async fn a_report_that_comes_in_twice_at_once_is_held_twice(fixture: Fixture) {
    for ending in endings() {
        for flags in all_flags() {
            let lease = flagged(&fixture, flags).await.lease();
            let sent: Vec<_> = (0..3)
                .map(|_| {
                    let (client, report) = (fixture.client(), (lease, ending.clone(), Vec::new()));
                    tokio::spawn(async move { client.settle_leases(vec![report]).await })
                })
                .collect();
            for sent in sent {
                let answer = sent.await.expect("task").expect("settle_leases");
                assert_eq!(answer, [Fenced::Held], "{ending:?} {flags:?}");
            }
            put_away(&fixture, lease.id).await;
        }
    }
}
