//! The HTTP API called inside this process: the library's router on a database, with no
//! socket and no token. A failed request carries the library's original error.

use std::future::poll_fn;
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::http::{self, Method, header};
use axum::response::Response;
use longshore::api::{Api, Cause, Operations};
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
            // This process ends soon.
            .operations(Operations::Leave)
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
    if let Some(file) = file_of(url) {
        require_file(&file, std::fs::File::open(&file).map(drop))?;
    }
    Ok(Client::connect(url).await?)
}

/// Fails if an SQLite file does not exist, or cannot be opened. Connecting would create a
/// missing one, and a mistyped path would look like an empty queue.
fn require_file(file: &Path, opened: io::Result<()>) -> Result<(), Failure> {
    let file = file.display();
    match opened {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database file `{file}` does not exist; check the path, \
                 or run `longshore migrate` to create it"
            ),
        )),
        Err(error) => Err(Failure::new(
            Code::Unavailable,
            format_args!(
                "the database file `{file}` cannot be opened: {error}; check the path and its permissions, \
                 and the user that runs this command"
            ),
        )),
    }
}

/// The path of the SQLite file that a URL names.
pub(crate) fn file_of(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    // The library refuses parameters.
    let names_a_file = !path.is_empty() && path != ":memory:" && !path.contains('?');
    names_a_file.then(|| PathBuf::from(path))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn permission_denied_is_not_reported_as_missing() {
        let failed = |kind: io::ErrorKind| require_file(Path::new("jobs.db"), Err(kind.into())).unwrap_err();
        let missing = failed(io::ErrorKind::NotFound);
        assert_eq!(missing.code, Code::Schema);
        assert!(missing.to_string().contains("does not exist"), "{missing}");
        for kind in [io::ErrorKind::PermissionDenied, io::ErrorKind::NotADirectory] {
            let denied = failed(kind);
            assert_eq!(denied.code, Code::Unavailable);
            let message = denied.to_string();
            assert!(!message.contains("does not exist") && message.contains("permissions"), "{message}");
        }
        assert!(failed(io::ErrorKind::PermissionDenied).to_string().contains("permission denied"));
    }

    #[test]
    fn a_url_names_a_file_or_memory() {
        assert_eq!(file_of("sqlite:./a.db"), Some("./a.db".into()));
        assert_eq!(file_of("sqlite:///a.db"), Some("/a.db".into()));
        for url in ["sqlite::memory:", "sqlite:", "sqlite:a.db?mode=rw", "postgres://a/b"] {
            assert_eq!(file_of(url), None, "{url}");
        }
    }
}
