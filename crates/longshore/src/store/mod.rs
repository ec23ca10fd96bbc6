//! The storage contract: what an engine promises, verb by verb, in the order
//! of a job's life. Two engines keep it, and one conformance suite holds them
//! to it.
//!
//! An engine stores moves; it does not choose them. What follows from what is
//! decided in [`lifecycle`], and every move names what it was
//! decided from, so that an engine can refuse one whose ground is gone.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde_json::value::RawValue;
use tokio::sync::broadcast;

use crate::enqueue::{Enqueued, MAX_PAYLOAD, Options, ValidEdit, ValidJob, check_json, check_name};
use crate::error::{Error, Result};
use crate::job::{JobId, JobRecord, Outcome, Status, WorkerId};
use crate::lifecycle::{self, Ending, Flags, Leave, Running, State};
use crate::retry::{MAX_DELAY, RetryPolicy};

pub mod cursor;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use cursor::ClaimCursor;

/// The newest schema this build knows; both engines count the same numbers.
pub const SCHEMA_VERSION: i64 = 1;

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
    // ---- the ground ------------------------------------------------------

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

    // ---- enqueue ---------------------------------------------------------

    /// Stores jobs in one commit. A repeated id, a taken idempotency key or a
    /// live unique key is an answer, never an error, and never harms its
    /// neighbours in the batch.
    async fn enqueue(&self, jobs: &[ValidJob]) -> Result<Vec<Enqueued>>;

    /// Tells subscribers, in this and other processes, that these queues have
    /// new work. A hint: it may be lost, and polling finds the work anyway.
    async fn wake(&self, queues: &[String]) -> Result<()>;

    /// Listens for [`wake`](Store::wake). Subscribe before claiming: a job
    /// enqueued between the two would otherwise wait a full poll interval.
    async fn subscribe(&self) -> Result<Wakeups>;

    // ---- claim -----------------------------------------------------------

    /// Leases up to `request.limit` due jobs to a live worker, highest
    /// priority first across its queues, then by `run_at`. Paused queues are
    /// left alone, limited queues are never overdrawn, and at most one job
    /// that was interrupted before is among them. A worker that is unknown or
    /// was declared dead gets nothing.
    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims>;

    /// Records that the handler of a suspect job is about to begin, so that an
    /// interruption from here on counts. `LeaseLost` if the lease is gone.
    async fn mark_started(&self, lease: &Lease) -> Result<Fenced>;

    // ---- while it runs ---------------------------------------------------

    /// Replaces the progress shown for running jobs.
    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>>;

    /// Saves a job's checkpoint, which outlives the attempt.
    async fn save_checkpoint(&self, lease: &Lease, data: &RawValue) -> Result<Fenced>;

    /// The newest checkpoint of a job.
    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>>;

    /// Whether this lease is live now.
    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced>;

    // ---- settle ----------------------------------------------------------

    /// Ends leases. Each item is stored only if its lease is live and its
    /// flags are as they were when the move was decided; follow-up jobs are
    /// stored in the same transaction or not at all. An item whose own
    /// (id, lease, worker) was stored before, because the answer was lost,
    /// says `Stored` again.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>>;

    // ---- workers ---------------------------------------------------------

    /// Adds a worker, alive from now on.
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

    // ---- recovery --------------------------------------------------------

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

    // ---- operate ---------------------------------------------------------

    /// Where a job stands, from one snapshot; `None` if it does not exist.
    async fn locate(&self, id: JobId) -> Result<Option<State>>;

    /// Carries out an operator's move, if the job still stands where `from`
    /// saw it; otherwise says so and changes nothing.
    async fn operate(&self, id: JobId, from: &State, to: &Operation) -> Result<Operated>;

    /// Ids of dead letters, oldest first, after `after`.
    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>>;

    // ---- queues ----------------------------------------------------------

    /// Changes a queue's settings; fields left out stay.
    async fn set_queue(&self, name: &str, change: &QueueChange) -> Result<()>;

    /// Queues that have settings or waiting or running jobs, by name.
    async fn queues(&self) -> Result<Vec<QueueRecord>>;

    // ---- inspect ---------------------------------------------------------

    /// One job with its history.
    async fn get(&self, id: JobId) -> Result<Option<JobRecord>>;

    /// A page of jobs, newest first. Examines a bounded number of rows, so a
    /// page may be short and still have a next one.
    async fn list(&self, filter: &ListFilter) -> Result<Page>;

    /// How many jobs are in each status, by queue and kind.
    async fn counts(&self) -> Result<Vec<Count>>;

    /// Proves, in one snapshot, that every job is in exactly one place, that
    /// keys belong to live jobs and that the tallies agree with the rows.
    async fn check(&self) -> Result<CheckReport>;

    // ---- schedules -------------------------------------------------------

    /// Creates a schedule or replaces the one of that name.
    async fn put_schedule(&self, schedule: &Schedule) -> Result<()>;

    /// All schedules by name.
    async fn schedules(&self) -> Result<Vec<Schedule>>;

    /// Removes a schedule; says whether there was one.
    async fn remove_schedule(&self, name: &str) -> Result<bool>;

    /// Moves a schedule from the tick at `expected` to the one at `next` and
    /// enqueues `jobs`, in one transaction, if nobody else has and the
    /// schedule is not paused. Exactly one caller gets `true` for a tick.
    async fn fire(
        &self,
        name: &str,
        expected: DateTime<Utc>,
        next: DateTime<Utc>,
        jobs: &[ValidJob],
    ) -> Result<bool>;

    // ---- retain ----------------------------------------------------------

    /// Removes finished jobs that are past their time, walking by id from
    /// where the last call stopped; looks at up to `step` rows.
    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained>;

    /// Adds up old tallies so that counting stays fast; up to `step` rows.
    async fn fold_tallies(&self, step: u32) -> Result<u64>;
}

