//! Each security promise, and the test that verifies it. Paths are below `crates/`; tests
//! without a path are in this file.
//!
//! | Promise | Verified by |
//! |---|---|
//! | Loopback; elsewhere only with tokens | `serve::a_server_off_loopback_requires_tokens_or_does_not_start` |
//! | Bearer only, never in a URL; 401 with `WWW-Authenticate` | [`a_token_is_accepted_only_in_the_authorization_header`]; `longshore/tests/conformance/http/auth.rs` |
//! | 256 bits, shown once, stored as a hash | [`a_token_is_shown_once_and_stored_as_a_hash`] |
//! | Compared in constant time | by construction: found by the SHA-256 of the token in the request, in `longshore/src/api/auth.rs`, `Guard::look_up` |
//! | Expiry | `longshore/tests/conformance/http/auth.rs`: `a_wrong_revoked_or_expired_token_is_refused` |
//! | Revoked within 2 s, everywhere | [`a_revoked_token_is_rejected_by_every_server`], which allows 15 s |
//! | A route denies unless it declares its scope | `longshore/tests/conformance/http/access.rs`: `no_operation_is_missing_in_the_walk`, `every_operation_requires_its_scope` |
//! | Scopes limited to queues | the same file: `every_operation_keeps_a_limited_token_to_its_queues`, `every_page_…`; `http/auth.rs`, `http/token_keys.rs` |
//! | Unknown Host 421, foreign Origin 403, no CORS | [`a_foreign_web_page_gets_nothing`]; `longshore/tests/conformance/http/requests.rs` |
//! | Payload, batch 413; depth, NUL, surrogates 422; 415; unknown fields by name | `longshore/tests/conformance/http/jobs.rs`: `an_invalid_job_is_refused_by_field`, `a_batch_stores_the_valid_jobs_and_names_the_errors_of_the_others`; `http/connections.rs`; `http/bodies.rs` |
//! | Slow headers, slow bodies, many connections | `longshore/tests/conformance/http/connections.rs` |
//! | 429 with `Retry-After` | `longshore/tests/conformance/http/requests.rs`: `too_many_requests_or_jobs_are_refused_with_retry_after`; `http/bodies.rs`: `follow_ups_are_subject_to_the_limit_on_waiting_jobs` |
//! | Outbound calls | `longshore/src/builtin/outbound/{address,rules,tests}.rs`: every category of address, names that resolve to internal or changing addresses, redirects, long responses; by construction in `outbound/mod.rs`: no proxy, 15 s |
//! | Webhooks: signed by the standard, two secrets, one id, 410 | [`another_implementation_verifies_the_signatures`]; `longshore/src/builtin/{signature,webhook}.rs` |
//! | Payloads, tokens and passwords never logged | [`no_secret_reaches_a_log_even_at_trace`]; `terminal::no_password_is_ever_printed`; `longshore/src/worker/handler.rs`, `longshore/tests/conformance/input.rs` |
//! | Output cannot control the terminal; JSON logs are escaped | `terminal::stored_text_cannot_control_the_terminal`; [`no_secret_reaches_a_log_even_at_trace`] |
//! | SQL: the schema's name | `longshore/tests/conformance/sql.rs`: `any_valid_schema_name_…`, `a_reserved_or_invalid_schema_name_…`; [`a_schema_name_cannot_inject_sql`] |
//! | No unsafe code | [`every_crate_forbids_unsafe_code`]; licences and sources: `cargo xtask ci` |
//! | Any request: no 5xx, only responses the OpenAPI document lists, nothing without a token | `cargo xtask schemathesis` |
//!
//! Payload encryption and a dashboard do not exist yet.

use std::path::Path;
use std::time::Duration;

use longshore::NewJob;
use longshore::store::KeyWait;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Value, json};
use standardwebhooks::Webhook;

use crate::builtin::{BuiltinRunner, respond_once};
use crate::fixture::{CommandOutput, Fixture, binary, on_every_engine};
use crate::process::{Process, exchange, request, until};

on_every_engine!(
    a_token_is_accepted_only_in_the_authorization_header,
    a_token_is_shown_once_and_stored_as_a_hash,
    a_revoked_token_is_rejected_by_every_server,
    a_foreign_web_page_gets_nothing,
    no_secret_reaches_a_log_even_at_trace,
    an_internal_error_is_logged_with_the_request_id_and_not_shown_to_the_caller,
);

/// Generous, for slow machines.
const MAX_WAIT: Duration = Duration::from_secs(60);

