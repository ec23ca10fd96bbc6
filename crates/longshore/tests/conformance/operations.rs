//! Operations: changes of many jobs in the background. They visit each job once, whatever happens to the
//! process that executes them. `http/operations.rs` tests the routes.

use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use longshore::store::OperationStep;
use longshore::worker::Worker;
use longshore::{
    Action, Client, JobFilter, JobId, ListFilter, NewJob, NewOperation, OperationFilter, OperationId,
    OperationRecord, OperationState, Outcome, Report, Status, UniqueMode,
};
use uuid::Uuid;

use crate::fixture::*;
use crate::locks::{open_transaction, roll_back};
use crate::worker::until;

cases! {
    an_operation_cancels_retries_or_deletes_every_job_of_its_filter,
    an_operation_changes_the_jobs_of_a_list,
    an_operation_uses_every_field_of_its_filter,
    jobs_that_cannot_be_changed_count_as_skipped,
    a_cancel_reaches_jobs_that_are_claimed_while_it_runs,
    a_list_may_be_limited_to_queues,
    the_number_of_jobs_is_known_if_the_counts_contain_it,
    an_operation_that_was_stopped_half_way_changes_each_job_once,
    an_operation_whose_process_died_continues_at_its_cursor,
    a_process_that_stops_lets_another_continue_at_once,
    a_process_that_lost_an_operation_cannot_store_progress,
    an_operation_that_was_stopped_is_no_longer_held,
    the_oldest_operation_that_nobody_holds_is_taken,
    an_operation_is_taken_by_one_of_many_processes,
    a_large_operation_does_not_delay_a_small_one,
    a_job_that_fails_again_is_not_retried_again,
    a_job_that_failed_again_before_the_process_died_is_not_retried_again,
    jobs_created_later_are_not_touched,
    a_filter_that_this_version_does_not_know_fails_the_operation,
    an_operation_that_is_done_can_be_neither_stopped_nor_resumed,
    an_unknown_operation_is_not_found,
    starting_an_operation_again_changes_nothing,
    operations_are_listed_newest_first,
    operations_are_removed_after_seven_days,
    a_worker_executes_operations,
}

cases! {
    only on postgres:
    an_operation_that_waits_for_a_locked_job_delays_no_other,
}

// ---- helpers -----------------------------------------------------------------

/// The jobs of this kind.
fn of_kind(kind: &str) -> JobFilter {
    JobFilter { kind: Some(kind.into()), ..JobFilter::default() }
}

async fn start(fixture: &Fixture, operation: NewOperation) -> OperationId {
    let started = fixture.start_operation(operation).await.expect("start");
    assert_eq!((started.state, started.examined), (OperationState::Running, 0));
    started.id
}

/// Executes operations to their end.
async fn run(client: &Client) {
    client.run_operations(|_| ready(true)).await.expect("run");
}

async fn record(fixture: &Fixture, id: OperationId) -> OperationRecord {
    fixture.operation(id).await.expect("operation")
}

async fn state(fixture: &Fixture, id: OperationId) -> OperationState {
    record(fixture, id).await.state
}

/// How many jobs an operation has visited, changed and skipped.
async fn counts(fixture: &Fixture, id: OperationId) -> [u64; 3] {
    let OperationRecord { examined, changed, skipped, .. } = record(fixture, id).await;
    [examined, changed, skipped]
}

async fn enqueue(fixture: &Fixture, count: usize) {
    let jobs: Vec<NewJob> = (0..count).map(|_| job("mail")).collect();
    fixture.enqueue_many(jobs).await.expect("enqueue");
}

/// Claims all due jobs of the default queue and lets them fail permanently.
async fn fail_all(fixture: &Fixture) -> Vec<JobId> {
    let worker = fixture.worker_with(DAY).await;
    let mut dead = Vec::new();
    loop {
        let claimed = fixture.claim(worker, 500).await;
        if claimed.is_empty() {
            return dead;
        }
        let report = |claimed| Report {
            claimed,
            ending: failed_permanently(),
            follow_ups: Vec::new(),
            has_progressed: false,
        };
        fixture.settle(claimed.iter().map(report).collect()).await.expect("settle");
        dead.extend(ids(&claimed));
    }
}

