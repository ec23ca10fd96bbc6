//! Wake-ups by `LISTEN`: a hint beside polling, never relied on.

use std::time::Duration;

use sqlx::PgConnection;
use sqlx::postgres::{PgConnectOptions, PgListener, PgPoolOptions};
use tokio::sync::{Mutex, broadcast};

use super::{Done, PostgresStore};
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
#[derive(Debug)]
pub(super) struct Listener {
    channel: String,
    options: PgConnectOptions,
    sender: Mutex<Option<broadcast::WeakSender<String>>>,
}

impl Listener {
    pub(super) fn new(channel: String, options: PgConnectOptions) -> Self {
        Listener { channel, options, sender: Mutex::default() }
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
        let first = connect(&self.options, &self.channel).await;
        tokio::spawn(listen(first.ok(), self.options.clone(), self.channel.clone(), sender));
        Ok(Wakeups(receiver))
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
) {
    while sender.receiver_count() > 0 {
        let Some(open) = listener.as_mut() else {
            tokio::time::sleep(AGAIN_AFTER).await;
            listener = connect(&options, &channel).await.ok();
            if listener.is_some() {
                tracing::info!("listening for new work again");
                let _ = sender.send(Wakeups::EVERYWHERE.into());
            }
            continue;
        };
        match tokio::time::timeout(PROBE_EVERY, open.try_recv()).await {
            Ok(Ok(Some(notification))) => {
                let _ = sender.send(notification.payload().to_owned());
            }
            Err(_) if alive(open).await => {}
            Ok(Ok(None) | Err(_)) | Err(_) => {
                tracing::warn!("cannot listen for new work; polling finds it meanwhile");
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

impl PostgresStore {
    pub(super) async fn notify_on(&self, connection: &mut PgConnection, queues: &[String]) -> Done<()> {
        if !self.0.notify || queues.is_empty() {
            return Ok(());
        }
        sqlx::query(self.sql(NOTIFY)).bind(queues).execute(connection).await?;
        Ok(())
    }
}
