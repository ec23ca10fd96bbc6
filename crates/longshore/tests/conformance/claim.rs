//! Who gets which job: order, filters, and workers that may not have any.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Instant;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Suspects};
use longshore::{Ending, NewJob, Status, WorkerId};

use crate::fixture::*;

cases! {
    higher_priority_comes_first_across_queues,
    within_a_priority_the_earliest_due_comes_first,
    jobs_due_at_the_same_instant_come_in_the_order_of_their_ids,
    the_order_across_queues_of_one_priority_is_by_time,
    a_future_job_of_a_higher_priority_is_passed_over,
    a_foreign_kind_of_a_higher_priority_is_passed_over,
    a_job_is_due_at_its_very_instant,
    a_claim_brings_no_more_than_asked_and_says_that_there_are_more,
    a_claim_of_none_gets_none,
    an_empty_queue_gives_nothing_and_no_promise_of_more,
    a_claimed_job_is_not_claimed_again,
    a_claim_shows_who_holds_the_lease_since_when,
    attempt_and_lease_number_rise_with_every_claim,
    kinds_without_a_handler_are_left_alone,
    a_worker_without_handlers_gets_nothing,
    a_worker_without_queues_gets_nothing,
    a_queue_named_twice_counts_once,
    accepted_flags_bring_jobs_with_one_of_them_only,
    forbidden_flags_keep_jobs_with_any_of_them_away,
    a_flag_both_accepted_and_forbidden_is_forbidden,
    flags_match_whole_and_exactly,
    a_paused_queue_is_left_alone_until_resumed,
    a_pause_binds_a_claimer_that_has_begun,
    a_pause_binds_a_claimer_of_many_priorities_that_has_begun,
    a_pause_lets_running_jobs_go_on,
    an_unknown_worker_gets_nothing,
    a_worker_declared_dead_gets_nothing,
    a_dead_worker_with_a_warm_cursor_gets_nothing,
    a_retired_worker_gets_nothing,
    at_most_one_suspect_is_among_the_claimed,
    at_most_one_suspect_comes_from_all_queues_together,
    the_suspect_takes_its_place_in_the_order,
    a_process_that_runs_a_suspect_leaves_the_others,
    suspects_are_claimed_one_by_one_when_nothing_else_waits,
    suspects_obey_the_same_filters,
    a_suspect_that_is_not_due_waits,
    a_claim_of_one_is_one_even_with_a_suspect_due,
    a_claim_whose_caller_went_away_leaves_nothing_running,
    a_claim_given_up_after_its_answer_came_leaves_nothing_running,
}

// ---- order -------------------------------------------------------------------

async fn higher_priority_comes_first_across_queues(fixture: Fixture) {
    for (kind, queue, priority) in
        [("a", "red", 1), ("b", "blue", 9), ("c", "red", 5), ("d", "green", -3), ("e", "blue", 0)]
    {
        fixture.add(job(kind).queue(queue).priority(priority)).await;
    }
    let worker = fixture.worker().await;
    let queues = ["red", "green", "blue"].map(String::from).to_vec();
    let claimed = fixture.claim_as(&ClaimRequest { queues, ..ClaimRequest::new(worker, 9) }).await;
    assert_eq!(kinds(&claimed), ["b", "c", "a", "e", "d"]);
}

async fn within_a_priority_the_earliest_due_comes_first(fixture: Fixture) {
    for (kind, minutes) in [("third", 10), ("first", 30), ("second", 20), ("fourth", 0)] {
        fixture.add(job(kind).run_at(start() - minutes * MINUTE)).await;
    }
    let worker = fixture.worker().await;
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["first", "second", "third", "fourth"]);
}

async fn jobs_due_at_the_same_instant_come_in_the_order_of_their_ids(fixture: Fixture) {
    let mut expected = Vec::new();
    for _ in 0..6 {
        expected.push(fixture.enqueue_kind("mail").await);
    }
    expected.sort();
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 9).await), expected);
}

