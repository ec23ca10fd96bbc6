//! Commands on flows, deadlines and retention.

use longshore::store::Claimed;
use longshore::{DeadFilter, Ending, Flow, FlowId, FlowStatus, Retention, Status, chain, fan_out};

use crate::fixture::*;
use crate::flows::{end, expect, follow, member, named, put, record};

cases! {
    cancelling_a_flow_ends_all_of_its_members,
    a_cancelled_flow_without_failures_has_not_succeeded,
    a_cancel_that_was_cut_off_is_resumed,
    a_deadline_cancels_the_flow,
    a_retry_runs_only_the_failed_part,
    a_retry_runs_what_was_skipped_after_it_began,
    a_retry_brings_back_what_it_has_passed_by,
    a_task_that_comes_back_counts_at_once,
    an_event_does_not_start_a_task_that_waits_for_others,
    no_task_starts_while_a_parent_runs_again,
    a_retry_runs_what_a_cancel_ended_after_it_began,
    a_retry_of_a_long_chain_takes_one_step_per_task,
    a_flow_cannot_have_the_id_of_a_job,
    groups_of_cancelled_tasks_leave_no_turns,
    a_retry_reopens_callbacks_that_were_skipped,
    a_retried_task_opens_its_flow_again,
    a_task_that_was_retried_and_ended_again_is_followed_in_order,
    what_was_skipped_because_of_a_task_comes_back_with_it,
    nothing_comes_back_in_a_cancelled_flow,
    retention_keeps_the_members_of_an_open_flow,
    retention_removes_ended_flows_and_their_links,
    retention_keeps_what_a_retry_of_the_flow_needs,
    a_task_that_was_skipped_stays_skipped_when_its_parent_is_gone,
    a_member_of_an_open_flow_cannot_be_deleted,
    a_retried_task_is_not_cancelled_by_a_deadline_that_has_passed,
    a_retry_ends_a_cancel_that_is_under_way,
}

cases! {
    only on postgres:
    sql_refuses_the_id_of_a_job_as_a_flow,
    sql_cancel_and_retry_change_the_flow,
}

pub(crate) async fn retain(fixture: &Fixture) {
    let policy = Retention { succeeded: Some(DAY), cancelled: Some(DAY), failed_permanent: Some(DAY) };
    let never = |_| async { true };
    fixture.retain(&policy, never).await.expect("retain");
    fixture.remove_old_flows(&policy).await.expect("remove_old_flows");
}

async fn cancelling_a_flow_ends_all_of_its_members(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("running"))
        .task(named("due"))
        .task(named("held").after("running"))
        .task(named("after").after_end("running"))
        .on_failure(job("alert"))
        .on_success(job("party"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 1).await.remove(0);
    assert_eq!(claimed.kind(), "running");
    let cancelled = fixture.cancel_flow(flow).await.expect("cancel_flow");
    assert_eq!((cancelled.cancelled, cancelled.requested), (3, 1));
    expect(
        &fixture,
        flow,
        [("running", "running"), ("due", "skipped"), ("held", "skipped"), ("after", "skipped")],
    )
    .await;
    assert_eq!(fixture.store().cancels(worker).await.expect("cancels"), [claimed.lease()]);
    fixture.must_finish(&claimed, observed_cancel()).await;
    follow(&fixture).await;
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.open), (FlowStatus::Cancelled, 0));
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["alert"]);
    let again = fixture.cancel_flow(flow).await.expect_err("it has ended");
    assert!(again.is_conflict(), "{again}");
    assert!(fixture.cancel_flow(FlowId::new()).await.expect_err("unknown").is_not_found());
    // A flow that was left open ends too.
    let open = put(&fixture, Flow::new("open").open()).await.id;
    fixture.cancel_flow(open).await.expect("cancel_flow");
    follow(&fixture).await;
    assert_eq!(record(&fixture, open).await.status, FlowStatus::Cancelled);
    let refused = fixture.add_to_flow(open, [job("late")]).await.expect_err("it was cancelled");
    assert!(refused.is_conflict() && refused.to_string().contains("cancelled"), "{refused}");
}

