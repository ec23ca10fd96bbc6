//! Workers in another language: `examples/python/worker.py` calls the API of a real
//! server. The server has no handlers, and is the only process that recovers jobs.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use longshore::{AttemptEnd, Cancelled, JobId, NewJob, Outcome, Status};
use serde_json::{Value, json};

use crate::fleet::{Fleet, on_every_engine};
use crate::postgres_server::free_port;

on_every_engine!(
    each_job_of_a_python_worker_killed_five_times_succeeds_once,
    a_cancel_reaches_a_running_python_handler,
    a_python_worker_finishes_its_jobs_and_signs_off_on_sigterm,
    a_python_worker_survives_a_server_restart,
);

/// How many jobs a Python worker runs at once.
const SLOTS: usize = 8;
/// The shortest `stale_after` that the API allows, for tests in which workers die.
const SHORT_STALE_AFTER: Duration = Duration::from_secs(3);
/// Long enough that no worker counts as dead because the machine is busy.
const LONG_STALE_AFTER: Duration = Duration::from_secs(60);

async fn each_job_of_a_python_worker_killed_five_times_succeeds_once(fleet: &mut Fleet) {
    // `LONGSHORE_FAULTS_PYTHON=5000` runs that many jobs.
    let jobs: usize = std::env::var("LONGSHORE_FAULTS_PYTHON").map_or(500, |jobs| jobs.parse().unwrap());
    let deaths = 5;
    let (_, url) = serve(fleet, "127.0.0.1:0").await;
    enqueue(fleet, 0.02, jobs).await;
    let mut worker = start_python(fleet, &url, SHORT_STALE_AFTER);
    for death in 1..=deaths {
        wait_until_succeeded(fleet, jobs * death / (2 * deaths)).await;
        // Pause the worker while we query the database, so that it holds jobs when it dies.
        fleet
            .wait_until("the worker holds a job", async |fleet| {
                fleet.process(worker).signal("STOP");
                let holds_jobs = fleet.count(Status::Running).await > 0;
                fleet.process(worker).signal(if holds_jobs { "KILL" } else { "CONT" });
                holds_jobs
            })
            .await;
        worker = start_python(fleet, &url, SHORT_STALE_AFTER);
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
            // A lease whose response was not delivered leaves no history.
            assert!(history.len() < job.lease_no as usize, "{history:?}");
            assert!(history.iter().all(|entry| entry.what == AttemptEnd::Interrupted), "{history:?}");
        }
    }
    assert!(interrupted > 0, "some jobs were interrupted");
    let hour_ago = fleet.client().store().now().await.unwrap() - Duration::from_secs(3600);
    let tallies = fleet.client().tallied(hour_ago).await.unwrap();
    let successes = tallies.iter().filter(|tally| tally.outcome == Outcome::Succeeded);
    assert_eq!(successes.map(|tally| tally.jobs).sum::<u64>(), jobs as u64, "each job was settled once");
    assert!(longshore(fleet).arg("check").output().unwrap().status.success());
    eprintln!("{jobs} jobs, {deaths} deaths, {interrupted} jobs interrupted");
}

async fn a_cancel_reaches_a_running_python_handler(fleet: &mut Fleet) {
    let (_, url) = serve(fleet, "127.0.0.1:0").await;
    let id = enqueue(fleet, 600.0, 1).await[0];
    let worker = start_python(fleet, &url, LONG_STALE_AFTER);
    fleet.wait_until("the job runs", async |fleet| fleet.count(Status::Running).await == 1).await;
    assert_eq!(fleet.client().cancel(id).await.unwrap(), Cancelled::Pending);
    fleet.wait_until("the job ends", async |fleet| fleet.count(Status::Running).await == 0).await;

    let job = fleet.get(id).await;
    assert_eq!((job.status, job.attempts, job.interruptions), (Status::Cancelled, 1, 0));
    let error = job.last_error.unwrap_or_default();
    assert!(error.contains("stopped while waiting"), "the handler's own error: {error}");
    enqueue(fleet, 0.0, 1).await;
    fleet.wait_until_succeeded(1).await;
    assert!(fleet.process(worker).exit_status().is_none(), "the worker is still running");
}

