//! Where commands get their answers: the HTTP API, of a server or in this very
//! process. A command asks the same either way.

mod in_process;
mod server;

use axum::body::Bytes;
use axum::http::{HeaderMap, Method, header};
use longshore::{Client, JobId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::args::{Target, TargetArgs};
use crate::failure::{Code, Failure};

use server::Server;

pub(crate) use in_process::{InProcess, connect, missing_file};

/// What answers.
#[derive(Clone)]
pub(crate) enum Endpoint {
    /// A server, over HTTP.
    Server(Server),
    /// The API's own router on a database, without a socket.
    InProcess(InProcess),
}

impl Endpoint {
    pub(crate) async fn open(target: &TargetArgs) -> Result<Self, Failure> {
        match target.resolve()? {
            Target::Database(url) => InProcess::open(url).await.map(Endpoint::InProcess),
            Target::Server(url) => Server::new(url, target.token()?).map(Endpoint::Server),
        }
    }

    pub(crate) fn get(&self, path: &[&str]) -> Request<'_> {
        Request::new(self, Method::GET, path)
    }

    pub(crate) fn post(&self, path: &[&str]) -> Request<'_> {
        Request::new(self, Method::POST, path)
    }

    pub(crate) fn put(&self, path: &[&str]) -> Request<'_> {
        Request::new(self, Method::PUT, path)
    }

    pub(crate) fn patch(&self, path: &[&str]) -> Request<'_> {
        Request::new(self, Method::PATCH, path)
    }

    pub(crate) fn delete(&self, path: &[&str]) -> Request<'_> {
        Request::new(self, Method::DELETE, path)
    }

    /// Opens an answer without end, that goes on after the event seen last.
    pub(crate) async fn follow(&self, path: &[&str], after: Option<&str>) -> Result<Follow, Failure> {
        let path: Vec<String> = path.iter().map(|&segment| segment.to_owned()).collect();
        let uri = uri(&path, &[])?;
        match self {
            Endpoint::Server(server) => server.follow(&uri, after).await.map(Follow::Server),
            Endpoint::InProcess(api) => api.follow(&uri, after).await.map(Follow::InProcess),
        }
    }

    /// The database's client, where there is no server in between.
    pub(crate) fn client(&self) -> Option<&Client> {
        match self {
            Endpoint::Server(_) => None,
            Endpoint::InProcess(api) => Some(api.client()),
        }
    }

    /// Waits until workers have been told of what was enqueued: this process may
    /// be gone before the hint is. Polling would find the jobs anyway.
    pub(crate) async fn flush(&self) {
        if let Some(client) = self.client() {
            client.flush().await;
        }
    }
}

/// An answer without end, in the pieces in which it arrives.
pub(crate) enum Follow {
    Server(server::Pieces),
    InProcess(in_process::Pieces),
}

impl Follow {
    /// The next piece; `None` when the other side has ended it.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self {
            Follow::Server(pieces) => pieces.next().await,
            Follow::InProcess(pieces) => pieces.next().await,
        }
    }
}

/// Where a listener was before it lost the connection.
const LAST_EVENT_ID: &str = "last-event-id";

/// One question.
pub(crate) struct Request<'a> {
    endpoint: &'a Endpoint,
    method: Method,
    path: Vec<String>,
    query: Vec<(&'static str, String)>,
    body: Result<Option<String>, Failure>,
}

impl<'a> Request<'a> {
    fn new(endpoint: &'a Endpoint, method: Method, path: &[&str]) -> Self {
        let path = path.iter().map(|&segment| segment.to_owned()).collect();
        Request { endpoint, method, path, query: Vec::new(), body: Ok(None) }
    }

    /// A parameter, if there is a value for it.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl ToString>) -> Self {
        self.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    pub(crate) fn body(mut self, body: &impl Serialize) -> Self {
        self.body = serde_json::to_string(body).map(Some).map_err(|error| {
            Failure::new(Code::Problem, format_args!("the request does not serialise: {error}"))
        });
        self
    }

    pub(crate) async fn send(self) -> Result<Reply, Failure> {
        let uri = uri(&self.path, &self.query)?;
        let body = self.body?;
        match self.endpoint {
            Endpoint::Server(server) => {
                refuse_dots(&self.path)?;
                server.send(self.method, &uri, body).await
            }
            Endpoint::InProcess(api) => api.send(self.method, &uri, body).await,
        }
    }
}

/// The path and the query as they stand in a request.
fn uri(path: &[String], query: &[(&'static str, String)]) -> Result<String, Failure> {
    let mut uri = String::new();
    for (at, segment) in path.iter().enumerate() {
        if segment.is_empty() {
            let of = path.get(at.wrapping_sub(1)).map_or("the path", String::as_str);
            return Err(Failure::usage(format_args!("{of}: a name is empty; give 1 to 128 bytes")));
        }
        uri.push('/');
        uri.push_str(&encoded(segment));
    }
    for (at, (name, value)) in query.iter().enumerate() {
        uri.push(if at == 0 { '?' } else { '&' });
        uri.push_str(&format!("{name}={}", encoded(value)));
    }
    Ok(uri)
}

/// A name of dots means another place to whoever reads URLs on the way, however
/// it is written.
fn refuse_dots(path: &[String]) -> Result<(), Failure> {
    match path.iter().find(|segment| matches!(segment.as_str(), "." | "..")) {
        None => Ok(()),
        Some(name) => Err(Failure::usage(format_args!(
            "`{name}` cannot be named in a URL; use --database-url for this one"
        ))),
    }
}

/// Percent-encodes whatever could mean something in a URL.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut shown = String::with_capacity(text.len());
    for byte in text.bytes() {
        if plain(byte) { shown.push(char::from(byte)) } else { shown.push_str(&format!("%{byte:02X}")) }
    }
    shown
}

/// What came back from a request that was carried out.
#[derive(Debug)]
pub(crate) struct Reply {
    text: String,
    /// Where the next page begins, if this is a page and not the last.
    pub(crate) next: Option<JobId>,
}

impl Reply {
    fn new(headers: &HeaderMap, text: String) -> Self {
        let link = headers.get(header::LINK).and_then(|link| link.to_str().ok());
        Reply { text, next: link.and_then(cursor) }
    }

    /// The body as a type of ours. What it holds besides is passed over: a newer
    /// server may say more.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_str(&self.text).map_err(|error| {
            Failure::new(
                Code::Problem,
                format_args!(
                    "the answer is not what this program understands: {error}; are both of one version?"
                ),
            )
        })
    }
}

