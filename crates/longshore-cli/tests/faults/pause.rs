//! A process that stands still for so long that it is taken for dead, and then
//! goes on.

use std::collections::BTreeSet;

use longshore::{JobId, Status};

use crate::fleet::{Fleet, ms, on_every_engine};
use crate::worker::{Event, EventKind};

on_every_engine!(
    a_worker_paused_until_its_jobs_were_recovered_settles_nothing,
    a_pause_of_all_workers_recovers_no_job,
);

async fn a_worker_paused_until_its_jobs_were_recovered_settles_nothing(fleet: &mut Fleet) {
    // Some will still wait for their stop when the process goes on, others will
    // have slept long enough and want to settle at once.
    let each = 10;
    let listening = fleet.enqueue("sleep", &[600_000, 1], each).await;
    let ignore_stop = fleet.enqueue("ignore_stop", &[2_500, 1], each).await;
    let all = 2 * each;
    fleet.config.concurrency = all as u32;
    let sleeper = fleet.start();
    fleet
        .wait_until("it holds them all", async |fleet| fleet.events_of(&EventKind::Start).len() == all)
        .await;

    fleet.worker(sleeper).signal("STOP");
    let other = fleet.start_and_register().await;
    fleet.wait_until_succeeded(all).await;
    fleet.worker(sleeper).signal("CONT");

    fleet.wait_until("handlers are told", async |fleet| told(fleet).len() == each).await;
    fleet
        .wait_until("every late settle is refused", async |fleet| {
            fleet.worker(sleeper).stderr().matches("lost the lease; another worker owns the job").count()
                == all
        })
        .await;

    let by: BTreeSet<JobId> = told(fleet).into_iter().map(|event| event.job).collect();
    assert_eq!(by, listening.iter().copied().collect());
    let pid = fleet.worker(other).pid();
    for event in fleet.events_of(&EventKind::Success) {
        assert_eq!((event.pid, event.lease_no), (pid, 2), "only the live lease settles");
    }
    assert!(fleet.event_counts(&EventKind::Success).values().all(|times| *times == 1), "and once");
    for id in listening.into_iter().chain(ignore_stop) {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.attempts, job.lease_no), (Status::Succeeded, 1, 2));
        assert_eq!(job.errors.len(), 1, "the interruption, and nothing the late one said");
    }

    // It goes on under another id.
    fleet.worker(other).signal("KILL");
    let more = fleet.enqueue("noop", &[], 1).await;
    fleet.wait_until_succeeded(all + 1).await;
    let ran = fleet.events_of(&EventKind::Start).into_iter().find(|event| event.job == more[0]).unwrap();
    assert_eq!(ran.pid, fleet.worker(sleeper).pid());
}

async fn a_pause_of_all_workers_recovers_no_job(fleet: &mut Fleet) {
    fleet.config.heartbeat = ms(500);
    fleet.config.threshold = ms(2000);
    fleet.config.sweep = ms(100);
    let all = [fleet.start(), fleet.start(), fleet.start(), fleet.start()];
    let held = 4 * fleet.config.concurrency as usize;
    // Longer than the pause, and not for ever: one whose first beat afterwards is
    // answered before it looks at the clock still holds its leases and goes on.
    let ids = fleet.enqueue("sleep", &[12_000, 1], held).await;
    fleet
        .wait_until("they hold them all", async |fleet| fleet.events_of(&EventKind::Start).len() == held)
        .await;
    for nth in all {
        fleet.worker(nth).signal("STOP");
    }
    // The pause itself, longer than any threshold.
    tokio::time::sleep(fleet.config.threshold * 2).await;
    for nth in all {
        fleet.worker(nth).signal("CONT");
    }
    // The others know by their own clocks that theirs could have been given away.
    fleet.wait_until_succeeded(held).await;
    for id in ids {
        let job = fleet.get(id).await;
        assert_eq!((job.attempts, job.interruptions), (1, 0), "nobody was taken for dead: {:?}", job.errors);
    }
}

/// Who was told to stop. The process knows by its own clock that it has been
/// silent for too long, and from the database that its leases are gone; which
/// of the two comes first is chance.
fn told(fleet: &Fleet) -> Vec<Event> {
    let reasons = ["LeaseLost", "Disconnected"].map(|reason| EventKind::Stop(reason.into()));
    fleet.events().into_iter().filter(|event| reasons.contains(&event.kind)).collect()
}
