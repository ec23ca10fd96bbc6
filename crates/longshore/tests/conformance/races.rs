//! Two at once. Each case names who may lose and what must never happen; each
//! runs many rounds, because one proves little.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use longshore::store::{ClaimCursor, ClaimRequest, Claimed, Fenced};
use longshore::{
    Cancelled, Client, Edit, Ending, Enqueued, EnqueuedAs, JobId, NewJob, Outcome, Report, Result, Status,
    SweepOptions, UniqueMode, WorkerId,
};
use tokio::sync::Barrier;
use tokio::task::JoinHandle;

use crate::fixture::*;

cases! {
    a_cancel_and_a_claim_agree_on_who_was_first,
    a_cancel_and_a_failure_end_cancelled_whoever_is_first,
    a_cancel_and_a_success_end_succeeded,
    a_cancel_and_an_operators_retry_never_lose_the_job,
    an_accepted_cancel_is_never_followed_by_another_run,
    a_settle_is_never_lost_to_a_report_of_the_same_moment,
    a_sweep_takes_the_lease_of_a_zombie_that_reports,
    a_claim_gets_the_old_job_whole_or_the_new_one,
    a_limit_set_beside_a_claim_is_not_overdrawn_afterwards,
    two_sweepers_recover_each_job_once,
    of_a_sweep_and_a_settle_exactly_one_wins,
    a_beat_in_time_and_a_sweep_agree,
    ten_enqueues_with_one_idempotency_key_make_one_job,
    ten_enqueues_with_one_unique_key_make_one_job,
    ten_replacing_enqueues_leave_one_job_with_one_of_their_contents,
    ten_replacing_enqueues_of_a_running_holder_make_one_new_job,
    keys_in_any_order_never_surface_a_deadlock,
    everything_at_once_leaves_no_damage,
    thirty_two_claimers_take_each_of_twenty_thousand_jobs_once,
    a_claimer_killed_in_mid_transaction_loses_nothing,
}

const ROUNDS: usize = 25;

/// Starts a task that waits for the others at `start`.
fn at<T: Send + 'static>(
    start: &Arc<Barrier>,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    let start = start.clone();
    tokio::spawn(async move {
        start.wait().await;
        work.await
    })
}

async fn joined<T>(task: JoinHandle<T>) -> T {
    task.await.expect("task")
}

async fn claim(client: Client, worker: WorkerId, limit: u32) -> Vec<Claimed> {
    let request = ClaimRequest::new(worker, limit);
    client.store().claim(&request, &mut ClaimCursor::default()).await.expect("claim").jobs
}

async fn settle(client: Client, claimed: Vec<Claimed>, ending: Ending) -> Vec<Fenced> {
    let report = |claimed| Report { claimed, ending: ending.clone(), follow_ups: Vec::new() };
    client.settle(claimed.iter().map(report).collect()).await.expect("settle")
}

fn again_at_once() -> Ending {
    Ending::Failed { error: "again".into(), retry_in: Some(Duration::ZERO) }
}

// ---- cancel ------------------------------------------------------------------

async fn a_cancel_and_a_claim_agree_on_who_was_first(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for _ in 0..ROUNDS {
        let id = fixture.enqueue_kind("mail").await;
        let start = Arc::new(Barrier::new(2));
        let (canceller, claimer) = (fixture.client(), other.clone());
        let cancel = at(&start, async move { canceller.cancel(id).await });
        let claimed = at(&start, claim(claimer, worker, 1));
        let (cancel, claimed) = (joined(cancel).await.expect("cancel"), joined(claimed).await);
        match cancel {
            Cancelled::Now => assert_eq!(claimed.len(), 0, "cancelled, and claimed all the same"),
            Cancelled::Pending => {
                assert_eq!(claimed.len(), 1);
                fixture.must_finish(&claimed[0], again_at_once()).await;
            }
        }
        assert_eq!(fixture.status(id).await, Status::Cancelled);
    }
}

async fn a_cancel_and_a_failure_end_cancelled_whoever_is_first(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let id = claimed.lease().id;
        let start = Arc::new(Barrier::new(2));
        let (canceller, settler) = (other.clone(), fixture.client());
        let cancel = at(&start, async move { canceller.cancel(id).await });
        let settled = at(&start, settle(settler, vec![claimed], again_at_once()));
        joined(cancel).await.expect("a live job can be cancelled");
        assert_eq!(joined(settled).await, [Fenced::Held]);
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
        let cancel = at(&start, async move { canceller.cancel(id).await });
        let settled = at(&start, settle(settler, vec![claimed], done()));
        match joined(cancel).await {
            Ok(how) => assert_eq!(how, Cancelled::Pending),
            Err(error) => assert!(error.is_conflict(), "{error:?}"),
        }
        assert_eq!(joined(settled).await, [Fenced::Held]);
        assert_eq!(fixture.status(id).await, Status::Succeeded);
    }
}

