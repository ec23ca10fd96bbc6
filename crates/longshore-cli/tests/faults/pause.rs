//! Processes that are paused for so long that they count as dead, and then resume.

use std::collections::BTreeSet;

use longshore::{INFRASTRUCTURE_RESILIENT_FLAG, JobId, NewJob, Status};

use crate::fleet::{Fleet, ms, on_every_engine};
use crate::worker::{Event, EventKind, UNTIL_OPENED};

on_every_engine!(
    a_worker_paused_until_its_jobs_were_recovered_settles_nothing,
    a_pause_of_all_workers_recovers_no_job,
    a_worker_paused_with_a_resilient_job_past_its_threshold_runs_the_job_once,
);

async fn a_worker_paused_until_its_jobs_were_recovered_settles_nothing(fleet: &mut Fleet) {
    // When the process resumes, the `sleep` handlers are still waiting and get the
    // stop. The others end and try to settle at once.
    let each = 10;
    let sleeping = fleet.enqueue("sleep", &[600_000, 1], each).await;
    let ignoring = fleet.enqueue("ignore_stop", &[UNTIL_OPENED, 1], each).await;
    let all = 2 * each;
    fleet.config.concurrency = all as u32;
    let paused = fleet.start();
    fleet.wait_until_started(all).await;

    fleet.pause(paused).await;
    fleet.count_as_dead(paused).await;
    let other = fleet.start_and_register().await;
    fleet.wait_until_succeeded(all).await;
    fleet.open_gate();
    fleet.process(paused).signal("CONT");

    fleet.wait_until("handlers are stopped", async |fleet| stops(fleet).len() == each).await;
    fleet
        .wait_until("every late settle is refused", async |fleet| {
            fleet.process(paused).stderr().matches("lost the lease; another worker owns the job").count()
                == all
        })
        .await;

    let stopped: BTreeSet<JobId> = stops(fleet).into_iter().map(|event| event.job).collect();
    assert_eq!(stopped, sleeping.iter().copied().collect());
    let pid = fleet.process(other).pid();
    for event in fleet.events_of(&EventKind::Success) {
        assert_eq!((event.pid, event.lease_no), (pid, 2), "only the live lease settles");
    }
    let successes = fleet.event_counts(&EventKind::Success);
    assert!(successes.values().all(|times| *times == 1), "each job succeeds once");
    for id in sleeping.into_iter().chain(ignoring) {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.lease_no), (Status::Succeeded, 1, 2));
        assert_eq!(job.errors.len(), 1, "only the interruption, and nothing from the late worker");
    }

    // The resumed process registers again under a new id and keeps working.
    fleet.kill(other).await;
    let more = fleet.enqueue("noop", &[], 1).await;
    fleet.wait_until_succeeded(all + 1).await;
    let start = fleet.events_of(&EventKind::Start).into_iter().find(|event| event.job == more[0]).unwrap();
    assert_eq!(start.pid, fleet.process(paused).pid());
}

async fn a_pause_of_all_workers_recovers_no_job(fleet: &mut Fleet) {
    fleet.config.heartbeat = ms(500);
    fleet.config.threshold = ms(6000);
    fleet.config.sweep = ms(100);
    let workers = [fleet.start(), fleet.start(), fleet.start(), fleet.start()];
    let jobs = 4 * fleet.config.concurrency as usize;
    // Longer than the pause, but finite: if a worker's first heartbeat after the pause
    // is acknowledged before it checks its own clock, it still owns its leases and
    // its handlers continue.
    let ids = fleet.enqueue("sleep", &[30_000, 1], jobs).await;
    fleet.wait_until_started(jobs).await;
    for worker in workers {
        fleet.process(worker).signal("STOP");
    }
    // The pause itself, longer than any threshold.
    tokio::time::sleep(fleet.config.threshold * 2).await;
    for worker in workers {
        fleet.process(worker).signal("CONT");
    }
    // The other workers stop their handlers: their own clocks show that their leases
    // could have been recovered.
    fleet.wait_until_succeeded(jobs).await;
    for id in ids {
        let job = fleet.get(id).await;
        let observed = (job.attempts, job.interruptions);
        assert_eq!(observed, (1, 0), "no worker was declared dead: {:?}", job.errors);
    }
}

async fn a_worker_paused_with_a_resilient_job_past_its_threshold_runs_the_job_once(fleet: &mut Fleet) {
    fleet.config.heartbeat = ms(500);
    fleet.config.threshold = ms(6000);
    fleet.config.sweep = ms(100);
    let paused = fleet.start();
    let resilient = NewJob::new("sleep", &[UNTIL_OPENED]).flags([INFRASTRUCTURE_RESILIENT_FLAG]);
    let id = fleet.client().enqueue(resilient).await.unwrap().id;
    fleet.wait_until_started(1).await;
    // Before the pause, so that its sweeps cover all of it.
    let other = fleet.start_and_register().await;
    fleet.pause(paused).await;
    // Many sweeps after it became stale, and well before three times the threshold.
    fleet
        .wait_until("the paused worker is silent for half as long again as its threshold", async |fleet| {
            let workers = fleet.client().workers(Some(ms(9000))).await.unwrap();
            workers.iter().any(|worker| worker.running == 1 && worker.stale)
        })
        .await;
    fleet.open_gate();
    fleet.process(paused).signal("CONT");
    fleet.wait_until_succeeded(1).await;

    let job = fleet.get(id).await;
    assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 0, 1), "{:?}", job.errors);
    assert_eq!(fleet.event_counts(&EventKind::Start), [(id, 1)].into());
    // The worker was never declared dead, so it kept its id.
    assert_eq!(fleet.registered_workers().await, 2);
    assert!(!fleet.process(paused).stderr().contains("declared dead"), "{}", fleet.process(paused).stderr());
    assert!(fleet.process(other).exit_status().is_none());
}

/// Handlers that were stopped because of the pause. The process learns from its own
/// clock that it was silent for too long, and from the database that it lost its
/// leases. Either can come first.
fn stops(fleet: &Fleet) -> Vec<Event> {
    let reasons = ["LeaseLost", "Disconnected"].map(|reason| EventKind::Stop(reason.into()));
    fleet.events().into_iter().filter(|event| reasons.contains(&event.kind)).collect()
}
