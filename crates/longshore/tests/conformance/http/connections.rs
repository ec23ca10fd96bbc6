//! Slow, greedy and disconnected clients, over real sockets.

use std::io::ErrorKind;
use std::time::Duration;

use longshore::UnknownKinds;
use longshore::api::{Api, Limits};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::client::{HttpClient, parse};
use crate::fixture::{Engine, Fixture, SECOND};

cases! {
    a_client_that_never_finishes_its_headers_is_disconnected,
    an_idle_client_is_disconnected,
    a_client_that_never_reads_is_disconnected,
    connections_over_the_limit_wait,
    disconnected_clients_leave_no_open_transactions,
    a_client_that_sends_headers_byte_by_byte_is_disconnected,
    a_client_that_sends_its_body_byte_by_byte_gets_a_timeout,
    a_connection_over_the_limit_is_served_only_after_another_one_closes,
    a_too_large_batch_is_refused_before_it_is_read,
}

async fn a_client_that_never_finishes_its_headers_is_disconnected(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut slow = TcpStream::connect(http.address()).await.expect("connect");
    slow.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await.expect("write");
    let mut rest = Vec::new();
    // Returns because the server closes the connection.
    let _ = slow.read_to_end(&mut rest).await;
    assert!(rest.is_empty() || parse(&rest).status == 408, "{}", String::from_utf8_lossy(&rest));
    http.get("/health").await.expect_status(200);
}

async fn an_idle_client_is_disconnected(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut idle = TcpStream::connect(http.address()).await.expect("connect");
    idle.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("write");
    let mut response = Vec::new();
    // Returns because the server closes the connection.
    let _ = idle.read_to_end(&mut response).await;
    parse(&response).expect_status(200);
}

async fn a_client_that_never_reads_is_disconnected(fixture: Fixture) {
    let limits = Limits { connections: 1, reading: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut client = TcpStream::connect(http.address()).await.expect("connect");
    // The responses exceed all socket buffers.
    let requests = b"GET /api-docs/openapi.json HTTP/1.1\r\nhost: a\r\n\r\n".repeat(500);
    let sending = tokio::spawn(async move {
        let _ = client.write_all(&requests).await;
        client
    });
    let served = tokio::time::timeout(60 * SECOND, http.get("/health")).await;
    served.expect("the only connection slot is still taken").expect_status(200);
    drop(sending.await);
}

async fn connections_over_the_limit_wait(fixture: Fixture) {
    let limits = Limits { connections: 1, ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let first = TcpStream::connect(http.address()).await.expect("connect");
    let waiting = tokio::spawn({
        let http = http.clone();
        async move { http.get("/health").await.expect_status(200) }
    });
    // The second connection is served only after the first one closes, even if it has already
    // sent its request.
    tokio::task::yield_now().await;
    drop(first);
    waiting.await.expect("task");
}

async fn disconnected_clients_leave_no_open_transactions(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    let body = json!({ "kind": "greet", "payload": 1 }).to_string();
    let head = format!(
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    for i in 0..200 {
        let mut stream = TcpStream::connect(http.address()).await.expect("connect");
        let whole = format!("{head}{body}");
        let cut = whole.len() * (i % 10 + 1) / 10;
        stream.write_all(&whole.as_bytes()[..cut]).await.expect("write");
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

/// Sends one byte at a time for as long as the server accepts them, and returns the
/// response.
async fn trickle(http: &HttpClient, head: &str) -> Vec<u8> {
    let (mut reading, mut writing) = TcpStream::connect(http.address()).await.expect("connect").into_split();
    let (head, pace) = (head.to_owned(), http.clone());
    let slow = tokio::spawn(async move {
        writing.write_all(head.as_bytes()).await.expect("write");
        while writing.write_all(b"x").await.is_ok() {
            // A request between two bytes keeps the transfer slow.
            pace.get("/health").await;
        }
    });
    let mut response = Vec::new();
    // Returns because the server closes the connection; the client never does.
    let _ = reading.read_to_end(&mut response).await;
    slow.abort();
    response
}

async fn a_client_that_sends_headers_byte_by_byte_is_disconnected(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let response = trickle(&http, "GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await;
    assert!(response.is_empty() || parse(&response).status == 408, "{}", String::from_utf8_lossy(&response));
    http.get("/health").await.expect_status(200);
}

async fn a_client_that_sends_its_body_byte_by_byte_gets_a_timeout(fixture: Fixture) {
    let http = HttpClient::for_api(Api::new(fixture.client()).timeout(Duration::from_millis(100)));
    let http = http.listening(Limits::default()).await;
    let head =
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n";
    parse(&trickle(&http, head).await).expect_problem(504, "timeout", "100ms");
    http.get("/health").await.expect_status(200);
}

async fn a_connection_over_the_limit_is_served_only_after_another_one_closes(fixture: Fixture) {
    const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
    let http = HttpClient::new(&fixture).listening(Limits { connections: 1, ..Limits::default() }).await;
    let mut first = TcpStream::connect(http.address()).await.expect("connect");
    let mut buffer = [0; 4096];
    let mut second = None;
    // Long enough for a server that would serve both.
    for _ in 0..20 {
        first.write_all(REQUEST).await.expect("write");
        assert!(first.read(&mut buffer).await.expect("a response") > 0);
        if second.is_none() {
            let mut stream = TcpStream::connect(http.address()).await.expect("connect");
            stream.write_all(REQUEST).await.expect("write");
            second = Some(stream);
        }
    }
    let mut second = second.expect("a connection");
    let early = second.try_read(&mut buffer).map_err(|error| error.kind());
    assert_eq!(early, Err(ErrorKind::WouldBlock), "it was served while the first was open");
    drop(first);
    assert!(
        second.read(&mut buffer).await.expect("a response") > 0,
        "it must be served after the first closed"
    );
}

async fn a_too_large_batch_is_refused_before_it_is_read(fixture: Fixture) {
    let http = HttpClient::for_api(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow));
    let http = http.listening(Limits::default()).await;
    let head = |framing: &str| {
        format!(
            "POST /jobs/batch HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        )
    };
    let too_much = 16 * 1024 * 1024 + 1;
    let mut announced = TcpStream::connect(http.address()).await.expect("connect");
    announced.write_all(head(&format!("content-length: {too_much}")).as_bytes()).await.expect("write");
    let mut response = Vec::new();
    // The response arrives although no byte of the body was sent.
    let _ = announced.read_to_end(&mut response).await;
    parse(&response).expect_problem(413, "too_large", "16777216");

    // Without a content length, the server stops reading at the limit.
    let chunked = TcpStream::connect(http.address()).await.expect("connect");
    let (mut reading, mut writing) = chunked.into_split();
    let sent = tokio::spawn(async move {
        let _ = writing.write_all(head("transfer-encoding: chunked").as_bytes()).await;
        let chunk = format!("100000\r\n{}\r\n", " ".repeat(0x10_0000));
        for _ in 0..20 {
            if writing.write_all(chunk.as_bytes()).await.is_err() {
                return;
            }
        }
        // Keep the connection open, so that the response is not lost.
        std::future::pending::<()>().await;
    });
    let mut response = vec![0; 4096];
    let length = reading.read(&mut response).await.expect("a response");
    parse(&response[..length]).expect_problem(413, "too_large", "16777216");
    sent.abort();
}
