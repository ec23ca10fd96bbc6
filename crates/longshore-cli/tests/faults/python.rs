//! Workers in another language: `examples/python/worker.py` at the API of a
//! real server, which has no handlers and alone recovers what the dead held.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use longshore::{AttemptEnd, Cancelled, JobId, NewJob, Outcome, Status};
use serde_json::{Value, json};

use crate::crew::{Crew, on_every_engine};

on_every_engine!(
    each_job_of_a_python_worker_killed_five_times_succeeds_once,
    a_cancel_reaches_a_running_python_handler,
    a_python_worker_told_to_go_finishes_and_signs_off,
    a_python_worker_outlives_its_server,
);

/// How many jobs a Python worker runs at once.
const SLOTS: usize = 8;
/// When a silent worker is dead: the least that the API allows, and long enough
/// for a busy machine where nobody dies.
const SOON: Duration = Duration::from_secs(3);
const LATE: Duration = Duration::from_secs(20);

async fn each_job_of_a_python_worker_killed_five_times_succeeds_once(crew: &mut Crew) {
    // `LONGSHORE_FAULTS_PYTHON=5000` for a run of that many.
    let jobs: usize = std::env::var("LONGSHORE_FAULTS_PYTHON").map_or(500, |jobs| jobs.parse().unwrap());
    let deaths = 5;
    let (_, url) = serve(crew, "127.0.0.1:0").await;
    enqueue(crew, 0.02, jobs).await;
    let mut worker = python(crew, &url, SOON);
    for death in 1..=deaths {
        until_succeeded(crew, jobs * death / (deaths + 1)).await;
        // It stands still while it is looked at, so that it dies holding some.
        crew.until("it holds some", async |crew| {
            crew.worker(worker).signal("STOP");
            let holds = crew.count(Status::Running).await > 0;
            crew.worker(worker).signal(if holds { "KILL" } else { "CONT" });
            holds
        })
        .await;
        worker = python(crew, &url, SOON);
    }
    until_succeeded(crew, jobs).await;

    let mut interrupted = 0;
    let all = crew.jobs().await;
    assert_eq!(all.len(), jobs);
    for job in all {
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 1), "{}", job.id);
        interrupted += usize::from(job.interruptions > 0);
        if job.lease_no > 1 {
            let history = crew.get(job.id).await.errors;
            assert_eq!(history.len(), job.lease_no as usize - 1, "each lease but the last is accounted for");
            // Released: it died while the answer with the lease was on its way.
            let explained = [AttemptEnd::Interrupted, AttemptEnd::Released];
            assert!(history.iter().all(|entry| explained.contains(&entry.what)), "{history:?}");
        }
    }
    assert!(interrupted > 0, "some were held by the dead");
    let hour_ago = crew.client().store().now().await.unwrap() - Duration::from_secs(3600);
    let tallied = crew.client().tallied(hour_ago).await.unwrap();
    let successes = tallied.iter().filter(|tally| tally.outcome == Outcome::Succeeded);
    assert_eq!(successes.map(|tally| tally.jobs).sum::<u64>(), jobs as u64, "each was settled once");
    assert!(longshore(crew).arg("check").output().unwrap().status.success());
    eprintln!("{jobs} jobs, {deaths} deaths, {interrupted} jobs interrupted");
}

async fn a_cancel_reaches_a_running_python_handler(crew: &mut Crew) {
    let (_, url) = serve(crew, "127.0.0.1:0").await;
    let id = enqueue(crew, 600.0, 1).await[0];
    let worker = python(crew, &url, LATE);
    crew.until("it runs", async |crew| crew.count(Status::Running).await == 1).await;
    assert_eq!(crew.client().cancel(id).await.unwrap(), Cancelled::Pending);
    crew.until("it ends", async |crew| crew.count(Status::Running).await == 0).await;

    let job = crew.get(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 1, 0));
    let why = job.last_error.unwrap_or_default();
    assert!(why.contains("stopped while waiting"), "the handler says so: {why}");
    enqueue(crew, 0.0, 1).await;
    crew.until_succeeded(1).await;
    assert!(crew.worker(worker).ended().is_none(), "it has gone on");
}

