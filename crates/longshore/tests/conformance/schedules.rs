//! Schedules: each tick fires once and its jobs are stored with it. The first part tests
//! the operations of the store, the second part the client.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use chrono::{DateTime, Utc};
use longshore::cron::Tick;
use longshore::store::{Ticked, Ticking};
use longshore::{
    EnqueuedAs, FiredReport, JobRecord, ListFilter, Missed, NewJob, NewSchedule, Schedule, Status, ValidJob,
};

use crate::fixture::*;
use crate::locks::{in_time, open_transaction, roll_back};
use crate::worker::{drain, nothing, worker};

cases! {
    schedules_are_stored_exactly_and_listed_by_name,
    a_schedule_of_the_same_name_is_replaced,
    a_schedule_put_again_keeps_its_ticks_and_its_pause,
    removing_a_schedule_returns_whether_it_existed,
    a_tick_fires_once_and_stores_its_jobs,
    a_tick_that_is_not_the_next_one_does_not_fire,
    a_paused_schedule_does_not_fire,
    a_tick_decided_on_an_outdated_schedule_does_not_fire,
    a_skipped_tick_does_not_change_the_last_fired_tick,
    an_unknown_schedule_does_not_fire,
    each_tick_goes_to_one_of_many_callers,
    the_jobs_of_a_tick_respect_their_keys,
    a_pass_fires_due_ticks_and_returns_the_next_wake_time,
    without_schedules_there_is_no_next_wake_time,
    a_ticks_job_has_the_templates_options_and_names_its_schedule,
    a_tick_found_within_a_minute_is_on_time,
    skipped_ticks_create_no_job,
    one_job_replaces_all_missed_ticks,
    the_newest_missed_ticks_are_backfilled,
    many_processes_fire_each_tick_once,
    a_tick_that_fires_again_creates_no_second_job,
    putting_an_unchanged_schedule_changes_nothing,
    a_new_expression_or_zone_counts_from_now,
    a_paused_schedule_holds_its_ticks_until_it_is_resumed,
    a_manual_run_does_not_affect_the_ticks,
    an_unknown_schedule_is_not_found,
    an_invalid_schedule_is_not_stored,
    an_unreadable_schedule_does_not_stop_the_others,
    a_schedule_whose_job_is_rejected_does_not_stop_the_others,
    the_callback_of_a_pass_may_veto_or_change_a_tick,
    a_caller_cannot_take_the_key_of_a_tick,
    a_handler_receives_the_context_the_metadata_and_the_tick_of_its_job,
    a_schedule_that_the_code_no_longer_declares_is_reported_or_removed,
}

cases! {
    only on postgres:
    a_locked_schedule_does_not_delay_the_others,
    a_schedule_whose_unique_key_is_held_does_not_delay_the_others,
}

// ---- the store ---------------------------------------------------------------

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

async fn fire(fixture: &Fixture, expected: u32, jobs: &[ValidJob]) -> bool {
    let seen = schedule("nightly", tick(expected));
    let fired = fixture.store().fire(&seen, tick(expected + 1), Some(seen.next_at), jobs).await;
    matches!(fired.expect("fire"), Ticked::Fired(_))
}

async fn schedules_are_stored_exactly_and_listed_by_name(fixture: Fixture) {
    let (b, a) = (schedule("b it's", tick(1)), Schedule { paused: true, ..schedule("a", tick(2)) });
    for schedule in [&b, &a] {
        fixture.store().put_schedule(schedule).await.expect("put");
    }
    assert_eq!(fixture.store().schedules().await.expect("schedules"), [a, b]);
}

async fn a_schedule_of_the_same_name_is_replaced(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let other = Schedule {
        expression: "0 3 * * *".into(),
        zone: "UTC".into(),
        missed: "all:10".into(),
        template: "{}".into(),
        ..schedule("nightly", tick(9))
    };
    assert_eq!(fixture.store().put_schedule(&other).await.expect("put"), other);
    assert_eq!(fixture.store().schedules().await.expect("schedules"), [other]);
}

async fn a_schedule_put_again_keeps_its_ticks_and_its_pause(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    assert!(fire(&fixture, 1, &[]).await);
    assert!(fixture.store().set_ticking("nightly", Ticking::Paused).await.expect("hold"));
    let again = Schedule {
        missed: "one".into(),
        template: "{}".into(),
        last_at: Some(tick(8)),
        ..schedule("nightly", tick(9))
    };
    let kept = Schedule { paused: true, next_at: tick(2), last_at: Some(tick(1)), ..again.clone() };
    assert_eq!(fixture.store().put_schedule(&again).await.expect("put"), kept);
    for moved in [
        Schedule { zone: "Asia/Tokyo".into(), ..again.clone() },
        Schedule { expression: "* * * * *".into(), next_at: tick(7), ..again },
    ] {
        let kept = Schedule { paused: true, last_at: Some(tick(1)), ..moved.clone() };
        assert_eq!(fixture.store().put_schedule(&moved).await.expect("put"), kept);
        assert_eq!(fixture.store().schedules().await.expect("schedules"), [kept]);
    }
}

