//! Durable steps and sleeps: what is done once, and what survives. `step_events` has events, and `step_transactions`
//! steps in a transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use longshore::rules::lifecycle::PendingWait;
use longshore::store::{Fenced, NewStep, StepState};
use longshore::worker::{Batched, Builder, Settings};
use longshore::{Context, Ending, Failure, JobId, NewJob, RetryPolicy, Status, Worker};

use crate::fixture::*;
use crate::worker::drain;

cases! {
    a_step_is_done_once_however_often_the_job_runs,
    a_step_is_found_by_its_name_not_by_its_position,
    a_stale_lease_journals_nothing,
    the_saved_work_of_several_jobs_is_read_together,
    a_repeated_save_keeps_the_first_value,
    attempts_and_interruptions_count_since_the_last_step,
    the_backoff_counts_attempts_since_the_last_step,
    a_failed_step_is_not_journaled,
    bad_steps_are_refused_and_store_nothing,
    a_sleep_holds_no_lease_and_ends_at_its_first_deadline,
    a_sleeping_job_that_is_woken_early_sleeps_on,
    concurrent_waits_are_suspended_together,
    a_running_step_delays_the_suspension,
    a_task_that_outlives_its_handler_does_not_wait_forever,
    a_job_of_a_batch_can_do_steps_but_cannot_wait,
    an_edit_and_a_replacement_delete_the_journal,
    a_retry_continues_after_a_failure_and_starts_over_after_a_success,
    deleting_a_job_deletes_its_journal_and_waits,
}

pub(crate) fn settings() -> Settings {
    Settings {
        poll_interval: Duration::from_millis(20),
        max_poll_interval: Duration::from_millis(50),
        stale_after: 60 * SECOND,
        ..Settings::default()
    }
}

pub(crate) fn worker(fixture: &Fixture) -> Builder {
    Worker::builder(fixture.client()).settings(settings())
}

/// Counts calls.
#[derive(Clone, Default)]
pub(crate) struct Calls(Arc<AtomicU32>);

impl Calls {
    pub(crate) fn count(&self) -> u32 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub(crate) fn so_far(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// The names of the steps that are done, and of those that wait.
pub(crate) async fn journal(fixture: &Fixture, id: JobId) -> (Vec<String>, Vec<String>) {
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
    fixture
        .must_finish(&old, Ending::Failed { error: "declined".into(), retry_in: Some(Duration::ZERO) })
        .await;
    let new = fixture.claim_one(worker_id).await;
    let step = |lease| NewStep { lease, name: "charge".into(), value: raw("1") };
    assert_eq!(fixture.save_steps(&[step(old.lease())]).await.expect("save"), [Fenced::LeaseLost]);
    assert_eq!(fixture.get(id).await.expect("get").attempts, 2, "the job has not progressed");
    let results = fixture.save_steps(&[step(old.lease()), step(new.lease())]).await.expect("save");
    assert_eq!(results, [Fenced::LeaseLost, Fenced::Held]);
    let steps = fixture.steps(id).await.expect("steps");
    assert_eq!((steps.len(), steps[0].lease_no), (1, new.lease().lease_no));
}

async fn the_saved_work_of_several_jobs_is_read_together(fixture: Fixture) {
    let mut claimed = Vec::new();
    for _ in 0..4 {
        fixture.add(job("order")).await;
    }
    claimed.extend(fixture.claim(fixture.worker().await, 4).await);
    let leases: Vec<_> = claimed.iter().map(|job| job.lease()).collect();
    let step = |i: usize, name: &str, bytes: usize| NewStep {
        lease: leases[i],
        name: name.into(),
        value: raw(&format!("\"{}\"", "x".repeat(bytes))),
    };
    let steps = [step(0, "b", 10), step(0, "a", 10), step(1, "c", 90), step(3, "d", 1)];
    fixture.store().save_steps(&steps).await.expect("save");
    let checkpoints = [(leases[1], raw("1")), (leases[2], raw("2")), (leases[1], raw("3"))];
    let saved = fixture.store().save_checkpoints(&checkpoints).await.expect("save");
    assert_eq!(saved, [Fenced::Held; 3]);
    let ids: Vec<_> = leases.iter().map(|lease| lease.id).collect();
    let read = async |max_bytes: usize| -> Vec<_> {
        let work = fixture.store().saved_work(&ids, max_bytes).await.expect("read").into_iter();
        work.map(|work| {
            let names =
                work.steps.map(|steps| steps.into_iter().map(|step| step.name).collect::<Vec<_>>().join(","));
            (work.checkpoint.map(|data| data.get().to_owned()), names)
        })
        .collect()
    };
    let text = |text: &str| Some(text.to_owned());
    let all = [(None, text("a,b")), (text("3"), text("c")), (text("2"), text("")), (None, text("d"))];
    assert_eq!(read(1000).await, all);
    let first = [(None, text("a,b")), (text("3"), None), (text("2"), text("")), (None, None)];
    assert_eq!(read(100).await, first);
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
    fixture.cancel(id).await.expect("cancel");

    // The same for attempts whose worker dies.
    fixture.add(NewJob::new("worn", &()).max_attempts(2)).await;
    let dying = fixture.worker().await;
    let failed = Ending::Failed { error: "bad day".into(), retry_in: Some(Duration::ZERO) };
    fixture.must_finish(&fixture.claim_one(dying).await, failed).await;
    let claimed = fixture.claim_one(dying).await;
    assert_eq!(claimed.attempt(), 2);
    let step = NewStep { lease: claimed.lease(), name: "step".into(), value: raw("null") };
    fixture.save_steps(&[step]).await.expect("save");
    assert_eq!(fixture.crash_all_workers().await.recovered, 1);
    let alive = fixture.worker().await;
    assert_eq!(fixture.claim_one(alive).await.attempt(), 1);
}

async fn the_backoff_counts_attempts_since_the_last_step(fixture: Fixture) {
    let calls = Calls::default();
    let order = move |(): (), ctx: Context| {
        let calls = calls.clone();
        async move {
            if calls.count() == 2 {
                ctx.step("charge", || async { Ok::<(), Failure>(()) }).await?;
            }
            Err::<(), _>(Failure::retry("declined"))
        }
    };
    let policy = RetryPolicy::list([SECOND, HOUR]);
    let id = fixture.add(NewJob::new("order", &()).max_attempts(9).retry(policy)).await;
    for delay in [SECOND, SECOND, HOUR] {
        drain(worker(&fixture).function("order", order.clone())).await;
        assert_eq!(fixture.get(id).await.expect("get").run_at, fixture.now().await + delay);
        fixture.advance(delay).await;
    }
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
    let error = tokio::time::timeout(MAX_WAIT, ended.recv()).await.expect("it ends");
    assert_eq!(error, Some(true));
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
pub(crate) async fn suspended(fixture: &Fixture, job: NewJob) -> JobId {
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
