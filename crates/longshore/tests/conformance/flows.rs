//! Flows: jobs that wait for others, callbacks, parts, children, cancel, retry and deadlines.

use std::collections::BTreeMap;
use std::time::Duration;

use longshore::store::{Claimed, Fenced};
use longshore::worker::{Settings, Worker};
use longshore::{
    Client, Context, DeadFilter, Edit, Ending, Failure, Flow, FlowFilter, FlowId, FlowRecord, FlowStatus,
    JobId, NewJob, Report, Retention, Status, WorkerId, chain, fan_out, task,
};
use sqlx::Connection;

use crate::fixture::*;
use crate::worker::{run_worker, until, until_status};

cases! {
    a_task_starts_after_its_last_parent_has_succeeded,
    a_task_is_skipped_when_a_parent_does_not_succeed,
    conditions_select_what_runs_after_a_failure,
    a_skipped_task_does_not_make_the_flow_fail,
    callbacks_run_once_when_the_flow_has_ended,
    a_deep_cascade_ends_every_task,
    a_wide_fan_out_is_released_in_steps,
    a_held_task_keeps_its_time_group_and_priority,
    a_held_task_can_be_cancelled_and_edited_but_not_run,
    an_end_that_nobody_followed_is_followed_by_upkeep,
    a_stale_settle_changes_nothing_in_the_flow,
    a_task_that_retries_keeps_its_children_waiting,
    recovery_of_a_task_releases_or_skips_its_children,
    cancelling_a_flow_ends_all_of_its_members,
    a_cancelled_flow_without_failures_has_not_succeeded,
    a_cancel_that_was_cut_off_is_resumed,
    a_deadline_cancels_the_flow,
    a_retry_runs_only_the_failed_part,
    a_retry_reopens_callbacks_that_were_skipped,
    a_retried_task_opens_its_flow_again,
    a_task_that_was_retried_and_ended_again_is_followed_in_order,
    what_was_skipped_because_of_a_task_comes_back_with_it,
    nothing_comes_back_in_a_cancelled_flow,
    an_open_flow_grows_in_parts_and_ends_when_it_is_sealed,
    the_same_part_is_added_once,
    an_idempotency_key_returns_the_first_flow,
    a_flow_that_is_invalid_stores_nothing,
    retention_keeps_the_members_of_an_open_flow,
    retention_removes_ended_flows_and_their_links,
    retention_keeps_what_a_retry_of_the_flow_needs,
    a_task_that_was_skipped_stays_skipped_when_its_parent_is_gone,
    a_member_of_an_open_flow_cannot_be_deleted,
    children_read_the_results_of_their_parents,
    a_job_spawns_children_once_and_joins_them,
    a_job_that_starts_over_joins_only_the_children_of_this_run,
    a_join_needs_children_of_its_own,
    a_join_of_no_children_continues,
    children_of_a_task_do_not_release_the_tasks_that_wait_for_it,
    a_worker_runs_a_flow_from_its_first_to_its_last_task,
    flows_are_listed_newest_first,
    the_last_two_parents_release_a_child_once,
    a_flow_that_cannot_be_stored_delays_no_other,
    retention_keeps_the_children_of_a_job_that_waits,
    a_retried_task_is_not_cancelled_by_a_deadline_that_has_passed,
    a_retry_ends_a_cancel_that_is_under_way,
}

cases! {
    only on postgres:
    sql_enqueues_a_flow,
    sql_adds_no_task_after_one_that_was_retried_a_moment_ago,
    sql_cancel_and_retry_change_the_flow,
    a_flow_in_the_callers_transaction_exists_if_it_commits,
    a_flow_that_another_transaction_has_locked_delays_no_other,
}

fn named(name: &str) -> longshore::Task {
    task(name, job(name))
}

async fn put(fixture: &Fixture, flow: Flow) -> FlowRecord {
    fixture.enqueue_flow(flow).await.expect("enqueue_flow")
}

async fn follow(fixture: &Fixture) {
    fixture.advance_flows().await.expect("advance_flows");
}

async fn record(fixture: &Fixture, id: FlowId) -> FlowRecord {
    fixture.flow(id).await.expect("flow")
}

/// The status of each task, by name, with a word for those that are held or skipped.
async fn statuses(fixture: &Fixture, flow: FlowId) -> BTreeMap<String, &'static str> {
    follow(fixture).await;
    let tasks = fixture.tasks(flow, None, 1000).await.expect("tasks");
    let word = |task: &longshore::TaskRecord| match task {
        task if task.held => "held",
        task if task.skipped => "skipped",
        task => task.status.as_str(),
    };
    tasks.iter().map(|task| (task.task.clone().unwrap_or_else(|| task.id.to_string()), word(task))).collect()
}