async fn removing_a_schedule_returns_whether_it_existed(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    assert!(fixture.store().remove_schedule("nightly").await.expect("remove"));
    assert!(!fixture.store().remove_schedule("nightly").await.expect("remove"));
    assert!(!fire(&fixture, 1, &[report()]).await);
    assert_eq!(fixture.count(Status::Queued).await, 0);
}

async fn a_tick_fires_once_and_stores_its_jobs(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let jobs = [report(), report()];
    assert!(fire(&fixture, 1, &jobs).await);
    assert!(!fire(&fixture, 1, &[report()]).await);
    assert_eq!(fixture.count(Status::Queued).await, 2);
    for job in &jobs {
        assert_eq!(fixture.status(job.id()).await, Status::Queued);
    }
    let after = fixture.store().schedules().await.expect("schedules").remove(0);
    assert_eq!((after.next_at, after.last_at), (tick(2), Some(tick(1))));
    assert!(fire(&fixture, 2, &[]).await);
}

async fn a_tick_that_is_not_the_next_one_does_not_fire(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(3))).await.expect("put");
    for wrong in [0, 2, 4] {
        assert!(!fire(&fixture, wrong, &[report()]).await, "{wrong}");
    }
    assert_eq!(fixture.count(Status::Queued).await, 0);
    assert_eq!(fixture.store().schedules().await.expect("schedules")[0].next_at, tick(3));
}

async fn a_paused_schedule_does_not_fire(fixture: Fixture) {
    let paused = Schedule { paused: true, ..schedule("nightly", tick(1)) };
    fixture.store().put_schedule(&paused).await.expect("put");
    assert!(!fire(&fixture, 1, &[report()]).await);
    assert_eq!(fixture.store().schedules().await.expect("schedules"), [paused]);
    assert_eq!(fixture.count(Status::Queued).await, 0);
    assert!(fixture.store().set_ticking("nightly", Ticking::Running).await.expect("resume"));
    assert!(fire(&fixture, 1, &[report()]).await);
    assert!(fixture.store().set_ticking("nightly", Ticking::Paused).await.expect("hold"));
    assert!(!fire(&fixture, 2, &[report()]).await);
    assert!(!fixture.store().set_ticking("unknown", Ticking::Paused).await.expect("hold"));
}

async fn a_tick_decided_on_an_outdated_schedule_does_not_fire(fixture: Fixture) {
    let now = schedule("nightly", tick(1));
    fixture.store().put_schedule(&now).await.expect("put");
    let seen = [
        Schedule { expression: "* * * * *".into(), ..now.clone() },
        Schedule { zone: "UTC".into(), ..now.clone() },
        Schedule { missed: "one".into(), ..now.clone() },
        Schedule { template: "{}".into(), ..now.clone() },
    ];
    for seen in seen {
        let fired = fixture.store().fire(&seen, tick(2), Some(tick(1)), &[report()]).await.expect("fire");
        assert_eq!(fired, Ticked::Moved, "{seen:?}");
    }
    assert_eq!(fixture.store().schedules().await.expect("schedules"), [now]);
    assert_eq!(fixture.count(Status::Queued).await, 0);
    assert!(fire(&fixture, 1, &[report()]).await);
}

async fn a_skipped_tick_does_not_change_the_last_fired_tick(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let moved = [
        (1, 2, Some(tick(1)), Some(tick(1))),
        (2, 7, None, Some(tick(1))),
        (7, 9, Some(tick(8)), Some(tick(8))),
    ];
    for (from, to, fired, last_at) in moved {
        let seen = schedule("nightly", tick(from));
        let result = fixture.store().fire(&seen, tick(to), fired, &[]).await.expect("fire");
        assert_eq!(result, Ticked::Fired(vec![]));
        let after = fixture.store().schedules().await.expect("schedules").remove(0);
        assert_eq!((after.next_at, after.last_at), (tick(to), last_at));
    }
}

async fn an_unknown_schedule_does_not_fire(fixture: Fixture) {
    assert!(!fire(&fixture, 1, &[report()]).await);
    assert_eq!(fixture.count(Status::Queued).await, 0);
}

