//! Faults that a worker survives: handlers and hooks that panic or hang, and a database
//! that cannot store the end of an attempt at once.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use longshore::store::Claimed;
use longshore::worker::{Batched, Hooks, StopReason};
use longshore::{Context, Failure, Job, JobId, NewJob, Status, UniqueMode, WorkerId};
use serde::{Deserialize, Serialize};
use sqlx::{Connection, Executor};
use tokio::sync::Notify;

use crate::fixture::*;
use crate::worker::{Started, drain, nothing, run_worker, until, until_status, without_polling, worker};

cases! {
    a_panic_in_the_backoff_function_falls_back_to_the_retry_policy,
    a_handler_that_panics_when_dropped_fails_only_its_own_attempt,
    a_cancelled_job_does_not_cancel_the_rest_of_its_batch,
    a_batch_handler_receives_full_batches_even_with_one_slot,
    a_hanging_hook_is_stopped_by_the_timeout_of_the_job,
    a_hanging_stop_hook_is_stopped_after_the_grace_period,
    hooks_have_run_for_every_end_before_a_drain_returns,
    dropping_the_stopper_does_not_shorten_the_grace_period,
    jobs_of_a_limited_queue_run_one_after_another_without_polling,
}

cases! {
    only on postgres:
    a_locked_row_does_not_block_the_settle_of_other_jobs,
    a_database_that_refuses_writes_for_a_while_costs_no_attempt,
}

// ---- handlers --------------------------------------------------------------------

#[derive(Serialize, Deserialize)]
struct BackoffPanics {
    fails: bool,
}

impl Job for BackoffPanics {
    const KIND: &'static str = "panics";
    type State = ();

    fn backoff(_: u16) -> Option<Duration> {
        panic!("no such attempt")
    }

    async fn run(self, _: Context) -> Result<(), Failure> {
        if self.fails { Err("it failed".into()) } else { Ok(()) }
    }
}

async fn a_panic_in_the_backoff_function_falls_back_to_the_retry_policy(fixture: Fixture) {
    let fails = fixture.enqueue(BackoffPanics { fails: true }).await.expect("enqueue").id;
    let succeeds = fixture.enqueue(BackoffPanics { fails: false }).await.expect("enqueue").id;
    let running = run_worker(worker(&fixture).concurrency(1).register::<BackoffPanics>()).await;
    until_status(&fixture, succeeds, Status::Succeeded).await;
    until_status(&fixture, fails, Status::Retrying).await;
    running.stop().await;
    assert_eq!(fixture.job(fails).await.last_error.as_deref(), Some("it failed"));
}

struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            panic!("dropped");
        }
    }
}

async fn a_handler_that_panics_when_dropped_fails_only_its_own_attempt(fixture: Fixture) {
    let id = fixture.add(NewJob::new("panics", &()).timeout(Some(Duration::from_millis(50)))).await;
    let panics = |_: (), _: Context| async {
        let _guard = PanicsWhenDropped;
        std::future::pending().await
    };
    let builder = worker(&fixture).concurrency(1).function("panics", panics).function("mail", nothing);
    let running = run_worker(builder).await;
    until_status(&fixture, id, Status::Retrying).await;
    // The slot is free again.
    let next = fixture.enqueue_kind("mail").await;
    until_status(&fixture, next, Status::Succeeded).await;
    running.stop().await;
    assert_eq!(fixture.job(id).await.last_error.as_deref(), Some("timed out after 50ms"));
}

async fn a_cancelled_job_does_not_cancel_the_rest_of_its_batch(fixture: Fixture) {
    // On a slow machine, the cancel may come after the timeout. Such a round shows nothing.
    for _ in 0..10 {
        if cancel_one_of_a_batch(&fixture).await != StopReason::TimedOut {
            return;
        }
    }
    panic!("the job is never cancelled");
}

