//! What every request meets: ids, hosts, clocks, limits.

use std::time::Duration;

use longshore::Client;
use longshore::api::{Admission, Api, Limits, UnknownKinds};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::web::{Web, parse};
use crate::bench::{Bench, Engine, SECOND, job};

cases! {
    a_well_server_says_so,
    a_database_that_cannot_serve_is_told_without_its_secrets,
    a_request_keeps_its_id_or_gets_one,
    a_route_that_is_not_there_is_told_in_the_same_words,
    a_strangers_host_is_refused,
    a_request_that_takes_too_long_is_told,
    a_call_that_waits_is_answered_within_its_time,
    a_page_of_another_site_changes_nothing,
    a_client_that_sends_its_headers_slowly_is_cut_off,
    a_client_that_asks_nothing_more_is_cut_off,
    a_client_that_never_reads_is_cut_off,
    more_connections_than_allowed_wait_their_turn,
    clients_that_go_away_leave_nothing_behind,
    too_much_is_told_when_to_come_back,
}

async fn a_well_server_says_so(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    assert_eq!(web.get("/health").await.is(200).json(), json!({ "status": "ok" }));
}

async fn a_database_that_cannot_serve_is_told_without_its_secrets(bench: Bench) {
    if bench.engine() == Engine::Sqlite {
        return;
    }
    let broken = Client::connect(&bench.bare_url()).await.expect("it opens");
    let web = Web::of(Api::new(broken).unknown_kinds(UnknownKinds::Allow));
    for answer in [
        web.get("/health").await,
        web.get("/jobs").await,
        web.post("/jobs", &json!({ "kind": "a", "payload": 1 })).await,
    ] {
        let answer = answer.is_problem(503, "unavailable", "try again");
        assert!(!answer.text.contains("relation") && !answer.text.contains("longshore_"), "{answer:?}");
        assert!(!answer.header("retry-after").is_empty());
    }
}

async fn a_request_keeps_its_id_or_gets_one(bench: Bench) {
    let web = Web::new(&bench);
    let sent = web.send("GET", "/health", &[("x-request-id", "req-7")], "").await.is(200);
    assert_eq!(sent.header("x-request-id"), "req-7");
    let (one, other) = (web.get("/health").await, web.get("/health").await);
    assert_ne!(one.header("x-request-id"), other.header("x-request-id"));
    let garbled = web.send("GET", "/health", &[("x-request-id", "a b")], "").await;
    assert_ne!(garbled.header("x-request-id"), "a b");
}

async fn a_route_that_is_not_there_is_told_in_the_same_words(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    web.get("/nowhere").await.is_problem(404, "not_found", "/nowhere");
    web.send("PUT", "/jobs", &[], "").await.is_problem(405, "method_not_allowed", "PUT");
    web.send("DELETE", "/health", &[], "").await.is_problem(405, "method_not_allowed", "DELETE");
}

async fn a_strangers_host_is_refused(bench: Bench) {
    let api = Api::new(bench.handle()).hosts(["localhost", "127.0.0.1", "[::1]"]);
    let web = Web::of(api).listening(Limits::default()).await;
    web.get("/health").await.is(200);
    for host in ["localhost", "LOCALHOST:8080", "[::1]:8080", "127.0.0.1"] {
        web.send("GET", "/health", &[("host", host)], "").await.is(200);
    }
    for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8080", ""] {
        web.send("GET", "/health", &[("host", host)], "").await.is_problem(421, "misdirected", "name");
    }
}

async fn a_request_that_takes_too_long_is_told(bench: Bench) {
    let api = Api::new(bench.handle()).timeout(Duration::from_millis(50));
    let web = Web::of(api).listening(Limits::default()).await;
    let mut slow = TcpStream::connect(web.address()).await.expect("it listens");
    let head =
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n";
    slow.write_all(head.as_bytes()).await.expect("sent");
    // The body never comes.
    let mut answer = Vec::new();
    let _ = slow.read_to_end(&mut answer).await;
    parse(&answer).is_problem(504, "timeout", "50ms");
}

async fn a_call_that_waits_is_answered_within_its_time(bench: Bench) {
    let web = Web::of(Api::new(bench.handle()).timeout(3 * SECOND));
    web.post("/leases", &json!({ "wait_seconds": 20 })).await.is(200);
}

