//! Schedules: each tick goes to one caller, and its jobs with it.

use chrono::{DateTime, Utc};
use longshore::store::{Schedule, Ticking};
use longshore::{EnqueuedAs, Status, ValidJob};

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
    let seen = schedule("nightly", tick(expected));
    let fired = bench.store().fire(&seen, tick(expected + 1), Some(seen.next_at), jobs).await;
    fired.expect("fire").is_some()
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
    assert_eq!(bench.store().put_schedule(&other).await.expect("put"), other);
    assert_eq!(bench.store().schedules().await.expect("schedules"), [other]);
}

pub(crate) async fn a_schedule_put_again_keeps_its_ticks_and_its_pause(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    assert!(fire(&bench, 1, &[]).await);
    assert!(bench.store().set_ticking("nightly", Ticking::Held).await.expect("hold"));
    let again = Schedule {
        missed: "one".into(),
        template: "{}".into(),
        last_at: Some(tick(8)),
        ..schedule("nightly", tick(9))
    };
    let kept = Schedule { paused: true, next_at: tick(2), last_at: Some(tick(1)), ..again.clone() };
    assert_eq!(bench.store().put_schedule(&again).await.expect("put"), kept);
    for moved in [
        Schedule { zone: "Asia/Tokyo".into(), ..again.clone() },
        Schedule { expression: "* * * * *".into(), next_at: tick(7), ..again },
    ] {
        let kept = Schedule { paused: true, last_at: Some(tick(1)), ..moved.clone() };
        assert_eq!(bench.store().put_schedule(&moved).await.expect("put"), kept);
        assert_eq!(bench.store().schedules().await.expect("schedules"), [kept]);
    }
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
    assert!(bench.store().set_ticking("nightly", Ticking::Running).await.expect("let go"));
    assert!(fire(&bench, 1, &[report()]).await);
    assert!(bench.store().set_ticking("nightly", Ticking::Held).await.expect("hold"));
    assert!(!fire(&bench, 2, &[report()]).await);
    assert!(!bench.store().set_ticking("nobody", Ticking::Held).await.expect("hold"));
}

pub(crate) async fn a_tick_decided_from_what_is_no_longer_so_does_not_fire(bench: Bench) {
    let now = schedule("nightly", tick(1));
    bench.store().put_schedule(&now).await.expect("put");
    let seen = [
        Schedule { expression: "* * * * *".into(), ..now.clone() },
        Schedule { zone: "UTC".into(), ..now.clone() },
        Schedule { missed: "one".into(), ..now.clone() },
        Schedule { template: "{}".into(), ..now.clone() },
    ];
    for seen in seen {
        let fired = bench.store().fire(&seen, tick(2), Some(tick(1)), &[report()]).await.expect("fire");
        assert_eq!(fired, None, "{seen:?}");
    }
    assert_eq!(bench.store().schedules().await.expect("schedules"), [now]);
    assert_eq!(bench.counted(Status::Queued).await, 0);
    assert!(fire(&bench, 1, &[report()]).await);
}

pub(crate) async fn a_tick_that_is_let_go_is_not_the_last_that_fired(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let moved = [
        (1, 2, Some(tick(1)), Some(tick(1))),
        (2, 7, None, Some(tick(1))),
        (7, 9, Some(tick(8)), Some(tick(8))),
    ];
    for (from, to, fired, last_at) in moved {
        let seen = schedule("nightly", tick(from));
        bench.store().fire(&seen, tick(to), fired, &[]).await.expect("fire").expect("the tick is ours");
        let after = bench.store().schedules().await.expect("schedules").remove(0);
        assert_eq!((after.next_at, after.last_at), (tick(to), last_at));
    }
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
                    let seen = schedule("nightly", tick(n));
                    let fired = client.store().fire(&seen, tick(n + 1), Some(tick(n)), &[report()]).await;
                    fired.expect("fire").is_some()
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

pub(crate) async fn a_ticks_jobs_obey_their_keys_and_are_answered(bench: Bench) {
    bench.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let keyed = || job("report").unique_key("report", Default::default()).validate().expect("valid");
    let mut answers = Vec::new();
    for n in 1..=2 {
        let seen = schedule("nightly", tick(n));
        let fired = bench.store().fire(&seen, tick(n + 1), Some(tick(n)), &[keyed()]).await.expect("fire");
        answers.extend(fired.expect("the tick is ours"));
    }
    assert_eq!(answers[0].id, answers[1].id);
    assert_eq!([answers[0].how, answers[1].how], [EnqueuedAs::Created, EnqueuedAs::Existing]);
    assert_eq!(bench.counted(Status::Queued).await, 1);
}
