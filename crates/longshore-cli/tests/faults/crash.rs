//! Processes that die. Their jobs run again on other workers. A job that keeps
//! killing its process is quarantined, and the jobs running next to it are not.

use std::collections::HashMap;

use longshore::{AttemptEnd, NewJob, Status};

use crate::fleet::{Fleet, ms, on_every_engine, on_postgres};
use crate::worker::{EventKind, UNTIL_OPENED};

on_every_engine!(jobs_of_a_killed_worker_run_again_on_another);
on_postgres!(poison_jobs_are_quarantined_and_healthy_jobs_succeed);

const RECOVERED: &str = "Job recovered after worker interruption";

async fn jobs_of_a_killed_worker_run_again_on_another(fleet: &mut Fleet) {
    let jobs = 50;
    let ids = fleet.enqueue("sleep", &[UNTIL_OPENED], jobs).await;
    fleet.config.concurrency = jobs as u32;
    let victim = fleet.start();
    fleet.wait_until_started(jobs).await;
    // On a slow machine, the reply to a claim may be lost. Then the second lease is the first one that starts.
    let first_leases: HashMap<_, _> =
        fleet.events_of(&EventKind::Start).into_iter().map(|event| (event.job, event.lease_no)).collect();
    let other = fleet.start_and_register().await;

    fleet.kill(victim).await;
    fleet.open_gate();
    fleet.wait_until_succeeded(jobs).await;

    let pid = fleet.process(other).pid();
    let restarts: Vec<_> =
        fleet.events_of(&EventKind::Start).into_iter().filter(|event| event.pid == pid).collect();
    assert_eq!(restarts.len(), jobs, "each job ran once more");
    assert!(restarts.iter().all(|event| event.lease_no > first_leases[&event.job]));
    for id in ids {
        let job = fleet.get(id).await;
        let observed = (job.attempts, job.interruptions);
        assert_eq!(observed, (1, 1), "the interruption is counted, not charged");
        assert_eq!(job.last_error.as_deref(), Some(RECOVERED));
        let [entry] = &job.errors[..] else { panic!("expected one history entry: {:?}", job.errors) };
        assert_eq!((entry.what, entry.error.as_deref()), (AttemptEnd::Interrupted, Some(RECOVERED)));
    }
}

async fn poison_jobs_are_quarantined_and_healthy_jobs_succeed(fleet: &mut Fleet) {
    let (poison_jobs, healthy_jobs) = (5, 200);
    fleet.config.heartbeat = ms(100);
    fleet.config.sweep = ms(100);
    fleet.config.concurrency = 8;
    // Only one of the two workers claims poison. It is replaced when it dies, as a
    // service manager would do.
    let safe = fleet.config.clone();
    let mut exposed = fleet.config.clone();
    exposed.queues.push("exposed".into());
    fleet.start_with(&safe);
    let mut victim = fleet.start_with(&exposed);
    fleet.enqueue("sleep", &[150, 5], healthy_jobs).await;
    // Two poison jobs interrupt this one, because each waits until its handler has started.
    let bystander = NewJob::new("sleep", &[3_600_000, 3_600_000, 5]).queue("exposed");
    let bystander = fleet.client().enqueue(bystander).await.unwrap().id;

    let (mut poison, mut deaths) = (Vec::new(), 0);
    fleet
        .wait_until("all jobs have finished", async |fleet| {
            if fleet.process(victim).exit_status().is_some() {
                deaths += 1;
                fleet.count_as_dead(victim).await;
                victim = fleet.start_with(&exposed);
            }
            let jobs = fleet.jobs().await;
            let is_due = match poison.len() {
                hits @ (0 | 1) => fleet
                    .events_of(&EventKind::Start)
                    .iter()
                    .any(|start| start.job == bystander && usize::try_from(start.lease_no) == Ok(hits + 1)),
                // A suspect that runs beside a third new poison job would be quarantined too.
                _ => jobs.iter().all(|job| job.finished_at.is_some() || job.interruptions == 0),
            };
            if is_due && poison.len() < poison_jobs {
                let job = NewJob::new("poison", &[0]).queue("exposed").priority(9);
                poison.push(fleet.client().enqueue(job).await.unwrap().id);
                return false;
            }
            poison.len() == poison_jobs && jobs.iter().all(|job| job.finished_at.is_some())
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
    for job in fleet.jobs().await.iter().filter(|job| job.kind == "sleep") {
        assert_eq!((job.status, job.attempts), (Status::Succeeded, 1), "{job:?}");
    }
    let bystander = fleet.get(bystander).await;
    assert_eq!((bystander.interruptions, bystander.errors.len()), (2, 2), "{bystander:?}");
}