async fn the_order_across_queues_of_one_priority_is_by_time(fixture: Fixture) {
    for (kind, queue, seconds) in [("third", "red", 10), ("first", "blue", 30), ("second", "red", 20)] {
        fixture.add(job(kind).queue(queue).priority(2).run_at(start() - seconds * SECOND)).await;
    }
    let worker = fixture.worker().await;
    let queues = vec!["red".into(), "blue".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(worker, 1) };
    for expected in ["first", "second", "third"] {
        assert_eq!(kinds(&fixture.claim_as(&request).await), [expected]);
    }
}

async fn a_future_job_of_a_higher_priority_is_passed_over(fixture: Fixture) {
    fixture.add(job("tomorrow").priority(100).delay(DAY)).await;
    fixture.add(job("today").priority(1)).await;
    let worker = fixture.worker().await;
    // One at a time: what cannot be claimed must not take the place of what can.
    assert_eq!(kinds(&fixture.claim(worker, 1).await), ["today"]);
}

async fn a_foreign_kind_of_a_higher_priority_is_passed_over(fixture: Fixture) {
    fixture.add(job("foreign").priority(100)).await;
    fixture.add(job("flagged").priority(50).flags(["gpu"])).await;
    fixture.add(job("own").priority(1)).await;
    let (kinds_handled, forbid_flags) = (labels(["own", "flagged"]), labels(["gpu"]));
    let request = ClaimRequest {
        kinds: Some(kinds_handled),
        forbid_flags,
        ..ClaimRequest::new(fixture.worker().await, 1)
    };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["own"]);
}

async fn a_job_is_due_at_its_very_instant(fixture: Fixture) {
    fixture.add(job("mail").run_at(start() + MINUTE)).await;
    let worker = fixture.worker_with(HOUR).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 0);
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
}

// ---- how many ----------------------------------------------------------------

async fn a_claim_brings_no_more_than_asked_and_says_that_there_are_more(fixture: Fixture) {
    for _ in 0..5 {
        fixture.enqueue_kind("mail").await;
    }
    let request = ClaimRequest::new(fixture.worker().await, 3);
    let mut cursor = ClaimCursor::default();
    let first = fixture.store().claim(&request, &mut cursor).await.expect("claim");
    assert_eq!((first.jobs.len(), first.more), (3, true));
    let second = fixture.store().claim(&request, &mut cursor).await.expect("claim");
    assert_eq!((second.jobs.len(), second.more), (2, false));
}

async fn a_claim_of_none_gets_none(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 0).await.len(), 0);
    assert_eq!(fixture.counted(Status::Running).await, 0);
}

async fn an_empty_queue_gives_nothing_and_no_promise_of_more(fixture: Fixture) {
    let request = ClaimRequest::new(fixture.worker().await, 3);
    let claims = fixture.store().claim(&request, &mut ClaimCursor::default()).await.expect("claim");
    assert_eq!((claims.jobs.len(), claims.more), (0, false));
}

async fn a_claimed_job_is_not_claimed_again(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let (first, second) = (fixture.worker().await, fixture.worker().await);
    assert_eq!(fixture.claim(first, 9).await.len(), 1);
    assert_eq!(fixture.claim(first, 9).await.len(), 0);
    assert_eq!(fixture.claim(second, 9).await.len(), 0);
}

async fn a_claim_shows_who_holds_the_lease_since_when(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    fixture.advance(MINUTE).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    assert_eq!((claimed.attempt(), claimed.lease().lease_no, claimed.lease().worker), (1, 1, worker));
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.lease_no), (Status::Running, 1, 1));
    assert_eq!((job.locked_by, job.locked_at), (Some(worker), Some(start() + MINUTE)));
    assert_eq!((job.started_at, job.finished_at), (Some(start() + MINUTE), None));
}

