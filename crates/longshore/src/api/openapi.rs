//! The OpenAPI document, and the pages that show it.

use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityScheme};
use utoipa::openapi::{Ref, RefOr};
use utoipa_axum::router::UtoipaMethodRouter;
use utoipa_axum::routes;

use super::Server;
use super::problem::ProblemBody;
use super::route_table::{TOKEN, operations};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Longshore",
        description = "A background job queue. Every error is an object with `error`, a word for programs, and \
                       `message`, a sentence for people; `x-request-id` is taken or made, returned, and in the logs.",
    ),
    components(schemas(ProblemBody)),
    tags(
        (name = "jobs", description = "Enqueue, look, cancel, retry, change."),
        (name = "queues", description = "Pause, resume and limit."),
        (name = "dead letters", description = "Jobs that failed for good."),
        (name = "cron", description = "Schedules: one job for each tick."),
        (name = "kinds", description = "What payloads look like, and defaults."),
        (name = "leases", description = "Workers in any language: lease, renew, settle."),
        (name = "workers", description = "Who works, and recovery of who no longer does."),
        (name = "monitoring", description = "Health, metrics, statistics and live events."),
        (name = "documentation", description = "This document, and pages to read and try the API."),
    ),
)]
struct Base;

/// The document before any route.
pub(super) fn document() -> utoipa::openapi::OpenApi {
    let mut document = Base::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").into();
    let components = document.components.get_or_insert_default();
    let scheme = SecurityScheme::Http(Http::new(HttpAuthScheme::Bearer));
    components.add_security_scheme(TOKEN, scheme);
    document
}

/// The finished document as text: every operation may also answer with a
/// problem.
pub(super) fn render(mut document: utoipa::openapi::OpenApi) -> String {
    let problem = RefOr::Ref(Ref::from_schema_name("Problem"));
    let response = ResponseBuilder::new()
        .description("Why it was not done.")
        .content("application/json", ContentBuilder::new().schema(Some(problem)).build())
        .build();
    for operation in operations(&mut document) {
        operation.responses.responses.entry("default".into()).or_insert_with(|| response.clone().into());
    }
    // Of our own types, which all have names for keys.
    document.to_pretty_json().unwrap_or_default()
}

/// Where the document is found, and the pages that show it.
pub(super) fn routes() -> Vec<UtoipaMethodRouter<Server>> {
    #[cfg_attr(not(feature = "swagger"), expect(unused_mut, reason = "there are no pages"))]
    let mut routes = vec![routes!(openapi_json)];
    #[cfg(feature = "swagger")]
    {
        use super::swagger;
        routes.extend([routes!(swagger::index), routes!(swagger::page), routes!(swagger::part)]);
    }
    routes
}

/// This document.
#[utoipa::path(
    get,
    path = "/api-docs/openapi.json",
    tag = "documentation",
    responses((status = 200, description = "OpenAPI 3.1.", body = serde_json::Value)),
)]
pub(super) async fn openapi_json(State(server): State<Server>) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], server.document.clone()).into_response()
}
