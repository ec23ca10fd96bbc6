//! Invalid and extreme input, and databases that cannot be used: both engines return
//! the same errors and store nothing.

use std::time::Duration;

use longshore::store::{ClaimRequest, NewWorker, Notice, QueueChange, Ticking};
use longshore::{
    Client, DeadFilter, Error, JobId, ListFilter, NewJob, Result, Retention, RetryPolicy, Schedule, Status,
    SweepScope, UniqueMode,
};

use uuid::Uuid;

use crate::fixture::*;

cases! {
    every_invalid_field_is_refused_by_name_and_nothing_is_stored,
    values_at_their_limits_are_stored,
    the_earliest_and_the_latest_time_are_stored,
    a_query_with_a_nul_byte_is_not_an_internal_error,
    a_queue_with_an_invalid_name_is_refused,
    an_empty_queue_change_is_accepted,
    an_invalid_job_id_is_refused_by_field,
    an_unknown_url_scheme_is_refused_without_showing_the_password,
    connecting_to_a_missing_database_fails_and_creates_nothing,
    a_read_only_database_refuses_writes_and_serves_reads,
    the_largest_numbers_are_accepted,
    empty_batches_and_limits_of_zero_are_accepted,
    a_job_with_the_lowest_or_highest_id_behaves_like_any_other,
    a_number_of_any_size_is_stored_as_written,
}

