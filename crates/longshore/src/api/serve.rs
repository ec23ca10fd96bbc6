//! Serves a router over TCP. Limits connections, so that slow or many clients cannot
//! exhaust the server, and shuts down gracefully.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{Request, Response};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use hyper_util::server::graceful::GracefulShutdown;
use tokio::net::TcpListener;
use tower::Service;

use super::connections::{Connection, Connections, Handling, ResponseBody};
use super::refusals::{self, Refusal};
use super::timed_stream::{TimedOut, TimedStream, Timeouts};
use crate::BoxFuture;
use crate::network::Network;

/// Limits on connections.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum number of open connections; 1,024 by default. For a further one, the
    /// server closes a connection that waits for its client: of the client address with the
    /// most such connections, the one that has waited the longest. While all connections
    /// handle requests, further ones wait.
    ///
    /// One address may have three quarters of them. Further connections of this address are closed at once
    /// while all of its connections handle requests.
    pub connections: usize,
    /// The addresses of proxies. All clients of a proxy have its address, so it may have all connections.
    pub trusted_proxies: Vec<Network>,
    /// How long a client may take to send the headers of a request, from their first byte; 10 s by default.
    pub headers: Duration,
    /// How long a connection may wait for the next request; 75 s by default, which is longer than clients and proxies
    /// usually keep theirs.
    pub idle: Duration,
    /// How long a client may stop reading a response; 30 s by default.
    pub reading: Duration,
    /// How long open requests may continue after `stop` completes; 5 s by
    /// default.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            connections: 1024,
            trusted_proxies: Vec::new(),
            headers: Duration::from_secs(10),
            idle: Duration::from_secs(75),
            reading: Duration::from_secs(30),
            grace: Duration::from_secs(5),
        }
    }
}

/// The pause after a failed `accept`, for example when file descriptors run out.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// Serves until `stop` completes, then waits for open requests to complete.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: impl Future<Output = ()> + Send,
) {
    accept(listener, router, limits, Box::pin(stop)).await;
}

/// Returns a boxed future, so that it is compiled here and not in the crate that calls
/// [`serve`].
#[inline(never)]
fn accept<'a>(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    stop: BoxFuture<'a, ()>,
) -> BoxFuture<'a, ()> {
    Box::pin(accept_until(listener, router, limits, stop))
}

async fn accept_until(listener: TcpListener, router: Router, limits: Limits, mut stop: BoxFuture<'_, ()>) {
    let connections = Connections::new(&limits);
    let open = GracefulShutdown::new();
    let mut http = hyper::server::conn::http1::Builder::new();
    // The stream has the timeouts.
    http.header_read_timeout(None).max_buf_size(64 * 1024);
    let timeouts = Timeouts { idle: limits.idle, headers: limits.headers, reading: limits.reading };
    loop {
        let accepted = async {
            let (stream, address) = listener.accept().await?;
            Ok::<_, std::io::Error>((stream, address, connections.slot(address.ip()).await))
        };
        let (stream, address, slot) = tokio::select! {
            accepted = accepted => match accepted {
                Ok((stream, address, Some(slot))) => (stream, address, slot),
                Ok((_, _, None)) => continue,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; trying again");
                    // Usually there are no more file descriptors.
                    connections.close_waiting(None);
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                    continue;
                }
            },
            () = &mut stop => break,
        };
        // Responses are written in one piece, so waiting to fill a packet would only
        // delay them.
        let _ = stream.set_nodelay(true);
        let opened = connections.add(address.ip(), slot);
        let connection = opened.connection().clone();
        let stream = TokioIo::new(TimedStream::new(stream, timeouts, connection.clone()));
        let service = service(router.clone(), connection.clone());
        let served = open.watch(http.serve_connection(stream, service));
        tokio::spawn(async move {
            tokio::select! {
                ended = served => if let Err(error) = ended {
                    report_error(&error);
                },
                () = opened.closed() => {}
            }
        });
    }
    drop(listener);
    if tokio::time::timeout(limits.grace, open.shutdown()).await.is_err() {
        tracing::warn!("stopped before all open requests were complete");
    }
}

/// The router as a service of one connection.
fn service(
    router: Router,
    connection: Arc<Connection>,
) -> impl hyper::service::Service<
    Request<Incoming>,
    Response = Response<ResponseBody>,
    Error = Infallible,
    Future: Send + 'static,
> {
    hyper::service::service_fn(move |mut request: Request<Incoming>| {
        let handling = Handling::begin(connection.clone());
        request.extensions_mut().insert(connection.clone());
        // A router is always ready.
        let response = router.clone().call(request);
        async move { Ok(response.await?.map(|body| ResponseBody { body, _handling: handling })) }
    })
}

fn report_error(error: &hyper::Error) {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    let timed_out = source.and_then(|source| source.get_ref()?.downcast_ref::<TimedOut>());
    match timed_out {
        Some(TimedOut::Reading) => refusals::report(Refusal::NotReading),
        Some(TimedOut::Headers) => refusals::report(Refusal::HeaderTimeout),
        // An idle client is not at fault.
        Some(TimedOut::Idle) | None => {}
    }
    tracing::debug!(%error, "a connection ended early");
}
