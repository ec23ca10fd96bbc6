//! Slow, greedy and disconnected clients, over real sockets.

use std::io::ErrorKind;
use std::time::{Duration, Instant};

use longshore::api::{Access, Api, BodyLimits, Dashboard, Limits};
use longshore::{Scope, UnknownKinds};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use super::auth::token;
use super::client::{HttpClient, Response, before_timeout, parse};
use crate::fixture::{Engine, Fixture, MAX_WAIT, SECOND, job};
use crate::worker::until;

cases! {
    a_client_that_never_finishes_its_headers_is_disconnected,
    an_idle_client_is_disconnected,
    a_client_that_never_sends_is_disconnected,
    an_idle_connection_outlasts_the_timeout_of_headers,
    the_timeout_of_headers_counts_for_every_request_of_a_connection,
    a_client_that_never_reads_is_disconnected,
    an_idle_connection_is_closed_in_favour_of_a_new_one,
    disconnected_clients_leave_no_open_transactions,
    a_client_that_sends_headers_byte_by_byte_is_disconnected,
    a_client_that_sends_its_body_byte_by_byte_gets_a_timeout,
    a_body_that_arrives_too_slowly_gets_a_timeout_before_the_request_does,
    a_slow_body_of_sufficient_rate_is_accepted,
    a_large_body_above_the_limit_is_refused_before_it_is_read,
    a_client_with_fewer_bytes_replaces_the_body_that_takes_the_longest,
    a_body_that_takes_longer_than_the_timeout_makes_room,
    the_bytes_of_a_body_are_counted_until_it_is_handled,
    clients_with_slow_bodies_do_not_keep_others_out,
    clients_with_slow_headers_do_not_keep_others_out,
    clients_that_do_not_read_do_not_keep_others_out,
    clients_with_slow_login_forms_do_not_keep_others_out,
    clients_with_unknown_tokens_do_not_keep_others_out,
    one_token_cannot_wait_with_all_connections,
    a_connection_over_the_limit_waits_while_all_others_handle_requests,
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
    let limits = Limits { idle: SECOND, ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut response = Vec::new();
    // On a slow machine, the connection may be idle for too long before the first request.
    while response.is_empty() {
        let mut idle = TcpStream::connect(http.address()).await.expect("connect");
        let _ = idle.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await;
        // Returns because the server closes the connection.
        let _ = idle.read_to_end(&mut response).await;
    }
    parse(&response).expect_status(200);
}

async fn a_client_that_never_sends_is_disconnected(fixture: Fixture) {
    let limits = Limits { idle: Duration::from_millis(100), ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut silent = TcpStream::connect(http.address()).await.expect("connect");
    let closed = tokio::time::timeout(MAX_WAIT, silent.read(&mut [0; 1])).await.expect("it is still open");
    assert_eq!(closed.ok().unwrap_or_default(), 0);
}

/// Sends a request on an open connection and reads the response.
async fn request(stream: &mut TcpStream) -> u16 {
    stream.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("write");
    let mut response = vec![0; 4096];
    let length = stream.read(&mut response).await.expect("a response");
    parse(&response[..length]).status
}

async fn an_idle_connection_outlasts_the_timeout_of_headers(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(50), idle: 600 * SECOND, ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut kept = TcpStream::connect(http.address()).await.expect("connect");
    for _ in 0..3 {
        // Longer than the headers may take.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(request(&mut kept).await, 200);
    }
    // So is the connection of a call that takes longer.
    let body = json!({ "wait_seconds": 0.3 }).to_string();
    kept.write_all(format!("{}{body}", post("/leases", body.len())).as_bytes()).await.expect("write");
    let mut response = vec![0; 4096];
    let length = kept.read(&mut response).await.expect("a response");
    parse(&response[..length]).expect_status(200);
    assert_eq!(request(&mut kept).await, 200);
}

async fn the_timeout_of_headers_counts_for_every_request_of_a_connection(fixture: Fixture) {
    let limits = Limits { headers: Duration::from_millis(100), idle: 600 * SECOND, ..Limits::default() };
    let http = HttpClient::new(&fixture).listening(limits).await;
    let mut slow = TcpStream::connect(http.address()).await.expect("connect");
    assert_eq!(request(&mut slow).await, 200);
    slow.write_all(b"GET /health HTTP/1.1\r\nx-slow: ").await.expect("write");
    let closed = tokio::time::timeout(MAX_WAIT, slow.read(&mut [0; 1])).await.expect("it is still open");
    assert_eq!(closed.ok().unwrap_or_default(), 0);
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
    let served = tokio::time::timeout(MAX_WAIT, http.get("/health")).await;
    served.expect("the only connection slot is still taken").expect_status(200);
    drop(sending.await);
}

async fn an_idle_connection_is_closed_in_favour_of_a_new_one(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits { connections: 1, ..few_connections() }).await;
    let mut idle = TcpStream::connect(http.address()).await.expect("connect");
    let served = tokio::time::timeout(MAX_WAIT, http.get("/health")).await;
    served.expect("an idle connection keeps others out").expect_status(200);
    assert_eq!(idle.read(&mut [0; 1]).await.ok().unwrap_or_default(), 0, "it is still open");
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
        // A complete request is handled although its client is gone, and may be between two statements now, on a slow
        // machine for long. The server ends transactions that are idle for five seconds.
        let idle = "select count(*) from pg_stat_activity
                     where state like 'idle in transaction%' and query like '%' || current_schema() || '%'
                       and clock_timestamp() - state_change > interval '4 s'";
        for _ in 0..12 {
            tokio::time::sleep(SECOND / 2).await;
            assert_eq!(fixture.query_number(idle, None).await, 0);
        }
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

/// The headers of a request with a body of this length.
fn post(path: &str, length: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
}

async fn a_client_that_sends_its_body_byte_by_byte_gets_a_timeout(fixture: Fixture) {
    let http = HttpClient::for_api(Api::new(fixture.client()).timeout(2 * SECOND));
    let http = http.listening(Limits::default()).await;
    let response = parse(&trickle(&http, &post("/jobs", 1_000_000)).await);
    let response = response.expect_problem(408, "timeout", "send it faster");
    assert_eq!(response.header("connection"), "close");
    // On a slow machine, other requests may take too long as well.
    until("the server works", || async { http.get("/health").await.status == 200 }).await;
}

async fn a_body_that_arrives_too_slowly_gets_a_timeout_before_the_request_does(fixture: Fixture) {
    let bodies = BodyLimits { timeout: Duration::from_millis(100), ..BodyLimits::default() };
    let api = Api::new(fixture.client()).timeout(600 * SECOND).bodies(bodies);
    let http = HttpClient::for_api(api).listening(Limits::default()).await;
    let mut slow = TcpStream::connect(http.address()).await.expect("connect");
    slow.write_all(post("/jobs", 100).as_bytes()).await.expect("write");
    let mut response = Vec::new();
    // Returns because the server closes the connection.
    let _ = slow.read_to_end(&mut response).await;
    parse(&response).expect_problem(408, "timeout", "send it faster");
}

async fn a_slow_body_of_sufficient_rate_is_accepted(fixture: Fixture) {
    // The time for the first byte is over at once. Each byte then extends it by a minute.
    let bodies = BodyLimits { timeout: Duration::from_millis(1), min_rate: 1, ..BodyLimits::default() };
    let api =
        Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).timeout(600 * SECOND).bodies(bodies);
    let http = HttpClient::for_api(api).listening(Limits::default()).await;
    let body = json!({ "kind": "greet", "payload": "x".repeat(100) }).to_string();
    let (start, end) = body.split_at(60);
    let mut slow = TcpStream::connect(http.address()).await.expect("connect");
    slow.write_all(format!("{}{start}", post("/jobs", body.len())).as_bytes()).await.expect("write");
    for _ in 0..3 {
        http.get("/health").await.expect_status(200);
    }
    slow.write_all(end.as_bytes()).await.expect("write");
    let mut response = vec![0; 4096];
    let length = slow.read(&mut response).await.expect("a response");
    parse(&response[..length]).expect_status(201);
}

/// Announces a body from an address and sends nothing of it. Returns the stream when the server waits for the body, or its
/// refusal.
async fn announce(http: &HttpClient, address: [u8; 4], length: usize) -> Result<TcpStream, Response> {
    let head = post("/jobs", length).replace("host: a", "host: a\r\nexpect: 100-continue");
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind((address, 0).into()).expect("another address");
    let mut stream = socket.connect(http.address()).await.expect("connect");
    stream.write_all(head.as_bytes()).await.expect("write");
    let mut response = vec![0; 4096];
    let read =
        tokio::time::timeout(MAX_WAIT, stream.read(&mut response)).await.expect("it waits for its turn");
    match parse(&response[..read.expect("a response")]) {
        interim if interim.status == 100 => Ok(stream),
        refused => Err(refused),
    }
}

/// Returns the response to a body that is stopped.
async fn stopped(mut stream: TcpStream) -> Response {
    let mut response = Vec::new();
    // Returns because the server closes the connection.
    let _ =
        tokio::time::timeout(MAX_WAIT, stream.read_to_end(&mut response)).await.expect("it is not stopped");
    parse(&response)
}

fn expect_no_response(stream: &TcpStream) {
    let early = stream.try_read(&mut [0; 1]).map_err(|error| error.kind());
    assert_eq!(early, Err(ErrorKind::WouldBlock), "another body was stopped");
}

async fn a_large_body_above_the_limit_is_refused_before_it_is_read(fixture: Fixture) {
    let bodies = BodyLimits { in_total: 250_000, timeout: 600 * SECOND, ..BodyLimits::default() };
    let api = Api::new(fixture.client()).timeout(600 * SECOND).bodies(bodies);
    let api = api.unknown_kinds(UnknownKinds::Allow);
    let http = HttpClient::for_api(api).listening(Limits::default()).await;
    let client = [127, 0, 0, 1];
    let first = announce(&http, client, 120_000).await.expect("an interim response");
    let second = announce(&http, client, 120_000).await.expect("an interim response");
    // No byte of the others has arrived, but they may become so large.
    let refused = announce(&http, client, 120_000).await.expect_err("there is no room for a third body");
    let refused = refused.expect_problem(503, "unavailable", "too many large bodies");
    assert_eq!((refused.header("retry-after"), refused.header("connection")), ("1", "close"));
    // Small bodies are not counted.
    let job = json!({ "kind": "greet", "payload": "x".repeat(50_000) });
    for _ in 0..5 {
        http.post("/jobs", &job).await.expect_status(201);
    }
    for stream in [&first, &second] {
        expect_no_response(stream);
    }
    // What is gone is no longer counted.
    drop(first);
    let job = json!({ "kind": "greet", "payload": "x".repeat(100_000) });
    until("there is room", || async { http.post("/jobs", &job).await.status == 201 }).await;
    // A body that could never be received is too large.
    let job = json!({ "kind": "greet", "payload": "x".repeat(300_000) });
    http.post("/jobs", &job).await.expect_problem(413, "too_large", "250000");
}

async fn a_client_with_fewer_bytes_replaces_the_body_that_takes_the_longest(fixture: Fixture) {
    let bodies = BodyLimits { in_total: 250_000, timeout: 600 * SECOND, ..BodyLimits::default() };
    let http = HttpClient::for_api(Api::new(fixture.client()).timeout(600 * SECOND).bodies(bodies));
    let http = http.listening(Limits::default()).await;
    let (greedy, other) = ([127, 0, 0, 2], [127, 0, 0, 1]);
    let first = announce(&http, greedy, 80_000).await.expect("an interim response");
    let second = announce(&http, greedy, 120_000).await.expect("an interim response");
    let third = announce(&http, other, 100_000).await.expect("an interim response");
    stopped(first).await.expect_problem(408, "timeout", "too many large bodies");
    // Now the clients have nearly as much as each other.
    announce(&http, other, 100_000).await.expect_err("this client has the most bytes");
    for stream in [&second, &third] {
        expect_no_response(stream);
    }
}

async fn a_body_that_takes_longer_than_the_timeout_makes_room(fixture: Fixture) {
    // With this rate, the body itself has not taken too long.
    let bodies = BodyLimits { in_total: 250_000, timeout: Duration::from_millis(1), min_rate: 1 };
    let http = HttpClient::for_api(Api::new(fixture.client()).timeout(600 * SECOND).bodies(bodies));
    let http = http.listening(Limits::default()).await;
    let client = [127, 0, 0, 1];
    loop {
        let Ok(mut first) = announce(&http, client, 200_000).await else { continue };
        let _ = first.write_all(" ".repeat(100_000).as_bytes()).await;
        until("a new body is received", || async { announce(&http, client, 100_000).await.is_ok() }).await;
        let response = stopped(first).await;
        // On a busy machine, its first bytes may arrive too late, or the end of the connection before the response.
        if response.status != 0 && !response.text.contains("did not arrive") {
            response.expect_problem(408, "timeout", "too many large bodies");
            break;
        }
    }
}

async fn the_bytes_of_a_body_are_counted_until_it_is_handled(fixture: Fixture) {
    let bodies = BodyLimits { in_total: 500_000, ..BodyLimits::default() };
    let api = Api::new(fixture.client()).bodies(bodies).unknown_kinds(UnknownKinds::Allow);
    let http = HttpClient::for_api(api).listening(Limits::default()).await;
    let job = json!({ "kind": "greet", "payload": "x".repeat(300_000) });
    for _ in 0..5 {
        http.post("/jobs", &job).await.expect_status(201);
    }
    // Without a length, a body counts with the largest one, and is complete all the same.
    let job = json!({ "kind": "greet", "payload": "x".repeat(200_000) }).to_string();
    let head =
        post("/jobs", 0).replace("content-length: 0", "transfer-encoding: chunked\r\nconnection: close");
    for _ in 0..2 {
        let mut stream = TcpStream::connect(http.address()).await.expect("connect");
        let chunks = job.as_bytes().chunks(30_000).map(|chunk| {
            let text = std::str::from_utf8(chunk).expect("text");
            format!("{:x}\r\n{text}\r\n", chunk.len())
        });
        let whole = head.clone() + &chunks.collect::<String>() + "0\r\n\r\n";
        stream.write_all(whole.as_bytes()).await.expect("write");
        let created = stopped(stream).await.expect_status(201).json();
        assert_eq!(created["payload"].as_str().map(str::len), Some(200_000));
    }
}

/// More connections than this are closed or wait.
const FEW: usize = 8;

/// Opens more connections than there are slots. Each sends `bytes` and then nothing.
async fn occupy(http: &HttpClient, bytes: &[u8]) -> Vec<TcpStream> {
    let mut streams = Vec::new();
    for _ in 0..2 * FEW {
        let mut stream = TcpStream::connect(http.address()).await.expect("connect");
        stream.write_all(bytes).await.expect("write");
        streams.push(stream);
    }
    streams
}

/// Fails unless health checks, lease calls and new jobs are served.
async fn must_be_served(http: &HttpClient) {
    let calls = [
        ("GET", "/health", "", 200),
        ("POST", "/leases", "{}", 200),
        ("POST", "/jobs", r#"{ "kind": "greet", "payload": 1 }"#, 201),
    ];
    let requests = async {
        for (method, path, body, status) in calls.repeat(3) {
            call_unless_slow(http, method, path, body).await.expect_status(status);
        }
    };
    tokio::time::timeout(MAX_WAIT, requests).await.expect("slow clients keep others out");
}

/// Repeats a call whose request did not arrive soon. The server may close its connection in favour of another one.
async fn call_unless_slow(http: &HttpClient, method: &str, path: &str, body: &str) -> Response {
    /// For how long a new connection is protected.
    const PROTECTED: Duration = Duration::from_millis(100);
    loop {
        let began = Instant::now();
        let response = http.send(method, path, &[("content-type", "application/json")], body).await;
        let was_closed = response.status == 0;
        if !was_closed || began.elapsed() < PROTECTED {
            return response;
        }
    }
}

/// The client address of an attacker.
const ANOTHER_ADDRESS: ([u8; 4], u16) = ([127, 0, 0, 2], 0);

/// The timeouts are longer than the case.
fn few_connections() -> Limits {
    let long = 600 * SECOND;
    Limits { connections: FEW, headers: long, idle: long, reading: long, ..Limits::default() }
}

/// An API whose requests and bodies may take longer than the case.
fn patient(fixture: &Fixture) -> Api {
    let bodies = BodyLimits { timeout: 600 * SECOND, ..BodyLimits::default() };
    Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).timeout(600 * SECOND).bodies(bodies)
}

async fn clients_with_slow_bodies_do_not_keep_others_out(fixture: Fixture) {
    let http = HttpClient::for_api(patient(&fixture)).listening(few_connections()).await;
    let slow = occupy(&http, format!("{}{{", post("/jobs", 1000)).as_bytes()).await;
    must_be_served(&http).await;
    drop(slow);
}

async fn clients_with_slow_login_forms_do_not_keep_others_out(fixture: Fixture) {
    let api = patient(&fixture).dashboard(Dashboard::new());
    let http = HttpClient::for_api(api).listening(few_connections()).await;
    let form = post("/ui/login", 1000).replace("application/json", "application/x-www-form-urlencoded");
    let slow = occupy(&http, format!("{form}token=").as_bytes()).await;
    must_be_served(&http).await;
    drop(slow);
    // A token is short.
    let form = [("content-type", "application/x-www-form-urlencoded")];
    let refused = http.send("POST", "/ui/login", &form, &format!("token={}", "x".repeat(5000))).await;
    refused.expect_problem(413, "too_large", "4096");
}

async fn clients_with_unknown_tokens_do_not_keep_others_out(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Admin, None).await;
    let http =
        HttpClient::for_api(patient(&fixture).access(Access::Tokens)).listening(few_connections()).await;
    let http = http.with_token(&secret);
    let mut unknown = TcpStream::connect(http.address()).await.expect("connect");
    let request = b"GET /jobs HTTP/1.1\r\nhost: a\r\nauthorization: Bearer unknown\r\n\r\n";
    unknown.write_all(request).await.expect("write");
    let mut response = vec![0; 4096];
    let length = unknown.read(&mut response).await.expect("a response");
    assert_eq!(parse(&response[..length]).expect_status(401).header("connection"), "close");
    let attacks: Vec<_> = (0..2 * FEW)
        .map(|i| {
            let address = http.address();
            tokio::spawn(async move {
                for n in 0.. {
                    let request =
                        format!("GET /jobs HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {i}-{n}\r\n\r\n");
                    let socket = TcpSocket::new_v4().expect("a socket");
                    socket.bind(ANOTHER_ADDRESS.into()).expect("another address");
                    let Ok(mut stream) = socket.connect(address).await else { continue };
                    // The connection may already be closed in favour of another one.
                    let _ = stream.write_all(request.as_bytes()).await;
                    let mut response = Vec::new();
                    // Returns because the server does not keep the connection.
                    let _ = stream.read_to_end(&mut response).await;
                    assert!(response.is_empty() || parse(&response).status == 401);
                }
            })
        })
        .collect();
    must_be_served(&http).await;
    for attack in attacks {
        assert!(!attack.is_finished(), "{:?}", attack.await);
        attack.abort();
    }
}

