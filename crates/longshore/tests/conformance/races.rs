//! Races between two or more operations. Each case names which of them may lose and what
//! must never happen, and runs many rounds, because one round proves little.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use longshore::rules::lifecycle::PendingWait;
use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Fenced};
use longshore::{
    Cancelled, Client, Edit, Ending, Enqueued, EnqueuedAs, JobId, NewJob, Outcome, Report, Result, Status,
    SweepOptions, UniqueMode, WorkerId,
};
use tokio::sync::Barrier;
use tokio::task::JoinHandle;

use crate::fixture::*;

cases! {
    a_cancel_and_a_claim_agree_on_which_came_first,
    a_cancel_and_a_failure_end_cancelled_in_either_order,
    a_cancel_and_a_success_end_succeeded,
    a_cancel_and_an_operators_retry_never_lose_the_job,
    an_accepted_cancel_is_never_followed_by_another_run,
    a_settle_is_not_lost_to_concurrent_progress_and_mark_started,
    a_sweep_recovers_the_job_of_a_dead_worker_that_still_reports_progress,
    a_claim_concurrent_with_an_edit_returns_the_old_job_or_the_new_one,
    a_limit_set_during_a_claim_is_not_exceeded_afterwards,
    two_sweepers_recover_each_job_once,
    exactly_one_of_a_sweep_and_a_settle_wins,
    a_sweep_and_a_concurrent_heartbeat_agree,
    ten_enqueues_with_one_idempotency_key_create_one_job,
    ten_enqueues_with_one_idempotency_key_and_a_held_unique_key_return_one_job,
    ten_enqueues_with_one_unique_key_create_one_job,
    ten_replacing_enqueues_leave_one_job_with_the_contents_of_one_of_them,
    ten_replacing_enqueues_of_a_running_holder_create_one_new_job,
    keys_locked_in_any_order_never_return_a_deadlock_error,
    concurrent_operations_on_keyed_jobs_leave_the_database_consistent,
    thirty_two_claimers_claim_each_of_twenty_thousand_jobs_once,
    a_claimer_killed_in_the_middle_of_its_transaction_loses_no_job,
    an_event_and_the_suspensions_that_wait_for_it_never_miss_each_other,
}

const ROUNDS: usize = 25;

/// Starts a task that waits for the other tasks at `start`.
pub(crate) fn spawn_at<T: Send + 'static>(
    start: &Arc<Barrier>,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let start = start.clone();
    tokio::spawn(async move {
        start.wait().await;
        work.await
    })
}

pub(crate) async fn join<T>(task: JoinHandle<T>) -> T {
    task.await.expect("task")
}

async fn claim(client: Client, worker: WorkerId, limit: u32) -> Vec<Claimed> {
    let request = ClaimRequest::new(worker, limit);
    client.store().claim(&request, &mut ClaimCursor::default()).await.expect("claim").jobs
}

pub(crate) async fn settle(client: Client, claimed: Vec<Claimed>, ending: Ending) -> Vec<Fenced> {
    let report =
        |claimed| Report { claimed, ending: ending.clone(), follow_ups: Vec::new(), has_progressed: false };
    client.settle(claimed.iter().map(report).collect()).await.expect("settle")
}

fn failed_and_due_at_once() -> Ending {
    Ending::Failed { error: "failed".into(), retry_in: Some(Duration::ZERO) }
}

// ---- cancel ------------------------------------------------------------------

async fn a_cancel_and_a_claim_agree_on_which_came_first(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for _ in 0..ROUNDS {
        let id = fixture.enqueue_kind("mail").await;
        let start = Arc::new(Barrier::new(2));
        let (canceller, claimer) = (fixture.client(), other.clone());
        let cancel = spawn_at(&start, async move { canceller.cancel(id).await });
        let claimed = spawn_at(&start, claim(claimer, worker, 1));
        let (cancel, claimed) = (join(cancel).await.expect("cancel"), join(claimed).await);
        match cancel {
            Cancelled::Now => assert_eq!(claimed.len(), 0, "cancelled, but claimed anyway"),
            Cancelled::Pending => {
                assert_eq!(claimed.len(), 1);
                fixture.must_finish(&claimed[0], failed_and_due_at_once()).await;
            }
        }
        assert_eq!(fixture.status(id).await, Status::Cancelled);
    }
}

