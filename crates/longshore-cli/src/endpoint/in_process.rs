//! The API's own router on a database, called in this process: no socket, no
//! token, and the true error behind a refusal.

use std::future::poll_fn;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes, HttpBody, to_bytes};
use axum::http::{self, Method, header};
use axum::response::Response;
use longshore::Client;
use longshore::api::{Api, Cause, UnknownKinds};
use tower::ServiceExt;

use super::{LAST_EVENT_ID, Reply, refusal};
use crate::builtin;
use crate::failure::{Code, Failure};

/// Whoever waits here can see for themselves how long it takes, and can end it.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone)]
pub(crate) struct InProcess {
    client: Client,
    router: Router,
}

impl InProcess {
    pub(super) async fn open(url: &str) -> Result<Self, Failure> {
        let client = connect(url).await?;
        let router = Api::new(client.clone())
            // Whoever has the database may enqueue before the first worker starts.
            .unknown_kinds(UnknownKinds::Allow)
            .check(builtin::check_payload)
            .timeout(PATIENCE)
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
        let request = request.body(Body::from(body.unwrap_or_default())).map_err(wrong)?;
        let (parts, body) = self.call(request).await.into_parts();
        let text = read(body).await?;
        if parts.status.is_success() {
            Ok(Reply::new(&parts.headers, text))
        } else {
            Err(refused(&parts, &text))
        }
    }

    pub(super) async fn follow(&self, uri: &str, after: Option<&str>) -> Result<Pieces, Failure> {
        let mut request = http::Request::get(uri);
        if let Some(after) = after {
            request = request.header(LAST_EVENT_ID, after);
        }
        let (parts, body) = self.call(request.body(Body::empty()).map_err(wrong)?).await.into_parts();
        if parts.status.is_success() { Ok(Pieces(body)) } else { Err(refused(&parts, &read(body).await?)) }
    }

    async fn call(&self, request: http::Request<Body>) -> Response {
        match self.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

async fn read(body: Body) -> Result<String, Failure> {
    let bytes = to_bytes(body, usize::MAX).await.map_err(wrong)?;
    String::from_utf8(bytes.to_vec()).map_err(wrong)
}

fn refused(parts: &http::response::Parts, text: &str) -> Failure {
    match parts.extensions.get::<Cause>() {
        Some(cause) => Failure::from(&**cause),
        None => refusal(parts.status.as_u16(), text),
    }
}

/// An answer that comes in pieces.
pub(crate) struct Pieces(Body);

impl Pieces {
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut self.0).poll_frame(cx)).await {
            // What is no data says something about the answer, and nothing here.
            if let Ok(data) = frame.map_err(wrong)?.into_data() {
                return Ok(Some(data));
            }
        }
        Ok(None)
    }
}

fn wrong(error: impl std::fmt::Display) -> Failure {
    Failure::new(Code::Problem, format_args!("the API cannot be called: {error}"))
}

/// A client of a database that is there.
pub(crate) async fn connect(url: &str) -> Result<Client, Failure> {
    match missing_file(url) {
        None => Ok(Client::connect(url).await?),
        Some(file) => Err(Failure::new(
            Code::Schema,
            format_args!(
                "the database file `{}` does not exist; check the path, \
                 or run `longshore migrate` to make it",
                file.display()
            ),
        )),
    }
}

/// An SQLite file that is not there. Connecting would make it, and a mistyped
/// path should be told, not answered from an empty queue.
pub(crate) fn missing_file(url: &str) -> Option<PathBuf> {
    let path = url.strip_prefix("sqlite:")?;
    let path = path.strip_prefix("//").unwrap_or(path);
    let names_a_file = !path.is_empty() && path != ":memory:";
    names_a_file.then(|| PathBuf::from(path)).filter(|file| !file.exists())
}