/// Executes operations until the first step is stored, and dies.
/// Checks what so many steps have done. On a slow machine, a step passes by jobs whose locks take too long, and visits them again
/// at the end.
fn done_by_steps(steps: u64, counts: [u64; 3]) -> [u64; 3] {
    let [examined, changed, skipped] = counts;
    let at_most = 200 * steps;
    assert!((at_most / 2..=at_most).contains(&examined), "{counts:?} after {steps} steps of 200");
    assert_eq!((changed, skipped), (examined, 0));
    counts
}

async fn die_after_one_step(client: &Client) {
    let (stepped, mut has_stepped) = tokio::sync::mpsc::unbounded_channel();
    let pause = |_| {
        let _ = stepped.send(());
        std::future::pending()
    };
    tokio::select! {
        _ = client.run_operations(pause) => panic!("the operation has one step only"),
        _ = has_stepped.recv() => {}
    }
}

// ---- what is changed -----------------------------------------------------------

async fn an_operation_cancels_retries_or_deletes_every_job_of_its_filter(fixture: Fixture) {
    enqueue(&fixture, 250).await;
    let other = fixture.enqueue_kind("sms").await;
    for (action, status) in [(Action::Cancel, Status::Cancelled), (Action::Retry, Status::Queued)] {
        fixture.advance(SECOND).await;
        let id = start(&fixture, NewOperation::matching(action, of_kind("mail"))).await;
        run(&fixture).await;
        let done = record(&fixture, id).await;
        assert_eq!((done.state, done.error), (OperationState::Done, None), "{action:?}");
        assert_eq!(done.ended_at, Some(fixture.now().await));
        assert_eq!(counts(&fixture, id).await, [250, 250, 0], "{action:?}");
        let others = u64::from(status == Status::Queued);
        assert_eq!(fixture.count(status).await, 250 + others);
    }
    fail_all(&fixture).await;
    fixture.advance(SECOND).await;
    let id = start(&fixture, NewOperation::matching(Action::Delete, of_kind("mail"))).await;
    run(&fixture).await;
    assert_eq!(counts(&fixture, id).await, [250, 250, 0]);
    assert_eq!(fixture.list(&Default::default()).await.expect("list").jobs.len(), 1);
    assert_eq!(fixture.status(other).await, Status::FailedPermanent);
}

async fn an_operation_changes_the_jobs_of_a_list(fixture: Fixture) {
    enqueue(&fixture, 450).await;
    let mut jobs = fail_all(&fixture).await;
    let spared = jobs.swap_remove(211);
    let unknown = JobId::new();
    let listed = jobs.iter().copied().chain([unknown, jobs[7]]);
    let id = start(&fixture, NewOperation::of_jobs(Action::Retry, listed)).await;
    run(&fixture).await;
    let done = record(&fixture, id).await;
    assert_eq!((done.state, done.expected, done.filter.is_none()), (OperationState::Done, Some(450), true));
    assert_eq!(counts(&fixture, id).await, [450, 449, 1]);
    assert_eq!(
        (fixture.count(Status::Queued).await, fixture.status(spared).await),
        (449, Status::FailedPermanent)
    );
}