async fn a_cancel_and_a_failure_end_cancelled_in_either_order(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        let start = Arc::new(Barrier::new(2));
        let (canceller, settler) = (other.clone(), fixture.client());
        let cancel = spawn_at(&start, async move { canceller.cancel(id).await });
        let settled = spawn_at(&start, settle(settler, vec![claimed], failed_and_due_at_once()));
        join(cancel).await.expect("a live job can be cancelled");
        assert_eq!(join(settled).await, [Fenced::Held]);
        assert_eq!(fixture.status(id).await, Status::Cancelled);
    }
}

async fn a_cancel_and_a_success_end_succeeded(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        let start = Arc::new(Barrier::new(2));
        let (canceller, settler) = (other.clone(), fixture.client());
        let cancel = spawn_at(&start, async move { canceller.cancel(id).await });
        let settled = spawn_at(&start, settle(settler, vec![claimed], done()));
        match join(cancel).await {
            Ok(how) => assert_eq!(how, Cancelled::Pending),
            Err(error) => assert!(error.is_conflict(), "{error:?}"),
        }
        assert_eq!(join(settled).await, [Fenced::Held]);
        assert_eq!(fixture.status(id).await, Status::Succeeded);
    }
}

async fn a_cancel_and_an_operators_retry_never_lose_the_job(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
        let start = Arc::new(Barrier::new(2));
        let (canceller, operator) = (other.clone(), fixture.client());
        let cancel = spawn_at(&start, async move { canceller.cancel(id).await });
        let retry = spawn_at(&start, async move { operator.retry(id).await });
        let cancel = join(cancel).await;
        join(retry).await.expect("a finished or waiting job can be retried");
        match cancel {
            // The retry reopened the job first, then the cancel ended it.
            Ok(Cancelled::Now) => {}
            Ok(Cancelled::Pending) => panic!("no worker claimed the job"),
            // The cancel came first and found the job finished.
            Err(error) => assert!(error.is_conflict(), "{error:?}"),
        }
        let status = fixture.status(id).await;
        assert!(matches!(status, Status::Queued | Status::Cancelled), "{status}");
        if status == Status::Queued {
            fixture.cancel(id).await.expect("cancel");
        }
    }
}

/// A job fails and is due again at once, repeatedly, so the cancel has to retry its
/// decision. Once the cancel is accepted, no further attempt may start.
async fn an_accepted_cancel_is_never_followed_by_another_run(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for _ in 0..ROUNDS {
        let id = fixture.add(job("mail").max_attempts(30_000)).await;
        let runner = {
            let client = fixture.client();
            tokio::spawn(async move {
                let mut runs = 0;
                loop {
                    let claimed = claim(client.clone(), worker, 1).await;
                    if claimed.is_empty() {
                        return runs;
                    }
                    runs += 1;
                    assert_eq!(
                        settle(client.clone(), claimed, failed_and_due_at_once()).await,
                        [Fenced::Held]
                    );
                }
            })
        };
        // The runner stops only when the cancel has taken effect.
        let cancelled = loop {
            match other.cancel(id).await {
                Ok(cancelled) => break cancelled,
                Err(error) => assert!(error.is_unavailable(), "{error:?}"),
            }
        };
        let lease_no = other.get(id).await.expect("get").lease_no;
        join(runner).await;
        let job = fixture.job(id).await;
        assert_eq!(job.status, Status::Cancelled);
        assert_eq!(job.lease_no, lease_no, "ran again after {cancelled:?}");
    }
}

