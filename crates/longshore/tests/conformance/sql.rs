//! Postgres for callers that speak SQL: `enqueue`, `cancel` and `retry` keep
//! the same table as the library.

use longshore::lifecycle::{self, Event, State, Transition};
use longshore::store::ClaimRequest;
use longshore::{JobId, NewJob, Outcome, Status, UniqueMode};
use uuid::Uuid;

use crate::bench::*;
use crate::matrix::{Stage, Stand};

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

async fn call(bench: &Bench, function: &str, id: JobId) -> String {
    // The functions name their tables in full; no search_path is needed.
    let sql = format!("select {function}($1)");
    let mut connection = bench.postgres().await;
    sqlx::query_scalar(sqlx::AssertSqlSafe(sql)).bind(id.0).fetch_one(&mut connection).await.expect("call")
}

/// Everything about a job that a rule could change.
async fn shown(bench: &Bench, id: JobId) -> String {
    let job = bench.job(id).await;
    format!(
        "{:?} due {} error {:?}\n{:?}",
        bench.state(id).await,
        job.run_at,
        job.last_error,
        job.errors.len()
    )
}

pub(crate) async fn the_cancel_function_follows_the_table(bench: Bench) {
    let mut stage = Stage::new(bench.clone());
    for stand in STANDS {
        // The same job twice: what the library makes of one, the function must
        // make of the other.
        let (by_sql, by_library) = (stage.put(stand).await, stage.put(stand).await);
        let next = lifecycle::next(&bench.state(by_sql).await, Event::Cancel);
        let word = match next {
            Ok(Transition::Finish(_)) => "cancelled",
            Ok(Transition::RequestCancel) => "pending",
            _ => "finished",
        };
        assert_eq!(call(&bench, "cancel", by_sql).await, word, "{stand:?}");
        assert_eq!(bench.cancel(by_library).await.is_ok(), next.is_ok(), "{stand:?}");
        assert_same(&bench, by_sql, by_library, stand).await;
    }
    assert_eq!(call(&bench, "cancel", JobId::new()).await, "not_found");
}

pub(crate) async fn the_retry_function_follows_the_table(bench: Bench) {
    let mut stage = Stage::new(bench.clone());
    for stand in STANDS {
        let (by_sql, by_library) = (stage.put(stand).await, stage.put(stand).await);
        let next = lifecycle::next(&bench.state(by_sql).await, Event::Retry);
        let word = if next.is_ok() { "queued" } else { "running" };
        assert_eq!(call(&bench, "retry", by_sql).await, word, "{stand:?}");
        assert_eq!(bench.retry(by_library).await.is_ok(), next.is_ok(), "{stand:?}");
        assert_same(&bench, by_sql, by_library, stand).await;
    }
    assert_eq!(call(&bench, "retry", JobId::new()).await, "not_found");
}

async fn assert_same(bench: &Bench, by_sql: JobId, by_library: JobId, stand: Stand) {
    // Workers differ, because each stand has one of its own.
    let anonymous = |text: String, state: State| match state {
        State::Running(running) => text.replace(&format!("{:?}", running.worker), "somebody"),
        _ => text,
    };
    let one = anonymous(shown(bench, by_sql).await, bench.state(by_sql).await);
    let other = anonymous(shown(bench, by_library).await, bench.state(by_library).await);
    assert_eq!(one, other, "{stand:?}");
}

pub(crate) async fn a_retry_whose_key_is_taken_says_so(bench: Bench) {
    let keyed = || job("mail").unique_key("customer-23", UniqueMode::Dedupe);
    let old = bench.ended(keyed(), Outcome::FailedPermanent).await;
    bench.add(keyed()).await;
    assert_eq!(call(&bench, "retry", old).await, "key_taken");
    assert_eq!(bench.status(old).await, Status::FailedPermanent);
}

async fn enqueue(bench: &Bench, arguments: &str) -> Result<(JobId, String), sqlx::Error> {
    let sql = format!("select job, how from enqueue({arguments})");
    let mut connection = bench.postgres().await;
    let (id, how): (Uuid, String) =
        sqlx::query_as(sqlx::AssertSqlSafe(sql)).fetch_one(&mut connection).await?;
    Ok((JobId(id), how))
}

