//! Group commit: concurrent single enqueues share statements and commits.
//!
//! There is no timer. While one batch is being stored, the next one collects, and
//! it is sent when the first returns. A single caller waits for no other caller; a
//! thousand callers share one commit. A lane has one batch in flight, because two
//! batches of half the size take longer than one. When a batch returns, its callers
//! get their replies before the next batch is sent, so that they can join it; but
//! if many callers are waiting already, the next batch is sent first (decision
//! 0015). Jobs with keys use their own lane, because they may have to wait for a key
//! that another transaction holds. Such a job leaves the lane and waits elsewhere, for a
//! limited time (decision 0019).
//!
//! The number of waiting requests and the size of their payloads are limited, so that a
//! database that does not reply cannot exhaust the memory of its clients.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::held_keys::{HeldKeys, Turn};
use crate::client::wake::{BUSY, Inbox, Notifier};
use crate::error::{Error, Result};
use crate::job::JobRecord;
use crate::rules::enqueue::{Enqueued, EnqueuedAs, EnqueuedBatch, ValidJob};
use crate::store::{KeyWait, Store};

/// A request that was stored, with its result.
#[derive(Debug)]
pub(crate) struct StoredRequest {
    pub(crate) enqueued: Enqueued,
    job: ValidJob,
    created_at: Option<DateTime<Utc>>,
}

impl StoredRequest {
    /// The job as it was created. `None` if the request did not create it, or if an
    /// earlier try did: then the job may have changed since, and must be read.
    pub(crate) fn into_created_job(self) -> Option<JobRecord> {
        let created_at = self.created_at.filter(|_| self.enqueued.how == EnqueuedAs::Created)?;
        self.job.into_record(created_at)
    }
}

const MAX_BATCH: usize = 1000;
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;
/// If a batch took longer than this, the database is so far away or so busy that
/// a fuller next batch is better than an earlier one.
const FAST_BATCH: Duration = Duration::from_millis(3);
/// If a batch takes longer than this, the next one does not wait for it.
const OVERDUE_AFTER: Duration = Duration::from_secs(1);
/// How many jobs of failed batches are stored alone at the same time.
const MAX_ALONE: usize = 4;
/// How long a job waits for a key that another client's open transaction holds.
const MAX_KEY_WAIT: Duration = Duration::from_secs(2);
/// How many enqueues may wait for the database, and how many bytes of payloads. Further
/// ones fail at once.
const MAX_WAITING: u64 = 10_000;
const MAX_WAITING_BYTES: u64 = 64 * 1024 * 1024;

/// The lanes of one client.
#[derive(Debug)]
pub(crate) struct Lanes {
    sink: Sink,
    backlog: Arc<Backlog>,
    plain: Inbox<Request>,
    keyed: Inbox<Request>,
}

#[derive(Debug)]
struct Request {
    job: ValidJob,
    reply: Reply,
}

/// The caller that waits for a result, and its place in the backlog.
#[derive(Debug)]
struct Reply {
    caller: oneshot::Sender<Result<StoredRequest>>,
    _place: Place,
}

impl Reply {
    fn send(self, result: Result<StoredRequest>) {
        // The result stands even if the caller no longer waits.
        let _ = self.caller.send(result);
    }
}

impl Lanes {
    pub(crate) fn new(store: Arc<dyn Store>, notifier: Notifier) -> Self {
        Lanes {
            sink: Sink::new(store, notifier),
            backlog: Arc::default(),
            plain: Inbox::default(),
            keyed: Inbox::default(),
        }
    }

    /// Stores one job in the same commit as other callers' jobs. The request is in
    /// the lane when this function returns, unless too many wait already.
    /// The result contains the request, so that the caller can build the new job from it.
    pub(crate) fn enqueue(&self, job: ValidJob) -> impl Future<Output = Result<StoredRequest>> + use<> {
        let result = self.backlog.enter(job.payload.len()).map(|place| {
            let (caller, result) = oneshot::channel();
            let lane = if job.is_keyed() { &self.keyed } else { &self.plain };
            lane.put(Request { job, reply: Reply { caller, _place: place } }, |requests| {
                tokio::spawn(self.sink.clone().run(requests));
            });
            result
        });
        async {
            result?.await.unwrap_or_else(|_| {
                Err(Error::unavailable(
                    "the runtime is shutting down; the job may or may not have been stored",
                ))
            })
        }
    }
}

