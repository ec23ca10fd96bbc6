//! Sessions: logging in, what a cookie permits, and how a session ends.

use longshore::api::{Access, Admission, Api};
use longshore::store::MAX_SESSIONS;
use longshore::{NewToken, Scope};
use serde_json::json;
use uuid::Uuid;

use super::auth::{token, with_tokens_required};
use super::client::{HttpClient, Response};
use crate::fixture::*;

cases! {
    a_token_is_exchanged_for_a_cookie,
    a_session_has_the_scopes_and_queues_of_its_token,
    a_change_in_a_session_needs_the_header_of_a_page,
    logging_out_ends_the_session_at_once,
    a_session_ends_with_its_token,
    a_session_ends_after_seven_days,
    expired_sessions_are_removed,
    a_token_has_a_limited_number_of_sessions,
    reading_the_session_counts_against_the_rate_of_the_token,
    a_cookie_is_no_token_and_a_token_is_no_cookie,
    a_token_counts_more_than_a_cookie,
    servers_on_two_ports_of_a_host_keep_their_own_sessions,
    bad_logins_are_refused,
    a_server_without_tokens_needs_no_session,
}

async fn log_in(http: &HttpClient, secret: &str) -> Response {
    http.post("/session", &json!({ "token": secret })).await
}

/// The cookie of a new session, as browsers send it.
async fn cookie(http: &HttpClient, secret: &str) -> String {
    let response = log_in(http, secret).await.expect_status(200);
    response.header("set-cookie").split(';').next().expect("a cookie").to_owned()
}

async fn get(http: &HttpClient, path: &str, cookie: &str) -> Response {
    http.send("GET", path, &[("cookie", cookie)], "").await
}

/// A change that a page makes.
async fn change(http: &HttpClient, method: &str, path: &str, cookie: &str) -> Response {
    http.send(method, path, &[("cookie", cookie), ("longshore-session", "1")], "").await
}

async fn a_token_is_exchanged_for_a_cookie(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    let response = log_in(&http, &secret).await.expect_status(200);
    let sent = response.header("set-cookie").to_owned();
    for part in ["longshore_session", "HttpOnly", "SameSite=Strict", "Path=/", "Max-Age=604800"] {
        assert!(sent.contains(part), "{sent}");
    }
    assert!(!sent.contains("Secure") && !sent.contains(&secret), "{sent}");
    let body = response.json();
    assert_eq!(
        (&body["name"], &body["scopes"], &body["queues"]),
        (&json!("read"), &json!(["read"]), &json!(null))
    );
    assert_eq!(body["expires_at"], json!(start() + 7 * DAY));
    let origin = [
        ("content-type", "application/json"),
        ("origin", "https://jobs.example.com"),
        ("host", "jobs.example.com"),
    ];
    let body = json!({ "token": secret }).to_string();
    let response = http.send("POST", "/session", &origin, &body).await.expect_status(200);
    assert!(response.header("set-cookie").ends_with("; Secure"), "{response:?}");
}

async fn a_session_has_the_scopes_and_queues_of_its_token(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, Some(&["mail"])).await;
    let http = with_tokens_required(&fixture);
    let cookie = cookie(&http, &secret).await;
    get(&http, "/jobs?queue=mail", &cookie).await.expect_status(200);
    get(&http, "/jobs?queue=other", &cookie).await.expect_problem(403, "forbidden", "mail");
    let id = fixture.add(job("mail").queue("mail")).await;
    let path = format!("/jobs/{id}/cancel");
    change(&http, "POST", &path, &cookie).await.expect_problem(403, "forbidden", "operate");
    let session = get(&http, "/session", &cookie).await.expect_status(200).json();
    assert_eq!((&session["scopes"], &session["queues"]), (&json!(["read"]), &json!(["mail"])));
}

