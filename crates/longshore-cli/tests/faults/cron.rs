//! Schedules while worker processes die: each tick creates exactly one job. After a
//! time without any worker, the schedule's policy for missed ticks decides.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use longshore::{JobRecord, Missed, NewJob, NewSchedule};

use crate::fleet::{Fleet, ms, on_every_engine};

on_every_engine!(
    each_tick_creates_one_job_while_processes_die,
    after_all_workers_were_down_the_missed_policy_decides,
);

const EVERY_SECOND: &str = "* * * * * *";

async fn each_tick_creates_one_job_while_processes_die(fleet: &mut Fleet) {
    // `LONGSHORE_FAULTS_TICKS=60` makes the test run for a minute.
    let ticks: i64 = std::env::var("LONGSHORE_FAULTS_TICKS").map_or(10, |ticks| ticks.parse().unwrap());
    // Backfill, so that a machine that hangs for seconds does not look like a lost tick.
    let backfill = Missed::All { limit: 60 };
    let mut workers: Vec<usize> = (0..8).map(|_| fleet.start()).collect();
    fleet.wait_until("all workers register", async |fleet| fleet.registered_workers().await == 8).await;
    let schedule = NewSchedule::new("second", EVERY_SECOND, NewJob::new("noop", &[0])).missed(backfill);
    let first = fleet.client().put_schedule(schedule).await.unwrap().next_at;
    let last = first + TimeDelta::seconds(ticks - 1);

    let between_deaths = TimeDelta::seconds(if ticks < 60 { 2 } else { 5 });
    let mut deaths = 0;
    loop {
        let now = fleet.client().store().now().await.unwrap();
        if now > last {
            break;
        }
        if now > first + between_deaths * (deaths + 1) {
            let victim = workers.remove(0);
            fleet.process(victim).signal("KILL");
            workers.push(fleet.start());
            deaths += 1;
        }
        tokio::time::sleep(ms(20)).await;
    }
    fleet
        .wait_until("the last tick has its job", async |fleet| {
            fleet.jobs().await.iter().any(|job| tick_of(job).0 >= last)
        })
        .await;
    assert!(deaths >= 3, "{deaths} deaths");

    let jobs = fleet.jobs().await;
    let fired = jobs_by_tick(&jobs, "second");
    let expected: Vec<DateTime<Utc>> = (0..ticks).map(|nth| first + TimeDelta::seconds(nth)).collect();
    let observed: Vec<DateTime<Utc>> = fired.keys().copied().take_while(|tick| *tick <= last).collect();
    assert_eq!(observed, expected, "every tick has a job");
    assert!(fired.values().all(|jobs| jobs.len() == 1), "no tick has two jobs");
}

async fn after_all_workers_were_down_the_missed_policy_decides(fleet: &mut Fleet) {
    let outage = Duration::from_secs(10);
    let policies = [("skip", Missed::Skip), ("one", Missed::One), ("all", Missed::All { limit: 4 })];
    for (name, missed) in policies {
        let schedule = NewSchedule::new(name, EVERY_SECOND, NewJob::new("noop", &[0])).missed(missed);
        fleet.client().put_schedule(schedule).await.unwrap();
    }
    let workers: Vec<usize> = (0..3).map(|_| fleet.start()).collect();
    fleet
        .wait_until("each schedule has fired", async |fleet| {
            let jobs = fleet.jobs().await;
            policies.iter().all(|(name, _)| !jobs_by_tick(&jobs, name).is_empty())
        })
        .await;
    for victim in workers {
        fleet.process(victim).signal("KILL");
        fleet.process(victim).wait_for_exit().await;
    }
    let down_at = fleet.client().store().now().await.unwrap();
    // The outage itself.
    tokio::time::sleep(outage).await;
    fleet.start();
    let up_at = down_at + TimeDelta::from_std(outage).unwrap();
    fleet
        .wait_until("each schedule has fired again", async |fleet| {
            let jobs = fleet.jobs().await;
            let fired_again =
                |name: &str| jobs_by_tick(&jobs, name).values().any(|jobs| jobs[0].created_at >= up_at);
            policies.iter().all(|(name, _)| fired_again(name))
        })
        .await;

    let jobs = fleet.jobs().await;
    for (name, _) in policies {
        let fired = jobs_by_tick(&jobs, name);
        assert!(fired.values().all(|jobs| jobs.len() == 1), "{name}: no tick has two jobs");
        // The first pass after the outage created all its jobs at the same time.
        let first_pass =
            fired.values().map(|jobs| jobs[0].created_at).filter(|at| *at >= up_at).min().unwrap();
        let ticks: Vec<DateTime<Utc>> = fired
            .values()
            .flatten()
            .filter(|job| job.created_at == first_pass)
            .map(|job| tick_of(job).0)
            .collect();
        let newest = ticks.last().copied().unwrap();
        assert!(
            newest > up_at - TimeDelta::seconds(1),
            "{name}: the tick {newest} fired at {first_pass}, and the worker started after {up_at}"
        );
        let last_before = *fired.keys().rfind(|tick| **tick < down_at).unwrap();
        let since = tick_of(fired[&newest][0]).1;
        match name {
            "skip" => assert_eq!((ticks, since), (vec![newest], None), "missed ticks are dropped"),
            "one" => {
                assert_eq!(ticks, [newest], "one job covers all missed ticks");
                assert_eq!(
                    since,
                    Some(last_before + TimeDelta::seconds(1)),
                    "the job names the oldest tick that it covers"
                );
            }
            _ => {
                let newest_five = (0..=4).rev().map(|seconds| newest - TimeDelta::seconds(seconds));
                assert_eq!(
                    (ticks, since),
                    (newest_five.collect(), None),
                    "the four newest missed ticks, and the current one"
                );
            }
        }
    }
}

/// The jobs of a schedule, grouped by tick.
fn jobs_by_tick<'a>(jobs: &'a [JobRecord], schedule: &str) -> BTreeMap<DateTime<Utc>, Vec<&'a JobRecord>> {
    let mut ticks = BTreeMap::<_, Vec<_>>::new();
    for job in jobs.iter().filter(|job| cron_metadata(job)["schedule"] == schedule) {
        ticks.entry(tick_of(job).0).or_default().push(job);
    }
    ticks
}

/// The tick that created a job, and the oldest missed tick that the job covers.
fn tick_of(job: &JobRecord) -> (DateTime<Utc>, Option<DateTime<Utc>>) {
    let metadata = cron_metadata(job);
    let time = |name: &str| metadata[name].as_str().map(|text| text.parse().unwrap());
    (time("tick").unwrap(), time("since"))
}

fn cron_metadata(job: &JobRecord) -> serde_json::Value {
    serde_json::to_value(&job.metadata).unwrap()["cron"].clone()
}
