//! The storage contract: what an engine promises, verb by verb, in the order
//! of a job's life. Two engines keep it, and one conformance suite holds them
//! to it.
//!
//! An engine stores moves; it does not choose them. What follows from what is
//! decided in [`lifecycle`](crate::lifecycle), and every move names what it was
//! decided from, so that an engine can refuse one whose ground is gone.
//!
//! The sections of the trait name files: `claim.rs` here has the arguments and
//! results of a claim, `postgres/claim.rs` and `sqlite/claim.rs` store it.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::broadcast;
use uuid::Uuid;

use crate::enqueue::{Enqueued, ValidJob};
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, WorkerId};
use crate::lifecycle::State;
use crate::retry::MAX_DELAY;

mod claim;
pub mod cursor;
mod inspect;
mod kinds;
mod lease;
mod operate;
#[cfg(feature = "postgres")]
pub mod postgres;
mod queues;
mod recover;
mod retain;
mod schedules;
mod settle;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod stats;
mod tokens;
mod workers;

pub use claim::{ClaimRequest, Claimed, Claims, Suspects};
pub use cursor::ClaimCursor;
pub use inspect::{Glance, ListFilter, Page};
pub use kinds::{KindRecord, MAX_SCHEMA, NewKind};
pub use lease::{Fenced, Lease};
pub use operate::{DeadFilter, Operated, Operation};
pub use queues::{QueueChange, QueueRecord};
pub use recover::{Interrupted, Interruptor, SweepScope};
pub use retain::{Retained, Retention};
pub use schedules::{Schedule, Ticking};
pub use settle::{Settled, Settlement};
pub use stats::{Ahead, CheckReport, Count, Tallied};
pub use tokens::{NewToken, Scope, TokenRecord};
pub use workers::{Beat, NewWorker, WorkerRecord};

pub(crate) use claim::shared;
pub(crate) use kinds::by_name;
pub(crate) use settle::{EndedBy, clean, keepable};
pub(crate) use stats::{Tally, add_up, start_of};

/// The newest schema this build knows; both engines count the same numbers.
pub const SCHEMA_VERSION: i64 = 2;

/// Opens the engine that `url` names: `postgres://…` or `sqlite:PATH`
/// (`sqlite::memory:` for tests). Nothing is created or migrated, except that
/// a missing SQLite file is made.
pub async fn open(url: &str) -> Result<Arc<dyn Store>> {
    let scheme = url.split(':').next().unwrap_or_default();
    match scheme {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => return Ok(Arc::new(postgres::PostgresStore::open(url).await?)),
        #[cfg(feature = "sqlite")]
        "sqlite" => return Ok(Arc::new(sqlite::SqliteStore::open(url).await?)),
        _ => {}
    }
    // The rest of the URL may hold a password and is not repeated.
    Err(Error::invalid(
        "url",
        match scheme {
            "postgres" | "postgresql" => {
                "database URL: this build has no Postgres engine; enable the feature `postgres`"
            }
            "sqlite" => "database URL: this build has no SQLite engine; enable the feature `sqlite`",
            _ => "database URL: unknown scheme; use postgres://user@host/database or sqlite:path/to/file.db",
        },
    ))
}

/// Tables of a later build: this one might not see what they hold.
pub(crate) fn newer(found: i64) -> Error {
    Error::schema(format!(
        "the database has schema version {found}, newer than this build's {SCHEMA_VERSION}; upgrade longshore"
    ))
}

/// A database that holds the queue.
///
/// Every verb is one statement or one short transaction. "Now" is always the
/// engine's clock. Batches answer item by item, in the order given.
#[async_trait]
pub trait Store: std::any::Any + Send + Sync + std::fmt::Debug {
    // ---- migrate ----------------------------------------------------------

    /// Brings the tables to [`SCHEMA_VERSION`]; does nothing when they are
    /// there. Safe to run again after being killed, and from several processes
    /// at once. Refuses a schema newer than this build.
    async fn migrate(&self) -> Result<Migrated>;

    /// The version the tables are at; 0 when there are none.
    async fn schema_version(&self) -> Result<i64>;