async fn an_operation_uses_every_field_of_its_filter(fixture: Fixture) {
    let add = async |job: NewJob| fixture.add(job.group("acme").tags(["red"])).await;
    let keyed =
        job("a").queue("letters").idempotency_key("request 7").unique_key("key 8", UniqueMode::Dedupe);
    let keyed = add(keyed).await;
    let failed = fixture.ended(job("b").group("other"), Outcome::Cancelled).await;
    let filters = [
        (JobFilter { group: Some("acme".into()), ..JobFilter::default() }, keyed),
        (JobFilter { tag: Some("red".into()), ..JobFilter::default() }, keyed),
        (JobFilter { idempotency_key: Some("request 7".into()), ..JobFilter::default() }, keyed),
        (JobFilter { unique_key: Some("key 8".into()), ..JobFilter::default() }, keyed),
        (JobFilter { error: Some("CANCELLATION".into()), ..JobFilter::default() }, failed),
        (JobFilter { ended_after: Some(crate::fixture::start()), ..JobFilter::default() }, failed),
        (JobFilter { statuses: vec![Status::Cancelled, Status::Running], ..JobFilter::default() }, failed),
    ];
    for (filter, expected) in filters {
        // Neither of the jobs is running, so the operation changes one and leaves the other.
        let action = if expected == keyed { Action::Retry } else { Action::Cancel };
        let id = start(&fixture, NewOperation::matching(action, filter.clone())).await;
        run(&fixture).await;
        let [examined, ..] = counts(&fixture, id).await;
        assert_eq!((examined, record(&fixture, id).await.cursor), (1, Some(expected)), "{filter:?}");
    }
}

async fn jobs_that_cannot_be_changed_count_as_skipped(fixture: Fixture) {
    fixture.running(job("mail")).await;
    fixture.enqueue_kind("mail").await;
    let id = start(&fixture, NewOperation::matching(Action::Delete, of_kind("mail"))).await;
    run(&fixture).await;
    assert_eq!((state(&fixture, id).await, counts(&fixture, id).await), (OperationState::Done, [2, 0, 2]));
    let id = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    run(&fixture).await;
    assert_eq!(counts(&fixture, id).await, [2, 1, 1]);
}

async fn a_cancel_reaches_jobs_that_are_claimed_while_it_runs(fixture: Fixture) {
    enqueue(&fixture, 600).await;
    let id = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    let worker = fixture.worker_with(DAY).await;
    // Claims some jobs between the list of a step and its changes.
    let claim = async {
        while state(&fixture, id).await == OperationState::Running {
            fixture.claim(worker, 20).await;
        }
    };
    tokio::join!(claim, run(&fixture));
    assert_eq!(counts(&fixture, id).await, [600, 600, 0]);
    let running = ListFilter { statuses: vec![Status::Running], limit: 200, ..ListFilter::default() };
    let running = fixture.list(&running).await.expect("list").jobs;
    assert!(running.iter().all(|job| job.cancel_requested), "a job was missed");
    assert_eq!(fixture.count(Status::Queued).await, 0);
}

async fn a_list_may_be_limited_to_queues(fixture: Fixture) {
    let mine = fixture.add(job("mail").queue("letters")).await;
    let theirs = fixture.add(job("mail").queue("phones")).await;
    let both = NewOperation::of_jobs(Action::Cancel, [mine, theirs]).only_in(["letters", "parcels"]);
    let id = start(&fixture, both).await;
    run(&fixture).await;
    assert_eq!(counts(&fixture, id).await, [2, 1, 1]);
    assert_eq!(
        (fixture.status(mine).await, fixture.status(theirs).await),
        (Status::Cancelled, Status::Queued)
    );
}

async fn the_number_of_jobs_is_known_if_the_counts_contain_it(fixture: Fixture) {
    enqueue(&fixture, 3).await;
    fail_all(&fixture).await;
    enqueue(&fixture, 4).await;
    fixture.add(job("sms").queue("phones")).await;
    let expected = async |filter: JobFilter| {
        let started = fixture.start_operation(NewOperation::matching(Action::Cancel, filter)).await;
        started.expect("start").expected
    };
    let dead = JobFilter { statuses: vec![Status::FailedPermanent], ..of_kind("mail") };
    assert_eq!(expected(dead).await, Some(3));
    assert_eq!(expected(of_kind("mail")).await, Some(7));
    assert_eq!(expected(JobFilter { queue: Some("phones".into()), ..JobFilter::default() }).await, Some(1));
    assert_eq!(expected(JobFilter { tag: Some("red".into()), ..of_kind("mail") }).await, None);
}

// ---- stop and resume -----------------------------------------------------------

