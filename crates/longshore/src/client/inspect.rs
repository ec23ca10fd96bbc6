//! Looking: jobs, counts, workers, queues, and the proof that nothing is lost.

use std::time::Duration;

use super::Client;
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord};
use crate::store::{CheckReport, Count, ListFilter, Page, QueueRecord, WorkerRecord};

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
