//! The one door. Programs, the API, the CLI and the dashboard reach the queue
//! through [`Client`] and nothing else.
//!
//! A moving job is chased: an operation looks where the job stands, asks
//! [`lifecycle`] what follows, and stores that only if the
//! job still stands there; otherwise it looks again.

use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};

use crate::enqueue::lanes::Lanes;
use crate::enqueue::{Edit, Enqueued, NewJob, UniqueMode, ValidEdit, ValidJob, check_name};
use crate::error::{Error, Result};
use crate::job::{AttemptEnd, JobId, JobRecord, Outcome, WorkerId};
use crate::lifecycle::{self, Ending, Event, Flags, Leave, State, Transition};
use crate::retry::RetryPolicy;
use crate::store::{
    CheckReport, Claimed, Count, DeadFilter, Fenced, Lease, ListFilter, Migrated, Operated, Operation, Page,
    QueueChange, QueueRecord, Settled, Settlement, Store, WorkerRecord, keepable,
};

/// How often a moving job is looked for again before giving up.
const ROUNDS: usize = 5;

/// A handle to one queue database. Cheap to clone; clones share the lanes in
/// which concurrent enqueues commit together.
///
/// ```
/// # #[cfg(feature = "sqlite")]
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> longshore::Result<()> {
/// use longshore::{Client, NewJob, Status};
///
/// let client = Client::connect("sqlite::memory:").await?;
/// client.migrate().await?;
/// let job = client.enqueue(NewJob::new("greet", &"Ada")).await?;
/// assert_eq!(client.get(job.id).await?.status, Status::Queued);
/// # Ok(()) }
/// # #[cfg(not(feature = "sqlite"))] fn main() {}
/// ```
#[derive(Clone, Debug)]
pub struct Client {
    store: Arc<dyn Store>,
    lanes: Arc<Lanes>,
}

/// What a cancel did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cancelled {
    /// The job waited and is cancelled.
    Now,
    /// The job runs; its handler has been told.
    Pending,
}

/// How an attempt ended, in its holder's words.
#[derive(Debug)]
pub struct Report<'a> {
    /// The attempt.
    pub claimed: &'a Claimed,
    /// How it ended.
    pub ending: Ending,
    /// Jobs that exist only if this report is stored.
    pub follow_ups: Vec<ValidJob>,
}

/// A caller's own transaction, in which jobs become visible when it commits
/// and never exist if it rolls back. `&mut PgConnection` (what `&mut *tx` of a
/// sqlx transaction is) and `&rusqlite::Connection` (what a rusqlite
/// transaction derefs to) are such.
#[expect(async_fn_in_trait, reason = "implemented by the engines only")]
pub trait CallerTransaction {
    /// Stores the jobs by the caller's connection.
    #[doc(hidden)]
    async fn enqueue(self, store: &dyn Store, jobs: &[ValidJob]) -> Result<Vec<Enqueued>>;
}

/// One job on its way; await it to store it.
#[must_use = "nothing is stored until this is awaited"]
pub struct Enqueueing<'a> {
    client: &'a Client,
    job: NewJob,
}

impl<'a> Enqueueing<'a> {
    /// Stores it inside the caller's own transaction instead.
    pub async fn in_tx(self, transaction: impl CallerTransaction) -> Result<Enqueued> {
        let mut answers = self.client.enqueue_in(transaction, [self.job]).await?;
        Ok(answers.remove(0))
    }

    /// Changes anything that a [`NewJob`] lets one say.
    pub fn with(self, change: impl FnOnce(NewJob) -> NewJob) -> Self {
        Enqueueing { job: change(self.job), ..self }
    }

    /// See [`NewJob::id`].
    pub fn id(self, id: JobId) -> Self {
        self.with(|job| job.id(id))
    }

    /// See [`NewJob::queue`].
    pub fn queue(self, queue: impl Into<String>) -> Self {
        self.with(|job| job.queue(queue))
    }

