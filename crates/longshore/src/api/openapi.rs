//! The OpenAPI document, and the routes that serve it.

use axum::extract::{OriginalUri, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa::openapi::content::ContentBuilder;
use utoipa::openapi::request_body::RequestBody;
use utoipa::openapi::response::ResponseBuilder;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::openapi::{Ref, RefOr, Schema};
use utoipa_axum::router::UtoipaMethodRouter;
use utoipa_axum::routes;

use super::Server;
use super::problem::ProblemBody;
use super::route_table::{TOKEN, operations};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Longshore",
        description = "A background job queue. Every error response is an object with `error`, a slug for programs, \
                       and `message`, a text for people. The server accepts or generates `x-request-id`, returns \
                       it and logs it.",
    ),
    servers((url = "/", description = "This server.")),
    components(schemas(ProblemBody)),
    tags(
        (name = "jobs", description = "Enqueue, list, cancel, retry, edit and delete jobs."),
        (name = "operations", description = "Changes of any number of jobs, in the background."),
        (name = "flows", description = "Graphs of jobs: some wait until others have ended."),
        (name = "events", description = "Events that jobs wait for."),
        (name = "queues", description = "List, pause, resume and limit queues."),
        (name = "dead letters", description = "Jobs that failed permanently, and failures in groups."),
        (name = "cron", description = "Schedules, which enqueue one job at each tick."),
        (name = "kinds", description = "Kinds of jobs: payload schemas and defaults."),
        (name = "leases", description = "Workers in any language: lease, renew and settle jobs."),
        (name = "workers", description = "List workers, and recover the jobs of dead ones."),
        (name = "sessions", description = "Logins of browsers: a cookie in place of a token."),
        (name = "tokens", description = "List and revoke tokens."),
        (name = "monitoring", description = "Health, metrics, statistics and live events."),
        (name = "documentation", description = "This document, and pages to read and try the API."),
    ),
)]
struct Base;

/// The document without routes.
pub(super) fn document() -> utoipa::openapi::OpenApi {
    let mut document = Base::openapi();
    document.info.version = env!("CARGO_PKG_VERSION").into();
    let components = document.components.get_or_insert_default();
    let scheme = HttpBuilder::new()
        .scheme(HttpAuthScheme::Bearer)
        .description(Some("A token that `longshore tokens create` printed."))
        .build();
    components.add_security_scheme(TOKEN, SecurityScheme::Http(scheme));
    document
}

/// The finished document as text. Adds the error response to every operation, and corrects
/// optional bodies.
pub(super) fn render(mut document: utoipa::openapi::OpenApi) -> String {
    let problem = RefOr::Ref(Ref::from_schema_name("Problem"));
    let response = ResponseBuilder::new()
        .description("Why the request failed.")
        .content("application/json", ContentBuilder::new().schema(Some(problem)).build())
        .build();
    for operation in operations(&mut document) {
        operation.responses.responses.entry("default".into()).or_insert_with(|| response.clone().into());
        if let Some(body) = &mut operation.request_body {
            refuse_null(body);
        }
    }
    // Cannot fail, because all keys are strings.
    document.to_pretty_json().unwrap_or_default()
}

/// An optional body can be left out, but it is not null. utoipa describes both in the same
/// way, and generated clients would send an absent body as something that is not JSON.
fn refuse_null(body: &mut RequestBody) {
    for content in body.content.values_mut() {
        if let Some(RefOr::T(Schema::OneOf(one_of))) = &content.schema
            && let Some(named) = one_of.items.iter().find(|item| matches!(item, RefOr::Ref(_)))
        {
            content.schema = Some(named.clone());
        }
    }
}

/// The routes of the document and of the pages that show it.
pub(super) fn routes() -> Vec<UtoipaMethodRouter<Server>> {
    #[cfg_attr(not(feature = "swagger"), expect(unused_mut, reason = "only the pages are added"))]
    let mut routes = vec![routes!(openapi_json)];
    #[cfg(feature = "swagger")]
    {
        use super::swagger;
        routes.extend([routes!(swagger::index), routes!(swagger::page), routes!(swagger::asset)]);
    }
    routes
}

/// Returns this document.
#[utoipa::path(
    get,
    path = "/api-docs/openapi.json",
    operation_id = "get_openapi_document",
    tag = "documentation",
    responses((status = 200, description = "The document, as OpenAPI 3.1.", body = serde_json::Value)),
)]
pub(super) async fn openapi_json(State(server): State<Server>, OriginalUri(uri): OriginalUri) -> Response {
    // The path before the route, if the router is nested under a prefix.
    let prefix = uri.path().strip_suffix("/api-docs/openapi.json").unwrap_or_default();
    let document = match prefix {
        "" => server.document.clone(),
        prefix => {
            let url = serde_json::Value::from(prefix);
            server.document.replacen("\"url\": \"/\"", &format!("\"url\": {url}"), 1)
        }
    };
    ([(header::CONTENT_TYPE, "application/json")], document).into_response()
}
