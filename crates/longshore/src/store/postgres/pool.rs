//! The connections: the one used last is used next, so that few stay warm, and
//! going back costs nothing. A pool that takes turns spreads the work over cold
//! sessions, and one that asks a connection how it is on every return pays a
//! round trip for each statement.

use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use sqlx::postgres::PgConnectOptions;
use sqlx::{Connection, PgConnection};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::tx::{Fault, Sql};
use crate::error::Error;

/// A connection that idled this long is asked whether it still lives.
const PROBE_AFTER: Duration = Duration::from_secs(15);
const PROBE_PATIENCE: Duration = Duration::from_secs(2);
/// One that nobody wanted for so long is closed.
const IDLE_FOR: Duration = Duration::from_secs(5 * 60);
/// Sessions gather memory, and proxies cut what lasts too long.
const LIFETIME: Duration = Duration::from_secs(30 * 60);

#[derive(Debug)]
pub(super) struct Pool {
    options: PgConnectOptions,
    patience: Duration,
    most: usize,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Idle>>,
    shown: Shown,
}

/// Whether the metrics tell of this pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    Yes,
    /// It has one user and says nothing of how busy the process is.
    No,
}

#[derive(Debug)]
struct Idle {
    connection: PgConnection,
    opened: Instant,
    since: Instant,
}

impl Pool {
    pub(super) fn new(options: PgConnectOptions, max_connections: u32, patience: Duration) -> Arc<Self> {
        Pool::build(options, max_connections as usize, patience, Shown::Yes)
    }

    fn build(options: PgConnectOptions, most: usize, patience: Duration, shown: Shown) -> Arc<Self> {
        let permits = Arc::new(Semaphore::new(most));
        Arc::new(Pool { options, patience, most, permits, idle: Mutex::default(), shown })
    }

    /// A pool of one connection to the same server.
    pub(super) fn of_one(&self) -> Arc<Self> {
        Pool::build(self.options.clone(), 1, self.patience, Shown::No)
    }

    /// A connection to use and [`give back`](PooledConnection::give_back); one that is
    /// dropped instead is closed.
    pub(super) async fn acquire(self: &Arc<Self>) -> Sql<PooledConnection> {
        match tokio::time::timeout(self.patience, self.find()).await {
            Ok(found) => found,
            Err(_) => Err(Error::unavailable(format!(
                "no connection to the database within {:?}; all are in use or it does not answer",
                self.patience
            ))
            .into()),
        }
    }

    async fn find(self: &Arc<Self>) -> Sql<PooledConnection> {
        let permit = self.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|closed| Error::internal("the pool is closed").with_source(closed))?;
        let permit = Permit { permit: Some(permit), pool: self.clone() };
        self.show();
        while let Some(mut idle) = self.pop() {
            if idle.since.elapsed() < PROBE_AFTER || answers(&mut idle.connection).await {
                return Ok(self.held(idle.connection, idle.opened, permit));
            }
            self.clear();
        }
        let mut connection = PgConnection::connect_with(&self.options).await?;
        // Ours are short statements, and some look long to the planner: compiling
        // one took forty times as long as running it.
        sqlx::raw_sql("set jit = off").execute(&mut connection).await?;
        Ok(self.held(connection, Instant::now(), permit))
    }

    fn held(self: &Arc<Self>, connection: PgConnection, opened: Instant, permit: Permit) -> PooledConnection {
        PooledConnection { connection, opened, pool: self.clone(), _permit: permit }
    }

    /// Tells the metrics how many connections are in use. Set, not counted up
    /// and down: the recorder may come while some are out.
    fn show(&self) {
        if self.shown == Shown::Yes {
            measure(self.most.saturating_sub(self.permits.available_permits()), self.most);
        }
    }

    fn pop(&self) -> Option<Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }

    /// What broke one connection has probably broken the others: better to open
    /// a fresh one than to find out one by one.
    fn clear(&self) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    fn push(&self, connection: PgConnection, opened: Instant) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(Idle { connection, opened, since: Instant::now() });
        // The longest idle lies at the bottom.
        let stale = idle.iter().take_while(|idle| idle.since.elapsed() > IDLE_FOR).count();
        idle.drain(..stale);
    }
}

#[cfg(feature = "metrics")]
fn measure(in_use: usize, most: usize) {
    metrics::gauge!("longshore_pool_connections_in_use").set(in_use as f64);
    metrics::gauge!("longshore_pool_connections_max").set(most as f64);
}

/// The metrics come with the worker.
#[cfg(not(feature = "metrics"))]
fn measure(_: usize, _: usize) {}

/// The right to one connection, or to open one.
struct Permit {
    permit: Option<OwnedSemaphorePermit>,
    pool: Arc<Pool>,
}

impl Drop for Permit {
    fn drop(&mut self) {
        drop(self.permit.take());
        self.pool.show();
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
        if self.opened.elapsed() > LIFETIME {
            return;
        }
        // A transaction that was dropped is rolled back by intention only: the
        // word must go out, or its locks stay.
        let settled = fault.is_none() && !self.connection.should_flush();
        if settled || answers(&mut self.connection).await {
            self.pool.push(self.connection, self.opened);
        }
    }
}

async fn answers(connection: &mut PgConnection) -> bool {
    tokio::time::timeout(PROBE_PATIENCE, connection.ping()).await.is_ok_and(|answer| answer.is_ok())
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
