//! Error responses. All have the same shape: a slug for programs and a message for
//! people. Server errors reveal nothing but the request id.

use std::any::Any;
use std::ops::Deref;
use std::sync::Arc;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::schemas::StatusSchema;
use crate::catch_panic::panic_message;
use crate::error::Error;
use crate::job::Status;

/// The result of every handler.
pub(crate) type ApiResult<T> = std::result::Result<T, Problem>;

/// Why a request failed.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    slug: Slug,
    /// Instead of the usual status of the slug.
    status: Option<StatusCode>,
    message: String,
    /// The status of the job that the request is about, if the request conflicts with it.
    job_status: Option<Status>,
    headers: Vec<(header::HeaderName, HeaderValue)>,
    cause: Option<Cause>,
}

/// The error behind a response of the router, in the response's extensions. It is
/// never sent to clients. It is for programs that call the router in their own process
/// and may see details that clients may not.
///
/// ```
/// # use longshore::{Client, api::{Api, Cause}};
/// # use tower::ServiceExt;
/// # tokio::runtime::Runtime::new().unwrap().block_on(async {
/// let without_tables = Client::connect("sqlite::memory:").await?;
/// let request = axum::http::Request::get("/queues").body(axum::body::Body::empty()).unwrap();
/// let response = Api::new(without_tables).router().oneshot(request).await.unwrap();
/// assert_eq!(response.status(), 503);
/// assert!(response.extensions().get::<Cause>().unwrap().is_schema());
/// # Ok::<(), longshore::Error>(())
/// # }).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct Cause(Arc<Error>);

impl Deref for Cause {
    type Target = Error;

    fn deref(&self) -> &Error {
        &self.0
    }
}

/// An error response.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(super) struct ProblemBody {
    /// A slug for programs.
    error: Slug,
    /// A text for people.
    message: String,
    /// The job's status, if it does not allow the request (`conflict`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = StatusSchema, required = false)]
    job_status: Option<Status>,
}

/// The kind of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ErrorSlug)]
pub(crate) enum Slug {
    NotFound,
    BadRequest,
    Conflict,
    Validation,
    Unauthorized,
    Forbidden,
    TooLarge,
    RateLimited,
    MethodNotAllowed,
    UnsupportedMediaType,
    Misdirected,
    Timeout,
    Unavailable,
    Internal,
}

impl Slug {
    fn status(self) -> StatusCode {
        match self {
            Slug::NotFound => StatusCode::NOT_FOUND,
            Slug::BadRequest => StatusCode::BAD_REQUEST,
            Slug::Conflict => StatusCode::CONFLICT,
            Slug::Validation => StatusCode::UNPROCESSABLE_ENTITY,
            Slug::Unauthorized => StatusCode::UNAUTHORIZED,
            Slug::Forbidden => StatusCode::FORBIDDEN,
            Slug::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Slug::RateLimited => StatusCode::TOO_MANY_REQUESTS,
            Slug::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Slug::UnsupportedMediaType => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Slug::Misdirected => StatusCode::MISDIRECTED_REQUEST,
            Slug::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Slug::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Slug::Internal => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

impl Problem {
    pub(crate) fn new(slug: Slug, message: impl Into<String>) -> Self {
        Problem {
            slug,
            status: None,
            message: message.into(),
            job_status: None,
            headers: Vec::new(),
            cause: None,
        }
    }

    pub(super) fn bad_request(message: impl Into<String>) -> Self {
        Problem::new(Slug::BadRequest, message)
    }

    pub(super) fn validation(message: impl Into<String>) -> Self {
        Problem::new(Slug::Validation, message)
    }

    pub(super) fn with_header(mut self, name: header::HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// Sets another status than the usual one of the slug.
    pub(super) fn with_status(mut self, status: StatusCode) -> Self {
        self.status = Some(status);
        self
    }

    /// Adds the location to the message: `items[3]: …`.
    pub(super) fn at(mut self, location: impl std::fmt::Display) -> Self {
        self.message = format!("{location}: {}", self.message);
        self
    }

    /// An invalid value in a query string or a path is a bad request (400), not a
    /// validation error (422).
    pub(crate) fn in_url(error: Error) -> Self {
        if error.is_invalid() {
            Problem::bad_request(error.to_string()).with_cause(error)
        } else {
            error.into()
        }
    }

    /// A handler has panicked. The log has the message of the panic under the id of the request.
    pub(crate) fn panicked(panic: &(dyn Any + Send), request_id: &str) -> Self {
        Problem::new(
            Slug::Internal,
            format!("internal error; the server log has the reason under the request id {request_id}"),
        )
        .with_cause(Error::internal(format!("the handler panicked: {}", panic_message(panic))))
    }

    fn with_cause(mut self, error: Error) -> Self {
        self.cause = Some(Cause(Arc::new(error)));
        self
    }

    pub(crate) fn slug(&self) -> Slug {
        self.slug
    }

    /// Whether the server or its database failed, so that the same request may succeed later.
    pub(super) fn is_servers_fault(&self) -> bool {
        self.slug.status().is_server_error()
    }

    /// Whether only a part of a request failed, and may succeed later: another client's transaction holds what it
    /// changes, its queue is full, or the database refuses it for a reason that we do not know. Other parts of the
    /// request are not affected.
    pub(super) fn is_partial(&self) -> bool {
        match self.slug {
            Slug::RateLimited | Slug::Internal => true,
            Slug::Unavailable => self.cause.as_ref().is_none_or(|cause| cause.is_locked()),
            _ => false,
        }
    }

    /// Logs why a part of a request failed. The request succeeds, so `middleware` does not.
    pub(super) fn log_part(&self) {
        match &self.cause {
            Some(cause) => tracing::warn!(error = %cause.0, "a part of a request could not be stored now"),
            None => tracing::debug!(reason = self.message, "a part of a request could not be stored now"),
        }
    }

    pub(super) fn message(&self) -> &str {
        &self.message
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        if error.is_invalid() {
            return Problem::validation(error.to_string()).with_cause(error);
        }
        if error.is_not_found() {
            return Problem::new(Slug::NotFound, error.to_string()).with_cause(error);
        }
        if error.is_conflict() {
            let problem =
                Problem { job_status: error.status(), ..Problem::new(Slug::Conflict, error.to_string()) };
            return problem.with_cause(error);
        }
        if error.is_locked() || error.is_overloaded() {
            return Problem::new(Slug::Unavailable, error.to_string())
                .with_header(header::RETRY_AFTER, HeaderValue::from_static("1"))
                .with_cause(error);
        }
        // The details may name hosts and tables, so only the log gets them (see
        // `middleware`).
        if error.is_unavailable() || error.is_read_only() || error.is_schema() {
            let retry_after = HeaderValue::from_static("1");
            return Problem::new(
                Slug::Unavailable,
                "the database cannot serve this request now; try again in a moment; the server log has the reason",
            )
            .with_header(header::RETRY_AFTER, retry_after)
            .with_cause(error);
        }
        Problem::new(Slug::Internal, "internal error; the server log has the reason under this request id")
            .with_cause(error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Problem { slug, status, message, job_status, headers, cause } = self;
        let status = status.unwrap_or_else(|| slug.status());
        let mut response = (status, Json(ProblemBody { error: slug, message, job_status })).into_response();
        for (name, value) in headers {
            response.headers_mut().insert(name, value);
        }
        response.extensions_mut().insert(slug);
        if let Some(cause) = cause {
            response.extensions_mut().insert(cause);
        }
        response
    }
}
