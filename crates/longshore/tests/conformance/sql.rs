//! Postgres for callers that speak SQL: `enqueue`, `cancel` and `retry` keep
//! the same table as the library.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::lifecycle::{self, Event, State, Transition};
use longshore::store::{ClaimRequest, Fenced, ListFilter, NewWorker};
use longshore::{Client, JobId, NewJob, Outcome, Report, RetryPolicy, Status, UniqueMode};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use uuid::Uuid;

use crate::fixture::*;
use crate::locks::in_time;
use crate::transitions::{Stage, Stand};

cases! {
    only on postgres:
    the_cancel_function_follows_the_table,
    the_retry_function_follows_the_table,
    a_retry_whose_key_is_taken_says_so,
    a_job_enqueued_from_sql_is_like_one_of_the_library,
    every_argument_of_the_sql_enqueue_is_stored,
    the_sql_enqueue_answers_for_keys,
    the_sql_enqueue_refuses_what_the_library_refuses,
    the_sql_enqueue_has_the_librarys_limits,
    what_the_library_takes_the_function_takes_from_it,
    the_sql_enqueue_refuses_what_could_not_be_read_back,
    flags_of_any_shape_are_stored_as_one_list,
    the_sql_enqueue_takes_the_payloads_that_the_library_takes,
    half_pairs_around_a_backslash_are_no_pair,
    the_sql_enqueue_refuses_options_that_lack_or_repeat_a_part,
    a_unique_mode_of_null_is_dedupe,
    a_job_with_unreadable_options_is_claimed_with_its_neighbours,
    brackets_in_strings_do_not_count_as_depth,
    ids_made_in_sql_are_version_seven_and_sort_with_the_librarys,
    a_job_enqueued_from_sql_wakes_subscribers,
    a_rolled_back_sql_enqueue_leaves_nothing,
    any_proper_schema_name_works_from_end_to_end,
    a_schema_name_that_postgres_keeps_to_itself_is_refused_by_name,
    a_role_that_may_make_no_schema_can_migrate_its_own,
}

const STANDS: [Stand; 13] = [
    Stand::Fresh,
    Stand::Retrying,
    Stand::WaitingSuspect,
    Stand::Running,
    Stand::LastAttempt,
    Stand::CancelRequested,
    Stand::Superseded,
    Stand::SuspectNotStarted,
    Stand::SuspectStarted,
    Stand::SuspectOnItsLastLife,
    Stand::Finished(Outcome::Succeeded),
    Stand::Finished(Outcome::FailedPermanent),
    Stand::Finished(Outcome::Cancelled),
];

pub(crate) async fn call(fixture: &Fixture, function: &str, id: JobId) -> String {
    // The functions name their tables in full; no search_path is needed.
    let sql = format!("select {function}($1)");
    let mut connection = fixture.postgres().await;
    sqlx::query_scalar(AssertSqlSafe(sql)).bind(id.0).fetch_one(&mut connection).await.expect("call")
}

/// Everything about a job that a rule could change.
async fn shown(fixture: &Fixture, id: JobId) -> String {
    let job = fixture.job(id).await;
    format!(
        "{:?} due {} error {:?}\n{:?}",
        fixture.state(id).await,
        job.run_at,
        job.last_error,
        job.errors.len()
    )
}

async fn the_cancel_function_follows_the_table(fixture: Fixture) {
    let mut stage = Stage::new(fixture.clone());
    for stand in STANDS {
        // The same job twice: what the library makes of one, the function must
        // make of the other.
        let (by_sql, by_library) = (stage.put(stand).await, stage.put(stand).await);
        let next = lifecycle::next(&fixture.state(by_sql).await, Event::Cancel);
        let word = match next {
            Ok(Transition::Finish(_)) => "cancelled",
            Ok(Transition::RequestCancel) => "pending",
            _ => "finished",
        };
        assert_eq!(call(&fixture, "cancel", by_sql).await, word, "{stand:?}");
        assert_eq!(fixture.cancel(by_library).await.is_ok(), next.is_ok(), "{stand:?}");
        assert_same(&fixture, by_sql, by_library, stand).await;
    }
    assert_eq!(call(&fixture, "cancel", JobId::new()).await, "not_found");
}

