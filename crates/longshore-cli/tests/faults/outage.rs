//! The database goes away under load and comes back.

use std::time::{Duration, Instant};

use longshore::{AttemptEnd, Status};

use crate::cluster::Cluster;
use crate::crew::{Crew, ms};
use crate::worker::What;

const POLL: Duration = Duration::from_secs(600);
/// Work goes on this soon after the server is ready again.
const RESUMES_WITHIN: Duration = Duration::from_secs(10);

#[test]
fn an_outage_costs_nobody_a_job_or_an_attempt() {
    let Some(cluster) = Cluster::start() else {
        return eprintln!("skipped: there are no Postgres server programs (initdb, pg_ctl, postgres)");
    };
    Crew::postgres(&cluster.url()).run(async |crew| {
        // `LONGSHORE_FAULTS_OUTAGE=20` for one of twenty seconds.
        let seconds = std::env::var("LONGSHORE_FAULTS_OUTAGE").map(|seconds| seconds.parse().unwrap());
        let lasts = seconds.map_or(ms(1500), Duration::from_secs);
        crew.orders.threshold = lasts + ms(2500);
        crew.orders.heartbeat = crew.orders.threshold / 10;
        // Long enough to tell a listener from a poll.
        crew.orders.poll = POLL;
        let workers = [crew.start(), crew.start()];
        crew.until("both register", async |crew| crew.registered().await == 2).await;

        short(crew, &cluster, lasts).await;
        long(crew, &cluster).await;

        for nth in workers {
            assert!(crew.worker(nth).ended().is_none(), "no process has ended");
        }
        // Three in a row are not found by polls in so short a time.
        let done = crew.count(Status::Succeeded).await as usize;
        let began = Instant::now();
        for nth in 1..=3 {
            crew.enqueue("noop", &[], 1).await;
            crew.until_succeeded(done + nth).await;
        }
        assert!(began.elapsed() < POLL, "the listeners are back: {:?}", began.elapsed());
    });
}

/// Shorter than any threshold: nobody notices but by the delay.
async fn short(crew: &mut Crew, cluster: &Cluster, lasts: Duration) {
    let ids = crew.enqueue("sleep", &[20], 600).await;
    outage(crew, cluster, lasts).await;
    crew.until_succeeded(ids.len()).await;
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.attempts, job.interruptions), (1, 0), "{job:?}");
    }
}

/// Longer than the threshold: handlers are stopped and run again, uncharged.
async fn long(crew: &mut Crew, cluster: &Cluster) {
    let before = crew.count(Status::Succeeded).await as usize;
    let mut ids = crew.enqueue("sleep", &[60_000, 10], 4).await;
    ids.extend(crew.enqueue("sleep", &[20], 300).await);
    let longer = crew.orders.threshold + ms(1500);
    outage(crew, cluster, longer).await;
    crew.until_succeeded(before + ids.len()).await;
    let stopped = crew.of(&What::Stop("Disconnected".into()));
    assert!(stopped.len() >= 4, "handlers were stopped before their leases could be given away");
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!(job.attempts, 1, "not charged: {job:?}");
        assert!(job.errors.iter().all(|entry| entry.what != AttemptEnd::Failed), "{:?}", job.errors);
    }
}

async fn outage(crew: &mut Crew, cluster: &Cluster, lasts: Duration) {
    let before = crew.of(&What::Success).len();
    crew.until("the load is on", async |crew| crew.of(&What::Success).len() >= before + 50).await;
    cluster.down();
    // The outage itself: nothing can be asked meanwhile.
    tokio::time::sleep(lasts).await;
    cluster.up();
    // Our own client hears of it by an error, once for the connections it had.
    crew.until("the server answers us", async |crew| crew.client().store().now().await.is_ok()).await;
    let (ready, done) = (Instant::now(), crew.of(&What::Success).len());
    crew.until("work goes on", async |crew| crew.of(&What::Success).len() > done).await;
    eprintln!("after {lasts:?} without a server, work went on within {:?}", ready.elapsed());
    assert!(ready.elapsed() < RESUMES_WITHIN, "work goes on after {:?}", ready.elapsed());
}
