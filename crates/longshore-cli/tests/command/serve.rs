//! `longshore dev` and `longshore serve` as processes.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use longshore::JobId;
use longshore::store::{ClaimCursor, ClaimRequest, NewWorker};
use serde_json::{Value, json};

use crate::fixture::{Fixture, binary, on_every_engine};
use crate::process::{Process, Reply, request, until};

on_every_engine!(
    a_server_counts_its_requests_and_stops_on_sigterm,
    a_server_with_a_worker_runs_the_built_in_kinds,
    a_server_with_recovery_off_leaves_interrupted_jobs_to_others,
    a_manual_sweep_uses_the_settings_of_the_server_and_is_counted,
    a_server_off_loopback_requires_tokens_or_does_not_start,
    a_token_is_accepted_until_it_is_revoked,
    a_server_without_tables_says_to_migrate,
    an_address_in_use_is_an_error_that_names_the_flag,
    a_server_with_1200_slow_bodies_serves_other_clients,
);

/// Generous, for slow machines.
const MAX_WAIT: Duration = Duration::from_secs(60);
const SUMMARY: &str = r#"{"kind":"summarize_text","payload":{"text":"Ships come. Ships go.","max_words":2}}"#;

fn serve(fixture: &Fixture, flags: &str) -> (Process, String) {
    let (server, url) = fixture.serve(flags);
    (server, url.strip_prefix("http://").unwrap().to_owned())
}

fn get(addr: &str, path: &str) -> Reply {
    request(addr, "GET", path, None, "")
}

fn until_succeeded(addr: &str, id: &str) {
    let path = format!("/jobs/{id}");
    until(MAX_WAIT, "the job succeeds", || get(addr, &path).json(200)["status"] == "succeeded");
}

// ---- dev ---------------------------------------------------------------------

/// A data folder that is removed when this is dropped.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        Folder(std::env::temp_dir().join(format!("longshore-dev-{}", JobId::new())))
    }

    fn dev(&self, flags: &[&str]) -> Process {
        let folder = self.0.to_str().unwrap();
        Process::start(binary().args(["dev", "--bind", "127.0.0.1:0", "--data-dir", folder]).args(flags))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn the_commands_that_dev_prints_work_and_its_data_survives_a_restart() {
    let folder = Folder::new();
    let mut dev = folder.dev(&[]);
    let greeting = dev.printed_up_to("Press Ctrl-C to stop.");
    let curls: Vec<&str> = greeting.lines().map(str::trim).filter(|line| line.starts_with("curl ")).collect();
    let run = |line: &str| -> Value {
        let output = Command::new("sh").args(["-c", line]).env("no_proxy", "*").output().unwrap();
        assert!(output.status.success(), "is curl installed? {line}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {line}: {output:?}"))
    };
    let [enqueue, list] = curls[..] else { panic!("not two curl commands: {greeting}") };
    let job = run(enqueue);
    assert_eq!((&job["status"], &job["kind"]), (&json!("queued"), &json!("summarize_text")), "{job}");
    let id = job["id"].as_str().unwrap();
    assert_eq!(run(list)[0]["id"], id);
    let mode = std::fs::metadata(&folder.0).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700, "only the owner can read payloads");
    let url = greeting.split("http://").nth(1).unwrap();
    until_succeeded(url.lines().next().unwrap(), id);

    dev.signal("INT");
    let (code, _, err) = dev.ended();
    assert_eq!(code, Some(0), "{err}");

    let mut restarted = folder.dev(&["--json"]);
    let addr = restarted.address();
    let job = get(&addr, &format!("/jobs/{id}")).json(200);
    assert_eq!(job["status"], "succeeded");
    assert!(job["result"]["summary"].is_string(), "{job}");
    let kinds = get(&addr, "/kinds?schemas=true").json(200);
    let described: Vec<&str> = kinds
        .as_array()
        .unwrap()
        .iter()
        .filter(|kind| kind["schema"].is_object())
        .map(|kind| kind["name"].as_str().unwrap())
        .collect();
    assert_eq!(described, ["resize_image", "send_email", "summarize_text", "webhook_delivery"]);
}

