//! Tokens: list and revoke them. They are created with the command, which shows the secret once.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::Caller;
use super::problem::{ApiResult, Problem, ProblemBody, Slug};
use crate::store::TokenRecord;

/// A token. Its secret is not stored.
#[derive(Serialize, ToSchema)]
#[schema(as = Token)]
pub(super) struct TokenBody {
    id: Uuid,
    name: String,
    /// What it permits: `enqueue`, `work`, `read`, `operate` or `admin`.
    scopes: Vec<String>,
    /// The queues it may be used for; null means all.
    #[schema(required)]
    queues: Option<Vec<String>>,
    created_at: DateTime<Utc>,
    /// When it expires; null means never.
    #[schema(required)]
    expires_at: Option<DateTime<Utc>>,
    /// When it was revoked; null if it was not.
    #[schema(required)]
    revoked_at: Option<DateTime<Utc>>,
}

impl From<TokenRecord> for TokenBody {
    fn from(token: TokenRecord) -> Self {
        let TokenRecord { id, name, scopes, queues, created_at, expires_at, revoked_at } = token;
        TokenBody { id, name, scopes, queues, created_at, expires_at, revoked_at }
    }
}

/// Lists tokens, newest first, including revoked and expired ones.
#[utoipa::path(
    get,
    path = "/tokens",
    operation_id = "list_tokens",
    tag = "tokens",
    responses((status = 200, description = "All tokens, without their secrets.", body = Vec<TokenBody>)),
)]
pub(super) async fn list(State(server): State<Server>, caller: Caller) -> ApiResult<Json<Vec<TokenBody>>> {
    caller.may_use_all()?;
    Ok(Json(server.client.tokens().await?.into_iter().map(TokenBody::from).collect()))
}

/// Revokes a token: requests with it are refused within seconds.
///
/// A token cannot revoke itself (409), so that nobody is locked out by accident. For an unknown token, the answer is 404.
#[utoipa::path(
    delete,
    path = "/tokens/{id}",
    operation_id = "revoke_token",
    tag = "tokens",
    params(("id" = Uuid, Path, description = "The id of a token, as `GET /tokens` returns it.")),
    responses(
        (status = 204, description = "The token is revoked."),
        (status = 404, description = "There is no such token.", body = ProblemBody),
        (status = 409, description = "It is the token of this request.", body = ProblemBody),
    ),
)]
pub(super) async fn revoke(
    State(server): State<Server>,
    caller: Caller,
    Path(id): Path<String>,
) -> ApiResult<StatusCode> {
    caller.may_use_all()?;
    let id: Uuid = id
        .parse()
        .map_err(|_| Problem::bad_request("id: not the id of a token; `GET /tokens` returns ids"))?;
    if caller.token() == Some(id) {
        return Err(Problem::new(
            Slug::Conflict,
            "id: is the token of this request; use another one, or `longshore tokens revoke`",
        ));
    }
    if server.client.revoke_token(id).await? {
        Ok(StatusCode::NO_CONTENT)
    } else {
        Err(Problem::new(Slug::NotFound, format!("token {id} does not exist")))
    }
}
