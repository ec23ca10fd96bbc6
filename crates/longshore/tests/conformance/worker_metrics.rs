//! The worker's counters: the attempts started minus the attempts completed are the attempts in
//! flight, however they end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use longshore::api::Api;
use longshore::worker::{Batched, RunningWorker, Settings};
use longshore::{Context, NewJob, NewKind, Status, UnknownKinds, Worker};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Metadata, Recorder, SharedString, Unit};
use serde_json::json;
use uuid::Uuid;

use crate::fixture::*;
use crate::http::client::HttpClient;
use crate::worker::{Started, run_worker, until};

cases! {
    the_started_attempts_minus_the_completed_ones_are_in_flight,
    jobs_that_a_stop_releases_before_they_start_are_not_counted,
    a_batch_that_is_stopped_is_counted_once,
    the_counters_of_known_kinds_start_at_zero,
    an_attempt_of_an_http_worker_is_counted_once,
    steps_and_events_are_counted,
    steps_of_http_workers_are_counted,
}

/// Counts for the whole process, so each case uses its own kinds.
#[derive(Clone, Default)]
struct Counters(Arc<Mutex<HashMap<Key, Arc<AtomicU64>>>>);

impl Counters {
    fn installed() -> Counters {
        static INSTALLED: OnceLock<Counters> = OnceLock::new();
        let install = || {
            let counters = Counters::default();
            metrics::set_global_recorder(counters.clone()).expect("the only recorder");
            counters
        };
        INSTALLED.get_or_init(install).clone()
    }

    /// The sum over all outcomes of a kind.
    fn total(&self, name: &str, kind: &str) -> i64 {
        let counters = self.0.lock().expect("counters");
        let of_kind = |key: &Key| {
            key.name() == name && key.labels().any(|label| label.key() == "kind" && label.value() == kind)
        };
        counters.iter().filter(|(key, _)| of_kind(key)).map(|(_, n)| n.load(Ordering::SeqCst) as i64).sum()
    }

    /// The number of completed attempts with this outcome; `None` if there is no such counter.
    fn completed(&self, kind: &str, outcome: &str) -> Option<u64> {
        let labels = vec![Label::new("kind", kind.to_owned()), Label::new("outcome", outcome.to_owned())];
        let counters = self.0.lock().expect("counters");
        let counter = counters.get(&Key::from_parts("worker_jobs_completed_total", labels));
        counter.map(|counter| counter.load(Ordering::SeqCst))
    }

    /// The counters of steps and events: stored, replayed, timed out, emitted, delivered.
    fn steps(&self) -> [Option<u64>; 5] {
        let counters = self.0.lock().expect("counters");
        ["steps_stored", "steps_replayed", "waits_timed_out", "events_emitted", "events_delivered"].map(
            |name| {
                let counter = counters.get(&Key::from_name(format!("longshore_{name}_total")));
                counter.map(|counter| counter.load(Ordering::SeqCst))
            },
        )
    }

    fn in_flight(&self, kind: &str) -> i64 {
        // Completed first: an attempt that ends in between must not count twice.
        let completed = self.total("worker_jobs_completed_total", kind);
        self.total("worker_jobs_started_total", kind) - completed
    }
}

impl Recorder for Counters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.0.lock().expect("counters").entry(key.clone()).or_default().clone())
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

fn new_kind() -> &'static str {
    format!("kind-{}", Uuid::now_v7().simple()).leak()
}

fn settings(concurrency: u32) -> Settings {
    Settings {
        concurrency,
        heartbeat_interval: Duration::from_millis(50),
        stale_after: HOUR,
        shutdown_grace: Duration::from_millis(20),
        ..Settings::default()
    }
}

/// Starts a worker with two slots on many short jobs, two that ignore their stop token, and `after`
/// more short ones. Returns when the two run. Some of the last ones are probably buffered then.
async fn busy_worker(
    fixture: &Fixture,
    kind: &'static str,
    after: i32,
) -> (RunningWorker, Vec<longshore::JobId>) {
    let started = Started::new();
    let job = |number: i32| NewJob::new(kind, &number);
    let jobs = (1..=500).chain([-1, -2]).chain((0..after).map(|n| 1000 + n)).map(job);
    let enqueued = fixture.enqueue_many(jobs).await.expect("enqueue");
    let starts = started.clone();
    let running = run_worker(Worker::builder(fixture.client()).settings(settings(2)).function(
        kind,
        move |number: i32, _: Context| {
            let starts = starts.clone();
            async move {
                match number {
                    ..0 => {
                        starts.increment();
                        std::future::pending().await
                    }
                    n if n % 10 == 0 => Err("fails".into()),
                    _ => Ok(()),
                }
            }
        },
    ))
    .await;
    started.wait_for(2).await;
    (running, enqueued[502..].iter().map(|job| job.id).collect())
}

