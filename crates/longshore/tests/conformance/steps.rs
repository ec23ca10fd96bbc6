//! Durable steps, sleeps and events: what is done once, what survives, and what wakes a job.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use longshore::store::{NewStep, PendingWait, StepState};
use longshore::worker::{Batched, Builder, Settings, Wait};
use longshore::{Context, Emitted, Ending, Failure, JobId, NewJob, Status, Worker};
use serde_json::json;

use crate::fixture::*;
use crate::worker::{drain, run_worker, until, until_status};

cases! {
    a_step_is_done_once_however_often_the_job_runs,
    a_step_is_found_by_its_name_not_by_its_position,
    a_stale_lease_journals_nothing,
    a_repeated_save_keeps_the_first_value,
    attempts_and_interruptions_count_since_the_last_step,
    a_failed_step_is_not_journaled,
    bad_steps_are_refused_and_store_nothing,
    a_sleep_holds_no_lease_and_ends_at_its_first_deadline,
    a_sleeping_job_that_is_woken_early_sleeps_on,
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
    concurrent_waits_are_suspended_together,
    a_running_step_delays_the_suspension,
    a_task_that_outlives_its_handler_does_not_wait_forever,
    a_cancelled_job_wakes_for_no_event,
    a_wait_that_was_left_behind_wakes_nothing,
    a_job_of_a_batch_can_do_steps_but_cannot_wait,
    an_edit_and_a_replacement_delete_the_journal,
    a_retry_continues_after_a_failure_and_starts_over_after_a_success,
    deleting_a_job_deletes_its_journal_and_waits,
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
    a_step_in_a_transaction_commits_with_the_users_rows,
    a_step_in_a_transaction_that_fails_rolls_everything_back,
    a_step_in_a_transaction_under_a_lost_lease_rolls_everything_back,
    no_other_worker_gets_the_job_while_a_step_in_a_transaction_runs,
    a_step_in_a_transaction_keeps_the_limits_of_steps,
}

cases! {
    only on sqlite:
    a_step_in_a_transaction_needs_postgres,
}

fn settings() -> Settings {
    Settings {
        poll_interval: Duration::from_millis(20),
        max_poll_interval: Duration::from_millis(50),
        stale_after: 60 * SECOND,
        ..Settings::default()
    }
}

fn worker(fixture: &Fixture) -> Builder {
    Worker::builder(fixture.client()).settings(settings())
}

/// Counts calls.
#[derive(Clone, Default)]
struct Calls(Arc<AtomicU32>);

