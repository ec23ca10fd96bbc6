//! Authentication by bearer token, and authorization by scope and queue.
//!
//! Which scope a route requires is set in
//! [`RouteTable`](super::route_table::RouteTable), where routes are added.

use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task;
use std::time::Duration;

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use tower::{Layer, Service};

use super::Server;
use super::admission::Limiter;
use super::connections::Connection;
use super::problem::{ApiResult, Problem, Slug};
use super::token_lookup::TokenLookup;
use super::url_parameters::UrlParameters;
use crate::client::Client;
use crate::store::{Scope, TokenRecord};

/// Who may use the API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Anyone who can reach it. For loopback, and for servers that check access
    /// themselves.
    #[default]
    Open,
    /// Callers with a token that is stored in the database (`longshore tokens
    /// create`).
    Tokens,
}

/// Decides which requests are let through.
#[derive(Debug)]
pub(crate) struct Guard {
    access: Access,
    limiter: Arc<Limiter>,
    tokens: Arc<TokenLookup>,
}

/// Who sent a request. The scope check adds it to every request it lets through.
#[derive(Clone, Debug)]
pub(crate) enum Caller {
    Anonymous,
    Token(Arc<TokenRecord>),
}

impl Caller {
    /// Refuses access to something that exists in this queue if the token does not
    /// cover the queue. Does not name the queue, which the caller may not know.
    pub(crate) fn may_access(&self, queue: &str) -> ApiResult<()> {
        self.may_use(queue).map_err(|_| self.refuse_access())
    }

    /// The refusal of something that belongs to a queue which the token does not cover.
    pub(crate) fn refuse_access(&self) -> Problem {
        let queues = self.queues().unwrap_or_default().join(", ");
        Problem::new(
            Slug::Forbidden,
            format!(
                "this token covers only the queues {queues}; the job, schedule or worker belongs to another \
                 queue"
            ),
        )
    }

