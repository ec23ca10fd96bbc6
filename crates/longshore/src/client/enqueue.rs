//! Enqueue: one job in a shared commit, many jobs at once, or jobs in the caller's own
//! transaction.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tracing::Instrument;

use super::Client;
use super::lanes::StoredRequest;
use crate::error::Result;
use crate::job::{JobId, JobRecord};
use crate::rules::enqueue::{Enqueued, NewJob, UniqueMode, ValidJob};
use crate::rules::retry::RetryPolicy;
use crate::store::{CallerTransaction, KeyWait};

impl Client {
    /// Enqueues one job. When the returned value is awaited, the job is stored durably.
    /// Concurrent callers share a commit. The call has a tracing span `enqueue` with the job's
    /// id, kind and queue. With the feature `otel`, the span of the run is its child.
    ///
    /// ```
    /// # use longshore::{Client, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// client.enqueue(NewJob::new("greet", "Ada")).priority(10).queue("mail").await?;
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn enqueue(&self, job: impl Into<NewJob>) -> Enqueueing<'_> {
        Enqueueing { client: self, job: job.into() }
    }

    /// Stores many jobs in one commit, all or none. Returns one result per job, in the
    /// order given.
    pub async fn enqueue_many<J: Into<NewJob>>(
        &self,
        jobs: impl IntoIterator<Item = J>,
    ) -> Result<Vec<Enqueued>> {
        let span = batch_span();
        let jobs = span.in_scope(|| validate_all(jobs))?;
        span.record("jobs", jobs.len());
        let storing = async {
            self.check_jobs(&jobs).await?;
            self.store_all(&jobs).await
        };
        storing.instrument(span).await
    }

    /// As [`enqueue`](Self::enqueue), for a job whose payload has been checked.
    pub(crate) fn store_one(&self, job: ValidJob) -> impl Future<Output = Result<StoredRequest>> + use<> {
        self.lanes.enqueue(job)
    }

    /// As [`enqueue_many`](Self::enqueue_many), for jobs whose payloads have been
    /// checked.
    pub(crate) async fn store_all(&self, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        // Most keys are free, so try first without one of the few connections for long waits.
        let done = match self.store.enqueue(jobs, KeyWait::Short).await {
            Err(error) if error.is_locked() => self.store.enqueue(jobs, KeyWait::Long).await?,
            done => done?,
        };
        self.notifier.notify_enqueued(jobs);
        Ok(done.results)
    }

    /// Stores jobs in the caller's own transaction: they exist if and only if it
    /// commits.
    ///
    /// ```no_run
    /// # async fn example(client: longshore::Client, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use longshore::NewJob;
    ///
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("insert into orders (id) values (7)").execute(&mut *tx).await?;
    /// client.enqueue_in(&mut tx, [NewJob::new("confirm_order", &7)]).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn enqueue_in(
        &self,
        transaction: impl CallerTransaction,
        jobs: impl IntoIterator<Item = impl Into<NewJob>>,
    ) -> Result<Vec<Enqueued>> {
        let span = batch_span();
        let jobs = span.in_scope(|| validate_all(jobs))?;
        span.record("jobs", jobs.len());
        let storing = async {
            self.check_jobs(&jobs).await?;
            transaction.enqueue(&*self.store, &jobs).await
        };
        storing.instrument(span).await
    }

    /// Waits until workers have been notified of every job that is due so far, and flows have followed the
    /// jobs that this client has ended. For programs that exit right afterwards. Without it, polling
    /// finds the jobs, and upkeep follows the flows.
    pub async fn flush(&self) {
        // First, because it may release jobs.
        self.finish_advancing().await;
        self.notifier.flush().await;
    }
}

impl Enqueued {
    /// Reads the whole job. To get it from the enqueue itself, which costs no further query
    /// for a new job, use [`returning_job`](crate::Enqueueing::returning_job).
    pub async fn job(&self, client: &Client) -> Result<JobRecord> {
        client.get(self.id).await
    }
}

/// One job to enqueue. Await it to store the job.
#[must_use = "nothing is stored until this is awaited"]
pub struct Enqueueing<'a> {
    client: &'a Client,
    job: NewJob,
}

