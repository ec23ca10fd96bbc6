//! Helpers for the tests of programs that use Longshore: a queue for each test, a controllable
//! clock, assertions about enqueued jobs, and running jobs inline.
//!
//! Nothing is mocked: the queue uses the same statements, the same rules and the same worker, on
//! SQLite in memory (feature `sqlite`) or in its own schema of a Postgres database (feature
//! `postgres`).
//!
//! ```
//! # #[cfg(feature = "sqlite")] {
//! use longshore::testing::Queue;
//! use longshore::{Context, Failure, Job, Status, Worker};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Debug, Serialize, Deserialize)]
//! struct Welcome { user: u32 }
//!
//! impl Job for Welcome {
//!     const KIND: &'static str = "welcome";
//!     type State = ();
//!     async fn run(self, _: Context) -> Result<(), Failure> {
//!         if self.user == 0 { Err(Failure::permanent("no such user")) } else { Ok(()) }
//!     }
//! }
//!
//! // The code under test.
//! async fn sign_up(queue: &longshore::Client) -> longshore::Result<()> {
//!     queue.enqueue(Welcome { user: 7 }).await?;
//!     Ok(())
//! }
//!
//! # tokio::runtime::Runtime::new().unwrap().block_on(async {
//! let queue = Queue::new().await;
//! sign_up(&queue).await?;
//! queue.assert_enqueued(|job: &Welcome| job.user == 7).await;
//!
//! let worker = |client| Worker::builder(client).register::<Welcome>();
//! assert_eq!(queue.run(worker, Welcome { user: 0 }).await.status, Status::FailedPermanent);
//! # Ok::<(), longshore::Error>(())
//! # }).unwrap();
//! # }
//! ```

use std::ops::Deref;
use std::sync::Mutex;
use std::time::Duration;

use chrono::{DateTime, TimeZone, Utc};

use crate::client::Client;
use crate::client::graph::Flow;
use crate::job::{FlowId, JobId, JobRecord, Status};
use crate::rules::enqueue::NewJob;
use crate::rules::lifecycle::FAR_FUTURE;
use crate::store::{FlowRecord, ListFilter, StepRecord, StepState};
use crate::worker::{Builder, Job, Summary};

/// A queue for one test. It dereferences to a [`Client`]. Its own methods panic on errors, because
/// they run in tests.
pub struct Queue {
    client: Client,
    now: Mutex<Option<DateTime<Utc>>>,
    #[cfg(feature = "postgres")]
    schema: Option<TestSchema>,
}

impl Deref for Queue {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Queue {
    /// Creates an empty queue in memory, on the real clock.
    #[cfg(feature = "sqlite")]
    pub async fn new() -> Self {
        Queue {
            client: open("sqlite::memory:").await,
            now: Mutex::default(),
            #[cfg(feature = "postgres")]
            schema: None,
        }
    }

    /// Creates an empty queue in memory whose clock is stopped at 2030-01-01 00:00 UTC until it is
    /// [advanced](Self::advance).
    #[cfg(feature = "sqlite")]
    pub async fn with_stopped_clock() -> Self {
        let queue = Queue::new().await;
        queue.stop_clock().await;
        queue
    }

    /// Creates an empty queue on the real clock in a new schema of a Postgres database. The schema
    /// is removed when the queue is dropped. Use a database for tests:
    /// `postgres://postgres@localhost/test`.
    ///
    /// ```no_run
    /// # use longshore::testing::Queue;
    /// # async fn example() {
    /// let queue = Queue::on_postgres(&std::env::var("TEST_DATABASE_URL").unwrap()).await;
    /// queue.stop_clock().await;
    /// # }
    /// ```
    #[cfg(feature = "postgres")]
    pub async fn on_postgres(url: &str) -> Self {
        let schema = TestSchema {
            url: url.to_owned(),
            name: format!("longshore_test_{}", uuid::Uuid::now_v7().simple()),
        };
        let separator = if url.contains('?') { '&' } else { '?' };
        let client = open(&format!("{url}{separator}schema={}", schema.name)).await;
        Queue { client, now: Mutex::default(), schema: Some(schema) }
    }

    /// The name of the schema, if the queue is in a Postgres database.
    #[cfg(feature = "postgres")]
    pub fn schema(&self) -> Option<&str> {
        self.schema.as_ref().map(|schema| schema.name.as_str())
    }

