//! Every code path that makes a job due notifies workers: an idle worker that polls
//! every 600 seconds starts the job at once. Each case fails if its path does not
//! notify.

use std::future::poll_fn;
use std::task::Poll;
use std::time::Duration;

use longshore::rules::lifecycle::{LeaseFlags, PendingWait, Running, State, settle};
use longshore::store::{
    ClaimCursor, ClaimRequest, Claimed, EndedBy, Fenced, KeyWait, QueueChange, Settled, Settlement,
};
use longshore::worker::{RunningWorker, Settings, Worker};
use longshore::{
    Action, DeadFilter, Decision, Edit, Ending, GroupChange, Interruption, JobId, NewJob, NewOperation,
    NewSchedule, Outcome, Report, Status, SweepOptions, SweepScope, UniqueMode, When,
};
use sqlx::Connection as _;

use crate::fixture::*;
use crate::locks::{end_after_blocking, open_transaction};
use crate::worker::{nothing, run_worker, until_status};

cases! {
    an_enqueue_starts_the_job,
    an_enqueue_with_a_key_starts_the_job,
    an_enqueue_of_many_starts_the_jobs,
    an_enqueue_whose_run_at_has_passed_starts_the_job,
    an_enqueue_in_the_callers_transaction_starts_the_job,
    an_enqueue_in_the_callers_transaction_whose_run_at_has_passed_starts_the_job,
    a_replaced_job_starts,
    a_follow_up_job_starts,
    a_released_job_starts,
    a_job_that_never_started_starts,
    a_job_whose_release_was_stored_without_a_reply_starts,
    a_job_released_by_its_lease_starts,
    a_job_that_its_worker_does_not_know_of_is_released_and_starts,
    a_job_of_an_abandoned_claim_starts,
    a_failed_job_without_a_backoff_starts_again,
    a_snoozed_job_without_a_delay_starts_again,
    a_recovered_job_starts,
    a_job_that_recovery_reschedules_to_a_past_instant_starts,
    an_operators_retry_of_a_waiting_job_starts_it,
    an_operators_retry_of_a_finished_job_starts_it,
    a_redriven_job_starts,
    a_job_redriven_among_many_starts,
    a_job_retried_by_an_operation_starts,
    an_edited_job_starts,
    a_resumed_queue_starts_its_jobs,
    a_raised_limit_starts_waiting_jobs,
    a_lifted_limit_starts_waiting_jobs,
    the_end_of_a_job_starts_the_next_one_of_its_group,
    a_recovered_lease_starts_the_next_job_of_its_group,
    jobs_that_are_due_before_others_of_their_group_start,
    a_changed_group_starts_its_jobs,
    changed_defaults_start_the_jobs_of_groups,
    an_event_starts_the_job_that_waits_for_it,
    a_job_that_is_suspended_after_its_event_starts,
    a_cron_tick_starts_its_job,
    a_schedule_run_by_an_operator_starts_its_job,
}

cases! {
    only on postgres:
    an_enqueue_that_waited_for_its_key_starts_the_job,
    an_event_emitted_in_sql_starts_the_job_at_once,
}

/// A worker that has nothing to do. It polls every 600 seconds and does neither
/// recovery nor cron, so only a wake-up makes it claim.
async fn idle_worker(fixture: &Fixture) -> RunningWorker {
    const POLL: Duration = Duration::from_secs(600);
    let settings = Settings {
        poll_interval: POLL,
        max_poll_interval: POLL,
        sweep_interval: POLL,
        schedules: false,
        ..Settings::default()
    };
    let worker = Worker::builder(fixture.client()).settings(settings).function("mail", nothing);
    // Wake-ups of earlier steps must not reach the worker.
    fixture.flush().await;
    // The worker's first claim, a look from the head, finds this job and nothing else that is due.
    // So when the job has run, the worker has no reason to claim again. After a claim that
    // follows a wake-up, it would make a look from the head some time later, which could find the
    // job of the case without a wake-up.
    let first = store_unnoticed(fixture, job("mail")).await;
    let running = run_worker(worker).await;
    until_status(fixture, first, Status::Succeeded).await;
    running
}

async fn must_start(fixture: &Fixture, running: RunningWorker, id: JobId) {
    until_status(fixture, id, Status::Succeeded).await;
    running.stop().await;
}

/// Stores a due job without notifying any worker.
pub(crate) async fn store_unnoticed(fixture: &Fixture, job: NewJob) -> JobId {
    let job = job.validate().expect("valid");
    fixture.store().enqueue(std::slice::from_ref(&job), KeyWait::Long).await.expect("enqueue");
    job.id()
}

