//! How an operation runs: in which task, with which deadline, how long it may wait for
//! locks, and how often it is retried.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use super::PostgresStore;
use super::pool::Class;
use super::tx::{Fault, Sql, Tx};
use crate::error::{Error, Result};
use crate::rules::enqueue::ValidJob;
use crate::store::KeyWait;

/// The default deadline. Only operations that read all tables may hold a connection longer.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// The deadline of the operations that workers run all the time and that touch few
/// rows. If one gets no reply for this long, the connection is dead, whatever TCP
/// reports.
pub(super) const QUICK: Duration = Duration::from_secs(5);
/// The first deadline of a quick read. A second try, on another connection, has the usual
/// one.
const READ: Duration = Duration::from_secs(3);
/// The deadline of reads for a page: a little more than the server's own limit for each statement.
const VIEW: Duration = Duration::from_secs(12);
/// The deadline of an enqueue. It leaves a second to repeat the enqueue on a new
/// connection before callers have waited for five.
const ENQUEUE: Duration = Duration::from_millis(3500);
/// How much longer an enqueue may take for each of its jobs: half a second for a full
/// batch of a lane.
const ENQUEUE_PER_JOB: Duration = Duration::from_micros(500);
/// How much longer an enqueue may take for each byte of its payloads: a second for 8 MiB.
const ENQUEUE_PER_BYTE: Duration = Duration::from_nanos(120);
/// If an operation gets no reply for this long, other connections are pinged before they
/// are used.
const DOUBT_AFTER: Duration = Duration::from_secs(1);
/// How long a heartbeat or a registration may take in total, unless its caller
/// gives up earlier.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// How long an operation may wait for another client's transaction, including the wait
/// for a connection.
pub(super) const MAX_LOCK_WAIT: Duration = Duration::from_secs(2);
/// The maximum number of tries of an operation that keeps losing races.
const MAX_TRIES: u32 = 6;

/// How an operation runs.
#[derive(Clone, Copy)]
pub(super) struct Mode {
    class: Class,
    /// How long the database may take to reply.
    deadline: Duration,
    on_broken_connection: OnBrokenConnection,
    statements: Statements,
}

/// How long the server may work on a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Statements {
    /// Until the connection is closed.
    Unlimited,
    /// As long as somebody waits for a page. After that, the server stops the statement.
    OfAView,
}

/// What happens to an operation whose connection breaks, so that it is unknown whether
/// the operation was stored.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnBrokenConnection {
    Fail,
    /// It runs once more, on another connection.
    Repeat,
}

impl Mode {
    const fn new(class: Class, deadline: Duration) -> Self {
        let on_broken_connection = OnBrokenConnection::Fail;
        Mode { class, deadline, on_broken_connection, statements: Statements::Unlimited }
    }

    /// For operations that may take long.
    pub(super) const SLOW: Mode = Mode::new(Class::Slow, DEADLINE);
    /// For operations that read all tables.
    pub(super) const ALL_TABLES: Mode = Mode::new(Class::Slow, Duration::from_secs(60 * 60));
    /// For operations that are quick on a healthy database.
    pub(super) const QUICK: Mode = Mode::new(Class::Quick, QUICK);
    /// For quick operations that only read.
    const READ: Mode =
        Mode { on_broken_connection: OnBrokenConnection::Repeat, ..Mode::new(Class::Quick, READ) };
    /// For operations that read many rows for a page that somebody waits for.
    const VIEW: Mode = Mode {
        on_broken_connection: OnBrokenConnection::Repeat,
        statements: Statements::OfAView,
        ..Mode::new(Class::Slow, VIEW)
    };
    /// For operations that set deadlines for their parts.
    pub(super) const QUICK_IN_PARTS: Mode = Mode::new(Class::Quick, DEADLINE);
    /// For operations that wait for another client's transaction.
    pub(super) const WAITING: Mode =
        Mode::new(Class::Waiting, MAX_LOCK_WAIT.saturating_add(Duration::from_secs(1)));
    /// For procedures that wait for another client's transaction. They limit the waits of their statements;
    /// afterwards they may store many jobs.
    pub(super) const WAITING_ASIDE: Mode = Mode::new(Class::Waiting, DEADLINE);
    /// For heartbeats. Less than their caller waits, so that a dead connection is noticed.
    const HEARTBEAT: Mode = Mode::new(Class::Quick, Duration::from_secs(4));