fn serve(fixture: &Fixture, flags: &str) -> (Process, String) {
    let mut command = binary();
    command.env("DATABASE_URL", &fixture.url).args(["serve", "--bind", "127.0.0.1:0", "--json"]);
    let mut server = Process::start(command.args(flags.split_whitespace()));
    let addr = server.address();
    (server, addr)
}

/// Creates a token and returns its id and secret.
fn token(fixture: &Fixture, flags: &str) -> (String, String) {
    let created = fixture.run(&format!("tokens create {flags} --json")).json();
    (created["id"].as_str().unwrap().to_owned(), created["token"].as_str().unwrap().to_owned())
}

// ---- tokens ------------------------------------------------------------------

fn a_token_is_accepted_only_in_the_authorization_header(fixture: &Fixture) {
    let (_server, addr) = serve(fixture.migrated(), "--auth tokens");
    let (_, secret) = token(fixture, "reader --scope read");
    assert_eq!(request(&addr, "GET", "/jobs", Some(&secret), "").status, 200);
    let request = |path: &str, headers: &str| {
        exchange(&addr, &format!("GET {path} HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n{headers}\r\n"))
    };
    for name in ["token", "access_token", "authorization", "bearer", "api_key"] {
        let response = request(&format!("/jobs?{name}={secret}"), "");
        assert!(response.starts_with("HTTP/1.1 401 "), "{name}: {response}");
        assert!(response.to_lowercase().contains("\r\nwww-authenticate: bearer"), "{name}: {response}");
    }
    for header in [
        format!("cookie: token={secret}\r\n"),
        format!("x-api-key: {secret}\r\n"),
        format!("authorization: Basic {secret}\r\n"),
        format!("authorization: {secret}\r\n"),
        format!("proxy-authorization: Bearer {secret}\r\n"),
    ] {
        assert!(request("/jobs", &header).starts_with("HTTP/1.1 401 "), "{header}");
    }
}

fn a_token_is_shown_once_and_stored_as_a_hash(fixture: &Fixture) {
    fixture.migrated();
    let (id, secret) = token(fixture, "reader --scope read");
    let random = secret.strip_prefix("longshore_").expect("a prefix that secret scanners recognise");
    assert_eq!(random.len(), 43, "32 bytes in base64: {}", secret.len());
    assert_ne!(secret, token(fixture, "reader --scope read").1);
    for line in ["tokens list", "tokens list --json", &format!("tokens revoke {id} --json")] {
        assert!(!fixture.run(line).ok().out.contains(random), "{line}");
    }
    // Search every file that the database wrote.
    let folder = fixture.file().map(|file| file.parent().unwrap().to_owned());
    for file in folder.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()) {
        let bytes = std::fs::read(file.unwrap().path()).unwrap();
        assert!(!bytes.windows(random.len()).any(|window| window == random.as_bytes()));
    }
}

fn a_revoked_token_is_rejected_by_every_server(fixture: &Fixture) {
    let (_one, first) = serve(fixture.migrated(), "--auth tokens");
    let (_other, second) = serve(fixture, "--auth tokens");
    let (id, secret) = token(fixture, "reader --scope read");
    let status = |addr: &str| request(addr, "GET", "/jobs", Some(&secret), "").status;
    assert_eq!([status(&first), status(&second)], [200, 200]);
    fixture.run(&format!("tokens revoke {id}")).ok();
    until(Duration::from_secs(15), "both servers reject it", || {
        [status(&first), status(&second)] == [401, 401]
    });
}

// ---- web pages ---------------------------------------------------------------

fn a_foreign_web_page_gets_nothing(fixture: &Fixture) {
    let (_server, addr) = serve(fixture.migrated(), "");
    let own = format!("http://{addr}");
    let response_to = |method: &str, host: &str, origin: &str| {
        let more = "access-control-request-method: POST\r\nconnection: close\r\ncontent-length: 0\r\n";
        exchange(
            &addr,
            &format!("{method} /queues/a/pause HTTP/1.1\r\nhost: {host}\r\norigin: {origin}\r\n{more}\r\n"),
        )
    };
    for (method, host, origin, status) in [
        ("POST", addr.as_str(), own.as_str(), "200"),
        ("POST", &addr, "https://evil.example", "403"),
        ("POST", &addr, "null", "403"),
        ("OPTIONS", &addr, "https://evil.example", "405"),
        ("GET", &addr, "https://evil.example", "405"),
        ("POST", "evil.example", "http://evil.example", "421"),
        ("OPTIONS", "evil.example", "http://evil.example", "421"),
    ] {
        let response = response_to(method, host, origin);
        assert!(response.starts_with(&format!("HTTP/1.1 {status} ")), "{method} {host} {origin}: {response}");
        assert!(!response.to_lowercase().contains("access-control-"), "{response}");
    }
}