/// A job that another worker is running.
async fn running_elsewhere(fixture: &Fixture) -> longshore::store::Claimed {
    fixture.running(job("mail").max_attempts(9)).await
}

// ---- events --------------------------------------------------------------------

fn waits_for(event: &str) -> Ending {
    let wait = PendingWait { step: "wait".into(), until: None, events: vec![event.into()] };
    Ending::Suspended { waits: vec![wait] }
}

async fn an_event_starts_the_job_that_waits_for_it(fixture: Fixture) {
    let claimed = running_elsewhere(&fixture).await;
    fixture.must_finish(&claimed, waits_for("approved")).await;
    let running = idle_worker(&fixture).await;
    fixture.emit("approved", &1).await.expect("emit");
    must_start(&fixture, running, claimed.lease().id).await;
}

/// Upkeep looks for new events every second, too. Each event is emitted when the job of the last one has ended. If
/// only upkeep delivered them, each event would be emitted after such a look and would wait for the next, which is
/// almost a second later. So one event that is delivered sooner was notified.
async fn an_event_emitted_in_sql_starts_the_job_at_once(fixture: Fixture) {
    const ROUNDS: usize = 30;
    let mut jobs = Vec::new();
    for round in 0..ROUNDS {
        let claimed = running_elsewhere(&fixture).await;
        fixture.must_finish(&claimed, waits_for(&format!("round {round}"))).await;
        jobs.push(claimed.lease().id);
    }
    let running = idle_worker(&fixture).await;
    let mut connection = fixture.postgres().await;
    let mut shortest = MAX_WAIT;
    for (round, id) in jobs.into_iter().enumerate() {
        let began = std::time::Instant::now();
        let emit = sqlx::query("select emit($1)").bind(format!("round {round}"));
        emit.execute(&mut connection).await.expect("emit");
        until_status(&fixture, id, Status::Succeeded).await;
        // The first one can be emitted right before a look.
        if round > 0 {
            shortest = shortest.min(began.elapsed());
        }
        if shortest < SECOND / 2 {
            running.stop().await;
            return;
        }
    }
    panic!("no event was delivered at once: {shortest:?}");
}

async fn a_job_that_is_suspended_after_its_event_starts(fixture: Fixture) {
    let claimed = running_elsewhere(&fixture).await;
    fixture.emit("approved", &1).await.expect("emit");
    let running = idle_worker(&fixture).await;
    fixture.must_finish(&claimed, waits_for("approved")).await;
    must_start(&fixture, running, claimed.lease().id).await;
}

// ---- groups --------------------------------------------------------------------

/// A job of a group that is at its limit, because another worker runs a job of it.
async fn waits_for_its_group(fixture: &Fixture) -> (Claimed, JobId) {
    fixture.group_defaults("default", Some(1), None).await.expect("defaults");
    let claimed = fixture.running(job("mail").group("acme")).await;
    (claimed, fixture.add(job("mail").group("acme")).await)
}

/// The worker has seen no group with a limit: otherwise it would claim again when a job of its own ends.
async fn the_end_of_a_job_starts_the_next_one_of_its_group(fixture: Fixture) {
    fixture.group_defaults("default", Some(1), None).await.expect("defaults");
    let claimed = fixture.running(job("mail").group("acme")).await;
    let running = idle_worker(&fixture).await;
    let id = store_unnoticed(&fixture, job("mail").group("acme")).await;
    fixture.must_finish(&claimed, done()).await;
    must_start(&fixture, running, id).await;
}

async fn a_recovered_lease_starts_the_next_job_of_its_group(fixture: Fixture) {
    fixture.group_defaults("default", Some(1), None).await.expect("defaults");
    let claimed = fixture.running(job("mail").group("acme").max_attempts(1)).await;
    let id = fixture.add(job("mail").group("acme")).await;
    assert_eq!(fixture.store().mark_started(&claimed.lease()).await.expect("started"), Fenced::Held);
    fixture.advance(HOUR).await;
    let running = idle_worker(&fixture).await;
    let interruption = Interruption { max_interruptions: 1, ..Interruption::default() };
    fixture.sweep(&SweepOptions { interruption, ..SweepOptions::default() }).await.expect("sweep");
    must_start(&fixture, running, id).await;
}