impl Calls {
    fn count(&self) -> u32 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn so_far(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The names of the steps that are done, and of those that wait.
async fn journal(fixture: &Fixture, id: JobId) -> (Vec<String>, Vec<String>) {
    let steps = fixture.steps(id).await.expect("steps");
    let (done, waiting): (Vec<_>, Vec<_>) =
        steps.into_iter().partition(|step| matches!(step.state, StepState::Done(_)));
    let names = |steps: Vec<longshore::StepRecord>| steps.into_iter().map(|step| step.name).collect();
    (names(done), names(waiting))
}

async fn a_step_is_done_once_however_often_the_job_runs(fixture: Fixture) {
    let (charged, shipped) = (Calls::default(), Calls::default());
    let counts = (charged.clone(), shipped.clone());
    let order = move |(): (), ctx: Context| {
        let (charged, shipped) = counts.clone();
        async move {
            let charge: u32 = ctx.step("charge", || async { Ok(charged.count() * 100) }).await?;
            let parcel: String = ctx
                .step("ship", || async {
                    if shipped.count() < 3 {
                        return Err(Failure::retry_after(Duration::ZERO, "no truck"));
                    }
                    Ok(format!("paid {charge}"))
                })
                .await?;
            ctx.set_result(&parcel)?;
            Ok(())
        }
    };
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker(&fixture).function("order", order)).await;
    assert_eq!((charged.so_far(), shipped.so_far()), (1, 3));
    let job = fixture.get(id).await.expect("get");
    assert_eq!(job.status, Status::Succeeded);
    assert_eq!(job.result.expect("result").get(), "\"paid 100\"");
    assert_eq!(journal(&fixture, id).await, (vec!["charge".into(), "ship".into()], vec![]));
}

async fn a_step_is_found_by_its_name_not_by_its_position(fixture: Fixture) {
    let id = fixture.add(NewJob::new("order", &())).await;
    // An attempt of the old program, then the new one, whose steps have another order.
    let worker_id = fixture.worker().await;
    let claimed = fixture.claim_one(worker_id).await;
    for (name, value) in [("a", "1"), ("b", "2")] {
        let step = NewStep { lease: claimed.lease(), name: name.into(), value: raw(value) };
        fixture.save_steps(&[step]).await.expect("save");
    }
    fixture.must_finish(&claimed, Ending::Released).await;
    let order = |(): (), ctx: Context| async move {
        let c: u32 = ctx.step("c", || async { Ok(3) }).await?;
        let b: u32 = ctx.step("b", || async { Ok(20) }).await?;
        let a: u32 = ctx.step("a", || async { Ok(10) }).await?;
        ctx.set_result(&[a, b, c])?;
        Ok(())
    };
    drain(worker(&fixture).function("order", order)).await;
    assert_eq!(fixture.get(id).await.expect("get").result.expect("result").get(), "[1,2,3]");
}

async fn a_stale_lease_journals_nothing(fixture: Fixture) {
    let id = fixture.enqueue_kind("order").await;
    let worker_id = fixture.worker().await;
    let old = fixture.claim_one(worker_id).await;
    fixture.must_finish(&old, Ending::Released).await;
    let new = fixture.claim_one(worker_id).await;
    let step = |lease| NewStep { lease, name: "charge".into(), value: raw("1") };
    let results = fixture.save_steps(&[step(old.lease()), step(new.lease())]).await.expect("save");
    assert_eq!(results, [longshore::store::Fenced::LeaseLost, longshore::store::Fenced::Held]);
    let steps = fixture.steps(id).await.expect("steps");
    assert_eq!((steps.len(), steps[0].lease_no), (1, new.lease().lease_no));
}

async fn a_repeated_save_keeps_the_first_value(fixture: Fixture) {
    let id = fixture.enqueue_kind("order").await;
    let worker_id = fixture.worker().await;
    let claimed = fixture.claim_one(worker_id).await;
    for value in ["1", "2"] {
        let step = NewStep { lease: claimed.lease(), name: "charge".into(), value: raw(value) };
        let results = fixture.save_steps(&[step.clone(), step]).await.expect("save");
        assert_eq!(results, [longshore::store::Fenced::Held; 2]);
    }
    let StepState::Done(value) = &fixture.steps(id).await.expect("steps")[0].state else { panic!("done") };
    assert_eq!(value.get(), "1");
}

async fn attempts_and_interruptions_count_since_the_last_step(fixture: Fixture) {
    let failures = Calls::default();
    let counted = failures.clone();
    let month = move |(): (), ctx: Context| {
        let failures = counted.clone();
        async move {
            for day in 0..5 {
                ctx.step(&format!("day {day}"), || async {
                    // Every day fails twice; the job has three attempts.
                    match failures.count() % 3 {
                        0 => Ok(()),
                        _ => Err(Failure::retry_after(Duration::ZERO, "bad day")),
                    }
                })
                .await?;
            }
            Ok(())
        }
    };
    let id = fixture.add(NewJob::new("month", &()).max_attempts(3)).await;
    drain(worker(&fixture).function("month", month)).await;
    assert_eq!(failures.so_far(), 15);
    assert_eq!(fixture.status(id).await, Status::Succeeded);

    // The same for interruptions, which are counted by recovery.
    let id = fixture.enqueue_kind("fragile").await;
    for round in 0..6 {
        let dying = fixture.worker().await;
        let claimed = fixture.claim_one(dying).await;
        let step = NewStep { lease: claimed.lease(), name: format!("step {round}"), value: raw("null") };
        fixture.save_steps(&[step]).await.expect("save");
        assert_eq!(fixture.crash_all_workers().await.recovered, 1);
    }
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.interruptions), (Status::Retrying, 1));
}