impl<'a> Enqueueing<'a> {
    /// Stores the job in the caller's own transaction instead.
    ///
    /// ```no_run
    /// # async fn example(client: longshore::Client, pool: sqlx::PgPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use longshore::NewJob;
    ///
    /// let mut tx = pool.begin().await?;
    /// sqlx::query("insert into orders (id) values (7)").execute(&mut *tx).await?;
    /// client.enqueue(NewJob::new("confirm_order", &7)).queue("mail").in_tx(&mut tx).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub async fn in_tx(self, transaction: impl CallerTransaction) -> Result<Enqueued> {
        let mut results = self.client.enqueue_in(transaction, [self.job]).await?;
        Ok(results.remove(0))
    }

    /// Stores the job and returns all of it, as [`Client::get`] does. A new job costs no
    /// further query; an existing one is read.
    ///
    /// ```
    /// # use longshore::{Client, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let (enqueued, job) = client.enqueue(NewJob::new("greet", "Ada")).returning_job().await?;
    /// assert_eq!((job.id, job.kind.as_str()), (enqueued.id, "greet"));
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn returning_job(self) -> Result<(Enqueued, JobRecord)> {
        let client = self.client;
        let stored = self.store().await?;
        let enqueued = stored.enqueued;
        match stored.into_created_job() {
            Some(job) => Ok((enqueued, job)),
            None => Ok((enqueued, client.get(enqueued.id).await?)),
        }
    }

    async fn store(self) -> Result<StoredRequest> {
        let span = self.job.span();
        let stored = async move {
            let job = self.job.validate()?;
            self.client.check_job(&job.kind, Some(&job.queue), &job.payload).await?;
            self.client.store_one(job).await
        };
        stored.instrument(span).await
    }

    /// Changes anything that [`NewJob`] has a method for.
    pub fn with(self, change: impl FnOnce(NewJob) -> NewJob) -> Self {
        Enqueueing { job: change(self.job), ..self }
    }

    /// See [`NewJob::id`].
    pub fn id(self, id: JobId) -> Self {
        self.with(|job| job.id(id))
    }

    /// See [`NewJob::queue`].
    pub fn queue(self, queue: impl Into<String>) -> Self {
        self.with(|job| job.queue(queue))
    }

    /// See [`NewJob::priority`].
    pub fn priority(self, priority: i64) -> Self {
        self.with(|job| job.priority(priority))
    }

    /// See [`NewJob::max_attempts`].
    pub fn max_attempts(self, max_attempts: i64) -> Self {
        self.with(|job| job.max_attempts(max_attempts))
    }

    /// See [`NewJob::run_at`].
    pub fn run_at(self, at: DateTime<Utc>) -> Self {
        self.with(|job| job.run_at(at))
    }

    /// See [`NewJob::delay`].
    pub fn delay(self, delay: Duration) -> Self {
        self.with(|job| job.delay(delay))
    }

    /// See [`NewJob::idempotency_key`].
    pub fn idempotency_key(self, key: impl Into<String>) -> Self {
        self.with(|job| job.idempotency_key(key))
    }

    /// See [`NewJob::unique_key`].
    pub fn unique_key(self, key: impl Into<String>, mode: UniqueMode) -> Self {
        self.with(|job| job.unique_key(key, mode))
    }

    /// See [`NewJob::timeout`].
    pub fn timeout(self, timeout: Option<Duration>) -> Self {
        self.with(|job| job.timeout(timeout))
    }

    /// See [`NewJob::retry`].
    pub fn retry(self, policy: RetryPolicy) -> Self {
        self.with(|job| job.retry(policy))
    }

    /// See [`NewJob::flags`].
    pub fn flags<S: Into<String>>(self, flags: impl IntoIterator<Item = S>) -> Self {
        self.with(|job| job.flags(flags))
    }

    /// See [`NewJob::tags`].
    pub fn tags<S: Into<String>>(self, tags: impl IntoIterator<Item = S>) -> Self {
        self.with(|job| job.tags(tags))
    }

    /// See [`NewJob::context`].
    pub fn context(self, context: impl Into<String>) -> Self {
        self.with(|job| job.context(context))
    }
}

impl<'a> IntoFuture for Enqueueing<'a> {
    type Output = Result<Enqueued>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Enqueued>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { Ok(self.store().await?.enqueued) })
    }
}

/// The span of an enqueue of several jobs. Each of them gets its trace context.
pub(crate) fn batch_span() -> tracing::Span {
    tracing::info_span!("enqueue", otel.kind = "producer", jobs = tracing::field::Empty)
}

/// Checks a batch. An error names the invalid job by its index.
fn validate_all(jobs: impl IntoIterator<Item = impl Into<NewJob>>) -> Result<Vec<ValidJob>> {
    let checked = jobs
        .into_iter()
        .enumerate()
        .map(|(i, job)| job.into().validate().map_err(|error| error.in_item("jobs", i)));
    checked.collect()
}
