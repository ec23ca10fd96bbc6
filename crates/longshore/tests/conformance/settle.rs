//! Settle: the end of an attempt is stored once, with its history and follow-ups.

use std::time::Duration;

use longshore::rules::lifecycle::{self, LeaseFlags, PendingWait, State};
use longshore::store::{Claimed, EndedBy, Fenced, Settled, Settlement};
use longshore::{
    AttemptEnd, Ending, Interruption, JobId, Lease, NewJob, Report, RetryPolicy, Status, WorkerId,
};

use crate::fixture::*;

cases! {
    a_success_is_final_and_keeps_its_result,
    a_success_without_a_result_stores_none,
    a_failure_with_attempts_left_waits_for_its_backoff,
    a_failure_on_the_last_attempt_is_final,
    a_failure_without_a_retry_is_final_even_with_attempts_left,
    an_observed_cancel_is_final_and_keeps_its_reason,
    a_snooze_is_not_charged_and_waits_for_its_delay,
    a_release_is_not_charged_and_is_due_at_once,
    a_job_that_never_started_waits_again_as_before,
    a_repeated_release_of_a_job_that_never_started_changes_nothing,
    a_job_that_an_operator_ran_early_is_still_due_after_a_release,
    an_interruption_is_counted_but_not_charged,
    the_history_contains_every_attempt_that_did_not_succeed,
    the_last_error_is_kept_after_a_later_success,
    a_success_without_a_result_keeps_attempts_and_interruptions,
    the_default_backoff_stays_between_one_second_and_its_cap,
    the_retry_policy_of_a_job_decides_its_backoff,
    a_repeated_settle_returns_held_and_changes_nothing,
    a_repeated_settle_is_recognised_after_the_next_claim,
    a_repeated_settle_creates_no_second_follow_up,
    a_repeated_settle_does_not_enqueue_its_follow_ups_again,
    a_repeated_final_failure_is_recognised_after_an_operators_retry,
    a_job_settled_repeatedly_is_counted_once,
    follow_ups_are_stored_with_the_end,
    follow_ups_of_a_lost_lease_are_never_stored,
    follow_ups_respect_their_keys,
    follow_ups_are_stored_when_a_cancel_changes_the_end,
    a_follow_up_that_the_database_refuses_affects_only_its_own_settle,
    an_error_with_a_nul_byte_is_stored_without_it,
    a_too_long_error_is_truncated_at_a_character_boundary,
    a_result_that_the_database_cannot_store_does_not_stop_the_settle,
    a_too_long_result_does_not_stop_the_settle,
    an_absurd_delay_does_not_stop_the_settle,
    a_reason_with_a_nul_byte_does_not_stop_the_settle,
    settle_results_are_returned_per_item,
    an_empty_batch_is_accepted,
    a_lease_settled_twice_in_one_batch_ends_once,
    a_large_batch_of_successes_is_stored,
    results_and_errors_of_a_batch_stay_with_their_jobs,
    a_settle_decided_without_a_raised_flag_returns_flagged,
    a_success_is_stored_regardless_of_flags,
    a_follow_up_of_a_settle_that_returns_flagged_is_not_stored,
    a_wait_of_a_settle_that_returns_flagged_is_not_stored,
    a_repeated_settle_by_another_worker_is_refused,
}

fn report(claimed: &Claimed, ending: Ending) -> Report<'_> {
    Report { claimed, ending, follow_ups: Vec::new(), has_progressed: false }
}

/// A settlement for the store, for cases that act as a stale client.
pub(crate) fn settlement(lease: Lease, attempt: u16, ending: Ending, seen: Option<LeaseFlags>) -> Settlement {
    let running = lifecycle::Running {
        lease_no: lease.lease_no,
        worker: lease.worker,
        attempt,
        max_attempts: 3,
        interruptions: 0,
        started: true,
        flags: seen.unwrap_or_default(),
    };
    Settlement {
        lease,
        by: EndedBy::Holder,
        seen,
        leave: lifecycle::settle(&running, ending),
        follow_ups: Vec::new(),
        waits: Vec::new(),
        failure: None,
    }
}

// ---- every ending ------------------------------------------------------------

