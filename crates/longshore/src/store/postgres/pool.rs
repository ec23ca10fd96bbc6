//! The connection pool. It is a stack: the connection that was released last is used
//! next, so that a few connections stay warm. A pool that rotates spreads the work over
//! cold sessions. Releasing costs nothing: a pool that pings a connection on every
//! release pays a round trip for each statement.
//!
//! Operations have a [class](Class), so that slow ones and those that wait for another
//! client's transaction leave connections free for the others (decision 0019).

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sqlx::{Connection, PgConnection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::connect::{Connected, Connector};
use super::tx::{Fault, Sql};
use crate::error::Error;

/// A connection that was idle for this long is pinged before use.
const PROBE_AFTER: Duration = Duration::from_secs(15);
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// A connection that was idle for longer is closed.
const MAX_IDLE: Duration = Duration::from_secs(5 * 60);
/// An older connection is closed: sessions accumulate memory, and proxies drop
/// connections that last too long.
const MAX_LIFETIME: Duration = Duration::from_secs(30 * 60);
/// The connections that only [`Class::Quick`] may use; at most half of the pool.
const RESERVED_CONNECTIONS: usize = 4;
/// The connections of [`Class::Waiting`], beside the pool's maximum. They are opened when
/// an operation waits.
const WAITING_CONNECTIONS: usize = 4;

/// Which connections an operation may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Quick operations that never wait for another client's transaction for long. They
    /// may use all connections of the pool.
    Quick,
    /// Operations that may take long. They leave some connections to quick ones.
    Slow,
    /// Operations that wait for another client's transaction. They have their own
    /// connections.
    Waiting,
}

#[derive(Debug)]
pub(super) struct Pool {
    connector: Arc<Connector>,
    acquire_timeout: Duration,
    max_connections: usize,
    /// One per connection of the pool.
    permits: Arc<Semaphore>,
    /// A slow operation needs one of these as well.
    slow: Arc<Semaphore>,
    waiting: Arc<Semaphore>,
    idle: Mutex<IdleConnections>,
    metrics: Metrics,
}

#[derive(Debug, Default)]
struct IdleConnections {
    /// The connection released last is at the end.
    stack: Vec<Idle>,
    /// Connections that were not used since this time are pinged before use.
    doubted_at: Option<Instant>,
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
    host: usize,
    opened: Instant,
    since: Instant,
}

impl Pool {
    pub(super) fn new(
        connector: Arc<Connector>,
        max_connections: u32,
        acquire_timeout: Duration,
    ) -> Arc<Self> {
        Pool::build(connector, max_connections as usize, acquire_timeout, Metrics::Included)
    }

    fn build(
        connector: Arc<Connector>,
        max_connections: usize,
        acquire_timeout: Duration,
        metrics: Metrics,
    ) -> Arc<Self> {
        let reserved = RESERVED_CONNECTIONS.min(max_connections / 2);
        Arc::new(Pool {
            connector,
            acquire_timeout,
            max_connections,
            permits: Arc::new(Semaphore::new(max_connections)),
            slow: Arc::new(Semaphore::new(max_connections - reserved)),
            waiting: Arc::new(Semaphore::new(WAITING_CONNECTIONS)),
            idle: Mutex::default(),
            metrics,
        })
    }

    /// A pool of one connection to the same server.
    pub(super) fn single_connection(&self) -> Arc<Self> {
        Pool::build(self.connector.clone(), 1, self.acquire_timeout, Metrics::Excluded)
    }

    /// Returns a connection. [Release](PooledConnection::release) it after use; a
    /// connection that is dropped instead is closed.
    pub(super) async fn acquire(self: &Arc<Self>, class: Class, max_wait: Duration) -> Sql<PooledConnection> {
        let max_wait = max_wait.min(self.acquire_timeout);
        match tokio::time::timeout(max_wait, self.find(class)).await {
            Ok(found) => found,
            Err(_) if class == Class::Waiting => Err(Error::locked(
                "too many operations wait for a key or a row that another client's open transaction holds; \
                 end that transaction, or try again later",
            )
            .into()),
            Err(_) => Err(Error::unreachable(format!(
                "no database connection within {max_wait:?}: all are in use, or the database does not reply"
            ))
            .into()),
        }
    }

