//! `longshore operations`: list, show, stop and resume changes of many jobs.

use longshore::{Action, JobFilter, NewJob, NewOperation, OperationId, Status};

use crate::fixture::{Fixture, UNKNOWN_ID, on_every_target};

on_every_target!(
    operations_are_listed_and_named_by_their_whole_id,
    an_operation_is_shown_stopped_and_resumed,
    an_operation_is_followed_until_it_ends,
);

/// Starts an operation that cancels the jobs of a kind. Nobody executes it, unless there is a server.
fn cancel(fixture: &Fixture, kind: &str) -> OperationId {
    let filter = JobFilter { kind: Some(kind.into()), ..JobFilter::default() };
    let operation = NewOperation::matching(Action::Cancel, filter).created_by("ada");
    fixture.with_client(async |client| client.start_operation(operation).await).id
}

/// An operation that is stopped before it has changed anything.
fn stopped(fixture: &Fixture, kind: &str) -> OperationId {
    let filter = JobFilter { kind: Some(kind.into()), ..JobFilter::default() };
    let operation = NewOperation::matching(Action::Cancel, filter).created_by("ada");
    let started = fixture.with_client(async |client| {
        let started = client.start_operation(operation).await?;
        client.stop_operation(started.id).await
    });
    assert_eq!(started.examined, 0);
    started.id
}

fn enqueue(fixture: &Fixture, count: u32) {
    fixture
        .with_client(async |client| client.enqueue_many((0..count).map(|n| NewJob::new("greet", &n))).await);
}

/// Executes operations, as a worker does.
fn execute(fixture: &Fixture) {
    fixture.with_client(async |client| client.run_operations(|_| std::future::ready(true)).await);
}

fn operations_are_listed_and_named_by_their_whole_id(fixture: &Fixture) {
    fixture.migrated();
    assert_eq!(fixture.run("operations list").ok().out, "no operations match\n");
    let (first, second) = (stopped(fixture, "greet"), stopped(fixture, "wave"));
    let listed = fixture.run("operations list --json").json();
    let ids = [0, 1].map(|nth| listed["operations"][nth]["id"].as_str().unwrap().to_owned());
    assert_eq!(ids, [second.to_string(), first.to_string()]);
    let page = fixture.run("operations list --limit 1 --state stopped");
    assert_eq!(page.code, 0, "{page:?}");
    let rows: Vec<&str> = page.out.lines().collect();
    assert_eq!(
        rows[0].split_whitespace().collect::<Vec<_>>(),
        ["ID", "ACTION", "STATE", "JOBS", "CHANGED", "SKIPPED", "AGE", "FILTER"]
    );
    assert!(rows[1].contains(&second.to_string()) && rows[1].contains(r#"{"kind":"wave"}"#), "{}", page.out);
    let next = format!("next page: longshore operations list --state stopped --limit 1 --cursor {second}");
    assert!(page.err.contains(&next), "{}", page.err);
    let page = fixture.run(&format!("operations list --cursor {second} --json")).json();
    assert_eq!(page["operations"][0]["id"], first.to_string());
    assert_eq!(fixture.run("operations list --state done").ok().out, "no operations match\n");

    let text = first.to_string();
    let shown = fixture.run(&format!("operations show {text}")).ok().out;
    assert!(shown.contains(&text), "{shown}");
    fixture.run(&format!("operations show {}", &text[..35])).fails_with(2, &["longshore operations list"]);
    fixture.run(&format!("operations show {UNKNOWN_ID}")).fails_with(3, &["longshore operations list"]);
}

fn an_operation_is_shown_stopped_and_resumed(fixture: &Fixture) {
    fixture.migrated();
    enqueue(fixture, 3);
    let id = stopped(fixture, "greet");
    let shown = fixture.run(&format!("operations show {id}")).ok();
    for line in [
        format!("operation  {id}"),
        "action     cancel".into(),
        "state      stopped".into(),
        "progress   0 of 3 jobs; 0 changed, 0 skipped".into(),
        r#"filter     {"kind":"greet"}"#.into(),
        "started by ada".into(),
    ] {
        assert!(shown.out.lines().any(|shown| shown == line), "{line}: {}", shown.out);
    }
    let again = fixture.run(&format!("operations stop {id}")).ok().out;
    assert_eq!(again, format!("stopped {id}: 0 of 3 jobs; 0 changed, 0 skipped\n"));
    let resumed = fixture.run(&format!("operations resume {id} --json")).json();
    assert!(["running", "done"].contains(&resumed["state"].as_str().unwrap()), "{resumed}");
    execute(fixture);
    let done = fixture.run(&format!("operations show {id} --follow --json")).ok().out;
    assert!(done.lines().last().unwrap().contains(r#""changed":3"#), "{done}");
    fixture.run(&format!("operations stop {id}")).fails_with(4, &["is done"]);
    fixture.run(&format!("operations resume {id}")).fails_with(4, &["is done"]);
    fixture.run(&format!("operations stop {UNKNOWN_ID}")).fails_with(3, &["does not exist"]);
}

fn an_operation_is_followed_until_it_ends(fixture: &Fixture) {
    fixture.migrated();
    enqueue(fixture, 250);
    let id = stopped(fixture, "greet");
    let followed = fixture.run(&format!("operations show {id} --follow"));
    assert_eq!((followed.code, followed.out.as_str()), (8, "stopped  0 of 250 jobs; 0 changed, 0 skipped\n"));
    let id = cancel(fixture, "greet");
    execute(fixture);
    let followed = fixture.run(&format!("operations show {id} --follow")).ok().out;
    assert_eq!(followed.lines().last().unwrap(), "done  250 of 250 jobs; 250 changed, 0 skipped");
    let cancelled = fixture.with_client(async |client| client.counts().await);
    assert!(cancelled.iter().all(|count| count.status == Status::Cancelled), "{cancelled:?}");
}
