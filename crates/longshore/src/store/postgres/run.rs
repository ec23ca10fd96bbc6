//! How an operation runs: in which task, with which deadline, and how often it is
//! retried.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use super::PostgresStore;
use super::tx::{Fault, Sql, Tx};
use crate::error::{Error, Result};

/// The default deadline. No operation except `check` may hold a connection longer.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// The deadline of the operations that workers run all the time and that touch few
/// rows. If one gets no reply for this long, the connection is dead, whatever TCP
/// reports.
pub(super) const QUICK: Duration = Duration::from_secs(10);
/// How long a heartbeat or a registration may take in total, unless its caller
/// gives up earlier.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// The maximum number of tries of an operation that keeps losing races.
const MAX_TRIES: u32 = 6;

/// The body of an operation: a function of the connection and its arguments.
pub(super) type Work<A, T> = for<'c, 't> fn(&'c mut Tx<'t>, &'c A) -> Working<'c, T>;
pub(super) type Working<'c, T> = Pin<Box<dyn Future<Output = Sql<T>> + Send + 'c>>;

impl PostgresStore {
    /// Runs an operation in its own task, so that a caller that goes away does
    /// not leave a connection in the middle of a reply. Deadlocks and serialisation
    /// failures are retried, so `work` must be repeatable.
    pub(super) async fn run<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_within(DEADLINE, args, work).await
    }

    /// As [`run`](Self::run), for operations that are quick on a healthy
    /// database.
    pub(super) async fn run_quick<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_within(QUICK, args, work).await
    }

    /// As [`run`](Self::run), but stops with its caller and closes the connection: a
    /// heartbeat must not wait for an earlier one. Only for work that is harmless if
    /// it completes unnoticed.
    pub(super) async fn run_while_awaited<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
    {
        let done = tokio::time::timeout(HEARTBEAT, self.clone().retry(HEARTBEAT, args, work)).await;
        done.unwrap_or_else(|_| Err(Fault::Timeout(HEARTBEAT).into()))
    }

    pub(super) async fn run_within<A, T>(&self, deadline: Duration, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let task = tokio::spawn(self.clone().retry(deadline, args, work));
        task.await.unwrap_or_else(|error| {
            Err(Error::internal("a database operation ended early: it panicked, or its runtime ended")
                .with_source(error))
        })
    }

    /// As [`run`](Self::run), but in the caller's task for as long as the caller
    /// waits, which saves two thread switches. For the operations that enqueue lanes
    /// and workers run all the time.
    pub(super) async fn run_here<A, T>(&self, deadline: Duration, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let runtime = tokio::runtime::Handle::current();
        let work = Box::pin(self.clone().retry(deadline, args, work));
        InCallersTask { runtime, work: Some(work) }.await
    }

    async fn retry<A, T>(self, deadline: Duration, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
    {
        let mut tries = 1;
        loop {
            let fault = match self.attempt(deadline, &args, work).await {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            };
            if !fault.is_lost_race() || tries == MAX_TRIES {
                return Err(fault.into());
            }
            tokio::time::sleep(Duration::from_millis(1 << tries)).await;
            tries += 1;
        }
    }

    async fn attempt<A: Sync, T>(&self, deadline: Duration, args: &A, work: Work<A, T>) -> Sql<T> {
        let mut connection = self.0.pool.acquire().await?;
        let mut tx = Tx::new(&self.0, &mut connection);
        let done = within(deadline, work(&mut tx, args)).await;
        connection.release(done.as_ref().err()).await;
        done
    }
}

/// Fails if the database does not reply within the deadline.
pub(super) async fn within<T>(deadline: Duration, work: impl Future<Output = Sql<T>>) -> Sql<T> {
    tokio::time::timeout(deadline, work).await.unwrap_or(Err(Fault::Timeout(deadline)))
}

/// Work that continues in its own task if its caller drops it.
struct InCallersTask<T: Send + 'static> {
    runtime: tokio::runtime::Handle,
    work: Option<Pin<Box<dyn Future<Output = Result<T>> + Send>>>,
}

impl<T: Send + 'static> Future for InCallersTask<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = self.work.as_mut() else { return Poll::Pending };
        let result = std::task::ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(result)
    }
}

impl<T: Send + 'static> Drop for InCallersTask<T> {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // A future that panicked must not be polled again.
        if !std::thread::panicking() {
            self.runtime.spawn(work);
        }
    }
}