async fn a_cancel_and_an_operators_retry_never_lose_the_job(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let id = fixture.ended(job("mail"), Outcome::FailedPermanent).await;
        let start = Arc::new(Barrier::new(2));
        let (canceller, operator) = (other.clone(), fixture.client());
        let cancel = at(&start, async move { canceller.cancel(id).await });
        let retry = at(&start, async move { operator.retry(id).await });
        let cancel = joined(cancel).await;
        joined(retry).await.expect("a finished or waiting job can be retried");
        match cancel {
            // Cancelled after the retry reopened it, and before or after the
            // retry made it due: nothing runs.
            Ok(Cancelled::Now) => {}
            Ok(Cancelled::Pending) => panic!("nobody claimed it"),
            // The cancel came first and found it finished.
            Err(error) => assert!(error.is_conflict(), "{error:?}"),
        }
        let status = fixture.status(id).await;
        assert!(matches!(status, Status::Queued | Status::Cancelled), "{status}");
        if status == Status::Queued {
            fixture.cancel(id).await.expect("cancel");
        }
    }
}

/// A job that fails and comes back at once, over and over: the canceller has
/// to chase it, and once it is told yes, no attempt starts.
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
                    assert_eq!(settle(client.clone(), claimed, again_at_once()).await, [Fenced::Held]);
                }
            })
        };
        // The runner only stops when the cancel has taken effect.
        let cancelled = loop {
            match other.cancel(id).await {
                Ok(cancelled) => break cancelled,
                Err(error) => assert!(error.is_unavailable(), "{error:?}"),
            }
        };
        let lease_no = other.get(id).await.expect("get").lease_no;
        joined(runner).await;
        let job = fixture.job(id).await;
        assert_eq!(job.status, Status::Cancelled);
        assert_eq!(job.lease_no, lease_no, "ran again after {cancelled:?}");
    }
}

/// Reports, beats and marks touch the very row that a settle takes away.
async fn a_settle_is_never_lost_to_a_report_of_the_same_moment(fixture: Fixture) {
    let other = fixture.second_client().await;
    for round in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let (id, lease) = (claimed.lease().id, claimed.lease());
        let start = Arc::new(Barrier::new(3));
        let reporter = other.clone();
        let report = at(&start, async move {
            for n in 0..5 {
                let told =
                    reporter.store().progress(&[(lease, raw(&n.to_string()))]).await.expect("progress");
                if told == [Fenced::LeaseLost] {
                    break;
                }
            }
        });
        let marker = fixture.client();
        let mark = at(&start, async move { marker.store().mark_started(&lease).await.expect("mark") });
        let ending = if round % 2 == 0 { done() } else { failed_permanently() };
        let settled = at(&start, settle(fixture.client(), vec![claimed], ending));
        assert_eq!(joined(settled).await, [Fenced::Held]);
        joined(report).await;
        let _ = joined(mark).await;
        let expected = if round % 2 == 0 { Status::Succeeded } else { Status::FailedPermanent };
        assert_eq!(fixture.status(id).await, expected);
    }
}

/// A zombie goes on reporting while its lease is taken.
async fn a_sweep_takes_the_lease_of_a_zombie_that_reports(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let lease = claimed.lease();
        fixture.advance(61 * SECOND).await;
        let start = Arc::new(Barrier::new(2));
        let zombie = other.clone();
        let report = at(&start, async move {
            for n in 0..5 {
                let _ = zombie.store().progress(&[(lease, raw(&n.to_string()))]).await.expect("progress");
            }
        });
        let sweeper = fixture.client();
        let sweep = at(&start, async move { sweeper.sweep(&SweepOptions::default()).await.expect("sweep") });
        let first = joined(sweep).await.recovered;
        joined(report).await;
        // A report may have moved the row away under the first sweep; the
        // next takes it.
        let second = fixture.sweep_now().await.recovered;
        assert_eq!(first + second, 1);
        assert_eq!(fixture.status(lease.id).await, Status::Retrying);
        fixture.cancel(lease.id).await.expect("cancel");
    }
}

// ---- edit --------------------------------------------------------------------

