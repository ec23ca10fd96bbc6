//! Group commit: concurrent single enqueues share statements and commits.
//!
//! No timer decides: while one batch is in flight the next gathers, and when
//! it returns, that goes. One caller alone waits for nobody; a thousand share
//! one commit. A lane has one batch in flight, because two of half the size
//! take longer than one. When it returns, its callers are answered before the
//! next goes, so that they can join, or after, where many wait already (decision
//! 0015). Jobs with keys travel in a lane of their own, because they may have to
//! wait for another transaction's key.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout_at};

use super::{Enqueued, ValidJob};
use crate::error::{Error, Result};
use crate::lifecycle::When;
use crate::store::Store;

const MAX_BATCH: usize = 1000;
/// A busy queue is announced this often at most. The first job after a lull is
/// announced at once, and whoever it woke goes on claiming until none is left.
const WAKE_EVERY: Duration = Duration::from_millis(2);
/// And this often where jobs come in such numbers that fewer, larger claims
/// leave the server more time for storing them (a tenth more jobs pass through).
const WAKE_CROWD_EVERY: Duration = Duration::from_millis(5);
const CROWD: usize = 8;
/// A batch that took longer than this came from a database so far away, or so busy,
/// that the next is better full than early.
const QUICK: Duration = Duration::from_millis(3);
/// Other processes are told of it this often at most, while one here is.
const OTHERS_EVERY: Duration = Duration::from_millis(10);
/// How long a lane waits for one job with a key before it serves the next.
const PATIENCE: Duration = Duration::from_millis(200);
const MAX_BATCH_BYTES: usize = 8 * 1024 * 1024;

/// The lanes of one client.
#[derive(Debug)]
pub(crate) struct Lanes {
    store: Arc<dyn Store>,
    plain: Inbox<Order>,
    keyed: Inbox<Order>,
    wakes: Arc<Inbox<Wake>>,
}

#[derive(Debug)]
struct Order {
    job: ValidJob,
    reply: oneshot::Sender<Result<Enqueued>>,
}

impl Lanes {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Lanes { store, plain: Inbox::default(), keyed: Inbox::default(), wakes: Arc::default() }
    }

    /// Stores one job together with whoever else is enqueueing. It is on its way
    /// when this returns.
    pub(crate) fn enqueue(&self, job: ValidJob) -> impl Future<Output = Result<Enqueued>> + use<> {
        let (reply, answer) = oneshot::channel();
        let lane = if job.is_keyed() { &self.keyed } else { &self.plain };
        lane.put(Order { job, reply }, |orders| {
            tokio::spawn(run_lane(self.store.clone(), orders, self.wakes.clone()));
        });
        async {
            answer.await.unwrap_or_else(|_| {
                Err(Error::unavailable(
                    "the runtime is shutting down; whether the job was stored is not known",
                ))
            })
        }
    }

    /// Waits until every wake-up so far has been sent.
    pub(crate) async fn flush(&self) {
        let (reply, sent) = oneshot::channel();
        self.wakes.put(Wake::Flush(reply), |inbox| {
            tokio::spawn(run_wakes(self.store.clone(), inbox));
        });
        let _ = sent.await;
    }

    /// Tells workers about jobs of these queues that are due again.
    pub(crate) fn wake<'q>(&self, queues: impl IntoIterator<Item = &'q str>) {
        wake(&self.store, &self.wakes, queues);
    }

    /// Tells workers about jobs that were stored without a lane.
    pub(crate) fn announce(&self, jobs: &[ValidJob]) {
        announce(&self.store, &self.wakes, jobs);
    }
}

/// A channel whose reader is started when it is first needed, and anew when
/// the runtime it ran on is gone.
#[derive(Debug)]
struct Inbox<T>(Mutex<Option<mpsc::UnboundedSender<T>>>);

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Inbox(Mutex::new(None))
    }
}

impl<T> Inbox<T> {
    fn put(&self, item: T, start: impl FnOnce(mpsc::UnboundedReceiver<T>)) {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let item = match sender.as_ref() {
            None => item,
            Some(open) => match open.send(item) {
                Ok(()) => return,
                Err(closed) => closed.0,
            },
        };
        let (fresh, receiver) = mpsc::unbounded_channel();
        // The receiver is in hand, so this cannot fail.
        let _ = fresh.send(item);
        *sender = Some(fresh);
        start(receiver);
    }
}

