//! One client's open transaction, or a database that does not reply, must not stop the
//! work of everybody else.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use longshore::store::{Beat, ClaimRequest, Fenced, KeyWait};
use longshore::{Client, Enqueued, EnqueuedAs, JobId, NewJob, Report, Result, Status, UniqueMode};
use sqlx::{AssertSqlSafe, PgConnection};
use tokio::task::JoinHandle;

use crate::fixture::*;
use crate::http::client::HttpClient;
use crate::locks::{in_time, open_transaction, roll_back, until_blocked_by};
use crate::worker::until;

cases! {
    only on postgres:
    callers_of_a_held_key_delay_nothing_else,
    callers_of_a_held_key_get_the_right_job_once_it_is_free,
    callers_of_a_key_share_batches_again_once_it_is_free,
    a_held_key_is_reported_as_unavailable_with_the_time_to_retry,
    commands_on_a_locked_job_delay_nothing_else,
    a_connection_that_became_read_only_is_replaced_at_once,
    connections_that_the_server_closed_leave_the_pool_together,
}

cases! {
    enqueues_beyond_the_limit_are_refused_at_once,
}

/// So many callers that they would use all connections of the pool for longer than an operation waits for one.
const CALLERS: usize = 96;

/// The transaction that holds the keys `held`, idempotency and unique, and its job.
async fn hold_keys(fixture: &Fixture) -> (PgConnection, JobId) {
    let id = JobId::new();
    let held =
        format!("select enqueue('held', id => '{id}', idempotency_key => 'held', unique_key => 'held')");
    (open_transaction(fixture, &held).await, id)
}

/// A job with a held key. Every third caller enqueues a batch.
async fn enqueue_held(client: Client, caller: usize) -> Result<Enqueued> {
    let held = match caller % 2 {
        0 => job("late").idempotency_key("held"),
        _ => job("late").unique_key("held", UniqueMode::Dedupe),
    };
    match caller % 3 {
        0 => Ok(client.enqueue_many([held]).await?.remove(0)),
        _ => client.enqueue(held).await,
    }
}

fn callers_of_held_keys(fixture: &Fixture) -> Vec<JoinHandle<Result<Enqueued>>> {
    (0..CALLERS).map(|caller| tokio::spawn(enqueue_held(fixture.client(), caller))).collect()
}

/// Fails if `work` gets no connection.
async fn works<T>(what: &str, work: impl Future<Output = Result<T>>) -> T {
    in_time(work).await.unwrap_or_else(|error| panic!("{what}: {error:?}"))
}

/// What heartbeats, health checks, workers and other callers do.
pub(crate) async fn everything_else_works(fixture: &Fixture, round: usize) {
    let store = fixture.store();
    works("the health check", store.now()).await;
    let worker = fixture.worker_with(DAY).await;
    let beat = works("a heartbeat", store.beat(worker, &[])).await;
    assert!(matches!(beat, Beat::Alive { .. }), "{beat:?}");
    let own = format!("own-{round}");
    let plain =
        works("a plain enqueue", async { fixture.enqueue(job("own").queue(own.as_str())).await }).await;
    let batch = vec![job("own").queue("batch"), job("own").queue("batch")];
    works("a plain batch", fixture.enqueue_many(batch)).await;
    let request = ClaimRequest { queues: vec![own.into()], ..ClaimRequest::new(worker, 1) };
    let claims = works("a claim", fixture.client().claim(&request, &mut Default::default())).await;
    assert_eq!(ids(&claims.jobs), [plain.id]);
    let report =
        Report { claimed: &claims.jobs[0], ending: done(), follow_ups: Vec::new(), has_progressed: false };
    assert_eq!(works("a settle", fixture.settle(vec![report])).await, [Fenced::Held]);
    for n in 0..3 {
        let free = job("free").queue("free").idempotency_key(format!("free-{round}-{n}"));
        works("another key", async { fixture.enqueue(free).await }).await;
        let free = job("free").queue("free").unique_key(format!("free-{round}-{n}"), UniqueMode::Replace);
        works("another unique key", async { fixture.enqueue(free).await }).await;
    }
    let free = job("free").queue("free").idempotency_key(format!("free-{round}-batch"));
    works("a batch with another key", fixture.enqueue_many([free])).await;
}

