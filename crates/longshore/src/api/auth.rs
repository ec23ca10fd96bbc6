//! Who may do what. A route belongs to a scope because it was added under one
//! (see [`RouteTable`](super::route_table::RouteTable)); there is no way to add one
//! without.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task;
use std::time::{Duration, Instant};

use axum::extract::{FromRequestParts, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use tower::{Layer, Service};

use super::admission::Limiter;
use super::problem::{ApiResult, Problem, Slug};
use crate::client::Client;
use crate::enqueue::{UniqueMode, ValidJob};
use crate::store::{Scope, TokenRecord};

/// A revoked token is refused after this long at the latest.
const TOKEN_CACHE_TTL: Duration = Duration::from_secs(2);
/// How many tokens are remembered; past that all are forgotten.
const MAX_CACHED_TOKENS: usize = 10_000;

/// Who may use the API.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Whoever can reach it. Right for loopback, and behind a server that checks
    /// for itself.
    #[default]
    Open,
    /// Who brings a token of the database (`longshore tokens create`).
    Tokens,
}

/// Decides about requests.
#[derive(Debug)]
pub(super) struct Guard {
    access: Access,
    limiter: Arc<Limiter>,
    client: Client,
    cache: Mutex<TokenCache>,
}

/// Tokens by the hash of their secrets, and when each was looked up.
type TokenCache = HashMap<[u8; 32], (Instant, Option<Arc<TokenRecord>>)>;

/// Who asks. Found on every request that a scope let through.
#[derive(Clone, Debug)]
pub(super) enum Caller {
    Anonymous,
    Token(Arc<TokenRecord>),
}

impl Caller {
    /// Refuses what exists in a queue that the token is not for, without naming
    /// that: the caller did not.
    pub(super) fn may_access(&self, queue: &str) -> ApiResult<()> {
        self.may_use(queue).map_err(|_| {
            let queues = self.queues().unwrap_or_default().join(", ");
            Problem::new(Slug::Forbidden, format!("this token is for {queues}, and this is of another queue"))
        })
    }

    /// Refuses queues that the token is not for.
    pub(super) fn may_use(&self, queue: &str) -> ApiResult<()> {
        match self.queues() {
            Some(queues) if !queues.iter().any(|allowed| allowed == queue) => Err(Problem::new(
                Slug::Forbidden,
                format!("queue: this token is for {}, not for `{queue}`", queues.join(", ")),
            )),
            _ => Ok(()),
        }
    }

    /// Refuses keys that would change jobs of other queues: unique keys are shared
    /// by all of them.
    pub(super) fn may_use_key(&self, job: &ValidJob) -> ApiResult<()> {
        let replaces = job.unique.as_ref().is_some_and(|(_, mode)| *mode != UniqueMode::Dedupe);
        if replaces && self.queues().is_some() {
            Err(Problem::new(
                Slug::Forbidden,
                "unique_mode: a token for some queues may only dedupe, because the job that has the key may \
                 be of another queue",
            ))
        } else {
            Ok(())
        }
    }

    /// Refuses what takes a scope that the token does not have.
    pub(super) fn must_have(&self, scope: Scope) -> ApiResult<()> {
        let Caller::Token(token) = self else { return Ok(()) };
        let has = |scope: Scope| token.scopes.iter().any(|held| held == scope.as_str());
        if has(scope) || has(Scope::Admin) {
            Ok(())
        } else {
            Err(Problem::new(
                Slug::Forbidden,
                format!(
                    "this needs the scope `{}`, which the token `{}` does not have",
                    scope.as_str(),
                    token.name
                ),
            ))
        }
    }

    /// The only queues it may see; `None` means all.
    pub(super) fn queues(&self) -> Option<&[String]> {
        match self {
            Caller::Anonymous => None,
            Caller::Token(token) => token.queues.as_deref(),
        }
    }

    /// Which token it brought.
    pub(super) fn token(&self) -> Option<uuid::Uuid> {
        match self {
            Caller::Anonymous => None,
            Caller::Token(token) => Some(token.id),
        }
    }

    /// Refuses what concerns a queue that the token is not for, or, where none is
    /// named, every queue at once.
    pub(super) fn may_use_queue_or_all(&self, queue: Option<&str>) -> ApiResult<()> {
        match queue {
            Some(queue) => self.may_use(queue),
            None => self.may_use_all(),
        }
    }