/// The worker has a position behind these jobs. It looks behind the position only now and then, and must
/// claim again when it may.
async fn jobs_that_are_due_before_others_of_their_group_start(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    for round in 0..30 {
        let id = fixture.add(job("mail").group("acme").run_at(start() - SECOND * round)).await;
        until_status(&fixture, id, Status::Succeeded).await;
    }
    running.stop().await;
}

async fn a_changed_group_starts_its_jobs(fixture: Fixture) {
    let (_, id) = waits_for_its_group(&fixture).await;
    let running = idle_worker(&fixture).await;
    let change = GroupChange { limit: Some(Some(2)), ..GroupChange::default() };
    fixture.set_group("default", "acme", change).await.expect("set_group");
    must_start(&fixture, running, id).await;
}

async fn changed_defaults_start_the_jobs_of_groups(fixture: Fixture) {
    let (_, id) = waits_for_its_group(&fixture).await;
    let running = idle_worker(&fixture).await;
    fixture.group_defaults("default", Some(2), None).await.expect("defaults");
    must_start(&fixture, running, id).await;
}

// ---- enqueue -------------------------------------------------------------------

async fn an_enqueue_starts_the_job(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let id = fixture.add(job("mail")).await;
    must_start(&fixture, running, id).await;
}

async fn an_enqueue_with_a_key_starts_the_job(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let id = fixture.add(job("mail").idempotency_key("once")).await;
    must_start(&fixture, running, id).await;
}

async fn an_enqueue_that_waited_for_its_key_starts_the_job(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let holder = open_transaction(&fixture, "select enqueue('x', idempotency_key => 'once')").await;
    let client = fixture.client();
    let waiting = tokio::spawn(async move { client.enqueue(job("mail").idempotency_key("once")).await });
    // The enqueue has left its lane by then, where it would wait for 200 ms. It waits for two seconds in total.
    end_after_blocking(holder, Duration::from_millis(300), "rollback").await;
    let id = waiting.await.expect("task").expect("the key is free").id;
    must_start(&fixture, running, id).await;
}

async fn an_enqueue_of_many_starts_the_jobs(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let results = fixture.enqueue_many([job("mail"), job("mail")]).await.expect("enqueue_many");
    until_status(&fixture, results[0].id, Status::Succeeded).await;
    must_start(&fixture, running, results[1].id).await;
}

async fn an_enqueue_whose_run_at_has_passed_starts_the_job(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let id = fixture.add(job("mail").run_at(fixture.now().await)).await;
    must_start(&fixture, running, id).await;
}

async fn in_callers_transaction(fixture: &Fixture, job: NewJob) -> JobId {
    let results = match fixture.engine() {
        Engine::Postgres => {
            let mut connection = fixture.postgres().await;
            let mut tx = connection.begin().await.expect("begin");
            let results = fixture.enqueue_in(&mut *tx, [job]).await.expect("enqueue_in");
            tx.commit().await.expect("commit");
            results
        }
        Engine::Sqlite => tokio::task::block_in_place(|| {
            let mut connection = rusqlite::Connection::open(fixture.file()).expect("open");
            connection.busy_timeout(5 * SECOND).expect("busy timeout");
            let tx = connection
                .transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)
                .expect("begin");
            let runtime = tokio::runtime::Handle::current();
            let results = runtime.block_on(fixture.enqueue_in(&*tx, [job])).expect("enqueue_in");
            tx.commit().expect("commit");
            results
        }),
    };
    results[0].id
}

async fn an_enqueue_in_the_callers_transaction_starts_the_job(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let id = in_callers_transaction(&fixture, job("mail")).await;
    must_start(&fixture, running, id).await;
}

async fn an_enqueue_in_the_callers_transaction_whose_run_at_has_passed_starts_the_job(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    let id = in_callers_transaction(&fixture, job("mail").run_at(fixture.now().await)).await;
    must_start(&fixture, running, id).await;
}

async fn a_replaced_job_starts(fixture: Fixture) {
    let id = fixture.add(job("mail").unique_key("k", UniqueMode::Replace).delay(DAY)).await;
    let running = idle_worker(&fixture).await;
    fixture.enqueue(job("mail").unique_key("k", UniqueMode::Replace)).await.expect("enqueue");
    must_start(&fixture, running, id).await;
}