    /// For an enqueue of these jobs. Ids are chosen before the first try, so repeating it
    /// stores nothing twice. Jobs with keys are stored in parts, which have deadlines of
    /// their own.
    pub(super) fn enqueue(class: Class, jobs: &[ValidJob]) -> Self {
        let is_in_parts = jobs.iter().any(ValidJob::is_keyed);
        let deadline = if is_in_parts { DEADLINE } else { enqueue_deadline(jobs) };
        let on_broken_connection = match class {
            Class::Waiting => OnBrokenConnection::Fail,
            Class::Quick | Class::Slow => OnBrokenConnection::Repeat,
        };
        Mode { on_broken_connection, ..Mode::new(class, deadline) }
    }

    /// Whether to run the operation once more, on another connection.
    fn may_repeat_after(self, fault: &Fault) -> bool {
        // A statement that a standby refused had no effect.
        fault.was_refused_by_a_standby()
            || (self.on_broken_connection == OnBrokenConnection::Repeat && fault.is_broken_connection())
    }

    /// How long to wait for a connection.
    fn max_acquire_wait(self) -> Duration {
        match self.class {
            Class::Quick => QUICK,
            Class::Slow => DEADLINE,
            Class::Waiting => MAX_LOCK_WAIT,
        }
    }
}

/// How long an operation may still wait for locks of another client's transaction.
pub(super) struct LockWait {
    until: Instant,
    /// What is left after waiting for a connection, for the locks of quick transactions.
    at_least: Duration,
}

impl LockWait {
    /// A try on the pool's connections. Commits of other clients end sooner.
    const SHORT: Duration = Duration::from_millis(200);
    /// A try that skips what is locked, on the connections that everybody needs.
    const SKIP: Duration = Duration::from_millis(10);

    pub(super) fn new(wait: KeyWait) -> Self {
        let max_wait = match wait {
            KeyWait::Skip => LockWait::SKIP,
            KeyWait::Short => LockWait::SHORT,
            KeyWait::Long => MAX_LOCK_WAIT,
            KeyWait::UpTo(max_wait) => max_wait.min(MAX_LOCK_WAIT),
        };
        LockWait { until: Instant::now() + max_wait, at_least: max_wait.min(LockWait::SHORT / 2) }
    }

    /// A part of the time may have passed with waiting for a connection. Enough is left
    /// for the locks of quick transactions.
    pub(super) fn remaining(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now()).max(self.at_least)
    }
}

/// The body of an operation: a function of the connection and its arguments.
pub(super) type Work<A, T> = for<'c, 't> fn(&'c mut Tx<'t>, &'c A) -> Working<'c, T>;
pub(super) type Working<'c, T> = Pin<Box<dyn Future<Output = Sql<T>> + Send + 'c>>;

/// An operation without its types. There are many operations, so everything that runs them
/// is compiled once instead of once for each.
trait Operation: Send + Sync {
    fn run<'c>(&'c self, tx: &'c mut Tx<'_>) -> Working<'c, Value>;
}

/// The value that an operation returned.
type Value = Box<dyn Any + Send>;

struct Call<A, T> {
    args: A,
    work: Work<A, T>,
}

impl<A: Send + Sync, T: Send + 'static> Operation for Call<A, T> {
    fn run<'c>(&'c self, tx: &'c mut Tx<'_>) -> Working<'c, Value> {
        let working = (self.work)(tx, &self.args);
        Box::pin(async move {
            let value: Value = Box::new(working.await?);
            Ok(value)
        })
    }
}