    async fn find(self: &Arc<Self>, class: Class) -> Sql<PooledConnection> {
        let permit = self.permit(class).await?;
        self.report_use();
        while let Some((mut idle, is_doubted)) = self.pop() {
            if !is_doubted || responds(&mut idle.connection).await {
                return Ok(self.checked_out(idle.connection, idle.host, idle.opened, permit));
            }
            self.connector.avoid(idle.host);
            self.clear();
        }
        let Connected { connection, host } = self.connector.connect().await?;
        Ok(self.checked_out(connection, host, Instant::now(), permit))
    }

    async fn permit(self: &Arc<Self>, class: Class) -> Sql<Permit> {
        let take = async |semaphore: &Arc<Semaphore>| {
            let permit = semaphore.clone().acquire_owned().await;
            permit.map_err(|closed| Error::internal("the connection pool is closed").with_source(closed))
        };
        let permits = match class {
            Class::Quick => (take(&self.permits).await?, None),
            // In this order: an operation that waits for its turn must not occupy a
            // connection.
            Class::Slow => {
                let turn = take(&self.slow).await?;
                (take(&self.permits).await?, Some(turn))
            }
            Class::Waiting => (take(&self.waiting).await?, None),
        };
        Ok(Permit { permits: Some(permits), pool: self.clone() })
    }

    fn checked_out(
        self: &Arc<Self>,
        connection: PgConnection,
        host: usize,
        opened: Instant,
        permit: Permit,
    ) -> PooledConnection {
        PooledConnection { connection, host, opened, pool: self.clone(), _permit: permit }
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

    /// Removes the connection that was released last. Also returns whether it has to be
    /// pinged before use.
    fn pop(&self) -> Option<(Idle, bool)> {
        let mut idle = self.lock();
        let connection = idle.stack.pop()?;
        let is_doubted = connection.since.elapsed() >= PROBE_AFTER
            || idle.doubted_at.is_some_and(|doubted_at| connection.since < doubted_at);
        Some((connection, is_doubted))
    }

    /// Pings the connections that are idle now before they are used again, because an
    /// operation on another one gets no reply.
    pub(super) fn doubt_idle(&self) {
        self.lock().doubted_at = Some(Instant::now());
    }

    /// Closes all idle connections. What broke one connection has probably broken the
    /// others, and opening a new one is faster than testing them one by one.
    fn clear(&self) {
        self.lock().stack.clear();
    }

    /// Adds a connection that was opened elsewhere.
    pub(super) fn add(&self, connected: Connected) {
        self.push(connected.connection, connected.host, Instant::now());
    }

    fn push(&self, connection: PgConnection, host: usize, opened: Instant) {
        let mut idle = self.lock();
        idle.stack.push(Idle { connection, host, opened, since: Instant::now() });
        // The connections that were idle longest come first.
        let stale = idle.stack.iter().take_while(|idle| idle.since.elapsed() > MAX_IDLE).count();
        idle.stack.drain(..stale);
    }

    fn lock(&self) -> MutexGuard<'_, IdleConnections> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
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
    permits: Option<(OwnedSemaphorePermit, Option<OwnedSemaphorePermit>)>,
    pool: Arc<Pool>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        drop(self.permits.take());
        self.pool.report_use();
    }
}

/// A connection in use.
pub(super) struct PooledConnection {
    connection: PgConnection,
    host: usize,
    opened: Instant,
    pool: Arc<Pool>,
    _permit: Permit,
}

impl PooledConnection {
    /// Makes the connection available again, if what happened on it leaves it
    /// usable.
    pub(super) async fn release(mut self, fault: Option<&Fault>) {
        if let Some(fault) = fault.filter(|fault| fault.is_broken_connection()) {
            if fault.is_timeout() || fault.was_refused_by_a_standby() {
                self.pool.connector.avoid(self.host);
            }
            return self.pool.clear();
        }
        if self.opened.elapsed() > MAX_LIFETIME {
            return;
        }
        // The driver only queues the rollback of a dropped transaction. The ping sends
        // it; otherwise the transaction would keep its locks.
        let is_clean = fault.is_none() && !self.connection.should_flush();
        if is_clean || responds(&mut self.connection).await {
            self.pool.push(self.connection, self.host, self.opened);
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