async fn expect<const N: usize>(fixture: &Fixture, flow: FlowId, expected: [(&str, &'static str); N]) {
    let expected: BTreeMap<String, &str> =
        expected.into_iter().map(|(name, status)| (name.to_owned(), status)).collect();
    assert_eq!(statuses(fixture, flow).await, expected);
}

/// Claims the due jobs and ends those of this kind in the given way; releases the others.
async fn end(fixture: &Fixture, worker: WorkerId, kind: &str, ending: Ending) {
    follow(fixture).await;
    let claimed = fixture.claim(worker, 1000).await;
    let mut found = false;
    for claimed in &claimed {
        if claimed.kind() == kind {
            found = true;
            fixture.must_finish(claimed, ending.clone()).await;
        } else {
            fixture.must_finish(claimed, not_started(claimed)).await;
        }
    }
    assert!(found, "`{kind}` is not due, but {:?}", kinds(&claimed));
    follow(fixture).await;
}

async fn member(fixture: &Fixture, flow: FlowId, name: &str) -> JobId {
    let tasks = fixture.tasks(flow, None, 1000).await.expect("tasks");
    tasks.iter().find(|task| task.task.as_deref() == Some(name)).expect("a task").id
}

async fn a_task_starts_after_its_last_parent_has_succeeded(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b")).task(named("c").after("a").after("b"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    expect(&fixture, flow, [("a", "queued"), ("b", "queued"), ("c", "held")]).await;
    end(&fixture, worker, "a", done()).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "queued"), ("c", "held")]).await;
    end(&fixture, worker, "b", done_without_result()).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "succeeded"), ("c", "queued")]).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Running);
    end(&fixture, worker, "c", done()).await;
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.open, ended.failed, ended.members), (FlowStatus::Succeeded, 0, 0, 3));
    assert!(ended.ended_at.is_some());
}

async fn a_task_is_skipped_when_a_parent_does_not_succeed(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("a"))
        .task(named("b").after("a"))
        .task(named("c").after("b"))
        .task(named("other"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "a", failed_permanently()).await;
    let expected = [("a", "failed_permanent"), ("b", "skipped"), ("c", "skipped"), ("other", "queued")];
    expect(&fixture, flow, expected).await;
    let skipped = fixture.job(member(&fixture, flow, "c").await).await;
    assert_eq!(skipped.status, Status::Cancelled);
    assert_eq!(skipped.last_error.as_deref(), Some("skipped: task `b` did not succeed"));
    end(&fixture, worker, "other", done()).await;
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.failed), (FlowStatus::Failed, 1));
}

async fn conditions_select_what_runs_after_a_failure(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("work"))
        .task(named("next").after("work"))
        .task(named("always").after_end("work"))
        .task(named("undo").after_failure("work"))
        .task(named("undone").after("undo").after_end("next"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "work", failed_permanently()).await;
    expect(
        &fixture,
        flow,
        [
            ("work", "failed_permanent"),
            ("next", "skipped"),
            ("always", "queued"),
            ("undo", "queued"),
            ("undone", "held"),
        ],
    )
    .await;
    end(&fixture, worker, "undo", done()).await;
    end(&fixture, worker, "undone", done()).await;
    end(&fixture, worker, "always", done()).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
}

async fn a_skipped_task_does_not_make_the_flow_fail(fixture: Fixture) {
    let flow = Flow::new("f").task(named("work")).task(named("undo").after_failure("work"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "work", done()).await;
    expect(&fixture, flow, [("work", "succeeded"), ("undo", "skipped")]).await;
    let skipped = fixture.job(member(&fixture, flow, "undo").await).await;
    assert_eq!(skipped.last_error.as_deref(), Some("skipped: task `work` succeeded"));
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn callbacks_run_once_when_the_flow_has_ended(fixture: Fixture) {
    let flow = Flow::new("f")
        .task(named("a"))
        .task(named("b"))
        .on_end(job("ended"))
        .on_success(job("succeeded"))
        .on_failure(job("failed"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "a", done()).await;
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["b"]);
    fixture.crash_all_workers().await;
    fixture.advance(MINUTE).await;
    let worker = fixture.worker().await;
    end(&fixture, worker, "b", failed_permanently()).await;
    let claimed = fixture.claim(worker, 9).await;
    let mut found = kinds(&claimed);
    found.sort_unstable();
    assert_eq!(found, ["ended", "failed"]);
    for claimed in &claimed {
        fixture.must_finish(claimed, done()).await;
    }
    follow(&fixture).await;
    assert!(fixture.claim(worker, 9).await.is_empty());
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Failed);
}

async fn a_deep_cascade_ends_every_task(fixture: Fixture) {
    let tasks = (0..300).map(|n| named(&format!("t{n}")));
    let flow = put(&fixture, tasks.fold(Flow::new("deep"), Flow::then)).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "t0", failed_permanently()).await;
    let statuses = statuses(&fixture, flow).await;
    assert_eq!(statuses.values().filter(|status| **status == "skipped").count(), 299);
    assert_eq!(record(&fixture, flow).await.open, 0);
}

