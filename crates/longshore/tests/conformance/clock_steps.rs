//! Steps of the database's clock while workers run.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use longshore::store::NewWorker;
use longshore::worker::{Builder, Hooks, RecoverySettings, Settings};
use longshore::{Context, Failure, Interruptor, Status, SweepReport, SweepScope, Worker};
use tokio::sync::Notify;

use crate::fixture::*;
use crate::worker::{Started, run_worker, until, until_status};

cases! {
    a_step_of_the_clock_declares_no_live_worker_dead,
    a_lease_is_not_counted_as_older_than_the_last_step_of_the_clock,
}

/// Two heartbeats after a step, all live workers have sent one. That is much longer than a busy machine stops a
/// thread.
const HEARTBEAT: Duration = Duration::from_secs(3);

/// The sweeper looks every 20 ms, so it sees a new time long before the heartbeats.
fn worker(fixture: &Fixture) -> Builder {
    Worker::builder(fixture.client()).settings(Settings {
        heartbeat_interval: HEARTBEAT,
        stale_after: MINUTE,
        sweep_interval: Duration::from_millis(20),
        ..Settings::default()
    })
}

/// Moves the clock after the first sweep. The sweeper waits for its hook: if the clock were moved between its reading of
/// the clock and its sweep, it would not know.
struct StepAfterSweep {
    fixture: Fixture,
    /// Registers before the step, and sends no heartbeat.
    silent: Mutex<Option<NewWorker>>,
    /// Counts the sweeps after the step that found something.
    swept: Started,
}

#[async_trait]
impl Hooks for StepAfterSweep {
    async fn on_sweep(&self, _: &SweepReport) {
        let silent = self.silent.lock().expect("lock").take();
        match silent {
            Some(silent) => {
                self.fixture.store().register(&silent).await.expect("register");
                self.fixture.advance(3 * HOUR).await;
            }
            None => self.swept.increment(),
        }
    }
}

async fn a_step_of_the_clock_declares_no_live_worker_dead(fixture: Fixture) {
    let id = fixture.add(job("mail").timeout(Some(30 * MINUTE))).await;
    let (started, finish) = (Started::new(), Arc::new(Notify::new()));
    let signals = (started.clone(), finish.clone());
    let busy = run_worker(
        worker(&fixture)
            .settings(Settings {
                heartbeat_interval: HEARTBEAT,
                recovery: RecoverySettings { enabled: false, ..RecoverySettings::default() },
                ..Settings::default()
            })
            .function("mail", move |_: serde_json::Value, _: Context| {
                let (started, finish) = signals.clone();
                async move {
                    started.increment();
                    finish.notified().await;
                    Ok::<(), Failure>(())
                }
            }),
    )
    .await;
    started.wait_for(1).await;
    let silent = |name: &str| NewWorker { stale_after: MINUTE, ..NewWorker::new(name) };
    let (first, second) = (silent("first"), silent("second"));
    fixture.store().register(&first).await.expect("register");
    fixture.advance(61 * SECOND).await;
    let (first, second_id) = (first.id, second.id);
    let swept = Started::new();
    let silent = Mutex::new(Some(second));
    let hooks = StepAfterSweep { fixture: fixture.clone(), silent, swept: swept.clone() };
    let sweeper = run_worker(worker(&fixture).hooks(hooks).upkeep_only()).await;
    // The sweeper resumes: only the worker without heartbeats is dead.
    tokio::time::timeout(MAX_WAIT, swept.wait_for(1)).await.expect("the sweeper sweeps after the step");
    // The first one, which has been dead for hours, is forgotten.
    let is_forgotten = async || fixture.worker_record(first).await.is_none();
    until("the first worker is forgotten", is_forgotten).await;
    let workers = fixture.workers(None).await.expect("workers");
    let dead = workers.iter().filter(|worker| worker.dead_at.is_some()).map(|worker| worker.id);
    assert_eq!(dead.collect::<Vec<_>>(), [second_id], "{workers:?}");
    assert_eq!(workers.len(), 3, "a worker registered again: {workers:?}");
    assert_eq!(fixture.status(id).await, Status::Running);
    finish.notify_one();
    until_status(&fixture, id, Status::Succeeded).await;
    let job = fixture.job(id).await;
    assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 0, 1), "{:?}", job.errors);
    busy.stop().await;
    sweeper.stop().await;
}

/// Heartbeats are refreshed after a step, but the time of a claim is not.
async fn a_lease_is_not_counted_as_older_than_the_last_step_of_the_clock(fixture: Fixture) {
    let claimed = fixture.running(job("mail").timeout(Some(10 * MINUTE))).await;
    fixture.advance(3 * HOUR).await;
    let stepped_at = Some(fixture.now().await);
    let scope = SweepScope { stepped_at, ..SweepScope::default() };
    let found = async |scope: &SweepScope| {
        fixture.store().beat(claimed.lease().worker, &[]).await.expect("beat");
        let found = fixture.store().interrupted(scope).await.expect("interrupted");
        found.iter().map(|lease| lease.why).collect::<Vec<_>>()
    };
    assert_eq!(found(&SweepScope::default()).await, [Interruptor::HungHandler]);
    assert_eq!(found(&scope).await, []);
    fixture.advance(11 * MINUTE).await;
    assert_eq!(found(&scope).await, []);
    fixture.advance(SECOND).await;
    assert_eq!(found(&scope).await, [Interruptor::HungHandler]);
    fixture.sql("delete from workers", None).await;
    let unknown = SweepScope { stepped_at: Some(fixture.now().await), ..scope };
    fixture.advance(MINUTE).await;
    assert_eq!(found(&unknown).await, []);
    fixture.advance(SECOND).await;
    assert_eq!(found(&unknown).await, [Interruptor::UnknownWorker]);
}
