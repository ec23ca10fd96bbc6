//! What applies to every request: health, request ids, hosts and origins, timeouts and
//! admission limits. `connections.rs` tests slow and disconnected clients.

use std::time::Duration;

use longshore::api::{Admission, Api, Limits};
use longshore::{Client, UnknownKinds};
use serde_json::json;

use super::client::HttpClient;
use crate::fixture::{Engine, Fixture, MAX_WAIT, SECOND, job};

cases! {
    a_healthy_server_reports_ok,
    a_database_error_is_reported_without_internals,
    a_request_keeps_its_request_id_or_gets_one,
    unknown_routes_and_methods_get_the_usual_error_body,
    unknown_url_parameters_are_refused_with_the_nearest_known_one,
    the_start_page_links_to_the_other_pages,
    an_unknown_host_is_refused,
    a_request_that_takes_too_long_gets_a_timeout,
    a_long_poll_ends_before_the_request_timeout,
    requests_from_another_origin_change_nothing,
    too_many_requests_or_jobs_are_refused_with_retry_after,
    a_limit_of_twenty_thousand_waiting_jobs_refuses_the_next_one,
    concurrent_first_requests_do_not_exceed_the_limit,
    a_full_queue_accepts_jobs_again_when_it_has_room,
}

async fn a_healthy_server_reports_ok(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    assert_eq!(http.get("/health").await.expect_status(200).json(), json!({ "status": "ok" }));
}

async fn a_database_error_is_reported_without_internals(fixture: Fixture) {
    if fixture.engine() == Engine::Sqlite {
        return;
    }
    let broken = Client::connect(&fixture.bare_url()).await.expect("connect");
    let http = HttpClient::for_api(Api::new(broken).unknown_kinds(UnknownKinds::Allow));
    for response in [
        http.get("/health").await,
        http.get("/jobs").await,
        http.post("/jobs", &json!({ "kind": "a", "payload": 1 })).await,
    ] {
        let response = response.expect_problem(503, "unavailable", "try again");
        assert!(!response.text.contains("relation") && !response.text.contains("longshore_"), "{response:?}");
        assert!(!response.header("retry-after").is_empty());
    }
}

async fn a_request_keeps_its_request_id_or_gets_one(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let sent = http.send("GET", "/health", &[("x-request-id", "req-7")], "").await.expect_status(200);
    assert_eq!(sent.header("x-request-id"), "req-7");
    assert_eq!(
        (sent.header("x-content-type-options"), sent.header("cache-control")),
        ("nosniff", "no-store")
    );
    let (one, other) = (http.get("/health").await, http.get("/health").await);
    assert_ne!(one.header("x-request-id"), other.header("x-request-id"));
    let invalid = http.send("GET", "/health", &[("x-request-id", "a b")], "").await;
    assert_ne!(invalid.header("x-request-id"), "a b");
}

async fn unknown_routes_and_methods_get_the_usual_error_body(fixture: Fixture) {
    let http = HttpClient::new(&fixture).listening(Limits::default()).await;
    http.get("/nowhere").await.expect_problem(404, "not_found", "/nowhere");
    http.send("PUT", "/jobs", &[], "").await.expect_problem(405, "method_not_allowed", "PUT");
    http.send("DELETE", "/health", &[], "").await.expect_problem(405, "method_not_allowed", "DELETE");
}

