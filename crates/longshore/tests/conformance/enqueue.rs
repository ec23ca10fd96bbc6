//! Enqueue: a job is stored exactly as requested, and once. `keys.rs` tests
//! idempotency and unique keys.

use std::collections::BTreeSet;
use std::time::Duration;

use longshore::store::{ClaimRequest, KeyWait};
use longshore::{Enqueued, EnqueuedAs, NewJob, RetryPolicy, Status, UniqueMode, ValidJob};

use crate::fixture::*;

cases! {
    a_job_without_options_gets_the_defaults,
    every_option_is_stored_exactly,
    a_claim_contains_the_options_of_the_job,
    a_payload_is_stored_byte_for_byte,
    the_largest_payload_is_stored,
    results_are_in_the_order_of_the_jobs,
    a_repeated_id_returns_created_and_is_stored_once,
    a_repeated_id_within_one_batch_is_stored_once,
    a_repeated_id_with_keys_returns_created,
    a_repeated_id_with_another_idempotency_key_returns_created,
    a_repeated_id_does_not_requeue_a_running_or_finished_job,
    an_enqueue_can_return_the_whole_job_as_get_does,
    a_repeated_enqueue_returns_the_current_job,
    a_delay_counts_from_the_engines_clock,
    a_run_at_in_the_past_is_kept_and_due,
    a_run_at_is_kept_to_the_microsecond,
    the_lowest_and_highest_priority_are_kept,
    an_empty_batch_is_accepted,
    many_jobs_are_stored_in_one_call,
    one_invalid_job_in_a_batch_stores_none,
    concurrent_enqueues_each_get_their_own_job,
    an_invalid_job_does_not_affect_concurrent_enqueues,
    a_job_waits_in_the_queue_it_names,
}

fn valid(job: NewJob) -> ValidJob {
    job.validate().expect("valid")
}

async fn a_job_without_options_gets_the_defaults(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let job = fixture.job(id).await;
    assert_eq!((job.kind.as_str(), job.queue.as_str(), job.status), ("mail", "default", Status::Queued));
    assert_eq!(
        (job.priority, job.attempts, job.max_attempts, job.interruptions, job.lease_no),
        (0, 0, 3, 0, 0)
    );
    assert_eq!((job.created_at, job.run_at, job.updated_at), (start(), start(), start()));
    assert_eq!(job.timeout, Some(2 * HOUR));
    assert_eq!((job.locked_at, job.locked_by, job.started_at, job.finished_at), (None, None, None, None));
    assert_eq!((job.last_error.as_deref(), job.last_failed_at, job.cancel_requested), (None, None, false));
    assert!(job.tags.is_empty() && job.flags.is_empty() && job.errors.is_empty());
    assert!(job.result.is_none() && job.metadata.is_none() && job.progress.is_none() && job.retry.is_none());
}

