//! Connections that die silently while the database is healthy and accepts new ones,
//! as after a firewall dropped its state or a host vanished.

use std::future::Future;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use longshore::store::{Beat, ClaimCursor, ClaimRequest, Fenced};
use longshore::{Client, Report, Result, Status, UniqueMode};
use sqlx::postgres::PgConnectOptions;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::fixture::*;
use crate::locks::{open_transaction, roll_back, until_blocked_by};

cases! {
    only on postgres:
    a_dropped_heartbeat_does_not_block_the_next_one,
    a_heartbeat_on_a_dead_connection_times_out,
    worker_operations_recover_from_dead_connections_within_seconds,
    a_dead_connection_delays_only_its_own_batch,
    enqueues_are_stored_although_their_connections_are_dead,
    a_transaction_on_a_dead_connection_does_not_keep_its_locks,
    many_unique_keys_are_stored_over_a_slow_network,
    a_step_whose_commit_gets_no_reply_is_not_repeated,
}

/// A proxy to the database that can stop forwarding on the connections opened so far.
pub(crate) struct Proxy {
    url: String,
    /// How many requests it has forwarded.
    requests: Arc<AtomicU32>,
    generation: watch::Sender<u32>,
    /// How many connections have carried data in vain.
    swallowed: watch::Sender<u32>,
}

impl Proxy {
    pub(crate) async fn start(fixture: &Fixture) -> Self {
        Proxy::with_latency(fixture, Duration::ZERO).await
    }

    /// Delays what the client sends.
    async fn with_latency(fixture: &Fixture, latency: Duration) -> Self {
        let options = PgConnectOptions::from_str(&database_url()).expect("a URL");
        let server = format!("{}:{}", options.get_host(), options.get_port());
        assert!(fixture.url().contains(&server), "the URL of the test database must name a host and a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let proxy = listener.local_addr().expect("address").to_string();
        let (generation, swallowed) = (watch::Sender::new(0), watch::Sender::new(0));
        let requests = Arc::new(AtomicU32::new(0));
        let forwarding = Forwarding { server: server.clone(), latency, requests: requests.clone() };
        tokio::spawn(accept(listener, forwarding, generation.clone(), swallowed.clone()));
        Proxy { url: fixture.url().replacen(&server, &proxy, 1), requests, generation, swallowed }
    }

    /// How many requests clients have sent. A client waits for the reply before it sends the next one.
    pub(crate) fn requests(&self) -> u32 {
        self.requests.load(Ordering::SeqCst)
    }

    pub(crate) async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("connect through the proxy")
    }

    /// Existing connections stay open but carry no more data.
    fn silence_open_connections(&self) {
        self.generation.send_modify(|generation| *generation += 1);
    }
}

#[derive(Clone)]
struct Forwarding {
    server: String,
    latency: Duration,
    requests: Arc<AtomicU32>,
}

async fn accept(
    listener: TcpListener,
    forwarding: Forwarding,
    generation: watch::Sender<u32>,
    swallowed: watch::Sender<u32>,
) {
    while let Ok((mut client, _)) = listener.accept().await {
        let (mut generation, swallowed) = (generation.subscribe(), swallowed.clone());
        let forwarding = forwarding.clone();
        generation.mark_unchanged();
        tokio::spawn(async move {
            let Ok(mut server) = TcpStream::connect(&forwarding.server).await else { return };
            tokio::select! {
                _ = forwarding.forward(&mut client, &mut server) => {}
                // Both ends stay open, but no data passes.
                _ = generation.changed() => {
                    let _ = client.readable().await;
                    swallowed.send_modify(|swallowed| *swallowed += 1);
                    std::future::pending().await
                }
            }
        });
    }
}

impl Forwarding {
    async fn forward(&self, client: &mut TcpStream, server: &mut TcpStream) -> std::io::Result<()> {
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = server.split();
        let requests = async {
            let mut buffer = vec![0; 64 * 1024];
            loop {
                let bytes = from_client.read(&mut buffer).await?;
                if bytes == 0 {
                    return to_server.shutdown().await;
                }
                self.requests.fetch_add(1, Ordering::SeqCst);
                if !self.latency.is_zero() {
                    tokio::time::sleep(self.latency).await;
                }
                to_server.write_all(&buffer[..bytes]).await?;
            }
        };
        let replies = async { tokio::io::copy(&mut from_server, &mut to_client).await.map(drop) };
        tokio::try_join!(requests, replies).map(drop)
    }
}

/// Fails if `work` runs into the timeout of the slow operations, which is a minute.
async fn in_time<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(45 * SECOND, work).await.expect("not within 45 seconds")
}

