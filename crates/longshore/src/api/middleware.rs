//! What every request passes before its handler: a request id, the host and origin
//! checks, the timeout, logging and metrics. Also the responses to requests whose handler
//! panics, and those for unknown routes.
//!
//! Tokens and scopes are in `auth`, because they depend on the route.

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
use hyper::body::Body as _;
use tower::{Layer, Service};
use tracing::Instrument;

use super::bodies::{Bodies, BodyLimits, BodyReceiver};
use super::problem::{ApiResult, Cause, Problem, Slug};
use super::refusals;
use super::request_metrics::RequestMetrics;
use crate::catch_panic::CatchPanic;

pub(crate) const REQUEST_ID: header::HeaderName = header::HeaderName::from_static("x-request-id");
const TRACEPARENT: header::HeaderName = header::HeaderName::from_static("traceparent");
const MAX_REQUEST_ID: usize = 128;

/// The layer around all routes.
///
/// It is one tower service instead of several `axum::middleware::from_fn` layers: each
/// of those clones the service below it for every request, which costs more than the
/// checks themselves.
#[derive(Clone, Debug)]
pub(super) struct RequestLayer(Arc<Rules>);

#[derive(Debug)]
struct Rules {
    /// The host names that requests may use; `None` means any.
    hosts: Option<Vec<String>>,
    /// How long a request may take.
    timeout: Duration,
    bodies: Arc<Bodies>,
    metrics: RequestMetrics,
}

impl RequestLayer {
    pub(super) fn new(hosts: Option<Vec<String>>, timeout: Duration, bodies: BodyLimits) -> Self {
        let (bodies, metrics) = (Bodies::new(bodies), RequestMetrics::default());
        RequestLayer(Arc::new(Rules { hosts, timeout, bodies, metrics }))
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

    fn call(&mut self, mut request: Request) -> Self::Future {
        let context = RequestContext::of(&request);
        if !request.body().is_end_stream() {
            let receiver = BodyReceiver::new(self.rules.bodies.clone(), self.rules.timeout);
            request.extensions_mut().insert(receiver);
        }
        let checked = self.rules.check(&request);
        // For what a handler says about the request.
        request.headers_mut().insert(REQUEST_ID, context.id.clone());
        let handler = checked.map(|()| self.inner.call(request));
        let rules = self.rules.clone();
        Box::pin(async move { Ok(context.respond(&rules, handler).await) })
    }
}

/// What logs and metrics need from a request.
struct RequestContext {
    received: Instant,
    id: HeaderValue,
    method: Method,
    path: Option<MatchedPath>,
    span: tracing::Span,
}

impl RequestContext {
    /// Takes the id from the request, or generates one. Server errors are logged with
    /// it. The span is at debug level, because a span for every request would cost a
    /// tenth of the time of a fast one.
    fn of(request: &Request) -> Self {
        let received = Instant::now();
        let id = request.headers().get(&REQUEST_ID).filter(|id| is_usable(id)).cloned();
        let id = id.unwrap_or_else(generate_id);
        let method = request.method().clone();
        let span = tracing::debug_span!(
            "request",
            request_id = id.to_str().unwrap_or_default(),
            %method,
            path = request.uri().path()
        );
        if !span.is_disabled()
            && let Some(parent) = request.headers().get(&TRACEPARENT).and_then(|parent| parent.to_str().ok())
        {
            crate::trace::adopt(&span, parent);
        }
        RequestContext {
            received,
            id,
            method,
            path: request.extensions().get::<MatchedPath>().cloned(),
            span,
        }
    }

