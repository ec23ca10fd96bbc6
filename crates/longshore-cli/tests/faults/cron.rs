//! A schedule while processes come and go: each tick has one job, however many
//! of them die, and after a time without any the policy decides.

use std::collections::BTreeMap;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use longshore::{JobRecord, Missed, NewJob, NewSchedule};

use crate::fleet::{Fleet, ms, on_every_engine};

on_every_engine!(
    each_tick_creates_one_job_while_processes_die,
    after_all_workers_were_down_the_missed_policy_decides
);

const EVERY_SECOND: &str = "* * * * * *";

async fn each_tick_creates_one_job_while_processes_die(fleet: &mut Fleet) {
    // `LONGSHORE_FAULTS_TICKS=60` for a run of a minute.
    let ticks: i64 = std::env::var("LONGSHORE_FAULTS_TICKS").map_or(10, |ticks| ticks.parse().unwrap());
    // A machine that stands still for seconds must not be taken for a lost tick.
    let backfill = Missed::All { limit: 60 };
    let mut crowd: Vec<usize> = (0..8).map(|_| fleet.start()).collect();
    fleet.wait_until("all register", async |fleet| fleet.registered_workers().await == 8).await;
    let put = NewSchedule::new("second", EVERY_SECOND, NewJob::new("noop", &[0])).missed(backfill);
    let first = fleet.client().put_schedule(put).await.unwrap().next_at;
    let last = first + TimeDelta::seconds(ticks - 1);

    let between = TimeDelta::seconds(if ticks < 60 { 2 } else { 5 });
    let mut deaths = 0;
    loop {
        let now = fleet.client().store().now().await.unwrap();
        if now > last {
            break;
        }
        if now > first + between * (deaths + 1) {
            let victim = crowd.remove(0);
            fleet.worker(victim).signal("KILL");
            crowd.push(fleet.start());
            deaths += 1;
        }
        tokio::time::sleep(ms(20)).await;
    }
    fleet
        .wait_until("the last tick has its job", async |fleet| {
            fleet.jobs().await.iter().any(|job| tick(job).0 >= last)
        })
        .await;
    assert!(deaths >= 3, "{deaths} deaths");

    let jobs = fleet.jobs().await;
    let fired = ticks_of(&jobs, "second");
    let wanted: Vec<DateTime<Utc>> = (0..ticks).map(|nth| first + TimeDelta::seconds(nth)).collect();
    let seen: Vec<DateTime<Utc>> = fired.keys().copied().take_while(|tick| *tick <= last).collect();
    assert_eq!(seen, wanted, "no tick without a job");
    assert!(fired.values().all(|jobs| jobs.len() == 1), "and none with two");
}

async fn after_all_workers_were_down_the_missed_policy_decides(fleet: &mut Fleet) {
    let outage = Duration::from_secs(10);
    let policies = [("skip", Missed::Skip), ("one", Missed::One), ("all", Missed::All { limit: 4 })];
    for (name, missed) in policies {
        let put = NewSchedule::new(name, EVERY_SECOND, NewJob::new("noop", &[0])).missed(missed);
        fleet.client().put_schedule(put).await.unwrap();
    }
    let crowd: Vec<usize> = (0..3).map(|_| fleet.start()).collect();
    fleet
        .wait_until("each has fired", async |fleet| {
            let jobs = fleet.jobs().await;
            policies.iter().all(|(name, _)| !ticks_of(&jobs, name).is_empty())
        })
        .await;
    for victim in crowd {
        fleet.worker(victim).signal("KILL");
        fleet.worker(victim).wait_for_exit().await;
    }
    let gone_at = fleet.client().store().now().await.unwrap();
    // The outage itself.
    tokio::time::sleep(outage).await;
    fleet.start();
    let back = gone_at + TimeDelta::from_std(outage).unwrap();
    fleet
        .wait_until("each has fired again", async |fleet| {
            let jobs = fleet.jobs().await;
            let again = |name: &str| ticks_of(&jobs, name).values().any(|jobs| jobs[0].created_at >= back);
            policies.iter().all(|(name, _)| again(name))
        })
        .await;

    let jobs = fleet.jobs().await;
    for (name, _) in policies {
        let fired = ticks_of(&jobs, name);
        assert!(fired.values().all(|jobs| jobs.len() == 1), "{name}: no tick with two jobs");
        // The pass that ended the outage made all its jobs at once.
        let ended = fired.values().map(|jobs| jobs[0].created_at).filter(|at| *at >= back).min().unwrap();
        let made: Vec<DateTime<Utc>> =
            fired.values().flatten().filter(|job| job.created_at == ended).map(|job| tick(job).0).collect();
        let newest = made.last().copied().unwrap();
        assert!(ended - newest < TimeDelta::seconds(2), "{name}: {newest} was fired at {ended}");
        let before = *fired.keys().rfind(|tick| **tick < gone_at).unwrap();
        let since = tick(fired[&newest][0]).1;
        let back_to = |seconds: i64| (0..=seconds).rev().map(|ago| newest - TimeDelta::seconds(ago));
        match name {
            "skip" => assert_eq!((made, since), (vec![newest], None), "those that were missed are dropped"),
            "one" => {
                assert_eq!(made, [newest], "one makes up for all");
                assert_eq!(since, Some(before + TimeDelta::seconds(1)), "and says for which");
            }
            _ => assert_eq!(
                (made, since),
                (back_to(4).collect(), None),
                "the newest four, and the one on time"
            ),
        }
    }
}

/// The jobs of each tick of a schedule.
fn ticks_of<'a>(jobs: &'a [JobRecord], schedule: &str) -> BTreeMap<DateTime<Utc>, Vec<&'a JobRecord>> {
    let mut ticks = BTreeMap::<_, Vec<_>>::new();
    for job in jobs.iter().filter(|job| origin(job)["schedule"] == schedule) {
        ticks.entry(tick(job).0).or_default().push(job);
    }
    ticks
}

/// A job's tick, and the oldest that it makes up for.
fn tick(job: &JobRecord) -> (DateTime<Utc>, Option<DateTime<Utc>>) {
    let origin = origin(job);
    let time = |name: &str| origin[name].as_str().map(|text| text.parse().unwrap());
    (time("tick").unwrap(), time("since"))
}

fn origin(job: &JobRecord) -> serde_json::Value {
    serde_json::to_value(&job.metadata).unwrap()["cron"].clone()
}
