//! Exports traces to an OpenTelemetry collector: OTLP over HTTP, encoded as JSON.
//!
//! Off unless `--otlp-endpoint` (`OTEL_EXPORTER_OTLP_ENDPOINT`) is set. The library's spans become
//! OpenTelemetry spans, and a task sends the ended ones in batches. Spans are dropped, not waited
//! for, while the collector is slow or away. `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`,
//! `OTEL_TRACES_SAMPLER`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`,
//! `OTEL_TRACES_EXPORTER=none` and `OTEL_SDK_DISABLED=true` have their standard meanings.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry::trace::{SpanId, SpanKind, Status, TraceContextExt, TracerProvider};
use opentelemetry::{Array, Context, KeyValue, Value};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, Span, SpanData, SpanProcessor};
use serde_json::{Value as Json, json};
use tokio::sync::{mpsc, oneshot};
use tracing::level_filters::LevelFilter;
use tracing::{Level, Subscriber};
use tracing_opentelemetry::OpenTelemetrySpanExt;
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use url::Url;

use crate::args::{ApiCommand, Cli, Command};
use crate::failure::{Code, Failure};
use longshore::builtin;

/// The maximum number of ended spans that wait to be sent; more are dropped.
const MAX_WAITING: usize = 8192;
/// The maximum number of spans per request.
const MAX_BATCH: usize = 512;
/// How long ended spans wait for others.
const INTERVAL: Duration = Duration::from_secs(1);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the end of a command may be delayed by its last spans.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// The minimum time between two warnings about the collector.
const WARNING_INTERVAL: Duration = Duration::from_secs(60);
/// Requests of monitoring systems, which would be most of the traces.
const NOT_TRACED: [&str; 2] = ["/health", "/metrics"];

/// An exporter of traces.
pub(crate) struct Traces {
    provider: SdkTracerProvider,
    messages: mpsc::Sender<Message>,
}

enum Message {
    Ended(Box<SpanData>),
    /// Send everything now, then reply.
    Flush(oneshot::Sender<()>),
}

