//! Lists, the number of jobs ahead, `check` and the glance at jobs for event streams.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::store::{Fenced, NewWorker};
use longshore::{Ending, JobId, ListFilter, NewJob, Outcome, Page, Payloads, Report, Status};

use crate::fixture::*;

cases! {
    a_list_is_newest_first_across_all_statuses,
    a_list_by_status_finds_only_that_status,
    a_list_of_several_statuses_is_newest_first_and_continues,
    a_list_ends_where_the_first_of_its_searches_stopped,
    a_list_by_group_error_or_end_finds_the_matching_jobs,
    a_list_shows_each_job_as_get_does,
    a_running_job_is_shown_with_the_name_of_its_worker,
    a_list_by_kind_queue_tag_or_key_finds_the_matching_jobs,
    a_list_by_key_applies_the_other_filters_too,
    consecutive_pages_have_no_gap_and_no_overlap,
    the_page_limit_is_clamped_to_between_1_and_200,
    an_offset_skips_matches_up_to_its_maximum,
    a_list_by_time_finds_the_jobs_created_then,
    a_rare_match_is_found_by_following_short_pages,
    a_page_is_searched_until_it_is_full,
    the_live_jobs_of_a_queue_are_found_at_once_among_many_others,
    live_jobs_are_listed_in_order_among_finished_ones,
    a_list_of_a_kind_or_queue_without_finished_jobs_does_not_read_them,
    a_page_that_ends_early_keeps_the_rest_of_its_offset,
    the_maximum_offset_is_reached_in_one_page,
    a_cursor_of_a_deleted_job_still_works,
    a_page_of_large_jobs_ends_early_and_the_next_one_continues,
    every_large_field_counts_towards_the_size_of_a_page,
    a_list_without_payloads_contains_everything_else,
    a_job_is_shown_with_its_newest_hundred_attempts,
    a_job_keeps_its_newest_hundred_attempts_and_its_newest_error,
    a_glance_shows_the_newest_the_running_and_the_requested_jobs_as_get_does,
}

pub(crate) fn filter() -> ListFilter {
    ListFilter::default()
}

pub(crate) fn listed(page: &Page) -> Vec<JobId> {
    page.jobs.iter().map(|job| job.id).collect()
}

async fn all(fixture: &Fixture, filter: &ListFilter) -> Vec<JobId> {
    let mut filter = filter.clone();
    let mut found = Vec::new();
    loop {
        let page = fixture.list(&filter).await.expect("list");
        found.extend(listed(&page));
        match page.next {
            Some(next) => filter.cursor = Some(next),
            None => return found,
        }
        assert!(found.len() < 100_000, "the list does not end");
    }
}

/// One job in every status, oldest first.
pub(crate) async fn one_of_each(fixture: &Fixture) -> Vec<(Status, JobId)> {
    let succeeded = fixture.ended(job("mail"), Outcome::Succeeded).await;
    let dead = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let cancelled = fixture.ended(job("mail"), Outcome::Cancelled).await;
    let retrying = fixture.running(job("mail")).await;
    fixture.must_finish(&retrying, failed()).await;
    let running = fixture.running(job("mail")).await;
    let queued = fixture.enqueue_kind("mail").await;
    vec![
        (Status::Succeeded, succeeded),
        (Status::FailedPermanent, dead),
        (Status::Cancelled, cancelled),
        (Status::Retrying, retrying.lease().id),
        (Status::Running, running.lease().id),
        (Status::Queued, queued),
    ]
}

// ---- pages -------------------------------------------------------------------

async fn a_list_is_newest_first_across_all_statuses(fixture: Fixture) {
    let mut expected: Vec<_> = one_of_each(&fixture).await.into_iter().map(|(_, id)| id).collect();
    expected.sort();
    expected.reverse();
    let page = fixture.list(&filter()).await.expect("list");
    assert_eq!((listed(&page), page.next), (expected, None));
}

async fn a_list_by_status_finds_only_that_status(fixture: Fixture) {
    for (status, id) in one_of_each(&fixture).await {
        let by = ListFilter { statuses: vec![status], ..filter() };
        assert_eq!(all(&fixture, &by).await, [id], "{status}");
        let page = fixture.list(&by).await.expect("list");
        assert!(page.jobs.iter().all(|job| job.status == status));
    }
}

