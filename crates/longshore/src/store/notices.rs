//! Notifications to workers, and the subscriptions to them. The engines own how notifications reach other
//! processes, and `client/wake.rs` owns when they are sent.
//!
//! Due jobs and cancels have separate channels to the subscribers of this process, so that
//! an enqueue does not wake a worker that waits for a cancel.

use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;

use crate::error::Result;
use crate::job::WorkerId;

/// A notification to workers. A lost one does no harm: polling finds due jobs, and the
/// next heartbeat returns cancelled ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Notice {
    /// Jobs of this queue may be due.
    Due(String),
    /// The cancellation of a job that this worker holds was requested.
    Cancel(WorkerId),
}

/// A subscription to wake-ups. A lost wake-up does no harm: polling finds the jobs.
#[derive(Debug)]
pub struct Wakeups(broadcast::Receiver<String>);

impl Wakeups {
    /// Sent instead of a queue's name when any queue may have due jobs.
    const ANY_QUEUE: &'static str = "";

    /// Waits for the next wake-up. Returns the name of the queue, or `None` if any
    /// queue may have due jobs: some wake-ups were missed, or the source was
    /// disconnected for a while.
    pub async fn next(&mut self) -> Option<String> {
        match self.0.recv().await {
            Ok(queue) if queue == Wakeups::ANY_QUEUE => None,
            Ok(queue) => Some(queue),
            Err(broadcast::error::RecvError::Lagged(_)) => None,
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
    }

    /// Takes the wake-ups that have arrived, as [`next`](Self::next) would return them. A
    /// claim that starts now sees their jobs.
    #[cfg(feature = "worker")]
    pub(crate) fn take_arrived(&mut self) -> impl Iterator<Item = Option<String>> {
        std::iter::from_fn(|| match self.0.try_recv() {
            Ok(queue) => Some(Some(queue).filter(|queue| queue != Wakeups::ANY_QUEUE)),
            Err(broadcast::error::TryRecvError::Lagged(_)) => Some(None),
            Err(_) => None,
        })
    }
}

/// A subscription to cancels of running jobs.
#[derive(Debug)]
pub struct CancelNotices {
    /// `None` in the channel means that any lease may be affected.
    receiver: broadcast::Receiver<Option<WorkerId>>,
    poll_interval: Option<Duration>,
}

impl CancelNotices {
    /// Also returns from [`next`](Self::next) after this time, for a database that sends no
    /// notifications.
    #[cfg(feature = "postgres")]
    pub(crate) fn with_poll_interval(self, poll_interval: Duration) -> Self {
        CancelNotices { poll_interval: Some(poll_interval), ..self }
    }

    /// Waits until a job of a worker that `is_mine` accepts may have been cancelled.
    /// [`cancels`](super::Workers::cancels) returns whether one was.
    pub async fn next(&mut self, is_mine: impl Fn(WorkerId) -> bool) {
        let receiver = &mut self.receiver;
        let notified = async {
            loop {
                match receiver.recv().await {
                    Ok(Some(worker)) if !is_mine(worker) => {}
                    Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => return,
                    Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
                }
            }
        };
        match self.poll_interval {
            None => notified.await,
            Some(interval) => {
                let _ = tokio::time::timeout(interval, notified).await;
            }
        }
    }
}

/// A subscription to events that were emitted in SQL. A client that emits an event delivers it itself. A lost
/// notification does no harm: workers look for new events every second.
#[derive(Debug)]
pub struct EventNotices(Option<broadcast::Receiver<()>>);

impl EventNotices {
    /// For an engine in which events cannot be emitted in SQL.
    #[cfg(feature = "sqlite")]
    pub(crate) const NEVER: EventNotices = EventNotices(None);

    /// Waits until an event may wait for delivery. Takes all notifications that have arrived.
    pub async fn next(&mut self) {
        let Some(receiver) = &mut self.0 else { return std::future::pending().await };
        match receiver.recv().await {
            Ok(()) | Err(broadcast::error::RecvError::Lagged(_)) => {}
            Err(broadcast::error::RecvError::Closed) => std::future::pending().await,
        }
        *receiver = receiver.resubscribe();
    }
}

/// Notifications of due jobs, of cancels and of events.
#[async_trait]
pub trait Notifying {
    /// Notifies subscribers in this process that queues have due jobs or that jobs of
    /// workers are to be cancelled. Returns whether there is any subscriber. Only the
    /// module `wake` calls it, which limits the rate of notifications.
    fn notify_local(&self, notices: &[Notice]) -> bool;

