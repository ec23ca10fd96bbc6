//! How many jobs a claim takes before a given one.

use longshore::store::Ahead;
use longshore::{JobId, ListFilter, Status};

use crate::fixture::*;
use crate::inspect::{filter, listed, one_of_each};

cases! {
    the_jobs_ahead_are_those_a_claim_takes_first,
    suspects_count_as_jobs_ahead,
    jobs_ahead_are_counted_up_to_a_limit,
    only_jobs_of_the_given_kinds_count_as_ahead,
    the_count_of_jobs_ahead_says_when_it_may_be_too_low,
    a_job_due_later_is_not_ahead_of_a_due_job,
    a_job_that_does_not_wait_has_no_jobs_ahead,
}

async fn ahead(fixture: &Fixture, id: JobId) -> Option<u32> {
    fixture.ahead(id, 100).await.expect("ahead")
}

async fn the_jobs_ahead_are_those_a_claim_takes_first(fixture: Fixture) {
    fixture.suspect(job("suspect").priority(3)).await;
    for priority in [3, -5, 0, 3, 7] {
        for delay in [20 * SECOND, SECOND, 20 * SECOND] {
            fixture.add(job("mail").priority(priority).delay(delay)).await;
        }
    }
    fixture.add(job("mail").queue("other").priority(9)).await;
    fixture.advance(MINUTE / 2).await;
    let page = fixture.list(&ListFilter { queue: Some("default".into()), ..filter() }).await.expect("list");
    let mut by_ahead = Vec::new();
    for id in listed(&page) {
        by_ahead.push((ahead(&fixture, id).await.expect("a waiting job"), id));
    }
    by_ahead.sort();
    let worker = fixture.worker().await;
    let expected: Vec<_> = (0..).zip(ids(&fixture.claim(worker, 100).await)).collect();
    assert_eq!(expected.len(), 16);
    assert_eq!(by_ahead, expected);
}

/// All suspects are ahead, although a claim takes only one of them at a time.
async fn suspects_count_as_jobs_ahead(fixture: Fixture) {
    fixture.add(job("a")).await;
    fixture.add(job("b").priority(2)).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    let last = fixture.add(job("c").delay(SECOND)).await;
    assert_eq!(ahead(&fixture, last).await, Some(2));
    let first = fixture.add(job("d").priority(1)).await;
    assert_eq!((ahead(&fixture, first).await, ahead(&fixture, last).await), (Some(1), Some(3)));
}

async fn jobs_ahead_are_counted_up_to_a_limit(fixture: Fixture) {
    fixture.enqueue_many((0..30).map(|_| job("mail").priority(1))).await.expect("enqueue");
    let last = fixture.enqueue_kind("mail").await;
    for (limit, counted) in [(0, 0), (1, 1), (29, 29), (30, 30), (31, 30), (u32::MAX, 30)] {
        assert_eq!(fixture.ahead(last, limit).await.expect("ahead"), Some(counted), "{limit}");
    }
}

async fn only_jobs_of_the_given_kinds_count_as_ahead(fixture: Fixture) {
    fixture.suspect(job("mail").priority(3)).await;
    for kind in ["other", "mail", "sms", "other", "mail"] {
        fixture.add(job(kind).priority(1)).await;
    }
    let last = fixture.enqueue_kind("mail").await;
    for (kinds, counted) in [(vec!["mail"], 3), (vec!["mail", "sms"], 4), (vec!["fax"], 0), (vec![], 0)] {
        let kinds: Vec<String> = kinds.into_iter().map(Into::into).collect();
        let ahead = fixture.store().ahead(last, Some(&kinds), 100).await.expect("ahead");
        assert_eq!(ahead, Some(Ahead { jobs: counted, or_more: false }), "{kinds:?}");
    }
    assert_eq!(ahead(&fixture, last).await, Some(6));
}

/// Jobs of other kinds use up the limit as well.
async fn the_count_of_jobs_ahead_says_when_it_may_be_too_low(fixture: Fixture) {
    fixture.enqueue_many((0..9).map(|_| job("other").priority(1))).await.expect("enqueue");
    let last = fixture.enqueue_kind("mail").await;
    for (limit, or_more) in [(8, true), (10, false)] {
        let ahead = fixture.store().ahead(last, Some(&["mail".into()]), limit).await.expect("ahead");
        assert_eq!(ahead, Some(Ahead { jobs: 0, or_more }), "{limit}");
    }
}

async fn a_job_due_later_is_not_ahead_of_a_due_job(fixture: Fixture) {
    fixture.add(job("mail").priority(5).delay(MINUTE)).await;
    fixture.add(job("mail").priority(5).delay(HOUR)).await;
    let now = fixture.enqueue_kind("mail").await;
    let later = fixture.add(job("mail").delay(2 * MINUTE)).await;
    assert_eq!((ahead(&fixture, now).await, ahead(&fixture, later).await), (Some(0), Some(2)));
    fixture.advance(MINUTE).await;
    assert_eq!((ahead(&fixture, now).await, ahead(&fixture, later).await), (Some(1), Some(2)));
}

async fn a_job_that_does_not_wait_has_no_jobs_ahead(fixture: Fixture) {
    for (status, id) in one_of_each(&fixture).await {
        let waits = matches!(status, Status::Queued | Status::Retrying);
        assert_eq!(ahead(&fixture, id).await.is_some(), waits, "{status}");
    }
    assert_eq!(ahead(&fixture, JobId::new()).await, None);
}
