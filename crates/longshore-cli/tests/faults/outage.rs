//! The database goes away under load and comes back.

use std::time::{Duration, Instant};

use longshore::{AttemptEnd, Status};

use crate::fleet::{Fleet, ms};
use crate::missing::skip;
use crate::postgres_server::PostgresServer;
use crate::worker::{EventKind, UNTIL_OPENED};

/// So long that a job that starts was found by a wake-up and not by a poll.
const POLL: Duration = Duration::from_secs(600);

#[test]
fn a_database_outage_loses_no_job_and_charges_no_attempt() {
    let Some(server) = PostgresServer::create() else {
        return skip("no Postgres server programs (initdb, pg_ctl, postgres) are installed");
    };
    Fleet::postgres(&server.url()).run(async |fleet| {
        // `LONGSHORE_FAULTS_OUTAGE=20` makes the outage last twenty seconds.
        let seconds = std::env::var("LONGSHORE_FAULTS_OUTAGE").map(|seconds| seconds.parse().unwrap());
        let length = seconds.map_or(ms(1500), Duration::from_secs);
        // Longer than the outage takes with the stop and the start of the server.
        fleet.config.threshold = length + ms(10_500);
        fleet.config.heartbeat = fleet.config.threshold / 10;
        fleet.config.poll = POLL;
        let workers = [fleet.start(), fleet.start()];
        fleet.wait_until("both workers register", async |fleet| fleet.registered_workers().await == 2).await;

        short_outage(fleet, &server, length).await;
        long_outage(fleet, &server).await;

        for worker in workers {
            assert!(fleet.process(worker).exit_status().is_none(), "both processes are still running");
        }
        // The workers listen for wake-ups again: no poll finds these jobs.
        let done = fleet.count(Status::Succeeded).await as usize;
        for nth in 1..=3 {
            fleet.enqueue("noop", &[], 1).await;
            fleet.wait_until_succeeded(done + nth).await;
        }
    });
}

#[test]
fn results_are_stored_after_an_outage_during_the_grace_period() {
    let Some(server) = PostgresServer::create() else {
        return skip("no Postgres server programs (initdb, pg_ctl, postgres) are installed");
    };
    Fleet::postgres(&server.url()).run(async |fleet| {
        const JOBS: usize = 20;
        fleet.config.concurrency = JOBS as u32;
        fleet.config.grace = Duration::from_secs(60);
        let ids = fleet.enqueue("sleep", &[UNTIL_OPENED], JOBS).await;
        let worker = fleet.start();
        fleet.wait_until_started(JOBS).await;
        fleet.process(worker).signal("TERM");
        server.stop();
        fleet.open_gate();
        fleet
            .wait_until("the worker has results that it cannot store", async |fleet| {
                fleet.process(worker).stderr().contains("waiting for the database to store results")
            })
            .await;
        assert!(fleet.process(worker).exit_status().is_none(), "the worker waits for the database");
        server.start();
        let (status, took) = fleet.process(worker).wait_for_exit().await;
        assert!(status.success(), "{status}");
        eprintln!("the worker stored its results and exited {took:?} after the database was back");
        fleet
            .wait_until("the server accepts our queries", async |fleet| {
                fleet.client().store().now().await.is_ok()
            })
            .await;
        for id in ids {
            let job = fleet.get(id).await;
            assert_eq!((job.status, job.attempts, job.lease_no), (Status::Succeeded, 1, 1));
        }
        assert_eq!(fleet.events_of(&EventKind::Start).len(), JOBS, "each job ran once");
    });
}

/// Shorter than the threshold: the only effect is a delay.
async fn short_outage(fleet: &mut Fleet, server: &PostgresServer, length: Duration) {
    let ids = fleet.enqueue("sleep", &[20], 600).await;
    outage(fleet, server, length).await;
    fleet.wait_until_succeeded(ids.len()).await;
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.attempts, job.interruptions), (1, 0), "{job:?}");
    }
}

/// Longer than the threshold: handlers are stopped and run again, uncharged.
async fn long_outage(fleet: &mut Fleet, server: &PostgresServer) {
    let before = fleet.count(Status::Succeeded).await as usize;
    let mut ids = fleet.enqueue("sleep", &[60_000, 10], 4).await;
    ids.extend(fleet.enqueue("sleep", &[20], 300).await);
    let length = fleet.config.threshold + ms(1500);
    outage(fleet, server, length).await;
    fleet.wait_until_succeeded(before + ids.len()).await;
    let stopped = fleet.events_of(&EventKind::Stop("Disconnected".into()));
    assert!(stopped.len() >= 4, "handlers were stopped before another worker could get their leases");
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!(job.attempts, 1, "not charged: {job:?}");
        assert!(job.errors.iter().all(|entry| entry.what != AttemptEnd::Failed), "{:?}", job.errors);
    }
}

async fn outage(fleet: &mut Fleet, server: &PostgresServer, length: Duration) {
    let before = fleet.events_of(&EventKind::Success).len();
    fleet
        .wait_until("the workers are busy", async |fleet| {
            fleet.events_of(&EventKind::Success).len() >= before + 50
        })
        .await;
    server.stop();
    // The outage itself. The database cannot be queried meanwhile.
    tokio::time::sleep(length).await;
    server.start();
    // Our own client gets one error for each connection it had.
    fleet
        .wait_until("the server accepts our queries", async |fleet| {
            fleet.client().store().now().await.is_ok()
        })
        .await;
    let (ready, done) = (Instant::now(), fleet.events_of(&EventKind::Success).len());
    fleet
        .wait_until("the workers resume", async |fleet| fleet.events_of(&EventKind::Success).len() > done)
        .await;
    eprintln!("after an outage of {length:?}, the workers resumed within {:?}", ready.elapsed());
}
