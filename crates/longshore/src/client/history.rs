//! What this process measures for charts: how long jobs waited, and failed attempts. It is counted in memory and stored
//! every few seconds, so that claims and settles write nothing more. A crash loses these few seconds, never a job.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};

use super::Client;
use crate::error::Result;
use crate::job::Status;
use crate::store::{Claimed, Count, HistoryFilter, Measured, NewMeasure, Store, What, bucket_of};

/// How long numbers are collected before they are stored.
const COLLECTED_FOR: Duration = Duration::from_secs(10);
/// The maximum number of different measures collected at a time; others are left out. There are so many only
/// if each job has a new name for its queue or kind.
const MAX_COLLECTED: usize = 10_000;

/// The numbers that were not stored yet.
#[derive(Debug, Default)]
pub(crate) struct Measures(Mutex<HashMap<Measure, i64>>);

type Measure = (What, Arc<str>, Arc<str>, i16);

impl Measures {
    /// Returns whether these are the first numbers since the others were taken.
    fn add(&self, numbers: impl IntoIterator<Item = (Measure, i64)>) -> bool {
        let mut collected = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let was_empty = collected.is_empty();
        for (measure, number) in numbers {
            if let Some(sum) = collected.get_mut(&measure) {
                *sum += number;
            } else if collected.len() < MAX_COLLECTED {
                collected.insert(measure, number);
            }
        }
        was_empty && !collected.is_empty()
    }

    fn take(&self) -> HashMap<Measure, i64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Client {
    /// Counts how long these jobs have waited since they were due.
    pub(super) fn measure_waits(&self, claimed: &[Claimed]) {
        let wait = |job: &Claimed| {
            let bucket = bucket_of(job.claimed_at - job.run_at);
            ((What::Waited, job.queue.clone(), job.kind.clone(), bucket), 1)
        };
        self.collect(claimed.iter().map(wait));
    }

    /// Counts failed attempts, by queue and kind.
    pub(crate) fn measure_failures<'a>(&self, failed: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let failure = |(queue, kind): (&str, &str)| ((What::Failed, queue.into(), kind.into(), 0), 1);
        self.collect(failed.into_iter().map(failure));
    }

    fn collect(&self, numbers: impl IntoIterator<Item = (Measure, i64)>) {
        collect(&self.store, &self.measures, numbers);
    }

    /// Stores what was collected.
    #[doc(hidden)]
    pub async fn store_measures(&self) {
        store_collected(&self.store, &self.measures).await;
    }

    /// Stores the depth of each queue and the age of its oldest due job, unless another process has done so
    /// in this minute. The values of all queues together have an empty queue name. A queue without a value
    /// has no waiting job.
    #[doc(hidden)]
    pub async fn store_samples(&self, counts: &[Count], overdue: &[(String, Duration)]) -> Result<bool> {
        let mut depths = HashMap::<&str, i64>::from([("", 0)]);
        for count in counts.iter().filter(|count| matches!(count.status, Status::Queued | Status::Retrying)) {
            for queue in ["", count.queue.as_str()] {
                *depths.entry(queue).or_default() += count.jobs as i64;
            }
        }
        let mut ages = HashMap::<&str, i64>::from([("", 0)]);
        for (queue, age) in overdue {
            for queue in ["", queue.as_str()] {
                let oldest = ages.entry(queue).or_default();
                *oldest = (*oldest).max(age.as_millis() as i64);
            }
        }
        let sample = |what, (queue, value): (&str, i64)| NewMeasure {
            what,
            queue: queue.to_owned(),
            kind: String::new(),
            bucket: 0,
            value,
        };
        let depths = depths.into_iter().map(|depth| sample(What::Depth, depth));
        let samples: Vec<_> = depths.chain(ages.into_iter().map(|age| sample(What::Overdue, age))).collect();
        self.store.put_samples(&samples).await
    }

    /// What was measured since then: waiting times, failed attempts, depths of queues and ages of their oldest due
    /// jobs, by minute (older ones by hour), oldest first. It is kept for eight days.
    pub async fn measured(&self, since: DateTime<Utc>) -> Result<Vec<Measured>> {
        self.history_of_measures(&HistoryFilter::since(since)).await
    }

    /// As [`measured`](Self::measured), for some queues or with less detail.
    pub(crate) async fn history_of_measures(&self, filter: &HistoryFilter) -> Result<Vec<Measured>> {
        self.store.measured(filter).await
    }
}

/// Collects numbers, and stores them later. Does not keep the connections of the engine open until then.
fn collect(
    store: &Arc<dyn Store>,
    measures: &Arc<Measures>,
    numbers: impl IntoIterator<Item = (Measure, i64)>,
) {
    if !measures.add(numbers) {
        return;
    }
    let (store, measures) = (Arc::downgrade(store), measures.clone());
    tokio::spawn(async move {
        tokio::time::sleep(COLLECTED_FOR).await;
        if let Some(store) = store.upgrade() {
            store_collected(&store, &measures).await;
        }
    });
}

/// Stores what was collected. If that fails, collects the numbers again, to store them later.
async fn store_collected(store: &Arc<dyn Store>, measures: &Arc<Measures>) {
    let collected = measures.take();
    if collected.is_empty() {
        return;
    }
    let new_measure = |((what, queue, kind, bucket), value): (&Measure, &i64)| NewMeasure {
        what: *what,
        queue: queue.to_string(),
        kind: kind.to_string(),
        bucket: *bucket,
        value: *value,
    };
    let new: Vec<NewMeasure> = collected.iter().map(new_measure).collect();
    if let Err(error) = store.put_measures(&new).await {
        tracing::debug!(%error, "could not store what was measured; trying again later");
        collect(store, measures, collected);
    }
}
