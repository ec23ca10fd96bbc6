//! Races between operations on flows and on their members. Each case runs many rounds with two clients, as
//! two processes would have. After each round every member ends, and the database is consistent.

use std::sync::Arc;

use longshore::store::{ClaimRequest, Claimed, Fenced, GroupChange, NewChildren, Spawned};
use longshore::worker::{Settings, Worker};
use longshore::{
    Context, Ending, Failure, Flow, FlowId, FlowStatus, NewJob, Retention, Status, WorkerId, task,
};
use tokio::sync::Barrier;

use crate::fixture::*;
use crate::flows::{member, named};
use crate::locks::until_blocked_by;
use crate::races::{join, settle, spawn_at};
use crate::worker::{run_worker, until, until_status};

cases! {
    many_ends_at_once_are_counted_once,
    a_parent_that_ends_while_its_flow_is_cancelled_starts_nothing,
    a_parent_that_ends_after_the_flag_of_a_cancel_starts_nothing,
    a_parent_that_fails_while_its_flow_is_retried_keeps_or_reopens_its_children,
    a_task_that_is_retried_while_its_end_is_followed_runs_again,
    a_cancel_and_a_retry_of_one_flow_leave_nothing_waiting,
    a_task_that_is_deleted_while_its_flow_is_retried_holds_no_child,
    a_task_that_retention_removes_while_its_flow_is_retried_holds_no_child,
    children_that_are_spawned_while_they_are_cancelled_end,
    a_stale_lease_spawns_nothing,
    a_flow_that_is_sealed_while_its_last_member_ends_runs_its_callback_once,
    a_part_that_is_added_while_the_flow_is_sealed_is_refused_or_runs,
    a_join_and_the_end_of_the_last_child_never_miss_each_other,
    a_limit_of_a_group_that_is_lowered_during_a_claim_is_not_exceeded_afterwards,
}

cases! {
    only on postgres:
    a_failure_that_is_stored_after_a_retry_has_begun_is_followed_first,
}

const ROUNDS: usize = 15;

async fn put(fixture: &Fixture, flow: Flow) -> FlowId {
    fixture.enqueue_flow(flow).await.expect("enqueue_flow").id
}

async fn status(fixture: &Fixture, flow: FlowId) -> FlowStatus {
    fixture.flow(flow).await.expect("flow").status
}

/// Claims the due jobs and returns the one of this kind. The others are released.
async fn claim_kind(fixture: &Fixture, worker: WorkerId, kind: &str) -> Claimed {
    let mut found = None;
    for claimed in fixture.claim(worker, 100).await {
        if claimed.kind() == kind {
            found = Some(claimed);
        } else {
            fixture.must_finish(&claimed, not_started(&claimed)).await;
        }
    }
    found.unwrap_or_else(|| panic!("`{kind}` is not due"))
}

/// Runs two operations at the same moment.
async fn at_once<A: Send + 'static, B: Send + 'static>(
    one: impl Future<Output = A> + Send + 'static,
    other: impl Future<Output = B> + Send + 'static,
) -> (A, B) {
    let start = Arc::new(Barrier::new(2));
    let (one, other) = (spawn_at(&start, one), spawn_at(&start, other));
    (join(one).await, join(other).await)
}

async fn follow(fixture: &Fixture) {
    // Another client may have locked a flow. It follows the changes then.
    until("all changes are followed", || async {
        fixture.advance_flows().await.expect("advance_flows");
        fixture.query_number("select count(*) from flow_changes", None).await == 0
    })
    .await;
    let problems = fixture.check().await.expect("check").problems;
    assert_eq!(problems, []);
}

/// Runs all jobs with success until none is due, and returns their kinds.
async fn run_all(fixture: &Fixture, worker: WorkerId) -> Vec<String> {
    let mut ran = Vec::new();
    loop {
        follow(fixture).await;
        let claimed = fixture.claim(worker, 100).await;
        if claimed.is_empty() {
            return ran;
        }
        ran.extend(claimed.iter().map(|claimed| claimed.kind().to_owned()));
        for stored in settle(fixture.client(), claimed, done_without_result()).await {
            assert_eq!(stored, Fenced::Held);
        }
    }
}