async fn a_claim_gets_the_old_job_whole_or_the_new_one(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for _ in 0..ROUNDS {
        let id = fixture.add(NewJob::from_json("mail", "1").priority(1)).await;
        let start = Arc::new(Barrier::new(2));
        let (editor, claimer) = (other.clone(), fixture.client());
        let edit = at(&start, async move { editor.edit(id, Edit::default().priority(2).payload("2")).await });
        let claimed = at(&start, claim(claimer, worker, 1));
        let (edit, mut claimed) = (joined(edit).await, joined(claimed).await);
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

// ---- recovery ----------------------------------------------------------------

/// Whether the claim or the limit was first, what runs counts from then on.
async fn a_limit_set_beside_a_claim_is_not_overdrawn_afterwards(fixture: Fixture) {
    let (worker, other) = (fixture.worker_with(DAY).await, fixture.second_client().await);
    for round in 0..ROUNDS {
        let queue = format!("q{round}");
        fixture.enqueue_many((0..4).map(|_| job("step").queue(queue.as_str()))).await.expect("enqueue");
        let request = ClaimRequest { queues: vec![queue.clone()], ..ClaimRequest::new(worker, 2) };
        let start = Arc::new(Barrier::new(2));
        let (limiter, name) = (fixture.client(), queue.clone());
        let limit = at(&start, async move { limiter.limit(&name, Some(1)).await });
        let (claimer, asked) = (other.clone(), request.clone());
        let held =
            at(&start, async move { claimer.store().claim(&asked, &mut ClaimCursor::default()).await });
        joined(limit).await.expect("limit");
        let mut held = joined(held).await.expect("claim").jobs;
        let more = fixture.claim_with(&request).await;
        assert!(held.is_empty() || more.is_empty(), "{} more beside {}", more.len(), held.len());
        held.extend(more);
        for done in settle(fixture.client(), held, done()).await {
            assert_eq!(done, Fenced::Held);
        }
        assert_eq!(fixture.claim_with(&request).await.len(), 1);
    }
}

async fn two_sweepers_recover_each_job_once(fixture: Fixture) {
    let handles = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    fixture.enqueue_many((0..60).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let worker = fixture.worker().await;
    let claimed = fixture.claim(worker, 60).await;
    fixture.advance(61 * SECOND).await;
    let start = Arc::new(Barrier::new(handles.len()));
    let sweeps: Vec<_> = handles
        .into_iter()
        .map(|client| at(&start, async move { client.sweep(&SweepOptions::default()).await.expect("sweep") }))
        .collect();
    let mut recovered = 0;
    for sweep in sweeps {
        recovered += joined(sweep).await.recovered;
    }
    assert_eq!(recovered, 60);
    for job in claimed {
        let record = fixture.job(job.lease().id).await;
        assert_eq!((record.status, record.interruptions, record.errors.len()), (Status::Retrying, 1, 1));
    }
}

async fn of_a_sweep_and_a_settle_exactly_one_wins(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..5 {
        let worker = fixture.worker().await;
        fixture.enqueue_many((0..20).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
        let claimed = fixture.claim(worker, 20).await;
        let ids = ids(&claimed);
        fixture.advance(61 * SECOND).await;
        let start = Arc::new(Barrier::new(2));
        let (sweeper, settler) = (other.clone(), fixture.client());
        let sweep = at(&start, async move { sweeper.sweep(&SweepOptions::default()).await.expect("sweep") });
        let settled = at(&start, settle(settler, claimed, done()));
        let (report, settled) = (joined(sweep).await, joined(settled).await);
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

/// The sweeper looked before the beat and stores after it, or the other way.
async fn a_beat_in_time_and_a_sweep_agree(fixture: Fixture) {
    let other = fixture.second_client().await;
    for _ in 0..ROUNDS {
        let claimed = fixture.running(job("mail")).await;
        let lease = claimed.lease();
        fixture.advance(61 * SECOND).await;
        let start = Arc::new(Barrier::new(2));
        let (sweeper, beater) = (other.clone(), fixture.client());
        let sweep = at(&start, async move { sweeper.sweep(&SweepOptions::default()).await.expect("sweep") });
        let beat =
            at(&start, async move { beater.store().beat(lease.worker, &[lease]).await.expect("beat") });
        let (report, beat) = (joined(sweep).await, joined(beat).await);
        let alive = beat != longshore::store::Beat::Dead;
        assert_eq!(report.recovered == 0, alive, "recovered {} but the beat said {beat:?}", report.recovered);
        if alive {
            fixture.must_finish(&claimed, done()).await;
        } else {
            fixture.cancel(lease.id).await.expect("cancel");
        }
    }
}

// ---- keys --------------------------------------------------------------------

/// Ten enqueues at once through three handles.
async fn ten(fixture: &Fixture, job: impl Fn(usize) -> NewJob) -> Vec<Enqueued> {
    let handles = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    let start = Arc::new(Barrier::new(10));
    let tasks: Vec<_> = (0..10)
        .map(|n| {
            let (client, job) = (handles[n % 3].clone(), job(n));
            at(&start, async move { client.enqueue(job).await })
        })
        .collect();
    let mut answers = Vec::new();
    for task in tasks {
        answers.push(joined(task).await.expect("enqueue"));
    }
    answers
}

fn tally(answers: &[Enqueued]) -> [usize; 3] {
    [EnqueuedAs::Created, EnqueuedAs::Existing, EnqueuedAs::Replaced]
        .map(|how| answers.iter().filter(|answer| answer.how == how).count())
}

fn of_one_job(answers: &[Enqueued]) -> JobId {
    assert!(answers.iter().all(|answer| answer.id == answers[0].id), "{answers:?}");
    answers[0].id
}

async fn ten_enqueues_with_one_idempotency_key_make_one_job(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("order-{round}");
        let answers = ten(&fixture, |n| NewJob::new("mail", &n).idempotency_key(key.as_str())).await;
        assert_eq!(tally(&answers), [1, 9, 0]);
        of_one_job(&answers);
    }
    assert_eq!(fixture.count(Status::Queued).await, 6);
}

async fn ten_enqueues_with_one_unique_key_make_one_job(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("customer-{round}");
        let answers =
            ten(&fixture, |n| NewJob::new("mail", &n).unique_key(key.as_str(), UniqueMode::Dedupe)).await;
        assert_eq!(tally(&answers), [1, 9, 0]);
        of_one_job(&answers);
    }
    assert_eq!(fixture.count(Status::Queued).await, 6);
}

async fn ten_replacing_enqueues_leave_one_job_with_one_of_their_contents(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("customer-{round}");
        let answers = ten(&fixture, |n| {
            NewJob::new("mail", &n).priority(n as i64).unique_key(key.as_str(), UniqueMode::Replace)
        })
        .await;
        assert_eq!(tally(&answers), [1, 0, 9]);
        let job = fixture.job(of_one_job(&answers)).await;
        assert_eq!(job.payload.get(), job.priority.to_string(), "half of one and half of another");
    }
}

async fn ten_replacing_enqueues_of_a_running_holder_make_one_new_job(fixture: Fixture) {
    for round in 0..6 {
        let key = format!("customer-{round}");
        let unique = |n: usize| NewJob::new("mail", &n).unique_key(key.as_str(), UniqueMode::Replace);
        let holder = fixture.running(unique(99)).await;
        let answers = ten(&fixture, unique).await;
        assert_eq!(tally(&answers), [1, 0, 9]);
        let next = of_one_job(&answers);
        assert_ne!(next, holder.lease().id);
        fixture.must_finish(&holder, again_at_once()).await;
        assert_eq!(fixture.status(holder.lease().id).await, Status::FailedPermanent);
        fixture.cancel(next).await.expect("cancel");
    }
}

/// Both keys at once, in every mixture: no caller sees a deadlock.
async fn keys_in_any_order_never_surface_a_deadlock(fixture: Fixture) {
    let handles = [fixture.client(), fixture.second_client().await, fixture.second_client().await];
    let start = Arc::new(Barrier::new(9));
    let tasks: Vec<_> = (0..9)
        .map(|task: usize| {
            let client = handles[task % 3].clone();
            at(&start, async move {
                for round in 0..6_usize {
                    let jobs = (0..12).map(|n| {
                        // Every task walks the same keys from another end.
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
                    });
                    client.enqueue_many(jobs).await?;
                }
                Ok(()) as Result<()>
            })
        })
        .collect();
    for task in tasks {
        joined(task).await.expect("no deadlock surfaces");
    }
}

/// Everything that moves keyed jobs, at once: enqueue, claim, settle, cancel,
/// retry. No error but the honest ones, and no damage (the fixture checks).
async fn everything_at_once_leaves_no_damage(fixture: Fixture) {
    let worker = fixture.worker_with(DAY).await;
    let start = Arc::new(Barrier::new(6));
    let handles = [fixture.client(), fixture.second_client().await];
    let key = |n: usize| format!("customer-{}", n % 5);
    let mut tasks = Vec::new();
    for task in 0..2_usize {
        let client = handles[task].clone();
        tasks.push(at(&start, async move {
            for n in 0..60_usize {
                let mode =
                    [UniqueMode::Dedupe, UniqueMode::Replace, UniqueMode::PreserveRunAt][(n + task) % 3];
                client.enqueue(NewJob::new("mail", &n).unique_key(key(n * 7), mode)).await.expect("enqueue");
            }
        }));
        let client = handles[1 - task].clone();
        tasks.push(at(&start, async move {
            for n in 0..60_usize {
                let claimed = claim(client.clone(), worker, 3).await;
                let ending = [done(), again_at_once(), Ending::Released, failed_permanently()][n % 4].clone();
                settle(client.clone(), claimed, ending).await;
            }
        }));
        let client = handles[task].clone();
        tasks.push(at(&start, async move {
            for n in 0..40_usize {
                let page = client.list(&Default::default()).await.expect("list");
                let Some(job) = page.jobs.get(n % 7) else { continue };
                let moved = if n % 2 == 0 {
                    client.cancel(job.id).await.map(drop)
                } else {
                    client.retry(job.id).await
                };
                if let Err(error) = moved {
                    assert!(error.is_conflict() || error.is_unavailable(), "{error:?}");
                }
            }
        }));
    }
    for task in tasks {
        joined(task).await;
    }
}

// ---- claim -------------------------------------------------------------------

async fn thirty_two_claimers_take_each_of_twenty_thousand_jobs_once(fixture: Fixture) {
    const JOBS: usize = 20_000;
    for _ in 0..4 {
        fixture
            .enqueue_many((0..JOBS / 4).map(|n| NewJob::new("mail", &n).priority(n as i64 % 3)))
            .await
            .expect("fill");
    }
    let worker = fixture.worker_with(DAY).await;
    let handles = [
        fixture.client(),
        fixture.second_client().await,
        fixture.second_client().await,
        fixture.second_client().await,
    ];
    let start = Arc::new(Barrier::new(32));
    let claimers: Vec<_> = (0..32)
        .map(|n| {
            let client = handles[n % 4].clone();
            at(&start, async move {
                let request = ClaimRequest::new(worker, 40 + n as u32);
                let mut cursor = ClaimCursor::default();
                let (mut ids, mut idle) = (Vec::new(), 0);
                // A claimer may come back empty while others hold rows it
                // would have taken; a few empty claims in a row mean the end.
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
        for id in joined(claimer).await {
            *seen.entry(id).or_default() += 1;
        }
    }
    // What the last claimers passed over is still there for the next.
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

/// A claimer that dies in the middle of its transaction loses nothing.
async fn a_claimer_killed_in_mid_transaction_loses_nothing(fixture: Fixture) {
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
    let mut victim = fixture.postgres().await;
    let pid: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut victim).await.expect("pid");
    sqlx::raw_sql("begin; delete from ready").execute(&mut victim).await.expect("in mid claim");
    let mut killer = fixture.postgres().await;
    // Waits until the backend is gone, so that its locks are too.
    let gone: bool = sqlx::query_scalar("select pg_terminate_backend($1, 10000)")
        .bind(pid)
        .fetch_one(&mut killer)
        .await
        .expect("terminate");
    assert!(gone);
}

const VICTIM: &str = "LONGSHORE_CONFORMANCE_VICTIM";

async fn kill_a_child(fixture: &Fixture) {
    use std::io::{BufRead as _, BufReader};
    use std::process::{Command, Stdio};

    let mut child = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "--nocapture", "races::the_victim"])
        .env(VICTIM, fixture.file())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a child");
    let lines = BufReader::new(child.stdout.take().expect("its output")).lines();
    let ready = lines.map_while(std::io::Result::ok).any(|line| line.contains("in mid claim"));
    child.kill().expect("kill");
    child.wait().expect("wait");
    assert!(ready, "the child never began");
}

/// Not a case: what [`kill_a_child`] starts and kills.
#[test]
fn the_victim() {
    let Some(file) = std::env::var_os(VICTIM) else { return };
    let connection = rusqlite::Connection::open(file).expect("open");
    connection.busy_timeout(5 * SECOND).expect("busy timeout");
    connection.execute_batch("begin immediate; delete from ready").expect("in mid claim");
    println!("in mid claim");
    loop {
        std::thread::park();
    }
}
