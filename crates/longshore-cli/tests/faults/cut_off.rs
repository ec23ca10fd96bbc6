//! Who looks dead and is not: a process whose threads are all blocked, and one
//! that cannot reach the database.

use std::time::Duration;

use longshore::Status;

use crate::crew::{Crew, on_every_engine, on_postgres};
use crate::proxy::Proxy;
use crate::worker::{What, millis_now};

on_every_engine!(handlers_that_block_every_thread_are_not_recovered);
on_postgres!(a_worker_cut_off_stops_its_handlers_before_its_threshold);

async fn handlers_that_block_every_thread_are_not_recovered(crew: &mut Crew) {
    let threads = crew.orders.threads;
    crew.orders.concurrency = threads as u32;
    let takes = (3 * crew.orders.threshold).as_millis() as u64;
    let ids = crew.enqueue("block", &[takes], threads).await;
    crew.start();
    crew.until("all threads are blocked", async |crew| crew.of(&What::Start).len() == threads).await;
    crew.started().await;
    crew.until_succeeded(threads).await;
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 0, 1), "one lease from start to end");
    }
    assert_eq!(crew.of(&What::Start).len(), threads);
}

async fn a_worker_cut_off_stops_its_handlers_before_its_threshold(crew: &mut Crew) {
    let threshold = Duration::from_secs(3);
    crew.orders.threshold = threshold;
    let proxy = Proxy::start(&crew.orders.url).await;
    let mut through_the_proxy = crew.orders.clone();
    through_the_proxy.url = proxy.url.clone();

    let jobs = 4;
    let ids = crew.enqueue("sleep", &[600_000, 1], jobs).await;
    let cut_off = crew.start_as(&through_the_proxy);
    crew.until("it holds them all", async |crew| crew.of(&What::Start).len() == jobs).await;
    let other = crew.started().await;
    proxy.cut();
    let cut_at = millis_now();
    crew.until_succeeded(jobs).await;

    let told = crew.of(&What::Stop("Disconnected".into()));
    assert_eq!(told.len(), jobs, "each handler is told why");
    for stop in &told {
        assert_eq!(stop.pid, crew.worker(cut_off).pid());
        assert!(stop.millis < cut_at + threshold.as_millis(), "before the threshold can have passed");
        let next =
            crew.events().into_iter().find(|event| event.job == stop.job && event.lease_no == 2).unwrap();
        assert!(stop.millis <= next.millis, "no two attempts overlap");
        assert_eq!(next.pid, crew.worker(other).pid());
    }
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 1));
    }

    proxy.mend();
    crew.worker(other).signal("KILL");
    crew.enqueue("noop", &[], 1).await;
    crew.until_succeeded(jobs + 1).await;
    assert!(crew.worker(cut_off).ended().is_none(), "it has gone on");
}