async fn a_success_is_final_and_keeps_its_result(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(7 * SECOND).await;
    fixture.must_finish(&claimed, done()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.lease_no), (Status::Succeeded, 1, 1));
    assert_eq!(job.result.as_ref().expect("a result").get(), r#"{"sent": 3}"#);
    assert_eq!((job.started_at, job.finished_at), (Some(start()), Some(start() + 7 * SECOND)));
    assert_eq!((job.locked_by, job.locked_at, job.last_error), (None, None, None));
    assert!(job.errors.is_empty());
}

async fn a_success_without_a_result_stores_none(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, done_without_result()).await;
    assert!(fixture.job(claimed.lease().id).await.result.is_none());
}

async fn a_failure_with_attempts_left_waits_for_its_backoff(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.advance(7 * SECOND).await;
    fixture.must_finish(&claimed, failed()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 1, 0));
    assert_eq!(job.run_at, start() + 17 * SECOND);
    assert_eq!(job.last_error.as_deref(), Some("smtp said 451"));
    assert_eq!(job.last_failed_at, Some(start() + 7 * SECOND));
}

async fn a_failure_on_the_last_attempt_is_final(fixture: Fixture) {
    let claimed = fixture.running(job("mail").max_attempts(1)).await;
    fixture.must_finish(&claimed, failed()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1));
    assert_eq!(job.last_error.as_deref(), Some("smtp said 451"));
    assert_eq!(job.finished_at, Some(start()));
}

async fn a_failure_without_a_retry_is_final_even_with_attempts_left(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, failed_permanently()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1));
    assert_eq!(job.last_error.as_deref(), Some("no such mailbox"));
}

async fn an_observed_cancel_is_final_and_keeps_its_reason(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, observed_cancel()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.last_error.as_deref()), (Status::Cancelled, Some("saw the cancellation")));
}

async fn a_snooze_is_not_charged_and_waits_for_its_delay(fixture: Fixture) {
    let claimed = fixture.running(job("mail").max_attempts(1)).await;
    fixture.must_finish(&claimed, snoozed()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.attempts, job.interruptions, job.run_at), (0, 0, start() + 20 * SECOND));
    assert_eq!((job.status, job.last_error), (Status::Queued, None));
}

async fn a_release_is_not_charged_and_is_due_at_once(fixture: Fixture) {
    let claimed = fixture.running(job("mail").max_attempts(1)).await;
    fixture.advance(SECOND).await;
    fixture.must_finish(&claimed, Ending::Released).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.attempts, job.interruptions, job.status), (0, 0, Status::Queued));
    assert_eq!(job.run_at, start() + SECOND);
    let again = fixture.claim_one(claimed.lease().worker).await;
    assert_eq!((again.attempt(), again.lease().lease_no), (1, 2));
}

async fn a_job_that_never_started_waits_again_as_before(fixture: Fixture) {
    let id = fixture.suspect(job("mail").max_attempts(2)).await;
    let before = fixture.job(id).await;
    fixture.advance(SECOND).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.advance(SECOND).await;
    fixture.must_finish(&claimed, not_started(&claimed)).await;
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 0, 1));
    assert_eq!((job.run_at, &job.last_error), (before.run_at, &before.last_error));
    assert_eq!(fixture.history(id).await, [AttemptEnd::Interrupted], "no entry for the claim");
    let again = fixture.claim_one(worker).await;
    assert_eq!((again.attempt(), again.lease().lease_no), (1, 3));
}

async fn a_repeated_release_of_a_job_that_never_started_changes_nothing(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, not_started(&claimed)).await;
    let waiting = snapshot(&fixture.job(claimed.lease().id).await);
    // The reply to the first call may have been lost. No row shows that it was stored.
    assert_eq!(fixture.finish(&claimed, not_started(&claimed)).await, Fenced::LeaseLost);
    assert_eq!(snapshot(&fixture.job(claimed.lease().id).await), waiting);
    let again = fixture.claim_one(claimed.lease().worker).await;
    assert_eq!(fixture.finish(&claimed, not_started(&claimed)).await, Fenced::LeaseLost);
    fixture.must_finish(&again, done()).await;
    assert_eq!(fixture.finish(&claimed, not_started(&claimed)).await, Fenced::LeaseLost);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Succeeded);
}