/// Two clients end the members of one flow and follow the ends, each of them one by one.
async fn many_ends_at_once_are_counted_once(fixture: Fixture) {
    const TASKS: usize = 12;
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let tasks = (0..TASKS).map(|n| task(format!("t{n}"), job("part")));
        let flow = tasks.fold(Flow::new("f"), Flow::task);
        let flow = flow.task(named("last").after_all((0..TASKS).map(|n| format!("t{n}"))));
        let flow = put(&fixture, flow).await;
        let mut claimed = fixture.claim(worker, 100).await;
        let rest = claimed.split_off(TASKS / 2);
        let end = async |client: longshore::Client, claimed: Vec<Claimed>| {
            for claimed in claimed {
                settle(client.clone(), vec![claimed], done_without_result()).await;
                client.advance_flows().await.expect("advance_flows");
            }
        };
        tokio::join!(end(fixture.client(), claimed), end(other.clone(), rest));
        assert_eq!(run_all(&fixture, worker).await, ["last"], "round {round}");
        let ended = fixture.flow(flow).await.expect("flow");
        assert_eq!((ended.status, ended.open), (FlowStatus::Succeeded, 0), "round {round}");
    }
}

async fn a_parent_that_ends_while_its_flow_is_cancelled_starts_nothing(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let flow = Flow::new("f")
            .task(named("a"))
            .task(named("b").after_end("a"))
            .task(named("c").after("a"))
            .on_end(job("end"));
        let flow = put(&fixture, flow).await;
        let claimed = fixture.claim_one(worker).await;
        let ending = if round % 2 == 0 { done_without_result() } else { failed_permanently() };
        let client = fixture.client();
        let (settled, cancelled) =
            at_once(
                settle(other.clone(), vec![claimed], ending),
                async move { client.cancel_flow(flow).await },
            )
            .await;
        assert_eq!(settled, [Fenced::Held]);
        cancelled.expect("the flow cannot end before `b`");
        assert_eq!(run_all(&fixture, worker).await, ["end"], "round {round}");
        assert_eq!(status(&fixture, flow).await, FlowStatus::Cancelled);
    }
}

/// The walk over the members has not begun, and only the flag keeps the child from starting.
async fn a_parent_that_ends_after_the_flag_of_a_cancel_starts_nothing(fixture: Fixture) {
    let worker = fixture.worker().await;
    let flow = Flow::new("f").task(named("a")).task(named("b").after_end("a")).task(named("c").after("a"));
    let flow = put(&fixture, flow).await;
    let claimed = fixture.claim_one(worker).await;
    assert!(fixture.store().flag_cancelled(flow).await.expect("flag_cancelled"));
    fixture.must_finish(&claimed, done()).await;
    follow(&fixture).await;
    assert!(fixture.claim(worker, 9).await.is_empty());
    assert_eq!(status(&fixture, flow).await, FlowStatus::Cancelled);
    fixture.do_pending().await.expect("do_pending");
}

async fn a_parent_that_fails_while_its_flow_is_retried_keeps_or_reopens_its_children(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let flow = Flow::new("f")
            .task(named("bad"))
            .task(named("slow"))
            .task(named("next").after("slow"))
            .task(named("last").after("next").after("bad"));
        let flow = put(&fixture, flow).await;
        let bad = claim_kind(&fixture, worker, "bad").await;
        fixture.must_finish(&bad, failed_permanently()).await;
        follow(&fixture).await;
        let slow = claim_kind(&fixture, worker, "slow").await;
        let client = fixture.client();
        let (_, retried) = at_once(settle(other.clone(), vec![slow], failed_permanently()), async move {
            client.retry_flow(flow).await
        })
        .await;
        assert!(retried.expect("retry_flow").reopened >= 2, "`bad` and `last`");
        run_all(&fixture, worker).await;
        // What failed after the retry has begun may need another one.
        fixture.retry_flow(flow).await.expect("retry_flow");
        run_all(&fixture, worker).await;
        assert_eq!(status(&fixture, flow).await, FlowStatus::Succeeded, "round {round}");
        for task in fixture.tasks(flow, None, 9).await.expect("tasks") {
            assert_eq!(task.status, Status::Succeeded, "round {round}: {:?}", task.task);
        }
    }
}

