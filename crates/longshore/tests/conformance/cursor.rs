//! The claim cursor: a claimer that resumes where its last claim ended still finds
//! every job.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use longshore::store::{ClaimCursor, ClaimRequest, Claimed};
use longshore::{Edit, JobId, When, WorkerId};

use crate::fixture::*;

cases! {
    jobs_due_at_one_instant_are_each_claimed_once,
    a_job_that_arrives_behind_the_cursor_is_found,
    a_job_of_a_new_higher_priority_is_found,
    a_job_of_a_queue_that_was_empty_is_found,
    jobs_that_come_due_behind_the_cursor_are_found,
    a_retried_job_is_found_again,
    an_edited_job_is_found_at_its_new_position,
    thousands_of_unhandled_jobs_in_front_do_not_hide_a_job,
    a_claim_of_other_kinds_starts_at_the_head,
    a_cursor_that_always_starts_at_the_head_finds_every_job,
    two_claimers_with_cursors_claim_all_jobs_without_overlap,
}

/// A claimer that keeps its cursor between claims.
pub(crate) struct Claimer {
    fixture: Fixture,
    request: ClaimRequest,
    cursor: ClaimCursor,
}

impl Claimer {
    pub(crate) async fn new(fixture: &Fixture, limit: u32) -> Self {
        let worker = fixture.worker_with(DAY).await;
        Claimer::with_request(fixture, ClaimRequest::new(worker, limit))
    }

    fn with_request(fixture: &Fixture, request: ClaimRequest) -> Self {
        Claimer { fixture: fixture.clone(), request, cursor: ClaimCursor::default() }
    }

    pub(crate) async fn claim(&mut self) -> Vec<Claimed> {
        self.fixture.store().claim(&self.request, &mut self.cursor).await.expect("claim").jobs
    }

    /// Claims repeatedly, as a worker does, until `id` is claimed. When a cursor
    /// returns to the head depends on the monotonic clock, which cases cannot move,
    /// so this waits for the result, with a generous timeout.
    pub(crate) async fn claim_until(&mut self, id: JobId) -> Vec<Claimed> {
        let began = Instant::now();
        loop {
            let claimed = self.claim().await;
            if claimed.iter().any(|job| job.lease().id == id) {
                return claimed;
            }
            assert!(began.elapsed() < MAX_WAIT, "the claimer did not find the job");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn enqueue_many(fixture: &Fixture, count: usize, kind: &str) {
    fixture.enqueue_many((0..count).map(|_| job(kind))).await.expect("enqueue");
}

async fn jobs_due_at_one_instant_are_each_claimed_once(fixture: Fixture) {
    enqueue_many(&fixture, 50, "mail").await;
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
    enqueue_many(&fixture, 40, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    claimer.claim().await;
    let late = fixture.add(job("late").run_at(start() - HOUR)).await;
    claimer.claim_until(late).await;
}

async fn a_job_of_a_new_higher_priority_is_found(fixture: Fixture) {
    enqueue_many(&fixture, 40, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    let urgent = fixture.add(job("urgent").priority(50)).await;
    let claimed = claimer.claim_until(urgent).await;
    assert_eq!(claimed[0].lease().id, urgent, "the higher priority is claimed first");
}

async fn a_job_of_a_queue_that_was_empty_is_found(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let queues = vec!["default".into(), "late".into()];
    let mut claimer =
        Claimer::with_request(&fixture, ClaimRequest { queues, ..ClaimRequest::new(worker, 2) });
    enqueue_many(&fixture, 40, "mail").await;
    claimer.claim().await;
    let late = fixture.add(job("late").queue("late")).await;
    claimer.claim_until(late).await;
}

async fn jobs_that_come_due_behind_the_cursor_are_found(fixture: Fixture) {
    let soon = fixture.add(job("soon").delay(MINUTE)).await;
    enqueue_many(&fixture, 4, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    claimer.claim().await;
    assert_eq!(claimer.claim().await.len(), 0);
    fixture.advance(2 * MINUTE).await;
    claimer.claim_until(soon).await;
}

async fn a_retried_job_is_found_again(fixture: Fixture) {
    enqueue_many(&fixture, 6, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    let first = claimer.claim().await.remove(0);
    fixture.must_finish(&first, failed()).await;
    claimer.claim().await;
    fixture.advance(MINUTE).await;
    let found = claimer.claim_until(first.lease().id).await;
    assert!(found.iter().any(|job| job.attempt() == 2));
}

async fn an_edited_job_is_found_at_its_new_position(fixture: Fixture) {
    let later = fixture.add(job("later").delay(HOUR)).await;
    enqueue_many(&fixture, 6, "mail").await;
    let mut claimer = Claimer::new(&fixture, 2).await;
    claimer.claim().await;
    let hurry = Edit::default().when(When::At(start() - DAY)).priority(-4);
    fixture.edit(later, hurry).await.expect("edit");
    claimer.claim_until(later).await;
}

async fn thousands_of_unhandled_jobs_in_front_do_not_hide_a_job(fixture: Fixture) {
    enqueue_many(&fixture, 5000, "unhandled").await;
    let own = fixture.add(job("own").priority(-1)).await;
    let last = fixture.enqueue_kind("own").await;
    let worker: WorkerId = fixture.worker_with(DAY).await;
    let kinds = Some(vec!["own".into()]);
    let mut claimer = Claimer::with_request(&fixture, ClaimRequest { kinds, ..ClaimRequest::new(worker, 2) });
    let claimed = claimer.claim_until(last).await;
    if !claimed.iter().any(|job| job.lease().id == own) {
        claimer.claim_until(own).await;
    }
}

async fn a_claim_of_other_kinds_starts_at_the_head(fixture: Fixture) {
    enqueue_many(&fixture, 10, "unhandled").await;
    enqueue_many(&fixture, 10, "own").await;
    let mut claimer = Claimer::new(&fixture, 4).await;
    claimer.request.kinds = Some(vec!["own".into()]);
    assert_eq!(claimer.claim().await.len(), 4);
    claimer.request.kinds = Some(vec!["unhandled".into()]);
    let claimed = claimer.claim().await;
    assert_eq!(kinds(&claimed), ["unhandled"; 4]);
}

async fn a_cursor_that_always_starts_at_the_head_finds_every_job(fixture: Fixture) {
    enqueue_many(&fixture, 20, "mail").await;
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

async fn two_claimers_with_cursors_claim_all_jobs_without_overlap(fixture: Fixture) {
    enqueue_many(&fixture, 60, "mail").await;
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
