//! What an application hears of its worker, and has a say in.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use longshore::store::{Claimed, Interrupted};
use longshore::worker::{Hooks, Recovery};
use longshore::{Context, Decision, Ending, Failure, Status};

use crate::fixture::*;
use crate::worker::{nothing, until, until_status, worker};

cases! {
    hooks_are_told_and_have_their_say,
    hooks_decide_about_jobs_of_dead_workers,
    recovery_can_be_switched_off,
}

#[derive(Clone, Default)]
struct Diary(Arc<Mutex<Vec<String>>>);

impl Diary {
    fn note(&self, line: impl Into<String>) {
        self.0.lock().expect("diary").push(line.into());
    }

    fn has(&self, line: &str) -> bool {
        self.0.lock().expect("diary").iter().any(|noted| noted == line)
    }
}

#[async_trait]
impl Hooks for Diary {
    async fn on_worker_start(&self, _: longshore::WorkerId) {
        self.note("start");
    }

    async fn on_worker_stop(&self, _: longshore::WorkerId) {
        self.note("stop");
    }

    async fn before_run(&self, job: &Claimed) -> Result<(), Failure> {
        match job.kind() {
            "vetoed" => Err(Failure::permanent("not on my watch")),
            "shaky" => panic!("the hook fell over"),
            _ => Ok(()),
        }
    }

    async fn after_run(&self, job: &Claimed, ending: Ending) -> Ending {
        match job.kind() {
            "reshaped" => Ending::Snoozed { delay: HOUR },
            "trembling" => panic!("the hook fell over"),
            _ => ending,
        }
    }

    async fn on_success(&self, job: &Claimed) {
        self.note(format!("{} succeeded", job.kind()));
    }

    async fn on_failure(&self, job: &Claimed, error: &str) {
        self.note(format!("{} failed: {error}", job.kind()));
    }

    async fn on_permanent_failure(&self, job: &Claimed, error: &str) {
        self.note(format!("{} is dead: {error}", job.kind()));
    }

    async fn on_cancel(&self, job: &Claimed) {
        self.note(format!("{} cancelled", job.kind()));
    }

    async fn on_interrupted_job(&self, _: longshore::WorkerId, job: &Interrupted) -> Decision {
        self.note(format!("{} interrupted", job.kind));
        match job.kind.as_str() {
            "skipped" => Decision::Skip,
            "charged" => Decision::FailWithBackoff,
            _ => Decision::Default,
        }
    }

    async fn on_interruption(&self, job: &Interrupted) {
        self.note(format!("{} recovered", job.kind));
    }

    async fn on_sweep(&self, report: &longshore::SweepReport) {
        self.note(format!("sweep: {} of {}", report.recovered, report.workers.len()));
    }
}

async fn hooks_are_told_and_have_their_say(fixture: Fixture) {
    let mut ids = BTreeMap::new();
    for kind in ["good", "bad", "hopeless", "unwanted", "vetoed", "shaky", "reshaped", "trembling"] {
        ids.insert(kind, fixture.add(job(kind)).await);
    }
    let diary = Diary::default();
    let mut builder = worker(&fixture).hooks(diary.clone());
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
    builder.build().expect("build").drain().await.expect("drain");
    let expected = [
        "start",
        "stop",
        "good succeeded",
        "trembling succeeded",
        "bad failed: oh",
        "hopeless is dead: never",
        "unwanted cancelled",
        "vetoed is dead: not on my watch",
        "shaky failed: a before_run hook panicked: the hook fell over",
    ];
    for line in expected {
        until(line, || async { diary.has(line) }).await;
    }
    let job = fixture.job(ids["reshaped"]).await;
    assert_eq!((job.status, job.run_at), (Status::Queued, start() + HOUR));
}

async fn hooks_decide_about_jobs_of_dead_workers(fixture: Fixture) {
    let mut ids = BTreeMap::new();
    for kind in ["plain", "skipped", "charged"] {
        ids.insert(kind, fixture.running(job(kind)).await.lease().id);
    }
    fixture.advance(61 * SECOND).await;
    let diary = Diary::default();
    let running = worker(&fixture)
        .hooks(diary.clone())
        .function("other", |_: serde_json::Value, _: Context| async { Ok(()) })
        .build()
        .expect("build")
        .start()
        .await
        .expect("start");
    for line in ["plain interrupted", "plain recovered", "charged recovered", "skipped interrupted"] {
        until(line, || async { diary.has(line) }).await;
    }
    running.stop().await;
    assert!(!diary.has("skipped recovered"));
    assert_eq!(fixture.status(ids["skipped"]).await, Status::Running);
    let plain = fixture.job(ids["plain"]).await;
    assert_eq!((plain.status, plain.attempts), (Status::Retrying, 0));
    assert_eq!(plain.last_error.as_deref(), Some("Job recovered after worker interruption"));
    assert_eq!(fixture.job(ids["charged"]).await.attempts, 1);
}

async fn recovery_can_be_switched_off(fixture: Fixture) {
    let id = fixture.running(job("plain")).await.lease().id;
    fixture.advance(DAY / 2).await;
    let diary = Diary::default();
    let ready = |recovery: Recovery| {
        let builder = worker(&fixture).recovery(recovery).hooks(diary.clone()).function("other", nothing);
        builder.build().expect("build")
    };
    let off = Recovery { enabled: false, ..Recovery::default() };
    let running = ready(off).start().await.expect("start");
    // It sweeps as often as it beats, and may from the third beat on.
    for _ in 0..6 {
        fixture.advance(SECOND).await;
        let now = fixture.now().await;
        let worker = || async { fixture.worker_record(running.id()).await.expect("the worker") };
        until("a beat", || async { worker().await.heartbeat_at == now }).await;
    }
    running.stop().await;
    assert_eq!(fixture.status(id).await, Status::Running);
    assert!(!diary.has("plain interrupted"));
    // Another that does recover finds what there was to find.
    let running = ready(Recovery::default()).start().await.expect("start");
    until_status(&fixture, id, Status::Retrying).await;
    running.stop().await;
}