async fn a_follow_up_job_starts(fixture: Fixture) {
    let claimed = running_elsewhere(&fixture).await;
    let running = idle_worker(&fixture).await;
    let follow_up = job("mail").validate().expect("valid");
    let id = follow_up.id();
    let report =
        Report { claimed: &claimed, ending: done(), follow_ups: vec![follow_up], has_progressed: false };
    fixture.settle(vec![report]).await.expect("settle");
    must_start(&fixture, running, id).await;
}

// ---- release and requeue ---------------------------------------------------------

async fn ends_as(fixture: Fixture, ending: Ending) {
    let claimed = running_elsewhere(&fixture).await;
    let running = idle_worker(&fixture).await;
    fixture.must_finish(&claimed, ending).await;
    must_start(&fixture, running, claimed.lease().id).await;
}

async fn a_released_job_starts(fixture: Fixture) {
    ends_as(fixture, Ending::Released).await;
}

async fn a_job_that_never_started_starts(fixture: Fixture) {
    ends_as(fixture, Ending::NotStarted { run_at: start() }).await;
}

async fn a_job_whose_release_was_stored_without_a_reply_starts(fixture: Fixture) {
    let claimed = running_elsewhere(&fixture).await;
    let running = idle_worker(&fixture).await;
    // Stored, but its caller did not learn that, so it sent no wake-up.
    let leave = settle(&claimed_state(&fixture, &claimed).await, not_started(&claimed));
    let seen = Some(LeaseFlags::default());
    let settlement = Settlement {
        lease: claimed.lease(),
        by: EndedBy::Holder,
        seen,
        leave,
        follow_ups: Vec::new(),
        waits: Vec::new(),
        failure: None,
    };
    assert_eq!(fixture.store().settle(&[settlement]).await.expect("settle"), [Settled::Stored]);
    assert_eq!(fixture.finish(&claimed, not_started(&claimed)).await, Fenced::LeaseLost);
    must_start(&fixture, running, claimed.lease().id).await;
}

async fn claimed_state(fixture: &Fixture, claimed: &Claimed) -> Running {
    match fixture.state(claimed.lease().id).await {
        State::Running(running) => running,
        other => panic!("not running: {other:?}"),
    }
}

async fn a_failed_job_without_a_backoff_starts_again(fixture: Fixture) {
    let ending = Ending::Failed { error: "smtp said 451".into(), retry_in: Some(Duration::ZERO) };
    ends_as(fixture, ending).await;
}

async fn a_snoozed_job_without_a_delay_starts_again(fixture: Fixture) {
    ends_as(fixture, Ending::Snoozed { delay: Duration::ZERO }).await;
}

async fn a_job_released_by_its_lease_starts(fixture: Fixture) {
    let claimed = running_elsewhere(&fixture).await;
    let running = idle_worker(&fixture).await;
    assert_eq!(fixture.release(&[claimed.lease()]).await.expect("release"), 1);
    must_start(&fixture, running, claimed.lease().id).await;
}

async fn a_job_that_its_worker_does_not_know_of_is_released_and_starts(fixture: Fixture) {
    let claimed = running_elsewhere(&fixture).await;
    let running = idle_worker(&fixture).await;
    let holder = claimed.lease().worker;
    assert_eq!(fixture.release_unknown(holder, &[]).await.expect("release"), 1);
    must_start(&fixture, running, claimed.lease().id).await;
}

async fn a_job_of_an_abandoned_claim_starts(fixture: Fixture) {
    let other = fixture.worker().await;
    let running = idle_worker(&fixture).await;
    let (client, request) = (fixture.client(), ClaimRequest::new(other, 1));
    let id = loop {
        let id = store_unnoticed(&fixture, job("mail")).await;
        let mut cursor = ClaimCursor::default();
        let mut claim = Box::pin(client.claim(&request, &mut cursor));
        if poll_fn(|context| Poll::Ready(claim.as_mut().poll(context))).await.is_pending() {
            break id;
        }
        // The machine paused this thread for longer than a claim takes. The job stays leased.
    };
    must_start(&fixture, running, id).await;
}

// ---- recovery --------------------------------------------------------------------

async fn recovered_with(fixture: Fixture, decision: Decision) {
    let claimed = running_elsewhere(&fixture).await;
    fixture.advance(HOUR).await;
    // Registered now, so it is not stale like the holder of the job.
    let running = idle_worker(&fixture).await;
    let options = SweepOptions {
        scope: SweepScope::default(),
        interruption: Interruption { delay: Duration::ZERO, ..Interruption::default() },
        ..SweepOptions::default()
    };
    let report = fixture.sweep_with(&options, &mut |_: &_| decision.clone()).await.expect("sweep");
    assert_eq!(report.recovered, 1);
    must_start(&fixture, running, claimed.lease().id).await;
}