async fn the_started_attempts_minus_the_completed_ones_are_in_flight(fixture: Fixture) {
    let (counters, kind) = (Counters::installed(), new_kind());
    let suspect = fixture.suspect(NewJob::new(kind, &7)).await;
    let (running, after) = busy_worker(&fixture, kind, 100).await;
    // The buffered ones are cancelled before they start.
    for id in &after[..48] {
        fixture.cancel(*id).await.expect("cancel");
    }
    until("48 are cancelled and two run", || async {
        fixture.count(Status::Cancelled).await == 48 && fixture.count(Status::Running).await == 2
    })
    .await;
    until("two are in flight", || async { counters.in_flight(kind) == 2 }).await;
    let summary = running.stop().await;
    assert_eq!(counters.in_flight(kind), 0);
    assert_eq!((summary.succeeded, summary.retrying, summary.put_back), (451, 50, 2));
    assert!(summary.cancelled <= 48, "{summary:?}");
    assert_eq!(counters.total("worker_jobs_started_total", kind), 503);
    assert_eq!(fixture.status(suspect).await, Status::Succeeded);
}

async fn jobs_that_a_stop_releases_before_they_start_are_not_counted(fixture: Fixture) {
    let (counters, kind) = (Counters::installed(), new_kind());
    let (running, _) = busy_worker(&fixture, kind, 500).await;
    assert_eq!(running.stop().await.put_back, 2);
    assert_eq!(counters.in_flight(kind), 0);
}

async fn a_batch_that_is_stopped_is_counted_once(fixture: Fixture) {
    let (counters, started) = (Counters::installed(), Started::new());
    let kind = new_kind();
    fixture.enqueue_many((0..9).map(|n| NewJob::new(kind, &n))).await.expect("enqueue");
    let starts = started.clone();
    let running = run_worker(Worker::builder(fixture.client()).settings(settings(1)).batch(
        kind,
        4,
        move |_: Vec<Batched<u32>>| {
            starts.increment();
            std::future::pending()
        },
    ))
    .await;
    started.wait_for(1).await;
    assert_eq!(counters.in_flight(kind), 4);
    assert_eq!(running.stop().await.put_back, 4);
    assert_eq!((counters.in_flight(kind), counters.total("worker_jobs_started_total", kind)), (0, 4));
    assert_eq!(fixture.count(Status::Queued).await, 9);
}

/// The values of the label `outcome`.
const OUTCOMES: [&str; 9] = [
    "succeeded",
    "retrying",
    "failed_permanent",
    "cancelled",
    "snoozed",
    "suspended",
    "released",
    "lease_lost",
    "error",
];

async fn the_counters_of_known_kinds_start_at_zero(fixture: Fixture) {
    let (counters, [handled, leased, registered]) = (Counters::installed(), [(); 3].map(|()| new_kind()));
    let builder = Worker::builder(fixture.client())
        .settings(settings(1))
        .function(handled, |_: (), _: Context| async { Ok::<(), longshore::Failure>(()) });
    let start_at_zero = |kind: &str| {
        for outcome in OUTCOMES {
            assert_eq!(counters.completed(kind, outcome), Some(0), "{kind} {outcome}");
        }
    };
    let running = run_worker(builder).await;
    start_at_zero(handled);
    let api = Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow).metrics(String::new);
    let http = HttpClient::for_api(api);
    http.post("/leases", &json!({ "kinds": [leased] })).await.expect_status(200);
    start_at_zero(leased);
    fixture.put_kinds(&[NewKind::new(registered)]).await.expect("put_kinds");
    http.get("/metrics").await.expect_status(200);
    start_at_zero(registered);
    running.stop().await;
}

