//! The SQL functions `enqueue`, `cancel` and `retry` on Postgres follow the same rules as
//! the library. Also schema names and roles.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::rules::lifecycle::{self, Event, State, Transition};
use longshore::store::{ClaimRequest, Fenced, NewWorker};
use longshore::{Client, JobId, ListFilter, NewJob, Outcome, Report, RetryPolicy, Status, UniqueMode};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use crate::fixture::*;
use crate::locks::in_time;
use crate::transitions::{Builder, Situation};

cases! {
    only on postgres:
    the_cancel_function_follows_the_rules,
    the_retry_function_follows_the_rules,
    the_retry_function_says_when_the_key_is_taken,
    a_job_enqueued_from_sql_equals_one_enqueued_by_the_library,
    every_argument_of_the_sql_enqueue_is_stored,
    the_sql_enqueue_respects_keys,
    the_sql_enqueue_refuses_what_the_library_refuses,
    the_sql_enqueue_has_the_same_limits_as_the_library,
    the_function_accepts_every_retry_policy_and_time_of_the_library,
    the_sql_enqueue_refuses_values_that_could_not_be_read_back,
    flags_of_any_shape_are_stored_as_one_list,
    the_sql_enqueue_accepts_the_same_payloads_as_the_library,
    two_half_surrogates_around_a_backslash_are_refused,
    the_sql_enqueue_refuses_options_with_missing_or_repeated_fields,
    a_null_unique_mode_means_dedupe,
    a_job_with_unreadable_options_does_not_block_its_batch,
    brackets_in_strings_do_not_count_as_depth,
    ids_generated_in_sql_are_version_seven_and_sort_with_those_of_the_library,
    a_job_enqueued_from_sql_wakes_subscribers,
    a_rolled_back_sql_enqueue_stores_nothing,
    any_valid_schema_name_works_end_to_end,
    a_reserved_or_invalid_schema_name_is_refused_by_field,
    a_role_that_may_not_create_schemas_can_migrate_its_own_schema,
}

const SITUATIONS: [Situation; 13] = [
    Situation::Fresh,
    Situation::Retrying,
    Situation::WaitingSuspect,
    Situation::Running,
    Situation::LastAttempt,
    Situation::CancelRequested,
    Situation::Superseded,
    Situation::SuspectNotStarted,
    Situation::SuspectStarted,
    Situation::SuspectOnLastInterruption,
    Situation::Finished(Outcome::Succeeded),
    Situation::Finished(Outcome::FailedPermanent),
    Situation::Finished(Outcome::Cancelled),
];

pub(crate) async fn call(fixture: &Fixture, function: &str, id: JobId) -> String {
    let sql = format!("select {function}($1)");
    let mut connection = fixture.postgres().await;
    sqlx::query_scalar(AssertSqlSafe(sql)).bind(id.0).fetch_one(&mut connection).await.expect("call")
}

/// Everything about a job that the rules can change.
async fn summary(fixture: &Fixture, id: JobId) -> String {
    let job = fixture.job(id).await;
    format!(
        "{:?} due {} error {:?}\n{:?}",
        fixture.state(id).await,
        job.run_at,
        job.last_error,
        job.errors.len()
    )
}

async fn the_cancel_function_follows_the_rules(fixture: Fixture) {
    let mut builder = Builder::new(fixture.clone());
    for situation in SITUATIONS {
        // Two jobs in the same situation: the function must do to one what the library
        // does to the other.
        let (by_sql, by_library) = (builder.build(situation).await, builder.build(situation).await);
        let next = lifecycle::next(&fixture.state(by_sql).await, Event::Cancel);
        let expected = match next {
            Ok(Transition::Finish(_)) => "cancelled",
            Ok(Transition::RequestCancel) => "pending",
            _ => "finished",
        };
        assert_eq!(call(&fixture, "cancel", by_sql).await, expected, "{situation:?}");
        assert_eq!(fixture.cancel(by_library).await.is_ok(), next.is_ok(), "{situation:?}");
        assert_same(&fixture, by_sql, by_library, situation).await;
    }
    assert_eq!(call(&fixture, "cancel", JobId::new()).await, "not_found");
}

