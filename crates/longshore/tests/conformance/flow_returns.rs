//! Members of flows that run again: their returns are followed before the ends of others.

use longshore::{Flow, FlowStatus, chain};

use crate::fixture::*;
use crate::flows::{end, expect, follow, member, named, put, record};
use crate::worker::until;

cases! {
    a_retry_of_a_flow_waits_until_the_return_of_a_parent_is_followed,
    no_task_starts_while_a_skipped_parent_comes_back,
    no_task_starts_while_the_return_of_a_parent_is_beyond_the_limit,
    an_end_that_was_undone_starts_nothing,
    an_undone_end_of_a_task_with_many_children_starts_none,
    a_flow_does_not_end_while_the_return_of_a_member_is_not_followed,
    a_sealed_flow_does_not_end_while_the_return_of_a_member_is_beyond_the_limit,
    a_cancelled_flow_that_is_open_again_can_be_cancelled,
    a_part_that_is_added_lets_its_client_follow_changes,
}

async fn a_retry_of_a_flow_waits_until_the_return_of_a_parent_is_followed(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", done()).await;
    end(&fixture, worker, "b", failed_permanently()).await;
    fixture.advance(MINUTE).await;
    let nobody_follows = fixture.hold_advances().await;
    fixture.retry(member(&fixture, flow, "a").await).await.expect("retry");
    let now = fixture.now().await;
    let step = fixture.store().retry_members(flow, now, None, 1000).await.expect("retry_members");
    assert!(step.advance_first && step.reopened == 0, "{step:?}");
    drop(nobody_follows);
    assert_eq!(fixture.retry_flow(flow).await.expect("retry_flow").reopened, 1);
    expect(&fixture, flow, [("a", "queued"), ("b", "held")]).await;
    for kind in ["a", "b"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

/// `b`, `c1`, `c2` and `c3` are a chain. `d` waits for the end of `c3`, and for `e`.
fn chain_before_d() -> Flow {
    Flow::new("f")
        .task(named("b"))
        .task(named("c1").after("b"))
        .task(named("c2").after("c1"))
        .task(named("c3").after("c2"))
        .task(named("e"))
        .task(named("d").after_end("c3").after("e"))
}

const D_WAITS: [(&str, &str); 6] =
    [("b", "queued"), ("c1", "held"), ("c2", "held"), ("c3", "held"), ("e", "succeeded"), ("d", "held")];

/// `c3` comes back three steps after `b`.
async fn no_task_starts_while_a_skipped_parent_comes_back(fixture: Fixture) {
    let flow = put(&fixture, chain_before_d()).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "b", failed_permanently()).await;
    let nobody_follows = fixture.hold_advances().await;
    let e = fixture.claim_one(worker).await;
    fixture.retry(member(&fixture, flow, "b").await).await.expect("retry");
    fixture.must_finish(&e, done()).await;
    drop(nobody_follows);
    expect(&fixture, flow, D_WAITS).await;
    for kind in ["b", "c1", "c2", "c3", "d"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn no_task_starts_while_the_return_of_a_parent_is_beyond_the_limit(fixture: Fixture) {
    let flow = put(&fixture, chain_before_d()).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "b", failed_permanently()).await;
    let nobody_follows = fixture.hold_advances().await;
    let e = fixture.claim_one(worker).await;
    fixture.must_finish(&e, done()).await;
    fixture.retry(member(&fixture, flow, "b").await).await.expect("retry");
    while fixture.store().advance(None, 1).await.expect("advance").more {}
    drop(nobody_follows);
    expect(&fixture, flow, D_WAITS).await;
}

/// `c1` was skipped, and comes back before anybody has followed that.
async fn an_end_that_was_undone_starts_nothing(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("b"))
        .task(named("c1").after("b"))
        .task(named("e"))
        .task(named("d").after_end("c1").after("e"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    let nobody_follows = fixture.hold_advances().await;
    for claimed in fixture.claim(worker, 9).await {
        let ending = if claimed.kind() == "b" { failed_permanently() } else { done() };
        fixture.must_finish(&claimed, ending).await;
    }
    fixture.store().advance(None, 1000).await.expect("advance");
    fixture.retry(member(&fixture, flow, "b").await).await.expect("retry");
    drop(nobody_follows);
    expect(&fixture, flow, [("b", "queued"), ("c1", "held"), ("e", "succeeded"), ("d", "held")]).await;
    for kind in ["b", "c1", "d"] {
        end(&fixture, worker, kind, done()).await;
    }
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.open, ended.failed), (FlowStatus::Succeeded, 0, 0));
}

/// One step closes at most 2,000 links, so the end alone would start some of these tasks.
async fn an_undone_end_of_a_task_with_many_children_starts_none(fixture: Fixture) {
    let tasks = (0..2500).map(|n| longshore::task(format!("t{n}"), job("part")).after("a"));
    put(&fixture, tasks.fold(Flow::new("f").task(named("a")), Flow::task)).await;
    let worker = fixture.worker_with(DAY).await;
    let nobody_follows = fixture.hold_advances().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, done()).await;
    fixture.retry(claimed.lease().id).await.expect("retry");
    fixture.store().advance(None, 1000).await.expect("advance");
    let due = fixture.claim(worker, 100).await;
    assert_eq!(kinds(&due), ["a"]);
    drop(nobody_follows);
    follow(&fixture).await;
}