async fn one_token_cannot_wait_with_all_connections(fixture: Fixture) {
    let (_, greedy) = token(&fixture, Scope::Work, Some(&["mail"])).await;
    let (_, honest) = token(&fixture, Scope::Admin, None).await;
    let api = patient(&fixture).access(Access::Tokens).waiting_calls(FEW / 2);
    let http = HttpClient::for_api(api).listening(few_connections()).await;
    let greedy = http.with_token(&greedy);
    let wait = json!({ "queues": ["mail"], "wait_seconds": 20 });
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..FEW / 2 {
        let (greedy, wait) = (greedy.clone(), wait.clone());
        calls.spawn(async move { greedy.post("/leases", &wait).await.expect_status(200) });
    }
    // A quarter of the connections may wait. The others return at once and say when to call again.
    for _ in 0..FEW / 4 {
        let ended = before_timeout(calls.join_next()).await.expect("a call").expect("no panic");
        assert_eq!((ended.header("retry-after"), &ended.json()["jobs"]), ("2", &json!([])));
    }
    must_be_served(&http.with_token(&honest)).await;
    assert_eq!(calls.len(), FEW / 4);
    // A stream is a call that waits, too, and so is one that waits for the end of a job.
    let (_, reader) = token(&fixture, Scope::Read, None).await;
    let reader = http.with_token(&reader);
    let id = fixture.add(job("greet").delay(SECOND * 3600)).await;
    let path = format!("/jobs/{id}?wait_seconds=20");
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..FEW / 2 {
        let (reader, path) = (reader.clone(), path.clone());
        waiting.spawn(async move { reader.get(&path).await.expect_status(200) });
    }
    for _ in 0..FEW / 4 {
        let ended = before_timeout(waiting.join_next()).await.expect("a call").expect("no panic");
        assert_eq!((ended.header("retry-after"), &ended.json()["status"]), ("2", &json!("queued")));
    }
    let refused = reader.get("/events").await.expect_problem(503, "unavailable", "try again later");
    assert_eq!(refused.header("retry-after"), "2");
}

