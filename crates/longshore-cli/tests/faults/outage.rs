//! The database goes away under load and comes back.

use std::time::{Duration, Instant};

use longshore::{AttemptEnd, Status};

use crate::fleet::{Fleet, ms};
use crate::postgres_server::PostgresServer;
use crate::worker::EventKind;

const POLL: Duration = Duration::from_secs(600);
/// Work goes on this soon after the server is ready again.
const RESUMES_WITHIN: Duration = Duration::from_secs(10);

#[test]
fn a_database_outage_loses_no_job_and_charges_no_attempt() {
    let Some(server) = PostgresServer::create() else {
        return eprintln!("skipped: there are no Postgres server programs (initdb, pg_ctl, postgres)");
    };
    Fleet::postgres(&server.url()).run(async |fleet| {
        // `LONGSHORE_FAULTS_OUTAGE=20` for one of twenty seconds.
        let seconds = std::env::var("LONGSHORE_FAULTS_OUTAGE").map(|seconds| seconds.parse().unwrap());
        let lasts = seconds.map_or(ms(1500), Duration::from_secs);
        fleet.config.threshold = lasts + ms(2500);
        fleet.config.heartbeat = fleet.config.threshold / 10;
        // Long enough to tell a listener from a poll.
        fleet.config.poll = POLL;
        let workers = [fleet.start(), fleet.start()];
        fleet.wait_until("both register", async |fleet| fleet.registered_workers().await == 2).await;

        short(fleet, &server, lasts).await;
        long(fleet, &server).await;

        for nth in workers {
            assert!(fleet.worker(nth).exit_status().is_none(), "no process has ended");
        }
        // Three in a row are not found by polls in so short a time.
        let done = fleet.count(Status::Succeeded).await as usize;
        let began = Instant::now();
        for nth in 1..=3 {
            fleet.enqueue("noop", &[], 1).await;
            fleet.wait_until_succeeded(done + nth).await;
        }
        assert!(began.elapsed() < POLL, "the listeners are back: {:?}", began.elapsed());
    });
}

/// Shorter than any threshold: nobody notices but by the delay.
async fn short(fleet: &mut Fleet, server: &PostgresServer, lasts: Duration) {
    let ids = fleet.enqueue("sleep", &[20], 600).await;
    outage(fleet, server, lasts).await;
    fleet.wait_until_succeeded(ids.len()).await;
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.attempts, job.interruptions), (1, 0), "{job:?}");
    }
}

/// Longer than the threshold: handlers are stopped and run again, uncharged.
async fn long(fleet: &mut Fleet, server: &PostgresServer) {
    let before = fleet.count(Status::Succeeded).await as usize;
    let mut ids = fleet.enqueue("sleep", &[60_000, 10], 4).await;
    ids.extend(fleet.enqueue("sleep", &[20], 300).await);
    let longer = fleet.config.threshold + ms(1500);
    outage(fleet, server, longer).await;
    fleet.wait_until_succeeded(before + ids.len()).await;
    let stopped = fleet.events_of(&EventKind::Stop("Disconnected".into()));
    assert!(stopped.len() >= 4, "handlers were stopped before their leases could be given away");
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!(job.attempts, 1, "not charged: {job:?}");
        assert!(job.errors.iter().all(|entry| entry.what != AttemptEnd::Failed), "{:?}", job.errors);
    }
}

async fn outage(fleet: &mut Fleet, server: &PostgresServer, lasts: Duration) {
    let before = fleet.events_of(&EventKind::Success).len();
    fleet
        .wait_until("the load is on", async |fleet| fleet.events_of(&EventKind::Success).len() >= before + 50)
        .await;
    server.stop();
    // The outage itself: nothing can be asked meanwhile.
    tokio::time::sleep(lasts).await;
    server.start();
    // Our own client hears of it by an error, once for the connections it had.
    fleet.wait_until("the server answers us", async |fleet| fleet.client().store().now().await.is_ok()).await;
    let (ready, done) = (Instant::now(), fleet.events_of(&EventKind::Success).len());
    fleet.wait_until("work goes on", async |fleet| fleet.events_of(&EventKind::Success).len() > done).await;
    eprintln!("after {lasts:?} without a server, work went on within {:?}", ready.elapsed());
    assert!(ready.elapsed() < RESUMES_WITHIN, "work goes on after {:?}", ready.elapsed());
}
