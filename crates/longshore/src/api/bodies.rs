//! Receives the bodies of requests. Limits how slowly they may arrive and how many bytes the
//! server keeps at once, so that slow or large bodies do not occupy the server. Parsing is in `extract`.
//!
//! A body that is too large is refused at once, but the server continues to read it for a
//! while. Many clients read the response only after they have sent the whole body. If the
//! server closed the connection earlier, they would report a broken connection instead.

use std::collections::HashMap;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderValue, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use memmap2::MmapMut;
use tokio::sync::Notify;

use super::connections::{ClientKey, Connection};
use super::problem::{ApiResult, Problem, Slug};
use super::refusals::{self, Refusal};

/// How many bytes of a refused body are read, in addition to those that its route accepts. To read all of a body costs as much as
/// to accept it, so a route for forms reads little.
fn max_discarded(limit: usize) -> usize {
    limit.saturating_mul(16).min(16 * 1024 * 1024)
}

/// A body up to this size is not counted. The number of connections limits how many of them there are.
const MAX_UNCOUNTED: usize = 64 * 1024;

/// Limits on the bodies of requests. A small body that arrives together with its headers, as
/// those of most requests do, is not limited by them.
#[derive(Clone, Debug)]
pub struct BodyLimits {
    /// How long a body may take to arrive, in addition to the bytes received divided by
    /// `min_rate`; 10 s by default. It never takes longer than the request may.
    pub timeout: Duration,
    /// The rate in bytes per second that a body must have after `timeout`; 64 KiB by
    /// default.
    pub min_rate: u32,
    /// How many bytes of bodies larger than 64 KiB the server keeps at once, until they are parsed; 256 MiB by
    /// default. A body counts with the length in its headers, from its first byte. If the headers do not have the length,
    /// it counts with the largest length that the route accepts.
    ///
    /// A request above the limit gets the status 503 before its body is read. If another client address has more bytes, or
    /// if a body of the same address has taken longer than `timeout`, the body that has taken the longest is stopped
    /// instead; its request gets the status 408.
    pub in_total: usize,
}

impl Default for BodyLimits {
    fn default() -> Self {
        BodyLimits { timeout: Duration::from_secs(10), min_rate: 64 * 1024, in_total: 256 * 1024 * 1024 }
    }
}

/// The large bodies that the server keeps.
#[derive(Debug)]
pub(super) struct Bodies {
    limits: BodyLimits,
    kept: Mutex<Vec<Arc<LargeBody>>>,
}

#[derive(Debug)]
struct LargeBody {
    /// `None` if the server does not know its clients' addresses.
    client: Option<ClientKey>,
    since: Instant,
    length: usize,
    /// A complete body makes no room for others.
    is_complete: AtomicBool,
    /// Notified if the body must make room for others.
    stop: Notify,
}

impl Bodies {
    pub(super) fn new(limits: BodyLimits) -> Arc<Self> {
        Arc::new(Bodies { limits, kept: Mutex::default() })
    }

    /// Counts a body of this length before it is read, and stops others if it may replace them. Returns `None` if the
    /// body must not be read.
    fn admit(self: &Arc<Self>, client: Option<ClientKey>, length: usize) -> Option<Slot> {
        let body = Arc::new(LargeBody {
            client,
            since: Instant::now(),
            length,
            is_complete: AtomicBool::new(false),
            stop: Notify::new(),
        });
        let mut kept = self.kept();
        kept.push(body.clone());
        let mut stopped = Vec::<Arc<LargeBody>>::new();
        loop {
            let left =
                || kept.iter().filter(|body| !stopped.iter().any(|stopped| Arc::ptr_eq(stopped, body)));
            if left().map(|body| body.length).sum::<usize>() <= self.limits.in_total {
                break;
            }
            let mut bytes = HashMap::<Option<ClientKey>, usize>::new();
            left().for_each(|body| *bytes.entry(body.client).or_default() += body.length);
            let most = bytes.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(client, _)| client);
            let longest = left()
                .filter(|body| Some(body.client) == most && !body.is_complete.load(Ordering::Relaxed))
                .min_by_key(|body| body.since)
                // To refuse a new body costs less than to read it, and the others of its client may complete soon.
                .filter(|body| body.client != client || body.since.elapsed() > self.limits.timeout);
            let Some(longest) = longest.cloned() else {
                kept.pop();
                return None;
            };
            stopped.push(longest);
        }
        // Their memory is freed as soon as their requests are polled.
        stopped.iter().for_each(|body| body.stop.notify_one());
        kept.retain(|body| !stopped.iter().any(|stopped| Arc::ptr_eq(stopped, body)));
        drop(kept);
        Some(Slot { bodies: self.clone(), body })
    }

    fn kept(&self) -> MutexGuard<'_, Vec<Arc<LargeBody>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a large body among those that the server keeps.
