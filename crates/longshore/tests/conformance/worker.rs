//! The worker runtime on a real engine: what handlers receive, how attempts end and how many
//! run at once. `worker_stop.rs` tests how handlers and workers stop, `worker_faults.rs`
//! misbehaving handlers.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use longshore::cron::NewSchedule;
use longshore::store::KeyWait;
use longshore::worker::{Batched, Builder, Executor, RunningWorker, Settings, Summary};
use longshore::{
    ALL_QUEUES, Context, Ending, Failure, Job, JobId, NewJob, NewKind, RetryPolicy, Status, UniqueMode,
    Worker,
};
use serde::{Deserialize, Serialize};
use serde_json::json;
use serde_json::value::RawValue;
use tokio::sync::{Notify, Semaphore};

use crate::fixture::*;
use crate::wake_paths::store_unnoticed;

cases! {
    a_worker_publishes_its_kinds_when_it_starts,
    a_worker_that_cannot_publish_its_kinds_still_runs_jobs,
    a_too_long_schema_is_refused_when_the_worker_is_built,
    a_typed_job_uses_its_defaults_and_runs_with_the_application_state,
    the_dynamic_executor_runs_kinds_without_a_handler,
    a_kind_without_a_handler_is_not_claimed,
    a_batch_is_one_call_and_each_job_has_its_own_ending,
    any_error_is_a_failed_attempt_with_its_causes,
    a_handler_can_request_a_retry_time_no_retry_a_snooze_or_a_cancel,
    a_panic_is_a_failed_attempt_with_its_message,
    a_payload_that_does_not_decode_becomes_a_dead_letter,
    a_result_is_stored_with_the_job,
    follow_ups_are_stored_only_after_a_success,
    a_checkpoint_is_available_to_the_next_attempt,
    progress_is_visible_while_the_job_runs,
    a_thousand_jobs_run_once_each,
    the_concurrency_of_a_queue_is_limited_within_a_worker,
    suspects_run_one_at_a_time,
    a_released_job_is_claimed_by_another_worker_without_polling,
    suspects_are_claimed_one_after_another_without_polling,
    a_notified_job_is_claimed_without_polling,
    jobs_notified_together_start_in_order_of_priority,
    a_schedule_declared_in_code_fires_in_a_running_worker,
    an_invalid_schedule_is_refused_when_the_worker_is_built,
    a_worker_of_every_queue_claims_from_queues_that_are_new,
    a_worker_of_every_queue_finds_a_new_queue_by_polling,
    a_drain_of_every_queue_ends_when_no_queue_has_a_due_job,
    a_worker_of_every_queue_respects_the_concurrency_of_a_queue,
    an_invalid_setting_is_refused_by_field_when_the_worker_is_built,
    an_upkeep_only_worker_recovers_jobs_and_claims_none,
}

