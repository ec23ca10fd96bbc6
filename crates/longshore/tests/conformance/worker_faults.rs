//! What a worker survives: handlers and hooks that misbehave, and a database that
//! will not take an attempt's end at once.

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
use crate::worker::{Begun, nothing, patient, until, until_status, worker};

cases! {
    a_backoff_that_panics_leaves_it_to_the_policy,
    a_handler_that_panics_when_dropped_costs_its_own_attempt_only,
    a_cancelled_job_takes_none_of_its_batch_along,
    a_batch_handler_gets_batches_however_few_its_slots,
    a_hook_that_hangs_has_no_longer_than_the_job,
    a_stop_hook_that_hangs_ends_with_the_grace,
    hooks_have_heard_of_every_end_before_a_drain_returns,
    nobody_left_to_ask_for_haste_leaves_the_grace,
    jobs_of_a_limited_queue_follow_one_another_without_a_poll,
}

cases! {
    only on postgres:
    a_locked_row_holds_up_no_other_end,
    a_database_that_takes_no_writes_for_a_while_costs_nobody_an_attempt,
}

// ---- handlers --------------------------------------------------------------------

#[derive(Serialize, Deserialize)]
struct Rash {
    fails: bool,
}

impl Job for Rash {
    const KIND: &'static str = "rash";
    type State = ();

    fn backoff(_: u16) -> Option<Duration> {
        panic!("no such attempt")
    }

    async fn run(self, _: Context) -> Result<(), Failure> {
        if self.fails { Err("it failed".into()) } else { Ok(()) }
    }
}