/// What [`Store::migrate`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Migrated {
    /// The version found.
    pub from: i64,
    /// The version left.
    pub to: i64,
}

/// The right to run one attempt of one job: the fence. A claim makes it; from
/// then on every word about the attempt names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct Lease {
    /// The job.
    pub id: JobId,
    /// Which lease of the job; rises by one with every claim, for ever.
    pub lease_no: i32,
    /// Who holds it.
    pub worker: WorkerId,
}

/// Whether a lease was still live when something was done in its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Fenced {
    /// It was; the thing is done.
    Held,
    /// It was not; nothing changed.
    LeaseLost,
}

/// What a worker asks for.
#[derive(Clone, Debug)]
pub struct ClaimRequest {
    /// Who asks.
    pub worker: WorkerId,
    /// From which queues.
    pub queues: Vec<String>,
    /// Which kinds it has handlers for; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// Only jobs with at least one of these flags; empty means any job.
    pub accept_flags: Vec<String>,
    /// No job with any of these flags.
    pub forbid_flags: Vec<String>,
    /// How many at most.
    pub limit: u32,
    /// Whether one suspect may be among them.
    pub suspects: Suspects,
}

impl ClaimRequest {
    /// Any kind from the default queue, one suspect allowed.
    pub fn new(worker: WorkerId, limit: u32) -> Self {
        ClaimRequest {
            worker,
            queues: vec![crate::enqueue::DEFAULT_QUEUE.into()],
            kinds: None,
            accept_flags: Vec::new(),
            forbid_flags: Vec::new(),
            limit,
            suspects: Suspects::One,
        }
    }
}

/// Whether a claim may include a job that was interrupted before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suspects {
    /// One of them.
    One,
    /// None: this process is running one already.
    Leave,
}

/// What a claim brought.
#[derive(Debug)]
pub struct Claims {
    /// The leased jobs, in the order in which they should start.
    pub jobs: Vec<Claimed>,
    /// Whether there may be more right now: ask again without waiting.
    pub more: bool,
}

/// How leases end that nobody is there to run: released, uncharged.
pub(crate) fn releases(claims: &Claims) -> Vec<Settlement> {
    let release = |job: &Claimed| Settlement {
        lease: job.lease(),
        seen: Some(Flags::default()),
        leave: lifecycle::settle(&job.running(), Ending::Released),
        follow_ups: Vec::new(),
    };
    claims.jobs.iter().map(release).collect()
}