    /// See [`NewJob::priority`].
    pub fn priority(self, priority: i64) -> Self {
        self.with(|job| job.priority(priority))
    }

    /// See [`NewJob::max_attempts`].
    pub fn max_attempts(self, max_attempts: i64) -> Self {
        self.with(|job| job.max_attempts(max_attempts))
    }

    /// See [`NewJob::run_at`].
    pub fn run_at(self, at: DateTime<Utc>) -> Self {
        self.with(|job| job.run_at(at))
    }

    /// See [`NewJob::delay`].
    pub fn delay(self, delay: Duration) -> Self {
        self.with(|job| job.delay(delay))
    }

    /// See [`NewJob::idempotency_key`].
    pub fn idempotency_key(self, key: impl Into<String>) -> Self {
        self.with(|job| job.idempotency_key(key))
    }

    /// See [`NewJob::unique_key`].
    pub fn unique_key(self, key: impl Into<String>, mode: UniqueMode) -> Self {
        self.with(|job| job.unique_key(key, mode))
    }

    /// See [`NewJob::timeout`].
    pub fn timeout(self, timeout: Option<Duration>) -> Self {
        self.with(|job| job.timeout(timeout))
    }

    /// See [`NewJob::retry`].
    pub fn retry(self, policy: RetryPolicy) -> Self {
        self.with(|job| job.retry(policy))
    }

    /// See [`NewJob::flags`].
    pub fn flags<S: Into<String>>(self, flags: impl IntoIterator<Item = S>) -> Self {
        self.with(|job| job.flags(flags))
    }

    /// See [`NewJob::tags`].
    pub fn tags<S: Into<String>>(self, tags: impl IntoIterator<Item = S>) -> Self {
        self.with(|job| job.tags(tags))
    }

    /// See [`NewJob::context`].
    pub fn context(self, context: impl Into<String>) -> Self {
        self.with(|job| job.context(context))
    }
}

impl<'a> IntoFuture for Enqueueing<'a> {
    type Output = Result<Enqueued>;
    type IntoFuture = Pin<Box<dyn Future<Output = Result<Enqueued>> + Send + 'a>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.client.lanes.enqueue(self.job.validate()?).await })
    }
}

impl Client {
    /// Connects to `postgres://…` or `sqlite:…`.
    pub async fn connect(url: &str) -> Result<Self> {
        Ok(Client::new(crate::store::open(url).await?))
    }

    /// A client of an engine opened elsewhere.
    pub fn new(store: Arc<dyn Store>) -> Self {
        Client { lanes: Arc::new(Lanes::new(store.clone())), store }
    }

    /// The engine: the verbs that workers use.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Brings the tables to this build's version; does nothing when they are.
    pub async fn migrate(&self) -> Result<Migrated> {
        self.store.migrate().await
    }

    // ---- enqueue ---------------------------------------------------------

