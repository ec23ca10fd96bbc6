//! A process that stands still for so long that it is taken for dead, and then
//! goes on.

use std::collections::BTreeSet;

use longshore::{JobId, Status};

use crate::crew::{Crew, ms, on_every_engine};
use crate::worker::{Event, What};

on_every_engine!(
    a_worker_that_wakes_up_late_settles_nothing_and_tells_its_handlers,
    nobody_is_robbed_after_a_pause_that_all_shared,
);

async fn a_worker_that_wakes_up_late_settles_nothing_and_tells_its_handlers(crew: &mut Crew) {
    // Some will still wait for their stop when the process goes on, others will
    // have slept long enough and want to settle at once.
    let each = 10;
    let listening = crew.enqueue("sleep", &[600_000, 1], each).await;
    let stubborn = crew.enqueue("stubborn", &[2_500, 1], each).await;
    let all = 2 * each;
    crew.orders.concurrency = all as u32;
    let sleeper = crew.start();
    crew.until("it holds them all", async |crew| crew.of(&What::Start).len() == all).await;

    crew.worker(sleeper).signal("STOP");
    let other = crew.started().await;
    crew.until_succeeded(all).await;
    crew.worker(sleeper).signal("CONT");

    crew.until("handlers are told", async |crew| told(crew).len() == each).await;
    crew.until("every late settle is refused", async |crew| {
        crew.worker(sleeper).said().matches("lost the lease; another worker owns the job").count() == all
    })
    .await;

    let by: BTreeSet<JobId> = told(crew).into_iter().map(|event| event.job).collect();
    assert_eq!(by, listening.iter().copied().collect());
    let pid = crew.worker(other).pid();
    for event in crew.of(&What::Success) {
        assert_eq!((event.pid, event.lease_no), (pid, 2), "only the live lease settles");
    }
    assert!(crew.times(&What::Success).values().all(|times| *times == 1), "and once");
    for id in listening.into_iter().chain(stubborn) {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.attempts, job.lease_no), (Status::Succeeded, 1, 2));
        assert_eq!(job.errors.len(), 1, "the interruption, and nothing the late one said");
    }

    // It goes on under another id.
    crew.worker(other).signal("KILL");
    let more = crew.enqueue("noop", &[], 1).await;
    crew.until_succeeded(all + 1).await;
    let ran = crew.of(&What::Start).into_iter().find(|event| event.job == more[0]).unwrap();
    assert_eq!(ran.pid, crew.worker(sleeper).pid());
}

async fn nobody_is_robbed_after_a_pause_that_all_shared(crew: &mut Crew) {
    crew.orders.heartbeat = ms(500);
    crew.orders.threshold = ms(2000);
    crew.orders.sweep = ms(100);
    let all = [crew.start(), crew.start(), crew.start(), crew.start()];
    let held = 4 * crew.orders.concurrency as usize;
    // Longer than the pause, and not for ever: one whose first beat afterwards is
    // answered before it looks at the clock still holds its leases and goes on.
    let ids = crew.enqueue("sleep", &[12_000, 1], held).await;
    crew.until("they hold them all", async |crew| crew.of(&What::Start).len() == held).await;
    for nth in all {
        crew.worker(nth).signal("STOP");
    }
    // The pause itself, longer than any threshold.
    tokio::time::sleep(crew.orders.threshold * 2).await;
    for nth in all {
        crew.worker(nth).signal("CONT");
    }
    // The others know by their own clocks that theirs could have been given away.
    crew.until_succeeded(held).await;
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.attempts, job.interruptions), (1, 0), "nobody was taken for dead: {:?}", job.errors);
    }
}

/// Who was told to stop. The process knows by its own clock that it has been
/// silent for too long, and from the database that its leases are gone; which
/// of the two comes first is chance.
fn told(crew: &Crew) -> Vec<Event> {
    let reasons = ["LeaseLost", "Disconnected"].map(|reason| What::Stop(reason.into()));
    crew.events().into_iter().filter(|event| reasons.contains(&event.what)).collect()
}