async fn a_python_worker_told_to_go_finishes_and_signs_off(crew: &mut Crew) {
    let (_, url) = serve(crew, "127.0.0.1:0").await;
    let worker = python(crew, &url, LATE);
    let begun = enqueue(crew, 3.0, SLOTS).await;
    crew.until("all run", async |crew| crew.count(Status::Running).await == SLOTS as u64).await;
    crew.worker(worker).signal("TERM");
    let left = enqueue(crew, 0.0, 20).await;
    let (status, _) = crew.worker(worker).end().await;
    assert!(status.success(), "{status}");

    for id in begun {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 0));
    }
    for id in left {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.attempts, job.lease_no), (Status::Queued, 0, 0));
    }
    let workers = crew.client().workers(None).await.unwrap();
    assert!(workers.iter().all(|worker| worker.name.starts_with("server")), "{workers:?}");
}

async fn a_python_worker_outlives_its_server(crew: &mut Crew) {
    let (first, url) = serve(crew, "127.0.0.1:0").await;
    let worker = python(crew, &url, LATE);
    let ids = enqueue(crew, 1.0, SLOTS).await;
    crew.until("all run", async |crew| crew.count(Status::Running).await == SLOTS as u64).await;
    crew.worker(first).signal("KILL");
    crew.worker(first).end().await;
    crew.until("the handlers cannot settle", async |crew| {
        crew.worker(worker).said().matches("not settled").count() >= SLOTS
    })
    .await;
    let (_, again) = serve(crew, url.strip_prefix("http://").unwrap()).await;
    assert_eq!(again, url);
    crew.until_succeeded(SLOTS).await;
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 0, 1), "settled when it could be");
    }
}

// ---- processes ---------------------------------------------------------------

fn longshore(crew: &Crew) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longshore"));
    command.env("DATABASE_URL", &crew.orders.url);
    command
}

/// A server without handlers, and where it listens.
async fn serve(crew: &mut Crew, bind: &str) -> (usize, String) {
    let orders = crew.orders.clone();
    let millis = |time: Duration| format!("{}ms", time.as_millis());
    let mut command = longshore(crew);
    command.args(["serve", "--json", "--allow-unknown-kinds", "--bind", bind]);
    command.args(["--heartbeat-interval", &millis(orders.heartbeat)]);
    command.args(["--sweep-threshold", &millis(orders.threshold)]);
    command.args(["--sweep-interval", &millis(orders.sweep)]);
    command.args(["--recovery-delay", &millis(orders.recovery_delay)]);
    // Nobody is poison here, however often it is hit.
    command.args(["--max-interruptions", "20"]);
    let server = crew.launch(&mut command);
    let mut url = None;
    crew.until("the server listens", async |crew| {
        let greeting: Option<Value> = serde_json::from_str(&crew.worker(server).printed()).ok();
        url = greeting.and_then(|greeting| greeting["url"].as_str().map(str::to_owned));
        url.is_some()
    })
    .await;
    (server, url.unwrap())
}

fn python(crew: &mut Crew, url: &str, stale_after: Duration) -> usize {
    let there = Command::new("python3").arg("--version").output().is_ok_and(|said| said.status.success());
    assert!(there, "python3 is missing; install Python 3.9 or later (Debian: apt-get install python3)");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python/worker.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(url).env("no_proxy", "*");
    command.env("LONGSHORE_SLOTS", SLOTS.to_string());
    command.env("LONGSHORE_STALE_AFTER", stale_after.as_secs().to_string());
    crew.launch(&mut command)
}

/// Waits for so many, patiently while there is progress.
async fn until_succeeded(crew: &mut Crew, jobs: usize) {
    let mut seen = 0;
    while seen < jobs as u64 {
        let before = seen;
        crew.until("another job succeeds", async |crew| {
            seen = crew.count(Status::Succeeded).await;
            seen > before
        })
        .await;
    }
}

/// Enqueues jobs that take so many seconds.
async fn enqueue(crew: &Crew, seconds: f64, count: usize) -> Vec<JobId> {
    let jobs = (0..count).map(|_| NewJob::new("wait", &json!({ "seconds": seconds })));
    let enqueued = crew.client().enqueue_many(jobs).await.unwrap();
    enqueued.into_iter().map(|job| job.id).collect()
}
