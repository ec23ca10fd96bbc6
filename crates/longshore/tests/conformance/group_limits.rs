//! What a group may start: limits, rates and pauses, across all processes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use longshore::store::{ClaimCursor, ClaimRequest};
use longshore::worker::{Settings, Worker};
use longshore::{Client, Context, Failure, GroupChange, Rate, Status, SweepOptions, WorkerId};

use crate::fixture::*;
use crate::groups::{add, counts, in_group, limit, per_group, set};
use crate::worker::{run_worker, until};

cases! {
    the_limit_of_a_group_holds_across_clients,
    a_group_has_its_own_limit_or_the_default_of_its_queue,
    every_ending_lets_the_next_job_of_the_group_start,
    recovery_lets_the_next_job_of_the_group_start,
    a_lowered_limit_applies_to_the_next_claim,
    concurrent_claimers_never_exceed_the_limit_of_a_group,
    a_throttled_backlog_does_not_delay_other_groups,
    a_rate_admits_its_burst_and_then_one_job_per_step,
    the_state_of_a_rate_survives_an_empty_group,
    jobs_with_a_rate_are_not_claimed_ahead_of_time,
    the_rate_of_a_queue_covers_jobs_with_and_without_a_group,
    a_paused_group_starts_nothing_until_it_is_resumed,
    a_suspect_uses_the_room_of_its_group,
    the_limit_of_the_queue_covers_its_groups,
    a_changed_rate_does_not_wait_for_the_old_one,
    a_changed_rate_of_all_groups_does_not_wait_for_the_old_one,
    a_change_keeps_the_other_settings,
    a_rate_that_is_set_again_gives_no_new_burst,
    a_drain_waits_for_a_rate_unless_the_clock_is_stopped,
    a_drain_ends_while_rates_are_remembered_and_no_job_is_due,
    settings_out_of_range_are_refused_by_field,
    a_worker_never_exceeds_the_limit_of_a_group_and_runs_all_jobs,
}

/// Claims and finishes until 20 claims in a row find nothing, and returns how many jobs ran. Panics if the group
/// exceeds its limit.
async fn drain(client: Client, worker: WorkerId, limit: usize, mut cursor: ClaimCursor) -> usize {
    let (mut ran, mut idle) = (0, 0);
    while idle < 20 {
        let claims = client.claim(&ClaimRequest::new(worker, 5), &mut cursor).await.expect("claim");
        let running = client.group("default", "acme").await.expect("group").map_or(0, |group| group.running);
        assert!(running as usize <= limit, "{running} jobs run");
        idle = if claims.jobs.is_empty() { idle + 1 } else { 0 };
        for claimed in &claims.jobs {
            let report = longshore::Report {
                claimed,
                ending: done_without_result(),
                follow_ups: Vec::new(),
                has_progressed: false,
            };
            client.settle(vec![report]).await.expect("settle");
            ran += 1;
        }
        tokio::task::yield_now().await;
    }
    ran
}

async fn the_limit_of_a_group_holds_across_clients(fixture: Fixture) {
    limit(&fixture, "acme", 2).await;
    add(&fixture, "acme", 5).await;
    let worker = fixture.worker().await;
    let held = fixture.claim(worker, 9).await;
    assert_eq!(held.len(), 2);
    let other = fixture.second_client().await;
    let request = ClaimRequest::new(worker, 9);
    let claim =
        async || other.store().claim(&request, &mut ClaimCursor::default()).await.expect("claim").jobs;
    assert_eq!(claim().await.len(), 0);
    fixture.must_finish(&held[0], done()).await;
    assert_eq!(claim().await.len(), 1);
    assert_eq!(claim().await.len(), 0);
}

async fn a_group_has_its_own_limit_or_the_default_of_its_queue(fixture: Fixture) {
    fixture.group_defaults("default", Some(1), None).await.expect("defaults");
    limit(&fixture, "acme", 3).await;
    for group in ["acme", "globex"] {
        add(&fixture, group, 5).await;
    }
    let worker = fixture.worker().await;
    assert_eq!(per_group(&fixture.claim(worker, 50).await), counts([("acme", 3), ("globex", 1)]));
    set(&fixture, "acme", GroupChange { limit: Some(None), ..GroupChange::default() }).await;
    fixture.group_defaults("default", Some(4), None).await.expect("defaults");
    assert_eq!(per_group(&fixture.claim(worker, 50).await), counts([("acme", 1), ("globex", 3)]));
    fixture.group_defaults("default", None, None).await.expect("defaults");
    assert_eq!(per_group(&fixture.claim(worker, 50).await), counts([("acme", 1), ("globex", 1)]));
}

