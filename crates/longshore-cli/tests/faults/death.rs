//! Processes that die: their jobs run again elsewhere, and a job that kills its
//! process ends while its neighbours do not suffer.

use std::time::Duration;

use longshore::{AttemptEnd, NewJob, Status};

use crate::crew::{Crew, ms, on_every_engine, on_postgres};
use crate::worker::What;

on_every_engine!(the_jobs_of_a_killed_worker_run_again_elsewhere);
on_postgres!(poison_ends_quarantined_and_its_neighbours_succeed);

const RECOVERED: &str = "Job recovered after worker interruption";

async fn the_jobs_of_a_killed_worker_run_again_elsewhere(crew: &mut Crew) {
    let held = 50;
    let ids = crew.enqueue("sleep", &[600_000, 1], held).await;
    crew.orders.concurrency = held as u32;
    let victim = crew.start();
    crew.until("it holds them all", async |crew| crew.of(&What::Start).len() == held).await;
    let other = crew.started().await;

    crew.worker(victim).signal("KILL");
    let killed_at = crew.client().store().now().await.unwrap();
    crew.until_succeeded(held).await;

    let orders = &crew.orders;
    let bound = orders.threshold + orders.recovery_delay + 2 * orders.sweep + BUSY;
    let pid = crew.worker(other).pid();
    let mut slowest = Duration::ZERO;
    for id in ids {
        let job = crew.get(id).await;
        assert_eq!((job.attempts, job.interruptions, job.lease_no), (1, 1, 2), "counted, not charged");
        assert_eq!(job.last_error.as_deref(), Some(RECOVERED));
        let [once] = &job.errors[..] else { panic!("one entry in the history: {:?}", job.errors) };
        assert_eq!((once.what, once.error.as_deref()), (AttemptEnd::Interrupted, Some(RECOVERED)));
        let took = (once.ended_at - killed_at).to_std().unwrap_or_default();
        assert!(took < bound, "recovered after {took:?}");
        slowest = slowest.max(took);
    }
    let promised = bound - BUSY;
    eprintln!(
        "recovered within {slowest:?} of the death; {promised:?} are promised to a machine that is free"
    );
    let again = crew.of(&What::Start).into_iter().filter(|event| event.lease_no == 2);
    assert!(again.clone().all(|event| event.pid == pid));
    assert_eq!(again.count(), held, "each once more");
}

/// What a busy machine may add.
const BUSY: Duration = Duration::from_secs(5);

async fn poison_ends_quarantined_and_its_neighbours_succeed(crew: &mut Crew) {
    let (poisons, neighbours) = (10, 500);
    crew.orders.heartbeat = ms(100);
    crew.orders.threshold = ms(1000);
    crew.orders.sweep = ms(100);
    crew.orders.concurrency = 8;
    // One of the two takes poison, and whoever dies is replaced, as a service
    // manager would.
    let safe = crew.orders.clone();
    let mut doomed = crew.orders.clone();
    doomed.queues.push("poison".into());
    crew.start_as(&safe);
    let mut victim = crew.start_as(&doomed);
    // A job that was interrupted takes long enough to be interrupted again.
    crew.enqueue("sleep", &[150, 500, 500, 5], neighbours).await;

    let (mut poison, mut deaths) = (Vec::new(), 0);
    crew.until("all have ended", async |crew| {
        if crew.worker(victim).ended().is_some() {
            deaths += 1;
            victim = crew.start_as(&doomed);
        }
        // The next dose comes when it will hit somebody: anybody at first, then
        // one that was hit before.
        let pid = crew.worker(victim).pid();
        let events = crew.events();
        let hit = events.iter().filter(|event| event.pid == pid && event.what == What::Start);
        let lease_no = if poison.is_empty() { 1 } else { 2 };
        let again = hit.filter(|event| event.lease_no >= lease_no && !poison.contains(&event.job));
        let enough = crew.count(Status::Succeeded).await > (neighbours * 9 / 10) as u64;
        if poison.len() < poisons && (enough || again.count() > 0) {
            let dose = NewJob::new("poison", &[0]).queue("poison").priority(9);
            poison.push(crew.client().enqueue(dose).await.unwrap().id);
        }
        let ended = crew.count(Status::FailedPermanent).await + crew.count(Status::Succeeded).await;
        ended == (poisons + neighbours) as u64
    })
    .await;

    assert!(deaths >= poisons, "{deaths} deaths");
    for id in poison {
        let job = crew.get(id).await;
        assert_eq!((job.status, job.interruptions), (Status::FailedPermanent, 3));
        let why = job.last_error.unwrap();
        assert!(why.starts_with("Quarantined after 3 worker interruptions"), "{why}");
        let starts = crew.of(&What::Start).iter().filter(|event| event.job == id).count();
        // The first interruption makes a suspect of whoever was at hand.
        assert!((2..=3).contains(&starts), "it ran {starts} times");
    }
    let mut often = 0;
    for job in crew.jobs().await.iter().filter(|job| job.kind == "sleep") {
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 1), "{job:?}");
        often += usize::from(crew.get(job.id).await.errors.len() > 1);
    }
    eprintln!("{deaths} deaths, {often} neighbours interrupted several times");
    assert!(often > 0, "some neighbours were interrupted several times");
}
