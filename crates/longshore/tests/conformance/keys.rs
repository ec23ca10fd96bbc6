//! Idempotency keys (one job for as long as it is kept) and unique keys (one
//! live job at a time).

use longshore::rules::lifecycle::{self, State};
use longshore::store::{Fenced, KeyWait};
use longshore::{
    Ending, Enqueued, EnqueuedAs, JobId, ListFilter, NewJob, Outcome, Retention, Status, UniqueMode, ValidJob,
};

use crate::fixture::*;

cases! {
    the_same_idempotency_key_returns_the_first_job_unchanged,
    an_idempotency_key_is_kept_after_its_job_has_ended,
    an_idempotency_key_is_free_again_when_its_job_is_deleted,
    an_idempotency_key_is_free_again_when_retention_removes_its_job,
    a_job_is_validated_before_its_key_is_looked_up,
    jobs_with_the_same_key_in_one_batch_become_the_first_of_them,
    a_duplicate_within_a_batch_takes_no_unique_key,
    a_batch_finds_existing_keys,
    keys_differ_by_case_and_by_trailing_space,
    a_repeated_idempotency_key_takes_no_unique_key,
    the_idempotency_key_of_a_replacement_is_stored,
    a_repeated_idempotency_key_replaces_nothing,
    the_idempotency_key_of_a_deduplicated_request_returns_the_holder,
    the_idempotency_key_of_a_second_replacement_is_kept_too,
    a_batch_finds_the_idempotency_keys_of_merged_requests,
    the_key_of_a_merged_request_is_free_again_when_its_job_is_removed,
    a_replacement_repeated_with_its_id_is_the_same_replacement,
    a_list_by_idempotency_key_finds_the_job_of_a_merged_request,
    dedupe_returns_a_waiting_holder_unchanged,
    dedupe_returns_a_running_holder,
    dedupe_does_not_return_a_holder_that_is_being_cancelled,
    dedupe_applies_across_kinds_and_queues,
    replace_changes_the_contents_and_the_time_of_a_waiting_holder,
    a_replaced_job_is_claimed_with_its_new_contents,
    preserve_run_at_changes_the_contents_but_not_the_time_of_a_waiting_holder,
    a_replaced_retrying_job_starts_again_and_keeps_its_lease_number,
    a_replaced_job_keeps_its_interruptions_and_loses_its_checkpoint,
    replace_and_preserve_move_the_key_of_a_running_holder_to_a_new_job,
    every_mode_creates_a_new_job_when_the_holder_has_ended,
    a_unique_key_is_released_by_every_end,
    a_unique_key_is_released_by_an_end_without_result_or_reason,
    a_requested_cancel_releases_the_unique_key_when_the_attempt_ends,
    a_unique_key_is_released_by_quarantine,
    a_unique_key_is_kept_when_the_job_returns_to_the_queue,
    an_operators_retry_takes_the_unique_key_back,
    a_retry_whose_unique_key_is_taken_is_a_conflict_naming_the_holder,
    a_superseded_job_may_succeed,
    a_superseded_job_that_ends_cancelled_says_why,
    a_superseded_failure_is_final,
    a_superseded_snooze_release_or_interruption_ends_cancelled,
    a_superseded_job_of_a_dead_worker_ends_cancelled,
    a_list_by_unique_key_finds_only_the_live_holder,
}

const KEY: &str = "customer-23";

fn unique(kind: &str, mode: UniqueMode) -> NewJob {
    job(kind).unique_key(KEY, mode)
}

fn valid(job: NewJob) -> ValidJob {
    job.validate().expect("valid")
}

fn created(id: JobId) -> Enqueued {
    Enqueued { id, how: EnqueuedAs::Created }
}

fn existing(id: JobId) -> Enqueued {
    Enqueued { id, how: EnqueuedAs::Existing }
}

async fn enqueue(fixture: &Fixture, job: NewJob) -> Enqueued {
    fixture.enqueue(job).await.expect("enqueue")
}

// ---- idempotency keys ----------------------------------------------------------

