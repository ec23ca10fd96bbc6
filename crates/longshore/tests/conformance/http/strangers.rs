//! Clients that mean no good, by real sockets: slow ones, greedy ones, large ones.

use std::io::ErrorKind;
use std::time::Duration;

use longshore::api::{Api, Limits, UnknownKinds};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::web::{Web, parse};
use crate::bench::Bench;

cases! {
    a_client_that_trickles_its_headers_is_cut_off,
    a_client_that_trickles_its_body_is_told_and_left,
    a_connection_too_many_is_not_served_before_one_goes,
    a_batch_that_is_too_large_is_refused_before_it_is_read,
    a_batch_is_as_strict_as_a_single_job,
}

/// Sends a byte at a time for as long as the server takes them, and returns what
/// the server said.
async fn trickle(web: &Web, head: &str) -> Vec<u8> {
    let (mut reading, mut writing) =
        TcpStream::connect(web.address()).await.expect("it listens").into_split();
    let (head, other) = (head.to_owned(), web.clone());
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

async fn a_client_that_trickles_its_headers_is_cut_off(bench: Bench) {
    let limits = Limits { headers: Duration::from_millis(100), ..Limits::default() };
    let web = Web::new(&bench).listening(limits).await;
    let answer = trickle(&web, "GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await;
    assert!(answer.is_empty() || parse(&answer).status == 408, "{}", String::from_utf8_lossy(&answer));
    web.get("/health").await.is(200);
}

async fn a_client_that_trickles_its_body_is_told_and_left(bench: Bench) {
    let web = Web::of(Api::new(bench.handle()).timeout(Duration::from_millis(100)));
    let web = web.listening(Limits::default()).await;
    let head =
        "POST /jobs HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 1000000\r\n\r\n";
    parse(&trickle(&web, head).await).is_problem(504, "timeout", "100ms");
    web.get("/health").await.is(200);
}

async fn a_connection_too_many_is_not_served_before_one_goes(bench: Bench) {
    const ASK: &[u8] = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n";
    let web = Web::new(&bench).listening(Limits { connections: 1, ..Limits::default() }).await;
    let mut first = TcpStream::connect(web.address()).await.expect("it listens");
    let mut buffer = [0; 4096];
    let mut second = None;
    // Time enough for a server that would serve both.
    for _ in 0..20 {
        first.write_all(ASK).await.expect("sent");
        assert!(first.read(&mut buffer).await.expect("an answer") > 0);
        if second.is_none() {
            let mut stream = TcpStream::connect(web.address()).await.expect("the system takes it");
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

async fn a_batch_that_is_too_large_is_refused_before_it_is_read(bench: Bench) {
    let web = Web::of(Api::new(bench.handle()).unknown_kinds(UnknownKinds::Allow));
    let web = web.listening(Limits::default()).await;
    let head = |framing: &str| {
        format!(
            "POST /jobs/batch HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n{framing}\r\n\r\n"
        )
    };
    let too_much = 16 * 1024 * 1024 + 1;
    let mut promised = TcpStream::connect(web.address()).await.expect("it listens");
    promised.write_all(head(&format!("content-length: {too_much}")).as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    // Not a byte of the body is sent, and the answer comes all the same.
    let _ = promised.read_to_end(&mut answer).await;
    parse(&answer).is_problem(413, "too_large", "16777216");

    // A client that does not say how much it sends is stopped on the way.
    let unmeasured = TcpStream::connect(web.address()).await.expect("it listens");
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
    parse(&answer[..length]).is_problem(413, "too_large", "16777216");
    sent.abort();
}

async fn a_batch_is_as_strict_as_a_single_job(bench: Bench) {
    let web = Web::new(&bench);
    let large = json!({ "kind": "a", "payload": "p".repeat(1024 * 1024) });
    let items = json!([
        large,
        { "kind": "a", "payload": "a\u{0}b" },
        { "kind": "a", "payload": 1, "colour": "red" },
    ]);
    let answer = web.post("/jobs/batch", &items).await.is(200).json();
    let told = |i: usize| (answer["items"][i]["error"].clone(), answer["items"][i]["message"].to_string());
    for (i, slug, part) in
        [(0, "too_large", "payload"), (1, "validation", "NUL"), (2, "validation", "colour")]
    {
        let (error, message) = told(i);
        assert_eq!(error, slug, "{message}");
        assert!(message.contains(part), "{message}");
    }
}