/// The requests of one client that wait for their result: their number in the upper bits
/// and the bytes of their payloads in the lower ones, so that a request costs one
/// addition.
#[derive(Debug, Default)]
struct Backlog(AtomicU64);

impl Backlog {
    const ONE: u64 = 1 << 40;

    fn enter(self: &Arc<Self>, bytes: usize) -> Result<Place> {
        let weight = Backlog::ONE + bytes as u64;
        let after = self.0.fetch_add(weight, Ordering::Relaxed) + weight;
        let place = Place { backlog: self.clone(), weight };
        let is_full = after / Backlog::ONE > MAX_WAITING || after % Backlog::ONE > MAX_WAITING_BYTES;
        if is_full { Err(backlog_is_full()) } else { Ok(place) }
    }
}

fn backlog_is_full() -> Error {
    Error::overloaded(format!(
        "{MAX_WAITING} enqueues or {} MiB of payloads wait for the database already; \
         nothing was stored; try again later",
        MAX_WAITING_BYTES / 1024 / 1024
    ))
}

/// A request in the backlog.
#[derive(Debug)]
struct Place {
    backlog: Arc<Backlog>,
    weight: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.backlog.0.fetch_sub(self.weight, Ordering::Relaxed);
    }
}

/// Stores the batches of the lanes.
#[derive(Clone, Debug)]
struct Sink {
    store: Arc<dyn Store>,
    notifier: Notifier,
    held_keys: Arc<HeldKeys>,
    /// The turns of jobs that are stored alone after their batch failed.
    alone: Arc<Semaphore>,
}

/// Jobs, and the callers that wait for the results.
struct Batch {
    jobs: Vec<ValidJob>,
    replies: Vec<Reply>,
}

/// A batch that is stored.
struct Stored {
    batch: Batch,
    done: EnqueuedBatch,
}

/// A batch that is being stored.
type Storing = Pin<Box<dyn Future<Output = (Batch, Result<EnqueuedBatch>)> + Send>>;

impl Sink {
    fn new(store: Arc<dyn Store>, notifier: Notifier) -> Self {
        let alone = Arc::new(Semaphore::new(MAX_ALONE));
        Sink { store, notifier, held_keys: Arc::default(), alone }
    }

    async fn run(self, mut requests: mpsc::UnboundedReceiver<Request>) {
        let (mut unreplied, mut took) = (None, Duration::ZERO);
        let mut overdue: Option<JoinHandle<()>> = None;
        loop {
            // With few callers waiting, reply first, so that a caller that enqueues
            // again at once can join the next batch. With many, send the next batch
            // first, so that the database does not wait for this process.
            let is_full = requests.len() >= BUSY && took < FAST_BATCH;
            if !is_full && let Some(stored) = unreplied.take() {
                self.reply(stored);
            }
            let Some(first) = requests.recv().await else { return };
            if !is_full {
                tokio::task::yield_now().await;
            }
            let batch = self.without_held_keys(collect(first, &mut requests));
            if batch.jobs.is_empty() {
                continue;
            }
            let mut storing = self.storing(batch);
            let replying = async {
                if let Some(stored) = unreplied.take() {
                    self.reply(stored);
                }
            };
            let began = Instant::now();
            // In this order: the statement is sent before any reply.
            let (done, ()) =
                tokio::join!(biased; tokio::time::timeout(OVERDUE_AFTER, &mut storing), replying);
            let (batch, done) = match done {
                Ok(done) => done,
                // The connection may be dead. The batch waits for its reply outside the
                // lane, and the next one uses another connection. This happens to one
                // batch at a time: the database may be slow as a whole.
                Err(_) if overdue.as_ref().is_none_or(JoinHandle::is_finished) => {
                    overdue = Some(tokio::spawn(self.clone().complete(storing)));
                    continue;
                }
                Err(_) => storing.await,
            };
            took = began.elapsed();
            match done {
                Ok(done) => unreplied = Some(Stored { batch, done }),
                Err(error) => self.fail(batch, error),
            }
        }
    }