async fn attempt_and_lease_number_rise_with_every_claim(fixture: Fixture) {
    let id = fixture.add(job("mail").max_attempts(9)).await;
    let worker = fixture.worker_with(HOUR).await;
    // A snooze gives the attempt back, never the lease number.
    for (lease_no, attempt, ending) in [(1, 1, failed()), (2, 2, snoozed()), (3, 2, failed()), (4, 3, done())]
    {
        let claimed = fixture.claim_one(worker).await;
        assert_eq!((claimed.lease().lease_no, claimed.attempt()), (lease_no, attempt));
        fixture.must_finish(&claimed, ending).await;
        fixture.advance(MINUTE).await;
    }
    assert_eq!(fixture.job(id).await.attempts, 3);
}

// ---- filters -----------------------------------------------------------------

async fn kinds_without_a_handler_are_left_alone(fixture: Fixture) {
    for kind in ["mail", "sms", "fax", "mail"] {
        fixture.enqueue_kind(kind).await;
    }
    let handled = vec!["mail".into(), "telex".into(), "fax".into()];
    let request = ClaimRequest { kinds: Some(handled), ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["mail", "fax", "mail"]);
    assert_eq!(fixture.counted(Status::Queued).await, 1);
}

async fn a_worker_without_handlers_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let request = ClaimRequest { kinds: Some(Vec::new()), ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(fixture.claim_as(&request).await.len(), 0);
}

async fn a_worker_without_queues_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let request = ClaimRequest { queues: Vec::new(), ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(fixture.claim_as(&request).await.len(), 0);
}

async fn a_queue_named_twice_counts_once(fixture: Fixture) {
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    let queues = vec!["default".into(), "default".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(fixture.claim_as(&request).await.len(), 3);
}

async fn flagged(fixture: &Fixture) {
    fixture.enqueue_kind("plain").await;
    for (kind, flags) in [("gpu", vec!["gpu"]), ("eu", vec!["eu"]), ("both", vec!["eu", "gpu"])] {
        fixture.add(job(kind).flags(flags)).await;
    }
}

fn labels<const N: usize>(labels: [&str; N]) -> Vec<String> {
    labels.map(String::from).to_vec()
}

async fn accepted_flags_bring_jobs_with_one_of_them_only(fixture: Fixture) {
    flagged(&fixture).await;
    let accept_flags = labels(["gpu", "tpu"]);
    let request = ClaimRequest { accept_flags, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["gpu", "both"]);
}

async fn forbidden_flags_keep_jobs_with_any_of_them_away(fixture: Fixture) {
    flagged(&fixture).await;
    let forbid_flags = labels(["gpu", "tpu"]);
    let request = ClaimRequest { forbid_flags, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["plain", "eu"]);
}

async fn a_flag_both_accepted_and_forbidden_is_forbidden(fixture: Fixture) {
    flagged(&fixture).await;
    let (accept_flags, forbid_flags) = (labels(["gpu"]), labels(["eu"]));
    let request = ClaimRequest { accept_flags, forbid_flags, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["gpu"]);
}

async fn flags_match_whole_and_exactly(fixture: Fixture) {
    fixture.add(job("mail").flags(["gpu-large", "x\"gpu\"y"])).await;
    let worker = fixture.worker().await;
    let accepting = ClaimRequest { accept_flags: labels(["gpu"]), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_as(&accepting).await.len(), 0);
    let forbidding = ClaimRequest { forbid_flags: labels(["gpu", "large"]), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_as(&forbidding).await.len(), 1);
}

async fn a_paused_queue_is_left_alone_until_resumed(fixture: Fixture) {
    fixture.add(job("mail").queue("letters")).await;
    fixture.add(job("sms").queue("phones")).await;
    fixture.pause("letters").await.expect("pause");
    let queues = labels(["letters", "phones"]);
    let request = ClaimRequest { queues, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["sms"]);
    fixture.resume("letters").await.expect("resume");
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["mail"]);
}

async fn pause_a_claimer_that_has_begun(fixture: &Fixture, priorities: [i64; 4]) {
    for priority in priorities {
        fixture.add(job("mail").priority(priority)).await;
    }
    let request = ClaimRequest::new(fixture.worker().await, 1);
    let mut cursor = ClaimCursor::default();
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 1);
    fixture.pause("default").await.expect("pause");
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 0);
}

