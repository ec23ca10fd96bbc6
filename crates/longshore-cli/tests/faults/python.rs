//! Workers in another language: `examples/python/worker.py` at the API of a
//! real server, which has no handlers and alone recovers what the dead held.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use longshore::{AttemptEnd, Cancelled, JobId, NewJob, Outcome, Status};
use serde_json::{Value, json};

use crate::fleet::{Fleet, on_every_engine};

on_every_engine!(
    each_job_of_a_python_worker_killed_five_times_succeeds_once,
    a_cancel_reaches_a_running_python_handler,
    a_python_worker_finishes_its_jobs_and_signs_off_on_sigterm,
    a_python_worker_survives_a_server_restart,
);

/// How many jobs a Python worker runs at once.
const SLOTS: usize = 8;
/// When a silent worker is dead: the least that the API allows, and long enough
/// for a busy machine where nobody dies.
const SOON: Duration = Duration::from_secs(3);
const LATE: Duration = Duration::from_secs(20);

async fn each_job_of_a_python_worker_killed_five_times_succeeds_once(fleet: &mut Fleet) {
    // `LONGSHORE_FAULTS_PYTHON=5000` for a run of that many.
    let jobs: usize = std::env::var("LONGSHORE_FAULTS_PYTHON").map_or(500, |jobs| jobs.parse().unwrap());
    let deaths = 5;
    let (_, url) = serve(fleet, "127.0.0.1:0").await;
    enqueue(fleet, 0.02, jobs).await;
    let mut worker = python(fleet, &url, SOON);
    for death in 1..=deaths {
        wait_until_succeeded(fleet, jobs * death / (deaths + 1)).await;
        // It stands still while it is looked at, so that it dies holding some.
        fleet
            .wait_until("it holds some", async |fleet| {
                fleet.worker(worker).signal("STOP");
                let holds = fleet.count(Status::Running).await > 0;
                fleet.worker(worker).signal(if holds { "KILL" } else { "CONT" });
                holds
            })
            .await;
        worker = python(fleet, &url, SOON);
    }
    wait_until_succeeded(fleet, jobs).await;

    let mut interrupted = 0;
    let all = fleet.jobs().await;
    assert_eq!(all.len(), jobs);
    for job in all {
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 1), "{}", job.id);
        interrupted += usize::from(job.interruptions > 0);
        if job.lease_no > 1 {
            let history = fleet.get(job.id).await.errors;
            assert_eq!(history.len(), job.lease_no as usize - 1, "each lease but the last is accounted for");
            // Released: it died while the answer with the lease was on its way.
            let explained = [AttemptEnd::Interrupted, AttemptEnd::Released];
            assert!(history.iter().all(|entry| explained.contains(&entry.what)), "{history:?}");
        }
    }
    assert!(interrupted > 0, "some were held by the dead");
    let hour_ago = fleet.client().store().now().await.unwrap() - Duration::from_secs(3600);
    let tallied = fleet.client().tallied(hour_ago).await.unwrap();
    let successes = tallied.iter().filter(|tally| tally.outcome == Outcome::Succeeded);
    assert_eq!(successes.map(|tally| tally.jobs).sum::<u64>(), jobs as u64, "each was settled once");
    assert!(longshore(fleet).arg("check").output().unwrap().status.success());
    eprintln!("{jobs} jobs, {deaths} deaths, {interrupted} jobs interrupted");
}

async fn a_cancel_reaches_a_running_python_handler(fleet: &mut Fleet) {
    let (_, url) = serve(fleet, "127.0.0.1:0").await;
    let id = enqueue(fleet, 600.0, 1).await[0];
    let worker = python(fleet, &url, LATE);
    fleet.wait_until("it runs", async |fleet| fleet.count(Status::Running).await == 1).await;
    assert_eq!(fleet.client().cancel(id).await.unwrap(), Cancelled::Pending);
    fleet.wait_until("it ends", async |fleet| fleet.count(Status::Running).await == 0).await;

    let job = fleet.get(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 1, 0));
    let why = job.last_error.unwrap_or_default();
    assert!(why.contains("stopped while waiting"), "the handler says so: {why}");
    enqueue(fleet, 0.0, 1).await;
    fleet.wait_until_succeeded(1).await;
    assert!(fleet.worker(worker).exit_status().is_none(), "it has gone on");
}