async fn the_retry_function_follows_the_rules(fixture: Fixture) {
    let mut builder = Builder::new(fixture.clone());
    for situation in SITUATIONS {
        let (by_sql, by_library) = (builder.build(situation).await, builder.build(situation).await);
        let next = lifecycle::next(&fixture.state(by_sql).await, Event::Retry);
        let expected = if next.is_ok() { "queued" } else { "running" };
        assert_eq!(call(&fixture, "retry", by_sql).await, expected, "{situation:?}");
        assert_eq!(fixture.retry(by_library).await.is_ok(), next.is_ok(), "{situation:?}");
        assert_same(&fixture, by_sql, by_library, situation).await;
    }
    assert_eq!(call(&fixture, "retry", JobId::new()).await, "not_found");
}

async fn assert_same(fixture: &Fixture, by_sql: JobId, by_library: JobId, situation: Situation) {
    // The workers differ, because each job has its own.
    let anonymous = |text: String, state: State| match state {
        State::Running(running) => text.replace(&format!("{:?}", running.worker), "worker"),
        _ => text,
    };
    let one = anonymous(summary(fixture, by_sql).await, fixture.state(by_sql).await);
    let other = anonymous(summary(fixture, by_library).await, fixture.state(by_library).await);
    assert_eq!(one, other, "{situation:?}");
}

async fn the_retry_function_says_when_the_key_is_taken(fixture: Fixture) {
    let keyed = || job("mail").unique_key("customer-23", UniqueMode::Dedupe);
    let old = fixture.ended(keyed(), Outcome::FailedPermanent).await;
    fixture.add(keyed()).await;
    assert_eq!(call(&fixture, "retry", old).await, "key_taken");
    assert_eq!(fixture.status(old).await, Status::FailedPermanent);
}

async fn enqueue(fixture: &Fixture, arguments: &str) -> Result<(JobId, String), sqlx::Error> {
    let sql = format!("select job, how from enqueue({arguments})");
    let mut connection = fixture.postgres().await;
    let (id, how): (Uuid, String) = sqlx::query_as(AssertSqlSafe(sql)).fetch_one(&mut connection).await?;
    Ok((JobId(id), how))
}

