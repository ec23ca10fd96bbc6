//! Whether the server is well, and what it counts.

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

/// A database that is slower than this is not well.
const WELL_WITHIN: Duration = Duration::from_secs(5);

/// All is well.
#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`.
    #[schema(example = "ok")]
    status: &'static str,
}

/// Whether the database answers.
#[utoipa::path(
    get,
    path = "/health",
    tag = "monitoring",
    responses(
        (status = 200, description = "The database answers.", body = Health),
        (status = 503, description = "It does not.", body = ProblemBody),
    ),
)]
pub(super) async fn health(State(server): State<Server>) -> ApiResult<Json<Health>> {
    match tokio::time::timeout(WELL_WITHIN, server.client.now()).await {
        Ok(Ok(_)) => Ok(Json(Health { status: "ok" })),
        Ok(Err(error)) => Err(error.into()),
        Err(_) => Err(Problem::new(Slug::Unavailable, "the database does not answer")),
    }
}

/// Metrics for Prometheus: of all queues, so not for a token of some.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "monitoring",
    responses(
        (status = 200, description = "Prometheus text.", body = String, content_type = "text/plain"),
        (status = 403, description = "The token is for some queues, and these are counts of all.", body = ProblemBody),
    ),
)]
pub(super) async fn metrics(
    State(server): State<Server>,
    // Nobody in particular where it is public.
    caller: Option<Extension<Caller>>,
) -> ApiResult<Response> {
    if let Some(Extension(caller)) = caller {
        caller.may_use_all()?;
    }
    let text = server.metrics.as_ref().map(|render| render()).unwrap_or_default();
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response())
}