async fn each_tick_goes_to_one_of_many_callers(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(0))).await.expect("put");
    let clients = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    for n in 0..10 {
        let callers: Vec<_> = (0..8)
            .map(|caller| {
                let client = clients[caller % clients.len()].clone();
                tokio::spawn(async move {
                    let seen = schedule("nightly", tick(n));
                    let fired = client.store().fire(&seen, tick(n + 1), Some(tick(n)), &[report()]).await;
                    matches!(fired.expect("fire"), Ticked::Fired(_))
                })
            })
            .collect();
        let mut fired = 0;
        for caller in callers {
            fired += u32::from(caller.await.expect("task"));
        }
        assert_eq!(fired, 1, "tick {n}");
    }
    assert_eq!(fixture.count(Status::Queued).await, 10);
}

async fn the_jobs_of_a_tick_respect_their_keys(fixture: Fixture) {
    fixture.store().put_schedule(&schedule("nightly", tick(1))).await.expect("put");
    let keyed = || job("report").unique_key("report", Default::default()).validate().expect("valid");
    let mut results = Vec::new();
    for n in 1..=2 {
        let seen = schedule("nightly", tick(n));
        let fired = fixture.store().fire(&seen, tick(n + 1), Some(tick(n)), &[keyed()]).await.expect("fire");
        let Ticked::Fired(fired) = fired else { panic!("the tick does not fire: {fired:?}") };
        results.extend(fired);
    }
    assert_eq!(results[0].id, results[1].id);
    assert_eq!([results[0].how, results[1].how], [EnqueuedAs::Created, EnqueuedAs::Existing]);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

// ---- the client --------------------------------------------------------------

/// Ticks at 07:10, 07:20 and so on; the fixture starts at 07:08:09.
fn ten_minutes(missed: Missed) -> NewSchedule {
    NewSchedule::new("ten", "*/10 * * * *", job("report")).missed(missed)
}

fn at(time: &str) -> DateTime<Utc> {
    format!("2031-05-06T{time}Z").parse().expect("a time")
}

async fn put(fixture: &Fixture, schedule: NewSchedule) -> Schedule {
    fixture.put_schedule(schedule).await.expect("put")
}

/// Moves the clock to this time and runs a pass.
async fn fire_at(fixture: &Fixture, time: &str) -> FiredReport {
    fixture.store().pin_clock(Some(at(time))).await.expect("pin_clock");
    fixture.fire_due().await.expect("fire")
}

fn fired(report: &FiredReport) -> Vec<(&str, DateTime<Utc>)> {
    report.fired.iter().map(|fired| (fired.schedule.as_str(), fired.tick)).collect()
}

async fn stored(fixture: &Fixture, name: &str) -> Schedule {
    let schedules = fixture.schedules().await.expect("schedules");
    schedules.into_iter().find(|schedule| schedule.name == name).expect("schedule")
}

/// All jobs, oldest due first.
async fn jobs(fixture: &Fixture) -> Vec<JobRecord> {
    let filter = ListFilter { limit: 200, ..ListFilter::default() };
    let mut jobs = fixture.list(&filter).await.expect("list").jobs;
    jobs.sort_by_key(|job| job.run_at);
    jobs
}

async fn a_pass_fires_due_ticks_and_returns_the_next_wake_time(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::Skip)).await;
    put(&fixture, NewSchedule::new("hour", "0 * * * *", job("report"))).await;
    let early = fire_at(&fixture, "07:09:59").await;
    assert_eq!((early.fired, early.next_wake), (vec![], Some(at("07:10:00"))));
    let ten = fire_at(&fixture, "07:10:00").await;
    assert_eq!((fired(&ten), ten.next_wake), (vec![("ten", at("07:10:00"))], Some(at("07:20:00"))));
    assert_eq!(fixture.fire_due().await.expect("fire").fired, []);
    let kept = stored(&fixture, "ten").await;
    assert_eq!((kept.next_at, kept.last_at), (at("07:20:00"), Some(at("07:10:00"))));
    assert_eq!(stored(&fixture, "hour").await.last_at, None);
}

async fn without_schedules_there_is_no_next_wake_time(fixture: Fixture) {
    let report = fixture.fire_due().await.expect("fire");
    assert_eq!((report.fired, report.next_wake), (vec![], None));
}

