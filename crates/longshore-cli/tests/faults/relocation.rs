//! The queue moves to another server by logical replication while callers enqueue and a worker runs jobs, as
//! the guide "Production" describes it. Nothing is lost. `--nocapture` prints how long callers had to wait.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use longshore::{Client, FlowId, FlowStatus, JobId, NewJob, Status, Worker, chain, task};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use crate::fleet::MAX_WAIT;
use crate::missing::skip;
use crate::postgres_server::PostgresServer;
use crate::producer::{Producer, run};

#[test]
fn a_queue_moves_to_another_server_under_load() {
    let (Some(old), Some(new)) = (PostgresServer::create(), PostgresServer::create()) else {
        return skip("no Postgres server programs (initdb, pg_ctl, postgres) are installed");
    };
    run(relocate(old, new));
}

async fn relocate(old: PostgresServer, new: PostgresServer) {
    let (mut old_admin, mut new_admin) = (connect(&old).await, connect(&new).await);
    for admin in [&mut old_admin, &mut new_admin] {
        execute(admin, "create role app login; grant create on database postgres to app").await;
    }
    // The programs name both servers all the time, and use the one that accepts writes.
    let hosts = format!("127.0.0.1:{},127.0.0.1:{}", old.port(), new.port());
    let url = format!("postgres://app@{hosts}/postgres?target_session_attrs=read-write");
    let client = Client::connect(&url).await.unwrap();
    client.migrate().await.unwrap();
    // Only now: both servers accept writes at first.
    Client::connect(&url_of_app(&new)).await.unwrap().migrate().await.unwrap();
    execute(&mut new_admin, CLOSE).await;
    execute(&mut new_admin, "truncate longshore.migrations, longshore.upkeep").await;

    let runs = Arc::<Mutex<HashMap<JobId, u32>>>::default();
    let worker = tokio::spawn(worker(client.clone(), runs.clone()));
    let producers = Producer::start_all(&client);
    let grouped = Producer::start(&client, |client| async move {
        let job = NewJob::new("mail", &5).group("customer");
        client.enqueue(job).await.map(|enqueued| vec![enqueued.id])
    });
    let waiting =
        client.enqueue(NewJob::new("mail", &6).delay(Duration::from_secs(86_400))).await.unwrap().id;
    let mut flows = vec![start_flow(&client).await];
    for producer in &producers {
        producer.wait_for_jobs_started_after(Instant::now()).await;
    }

    let tables = tables(&mut old_admin).await;
    execute(&mut old_admin, &format!("create publication move for table {tables}")).await;
    let subscribe = format!(
        "create subscription move connection 'host=127.0.0.1 port={} user=postgres dbname=postgres' publication move",
        old.port()
    );
    execute(&mut new_admin, &subscribe).await;
    until(&mut new_admin, "select bool_and(srsubstate = 'r') from pg_subscription_rel").await;
    flows.push(start_flow(&client).await);

    let switched = Instant::now();
    execute(&mut old_admin, CLOSE).await;
    execute(&mut old_admin, "create temporary table closed as select clock_timestamp() as closed_at").await;
    // Sessions that begin from now on accept no writes.
    until(&mut old_admin, NO_WRITERS).await;
    let end: String = query(&mut old_admin, "select pg_current_wal_insert_lsn()::text").await;
    let arrived =
        format!("select replay_lsn >= '{end}' from pg_stat_replication where application_name = 'move'");
    until(&mut old_admin, &arrived).await;
    let set_sequences: String = query(&mut old_admin, SEQUENCES).await;
    execute(&mut new_admin, &set_sequences).await;
    execute(&mut new_admin, "drop subscription move").await;
    execute(&mut new_admin, "alter role app reset default_transaction_read_only").await;

    let opened = Instant::now();
    for producer in producers.iter().chain([&grouped]) {
        producer.wait_for_jobs_started_after(opened).await;
    }
    eprintln!("jobs are stored again {:?} after the old server was closed", switched.elapsed());
    flows.push(start_flow(&client).await);
    let acknowledged: Vec<JobId> =
        producers.iter().chain([&grouped]).flat_map(|producer| producer.acknowledged()).collect();
    // Only what the new server has counts from here on.
    let moved = Client::connect(&url_of_app(&new)).await.unwrap();
    for id in &acknowledged {
        succeeded(&moved, *id).await;
        assert!(runs.lock().unwrap().contains_key(id), "job {id} succeeded, but its handler did not run");
    }
    for flow in flows {
        ended(&moved, flow).await;
    }
    assert_eq!(moved.get(waiting).await.unwrap().status, Status::Queued);
    eprintln!(
        "{} jobs, {} of them ran twice",
        acknowledged.len(),
        runs.lock().unwrap().values().filter(|runs| **runs > 1).count()
    );
    worker.abort();
    assert_eq!(moved.check().await.unwrap().problems, []);
}