async fn run_lane(
    store: Arc<dyn Store>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    wakes: Arc<Inbox<Wake>>,
) {
    let (mut untold, mut took) = (None, Duration::ZERO);
    loop {
        // Few are told first: whoever enqueues again at once still joins. A crowd
        // that waits already goes first, and the database does not wait for us.
        let is_crowd = orders.len() >= CROWD && took < QUICK;
        if !is_crowd && let Some(stored) = untold.take() {
            tell(&store, &wakes, stored);
        }
        let Some(first) = orders.recv().await else { return };
        if !is_crowd {
            tokio::task::yield_now().await;
        }
        let (mut jobs, mut replies) = gather(first, &mut orders);
        if jobs.len() == 1 && jobs[0].is_keyed() {
            // Its key may be held for long; then it waits without the lane.
            let alone = store_alone(&store, &wakes, jobs.remove(0), replies.remove(0));
            let _ = tokio::time::timeout(PATIENCE, alone).await;
            continue;
        }
        let storing = async {
            match jobs.len() {
                1 => store.enqueue(&jobs).await,
                _ => store.enqueue_or_split(&jobs).await,
            }
        };
        let telling = async {
            if let Some(stored) = untold.take() {
                tell(&store, &wakes, stored);
            }
        };
        let began = Instant::now();
        // In this order: the statement is on its way before anybody is told.
        let (stored, ()) = tokio::join!(biased; storing, telling);
        took = began.elapsed();
        match stored {
            Ok(answers) => untold = Some(Stored { jobs, replies, answers }),
            Err(error) if jobs.len() == 1 || error.is_read_only() || error.is_schema() => {
                for reply in replies {
                    let _ = reply.send(Err(error.shared()));
                }
            }
            Err(_) => split(&store, &wakes, jobs, replies),
        }
    }
}

/// Jobs that are in the database, and who waits to hear of it.
struct Stored {
    jobs: Vec<ValidJob>,
    replies: Vec<oneshot::Sender<Result<Enqueued>>>,
    answers: Vec<Enqueued>,
}

/// Workers before callers: one that flushes next must find its own wake-up sent.
fn tell(store: &Arc<dyn Store>, wakes: &Inbox<Wake>, Stored { jobs, replies, answers }: Stored) {
    announce(store, wakes, &jobs);
    for (reply, answer) in replies.into_iter().zip(answers) {
        // A caller that went away has its job all the same.
        let _ = reply.send(Ok(answer));
    }
}

fn gather(
    first: Order,
    orders: &mut mpsc::UnboundedReceiver<Order>,
) -> (Vec<ValidJob>, Vec<oneshot::Sender<Result<Enqueued>>>) {
    let mut bytes = first.job.payload.len();
    let (mut jobs, mut replies) = (vec![first.job], vec![first.reply]);
    while jobs.len() < MAX_BATCH
        && bytes < MAX_BATCH_BYTES
        && let Ok(Order { job, reply }) = orders.try_recv()
    {
        bytes += job.payload.len();
        jobs.push(job);
        replies.push(reply);
    }
    (jobs, replies)
}

/// One job of a batch may have brought the refusal, or wait for a key that some
/// transaction holds: each goes on alone, so that it fails or waits alone, and
/// the lane is free for others.
fn split(
    store: &Arc<dyn Store>,
    wakes: &Arc<Inbox<Wake>>,
    jobs: Vec<ValidJob>,
    replies: Vec<oneshot::Sender<Result<Enqueued>>>,
) {
    for (job, reply) in jobs.into_iter().zip(replies) {
        drop(store_alone(store, wakes, job, reply));
    }
}

fn store_alone(
    store: &Arc<dyn Store>,
    wakes: &Arc<Inbox<Wake>>,
    job: ValidJob,
    reply: oneshot::Sender<Result<Enqueued>>,
) -> JoinHandle<()> {
    let (store, wakes) = (store.clone(), wakes.clone());
    tokio::spawn(async move {
        let job = [job];
        let answer = store.enqueue(&job).await.map(|mut answers| answers.remove(0));
        if answer.is_ok() {
            announce(&store, &wakes, &job);
        }
        let _ = reply.send(answer);
    })
}

/// What the wake-up lane is told.
#[derive(Debug)]
enum Wake {
    Queue {
        queue: String,
        jobs: usize,
    },
    /// Answer once everything before this has been sent.
    Flush(oneshot::Sender<()>),
}

fn announce(store: &Arc<dyn Store>, wakes: &Inbox<Wake>, jobs: &[ValidJob]) {
    wake(store, wakes, jobs.iter().filter(|job| job.when == When::NOW).map(|job| job.queue.as_str()));
}

