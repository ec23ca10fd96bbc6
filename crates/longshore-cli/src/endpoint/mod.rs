//! How commands call the HTTP API: over the network on a server, or inside this process
//! on a database. Commands use the same [`Request`] for both.

mod in_process;
mod server;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderName, Method, header};
use longshore::{Client, JobId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::args::{Target, TargetArgs};
use crate::failure::{Code, Failure};
use crate::output::note;

use server::Server;

pub(crate) use in_process::{InProcess, connect, file_of};

/// Where requests go.
#[derive(Clone)]
pub(crate) enum Endpoint {
    /// A server, over HTTP.
    Server(Server),
    /// The API's own router on a database, in this process.
    InProcess(InProcess),
}

impl Endpoint {
    pub(crate) async fn open(target: &TargetArgs) -> Result<Self, Failure> {
        let resolved = target.resolve()?;
        if let Some(choice) = target.choice_note() {
            note(choice);
        }
        match resolved {
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

    /// Opens an endless event stream. It continues after the event with the id `after`.
    pub(crate) async fn follow(&self, path: &[&str], after: Option<&str>) -> Result<EventStream, Failure> {
        let path: Vec<String> = path.iter().map(|&segment| segment.to_owned()).collect();
        let uri = uri(&path, &[])?;
        match self {
            Endpoint::Server(server) => server.follow(&uri, after).await.map(EventStream::Server),
            Endpoint::InProcess(api) => api.follow(&uri, after).await.map(EventStream::InProcess),
        }
    }

    /// The database client, if no server is used.
    pub(crate) fn client(&self) -> Option<&Client> {
        match self {
            Endpoint::Server(_) => None,
            Endpoint::InProcess(api) => Some(api.client()),
        }
    }

    /// Waits until the wake-ups for enqueued jobs are sent. Otherwise this process could exit
    /// first, and workers would find the jobs only by polling.
    pub(crate) async fn flush(&self) {
        if let Some(client) = self.client() {
            client.flush().await;
        }
    }
}

/// An endless event stream, as chunks of bytes.
pub(crate) enum EventStream {
    Server(server::Chunks),
    InProcess(in_process::Chunks),
}

impl EventStream {
    /// The next chunk; `None` when the server has closed the stream.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        match self {
            EventStream::Server(chunks) => chunks.next().await,
            EventStream::InProcess(chunks) => chunks.next().await,
        }
    }
}

/// The header with the last event a client saw before it lost the connection.
const LAST_EVENT_ID: &str = "last-event-id";

/// One request to the API.
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

    /// Adds a query parameter if it has a value.
    pub(crate) fn query(mut self, name: &'static str, value: Option<impl ToString>) -> Self {
        self.query.extend(value.map(|value| (name, value.to_string())));
        self
    }

    pub(crate) fn body(mut self, body: &impl Serialize) -> Self {
        self.body = serde_json::to_string(body).map(Some).map_err(|error| {
            Failure::new(Code::Problem, format_args!("cannot serialise the request: {error}"))
        });
        self
    }

    pub(crate) async fn send(self) -> Result<Reply, Failure> {
        let uri = uri(&self.path, &self.query)?;
        let body = self.body?;
        match self.endpoint {
            Endpoint::Server(server) => {
                reject_dot_segments(&self.path)?;
                server.send(self.method, &uri, body).await
            }
            Endpoint::InProcess(api) => api.send(self.method, &uri, body).await,
        }
    }
}

/// The path and query of a request, percent-encoded.
fn uri(path: &[String], query: &[(&'static str, String)]) -> Result<String, Failure> {
    let mut uri = String::new();
    for (at, segment) in path.iter().enumerate() {
        if segment.is_empty() {
            let of = path.get(at.wrapping_sub(1)).map_or("the path", String::as_str);
            return Err(Failure::usage(format_args!("{of}: the name is empty; give 1 to 128 bytes")));
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

/// Rejects `.` and `..` as names. HTTP clients and proxies resolve them as path segments,
/// even percent-encoded, so the request would reach another path.
fn reject_dot_segments(path: &[String]) -> Result<(), Failure> {
    match path.iter().find(|segment| matches!(segment.as_str(), "." | "..")) {
        None => Ok(()),
        Some(name) => Err(Failure::usage(format_args!(
            "the name `{name}` cannot be part of a URL; use --database-url instead of --server for it"
        ))),
    }
}

/// Percent-encodes every character that has a meaning in a URL.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if plain(byte) { encoded.push(char::from(byte)) } else { encoded.push_str(&format!("%{byte:02X}")) }
    }
    encoded
}

/// The response to a successful request.
#[derive(Debug)]
pub(crate) struct Reply {
    text: String,
    /// The cursor of the next page, if there is one.
    pub(crate) next: Option<JobId>,
    /// The same, of a list whose cursors are not ids.
    pub(crate) cursor: Option<String>,
    /// Whether an enqueue created the job: `created`, `existing` or `replaced`.
    pub(crate) enqueued_as: Option<String>,
    /// The offset of the next page: how many matches it still has to skip.
    pub(crate) next_offset: u32,
}

impl Reply {
    fn new(headers: &HeaderMap, text: String) -> Self {
        let value = |name: HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
        let parameter = |name| value(header::LINK).and_then(|link| link_parameter(link, name));
        Reply {
            text,
            next: parameter("cursor=").and_then(|id| id.parse().ok()),
            cursor: parameter("cursor=").map(str::to_owned),
            next_offset: parameter("offset=").and_then(|offset| offset.parse().ok()).unwrap_or(0),
            enqueued_as: value(HeaderName::from_static("enqueued-as")).map(str::to_owned),
        }
    }

    /// The size of the body in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.text.len()
    }

    /// The number of items of a list.
    pub(crate) fn items(&self) -> Result<usize, Failure> {
        Ok(self.read::<Vec<Box<RawValue>>>()?.len())
    }

    /// Adds the items of the next page.
    pub(crate) fn append(&mut self, page: Reply) -> Result<(), Failure> {
        let mut items: Vec<Box<RawValue>> = self.read()?;
        items.extend(page.read::<Vec<Box<RawValue>>>()?);
        let items: Vec<&str> = items.iter().map(|item| item.get()).collect();
        *self = Reply { text: format!("[{}]", items.join(",")), ..page };
        Ok(())
    }

    /// The body as a type of this program. Unknown fields are ignored, because a newer
    /// server may send more.
    pub(crate) fn read<T: DeserializeOwned>(&self) -> Result<T, Failure> {
        serde_json::from_str(&self.text).map_err(|error| {
            Failure::new(
                Code::Problem,
                format_args!(
                    "cannot understand the server's response: {error}; do the server and this program have the same version?"
                ),
            )
        })
    }
}

/// The value of a parameter, such as `cursor=`, of `<…?cursor=ID>; rel="next"`.
fn link_parameter<'l>(link: &'l str, name: &str) -> Option<&'l str> {
    let (url, _) = link.strip_prefix('<')?.split_once('>')?;
    let (_, query) = url.split_once('?')?;
    query.split('&').find_map(|pair| pair.strip_prefix(name))
}

