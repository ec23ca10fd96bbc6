//! The connection pool. It is a stack: the connection that was released last is used
//! next, so that a few connections stay warm. A pool that rotates spreads the work over
//! cold sessions. Releasing costs nothing: a pool that pings a connection on every
//! release pays a round trip for each statement.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::tx::{Fault, Sql};
use crate::error::Error;

/// A connection that was idle for this long is pinged before use.
const PROBE_AFTER: Duration = Duration::from_secs(15);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection that was idle for longer is closed.
const MAX_IDLE: Duration = Duration::from_secs(5 * 60);
/// An older connection is closed: sessions accumulate memory, and proxies drop
/// connections that last too long.
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);

#[derive(Debug)]
pub(super) struct Pool {
    options: PgConnectOptions,
    acquire_timeout: Duration,
    max_connections: usize,
    permits: Arc<Semaphore>,
    /// The idle connections, the one released last at the end.
    idle: Mutex<Vec<Idle>>,
    metrics: Metrics,
}

/// Whether the metrics include this pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Metrics {
    Included,
    /// The pool has a single user, so its use does not show how busy the process is.
    Excluded,
}

#[derive(Debug)]
struct Idle {
    connection: PgConnection,
    opened: Instant,
    since: Instant,
}

impl Pool {
    pub(super) fn new(
        options: PgConnectOptions,
        max_connections: u32,
        acquire_timeout: Duration,
    ) -> Arc<Self> {
        Pool::build(options, max_connections as usize, acquire_timeout, Metrics::Included)
    }

    fn build(
        options: PgConnectOptions,
        max_connections: usize,
        acquire_timeout: Duration,
        metrics: Metrics,
    ) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(max_connections));
        Arc::new(Pool { options, acquire_timeout, max_connections, permits, idle: Mutex::default(), metrics })
    }

    /// A pool of one connection to the same server.
    pub(super) fn single_connection(&self) -> Arc<Self> {
        Pool::build(self.options.clone(), 1, self.acquire_timeout, Metrics::Excluded)
    }

    /// Returns a connection. [Release](PooledConnection::release) it after use; a
    /// connection that is dropped instead is closed.
    pub(super) async fn acquire(self: &Arc<Self>) -> Sql<PooledConnection> {
        match tokio::time::timeout(self.acquire_timeout, self.find()).await {
            Ok(found) => found,
            Err(_) => Err(Error::unavailable(format!(
                "no database connection within {:?}: all are in use, or the database does not reply",
                self.acquire_timeout
            ))
            .into()),
        }
    }

    async fn find(self: &Arc<Self>) -> Sql<PooledConnection> {
        let permit = self.permits.clone().acquire_owned().await;
        let permit =
            permit.map_err(|closed| Error::internal("the connection pool is closed").with_source(closed))?;
        let permit = Permit { permit: Some(permit), pool: self.clone() };
        self.report_use();
        while let Some(mut idle) = self.pop() {
            if idle.since.elapsed() < PROBE_AFTER || responds(&mut idle.connection).await {
                return Ok(self.checked_out(idle.connection, idle.opened, permit));
            }
            self.clear();
        }
        let mut connection = PgConnection::connect_with(&self.options).await?;
        // Our statements are short, but the planner overestimates some: compiling one
        // took forty times as long as running it.
        sqlx::raw_sql("set jit = off").execute(&mut connection).await?;
        Ok(self.checked_out(connection, Instant::now(), permit))
    }

    fn checked_out(
        self: &Arc<Self>,
        connection: PgConnection,
        opened: Instant,
        permit: Permit,
    ) -> PooledConnection {
        PooledConnection { connection, opened, pool: self.clone(), _permit: permit }
    }

    /// Reports to the metrics how many connections are in use. Sets the gauge instead
    /// of counting up and down, because a recorder may be installed while some are in
    /// use.
    fn report_use(&self) {
        if self.metrics == Metrics::Included {
            let in_use = self.max_connections.saturating_sub(self.permits.available_permits());
            set_gauges(in_use, self.max_connections);
        }
    }

    fn pop(&self) -> Option<Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// Closes all idle connections. What broke one connection has probably broken the
    /// others, and opening a new one is faster than testing them one by one.
    fn clear(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn push(&self, connection: PgConnection, opened: Instant) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(Idle { connection, opened, since: Instant::now() });
        // The connections that were idle longest come first.
        let stale = idle.iter().take_while(|idle| idle.since.elapsed() > MAX_IDLE).count();
        idle.drain(..stale);
    }
}

#[cfg(feature = "metrics")]
fn set_gauges(in_use: usize, max: usize) {
    metrics::gauge!("longshore_pool_connections_in_use").set(in_use as f64);
    metrics::gauge!("longshore_pool_connections_max").set(max as f64);
}

/// Metrics need the feature `worker`.
#[cfg(not(feature = "metrics"))]
fn set_gauges(_: usize, _: usize) {}

/// The right to use or open one connection.
struct Permit {
    permit: Option<OwnedSemaphorePermit>,
    pool: Arc<Pool>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.pool.report_use();
    }
}

/// A connection in use.
pub(super) struct PooledConnection {
    connection: PgConnection,
    opened: Instant,
    pool: Arc<Pool>,
    _permit: Permit,
}

impl PooledConnection {
    /// Makes the connection available again, if what happened on it leaves it
    /// usable.
    pub(super) async fn release(mut self, fault: Option<&Fault>) {
        if fault.is_some_and(Fault::is_broken_connection) {
            return self.pool.clear();
        }
        if self.opened.elapsed() > MAX_LIFETIME {
            return;
        }
        // The driver only queues the rollback of a dropped transaction. The ping sends
        // it; otherwise the transaction would keep its locks.
        let is_clean = fault.is_none() && !self.connection.should_flush();
        if is_clean || responds(&mut self.connection).await {
            self.pool.push(self.connection, self.opened);
        }
    }
}

async fn responds(connection: &mut PgConnection) -> bool {
    tokio::time::timeout(PROBE_TIMEOUT, connection.ping()).await.is_ok_and(|reply| reply.is_ok())
}

impl Deref for PooledConnection {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        &self.connection
    }
}

impl DerefMut for PooledConnection {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.connection
    }
}
