//! Flows from inside a handler: results of other tasks, and children.

use std::time::Duration;

use longshore::worker::{Settings, Worker};
use longshore::{
    Client, Context, Failure, Flow, FlowId, FlowStatus, JobId, NewJob, Retention, Status, chain, task,
};

use crate::fixture::*;
use crate::flow_operations::retain;
use crate::flows::{expect, member, put, record};
use crate::worker::{run_worker, until, until_status};

cases! {
    children_read_the_results_of_their_parents,
    a_job_spawns_children_once_and_joins_them,
    a_job_that_starts_over_joins_only_the_children_of_this_run,
    a_join_after_a_retry_of_a_failed_job_finds_all_children_or_says_which_are_gone,
    a_join_that_has_ended_does_not_need_the_children_of_later_spawns,
    a_join_needs_children_of_its_own,
    a_join_of_no_children_continues,
    children_of_a_task_do_not_release_the_tasks_that_wait_for_it,
    retention_keeps_the_children_of_a_job_that_waits,
    a_worker_runs_a_flow_from_its_first_to_its_last_task,
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

async fn a_join_after_a_retry_of_a_failed_job_finds_all_children_or_says_which_are_gone(fixture: Fixture) {
    async fn parent(_: (), ctx: Context) -> Result<(), Failure> {
        ctx.spawn("children", (0..3).map(|n| NewJob::new("child", &n))).await?;
        let children = ctx.join("joined").await?.len();
        if ctx.job().lease().lease_no < 4 {
            return Err(Failure::permanent("not yet"));
        }
        Ok(ctx.set_result(&children)?)
    }
    async fn child(_: u32, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    let run = || drain(fixture.client(), |worker| worker.function("parent", parent).function("child", child));
    let id = fixture.add(NewJob::new("parent", &())).await;
    run().await;
    assert_eq!(fixture.status(id).await, Status::FailedPermanent);
    fixture.advance(3 * DAY).await;
    let policy = Retention { succeeded: Some(DAY), cancelled: Some(DAY), failed_permanent: Some(90 * DAY) };
    fixture.retain(&policy, |_| async { true }).await.expect("retain");
    for (expected, deleted) in
        [("not yet", 1), ("1 of the 3 children of spawn `children`", 2), ("3 of the 3", 0)]
    {
        fixture.retry(id).await.expect("retry");
        run().await;
        let error = fixture.job(id).await.last_error.expect("an error");
        assert!(error.contains(expected), "{error}");
        for child in fixture.tasks(FlowId(id.0), None, deleted.max(1)).await.expect("tasks") {
            fixture.delete(child.id).await.expect("delete");
        }
    }
}

async fn a_join_that_has_ended_does_not_need_the_children_of_later_spawns(fixture: Fixture) {
    async fn parent(_: (), ctx: Context) -> Result<(), Failure> {
        let mut joined = Vec::new();
        for round in ["a", "b"] {
            ctx.spawn(round, (0..2).map(|n| NewJob::new("child", &n))).await?;
            joined.push(ctx.join(&format!("{round} joined")).await?.len());
        }
        ctx.spawn("not joined", (0..2).map(|n| NewJob::new("child", &n))).await?;
        if ctx.job().lease().lease_no <= 3 {
            return Err(Failure::permanent("not yet"));
        }
        Ok(ctx.set_result(&joined)?)
    }
    async fn child(_: u32, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    let run = || drain(fixture.client(), |worker| worker.function("parent", parent).function("child", child));
    let id = fixture.add(NewJob::new("parent", &())).await;
    run().await;
    assert_eq!(fixture.job(id).await.last_error.as_deref(), Some("not yet"));
    let children = fixture.tasks(FlowId(id.0), None, 10).await.expect("tasks");
    let last = children.iter().rfind(|child| child.task.as_deref() == Some("not joined")).expect("a child");
    fixture.delete(last.id).await.expect("delete");
    fixture.retry(id).await.expect("retry");
    run().await;
    let job = fixture.job(id).await;
    assert_eq!(job.result.as_ref().map(|result| result.get()), Some("[2,4]"), "{:?}", job.last_error);
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
    // First the job, then its children.
    for time in [3 * DAY, 2 * HOUR] {
        fixture.advance(time).await;
        retain(&fixture).await;
    }
    assert!(fixture.flow(FlowId(parent.0)).await.expect_err("removed").is_not_found());
}

async fn a_worker_runs_a_flow_from_its_first_to_its_last_task(fixture: Fixture) {
    async fn nothing(_: serde_json::Value, _: Context) -> Result<(), Failure> {
        Ok(())
    }
    fixture.store().pin_clock(None).await.expect("pin_clock");
    let settings = Settings { poll_interval: HOUR, max_poll_interval: HOUR, ..Settings::default() };
    let worker = Worker::builder(fixture.client()).settings(settings).function("work", nothing);
    let running = run_worker(worker).await;
    // Found at once by a wake-up, not by a poll.
    let tasks = (0..10).map(|n| task(format!("t{n}"), job("work")));
    let flow = put(&fixture, tasks.fold(Flow::new("chain"), Flow::then)).await.id;
    until("the flow ends", || async { record(&fixture, flow).await.status == FlowStatus::Succeeded }).await;
    running.stop().await;
}