/// `jobs` still has the time that was requested at first.
async fn a_job_that_an_operator_ran_early_is_still_due_after_a_release(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(DAY)).await;
    fixture.retry(id).await.expect("retry");
    let worker = fixture.worker_with(DAY).await;
    let lease = fixture.claim_one(worker).await.lease();
    assert_eq!(fixture.release(&[lease]).await.expect("release"), 1);
    assert_eq!(fixture.job(id).await.run_at, start());
    let lease = fixture.claim_one(worker).await.lease();
    assert_eq!(fixture.release_unknown(worker, &[]).await.expect("release"), 1);
    assert_eq!(fixture.claim_one(worker).await.lease().lease_no, lease.lease_no + 1);
}

async fn an_interruption_is_counted_but_not_charged(fixture: Fixture) {
    let claimed = fixture.running(job("mail").max_attempts(1)).await;
    fixture.must_finish(&claimed, interrupted()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Retrying, 0, 1));
    assert_eq!(job.run_at, start() + 30 * SECOND);
    assert_eq!(job.last_error.as_deref(), Some(lifecycle::INTERRUPTED));
}

// ---- history -----------------------------------------------------------------

async fn the_history_contains_every_attempt_that_did_not_succeed(fixture: Fixture) {
    let id = fixture.add(job("mail").max_attempts(9)).await;
    let worker = fixture.worker_with(DAY).await;
    for ending in [failed(), snoozed(), Ending::Released, interrupted(), failed(), done()] {
        let claimed = fixture.claim_one(worker).await;
        fixture.advance(SECOND).await;
        fixture.must_finish(&claimed, ending).await;
        fixture.advance(MINUTE - SECOND).await;
    }
    let job = fixture.job(id).await;
    let entries: Vec<_> = job
        .errors
        .iter()
        .map(|entry| (entry.attempt, entry.lease_no, entry.what, entry.error.as_deref()))
        .collect();
    assert_eq!(
        entries,
        [
            (1, 1, AttemptEnd::Failed, Some("smtp said 451")),
            (2, 2, AttemptEnd::Snoozed, None),
            (2, 3, AttemptEnd::Released, None),
            (2, 4, AttemptEnd::Interrupted, Some(lifecycle::INTERRUPTED)),
            (2, 5, AttemptEnd::Failed, Some("smtp said 451")),
        ]
    );
    for (n, entry) in (0..).zip(&job.errors) {
        assert_eq!(entry.worker, Some(worker));
        assert_eq!(entry.started_at, start() + n * MINUTE);
        assert_eq!(entry.ended_at, start() + n * MINUTE + SECOND);
    }
}

async fn the_last_error_is_kept_after_a_later_success(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, failed()).await;
    fixture.advance(MINUTE / 2).await;
    let again = fixture.claim_one(claimed.lease().worker).await;
    fixture.must_finish(&again, done()).await;
    let job = fixture.job(claimed.lease().id).await;
    assert_eq!((job.status, job.last_error.as_deref()), (Status::Succeeded, Some("smtp said 451")));
    assert_eq!(job.last_failed_at, Some(start()));
}

async fn a_success_without_a_result_keeps_attempts_and_interruptions(fixture: Fixture) {
    let id = fixture.add(job("mail").max_attempts(9)).await;
    let worker = fixture.worker_with(DAY).await;
    for ending in [failed(), failed(), interrupted(), done_without_result()] {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, ending).await;
        fixture.advance(MINUTE).await;
    }
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.max_attempts), (Status::Succeeded, 3, 9));
    assert_eq!((job.interruptions, job.lease_no), (1, 4));
    assert_eq!(job.last_error.as_deref(), Some(lifecycle::INTERRUPTED));
    assert_eq!((job.started_at, job.finished_at), (Some(start() + 3 * MINUTE), Some(start() + 3 * MINUTE)));
}

async fn the_default_backoff_stays_between_one_second_and_its_cap(fixture: Fixture) {
    for _ in 0..20 {
        fixture.enqueue_kind("mail").await;
    }
    let worker = fixture.worker_with(DAY).await;
    for claimed in fixture.claim(worker, 20).await {
        let retry_in = claimed.backoff();
        fixture.must_finish(&claimed, Ending::Failed { error: "boom".into(), retry_in }).await;
        let delay = fixture.job(claimed.lease().id).await.run_at - start();
        assert!((1000..=3000).contains(&delay.num_milliseconds()), "{delay}");
    }
}