/// Progress reports and `mark_started` update the same row that a settle deletes.
async fn a_settle_is_not_lost_to_concurrent_progress_and_mark_started(fixture: Fixture) {
    let other = fixture.second_client().await;
    for round in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let (id, lease) = (claimed.lease().id, claimed.lease());
        let start = Arc::new(Barrier::new(3));
        let reporter = other.clone();
        let report = spawn_at(&start, async move {
            for n in 0..5 {
                let fenced =
                    reporter.store().progress(&[(lease, raw(&n.to_string()))]).await.expect("progress");
                if fenced == [Fenced::LeaseLost] {
                    break;
                }
            }
        });
        let marker = fixture.client();
        let mark = spawn_at(&start, async move { marker.store().mark_started(&lease).await.expect("mark") });
        let ending = if round % 2 == 0 { done() } else { failed_permanently() };
        let settled = spawn_at(&start, settle(fixture.client(), vec![claimed], ending));
        assert_eq!(join(settled).await, [Fenced::Held]);
        join(report).await;
        let _ = join(mark).await;
        let expected = if round % 2 == 0 { Status::Succeeded } else { Status::FailedPermanent };
        assert_eq!(fixture.status(id).await, expected);
    }
}

/// A worker that was declared dead keeps reporting progress while its lease is taken.
async fn a_sweep_recovers_the_job_of_a_dead_worker_that_still_reports_progress(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let lease = claimed.lease();
        fixture.advance(61 * SECOND).await;
        let start = Arc::new(Barrier::new(2));
        let stale = other.clone();
        let report = spawn_at(&start, async move {
            for n in 0..5 {
                let _ = stale.store().progress(&[(lease, raw(&n.to_string()))]).await.expect("progress");
            }
        });
        let sweeper = fixture.client();
        let sweep =
            spawn_at(&start, async move { sweeper.sweep(&SweepOptions::default()).await.expect("sweep") });
        let first = join(sweep).await.recovered;
        join(report).await;
        // A report may have changed the row during the first sweep. Then the next one
        // recovers the job.
        let second = fixture.sweep_now().await.recovered;
        assert_eq!(first + second, 1);
        assert_eq!(fixture.status(lease.id).await, Status::Retrying);
        fixture.cancel(lease.id).await.expect("cancel");
    }
}

// ---- edit --------------------------------------------------------------------

async fn a_claim_concurrent_with_an_edit_returns_the_old_job_or_the_new_one(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for _ in 0..ROUNDS {
        let id = fixture.add(NewJob::from_json("mail", "1").priority(1)).await;
        let start = Arc::new(Barrier::new(2));
        let (editor, claimer) = (other.clone(), fixture.client());
        let edit =
            spawn_at(&start, async move { editor.edit(id, Edit::default().priority(2).payload("2")).await });
        let claimed = spawn_at(&start, claim(claimer, worker, 1));
        let (edit, mut claimed) = (join(edit).await, join(claimed).await);
        if let Err(error) = &edit {
            assert!(error.is_conflict(), "{error:?}");
            assert_eq!(claimed.len(), 1);
        }
        if claimed.is_empty() {
            claimed = fixture.claim(worker, 1).await;
        }
        let seen = (claimed[0].payload(), claimed[0].priority());
        assert_eq!(seen, if edit.is_ok() { ("2", 2) } else { ("1", 1) });
        fixture.must_finish(&claimed[0], done()).await;
    }
}

// ---- limits ------------------------------------------------------------------

/// In either order, running jobs count against the limit afterwards.
async fn a_limit_set_during_a_claim_is_not_exceeded_afterwards(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let queue = format!("q{round}");
        fixture.enqueue_many((0..4).map(|_| job("step").queue(queue.as_str()))).await.expect("enqueue");
        let request = ClaimRequest { queues: vec![queue.clone().into()], ..ClaimRequest::new(worker, 2) };
        let start = Arc::new(Barrier::new(2));
        let (limiter, name) = (fixture.client(), queue.clone());
        let limit = spawn_at(&start, async move { limiter.limit(&name, Some(1)).await });
        let (claimer, copy) = (other.clone(), request.clone());
        let held =
            spawn_at(&start, async move { claimer.store().claim(&copy, &mut ClaimCursor::default()).await });
        join(limit).await.expect("limit");
        let mut held = join(held).await.expect("claim").jobs;
        let more = fixture.claim_with(&request).await;
        assert!(held.is_empty() || more.is_empty(), "{} more jobs next to {}", more.len(), held.len());
        held.extend(more);
        for done in settle(fixture.client(), held, done()).await {
            assert_eq!(done, Fenced::Held);
        }
        assert_eq!(fixture.claim_with(&request).await.len(), 1);
    }
}