    /// Asks for one job, which is stored durably when this is awaited.
    /// Concurrent callers share a commit.
    ///
    /// ```
    /// # use longshore::{Client, NewJob};
    /// # tokio::runtime::Runtime::new().unwrap().block_on(async {
    /// # let client = Client::connect("sqlite::memory:").await?;
    /// # client.migrate().await?;
    /// client.enqueue(NewJob::new("greet", "Ada")).priority(10).queue("mail").await?;
    /// # Ok::<(), longshore::Error>(())
    /// # }).unwrap();
    /// ```
    pub fn enqueue(&self, job: impl Into<NewJob>) -> Enqueueing<'_> {
        Enqueueing { client: self, job: job.into() }
    }

    /// Stores many jobs in one commit: all or none. One answer per job, in
    /// the order given.
    pub async fn enqueue_many<J: Into<NewJob>>(
        &self,
        jobs: impl IntoIterator<Item = J>,
    ) -> Result<Vec<Enqueued>> {
        let jobs = validate_all(jobs)?;
        let enqueued = self.store.enqueue(&jobs).await?;
        self.lanes.announce(&jobs);
        Ok(enqueued)
    }

    /// Stores jobs inside the caller's own transaction.
    pub async fn enqueue_in(
        &self,
        transaction: impl CallerTransaction,
        jobs: impl IntoIterator<Item = impl Into<NewJob>>,
    ) -> Result<Vec<Enqueued>> {
        transaction.enqueue(&*self.store, &validate_all(jobs)?).await
    }

    /// Waits until workers have been told of everything enqueued so far. For
    /// programs that exit right after: polling would find the jobs anyway.
    pub async fn flush(&self) {
        self.lanes.flush().await;
    }

    // ---- settle ----------------------------------------------------------

    /// Ends attempts, in one batch, each answered by itself. What becomes of a
    /// job that was cancelled meanwhile is decided from the flag that the
    /// database holds when the end is stored.
    pub async fn settle(&self, reports: Vec<Report<'_>>) -> Result<Vec<Fenced>> {
        let fenced = |kept| if kept == Kept::LeaseLost { Fenced::LeaseLost } else { Fenced::Held };
        Ok(self.settle_as(&reports).await?.into_iter().map(fenced).collect())
    }

    /// As [`settle`](Self::settle), and says what became of each job.
    pub(crate) async fn settle_as(&self, reports: &[Report<'_>]) -> Result<Vec<Kept>> {
        let mut answers = vec![Kept::LeaseLost; reports.len()];
        let mut open: Vec<(usize, Flags)> = (0..reports.len()).map(|i| (i, Flags::default())).collect();
        // Both flags only ever rise, so an item is decided at most three times.
        while !open.is_empty() {
            let batch: Vec<Settlement> = open.iter().map(|(i, flags)| decide(&reports[*i], *flags)).collect();
            let settled = self.store.settle(&batch).await?;
            let mut again = Vec::new();
            for (((i, _), settled), settlement) in open.into_iter().zip(settled).zip(&batch) {
                match settled {
                    Settled::Stored => answers[i] = Kept::from(&settlement.leave),
                    Settled::LeaseLost => {}
                    Settled::Flagged(flags) => again.push((i, flags)),
                }
            }
            open = again;
        }
        for report in reports {
            self.lanes.announce(&report.follow_ups);
        }
        Ok(answers)
    }

    /// Releases, uncharged, the leases of a worker that it does not know it
    /// holds, because the answer to a claim was lost; how many. Not to be called
    /// while a claim of that worker is under way.
    pub async fn give_back_unknown(&self, worker: WorkerId, held: &[Lease]) -> Result<u64> {
        let mut given_back = 0;
        for lease in self.store.leases(worker).await? {
            let Some(State::Running(running)) = self.store.locate(lease.id).await? else { continue };
            if held.contains(&lease) || running.lease_no != lease.lease_no {
                continue;
            }
            let settlement = Settlement {
                lease,
                seen: Some(running.flags),
                leave: lifecycle::settle(&running, Ending::Released),
                follow_ups: Vec::new(),
            };
            given_back += u64::from(self.store.settle(&[settlement]).await? == [Settled::Stored]);
        }
        Ok(given_back)
    }

    // ---- operate ---------------------------------------------------------

    /// Cancels a waiting job at once and tells a running one to stop. A job
    /// that has ended is a conflict, an unknown one is not found.
    pub async fn cancel(&self, id: JobId) -> Result<Cancelled> {
        match self.chase(id, &Command::Cancel).await? {
            Operation::RequestCancel => Ok(Cancelled::Pending),
            _ => Ok(Cancelled::Now),
        }
    }

    /// Lets a finished job run again with a fresh budget, and a waiting one
    /// run now. A running job is a conflict.
    pub async fn retry(&self, id: JobId) -> Result<()> {
        self.chase(id, &Command::Retry).await?;
        self.wake_queue_of(id).await;
        Ok(())
    }

    /// Changes a waiting job: a claim gets the old job whole or the new one.
    pub async fn edit(&self, id: JobId, edit: Edit) -> Result<()> {
        self.chase(id, &Command::Edit(edit.validate()?)).await.map(|_| ())
    }

    /// Removes a finished job and its history.
    pub async fn delete(&self, id: JobId) -> Result<()> {
        self.chase(id, &Command::Delete).await.map(|_| ())
    }

    /// Lets a dead letter run again with a fresh budget.
    pub async fn redrive(&self, id: JobId) -> Result<()> {
        self.chase(id, &Command::Redrive).await?;
        self.wake_queue_of(id).await;
        Ok(())
    }

    /// Redrives up to `filter.limit` dead letters, oldest first; how many. Ones
    /// whose unique key meanwhile belongs to another job, or that somebody else
    /// redrives, are passed over.
    pub async fn redrive_all(&self, filter: &DeadFilter) -> Result<u64> {
        const STEP: u32 = 500;
        let (mut redriven, mut left) = (0, filter.limit);
        let mut page = filter.clone();
        while left > 0 {
            page.limit = left.min(STEP);
            let ids = self.store.dead_letters(&page).await?;
            for id in &ids {
                match self.chase(*id, &Command::Redrive).await {
                    Ok(_) => redriven += 1,
                    Err(error) if error.is_conflict() || error.is_not_found() => {}
                    Err(error) => return Err(error),
                }
            }
            if (ids.len() as u32) < page.limit {
                break;
            }
            left -= ids.len() as u32;
            page.after = ids.last().copied();
        }
        Ok(redriven)
    }

    async fn chase(&self, id: JobId, command: &Command) -> Result<Operation> {
        for _ in 0..ROUNDS {
            let Some(state) = self.store.locate(id).await? else {
                return Err(Error::not_found(format!("job {id} does not exist, or is no longer kept")));
            };
            let operation = command.follow(&state).map_err(|refusal| refusal.into_error(id))?;
            match self.store.operate(id, &state, &operation).await? {
                Operated::Done => return Ok(operation),
                Operated::Moved => {}
                Operated::KeyTaken(holder) => {
                    return Err(Error::conflict(format!(
                        "job {id}: its unique key belongs to live job {holder}; cancel that, or wait for it to end"
                    )));
                }
            }
        }
        Err(Error::unavailable(format!("job {id} kept moving; try again")))
    }

    async fn wake_queue_of(&self, id: JobId) {
        if let Ok(Some(job)) = self.store.get(id).await
            && let Err(error) = self.store.wake(&[job.queue]).await
        {
            tracing::debug!(%error, "could not announce new work; polling will find it");
        }
    }

    // ---- workers and queues ----------------------------------------------

    /// All workers, newest first; `threshold` overrides each worker's own in
    /// deciding who is stale.
    pub async fn workers(&self, threshold: Option<Duration>) -> Result<Vec<WorkerRecord>> {
        self.store.workers(threshold).await
    }

    /// Stops claims from a queue; running jobs go on.
    pub async fn pause(&self, queue: &str) -> Result<()> {
        self.set_queue(queue, QueueChange { paused: Some(true), ..QueueChange::default() }).await
    }

    /// Lets claims from a queue go on.
    pub async fn resume(&self, queue: &str) -> Result<()> {
        self.set_queue(queue, QueueChange { paused: Some(false), ..QueueChange::default() }).await?;
        self.store.wake(&[queue.to_owned()]).await
    }

    /// Lets at most `limit` jobs of a queue run at once, in all processes
    /// together; 1 makes it serial, `None` lifts the limit.
    pub async fn limit(&self, queue: &str, limit: Option<u32>) -> Result<()> {
        if limit == Some(0) {
            return Err(Error::invalid(
                "limit",
                format!("queue `{queue}`: limit must be at least 1; pause the queue to stop it"),
            ));
        }
        self.set_queue(queue, QueueChange { limit: Some(limit), ..QueueChange::default() }).await
    }

    async fn set_queue(&self, queue: &str, change: QueueChange) -> Result<()> {
        check_name("queue", queue)?;
        self.store.set_queue(queue, &change).await
    }

    /// Queues that have settings or live jobs.
    pub async fn queues(&self) -> Result<Vec<QueueRecord>> {
        self.store.queues().await
    }

    // ---- inspect ---------------------------------------------------------

    /// One job with its history.
    pub async fn get(&self, id: JobId) -> Result<JobRecord> {
        let job = self.store.get(id).await?;
        job.ok_or_else(|| Error::not_found(format!("job {id} does not exist, or is no longer kept")))
    }

    /// A page of jobs, newest first.
    pub async fn list(&self, filter: &ListFilter) -> Result<Page> {
        self.store.list(filter).await
    }

    /// How many jobs are in each status, by queue and kind.
    pub async fn counts(&self) -> Result<Vec<Count>> {
        self.store.counts().await
    }

    /// Proves that every job is in exactly one place.
    pub async fn check(&self) -> Result<CheckReport> {
        self.store.check().await
    }
}

