//! A claimer that remembers how far it has looked still finds everything.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use longshore::store::{ClaimCursor, ClaimRequest, Claimed};
use longshore::{Edit, JobId, When, WorkerId};

use crate::fixture::*;

cases! {
    jobs_of_one_instant_are_each_claimed_once_across_the_cursor,
    a_job_that_arrives_behind_the_cursor_is_found,
    a_job_of_a_new_higher_priority_is_found,
    a_job_of_a_queue_that_was_empty_is_found,
    jobs_that_come_due_behind_the_cursor_are_found,
    a_retried_job_is_found_again,
    an_edited_job_is_found_at_its_new_place,
    thousands_of_foreign_kinds_in_front_do_not_hide_a_job,
    a_question_about_other_kinds_starts_at_the_head,
    a_cursor_that_always_starts_at_the_head_finds_the_same,
    two_claimers_with_memories_share_all_jobs_between_them,
}

/// A claimer with a memory.
struct Claimer {
    fixture: Fixture,
    request: ClaimRequest,
    cursor: ClaimCursor,
}

impl Claimer {
    async fn new(fixture: &Fixture, limit: u32) -> Self {
        let worker = fixture.worker_with(DAY).await;
        Claimer::of(fixture, ClaimRequest::new(worker, limit))
    }

    fn of(fixture: &Fixture, request: ClaimRequest) -> Self {
        Claimer { fixture: fixture.clone(), request, cursor: ClaimCursor::default() }
    }

    async fn claim(&mut self) -> Vec<Claimed> {
        self.fixture.store().claim(&self.request, &mut self.cursor).await.expect("claim").jobs
    }

    /// Claims as a worker does, again and again, until `id` comes. How soon a
    /// claimer looks at the head again is timed on the monotonic clock, so
    /// this waits for a result, with a generous end.
    async fn claim_until(&mut self, id: JobId) -> Vec<Claimed> {
        let began = Instant::now();
        loop {
            let claimed = self.claim().await;
            if claimed.iter().any(|job| job.lease().id == id) {
                return claimed;
            }
            assert!(began.elapsed() < Duration::from_secs(20), "the claimer never found the job");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn fill(fixture: &Fixture, count: usize, kind: &str) {
    fixture.enqueue_many((0..count).map(|_| job(kind))).await.expect("enqueue");
}

async fn jobs_of_one_instant_are_each_claimed_once_across_the_cursor(fixture: Fixture) {
    fill(&fixture, 50, "mail").await;
    let mut claimer = Claimer::new(&fixture, 7).await;
    let mut seen = BTreeSet::new();
    while seen.len() < 50 {
        let claimed = claimer.claim().await;
        assert!(!claimed.is_empty(), "{} of 50 found", seen.len());
        for job in claimed {
            assert!(seen.insert(job.lease().id), "claimed twice");
        }
    }
}

async fn a_job_that_arrives_behind_the_cursor_is_found(fixture: Fixture) {
    fill(&fixture, 40, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    claimer.claim().await;
    let late = fixture.add(job("late").run_at(start() - HOUR)).await;
    claimer.claim_until(late).await;
}

async fn a_job_of_a_new_higher_priority_is_found(fixture: Fixture) {
    fill(&fixture, 40, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    let urgent = fixture.add(job("urgent").priority(50)).await;
    let claimed = claimer.claim_until(urgent).await;
    assert_eq!(claimed[0].lease().id, urgent, "the higher priority comes first");
}

async fn a_job_of_a_queue_that_was_empty_is_found(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let queues = vec!["default".into(), "late".into()];
    let mut claimer = Claimer::of(&fixture, ClaimRequest { queues, ..ClaimRequest::new(worker, 2) });
    fill(&fixture, 40, "mail").await;
    claimer.claim().await;
    let late = fixture.add(job("late").queue("late")).await;
    claimer.claim_until(late).await;
}

async fn jobs_that_come_due_behind_the_cursor_are_found(fixture: Fixture) {
    let soon = fixture.add(job("soon").delay(MINUTE)).await;
    fill(&fixture, 4, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    claimer.claim().await;
    assert_eq!(claimer.claim().await.len(), 0);
    fixture.advance(2 * MINUTE).await;
    claimer.claim_until(soon).await;
}

async fn a_retried_job_is_found_again(fixture: Fixture) {
    fill(&fixture, 6, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    let first = claimer.claim().await.remove(0);
    fixture.must_finish(&first, failed()).await;
    claimer.claim().await;
    fixture.advance(MINUTE).await;
    let found = claimer.claim_until(first.lease().id).await;
    assert!(found.iter().any(|job| job.attempt() == 2));
}

async fn an_edited_job_is_found_at_its_new_place(fixture: Fixture) {
    let later = fixture.add(job("later").delay(HOUR)).await;
    fill(&fixture, 6, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    let hurry = Edit::default().when(When::At(start() - DAY)).priority(-4);
    fixture.edit(later, hurry).await.expect("edit");
    claimer.claim_until(later).await;
}

async fn thousands_of_foreign_kinds_in_front_do_not_hide_a_job(fixture: Fixture) {
    fill(&fixture, 5000, "foreign").await;
    let own = fixture.add(job("own").priority(-1)).await;
    let last = fixture.enqueue_kind("own").await;
    let worker: WorkerId = fixture.worker_with(DAY).await;
    let kinds = Some(vec!["own".into()]);
    let mut claimer = Claimer::of(&fixture, ClaimRequest { kinds, ..ClaimRequest::new(worker, 2) });
    let claimed = claimer.claim_until(last).await;
    if !claimed.iter().any(|job| job.lease().id == own) {
        claimer.claim_until(own).await;
    }
}

async fn a_question_about_other_kinds_starts_at_the_head(fixture: Fixture) {
    fill(&fixture, 10, "foreign").await;
    fill(&fixture, 10, "own").await;
    let mut claimer = Claimer::new(&fixture, 4).await;
    claimer.request.kinds = Some(vec!["own".into()]);
    assert_eq!(claimer.claim().await.len(), 4);
    claimer.request.kinds = Some(vec!["foreign".into()]);
    let claimed = claimer.claim().await;
    assert_eq!(kinds(&claimed), ["foreign"; 4]);
}

async fn a_cursor_that_always_starts_at_the_head_finds_the_same(fixture: Fixture) {
    fill(&fixture, 20, "mail").await;
    let mut claimer = Claimer::new(&fixture, 3).await;
    claimer.cursor = ClaimCursor::always_head();
    let mut seen = BTreeSet::new();
    loop {
        let claimed = claimer.claim().await;
        if claimed.is_empty() {
            break;
        }
        seen.extend(claimed.iter().map(|job| job.lease().id));
    }
    assert_eq!(seen.len(), 20);
}

async fn two_claimers_with_memories_share_all_jobs_between_them(fixture: Fixture) {
    fill(&fixture, 60, "mail").await;
    let mut claimers = [Claimer::new(&fixture, 3).await, Claimer::new(&fixture, 4).await];
    let mut seen = BTreeSet::new();
    while seen.len() < 60 {
        for claimer in &mut claimers {
            for job in claimer.claim().await {
                assert!(seen.insert(job.lease().id), "claimed twice");
            }
        }
    }
}
