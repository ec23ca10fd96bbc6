//! What every request meets before its handler: an id, the host check, the
//! clock; and what is told of routes that do not exist.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use metrics::Label;
use tracing::Instrument;
use uuid::Uuid;

use super::problem::{Answer, Cause, Problem, Slug};

const REQUEST_ID: header::HeaderName = header::HeaderName::from_static("x-request-id");
const LONGEST_REQUEST_ID: usize = 128;

/// What is asked of every request, whatever it is for.
#[derive(Debug)]
pub(super) struct Edge {
    /// The names that the server answers to; `None` means any.
    pub(super) hosts: Option<Vec<String>>,
    /// How long a request may take.
    pub(super) timeout: Duration,
}

/// Gives the request an id, or keeps the one it came with, and returns it. What
/// goes wrong on our side is logged with it, and where debugging is on, so is
/// everything else: a span for each request would cost a tenth of a quick one.
///
/// One layer for all that is asked here: each layer of a router copies those
/// below it for every request, which costs more than what is asked.
pub(super) async fn meet(State(edge): State<Arc<Edge>>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request.headers().get(&REQUEST_ID).filter(|id| is_usable(id)).cloned();
    let id = id.unwrap_or_else(|| made_id(Uuid::now_v7()));
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().cloned();
    let span = tracing::debug_span!(
        "request",
        request_id = id.to_str().unwrap_or_default(),
        %method,
        path = request.uri().path()
    );
    let mut response = edge.pass(request, next).instrument(span.clone()).await;
    let (status, took) = (response.status(), began.elapsed());
    span.in_scope(|| tracing::debug!(status = status.as_u16(), ?took, "answered"));
    let path = path.as_ref().map_or("unknown", |path| path.as_str());
    if status.is_server_error() {
        log(&response, id.to_str().unwrap_or_default(), &method, path);
    }
    response.headers_mut().insert(REQUEST_ID, id);
    count(known(&method), path, status, took);
    response
}

/// Tells what a stranger was not told.
fn log(response: &Response, request_id: &str, method: &Method, path: &str) {
    let status = response.status().as_u16();
    match response.extensions().get::<Cause>() {
        Some(error) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
            tracing::warn!(request_id, %method, path, error = %**error, "the database cannot serve a request");
        }
        Some(error) => tracing::error!(request_id, %method, path, error = ?**error, "a request failed"),
        None => tracing::warn!(request_id, %method, path, status, "a request was not served"),
    }
}

fn count(method: &'static str, path: &str, status: StatusCode, took: Duration) {
    let labels = [
        Label::from_static_parts("method", method),
        Label::new("path", path.to_owned()),
        Label::new("status", status.as_str().to_owned()),
    ];
    metrics::counter!("http_requests_total", labels.iter()).increment(1);
    metrics::histogram!("http_request_duration_seconds", labels.iter()).record(took.as_secs_f64());
}

impl Edge {
    /// Answers 504 when a request takes too long. What it had begun in the
    /// database is finished there.
    async fn pass(&self, request: Request, next: Next) -> Response {
        if let Err(problem) = self.check_host(&request).and_then(|()| check_origin(&request)) {
            return problem.into_response();
        }
        match tokio::time::timeout(self.timeout, next.run(request)).await {
            Ok(response) => response,
            Err(_) => Problem::new(
                Slug::Timeout,
                format!(
                    "this took longer than {:?}; it may have been carried out, so look before you repeat it",
                    self.timeout
                ),
            )
            .into_response(),
        }
    }

    /// Refuses requests that were meant for another host.
    fn check_host(&self, request: &Request) -> Answer<()> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let named = request.uri().host().or_else(|| {
            let host = request.headers().get(header::HOST)?.to_str().ok()?;
            Some(without_port(host))
        });
        match named.is_some_and(|named| hosts.iter().any(|host| host.eq_ignore_ascii_case(named))) {
            true => Ok(()),
            false => Err(Problem::new(
                Slug::Misdirected,
                "host: this server does not answer to that name; use the address that it printed when it \
                 started, or add the name to its list of hosts",
            )),
        }
    }
}

/// Refuses changes that a page of another site asks for: a browser says whose
/// page it is.
fn check_origin(request: &Request) -> Answer<()> {
    let is_safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let headers = request.headers();
    let of = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let foreign = of(header::ORIGIN).is_some_and(|origin| {
        let site = origin.split_once("://").map(|(_, site)| site);
        site.is_none() || site != of(header::HOST)
    });
    match is_safe || !foreign {
        true => Ok(()),
        false => {
            Err(Problem::new(Slug::Forbidden, "origin: a page of another site may not change anything here"))
        }
    }
}

/// Anybody can make up methods; each would be a series of its own.
fn known(method: &Method) -> &'static str {
    const KNOWN: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    KNOWN.into_iter().find(|known| method == known).unwrap_or("other")
}

fn is_usable(id: &HeaderValue) -> bool {
    (1..=LONGEST_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

fn made_id(id: Uuid) -> HeaderValue {
    // A UUID is ASCII.
    HeaderValue::from_str(&id.to_string()).unwrap_or_else(|_| HeaderValue::from_static("none"))
}

/// `[::1]:8080` and `localhost:8080` without the port.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => {
            match name.contains(':') && !name.ends_with(']') {
                true => host,
                false => name,
            }
        }
        _ => host,
    }
}

pub(super) async fn not_found(uri: Uri) -> Problem {
    Problem::new(Slug::NotFound, format!("there is nothing at {}; the API is described at /docs", uri.path()))
}

pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    Problem::new(Slug::MethodNotAllowed, format!("{method} is not for {}; see /docs", uri.path()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_not_part_of_the_name() {
        for (host, name) in [
            ("localhost", "localhost"),
            ("localhost:8080", "localhost"),
            ("[::1]:8080", "[::1]"),
            ("[::1]", "[::1]"),
            ("::1", "::1"),
            ("a:b", "a:b"),
        ] {
            assert_eq!(without_port(host), name, "{host}");
        }
    }

    #[test]
    fn an_id_that_would_garble_a_log_is_replaced() {
        assert!(is_usable(&HeaderValue::from_static("req-1")));
        assert!(!is_usable(&HeaderValue::from_static("")));
        assert!(!is_usable(&HeaderValue::from_static("a b")));
        assert!(!is_usable(&HeaderValue::from_str(&"x".repeat(129)).unwrap()));
    }
}