/// Waits until the condition holds.
pub(crate) async fn until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let began = Instant::now();
    while !condition().await {
        assert!(began.elapsed() < MAX_WAIT, "it did not happen: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) async fn until_status(fixture: &Fixture, id: JobId, status: Status) {
    until(status.as_str(), || async { fixture.status(id).await == status }).await;
}

/// Counts handlers that have started. A job is `running` from its claim on, but its handler
/// starts a moment later, and a stop in between releases the job.
#[derive(Clone)]
pub(crate) struct Started(Arc<Semaphore>);

impl Started {
    pub(crate) fn new() -> Self {
        Started(Arc::new(Semaphore::new(0)))
    }

    pub(crate) fn increment(&self) {
        self.0.add_permits(1);
    }

    /// Waits until this many handlers have started.
    pub(crate) async fn wait_for(&self, handlers: u32) {
        self.0.acquire_many(handlers).await.expect("never closed").forget();
    }
}

pub(crate) async fn run_worker(builder: Builder) -> RunningWorker {
    builder.build().expect("build").start().await.expect("start")
}

/// Runs all jobs that are due.
pub(crate) async fn drain(builder: Builder) -> Summary {
    builder.build().expect("build").drain().await.expect("drain")
}

/// Short intervals, so that no case takes seconds.
fn short_intervals() -> Settings {
    Settings {
        poll_interval: Duration::from_millis(20),
        max_poll_interval: Duration::from_millis(50),
        heartbeat_interval: Duration::from_millis(100),
        stale_after: 60 * SECOND,
        sweep_interval: Duration::from_millis(100),
        ..Settings::default()
    }
}

pub(crate) fn worker(fixture: &Fixture) -> Builder {
    Worker::builder(fixture.client()).settings(short_intervals())
}

// ---- published kinds -----------------------------------------------------------

#[derive(Serialize, Deserialize)]
struct Described<const TOO_LONG: bool>;

impl<const TOO_LONG: bool> Job for Described<TOO_LONG> {
    const KIND: &'static str = "described";
    type State = ();

    fn schema() -> Option<serde_json::Value> {
        Some(if TOO_LONG { json!("x".repeat(70_000)) } else { json!({ "type": "null" }) })
    }

    async fn run(self, _: Context) -> Result<(), Failure> {
        Ok(())
    }
}

async fn a_worker_publishes_its_kinds_when_it_starts(fixture: Fixture) {
    let known = NewKind { schema: Some(raw("true")), defaults: Some(raw("5")), ..NewKind::new("mail") };
    fixture.put_kinds(&[known, NewKind::new("other")]).await.expect("put_kinds");
    let running = run_worker(
        worker(&fixture)
            .register::<Described<false>>()
            .function("mail", nothing)
            .function("described_later", nothing)
            .describe("described_later", json!({ "type": "object" }))
            .executor(Echo(Arc::default())),
    )
    .await;
    let text = |json: &Option<Box<RawValue>>| json.as_ref().map(|json| json.get().to_owned());
    let kinds = fixture.kinds().await.expect("kinds");
    let kinds: Vec<_> =
        kinds.iter().map(|kind| (&*kind.name, text(&kind.schema), text(&kind.defaults))).collect();
    let expected = [
        ("described", Some(r#"{"type":"null"}"#.to_owned()), None),
        ("described_later", Some(r#"{"type":"object"}"#.to_owned()), None),
        ("mail", Some("true".to_owned()), Some("5".to_owned())),
        ("other", None, None),
    ];
    assert_eq!(kinds, expected);
    running.stop_now().await;
    let unhandled =
        worker(&fixture).function("mail", nothing).describe("described_later", json!(true)).build();
    assert_eq!(unhandled.err().expect("refused").field(), Some("kind"));
}

async fn a_worker_that_cannot_publish_its_kinds_still_runs_jobs(fixture: Fixture) {
    fixture.sql("drop table kinds", None).await;
    let id = fixture.enqueue_kind("mail").await;
    let done = drain(worker(&fixture).function("mail", nothing)).await;
    assert_eq!((done.succeeded, fixture.status(id).await), (1, Status::Succeeded));
}

async fn a_too_long_schema_is_refused_when_the_worker_is_built(fixture: Fixture) {
    let refused = worker(&fixture).register::<Described<true>>().build();
    let error = refused.err().expect("a too long schema");
    assert_eq!(error.field(), Some("schema"));
    assert!(error.to_string().contains("`described`"), "{error}");
}

// ---- handlers ------------------------------------------------------------------

struct App {
    greeting: String,
    said: Arc<Mutex<Vec<String>>>,
}

#[derive(Serialize, Deserialize)]
struct Greet {
    name: String,
}

impl Job for Greet {
    const KIND: &'static str = "greet";
    const QUEUE: &'static str = "polite";
    const PRIORITY: i16 = 7;
    const MAX_ATTEMPTS: u16 = 5;
    const TIMEOUT: Option<Duration> = Some(MINUTE);
    type State = App;

    fn retry() -> Option<RetryPolicy> {
        Some(RetryPolicy::fixed(HOUR))
    }

    fn unique_key(&self) -> Option<(String, UniqueMode)> {
        Some((format!("greet-{}", self.name), UniqueMode::Dedupe))
    }

    async fn run(self, ctx: Context<App>) -> Result<(), Failure> {
        let said = format!("{}, {}", ctx.state().greeting, self.name);
        ctx.state().said.lock().expect("said").push(said);
        Ok(())
    }
}

async fn a_typed_job_uses_its_defaults_and_runs_with_the_application_state(fixture: Fixture) {
    let id = fixture.enqueue(Greet { name: "Ada".into() }).await.expect("enqueue").id;
    let again = fixture.enqueue(Greet { name: "Ada".into() }).await.expect("enqueue").id;
    let other = fixture.enqueue(Greet { name: "Bob".into() }).priority(9).await.expect("enqueue").id;
    assert_eq!(id, again, "the unique key must return the first job");
    let job = fixture.job(id).await;
    assert_eq!((job.queue.as_str(), job.priority, job.max_attempts), ("polite", 7, 5));
    assert_eq!(fixture.job(other).await.priority, 9);
    let said = Arc::new(Mutex::new(Vec::new()));
    let done = drain(
        worker(&fixture)
            .queues(["polite"])
            .state(App { greeting: "Hello".into(), said: said.clone() })
            .register::<Greet>(),
    )
    .await;
    assert_eq!(done.succeeded, 2);
    said.lock().expect("said").sort();
    assert_eq!(*said.lock().expect("said"), ["Hello, Ada", "Hello, Bob"]);
    assert_eq!(fixture.status(id).await, Status::Succeeded);
}

struct Echo(Arc<Mutex<Vec<String>>>);

#[async_trait]
impl Executor for Echo {
    async fn execute(&self, ctx: Context) -> Result<(), Failure> {
        self.0.lock().expect("seen").push(format!("{} {}", ctx.job().kind(), ctx.job().payload()));
        Ok(())
    }
}

async fn the_dynamic_executor_runs_kinds_without_a_handler(fixture: Fixture) {
    fixture.add(NewJob::new("known", &1)).await;
    fixture.add(NewJob::new("unknown", &2)).await;
    let (seen, own) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
    let count = own.clone();
    let done =
        drain(worker(&fixture).executor(Echo(seen.clone())).function("known", move |_: u32, _: Context| {
            let count = count.clone();
            async move {
                count.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
        }))
        .await;
    assert_eq!((done.succeeded, own.load(Ordering::Relaxed)), (2, 1));
    assert_eq!(*seen.lock().expect("seen"), ["unknown 2"]);
}

async fn a_kind_without_a_handler_is_not_claimed(fixture: Fixture) {
    let id = fixture.enqueue_kind("unhandled").await;
    fixture.add(NewJob::new("handled", &())).await;
    let done =
        worker(&fixture).function("handled", |_: (), _: Context| async { Ok(()) }).build().expect("build");
    assert_eq!(done.drain().await.expect("drain").succeeded, 1);
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts), (Status::Queued, 0));
}

async fn a_batch_is_one_call_and_each_job_has_its_own_ending(fixture: Fixture) {
    for n in 0..10 {
        fixture.add(NewJob::new("index", &n)).await;
    }
    let sizes = Arc::new(Mutex::new(Vec::new()));
    let seen = sizes.clone();
    let done = drain(
        worker(&fixture).concurrency(1).settings(Settings { concurrency: 10, ..short_intervals() }).batch(
            "index",
            4,
            move |jobs: Vec<Batched<u32>>| {
                let seen = seen.clone();
                async move {
                    seen.lock().expect("sizes").push(jobs.len());
                    jobs.iter()
                        .map(|job| if job.payload == 3 { Err("no three".into()) } else { Ok(()) })
                        .collect()
                }
            },
        ),
    )
    .await;
    assert_eq!((done.succeeded, done.retrying), (9, 1));
    let sizes = sizes.lock().expect("sizes");
    assert_eq!(sizes.iter().sum::<usize>(), 10);
    assert!(sizes.iter().all(|size| *size <= 4) && sizes.len() < 10, "{sizes:?}");
}

// ---- endings ---------------------------------------------------------------------

/// Runs one job once with this handler.
async fn ended_with(
    fixture: &Fixture,
    job: NewJob,
    handler: impl Fn(Context) -> Result<(), Failure> + Send + Sync + 'static,
) -> longshore::JobRecord {
    let id = fixture.add(job).await;
    let handler = Arc::new(handler);
    drain(worker(fixture).function("mail", move |_: serde_json::Value, ctx: Context| {
        let handler = handler.clone();
        async move { handler(ctx) }
    }))
    .await;
    fixture.job(id).await
}

async fn any_error_is_a_failed_attempt_with_its_causes(fixture: Fixture) {
    let job = ended_with(&fixture, job("mail"), |_| {
        let number = "seven".parse::<u32>();
        let wrapped = number.map_err(std::io::Error::other);
        wrapped?;
        Ok(())
    })
    .await;
    assert_eq!((job.status, job.attempts), (Status::Retrying, 1));
    assert_eq!(job.last_error.as_deref(), Some("invalid digit found in string"));
}

async fn a_handler_can_request_a_retry_time_no_retry_a_snooze_or_a_cancel(fixture: Fixture) {
    let job1 = ended_with(&fixture, job("mail"), |_| Err(Failure::retry_after(3 * HOUR, "busy"))).await;
    assert_eq!((job1.status, job1.run_at), (Status::Retrying, start() + 3 * HOUR));
    let job2 = ended_with(&fixture, job("mail"), |_| Err(Failure::permanent("gone"))).await;
    assert_eq!((job2.status, job2.attempts), (Status::FailedPermanent, 1));
    let job3 = ended_with(&fixture, job("mail"), |_| Err(Failure::snooze(2 * HOUR))).await;
    assert_eq!((job3.status, job3.attempts, job3.run_at), (Status::Queued, 0, start() + 2 * HOUR));
    let job4 = ended_with(&fixture, job("mail"), |_| Err(Failure::cancelled("not wanted"))).await;
    assert_eq!(job4.status, Status::Cancelled);
}

async fn a_panic_is_a_failed_attempt_with_its_message(fixture: Fixture) {
    let job = ended_with(&fixture, job("mail"), |_| panic!("out of paper")).await;
    assert_eq!(job.status, Status::Retrying);
    assert_eq!(job.last_error.as_deref(), Some("panicked: out of paper"));
}

async fn a_payload_that_does_not_decode_becomes_a_dead_letter(fixture: Fixture) {
    let id = fixture.add(NewJob::new("mail", &json!({ "old": true }))).await;
    let private = fixture.add(NewJob::new("mail", "s3cret")).await;
    let done =
        worker(&fixture).function("mail", |_: Vec<u32>, _: Context| async { Ok(()) }).build().expect("build");
    assert_eq!(done.drain().await.expect("drain").failed_permanent, 2);
    let job = fixture.job(id).await;
    let error = job.last_error.expect("an error");
    assert!(error.contains("does not fit the handler of `mail`"), "{error}");
    // The payload must not appear in errors.
    let job = fixture.job(private).await;
    assert!(!format!("{:?} {:?}", job.last_error, job.errors).contains("s3cret"), "{:?}", job.errors);
}

async fn a_result_is_stored_with_the_job(fixture: Fixture) {
    let job = ended_with(&fixture, job("mail"), |ctx| {
        ctx.set_result(&json!({ "sent": 3 }))?;
        Ok(())
    })
    .await;
    assert_eq!(job.result.expect("a result").get(), r#"{"sent":3}"#);
}

async fn follow_ups_are_stored_only_after_a_success(fixture: Fixture) {
    let failed = ended_with(&fixture, job("mail"), |ctx| {
        ctx.enqueue(NewJob::new("after_failure", &()))?;
        Err("no".into())
    })
    .await;
    assert_eq!(failed.status, Status::Retrying);
    assert_eq!(fixture.count(Status::Queued).await, 0);
    ended_with(&fixture, job("mail"), |ctx| {
        ctx.enqueue(NewJob::new("after_success", &()))?;
        Ok(())
    })
    .await;
    assert_eq!(fixture.count(Status::Queued).await, 1);
}

async fn a_checkpoint_is_available_to_the_next_attempt(fixture: Fixture) {
    let id = fixture.add(job("walk").retry(RetryPolicy::fixed(Duration::ZERO))).await;
    drain(worker(&fixture).function("walk", |_: serde_json::Value, ctx: Context| async move {
        match ctx.checkpoint::<u32>().await? {
            None => {
                ctx.save_checkpoint(&41).await?;
                Err("interrupted half-way".into())
            }
            Some(n) => Ok(ctx.set_result(&(n + 1))?),
        }
    }))
    .await;
    let job = fixture.job(id).await;
    assert_eq!((job.status, job.attempts), (Status::Succeeded, 2));
    assert_eq!(job.result.expect("a result").get(), "42");
}

async fn progress_is_visible_while_the_job_runs(fixture: Fixture) {
    let id = fixture.add(job("slow")).await;
    let go = Arc::new(Notify::new());
    let wait = go.clone();
    let running = run_worker(worker(&fixture).function("slow", move |_: serde_json::Value, ctx: Context| {
        let wait = wait.clone();
        async move {
            ctx.progress(&json!({ "percent": 10 }))?;
            ctx.progress(&json!({ "percent": 20 }))?;
            wait.notified().await;
            Ok(())
        }
    }))
    .await;
    until("progress", || async {
        fixture.job(id).await.progress.is_some_and(|p| p.get().replace(' ', "") == r#"{"percent":20}"#)
    })
    .await;
    go.notify_one();
    until_status(&fixture, id, Status::Succeeded).await;
    running.stop().await;
}

// ---- concurrency --------------------------------------------------------------------

async fn a_thousand_jobs_run_once_each(fixture: Fixture) {
    fixture.enqueue_many((0..1000).map(|n| NewJob::new("mail", &n))).await.expect("enqueue");
    let runs = Arc::new(Mutex::new(BTreeMap::<u32, u32>::new()));
    let seen = runs.clone();
    let done = drain(worker(&fixture).concurrency(24).function("mail", move |n: u32, _: Context| {
        let seen = seen.clone();
        async move {
            *seen.lock().expect("runs").entry(n).or_default() += 1;
            Ok(())
        }
    }))
    .await;
    assert_eq!(done.succeeded, 1000);
    let runs = runs.lock().expect("runs");
    assert!(runs.len() == 1000 && runs.values().all(|times| *times == 1));
}

/// Runs jobs of two queues and returns how many of the queue `narrow` ran at once.
async fn narrow_jobs_at_once(fixture: &Fixture, builder: Builder) -> usize {
    for n in 0..30 {
        fixture.add(NewJob::new("mail", &n).queue(if n % 2 == 0 { "narrow" } else { "wide" })).await;
    }
    let (now, max) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (at_once, highest) = (now.clone(), max.clone());
    let handler = move |n: u32, _: Context| {
        let (at_once, highest) = (at_once.clone(), highest.clone());
        async move {
            if n.is_multiple_of(2) {
                highest.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(5)).await;
                at_once.fetch_sub(1, Ordering::SeqCst);
            }
            Ok(())
        }
    };
    assert_eq!(drain(builder.concurrency(8).function("mail", handler)).await.succeeded, 30);
    max.load(Ordering::SeqCst)
}

async fn the_concurrency_of_a_queue_is_limited_within_a_worker(fixture: Fixture) {
    let builder = worker(&fixture).queues(["narrow", "wide"]).queue_concurrency("narrow", 2);
    let at_once = narrow_jobs_at_once(&fixture, builder).await;
    assert!(at_once <= 2, "{at_once} at once");
}

async fn suspects_run_one_at_a_time(fixture: Fixture) {
    for _ in 0..3 {
        fixture.add(job("mail").max_attempts(9)).await;
    }
    let crashing = fixture.worker().await;
    assert_eq!(fixture.claim(crashing, 3).await.len(), 3);
    assert_eq!(fixture.crash_all_workers().await.recovered, 3);
    fixture.advance(HOUR).await;
    let (now, max) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (at_once, highest) = (now.clone(), max.clone());
    let done =
        drain(worker(&fixture).concurrency(8).function("mail", move |_: serde_json::Value, _: Context| {
            let (at_once, highest) = (at_once.clone(), highest.clone());
            async move {
                highest.fetch_max(at_once.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(20)).await;
                at_once.fetch_sub(1, Ordering::SeqCst);
                Ok(())
            }
        }))
        .await;
    assert_eq!((done.succeeded, max.load(Ordering::SeqCst)), (3, 1));
}

/// A worker that does not poll: it claims only after a wake-up.
pub(crate) fn without_polling(fixture: &Fixture) -> Builder {
    worker(fixture).settings(Settings { poll_interval: HOUR, max_poll_interval: HOUR, ..short_intervals() })
}

/// A handler that succeeds at once.
pub(crate) async fn nothing(_: serde_json::Value, _: Context) -> Result<(), Failure> {
    Ok(())
}

async fn a_released_job_is_claimed_by_another_worker_without_polling(fixture: Fixture) {
    let id = fixture.add(job("mail")).await;
    let holder = fixture.worker().await;
    let claimed = fixture.claim(holder, 1).await.remove(0);
    let running = without_polling(&fixture).function("mail", nothing).build().expect("build").start().await;
    let running = running.expect("start");
    let first = fixture.add(job("mail")).await;
    until_status(&fixture, first, Status::Succeeded).await;
    // After that job the worker has looked for more and found nothing.
    fixture.must_finish(&claimed, Ending::Released).await;
    until_status(&fixture, id, Status::Succeeded).await;
    running.stop().await;
}

async fn suspects_are_claimed_one_after_another_without_polling(fixture: Fixture) {
    for _ in 0..5 {
        fixture.add(job("mail").max_attempts(9)).await;
    }
    let crashing = fixture.worker().await;
    assert_eq!(fixture.claim(crashing, 5).await.len(), 5);
    assert_eq!(fixture.crash_all_workers().await.recovered, 5);
    fixture.advance(HOUR).await;
    let running = run_worker(without_polling(&fixture).function("mail", nothing)).await;
    until("five successes", || async { fixture.count(Status::Succeeded).await == 5 }).await;
    running.stop().await;
}

async fn a_notified_job_is_claimed_without_polling(fixture: Fixture) {
    let running = run_worker(without_polling(&fixture).function("mail", nothing)).await;
    // Each job arrives just after the worker has looked and found nothing.
    for _ in 0..20 {
        let id = fixture.enqueue_kind("mail").await;
        until_status(&fixture, id, Status::Succeeded).await;
    }
    running.stop().await;
}

/// The worker has one slot, and the slot has room for a whole batch. So a claim wants more jobs than there
/// are, and when a job has started, the worker has found no more jobs of its priority. Without the batch, that
/// would be so only after another claim, which no case can observe.
///
/// The first claim of a worker looks at all priorities. A later one might not look at them again for a while: for ten
/// times as long as that took the last time. And a late wake-up of an earlier round would cause a claim that may run
/// while the jobs are committed. So there is one round.
async fn jobs_notified_together_start_in_order_of_priority(fixture: Fixture) {
    let order = Arc::new(Mutex::new(Vec::new()));
    let settings =
        Settings { poll_interval: HOUR, max_poll_interval: HOUR, concurrency: 1, ..short_intervals() };
    let mail = |priority: i64| NewJob::new("mail", &priority).priority(priority);
    // On a slow machine, a round can fail although the rule holds: a claim looks for further priorities only after ten times as
    // long as the last look took, and a worker that was stopped for a moment releases jobs that have not started in time. Without the
    // rule, every round fails.
    for _ in 0..20 {
        fixture.flush().await;
        let first = store_unnoticed(&fixture, mail(0)).await;
        let seen = order.clone();
        let record = move |priority: i64, _: Context| {
            seen.lock().expect("lock").push(priority);
            async { Ok::<(), Failure>(()) }
        };
        let batch = async |jobs: Vec<Batched<u32>>| jobs.iter().map(|_| Ok(())).collect();
        let builder = worker(&fixture).settings(settings.clone()).function("mail", record);
        let running = run_worker(builder.batch("bulk", 8, batch)).await;
        until_status(&fixture, first, Status::Succeeded).await;
        order.lock().expect("lock").clear();
        let enqueued = fixture.enqueue_many([mail(0), mail(9), mail(-9)]).await.expect("enqueue");
        for job in enqueued {
            until_status(&fixture, job.id, Status::Succeeded).await;
        }
        running.stop().await;
        if *order.lock().expect("lock") == [9, 0, -9] {
            return;
        }
    }
    panic!("the last of 20 rounds started them in the order {:?}", order.lock().expect("lock"));
}

// ---- schedules ------------------------------------------------------------------

async fn a_schedule_declared_in_code_fires_in_a_running_worker(fixture: Fixture) {
    let declared = || {
        let every_minute =
            NewSchedule::new("minutely", "* * * * *", NewJob::new("report", &json!({ "n": 1 })));
        worker(&fixture)
            .cron(every_minute)
            .function("report", |_: serde_json::Value, _: Context| async { Ok(()) })
    };
    let running = run_worker(declared()).await;
    let other = run_worker(declared()).await;
    let first = fixture.schedules().await.expect("schedules")[0].next_at;
    fixture.advance((first - fixture.now().await).to_std().expect("a time in the future")).await;
    until("the job of the tick", || async { fixture.count(Status::Succeeded).await == 1 }).await;
    running.stop().await;
    other.stop().await;
    assert_eq!(fixture.schedules().await.expect("schedules")[0].last_at, Some(first));
}

async fn an_invalid_schedule_is_refused_when_the_worker_is_built(fixture: Fixture) {
    let report = || NewJob::new("report", &1);
    for (wrong, field) in [
        (NewSchedule::new("never", "99 * * * *", report()), "expression"),
        (NewSchedule::new("never", "0 3 * * *", report()).zone("Mars/Olympus"), "zone"),
        (NewSchedule::new("never", "0 3 * * *", NewJob::new("", &1)), "kind"),
    ] {
        let builder = worker(&fixture).cron(wrong).function("report", |_: u32, _: Context| async { Ok(()) });
        let error = builder.build().err().expect("refused");
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.to_string().starts_with("schedule `never`: "), "{error}");
    }
    assert!(fixture.workers(None).await.expect("workers").is_empty());
}

// ---- every queue --------------------------------------------------------------------

async fn a_worker_of_every_queue_claims_from_queues_that_are_new(fixture: Fixture) {
    // Without polling, only the wake-up can name the new queue.
    let running = run_worker(without_polling(&fixture).queues([ALL_QUEUES]).function("mail", nothing)).await;
    for n in 0..20 {
        let id = fixture.add(job("mail").queue(format!("queue {n}"))).await;
        until_status(&fixture, id, Status::Succeeded).await;
    }
    let record = fixture.worker_record(running.id()).await.expect("registered");
    assert_eq!(record.queues, [ALL_QUEUES]);
    running.stop().await;
}

async fn a_worker_of_every_queue_finds_a_new_queue_by_polling(fixture: Fixture) {
    let running = run_worker(worker(&fixture).queues([ALL_QUEUES]).function("mail", nothing)).await;
    let first = fixture.add(job("mail").queue("known")).await;
    until_status(&fixture, first, Status::Succeeded).await;
    // A store without a client sends no wake-ups.
    let silent = job("mail").queue("new").validate().expect("valid");
    let stored = fixture.store().enqueue(&[silent], KeyWait::Short).await.expect("enqueue");
    until_status(&fixture, stored.results[0].id, Status::Succeeded).await;
    running.stop().await;
}

async fn a_drain_of_every_queue_ends_when_no_queue_has_a_due_job(fixture: Fixture) {
    let suspect = fixture.suspect(job("mail")).await;
    for n in 0..5 {
        fixture.add(job("mail").queue(format!("queue {n}")).priority(n)).await;
    }
    fixture.add(job("mail").queue("later").delay(HOUR)).await;
    fixture.add(job("other").queue("other kinds")).await;
    let done = drain(worker(&fixture).queues([ALL_QUEUES]).function("mail", nothing)).await;
    assert_eq!(done.succeeded, 6);
    assert_eq!(fixture.status(suspect).await, Status::Succeeded);
    let none = drain(worker(&fixture).queues([ALL_QUEUES]).function("mail", nothing)).await;
    assert_eq!(none.succeeded, 0);
}

async fn a_worker_of_every_queue_respects_the_concurrency_of_a_queue(fixture: Fixture) {
    let builder = worker(&fixture).queues([ALL_QUEUES]).queue_concurrency("narrow", 2);
    let at_once = narrow_jobs_at_once(&fixture, builder).await;
    assert!(at_once <= 2, "{at_once} at once");
}

// ---- invalid settings ---------------------------------------------------------------

async fn an_invalid_setting_is_refused_by_field_when_the_worker_is_built(fixture: Fixture) {
    let noop = |_: serde_json::Value, _: Context| async { Ok::<(), Failure>(()) };
    let assert_refused = |builder: Builder, field: &str, part: &str| {
        let error = builder.build().err().expect("refused");
        assert_eq!(error.field(), Some(field), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    };
    let with = |settings: Settings| Worker::builder(fixture.client()).settings(settings).function("a", noop);
    assert_refused(worker(&fixture), "kind", "no handler");
    assert_refused(worker(&fixture).function("a", noop).function("a", noop), "kind", "registered twice");
    assert_refused(worker(&fixture).register::<Greet>(), "state", "App");
    assert_refused(with(Settings { concurrency: 0, ..short_intervals() }), "concurrency", "at least 1");
    assert_refused(with(Settings { queues: Vec::new(), ..short_intervals() }), "queues", "at least one");
    assert_refused(
        with(Settings { stale_after: SECOND / 4, ..short_intervals() }),
        "stale_after",
        "three heartbeats",
    );
    assert_refused(
        with(Settings { max_poll_interval: SECOND / 100, ..short_intervals() }),
        "max_poll_interval",
        "below",
    );
    assert_refused(
        worker(&fixture).function("a", noop).queue_concurrency("x", 1),
        "queue_concurrency",
        "not among",
    );
    assert_refused(
        worker(&fixture).function("a", noop).queue_concurrency("default", 0),
        "queue_concurrency",
        "at least 1",
    );
    assert_refused(
        worker(&fixture).batch("a", 0, |_: Vec<Batched<u32>>| async { Vec::new() }),
        "size",
        "at least 1",
    );
}

async fn an_upkeep_only_worker_recovers_jobs_and_claims_none(fixture: Fixture) {
    fixture.store().pin_clock(None).await.expect("unpin");
    let waiting = fixture.add(job("greet").queue("other")).await;
    let lost = fixture.running(job("greet")).await;
    fixture.store().retire(lost.lease().worker).await.expect("retire");
    let due = fixture.add(job("greet")).await;
    let settings = longshore::worker::Settings {
        sweep_interval: Duration::from_millis(20),
        heartbeat_interval: Duration::from_millis(10),
        ..longshore::worker::Settings::default()
    };
    let running = run_worker(Worker::builder(fixture.client()).settings(settings).upkeep_only()).await;
    until_status(&fixture, lost.lease().id, Status::Retrying).await;
    for id in [waiting, due] {
        assert_eq!(fixture.status(id).await, Status::Queued);
    }
    running.stop().await;
    let both = Worker::builder(fixture.client()).upkeep_only().function("greet", nothing).build();
    assert_eq!(both.err().expect("refused").field(), Some("upkeep_only"));
}