/// A leased job: all that is needed to run it. Only a claim makes one.
#[derive(Debug)]
pub struct Claimed {
    pub(crate) lease: Lease,
    pub(crate) kind: Arc<str>,
    pub(crate) queue: Arc<str>,
    pub(crate) priority: i16,
    pub(crate) payload: String,
    pub(crate) attempt: u16,
    pub(crate) max_attempts: u16,
    pub(crate) interruptions: u16,
    pub(crate) timeout: Option<Duration>,
    pub(crate) flags: Vec<String>,
    pub(crate) options: Options,
    pub(crate) run_at: DateTime<Utc>,
    pub(crate) claimed_at: DateTime<Utc>,
}

impl Claimed {
    /// The lease to settle under.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// Which handler runs it.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// The queue it came from.
    pub fn queue(&self) -> &str {
        &self.queue
    }

    /// Its priority.
    pub fn priority(&self) -> i16 {
        self.priority
    }

    /// The payload as JSON text.
    pub fn payload(&self) -> &str {
        &self.payload
    }

    /// Which attempt this is; 1 is the first.
    pub fn attempt(&self) -> u16 {
        self.attempt
    }

    /// How many it may have.
    pub fn max_attempts(&self) -> u16 {
        self.max_attempts
    }

    /// How often a worker died holding it; above 0 it is a suspect.
    pub fn interruptions(&self) -> u16 {
        self.interruptions
    }

    /// How long this attempt may take.
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout
    }

    /// Labels that workers and recovery act on.
    pub fn flags(&self) -> &[String] {
        &self.flags
    }

    /// Labels for people.
    pub fn tags(&self) -> &[String] {
        &self.options.tags
    }

    /// W3C trace context of the enqueuer.
    pub fn trace(&self) -> Option<&str> {
        self.options.trace.as_deref()
    }

    /// When it was due.
    pub fn run_at(&self) -> DateTime<Utc> {
        self.run_at
    }

    /// When the lease was taken.
    pub fn claimed_at(&self) -> DateTime<Utc> {
        self.claimed_at
    }

    /// How long the next attempt waits if this one fails; `None` if the job's
    /// policy allows no other.
    pub fn backoff(&self) -> Option<Duration> {
        backoff(self.options.retry.as_ref(), self.lease.id, self.attempt)
    }

    /// The row in `running`, seen by a holder whose handler has begun.
    pub(crate) fn running(&self) -> Running {
        Running {
            lease_no: self.lease.lease_no,
            worker: self.lease.worker,
            attempt: self.attempt,
            max_attempts: self.max_attempts,
            interruptions: self.interruptions,
            started: true,
            flags: Flags::default(),
        }
    }
}

/// The delay after a failed attempt, seeded by the job so that it is the same
/// whoever works it out.
pub(crate) fn backoff(policy: Option<&RetryPolicy>, id: JobId, attempt: u16) -> Option<Duration> {
    let (_, seed) = id.0.as_u64_pair();
    match policy {
        Some(policy) => policy.delay(attempt.into(), seed),
        None => RetryPolicy::default().delay(attempt.into(), seed),
    }
}

/// A duration as both engines store it and reckon with it: within ten years,
/// past which nothing differs.
/// The text, sharing memory with the last one if that was the same: the jobs of
/// a claim are mostly of few kinds.
pub(crate) fn shared(last: &mut Arc<str>, text: &str) -> Arc<str> {
    if **last != *text {
        *last = text.into();
    }
    last.clone()
}

pub(crate) fn millis(duration: Duration) -> i64 {
    duration.min(MAX_DELAY).as_millis().max(1) as i64
}

/// The longest error text that is kept, in bytes.
pub(crate) const MAX_ERROR: usize = 64 * 1024;

