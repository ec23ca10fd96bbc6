//! Jobs enqueued inside the caller's own transaction share its fate.

use longshore::{EnqueuedAs, JobId, NewJob, Status};
use sqlx::Connection as _;

use crate::bench::*;

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
async fn transact(bench: &Bench, jobs: Vec<NewJob>, commit: bool) -> Vec<longshore::Enqueued> {
    match bench.engine() {
        Engine::Postgres => {
            let mut connection = bench.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            sqlx::query("insert into orders values (1)").execute(&mut *tx).await.expect("insert");
            let answers = bench.enqueue_in(&mut *tx, jobs).await.expect("enqueue_in");
            match commit {
                true => tx.commit().await.expect("commit"),
                false => tx.rollback().await.expect("rollback"),
            }
            answers
        }
        Engine::Sqlite => {
            let mut connection = rusqlite::Connection::open(bench.file()).expect("open");
            connection.busy_timeout(5 * SECOND).expect("busy timeout");
            let tx = connection.transaction().expect("begin");
            tx.execute("insert into orders values (1)", []).expect("insert");
            // The connection is not `Sync`, so the future stays on this thread.
            let answers = tokio::task::block_in_place(|| {
                let runtime = tokio::runtime::Handle::current();
                runtime.block_on(bench.enqueue_in(&*tx, jobs)).expect("enqueue_in")
            });
            match commit {
                true => tx.commit().expect("commit"),
                false => tx.rollback().expect("rollback"),
            }
            answers
        }
    }
}

async fn orders(bench: &Bench) -> i64 {
    bench.ask("select count(*) from orders", None).await
}

async fn with_orders(bench: &Bench) {
    bench.sql("create table orders (n integer)", None).await;
}

async fn exists(bench: &Bench, id: JobId) -> bool {
    bench.store().get(id).await.expect("get").is_some()
}

async fn jobs_of_a_committed_transaction_exist(bench: Bench) {
    with_orders(&bench).await;
    let answers = transact(&bench, vec![job("mail").priority(3), job("sms")], true).await;
    assert_eq!(answers.iter().map(|answer| answer.how).collect::<Vec<_>>(), [EnqueuedAs::Created; 2]);
    assert_eq!(bench.job(answers[0].id).await.priority, 3);
    assert_eq!((orders(&bench).await, bench.counted(Status::Queued).await), (1, 2));
    let worker = bench.worker().await;
    assert_eq!(bench.claim(worker, 9).await.len(), 2);
}

async fn jobs_of_a_rolled_back_transaction_never_existed(bench: Bench) {
    with_orders(&bench).await;
    let jobs = vec![
        job("mail"),
        job("keyed").idempotency_key("order-17"),
        job("unique").unique_key("customer-23", Default::default()),
    ];
    let answers = transact(&bench, jobs, false).await;
    for answer in answers {
        assert!(!exists(&bench, answer.id).await);
    }
    assert_eq!(orders(&bench).await, 0);
    // Neither key stayed behind.
    bench.add(job("keyed").idempotency_key("order-17")).await;
    bench.add(job("unique").unique_key("customer-23", Default::default())).await;
}

async fn keys_are_answered_inside_a_transaction_too(bench: Bench) {
    with_orders(&bench).await;
    let first = bench.add(job("mail").idempotency_key("order-17")).await;
    let holder = bench.add(job("sms").unique_key("customer-23", Default::default())).await;
    let jobs = vec![
        job("mail").idempotency_key("order-17"),
        job("sms").unique_key("customer-23", Default::default()),
        job("plain"),
    ];
    let answers = transact(&bench, jobs, true).await;
    assert_eq!((answers[0].id, answers[0].how), (first, EnqueuedAs::Existing));
    assert_eq!((answers[1].id, answers[1].how), (holder, EnqueuedAs::Existing));
    assert_eq!(answers[2].how, EnqueuedAs::Created);
}

async fn a_replacement_rolls_back_with_the_transaction(bench: Bench) {
    with_orders(&bench).await;
    let keyed = |kind: &str| job(kind).unique_key("customer-23", longshore::UniqueMode::Replace);
    let holder = bench.add(keyed("old")).await;
    let answers = transact(&bench, vec![keyed("new")], false).await;
    assert_eq!((answers[0].id, answers[0].how), (holder, EnqueuedAs::Replaced));
    assert_eq!(bench.job(holder).await.kind, "old");
}

async fn an_invalid_job_is_refused_before_it_reaches_the_transaction(bench: Bench) {
    with_orders(&bench).await;
    match bench.engine() {
        Engine::Postgres => {
            let mut connection = bench.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            let error = bench.enqueue_in(&mut *tx, [job("mail"), job("")]).await.expect_err("an empty kind");
            assert_eq!(error.field(), Some("jobs[1].kind"));
            // The caller's transaction is unharmed.
            sqlx::query("insert into orders values (1)").execute(&mut *tx).await.expect("insert");
            tx.commit().await.expect("commit");
        }
        Engine::Sqlite => {
            let mut connection = rusqlite::Connection::open(bench.file()).expect("open");
            let tx = connection.transaction().expect("begin");
            let error = tokio::task::block_in_place(|| {
                let refused = bench.enqueue_in(&*tx, [job("mail"), job("")]);
                tokio::runtime::Handle::current().block_on(refused).expect_err("an empty kind")
            });
            assert_eq!(error.field(), Some("jobs[1].kind"));
            tx.execute("insert into orders values (1)", []).expect("insert");
            tx.commit().expect("commit");
        }
    }
    assert_eq!((orders(&bench).await, bench.counted(Status::Queued).await), (1, 0));
}

fn on_a_bare_connection(bench: &Bench) {
    let connection = rusqlite::Connection::open(bench.file()).expect("open");
    connection.busy_timeout(5 * SECOND).expect("busy timeout");
    let enqueue =
        |jobs: Vec<NewJob>| tokio::runtime::Handle::current().block_on(bench.enqueue_in(&connection, jobs));
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
async fn a_failed_enqueue_on_a_bare_connection_stores_nothing(bench: Bench) {
    bench
        .sql(
            "create trigger refuse before insert on ready when new.kind = 'bad'
             begin select raise(abort, 'refused'); end",
            None,
        )
        .await;
    // The connection is not `Sync`, so it stays on this thread.
    tokio::task::block_in_place(|| on_a_bare_connection(&bench));
    assert_eq!(bench.counted(Status::Queued).await, 2);
}