async fn a_pause_binds_a_claimer_that_has_begun(fixture: Fixture) {
    pause_a_claimer_that_has_begun(&fixture, [0; 4]).await;
}

async fn a_pause_binds_a_claimer_of_many_priorities_that_has_begun(fixture: Fixture) {
    pause_a_claimer_that_has_begun(&fixture, [3, 2, 2, 1]).await;
}

async fn a_pause_lets_running_jobs_go_on(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.pause("default").await.expect("pause");
    fixture.must_finish(&claimed, done()).await;
}

// ---- workers that may not ----------------------------------------------------

async fn an_unknown_worker_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    assert_eq!(fixture.claim(WorkerId::new(), 9).await.len(), 0);
    assert_eq!(fixture.counted(Status::Queued).await, 1);
}

async fn a_worker_declared_dead_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    // A lease keeps the dead worker's row; without one it would be unknown.
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    fixture.enqueue_kind("sms").await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.store().mark_dead(None).await.expect("mark_dead"), [worker]);
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    // Nor from several places at once, which an engine may treat apart.
    fixture.add(job("urgent").priority(3)).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

async fn a_dead_worker_with_a_warm_cursor_gets_nothing(fixture: Fixture) {
    for _ in 0..4 {
        fixture.enqueue_kind("mail").await;
    }
    let worker = fixture.worker().await;
    let (request, mut cursor) = (ClaimRequest::new(worker, 1), ClaimCursor::default());
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 1);
    fixture.advance(61 * SECOND).await;
    fixture.store().mark_dead(None).await.expect("mark_dead");
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 0);
}

async fn a_retired_worker_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    fixture.store().retire(worker).await.expect("retire");
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

// ---- suspects ----------------------------------------------------------------

/// Three suspects between two innocents, all due.
async fn suspects(fixture: &Fixture) {
    let first_worker = fixture.worker().await;
    for kind in ["suspect 1", "suspect 2", "suspect 3"] {
        fixture.add(NewJob::new(kind, &1).run_at(start() - HOUR)).await;
    }
    assert_eq!(fixture.claim(first_worker, 3).await.len(), 3);
    assert_eq!(fixture.crash_all_workers().await.recovered, 3);
    fixture.add(job("early innocent").run_at(start() - DAY)).await;
    fixture.advance(SECOND).await;
    fixture.add(job("late innocent")).await;
}

async fn at_most_one_suspect_is_among_the_claimed(fixture: Fixture) {
    suspects(&fixture).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 9).await;
    let suspicious = claimed.iter().filter(|job| job.interruptions() > 0).count();
    assert_eq!((claimed.len(), suspicious), (3, 1), "{claimed:?}");
}

async fn at_most_one_suspect_comes_from_all_queues_together(fixture: Fixture) {
    let mortal = fixture.worker().await;
    let queues = labels(["red", "blue", "green"]);
    for queue in &queues {
        fixture.add(job("suspect").queue(queue.as_str())).await;
    }
    let request = ClaimRequest { queues: queues.clone(), ..ClaimRequest::new(mortal, 9) };
    assert_eq!(fixture.claim_as(&request).await.len(), 3);
    assert_eq!(fixture.crash_all_workers().await.recovered, 3);
    let request = ClaimRequest { queues, ..ClaimRequest::new(fixture.worker().await, 9) };
    for _ in 0..3 {
        assert_eq!(fixture.claim_as(&request).await.len(), 1);
    }
}

async fn the_suspect_takes_its_place_in_the_order(fixture: Fixture) {
    suspects(&fixture).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 9).await;
    assert_eq!(kinds(&claimed), ["early innocent", "suspect 1", "late innocent"]);
}