async fn the_same_idempotency_key_returns_the_first_job_unchanged(fixture: Fixture) {
    let first = fixture.add(job("mail").priority(3).idempotency_key("order-17")).await;
    let before = snapshot(&fixture.job(first).await);
    let again = job("sms").priority(9).queue("other").idempotency_key("order-17");
    assert_eq!(enqueue(&fixture, again).await, existing(first));
    assert_eq!(snapshot(&fixture.job(first).await), before);
}

async fn an_idempotency_key_is_kept_after_its_job_has_ended(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let key = outcome.as_str();
        let first = fixture.ended(job("mail").idempotency_key(key), outcome).await;
        assert_eq!(enqueue(&fixture, job("mail").idempotency_key(key)).await, existing(first), "{key}");
    }
}

async fn an_idempotency_key_is_free_again_when_its_job_is_deleted(fixture: Fixture) {
    let first = fixture.ended(job("mail").idempotency_key("order-17"), Outcome::Succeeded).await;
    fixture.delete(first).await.expect("delete");
    let second = enqueue(&fixture, job("mail").idempotency_key("order-17")).await;
    assert_eq!(second.how, EnqueuedAs::Created);
    assert_ne!(second.id, first);
}

async fn an_idempotency_key_is_free_again_when_retention_removes_its_job(fixture: Fixture) {
    let first = fixture.ended(job("mail").idempotency_key("order-17"), Outcome::Succeeded).await;
    fixture.advance(8 * DAY).await;
    assert_eq!(fixture.store().retain(&Retention::default(), 100).await.expect("retain").removed, 1);
    let second = enqueue(&fixture, job("mail").idempotency_key("order-17")).await;
    assert_eq!(second.how, EnqueuedAs::Created);
    assert_ne!(second.id, first);
}

async fn a_job_is_validated_before_its_key_is_looked_up(fixture: Fixture) {
    fixture.add(job("mail").idempotency_key("order-17")).await;
    let error = fixture.enqueue(job("").idempotency_key("order-17")).await.expect_err("an empty kind");
    assert_eq!(error.field(), Some("kind"));
}

async fn jobs_with_the_same_key_in_one_batch_become_the_first_of_them(fixture: Fixture) {
    let batch = [
        valid(job("plain")),
        valid(job("first").idempotency_key("order-17")),
        valid(job("other").idempotency_key("order-19")),
        valid(job("duplicate").idempotency_key("order-17")),
        valid(job("plain too")),
        valid(unique("holder", UniqueMode::Dedupe)),
        valid(unique("duplicate holder", UniqueMode::Dedupe)),
    ];
    let results = fixture.store().enqueue(&batch, KeyWait::Long).await.expect("enqueue").results;
    let expected = [
        created(batch[0].id()),
        created(batch[1].id()),
        created(batch[2].id()),
        existing(batch[1].id()),
        created(batch[4].id()),
        created(batch[5].id()),
        existing(batch[5].id()),
    ];
    assert_eq!(results, expected);
    assert_eq!(fixture.job(batch[1].id()).await.kind, "first");
    assert_eq!(fixture.count(Status::Queued).await, 5);
}

/// The engine may choose either of two jobs with the same key in one batch. The other
/// must leave no trace.
async fn a_duplicate_within_a_batch_takes_no_unique_key(fixture: Fixture) {
    let both = |key: &str| job("mail").idempotency_key("order-17").unique_key(key, UniqueMode::Dedupe);
    let batch = [valid(both("u-1")), valid(both("u-2"))];
    let results = fixture.store().enqueue(&batch, KeyWait::Long).await.expect("enqueue").results;
    let winner = results.iter().position(|result| result.how == EnqueuedAs::Created).expect("one is new");
    assert_eq!(results[winner], created(batch[winner].id()));
    assert_eq!(results[1 - winner], existing(batch[winner].id()));
    let [taken, free] = if winner == 0 { ["u-1", "u-2"] } else { ["u-2", "u-1"] };
    let again = |key: &str| job("sms").unique_key(key, UniqueMode::Dedupe);
    assert_eq!(enqueue(&fixture, again(taken)).await, existing(batch[winner].id()));
    assert_eq!(enqueue(&fixture, again(free)).await.how, EnqueuedAs::Created);
}

