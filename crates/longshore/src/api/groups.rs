//! Routes for limits and fairness: groups, their defaults, and the rates of queues.

use axum::Json;
use axum::extract::{OriginalUri, State};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Deserializer};
use utoipa::{IntoParams, ToSchema};

use super::Server;
use super::auth::Caller;
use super::extract::{Body, GroupPath, NamePath, Query, clamped, refuse_nul};
use super::operate::queue;
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use super::schemas::{AnyInteger, FoundGroupSchema, GroupSchema, QueueSchema, RateSchema};
use super::url_parameters::encoded;
use crate::rules::enqueue::check_name;
use crate::rules::turns::Rate;
use crate::store::{FoundGroup, GroupChange, GroupRecord, QueueRecord};

/// The maximum number of groups per page.
const MAX_PAGE: u32 = 1000;

/// Which groups to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct GroupsQuery {
    /// List groups after this name. The `Link` header has the URL of the next page.
    after: Option<String>,
    /// The maximum number of groups, 1 to 1000; 100 by default. Values outside are clamped.
    #[serde(default, deserialize_with = "clamped")]
    #[param(inline, value_type = Option<AnyInteger>)]
    limit: Option<i64>,
}

/// Which groups to find.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct FindGroupsQuery {
    /// A part of the name. The case of ASCII letters does not matter.
    #[param(example = "acme", min_length = 1, max_length = 128)]
    name: String,
    /// The maximum number of groups, 1 to 1000; 20 by default. Values outside are clamped.
    #[serde(default, deserialize_with = "clamped")]
    #[param(inline, value_type = Option<AnyInteger>)]
    limit: Option<i64>,
}

/// Finds groups of all queues by a part of their name: first the one with exactly this name, then shorter
/// names. If very many groups have waiting jobs, only the first 2,000 of them are searched, and the one with
/// exactly this name.
#[utoipa::path(
    get,
    path = "/groups",
    operation_id = "find_groups",
    tag = "queues",
    params(FindGroupsQuery),
    responses(
        (status = 200, description = "The groups.", body = Vec<FoundGroupSchema>),
        (status = 400, description = "The name is empty or too long.", body = ProblemBody),
    ),
)]
pub(super) async fn find(
    State(server): State<Server>,
    caller: Caller,
    Query(query): Query<FindGroupsQuery>,
) -> ApiResult<Json<Vec<FoundGroup>>> {
    refuse_nul([Some(query.name.as_str())])?;
    check_name("name", &query.name).map_err(Problem::in_url)?;
    let limit = query.limit.map_or(20, |limit| limit.clamp(1, MAX_PAGE.into()) as u32);
    Ok(Json(server.client.find_groups(&query.name, caller.queues(), limit).await?))
}

/// Lists the groups of a queue that have settings, waiting jobs or running jobs, sorted by name.
#[utoipa::path(
    get,
    path = "/queues/{name}/groups",
    operation_id = "list_groups",
    tag = "queues",
    params(
        ("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128),
        GroupsQuery,
    ),
    responses((status = 200, description = "The groups.", body = Vec<GroupSchema>)),
)]
pub(super) async fn list(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    OriginalUri(uri): OriginalUri,
    Query(query): Query<GroupsQuery>,
) -> ApiResult<Response> {
    caller.may_use(&name)?;
    refuse_nul([query.after.as_deref()])?;
    let limit = query.limit.map_or(100, |limit| limit.clamp(1, MAX_PAGE.into()) as u32);
    let after = query.after.unwrap_or_default();
    let groups = server.client.groups(&name, &after, limit).await.map_err(Problem::in_url)?;
    let mut response = Json(&groups).into_response();
    if let Some(last) = groups.last().filter(|_| groups.len() == limit as usize) {
        let after = encoded(&last.name);
        let link = format!("<{}?after={after}&limit={limit}>; rel=\"next\"", uri.path());
        if let Ok(link) = HeaderValue::from_str(&link) {
            response.headers_mut().insert(header::LINK, link);
        }
    }
    Ok(response)
}

/// Shows a group. A group without settings and without live jobs has the defaults of its queue.
#[utoipa::path(
    get,
    path = "/queues/{name}/groups/{group}",
    operation_id = "get_group",
    tag = "queues",
    params(
        ("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128),
        ("group" = String, Path, description = "The name of the group.", example = "acme", min_length = 1, max_length = 128),
    ),
    responses(
        (status = 200, description = "The group.", body = GroupSchema),
        (status = 404, description = "The group has neither settings nor live jobs.", body = ProblemBody),
    ),
)]
pub(super) async fn get(
    State(server): State<Server>,
    caller: Caller,
    GroupPath(queue, group): GroupPath,
) -> ApiResult<Json<GroupRecord>> {
    caller.may_use(&queue)?;
    found(&server, &queue, &group).await
}