#[test]
fn dev_runs_every_queue_and_names_its_database() {
    let folder = Folder::new();
    let mut dev = folder.dev(&["--json"]);
    let greeting: Value = serde_json::from_str(&dev.printed_up_to("}")).unwrap();
    let (url, database) = (greeting["url"].as_str().unwrap(), greeting["database_url"].as_str().unwrap());
    let addr = url.strip_prefix("http://").unwrap();
    let run = |line: &str| {
        let mut command = binary();
        command.env("DATABASE_URL", database).current_dir("/").args(line.split_whitespace());
        crate::fixture::CommandOutput::of(command.output().unwrap())
    };
    for queue in ["mail", "images"] {
        let line =
            format!("enqueue summarize_text --payload {{\"text\":\"Ships.\"}} --queue {queue} --wait=60s");
        let output = run(&line).ok();
        assert!(output.out.contains("succeeded"), "{output:?}");
    }
    assert_eq!(run("workers list --json").json()[0]["queues"], json!(["*"]));
    let page = get(addr, "/");
    assert_eq!(page.status, 200);
    assert!(page.text.contains("<a href=\"/docs\">/docs</a>"), "{page:?}");
}

#[test]
fn dev_has_the_flags_that_the_messages_of_the_built_in_kinds_name() {
    let folder = Folder::new();
    let hook = TcpListener::bind("127.0.0.1:0").unwrap();
    let target = hook.local_addr().unwrap();
    let flags = ["--allow-http", "--allow-outbound", "127.0.0.1", "--queues", "hooks", "--json"];
    let secret = ["--webhook-secret", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"];
    let mut dev = folder.dev(&[flags.as_slice(), &secret].concat());
    let addr = dev.address();
    let job = json!({
        "kind": "webhook_delivery", "queue": "hooks", "payload": { "url": format!("http://{target}/"), "body": 7 },
    });
    request(&addr, "POST", "/jobs", None, &job.to_string()).json(201);
    let (mut stream, _) = hook.accept().unwrap();
    let mut received = [0; 4096];
    let length = stream.read(&mut received).unwrap();
    let text = String::from_utf8_lossy(&received[..length]).to_lowercase();
    assert!(text.starts_with("post / ") && text.contains("webhook-signature: v1,"), "{text}");
    stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
}

#[test]
fn an_address_may_be_a_port_alone() {
    let folder = Folder::new();
    for bind in ["0", ":0", "localhost:0"] {
        let flags = ["dev", "--json", "--bind", bind, "--data-dir", folder.0.to_str().unwrap()];
        let addr = Process::start(binary().args(flags)).address();
        assert!(addr.starts_with("127.0.0.1:"), "{bind}: {addr}");
    }
}

// ---- serve ---------------------------------------------------------------------

fn a_server_counts_its_requests_and_stops_on_sigterm(fixture: &Fixture) {
    let (mut server, addr) = serve(fixture.migrated(), "");
    assert_eq!(get(&addr, "/health").json(200), json!({ "status": "ok" }));
    assert_eq!(get(&addr, "/nowhere").json(404)["error"], "not_found");
    let metrics = get(&addr, "/metrics").text;
    let line = r#"http_requests_total{method="GET",path="/health",status="200"} 1"#;
    assert!(metrics.lines().any(|found| found == line), "{line}\n{metrics}");

    server.signal("TERM");
    let (code, _, err) = server.ended();
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(fixture.run("workers list --all --json").json(), json!([]), "the server has signed off");
}

fn a_server_with_a_worker_runs_the_built_in_kinds(fixture: &Fixture) {
    let (_server, addr) = serve(fixture, "--migrate --with-worker");
    let id = request(&addr, "POST", "/jobs", None, SUMMARY).json(201)["id"].as_str().unwrap().to_owned();
    until_succeeded(&addr, &id);
}

/// Otherwise a server would recover the job before a worker whose hooks decide about it.
fn a_server_with_recovery_off_leaves_interrupted_jobs_to_others(fixture: &Fixture) {
    const INTERVALS: &str = "--heartbeat-interval 50ms --sweep-threshold 300ms --sweep-interval 50ms";
    fixture.migrated();
    let id = fixture.enqueue("greet");
    fixture.with_client(async |client| {
        let dead = NewWorker { stale_after: Duration::from_millis(1), ..NewWorker::new("dead") };
        client.store().register(&dead).await?;
        client.store().claim(&ClaimRequest::new(dead.id, 1), &mut ClaimCursor::default()).await
    });
    let (server, addr) = serve(fixture, &format!("{INTERVALS} --recovery off"));
    let status = |addr: &str| get(addr, &format!("/jobs/{id}")).json(200)["status"].clone();
    // A server sweeps at every heartbeat, from the third heartbeat on.
    let mut heartbeats = std::collections::BTreeSet::new();
    until(MAX_WAIT, "the server sends heartbeats", || {
        let workers = get(&addr, "/workers").json(200);
        let server = workers.as_array().unwrap().iter().find(|worker| worker["name"] != "dead");
        heartbeats.extend(server.map(|server| server["heartbeat_at"].to_string()));
        heartbeats.len() > 12
    });
    assert_eq!(status(&addr), "running");
    drop(server);
    let (_server, addr) = serve(fixture, INTERVALS);
    until(MAX_WAIT, "the job is recovered", || status(&addr) == "retrying");
}

/// The first job is recovered with the server's delay, the second has had too many interruptions.
fn a_manual_sweep_uses_the_settings_of_the_server_and_is_counted(fixture: &Fixture) {
    fixture.migrated();
    let (first, second) = (fixture.enqueue("greet"), fixture.enqueue("greet"));
    let abandon = |max: u32| {
        fixture.with_client(async |client| {
            let dead = NewWorker { stale_after: Duration::from_millis(1), ..NewWorker::new("dead") };
            client.store().register(&dead).await?;
            client.store().claim(&ClaimRequest::new(dead.id, max), &mut ClaimCursor::default()).await
        });
    };
    abandon(1);
    let (server, addr) = serve(fixture, "--recovery off --recovery-delay 2m");
    let metric = |addr: &str, line: &str| get(addr, "/metrics").text.lines().any(|found| found == line);
    assert!(metric(&addr, "longshore_recovered_jobs_total 0"));
    let sweep = |addr: &str| {
        let swept =
            binary().args(["sweep", "--json", "--server", &format!("http://{addr}")]).output().unwrap();
        crate::fixture::CommandOutput::of(swept).json()["recovered"].clone()
    };
    assert_eq!(sweep(&addr), 1);
    let waits = fixture.with_client(async |client| {
        let job = client.get(first.parse()?).await?;
        Ok(job.run_at - client.store().now().await?)
    });
    assert!((110..=120).contains(&waits.num_seconds()), "{waits}");
    assert!(metric(&addr, "longshore_recovered_jobs_total 1"));
    drop(server);

    abandon(1);
    let (_server, addr) = serve(fixture, "--recovery off --max-interruptions 1");
    assert_eq!(sweep(&addr), 1);
    assert_eq!(get(&addr, &format!("/jobs/{second}")).json(200)["status"], "failed_permanent");
    let dead = r#"worker_jobs_completed_total{kind="greet",outcome="failed_permanent"} 1"#;
    assert!(metric(&addr, dead), "{}", get(&addr, "/metrics").text);
    assert!(metric(&addr, r#"worker_jobs_started_total{kind="greet"} 1"#));
}

fn a_server_off_loopback_requires_tokens_or_does_not_start(fixture: &Fixture) {
    fixture.migrated();
    let expected =
        ["--bind 0.0.0.0:0", "--auth tokens", "LONGSHORE_AUTH", "longshore tokens create", "127.0.0.1"];
    fixture.run("serve --bind 0.0.0.0:0").fails_with(2, &expected);
    let mut command = binary();
    command.env("DATABASE_URL", &fixture.url).args([
        "serve",
        "--bind",
        "0.0.0.0:0",
        "--auth",
        "tokens",
        "--json",
    ]);
    let mut server = Process::start(&mut command);
    let addr = server.address().replace("0.0.0.0", "127.0.0.1");
    assert_eq!(get(&addr, "/jobs").status, 401);
    assert_eq!(get(&addr, "/health").status, 200);
}

fn a_token_is_accepted_until_it_is_revoked(fixture: &Fixture) {
    let (_server, addr) = serve(fixture.migrated(), "--auth tokens");
    let create = |flags: &str| {
        let created = fixture.run(&format!("tokens create {flags} --json")).json();
        (created["id"].as_str().unwrap().to_owned(), created["token"].as_str().unwrap().to_owned())
    };
    let (id, token) = create("shop --scope enqueue --scope read");
    let (_, other) = create("monitor --scope read --queue mail --expires-in 1h");
    let enqueue = |token| request(&addr, "POST", "/jobs", token, SUMMARY).status;
    assert_eq!(enqueue(None), 401);
    assert_eq!(enqueue(Some("longshore_guessed")), 401);
    assert_eq!(enqueue(Some(&other)), 403, "it has only the read scope");
    assert_eq!(enqueue(Some(&token)), 201);
    assert_eq!(request(&addr, "GET", "/jobs", Some(&other), "").status, 403, "it is limited to one queue");
    assert_eq!(request(&addr, "GET", "/jobs?queue=mail", Some(&other), "").status, 200);

    let listed = fixture.run("tokens list").ok().out;
    assert!(listed.contains("shop") && listed.contains(&id) && !listed.contains(&token), "{listed}");
    let revoked = fixture.run(&format!("tokens revoke {id} --json")).json();
    assert_eq!(revoked, json!({ "revoked": [id] }));
    until(Duration::from_secs(15), "the revoked token is rejected", || enqueue(Some(&token)) == 401);
    assert_eq!(
        request(&addr, "GET", "/jobs?queue=mail", Some(&other), "").status,
        200,
        "the other token is still accepted"
    );
    let listed = fixture.run("tokens list --json").json();
    let record = listed.as_array().unwrap().iter().find(|record| record["id"] == id.as_str());
    assert!(record.unwrap()["revoked_at"].is_string(), "{listed}");
    fixture
        .run(&format!("tokens revoke {}", crate::fixture::UNKNOWN_ID))
        .fails_with(3, &["longshore tokens list"]);
}

fn a_server_without_tables_says_to_migrate(fixture: &Fixture) {
    fixture.run("serve --bind 127.0.0.1:0").fails_with(6, &["longshore migrate"]);
}

fn an_address_in_use_is_an_error_that_names_the_flag(fixture: &Fixture) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    fixture
        .migrated()
        .run(&format!("serve --bind {addr}"))
        .fails_with(1, &[&addr, "--bind", "API_BIND_ADDR"]);
}

// ---- slow clients --------------------------------------------------------------

/// The number of slow bodies: more than the server's default limit of connections.
const SLOW_BODIES: usize = 1200;

fn a_server_with_1200_slow_bodies_serves_other_clients(fixture: &Fixture) {
    // If slow bodies kept others out, others would wait for this long.
    const BODY_TIMEOUT: Duration = Duration::from_secs(15);
    let (_server, addr) = serve(fixture.migrated(), "--allow-unknown-kinds --body-timeout 15s");
    let head = format!(
        "POST /jobs HTTP/1.1\r\nhost: {addr}\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n{{"
    );
    let mut slow: Vec<TcpStream> = Vec::new();
    let mut longest = Duration::ZERO;
    let mut served = 0;
    let mut serve_others = || {
        let began = Instant::now();
        get(&addr, "/health").json(200);
        longest = longest.max(began.elapsed());
        request(&addr, "POST", "/leases", None, "{}").json(200);
        request(&addr, "POST", "/jobs", None, r#"{"kind":"greet","payload":1}"#).json(201);
        served += 1;
    };
    for i in 0..SLOW_BODIES {
        let mut stream = TcpStream::connect(&addr).unwrap();
        // The server may already have closed it.
        let _ = stream.write_all(head.as_bytes());
        slow.push(stream);
        if i % 100 == 0 {
            serve_others();
        }
    }
    // Every slow body ends: with 408, or because the connection is closed.
    let mut refused = 0;
    for mut stream in slow {
        let mut response = String::new();
        stream.set_read_timeout(Some(MAX_WAIT)).unwrap();
        match stream.read_to_string(&mut response) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}"),
        }
        assert!(response.is_empty() || response.starts_with("HTTP/1.1 408 "), "{response}");
        refused += usize::from(!response.is_empty());
        if refused % 100 == 1 {
            serve_others();
        }
    }
    let metrics = get(&addr, "/metrics").text;
    let failures: Vec<&str> = metrics
        .lines()
        .filter(|line| line.starts_with("http_requests_total") && line.contains("status=\"5"))
        .collect();
    assert_eq!(failures, Vec::<&str>::new());
    for reason in ["body_limit", "body_timeout"] {
        let series = format!("longshore_http_connections_closed_total{{reason=\"{reason}\"}}");
        assert!(metrics.contains(&series), "{series}\n{metrics}");
    }
    assert!(longest < BODY_TIMEOUT, "{longest:?}");
    eprintln!("{served} rounds of requests; /health took at most {longest:?}; {refused} bodies got 408");
}