async fn a_wide_fan_out_is_released_in_steps(fixture: Fixture) {
    let children: Vec<_> = (0..4_500).map(|n| task(format!("c{n}"), job("child")).after("first")).collect();
    let flow = children.into_iter().fold(Flow::new("wide").task(named("first")), Flow::task);
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    end(&fixture, worker, "first", done()).await;
    let mut claimed = Vec::new();
    for _ in 0..5 {
        claimed.extend(fixture.claim(worker, 1000).await);
    }
    assert_eq!(claimed.len(), 4_500);
    let reports = claimed.iter().map(|claimed| Report {
        claimed,
        ending: done_without_result(),
        follow_ups: Vec::new(),
        has_progressed: false,
    });
    fixture.settle(reports.collect()).await.expect("settle");
    follow(&fixture).await;
    assert_eq!(record(&fixture, flow).await.status, FlowStatus::Succeeded);
}

async fn a_held_task_keeps_its_time_group_and_priority(fixture: Fixture) {
    let later = job("later").delay(HOUR).group("acme").priority(7).queue("slow");
    let flow = Flow::new("f").task(named("a")).task(task("later", later).after("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker_with(DAY).await;
    let due = fixture.now().await + HOUR;
    assert!(fixture.claim_from("slow", worker, 9).await.is_empty());
    end(&fixture, worker, "a", done()).await;
    let released = fixture.job(member(&fixture, flow, "later").await).await;
    assert_eq!((released.run_at, released.priority, released.group.as_deref()), (due, 7, Some("acme")));
    assert!(fixture.claim_from("slow", worker, 9).await.is_empty());
    fixture.advance(HOUR).await;
    let claimed = fixture.claim_from("slow", worker, 9).await;
    assert_eq!((kinds(&claimed), claimed[0].flow()), (vec!["later"], Some(flow)));
}

async fn a_held_task_can_be_cancelled_and_edited_but_not_run(fixture: Fixture) {
    let flow = Flow::new("f").task(named("a")).task(named("b").after("a")).task(named("c").after_end("b"));
    let flow = put(&fixture, flow).await.id;
    let held = member(&fixture, flow, "b").await;
    let refused = fixture.retry(held).await.expect_err("it is held");
    assert!(refused.is_conflict() && refused.to_string().contains("waits for other tasks"), "{refused}");
    fixture.edit(held, Edit::default().priority(3).when(longshore::When::NOW)).await.expect("edit");
    expect(&fixture, flow, [("a", "queued"), ("b", "held"), ("c", "held")]).await;
    assert_eq!(fixture.job(held).await.priority, 3);
    fixture.cancel(held).await.expect("cancel");
    expect(&fixture, flow, [("a", "queued"), ("b", "cancelled"), ("c", "queued")]).await;
}

async fn an_end_that_nobody_followed_is_followed_by_upkeep(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    // The process dies after the settle: another one has to follow it.
    let report = Report { claimed: &claimed, ending: done(), follow_ups: Vec::new(), has_progressed: false };
    let lonely = fixture.second_client().await;
    let _dead = lonely.hold_advances().await;
    lonely.settle(vec![report]).await.expect("settle");
    fixture.do_pending().await.expect("do_pending");
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["b"]);
    assert_eq!(record(&fixture, flow).await.open, 1);
}

async fn a_stale_settle_changes_nothing_in_the_flow(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker().await;
    let stale = fixture.claim_one(worker).await;
    fixture.crash_all_workers().await;
    assert_eq!(fixture.finish(&stale, done()).await, Fenced::LeaseLost);
    expect(&fixture, flow, [("a", "retrying"), ("b", "held")]).await;
    // A repeated settle is stored once.
    fixture.advance(MINUTE).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    for _ in 0..2 {
        fixture.must_finish(&claimed, done()).await;
        follow(&fixture).await;
    }
    assert_eq!(record(&fixture, flow).await.open, 1);
}

async fn a_task_that_retries_keeps_its_children_waiting(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("b")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    for ending in [failed(), snoozed(), Ending::Released] {
        end(&fixture, worker, "a", ending).await;
        assert_eq!(statuses(&fixture, flow).await["b"], "held");
        fixture.advance(MINUTE).await;
    }
    end(&fixture, worker, "a", done()).await;
    expect(&fixture, flow, [("a", "succeeded"), ("b", "queued")]).await;
}

async fn recovery_of_a_task_releases_or_skips_its_children(fixture: Fixture) {
    let flow =
        Flow::new("f").task(named("a")).task(named("b").after("a")).task(named("c").after_failure("a"));
    let flow = put(&fixture, flow).await.id;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    // The worker dies with a job whose cancel was requested, so recovery ends the job.
    fixture.cancel(claimed.lease().id).await.expect("cancel");
    assert_eq!(fixture.crash_all_workers().await.recovered, 1);
    expect(&fixture, flow, [("a", "cancelled"), ("b", "skipped"), ("c", "queued")]).await;
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
    fixture.store().cancel_members(flow, None, 2).await.expect("a first step");
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

async fn an_open_flow_grows_in_parts_and_ends_when_it_is_sealed(fixture: Fixture) {
    let batch = put(&fixture, Flow::new("batch").open().on_end(job("report"))).await.id;
    let worker = fixture.worker().await;
    for _ in 0..3 {
        fixture.add_to_flow(batch, (0..10).map(|_| job("part"))).await.expect("add_to_flow");
    }
    for claimed in fixture.claim(worker, 100).await {
        fixture.must_finish(&claimed, done_without_result()).await;
    }
    follow(&fixture).await;
    let open = record(&fixture, batch).await;
    assert_eq!((open.members, open.open, open.status), (30, 0, FlowStatus::Running));
    fixture.seal_flow(batch).await.expect("seal_flow");
    follow(&fixture).await;
    assert_eq!(record(&fixture, batch).await.status, FlowStatus::Succeeded);
    assert_eq!(kinds(&fixture.claim(worker, 9).await), ["report"]);
    let refused = fixture.add_to_flow(batch, [job("part")]).await.expect_err("it is sealed");
    assert!(refused.is_conflict(), "{refused}");
    assert!(fixture.seal_flow(FlowId::new()).await.expect_err("unknown").is_not_found());
}

async fn the_same_part_is_added_once(fixture: Fixture) {
    let batch = put(&fixture, Flow::new("batch").open()).await.id;
    let part: Vec<NewJob> = (0..3).map(|_| job("part")).collect();
    for _ in 0..2 {
        fixture.add_to_flow(batch, part.clone()).await.expect("add_to_flow");
    }
    assert_eq!(record(&fixture, batch).await.members, 3);
    let too_many = (0..10_001).map(|_| job("part"));
    let refused = fixture.add_to_flow(batch, too_many).await.expect_err("too many");
    assert_eq!(refused.field(), Some("jobs"), "{refused}");
    assert_eq!(record(&fixture, batch).await.members, 3);
}

async fn an_idempotency_key_returns_the_first_flow(fixture: Fixture) {
    let flow = || chain![named("a"), named("b")].idempotency_key("import-7");
    let first = put(&fixture, flow()).await;
    let second = put(&fixture, flow().name("another")).await;
    assert_eq!((second.id, second.name.as_str()), (first.id, "chain"));
    assert_eq!(fixture.count(Status::Queued).await, 2);
    // A repeated call with the same id, whose first reply was lost, stores nothing again.
    let repeated = Flow::new("again").task(named("x"));
    for _ in 0..2 {
        put(&fixture, repeated.clone()).await;
    }
    assert_eq!(fixture.count(Status::Queued).await, 3);
}

async fn a_flow_that_is_invalid_stores_nothing(fixture: Fixture) {
    let invalid = [
        ("after", Flow::new("f").task(named("a").after("b")).task(named("b").after("a"))),
        ("after", Flow::new("f").task(named("a").after("nobody"))),
        ("task", Flow::new("f").task(named("a")).task(named("a"))),
        ("task", Flow::new("f").task(named(&"x".repeat(129)))),
        ("name", Flow::new("").task(named("a"))),
        ("tasks", Flow::new("f")),
        ("group", Flow::new("f").task(task("a", job("a").group("x".repeat(129))))),
        ("unique_key", Flow::new("f").task(task("a", job("a").unique_key("k", Default::default())))),
        ("deadline", Flow::new("f").task(named("a")).deadline(Duration::ZERO)),
    ];
    for (field, flow) in invalid {
        let refused = fixture.enqueue_flow(flow).await.expect_err(field);
        assert_eq!(refused.field(), Some(field), "{refused}");
    }
    assert_eq!(fixture.flows(&FlowFilter::default()).await.expect("flows"), []);
    assert_eq!(fixture.count(Status::Queued).await, 0);
}

async fn retain(fixture: &Fixture) {
    let policy = Retention { succeeded: Some(DAY), cancelled: Some(DAY), failed_permanent: Some(DAY) };
    let never = |_| async { true };
    fixture.retain(&policy, never).await.expect("retain");
    fixture.remove_old_flows(&policy).await.expect("remove_old_flows");
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

async fn drain(
    client: Client,
    builder: impl FnOnce(longshore::worker::Builder) -> longshore::worker::Builder,
) {
    let worker = builder(Worker::builder(client)).build().expect("build");
    worker.drain().await.expect("drain");
}

async fn children_read_the_results_of_their_parents(fixture: Fixture) {
    async fn number(n: u32, ctx: Context) -> Result<(), Failure> {
        Ok(ctx.set_result(&n)?)
    }
    async fn sum(_: (), ctx: Context) -> Result<(), Failure> {
        let one: u32 = ctx.input("one").await?;
        let all: Vec<(String, u32)> = ctx.inputs().await?;
        assert_eq!(all.len(), 2);
        Ok(ctx.set_result(&(one * 100 + all.iter().map(|(_, n)| n).sum::<u32>()))?)
    }
    async fn wrong(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.input::<u32>("one").await.map(drop)
    }
    let flow = Flow::new("f")
        .task(task("one", NewJob::new("number", &1)))
        .task(task("two", NewJob::new("number", &2)))
        .task(task("sum", NewJob::new("sum", &())).after_all(["one", "two"]))
        .task(task("wrong", NewJob::new("wrong", &()).max_attempts(1)).after("two"));
    let flow = put(&fixture, flow).await.id;
    drain(fixture.client(), |worker| {
        worker.function("number", number).function("sum", sum).function("wrong", wrong)
    })
    .await;
    let sum = fixture.job(member(&fixture, flow, "sum").await).await;
    assert_eq!(sum.result.expect("a result").get(), "103");
    let wrong = fixture.job(member(&fixture, flow, "wrong").await).await;
    let error = wrong.last_error.expect("an error");
    assert!(error.contains("input `one`") && error.contains("it waits for `two`"), "{error}");
}

async fn a_job_spawns_children_once_and_joins_them(fixture: Fixture) {
    async fn parent(fails_first: bool, ctx: Context) -> Result<(), Failure> {
        ctx.spawn("small", (1..=3).map(|n| NewJob::new("child", &n))).await?;
        if fails_first && ctx.job().lease().lease_no == 1 {
            return Err(Failure::retry("after the spawn"));
        }
        let first: Vec<u32> = ctx.join("first").await?.results()?;
        ctx.spawn("large", [NewJob::new("child", &100)]).await?;
        let all = ctx.join("second").await?;
        assert_eq!((first, all.len(), all.failed().count()), (vec![10, 20, 30], 4, 0));
        Ok(ctx.set_result(&all.results::<u32>()?.iter().sum::<u32>())?)
    }
    async fn child(n: u32, ctx: Context) -> Result<(), Failure> {
        Ok(ctx.set_result(&(n * 10))?)
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    for fails_first in [false, true] {
        let retry = longshore::RetryPolicy::fixed(Duration::from_millis(1));
        let id = fixture.add(NewJob::new("parent", &fails_first).retry(retry)).await;
        let worker = Worker::builder(fixture.client()).function("parent", parent).function("child", child);
        let running = run_worker(worker).await;
        until_status(&fixture, id, Status::Succeeded).await;
        running.stop().await;
        let job = fixture.job(id).await;
        assert_eq!(job.result.expect("a result").get(), "1060");
        let children = record(&fixture, FlowId(id.0)).await;
        assert_eq!((children.members, children.open, children.name.as_str()), (4, 0, "parent"));
    }
}

async fn a_job_that_starts_over_joins_only_the_children_of_this_run(fixture: Fixture) {
    async fn parent(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.spawn("children", (0..2).map(|n| NewJob::new("child", &n))).await?;
        Ok(ctx.set_result(&ctx.join("joined").await?.len())?)
    }
    async fn child(_: u32, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let worker = Worker::builder(fixture.client()).function("parent", parent).function("child", child);
    let running = run_worker(worker).await;
    let id = fixture.add(NewJob::new("parent", &())).await;
    for run in 1..=2 {
        until_status(&fixture, id, Status::Succeeded).await;
        assert_eq!(fixture.job(id).await.result.expect("a result").get(), "2", "run {run}");
        assert_eq!(record(&fixture, FlowId(id.0)).await.members, 2 * run);
        if run == 1 {
            fixture.retry(id).await.expect("retry");
        }
    }
    running.stop().await;
}

async fn a_join_needs_children_of_its_own(fixture: Fixture) {
    async fn lonely(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.join("nobody").await.map(drop)
    }
    async fn nosy(of: JobId, ctx: Context) -> Result<(), Failure> {
        ctx.event::<()>(&format!("flow-ended:{of}")).await
    }
    let lonely_id = fixture.add(NewJob::new("lonely", &())).await;
    let nosy_id = fixture.add(NewJob::new("nosy", &lonely_id)).await;
    drain(fixture.client(), |worker| worker.function("lonely", lonely).function("nosy", nosy)).await;
    for id in [lonely_id, nosy_id] {
        let job = fixture.job(id).await;
        assert_eq!(job.status, Status::FailedPermanent);
        let error = job.last_error.expect("an error");
        assert!(error.contains("spawned itself"), "{error}");
    }
    let refused = fixture.emit(&format!("flow-ended:{lonely_id}"), &()).await.expect_err("reserved");
    assert_eq!(refused.field(), Some("name"));
}

async fn a_join_of_no_children_continues(fixture: Fixture) {
    async fn parent(parcels: u32, ctx: Context) -> Result<(), Failure> {
        ctx.spawn("first", (0..parcels).map(|n| NewJob::new("child", &n))).await?;
        ctx.join("first joined").await?;
        // The children had ended, and no other is added.
        ctx.spawn("second", [0; 0].map(|n| NewJob::new("child", &n))).await?;
        ctx.set_result(&ctx.join("second joined").await?.len())?;
        Ok(())
    }
    async fn child(_: u32, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let worker = Worker::builder(fixture.client()).function("parent", parent).function("child", child);
    let running = run_worker(worker).await;
    for parcels in [0, 2] {
        let id = fixture.add(NewJob::new("parent", &parcels)).await;
        until_status(&fixture, id, Status::Succeeded).await;
        assert_eq!(fixture.job(id).await.result.expect("a result").get(), parcels.to_string());
        assert_eq!(record(&fixture, FlowId(id.0)).await.status, FlowStatus::Succeeded);
    }
    running.stop().await;
}

async fn children_of_a_task_do_not_release_the_tasks_that_wait_for_it(fixture: Fixture) {
    async fn parent(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.spawn("children", [NewJob::new("child", &())]).await?;
        ctx.join("joined").await?;
        ctx.event::<()>("approved").await
    }
    async fn nothing(_: (), _: Context) -> Result<(), Failure> {
        Ok(())
    }
    let flow = chain![task("parent", NewJob::new("parent", &())), task("next", NewJob::new("next", &()))];
    let flow = put(&fixture, flow).await.id;
    let run = || {
        drain(fixture.client(), |worker| {
            worker.function("parent", parent).function("child", nothing).function("next", nothing)
        })
    };
    run().await;
    let parent = member(&fixture, flow, "parent").await;
    assert_eq!(record(&fixture, FlowId(parent.0)).await.status, FlowStatus::Succeeded);
    expect(&fixture, flow, [("parent", "queued"), ("next", "held")]).await;
    fixture.emit("approved", &()).await.expect("emit");
    run().await;
    expect(&fixture, flow, [("parent", "succeeded"), ("next", "succeeded")]).await;
}

async fn retention_keeps_the_children_of_a_job_that_waits(fixture: Fixture) {
    async fn parent(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.spawn("children", [NewJob::new("child", &())]).await?;
        ctx.event::<()>("approved").await?;
        Ok(ctx.set_result(&ctx.join("joined").await?.len())?)
    }
    async fn nothing(_: (), _: Context) -> Result<(), Failure> {
        Ok(())
    }
    let flow = chain![task("parent", NewJob::new("parent", &())), task("next", NewJob::new("next", &()))];
    let flow = put(&fixture, flow).await.id;
    let run = || {
        drain(fixture.client(), |worker| {
            worker.function("parent", parent).function("child", nothing).function("next", nothing)
        })
    };
    run().await;
    let parent = member(&fixture, flow, "parent").await;
    fixture.advance(3 * DAY).await;
    retain(&fixture).await;
    expect(&fixture, FlowId(parent.0), [("children", "succeeded")]).await;
    fixture.emit("approved", &()).await.expect("emit");
    run().await;
    expect(&fixture, flow, [("parent", "succeeded"), ("next", "succeeded")]).await;
    assert_eq!(fixture.job(parent).await.result.expect("a result").get(), "1");
    fixture.advance(3 * DAY).await;
    retain(&fixture).await;
    assert!(fixture.flow(FlowId(parent.0)).await.expect_err("removed").is_not_found());
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
    fixture.store().cancel_members(flow, None, 1000).await.expect("cancel_members");
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

async fn a_worker_runs_a_flow_from_its_first_to_its_last_task(fixture: Fixture) {
    async fn nothing(_: serde_json::Value, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let settings = Settings { poll_interval: MINUTE, max_poll_interval: MINUTE, ..Settings::default() };
    let worker = Worker::builder(fixture.client()).settings(settings).function("work", nothing);
    let running = run_worker(worker).await;
    // Found at once by a wake-up, not by a poll.
    let tasks = (0..10).map(|n| task(format!("t{n}"), job("work")));
    let flow = put(&fixture, tasks.fold(Flow::new("chain"), Flow::then)).await.id;
    until("the flow ends", || async { record(&fixture, flow).await.status == FlowStatus::Succeeded }).await;
    running.stop().await;
}

async fn flows_are_listed_newest_first(fixture: Fixture) {
    let mut ids = Vec::new();
    for name in ["a", "b", "a"] {
        ids.push(put(&fixture, Flow::new(name).task(named("t"))).await.id);
    }
    ids.reverse();
    let list = async |filter: FlowFilter| {
        let flows = fixture.flows(&filter).await.expect("flows");
        flows.into_iter().map(|flow| flow.id).collect::<Vec<_>>()
    };
    assert_eq!(list(FlowFilter::default()).await, ids);
    let named = FlowFilter { name: Some("a".into()), limit: 1, ..FlowFilter::default() };
    assert_eq!(list(named.clone()).await, [ids[0]]);
    assert_eq!(list(FlowFilter { before: Some(ids[0]), ..named }).await, [ids[2]]);
    fixture.cancel_flow(ids[1]).await.expect("cancel_flow");
    follow(&fixture).await;
    assert_eq!(list(FlowFilter { open: Some(true), ..FlowFilter::default() }).await, [ids[0], ids[2]]);
    assert_eq!(list(FlowFilter { open: Some(false), ..FlowFilter::default() }).await, [ids[1]]);
}

async fn the_last_two_parents_release_a_child_once(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..20 {
        let flow =
            Flow::new("f").task(named("a")).task(named("b")).task(named("c").after("a").after_end("b"));
        let flow = put(&fixture, flow).await.id;
        let worker = fixture.worker().await;
        let claimed = fixture.claim(worker, 9).await;
        let settle = async |client: Client, claimed: &Claimed| {
            let report = Report {
                claimed,
                ending: done_without_result(),
                follow_ups: Vec::new(),
                has_progressed: false,
            };
            client.settle(vec![report]).await.expect("settle");
            client.advance_flows().await.expect("advance_flows");
        };
        tokio::join!(settle(fixture.client(), &claimed[0]), settle(other.clone(), &claimed[1]));
        // The client that lost the race for the flow's lock leaves it to the other, which may still be at it.
        let released = || async { statuses(&fixture, flow).await["c"] == "queued" };
        until("the child is released", released).await;
        let last = fixture.claim_one(worker).await;
        fixture.must_finish(&last, done_without_result()).await;
        let has_ended = || async {
            follow(&fixture).await;
            record(&fixture, flow).await.status == FlowStatus::Succeeded
        };
        until("the flow ends", has_ended).await;
        assert!(fixture.claim(worker, 9).await.is_empty());
    }
}

async fn a_flow_that_cannot_be_stored_delays_no_other(fixture: Fixture) {
    let bad = put(&fixture, chain![named("a"), named("b")].name("bad")).await.id;
    let good = put(&fixture, chain![named("c"), named("d")]).await.id;
    let (refuse, accept) = match fixture.engine() {
        Engine::Postgres => (
            "create function refuse() returns trigger language plpgsql as
             $$ begin raise exception 'no'; end $$;
             create trigger refuse before update on flows for each row when (new.name = 'bad') execute function refuse()",
            "drop trigger refuse on flows",
        ),
        Engine::Sqlite => (
            "create trigger refuse before update on flows when new.name = 'bad'
             begin select raise(abort, 'no'); end",
            "drop trigger refuse",
        ),
    };
    fixture.sql(refuse, None).await;
    let worker = fixture.worker().await;
    for claimed in fixture.claim(worker, 9).await {
        fixture.must_finish(&claimed, done()).await;
    }
    expect(&fixture, good, [("c", "succeeded"), ("d", "queued")]).await;
    expect(&fixture, bad, [("a", "succeeded"), ("b", "held")]).await;
    fixture.sql(accept, None).await;
    expect(&fixture, bad, [("a", "succeeded"), ("b", "queued")]).await;
}

async fn sql_enqueues_a_flow(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    let flow = FlowId::new();
    let enqueue = |task: &str, after: &str| {
        format!("select enqueue('{task}', 'null', flow => '{flow}', task => '{task}', after => {after})")
    };
    let mut tx = connection.begin().await.expect("begin");
    for (task, after) in [("a", "null"), ("b", "array['a']"), ("c", "array['a', 'b']")] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(enqueue(task, after))).execute(&mut *tx).await.expect("enqueue");
    }
    tx.commit().await.expect("commit");
    expect(&fixture, flow, [("a", "queued"), ("b", "held"), ("c", "held")]).await;
    for (text, word) in [
        (enqueue("a", "null"), "task"),
        (enqueue("d", "array['x']"), "after"),
        ("select enqueue('d', 'null', task => 'd')".to_owned(), "flow"),
        (format!("select enqueue('d', 'null', flow => '{flow}', unique_key => 'k')"), "unique_key"),
    ] {
        let refused = fixture.try_sql(&text, None).await.expect_err(&text);
        assert!(refused.contains(&format!("{word}: ")), "{refused}");
    }
    let worker = fixture.worker().await;
    for kind in ["a", "b", "c"] {
        end(&fixture, worker, kind, done()).await;
    }
    let ended = record(&fixture, flow).await;
    assert_eq!((ended.status, ended.members), (FlowStatus::Succeeded, 3));
    let late = fixture.try_sql(&enqueue("late", "null"), None).await.expect_err("it has ended");
    assert!(late.contains("flow: "), "{late}");
}

/// The first end of the parent has not been followed, and must not release a task that is added afterwards.
async fn sql_adds_no_task_after_one_that_was_retried_a_moment_ago(fixture: Fixture) {
    let flow = put(&fixture, chain![named("a"), named("z")]).await.id;
    let worker = fixture.worker_with(DAY).await;
    let nobody_follows = fixture.hold_advances().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, done()).await;
    fixture.retry(claimed.lease().id).await.expect("retry");
    let add = format!("select enqueue('b', 'null', flow => '{flow}', task => 'b', after => array['a'])");
    let refused = fixture.try_sql(&add, None).await.expect_err("an end of `a` has not been followed");
    assert!(refused.contains("after: ") && refused.contains("try again"), "{refused}");
    drop(nobody_follows);
    follow(&fixture).await;
    fixture.sql(&add, None).await;
    expect(&fixture, flow, [("a", "queued"), ("z", "queued"), ("b", "held")]).await;
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

async fn a_flow_in_the_callers_transaction_exists_if_it_commits(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    for commits in [false, true] {
        let mut tx = connection.begin().await.expect("begin");
        let flow = chain![named("a"), named("b")].on_end(job("end"));
        let id = fixture.enqueue_flow_in(&mut tx, flow).await.expect("enqueue_flow_in");
        if commits {
            tx.commit().await.expect("commit");
            expect(&fixture, id, [("a", "queued"), ("b", "held")]).await;
        } else {
            tx.rollback().await.expect("rollback");
            assert!(fixture.flow(id).await.expect_err("rolled back").is_not_found());
        }
    }
}

async fn a_flow_that_another_transaction_has_locked_delays_no_other(fixture: Fixture) {
    let locked = put(&fixture, chain![named("a"), named("b")]).await.id;
    let free = put(&fixture, chain![named("c"), named("d")]).await.id;
    let worker = fixture.worker().await;
    let mut connection = fixture.postgres().await;
    let mut tx = connection.begin().await.expect("begin");
    let lock = format!("select enqueue('x', 'null', flow => '{locked}', task => 'x')");
    sqlx::raw_sql(sqlx::AssertSqlSafe(lock)).execute(&mut *tx).await.expect("lock");
    for claimed in fixture.claim(worker, 9).await {
        fixture.must_finish(&claimed, done()).await;
    }
    expect(&fixture, free, [("c", "succeeded"), ("d", "queued")]).await;
    assert_eq!(statuses(&fixture, locked).await["b"], "held");
    tx.commit().await.expect("commit");
    expect(&fixture, locked, [("a", "succeeded"), ("b", "queued"), ("x", "queued")]).await;
}
