//! The storage contract: the operations that every engine implements, in the order
//! of a job's life. There are two engines, Postgres and SQLite, and one conformance
//! suite that runs against both.
//!
//! An engine stores transitions; it does not choose them.
//! [`lifecycle`](crate::rules::lifecycle) decides what happens to a job. Every transition
//! names the state it was decided from, and the engine refuses it if the job is no
//! longer in that state.
//!
//! Most procedures are written once: their files have the trait of the area, its arguments
//! and results, and the statements, which run on both engines through the [layer](db). The
//! sections of the trait here name the others: `postgres/claim.rs` and `sqlite/claim.rs`
//! store a claim, and `claim.rs` in this folder has its arguments and results. A few
//! types that belong to no file of their own are here, such as `KeyWait`.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use uuid::Uuid;

use crate::BoxFuture;
use crate::error::{Error, Result};
use crate::job::{FlowId, JobId, WorkerId};
use crate::rules::enqueue::ValidJob;
use crate::rules::lifecycle::State;

mod check;
mod claim;
pub mod cursor;
mod db;
mod error_groups;
mod events;
mod flows;
mod groups;
mod history;
mod inspect;
mod kinds;
mod lease;
mod migrate;
mod moves;
mod notices;
mod operate;
mod operations;
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
mod steps;
mod tokens;
mod transaction;
mod upkeep;
mod workers;

pub use crate::rules::enqueue::EnqueuedBatch;
pub use check::{CheckReport, Durability, Problem};
pub use claim::{ClaimRequest, Claimed, Claims, CronOrigin, Suspects};
pub use cursor::ClaimCursor;
pub use error_groups::{ErrorGroups, FailureFilter, FailureRecord};
#[cfg(feature = "sqlite")]
pub(crate) use events::RETENTION_DAYS;
pub use events::{Delivered, Emitted, EventPlace, EventRecord, MAX_EVENT};
pub(crate) use flows::warn_of_refused_flow;
pub use flows::{
    Added, Advanced, CancelledMembers, FlowFilter, FlowRecord, FlowStatus, LinkRecord, NewChildren, NewFlow,
    NewLink, NewMember, ParentRecord, Pending, PutFlow, RetriedMembers, Spawned, TaskRecord,
};
pub(crate) use groups::next_start;
pub use groups::{FoundGroup, GroupChange, GroupRecord, GroupSettings, PlaceInLine};
pub(crate) use history::bucket_of;
pub use history::{Detail, History, HistoryFilter, Measured, NewMeasure, What};
pub use inspect::{Glance, ListFilter, Lists, Page, Payloads};
#[cfg(feature = "api")]
pub(crate) use kinds::TOO_MANY_KINDS;
pub use kinds::{KindFilter, KindQueues, KindRecord, Kinds, NewKind, Schemas};
pub use lease::{Fenced, Lease};
pub(crate) use migrate::{Applied, Scripts, older_workers_live};
pub use migrate::{Migrated, Migration, SCHEMA_VERSION};
pub use notices::{CancelNotices, EventNotices, Notice, Wakeups};
pub use operate::{DeadFilter, Operated, Operation};
pub use operations::{
    Action, Executor, JobFilter, NewOperation, OperationFilter, OperationRecord, OperationState,
    OperationStep, Operations, Selection, TakenOperation,
};
pub use queues::{QueueChange, QueueRecord, QueueSettings};
pub use recover::{INFRASTRUCTURE_RESILIENT_FLAG, Interrupted, Interruptor, Recovered, SweepScope};
pub use retain::{Retained, Retention};
pub use schedules::{Schedule, Schedules, Ticked, Ticking};
pub use settle::{EndedBy, MAX_HISTORY, Settled, Settlement};
pub use stats::{Ahead, Count, Tallied};
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) use steps::check_journal;
pub(crate) use steps::journals_that_fit;
pub use steps::{Journaled, MAX_STEP_VALUE, NewStep, SavedWork, StepRecord, StepState};
pub use tokens::{MAX_SESSIONS, NewSession, NewToken, Scope, TokenRecord, Tokens};
pub use transaction::CallerTransaction;
pub use workers::{Beat, LiveLease, NewWorker, Registration, WorkerRecord, Workers};

