//! A server's API over HTTP. The token is sent in the `Authorization` header and appears
//! nowhere else.

use std::error::Error;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use longshore::builtin;
use url::Url;

use super::{LAST_EVENT_ID, Reply, error_response};
use crate::failure::{Code, Failure};
use crate::secret::Secret;
use crate::traces;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer than the server's own request timeout, so that the server reports a timeout
/// itself.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(120);
/// The largest response. The largest one of a server is a page with one job of several MiB.
const MAX_RESPONSE: usize = 64 * 1024 * 1024;
/// Effectively unlimited, for event streams.
const NO_TIMEOUT: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

#[derive(Clone)]
pub(crate) struct Server {
    base: String,
    http: reqwest::Client,
}

impl Server {
    pub(super) fn new(url: &str, token: Option<Secret>) -> Result<Self, Failure> {
        let base = base(url)?;
        let mut headers = HeaderMap::new();
        if let Some(token) = token {
            headers.insert(header::AUTHORIZATION, bearer(&token)?);
        }
        let mut http = reqwest::Client::builder()
            // Following a redirect would send the token to another server.
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_TIMEOUT)
            .timeout(RESPONSE_TIMEOUT)
            .user_agent(concat!("longshore/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .tls_backend_preconfigured(builtin::tls()?);
        if is_loopback(&base) {
            // A proxy cannot reach this machine's loopback address.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| {
            Failure::new(Code::Problem, format_args!("cannot create the HTTP client: {error}"))
        })?;
        Ok(Server { base: base.as_str().trim_end_matches('/').to_owned(), http })
    }

    pub(super) async fn send(
        &self,
        method: Method,
        uri: &str,
        body: Option<String>,
    ) -> Result<Reply, Failure> {
        let mut request = self.http.request(method, format!("{}{uri}", self.base));
        if let Some(body) = body {
            request = request.header(header::CONTENT_TYPE, "application/json").body(body);
        }
        if let Some(traceparent) = traces::traceparent() {
            request = request.header("traceparent", traceparent);
        }
        let mut response = request.send().await.map_err(|error| self.unreachable(error))?;
        if !response.status().is_success() {
            return Err(self.failure(response).await);
        }
        let headers = std::mem::take(response.headers_mut());
        let bytes = self.read(response).await?;
        Ok(Reply::new(&headers, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Reads the body of a response. Another program may listen at the address and send without an end.
    async fn read(&self, mut response: reqwest::Response) -> Result<Vec<u8>, Failure> {
        let mut bytes = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.unreachable(error))? {
            if bytes.len() + chunk.len() > MAX_RESPONSE {
                return Err(Failure::new(
                    Code::Problem,
                    format_args!(
                        "the response of {} is larger than {} MiB; is --server the right address?",
                        self.base,
                        MAX_RESPONSE / (1024 * 1024)
                    ),
                ));
            }
            bytes.extend_from_slice(&chunk);
        }
        Ok(bytes)
    }

    pub(super) async fn follow(&self, uri: &str, after: Option<&str>) -> Result<Chunks, Failure> {
        // The stream may last forever, but the response must start in time.
        let mut request = self.http.get(format!("{}{uri}", self.base)).timeout(NO_TIMEOUT);
        if let Some(after) = after {
            request = request.header(LAST_EVENT_ID, after);
        }
        let response = match tokio::time::timeout(RESPONSE_TIMEOUT, request.send()).await {
            Ok(response) => response.map_err(|error| self.unreachable(error))?,
            Err(_) => return Err(self.no_response("it accepted the request and sent nothing")),
        };
        if response.status().is_success() {
            Ok(Chunks { server: self.clone(), response })
        } else {
            Err(self.failure(response).await)
        }
    }

    /// Converts an error response into a failure.
    async fn failure(&self, response: reqwest::Response) -> Failure {
        let status = response.status();
        if status.is_redirection() {
            let location = response.headers().get(header::LOCATION).and_then(|url| url.to_str().ok());
            return Failure::usage(format_args!(
                "the server at {} redirects to {}; give that address with --server",
                self.base,
                location.unwrap_or("another address")
            ));
        }
        match self.read(response).await {
            Ok(bytes) => error_response(status.as_u16(), &String::from_utf8_lossy(&bytes)),
            Err(failure) => failure,
        }
    }

    /// Uses the innermost cause as the message, without the URL.
    fn unreachable(&self, error: reqwest::Error) -> Failure {
        let error = error.without_url();
        let mut why = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            why = error.to_string();
            source = error.source();
        }
        match wrong_scheme(&self.base, &why) {
            Some(advice) => Failure::usage(advice),
            None => self.no_response(&why),
        }
    }

    fn no_response(&self, why: &str) -> Failure {
        Failure::new(
            Code::Unavailable,
            format_args!(
                "the server at {} does not respond: {why}; is `longshore serve` running there, \
                 and is --server (LONGSHORE_SERVER) correct?",
                self.base
            ),
        )
    }
}

/// The advice if the cause is that the server speaks the other one of http and https.
fn wrong_scheme(base: &str, why: &str) -> Option<String> {
    let (scheme, rest) = base.split_once("://")?;
    // rustls reads the first bytes of the plain response as the type of a TLS record.
    if scheme == "https" && why.contains("InvalidContentType") {
        return Some(format!(
            "the server at {base} does not use TLS: it speaks http, not https; \
             give http://{rest} with --server (LONGSHORE_SERVER)"
        ));
    }
    // hyper reads a TLS alert as the start of a response.
    if scheme == "http" && why.contains("invalid HTTP version") {
        return Some(format!(
            "the server at {base} does not speak http; if it uses TLS, \
             give https://{rest} with --server (LONGSHORE_SERVER)"
        ));
    }
    None
}

/// The body of a streaming response, chunk by chunk.
pub(crate) struct Chunks {
    server: Server,
    response: reqwest::Response,
}

impl Chunks {
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        self.response.chunk().await.map_err(|error| self.server.unreachable(error))
    }
}

