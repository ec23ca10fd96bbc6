//! The Postgres engine: any number of processes on any number of hosts share one
//! database, version 14 or newer.
//!
//! This file opens the database and enters the caller's own transaction. The other files, in the order of a job's life:
//!
//! | File | Owns |
//! |---|---|
//! | `migrate` | the schema's name, its migrations and its clock |
//! | `enqueue` | storing new jobs; keys |
//! | `claim`, `claim_limits`, `claim_groups`, `claim_sql`, `claim_rows`, `turns` | leasing due jobs; limits and rates of queues; jobs of groups; the statements and the rows of a claim; the turns of groups |
//! | `lease` | the claims behind live leases |
//! | `steps`, `step_in`, `settle` | journaled steps; steps in the user's transaction; storing how attempts end |
//! | `workers` | heartbeats |
//! | `recover` | dead workers and their leases |
//! | `operate`, `events`, `queues`, `groups` | moves of jobs for operators' commands; waking jobs that wait for events; the list of queues; the search for groups |
//! | `tables`, `flow_changes` | parts of statements that put jobs into `ready` and `finished`; the list of changes of flows |
//! | `inspect`, `stats`, `check` | pages of lists; statistics; the consistency check |
//! | `retain` | retention and tallies |
//! | `db`, `moves` | running the procedures that are written once; what they leave to the engine |
//! | `tx`, `run`, `pool`, `connect`, `listen` | a connection and its errors; deadlines and retries; the pool; hosts; `LISTEN` and `NOTIFY` |
//!
//! The engine relies on no session state: no session locks, no temporary tables, no
//! `search_path`, and `LISTEN` only as a hint. The driver, however, uses named prepared
//! statements, so PgBouncer in transaction mode must track them
//! (`max_prepared_statements`, version 1.21 or newer). Otherwise opening fails.

use std::sync::Arc;
use std::time::Duration;

use sqlx::PgConnection;

use super::claim::UnsoundRows;
use super::lease::assert_lease;
use super::{CallerTransaction, Checks, EngineOf, Fenced, Lease, NewFlow, PutFlow, Store};
use crate::error::{Error, Result};
use crate::rules::enqueue::{Enqueued, ValidJob};
use migrate::{DEFAULT_SCHEMA, Schema};
use tx::Tx;

mod check;
mod claim;
mod claim_groups;
mod claim_limits;
mod claim_rows;
mod claim_sql;
mod connect;
mod db;
mod enqueue;
mod events;
mod flow_changes;
mod groups;
mod inspect;
mod lease;
mod listen;
mod migrate;
mod moves;
mod operate;
mod pool;
mod queues;
mod recover;
mod retain;
mod run;
mod settle;
mod stats;
#[cfg(feature = "worker")]
mod step_in;
mod steps;
mod tables;
mod turns;
mod tx;
mod workers;

#[cfg(feature = "worker")]
pub(crate) use step_in::StepConnection;
pub(crate) use tx::Fault;

/// The queue in a Postgres database.
#[derive(Clone, Debug)]
pub struct PostgresStore(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    pool: Arc<pool::Pool>,
    schema: Schema,
    listener: listen::Listener,
    notify: bool,
    durability: RequiredDurability,
    unsound: Arc<UnsoundRows>,
}

/// Connection settings that a Postgres URL does not have.
#[derive(Clone, Debug)]
pub struct PostgresOptions {
    /// The schema that holds the tables; `longshore` by default.
    pub schema: String,
    /// The maximum number of pooled connections; 10 by default.
    pub max_connections: u32,
    /// How long to wait for a connection; 10 s by default.
    pub acquire_timeout: Duration,
    /// Whether to send wake-ups by `NOTIFY`; on by default. If it is off, or `NOTIFY`
    /// does not get through (PgBouncer in transaction mode), polling finds new jobs.
    pub notify: bool,
    /// Whether the database may lose commits in a crash; `Full` by default.
    pub durability: RequiredDurability,
}

/// Whether the database may lose commits in a crash. The library only logs a warning; the
/// commands `serve` and `worker` refuse a database that is less durable than required.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequiredDurability {
    /// Stored jobs survive a crash.
    #[default]
    Full,
    /// A crash may lose stored jobs: `fsync = off` or `synchronous_commit = off` are
    /// accepted, e.g. for tests.
    Relaxed,
}

impl Default for PostgresOptions {
    fn default() -> Self {
        PostgresOptions {
            schema: DEFAULT_SCHEMA.into(),
            max_connections: 10,
            acquire_timeout: Duration::from_secs(10),
            notify: true,
            durability: RequiredDurability::Full,
        }
    }
}

