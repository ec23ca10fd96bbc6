//! Connections that die without a word, while the database is well and takes
//! new ones: a firewall forgot them, or a host vanished.

use std::future::Future;
use std::str::FromStr;
use std::time::Duration;

use longshore::store::{Beat, ClaimCursor, ClaimRequest, Fenced};
use longshore::{Client, Report, Result};
use sqlx::postgres::PgConnectOptions;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::fixture::*;

cases! {
    only on postgres:
    a_heartbeat_given_up_leaves_room_for_the_next,
    a_heartbeat_that_nobody_gives_up_ends_by_itself,
    a_worker_is_soon_done_with_dead_connections,
}

/// A way to the database on which what was opened so far can be silenced.
struct Proxy {
    url: String,
    age: watch::Sender<u32>,
}

impl Proxy {
    async fn start(fixture: &Fixture) -> Self {
        let options = PgConnectOptions::from_str(&database_url()).expect("a URL");
        let server = format!("{}:{}", options.get_host(), options.get_port());
        assert!(fixture.url().contains(&server), "the test database's URL names a host and a port");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("listen");
        let here = listener.local_addr().expect("address").to_string();
        let age = watch::Sender::new(0);
        tokio::spawn(accept(listener, server.clone(), age.clone()));
        Proxy { url: fixture.url().replacen(&server, &here, 1), age }
    }

    async fn client(&self) -> Client {
        Client::connect(&self.url).await.expect("connect through the proxy")
    }

    fn silence_what_is_open(&self) {
        self.age.send_modify(|age| *age += 1);
    }
}

async fn accept(listener: TcpListener, server: String, age: watch::Sender<u32>) {
    while let Ok((mut near, _)) = listener.accept().await {
        let (server, mut age) = (server.clone(), age.subscribe());
        age.mark_unchanged();
        tokio::spawn(async move {
            let Ok(mut far) = TcpStream::connect(server).await else { return };
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                // Both ends stay open, and neither hears of the other.
                _ = age.changed() => std::future::pending().await,
            }
        });
    }
}

/// Fails if the work takes as long as the verbs that may be slow.
async fn soon<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(25), work).await.expect("it takes far too long")
}

async fn a_heartbeat_given_up_leaves_room_for_the_next(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let store = proxy.client().await.store().aside();
    let worker = fixture.worker_with(DAY).await;
    assert!(matches!(store.beat(worker, &[]).await, Ok(Beat::Alive { .. })));
    proxy.silence_what_is_open();
    let unheard = tokio::time::timeout(SECOND, store.beat(worker, &[])).await;
    assert!(unheard.is_err(), "{unheard:?}");
    let next = tokio::time::timeout(3 * SECOND, store.beat(worker, &[])).await;
    assert!(matches!(next, Ok(Ok(Beat::Alive { .. }))), "{next:?}");
}

async fn a_heartbeat_that_nobody_gives_up_ends_by_itself(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let store = proxy.client().await.store().aside();
    let worker = fixture.worker_with(DAY).await;
    store.beat(worker, &[]).await.expect("beat");
    proxy.silence_what_is_open();
    let error = soon(store.beat(worker, &[])).await.expect_err("nobody answers");
    assert!(error.is_unavailable(), "{error:?}");
    store.beat(worker, &[]).await.expect("a fresh connection");
}

/// A try on a connection that has died: the caller learns in time that it may
/// try again.
async fn unavailable<T>(work: impl Future<Output = Result<T>>) {
    let error = soon(work).await.err().expect("nobody answers");
    assert!(error.is_unavailable(), "{error:?}");
}

/// The next try, which must not meet another dead connection.
async fn fresh<T>(work: impl Future<Output = Result<T>>) -> T {
    tokio::time::timeout(5 * SECOND, work).await.expect("dead again").expect("the database is well")
}

async fn a_worker_is_soon_done_with_dead_connections(fixture: Fixture) {
    let proxy = Proxy::start(&fixture).await;
    let worker = fixture.worker_with(DAY).await;
    fixture.add(job("mail")).await;
    let running = fixture.claim_one(worker).await;
    let lease = running.lease();
    let next = fixture.add(job("next")).await;
    let clients = [proxy.client().await, proxy.client().await, proxy.client().await, proxy.client().await];
    for client in &clients {
        // Two that idle: the one that is tried first takes the other with it.
        let (one, two) = tokio::join!(client.store().now(), client.store().now());
        one.and(two).expect("connections are open");
    }
    let [claimer, starter, reporter, _] = clients.each_ref().map(Client::store);
    proxy.silence_what_is_open();
    let request = ClaimRequest::new(worker, 5);
    let mut cursor = ClaimCursor::default();
    let progress = [(lease, raw("1"))];
    let report = || vec![Report { claimed: &running, ending: done(), follow_ups: Vec::new() }];
    tokio::join!(
        unavailable(claimer.claim(&request, &mut cursor)),
        unavailable(starter.mark_started(&lease)),
        unavailable(reporter.progress(&progress)),
        unavailable(clients[3].settle(report())),
    );
    assert_eq!(ids(&fresh(claimer.claim(&request, &mut cursor)).await.jobs), [next]);
    assert_eq!(fresh(starter.mark_started(&lease)).await, Fenced::Held);
    assert_eq!(fresh(reporter.progress(&progress)).await, [Fenced::Held]);
    assert_eq!(fresh(clients[3].settle(report())).await, [Fenced::Held]);
}