/// The base URL that paths are appended to. Error messages never quote the text, which may
/// contain a password.
fn base(text: &str) -> Result<Url, Failure> {
    let invalid = |why: &str| {
        Failure::usage(format_args!(
            "--server (LONGSHORE_SERVER): {why}; write a URL like http://127.0.0.1:8080"
        ))
    };
    let url = Url::parse(text.trim()).map_err(|_| invalid("not a URL"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(invalid("not an http or https URL"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(invalid(
            "the URL has a user name or a password, which other users could read; \
             leave them out and pass a token with LONGSHORE_TOKEN or --token-file",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(invalid("the URL has a query or a fragment; leave it out"));
    }
    Ok(url)
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(url::Host::Domain(name)) => name == "localhost",
        Some(url::Host::Ipv4(ip)) => ip.is_loopback(),
        Some(url::Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

fn bearer(token: &Secret) -> Result<HeaderValue, Failure> {
    let printable = !token.expose().is_empty() && token.expose().bytes().all(|byte| byte.is_ascii_graphic());
    let value = HeaderValue::from_str(&format!("Bearer {}", token.expose())).ok().filter(|_| printable);
    let mut value = value.ok_or_else(|| {
        Failure::usage(
            "the token (LONGSHORE_TOKEN or --token-file) is invalid; \
             a token is one line like longshore_…, as printed by `longshore tokens create`",
        )
    })?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_server_url_is_rejected_without_quoting_it() {
        for text in ["", "s3cret", "127.0.0.1:8080", "ftp://s3cret", "http://s3cret@a", "http://a:s3cret@b"] {
            let failure = base(text).unwrap_err();
            assert_eq!(failure.code, Code::Usage, "{text}");
            let message = failure.to_string();
            assert!(
                message.contains("like http://127.0.0.1:8080") && !message.contains("s3cret"),
                "{message}"
            );
        }
        assert!(base("http://a/?x=1").is_err());
        for text in ["http://127.0.0.1:8080", "https://jobs.example.com/queue/", " http://[::1]:1 "] {
            assert!(base(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_token_is_one_word_of_printable_ascii() {
        let read = |text: &str| bearer(&Secret::read(text).unwrap_or_else(|never| match never {}));
        assert!(read("longshore_abc\n").unwrap().is_sensitive());
        for text in ["", "two words", "zwei\u{fc}", "a\nb"] {
            assert_eq!(read(text).unwrap_err().code, Code::Usage, "{text:?}");
        }
    }
}
