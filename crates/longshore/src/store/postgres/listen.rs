//! Wake-ups by `LISTEN` and `NOTIFY`. They are a hint in addition to polling; nothing
//! relies on them.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::sync::broadcast;

use super::PostgresStore;
use super::connect::Connector;
use super::enqueue::split;
use super::run::within;
use super::tx::{Sql, Tx};
use crate::enqueue::ValidJob;
use crate::error::Result;
use crate::lifecycle::When;
use crate::store::Wakeups;

/// A listening connection that receives nothing for this long is probed.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const CAPACITY: usize = 256;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause between tries to connect.
const RECONNECT_AFTER: Duration = Duration::from_secs(1);

/// One listening connection per store, opened for the first subscriber.
///
/// A process that both enqueues and works does not need the server for its own
/// wake-ups: subscribers of the same store are notified directly, and the copies of
/// these notifications that come back from the server are dropped.
#[derive(Debug)]
pub(super) struct Listener {
    channel: String,
    connector: Arc<Connector>,
    subscribers: Arc<Subscribers>,
    /// One subscriber connects; the others wait for it.
    connecting: tokio::sync::Mutex<()>,
}

impl Listener {
    pub(super) fn new(channel: String, connector: Arc<Connector>) -> Self {
        Listener {
            channel,
            connector,
            subscribers: Arc::default(),
            connecting: tokio::sync::Mutex::default(),
        }
    }

    /// A listener for the same channel that has no connection yet.
    pub(super) fn unconnected(&self) -> Self {
        Listener::new(self.channel.clone(), self.connector.clone())
    }

    /// Notifies subscribers in this process. Returns whether there is one.
    pub(super) fn notify_local(&self, queues: &[String]) -> bool {
        self.subscribers.notify(queues)
    }

    pub(super) async fn subscribe(&self) -> Result<Wakeups> {
        let _connecting = self.connecting.lock().await;
        if let Some(receiver) = self.subscribers.join() {
            return Ok(Wakeups(receiver));
        }
        let (sender, receiver) = broadcast::channel(CAPACITY);
        // Opened before connecting, so that notifications from this process arrive
        // meanwhile.
        let own = self.subscribers.open(&sender);
        let first = connect(&self.connector, &self.channel).await.ok();
        own.set_listening(first.is_some());
        let (connector, channel) = (self.connector.clone(), self.channel.clone());
        tokio::spawn(listen(first, connector, channel, sender, self.subscribers.clone(), own));
        Ok(Wakeups(receiver))
    }
}

/// The subscribers in this process. The lock is held only for moments and never across
/// an await, so that a notification cannot miss a listener while another one is being
/// opened.
#[derive(Debug, Default)]
struct Subscribers(Mutex<Option<LocalChannel>>);

/// The channel from the listening task to its subscribers.
#[derive(Debug)]
struct LocalChannel {
    sender: broadcast::WeakSender<String>,
    own: Arc<OwnNotifications>,
}

impl Subscribers {
    fn lock(&self) -> MutexGuard<'_, Option<LocalChannel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, sender: &broadcast::Sender<String>) -> Arc<OwnNotifications> {
        let own = Arc::<OwnNotifications>::default();
        *self.lock() = Some(LocalChannel { sender: sender.downgrade(), own: own.clone() });
        own
    }

    /// Subscribes to the open channel, if there is one.
    fn join(&self) -> Option<broadcast::Receiver<String>> {
        let sender = self.lock().as_ref()?.sender.upgrade()?;
        Some(sender.subscribe())
    }

    /// Closes the channel if it has no subscribers left; the next subscriber opens a new
    /// one. Returns whether it closed the channel.
    fn close_if_unused(&self, sender: &broadcast::Sender<String>) -> bool {
        let mut channel = self.lock();
        let is_unused = sender.receiver_count() == 0;
        if is_unused {
            *channel = None;
        }
        is_unused
    }

    /// Notifies subscribers. Returns whether there is one.
    fn notify(&self, queues: &[String]) -> bool {
        let sender = self.lock().as_ref().and_then(|channel| channel.sender.upgrade());
        let notify = |sender: broadcast::Sender<String>| {
            queues.iter().filter(|queue| sender.send(String::clone(queue)).is_ok()).count() > 0
        };
        sender.is_some_and(notify)
    }

    /// The notifications to drop when they come back from the server; `None` without a
    /// channel.
    fn own_notifications(&self) -> Option<Arc<OwnNotifications>> {
        let channel = self.lock();
        let channel = channel.as_ref()?;
        channel.sender.upgrade().map(|_| channel.own.clone())
    }
}

