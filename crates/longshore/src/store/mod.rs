//! The storage contract: one trait for each area, in the file of the area, and [`Store`], which sums them up. There are
//! two engines, Postgres and SQLite, and one conformance suite that runs against both.
//!
//! An engine stores transitions; it does not choose them.
//! [`lifecycle`](crate::rules::lifecycle) decides what happens to a job. Every transition
//! names the state it was decided from, and the engine refuses it if the job is no
//! longer in that state.
//!
//! Most procedures are written once: the file of the area also has the statements, which run on both engines through
//! the layer in `db.rs`. The engines implement the other traits, in files of the same names: `claim.rs` in this folder has the
//! trait of a claim, its arguments and results, and `postgres/claim.rs` and `sqlite/claim.rs` store it.

use std::sync::Arc;

use crate::BoxFuture;
use crate::error::{Error, Result};

mod advance;
mod caller;
mod check;
mod claim;
pub mod cursor;
mod db;
mod enqueue;
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
mod operate_flows;
mod operations;
#[cfg(feature = "postgres")]
pub mod postgres;
mod queues;
mod recover;
mod retain;
mod rooms;
mod schedules;
mod settle;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod stats;
mod steps;
mod tokens;
mod upkeep;
mod workers;

pub use crate::rules::enqueue::EnqueuedBatch;
pub use advance::FlowUpkeep;
pub use caller::{CallerTransaction, EngineOf};
pub use check::{CheckReport, Checks, Durability, Problem};
pub use claim::{ClaimQueue, ClaimRequest, Claimed, Claiming, Claims, CronOrigin, Suspects};
pub use cursor::ClaimCursor;
pub use enqueue::{Enqueue, KeyWait};
pub use error_groups::{ErrorGroups, FailureFilter, FailureRecord};
pub use events::{Delivered, Emitted, EventPlace, EventRecord, Events, MAX_EVENT};
pub use flows::{
    Added, Advanced, CancelledMembers, FlowFilter, FlowRecord, FlowStatus, Flows, LinkRecord, NewChildren,
    NewFlow, NewLink, NewMember, ParentRecord, Pending, PutFlow, RetriedMembers, Spawned, TaskRecord,
};
pub(crate) use groups::next_start;
pub use groups::{FoundGroup, GroupChange, GroupRecord, GroupSearch, Groups, PlaceInLine};
pub(crate) use history::bucket_of;
pub use history::{Detail, History, HistoryFilter, Measured, NewMeasure, What};
pub use inspect::{Glance, ListFilter, Lists, Page, Payloads};
pub use kinds::{KindFilter, KindQueues, KindRecord, Kinds, NewKind, Schemas};
#[cfg(feature = "api")]
pub(crate) use kinds::{TOO_MANY_KINDS, check_queue_kinds};
pub use lease::{Fenced, Lease, Leases};
pub(crate) use migrate::{Applied, Scripts, older_workers_live};
pub use migrate::{Migrated, Migrating, Migration, SCHEMA_VERSION};
pub use notices::{CancelNotices, EventNotices, Notice, Notifying, Wakeups};
pub use operate::{DeadFilter, Operate, Operated, Operation};
pub use operate_flows::FlowCommands;
pub use operations::{
    Action, Executor, JobFilter, NewOperation, OperationFilter, OperationRecord, OperationState,
    OperationStep, Operations, Selection, TakenOperation,
};
pub use queues::{QueueChange, QueueList, QueueRecord, Queues};
pub use recover::{INFRASTRUCTURE_RESILIENT_FLAG, Interrupted, Interruptor, Recovered, Recovery, SweepScope};
pub use retain::{Retained, Retaining, Retention};
pub use schedules::{Schedule, Schedules, Ticked, Ticking};
pub use settle::{EndedBy, MAX_HISTORY, Settled, Settlement, Settling};
pub use stats::{Ahead, Count, Stats, Tallied};
#[cfg(any(feature = "api", feature = "worker"))]
pub(crate) use steps::check_journal;
pub use steps::{Journaled, MAX_STEP_VALUE, NewStep, SavedWork, StepRecord, StepState, Steps};
pub use tokens::{MAX_SESSIONS, NewSession, NewToken, Scope, TokenRecord, Tokens};
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
/// tables: call [`migrate`](Migrating::migrate) for those.
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
pub trait Store:
    Checks
    + Claiming
    + EngineOf
    + Enqueue
    + ErrorGroups
    + Events
    + FlowCommands
    + FlowUpkeep
    + Flows
    + GroupSearch
    + Groups
    + History
    + Kinds
    + Leases
    + Lists
    + Migrating
    + Notifying
    + Operate
    + Operations
    + QueueList
    + Queues
    + Recovery
    + Retaining
    + Schedules
    + Settling
    + Stats
    + Steps
    + Tokens
    + Workers
    + Send
    + Sync
    + std::fmt::Debug
{
}

impl<S> Store for S where
    S: Checks
        + Claiming
        + EngineOf
        + Enqueue
        + ErrorGroups
        + Events
        + FlowCommands
        + FlowUpkeep
        + Flows
        + GroupSearch
        + Groups
        + History
        + Kinds
        + Leases
        + Lists
        + Migrating
        + Notifying
        + Operate
        + Operations
        + QueueList
        + Queues
        + Recovery
        + Retaining
        + Schedules
        + Settling
        + Stats
        + Steps
        + Tokens
        + Workers
        + Send
        + Sync
        + std::fmt::Debug
{
}
