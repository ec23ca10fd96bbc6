//! The part of the consistency check about flows: each fault is planted with SQL, named by the
//! check, and removed by its remedy.

use longshore::{Flow, FlowStatus, Status, chain};

use crate::check::{assert_problems, assert_remedied, run_sql};
use crate::fixture::*;
use crate::flows::{end, expect, follow, member, named, put, record};

cases! {
    a_row_takes_the_flow_of_its_request,
    a_flow_that_does_not_exist_is_restored,
    a_flow_counts_its_open_members_again,
    a_flow_counts_its_failed_members_again,
    a_flow_without_open_members_ends,
    a_link_takes_the_end_of_its_parent,
    a_link_of_a_parent_that_has_not_ended_opens,
    an_open_link_without_a_parent_is_deleted,
    a_job_that_waits_for_nothing_starts,
    a_skipped_task_whose_parents_ended_as_required_is_retried,
    a_held_job_loses_its_due_time,
}

fn two() -> Flow {
    chain![named("first"), named("second")]
}

async fn a_row_takes_the_flow_of_its_request(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let first = member(&fixture, flow, "first").await;
    fixture.sql("update ready set flow = null where id = {id}", Some(first)).await;
    let other = format!("job {first} is in ready as a member of another flow than in jobs");
    assert_remedied(&fixture, &[other]).await;
    end(&fixture, fixture.worker().await, "first", done()).await;
    expect(&fixture, flow, [("first", "succeeded"), ("second", "queued")]).await;
}

