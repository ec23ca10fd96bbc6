//! Receives the bodies of requests. Limits how slowly they may arrive and how many may
//! arrive at once, so that slow bodies do not occupy the server. Parsing is in `extract`.
//!
//! A body that is too large is refused at once, but the server continues to read it for a
//! while. Many clients read the response only after they have sent the whole body. If the
//! server closed the connection earlier, they would report a broken connection instead.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{ConnectInfo, Request};
use axum::http::{HeaderValue, StatusCode, header};
use http_body_util::BodyExt;
use tokio::sync::Notify;

use super::connections::{ClientKey, Connection, longest_waiting};
use super::problem::{ApiResult, Problem, Slug};
use super::refusals::{self, Refusal};

/// How many bytes of a refused body are read, in addition to those that its route accepts.
const MAX_DISCARDED: usize = 16 * 1024 * 1024;

/// Limits on the bodies of requests. A body that arrives together with its headers, as
/// those of most requests do, is not limited by them.
#[derive(Clone, Debug)]
pub struct BodyLimits {
    /// How long a body may take to arrive, in addition to the bytes received divided by
    /// `min_rate`; 10 s by default. It never takes longer than the request may.
    pub timeout: Duration,
    /// The rate in bytes per second that a body must have after `timeout`; 64 KiB by
    /// default.
    pub min_rate: u32,
    /// How many bodies may arrive at once; 512 by default. If there are more, the
    /// request whose body has taken the longest gets the status 408.
    pub in_total: usize,
    /// How many of them may come from one client address; 256 by default.
    pub per_client: usize,
}

impl Default for BodyLimits {
    fn default() -> Self {
        BodyLimits { timeout: Duration::from_secs(10), min_rate: 64 * 1024, in_total: 512, per_client: 256 }
    }
}

/// The bodies that are arriving.
#[derive(Debug)]
pub(super) struct Bodies {
    limits: BodyLimits,
    /// Oldest first.
    arriving: Mutex<Vec<Arc<Arriving>>>,
}

#[derive(Debug)]
struct Arriving {
    /// `None` if the server does not know its clients' addresses.
    client: Option<ClientKey>,
    since: Instant,
    /// Notified if the body must make room for others.
    stop: Notify,
}

impl Bodies {
    pub(super) fn new(limits: BodyLimits) -> Arc<Self> {
        Arc::new(Bodies { limits, arriving: Mutex::default() })
    }

    fn begin(self: &Arc<Self>, client: Option<ClientKey>) -> Slot {
        let body = Arc::new(Arriving { client, since: Instant::now(), stop: Notify::new() });
        let mut arriving = self.arriving();
        arriving.push(body.clone());
        let of_client = arriving.iter().filter(|other| client.is_some() && other.client == client).count();
        let excess = if of_client > self.limits.per_client.max(1) {
            arriving.iter().position(|other| other.client == client)
        } else if arriving.len() > self.limits.in_total.max(1) {
            longest_waiting(arriving.iter().enumerate().map(|(i, other)| (other.client, other.since, i)))
        } else {
            None
        };
        if let Some(excess) = excess {
            arriving.remove(excess).stop.notify_one();
        }
        drop(arriving);
        Slot { bodies: self.clone(), body }
    }

    fn arriving(&self) -> MutexGuard<'_, Vec<Arc<Arriving>>> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a body among those that are arriving.
struct Slot {
    bodies: Arc<Bodies>,
    body: Arc<Arriving>,
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.bodies.arriving().retain(|body| !Arc::ptr_eq(body, &self.body));
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
        let received = AtomicU64::new(0);
        let collected = |body: Result<Bytes, Incomplete>| {
            body.map_err(|incomplete| match incomplete {
                Incomplete::TooLarge(rest) => {
                    self.discard(rest, client, MAX_DISCARDED);
                    too_large(limit)
                }
                Incomplete::EndedEarly => Problem::bad_request("the body ended early; send the whole body"),
            })
        };
        let mut receiving = pin!(collect(request.into_body(), &received, limit));
        let started = Instant::now();
        if let Some(body) = poll_once(receiving.as_mut()).await {
            return collected(body);
        }
        let _waiting = connection.map(|connection| connection.wait_for_body());
        let slot = self.bodies.begin(client);
        loop {
            let deadline = self.deadline(started, received.load(Ordering::Relaxed));
            tokio::select! {
                biased;
                body = receiving.as_mut() => return collected(body),
                () = slot.body.stop.notified() => {
                    refusals::report(Refusal::BodyLimit);
                    return Err(refused(
                        "too many bodies arrive at once, and this one has taken the longest; send the request \
                         again".into(),
                    ));
                }
                () = tokio::time::sleep_until(deadline.into()) => {}
            }
            // Bytes that arrived meanwhile extend the deadline.
            if self.deadline(started, received.load(Ordering::Relaxed)) <= Instant::now() {
                refusals::report(Refusal::BodyTimeout);
                return Err(refused(format!(
                    "the body did not arrive within {:?}; send it faster, or split it over several requests",
                    started.elapsed()
                )));
            }
        }
    }

    /// Refuses a request whose body has `declared` bytes, more than its route accepts.
    pub(super) fn refuse(&self, request: Request, declared: u64, limit: usize) -> Problem {
        // A client that sends `Expect: 100-continue` waits before it sends the body. Reading
        // would make hyper request the body.
        let waits = request.headers().contains_key(header::EXPECT);
        if !waits && declared <= (limit + MAX_DISCARDED) as u64 {
            let client = client_of(&request);
            self.discard(request.into_body(), client, limit + MAX_DISCARDED);
        }
        too_large(limit)
    }

    /// Reads the rest of a refused body in the background, up to `max_bytes`. The limits are
    /// those of accepted bodies.
    fn discard(&self, mut body: Body, client: Option<ClientKey>, max_bytes: usize) {
        let receiver = self.clone();
        tokio::spawn(async move {
            let slot = receiver.bodies.begin(client);
            let (started, mut discarded) = (Instant::now(), 0);
            while discarded <= max_bytes {
                tokio::select! {
                    biased;
                    frame = body.frame() => match frame {
                        Some(Ok(frame)) => discarded += frame.data_ref().map_or(0, Bytes::len),
                        Some(Err(_)) | None => return,
                    },
                    () = slot.body.stop.notified() => return,
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

/// Why a body is not complete.
enum Incomplete {
    /// With the rest of the body.
    TooLarge(Body),
    EndedEarly,
}

/// Reads a body to its end. Counts the bytes in `received`.
async fn collect(mut body: Body, received: &AtomicU64, limit: usize) -> Result<Bytes, Incomplete> {
    let mut first = Bytes::new();
    let mut all: Vec<u8> = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|_| Incomplete::EndedEarly)?;
        let Ok(data) = frame.into_data() else { continue };
        if received.fetch_add(data.len() as u64, Ordering::Relaxed) + data.len() as u64 > limit as u64 {
            return Err(Incomplete::TooLarge(body));
        }
        // Most bodies are one piece, which need not be copied.
        if first.is_empty() && all.is_empty() {
            first = data;
        } else {
            all.extend_from_slice(&std::mem::take(&mut first));
            all.extend_from_slice(&data);
        }
    }
    Ok(if all.is_empty() { first } else { all.into() })
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
