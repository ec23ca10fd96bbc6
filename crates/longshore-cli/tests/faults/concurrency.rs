//! Many processes on one queue: each job runs once.

use std::collections::BTreeSet;

use longshore::Status;

use crate::fleet::{Fleet, on_every_engine, on_postgres};
use crate::worker::EventKind;

on_every_engine!(eight_processes_run_each_of_200_jobs_once);
on_postgres!(four_processes_run_each_of_20_000_jobs_once);

async fn eight_processes_run_each_of_200_jobs_once(fleet: &mut Fleet) {
    assert_each_job_runs_once(fleet, 8, "sleep", 200).await;
    let pids: BTreeSet<u32> = fleet.events_of(&EventKind::Start).iter().map(|event| event.pid).collect();
    assert!(pids.len() > 1, "several processes take part: {pids:?}");
}

async fn four_processes_run_each_of_20_000_jobs_once(fleet: &mut Fleet) {
    assert_each_job_runs_once(fleet, 4, "noop", 20_000).await;
}

async fn assert_each_job_runs_once(fleet: &mut Fleet, processes: usize, kind: &str, jobs: usize) {
    for _ in 0..processes {
        fleet.start();
    }
    fleet
        .wait_until("all workers register", async |fleet| fleet.registered_workers().await == processes)
        .await;
    let ids: BTreeSet<_> = fleet.enqueue(kind, &[20], jobs).await.into_iter().collect();
    fleet.wait_until_succeeded(jobs).await;

    let runs = fleet.event_counts(&EventKind::Start);
    assert_eq!(runs.len(), jobs);
    assert!(runs.iter().all(|(id, times)| ids.contains(id) && *times == 1), "each job started once");
    for job in fleet.jobs().await {
        // The lease number may be higher: on a busy machine, a worker releases jobs that it
        // cannot start in time.
        let observed = (job.status, job.attempts, job.interruptions);
        assert_eq!(observed, (Status::Succeeded, 1, 0), "{}", job.id);
    }
}
