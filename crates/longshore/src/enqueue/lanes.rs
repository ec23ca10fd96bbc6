//! Group commit: concurrent single enqueues share statements and commits.
//!
//! There is no timer. While one batch is being stored, the next one collects, and
//! it is sent when the first returns. A single caller waits for no other caller; a
//! thousand callers share one commit. A lane has one batch in flight, because two
//! batches of half the size take longer than one. When a batch returns, its callers
//! get their replies before the next batch is sent, so that they can join it; but
//! if many callers are waiting already, the next batch is sent first (decision
//! 0015). Jobs with keys use their own lane, because they may have to wait for a key
//! that another transaction holds.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Enqueued, ValidJob};
use crate::error::{Error, Result};
use crate::store::{KeyWait, Store};
use crate::wake::{BUSY, Inbox, Notifier};

const MAX_BATCH: usize = 1000;
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;
/// If a batch took longer than this, the database is so far away or so busy that
/// a fuller next batch is better than an earlier one.
const FAST_BATCH: Duration = Duration::from_millis(3);
/// How long a lane waits for one job with a key before it serves the next.
const MAX_KEY_WAIT: Duration = Duration::from_millis(200);

/// The lanes of one client.
#[derive(Debug)]
pub(crate) struct Lanes {
    store: Arc<dyn Store>,
    notifier: Notifier,
    plain: Inbox<Request>,
    keyed: Inbox<Request>,
}

#[derive(Debug)]
struct Request {
    job: ValidJob,
    reply: Reply,
}

type Reply = oneshot::Sender<Result<Enqueued>>;

impl Lanes {
    pub(crate) fn new(store: Arc<dyn Store>, notifier: Notifier) -> Self {
        Lanes { store, notifier, plain: Inbox::default(), keyed: Inbox::default() }
    }

    /// Stores one job in the same commit as other callers' jobs. The request is in
    /// the lane when this function returns.
    pub(crate) fn enqueue(&self, job: ValidJob) -> impl Future<Output = Result<Enqueued>> + use<> {
        let (reply, result) = oneshot::channel();
        let lane = if job.is_keyed() { &self.keyed } else { &self.plain };
        lane.put(Request { job, reply }, |requests| {
            let sink = Sink { store: self.store.clone(), notifier: self.notifier.clone() };
            tokio::spawn(sink.run(requests));
        });
        async {
            result.await.unwrap_or_else(|_| {
                Err(Error::unavailable(
                    "the runtime is shutting down; the job may or may not have been stored",
                ))
            })
        }
    }
}

/// Stores the batches of one lane.
#[derive(Clone)]
struct Sink {
    store: Arc<dyn Store>,
    notifier: Notifier,
}

/// Jobs that are stored, and the callers that wait for the result.
struct Stored {
    jobs: Vec<ValidJob>,
    replies: Vec<Reply>,
    results: Vec<Enqueued>,
}

impl Sink {
    async fn run(self, mut requests: mpsc::UnboundedReceiver<Request>) {
        let (mut unreplied, mut took) = (None, Duration::ZERO);
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
            let (mut jobs, mut replies) = collect(first, &mut requests);
            if jobs.len() == 1 && jobs[0].is_keyed() {
                // Its key may be held for long; then it waits outside the lane.
                let alone = self.store_alone(jobs.remove(0), replies.remove(0));
                let _ = tokio::time::timeout(MAX_KEY_WAIT, alone).await;
                continue;
            }
            let storing = self.store.enqueue(&jobs, KeyWait::for_splittable_batch(jobs.len()));
            let replying = async {
                if let Some(stored) = unreplied.take() {
                    self.reply(stored);
                }
            };
            let began = Instant::now();
            // In this order: the statement is sent before any reply.
            let (stored, ()) = tokio::join!(biased; storing, replying);
            took = began.elapsed();
            match stored {
                Ok(results) => unreplied = Some(Stored { jobs, replies, results }),
                Err(error) if jobs.len() == 1 || error.is_read_only() || error.is_schema() => {
                    for reply in replies {
                        let _ = reply.send(Err(error.shared()));
                    }
                }
                Err(_) => self.split(jobs, replies),
            }
        }
    }

    /// Notifies workers before it replies to callers: a caller that flushes next
    /// must find its own wake-up requested.
    fn reply(&self, Stored { jobs, replies, results }: Stored) {
        self.notifier.notify_enqueued(&jobs);
        for (reply, result) in replies.into_iter().zip(results) {
            // The job is stored even if its caller no longer waits.
            let _ = reply.send(Ok(result));
        }
    }

    /// One job of the batch may have caused the error, or waits for a key that
    /// some transaction holds. Each job is now stored alone, so that it fails or
    /// waits alone and the lane is free for others.
    fn split(&self, jobs: Vec<ValidJob>, replies: Vec<Reply>) {
        for (job, reply) in jobs.into_iter().zip(replies) {
            drop(self.store_alone(job, reply));
        }
    }

    fn store_alone(&self, job: ValidJob, reply: Reply) -> JoinHandle<()> {
        let sink = self.clone();
        tokio::spawn(async move {
            let job = [job];
            let result = sink.store.enqueue(&job, KeyWait::Long).await.map(|mut results| results.remove(0));
            if result.is_ok() {
                sink.notifier.notify_enqueued(&job);
            }
            let _ = reply.send(result);
        })
    }
}

fn collect(first: Request, requests: &mut mpsc::UnboundedReceiver<Request>) -> (Vec<ValidJob>, Vec<Reply>) {
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
    (jobs, replies)
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Wake};

    use super::*;
    use crate::enqueue::{EnqueuedAs, NewJob};
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
        Sink { store, notifier }.reply(Stored { jobs: vec![job], replies: vec![reply], results });
        assert!(result.await.unwrap().is_ok());
        assert!(on_reply.wake_up_came_first.load(Ordering::Relaxed), "a flush would have come first");
    }
}
