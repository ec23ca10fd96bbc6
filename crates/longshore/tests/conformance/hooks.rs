//! Hooks: when the worker calls them, and what they can decide.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use longshore::store::Claimed;
use longshore::worker::{Hooks, RecoverySettings};
use longshore::{Context, Decision, Ending, Failure, Interrupted, Status};

use crate::fixture::*;
use crate::worker::{drain, nothing, run_worker, until, until_status, worker};

cases! {
    hooks_run_at_every_step_and_can_change_the_ending,
    hooks_decide_how_jobs_of_dead_workers_are_recovered,
    recovery_can_be_disabled,
}

/// Hooks that record their calls.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<String>>>);

impl Recorder {
    fn record(&self, line: impl Into<String>) {
        self.0.lock().expect("recorder").push(line.into());
    }

    fn has(&self, line: &str) -> bool {
        self.0.lock().expect("recorder").iter().any(|recorded| recorded == line)
    }
}

#[async_trait]
impl Hooks for Recorder {
    async fn on_worker_start(&self, _: longshore::WorkerId) {
        self.record("start");
    }

    async fn on_worker_stop(&self, _: longshore::WorkerId) {
        self.record("stop");
    }

    async fn before_run(&self, job: &Claimed) -> Result<(), Failure> {
        match job.kind() {
            "vetoed" => Err(Failure::permanent("vetoed by the hook")),
            "panics_before" => panic!("the hook panicked"),
            _ => Ok(()),
        }
    }

    async fn after_run(&self, job: &Claimed, ending: Ending) -> Ending {
        match job.kind() {
            "reshaped" => Ending::Snoozed { delay: HOUR },
            "panics_after" => panic!("the hook panicked"),
            _ => ending,
        }
    }

    async fn on_success(&self, job: &Claimed) {
        self.record(format!("{} succeeded", job.kind()));
    }

    async fn on_failure(&self, job: &Claimed, error: &str) {
        self.record(format!("{} failed: {error}", job.kind()));
    }

    async fn on_permanent_failure(&self, job: &Claimed, error: &str) {
        self.record(format!("{} failed permanently: {error}", job.kind()));
    }

    async fn on_cancel(&self, job: &Claimed) {
        self.record(format!("{} cancelled", job.kind()));
    }

    async fn on_interrupted_job(&self, _: longshore::WorkerId, job: &Interrupted) -> Decision {
        self.record(format!("{} interrupted", job.kind));
        match job.kind.as_str() {
            "skipped" => Decision::Skip,
            "charged" => Decision::FailWithBackoff,
            _ => Decision::Default,
        }
    }

    async fn on_interruption(&self, job: &Interrupted) {
        self.record(format!("{} recovered", job.kind));
    }

    async fn on_sweep(&self, report: &longshore::SweepReport) {
        self.record(format!("sweep: {} of {}", report.recovered, report.workers.len()));
    }
}

async fn hooks_run_at_every_step_and_can_change_the_ending(fixture: Fixture) {
    let mut ids = BTreeMap::new();
    for kind in ["good", "bad", "hopeless", "unwanted", "vetoed", "panics_before", "reshaped", "panics_after"]
    {
        ids.insert(kind, fixture.add(job(kind)).await);
    }
    let recorder = Recorder::default();
    let mut builder = worker(&fixture).hooks(recorder.clone());
    for kind in ids.keys().copied() {
        builder = builder.function(kind, move |_: serde_json::Value, _: Context| async move {
            match kind {
                "bad" => Err("oh".into()),
                "hopeless" => Err(Failure::permanent("never")),
                "unwanted" => Err(Failure::cancelled("no")),
                _ => Ok(()),
            }
        });
    }
    drain(builder).await;
    let expected = [
        "start",
        "stop",
        "good succeeded",
        "panics_after succeeded",
        "bad failed: oh",
        "hopeless failed permanently: never",
        "unwanted cancelled",
        "vetoed failed permanently: vetoed by the hook",
        "panics_before failed: a before_run hook panicked: the hook panicked",
    ];
    for line in expected {
        until(line, || async { recorder.has(line) }).await;
    }
    let job = fixture.job(ids["reshaped"]).await;
    assert_eq!((job.status, job.run_at), (Status::Queued, start() + HOUR));
}

async fn hooks_decide_how_jobs_of_dead_workers_are_recovered(fixture: Fixture) {
    let mut ids = BTreeMap::new();
    for kind in ["plain", "skipped", "charged"] {
        ids.insert(kind, fixture.running(job(kind)).await.lease().id);
    }
    fixture.advance(61 * SECOND).await;
    let recorder = Recorder::default();
    let running = run_worker(
        worker(&fixture)
            .hooks(recorder.clone())
            .function("other", |_: serde_json::Value, _: Context| async { Ok(()) }),
    )
    .await;
    for line in ["plain interrupted", "plain recovered", "charged recovered", "skipped interrupted"] {
        until(line, || async { recorder.has(line) }).await;
    }
    running.stop().await;
    assert!(!recorder.has("skipped recovered"));
    assert_eq!(fixture.status(ids["skipped"]).await, Status::Running);
    let plain = fixture.job(ids["plain"]).await;
    assert_eq!((plain.status, plain.attempts), (Status::Retrying, 0));
    assert_eq!(plain.last_error.as_deref(), Some("Job recovered after worker interruption"));
    assert_eq!(fixture.job(ids["charged"]).await.attempts, 1);
}

async fn recovery_can_be_disabled(fixture: Fixture) {
    let id = fixture.running(job("plain")).await.lease().id;
    fixture.advance(DAY / 2).await;
    let recorder = Recorder::default();
    let build = |recovery: RecoverySettings| {
        let builder = worker(&fixture).recovery(recovery).hooks(recorder.clone()).function("other", nothing);
        builder.build().expect("build")
    };
    let off = RecoverySettings { enabled: false, ..RecoverySettings::default() };
    let running = build(off).start().await.expect("start");
    // A worker sweeps at every heartbeat, from the third heartbeat on.
    for _ in 0..6 {
        fixture.advance(SECOND).await;
        let now = fixture.now().await;
        let worker = || async { fixture.worker_record(running.id()).await.expect("the worker") };
        until("a heartbeat", || async { worker().await.heartbeat_at == now }).await;
    }
    running.stop().await;
    assert_eq!(fixture.status(id).await, Status::Running);
    assert!(!recorder.has("plain interrupted"));
    // A worker with recovery enabled recovers the job.
    let running = build(RecoverySettings::default()).start().await.expect("start");
    until_status(&fixture, id, Status::Retrying).await;
    running.stop().await;
}