pub(crate) async fn a_job_enqueued_from_sql_is_like_one_of_the_library(bench: Bench) {
    let (by_sql, how) = enqueue(&bench, r#"'mail', '{"for":"mail"}'"#).await.expect("enqueue");
    assert_eq!(how, "created");
    let by_library = bench.enqueue_kind("mail").await;
    let strip = |text: String, id: JobId| text.replace(&id.to_string(), "id");
    let (one, other) = (bench.job(by_sql).await, bench.job(by_library).await);
    assert_eq!(strip(picture(&one), by_sql), strip(picture(&other), by_library));
    let worker = bench.worker().await;
    assert_eq!(bench.claim(worker, 9).await.len(), 2);
}

pub(crate) async fn every_argument_of_the_sql_enqueue_is_stored(bench: Bench) {
    let (id, _) = enqueue(
        &bench,
        "'mail', '[1]', queue => 'letters', priority => -3, max_attempts => 7, delay => '90 s',
         idempotency_key => 'order-17', unique_key => 'customer-23', timeout => '7 s', flags => '{gpu}'",
    )
    .await
    .expect("enqueue");
    let job = bench.job(id).await;
    assert_eq!((job.queue.as_str(), job.priority, job.max_attempts), ("letters", -3, 7));
    assert_eq!((job.run_at, job.timeout), (start() + 90 * SECOND, Some(7 * SECOND)));
    assert_eq!((job.payload.get(), job.flags), ("[1]", vec!["gpu".to_owned()]));
    assert_eq!(
        (job.idempotency_key.as_deref(), job.unique_key.as_deref()),
        (Some("order-17"), Some("customer-23"))
    );
}

pub(crate) async fn the_sql_enqueue_answers_for_keys(bench: Bench) {
    let (first, _) = enqueue(&bench, "'mail', idempotency_key => 'order-17'").await.expect("enqueue");
    let again = enqueue(&bench, "'sms', idempotency_key => 'order-17'").await.expect("enqueue");
    assert_eq!(again, (first, "existing".into()));
    let (holder, _) = enqueue(&bench, "'mail', unique_key => 'k'").await.expect("enqueue");
    for (mode, how) in [("dedupe", "existing"), ("replace", "replaced"), ("preserve_run_at", "replaced")] {
        let arguments = format!("'sms', unique_key => 'k', unique_mode => '{mode}'");
        assert_eq!(enqueue(&bench, &arguments).await.expect("enqueue"), (holder, how.into()));
    }
    let answer = bench.enqueue(job("fax").unique_key("k", UniqueMode::Dedupe)).await.expect("enqueue");
    assert_eq!(answer.id, holder);
}

pub(crate) async fn the_sql_enqueue_refuses_what_the_library_refuses(bench: Bench) {
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
        assert!(enqueue(&bench, &arguments).await.is_err(), "{arguments:.80} was taken");
    }
    assert_eq!(bench.check().await.expect("check").jobs, 0);
}

/// Depth is counted outside strings only, as the library does.
pub(crate) async fn brackets_in_strings_do_not_count_as_depth(bench: Bench) {
    let text = format!(r#"{{"a":"{}\"{}"}}"#, "[".repeat(100), "{".repeat(100));
    NewJob::from_json("mail", &text).validate().expect("the library takes it");
    enqueue(&bench, &format!("'mail', '{text}'")).await.expect("so does the function");
}

pub(crate) async fn ids_made_in_sql_are_version_seven_and_sort_with_the_librarys(bench: Bench) {
    let before = JobId::new();
    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    let (made, _) = enqueue(&bench, "'mail'").await.expect("enqueue");
    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    assert!(before < made && made < JobId::new(), "{made}");
    assert_eq!(made.0.get_version_num(), 7);
}

pub(crate) async fn a_job_enqueued_from_sql_wakes_subscribers(bench: Bench) {
    let mut wakeups = bench.store().subscribe().await.expect("subscribe");
    enqueue(&bench, "'mail', queue => 'letters'").await.expect("enqueue");
    let heard = tokio::time::timeout(std::time::Duration::from_secs(20), wakeups.next()).await;
    assert_eq!(heard.expect("a wake-up"), Some("letters".into()));
}

pub(crate) async fn a_rolled_back_sql_enqueue_leaves_nothing(bench: Bench) {
    let mut connection = bench.postgres().await;
    sqlx::raw_sql("begin; select enqueue('mail', unique_key => 'k'); rollback")
        .execute(&mut connection)
        .await
        .expect("sql");
    assert_eq!(bench.check().await.expect("check").jobs, 0);
    bench.add(job("mail").unique_key("k", UniqueMode::Dedupe)).await;
}

// ---- locks -------------------------------------------------------------------

/// Others hold the due jobs for a moment: a claimer passes them over, and must
/// not make up for them with jobs it may not have.
async fn claim_while_due_jobs_are_locked(bench: &Bench) {
    let due = bench.enqueue_kind("own").await;
    bench.add(job("own").delay(MINUTE)).await;
    bench.enqueue_kind("foreign").await;
    let mut other = bench.postgres().await;
    sqlx::raw_sql("begin; select id from ready where run_at <= clock() and kind = 'own' for update")
        .execute(&mut other)
        .await
        .expect("lock");
    let worker = bench.worker().await;
    let kinds = Some(vec!["own".into()]);
    let request = ClaimRequest { kinds, ..ClaimRequest::new(worker, 5) };
    assert_eq!(bench.claim_as(&request).await.len(), 0);
    sqlx::raw_sql("rollback").execute(&mut other).await.expect("unlock");
    assert_eq!(ids(&bench.claim_as(&request).await), [due]);
}

pub(crate) async fn a_claim_that_finds_due_jobs_locked_takes_no_others_in_their_place(bench: Bench) {
    claim_while_due_jobs_are_locked(&bench).await;
}

pub(crate) async fn nor_does_one_from_many_places(bench: Bench) {
    bench.add(job("elsewhere").priority(-5)).await;
    claim_while_due_jobs_are_locked(&bench).await;
}

/// One claimer never waits for another.
pub(crate) async fn a_claim_does_not_wait_for_rows_that_others_hold(bench: Bench) {
    for _ in 0..4 {
        bench.enqueue_kind("mail").await;
    }
    let mut other = bench.postgres().await;
    sqlx::raw_sql("begin; delete from ready where id in (select id from ready order by id limit 2)")
        .execute(&mut other)
        .await
        .expect("hold");
    let worker = bench.worker().await;
    assert_eq!(bench.claim(worker, 2).await.len(), 2);
    sqlx::raw_sql("rollback").execute(&mut other).await.expect("let go");
    assert_eq!(bench.claim(worker, 9).await.len(), 2);
}