async fn a_list_of_several_statuses_is_newest_first_and_continues(fixture: Fixture) {
    let mut jobs = Vec::new();
    for outcome in Outcome::ALL {
        jobs.push((outcome.status(), fixture.ended(job("mail"), outcome).await));
    }
    jobs.extend(one_of_each(&fixture).await);
    for statuses in [
        vec![Status::Queued, Status::Retrying],
        vec![Status::FailedPermanent, Status::Cancelled],
        vec![Status::Succeeded, Status::Running, Status::Queued],
        Status::ALL.to_vec(),
    ] {
        let mut expected: Vec<JobId> =
            jobs.iter().filter(|(status, _)| statuses.contains(status)).map(|(_, id)| *id).collect();
        expected.sort_unstable_by(|a, b| b.cmp(a));
        // Without time, each search makes one step.
        for (limit, search_time) in [(50, ListFilter::SEARCH_TIME), (1, Duration::ZERO)] {
            let by = ListFilter { statuses: statuses.clone(), limit, search_time, ..filter() };
            assert_eq!(all(&fixture, &by).await, expected, "{statuses:?}");
            let skipped = ListFilter { offset: 1, ..by };
            let page = fixture.list(&skipped).await.expect("list");
            assert_eq!(listed(&page), expected[1..expected.len().min(1 + limit as usize)], "{statuses:?}");
        }
    }
}

/// The search for waiting jobs stops before it has looked as far back as the failed job.
async fn a_list_ends_where_the_first_of_its_searches_stopped(fixture: Fixture) {
    let failed = fixture.ended(job("mail").tags(["late"]), Outcome::FailedPermanent).await;
    fixture.enqueue_many((0..1_100).map(|_| job("mail"))).await.expect("enqueue_many");
    let by = ListFilter {
        statuses: vec![Status::Queued, Status::FailedPermanent],
        tag: Some("late".into()),
        search_time: Duration::ZERO,
        ..filter()
    };
    let page = fixture.list(&by).await.expect("list");
    assert!(page.jobs.is_empty() && page.next.is_some(), "{page:?}");
    assert_eq!(all(&fixture, &by).await, [failed]);
}

async fn a_list_by_group_error_or_end_finds_the_matching_jobs(fixture: Fixture) {
    let fails = async |group: &str, error: &str, retry: bool| {
        let claimed = fixture.running(job("mail").group(group).max_attempts(if retry { 5 } else { 1 })).await;
        fixture.must_finish(&claimed, Ending::Failed { error: error.into(), retry_in: Some(DAY) }).await;
        claimed.lease().id
    };
    let dead = fails("acme", "SMTP timed out after 30 s", false).await;
    let retrying = fails("acme", "smtp TIMED OUT", true).await;
    let other = fails("globex", "no such mailbox", false).await;
    fixture.advance(HOUR).await;
    let cancelled = fails("globex", "timed out", true).await;
    fixture.cancel(cancelled).await.expect("cancel");
    let succeeded = fixture.ended(job("mail").group("acme"), Outcome::Succeeded).await;
    let waiting = fixture.add(job("mail").group("acme")).await;
    let find = async |by: ListFilter| all(&fixture, &by).await;
    let acme = ListFilter { group: Some("acme".into()), ..filter() };
    assert_eq!(find(acme.clone()).await, [waiting, succeeded, retrying, dead]);
    assert_eq!(find(ListFilter { statuses: vec![Status::Queued], ..acme.clone() }).await, [waiting]);
    assert_eq!(find(ListFilter { queue: Some("other".into()), ..acme.clone() }).await, []);
    let timed_out = ListFilter { error: Some("Timed Out".into()), ..filter() };
    assert_eq!(find(timed_out.clone()).await, [cancelled, retrying, dead]);
    assert_eq!(find(ListFilter { group: acme.group.clone(), ..timed_out.clone() }).await, [retrying, dead]);
    assert_eq!(
        find(ListFilter { statuses: vec![Status::FailedPermanent], ..timed_out.clone() }).await,
        [dead]
    );
    assert_eq!(find(ListFilter { statuses: vec![Status::Queued], ..timed_out.clone() }).await, []);
    let later = ListFilter { ended_after: Some(start() + HOUR), ..filter() };
    assert_eq!(find(later.clone()).await, [succeeded, cancelled]);
    let earlier = ListFilter { ended_before: Some(start() + HOUR), ..filter() };
    assert_eq!(find(earlier.clone()).await, [other, dead]);
    assert_eq!(find(ListFilter { error: Some("timed".into()), ..earlier }).await, [dead]);
    assert_eq!(find(ListFilter { ended_before: later.ended_after, ..later }).await, []);
}