async fn an_operation_that_was_stopped_half_way_changes_each_job_once(fixture: Fixture) {
    enqueue(&fixture, 450).await;
    fail_all(&fixture).await;
    let id = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    let (stop, mut steps) = (fixture.client(), 0);
    let pause = |_| {
        steps += 1;
        let (stop, is_first) = (stop.clone(), steps == 1);
        async move {
            if is_first {
                stop.stop_operation(id).await.expect("stop");
            }
            true
        }
    };
    fixture.run_operations(pause).await.expect("run");
    // The step that was in progress is stored.
    assert_eq!(state(&fixture, id).await, OperationState::Stopped);
    let done = done_by_steps(2, counts(&fixture, id).await);
    run(&fixture).await;
    assert_eq!(counts(&fixture, id).await, done, "a stopped operation must not continue");

    fixture.stop_operation(id).await.expect("stop again");
    assert_eq!(fixture.resume_operation(id).await.expect("resume").state, OperationState::Running);
    run(&fixture).await;
    assert_eq!(
        (state(&fixture, id).await, counts(&fixture, id).await),
        (OperationState::Done, [450, 450, 0])
    );
    assert_eq!(fixture.count(Status::Queued).await, 450);
}

async fn an_operation_that_was_stopped_is_no_longer_held(fixture: Fixture) {
    let id = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    let holder = Uuid::now_v7();
    let store = fixture.store();
    store.take_operation(holder, 30 * SECOND).await.expect("take").expect("free");
    fixture.stop_operation(id).await.expect("stop");
    fixture.resume_operation(id).await.expect("resume");
    let other = Uuid::now_v7();
    assert!(store.take_operation(other, 30 * SECOND).await.expect("take").is_none(), "the holder continues");
    fixture.stop_operation(id).await.expect("stop");
    let step = OperationStep { take_for: 30 * SECOND, ..OperationStep::default() };
    let saved = store.save_operation_step(id, holder, &step).await.expect("save");
    assert_eq!(saved, Some(OperationState::Stopped));
    assert!(!store.end_operation(id, holder, None).await.expect("end"), "it was stopped");
    fixture.resume_operation(id).await.expect("resume");
    assert!(store.take_operation(other, 30 * SECOND).await.expect("take").is_some());
}

async fn an_operation_that_is_done_can_be_neither_stopped_nor_resumed(fixture: Fixture) {
    let id = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    run(&fixture).await;
    let ended = record(&fixture, id).await;
    fixture.advance(MINUTE).await;
    assert!(fixture.stop_operation(id).await.expect_err("done").is_conflict());
    assert!(fixture.resume_operation(id).await.expect_err("done").is_conflict());
    let after = record(&fixture, id).await;
    assert_eq!((after.state, after.updated_at), (OperationState::Done, ended.updated_at));
}

async fn an_unknown_operation_is_not_found(fixture: Fixture) {
    let id = OperationId::new();
    assert!(fixture.operation(id).await.expect_err("unknown").is_not_found());
    assert!(fixture.stop_operation(id).await.expect_err("unknown").is_not_found());
    assert!(fixture.resume_operation(id).await.expect_err("unknown").is_not_found());
}

// ---- who executes it -------------------------------------------------------------

async fn an_operation_whose_process_died_continues_at_its_cursor(fixture: Fixture) {
    enqueue(&fixture, 450).await;
    let id = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    die_after_one_step(&fixture).await;
    let done = done_by_steps(1, counts(&fixture, id).await);
    let other = fixture.second_client().await;
    fixture.advance(29 * SECOND).await;
    run(&other).await;
    assert_eq!(counts(&fixture, id).await, done, "the first process may still hold it");
    fixture.advance(SECOND).await;
    run(&other).await;
    assert_eq!(
        (state(&fixture, id).await, counts(&fixture, id).await),
        (OperationState::Done, [450, 450, 0])
    );
}

async fn a_process_that_stops_lets_another_continue_at_once(fixture: Fixture) {
    enqueue(&fixture, 250).await;
    let id = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    fixture.run_operations(|_| ready(false)).await.expect("run");
    assert_eq!(state(&fixture, id).await, OperationState::Running);
    done_by_steps(1, counts(&fixture, id).await);
    run(&fixture.second_client().await).await;
    assert_eq!(
        (state(&fixture, id).await, counts(&fixture, id).await),
        (OperationState::Done, [250, 250, 0])
    );
}

