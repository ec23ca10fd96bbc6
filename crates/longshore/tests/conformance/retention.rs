//! Retention: finished jobs are removed after their retention time and not before.

use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::store::Retained;
use longshore::{JobId, Outcome, Retention, Status};

use crate::fixture::*;

cases! {
    each_outcome_is_kept_for_its_own_time,
    the_default_is_a_week_and_ninety_days_for_dead_letters,
    the_age_of_a_job_counts_from_its_end_and_not_from_its_enqueue,
    jobs_without_a_retention_time_are_kept_forever,
    live_jobs_are_never_removed,
    a_retried_job_is_not_removed,
    history_and_checkpoint_are_removed_with_the_job,
    a_step_removes_a_limited_number_of_jobs,
    one_turn_removes_a_hundred_thousand_expired_jobs,
    a_turn_ends_early_when_it_must_not_pause,
    unexpired_jobs_are_not_examined_again,
    jobs_that_end_between_two_turns_are_removed_on_time,
    a_shorter_retention_time_applies_at_once,
    retention_continues_after_the_clock_was_set_back,
    counts_decrease_when_jobs_are_removed,
    two_processes_can_run_retention_concurrently,
    retention_works_with_a_running_clock,
}

cases! {
    only on postgres:
    a_copied_table_is_read_again,
}

const FOREVER: Retention = Retention { succeeded: None, cancelled: None, failed_permanent: None };

async fn retain(fixture: &Fixture, policy: &Retention) -> u64 {
    let mut removed = 0;
    loop {
        let step = fixture.store().retain(policy, 100).await.expect("retain");
        removed += step.removed;
        if step.done {
            return removed;
        }
    }
}

async fn exists(fixture: &Fixture, id: JobId) -> bool {
    fixture.store().get(id).await.expect("get").is_some()
}

async fn each_outcome_is_kept_for_its_own_time(fixture: Fixture) {
    for outcome in Outcome::ALL {
        let mut policy = FOREVER;
        match outcome {
            Outcome::Succeeded => policy.succeeded = Some(HOUR),
            Outcome::Cancelled => policy.cancelled = Some(HOUR),
            Outcome::FailedPermanent => policy.failed_permanent = Some(HOUR),
        }
        let mut kept = Vec::new();
        for other in Outcome::ALL {
            kept.push((other, fixture.ended(job("mail"), other).await));
        }
        fixture.advance(HOUR + SECOND).await;
        assert_eq!(retain(&fixture, &policy).await, 1, "{outcome:?}");
        for (other, id) in kept {
            assert_eq!(exists(&fixture, id).await, other != outcome, "{other:?} under {policy:?}");
            if other != outcome {
                fixture.delete(id).await.expect("delete");
            }
        }
    }
}

async fn the_default_is_a_week_and_ninety_days_for_dead_letters(fixture: Fixture) {
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    let policy = Retention::default();
    fixture.advance(7 * DAY - SECOND).await;
    assert_eq!(retain(&fixture, &policy).await, 0);
    fixture.advance(2 * SECOND).await;
    assert_eq!(retain(&fixture, &policy).await, 2);
    assert_eq!(fixture.count(Status::FailedPermanent).await, 1);
    fixture.advance(83 * DAY).await;
    assert_eq!(retain(&fixture, &policy).await, 1);
    assert_eq!(fixture.check().await.expect("check").jobs, 0);
}

/// A job may wait for a month before it runs.
async fn the_age_of_a_job_counts_from_its_end_and_not_from_its_enqueue(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(30 * DAY)).await;
    fixture.advance(30 * DAY).await;
    let worker = fixture.worker().await;
    let claimed = fixture.claim_one(worker).await;
    fixture.must_finish(&claimed, done()).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    assert!(exists(&fixture, id).await);
}

async fn jobs_without_a_retention_time_are_kept_forever(fixture: Fixture) {
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    fixture.advance(4000 * DAY).await;
    assert_eq!(retain(&fixture, &FOREVER).await, 0);
    assert_eq!(fixture.check().await.expect("check").jobs, 3);
}

async fn live_jobs_are_never_removed(fixture: Fixture) {
    let waiting = fixture.add(job("mail").delay(DAY)).await;
    let retrying = fixture.running(job("mail")).await;
    fixture.must_finish(&retrying, failed()).await;
    let running = fixture.running(job("mail").timeout(None)).await;
    fixture.advance(4000 * DAY).await;
    let immediately = Some(Duration::ZERO);
    let policy = Retention { succeeded: immediately, cancelled: immediately, failed_permanent: immediately };
    assert_eq!(retain(&fixture, &policy).await, 0);
    for id in [waiting, retrying.lease().id, running.lease().id] {
        assert!(exists(&fixture, id).await);
    }
}

async fn a_retried_job_is_not_removed(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.advance(8 * DAY).await;
    fixture.retry(id).await.expect("retry");
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    assert_eq!(fixture.status(id).await, Status::Queued);
}