async fn a_batch_finds_existing_keys(fixture: Fixture) {
    let first = fixture.add(job("mail").idempotency_key("order-17")).await;
    let batch = [valid(job("plain")), valid(job("sms").idempotency_key("order-17")), valid(job("plain too"))];
    let results = fixture.store().enqueue(&batch, KeyWait::Long).await.expect("enqueue").results;
    assert_eq!(results, [created(batch[0].id()), existing(first), created(batch[2].id())]);
}

async fn keys_differ_by_case_and_by_trailing_space(fixture: Fixture) {
    for key in ["order-17", "Order-17", "order-17 ", "order-17\t"] {
        assert_eq!(
            enqueue(&fixture, job("mail").idempotency_key(key)).await.how,
            EnqueuedAs::Created,
            "{key:?}"
        );
        assert_eq!(
            enqueue(&fixture, job("sms").unique_key(key, UniqueMode::Dedupe)).await.how,
            EnqueuedAs::Created,
            "{key:?}"
        );
    }
}

async fn a_repeated_idempotency_key_takes_no_unique_key(fixture: Fixture) {
    let first = fixture.add(job("mail").idempotency_key("order-17")).await;
    let again = unique("sms", UniqueMode::Dedupe).idempotency_key("order-17");
    assert_eq!(enqueue(&fixture, again).await, existing(first));
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await.how, EnqueuedAs::Created);
}

/// The request changed a job that had no idempotency key. From then on the key
/// returns that job.
async fn the_idempotency_key_of_a_replacement_is_stored(fixture: Fixture) {
    let holder = fixture.add(unique("old", UniqueMode::Replace)).await;
    let request = || unique("new", UniqueMode::Replace).idempotency_key("order-17");
    let replaced = Enqueued { id: holder, how: EnqueuedAs::Replaced };
    assert_eq!(enqueue(&fixture, request()).await, replaced);
    assert_eq!(fixture.job(holder).await.idempotency_key.as_deref(), Some("order-17"));
    assert_eq!(enqueue(&fixture, request()).await, existing(holder));
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    assert_eq!(enqueue(&fixture, request()).await, existing(holder));
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(enqueue(&fixture, request()).await, existing(holder));
    assert_eq!(fixture.check().await.expect("check").jobs, 1);
}

async fn a_repeated_idempotency_key_replaces_nothing(fixture: Fixture) {
    let first = fixture.add(job("mail").idempotency_key("order-17")).await;
    let holder = fixture.add(unique("holder", UniqueMode::Dedupe)).await;
    let before = snapshot(&fixture.job(holder).await);
    let again = unique("sms", UniqueMode::Replace).idempotency_key("order-17");
    assert_eq!(enqueue(&fixture, again).await, existing(first));
    assert_eq!(snapshot(&fixture.job(holder).await), before);
}

// ---- requests that became part of another job --------------------------------------

fn replaced(id: JobId) -> Enqueued {
    Enqueued { id, how: EnqueuedAs::Replaced }
}

/// The holder may have a key of its own or none.
async fn the_idempotency_key_of_a_deduplicated_request_returns_the_holder(fixture: Fixture) {
    for own in [Some("order-17"), None] {
        let first = unique("mail", UniqueMode::Dedupe);
        let first = if let Some(key) = own { first.idempotency_key(key) } else { first };
        let claimed = fixture.running(first).await;
        let holder = claimed.lease().id;
        let before = snapshot(&fixture.job(holder).await);
        let key = format!("second-{own:?}");
        let second = || unique("sms", UniqueMode::Dedupe).idempotency_key(key.as_str());
        assert_eq!(enqueue(&fixture, second()).await, existing(holder));
        assert_eq!(snapshot(&fixture.job(holder).await), before);
        fixture.must_finish(&claimed, done()).await;
        assert_eq!(enqueue(&fixture, second()).await, existing(holder));
        assert_eq!(enqueue(&fixture, job("fax").idempotency_key(key.as_str())).await, existing(holder));
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 2);
}

