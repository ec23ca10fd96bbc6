//! Rows that no operation of the library can produce: they are planted with SQL, as a manual
//! change or a partial restore could. They do not stop their queue. `check.rs` has the cases of the
//! check, which names them.

use longshore::store::{ClaimCursor, ClaimRequest};
use longshore::{Edit, JobId, ListFilter, UniqueMode, WorkerId};

use crate::fixture::*;

cases! {
    a_waiting_job_that_is_also_running_does_not_stop_its_queue,
    a_waiting_job_without_a_request_does_not_stop_its_queue,
    many_unsound_rows_do_not_stop_their_queue,
    an_unsound_row_does_not_stop_a_limited_queue,
    an_unsound_suspect_does_not_stop_other_suspects,
    a_job_whose_options_cannot_be_read_is_claimed,
    a_job_in_no_table_is_an_error_that_names_the_check,
}

pub(crate) const COPY_TO_READY: &str = "
    insert into ready (id, run_at, since, timeout_ms, lease_no, priority, attempt, max_attempts, interruptions,
                       keyed, kind, queue, flags)
    select id, claimed_at, claimed_at, timeout_ms, lease_no - 1, priority, attempt - 1, max_attempts,
           interruptions, keyed, kind, queue, flags
      from running
     where id = {id}";

/// Enqueues a job, claims it and plants its old row in `ready` again.
async fn waiting_and_running(fixture: &Fixture, job: longshore::NewJob) -> JobId {
    let claimed = fixture.running(job).await;
    fixture.sql(COPY_TO_READY, Some(claimed.lease().id)).await;
    claimed.lease().id
}

async fn waiting_without_request(fixture: &Fixture, job: longshore::NewJob) -> JobId {
    let id = fixture.add(job).await;
    fixture.sql("delete from jobs where id = {id}", Some(id)).await;
    id
}

/// Claims twenty times with the same cursor.
async fn claim_all(fixture: &Fixture, worker: WorkerId, limit: u32) -> Vec<JobId> {
    let mut cursor = ClaimCursor::default();
    let mut claimed = Vec::new();
    for _ in 0..20 {
        let claims =
            fixture.store().claim(&ClaimRequest::new(worker, limit), &mut cursor).await.expect("claim");
        claimed.extend(ids(&claims.jobs));
    }
    claimed
}

async fn assert_reported(fixture: &Fixture, id: JobId) {
    let problems = fixture.check().await.expect("check").problems;
    assert!(problems.iter().any(|problem| problem.problem.contains(&id.to_string())), "{problems:?}");
}

async fn assert_queue_continues(fixture: &Fixture, unsound: JobId) {
    let before = fixture.query_number("select count(*) from running", None).await;
    let mut expected = Vec::new();
    for _ in 0..4 {
        expected.push(fixture.enqueue_kind("mail").await);
    }
    let worker = fixture.worker().await;
    // With new cursors and without.
    let mut claimed = ids(&fixture.claim(worker, 1).await);
    claimed.extend(ids(&fixture.claim(worker, 1).await));
    claimed.extend(claim_all(fixture, worker, 1).await);
    assert_eq!(claimed, expected);
    expected = vec![fixture.enqueue_kind("mail").await, fixture.add(job("mail").priority(3)).await];
    expected.reverse();
    assert_eq!(ids(&fixture.claim(worker, 9).await), expected);
    let waiting = fixture.query_number("select count(*) from ready where id = {id}", Some(unsound)).await;
    let running = fixture.query_number("select count(*) from running", None).await;
    assert_eq!((waiting, running), (1, before + 6), "the row stays where it is");
    assert_reported(fixture, unsound).await;
    fixture.skip_final_check();
}

async fn a_waiting_job_that_is_also_running_does_not_stop_its_queue(fixture: Fixture) {
    let id = waiting_and_running(&fixture, job("mail")).await;
    assert_queue_continues(&fixture, id).await;
}

