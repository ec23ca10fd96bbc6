//! `longshore worker` as a process.

use std::time::Duration;

use longshore::Status;
use serde_json::json;

use crate::fixture::{Fixture, binary, on_every_engine};
use crate::process::{Process, free_port, request, until};

on_every_engine!(
    a_drain_runs_the_due_jobs_and_prints_a_summary,
    a_worker_serves_metrics_and_stops_on_sigterm,
    invalid_settings_are_reported_by_the_name_of_their_flag,
);

/// Generous, for slow machines.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// The simulator fails the first attempt of the job with this id, and not the second.
const FAILS_ONCE: &str = "01990000-0000-7000-8000-000000000001";
const MAIL: &str = r#"{"to":"ada@example.com","subject":"Hi","body":"…"}"#;

fn enqueue_one_that_fails_once(fixture: &Fixture) {
    fixture.with_client(async |client| {
        let job = longshore::NewJob::new("send_email", &json!({ "to": "a@b", "subject": "", "body": "" }))
            .id(FAILS_ONCE.parse()?)
            .retry(longshore::RetryPolicy::fixed(Duration::ZERO));
        client.enqueue(job).await
    });
}

fn a_drain_runs_the_due_jobs_and_prints_a_summary(fixture: &Fixture) {
    fixture.migrated();
    enqueue_one_that_fails_once(fixture);
    let elsewhere =
        fixture.run_args(&["enqueue", "send_email", "--payload", MAIL, "--queue", "elsewhere", "--json"]);
    let later = fixture.run_args(&["enqueue", "send_email", "--payload", MAIL, "--delay", "1h", "--json"]);
    let unknown = fixture.enqueue("greet");

    let done = fixture.run("worker --simulate --drain --json --log off").json();
    let expected =
        json!({ "succeeded": 1, "retrying": 1, "failed_permanent": 0, "cancelled": 0, "put_back": 0 });
    assert_eq!(done, expected);
    let job = fixture.run(&format!("jobs show {FAILS_ONCE} --json")).json();
    assert_eq!((&job["status"], &job["attempts"]), (&json!("succeeded"), &json!(2)));
    assert_eq!(job["result"]["simulated"], true);
    assert!(job["errors"][0]["error"].as_str().unwrap().contains("simulated failure at step"), "{job}");
    for waiting in
        [elsewhere.json()["job_id"].as_str().unwrap(), later.json()["job_id"].as_str().unwrap(), &unknown]
    {
        assert_eq!(fixture.run(&format!("jobs show {waiting} --json")).json()["status"], "queued");
    }
    let summary = fixture.run("worker --simulate --drain --log off").ok().out;
    assert_eq!(summary, "succeeded 0, retrying 0, failed_permanent 0, cancelled 0, released 0\n");
}

fn a_worker_serves_metrics_and_stops_on_sigterm(fixture: &Fixture) {
    fixture.migrated();
    enqueue_one_that_fails_once(fixture);
    let addr = format!("127.0.0.1:{}", free_port());
    let mut worker =
        Process::start(binary().env("DATABASE_URL", &fixture.url).env("RUST_LOG_FORMAT", "json").args([
            "worker",
            "--simulate",
            "--json",
            "--metrics-addr",
            &addr,
        ]));
    until(MAX_WAIT, "the job succeeds", || {
        fixture.with_client(async |client| client.get(FAILS_ONCE.parse()?).await).status == Status::Succeeded
    });
    // The worker counts an end when it has stored it.
    for line in [
        r#"worker_jobs_started_total{kind="send_email"} 2"#,
        r#"worker_jobs_completed_total{kind="send_email",outcome="retrying"} 1"#,
        r#"worker_job_duration_seconds_count{kind="send_email",outcome="retrying"} 1"#,
        r#"worker_jobs_completed_total{kind="send_email",outcome="succeeded"} 1"#,
    ] {
        until(MAX_WAIT, line, || {
            request(&addr, "GET", "/metrics", None, "").text.lines().any(|found| found == line)
        });
    }

    worker.signal("TERM");
    let (code, out, err) = worker.ended();
    assert_eq!(code, Some(0), "{err}");
    assert_eq!(serde_json::from_str::<serde_json::Value>(&out).unwrap()["succeeded"], 1);
    for line in err.lines() {
        serde_json::from_str::<serde_json::Value>(line).unwrap_or_else(|error| panic!("{error}: {line}"));
    }
    assert!(err.contains("stopping"), "{err}");
    assert_eq!(fixture.run("workers list --json").json(), json!([]), "the worker has signed off");
}

fn invalid_settings_are_reported_by_the_name_of_their_flag(fixture: &Fixture) {
    fixture.migrated();
    let cases = [
        ("--sweep-threshold 20s", "--sweep-threshold: 20s is shorter than three heartbeats"),
        ("--concurrency 0", "--concurrency: must be at least 1"),
        ("--heartbeat-interval 0s", "--heartbeat-interval: must be longer than zero"),
        ("--max-poll-interval 1ms", "--max-poll-interval"),
        ("--queues a,,b", "--queues"),
        ("--log a=b=c", "RUST_LOG"),
        ("--metrics-addr everywhere", "like 127.0.0.1:9091, or off"),
        ("--metrics-port many", "like 9092, or auto"),
        ("--shutdown-grace 5", "like 500ms"),
    ];
    for (flags, expected) in cases {
        fixture.run(&format!("worker --simulate --drain {flags}")).fails_with(2, &[expected]);
    }
    let unusable = fixture.run("worker --simulate --drain --metrics-addr 192.0.2.1:9091 --log off");
    unusable.fails_with(1, &["192.0.2.1:9091", "--metrics-addr (WORKER_METRICS_BIND_ADDR), or off"]);
    let mut command = binary();
    command.env("DATABASE_URL", &fixture.url).env("LONGSHORE_SWEEP_THRESHOLD", "29s");
    let output = command.args(["worker", "--simulate", "--drain"]).output().unwrap();
    crate::fixture::CommandOutput::of(output).fails_with(2, &["29s is shorter than three heartbeats"]);
}
