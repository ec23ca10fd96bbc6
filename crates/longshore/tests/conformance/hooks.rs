//! Hooks: when the worker calls them, and what they can decide.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use longshore::store::Claimed;
use longshore::worker::{Hooks, RecoverySettings};
use longshore::{Context, Decision, Ending, Failure, InterruptedJob, Interruptor, Status};

use crate::fixture::*;
use crate::worker::{drain, nothing, run_worker, until, until_status, worker};

cases! {
    hooks_run_at_every_step_and_can_change_the_ending,
    hooks_decide_how_jobs_of_dead_workers_are_recovered,
    recovery_hooks_receive_the_whole_job,
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

    async fn on_interrupted_job(&self, _: longshore::WorkerId, job: &InterruptedJob) -> Decision {
        self.record(format!("{} interrupted", job.record.kind));
        match job.record.kind.as_str() {
            "skipped" => Decision::Skip,
            "charged" => Decision::FailWithBackoff,
            _ => Decision::Default,
        }
    }

    async fn on_interruption(&self, job: &InterruptedJob) {
        self.record(format!("{} recovered", job.record.kind));
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

/// Hooks that keep the jobs they receive.
#[derive(Clone, Default)]
struct Keeper {
    decided: Arc<Mutex<Vec<(longshore::WorkerId, InterruptedJob)>>>,
    recovered: Arc<Mutex<Vec<InterruptedJob>>>,
}

#[async_trait]
impl Hooks for Keeper {
    async fn on_interrupted_job(&self, recovering: longshore::WorkerId, job: &InterruptedJob) -> Decision {
        self.decided.lock().expect("decided").push((recovering, job.clone()));
        Decision::Default
    }

    async fn on_interruption(&self, job: &InterruptedJob) {
        self.recovered.lock().expect("recovered").push(job.clone());
    }
}

async fn recovery_hooks_receive_the_whole_job(fixture: Fixture) {
    let metadata = serde_json::value::to_raw_value(&serde_json::json!({ "order": 11 })).expect("metadata");
    let whole = longshore::NewJob::new("ship", &serde_json::json!({ "crate": 7 }))
        .queue("default")
        .priority(5)
        .max_attempts(9)
        .tags(["fragile"])
        .flags(["gpu"])
        .context("a customer asked")
        .metadata(metadata);
    let claimed = fixture.running(whole).await;
    let lease = claimed.lease();
    fixture.advance(61 * SECOND).await;
    let keeper = Keeper::default();
    let running = run_worker(worker(&fixture).hooks(keeper.clone()).function("other", nothing)).await;
    until("a recovered job", || async { !keeper.recovered.lock().expect("recovered").is_empty() }).await;
    let recovering = running.id();
    running.stop().await;
    let (by, decided) = keeper.decided.lock().expect("decided").remove(0);
    assert_eq!(by, recovering);
    let recovered = keeper.recovered.lock().expect("recovered").remove(0);
    for job in [decided, recovered] {
        assert_eq!(
            (job.previous_worker, job.why, job.reason()),
            (lease.worker, Interruptor::DeadWorker, "WorkerCrashed")
        );
        let record = job.record;
        assert_eq!((record.id, record.lease_no, record.status), (lease.id, lease.lease_no, Status::Running));
        assert_eq!((record.kind.as_str(), record.payload.get()), ("ship", r#"{"crate":7}"#));
        assert_eq!((record.priority, record.attempts, record.max_attempts), (5, 1, 9));
        assert_eq!((record.tags, record.flags), (vec!["fragile".to_owned()], vec!["gpu".to_owned()]));
        assert_eq!(record.context.as_deref(), Some("a customer asked"));
        assert_eq!(record.metadata.expect("metadata").get(), r#"{"order":11}"#);
    }
}

async fn recovery_can_be_disabled(fixture: Fixture) {
    let id = fixture.running(job("plain")).await.lease().id;
    fixture.advance(DAY / 2).await;
    let recorder = Recorder::default();
    let build = |recovery: RecoverySettings| {
        let builder = worker(&fixture).recovery(recovery).hooks(recorder.clone()).function("other", nothing);
        builder.build().expect("build")
    };
    let off = RecoverySettings::default().enabled(false);
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
