//! The HTTP servers to measure: the API as `longshore serve` runs it, and an empty handler.

use std::net::SocketAddr;
use std::sync::OnceLock;

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use axum::routing::post;
use longshore::api::{Access, Api, Limits, hash_token, serve};
use longshore::{Client, NewKind, NewToken};
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::{json, value::to_raw_value};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, fmt, registry};
use uuid::Uuid;

use crate::Result;
use crate::library::KIND;

/// A server that stops when it is dropped.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    /// The token that requests need, if any.
    pub(crate) token: Option<String>,
    task: JoinHandle<()>,
}

impl TestServer {
    /// All servers use the same serve loop, so that its cost cancels out.
    async fn start(router: Router, token: Option<String>) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(serve(listener, router, Limits::default(), std::future::pending()));
        Ok(TestServer { address, token, task })
    }

    /// A handler that only reads the body and returns a short response.
    pub(crate) async fn empty_handler() -> Result<Self> {
        let response = json!({
            "id": Uuid::now_v7(), "kind": KIND, "queue": "default", "status": "queued", "priority": 0,
            "attempts": 0, "max_attempts": 3, "idempotency_key": null, "created": true,
        });
        let handler = move |_: Bytes| async move { (StatusCode::CREATED, axum::Json(response.clone())) };
        TestServer::start(Router::new().route("/jobs", post(handler)), None).await
    }

    /// The API with the metrics and logging of `longshore serve`, and a kind whose payloads
    /// are validated against a schema.
    pub(crate) async fn api(client: &Client, access: Access) -> Result<Self> {
        let schema = json!({
            "type": "object",
            "required": ["to", "template"],
            "properties": {
                "to": { "type": "string" },
                "template": { "type": "string" },
                "n": { "type": "integer" },
            },
        });
        let kind = NewKind { schema: Some(to_raw_value(&schema)?), ..NewKind::new(KIND) };
        client.put_kinds(&[kind]).await?;
        let secret = format!("longshore_{}", Uuid::now_v7());
        let token = NewToken {
            id: Uuid::now_v7(),
            name: "bench".into(),
            hash: hash_token(&secret),
            scopes: vec!["admin".into()],
            queues: None,
            expires_at: None,
        };
        client.create_token(&token).await?;
        let metrics = install_metrics_and_logging()?;
        let router = Api::new(client.clone())
            .access(access)
            .hosts(["127.0.0.1"])
            .metrics(move || metrics.render())
            .dashboard(longshore::api::Dashboard::new())
            .router();
        TestServer::start(router, (access == Access::Tokens).then_some(secret)).await
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Installs metrics and logging once per process, as `longshore serve` does by default.
fn install_metrics_and_logging() -> Result<PrometheusHandle> {
    static METRICS: OnceLock<PrometheusHandle> = OnceLock::new();
    if let Some(metrics) = METRICS.get() {
        return Ok(metrics.clone());
    }
    let is_logged = filter_fn(|item| !(item.is_span() && item.name() == "enqueue"));
    let lines = fmt::layer().with_writer(std::io::stderr).with_target(false);
    registry().with(EnvFilter::new("info")).with(is_logged).with(lines).init();
    let metrics = PrometheusBuilder::new().set_buckets(&[0.001, 0.01, 0.1, 1.0])?.install_recorder()?;
    Ok(METRICS.get_or_init(|| metrics).clone())
}