/// The retry waits for the flow's lock. While it waits, a member fails: its end was not there when the
/// retry looked for changes.
async fn a_failure_that_is_stored_after_a_retry_has_begun_is_followed_first(fixture: Fixture) {
    // The retry waits for the flow, or between two of its statements: only the later one reads `jobs`.
    for what in ["flows in exclusive mode", "jobs in access exclusive mode"] {
        let worker = fixture.worker().await;
        let flow = Flow::new("f").task(named("bad")).task(named("slow")).task(named("next").after("slow"));
        let flow = put(&fixture, flow).await;
        let bad = claim_kind(&fixture, worker, "bad").await;
        fixture.must_finish(&bad, failed_permanently()).await;
        follow(&fixture).await;
        let slow = claim_kind(&fixture, worker, "slow").await;
        // Before the retry, which does not wait for the lock for long.
        let quiet = fixture.second_client().await;
        let nobody_follows = quiet.hold_advances().await;

        let mut lock = fixture.postgres().await;
        let statement = format!("begin; lock table {what}");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statement)).execute(&mut lock).await.expect("lock");
        let client = fixture.client();
        let retrying = tokio::spawn(async move { client.retry_flow(flow).await });
        until_blocked_by(&mut lock).await;
        assert_eq!(settle(quiet.clone(), vec![slow], failed_permanently()).await, [Fenced::Held]);
        sqlx::raw_sql("commit").execute(&mut lock).await.expect("unlock");

        // On a slow machine, the retry may have given up.
        let retried = retrying.await.expect("task");
        if retried.as_ref().is_err_and(|error| error.is_unavailable()) {
            fixture.retry_flow(flow).await.expect("retry_flow");
        } else {
            retried.expect("retry_flow");
        }
        drop(nobody_follows);
        let mut ran = run_all(&fixture, worker).await;
        if status(&fixture, flow).await == FlowStatus::Failed {
            // `slow` failed too late for this retry.
            assert_eq!(ran, ["bad"]);
            fixture.retry_flow(flow).await.expect("retry_flow");
            ran.extend(run_all(&fixture, worker).await);
        }
        assert_eq!(ran.last().map(String::as_str), Some("next"), "{ran:?}");
        ran.sort();
        assert_eq!(ran, ["bad", "next", "slow"], "{what}");
        assert_eq!(status(&fixture, flow).await, FlowStatus::Succeeded);
    }
}

async fn a_task_that_is_retried_while_its_end_is_followed_runs_again(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let flow = Flow::new("f")
            .task(named("a"))
            .task(named("b").after_end("a"))
            .task(named("c").after("a"))
            .on_end(job("end"));
        let flow = put(&fixture, flow).await;
        let claimed = fixture.claim_one(worker).await;
        let (client, a) = (fixture.client(), claimed.lease().id);
        let held = other.hold_advances().await;
        settle(other.clone(), vec![claimed], failed_permanently()).await;
        drop(held);
        let follower = other.clone();
        let (followed, retried) =
            at_once(async move { follower.advance_flows().await }, async move { client.retry(a).await })
                .await;
        followed.expect("advance_flows");
        retried.expect("retry");
        let ran = run_all(&fixture, worker).await;
        let times = |kind: &str| ran.iter().filter(|ran| *ran == kind).count();
        assert_eq!((times("a"), times("b"), times("end")), (1, 1, 1), "round {round}: {ran:?}");
        let ended = fixture.flow(flow).await.expect("flow");
        assert_eq!((ended.status, ended.open), (FlowStatus::Succeeded, 0), "round {round}");
    }
}

async fn a_cancel_and_a_retry_of_one_flow_leave_nothing_waiting(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let flow = Flow::new("f")
            .task(named("a"))
            .task(named("b").after("a"))
            .task(named("c").after("b"))
            .task(named("d"))
            .on_end(job("end"));
        let flow = put(&fixture, flow).await;
        let a = claim_kind(&fixture, worker, "a").await;
        fixture.must_finish(&a, failed_permanently()).await;
        follow(&fixture).await;
        let (client, other) = (fixture.client(), other.clone());
        let (cancelled, retried) =
            at_once(
                async move { client.cancel_flow(flow).await },
                async move { other.retry_flow(flow).await },
            )
            .await;
        cancelled.expect("the flow cannot end before `d`");
        retried.expect("retry_flow");
        let ran = run_all(&fixture, worker).await;
        assert_eq!(ran.iter().filter(|kind| *kind == "end").count(), 1, "round {round}: {ran:?}");
        let ended = fixture.flow(flow).await.expect("flow");
        assert!(ended.ended_at.is_some() && ended.open == 0, "round {round}: {ended:?}");
    }
}

/// A flow that has failed: `a` failed, and `b` and `c` were skipped.
async fn failed_flow(fixture: &Fixture, worker: WorkerId) -> FlowId {
    let flow =
        Flow::new("f").task(named("a")).task(named("b").after("a")).task(named("c").after("a").after("b"));
    let flow = put(fixture, flow).await;
    let a = fixture.claim_one(worker).await;
    fixture.must_finish(&a, failed_permanently()).await;
    follow(fixture).await;
    assert_eq!(status(fixture, flow).await, FlowStatus::Failed);
    flow
}

