//! Claiming ahead: a worker buffers jobs of short kinds. It keeps none that another worker could
//! start, and it starts jobs of a higher priority before buffered ones.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use longshore::worker::{Builder, Settings};
use longshore::{Client, Context, Failure, NewJob, Status, Worker};
use tokio::sync::watch;

use crate::fixture::*;
use crate::worker::{Started, drain, run_worker, until};

cases! {
    buffered_jobs_that_cannot_start_are_run_by_another_worker,
    a_buffered_job_that_was_cancelled_ends_without_a_charge,
    a_due_job_of_higher_priority_starts_before_buffered_ones,
    jobs_of_a_kind_without_history_are_claimed_only_for_free_slots,
    jobs_of_a_long_kind_are_not_kept_waiting_by_a_backlog_of_short_ones,
    two_workers_share_short_and_long_jobs,
    a_capped_queue_progresses_beside_a_backlog,
    a_backlog_in_a_capped_queue_does_not_stop_other_queues,
    a_long_job_is_not_kept_waiting_by_a_backlog_of_short_ones_in_another_queue,
}

/// A worker that keeps claimed jobs for as long as it may, and that does not poll.
fn worker(client: Client, concurrency: u32) -> Builder {
    let settings = Settings {
        concurrency,
        poll_interval: HOUR,
        max_poll_interval: HOUR,
        stale_after: HOUR,
        ..Settings::default()
    };
    Worker::builder(client).settings(settings)
}

/// Records which jobs start, in order. A job whose number is negative then waits until the gate is
/// open.
#[derive(Clone)]
struct Handler {
    starts: Arc<Mutex<Vec<i32>>>,
    waiting: Started,
    gate: watch::Sender<bool>,
}

impl Handler {
    fn new() -> Self {
        Handler { starts: Arc::default(), waiting: Started::new(), gate: watch::Sender::new(false) }
    }

    async fn run(self, number: i32) -> Result<(), Failure> {
        self.starts.lock().expect("starts").push(number);
        if number < 0 {
            let mut gate = self.gate.subscribe();
            self.waiting.increment();
            gate.wait_for(|open| *open).await.expect("not closed");
        }
        Ok(())
    }

    fn function(&self) -> impl Fn(i32, Context) -> Run + Clone + use<> {
        let handler = self.clone();
        move |number, _| Box::pin(handler.clone().run(number))
    }

    fn starts(&self) -> Vec<i32> {
        self.starts.lock().expect("starts").clone()
    }
}

type Run = Pin<Box<dyn Future<Output = Result<(), Failure>> + Send>>;

fn mail(number: i32) -> NewJob {
    NewJob::new("mail", &number)
}

/// The number of jobs of this kind that are leased.
async fn leased(fixture: &Fixture, kind: &str) -> u64 {
    let counts = fixture.counts().await.expect("counts");
    let leased = |count: &&longshore::store::Count| count.status == Status::Running && count.kind == kind;
    counts.iter().filter(leased).map(|count| count.jobs).sum()
}

/// Many short jobs, one that waits for the gate, and `after` more short ones. A worker that has run
/// the first ones has probably claimed some of the last ones when it starts the one that waits.
async fn enqueue_around_a_long_job(fixture: &Fixture, after: i32) -> Vec<longshore::JobId> {
    let jobs = (1..=1000).chain([-1]).chain((0..after).map(|n| 2000 + n)).map(mail);
    let enqueued = fixture.enqueue_many(jobs).await.expect("enqueue");
    enqueued[1001..].iter().map(|job| job.id).collect()
}

async fn buffered_jobs_that_cannot_start_are_run_by_another_worker(fixture: Fixture) {
    let after = enqueue_around_a_long_job(&fixture, 200).await;
    let (busy, free) = (Handler::new(), Handler::new());
    let first = worker(fixture.client(), 1).function("mail", busy.function());
    let first = run_worker(first).await;
    busy.waiting.wait_for(1).await;
    fixture.advance(MINUTE).await;
    let second = worker(fixture.second_client().await, 1).function("mail", free.function());
    let second = run_worker(second).await;
    until("the other worker has run the rest", || async {
        free.starts().len() + busy.starts().len() == 1201
    })
    .await;
    assert_eq!(busy.starts().last(), Some(&-1), "the first worker has no free slot");
    until("only the first job runs", || async { fixture.count(Status::Running).await == 1 }).await;
    for id in after {
        let job = fixture.job(id).await;
        assert_eq!((job.status, job.attempts, job.interruptions), (Status::Succeeded, 1, 0));
        assert!(job.errors.is_empty(), "a job that never started has no history: {:?}", job.errors);
        assert_eq!(job.run_at, start(), "it keeps its place in the queue");
    }
    busy.gate.send_replace(true);
    first.stop().await;
    second.stop().await;
}

