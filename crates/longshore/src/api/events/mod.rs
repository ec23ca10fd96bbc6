//! Live events over server-sent events. While there are listeners, one task takes a
//! snapshot of the queue about once a second and puts the changes into a ring. Every
//! listener reads the ring at its own pace.

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

use super::auth::{Caller, Credential};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::waiting_calls::{WaitingCall, retry_after};
use super::{Server, Shared};
use crate::store::Scope;
use ring::{Event, Position, Ring};
use snapshot::Snapshot;

/// The pause between snapshots; longer if a snapshot takes long.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);
/// The pause is at least this many times as long as the snapshot took, so that
/// snapshots use less than a tenth of the time.
const MIN_PAUSE_FACTOR: u32 = 10;
/// How long the ring is kept after the last listener left, so that a listener can
/// reconnect.
const IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// How many events the ring holds.
const RING_CAPACITY: usize = 2000;
/// An idle stream gets a comment this often, so that both ends notice when the other
/// is gone.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// How long a new listener waits for the first snapshot.
const FIRST_SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a client should wait before it reconnects, in milliseconds.
const RECONNECT_DELAY_MS: u32 = 2000;

/// The listeners of this server and the ring they read.
#[derive(Default)]
pub(super) struct Hub {
    state: Mutex<HubState>,
    /// Counts the snapshots that brought changes, to wake the listeners.
    changes: watch::Sender<u64>,
}

#[derive(Default)]
struct HubState {
    /// Exists after the first snapshot.
    ring: Option<Ring>,
    /// Whether the snapshot task is running.
    polling: bool,
    listeners: usize,
    /// When the last listener left.
    idle_since: Option<Instant>,
}

/// A registered listener. Dropping it removes it from the hub.
struct Listener {
    server: Server,
    _waiting: WaitingCall,
}

impl Hub {
    fn state(&self) -> MutexGuard<'_, HubState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds events to the ring, which the first call creates, and wakes the listeners.
    fn publish(&self, events: Vec<Event>) {
        let is_first = {
            let mut state = self.state();
            let is_first = state.ring.is_none();
            let ring = state.ring.get_or_insert_with(|| Ring::new(RING_CAPACITY));
            events.iter().for_each(|event| ring.push(event.clone()));
            is_first
        };
        if is_first || !events.is_empty() {
            self.changes.send_modify(|count| *count += 1);
        }
    }

    /// Resets the hub if there has been no listener for [`IDLE_TIMEOUT`]. Returns
    /// whether it did; the next listener starts a new ring.
    fn reset_if_idle(&self) -> bool {
        let mut state = self.state();
        let is_idle =
            state.listeners == 0 && state.idle_since.is_none_or(|since| since.elapsed() >= IDLE_TIMEOUT);
        if is_idle {
            *state = HubState::default();
        }
        is_idle
    }
}

impl Listener {
    fn new(server: Server, caller: &Caller) -> ApiResult<Self> {
        let Some(waiting) = server.waiting_calls.begin(caller) else {
            let (name, value) = retry_after();
            return Err(Problem::new(
                Slug::Unavailable,
                "too many calls and streams of this token, or of all clients, wait already; try again later, or \
                 use another server",
            )
            .with_header(name, value));
        };
        let start_polling = {
            let mut state = server.hub.state();
            state.listeners += 1;
            !std::mem::replace(&mut state.polling, true)
        };
        if start_polling {
            tokio::spawn(take_snapshots(Arc::downgrade(&server.0)));
        }
        Ok(Listener { server, _waiting: waiting })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.server.hub.state();
        state.listeners -= 1;
        if state.listeners == 0 {
            state.idle_since = Some(Instant::now());
        }
    }
}

/// Takes snapshots until there has been no listener for a while or the server is
/// dropped.
async fn take_snapshots(server: Weak<Shared>) {
    let mut previous: Option<Snapshot> = None;
    loop {
        let took = {
            let Some(server) = server.upgrade().map(Server) else { return };
            if server.hub.reset_if_idle() {
                return;
            }
            let started = Instant::now();
            let before = previous.get_or_insert_default();
            match Snapshot::take(&server.client, before).await {
                Ok(now) => {
                    let is_first = server.hub.state().ring.is_none();
                    server.hub.publish(if is_first { Vec::new() } else { now.changes_since(before) });
                    previous = Some(now);
                }
                Err(error) => tracing::warn!(%error, "cannot read changes for event listeners; trying again"),
            }
            started.elapsed()
        };
        tokio::time::sleep(SNAPSHOT_INTERVAL.max(took * MIN_PAUSE_FACTOR)).await;
    }
}