async fn a_change_in_a_session_needs_the_header_of_a_page(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Operate, None).await;
    let http = with_tokens_required(&fixture);
    let cookie = cookie(&http, &secret).await;
    let path = format!("/jobs/{}/cancel", fixture.add(job("mail")).await);
    let without = http.send("POST", &path, &[("cookie", &cookie)], "").await;
    without.expect_problem(403, "forbidden", "Longshore-Session");
    let headers =
        [("cookie", cookie.as_str()), ("longshore-session", "1"), ("origin", "https://evil.example")];
    http.send("POST", &path, &headers, "").await.expect_problem(403, "forbidden", "origin");
    http.send("DELETE", "/session", &[("cookie", &cookie)], "").await.expect_problem(
        403,
        "forbidden",
        "header",
    );
    change(&http, "POST", &path, &cookie).await.expect_status(200);
}

async fn logging_out_ends_the_session_at_once(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    let cookie = cookie(&http, &secret).await;
    get(&http, "/jobs", &cookie).await.expect_status(200);
    let response = change(&http, "DELETE", "/session", &cookie).await.expect_status(204);
    assert!(response.header("set-cookie").contains("Max-Age=0"), "{response:?}");
    get(&http, "/jobs", &cookie).await.expect_problem(401, "unauthorized", "session");
    change(&http, "DELETE", "/session", &cookie).await.expect_status(204);
    http.send("DELETE", "/session", &[], "").await.expect_status(204);
    http.with_token(&secret).get("/jobs").await.expect_status(200);
}

/// The clock is pinned, so only what is stored can end a session. Tokens are cached for two seconds.
async fn a_session_ends_with_its_token(fixture: Fixture) {
    let (id, secret) = token(&fixture, Scope::Read, None).await;
    let cookie = cookie(&with_tokens_required(&fixture), &secret).await;
    fixture.revoke_token(id).await.expect("revoke");
    let other = with_tokens_required(&fixture);
    get(&other, "/jobs", &cookie).await.expect_problem(401, "unauthorized", "session");
    log_in(&other, &secret).await.expect_problem(401, "unauthorized", "revoked");
}

async fn a_session_ends_after_seven_days(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let cookie = cookie(&with_tokens_required(&fixture), &secret).await;
    fixture.advance(7 * DAY - SECOND).await;
    get(&with_tokens_required(&fixture), "/jobs", &cookie).await.expect_status(200);
    fixture.advance(SECOND).await;
    get(&with_tokens_required(&fixture), "/jobs", &cookie).await.expect_problem(
        401,
        "unauthorized",
        "expired",
    );
}

async fn expired_sessions_are_removed(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    for _ in 0..3 {
        cookie(&http, &secret).await;
    }
    fixture.advance(8 * DAY).await;
    cookie(&http, &secret).await;
    assert_eq!(fixture.query_number("select count(*) from sessions", None).await, 1);
}

async fn a_token_has_a_limited_number_of_sessions(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let (_, other) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    let of_other = cookie(&http, &other).await;
    let mut cookies = Vec::new();
    for _ in 0..=MAX_SESSIONS {
        fixture.advance(SECOND).await;
        cookies.push(cookie(&http, &secret).await);
    }
    let sessions = fixture.query_number("select count(*) from sessions", None).await;
    assert_eq!(sessions, i64::from(MAX_SESSIONS) + 1);
    // A new server has not seen any of them.
    let http = with_tokens_required(&fixture);
    get(&http, "/jobs", &cookies[0]).await.expect_problem(401, "unauthorized", "session");
    for open in [&cookies[1], &cookies[MAX_SESSIONS as usize], &of_other] {
        get(&http, "/jobs", open).await.expect_status(200);
    }
}

async fn reading_the_session_counts_against_the_rate_of_the_token(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let slow = Admission { requests_per_second: Some(1), ..Admission::default() };
    let api = Api::new(fixture.client()).access(Access::Tokens).admission(slow);
    let http = HttpClient::for_api(api).with_token(&secret);
    let mut refused = 0;
    for _ in 0..50 {
        let response = http.get("/session").await;
        if response.status != 200 {
            response.expect_problem(429, "rate_limited", "slow down");
            refused += 1;
        }
    }
    assert!(refused > 0);
}

