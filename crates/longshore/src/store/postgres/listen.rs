//! Notifications by `LISTEN` and `NOTIFY`. They are a hint in addition to polling and
//! heartbeats; nothing relies on them.
//!
//! Due jobs, cancels and events that were emitted in SQL have a channel each, on one connection.
//! The payload is a queue's name, which can be any text, a worker's id, or empty. A build that does
//! not know a channel does not listen to it.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgListener, PgNotification, PgPoolOptions};
use uuid::Uuid;

use super::PostgresStore;
use super::connect::Connector;
use super::enqueue::split;
use super::migrate::Schema;
use super::run::within;
use super::tx::{Sql, Tx};
use crate::error::Result;
use crate::job::WorkerId;
use crate::rules::enqueue::ValidJob;
use crate::rules::lifecycle::When;
use crate::store::{Notice, NoticeSender, WeakNoticeSender};

/// A listening connection that receives nothing for this long is probed.
const PROBE_EVERY: Duration = Duration::from_secs(10);
/// Without notifications (`?notify=off`), a worker that holds jobs looks for cancels this
/// often.
pub(super) const CANCEL_POLL_INTERVAL: Duration = Duration::from_secs(2);
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
    channels: Channels,
    connector: Arc<Connector>,
    subscribers: Arc<Subscribers>,
    /// One subscriber connects; the others wait for it.
    connecting: tokio::sync::Mutex<()>,
}

impl Listener {
    pub(super) fn new(schema: &Schema, connector: Arc<Connector>) -> Self {
        let channels = Channels {
            wake: schema.channel("wake"),
            stop: schema.channel("stop"),
            emit: schema.channel("emit"),
        };
        Listener::on(channels, connector)
    }

    fn on(channels: Channels, connector: Arc<Connector>) -> Self {
        Listener {
            channels,
            connector,
            subscribers: Arc::default(),
            connecting: tokio::sync::Mutex::default(),
        }
    }

    /// A listener for the same channels that has no connection yet.
    pub(super) fn unconnected(&self) -> Self {
        Listener::on(self.channels.clone(), self.connector.clone())
    }

    /// Notifies subscribers in this process. Returns whether there is one.
    pub(super) fn notify_local(&self, notices: &[Notice]) -> bool {
        self.subscribers.notify(notices)
    }

    pub(super) async fn subscribe<T>(&self, subscribe: impl Fn(&NoticeSender) -> T) -> T {
        let _connecting = self.connecting.lock().await;
        if let Some(subscription) = self.subscribers.join(&subscribe) {
            return subscription;
        }
        let sender = NoticeSender::new();
        let subscription = subscribe(&sender);
        // Opened before connecting, so that notifications from this process arrive
        // meanwhile.
        let own = self.subscribers.open(&sender);
        let first = connect(&self.connector, &self.channels).await.ok();
        own.set_listening(first.is_some());
        let (connector, channels) = (self.connector.clone(), self.channels.clone());
        tokio::spawn(listen(first, connector, channels, sender, self.subscribers.clone(), own));
        subscription
    }
}

/// The names of the channels on the server.
#[derive(Clone, Debug)]
struct Channels {
    wake: String,
    stop: String,
    emit: String,
}

impl Channels {
    /// Reads a notification. `None` if its payload is not a worker's id.
    fn read(&self, notification: &PgNotification) -> Option<Notice> {
        let payload = notification.payload();
        if notification.channel() == self.stop {
            return payload.parse::<Uuid>().ok().map(|worker| Notice::Cancel(WorkerId(worker)));
        }
        Some(Notice::Due(payload.to_owned()))
    }
}

/// The subscribers in this process. The lock is held only for moments and never across
/// an await, so that a notification cannot miss a listener while another one is being
/// opened.
#[derive(Debug, Default)]
struct Subscribers(Mutex<Option<LocalChannel>>);

/// The channels from the listening task to its subscribers.
#[derive(Debug)]
struct LocalChannel {
    sender: WeakNoticeSender,
    own: Arc<OwnNotifications>,
}