    /// The engine's clock.
    async fn now(&self) -> Result<DateTime<Utc>>;

    /// Stops the engine's clock at an instant, or lets it run again. For
    /// tests: every process that uses these tables sees the pinned time.
    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()>;

    /// The same tables through a connection of its own, for heartbeats that must
    /// not wait behind other work.
    fn with_own_connection(&self) -> Arc<dyn Store>;

    // ---- enqueue ----------------------------------------------------------

    /// Stores jobs in one commit. A repeated id, a taken idempotency key or a
    /// live unique key is an answer, never an error, and never harms its
    /// neighbours in the batch.
    async fn enqueue(&self, jobs: &[ValidJob], wait: KeyWait) -> Result<Vec<Enqueued>>;

    // ---- wake-ups ---------------------------------------------------------

    /// Notifies subscribers in this process that these queues have due jobs.
    /// Returns whether there is any subscriber. Only `wake.rs` calls it.
    fn notify_local(&self, queues: &[String]) -> bool;

    /// Notifies subscribers in other processes. A hint: it may be lost, and then
    /// polling finds the jobs.
    async fn notify_others(&self, queues: &[String]) -> Result<()>;

    /// Subscribes to the notifications of this and other processes. Subscribe
    /// before claiming: a job enqueued between the two would otherwise wait a full
    /// poll interval.
    async fn subscribe(&self) -> Result<Wakeups>;

    // ---- claim ------------------------------------------------------------

    /// Leases up to `request.limit` due jobs to a live worker, highest
    /// priority first across its queues, then by `run_at`. Paused queues are
    /// left alone, limited queues are never overdrawn, and at most one job
    /// that was interrupted before is among them. A worker that is unknown or
    /// was declared dead gets nothing.
    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims>;

    // ---- lease ------------------------------------------------------------

    /// The claims behind live leases, as [`claim`](Store::claim) gave them, for
    /// workers that keep none in memory; `None` where the lease is not live. Only
    /// `run_at` may differ: when a retry was due is forgotten once it is claimed,
    /// so this is when the job was first asked to run.
    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>>;

    /// Records that the handler of a suspect job is about to begin, so that an
    /// interruption from here on counts. `LeaseLost` if the lease is gone.
    async fn mark_started(&self, lease: &Lease) -> Result<Fenced>;

    /// Replaces the progress shown for running jobs.
    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>>;

    /// Saves a job's checkpoint, which outlives the attempt.
    async fn save_checkpoint(&self, lease: &Lease, data: &RawValue) -> Result<Fenced>;

    /// The newest checkpoint of a job.
    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>>;

    /// Whether this lease is live now.
    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced>;

    // ---- settle -----------------------------------------------------------

    /// Ends leases. Each item is stored only if its lease is live and its
    /// flags are as they were when the move was decided; follow-up jobs are
    /// stored in the same transaction or not at all. An item whose own
    /// (id, lease, worker) was stored before, because the answer was lost,
    /// says `Stored` again.
    ///
    /// An error means that some item could not be stored, say because the
    /// database refused a follow-up. That one has changed nothing, its
    /// neighbours may be stored: to learn which, ask again, one by one.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>>;

    // ---- workers ----------------------------------------------------------

    /// Adds a worker, alive from now on. One that lives already tells by this
    /// what it takes from now on; one declared dead stays so.
    async fn register(&self, worker: &NewWorker) -> Result<()>;

    /// Refreshes a worker and tells it which of the leases it holds are lost
    /// and which it should cancel. A worker declared dead stays dead.
    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat>;

    /// Every live lease that names this worker, by id: how one whose claim's
    /// answer was lost finds out what it holds.
    async fn leases(&self, worker: WorkerId) -> Result<Vec<Lease>>;

    /// Removes a worker that stopped in good order; if leases still name it,
    /// it is declared dead instead and recovery takes them.
    async fn retire(&self, worker: WorkerId) -> Result<()>;

    /// All workers, newest first; `threshold` overrides each worker's own
    /// `stale_after` in deciding who is stale.
    async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>>;

    // ---- recover ----------------------------------------------------------

