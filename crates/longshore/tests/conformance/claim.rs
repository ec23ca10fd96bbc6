//! Claim: the order of jobs, limits, filters, suspects, workers that may not claim,
//! and claims whose caller goes away. `cursor.rs` tests the claim cursor.

use std::collections::BTreeSet;
use std::future::{Future, poll_fn};
use std::task::Poll;
use std::time::Instant;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Suspects};
use longshore::{Ending, NewJob, Status, SweepScope, WorkerId};

use crate::fixture::*;

cases! {
    higher_priority_comes_first_across_queues,
    within_a_priority_the_earliest_due_comes_first,
    jobs_due_at_the_same_instant_are_claimed_in_id_order,
    jobs_of_one_priority_are_claimed_by_due_time_across_queues,
    a_future_job_of_higher_priority_is_skipped,
    an_unhandled_kind_of_higher_priority_is_skipped,
    a_claim_takes_nothing_below_its_minimum_priority,
    a_suspect_below_the_minimum_priority_is_not_claimed,
    a_job_is_due_exactly_at_its_run_at,
    a_claim_respects_its_limit_and_reports_that_more_jobs_are_due,
    a_claim_with_limit_zero_returns_nothing,
    a_claim_from_an_empty_queue_returns_nothing_and_reports_no_more,
    a_claimed_job_is_not_claimed_again,
    a_claimed_job_shows_its_worker_and_claim_time,
    every_claim_raises_the_lease_number_and_a_snooze_refunds_the_attempt,
    kinds_without_a_handler_are_not_claimed,
    a_worker_without_handlers_gets_nothing,
    a_worker_without_queues_gets_nothing,
    a_queue_named_twice_counts_once,
    accept_flags_select_only_jobs_with_one_of_them,
    forbid_flags_exclude_jobs_with_any_of_them,
    a_job_with_an_accepted_and_a_forbidden_flag_is_excluded,
    flags_match_only_as_whole_strings,
    a_paused_queue_is_not_claimed_from_until_resumed,
    a_pause_applies_to_a_claimer_with_a_warm_cursor,
    a_pause_applies_to_a_warm_cursor_over_several_priorities,
    a_pause_does_not_stop_running_jobs,
    an_unknown_worker_gets_nothing,
    a_worker_declared_dead_gets_nothing,
    a_dead_worker_with_a_warm_cursor_gets_nothing,
    a_retired_worker_gets_nothing,
    a_claim_contains_at_most_one_suspect,
    a_claim_from_several_queues_contains_at_most_one_suspect,
    a_suspect_is_claimed_in_its_normal_order,
    a_process_that_runs_a_suspect_claims_no_other_suspect,
    suspects_are_claimed_one_at_a_time_when_nothing_else_waits,
    suspects_are_filtered_like_other_jobs,
    a_suspect_that_is_not_due_is_not_claimed,
    a_claim_of_one_returns_one_job_even_if_a_suspect_is_due,
    a_claim_dropped_by_its_caller_leaves_nothing_running,
    a_claim_dropped_after_its_reply_arrived_leaves_nothing_running,
}

cases! {
    only on postgres:
    a_claim_reads_only_its_own_jobs_although_the_planner_knows_empty_tables,
}

// ---- order -------------------------------------------------------------------

async fn higher_priority_comes_first_across_queues(fixture: Fixture) {
    for (kind, queue, priority) in
        [("a", "red", 1), ("b", "blue", 9), ("c", "red", 5), ("d", "green", -3), ("e", "blue", 0)]
    {
        fixture.add(job(kind).queue(queue).priority(priority)).await;
    }
    let worker = fixture.worker().await;
    let queues = labels(["red", "green", "blue"]);
    let claimed = fixture.claim_with(&ClaimRequest { queues, ..ClaimRequest::new(worker, 9) }).await;
    assert_eq!(kinds(&claimed), ["b", "c", "a", "e", "d"]);
}

async fn within_a_priority_the_earliest_due_comes_first(fixture: Fixture) {
    for (kind, minutes) in [("third", 10), ("first", 30), ("second", 20), ("fourth", 0)] {
        fixture.add(job(kind).run_at(start() - minutes * MINUTE)).await;
    }
    let worker = fixture.worker().await;
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["first", "second", "third", "fourth"]);
}