impl Subscribers {
    fn lock(&self) -> MutexGuard<'_, Option<LocalChannel>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, sender: &NoticeSender) -> Arc<OwnNotifications> {
        let own = Arc::<OwnNotifications>::default();
        *self.lock() = Some(LocalChannel { sender: sender.downgrade(), own: own.clone() });
        own
    }

    /// Subscribes to the open channels, if there are any. Keeps the lock meanwhile, so that
    /// they are not closed in between.
    fn join<T>(&self, subscribe: impl Fn(&NoticeSender) -> T) -> Option<T> {
        let channel = self.lock();
        let sender = channel.as_ref()?.sender.upgrade()?;
        Some(subscribe(&sender))
    }

    /// Closes the channels if they have no subscribers left; the next subscriber opens new
    /// ones. Returns whether it closed them.
    fn close_if_unused(&self, sender: &NoticeSender) -> bool {
        let mut channel = self.lock();
        let is_unused = !sender.has_subscribers();
        if is_unused {
            *channel = None;
        }
        is_unused
    }

    /// Notifies subscribers. Returns whether there is one.
    fn notify(&self, notices: &[Notice]) -> bool {
        let sender = self.lock().as_ref().and_then(|channel| channel.sender.upgrade());
        sender.is_some_and(|sender| sender.send(notices))
    }

    /// The notifications to drop when they come back from the server; `None` without a
    /// channel.
    fn own_notifications(&self) -> Option<Arc<OwnNotifications>> {
        let channel = self.lock();
        let channel = channel.as_ref()?;
        channel.sender.upgrade().map(|_| channel.own.clone())
    }
}

/// Counts the notifications that this process sent and the listening connection has yet
/// to receive. A notification contains only its queue or its worker, so counting suffices:
/// if an equal one from another process arrives first, it is dropped in place of ours,
/// and ours is delivered a moment later.
#[derive(Debug, Default)]
struct OwnNotifications(Mutex<Expected>);

#[derive(Debug, Default)]
struct Expected {
    listening: bool,
    counts: HashMap<Notice, usize>,
}

impl OwnNotifications {
    fn lock(&self) -> MutexGuard<'_, Expected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that a connection was opened or lost. The notifications expected from the
    /// previous connection will never arrive.
    fn set_listening(&self, listening: bool) {
        *self.lock() = Expected { listening, counts: HashMap::new() };
    }

    /// Call before sending a notification, and [confirm](Sending::confirm) it after.
    fn expect<'n>(self: Arc<Self>, notices: &'n [Notice]) -> Sending<'n> {
        let mut expected = self.lock();
        if expected.listening {
            // The server sends equal notifications of one transaction only once.
            for notice in notices.iter().collect::<HashSet<_>>() {
                *expected.counts.entry(notice.clone()).or_default() += 1;
            }
        }
        drop(expected);
        Sending { own: self, notices }
    }

    /// Stops expecting these notifications, because it is unknown whether they were sent.
    /// Delivering one of our own wakes a worker needlessly; expecting one that was never
    /// sent would drop one from another process.
    fn stop_expecting(&self, notices: &[Notice]) {
        let mut expected = self.lock();
        expected.counts.retain(|notice, _| !notices.contains(notice));
    }

    /// Whether a notification that arrived is one of our own.
    fn is_own(&self, notice: &Notice) -> bool {
        let mut expected = self.lock();
        match expected.counts.get_mut(notice) {
            Some(count) if *count > 1 => {
                *count -= 1;
                true
            }
            Some(_) => expected.counts.remove(notice).is_some(),
            None => false,
        }
    }
}

/// A notification in flight. Unless it is confirmed, it is no longer expected; that
/// includes a sender that is dropped while it waits.
struct Sending<'n> {
    own: Arc<OwnNotifications>,
    notices: &'n [Notice],
}

impl Sending<'_> {
    fn confirm(mut self) {
        self.notices = &[];
    }
}

impl Drop for Sending<'_> {
    fn drop(&mut self) {
        self.own.stop_expecting(self.notices);
    }
}