async fn callers_of_a_held_key_delay_nothing_else(fixture: Fixture) {
    let (mut holder, _) = hold_keys(&fixture).await;
    // The callers try again as soon as they are refused.
    let callers: Vec<JoinHandle<()>> = (0..CALLERS)
        .map(|caller| {
            let client = fixture.client();
            tokio::spawn(async move {
                while let Err(error) = enqueue_held(client.clone(), caller).await {
                    assert!(error.is_unavailable(), "{error:?}");
                }
            })
        })
        .collect();
    until_blocked_by(&mut holder).await;
    for round in 0..3 {
        everything_else_works(&fixture, round).await;
    }
    roll_back(holder).await;
    for caller in callers {
        in_time(caller).await.expect("the keys are free");
    }
    assert_eq!(fixture.count(Status::Queued).await, 2 + 3 * (2 + 7), "two keys were held");
}

async fn callers_of_a_held_key_get_the_right_job_once_it_is_free(fixture: Fixture) {
    let (mut holder, id) = hold_keys(&fixture).await;
    for caller in callers_of_held_keys(&fixture) {
        let error = in_time(caller).await.expect("task").expect_err("the key is held");
        assert!(error.is_unavailable(), "{error:?}");
        assert!(error.to_string().contains("key") && error.to_string().contains("try again"), "{error}");
    }
    // These callers still wait when the transaction commits, or try again after it.
    let waiting = callers_of_held_keys(&fixture);
    until_blocked_by(&mut holder).await;
    sqlx::raw_sql("commit").execute(&mut holder).await.expect("commit");
    for (n, caller) in waiting.into_iter().enumerate() {
        let enqueued = match in_time(caller).await.expect("task") {
            Err(error) if error.is_unavailable() => enqueue_held(fixture.client(), n).await.expect("free"),
            done => done.expect("free"),
        };
        assert_eq!(enqueued, Enqueued { id, how: EnqueuedAs::Existing });
    }
    assert_eq!(fixture.count(Status::Queued).await, 1, "nothing was stored twice");
}

/// While the key is held, its callers wait one after another. If they still did so
/// afterwards, many callers would wait in vain for a key that nobody holds.
async fn callers_of_a_key_share_batches_again_once_it_is_free(fixture: Fixture) {
    let (mut holder, _) = hold_keys(&fixture).await;
    let failures = Arc::new(AtomicUsize::new(0));
    let callers: Vec<_> = (0..5000)
        .map(|_| {
            let (client, failures) = (fixture.client(), failures.clone());
            tokio::spawn(async move {
                let enqueue = async || client.enqueue(job("late").idempotency_key("held")).await.is_ok();
                while !enqueue().await {
                    failures.fetch_add(1, Ordering::Relaxed);
                }
                // The key is free, but others still wait for it.
                let mut failed = 0;
                for _ in 0..20 {
                    failed += usize::from(!enqueue().await);
                }
                failed
            })
        })
        .collect();
    until("a caller gives up", || async { failures.load(Ordering::Relaxed) > 0 }).await;
    sqlx::raw_sql("commit").execute(&mut holder).await.expect("commit");
    let mut failed = 0;
    for caller in callers {
        failed += caller.await.expect("task");
    }
    assert_eq!(failed, 0, "callers failed although nobody held the key");
}

async fn a_held_key_is_reported_as_unavailable_with_the_time_to_retry(fixture: Fixture) {
    let (holder, _) = hold_keys(&fixture).await;
    let api = HttpClient::new(&fixture);
    let body = serde_json::json!({ "kind": "mail", "payload": 1, "idempotency_key": "held" });
    let response = in_time(api.post("/jobs", &body)).await;
    let response = response.expect_problem(503, "unavailable", "idempotency_key");
    assert_eq!(response.header("retry-after"), "1");
    roll_back(holder).await;
    in_time(api.post("/jobs", &body)).await.expect_status(201);
}

async fn commands_on_a_locked_job_delay_nothing_else(fixture: Fixture) {
    let id = fixture.enqueue_kind("locked").await;
    let mut other =
        open_transaction(&fixture, &format!("select 1 from ready where id = '{id}' for update")).await;
    let commands: Vec<_> = (0..CALLERS)
        .map(|_| {
            let client = fixture.client();
            tokio::spawn(async move { client.cancel(id).await })
        })
        .collect();
    until_blocked_by(&mut other).await;
    everything_else_works(&fixture, 0).await;
    for command in commands {
        let error = in_time(command).await.expect("task").expect_err("the job is locked");
        assert!(error.is_unavailable(), "{error:?}");
    }
    roll_back(other).await;
    fixture.cancel(id).await.expect("cancel");
    assert_eq!(fixture.status(id).await, Status::Cancelled);
}