async fn the_retry_function_follows_the_table(fixture: Fixture) {
    let mut stage = Stage::new(fixture.clone());
    for stand in STANDS {
        let (by_sql, by_library) = (stage.put(stand).await, stage.put(stand).await);
        let next = lifecycle::next(&fixture.state(by_sql).await, Event::Retry);
        let word = if next.is_ok() { "queued" } else { "running" };
        assert_eq!(call(&fixture, "retry", by_sql).await, word, "{stand:?}");
        assert_eq!(fixture.retry(by_library).await.is_ok(), next.is_ok(), "{stand:?}");
        assert_same(&fixture, by_sql, by_library, stand).await;
    }
    assert_eq!(call(&fixture, "retry", JobId::new()).await, "not_found");
}

async fn assert_same(fixture: &Fixture, by_sql: JobId, by_library: JobId, stand: Stand) {
    // Workers differ, because each stand has one of its own.
    let anonymous = |text: String, state: State| match state {
        State::Running(running) => text.replace(&format!("{:?}", running.worker), "somebody"),
        _ => text,
    };
    let one = anonymous(shown(fixture, by_sql).await, fixture.state(by_sql).await);
    let other = anonymous(shown(fixture, by_library).await, fixture.state(by_library).await);
    assert_eq!(one, other, "{stand:?}");
}

