//! The client that cases use: it calls the API in process or over a real socket.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::response::Parts;
use axum::http::{HeaderMap, Request};
use longshore::UnknownKinds;
use longshore::api::{Api, Limits, serve};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tower::ServiceExt;

use crate::fixture::{Fixture, SECOND};

/// The longest time that a call can request to wait.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(20);

/// Fails if a call that may wait for [`LONGEST_WAIT`] waits until then. It may return the same then.
pub(crate) async fn before_timeout<T>(call: impl Future<Output = T>) -> T {
    tokio::time::timeout(LONGEST_WAIT - 3 * SECOND, call).await.expect("the call waited until its timeout")
}

/// A client of an API. It calls the router directly unless the API listens on a socket.
#[derive(Clone)]
pub(crate) struct HttpClient {
    router: Router,
    /// The address, if the API listens on a socket.
    address: Option<std::net::SocketAddr>,
    token: Option<String>,
}

#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) text: String,
}

impl Response {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// Fails unless the response has this status.
    #[track_caller]
    pub(crate) fn expect_status(self, status: u16) -> Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    /// Fails unless the response is an error with this status, this slug and a message
    /// that contains `part`.
    #[track_caller]
    pub(crate) fn expect_problem(self, status: u16, slug: &str, part: &str) -> Self {
        let response = self.expect_status(status);
        let problem = response.json();
        assert_eq!(problem["error"], slug, "{response:?}");
        let message = problem["message"].as_str().expect("a message");
        assert!(message.contains(part), "{message:?} does not contain {part:?}");
        assert!(!response.header("x-request-id").is_empty(), "{response:?}");
        response
    }
}

impl HttpClient {
    /// An API without tokens that accepts any kind, called in process.
    pub(crate) fn new(fixture: &Fixture) -> Self {
        HttpClient::for_api(Api::new(fixture.client()).unknown_kinds(UnknownKinds::Allow))
    }

    pub(crate) fn for_api(api: Api) -> Self {
        HttpClient { router: api.router(), address: None, token: None }
    }

    /// The same API over a socket.
    pub(crate) async fn listening(self, limits: Limits) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(serve(listener, self.router.clone(), limits, std::future::pending()));
        HttpClient { address: Some(address), ..self }
    }

    pub(crate) fn address(&self) -> std::net::SocketAddr {
        self.address.expect("a listening API")
    }

    pub(crate) fn with_token(&self, token: &str) -> Self {
        HttpClient { token: Some(token.into()), ..self.clone() }
    }

    pub(crate) async fn get(&self, path: &str) -> Response {
        self.send("GET", path, &[], "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.json("POST", path, body).await
    }

    pub(crate) async fn json(&self, method: &str, path: &str, body: &Value) -> Response {
        self.send(method, path, &[("content-type", "application/json")], &body.to_string()).await
    }

    pub(crate) async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let mut headers = headers.to_vec();
        if let Some(bearer) = &bearer {
            headers.push(("authorization", bearer));
        }
        match self.address {
            None => self.call_in_process(method, path, &headers, body).await,
            Some(_) => self.call_over_socket(method, path, &headers, body).await,
        }
    }

    async fn call_in_process(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        let (parts, body) = self.dispatch(method, path, headers, body).await;
        let is_stream = parts.headers.get("content-type").is_some_and(|kind| kind == "text/event-stream");
        let bytes = if is_stream {
            Default::default()
        } else {
            axum::body::to_bytes(body, usize::MAX).await.expect("a body")
        };
        Response {
            status: parts.status.as_u16(),
            headers: parts.headers,
            text: String::from_utf8_lossy(&bytes).into_owned(),
        }
    }

    /// A response whose body may be endless, in process.
    pub(crate) async fn open(&self, path: &str, headers: &[(&str, &str)]) -> (u16, HeaderMap, Body) {
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        let bearer = bearer.iter().map(|bearer| ("authorization", bearer.as_str()));
        let headers: Vec<_> = headers.iter().copied().chain(bearer).collect();
        let (parts, body) = self.dispatch("GET", path, &headers, "").await;
        (parts.status.as_u16(), parts.headers, body)
    }

    async fn dispatch(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (Parts, Body) {
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_owned())).expect("a request");
        self.router.clone().oneshot(request).await.expect("infallible").into_parts()
    }

    async fn call_over_socket(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> Response {
        let mut request =
            format!("{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n", body.len());
        if !headers.iter().any(|(name, _)| *name == "host") {
            request += &format!("host: {}\r\n", self.address());
        }
        for (name, value) in headers {
            request += &format!("{name}: {value}\r\n");
        }
        let mut stream = TcpStream::connect(self.address()).await.expect("connect");
        // The server may close the connection before it has read everything.
        for part in [request.as_str(), "\r\n", body] {
            let _ = stream.write_all(part.as_bytes()).await;
        }
        let mut response = Vec::new();
        let _ = stream.read_to_end(&mut response).await;
        parse(&response)
    }
}

/// Parses a response that was received over a socket.
pub(crate) fn parse(bytes: &[u8]) -> Response {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap_or(0);
    let mut headers = HeaderMap::new();
    for (name, value) in lines.filter_map(|line| line.split_once(": ")) {
        headers.append(
            axum::http::HeaderName::try_from(name).expect("a name"),
            axum::http::HeaderValue::try_from(value).expect("a value"),
        );
    }
    Response { status, headers, text: body.into() }
}
