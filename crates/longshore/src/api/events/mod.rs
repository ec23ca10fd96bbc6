//! What happens, as it happens: server-sent events. Somebody looks at the queue
//! again and again while anybody listens, and what has changed goes into a ring
//! that every listener reads at its own pace.

mod ring;
mod snapshot;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use tokio::sync::{mpsc, watch};

use super::auth::{Caller, Guard};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::{Server, Shared};
use crate::store::Scope;
use ring::{Event, Position, Ring};
use snapshot::Snapshot;

/// How often somebody looks; less often where a look takes long.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);
/// A look may take this part of the time.
const MIN_PAUSE_FACTOR: u32 = 10;
/// How long the ring is kept when nobody listens any more: long enough to come
/// back.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How many events the ring holds.
const RING_CAPACITY: usize = 2000;
/// How many may listen at once.
const MAX_LISTENERS: usize = 256;
/// Silence is broken this often, so that both ends notice when the other has gone.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Whether the token still holds is asked this often.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// How long the first look may take.
const FIRST_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);
/// What a client that lost its connection should wait, in milliseconds.
const RECONNECT_DELAY_MS: u32 = 2000;

/// Who listens, and to what.
#[derive(Default)]
pub(super) struct Hub {
    state: Mutex<HubState>,
    /// Counts the looks that brought news.
    news: watch::Sender<u64>,
}

#[derive(Default)]
struct HubState {
    /// There is one from the first look on.
    ring: Option<Ring>,
    /// Whether somebody looks.
    polling: bool,
    listeners: usize,
    /// When the last one left.
    idle_since: Option<Instant>,
}

/// One of those who listen, until it is dropped.
struct Listener(Server);

impl Hub {
    fn state(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts in what happened; the first look only begins the ring.
    fn publish(&self, events: Vec<Event>) {
        let is_first = {
            let mut state = self.state();
            let is_first = state.ring.is_none();
            let ring = state.ring.get_or_insert_with(|| Ring::new(RING_CAPACITY));
            events.iter().for_each(|event| ring.push(event.clone()));
            is_first
        };
        if is_first || !events.is_empty() {
            self.news.send_modify(|looks| *looks += 1);
        }
    }

    /// Whether everybody has been gone for long; if so, all is forgotten, and
    /// whoever comes next begins anew.
    fn reset_if_idle(&self) -> bool {
        let mut state = self.state();
        let over =
            state.listeners == 0 && state.idle_since.is_none_or(|since| since.elapsed() >= IDLE_TIMEOUT);
        if over {
            *state = HubState::default();
        }
        over
    }
}

impl Listener {
    fn new(server: Server) -> ApiResult<Self> {
        let starts = {
            let mut state = server.hub.state();
            if state.listeners >= MAX_LISTENERS {
                return Err(Problem::new(
                    Slug::Unavailable,
                    format!("{MAX_LISTENERS} listen already; come back later, or ask another server"),
                ));
            }
            state.listeners += 1;
            !std::mem::replace(&mut state.polling, true)
        };
        if starts {
            tokio::spawn(take_snapshots(Arc::downgrade(&server.0)));
        }
        Ok(Listener(server))
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.0.hub.state();
        state.listeners -= 1;
        if state.listeners == 0 {
            state.idle_since = Some(Instant::now());
        }
    }
}

/// Looks until nobody has listened for a while, or the server is gone.
async fn take_snapshots(server: Weak<Shared>) {
    let mut before: Option<Snapshot> = None;
    loop {
        let took = {
            let Some(server) = server.upgrade().map(Server) else { return };
            if server.hub.reset_if_idle() {
                return;
            }
            let began = Instant::now();
            let known = before.get_or_insert_default();
            match Snapshot::take(&server.client, known).await {
                Ok(seen) => {
                    let is_first = server.hub.state().ring.is_none();
                    server.hub.publish(if is_first { Vec::new() } else { seen.changes_since(known) });
                    before = Some(seen);
                }
                Err(error) => tracing::warn!(%error, "cannot see what happens; trying again"),
            }
            began.elapsed()
        };
        tokio::time::sleep(SNAPSHOT_INTERVAL.max(took * MIN_PAUSE_FACTOR)).await;
    }
}

/// What happens, as it happens.
///
/// An endless answer of server-sent events: `job` (a job as it is now), `job_removed`, `queue` and
/// `worker`. They are found by looking once a second, at the newest and the running jobs; of others the
/// counts of their `queue` tell. `gap` means that more jobs were made than are told of one by one, `reset`
/// that this listener missed some: read again what you show. With `Last-Event-ID` it goes on after that
/// event, or with a `reset` if it cannot.
#[utoipa::path(
    get,
    path = "/events",
    tag = "monitoring",
    params(("Last-Event-ID" = Option<String>, Header, description = "The `id` of the last event that was seen.")),
    responses(
        (status = 200, description = "Events, without end.", body = String, content_type = "text/event-stream"),
        (status = 503, description = "Too many listen, or the database does not answer.", body = ProblemBody),
    ),
)]
pub(super) async fn events(
    State(server): State<Server>,
    caller: Caller,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let mut news = server.hub.news.subscribe();
    let listener = Listener::new(server.clone())?;
    let there = async { while server.hub.state().ring.is_none() && news.changed().await.is_ok() {} };
    if tokio::time::timeout(FIRST_SNAPSHOT_TIMEOUT.min(server.timeout / 2), there).await.is_err() {
        return Err(Problem::new(Slug::Unavailable, "the database does not answer"));
    }
    let asked = headers.get("last-event-id").map(|id| id.to_str().ok().and_then(Position::parse));
    let (out, body) = mpsc::channel(16);
    let feed = EventStream { listener, news, out, queues: caller.queues().map(<[String]>::to_vec) };
    tokio::spawn(feed.run(asked, headers));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::new(ChannelBody(body))).into_response())
}

