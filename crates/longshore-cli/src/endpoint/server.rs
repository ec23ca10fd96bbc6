//! A server's API, over HTTP. The token goes into one header and nowhere else.

use std::error::Error;
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, HeaderValue, Method, header};
use url::Url;

use super::{LAST_EVENT_ID, Reply, refusal};
use crate::builtin;
use crate::failure::{Code, Failure};
use crate::secret::Secret;

const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// More than a server takes: its own clock ends a request, and it says so.
const ANSWER_WITHIN: Duration = Duration::from_secs(120);
const WITHOUT_END: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

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
            // A redirect would carry the token to who knows whom.
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT_WITHIN)
            .timeout(ANSWER_WITHIN)
            .user_agent(concat!("longshore/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .tls_backend_preconfigured(builtin::tls()?);
        if is_loopback(&base) {
            // No proxy reaches this machine better than it does itself.
            http = http.no_proxy();
        }
        let http = http.build().map_err(|error| {
            Failure::new(Code::Problem, format_args!("the HTTP client does not start: {error}"))
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
        let mut response = request.send().await.map_err(|error| self.unreached(error))?;
        if !response.status().is_success() {
            return Err(self.refused(response).await);
        }
        let headers = std::mem::take(response.headers_mut());
        let bytes = response.bytes().await.map_err(|error| self.unreached(error))?;
        Ok(Reply::new(&headers, String::from_utf8_lossy(&bytes).into_owned()))
    }

    pub(super) async fn follow(&self, uri: &str, after: Option<&str>) -> Result<Pieces, Failure> {
        // Its end is for others to tell; that it begins is not.
        let mut request = self.http.get(format!("{}{uri}", self.base)).timeout(WITHOUT_END);
        if let Some(after) = after {
            request = request.header(LAST_EVENT_ID, after);
        }
        let response = match tokio::time::timeout(ANSWER_WITHIN, request.send()).await {
            Ok(response) => response.map_err(|error| self.unreached(error))?,
            Err(_) => return Err(self.silent("it took the request and said nothing")),
        };
        if response.status().is_success() {
            Ok(Pieces { server: self.clone(), response })
        } else {
            Err(self.refused(response).await)
        }
    }

    /// Why a request was not carried out.
    async fn refused(&self, response: reqwest::Response) -> Failure {
        let status = response.status();
        if status.is_redirection() {
            let elsewhere = response.headers().get(header::LOCATION).and_then(|place| place.to_str().ok());
            return Failure::usage(format_args!(
                "the server at {} points to {}; give that address with --server",
                self.base,
                elsewhere.unwrap_or("another place")
            ));
        }
        match response.bytes().await {
            Ok(bytes) => refusal(status.as_u16(), &String::from_utf8_lossy(&bytes)),
            Err(error) => self.unreached(error),
        }
    }

    fn unreached(&self, error: reqwest::Error) -> Failure {
        let error = error.without_url();
        let mut why = error.to_string();
        let mut source = error.source();
        while let Some(error) = source {
            why = error.to_string();
            source = error.source();
        }
        self.silent(&why)
    }

    fn silent(&self, why: &str) -> Failure {
        Failure::new(
            Code::Unavailable,
            format_args!(
                "the server at {} does not answer: {why}; is `longshore serve` running there, \
                 and is --server (LONGSHORE_SERVER) right?",
                self.base
            ),
        )
    }
}

/// An answer that comes in pieces.
pub(crate) struct Pieces {
    server: Server,
    response: reqwest::Response,
}

impl Pieces {
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, Failure> {
        self.response.chunk().await.map_err(|error| self.server.unreached(error))
    }
}

/// The address that paths are put behind. Never repeats what was given: it may
/// hold a password.
fn base(text: &str) -> Result<Url, Failure> {
    let refused = |why: &str| {
        Failure::usage(format_args!(
            "--server (LONGSHORE_SERVER): {why}; write it like http://127.0.0.1:8080"
        ))
    };
    let url = Url::parse(text.trim()).map_err(|_| refused("not a URL"))?;
    if !matches!(url.scheme(), "http" | "https") {
        return Err(refused("not an http or https URL"));
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(refused(
            "holds a name or a password, which others could read; \
             give a token by LONGSHORE_TOKEN or --token-file and leave them out",
        ));
    }
    if url.query().is_some() || url.fragment().is_some() {
        return Err(refused("has a query or a fragment; leave it out"));
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
            "the token (LONGSHORE_TOKEN or --token-file) cannot be one: \
             it is one line like longshore_… as `longshore tokens create` printed it",
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
    fn what_is_no_address_of_a_server_is_refused_without_repeating_it() {
        for text in ["", "s3cret", "127.0.0.1:8080", "ftp://s3cret", "http://s3cret@a", "http://a:s3cret@b"] {
            let refused = base(text).unwrap_err();
            assert_eq!(refused.code, Code::Usage, "{text}");
            let told = refused.to_string();
            assert!(told.contains("like http://127.0.0.1:8080") && !told.contains("s3cret"), "{told}");
        }
        assert!(base("http://a/?x=1").is_err());
        for text in ["http://127.0.0.1:8080", "https://jobs.example.com/queue/", " http://[::1]:1 "] {
            assert!(base(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_token_is_one_printable_word() {
        let read = |text: &str| bearer(&Secret::read(text).unwrap_or_else(|never| match never {}));
        assert!(read("longshore_abc\n").unwrap().is_sensitive());
        for text in ["", "two words", "zwei\u{fc}", "a\nb"] {
            assert_eq!(read(text).unwrap_err().code, Code::Usage, "{text:?}");
        }
    }
}