async fn the_idempotency_key_of_a_second_replacement_is_kept_too(fixture: Fixture) {
    let holder = fixture.add(unique("old", UniqueMode::Replace).idempotency_key("order-17")).await;
    let request = |key: &str| unique(key, UniqueMode::Replace).idempotency_key(key);
    for key in ["order-18", "order-19"] {
        assert_eq!(enqueue(&fixture, request(key)).await, replaced(holder));
    }
    let assert_all_return_the_holder = async || {
        for key in ["order-17", "order-18", "order-19"] {
            assert_eq!(enqueue(&fixture, request(key)).await, existing(holder), "{key}");
            assert_eq!(enqueue(&fixture, job("fax").idempotency_key(key)).await, existing(holder), "{key}");
        }
    };
    assert_all_return_the_holder().await;
    let job = fixture.job(holder).await;
    assert_eq!((job.kind.as_str(), job.idempotency_key.as_deref()), ("order-19", Some("order-17")));
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    assert_all_return_the_holder().await;
    fixture.must_finish(&claimed, done()).await;
    assert_all_return_the_holder().await;
    assert_eq!(fixture.check().await.expect("check").jobs, 1);
}

async fn a_batch_finds_the_idempotency_keys_of_merged_requests(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Dedupe).idempotency_key("order-17")).await;
    enqueue(&fixture, unique("sms", UniqueMode::Dedupe).idempotency_key("order-18")).await;
    let batch = [
        valid(job("plain")),
        valid(job("fax").idempotency_key("order-18")),
        valid(job("new").idempotency_key("order-19")),
        valid(job("fax").idempotency_key("order-17")),
        valid(job("other").idempotency_key("order-18").unique_key("another", UniqueMode::Replace)),
    ];
    let results = fixture.store().enqueue(&batch, KeyWait::Long).await.expect("enqueue").results;
    let expected = [
        created(batch[0].id()),
        existing(holder),
        created(batch[2].id()),
        existing(holder),
        existing(holder),
    ];
    assert_eq!(results, expected);
}

async fn the_key_of_a_merged_request_is_free_again_when_its_job_is_removed(fixture: Fixture) {
    for removed_by in ["an operator", "retention"] {
        let holder = fixture.running(unique("mail", UniqueMode::Dedupe).idempotency_key("order-17")).await;
        let second = || unique("sms", UniqueMode::Dedupe).idempotency_key("order-18");
        assert_eq!(enqueue(&fixture, second()).await, existing(holder.lease().id));
        fixture.must_finish(&holder, done()).await;
        match removed_by {
            "an operator" => fixture.delete(holder.lease().id).await.expect("delete"),
            _ => {
                fixture.advance(8 * DAY).await;
                let retained = fixture.store().retain(&Retention::default(), 100).await;
                assert!(retained.expect("retain").removed > 0);
            }
        }
        let next = enqueue(&fixture, second()).await;
        assert_eq!(next.how, EnqueuedAs::Created, "{removed_by}");
        fixture.cancel(next.id).await.expect("cancel");
        fixture.delete(next.id).await.expect("delete");
    }
    assert_eq!(fixture.query_number("select count(*) from merged_requests", None).await, 0);
}