async fn a_retry_whose_key_is_taken_says_so(fixture: Fixture) {
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

async fn a_job_enqueued_from_sql_is_like_one_of_the_library(fixture: Fixture) {
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

async fn the_sql_enqueue_answers_for_keys(fixture: Fixture) {
    let (first, _) = enqueue(&fixture, "'mail', idempotency_key => 'order-17'").await.expect("enqueue");
    let again = enqueue(&fixture, "'sms', idempotency_key => 'order-17'").await.expect("enqueue");
    assert_eq!(again, (first, "existing".into()));
    let (holder, _) = enqueue(&fixture, "'mail', unique_key => 'k'").await.expect("enqueue");
    for (mode, how) in [("dedupe", "existing"), ("replace", "replaced"), ("preserve_run_at", "replaced")] {
        let arguments = format!("'sms', unique_key => 'k', unique_mode => '{mode}'");
        assert_eq!(enqueue(&fixture, &arguments).await.expect("enqueue"), (holder, how.into()));
    }
    let answer = fixture.enqueue(job("fax").unique_key("k", UniqueMode::Dedupe)).await.expect("enqueue");
    assert_eq!(answer.id, holder);
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
        assert!(enqueue(&fixture, &arguments).await.is_err(), "{arguments:.80} was taken");
    }
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
}

/// Each limit itself and the next step past it. The library's own check says
/// what is right, and comes before any key is looked at.
async fn the_sql_enqueue_has_the_librarys_limits(fixture: Fixture) {
    let options = |json: &str| format!("options => '{json}'");
    let part = |name: &str, json: &str| options(&format!(r#"{{"{name}":{json}}}"#));
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
        (options("{}"), mail()),
        (part("retry", r#"{"policy":"list","delays_ms":[]}"#), mail().retry(RetryPolicy::list([]))),
        (
            part("retry", r#"{"policy":"jitter","base_ms":5000,"cap_ms":4999}"#),
            mail().retry(RetryPolicy::Jitter { base: 5 * SECOND, cap: 4999 * SECOND / 1000 }),
        ),
        (
            part("retry", r#"{"policy":"jitter","base_ms":5000,"cap_ms":5000}"#),
            mail().retry(RetryPolicy::Jitter { base: 5 * SECOND, cap: 5 * SECOND }),
        ),
        (
            part("retry", &format!(r#"{{"policy":"fixed","delay_ms":{}}}"#, u64::MAX)),
            mail().retry(RetryPolicy::fixed(Duration::MAX)),
        ),
    ];
    for millis in [315_360_000_000, 315_360_000_001] {
        let cap = Duration::from_millis(millis);
        pairs.push((
            part("retry", &format!(r#"{{"policy":"exponential","cap_ms":{millis}}}"#)),
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
        pairs.push((part("tags", &tags), mail().tags(vec!["t"; n])));
        pairs.push((part("metadata", &deep(n)), mail().metadata(raw(&deep(n)))));
    }
    for bytes in [0, 1, 128, 129, 512, 513, 16 * 1024, 16 * 1024 + 1] {
        let text = "x".repeat(bytes);
        pairs.push((format!("queue => '{text}'"), mail().queue(text.as_str())));
        pairs.push((format!("unique_key => '{text}'"), mail().unique_key(&text, UniqueMode::Dedupe)));
        pairs.push((format!("flags => array['{text}']"), mail().flags([text.as_str()])));
        pairs.push((part("tags", &format!("[{}]", quoted(&text))), mail().tags([text.as_str()])));
        pairs.push((part("context", &quoted(&text)), mail().context(text.as_str())));
        pairs.push((part("trace", &quoted(&text)), mail().trace(text.as_str())));
    }
    for bytes in [64 * 1024, 64 * 1024 + 1] {
        let text = quoted(&"x".repeat(bytes - 2));
        pairs.push((part("metadata", &text), mail().metadata(raw(&text))));
    }
    for n in [1000, 1001] {
        let delays = serde_json::json!(vec![1000; n]);
        let policy = format!(r#"{{"policy":"list","delays_ms":{delays}}}"#);
        pairs.push((part("retry", &policy), mail().retry(RetryPolicy::list(vec![SECOND; n]))));
    }
    enqueue(&fixture, "'first', queue => 'other', idempotency_key => 'order-17'").await.expect("enqueue");
    let mut taken = 0;
    for (arguments, job) in pairs {
        let asked = enqueue(&fixture, &format!("'mail', {arguments}")).await;
        assert_eq!(asked.is_ok(), job.validate().is_ok(), "{arguments:.80}");
        let keyed = enqueue(&fixture, &format!("'mail', {arguments}, idempotency_key => 'order-17'")).await;
        assert_eq!(keyed.is_ok(), asked.is_ok(), "{arguments:.80} with a key that is taken");
        if let Ok((id, _)) = asked {
            fixture.job(id).await;
            taken += 1;
        }
    }
    assert_eq!(fixture.check().await.expect("check").jobs, taken + 1);
}

fn last_instant() -> DateTime<Utc> {
    "9999-12-31T23:59:59.999999Z".parse().expect("a time")
}

/// The library sends jobs with unique keys through the function.
async fn what_the_library_takes_the_function_takes_from_it(fixture: Fixture) {
    let policies = [
        RetryPolicy::default(),
        RetryPolicy::exponential(),
        RetryPolicy::fixed(longshore::retry::MAX_DELAY),
        RetryPolicy::list([Duration::ZERO, longshore::retry::MAX_DELAY]),
        RetryPolicy::None,
    ];
    for (n, policy) in policies.into_iter().enumerate() {
        let keyed = job("mail").unique_key(n.to_string(), UniqueMode::Dedupe);
        let id = fixture.add(keyed.retry(policy).run_at(last_instant())).await;
        assert_eq!(fixture.job(id).await.run_at, last_instant());
    }
}

/// What is stored must be readable: by a claim, above all.
async fn the_sql_enqueue_refuses_what_could_not_be_read_back(fixture: Fixture) {
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
            assert!(enqueue(&fixture, &arguments).await.is_err(), "{arguments} was taken");
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

/// The library's own check says what is right.
async fn the_sql_enqueue_takes_the_payloads_that_the_library_takes(fixture: Fixture) {
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

async fn half_pairs_around_a_backslash_are_no_pair(fixture: Fixture) {
    let payload = r#""\ud83d\\\ude00""#;
    NewJob::from_json("mail", payload).validate().expect_err("the library refuses it");
    assert!(enqueue(&fixture, &format!("'mail', '{payload}'")).await.is_err());
}

/// The job would run without any of its options.
async fn the_sql_enqueue_refuses_options_that_lack_or_repeat_a_part(fixture: Fixture) {
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
        assert!(enqueue(&fixture, &arguments).await.is_err(), "{options} was taken");
    }
}

async fn a_unique_mode_of_null_is_dedupe(fixture: Fixture) {
    let (holder, _) =
        enqueue(&fixture, "'mail', unique_key => 'k', unique_mode => null").await.expect("enqueue");
    let again = enqueue(&fixture, "'sms', unique_key => 'k', unique_mode => null").await.expect("enqueue");
    assert_eq!(again, (holder, "existing".into()));
    assert_eq!(fixture.job(holder).await.kind, "mail");
}

/// However it got there: one row that cannot be read whole is no reason to
/// lose the others of its batch.
async fn a_job_with_unreadable_options_is_claimed_with_its_neighbours(fixture: Fixture) {
    let options =
        [r#"{"tags":"x"}"#, "[]", "1", r#"{"retry":{"policy":"fixed"}}"#, r#"{"tags":["a"],"tags":["b"]}"#];
    for options in options {
        let planted = fixture.enqueue_kind("mail").await;
        fixture.sql(&format!("update jobs set options = '{options}' where id = {{id}}"), Some(planted)).await;
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
}

/// Depth is counted outside strings only, as the library does.
async fn brackets_in_strings_do_not_count_as_depth(fixture: Fixture) {
    let text = format!(r#"{{"a":"{}\"{}"}}"#, "[".repeat(100), "{".repeat(100));
    NewJob::from_json("mail", &text).validate().expect("the library takes it");
    enqueue(&fixture, &format!("'mail', '{text}'")).await.expect("so does the function");
}

async fn ids_made_in_sql_are_version_seven_and_sort_with_the_librarys(fixture: Fixture) {
    let before = JobId::new();
    tokio::time::sleep(Duration::from_millis(2)).await;
    let (made, _) = enqueue(&fixture, "'mail'").await.expect("enqueue");
    tokio::time::sleep(Duration::from_millis(2)).await;
    assert!(before < made && made < JobId::new(), "{made}");
    assert_eq!(made.0.get_version_num(), 7);
}

async fn a_job_enqueued_from_sql_wakes_subscribers(fixture: Fixture) {
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    enqueue(&fixture, "'mail', queue => 'letters'").await.expect("enqueue");
    let heard = tokio::time::timeout(Duration::from_secs(20), wakeups.next()).await;
    assert_eq!(heard.expect("a wake-up"), Some("letters".into()));
}

async fn a_rolled_back_sql_enqueue_leaves_nothing(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    sqlx::raw_sql("begin; select enqueue('mail', unique_key => 'k'); rollback")
        .execute(&mut connection)
        .await
        .expect("sql");
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
    fixture.add(job("mail").unique_key("k", UniqueMode::Dedupe)).await;
}

// ---- schemas -----------------------------------------------------------------

/// A database of its own for cases that need names of their own choosing.
struct Database(String);

impl Database {
    async fn make() -> Self {
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

async fn any_proper_schema_name_works_from_end_to_end(_: Fixture) {
    let database = Database::make().await;
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
        let report = |claimed| Report { claimed, ending: done(), follow_ups: Vec::new() };
        let settled = client.settle(claims.jobs.iter().map(report).collect()).await.expect(schema);
        assert_eq!(settled, [Fenced::Held; 3], "{schema}");
        assert_eq!(client.check().await.expect(schema).problems, Vec::<String>::new());
    }
    database.remove().await;
}

async fn a_schema_name_that_postgres_keeps_to_itself_is_refused_by_name(fixture: Fixture) {
    let long = "s".repeat(64);
    for schema in ["pg_x", "pg_", "", "Upper", "1st", "a-b", "a\"b", &long] {
        let url = with_parameter(&database_url(), &format!("schema={schema}"));
        let error = Client::connect(&url).await.expect_err(schema);
        assert_eq!(error.field(), Some("schema"), "{schema}: {error}");
    }
    drop(fixture);
}

async fn a_role_that_may_make_no_schema_can_migrate_its_own(_: Fixture) {
    let database = Database::make().await;
    let role = format!("{}_role", database.0);
    let make = format!("create role {role}; create schema theirs authorization {role}");
    database.run(&database.url(""), &make).await;
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
