//! Runs a router: connections with limits, so that slow or many clients cannot
//! take the server, and an end in good order.

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

/// What connections may take.
#[derive(Clone, Debug)]
pub struct Limits {
    /// How many at once; further ones wait to be accepted. 1,024 by default.
    pub connections: usize,
    /// How long a client may take to send a request's headers, the time between
    /// two requests included; 10 s by default.
    pub headers: Duration,
    /// How long a client may take nothing of an answer; 30 s by default.
    pub reading: Duration,
    /// How long open requests may go on after the end was asked for; 5 s by
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

/// After an `accept` that failed, say for want of file descriptors.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// Serves until `stop` completes, then lets open requests end.
pub async fn serve(listener: TcpListener, router: Router, limits: Limits, stop: impl Future<Output = ()>) {
    let slots = Arc::new(Semaphore::new(limits.connections.max(1)));
    let open = GracefulShutdown::new();
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(limits.headers).max_buf_size(64 * 1024);
    tokio::pin!(stop);
    loop {
        let accepted = async {
            // Never closed.
            let slot = slots.clone().acquire_owned().await.ok();
            (slot, listener.accept().await)
        };
        let (slot, stream) = tokio::select! {
            (slot, accepted) = accepted => match accepted {
                Ok((stream, _)) => (slot, stream),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; trying again");
                    tokio::time::sleep(AFTER_ERROR).await;
                    continue;
                }
            },
            () = &mut stop => break,
        };
        // Answers are small and complete; waiting to fill a packet only delays
        // them.
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
        tracing::warn!("stopped before every request was answered");
    }
}