async fn a_task_that_is_deleted_while_its_flow_is_retried_holds_no_child(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..2 * ROUNDS {
        let flow = failed_flow(&fixture, worker).await;
        let a = member(&fixture, flow, "a").await;
        let (client, other) = (fixture.client(), other.clone());
        let (retried, deleted) =
            at_once(async move { client.retry_flow(flow).await }, async move { other.delete(a).await }).await;
        retried.expect("retry_flow");
        let ran = run_all(&fixture, worker).await;
        // The others need it, so they stay skipped.
        let expected = if deleted.is_ok() { 0 } else { 3 };
        assert_eq!(ran.len(), expected, "round {round}: {ran:?}, deleted: {deleted:?}");
        assert!(fixture.flow(flow).await.expect("flow").ended_at.is_some(), "round {round}");
    }
}

async fn a_task_that_retention_removes_while_its_flow_is_retried_holds_no_child(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(1000 * DAY).await, fixture.second_client().await);
    for round in 0..2 * ROUNDS {
        let flow = failed_flow(&fixture, worker).await;
        fixture.advance(2 * DAY).await;
        let (client, other) = (fixture.client(), other.clone());
        let (retried, retained) = at_once(async move { client.retry_flow(flow).await }, async move {
            let policy = Retention { succeeded: None, cancelled: None, failed_permanent: Some(DAY) };
            other.retain(&policy, |_| async { true }).await
        })
        .await;
        retried.expect("retry_flow");
        retained.expect("retain");
        let ran = run_all(&fixture, worker).await;
        let left = fixture.tasks(flow, None, 9).await.expect("tasks").len();
        let expected = if left == 3 { 3 } else { 0 };
        assert_eq!(ran.len(), expected, "round {round}: {ran:?}");
        assert!(fixture.flow(flow).await.expect("flow").ended_at.is_some(), "round {round}");
    }
}

async fn children_that_are_spawned_while_they_are_cancelled_end(fixture: Fixture) {
    async fn parent(_: (), ctx: Context<Arc<Barrier>>) -> Result<(), Failure> {
        ctx.spawn("first", [job("child").queue("children")]).await?;
        ctx.state().wait().await;
        ctx.spawn("second", (0..5).map(|_| job("child").queue("children"))).await
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let start = Arc::new(Barrier::new(2));
    let builder = Worker::builder(fixture.second_client().await).state(start.clone());
    let running = run_worker(builder.function("parent", parent)).await;
    for round in 0..ROUNDS {
        let id = fixture.add(NewJob::new("parent", &())).await;
        let flow = FlowId(id.0);
        start.wait().await;
        fixture.cancel_flow(flow).await.expect("cancel_flow");
        until("the parent and its children have ended", || async {
            let children = fixture.flow(flow).await.expect("flow");
            children.ended_at.is_some() && fixture.job(id).await.finished_at.is_some()
        })
        .await;
        let children = fixture.flow(flow).await.expect("flow");
        let spawned_both = fixture.status(id).await == Status::Succeeded;
        assert_eq!(children.members, if spawned_both { 6 } else { 1 }, "round {round}");
        assert_eq!((children.open, children.status), (0, FlowStatus::Cancelled), "round {round}");
    }
    running.stop().await;
    let worker = fixture.worker().await;
    assert!(fixture.claim_from("children", worker, 9).await.is_empty(), "no child is left");
}

async fn a_stale_lease_spawns_nothing(fixture: Fixture) {
    let worker = fixture.worker().await;
    let id = fixture.add(job("parent")).await;
    let stale = fixture.claim_one(worker).await;
    fixture.must_finish(&stale, Ending::Released).await;
    // The same worker has the job again, under another lease.
    let held = fixture.claim_one(worker).await;
    let spawn = async |claimed: &Claimed| {
        let children = NewChildren {
            lease: claimed.lease(),
            kind: "parent".into(),
            step: "children".into(),
            value: raw("1"),
            members: Vec::new(),
        };
        fixture.store().spawn(&children).await.expect("spawn")
    };
    assert_eq!(spawn(&stale).await, Spawned::LeaseLost);
    assert!(fixture.flow(FlowId(id.0)).await.expect_err("nothing is stored").is_not_found());
    assert!(fixture.steps(id).await.expect("steps").is_empty());
    assert_eq!(spawn(&held).await, Spawned::Stored);
    assert_eq!(fixture.steps(id).await.expect("steps").len(), 1);
    follow(&fixture).await;
}

async fn a_flow_that_is_sealed_while_its_last_member_ends_runs_its_callback_once(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let flow = put(&fixture, Flow::new("batch").open().on_end(job("end"))).await;
        fixture.add_to_flow(flow, [job("part")]).await.expect("add_to_flow");
        let last = fixture.claim_one(worker).await;
        let client = fixture.client();
        let (_, sealed) = at_once(settle(other.clone(), vec![last], done_without_result()), async move {
            client.seal_flow(flow).await
        })
        .await;
        sealed.expect("seal_flow");
        assert_eq!(run_all(&fixture, worker).await, ["end"], "round {round}");
        assert_eq!(status(&fixture, flow).await, FlowStatus::Succeeded);
    }
}

