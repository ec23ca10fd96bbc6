//! `longshore enqueue --wait` waits until the job has ended.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use longshore::{Ending, ListFilter};
use serde_json::json;

use crate::fixture::{CommandOutput, Fixture, on_every_target};
use crate::process::until;

on_every_target!(
    a_success_is_printed_with_its_result,
    a_permanent_failure_has_its_own_exit_code,
    a_cancelled_job_is_reported,
    a_job_continues_after_the_wait_times_out,
    the_reason_is_printed_if_no_worker_can_run_the_job,
);

/// Generous, for slow machines.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Starts `enqueue --wait` and returns once the job is enqueued.
fn start_waiting(fixture: &Fixture, line: &str) -> Child {
    let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(MAX_WAIT, "the job is enqueued", || {
        let page = fixture.with_client(async |client| client.list(&ListFilter::default()).await);
        !page.jobs.is_empty()
    });
    child
}

fn finish(child: Child) -> CommandOutput {
    CommandOutput::of(child.wait_with_output().unwrap())
}

fn a_success_is_printed_with_its_result(fixture: &Fixture) {
    fixture.migrated();
    let child = start_waiting(fixture, "enqueue greet --wait --json");
    let (_, claimed) = fixture.claim(1);
    // Text that would change if it were parsed and written again.
    let result = serde_json::value::RawValue::from_string("{\"n\":1.00}".into()).unwrap();
    fixture.settle(&claimed[0], Ending::Succeeded { result: Some(result) });
    let output = finish(child).ok();
    assert!(output.out.contains("{\"n\":1.00}"), "{output:?}");
    let document = output.document();
    let expected = json!({
        "job_id": claimed[0].lease().id, "how": "created", "status": "succeeded", "attempts": 1,
        "result": { "n": 1.0 }, "last_error": null,
    });
    assert_eq!(document, expected);
    fixture.run("jobs delete --status succeeded --yes").ok();

    fixture.with_kinds(&["greet"]);
    let child = start_waiting(fixture, "enqueue greet --wait=1m");
    let (_, claimed) = fixture.claim(1);
    fixture.settle(&claimed[0], Ending::Succeeded { result: None });
    let id = claimed[0].lease().id;
    assert_eq!(finish(child).ok().out, format!("created {id}\nsucceeded\n"));
}

fn a_permanent_failure_has_its_own_exit_code(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["greet"]);
    let child = start_waiting(fixture, "enqueue greet --wait");
    let (_, claimed) = fixture.claim(1);
    fixture.settle(&claimed[0], Ending::Failed { error: "the crane is stuck".into(), retry_in: None });
    let id = claimed[0].lease().id.to_string();
    let output = finish(child).fails_with(8, &[&id, "failed_permanent", "the crane is stuck"]);
    assert_eq!(output.out, format!("created {id}\n"));
}

fn a_cancelled_job_is_reported(fixture: &Fixture) {
    fixture.migrated();
    let child = start_waiting(fixture, "enqueue greet --delay 1h --wait --json");
    fixture.run("jobs cancel --kind greet --yes").ok();
    let output = finish(child).fails_with(8, &["ended as cancelled"]);
    assert_eq!(output.document()["status"], "cancelled");
}

fn a_job_continues_after_the_wait_times_out(fixture: &Fixture) {
    fixture.migrated();
    let timed_out =
        fixture.run("enqueue greet --wait=50ms --json").fails_with(9, &["50ms", "queued", "jobs explain"]);
    assert_eq!(timed_out.document()["status"], "queued");
    let id = timed_out.document()["job_id"].as_str().unwrap().to_owned();
    assert_eq!(fixture.run(&format!("jobs show {id} --json")).json()["status"], "queued");
    fixture.run("enqueue greet --wait=soon").fails_with(2, &["--wait", "or none"]);
}

fn the_reason_is_printed_if_no_worker_can_run_the_job(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["greet"]);
    let mut child = start_waiting(fixture, "enqueue greet --queue lonely --wait=1h");
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    let reason = lines.next().unwrap();
    assert!(reason.starts_with("still waiting: no live worker takes jobs from queue `lonely`"), "{reason}");
    assert!(reason.contains("longshore worker --queues lonely"), "{reason}");
    fixture.run("jobs cancel --kind greet --yes").ok();
    let rest: Vec<String> = lines.collect();
    assert!(
        rest.len() == 1 && rest[0].contains("ended as cancelled"),
        "the reason is printed once: {rest:?}"
    );
    assert_eq!(finish(child).code, 8);
}
