//! The log lines about jobs: each end of an attempt has one, and under load they are limited.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use longshore::store::Fenced;
use longshore::{Context, Failure, Interruption, NewJob, RetryPolicy, SweepOptions, SweepScope, Worker};
use serde_json::json;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context as LayerContext, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;
use uuid::Uuid;

use crate::fixture::*;
use crate::http::client::HttpClient;
use crate::worker::drain;

cases! {
    each_end_of_an_attempt_is_one_line,
    a_recovered_job_is_one_line,
    an_attempt_of_an_http_worker_is_one_line,
    under_load_further_lines_are_counted,
}

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";

/// A logged line.
#[derive(Clone, Debug)]
struct Line {
    level: Level,
    fields: BTreeMap<&'static str, String>,
}

impl Line {
    fn get(&self, field: &str) -> &str {
        self.fields.get(field).map(String::as_str).unwrap_or_default()
    }

    fn number(&self, field: &str) -> f64 {
        self.get(field).parse().unwrap_or_else(|_| panic!("{field}: {self:?}"))
    }
}

/// The lines about jobs of the whole process, so each case uses its own kinds.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<Line>>>);

impl Lines {
    fn installed() -> Lines {
        static INSTALLED: OnceLock<Lines> = OnceLock::new();
        let install = || {
            let lines = Lines::default();
            tracing_subscriber::registry().with(lines.clone()).init();
            lines
        };
        INSTALLED.get_or_init(install).clone()
    }

    fn all(&self) -> Vec<Line> {
        self.0.lock().expect("lines").clone()
    }

    fn of(&self, kind: &str) -> Vec<Line> {
        self.all().into_iter().filter(|line| line.get("kind") == kind).collect()
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn enabled(&self, item: &Metadata<'_>, _: LayerContext<'_, S>) -> bool {
        item.target() == "longshore::job"
    }

    fn on_event(&self, event: &Event<'_>, _: LayerContext<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.lock().expect("lines").push(Line { level: *event.metadata().level(), fields: fields.0 });
    }
}

#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

fn new_kind() -> &'static str {
    format!("kind-{}", Uuid::now_v7().simple()).leak()
}

async fn each_end_of_an_attempt_is_one_line(fixture: Fixture) {
    let (lines, kind) = (Lines::installed(), new_kind());
    let new = |payload: &str| NewJob::new(kind, payload).max_attempts(7).queue("mail");
    for payload in ["succeed", "fail", "give up", "snooze", "cancel"] {
        fixture.add(new(payload)).await;
    }
    let failing = new("fail").retry(RetryPolicy::fixed(Duration::from_secs(90)));
    let traced = fixture.add(failing.trace(format!("00-{TRACE_ID}-b7ad6b7169203331-01"))).await;
    let builder = Worker::builder(fixture.client())
        .settings(longshore::worker::Settings { queues: vec!["mail".into()], ..Default::default() });
    drain(builder.function(kind, |payload: String, _: Context| async move {
        match payload.as_str() {
            "succeed" => Ok(()),
            "fail" => Err(Failure::retry("smtp said 451")),
            "give up" => Err(Failure::permanent("no such mailbox")),
            "snooze" => Err(Failure::snooze(HOUR)),
            _ => Err(Failure::cancelled("not needed")),
        }
    }))
    .await;

    let found = lines.of(kind);
    let mut ends: Vec<(Level, &str)> = found.iter().map(|line| (line.level, line.get("outcome"))).collect();
    ends.sort_by_key(|(_, outcome)| *outcome);
    let expected = [
        (Level::DEBUG, "cancelled"),
        (Level::ERROR, "failed_permanent"),
        (Level::WARN, "retrying"),
        (Level::WARN, "retrying"),
        (Level::DEBUG, "snoozed"),
        (Level::DEBUG, "succeeded"),
    ];
    assert_eq!(ends, expected);
    let line = found.iter().find(|line| line.get("job_id") == traced.to_string()).expect("a line");
    let fields = ["queue", "attempt", "max_attempts", "error", "trace_id"].map(|field| line.get(field));
    assert_eq!(fields, ["mail", "1", "7", "smtp said 451", TRACE_ID]);
    assert_eq!(line.number("next_run_in_seconds"), 90.0);
    assert!((0.0..60.0).contains(&line.number("run_seconds")), "{line:?}");
    assert!(!format!("{found:?}").contains("give up"), "payloads are not logged");
}