/// What one listener gets.
struct EventStream {
    listener: Listener,
    news: watch::Receiver<u64>,
    out: mpsc::Sender<Bytes>,
    /// The only queues it may see.
    queues: Option<Vec<String>>,
}

/// The other end has gone.
struct Disconnected;

impl EventStream {
    /// Feeds until the listener leaves, may no longer listen, or the server ends.
    /// `asked` is where it wants to go on, if it said so; a place that is none can
    /// not be gone on from.
    async fn run(mut self, asked: Option<Option<Position>>, headers: HeaderMap) {
        let server = self.listener.0.clone();
        let gone = self.out.clone();
        tokio::select! {
            Disconnected = self.feed(asked) => {}
            () = gone.closed() => {}
            () = server.ends() => {}
            () = until_refused(&server.guard, &headers) => {}
        }
    }

    async fn feed(&mut self, asked: Option<Option<Position>>) -> Disconnected {
        let mut place = asked.unwrap_or_else(|| self.end());
        if let Err(left) = self.write(format!("retry: {RECONNECT_DELAY_MS}\n\n")).await {
            return left;
        }
        loop {
            place = match self.catch_up(place).await {
                Ok(place) => place,
                Err(left) => return left,
            };
            let news = tokio::time::timeout(KEEP_ALIVE_INTERVAL, self.news.changed()).await;
            if news.is_err()
                && let Err(left) = self.write(":\n\n".into()).await
            {
                return left;
            }
        }
    }

    fn end(&self) -> Option<Position> {
        self.listener.0.hub.state().ring.as_ref().map(Ring::end)
    }

    /// Writes what came after `place`; where it is now.
    async fn catch_up(&self, place: Option<Position>) -> Result<Option<Position>, Disconnected> {
        let missed = {
            let state = self.listener.0.hub.state();
            state.ring.as_ref().zip(place).and_then(|(ring, place)| ring.after(place))
        };
        let Some(missed) = missed else {
            let end = self.end();
            let id = end.map(|end| format!("id: {end}\n")).unwrap_or_default();
            self.write(format!("{id}event: reset\ndata: {{}}\n\n")).await?;
            return Ok(end);
        };
        let mut at = place;
        for (place, event) in missed {
            at = Some(place);
            if self.queues.as_ref().is_none_or(|queues| event.is_of(queues)) {
                // Of our own types, which all have names for keys. One line: JSON
                // escapes what would end it.
                let data = serde_json::to_string(&*event).unwrap_or_default();
                self.write(format!("id: {place}\nevent: {}\ndata: {data}\n\n", event.name())).await?;
            }
        }
        Ok(at)
    }

    async fn write(&self, text: String) -> Result<(), Disconnected> {
        self.out.send(text.into()).await.map_err(|_| Disconnected)
    }
}

/// A token may be revoked while its bearer listens.
async fn until_refused(guard: &Guard, headers: &HeaderMap) {
    loop {
        tokio::time::sleep(TOKEN_CHECK_INTERVAL).await;
        // A database that does not answer refuses nobody.
        if let Err(problem) = guard.admit(headers, Scope::Read).await
            && matches!(problem.slug(), Slug::Unauthorized | Slug::Forbidden)
        {
            return;
        }
    }
}

/// An answer that comes in pieces.
struct ChannelBody(mpsc::Receiver<Bytes>);

impl hyper::body::Body for ChannelBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|chunk| chunk.map(|chunk| Ok(Frame::data(chunk))))
    }
}
