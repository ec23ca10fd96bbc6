//! Events: what wakes a job that waits, and for how long an event is kept.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longshore::rules::lifecycle::PendingWait;
use longshore::worker::Wait;
use longshore::{Context, Emitted, Ending, Failure, NewJob, Status};
use serde_json::json;

use crate::fixture::*;
use crate::steps::{suspended, worker};
use crate::worker::{drain, run_worker, until, until_status};

cases! {
    an_event_wakes_a_job_that_waits_for_it,
    an_event_that_was_emitted_before_the_wait_is_found,
    an_event_emitted_while_the_job_is_being_suspended_is_found,
    the_first_event_wins,
    a_wait_that_times_out_stays_timed_out,
    an_event_without_a_payload_stays_an_event,
    an_event_after_the_deadline_is_too_late,
    a_deadline_can_be_added_and_removed_while_jobs_wait,
    the_first_of_several_waits_is_found_by_its_name,
    an_event_with_thousands_of_waiting_jobs_wakes_all_of_them,
    an_event_is_kept_until_the_job_that_it_woke_has_read_it,
    the_first_of_several_waits_is_kept,
    a_cancelled_job_wakes_for_no_event,
    a_wait_that_was_left_behind_wakes_nothing,
    old_events_are_removed_and_undelivered_ones_are_kept,
    an_expired_event_counts_as_absent,
    an_expired_event_that_a_woken_job_has_to_read_is_not_replaced,
    bad_events_are_refused,
    upkeep_delivers_events_that_nobody_delivered,
}

cases! {
    only on postgres:
    an_event_emitted_in_sql_wakes_the_job_after_the_commit,
    an_expired_event_can_be_emitted_again_in_sql,
    the_events_of_one_sql_transaction_are_one_notification,
    an_event_whose_job_is_locked_is_delivered_later,
    an_emit_does_not_wait_long_for_an_open_transaction,
}

/// Waits for the event `approved` and returns its payload.
fn approval()
-> impl Fn((), Context) -> std::pin::Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>> + Clone {
    |(), ctx: Context| {
        Box::pin(async move {
            let approval: serde_json::Value = ctx.event("approved").await?;
            ctx.set_result(&approval)?;
            Ok(())
        })
    }
}