/// Counts, per queue, the notifications that this process sent and the listening
/// connection has yet to receive. A notification contains only its queue, so counting
/// suffices: if one from another process arrives first, it is dropped in place of ours,
/// and ours is delivered a moment later.
#[derive(Debug, Default)]
struct OwnNotifications(Mutex<Expected>);

#[derive(Debug, Default)]
struct Expected {
    listening: bool,
    per_queue: HashMap<String, usize>,
}

impl OwnNotifications {
    fn lock(&self) -> MutexGuard<'_, Expected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a connection was opened or lost. The notifications expected from the
    /// previous connection will never arrive.
    fn set_listening(&self, listening: bool) {
        *self.lock() = Expected { listening, per_queue: HashMap::new() };
    }

    /// Call before sending a notification, and [confirm](Sending::confirm) it after.
    fn expect<'q>(self: Arc<Self>, queues: &'q [String]) -> Sending<'q> {
        let mut expected = self.lock();
        if expected.listening {
            // The server sends equal notifications of one transaction only once.
            for queue in queues.iter().collect::<HashSet<_>>() {
                *expected.per_queue.entry(queue.clone()).or_default() += 1;
            }
        }
        drop(expected);
        Sending { own: self, queues }
    }

    /// Stops expecting notifications of these queues, because it is unknown whether they
    /// were sent. Delivering one of our own wakes a worker needlessly; expecting one that
    /// was never sent would drop one from another process.
    fn stop_expecting(&self, queues: &[String]) {
        let mut expected = self.lock();
        expected.per_queue.retain(|queue, _| !queues.contains(queue));
    }

    /// Whether a notification that arrived is one of our own.
    fn is_own(&self, queue: &str) -> bool {
        let mut expected = self.lock();
        match expected.per_queue.get_mut(queue) {
            Some(count) if *count > 1 => {
                *count -= 1;
                true
            }
            Some(_) => expected.per_queue.remove(queue).is_some(),
            None => false,
        }
    }
}

/// A notification in flight. Unless it is confirmed, it is no longer expected; that
/// includes a sender that is dropped while it waits.
struct Sending<'q> {
    own: Arc<OwnNotifications>,
    queues: &'q [String],
}

impl Sending<'_> {
    fn confirm(mut self) {
        self.queues = &[];
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.own.stop_expecting(self.queues);
    }
}

/// Passes notifications to the subscribers until there are none. Replaces a connection
/// that is lost or does not reply to a probe, and then wakes the subscribers for all
/// queues, because wake-ups may have been missed meanwhile.
async fn listen(
    mut listener: Option<PgListener>,
    connector: Arc<Connector>,
    channel: String,
    sender: broadcast::Sender<String>,
    subscribers: Arc<Subscribers>,
    own: Arc<OwnNotifications>,
) {
    while !subscribers.close_if_unused(&sender) {
        let Some(open) = listener.as_mut() else {
            tokio::time::sleep(RECONNECT_AFTER).await;
            listener = connect(&connector, &channel).await.ok();
            if listener.is_some() {
                tracing::info!("listening for new jobs again");
                own.set_listening(true);
                let _ = sender.send(Wakeups::ANY_QUEUE.into());
            }
            continue;
        };
        match tokio::time::timeout(PROBE_EVERY, open.try_recv()).await {
            Ok(Ok(Some(notification))) if own.is_own(notification.payload()) => {}
            Ok(Ok(Some(notification))) => {
                let _ = sender.send(notification.payload().to_owned());
            }
            Err(_) if is_alive(open).await => {}
            Ok(Ok(None) | Err(_)) | Err(_) => {
                tracing::warn!("lost the listening connection; polling finds new jobs until it is restored");
                own.set_listening(false);
                listener = None;
            }
        }
    }
}

/// The driver takes a listener's connection from a pool, and a lost one may occupy the
/// pool forever. So each listener has its own pool.
async fn connect(connector: &Connector, channel: &str) -> Sql<PgListener> {
    let listening = async {
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT_TIMEOUT);
        let pool = pool.connect_lazy_with(connector.options().await?);
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.eager_reconnect(false);
        listener.listen(channel).await?;
        Ok(listener)
    };
    within(CONNECT_TIMEOUT, listening).await
}

async fn is_alive(listener: &mut PgListener) -> bool {
    let probe = sqlx::query("select 1").execute(&mut *listener);
    tokio::time::timeout(Duration::from_secs(5), probe).await.is_ok_and(|reply| reply.is_ok())
}