async fn a_list_shows_each_job_as_get_does(fixture: Fixture) {
    one_of_each(&fixture).await;
    for listed in fixture.list(&filter()).await.expect("list").jobs {
        let mut single = fixture.job(listed.id).await;
        single.errors.clear();
        assert_eq!(snapshot(&listed), snapshot(&single), "{}", listed.status);
    }
}

async fn a_running_job_is_shown_with_the_name_of_its_worker(fixture: Fixture) {
    let named = NewWorker::new("crane-7");
    fixture.store().register(&named).await.expect("register");
    let id = fixture.add(job("mail")).await;
    let claimed = fixture.claim_one(named.id).await;
    let shown = fixture.job(id).await;
    assert_eq!((shown.locked_by, shown.locked_by_name.as_deref()), (Some(named.id), Some("crane-7")));
    let listed = fixture.list(&filter()).await.expect("list").jobs.remove(0);
    assert_eq!(listed.locked_by_name.as_deref(), Some("crane-7"));
    fixture.must_finish(&claimed, done()).await;
    let shown = fixture.job(id).await;
    assert_eq!((shown.locked_by, shown.locked_by_name), (None, None));
}

async fn a_list_by_kind_queue_tag_or_key_finds_the_matching_jobs(fixture: Fixture) {
    let mail = fixture.add(job("mail").queue("letters").tags(["red", "blue"]).idempotency_key("k-1")).await;
    let sms = fixture.add(job("sms").queue("phones").tags(["red"]).idempotency_key("k-2")).await;
    let bulk = fixture.add(job("mail").queue("phones").tags(["blue-ish"])).await;
    let find = async |filter: ListFilter| {
        let mut found = all(&fixture, &filter).await;
        found.sort();
        found
    };
    assert_eq!(find(ListFilter { kind: Some("mail".into()), ..filter() }).await, [mail, bulk]);
    assert_eq!(find(ListFilter { queue: Some("phones".into()), ..filter() }).await, [sms, bulk]);
    assert_eq!(find(ListFilter { tag: Some("red".into()), ..filter() }).await, [mail, sms]);
    assert_eq!(find(ListFilter { tag: Some("blue".into()), ..filter() }).await, [mail]);
    assert_eq!(find(ListFilter { idempotency_key: Some("k-2".into()), ..filter() }).await, [sms]);
    let both = ListFilter { kind: Some("mail".into()), queue: Some("phones".into()), ..filter() };
    assert_eq!(find(both).await, [bulk]);
    let none = ListFilter { kind: Some("sms".into()), statuses: vec![Status::Running], ..filter() };
    assert_eq!(find(none).await, []);
}

async fn a_list_by_key_applies_the_other_filters_too(fixture: Fixture) {
    let both = |n: u32| {
        job("mail").idempotency_key(format!("i-{n}")).unique_key(format!("u-{n}"), Default::default())
    };
    let id = fixture.add(both(1)).await;
    fixture.add(both(2)).await;
    let by_idempotency_key = ListFilter { idempotency_key: Some("i-1".into()), ..filter() };
    let by_unique_key = ListFilter { unique_key: Some("u-1".into()), ..filter() };
    let by_both = ListFilter { unique_key: Some("u-1".into()), ..by_idempotency_key.clone() };
    for by in [by_idempotency_key, by_unique_key, by_both] {
        for (status, found) in
            [(Status::Queued, vec![id]), (Status::Succeeded, vec![]), (Status::Running, vec![])]
        {
            let by = ListFilter { statuses: vec![status], ..by.clone() };
            assert_eq!(all(&fixture, &by).await, found, "{by:?}");
        }
        let other_kind = ListFilter { kind: Some("sms".into()), ..by };
        assert_eq!(all(&fixture, &other_kind).await, [], "{other_kind:?}");
    }
    for (idempotency_key, unique_key) in
        [("i-2", "u-1"), ("i-1", "u-2"), ("i-1", "unknown"), ("unknown", "u-1")]
    {
        let by = ListFilter {
            idempotency_key: Some(idempotency_key.into()),
            unique_key: Some(unique_key.into()),
            ..filter()
        };
        assert_eq!(all(&fixture, &by).await, [], "{by:?}");
    }
}

