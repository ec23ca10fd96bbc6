//! Groups: fair turns and priorities. `group_limits` has limits, rates and pauses.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, PlaceInLine, Suspects};
use longshore::{GroupChange, NewJob, Rate, SweepOptions, UniqueMode, WorkerId};

use sqlx::Connection;

use crate::cursor::Claimer;
use crate::fixture::*;

cases! {
    a_large_group_does_not_delay_a_small_one,
    groups_take_turns_when_jobs_are_claimed_one_by_one,
    equal_groups_get_equal_shares_in_claims_of_every_size,
    a_group_that_got_one_job_less_than_the_others_comes_first,
    groups_that_a_full_claim_did_not_reach_come_next,
    groups_of_a_queue_with_a_limit_get_equal_shares,
    a_higher_priority_comes_first_in_and_across_groups,
    the_jobs_of_a_claim_are_ordered_across_groups,
    jobs_with_and_without_a_group_take_turns,
    a_slot_that_a_priority_leaves_is_used_by_a_lower_one,
    a_claim_takes_one_suspect_of_all_groups,
    a_worker_of_other_kinds_leaves_a_group_in_its_place,
    jobs_of_a_group_that_are_due_later_start_then,
    a_job_keeps_its_group_through_every_change,
    a_replacement_moves_a_job_to_its_new_group,
    a_warm_cursor_finds_every_job,
    a_job_behind_the_position_keeps_the_turn_of_its_group,
    a_claim_that_leaves_a_job_behind_its_position_says_when_to_claim_again,
    jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog,
    groups_are_listed_by_name_with_their_settings,
    groups_are_found_by_a_part_of_their_name,
    paused_groups_of_a_queue_are_counted,
    the_place_in_line_is_known,
    a_job_due_later_does_not_hide_jobs_of_other_kinds,
    a_suspect_does_not_hide_the_jobs_before_it,
    groups_that_a_worker_cannot_serve_do_not_block_the_line,
    a_claim_takes_jobs_of_many_small_groups,
    a_group_with_many_turns_does_not_hide_the_others,
    groups_and_plain_jobs_take_turns_at_each_priority,
    a_plain_suspect_is_taken_beside_groups,
    claims_leave_one_turn_per_group_and_priority,
    a_group_with_a_bad_name_is_refused,
    statistics_count_the_jobs_of_groups,
    no_job_of_a_group_is_left_behind_by_any_sequence_of_operations,
}

cases! {
    only on postgres:
    an_enqueue_in_an_open_transaction_is_found_after_its_group_was_drained,
    a_group_that_another_claim_serves_is_passed_by,
    a_group_gets_only_its_share_while_another_claim_serves_the_rest,
    sql_enqueues_into_a_group,
}

pub(crate) fn in_group(group: &str) -> NewJob {
    job("work").group(group)
}

pub(crate) async fn add(fixture: &Fixture, group: &str, jobs: usize) {
    fixture.enqueue_many((0..jobs).map(|_| in_group(group))).await.expect("enqueue");
}

pub(crate) fn per_group(claimed: &[Claimed]) -> BTreeMap<String, usize> {
    let mut groups = BTreeMap::new();
    for job in claimed {
        *groups.entry(job.group().unwrap_or("none").to_owned()).or_default() += 1;
    }
    groups
}

pub(crate) fn counts<const N: usize>(expected: [(&str, usize); N]) -> BTreeMap<String, usize> {
    expected.into_iter().map(|(group, jobs)| (group.to_owned(), jobs)).collect()
}

pub(crate) async fn limit(fixture: &Fixture, group: &str, limit: u32) {
    set(fixture, group, GroupChange { limit: Some(Some(limit)), ..GroupChange::default() }).await;
}