async fn every_ending_lets_the_next_job_of_the_group_start(fixture: Fixture) {
    limit(&fixture, "serial", 1).await;
    let endings = [done(), done_without_result(), failed(), failed_permanently(), observed_cancel()];
    add(&fixture, "serial", endings.len() + 1).await;
    let worker = fixture.worker().await;
    for ending in endings {
        let held = fixture.claim(worker, 9).await;
        assert_eq!(held.len(), 1);
        assert_eq!(fixture.claim(worker, 9).await.len(), 0);
        fixture.must_finish(&held[0], ending).await;
    }
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

async fn recovery_lets_the_next_job_of_the_group_start(fixture: Fixture) {
    limit(&fixture, "serial", 1).await;
    add(&fixture, "serial", 2).await;
    let (dead, alive) = (fixture.worker().await, fixture.worker_with(DAY).await);
    assert_eq!(fixture.claim(dead, 9).await.len(), 1);
    assert_eq!(fixture.claim(alive, 9).await.len(), 0);
    fixture.advance(2 * MINUTE).await;
    fixture.sweep(&SweepOptions::default()).await.expect("sweep");
    assert_eq!(fixture.claim(alive, 9).await.len(), 1);
}

async fn a_lowered_limit_applies_to_the_next_claim(fixture: Fixture) {
    limit(&fixture, "acme", 4).await;
    add(&fixture, "acme", 9).await;
    let worker = fixture.worker().await;
    let held = fixture.claim(worker, 4).await;
    limit(&fixture, "acme", 2).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    for job in &held[..2] {
        fixture.must_finish(job, done()).await;
        assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    }
    fixture.must_finish(&held[2], done()).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

async fn concurrent_claimers_never_exceed_the_limit_of_a_group(fixture: Fixture) {
    limit(&fixture, "acme", 3).await;
    add(&fixture, "acme", 60).await;
    let worker = fixture.worker_with(DAY).await;
    let mut claimers = Vec::new();
    for _ in 0..6 {
        claimers.push(tokio::spawn(drain(fixture.second_client().await, worker, 3, ClaimCursor::default())));
    }
    let mut ran = 0;
    for claimer in claimers {
        ran += claimer.await.expect("claimer");
    }
    // What a claim could not take while another served the group is still there. Every claim looks at the head: a
    // cursor that resumes finds the rest only after a pause, which can be longer than 20 claims.
    fixture.advance(MINUTE).await;
    ran += drain(fixture.second_client().await, worker, 3, ClaimCursor::always_head()).await;
    assert_eq!(ran, 60);
}

async fn a_throttled_backlog_does_not_delay_other_groups(fixture: Fixture) {
    limit(&fixture, "acme", 1).await;
    add(&fixture, "acme", 3000).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 500).await.len(), 1);
    add(&fixture, "globex", 2).await;
    assert_eq!(per_group(&fixture.claim(worker, 500).await), counts([("globex", 2)]));
}

async fn a_rate_admits_its_burst_and_then_one_job_per_step(fixture: Fixture) {
    let rate = Some(Some(Rate::per_second(10).burst(3)));
    set(&fixture, "acme", GroupChange { rate, ..GroupChange::default() }).await;
    add(&fixture, "acme", 20).await;
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let request = ClaimRequest::new(worker, 9);
    let first = fixture.store().claim(&request, &mut cursor).await.expect("claim");
    assert_eq!(first.jobs.len(), 3);
    assert_eq!(first.again_in, Some(Duration::from_millis(100)));
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.advance(Duration::from_millis(99)).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.advance(Duration::from_millis(1)).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
    fixture.advance(Duration::from_millis(250)).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
    fixture.advance(HOUR).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 3, "no more than the burst");
}

async fn the_state_of_a_rate_survives_an_empty_group(fixture: Fixture) {
    fixture.group_defaults("default", None, Some(Rate::per(1, MINUTE))).await.expect("defaults");
    add(&fixture, "acme", 1).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
    fixture.advance(Duration::from_secs(30)).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    add(&fixture, "acme", 1).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0, "the first job started 30 s ago");
    fixture.advance(Duration::from_secs(30)).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

async fn jobs_with_a_rate_are_not_claimed_ahead_of_time(fixture: Fixture) {
    fixture.group_defaults("default", None, Some(Rate::per_second(10).burst(10))).await.expect("defaults");
    add(&fixture, "acme", 9).await;
    let worker = fixture.worker().await;
    let ahead = ClaimRequest { startable: 0, ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&ahead).await.len(), 0);
    let two = ClaimRequest { startable: 2, ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&two).await.len(), 2);
    fixture.rate("letters", Some(Rate::per_second(10).burst(10))).await.expect("rate");
    fixture.enqueue_many((0..9).map(|_| job("work").queue("letters"))).await.expect("enqueue");
    let letters = ClaimRequest { queues: vec!["letters".into()], ..two };
    assert_eq!(fixture.claim_with(&letters).await.len(), 2);
}