async fn a_python_worker_finishes_its_jobs_and_signs_off_on_sigterm(fleet: &mut Fleet) {
    let (_, url) = serve(fleet, "127.0.0.1:0").await;
    let worker = start_python(fleet, &url, LONG_STALE_AFTER);
    // Longer than the worker takes to handle the signal.
    let started = enqueue(fleet, 8.0, SLOTS).await;
    fleet.wait_until("all jobs run", async |fleet| fleet.count(Status::Running).await == SLOTS as u64).await;
    fleet.process(worker).signal("TERM");
    let unclaimed = enqueue(fleet, 0.0, 20).await;
    let (status, _) = fleet.process(worker).wait_for_exit().await;
    assert!(status.success(), "{status}");

    for id in started {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 0));
    }
    for id in unclaimed {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.lease_no), (Status::Queued, 0, 0));
    }
    let workers = fleet.client().workers(None).await.unwrap();
    assert!(workers.iter().all(|worker| worker.name.starts_with("server")), "{workers:?}");
}

async fn a_python_worker_survives_a_server_restart(fleet: &mut Fleet) {
    let (first, url) = serve(fleet, &format!("127.0.0.1:{}", free_port())).await;
    let worker = start_python(fleet, &url, LONG_STALE_AFTER);
    // Longer than it takes to kill the server when all of them run.
    let ids = enqueue(fleet, 8.0, SLOTS).await;
    fleet.wait_until("all jobs run", async |fleet| fleet.count(Status::Running).await == SLOTS as u64).await;
    fleet.process(first).signal("KILL");
    fleet.process(first).wait_for_exit().await;
    fleet
        .wait_until("the handlers cannot settle", async |fleet| {
            fleet.process(worker).stderr().matches("not settled").count() >= SLOTS
        })
        .await;
    let (_, new_url) = serve(fleet, url.strip_prefix("http://").unwrap()).await;
    assert_eq!(new_url, url);
    fleet.wait_until_succeeded(SLOTS).await;
    for id in ids {
        let job = fleet.get(id).await;
        let observed = (job.attempts, job.interruptions, job.lease_no);
        assert_eq!(observed, (1, 0, 1), "the first lease settles after the restart");
    }
}

// ---- processes ---------------------------------------------------------------

fn longshore(fleet: &Fleet) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longshore"));
    command.env("DATABASE_URL", &fleet.config.url);
    command
}

/// Starts a server without handlers, and returns its index and its URL.
async fn serve(fleet: &mut Fleet, bind: &str) -> (usize, String) {
    let config = fleet.config.clone();
    let millis = |time: Duration| format!("{}ms", time.as_millis());
    let mut command = longshore(fleet);
    command.args(["serve", "--json", "--allow-unknown-kinds", "--bind", bind]);
    command.args(["--heartbeat-interval", &millis(config.heartbeat)]);
    command.args(["--sweep-threshold", &millis(config.threshold)]);
    command.args(["--sweep-interval", &millis(config.sweep)]);
    command.args(["--recovery-delay", &millis(config.recovery_delay)]);
    // High enough that no job is quarantined.
    command.args(["--max-interruptions", "20"]);
    let server = fleet.spawn(&mut command);
    let mut url = None;
    fleet
        .wait_until("the server listens", async |fleet| {
            let output: Option<Value> = serde_json::from_str(&fleet.process(server).stdout()).ok();
            url = output.and_then(|output| output["url"].as_str().map(str::to_owned));
            url.is_some()
        })
        .await;
    (server, url.unwrap())
}

fn start_python(fleet: &mut Fleet, url: &str, stale_after: Duration) -> usize {
    let version = Command::new("python3").arg("--version").output();
    let installed = version.is_ok_and(|output| output.status.success());
    assert!(installed, "python3 is missing; install Python 3.9 or later (Debian: apt-get install python3)");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python/worker.py");
    let mut command = Command::new("python3");
    command.arg(script).arg(url).env("no_proxy", "*");
    command.env("LONGSHORE_SLOTS", SLOTS.to_string());
    command.env("LONGSHORE_STALE_AFTER", stale_after.as_secs().to_string());
    fleet.spawn(&mut command)
}

/// Waits until this many jobs have succeeded, for as long as there is progress.
async fn wait_until_succeeded(fleet: &mut Fleet, jobs: usize) {
    let mut succeeded = 0;
    while succeeded < jobs as u64 {
        let before = succeeded;
        fleet
            .wait_until("another job succeeds", async |fleet| {
                succeeded = fleet.count(Status::Succeeded).await;
                succeeded > before
            })
            .await;
    }
}

/// Enqueues `count` jobs that take this many seconds each.
async fn enqueue(fleet: &Fleet, seconds: f64, count: usize) -> Vec<JobId> {
    let jobs = (0..count).map(|_| NewJob::new("wait", &json!({ "seconds": seconds })));
    let enqueued = fleet.client().enqueue_many(jobs).await.unwrap();
    enqueued.into_iter().map(|job| job.id).collect()
}