async fn an_event_wakes_a_job_that_waits_for_it(fixture: Fixture) {
    let id = fixture.add(NewJob::new("pay", &())).await;
    let running = run_worker(worker(&fixture).function("pay", approval())).await;
    until("suspended", || async { fixture.steps(id).await.expect("steps").len() == 1 }).await;
    assert_eq!(fixture.emit("other", &1).await.expect("emit"), Emitted::First);
    assert_eq!(fixture.status(id).await, Status::Queued);
    assert_eq!(fixture.emit("approved", &json!({ "by": "ada" })).await.expect("emit"), Emitted::First);
    until_status(&fixture, id, Status::Succeeded).await;
    running.stop().await;
    assert_eq!(fixture.get(id).await.expect("get").result.expect("result").get(), r#"{"by":"ada"}"#);
}

async fn an_event_that_was_emitted_before_the_wait_is_found(fixture: Fixture) {
    fixture.emit("approved", &7).await.expect("emit");
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", approval())).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.lease_no), (Status::Succeeded, 1), "it need not be suspended");
}

async fn an_event_emitted_while_the_job_is_being_suspended_is_found(fixture: Fixture) {
    let id = fixture.enqueue_kind("pay").await;
    let worker_id = fixture.worker().await;
    let claimed = fixture.claim_one(worker_id).await;
    // The handler has looked for the event and found none.
    fixture.emit("approved", &7).await.expect("emit");
    let waits =
        vec![PendingWait { step: "event:approved".into(), until: None, events: vec!["approved".into()] }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    assert_eq!(fixture.get(id).await.expect("get").run_at, fixture.now().await);
    assert_eq!(fixture.claim_one(worker_id).await.lease().id, id);
}

async fn the_first_event_wins(fixture: Fixture) {
    assert_eq!(fixture.emit("approved", &1).await.expect("emit"), Emitted::First);
    fixture.advance(SECOND).await;
    assert_eq!(fixture.emit("approved", &2).await.expect("emit"), Emitted::Repeated);
    let event = fixture.event("approved").await.expect("event").expect("kept");
    assert_eq!((event.payload.get(), event.emitted_at), ("1", start()));
    assert!(fixture.event("rejected").await.expect("event").is_none());
}

async fn a_wait_that_times_out_stays_timed_out(fixture: Fixture) {
    let results = Arc::new(Mutex::new(Vec::new()));
    let seen = results.clone();
    let pay = move |(): (), ctx: Context| {
        let seen = seen.clone();
        async move {
            let waited: Option<u32> = ctx.event("approved").within(DAY).await?;
            // This one has no deadline that was stored by a suspension.
            let at_once: Option<u32> = ctx.event("reviewed").within(Duration::ZERO).await?;
            let tries = {
                let mut seen = seen.lock().expect("seen");
                seen.push((waited, at_once));
                seen.len()
            };
            if tries < 2 { Err(Failure::retry_after(DAY, "again")) } else { Ok(()) }
        }
    };
    let id = fixture.add(NewJob::new("pay", &())).await;
    // The job is suspended, and fails after the deadline.
    drain(worker(&fixture).function("pay", pay.clone())).await;
    fixture.advance(DAY).await;
    drain(worker(&fixture).function("pay", pay.clone())).await;
    assert_eq!(fixture.status(id).await, Status::Retrying);
    // The next attempt finds the stored timeouts, although the events exist by then.
    fixture.emit("approved", &1).await.expect("emit");
    fixture.emit("reviewed", &2).await.expect("emit");
    fixture.advance(DAY).await;
    drain(worker(&fixture).function("pay", pay)).await;
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    assert_eq!(*results.lock().expect("results"), [(None, None), (None, None)]);
}

async fn an_event_without_a_payload_stays_an_event(fixture: Fixture) {
    let results = Arc::new(Mutex::new(Vec::new()));
    let seen = results.clone();
    let pay = move |(): (), ctx: Context| {
        let seen = seen.clone();
        async move {
            let answer: Option<()> = ctx.event("approved").within(DAY).await?;
            let tries = {
                let mut seen = seen.lock().expect("seen");
                seen.push(answer);
                seen.len()
            };
            if tries < 2 { Err(Failure::retry_after(Duration::ZERO, "again")) } else { Ok(()) }
        }
    };
    fixture.emit("approved", &()).await.expect("emit");
    fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", pay)).await;
    assert_eq!(*results.lock().expect("results"), [Some(()), Some(())]);
}

async fn an_event_after_the_deadline_is_too_late(fixture: Fixture) {
    let pay = |(): (), ctx: Context| async move {
        let answer: Option<u32> = ctx.event("approved").within(HOUR).await?;
        Ok(ctx.set_result(&answer)?)
    };
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", pay)).await;
    fixture.advance(2 * HOUR).await;
    fixture.emit("approved", &1).await.expect("emit");
    drain(worker(&fixture).function("pay", pay)).await;
    assert_eq!(fixture.get(id).await.expect("get").result.expect("result").get(), "null");
}

async fn a_deadline_can_be_added_and_removed_while_jobs_wait(fixture: Fixture) {
    let limited = |(): (), ctx: Context| async move { ctx.event::<u32>("a").within(HOUR).await.map(drop) };
    let unlimited = |(): (), ctx: Context| async move { ctx.event::<u32>("a").await.map(drop) };
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", limited)).await;
    fixture.advance(HOUR).await;
    // The new version waits on, and is not due all the time.
    drain(worker(&fixture).function("pay", unlimited)).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.lease_no), (Status::Queued, 2));
    fixture.retry(id).await.expect("run now");
    drain(worker(&fixture).function("pay", limited)).await;
    assert_eq!(fixture.get(id).await.expect("get").run_at, start() + 2 * HOUR);
}

async fn the_first_of_several_waits_is_found_by_its_name(fixture: Fixture) {
    let version = Arc::new(AtomicU32::new(0));
    let current = version.clone();
    let decide = move |(): (), ctx: Context| {
        let version = current.clone();
        async move {
            let (yes, no) = (Wait::event("approved"), Wait::event("rejected"));
            let waits = match version.fetch_add(1, Ordering::SeqCst) {
                0 => vec![yes, no],
                1 => vec![no, yes],
                _ => vec![no],
            };
            let first = ctx.any("decision", waits).await?;
            Err(Failure::retry_after(Duration::ZERO, format!("index {}", first.index)))
        }
    };
    fixture.emit("approved", &1).await.expect("emit");
    let id = fixture.add(NewJob::new("decide", &()).max_attempts(9)).await;
    drain(worker(&fixture).function("decide", decide)).await;
    let job = fixture.get(id).await.expect("get");
    let errors: Vec<&str> = job.errors.iter().filter_map(|attempt| attempt.error.as_deref()).collect();
    assert_eq!(errors[..2], ["index 0", "index 1"]);
    assert!(
        errors[2].contains("the event `approved` came first, but the job no longer waits for it"),
        "{errors:?}"
    );
    assert_eq!(job.status, Status::FailedPermanent);
}

