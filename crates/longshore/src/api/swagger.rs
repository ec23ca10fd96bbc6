//! Pages to read and try the API by, out of this binary: nothing is fetched from
//! elsewhere.

use std::sync::Arc;

use axum::extract::{OriginalUri, Path};
use axum::http::header;
use axum::response::{IntoResponse, Redirect, Response};
use utoipa_swagger_ui::Config;

use super::problem::{ApiResult, Problem, Slug};

/// Swagger UI puts styles into elements; scripts come from this server only.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                      img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'";

/// To the folder, so that the page finds its parts beside it.
#[utoipa::path(
    get,
    path = "/docs",
    tag = "documentation",
    responses((status = 308, description = "To /docs/.")),
)]
pub(super) async fn index(OriginalUri(uri): OriginalUri) -> Redirect {
    Redirect::permanent(&format!("{}/", uri.path()))
}

/// The page.
#[utoipa::path(
    get,
    path = "/docs/",
    tag = "documentation",
    responses((status = 200, description = "A page.", body = String, content_type = "text/html")),
)]
pub(super) async fn page() -> ApiResult<Response> {
    file("")
}

/// Its parts.
#[utoipa::path(
    get,
    path = "/docs/{file}",
    tag = "documentation",
    params(("file" = String, Path, description = "A file of the page.")),
    responses(
        (status = 200, description = "The file.", body = String, content_type = "*/*"),
        (status = 404, description = "No such file."),
    ),
)]
pub(super) async fn part(Path(name): Path<String>) -> ApiResult<Response> {
    file(&name)
}

fn file(name: &str) -> ApiResult<Response> {
    // Relative to the page, so that it works under any prefix.
    let config = Arc::new(Config::from("../api-docs/openapi.json"));
    let found = utoipa_swagger_ui::serve(name, config).map_err(|error| {
        tracing::error!(%error, "the documentation's page is broken");
        Problem::new(Slug::Internal, "the page cannot be shown")
    })?;
    let found = found.ok_or_else(|| Problem::new(Slug::NotFound, "there is no such file"))?;
    let headers = [
        (header::CONTENT_TYPE, found.content_type.as_str()),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, found.bytes.into_owned()).into_response())
}