async fn the_retry_policy_of_a_job_decides_its_backoff(fixture: Fixture) {
    let policies = [
        (RetryPolicy::exponential(), Some(4 * SECOND)),
        (RetryPolicy::fixed(33 * SECOND), Some(33 * SECOND)),
        (RetryPolicy::list([77 * SECOND, SECOND]), Some(77 * SECOND)),
        (RetryPolicy::None, None),
    ];
    for (policy, expected) in policies {
        let claimed = fixture.running(job("mail").retry(policy)).await;
        assert_eq!(claimed.backoff(), expected);
        fixture.must_finish(&claimed, done()).await;
    }
}

// ---- repeated settles --------------------------------------------------------

/// A worker that did not receive the reply sends the same settle again.
async fn a_repeated_settle_returns_held_and_changes_nothing(fixture: Fixture) {
    for ending in endings() {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        fixture.must_finish(&claimed, ending.clone()).await;
        let before = snapshot(&fixture.job(id).await);
        fixture.advance(SECOND).await;
        assert_eq!(fixture.finish(&claimed, ending.clone()).await, Fenced::Held, "{ending:?}");
        assert_eq!(snapshot(&fixture.job(id).await), before, "{ending:?}");
        if fixture.status(id).await == Status::Queued || fixture.status(id).await == Status::Retrying {
            fixture.cancel(id).await.expect("cancel");
        }
    }
}

async fn a_repeated_settle_is_recognised_after_the_next_claim(fixture: Fixture) {
    for ending in [failed(), snoozed(), Ending::Released, interrupted()] {
        let claimed = fixture.running(job("mail").max_attempts(2)).await;
        fixture.must_finish(&claimed, ending.clone()).await;
        fixture.advance(MINUTE / 2).await;
        let next = fixture.worker().await;
        let again = fixture.claim_one(next).await;
        assert_eq!(fixture.finish(&claimed, ending.clone()).await, Fenced::Held, "{ending:?}");
        assert_eq!(fixture.store().assert_lease(&again.lease()).await.expect("assert"), Fenced::Held);
        fixture.must_finish(&again, done()).await;
    }
}

async fn a_repeated_settle_creates_no_second_follow_up(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let follow_up = job("follow").validate().expect("valid");
    for _ in 0..2 {
        let report = Report {
            claimed: &claimed,
            ending: done(),
            follow_ups: vec![follow_up.clone()],
            has_progressed: false,
        };
        assert_eq!(fixture.settle(vec![report]).await.expect("settle"), [Fenced::Held]);
    }
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

/// The unique key of the follow-up was taken, so it was not stored. The holder has ended
/// since then, but the repeated settle must not store the follow-up.
async fn a_repeated_settle_does_not_enqueue_its_follow_ups_again(fixture: Fixture) {
    let keyed = || job("follow").queue("other").unique_key("customer-23", Default::default());
    let holder = fixture.add(keyed()).await;
    let claimed = fixture.running(job("mail")).await;
    let follow_up = keyed().validate().expect("valid");
    let report = || Report {
        claimed: &claimed,
        ending: done(),
        follow_ups: vec![follow_up.clone()],
        has_progressed: false,
    };
    assert_eq!(fixture.settle(vec![report()]).await.expect("settle"), [Fenced::Held]);
    fixture.cancel(holder).await.expect("cancel");
    assert_eq!(fixture.settle(vec![report()]).await.expect("settle"), [Fenced::Held]);
    assert!(fixture.store().get(follow_up.id()).await.expect("get").is_none());
}

async fn a_repeated_final_failure_is_recognised_after_an_operators_retry(fixture: Fixture) {
    for ending in [failed(), failed_permanently()] {
        let claimed = fixture.running(job("mail").max_attempts(1)).await;
        let id = claimed.lease().id;
        fixture.must_finish(&claimed, ending.clone()).await;
        fixture.retry(id).await.expect("retry");
        fixture.must_finish(&claimed, ending).await;
        assert_eq!(fixture.status(id).await, Status::Queued);
        assert_eq!(fixture.history(id).await, [AttemptEnd::Failed]);
        fixture.cancel(id).await.expect("cancel");
    }
}

async fn a_job_settled_repeatedly_is_counted_once(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    for _ in 0..3 {
        fixture.must_finish(&claimed, done()).await;
    }
    assert_eq!(fixture.count(Status::Succeeded).await, 1);
}

// ---- follow-ups ---------------------------------------------------------------

async fn follow_ups_are_stored_with_the_end(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let follow_ups: Vec<_> = ["a", "b"].map(|kind| job(kind).validate().expect("valid")).to_vec();
    let expected: Vec<JobId> = follow_ups.iter().map(longshore::ValidJob::id).collect();
    let report = Report { claimed: &claimed, ending: done(), follow_ups, has_progressed: false };
    assert_eq!(fixture.settle(vec![report]).await.expect("settle"), [Fenced::Held]);
    for id in expected {
        assert_eq!(fixture.status(id).await, Status::Queued);
    }
}

async fn follow_ups_of_a_lost_lease_are_never_stored(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.crash_all_workers().await;
    let follow_up = job("follow").validate().expect("valid");
    let id = follow_up.id();
    let report =
        Report { claimed: &claimed, ending: done(), follow_ups: vec![follow_up], has_progressed: false };
    assert_eq!(fixture.settle(vec![report]).await.expect("settle"), [Fenced::LeaseLost]);
    assert!(fixture.store().get(id).await.expect("get").is_none());
}

async fn follow_ups_respect_their_keys(fixture: Fixture) {
    let holder =
        fixture.add(job("holder").priority(-9).unique_key("k", Default::default()).delay(HOUR)).await;
    let claimed = fixture.running(job("mail")).await;
    let follow_up = job("follow").unique_key("k", Default::default()).validate().expect("valid");
    let id = follow_up.id();
    let report =
        Report { claimed: &claimed, ending: done(), follow_ups: vec![follow_up], has_progressed: false };
    assert_eq!(fixture.settle(vec![report]).await.expect("settle"), [Fenced::Held]);
    assert!(fixture.store().get(id).await.expect("get").is_none());
    assert_eq!(fixture.status(holder).await, Status::Queued);
}

async fn follow_ups_are_stored_when_a_cancel_changes_the_end(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    let follow_up = job("follow").validate().expect("valid");
    let id = follow_up.id();
    let report =
        Report { claimed: &claimed, ending: failed(), follow_ups: vec![follow_up], has_progressed: false };
    assert_eq!(fixture.settle(vec![report]).await.expect("settle"), [Fenced::Held]);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Cancelled);
    assert_eq!(fixture.status(id).await, Status::Queued);
}