/// What became of a job whose attempt was settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Finished(Outcome),
    Requeued(AttemptEnd),
    LeaseLost,
}

impl From<&Leave> for Kept {
    fn from(leave: &Leave) -> Self {
        match leave {
            Leave::Finish(finish) => Kept::Finished(finish.outcome),
            Leave::Requeue(requeue) => Kept::Requeued(requeue.history),
        }
    }
}

/// What an operator wants of a job.
enum Command {
    Cancel,
    Retry,
    Redrive,
    Edit(ValidEdit),
    Delete,
}

impl Command {
    fn event(&self) -> Event {
        match self {
            Command::Cancel => Event::Cancel,
            Command::Retry => Event::Retry,
            Command::Redrive => Event::Redrive,
            Command::Edit(_) => Event::Edit,
            Command::Delete => Event::Delete,
        }
    }

    fn follow(&self, state: &State) -> Result<Operation, lifecycle::Refusal> {
        Ok(match (lifecycle::next(state, self.event())?, self) {
            (Transition::Finish(finish), _) => Operation::Cancel { attempts: finish.attempts },
            (Transition::RequestCancel, _) => Operation::RequestCancel,
            (Transition::Reopen, _) => Operation::Reopen,
            (Transition::RunNow, _) => Operation::RunNow,
            (Transition::Rewrite, Command::Edit(edit)) => Operation::Rewrite(edit.clone()),
            (Transition::Remove, _) => Operation::Remove,
            (Transition::Rewrite | Transition::Lease { .. } | Transition::Requeue(_), _) => {
                unreachable!("no operator's command leads there")
            }
        })
    }
}

fn decide(report: &Report<'_>, flags: Flags) -> Settlement {
    let seen = match report.ending {
        Ending::Succeeded { .. } => None,
        _ => Some(flags),
    };
    let running = lifecycle::Running { flags, ..report.claimed.running() };
    let ending = match report.ending.clone() {
        Ending::Succeeded { result } => Ending::Succeeded { result: result.map(keepable) },
        ending => ending,
    };
    Settlement {
        lease: report.claimed.lease(),
        seen,
        leave: lifecycle::settle(&running, ending),
        follow_ups: report.follow_ups.clone(),
    }
}

/// Checks a batch, naming the job that is wrong by its place.
fn validate_all(jobs: impl IntoIterator<Item = impl Into<NewJob>>) -> Result<Vec<ValidJob>> {
    let checked = jobs.into_iter().enumerate().map(|(i, job)| {
        job.into().validate().map_err(|error| match error.field() {
            Some(field) => Error::invalid(format!("jobs[{i}].{field}"), format!("jobs[{i}]: {error}")),
            None => error,
        })
    });
    checked.collect()
}