/// Returns why the cancelled job stopped.
async fn cancel_one_of_a_batch(fixture: &Fixture) -> StopReason {
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(fixture.add(NewJob::new("mail", &n).timeout(Some(5 * SECOND))).await);
    }
    let stopped = Arc::new(Mutex::new(Vec::<(JobId, StopReason)>::new()));
    let record = stopped.clone();
    let batch = move |jobs: Vec<Batched<u32>>| {
        for job in jobs {
            let (ctx, record) = (job.ctx.clone(), record.clone());
            tokio::spawn(async move {
                let reason = ctx.stopped().await;
                record.lock().expect("lock").push((ctx.id(), reason));
            });
        }
        std::future::pending::<Vec<Result<(), Failure>>>()
    };
    let builder = worker(fixture).concurrency(1).batch("mail", 3, batch);
    let running = run_worker(builder).await;
    until_status(fixture, ids[2], Status::Running).await;
    fixture.cancel(ids[0]).await.expect("cancel");
    for id in &ids[1..] {
        until_status(fixture, *id, Status::Retrying).await;
    }
    until_status(fixture, ids[0], Status::Cancelled).await;
    running.stop_now().await;
    let mut stopped = std::mem::take(&mut *stopped.lock().expect("lock"));
    stopped.sort_by_key(|(id, _)| *id);
    let why = stopped[0].1;
    if why != StopReason::TimedOut {
        let reasons = [StopReason::Cancelled, StopReason::TimedOut, StopReason::TimedOut];
        assert_eq!(stopped, ids.into_iter().zip(reasons).collect::<Vec<_>>());
    }
    why
}

async fn a_batch_handler_receives_full_batches_even_with_one_slot(fixture: Fixture) {
    fixture.enqueue_many((0..60).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = sizes.clone();
    let batch = move |jobs: Vec<Batched<u32>>| {
        seen.lock().expect("lock").push(jobs.len());
        async move { jobs.iter().map(|_| Ok(())).collect::<Vec<Result<(), Failure>>>() }
    };
    let builder = worker(&fixture).concurrency(1).batch("mail", 20, batch);
    let done = drain(builder).await;
    assert_eq!(done.succeeded, 60);
    // Ideally three batches. There may be more, because a batch starts with the jobs that
    // have been claimed when the slot becomes free.
    let sizes = sizes.lock().expect("lock");
    assert_eq!(sizes.iter().sum::<usize>(), 60);
    assert!(sizes.len() <= 10 && sizes.contains(&20), "{sizes:?}");
}

// ---- hooks -----------------------------------------------------------------------

#[derive(Default)]
struct SlowHooks {
    before_run: bool,
    on_worker_stop: bool,
    calls: Arc<AtomicUsize>,
}

#[async_trait]
impl Hooks for SlowHooks {
    async fn before_run(&self, _: &Claimed) -> Result<(), Failure> {
        if self.before_run { std::future::pending().await } else { Ok(()) }
    }

    async fn on_success(&self, _: &Claimed) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.calls.fetch_add(1, Ordering::SeqCst);
    }

    async fn on_worker_stop(&self, _: WorkerId) {
        if self.on_worker_stop {
            std::future::pending().await
        }
    }
}

async fn a_hanging_hook_is_stopped_by_the_timeout_of_the_job(fixture: Fixture) {
    let id = fixture.add(NewJob::new("mail", &()).timeout(Some(Duration::from_millis(50)))).await;
    let builder = worker(&fixture).hooks(SlowHooks { before_run: true, ..SlowHooks::default() });
    let running = run_worker(builder.function("mail", nothing)).await;
    until_status(&fixture, id, Status::Retrying).await;
    running.stop().await;
}

async fn a_hanging_stop_hook_is_stopped_after_the_grace_period(fixture: Fixture) {
    let builder = worker(&fixture).hooks(SlowHooks { on_worker_stop: true, ..SlowHooks::default() });
    let builder = builder.shutdown_grace(Duration::from_millis(50)).function("mail", nothing);
    let running = run_worker(builder).await;
    // Other hooks may take half a minute.
    let ended = tokio::time::timeout(25 * SECOND, running.stop()).await;
    assert!(ended.is_ok(), "the worker did not stop");
}