async fn a_process_that_lost_an_operation_cannot_store_progress(fixture: Fixture) {
    let id = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    let (stale, holder) = (Uuid::now_v7(), Uuid::now_v7());
    let store = fixture.store();
    store.take_operation(stale, 30 * SECOND).await.expect("take").expect("free");
    fixture.advance(30 * SECOND).await;
    store.take_operation(holder, 30 * SECOND).await.expect("take").expect("no longer held");
    let [first, second, third] = [JobId::new(), JobId::new(), JobId::new()];
    let step = |examined| OperationStep {
        locked: vec![first, second, third],
        unlocked: Vec::new(),
        locked_cursor: Some(second),
        cursor: Some(JobId::new()),
        examined,
        changed: examined - 1,
        skipped: 1,
        error: Some("trying again".into()),
        take_for: 30 * SECOND,
    };
    assert_eq!(store.save_operation_step(id, stale, &step(5)).await.expect("save"), None);
    assert!(!store.end_operation(id, stale, Some("lost")).await.expect("end"));
    assert_eq!((state(&fixture, id).await, counts(&fixture, id).await), (OperationState::Running, [0, 0, 0]));
    assert_eq!(record(&fixture, id).await.cursor, None);
    let locked = async |before| store.locked_jobs(id, before, 2).await.expect("locked_jobs");
    assert_eq!(locked(None).await, []);

    let stored = step(7);
    assert_eq!(
        store.save_operation_step(id, holder, &stored).await.expect("save"),
        Some(OperationState::Running)
    );
    let held = record(&fixture, id).await;
    assert_eq!(
        (held.cursor, held.error, held.updated_at),
        (stored.cursor, stored.error, fixture.now().await)
    );
    assert_eq!(counts(&fixture, id).await, [7, 6, 1]);
    assert_eq!(locked(None).await, [third, second]);
    assert_eq!(locked(Some(second)).await, [first]);
    // A process that has lost the operation removes none of them either.
    let unlocked = OperationStep { locked: Vec::new(), unlocked: vec![first, third], ..step(8) };
    assert_eq!(store.save_operation_step(id, stale, &unlocked).await.expect("save"), None);
    assert_eq!(locked(None).await, [third, second]);
    // Numbers are totals. A step without a cursor keeps it.
    let next = OperationStep { cursor: None, examined: 9, changed: 8, ..unlocked };
    store.save_operation_step(id, holder, &next).await.expect("save");
    assert_eq!((counts(&fixture, id).await, record(&fixture, id).await.cursor), ([9, 8, 1], stored.cursor));
    fixture.advance(30 * SECOND).await;
    let taken = store.take_operation(stale, 30 * SECOND).await.expect("take").expect("no longer held");
    assert_eq!(taken.locked_cursor, Some(second));
    assert_eq!(locked(None).await, [second]);
}

async fn the_oldest_operation_that_nobody_holds_is_taken(fixture: Fixture) {
    let mut started = Vec::new();
    for _ in 0..3 {
        started.push(start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await);
        fixture.advance(SECOND).await;
    }
    let take = async || {
        let taken = fixture.store().take_operation(Uuid::now_v7(), 30 * SECOND).await.expect("take");
        taken.map(|held| held.record.id)
    };
    assert_eq!(take().await, Some(started[0]));
    fixture.stop_operation(started[1]).await.expect("stop");
    assert_eq!(take().await, Some(started[2]));
    assert_eq!(take().await, None);
    fixture.advance(30 * SECOND).await;
    assert_eq!(take().await, Some(started[0]));
}

/// All of them see that it is free before one of them takes it.
async fn an_operation_is_taken_by_one_of_many_processes(fixture: Fixture) {
    start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    for _ in 0..20 {
        let take = || {
            let store = fixture.store().clone();
            tokio::spawn(async move { store.take_operation(Uuid::now_v7(), 30 * SECOND).await })
        };
        let processes: Vec<_> = (0..10).map(|_| take()).collect();
        let mut taken = 0;
        for process in processes {
            taken += usize::from(process.await.expect("task").expect("take").is_some());
        }
        assert_eq!(taken, 1);
        fixture.advance(30 * SECOND).await;
    }
}

