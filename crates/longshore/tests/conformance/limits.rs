//! Queues with a concurrency limit, which applies across all processes.

use std::time::Instant;

use longshore::store::{ClaimCursor, ClaimQueue, ClaimRequest, Claimed, Suspects};
use longshore::{Client, Ending, Status, WorkerId};

use crate::fixture::*;

cases! {
    a_serial_queue_runs_one_job_at_a_time_across_clients,
    a_serial_queue_keeps_the_order_of_its_jobs,
    a_limit_applies_across_priorities,
    concurrent_claimers_never_exceed_a_limit,
    every_ending_frees_the_slot,
    a_cancelled_running_job_holds_its_slot_until_its_attempt_ends,
    recovery_frees_the_slot,
    a_lost_lease_frees_its_slot_once,
    a_limit_set_while_jobs_run_counts_those_jobs,
    raising_a_limit_frees_slots_and_removing_it_frees_all,
    a_new_limit_applies_to_a_claimer_with_a_warm_cursor,
    a_full_queue_does_not_block_other_queues,
    a_claim_fills_up_with_jobs_below_those_that_a_limit_leaves_out,
    a_claim_takes_no_more_from_a_queue_than_its_cap,
    queues_with_a_cap_take_turns_with_the_others,
    a_claim_says_whether_a_job_waits_for_the_end_of_another,
    a_suspect_needs_a_slot_like_any_other_job,
    a_suspect_without_a_slot_does_not_keep_out_that_of_another_queue,
    a_limit_below_one_is_refused_by_field,
    queues_show_their_settings_and_their_live_jobs,
    the_queues_with_waiting_jobs_are_listed_by_name,
    changing_one_queue_setting_keeps_the_others,
}

const QUEUE: &str = "serial";

async fn limited_queue(fixture: &Fixture, limit: u32, jobs: usize) -> WorkerId {
    fixture.limit(QUEUE, Some(limit)).await.expect("limit");
    fixture.enqueue_many((0..jobs).map(|_| job("step").queue(QUEUE))).await.expect("enqueue");
    fixture.worker_with(DAY).await
}

async fn claim(fixture: &Fixture, worker: WorkerId, count: u32) -> Vec<Claimed> {
    fixture.claim_from(QUEUE, worker, count).await
}

async fn a_serial_queue_runs_one_job_at_a_time_across_clients(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 3).await;
    let other = fixture.second_client().await;
    let held = claim(&fixture, worker, 9).await;
    assert_eq!(held.len(), 1);
    let request = ClaimRequest { queues: vec![QUEUE.into()], ..ClaimRequest::new(worker, 9) };
    let claimed = other.store().claim(&request, &mut Default::default()).await.expect("claim");
    assert_eq!(claimed.jobs.len(), 0);
    fixture.must_finish(&held[0], done()).await;
    let claimed = other.store().claim(&request, &mut Default::default()).await.expect("claim");
    assert_eq!(claimed.jobs.len(), 1);
}

async fn a_serial_queue_keeps_the_order_of_its_jobs(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 0).await;
    let mut expected = Vec::new();
    for _ in 0..4 {
        expected.push(fixture.add(job("step").queue(QUEUE)).await);
    }
    let mut seen = Vec::new();
    for _ in 0..4 {
        let held = claim(&fixture, worker, 9).await;
        seen.extend(ids(&held));
        fixture.must_finish(&held[0], done()).await;
    }
    assert_eq!(seen, expected);
}

async fn a_limit_applies_across_priorities(fixture: Fixture) {
    let worker = limited_queue(&fixture, 2, 0).await;
    for priority in [3, 1, 2, 3, 1] {
        fixture.add(job("step").queue(QUEUE).priority(priority)).await;
    }
    let held = claim(&fixture, worker, 9).await;
    assert_eq!(held.iter().map(Claimed::priority).collect::<Vec<_>>(), [3, 3]);
    fixture.must_finish(&held[0], done()).await;
    assert_eq!(claim(&fixture, worker, 9).await.len(), 1);
    assert_eq!(claim(&fixture, worker, 9).await.len(), 0);
}