/// Returns the value in the type that its [`Call`] returns.
fn typed<T: 'static>(value: Value) -> Result<T> {
    match value.downcast() {
        Ok(value) => Ok(*value),
        Err(_) => Err(Error::internal("a database operation returned a value of another type")),
    }
}

impl PostgresStore {
    /// Runs an operation in its own task, so that a caller that goes away does
    /// not leave a connection in the middle of a reply. Deadlocks and serialisation
    /// failures are retried, so `work` must be repeatable.
    pub(super) async fn run<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_as(Mode::SLOW, args, work).await
    }

    /// As [`run`](Self::run), for operations that are quick on a healthy
    /// database.
    pub(super) async fn run_quick<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_as(Mode::QUICK, args, work).await
    }

    /// As [`run_quick`](Self::run_quick), for operations that only read.
    pub(super) async fn run_read<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_as(Mode::READ, args, work).await
    }

    /// As [`run`](Self::run), in a read-only transaction whose statements the server stops
    /// when they take too long.
    pub(super) async fn run_view<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        self.run_as(Mode::VIEW, args, work).await
    }

    /// As [`run`](Self::run), but stops with its caller and closes the connection: a
    /// heartbeat must not wait for an earlier one. Only for work that is harmless if
    /// it completes unnoticed.
    pub(super) async fn run_while_awaited<A, T>(&self, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let operation = Box::new(Call { args, work });
        let done = tokio::time::timeout(HEARTBEAT, self.clone().retry(Mode::HEARTBEAT, operation)).await;
        done.unwrap_or_else(|_| Err(Fault::Timeout(HEARTBEAT).into())).and_then(typed)
    }

    /// Runs an operation that changes one flow. Almost always nothing is locked, so the first try waits only
    /// for a moment ([`LockWait::SKIP`]), and on the connections that everybody uses.
    pub(super) async fn run_aside<A, T>(
        &self,
        mode: Mode,
        args: A,
        work: Work<(Arc<A>, LockWait), T>,
    ) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let args = Arc::new(args);
        match self.run_as(mode, (args.clone(), LockWait::new(KeyWait::Skip)), work).await {
            Err(error) if error.is_locked() => {
                self.run_as(Mode::WAITING_ASIDE, (args, LockWait::new(KeyWait::Long)), work).await
            }
            done => done,
        }
    }

    /// Runs an operation that fails as locked if another client's open transaction keeps a lock that it
    /// needs. Almost always nothing is locked, so the first try takes none of the few connections for long
    /// waits.
    pub(super) async fn run_unless_locked<A, T>(
        &self,
        mode: Mode,
        wait: KeyWait,
        args: A,
        work: Work<(Arc<A>, LockWait), T>,
    ) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let args = Arc::new(args);
        let first = if wait == KeyWait::Skip { wait } else { KeyWait::Short };
        match self.run_as(mode, (args.clone(), LockWait::new(first)), work).await {
            Err(error) if error.is_locked() && wait != KeyWait::Skip => {
                self.run_as(Mode::WAITING, (args, LockWait::new(KeyWait::Long)), work).await
            }
            done => done,
        }
    }

    pub(super) async fn run_as<A, T>(&self, mode: Mode, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let task = tokio::spawn(self.clone().retry(mode, Box::new(Call { args, work })));
        let done = task.await.unwrap_or_else(|error| {
            Err(Error::internal("a database operation ended early: it panicked, or its runtime ended")
                .with_source(error))
        });
        done.and_then(typed)
    }

    /// As [`run`](Self::run), but in the caller's task for as long as the caller
    /// waits, which saves two thread switches. For the operations that enqueue lanes
    /// and workers run all the time.
    pub(super) async fn run_here<A, T>(&self, mode: Mode, args: A, work: Work<A, T>) -> Result<T>
    where
        A: Send + Sync + 'static,
        T: Send + 'static,
    {
        let runtime = tokio::runtime::Handle::current();
        let work = Box::pin(self.clone().retry(mode, Box::new(Call { args, work })));
        InCallersTask { runtime, work: Some(work) }.await.and_then(typed)
    }

    async fn retry(self, mut mode: Mode, operation: Box<dyn Operation>) -> Result<Value> {
        let (mut tries, mut reconnected) = (1, false);
        loop {
            let fault = match self.attempt(mode, &*operation).await {
                Ok(value) => return Ok(value),
                Err(fault) => fault,
            };
            if !reconnected && mode.may_repeat_after(&fault) {
                reconnected = true;
                mode.deadline = mode.deadline.max(QUICK);
                continue;
            }
            if !fault.is_lost_race() || tries == MAX_TRIES {
                return Err(fault.into());
            }
            tokio::time::sleep(Duration::from_millis(1 << tries)).await;
            tries += 1;
        }
    }

    async fn attempt(&self, mode: Mode, operation: &dyn Operation) -> Sql<Value> {
        let mut connection = self.0.pool.acquire(mode.class, mode.max_acquire_wait()).await?;
        let mut tx = Tx::new(&self.0, &mut connection);
        let work: Working<'_, Value> = match mode.statements {
            Statements::Unlimited => operation.run(&mut tx),
            Statements::OfAView => Box::pin(async {
                let mut view = tx.begin_view().await?;
                let value = operation.run(&mut view.tx()).await?;
                view.commit().await?;
                Ok(value)
            }),
        };
        let done = self.reply_within(mode, work).await;
        connection.release(done.as_ref().err()).await;
        done
    }

    /// As [`within`]. If the operation takes long, its connection may be dead, and so may
    /// the idle ones. They are pinged before they are used, so that others need not wait
    /// for the deadline too.
    async fn reply_within(&self, mode: Mode, mut work: Working<'_, Value>) -> Sql<Value> {
        match tokio::time::timeout(DOUBT_AFTER, &mut work).await {
            Ok(done) => done,
            Err(_) => {
                self.0.pool.doubt_idle();
                let rest = mode.deadline.saturating_sub(DOUBT_AFTER);
                tokio::time::timeout(rest, work).await.unwrap_or(Err(Fault::Timeout(mode.deadline)))
            }
        }
    }
}

