//! Jobs enqueued inside the caller's own transaction are committed or rolled back with it.

use longshore::{EnqueuedAs, JobId, NewJob, Status};
use sqlx::Connection as _;

use crate::fixture::*;

cases! {
    jobs_of_a_committed_transaction_exist,
    jobs_of_a_rolled_back_transaction_never_existed,
    keys_are_respected_inside_a_transaction,
    a_replacement_rolls_back_with_the_transaction,
    an_invalid_job_is_refused_and_leaves_the_transaction_usable,
}

cases! {
    only on postgres:
    a_task_that_may_move_between_threads_can_enqueue_in_its_transaction,
}

cases! {
    only on sqlite:
    a_failed_enqueue_on_a_connection_without_a_transaction_stores_nothing,
    an_enqueue_after_a_read_that_is_out_of_date_says_how_to_begin,
}

/// Enqueues `jobs` in a transaction that also inserts into the caller's table, then
/// commits or rolls back.
async fn transact(fixture: &Fixture, jobs: Vec<NewJob>, commit: bool) -> Vec<longshore::Enqueued> {
    match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            sqlx::query("insert into orders values (1)").execute(&mut *tx).await.expect("insert");
            let results = fixture.enqueue_in(&mut *tx, jobs).await.expect("enqueue_in");
            if commit {
                tx.commit().await.expect("commit");
            } else {
                tx.rollback().await.expect("rollback");
            }
            results
        }
        Engine::Sqlite => {
            let mut connection = rusqlite::Connection::open(fixture.file()).expect("open");
            connection.busy_timeout(5 * SECOND).expect("busy timeout");
            let tx = connection.transaction().expect("begin");
            tx.execute("insert into orders values (1)", []).expect("insert");
            // The connection is not `Sync`, so the future stays on this thread.
            let results = tokio::task::block_in_place(|| {
                let runtime = tokio::runtime::Handle::current();
                runtime.block_on(fixture.enqueue_in(&*tx, jobs)).expect("enqueue_in")
            });
            if commit {
                tx.commit().expect("commit");
            } else {
                tx.rollback().expect("rollback");
            }
            results
        }
    }
}

async fn count_orders(fixture: &Fixture) -> i64 {
    fixture.query_number("select count(*) from orders", None).await
}

async fn create_orders(fixture: &Fixture) {
    fixture.sql("create table orders (n integer)", None).await;
}

async fn exists(fixture: &Fixture, id: JobId) -> bool {
    fixture.store().get(id).await.expect("get").is_some()
}

async fn jobs_of_a_committed_transaction_exist(fixture: Fixture) {
    create_orders(&fixture).await;
    let results = transact(&fixture, vec![job("mail").priority(3), job("sms")], true).await;
    assert_eq!(results.iter().map(|result| result.how).collect::<Vec<_>>(), [EnqueuedAs::Created; 2]);
    assert_eq!(fixture.job(results[0].id).await.priority, 3);
    assert_eq!((count_orders(&fixture).await, fixture.count(Status::Queued).await), (1, 2));
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 2);
}

async fn jobs_of_a_rolled_back_transaction_never_existed(fixture: Fixture) {
    create_orders(&fixture).await;
    let jobs = vec![
        job("mail"),
        job("keyed").idempotency_key("order-17"),
        job("unique").unique_key("customer-23", Default::default()),
    ];
    let results = transact(&fixture, jobs, false).await;
    for result in results {
        assert!(!exists(&fixture, result.id).await);
    }
    assert_eq!(count_orders(&fixture).await, 0);
    // Both keys are free.
    fixture.add(job("keyed").idempotency_key("order-17")).await;
    fixture.add(job("unique").unique_key("customer-23", Default::default())).await;
}

