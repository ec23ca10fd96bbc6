//! Looking: jobs, counts, what has ended, workers, queues, and the proof that nothing is lost.

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Client;
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord};
use crate::lifecycle::State;
use crate::store::{Ahead, CheckReport, Count, Glance, ListFilter, Page, QueueRecord, Tallied, WorkerRecord};

impl Client {
    /// One job with its history.
    pub async fn get(&self, id: JobId) -> Result<JobRecord> {
        let job = self.store.get(id).await?;
        job.ok_or_else(|| Error::not_found(format!("job {id} does not exist, or is no longer kept")))
    }

    /// A page of jobs, newest first.
    pub async fn list(&self, filter: &ListFilter) -> Result<Page> {
        self.store.list(filter).await
    }

    /// How many jobs are in each status, by queue and kind.
    pub async fn counts(&self) -> Result<Vec<Count>> {
        self.store.counts().await
    }

    /// For how long the job that has been due the longest has been, by queue; of
    /// queues where one is due.
    pub async fn overdue(&self) -> Result<Vec<(String, Duration)>> {
        self.store.overdue().await
    }

    /// How many jobs of the same queue would be claimed before this waiting one
    /// by a worker that takes any kind, of those that are due when it is; looks at
    /// no more than `most`. `None` if it does not wait.
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
    pub async fn ahead(&self, id: JobId, most: u32) -> Result<Option<u32>> {
        Ok(self.ahead_among(id, None, most).await?.map(|ahead| ahead.jobs))
    }

    /// What ended since then, by minute (by hour where minutes have been added
    /// up), queue, kind and outcome, oldest first.
    pub async fn tallied(&self, since: DateTime<Utc>) -> Result<Vec<Tallied>> {
        self.store.tallied(since).await
    }

    /// Proves that every job is in exactly one place.
    pub async fn check(&self) -> Result<CheckReport> {
        self.store.check().await
    }

    /// All workers, newest first; `threshold` overrides each worker's own in
    /// deciding who is stale.
    pub async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>> {
        self.store.workers(threshold).await
    }

    /// Queues that have settings or live jobs.
    pub async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.store.queues().await
    }
}

/// What the API's `explain` and `events` read.
#[doc(hidden)]
impl Client {
    /// The state of a job as the rules see it; `None` if it does not exist.
    pub async fn locate(&self, id: JobId) -> Result<Option<State>> {
        self.store.locate(id).await
    }

    /// As [`ahead`](Client::ahead), counting only jobs of these kinds (`None`: any).
    pub async fn ahead_among(&self, id: JobId, kinds: Option<&[String]>, most: u32) -> Result<Option<Ahead>> {
        self.store.ahead(id, kinds, most).await
    }

    /// Up to `limit` newest jobs, up to `limit` running ones, and `also`, oldest
    /// first, without payloads. Jobs that do not exist are left out.
    pub async fn glance(&self, limit: u32, also: &[JobId]) -> Result<Vec<Glance>> {
        self.store.glance(limit, also).await
    }
}
