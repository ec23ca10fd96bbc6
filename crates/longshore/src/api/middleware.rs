//! What every request meets before its handler: an id, the host check, the
//! clock; and what is told of routes that do not exist.

use std::convert::Infallible;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::task;
use std::time::{Duration, Instant};

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use tower::{Layer, Service};
use tracing::Instrument;

use super::problem::{ApiResult, Cause, Problem, Slug};
use super::request_metrics::RequestMetrics;

const REQUEST_ID: header::HeaderName = header::HeaderName::from_static("x-request-id");
const LONGEST_REQUEST_ID: usize = 128;

/// What is asked of every request, whatever it is for.
///
/// One layer for all of it, and by hand: a layer that is a function copies what is
/// below it for every request, which costs more than what is asked here.
#[derive(Clone, Debug)]
pub(super) struct RequestLayer(Arc<Rules>);

#[derive(Debug)]
struct Rules {
    /// The names that the server answers to; `None` means any.
    hosts: Option<Vec<String>>,
    /// How long a request may take.
    timeout: Duration,
    counts: RequestMetrics,
}

impl RequestLayer {
    pub(super) fn new(hosts: Option<Vec<String>>, timeout: Duration) -> Self {
        RequestLayer(Arc::new(Rules { hosts, timeout, counts: RequestMetrics::default() }))
    }
}

impl<S> Layer<S> for RequestLayer {
    type Service = RequestService<S>;

    fn layer(&self, inner: S) -> RequestService<S> {
        RequestService { rules: self.0.clone(), inner }
    }
}

/// A service behind the [`RequestLayer`].
#[derive(Clone, Debug)]
pub(super) struct RequestService<S> {
    rules: Arc<Rules>,
    inner: S,
}

impl<S> Service<Request> for RequestService<S>
where
    S: Service<Request, Response = Response, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let arrival = Arrival::of(&request);
        let answer = self.rules.check(&request).map(|()| self.inner.call(request));
        let rules = self.rules.clone();
        Box::pin(async move { Ok(arrival.answered(&rules, answer).await) })
    }
}

/// A request, as it is told and counted.
struct Arrival {
    at: Instant,
    id: HeaderValue,
    method: Method,
    path: Option<MatchedPath>,
    span: tracing::Span,
}

impl Arrival {
    /// Gives the request an id, or keeps the one it came with. What goes wrong on
    /// our side is logged with it, and where debugging is on, so is everything
    /// else: a span for each request would cost a tenth of a quick one.
    fn of(request: &Request) -> Self {
        let at = Instant::now();
        let id = request.headers().get(&REQUEST_ID).filter(|id| is_usable(id)).cloned();
        let id = id.unwrap_or_else(made_id);
        let method = request.method().clone();
        let span = tracing::debug_span!(
            "request",
            request_id = id.to_str().unwrap_or_default(),
            %method,
            path = request.uri().path()
        );
        Arrival { at, id, method, path: request.extensions().get::<MatchedPath>().cloned(), span }
    }

    async fn answered(
        self,
        rules: &Rules,
        answer: ApiResult<impl Future<Output = Result<Response, Infallible>>>,
    ) -> Response {
        let mut response = match answer {
            Ok(answer) => rules.wait(answer).instrument(self.span.clone()).await,
            Err(problem) => problem.into_response(),
        };
        let (status, took) = (response.status(), self.at.elapsed());
        self.span.in_scope(|| tracing::debug!(status = status.as_u16(), ?took, "answered"));
        let path = self.path.as_ref().map_or("unknown", |path| path.as_str());
        if status.is_server_error() {
            log(&response, self.id.to_str().unwrap_or_default(), &self.method, path);
        }
        response.headers_mut().insert(REQUEST_ID, self.id);
        rules.counts.count(&self.method, path, status, took);
        response
    }
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

impl Rules {
    fn check(&self, request: &Request) -> ApiResult<()> {
        self.check_host(request).and_then(|()| check_origin(request))
    }

    /// Answers 504 when a request takes too long. What it had begun in the
    /// database is finished there.
    async fn wait(&self, answer: impl Future<Output = Result<Response, Infallible>>) -> Response {
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(Ok(response)) => response,
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
    fn check_host(&self, request: &Request) -> ApiResult<()> {
        let Some(hosts) = &self.hosts else { return Ok(()) };
        let named = request.uri().host().or_else(|| {
            let host = request.headers().get(header::HOST)?.to_str().ok()?;
            Some(without_port(host))
        });
        if named.is_some_and(|named| hosts.iter().any(|host| host.eq_ignore_ascii_case(named))) {
            Ok(())
        } else {
            Err(Problem::new(
                Slug::Misdirected,
                "host: this server does not answer to that name; use the address that it printed when it \
                 started, or add the name to its list of hosts",
            ))
        }
    }
}

/// Refuses changes that a page of another site asks for: a browser says whose
/// page it is.
fn check_origin(request: &Request) -> ApiResult<()> {
    let is_safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let headers = request.headers();
    let of = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    let foreign = of(header::ORIGIN).is_some_and(|origin| {
        let site = origin.split_once("://").map(|(_, site)| site);
        site.is_none() || site != of(header::HOST)
    });
    if is_safe || !foreign {
        Ok(())
    } else {
        Err(Problem::new(Slug::Forbidden, "origin: a page of another site may not change anything here"))
    }
}

fn is_usable(id: &HeaderValue) -> bool {
    (1..=LONGEST_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// Begins anywhere and comes back to no number for as long as a server lives, so
/// that ids of two servers are not mistaken for each other. Mixed, so that nobody
/// reads from two of them how many requests came between.
fn made_id() -> HeaderValue {
    static NEXT: LazyLock<AtomicU64> =
        LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(std::process::id())));
    // By steps that lead back, so that two numbers stay two.
    let mut id = NEXT.fetch_add(1, Ordering::Relaxed);
    for factor in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        id = (id ^ (id >> 31)).wrapping_mul(factor);
    }
    let id = format!("{:016x}", id ^ (id >> 31));
    // Hexadecimal is ASCII.
    HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("none"))
}

/// `[::1]:8080` and `localhost:8080` without the port.
fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) && !name.ends_with(':') => {
            if name.contains(':') && !name.ends_with(']') {
                host
            } else {
                name
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