async fn a_ticks_job_has_the_templates_options_and_names_its_schedule(fixture: Fixture) {
    let template = NewJob::from_json("report", r#"{"pages":  7}"#)
        .queue("slow")
        .priority(-3)
        .max_attempts(9)
        .timeout(Some(7 * SECOND))
        .retry(longshore::RetryPolicy::exponential())
        .flags(["big"])
        .tags(["paper"])
        .metadata(raw(r#"{"team": "a"}"#));
    put(&fixture, NewSchedule::new("it's 1", "0 9 * * *", template).zone("Europe/Berlin")).await;
    let mut wakeups = fixture.store().subscribe().await.expect("subscribe");
    let tick = at("07:00:00") + DAY; // 09:00 in Berlin has already passed today
    fixture.store().pin_clock(Some(tick)).await.expect("pin_clock");
    let report = fixture.fire_due().await.expect("fire");
    assert_eq!(fired(&report), [("it's 1", tick)]);
    assert_eq!(wakeups.next().await.as_deref(), Some("slow"));
    let job = fixture.job(report.fired[0].job.id).await;
    assert_eq!(
        (job.kind.as_str(), job.queue.as_str(), job.payload.get()),
        ("report", "slow", r#"{"pages":  7}"#)
    );
    assert_eq!((job.priority, job.max_attempts, job.timeout), (-3, 9, Some(7 * SECOND)));
    assert_eq!(job.retry, Some(longshore::RetryPolicy::exponential()));
    assert_eq!((job.flags, job.tags), (vec!["big".to_owned()], vec!["paper".to_owned()]));
    assert_eq!(job.run_at, tick);
    assert_eq!(job.idempotency_key.as_deref(), Some("cron:it's 1:2031-05-07T07:00:00Z"));
    assert_eq!(job.context.as_deref(), Some("tick 2031-05-07T07:00:00Z of schedule `it's 1`"));
    let metadata: serde_json::Value =
        serde_json::from_str(job.metadata.expect("metadata").get()).expect("JSON");
    let origin = serde_json::json!({ "schedule": "it's 1", "tick": "2031-05-07T07:00:00Z" });
    assert_eq!(metadata, serde_json::json!({ "team": "a", "cron": origin }));
}

// ---- missed ticks ------------------------------------------------------------

async fn a_tick_found_within_a_minute_is_on_time(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::Skip)).await;
    assert_eq!(fired(&fire_at(&fixture, "07:10:59.999999").await), [("ten", at("07:10:00"))]);
    assert_eq!(fired(&fire_at(&fixture, "07:21:00").await), []);
    assert_eq!(fired(&fire_at(&fixture, "07:30:01").await), [("ten", at("07:30:00"))]);
}

async fn skipped_ticks_create_no_job(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::Skip)).await;
    let report = fire_at(&fixture, "23:05:00").await;
    assert_eq!((report.fired, report.next_wake), (vec![], Some(at("23:10:00"))));
    assert_eq!(fixture.count(Status::Queued).await, 0);
    let kept = stored(&fixture, "ten").await;
    assert_eq!((kept.next_at, kept.last_at), (at("23:10:00"), None));
}

async fn one_job_replaces_all_missed_ticks(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::One)).await;
    let report = fire_at(&fixture, "23:05:00").await;
    assert_eq!((fired(&report), report.next_wake), (vec![("ten", at("23:00:00"))], Some(at("23:10:00"))));
    let created = jobs(&fixture).await;
    assert_eq!(created.len(), 1);
    let origin =
        r#"{"cron":{"schedule":"ten","tick":"2031-05-06T23:00:00Z","since":"2031-05-06T07:10:00Z"}}"#;
    let metadata: serde_json::Value =
        serde_json::from_str(created[0].metadata.as_ref().expect("metadata").get()).expect("JSON");
    assert_eq!(metadata, serde_json::from_str::<serde_json::Value>(origin).expect("JSON"));
    let kept = stored(&fixture, "ten").await;
    assert_eq!((kept.next_at, kept.last_at), (at("23:10:00"), Some(at("23:00:00"))));
}

async fn the_newest_missed_ticks_are_backfilled(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::All { limit: 3 })).await;
    let report = fire_at(&fixture, "23:05:00").await;
    let newest = [at("22:40:00"), at("22:50:00"), at("23:00:00")];
    assert_eq!(fired(&report), newest.map(|tick| ("ten", tick)));
    assert_eq!(jobs(&fixture).await.iter().map(|job| job.run_at).collect::<Vec<_>>(), newest);
    let kept = stored(&fixture, "ten").await;
    assert_eq!((kept.next_at, kept.last_at), (at("23:10:00"), Some(at("23:00:00"))));
    assert_eq!(fired(&fire_at(&fixture, "23:10:00").await), [("ten", at("23:10:00"))]);
}

// ---- exactly one job per tick --------------------------------------------------