    /// Runs the handler, unless a check refused the request; then logs and counts the
    /// response.
    async fn respond(
        self,
        rules: &Rules,
        handler: ApiResult<impl Future<Output = Result<Response, Infallible>>>,
    ) -> Response {
        let responded = match handler {
            Ok(handler) => {
                let handler = catch_panic(&self.id, handler);
                rules.with_timeout(handler).instrument(self.span.clone()).await
            }
            Err(problem) => Err(problem),
        };
        let mut response = responded.map(|Ok(response)| response).into_response();
        let (status, took) = (response.status(), self.received.elapsed());
        self.span.in_scope(|| tracing::debug!(status = status.as_u16(), ?took, "responded"));
        let path = self.path.as_ref().map_or("unknown", |path| path.as_str());
        if status.is_server_error() {
            log_failure(&response, self.id.to_str().unwrap_or_default(), &self.method, path);
        }
        let headers = response.headers_mut();
        headers.insert(REQUEST_ID, self.id);
        headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
        // Files of the dashboard say how long they may be kept. Everything else may be secret.
        headers.entry(header::CACHE_CONTROL).or_insert(HeaderValue::from_static("no-store"));
        rules.metrics.record(&self.method, path, status, took);
        response
    }
}

/// Logs the cause of a server error, which the response does not contain.
fn log_failure(response: &Response, request_id: &str, method: &Method, path: &str) {
    let status = response.status().as_u16();
    let cause = response.extensions().get::<Cause>();
    let is_busy = cause.is_none_or(|error| error.is_overloaded());
    if is_busy && response.status() == StatusCode::SERVICE_UNAVAILABLE {
        return refusals::report_busy(request_id, method, path, status);
    }
    match cause {
        Some(error) if response.status() == StatusCode::SERVICE_UNAVAILABLE => {
            tracing::warn!(request_id, %method, path, error = %**error, "the database could not serve a request");
        }
        Some(error) => tracing::error!(request_id, %method, path, error = ?**error, "a request failed"),
        None => tracing::warn!(request_id, %method, path, status, "a request got an error response"),
    }
}

/// Runs a handler. Without this, a panic would close the connection without a response.
pub(crate) async fn catch_panic<T>(
    request_id: &HeaderValue,
    handler: impl Future<Output = T>,
) -> ApiResult<T> {
    let done = CatchPanic::new(Box::pin(handler)).await;
    done.map_err(|panic| Problem::panicked(&*panic, request_id.to_str().unwrap_or_default()))
}

impl Rules {
    fn check(&self, request: &Request) -> ApiResult<()> {
        self.check_host(request).and_then(|()| check_origin(request))
    }

    /// Responds with 504 if a request takes too long. A database operation that it
    /// started may still complete.
    async fn with_timeout<T>(&self, handler: impl Future<Output = ApiResult<T>>) -> ApiResult<T> {
        tokio::time::timeout(self.timeout, handler).await.unwrap_or_else(|_| {
            Err(Problem::new(
                Slug::Timeout,
                format!(
                    "the request took longer than {:?}; it may have taken effect, so check before you repeat it",
                    self.timeout
                ),
            ))
        })
    }

    /// Refuses requests for another host name.
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
                "host: this server does not accept this name; use the address that it printed at startup, or \
                 add the name to its list of hosts",
            ))
        }
    }
}

/// Refuses changes requested by a page of another site. Browsers send the site of the
/// page in the `Origin` header.
fn check_origin(request: &Request) -> ApiResult<()> {
    let is_safe = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    let headers = request.headers();
    let value = |name: header::HeaderName| headers.get(name).map(|value| value.to_str().unwrap_or_default());
    // Requests over HTTP/2 name the host in the URL.
    let own = request.uri().authority().map(|authority| authority.as_str()).or_else(|| value(header::HOST));
    let is_foreign = value(header::ORIGIN).is_some_and(|origin| {
        let site = origin.split_once("://").map(|(_, site)| site);
        site.is_none() || site != own
    });
    if is_safe || !is_foreign {
        Ok(())
    } else {
        Err(Problem::new(
            Slug::Forbidden,
            "origin: pages of other sites may not make changes; call the API from its own origin",
        ))
    }
}

/// Whether a request id can be logged and returned as it is.
fn is_usable(id: &HeaderValue) -> bool {
    (1..=MAX_REQUEST_ID).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic)
}

/// Generates a request id. The counter starts at a random number, so that two servers
/// use different ids, and it does not repeat within the life of a process. The bits are
/// mixed, so that two ids do not reveal how many requests came between them.
fn generate_id() -> HeaderValue {
    static NEXT: LazyLock<AtomicU64> =
        LazyLock::new(|| AtomicU64::new(RandomState::new().hash_one(std::process::id())));
    // Every step is invertible, so different numbers give different ids.
    let mut id = NEXT.fetch_add(1, Ordering::Relaxed);
    for factor in [0xbf58_476d_1ce4_e5b9_u64, 0x94d0_49bb_1331_11eb] {
        id = (id ^ (id >> 31)).wrapping_mul(factor);
    }
    let id = format!("{:016x}", id ^ (id >> 31));
    // Cannot fail, because hexadecimal digits are ASCII.
    HeaderValue::from_str(&id).unwrap_or_else(|_| HeaderValue::from_static("none"))
}

