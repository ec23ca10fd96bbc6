//! The SQLite engine: one file, nothing to install, several processes on one host;
//! `:memory:` for tests.
//!
//! This file opens the database and enters the caller's own transaction. The other files have the same names as those of the
//! Postgres engine, and the functions that both have are in the same order:
//!
//! | File | Owns |
//! |---|---|
//! | `migrate` | the migrations and the clock |
//! | `enqueue` | storing new jobs; keys |
//! | `claim`, `claim_groups`, `turns` | leasing due jobs; jobs of groups; the line of groups |
//! | `lease` | the claims behind live leases |
//! | `steps`, `settle` | journaled steps; storing how attempts end |
//! | `workers` | heartbeats |
//! | `recover` | dead workers and their leases |
//! | `operate`, `events`, `queues`, `groups` | moves of jobs for operators' commands; waking jobs that wait for events; the list of queues; the search for groups |
//! | `flow_changes` | the list of changes of flows |
//! | `inspect`, `stats`, `check` | pages of lists; statistics; the consistency check |
//! | `retain` | retention and tallies |
//! | `db`, `moves` | running the procedures that are written once; what they leave to the engine |
//! | `tx`, `engine` | a transaction and its errors; the writing and the reading threads |

use std::path::PathBuf;
use std::sync::Arc;

use rusqlite::Connection;

use super::claim::UnsoundRows;
use super::{CallerTransaction, EngineOf, NewFlow, PutFlow, Store};
use crate::error::{Error, Result};
use crate::rules::enqueue::{Enqueued, ValidJob};
use engine::{Engine, Location};
use tx::Tx;

mod check;
mod claim;
mod claim_groups;
mod db;
mod engine;
mod enqueue;
mod events;
mod flow_changes;
mod groups;
mod inspect;
mod lease;
mod migrate;
mod moves;
mod operate;
mod queues;
mod recover;
mod retain;
mod settle;
mod stats;
mod steps;
mod turns;
mod tx;
mod workers;

pub(crate) use tx::Fault;

#[cfg(test)]
mod tests;

/// Older versions have a bug that can lose commits in WAL mode.
const OLDEST_SQLITE: i32 = 3_051_003;

/// The queue in an SQLite file. Cheap to clone; clones share their threads, which end
/// when the last clone is dropped.
///
/// ```
/// use longshore::NewJob;
/// use longshore::store::{Enqueue, KeyWait, Lists, Migrating, sqlite::SqliteStore};
///
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = SqliteStore::open("sqlite::memory:").await?;
/// store.migrate(store.migrations()).await?;
/// let job = NewJob::new("greet", "Ada").validate()?;
/// store.enqueue(std::slice::from_ref(&job), KeyWait::Long).await?;
/// assert!(store.get(job.id()).await?.is_some());
/// # Ok::<(), longshore::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct SqliteStore {
    engine: Engine,
    unsound: Arc<UnsoundRows>,
}

impl SqliteStore {
    /// Opens `sqlite:PATH`, `sqlite://PATH` or `sqlite::memory:`. Creates a file that does
    /// not exist, but no tables: call [`migrate`](super::Migrating::migrate) for those.
    pub async fn open(url: &str) -> Result<Self> {
        if rusqlite::version_number() < OLDEST_SQLITE {
            return Err(Error::schema(format!(
                "SQLite {} is too old; build with the bundled version, or link version 3.51.3 or newer",
                rusqlite::version()
            )));
        }
        let store = SqliteStore { engine: Engine::open(location(url)?).await?, unsound: Arc::default() };
        let applied = store.engine.read(migrate::applied).await?;
        migrate::scripts(migrate::MIGRATIONS).version_of(&applied)?;
        Ok(store)
    }
}

fn location(url: &str) -> Result<Location> {
    let refuse = |message: String| Err(Error::invalid("url", format!("database URL: {message}")));
    let path = url.strip_prefix("sqlite:").unwrap_or(url);
    let path = path.strip_prefix("//").unwrap_or(path);
    if path == ":memory:" {
        return Ok(Location::Memory);
    }
    if path.is_empty() {
        return refuse("the path is missing; use sqlite:path/to/file.db or sqlite::memory:".into());
    }
    if path.contains('?') {
        return refuse(
            "SQLite URLs have no parameters after `?`, and commits are always durable; \
             use sqlite:path/to/file.db"
                .into(),
        );
    }
    let path = PathBuf::from(path);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return refuse(format!("the folder `{}` does not exist; create it first", folder.display()));
    }
    Ok(Location::File(path))
}

impl EngineOf for SqliteStore {
    #[cfg(feature = "postgres")]
    fn as_postgres(&self) -> Option<&super::postgres::PostgresStore> {
        None
    }

    fn as_sqlite(&self) -> Option<&SqliteStore> {
        Some(self)
    }
}

/// Stores jobs on the caller's connection, in whatever transaction is open on it.
impl CallerTransaction for &Connection {
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        own_engine(store)?;
        Ok(enqueue::enqueue_in(&Tx::new(self), jobs)?)
    }

    async fn put_flow(self, store: &dyn Store, flow: &NewFlow) -> Result<PutFlow> {
        own_engine(store)?;
        Ok(moves::put_flow_in(&Tx::new(self), flow)?)
    }
}

fn own_engine(store: &dyn Store) -> Result<&SqliteStore> {
    store.as_sqlite().ok_or_else(|| {
        Error::invalid(
            "transaction",
            "transaction: this is an SQLite transaction, but the client uses another engine",
        )
    })
}

impl CallerTransaction for &rusqlite::Transaction<'_> {
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        let connection: &Connection = self;
        connection.enqueue(store, jobs).await
    }

    async fn put_flow(self, store: &dyn Store, flow: &NewFlow) -> Result<PutFlow> {
        let connection: &Connection = self;
        connection.put_flow(store, flow).await
    }
}