/// New sessions of the role accept no writes, so `target_session_attrs=read-write` skips the server.
const CLOSE: &str = "alter role app set default_transaction_read_only = on";

/// Ends all sessions that began before the server was closed, because they can still commit. Returns true if there are none.
const NO_WRITERS: &str = "
    select coalesce(bool_and(pg_terminate_backend(pid, 10000)), true) and count(*) = 0
      from pg_stat_activity
     where usename = 'app'
       and backend_start <= (select max(closed_at) from closed)";

/// Logical replication does not copy sequences.
const SEQUENCES: &str = "
    select string_agg(format('select setval(%L, %s)', format('%I.%I', schemaname, sequencename), last_value), '; ')
      from pg_sequences
     where schemaname = 'longshore'
       and last_value is not null";

async fn worker(client: Client, runs: Arc<Mutex<HashMap<JobId, u32>>>) {
    let note = move |_: serde_json::Value, ctx: longshore::Context| {
        let runs = runs.clone();
        async move {
            *runs.lock().unwrap().entry(ctx.id()).or_default() += 1;
            Ok::<_, longshore::Failure>(())
        }
    };
    Worker::builder(client).function("mail", note).build().unwrap().run().await.unwrap();
}

async fn start_flow(client: &Client) -> FlowId {
    let mail = || NewJob::new("mail", &7);
    client.enqueue_flow(chain![task("a", mail()), task("b", mail()), task("c", mail())]).await.unwrap().id
}

async fn succeeded(client: &Client, id: JobId) {
    let began = Instant::now();
    loop {
        let job = client.get(id).await.expect("an acknowledged job is kept");
        if job.status == Status::Succeeded {
            return;
        }
        assert!(began.elapsed() < MAX_WAIT, "job {id} is {:?}", job.status);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn ended(client: &Client, flow: FlowId) {
    let began = Instant::now();
    while client.flow(flow).await.unwrap().status != FlowStatus::Succeeded {
        assert!(began.elapsed() < MAX_WAIT, "flow {flow} does not end");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn url_of_app(server: &PostgresServer) -> String {
    server.url().replace("postgres@", "app@")
}

async fn connect(server: &PostgresServer) -> PgConnection {
    PgConnection::connect(&server.url()).await.unwrap()
}

/// All tables of the queue. Postgres 15 can also publish `tables in schema longshore`.
async fn tables(connection: &mut PgConnection) -> String {
    let tables = "select string_agg(format('%I.%I', schemaname, tablename), ', ') from pg_tables where schemaname = 'longshore'";
    query(connection, tables).await
}

async fn execute(connection: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(connection).await.unwrap();
}

async fn query<T>(connection: &mut PgConnection, sql: &str) -> T
where
    T: Send + Unpin + for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres>,
{
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_one(connection).await.unwrap()
}

/// Waits until the query returns true.
async fn until(connection: &mut PgConnection, sql: &str) {
    let began = Instant::now();
    loop {
        let is_so: Option<Option<bool>> =
            sqlx::query_scalar(AssertSqlSafe(sql.to_owned())).fetch_optional(&mut *connection).await.unwrap();
        if is_so.flatten() == Some(true) {
            return;
        }
        assert!(began.elapsed() < MAX_WAIT, "{sql}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