async fn consecutive_pages_have_no_gap_and_no_overlap(fixture: Fixture) {
    let jobs = (0..25).map(|n| NewJob::new(if n % 2 == 0 { "even" } else { "odd" }, &n));
    let mut expected: Vec<_> =
        fixture.enqueue_many(jobs).await.expect("enqueue").iter().map(|e| e.id).collect();
    expected.sort();
    expected.reverse();
    assert_eq!(all(&fixture, &ListFilter { limit: 7, ..filter() }).await, expected);
    let even = ListFilter { limit: 3, kind: Some("even".into()), ..filter() };
    assert_eq!(all(&fixture, &even).await.len(), 13);
    let queued = ListFilter { limit: 4, statuses: vec![Status::Queued], ..filter() };
    assert_eq!(all(&fixture, &queued).await, expected);
}

async fn the_page_limit_is_clamped_to_between_1_and_200(fixture: Fixture) {
    fixture.enqueue_many((0..205).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    for (limit, expected) in [(0, 1), (1, 1), (50, 50), (200, 200), (9999, 200)] {
        let page = fixture.list(&ListFilter { limit, ..filter() }).await.expect("list");
        assert_eq!((page.jobs.len(), page.next.is_some()), (expected, true), "{limit}");
    }
}

async fn an_offset_skips_matches_up_to_its_maximum(fixture: Fixture) {
    let jobs = (0..6).map(|n| NewJob::new(if n % 2 == 0 { "even" } else { "odd" }, &n));
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let everything = all(&fixture, &filter()).await;
    let page = fixture.list(&ListFilter { offset: 4, ..filter() }).await.expect("list");
    assert_eq!(listed(&page), everything[4..]);
    let even = ListFilter { kind: Some("even".into()), ..filter() };
    let second = ListFilter { offset: 1, limit: 1, ..even.clone() };
    assert_eq!(listed(&fixture.list(&second).await.expect("list")), all(&fixture, &even).await[1..2]);
    let far = ListFilter { offset: ListFilter::MAX_OFFSET, ..filter() };
    assert_eq!(fixture.list(&far).await.expect("list").jobs.len(), 0);
    let too_far = ListFilter { offset: ListFilter::MAX_OFFSET + 1, ..filter() };
    let error = fixture.list(&too_far).await.expect_err("too far");
    assert_eq!(error.field(), Some("offset"));
    assert!(error.to_string().contains("cursor"), "{error}");
}

/// The time is taken from the id, not from the engine's clock.
async fn a_list_by_time_finds_the_jobs_created_then(fixture: Fixture) {
    let at = |n: u64| DateTime::from_timestamp_millis(1_900_000_000_000 + n as i64).expect("a time");
    let created = |n: u64| {
        let bytes: u128 = ((1_900_000_000_000 + u128::from(n)) << 80) | (7 << 76) | (1 << 63) | u128::from(n);
        JobId(uuid::Uuid::from_u128(bytes))
    };
    for n in 0..6 {
        fixture.add(job("mail").id(created(n)).idempotency_key(format!("k-{n}"))).await;
    }
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 3).await;
    fixture.must_finish(&claimed[0], done()).await;
    let between = |from, to| ListFilter { newer_than: from, older_than: to, ..filter() };
    let find = async |by: ListFilter| all(&fixture, &by).await;
    let newest_first = |range: std::ops::Range<u64>| range.rev().map(created).collect::<Vec<_>>();
    assert_eq!(find(between(None, Some(at(4)))).await, newest_first(0..4));
    assert_eq!(find(between(Some(at(4)), None)).await, newest_first(4..6));
    assert_eq!(find(between(Some(at(1)), Some(at(5)))).await, newest_first(1..5));
    assert_eq!(find(ListFilter { limit: 2, ..between(Some(at(1)), Some(at(5))) }).await, newest_first(1..5));
    assert_eq!(find(between(Some(at(5)), Some(at(1)))).await, []);
    let with = |status| ListFilter { statuses: vec![status], ..between(Some(at(1)), Some(at(5))) };
    assert_eq!(find(with(Status::Queued)).await, newest_first(3..5));
    assert_eq!(find(with(Status::Running)).await, newest_first(1..3));
    assert_eq!(find(with(Status::Succeeded)).await, []);
    let keyed =
        |n: u64| ListFilter { idempotency_key: Some(format!("k-{n}")), ..between(Some(at(1)), Some(at(5))) };
    assert_eq!((find(keyed(0)).await, find(keyed(1)).await), (vec![], vec![created(1)]));
    let (first, last) = (DateTime::<Utc>::MIN_UTC, DateTime::<Utc>::MAX_UTC);
    assert_eq!(find(between(Some(first), Some(last))).await, newest_first(0..6));
    assert_eq!(find(between(Some(last), Some(first))).await, []);
}

