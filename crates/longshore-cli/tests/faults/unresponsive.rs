//! Who looks dead and is not: a process whose threads are all blocked, and one
//! that cannot reach the database.

use std::time::Duration;

use longshore::Status;

use crate::fleet::{Fleet, on_every_engine, on_postgres};
use crate::proxy::Proxy;
use crate::worker::{EventKind, millis_now};

on_every_engine!(jobs_whose_handlers_block_every_thread_are_not_recovered);
on_postgres!(a_disconnected_worker_stops_its_handlers_before_its_threshold);

async fn jobs_whose_handlers_block_every_thread_are_not_recovered(fleet: &mut Fleet) {
    let threads = fleet.config.threads;
    fleet.config.concurrency = threads as u32;
    let takes = (3 * fleet.config.threshold).as_millis() as u64;
    let ids = fleet.enqueue("block", &[takes], threads).await;
    fleet.start();
    fleet
        .wait_until("all threads are blocked", async |fleet| {
            fleet.events_of(&EventKind::Start).len() == threads
        })
        .await;
    fleet.start_and_register().await;
    fleet.wait_until_succeeded(threads).await;
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 0, 1), "one lease from start to end");
    }
    assert_eq!(fleet.events_of(&EventKind::Start).len(), threads);
}

async fn a_disconnected_worker_stops_its_handlers_before_its_threshold(fleet: &mut Fleet) {
    let threshold = Duration::from_secs(3);
    fleet.config.threshold = threshold;
    let proxy = Proxy::start(&fleet.config.url).await;
    let mut through_the_proxy = fleet.config.clone();
    through_the_proxy.url = proxy.url.clone();

    let jobs = 4;
    let ids = fleet.enqueue("sleep", &[600_000, 1], jobs).await;
    let cut_off = fleet.start_with(&through_the_proxy);
    fleet
        .wait_until("it holds them all", async |fleet| fleet.events_of(&EventKind::Start).len() == jobs)
        .await;
    let other = fleet.start_and_register().await;
    proxy.block();
    let cut_at = millis_now();
    fleet.wait_until_succeeded(jobs).await;

    let told = fleet.events_of(&EventKind::Stop("Disconnected".into()));
    assert_eq!(told.len(), jobs, "each handler is told why");
    for stop in &told {
        assert_eq!(stop.pid, fleet.worker(cut_off).pid());
        assert!(stop.millis < cut_at + threshold.as_millis(), "before the threshold can have passed");
        let next =
            fleet.events().into_iter().find(|event| event.job == stop.job && event.lease_no == 2).unwrap();
        assert!(stop.millis <= next.millis, "no two attempts overlap");
        assert_eq!(next.pid, fleet.worker(other).pid());
    }
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 1));
    }

    proxy.unblock();
    fleet.worker(other).signal("KILL");
    fleet.enqueue("noop", &[], 1).await;
    fleet.wait_until_succeeded(jobs + 1).await;
    assert!(fleet.worker(cut_off).exit_status().is_none(), "it has gone on");
}