async fn a_flow_that_does_not_exist_is_restored(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", done()).await;
    let (first, second) = (member(&fixture, flow, "first").await, member(&fixture, flow, "second").await);
    fixture.sql("delete from flows", None).await;
    let lost = |job| format!("job {job} is a member of flow {flow}, which does not exist");
    // Both remedies store the same flow.
    assert_remedied(&fixture, &[lost(first), lost(second)]).await;
    let restored = record(&fixture, flow).await;
    assert_eq!(
        (restored.name.as_str(), restored.members, restored.open, restored.failed),
        ("restored", 2, 1, 0)
    );
    end(&fixture, worker, "second", failed_permanently()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
}

async fn a_flow_counts_its_open_members_again(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.sql("update flows set open = open + 3", None).await;
    assert_remedied(&fixture, &[format!("flow {flow} counts 5 open members, but there are 2")]).await;
    // An end that was not followed counts.
    fixture.must_finish(&claimed, done()).await;
    fixture.sql("update flows set open = open + 4", None).await;
    assert_remedied(&fixture, &[format!("flow {flow} counts 5 open members, but there are 1")]).await;
    end(&fixture, worker, "second", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn a_flow_counts_its_failed_members_again(fixture: Fixture) {
    let flow = Flow::new("f").task(named("first")).task(named("second"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", failed_permanently()).await;
    fixture.sql("update flows set failed = 4", None).await;
    assert_remedied(&fixture, &[format!("flow {flow} counts 4 failed members, but there are 1")]).await;
    // A failure that was not followed counts.
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, failed_permanently()).await;
    fixture.sql("update flows set failed = failed + 3", None).await;
    assert_remedied(&fixture, &[format!("flow {flow} counts 5 failed members, but there are 2")]).await;
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.failed, 2);
}

async fn a_flow_without_open_members_ends(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", done()).await;
    end(&fixture, worker, "second", done()).await;
    fixture.sql("update flows set ended_at = null", None).await;
    let open = format!("flow {flow} has not ended, but it is sealed with 0 open members");
    assert_remedied(&fixture, &[open]).await;
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    fixture.sql("update flows set sealed = false", None).await;
    let ended = format!("flow {flow} has ended, but it is not sealed with 0 open members");
    assert_remedied(&fixture, &[ended]).await;
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Running);
}

async fn a_link_takes_the_end_of_its_parent(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("first"))
        .task(named("second").after("first"))
        .task(named("other").after_failure("first"))
        .on_success(job("party"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", done()).await;
    end(&fixture, worker, "second", done()).await;
    expect(&fixture, flow, [("first", "succeeded"), ("second", "succeeded"), ("other", "skipped")]).await;
    let met = "select count(*) from links where met";
    assert_eq!(fixture.query_number(met, None).await, 2);
    let first = member(&fixture, flow, "first").await;
    let (second, other) = (member(&fixture, flow, "second").await, member(&fixture, flow, "other").await);
    let open = |child| format!("the link from {first} to job {child} is open, but its parent has ended");
    fixture.sql("update links set met = null where parent = {id}", Some(first)).await;
    assert_remedied(&fixture, &[open(second), open(other)]).await;
    assert_eq!(fixture.query_number(met, None).await, 2);
    assert_eq!(fixture.query_number("select count(*) from links where not met", None).await, 1);
    // The parent of the callback is the flow.
    let party = fixture.claim_one(worker).await.lease().id;
    fixture.sql("update links set met = null where child = {id}", Some(party)).await;
    let open = format!("the link from {flow} to job {party} is open, but its parent has ended");
    assert_remedied(&fixture, &[open]).await;
    assert_eq!(fixture.query_number(met, None).await, 2);
}

async fn a_link_of_a_parent_that_has_not_ended_opens(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let (first, second) = (member(&fixture, flow, "first").await, member(&fixture, flow, "second").await);
    fixture.sql("update links set met = true", None).await;
    let closed = format!("the link from {first} to job {second} is closed, but its parent has not ended");
    let waits = format!("job {second} is held, but it waits for nothing");
    // The first remedy removes the reason of the second.
    let found = assert_problems(&fixture, &[closed, waits]).await;
    run_sql(&fixture, &found[0]).await;
    run_sql(&fixture, &found[1]).await;
    assert_problems(&fixture, &[]).await;
    expect(&fixture, flow, [("first", "queued"), ("second", "held")]).await;
    end(&fixture, fixture.worker().await, "first", done()).await;
    expect(&fixture, flow, [("first", "succeeded"), ("second", "queued")]).await;
}

async fn an_open_link_without_a_parent_is_deleted(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let second = member(&fixture, flow, "second").await;
    let absent = longshore::JobId::new();
    let insert = format!(
        "insert into links (parent, child, condition) values ({}, {{id}}, 'ended')",
        fixture.literal(absent.0)
    );
    fixture.sql(&insert, Some(second)).await;
    assert_remedied(&fixture, &[format!("the open link from {absent} to job {second} has no parent")]).await;
    assert_eq!(fixture.query_number("select count(*) from links", None).await, 1);
}

async fn a_job_that_waits_for_nothing_starts(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let second = member(&fixture, flow, "second").await;
    fixture.sql("delete from links", None).await;
    assert_remedied(&fixture, &[format!("job {second} is held, but it waits for nothing")]).await;
    assert_eq!(fixture.claim(fixture.worker().await, 9).await.len(), 2);
}

async fn a_skipped_task_whose_parents_ended_as_required_is_retried(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", failed_permanently()).await;
    let second = member(&fixture, flow, "second").await;
    assert_problems(&fixture, &[]).await;
    fixture.sql("update links set met = true", None).await;
    let skipped = format!("job {second} was skipped, but all tasks that it needs ended as it requires");
    let found = assert_problems(&fixture, &[skipped]).await;
    assert!(found[0].remedy.contains(&format!("`longshore jobs retry {second}`")), "{}", found[0].remedy);
    fixture.retry(second).await.expect("retry");
    follow(&fixture).await;
    assert_problems(&fixture, &[]).await;
    assert_eq!(fixture.status(second).await, Status::Queued);
}

async fn a_held_job_loses_its_due_time(fixture: Fixture) {
    let flow = put(&fixture, two()).await.id;
    let second = member(&fixture, flow, "second").await;
    fixture.sql("update ready set run_at = (select min(run_at) from ready)", None).await;
    assert_remedied(&fixture, &[format!("job {second} is held, but it has a due time")]).await;
    expect(&fixture, flow, [("first", "queued"), ("second", "held")]).await;
}