async fn a_recovered_job_is_one_line(fixture: Fixture) {
    let (lines, kind) = (Lines::installed(), new_kind());
    let id = fixture.suspect(job(kind).max_attempts(9)).await;
    let [line] = &lines.of(kind)[..] else { panic!("not one line: {:?}", lines.of(kind)) };
    assert_eq!((line.level, line.get("outcome")), (Level::WARN, "recovered"));
    let fields = ["job_id", "attempt", "max_attempts", "next_run_in_seconds"].map(|field| line.get(field));
    assert_eq!(fields, [id.to_string().as_str(), "1", "9", "0.0"]);
    assert!(line.get("error").contains("worker interruption"), "{line:?}");

    // The next interruption is its last.
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    let started = fixture.mark_started(&claimed.lease()).await.expect("mark_started");
    assert_eq!(started, Fenced::Held);
    fixture.advance(HOUR).await;
    let options = SweepOptions {
        scope: SweepScope { resilient_factor: 1, ..SweepScope::default() },
        interruption: Interruption { max_interruptions: 2, ..Interruption::default() },
        ..SweepOptions::default()
    };
    assert_eq!(fixture.sweep(&options).await.expect("sweep").recovered, 1);
    let last = lines.of(kind).pop().expect("a line");
    assert_eq!((last.level, last.get("outcome")), (Level::ERROR, "failed_permanent"));
    assert!(last.get("error").contains("Quarantined"), "{last:?}");
}

async fn an_attempt_of_an_http_worker_is_one_line(fixture: Fixture) {
    let (lines, kind) = (Lines::installed(), new_kind());
    let http = HttpClient::new(&fixture);
    let id = fixture.add(job(kind).retry(RetryPolicy::fixed(MINUTE))).await;
    let leased = http.post("/leases", &json!({ "kinds": [kind] })).await.expect_status(200).json();
    let (worker, lease) = (&leased["worker_id"], &leased["jobs"][0]);
    let item = json!({ "id": id.to_string(), "lease_no": lease["lease_no"], "outcome": "failed", "error": "refused" });
    for _ in 0..2 {
        // The second call repeats the first, whose response may have been lost.
        let body = json!({ "worker_id": worker, "items": [item] });
        let settled = http.post("/leases/settle", &body).await.expect_status(200).json();
        assert_eq!(settled["items"][0]["settled"], "stored");
    }
    let [line] = &lines.of(kind)[..] else { panic!("not one line: {:?}", lines.of(kind)) };
    assert_eq!((line.level, line.get("outcome"), line.get("error")), (Level::WARN, "retrying", "refused"));
    assert_eq!(line.number("next_run_in_seconds"), 60.0);
    assert_eq!(line.get("worker_id"), worker.as_str().expect("a worker"));
}

async fn under_load_further_lines_are_counted(fixture: Fixture) {
    const JOBS: usize = 1000;
    let (lines, kind) = (Lines::installed(), new_kind());
    fixture.enqueue_many((0..JOBS).map(|n| NewJob::new(kind, &n))).await.expect("enqueue");
    let began = Instant::now();
    let client = fixture.client().log_successes_at(Level::INFO);
    let builder =
        Worker::builder(client).function(kind, |_: usize, _: Context| async { Ok::<(), Failure>(()) });
    assert_eq!(drain(builder).await.succeeded, JOBS as u64);
    let written = lines.of(kind);
    assert!(written.iter().all(|line| line.level == Level::INFO));
    let intervals = began.elapsed().as_secs() as usize + 2;
    assert!(written.len() <= 20 * intervals, "{} lines in {intervals} intervals", written.len());
    // Cases in the same process may add to it.
    let suppressed: f64 = lines
        .all()
        .iter()
        .filter(|line| line.fields.contains_key("suppressed"))
        .map(|line| line.number("suppressed"))
        .sum();
    assert!(written.len() + suppressed as usize >= JOBS, "{} lines, {suppressed} suppressed", written.len());
}