async fn a_buffered_job_that_was_cancelled_ends_without_a_charge(fixture: Fixture) {
    let after = enqueue_around_a_long_job(&fixture, 20).await;
    let handler = Handler::new();
    let running = worker(fixture.client(), 1).function("mail", handler.function());
    let running = run_worker(running).await;
    handler.waiting.wait_for(1).await;
    for id in &after {
        fixture.cancel(*id).await.expect("cancel");
    }
    until("all have ended", || async { fixture.count(Status::Cancelled).await == 20 }).await;
    for id in after {
        let job = fixture.job(id).await;
        assert_eq!((job.attempts, job.errors.len(), job.last_error), (0, 0, None));
    }
    handler.gate.send_replace(true);
    running.stop().await;
}

async fn a_due_job_of_higher_priority_starts_before_buffered_ones(fixture: Fixture) {
    let handler = Handler::new();
    let running = worker(fixture.client(), 1).function("mail", handler.function());
    let running = run_worker(running).await;
    // On a busy machine, the buffered jobs may be released before the urgent one is claimed.
    let (began, mut round) = (Instant::now(), 1);
    while !is_claimed_beside_buffered_jobs(&fixture, &handler, round).await {
        round += 1;
        let never = "the urgent job was never claimed while other jobs were buffered";
        assert!(round <= 10 || began.elapsed() < MAX_WAIT, "{never}");
    }
    running.stop().await;
}

/// Enqueues an urgent job while a long job runs and others are buffered. Returns whether it was
/// claimed before the others were released, and not released itself; then it must have started first.
async fn is_claimed_beside_buffered_jobs(fixture: &Fixture, handler: &Handler, round: u64) -> bool {
    handler.gate.send_replace(false);
    handler.starts.lock().expect("starts").clear();
    enqueue_around_a_long_job(fixture, 200).await;
    handler.waiting.wait_for(1).await;
    let urgent = fixture.add(mail(9000).priority(1000)).await;
    until("the urgent job is claimed, or the buffered ones are released", || async {
        fixture.status(urgent).await == Status::Running || fixture.count(Status::Running).await == 1
    })
    .await;
    let is_claimed = fixture.status(urgent).await == Status::Running;
    handler.gate.send_replace(true);
    let all = 1202 * round;
    until("all have succeeded", || async { fixture.count(Status::Succeeded).await == all }).await;
    let is_claimed = is_claimed && fixture.job(urgent).await.lease_no == 1;
    let starts = handler.starts();
    let long = starts.iter().position(|number| *number == -1).expect("started");
    assert!(!is_claimed || starts[long + 1] == 9000, "{:?}", &starts[long..long + 20]);
    assert_eq!(fixture.history(urgent).await, []);
    is_claimed
}

async fn jobs_of_a_kind_without_history_are_claimed_only_for_free_slots(fixture: Fixture) {
    let new = |number: i32| NewJob::new("new", &number);
    let jobs = (1..=1000).map(mail).chain((1..=200).map(|n| new(-n)));
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let handler = Handler::new();
    let running = run_worker(
        worker(fixture.client(), 2).function("mail", handler.function()).function("new", handler.function()),
    )
    .await;
    handler.waiting.wait_for(2).await;
    // Both run. One more for each slot may have been claimed when the slot was to be free soon.
    let leased = leased(&fixture, "new").await;
    assert!((2..=4).contains(&leased), "{leased}");
    handler.gate.send_replace(true);
    until("all have succeeded", || async { fixture.count(Status::Succeeded).await == 1200 }).await;
    running.stop().await;
}

async fn jobs_of_a_long_kind_are_not_kept_waiting_by_a_backlog_of_short_ones(fixture: Fixture) {
    let long = |number: i32| NewJob::new("long", &number);
    let jobs = (1..=500).map(mail).chain([long(-1)]).chain((501..=20_000).map(mail));
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let handler = Handler::new();
    let running = run_worker(
        worker(fixture.client(), 2).function("mail", handler.function()).function("long", handler.function()),
    )
    .await;
    handler.waiting.wait_for(1).await;
    let started = handler.starts().len();
    handler.gate.send_replace(true);
    running.stop_now().await;
    assert!(started < 10_000, "{started} other jobs started before it");
}