/// The return is in the same step as the end before it, or beyond its limit.
async fn a_flow_does_not_end_while_the_return_of_a_member_is_not_followed(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    for limit in [1000, 1] {
        let flow = put(&fixture, Flow::new("f").task(named("a")).on_failure(job("alert"))).await.id;
        let nobody_follows = fixture.hold_advances().await;
        let claimed = fixture.claim_one(worker).await;
        fixture.must_finish(&claimed, failed_permanently()).await;
        fixture.retry(claimed.lease().id).await.expect("retry");
        fixture.store().advance(None, limit).await.expect("advance");
        assert_eq!(record(&fixture, flow).await.status, FlowStatus::Running, "limit {limit}");
        drop(nobody_follows);
        end(&fixture, worker, "a", done()).await;
        assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
        assert!(fixture.claim(worker, 9).await.is_empty(), "`alert` does not run");
    }
}

/// The step has the change that seals the flow, and the return of a member of another flow.
async fn a_sealed_flow_does_not_end_while_the_return_of_a_member_is_beyond_the_limit(fixture: Fixture) {
    let batch = put(&fixture, Flow::new("batch").open().on_end(job("end"))).await.id;
    let other = put(&fixture, Flow::new("other").task(named("a"))).await.id;
    fixture.add_to_flow(batch, [job("part")]).await.expect("add_to_flow");
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    end(&fixture, worker, "part", done()).await;
    let part = fixture.tasks(batch, None, 9).await.expect("tasks")[0].id;
    let a = member(&fixture, other, "a").await;
    let nobody_follows = fixture.hold_advances().await;
    fixture.seal_flow(batch).await.expect("seal_flow");
    fixture.retry(a).await.expect("retry");
    fixture.retry(part).await.expect("retry");
    fixture.store().advance(None, 1).await.expect("advance");
    assert_eq!(record(&fixture, batch).await.status, FlowStatus::Running);
    drop(nobody_follows);
    for kind in ["part", "end", "a"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, batch).await.status, FlowStatus::Succeeded);
}

async fn a_cancelled_flow_that_is_open_again_can_be_cancelled(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Cancelled);
    let other = fixture.second_client().await;
    let _does_not_follow = other.hold_advances().await;
    other.retry(member(&fixture, flow, "a").await).await.expect("retry");
    let cancelled = fixture.cancel_flow(flow).await.expect("it is open again");
    assert_eq!((cancelled.cancelled, cancelled.requested), (1, 0));
    expect(&fixture, flow, [("a", "skipped"), ("b", "skipped")]).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Cancelled);
    let again = fixture.cancel_flow(flow).await.expect_err("it has ended");
    assert!(again.is_conflict() && again.to_string().contains("ended as cancelled"), "{again}");
}

/// It holds the lock of the flow, so others leave the changes of the flow to it.
async fn a_part_that_is_added_lets_its_client_follow_changes(fixture: Fixture) {
    let batch = put(&fixture, Flow::new("batch").open()).await.id;
    fixture.add_to_flow(batch, [job("first")]).await.expect("add_to_flow");
    let other = fixture.second_client().await;
    let _does_not_follow = other.hold_advances().await;
    let first = fixture.tasks(batch, None, 9).await.expect("tasks")[0].id;
    other.cancel(first).await.expect("cancel");
    fixture.add_to_flow(batch, [job("second")]).await.expect("add_to_flow");
    until("the end is followed", || async {
        fixture.query_number("select count(*) from flow_changes", None).await == 0
    })
    .await;
    assert_eq!(record(&fixture, batch).await.open, 1);
}