async fn a_cookie_is_no_token_and_a_token_is_no_cookie(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    let cookie = cookie(&http, &secret).await;
    let (name, session) = cookie.split_once('=').expect("a cookie");
    http.with_token(session).get("/jobs").await.expect_problem(401, "unauthorized", "unknown");
    let sent = format!("{name}={secret}");
    get(&http, "/jobs", &sent).await.expect_problem(401, "unauthorized", "unknown");
}

async fn a_token_counts_more_than_a_cookie(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    let cookie = cookie(&http, &secret).await;
    get(&http.with_token("wrong"), "/jobs", &cookie).await.expect_problem(401, "unauthorized", "unknown");
    let basic = [("cookie", cookie.as_str()), ("authorization", "Basic abc")];
    http.send("GET", "/jobs", &basic, "").await.expect_problem(401, "unauthorized", "Bearer");
    let others = format!("theme=dark; {cookie}; x=y");
    get(&http, "/jobs", &others).await.expect_status(200);
}

/// A browser keeps one cookie of each name for a host, whatever the port.
async fn servers_on_two_ports_of_a_host_keep_their_own_sessions(fixture: Fixture) {
    let (_, secret) = token(&fixture, Scope::Read, None).await;
    let http = with_tokens_required(&fixture);
    let body = json!({ "token": secret }).to_string();
    let mut cookies = Vec::new();
    for host in ["localhost:8080", "localhost:8081", "localhost", "[::1]:8080", "[::1]"] {
        let headers = [("host", host), ("content-type", "application/json")];
        let response = http.send("POST", "/session", &headers, &body).await.expect_status(200);
        let cookie = response.header("set-cookie").split(';').next().expect("a cookie").to_owned();
        let name = cookie.split('=').next().expect("a name").to_owned();
        let same_host = [("host", host), ("cookie", cookie.as_str())];
        http.send("GET", "/jobs", &same_host, "").await.expect_status(200);
        cookies.push((name, cookie));
    }
    let names: Vec<&str> = cookies.iter().map(|(name, _)| name.as_str()).collect();
    let [first, second, plain] = ["longshore_session_8080", "longshore_session_8081", "longshore_session"];
    assert_eq!(names, [first, second, plain, first, plain]);
    let of_another_port = [("host", "localhost:8081"), ("cookie", cookies[0].1.as_str())];
    http.send("GET", "/jobs", &of_another_port, "").await.expect_problem(401, "unauthorized", "log in");
}

async fn bad_logins_are_refused(fixture: Fixture) {
    let http = with_tokens_required(&fixture);
    log_in(&http, "wrong").await.expect_problem(401, "unauthorized", "unknown");
    log_in(&http, "").await.expect_problem(401, "unauthorized", "unknown");
    http.post("/session", &json!({})).await.expect_problem(422, "validation", "token");
    http.get("/session").await.expect_problem(401, "unauthorized", "POST /session");
    let expired = NewToken {
        id: Uuid::now_v7(),
        name: "old".into(),
        hash: longshore::api::hash_token("old"),
        scopes: vec!["read".into()],
        queues: None,
        expires_at: Some(start() - SECOND),
    };
    fixture.create_token(&expired).await.expect("create");
    log_in(&http, "old").await.expect_problem(401, "unauthorized", "expired");
    assert_eq!(fixture.query_number("select count(*) from sessions", None).await, 0);
}

async fn a_server_without_tokens_needs_no_session(fixture: Fixture) {
    let http = HttpClient::new(&fixture);
    let response = log_in(&http, "anything").await.expect_status(200);
    assert_eq!(response.json()["name"], json!(null));
    assert_eq!(http.get("/session").await.expect_status(200).json()["name"], json!(null));
    assert_eq!(fixture.query_number("select count(*) from sessions", None).await, 0);
}