// ---- logs --------------------------------------------------------------------

/// The URL with a password in it, and the password. Adds one if there is none: a server that
/// does not require a password accepts any.
fn with_password(url: &str) -> (String, Option<String>) {
    let Some((scheme, rest)) = url.split_once("://") else { return (url.into(), None) };
    let Some((user, host)) = rest.split_once('@') else { return (url.into(), None) };
    match user.split_once(':') {
        Some((_, password)) => (url.into(), Some(password.into())),
        None => (format!("{scheme}://{user}:dsn-s3cret@{host}"), Some("dsn-s3cret".into())),
    }
}

fn an_internal_error_is_logged_with_the_request_id_and_not_shown_to_the_caller(fixture: &Fixture) {
    fixture.migrated();
    let (mut server, addr) = serve(fixture, "");
    fixture.damage("alter table schedules rename to renamed");
    let request =
        format!("GET /cron HTTP/1.1\r\nhost: {addr}\r\nx-request-id: f1nd-me\r\nconnection: close\r\n\r\n");
    let response = exchange(&addr, &request);
    assert!(response.starts_with("HTTP/1.1 50") && response.contains("f1nd-me"), "{response}");
    let shown = ["schedules", "table", "relation", "migrate"].map(|word| response.contains(word));
    assert_eq!(shown, [false; 4], "{response}");
    server.signal("TERM");
    let (code, _, log) = server.ended();
    assert_eq!(code, Some(0), "{log}");
    let logged = log.lines().find(|line| line.contains("f1nd-me")).expect("logged");
    assert!(logged.contains("/cron") && logged.contains("error="), "{logged}");
}

fn no_secret_reaches_a_log_even_at_trace(fixture: &Fixture) {
    const MARK: &str = "m4rkedPayload";
    fixture.migrated();
    let (url, password) = with_password(&fixture.url);
    let (_, secret) = token(fixture, "all --scope admin");
    let folder = std::env::temp_dir().join(format!("longshore-log-{}", longshore::JobId::new()));
    std::fs::create_dir(&folder).unwrap();
    let log = folder.join("server.log");
    let mut command = binary();
    command.env("DATABASE_URL", &url).current_dir(&folder).args(["serve", "--bind", "127.0.0.1:0", "--json"]);
    command.args(["--with-worker", "--auth", "tokens", "--log", "trace", "--log-format", "json"]);
    command.args(["--allow-http", "--allow-outbound", "127.0.0.0/8"]);
    let mut server = Process::start_logging(&mut command, &log);
    let addr = server.address();

    let post = |body: &Value| request(&addr, "POST", "/jobs", Some(&secret), &body.to_string());
    let hook = format!("http://127.0.0.1:1/{MARK}?{MARK}={MARK}");
    let jobs = [
        json!({ "kind": "summarize_text", "payload": { "text": format!("{MARK} sails. {MARK} lands.") } }),
        json!({ "kind": "webhook_delivery", "max_attempts": 1, "payload": { "url": hook, "body": MARK } }),
        json!({ "kind": "send_email", "payload": { "to": "ada@example.com", "subject": MARK, "body": MARK } }),
    ];
    let mut ids: Vec<String> =
        jobs.iter().map(|job| post(job).json(201)["id"].as_str().unwrap().to_owned()).collect();
    // A payload that the handler cannot decode. It is stored past the client, which would refuse it.
    let unreadable = NewJob::new("summarize_text", &MARK).validate().unwrap();
    ids.push(unreadable.id().to_string());
    fixture.with_client(async |client| client.store().enqueue(&[unreadable], KeyWait::Long).await);
    // Requests that the API rejects.
    let wrong = json!({ "kind": "summarize_text", "payload": { "text": [MARK] } });
    assert_eq!(post(&wrong).status, 422);
    assert_eq!(request(&addr, "POST", "/jobs", Some(&secret), &format!("{{\"kind\":\"{MARK}")).status, 400);
    assert_eq!(request(&addr, "GET", &format!("/jobs?token={secret}"), None, "").status, 401);
    assert_eq!(request(&addr, "GET", "/jobs", Some(&format!("{secret}x")), "").status, 401);
    let job = |id: &str| request(&addr, "GET", &format!("/jobs/{id}"), Some(&secret), "").json(200);
    for id in &ids {
        until(MAX_WAIT, "the job ends", || !job(id)["finished_at"].is_null());
    }
    for id in &ids[1..] {
        assert!(!job(id)["last_error"].to_string().contains(MARK), "{}", job(id));
    }
    assert_eq!(job(&ids[3])["status"], "failed_permanent", "{}", job(&ids[3]));
    server.signal("TERM");
    let (code, _, _) = server.ended();
    assert_eq!(code, Some(0));

    let logged = std::fs::read_to_string(&log).unwrap();
    assert!(
        ids.iter().all(|id| logged.contains(id)) && logged.contains("\"TRACE\""),
        "the log is at trace level and covers every job"
    );
    for (what, secret) in
        [("a payload", Some(MARK)), ("a token", Some(&*secret)), ("a password", password.as_deref())]
    {
        let Some(secret) = secret else { continue };
        let line = logged.lines().find(|line| line.contains(secret));
        assert_eq!(line, None, "{what} is in the log");
    }
    for line in logged.lines() {
        serde_json::from_str::<Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
    std::fs::remove_dir_all(folder).unwrap();
}

// ---- webhooks ----------------------------------------------------------------

/// The headers and the body of a request.
fn split(request: &str) -> (HeaderMap, &str) {
    let (head, body) = request.split_once("\r\n\r\n").unwrap();
    let fields = head.lines().filter_map(|line| line.split_once(": "));
    let field = |(name, value): (&str, &str)| {
        (HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value).unwrap())
    };
    (fields.map(field).collect(), body)
}