async fn a_failed_step_is_not_journaled(fixture: Fixture) {
    let id = fixture.add(NewJob::new("order", &()).max_attempts(1)).await;
    let order = |(): (), ctx: Context| async move {
        ctx.step("charge", || async { Err::<(), _>(Failure::retry("declined")) }).await
    };
    drain(worker(&fixture).function("order", order)).await;
    assert_eq!(fixture.status(id).await, Status::FailedPermanent);
    assert_eq!(journal(&fixture, id).await, (vec![], vec![]));
}

async fn bad_steps_are_refused_and_store_nothing(fixture: Fixture) {
    type Case = (&'static str, &'static str);
    const CASES: [Case; 7] = [
        ("twice", "step `a`: the name is used twice in this attempt; give each step its own name"),
        ("empty", "step ``: name: is empty; use 1 to 128 bytes"),
        ("long", "name: has 129 bytes; use at most 128"),
        ("large", "step `large`: value:"),
        ("nothing", "any `nothing`: name at least one thing to wait for"),
        ("event", "event ``: event: is empty; use 1 to 128 bytes"),
        ("years", "sleep `years`: wait at most ten years"),
    ];
    let bad = |case: String, ctx: Context| async move {
        match case.as_str() {
            "twice" => {
                ctx.step("a", || async { Ok(()) }).await?;
                ctx.step("a", || async { Ok(()) }).await
            }
            "empty" => ctx.step("", || async { Ok(()) }).await,
            "long" => ctx.step(&"x".repeat(129), || async { Ok(()) }).await,
            "large" => ctx.step("large", || async { Ok("x".repeat(1024 * 1024)) }).await.map(drop),
            "nothing" => ctx.any("nothing", []).await.map(drop),
            "event" => ctx.event::<()>("").await,
            "years" => ctx.sleep("years", 4000 * DAY).await,
            other => panic!("unknown case {other}"),
        }
    };
    let mut ids = Vec::new();
    for (case, _) in CASES {
        ids.push(fixture.add(NewJob::new("bad", case)).await);
    }
    drain(worker(&fixture).function("bad", bad)).await;
    for (id, (case, message)) in ids.into_iter().zip(CASES) {
        let job = fixture.get(id).await.expect("get");
        assert_eq!((job.status, job.attempts), (Status::FailedPermanent, 1), "{case}");
        let error = job.last_error.expect("error");
        assert!(error.contains(message), "{case}: {error}");
        let kept = if case == "twice" { 1 } else { 0 };
        assert_eq!(fixture.steps(id).await.expect("steps").len(), kept, "{case}");
    }
}

async fn a_sleep_holds_no_lease_and_ends_at_its_first_deadline(fixture: Fixture) {
    let starts = Calls::default();
    let counted = starts.clone();
    let nap = move |(): (), ctx: Context| {
        counted.count();
        async move { ctx.sleep("nap", 3 * DAY).await }
    };
    let id = fixture.add(NewJob::new("nap", &())).await;
    let began = fixture.now().await;
    drain(worker(&fixture).function("nap", nap.clone())).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.run_at, job.attempts), (Status::Queued, began + 3 * DAY, 0));
    assert_eq!(job.locked_by, None);
    assert!(job.errors.is_empty());
    assert_eq!(journal(&fixture, id).await, (vec![], vec!["nap".into()]));
    fixture.advance(3 * DAY - SECOND).await;
    drain(worker(&fixture).function("nap", nap.clone())).await;
    assert_eq!(starts.so_far(), 1);
    fixture.advance(SECOND).await;
    drain(worker(&fixture).function("nap", nap)).await;
    assert_eq!(fixture.status(id).await, Status::Succeeded);
    assert_eq!(starts.so_far(), 2);
}