/// A unique index of the user's own makes the database refuse one follow-up.
async fn a_follow_up_that_the_database_refuses_affects_only_its_own_settle(fixture: Fixture) {
    fixture.sql("create unique index only_one on ready (kind) where kind = 'only one'", None).await;
    fixture.add(job("only one").queue("other")).await;
    fixture.enqueue_many((0..5).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 9).await;
    let follow_ups: Vec<Vec<_>> = [None, Some("sms"), Some("only one"), Some("fax"), None]
        .into_iter()
        .map(|kind| kind.into_iter().map(|kind| job(kind).validate().expect("valid")).collect())
        .collect();
    let reports = |range: std::ops::Range<usize>| {
        let report = |n: usize| Report { follow_ups: follow_ups[n].clone(), ..report(&claimed[n], done()) };
        range.map(report).collect()
    };
    fixture.settle(reports(0..5)).await.expect_err("one is refused");
    for n in [0, 1, 3, 4] {
        assert_eq!(fixture.settle(reports(n..n + 1)).await.expect("settle"), [Fenced::Held], "{n}");
    }
    // Its end and its follow-up are stored only when the database accepts both.
    fixture.settle(reports(2..3)).await.expect_err("still refused");
    assert_eq!(fixture.status(claimed[2].lease().id).await, Status::Running);
    assert!(fixture.store().get(follow_ups[2][0].id()).await.expect("get").is_none());
    fixture.sql("drop index only_one", None).await;
    assert_eq!(fixture.settle(reports(0..5)).await.expect("settle"), [Fenced::Held; 5]);
    assert_eq!(fixture.count(Status::Succeeded).await, 5);
    assert_eq!(fixture.count(Status::Queued).await, 4);
}

// ---- content that cannot be stored -----------------------------------------------

async fn an_error_with_a_nul_byte_is_stored_without_it(fixture: Fixture) {
    for retry_in in [Some(SECOND), None] {
        let claimed = fixture.running(job("mail")).await;
        fixture.must_finish(&claimed, Ending::Failed { error: "bad\0byte".into(), retry_in }).await;
        let job = fixture.job(claimed.lease().id).await;
        let error = job.last_error.expect("an error");
        assert!(error.starts_with("bad") && error.ends_with("byte") && !error.contains('\0'), "{error:?}");
        if retry_in.is_some() {
            fixture.cancel(claimed.lease().id).await.expect("cancel");
        }
    }
}