async fn an_event_with_thousands_of_waiting_jobs_wakes_all_of_them(fixture: Fixture) {
    const JOBS: usize = 2500;
    fixture.enqueue_many((0..JOBS).map(|_| job("pay"))).await.expect("enqueue");
    let worker_id = fixture.worker().await;
    let mut claimed = Vec::new();
    while claimed.len() < JOBS {
        claimed.extend(fixture.claim(worker_id, 1000).await);
    }
    for claimed in &claimed {
        let waits = vec![PendingWait { step: "a".into(), until: None, events: vec!["a".into(), "b".into()] }];
        fixture.must_finish(claimed, Ending::Suspended { waits }).await;
    }
    fixture.emit("a", &1).await.expect("emit");
    let due = "select count(*) from ready where run_at <= (select max(emitted_at) from events)";
    assert_eq!(fixture.query_number(due, None).await, JOBS as i64);
    assert_eq!(fixture.query_number("select count(*) from events where fresh", None).await, 0);
}

async fn an_event_is_kept_until_the_job_that_it_woke_has_read_it(fixture: Fixture) {
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", approval())).await;
    fixture.emit("approved", &1).await.expect("emit");
    // Nobody runs the job for a while.
    fixture.advance(30 * DAY).await;
    assert_eq!(fixture.remove_old_events().await.expect("remove"), 0);
    drain(worker(&fixture).function("pay", approval())).await;
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    fixture.delete(id).await.expect("delete");
    assert_eq!(fixture.remove_old_events().await.expect("remove"), 1);
}