async fn two_workers_share_short_and_long_jobs(fixture: Fixture) {
    const LONG: usize = 60;
    // The long ones come last, when both workers claim many short jobs at once.
    let jobs = (0..1200).map(|n| NewJob::new(if n < 1200 - LONG { "short" } else { "long" }, &n));
    let enqueued = fixture.enqueue_many(jobs).await.expect("enqueue");
    let mut runs = Vec::new();
    let mut workers = Vec::new();
    for client in [fixture.client(), fixture.second_client().await] {
        let long = Arc::new(Mutex::new(0));
        let count = long.clone();
        let running = worker(client, 2).function("short", |_: u32, _: Context| async { Ok(()) }).function(
            "long",
            move |_: u32, _: Context| {
                *count.lock().expect("lock") += 1;
                async {
                    tokio::time::sleep(Duration::from_millis(60)).await;
                    Ok(())
                }
            },
        );
        workers.push(run_worker(running).await);
        runs.push(long);
    }
    until("all have succeeded", || async { fixture.count(Status::Succeeded).await == 1200 }).await;
    for running in workers {
        running.stop().await;
    }
    let runs: Vec<usize> = runs.iter().map(|runs| *runs.lock().expect("lock")).collect();
    assert_eq!(runs.iter().sum::<usize>(), LONG, "every job runs once");
    assert!(runs.iter().all(|runs| *runs >= LONG / 5), "both workers run long jobs: {runs:?}");
    for job in enqueued {
        assert_eq!(fixture.history(job.id).await, []);
    }
}

// ---- the concurrency of a queue ------------------------------------------------

const BACKLOG: usize = 3000;
const FEW: usize = 3;

/// Runs a backlog in one queue and a few jobs in the other. Returns how many jobs of the backlog had
/// ended when the last of the few ended.
async fn backlog_beside_a_few(fixture: &Fixture, backlog: &'static str, few: &'static str) -> usize {
    let jobs =
        (0..BACKLOG).map(|_| job("mail").queue(backlog)).chain((0..FEW).map(|_| job("mail").queue(few)));
    fixture.enqueue_many(jobs).await.expect("enqueue");
    let ended = Arc::new(Mutex::new((BTreeMap::<String, usize>::new(), 0)));
    let seen = ended.clone();
    let done = drain(
        worker(fixture.client(), 2)
            .queues(["narrow", "wide"])
            .queue_concurrency("narrow", if backlog == "narrow" { 2 } else { 1 })
            .function("mail", move |_: serde_json::Value, ctx: Context| {
                let seen = seen.clone();
                async move {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                    let (ended, at_last_of_few) = &mut *seen.lock().expect("lock");
                    *ended.entry(ctx.job().queue().to_owned()).or_default() += 1;
                    if ctx.job().queue() == few && ended[few] == FEW {
                        *at_last_of_few = ended.get(backlog).copied().unwrap_or_default();
                    }
                    Ok(())
                }
            }),
    )
    .await;
    assert_eq!(done.succeeded as usize, BACKLOG + FEW);
    ended.lock().expect("lock").1
}

async fn a_capped_queue_progresses_beside_a_backlog(fixture: Fixture) {
    let before = backlog_beside_a_few(&fixture, "wide", "narrow").await;
    assert!(before < BACKLOG - 500, "{before} jobs of the backlog ended first");
}

async fn a_backlog_in_a_capped_queue_does_not_stop_other_queues(fixture: Fixture) {
    let before = backlog_beside_a_few(&fixture, "narrow", "wide").await;
    assert!(before < BACKLOG - 500, "{before} jobs of the backlog ended first");
}

/// Claims ahead leave the long kind out, so only claims of any kind find the job. On Postgres, each
/// claim takes so long that a claim ahead always follows.
async fn a_long_job_is_not_kept_waiting_by_a_backlog_of_short_ones_in_another_queue(fixture: Fixture) {
    const SHORT: i32 = 3000;
    const SLOW_CLAIMS: &str = "
        create function slow_claim() returns trigger language plpgsql as $$
          begin
            perform pg_sleep(0.02);
            return null;
          end $$;
        create trigger slow_claim after insert on running for each statement execute function slow_claim()";
    if fixture.engine() == Engine::Postgres {
        fixture.sql(SLOW_CLAIMS, None).await;
    }
    for (backlog, other) in [("a", "b"), ("d", "c")] {
        fixture.enqueue_many((1..=SHORT).map(|number| mail(number).queue(backlog))).await.expect("enqueue");
        let handler = Handler::new();
        let short = handler.function();
        let mut queues = [backlog, other];
        queues.sort_unstable();
        let running = run_worker(
            worker(fixture.client(), 4)
                .queues(queues)
                .queue_concurrency(backlog, 1000)
                .queue_concurrency(other, 1000)
                .function("mail", move |number: i32, ctx: Context| {
                    let run = short(number, ctx);
                    async move {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        run.await
                    }
                })
                .function("long", handler.function()),
        )
        .await;
        until("the worker claims ahead", || async { handler.starts().len() > 200 }).await;
        fixture.add(NewJob::new("long", &-1).queue(other)).await;
        handler.waiting.wait_for(1).await;
        let started = handler.starts().len();
        handler.gate.send_replace(true);
        running.stop_now().await;
        assert!(started < 2000, "{started} other jobs started before it");
    }
}