    /// Declares dead every live worker whose heartbeat is older than
    /// `threshold` or else its own `stale_after`, and forgets dead workers
    /// that no lease names. Returns the newly dead.
    async fn mark_dead(&self, threshold: Option<Duration>) -> Result<Vec<WorkerId>>;

    /// Leases that may be taken from their holders, by id, without locking.
    /// Workers that are stale but not yet declared dead count too, so that a
    /// dry run sees what a sweep would.
    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>>;

    /// Takes leases from their holders. As [`settle`](Store::settle), and
    /// besides, unless the handler hung, only from a worker that is declared
    /// dead or unknown at that moment.
    async fn recover(&self, recoveries: &[(Interruptor, Settlement)]) -> Result<Vec<Settled>>;

    // ---- operate ----------------------------------------------------------

    /// Where a job stands, from one snapshot; `None` if it does not exist.
    async fn locate(&self, id: JobId) -> Result<Option<State>>;

    /// Carries out an operator's move, if the job still stands where `from`
    /// saw it; otherwise says so and changes nothing.
    async fn operate(&self, id: JobId, from: &State, to: &Operation) -> Result<Operated>;

    /// Ids of dead letters, oldest first, after `after`.
    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>>;

    // ---- queues -----------------------------------------------------------

    /// Changes a queue's settings; fields left out stay.
    async fn set_queue(&self, name: &str, change: &QueueChange) -> Result<()>;

    /// Queues that have settings or waiting or running jobs, by name.
    async fn queues(&self) -> Result<Vec<QueueRecord>>;

    // ---- inspect ----------------------------------------------------------

    /// One job with its history.
    async fn get(&self, id: JobId) -> Result<Option<JobRecord>>;

    /// A page of jobs, newest first. Examines a bounded number of rows, so a
    /// page may be short and still have a next one.
    async fn list(&self, filter: &ListFilter) -> Result<Page>;

    /// The `most` newest jobs, as many of those that run, and these besides,
    /// without what they carry, oldest first. What does not exist is left out.
    async fn glance(&self, most: u32, also: &[JobId]) -> Result<Vec<Glance>>;

    // ---- stats ------------------------------------------------------------

    /// How many jobs are in each status, by queue and kind.
    async fn counts(&self) -> Result<Vec<Count>>;

    /// For how long the job that has been due the longest has been, by queue;
    /// of queues where one is due. Costs a probe for each priority, not for each
    /// job. Interrupted jobs, which wait apart, are left out.
    async fn overdue(&self) -> Result<Vec<(String, Duration)>>;