    /// Jobs with a key that others wait for already wait outside the lane too.
    fn without_held_keys(&self, batch: Batch) -> Batch {
        if self.held_keys.is_empty() || !batch.jobs.iter().any(|job| self.held_keys.contains_key_of(job)) {
            return batch;
        }
        let mut rest = Batch { jobs: Vec::new(), replies: Vec::new() };
        for (job, reply) in batch.jobs.into_iter().zip(batch.replies) {
            if self.held_keys.contains_key_of(&job) {
                tokio::spawn(self.clone().wait_for_keys(job, reply));
            } else {
                rest.jobs.push(job);
                rest.replies.push(reply);
            }
        }
        rest
    }

    fn storing(&self, batch: Batch) -> Storing {
        let store = self.store.clone();
        Box::pin(async move {
            let done = store.enqueue(&batch.jobs, KeyWait::Short).await;
            (batch, done)
        })
    }

    /// Waits for the result of a batch outside the lane.
    async fn complete(self, storing: Storing) {
        match storing.await {
            (batch, Ok(done)) => self.reply(Stored { batch, done }),
            (batch, Err(error)) => self.fail(batch, error),
        }
    }

    /// Notifies workers before it replies to callers: a caller that flushes next
    /// must find its own wake-up requested.
    fn reply(&self, Stored { batch, done }: Stored) {
        self.notifier.notify_enqueued(&batch.jobs);
        let created_at = done.created_at;
        let requests = batch.jobs.into_iter().zip(batch.replies);
        for ((job, reply), enqueued) in requests.zip(done.results) {
            reply.send(Ok(StoredRequest { enqueued, job, created_at }));
        }
    }

    /// If one job of the batch may have caused the error, or waits for a key that some
    /// transaction holds, each job is stored alone, so that it fails or waits alone and
    /// the lane is free for others. Otherwise all jobs fail: on their own they would fail
    /// in the same way.
    fn fail(&self, mut batch: Batch, error: Error) {
        let is_splittable = !(error.is_read_only() || error.is_schema() || error.is_unreachable());
        match batch.jobs.len() {
            1 if error.is_locked() && batch.jobs[0].is_keyed() => {
                let (job, reply) = (batch.jobs.remove(0), batch.replies.remove(0));
                tokio::spawn(self.clone().wait_for_keys(job, reply));
            }
            2.. if is_splittable => {
                for (job, reply) in batch.jobs.into_iter().zip(batch.replies) {
                    tokio::spawn(self.clone().store_alone(job, reply));
                }
            }
            _ => batch.replies.into_iter().for_each(|reply| reply.send(Err(error.shared()))),
        }
    }

    /// Stores one job of a batch that failed.
    async fn store_alone(self, job: ValidJob, reply: Reply) {
        // A batch of a thousand must not use a thousand connections.
        let turn = self.alone.acquire().await;
        if self.held_keys.contains_key_of(&job) {
            drop(turn);
            return self.clone().wait_for_keys(job, reply).await;
        }
        let storing = self.storing(Batch { jobs: vec![job], replies: vec![reply] });
        self.clone().complete(storing).await;
    }

