//! The HTTP API called inside this process: the library's router on a database, with no
//! socket and no token. A failed request carries the library's original error.

use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::http::{self, Method, header};
use axum::response::Response;
use longshore::api::{Api, Cause};
use longshore::{Client, UnknownKinds, builtin};
use tower::ServiceExt;

use super::{LAST_EVENT_ID, Reply, error_response};
use crate::failure::{Code, Failure};

/// Effectively no request timeout: the user sees that the command is still running and can
/// stop it.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone)]
pub(crate) struct InProcess {
    client: Client,
    router: Router,
}

impl InProcess {
    pub(super) async fn open(url: &str) -> Result<Self, Failure> {
        let client = connect(url).await?;
        let router = Api::new(client.clone())
            // A user with direct access to the database may enqueue before the first worker
            // has started and registered its kinds.
            .unknown_kinds(UnknownKinds::Allow)
            .check(builtin::check_payload)
            .timeout(REQUEST_TIMEOUT)
            .router();
        Ok(InProcess { client, router })
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) async fn send(
        &self,
        method: Method,
        uri: &str,
        body: Option<String>,
    ) -> Result<Reply, Failure> {
        let mut request = http::Request::builder().method(method).uri(uri);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(Body::from(body.unwrap_or_default())).map_err(call_failed)?;
        let (parts, body) = self.call(request).await.into_parts();
        let text = read(body).await?;
        if parts.status.is_success() {
            Ok(Reply::new(&parts.headers, text))
        } else {
            Err(failure(&parts, &text))
        }
    }

    pub(super) async fn follow(&self, uri: &str, after: Option<&str>) -> Result<Chunks, Failure> {
        let mut request = http::Request::get(uri);
        if let Some(after) = after {
            request = request.header(LAST_EVENT_ID, after);
        }
        let (parts, body) = self.call(request.body(Body::empty()).map_err(call_failed)?).await.into_parts();
        if parts.status.is_success() { Ok(Chunks(body)) } else { Err(failure(&parts, &read(body).await?)) }
    }

    async fn call(&self, request: http::Request<Body>) -> Response {
        match self.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

async fn read(body: Body) -> Result<String, Failure> {
    let bytes = to_bytes(body, usize::MAX).await.map_err(call_failed)?;
    String::from_utf8(bytes.to_vec()).map_err(call_failed)
}

/// The original error if the API attached one, otherwise what the response says.
fn failure(parts: &http::response::Parts, text: &str) -> Failure {
    match parts.extensions.get::<Cause>() {
        Some(cause) => Failure::from(&**cause),
        None => error_response(parts.status.as_u16(), text),
    }
}

/// The body of a streaming response, chunk by chunk.
pub(crate) struct Chunks(Body);

impl Chunks {
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut self.0).poll_frame(cx)).await {
            // A frame without data holds trailers, which are not used.
            if let Ok(data) = frame.map_err(call_failed)?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }
}

fn call_failed(error: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Problem, format_args!("calling the API in this process failed: {error}"))
}

/// Connects to a database that must exist already.
pub(crate) async fn connect(url: &str) -> Result<Client, Failure> {
    match missing_file(url) {
        None => Ok(Client::connect(url).await?),
        Some(file) => Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database file `{}` does not exist; check the path, \
                 or run `longshore migrate` to create it",
                file.display()
            ),
        )),
    }
}

/// The path of the SQLite file if it does not exist. Connecting would create it, and a
/// mistyped path would look like an empty queue.
pub(crate) fn missing_file(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    let names_a_file = !path.is_empty() && path != ":memory:";
    names_a_file.then(|| PathBuf::from(path)).filter(|file| !file.exists())
}
