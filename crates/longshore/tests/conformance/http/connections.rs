//! Clients that mean no good, by real sockets: slow ones, greedy ones, large ones.

use std::io::ErrorKind;
use std::time::Duration;

use longshore::api::{Api, Limits, UnknownKinds};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{HttpClient, parse};
use crate::fixture::{Engine, Fixture, SECOND};

cases! {
    a_client_that_sends_its_headers_slowly_is_cut_off,
    a_client_that_asks_nothing_more_is_cut_off,
    a_client_that_never_reads_is_cut_off,
    more_connections_than_allowed_wait_their_turn,
    clients_that_go_away_leave_nothing_behind,
    a_client_that_trickles_its_headers_is_cut_off,
    a_client_that_trickles_its_body_is_told_and_left,
    a_connection_too_many_is_not_served_before_one_goes,
    a_batch_that_is_too_large_is_refused_before_it_is_read,
}

async fn a_client_that_sends_its_headers_slowly_is_cut_off(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut slow = TcpStream::connect(http.address()).await.expect("it listens");
    slow.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await.expect("sent");
    let mut rest = Vec::new();
    // Ends because the server ends it.
    let _ = slow.read_to_end(&mut rest).await;
    assert!(rest.is_empty() || parse(&rest).status == 408, "{}", String::from_utf8_lossy(&rest));
    http.get("/health").await.expect_status(200);
}

async fn a_client_that_asks_nothing_more_is_cut_off(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut idle = TcpStream::connect(http.address()).await.expect("it listens");
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("sent");
    let mut answer = Vec::new();
    // Ends because the server ends it.
    let _ = idle.read_to_end(&mut answer).await;
    parse(&answer).expect_status(200);
}