async fn every_invalid_field_is_refused_by_name_and_nothing_is_stored(fixture: Fixture) {
    let long = "x".repeat(129);
    let key = "k".repeat(513);
    let deep = format!("{}{}", "[".repeat(65), "]".repeat(65));
    let bad: Vec<(NewJob, &str)> = vec![
        (job(""), "kind"),
        (job(&long), "kind"),
        (job("a\0b"), "kind"),
        (job("mail").queue(""), "queue"),
        (job("mail").queue(long.as_str()), "queue"),
        (job("mail").priority(32_768), "priority"),
        (job("mail").max_attempts(0), "max_attempts"),
        (job("mail").max_attempts(32_768), "max_attempts"),
        (job("mail").idempotency_key(""), "idempotency_key"),
        (job("mail").idempotency_key(key.as_str()), "idempotency_key"),
        (job("mail").idempotency_key("cron:nightly:2031-05-06T07:20:00Z"), "idempotency_key"),
        (job("mail").unique_key("a\0", UniqueMode::Replace), "unique_key"),
        (job("mail").timeout(Some(Duration::ZERO)), "timeout"),
        (job("mail").flags([""]), "flags"),
        (job("mail").tags(vec!["t"; 65]), "tags"),
        (job("mail").context("x\0"), "context"),
        (job("mail").metadata(raw(&deep)), "metadata"),
        (job("mail").retry(RetryPolicy::list([])), "retry"),
        (NewJob::from_json("mail", "{oops"), "payload"),
        (NewJob::from_json("mail", &deep), "payload"),
        (NewJob::from_json("mail", r#""\u0000""#), "payload"),
        (NewJob::from_json("mail", r#""\ud800""#), "payload"),
    ];
    for (job, field) in bad {
        let error = fixture.enqueue(job).await.expect_err(field);
        assert!(error.is_invalid(), "{error:?}");
        assert_eq!(error.field(), Some(field));
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
}

/// Both engines must store every value that validation accepts.
async fn values_at_their_limits_are_stored(fixture: Fixture) {
    let name = "ä".repeat(64);
    let key = "k".repeat(512);
    let id = fixture
        .add(
            NewJob::from_json(name.as_str(), &format!("{}{}", "[".repeat(64), "]".repeat(64)))
                .queue(name.as_str())
                .max_attempts(32_767)
                .idempotency_key(key.as_str())
                .unique_key(key.as_str(), UniqueMode::Dedupe)
                .flags(vec![name.as_str(); 64])
                .tags(vec![name.as_str(); 64])
                .context("c".repeat(16 * 1024))
                .timeout(Some(longshore::MAX_DELAY))
                .delay(longshore::MAX_DELAY),
        )
        .await;
    let job = fixture.job(id).await;
    assert_eq!((job.kind, job.queue), (name.clone(), name));
    assert_eq!((job.max_attempts, job.flags.len(), job.tags.len()), (32_767, 64, 64));
    assert_eq!((job.idempotency_key.as_ref(), job.unique_key.as_ref()), (Some(&key), Some(&key)));
    assert_eq!(job.timeout, Some(longshore::MAX_DELAY));
    assert_eq!(job.run_at, start() + longshore::MAX_DELAY);
}

async fn the_earliest_and_the_latest_time_are_stored(fixture: Fixture) {
    for text in ["1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z"] {
        let at = text.parse().expect("a time");
        let id = fixture.add(job("mail").run_at(at)).await;
        assert_eq!(fixture.job(id).await.run_at, at);
    }
}

fn valid_or_refused<T>(result: Result<T>, operation: &str) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.is_invalid() => None,
        Err(error) => panic!("{operation}: {error:?}"),
    }
}

/// Postgres cannot store NUL in text. Such a query matches nothing or is refused as
/// invalid input, but is never an internal error.
async fn a_query_with_a_nul_byte_is_not_an_internal_error(fixture: Fixture) {
    let nul = || Some("a\0b".to_owned());
    fixture.enqueue_kind("mail").await;
    let filters = [
        ListFilter { kind: nul(), ..ListFilter::default() },
        ListFilter { queue: nul(), ..ListFilter::default() },
        ListFilter { tag: nul(), ..ListFilter::default() },
        ListFilter { idempotency_key: nul(), ..ListFilter::default() },
        ListFilter { unique_key: nul(), ..ListFilter::default() },
    ];
    for filter in filters {
        if let Some(page) = valid_or_refused(fixture.list(&filter).await, "list") {
            assert!(page.jobs.is_empty());
        }
    }
    let dead = DeadFilter { kind: nul(), limit: 5, ..DeadFilter::default() };
    valid_or_refused(fixture.store().dead_letters(&dead).await, "dead letters");
    let request =
        ClaimRequest { queues: vec!["a\0b".into()], ..ClaimRequest::new(fixture.worker().await, 1) };
    valid_or_refused(fixture.store().claim(&request, &mut Default::default()).await, "claim");
    valid_or_refused(fixture.store().notify_others(&[Notice::Due("a\0b".into())]).await, "notify_others");
    valid_or_refused(fixture.store().register(&NewWorker::new("a\0b")).await, "register");
    valid_or_refused(fixture.store().remove_schedule("a\0b").await, "remove_schedule");
    valid_or_refused(fixture.store().set_ticking("a\0b", Ticking::Paused).await, "set_ticking");
    for name in ["a\0b", "", &"x".repeat(129)] {
        let schedule = Schedule {
            name: name.into(),
            expression: "* * * * *".into(),
            zone: "UTC".into(),
            missed: "skip".into(),
            template: "{}".into(),
            paused: false,
            next_at: start(),
            last_at: None,
        };
        valid_or_refused(fixture.store().put_schedule(&schedule).await, "put_schedule");
    }
}

async fn a_queue_with_an_invalid_name_is_refused(fixture: Fixture) {
    for name in ["", "a\0b", &"x".repeat(129)] {
        let error = fixture.pause(name).await.expect_err("a bad name");
        assert_eq!(error.field(), Some("queue"), "{error:?}");
    }
    assert!(fixture.queues().await.expect("queues").is_empty());
}

async fn an_empty_queue_change_is_accepted(fixture: Fixture) {
    fixture.store().set_queue("letters", &QueueChange::default()).await.expect("set_queue");
}

async fn an_invalid_job_id_is_refused_by_field(_: Fixture) {
    let error = "not-an-id".parse::<longshore::JobId>().expect_err("not an id");
    assert_eq!(error.field(), Some("id"));
}

// ---- databases that cannot be used -------------------------------------------------

async fn connect_error(url: &str) -> Error {
    Client::connect(url).await.expect_err("the connection must fail")
}

async fn an_unknown_url_scheme_is_refused_without_showing_the_password(_: Fixture) {
    for url in ["mysql://root:hunter2@localhost/x", "hunter2", ""] {
        let error = connect_error(url).await;
        assert_eq!(error.field(), Some("url"), "{error:?}");
        assert!(
            error.to_string().contains("postgres://") && !format!("{error:?}").contains("hunter2"),
            "{error:?}"
        );
    }
}

async fn connecting_to_a_missing_database_fails_and_creates_nothing(fixture: Fixture) {
    match fixture.engine() {
        Engine::Postgres => {
            let error = connect_error("postgres://ada:hunter2@127.0.0.1:1/none").await;
            assert!(error.is_unavailable(), "{error:?}");
            assert!(!format!("{error:?}").contains("hunter2"), "{error:?}");
            let error = connect_error(&with_parameter(&fixture.url(), "schema=No-Schema")).await;
            assert_eq!(error.field(), Some("schema"), "{error:?}");
        }
        Engine::Sqlite => {
            let error = connect_error("sqlite:/no/such/folder/queue.db").await;
            assert_eq!(error.field(), Some("url"), "{error:?}");
        }
    }
}

/// A client of the same data that may not write.
async fn read_only(fixture: &Fixture) -> Client {
    let url = match fixture.engine() {
        Engine::Postgres => with_parameter(&fixture.url(), "options[default_transaction_read_only]=on"),
        Engine::Sqlite => {
            let url = fixture.bare_url();
            let copy = url.trim_start_matches("sqlite:").to_owned();
            fixture.sql(&format!("vacuum into '{copy}'"), None).await;
            // A file with an unknown write version is read-only even for root, for whom
            // file modes do not matter.
            let mut bytes = std::fs::read(&copy).expect("the copy");
            bytes[18] = 3;
            std::fs::write(&copy, bytes).expect("the copy");
            url
        }
    };
    Client::connect(&url).await.expect("connect")
}

async fn a_read_only_database_refuses_writes_and_serves_reads(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let worker = fixture.worker().await;
    let reader = read_only(&fixture).await;
    let errors = [
        reader.enqueue(job("sms")).await.expect_err("enqueue"),
        reader.enqueue(job("sms").unique_key("k", UniqueMode::Dedupe)).await.expect_err("keyed enqueue"),
        reader.cancel(id).await.expect_err("cancel"),
        reader.pause("default").await.expect_err("pause"),
        reader
            .store()
            .claim(&ClaimRequest::new(worker, 1), &mut Default::default())
            .await
            .expect_err("claim"),
    ];
    for error in errors {
        assert!(error.is_read_only(), "{error:?}");
    }
    assert_eq!(reader.get(id).await.expect("get").status, Status::Queued);
    assert_eq!(reader.list(&ListFilter::default()).await.expect("list").jobs.len(), 1);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn the_largest_numbers_are_accepted(fixture: Fixture) {
    let store = fixture.store();
    fixture.add(job("mail").flags(["infrastructure_resilient"])).await;
    let worker = NewWorker { stale_after: Duration::MAX, concurrency: u32::MAX, ..NewWorker::new("test") };
    store.register(&worker).await.expect("register");
    assert_eq!(fixture.claim(worker.id, u32::MAX).await.len(), 1);
    fixture.advance(DAY).await;
    assert_eq!(store.mark_dead(&SweepScope::default()).await.expect("mark_dead"), []);
    assert_eq!(
        store
            .mark_dead(&SweepScope { threshold: Some(Duration::MAX), ..SweepScope::default() })
            .await
            .expect("mark_dead"),
        []
    );
    assert_eq!(store.workers(Some(Duration::MAX)).await.expect("workers").len(), 1);
    let scope = SweepScope { resilient_factor: u32::MAX, limit: u32::MAX, ..SweepScope::default() };
    assert_eq!(store.interrupted(&scope).await.expect("interrupted").len(), 0);
    let policy = Retention { succeeded: Some(Duration::MAX), ..Retention::default() };
    assert_eq!(store.retain(&policy, u32::MAX).await.expect("retain").removed, 0);
    store.fold_tallies(u32::MAX).await.expect("fold");
    store.dead_letters(&DeadFilter { limit: u32::MAX, ..DeadFilter::default() }).await.expect("dead letters");
    fixture
        .limit("default", Some(u32::MAX))
        .await
        .map_or_else(|error| assert!(error.is_invalid(), "{error:?}"), drop);
}

async fn empty_batches_and_limits_of_zero_are_accepted(fixture: Fixture) {
    let store = fixture.store();
    fixture.enqueue_kind("mail").await;
    store.retain(&Retention::default(), 0).await.expect("retain");
    store.fold_tallies(0).await.expect("fold");
    assert_eq!(store.dead_letters(&DeadFilter::default()).await.expect("dead letters"), []);
    assert_eq!(store.progress(&[]).await.expect("progress"), []);
    assert_eq!(store.recover(&[]).await.expect("recover"), []);
    store.notify_others(&[]).await.expect("notify");
    store.interrupted(&SweepScope { limit: 0, ..SweepScope::default() }).await.expect("interrupted");
}

/// Callers choose ids. A walk that starts "after no id" must not miss the ends of the
/// range.
async fn a_job_with_the_lowest_or_highest_id_behaves_like_any_other(fixture: Fixture) {
    for id in [Uuid::nil(), Uuid::max()] {
        let id = JobId(id);
        let request = job("mail").id(id).max_attempts(1);
        if request.validate().is_err() {
            continue;
        }
        let claimed = fixture.running(job("mail").id(id).max_attempts(1)).await;
        assert_eq!(fixture.list(&ListFilter::default()).await.expect("list").jobs.len(), 1);
        fixture.advance(61 * SECOND).await;
        assert_eq!(fixture.sweep_now().await.recovered, 1, "{id} is not recovered");
        fixture.advance(MINUTE).await;
        let worker = fixture.worker().await;
        let again = fixture.claim_one(worker).await;
        assert_eq!(again.lease().id, claimed.lease().id);
        fixture.must_finish(&again, failed_permanently()).await;
        let dead = fixture.store().dead_letters(&DeadFilter { limit: 5, ..DeadFilter::default() }).await;
        assert_eq!(dead.expect("dead letters"), [id]);
        fixture.advance(91 * DAY).await;
        assert_eq!(
            fixture.store().retain(&Retention::default(), 10).await.expect("retain").removed,
            1,
            "{id}"
        );
    }
}

/// Neither engine computes with payloads, so a number may exceed its numeric types.
async fn a_number_of_any_size_is_stored_as_written(fixture: Fixture) {
    for number in ["1e200000", "-1E-200000", "123456789012345678901234567890.5"] {
        let plain = fixture.add(NewJob::from_json("mail", number)).await;
        let keyed = NewJob::from_json("mail", number).unique_key(number, UniqueMode::Dedupe);
        let keyed = fixture.add(keyed.tags(["red"]).metadata(raw(number))).await;
        for id in [plain, keyed] {
            assert_eq!(fixture.job(id).await.payload.get(), number);
        }
    }
    let tagged = ListFilter { tag: Some("red".into()), ..ListFilter::default() };
    assert_eq!(fixture.list(&tagged).await.expect("list").jobs.len(), 3);
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 6);
}