async fn unknown_url_parameters_are_refused_with_the_nearest_known_one(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job("greet")).await;
    for (path, parts) in [
        ("/jobs?quue=mail", ["`quue`", "did you mean `queue`"]),
        ("/jobs?limit=2&kinds=greet", ["`kinds`", "did you mean `kind`"]),
        ("/jobs?colour=red", ["`colour`", "status, kind, queue"]),
        ("/dead-letters?status=queued", ["`status`", "kind, queue"]),
        ("/stats?minute=5", ["`minute`", "did you mean `minutes`"]),
        ("/workers?threshold_second=5", ["`threshold_second`", "did you mean `threshold_seconds`"]),
        ("/queues?name=mail", ["`name`", "takes none"]),
        (&format!("/jobs/{id}/steps?payload=false"), ["`payload`", "takes none"]),
    ] {
        let refused = http.get(path).await.expect_problem(400, "bad_request", parts[0]);
        refused.expect_problem(400, "bad_request", parts[1]);
    }
    let greet = json!({ "kind": "greet", "payload": 1 });
    http.post("/jobs?queue=mail", &greet).await.expect_problem(400, "bad_request", "`queue`");
    assert_eq!(http.get("/jobs").await.expect_status(200).json().as_array().expect("jobs").len(), 1);
    // Pages for browsers, an empty query and known parameters are accepted.
    for path in ["/api-docs/openapi.json?v=1", "/jobs?", "/jobs?queue=mail&limit=1"] {
        http.get(path).await.expect_status(200);
    }
}

async fn the_start_page_links_to_the_other_pages(fixture: Fixture) {
    let api = || Api::new(fixture.client()).metrics(|| "up 1\n".into());
    let page = HttpClient::for_api(api()).get("/").await.expect_status(200);
    assert_eq!(page.header("content-type"), "text/html; charset=utf-8");
    assert!(page.header("content-security-policy").starts_with("default-src 'none'"));
    for link in ["/docs", "/jobs", "/stats", "/metrics"] {
        assert!(page.text.contains(&format!("<a href=\"{link}\">")), "{link}: {}", page.text);
    }
    for outside in ["<script", "http://", "https://", "url("] {
        assert!(!page.text.contains(outside), "{outside}: {}", page.text);
    }
    let http = HttpClient::for_api(api());
    let index = http.send("GET", "/", &[("accept", "application/json")], "").await.expect_status(200).json();
    assert_eq!((&index["name"], &index["requires_token"]), (&json!("longshore"), &json!(false)));
    assert_eq!(index["version"], env!("CARGO_PKG_VERSION"));
    for link in index["links"].as_array().expect("links") {
        let path = link["href"].as_str().expect("a path");
        assert!(http.get(path).await.status < 400, "{path}");
    }
    // In another application's router, the links have its prefix.
    let router = axum::Router::new().nest("/queue", api().router());
    let request = axum::http::Request::get("/queue").body(axum::body::Body::empty()).expect("a request");
    let response = tower::ServiceExt::oneshot(router, request).await.expect("infallible");
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.expect("a body");
    assert!(String::from_utf8_lossy(&bytes).contains("<a href=\"/queue/jobs\">"));
}

async fn an_unknown_host_is_refused(fixture: Fixture) {
    let api = Api::new(fixture.client()).hosts(["localhost", "127.0.0.1", "[::1]"]);
    let http = HttpClient::for_api(api).listening(Limits::default()).await;
    http.get("/health").await.expect_status(200);
    for host in ["localhost", "LOCALHOST:8080", "[::1]:8080", "127.0.0.1"] {
        http.send("GET", "/health", &[("host", host)], "").await.expect_status(200);
    }
    for host in ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8080", ""] {
        http.send("GET", "/health", &[("host", host)], "").await.expect_problem(421, "misdirected", "name");
    }
}

async fn a_request_that_takes_too_long_gets_a_timeout(fixture: Fixture) {
    let api =
        Api::new(fixture.client()).timeout(Duration::from_millis(50)).unknown_kinds(UnknownKinds::Allow);
    let http = HttpClient::for_api(api).listening(Limits::default()).await;
    // The new job waits for a lock.
    let (mut server, mut file) = (None, None);
    match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            sqlx::raw_sql("begin; lock table jobs").execute(&mut connection).await.expect("lock");
            server = Some(connection);
        }
        Engine::Sqlite => {
            let connection = rusqlite::Connection::open(fixture.file()).expect("open");
            connection.execute_batch("begin immediate").expect("lock");
            file = Some(connection);
        }
    }
    let late = http.post("/jobs", &json!({ "kind": "greet", "payload": 1 })).await;
    late.expect_problem(504, "timeout", "50ms");
    drop((server.take(), file.take()));
}