async fn many_processes_fire_each_tick_once(fixture: Fixture) {
    const TICKS: u32 = 40;
    for name in ["a", "b"] {
        let every_minute = NewSchedule::new(name, "* * * * *", job("report"));
        put(&fixture, every_minute.missed(Missed::All { limit: 1000 })).await;
    }
    let stop = Arc::new(AtomicBool::new(false));
    let clients = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    let processes: Vec<_> = (0..8)
        .map(|process| {
            let (client, stop) = (clients[process % clients.len()].clone(), stop.clone());
            tokio::spawn(async move {
                let mut fired = Vec::new();
                loop {
                    let last_pass = stop.load(Ordering::SeqCst);
                    fired.extend(client.fire_due().await.expect("fire").fired);
                    if last_pass {
                        return fired;
                    }
                }
            })
        })
        .collect();
    for _ in 0..TICKS {
        fixture.advance(MINUTE).await;
    }
    stop.store(true, Ordering::SeqCst);
    let mut fired = Vec::new();
    for process in processes {
        fired.extend(process.await.expect("task"));
    }
    assert!(fired.iter().all(|fired| fired.job.how == EnqueuedAs::Created));
    fired.sort_by_key(|fired| (fired.schedule.clone(), fired.tick));
    let minutes = |name| (0..TICKS).map(move |n| (name, at("07:09:00") + n * MINUTE));
    let expected: Vec<_> = minutes("a").chain(minutes("b")).collect();
    assert_eq!(fired.iter().map(|fired| (fired.schedule.as_str(), fired.tick)).collect::<Vec<_>>(), expected);
    assert_eq!(fixture.count(Status::Queued).await, u64::from(2 * TICKS));
}

async fn a_tick_that_fires_again_creates_no_second_job(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::Skip)).await;
    let first = fire_at(&fixture, "07:10:00").await;
    fixture.sql("update schedules set next_at = last_at", None).await;
    let second = fixture.fire_due().await.expect("fire");
    assert_eq!(fired(&second), fired(&first));
    assert_eq!(second.fired[0].job.id, first.fired[0].job.id);
    assert_eq!(second.fired[0].job.how, EnqueuedAs::Existing);
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

// ---- put, pause, run ---------------------------------------------------------

async fn putting_an_unchanged_schedule_changes_nothing(fixture: Fixture) {
    let first = put(&fixture, ten_minutes(Missed::One)).await;
    fixture.advance(HOUR).await;
    // Eight processes start with the same code, and ticks are due.
    let others = [fixture.client(), fixture.second_client().await];
    let puts: Vec<_> = (0..8)
        .map(|n| {
            let client = others[n % 2].clone();
            tokio::spawn(async move { client.put_schedule(ten_minutes(Missed::One)).await.expect("put") })
        })
        .collect();
    for put in puts {
        assert_eq!(put.await.expect("task"), first);
    }
    let other = NewSchedule::new("ten", "*/10  * * * *", job("letter")).missed(Missed::Skip);
    let other = put(&fixture, other).await;
    assert_eq!((other.next_at, other.missed.as_str()), (first.next_at, "skip"));
    assert!(other.template.contains("letter"), "{}", other.template);
}

async fn a_new_expression_or_zone_counts_from_now(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::One)).await;
    fixture.advance(HOUR).await;
    let daily = |zone| NewSchedule::new("ten", "30 10 * * *", job("report")).zone(zone);
    assert_eq!(put(&fixture, daily("UTC")).await.next_at, at("10:30:00"));
    assert_eq!(put(&fixture, daily("Europe/Berlin")).await.next_at, at("08:30:00"));
    assert_eq!(fired(&fixture.fire_due().await.expect("fire")), []);
}

async fn a_paused_schedule_holds_its_ticks_until_it_is_resumed(fixture: Fixture) {
    let policies = [("all", Missed::All { limit: 9 }), ("one", Missed::One), ("skip", Missed::Skip)];
    for (name, missed) in policies {
        put(&fixture, NewSchedule::new(name, "*/10 * * * *", job("report")).missed(missed)).await;
        fixture.pause_schedule(name).await.expect("pause");
    }
    let report = fire_at(&fixture, "07:35:00").await;
    assert_eq!((report.fired, report.next_wake), (vec![], None));
    for (name, missed) in policies {
        let again = NewSchedule::new(name, "*/10 * * * *", job("report")).missed(missed);
        assert!(put(&fixture, again).await.paused, "putting a schedule must not resume it");
        fixture.resume_schedule(name).await.expect("resume");
    }
    let report = fixture.fire_due().await.expect("fire");
    let ticks = [at("07:10:00"), at("07:20:00"), at("07:30:00")];
    let mut expected: Vec<_> = ticks.map(|tick| ("all", tick)).into();
    expected.push(("one", ticks[2]));
    assert_eq!((fired(&report), report.next_wake), (expected, Some(at("07:40:00"))));
}

