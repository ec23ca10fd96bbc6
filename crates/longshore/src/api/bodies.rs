//! Receives the bodies of requests. Limits how slowly they may arrive and how many bytes the
//! server keeps at once, so that slow or large bodies do not occupy the server. Parsing is in `extract`.
//!
//! A body that is too large is refused at once, but the server continues to read it for a
//! while. Many clients read the response only after they have sent the whole body. If the
//! server closed the connection earlier, they would report a broken connection instead.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderValue, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Body as _;
use tokio::sync::Notify;

use super::connections::{ClientKey, Connection, longest_waiting};
use super::problem::{ApiResult, Problem, Slug};
use super::refusals::{self, Refusal};

/// How many bytes of a refused body are read, in addition to those that its route accepts.
const MAX_DISCARDED: usize = 16 * 1024 * 1024;
/// A body up to this size is never refused in favour of others. If it arrives together with its headers, it is not
/// counted.
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
    /// How many bytes of bodies the server keeps at once, until they are parsed; 256 MiB by default. If
    /// there are more, a request gets the status 408: of the client address with the most
    /// bytes, the one whose body has taken the longest.
    pub in_total: usize,
}

impl Default for BodyLimits {
    fn default() -> Self {
        BodyLimits { timeout: Duration::from_secs(10), min_rate: 64 * 1024, in_total: 256 * 1024 * 1024 }
    }
}

/// The bodies that the server keeps.
#[derive(Debug)]
pub(super) struct Bodies {
    limits: BodyLimits,
    kept: Mutex<Kept>,
}

#[derive(Debug, Default)]
struct Kept {
    /// The bytes of all of them.
    bytes: usize,
    /// Those that are not complete.
    arriving: Vec<Arc<Arriving>>,
}

#[derive(Debug)]
struct Arriving {
    /// `None` if the server does not know its clients' addresses.
    client: Option<ClientKey>,
    since: Instant,
    /// How many of [`Kept::bytes`] are its own.
    bytes: AtomicUsize,
    /// Notified if the body must make room for others.
    stop: Notify,
}

impl Bodies {
    pub(super) fn new(limits: BodyLimits) -> Arc<Self> {
        Arc::new(Bodies { limits, kept: Mutex::default() })
    }

    fn begin(self: &Arc<Self>, client: Option<ClientKey>) -> Slot {
        let (bytes, stop) = (AtomicUsize::new(0), Notify::new());
        let body = Arc::new(Arriving { client, since: Instant::now(), bytes, stop });
        self.kept().arriving.push(body.clone());
        Slot { bodies: self.clone(), body }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a body among those that the server keeps.
struct Slot {
    bodies: Arc<Bodies>,
    body: Arc<Arriving>,
}

impl Slot {
    /// Counts bytes that have arrived. Stops a body if there are too many.
    fn add(&self, bytes: usize) {
        let mut kept = self.bodies.kept();
        self.body.bytes.fetch_add(bytes, Ordering::Relaxed);
        kept.bytes += bytes;
        while kept.bytes > self.bodies.limits.in_total {
            let arriving = kept.arriving.iter().enumerate();
            let weighed =
                arriving.map(|(i, body)| (body.client, body.bytes.load(Ordering::Relaxed), body.since, i));
            let weighed = weighed.filter(|(_, bytes, _, _)| *bytes > MAX_UNCOUNTED);
            let Some(excess) = longest_waiting(weighed) else { return };
            let excess = kept.arriving.swap_remove(excess);
            // The memory is freed as soon as its request is polled.
            kept.bytes -= excess.bytes.swap(0, Ordering::Relaxed);
            excess.stop.notify_one();
        }
    }

    /// Notes that the body is complete, so that it is no longer stopped.
    fn complete(&self) {
        self.bodies.kept().arriving.retain(|body| !Arc::ptr_eq(body, &self.body));
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.complete();
        let mut kept = self.bodies.kept();
        kept.bytes -= self.body.bytes.swap(0, Ordering::Relaxed);
    }
}

/// A complete body. It is counted until it is dropped.
struct Complete {
    bytes: Vec<u8>,
    _slot: Slot,
}

impl AsRef<[u8]> for Complete {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
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

    /// Receives the body of a request, up to `limit` bytes.
    pub(super) async fn receive(&self, request: Request, limit: usize) -> ApiResult<Bytes> {
        let connection = request.extensions().get::<Arc<Connection>>().cloned();
        let client = client_of(&request);
        let mut body = request.into_body();
        let mut bytes = Vec::new();
        let started = Instant::now();
        // Most bodies are one piece, which need not be copied.
        let first = poll_once(pin!(next(&mut body))).await;
        match first {
            Some(Ok(Some(only))) if body.is_end_stream() && only.len() <= limit.min(MAX_UNCOUNTED) => {
                return Ok(only);
            }
            Some(Ok(Some(first))) => bytes.extend_from_slice(&first),
            Some(Ok(None)) => return Ok(Bytes::new()),
            Some(Err(problem)) => return Err(problem),
            None => {}
        }
        let _waiting = connection.map(|connection| connection.wait_for_request());
        let slot = self.bodies.begin(client);
        slot.add(bytes.len());
        loop {
            if bytes.len() > limit {
                self.discard(body, MAX_DISCARDED);
                return Err(too_large(limit));
            }
            tokio::select! {
                biased;
                () = slot.body.stop.notified() => {
                    refusals::report(Refusal::BodyLimit);
                    return Err(refused(
                        "the server receives too many large bodies at once, and this one has taken the longest; \
                         send the request again"
                            .into(),
                    ));
                }
                data = next(&mut body) => match data? {
                    Some(data) => {
                        slot.add(data.len());
                        bytes.extend_from_slice(&data);
                    }
                    None => {
                        slot.complete();
                        return Ok(Bytes::from_owner(Complete { bytes, _slot: slot }));
                    }
                },
                () = tokio::time::sleep_until(self.deadline(started, bytes.len() as u64).into()) => {
                    refusals::report(Refusal::BodyTimeout);
                    return Err(refused(format!(
                        "the body did not arrive within {:?}; send it faster, or split it over several requests",
                        started.elapsed()
                    )));
                }
            }
        }
    }

    /// Refuses a request whose body has `declared` bytes, more than its route accepts.
    pub(super) fn refuse(&self, request: Request, declared: u64, limit: usize) -> Problem {
        // A client that sends `Expect: 100-continue` waits before it sends the body. Reading
        // would make hyper request the body.
        let waits = request.headers().contains_key(header::EXPECT);
        if !waits && declared <= (limit + MAX_DISCARDED) as u64 {
            self.discard(request.into_body(), limit + MAX_DISCARDED);
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