struct Slot {
    bodies: Arc<Bodies>,
    body: Arc<LargeBody>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bodies.kept().retain(|body| !Arc::ptr_eq(body, &self.body));
    }
}

/// What has arrived of a body.
enum Received {
    Small(Vec<u8>),
    /// Memory of its own for as many bytes as the body may have. It takes no space before the bytes arrive, is not copied
    /// when more arrive, and goes back to the system when it is dropped. The allocator would keep much of it.
    Large {
        memory: MmapMut,
        received: usize,
        slot: Slot,
    },
}

impl Received {
    fn push(&mut self, data: &[u8]) {
        match self {
            Received::Small(bytes) => bytes.extend_from_slice(data),
            Received::Large { memory, received, .. } => {
                memory[*received..*received + data.len()].copy_from_slice(data);
                *received += data.len();
            }
        }
    }

    /// Waits until the body must make room for others.
    async fn stopped(&self) {
        match self {
            Received::Small(_) => std::future::pending().await,
            Received::Large { slot, .. } => slot.body.stop.notified().await,
        }
    }

    /// The complete body. It is counted until it is dropped.
    fn complete(self) -> Bytes {
        if let Received::Large { slot, .. } = &self {
            slot.body.is_complete.store(true, Ordering::Relaxed);
        }
        Bytes::from_owner(self)
    }
}

impl AsRef<[u8]> for Received {
    fn as_ref(&self) -> &[u8] {
        match self {
            Received::Small(bytes) => bytes,
            Received::Large { memory, received, .. } => &memory[..*received],
        }
    }
}

/// What is needed to receive the body of one request. In the extensions of every
/// request that has a body.
#[derive(Clone, Debug)]
pub(super) struct BodyReceiver {
    bodies: Arc<Bodies>,
    /// When the headers of the request were complete.
    received: Instant,
    /// When the request must be complete.
    deadline: Instant,
}

impl BodyReceiver {
    /// `timeout` is that of the whole request.
    pub(super) fn new(bodies: Arc<Bodies>, timeout: Duration) -> Self {
        // A little earlier than the timeout of the request: a slow body is an error of
        // the client (408) and not of the server (504).
        let received = Instant::now();
        BodyReceiver { bodies, received, deadline: received + timeout - timeout / 16 }
    }

    pub(super) fn received(&self) -> Instant {
        self.received
    }

    /// The largest body that can be received, of a route that accepts `limit` bytes.
    pub(super) fn largest(&self, limit: usize) -> usize {
        limit.min(self.bodies.limits.in_total)
    }

    /// Receives the body of a request, up to `limit` bytes.
    pub(super) async fn receive(&self, request: Request, limit: usize) -> ApiResult<Bytes> {
        let connection = request.extensions().get::<Arc<Connection>>().cloned();
        let client = client_of(&request);
        let mut body = request.into_body();
        let declared = body.size_hint().exact();
        let length = declared.map_or(limit, |declared| declared as usize);
        let started = Instant::now();
        let (mut received, mut data) = (Received::Small(Vec::new()), None);
        if declared.is_some() && length > MAX_UNCOUNTED {
            received = self.large(client, length)?;
        } else {
            // Most bodies are one piece, which need not be copied.
            let first = poll_once(pin!(next(&mut body))).await;
            data = match first {
                Some(Ok(Some(only))) if body.is_end_stream() && only.len() <= limit => return Ok(only),
                Some(Ok(None)) => return Ok(Bytes::new()),
                Some(first) => first?,
                None => None,
            };
        }
        let _waiting = connection.map(|connection| connection.wait_for_request());
        loop {
            if let Some(data) = data {
                let bytes = received.as_ref().len() + data.len();
                if bytes > length {
                    self.discard(body, max_discarded(limit));
                    return Err(too_large(limit));
                }
                if let Received::Small(small) = &received
                    && bytes > MAX_UNCOUNTED
                {
                    let mut large = self.large(client, length)?;
                    large.push(small);
                    received = large;
                }
                received.push(&data);
            }
            data = tokio::select! {
                biased;
                () = received.stopped() => {
                    refusals::report(Refusal::BodyLimit);
                    return Err(refused(
                        "the server receives too many large bodies at once, and this one has taken the longest; \
                         send the request again"
                            .into(),
                    ));
                }
                data = next(&mut body) => match data? {
                    Some(data) => Some(data),
                    None => return Ok(received.complete()),
                },
                () = tokio::time::sleep_until(self.deadline(started, received.as_ref().len() as u64).into()) => {
                    refusals::report(Refusal::BodyTimeout);
                    return Err(refused(format!(
                        "the body did not arrive within {:?}; send it faster, or split it over several requests",
                        started.elapsed()
                    )));
                }
            };
        }
    }