async fn a_cancelled_flow_without_failures_has_not_succeeded(fixture: Fixture) {
    let flow = chain![named("a"), named("b")].on_success(job("party")).on_failure(job("alert"));
    let flow = put(&fixture, flow).await.id;
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    follow(&fixture).await;
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.failed), (FlowStatus::Cancelled, 0));
    let worker = fixture.worker().await;
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["alert"]);
}

async fn a_cancel_that_was_cut_off_is_resumed(fixture: Fixture) {
    let flow = put(&fixture, fan_out((0..5).map(|n| named(&format!("t{n}"))))).await.id;
    assert!(fixture.store().flag_cancelled(flow).await.expect("flag"));
    fixture.store().cancel_members(flow, None, 0, 2).await.expect("a first step");
    fixture.do_pending().await.expect("do_pending");
    assert_eq!(fixture.count(Status::Cancelled).await, 2, "the process may still be alive");
    fixture.advance(11 * SECOND).await;
    fixture.do_pending().await.expect("do_pending");
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Cancelled);
    assert_eq!(fixture.count(Status::Cancelled).await, 5);
}

async fn a_deadline_cancels_the_flow(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")].deadline(HOUR)).await;
    assert_eq!(flow.deadline, Some(fixture.now().await + HOUR));
    fixture.do_pending().await.expect("do_pending");
    assert_eq!(record(&fixture, flow.id).await.status, FlowStatus::Running);
    fixture.advance(HOUR).await;
    fixture.do_pending().await.expect("do_pending");
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow.id).await.status, FlowStatus::Cancelled);
}