async fn a_too_long_error_is_truncated_at_a_character_boundary(fixture: Fixture) {
    for retry_in in [Some(SECOND), None] {
        let claimed = fixture.running(job("mail")).await;
        let error = "ä".repeat(1_000_000);
        fixture.must_finish(&claimed, Ending::Failed { error, retry_in }).await;
        let stored = fixture.job(claimed.lease().id).await.last_error.expect("an error");
        assert!(stored.len() < 100_000 && stored.starts_with("ääää"), "{} bytes", stored.len());
        if retry_in.is_some() {
            fixture.cancel(claimed.lease().id).await.expect("cancel");
        }
    }
}

async fn a_result_that_the_database_cannot_store_does_not_stop_the_settle(fixture: Fixture) {
    for text in [r#"{"a":"x\u0000y"}"#, r#""\ud800""#] {
        let claimed = fixture.running(job("mail")).await;
        fixture.must_finish(&claimed, Ending::Succeeded { result: Some(raw(text)) }).await;
        assert_eq!(fixture.status(claimed.lease().id).await, Status::Succeeded, "{text}");
    }
}

async fn a_too_long_result_does_not_stop_the_settle(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let text = format!("\"{}\"", "r".repeat(3 * 1024 * 1024));
    fixture.must_finish(&claimed, Ending::Succeeded { result: Some(raw(&text)) }).await;
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Succeeded);
}

/// A handler may pass on any `Retry-After` value.
async fn an_absurd_delay_does_not_stop_the_settle(fixture: Fixture) {
    let how = Interruption { delay: Duration::MAX, max_interruptions: 9 };
    for ending in [
        Ending::Failed { error: "busy".into(), retry_in: Some(Duration::MAX) },
        Ending::Snoozed { delay: Duration::MAX },
        Ending::Interrupted(how),
    ] {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        fixture.must_finish(&claimed, ending).await;
        assert!(fixture.job(id).await.run_at > start() + DAY);
        fixture.cancel(id).await.expect("cancel");
    }
}

async fn a_reason_with_a_nul_byte_does_not_stop_the_settle(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, Ending::Cancelled { reason: Some("why\0not".into()) }).await;
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Cancelled);
}

// ---- batches -----------------------------------------------------------------

async fn settle_results_are_returned_per_item(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let crashing = fixture.worker().await;
    for _ in 0..2 {
        fixture.enqueue_kind("stale").await;
    }
    let stale = fixture.claim(crashing, 2).await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, 2);
    for _ in 0..endings().len() {
        fixture.enqueue_kind("live").await;
    }
    let live = fixture.claim(worker, 20).await;
    assert_eq!(live.len(), endings().len());
    fixture.cancel(live[1].lease().id).await.expect("cancel");
    let mut reports = vec![report(&stale[0], done())];
    reports.extend(live.iter().zip(endings()).map(|(claimed, ending)| report(claimed, ending)));
    reports.push(report(&stale[1], failed()));
    let results = fixture.settle(reports).await.expect("settle");
    let mut expected = vec![Fenced::Held; endings().len() + 2];
    expected[0] = Fenced::LeaseLost;
    expected[endings().len() + 1] = Fenced::LeaseLost;
    assert_eq!(results, expected);
    let mut statuses = Vec::new();
    for claimed in &live {
        statuses.push(fixture.status(claimed.lease().id).await);
    }
    use Status::*;
    // The second job was cancelled while it ran, so its failure ends it as cancelled.
    assert_eq!(statuses, [Succeeded, Cancelled, FailedPermanent, Cancelled, Queued, Queued, Retrying]);
}

async fn an_empty_batch_is_accepted(fixture: Fixture) {
    assert_eq!(fixture.settle(Vec::new()).await.expect("settle"), []);
    assert_eq!(fixture.store().settle(&[]).await.expect("settle"), []);
}

async fn a_lease_settled_twice_in_one_batch_ends_once(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let reports = vec![report(&claimed, done()), report(&claimed, done())];
    let results = fixture.settle(reports).await.expect("settle");
    assert!(results.contains(&Fenced::Held), "{results:?}");
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Succeeded);
    assert_eq!(fixture.count(Status::Succeeded).await, 1);
}