/// Enqueues 11,000 jobs of one kind.
async fn enqueue_many_others(fixture: &Fixture) {
    for _ in 0..2 {
        let bulk = (0..5500).map(|_| job("common"));
        fixture.enqueue_many(bulk).await.expect("enqueue");
    }
}

/// Filters that only the job `rare` with the tag `needle` matches.
fn rare_filters(search_time: Duration) -> [ListFilter; 3] {
    let filter = ListFilter { search_time, ..filter() };
    [
        ListFilter { kind: Some("rare".into()), ..filter.clone() },
        ListFilter { tag: Some("needle".into()), ..filter.clone() },
        ListFilter { kind: Some("rare".into()), statuses: vec![Status::Queued], ..filter },
    ]
}

/// A filter that matches few jobs must not read the whole table for one page. It returns
/// short pages instead.
async fn a_rare_match_is_found_by_following_short_pages(fixture: Fixture) {
    let rare = fixture.add(job("rare").tags(["needle"])).await;
    enqueue_many_others(&fixture).await;
    for by in rare_filters(Duration::ZERO) {
        let page = fixture.list(&by).await.expect("list");
        assert!(page.jobs.is_empty() && page.next.is_some(), "{by:?} examined too many rows");
        assert_eq!(all(&fixture, &by).await, [rare], "{by:?}");
    }
}

async fn a_page_is_searched_until_it_is_full(fixture: Fixture) {
    let rare = fixture.add(job("rare").tags(["needle"])).await;
    enqueue_many_others(&fixture).await;
    for by in rare_filters(MINUTE) {
        let page = fixture.list(&by).await.expect("list");
        assert_eq!((listed(&page), page.next), (vec![rare], None), "{by:?}");
    }
    let many = ListFilter { kind: Some("common".into()), search_time: MINUTE, limit: 200, ..filter() };
    let page = fixture.list(&many).await.expect("list");
    assert_eq!((page.jobs.len(), page.next), (200, listed(&page).last().copied()));
}

/// One step of a search does not reach these jobs, so they come from their own indexes.
async fn the_live_jobs_of_a_queue_are_found_at_once_among_many_others(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let add = async |kind: &str, priority| {
        fixture.add(job(kind).queue("small").priority(priority).max_attempts(5)).await
    };
    let finished = add("mail", 9).await;
    let ended = fixture.claim_from("small", worker, 1).await;
    fixture.must_finish(&ended[0], done()).await;
    let retrying = add("mail", 8).await;
    let failing = fixture.claim_from("small", worker, 1).await;
    fixture.must_finish(&failing[0], failed()).await;
    let running = add("sms", 7).await;
    assert_eq!(ids(&fixture.claim_from("small", worker, 1).await), [running]);
    // The order of their claims is not the order of their ids.
    let queued = [add("mail", 1).await, add("sms", 3).await, add("mail", 2).await];
    enqueue_many_others(&fixture).await;
    let of = |statuses| ListFilter {
        queue: Some("small".into()),
        statuses,
        search_time: Duration::ZERO,
        ..filter()
    };
    let find = async |filter: ListFilter| {
        let page = fixture.list(&filter).await.expect("list");
        assert_eq!(page.next, None, "{filter:?}");
        listed(&page)
    };
    let newest_first = [queued[2], queued[1], queued[0], running, retrying, finished];
    assert_eq!(find(of(vec![])).await, newest_first);
    assert_eq!(find(of(vec![Status::Queued])).await, newest_first[..3]);
    assert_eq!(find(of(vec![Status::Running])).await, [running]);
    assert_eq!(find(of(vec![Status::Retrying])).await, [retrying]);
    assert_eq!(find(of(vec![Status::Succeeded])).await, [finished]);
    let sms = ListFilter { kind: Some("sms".into()), ..of(vec![]) };
    assert_eq!(find(sms).await, [queued[1], running]);
    let mail = ListFilter { kind: Some("mail".into()), ..of(vec![Status::Queued]) };
    assert_eq!(find(mail).await, [queued[2], queued[0]]);
    for limit in [1, 2, 4] {
        assert_eq!(all(&fixture, &ListFilter { limit, ..of(vec![]) }).await, newest_first, "{limit}");
    }
    let after = ListFilter { cursor: Some(queued[1]), offset: 1, ..of(vec![]) };
    assert_eq!(find(after).await, newest_first[3..]);
}