async fn a_sleeping_job_that_is_woken_early_sleeps_on(fixture: Fixture) {
    let nap = |(): (), ctx: Context| async move { ctx.sleep("nap", HOUR).await };
    let id = fixture.add(NewJob::new("nap", &())).await;
    let began = fixture.now().await;
    drain(worker(&fixture).function("nap", nap)).await;
    fixture.advance(10 * MINUTE).await;
    fixture.retry(id).await.expect("run now");
    drain(worker(&fixture).function("nap", nap)).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.run_at), (Status::Queued, began + HOUR));
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
            let answer: Option<u32> = ctx.event("approved").within(DAY).await?;
            seen.lock().expect("seen").push(answer);
            ctx.step("fail once", || async { Ok(()) }).await?;
            if seen.lock().expect("seen").len() < 2 {
                return Err(Failure::retry_after(Duration::ZERO, "again"));
            }
            Ok(())
        }
    };
    let id = fixture.add(NewJob::new("pay", &())).await;
    drain(worker(&fixture).function("pay", pay.clone())).await;
    fixture.advance(DAY).await;
    // The next attempt finds the stored timeout, although the event exists by then.
    let running = run_worker(worker(&fixture).function("pay", pay)).await;
    until("timed out", || async { !results.lock().expect("results").is_empty() }).await;
    fixture.emit("approved", &1).await.expect("emit");
    until_status(&fixture, id, Status::Succeeded).await;
    running.stop().await;
    assert_eq!(*results.lock().expect("results"), [None, None]);
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

async fn concurrent_waits_are_suspended_together(fixture: Fixture) {
    let both = |(): (), ctx: Context| async move {
        let (nap, answer) = tokio::join!(ctx.sleep("nap", 2 * DAY), async {
            let answer: u32 = ctx.event("approved").await?;
            ctx.step("thank", || async { Ok(answer) }).await
        });
        nap?;
        answer.map(drop)
    };
    let id = fixture.add(NewJob::new("both", &())).await;
    drain(worker(&fixture).function("both", both)).await;
    assert_eq!(journal(&fixture, id).await.1, ["event:approved", "nap"]);
    // The event does not wait for the sleep.
    fixture.emit("approved", &1).await.expect("emit");
    drain(worker(&fixture).function("both", both)).await;
    assert_eq!(
        journal(&fixture, id).await,
        (vec!["event:approved".into(), "thank".into()], vec!["nap".into()])
    );
    fixture.advance(2 * DAY).await;
    drain(worker(&fixture).function("both", both)).await;
    assert_eq!(fixture.status(id).await, Status::Succeeded);
}

async fn a_running_step_delays_the_suspension(fixture: Fixture) {
    let done = Calls::default();
    let counted = done.clone();
    let both = move |(): (), ctx: Context| {
        let done = counted.clone();
        async move {
            let (nap, step) = tokio::join!(
                ctx.sleep("nap", DAY),
                ctx.step("slow", || async {
                    // Longer than the other branch needs to get to its wait.
                    for _ in 0..5 {
                        ctx.client().now().await?;
                    }
                    Ok(done.count())
                }),
            );
            step?;
            nap
        }
    };
    let id = fixture.add(NewJob::new("both", &())).await;
    drain(worker(&fixture).function("both", both.clone())).await;
    assert_eq!(journal(&fixture, id).await, (vec!["slow".into()], vec!["nap".into()]));
    fixture.advance(DAY).await;
    drain(worker(&fixture).function("both", both)).await;
    assert_eq!((fixture.status(id).await, done.so_far()), (Status::Succeeded, 1));
}