async fn jobs_due_at_the_same_instant_are_claimed_in_id_order(fixture: Fixture) {
    let mut expected = Vec::new();
    for _ in 0..6 {
        expected.push(fixture.enqueue_kind("mail").await);
    }
    expected.sort();
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 9).await), expected);
}

async fn jobs_of_one_priority_are_claimed_by_due_time_across_queues(fixture: Fixture) {
    for (kind, queue, seconds) in [("third", "red", 10), ("first", "blue", 30), ("second", "red", 20)] {
        fixture.add(job(kind).queue(queue).priority(2).run_at(start() - seconds * SECOND)).await;
    }
    let worker = fixture.worker().await;
    let queues = vec!["red".into(), "blue".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(worker, 1) };
    for expected in ["first", "second", "third"] {
        assert_eq!(kinds(&fixture.claim_with(&request).await), [expected]);
    }
}

async fn a_future_job_of_higher_priority_is_skipped(fixture: Fixture) {
    fixture.add(job("tomorrow").priority(100).delay(DAY)).await;
    fixture.add(job("today").priority(1)).await;
    let worker = fixture.worker().await;
    // With a limit of one, a job that cannot be claimed would use up the limit.
    assert_eq!(kinds(&fixture.claim(worker, 1).await), ["today"]);
}

async fn an_unhandled_kind_of_higher_priority_is_skipped(fixture: Fixture) {
    fixture.add(job("unhandled").priority(100)).await;
    fixture.add(job("flagged").priority(50).flags(["gpu"])).await;
    fixture.add(job("own").priority(1)).await;
    let (handled, forbid_flags) = (labels(["own", "flagged"]), labels(["gpu"]));
    let request =
        ClaimRequest { kinds: Some(handled), forbid_flags, ..ClaimRequest::new(fixture.worker().await, 1) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["own"]);
}

async fn a_claim_takes_nothing_below_its_minimum_priority(fixture: Fixture) {
    for (kind, priority) in [("low", -7), ("same", 5), ("above", 6), ("high", 30)] {
        fixture.add(job(kind).queue(if priority > 0 { "red" } else { "blue" }).priority(priority)).await;
    }
    let worker = fixture.worker_with(DAY).await;
    let queues = vec!["red".into(), "blue".into()];
    let above = ClaimRequest { queues, min_priority: Some(6), ..ClaimRequest::new(worker, 9) };
    let mut cursor = ClaimCursor::default();
    let claims = claim_at(&fixture, &above, &mut cursor).await;
    assert_eq!(kinds(&claims), ["high", "above"]);
    // The same cursor, with and without the minimum.
    assert_eq!(kinds(&claim_at(&fixture, &above, &mut cursor).await), [""; 0]);
    let any = ClaimRequest { min_priority: None, ..above.clone() };
    assert_eq!(kinds(&claim_at(&fixture, &any, &mut cursor).await), ["same", "low"]);
}

async fn claim_at(fixture: &Fixture, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Vec<Claimed> {
    fixture.store().claim(request, cursor).await.expect("claim").jobs
}

async fn a_suspect_below_the_minimum_priority_is_not_claimed(fixture: Fixture) {
    fixture.suspect(job("suspect").priority(5)).await;
    let worker = fixture.worker_with(DAY).await;
    let request = ClaimRequest { min_priority: Some(6), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&request).await.len(), 0);
    let request = ClaimRequest { min_priority: Some(5), ..request };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["suspect"]);
}

async fn a_job_is_due_exactly_at_its_run_at(fixture: Fixture) {
    fixture.add(job("mail").run_at(start() + MINUTE)).await;
    let worker = fixture.worker_with(HOUR).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 0);
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
}

// ---- limit -------------------------------------------------------------------

async fn a_claim_respects_its_limit_and_reports_that_more_jobs_are_due(fixture: Fixture) {
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

async fn a_claim_with_limit_zero_returns_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 0).await.len(), 0);
    assert_eq!(fixture.count(Status::Running).await, 0);
}