/// The host name of `[::1]:8080` or `localhost:8080`, without the port.
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
    Problem::new(Slug::NotFound, format!("there is no route {}; see /docs", uri.path()))
}

pub(super) async fn method_not_allowed(method: Method, uri: Uri) -> Problem {
    Problem::new(Slug::MethodNotAllowed, format!("{} does not support {method}; see /docs", uri.path()))
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use tower::ServiceExt;

    use super::*;
    use crate::error::Error;

    /// Counts the lines of a log.
    #[derive(Clone, Default)]
    struct Lines(Arc<AtomicU64>);

    impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
        fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
            if *event.metadata().level() <= tracing::Level::INFO {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    async fn busy() -> Problem {
        Problem::new(Slug::Unavailable, "too many streams of this token wait already; try again later")
    }

    async fn overloaded() -> Problem {
        Error::overloaded("too many calls wait for the database; try again later").into()
    }

    #[tokio::test]
    async fn requests_that_are_refused_again_and_again_write_one_line() {
        use tracing_subscriber::layer::SubscriberExt;
        let lines = Lines::default();
        let log = tracing_subscriber::registry().with(lines.clone());
        let _log = tracing::subscriber::set_default(log);
        let rules = RequestLayer::new(None, Duration::from_secs(60), BodyLimits::default());
        let router = Router::new().route("/events", get(busy)).route("/jobs", get(overloaded)).layer(rules);
        for path in ["/events", "/jobs"].into_iter().cycle().take(1000) {
            let request = Request::get(path).body(Body::empty()).unwrap();
            assert_eq!(router.clone().oneshot(request).await.unwrap().status(), 503);
        }
        let lines = lines.0.load(Ordering::Relaxed);
        assert!((1..=10).contains(&lines), "{lines} lines");
    }

    async fn panicking() {
        panic!("the crane fell over");
    }

    #[tokio::test]
    async fn a_panic_is_answered_with_the_request_id_and_without_its_message() {
        let rules = RequestLayer::new(None, Duration::from_secs(60), BodyLimits::default());
        // Panics before there is a future, as a layer or a service may.
        let service = tower::service_fn(|_: Request| -> std::future::Ready<Result<Response, Infallible>> {
            panic!("the crane fell over")
        });
        let router = Router::new().route("/crane", get(panicking)).route_service("/service", service);
        let router = router.layer(rules);
        for path in ["/crane", "/service"] {
            let request = Request::get(path).header(REQUEST_ID, "req-7").body(Body::empty()).unwrap();
            let response = router.clone().oneshot(request).await.unwrap();
            assert_eq!(
                (response.status().as_u16(), &response.headers()[REQUEST_ID]),
                (500, &"req-7".parse().unwrap())
            );
            let cause = response.extensions().get::<Cause>().unwrap().to_string();
            assert!(cause.contains("the crane fell over"), "{cause}");
            let body = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
            let body: serde_json::Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(body["error"], "internal");
            let message = body["message"].as_str().unwrap();
            assert!(message.contains("req-7") && !message.contains("crane"), "{message}");
        }
        // An id that cannot be used is replaced.
        let request = Request::get("/crane").header(REQUEST_ID, "a b").body(Body::empty()).unwrap();
        let response = router.oneshot(request).await.unwrap();
        let id = response.headers()[REQUEST_ID].to_str().unwrap().to_owned();
        let body = axum::body::to_bytes(response.into_body(), 10_000).await.unwrap();
        assert!(String::from_utf8_lossy(&body).contains(&format!("request id {id}")), "{body:?}");
    }

    #[test]
    fn port_is_not_part_of_the_host_name() {
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
    fn unprintable_and_overlong_request_ids_are_replaced() {
        assert!(is_usable(&HeaderValue::from_static("req-1")));
        assert!(!is_usable(&HeaderValue::from_static("")));
        assert!(!is_usable(&HeaderValue::from_static("a b")));
        assert!(!is_usable(&HeaderValue::from_str(&"x".repeat(129)).unwrap()));
    }
}
