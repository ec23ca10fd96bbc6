//! A process that is told to go: jobs that outlast the grace go back, uncharged.

use std::time::Duration;

use longshore::{AttemptEnd, Status};

use crate::crew::{Crew, ms, on_every_engine};
use crate::worker::What;

on_every_engine!(jobs_that_outlast_the_grace_go_back_uncharged, a_second_signal_ends_it_at_once);

/// The process is gone this long after the grace.
const GONE_WITHIN: Duration = Duration::from_secs(2);

async fn jobs_that_outlast_the_grace_go_back_uncharged(crew: &mut Crew) {
    crew.orders.concurrency = 25;
    crew.orders.threads = 4;
    let mut ids = crew.enqueue("sleep", &[600_000], 12).await;
    ids.extend(crew.enqueue("stubborn", &[600_000], 12).await);
    ids.extend(crew.enqueue("block", &[600_000], 1).await);
    let worker = crew.start();
    crew.until("all run", async |crew| crew.of(&What::Start).len() == ids.len()).await;

    let grace = crew.orders.grace;
    crew.worker(worker).signal("TERM");
    let (status, took) = crew.worker(worker).end().await;
    assert!(status.success(), "{status}");
    assert!(took >= grace, "it waited for its jobs: {took:?}");
    assert!(took < grace + GONE_WITHIN, "it was gone after {took:?}");
    assert_eq!(crew.of(&What::Stop("Shutdown".into())).len(), 12, "who listens is told");
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0), "{}", job.kind);
        let ends: Vec<_> = job.errors.iter().map(|entry| entry.what).collect();
        assert!(ends.iter().all(|what| *what == AttemptEnd::Released), "{ends:?}");
    }
    assert_eq!(crew.registered().await, 0, "it has signed off");
}

async fn a_second_signal_ends_it_at_once(crew: &mut Crew) {
    crew.orders.grace = Duration::from_secs(600);
    let ids = crew.enqueue("sleep", &[600_000], 4).await;
    let worker = crew.start();
    crew.until("all run", async |crew| crew.of(&What::Start).len() == ids.len()).await;

    crew.worker(worker).signal("INT");
    crew.until("it has heard", async |crew| crew.worker(worker).said().contains("stopping")).await;
    tokio::time::sleep(ms(50)).await;
    assert!(crew.worker(worker).ended().is_none(), "the first signal lets jobs finish");
    crew.worker(worker).signal("TERM");
    let (status, took) = crew.worker(worker).end().await;
    assert!(status.success() && took < GONE_WITHIN, "{status} after {took:?}");
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.attempts), (Status::Queued, 0));
    }
}