async fn keys_are_respected_inside_a_transaction(fixture: Fixture) {
    create_orders(&fixture).await;
    let first = fixture.add(job("mail").idempotency_key("order-17")).await;
    let holder = fixture.add(job("sms").unique_key("customer-23", Default::default())).await;
    let jobs = vec![
        job("mail").idempotency_key("order-17"),
        job("sms").unique_key("customer-23", Default::default()),
        job("plain"),
    ];
    let results = transact(&fixture, jobs, true).await;
    assert_eq!((results[0].id, results[0].how), (first, EnqueuedAs::Existing));
    assert_eq!((results[1].id, results[1].how), (holder, EnqueuedAs::Existing));
    assert_eq!(results[2].how, EnqueuedAs::Created);
}

async fn a_replacement_rolls_back_with_the_transaction(fixture: Fixture) {
    create_orders(&fixture).await;
    let keyed = |kind: &str| job(kind).unique_key("customer-23", longshore::UniqueMode::Replace);
    let holder = fixture.add(keyed("old")).await;
    let results = transact(&fixture, vec![keyed("new")], false).await;
    assert_eq!((results[0].id, results[0].how), (holder, EnqueuedAs::Replaced));
    assert_eq!(fixture.job(holder).await.kind, "old");
}

async fn an_invalid_job_is_refused_and_leaves_the_transaction_usable(fixture: Fixture) {
    create_orders(&fixture).await;
    match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            let error =
                fixture.enqueue_in(&mut *tx, [job("mail"), job("")]).await.expect_err("an empty kind");
            assert_eq!(error.field(), Some("jobs[1].kind"));
            // The caller's transaction still works.
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
    assert_eq!((count_orders(&fixture).await, fixture.count(Status::Queued).await), (1, 0));
}

/// As in a handler of a web server, which must be `Send`.
async fn a_task_that_may_move_between_threads_can_enqueue_in_its_transaction(fixture: Fixture) {
    create_orders(&fixture).await;
    let client = fixture.client();
    let mut connection = fixture.postgres().await;
    let handler = tokio::spawn(async move {
        let mut tx = connection.begin().await?;
        sqlx::query("insert into orders values (1)").execute(&mut *tx).await?;
        client.enqueue(job("welcome")).queue("mail").in_tx(&mut tx).await.expect("in_tx");
        client.enqueue_in(&mut tx, [job("count")]).await.expect("enqueue_in");
        tx.commit().await
    });
    handler.await.expect("the task").expect("commit");
    assert_eq!((count_orders(&fixture).await, fixture.count(Status::Queued).await), (1, 2));
}

fn enqueue_without_a_transaction(fixture: &Fixture) {
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
        enqueue(batch()).expect_err("the trigger refuses it");
        assert!(connection.is_autocommit(), "a transaction is still open");
        for table in ["jobs", "ready", "keys"] {
            let count = format!("select count(*) from {table}");
            let rows: i64 = connection.query_row(&count, [], |row| row.get(0)).expect("count");
            assert_eq!(rows, 0, "{table}");
        }
    }
    enqueue(vec![job("good"), keyed("good")]).expect("enqueue");
}

/// A batch that fails half-way is undone even without a transaction of the caller.
async fn a_failed_enqueue_on_a_connection_without_a_transaction_stores_nothing(fixture: Fixture) {
    fixture
        .sql(
            "create trigger refuse before insert on ready when new.kind = 'bad'
             begin select raise(abort, 'refused'); end",
            None,
        )
        .await;
    // The connection is not `Sync`, so it stays on this thread.
    tokio::task::block_in_place(|| enqueue_without_a_transaction(&fixture));
    assert_eq!(fixture.count(Status::Queued).await, 2);
}

async fn an_enqueue_after_a_read_that_is_out_of_date_says_how_to_begin(fixture: Fixture) {
    let late = tokio::task::block_in_place(|| {
        let runtime = tokio::runtime::Handle::current();
        let mut connection = rusqlite::Connection::open(fixture.file()).expect("open");
        let tx = connection.transaction().expect("begin");
        let _: i64 = tx.query_row("select count(*) from jobs", [], |row| row.get(0)).expect("a read");
        runtime.block_on(fixture.add(job("mail")));
        runtime.block_on(fixture.enqueue_in(&*tx, [job("late")]))
    });
    let error = late.expect_err("the database has changed since the read");
    assert!(error.is_unavailable() && error.to_string().contains("Immediate"), "{error}");
}
