//! Processes that receive a stop signal: jobs that outlast the grace period are
//! released, uncharged.

use std::time::Duration;

use longshore::{AttemptEnd, Status};

use crate::fleet::{Fleet, ms, on_every_engine};
use crate::worker::EventKind;

on_every_engine!(
    jobs_that_outlast_the_grace_period_are_released_uncharged,
    a_second_signal_stops_the_worker_at_once,
);

async fn jobs_that_outlast_the_grace_period_are_released_uncharged(fleet: &mut Fleet) {
    fleet.config.concurrency = 25;
    fleet.config.threads = 4;
    let mut ids = fleet.enqueue("sleep", &[600_000], 12).await;
    ids.extend(fleet.enqueue("ignore_stop", &[600_000], 12).await);
    ids.extend(fleet.enqueue("block", &[600_000], 1).await);
    let worker = fleet.start();
    fleet.wait_until_started(ids.len()).await;

    let grace = fleet.config.grace;
    fleet.process(worker).signal("TERM");
    let (status, took) = fleet.process(worker).wait_for_exit().await;
    assert!(status.success(), "{status}");
    assert!(took >= grace, "the worker waits for its jobs: {took:?}");
    let stops = fleet.events_of(&EventKind::Stop("Shutdown".into()));
    assert_eq!(stops.len(), 12, "handlers that wait for a stop get it");
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Queued, 0, 0), "{}", job.kind);
        let ends: Vec<_> = job.errors.iter().map(|entry| entry.what).collect();
        assert!(ends.iter().all(|end| *end == AttemptEnd::Released), "{ends:?}");
    }
    assert_eq!(fleet.registered_workers().await, 0, "the worker has signed off");
}

async fn a_second_signal_stops_the_worker_at_once(fleet: &mut Fleet) {
    fleet.config.grace = Duration::from_secs(600);
    let ids = fleet.enqueue("sleep", &[600_000], 4).await;
    let worker = fleet.start();
    fleet.wait_until_started(ids.len()).await;

    fleet.process(worker).signal("INT");
    fleet
        .wait_until("the worker handles the signal", async |fleet| {
            fleet.process(worker).stderr().contains("stopping")
        })
        .await;
    tokio::time::sleep(ms(50)).await;
    assert!(fleet.process(worker).exit_status().is_none(), "the first signal lets jobs finish");
    fleet.process(worker).signal("TERM");
    let (status, _) = fleet.process(worker).wait_for_exit().await;
    assert!(status.success(), "{status}");
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts), (Status::Queued, 0));
    }
}
