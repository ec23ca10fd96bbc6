//! Schedules: each tick goes to one caller, and its jobs with it.

use chrono::{DateTime, Utc};
use longshore::store::Schedule;
use longshore::{Status, ValidJob};

use crate::bench::*;

fn schedule(name: &str, next_at: DateTime<Utc>) -> Schedule {
    Schedule {
        name: name.into(),
        expression: "*/5 * * * *".into(),
        zone: "Europe/Berlin".into(),
        missed: "skip".into(),
        template: r#"{"kind": "report"}"#.into(),
        paused: false,
        next_at,
        last_at: None,
    }
}

fn tick(n: u32) -> DateTime<Utc> {
    start() + n * 5 * MINUTE
}

fn report() -> ValidJob {
    job("report").validate().expect("valid")
}

async fn fire(bench: &Bench, expected: u32, jobs: &[ValidJob]) -> bool {
    bench.store().fire("nightly", tick(expected), tick(expected + 1), jobs).await.expect("fire")
}

pub(crate) async fn schedules_are_kept_as_given_and_listed_by_name(bench: Bench) {
    let (b, a) = (schedule("b it's", tick(1)), Schedule { paused: true, ..schedule("a", tick(2)) });
    for schedule in [&b, &a] {
        bench.store().put_schedule(schedule).await.expect("put");
    }
    assert_eq!(bench.store().schedules().await.expect("schedules"), [a, b]);
}

pub(crate) async fn a_schedule_of_the_same_name_is_replaced(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let other = Schedule {
        expression: "0 3 * * *".into(),
        zone: "UTC".into(),
        missed: "all:10".into(),
        template: "{}".into(),
        ..schedule("nightly", tick(9))
    };
    bench.store().put_schedule(&other).await.expect("put");
    assert_eq!(bench.store().schedules().await.expect("schedules"), [other]);
}

pub(crate) async fn a_replaced_schedule_keeps_its_last_tick(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    assert!(fire(&bench, 1, &[]).await);
    bench.store().put_schedule(&schedule("nightly", tick(9))).await.expect("put");
    let kept = Schedule { last_at: Some(tick(1)), ..schedule("nightly", tick(9)) };
    assert_eq!(bench.store().schedules().await.expect("schedules"), std::slice::from_ref(&kept));
    let moved = Schedule { last_at: Some(tick(8)), ..kept };
    bench.store().put_schedule(&moved).await.expect("put");
    assert_eq!(bench.store().schedules().await.expect("schedules"), [moved]);
}

pub(crate) async fn a_removed_schedule_is_gone_and_says_so(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    assert!(bench.store().remove_schedule("nightly").await.expect("remove"));
    assert!(!bench.store().remove_schedule("nightly").await.expect("remove"));
    assert!(!fire(&bench, 1, &[report()]).await);
    assert_eq!(bench.counted(Status::Queued).await, 0);
}

pub(crate) async fn a_tick_fires_once_and_stores_its_jobs(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let jobs = [report(), report()];
    assert!(fire(&bench, 1, &jobs).await);
    assert!(!fire(&bench, 1, &[report()]).await);
    assert_eq!(bench.counted(Status::Queued).await, 2);
    for job in &jobs {
        assert_eq!(bench.status(job.id()).await, Status::Queued);
    }
    let after = bench.store().schedules().await.expect("schedules").remove(0);
    assert_eq!((after.next_at, after.last_at), (tick(2), Some(tick(1))));
    assert!(fire(&bench, 2, &[]).await);
}

pub(crate) async fn another_tick_than_the_next_does_not_fire(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(3))).await.expect("put");
    for wrong in [0, 2, 4] {
        assert!(!fire(&bench, wrong, &[report()]).await, "{wrong}");
    }
    assert_eq!(bench.counted(Status::Queued).await, 0);
    assert_eq!(bench.store().schedules().await.expect("schedules")[0].next_at, tick(3));
}

pub(crate) async fn a_paused_schedule_does_not_fire(bench: Bench) {
    let paused = Schedule { paused: true, ..schedule("nightly", tick(1)) };
    bench.store().put_schedule(&paused).await.expect("put");
    assert!(!fire(&bench, 1, &[report()]).await);
    assert_eq!(bench.store().schedules().await.expect("schedules"), [paused]);
    assert_eq!(bench.counted(Status::Queued).await, 0);
}

pub(crate) async fn an_unknown_schedule_does_not_fire(bench: Bench) {
    assert!(!fire(&bench, 1, &[report()]).await);
    assert_eq!(bench.counted(Status::Queued).await, 0);
}

pub(crate) async fn of_many_callers_one_gets_each_tick(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(0))).await.expect("put");
    let handles = [bench.handle(), bench.second().await, bench.second().await];
    for n in 0..10 {
        let callers: Vec<_> = (0..8)
            .map(|caller| {
                let client = handles[caller % handles.len()].clone();
                tokio::spawn(async move {
                    let jobs = [report()];
                    client.store().fire("nightly", tick(n), tick(n + 1), &jobs).await.expect("fire")
                })
            })
            .collect();
        let mut fired = 0;
        for caller in callers {
            fired += u32::from(caller.await.expect("task"));
        }
        assert_eq!(fired, 1, "tick {n}");
    }
    assert_eq!(bench.counted(Status::Queued).await, 10);
}

pub(crate) async fn a_ticks_jobs_obey_their_keys(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let keyed = || job("report").unique_key("report", Default::default()).validate().expect("valid");
    assert!(fire(&bench, 1, &[keyed()]).await);
    assert!(fire(&bench, 2, &[keyed()]).await);
    assert_eq!(bench.counted(Status::Queued).await, 1);
}