async fn the_rate_of_a_queue_covers_jobs_with_and_without_a_group(fixture: Fixture) {
    fixture.rate("default", Some(Rate::per_second(10).burst(4))).await.expect("rate");
    add(&fixture, "acme", 5).await;
    for _ in 0..5 {
        fixture.enqueue_kind("work").await;
    }
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let claims = fixture.store().claim(&ClaimRequest::new(worker, 50), &mut cursor).await.expect("claim");
    assert_eq!(claims.jobs.len(), 4);
    assert_eq!(claims.again_in, Some(Duration::from_millis(100)));
    assert_eq!(fixture.claim(worker, 50).await.len(), 0);
    fixture.advance(Duration::from_millis(200)).await;
    assert_eq!(fixture.claim(worker, 50).await.len(), 2);
    fixture.rate("default", None).await.expect("rate");
    assert_eq!(fixture.claim(worker, 50).await.len(), 4);
}

async fn a_paused_group_starts_nothing_until_it_is_resumed(fixture: Fixture) {
    let paused = |paused| GroupChange { paused: Some(paused), ..GroupChange::default() };
    set(&fixture, "acme", paused(true)).await;
    add(&fixture, "acme", 2).await;
    add(&fixture, "globex", 2).await;
    let worker = fixture.worker().await;
    assert_eq!(per_group(&fixture.claim(worker, 50).await), counts([("globex", 2)]));
    set(&fixture, "acme", paused(false)).await;
    assert_eq!(per_group(&fixture.claim(worker, 50).await), counts([("acme", 2)]));
}

async fn a_suspect_uses_the_room_of_its_group(fixture: Fixture) {
    limit(&fixture, "acme", 2).await;
    add(&fixture, "acme", 1).await;
    let (dead, alive) = (fixture.worker().await, fixture.worker_with(DAY).await);
    let held = fixture.claim(dead, 9).await;
    let _ = fixture.store().mark_started(&held[0].lease()).await.expect("mark_started");
    fixture.advance(2 * MINUTE).await;
    fixture.sweep_now().await;
    fixture.advance(MINUTE).await;
    add(&fixture, "acme", 5).await;
    let claimed = fixture.claim(alive, 9).await;
    assert_eq!(claimed.len(), 2);
    assert_eq!(claimed.iter().filter(|job| job.interruptions() > 0).count(), 1);
}

async fn the_limit_of_the_queue_covers_its_groups(fixture: Fixture) {
    fixture.limit("default", Some(3)).await.expect("limit");
    for group in ["a", "b"] {
        add(&fixture, group, 2).await;
    }
    fixture.enqueue_kind("work").await;
    let worker = fixture.worker().await;
    let held = fixture.claim(worker, 9).await;
    assert_eq!(held.len(), 3);
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    for job in &held {
        fixture.must_finish(job, done()).await;
    }
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
}

async fn a_changed_rate_does_not_wait_for_the_old_one(fixture: Fixture) {
    let rate = |rate| GroupChange { rate: Some(Some(rate)), ..GroupChange::default() };
    set(&fixture, "acme", rate(Rate::per(1, DAY))).await;
    add(&fixture, "acme", 3).await;
    let worker = fixture.worker_with(4000 * DAY).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
    fixture.advance(HOUR).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    set(&fixture, "acme", rate(Rate::per_second(1))).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.advance(SECOND).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1, "not a day after the first");
}

async fn a_changed_rate_of_all_groups_does_not_wait_for_the_old_one(fixture: Fixture) {
    fixture.group_defaults("default", None, Some(Rate::per(1, DAY))).await.expect("defaults");
    add(&fixture, "acme", 3).await;
    let worker = fixture.worker_with(4000 * DAY).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
    fixture.advance(HOUR).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.group_defaults("default", None, Some(Rate::per_second(1))).await.expect("defaults");
    assert_eq!(fixture.claim(worker, 9).await.len(), 0);
    fixture.advance(SECOND).await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 1, "not a day after the first");
}

async fn a_change_keeps_the_other_settings(fixture: Fixture) {
    let (rate, other) = (Rate::per_second(5).burst(2), Rate::per(3, HOUR));
    fixture.limit("default", Some(7)).await.expect("limit");
    fixture.rate("default", Some(rate)).await.expect("rate");
    fixture.group_defaults("default", Some(4), Some(other)).await.expect("defaults");
    fixture.pause("default").await.expect("pause");
    for limit in [7, 8] {
        let queue = fixture.queues().await.expect("queues").remove(0);
        assert_eq!((queue.paused, queue.limit, queue.rate), (true, Some(limit), Some(rate)));
        assert_eq!((queue.group_limit, queue.group_rate), (Some(4), Some(other)));
        fixture.limit("default", Some(8)).await.expect("limit");
    }

    for change in [
        GroupChange { limit: Some(Some(3)), ..GroupChange::default() },
        GroupChange { paused: Some(true), ..GroupChange::default() },
        GroupChange { rate: Some(Some(other)), ..GroupChange::default() },
        GroupChange { limit: Some(Some(3)), ..GroupChange::default() },
    ] {
        set(&fixture, "acme", change).await;
    }
    let group = fixture.group("default", "acme").await.expect("group").expect("it has settings");
    assert_eq!((group.paused, group.limit, group.rate), (true, Some(3), Some(other)));
}