async fn a_client_that_never_reads_is_cut_off(fixture: Fixture) {
    let limits = Limits { connections: 1, reading: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut deaf = TcpStream::connect(http.address()).await.expect("it listens");
    // More than the buffers on the way can hold.
    let ask = b"GET /api-docs/openapi.json HTTP/1.1\r\nhost: a\r\n\r\n".repeat(500);
    let asking = tokio::spawn(async move {
        let _ = deaf.write_all(&ask).await;
        deaf
    });
    let served = tokio::time::timeout(60 * SECOND, http.get("/health")).await;
    served.expect("the one slot is free again").expect_status(200);
    drop(asking.await);
}

async fn more_connections_than_allowed_wait_their_turn(fixture: Fixture) {
    let limits = Limits { connections: 1, ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let first = TcpStream::connect(http.address()).await.expect("it listens");
    let waiting = tokio::spawn({
        let http = http.clone();
        async move { http.get("/health").await.expect_status(200) }
    });
    // Whether or not the second has come so far, it is served once the first goes.
    tokio::task::yield_now().await;
    drop(first);
    waiting.await.expect("served");
}

async fn clients_that_go_away_leave_nothing_behind(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let body = json!({ "kind": "greet", "payload": 1 }).to_string();
    let head = format!(
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    for i in 0..200 {
        let mut stream = TcpStream::connect(http.address()).await.expect("it listens");
        let whole = format!("{head}{body}");
        let cut = whole.len() * (i % 10 + 1) / 10;
        stream.write_all(&whole.as_bytes()[..cut]).await.expect("sent");
        drop(stream);
    }
    for _ in 0..20 {
        http.post("/jobs", &json!({ "kind": "greet", "payload": 2 })).await.expect_status(201);
    }
    if fixture.engine() == Engine::Postgres {
        let idle = "select count(*) from pg_stat_activity
                     where state like 'idle in transaction%' and query like '%' || current_schema() || '%'";
        assert_eq!(fixture.query_number(idle, None).await, 0);
    }
}

/// Sends a byte at a time for as long as the server takes them, and returns what
/// the server said.
async fn trickle(http: &HttpClient, head: &str) -> Vec<u8> {
    let (mut reading, mut writing) =
        TcpStream::connect(http.address()).await.expect("it listens").into_split();
    let (head, other) = (head.to_owned(), http.clone());
    let slow = tokio::spawn(async move {
        writing.write_all(head.as_bytes()).await.expect("sent");
        while writing.write_all(b"x").await.is_ok() {
            // Slow: whoever else asks is answered between two bytes.
            other.get("/health").await;
        }
    });
    let mut answer = Vec::new();
    // Ends because the server ends it: the client never would.
    let _ = reading.read_to_end(&mut answer).await;
    slow.abort();
    answer
}

async fn a_client_that_trickles_its_headers_is_cut_off(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let answer = trickle(&http, "GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await;
    assert!(answer.is_empty() || parse(&answer).status == 408, "{}", String::from_utf8_lossy(&answer));
    http.get("/health").await.expect_status(200);
}

async fn a_client_that_trickles_its_body_is_told_and_left(fixture: Fixture) {
    let http = HttpClient::of(Api::new(fixture.client()).timeout(Duration::from_millis(100)));
    let http = http.listening(Limits::default()).await;
    let head =
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n";
    parse(&trickle(&http, head).await).expect_problem(504, "timeout", "100ms");
    http.get("/health").await.expect_status(200);
}

async fn a_connection_too_many_is_not_served_before_one_goes(fixture: Fixture) {
    const ASK: &[u8] = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
    let http = HttpClient::new(&fixture).listening(Limits { connections: 1, ..Limits::default() }).await;
    let mut first = TcpStream::connect(http.address()).await.expect("it listens");
    let mut buffer = [0; 4096];
    let mut second = None;
    // Time enough for a server that would serve both.
    for _ in 0..20 {
        first.write_all(ASK).await.expect("sent");
        assert!(first.read(&mut buffer).await.expect("an answer") > 0);
        if second.is_none() {
            let mut stream = TcpStream::connect(http.address()).await.expect("the system takes it");
            stream.write_all(ASK).await.expect("sent");
            second = Some(stream);
        }
    }
    let mut second = second.expect("a connection");
    let early = second.try_read(&mut buffer).map_err(|error| error.kind());
    assert_eq!(early, Err(ErrorKind::WouldBlock), "it was served beside the first");
    drop(first);
    assert!(second.read(&mut buffer).await.expect("an answer") > 0, "it is served once the first has gone");
}

async fn a_batch_that_is_too_large_is_refused_before_it_is_read(fixture: Fixture) {
    let http = HttpClient::of(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow));
    let http = http.listening(Limits::default()).await;
    let head = |framing: &str| {
        format!(
            "POST /jobs/batch HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        )
    };
    let too_much = 16 * 1024 * 1024 + 1;
    let mut promised = TcpStream::connect(http.address()).await.expect("it listens");
    promised.write_all(head(&format!("content-length: {too_much}")).as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    // Not a byte of the body is sent, and the answer comes all the same.
    let _ = promised.read_to_end(&mut answer).await;
    parse(&answer).expect_problem(413, "too_large", "16777216");

    // A client that does not say how much it sends is stopped on the way.
    let unmeasured = TcpStream::connect(http.address()).await.expect("it listens");
    let (mut reading, mut writing) = unmeasured.into_split();
    let sent = tokio::spawn(async move {
        let _ = writing.write_all(head("transfer-encoding: chunked").as_bytes()).await;
        let chunk = format!("100000\r\n{}\r\n", " ".repeat(0x10_0000));
        for _ in 0..20 {
            if writing.write_all(chunk.as_bytes()).await.is_err() {
                return;
            }
        }
        // Still open, so that the answer is not lost with the connection.
        std::future::pending::<()>().await;
    });
    let mut answer = vec![0; 4096];
    let length = reading.read(&mut answer).await.expect("an answer");
    parse(&answer[..length]).expect_problem(413, "too_large", "16777216");
    sent.abort();
}