/// Runs 1,500 jobs of one kind, more than one step of a search examines.
async fn finish_many_others(fixture: &Fixture) {
    fixture.enqueue_many((0..1500).map(|_| job("common"))).await.expect("enqueue");
    let worker = fixture.worker_with(DAY).await;
    loop {
        let claimed = fixture.claim(worker, 500).await;
        let report =
            |claimed| Report { claimed, ending: done(), follow_ups: Vec::new(), has_progressed: false };
        if claimed.is_empty() {
            return;
        }
        fixture.settle(claimed.iter().map(report).collect()).await.expect("settle");
    }
}

async fn live_jobs_are_listed_in_order_among_finished_ones(fixture: Fixture) {
    let waiting = fixture.add(job("mail").queue("small").delay(DAY)).await;
    let finished = fixture.add(job("mail").queue("small")).await;
    let worker = fixture.worker_with(DAY).await;
    let claimed = fixture.claim_from("small", worker, 1).await;
    fixture.must_finish(&claimed[0], done()).await;
    finish_many_others(&fixture).await;
    let newest = fixture.add(job("mail").queue("small").delay(DAY)).await;
    let small = ListFilter { queue: Some("small".into()), search_time: Duration::ZERO, ..filter() };
    let first = fixture.list(&small).await.expect("list");
    assert_eq!((listed(&first), first.next.is_some()), (vec![newest], true), "the others are older");
    assert_eq!(all(&fixture, &small).await, [newest, finished, waiting]);
    // A live job that is older than what was searched does not fill the page.
    let two = ListFilter { limit: 2, search_time: MINUTE, ..small };
    assert_eq!(listed(&fixture.list(&two).await.expect("list")), [newest, finished]);
}

/// The tallies say so.
async fn a_list_of_a_kind_or_queue_without_finished_jobs_does_not_read_them(fixture: Fixture) {
    finish_many_others(&fixture).await;
    let waiting = fixture.enqueue_kind("rare").await;
    let by = ListFilter { search_time: Duration::ZERO, ..filter() };
    let find = async |filter: ListFilter| {
        let page = fixture.list(&filter).await.expect("list");
        (listed(&page), page.next.is_some())
    };
    let unknown = ListFilter { queue: Some("unknown".into()), ..by.clone() };
    assert_eq!(find(unknown.clone()).await, (vec![], false));
    assert_eq!(find(ListFilter { statuses: vec![Status::Succeeded], ..unknown }).await, (vec![], false));
    let rare = ListFilter { kind: Some("rare".into()), ..by.clone() };
    assert_eq!(find(rare.clone()).await, (vec![waiting], false));
    assert_eq!(find(ListFilter { statuses: vec![Status::Cancelled], ..rare.clone() }).await, (vec![], false));
    // Once there is one, it is looked for.
    fixture.cancel(waiting).await.expect("cancel");
    assert_eq!(all(&fixture, &rare).await, [waiting]);
    assert_eq!(all(&fixture, &ListFilter { statuses: vec![Status::Cancelled], ..rare }).await, [waiting]);
}

async fn a_page_that_ends_early_keeps_the_rest_of_its_offset(fixture: Fixture) {
    let mut rare = Vec::new();
    for _ in 0..4 {
        rare.push(fixture.enqueue_kind("rare").await);
    }
    rare.reverse();
    enqueue_many_others(&fixture).await;
    let mut by = ListFilter { kind: Some("rare".into()), offset: 3, search_time: Duration::ZERO, ..filter() };
    let first = fixture.list(&by).await.expect("list");
    assert_eq!((listed(&first), first.next_offset), (vec![], 3));
    let mut page = first;
    while let Some(next) = page.next {
        (by.cursor, by.offset) = (Some(next), page.next_offset);
        page = fixture.list(&by).await.expect("list");
    }
    assert_eq!(listed(&page), rare[3..]);
}

/// A page counts the matches that it skips.
async fn the_maximum_offset_is_reached_in_one_page(fixture: Fixture) {
    enqueue_many_others(&fixture).await;
    let far = ListFilter {
        offset: ListFilter::MAX_OFFSET,
        kind: Some("common".into()),
        search_time: MINUTE,
        ..filter()
    };
    assert_eq!(fixture.list(&far).await.expect("list").jobs.len(), 50);
}

async fn a_cursor_of_a_deleted_job_still_works(fixture: Fixture) {
    let old = fixture.enqueue_kind("mail").await;
    let gone = fixture.enqueue_kind("sms").await;
    fixture.cancel(gone).await.expect("cancel");
    fixture.delete(gone).await.expect("delete");
    let page = fixture.list(&ListFilter { cursor: Some(gone), ..filter() }).await.expect("list");
    assert_eq!(listed(&page), [old]);
}

