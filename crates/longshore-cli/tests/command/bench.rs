//! `longshore bench` measures a queue and leaves nothing behind.

use serde_json::{Value, json};

use crate::fixture::{Fixture, on_every_engine};
use crate::process::Process;

on_every_engine!(a_bench_measures_and_cleans_up, a_bench_stopped_by_a_signal_cleans_up);

/// Asserts that only the job `own` is left.
fn assert_clean(fixture: &Fixture, own: &str) {
    let jobs = fixture.run("jobs list --json").json();
    let ids: Vec<&Value> = jobs["jobs"].as_array().unwrap().iter().map(|job| &job["id"]).collect();
    assert_eq!(ids, [&json!(own)], "only the job from before the bench");
    let names: Vec<Value> = fixture
        .run("queues list --json")
        .json()
        .as_array()
        .unwrap()
        .iter()
        .map(|q| q["name"].clone())
        .collect();
    assert_eq!(names, [json!("default")]);
    assert_eq!(fixture.run("workers list --json").json(), json!([]), "the bench's worker has signed off");
    assert_eq!(fixture.run("kinds list --json").json(), json!([]));
    fixture.run("check").ok();
}

fn a_bench_measures_and_cleans_up(fixture: &Fixture) {
    let own = fixture.migrated().enqueue("bench");
    // The bench's worker must not run a due schedule.
    fixture.run_args(&["cron", "add", "daily", "0 0 * * *", "report", "--json"]).ok();
    fixture.move_clock(std::time::Duration::from_secs(2 * 86_400));
    let figures = fixture.run("bench --jobs 60 --producers 3 --concurrency 2 --json").json();
    assert_eq!((&figures["jobs"], &figures["producers"]), (&json!(60), &json!(3)));
    for field in ["enqueued_per_second", "run_per_second"] {
        assert!(figures[field].as_f64().unwrap() > 0.0, "{figures}");
    }
    let at = |share: &str| figures["pick_up_seconds"][share].as_f64().unwrap();
    assert!(at("p50") > 0.0 && at("p50") <= at("p95") && at("p95") <= at("p99"), "{figures}");
    assert_clean(fixture, &own);

    let text = fixture.run("bench --jobs 1 --producers 4").ok().out;
    for part in ["enqueued ", "run ", "picked up p50 "] {
        assert!(text.contains(part), "{text}");
    }
    fixture.run("bench --jobs 0").fails_with(2, &["--jobs", "1..="]);
}

fn a_bench_stopped_by_a_signal_cleans_up(fixture: &Fixture) {
    let own = fixture.migrated().enqueue("bench");
    let mut long = Process::start(&mut fixture.command(&["bench", "--jobs", "1000000"]));
    crate::process::until(std::time::Duration::from_secs(60), "the bench has started", || {
        fixture.run("queues list --json").json().as_array().unwrap().len() == 2
    });
    long.signal("INT");
    let (code, out, err) = long.ended();
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    let lines: Vec<&str> = err.lines().collect();
    assert!(lines[0].starts_with("stopping; removing the jobs of the bench"), "{err}");
    assert_eq!(lines[1..], ["error: stopped before the measurement was complete"], "{err}");
    assert_clean(fixture, &own);
}

#[test]
fn with_a_server_only_enqueueing_is_measured() {
    let fixture = Fixture::served();
    fixture.migrated();
    let figures = fixture.run("bench --jobs 20 --producers 2 --json").json();
    assert!(figures["enqueued_per_second"].as_f64().unwrap() > 0.0, "{figures}");
    assert_eq!((&figures["run_per_second"], &figures["pick_up_seconds"]), (&Value::Null, &Value::Null));
    assert_eq!(fixture.run("jobs list --json").json()["jobs"], json!([]), "nothing is left");
    let output = fixture.run("bench --jobs 1");
    assert!(output.code == 0 && output.err.contains("--database-url"), "{output:?}");
}