/// A role whose sessions are read-only until the setting is reset, as those at an old
/// primary are after a failover.
async fn a_connection_that_became_read_only_is_replaced_at_once(fixture: Fixture) {
    let role = format!("role_{}", JobId::new().0.simple());
    let sql = async |text: &str| fixture.sql(&text.replace("{role}", &role), None).await;
    sql("create role {role} superuser login password 'x';
         alter role {role} set default_transaction_read_only = on")
    .await;
    let url = fixture.url();
    let (_, address) = url.rsplit_once('@').expect("the URL of the test database names a user");
    let client = Client::connect(&format!("postgres://{role}:x@{address}")).await.expect("connect");
    open_idle_connections(&client).await;
    sql("alter role {role} reset default_transaction_read_only").await;
    let enqueued = client.enqueue(job("mail")).await.expect("a new connection");
    let worker = fixture.worker().await;
    let claims = client.claim(&ClaimRequest::new(worker, 1), &mut Default::default()).await;
    assert_eq!(ids(&claims.expect("the other connections were replaced too").jobs), [enqueued.id]);
    drop(client);
    sql("drop role {role}").await;
}

async fn open_idle_connections(client: &Client) {
    let store = client.store();
    let (one, two, three) = tokio::join!(store.now(), store.now(), store.now());
    one.and(two).and(three).expect("open connections");
}

async fn connections_that_the_server_closed_leave_the_pool_together(fixture: Fixture) {
    let name = format!("test {}", JobId::new());
    let url = with_parameter(&fixture.url(), &format!("application_name={}", name.replace(' ', "%20")));
    let client = Client::connect(&url).await.expect("connect");
    let sessions = format!("from pg_stat_activity where application_name = '{name}'");
    let mut other = fixture.postgres().await;
    let mut count = async |what: &str| -> i64 {
        let query = AssertSqlSafe(format!("select count({what}) {sessions}"));
        sqlx::query_scalar(query).fetch_one(&mut other).await.expect("count")
    };
    for _ in 0..2 {
        // One call may reuse the connection of another.
        while count("*").await < 3 {
            open_idle_connections(&client).await;
        }
        assert!(count("pg_terminate_backend(pid, 5000)").await >= 3);
        // An enqueue is repeated on a new connection, because it stores nothing twice.
        client.enqueue(job("mail")).await.expect("a new connection");
        client.store().now().await.expect("the other connections are gone");
    }
    assert_eq!(fixture.count(Status::Queued).await, 2);
}

/// As many enqueues as may wait, and one more.
async fn enqueues_beyond_the_limit_are_refused_at_once(fixture: Fixture) {
    const LIMIT: usize = 10_000;
    let stopped = StoppedWrites::of(&fixture).await;
    let (results, mut received) = tokio::sync::mpsc::unbounded_channel();
    for _ in 0..=LIMIT {
        let (client, results) = (fixture.client(), results.clone());
        tokio::spawn(async move {
            let enqueued = client.enqueue(NewJob::new("mail", &())).await;
            results.send(enqueued).expect("the case waits");
        });
    }
    let refused = in_time(received.recv()).await.expect("a result").expect_err("too many wait");
    assert!(refused.is_unavailable(), "{refused:?}");
    assert!(refused.to_string().contains("nothing was stored"), "{refused}");
    assert!(received.try_recv().is_err(), "the others wait");
    stopped.resume().await;
    for _ in 0..LIMIT {
        let enqueued = in_time(received.recv()).await.expect("a result");
        assert_eq!(enqueued.expect("stored").how, EnqueuedAs::Created);
    }
    assert_eq!(fixture.count(Status::Queued).await, LIMIT as u64);
    let job = NewJob::new("mail", &()).validate().expect("valid");
    fixture.store().enqueue(&[job], KeyWait::Long).await.expect("enqueue");
    fixture.enqueue(NewJob::new("mail", &())).await.expect("nothing waits any more");
}

/// Holds up all writes to `jobs`.
enum StoppedWrites {
    Postgres(PgConnection),
    Sqlite(rusqlite::Connection),
}

impl StoppedWrites {
    async fn of(fixture: &Fixture) -> Self {
        match fixture.engine() {
            Engine::Postgres => {
                StoppedWrites::Postgres(open_transaction(fixture, "lock table jobs in share mode").await)
            }
            Engine::Sqlite => {
                let file = rusqlite::Connection::open(fixture.file()).expect("open");
                file.busy_timeout(5 * SECOND).expect("busy timeout");
                file.execute_batch("begin immediate").expect("lock");
                StoppedWrites::Sqlite(file)
            }
        }
    }

    async fn resume(self) {
        match self {
            StoppedWrites::Postgres(connection) => roll_back(connection).await,
            StoppedWrites::Sqlite(file) => file.execute_batch("rollback").expect("unlock"),
        }
    }
}