async fn a_manual_run_does_not_affect_the_ticks(fixture: Fixture) {
    let before = put(&fixture, ten_minutes(Missed::One)).await;
    let first = fixture.run_schedule_now("ten").await.expect("run");
    fixture.pause_schedule("ten").await.expect("pause");
    let second = fixture.run_schedule_now("ten").await.expect("run");
    assert_ne!(first.id, second.id);
    assert_eq!([first.how, second.how], [EnqueuedAs::Created; 2]);
    let job = fixture.job(second.id).await;
    assert_eq!((job.kind.as_str(), job.run_at, job.idempotency_key), ("report", start(), None));
    assert_eq!(job.context.as_deref(), Some("manual run of schedule `ten`"));
    assert_eq!(job.metadata.expect("metadata").get().replace(' ', ""), r#"{"cron":{"schedule":"ten"}}"#);
    fixture.resume_schedule("ten").await.expect("resume");
    assert_eq!(stored(&fixture, "ten").await, before);
    assert_eq!(fired(&fire_at(&fixture, "07:10:00").await), [("ten", at("07:10:00"))]);
    assert_eq!(fixture.count(Status::Queued).await, 3);
}

async fn an_unknown_schedule_is_not_found(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::One)).await;
    fixture.remove_schedule("ten").await.expect("remove");
    let errors = [
        fixture.remove_schedule("ten").await.expect_err("removed"),
        fixture.pause_schedule("ten").await.expect_err("removed"),
        fixture.resume_schedule("ten").await.expect_err("removed"),
        fixture.run_schedule_now("ten").await.expect_err("removed"),
    ];
    for error in errors {
        assert!(error.is_not_found() && error.to_string().contains("`ten`"), "{error:?}");
    }
    let report = fire_at(&fixture, "07:10:00").await;
    assert_eq!((report.fired, report.next_wake), (vec![], None));
}

async fn an_invalid_schedule_is_not_stored(fixture: Fixture) {
    let error =
        fixture.put_schedule(ten_minutes(Missed::All { limit: 0 })).await.expect_err("a limit of zero");
    assert_eq!(error.field(), Some("missed"));
    assert_eq!(fixture.schedules().await.expect("schedules"), []);
}

// ---- unreadable rows, callbacks ----------------------------------------------

async fn an_unreadable_schedule_does_not_stop_the_others(fixture: Fixture) {
    for name in ["a", "b", "c", "d", "e"] {
        put(&fixture, NewSchedule::new(name, "*/10 * * * *", job("report"))).await;
    }
    fixture
        .sql(
            "update schedules set expression = 'at dawn' where name = 'a';
             update schedules set zone = 'Mars/Olympus' where name = 'b';
             update schedules set missed = 'never' where name = 'c';
             update schedules set template = '{}' where name = 'd'",
            None,
        )
        .await;
    let report = fire_at(&fixture, "07:10:00").await;
    assert_eq!((fired(&report), report.next_wake), (vec![("e", at("07:10:00"))], Some(at("07:20:00"))));
    let error = fixture.run_schedule_now("d").await.expect_err("no template");
    assert_eq!(error.field(), Some("template"));
    // Once they are put again, they fire. A due tick is kept unless the expression or the
    // zone changed.
    for name in ["a", "b", "c", "d"] {
        put(&fixture, NewSchedule::new(name, "*/10 * * * *", job("report"))).await;
    }
    let report = fixture.fire_due().await.expect("fire");
    assert_eq!(fired(&report), [("c", at("07:10:00")), ("d", at("07:10:00"))]);
}

/// The database rejects the job of one schedule.
async fn a_schedule_whose_job_is_rejected_does_not_stop_the_others(fixture: Fixture) {
    for (name, kind) in [("a", "bad"), ("b", "report")] {
        put(&fixture, NewSchedule::new(name, "*/10 * * * *", job(kind))).await;
    }
    let trigger = match fixture.engine() {
        Engine::Postgres => {
            "create function reject() returns trigger language plpgsql
             as $$ begin raise exception 'rejected'; end $$;
             create trigger reject before insert on jobs for each row when (new.kind = 'bad')
             execute function reject()"
        }
        Engine::Sqlite => {
            "create trigger reject before insert on jobs when new.kind = 'bad'
             begin select raise(abort, 'rejected'); end"
        }
    };
    fixture.sql(trigger, None).await;
    let report = fire_at(&fixture, "07:10:00").await;
    assert_eq!(fired(&report), [("b", at("07:10:00"))]);
    assert_eq!(skipped(&report), ["a"]);
    assert_eq!(stored(&fixture, "a").await.next_at, at("07:10:00"), "the tick is still due");
    fixture.sql("update schedules set template = replace(template, 'bad', 'good')", None).await;
    assert_eq!(fired(&fixture.fire_due().await.expect("fire")), [("a", at("07:10:00"))]);
}

