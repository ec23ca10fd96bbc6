//! A process that is told to go: jobs that outlast the grace go back, uncharged.

use std::time::Duration;

use longshore::{AttemptEnd, Status};

use crate::fleet::{Fleet, ms, on_every_engine};
use crate::worker::EventKind;

on_every_engine!(
    jobs_that_outlast_the_grace_period_are_released_uncharged,
    a_second_signal_stops_the_worker_at_once
);

/// The process is gone this long after the grace.
const GONE_WITHIN: Duration = Duration::from_secs(2);

async fn jobs_that_outlast_the_grace_period_are_released_uncharged(fleet: &mut Fleet) {
    fleet.config.concurrency = 25;
    fleet.config.threads = 4;
    let mut ids = fleet.enqueue("sleep", &[600_000], 12).await;
    ids.extend(fleet.enqueue("ignore_stop", &[600_000], 12).await);
    ids.extend(fleet.enqueue("block", &[600_000], 1).await);
    let worker = fleet.start();
    fleet.wait_until("all run", async |fleet| fleet.events_of(&EventKind::Start).len() == ids.len()).await;

    let grace = fleet.config.grace;
    fleet.worker(worker).signal("TERM");
    let (status, took) = fleet.worker(worker).wait_for_exit().await;
    assert!(status.success(), "{status}");
    assert!(took >= grace, "it waited for its jobs: {took:?}");
    assert!(took < grace + GONE_WITHIN, "it was gone after {took:?}");
    assert_eq!(fleet.events_of(&EventKind::Stop("Shutdown".into())).len(), 12, "who listens is told");
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0), "{}", job.kind);
        let ends: Vec<_> = job.errors.iter().map(|entry| entry.what).collect();
        assert!(ends.iter().all(|what| *what == AttemptEnd::Released), "{ends:?}");
    }
    assert_eq!(fleet.registered_workers().await, 0, "it has signed off");
}

async fn a_second_signal_stops_the_worker_at_once(fleet: &mut Fleet) {
    fleet.config.grace = Duration::from_secs(600);
    let ids = fleet.enqueue("sleep", &[600_000], 4).await;
    let worker = fleet.start();
    fleet.wait_until("all run", async |fleet| fleet.events_of(&EventKind::Start).len() == ids.len()).await;

    fleet.worker(worker).signal("INT");
    fleet.wait_until("it has heard", async |fleet| fleet.worker(worker).stderr().contains("stopping")).await;
    tokio::time::sleep(ms(50)).await;
    assert!(fleet.worker(worker).exit_status().is_none(), "the first signal lets jobs finish");
    fleet.worker(worker).signal("TERM");
    let (status, took) = fleet.worker(worker).wait_for_exit().await;
    assert!(status.success() && took < GONE_WITHIN, "{status} after {took:?}");
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts), (Status::Queued, 0));
    }
}
