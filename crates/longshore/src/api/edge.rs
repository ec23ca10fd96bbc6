//! What every request meets before its handler: an id, the host check, the
//! clock; and what is told of routes that do not exist.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderValue, Method, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use tracing::Instrument;
use uuid::Uuid;

use super::problem::{Problem, Slug};

const REQUEST_ID: header::HeaderName = header::HeaderName::from_static("x-request-id");
const LONGEST_REQUEST_ID: usize = 128;

/// Gives the request an id, or keeps the one it came with, and returns it.
/// Everything logged on the way carries it.
pub(super) async fn request_id(request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request.headers().get(&REQUEST_ID).filter(|id| is_usable(id)).cloned();
    let id = id.unwrap_or_else(|| made_id(Uuid::now_v7()));
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
    let path = path.unwrap_or_else(|| "unknown".into());
    let span = tracing::info_span!(
        "request",
        request_id = id.to_str().unwrap_or_default(),
        %method,
        path = request.uri().path()
    );
    let mut response = next.run(request).instrument(span.clone()).await;
    response.headers_mut().insert(REQUEST_ID, id);
    let status = response.status();
    span.in_scope(|| tracing::debug!(status = status.as_u16(), took = ?began.elapsed(), "answered"));
    let labels =
        [("method", known(&method).to_owned()), ("path", path), ("status", status.as_u16().to_string())];
    metrics::counter!("http_requests_total", &labels).increment(1);
    metrics::histogram!("http_request_duration_seconds", &labels).record(began.elapsed().as_secs_f64());
    response
}

/// Anybody can make up methods; each would be a series of its own.
fn known(method: &Method) -> &str {
    const KNOWN: [Method; 7] = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::OPTIONS,
    ];
    if KNOWN.contains(method) { method.as_str() } else { "other" }
}

fn is_usable(id: &HeaderValue) -> bool {
    (1..=LONGEST_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

fn made_id(id: Uuid) -> HeaderValue {
    // A UUID is ASCII.
    HeaderValue::from_str(&id.to_string()).unwrap_or_else(|_| HeaderValue::from_static("none"))
}

/// Refuses requests that were meant for another host.
pub(super) async fn check_host(
    State(hosts): State<Option<Arc<[String]>>>,
    request: Request,
    next: Next,
) -> Response {
    let Some(hosts) = hosts else { return next.run(request).await };
    let named = request.uri().host().map(str::to_owned).or_else(|| {
        let host = request.headers().get(header::HOST)?.to_str().ok()?;
        Some(without_port(host).to_owned())
    });
    let known = named.is_some_and(|named| hosts.iter().any(|host| host.eq_ignore_ascii_case(&named)));
    if known {
        return next.run(request).await;
    }
    Problem::new(
        Slug::Misdirected,
        "host: this server does not answer to that name; use the address that it printed when it started, \
         or add the name to its list of hosts",
    )
    .into_response()
}

/// Refuses changes that a page of another site asks for: a browser says whose
/// page it is.
pub(super) async fn check_origin(request: Request, next: Next) -> Response {
    let is_safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let headers = request.headers();
    let of = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let foreign = of(header::ORIGIN).is_some_and(|origin| {
        let site = origin.split_once("://").map(|(_, site)| site);
        site.is_none() || site != of(header::HOST)
    });
    if is_safe || !foreign {
        return next.run(request).await;
    }
    Problem::new(Slug::Forbidden, "origin: a page of another site may not change anything here")
        .into_response()
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

/// Answers 504 when a request takes too long. What it had begun in the database
/// is finished there.
pub(super) async fn time_out(State(most): State<Duration>, request: Request, next: Next) -> Response {
    match tokio::time::timeout(most, next.run(request)).await {
        Ok(response) => response,
        Err(_) => Problem::new(
            Slug::Timeout,
            format!(
                "this took longer than {most:?}; it may have been carried out, so look before you repeat it"
            ),
        )
        .into_response(),
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