// ---- recovery ----------------------------------------------------------------

async fn two_sweepers_recover_each_job_once(fixture: Fixture) {
    let clients = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    fixture.enqueue_many((0..60).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 60).await;
    fixture.advance(61 * SECOND).await;
    let start = Arc::new(Barrier::new(clients.len()));
    let sweeps: Vec<_> = clients
        .into_iter()
        .map(|client| {
            spawn_at(&start, async move { client.sweep(&SweepOptions::default()).await.expect("sweep") })
        })
        .collect();
    let mut recovered = 0;
    for sweep in sweeps {
        recovered += join(sweep).await.recovered;
    }
    assert_eq!(recovered, 60);
    for job in claimed {
        let record = fixture.job(job.lease().id).await;
        assert_eq!((record.status, record.interruptions, record.errors.len()), (Status::Retrying, 1, 1));
    }
}

async fn exactly_one_of_a_sweep_and_a_settle_wins(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..5 {
        let worker = fixture.worker().await;
        fixture.enqueue_many((0..20).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
        let claimed = fixture.claim(worker, 20).await;
        let ids = ids(&claimed);
        fixture.advance(61 * SECOND).await;
        let start = Arc::new(Barrier::new(2));
        let (sweeper, settler) = (other.clone(), fixture.client());
        let sweep =
            spawn_at(&start, async move { sweeper.sweep(&SweepOptions::default()).await.expect("sweep") });
        let settled = spawn_at(&start, settle(settler, claimed, done()));
        let (report, settled) = (join(sweep).await, join(settled).await);
        let held = settled.iter().filter(|fenced| **fenced == Fenced::Held).count() as u64;
        assert_eq!(held + report.recovered, 20);
        for (id, fenced) in ids.into_iter().zip(settled) {
            let expected = if fenced == Fenced::Held { Status::Succeeded } else { Status::Retrying };
            assert_eq!(fixture.status(id).await, expected);
            if fenced == Fenced::LeaseLost {
                fixture.cancel(id).await.expect("cancel");
            }
        }
    }
}

/// The sweeper may read before the heartbeat and store after it, or the reverse.
async fn a_sweep_and_a_concurrent_heartbeat_agree(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let lease = claimed.lease();
        fixture.advance(61 * SECOND).await;
        let start = Arc::new(Barrier::new(2));
        let (sweeper, worker) = (other.clone(), fixture.client());
        let sweep =
            spawn_at(&start, async move { sweeper.sweep(&SweepOptions::default()).await.expect("sweep") });
        let beat =
            spawn_at(&start, async move { worker.store().beat(lease.worker, &[lease]).await.expect("beat") });
        let (report, beat) = (join(sweep).await, join(beat).await);
        let alive = beat != longshore::store::Beat::Dead;
        assert_eq!(
            report.recovered == 0,
            alive,
            "recovered {} but the heartbeat returned {beat:?}",
            report.recovered
        );
        if alive {
            fixture.must_finish(&claimed, done()).await;
        } else {
            fixture.cancel(lease.id).await.expect("cancel");
        }
    }
}

// ---- keys --------------------------------------------------------------------

/// Ten concurrent enqueues through three clients.
async fn enqueue_ten(fixture: &Fixture, job: impl Fn(usize) -> NewJob) -> Vec<Enqueued> {
    let clients = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    let start = Arc::new(Barrier::new(10));
    let tasks: Vec<_> = (0..10)
        .map(|n| {
            let (client, job) = (clients[n % 3].clone(), job(n));
            spawn_at(&start, async move { client.enqueue(job).await })
        })
        .collect();
    let mut results = Vec::new();
    for task in tasks {
        results.push(join(task).await.expect("enqueue"));
    }
    results
}

fn counts_by_how(results: &[Enqueued]) -> [usize; 3] {
    [EnqueuedAs::Created, EnqueuedAs::Existing, EnqueuedAs::Replaced]
        .map(|how| results.iter().filter(|result| result.how == how).count())
}