async fn a_task_that_outlives_its_handler_does_not_wait_forever(fixture: Fixture) {
    let (sender, mut ended) = tokio::sync::mpsc::unbounded_channel();
    let leaves = move |(): (), ctx: Context| {
        let sender = sender.clone();
        async move {
            let left = ctx.clone();
            tokio::spawn(async move { sender.send(left.sleep("nap", DAY).await.is_err()) });
            ctx.sleep("own nap", DAY).await
        }
    };
    fixture.add(NewJob::new("leaves", &())).await;
    drain(worker(&fixture).function("leaves", leaves)).await;
    let error = tokio::time::timeout(20 * SECOND, ended.recv()).await.expect("it ends");
    assert_eq!(error, Some(true));
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
    let id = fixture.enqueue_kind("pay").await;
    let worker_id = fixture.worker().await;
    let wait = |event: &str| {
        let until = Some(start() + DAY);
        vec![PendingWait { step: format!("event:{event}"), until, events: vec![event.into()] }]
    };
    let claimed = fixture.claim_one(worker_id).await;
    fixture.must_finish(&claimed, Ending::Suspended { waits: wait("first") }).await;
    fixture.advance(DAY).await;
    let claimed = fixture.claim_one(worker_id).await;
    // The job runs, and then sleeps for another reason.
    fixture.emit("first", &1).await.expect("emit");
    let until = Some(start() + 9 * DAY);
    let waits = vec![PendingWait { step: "nap".into(), until, events: Vec::new() }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    fixture.deliver_events().await.expect("deliver");
    assert_eq!(fixture.get(id).await.expect("get").run_at, start() + 9 * DAY);
}

async fn a_job_of_a_batch_can_do_steps_but_cannot_wait(fixture: Fixture) {
    let batch = |jobs: Vec<Batched<String>>| async move {
        let mut results = Vec::new();
        for Batched { payload, ctx } in jobs {
            results.push(match payload.as_str() {
                "step" => ctx.step("a", || async { Ok(()) }).await,
                _ => ctx.sleep("nap", SECOND).await,
            });
        }
        results
    };
    let step = fixture.add(NewJob::new("batch", "step")).await;
    let sleep = fixture.add(NewJob::new("batch", "sleep")).await;
    drain(worker(&fixture).batch("batch", 10, batch)).await;
    assert_eq!(fixture.status(step).await, Status::Succeeded);
    let job = fixture.get(sleep).await.expect("get");
    assert_eq!(job.status, Status::FailedPermanent);
    assert!(job.last_error.expect("error").contains("a job of a batch cannot wait"));
}

/// Suspends a job of this kind, with one step done.
async fn suspended(fixture: &Fixture, job: NewJob) -> JobId {
    let id = fixture.add(job).await;
    let worker_id = fixture.worker().await;
    let claimed = fixture.claim_one(worker_id).await;
    let step = NewStep { lease: claimed.lease(), name: "a".into(), value: raw("1") };
    fixture.save_steps(&[step]).await.expect("save");
    let waits = vec![PendingWait { step: "event:b".into(), until: None, events: vec!["b".into()] }];
    fixture.must_finish(&claimed, Ending::Suspended { waits }).await;
    id
}

async fn an_edit_and_a_replacement_delete_the_journal(fixture: Fixture) {
    let edited = suspended(&fixture, job("edited")).await;
    fixture.edit(edited, longshore::Edit::default().payload("2")).await.expect("edit");
    assert!(fixture.steps(edited).await.expect("steps").is_empty());
    assert_eq!(fixture.get(edited).await.expect("get").run_at, start(), "nothing else would wake it");
    fixture.cancel(edited).await.expect("cancel");
    for mode in [longshore::UniqueMode::Replace, longshore::UniqueMode::PreserveRunAt] {
        let keyed = || job("keyed").unique_key("k", mode);
        let replaced = suspended(&fixture, keyed()).await;
        fixture.enqueue(keyed()).await.expect("replace");
        assert!(fixture.steps(replaced).await.expect("steps").is_empty());
        assert_eq!(fixture.get(replaced).await.expect("get").run_at, start(), "{mode:?}");
        fixture.cancel(replaced).await.expect("cancel");
    }
    assert_eq!(fixture.query_number("select count(*) from waits", None).await, 0);
}

async fn a_retry_continues_after_a_failure_and_starts_over_after_a_success(fixture: Fixture) {
    for (ending, kept) in [(failed_permanently(), 1), (done(), 0)] {
        let id = fixture.enqueue_kind("order").await;
        let worker_id = fixture.worker().await;
        let claimed = fixture.claim_one(worker_id).await;
        let step = NewStep { lease: claimed.lease(), name: "a".into(), value: raw("1") };
        fixture.save_steps(&[step]).await.expect("save");
        fixture.must_finish(&claimed, ending).await;
        fixture.retry(id).await.expect("retry");
        assert_eq!(fixture.steps(id).await.expect("steps").len(), kept);
        fixture.cancel(id).await.expect("cancel");
    }
}

async fn deleting_a_job_deletes_its_journal_and_waits(fixture: Fixture) {
    let id = suspended(&fixture, job("order")).await;
    fixture.cancel(id).await.expect("cancel");
    fixture.delete(id).await.expect("delete");
    for table in ["steps", "waits"] {
        assert_eq!(fixture.query_number(&format!("select count(*) from {table}"), None).await, 0, "{table}");
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
    assert_eq!(fixture.check().await.expect("check").problems, [""; 0]);
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
    tokio::time::timeout(20 * SECOND, notices.next()).await.expect("a notification");
    // A notification of a later transaction comes after all of this one.
    sqlx::query("select emit('last')").execute(&mut connection).await.expect("emit");
    tokio::time::timeout(20 * SECOND, notices.next()).await.expect("a notification");
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

/// Inserts `n` into the user's table.
async fn book(tx: &mut sqlx::PgConnection, n: i64) -> Result<(), sqlx::Error> {
    sqlx::query("insert into bookings values ($1)").bind(n).execute(tx).await.map(drop)
}

/// Creates the user's table where every connection finds it. Returns a worker that has it in its
/// search path.
async fn with_bookings(fixture: &Fixture) -> Builder {
    fixture.sql("create table bookings (n bigint)", None).await;
    let schema = fixture.url().rsplit_once("schema=").expect("a schema").1.to_owned();
    let url = with_parameter(&fixture.url(), &format!("options=-csearch_path%3D{schema}"));
    let client = longshore::Client::connect(&url).await.expect("connect");
    Worker::builder(client).settings(settings())
}

async fn bookings(fixture: &Fixture) -> i64 {
    fixture.query_number("select count(*) from bookings", None).await
}

async fn a_step_in_a_transaction_commits_with_the_users_rows(fixture: Fixture) {
    let runs = Calls::default();
    let counted = runs.clone();
    let order = move |(): (), ctx: Context| {
        let runs = counted.clone();
        async move {
            let n: u32 = ctx
                .step_in("book", async |tx| {
                    book(&mut *tx, 7).await?;
                    // A job can be part of the transaction too.
                    ctx.client().enqueue(NewJob::new("later", &()).delay(DAY)).in_tx(&mut *tx).await?;
                    Ok(runs.count() * 100)
                })
                .await?;
            if ctx.job().lease().lease_no == 1 {
                return Err(Failure::retry_after(Duration::ZERO, "after the step"));
            }
            ctx.set_result(&n)?;
            Ok(())
        }
    };
    let worker = with_bookings(&fixture).await;
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker.function("order", order)).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!((job.status, job.lease_no), (Status::Succeeded, 2));
    assert_eq!(job.result.expect("result").get(), "100");
    assert_eq!((bookings(&fixture).await, runs.so_far(), fixture.count(Status::Queued).await), (1, 1, 1));
    assert_eq!(journal(&fixture, id).await.0, ["book"]);
}

async fn a_step_in_a_transaction_that_fails_rolls_everything_back(fixture: Fixture) {
    let order = |how: String, ctx: Context| async move {
        ctx.step_in("book", async |tx| {
            book(&mut *tx, 7).await?;
            match how.as_str() {
                "failure" => return Err(Failure::permanent("declined")),
                "statement" => {
                    // The work ignores that a statement failed.
                    let _ = sqlx::query("select 1 / 0").execute(&mut *tx).await;
                }
                _ => panic!("on purpose"),
            }
            Ok(())
        })
        .await
    };
    let worker = with_bookings(&fixture).await;
    let mut ids = Vec::new();
    for how in ["failure", "statement", "panic"] {
        ids.push(fixture.add(NewJob::new("order", how).max_attempts(1)).await);
    }
    drain(worker.function("order", order)).await;
    assert_eq!(bookings(&fixture).await, 0);
    for id in ids {
        assert_eq!(fixture.status(id).await, Status::FailedPermanent);
        assert_eq!(journal(&fixture, id).await, (vec![], vec![]));
    }
}

/// The lease is lost before the step begins. Afterwards it cannot be lost.
async fn a_step_in_a_transaction_under_a_lost_lease_rolls_everything_back(fixture: Fixture) {
    let (runs, other) = (Calls::default(), fixture.client());
    let counted = runs.clone();
    let order = move |(): (), ctx: Context| {
        let (runs, other) = (counted.clone(), other.clone());
        async move {
            let lease = ctx.job().lease();
            if lease.lease_no == 1 {
                // Another worker takes the job meanwhile.
                other.release(&[lease]).await?;
            }
            ctx.step_in("book", async |tx| {
                runs.count();
                Ok(book(tx, 7).await?)
            })
            .await
        }
    };
    let worker = with_bookings(&fixture).await;
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker.function("order", order)).await;
    until_status(&fixture, id, Status::Succeeded).await;
    assert_eq!((bookings(&fixture).await, runs.so_far()), (1, 1));
    assert_eq!(fixture.steps(id).await.expect("steps")[0].lease_no, 2);
}

async fn no_other_worker_gets_the_job_while_a_step_in_a_transaction_runs(fixture: Fixture) {
    let swept = Arc::new(Mutex::new(None));
    let (noted, sweeper) = (swept.clone(), fixture.clone());
    let order = move |(): (), ctx: Context| {
        let (noted, sweeper) = (noted.clone(), sweeper.clone());
        async move {
            ctx.step_in("book", async |tx| {
                book(tx, 7).await?;
                // This worker counts as dead, but its lease is locked.
                let report = sweeper.crash_all_workers().await;
                *noted.lock().expect("noted") = Some(report.recovered);
                Ok(())
            })
            .await
        }
    };
    let worker = with_bookings(&fixture).await;
    let id = fixture.add(NewJob::new("order", &())).await;
    drain(worker.function("order", order)).await;
    assert_eq!(*swept.lock().expect("swept"), Some(0));
    assert_eq!((bookings(&fixture).await, journal(&fixture, id).await.0.len()), (1, 1));
}

async fn a_step_in_a_transaction_keeps_the_limits_of_steps(fixture: Fixture) {
    let order = |case: String, ctx: Context| async move {
        match case.as_str() {
            "twice" => {
                ctx.step("a", || async { Ok(()) }).await?;
                ctx.step_in("a", async |tx| Ok(book(tx, 7).await?)).await
            }
            _ => {
                let large = ctx.step_in("large", async |tx| {
                    book(tx, 7).await?;
                    Ok("x".repeat(1024 * 1024))
                });
                large.await.map(drop)
            }
        }
    };
    let worker = with_bookings(&fixture).await;
    let twice = fixture.add(NewJob::new("order", "twice")).await;
    let large = fixture.add(NewJob::new("order", "large")).await;
    drain(worker.function("order", order)).await;
    for (id, message) in [(twice, "used twice"), (large, "step `large`: value:")] {
        let job = fixture.get(id).await.expect("get");
        assert_eq!(job.status, Status::FailedPermanent);
        let error = job.last_error.expect("error");
        assert!(error.contains(message), "{error}");
    }
    assert_eq!(bookings(&fixture).await, 0);
}

async fn a_step_in_a_transaction_needs_postgres(fixture: Fixture) {
    let id = fixture.add(NewJob::new("order", &())).await;
    let order = |(): (), ctx: Context| async move { ctx.step_in("book", async |_| Ok(())).await };
    drain(worker(&fixture).function("order", order)).await;
    let job = fixture.get(id).await.expect("get");
    assert_eq!(job.status, Status::FailedPermanent);
    assert!(job.last_error.expect("error").contains("`step_in` needs a Postgres database"));
}
