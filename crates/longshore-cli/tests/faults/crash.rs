//! Processes that die: their jobs run again elsewhere, and a job that kills its
//! process ends while its neighbours do not suffer.

use std::time::Duration;

use longshore::{AttemptEnd, NewJob, Status};

use crate::fleet::{Fleet, ms, on_every_engine, on_postgres};
use crate::worker::EventKind;

on_every_engine!(jobs_of_a_killed_worker_run_again_on_another);
on_postgres!(poison_jobs_are_quarantined_and_healthy_jobs_succeed);

const RECOVERED: &str = "Job recovered after worker interruption";

async fn jobs_of_a_killed_worker_run_again_on_another(fleet: &mut Fleet) {
    let held = 50;
    let ids = fleet.enqueue("sleep", &[600_000, 1], held).await;
    fleet.config.concurrency = held as u32;
    let victim = fleet.start();
    fleet
        .wait_until("it holds them all", async |fleet| fleet.events_of(&EventKind::Start).len() == held)
        .await;
    let other = fleet.start_and_register().await;

    fleet.worker(victim).signal("KILL");
    let killed_at = fleet.client().store().now().await.unwrap();
    fleet.wait_until_succeeded(held).await;

    let config = &fleet.config;
    let bound = config.threshold + config.recovery_delay + 2 * config.sweep + BUSY;
    let pid = fleet.worker(other).pid();
    let mut slowest = Duration::ZERO;
    for id in ids {
        let job = fleet.get(id).await;
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
    let again = fleet.events_of(&EventKind::Start).into_iter().filter(|event| event.lease_no == 2);
    assert!(again.clone().all(|event| event.pid == pid));
    assert_eq!(again.count(), held, "each once more");
}

/// EventKind a busy machine may add.
const BUSY: Duration = Duration::from_secs(5);

async fn poison_jobs_are_quarantined_and_healthy_jobs_succeed(fleet: &mut Fleet) {
    let (poisons, neighbours) = (10, 500);
    fleet.config.heartbeat = ms(100);
    fleet.config.threshold = ms(1000);
    fleet.config.sweep = ms(100);
    fleet.config.concurrency = 8;
    // One of the two takes poison, and whoever dies is replaced, as a service
    // manager would.
    let safe = fleet.config.clone();
    let mut doomed = fleet.config.clone();
    doomed.queues.push("poison".into());
    fleet.start_with(&safe);
    let mut victim = fleet.start_with(&doomed);
    // A job that was interrupted takes long enough to be interrupted again.
    fleet.enqueue("sleep", &[150, 500, 500, 5], neighbours).await;

    let (mut poison, mut deaths) = (Vec::new(), 0);
    fleet
        .wait_until("all have ended", async |fleet| {
            if fleet.worker(victim).exit_status().is_some() {
                deaths += 1;
                victim = fleet.start_with(&doomed);
            }
            // The next dose comes when it will hit somebody: anybody at first, then
            // one that was hit before.
            let pid = fleet.worker(victim).pid();
            let events = fleet.events();
            let hit = events.iter().filter(|event| event.pid == pid && event.kind == EventKind::Start);
            let lease_no = if poison.is_empty() { 1 } else { 2 };
            let again = hit.filter(|event| event.lease_no >= lease_no && !poison.contains(&event.job));
            let enough = fleet.count(Status::Succeeded).await > (neighbours * 9 / 10) as u64;
            if poison.len() < poisons && (enough || again.count() > 0) {
                let dose = NewJob::new("poison", &[0]).queue("poison").priority(9);
                poison.push(fleet.client().enqueue(dose).await.unwrap().id);
            }
            let ended = fleet.count(Status::FailedPermanent).await + fleet.count(Status::Succeeded).await;
            ended == (poisons + neighbours) as u64
        })
        .await;

    assert!(deaths >= poisons, "{deaths} deaths");
    for id in poison {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.interruptions), (Status::FailedPermanent, 3));
        let why = job.last_error.unwrap();
        assert!(why.starts_with("Quarantined after 3 worker interruptions"), "{why}");
        let starts = fleet.events_of(&EventKind::Start).iter().filter(|event| event.job == id).count();
        // The first interruption makes a suspect of whoever was at hand.
        assert!((2..=3).contains(&starts), "it ran {starts} times");
    }
    let mut often = 0;
    for job in fleet.jobs().await.iter().filter(|job| job.kind == "sleep") {
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 1), "{job:?}");
        often += usize::from(fleet.get(job.id).await.errors.len() > 1);
    }
    eprintln!("{deaths} deaths, {often} neighbours interrupted several times");
    assert!(often > 0, "some neighbours were interrupted several times");
}