/// The cursor of `<…?cursor=ID>; rel="next"`.
fn cursor(link: &str) -> Option<JobId> {
    let (url, _) = link.strip_prefix('<')?.split_once('>')?;
    let (_, query) = url.split_once('?')?;
    query.split('&').find_map(|pair| pair.strip_prefix("cursor="))?.parse().ok()
}

/// What a refusal looks like on the wire.
#[derive(Deserialize)]
struct Problem {
    error: String,
    message: String,
}

/// Why a request was not carried out, as an exit code and words for people.
fn refusal(status: u16, text: &str) -> Failure {
    let Ok(Problem { error, message }) = serde_json::from_str(text) else {
        let code = if matches!(status, 502..=504) { Code::Unavailable } else { Code::Problem };
        return Failure::new(
            code,
            format_args!(
                "status {status}, and not in Longshore's words; is --server the address of its API?"
            ),
        );
    };
    match error.as_str() {
        "not_found" => Failure::new(Code::NotFound, message),
        "conflict" => Failure::new(Code::Conflict, message),
        "unauthorized" => Failure::new(
            Code::Denied,
            format_args!(
                "the server asks for a token ({message}); put one into LONGSHORE_TOKEN or give --token-file FILE. \
                 `longshore tokens create NAME --scope read,enqueue,operate` makes one, on the database"
            ),
        ),
        "forbidden" => Failure::new(
            Code::Denied,
            format_args!(
                "{message}; bring another token in LONGSHORE_TOKEN or --token-file. \
                 `longshore tokens list` shows what each may do, on the database"
            ),
        ),
        "unavailable" | "timeout" | "rate_limited" => Failure::new(Code::Unavailable, message),
        "internal" => Failure::new(Code::Problem, message),
        _ => Failure::usage(message),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_and_values_are_encoded_whatever_is_in_them() {
        let path = ["queues", "a/b ü?", "pause"].map(str::to_owned);
        let query = [("tag", "x&y=z".to_owned()), ("limit", "5".to_owned())];
        assert_eq!(uri(&path, &query).unwrap(), "/queues/a%2Fb%20%C3%BC%3F/pause?tag=x%26y%3Dz&limit=5");
        let empty = uri(&["queues", "", "pause"].map(str::to_owned), &[]).unwrap_err();
        assert_eq!(empty.to_string(), "queues: a name is empty; give 1 to 128 bytes");
    }

    #[test]
    fn a_name_of_dots_is_refused_where_urls_are_read() {
        for name in [".", ".."] {
            assert_eq!(refuse_dots(&["queues".into(), name.into()]).unwrap_err().code, Code::Usage);
        }
        assert!(refuse_dots(&["queues".into(), "...".into()]).is_ok());
    }

    #[test]
    fn the_next_page_is_in_the_link() {
        let id = "01990000-0000-7000-8000-000000000000";
        let next = |link: &str| cursor(link).map(|id| id.to_string());
        assert_eq!(next(&format!("</jobs?limit=2&cursor={id}>; rel=\"next\"")).as_deref(), Some(id));
        for link in ["", "</jobs>; rel=\"next\"", "</jobs?cursor=7>; rel=\"next\"", "/jobs?cursor"] {
            assert_eq!(next(link), None, "{link}");
        }
    }

    #[test]
    fn every_refusal_has_a_code_and_the_servers_words() {
        let cases = [
            (400, "bad_request", Code::Usage),
            (401, "unauthorized", Code::Denied),
            (403, "forbidden", Code::Denied),
            (404, "not_found", Code::NotFound),
            (405, "method_not_allowed", Code::Usage),
            (409, "conflict", Code::Conflict),
            (413, "too_large", Code::Usage),
            (421, "misdirected", Code::Usage),
            (422, "validation", Code::Usage),
            (429, "rate_limited", Code::Unavailable),
            (500, "internal", Code::Problem),
            (503, "unavailable", Code::Unavailable),
            (504, "timeout", Code::Unavailable),
        ];
        for (status, slug, code) in cases {
            let told = refusal(status, &format!(r#"{{"error":"{slug}","message":"the crane is stuck"}}"#));
            assert_eq!(told.code, code, "{slug}");
            assert!(told.to_string().contains("the crane is stuck"), "{told}");
        }
        assert_eq!(refusal(502, "<html>").code, Code::Unavailable);
        assert!(refusal(200, "<html>").to_string().contains("--server"));
    }
}