fn same_job(results: &[Enqueued]) -> JobId {
    assert!(results.iter().all(|result| result.id == results[0].id), "{results:?}");
    results[0].id
}

async fn ten_enqueues_with_one_idempotency_key_create_one_job(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("order-{round}");
        let results = enqueue_ten(&fixture, |n| NewJob::new("mail", &n).idempotency_key(key.as_str())).await;
        assert_eq!(counts_by_how(&results), [1, 9, 0]);
        same_job(&results);
    }
    assert_eq!(fixture.count(Status::Queued).await, 6);
}

/// Half of them meet the live holder of a unique key. Either the holder answers for all,
/// or one new job does.
async fn ten_enqueues_with_one_idempotency_key_and_a_held_unique_key_return_one_job(fixture: Fixture) {
    let mut created = 0;
    for round in 0..20 {
        let (unique, key) = (format!("customer-{round}"), format!("order-{round}"));
        fixture.add(job("holder").unique_key(&unique, UniqueMode::Dedupe).idempotency_key(&unique)).await;
        let mode = [UniqueMode::Dedupe, UniqueMode::Replace][round % 2];
        let results = enqueue_ten(&fixture, |n| {
            let job = NewJob::new("mail", &n).idempotency_key(key.as_str());
            if n % 2 == 0 { job } else { job.unique_key(&unique, mode) }
        })
        .await;
        same_job(&results);
        let [new, ..] = counts_by_how(&results);
        assert!(new <= 1, "{results:?}");
        created += new;
    }
    assert_eq!(fixture.count(Status::Queued).await, 20 + created as u64);
}

async fn ten_enqueues_with_one_unique_key_create_one_job(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("customer-{round}");
        let results =
            enqueue_ten(&fixture, |n| NewJob::new("mail", &n).unique_key(key.as_str(), UniqueMode::Dedupe))
                .await;
        assert_eq!(counts_by_how(&results), [1, 9, 0]);
        same_job(&results);
    }
    assert_eq!(fixture.count(Status::Queued).await, 6);
}

async fn ten_replacing_enqueues_leave_one_job_with_the_contents_of_one_of_them(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("customer-{round}");
        let results = enqueue_ten(&fixture, |n| {
            NewJob::new("mail", &n).priority(n as i64).unique_key(key.as_str(), UniqueMode::Replace)
        })
        .await;
        assert_eq!(counts_by_how(&results), [1, 0, 9]);
        let job = fixture.job(same_job(&results)).await;
        assert_eq!(job.payload.get(), job.priority.to_string(), "a mixture of two requests");
    }
}

async fn ten_replacing_enqueues_of_a_running_holder_create_one_new_job(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("customer-{round}");
        let unique = |n: usize| NewJob::new("mail", &n).unique_key(key.as_str(), UniqueMode::Replace);
        let holder = fixture.running(unique(99)).await;
        let results = enqueue_ten(&fixture, unique).await;
        assert_eq!(counts_by_how(&results), [1, 0, 9]);
        let next = same_job(&results);
        assert_ne!(next, holder.lease().id);
        fixture.must_finish(&holder, failed_and_due_at_once()).await;
        assert_eq!(fixture.status(holder.lease().id).await, Status::FailedPermanent);
        fixture.cancel(next).await.expect("cancel");
    }
}

/// Batches with both sorts of keys in different orders: no caller gets a deadlock error.
async fn keys_locked_in_any_order_never_return_a_deadlock_error(fixture: Fixture) {
    let clients = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    let start = Arc::new(Barrier::new(9));
    let tasks: Vec<_> = (0..9)
        .map(|task: usize| {
            let client = clients[task % 3].clone();
            spawn_at(&start, async move {
                for round in 0..6_usize {
                    let job = |n: usize| {
                        // Half of the tasks use the keys in reverse order.
                        let key = if task.is_multiple_of(2) { n } else { 11 - n };
                        let job = NewJob::new("mail", &(task, round, n));
                        let mode =
                            [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt][n % 3];
                        match (task + n) % 3 {
                            0 => job.unique_key(format!("u{key}"), mode),
                            1 => job.idempotency_key(format!("i{round}{key}")),
                            _ => job
                                .unique_key(format!("u{key}"), mode)
                                .idempotency_key(format!("b{round}{key}")),
                        }
                    };
                    // The other batches may hold a key for longer than a batch waits for it.
                    while let Err(error) = client.enqueue_many((0..12).map(job)).await {
                        if !error.to_string().contains("holds the key") {
                            return Err(error);
                        }
                    }
                }
                Ok(()) as Result<()>
            })
        })
        .collect();
    for task in tasks {
        join(task).await.expect("no deadlock error");
    }
}

