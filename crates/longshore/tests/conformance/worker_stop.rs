//! How handlers and workers stop: cancels, timeouts, lost leases, and the shutdown of a worker.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longshore::worker::{Builder, RunningWorker, StopReason, Stopper, Summary};
use longshore::{AttemptEnd, Context, Failure, Status};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::fixture::*;
use crate::worker::{Started, run_worker, until, until_status, worker};

cases! {
    a_cancel_reaches_the_handler_and_ends_the_job,
    a_timeout_is_a_failed_attempt,
    a_stop_lets_running_jobs_finish,
    jobs_still_running_after_the_grace_period_are_released_uncharged,
    results_are_stored_as_long_as_the_grace_period_lasts,
    a_stop_without_grace_does_not_wait_for_results,
    a_worker_declared_dead_stops_its_handlers_and_registers_again,
}

/// A handler that waits for its stop signal and records the reason.
fn waiting(
    started: &Started,
    reasons: &Arc<Mutex<Vec<StopReason>>>,
) -> impl Fn(serde_json::Value, Context) -> Waiting + Send + Sync + use<> {
    let (started, reasons) = (started.clone(), reasons.clone());
    move |_, ctx| {
        let reasons = reasons.clone();
        started.increment();
        Box::pin(async move {
            let reason = ctx.stopped().await;
            reasons.lock().expect("lock").push(reason);
            Err("stopped".into())
        })
    }
}

type Waiting = std::pin::Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

async fn a_cancel_reaches_the_handler_and_ends_the_job(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let (started, reasons) = (Started::new(), Arc::new(Mutex::new(Vec::new())));
    let running =
        worker(&fixture).function("mail", waiting(&started, &reasons)).build().expect("build").start().await;
    let running = running.expect("start");
    started.wait_for(1).await;
    fixture.cancel(id).await.expect("cancel");
    until_status(&fixture, id, Status::Cancelled).await;
    assert_eq!(*reasons.lock().expect("lock"), [StopReason::Cancelled]);
    running.stop().await;
}

async fn a_timeout_is_a_failed_attempt(fixture: Fixture) {
    let id = fixture.add(job("mail").timeout(Some(Duration::from_millis(50)))).await;
    let reasons = Arc::new(Mutex::new(Vec::new()));
    let handler = waiting(&Started::new(), &reasons);
    let running = run_worker(worker(&fixture).function("mail", handler)).await;
    until_status(&fixture, id, Status::Retrying).await;
    assert_eq!(*reasons.lock().expect("lock"), [StopReason::TimedOut]);
    assert_eq!(fixture.job(id).await.last_error.as_deref(), Some("timed out after 50ms"));
    running.stop().await;
}

/// Starts a worker and waits until `jobs` jobs of kind `slow` run. They end when the sender
/// says so.
async fn running_slow_jobs(builder: Builder, jobs: u32) -> (RunningWorker, watch::Sender<bool>) {
    let (go, started) = (watch::Sender::new(false), Started::new());
    let (wait, starts) = (go.clone(), started.clone());
    let running = run_worker(builder.function("slow", move |_: serde_json::Value, _: Context| {
        let mut wait = wait.subscribe();
        starts.increment();
        async move {
            wait.wait_for(|go| *go).await.expect("not closed");
            Ok(())
        }
    }))
    .await;
    started.wait_for(jobs).await;
    (running, go)
}

async fn a_stop_lets_running_jobs_finish(fixture: Fixture) {
    let id = fixture.add(job("slow")).await;
    let (running, go) = running_slow_jobs(worker(&fixture), 1).await;
    // A claim of this job may be in flight when the worker stops.
    let later = fixture.add(job("slow")).await;
    let stop = tokio::spawn(running.stop());
    go.send_replace(true);
    assert!(stop.await.expect("stop").succeeded <= 2);
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    assert_ne!(fixture.status(later).await, Status::Running);
    assert!(fixture.workers(None).await.expect("workers").is_empty(), "the worker must have signed off");
}