async fn a_waiting_job_without_a_request_does_not_stop_its_queue(fixture: Fixture) {
    let id = waiting_without_request(&fixture, job("mail")).await;
    assert_queue_continues(&fixture, id).await;
}

/// One claim skips a limited number of rows. The next ones continue after them, although all claims with
/// this cursor would normally start at the head.
async fn many_unsound_rows_do_not_stop_their_queue(fixture: Fixture) {
    fixture.skip_final_check();
    fixture.enqueue_many((0..2500).map(|_| job("mail"))).await.expect("enqueue");
    fixture.sql("delete from jobs", None).await;
    let sound = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    // A default cursor resumes in any case if claims follow each other without a pause.
    let (request, mut cursor) = (ClaimRequest::new(worker, 4), ClaimCursor::always_head());
    for _ in 0..5 {
        let claims = fixture.store().claim(&request, &mut cursor).await.expect("claim");
        if !claims.jobs.is_empty() {
            return assert_eq!(ids(&claims.jobs), [sound]);
        }
    }
    panic!("five claims did not find the job behind them");
}

async fn an_unsound_row_does_not_stop_a_limited_queue(fixture: Fixture) {
    waiting_and_running(&fixture, job("mail").priority(5)).await;
    waiting_without_request(&fixture, job("mail").priority(4)).await;
    fixture.limit("default", Some(3)).await.expect("limit");
    let expected = [fixture.enqueue_kind("mail").await, fixture.enqueue_kind("mail").await];
    fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(claim_all(&fixture, worker, 9).await, expected, "one of the three slots was taken");
    fixture.skip_final_check();
}

async fn an_unsound_suspect_does_not_stop_other_suspects(fixture: Fixture) {
    let first = fixture.add(job("mail").priority(9)).await;
    let second = fixture.add(job("mail").priority(8)).await;
    assert_eq!(fixture.claim(fixture.worker().await, 2).await.len(), 2);
    assert_eq!(fixture.crash_all_workers().await.recovered, 2);
    fixture.sql("delete from jobs where id = {id}", Some(first)).await;
    let plain = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 5).await), [second, plain]);
    fixture.skip_final_check();
}

async fn a_job_whose_options_cannot_be_read_is_claimed(fixture: Fixture) {
    let id = fixture.add(job("mail").flags(["gpu"])).await;
    fixture.sql("update jobs set options = '{\"retry\": 5, \"tags\": 7}' where id = {id}", Some(id)).await;
    let other = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 5).await), [id, other]);
    assert_reported(&fixture, id).await;
    fixture.skip_final_check();
}

async fn a_job_in_no_table_is_an_error_that_names_the_check(fixture: Fixture) {
    let keyed = job("mail").idempotency_key("order-9").unique_key("customer-23", UniqueMode::Dedupe);
    let id = fixture.add(keyed).await;
    fixture.sql("delete from ready", None).await;
    let by_key = ListFilter { idempotency_key: Some("order-9".into()), ..ListFilter::default() };
    let errors = [
        fixture.get(id).await.err(),
        fixture.list(&ListFilter::default()).await.err(),
        fixture.list(&by_key).await.err(),
        fixture.cancel(id).await.err(),
        fixture.retry(id).await.err(),
        fixture.retry_with(id, Edit::default().priority(3)).await.err(),
        fixture.edit(id, Edit::default().priority(3)).await.err(),
        fixture.delete(id).await.err(),
        fixture.redrive(id).await.err(),
    ];
    for (at, error) in errors.into_iter().enumerate() {
        let error = error.unwrap_or_else(|| panic!("call {at} succeeded"));
        let expected = format!(
            "job {id} is in none of the tables ready, running and finished; `longshore check` prints the remedy"
        );
        assert_eq!(error.to_string(), expected, "call {at}");
        assert!(!error.is_not_found() && !error.is_conflict() && !error.is_unavailable(), "call {at}");
    }
    assert_reported(&fixture, id).await;
    fixture.skip_final_check();
}