/// Enqueue, claim, settle, cancel and retry keyed jobs concurrently. Only the documented
/// errors may occur, and the fixture checks the database afterwards.
async fn concurrent_operations_on_keyed_jobs_leave_the_database_consistent(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let start = Arc::new(Barrier::new(6));
    let clients = [fixture.client(), fixture.second_client().await];
    let key = |n: usize| format!("customer-{}", n % 5);
    let mut tasks = Vec::new();
    for task in 0..2_usize {
        let client = clients[task].clone();
        tasks.push(spawn_at(&start, async move {
            for n in 0..60_usize {
                let mode =
                    [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt][(n + task) % 3];
                client.enqueue(NewJob::new("mail", &n).unique_key(key(n * 7), mode)).await.expect("enqueue");
            }
        }));
        let client = clients[1 - task].clone();
        tasks.push(spawn_at(&start, async move {
            for n in 0..60_usize {
                let claimed = claim(client.clone(), worker, 3).await;
                let ending =
                    [done(), failed_and_due_at_once(), Ending::Released, failed_permanently()][n % 4].clone();
                settle(client.clone(), claimed, ending).await;
            }
        }));
        let client = clients[task].clone();
        tasks.push(spawn_at(&start, async move {
            for n in 0..40_usize {
                let page = client.list(&Default::default()).await.expect("list");
                let Some(job) = page.jobs.get(n % 7) else { continue };
                let operated = if n % 2 == 0 {
                    client.cancel(job.id).await.map(drop)
                } else {
                    client.retry(job.id).await
                };
                if let Err(error) = operated {
                    assert!(error.is_conflict() || error.is_unavailable(), "{error:?}");
                }
            }
        }));
    }
    for task in tasks {
        join(task).await;
    }
}

// ---- claim -------------------------------------------------------------------

async fn thirty_two_claimers_claim_each_of_twenty_thousand_jobs_once(fixture: Fixture) {
    const JOBS: usize = 20_000;
    for _ in 0..4 {
        fixture
            .enqueue_many((0..JOBS / 4).map(|n| NewJob::new("mail", &n).priority(n as i64 % 3)))
            .await
            .expect("enqueue");
    }
    let worker = fixture.worker_with(DAY).await;
    let clients = [
        fixture.client(),
        fixture.second_client().await,
        fixture.second_client().await,
        fixture.second_client().await,
    ];
    let start = Arc::new(Barrier::new(32));
    let claimers: Vec<_> = (0..32)
        .map(|n| {
            let client = clients[n % 4].clone();
            spawn_at(&start, async move {
                let request = ClaimRequest::new(worker, 40 + n as u32);
                let mut cursor = ClaimCursor::default();
                let (mut ids, mut idle) = (Vec::new(), 0);
                // A claim may return nothing while other claimers lock the rows. Three
                // empty claims in a row mean that the queue is empty.
                while idle < 3 {
                    let claims = client.store().claim(&request, &mut cursor).await.expect("claim");
                    idle = if claims.jobs.is_empty() { idle + 1 } else { 0 };
                    ids.extend(claims.jobs.iter().map(|job| job.lease().id));
                }
                ids
            })
        })
        .collect();
    let mut seen = BTreeMap::<JobId, usize>::new();
    for claimer in claimers {
        for id in join(claimer).await {
            *seen.entry(id).or_default() += 1;
        }
    }
    // Jobs that the last claimers skipped are still waiting.
    loop {
        let rest = claim(fixture.client(), worker, 1000).await;
        if rest.is_empty() {
            break;
        }
        for job in rest {
            *seen.entry(job.lease().id).or_default() += 1;
        }
    }
    assert_eq!(seen.len(), JOBS);
    assert!(seen.values().all(|times| *times == 1), "claimed twice");
}