async fn history_and_checkpoint_are_removed_with_the_job(fixture: Fixture) {
    let claimed = fixture.running(job("mail")).await;
    let saved = fixture.save_checkpoint(&claimed.lease(), &raw("5")).await.expect("save");
    assert_eq!(saved, longshore::store::Fenced::Held);
    fixture.must_finish(&claimed, failed_permanently()).await;
    fixture.advance(91 * DAY).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 1);
    for table in ["jobs", "finished", "attempts", "checkpoints"] {
        assert_eq!(fixture.query_number(&format!("select count(*) from {table}"), None).await, 0, "{table}");
    }
}

async fn a_step_removes_a_limited_number_of_jobs(fixture: Fixture) {
    for _ in 0..5 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    let policy = Retention::default();
    let step = async || fixture.store().retain(&policy, 2).await.expect("retain");
    assert!(matches!(step().await, Retained { removed: 0, done: true, .. }), "nothing is old enough");
    fixture.advance(8 * DAY).await;
    for expected in [(2, false), (2, false), (1, true), (0, true)] {
        let Retained { removed, done, .. } = step().await;
        assert_eq!((removed, done), expected);
    }
}

/// Inserts successes that ended at this time.
async fn plant_succeeded(fixture: &Fixture, jobs: u32, ended_at: DateTime<Utc>) {
    let text = match fixture.engine() {
        Engine::Postgres => format!(
            "with planted as (
               insert into jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload)
               select gen_random_uuid(), '{ended_at}', '{ended_at}', 0, 1, 'mail', 'default', '7'
                 from generate_series(1, {jobs})
               returning id),
             ended as (
               insert into finished (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions)
               select id, '{ended_at}', 1, 'succeeded', 1, 1, 0
                 from planted)
             insert into tallies (minute, ended, kept, outcome, run_bucket, queue, kind)
             values (date_trunc('minute', '{ended_at}'::timestamptz), {jobs}, {jobs}, 'succeeded', 0, 'default', 'mail')"
        ),
        Engine::Sqlite => {
            let at = ended_at.timestamp_micros();
            format!(
                "begin;
                 create temp table planted as
                   with recursive numbers (n) as (select 1 union all select n + 1 from numbers where n < {jobs})
                   select randomblob(16) as id from numbers;
                 insert into jobs (id, created_at, run_at, priority, max_attempts, kind, queue, payload)
                 select id, {at}, {at}, 0, 1, 'mail', 'default', '7' from planted;
                 insert into finished (id, finished_at, lease_no, outcome, attempts, max_attempts, interruptions)
                 select id, {at}, 1, 'succeeded', 1, 1, 0 from planted;
                 insert into tallies (minute, queue, kind, outcome, run_bucket, ended, kept)
                 values ({at} - {at} % 60000000, 'default', 'mail', 'succeeded', 0, {jobs}, {jobs});
                 commit"
            )
        }
    };
    fixture.sql(&text, None).await;
}

async fn one_turn_removes_a_hundred_thousand_expired_jobs(fixture: Fixture) {
    plant_succeeded(&fixture, 100_000, start()).await;
    fixture.advance(DAY).await;
    plant_succeeded(&fixture, 10, fixture.now().await).await;
    fixture.advance(6 * DAY + SECOND).await;
    let mut steps = 0;
    let pause = |_| {
        steps += 1;
        async { true }
    };
    let turn = fixture.retain(&Retention::default(), pause).await.expect("retain");
    assert_eq!((turn.removed, turn.done), (100_000, true));
    assert!(steps >= 9, "a step must stay small, but {steps} pauses were enough");
    assert_eq!(fixture.count(Status::Succeeded).await, 10);
    let rows = fixture.query_number("select count(*) from jobs", None).await;
    assert_eq!(rows, 10);
}

async fn a_turn_ends_early_when_it_must_not_pause(fixture: Fixture) {
    plant_succeeded(&fixture, 15_000, start()).await;
    fixture.advance(8 * DAY).await;
    let turn = fixture.retain(&Retention::default(), |_| async { false }).await.expect("retain");
    assert!(!turn.done && turn.removed < 15_000, "{turn:?}");
}

async fn unexpired_jobs_are_not_examined_again(fixture: Fixture) {
    for day in 0..3 {
        plant_succeeded(&fixture, 7000, start() + day * DAY).await;
    }
    let policy = Retention { failed_permanent: None, ..Retention::default() };
    let turn = async || fixture.store().retain(&policy, 8000).await.expect("retain");
    fixture.advance(3 * DAY).await;
    while !turn().await.done {}
    for _ in 0..3 {
        fixture.advance(DAY).await;
        let retained = turn().await;
        assert_eq!(retained, Retained { removed: 0, examined: 0, done: true });
    }
    // The jobs of the first day expire. Those of the last day are not near them.
    fixture.advance(DAY + SECOND).await;
    let retained = turn().await;
    assert_eq!(retained.removed, 7000);
    assert!(retained.examined < 12_000, "{retained:?}");
    assert_eq!(turn().await.examined, 0);
}

