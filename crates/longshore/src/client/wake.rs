//! Wake-ups: notifying workers that a queue has due jobs, or that a job they run is to be
//! cancelled.
//!
//! Every code path that makes a job due notifies workers through [`Notifier`]: enqueue, release, requeue,
//! recovery, an operator's retry, redrive, edit or operation, a resumed queue, a changed limit, an event, the
//! end of a task that others wait for and a cron tick. A wake-up is a hint: it may be lost, and then polling
//! finds the job.
//!
//! A cancel of a running job notifies the worker that holds it. The notification names
//! only the worker, so that many cancels need few notifications; the worker reads from
//! the database which of its jobs are affected. If it is lost, the next heartbeat returns
//! these jobs.
//!
//! The engine delivers notifications ([`Notifying`](crate::store::Notifying)).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, timeout_at};

use crate::job::WorkerId;
use crate::rules::enqueue::ValidJob;
use crate::rules::lifecycle::When;
use crate::store::{Notice, Store};

/// Subscribers in this process get at most one wake-up per queue in this time.
/// The first job after a quiet period is notified at once, and the worker that it
/// wakes keeps claiming until no job is left.
const MIN_PAUSE: Duration = Duration::from_millis(2);
/// The same limit while many jobs arrive: fewer, larger claims leave the server
/// more time to store jobs (a tenth more jobs pass through).
const MIN_PAUSE_WHEN_BUSY: Duration = Duration::from_millis(5);
/// This many jobs in one round count as busy.
pub(crate) const BUSY: usize = 8;
/// Other processes get at most one cancel notification per worker in this time and,
/// while this process has its own subscribers, at most one wake-up per queue.
const MIN_PAUSE_OTHERS: Duration = Duration::from_millis(10);

/// Sends the wake-ups of one client. Cheap to clone; clones share one background
/// task.
#[derive(Clone, Debug)]
pub(crate) struct Notifier {
    store: Arc<dyn Store>,
    inbox: Arc<Inbox<Message>>,
}

impl Notifier {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Notifier { store, inbox: Arc::default() }
    }

    /// Notifies the workers of each queue that has a job due at `When`. Takes one
    /// item per job. Jobs with a delay are skipped: nothing is due yet.
    pub(crate) fn notify<'q>(&self, due_jobs: impl IntoIterator<Item = (&'q str, When)>) {
        let mut queues = BTreeMap::<&str, Due>::new();
        for (queue, when) in due_jobs {
            if let Some(at) = possibly_due(when) {
                queues.entry(queue).or_default().add(at);
            }
        }
        for (queue, due) in queues {
            self.send(Message::Wake { queue: queue.to_owned(), due });
        }
    }

    /// Notifies the workers of the queues of new jobs.
    pub(crate) fn notify_enqueued(&self, jobs: &[ValidJob]) {
        self.notify(jobs.iter().map(|job| (job.queue.as_str(), job.when)));
    }

    /// Notifies a worker that a job it holds is to be cancelled.
    pub(crate) fn notify_cancel(&self, worker: WorkerId) {
        self.send(Message::Cancel(worker));
    }

    /// Waits until every wake-up requested so far has been sent.
    pub(crate) async fn flush(&self) {
        let (reply, sent) = oneshot::channel();
        self.send(Message::Flush(reply));
        let _ = sent.await;
    }

    /// Whether any wake-up has been requested.
    #[cfg(all(test, feature = "sqlite"))]
    pub(crate) fn has_started(&self) -> bool {
        self.inbox.is_open()
    }

    fn send(&self, message: Message) {
        self.inbox.put(message, |messages| {
            tokio::spawn(run(self.store.clone(), messages));
        });
    }
}

/// When a job may be due: `None` for one that has to wait, otherwise the instant
/// that the engine's clock must have reached, if there is one.
fn possibly_due(when: When) -> Option<Option<DateTime<Utc>>> {
    match when {
        When::NOW => Some(None),
        When::After(_) => None,
        When::At(at) => Some(Some(at)),
    }
}

/// The jobs of one queue that may be due.
#[derive(Debug, Default)]
struct Due {
    /// How many are due now.
    now: usize,
    /// The earliest of those that name an instant. The engine's clock decides
    /// whether it has passed.
    earliest: Option<DateTime<Utc>>,
}

impl Due {
    fn add(&mut self, at: Option<DateTime<Utc>>) {
        match at {
            None => self.now += 1,
            Some(at) => self.earliest = Some(self.earliest.map_or(at, |earliest| earliest.min(at))),
        }
    }
}

/// What the background task receives.
#[derive(Debug)]
enum Message {
    Wake {
        queue: String,
        due: Due,
    },
    Cancel(WorkerId),
    /// Reply once everything before this message has been sent.
    Flush(oneshot::Sender<()>),
}

