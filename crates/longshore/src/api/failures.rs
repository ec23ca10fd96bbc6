//! Groups of failures.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::response::Response;
use chrono::{DateTime, Utc};
use serde::Deserialize;
use utoipa::IntoParams;

use super::Server;
use super::auth::Caller;
use super::extract::{NamePath, Query, clamped, refuse_nul};
use super::jobs::{linked, page_size};
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::{AnyInteger, FailureSchema};
use crate::rules::fingerprint::Fingerprint;
use crate::store::{FailureFilter, FailureRecord};

/// Which groups to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FailuresQuery {
    /// Only groups of this kind.
    kind: Option<String>,
    /// Only groups with a failure at this time or later.
    seen_after: Option<DateTime<Utc>>,
    /// The maximum number of groups, 1 to 200; 50 by default. Values outside are clamped.
    #[serde(default, deserialize_with = "clamped")]
    #[param(inline, value_type = Option<AnyInteger>)]
    limit: Option<i64>,
    /// Continue after the previous page. The `Link` header has the URL of the next page.
    #[param(pattern = r"^[0-9]{1,17}\.[0-9a-fA-F]{16}$", example = "1790000000000000.9c33ef0a6b1d7f02")]
    cursor: Option<String>,
}

/// Lists groups of failures, those with the newest failure first. Failures belong to one group if their kinds are
/// equal and their errors differ only in numbers, ids, quoted text, addresses and paths. A group is kept for 30 days
/// after its newest failure, and longer while it has dead letters. To run the dead letters of a group again, start an
/// operation with the filter `failure`.
#[utoipa::path(
    get,
    path = "/failures",
    operation_id = "list_failures",
    tag = "dead letters",
    params(FailuresQuery),
    responses(
        (status = 200, description = "The groups. `Link` is the next page, if there is one.",
         body = Vec<FailureSchema>, headers(("Link" = String, description = "`<…>; rel=\"next\"`"))),
        (status = 400, description = "A parameter is invalid.", body = ProblemBody),
    ),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<FailuresQuery>,
) -> ApiResult<Response> {
    caller.may_use_all()?;
    refuse_nul([query.kind.as_deref()])?;
    let filter = FailureFilter {
        fingerprint: None,
        kind: query.kind,
        seen_after: query.seen_after,
        after: query.cursor.as_deref().map(read_cursor).transpose()?,
        limit: page_size(query.limit),
    };
    let groups = server.client.failures(&filter).await.map_err(Problem::in_url)?;
    let last = groups.last().filter(|_| groups.len() == filter.limit as usize);
    Ok(linked(&groups, &uri, last.map(FailureRecord::cursor), 0))
}

fn read_cursor(text: &str) -> ApiResult<(DateTime<Utc>, Fingerprint)> {
    FailureFilter::read_cursor(text).ok_or_else(|| {
        Problem::bad_request("cursor: is not the cursor of a page; use the URL in the `Link` header")
    })
}

/// Shows a group of failures.
///
/// For one that is unknown or no longer kept, the answer is 404.
#[utoipa::path(
    get,
    path = "/failures/{fingerprint}",
    operation_id = "get_failure",
    tag = "dead letters",
    params(("fingerprint" = String, Path, description = "The fingerprint.", example = "9c33ef0a6b1d7f02", pattern = "^[0-9a-fA-F]{16}$")),
    responses(
        (status = 200, description = "The group.", body = FailureSchema),
        (status = 400, description = "This is not a fingerprint.", body = ProblemBody),
        (status = 404, description = "There is no such group, or it is no longer kept.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    NamePath(fingerprint): NamePath,
) -> ApiResult<Json<FailureRecord>> {
    caller.may_use_all()?;
    let fingerprint: Fingerprint = fingerprint.parse().map_err(Problem::in_url)?;
    let filter = FailureFilter { fingerprint: Some(fingerprint), limit: 1, ..FailureFilter::default() };
    server.client.failures(&filter).await?.pop().map(Json).ok_or_else(|| {
        Problem::new(Slug::NotFound, format!("failure {fingerprint} does not exist, or is no longer kept"))
    })
}