async fn a_process_that_runs_a_suspect_leaves_the_others(fixture: Fixture) {
    suspects(&fixture).await;
    let worker = fixture.worker().await;
    let request = ClaimRequest { suspects: Suspects::Leave, ..ClaimRequest::new(worker, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["early innocent", "late innocent"]);
    assert_eq!(fixture.counted(Status::Retrying).await, 3);
}

async fn suspects_are_claimed_one_by_one_when_nothing_else_waits(fixture: Fixture) {
    suspects(&fixture).await;
    let worker = fixture.worker().await;
    fixture.claim(worker, 9).await;
    for expected in ["suspect 2", "suspect 3"] {
        assert_eq!(kinds(&fixture.claim(worker, 9).await), [expected]);
    }
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

async fn suspects_obey_the_same_filters(fixture: Fixture) {
    suspects(&fixture).await;
    let worker = fixture.worker().await;
    let request = ClaimRequest { kinds: Some(labels(["suspect 3"])), ..ClaimRequest::new(worker, 9) };
    assert_eq!(kinds(&fixture.claim_as(&request).await), ["suspect 3"]);
    fixture.pause("default").await.expect("pause");
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

async fn a_suspect_that_is_not_due_waits(fixture: Fixture) {
    fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    // The default recovery delay is five seconds.
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.advance(5 * SECOND).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

async fn a_claim_of_one_is_one_even_with_a_suspect_due(fixture: Fixture) {
    suspects(&fixture).await;
    let worker = fixture.worker().await;
    for expected in ["early innocent", "suspect 1", "suspect 2", "suspect 3", "late innocent"] {
        assert_eq!(kinds(&fixture.claim(worker, 1).await), [expected]);
    }
}

// ---- claims nobody waits for ---------------------------------------------------

/// Polls up to `times`, then gives up; what it was waiting for may still come.
async fn polled<T>(work: impl Future<Output = T>, times: usize) -> Option<T> {
    let mut work = std::pin::pin!(work);
    let mut left = times;
    std::future::poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending if left <= 1 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

async fn a_claim_whose_caller_went_away_leaves_nothing_running(fixture: Fixture) {
    const JOBS: usize = 24;
    fixture.enqueue_many((0..JOBS).map(|n| NewJob::new("mail", &n).timeout(None))).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    let mut held = Vec::new();
    for times in (1..=6).cycle().take(24) {
        let claim = fixture.claim(worker, 2);
        held.extend(polled(claim, times).await.into_iter().flatten());
    }
    // What was given up comes back by itself, uncharged.
    let began = Instant::now();
    while held.len() < JOBS {
        assert!(began.elapsed() < 8 * SECOND, "leases that nobody knows of are still live");
        tokio::time::sleep(SECOND / 100).await;
        held.extend(fixture.claim(worker, 99).await);
    }
    assert!(held.iter().all(|job| job.attempt() == 1 && job.interruptions() == 0), "{held:?}");
    let live: BTreeSet<_> = fixture.store().leases(worker).await.expect("leases").into_iter().collect();
    assert_eq!(held.iter().map(Claimed::lease).collect::<BTreeSet<_>>(), live);
}

/// The answer has come, but whoever asked stops before looking at it.
async fn a_claim_given_up_after_its_answer_came_leaves_nothing_running(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker_with(DAY).await;
    let began = Instant::now();
    let in_time = || assert!(began.elapsed() < 20 * SECOND, "the claim is neither stored nor given back");
    'again: loop {
        let mut claim = Box::pin(fixture.claim(worker, 1));
        while fixture.counted(Status::Running).await == 0 {
            in_time();
            let look = poll_fn(|context| Poll::Ready(claim.as_mut().poll(context)));
            if let Poll::Ready(jobs) = look.await {
                // It was seen after all.
                fixture.must_finish(&jobs[0], Ending::Released).await;
                continue 'again;
            }
            tokio::time::sleep(SECOND / 100).await;
        }
        break;
    }
    while fixture.counted(Status::Running).await != 0 {
        in_time();
        tokio::time::sleep(SECOND / 100).await;
    }
    assert_eq!(fixture.claim_one(worker).await.attempt(), 1);
}