const NOTIFY: &str = "
    select pg_notify('longshore.wake', queue)
      from unnest($1::text[]) as queue";

/// Sends one notification per queue with a job that is due now.
const NOTIFY_DUE: &str = "
    select pg_notify('longshore.wake', due.queue)
      from (select distinct i.queue
              from unnest($1::text[], $2::timestamptz[], $3::int8[]) as i(queue, run_at, delay_us)
             where i.delay_us = 0
                or i.run_at <= longshore.clock()) as due";

impl PostgresStore {
    /// Notifies other processes through the server.
    pub(super) async fn notify_server(&self, queues: &[String]) -> Result<()> {
        if !self.0.notify || queues.is_empty() {
            return Ok(());
        }
        let own = self.0.listener.subscribers.own_notifications();
        let sending = own.map(|own| own.expect(queues));
        self.run_quick(queues.to_vec(), |tx, queues| Box::pin(notify(tx, queues))).await?;
        if let Some(sending) = sending {
            sending.confirm();
        }
        Ok(())
    }
}

async fn notify(tx: &mut Tx<'_>, queues: &[String]) -> Sql<()> {
    sqlx::query(tx.sql(NOTIFY)).bind(queues).execute(&mut *tx.connection).await?;
    Ok(())
}

/// Notifies workers of new jobs when the caller's transaction commits.
pub(super) async fn notify_due(tx: &mut Tx<'_>, jobs: &[ValidJob]) -> Sql<()> {
    if !tx.store.notify || jobs.iter().all(|job| !may_be_due(job.when)) {
        return Ok(());
    }
    let (run_ats, delays): (Vec<_>, Vec<_>) = jobs.iter().map(|job| split(job.when)).unzip();
    sqlx::query(tx.sql(NOTIFY_DUE))
        .bind(jobs.iter().map(|job| job.queue.as_str()).collect::<Vec<_>>())
        .bind(run_ats)
        .bind(delays)
        .execute(&mut *tx.connection)
        .await?;
    Ok(())
}

fn may_be_due(when: When) -> bool {
    !matches!(when, When::After(delay) if !delay.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mail() -> [String; 1] {
        ["mail".to_owned()]
    }

    #[test]
    fn own_notifications_are_dropped_once_each_while_listening() {
        let own = Arc::<OwnNotifications>::default();
        let send = || own.clone().expect(&mail()).confirm();
        send();
        assert!(!own.is_own("mail"), "no connection was listening");
        own.set_listening(true);
        send();
        send();
        assert!(!own.is_own("other"));
        assert_eq!([(); 3].map(|()| own.is_own("mail")), [true, true, false]);
        send();
        own.set_listening(true);
        assert!(!own.is_own("mail"), "a new connection does not receive earlier notifications");
    }

    #[test]
    fn a_queue_named_twice_in_one_notification_is_expected_once() {
        let own = Arc::<OwnNotifications>::default();
        own.set_listening(true);
        own.clone().expect(&[mail(), mail()].concat()).confirm();
        assert_eq!([(); 2].map(|()| own.is_own("mail")), [true, false]);
    }

    #[test]
    fn an_unconfirmed_notification_is_not_expected() {
        let own = Arc::<OwnNotifications>::default();
        own.set_listening(true);
        drop(own.clone().expect(&mail()));
        assert!(!own.is_own("mail"), "it may never have been sent");
    }

    #[test]
    fn notify_returns_whether_there_is_a_subscriber() {
        let subscribers = Subscribers::default();
        assert!(!subscribers.notify(&mail()), "no channel was opened");
        let (sender, mut receiver) = broadcast::channel(CAPACITY);
        subscribers.open(&sender);
        assert!(subscribers.notify(&mail()));
        assert_eq!(receiver.try_recv(), Ok("mail".into()));
        drop(receiver);
        assert!(!subscribers.notify(&mail()), "the subscriber is gone");
    }

    #[test]
    fn a_subscriber_never_joins_a_channel_that_was_closed() {
        let subscribers = Subscribers::default();
        let (sender, receiver) = broadcast::channel(CAPACITY);
        subscribers.open(&sender);
        drop(receiver);
        let joined = subscribers.join();
        assert!(joined.is_some() && !subscribers.close_if_unused(&sender), "the channel stays open for it");
        drop(joined);
        assert!(subscribers.close_if_unused(&sender));
        assert!(subscribers.join().is_none());
    }
}