    /// Stops the queue's clock at 2030-01-01 00:00 UTC until it is [advanced](Self::advance).
    pub async fn stop_clock(&self) {
        self.set_clock(Utc.with_ymd_and_hms(2030, 1, 1, 0, 0, 0).single().unwrap_or_default()).await;
    }

    /// Stops the queue's clock at `at`.
    pub async fn set_clock(&self, at: DateTime<Utc>) {
        self.client.store().pin_clock(Some(at)).await.unwrap_or_else(|error| fail("set the clock", &error));
        *self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(at);
    }

    /// Moves the stopped clock forward.
    pub async fn advance(&self, by: Duration) {
        self.set_clock(self.stopped_at() + by).await;
    }

    /// The time at which the clock is stopped.
    fn stopped_at(&self) -> DateTime<Utc> {
        let now = *self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        now.unwrap_or_else(|| panic!("the queue uses the real clock; call `stop_clock` first to advance it"))
    }

    /// Returns the waiting jobs of this type, oldest first.
    pub async fn enqueued<J: Job>(&self) -> Vec<J> {
        let mut jobs = self.waiting(J::KIND).await;
        jobs.reverse();
        jobs.iter().map(decode).collect()
    }

    /// Panics unless a waiting job of this type satisfies `matches`.
    pub async fn assert_enqueued<J: Job>(&self, matches: impl Fn(&J) -> bool) {
        let jobs = self.waiting(J::KIND).await;
        let payloads: Vec<&str> = jobs.iter().map(|job| job.payload.get()).collect();
        assert!(
            jobs.iter().any(|job| matches(&decode(job))),
            "no waiting `{}` job matches; the waiting jobs are: {payloads:?}",
            J::KIND
        );
    }

    /// Panics if a job of this type is waiting.
    pub async fn assert_not_enqueued<J: Job>(&self) {
        let jobs = self.waiting(J::KIND).await;
        assert!(jobs.is_empty(), "expected no waiting `{1}` job, found {0}", jobs.len(), J::KIND);
    }

    /// Enqueues one job, runs all due jobs until none is left, and returns the job's record.
    pub async fn run(&self, worker: impl FnOnce(Client) -> Builder, job: impl Into<NewJob>) -> JobRecord {
        let id = self.client.enqueue(job).await.unwrap_or_else(|error| fail("enqueue", &error)).id;
        self.drain(worker).await;
        self.client.get(id).await.unwrap_or_else(|error| fail("read the job", &error))
    }

    /// Enqueues one job and runs it to its end on the stopped clock, and returns its record. Sleeps,
    /// deadlines and the delays of retries pass at once: the clock moves to the time at which the
    /// job is due next. Other jobs that are due by then run too.
    ///
    /// A job that waits for an event without a deadline cannot go on. Its record is returned; emit
    /// the event, then call [`continue_to_end`](Self::continue_to_end).
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use std::time::Duration;
    /// use longshore::testing::Queue;
    /// use longshore::{Context, Failure, NewJob, Status, Worker};
    /// use serde_json::json;
    ///
    /// async fn order(number: u32, ctx: Context) -> Result<(), Failure> {
    ///     let charge: String = ctx.step("charge", || async { Ok(format!("charge-{number}")) }).await?;
    ///     let _: () = ctx.event(&format!("approved:{number}")).await?;
    ///     ctx.sleep("cool-down", Duration::from_secs(3 * 24 * 60 * 60)).await?;
    ///     ctx.step("ship", || async { Ok(format!("paid by {charge}")) }).await.map(drop)
    /// }
    ///
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let queue = Queue::with_stopped_clock().await;
    /// let worker = |client| Worker::builder(client).function("order", order);
    ///
    /// let job = queue.run_to_end(worker, NewJob::new("order", &7)).await;
    /// queue.assert_steps(job.id, json!({ "charge": "charge-7" })).await;
    /// queue.assert_waiting(job.id, "approved:7").await;
    ///
    /// queue.emit("approved:7", &()).await?;
    /// let job = queue.continue_to_end(worker, job.id).await;
    /// assert_eq!(job.status, Status::Succeeded);
    /// queue.assert_steps(job.id, json!({ "ship": "paid by charge-7" })).await;
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// # }
    /// ```
    pub async fn run_to_end(&self, worker: impl Fn(Client) -> Builder, job: impl Into<NewJob>) -> JobRecord {
        let id = self.client.enqueue(job).await.unwrap_or_else(|error| fail("enqueue", &error)).id;
        self.continue_to_end(worker, id).await
    }