async fn a_claim_from_an_empty_queue_returns_nothing_and_reports_no_more(fixture: Fixture) {
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

async fn a_claimed_job_shows_its_worker_and_claim_time(fixture: Fixture) {
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

async fn every_claim_raises_the_lease_number_and_a_snooze_refunds_the_attempt(fixture: Fixture) {
    let id = fixture.add(job("mail").max_attempts(9)).await;
    let worker = fixture.worker_with(HOUR).await;
    // A snooze refunds the attempt, never the lease number.
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

async fn kinds_without_a_handler_are_not_claimed(fixture: Fixture) {
    for kind in ["mail", "sms", "fax", "mail"] {
        fixture.enqueue_kind(kind).await;
    }
    let handled = vec!["mail".into(), "telex".into(), "fax".into()];
    let request = ClaimRequest { kinds: Some(handled), ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["mail", "fax", "mail"]);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn a_worker_without_handlers_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let request = ClaimRequest { kinds: Some(Vec::new()), ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(fixture.claim_with(&request).await.len(), 0);
}

async fn a_worker_without_queues_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let request = ClaimRequest { queues: Vec::new(), ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(fixture.claim_with(&request).await.len(), 0);
}

async fn a_queue_named_twice_counts_once(fixture: Fixture) {
    for _ in 0..3 {
        fixture.enqueue_kind("mail").await;
    }
    let queues = vec!["default".into(), "default".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(fixture.claim_with(&request).await.len(), 3);
}

async fn enqueue_flagged(fixture: &Fixture) {
    fixture.enqueue_kind("plain").await;
    for (kind, flags) in [("gpu", vec!["gpu"]), ("eu", vec!["eu"]), ("both", vec!["eu", "gpu"])] {
        fixture.add(job(kind).flags(flags)).await;
    }
}

fn labels<T: From<&'static str>, const N: usize>(labels: [&'static str; N]) -> Vec<T> {
    labels.into_iter().map(T::from).collect()
}

async fn accept_flags_select_only_jobs_with_one_of_them(fixture: Fixture) {
    enqueue_flagged(&fixture).await;
    let accept_flags = labels(["gpu", "tpu"]);
    let request = ClaimRequest { accept_flags, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["gpu", "both"]);
}

async fn forbid_flags_exclude_jobs_with_any_of_them(fixture: Fixture) {
    enqueue_flagged(&fixture).await;
    let forbid_flags = labels(["gpu", "tpu"]);
    let request = ClaimRequest { forbid_flags, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["plain", "eu"]);
}

async fn a_job_with_an_accepted_and_a_forbidden_flag_is_excluded(fixture: Fixture) {
    enqueue_flagged(&fixture).await;
    let (accept_flags, forbid_flags) = (labels(["gpu"]), labels(["eu"]));
    let request = ClaimRequest { accept_flags, forbid_flags, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["gpu"]);
}

async fn flags_match_only_as_whole_strings(fixture: Fixture) {
    fixture.add(job("mail").flags(["gpu-large", "x\"gpu\"y"])).await;
    let worker = fixture.worker().await;
    let accepting = ClaimRequest { accept_flags: labels(["gpu"]), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&accepting).await.len(), 0);
    let forbidding = ClaimRequest { forbid_flags: labels(["gpu", "large"]), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&forbidding).await.len(), 1);
}

async fn a_paused_queue_is_not_claimed_from_until_resumed(fixture: Fixture) {
    fixture.add(job("mail").queue("letters")).await;
    fixture.add(job("sms").queue("phones")).await;
    fixture.pause("letters").await.expect("pause");
    let queues = labels(["letters", "phones"]);
    let request = ClaimRequest { queues, ..ClaimRequest::new(fixture.worker().await, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["sms"]);
    fixture.resume("letters").await.expect("resume");
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["mail"]);
}

async fn assert_pause_stops_a_warm_cursor(fixture: &Fixture, priorities: [i64; 4]) {
    for priority in priorities {
        fixture.add(job("mail").priority(priority)).await;
    }
    let request = ClaimRequest::new(fixture.worker().await, 1);
    let mut cursor = ClaimCursor::default();
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 1);
    fixture.pause("default").await.expect("pause");
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 0);
}

async fn a_pause_applies_to_a_claimer_with_a_warm_cursor(fixture: Fixture) {
    assert_pause_stops_a_warm_cursor(&fixture, [0; 4]).await;
}

async fn a_pause_applies_to_a_warm_cursor_over_several_priorities(fixture: Fixture) {
    assert_pause_stops_a_warm_cursor(&fixture, [3, 2, 2, 1]).await;
}

async fn a_pause_does_not_stop_running_jobs(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    fixture.pause("default").await.expect("pause");
    fixture.must_finish(&claimed, done()).await;
}

