//! Reads jobs, counts, ended jobs by minute, failures, workers and queues.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Client;
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, WorkerId};
use crate::rules::lifecycle::State;
use crate::store::{
    Ahead, Count, FailureFilter, FailureRecord, Glance, HistoryFilter, ListFilter, Page, QueueRecord,
    SweepScope, Tallied, WorkerRecord,
};

impl Client {
    /// Reads one job with its history.
    pub async fn get(&self, id: JobId) -> Result<JobRecord> {
        let job = self.store.get(id).await?;
        job.ok_or_else(|| Error::not_found(format!("job {id} does not exist, or is no longer kept")))
    }

    /// Reads a page of jobs, newest first.
    pub async fn list(&self, filter: &ListFilter) -> Result<Page> {
        self.store.list(filter).await
    }

    /// Counts jobs by status, queue and kind.
    pub async fn counts(&self) -> Result<Vec<Count>> {
        self.store.counts().await
    }

    /// Age of the oldest due job, per queue. Queues without a due job are left out.
    pub async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.store.overdue().await
    }

    /// Counts the jobs of the same queue that would be claimed before this waiting job,
    /// by a worker that handles every kind. Examines at most `limit` jobs. Returns `None`
    /// if the job is not waiting.
    ///
    /// ```
    /// # use longshore::{Client, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// let job = client.enqueue(NewJob::new("greet", "Ada")).await?;
    /// client.enqueue(NewJob::new("greet", "Grace")).priority(1).await?;
    /// assert_eq!(client.ahead(job.id, 100).await?, Some(1));
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn ahead(&self, id: JobId, limit: u32) -> Result<Option<u32>> {
        Ok(self.ahead_among(id, None, limit).await?.map(|ahead| ahead.jobs))
    }

    /// Numbers of jobs that ended since then, by minute (older ones by hour), queue, kind
    /// and outcome, oldest first.
    pub async fn tallied(&self, since: DateTime<Utc>) -> Result<Vec<Tallied>> {
        self.history_of_ends(&HistoryFilter::since(since)).await
    }

    /// As [`tallied`](Self::tallied), for some queues or with less detail.
    pub(crate) async fn history_of_ends(&self, filter: &HistoryFilter) -> Result<Vec<Tallied>> {
        self.store.tallied(filter).await
    }

    /// Lists groups of failures, those with the newest failure first. What belongs to one group is decided by its
    /// [fingerprint](crate::Fingerprint).
    pub async fn failures(&self, filter: &FailureFilter) -> Result<Vec<FailureRecord>> {
        self.store.error_groups(filter).await
    }

    /// Lists all workers, newest first. `threshold` overrides each worker's own when
    /// deciding which are stale.
    pub async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>> {
        self.store.workers(threshold).await
    }

    /// Lists the queues that have settings or live jobs.
    pub async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.store.queues().await
    }
}

/// For the API's limits, `explain` and `events`, and for workers of every queue.
#[doc(hidden)]
impl Client {
    /// The workers that a sweep with this scope would declare dead now.
    pub async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>> {
        self.store.presumed_dead(scope).await
    }

    /// The number of waiting jobs of a queue, up to `limit`.
    pub async fn depth(&self, queue: &str, limit: u64) -> Result<u64> {
        self.store.depth(queue, limit).await
    }

    /// The queues with waiting jobs, due or not.
    pub async fn waiting_queues(&self) -> Result<Vec<String>> {
        self.store.waiting_queues().await
    }

    /// The state of a job as the lifecycle rules see it; `None` if it does not exist.
    pub async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.store.locate(id).await
    }

    /// As [`ahead`](Client::ahead), counting only jobs of these kinds (`None`: any).
    pub async fn ahead_among(
        &self,
        id: JobId,
        kinds: Option<&[String]>,
        limit: u32,
    ) -> Result<Option<Ahead>> {
        self.store.ahead(id, kinds, limit).await
    }

    /// Up to `limit` newest jobs, up to `limit` running ones, and `also`, oldest
    /// first, without payloads. Jobs that do not exist are left out.
    pub async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        self.store.glance(limit, also).await
    }
}
