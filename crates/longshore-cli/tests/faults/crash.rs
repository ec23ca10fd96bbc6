//! Processes that die. Their jobs run again on other workers. A job that keeps
//! killing its process is quarantined, and the jobs running next to it are not.

use std::time::Duration;

use longshore::{AttemptEnd, NewJob, Status};

use crate::fleet::{Fleet, ms, on_every_engine, on_postgres};
use crate::worker::EventKind;

on_every_engine!(jobs_of_a_killed_worker_run_again_on_another);
on_postgres!(poison_jobs_are_quarantined_and_healthy_jobs_succeed);

const RECOVERED: &str = "Job recovered after worker interruption";

/// Extra time allowed on a busy machine.
const BUSY_ALLOWANCE: Duration = Duration::from_secs(5);

async fn jobs_of_a_killed_worker_run_again_on_another(fleet: &mut Fleet) {
    let jobs = 50;
    let ids = fleet.enqueue("sleep", &[600_000, 1], jobs).await;
    fleet.config.concurrency = jobs as u32;
    let victim = fleet.start();
    fleet.wait_until_started(jobs).await;
    let other = fleet.start_and_register().await;

    fleet.process(victim).signal("KILL");
    let killed_at = fleet.client().store().now().await.unwrap();
    fleet.wait_until_succeeded(jobs).await;

    let config = &fleet.config;
    let promised = config.threshold + config.recovery_delay + 2 * config.sweep;
    let pid = fleet.process(other).pid();
    let mut slowest = Duration::ZERO;
    for id in ids {
        let job = fleet.get(id).await;
        let observed = (job.attempts, job.interruptions, job.lease_no);
        assert_eq!(observed, (1, 1, 2), "the interruption is counted, not charged");
        assert_eq!(job.last_error.as_deref(), Some(RECOVERED));
        let [entry] = &job.errors[..] else { panic!("expected one history entry: {:?}", job.errors) };
        assert_eq!((entry.what, entry.error.as_deref()), (AttemptEnd::Interrupted, Some(RECOVERED)));
        let took = (entry.ended_at - killed_at).to_std().unwrap_or_default();
        assert!(took < promised + BUSY_ALLOWANCE, "recovered after {took:?}");
        slowest = slowest.max(took);
    }
    eprintln!("all jobs recovered within {slowest:?}; promised on an idle machine: {promised:?}");
    let restarts = fleet.events_of(&EventKind::Start).into_iter().filter(|event| event.lease_no == 2);
    assert!(restarts.clone().all(|event| event.pid == pid));
    assert_eq!(restarts.count(), jobs, "each job ran once more");
}

async fn poison_jobs_are_quarantined_and_healthy_jobs_succeed(fleet: &mut Fleet) {
    let (poison_jobs, healthy_jobs) = (10, 500);
    fleet.config.heartbeat = ms(100);
    fleet.config.threshold = ms(1000);
    fleet.config.sweep = ms(100);
    fleet.config.concurrency = 8;
    // Only one of the two workers claims poison. It is replaced when it dies, as a
    // service manager would do.
    let safe = fleet.config.clone();
    let mut exposed = fleet.config.clone();
    exposed.queues.push("poison".into());
    fleet.start_with(&safe);
    let mut victim = fleet.start_with(&exposed);
    // Later leases take longer, so that an interrupted job can be interrupted again.
    fleet.enqueue("sleep", &[150, 500, 500, 5], healthy_jobs).await;

    let (mut poison, mut deaths) = (Vec::new(), 0);
    fleet
        .wait_until("all jobs have finished", async |fleet| {
            if fleet.process(victim).exit_status().is_some() {
                deaths += 1;
                victim = fleet.start_with(&exposed);
            }
            // Enqueue the next poison job when it will interrupt a healthy one: any
            // job at first, then one that was interrupted before.
            let pid = fleet.process(victim).pid();
            let events = fleet.events();
            let started = events.iter().filter(|event| event.pid == pid && event.kind == EventKind::Start);
            let min_lease = if poison.is_empty() { 1 } else { 2 };
            let targets = started.filter(|event| event.lease_no >= min_lease && !poison.contains(&event.job));
            let almost_done = fleet.count(Status::Succeeded).await > (healthy_jobs * 9 / 10) as u64;
            if poison.len() < poison_jobs && (almost_done || targets.count() > 0) {
                let job = NewJob::new("poison", &[0]).queue("poison").priority(9);
                poison.push(fleet.client().enqueue(job).await.unwrap().id);
            }
            let finished = fleet.count(Status::FailedPermanent).await + fleet.count(Status::Succeeded).await;
            finished == (poison_jobs + healthy_jobs) as u64
        })
        .await;

    assert!(deaths >= poison_jobs, "{deaths} deaths");
    for id in poison {
        let job = fleet.get(id).await;
        assert_eq!((job.status, job.interruptions), (Status::FailedPermanent, 3));
        let error = job.last_error.unwrap();
        assert!(error.starts_with("Quarantined after 3 worker interruptions"), "{error}");
        let starts = fleet.events_of(&EventKind::Start).iter().filter(|event| event.job == id).count();
        // The first interruption counts for every job that the process held, even if
        // its handler had not started.
        assert!((2..=3).contains(&starts), "the job started {starts} times");
    }
    let mut interrupted_again = 0;
    for job in fleet.jobs().await.iter().filter(|job| job.kind == "sleep") {
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 1), "{job:?}");
        interrupted_again += usize::from(fleet.get(job.id).await.errors.len() > 1);
    }
    eprintln!("{deaths} deaths; {interrupted_again} healthy jobs were interrupted several times");
    assert!(interrupted_again > 0, "some healthy jobs were interrupted several times");
}
