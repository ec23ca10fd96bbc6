//! Groups: fair turns, limits, rates, weights and pauses, across all processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, PlaceInLine, Suspects};
use longshore::worker::{Settings, Worker};
use longshore::{
    Client, Context, Failure, GroupChange, NewJob, Rate, Status, SweepOptions, UniqueMode, WorkerId,
};

use sqlx::Connection;

use crate::cursor::Claimer;
use crate::fixture::*;
use crate::worker::{run_worker, until};

cases! {
    a_large_group_does_not_delay_a_small_one,
    groups_take_turns_when_jobs_are_claimed_one_by_one,
    a_group_gets_jobs_in_proportion_to_its_weight,
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
    a_higher_priority_comes_first_in_and_across_groups,
    jobs_with_and_without_a_group_take_turns,
    a_slot_that_a_priority_leaves_is_used_by_a_lower_one,
    a_claim_takes_one_suspect_of_all_groups,
    a_suspect_uses_the_room_of_its_group,
    a_worker_of_other_kinds_leaves_a_group_in_its_place,
    jobs_of_a_group_that_are_due_later_start_then,
    a_job_keeps_its_group_through_every_change,
    a_replacement_moves_a_job_to_its_new_group,
    a_warm_cursor_finds_every_job,
    a_job_behind_the_position_keeps_the_turn_of_its_group,
    jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog,
    the_limit_of_the_queue_covers_its_groups,
    groups_are_listed_by_name_with_their_settings,
    the_place_in_line_is_known,
    a_job_due_later_does_not_hide_jobs_of_other_kinds,
    a_suspect_does_not_hide_the_jobs_before_it,
    groups_that_a_worker_cannot_serve_do_not_block_the_line,
    a_claim_takes_jobs_of_many_small_groups,
    a_group_with_many_turns_does_not_hide_the_others,
    groups_and_plain_jobs_take_turns_at_each_priority,
    a_plain_suspect_is_taken_beside_groups,
    a_changed_rate_does_not_wait_for_the_old_one,
    a_rate_that_is_set_again_gives_no_new_burst,
    claims_leave_one_turn_per_group_and_priority,
    a_drain_waits_for_a_rate_unless_the_clock_is_stopped,
    settings_out_of_range_are_refused_by_field,
    a_group_with_a_bad_name_is_refused,
    statistics_count_the_jobs_of_groups,
    a_worker_never_exceeds_the_limit_of_a_group_and_runs_all_jobs,
    no_job_of_a_group_is_left_behind_by_any_sequence_of_operations,
}

cases! {
    only on postgres:
    an_enqueue_in_an_open_transaction_is_found_after_its_group_was_drained,
    a_group_that_another_claim_serves_is_passed_by,
    a_group_gets_only_its_share_while_another_claim_serves_the_rest,
    sql_enqueues_into_a_group,
}

fn in_group(group: &str) -> NewJob {
    job("work").group(group)
}

async fn add(fixture: &Fixture, group: &str, jobs: usize) {
    fixture.enqueue_many((0..jobs).map(|_| in_group(group))).await.expect("enqueue");
}

fn per_group(claimed: &[Claimed]) -> BTreeMap<String, usize> {
    let mut groups = BTreeMap::new();
    for job in claimed {
        *groups.entry(job.group().unwrap_or("none").to_owned()).or_default() += 1;
    }
    groups
}

fn counts<const N: usize>(expected: [(&str, usize); N]) -> BTreeMap<String, usize> {
    expected.into_iter().map(|(group, jobs)| (group.to_owned(), jobs)).collect()
}

async fn limit(fixture: &Fixture, group: &str, limit: u32) {
    set(fixture, group, GroupChange { limit: Some(Some(limit)), ..GroupChange::default() }).await;
}

async fn set(fixture: &Fixture, group: &str, change: GroupChange) {
    fixture.set_group("default", group, change).await.expect("set_group");
}

async fn a_large_group_does_not_delay_a_small_one(fixture: Fixture) {
    add(&fixture, "large", 100).await;
    add(&fixture, "small", 10).await;
    let worker = fixture.worker().await;
    assert_eq!(per_group(&fixture.claim(worker, 16).await), counts([("large", 8), ("small", 8)]));
    assert_eq!(per_group(&fixture.claim(worker, 20).await), counts([("large", 18), ("small", 2)]));
    assert_eq!(fixture.claim(worker, 1000).await.len(), 74);
    assert_eq!(fixture.claim(worker, 1000).await.len(), 0);
}

