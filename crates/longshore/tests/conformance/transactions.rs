//! Jobs enqueued inside the caller's own transaction share its fate.

use longshore::{EnqueuedAs, JobId, NewJob, Status};
use sqlx::Connection as _;

use crate::fixture::*;

cases! {
    jobs_of_a_committed_transaction_exist,
    jobs_of_a_rolled_back_transaction_never_existed,
    keys_are_answered_inside_a_transaction_too,
    a_replacement_rolls_back_with_the_transaction,
    an_invalid_job_is_refused_before_it_reaches_the_transaction,
}

cases! {
    only on sqlite:
    a_failed_enqueue_on_a_bare_connection_stores_nothing,
}

/// Enqueues `jobs` inside a transaction with a row of the caller's own, and
/// commits or rolls back.
async fn transact(fixture: &Fixture, jobs: Vec<NewJob>, commit: bool) -> Vec<longshore::Enqueued> {
    match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            sqlx::query("insert into orders values (1)").execute(&mut *tx).await.expect("insert");
            let answers = fixture.enqueue_in(&mut *tx, jobs).await.expect("enqueue_in");
            match commit {
                true => tx.commit().await.expect("commit"),
                false => tx.rollback().await.expect("rollback"),
            }
            answers
        }
        Engine::Sqlite => {
            let mut connection = rusqlite::Connection::open(fixture.file()).expect("open");
            connection.busy_timeout(5 * SECOND).expect("busy timeout");
            let tx = connection.transaction().expect("begin");
            tx.execute("insert into orders values (1)", []).expect("insert");
            // The connection is not `Sync`, so the future stays on this thread.
            let answers = tokio::task::block_in_place(|| {
                let runtime = tokio::runtime::Handle::current();
                runtime.block_on(fixture.enqueue_in(&*tx, jobs)).expect("enqueue_in")
            });
            match commit {
                true => tx.commit().expect("commit"),
                false => tx.rollback().expect("rollback"),
            }
            answers
        }
    }
}

async fn orders(fixture: &Fixture) -> i64 {
    fixture.query_number("select count(*) from orders", None).await
}

async fn with_orders(fixture: &Fixture) {
    fixture.sql("create table orders (n integer)", None).await;
}

async fn exists(fixture: &Fixture, id: JobId) -> bool {
    fixture.store().get(id).await.expect("get").is_some()
}

async fn jobs_of_a_committed_transaction_exist(fixture: Fixture) {
    with_orders(&fixture).await;
    let answers = transact(&fixture, vec![job("mail").priority(3), job("sms")], true).await;
    assert_eq!(answers.iter().map(|answer| answer.how).collect::<Vec<_>>(), [EnqueuedAs::Created; 2]);
    assert_eq!(fixture.job(answers[0].id).await.priority, 3);
    assert_eq!((orders(&fixture).await, fixture.count(Status::Queued).await), (1, 2));
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
}

async fn jobs_of_a_rolled_back_transaction_never_existed(fixture: Fixture) {
    with_orders(&fixture).await;
    let jobs = vec![
        job("mail"),
        job("keyed").idempotency_key("order-17"),
        job("unique").unique_key("customer-23", Default::default()),
    ];
    let answers = transact(&fixture, jobs, false).await;
    for answer in answers {
        assert!(!exists(&fixture, answer.id).await);
    }
    assert_eq!(orders(&fixture).await, 0);
    // Neither key stayed behind.
    fixture.add(job("keyed").idempotency_key("order-17")).await;
    fixture.add(job("unique").unique_key("customer-23", Default::default())).await;
}

