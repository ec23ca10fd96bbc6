//! Swagger UI: pages to read and try the API. All files are in this binary; nothing is
//! loaded from another host.

use std::sync::Arc;

use axum::extract::{OriginalUri, Path};
use axum::http::header;
use axum::response::{IntoResponse, Redirect, Response};
use utoipa_swagger_ui::Config;

use super::problem::{ApiResult, Problem, Slug};

/// Swagger UI needs inline styles. Scripts come only from this server.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                      img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'";

/// Redirects to `/docs/`, so that relative links on the page work.
#[utoipa::path(
    get,
    path = "/docs",
    operation_id = "redirect_to_docs",
    tag = "documentation",
    responses((status = 308, description = "Redirect to `/docs/`.")),
)]
pub(super) async fn index(OriginalUri(uri): OriginalUri) -> Redirect {
    Redirect::permanent(&format!("{}/", uri.path()))
}

/// Returns the Swagger UI page.
#[utoipa::path(
    get,
    path = "/docs/",
    operation_id = "get_docs_page",
    tag = "documentation",
    responses((status = 200, description = "The page.", body = String, content_type = "text/html")),
)]
pub(super) async fn page() -> ApiResult<Response> {
    file("")
}

/// Returns a file of the Swagger UI page.
#[utoipa::path(
    get,
    path = "/docs/{file}",
    operation_id = "get_docs_file",
    tag = "documentation",
    params(("file" = String, Path, description = "The name of the file.")),
    responses(
        // Of several content types, which generators of clients do not support.
        (status = 200, description = "The file."),
        (status = 404, description = "There is no such file."),
    ),
)]
pub(super) async fn asset(Path(name): Path<String>) -> ApiResult<Response> {
    file(&name)
}

fn file(name: &str) -> ApiResult<Response> {
    // Relative to the page, so that it works when the router is nested under a prefix.
    let config = Config::from("../api-docs/openapi.json").try_it_out_enabled(true);
    let found = utoipa_swagger_ui::serve(name, Arc::new(config)).map_err(|error| {
        tracing::error!(%error, "could not build the Swagger UI page");
        Problem::new(Slug::Internal, "the page could not be built; the server log has the reason")
    })?;
    let found = found.ok_or_else(|| Problem::new(Slug::NotFound, format!("there is no file `{name}`")))?;
    let headers = [
        (header::CONTENT_TYPE, found.content_type.as_str()),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    Ok((headers, found.bytes.into_owned()).into_response())
}
