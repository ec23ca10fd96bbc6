//! The health check and the metrics of the server.

use std::time::Duration;

use axum::Json;
use axum::extract::{Extension, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::Server;
use super::auth::Caller;
use super::problem::{ApiResult, Problem, ProblemBody, Slug};

/// A database that takes longer than this to reply is unhealthy.
const MAX_REPLY_TIME: Duration = Duration::from_secs(5);

/// The server is healthy.
#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    /// Always `ok`.
    #[schema(example = "ok")]
    status: &'static str,
}

/// Reports whether the server can reach its database.
#[utoipa::path(
    get,
    path = "/health",
    operation_id = "get_health",
    tag = "monitoring",
    responses(
        (status = 200, description = "The database replies.", body = Health),
        (status = 503, description = "The database does not reply.", body = ProblemBody),
    ),
)]
pub(super) async fn health(State(server): State<Server>) -> ApiResult<Json<Health>> {
    match tokio::time::timeout(MAX_REPLY_TIME, server.client.now()).await {
        Ok(Ok(_)) => Ok(Json(Health { status: "ok" })),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(Problem::new(Slug::Unavailable, "the database does not reply; try again in a moment")),
    }
}

/// Returns metrics in the Prometheus format.
///
/// They cover all queues, so the token must cover all queues too.
#[utoipa::path(
    get,
    path = "/metrics",
    operation_id = "get_metrics",
    tag = "monitoring",
    responses(
        (status = 200, description = "Metrics in the Prometheus text format.",
         body = String, content_type = "text/plain"),
        (status = 403, description = "The token does not cover all queues.", body = ProblemBody),
    ),
)]
pub(super) async fn metrics(
    State(server): State<Server>,
    // Absent if the route is public.
    caller: Option<Extension<Caller>>,
) -> ApiResult<Response> {
    if let Some(Extension(caller)) = caller {
        caller.may_use_all()?;
    }
    server.kinds.read(&server.client).await;
    let text = server.metrics.as_ref().map(|render| render()).unwrap_or_default();
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}