async fn a_long_poll_ends_before_the_request_timeout(fixture: Fixture) {
    let http = HttpClient::for_api(Api::new(fixture.client()).timeout(3 * SECOND));
    // On a slow machine, the timeout may come first now and then.
    for _ in 0..10 {
        if http.post("/leases", &json!({ "wait_seconds": 20 })).await.status == 200 {
            return;
        }
    }
    panic!("the request timeout always comes first");
}

async fn requests_from_another_origin_change_nothing(fixture: Fixture) {
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

async fn too_many_requests_or_jobs_are_refused_with_retry_after(fixture: Fixture) {
    let slow = Admission { requests_per_second: Some(2), ..Admission::default() };
    let http = HttpClient::for_api(Api::new(fixture.client()).admission(slow));
    let mut refused = 0;
    let requests = (0..50).map(|_| {
        let http = http.clone();
        tokio::spawn(async move { http.get("/jobs").await })
    });
    for request in requests.collect::<Vec<_>>() {
        let response = request.await.expect("task");
        if response.status != 200 {
            let response = response.expect_problem(429, "rate_limited", "slow down");
            assert!(!response.header("retry-after").is_empty());
            refused += 1;
        }
    }
    assert!(refused > 0);
    http.get("/health").await.expect_status(200);

    let short = Admission { waiting_jobs: Some(1), ..Admission::default() };
    let http =
        HttpClient::for_api(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).admission(short));
    let (full, other) =
        (json!({ "kind": "a", "payload": 1 }), json!({ "kind": "a", "payload": 1, "queue": "b" }));
    fixture.add(job("greet")).await;
    http.post("/jobs", &full).await.expect_problem(429, "rate_limited", "queue");
    http.post("/jobs", &other).await.expect_status(201);
}

fn limited(fixture: &Fixture, waiting_jobs: u64) -> HttpClient {
    let admission = Admission { waiting_jobs: Some(waiting_jobs), ..Admission::default() };
    HttpClient::for_api(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).admission(admission))
}

async fn a_limit_of_twenty_thousand_waiting_jobs_refuses_the_next_one(fixture: Fixture) {
    for _ in 0..3 {
        fixture.enqueue_many((0..6666).map(|_| job("greet"))).await.expect("enqueue");
    }
    let http = limited(&fixture, 20_000);
    let new = json!({ "kind": "a", "payload": 1 });
    http.post("/jobs", &new).await.expect_status(201);
    http.post("/jobs", &new).await.expect_status(201);
    http.post("/jobs", &new).await.expect_problem(429, "rate_limited", "20000 jobs wait");
    // A server that has counted nothing yet comes to the same result.
    limited(&fixture, 20_000).post("/jobs", &new).await.expect_problem(429, "rate_limited", "queue");
    limited(&fixture, 20_001).post("/jobs", &new).await.expect_status(201);
}

async fn concurrent_first_requests_do_not_exceed_the_limit(fixture: Fixture) {
    let http = limited(&fixture, 5);
    let requests: Vec<_> = (0..40)
        .map(|_| {
            let http = http.clone();
            tokio::spawn(async move { http.post("/jobs", &json!({ "kind": "a", "payload": 1 })).await })
        })
        .collect();
    let mut accepted = 0;
    for request in requests {
        accepted += u32::from(request.await.expect("task").status == 201);
    }
    assert!((1..=5).contains(&accepted), "{accepted} jobs were accepted");
}

async fn a_full_queue_accepts_jobs_again_when_it_has_room(fixture: Fixture) {
    let http = limited(&fixture, 2);
    let new = json!({ "kind": "a", "payload": 1 });
    for _ in 0..2 {
        http.post("/jobs", &new).await.expect_status(201);
    }
    http.post("/jobs", &new).await.expect_problem(429, "rate_limited", "2 jobs wait");
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 1).await.len(), 1);
    let began = std::time::Instant::now();
    while http.post("/jobs", &new).await.status != 201 {
        assert!(began.elapsed() < MAX_WAIT, "the queue has room, and jobs are still refused");
    }
}