fn skipped(report: &FiredReport) -> Vec<&str> {
    report.skipped.iter().map(|skipped| skipped.schedule.as_str()).collect()
}

/// Makes a pass while another transaction holds something that schedule `b` needs.
/// Schedules `a` and `c` fire at once, and `b` fires when the transaction has ended.
async fn fire_while_held(fixture: &Fixture, held: &str) {
    let other = open_transaction(fixture, held).await;
    fixture.store().pin_clock(Some(at("07:10:00"))).await.expect("pin_clock");
    for (pass, expected) in [vec!["a", "c"], vec![]].into_iter().enumerate() {
        let report = in_time(fixture.fire_due()).await.expect("fire");
        let names: Vec<&str> = report.fired.iter().map(|fired| fired.schedule.as_str()).collect();
        assert_eq!((names, skipped(&report)), (expected, vec!["b"]), "pass {pass}");
        // Not at once, which would be a busy loop, and not at the next tick.
        let wait = (report.next_wake.expect("a wake time") - report.looked_at).to_std().expect("later");
        assert!((SECOND / 10..=SECOND).contains(&wait), "{wait:?}");
    }
    roll_back(other).await;
    let report = fixture.fire_due().await.expect("fire");
    assert_eq!((fired(&report), skipped(&report)), (vec![("b", at("07:10:00"))], vec![]));
    assert_eq!(report.next_wake, Some(at("07:20:00")));
    assert_eq!(fixture.count(Status::Queued).await, 3);
}

async fn a_locked_schedule_does_not_delay_the_others(fixture: Fixture) {
    for name in ["a", "b", "c"] {
        put(&fixture, NewSchedule::new(name, "*/10 * * * *", job("report"))).await;
    }
    fire_while_held(&fixture, "select 1 from schedules where name = 'b' for update").await;
}

async fn a_schedule_whose_unique_key_is_held_does_not_delay_the_others(fixture: Fixture) {
    for name in ["a", "b", "c"] {
        let job = job("report").unique_key(name, Default::default());
        put(&fixture, NewSchedule::new(name, "*/10 * * * *", job)).await;
    }
    fire_while_held(&fixture, "select enqueue('x', unique_key => 'b')").await;
}

/// Otherwise a caller could suppress the job of a tick.
async fn a_caller_cannot_take_the_key_of_a_tick(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::Skip)).await;
    let key = "cron:ten:2031-05-06T07:10:00Z";
    let error = fixture.enqueue(job("mail").idempotency_key(key)).await.expect_err("reserved");
    assert_eq!(error.field(), Some("idempotency_key"), "{error}");
    assert!(error.to_string().contains("another prefix"), "{error}");
    let batch = [job("plain"), job("mail").idempotency_key(key)];
    let error = fixture.enqueue_many(batch).await.expect_err("reserved");
    assert!(error.to_string().contains("jobs[1]"), "{error}");
    // As a unique key it is no reserved word.
    fixture.add(job("mail").queue("other").unique_key(key, Default::default())).await;
    let report = fire_at(&fixture, "07:10:00").await;
    assert_eq!(report.fired[0].job.how, EnqueuedAs::Created);
    assert_eq!(fixture.job(report.fired[0].job.id).await.idempotency_key.as_deref(), Some(key));
}

async fn the_callback_of_a_pass_may_veto_or_change_a_tick(fixture: Fixture) {
    put(&fixture, ten_minutes(Missed::All { limit: 9 })).await;
    fixture.store().pin_clock(Some(at("07:35:00"))).await.expect("pin_clock");
    let mut calls = Vec::new();
    let report = fixture
        .fire_due_with(&mut |schedule: &Schedule, tick: DateTime<Utc>, job: NewJob| {
            calls.push((schedule.name.clone(), tick));
            if tick == at("07:20:00") {
                Tick::Fire(job.priority(7).idempotency_key("another"))
            } else {
                Tick::Veto
            }
        })
        .await
        .expect("fire");
    assert_eq!(calls, [at("07:10:00"), at("07:20:00"), at("07:30:00")].map(|tick| ("ten".to_owned(), tick)));
    assert_eq!(fired(&report), [("ten", at("07:20:00"))]);
    let job = fixture.job(report.fired[0].job.id).await;
    assert_eq!((job.priority, job.run_at), (7, at("07:20:00")));
    assert_eq!(job.idempotency_key.as_deref(), Some("cron:ten:2031-05-06T07:20:00Z"));
    let kept = stored(&fixture, "ten").await;
    assert_eq!((kept.next_at, kept.last_at), (at("07:40:00"), Some(at("07:20:00"))));
    fixture.store().pin_clock(Some(at("07:40:00"))).await.expect("pin_clock");
    let mut veto = |_: &Schedule, _: DateTime<Utc>, _: NewJob| Tick::Veto;
    assert_eq!(fixture.fire_due_with(&mut veto).await.expect("fire").fired, []);
    let kept = stored(&fixture, "ten").await;
    assert_eq!((kept.next_at, kept.last_at), (at("07:50:00"), Some(at("07:20:00"))));
}

