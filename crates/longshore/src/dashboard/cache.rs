//! Data of pages, kept for one second, so that ten open tabs cost the database as much as one.
//!
//! Pages read through [`Data`] only. Each method names what it read, and calls with the same name share one
//! read.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::OnceCell;
use tokio::time::Instant;

use crate::api::explain::{self, Explanation};
use crate::client::Client;
use crate::error::Result;
use crate::job::{FlowId, JobId, JobRecord};
use crate::store::{
    Count, Durability, FailureFilter, FailureRecord, FlowFilter, FlowRecord, FoundGroup, Glance, GroupRecord,
    HistoryFilter, KindRecord, ListFilter, Measured, Page, QueueRecord, Schedule, StepRecord, Tallied,
    TaskRecord, TokenRecord, WorkerRecord,
};

/// How long data is kept.
const KEPT: Duration = Duration::from_secs(1);
/// A read that takes longer than this is not waited for by later requests.
const MAX_READ: Duration = Duration::from_secs(10);

/// What pages have read within the last second.
#[derive(Default)]
pub(crate) struct Cache(Mutex<HashMap<String, Slot>>);

#[derive(Clone)]
struct Slot {
    started: Instant,
    value: Arc<OnceCell<Arc<dyn Any + Send + Sync>>>,
}

impl Slot {
    fn new() -> Self {
        Slot { started: Instant::now(), value: Arc::default() }
    }

    fn is_current(&self) -> bool {
        let age = self.started.elapsed();
        if self.value.initialized() { age < KEPT } else { age < MAX_READ }
    }
}

/// Whether a page may show what another request has just read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Age {
    /// Data may be up to a second old.
    Kept,
    /// After an action: the page must show its effect.
    Fresh,
}

impl Cache {
    fn slot(&self, key: &str, age: Age) -> Slot {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        slots.retain(|_, slot| slot.is_current());
        match slots.get(key) {
            Some(slot) if age == Age::Kept => slot.clone(),
            _ => {
                let slot = Slot::new();
                slots.insert(key.to_owned(), slot.clone());
                slot
            }
        }
    }

    /// The value under this key; reads it if nobody has within the last second.
    async fn get<T, F>(&self, key: &str, age: Age, read: impl FnOnce() -> F) -> Result<Arc<T>>
    where
        T: Send + Sync + 'static,
        F: Future<Output = Result<T>>,
    {
        let slot = self.slot(key, age);
        let mut read = Some(read);
        let value = slot.value.get_or_try_init(|| {
            // Called at most once per call of `get`.
            let read = read.take().map(|read| read());
            async move {
                match read {
                    Some(read) => Ok::<Arc<dyn Any + Send + Sync>, crate::Error>(Arc::new(read.await?)),
                    None => Err(crate::Error::internal("a page was read twice")),
                }
            }
        });
        let value = value.await?.clone();
        value.downcast().map_err(|_| crate::Error::internal(format!("`{key}` names two kinds of data")))
    }
}

/// What pages read.
pub(super) struct Data {
    pub(super) client: Client,
    pub(super) cache: Arc<Cache>,
    pub(super) age: Age,
}

/// Defines a method that reads through the cache. Its arguments are part of the key.
macro_rules! reads {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) -> $result:ty = $read:expr;)*) => {
        impl Data {
            $($(#[$doc])*
            pub(super) async fn $name(&self, $($arg: $type),*) -> Result<Arc<$result>> {
                let key = format!(concat!(stringify!($name), "{:?}"), ($(&$arg,)*));
                let client = &self.client;
                let read = $read;
                self.cache.get(&key, self.age, || async move { read(client, $($arg),*).await }).await
            })*
        }
    };
}

