//! Wake-ups by `LISTEN`: a hint beside polling, never relied on.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::broadcast;

use super::PostgresStore;
use super::enqueue::split;
use super::tx::{Sql, Tx};
use crate::enqueue::ValidJob;
use crate::error::Result;
use crate::lifecycle::When;
use crate::store::Wakeups;

/// How long a listener may hear nothing before it is probed.
const PROBE_EVERY: Duration = Duration::from_secs(10);
const CAPACITY: usize = 256;

/// How long a connection may take to come about.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);
/// Between tries while none comes about.
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// One listening connection per store, made when somebody first subscribes.
///
/// Who enqueues in a process that also works need not wait for the server to
/// say so: subscribers of the same store are told at once, and the server's
/// echo of our own announcement is passed over.
#[derive(Debug)]
pub(super) struct Listener {
    channel: String,
    options: PgConnectOptions,
    ears: Arc<Slot>,
    /// One subscriber connects; the others wait until it has.
    connecting: tokio::sync::Mutex<()>,
}

impl Listener {
    pub(super) fn new(channel: String, options: PgConnectOptions) -> Self {
        Listener { channel, options, ears: Arc::default(), connecting: tokio::sync::Mutex::default() }
    }

    /// A listener for the same channel that has no connection yet.
    pub(super) fn unconnected(&self) -> Self {
        Listener::new(self.channel.clone(), self.options.clone())
    }

    /// Notifies subscribers in this process. Returns whether there is one.
    pub(super) fn notify_local(&self, queues: &[String]) -> bool {
        self.ears.tell(queues)
    }

    pub(super) async fn subscribe(&self) -> Result<Wakeups> {
        let _connecting = self.connecting.lock().await;
        if let Some(receiver) = self.ears.join() {
            return Ok(Wakeups(receiver));
        }
        let (sender, receiver) = broadcast::channel(CAPACITY);
        // What this process announces while the connection comes about is heard.
        let echoes = self.ears.open(&sender);
        let first = connect(&self.options, &self.channel).await.ok();
        echoes.listening(first.is_some());
        let (options, channel) = (self.options.clone(), self.channel.clone());
        tokio::spawn(listen(first, options, channel, sender, self.ears.clone(), echoes));
        Ok(Wakeups(receiver))
    }
}

/// Who listens in this process. Locked for moments only and never while
/// something is awaited: an announcement must not pass a listener by because
/// another one is just being made.
#[derive(Debug, Default)]
struct Slot(Mutex<Option<Ears>>);

#[derive(Debug)]
struct Ears {
    sender: broadcast::WeakSender<String>,
    echoes: Arc<Echoes>,
}

impl Slot {
    fn lock(&self) -> MutexGuard<'_, Option<Ears>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn open(&self, sender: &broadcast::Sender<String>) -> Arc<Echoes> {
        let echoes = Arc::<Echoes>::default();
        *self.lock() = Some(Ears { sender: sender.downgrade(), echoes: echoes.clone() });
        echoes
    }

    fn join(&self) -> Option<broadcast::Receiver<String>> {
        let sender = self.lock().as_ref()?.sender.upgrade()?;
        Some(sender.subscribe())
    }

    /// Whether somebody still listens. If not, the next subscriber begins anew.
    fn in_use(&self, sender: &broadcast::Sender<String>) -> bool {
        let mut slot = self.lock();
        let in_use = sender.receiver_count() > 0;
        if !in_use {
            *slot = None;
        }
        in_use
    }

    /// Tells subscribers in this process, if there are any.
    fn tell(&self, queues: &[String]) -> bool {
        let sender = self.lock().as_ref().and_then(|ears| ears.sender.upgrade());
        let tell = |sender: broadcast::Sender<String>| {
            queues.iter().filter(|queue| sender.send(String::clone(queue)).is_ok()).count() > 0
        };
        sender.is_some_and(tell)
    }

    /// What subscribers in this process were told, the server need not tell them
    /// again.
    fn echoes(&self) -> Option<Arc<Echoes>> {
        let slot = self.lock();
        let ears = slot.as_ref()?;
        ears.sender.upgrade().map(|_| ears.echoes.clone())
    }
}

/// How many of our own announcements the listening connection will still hear.
/// Announcements carry nothing but their queue, so this is a matter of counting:
/// if another process's comes first, it is passed over in place of ours, and
/// ours does its service a moment later.
#[derive(Debug, Default)]
struct Echoes(Mutex<Expected>);

#[derive(Debug, Default)]
struct Expected {
    listening: bool,
    from: HashMap<String, usize>,
}

impl Echoes {
    fn lock(&self) -> MutexGuard<'_, Expected> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was expected of a connection that is gone will never come.
    fn listening(&self, listening: bool) {
        *self.lock() = Expected { listening, from: HashMap::new() };
    }

    fn expect<'q>(self: Arc<Self>, queues: &'q [String]) -> Awaited<'q> {
        let mut expected = self.lock();
        if expected.listening {
            // The server says the same thing once in a transaction.
            for queue in queues.iter().collect::<HashSet<_>>() {
                *expected.from.entry(queue.clone()).or_default() += 1;
            }
        }
        drop(expected);
        Awaited { echoes: self, queues }
    }

    /// It is not certain whether anything was announced. An echo too many wakes
    /// somebody for nothing; one that is missed would swallow another's word.
    fn give_up(&self, queues: &[String]) {
        let mut expected = self.lock();
        expected.from.retain(|queue, _| !queues.contains(queue));
    }

    fn is_ours(&self, queue: &str) -> bool {
        let mut expected = self.lock();
        match expected.from.get_mut(queue) {
            Some(count) if *count > 1 => {
                *count -= 1;
                true
            }
            Some(_) => expected.from.remove(queue).is_some(),
            None => false,
        }
    }
}