// ---- large jobs and long histories ------------------------------------------

/// Jobs of one queue that differ in priority, time and id, one of them a suspect: for
/// each, as many jobs are ahead as a claim takes before it.
/// Text of this length. Compressible text repeats one letter.
fn text(bytes: usize, compressible: bool) -> String {
    if compressible {
        return "p".repeat(bytes);
    }
    let mut state = 1_u64;
    let letter = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(b'a' + ((state >> 33) % 26) as u8)
    };
    (0..bytes).map(letter).collect()
}

async fn a_page_of_large_jobs_ends_early_and_the_next_one_continues(fixture: Fixture) {
    let texts = [text(1_000_000, true), text(1_000_000, false), text(10, true)];
    let mut expected = Vec::new();
    for i in 0..30 {
        let text = if i % 7 == 3 { &texts[2] } else { &texts[i % 2] };
        expected.push(fixture.add(NewJob::new("mail", text)).await);
    }
    expected.reverse();
    for limit in [200, 3] {
        let mut filter = ListFilter { limit, ..filter() };
        let mut found = Vec::new();
        loop {
            let page = fixture.list(&filter).await.expect("list");
            let bytes: usize = page.jobs.iter().map(|job| job.payload.get().len()).sum();
            assert!(bytes <= ListFilter::MAX_BYTES, "{bytes}");
            if page.next.is_some() {
                // Without the limit on bytes there would be only one page.
                assert!(page.jobs.len() == limit as usize || bytes > ListFilter::MAX_BYTES - 1_000_100);
                assert_eq!(page.next, listed(&page).last().copied());
            }
            found.extend(listed(&page));
            match page.next {
                Some(next) => filter.cursor = Some(next),
                None => break,
            }
        }
        assert_eq!(found, expected);
    }
    // An offset skips jobs without counting their bytes.
    let page = fixture.list(&ListFilter { offset: 20, limit: 200, ..filter() }).await.expect("list");
    assert_eq!(listed(&page)[..4], expected[20..24]);
    assert!(page.next.is_some());
    // A single job may be larger than what is left.
    let page = fixture.list(&ListFilter { limit: 1, ..filter() }).await.expect("list");
    assert_eq!(listed(&page), expected[..1]);
}

async fn every_large_field_counts_towards_the_size_of_a_page(fixture: Fixture) {
    let large = text(60_000, true);
    let json = |i: usize| raw(&format!("\"{}{i}\"", large));
    // Each job has about 180 KB in metadata and an error or progress, and no large payload.
    for i in 0..70 {
        let claimed = fixture.running(job("mail").metadata(json(i))).await;
        match i % 2 {
            0 => {
                let failed = Ending::Failed { error: format!("{large}{i}"), retry_in: None };
                fixture.must_finish(&claimed, failed).await;
            }
            _ => {
                let reports = [(claimed.lease(), json(i))];
                assert_eq!(fixture.progress(&reports).await.expect("progress"), [Fenced::Held]);
            }
        }
    }
    for payloads in [Payloads::Include, Payloads::Omit] {
        let filter = ListFilter { limit: 200, payloads, ..filter() };
        let page = fixture.list(&filter).await.expect("list");
        assert_eq!(page.jobs.len(), ListFilter::MAX_BYTES / 120_000, "{}", page.jobs.len());
        assert_eq!(all(&fixture, &filter).await.len(), 70);
    }
}

async fn a_list_without_payloads_contains_everything_else(fixture: Fixture) {
    for i in 0..10 {
        let large = NewJob::new("mail", &text(900_000, i % 2 == 0)).tags(["large"]);
        fixture.ended(large, Outcome::Succeeded).await;
    }
    let with = fixture.list(&ListFilter { limit: 200, ..filter() }).await.expect("list");
    assert!(with.jobs.len() < 10);
    let filter = ListFilter { limit: 200, payloads: Payloads::Omit, ..filter() };
    let without = fixture.list(&filter).await.expect("list");
    assert_eq!((without.jobs.len(), without.next), (10, None));
    for (job, full) in without.jobs.iter().zip(&with.jobs) {
        assert_eq!(job.payload.get(), "null");
        assert!(job.result.is_none() && full.result.is_some());
        let mut expected = full.clone();
        (expected.payload, expected.result) = (job.payload.clone(), None);
        assert_eq!(snapshot(job), snapshot(&expected));
    }
}

