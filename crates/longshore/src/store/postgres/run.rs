//! How database work is run: on whose task, for how long, how often, and how its
//! faults are told.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use sqlx::PgConnection;

use super::PostgresStore;
use crate::error::{Error, Result};

/// No verb but `check` may hold a connection longer than this.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// The verbs that a worker lives on touch a few rows. When one of them hears
/// nothing for so long, the connection is dead, whatever TCP believes.
pub(super) const QUICK: Duration = Duration::from_secs(10);
/// As long as a heartbeat or a registration may take in all, unless its caller
/// gives up sooner.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// How often a deadlock or a serialisation failure is tried again.
const TRIES: u32 = 6;

impl PostgresStore {
    /// Runs database work in a task of its own: a caller that goes away must
    /// not leave a connection in the middle of a reply. Deadlocks and
    /// serialisation failures are tried again, so `work` must bear repeating.
    pub(super) async fn run<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_within(DEADLINE, args, work).await
    }

    /// As [`run`](Self::run), for what takes no time where the database is well.
    pub(super) async fn run_quick<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_within(QUICK, args, work).await
    }

    /// As [`run`](Self::run), but ends with its caller, connection and all: a
    /// heartbeat that waits for the last one to end is none. Only for work that
    /// does no harm when it is done and nobody hears of it.
    pub(super) async fn run_while_awaited<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
    {
        let done = tokio::time::timeout(HEARTBEAT, self.clone().persist(HEARTBEAT, args, work)).await;
        done.unwrap_or_else(|_| Err(Fault::Silent(HEARTBEAT).into()))
    }

    pub(super) async fn run_within<A, T>(&self, deadline: Duration, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let task = tokio::spawn(self.clone().persist(deadline, args, work));
        task.await.unwrap_or_else(|died| {
            Err(Error::internal("database work was cut off by a panic or the end of its runtime")
                .with_source(died))
        })
    }

    /// As [`run`](Self::run), but in the caller's task for as long as the caller
    /// waits, which saves two thread switches. For the operations that lanes and
    /// workers run all the time.
    pub(super) async fn run_here<A, T>(&self, deadline: Duration, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let runtime = tokio::runtime::Handle::current();
        let work = Box::pin(self.clone().persist(deadline, args, work));
        Here { runtime, work: Some(work) }.await
    }

    async fn persist<A, T>(self, deadline: Duration, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
    {
        let mut round = 1;
        loop {
            let fault = match self.attempt(deadline, &args, work).await {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            };
            if !fault.may_pass() || round == TRIES {
                return Err(fault.into());
            }
            tokio::time::sleep(Duration::from_millis(1 << round)).await;
            round += 1;
        }
    }

    async fn attempt<A: Sync, T>(&self, deadline: Duration, args: &A, work: Work<A, T>) -> Done<T> {
        let mut connection = self.0.pool.acquire().await?;
        let done = within(deadline, work(self, &mut connection, args)).await;
        connection.give_back(done.as_ref().err()).await;
        done
    }
}

/// Gives up on a database that does not answer.
pub(super) async fn within<T>(deadline: Duration, work: impl Future<Output = Done<T>>) -> Done<T> {
    tokio::time::timeout(deadline, work).await.unwrap_or(Err(Fault::Silent(deadline)))
}

/// Work that continues in a task of its own if its caller drops it.
struct Here<T: Send + 'static> {
    runtime: tokio::runtime::Handle,
    work: Option<Pin<Box<dyn Future<Output = Result<T>> + Send>>>,
}

impl<T: Send + 'static> Future for Here<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = self.work.as_mut() else { return Poll::Pending };
        let answer = std::task::ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(answer)
    }
}

impl<T: Send + 'static> Drop for Here<T> {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // Work that panicked must not be polled again.
        if std::thread::panicking() {
            return;
        }
        self.runtime.spawn(work);
    }
}

pub(super) type Query<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// Database work: a verb's body, its connection and what it was asked.
pub(super) type Work<A, T> = for<'c> fn(&'c PostgresStore, &'c mut PgConnection, &'c A) -> Doing<'c, T>;
pub(super) type Doing<'c, T> = Pin<Box<dyn Future<Output = Done<T>> + Send + 'c>>;

/// What database work comes to inside [`PostgresStore::run`].
pub(super) type Done<T> = std::result::Result<T, Fault>;

/// Why it failed: the driver's word, or ours.
pub(super) enum Fault {
    Sql(sqlx::Error),
    Ours(Error),
    /// Nothing was heard for so long; the connection is in the middle of a reply.
    Silent(Duration),
}

impl Fault {
    /// Whether another try may go through where this one lost a race.
    pub(super) fn may_pass(&self) -> bool {
        // 23505: two callers gave the same key at the same moment; the next
        // round finds the other's job.
        matches!(self.code().as_deref(), Some("40001" | "40P01" | "23505"))
    }

    pub(super) fn is_lock_timeout(&self) -> bool {
        self.code().as_deref() == Some("55P03")
    }

    /// Whether the connection is of no more use, and others like it neither.
    pub(super) fn is_broken_connection(&self) -> bool {
        match self {
            Fault::Sql(error) => !matches!(error, sqlx::Error::Database(_)),
            Fault::Silent(_) => true,
            Fault::Ours(_) => false,
        }
    }

    pub(super) fn code(&self) -> Option<std::borrow::Cow<'_, str>> {
        match self {
            Fault::Sql(sqlx::Error::Database(error)) => error.code(),
            _ => None,
        }
    }
}

impl From<sqlx::Error> for Fault {
    fn from(error: sqlx::Error) -> Self {
        Fault::Sql(error)
    }
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Ours(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        match fault {
            Fault::Sql(error) => translate(error),
            Fault::Ours(error) => error,
            Fault::Silent(deadline) => {
                Error::unavailable(format!("the database did not answer within {deadline:?}"))
            }
        }
    }
}

/// The driver's errors in our words. Never repeats the URL.
pub(super) fn translate(error: sqlx::Error) -> Error {
    let told = match &error {
        sqlx::Error::Database(database) => {
            let message = database.message();
            match database.code().as_deref().unwrap_or_default() {
                "42P01" | "3F000" | "42883" | "42704" => Error::schema(format!(
                    "the queue's tables are missing or too old ({message}); run `longshore migrate`"
                )),
                "25006" => Error::read_only(
                    "the database accepts no writes: it is a standby or set to read-only; connect to the primary",
                ),
                "22021" => Error::invalid(
                    "text",
                    "a text contains a NUL character, which Postgres cannot store; remove it",
                ),
                "28P01" | "28000" | "3D000" | "42501" => {
                    Error::unavailable(format!("the database refused us: {message}"))
                }
                code if ["08", "40", "53", "55", "57", "58"].iter().any(|class| code.starts_with(class)) => {
                    Error::unavailable(format!("the database is not available: {message}"))
                }
                code => Error::internal(format!("the database refused a statement ({code}): {message}")),
            }
        }
        sqlx::Error::Io(_) | sqlx::Error::PoolTimedOut | sqlx::Error::PoolClosed | sqlx::Error::Tls(_) => {
            Error::unavailable(format!("the database cannot be reached: {error}"))
        }
        sqlx::Error::Protocol(_) | sqlx::Error::WorkerCrashed => {
            Error::unavailable(format!("the connection to the database broke: {error}"))
        }
        _ => Error::internal(format!("unexpected answer from the database: {error}")),
    };
    told.with_source(error)
}