/// Text from a handler, as both engines can store it, without NUL and cut:
/// content can never break settling.
pub(crate) fn clean(text: &str) -> Cow<'_, str> {
    let cut = &text[..text.floor_char_boundary(MAX_ERROR)];
    match cut.contains('\0') {
        true => Cow::Owned(cut.replace('\0', "")),
        false => Cow::Borrowed(cut),
    }
}

/// A handler's result, as it may be stored; one that cannot be is replaced by
/// the reason, because the success itself must not be lost.
pub(crate) fn keepable(result: Box<RawValue>) -> Box<RawValue> {
    match check_json("result", result.get(), MAX_PAYLOAD) {
        Ok(()) => result,
        Err(error) => {
            let reason = serde_json::json!({ "not_kept": error.to_string() });
            RawValue::from_string(reason.to_string()).unwrap_or(result)
        }
    }
}

/// The end of one lease, and what it was decided from.
#[derive(Clone, Debug)]
pub struct Settlement {
    /// Whose end it is.
    pub lease: Lease,
    /// The flags it was decided from; `None` if they make no difference.
    pub seen: Option<Flags>,
    /// What becomes of the job.
    pub leave: Leave,
    /// Jobs that exist only if this is stored.
    pub follow_ups: Vec<ValidJob>,
}

/// What became of a settlement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is in the database, now or since an earlier try.
    Stored,
    /// The lease lives, but these flags have been raised: decide again.
    Flagged(Flags),
    /// Somebody else owns the job now, or it has ended; nothing changed.
    LeaseLost,
}

/// A worker process that begins.
#[derive(Clone, Debug)]
pub struct NewWorker {
    /// This boot's id.
    pub id: WorkerId,
    /// A name for people.
    pub name: String,
    /// The queues it claims from.
    pub queues: Vec<String>,
    /// The kinds it handles; `None` means any.
    pub kinds: Option<Vec<String>>,
    /// How many jobs it runs at once.
    pub concurrency: u32,
    /// Without a heartbeat for this long it is dead.
    pub stale_after: Duration,
}

impl NewWorker {
    /// A worker of the default queue with the default threshold of 60 s.
    pub fn new(name: impl Into<String>) -> Self {
        NewWorker {
            id: WorkerId::new(),
            name: name.into(),
            queues: vec![crate::enqueue::DEFAULT_QUEUE.into()],
            kinds: None,
            concurrency: 4,
            stale_after: Duration::from_secs(60),
        }
    }
}

/// A worker as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerRecord {
    /// This boot's id.
    pub id: WorkerId,
    /// A name for people.
    pub name: String,
    /// The queues it claims from.
    pub queues: Vec<String>,
    /// The kinds it handles; absent means any.
    pub kinds: Option<Vec<String>>,
    /// How many jobs it runs at once.
    pub concurrency: u32,
    /// Its threshold.
    #[serde(rename = "stale_after_seconds", serialize_with = "in_seconds")]
    pub stale_after: Duration,
    /// When it registered.
    pub started_at: DateTime<Utc>,
    /// Its last sign of life.
    pub heartbeat_at: DateTime<Utc>,
    /// When it was declared dead.
    pub dead_at: Option<DateTime<Utc>>,
    /// Whether its heartbeat is older than the threshold.
    pub stale: bool,
    /// How many leases name it.
    pub running: u64,
}

fn in_seconds<S: serde::Serializer>(duration: &Duration, out: S) -> Result<S::Ok, S::Error> {
    out.serialize_f64(duration.as_secs_f64())
}

/// The answer to a heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Beat {
    /// Alive; mind these.
    Alive {
        /// Held leases that are no longer live.
        lost: Vec<Lease>,
        /// Held leases whose handlers should stop.
        cancel: Vec<Lease>,
    },
    /// Declared dead, or unknown: stop everything and register anew.
    Dead,
}

/// Which leases a sweep looks at.
#[derive(Clone, Debug)]
pub struct SweepScope {
    /// Overrides every worker's own threshold.
    pub threshold: Option<Duration>,
    /// The threshold for leases whose worker has no row, and the margin past
    /// a job's timeout after which its handler counts as hung.
    pub orphan_after: Duration,
    /// Jobs with one of these flags get `resilient_factor` times the threshold.
    pub resilient_flags: Vec<String>,
    /// See there.
    pub resilient_factor: u32,
    /// Only leases of jobs after this id.
    pub after: Option<JobId>,
    /// How many at most.
    pub limit: u32,
}

