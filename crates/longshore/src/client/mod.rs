//! The entry point. Programs, workers, the API and the command reach the queue through
//! [`Client`] only. Callers without the library use the SQL functions of the Postgres
//! migration instead.
//!
//! | File | Owns |
//! |---|---|
//! | `enqueue`, `lanes`, `held_keys` | storing new jobs; group commit; keys that another transaction holds |
//! | `lease` | what workers do with leases: claim, heartbeat, progress, release |
//! | `settle` | how attempts end |
//! | `operate` | operators' commands on jobs and queues |
//! | `operations` | changes of many jobs, step by step |
//! | `events`, `waits` | events that jobs wait for |
//! | `graph`, `flows`, `children` | the builder of flows; graphs of jobs; what a job spawns and joins |
//! | `schedules` | schedules, and one job per tick |
//! | `recovery` | jobs of dead workers |
//! | `wake` | notifying workers |
//! | `job_log`, `job_metrics` | log lines and metrics of attempts |
//! | `history` | what is measured for charts |
//! | `inspect` | reading jobs, numbers, workers and queues |
//! | `check` | the consistency check, durability |
//! | `upkeep` | rounds of retention, and of folding tallies, notes and measures |
//! | `kinds`, `tokens` | registered kinds and the check of new jobs; API tokens |

use std::sync::Arc;

use chrono::{DateTime, Utc};

use crate::client::job_log::JobLog;
use crate::client::lanes::Lanes;
use crate::client::wake::Notifier;
use crate::error::Result;
use crate::store::{Migrated, Store};

mod check;
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) mod children;
mod enqueue;
mod events;
mod flows;
pub(crate) mod graph;
mod held_keys;
mod history;
mod inspect;
pub(crate) mod job_log;
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) mod job_metrics;
pub(crate) mod kinds;
mod lanes;
mod lease;
mod operate;
mod operations;
pub(crate) mod recovery;
#[cfg(feature = "cron")]
pub mod schedules;
pub(crate) mod settle;
mod tokens;
mod upkeep;
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) mod waits;
pub(crate) mod wake;

pub use enqueue::Enqueueing;
#[cfg(feature = "api")]
pub(crate) use enqueue::batch_span;
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) use flows::JoinState;
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) use flows::members;
pub use flows::{CancelledFlow, RetriedFlow};
pub use kinds::{CheckPayload, UnknownKinds};
pub use operate::{Cancelled, Redriven};
#[cfg(feature = "api")]
pub(crate) use operations::{Target, also_in};
pub use settle::Report;

/// A handle to one queue database. Cheap to clone: clones share connections and commit
/// concurrent enqueues together.
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
    notifier: Notifier,
    kind_rules: Arc<kinds::KindRules>,
    pub(crate) job_log: Arc<JobLog>,
    advancer: Arc<flows::Advancer>,
    measures: Arc<history::Measures>,
}

impl Client {
    /// Connects to `postgres://user@host/database` or `sqlite:path/to/file.db`
    /// (`sqlite::memory:` for tests). A missing SQLite file is created; call
    /// [`migrate`](Self::migrate) to create the tables.
    ///
    /// A Postgres URL may set `schema`, `max_connections`, `notify` (`on` or `off`) and
    /// `durability` (`full` or `relaxed`):
    /// `postgres://user@host/database?schema=jobs&max_connections=20`. It may name several
    /// hosts, of which the first one that accepts writes is used:
    /// `postgres://user@one:5432,two:5432/database`.
    pub async fn connect(url: &str) -> Result<Self> {
        Ok(Client::new(crate::store::open(url).await?))
    }

    /// A client of an engine that is already open.
    #[doc(hidden)]
    pub fn new(store: Arc<dyn Store>) -> Self {
        let notifier = Notifier::new(store.clone());
        let lanes = Arc::new(Lanes::new(store.clone(), notifier.clone()));
        Client {
            store,
            lanes,
            notifier,
            kind_rules: Arc::default(),
            job_log: Arc::default(),
            advancer: Arc::default(),
            measures: Arc::default(),
        }
    }

    /// The engine, for the project's own tests and benchmarks.
    #[doc(hidden)]
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The notifier. Every code path that makes a job due notifies workers through it.
    pub(crate) fn notifier(&self) -> &Notifier {
        &self.notifier
    }

    /// Brings the tables to this build's version. Does nothing if they are at it.
    pub async fn migrate(&self) -> Result<Migrated> {
        self.store.migrate(self.store.migrations()).await
    }

    /// The version of the tables; 0 if there are none.
    pub async fn schema_version(&self) -> Result<i64> {
        self.store.schema_version().await
    }

    /// The database's clock, which decides what is due, stale or expired.
    pub async fn now(&self) -> Result<DateTime<Utc>> {
        self.store.now().await
    }
}