/// How long the database may take to store these jobs with one or a few statements.
pub(super) fn enqueue_deadline<'j>(jobs: impl IntoIterator<Item = &'j ValidJob>) -> Duration {
    let extra = jobs.into_iter().map(|job| {
        let bytes = u32::try_from(job.payload.len()).unwrap_or(u32::MAX);
        ENQUEUE_PER_JOB.saturating_add(ENQUEUE_PER_BYTE.saturating_mul(bytes))
    });
    extra.fold(ENQUEUE, Duration::saturating_add).min(DEADLINE)
}

/// Fails if the database does not reply within the deadline.
pub(super) async fn within<T>(deadline: Duration, work: impl Future<Output = Sql<T>>) -> Sql<T> {
    tokio::time::timeout(deadline, work).await.unwrap_or(Err(Fault::Timeout(deadline)))
}

/// Work that continues in its own task if its caller drops it.
struct InCallersTask {
    runtime: tokio::runtime::Handle,
    work: Option<Pin<Box<dyn Future<Output = Result<Value>> + Send>>>,
}

impl Future for InCallersTask {
    type Output = Result<Value>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(work) = self.work.as_mut() else { return Poll::Pending };
        let result = std::task::ready!(work.as_mut().poll(context));
        self.work = None;
        Poll::Ready(result)
    }
}

impl Drop for InCallersTask {
    fn drop(&mut self) {
        let Some(work) = self.work.take() else { return };
        // A future that panicked must not be polled again.
        if !std::thread::panicking() {
            self.runtime.spawn(work);
        }
    }
}
