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
use crate::enqueue::NewJob;
use crate::job::{JobRecord, Status};
use crate::store::ListFilter;
use crate::worker::{Builder, Job, Summary};

/// A queue for one test. It dereferences to a [`Client`]. Its own methods panic on errors, because
/// they run in tests.
pub struct Queue {
    client: Client,
    now: Mutex<Option<DateTime<Utc>>>,
    #[cfg(feature = "postgres")]
    _schema: Option<TestSchema>,
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
            _schema: None,
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
        Queue { client, now: Mutex::default(), _schema: Some(schema) }
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
        let now = *self.now.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let Some(now) = now else {
            panic!("the queue uses the real clock; call `stop_clock` first to advance it")
        };
        self.set_clock(now + by).await;
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

    /// Runs all due jobs until none is left.
    pub async fn drain(&self, worker: impl FnOnce(Client) -> Builder) -> Summary {
        let worker =
            worker(self.client.clone()).build().unwrap_or_else(|error| fail("build the worker", &error));
        worker.drain().await.unwrap_or_else(|error| fail("drain", &error))
    }

    async fn waiting(&self, kind: &str) -> Vec<JobRecord> {
        let mut found = Vec::new();
        for status in [Status::Queued, Status::Retrying] {
            let mut filter =
                ListFilter { status: Some(status), kind: Some(kind.to_owned()), ..ListFilter::default() };
            loop {
                let page = self.client.list(&filter).await.unwrap_or_else(|error| fail("list", &error));
                found.extend(page.jobs);
                filter.cursor = page.next;
                if filter.cursor.is_none() {
                    break;
                }
            }
        }
        found.sort_by_key(|job| std::cmp::Reverse(job.id));
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

fn fail(action: &str, error: &crate::Error) -> ! {
    panic!("the test queue could not {action}: {error}")
}