/// Streams changes as server-sent events.
///
/// The response never ends. The events are `job` (the current state of a job), `job_removed`, `queue` and
/// `worker`. The server compares snapshots that it takes about once a second. A snapshot covers the newest
/// and the running jobs; changes of other jobs show only in the counts of their `queue`. `gap` means that
/// more jobs were created than are reported one by one. `reset` means that this listener missed events:
/// reload your data. With `Last-Event-ID` the stream continues after that event, or starts with a `reset`
/// if it cannot.
#[utoipa::path(
    get,
    path = "/events",
    operation_id = "stream_events",
    tag = "monitoring",
    params(("Last-Event-ID" = Option<String>, Header, description = "The `id` of the last event received.")),
    responses(
        (status = 200, description = "An endless stream of events.",
         body = String, content_type = "text/event-stream"),
        (status = 503, description = "There are too many listeners, or the database does not reply.",
         body = ProblemBody),
    ),
)]
pub(super) async fn events(
    State(server): State<Server>,
    caller: Caller,
    credential: Credential,
    headers: HeaderMap,
) -> ApiResult<Response> {
    let mut changes = server.hub.changes.subscribe();
    let listener = Listener::new(server.clone(), &caller)?;
    let ring_exists = async { while server.hub.state().ring.is_none() && changes.changed().await.is_ok() {} };
    if tokio::time::timeout(FIRST_SNAPSHOT_TIMEOUT.min(server.timeout / 2), ring_exists).await.is_err() {
        return Err(Problem::new(Slug::Unavailable, "the database does not reply; try again in a moment"));
    }
    let start = headers.get("last-event-id").map(|id| id.to_str().ok().and_then(Position::parse));
    let (out, body) = mpsc::channel(16);
    let stream = EventStream { listener, changes, out, queues: caller.queues().map(<[String]>::to_vec) };
    tokio::spawn(stream.run(start, credential));
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-store")];
    Ok((headers, Body::new(ChannelBody(body))).into_response())
}

/// Writes the events for one listener.
struct EventStream {
    listener: Listener,
    changes: watch::Receiver<u64>,
    out: mpsc::Sender<Bytes>,
    /// The queues that the token covers; `None` means all.
    queues: Option<Vec<String>>,
}

/// The client has closed the connection.
struct Disconnected;

impl EventStream {
    /// Writes until the client disconnects, its token is revoked, or the server stops.
    /// `start` is the position to continue from: `None` if the client sent none,
    /// `Some(None)` if it sent an invalid one.
    async fn run(mut self, start: Option<Option<Position>>, credential: Credential) {
        let server = self.listener.server.clone();
        let client = self.out.clone();
        tokio::select! {
            Disconnected = self.write_events(start) => {}
            () = client.closed() => {}
            () = server.stopping() => {}
            _ = credential.refused(Scope::Read) => {}
        }
    }

    async fn write_events(&mut self, start: Option<Option<Position>>) -> Disconnected {
        let mut position = start.unwrap_or_else(|| self.end());
        if let Err(disconnected) = self.write(format!("retry: {RECONNECT_DELAY_MS}\n\n")).await {
            return disconnected;
        }
        loop {
            position = match self.catch_up(position).await {
                Ok(position) => position,
                Err(disconnected) => return disconnected,
            };
            let changed = tokio::time::timeout(KEEP_ALIVE_INTERVAL, self.changes.changed()).await;
            if changed.is_err()
                && let Err(disconnected) = self.write(":\n\n".into()).await
            {
                return disconnected;
            }
        }
    }

    fn end(&self) -> Option<Position> {
        self.listener.server.hub.state().ring.as_ref().map(Ring::end)
    }

    /// Writes the events after `position` and returns the new position. Writes a
    /// `reset` if the ring does not hold all of them.
    async fn catch_up(&self, position: Option<Position>) -> Result<Option<Position>, Disconnected> {
        let missed = {
            let state = self.listener.server.hub.state();
            state.ring.as_ref().zip(position).and_then(|(ring, position)| ring.after(position))
        };
        let Some(missed) = missed else {
            let end = self.end();
            let id = end.map(|end| format!("id: {end}\n")).unwrap_or_default();
            self.write(format!("{id}event: reset\ndata: {{}}\n\n")).await?;
            return Ok(end);
        };
        let mut last = position;
        for (position, event) in missed {
            last = Some(position);
            if self.queues.as_ref().is_none_or(|queues| event.is_visible_to(queues)) {
                // Cannot fail, because all keys are strings. It is a single line, because
                // JSON escapes newlines.
                let data = serde_json::to_string(&*event).unwrap_or_default();
                self.write(format!("id: {position}\nevent: {}\ndata: {data}\n\n", event.name())).await?;
            }
        }
        Ok(last)
    }

    async fn write(&self, text: String) -> Result<(), Disconnected> {
        self.out.send(text.into()).await.map_err(|_| Disconnected)
    }
}

/// A response body that sends what arrives on a channel.
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