async fn a_large_operation_does_not_delay_a_small_one(fixture: Fixture) {
    // Ids without a job count as skipped, 200 per step.
    let unknown = |count| (0..count).map(|_| JobId::new()).collect::<Vec<_>>();
    let large = start(&fixture, NewOperation::of_jobs(Action::Cancel, unknown(2_000))).await;
    fixture.advance(SECOND).await;
    let small = start(&fixture, NewOperation::of_jobs(Action::Cancel, unknown(300))).await;
    let mut pauses = 0;
    // Seven of twelve steps: the small operation has two, and does not pause after its last one.
    let pause = |_| {
        pauses += 1;
        ready(pauses < 7)
    };
    fixture.run_operations(pause).await.expect("run");
    assert_eq!(
        (state(&fixture, small).await, counts(&fixture, small).await),
        (OperationState::Done, [300, 0, 300])
    );
    assert_eq!(
        (state(&fixture, large).await, counts(&fixture, large).await),
        (OperationState::Running, [1_200, 0, 1_200])
    );
    run(&fixture).await;
    assert_eq!(
        (state(&fixture, large).await, counts(&fixture, large).await),
        (OperationState::Done, [2_000, 0, 2_000])
    );
}

async fn a_worker_executes_operations(fixture: Fixture) {
    enqueue(&fixture, 450).await;
    let id = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    let worker = Worker::builder(fixture.client()).upkeep_only().build().expect("a worker");
    let worker = worker.start().await.expect("start");
    until("done", || async { state(&fixture, id).await == OperationState::Done }).await;
    worker.stop().await;
    assert_eq!(counts(&fixture, id).await, [450, 450, 0]);
}

async fn an_operation_that_waits_for_a_locked_job_delays_no_other(fixture: Fixture) {
    let locked = fixture.enqueue_kind("mail").await;
    fixture.enqueue_kind("sms").await;
    let waiting = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    fixture.advance(SECOND).await;
    let other = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("sms"))).await;
    let lock =
        open_transaction(&fixture, &format!("select 1 from ready where id = '{locked}' for update")).await;
    run(&fixture).await;
    assert_eq!(state(&fixture, other).await, OperationState::Done);
    assert_eq!(state(&fixture, waiting).await, OperationState::Running);
    roll_back(lock).await;
    fixture.advance(5 * SECOND).await;
    run(&fixture).await;
    assert_eq!(
        (state(&fixture, waiting).await, counts(&fixture, waiting).await),
        (OperationState::Done, [1, 1, 0])
    );
}

// ---- which jobs are visited --------------------------------------------------------

async fn a_job_that_fails_again_is_not_retried_again(fixture: Fixture) {
    enqueue(&fixture, 201).await;
    fail_all(&fixture).await;
    let dead = JobFilter { statuses: vec![Status::FailedPermanent], ..JobFilter::default() };
    let id = start(&fixture, NewOperation::matching(Action::Retry, dead)).await;
    let failed_again = Arc::new(AtomicU64::new(0));
    let pause = |_| {
        let (fixture, failed_again) = (fixture.clone(), failed_again.clone());
        async move {
            // At the same instant: only the cursor keeps these jobs from being retried again.
            failed_again.fetch_add(fail_all(&fixture).await.len() as u64, Ordering::Relaxed);
            true
        }
    };
    fixture.run_operations(pause).await.expect("run");
    let failed_again = failed_again.load(Ordering::Relaxed);
    assert_eq!(
        (state(&fixture, id).await, counts(&fixture, id).await),
        (OperationState::Done, [201, 201, 0])
    );
    // Usually 200, the jobs of the first step. It passes by jobs whose locks take too long.
    assert!(failed_again > 0, "no job failed again during the operation");
    assert_eq!(fixture.count(Status::FailedPermanent).await, failed_again);
    assert_eq!(fixture.count(Status::Queued).await, 201 - failed_again);
}