impl PostgresStore {
    /// Connects to `postgres://user@host/database`. The URL parameters `schema`,
    /// `max_connections`, `notify` (`on` or `off`) and `durability` (`full` or `relaxed`)
    /// set the [options](PostgresOptions). With several hosts,
    /// `postgres://user@one,two:5433/database`, the first one that accepts writes is used;
    /// `target_session_attrs` (`read-write`, `primary` or `any`) changes that. The driver
    /// reads the other parameters.
    pub async fn open(url: &str) -> Result<Self> {
        let mut options = PostgresOptions::default();
        let url = take_parameter(url, "schema", |value| {
            options.schema = value.into();
            Ok(())
        })?;
        let url = take_parameter(&url, "max_connections", |value| {
            options.max_connections = value.parse().ok().filter(|n| *n >= 2).ok_or_else(|| {
                Error::invalid(
                    "max_connections",
                    "database URL: max_connections must be a number, at least 2",
                )
            })?;
            Ok(())
        })?;
        let url = take_parameter(&url, "notify", |value| {
            options.notify = match value {
                "on" => true,
                "off" => false,
                _ => return Err(Error::invalid("notify", "database URL: notify must be `on` or `off`")),
            };
            Ok(())
        })?;
        let url = take_parameter(&url, "durability", |value| {
            options.durability = match value {
                "full" => RequiredDurability::Full,
                "relaxed" => RequiredDurability::Relaxed,
                _ => {
                    return Err(Error::invalid(
                        "durability",
                        "database URL: durability must be `full` or `relaxed`",
                    ));
                }
            };
            Ok(())
        })?;
        PostgresStore::open_with(&url, options).await
    }

    /// Connects with the given options.
    pub async fn open_with(url: &str, options: PostgresOptions) -> Result<Self> {
        let schema = Schema::new(&options.schema)?;
        let connector = Arc::new(connect::Connector::parse(url)?);
        // Connect once now: a wrong host or password is reported at once and precisely,
        // not by the first operation after the pool's timeout.
        let first = connector.connect().await?;
        let first = connector.check_pooler(first).await?;
        let listener = listen::Listener::new(&schema, connector.clone());
        let pool = pool::Pool::new(connector, options.max_connections, options.acquire_timeout);
        first.into_iter().for_each(|first| pool.add(first));
        let PostgresOptions { notify, durability, .. } = options;
        let store = PostgresStore(Arc::new(Inner {
            pool,
            schema,
            listener,
            notify,
            durability,
            unsound: Arc::default(),
        }));
        if durability == RequiredDurability::Full {
            let durability = store.durability().await?;
            durability.risks.iter().for_each(|risk| tracing::warn!("{risk}"));
        }
        let applied = store.run((), |tx, ()| Box::pin(migrate::applied(tx))).await?;
        migrate::scripts(migrate::MIGRATIONS).version_of(&applied)?;
        Ok(store)
    }

    /// The schema that holds the tables.
    pub fn schema(&self) -> &str {
        &self.0.schema.name
    }

    /// Returns whether a lease is live, inside the caller's own transaction. Until that
    /// transaction ends, the lease cannot be taken away, so everything it commits was
    /// done by the job's only owner.
    pub async fn assert_lease_in(&self, connection: &mut PgConnection, lease: &Lease) -> Result<Fenced> {
        Ok(assert_lease(&mut Tx::new(&self.0, connection), *lease).await.map_err(Fault::from)?)
    }
}

/// The parameters of a database URL that are not the driver's. Each is taken out of the URL
/// before the driver reads it.
const OWN_PARAMETERS: [&str; 5] =
    ["durability", "max_connections", "notify", "schema", "target_session_attrs"];

/// Removes one parameter from a URL's query and passes its value to `take`.
fn take_parameter(url: &str, name: &str, mut take: impl FnMut(&str) -> Result<()>) -> Result<String> {
    let Some((base, query)) = url.split_once('?') else { return Ok(url.into()) };
    let mut rest = Vec::new();
    for pair in query.split('&') {
        match pair.split_once('=') {
            Some((key, value)) if key == name => take(value)?,
            _ => rest.push(pair),
        }
    }
    Ok(if rest.is_empty() { base.into() } else { format!("{base}?{}", rest.join("&")) })
}

impl EngineOf for PostgresStore {
    fn as_postgres(&self) -> Option<&PostgresStore> {
        Some(self)
    }

    #[cfg(feature = "sqlite")]
    fn as_sqlite(&self) -> Option<&super::sqlite::SqliteStore> {
        None
    }
}

/// Stores jobs on the caller's connection, in whatever transaction is open on it.
impl CallerTransaction for &mut PgConnection {
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        Ok(enqueue::enqueue_in(&mut Tx::new(&own_engine(store)?.0, self), jobs).await?)
    }

    async fn put_flow(self, store: &dyn Store, flow: &NewFlow) -> Result<PutFlow> {
        let tx = &mut Tx::new(&own_engine(store)?.0, self);
        Ok(put_flow_in(tx, flow).await?)
    }
}

/// Stores a flow in the caller's own transaction: no commit and no retry.
async fn put_flow_in(tx: &mut Tx<'_>, flow: &NewFlow) -> tx::Sql<PutFlow> {
    let stored = super::flows::put_flow(tx, flow).await?;
    let startable: Vec<ValidJob> = flow.startable().cloned().collect();
    listen::notify_due(tx, &startable).await?;
    Ok(stored)
}

fn own_engine(store: &dyn Store) -> Result<&PostgresStore> {
    store.as_postgres().ok_or_else(|| {
        Error::invalid(
            "transaction",
            "transaction: this is a Postgres transaction, but the client uses another engine",
        )
    })
}

impl CallerTransaction for &mut sqlx::Transaction<'_, sqlx::Postgres> {
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>> {
        let connection: &mut PgConnection = self;
        connection.enqueue(store, jobs).await
    }

    async fn put_flow(self, store: &dyn Store, flow: &NewFlow) -> Result<PutFlow> {
        let connection: &mut PgConnection = self;
        connection.put_flow(store, flow).await
    }
}