async fn concurrent_claimers_never_exceed_a_limit(fixture: Fixture) {
    let worker = limited_queue(&fixture, 3, 40).await;
    let clients = [fixture.second_client().await, fixture.second_client().await, fixture.client()];
    for _ in 0..5 {
        let tasks: Vec<_> = (0..9)
            .map(|n| {
                let client: Client = clients[n % 3].clone();
                let request = ClaimRequest { queues: vec![QUEUE.into()], ..ClaimRequest::new(worker, 2) };
                tokio::spawn(async move {
                    client.store().claim(&request, &mut Default::default()).await.expect("claim").jobs
                })
            })
            .collect();
        let mut held = Vec::new();
        for task in tasks {
            held.extend(task.await.expect("task"));
        }
        assert!(held.len() <= 3, "{} jobs run at once", held.len());
        // A claimer that found the queue's row locked returned nothing. A claimer that
        // runs alone gets the rest.
        held.extend(claim(&fixture, worker, 9).await);
        assert_eq!(held.len(), 3);
        for job in &held {
            fixture.must_finish(job, done()).await;
        }
    }
}

async fn every_ending_frees_the_slot(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 20).await;
    for ending in endings() {
        let held = claim(&fixture, worker, 9).await;
        assert_eq!(held.len(), 1, "before {ending:?}");
        fixture.must_finish(&held[0], ending).await;
    }
    assert_eq!(claim(&fixture, worker, 9).await.len(), 1);
}

async fn a_cancelled_running_job_holds_its_slot_until_its_attempt_ends(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 2).await;
    let held = claim(&fixture, worker, 9).await;
    fixture.cancel(held[0].lease().id).await.expect("cancel");
    assert_eq!(claim(&fixture, worker, 9).await.len(), 0);
    fixture.must_finish(&held[0], Ending::Released).await;
    assert_eq!(claim(&fixture, worker, 9).await.len(), 1);
}

async fn recovery_frees_the_slot(fixture: Fixture) {
    limited_queue(&fixture, 1, 2).await;
    let crashing = fixture.worker().await;
    assert_eq!(claim(&fixture, crashing, 9).await.len(), 1);
    fixture.crash_all_workers().await;
    let next = fixture.worker_with(DAY).await;
    assert_eq!(claim(&fixture, next, 9).await.len(), 1);
    assert_eq!(claim(&fixture, next, 9).await.len(), 0);
}

async fn a_lost_lease_frees_its_slot_once(fixture: Fixture) {
    limited_queue(&fixture, 1, 3).await;
    let crashing = fixture.worker().await;
    let stale = claim(&fixture, crashing, 9).await.remove(0);
    fixture.crash_all_workers().await;
    let next = fixture.worker_with(DAY).await;
    assert_eq!(claim(&fixture, next, 9).await.len(), 1);
    assert_eq!(fixture.finish(&stale, done()).await, longshore::store::Fenced::LeaseLost);
    assert_eq!(claim(&fixture, next, 9).await.len(), 0);
}

/// Leases taken before there was a limit count too.
async fn a_limit_set_while_jobs_run_counts_those_jobs(fixture: Fixture) {
    fixture.enqueue_many((0..6).map(|_| job("step").queue(QUEUE))).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    let held = claim(&fixture, worker, 3).await;
    fixture.limit(QUEUE, Some(2)).await.expect("limit");
    assert_eq!(claim(&fixture, worker, 9).await.len(), 0);
    fixture.must_finish(&held[0], done()).await;
    assert_eq!(claim(&fixture, worker, 9).await.len(), 0);
    fixture.must_finish(&held[1], done()).await;
    assert_eq!(claim(&fixture, worker, 9).await.len(), 1);
}

async fn raising_a_limit_frees_slots_and_removing_it_frees_all(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 6).await;
    assert_eq!(claim(&fixture, worker, 9).await.len(), 1);
    fixture.limit(QUEUE, Some(3)).await.expect("limit");
    assert_eq!(claim(&fixture, worker, 9).await.len(), 2);
    fixture.limit(QUEUE, None).await.expect("limit");
    assert_eq!(claim(&fixture, worker, 9).await.len(), 3);
}

async fn a_new_limit_applies_to_a_claimer_with_a_warm_cursor(fixture: Fixture) {
    fixture.enqueue_many((0..8).map(|_| job("step").queue(QUEUE))).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    let request = ClaimRequest { queues: vec![QUEUE.into()], ..ClaimRequest::new(worker, 2) };
    let mut cursor = Default::default();
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 2);
    fixture.limit(QUEUE, Some(3)).await.expect("limit");
    // The claimer may find the one free slot only when its cursor returns to the head.
    // It must never take two.
    let began = Instant::now();
    let mut held = 2;
    while held < 3 && began.elapsed() < MAX_WAIT {
        held += fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len();
        tokio::time::sleep(SECOND / 200).await;
    }
    held += fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len();
    assert_eq!(held, 3);
}