impl Default for SweepScope {
    fn default() -> Self {
        SweepScope {
            threshold: None,
            orphan_after: Duration::from_secs(60),
            resilient_flags: vec!["infrastructure_resilient".into()],
            resilient_factor: 3,
            after: None,
            limit: 1000,
        }
    }
}

/// A lease that may be taken from its holder.
#[derive(Clone, Debug)]
pub struct Interrupted {
    /// The job.
    pub id: JobId,
    /// Its kind.
    pub kind: String,
    /// Its queue.
    pub queue: String,
    /// Its flags.
    pub flags: Vec<String>,
    /// Its retry policy, when it is not the default.
    pub retry: Option<RetryPolicy>,
    /// The lease, its holder and what has been asked of it.
    pub running: Running,
    /// When the lease was taken.
    pub claimed_at: DateTime<Utc>,
    /// Why it may be taken.
    pub why: Interruptor,
}

impl Interrupted {
    /// The lease.
    pub fn lease(&self) -> Lease {
        Lease { id: self.id, lease_no: self.running.lease_no, worker: self.running.worker }
    }

    /// How long the next attempt waits if this one is charged.
    pub fn backoff(&self) -> Option<Duration> {
        backoff(self.retry.as_ref(), self.id, self.running.attempt)
    }
}

/// Why a lease may be taken from its holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Interruptor {
    /// The worker's heartbeat is older than its threshold.
    DeadWorker,
    /// No such worker is known.
    UnknownWorker,
    /// The worker lives, but the job's timeout and the threshold have passed.
    HungHandler,
}

/// An operator's move, as [`lifecycle`] decided it.
#[derive(Clone, Debug)]
pub enum Operation {
    /// A waiting job ends as cancelled with these attempts charged.
    Cancel {
        /// See there.
        attempts: u16,
    },
    /// A running job is told to stop.
    RequestCancel,
    /// A finished job waits again with a fresh budget.
    Reopen,
    /// A waiting job is due now.
    RunNow,
    /// A waiting job gets other contents.
    Rewrite(ValidEdit),
    /// A finished job is removed.
    Remove,
}

/// What became of an operator's move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operated {
    /// Done.
    Done,
    /// The job has moved since it was located: look again.
    Moved,
    /// The job's unique key belongs to another live job.
    KeyTaken(JobId),
}

/// Which dead letters.
#[derive(Clone, Debug, Default)]
pub struct DeadFilter {
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// After this id.
    pub after: Option<JobId>,
    /// How many at most.
    pub limit: u32,
}

/// What to change about a queue.
#[derive(Clone, Debug, Default)]
pub struct QueueChange {
    /// Whether claims leave it alone.
    pub paused: Option<bool>,
    /// How many of its jobs may run at once, in all processes together; the
    /// inner `None` lifts the limit.
    pub limit: Option<Option<u32>>,
}

/// A queue as operators see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueueRecord {
    /// Its name.
    pub name: String,
    /// Whether claims leave it alone.
    pub paused: bool,
    /// How many of its jobs may run at once.
    pub limit: Option<u32>,
    /// How many wait.
    pub waiting: u64,
    /// Whether `waiting` is an estimate, because there are very many.
    pub waiting_estimated: bool,
    /// How many run.
    pub running: u64,
}

/// Which jobs to list.
#[derive(Clone, Debug)]
pub struct ListFilter {
    /// In this status.
    pub status: Option<Status>,
    /// Of this kind.
    pub kind: Option<String>,
    /// Of this queue.
    pub queue: Option<String>,
    /// With this tag.
    pub tag: Option<String>,
    /// With this idempotency key.
    pub idempotency_key: Option<String>,
    /// With this unique key (live jobs only).
    pub unique_key: Option<String>,
    /// Older than this job.
    pub cursor: Option<JobId>,
    /// Past this many matches, up to 10,000.
    pub offset: u32,
    /// How many, 1 to 200.
    pub limit: u32,
}