async fn a_job_that_failed_again_before_the_process_died_is_not_retried_again(fixture: Fixture) {
    enqueue(&fixture, 2).await;
    let dead = fail_all(&fixture).await;
    let filter = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    let list = start(&fixture, NewOperation::of_jobs(Action::Retry, dead.clone())).await;
    // A process has retried a job and dies before it stores the step.
    fixture.retry(dead[0]).await.expect("retry");
    fixture.advance(SECOND).await;
    assert_eq!(fail_all(&fixture).await, [dead[0]]);
    run(&fixture).await;
    assert_eq!(counts(&fixture, filter).await, [2, 1, 1]);
    assert_eq!(counts(&fixture, list).await, [2, 1, 1]);
    assert_eq!(fixture.status(dead[0]).await, Status::FailedPermanent);
    assert_eq!(fixture.status(dead[1]).await, Status::Queued);
}

async fn jobs_created_later_are_not_touched(fixture: Fixture) {
    let early = fixture.enqueue_kind("mail").await;
    let listed = JobId::new();
    let filter = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    let list = start(&fixture, NewOperation::of_jobs(Action::Cancel, [listed])).await;
    fixture.advance(Duration::from_micros(1)).await;
    let late = fixture.enqueue_kind("mail").await;
    let late_and_listed = fixture.add(job("mail").id(listed)).await;
    run(&fixture).await;
    assert_eq!((counts(&fixture, filter).await, counts(&fixture, list).await), ([1, 1, 0], [1, 0, 1]));
    assert_eq!(fixture.status(early).await, Status::Cancelled);
    assert_eq!(fixture.status(late).await, Status::Queued);
    assert_eq!(fixture.status(late_and_listed).await, Status::Queued);
}