async fn a_full_queue_does_not_block_other_queues(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 5).await;
    fixture.add(job("free").queue("free").priority(-5)).await;
    let queues = vec![QUEUE.into(), "free".into()];
    let request = ClaimRequest { queues, ..ClaimRequest::new(worker, 9) };
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["step", "free"]);
    fixture.add(job("free").queue("free").priority(-5)).await;
    assert_eq!(kinds(&fixture.claim_with(&request).await), ["free"]);
}

async fn a_claim_fills_up_with_jobs_below_those_that_a_limit_leaves_out(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 0).await;
    let first = fixture.add(job("step").queue(QUEUE).priority(3)).await;
    for priority in [2, 1] {
        fixture.add(job("step").queue(QUEUE).priority(priority)).await;
    }
    let (low, lower) = (fixture.add(job("mail")).await, fixture.add(job("mail").priority(-1)).await);
    fixture.advance(MINUTE).await;
    let queues = vec![QUEUE.into(), "default".into()];
    let claimed = fixture.claim_with(&ClaimRequest { queues, ..ClaimRequest::new(worker, 3) }).await;
    assert_eq!(ids(&claimed), [first, low, lower]);
}

fn capped(queue: &str, cap: u32) -> ClaimQueue {
    ClaimQueue { name: queue.into(), cap: Some(cap) }
}

fn owned_kinds(claimed: &[Claimed]) -> Vec<String> {
    kinds(claimed).into_iter().map(str::to_owned).collect()
}

async fn a_claim_takes_no_more_from_a_queue_than_its_cap(fixture: Fixture) {
    for priority in [3, 2, 2, 1] {
        fixture.add(job("capped").queue(QUEUE).priority(priority)).await;
    }
    fixture.add(job("grouped").queue(QUEUE).group("acme")).await;
    fixture.add(job("mail").priority(2)).await;
    let worker = fixture.worker_with(DAY).await;
    let claim = async |cap: u32| {
        let queues = vec![capped(QUEUE, cap), "default".into()];
        let claimed = fixture.claim_with(&ClaimRequest { queues, ..ClaimRequest::new(worker, 9) }).await;
        owned_kinds(&claimed)
    };
    assert_eq!(claim(0).await, ["mail"]);
    assert_eq!(claim(1).await, ["capped"]);
    fixture.limit(QUEUE, Some(3)).await.expect("limit");
    assert_eq!(claim(9).await, ["capped", "capped"], "one of the three runs");
    fixture.limit(QUEUE, None).await.expect("limit");
    assert_eq!(claim(2).await, ["capped", "grouped"]);
}

async fn queues_with_a_cap_take_turns_with_the_others(fixture: Fixture) {
    for queue in ["backlog", "small", QUEUE] {
        fixture.enqueue_many((0..40).map(|_| job(queue).queue(queue))).await.expect("enqueue");
        fixture.advance(SECOND).await;
    }
    let worker = fixture.worker_with(DAY).await;
    let (mut cursor, mut claimed) = (ClaimCursor::default(), Vec::new());
    let mut claim = async |limit: u32| {
        let queues = vec!["backlog".into(), capped("small", 9), capped(QUEUE, 9)];
        let request = ClaimRequest { queues, ..ClaimRequest::new(worker, limit) };
        owned_kinds(&fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs)
    };
    for _ in 0..6 {
        claimed.extend(claim(1).await);
    }
    claimed.extend(claim(9).await);
    let count = |queue: &str| claimed.iter().filter(|kind| **kind == queue).count();
    assert_eq!([count("backlog"), count("small"), count(QUEUE)], [5, 5, 5], "{claimed:?}");
}

async fn a_claim_says_whether_a_job_waits_for_the_end_of_another(fixture: Fixture) {
    let worker = limited_queue(&fixture, 1, 2).await;
    let request = ClaimRequest { queues: vec![QUEUE.into()], ..ClaimRequest::new(worker, 9) };
    let claim = async |request: &ClaimRequest| {
        let claims = fixture.store().claim(request, &mut ClaimCursor::default()).await.expect("claim");
        (claims.jobs.len(), claims.more, claims.after_settle)
    };
    assert_eq!(claim(&request).await, (1, false, true));
    assert_eq!(claim(&request).await, (0, false, true));
    fixture.enqueue_kind("mail").await;
    let free = ClaimRequest { queues: vec!["default".into()], ..request.clone() };
    assert_eq!(claim(&free).await, (1, false, false));
    fixture.suspect(job("mail")).await;
    let leave = ClaimRequest { suspects: Suspects::Leave, ..free.clone() };
    assert_eq!(claim(&leave).await, (0, false, true));
    fixture.enqueue_kind("mail").await;
    let capped = ClaimRequest { queues: vec![capped("default", 0)], ..leave };
    assert_eq!(claim(&capped).await, (0, false, true));
}