pub(crate) use claim::shared;
pub(crate) use notices::NoticeSender;
#[cfg(feature = "postgres")]
pub(crate) use notices::WeakNoticeSender;
pub(crate) use recover::warn_of_refused_worker;
pub(crate) use settle::{clean, failure_of, storable_result};
pub(crate) use stats::{Tally, add_up, in_order, start_of};

/// Opens the database that `url` names: `postgres://…` or `sqlite:PATH`
/// (`sqlite::memory:` for tests). Creates an SQLite file that does not exist, but no
/// tables: call [`Store::migrate`] for those.
pub async fn open(url: &str) -> Result<Arc<dyn Store>> {
    open_boxed(url).await
}

/// Returns a boxed future, so that the engines are compiled here and not in the crate that
/// opens a database.
#[inline(never)]
fn open_boxed(url: &str) -> BoxFuture<'_, Result<Arc<dyn Store>>> {
    Box::pin(open_engine(url))
}

async fn open_engine(url: &str) -> Result<Arc<dyn Store>> {
    let scheme = url.split(':').next().unwrap_or_default();
    match scheme {
        #[cfg(feature = "postgres")]
        "postgres" | "postgresql" => return Ok(Arc::new(postgres::PostgresStore::open(url).await?)),
        #[cfg(feature = "sqlite")]
        "sqlite" => return Ok(Arc::new(sqlite::SqliteStore::open(url).await?)),
        _ => {}
    }
    // The message does not repeat the URL, which may contain a password.
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

/// A database that holds the queue.
///
/// Every operation is one statement or one short transaction. "Now" always means the
/// engine's clock. An operation on a batch returns one result per item, in the order
/// of the items.
#[async_trait]
pub trait Store:
    ErrorGroups
    + GroupSettings
    + History
    + Kinds
    + Lists
    + Operations
    + QueueSettings
    + Schedules
    + Tokens
    + Workers
    + std::any::Any
    + Send
    + Sync
    + std::fmt::Debug
{
    // ---- migrate ----------------------------------------------------------

    /// The migrations of this engine.
    fn migrations(&self) -> &'static [Migration];

    /// Runs the migrations that the tables still need and returns the versions before and
    /// after. It can be interrupted and run again, and several processes can run it at the
    /// same time. Fails if the tables are newer than the migrations, or made by another revision.
    async fn migrate(&self, migrations: &'static [Migration]) -> Result<Migrated>;

    /// Returns the version of the tables, or 0 if there are none.
    async fn schema_version(&self) -> Result<i64>;

    /// Returns the time on the engine's clock.
    async fn now(&self) -> Result<DateTime<Utc>>;

    /// Stops the engine's clock at `at`; `None` makes it run again. For tests: every
    /// process that uses these tables sees the pinned time.
    async fn pin_clock(&self, at: Option<DateTime<Utc>>) -> Result<()>;

    /// Returns a store for the same tables with its own connection, for
    /// heartbeats, which must not wait behind other operations.
    fn with_own_connection(&self) -> Arc<dyn Store>;

    // ---- enqueue ----------------------------------------------------------

    /// Stores jobs in one commit and returns, per job, whether it was created, already
    /// existed or replaced the contents of a waiting job. A repeated id, a taken
    /// idempotency key or a live unique key is a result, not an error, and does not
    /// affect the other jobs of the batch. If a unique key makes a request part of another
    /// job, the request's idempotency key, and the id of a replacement, return that job for
    /// as long as it is kept.
    async fn enqueue(&self, jobs: &[ValidJob], wait: KeyWait) -> Result<EnqueuedBatch>;

    // ---- wake-ups ---------------------------------------------------------

    /// Notifies subscribers in this process that queues have due jobs or that jobs of
    /// workers are to be cancelled. Returns whether there is any subscriber. Only the
    /// module `wake` calls it, which limits the rate of notifications.
    fn notify_local(&self, notices: &[Notice]) -> bool;

    /// Notifies subscribers in other processes. A hint: it may be lost, and then
    /// polling finds the jobs, and heartbeats return the cancels.
    async fn notify_others(&self, notices: &[Notice]) -> Result<()>;

    /// Subscribes to the notifications of due jobs, from this and other processes.
    /// Subscribe before claiming: a job enqueued between the two would otherwise wait a
    /// full poll interval.
    async fn subscribe(&self) -> Result<Wakeups>;

    /// Subscribes to the notifications of cancels. Read [`cancels`](Store::cancels)
    /// once after subscribing: an earlier notification is not received.
    async fn subscribe_to_cancels(&self) -> Result<CancelNotices>;

    /// Subscribes to the notifications of events that were emitted in SQL.
    async fn subscribe_to_events(&self) -> Result<EventNotices>;

    // ---- claim ------------------------------------------------------------

    /// Leases up to `request.limit` due jobs to a live worker and returns them,
    /// ordered by priority across the worker's queues (highest first), then by
    /// `run_at`. Takes nothing below the requested priority or from paused queues,
    /// never exceeds the limit of a queue, and takes at most one job that was
    /// interrupted before. Returns no jobs to a worker that is unknown or was declared
    /// dead.
    async fn claim(&self, request: &ClaimRequest, cursor: &mut ClaimCursor) -> Result<Claims>;

    // ---- lease ------------------------------------------------------------

    /// Returns the claim behind each lease, as [`claim`](Store::claim) returned it,
    /// for callers that do not keep claims in memory; `None` if the lease is not
    /// live. Only `run_at` may differ: the due time of a retry is deleted when the
    /// job is claimed, so this is the time the job was enqueued for.
    async fn claims(&self, leases: &[Lease]) -> Result<Vec<Option<Claimed>>>;

    /// Records that the handler of a suspect job is about to start, so that later
    /// interruptions of this attempt count.
    async fn mark_started(&self, lease: &Lease) -> Result<Fenced>;

    /// Replaces the progress shown for running jobs.
    async fn progress(&self, reports: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>>;

    /// Saves the checkpoints of running jobs. They are kept when the attempts end. The last one of each lease
    /// counts.
    async fn save_checkpoints(&self, checkpoints: &[(Lease, Box<RawValue>)]) -> Result<Vec<Fenced>>;

    /// Returns the newest checkpoint of a job.
    async fn checkpoint(&self, id: JobId) -> Result<Option<Box<RawValue>>>;

    /// Returns whether a lease is live now.
    async fn assert_lease(&self, lease: &Lease) -> Result<Fenced>;

    // ---- steps ------------------------------------------------------------

    /// Returns the journaled steps of a job, ordered by name.
    async fn steps(&self, id: JobId) -> Result<Vec<StepRecord>>;

    /// Returns what earlier attempts of jobs saved, in the order of the ids. Together, the steps have
    /// at most `max_bytes`; those of the other jobs are left out.
    async fn saved_work(&self, ids: &[JobId], max_bytes: usize) -> Result<Vec<SavedWork>>;

    /// Returns how large the journal of a job is, and its steps with these names.
    async fn journaled(&self, id: JobId, names: &[String]) -> Result<Journaled>;

    /// Journals steps that are done, each under its lease. From then on, the attempts and
    /// interruptions of the job count from this attempt. A step that is done already keeps
    /// its value, so the call may be repeated when its reply was lost.
    async fn save_steps(&self, steps: &[NewStep]) -> Result<Vec<Fenced>>;

    // ---- settle -----------------------------------------------------------

    /// Ends leases. An item is stored only if its lease is live and the job's flags
    /// are those the item was decided from. Follow-up jobs are stored in the same
    /// transaction or not at all. The call may be repeated when its reply was lost:
    /// an item that was stored before, under the same id, lease number and worker,
    /// returns `Stored` again. The exception is a requeue without a history entry,
    /// which leaves no row to find: its repetition returns `LeaseLost` and changes
    /// nothing.
    ///
    /// A job that is suspended is stored together with its waits. It is due at once if one
    /// of its events has been emitted, even at the same moment.
    ///
    /// An error means that at least one item could not be stored, for example because
    /// the database refused a follow-up job. That item has changed nothing; the
    /// others may be stored. To learn which, settle the items one by one.
    async fn settle(&self, settlements: &[Settlement]) -> Result<Vec<Settled>>;

    // ---- workers ----------------------------------------------------------

    /// Refreshes a worker's heartbeat. Returns which of the leases it holds are lost
    /// and which jobs it must cancel. A worker that was declared dead stays dead.
    async fn beat(&self, worker: WorkerId, held: &[Lease]) -> Result<Beat>;

    /// Refreshes a worker's heartbeat, as [`beat`](Store::beat) does, and returns every live lease of the
    /// worker, ordered by job id; `None` if the worker was declared dead or is unknown.
    async fn beat_and_list(&self, worker: WorkerId) -> Result<Option<Vec<LiveLease>>>;

    // ---- recover ----------------------------------------------------------

    /// Lists the workers that [`mark_dead`](Store::mark_dead) would declare dead, without
    /// locking them.
    async fn presumed_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>>;

    /// Declares dead every live worker whose heartbeat is older than the scope's threshold
    /// or, without one, than the worker's own `stale_after`. For a worker that holds at
    /// least one resilient job, that time is multiplied by the scope's factor. Returns
    /// those workers. Also deletes workers that have been dead for an hour and hold no
    /// lease.
    async fn mark_dead(&self, scope: &SweepScope) -> Result<Vec<WorkerId>>;

    /// Lists leases that may be taken from their holders, ordered by job id, without
    /// locking them: those of dead workers, including workers that
    /// [`mark_dead`](Store::mark_dead) would declare dead now, so that a dry run lists
    /// what a sweep would take; those without a worker row, past `orphan_after`; and those
    /// older than the job's timeout plus the holder's threshold (a hung handler). The
    /// factor of resilient jobs applies to all three.
    async fn interrupted(&self, scope: &SweepScope) -> Result<Vec<Interrupted>>;

    /// Takes leases from their holders. Works like [`settle`](Store::settle), with
    /// one more condition: unless the handler hung, the holder must be dead or
    /// unknown when the item is stored. Does not wait for locked rows. An item that
    /// cannot be stored now is deferred and does not affect the others.
    async fn recover(&self, recoveries: &[Settlement]) -> Result<Vec<Recovered>>;

    // ---- operate ----------------------------------------------------------

    /// Returns a job's state, read from one snapshot; `None` if the job does not
    /// exist.
    async fn locate(&self, id: JobId) -> Result<Option<State>>;

    /// Carries out an operator's command if the job is still in the state `from`.
    /// Otherwise changes nothing and returns [`Operated::Moved`]. `wait` is how long to wait for a job, or a key that
    /// it needs, that another client's open transaction holds.
    async fn operate(&self, id: JobId, from: &State, to: &Operation, wait: KeyWait) -> Result<Operated>;

    /// Lists the ids of dead letters, oldest first.
    async fn dead_letters(&self, filter: &DeadFilter) -> Result<Vec<JobId>>;

    // ---- events -----------------------------------------------------------

    /// Stores an event, unless one with its name exists. Wakes nobody:
    /// [`deliver`](Store::deliver) does. An event that may be removed counts as absent, for all of
    /// these operations: it was emitted more than 7 days ago, it is delivered, and no job that it
    /// woke still has to read it.
    async fn emit(&self, name: &str, payload: &RawValue) -> Result<Emitted>;

    /// Returns those of the named events that exist, the earliest first.
    async fn events(&self, names: &[String]) -> Result<Vec<EventRecord>>;

    /// Makes up to `limit` jobs due that wait for new events, those after the event `after` in the order in which they were
    /// emitted. Jobs that others have locked are skipped; their events are delivered to them later.
    async fn deliver(&self, after: Option<&EventPlace>, limit: u32) -> Result<Delivered>;

    /// Removes up to `limit` events whose time has passed. Returns how many.
    async fn remove_events(&self, limit: u32) -> Result<u64>;

    // ---- flows ------------------------------------------------------------

    /// Stores a flow with its members, links and callbacks, all or nothing. A flow whose id
    /// exists is not stored again, because an earlier reply may have been lost; one whose idempotency
    /// key exists returns the flow that has it.
    async fn put_flow(&self, flow: &NewFlow) -> Result<PutFlow>;

    /// Adds members without links to a flow that is not sealed. Members that were stored by an earlier
    /// call are not stored again, nor is a part of the flow that has the id `part`.
    async fn add_members(&self, flow: FlowId, part: Option<Uuid>, members: &[NewMember]) -> Result<Added>;

    /// Seals a flow: no more members can be added, and it ends when all have ended. Returns whether it
    /// exists.
    async fn seal_flow(&self, flow: FlowId) -> Result<bool>;

    /// Stores children of a running job, as members of the flow with the job's id, and the step that
    /// journals them, in one transaction under the lease. If the step is journaled already, nothing
    /// is stored again.
    async fn spawn(&self, children: &NewChildren) -> Result<Spawned>;

    /// Returns one flow.
    async fn flow(&self, id: FlowId) -> Result<Option<FlowRecord>>;

    /// Lists flows, newest first.
    async fn flows(&self, filter: &FlowFilter) -> Result<Vec<FlowRecord>>;

    /// Lists up to `limit` members of a flow after `after`, ordered by id, with what they wait for.
    async fn tasks(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<TaskRecord>>;

    /// Counts the members of a flow that belong to one of these queues.
    async fn members_in(&self, flow: FlowId, queues: &[String]) -> Result<u64>;

    /// Returns the jobs that a job waited for, with their results.
    async fn parents(&self, id: JobId) -> Result<Vec<ParentRecord>>;

    /// Returns the flow whose end a waiting job waits for: a callback waits for its flow, and a job
    /// that joins its children for the flow with its own id.
    async fn awaited_flow(&self, id: JobId) -> Result<Option<FlowId>>;

    /// Lists up to `limit` members of a flow after `after`, ordered by id, with their results.
    async fn results(&self, flow: FlowId, after: Option<JobId>, limit: u32) -> Result<Vec<ParentRecord>>;

    // ---- advance ----------------------------------------------------------

    /// Returns what upkeep has to do now: deliver events, follow changes, cancel flows, execute operations.
    /// One statement.
    async fn pending(&self) -> Result<Pending>;

    /// Follows up to `limit` changes of flows: members that ended or were reopened. Releases or ends
    /// their children as [`flow::follow`](crate::rules::flow::follow) decides, and ends flows without an open member.
    /// Flows that others have locked are left to them, and flows with a job that another transaction has locked to a later call.
    /// `after` is where the last step left off, so that this one does not look at them again.
    async fn advance(&self, after: Option<FlowId>, limit: u32) -> Result<Advanced>;

    /// Marks a flow as cancelled. Returns false if it has ended, was cancelled before or does not
    /// exist.
    async fn flag_cancelled(&self, flow: FlowId) -> Result<bool>;

    /// Cancels the waiting ones of up to `limit` members of a flow after `after`, and requests that the
    /// running ones stop. Members that others have locked are skipped. The last step ends the cancel, unless it or the steps
    /// before it (`skipped`) have skipped members: then upkeep repeats the cancel.
    async fn cancel_members(
        &self,
        flow: FlowId,
        after: Option<JobId>,
        skipped: u64,
        limit: u32,
    ) -> Result<CancelledMembers>;

    /// Returns up to `limit` flows whose deadline has passed, and as many whose cancel was cut off. Flows that others
    /// have locked are left out.
    async fn flows_to_cancel(&self, limit: u32) -> Result<Vec<FlowId>>;

    /// Reopens those of up to `limit` members of a flow after `after` that ended without success before
    /// `before`, as [`flow::reopen`](crate::rules::flow::reopen) decides.
    async fn retry_members(
        &self,
        flow: FlowId,
        before: DateTime<Utc>,
        after: Option<JobId>,
        limit: u32,
    ) -> Result<RetriedMembers>;

    /// Removes up to `limit` flows that have no members left and ended before the shortest retention
    /// time.
    async fn remove_flows(&self, policy: &Retention, limit: u32) -> Result<u64>;

    // ---- queues -----------------------------------------------------------

    /// Lists the queues that have settings, waiting jobs or running jobs, ordered by
    /// name. Numbers of waiting jobs up to 10,000 per queue are exact (1,000 if there are
    /// very many queues); larger ones may be estimates, within about 20 %.
    async fn queues(&self) -> Result<Vec<QueueRecord>>;

    /// Counts the waiting jobs of one queue, up to `limit`. Reads as many index entries
    /// as it counts.
    async fn depth(&self, queue: &str, limit: u64) -> Result<u64>;

    /// Lists the queues with waiting jobs, due or not, ordered by name. Costs one index
    /// probe per queue, however many jobs wait.
    async fn waiting_queues(&self) -> Result<Vec<String>>;

    // ---- groups -----------------------------------------------------------

    /// Lists up to `limit` groups of a queue that have settings, waiting jobs or running jobs,
    /// ordered by name, after the name `after`.
    async fn groups(&self, queue: &str, after: &str, limit: u32) -> Result<Vec<GroupRecord>>;

    /// Returns one group, as [`groups`](Store::groups) does; `None` if it has neither settings nor
    /// live jobs.
    async fn group(&self, queue: &str, group: &str) -> Result<Option<GroupRecord>>;

    /// Finds up to `limit` groups whose names contain the text, in these queues (`None`: in all), first
    /// the one with exactly this name, then shorter names. The case of ASCII letters does not matter. Looks
    /// at a bounded number of groups.
    async fn find_groups(&self, text: &str, queues: Option<&[String]>, limit: u32)
    -> Result<Vec<FoundGroup>>;

    /// Returns the place of a group among those whose turn it is at this priority; `None` if it
    /// is not its turn. Reads up to 1,000 turns.
    async fn place_in_line(&self, queue: &str, group: &str, priority: i16) -> Result<Option<PlaceInLine>>;

    // ---- stats ------------------------------------------------------------

    /// Counts the jobs in each status, ordered by queue, kind and status. Waiting jobs of a queue are
    /// counted exactly or estimated as by [`queues`](Store::queues).
    async fn counts(&self) -> Result<Vec<Count>>;

    /// Returns the age of the oldest due job, per queue. Queues without a due job are
    /// left out, and so are interrupted jobs, which have their own index. Costs
    /// one index probe per (queue, priority), however many jobs wait.
    async fn overdue(&self) -> Result<Vec<(String, Duration)>>;

    /// Counts the jobs that would be claimed before this waiting one: jobs of the
    /// same queue and of these kinds (`None`: any kind) that are due by the time it
    /// is. Examines at most `limit` jobs, including those that do not count. Returns
    /// `None` if the job is not waiting.
    async fn ahead(&self, id: JobId, kinds: Option<&[String]>, limit: u32) -> Result<Option<Ahead>>;

    /// Counts the jobs that ended, per minute, queue, kind and outcome, oldest first. Older
    /// minutes are already folded into hours and are counted per hour. Reads only the
    /// tallies, never jobs.
    async fn tallied(&self, filter: &HistoryFilter) -> Result<Vec<Tallied>>;

    // ---- check ------------------------------------------------------------

    /// Verifies, in one snapshot, that every job is in exactly one table, that keys
    /// belong to live jobs and that the tallies match the rows. Changes nothing.
    async fn check(&self) -> Result<CheckReport>;

    /// Reports the settings of the database with which a crash may lose stored jobs.
    async fn durability(&self) -> Result<Durability>;

    // ---- retain -----------------------------------------------------------

    /// Removes up to `step` finished jobs whose retention has passed. Does not examine
    /// jobs again before one of them may have expired. Jobs that are locked by others
    /// are skipped this time.
    async fn retain(&self, policy: &Retention, step: u32) -> Result<Retained>;

    /// Folds up to `step` rows of each level of tallies into fewer rows, so that counting
    /// stays fast. Returns how many rows it folded: none if there is nothing to fold, or
    /// while another process folds.
    async fn fold_tallies(&self, step: u32) -> Result<u64>;
}

/// How long an operation waits for a key or a row that another client's open transaction
/// holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyWait {
    /// Hardly at all: the caller skips what is locked, and comes back to it.
    Skip,
    /// A fraction of a second: the caller tries again in another way.
    Short,
    /// A few seconds, on one of the few connections for this purpose.
    Long,
    /// As `Long`, but at most this long.
    UpTo(Duration),
}