impl ListFilter {
    /// How far `offset` reaches; past it, use `cursor`.
    pub const MAX_OFFSET: u32 = 10_000;
    /// How many jobs a page holds at most.
    pub const MAX_LIMIT: u32 = 200;
    /// How many rows a page examines at most.
    pub const MAX_EXAMINED: u32 = 20_000;
}

impl ListFilter {
    pub(crate) fn validate(&self) -> Result<()> {
        if self.offset > ListFilter::MAX_OFFSET {
            return Err(Error::invalid(
                "offset",
                format!("offset: {} is past {}; use `cursor` to go on", self.offset, ListFilter::MAX_OFFSET),
            ));
        }
        Ok(())
    }

    /// The page's size, within its bounds.
    pub(crate) fn page_size(&self) -> u32 {
        self.limit.clamp(1, ListFilter::MAX_LIMIT)
    }
}

impl Default for ListFilter {
    fn default() -> Self {
        ListFilter {
            status: None,
            kind: None,
            queue: None,
            tag: None,
            idempotency_key: None,
            unique_key: None,
            cursor: None,
            offset: 0,
            limit: 50,
        }
    }
}

/// One page of a list.
#[derive(Clone, Debug, Serialize)]
pub struct Page {
    /// The jobs, newest first.
    pub jobs: Vec<JobRecord>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<JobId>,
}

/// How many jobs of a queue and kind are in a status.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Count {
    /// The status.
    pub status: Status,
    /// The queue.
    pub queue: String,
    /// The kind.
    pub kind: String,
    /// How many.
    pub jobs: u64,
    /// Whether that is an estimate, because very many wait.
    pub estimated: bool,
}

/// What [`Store::check`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct CheckReport {
    /// How many jobs were looked at.
    pub jobs: u64,
    /// What is wrong, one sentence each; empty when all is well. Lists stop at
    /// a hundred of a kind.
    pub problems: Vec<String>,
}

/// A stored schedule. What the expression means is the scheduler's business;
/// the engine keeps the next tick and gives it to one caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Schedule {
    /// Its name.
    pub name: String,
    /// The cron line.
    pub expression: String,
    /// An IANA time zone.
    pub zone: String,
    /// What happens to missed ticks, as the scheduler wrote it down.
    pub missed: String,
    /// The job each tick enqueues, as the scheduler wrote it down: JSON text.
    pub template: String,
    /// Whether ticks are held back.
    pub paused: bool,
    /// The next tick.
    pub next_at: DateTime<Utc>,
    /// The last tick that fired.
    pub last_at: Option<DateTime<Utc>>,
}

impl Schedule {
    pub(crate) fn validate(&self) -> Result<()> {
        check_name("name", &self.name)?;
        check_name("expression", &self.expression)?;
        check_name("zone", &self.zone)?;
        check_name("missed", &self.missed)?;
        check_json("template", &self.template, MAX_PAYLOAD)
    }
}

/// How long finished jobs are kept; `None` keeps them for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// Successes.
    pub succeeded: Option<Duration>,
    /// Cancelled jobs.
    pub cancelled: Option<Duration>,
    /// Dead letters.
    pub failed_permanent: Option<Duration>,
}

impl Retention {
    /// How long jobs with this outcome are kept.
    pub fn of(&self, outcome: Outcome) -> Option<Duration> {
        match outcome {
            Outcome::Succeeded => self.succeeded,
            Outcome::Cancelled => self.cancelled,
            Outcome::FailedPermanent => self.failed_permanent,
        }
    }
}

impl Default for Retention {
    fn default() -> Self {
        const DAY: Duration = Duration::from_secs(24 * 60 * 60);
        Retention { succeeded: Some(7 * DAY), cancelled: Some(7 * DAY), failed_permanent: Some(90 * DAY) }
    }
}

/// What one step of retention did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retained {
    /// How many jobs were removed.
    pub removed: u64,
    /// Whether the walk has reached its end and will begin anew.
    pub done: bool,
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
}