async fn a_suspect_without_a_slot_does_not_keep_out_that_of_another_queue(fixture: Fixture) {
    let claim = |worker| {
        let queues = vec!["default".into(), "media".into()];
        let request = ClaimRequest { queues, ..ClaimRequest::new(worker, 2) };
        let fixture = &fixture;
        async move { fixture.claim_with(&request).await }
    };
    fixture.add(job("suspect without a slot").priority(1)).await;
    fixture.add(job("suspect").queue("media")).await;
    assert_eq!(claim(fixture.worker().await).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    fixture.add(job("later").queue("media")).await;
    fixture.add(job("first").priority(2)).await;
    fixture.limit("default", Some(1)).await.expect("limit");
    assert_eq!(kinds(&claim(fixture.worker().await).await), ["first", "suspect"]);
}

async fn a_suspect_needs_a_slot_like_any_other_job(fixture: Fixture) {
    limited_queue(&fixture, 1, 1).await;
    let crashing = fixture.worker().await;
    claim(&fixture, crashing, 1).await;
    fixture.crash_all_workers().await;
    fixture.add(job("step").queue(QUEUE).priority(9)).await;
    let worker = fixture.worker_with(DAY).await;
    assert_eq!(claim(&fixture, worker, 9).await.len(), 1);
    assert_eq!(claim(&fixture, worker, 9).await.len(), 0);
    assert_eq!(fixture.count(Status::Retrying).await, 1);
}

async fn a_limit_below_one_is_refused_by_field(fixture: Fixture) {
    let error = fixture.limit(QUEUE, Some(0)).await.expect_err("a limit of zero");
    assert_eq!(error.field(), Some("limit"));
    assert!(error.to_string().contains("pause"), "{error}");
}

async fn queues_show_their_settings_and_their_live_jobs(fixture: Fixture) {
    let worker = limited_queue(&fixture, 2, 5).await;
    claim(&fixture, worker, 9).await;
    fixture.pause("closed").await.expect("pause");
    fixture.enqueue_kind("mail").await;
    fixture.add(job("mail").delay(DAY)).await;
    let queues = fixture.queues().await.expect("queues");
    let shown: Vec<_> = queues
        .iter()
        .map(|queue| (queue.name.as_str(), queue.paused, queue.limit, queue.waiting, queue.running))
        .collect();
    assert_eq!(
        shown,
        [("closed", true, None, 0, 0), ("default", false, None, 2, 0), (QUEUE, false, Some(2), 3, 2)]
    );
}

async fn changing_one_queue_setting_keeps_the_others(fixture: Fixture) {
    fixture.limit(QUEUE, Some(4)).await.expect("limit");
    fixture.pause(QUEUE).await.expect("pause");
    fixture.limit(QUEUE, Some(5)).await.expect("limit");
    let queues = fixture.queues().await.expect("queues");
    assert_eq!((queues[0].paused, queues[0].limit), (true, Some(5)));
    fixture.resume(QUEUE).await.expect("resume");
    assert_eq!(fixture.queues().await.expect("queues")[0].limit, Some(5));
}

async fn the_queues_with_waiting_jobs_are_listed_by_name(fixture: Fixture) {
    let waiting = async || fixture.store().waiting_queues().await.expect("waiting_queues");
    assert_eq!(waiting().await, Vec::<String>::new());
    fixture.pause("settings only").await.expect("pause");
    fixture.suspect(job("step")).await;
    for (queue, priority) in [("b", 3), ("ä", 0), ("a", -3), ("b", 7), ("B", 0)] {
        fixture.add(job("step").queue(queue).priority(priority)).await;
    }
    fixture.add(job("step").queue("later").delay(HOUR)).await;
    fixture.add(job("step").queue("running")).await;
    let worker = fixture.worker_with(DAY).await;
    assert_eq!(fixture.claim_from("running", worker, 1).await.len(), 1);
    // `default` has only the suspect.
    assert_eq!(waiting().await, ["B", "a", "b", "default", "later", "ä"], "running jobs do not wait");
}
