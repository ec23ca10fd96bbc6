//! The one door. Programs, the API, the CLI and the dashboard reach the queue
//! through [`Client`] and nothing else.
//!
//! What it can do is told along a job's life: `enqueue`, `settle`, `operate` (what
//! operators want of jobs and queues), `inspect` (looking) and `access` (who may
//! call, and what is known of kinds). Recovery and schedules are in modules of
//! their own.

use std::sync::Arc;

use crate::enqueue::lanes::Lanes;
use crate::error::Result;
use crate::store::{Migrated, Store};

mod access;
mod enqueue;
mod inspect;
mod operate;
pub(crate) mod settle;

pub use enqueue::{CallerTransaction, Enqueueing};
pub use operate::{Cancelled, Redriven};
pub use settle::Report;

/// A handle to one queue database. Cheap to clone; clones share the lanes in
/// which concurrent enqueues commit together.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
/// use longshore::{Client, NewJob, Status};
///
/// let client = Client::connect("sqlite::memory:").await?;
/// client.migrate().await?;
/// let job = client.enqueue(NewJob::new("greet", &"Ada")).await?;
/// assert_eq!(client.get(job.id).await?.status, Status::Queued);
/// # Ok(()) }
/// # #[cfg(not(feature = "sqlite"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    store: Arc<dyn Store>,
    lanes: Arc<Lanes>,
}

impl Client {
    /// Connects to `postgres://…` or `sqlite:…`.
    pub async fn connect(url: &str) -> Result<Self> {
        Ok(Client::new(crate::store::open(url).await?))
    }

    /// A client of an engine opened elsewhere.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Client { lanes: Arc::new(Lanes::new(store.clone())), store }
    }

    /// The engine: the verbs that workers use.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Brings the tables to this build's version; does nothing when they are.
    pub async fn migrate(&self) -> Result<Migrated> {
        self.store.migrate().await
    }
}