async fn clients_with_slow_headers_do_not_keep_others_out(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(few_connections()).await;
    let slow = occupy(&http, b"GET /health HTTP/1.1\r\nhost: a\r\nx-slow: ").await;
    must_be_served(&http).await;
    drop(slow);
}

async fn clients_that_do_not_read_do_not_keep_others_out(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(few_connections()).await;
    let requests = b"GET /api-docs/openapi.json HTTP/1.1\r\nhost: a\r\n\r\n".repeat(500);
    let mut slow = Vec::new();
    for _ in 0..2 * FEW {
        let mut stream = TcpStream::connect(http.address()).await.expect("connect");
        let requests = requests.clone();
        // The responses exceed all socket buffers.
        slow.push(tokio::spawn(async move {
            let _ = stream.write_all(&requests).await;
            std::future::pending::<()>().await;
        }));
    }
    must_be_served(&http).await;
    slow.iter().for_each(|task| task.abort());
}

async fn a_connection_over_the_limit_waits_while_all_others_handle_requests(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits { connections: 1, ..few_connections() }).await;
    let mut first = TcpStream::connect(http.address()).await.expect("connect");
    let body = json!({ "wait_seconds": 20 }).to_string();
    first.write_all(format!("{}{body}", post("/leases", body.len())).as_bytes()).await.expect("write");
    until("the call is handled", || async { !fixture.workers(None).await.expect("workers").is_empty() })
        .await;
    let mut second = TcpStream::connect(http.address()).await.expect("connect");
    second.write_all(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n").await.expect("write");
    let mut buffer = [0; 4096];
    // Longer than a connection must wait for its client before the server may close it.
    let early = tokio::time::timeout(Duration::from_millis(300), second.read(&mut buffer)).await;
    early.expect_err("served although the first request is being handled");
    fixture.add(job("greet")).await;
    let length = first.read(&mut buffer).await.expect("a response");
    assert_eq!(parse(&buffer[..length]).expect_status(200).json()["jobs"][0]["kind"], "greet");
    // The first connection now waits for its client.
    let served = tokio::time::timeout(MAX_WAIT, second.read(&mut buffer)).await;
    let length = served.expect("an idle connection keeps others out").expect("a response");
    parse(&buffer[..length]).expect_status(200);
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
    let mut response = vec![0; 4096];
    // The response arrives although no byte of the body was sent.
    let length = announced.read(&mut response).await.expect("a response");
    parse(&response[..length]).expect_problem(413, "too_large", "16777216");

    // Without a content length, the server refuses the body at the limit.
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
