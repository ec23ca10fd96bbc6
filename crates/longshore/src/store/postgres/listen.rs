//! Wake-ups by `LISTEN`: a hint beside polling, never relied on.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use sqlx::PgConnection;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::broadcast;

use super::{Done, PostgresStore, Work};
use crate::error::Result;
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
    sender: tokio::sync::Mutex<Option<broadcast::WeakSender<String>>>,
    echoes: Arc<Echoes>,
}

impl Listener {
    pub(super) fn new(channel: String, options: PgConnectOptions) -> Self {
        Listener { channel, options, sender: tokio::sync::Mutex::default(), echoes: Arc::default() }
    }

    pub(super) fn aside(&self) -> Self {
        Listener::new(self.channel.clone(), self.options.clone())
    }

    pub(super) async fn subscribe(&self) -> Result<Wakeups> {
        let mut slot = self.sender.lock().await;
        if let Some(sender) = slot.as_ref().and_then(broadcast::WeakSender::upgrade) {
            return Ok(Wakeups(sender.subscribe()));
        }
        let (sender, receiver) = broadcast::channel(CAPACITY);
        *slot = Some(sender.downgrade());
        let first = connect(&self.options, &self.channel).await.ok();
        self.echoes.listening(first.is_some());
        let (options, channel) = (self.options.clone(), self.channel.clone());
        tokio::spawn(listen(first, options, channel, sender, self.echoes.clone()));
        Ok(Wakeups(receiver))
    }

    /// Tells subscribers in this process.
    fn tell_ours(&self, queues: &[String]) {
        // Whoever is just subscribing will look by itself.
        let Ok(slot) = self.sender.try_lock() else { return };
        let Some(sender) = slot.as_ref().and_then(broadcast::WeakSender::upgrade) else { return };
        for queue in queues {
            let _ = sender.send(queue.clone());
        }
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

    fn expect(&self, queues: &[String]) {
        let mut expected = self.lock();
        if expected.listening {
            for queue in queues {
                *expected.from.entry(queue.clone()).or_default() += 1;
            }
        }
    }

    /// It is not certain whether anything was announced.
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

/// Passes notifications on until nobody listens any more. A connection that
/// is lost, or answers no probe, is replaced; whoever waits is told to look
/// everywhere, because wake-ups may have been missed meanwhile.
async fn listen(
    mut listener: Option<PgListener>,
    options: PgConnectOptions,
    channel: String,
    sender: broadcast::Sender<String>,
    echoes: Arc<Echoes>,
) {
    while sender.receiver_count() > 0 {
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
    echoes.listening(false);
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

impl PostgresStore {
    /// Tells this process, and by way of the server all others.
    pub(super) async fn announce(&self, queues: &[String]) -> Result<()> {
        let listener = &self.0.listener;
        listener.tell_ours(queues);
        if !self.0.notify || queues.is_empty() {
            return Ok(());
        }
        listener.echoes.expect(queues);
        let notify: Work<Vec<String>, ()> =
            |store, connection, queues| Box::pin(store.notify_on(connection, queues));
        let told = self.run(queues.to_vec(), notify).await;
        if told.is_err() {
            listener.echoes.give_up(queues);
        }
        told
    }

    /// Announces in the transaction of this connection.
    pub(super) async fn notify_on(&self, connection: &mut PgConnection, queues: &[String]) -> Done<()> {
        if !self.0.notify || queues.is_empty() {
            return Ok(());
        }
        sqlx::query(self.sql(NOTIFY)).bind(queues).execute(connection).await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::Echoes;

    #[test]
    fn as_many_echoes_are_passed_over_as_were_sent_while_somebody_listened() {
        let echoes = Echoes::default();
        let mail = ["mail".to_owned()];
        echoes.expect(&mail);
        assert!(!echoes.is_ours("mail"), "nobody was listening");
        echoes.listening(true);
        echoes.expect(&mail);
        echoes.expect(&mail);
        assert!(!echoes.is_ours("other"));
        assert_eq!([(); 3].map(|()| echoes.is_ours("mail")), [true, true, false]);
        echoes.expect(&mail);
        echoes.give_up(&mail);
        assert!(!echoes.is_ours("mail"), "it may never have been sent");
        echoes.expect(&mail);
        echoes.listening(true);
        assert!(!echoes.is_ours("mail"), "another connection does not hear it");
    }
}