async fn a_rate_that_is_set_again_gives_no_new_burst(fixture: Fixture) {
    for _ in 0..3 {
        fixture.enqueue_kind("work").await;
    }
    let worker = fixture.worker_with(DAY).await;
    let mut claimed = 0;
    for _ in 0..3 {
        fixture.rate("default", Some(Rate::per(1, HOUR))).await.expect("rate");
        claimed += fixture.claim(worker, 9).await.len();
    }
    assert_eq!(claimed, 1);
}

async fn a_drain_waits_for_a_rate_unless_the_clock_is_stopped(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("pin_clock");
    fixture.group_defaults("default", None, Some(Rate::per_second(50).burst(1))).await.expect("defaults");
    let worker = || Worker::builder(fixture.client()).function("work", crate::worker::nothing);
    add(&fixture, "acme", 3).await;
    crate::worker::drain(worker()).await;
    assert_eq!(fixture.count(Status::Succeeded).await, 3);
    fixture.store().pin_clock(Some(fixture.now().await + MINUTE)).await.expect("pin_clock");
    add(&fixture, "acme", 3).await;
    crate::worker::drain(worker()).await;
    assert_eq!(fixture.count(Status::Succeeded).await, 4, "the clock stands still");
}

async fn a_drain_ends_while_rates_are_remembered_and_no_job_is_due(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let hourly = Rate { starts: 1, period_ms: 3_600_000, burst: 1 };
    fixture.group_defaults("default", None, Some(hourly)).await.expect("defaults");
    fixture.rate("default", Some(hourly)).await.expect("rate");
    let worker = || Worker::builder(fixture.client()).function("work", crate::worker::nothing);
    add(&fixture, "acme", 1).await;
    fixture.add(in_group("acme").run_at(fixture.now().await + DAY)).await;
    tokio::time::timeout(MAX_WAIT, crate::worker::drain(worker())).await.expect("the drain ends");
    assert_eq!(fixture.count(Status::Succeeded).await, 1);
}

async fn settings_out_of_range_are_refused_by_field(fixture: Fixture) {
    let none = GroupChange::default;
    for (field, change) in [
        ("limit", GroupChange { limit: Some(Some(0)), ..none() }),
        ("limit", GroupChange { limit: Some(Some(u32::MAX)), ..none() }),
        ("rate", GroupChange { rate: Some(Some(Rate::per_second(0))), ..none() }),
        ("rate", GroupChange { rate: Some(Some(Rate::per_second(1).burst(0))), ..none() }),
    ] {
        let error = fixture.set_group("default", "acme", change).await.expect_err(field);
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.to_string().contains("; use "), "{error}");
    }
    let error = fixture.rate("default", Some(Rate::per_second(0))).await.expect_err("rate");
    assert_eq!(error.field(), Some("rate"));
    let error = fixture.group_defaults("default", Some(0), None).await.expect_err("limit");
    assert_eq!(error.field(), Some("limit"));
    assert_eq!(fixture.groups("default", "", 10).await.expect("groups"), []);
}

async fn a_worker_never_exceeds_the_limit_of_a_group_and_runs_all_jobs(fixture: Fixture) {
    static RUNNING: AtomicUsize = AtomicUsize::new(0);
    static MOST: AtomicUsize = AtomicUsize::new(0);
    RUNNING.store(0, Ordering::SeqCst);
    MOST.store(0, Ordering::SeqCst);
    limit(&fixture, "acme", 2).await;
    add(&fixture, "acme", 30).await;
    add(&fixture, "globex", 30).await;
    let handler = async |_: serde_json::Value, ctx: Context| {
        if ctx.job().group() == Some("acme") {
            MOST.fetch_max(RUNNING.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            RUNNING.fetch_sub(1, Ordering::SeqCst);
        }
        Ok::<(), Failure>(())
    };
    // The clock stands still, so only the ends of jobs let others start.
    let settings = Settings { concurrency: 8, ..Settings::default() };
    let worker = Worker::builder(fixture.client()).settings(settings).function("work", handler);
    let running = run_worker(worker).await;
    until("all jobs have run", || async { fixture.count(Status::Succeeded).await == 60 }).await;
    running.stop().await;
    assert!(MOST.load(Ordering::SeqCst) <= 2, "{MOST:?} jobs of the group ran at once");
}