async fn the_first_of_several_waits_is_kept(fixture: Fixture) {
    let decide = |(): (), ctx: Context| async move {
        let waits = [Wait::event("approved"), Wait::event("rejected"), Wait::sleep(DAY)];
        let first = ctx.any("decision", waits).await?;
        ctx.set_result(&(first.index, first.payload))?;
        Ok(())
    };
    let result = async |id| fixture.get(id).await.expect("get").result.expect("result").get().to_owned();
    // Nobody answers.
    let id = fixture.add(NewJob::new("decide", &())).await;
    drain(worker(&fixture).function("decide", decide)).await;
    fixture.advance(DAY).await;
    drain(worker(&fixture).function("decide", decide)).await;
    assert_eq!(result(id).await, "[2,null]");
    // Two answers: the earlier one counts, not the one named first.
    let id = fixture.add(NewJob::new("decide", &())).await;
    drain(worker(&fixture).function("decide", decide)).await;
    fixture.emit("rejected", &"no").await.expect("emit");
    fixture.advance(SECOND).await;
    fixture.emit("approved", &"yes").await.expect("emit");
    drain(worker(&fixture).function("decide", decide)).await;
    assert_eq!(result(id).await, r#"[1,"no"]"#);
}

async fn a_cancelled_job_wakes_for_no_event(fixture: Fixture) {
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", approval())).await;
    fixture.cancel(id).await.expect("cancel");
    fixture.emit("approved", &1).await.expect("emit");
    drain(worker(&fixture).function("pay", approval())).await;
    assert_eq!(fixture.status(id).await, Status::Cancelled);

    // A cancel that arrives while the handler runs wins over its suspension.
    let id = fixture.enqueue_kind("pay").await;
    let worker_id = fixture.worker().await;
    let claimed = fixture.claim_one(worker_id).await;
    fixture.cancel(id).await.expect("cancel");
    let waits = vec![PendingWait { step: "nap".into(), until: None, events: vec!["later".into()] }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    assert_eq!(fixture.status(id).await, Status::Cancelled);
    assert!(fixture.steps(id).await.expect("steps").is_empty());
}

async fn a_wait_that_was_left_behind_wakes_nothing(fixture: Fixture) {
    let worker_id = fixture.worker().await;
    let wait = |event: &str| {
        let until = Some(start() + DAY);
        vec![PendingWait { step: format!("event:{event}"), until, events: vec![event.into()] }]
    };
    let ids = [fixture.enqueue_kind("pay").await, fixture.enqueue_kind("pay").await];
    for claimed in fixture.claim(worker_id, 2).await {
        fixture.must_finish(&claimed, Ending::Suspended { waits: wait("first") }).await;
    }
    fixture.advance(DAY).await;
    let claimed = fixture.claim(worker_id, 2).await;
    // One job runs, and then sleeps for another reason. The other one fails. Only then is the event delivered.
    fixture.store().emit("first", &raw("1")).await.expect("emit");
    let until = Some(start() + 9 * DAY);
    let waits = vec![PendingWait { step: "nap".into(), until, events: Vec::new() }];
    fixture.must_finish(&claimed[0], Ending::Suspended { waits }).await;
    let failed = Ending::Failed { error: "declined".into(), retry_in: Some(8 * DAY) };
    fixture.must_finish(&claimed[1], failed).await;
    fixture.deliver_events().await.expect("deliver");
    for id in ids {
        assert_eq!(fixture.get(id).await.expect("get").run_at, start() + 9 * DAY);
    }
}

async fn old_events_are_removed_and_undelivered_ones_are_kept(fixture: Fixture) {
    fixture.emit("old", &1).await.expect("emit");
    let payload = raw("1");
    fixture.store().emit("undelivered", &payload).await.expect("emit");
    fixture.advance(7 * DAY - SECOND).await;
    assert_eq!(fixture.remove_old_events().await.expect("remove"), 0);
    fixture.advance(2 * SECOND).await;
    assert_eq!(fixture.remove_old_events().await.expect("remove"), 1);
    assert!(fixture.event("old").await.expect("event").is_none());
    assert!(fixture.event("undelivered").await.expect("event").is_some());
}

/// Upkeep removes expired events only once a minute.
async fn an_expired_event_counts_as_absent(fixture: Fixture) {
    fixture.emit("approved", &1).await.expect("emit");
    fixture.advance(7 * DAY).await;
    assert_eq!(fixture.emit("approved", &2).await.expect("emit"), Emitted::Repeated);
    fixture.advance(SECOND).await;
    assert!(fixture.event("approved").await.expect("event").is_none());
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", approval())).await;
    assert_eq!(fixture.status(id).await, Status::Queued, "it waits for the next event");
    assert_eq!(fixture.check().await.expect("check").problems, []);
    assert_eq!(fixture.emit("approved", &3).await.expect("emit"), Emitted::First);
    drain(worker(&fixture).function("pay", approval())).await;
    assert_eq!(fixture.get(id).await.expect("get").result.expect("result").get(), "3");
    // A job that waits does not keep an expired event from being removed.
    fixture.emit("b", &1).await.expect("emit");
    fixture.advance(8 * DAY).await;
    let id = suspended(&fixture, job("pay")).await;
    assert_eq!(fixture.remove_old_events().await.expect("remove"), 1);
    assert_eq!(fixture.emit("b", &2).await.expect("emit"), Emitted::First);
    assert_eq!(fixture.get(id).await.expect("get").run_at, fixture.now().await);
}

async fn an_expired_event_that_a_woken_job_has_to_read_is_not_replaced(fixture: Fixture) {
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", approval())).await;
    fixture.emit("approved", &1).await.expect("emit");
    // Nobody runs the job for a while.
    fixture.advance(8 * DAY).await;
    assert_eq!(fixture.emit("approved", &2).await.expect("emit"), Emitted::Repeated);
    drain(worker(&fixture).function("pay", approval())).await;
    assert_eq!(fixture.get(id).await.expect("get").result.expect("result").get(), "1");
}

async fn bad_events_are_refused(fixture: Fixture) {
    let large = "x".repeat(64 * 1024);
    for (name, payload, field) in
        [("", "x", "name"), (&*"x".repeat(129), "x", "name"), ("a", &*large, "payload")]
    {
        let error = fixture.emit(name, payload).await.expect_err("refused");
        assert!(error.is_invalid() && error.to_string().starts_with(field), "{error}");
    }
    assert_eq!(fixture.query_number("select count(*) from events", None).await, 0);
}

async fn upkeep_delivers_events_that_nobody_delivered(fixture: Fixture) {
    let id = fixture.add(NewJob::new("pay", &())).await;
    let running = run_worker(worker(&fixture).function("pay", approval())).await;
    until("suspended", || async { fixture.steps(id).await.expect("steps").len() == 1 }).await;
    // Stored by a process that died before it delivered the event.
    fixture.store().emit("approved", &raw("1")).await.expect("emit");
    until_status(&fixture, id, Status::Succeeded).await;
    running.stop().await;
}

async fn an_event_emitted_in_sql_wakes_the_job_after_the_commit(fixture: Fixture) {
    let id = suspended(&fixture, job("pay")).await;
    let mut connection = fixture.postgres().await;
    for (call, message) in [
        ("emit('')", "name: must have 1 to 128 bytes"),
        ("emit('b', null)", "payload: must not be null"),
        ("emit('b', to_json(repeat('x', 70000)))", "exceed the limit of 65536"),
    ] {
        let select = sqlx::AssertSqlSafe(format!("select {call}"));
        let error = sqlx::query(select).execute(&mut connection).await.expect_err("refused");
        assert!(error.to_string().contains(message), "{error}");
    }
    let mut transaction = sqlx::Connection::begin(&mut connection).await.expect("begin");
    let first: bool =
        sqlx::query_scalar("select emit('b', '7')").fetch_one(&mut *transaction).await.expect("emit");
    assert!(first);
    assert_eq!(fixture.deliver_events().await.expect("deliver"), 0, "not committed yet");
    transaction.commit().await.expect("commit");
    assert_eq!(fixture.deliver_events().await.expect("deliver"), 1);
    assert_eq!(fixture.get(id).await.expect("get").run_at, start());
    let again: bool =
        sqlx::query_scalar("select emit('b', '8')").fetch_one(&mut connection).await.expect("emit");
    assert!(!again);
}

async fn an_expired_event_can_be_emitted_again_in_sql(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    let mut emit = async |payload: &str| -> bool {
        let emit = sqlx::query_scalar("select emit('b', $1::text::json)").bind(payload.to_owned());
        emit.fetch_one(&mut connection).await.expect("emit")
    };
    assert!(emit("1").await);
    fixture.advance(8 * DAY).await;
    assert!(!emit("2").await, "it was not delivered");
    fixture.deliver_events().await.expect("deliver");
    assert!(emit("3").await);
    assert_eq!(fixture.event("b").await.expect("event").expect("exists").payload.get(), "3");
}

async fn the_events_of_one_sql_transaction_are_one_notification(fixture: Fixture) {
    let mut notices = fixture.store().subscribe_to_events().await.expect("subscribe");
    let mut connection = fixture.postgres().await;
    let mut transaction = sqlx::Connection::begin(&mut connection).await.expect("begin");
    for _ in 0..2 {
        let emit = "select count(emit('event ' || n)) from generate_series(1, 500) as n";
        sqlx::query(emit).execute(&mut *transaction).await.expect("emit");
    }
    transaction.commit().await.expect("commit");
    tokio::time::timeout(MAX_WAIT, notices.next()).await.expect("a notification");
    // A notification of a later transaction comes after all of this one.
    sqlx::query("select emit('last')").execute(&mut connection).await.expect("emit");
    tokio::time::timeout(MAX_WAIT, notices.next()).await.expect("a notification");
    let more = std::pin::pin!(notices.next());
    let polled = more.poll(&mut std::task::Context::from_waker(std::task::Waker::noop()));
    assert!(polled.is_pending(), "one notification per transaction");
}

async fn an_event_whose_job_is_locked_is_delivered_later(fixture: Fixture) {
    let locked = suspended(&fixture, job("pay")).await;
    let other = suspended(&fixture, job("pay")).await;
    let mut connection = fixture.postgres().await;
    let mut transaction = sqlx::Connection::begin(&mut connection).await.expect("begin");
    let lock = sqlx::AssertSqlSafe(format!("select 1 from ready where id = '{}' for update", locked.0));
    sqlx::query(lock).execute(&mut *transaction).await.expect("lock");
    fixture.emit("b", &1).await.expect("emit");
    assert_eq!(fixture.get(other).await.expect("get").run_at, start());
    assert!(fixture.get(locked).await.expect("get").run_at > start());
    transaction.rollback().await.expect("rollback");
    assert_eq!(fixture.deliver_events().await.expect("deliver"), 1);
    assert_eq!(fixture.get(locked).await.expect("get").run_at, start());
}

async fn an_emit_does_not_wait_long_for_an_open_transaction(fixture: Fixture) {
    let mut connection = fixture.postgres().await;
    let mut transaction = sqlx::Connection::begin(&mut connection).await.expect("begin");
    sqlx::query("select emit('b')").execute(&mut *transaction).await.expect("emit");
    // More callers than connections.
    let emits: Vec<_> = (0..40)
        .map(|_| {
            let client = fixture.client();
            tokio::spawn(async move { client.emit("b", &1).await })
        })
        .collect();
    fixture.emit("other", &1).await.expect("others need not wait");
    for emit in emits {
        let error = emit.await.expect("task").expect_err("locked");
        assert!(error.is_unavailable() && error.to_string().contains("open transaction"), "{error}");
    }
    transaction.rollback().await.expect("rollback");
    assert_eq!(fixture.emit("b", &1).await.expect("emit"), Emitted::First);
}
