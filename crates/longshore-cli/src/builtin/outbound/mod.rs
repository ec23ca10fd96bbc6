//! What built-in kinds may call. Whoever can enqueue chooses the URL, so a job
//! must not reach what only this machine or its network can: the address that a
//! name resolves to is judged in the same step that connects to it, and a URL
//! that holds an address is judged before anything is sent.
//!
//! No redirect is followed, no proxy of the environment used, no cookie kept.
//! Messages name the host and never the rest of a URL, which may hold a password
//! or a token; nor do they quote what was sent or answered.

mod address;
mod connect;
mod rules;
#[cfg(test)]
mod tests;

use std::error::Error;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::worker::Failure;
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use url::{Host, Url};

use crate::failure::{self, Code};

use connect::{Lookup, Resolver};
use rules::Refused;

pub(crate) use connect::tls;
pub(crate) use rules::Allowed;
pub(super) use rules::Rules;

/// How long a call may take, from the look-up to the last byte of the answer.
const TIMEOUT: Duration = Duration::from_secs(15);
/// How much of an answer to a delivery is read: enough to use the connection
/// again after any polite one.
const ANSWER: usize = 64 * 1024;
/// The longest wait that a receiver may ask for.
const LONGEST_WAIT: Duration = Duration::from_secs(24 * 60 * 60);

/// The way out. Cheap to clone.
#[derive(Clone)]
pub(super) struct Outbound {
    client: Client,
    rules: Arc<Rules>,
}

/// A URL that may be tried. If it holds a name, that is judged by where it leads.
pub(super) struct Target {
    url: Url,
    /// Host and port, for messages.
    host: String,
}

impl Outbound {
    pub(super) fn new(rules: Rules) -> Result<Self, failure::Failure> {
        Outbound::resolving(rules, connect::system_lookup())
    }

    fn resolving(rules: Rules, lookup: Box<Lookup>) -> Result<Self, failure::Failure> {
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
            .map_err(|error| {
                failure::Failure::new(Code::Problem, format_args!("the HTTP client does not start: {error}"))
            })?;
        Ok(Outbound { client, rules })
    }

    /// Judges a URL as far as it can be without a look-up. `field` is where the
    /// payload has it.
    pub(super) fn target(&self, field: &str, url: &str) -> Result<Target, Failure> {
        let url =
            Url::parse(url).map_err(|error| Failure::permanent(format!("{field}: not a URL: {error}")))?;
        let host = url.host().ok_or_else(|| Failure::permanent(format!("{field}: names no host")))?;
        let shown = match url.port() {
            Some(port) => format!("{host}:{port}"),
            None => host.to_string(),
        };
        self.rules.judge_scheme(&url, &shown).map_err(Failure::permanent)?;
        // The connection asks no resolver about these.
        let addr = match host {
            Host::Ipv4(addr) => Some(IpAddr::V4(addr)),
            Host::Ipv6(addr) => Some(IpAddr::V6(addr)),
            Host::Domain(_) => None,
        };
        if let Some(addr) = addr {
            self.rules.filter(&shown, vec![addr]).map_err(Failure::permanent)?;
        }
        Ok(Target { host: shown, url })
    }

    /// Posts JSON. Only an answer of 2xx is one.
    pub(super) async fn post(
        &self,
        target: &Target,
        headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<StatusCode, Failure> {
        let request = self.client.post(target.url.clone()).headers(headers);
        let request = request.header(CONTENT_TYPE, "application/json").body(body);
        let mut response = send(target, request).await?;
        // The status has decided; how reading ends does not matter.
        let _ = read(&mut response, ANSWER).await;
        Ok(response.status())
    }

    /// Fetches what is at the URL, if that is no more than `most` bytes.
    pub(super) async fn get(&self, target: &Target, most: usize) -> Result<Vec<u8>, Failure> {
        let mut response = send(target, self.client.get(target.url.clone())).await?;
        match read(&mut response, most).await {
            Ok(Some(body)) => Ok(body),
            Ok(None) => {
                let host = &target.host;
                Err(Failure::permanent(format!(
                    "{host}: what it sends is over {most} bytes, which is the most"
                )))
            }
            Err(error) => Err(unreached(target, error)),
        }
    }
}

/// Sends, and makes a failure of every status but 2xx.
async fn send(target: &Target, request: RequestBuilder) -> Result<Response, Failure> {
    let response = request.send().await.map_err(|error| unreached(target, error))?;
    judge_answer(&target.host, response.status(), retry_after(response.headers(), Utc::now()))?;
    Ok(response)
}

/// The body, or `None` if it is longer than `most` bytes.
async fn read(response: &mut Response, most: usize) -> reqwest::Result<Option<Vec<u8>>> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        if body.len() + chunk.len() > most {
            return Ok(None);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(Some(body))
}

fn judge_answer(host: &str, status: StatusCode, wait: Option<Duration>) -> Result<(), Failure> {
    let busy = matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
    match wait {
        _ if status.is_success() => Ok(()),
        _ if status == StatusCode::GONE => {
            Err(Failure::permanent(format!("{host} answered {status}: it wants no more of these")))
        }
        _ if status.is_redirection() => Err(Failure::retry(format!(
            "{host} answered {status}; redirects are not followed, give the URL it leads to"
        ))),
        Some(wait) if busy => Err(Failure::retry_after(
            wait,
            format!("{host} answered {status} and asks to wait for {} s", wait.as_secs()),
        )),
        _ => Err(Failure::retry(format!("{host} answered {status}"))),
    }
}

/// What `Retry-After` asks for: seconds, or a time.
fn retry_after(headers: &HeaderMap, now: DateTime<Utc>) -> Option<Duration> {
    let asked = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match asked.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => {
            let at = DateTime::parse_from_rfc2822(asked).ok()?;
            (at.to_utc() - now).to_std().unwrap_or_default()
        }
    };
    Some(wait.min(LONGEST_WAIT))
}

/// A call without an answer: for good if the rules forbid it, else for now.
fn unreached(target: &Target, error: reqwest::Error) -> Failure {
    let mut cause: Option<&(dyn Error + 'static)> = Some(&error);
    while let Some(error) = cause {
        if let Some(refused) = error.downcast_ref::<Refused>() {
            return Failure::permanent(refused.clone());
        }
        cause = error.source();
    }
    let host = target.host.clone();
    if error.is_timeout() {
        return Failure::retry(format!("{host} did not answer within {} s", TIMEOUT.as_secs()));
    }
    Failure::retry(Unreached { host, error: error.without_url() })
}

#[derive(Debug)]
struct Unreached {
    host: String,
    error: reqwest::Error,
}

impl fmt::Display for Unreached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} could not be called", self.host)
    }
}

impl Error for Unreached {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&self.error)
    }
}