    /// Refuses what concerns every queue at once.
    pub(super) fn may_use_all(&self) -> ApiResult<()> {
        match self.queues() {
            None => Ok(()),
            Some(queues) => Err(Problem::new(
                Slug::Forbidden,
                format!(
                    "this concerns every queue, and this token is for {} only; name one of them where \
                     there is a `queue` parameter, or use another token",
                    queues.join(", ")
                ),
            )),
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Caller {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> ApiResult<Self> {
        // Absent only on routes without a scope, which ask for no caller.
        parts
            .extensions
            .get::<Caller>()
            .cloned()
            .ok_or_else(|| Problem::new(Slug::Forbidden, "this route has no scope, so nobody may use it"))
    }
}

impl Guard {
    pub(super) fn new(access: Access, client: Client, limiter: Arc<Limiter>) -> Arc<Self> {
        Arc::new(Guard { access, limiter, client, cache: Mutex::default() })
    }

    pub(super) fn requires_tokens(&self) -> bool {
        self.access == Access::Tokens
    }

    pub(super) async fn admit(&self, headers: &HeaderMap, scope: Scope) -> ApiResult<Caller> {
        match self.admit_from_cache(headers, scope) {
            Some(admitted) => admitted,
            None => self.look_up(sent_token_hash(headers)?, scope).await,
        }
    }

    /// As [`admit`](Self::admit), where the database need not be asked.
    fn admit_from_cache(&self, headers: &HeaderMap, scope: Scope) -> Option<ApiResult<Caller>> {
        if self.access == Access::Open {
            return Some(Ok(Caller::Anonymous));
        }
        let hash = match sent_token_hash(headers) {
            Ok(hash) => hash,
            Err(problem) => return Some(Err(problem)),
        };
        let (at, token) = self.cache().get(&hash).cloned()?;
        (at.elapsed() < TOKEN_CACHE_TTL).then(|| authorize(token, scope))
    }

    async fn look_up(&self, hash: [u8; 32], scope: Scope) -> ApiResult<Caller> {
        let token = self.client.token(&hash).await?.map(Arc::new);
        let mut known = self.cache();
        if known.len() >= MAX_CACHED_TOKENS {
            known.clear();
        }
        known.insert(hash, (Instant::now(), token.clone()));
        drop(known);
        authorize(token, scope)
    }

    /// The request with its caller, once that is counted.
    fn count_and_attach(&self, admitted: ApiResult<Caller>, mut request: Request) -> ApiResult<Request> {
        let caller = admitted?;
        self.limiter.check_rate(&caller)?;
        request.extensions_mut().insert(caller);
        Ok(request)
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, TokenCache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is stored of a token's secret: SHA-256.
pub fn hash_token(secret: &str) -> [u8; 32] {
    Sha256::digest(secret.as_bytes()).into()
}

/// Tokens are found by the hash of what was sent: what a stranger can learn from
/// how long that takes is about the hash, not about the secret.
fn sent_token_hash(headers: &HeaderMap) -> ApiResult<[u8; 32]> {
    let secret = bearer(headers).ok_or_else(|| unauthorized("send `Authorization: Bearer <token>`"))?;
    Ok(hash_token(secret))
}

fn authorize(token: Option<Arc<TokenRecord>>, scope: Scope) -> ApiResult<Caller> {
    let token = token.ok_or_else(|| unauthorized("the token is unknown, expired or revoked"))?;
    let caller = Caller::Token(token);
    caller.must_have(scope)?;
    Ok(caller)
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut given = headers.get_all(header::AUTHORIZATION).iter();
    let (first, None) = (given.next()?, given.next()) else { return None };
    let (scheme, secret) = first.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| secret.trim())
}

fn unauthorized(message: &str) -> Problem {
    Problem::new(Slug::Unauthorized, message)
        .with_header(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer realm=\"longshore\""))
}

/// Lets through who has the scope. By hand, as the [`RequestLayer`](super::middleware::RequestLayer) is.
#[derive(Clone, Debug)]
pub(super) struct RequireScope {
    pub(super) guard: Arc<Guard>,
    pub(super) scope: Scope,
}

impl<S> Layer<S> for RequireScope {
    type Service = ScopeService<S>;

    fn layer(&self, inner: S) -> ScopeService<S> {
        ScopeService { rule: self.clone(), inner }
    }
}

/// A service for who has a scope.
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
        let RequireScope { guard, scope } = self.rule.clone();
        if let Some(admitted) = guard.admit_from_cache(request.headers(), scope) {
            return match guard.count_and_attach(admitted, request) {
                Ok(request) => Box::pin(self.inner.call(request)),
                Err(problem) => Box::pin(ready(Ok(problem.into_response()))),
            };
        }
        // This one was asked whether it is ready, a copy was not.
        let copy = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, copy);
        Box::pin(async move {
            let admitted = guard.admit(request.headers(), scope).await;
            match guard.count_and_attach(admitted, request) {
                Ok(request) => inner.call(request).await,
                Err(problem) => Ok(problem.into_response()),
            }
        })
    }
}