/// Sends wake-ups. While one is being sent, the next ones collect. Subscribers in
/// this process are notified at once. Other processes are notified a little later
/// and less often, because each notification costs the server a transaction at the
/// moment when it should hand out the job.
async fn run(store: Arc<dyn Store>, mut inbox: mpsc::UnboundedReceiver<Message>) {
    let mut others = BTreeSet::new();
    let mut others_at = Instant::now();
    loop {
        let first = if others.is_empty() {
            inbox.recv().await
        } else {
            timeout_at(others_at, inbox.recv()).await.unwrap_or_default()
        };
        if first.is_none() && others.is_empty() {
            return;
        }
        let Round { due, cancels, jobs, flushes } = Round::collect(first, &mut inbox, &*store).await;
        let (now, has_due) = (Instant::now(), !due.is_empty());
        let is_new = has_due || !cancels.is_empty();
        let notified_here = has_due && store.notify_local(&due);
        if notified_here && others.is_empty() {
            others_at = others_at.max(now + MIN_PAUSE);
        }
        store.notify_local(&cancels);
        others.extend(due.into_iter().chain(cancels));
        let others_due = now >= others_at || !flushes.is_empty() || inbox.is_closed();
        if !others.is_empty() && (others_due || (has_due && !notified_here)) {
            let sent = tokio::spawn(notify_others(store.clone(), std::mem::take(&mut others)));
            // Without new messages, the next round need not wait for this one.
            if is_new || !flushes.is_empty() {
                let _ = sent.await;
            }
            others_at = Instant::now() + MIN_PAUSE_OTHERS;
        }
        for reply in flushes {
            let _ = reply.send(());
        }
        if is_new {
            tokio::time::sleep(if jobs < BUSY { MIN_PAUSE } else { MIN_PAUSE_WHEN_BUSY }).await;
        }
    }
}

/// The messages that are handled together.
struct Round {
    due: Vec<Notice>,
    cancels: Vec<Notice>,
    jobs: usize,
    flushes: Vec<oneshot::Sender<()>>,
}

impl Round {
    async fn collect(
        first: Option<Message>,
        inbox: &mut mpsc::UnboundedReceiver<Message>,
        store: &dyn Store,
    ) -> Self {
        let (mut queues, mut jobs, mut flushes) = (BTreeSet::new(), 0, Vec::new());
        let mut workers = BTreeSet::new();
        let mut scheduled = BTreeMap::<String, DateTime<Utc>>::new();
        let mut next = first;
        while let Some(message) = next {
            match message {
                Message::Wake { queue, due } => {
                    if let Some(at) = due.earliest.filter(|_| due.now == 0) {
                        let earliest = scheduled.entry(queue).or_insert(at);
                        *earliest = at.min(*earliest);
                    } else {
                        queues.insert(queue);
                        jobs += due.now;
                    }
                }
                Message::Cancel(worker) => {
                    workers.insert(worker);
                }
                Message::Flush(reply) => flushes.push(reply),
            }
            next = inbox.try_recv().ok();
        }
        scheduled.retain(|queue, _| !queues.contains(queue));
        if !scheduled.is_empty() {
            // Without the engine's clock, notify: an extra wake-up is harmless.
            let now = store.now().await.unwrap_or(DateTime::<Utc>::MAX_UTC);
            queues.extend(scheduled.into_iter().filter(|(_, at)| *at <= now).map(|(queue, _)| queue));
        }
        let due = queues.into_iter().map(Notice::Due).collect();
        Round { due, cancels: workers.into_iter().map(Notice::Cancel).collect(), jobs, flushes }
    }
}

async fn notify_others(store: Arc<dyn Store>, notices: BTreeSet<Notice>) {
    let notices: Vec<_> = notices.into_iter().collect();
    if let Err(error) = store.notify_others(&notices).await {
        tracing::debug!(%error, "could not notify other processes; polling finds due jobs, heartbeats return cancels");
    }
}

/// A channel whose reader task starts with the first message, and starts again if
/// the runtime that it ran on has ended.
#[derive(Debug)]
pub(crate) struct Inbox<T>(Mutex<Option<mpsc::UnboundedSender<T>>>);

impl<T> Default for Inbox<T> {
    fn default() -> Self {
        Inbox(Mutex::new(None))
    }
}

impl<T> Inbox<T> {
    #[cfg(all(test, feature = "sqlite"))]
    fn is_open(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    pub(crate) fn put(&self, item: T, start: impl FnOnce(mpsc::UnboundedReceiver<T>)) {
        let mut sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let item = match sender.as_ref() {
            None => item,
            Some(open) => match open.send(item) {
                Ok(()) => return,
                Err(closed) => closed.0,
            },
        };
        let (fresh, receiver) = mpsc::unbounded_channel();
        // The receiver still exists, so this cannot fail.
        let _ = fresh.send(item);
        *sender = Some(fresh);
        start(receiver);
    }
}