/// The body of an error response.
#[derive(Deserialize)]
struct Problem {
    error: String,
    message: String,
}

/// Converts an error response into a failure.
fn error_response(status: u16, text: &str) -> Failure {
    let Ok(Problem { error, message }) = serde_json::from_str(text) else {
        let code = if matches!(status, 502..=504) { Code::Unavailable } else { Code::Problem };
        return Failure::new(
            code,
            format_args!(
                "the response has status {status} and is not from a Longshore API; is --server the right address?"
            ),
        );
    };
    match error.as_str() {
        "not_found" => Failure::new(Code::NotFound, message),
        "conflict" => Failure::new(Code::Conflict, message),
        "unauthorized" => Failure::new(
            Code::Denied,
            format_args!(
                "the server requires a token ({message}); set LONGSHORE_TOKEN or pass --token-file FILE. \
                 To create a token, run `longshore tokens create NAME --scope read,enqueue,operate` on the database"
            ),
        ),
        "forbidden" => Failure::new(
            Code::Denied,
            format_args!(
                "{message}; use another token, with LONGSHORE_TOKEN or --token-file. \
                 To see what each token allows, run `longshore tokens list` on the database"
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
    fn names_and_values_are_percent_encoded() {
        let path = ["queues", "a/b ü?", "pause"].map(str::to_owned);
        let query = [("tag", "x&y=z".to_owned()), ("limit", "5".to_owned())];
        assert_eq!(uri(&path, &query).unwrap(), "/queues/a%2Fb%20%C3%BC%3F/pause?tag=x%26y%3Dz&limit=5");
        let empty = uri(&["queues", "", "pause"].map(str::to_owned), &[]).unwrap_err();
        assert_eq!(empty.to_string(), "queues: the name is empty; give 1 to 128 bytes");
    }

    #[test]
    fn dot_segments_are_rejected() {
        for name in [".", ".."] {
            assert_eq!(reject_dot_segments(&["queues".into(), name.into()]).unwrap_err().code, Code::Usage);
        }
        assert!(reject_dot_segments(&["queues".into(), "...".into()]).is_ok());
    }

    #[test]
    fn the_cursor_of_the_next_page_is_read_from_the_link_header() {
        let id = "01990000-0000-7000-8000-000000000000";
        let next = |link: &str| {
            let headers = HeaderMap::from_iter([(header::LINK, link.parse().unwrap())]);
            let reply = Reply::new(&headers, String::new());
            (reply.next.map(|id| id.to_string()), reply.next_offset)
        };
        assert_eq!(next(&format!("</jobs?limit=2&cursor={id}>; rel=\"next\"")), (Some(id.into()), 0));
        assert_eq!(next(&format!("</jobs?cursor={id}&offset=7>; rel=\"next\"")), (Some(id.into()), 7));
        for link in ["", "</jobs>; rel=\"next\"", "</jobs?cursor=7>; rel=\"next\"", "/jobs?cursor"] {
            assert_eq!(next(link), (None, 0), "{link}");
        }
    }

    #[test]
    fn every_error_response_has_an_exit_code_and_the_servers_message() {
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
            let failure =
                error_response(status, &format!(r#"{{"error":"{slug}","message":"the crane is stuck"}}"#));
            assert_eq!(failure.code, code, "{slug}");
            assert!(failure.to_string().contains("the crane is stuck"), "{failure}");
        }
        assert_eq!(error_response(502, "<html>").code, Code::Unavailable);
        assert!(error_response(200, "<html>").to_string().contains("--server"));
    }
}