async fn jobs_still_running_after_the_grace_period_are_released_uncharged(fixture: Fixture) {
    let (polite, stubborn) = (fixture.add(job("polite")).await, fixture.add(job("stubborn")).await);
    let (started, reasons) = (Started::new(), Arc::new(Mutex::new(Vec::new())));
    let starts = started.clone();
    let running = run_worker(
        worker(&fixture)
            .shutdown_grace(Duration::from_millis(50))
            .function("polite", waiting(&started, &reasons))
            .function("stubborn", move |_: serde_json::Value, _: Context| {
                starts.increment();
                std::future::pending()
            }),
    )
    .await;
    started.wait_for(2).await;
    // Neither of them ends by itself.
    assert_eq!(running.stop().await.put_back, 2);
    assert_eq!(*reasons.lock().expect("lock"), [StopReason::Shutdown]);
    for id in [polite, stubborn] {
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.attempts), (Status::Queued, 0));
        assert_eq!(fixture.history(id).await, [AttemptEnd::Released]);
    }
}

/// Starts a worker, stops it while `jobs` jobs run, and ends the jobs while no result can be stored.
/// Returns the lock, and the stop in progress.
async fn stopped_while_no_result_can_be_stored(
    fixture: &Fixture,
    jobs: u32,
) -> (StoreLock, Stopper, JoinHandle<Summary>) {
    fixture.enqueue_many((0..jobs).map(|_| job("slow"))).await.expect("enqueue");
    let builder = worker(fixture).concurrency(jobs).shutdown_grace(HOUR);
    let (running, go) = running_slow_jobs(builder, jobs).await;
    let lock = StoreLock::new(fixture).await;
    let stopper = running.stopper();
    let stop = tokio::spawn(running.stop());
    go.send_replace(true);
    (lock, stopper, stop)
}

async fn results_are_stored_as_long_as_the_grace_period_lasts(fixture: Fixture) {
    let (lock, _, mut stop) = stopped_while_no_result_can_be_stored(&fixture, 20).await;
    // Longer than the worker waits for results after the grace period.
    let gave_up = tokio::time::timeout(3 * SECOND, &mut stop).await;
    gave_up.expect_err("the worker waits for its results");
    lock.release().await;
    assert_eq!(stop.await.expect("stop").succeeded, 20);
    assert_eq!(fixture.count(Status::Succeeded).await, 20);
    assert!(fixture.workers(None).await.expect("workers").is_empty(), "the worker must have signed off");
}

async fn a_stop_without_grace_does_not_wait_for_results(fixture: Fixture) {
    let (lock, stopper, stop) = stopped_while_no_result_can_be_stored(&fixture, 2).await;
    stopper.stop_now();
    // The grace period lasts for an hour.
    let stopped = tokio::time::timeout(MAX_WAIT, stop).await;
    stopped.expect("the worker waits for its results").expect("stop");
    lock.release().await;
}

async fn a_worker_declared_dead_stops_its_handlers_and_registers_again(fixture: Fixture) {
    let id = fixture.add(job("mail").max_attempts(9)).await;
    let reasons = Arc::new(Mutex::new(Vec::new()));
    let (seen, first) = (reasons.clone(), Arc::new(AtomicUsize::new(0)));
    let started = Started::new();
    let starts = started.clone();
    let running = run_worker(worker(&fixture).function("mail", move |_: serde_json::Value, ctx: Context| {
        let (seen, nth) = (seen.clone(), first.fetch_add(1, Ordering::Relaxed));
        starts.increment();
        async move {
            if nth > 0 {
                return Ok(());
            }
            let reason = ctx.stopped().await;
            seen.lock().expect("lock").push(reason);
            // The sweep may not have taken the lease yet, and a success would count.
            while ctx.assert_lease().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Ok(())
        }
    }))
    .await;
    let before = running.id();
    started.wait_for(1).await;
    // Another process sweeps after a long silence. A heartbeat may arrive in between, so
    // this repeats until it works.
    until("the job is recovered", || async {
        fixture.advance(61 * SECOND).await;
        fixture.sweep_now().await.recovered > 0
    })
    .await;
    until("the handler is stopped", || async { !reasons.lock().expect("lock").is_empty() }).await;
    assert_eq!(*reasons.lock().expect("lock"), [StopReason::LeaseLost]);
    until("a new id", || async { running.id() != before }).await;
    fixture.advance(10 * SECOND).await;
    until_status(&fixture, id, Status::Succeeded).await;
    let job = fixture.job(id).await;
    assert_eq!((job.attempts, job.interruptions), (1, 1));
    running.stop().await;
}