/// The reply to a replacement was lost, and the caller repeats it with the same id.
async fn a_replacement_repeated_with_its_id_is_the_same_replacement(fixture: Fixture) {
    for mode in [UniqueMode::Replace, UniqueMode::PreserveRunAt] {
        let holder = fixture.add(unique("old", UniqueMode::Replace)).await;
        let id = JobId::new();
        let request = || unique("new", mode).id(id);
        assert_eq!(enqueue(&fixture, request()).await, replaced(holder));
        assert_eq!(enqueue(&fixture, unique("newer", UniqueMode::Replace)).await, replaced(holder));
        assert_eq!(enqueue(&fixture, request()).await, replaced(holder));
        assert_eq!(fixture.job(holder).await.kind, "newer");
        let batch = [valid(job("plain").queue("other")), valid(request())];
        let results = fixture.store().enqueue(&batch, KeyWait::Long).await.expect("enqueue").results;
        assert_eq!(results[1], replaced(holder));
        assert_eq!(fixture.job(holder).await.kind, "newer");

        let worker = fixture.worker().await;
        let claimed = fixture.claim_one(worker).await;
        assert_eq!(enqueue(&fixture, request()).await, replaced(holder));
        let State::Running(running) = fixture.state(holder).await else { panic!("the holder must run") };
        assert!(!running.flags.superseded);
        fixture.must_finish(&claimed, done()).await;
        assert_eq!(enqueue(&fixture, request()).await, replaced(holder));
        assert_eq!(fixture.claim(worker, 9).await.len(), 0, "{mode:?}");
    }
}

async fn a_list_by_idempotency_key_finds_the_job_of_a_merged_request(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Dedupe).idempotency_key("order-17")).await;
    enqueue(&fixture, unique("sms", UniqueMode::Dedupe).idempotency_key("order-18")).await;
    fixture.add(job("fax").idempotency_key("order-19")).await;
    for key in ["order-17", "order-18"] {
        let filter = ListFilter { idempotency_key: Some(key.into()), ..ListFilter::default() };
        let page = fixture.list(&filter).await.expect("list");
        assert_eq!(page.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [holder], "{key}");
    }
}

// ---- unique keys: modes and states of the holder ---------------------------------

async fn dedupe_returns_a_waiting_holder_unchanged(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Dedupe)).await;
    let before = snapshot(&fixture.job(holder).await);
    let second = unique("sms", UniqueMode::Dedupe).priority(5);
    assert_eq!(enqueue(&fixture, second).await, existing(holder));
    assert_eq!(snapshot(&fixture.job(holder).await), before);
}

async fn dedupe_returns_a_running_holder(fixture: Fixture) {
    let holder = fixture.running(unique("mail", UniqueMode::Dedupe)).await;
    assert_eq!(enqueue(&fixture, unique("mail", UniqueMode::Dedupe)).await, existing(holder.lease().id));
    fixture.must_finish(&holder, failed()).await;
    assert_eq!(fixture.status(holder.lease().id).await, Status::Retrying);
}

/// Its work may never be done, so the new request is stored. The key moves, as with a
/// running holder that is replaced.
async fn dedupe_does_not_return_a_holder_that_is_being_cancelled(fixture: Fixture) {
    let old = fixture.running(unique("mail", UniqueMode::Dedupe)).await;
    fixture.cancel(old.lease().id).await.expect("cancel");
    let next = enqueue(&fixture, unique("sms", UniqueMode::Dedupe)).await;
    assert_eq!(next.how, EnqueuedAs::Created);
    let State::Running(running) = fixture.state(old.lease().id).await else { panic!("it still runs") };
    assert!(running.flags.superseded && running.flags.cancel_requested);
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(next.id));
    fixture.must_finish(&old, failed()).await;
    assert_eq!(fixture.status(old.lease().id).await, Status::Cancelled);
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(next.id));
    assert_eq!(fixture.claim_one(old.lease().worker).await.lease().id, next.id);
}

async fn dedupe_applies_across_kinds_and_queues(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Dedupe).queue("letters")).await;
    assert_eq!(enqueue(&fixture, unique("sms", UniqueMode::Dedupe).queue("phones")).await, existing(holder));
}