async fn every_option_is_stored_exactly(fixture: Fixture) {
    let policy = RetryPolicy::list([Duration::from_millis(1500), 90 * SECOND]);
    let id = fixture
        .add(
            NewJob::from_json("resize \"image\" ✓", r#"{"url":"x"}"#)
                .queue("mail'; --")
                .priority(-7)
                .max_attempts(11)
                .run_at(start() + 5 * MINUTE)
                .idempotency_key("order-17")
                .unique_key("customer-23", longshore::UniqueMode::Replace)
                .timeout(Some(Duration::from_millis(2501)))
                .retry(policy.clone())
                .flags(["gpu", "eu, \"west\""])
                .tags(["nightly", "ä{b}"])
                .context("the customer pressed \\ twice")
                .metadata(raw(r#"{"by": [1,  2]}"#))
                .trace("00-abc-def-01"),
        )
        .await;
    let job = fixture.job(id).await;
    assert_eq!((job.kind.as_str(), job.queue.as_str()), ("resize \"image\" ✓", "mail'; --"));
    assert_eq!((job.priority, job.max_attempts), (-7, 11));
    assert_eq!((job.run_at, job.created_at), (start() + 5 * MINUTE, start()));
    assert_eq!(job.idempotency_key.as_deref(), Some("order-17"));
    assert_eq!(job.unique_key.as_deref(), Some("customer-23"));
    assert_eq!(job.timeout, Some(Duration::from_millis(2501)));
    assert_eq!(job.retry, Some(policy));
    assert_eq!(job.flags, ["gpu", "eu, \"west\""]);
    assert_eq!(job.tags, ["nightly", "ä{b}"]);
    assert_eq!(job.context.as_deref(), Some("the customer pressed \\ twice"));
    assert_eq!(job.metadata.expect("metadata").get(), r#"{"by": [1,  2]}"#);
}

async fn a_claim_contains_the_options_of_the_job(fixture: Fixture) {
    let job = NewJob::from_json("mail", r#"{ "to":"ada" }"#)
        .priority(4)
        .max_attempts(9)
        .timeout(None)
        .flags(["gpu"])
        .tags(["nightly"])
        .trace("00-abc-def-01");
    let claimed = fixture.running(job).await;
    assert_eq!(
        (claimed.kind(), claimed.queue(), claimed.payload()),
        ("mail", "default", r#"{ "to":"ada" }"#)
    );
    assert_eq!((claimed.priority(), claimed.attempt(), claimed.max_attempts()), (4, 1, 9));
    assert_eq!((claimed.timeout(), claimed.interruptions()), (None, 0));
    assert_eq!((claimed.flags(), claimed.tags()), (&["gpu".to_owned()][..], &["nightly".to_owned()][..]));
    assert_eq!(
        (claimed.trace(), claimed.run_at(), claimed.claimed_at()),
        (Some("00-abc-def-01"), start(), start())
    );
}

async fn a_payload_is_stored_byte_for_byte(fixture: Fixture) {
    let texts = [
        r#"{"z": 1.50, "a" :[ 1,2 ],"a":2}"#,
        r#""\u00e9 \ud83d\ude00 'quoted' \\ ""#,
        "123456789012345678901234567890.10",
        "null",
        "[]",
        "{\"emoji\": \"😀\"}",
    ];
    for text in texts {
        let id = fixture.add(NewJob::from_json("mail", text)).await;
        assert_eq!(fixture.job(id).await.payload.get(), text);
    }
}

async fn the_largest_payload_is_stored(fixture: Fixture) {
    let text = format!("\"{}\"", "é".repeat(longshore::MAX_PAYLOAD / 2 - 1));
    let id = fixture.add(NewJob::from_json("mail", &text)).await;
    assert_eq!(fixture.job(id).await.payload.get(), text);
}

async fn results_are_in_the_order_of_the_jobs(fixture: Fixture) {
    let jobs: Vec<_> = (0..40).map(|n| valid(job("mail").priority(n))).collect();
    // Not in the order of their ids.
    let shuffled: Vec<_> = (0..40).map(|n| jobs[n * 17 % 40].clone()).collect();
    let results = fixture.store().enqueue(&shuffled, KeyWait::Long).await.expect("enqueue").results;
    let expected: Vec<_> =
        shuffled.iter().map(|job| Enqueued { id: job.id(), how: EnqueuedAs::Created }).collect();
    assert_eq!(results, expected);
}

async fn a_repeated_id_returns_created_and_is_stored_once(fixture: Fixture) {
    let again = valid(job("mail").priority(3));
    for _ in 0..2 {
        let results = fixture
            .store()
            .enqueue(std::slice::from_ref(&again), KeyWait::Long)
            .await
            .expect("enqueue")
            .results;
        assert_eq!(results, [Enqueued { id: again.id(), how: EnqueuedAs::Created }]);
    }
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn a_repeated_id_within_one_batch_is_stored_once(fixture: Fixture) {
    let (again, other) = (valid(job("mail")), valid(job("sms")));
    let batch = [again.clone(), other.clone(), again.clone()];
    let results = fixture.store().enqueue(&batch, KeyWait::Long).await.expect("enqueue").results;
    assert_eq!(
        results.iter().map(|result| result.id).collect::<Vec<_>>(),
        [again.id(), other.id(), again.id()]
    );
    assert_eq!(fixture.count(Status::Queued).await, 2);
}

async fn a_repeated_id_with_keys_returns_created(fixture: Fixture) {
    let jobs = [
        valid(job("mail").idempotency_key("order-17")),
        valid(job("sms").unique_key("customer-23", longshore::UniqueMode::Dedupe)),
        valid(job("fax").unique_key("customer-29", longshore::UniqueMode::Replace)),
        valid(job("post").idempotency_key("order-31").unique_key("c-37", longshore::UniqueMode::Replace)),
    ];
    for _ in 0..2 {
        for job in &jobs {
            let results = fixture
                .store()
                .enqueue(std::slice::from_ref(job), KeyWait::Long)
                .await
                .expect("enqueue")
                .results;
            assert_eq!(results, [Enqueued { id: job.id(), how: EnqueuedAs::Created }], "{}", job.kind());
        }
    }
    assert_eq!(fixture.count(Status::Queued).await, 4);
}

/// A caller that did not receive the reply may enqueue again, long after the job has run.
async fn a_repeated_id_with_another_idempotency_key_returns_created(fixture: Fixture) {
    for first in [job("mail"), job("mail").idempotency_key("order-17")] {
        let first = valid(first);
        let id = first.id();
        fixture.store().enqueue(&[first], KeyWait::Long).await.expect("enqueue");
        let again = fixture.enqueue(job("mail").id(id).idempotency_key("order-19")).await.expect("enqueue");
        assert_eq!(again, Enqueued { id, how: EnqueuedAs::Created });
    }
    assert_eq!(fixture.count(Status::Queued).await, 2);
}

async fn a_repeated_id_does_not_requeue_a_running_or_finished_job(fixture: Fixture) {
    let requested = valid(job("mail"));
    fixture.store().enqueue(std::slice::from_ref(&requested), KeyWait::Long).await.expect("enqueue");
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    let results = fixture
        .store()
        .enqueue(std::slice::from_ref(&requested), KeyWait::Long)
        .await
        .expect("enqueue")
        .results;
    assert_eq!(results, [Enqueued { id: requested.id(), how: EnqueuedAs::Created }]);
    assert_eq!(fixture.status(requested.id()).await, Status::Running);
    fixture.must_finish(&claimed, done()).await;
    fixture.store().enqueue(std::slice::from_ref(&requested), KeyWait::Long).await.expect("enqueue");
    assert_eq!(fixture.status(requested.id()).await, Status::Succeeded);
}

async fn an_enqueue_can_return_the_whole_job_as_get_does(fixture: Fixture) {
    fixture.store().pin_clock(Some(start() + Duration::from_micros(123_457))).await.expect("pin");
    let at = start() + Duration::from_nanos(1_234_567_891);
    let requests = [
        job("mail"),
        NewJob::from_json("mail", r#"{"a": 1.00, "b": [null, "✓"]}"#)
            .queue("letters")
            .priority(-7)
            .max_attempts(9),
        job("mail").run_at(at),
        job("mail").delay(Duration::from_nanos(90_000_001_999)),
        job("mail").timeout(None),
        job("mail").timeout(Some(Duration::from_micros(1_500_900))),
        job("mail")
            .idempotency_key("order-17")
            .retry(RetryPolicy::list([Duration::from_millis(1500), 90 * SECOND]))
            .tags(["red", "blue"])
            .flags(["gpu"])
            .context("by hand")
            .metadata(raw(r#"{"team": "blue", "n": 1.0}"#))
            .trace("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        job("mail").unique_key("account-7", UniqueMode::Replace).idempotency_key("order-18"),
    ];
    for request in requests {
        let (enqueued, job) = fixture.enqueue(request).returning_job().await.expect("enqueue");
        assert_eq!(enqueued.how, EnqueuedAs::Created);
        assert_eq!(snapshot(&job), snapshot(&fixture.job(enqueued.id).await));
    }
    let existing = [
        (job("other").idempotency_key("order-17"), EnqueuedAs::Existing),
        (job("other").unique_key("account-7", UniqueMode::Dedupe), EnqueuedAs::Existing),
        (job("other").unique_key("account-7", UniqueMode::Replace).priority(3), EnqueuedAs::Replaced),
    ];
    for (request, how) in existing {
        let (enqueued, job) = fixture.enqueue(request).returning_job().await.expect("enqueue");
        assert_eq!(enqueued.how, how);
        assert_eq!(snapshot(&job), snapshot(&fixture.job(enqueued.id).await));
        assert_eq!(snapshot(&job), snapshot(&enqueued.job(&fixture.client()).await.expect("job")));
    }
    // A running holder loses its key to a new job.
    let worker = fixture.worker().await;
    fixture.claim(worker, 100).await;
    let next = job("other").unique_key("account-7", UniqueMode::Replace);
    let (enqueued, job) = fixture.enqueue(next).returning_job().await.expect("enqueue");
    assert_eq!(enqueued.how, EnqueuedAs::Created);
    assert_eq!(snapshot(&job), snapshot(&fixture.job(enqueued.id).await));
}

/// An earlier try stored the job, and its reply was lost. The job may have changed since.
async fn a_repeated_enqueue_returns_the_current_job(fixture: Fixture) {
    let worker = fixture.worker().await;
    let requests = [
        job("mail"),
        job("mail").idempotency_key("order-17"),
        job("mail").unique_key("account-7", UniqueMode::Dedupe),
    ];
    for request in requests {
        fixture.enqueue(request.clone()).await.expect("enqueue");
        let claimed = fixture.claim_one(worker).await;
        let (enqueued, job) = fixture.enqueue(request).returning_job().await.expect("enqueue");
        assert_eq!(enqueued, Enqueued { id: claimed.lease().id, how: EnqueuedAs::Created });
        assert_eq!(job.status, Status::Running);
    }
}

async fn a_delay_counts_from_the_engines_clock(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(90 * SECOND)).await;
    assert_eq!(fixture.job(id).await.run_at, start() + 90 * SECOND);
    let worker = fixture.worker_with(HOUR).await;
    fixture.advance(89 * SECOND).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 0);
    fixture.advance(SECOND).await;
    assert_eq!(ids(&fixture.claim(worker, 1).await), [id]);
}

async fn a_run_at_in_the_past_is_kept_and_due(fixture: Fixture) {
    let requested = start() - DAY;
    let id = fixture.add(job("mail").run_at(requested)).await;
    assert_eq!(fixture.job(id).await.run_at, requested);
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 1).await), [id]);
}

async fn a_run_at_is_kept_to_the_microsecond(fixture: Fixture) {
    let requested = start() + Duration::from_micros(1_000_001);
    let id = fixture.add(job("mail").run_at(requested)).await;
    assert_eq!(fixture.job(id).await.run_at, requested);
    let worker = fixture.worker().await;
    fixture.advance(Duration::from_micros(1_000_000)).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 0);
    fixture.advance(Duration::from_micros(1)).await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
}

async fn the_lowest_and_highest_priority_are_kept(fixture: Fixture) {
    let low = fixture.add(job("low").priority(i16::MIN.into())).await;
    let high = fixture.add(job("high").priority(i16::MAX.into())).await;
    assert_eq!((fixture.job(low).await.priority, fixture.job(high).await.priority), (i16::MIN, i16::MAX));
    let worker = fixture.worker().await;
    assert_eq!(ids(&fixture.claim(worker, 2).await), [high, low]);
}

async fn an_empty_batch_is_accepted(fixture: Fixture) {
    assert_eq!(fixture.store().enqueue(&[], KeyWait::Long).await.expect("enqueue").results, []);
    assert_eq!(fixture.enqueue_many(Vec::<NewJob>::new()).await.expect("enqueue_many"), []);
}

async fn many_jobs_are_stored_in_one_call(fixture: Fixture) {
    let results = fixture.enqueue_many((0..3000).map(|_| job("mail"))).await.expect("enqueue_many");
    let distinct: BTreeSet<_> = results.iter().map(|result| result.id).collect();
    assert_eq!(distinct.len(), 3000);
    assert_eq!(fixture.count(Status::Queued).await, 3000);
}

async fn one_invalid_job_in_a_batch_stores_none(fixture: Fixture) {
    let error = fixture.enqueue_many([job("mail"), job(""), job("sms")]).await.expect_err("an empty kind");
    assert_eq!(error.field(), Some("jobs[1].kind"));
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
}

async fn concurrent_enqueues_each_get_their_own_job(fixture: Fixture) {
    let tasks: Vec<_> = (0..64)
        .map(|n| {
            let client = fixture.client();
            tokio::spawn(async move { client.enqueue(job("mail").priority(n)).await })
        })
        .collect();
    let mut seen = BTreeSet::new();
    for (n, task) in tasks.into_iter().enumerate() {
        let result = task.await.expect("task").expect("enqueue");
        assert_eq!(result.how, EnqueuedAs::Created);
        assert_eq!(fixture.job(result.id).await.priority, n as i16);
        seen.insert(result.id);
    }
    assert_eq!(seen.len(), 64);
}

async fn an_invalid_job_does_not_affect_concurrent_enqueues(fixture: Fixture) {
    let client = &*fixture;
    let (good, bad, other_good, keyed, twin) = tokio::join!(
        client.enqueue(job("mail")),
        client.enqueue(job("mail").priority(99_999)),
        client.enqueue(job("sms")),
        client.enqueue(job("keyed").idempotency_key("order-17")),
        client.enqueue(job("twin").idempotency_key("order-17")),
    );
    assert_eq!(bad.expect_err("a priority out of range").field(), Some("priority"));
    assert_eq!(good.expect("good").how, EnqueuedAs::Created);
    assert_eq!(other_good.expect("good").how, EnqueuedAs::Created);
    assert_eq!(keyed.expect("keyed").id, twin.expect("twin").id);
    assert_eq!(fixture.count(Status::Queued).await, 3);
}

async fn a_job_waits_in_the_queue_it_names(fixture: Fixture) {
    let id = fixture.add(job("mail").queue("letters")).await;
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 0);
    let request = ClaimRequest { queues: vec!["letters".into()], ..ClaimRequest::new(worker, 1) };
    assert_eq!(ids(&fixture.claim_with(&request).await), [id]);
}