// ---- workers that may not claim ----------------------------------------------

async fn an_unknown_worker_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    assert_eq!(fixture.claim(WorkerId::new(), 9).await.len(), 0);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn a_worker_declared_dead_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    // A lease keeps the dead worker's row; without one it would be unknown.
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    fixture.enqueue_kind("sms").await;
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead"), [worker]);
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    // Also with jobs of several priorities, for which an engine may use another statement.
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
    fixture.store().mark_dead(&SweepScope::default()).await.expect("mark_dead");
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 0);
}

async fn a_retired_worker_gets_nothing(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    fixture.store().retire(worker).await.expect("retire");
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

// ---- suspects ----------------------------------------------------------------

/// Enqueues three suspects between two jobs that were never interrupted, all due.
async fn enqueue_suspects(fixture: &Fixture) {
    let first_worker = fixture.worker().await;
    for kind in ["suspect 1", "suspect 2", "suspect 3"] {
        fixture.add(NewJob::new(kind, &1).run_at(start() - HOUR)).await;
    }
    assert_eq!(fixture.claim(first_worker, 3).await.len(), 3);
    assert_eq!(fixture.crash_all_workers().await.recovered, 3);
    fixture.add(job("early").run_at(start() - DAY)).await;
    fixture.advance(SECOND).await;
    fixture.add(job("late")).await;
}

async fn a_claim_contains_at_most_one_suspect(fixture: Fixture) {
    enqueue_suspects(&fixture).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 9).await;
    let suspects = claimed.iter().filter(|job| job.interruptions() > 0).count();
    assert_eq!((claimed.len(), suspects), (3, 1), "{claimed:?}");
}

async fn a_claim_from_several_queues_contains_at_most_one_suspect(fixture: Fixture) {
    let crashing = fixture.worker().await;
    let queues = labels(["red", "blue", "green"]);
    for queue in ["red", "blue", "green"] {
        fixture.add(job("suspect").queue(queue)).await;
    }
    let request = ClaimRequest { queues: queues.clone(), ..ClaimRequest::new(crashing, 9) };
    assert_eq!(fixture.claim_with(&request).await.len(), 3);
    assert_eq!(fixture.crash_all_workers().await.recovered, 3);
    let request = ClaimRequest { queues, ..ClaimRequest::new(fixture.worker().await, 9) };
    for _ in 0..3 {
        assert_eq!(fixture.claim_with(&request).await.len(), 1);
    }
}

async fn a_suspect_is_claimed_in_its_normal_order(fixture: Fixture) {
    enqueue_suspects(&fixture).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 9).await;
    assert_eq!(kinds(&claimed), ["early", "suspect 1", "late"]);
}