    /// Waits, for a limited time, for a key that another client's open transaction holds.
    async fn wait_for_keys(self, job: ValidJob, reply: Reply) {
        let until = Instant::now() + MAX_KEY_WAIT;
        let job = [job];
        let result = loop {
            let waiter = self.held_keys.wait_for_keys_of(&job[0]);
            let done = match tokio::time::timeout_at(until, waiter.turn()).await {
                Ok(Turn::Own(_turn)) => {
                    let rest = until.saturating_duration_since(Instant::now());
                    let done = self.store.enqueue(&job, KeyWait::UpTo(rest)).await;
                    if done.is_ok() {
                        waiter.report_free();
                    }
                    done
                }
                Ok(Turn::KeyIsFree) => {
                    drop(waiter);
                    let _turn = self.alone.acquire().await;
                    match self.store.enqueue(&job, KeyWait::Short).await {
                        Err(error) if error.is_locked() && Instant::now() < until => continue,
                        done => done,
                    }
                }
                Err(_) => Err(Error::locked(
                    "another client's open transaction holds a key of the job, and did not end in time; \
                     nothing was stored; end that transaction, or try again later",
                )),
            };
            break done;
        };
        if result.is_ok() {
            self.notifier.notify_enqueued(&job);
        }
        let [job] = job;
        reply.send(result.map(|mut done| StoredRequest {
            enqueued: done.results.remove(0),
            job,
            created_at: done.created_at,
        }));
    }
}

fn collect(first: Request, requests: &mut mpsc::UnboundedReceiver<Request>) -> Batch {
    let mut bytes = first.job.payload.len();
    let (mut jobs, mut replies) = (vec![first.job], vec![first.reply]);
    while jobs.len() < MAX_BATCH
        && bytes < MAX_BATCH_BYTES
        && let Ok(Request { job, reply }) = requests.try_recv()
    {
        bytes += job.payload.len();
        jobs.push(job);
        replies.push(reply);
    }
    Batch { jobs, replies }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::AtomicBool;
    use std::task::{Context, Wake};

    use super::*;
    use crate::rules::enqueue::{Enqueued, EnqueuedAs, NewJob};
    use crate::store::sqlite::SqliteStore;

    /// Records, at the moment a caller gets its reply, whether its wake-up has been
    /// requested.
    struct OnReply {
        notifier: Notifier,
        wake_up_came_first: AtomicBool,
    }

    impl Wake for OnReply {
        fn wake(self: Arc<Self>) {
            self.wake_up_came_first.store(self.notifier.has_started(), Ordering::Relaxed);
        }
    }

    #[test]
    fn requests_and_payloads_beyond_the_limits_are_refused_until_others_end() {
        let backlog = Arc::<Backlog>::default();
        let half = MAX_WAITING_BYTES as usize / 2;
        let (one, two) = (backlog.enter(half).unwrap(), backlog.enter(half).unwrap());
        assert!(backlog.enter(1).unwrap_err().is_overloaded());
        drop((one, two));
        let mut waiting: Vec<_> = (0..MAX_WAITING).map(|_| backlog.enter(2).unwrap()).collect();
        assert!(backlog.enter(0).unwrap_err().is_overloaded());
        waiting.pop();
        waiting.push(backlog.enter(1).unwrap());
        drop(waiting);
        assert_eq!(backlog.0.load(Ordering::Relaxed), 0);
    }

    #[tokio::test]
    async fn the_wake_up_is_requested_before_the_caller_gets_its_reply() {
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open("sqlite::memory:").await.unwrap());
        let notifier = Notifier::new(store.clone());
        let on_reply =
            Arc::new(OnReply { notifier: notifier.clone(), wake_up_came_first: AtomicBool::new(false) });
        let (reply, result) = oneshot::channel();
        let mut result = pin!(result);
        let waker = on_reply.clone().into();
        assert!(result.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());

        let job = NewJob::new("greet", &1).validate().unwrap();
        let results = vec![Enqueued { id: job.id, how: EnqueuedAs::Created }];
        let done = EnqueuedBatch { results, created_at: None };
        let place = Arc::<Backlog>::default().enter(0).unwrap();
        let batch = Batch { jobs: vec![job], replies: vec![Reply { caller: reply, _place: place }] };
        Sink::new(store, notifier).reply(Stored { batch, done });
        assert!(result.await.unwrap().is_ok());
        assert!(on_reply.wake_up_came_first.load(Ordering::Relaxed), "a flush would have come first");
    }
}