    /// Notifies subscribers in other processes. A hint: it may be lost, and then
    /// polling finds the jobs, and heartbeats return the cancels.
    async fn notify_others(&self, notices: &[Notice]) -> Result<()>;

    /// Subscribes to the notifications of due jobs, from this and other processes.
    /// Subscribe before claiming: a job enqueued between the two would otherwise wait a
    /// full poll interval.
    async fn subscribe(&self) -> Result<Wakeups>;

    /// Subscribes to the notifications of cancels. Read [`cancels`](super::Workers::cancels)
    /// once after subscribing: an earlier notification is not received.
    async fn subscribe_to_cancels(&self) -> Result<CancelNotices>;

    /// Subscribes to the notifications of events that were emitted in SQL.
    async fn subscribe_to_events(&self) -> Result<EventNotices>;
}

/// The channels to the subscribers of this process.
#[derive(Clone, Debug)]
pub(crate) struct NoticeSender {
    wakeups: broadcast::Sender<String>,
    cancels: broadcast::Sender<Option<WorkerId>>,
    emitted: broadcast::Sender<()>,
}

impl NoticeSender {
    /// A slower subscriber loses the oldest notifications beyond this number, and is
    /// informed that it did.
    const CAPACITY: usize = 256;

    pub(crate) fn new() -> Self {
        let (wakeups, _) = broadcast::channel(NoticeSender::CAPACITY);
        let (cancels, _) = broadcast::channel(NoticeSender::CAPACITY);
        let (emitted, _) = broadcast::channel(NoticeSender::CAPACITY);
        NoticeSender { wakeups, cancels, emitted }
    }

    /// Notifies the subscribers. Returns whether there is one for any of the notices.
    pub(crate) fn send(&self, notices: &[Notice]) -> bool {
        let is_received = |notice: &&Notice| match notice {
            Notice::Due(queue) => self.wakeups.send(queue.clone()).is_ok(),
            Notice::Cancel(worker) => self.cancels.send(Some(*worker)).is_ok(),
        };
        // Not `any`, which would stop at the first subscriber and send no further notice.
        notices.iter().filter(is_received).count() > 0
    }

    /// Notifies all subscribers that notices may have been missed.
    pub(crate) fn send_missed(&self) {
        let _ = self.wakeups.send(Wakeups::ANY_QUEUE.into());
        self.send_cancels_missed();
    }

    /// Notifies the subscribers to cancels that notices may have been missed.
    pub(crate) fn send_cancels_missed(&self) {
        let _ = self.cancels.send(None);
    }

    /// Notifies the subscribers that an event was emitted.
    #[cfg(feature = "postgres")]
    pub(crate) fn send_emitted(&self) {
        let _ = self.emitted.send(());
    }

    pub(crate) fn wakeups(&self) -> Wakeups {
        Wakeups(self.wakeups.subscribe())
    }

    pub(crate) fn cancels(&self) -> CancelNotices {
        CancelNotices { receiver: self.cancels.subscribe(), poll_interval: None }
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn emitted(&self) -> EventNotices {
        EventNotices(Some(self.emitted.subscribe()))
    }

    pub(crate) fn has_subscribers(&self) -> bool {
        self.wakeups.receiver_count() + self.cancels.receiver_count() + self.emitted.receiver_count() > 0
    }

    #[cfg(feature = "postgres")]
    pub(crate) fn downgrade(&self) -> WeakNoticeSender {
        WeakNoticeSender {
            wakeups: self.wakeups.downgrade(),
            cancels: self.cancels.downgrade(),
            emitted: self.emitted.downgrade(),
        }
    }
}

/// A [`NoticeSender`] that does not keep the channels open.
#[cfg(feature = "postgres")]
#[derive(Debug)]
pub(crate) struct WeakNoticeSender {
    wakeups: broadcast::WeakSender<String>,
    cancels: broadcast::WeakSender<Option<WorkerId>>,
    emitted: broadcast::WeakSender<()>,
}

#[cfg(feature = "postgres")]
impl WeakNoticeSender {
    pub(crate) fn upgrade(&self) -> Option<NoticeSender> {
        let (wakeups, cancels) = (self.wakeups.upgrade()?, self.cancels.upgrade()?);
        Some(NoticeSender { wakeups, cancels, emitted: self.emitted.upgrade()? })
    }
}