async fn a_job_enqueued_from_sql_equals_one_enqueued_by_the_library(fixture: Fixture) {
    let (by_sql, how) = enqueue(&fixture, r#"'mail', '{"for":"mail"}'"#).await.expect("enqueue");
    assert_eq!(how, "created");
    let by_library = fixture.enqueue_kind("mail").await;
    let strip = |text: String, id: JobId| text.replace(&id.to_string(), "id");
    let (one, other) = (fixture.job(by_sql).await, fixture.job(by_library).await);
    assert_eq!(strip(snapshot(&one), by_sql), strip(snapshot(&other), by_library));
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
}

async fn every_argument_of_the_sql_enqueue_is_stored(fixture: Fixture) {
    let (id, _) = enqueue(
        &fixture,
        "'mail', '[1]', queue => 'letters', priority => -3, max_attempts => 7, delay => '90 s',
         idempotency_key => 'order-17', unique_key => 'customer-23', timeout => '7 s', flags => '{gpu}'",
    )
    .await
    .expect("enqueue");
    let job = fixture.job(id).await;
    assert_eq!((job.queue.as_str(), job.priority, job.max_attempts), ("letters", -3, 7));
    assert_eq!((job.run_at, job.timeout), (start() + 90 * SECOND, Some(7 * SECOND)));
    assert_eq!((job.payload.get(), job.flags), ("[1]", vec!["gpu".to_owned()]));
    assert_eq!(
        (job.idempotency_key.as_deref(), job.unique_key.as_deref()),
        (Some("order-17"), Some("customer-23"))
    );
}

async fn the_sql_enqueue_respects_keys(fixture: Fixture) {
    let (first, _) = enqueue(&fixture, "'mail', idempotency_key => 'order-17'").await.expect("enqueue");
    let again = enqueue(&fixture, "'sms', idempotency_key => 'order-17'").await.expect("enqueue");
    assert_eq!(again, (first, "existing".into()));
    let (holder, _) = enqueue(&fixture, "'mail', unique_key => 'k'").await.expect("enqueue");
    for (mode, how) in [("dedupe", "existing"), ("replace", "replaced"), ("preserve_run_at", "replaced")] {
        let arguments = format!("'sms', unique_key => 'k', unique_mode => '{mode}'");
        assert_eq!(enqueue(&fixture, &arguments).await.expect("enqueue"), (holder, how.into()));
    }
    let result = fixture.enqueue(job("fax").unique_key("k", UniqueMode::Dedupe)).await.expect("enqueue");
    assert_eq!(result.id, holder);
}

async fn the_sql_enqueue_refuses_what_the_library_refuses(fixture: Fixture) {
    let deep = format!("{}{}", "[".repeat(65), "]".repeat(65));
    let bad = [
        "''".to_owned(),
        "repeat('x', 129)".into(),
        "'mail', queue => ''".into(),
        "'mail', max_attempts => 0".into(),
        "'mail', priority => 40000".into(),
        "'mail', idempotency_key => repeat('k', 513)".into(),
        "'mail', unique_key => ''".into(),
        "'mail', unique_key => 'k', unique_mode => 'sometimes'".into(),
        "'mail', timeout => '0 s'".into(),
        format!("'mail', '{deep}'"),
        r#"'mail', '"\u0000"'"#.into(),
        r#"'mail', '"\ud800"'"#.into(),
        "'mail', null".into(),
        format!("'mail', json_build_object('a', repeat('x', {}))", 1024 * 1024),
    ];
    for arguments in bad {
        assert!(enqueue(&fixture, &arguments).await.is_err(), "{arguments:.80} was accepted");
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
}

/// Tests each limit and the first value past it. The validation of the library says what
/// is valid, and it runs before the key lookup.
async fn the_sql_enqueue_has_the_same_limits_as_the_library(fixture: Fixture) {
    let options = |json: &str| format!("options => '{json}'");
    let option = |name: &str, json: &str| options(&format!(r#"{{"{name}":{json}}}"#));
    let quoted = |text: &str| format!("\"{text}\"");
    let deep = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
    let mail = || job("mail");
    let mut pairs: Vec<(String, NewJob)> = vec![
        ("id => '00000000-0000-0000-0000-000000000000'".into(), mail().id(JobId(Uuid::nil()))),
        ("id => 'ffffffff-ffff-ffff-ffff-ffffffffffff'".into(), mail().id(JobId(Uuid::max()))),
        ("run_at => '9999-12-31 23:59:59.999999+00'".into(), mail().run_at(last_instant())),
        ("timeout => null".into(), mail().timeout(None)),
        ("timeout => '1 ms'".into(), mail().timeout(Some(SECOND / 1000))),
        ("timeout => '0.9 ms'".into(), mail().timeout(Some(SECOND * 9 / 10_000))),
        (
            "idempotency_key => 'cron:a:2031-05-06T07:20:00Z'".into(),
            mail().idempotency_key("cron:a:2031-05-06T07:20:00Z"),
        ),
        ("idempotency_key => chr(31) || '4:mailk'".into(), mail().idempotency_key("\u{1f}4:mailk")),
        ("unique_key => chr(31) || '4:mailk'".into(), mail().unique_key("\u{1f}4:mailk", UniqueMode::Dedupe)),
        (options("{}"), mail()),
        (option("retry", r#"{"policy":"list","delays_ms":[]}"#), mail().retry(RetryPolicy::list([]))),
        (
            option("retry", r#"{"policy":"jitter","base_ms":5000,"cap_ms":4999}"#),
            mail().retry(RetryPolicy::Jitter { base: 5 * SECOND, cap: 4999 * SECOND / 1000 }),
        ),
        (
            option("retry", r#"{"policy":"jitter","base_ms":5000,"cap_ms":5000}"#),
            mail().retry(RetryPolicy::Jitter { base: 5 * SECOND, cap: 5 * SECOND }),
        ),
        (
            option("retry", &format!(r#"{{"policy":"fixed","delay_ms":{}}}"#, u64::MAX)),
            mail().retry(RetryPolicy::fixed(Duration::MAX)),
        ),
    ];
    for millis in [315_360_000_000, 315_360_000_001] {
        let cap = Duration::from_millis(millis);
        pairs.push((
            option("retry", &format!(r#"{{"policy":"exponential","cap_ms":{millis}}}"#)),
            mail().retry(RetryPolicy::Exponential { cap }),
        ));
    }
    for priority in [-32_769, -32_768, 32_767, 32_768] {
        pairs.push((format!("priority => {priority}"), mail().priority(priority)));
    }
    for attempts in [0, 1, 32_767, 32_768] {
        pairs.push((format!("max_attempts => {attempts}"), mail().max_attempts(attempts)));
    }
    for days in [3650, 3651, 20 * 365] {
        pairs.push((format!("delay => '{days} days'"), mail().delay(days * DAY)));
        pairs.push((format!("timeout => '{days} days'"), mail().timeout(Some(days * DAY))));
    }
    for n in [64, 65] {
        pairs.push((format!("flags => array_fill('f'::text, array[{n}])"), mail().flags(vec!["f"; n])));
        let tags = serde_json::json!(vec!["t"; n]).to_string();
        pairs.push((option("tags", &tags), mail().tags(vec!["t"; n])));
        pairs.push((option("metadata", &deep(n)), mail().metadata(raw(&deep(n)))));
    }
    for bytes in [0, 1, 128, 129, 512, 513, 16 * 1024, 16 * 1024 + 1] {
        let text = "x".repeat(bytes);
        pairs.push((format!("queue => '{text}'"), mail().queue(text.as_str())));
        pairs.push((format!("unique_key => '{text}'"), mail().unique_key(&text, UniqueMode::Dedupe)));
        pairs.push((format!("flags => array['{text}']"), mail().flags([text.as_str()])));
        pairs.push((option("tags", &format!("[{}]", quoted(&text))), mail().tags([text.as_str()])));
        pairs.push((option("context", &quoted(&text)), mail().context(text.as_str())));
        pairs.push((option("trace", &quoted(&text)), mail().trace(text.as_str())));
    }
    pairs.push(("queue => '*'".into(), mail().queue("*")));
    for bytes in [64 * 1024, 64 * 1024 + 1] {
        let text = quoted(&"x".repeat(bytes - 2));
        pairs.push((option("metadata", &text), mail().metadata(raw(&text))));
    }
    for n in [1000, 1001] {
        let delays = serde_json::json!(vec![1000; n]);
        let policy = format!(r#"{{"policy":"list","delays_ms":{delays}}}"#);
        pairs.push((option("retry", &policy), mail().retry(RetryPolicy::list(vec![SECOND; n]))));
    }
    enqueue(&fixture, "'first', queue => 'other', idempotency_key => 'order-17'").await.expect("enqueue");
    let mut accepted = 0;
    for (arguments, job) in pairs {
        let enqueued = enqueue(&fixture, &format!("'mail', {arguments}")).await;
        assert_eq!(enqueued.is_ok(), job.validate().is_ok(), "{arguments:.80}");
        let keyed = enqueue(&fixture, &format!("'mail', {arguments}, idempotency_key => 'order-17'")).await;
        assert_eq!(keyed.is_ok(), enqueued.is_ok(), "{arguments:.80} with an existing key");
        if let Ok((id, _)) = enqueued {
            fixture.job(id).await;
            accepted += 1;
        }
    }
    assert_eq!(fixture.check().await.expect("check").jobs, accepted + 1);
}

fn last_instant() -> DateTime<Utc> {
    "9999-12-31T23:59:59.999999Z".parse().expect("a time")
}

async fn the_function_accepts_every_retry_policy_and_time_of_the_library(fixture: Fixture) {
    let policies = [
        RetryPolicy::default(),
        RetryPolicy::exponential(),
        RetryPolicy::fixed(longshore::MAX_DELAY),
        RetryPolicy::list([Duration::ZERO, longshore::MAX_DELAY]),
        RetryPolicy::None,
    ];
    for policy in policies {
        let options = serde_json::json!({ "retry": policy });
        let arguments = format!("'mail', options => '{options}', run_at => '{}'", last_instant());
        let (id, _) = enqueue(&fixture, &arguments).await.expect("enqueue");
        let job = fixture.job(id).await;
        assert_eq!((job.run_at, job.retry), (last_instant(), Some(policy)));
    }
}

/// Every stored value must be readable, above all by a claim.
async fn the_sql_enqueue_refuses_values_that_could_not_be_read_back(fixture: Fixture) {
    let bad = [
        r#"options => '{"tags":"x"}'"#,
        r#"options => '{"tags":[1]}'"#,
        r#"options => '{"context":{}}'"#,
        r#"options => '{"retry":"often"}'"#,
        r#"options => '{"colour":"red"}'"#,
        "options => '[]'",
        r#"options => '"x"'"#,
        "flags => array[null]::text[]",
        "flags => array['gpu', null]",
        "flags => array['']",
        "flags => array[repeat('x', 129)]",
        "run_at => 'infinity'",
        "run_at => '-infinity'",
        "run_at => '4000-01-01 00:00+00 BC'",
        "run_at => '1969-12-31 23:59+00'",
        "run_at => '10000-01-01 00:00+00'",
        "delay => '9000 years'",
    ];
    for argument in bad {
        for key in ["", ", unique_key => 'k'", ", idempotency_key => 'k'"] {
            let arguments = format!("'mail', {argument}{key}");
            assert!(enqueue(&fixture, &arguments).await.is_err(), "{arguments} was accepted");
        }
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
    let good = [
        r#"options => '{"tags":["red"],"context":"c","trace":"t","metadata":{"a":1e200000}}'"#,
        r#"options => '{"retry":{"policy":"fixed","delay_ms":5}}'"#,
        "options => '{}'",
        "flags => '{}'",
        "flags => array[repeat('x', 128)]",
        "run_at => '1970-01-01 00:00+00'",
        "run_at => '9999-12-31 23:59+00'",
    ];
    for argument in good {
        let (id, _) = enqueue(&fixture, &format!("'mail', {argument}")).await.expect(argument);
        fixture.job(id).await;
    }
}

async fn flags_of_any_shape_are_stored_as_one_list(fixture: Fixture) {
    for flags in ["{gpu,eu}", "{{gpu},{eu}}", "[0:1]={gpu,eu}"] {
        enqueue(&fixture, &format!("'mail', flags => '{flags}'")).await.expect("enqueue");
    }
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 9).await;
    assert_eq!(claimed.len(), 3);
    assert!(claimed.iter().all(|job| job.flags() == ["gpu", "eu"]), "{claimed:?}");
}

/// The validation of the library says what is valid.
async fn the_sql_enqueue_accepts_the_same_payloads_as_the_library(fixture: Fixture) {
    let payloads = [
        "1e200000",
        "-1E-200000",
        r#""\\u0000""#,
        r#""\\ud800""#,
        r#""\"\\""#,
        r#""\ud83d\ude00 \u00e9""#,
        r#""\uD83D\uDE00""#,
        r#""\u0000""#,
        r#"{"a\u0000":1}"#,
        r#""\\\u0000""#,
        r#""\ud800""#,
        r#""\ud800x""#,
        r#""\ud800\n""#,
        r#""\ud800\ud800""#,
        r#""\udc00\ud800""#,
        r#""\uDC00""#,
    ];
    for payload in payloads {
        let library = NewJob::from_json("mail", payload).validate().is_ok();
        let sql = enqueue(&fixture, &format!("'mail', '{payload}'")).await.is_ok();
        assert_eq!(sql, library, "{payload}");
    }
}

async fn two_half_surrogates_around_a_backslash_are_refused(fixture: Fixture) {
    let payload = r#""\ud83d\\\ude00""#;
    NewJob::from_json("mail", payload).validate().expect_err("the library refuses it");
    assert!(enqueue(&fixture, &format!("'mail', '{payload}'")).await.is_err());
}

/// Such options could not be read, so the job would run without any of them.
async fn the_sql_enqueue_refuses_options_with_missing_or_repeated_fields(fixture: Fixture) {
    for options in [
        r#"{"tags":["a"],"tags":["b"]}"#,
        r#"{"context":"a","context":"b"}"#,
        r#"{"tags":["a"],"retry":{"policy":"fixed"}}"#,
        r#"{"tags":["a"],"retry":{"policy":"list","delays_ms":"x"}}"#,
        r#"{"tags":["a"],"retry":{"policy":"list","delays_ms":["x"]}}"#,
        r#"{"tags":["a"],"retry":{"policy":"fixed","delay_ms":[5]}}"#,
        r#"{"tags":["a"],"retry":{"policy":"fixed","delay_ms":5,"delay_ms":5}}"#,
        r#"{"tags":["a"],"retry":{"policy":"fixed","delay_ms":18446744073709551616}}"#,
        r#"{"tags":["a"],"retry":{"policy":"none","policy":"none"}}"#,
        r#"{"tags":["a"],"retry":{"policy":"none","delay_ms":5}}"#,
    ] {
        let arguments = format!("'mail', options => '{options}'");
        assert!(enqueue(&fixture, &arguments).await.is_err(), "{options} was accepted");
    }
}

async fn a_null_unique_mode_means_dedupe(fixture: Fixture) {
    let (holder, _) =
        enqueue(&fixture, "'mail', unique_key => 'k', unique_mode => null").await.expect("enqueue");
    let again = enqueue(&fixture, "'sms', unique_key => 'k', unique_mode => null").await.expect("enqueue");
    assert_eq!(again, (holder, "existing".into()));
    assert_eq!(fixture.job(holder).await.kind, "mail");
}

/// A row that cannot be read completely must not affect the other jobs of its batch.
async fn a_job_with_unreadable_options_does_not_block_its_batch(fixture: Fixture) {
    let options =
        [r#"{"tags":"x"}"#, "[]", "1", r#"{"retry":{"policy":"fixed"}}"#, r#"{"tags":["a"],"tags":["b"]}"#];
    for options in options {
        let unreadable = fixture.enqueue_kind("mail").await;
        fixture
            .sql(&format!("update jobs set options = '{options}' where id = {{id}}"), Some(unreadable))
            .await;
        fixture.enqueue_kind("mail").await;
    }
    let jobs = 2 * options.len();
    for tag in [None, Some("x".to_owned())] {
        let found = if tag.is_some() { 0 } else { jobs };
        let by = ListFilter { tag, ..ListFilter::default() };
        assert_eq!(fixture.list(&by).await.expect("list").jobs.len(), found);
    }
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 99).await;
    assert_eq!(claimed.len(), jobs);
    fixture.advance(61 * SECOND).await;
    assert_eq!(fixture.sweep_now().await.recovered, jobs as u64);
    // The check reports the options.
    fixture.skip_final_check();
}

/// Depth is counted only outside strings, as in the library.
async fn brackets_in_strings_do_not_count_as_depth(fixture: Fixture) {
    let text = format!(r#"{{"a":"{}\"{}"}}"#, "[".repeat(100), "{".repeat(100));
    NewJob::from_json("mail", &text).validate().expect("valid");
    enqueue(&fixture, &format!("'mail', '{text}'")).await.expect("enqueue");
}

async fn ids_generated_in_sql_are_version_seven_and_sort_with_those_of_the_library(fixture: Fixture) {
    let before = JobId::new();
    tokio::time::sleep(Duration::from_millis(2)).await;
    let (id, _) = enqueue(&fixture, "'mail'").await.expect("enqueue");
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert!(before < id && id < JobId::new(), "{id}");
    assert_eq!(id.0.get_version_num(), 7);
}

async fn a_job_enqueued_from_sql_wakes_subscribers(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    enqueue(&fixture, "'mail', queue => 'letters'").await.expect("enqueue");
    let wake_up = tokio::time::timeout(MAX_WAIT, wakeups.next()).await;
    assert_eq!(wake_up.expect("a wake-up"), Some("letters".into()));
}

async fn a_rolled_back_sql_enqueue_stores_nothing(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    sqlx::raw_sql("begin; select enqueue('mail', unique_key => 'k'); rollback")
        .execute(&mut connection)
        .await
        .expect("sql");
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
    fixture.add(job("mail").unique_key("k", UniqueMode::Dedupe)).await;
}

// ---- schemas -----------------------------------------------------------------

/// A separate database, for cases that choose the names of schemas or roles.
struct Database(String);

impl Database {
    async fn create() -> Self {
        let database = Database(format!("t_{}", Uuid::now_v7().simple()));
        database.run(&database_url(), &format!("create database {}", database.0)).await;
        database
    }

    fn url(&self, parameter: &str) -> String {
        let url = database_url();
        let (url, parameters) = url.split_once('?').unwrap_or((&url, ""));
        let (server, _) = url.rsplit_once('/').expect("a URL that names a database");
        with_parameter(&format!("{server}/{}?{parameters}", self.0), parameter)
    }

    async fn run(&self, url: &str, sql: &str) {
        let mut connection = PgConnection::connect(url).await.expect("connect");
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.expect("sql");
    }

    async fn remove(self) {
        self.run(&database_url(), &format!("drop database {} with (force)", self.0)).await;
    }
}

async fn any_valid_schema_name_works_end_to_end(_: Fixture) {
    let database = Database::create().await;
    let long = "s".repeat(63);
    for schema in ["user", "order", "my_longshore_schema", "longshore", &long] {
        let url = database.url(&format!("schema={schema}"));
        let client = Client::connect(&url).await.expect(schema);
        client.migrate().await.expect(schema);
        let mut wakeups = client.store().subscribe().await.expect(schema);
        database
            .run(&database.url(""), &format!("select \"{schema}\".enqueue('mail', unique_key => 'k')"))
            .await;
        assert_eq!(in_time(wakeups.next()).await.as_deref(), Some("default"), "{schema}");
        client.enqueue(job("mail")).await.expect(schema);
        client.enqueue(job("mail").unique_key("l", UniqueMode::Replace)).await.expect(schema);
        let worker = NewWorker::new("test");
        client.store().register(&worker).await.expect(schema);
        let request = ClaimRequest::new(worker.id, 9);
        let claims = client.store().claim(&request, &mut Default::default()).await.expect(schema);
        assert_eq!(claims.jobs.len(), 3, "{schema}");
        let report =
            |claimed| Report { claimed, ending: done(), follow_ups: Vec::new(), has_progressed: false };
        let settled = client.settle(claims.jobs.iter().map(report).collect()).await.expect(schema);
        assert_eq!(settled, [Fenced::Held; 3], "{schema}");
        assert_eq!(client.check().await.expect(schema).problems, []);
    }
    database.remove().await;
}

async fn a_reserved_or_invalid_schema_name_is_refused_by_field(fixture: Fixture) {
    let long = "s".repeat(64);
    for schema in ["pg_x", "pg_", "", "Upper", "1st", "a-b", "a\"b", &long] {
        let url = with_parameter(&database_url(), &format!("schema={schema}"));
        let error = Client::connect(&url).await.expect_err(schema);
        assert_eq!(error.field(), Some("schema"), "{schema}: {error}");
    }
    drop(fixture);
}

async fn a_role_that_may_not_create_schemas_can_migrate_its_own_schema(_: Fixture) {
    let database = Database::create().await;
    let role = format!("{}_role", database.0);
    let setup = format!("create role {role}; create schema theirs authorization {role}");
    database.run(&database.url(""), &setup).await;
    let url = database.url(&format!("schema=theirs&options[role]={role}"));
    let client = Client::connect(&url).await.expect("connect");
    let migrated = client.migrate().await;
    let enqueued = client.enqueue(job("mail")).await;
    drop(client);
    database.remove().await;
    let server = Database("postgres".into());
    server.run(&database_url(), &format!("drop role {role}")).await;
    migrated.expect("migrate");
    enqueued.expect("enqueue");
}