impl Traces {
    /// Starts an exporter, if one is configured and the command has spans.
    pub(crate) fn start(cli: &Cli) -> Result<Option<Self>, Failure> {
        let has_spans = matches!(
            cli.command,
            Command::Dev(_)
                | Command::Serve(_)
                | Command::Worker(_)
                | Command::Api(ApiCommand::Enqueue(_) | ApiCommand::EnqueueMany(_))
        );
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let is_off = variable("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || variable("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
        if !has_spans || is_off {
            return Ok(None);
        }
        let url = match (variable("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"), &cli.otlp_endpoint) {
            (Some(url), _) => checked("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", &url)?,
            (None, Some(base)) if !base.is_empty() => {
                let base = base.trim_end_matches('/');
                checked("--otlp-endpoint (OTEL_EXPORTER_OTLP_ENDPOINT)", &format!("{base}/v1/traces"))?
            }
            _ => return Ok(None),
        };
        let headers = headers(&variable("OTEL_EXPORTER_OTLP_HEADERS").unwrap_or_default())?;
        let dropped = Arc::new(AtomicU64::new(0));
        let (sender, messages) = mpsc::channel(MAX_WAITING);
        let exporter = Exporter::new(url, headers, dropped.clone())?;
        tokio::spawn(exporter.run(messages));
        let queue = Queue { messages: sender.clone(), dropped };
        let provider = SdkTracerProvider::builder().with_span_processor(queue).build();
        Ok(Some(Traces { provider, messages: sender }))
    }

    /// The layer that turns this program's spans into OpenTelemetry spans.
    pub(crate) fn layer<S>(&self) -> impl Layer<S> + Send + Sync + use<S>
    where
        S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
    {
        let ours = filter_fn(|item| {
            // Spans of other crates include those of the exporter's own requests.
            item.target().starts_with("longshore") && (item.is_span() || *item.level() <= Level::INFO)
        });
        tracing_opentelemetry::layer()
            .with_tracer(self.provider.tracer("longshore"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(ours.with_max_level_hint(LevelFilter::DEBUG))
    }

    /// Makes this the only subscriber, for commands that log nothing.
    pub(crate) fn install(&self) {
        tracing_subscriber::registry().with(self.layer()).init();
    }

    /// Sends the spans that have ended, before the program ends.
    pub(crate) async fn flush(self) {
        let (sent, all_sent) = oneshot::channel();
        let flush = async {
            if self.messages.send(Message::Flush(sent)).await.is_ok() {
                let _ = all_sent.await;
            }
        };
        let _ = tokio::time::timeout(FLUSH_TIMEOUT, flush).await;
    }
}

/// The W3C `traceparent` of the current span, if it is traced.
pub(crate) fn traceparent() -> Option<String> {
    let context = tracing::Span::current().context();
    let span = context.span().span_context().clone();
    let (trace, id, flags) = (span.trace_id(), span.span_id(), span.trace_flags().to_u8());
    span.is_valid().then(|| format!("00-{trace:032x}-{id:016x}-{flags:02x}"))
}

/// The message does not quote the text, which may contain a password.
fn checked(name: &str, text: &str) -> Result<Url, Failure> {
    let url = Url::parse(text).ok().filter(|url| ["http", "https"].contains(&url.scheme()) && url.has_host());
    url.ok_or_else(|| {
        Failure::usage(format_args!(
            "{name}: not the URL of an OpenTelemetry collector; write one like http://127.0.0.1:4318"
        ))
    })
}

/// Parses `name=value,name=value`, with percent-encoded values.
fn headers(text: &str) -> Result<HeaderMap, Failure> {
    let invalid = || {
        Failure::usage(
            "OTEL_EXPORTER_OTLP_HEADERS: not a list of headers; write it like api-key=secret,tenant=a",
        )
    };
    let mut headers = HeaderMap::new();
    for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or_else(invalid)?;
        // Unlike in a form, a plus sign is a plus sign.
        let encoded = format!("v={}", value.trim().replace('+', "%2B"));
        let decoded = url::form_urlencoded::parse(encoded.as_bytes()).next();
        let value = decoded.map(|(_, value)| value.into_owned()).unwrap_or_default();
        let name = HeaderName::try_from(name.trim()).map_err(|_| invalid())?;
        let mut value = HeaderValue::try_from(value).map_err(|_| invalid())?;
        value.set_sensitive(true);
        headers.insert(name, value);
    }
    Ok(headers)
}

/// Passes ended spans to the exporter.
#[derive(Debug)]
struct Queue {
    messages: mpsc::Sender<Message>,
    dropped: Arc<AtomicU64>,
}

impl SpanProcessor for Queue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        if !span.span_context.is_sampled() || is_monitoring(&span) {
            return;
        }
        if self.messages.try_send(Message::Ended(Box::new(span))).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

fn is_monitoring(span: &SpanData) -> bool {
    span.name == "request" && attribute(span, "path").is_some_and(|path| NOT_TRACED.contains(&&*path))
}

fn attribute(span: &SpanData, name: &str) -> Option<String> {
    let found = span.attributes.iter().find(|attribute| attribute.key.as_str() == name)?;
    Some(found.value.as_str().into_owned())
}

/// Sends spans to the collector.
struct Exporter {
    http: reqwest::Client,
    url: Url,
    resource: Json,
    dropped: Arc<AtomicU64>,
    warned_at: Option<tokio::time::Instant>,
}

impl Exporter {
    fn new(url: Url, headers: HeaderMap, dropped: Arc<AtomicU64>) -> Result<Self, Failure> {
        let mut http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .timeout(REQUEST_TIMEOUT)
            .user_agent(concat!("longshore/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .tls_backend_preconfigured(builtin::tls()?);
        if url.host_str().is_some_and(|host| ["localhost", "127.0.0.1", "[::1]"].contains(&host)) {
            // A proxy cannot reach this machine's loopback address.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| {
            Failure::new(Code::Problem, format_args!("cannot create the HTTP client: {error}"))
        })?;
        Ok(Exporter { http, url, resource: resource(), dropped, warned_at: None })
    }

    async fn run(mut self, mut messages: mpsc::Receiver<Message>) {
        while let Some(first) = messages.recv().await {
            let (mut batch, mut flushed) = (Vec::new(), None);
            let mut take = |message| match message {
                Message::Ended(span) => batch.push(span),
                Message::Flush(reply) => flushed = Some(reply),
            };
            take(first);
            let until = tokio::time::Instant::now() + INTERVAL;
            let mut taken = 1;
            while taken < MAX_BATCH
                && let Ok(Some(message)) = tokio::time::timeout_at(until, messages.recv()).await
            {
                taken += 1;
                let is_flush = matches!(message, Message::Flush(_));
                take(message);
                if is_flush {
                    break;
                }
            }
            if !batch.is_empty() {
                self.send(&batch).await;
            }
            if let Some(reply) = flushed {
                let _ = reply.send(());
            }
        }
    }

    async fn send(&mut self, batch: &[Box<SpanData>]) {
        let spans: Vec<Json> = batch.iter().map(|span| encode(span)).collect();
        let scope = json!({ "name": "longshore", "version": env!("CARGO_PKG_VERSION") });
        let body = json!({ "resourceSpans": [{
            "resource": self.resource,
            "scopeSpans": [{ "scope": scope, "spans": spans }],
        }] });
        let request = self
            .http
            .post(self.url.clone())
            .header("content-type", "application/json")
            .body(body.to_string());
        let problem = match request.send().await {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("it returned status {}", response.status().as_u16())),
            Err(error) => Some(error.without_url().to_string()),
        };
        let mut lost = self.dropped.swap(0, Ordering::Relaxed);
        lost += if problem.is_some() { batch.len() as u64 } else { 0 };
        if lost > 0 {
            self.warn(lost, problem.as_deref().unwrap_or("it is too slow"));
        }
    }

    fn warn(&mut self, spans: u64, problem: &str) {
        if self.warned_at.is_some_and(|at| at.elapsed() < WARNING_INTERVAL) {
            return;
        }
        self.warned_at = Some(tokio::time::Instant::now());
        let host = self.url.host_str().unwrap_or_default();
        tracing::warn!(
            spans,
            "could not export traces to the collector at {host}: {problem}; \
             is --otlp-endpoint (OTEL_EXPORTER_OTLP_ENDPOINT) correct?"
        );
    }
}

/// What describes this process.
fn resource() -> Json {
    let detected = Resource::builder().build();
    let mut attributes: Vec<Json> = detected
        .iter()
        .filter(|(key, value)| {
            key.as_str() != "service.name" || !value.as_str().starts_with("unknown_service")
        })
        .map(|(key, value)| json!({ "key": key.as_str(), "value": encode_value(value) }))
        .collect();
    let mut add = |key: &str, value: String| {
        if !attributes.iter().any(|attribute| attribute["key"] == key) {
            attributes.push(json!({ "key": key, "value": { "stringValue": value } }));
        }
    };
    add("service.name", "longshore".into());
    add("service.version", env!("CARGO_PKG_VERSION").into());
    add("process.pid", std::process::id().to_string());
    json!({ "attributes": attributes })
}

/// A span in the JSON encoding of OTLP.
fn encode(span: &SpanData) -> Json {
    let context = &span.span_context;
    let mut encoded = json!({
        "traceId": format!("{:032x}", context.trace_id()),
        "spanId": format!("{:016x}", context.span_id()),
        "name": name(span),
        "kind": kind(span),
        "startTimeUnixNano": nanoseconds(span.start_time),
        "endTimeUnixNano": nanoseconds(span.end_time),
        "attributes": encode_attributes(&span.attributes),
        "events": span.events.iter().map(|event| json!({
            "timeUnixNano": nanoseconds(event.timestamp),
            "name": event.name,
            "attributes": encode_attributes(&event.attributes),
        })).collect::<Vec<_>>(),
    });
    if span.parent_span_id != SpanId::INVALID {
        encoded["parentSpanId"] = format!("{:016x}", span.parent_span_id).into();
    }
    encoded["status"] = match &span.status {
        Status::Unset => json!({}),
        Status::Ok => json!({ "code": 1 }),
        Status::Error { description } => json!({ "code": 2, "message": description }),
    };
    encoded
}

/// The name of a request is its method and the first part of its path, without ids.
fn name(span: &SpanData) -> String {
    match (span.name.as_ref(), attribute(span, "method"), attribute(span, "path")) {
        ("request", Some(method), Some(path)) => {
            let first = path.split('/').find(|part| !part.is_empty()).unwrap_or_default();
            format!("{method} /{first}")
        }
        ("job", ..) => format!("job {}", attribute(span, "kind").unwrap_or_default()),
        (name, ..) => name.to_owned(),
    }
}

/// The number of the span's kind in OTLP.
fn kind(span: &SpanData) -> u8 {
    match (span.name.as_ref(), &span.span_kind) {
        ("request", _) | (_, SpanKind::Server) => 2,
        (_, SpanKind::Client) => 3,
        ("enqueue", _) | (_, SpanKind::Producer) => 4,
        ("job", _) | (_, SpanKind::Consumer) => 5,
        (_, SpanKind::Internal) => 1,
    }
}

fn nanoseconds(time: SystemTime) -> String {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
}

fn encode_attributes(attributes: &[KeyValue]) -> Vec<Json> {
    let encode = |attribute: &KeyValue| json!({ "key": attribute.key.as_str(), "value": encode_value(&attribute.value) });
    attributes.iter().map(encode).collect()
}

fn encode_value(value: &Value) -> Json {
    match value {
        Value::Bool(value) => json!({ "boolValue": value }),
        // 64-bit integers are strings in the JSON encoding of Protocol Buffers.
        Value::I64(value) => json!({ "intValue": value.to_string() }),
        Value::F64(value) => json!({ "doubleValue": value }),
        Value::Array(Array::Bool(values)) => encode_array(values.iter().map(|value| Value::Bool(*value))),
        Value::Array(Array::I64(values)) => encode_array(values.iter().map(|value| Value::I64(*value))),
        Value::Array(Array::F64(values)) => encode_array(values.iter().map(|value| Value::F64(*value))),
        Value::Array(Array::String(values)) => {
            encode_array(values.iter().map(|value| Value::String(value.clone())))
        }
        other => json!({ "stringValue": other.as_str() }),
    }
}

fn encode_array(values: impl Iterator<Item = Value>) -> Json {
    let values: Vec<Json> = values.map(|value| encode_value(&value)).collect();
    json!({ "arrayValue": { "values": values } })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_decoded_and_never_shown() {
        let headers = headers("api-key=s3%20cret+x, tenant=a").unwrap();
        assert_eq!(headers["api-key"].to_str().unwrap(), "s3 cret+x");
        assert_eq!(headers["tenant"], "a");
        assert!(!format!("{headers:?}").contains("cret"));
        assert!(super::headers("nonsense").unwrap_err().to_string().contains("api-key=secret"));
    }

    #[test]
    fn only_web_urls_are_accepted_and_never_quoted() {
        assert!(checked("x", "http://127.0.0.1:4318/v1/traces").is_ok());
        for text in ["127.0.0.1:4318", "grpc://s3cret@host", ""] {
            let error = checked("--otlp-endpoint", text).unwrap_err().to_string();
            assert!(error.contains("http://127.0.0.1:4318") && !error.contains("s3cret"), "{error}");
        }
    }

    #[test]
    fn values_have_their_otlp_encoding() {
        assert_eq!(encode_value(&Value::I64(-7)), json!({ "intValue": "-7" }));
        assert_eq!(encode_value(&"a".into()), json!({ "stringValue": "a" }));
        let array = Value::Array(Array::Bool(vec![true]));
        assert_eq!(encode_value(&array), json!({ "arrayValue": { "values": [{ "boolValue": true }] } }));
    }

    #[test]
    fn a_resource_has_a_name_and_a_version() {
        let resource = resource();
        let keys: Vec<&str> =
            resource["attributes"].as_array().unwrap().iter().map(|a| a["key"].as_str().unwrap()).collect();
        for key in ["service.name", "service.version", "telemetry.sdk.language"] {
            assert_eq!(keys.iter().filter(|found| **found == key).count(), 1, "{keys:?}");
        }
    }
}