async fn replace_changes_the_contents_and_the_time_of_a_waiting_holder(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Replace).priority(1).delay(HOUR).tags(["old"])).await;
    fixture.advance(MINUTE).await;
    let next = NewJob::from_json("sms", r#"{"new":true}"#)
        .unique_key(KEY, UniqueMode::Replace)
        .queue("phones")
        .priority(5)
        .max_attempts(8)
        .timeout(Some(7 * SECOND))
        .flags(["gpu"])
        .tags(["new"])
        .delay(2 * MINUTE);
    assert_eq!(enqueue(&fixture, next).await, Enqueued { id: holder, how: EnqueuedAs::Replaced });
    let job = fixture.job(holder).await;
    assert_eq!(
        (job.kind.as_str(), job.queue.as_str(), job.payload.get()),
        ("sms", "phones", r#"{"new":true}"#)
    );
    assert_eq!((job.priority, job.max_attempts, job.timeout), (5, 8, Some(7 * SECOND)));
    assert_eq!((job.flags, job.tags), (vec!["gpu".to_owned()], vec!["new".to_owned()]));
    assert_eq!((job.run_at, job.created_at), (start() + 3 * MINUTE, start()));
}

async fn a_replaced_job_is_claimed_with_its_new_contents(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Replace).delay(HOUR)).await;
    enqueue(&fixture, unique("sms", UniqueMode::Replace).priority(5)).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    assert_eq!((claimed.lease().id, claimed.kind(), claimed.priority()), (holder, "sms", 5));
    assert_eq!(claimed.payload(), r#"{"for":"sms"}"#);
}

async fn preserve_run_at_changes_the_contents_but_not_the_time_of_a_waiting_holder(fixture: Fixture) {
    let holder = fixture.add(unique("mail", UniqueMode::Dedupe).delay(HOUR)).await;
    let next = unique("sms", UniqueMode::PreserveRunAt).priority(5);
    assert_eq!(enqueue(&fixture, next).await, Enqueued { id: holder, how: EnqueuedAs::Replaced });
    let job = fixture.job(holder).await;
    assert_eq!((job.kind.as_str(), job.priority, job.run_at), ("sms", 5, start() + HOUR));
}

async fn a_replaced_retrying_job_starts_again_and_keeps_its_lease_number(fixture: Fixture) {
    let claimed = fixture.running(unique("mail", UniqueMode::Replace).max_attempts(2)).await;
    let id = claimed.lease().id;
    fixture.must_finish(&claimed, failed()).await;
    assert_eq!(enqueue(&fixture, unique("sms", UniqueMode::Replace)).await.how, EnqueuedAs::Replaced);
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts, job.lease_no), (Status::Queued, 0, 1));
    let again = fixture.claim_one(claimed.lease().worker).await;
    assert_eq!((again.lease().lease_no, again.attempt()), (2, 1));
}