    /// How many jobs of the same queue and of these kinds (`None`: of any) would be
    /// claimed before this waiting one, of those that are due when it is; `None` if
    /// it does not wait. Looks at no more than `most` jobs, whether they count or
    /// not.
    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, most: u32) -> Result<Option<Ahead>>;

    /// What ended since then, by minute (or by hour where upkeep has already
    /// added minutes up), queue, kind and outcome, oldest first. Begins with the
    /// whole minute or hour that `since` falls into. Bounded by the tallies,
    /// never reads jobs.
    async fn tallied(&self, since: DateTime<Utc>) -> Result<Vec<Tallied>>;

    // ---- check ------------------------------------------------------------

    /// Proves, in one snapshot, that every job is in exactly one place, that
    /// keys belong to live jobs and that the tallies agree with the rows.
    async fn check(&self) -> Result<CheckReport>;

    // ---- schedules --------------------------------------------------------

    /// Creates a schedule, or gives the one of that name another line, policy
    /// or template. One that exists keeps its last tick and whether it is
    /// paused, and, unless the line or the zone differs, its next tick: many
    /// processes may put the same schedule at any time and disturb nothing.
    /// Returns what is stored.
    async fn put_schedule(&self, schedule: &Schedule) -> Result<Schedule>;

    /// All schedules by name.
    async fn schedules(&self) -> Result<Vec<Schedule>>;

    /// Holds a schedule's ticks back or lets them come again; says whether
    /// there is one of that name.
    async fn set_ticking(&self, name: &str, ticking: Ticking) -> Result<bool>;

    /// Removes a schedule; says whether there was one.
    async fn remove_schedule(&self, name: &str) -> Result<bool>;

    /// Moves a schedule on from the tick it was seen with to the one at
    /// `next` and enqueues `jobs`, in one transaction, if it is not paused and
    /// nobody has moved or changed it since. `fired` is the newest tick with a
    /// job among these, or none if they were all let go. Exactly one caller
    /// gets an answer for a tick, the others get `None`.
    async fn fire(
        &self,
        seen: &Schedule,
        next: DateTime<Utc>,
        fired: Option<DateTime<Utc>>,
        jobs: &[ValidJob],
    ) -> Result<Option<Vec<Enqueued>>>;

    // ---- retain -----------------------------------------------------------

    /// Removes finished jobs that are past their time, walking by id from
    /// where the last call stopped; looks at up to `step` rows.
    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained>;

    /// Adds up old tallies so that counting stays fast; up to `step` rows.
    async fn fold_tallies(&self, step: u32) -> Result<u64>;

    // ---- tokens -----------------------------------------------------------

    /// Stores a token. The same one again changes nothing; an id or a hash that
    /// belongs to another is a conflict.
    async fn put_token(&self, token: &NewToken) -> Result<()>;

    /// The live token of this hash: neither revoked nor expired by the engine's
    /// clock.
    async fn token(&self, hash: &[u8; 32]) -> Result<Option<TokenRecord>>;

    /// All tokens, newest first, dead ones included.
    async fn tokens(&self) -> Result<Vec<TokenRecord>>;

    /// Ends a token for good; says whether there is one of that id. One that was
    /// revoked before stays revoked since then.
    async fn revoke_token(&self, id: Uuid) -> Result<bool>;

    // ---- kinds ------------------------------------------------------------

    /// Creates or replaces what is known of kinds. What is left out stays: a
    /// worker that only says that it handles a kind must not wipe its schema.
    async fn put_kinds(&self, kinds: &[NewKind]) -> Result<()>;

    /// All kinds by name.
    async fn kinds(&self) -> Result<Vec<KindRecord>>;

    /// Forgets a kind; says whether there was one.
    async fn remove_kind(&self, name: &str) -> Result<bool>;
}

/// How long an enqueue waits for a key that another client's open transaction
/// holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWait {
    /// Seconds: the batch is stored whole or not at all.
    Long,
    /// A fraction of a second: the caller can split the batch and try again.
    Short,
}

impl KeyWait {
    /// For a caller that stores the jobs one by one if the batch fails.
    pub(crate) fn for_splittable_batch(jobs: usize) -> Self {
        if jobs > 1 { KeyWait::Short } else { KeyWait::Long }
    }
}

/// What [`Store::migrate`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Migrated {
    /// The version found.
    pub from: i64,
    /// The version left.
    pub to: i64,
}

/// Wake-ups as they arrive. Lost ones are no harm: polling finds the work.
#[derive(Debug)]
pub struct Wakeups(pub(crate) broadcast::Receiver<String>);

impl Wakeups {
    /// Sent in place of a queue's name when every queue should be looked at.
    pub(crate) const EVERYWHERE: &'static str = "";

    /// Waits for the next one; the name of the queue, or `None` when some were
    /// missed or the source is gone for now and every queue should be looked at.
    pub async fn next(&mut self) -> Option<String> {
        match self.0.recv().await {
            Ok(queue) if queue == Wakeups::EVERYWHERE => None,
            Ok(queue) => Some(queue),
            Err(broadcast::error::RecvError::Lagged(_)) => None,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }

    /// Forgets those that have arrived: whoever looks now sees what they are
    /// about.
    #[cfg(feature = "worker")]
    pub(crate) fn forget_arrived(&mut self) {
        while let Ok(_) | Err(broadcast::error::TryRecvError::Lagged(_)) = self.0.try_recv() {}
    }
}

/// A duration as both engines store it and reckon with it: within ten years,
/// past which nothing differs.
pub(crate) fn millis(duration: Duration) -> i64 {
    duration.min(MAX_DELAY).as_millis().max(1) as i64
}