async fn a_python_worker_finishes_its_jobs_and_signs_off_on_sigterm(fleet: &mut Fleet) {
    let (_, url) = serve(fleet, "127.0.0.1:0").await;
    let worker = python(fleet, &url, LATE);
    let begun = enqueue(fleet, 3.0, SLOTS).await;
    fleet.wait_until("all run", async |fleet| fleet.count(Status::Running).await == SLOTS as u64).await;
    fleet.worker(worker).signal("TERM");
    let left = enqueue(fleet, 0.0, 20).await;
    let (status, _) = fleet.worker(worker).wait_for_exit().await;
    assert!(status.success(), "{status}");

    for id in begun {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 0));
    }
    for id in left {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.lease_no), (Status::Queued, 0, 0));
    }
    let workers = fleet.client().workers(None).await.unwrap();
    assert!(workers.iter().all(|worker| worker.name.starts_with("server")), "{workers:?}");
}

async fn a_python_worker_survives_a_server_restart(fleet: &mut Fleet) {
    let (first, url) = serve(fleet, "127.0.0.1:0").await;
    let worker = python(fleet, &url, LATE);
    let ids = enqueue(fleet, 1.0, SLOTS).await;
    fleet.wait_until("all run", async |fleet| fleet.count(Status::Running).await == SLOTS as u64).await;
    fleet.worker(first).signal("KILL");
    fleet.worker(first).wait_for_exit().await;
    fleet
        .wait_until("the handlers cannot settle", async |fleet| {
            fleet.worker(worker).stderr().matches("not settled").count() >= SLOTS
        })
        .await;
    let (_, again) = serve(fleet, url.strip_prefix("http://").unwrap()).await;
    assert_eq!(again, url);
    fleet.wait_until_succeeded(SLOTS).await;
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 0, 1), "settled when it could be");
    }
}

// ---- processes ---------------------------------------------------------------

fn longshore(fleet: &Fleet) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longshore"));
    command.env("DATABASE_URL", &fleet.config.url);
    command
}

/// A server without handlers, and where it listens.
async fn serve(fleet: &mut Fleet, bind: &str) -> (usize, String) {
    let config = fleet.config.clone();
    let millis = |time: Duration| format!("{}ms", time.as_millis());
    let mut command = longshore(fleet);
    command.args(["serve", "--json", "--allow-unknown-kinds", "--bind", bind]);
    command.args(["--heartbeat-interval", &millis(config.heartbeat)]);
    command.args(["--sweep-threshold", &millis(config.threshold)]);
    command.args(["--sweep-interval", &millis(config.sweep)]);
    command.args(["--recovery-delay", &millis(config.recovery_delay)]);
    // Nobody is poison here, however often it is hit.
    command.args(["--max-interruptions", "20"]);
    let server = fleet.spawn(&mut command);
    let mut url = None;
    fleet
        .wait_until("the server listens", async |fleet| {
            let greeting: Option<Value> = serde_json::from_str(&fleet.worker(server).stdout()).ok();
            url = greeting.and_then(|greeting| greeting["url"].as_str().map(str::to_owned));
            url.is_some()
        })
        .await;
    (server, url.unwrap())
}

fn python(fleet: &mut Fleet, url: &str, stale_after: Duration) -> usize {
    let there = Command::new("python3").arg("--version").output().is_ok_and(|said| said.status.success());
    assert!(there, "python3 is missing; install Python 3.9 or later (Debian: apt-get install python3)");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python/worker.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(url).env("no_proxy", "*");
    command.env("LONGSHORE_SLOTS", SLOTS.to_string());
    command.env("LONGSHORE_STALE_AFTER", stale_after.as_secs().to_string());
    fleet.spawn(&mut command)
}

/// Waits for so many, patiently while there is progress.
async fn wait_until_succeeded(fleet: &mut Fleet, jobs: usize) {
    let mut seen = 0;
    while seen < jobs as u64 {
        let before = seen;
        fleet
            .wait_until("another job succeeds", async |fleet| {
                seen = fleet.count(Status::Succeeded).await;
                seen > before
            })
            .await;
    }
}

/// Enqueues jobs that take so many seconds.
async fn enqueue(fleet: &Fleet, seconds: f64, count: usize) -> Vec<JobId> {
    let jobs = (0..count).map(|_| NewJob::new("wait", &json!({ "seconds": seconds })));
    let enqueued = fleet.client().enqueue_many(jobs).await.unwrap();
    enqueued.into_iter().map(|job| job.id).collect()
}