async fn a_recovered_job_starts(fixture: Fixture) {
    recovered_with(fixture, Decision::Default).await;
}

async fn a_job_that_recovery_reschedules_to_a_past_instant_starts(fixture: Fixture) {
    let when = When::At(fixture.now().await);
    recovered_with(fixture, Decision::Reschedule { when, attempts: None }).await;
}

// ---- operators -------------------------------------------------------------------

async fn an_operators_retry_of_a_waiting_job_starts_it(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(DAY)).await;
    let running = idle_worker(&fixture).await;
    fixture.retry(id).await.expect("retry");
    must_start(&fixture, running, id).await;
}

async fn an_operators_retry_of_a_finished_job_starts_it(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::Cancelled).await;
    let running = idle_worker(&fixture).await;
    fixture.retry(id).await.expect("retry");
    must_start(&fixture, running, id).await;
}

async fn a_redriven_job_starts(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let running = idle_worker(&fixture).await;
    fixture.redrive(id).await.expect("redrive");
    must_start(&fixture, running, id).await;
}

async fn a_job_redriven_among_many_starts(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let running = idle_worker(&fixture).await;
    let filter = DeadFilter { limit: 10, ..DeadFilter::default() };
    assert_eq!(fixture.redrive_all(&filter).await.expect("redrive"), 1);
    must_start(&fixture, running, id).await;
}

async fn a_job_retried_by_an_operation_starts(fixture: Fixture) {
    let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
    let running = idle_worker(&fixture).await;
    // The worker may execute the operation itself; either one notifies.
    fixture.start_operation(NewOperation::of_jobs(Action::Retry, [id])).await.expect("start");
    fixture.run_operations(|_| std::future::ready(true)).await.expect("run");
    must_start(&fixture, running, id).await;
}

async fn an_edited_job_starts(fixture: Fixture) {
    let id = fixture.add(job("mail").delay(DAY)).await;
    let running = idle_worker(&fixture).await;
    fixture.edit(id, Edit::default().when(When::NOW)).await.expect("edit");
    must_start(&fixture, running, id).await;
}

async fn a_resumed_queue_starts_its_jobs(fixture: Fixture) {
    let running = idle_worker(&fixture).await;
    fixture.pause("default").await.expect("pause");
    let id = store_unnoticed(&fixture, job("mail")).await;
    fixture.resume("default").await.expect("resume");
    must_start(&fixture, running, id).await;
}

async fn limit_changed_to(fixture: Fixture, limit: Option<u32>) {
    let running = idle_worker(&fixture).await;
    // Unlike `Client::limit`, this does not notify the worker.
    let one = QueueChange { limit: Some(Some(1)), ..QueueChange::default() };
    fixture.store().set_queue("default", &one).await.expect("set_queue");
    store_unnoticed(&fixture, job("mail")).await;
    let other = fixture.worker().await;
    fixture.claim_one(other).await;
    let waiting = store_unnoticed(&fixture, job("mail")).await;
    fixture.limit("default", limit).await.expect("limit");
    must_start(&fixture, running, waiting).await;
}

async fn a_raised_limit_starts_waiting_jobs(fixture: Fixture) {
    limit_changed_to(fixture, Some(2)).await;
}

async fn a_lifted_limit_starts_waiting_jobs(fixture: Fixture) {
    limit_changed_to(fixture, None).await;
}

// ---- cron ------------------------------------------------------------------------

async fn a_cron_tick_starts_its_job(fixture: Fixture) {
    let every_minute = NewSchedule::new("every minute", "* * * * *", job("mail"));
    let stored = fixture.put_schedule(every_minute).await.expect("put_schedule");
    let running = idle_worker(&fixture).await;
    fixture.store().pin_clock(Some(stored.next_at)).await.expect("pin_clock");
    let fired = fixture.fire_due().await.expect("fire_due").fired;
    must_start(&fixture, running, fired[0].job.id).await;
}

async fn a_schedule_run_by_an_operator_starts_its_job(fixture: Fixture) {
    let every_minute = NewSchedule::new("every minute", "* * * * *", job("mail"));
    fixture.put_schedule(every_minute).await.expect("put_schedule");
    let running = idle_worker(&fixture).await;
    let enqueued = fixture.run_schedule_now("every minute").await.expect("run");
    must_start(&fixture, running, enqueued.id).await;
}