    /// Enqueues a flow and runs it to its end on the stopped clock, and returns its record. Sleeps,
    /// deadlines and the delays of retries pass at once, as in [`run_to_end`](Self::run_to_end).
    ///
    /// If the flow cannot go on, because a task waits for an event or has no handler, it is returned
    /// as it is.
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")] {
    /// use longshore::testing::Queue;
    /// use longshore::{Context, Failure, FlowStatus, NewJob, Worker, chain};
    ///
    /// async fn double(n: u32, ctx: Context) -> Result<(), Failure> {
    ///     let before: u32 = ctx.inputs().await?.pop().map_or(n, |(_, result)| result);
    ///     Ok(ctx.set_result(&(before * 2))?)
    /// }
    ///
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// let queue = Queue::with_stopped_clock().await;
    /// let worker = |client| Worker::builder(client).function("double", double);
    /// let flow = queue.run_flow(worker, chain![NewJob::new("double", &3), NewJob::new("double", &0)]).await;
    /// assert_eq!(flow.status, FlowStatus::Succeeded);
    /// assert_eq!(queue.task(flow.id, "double-2").await.result.unwrap().get(), "12");
    /// # });
    /// # }
    /// ```
    pub async fn run_flow(&self, worker: impl Fn(Client) -> Builder, flow: Flow) -> FlowRecord {
        let id = self.client.enqueue_flow(flow).await.unwrap_or_else(|error| fail("enqueue", &error)).id;
        self.continue_flow(worker, id).await
    }

    /// As [`run_flow`](Self::run_flow), for a flow that exists.
    pub async fn continue_flow(&self, worker: impl Fn(Client) -> Builder, id: FlowId) -> FlowRecord {
        loop {
            let now = self.stopped_at();
            self.drain(&worker).await;
            self.client.do_pending().await.unwrap_or_else(|error| fail("do upkeep", &error));
            let flow = self.client.flow(id).await.unwrap_or_else(|error| fail("read the flow", &error));
            let mut next = flow.deadline;
            for job in self.members(id).await {
                let is_waiting = matches!(job.status, Status::Queued | Status::Retrying);
                if is_waiting && job.run_at > now && job.run_at < FAR_FUTURE {
                    next = Some(next.map_or(job.run_at, |next| next.min(job.run_at)));
                }
            }
            match next.filter(|next| flow.ended_at.is_none() && *next > now) {
                Some(next) => self.set_clock(next).await,
                None => return flow,
            }
        }
    }

    /// Returns the job of a task of a flow.
    pub async fn task(&self, flow: FlowId, name: &str) -> JobRecord {
        let found = self.members(flow).await.into_iter().find(|job| job.task.as_deref() == Some(name));
        found.unwrap_or_else(|| panic!("flow {flow} has no task `{name}`"))
    }

    async fn members(&self, flow: FlowId) -> Vec<JobRecord> {
        const PAGE: u32 = 1000;
        let (mut jobs, mut after) = (Vec::new(), None);
        loop {
            let tasks = self.client.tasks(flow, after, PAGE).await;
            let tasks = tasks.unwrap_or_else(|error| fail("read the tasks", &error));
            for task in &tasks {
                jobs.push(
                    self.client.get(task.id).await.unwrap_or_else(|error| fail("read the job", &error)),
                );
            }
            after = tasks.last().map(|task| task.id);
            if tasks.len() < PAGE as usize {
                return jobs;
            }
        }
    }

    /// As [`run_to_end`](Self::run_to_end), for a job that exists.
    pub async fn continue_to_end(&self, worker: impl Fn(Client) -> Builder, id: JobId) -> JobRecord {
        loop {
            let now = self.stopped_at();
            self.drain(&worker).await;
            let job = self.client.get(id).await.unwrap_or_else(|error| fail("read the job", &error));
            let is_waiting = matches!(job.status, Status::Queued | Status::Retrying);
            // A job that is due but did not run never will: its kind or queue is not the worker's, or
            // the queue is paused.
            if !is_waiting || job.run_at <= now || job.run_at >= FAR_FUTURE {
                return job;
            }
            self.set_clock(job.run_at).await;
        }
    }