async fn an_attempt_of_an_http_worker_is_counted_once(fixture: Fixture) {
    let (counters, kind) = (Counters::installed(), new_kind());
    let http = HttpClient::new(&fixture);
    for (outcome, counted) in [
        ("succeeded", "succeeded"),
        ("failed", "retrying"),
        ("released", "released"),
        ("cancelled", "cancelled"),
    ] {
        let id = fixture.add(NewJob::new(kind, &()).retry(longshore::RetryPolicy::fixed(HOUR))).await;
        let leased = http.post("/leases", &json!({ "kinds": [kind] })).await.expect_status(200).json();
        let lease_no = &leased["jobs"][0]["lease_no"];
        let item = json!({ "id": id.to_string(), "lease_no": lease_no, "outcome": outcome });
        let body = json!({ "worker_id": leased["worker_id"], "items": [item] });
        for _ in 0..2 {
            // The second call repeats the first, whose response may have been lost.
            http.post("/leases/settle", &body).await.expect_status(200);
        }
        assert_eq!(counters.completed(kind, counted), Some(1), "{outcome}");
        assert_eq!(counters.in_flight(kind), 0, "{outcome}");
        // The released job must not be leased again.
        fixture.cancel(id).await.ok();
    }
    // A worker that signs off releases its leases.
    fixture.add(NewJob::new(kind, &())).await;
    let leased = http.post("/leases", &json!({ "kinds": [kind] })).await.expect_status(200).json();
    let path = format!("/leases/{}", leased["worker_id"].as_str().expect("a worker"));
    http.send("DELETE", &path, &[], "").await.expect_status(204);
    assert_eq!((counters.completed(kind, "released"), counters.in_flight(kind)), (Some(2), 0));
    assert_eq!(counters.total("worker_jobs_started_total", kind), 5);
}

/// These counters have no kind, so this works only in a process of its own, as with nextest.
async fn steps_and_events_are_counted(fixture: Fixture) {
    let (counters, kind) = (Counters::installed(), new_kind());
    let handler = |(): (), ctx: Context| async move {
        ctx.step("a", || async { Ok(()) }).await?;
        ctx.event::<u32>("approved").await?;
        ctx.sleep("nap", SECOND).await?;
        ctx.event::<u32>("never").within(SECOND).await?;
        Ok(())
    };
    let run = async || {
        let worker = Worker::builder(fixture.client()).settings(settings(1)).function(kind, handler);
        worker.build().expect("build").drain().await.expect("drain");
    };
    run().await;
    assert_eq!(counters.steps(), [Some(0); 5], "they start at zero");
    let id = fixture.add(NewJob::new(kind, &())).await;
    run().await;
    assert_eq!(counters.steps(), [1, 0, 0, 0, 0].map(Some));
    for payload in [1, 2] {
        fixture.emit("approved", &payload).await.expect("emit");
    }
    assert_eq!(counters.steps(), [1, 0, 0, 1, 1].map(Some), "the second emit is a repetition");
    run().await;
    assert_eq!(counters.steps(), [2, 1, 0, 1, 1].map(Some));
    for expected in [[3, 3, 0, 1, 1], [4, 6, 1, 1, 1]] {
        fixture.advance(SECOND).await;
        run().await;
        assert_eq!(counters.steps(), expected.map(Some), "the end of a sleep is not a timeout");
    }
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    assert_eq!(counters.completed(kind, "suspended"), Some(3));
}

async fn steps_of_http_workers_are_counted(fixture: Fixture) {
    let (counters, kind) = (Counters::installed(), new_kind());
    let http = HttpClient::new(&fixture);
    let id = fixture.add(NewJob::new(kind, &())).await;
    let mut leased = http.post("/leases", &json!({})).await.expect_status(200).json();
    let call = async |leased: &serde_json::Value, path: &str, field: &str, item: serde_json::Value| {
        let mut body = json!({ "worker_id": leased["worker_id"], "id": id.to_string() });
        body["lease_no"] = leased["jobs"][0]["lease_no"].clone();
        body[field] = json!([item]);
        http.post(path, &body).await.expect_status(200);
    };
    for _ in 0..2 {
        call(&leased, "/leases/steps", "steps", json!({ "name": "a" })).await;
    }
    let wait = json!({ "name": "approval", "events": ["approved"], "within_seconds": 1 });
    call(&leased, "/leases/wait", "waits", wait.clone()).await;
    fixture.advance(SECOND).await;
    leased = http
        .post("/leases", &json!({ "worker_id": leased["worker_id"], "wait_seconds": 20 }))
        .await
        .expect_status(200)
        .json();
    for _ in 0..2 {
        call(&leased, "/leases/wait", "waits", wait.clone()).await;
    }
    assert_eq!(counters.steps()[..3], [2, 1, 1].map(Some));
    assert_eq!(counters.completed(kind, "suspended"), Some(1));
}
