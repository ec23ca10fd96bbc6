//! Operator commands: retry, redrive, edit and delete, in every state. `cancel.rs` tests
//! cancel.

use longshore::rules::lifecycle::State;
use longshore::store::{Fenced, KeyWait, Operated, Operation};
use longshore::{DeadFilter, Edit, Ending, Error, JobId, NewJob, Outcome, Status, UniqueMode, When};

use crate::fixture::*;

cases! {
    a_retried_finished_job_runs_again_with_all_its_attempts,
    a_redriven_quarantined_job_is_no_longer_a_suspect,
    a_retry_keeps_the_history,
    a_retry_removes_the_result_of_an_earlier_success,
    a_retried_waiting_job_is_due_now_and_keeps_its_attempts,
    a_retried_due_job_keeps_its_position,
    a_running_job_cannot_be_retried,
    a_retry_with_changes_starts_only_with_the_changes,
    a_refused_retry_with_changes_changes_nothing,
    only_dead_letters_can_be_redriven,
    dead_letters_are_listed_oldest_first_and_filtered,
    many_dead_letters_are_redriven_by_filter,
    a_bulk_redrive_skips_jobs_whose_key_is_taken,
    an_edit_changes_only_the_fields_it_names,
    an_edited_job_is_claimed_with_its_new_values,
    an_edit_keeps_attempts_interruptions_and_lease_number,
    an_edited_payload_deletes_the_checkpoint,
    running_and_finished_jobs_cannot_be_edited,
    an_invalid_edit_is_refused_by_field,
    a_finished_job_is_deleted_with_its_history,
    live_jobs_cannot_be_deleted,
    a_refusal_contains_the_status_of_the_job,
    every_operation_on_an_unknown_job_is_not_found,
    an_operation_decided_on_an_outdated_state_changes_nothing,
    an_operation_decided_before_another_run_changes_nothing,
    an_operation_decided_before_a_replacement_changes_nothing,
    an_operation_decided_before_another_outcome_changes_nothing,
    an_edit_updates_the_time_of_the_last_change,
}

fn assert_conflict(error: &Error, remedy: &str) {
    assert!(error.is_conflict(), "{error:?}");
    assert!(error.to_string().contains(remedy), "{error} does not say to {remedy}");
}

// ---- retry -------------------------------------------------------------------

async fn a_retried_finished_job_runs_again_with_all_its_attempts(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let id = fixture.ended(job("mail").max_attempts(1), outcome).await;
        fixture.advance(MINUTE).await;
        let now = fixture.now().await;
        fixture.retry(id).await.expect("retry");
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0), "{outcome:?}");
        assert_eq!((job.run_at, job.finished_at, job.lease_no), (now, None, 1), "{outcome:?}");
        let worker = fixture.worker().await;
        let again = fixture.claim_one(worker).await;
        assert_eq!((again.attempt(), again.lease().lease_no), (1, 2));
        fixture.must_finish(&again, done()).await;
    }
}

async fn a_redriven_quarantined_job_is_no_longer_a_suspect(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    for _ in 0..3 {
        let worker = fixture.worker().await;
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, interrupted()).await;
        fixture.advance(MINUTE).await;
    }
    assert_eq!(fixture.status(id).await, Status::FailedPermanent);
    fixture.redrive(id).await.expect("redrive");
    assert_eq!(fixture.job(id).await.interruptions, 0);
}

async fn a_retry_keeps_the_history(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.retry(id).await.expect("retry");
    let job = fixture.job(id).await;
    assert_eq!(job.errors.len(), 1);
    assert_eq!(job.last_error.as_deref(), Some("no such mailbox"));
}

async fn a_retry_removes_the_result_of_an_earlier_success(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.retry(id).await.expect("retry");
    assert!(fixture.job(id).await.result.is_none());
}

async fn a_retried_waiting_job_is_due_now_and_keeps_its_attempts(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    fixture.must_finish(&claimed, failed()).await;
    fixture.retry(id).await.expect("retry");
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.lease_no, job.run_at), (Status::Retrying, 1, 1, start()));
    assert_eq!(fixture.claim_one(claimed.lease().worker).await.attempt(), 2);
}

async fn a_retried_due_job_keeps_its_position(fixture: Fixture) {
    let early = fixture.add(job("early").run_at(start() - HOUR)).await;
    fixture.add(job("late").run_at(start() - MINUTE)).await;
    fixture.retry(early).await.expect("retry");
    let worker = fixture.worker().await;
    assert_eq!(kinds(&fixture.claim(worker, 2).await), ["early", "late"]);
}