#[test]
fn another_implementation_verifies_the_signatures() {
    let secrets =
        ["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_BwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwcHBwc="];
    let other = "whsec_CAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAg=";
    let runner = BuiltinRunner::new();
    let (port, requests) = respond_once(b"HTTP/1.1 204 No Content\r\n\r\n".to_vec());
    let url = format!("http://127.0.0.1:{port}/hook");
    runner.enqueue("webhook_delivery", &json!({ "url": url, "body": { "ship": "\u{26f5} Vega", "n": 1.0 } }));
    let both = secrets.join(",");
    let done = runner.drain(
        &["--allow-http", "--allow-outbound", "127.0.0.1", "--log", "off"],
        &[("LONGSHORE_WEBHOOK_SECRETS", &both)],
    );
    assert_eq!(done.json()["succeeded"], 1);
    let request = requests.recv().unwrap();
    let (headers, body) = split(&request);
    for secret in secrets {
        let verified = Webhook::new(secret).unwrap().verify(body.as_bytes(), &headers);
        assert!(verified.is_ok(), "{verified:?}: {request}");
    }
    assert!(Webhook::new(other).unwrap().verify(body.as_bytes(), &headers).is_err());
    let changed = body.replace("Vega", "Lyra");
    assert!(Webhook::new(secrets[0]).unwrap().verify(changed.as_bytes(), &headers).is_err());
    for (field, value) in [("webhook-id", "another"), ("webhook-timestamp", "1700000000")] {
        let mut headers = headers.clone();
        headers.insert(field, HeaderValue::from_static(value));
        assert!(Webhook::new(secrets[0]).unwrap().verify(body.as_bytes(), &headers).is_err(), "{field}");
    }
}

// ---- SQL and source code -----------------------------------------------------

#[test]
fn a_schema_name_cannot_inject_sql() {
    let long = "a".repeat(64);
    for name in ["a;drop", "a\"b", "a'b", "Upper", "1st", "a-b", "a.b", "é", "", &long] {
        let url = format!("postgres://nobody@db.invalid/jobs?schema={name}");
        let output = CommandOutput::of(binary().env("DATABASE_URL", url).arg("check").output().unwrap());
        output.fails_with(2, &["schema"]);
    }
}

#[test]
fn every_crate_forbids_unsafe_code() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |file: &str| std::fs::read_to_string(root.join(file)).unwrap();
    assert!(read("Cargo.toml").contains("unsafe_code = \"forbid\""));
    for member in ["crates/longshore", "crates/longshore-cli", "crates/bench", "xtask"] {
        let manifest = read(&format!("{member}/Cargo.toml"));
        assert!(manifest.contains("[lints]\nworkspace = true"), "{member}");
    }
}