async fn a_large_batch_of_successes_is_stored(fixture: Fixture) {
    fixture.enqueue_many((0..1500).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let worker = fixture.worker().await;
    let mut claimed = Vec::new();
    while claimed.len() < 1500 {
        claimed.extend(fixture.claim(worker, 1000).await);
    }
    let endings = [done(), done_without_result()].into_iter().cycle();
    let reports = claimed.iter().zip(endings).map(|(job, ending)| report(job, ending)).collect();
    let results = fixture.settle(reports).await.expect("settle");
    assert!(results.iter().all(|result| *result == Fenced::Held));
    assert_eq!(fixture.count(Status::Succeeded).await, 1500);
}

async fn results_and_errors_of_a_batch_stay_with_their_jobs(fixture: Fixture) {
    fixture.enqueue_many((0..12).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 12).await;
    let reports = claimed
        .iter()
        .enumerate()
        .map(|(n, job)| {
            let ending = match n % 3 {
                0 => Ending::Succeeded { result: Some(raw(job.payload())) },
                1 => Ending::Failed { error: job.payload().into(), retry_in: None },
                _ => Ending::Failed { error: job.payload().into(), retry_in: Some((n as u32 + 1) * SECOND) },
            };
            report(job, ending)
        })
        .collect();
    fixture.settle(reports).await.expect("settle");
    for (n, claimed) in claimed.iter().enumerate() {
        let job = fixture.job(claimed.lease().id).await;
        let stored = job.last_error.or(job.result.map(|result| result.get().to_owned()));
        assert_eq!(stored.as_deref(), Some(claimed.payload()));
        if n % 3 == 2 {
            assert_eq!(job.run_at, start() + (n as u32 + 1) * SECOND);
        }
    }
}

// ---- flags -------------------------------------------------------------------

async fn a_settle_decided_without_a_raised_flag_returns_flagged(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    let flags = LeaseFlags { cancel_requested: true, superseded: false };
    let endings =
        [failed(), failed_permanently(), observed_cancel(), snoozed(), Ending::Released, interrupted()];
    for ending in endings.into_iter().chain([observed_cancel_without_reason()]) {
        let outdated = settlement(claimed.lease(), 1, ending.clone(), Some(LeaseFlags::default()));
        let settled = fixture.store().settle(&[outdated]).await.expect("settle");
        assert_eq!(settled, [Settled::Flagged(flags)], "{ending:?}");
    }
    assert!(matches!(fixture.state(claimed.lease().id).await, State::Running(_)));
}

async fn a_success_is_stored_regardless_of_flags(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    let outdated = settlement(claimed.lease(), 1, done(), None);
    assert_eq!(fixture.store().settle(&[outdated]).await.expect("settle"), [Settled::Stored]);
    assert_eq!(fixture.status(claimed.lease().id).await, Status::Succeeded);
}

async fn a_follow_up_of_a_settle_that_returns_flagged_is_not_stored(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    let follow_up = job("follow").validate().expect("valid");
    let id = follow_up.id();
    let outdated = Settlement {
        follow_ups: vec![follow_up],
        ..settlement(claimed.lease(), 1, failed(), Some(LeaseFlags::default()))
    };
    let settled = fixture.store().settle(&[outdated]).await.expect("settle");
    assert!(matches!(settled[..], [Settled::Flagged(_)]), "{settled:?}");
    assert!(fixture.store().get(id).await.expect("get").is_none());
}

async fn a_wait_of_a_settle_that_returns_flagged_is_not_stored(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    let waits = vec![PendingWait { step: "reply".into(), until: None, events: vec!["replied".into()] }];
    let suspended = Ending::Suspended { waits: waits.clone() };
    let outdated =
        Settlement { waits, ..settlement(claimed.lease(), 1, suspended, Some(LeaseFlags::default())) };
    let settled = fixture.store().settle(&[outdated]).await.expect("settle");
    assert!(matches!(settled[..], [Settled::Flagged(_)]), "{settled:?}");
    assert!(fixture.steps(claimed.lease().id).await.expect("steps").is_empty());
    assert_eq!(fixture.query_number("select count(*) from waits", None).await, 0);
}

async fn a_repeated_settle_by_another_worker_is_refused(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.must_finish(&claimed, done()).await;
    let worker = WorkerId::new();
    let other = settlement(held_by(claimed.lease(), worker), 1, done(), None);
    assert_eq!(fixture.store().settle(&[other]).await.expect("settle"), [Settled::LeaseLost]);
}
