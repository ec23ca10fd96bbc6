//! Counts and logs the clients that the server does not wait for any longer, and logs the requests that it
//! refuses because it is busy or because there are too many kinds. The log has at most one line per reason and interval, because an attacker
//! decides how many there are.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::Method;

use crate::error::Error;

/// The minimum time between two log lines for the same reason.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Why the server closed a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// All connections were in use, and this one waited for its client the longest.
    ConnectionLimit,
    /// The address had its share of connections, and all of them handled requests.
    AddressLimit,
    /// The headers of a request took too long.
    HeaderTimeout,
    /// The body of a request took too long.
    BodyTimeout,
    /// There was no room for a large body, or it had to make room for another one.
    BodyLimit,
    /// The client did not read its response.
    NotReading,
}

impl Refusal {
    const ALL: [Refusal; 6] = [
        Refusal::ConnectionLimit,
        Refusal::AddressLimit,
        Refusal::HeaderTimeout,
        Refusal::BodyTimeout,
        Refusal::BodyLimit,
        Refusal::NotReading,
    ];

    /// The label in the metric.
    fn label(self) -> &'static str {
        match self {
            Refusal::ConnectionLimit => "connection_limit",
            Refusal::AddressLimit => "address_limit",
            Refusal::HeaderTimeout => "header_timeout",
            Refusal::BodyTimeout => "body_timeout",
            Refusal::BodyLimit => "body_limit",
            Refusal::NotReading => "not_reading",
        }
    }
}

/// Creates the counters at zero, so that rates show the first closed connection.
pub(super) fn register_counters() {
    for refusal in Refusal::ALL {
        metrics::counter!("longshore_http_connections_closed_total", "reason" => refusal.label())
            .increment(0);
    }
}

/// When a line was last logged, and how many were left out since.
type Line = Mutex<(Option<Instant>, u64)>;

/// Counts a closed connection, and logs it unless another one was logged recently.
pub(super) fn report(refusal: Refusal) {
    static LINES: [Line; Refusal::ALL.len()] = [const { Mutex::new((None, 0)) }; Refusal::ALL.len()];
    let reason = refusal.label();
    metrics::counter!("longshore_http_connections_closed_total", "reason" => reason).increment(1);
    if let Some(connections) = lines_due(&LINES[refusal as usize]) {
        tracing::warn!(reason, connections, "closed connections of slow or too many clients");
    }
}

/// Logs that a new connection waits because all others are busy.
pub(super) fn report_all_busy() {
    static LINE: Line = Mutex::new((None, 0));
    if lines_due(&LINE).is_some() {
        tracing::warn!(
            "all connections handle requests, so new ones wait; raise the maximum number of connections \
             (`Limits::connections`, `--max-connections`)"
        );
    }
}

/// Logs a request that was refused because the server is busy, unless another one was logged recently.
pub(super) fn report_busy(request_id: &str, method: &Method, path: &str, status: u16) {
    static LINE: Line = Mutex::new((None, 0));
    tracing::debug!(request_id, %method, path, status, "refused a request, because the server is busy");
    if let Some(requests) = lines_due(&LINE) {
        tracing::warn!(
            request_id,
            %method,
            path,
            status,
            requests,
            "refused requests, because the server is busy; this is the last one, and the level debug shows all"
        );
    }
}

/// Logs that the kinds of workers were not stored, unless another such line was logged recently.
pub(super) fn report_kinds(error: &Error) {
    static LINE: Line = Mutex::new((None, 0));
    if let Some(workers) = lines_due(&LINE) {
        tracing::warn!(
            %error,
            workers,
            "did not store the kinds of workers, so enqueues do not know those that are new; this is the last error"
        );
    }
}

/// Adds one, and returns how many there were since the last line if a line is due.
fn lines_due(line: &Line) -> Option<u64> {
    let mut line = line.lock().unwrap_or_else(PoisonError::into_inner);
    let (last, count) = &mut *line;
    *count += 1;
    if last.is_some_and(|last| last.elapsed() < LOG_INTERVAL) {
        return None;
    }
    *last = Some(Instant::now());
    Some(std::mem::take(count))
}