    /// Panics unless these steps of the job are stored with these values. `expected` is an object:
    /// the names of the steps and their values. The job may have other steps.
    pub async fn assert_steps(&self, id: JobId, expected: serde_json::Value) {
        let stored = self.stored_steps(id).await;
        let done: serde_json::Map<String, serde_json::Value> = stored
            .iter()
            .filter_map(|step| match &step.state {
                StepState::Done(value) => Some((step.name.clone(), parse(value))),
                StepState::Waiting { .. } => None,
            })
            .collect();
        let Some(expected) = expected.as_object() else { panic!("expected an object of steps: {expected}") };
        for (name, value) in expected {
            assert!(
                done.get(name) == Some(value),
                "job {id}: step `{name}` is not stored with the value {value}; the stored steps are: {}",
                serde_json::Value::Object(done)
            );
        }
    }

    /// Panics unless the job waits under this name: the name of a sleep, of an event, or of
    /// [`Context::any`](crate::Context::any).
    pub async fn assert_waiting(&self, id: JobId, name: &str) {
        let stored = self.stored_steps(id).await;
        let waiting: Vec<&str> = stored
            .iter()
            .filter(|step| matches!(step.state, StepState::Waiting { .. }))
            .map(|step| step.name.strip_prefix("event:").unwrap_or(&step.name))
            .collect();
        assert!(waiting.contains(&name), "job {id}: it does not wait for `{name}`, but for: {waiting:?}");
    }

    async fn stored_steps(&self, id: JobId) -> Vec<StepRecord> {
        self.client.steps(id).await.unwrap_or_else(|error| fail("read the steps", &error))
    }

    /// Runs all due jobs until none is left.
    pub async fn drain(&self, worker: impl FnOnce(Client) -> Builder) -> Summary {
        let worker =
            worker(self.client.clone()).build().unwrap_or_else(|error| fail("build the worker", &error));
        worker.drain().await.unwrap_or_else(|error| fail("drain", &error))
    }

    async fn waiting(&self, kind: &str) -> Vec<JobRecord> {
        let mut found = Vec::new();
        let mut filter = ListFilter {
            statuses: vec![Status::Queued, Status::Retrying],
            kind: Some(kind.to_owned()),
            ..ListFilter::default()
        };
        loop {
            let page = self.client.list(&filter).await.unwrap_or_else(|error| fail("list", &error));
            found.extend(page.jobs);
            filter.cursor = page.next;
            if filter.cursor.is_none() {
                break;
            }
        }
        found
    }
}

async fn open(url: &str) -> Client {
    let client = Client::connect(url).await.unwrap_or_else(|error| fail("open", &error));
    client.migrate().await.unwrap_or_else(|error| fail("migrate", &error));
    client
}

/// The schema of one test's queue. Removed on drop; one that is left over does no harm.
#[cfg(feature = "postgres")]
struct TestSchema {
    url: String,
    name: String,
}

#[cfg(feature = "postgres")]
impl TestSchema {
    async fn remove(url: String, name: String) -> Result<(), sqlx::Error> {
        use sqlx::Connection as _;
        let mut connection = sqlx::PgConnection::connect(&url).await?;
        let statements = format!("set lock_timeout = '5s'; drop schema if exists {name} cascade");
        sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut connection).await?;
        connection.close().await
    }
}

#[cfg(feature = "postgres")]
impl Drop for TestSchema {
    fn drop(&mut self) {
        let (url, name) = (self.url.clone(), self.name.clone());
        // On its own thread and runtime: the test's runtime cannot run a task while this waits.
        let removing = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            runtime.map(|runtime| runtime.block_on(TestSchema::remove(url, name)))
        });
        if !matches!(removing.join(), Ok(Ok(Ok(())))) {
            eprintln!("could not remove the test schema {}", self.name);
        }
    }
}

fn decode<J: Job>(job: &JobRecord) -> J {
    serde_json::from_str(job.payload.get()).unwrap_or_else(|error| {
        panic!("job {}: its payload is not a `{}`: {error}: {}", job.id, J::KIND, job.payload.get())
    })
}

fn parse(value: &serde_json::value::RawValue) -> serde_json::Value {
    serde_json::from_str(value.get()).unwrap_or_default()
}

fn fail(action: &str, error: &crate::Error) -> ! {
    panic!("the test queue could not {action}: {error}")
}