/// One queue for each job.
fn wake<'q>(store: &Arc<dyn Store>, wakes: &Inbox<Wake>, of_jobs: impl IntoIterator<Item = &'q str>) {
    let mut queues = BTreeMap::new();
    for queue in of_jobs {
        *queues.entry(queue).or_default() += 1;
    }
    for (queue, jobs) in queues {
        wakes.put(Wake::Queue { queue: queue.to_owned(), jobs }, |inbox| {
            tokio::spawn(run_wakes(store.clone(), inbox));
        });
    }
}

/// Passes on which queues have due work. While one wake-up is on its way, the
/// next ones gather. When a worker of this process can be told, it is at once,
/// and others a moment later and less often: each time costs the server a
/// transaction, just when it is to hand out the job.
async fn run_wakes(store: Arc<dyn Store>, mut inbox: mpsc::UnboundedReceiver<Wake>) {
    let mut others = BTreeSet::new();
    let mut due = Instant::now();
    loop {
        let mut next = match others.is_empty() {
            true => inbox.recv().await,
            false => timeout_at(due, inbox.recv()).await.unwrap_or_default(),
        };
        if next.is_none() && others.is_empty() {
            return;
        }
        let (mut queues, mut arrived, mut flushes) = (BTreeSet::new(), 0, Vec::new());
        while let Some(wake) = next {
            match wake {
                Wake::Queue { queue, jobs } => {
                    queues.insert(queue);
                    arrived += jobs;
                }
                Wake::Flush(reply) => flushes.push(reply),
            }
            next = inbox.try_recv().ok();
        }
        let queues: Vec<_> = queues.into_iter().collect();
        let (now, is_new) = (Instant::now(), !queues.is_empty());
        let told_here = is_new && store.wake_here(&queues);
        if told_here && others.is_empty() {
            due = due.max(now + WAKE_EVERY);
        }
        others.extend(queues);
        let is_due = now >= due || !flushes.is_empty() || inbox.is_closed();
        if !others.is_empty() && (is_due || (is_new && !told_here)) {
            let sent = tokio::spawn(tell_others(store.clone(), std::mem::take(&mut others)));
            // The next to be told here need not wait for that.
            if is_new || !flushes.is_empty() {
                let _ = sent.await;
            }
            due = Instant::now() + OTHERS_EVERY;
        }
        for reply in flushes {
            let _ = reply.send(());
        }
        if is_new {
            tokio::time::sleep(if arrived < CROWD { WAKE_EVERY } else { WAKE_CROWD_EVERY }).await;
        }
    }
}

async fn tell_others(store: Arc<dyn Store>, queues: BTreeSet<String>) {
    let queues: Vec<_> = queues.into_iter().collect();
    if let Err(error) = store.wake_others(&queues).await {
        tracing::debug!(%error, "could not announce new work; polling will find it");
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::task::{Context, Wake as OnWake};

    use super::*;
    use crate::enqueue::{EnqueuedAs, NewJob};
    use crate::store::sqlite::SqliteStore;

    /// Looks, at the moment a caller is told, whether its wake-up is on the way.
    struct Told {
        inbox: Mutex<mpsc::UnboundedReceiver<Wake>>,
        after_the_wake_up: AtomicBool,
    }

    impl OnWake for Told {
        fn wake(self: Arc<Self>) {
            let sent = self.inbox.lock().unwrap().try_recv().is_ok();
            self.after_the_wake_up.store(sent, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn a_caller_is_told_after_its_wake_up_was_sent() {
        let store: Arc<dyn Store> = Arc::new(SqliteStore::open("sqlite::memory:").await.unwrap());
        let (wakes, inbox) = mpsc::unbounded_channel();
        let wakes = Inbox(Mutex::new(Some(wakes)));
        let told = Arc::new(Told { inbox: Mutex::new(inbox), after_the_wake_up: AtomicBool::new(false) });
        let (reply, answer) = oneshot::channel();
        let mut answer = pin!(answer);
        let waker = told.clone().into();
        assert!(answer.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());

        let job = NewJob::new("greet", &1).validate().unwrap();
        let answers = vec![Enqueued { id: job.id, how: EnqueuedAs::Created }];
        tell(&store, &wakes, Stored { jobs: vec![job], replies: vec![reply], answers });
        assert!(answer.await.unwrap().is_ok());
        assert!(told.after_the_wake_up.load(Ordering::Relaxed), "a flush would have come first");
    }
}