async fn a_claimer_killed_in_the_middle_of_its_transaction_loses_no_job(fixture: Fixture) {
    for n in 0..5 {
        fixture.add(NewJob::new("mail", &n)).await;
    }
    match fixture.engine() {
        Engine::Postgres => kill_a_backend(&fixture).await,
        Engine::Sqlite => kill_a_child(&fixture).await,
    }
    let worker = fixture.worker().await;
    assert_eq!(fixture.claim(worker, 9).await.len(), 5);
}

async fn kill_a_backend(fixture: &Fixture) {
    let mut killed = fixture.postgres().await;
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut killed).await.expect("pid");
    sqlx::raw_sql("begin; delete from ready").execute(&mut killed).await.expect("inside the transaction");
    let mut killer = fixture.postgres().await;
    // Wait until the backend has exited, so that its locks are released.
    let exited: bool = sqlx::query_scalar("select pg_terminate_backend($1, 10000)")
        .bind(pid)
        .fetch_one(&mut killer)
        .await
        .expect("terminate");
    assert!(exited);
}

const KILLED_CHILD_FILE: &str = "LONGSHORE_CONFORMANCE_KILLED_CHILD_FILE";

async fn kill_a_child(fixture: &Fixture) {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    let mut child = Command::new(std::env::current_exe().expect("current_exe"))
        .args(["--exact", "--nocapture", "races::killed_child"])
        .env(KILLED_CHILD_FILE, fixture.file())
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawn");
    let lines = BufReader::new(child.stdout.take().expect("stdout")).lines();
    let ready = lines.map_while(std::io::Result::ok).any(|line| line.contains("inside the transaction"));
    child.kill().expect("kill");
    child.wait().expect("wait");
    assert!(ready, "the child did not start its transaction");
}

/// Not a case: the process that [`kill_a_child`] starts and kills.
#[test]
fn killed_child() {
    let Some(file) = std::env::var_os(KILLED_CHILD_FILE) else { return };
    let connection = rusqlite::Connection::open(file).expect("open");
    connection.busy_timeout(5 * SECOND).expect("busy timeout");
    connection.execute_batch("begin immediate; delete from ready").expect("inside the transaction");
    println!("inside the transaction");
    loop {
        std::thread::park();
    }
}

/// Jobs are suspended while their event is emitted and delivered. Each of them is due
/// afterwards.
async fn an_event_and_the_suspensions_that_wait_for_it_never_miss_each_other(fixture: Fixture) {
    const JOBS: usize = 8;
    let worker = fixture.worker().await;
    for round in 0..ROUNDS {
        for _ in 0..JOBS {
            fixture.enqueue_kind("pay").await;
        }
        let claimed = fixture.claim(worker, 100).await;
        assert_eq!(claimed.len(), JOBS, "round {round}");
        let event = format!("approved:{round}");
        let start = Arc::new(Barrier::new(JOBS + 2));
        let mut tasks = Vec::new();
        for claimed in claimed {
            let (fixture, event) = (fixture.clone(), event.clone());
            tasks.push(spawn_at(&start, async move {
                let wait = PendingWait { step: format!("event:{event}"), until: None, events: vec![event] };
                fixture.must_finish(&claimed, Ending::Suspended { waits: vec![wait] }).await;
            }));
        }
        let emitting = fixture.clone();
        tasks.push(spawn_at(&start, async move {
            emitting.emit(&event, &round).await.expect("emit");
        }));
        let delivering = fixture.clone();
        tasks.push(spawn_at(&start, async move {
            delivering.deliver_events().await.expect("deliver");
        }));
        for task in tasks {
            join(task).await;
        }
        fixture.deliver_events().await.expect("deliver");
        let woken = fixture.claim(worker, 100).await;
        assert_eq!(woken.len(), JOBS, "round {round}: a job was not woken");
        for job in &woken {
            fixture.must_finish(job, done()).await;
        }
    }
    assert_eq!(fixture.query_number("select count(*) from events where fresh", None).await, 0);
}