async fn a_retry_runs_only_the_failed_part(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("ok"))
        .task(named("bad").after("ok"))
        .task(named("next").after("bad"))
        .task(named("last").after("next"))
        .task(named("undo").after_failure("ok"))
        .task(named("log").after_end("bad"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "ok", done()).await;
    end(&fixture, worker, "bad", failed_permanently()).await;
    end(&fixture, worker, "log", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.retry_flow(flow).await.expect("retry_flow").reopened, 3);
    let reopened = record(&fixture, flow).await;
    assert_eq!((reopened.status, reopened.open, reopened.failed), (FlowStatus::Running, 3, 0));
    expect(
        &fixture,
        flow,
        [
            ("ok", "succeeded"),
            ("bad", "queued"),
            ("next", "held"),
            ("last", "held"),
            ("undo", "skipped"),
            ("log", "succeeded"),
        ],
    )
    .await;
    for kind in ["bad", "next", "last"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    assert_eq!(fixture.retry_flow(flow).await.expect("retry_flow").reopened, 0);
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

/// What is skipped while a retry follows the failure counts as ended after the retry began.
async fn a_retry_runs_what_was_skipped_after_it_began(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let flow = put(&fixture, chain![named("a"), named("b"), named("c"), named("d")].on_success(job("party")))
        .await
        .id;
    let worker = fixture.worker_with(DAY).await;
    let nobody_follows = fixture.hold_advances().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, failed_permanently()).await;
    drop(nobody_follows);
    fixture.retry_flow(flow).await.expect("retry_flow");
    for kind in ["a", "b", "c", "d", "party"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

/// `b` was skipped because of `a`, but the retry sees it first, and does not know yet that `a` runs again.
async fn a_retry_brings_back_what_it_has_passed_by(fixture: Fixture) {
    let flow = Flow::new("f").task(named("b").after("a")).task(named("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    let before = fixture.store().now().await.expect("now");
    let mut after = None;
    for reopened in [0, 1] {
        let step = fixture.store().retry_members(flow, before, after, 1).await.expect("retry_members");
        assert_eq!(step.reopened, reopened);
        after = step.next;
    }
    for kind in ["a", "b"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

/// Other flows have so many changes that the end of a task is followed long before the return of another one.
async fn a_task_that_comes_back_counts_at_once(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b").after("a")).on_end(job("end"));
    let flow = put(&fixture, flow).await.id;
    let others = fixture
        .enqueue_flow(fan_out((0..9).map(|n| named(&format!("t{n}")))))
        .await
        .expect("enqueue_flow")
        .id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    end(&fixture, worker, "end", done()).await;
    let nobody_follows = fixture.hold_advances().await;
    let a = member(&fixture, flow, "a").await;
    fixture.retry(a).await.expect("retry");
    for claimed in fixture.claim(worker, 100).await {
        fixture.must_finish(&claimed, done()).await;
    }
    // One change at a time: the return of `a`, the ends of `a` and of the others, the return of `b`.
    for _ in 0..4 {
        fixture.store().advance(None, 1).await.expect("advance");
    }
    let open = record(&fixture, flow).await;
    assert_eq!((open.status, open.open > 0), (FlowStatus::Running, true), "`b` has come back");
    drop(nobody_follows);
    end(&fixture, worker, "b", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    assert_eq!(record(&fixture, others).await.status, FlowStatus::Succeeded);
}

async fn an_event_does_not_start_a_task_that_waits_for_others(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b").after_end("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", done()).await;
    let b = fixture.claim_one(worker).await;
    let wait = longshore::rules::lifecycle::PendingWait {
        step: "approval".into(),
        until: None,
        events: vec!["approved".into()],
    };
    fixture.must_finish(&b, Ending::Suspended { waits: vec![wait] }).await;
    fixture.retry(member(&fixture, flow, "a").await).await.expect("retry");
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    fixture.advance(MINUTE).await;
    fixture.retry_flow(flow).await.expect("retry_flow");
    expect(&fixture, flow, [("a", "queued"), ("b", "held")]).await;
    fixture.emit("approved", &()).await.expect("emit");
    expect(&fixture, flow, [("a", "queued"), ("b", "held")]).await;
    let due = fixture.claim(worker, 10).await;
    assert_eq!(due.iter().map(Claimed::kind).collect::<Vec<_>>(), ["a"]);
    fixture.must_finish(&due[0], done()).await;
    end(&fixture, worker, "b", done()).await;
}

/// One step closes at most 2,000 links, and reopened parents come first.
async fn no_task_starts_while_a_parent_runs_again(fixture: Fixture) {
    let tasks = (0..2500).map(|n| longshore::task(format!("t{n}"), job("part")).after("a").after("b"));
    let flow = tasks.fold(Flow::new("f").task(named("a")).task(named("b")), Flow::task);
    put(&fixture, flow).await;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", done()).await;
    let nobody_follows = fixture.hold_advances().await;
    let b = fixture.claim_one(worker).await;
    let a = fixture.query_number("select count(*) from finished", None).await;
    assert_eq!(a, 1);
    let flow = fixture.flows(&longshore::FlowFilter::default()).await.expect("flows")[0].id;
    fixture.retry(member_of(&fixture, flow, "a").await).await.expect("retry");
    fixture.must_finish(&b, done()).await;
    fixture.store().advance(None, 1000).await.expect("advance");
    drop(nobody_follows);
    follow(&fixture).await;
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["a"]);
}

/// Members are listed in the order of their ids, and there are more than one page has.
async fn member_of(fixture: &Fixture, flow: FlowId, name: &str) -> longshore::JobId {
    let (mut after, mut found) = (None, None);
    while found.is_none() {
        let page = fixture.tasks(flow, after, 1000).await.expect("tasks");
        found = page.iter().find(|task| task.task.as_deref() == Some(name)).map(|task| task.id);
        after = Some(page.last().expect("a page").id);
    }
    found.expect("a task")
}

async fn a_retry_runs_what_a_cancel_ended_after_it_began(fixture: Fixture) {
    let flow = put(&fixture, fan_out([named("a"), named("d")])).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    let before = fixture.now().await;
    fixture.advance(MINUTE).await;
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    follow(&fixture).await;
    let retried = fixture.store().retry_members(flow, before, None, 1000).await.expect("retry_members");
    assert_eq!(retried.reopened, 2);
    expect(&fixture, flow, [("a", "queued"), ("d", "queued")]).await;
}

/// The first of its tasks is the last that the rules look at.
async fn a_retry_of_a_long_chain_takes_one_step_per_task(fixture: Fixture) {
    const TASKS: usize = 5000;
    let tasks = (0..TASKS).rev().map(|n| {
        let node = longshore::task(format!("t{n}"), job("part"));
        if n == 0 { node } else { node.after(format!("t{}", n - 1)) }
    });
    let flow = put(&fixture, tasks.fold(Flow::new("f"), Flow::task)).await.id;
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    follow(&fixture).await;
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.retry_flow(flow).await.expect("retry_flow").reopened, TASKS as u64);
}

async fn a_flow_cannot_have_the_id_of_a_job(fixture: Fixture) {
    let job_id = fixture.add(job("a")).await;
    let refused = fixture.enqueue_flow(chain![named("a"), named("b")].id(FlowId(job_id.0))).await;
    let refused = refused.expect_err("a job has the id");
    assert!(refused.is_conflict() && refused.to_string().contains("id: "), "{refused}");
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn groups_of_cancelled_tasks_leave_no_turns(fixture: Fixture) {
    let tasks = |n: usize| longshore::task(format!("t{n}"), job("part").group(format!("g{n}")));
    let flow = fan_out([named("a")]).then_all((0..3).map(tasks));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    fixture.claim(worker, 9).await;
    fixture.cancel(member(&fixture, flow, "t0").await).await.expect("cancel");
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    fixture.claim(worker, 9).await;
    assert_eq!(fixture.query_number("select count(*) from turns", None).await, 0);
}

async fn a_retry_reopens_callbacks_that_were_skipped(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).on_success(job("party")).on_failure(job("alert"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    end(&fixture, worker, "alert", done()).await;
    fixture.advance(MINUTE).await;
    fixture.retry_flow(flow).await.expect("retry_flow");
    end(&fixture, worker, "a", done()).await;
    end(&fixture, worker, "party", done()).await;
    assert!(fixture.claim(worker, 9).await.is_empty(), "`alert` runs once");
}

async fn a_retried_task_opens_its_flow_again(fixture: Fixture) {
    let flow = put(&fixture, Flow::new("f").task(named("a")).task(named("b").after_end("a"))).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    end(&fixture, worker, "b", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
    let a = member(&fixture, flow, "a").await;
    fixture.retry(a).await.expect("retry");
    follow(&fixture).await;
    let open = record(&fixture, flow).await;
    assert_eq!((open.status, open.open, open.failed), (FlowStatus::Running, 1, 0));
    end(&fixture, worker, "a", failed_permanently()).await;
    // Both changes may be followed together.
    let redriven = fixture.redrive_all(&DeadFilter { limit: 9, ..DeadFilter::default() }).await;
    assert_eq!(redriven.expect("redrive_all"), 1);
    end(&fixture, worker, "a", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn a_task_that_was_retried_and_ended_again_is_followed_in_order(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    let nobody_follows = fixture.hold_advances().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, failed_permanently()).await;
    fixture.retry(claimed.lease().id).await.expect("retry");
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, done()).await;
    drop(nobody_follows);
    // `b` was skipped because of the first end, and came back.
    expect(&fixture, flow, [("a", "succeeded"), ("b", "queued")]).await;
    let open = record(&fixture, flow).await;
    assert_eq!((open.status, open.failed, open.open), (FlowStatus::Running, 0, 1));
}

async fn what_was_skipped_because_of_a_task_comes_back_with_it(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("other"))
        .task(named("a"))
        .task(named("b").after("a"))
        .task(named("c").after("b"))
        .task(named("d").after("b").after("other"))
        .task(named("undo").after_failure("a"))
        .on_success(job("party"))
        .on_failure(job("alert"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "other", failed_permanently()).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    end(&fixture, worker, "undo", done()).await;
    end(&fixture, worker, "alert", done()).await;
    fixture.retry(member(&fixture, flow, "a").await).await.expect("retry");
    // `d` also needs `other`, which has not come back.
    let reopened = [
        ("other", "failed_permanent"),
        ("a", "queued"),
        ("b", "held"),
        ("c", "held"),
        ("d", "skipped"),
        ("undo", "succeeded"),
    ];
    expect(&fixture, flow, reopened).await;
    fixture.retry(member(&fixture, flow, "other").await).await.expect("retry");
    for kind in ["other", "a", "b", "c", "d", "party"] {
        end(&fixture, worker, kind, done()).await;
    }
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
    assert!(fixture.claim(worker, 9).await.is_empty(), "`alert` and `undo` run once");
}

async fn nothing_comes_back_in_a_cancelled_flow(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")].on_success(job("party"))).await.id;
    let worker = fixture.worker_with(DAY).await;
    fixture.cancel_flow(flow).await.expect("cancel_flow");
    expect(&fixture, flow, [("a", "skipped"), ("b", "skipped")]).await;
    fixture.retry(member(&fixture, flow, "a").await).await.expect("retry");
    expect(&fixture, flow, [("a", "queued"), ("b", "skipped")]).await;
    end(&fixture, worker, "a", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Cancelled);
    assert!(fixture.claim(worker, 9).await.is_empty());
}

async fn retention_keeps_the_members_of_an_open_flow(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let batch = put(&fixture, Flow::new("batch").open()).await.id;
    fixture.add_to_flow(batch, [job("part")]).await.expect("add_to_flow");
    let worker = fixture.worker_with(100 * DAY).await;
    end(&fixture, worker, "a", done()).await;
    end(&fixture, worker, "part", done()).await;
    fixture.advance(3 * DAY).await;
    retain(&fixture).await;
    assert_eq!(fixture.tasks(batch, None, 9).await.expect("tasks").len(), 1);
    expect(&fixture, flow, [("a", "succeeded"), ("b", "queued")]).await;
    end(&fixture, worker, "b", done()).await;
    fixture.seal_flow(batch).await.expect("seal_flow");
    follow(&fixture).await;
    fixture.advance(2 * HOUR).await;
    retain(&fixture).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "succeeded")]).await;
    assert_eq!(fixture.tasks(batch, None, 9).await.expect("tasks").len(), 0, "`part` ended long ago");
    fixture.advance(DAY).await;
    retain(&fixture).await;
    assert!(fixture.flow(flow).await.expect_err("removed").is_not_found());
}

async fn retention_removes_ended_flows_and_their_links(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b").after("a")).on_end(job("end"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(100 * DAY).await;
    for kind in ["a", "b", "end"] {
        end(&fixture, worker, kind, done()).await;
    }
    fixture.advance(2 * DAY).await;
    retain(&fixture).await;
    assert!(fixture.flow(flow).await.expect_err("removed").is_not_found());
    assert_eq!(fixture.query_number("select count(*) from links", None).await, 0);
    assert_eq!(fixture.query_number("select count(*) from jobs", None).await, 0);
}

/// A retry of the failed part needs the results of the tasks before it, and those after it.
async fn retention_keeps_what_a_retry_of_the_flow_needs(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("ok"))
        .task(named("bad").after("ok"))
        .task(named("next").after("bad"))
        .task(named("undo").after_failure("ok"))
        .on_success(job("party"));
    let flow = put(&fixture, flow).await.id;
    let batch = put(&fixture, Flow::new("batch").task(named("one")).task(named("two"))).await.id;
    let worker = fixture.worker_with(1000 * DAY).await;
    end(&fixture, worker, "ok", done()).await;
    end(&fixture, worker, "bad", failed_permanently()).await;
    end(&fixture, worker, "one", done()).await;
    end(&fixture, worker, "two", failed_permanently()).await;
    let policy = Retention { succeeded: Some(DAY), cancelled: Some(DAY), failed_permanent: Some(9 * DAY) };
    let retain = || async {
        fixture.retain(&policy, |_| async { true }).await.expect("retain");
        fixture.remove_old_flows(&policy).await.expect("remove_old_flows");
    };
    fixture.advance(3 * DAY).await;
    retain().await;
    let kept = [("ok", "succeeded"), ("bad", "failed_permanent"), ("next", "skipped"), ("undo", "skipped")];
    expect(&fixture, flow, kept).await;
    expect(&fixture, batch, [("two", "failed_permanent")]).await;
    fixture.retry_flow(flow).await.expect("retry_flow");
    expect(&fixture, flow, [("ok", "succeeded"), ("bad", "queued"), ("next", "held"), ("undo", "skipped")])
        .await;
    for kind in ["bad", "next"] {
        end(&fixture, worker, kind, done()).await;
    }
    // It succeeded, so it is kept like a job that did. The callback has not run yet.
    fixture.advance(2 * DAY).await;
    retain().await;
    assert!(fixture.flow(flow).await.expect_err("removed").is_not_found());
    end(&fixture, worker, "party", done()).await;
    fixture.advance(9 * DAY).await;
    retain().await;
    assert!(fixture.flow(batch).await.expect_err("removed").is_not_found());
    assert_eq!(fixture.query_number("select count(*) from links", None).await, 0);
    assert_eq!(fixture.query_number("select count(*) from jobs", None).await, 0);
}

async fn a_task_that_was_skipped_stays_skipped_when_its_parent_is_gone(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("undo").after_failure("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", done()).await;
    fixture.delete(member(&fixture, flow, "a").await).await.expect("delete");
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.retry_flow(flow).await.expect("retry_flow").reopened, 0);
    expect(&fixture, flow, [("undo", "skipped")]).await;
}

async fn a_member_of_an_open_flow_cannot_be_deleted(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", done()).await;
    let a = member(&fixture, flow, "a").await;
    let refused = fixture.delete(a).await.expect_err("its flow is open");
    assert!(refused.is_conflict() && refused.to_string().contains("flow"), "{refused}");
    end(&fixture, worker, "b", done()).await;
    fixture.delete(a).await.expect("delete");
    fixture.delete(member(&fixture, flow, "b").await).await.expect("delete");
    assert_eq!(fixture.query_number("select count(*) from links", None).await, 0);
}

async fn a_retried_task_is_not_cancelled_by_a_deadline_that_has_passed(fixture: Fixture) {
    let flow = put(&fixture, Flow::new("f").task(named("a")).deadline(HOUR)).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    fixture.advance(2 * HOUR).await;
    fixture.retry(member(&fixture, flow, "a").await).await.expect("retry");
    follow(&fixture).await;
    fixture.do_pending().await.expect("do_pending");
    expect(&fixture, flow, [("a", "queued")]).await;
    assert_eq!(record(&fixture, flow).await.deadline, None);
}

async fn a_retry_ends_a_cancel_that_is_under_way(fixture: Fixture) {
    let flow = put(&fixture, fan_out([named("a"), named("b")])).await.id;
    let worker = fixture.worker_with(DAY).await;
    end(&fixture, worker, "a", failed_permanently()).await;
    assert!(fixture.store().flag_cancelled(flow).await.expect("flag"));
    fixture.retry_flow(flow).await.expect("retry_flow");
    fixture.store().cancel_members(flow, None, 0, 1000).await.expect("cancel_members");
    expect(&fixture, flow, [("a", "queued"), ("b", "queued")]).await;
    assert!(!record(&fixture, flow).await.cancelled);
    // A flow that ends during a cancel has nothing left to cancel.
    let other = put(&fixture, Flow::new("other").task(named("c"))).await.id;
    assert!(fixture.store().flag_cancelled(other).await.expect("flag"));
    end(&fixture, worker, "c", done()).await;
    assert_eq!(record(&fixture, other).await.status, FlowStatus::Cancelled);
    fixture.advance(MINUTE).await;
    assert_eq!(fixture.store().flows_to_cancel(9).await.expect("flows_to_cancel"), []);
}

async fn sql_refuses_the_id_of_a_job_as_a_flow(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let a = member(&fixture, flow, "a").await;
    let refused = fixture.try_sql("select enqueue('x', 'null', flow => {id}, task => 'x')", Some(a)).await;
    let refused = refused.expect_err("a job has the id");
    assert!(refused.contains("flow: a job has the id"), "{refused}");
    expect(&fixture, flow, [("a", "queued"), ("b", "held")]).await;
}

async fn sql_cancel_and_retry_change_the_flow(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b").after_end("a"));
    let flow = put(&fixture, flow).await.id;
    let (a, b) = (member(&fixture, flow, "a").await, member(&fixture, flow, "b").await);
    fixture.sql("select retry({id})", Some(b)).await;
    expect(&fixture, flow, [("a", "queued"), ("b", "held")]).await;
    fixture.sql("select cancel({id})", Some(a)).await;
    expect(&fixture, flow, [("a", "cancelled"), ("b", "queued")]).await;
    assert_eq!(record(&fixture, flow).await.failed, 1);
    fixture.sql("select retry({id})", Some(a)).await;
    follow(&fixture).await;
    let open = record(&fixture, flow).await;
    assert_eq!((open.open, open.failed), (2, 0));
}