async fn a_dropped_heartbeat_does_not_block_the_next_one(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    // If the first one went on, it would keep the connection for as long as a heartbeat may take, in every round. A
    // round on a slow machine shows nothing.
    for _ in 0..10 {
        let proxy = Proxy::start(&fixture).await;
        let store = proxy.client().await.store().with_own_connection();
        assert!(matches!(store.beat(worker, &[]).await, Ok(Beat::Alive { .. })));
        proxy.silence_open_connections();
        let mut swallowed = proxy.swallowed.subscribe();
        let began = Instant::now();
        tokio::select! {
            lost = store.beat(worker, &[]) => panic!("a reply on a dead connection: {lost:?}"),
            sent = swallowed.wait_for(|swallowed| *swallowed == 1) => drop(sent.expect("a proxy")),
        }
        let next = store.beat(worker, &[]).await;
        assert!(matches!(next, Ok(Beat::Alive { .. })), "{next:?}");
        if began.elapsed() < 4 * SECOND {
            return;
        }
    }
    panic!("the next heartbeat always waited for the first one");
}

async fn a_heartbeat_on_a_dead_connection_times_out(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let store = proxy.client().await.store().with_own_connection();
    let worker = fixture.worker_with(DAY).await;
    store.beat(worker, &[]).await.expect("beat");
    proxy.silence_open_connections();
    let error = in_time(store.beat(worker, &[])).await.expect_err("no reply");
    assert!(error.is_unavailable(), "{error:?}");
    store.beat(worker, &[]).await.expect("a new connection");
}

/// A call on a dead connection returns `unavailable` in time.
async fn assert_unavailable<T>(work: impl Future<Output = Result<T>>) {
    let error = in_time(work).await.err().expect("no reply");
    assert!(error.is_unavailable(), "{error:?}");
}

/// The call must not get another dead connection: it is repeated once at most.
async fn assert_succeeds<T>(work: impl Future<Output = Result<T>>) -> T {
    in_time(work).await.expect("a healthy database")
}

async fn worker_operations_recover_from_dead_connections_within_seconds(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let worker = fixture.worker_with(DAY).await;
    fixture.add(job("mail")).await;
    let running = fixture.claim_one(worker).await;
    let lease = running.lease();
    let next = fixture.add(job("next")).await;
    let clients = [proxy.client().await, proxy.client().await, proxy.client().await, proxy.client().await];
    for client in &clients {
        // Two idle connections: when the first one turns out to be dead, the other must
        // be dropped too.
        let (one, two) = tokio::join!(client.store().now(), client.store().now());
        one.and(two).expect("open connections");
    }
    let [claimer, starter, reporter, _] = clients.each_ref().map(Client::store);
    proxy.silence_open_connections();
    let request = ClaimRequest::new(worker, 5);
    let mut cursor = ClaimCursor::default();
    let progress = [(lease, raw("1"))];
    let report =
        || vec![Report { claimed: &running, ending: done(), follow_ups: Vec::new(), has_progressed: false }];
    tokio::join!(
        assert_unavailable(claimer.claim(&request, &mut cursor)),
        assert_unavailable(starter.mark_started(&lease)),
        assert_unavailable(reporter.progress(&progress)),
        assert_unavailable(clients[3].settle(report())),
    );
    assert_eq!(ids(&assert_succeeds(claimer.claim(&request, &mut cursor)).await.jobs), [next]);
    assert_eq!(assert_succeeds(starter.mark_started(&lease)).await, Fenced::Held);
    assert_eq!(assert_succeeds(reporter.progress(&progress)).await, [Fenced::Held]);
    assert_eq!(assert_succeeds(clients[3].settle(report())).await, [Fenced::Held]);
}

/// A client with three idle connections. It has enqueued a job, so that the next enqueue
/// does not look up the registered kinds first.
async fn client_with_idle_connections(proxy: &Proxy) -> Client {
    let client = proxy.client().await;
    client.enqueue(job("first of its client")).await.expect("enqueue");
    let store = client.store();
    let (one, two, three) = tokio::join!(store.now(), store.now(), store.now());
    one.and(two).and(three).expect("open connections");
    client
}

/// While a batch gets no reply, the lane stores the next ones on another connection.
async fn a_dead_connection_delays_only_its_own_batch(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let client = client_with_idle_connections(&proxy).await;
    proxy.silence_open_connections();
    let mut swallowed = proxy.swallowed.subscribe();
    let first = client.clone();
    let first = tokio::spawn(async move { first.enqueue(job("first")).await });
    in_time(swallowed.wait_for(|swallowed| *swallowed == 1)).await.expect("the first batch was sent");
    for _ in 0..3 {
        assert_succeeds(async { client.enqueue(job("next")).await }).await;
    }
    assert_succeeds(async { first.await.expect("task") }).await;
    assert_eq!(fixture.count(Status::Queued).await, 1 + 4);
}