async fn a_process_that_runs_a_suspect_claims_no_other_suspect(fixture: Fixture) {
    enqueue_suspects(&fixture).await;
    let worker = fixture.worker().await;
    let request = ClaimRequest { suspects: Suspects::Leave, ..ClaimRequest::new(worker, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["early", "late"]);
    assert_eq!(fixture.count(Status::Retrying).await, 3);
}

async fn suspects_are_claimed_one_at_a_time_when_nothing_else_waits(fixture: Fixture) {
    enqueue_suspects(&fixture).await;
    let worker = fixture.worker().await;
    fixture.claim(worker, 9).await;
    for expected in ["suspect 2", "suspect 3"] {
        assert_eq!(kinds(&fixture.claim(worker, 9).await), [expected]);
    }
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

async fn suspects_are_filtered_like_other_jobs(fixture: Fixture) {
    enqueue_suspects(&fixture).await;
    let worker = fixture.worker().await;
    let request = ClaimRequest { kinds: Some(labels(["suspect 3"])), ..ClaimRequest::new(worker, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["suspect 3"]);
    fixture.pause("default").await.expect("pause");
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
}

async fn a_suspect_that_is_not_due_is_not_claimed(fixture: Fixture) {
    fixture.running(job("mail")).await;
    fixture.advance(61 * SECOND).await;
    // The default recovery delay is five seconds.
    assert_eq!(fixture.sweep_now().await.recovered, 1);
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.advance(5 * SECOND).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

async fn a_claim_of_one_returns_one_job_even_if_a_suspect_is_due(fixture: Fixture) {
    enqueue_suspects(&fixture).await;
    let worker = fixture.worker().await;
    for expected in ["early", "suspect 1", "suspect 2", "suspect 3", "late"] {
        assert_eq!(kinds(&fixture.claim(worker, 1).await), [expected]);
    }
}

// ---- claims whose caller goes away ---------------------------------------------

/// Polls `work` up to `times` times, then drops it. The database may still run
/// the claim.
async fn poll_and_drop<T>(work: impl Future<Output = T>, times: usize) -> Option<T> {
    let mut work = std::pin::pin!(work);
    let mut remaining = times;
    std::future::poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(done) => Poll::Ready(Some(done)),
        Poll::Pending if remaining <= 1 => Poll::Ready(None),
        Poll::Pending => {
            remaining -= 1;
            Poll::Pending
        }
    })
    .await
}

async fn a_claim_dropped_by_its_caller_leaves_nothing_running(fixture: Fixture) {
    const JOBS: usize = 24;
    fixture.enqueue_many((0..JOBS).map(|n| NewJob::new("mail", &n).timeout(None))).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    let mut held = Vec::new();
    for times in (1..=6).cycle().take(24) {
        let claim = fixture.claim(worker, 2);
        held.extend(poll_and_drop(claim, times).await.into_iter().flatten());
    }
    // Dropped claims are released without help, uncharged.
    let began = Instant::now();
    while held.len() < JOBS {
        assert!(began.elapsed() < MAX_WAIT, "leases of dropped claims are still live");
        tokio::time::sleep(SECOND / 100).await;
        held.extend(fixture.claim(worker, 99).await);
    }
    assert!(held.iter().all(|job| job.attempt() == 1 && job.interruptions() == 0), "{held:?}");
    let live: BTreeSet<_> = fixture.store().leases(worker).await.expect("leases").into_iter().collect();
    assert_eq!(held.iter().map(Claimed::lease).collect::<BTreeSet<_>>(), live);
}

/// The database has replied, but the caller drops the future before polling it again.
async fn a_claim_dropped_after_its_reply_arrived_leaves_nothing_running(fixture: Fixture) {
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker_with(DAY).await;
    let began = Instant::now();
    let in_time = || assert!(began.elapsed() < MAX_WAIT, "the claim is neither stored nor released");
    'again: loop {
        let mut claim = Box::pin(fixture.claim(worker, 1));
        while fixture.count(Status::Running).await == 0 {
            in_time();
            let poll = poll_fn(|context| Poll::Ready(claim.as_mut().poll(context)));
            if let Poll::Ready(jobs) = poll.await {
                // The caller received the jobs after all: release them and try again.
                fixture.must_finish(&jobs[0], Ending::Released).await;
                continue 'again;
            }
            tokio::time::sleep(SECOND / 100).await;
        }
        break;
    }
    while fixture.count(Status::Running).await != 0 {
        in_time();
        tokio::time::sleep(SECOND / 100).await;
    }
    assert_eq!(fixture.claim_one(worker).await.attempt(), 1);
}

/// An idle queue is analysed while it is empty. When a backlog arrives, the planner still
/// assumes that every table is empty, and any plan looks equally cheap.
async fn a_claim_reads_only_its_own_jobs_although_the_planner_knows_empty_tables(fixture: Fixture) {
    const JOBS: u32 = 2000;
    fixture.sql("vacuum analyze jobs", None).await;
    fixture.sql("vacuum analyze ready", None).await;
    fixture.enqueue_many((0..JOBS).map(|_| job("mail"))).await.expect("enqueue");
    let worker = fixture.worker().await;
    let before = request_reads(&fixture).await;
    let claimed = fixture.claim(worker, JOBS / 2).await;
    assert_eq!(claimed.len(), JOBS as usize / 2);
    // The server publishes a connection's counts with a later statement.
    let read = loop {
        fixture.claim(worker, 0).await;
        fixture.store().now().await.expect("now");
        let read = request_reads(&fixture).await - before;
        if read >= claimed.len() as i64 {
            break read;
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    };
    assert!(read < 10 * i64::from(JOBS), "the claim read {read} index entries for {} jobs", claimed.len());
}

async fn request_reads(fixture: &Fixture) -> i64 {
    const READS: &str = "
        select idx_tup_read
          from pg_stat_user_indexes
         where schemaname = current_schema()
           and indexrelname = 'jobs_pkey'";
    fixture.query_number(READS, None).await
}