/// Echoes of an announcement under way. Given up unless it is known to have
/// gone through, also when the announcer goes away in the middle.
struct Awaited<'q> {
    echoes: Arc<Echoes>,
    queues: &'q [String],
}

impl Awaited<'_> {
    fn announced(mut self) {
        self.queues = &[];
    }
}

impl Drop for Awaited<'_> {
    fn drop(&mut self) {
        self.echoes.give_up(self.queues);
    }
}

/// Passes notifications on until nobody listens any more. A connection that
/// is lost, or answers no probe, is replaced; whoever waits is told to look
/// everywhere, because wake-ups may have been missed meanwhile.
async fn listen(
    mut listener: Option<PgListener>,
    options: PgConnectOptions,
    channel: String,
    sender: broadcast::Sender<String>,
    ears: Arc<Slot>,
    echoes: Arc<Echoes>,
) {
    while ears.in_use(&sender) {
        let Some(open) = listener.as_mut() else {
            tokio::time::sleep(AGAIN_AFTER).await;
            listener = connect(&options, &channel).await.ok();
            if listener.is_some() {
                tracing::info!("listening for new work again");
                echoes.listening(true);
                let _ = sender.send(Wakeups::EVERYWHERE.into());
            }
            continue;
        };
        match tokio::time::timeout(PROBE_EVERY, open.try_recv()).await {
            Ok(Ok(Some(notification))) if echoes.is_ours(notification.payload()) => {}
            Ok(Ok(Some(notification))) => {
                let _ = sender.send(notification.payload().to_owned());
            }
            Err(_) if alive(open).await => {}
            Ok(Ok(None) | Err(_)) | Err(_) => {
                tracing::warn!("cannot listen for new work; polling finds it meanwhile");
                echoes.listening(false);
                listener = None;
            }
        }
    }
}

/// The driver lends a listener its connection from a pool, and a lost one may
/// keep its place there for ever; so each has a pool of its own.
async fn connect(options: &PgConnectOptions, channel: &str) -> sqlx::Result<PgListener> {
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(CONNECT_WITHIN);
    let pool = pool.connect_lazy_with(options.clone());
    let listening = async {
        let mut listener = PgListener::connect_with(&pool).await?;
        listener.eager_reconnect(false);
        listener.listen(channel).await?;
        Ok(listener)
    };
    tokio::time::timeout(CONNECT_WITHIN, listening).await.unwrap_or(Err(sqlx::Error::PoolTimedOut))
}

async fn alive(listener: &mut PgListener) -> bool {
    let probe = sqlx::query("select 1").execute(&mut *listener);
    tokio::time::timeout(Duration::from_secs(5), probe).await.is_ok_and(|answer| answer.is_ok())
}

const NOTIFY: &str = "
    select pg_notify('longshore.wake', queue)
      from unnest($1::text[]) as queue";

/// Once per queue with a job that is due now.
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
        let awaited = self.0.listener.ears.echoes().map(|echoes| echoes.expect(queues));
        self.run_quick(queues.to_vec(), |tx, queues| Box::pin(notify(tx, queues))).await?;
        if let Some(awaited) = awaited {
            awaited.announced();
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
    fn as_many_echoes_are_passed_over_as_were_sent_while_somebody_listened() {
        let echoes = Arc::<Echoes>::default();
        let announce = || echoes.clone().expect(&mail()).announced();
        announce();
        assert!(!echoes.is_ours("mail"), "nobody was listening");
        echoes.listening(true);
        announce();
        announce();
        assert!(!echoes.is_ours("other"));
        assert_eq!([(); 3].map(|()| echoes.is_ours("mail")), [true, true, false]);
        announce();
        echoes.listening(true);
        assert!(!echoes.is_ours("mail"), "another connection does not hear it");
    }

    #[test]
    fn a_queue_named_twice_is_echoed_once() {
        let echoes = Arc::<Echoes>::default();
        echoes.listening(true);
        echoes.clone().expect(&[mail(), mail()].concat()).announced();
        assert_eq!([(); 2].map(|()| echoes.is_ours("mail")), [true, false]);
    }

    #[test]
    fn an_announcement_that_is_dropped_expects_no_echo() {
        let echoes = Arc::<Echoes>::default();
        echoes.listening(true);
        drop(echoes.clone().expect(&mail()));
        assert!(!echoes.is_ours("mail"), "it may never have been sent");
    }

    #[test]
    fn an_echo_belongs_to_us_only_if_somebody_here_was_told() {
        let ears = Slot::default();
        assert!(!ears.tell(&mail()), "nobody ever listened");
        let (sender, mut receiver) = broadcast::channel(CAPACITY);
        ears.open(&sender);
        assert!(ears.tell(&mail()));
        assert_eq!(receiver.try_recv(), Ok("mail".into()));
        drop(receiver);
        assert!(!ears.tell(&mail()), "nobody listens any more");
    }

    #[test]
    fn a_subscriber_joins_a_listener_or_finds_none_but_never_one_that_has_ended() {
        let ears = Slot::default();
        let (sender, receiver) = broadcast::channel(CAPACITY);
        ears.open(&sender);
        drop(receiver);
        let joined = ears.join();
        assert!(joined.is_some() && ears.in_use(&sender), "it goes on for the one who came");
        drop(joined);
        assert!(!ears.in_use(&sender));
        assert!(ears.join().is_none());
    }
}
