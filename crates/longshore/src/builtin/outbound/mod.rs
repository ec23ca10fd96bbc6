//! HTTP calls by built-in kinds. Callers that enqueue a job choose the URL, so a job
//! must not reach addresses that only this machine or its network can reach. The
//! address that a name resolves to is checked in the same step that connects to it,
//! and an address in a URL is checked before anything is sent.
//!
//! The client follows no redirects, uses no proxy from the environment and keeps no
//! cookies. Messages name the host and never the rest of a URL, which may contain a
//! password or a token. They do not quote requests or responses either.
//!
//! This file has the client: it sends a request and reads a bounded response. `rules`
//! decides which calls are allowed, `address` lists the special addresses, and
//! `connect` resolves names and sets up TLS.

mod address;
mod connect;
mod rules;
#[cfg(all(test, feature = "sqlite"))]
mod tests;

use std::error::Error as StdError;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use url::{Host, Url};

use crate::error::{Error, Result};
use crate::worker::Failure;

use connect::{Lookup, Resolver};
use rules::Refused;

pub use connect::tls;
pub use rules::Allowed;
pub(super) use rules::Rules;

/// The limit for a whole call, from the DNS lookup to the last byte of the response.
const TIMEOUT: Duration = Duration::from_secs(15);
/// How much of the response to a POST is read. The content is not used, but the
/// connection can be reused only after all of it was read.
const MAX_POST_RESPONSE: usize = 64 * 1024;
/// The longest `Retry-After` that is honoured.
const MAX_RETRY_AFTER: Duration = Duration::from_secs(24 * 60 * 60);

/// The HTTP client of the built-in kinds. Cheap to clone.
#[derive(Clone)]
pub(super) struct Outbound {
    client: Client,
    rules: Arc<Rules>,
}

/// A URL whose scheme is allowed, and whose host is a name or an allowed address. A
/// name is checked when it is resolved.
pub(super) struct Target {
    url: Url,
    /// Host and port, for messages.
    host: String,
}

impl Outbound {
    pub(super) fn new(rules: Rules) -> Result<Self> {
        Outbound::with_lookup(rules, connect::system_lookup())
    }

    fn with_lookup(rules: Rules, lookup: Box<Lookup>) -> Result<Self> {
        let rules = Arc::new(rules);
        let client = Client::builder()
            .tls_backend_preconfigured(tls()?)
            .dns_resolver(Arc::new(Resolver { rules: rules.clone(), lookup }))
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .timeout(TIMEOUT)
            .user_agent(concat!("longshore/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Error::internal(format!("cannot create the HTTP client: {error}")))?;
        Ok(Outbound { client, rules })
    }

    /// Checks everything about a URL that does not need a DNS lookup. `field` is the
    /// payload field that contains it, for messages.
    pub(super) fn target(&self, field: &str, url: &str) -> Result<Target, Failure> {
        let url =
            Url::parse(url).map_err(|error| Failure::permanent(format!("{field}: not a URL: {error}")))?;
        let host = url.host().ok_or_else(|| Failure::permanent(format!("{field}: the URL has no host")))?;
        let host_and_port = match url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_string(),
        };
        self.rules.check_scheme(&url, &host_and_port).map_err(Failure::permanent)?;
        // The client does not call the resolver for addresses, so check them here.
        let addr = match host {
            Host::Ipv4(addr) => Some(IpAddr::V4(addr)),
            Host::Ipv6(addr) => Some(IpAddr::V6(addr)),
            Host::Domain(_) => None,
        };
        if let Some(addr) = addr {
            self.rules.filter(&host_and_port, vec![addr]).map_err(Failure::permanent)?;
        }
        Ok(Target { host: host_and_port, url })
    }

    /// Posts JSON. Any status other than 2xx is a failure.
    pub(super) async fn post(
        &self,
        target: &Target,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<StatusCode, Failure> {
        let request = self.client.post(target.url.clone()).headers(headers);
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        let mut response = send(target, request).await?;
        // The status alone decides the outcome, so errors while reading do not matter.
        let _ = read_body(&mut response, MAX_POST_RESPONSE).await;
        Ok(response.status())
    }

    /// Fetches the content of a URL, up to `limit` bytes.
    pub(super) async fn get(&self, target: &Target, limit: usize) -> Result<Vec<u8>, Failure> {
        let mut response = send(target, self.client.get(target.url.clone())).await?;
        match read_body(&mut response, limit).await {
            Ok(Some(body)) => Ok(body),
            Ok(None) => {
                let host = &target.host;
                Err(Failure::permanent(format!(
                    "{host}: the response is larger than {limit} bytes, the limit"
                )))
            }
            Err(error) => Err(call_failed(target, error)),
        }
    }
}

/// Sends a request. Any status other than 2xx is a failure.
async fn send(target: &Target, request: RequestBuilder) -> Result<Response, Failure> {
    let response = request.send().await.map_err(|error| call_failed(target, error))?;
    check_status(&target.host, response.status(), retry_after(response.headers(), Utc::now()))?;
    Ok(response)
}

/// The body, or `None` if it is longer than `limit` bytes.
async fn read_body(response: &mut Response, limit: usize) -> reqwest::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > limit {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

fn check_status(host: &str, status: StatusCode, retry_after: Option<Duration>) -> Result<(), Failure> {
    if status.is_success() {
        return Ok(());
    }
    if status == StatusCode::GONE {
        return Err(Failure::permanent(format!(
            "{host} responded {status}: it accepts no more requests to this URL"
        )));
    }
    if status.is_redirection() {
        return Err(Failure::retry(format!(
            "{host} responded {status}; redirects are not followed, use the URL that it redirects to"
        )));
    }
    let busy = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    if busy && let Some(delay) = retry_after {
        return Err(Failure::retry_after(
            delay,
            format!("{host} responded {status} and requests a retry after {} s", delay.as_secs()),
        ));
    }
    Err(Failure::retry(format!("{host} responded {status}")))
}

/// The delay in `Retry-After`, which is a number of seconds or a date.
fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let delay = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = DateTime::parse_from_rfc2822(value).ok()?;
            (at.to_utc() - now).to_std().unwrap_or_default()
        }
    };
    Some(delay.min(MAX_RETRY_AFTER))
}

/// The failure of a call without a response: permanent if the rules forbid the call,
/// otherwise retried.
fn call_failed(target: &Target, error: reqwest::Error) -> Failure {
    let mut cause: Option<&(dyn StdError + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(refused) = error.downcast_ref::<Refused>() {
            return Failure::permanent(refused.clone());
        }
        cause = error.source();
    }
    let host = target.host.clone();
    if error.is_timeout() {
        return Failure::retry(format!("{host} did not respond within {} s", TIMEOUT.as_secs()));
    }
    Failure::retry(CallFailed { host, error: error.without_url() })
}

#[derive(Debug)]
struct CallFailed {
    host: String,
    error: reqwest::Error,
}

impl fmt::Display for CallFailed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the call to {} failed", self.host)
    }
}

impl StdError for CallFailed {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.error)
    }
}