async fn hooks_have_run_for_every_end_before_a_drain_returns(fixture: Fixture) {
    fixture.enqueue_many((0..5).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let calls = Arc::new(AtomicUsize::new(0));
    let builder = worker(&fixture).hooks(SlowHooks { calls: calls.clone(), ..SlowHooks::default() });
    drain(builder.function("mail", nothing)).await;
    assert_eq!(calls.load(Ordering::SeqCst), 5);
}

// ---- stopping and waiting ----------------------------------------------------------

async fn dropping_the_stopper_does_not_shorten_the_grace_period(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let (started, go) = (Started::new(), Arc::new(Notify::new()));
    let (starts, released) = (started.clone(), go.clone());
    let slow = move |_: serde_json::Value, ctx: Context| {
        let released = released.clone();
        starts.increment();
        async move {
            tokio::select! {
                () = released.notified() => Ok(()),
                reason = ctx.stopped() => Err(format!("stopped: {reason:?}").into()),
            }
        }
    };
    let running =
        worker(&fixture).function("mail", slow).build().expect("build").start().await.expect("start");
    started.wait_for(1).await;
    let stopper = running.stopper();
    drop(running);
    stopper.stop();
    drop(stopper);
    go.notify_one();
    until_status(&fixture, id, Status::Succeeded).await;
    assert_eq!(fixture.job(id).await.lease_no, 1);
}

async fn jobs_of_a_limited_queue_run_one_after_another_without_polling(fixture: Fixture) {
    fixture.limit("serial", Some(1)).await.expect("limit");
    for queue in ["serial", "narrow"] {
        fixture.enqueue_many((0..5).map(|n| NewJob::new("mail", &n).queue(queue))).await.expect("enqueue");
    }
    let builder =
        without_polling(&fixture).queues(["serial", "narrow"]).queue_concurrency("narrow", 1).concurrency(8);
    let running = run_worker(builder.function("mail", nothing)).await;
    until("ten successes", || async { fixture.count(Status::Succeeded).await == 10 }).await;
    running.stop().await;
}

// ---- on Postgres -------------------------------------------------------------------

async fn a_locked_row_does_not_block_the_settle_of_other_jobs(fixture: Fixture) {
    let replacing = || NewJob::new("slow", &()).unique_key("key", UniqueMode::Replace);
    let held = fixture.enqueue(replacing()).await.expect("enqueue").id;
    let go = Arc::new(Notify::new());
    let released = go.clone();
    let slow = move |_: (), _: Context| {
        let released = released.clone();
        async move {
            released.notified().await;
            Ok(())
        }
    };
    let builder = worker(&fixture).function("slow", slow).function("mail", nothing);
    let running = run_worker(builder).await;
    until_status(&fixture, held, Status::Running).await;
    let mut connection = fixture.postgres().await;
    let mut tx = connection.begin().await.expect("begin");
    fixture.enqueue(replacing()).in_tx(&mut *tx).await.expect("enqueue");
    go.notify_one();
    let other = fixture.enqueue_kind("mail").await;
    until_status(&fixture, other, Status::Succeeded).await;
    assert_eq!(fixture.status(held).await, Status::Running, "its row is still locked");
    tx.rollback().await.expect("rollback");
    until_status(&fixture, held, Status::Succeeded).await;
    running.stop().await;
}

async fn a_database_that_refuses_writes_for_a_while_costs_no_attempt(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    // A sequence counts the refusals, because it is not rolled back.
    let read_only = "
        create sequence refusals;
        create function read_only() returns trigger language plpgsql as $$
          begin
            perform nextval(format('%I.refusals', tg_table_schema)::regclass);
            raise exception 'read-only' using errcode = '25006';
          end $$;
        create trigger read_only before insert on finished for each row execute function read_only()";
    connection.execute(read_only).await.expect("trigger");
    let id = fixture.add(NewJob::new("mail", &()).max_attempts(1)).await;
    let ran = Arc::new(AtomicUsize::new(0));
    let runs = ran.clone();
    let mail = move |_: (), _: Context| {
        runs.fetch_add(1, Ordering::SeqCst);
        async { Ok(()) }
    };
    let running =
        worker(&fixture).function("mail", mail).build().expect("build").start().await.expect("start");
    until("refused twice", || async {
        fixture.query_number("select last_value from refusals", None).await > 1
    })
    .await;
    assert_eq!(fixture.status(id).await, Status::Running);
    connection.execute("drop trigger read_only on finished").await.expect("drop");
    until_status(&fixture, id, Status::Succeeded).await;
    running.stop().await;
    assert_eq!(ran.load(Ordering::SeqCst), 1);
}