    /// Memory for a body of up to `length` bytes.
    fn large(&self, client: Option<ClientKey>, length: usize) -> ApiResult<Received> {
        let slot = self.bodies.admit(client, length).ok_or_else(too_many)?;
        let memory = MmapMut::map_anon(length).map_err(|error| {
            tracing::warn!(%error, length, "there is no memory for the body of a request");
            too_many()
        })?;
        Ok(Received::Large { memory, received: 0, slot })
    }

    /// Refuses a request whose body has `declared` bytes, more than its route accepts.
    pub(super) fn refuse(&self, request: Request, declared: u64, limit: usize) -> Problem {
        // A client that sends `Expect: 100-continue` waits before it sends the body. Reading
        // would make hyper request the body.
        let waits = request.headers().contains_key(header::EXPECT);
        if !waits && declared <= (limit + max_discarded(limit)) as u64 {
            self.discard(request.into_body(), limit + max_discarded(limit));
        }
        too_large(limit)
    }

    /// Reads the rest of a refused body in the background, up to `max_bytes`. It may take as long as
    /// an accepted one.
    fn discard(&self, mut body: Body, max_bytes: usize) {
        let receiver = self.clone();
        tokio::spawn(async move {
            let (started, mut discarded) = (Instant::now(), 0);
            while discarded <= max_bytes {
                tokio::select! {
                    biased;
                    frame = body.frame() => match frame {
                        Some(Ok(frame)) => discarded += frame.data_ref().map_or(0, Bytes::len),
                        Some(Err(_)) | None => return,
                    },
                    () = tokio::time::sleep_until(receiver.deadline(started, discarded as u64).into()) => return,
                }
            }
        });
    }

    /// The deadline of a body of which `received` bytes have arrived.
    fn deadline(&self, started: Instant, received: u64) -> Instant {
        let BodyLimits { timeout, min_rate, .. } = self.bodies.limits;
        let extra = Duration::from_millis(received.saturating_mul(1000) / u64::from(min_rate.max(1)));
        self.deadline.min(started + timeout + extra)
    }
}

/// A response that ends the connection, because the rest of the body is not read.
fn refused(message: String) -> Problem {
    Problem::new(Slug::Timeout, message)
        .with_status(StatusCode::REQUEST_TIMEOUT)
        .with_header(header::CONNECTION, HeaderValue::from_static("close"))
}

/// The refusal of a large body that is not read.
fn too_many() -> Problem {
    refusals::report(Refusal::BodyLimit);
    let message = "the server receives too many large bodies at once; send the request again after a moment";
    Problem::new(Slug::Unavailable, message)
        .with_header(header::RETRY_AFTER, HeaderValue::from_static("1"))
        .with_header(header::CONNECTION, HeaderValue::from_static("close"))
}

/// The client that sent a request, as far as it is known.
fn client_of(request: &Request) -> Option<ClientKey> {
    let extensions = request.extensions();
    match extensions.get::<Arc<Connection>>() {
        Some(connection) => Some(connection.client()),
        None => extensions
            .get::<ConnectInfo<std::net::SocketAddr>>()
            .map(|ConnectInfo(address)| ClientKey::of(address.ip())),
    }
}

/// The next piece of a body; `None` at its end.
async fn next(body: &mut Body) -> ApiResult<Option<Bytes>> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Problem::bad_request("the body ended early; send the whole body"))?;
        if let Ok(data) = frame.into_data() {
            return Ok(Some(data));
        }
    }
    Ok(None)
}

fn too_large(limit: usize) -> Problem {
    Problem::new(
        Slug::TooLarge,
        format!(
            "the body is larger than {limit} bytes; store the data elsewhere and enqueue a reference, \
             or split it over several requests"
        ),
    )
}

/// Polls a future once. Returns its result if it is ready.
async fn poll_once<F: Future>(mut future: Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|cx| {
        Poll::Ready(match future.as_mut().poll(cx) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        })
    })
    .await
}