// ---- the worker ----------------------------------------------------------------

async fn a_handler_receives_the_context_the_metadata_and_the_tick_of_its_job(fixture: Fixture) {
    let metadata = |json: &str| serde_json::value::RawValue::from_string(json.into()).expect("metadata");
    let template = job("report").context("for the board").metadata(metadata(r#"{"team":"a"}"#));
    let stored = fixture.put_schedule(NewSchedule::new("nightly", "0 3 * * *", template)).await.expect("put");
    fixture.store().pin_clock(Some(stored.next_at)).await.expect("clock");
    assert_eq!(fixture.fire_due().await.expect("fire").fired.len(), 1);
    fixture.run_schedule_now("nightly").await.expect("run");
    fixture.add(job("report").metadata(metadata(r#"{"cron":"not a tick"}"#))).await;
    fixture.add(job("report")).await;
    let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
    let sink = seen.clone();
    let builder = worker(&fixture).concurrency(1).function(
        "report",
        move |_: serde_json::Value, ctx: longshore::Context| {
            let job = ctx.job();
            let metadata = job.metadata().map(|json| json.get().to_owned());
            sink.lock().expect("seen").push((job.context().map(str::to_owned), metadata, job.cron()));
            async { Ok(()) }
        },
    );
    drain(builder).await;
    let seen = std::mem::take(&mut *seen.lock().expect("seen"));
    let [ticked, manual, foreign, plain] = &seen[..] else { panic!("{seen:?}") };
    assert_eq!(ticked.0.as_deref(), Some("for the board"));
    assert!(ticked.1.as_deref().expect("metadata").contains(r#""team":"a""#), "{ticked:?}");
    let origin = ticked.2.as_ref().expect("a tick");
    assert_eq!(
        (origin.schedule.as_str(), origin.tick, origin.since),
        ("nightly", Some(stored.next_at), None)
    );
    let origin = manual.2.as_ref().expect("a manual run");
    assert_eq!((origin.schedule.as_str(), origin.tick), ("nightly", None));
    assert_eq!((&foreign.2, plain), (&None, &(None, None, None)));
}

async fn a_schedule_that_the_code_no_longer_declares_is_reported_or_removed(fixture: Fixture) {
    let nightly = |name: &str| NewSchedule::new(name, "0 3 * * *", job("report"));
    let build = |names: &[&str]| {
        let builder = worker(&fixture).function("report", nothing);
        names.iter().fold(builder, |builder, name| builder.cron(nightly(name)))
    };
    let started = async |builder: longshore::worker::Builder| {
        let running = builder.build().expect("build").start().await.expect("start");
        let undeclared = running.undeclared_schedules().to_vec();
        running.stop_now().await;
        undeclared
    };
    let stored = async || -> Vec<String> {
        fixture.schedules().await.expect("schedules").into_iter().map(|schedule| schedule.name).collect()
    };
    // Schedules of an operator and of another program.
    fixture.put_schedule(nightly("by hand")).await.expect("put");
    let mut other = longshore::worker::Settings { name_prefix: "billing".into(), ..Default::default() };
    other.schedules = false;
    assert_eq!(started(build(&["invoices"]).settings(other)).await, [""; 0]);

    assert_eq!(started(build(&["one", "two"])).await, [""; 0]);
    assert_eq!(started(build(&["one", "two"])).await, [""; 0]);
    // Reported by default, and not by a process that declares none.
    assert_eq!(started(build(&["one"])).await, ["two"]);
    assert_eq!(started(build(&[])).await, [""; 0]);
    assert_eq!(stored().await, ["by hand", "invoices", "one", "two"]);
    let removing = |names: &[&str]| build(names).undeclared_schedules(longshore::Undeclared::Remove);
    assert_eq!(started(removing(&["one"])).await, ["two"]);
    assert_eq!(stored().await, ["by hand", "invoices", "one"]);
    assert_eq!(started(removing(&[])).await, ["one"]);
    assert_eq!(stored().await, ["by hand", "invoices"]);
}