reads! {
    now() -> DateTime<Utc> = async |client: &Client| client.now().await;
    counts() -> Vec<Count> = async |client: &Client| client.counts().await;
    overdue() -> Vec<(String, Duration)> = async |client: &Client| client.overdue().await;
    queues() -> Vec<QueueRecord> = async |client: &Client| client.queues().await;
    workers() -> Vec<WorkerRecord> = async |client: &Client| client.workers(None).await;
    schedules() -> Vec<Schedule> = async |client: &Client| client.schedules().await;
    kinds() -> Vec<KindRecord> = async |client: &Client| client.kinds().await;
    tokens() -> Vec<TokenRecord> = async |client: &Client| client.tokens().await;
    durability() -> Durability = async |client: &Client| client.durability().await;
    schema_version() -> i64 = async |client: &Client| client.schema_version().await;
    measured(filter: &HistoryFilter) -> Vec<Measured> =
        async |client: &Client, filter: &HistoryFilter| client.history_of_measures(filter).await;
    failures(filter: &FailureFilter) -> Vec<FailureRecord> =
        async |client: &Client, filter: &FailureFilter| client.failures(filter).await;
    tallied(filter: &HistoryFilter) -> Vec<Tallied> =
        async |client: &Client, filter: &HistoryFilter| client.history_of_ends(filter).await;
    jobs(filter: &ListFilter) -> Page = async |client: &Client, filter: &ListFilter| client.list(filter).await;
    job(id: JobId) -> JobRecord = async |client: &Client, id| client.get(id).await;
    steps(id: JobId) -> Vec<StepRecord> = async |client: &Client, id| client.steps(id).await;
    glance(id: JobId) -> Vec<Glance> = async |client: &Client, id| client.glance(0, &[id]).await;
    groups(queue: &str, after: &str) -> Vec<GroupRecord> =
        async |client: &Client, queue: &str, after: &str| client.groups(queue, after, GROUPS).await;
    group(queue: &str, name: &str) -> Option<GroupRecord> =
        async |client: &Client, queue: &str, name: &str| client.group(queue, name).await;
    find_groups(text: &str, queues: Option<&[String]>) -> Vec<FoundGroup> =
        async |client: &Client, text: &str, queues: Option<&[String]>| client.find_groups(text, queues, MAX_FOUND).await;
    flows(filter: &FlowFilter) -> Vec<FlowRecord> =
        async |client: &Client, filter: &FlowFilter| client.flows(filter).await;
    flow(id: FlowId) -> FlowRecord = async |client: &Client, id| client.flow(id).await;
    tasks(id: FlowId, after: Option<JobId>, limit: u32) -> Vec<TaskRecord> =
        async |client: &Client, id, after, limit| client.tasks(id, after, limit).await;
}

impl Data {
    /// Why a job is or is not running, for a caller who sees these queues. The key is not the whole job, which
    /// may be large.
    pub(super) async fn explanation(
        &self,
        queues: Option<&[String]>,
        job: &JobRecord,
    ) -> Result<Arc<Explanation>> {
        let key = format!("explanation{}{}{}{queues:?}", job.id, job.lease_no, job.status);
        self.cache.get(&key, self.age, || explain::explain_job(&self.client, queues, job)).await
    }
}

/// How many groups a search by name shows at most.
const MAX_FOUND: u32 = 20;
/// The number of groups per page.
pub(super) const GROUPS: u32 = 100;

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_within_a_second_share_one_read_and_an_action_reads_again() {
        let (cache, reads) = (Cache::default(), AtomicU32::new(0));
        let read = || async { Ok(reads.fetch_add(1, Ordering::Relaxed)) };
        let kept = async || *cache.get("jobs", Age::Kept, read).await.unwrap();
        let (one, other) = tokio::join!(kept(), kept());
        assert_eq!((one, other, kept().await), (0, 0, 0));
        assert_eq!(*cache.get("jobs", Age::Fresh, read).await.unwrap(), 1);
        assert_eq!(kept().await, 1, "later requests see what the fresh one read");
        tokio::time::advance(KEPT).await;
        assert_eq!(kept().await, 2, "it is kept for a second");
    }

    #[tokio::test]
    async fn a_failed_read_is_not_kept() {
        let cache = Cache::default();
        let failed =
            cache.get::<u8, _>("jobs", Age::Kept, || async { Err(crate::Error::unavailable("down")) });
        assert!(failed.await.is_err());
        assert_eq!(*cache.get("jobs", Age::Kept, || async { Ok(7_u8) }).await.unwrap(), 7);
    }
}
