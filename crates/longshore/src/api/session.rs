//! Sessions: a browser exchanges a token for a cookie, so that no page has to keep the token.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use super::Server;
use super::auth::{Caller, check_page, hash_session, session_cookie, session_cookie_name};
use super::extract::Body;
use super::problem::{ApiResult, ProblemBody};
use crate::store::{NewSession, TokenRecord};

/// How long a session lasts.
const LASTS: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// A login.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LoginRequest {
    /// The secret of a token, as `longshore tokens create` has shown it.
    token: String,
}

/// Who uses the API, and what for.
#[derive(Serialize, ToSchema)]
pub(super) struct Session {
    /// The name of the token; null if the server requires none.
    #[schema(required)]
    name: Option<String>,
    /// The scopes of the token.
    #[schema(example = json!(["read", "operate"]))]
    scopes: Vec<String>,
    /// The queues that the token covers; null means all.
    #[schema(required)]
    queues: Option<Vec<String>>,
    /// When the session ends; null if the answer is not about a new one.
    #[schema(required)]
    expires_at: Option<DateTime<Utc>>,
}

impl Session {
    fn of(caller: &Caller, expires_at: Option<DateTime<Utc>>) -> Self {
        match caller {
            Caller::Anonymous => Session {
                name: None,
                scopes: crate::store::Scope::ALL.iter().map(|scope| scope.as_str().to_owned()).collect(),
                queues: None,
                expires_at,
            },
            Caller::Token(token) => {
                let TokenRecord { name, scopes, queues, .. } = &**token;
                Session {
                    name: Some(name.clone()),
                    scopes: scopes.clone(),
                    queues: queues.clone(),
                    expires_at,
                }
            }
        }
    }
}

/// Exchanges a token for a session: a cookie that browsers send with later requests. It lasts for seven days, and ends
/// earlier if the token expires or is revoked. A token has at most 100 sessions; one more ends the oldest. Requests in a session that change something also need the header
/// `Longshore-Session: 1`.
#[utoipa::path(
    post,
    path = "/session",
    operation_id = "log_in",
    tag = "sessions",
    request_body(content = LoginRequest, example = json!({ "token": "lsh_…" })),
    responses(
        (status = 200, description = "What the token permits. A server that requires no tokens sets no cookie.", body = Session,
         headers(("Set-Cookie" = String, description = "The session."))),
        (status = 401, description = "The token is unknown, expired or revoked.", body = ProblemBody),
    ),
)]
pub(super) async fn log_in(
    State(server): State<Server>,
    headers: HeaderMap,
    Body(body): Body<LoginRequest>,
) -> ApiResult<Response> {
    if !server.guard.requires_tokens() {
        return Ok(Json(Session::of(&Caller::Anonymous, None)).into_response());
    }
    let NewLogin { token, secret, expires_at } = begin(&server, &body.token).await?;
    let mut response = Json(Session::of(&Caller::Token(token), Some(expires_at))).into_response();
    set_cookie(&mut response, &headers, &secret, LASTS);
    Ok(response)
}

/// A session that has just begun.
struct NewLogin {
    token: Arc<TokenRecord>,
    secret: String,
    expires_at: DateTime<Utc>,
}

async fn begin(server: &Server, token: &str) -> ApiResult<NewLogin> {
    let token = server.guard.find_token(token.trim()).await?;
    server.guard.count_request(&Caller::Token(token.clone()))?;
    // 244 random bits.
    let secret = format!("{}{}", Uuid::new_v4().simple(), Uuid::new_v4().simple());
    let session = NewSession { hash: hash_session(&secret), token: token.id, lasts: LASTS };
    let expires_at = server.client.create_session(&session).await?;
    Ok(NewLogin { token, secret, expires_at })
}

/// Logs in, and adds the cookie to a response. For the form of the login page, which works without a script.
#[cfg(feature = "dashboard")]
pub(crate) async fn log_in_with(
    server: &Server,
    headers: &HeaderMap,
    token: &str,
    mut response: Response,
) -> ApiResult<Response> {
    let login = begin(server, token).await?;
    set_cookie(&mut response, headers, &login.secret, LASTS);
    Ok(response)
}

/// Returns what the caller may do: by its session, by its token, or without one.
#[utoipa::path(
    get,
    path = "/session",
    operation_id = "get_session",
    tag = "sessions",
    responses(
        (status = 200, description = "What the caller may do.", body = Session),
        (status = 401, description = "There is no valid session or token.", body = ProblemBody),
    ),
)]
pub(super) async fn get(State(server): State<Server>, headers: HeaderMap) -> ApiResult<Json<Session>> {
    let caller = server.guard.identify(&headers).await?;
    server.guard.count_request(&caller)?;
    Ok(Json(Session::of(&caller, None)))
}

/// Ends the session.
#[utoipa::path(
    delete,
    path = "/session",
    operation_id = "log_out",
    tag = "sessions",
    responses(
        (status = 204, description = "There is no session any more.", headers(("Set-Cookie" = String, description = "Removes the cookie."))),
        (status = 403, description = "The header `Longshore-Session` is missing.", body = ProblemBody),
    ),
)]
pub(super) async fn log_out(State(server): State<Server>, headers: HeaderMap) -> ApiResult<Response> {
    if let Some(secret) = session_cookie(&headers) {
        check_page(&headers)?;
        if server.guard.has_session(secret).await? {
            server.client.remove_session(&hash_session(secret)).await?;
            server.guard.forget_session(secret);
        }
    }
    let mut response = StatusCode::NO_CONTENT.into_response();
    set_cookie(&mut response, &headers, "", Duration::ZERO);
    Ok(response)
}

/// The cookie is sent only over HTTPS if the page was.
fn set_cookie(response: &mut Response, request: &HeaderMap, secret: &str, lasts: Duration) {
    let origin = request.get(header::ORIGIN).and_then(|origin| origin.to_str().ok());
    let secure = if origin.is_some_and(|origin| origin.starts_with("https://")) { "; Secure" } else { "" };
    let name = session_cookie_name(request);
    let cookie =
        format!("{name}={secret}; Path=/; Max-Age={}; HttpOnly; SameSite=Strict{secure}", lasts.as_secs());
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(header::SET_COOKIE, cookie);
    }
}