async fn a_filter_that_this_version_does_not_know_fails_the_operation(fixture: Fixture) {
    let spared = fixture.enqueue_kind("mail").await;
    let id = start(&fixture, NewOperation::matching(Action::Cancel, of_kind("mail"))).await;
    fixture.sql(r#"update operations set filter = '{"kind":"mail","colour":"red"}'"#, None).await;
    run(&fixture).await;
    let failed = record(&fixture, id).await;
    assert_eq!((failed.state, failed.ended_at), (OperationState::Failed, Some(fixture.now().await)));
    let error = failed.error.expect("an error");
    assert!(error.contains("colour") && error.contains("upgrade"), "{error}");
    assert_eq!(fixture.status(spared).await, Status::Queued);
    assert!(fixture.stop_operation(id).await.expect_err("failed").is_conflict());

    fixture.sql(r#"update operations set filter = '{"kind":"mail"}'"#, None).await;
    let resumed = fixture.resume_operation(id).await.expect("resume");
    assert_eq!((resumed.state, resumed.error, resumed.ended_at), (OperationState::Running, None, None));
    run(&fixture).await;
    assert_eq!(
        (state(&fixture, id).await, fixture.status(spared).await),
        (OperationState::Done, Status::Cancelled)
    );
}

// ---- storing and listing -------------------------------------------------------------

async fn starting_an_operation_again_changes_nothing(fixture: Fixture) {
    let (id, job) = (OperationId::new(), JobId::new());
    let by_filter = || NewOperation::matching(Action::Retry, of_kind("mail")).id(id).created_by("ada");
    let first = fixture.start_operation(by_filter()).await.expect("start");
    assert_eq!((first.id, first.created_by.as_deref()), (id, Some("ada")));
    assert_eq!(first.filter.expect("a filter").get(), r#"{"kind":"mail"}"#);
    fixture.advance(MINUTE).await;
    run(&fixture).await;
    let again = fixture.start_operation(by_filter()).await.expect("start again");
    assert_eq!((again.state, again.created_at), (OperationState::Done, first.created_at));
    let others = [
        NewOperation::matching(Action::Delete, of_kind("mail")),
        NewOperation::matching(Action::Retry, of_kind("sms")),
        NewOperation::of_jobs(Action::Retry, [job]),
    ];
    for other in others {
        let refused = fixture.start_operation(other.id(id)).await.expect_err("another operation");
        assert!(refused.is_conflict() && refused.to_string().contains("id"), "{refused:?}");
    }
    let list = OperationId::new();
    let of_jobs = |jobs: Vec<JobId>| NewOperation::of_jobs(Action::Retry, jobs).id(list);
    fixture.start_operation(of_jobs(vec![job])).await.expect("start");
    fixture.start_operation(of_jobs(vec![job, job])).await.expect("start again");
    let limited = of_jobs(vec![job]).only_in(["mail"]);
    assert!(fixture.start_operation(limited).await.expect_err("other queues").is_conflict());
    assert_eq!(
        fixture.operations(&OperationFilter::default()).await.expect("list").len(),
        1,
        "the limit is 1"
    );
}

async fn operations_are_listed_newest_first(fixture: Fixture) {
    let mut started = Vec::new();
    for (nth, queue) in ["letters", "phones", "letters", "parcels", "letters"].into_iter().enumerate() {
        // The ids are in another order.
        let id = OperationId(Uuid::from_u128(0x0199_0000_0000_7000_8000_0000_0000_0009 - nth as u128));
        let filter = JobFilter { queue: Some(queue.into()), ..of_kind("mail") };
        started.push(start(&fixture, NewOperation::matching(Action::Retry, filter).id(id)).await);
        if nth != 2 {
            fixture.advance(SECOND).await;
        }
    }
    // The third and the fourth were started at the same time.
    let expected = [4, 2, 3, 1, 0].map(|nth| started[nth]);
    let every_queue = start(&fixture, NewOperation::of_jobs(Action::Retry, [JobId::new()])).await;
    fixture.stop_operation(started[1]).await.expect("stop");
    let list = async |filter: OperationFilter| -> Vec<OperationId> {
        let listed = fixture.operations(&filter).await.expect("list");
        listed.into_iter().map(|operation| operation.id).collect()
    };
    let all = OperationFilter { limit: 50, ..OperationFilter::default() };
    assert_eq!(list(all.clone()).await, [&[every_queue][..], &expected].concat());
    let page = |before| OperationFilter { limit: 2, before, ..all.clone() };
    assert_eq!(list(page(None)).await, [every_queue, expected[0]]);
    assert_eq!(list(page(Some(expected[0]))).await, expected[1..3]);
    assert_eq!(list(page(Some(expected[2]))).await, expected[3..]);
    let stopped = OperationFilter { state: Some(OperationState::Stopped), ..all.clone() };
    assert_eq!(list(stopped).await, [started[1]]);
    let queues = Some(vec!["phones".into(), "letters".into()]);
    assert_eq!(list(OperationFilter { queues, ..all.clone() }).await, [4, 2, 1, 0].map(|nth| started[nth]));
    let none = OperationFilter { queues: Some(vec!["other".into()]), ..all };
    assert_eq!(list(none).await, []);
}

async fn operations_are_removed_after_seven_days(fixture: Fixture) {
    let done = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    run(&fixture).await;
    let stopped = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    let holder = Uuid::now_v7();
    fixture.store().take_operation(holder, SECOND).await.expect("take").expect("free");
    let step = OperationStep { locked: vec![JobId::new()], ..OperationStep::default() };
    fixture.store().save_operation_step(stopped, holder, &step).await.expect("save");
    fixture.stop_operation(stopped).await.expect("stop");
    let running = start(&fixture, NewOperation::matching(Action::Retry, of_kind("mail"))).await;
    fixture.advance(7 * DAY).await;
    assert_eq!(fixture.remove_old_operations().await.expect("remove"), 0);
    fixture.advance(Duration::from_micros(1)).await;
    assert_eq!(fixture.remove_old_operations().await.expect("remove"), 2);
    assert!(fixture.operation(done).await.expect_err("removed").is_not_found());
    assert!(fixture.operation(stopped).await.expect_err("removed").is_not_found());
    assert_eq!(fixture.query_number("select count(*) from operation_locked", None).await, 0);
    assert_eq!(state(&fixture, running).await, OperationState::Running);
}