async fn enqueues_are_stored_although_their_connections_are_dead(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let keyed = client_with_idle_connections(&proxy).await;
    let unique = client_with_idle_connections(&proxy).await;
    let batch = client_with_idle_connections(&proxy).await;
    proxy.silence_open_connections();
    tokio::join!(
        assert_succeeds(async { keyed.enqueue(job("mail").idempotency_key("a")).await }),
        assert_succeeds(async { unique.enqueue(job("mail").unique_key("a", UniqueMode::Dedupe)).await }),
        assert_succeeds(batch.enqueue_many([job("mail"), job("mail").idempotency_key("b")])),
    );
    assert_eq!(fixture.count(Status::Queued).await, 3 + 4);
}

/// The connection dies after the statement has taken the keys and before the commit.
async fn a_transaction_on_a_dead_connection_does_not_keep_its_locks(fixture: Fixture) {
    // On a slow machine, the statement may give up before its connection dies. Such a round shows nothing.
    for round in 0..10 {
        let (first, last) = (format!("a {round}"), format!("z {round}"));
        let proxy = Proxy::start(&fixture).await;
        let client = client_with_idle_connections(&proxy).await;
        let hold = format!("select enqueue('held', idempotency_key => '{last}')");
        let mut holder = open_transaction(&fixture, &hold).await;
        let batch = [job("mail").idempotency_key(&first), job("mail").idempotency_key(&last)];
        let lost = tokio::spawn(async move { client.enqueue_many(batch).await });
        until_blocked_by(&mut holder).await;
        proxy.silence_open_connections();
        roll_back(holder).await;
        let stored = in_time(lost).await.expect("task");
        let next = fixture.enqueue(job("mail").idempotency_key(&first)).await.expect("the key is free");
        match stored {
            Err(error) if error.is_unavailable() => {}
            stored => {
                let stored = stored.expect("stored again on another connection");
                return assert_eq!(next.id, stored[0].id);
            }
        }
    }
    panic!("the statement always gave up before its connection died");
}

/// Each of them takes two round trips, so all of them take longer than one statement may. The connection replies all
/// the time, so it is not dead.
async fn many_unique_keys_are_stored_over_a_slow_network(fixture: Fixture) {
    let proxy = Proxy::with_latency(&fixture, Duration::from_millis(15)).await;
    let jobs = (0..200).map(|n| job("mail").unique_key(format!("{n}"), UniqueMode::Dedupe));
    let stored = proxy.client().await.enqueue_many(jobs).await;
    assert_eq!(stored.expect("a healthy database").len(), 200);
}

/// The server commits the step and the user's row. The reply does not arrive.
async fn a_step_whose_commit_gets_no_reply_is_not_repeated(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let schema = fixture.url().rsplit_once("schema=").expect("a schema").1.to_owned();
    // At its commit, a transaction that books waits for the lock.
    fixture
        .sql(
            "create table bookings (n bigint);
             create function hold() returns trigger language plpgsql as $$
               begin
                 perform set_config('lock_timeout', '0', true);
                 perform pg_advisory_xact_lock(hashtext(tg_table_schema));
                 return null;
               end $$;
             create constraint trigger hold after insert on bookings
               deferrable initially deferred for each row execute function hold()",
            None,
        )
        .await;
    let mut other =
        open_transaction(&fixture, &format!("select pg_advisory_lock(hashtext('{schema}'))")).await;
    let id = fixture.add(longshore::NewJob::new("order", &())).await;
    let order = move |(): (), ctx: longshore::Context| {
        let insert = format!("insert into {schema}.bookings values (7)");
        async move {
            ctx.step_in("book", async |tx| {
                sqlx::query(sqlx::AssertSqlSafe(insert)).execute(tx).await?;
                Ok(())
            })
            .await
        }
    };
    let worker = longshore::Worker::builder(proxy.client().await).function("order", order);
    let running = crate::worker::run_worker(worker).await;
    until_blocked_by(&mut other).await;
    proxy.silence_open_connections();
    drop(other);
    in_time(crate::worker::until_status(&fixture, id, Status::Succeeded)).await;
    running.stop().await;
    assert_eq!(fixture.query_number("select count(*) from bookings", None).await, 1);
    assert_eq!(fixture.job(id).await.lease_no, 1, "the same attempt found the step");
}