/// A job that kills its workers must not escape quarantine because its contents change.
/// The checkpoint belongs to the old contents.
async fn a_replaced_job_keeps_its_interruptions_and_loses_its_checkpoint(fixture: Fixture) {
    for mode in [UniqueMode::Replace, UniqueMode::PreserveRunAt] {
        let claimed = fixture.running(unique("mail", mode)).await;
        let id = claimed.lease().id;
        let saved = fixture.save_checkpoint(&claimed.lease(), &raw(r#"{"page":5}"#)).await;
        assert_eq!(saved.expect("save"), Fenced::Held);
        assert_eq!(fixture.crash_all_workers().await.recovered, 1);
        assert!(fixture.checkpoint(id).await.expect("checkpoint").is_some());
        assert_eq!(enqueue(&fixture, unique("sms", mode)).await, replaced(id));
        let job = fixture.job(id).await;
        assert_eq!((job.kind.as_str(), job.attempts, job.interruptions), ("sms", 0, 1), "{mode:?}");
        assert!(fixture.checkpoint(id).await.expect("checkpoint").is_none(), "{mode:?}");
        fixture.cancel(id).await.expect("cancel");
    }
}

async fn replace_and_preserve_move_the_key_of_a_running_holder_to_a_new_job(fixture: Fixture) {
    let mut holder = fixture.running(unique("mail", UniqueMode::Dedupe)).await.lease().id;
    for mode in [UniqueMode::Replace, UniqueMode::PreserveRunAt] {
        let next = enqueue(&fixture, unique("sms", mode)).await;
        assert_eq!(next.how, EnqueuedAs::Created);
        assert_ne!(next.id, holder);
        let State::Running(old) = fixture.state(holder).await else { panic!("the holder must still run") };
        assert!(old.flags.superseded && !old.flags.cancel_requested);
        let worker = fixture.worker().await;
        holder = fixture.claim_one(worker).await.lease().id;
        assert_eq!(holder, next.id);
    }
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(holder));
}

async fn every_mode_creates_a_new_job_when_the_holder_has_ended(fixture: Fixture) {
    for mode in [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt] {
        for outcome in Outcome::ALL {
            let old = fixture.ended(unique("mail", mode), outcome).await;
            let before = snapshot(&fixture.job(old).await);
            let new = enqueue(&fixture, unique("sms", mode)).await;
            assert_eq!(new.how, EnqueuedAs::Created, "{mode:?} after {outcome:?}");
            assert_ne!(new.id, old);
            assert_eq!(snapshot(&fixture.job(old).await), before);
            fixture.cancel(new.id).await.expect("cancel");
        }
    }
}

// ---- unique keys: how long a key is held -------------------------------------------

async fn a_unique_key_is_released_by_every_end(fixture: Fixture) {
    for ending in [done(), failed_permanently(), observed_cancel()] {
        let claimed = fixture.running(unique("mail", UniqueMode::Dedupe)).await;
        fixture.must_finish(&claimed, ending).await;
        let next = enqueue(&fixture, unique("sms", UniqueMode::Dedupe)).await;
        assert_eq!(next.how, EnqueuedAs::Created);
        fixture.cancel(next.id).await.expect("cancel");
    }
    // The cancel of a waiting job at the end of the loop also released the key.
    fixture.add(unique("fax", UniqueMode::Dedupe)).await;
}

async fn a_unique_key_is_released_by_an_end_without_result_or_reason(fixture: Fixture) {
    for ending in [done_without_result(), observed_cancel_without_reason()] {
        let claimed = fixture.running(unique("mail", UniqueMode::Dedupe)).await;
        fixture.must_finish(&claimed, ending).await;
        let next = fixture.add(unique("sms", UniqueMode::Dedupe)).await;
        assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(next));
        fixture.cancel(next).await.expect("cancel");
    }
}

async fn a_requested_cancel_releases_the_unique_key_when_the_attempt_ends(fixture: Fixture) {
    let claimed = fixture.running(unique("mail", UniqueMode::Dedupe)).await;
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    fixture.must_finish(&claimed, failed()).await;
    fixture.add(unique("sms", UniqueMode::Dedupe)).await;
}

async fn a_unique_key_is_released_by_quarantine(fixture: Fixture) {
    let id = fixture.add(unique("mail", UniqueMode::Dedupe)).await;
    for _ in 0..3 {
        let worker = fixture.worker().await;
        let claimed = fixture.claim_one(worker).await;
        assert_eq!(fixture.store().mark_started(&claimed.lease()).await.expect("mark"), Fenced::Held);
        fixture.crash_all_workers().await;
    }
    assert_eq!(fixture.status(id).await, Status::FailedPermanent);
    fixture.add(unique("sms", UniqueMode::Dedupe)).await;
}

async fn a_unique_key_is_kept_when_the_job_returns_to_the_queue(fixture: Fixture) {
    let id = fixture.add(unique("mail", UniqueMode::Dedupe).max_attempts(20)).await;
    for ending in [failed(), snoozed(), Ending::Released, interrupted()] {
        let worker = fixture.worker().await;
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, ending.clone()).await;
        assert_eq!(enqueue(&fixture, unique("sms", UniqueMode::Dedupe)).await, existing(id), "{ending:?}");
        fixture.advance(MINUTE).await;
    }
    let worker = fixture.worker().await;
    fixture.claim_one(worker).await;
    fixture.crash_all_workers().await;
    assert_eq!(enqueue(&fixture, unique("sms", UniqueMode::Dedupe)).await, existing(id));
}

async fn an_operators_retry_takes_the_unique_key_back(fixture: Fixture) {
    let id = fixture.ended(unique("mail", UniqueMode::Dedupe), Outcome::FailedPermanent).await;
    fixture.retry(id).await.expect("retry");
    assert_eq!(enqueue(&fixture, unique("sms", UniqueMode::Dedupe)).await, existing(id));
}