async fn a_running_job_cannot_be_retried(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let before = snapshot(&fixture.job(claimed.lease().id).await);
    assert_conflict(&fixture.retry(claimed.lease().id).await.expect_err("running"), "cancel it first");
    assert_eq!(snapshot(&fixture.job(claimed.lease().id).await), before);
}

// ---- redrive -----------------------------------------------------------------

async fn a_retry_with_changes_starts_only_with_the_changes(fixture: Fixture) {
    let changes = || Edit::default().payload(r#"{"fixed":true}"#).priority(7);
    for outcome in Outcome::ALL {
        let id = fixture.ended(job("mail").max_attempts(1), outcome).await;
        fixture.client().retry_with(id, changes()).await.expect("retry");
        let waiting = fixture.job(id).await;
        assert_eq!(
            (waiting.status, waiting.attempts, waiting.priority),
            (Status::Queued, 0, 7),
            "{outcome:?}"
        );
        let worker = fixture.worker().await;
        let claimed = fixture.claim_one(worker).await;
        assert_eq!((claimed.payload(), claimed.attempt()), (r#"{"fixed":true}"#, 1), "{outcome:?}");
        fixture.must_finish(&claimed, done()).await;
    }
    let waiting = fixture.add(job("mail").delay(DAY)).await;
    fixture.client().retry_with(waiting, changes()).await.expect("retry");
    let due = fixture.job(waiting).await;
    assert_eq!((due.run_at, due.payload.get()), (fixture.now().await, r#"{"fixed":true}"#));
}

async fn a_refused_retry_with_changes_changes_nothing(fixture: Fixture) {
    let changes = || Edit::default().priority(7);
    let running = fixture.running(job("other")).await.lease().id;
    let error = fixture.client().retry_with(running, changes()).await.expect_err("it is running");
    assert!(error.is_conflict(), "{error:?}");
    let keyed = || job("mail").unique_key("customer-25", UniqueMode::Dedupe);
    let ended = fixture.ended(keyed(), Outcome::FailedPermanent).await;
    fixture.add(keyed()).await;
    let before = snapshot(&fixture.job(ended).await);
    let error = fixture.client().retry_with(ended, changes()).await.expect_err("the key is taken");
    assert_conflict(&error, "cancel that job");
    assert_eq!(snapshot(&fixture.job(ended).await), before);
}

async fn only_dead_letters_can_be_redriven(fixture: Fixture) {
    let dead = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    fixture.redrive(dead).await.expect("redrive");
    assert_eq!(fixture.status(dead).await, Status::Queued);
    assert_conflict(&fixture.redrive(dead).await.expect_err("waiting"), "cancel it first");
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    assert_conflict(&fixture.redrive(dead).await.expect_err("running"), "cancel it first");
    fixture.must_finish(&claimed, done()).await;
    assert_conflict(&fixture.redrive(dead).await.expect_err("succeeded"), "retry it instead");
    let cancelled = fixture.ended(job("mail"), Outcome::Cancelled).await;
    assert_conflict(&fixture.redrive(cancelled).await.expect_err("cancelled"), "retry it instead");
}

async fn enqueue_dead_letters(fixture: &Fixture) -> Vec<JobId> {
    let mut dead = Vec::new();
    for (kind, queue) in [("mail", "letters"), ("sms", "phones"), ("mail", "phones"), ("mail", "letters")] {
        let id = fixture.add(job(kind).queue(queue)).await;
        let worker = fixture.worker_with(DAY).await;
        let claimed = fixture.claim_from(queue, worker, 1).await.remove(0);
        fixture.must_finish(&claimed, failed_permanently()).await;
        dead.push(id);
    }
    fixture.ended(job("fine"), Outcome::Succeeded).await;
    fixture.ended(job("stopped"), Outcome::Cancelled).await;
    dead
}

fn all(limit: u32) -> DeadFilter {
    DeadFilter { limit, ..DeadFilter::default() }
}

async fn dead_letters_are_listed_oldest_first_and_filtered(fixture: Fixture) {
    let dead = enqueue_dead_letters(&fixture).await;
    let list = async |filter: DeadFilter| fixture.store().dead_letters(&filter).await.expect("dead letters");
    assert_eq!(list(all(9)).await, dead);
    assert_eq!(list(all(2)).await, dead[..2]);
    assert_eq!(list(DeadFilter { after: Some(dead[1]), ..all(9) }).await, dead[2..]);
    assert_eq!(list(DeadFilter { kind: Some("mail".into()), ..all(9) }).await, [dead[0], dead[2], dead[3]]);
    assert_eq!(list(DeadFilter { queue: Some("phones".into()), ..all(9) }).await, dead[1..3]);
    let both = DeadFilter { kind: Some("mail".into()), queue: Some("letters".into()), ..all(1) };
    assert_eq!(list(DeadFilter { after: Some(dead[0]), ..both }).await, [dead[3]]);
}

async fn many_dead_letters_are_redriven_by_filter(fixture: Fixture) {
    let dead = enqueue_dead_letters(&fixture).await;
    let mail = DeadFilter { kind: Some("mail".into()), ..all(100) };
    assert_eq!(fixture.redrive_all(&mail).await.expect("redrive"), 3);
    assert_eq!(fixture.status(dead[1]).await, Status::FailedPermanent);
    assert_eq!(fixture.redrive_all(&all(100)).await.expect("redrive"), 1);
    assert_eq!(fixture.redrive_all(&all(100)).await.expect("redrive"), 0);
    assert_eq!(fixture.count(Status::Queued).await, 4);
}

async fn a_bulk_redrive_skips_jobs_whose_key_is_taken(fixture: Fixture) {
    let keyed = || job("mail").unique_key("customer-23", Default::default());
    let old = fixture.ended(keyed(), Outcome::FailedPermanent).await;
    let newer = fixture.ended(keyed(), Outcome::FailedPermanent).await;
    assert_eq!(fixture.redrive_all(&all(100)).await.expect("redrive"), 1);
    assert_eq!(
        (fixture.status(old).await, fixture.status(newer).await),
        (Status::Queued, Status::FailedPermanent)
    );
}

// ---- edit --------------------------------------------------------------------

async fn an_edit_changes_only_the_fields_it_names(fixture: Fixture) {
    let id = fixture
        .add(NewJob::from_json("mail", r#"{"v":1}"#).priority(2).tags(["kept"]).flags(["gpu"]).delay(HOUR))
        .await;
    fixture.edit(id, Edit::default().priority(8)).await.expect("edit");
    let job = fixture.job(id).await;
    assert_eq!((job.priority, job.payload.get(), job.run_at), (8, r#"{"v":1}"#, start() + HOUR));
    fixture.edit(id, Edit::default().payload(r#"{"v":2}"#)).await.expect("edit");
    let job = fixture.job(id).await;
    assert_eq!((job.priority, job.payload.get(), job.run_at), (8, r#"{"v":2}"#, start() + HOUR));
    fixture.edit(id, Edit::default().when(When::After(MINUTE))).await.expect("edit");
    let job = fixture.job(id).await;
    assert_eq!((job.priority, job.payload.get(), job.run_at), (8, r#"{"v":2}"#, start() + MINUTE));
    assert_eq!((job.tags, job.flags), (vec!["kept".to_owned()], vec!["gpu".to_owned()]));
}

async fn an_edited_job_is_claimed_with_its_new_values(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(DAY)).await;
    let edit = Edit::default().priority(8).payload("[8]").when(When::At(start() - SECOND));
    fixture.edit(id, edit).await.expect("edit");
    fixture.add(job("other").priority(5)).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 2).await;
    assert_eq!((claimed[0].lease().id, claimed[0].priority(), claimed[0].payload()), (id, 8, "[8]"));
}

async fn an_edit_keeps_attempts_interruptions_and_lease_number(fixture: Fixture) {
    let id = fixture.suspect(job("mail")).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, failed()).await;
    fixture.edit(id, Edit::default().priority(8)).await.expect("edit");
    let job = fixture.job(id).await;
    assert_eq!((job.attempts, job.interruptions, job.lease_no, job.status), (1, 1, 2, Status::Retrying));
}

/// The checkpoint belongs to the old payload. Other edits keep it.
async fn an_edited_payload_deletes_the_checkpoint(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    let saved = fixture.save_checkpoint(&claimed.lease(), &raw(r#"{"page":5}"#)).await;
    assert_eq!(saved.expect("save"), Fenced::Held);
    fixture.must_finish(&claimed, failed()).await;
    fixture.edit(id, Edit::default().priority(7).when(When::After(HOUR))).await.expect("edit");
    let kept = fixture.checkpoint(id).await.expect("checkpoint");
    assert_eq!(kept.expect("the payload is the same").get(), r#"{"page":5}"#);
    fixture.edit(id, Edit::default().payload("[1]")).await.expect("edit");
    assert!(fixture.checkpoint(id).await.expect("checkpoint").is_none());
    assert_eq!(fixture.job(id).await.attempts, 1);
}

async fn running_and_finished_jobs_cannot_be_edited(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    let edit = || Edit::default().priority(8);
    assert_conflict(&fixture.edit(id, edit()).await.expect_err("running"), "cancel it first");
    fixture.must_finish(&claimed, done()).await;
    assert_conflict(&fixture.edit(id, edit()).await.expect_err("finished"), "retry it");
    assert_eq!(fixture.job(id).await.priority, 0);
}

async fn an_invalid_edit_is_refused_by_field(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let before = snapshot(&fixture.job(id).await);
    for (edit, field) in
        [(Edit::default().priority(99_999), "priority"), (Edit::default().payload("{oops"), "payload")]
    {
        assert_eq!(fixture.edit(id, edit).await.expect_err("invalid").field(), Some(field));
    }
    assert_eq!(snapshot(&fixture.job(id).await), before);
}

// ---- delete ------------------------------------------------------------------

async fn a_finished_job_is_deleted_with_its_history(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let id = fixture.ended(job("mail"), outcome).await;
        fixture.delete(id).await.expect("delete");
        assert!(fixture.get(id).await.expect_err("deleted").is_not_found());
        assert!(fixture.delete(id).await.expect_err("deleted").is_not_found());
        let rows = fixture.query_number("select count(*) from attempts where job = {id}", Some(id)).await;
        assert_eq!(rows, 0, "{outcome:?}");
        assert_eq!(fixture.count(outcome.status()).await, 0);
    }
}

async fn live_jobs_cannot_be_deleted(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    assert_conflict(&fixture.delete(id).await.expect_err("waiting"), "cancel it first");
    let worker = fixture.worker().await;
    fixture.claim_one(worker).await;
    assert_conflict(&fixture.delete(id).await.expect_err("running"), "cancel it first");
    assert_eq!(fixture.status(id).await, Status::Running);
}

// ---- every operation ---------------------------------------------------------

async fn a_refusal_contains_the_status_of_the_job(fixture: Fixture) {
    let refused = |result: Result<(), Error>| {
        let error = result.expect_err("a refusal");
        assert!(error.is_conflict(), "{error:?}");
        error.status()
    };
    let waiting = fixture.add(job("queued")).await;
    assert_eq!(refused(fixture.delete(waiting).await), Some(Status::Queued));
    let again = fixture.add(job("retrying")).await;
    let worker = fixture.worker().await;
    for claimed in fixture.claim(worker, 2).await {
        fixture.must_finish(&claimed, failed()).await;
    }
    assert_eq!(refused(fixture.redrive(again).await), Some(Status::Retrying));
    let running = fixture.running(job("running")).await.lease().id;
    assert_eq!(refused(fixture.retry(running).await), Some(Status::Running));
    for outcome in Outcome::ALL {
        let ended = fixture.ended(job("ended"), outcome).await;
        assert_eq!(refused(fixture.cancel(ended).await.map(drop)), Some(outcome.status()));
    }
    let unknown = fixture.cancel(JobId::new()).await.expect_err("not found");
    assert_eq!(unknown.status(), None);
}

async fn every_operation_on_an_unknown_job_is_not_found(fixture: Fixture) {
    let id = JobId::new();
    let errors = [
        fixture.retry(id).await.expect_err("retry"),
        fixture.redrive(id).await.expect_err("redrive"),
        fixture.edit(id, Edit::default().priority(1)).await.expect_err("edit"),
        fixture.delete(id).await.expect_err("delete"),
        fixture.get(id).await.expect_err("get"),
    ];
    for error in errors {
        assert!(error.is_not_found() && error.to_string().contains(&id.to_string()), "{error:?}");
    }
    assert_eq!(fixture.store().locate(id).await.expect("locate"), None);
}

/// Every operation, decided on a state that the job has left: each must return `Moved`
/// and change nothing.
async fn an_operation_decided_on_an_outdated_state_changes_nothing(fixture: Fixture) {
    let edit = || Operation::Rewrite(Edit::default().priority(8).validate().expect("valid"));
    let claimed = fixture.running(job("mail")).await;
    let id = claimed.lease().id;
    let running = fixture.state(id).await;
    fixture.must_finish(&claimed, failed()).await;
    let waiting = fixture.state(id).await;
    fixture.advance(MINUTE / 2).await;
    let second = fixture.claim_one(claimed.lease().worker).await;
    let assert_moved = async |from: &State, operations: Vec<Operation>| {
        let before = snapshot(&fixture.job(id).await);
        for operation in operations {
            let operated =
                fixture.store().operate(id, from, &operation, KeyWait::Long).await.expect("operate");
            assert_eq!(operated, Operated::Moved, "{operation:?} from {from:?}");
        }
        assert_eq!(snapshot(&fixture.job(id).await), before);
    };
    assert_moved(&waiting, vec![Operation::Cancel { attempts: 1 }, Operation::RunNow, edit()]).await;
    // The same state, but another lease.
    assert_moved(&running, vec![Operation::RequestCancel]).await;
    let running_again = fixture.state(id).await;
    fixture.must_finish(&second, failed()).await;
    assert_moved(&waiting, vec![Operation::Cancel { attempts: 1 }, Operation::RunNow, edit()]).await;
    assert_moved(&running_again, vec![Operation::RequestCancel]).await;
    fixture.cancel(id).await.expect("cancel");
    let finished = fixture.state(id).await;
    fixture.retry(id).await.expect("retry");
    let with_edit = Operation::ReopenWith(Edit::default().priority(8).validate().expect("valid"));
    assert_moved(&finished, vec![Operation::Reopen, with_edit, Operation::Remove]).await;
}

/// The job ran in between and waits again as before. Only its lease number differs.
async fn an_operation_decided_before_another_run_changes_nothing(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let seen = fixture.state(id).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, Ending::Released).await;
    let before = snapshot(&fixture.job(id).await);
    let edit = Edit::default().priority(8).validate().expect("valid");
    for operation in [Operation::Cancel { attempts: 0 }, Operation::RunNow, Operation::Rewrite(edit)] {
        let operated = fixture.store().operate(id, &seen, &operation, KeyWait::Long).await.expect("operate");
        assert_eq!(operated, Operated::Moved, "{operation:?}");
    }
    assert_eq!(snapshot(&fixture.job(id).await), before);
}

/// Replacing a job through its unique key resets its attempts but keeps its lease number.
async fn an_operation_decided_before_a_replacement_changes_nothing(fixture: Fixture) {
    let keyed = |kind: &str, key: &str| job(kind).unique_key(key, UniqueMode::Replace);
    // The replacement renews the used attempts of the first job, and changes only the budget of
    // the second. Neither has another lease number.
    let claimed = fixture.running(keyed("old", "customer-23")).await;
    fixture.must_finish(&claimed, failed()).await;
    let second = fixture.add(keyed("old", "customer-24")).await;
    let (first, edit) = (claimed.lease().id, Edit::default().priority(7).validate().expect("valid"));
    for (id, replacement) in
        [(first, keyed("new", "customer-23")), (second, keyed("new", "customer-24").max_attempts(1))]
    {
        let seen = fixture.state(id).await;
        fixture.enqueue(replacement).await.expect("enqueue");
        let before = snapshot(&fixture.job(id).await);
        let operations =
            [Operation::Cancel { attempts: 1 }, Operation::RunNow, Operation::Rewrite(edit.clone())];
        for operation in operations {
            let operated =
                fixture.store().operate(id, &seen, &operation, KeyWait::Long).await.expect("operate");
            assert_eq!(operated, Operated::Moved, "{operation:?}");
            assert_eq!(snapshot(&fixture.job(id).await), before, "{operation:?}");
        }
    }
}

/// A job that was retried and then cancelled while it waited has the lease number of its
/// failure, but another outcome.
async fn an_operation_decided_before_another_outcome_changes_nothing(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let seen = fixture.state(id).await;
    fixture.retry(id).await.expect("retry");
    fixture.cancel(id).await.expect("cancel");
    let before = snapshot(&fixture.job(id).await);
    for operation in [Operation::Reopen, Operation::Remove] {
        let operated = fixture.store().operate(id, &seen, &operation, KeyWait::Long).await.expect("operate");
        assert_eq!(operated, Operated::Moved, "{operation:?}");
        assert_eq!(snapshot(&fixture.job(id).await), before, "{operation:?}");
    }
}

async fn an_edit_updates_the_time_of_the_last_change(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(DAY)).await;
    fixture.advance(HOUR).await;
    fixture.edit(id, Edit::default().priority(7)).await.expect("edit");
    assert_eq!(fixture.job(id).await.updated_at, start() + HOUR);
}