/// What is known about the jobs of a range must not hide jobs that end later.
async fn jobs_that_end_between_two_turns_are_removed_on_time(fixture: Fixture) {
    let hour = Retention { succeeded: Some(HOUR), ..FOREVER };
    let late = fixture.running(job("mail").timeout(None)).await;
    fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    assert_eq!(retain(&fixture, &hour).await, 0);
    for _ in 0..3 {
        fixture.advance(20 * MINUTE).await;
        assert_eq!(retain(&fixture, &hour).await, 0);
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    fixture.must_finish(&late, done()).await;
    // At 80 minutes, the job of minute 20 has just reached its hour; at 120, all have.
    fixture.advance(20 * MINUTE + SECOND).await;
    assert_eq!(retain(&fixture, &hour).await, 1);
    fixture.advance(20 * MINUTE).await;
    assert_eq!(retain(&fixture, &hour).await, 1);
    fixture.advance(20 * MINUTE).await;
    assert_eq!(retain(&fixture, &hour).await, 2, "one of them was enqueued first and ended last");
    assert_eq!(fixture.count(Status::FailedPermanent).await, 1);
}

async fn a_shorter_retention_time_applies_at_once(fixture: Fixture) {
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    fixture.advance(2 * HOUR).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    assert_eq!(retain(&fixture, &Retention { cancelled: Some(HOUR), ..Retention::default() }).await, 1);
    assert_eq!(retain(&fixture, &Retention { failed_permanent: Some(HOUR), ..FOREVER }).await, 1);
    assert_eq!(fixture.count(Status::Succeeded).await, 1);
}

async fn retention_continues_after_the_clock_was_set_back(fixture: Fixture) {
    fixture.advance(1000 * DAY).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    fixture.store().pin_clock(Some(start())).await.expect("pin");
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    fixture.store().pin_clock(Some(start() + 8 * DAY)).await.expect("pin");
    assert_eq!(retain(&fixture, &Retention::default()).await, 1);
}

async fn counts_decrease_when_jobs_are_removed(fixture: Fixture) {
    for _ in 0..3 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    fixture.advance(DAY).await;
    fixture.ended(job("mail"), Outcome::Succeeded).await;
    fixture.advance(6 * DAY + SECOND).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 3);
    assert_eq!(fixture.count(Status::Succeeded).await, 1);
}

async fn two_processes_can_run_retention_concurrently(fixture: Fixture) {
    for _ in 0..20 {
        fixture.ended(job("mail"), Outcome::Succeeded).await;
    }
    fixture.advance(8 * DAY).await;
    let processes: Vec<_> = [fixture.client(), fixture.second_client().await]
        .into_iter()
        .map(|client| {
            tokio::spawn(async move {
                let mut removed = 0;
                for _ in 0..12 {
                    removed += client.store().retain(&Retention::default(), 3).await.expect("retain").removed;
                }
                removed
            })
        })
        .collect();
    let mut removed = 0;
    for process in processes {
        removed += process.await.expect("task");
    }
    removed += retain(&fixture, &Retention::default()).await;
    removed += retain(&fixture, &Retention::default()).await;
    assert_eq!(removed, 20);
    assert_eq!(fixture.count(Status::Succeeded).await, 0);
}

/// The other cases pin the clock. A walk may take shortcuts when the clock runs.
async fn retention_works_with_a_running_clock(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("unpin");
    for outcome in Outcome::ALL {
        fixture.ended(job("mail"), outcome).await;
    }
    let waiting = fixture.enqueue_kind("mail").await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    let immediately = Retention { succeeded: Some(Duration::ZERO), ..Retention::default() };
    assert_eq!(retain(&fixture, &immediately).await, 1);
    assert_eq!(fixture.count(Status::FailedPermanent).await, 1);
    assert!(exists(&fixture, waiting).await);
}

/// Retention remembers blocks of the table, which mean nothing in a copy of the database. Only Postgres: SQLite
/// remembers row numbers, which a copy of the file keeps.
async fn a_copied_table_is_read_again(fixture: Fixture) {
    const NOTHING_EXPIRED: &str = "update finished_ranges set read_at = clock(), succeeded = null, cancelled = null, failed_permanent = null";
    const COPY: &str = "vacuum full finished";
    let id = fixture.ended(job("mail"), Outcome::Succeeded).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    fixture.advance(8 * DAY).await;
    fixture.sql(NOTHING_EXPIRED, None).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 0);
    fixture.sql(COPY, None).await;
    assert_eq!(retain(&fixture, &Retention::default()).await, 1);
    assert!(!exists(&fixture, id).await);
}