pub(crate) async fn set(fixture: &Fixture, group: &str, change: GroupChange) {
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

async fn equal_groups_get_equal_shares_in_claims_of_every_size(fixture: Fixture) {
    for size in [1, 3, 8, 10, 33, 50, 100, 200] {
        let queue = format!("of {size}");
        for group in ["a", "b", "c", "d"] {
            let jobs = (0..150).map(|_| in_group(group).queue(&queue));
            fixture.enqueue_many(jobs).await.expect("enqueue");
        }
        let worker = fixture.worker_with(DAY).await;
        let request = ClaimRequest { queues: vec![queue.into()], ..ClaimRequest::new(worker, size) };
        let (mut cursor, mut claimed) = (ClaimCursor::default(), Vec::new());
        while claimed.len() < 300 {
            let claims = fixture.store().claim(&request, &mut cursor).await.expect("claim");
            assert_eq!(claims.jobs.len(), size as usize, "the groups have enough jobs");
            claimed.extend(claims.jobs);
            fixture.advance(Duration::from_millis(1)).await;
        }
        let shares: Vec<usize> = per_group(&claimed).into_values().collect();
        let (least, most) = (shares.iter().min().expect("groups"), shares.iter().max().expect("groups"));
        // One turn has at most 8 jobs, if it is not the turn of all groups.
        assert!(shares.len() == 4 && most - least <= 8, "claims of {size}: {shares:?}");
    }
}

async fn a_group_that_got_one_job_less_than_the_others_comes_first(fixture: Fixture) {
    for group in ["a", "b", "c", "d"] {
        add(&fixture, group, 100).await;
    }
    let worker = fixture.worker().await;
    let mut all = Vec::new();
    for expected in [[9, 9, 8, 8], [17, 17, 17, 17]] {
        all.extend(fixture.claim(worker, 34).await);
        assert_eq!(per_group(&all).into_values().collect::<Vec<_>>(), expected);
    }
}

async fn groups_that_a_full_claim_did_not_reach_come_next(fixture: Fixture) {
    // The claims find fewer jobs of the small group than its share, and take the rest from another group.
    for (group, jobs) in [("small", 1), ("a", 200), ("b", 200), ("c", 200)] {
        add(&fixture, group, jobs).await;
    }
    let (worker, mut cursor) = (fixture.worker().await, ClaimCursor::default());
    let mut claimed = Vec::new();
    for _ in 0..13 {
        let request = ClaimRequest::new(worker, 16);
        claimed.extend(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs);
    }
    let shares = per_group(&claimed);
    assert_eq!(shares["small"], 1);
    for group in ["a", "b", "c"] {
        assert!((61..=77).contains(&shares[group]), "{shares:?}");
    }
}

async fn groups_of_a_queue_with_a_limit_get_equal_shares(fixture: Fixture) {
    fixture.limit("default", Some(30)).await.expect("limit");
    for group in ["a", "b", "c", "d"] {
        add(&fixture, group, 200).await;
    }
    let (worker, mut cursor) = (fixture.worker_with(DAY).await, ClaimCursor::default());
    let mut claimed = Vec::new();
    while claimed.len() < 300 {
        let claims =
            fixture.store().claim(&ClaimRequest::new(worker, 100), &mut cursor).await.expect("claim");
        for job in &claims.jobs {
            fixture.must_finish(job, done()).await;
        }
        claimed.extend(claims.jobs);
    }
    for (group, share) in per_group(&claimed) {
        assert!((67..=83).contains(&share), "{group}: {share}");
    }
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

/// Turns decide which jobs a claim takes, and priority and due time in which order it returns them.
async fn the_jobs_of_a_claim_are_ordered_across_groups(fixture: Fixture) {
    let due = start() - MINUTE;
    let mut expected = Vec::new();
    for (group, priority, seconds) in [
        (None, 0, 7),
        (Some("b"), 0, 5),
        (Some("a"), 0, 9),
        (Some("a"), 0, 6),
        (Some("b"), 1, 8),
        (Some("c"), 0, 4),
    ] {
        let job = job("mail").priority(priority).run_at(due + seconds * SECOND);
        let id = fixture.add(group.into_iter().fold(job, NewJob::group)).await;
        expected.push((-priority, seconds, id));
    }
    expected.sort_unstable();
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 100).await;
    assert_eq!(ids(&claimed), expected.into_iter().map(|(.., id)| id).collect::<Vec<_>>());
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
    // When the cursor returns to the head depends on how long the last look from the head took.
    let began = Instant::now();
    while claimed < 600 && began.elapsed() < MAX_WAIT {
        let claims = fixture.store().claim(&ClaimRequest::new(worker, 50), &mut cursor).await.expect("claim");
        claimed += claims.jobs.len();
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

async fn a_claim_that_leaves_a_job_behind_its_position_says_when_to_claim_again(fixture: Fixture) {
    let worker = fixture.worker().await;
    let request = ClaimRequest::new(worker, 8);
    // A claim looks behind its position if the last look from the head was long ago, compared to its duration.
    for round in 0..30 {
        let group = format!("acme-{round}");
        add(&fixture, &group, 8).await;
        let mut cursor = ClaimCursor::default();
        assert_eq!(fixture.store().claim(&request, &mut cursor).await.expect("claim").jobs.len(), 8);
        fixture.add(in_group(&group).run_at(start() - HOUR)).await;
        let claims = fixture.store().claim(&request, &mut cursor).await.expect("claim");
        if claims.jobs.is_empty() {
            assert!(claims.more || claims.again_in.is_some(), "{claims:?}");
            return;
        }
    }
}

async fn jobs_that_arrive_behind_the_position_in_a_group_come_before_its_backlog(fixture: Fixture) {
    add(&fixture, "acme", 900).await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    // The second time, the position has been kept over a look from the head.
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

async fn groups_are_listed_by_name_with_their_settings(fixture: Fixture) {
    let rate = Rate::per_second(5).burst(2);
    fixture.group_defaults("default", Some(7), None).await.expect("defaults");
    set(&fixture, "idle", GroupChange { rate: Some(Some(rate)), ..GroupChange::default() }).await;
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
    assert_eq!((groups[2].rate, groups[2].paused), (Some(rate), false));
    let page = fixture.groups("default", "acme", 1).await.expect("groups");
    assert_eq!(page, [groups[1].clone()]);
    assert_eq!(fixture.group("default", "idle").await.expect("group"), Some(groups[2].clone()));
    assert_eq!(fixture.group("default", "unknown").await.expect("group"), None);
    assert_eq!(fixture.groups("other", "", 10).await.expect("groups"), []);
}

async fn groups_are_found_by_a_part_of_their_name(fixture: Fixture) {
    fixture.add(in_group("Globex-test")).await;
    fixture.add(in_group("globex")).await;
    fixture.add(in_group("globex").queue("mail")).await;
    fixture.add(in_group("acme")).await;
    let pause = GroupChange { paused: Some(true), ..GroupChange::default() };
    fixture.set_group("mail", "globex", pause.clone()).await.expect("pause");
    fixture.set_group("idle", "old globex inc.", pause).await.expect("pause");
    let find = async |text: &str, queues: Option<&[String]>, limit| {
        let found = fixture.find_groups(text, queues, limit).await.expect("find");
        found.into_iter().map(|g| (g.queue, g.name, g.paused)).collect::<Vec<_>>()
    };
    let hit = |queue: &str, name: &str, paused| (queue.to_owned(), name.to_owned(), paused);
    let all = [
        hit("default", "globex", false),
        hit("mail", "globex", true),
        hit("default", "Globex-test", false),
        hit("idle", "old globex inc.", true),
    ];
    assert_eq!(find("globex", None, 9).await, all);
    assert_eq!(find("GLOBEX", None, 2).await, all[..2]);
    assert_eq!(find("globex", Some(&["mail".into(), "other".into()]), 9).await, all[1..2]);
    assert_eq!(find("lob%", None, 9).await, []);
    let worker = fixture.worker().await;
    fixture.claim(worker, 9).await;
    assert_eq!(find("acme", None, 9).await, [hit("default", "acme", false)], "its only job runs");
}

async fn paused_groups_of_a_queue_are_counted(fixture: Fixture) {
    for group in ["a", "b", "c"] {
        add(&fixture, group, 1).await;
    }
    let paused = async || {
        let queues = fixture.queues().await.expect("queues");
        queues.into_iter().find(|queue| queue.name == "default").map(|queue| queue.paused_groups)
    };
    assert_eq!(paused().await, Some(0));
    for (queue, group, paused) in
        [("default", "a", true), ("default", "b", true), ("other", "a", true), ("default", "a", false)]
    {
        let change = GroupChange { paused: Some(paused), ..GroupChange::default() };
        fixture.set_group(queue, group, change).await.expect("pause");
    }
    assert_eq!(paused().await, Some(1), "b");
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

async fn claims_leave_one_turn_per_group_and_priority(fixture: Fixture) {
    limit(&fixture, "acme", 100).await;
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
        statuses: vec![longshore::Status::Queued],
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
        GroupChange { paused: Some(self.roll(4) == 0), limit: Some(limit), rate: Some(rate) }
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
                let request = ClaimRequest {
                    queues: vec![queue.clone().into()],
                    kinds,
                    ..ClaimRequest::new(worker, limit)
                };
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
        let free = GroupChange { paused: Some(false), limit: Some(None), rate: Some(None) };
        fixture.set_group(&queue, group, free).await.expect("set_group");
    }
    for job in held {
        let _ = fixture.finish(&job, done()).await;
    }
    fixture.advance(3 * HOUR).await;
    fixture.sweep_now().await;
    fixture.advance(HOUR).await;
    let request = ClaimRequest { queues: vec![queue.clone().into()], ..ClaimRequest::new(stable, 50) };
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