async fn keys_are_answered_inside_a_transaction_too(fixture: Fixture) {
    with_orders(&fixture).await;
    let first = fixture.add(job("mail").idempotency_key("order-17")).await;
    let holder = fixture.add(job("sms").unique_key("customer-23", Default::default())).await;
    let jobs = vec![
        job("mail").idempotency_key("order-17"),
        job("sms").unique_key("customer-23", Default::default()),
        job("plain"),
    ];
    let answers = transact(&fixture, jobs, true).await;
    assert_eq!((answers[0].id, answers[0].how), (first, EnqueuedAs::Existing));
    assert_eq!((answers[1].id, answers[1].how), (holder, EnqueuedAs::Existing));
    assert_eq!(answers[2].how, EnqueuedAs::Created);
}

async fn a_replacement_rolls_back_with_the_transaction(fixture: Fixture) {
    with_orders(&fixture).await;
    let keyed = |kind: &str| job(kind).unique_key("customer-23", longshore::UniqueMode::Replace);
    let holder = fixture.add(keyed("old")).await;
    let answers = transact(&fixture, vec![keyed("new")], false).await;
    assert_eq!((answers[0].id, answers[0].how), (holder, EnqueuedAs::Replaced));
    assert_eq!(fixture.job(holder).await.kind, "old");
}

async fn an_invalid_job_is_refused_before_it_reaches_the_transaction(fixture: Fixture) {
    with_orders(&fixture).await;
    match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            let error =
                fixture.enqueue_in(&mut *tx, [job("mail"), job("")]).await.expect_err("an empty kind");
            assert_eq!(error.field(), Some("jobs[1].kind"));
            // The caller's transaction is unharmed.
            sqlx::query("insert into orders values (1)").execute(&mut *tx).await.expect("insert");
            tx.commit().await.expect("commit");
        }
        Engine::Sqlite => {
            let mut connection = rusqlite::Connection::open(fixture.file()).expect("open");
            let tx = connection.transaction().expect("begin");
            let error = tokio::task::block_in_place(|| {
                let refused = fixture.enqueue_in(&*tx, [job("mail"), job("")]);
                tokio::runtime::Handle::current().block_on(refused).expect_err("an empty kind")
            });
            assert_eq!(error.field(), Some("jobs[1].kind"));
            tx.execute("insert into orders values (1)", []).expect("insert");
            tx.commit().expect("commit");
        }
    }
    assert_eq!((orders(&fixture).await, fixture.count(Status::Queued).await), (1, 0));
}

fn on_a_bare_connection(fixture: &Fixture) {
    let connection = rusqlite::Connection::open(fixture.file()).expect("open");
    connection.busy_timeout(5 * SECOND).expect("busy timeout");
    let enqueue =
        |jobs: Vec<NewJob>| tokio::runtime::Handle::current().block_on(fixture.enqueue_in(&connection, jobs));
    let keyed = |kind: &str| job(kind).idempotency_key(kind).unique_key(kind, Default::default());
    let batches: [fn() -> Vec<NewJob>; 3] = [
        || vec![job("bad")],
        || vec![job("good"), job("bad"), job("good")],
        || vec![job("good").unique_key("u", Default::default()), job("bad").idempotency_key("i")],
    ];
    for batch in batches {
        enqueue(batch()).expect_err("the trigger refuses");
        assert!(connection.is_autocommit(), "no transaction stays open");
        for table in ["jobs", "ready", "keys"] {
            let count = format!("select count(*) from {table}");
            let rows: i64 = connection.query_row(&count, [], |row| row.get(0)).expect("count");
            assert_eq!(rows, 0, "{table}");
        }
    }
    enqueue(vec![job("good"), keyed("good")]).expect("a bare connection will do");
}

/// A connection without a transaction: what fails half-way is undone all the same.
async fn a_failed_enqueue_on_a_bare_connection_stores_nothing(fixture: Fixture) {
    fixture
        .sql(
            "create trigger refuse before insert on ready when new.kind = 'bad'
             begin select raise(abort, 'refused'); end",
            None,
        )
        .await;
    // The connection is not `Sync`, so it stays on this thread.
    tokio::task::block_in_place(|| on_a_bare_connection(&fixture));
    assert_eq!(fixture.count(Status::Queued).await, 2);
}