async fn a_backoff_that_panics_leaves_it_to_the_policy(fixture: Fixture) {
    let fails = fixture.enqueue(Rash { fails: true }).await.expect("enqueue").id;
    let succeeds = fixture.enqueue(Rash { fails: false }).await.expect("enqueue").id;
    let running = worker(&fixture)
        .concurrency(1)
        .register::<Rash>()
        .build()
        .expect("build")
        .start()
        .await
        .expect("start");
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

async fn a_handler_that_panics_when_dropped_costs_its_own_attempt_only(fixture: Fixture) {
    let id = fixture.add(NewJob::new("rash", &()).timeout(Some(Duration::from_millis(50)))).await;
    let rash = |_: (), _: Context| async {
        let _held = PanicsWhenDropped;
        std::future::pending().await
    };
    let builder = worker(&fixture).concurrency(1).function("rash", rash).function("mail", nothing);
    let running = builder.build().expect("build").start().await.expect("start");
    until_status(&fixture, id, Status::Retrying).await;
    // Its slot is free again.
    let next = fixture.enqueue_kind("mail").await;
    until_status(&fixture, next, Status::Succeeded).await;
    running.stop().await;
    assert_eq!(fixture.job(id).await.last_error.as_deref(), Some("timed out after 50ms"));
}

async fn a_cancelled_job_takes_none_of_its_batch_along(fixture: Fixture) {
    let mut ids = Vec::new();
    for n in 0..3 {
        ids.push(fixture.add(NewJob::new("mail", &n).timeout(Some(SECOND))).await);
    }
    let told = Arc::new(Mutex::new(Vec::<(JobId, StopReason)>::new()));
    let tell = told.clone();
    let batch = move |jobs: Vec<Batched<u32>>| {
        for job in jobs {
            let (ctx, tell) = (job.ctx.clone(), tell.clone());
            tokio::spawn(async move {
                let reason = ctx.stopped().await;
                tell.lock().expect("lock").push((ctx.id(), reason));
            });
        }
        std::future::pending::<Vec<Result<(), Failure>>>()
    };
    let builder = worker(&fixture).concurrency(1).batch("mail", 3, batch);
    let running = builder.build().expect("build").start().await.expect("start");
    until_status(&fixture, ids[2], Status::Running).await;
    fixture.cancel(ids[0]).await.expect("cancel");
    for id in &ids[1..] {
        until_status(&fixture, *id, Status::Retrying).await;
    }
    until_status(&fixture, ids[0], Status::Cancelled).await;
    running.stop_now().await;
    let mut told = std::mem::take(&mut *told.lock().expect("lock"));
    told.sort_by_key(|(id, _)| *id);
    let reasons = [StopReason::Cancelled, StopReason::TimedOut, StopReason::TimedOut];
    assert_eq!(told, ids.into_iter().zip(reasons).collect::<Vec<_>>());
}

async fn a_batch_handler_gets_batches_however_few_its_slots(fixture: Fixture) {
    fixture.enqueue_many((0..60).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = sizes.clone();
    let batch = move |jobs: Vec<Batched<u32>>| {
        seen.lock().expect("lock").push(jobs.len());
        async move { jobs.iter().map(|_| Ok(())).collect::<Vec<Result<(), Failure>>>() }
    };
    let builder = worker(&fixture).concurrency(1).batch("mail", 20, batch);
    let done = builder.build().expect("build").drain().await.expect("drain");
    assert_eq!(done.succeeded, 60);
    // Three where nothing else runs; how a claim's answer meets a free slot is
    // not ours to say.
    let sizes = sizes.lock().expect("lock");
    assert_eq!(sizes.iter().sum::<usize>(), 60);
    assert!(sizes.len() <= 10 && sizes.contains(&20), "{sizes:?}");
}

// ---- hooks -----------------------------------------------------------------------

#[derive(Default)]
struct Slow {
    before_run: bool,
    on_worker_stop: bool,
    heard: Arc<AtomicUsize>,
}

#[async_trait]
impl Hooks for Slow {
    async fn before_run(&self, _: &Claimed) -> Result<(), Failure> {
        if self.before_run { std::future::pending().await } else { Ok(()) }
    }

    async fn on_success(&self, _: &Claimed) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        self.heard.fetch_add(1, Ordering::SeqCst);
    }

    async fn on_worker_stop(&self, _: WorkerId) {
        if self.on_worker_stop {
            std::future::pending().await
        }
    }
}

async fn a_hook_that_hangs_has_no_longer_than_the_job(fixture: Fixture) {
    let id = fixture.add(NewJob::new("mail", &()).timeout(Some(Duration::from_millis(50)))).await;
    let builder = worker(&fixture).hooks(Slow { before_run: true, ..Slow::default() });
    let running = builder.function("mail", nothing).build().expect("build").start().await.expect("start");
    until_status(&fixture, id, Status::Retrying).await;
    running.stop().await;
}

async fn a_stop_hook_that_hangs_ends_with_the_grace(fixture: Fixture) {
    let builder = worker(&fixture).hooks(Slow { on_worker_stop: true, ..Slow::default() });
    let builder = builder.shutdown_grace(Duration::from_millis(50)).function("mail", nothing);
    let running = builder.build().expect("build").start().await.expect("start");
    let ended = tokio::time::timeout(20 * SECOND, running.stop()).await;
    assert!(ended.is_ok(), "it never ended");
}

async fn hooks_have_heard_of_every_end_before_a_drain_returns(fixture: Fixture) {
    fixture.enqueue_many((0..5).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let heard = Arc::new(AtomicUsize::new(0));
    let builder = worker(&fixture).hooks(Slow { heard: heard.clone(), ..Slow::default() });
    builder.function("mail", nothing).build().expect("build").drain().await.expect("drain");
    assert_eq!(heard.load(Ordering::SeqCst), 5);
}

// ---- stops and stalls --------------------------------------------------------------

async fn nobody_left_to_ask_for_haste_leaves_the_grace(fixture: Fixture) {
    let id = fixture.enqueue_kind("mail").await;
    let (begun, go) = (Begun::none(), Arc::new(Notify::new()));
    let (begins, gone) = (begun.clone(), go.clone());
    let slow = move |_: serde_json::Value, ctx: Context| {
        let gone = gone.clone();
        begins.count();
        async move {
            tokio::select! {
                () = gone.notified() => Ok(()),
                reason = ctx.stopped() => Err(format!("told to stop: {reason:?}").into()),
            }
        }
    };
    let running =
        worker(&fixture).function("mail", slow).build().expect("build").start().await.expect("start");
    begun.so_many(1).await;
    let stopper = running.stopper();
    drop(running);
    stopper.stop();
    drop(stopper);
    go.notify_one();
    until_status(&fixture, id, Status::Succeeded).await;
    assert_eq!(fixture.job(id).await.lease_no, 1);
}

async fn jobs_of_a_limited_queue_follow_one_another_without_a_poll(fixture: Fixture) {
    fixture.limit("serial", Some(1)).await.expect("limit");
    for queue in ["serial", "narrow"] {
        fixture.enqueue_many((0..5).map(|n| NewJob::new("mail", &n).queue(queue))).await.expect("enqueue");
    }
    let builder =
        patient(&fixture).queues(["serial", "narrow"]).queue_concurrency("narrow", 1).concurrency(8);
    let running = builder.function("mail", nothing).build().expect("build").start().await.expect("start");
    until("ten successes", || async { fixture.count(Status::Succeeded).await == 10 }).await;
    running.stop().await;
}

// ---- on Postgres -------------------------------------------------------------------

async fn a_locked_row_holds_up_no_other_end(fixture: Fixture) {
    let replacing = || NewJob::new("slow", &()).unique_key("key", UniqueMode::Replace);
    let held = fixture.enqueue(replacing()).await.expect("enqueue").id;
    let go = Arc::new(Notify::new());
    let gone = go.clone();
    let slow = move |_: (), _: Context| {
        let gone = gone.clone();
        async move {
            gone.notified().await;
            Ok(())
        }
    };
    let builder = worker(&fixture).function("slow", slow).function("mail", nothing);
    let running = builder.build().expect("build").start().await.expect("start");
    until_status(&fixture, held, Status::Running).await;
    let mut connection = fixture.postgres().await;
    let mut tx = connection.begin().await.expect("begin");
    fixture.enqueue(replacing()).in_tx(&mut *tx).await.expect("enqueue");
    go.notify_one();
    let other = fixture.enqueue_kind("mail").await;
    until_status(&fixture, other, Status::Succeeded).await;
    assert_eq!(fixture.status(held).await, Status::Running, "its row is locked");
    tx.rollback().await.expect("rollback");
    until_status(&fixture, held, Status::Succeeded).await;
    running.stop().await;
}

async fn a_database_that_takes_no_writes_for_a_while_costs_nobody_an_attempt(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    // Sequences are not rolled back.
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
