//! The API's own router on a database, called in this process: no socket, no
//! token, and the true error behind a refusal.

use std::path::PathBuf;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{self, Method, header};
use longshore::Client;
use longshore::api::{Api, Cause, UnknownKinds};
use tower::ServiceExt;

use super::{Reply, refusal};
use crate::builtin;
use crate::failure::{Code, Failure};

/// Whoever waits here can see for themselves how long it takes, and can end it.
const PATIENCE: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Clone)]
pub(crate) struct Here {
    client: Client,
    router: Router,
}

impl Here {
    pub(super) async fn open(url: &str) -> Result<Self, Failure> {
        let client = connect(url).await?;
        let router = Api::new(client.clone())
            // Whoever has the database may enqueue before the first worker starts.
            .unknown_kinds(UnknownKinds::Allow)
            .check(builtin::check_payload)
            .timeout(PATIENCE)
            .router();
        Ok(Here { client, router })
    }

    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) async fn send(
        &self,
        method: Method,
        target: &str,
        body: Option<String>,
    ) -> Result<Reply, Failure> {
        let mut request = http::Request::builder().method(method).uri(target);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let request = request.body(Body::from(body.unwrap_or_default())).map_err(wrong)?;
        let response = match self.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let (parts, body) = response.into_parts();
        let body = to_bytes(body, usize::MAX).await.map_err(wrong)?;
        let text = String::from_utf8(body.to_vec()).map_err(wrong)?;
        match parts.extensions.get::<Cause>() {
            _ if parts.status.is_success() => Ok(Reply::new(&parts.headers, text)),
            Some(cause) => Err(Failure::from(&**cause)),
            None => Err(refusal(parts.status.as_u16(), &text)),
        }
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