    /// Refuses a queue that the token does not cover.
    pub(crate) fn may_use(&self, queue: &str) -> ApiResult<()> {
        match self.queues() {
            Some(queues) if !queues.iter().any(|allowed| allowed == queue) => Err(Problem::new(
                Slug::Forbidden,
                format!("queue: this token covers only {}, not `{queue}`", queues.join(", ")),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a token that does not have this scope.
    pub(crate) fn must_have(&self, scope: Scope) -> ApiResult<()> {
        let Caller::Token(token) = self else { return Ok(()) };
        let has = |scope: Scope| token.scopes.iter().any(|held| held == scope.as_str());
        if has(scope) || has(Scope::Admin) {
            Ok(())
        } else {
            Err(Problem::new(
                Slug::Forbidden,
                format!(
                    "token `{}` does not have the scope `{}`, which this request requires; use another token",
                    token.name,
                    scope.as_str()
                ),
            ))
        }
    }

    /// The queues that the token covers; `None` means all.
    pub(crate) fn queues(&self) -> Option<&[String]> {
        match self {
            Caller::Anonymous => None,
            Caller::Token(token) => token.queues.as_deref(),
        }
    }

    /// The id of the token; `None` without one.
    pub(super) fn token(&self) -> Option<uuid::Uuid> {
        match self {
            Caller::Anonymous => None,
            Caller::Token(token) => Some(token.id),
        }
    }

    /// Refuses a queue that the token does not cover. Without a queue, refuses
    /// tokens that do not cover all of them.
    pub(super) fn may_use_queue_or_all(&self, queue: Option<&str>) -> ApiResult<()> {
        match queue {
            Some(queue) => self.may_use(queue),
            None => self.may_use_all(),
        }
    }

    /// Refuses tokens that do not cover all queues.
    pub(crate) fn may_use_all(&self) -> ApiResult<()> {
        match self.queues() {
            None => Ok(()),
            Some(queues) => Err(Problem::new(
                Slug::Forbidden,
                format!(
                    "this applies to every queue, and this token covers only {}; set `queue` to one of \
                     them if this route takes it, or use another token",
                    queues.join(", ")
                ),
            )),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> ApiResult<Self> {
        // Only routes without a scope have no caller, and they do not extract one.
        parts
            .extensions
            .get::<Caller>()
            .cloned()
            .ok_or_else(|| Problem::new(Slug::Forbidden, "this route has no scope, so no caller may use it"))
    }
}

impl Guard {
    pub(super) fn new(access: Access, client: Client, limiter: Arc<Limiter>) -> Arc<Self> {
        Arc::new(Guard { access, limiter, tokens: TokenLookup::new(client) })
    }

    pub(crate) fn requires_tokens(&self) -> bool {
        self.access == Access::Tokens
    }

    /// Checks the token of a request. Returns the caller if it has this scope.
    pub(super) async fn admit(&self, headers: &HeaderMap, scope: Scope) -> ApiResult<Caller> {
        match self.admit_from_cache(headers, scope) {
            Some(admitted) => admitted,
            None => authorize(self.tokens.find(sent_secret(headers)?.hash()).await?, scope),
        }
    }

    /// As [`admit`](Self::admit), but without a database lookup. Returns `None` if
    /// one is needed.
    fn admit_from_cache(&self, headers: &HeaderMap, scope: Scope) -> Option<ApiResult<Caller>> {
        if self.access == Access::Open {
            return Some(Ok(Caller::Anonymous));
        }
        let hash = match sent_secret(headers) {
            Ok(secret) => secret.hash(),
            Err(problem) => return Some(Err(problem)),
        };
        self.tokens.cached(&hash).map(|token| authorize(Some(token), scope))
    }

    /// Finds the valid token with this secret.
    pub(super) async fn find_token(&self, secret: &str) -> ApiResult<Arc<TokenRecord>> {
        valid(self.tokens.find(hash_token(secret)).await?)
    }

    /// Who sent a request, whatever the scopes of the token.
    pub(crate) async fn identify(&self, headers: &HeaderMap) -> ApiResult<Caller> {
        match self.access {
            Access::Open => Ok(Caller::Anonymous),
            Access::Tokens => valid(self.tokens.find(sent_secret(headers)?.hash()).await?).map(Caller::Token),
        }
    }

    /// Counts a request to a route without a scope against the rate of its caller.
    pub(super) fn count_request(&self, caller: &Caller) -> ApiResult<()> {
        self.limiter.check_rate(caller)
    }

    /// Whether there is such a session. Lookups are limited, so made-up cookies cost little.
    pub(super) async fn has_session(&self, secret: &str) -> ApiResult<bool> {
        Ok(self.access == Access::Tokens && self.tokens.find(hash_session(secret)).await?.is_some())
    }

    /// Forgets a session at once.
    pub(super) fn forget_session(&self, secret: &str) {
        self.tokens.forget(&hash_session(secret));
    }

    /// Counts the request against the caller's rate and adds the caller to it.
    fn count_and_attach(&self, admitted: ApiResult<Caller>, mut request: Request) -> ApiResult<Request> {
        let caller = admitted?;
        if self.access == Access::Tokens && !request.method().is_safe() {
            check_page(request.headers())?;
        }
        self.limiter.check_rate(&caller)?;
        if let Some(connection) = request.extensions().get::<Arc<Connection>>() {
            connection.note_known();
        }
        request.extensions_mut().insert(caller);
        Ok(request)
    }
}

/// How often the token of a call that waits is checked again.
const RECHECK_INTERVAL: Duration = Duration::from_secs(2);

/// What a request was admitted with, to check it again while the request waits.
pub(super) struct Credential {
    guard: Arc<Guard>,
    /// `None` if the server requires no token.
    hash: Option<[u8; 32]>,
}

impl FromRequestParts<Server> for Credential {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, server: &Server) -> ApiResult<Self> {
        let guard = server.guard.clone();
        let hash = match guard.access {
            Access::Open => None,
            Access::Tokens => Some(sent_secret(&parts.headers)?.hash()),
        };
        Ok(Credential { guard, hash })
    }
}

impl Credential {
    /// Waits until the token is revoked, has expired, or has lost this scope. Returns the refusal.
    pub(super) async fn refused(&self, scope: Scope) -> Problem {
        let Some(hash) = self.hash else { return std::future::pending().await };
        loop {
            tokio::time::sleep(RECHECK_INTERVAL).await;
            let found = match self.guard.tokens.cached(&hash) {
                Some(token) => Ok(Some(token)),
                None => self.guard.tokens.find(hash).await,
            };
            // If the database does not reply, the call goes on.
            if let Ok(token) = found
                && let Err(problem) = authorize(token, scope)
            {
                return problem;
            }
        }
    }
}

/// The SHA-256 hash of a token's secret, which is what the database stores.
pub fn hash_token(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

/// The hash of a session's secret, which is what the database stores. It differs from that of a token, so that neither
/// can be sent in the place of the other.
pub(super) fn hash_session(secret: &str) -> [u8; 32] {
    // No text contains this byte, so no token has the same hash.
    Sha256::new_with_prefix([0xff]).chain_update(secret.as_bytes()).finalize().into()
}

/// What a request says about its sender.
enum Secret<'a> {
    Token(&'a str),
    Session(&'a str),
}

impl Secret<'_> {
    /// Tokens and sessions are looked up by hash, so the time of a lookup reveals something about the hash but not
    /// about the secret.
    fn hash(&self) -> [u8; 32] {
        match self {
            Secret::Token(secret) => hash_token(secret),
            Secret::Session(secret) => hash_session(secret),
        }
    }
}

/// A token counts more than a session.
fn sent_secret(headers: &HeaderMap) -> ApiResult<Secret<'_>> {
    let token = bearer(headers).map(Secret::Token);
    let has_token = headers.contains_key(header::AUTHORIZATION);
    let session = || session_cookie(headers).filter(|_| !has_token).map(Secret::Session);
    token.or_else(session).ok_or_else(|| {
        count_failure("no_token");
        unauthorized("send `Authorization: Bearer <token>`, or log in with `POST /session`")
    })
}

/// The name of the cookie with the secret of a session. Browsers send the cookies of a host to all its ports, so the
/// port is part of the name: two servers on one host would otherwise end each other's sessions.
pub(super) fn session_cookie_name(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    // An IPv6 address contains colons too, in brackets.
    let port = host.rsplit_once(':').map(|(_, port)| port).filter(|port| port.parse::<u16>().is_ok());
    match port {
        Some(port) => format!("longshore_session_{port}"),
        None => "longshore_session".to_owned(),
    }
}

/// The pages of the dashboard send this header with every change. Forms and links of other sites cannot.
pub(super) const PAGE_HEADER: &str = "longshore-session";

/// The secret of the session that was sent.
pub(super) fn session_cookie(headers: &HeaderMap) -> Option<&str> {
    let cookies = headers.get_all(header::COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut pairs = cookies.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    let wanted = session_cookie_name(headers);
    pairs.find(|(name, _)| *name == wanted).map(|(_, secret)| secret)
}

/// Browsers add cookies to requests of any page. Refuses a change in a session that no page of ours has made.
pub(super) fn check_page(headers: &HeaderMap) -> ApiResult<()> {
    if headers.contains_key(header::AUTHORIZATION) || headers.contains_key(PAGE_HEADER) {
        return Ok(());
    }
    Err(Problem::new(
        Slug::Forbidden,
        "a change in a session requires the header `Longshore-Session: 1`, so that pages of other sites cannot make it",
    ))
}

fn valid(token: Option<Arc<TokenRecord>>) -> ApiResult<Arc<TokenRecord>> {
    token.ok_or_else(|| {
        count_failure("invalid_token");
        // Otherwise invented tokens would keep connections open.
        unauthorized("the token or the session is unknown, expired or revoked")
            .with_header(header::CONNECTION, HeaderValue::from_static("close"))
    })
}

fn authorize(token: Option<Arc<TokenRecord>>, scope: Scope) -> ApiResult<Caller> {
    let caller = Caller::Token(valid(token)?);
    caller.must_have(scope).inspect_err(|_| count_failure("no_scope"))?;
    Ok(caller)
}

fn count_failure(reason: &'static str) {
    metrics::counter!("longshore_auth_failures_total", "reason" => reason).increment(1);
}

/// Creates the counters at zero, so that rates show the first failure.
pub(super) fn register_counters() {
    for reason in ["no_token", "invalid_token", "no_scope"] {
        metrics::counter!("longshore_auth_failures_total", "reason" => reason).increment(0);
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut values = headers.get_all(header::AUTHORIZATION).iter();
    let (first, None) = (values.next()?, values.next()) else { return None };
    let (scheme, secret) = first.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

fn unauthorized(message: &str) -> Problem {
    Problem::new(Slug::Unauthorized, message)
        .with_header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"longshore\""))
}

/// A layer that lets through only callers with a scope. Written as a tower service
/// for the same reason as [`RequestLayer`](super::middleware::RequestLayer).
#[derive(Clone, Debug)]
pub(super) struct RequireScope {
    pub(super) guard: Arc<Guard>,
    pub(super) scope: Scope,
    /// The URL parameters that the route takes.
    pub(super) parameters: UrlParameters,
}

impl RequireScope {
    /// Adds the caller to the request. Refuses a request with an unknown URL parameter; that
    /// comes last, so that only callers with the scope learn about the parameters.
    fn let_through(&self, admitted: ApiResult<Caller>, request: Request) -> ApiResult<Request> {
        let request = self.guard.count_and_attach(admitted, request)?;
        self.parameters.check(&request)?;
        Ok(request)
    }
}

impl<S> Layer<S> for RequireScope {
    type Service = ScopeService<S>;

    fn layer(&self, inner: S) -> ScopeService<S> {
        ScopeService { rule: self.clone(), inner }
    }
}

/// A service behind [`RequireScope`].
#[derive(Clone, Debug)]
pub(super) struct ScopeService<S> {
    rule: RequireScope,
    inner: S,
}

impl<S> Service<Request> for ScopeService<S>
where
    S: Service<Request, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let rule = &self.rule;
        if let Some(admitted) = rule.guard.admit_from_cache(request.headers(), rule.scope) {
            return match rule.let_through(admitted, request) {
                Ok(request) => Box::pin(self.inner.call(request)),
                Err(problem) => Box::pin(ready(Ok(problem.into_response()))),
            };
        }
        // Call the service that `poll_ready` was called on, not the clone.
        let copy = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, copy);
        let rule = self.rule.clone();
        Box::pin(async move {
            let admitted = {
                // Anyone can invent tokens, so a request whose token is not known keeps no connection.
                let connection = request.extensions().get::<Arc<Connection>>();
                let _waiting = connection.map(|connection| connection.wait_for_request());
                rule.guard.admit(request.headers(), rule.scope).await
            };
            match rule.let_through(admitted, request) {
                Ok(request) => inner.call(request).await,
                Err(problem) => Ok(problem.into_response()),
            }
        })
    }
}