async fn a_page_of_another_site_changes_nothing(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    let own = format!("http://{}", web.address());
    for (origin, status) in [("https://evil.example", 403), ("null", 403), (own.as_str(), 200)] {
        assert_eq!(
            web.send("POST", "/queues/a/pause", &[("origin", origin)], "").await.status,
            status,
            "{origin}"
        );
        web.send("GET", "/queues", &[("origin", origin)], "").await.is(200);
    }
}

async fn a_client_that_sends_its_headers_slowly_is_cut_off(bench: Bench) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let web = Web::new(&bench).listening(limits).await;
    let mut slow = TcpStream::connect(web.address()).await.expect("it listens");
    slow.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await.expect("sent");
    let mut rest = Vec::new();
    // Ends because the server ends it.
    let _ = slow.read_to_end(&mut rest).await;
    assert!(rest.is_empty() || parse(&rest).status == 408, "{}", String::from_utf8_lossy(&rest));
    web.get("/health").await.is(200);
}

async fn a_client_that_asks_nothing_more_is_cut_off(bench: Bench) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let web = Web::new(&bench).listening(limits).await;
    let mut idle = TcpStream::connect(web.address()).await.expect("it listens");
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("sent");
    let mut answer = Vec::new();
    // Ends because the server ends it.
    let _ = idle.read_to_end(&mut answer).await;
    parse(&answer).is(200);
}

async fn a_client_that_never_reads_is_cut_off(bench: Bench) {
    let limits = Limits { connections: 1, reading: Duration::from_millis(100), ..Limits::default() };
    let web = Web::new(&bench).listening(limits).await;
    let mut deaf = TcpStream::connect(web.address()).await.expect("it listens");
    // More than the buffers on the way can hold.
    let ask = b"GET /api-docs/openapi.json HTTP/1.1\r\nhost: a\r\n\r\n".repeat(500);
    let asking = tokio::spawn(async move {
        let _ = deaf.write_all(&ask).await;
        deaf
    });
    let served = tokio::time::timeout(60 * SECOND, web.get("/health")).await;
    served.expect("the one slot is free again").is(200);
    drop(asking.await);
}

async fn more_connections_than_allowed_wait_their_turn(bench: Bench) {
    let limits = Limits { connections: 1, ..Limits::default() };
    let web = Web::new(&bench).listening(limits).await;
    let first = TcpStream::connect(web.address()).await.expect("it listens");
    let waiting = tokio::spawn({
        let web = web.clone();
        async move { web.get("/health").await.is(200) }
    });
    // Whether or not the second has come so far, it is served once the first goes.
    tokio::task::yield_now().await;
    drop(first);
    waiting.await.expect("served");
}

async fn clients_that_go_away_leave_nothing_behind(bench: Bench) {
    let web = Web::new(&bench).listening(Limits::default()).await;
    let body = json!({ "kind": "greet", "payload": 1 }).to_string();
    let head = format!(
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    for i in 0..200 {
        let mut stream = TcpStream::connect(web.address()).await.expect("it listens");
        let whole = format!("{head}{body}");
        let cut = whole.len() * (i % 10 + 1) / 10;
        stream.write_all(&whole.as_bytes()[..cut]).await.expect("sent");
        drop(stream);
    }
    for _ in 0..20 {
        web.post("/jobs", &json!({ "kind": "greet", "payload": 2 })).await.is(201);
    }
    if bench.engine() == Engine::Postgres {
        let idle = "select count(*) from pg_stat_activity
                     where state like 'idle in transaction%' and query like '%' || current_schema() || '%'";
        assert_eq!(bench.ask(idle, None).await, 0);
    }
}

async fn too_much_is_told_when_to_come_back(bench: Bench) {
    let slow = Admission { requests_per_second: Some(2), ..Admission::default() };
    let web = Web::of(Api::new(bench.handle()).admission(slow));
    let mut refused = 0;
    for _ in 0..50 {
        let answer = web.get("/jobs").await;
        if answer.status != 200 {
            let answer = answer.is_problem(429, "rate_limited", "slow down");
            assert!(!answer.header("retry-after").is_empty());
            refused += 1;
        }
    }
    assert!(refused > 0);
    web.get("/health").await.is(200);

    let short = Admission { waiting_jobs: Some(1), ..Admission::default() };
    let web = Web::of(Api::new(bench.handle()).unknown_kinds(UnknownKinds::Allow).admission(short));
    let (here, there) =
        (json!({ "kind": "a", "payload": 1 }), json!({ "kind": "a", "payload": 1, "queue": "b" }));
    bench.add(job("greet")).await;
    web.post("/jobs", &here).await.is_problem(429, "rate_limited", "queue");
    web.post("/jobs", &there).await.is(201);
}