async fn found(server: &Server, queue: &str, group: &str) -> ApiResult<Json<GroupRecord>> {
    let found = server.client.group(queue, group).await.map_err(Problem::in_url)?;
    found.map(Json).ok_or_else(|| {
        Problem::new(Slug::NotFound, format!(
            "group `{group}` has neither settings nor live jobs; `GET /queues/NAME/groups` lists those that have"
        ))
    })
}

/// A change to a group. Absent fields stay as they are.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupRequest {
    /// Whether the group is paused: none of its jobs are claimed.
    paused: Option<bool>,
    /// How many of its jobs may run at once, over all processes. Null means the default of the
    /// queue.
    #[serde(default, deserialize_with = "or_null")]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 2147483647)]
    limit: Option<Option<u32>>,
    /// How often its jobs may start. Null means the default of the queue.
    #[serde(default, deserialize_with = "or_null")]
    #[schema(value_type = Option<RateSchema>)]
    rate: Option<Option<Rate>>,
}

/// A field that is present, null or not.
fn or_null<'de, D: Deserializer<'de>, T: Deserialize<'de>>(input: D) -> Result<Option<Option<T>>, D::Error> {
    Option::deserialize(input).map(Some)
}

/// Changes a group: pauses or resumes it, or sets its limit and rate. Takes effect while workers run.
#[utoipa::path(
    patch,
    path = "/queues/{name}/groups/{group}",
    operation_id = "change_group",
    tag = "queues",
    params(
        ("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128),
        ("group" = String, Path, description = "The name of the group.", example = "acme", min_length = 1, max_length = 128),
    ),
    request_body(content = GroupRequest, example = json!({ "limit": 5, "rate": { "starts": 100, "burst": 10 } })),
    responses(
        (status = 200, description = "The group after the change.", body = GroupSchema),
        (status = 422, description = "A value is out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn change(
    State(server): State<Server>,
    caller: Caller,
    GroupPath(queue, group): GroupPath,
    Body(body): Body<GroupRequest>,
) -> ApiResult<Json<GroupRecord>> {
    caller.may_use(&queue)?;
    let GroupRequest { paused, limit, rate } = body;
    server.client.set_group(&queue, &group, GroupChange { paused, limit, rate }).await?;
    found(&server, &queue, &group).await
}

/// The rate of a queue.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RateRequest {
    /// How often jobs of the queue may start, over all processes; null removes the rate.
    // Required, so that a request that forgets it does not remove the rate.
    #[serde(deserialize_with = "Option::deserialize")]
    #[schema(required, value_type = Option<RateSchema>)]
    rate: Option<Rate>,
}

/// Limits how often jobs of a queue start, over all processes.
#[utoipa::path(
    put,
    path = "/queues/{name}/rate",
    operation_id = "rate_queue",
    tag = "queues",
    params(("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128)),
    request_body(content = RateRequest, example = json!({ "rate": { "starts": 100, "burst": 10 } })),
    responses(
        (status = 200, description = "The queue after the change.", body = QueueSchema),
        (status = 422, description = "A number of the rate is out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn rate(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    Body(body): Body<RateRequest>,
) -> ApiResult<Json<QueueRecord>> {
    caller.may_use(&name)?;
    server.client.rate(&name, body.rate).await?;
    queue(&server, name).await
}

/// The settings of the groups of a queue that have none of their own. Absent fields stay as they are.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupDefaultsRequest {
    /// How many jobs of each group may run at once, over all processes; null means no limit.
    #[serde(default, deserialize_with = "or_null")]
    #[schema(value_type = Option<u32>, minimum = 1, maximum = 2147483647)]
    limit: Option<Option<u32>>,
    /// How often jobs of each group may start; null means no limit.
    #[serde(default, deserialize_with = "or_null")]
    #[schema(value_type = Option<RateSchema>)]
    rate: Option<Option<Rate>>,
}

/// Changes the limit and the rate of each group of a queue that has none of its own.
#[utoipa::path(
    patch,
    path = "/queues/{name}/group-defaults",
    operation_id = "change_group_defaults",
    tag = "queues",
    params(("name" = String, Path, description = "The name of the queue.", example = "mail", min_length = 1, max_length = 128)),
    request_body(content = GroupDefaultsRequest, example = json!({ "limit": 5 })),
    responses(
        (status = 200, description = "The queue after the change.", body = QueueSchema),
        (status = 422, description = "A value is out of range.", body = ProblemBody),
    ),
)]
pub(super) async fn defaults(
    State(server): State<Server>,
    caller: Caller,
    NamePath(name): NamePath,
    Body(body): Body<GroupDefaultsRequest>,
) -> ApiResult<Json<QueueRecord>> {
    caller.may_use(&name)?;
    server.client.change_group_defaults(&name, body.limit, body.rate).await?;
    queue(&server, name).await
}
