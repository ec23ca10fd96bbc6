//! Serves a router over TCP. Limits connections, so that slow or many clients cannot
//! exhaust the server, and shuts down gracefully.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use super::write_timeout::WriteTimeout;

/// Limits on connections.
#[derive(Clone, Debug)]
pub struct Limits {
    /// The maximum number of open connections; further ones wait to be accepted. 1,024 by default.
    pub connections: usize,
    /// How long a client may take to send the headers of a request, including the time
    /// between two requests; 10 s by default.
    pub headers: Duration,
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
            headers: Duration::from_secs(10),
            reading: Duration::from_secs(30),
            grace: Duration::from_secs(5),
        }
    }
}

/// The pause after a failed `accept`, for example when file descriptors run out.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(100);

/// Serves until `stop` completes, then waits for open requests to complete.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(limits.connections.max(1)));
    let open = GracefulShutdown::new();
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.headers).max_buf_size(64 * 1024);
    tokio::pin!(stop);
    loop {
        let accepted = async {
            // Cannot fail: the semaphore is never closed.
            let slot = slots.clone().acquire_owned().await.ok();
            (slot, listener.accept().await)
        };
        let (slot, stream) = tokio::select! {
            (slot, accepted) = accepted => match accepted {
                Ok((stream, _)) => (slot, stream),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; trying again");
                    tokio::time::sleep(PAUSE_AFTER_ERROR).await;
                    continue;
                }
            },
            () = &mut stop => break,
        };
        // Responses are written in one piece, so waiting to fill a packet would only
        // delay them.
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(router.clone());
        let stream = TokioIo::new(WriteTimeout::new(stream, limits.reading));
        let connection = open.watch(http.serve_connection(stream, service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(%error, "a connection ended early");
            }
            drop(slot);
        });
    }
    drop(listener);
    if tokio::time::timeout(limits.grace, open.shutdown()).await.is_err() {
        tracing::warn!("stopped before all open requests were complete");
    }
}
