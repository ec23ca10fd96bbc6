//! What every request meets: ids, hosts, clocks, limits.

use std::time::Duration;

use longshore::Client;
use longshore::api::{Admission, Api, Limits, UnknownKinds};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{HttpClient, parse};
use crate::fixture::{Engine, Fixture, SECOND, job};

cases! {
    a_well_server_says_so,
    a_database_that_cannot_serve_is_told_without_its_secrets,
    a_request_keeps_its_id_or_gets_one,
    a_route_that_is_not_there_is_told_in_the_same_words,
    a_strangers_host_is_refused,
    a_request_that_takes_too_long_is_told,
    a_call_that_waits_is_answered_within_its_time,
    a_page_of_another_site_changes_nothing,
    too_much_is_told_when_to_come_back,
}

async fn a_well_server_says_so(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    assert_eq!(http.get("/health").await.expect_status(200).json(), json!({ "status": "ok" }));
}

async fn a_database_that_cannot_serve_is_told_without_its_secrets(fixture: Fixture) {
    if fixture.engine() == Engine::Sqlite {
        return;
    }
    let broken = Client::connect(&fixture.bare_url()).await.expect("it opens");
    let http = HttpClient::of(Api::new(broken).unknown_kinds(UnknownKinds::Allow));
    for answer in [
        http.get("/health").await,
        http.get("/jobs").await,
        http.post("/jobs", &json!({ "kind": "a", "payload": 1 })).await,
    ] {
        let answer = answer.expect_problem(503, "unavailable", "try again");
        assert!(!answer.text.contains("relation") && !answer.text.contains("longshore_"), "{answer:?}");
        assert!(!answer.header("retry-after").is_empty());
    }
}

async fn a_request_keeps_its_id_or_gets_one(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let sent = http.send("GET", "/health", &[("x-request-id", "req-7")], "").await.expect_status(200);
    assert_eq!(sent.header("x-request-id"), "req-7");
    let (one, other) = (http.get("/health").await, http.get("/health").await);
    assert_ne!(one.header("x-request-id"), other.header("x-request-id"));
    let garbled = http.send("GET", "/health", &[("x-request-id", "a b")], "").await;
    assert_ne!(garbled.header("x-request-id"), "a b");
}

async fn a_route_that_is_not_there_is_told_in_the_same_words(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    http.get("/nowhere").await.expect_problem(404, "not_found", "/nowhere");
    http.send("PUT", "/jobs", &[], "").await.expect_problem(405, "method_not_allowed", "PUT");
    http.send("DELETE", "/health", &[], "").await.expect_problem(405, "method_not_allowed", "DELETE");
}

async fn a_strangers_host_is_refused(fixture: Fixture) {
    let api = Api::new(fixture.client()).hosts(["localhost", "127.0.0.1", "[::1]"]);
    let http = HttpClient::of(api).listening(Limits::default()).await;
    http.get("/health").await.expect_status(200);
    for host in ["localhost", "LOCALHOST:8080", "[::1]:8080", "127.0.0.1"] {
        http.send("GET", "/health", &[("host", host)], "").await.expect_status(200);
    }
    for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8080", ""] {
        http.send("GET", "/health", &[("host", host)], "").await.expect_problem(421, "misdirected", "name");
    }
}

async fn a_request_that_takes_too_long_is_told(fixture: Fixture) {
    let api = Api::new(fixture.client()).timeout(Duration::from_millis(50));
    let http = HttpClient::of(api).listening(Limits::default()).await;
    let mut slow = TcpStream::connect(http.address()).await.expect("it listens");
    let head =
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n";
    slow.write_all(head.as_bytes()).await.expect("sent");
    // The body never comes.
    let mut answer = Vec::new();
    let _ = slow.read_to_end(&mut answer).await;
    parse(&answer).expect_problem(504, "timeout", "50ms");
}

async fn a_call_that_waits_is_answered_within_its_time(fixture: Fixture) {
    let http = HttpClient::of(Api::new(fixture.client()).timeout(3 * SECOND));
    http.post("/leases", &json!({ "wait_seconds": 20 })).await.expect_status(200);
}

async fn a_page_of_another_site_changes_nothing(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let own = format!("http://{}", http.address());
    for (origin, status) in [("https://evil.example", 403), ("null", 403), (own.as_str(), 200)] {
        assert_eq!(
            http.send("POST", "/queues/a/pause", &[("origin", origin)], "").await.status,
            status,
            "{origin}"
        );
        http.send("GET", "/queues", &[("origin", origin)], "").await.expect_status(200);
    }
}

async fn too_much_is_told_when_to_come_back(fixture: Fixture) {
    let slow = Admission { requests_per_second: Some(2), ..Admission::default() };
    let http = HttpClient::of(Api::new(fixture.client()).admission(slow));
    let mut refused = 0;
    for _ in 0..50 {
        let answer = http.get("/jobs").await;
        if answer.status != 200 {
            let answer = answer.expect_problem(429, "rate_limited", "slow down");
            assert!(!answer.header("retry-after").is_empty());
            refused += 1;
        }
    }
    assert!(refused > 0);
    http.get("/health").await.expect_status(200);

    let short = Admission { waiting_jobs: Some(1), ..Admission::default() };
    let http = HttpClient::of(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).admission(short));
    let (here, there) =
        (json!({ "kind": "a", "payload": 1 }), json!({ "kind": "a", "payload": 1, "queue": "b" }));
    fixture.add(job("greet")).await;
    http.post("/jobs", &here).await.expect_problem(429, "rate_limited", "queue");
    http.post("/jobs", &there).await.expect_status(201);
}