async fn a_part_that_is_added_while_the_flow_is_sealed_is_refused_or_runs(fixture: Fixture) {
    let (worker, other) = (fixture.worker().await, fixture.second_client().await);
    let mut refused = 0;
    for round in 0..ROUNDS {
        let flow = put(&fixture, Flow::new("batch").open().on_end(job("end"))).await;
        let (client, other) = (fixture.client(), other.clone());
        let (added, sealed) =
            at_once(async move { client.add_to_flow(flow, [job("part")]).await }, async move {
                other.seal_flow(flow).await
            })
            .await;
        sealed.expect("seal_flow");
        let mut expected = vec!["end"];
        match added {
            Ok(()) => expected.insert(0, "part"),
            Err(error) if error.is_conflict() => refused += 1,
            Err(error) => panic!("{error}"),
        }
        assert_eq!(run_all(&fixture, worker).await, expected, "round {round}");
        let ended = fixture.flow(flow).await.expect("flow");
        assert_eq!((ended.status, ended.members as usize), (FlowStatus::Succeeded, expected.len() - 1));
    }
    eprintln!("{refused} of {ROUNDS} parts were refused");
}

/// The last child ends while its parent is being suspended. The parent continues.
async fn a_join_and_the_end_of_the_last_child_never_miss_each_other(fixture: Fixture) {
    async fn parent(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.spawn("child", [job("child").queue("children")]).await?;
        ctx.join("joined").await?.results::<Option<()>>().map(drop)
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let settings = Settings { poll_interval: HOUR, max_poll_interval: HOUR, ..Settings::default() };
    let builder = Worker::builder(fixture.second_client().await).settings(settings);
    let running = run_worker(builder.function("parent", parent)).await;
    let worker = fixture.worker().await;
    for _ in 0..ROUNDS {
        let id = fixture.add(NewJob::new("parent", &())).await;
        let mut children = Vec::new();
        while children.is_empty() {
            children = fixture.claim_from("children", worker, 9).await;
        }
        settle(fixture.client(), children, done_without_result()).await;
        until_status(&fixture, id, Status::Succeeded).await;
    }
    running.stop().await;
}

/// In either order, running jobs count against the limit afterwards.
async fn a_limit_of_a_group_that_is_lowered_during_a_claim_is_not_exceeded_afterwards(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    let limit = |limit| GroupChange { limit: Some(Some(limit)), ..GroupChange::default() };
    for round in 0..ROUNDS {
        let queue = format!("q{round}");
        fixture.set_group(&queue, "acme", limit(3)).await.expect("set_group");
        let jobs = (0..4).map(|_| job("step").queue(queue.as_str()).group("acme"));
        fixture.enqueue_many(jobs).await.expect("enqueue");
        let request = ClaimRequest { queues: vec![queue.clone().into()], ..ClaimRequest::new(worker, 2) };
        let (client, claimer, copy) = (fixture.client(), other.clone(), request.clone());
        let lowered = limit(1);
        let (lowered, held) =
            at_once(async move { client.set_group(&queue, "acme", lowered).await }, async move {
                claimer.store().claim(&copy, &mut Default::default()).await
            })
            .await;
        lowered.expect("set_group");
        let mut held = held.expect("claim").jobs;
        let more = fixture.claim_with(&request).await;
        assert!(held.is_empty() || more.is_empty(), "{} more jobs next to {}", more.len(), held.len());
        held.extend(more);
        for done in settle(fixture.client(), held, done()).await {
            assert_eq!(done, Fenced::Held);
        }
        assert_eq!(fixture.claim_with(&request).await.len(), 1, "round {round}");
    }
}