async fn a_retry_whose_unique_key_is_taken_is_a_conflict_naming_the_holder(fixture: Fixture) {
    let old = fixture.ended(unique("mail", UniqueMode::Dedupe), Outcome::FailedPermanent).await;
    let holder = fixture.add(unique("sms", UniqueMode::Dedupe)).await;
    let before = snapshot(&fixture.job(old).await);
    for refused in [fixture.retry(old).await, fixture.redrive(old).await] {
        let error = refused.expect_err("the key is taken");
        assert!(error.is_conflict() && error.to_string().contains(&holder.to_string()), "{error}");
    }
    assert_eq!(snapshot(&fixture.job(old).await), before);
}

// ---- unique keys: superseded jobs ------------------------------------------------

async fn superseded(fixture: &Fixture) -> (longshore::store::Claimed, JobId) {
    let old = fixture.running(unique("mail", UniqueMode::Dedupe)).await;
    let new = enqueue(fixture, unique("sms", UniqueMode::Replace)).await;
    (old, new.id)
}

async fn a_superseded_job_may_succeed(fixture: Fixture) {
    let (old, new) = superseded(&fixture).await;
    fixture.must_finish(&old, done()).await;
    assert_eq!(fixture.status(old.lease().id).await, Status::Succeeded);
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(new));
}

/// The handler ends without a reason, and its worker has not yet learned that the key
/// moved to a new job. The stored reason must say so.
async fn a_superseded_job_that_ends_cancelled_says_why(fixture: Fixture) {
    let (old, new) = superseded(&fixture).await;
    fixture.must_finish(&old, observed_cancel_without_reason()).await;
    let job = fixture.job(old.lease().id).await;
    assert_eq!((job.status, job.last_error.as_deref()), (Status::Cancelled, Some(lifecycle::SUPERSEDED)));
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(new));
}

async fn a_superseded_failure_is_final(fixture: Fixture) {
    let (old, new) = superseded(&fixture).await;
    fixture.must_finish(&old, failed()).await;
    let job = fixture.job(old.lease().id).await;
    assert_eq!((job.status, job.last_error.as_deref()), (Status::FailedPermanent, Some("smtp said 451")));
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(new));
}

async fn a_superseded_snooze_release_or_interruption_ends_cancelled(fixture: Fixture) {
    let not_started = Ending::NotStarted { run_at: start() };
    for ending in [snoozed(), Ending::Released, not_started, interrupted()] {
        let (old, new) = superseded(&fixture).await;
        fixture.must_finish(&old, ending.clone()).await;
        assert_eq!(fixture.status(old.lease().id).await, Status::Cancelled, "{ending:?}");
        assert_eq!(fixture.job(old.lease().id).await.attempts, 0, "{ending:?}");
        assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(new));
        fixture.cancel(new).await.expect("cancel");
    }
}

async fn a_superseded_job_of_a_dead_worker_ends_cancelled(fixture: Fixture) {
    let (old, new) = superseded(&fixture).await;
    assert_eq!(fixture.crash_all_workers().await.recovered, 1);
    assert_eq!(fixture.status(old.lease().id).await, Status::Cancelled);
    assert_eq!(enqueue(&fixture, unique("fax", UniqueMode::Dedupe)).await, existing(new));
}

async fn a_list_by_unique_key_finds_only_the_live_holder(fixture: Fixture) {
    fixture.ended(unique("mail", UniqueMode::Dedupe), Outcome::Succeeded).await;
    let live = fixture.add(unique("sms", UniqueMode::Dedupe)).await;
    fixture.add(job("fax").unique_key("another", UniqueMode::Dedupe)).await;
    let filter = ListFilter { unique_key: Some(KEY.into()), ..ListFilter::default() };
    let page = fixture.list(&filter).await.expect("list");
    assert_eq!(page.jobs.iter().map(|job| job.id).collect::<Vec<_>>(), [live]);
}
