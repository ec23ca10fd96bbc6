//! `enqueue --wait`: until the job has ended, however it ends.

use std::process::{Child, Stdio};
use std::time::Duration;

use longshore::Ending;
use longshore::store::ListFilter;
use serde_json::json;

use crate::fixture::{CommandOutput, Fixture, on_every_target};
use crate::process::until;

on_every_target!(
    a_success_is_told_with_its_result,
    a_job_that_fails_for_good_has_a_code_of_its_own,
    a_job_that_is_cancelled_is_told,
    a_job_that_takes_too_long_goes_on,
);

/// However busy the machine.
const MAX_WAIT: Duration = Duration::from_secs(60);

/// Begins to wait for a job, and returns once the job is there.
fn waiting(fixture: &Fixture, line: &str) -> Child {
    let mut command = fixture.command(&line.split_whitespace().collect::<Vec<_>>());
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    until(MAX_WAIT, "the job is enqueued", || {
        let page = fixture.with_client(async |client| client.list(&ListFilter::default()).await);
        !page.jobs.is_empty()
    });
    child
}

fn ended(child: Child) -> CommandOutput {
    CommandOutput::of(child.wait_with_output().unwrap())
}

fn a_success_is_told_with_its_result(fixture: &Fixture) {
    fixture.migrated();
    let child = waiting(fixture, "enqueue greet --wait --json");
    let (_, claimed) = fixture.claim(1);
    // Text that a detour by another representation would change.
    let result = serde_json::value::RawValue::from_string("{\"n\":1.00}".into()).unwrap();
    fixture.settle(&claimed[0], Ending::Succeeded { result: Some(result) });
    let answer = ended(child).ok();
    assert!(answer.out.contains("{\"n\":1.00}"), "{answer:?}");
    let document = answer.document();
    let expected = json!({
        "job_id": claimed[0].lease().id, "how": "created", "status": "succeeded", "attempts": 1,
        "result": { "n": 1.0 }, "last_error": null,
    });
    assert_eq!(document, expected);
    fixture.run("jobs delete --status succeeded --yes").ok();

    fixture.with_kinds(&["greet"]);
    let child = waiting(fixture, "enqueue greet --wait=1m");
    let (_, claimed) = fixture.claim(1);
    fixture.settle(&claimed[0], Ending::Succeeded { result: None });
    let id = claimed[0].lease().id;
    assert_eq!(ended(child).ok().out, format!("created {id}\nsucceeded\n"));
}

fn a_job_that_fails_for_good_has_a_code_of_its_own(fixture: &Fixture) {
    fixture.migrated().with_kinds(&["greet"]);
    let child = waiting(fixture, "enqueue greet --wait");
    let (_, claimed) = fixture.claim(1);
    fixture.settle(&claimed[0], Ending::Failed { error: "the crane is stuck".into(), retry_in: None });
    let id = claimed[0].lease().id.to_string();
    let answer = ended(child).fails_with(8, &[&id, "failed_permanent", "the crane is stuck"]);
    assert_eq!(answer.out, format!("created {id}\n"));
}

fn a_job_that_is_cancelled_is_told(fixture: &Fixture) {
    fixture.migrated();
    let child = waiting(fixture, "enqueue greet --delay 1h --wait --json");
    fixture.run("jobs cancel --kind greet --yes").ok();
    let answer = ended(child).fails_with(8, &["ended as cancelled"]);
    assert_eq!(answer.document()["status"], "cancelled");
}

fn a_job_that_takes_too_long_goes_on(fixture: &Fixture) {
    fixture.migrated();
    let late =
        fixture.run("enqueue greet --wait=50ms --json").fails_with(9, &["50ms", "queued", "jobs explain"]);
    assert_eq!(late.document()["status"], "queued");
    let id = late.document()["job_id"].as_str().unwrap().to_owned();
    assert_eq!(fixture.run(&format!("jobs show {id} --json")).json()["status"], "queued");
    fixture.run("enqueue greet --wait=soon").fails_with(2, &["--wait", "or none"]);
}