async fn a_job_is_shown_with_its_newest_hundred_attempts(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let worker = fixture.worker_with(DAY).await;
    for _ in 0..120 {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, snoozed()).await;
        fixture.advance(20 * SECOND).await;
    }
    let shown: Vec<i32> = fixture.job(id).await.errors.iter().map(|attempt| attempt.lease_no).collect();
    assert_eq!(shown, (21..=120).collect::<Vec<_>>());
}

// ---- bounded histories and glances --------------------------------

async fn a_job_keeps_its_newest_hundred_attempts_and_its_newest_error(fixture: Fixture) {
    let worker = fixture.worker_with(400 * DAY).await;
    let id = fixture.add(job("mail").max_attempts(9)).await;
    let snoozed = || Ending::Snoozed { delay: Duration::ZERO };
    let attempt = async |ending| {
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, ending).await;
    };
    let expect = async |kept: usize, omitted: u32, first_lease: i32| {
        let record = fixture.job(id).await;
        assert_eq!((record.errors.len(), record.errors_omitted), (kept, omitted));
        assert_eq!(record.errors[0].lease_no, first_lease);
        let leases: Vec<i32> = record.errors[1..].iter().map(|attempt| attempt.lease_no).collect();
        let newest = record.lease_no;
        assert_eq!(leases, (newest + 2 - kept as i32..=newest).collect::<Vec<_>>());
        record
    };
    attempt(Ending::Failed { error: "the first error".into(), retry_in: Some(Duration::ZERO) }).await;
    for _ in 0..99 {
        attempt(snoozed()).await;
    }
    expect(100, 0, 1).await;
    attempt(snoozed()).await;
    expect(101, 0, 1).await;
    for _ in 0..400 {
        attempt(snoozed()).await;
    }
    let record = expect(101, 400, 1).await;
    assert_eq!(record.last_error.as_deref(), Some("the first error"));
    assert_eq!(record.last_failed_at, Some(record.errors[0].ended_at));
    attempt(Ending::Failed { error: "the second error".into(), retry_in: Some(Duration::ZERO) }).await;
    let record = expect(100, 402, 403).await;
    assert_eq!(record.last_error.as_deref(), Some("the second error"));
    // The number survives the end of the job and an operator's retry.
    attempt(failed_permanently()).await;
    assert_eq!(fixture.job(id).await.errors_omitted, 403);
    fixture.retry(id).await.expect("retry");
    attempt(snoozed()).await;
    expect(100, 404, 405).await;
    fixture.cancel(id).await.expect("cancel");
    assert_eq!(fixture.job(id).await.last_error, Some("no such mailbox".into()));
    fixture.delete(id).await.expect("delete");
    let rows = fixture.query_number("select count(*) from attempts", None).await;
    assert_eq!(rows, 0);
}

async fn a_glance_shows_the_newest_the_running_and_the_requested_jobs_as_get_does(fixture: Fixture) {
    let mut old = Vec::new();
    for outcome in Outcome::ALL {
        old.push(fixture.ended(job("mail"), outcome).await);
    }
    old.push(fixture.suspect(job("mail")).await);
    let worker = fixture.worker().await;
    old.push(fixture.add(job("mail").priority(9)).await);
    assert_eq!(ids(&fixture.claim(worker, 1).await), old[old.len() - 1..]);
    let other = fixture.add(job("mail")).await;
    let mut newest = Vec::new();
    for _ in 0..3 {
        newest.push(fixture.add(job("ship").queue("harbour")).await);
    }
    old.push(JobId::new());
    let claimed = fixture.add(job("urgent").priority(100)).await;
    assert_eq!(ids(&fixture.claim(worker, 1).await), [claimed]);
    fixture.cancel(claimed).await.expect("cancel");
    newest.push(claimed);

    let seen = fixture.store().glance(4, &old).await.expect("glance");
    let mut expected: Vec<JobId> = old[..old.len() - 1].iter().chain(&newest).copied().collect();
    expected.sort();
    assert_eq!(seen.iter().map(|job| job.id).collect::<Vec<_>>(), expected, "{other} must be missing");
    for glance in seen {
        let job = fixture.job(glance.id).await;
        assert_eq!((&glance.kind, &glance.queue, glance.status), (&job.kind, &job.queue, job.status));
        assert_eq!((glance.attempts, glance.cancel_requested), (job.attempts, job.cancel_requested));
    }
    let seen = fixture.store().glance(1, &[]).await.expect("glance");
    assert_eq!(
        seen.iter().map(|job| job.id).collect::<Vec<_>>(),
        [claimed],
        "the newest job is also the running one"
    );
}