async fn groups_take_turns_when_jobs_are_claimed_one_by_one(fixture: Fixture) {
    for group in ["a", "b", "c"] {
        add(&fixture, group, 3).await;
    }
    let worker = fixture.worker().await;
    let mut order = String::new();
    for _ in 0..9 {
        let claimed = fixture.claim(worker, 1).await;
        order += claimed[0].group().expect("group");
    }
    assert_eq!(order, "abcabcabc");
}

async fn a_group_gets_jobs_in_proportion_to_its_weight(fixture: Fixture) {
    set(&fixture, "heavy", GroupChange { weight: Some(3), ..GroupChange::default() }).await;
    add(&fixture, "heavy", 100).await;
    add(&fixture, "light", 100).await;
    let worker = fixture.worker().await;
    let mut claimed = Vec::new();
    for _ in 0..4 {
        claimed.extend(fixture.claim(worker, 16).await);
    }
    assert_eq!(per_group(&claimed), counts([("heavy", 48), ("light", 16)]));
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

/// Claims and finishes until nothing is left, and returns how many jobs ran. Panics if the group
/// exceeds its limit.
async fn drain(client: Client, worker: WorkerId, limit: usize) -> usize {
    let (mut cursor, mut ran, mut idle) = (ClaimCursor::default(), 0, 0);
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

async fn concurrent_claimers_never_exceed_the_limit_of_a_group(fixture: Fixture) {
    limit(&fixture, "acme", 3).await;
    add(&fixture, "acme", 60).await;
    let worker = fixture.worker_with(DAY).await;
    let mut claimers = Vec::new();
    for _ in 0..6 {
        claimers.push(tokio::spawn(drain(fixture.second_client().await, worker, 3)));
    }
    let mut ran = 0;
    for claimer in claimers {
        ran += claimer.await.expect("claimer");
    }
    // What a claim could not take while another served the group is still there.
    fixture.advance(MINUTE).await;
    ran += drain(fixture.second_client().await, worker, 3).await;
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

async fn a_higher_priority_comes_first_in_and_across_groups(fixture: Fixture) {
    add(&fixture, "a", 2).await;
    fixture.add(in_group("a").priority(5)).await;
    fixture.add(in_group("b").priority(9)).await;
    fixture.add(job("work").priority(7)).await;
    fixture.add(job("work").priority(-1)).await;
    let worker = fixture.worker().await;
    let mut order = Vec::new();
    for _ in 0..3 {
        let claimed = fixture.claim(worker, 2).await;
        order.extend(claimed.iter().map(|job| (job.priority(), job.group().unwrap_or("none").to_owned())));
    }
    let order: Vec<_> = order.iter().map(|(priority, group)| (*priority, group.as_str())).collect();
    assert_eq!(order, [(9, "b"), (7, "none"), (5, "a"), (0, "a"), (0, "a"), (-1, "none")]);
}

async fn jobs_with_and_without_a_group_take_turns(fixture: Fixture) {
    add(&fixture, "acme", 100).await;
    for _ in 0..100 {
        fixture.enqueue_kind("work").await;
    }
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let mut claimed = Vec::new();
    for _ in 0..10 {
        let request = ClaimRequest::new(worker, 1);
        claimed.extend(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs);
    }
    assert_eq!(per_group(&claimed), counts([("acme", 5), ("none", 5)]));
    let claims = fixture.store().claim(&ClaimRequest::new(worker, 20), &mut cursor).await.expect("claim");
    assert_eq!(per_group(&claims.jobs), counts([("acme", 10), ("none", 10)]));
}

async fn a_slot_that_a_priority_leaves_is_used_by_a_lower_one(fixture: Fixture) {
    limit(&fixture, "acme", 1).await;
    fixture.add(in_group("acme").priority(5)).await;
    add(&fixture, "acme", 1).await;
    let worker = fixture.worker().await;
    let held = fixture.claim(worker, 9).await;
    assert_eq!(held.len(), 1);
    fixture.must_finish(&held[0], done()).await;
    let mut cursor = ClaimCursor::default();
    let mut claimed = Vec::new();
    for _ in 0..2 {
        let claims = fixture.store().claim(&ClaimRequest::new(worker, 9), &mut cursor).await.expect("claim");
        claimed.extend(claims.jobs);
    }
    assert_eq!(claimed.len(), 1);
}

async fn a_claim_takes_one_suspect_of_all_groups(fixture: Fixture) {
    limit(&fixture, "acme", 2).await;
    for group in ["acme", "globex"] {
        add(&fixture, group, 2).await;
    }
    let (dead, alive) = (fixture.worker().await, fixture.worker_with(DAY).await);
    for job in fixture.claim(dead, 9).await {
        let _ = fixture.store().mark_started(&job.lease()).await.expect("mark_started");
    }
    fixture.advance(2 * MINUTE).await;
    fixture.sweep(&SweepOptions::default()).await.expect("sweep");
    fixture.advance(MINUTE).await;
    let claimed = fixture.claim(alive, 9).await;
    assert_eq!(claimed.len(), 1);
    assert_eq!(claimed[0].interruptions(), 1);
    let without = ClaimRequest { suspects: Suspects::Leave, ..ClaimRequest::new(alive, 9) };
    assert_eq!(fixture.claim_with(&without).await.len(), 0);
    for _ in 0..3 {
        assert_eq!(fixture.claim(alive, 9).await.len(), 1);
    }
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

async fn a_worker_of_other_kinds_leaves_a_group_in_its_place(fixture: Fixture) {
    for group in ["a", "b", "c"] {
        add(&fixture, group, 1).await;
    }
    let worker = fixture.worker().await;
    let other = ClaimRequest { kinds: Some(vec!["other".into()]), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&other).await.len(), 0);
    let place = fixture.place_in_line("default", "a", 0).await.expect("place");
    assert_eq!(place, Some(PlaceInLine { place: 1, groups: 3 }));
    fixture.add(job("other").group("b")).await;
    assert_eq!(per_group(&fixture.claim_with(&other).await), counts([("b", 1)]));
    assert_eq!(fixture.claim(worker, 9).await.len(), 3);
}

async fn jobs_of_a_group_that_are_due_later_start_then(fixture: Fixture) {
    fixture.add(in_group("acme").delay(MINUTE)).await;
    fixture.add(in_group("acme").delay(2 * MINUTE)).await;
    add(&fixture, "acme", 1).await;
    let worker = fixture.worker_with(DAY).await;
    for expected in [1, 1, 1, 0] {
        assert_eq!(fixture.claim(worker, 9).await.len(), expected);
        assert_eq!(fixture.claim(worker, 9).await.len(), 0);
        fixture.advance(MINUTE).await;
    }
}

async fn a_job_keeps_its_group_through_every_change(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let id = fixture.add(in_group("acme").delay(HOUR)).await;
    assert_eq!(fixture.job(id).await.group.as_deref(), Some("acme"));
    let claim = async || fixture.claim(worker, 9).await;
    assert_eq!(claim().await.len(), 0);
    fixture.retry(id).await.expect("run now");
    let held = claim().await;
    assert_eq!(held[0].group(), Some("acme"));
    let read = fixture.store().claims(&[held[0].lease()]).await.expect("claims").remove(0).expect("claim");
    assert_eq!(read.group(), Some("acme"));
    fixture.must_finish(&held[0], failed()).await;
    assert_eq!(claim().await.len(), 0);
    fixture.edit(id, longshore::Edit::default().priority(3)).await.expect("edit");
    fixture.advance(MINUTE).await;
    let held = claim().await;
    assert_eq!((held[0].group(), held[0].priority()), (Some("acme"), 3));
    fixture.must_finish(&held[0], failed_permanently()).await;
    fixture.redrive(id).await.expect("redrive");
    let held = claim().await;
    assert_eq!(held[0].group(), Some("acme"));
    fixture.must_finish(&held[0], done()).await;
    fixture.retry(id).await.expect("retry");
    fixture.cancel(id).await.expect("cancel");
    assert_eq!(claim().await.len(), 0);
    assert_eq!(fixture.job(id).await.group.as_deref(), Some("acme"));
}

async fn a_replacement_moves_a_job_to_its_new_group(fixture: Fixture) {
    let keyed = |group: &str| in_group(group).unique_key("k", UniqueMode::Replace);
    let first = fixture.enqueue(keyed("acme")).await.expect("enqueue");
    let second = fixture.enqueue(keyed("globex")).await.expect("enqueue");
    assert_eq!(second.id, first.id);
    let worker = fixture.worker().await;
    let held = fixture.claim(worker, 9).await;
    assert_eq!(per_group(&held), counts([("globex", 1)]));
    let third = fixture.enqueue(keyed("acme")).await.expect("enqueue");
    assert_ne!(third.id, first.id);
    fixture.must_finish(&held[0], done()).await;
    assert_eq!(per_group(&fixture.claim(worker, 9).await), counts([("acme", 1)]));
    let again = fixture.enqueue(in_group("acme").idempotency_key("once")).await.expect("enqueue");
    assert_eq!(
        fixture.enqueue(in_group("acme").idempotency_key("once")).await.expect("enqueue").id,
        again.id
    );
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

async fn a_warm_cursor_finds_every_job(fixture: Fixture) {
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let mut claimed = 0;
    for round in 0..10 {
        for group in ["a", "b", "c"] {
            add(&fixture, group, 20).await;
        }
        if round % 3 == 0 {
            fixture.advance(Duration::from_millis(1)).await;
        }
        claimed += fixture
            .store()
            .claim(&ClaimRequest::new(worker, 50), &mut cursor)
            .await
            .expect("claim")
            .jobs
            .len();
    }
    let mut empty = 0;
    while empty < 100 {
        let claims = fixture.store().claim(&ClaimRequest::new(worker, 50), &mut cursor).await.expect("claim");
        claimed += claims.jobs.len();
        empty = if claims.jobs.is_empty() { empty + 1 } else { 0 };
        if claimed == 600 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(claimed, 600);
}

async fn a_job_behind_the_position_keeps_the_turn_of_its_group(fixture: Fixture) {
    add(&fixture, "acme", 8).await;
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let request = ClaimRequest::new(worker, 8);
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 8);
    // Due before everything that the cursor has passed.
    fixture.add(in_group("acme").run_at(start() - HOUR)).await;
    fixture.store().claim(&request, &mut cursor).await.expect("claim");
    let found = fixture.claim(worker, 8).await.len() as u64;
    let group = fixture.group("default", "acme").await.expect("group").expect("group");
    assert_eq!((found + group.running, group.waiting), (found + 9, 0));
}

async fn jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog(fixture: Fixture) {
    add(&fixture, "acme", 900).await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    // The second time, the position has been kept over a head scan.
    for hours in [2, 1] {
        claimer.claim().await;
        let late = (0..6).map(|second| in_group("acme").run_at(start() - HOUR * hours + SECOND * second));
        let late = fixture.enqueue_many(late.collect::<Vec<_>>()).await.expect("enqueue");
        let mut found = claimer.claim_until(late[0].id).await;
        for _ in 0..2 {
            found.extend(claimer.claim().await);
        }
        let found: Vec<_> = found.iter().map(|job| job.lease().id).collect();
        assert_eq!(found, late.iter().map(|job| job.id).collect::<Vec<_>>());
        assert_eq!(claimer.claim().await.len(), 2, "the backlog goes on");
    }
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

async fn groups_are_listed_by_name_with_their_settings(fixture: Fixture) {
    let rate = Rate::per_second(5).burst(2);
    fixture.group_defaults("default", Some(7), None).await.expect("defaults");
    set(&fixture, "idle", GroupChange { rate: Some(Some(rate)), weight: Some(4), ..GroupChange::default() })
        .await;
    add(&fixture, "acme", 3).await;
    add(&fixture, "big", 1005).await;
    let worker = fixture.worker().await;
    let held = fixture.claim(worker, 1).await;
    assert_eq!(held[0].group(), Some("acme"));
    let groups = fixture.groups("default", "", 10).await.expect("groups");
    let shown: Vec<_> =
        groups.iter().map(|g| (g.name.as_str(), g.limit, g.waiting, g.waiting_or_more, g.running)).collect();
    assert_eq!(
        shown,
        [("acme", Some(7), 2, false, 1), ("big", Some(7), 1000, true, 0), ("idle", Some(7), 0, false, 0),]
    );
    assert_eq!((groups[2].rate, groups[2].weight, groups[2].paused), (Some(rate), 4, false));
    let page = fixture.groups("default", "acme", 1).await.expect("groups");
    assert_eq!(page, [groups[1].clone()]);
    assert_eq!(fixture.group("default", "idle").await.expect("group"), Some(groups[2].clone()));
    assert_eq!(fixture.group("default", "unknown").await.expect("group"), None);
    assert_eq!(fixture.groups("other", "", 10).await.expect("groups"), []);
}

async fn the_place_in_line_is_known(fixture: Fixture) {
    for group in ["a", "b", "c"] {
        add(&fixture, group, 2).await;
    }
    let place = async |group: &str| fixture.place_in_line("default", group, 0).await.expect("place");
    assert_eq!(place("c").await, Some(PlaceInLine { place: 3, groups: 3 }));
    let worker = fixture.worker().await;
    fixture.claim(worker, 1).await;
    assert_eq!(place("c").await, Some(PlaceInLine { place: 2, groups: 3 }));
    assert_eq!(place("a").await, Some(PlaceInLine { place: 3, groups: 3 }));
    assert_eq!(place("d").await, None);
}

async fn a_job_due_later_does_not_hide_jobs_of_other_kinds(fixture: Fixture) {
    fixture.add(job("b").group("acme")).await;
    fixture.advance(SECOND).await;
    fixture.add(job("a").group("acme")).await;
    fixture.add(job("a").group("acme").delay(DAY)).await;
    let worker = fixture.worker().await;
    let of_kind =
        |kind: &str| ClaimRequest { kinds: Some(vec![kind.into()]), ..ClaimRequest::new(worker, 9) };
    assert_eq!(fixture.claim_with(&of_kind("a")).await.len(), 1);
    assert_eq!(fixture.claim_with(&of_kind("b")).await.len(), 1);
}

async fn a_suspect_does_not_hide_the_jobs_before_it(fixture: Fixture) {
    let suspect = fixture.add(in_group("acme")).await;
    let (dead, alive) = (fixture.worker().await, fixture.worker_with(DAY).await);
    let held = fixture.claim(dead, 9).await;
    let _ = fixture.store().mark_started(&held[0].lease()).await.expect("mark_started");
    fixture.advance(2 * MINUTE).await;
    for n in 0..3 {
        fixture.add(in_group("acme").run_at(start() + SECOND * n)).await;
    }
    fixture.add(in_group("acme").delay(DAY)).await;
    fixture.sweep_now().await;
    fixture.advance(MINUTE).await;
    let claimed = fixture.claim(alive, 1).await;
    assert_eq!(ids(&claimed), [suspect]);
    assert_eq!(fixture.claim(alive, 9).await.len(), 3);
}

async fn groups_that_a_worker_cannot_serve_do_not_block_the_line(fixture: Fixture) {
    let others = (0..700).map(|n| job("other").group(format!("other {n:03}")));
    fixture.enqueue_many(others).await.expect("enqueue");
    add(&fixture, "mine", 1).await;
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let request = ClaimRequest { kinds: Some(vec!["work".into()]), ..ClaimRequest::new(worker, 1) };
    let mut claimed = 0;
    for _ in 0..20 {
        let claims = fixture.store().claim(&request, &mut cursor).await.expect("claim");
        claimed += claims.jobs.len();
        if !claims.more {
            break;
        }
    }
    assert_eq!(claimed, 1);
}

async fn a_claim_takes_jobs_of_many_small_groups(fixture: Fixture) {
    let jobs = (0..200).map(|n| in_group(&format!("{n:03}")));
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    assert_eq!(fixture.claim(worker, 10).await.len(), 10);
    let mut claimed = 0;
    for _ in 0..10 {
        let claims =
            fixture.store().claim(&ClaimRequest::new(worker, 190), &mut cursor).await.expect("claim");
        claimed += claims.jobs.len();
        if !claims.more || claimed == 190 {
            break;
        }
    }
    assert_eq!(claimed, 190);
}

async fn a_group_with_many_turns_does_not_hide_the_others(fixture: Fixture) {
    limit(&fixture, "acme", 1).await;
    add(&fixture, "acme", 2).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    // As if thousands of jobs had been enqueued one by one.
    for _ in 0..12 {
        let double = "insert into turns (at, priority, queue, grp) select min(at), priority, queue, grp
                        from turns group by id, priority, queue, grp";
        fixture.sql(double, None).await;
    }
    fixture.sql("update turns set at = (select started_at from workers limit 1)", None).await;
    add(&fixture, "globex", 1).await;
    let (mut cursor, mut claimed) = (ClaimCursor::default(), Vec::new());
    for _ in 0..20 {
        let claims = fixture.store().claim(&ClaimRequest::new(worker, 9), &mut cursor).await.expect("claim");
        claimed.extend(claims.jobs);
        if !claims.more {
            break;
        }
    }
    assert_eq!(per_group(&claimed), counts([("globex", 1)]));
}

async fn groups_and_plain_jobs_take_turns_at_each_priority(fixture: Fixture) {
    for priority in [0, 5] {
        for _ in 0..40 {
            fixture.add(in_group("acme").priority(priority)).await;
            fixture.add(job("work").priority(priority)).await;
        }
    }
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    for _ in 0..2 {
        let mut claimed = Vec::new();
        while claimed.len() < 80 {
            let claims =
                fixture.store().claim(&ClaimRequest::new(worker, 1), &mut cursor).await.expect("claim");
            claimed.extend(claims.jobs);
            if claimed.len() == 20 {
                assert_eq!(per_group(&claimed), counts([("acme", 10), ("none", 10)]));
            }
        }
        assert_eq!(per_group(&claimed), counts([("acme", 40), ("none", 40)]));
    }
}

async fn a_plain_suspect_is_taken_beside_groups(fixture: Fixture) {
    let suspect = fixture.add(job("work")).await;
    let (dead, alive) = (fixture.worker().await, fixture.worker_with(DAY).await);
    let held = fixture.claim(dead, 9).await;
    let _ = fixture.store().mark_started(&held[0].lease()).await.expect("mark_started");
    fixture.advance(2 * MINUTE).await;
    fixture.sweep_now().await;
    fixture.advance(MINUTE).await;
    add(&fixture, "acme", 100).await;
    let (mut cursor, mut claimed) = (ClaimCursor::default(), Vec::new());
    for _ in 0..4 {
        let claims = fixture.store().claim(&ClaimRequest::new(alive, 1), &mut cursor).await.expect("claim");
        claimed.extend(ids(&claims.jobs));
    }
    assert!(claimed.contains(&suspect), "{claimed:?}");
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

async fn claims_leave_one_turn_per_group_and_priority(fixture: Fixture) {
    set(&fixture, "acme", GroupChange { limit: Some(Some(100)), weight: Some(5), ..GroupChange::default() })
        .await;
    add(&fixture, "acme", 50).await;
    for _ in 0..50 {
        fixture.add(in_group("acme").priority(5)).await;
    }
    let worker = fixture.worker().await;
    for _ in 0..20 {
        assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    }
    let turns = fixture.query_number("select count(*) from turns where priority = 5", None).await;
    assert_eq!(turns, 1);
    assert_eq!(fixture.query_number("select count(*) from turns", None).await, 2);
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

async fn settings_out_of_range_are_refused_by_field(fixture: Fixture) {
    let none = GroupChange::default;
    for (field, change) in [
        ("limit", GroupChange { limit: Some(Some(0)), ..none() }),
        ("limit", GroupChange { limit: Some(Some(u32::MAX)), ..none() }),
        ("rate", GroupChange { rate: Some(Some(Rate::per_second(0))), ..none() }),
        ("rate", GroupChange { rate: Some(Some(Rate::per_second(1).burst(0))), ..none() }),
        ("weight", GroupChange { weight: Some(0), ..none() }),
        ("weight", GroupChange { weight: Some(101), ..none() }),
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

async fn a_group_with_a_bad_name_is_refused(fixture: Fixture) {
    for name in ["", &"x".repeat(129)] {
        let error = fixture.enqueue(in_group(name)).await.expect_err("group");
        assert_eq!(error.field(), Some("group"), "{error}");
        let error = fixture.set_group("default", name, GroupChange::default()).await.expect_err("group");
        assert_eq!(error.field(), Some("group"), "{error}");
    }
    fixture.add(in_group(&"x".repeat(128))).await;
}

async fn statistics_count_the_jobs_of_groups(fixture: Fixture) {
    add(&fixture, "acme", 3).await;
    fixture.add(in_group("acme").queue("letters").delay(HOUR)).await;
    fixture.enqueue_kind("work").await;
    let queues = fixture.queues().await.expect("queues");
    let shown: Vec<_> = queues.iter().map(|queue| (queue.name.as_str(), queue.waiting)).collect();
    assert_eq!(shown, [("default", 4), ("letters", 1)]);
    assert_eq!(fixture.store().waiting_queues().await.expect("queues"), ["default", "letters"]);
    assert_eq!(fixture.store().depth("default", 100).await.expect("depth"), 4);
    assert_eq!(fixture.store().depth("default", 2).await.expect("depth"), 2);
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.store().overdue().await.expect("overdue"), [("default".to_owned(), MINUTE)]);
    let id = fixture.add(in_group("acme")).await;
    let ahead = fixture.store().ahead(id, None, 100).await.expect("ahead").expect("waits");
    assert_eq!((ahead.jobs, ahead.or_more), (3, false));
    let filter = longshore::ListFilter {
        queue: Some("default".into()),
        status: Some(longshore::Status::Queued),
        ..longshore::ListFilter::default()
    };
    assert_eq!(fixture.list(&filter).await.expect("list").jobs.len(), 5);
}

async fn an_enqueue_in_an_open_transaction_is_found_after_its_group_was_drained(fixture: Fixture) {
    add(&fixture, "acme", 2).await;
    let mut connection = fixture.postgres().await;
    let mut open = connection.begin().await.expect("begin");
    fixture.enqueue_in(&mut open, [in_group("acme")]).await.expect("enqueue");
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let request = ClaimRequest::new(worker, 9);
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 2);
    assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 0);
    open.commit().await.expect("commit");
    assert_eq!(fixture.claim(worker, 9).await.len(), 1);
}

/// What a claim does that serves the group `acme`.
const LOCK_ACME: &str = "
    select pg_advisory_xact_lock(
             hashtextextended('\"' || current_schema() || '\".groups:default' || chr(31) || 'acme', 0))";

async fn a_group_that_another_claim_serves_is_passed_by(fixture: Fixture) {
    add(&fixture, "acme", 2).await;
    add(&fixture, "globex", 2).await;
    let mut connection = fixture.postgres().await;
    let mut other = connection.begin().await.expect("begin");
    sqlx::query(LOCK_ACME).execute(&mut *other).await.expect("lock");
    let worker = fixture.worker().await;
    assert_eq!(per_group(&fixture.claim(worker, 9).await), counts([("globex", 2)]));
    other.rollback().await.expect("rollback");
    assert_eq!(per_group(&fixture.claim(worker, 9).await), counts([("acme", 2)]));
}

async fn a_group_gets_only_its_share_while_another_claim_serves_the_rest(fixture: Fixture) {
    add(&fixture, "acme", 60).await;
    add(&fixture, "globex", 60).await;
    let mut connection = fixture.postgres().await;
    let mut other = connection.begin().await.expect("begin");
    sqlx::query(LOCK_ACME).execute(&mut *other).await.expect("lock");
    let worker = fixture.worker().await;
    assert_eq!(per_group(&fixture.claim(worker, 40).await), counts([("globex", 20)]));
    other.rollback().await.expect("rollback");
    assert_eq!(per_group(&fixture.claim(worker, 40).await), counts([("acme", 20), ("globex", 20)]));
}

async fn sql_enqueues_into_a_group(fixture: Fixture) {
    fixture.sql("select enqueue('work', grp => 'acme')", None).await;
    let worker = fixture.worker().await;
    assert_eq!(per_group(&fixture.claim(worker, 9).await), counts([("acme", 1)]));
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

/// A generator of numbers that look random (xorshift).
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }

    fn group(&mut self) -> String {
        ["a", "b", "c"][self.roll(3) as usize].to_owned()
    }

    fn change(&mut self) -> GroupChange {
        let limit = (self.roll(2) == 0).then(|| self.roll(3) as u32 + 1);
        let rate = (self.roll(3) == 0).then(|| Rate::per_second(self.roll(5) as u32 + 1).burst(2));
        GroupChange {
            paused: Some(self.roll(4) == 0),
            limit: Some(limit),
            rate: Some(rate),
            weight: Some(self.roll(3) as u32 + 1),
        }
    }
}

async fn no_job_of_a_group_is_left_behind_by_any_sequence_of_operations(fixture: Fixture) {
    for seed in 1..=6 {
        // Without settings, nothing adds a turn at the end.
        one_sequence(&fixture, Dice(seed * 0x9e37_79b9), seed % 2 == 0).await;
    }
}

async fn one_sequence(fixture: &Fixture, mut dice: Dice, has_settings: bool) {
    let queue = WorkerId::new().to_string();
    let (stable, mut dying) = (fixture.worker_with(4000 * DAY).await, fixture.worker().await);
    let mut cursor = ClaimCursor::default();
    let (mut held, mut ids) = (Vec::<Claimed>::new(), Vec::new());
    for _ in 0..150 {
        match dice.roll(16) {
            0..=3 => {
                let jobs = (0..=dice.roll(6)).map(|_| {
                    let kind = ["work", "play"][dice.roll(2) as usize];
                    let job = job(kind).queue(&queue).priority(dice.roll(2) as i64).max_attempts(30);
                    let job = if dice.roll(5) == 0 { job } else { job.group(dice.group()) };
                    match dice.roll(8) {
                        0 => job.delay(SECOND * dice.roll(20) as u32),
                        1 => job.delay(MINUTE * dice.roll(100) as u32),
                        2 => job.run_at(start() + SECOND * dice.roll(20) as u32),
                        _ => job,
                    }
                });
                let jobs: Vec<NewJob> = jobs.collect();
                ids.extend(fixture.enqueue_many(jobs).await.expect("enqueue").iter().map(|job| job.id));
            }
            4..=7 => {
                let worker = if dice.roll(4) == 0 { dying } else { stable };
                let limit = dice.roll(12) as u32 + 1;
                let kinds = [None, Some(vec!["work".into()]), Some(vec!["play".into()])]
                    [dice.roll(3) as usize]
                    .clone();
                let request =
                    ClaimRequest { queues: vec![queue.clone()], kinds, ..ClaimRequest::new(worker, limit) };
                let claims = match dice.roll(2) {
                    0 => fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs,
                    _ => fixture.claim_with(&request).await,
                };
                held.extend(claims);
            }
            8..=10 if !held.is_empty() => {
                let job = held.swap_remove(dice.roll(held.len() as u64) as usize);
                let ending = [done(), failed(), failed_permanently(), done_without_result()]
                    [dice.roll(4) as usize]
                    .clone();
                let _ = fixture.finish(&job, ending).await;
            }
            11 if !ids.is_empty() => {
                let id = ids[dice.roll(ids.len() as u64) as usize];
                let _ = match dice.roll(4) {
                    0 => fixture.cancel(id).await.map(drop),
                    1 => fixture.retry(id).await.map(drop),
                    2 => fixture.redrive(id).await.map(drop),
                    _ => fixture
                        .edit(id, longshore::Edit::default().priority(dice.roll(2) as i64))
                        .await
                        .map(drop),
                };
            }
            12 if has_settings => {
                fixture.set_group(&queue, &dice.group(), dice.change()).await.expect("set_group")
            }
            13 => {
                fixture.advance(2 * MINUTE).await;
                fixture.sweep_now().await;
                dying = fixture.worker().await;
            }
            _ => fixture.advance(Duration::from_millis(dice.roll(3000))).await,
        }
    }
    // Lift everything, and run what is left.
    for group in ["a", "b", "c"].into_iter().filter(|_| has_settings) {
        let free = GroupChange { paused: Some(false), limit: Some(None), rate: Some(None), weight: Some(1) };
        fixture.set_group(&queue, group, free).await.expect("set_group");
    }
    for job in held {
        let _ = fixture.finish(&job, done()).await;
    }
    fixture.advance(3 * HOUR).await;
    fixture.sweep_now().await;
    fixture.advance(HOUR).await;
    let request = ClaimRequest { queues: vec![queue.clone()], ..ClaimRequest::new(stable, 50) };
    loop {
        let claimed = fixture.claim_with(&request).await;
        if claimed.is_empty() {
            break;
        }
        for job in claimed {
            let _ = fixture.finish(&job, done()).await;
        }
    }
    for id in ids {
        let job = fixture.job(id).await;
        assert!(job.finished_at.is_some(), "{job:?} is left behind");
    }
}
