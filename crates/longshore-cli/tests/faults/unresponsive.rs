//! Workers that seem dead but are not: one whose threads are all blocked, and one
//! that cannot reach the database.

use std::collections::BTreeSet;
use std::time::Duration;

use longshore::Status;

use crate::fleet::{Fleet, on_every_engine, on_postgres};
use crate::proxy::Proxy;
use crate::worker::EventKind;

on_every_engine!(jobs_whose_handlers_block_every_thread_are_not_recovered);
on_postgres!(a_disconnected_worker_stops_its_handlers_before_its_threshold);

async fn jobs_whose_handlers_block_every_thread_are_not_recovered(fleet: &mut Fleet) {
    let threads = fleet.config.threads;
    fleet.config.concurrency = threads as u32;
    let ids = fleet.enqueue("block", &[], threads).await;
    let blocked = fleet.start();
    fleet.wait_until_started(threads).await;
    fleet.start_and_register().await;
    // While they block, the heartbeats continue, so the worker is never stale.
    let pid = fleet.process(blocked).pid();
    let mut heartbeats = BTreeSet::new();
    fleet
        .wait_until("the heartbeats continue", async |fleet| {
            let workers = fleet.client().workers(None).await.unwrap();
            heartbeats.extend(
                workers.iter().find(|worker| worker.pid == Some(pid)).map(|worker| worker.heartbeat_at),
            );
            heartbeats.len() > 10
        })
        .await;
    fleet.open_gate();
    fleet.wait_until_succeeded(threads).await;
    for id in ids {
        let job = fleet.get(id).await;
        let observed = (job.attempts, job.interruptions, job.lease_no);
        assert_eq!(observed, (1, 0, 1), "the first lease lasted until the end");
    }
    assert_eq!(fleet.events_of(&EventKind::Start).len(), threads);
}

async fn a_disconnected_worker_stops_its_handlers_before_its_threshold(fleet: &mut Fleet) {
    // The worker stops its handlers two heartbeats before the threshold.
    fleet.config.heartbeat = Duration::from_secs(2);
    fleet.config.threshold = Duration::from_secs(10);
    let proxy = Proxy::start(&fleet.config.url).await;
    let mut through_proxy = fleet.config.clone();
    through_proxy.url = proxy.url.clone();

    let jobs = 4;
    let ids = fleet.enqueue("sleep", &[600_000, 1], jobs).await;
    let disconnected = fleet.start_with(&through_proxy);
    fleet.wait_until_started(jobs).await;
    let other = fleet.start_and_register().await;
    proxy.block();
    fleet.wait_until_succeeded(jobs).await;

    let stops = fleet.events_of(&EventKind::Stop("Disconnected".into()));
    assert_eq!(stops.len(), jobs, "each handler was stopped with this reason");
    for stop in &stops {
        assert_eq!(stop.pid, fleet.process(disconnected).pid());
        let next =
            fleet.events().into_iter().find(|event| event.job == stop.job && event.lease_no == 2).unwrap();
        assert!(stop.millis <= next.millis, "the two attempts do not overlap");
        assert_eq!(next.pid, fleet.process(other).pid());
    }
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 1));
    }

    proxy.unblock();
    fleet.kill(other).await;
    fleet.enqueue("noop", &[], 1).await;
    fleet.wait_until_succeeded(jobs + 1).await;
    assert!(fleet.process(disconnected).exit_status().is_none(), "the process is still running");
}