/// Passes notifications to the subscribers until there are none. Replaces a connection
/// that is lost or does not reply to a probe, and then notifies the subscribers that
/// notifications may have been missed. Until then, workers that hold jobs look for
/// cancels before each try to connect.
async fn listen(
    mut listener: Option<PgListener>,
    connector: Arc<Connector>,
    channels: Channels,
    sender: NoticeSender,
    subscribers: Arc<Subscribers>,
    own: Arc<OwnNotifications>,
) {
    while !subscribers.close_if_unused(&sender) {
        let Some(open) = listener.as_mut() else {
            tokio::time::sleep(RECONNECT_AFTER).await;
            sender.send_cancels_missed();
            listener = connect(&connector, &channels).await.ok();
            if listener.is_some() {
                tracing::info!("listening for new jobs again");
                own.set_listening(true);
                sender.send_missed();
            }
            continue;
        };
        match tokio::time::timeout(PROBE_EVERY, open.try_recv()).await {
            Ok(Ok(Some(notification))) if notification.channel() == channels.emit => sender.send_emitted(),
            Ok(Ok(Some(notification))) => {
                let notice = channels.read(&notification).filter(|notice| !own.is_own(notice));
                sender.send(notice.as_slice());
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
async fn connect(connector: &Connector, channels: &Channels) -> Sql<PgListener> {
    let listening = async {
        let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT_TIMEOUT);
        let pool = pool.connect_lazy_with(connector.options().await?);
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.eager_reconnect(false);
        listener.listen_all([&channels.wake, &channels.stop, &channels.emit].map(String::as_str)).await?;
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

const NOTIFY_CANCELS: &str = "
    select pg_notify('longshore.stop', worker::text)
      from unnest($1::uuid[]) as worker";

/// Sends one notification per queue with a job that is due now.
const NOTIFY_DUE: &str = "
    select pg_notify('longshore.wake', due.queue)
      from (select distinct i.queue
              from unnest($1::text[], $2::timestamptz[], $3::int8[]) as i(queue, run_at, delay_us)
             where i.delay_us = 0
                or i.run_at <= longshore.clock()) as due";

impl PostgresStore {
    /// Notifies other processes through the server.
    pub(super) async fn notify_server(&self, notices: &[Notice]) -> Result<()> {
        if !self.0.notify || notices.is_empty() {
            return Ok(());
        }
        let own = self.0.listener.subscribers.own_notifications();
        let sending = own.map(|own| own.expect(notices));
        self.run_quick(notices.to_vec(), |tx, notices| Box::pin(notify(tx, notices))).await?;
        if let Some(sending) = sending {
            sending.confirm();
        }
        Ok(())
    }
}

async fn notify(tx: &mut Tx<'_>, notices: &[Notice]) -> Sql<()> {
    let (mut queues, mut workers) = (Vec::new(), Vec::new());
    for notice in notices {
        match notice {
            Notice::Due(queue) => queues.push(queue.as_str()),
            Notice::Cancel(worker) => workers.push(worker.0),
        }
    }
    if !queues.is_empty() {
        sqlx::query(tx.sql(NOTIFY)).bind(queues).execute(&mut *tx.connection).await?;
    }
    if !workers.is_empty() {
        sqlx::query(tx.sql(NOTIFY_CANCELS)).bind(workers).execute(&mut *tx.connection).await?;
    }
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

    fn mail() -> [Notice; 1] {
        [Notice::Due("mail".to_owned())]
    }

    #[test]
    fn own_notifications_are_dropped_once_each_while_listening() {
        let own = Arc::<OwnNotifications>::default();
        let send = || own.clone().expect(&mail()).confirm();
        send();
        assert!(!own.is_own(&mail()[0]), "no connection was listening");
        own.set_listening(true);
        send();
        send();
        assert!(!own.is_own(&Notice::Due("other".to_owned())));
        assert_eq!([(); 3].map(|()| own.is_own(&mail()[0])), [true, true, false]);
        send();
        own.set_listening(true);
        assert!(!own.is_own(&mail()[0]), "a new connection does not receive earlier notifications");
    }

    #[test]
    fn a_queue_named_twice_in_one_notification_is_expected_once() {
        let own = Arc::<OwnNotifications>::default();
        own.set_listening(true);
        own.clone().expect(&[mail(), mail()].concat()).confirm();
        assert_eq!([(); 2].map(|()| own.is_own(&mail()[0])), [true, false]);
    }

    #[test]
    fn an_unconfirmed_notification_is_not_expected() {
        let own = Arc::<OwnNotifications>::default();
        own.set_listening(true);
        drop(own.clone().expect(&mail()));
        assert!(!own.is_own(&mail()[0]), "it may never have been sent");
    }

    #[tokio::test]
    async fn notify_returns_whether_there_is_a_subscriber() {
        let subscribers = Subscribers::default();
        assert!(!subscribers.notify(&mail()), "no channel was opened");
        let sender = NoticeSender::new();
        let mut receiver = sender.wakeups();
        subscribers.open(&sender);
        assert!(subscribers.notify(&mail()));
        assert_eq!(receiver.next().await.as_deref(), Some("mail"));
        drop(receiver);
        assert!(!subscribers.notify(&mail()), "the subscriber is gone");
    }

    #[test]
    fn a_subscriber_never_joins_a_channel_that_was_closed() {
        let subscribers = Subscribers::default();
        let sender = NoticeSender::new();
        let receiver = sender.cancels();
        subscribers.open(&sender);
        drop(receiver);
        let joined = subscribers.join(NoticeSender::wakeups);
        assert!(joined.is_some() && !subscribers.close_if_unused(&sender), "the channel stays open for it");
        drop(joined);
        assert!(subscribers.close_if_unused(&sender));
        assert!(subscribers.join(NoticeSender::wakeups).is_none());
    }
}
