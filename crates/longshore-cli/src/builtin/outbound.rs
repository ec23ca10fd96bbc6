//! What built-in kinds may call. Whoever can enqueue chooses the URL, so a job
//! must not reach what only this machine or its network can: the address that a
//! name resolves to is judged in the same step that connects to it, and a URL
//! that holds an address is judged before anything is sent.
//!
//! No redirect is followed, no proxy of the environment used, no cookie kept.
//! Messages name the host and never the rest of a URL, which may hold a password
//! or a token; nor do they quote what was sent or answered.

use std::error::Error;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use longshore::worker::Failure;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::header::{CONTENT_TYPE, HeaderMap, RETRY_AFTER};
use reqwest::{Client, RequestBuilder, Response, StatusCode};
use rustls::{ClientConfig, RootCertStore};
use url::{Host, Url};

use super::Settings;
use crate::failure::{self, Code};

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
        let lookup = |name: String| -> Found {
            Box::pin(async move {
                let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
                Ok(found.map(|addr| addr.ip()).collect())
            })
        };
        Outbound::resolving(rules, Box::new(lookup))
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

/// The system's roots. None at all is no reason to refuse the jobs that call
/// nobody; who does call will hear of an unknown issuer.
pub(crate) fn tls() -> Result<ClientConfig, failure::Failure> {
    let mut roots = RootCertStore::empty();
    let (added, _) = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    if added == 0 {
        tracing::warn!("this machine has no root certificates, so no https URL can be called");
    }
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| failure::Failure::new(Code::Problem, format_args!("TLS does not start: {error}")))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

// ---- resolve and judge in one step ------------------------------------------

type Found = Pin<Box<dyn Future<Output = io::Result<Vec<IpAddr>>> + Send>>;
type Lookup = dyn Fn(String) -> Found + Send + Sync;

/// The one resolver that the client connects by. What it lets through is what
/// is connected to, so a name that changes its mind gains nothing.
struct Resolver {
    rules: Arc<Rules>,
    lookup: Box<Lookup>,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let found = (self.lookup)(name.as_str().to_owned());
        let rules = self.rules.clone();
        Box::pin(async move {
            let addrs = rules.filter(name.as_str(), found.await?)?;
            // The client puts in the port of the URL.
            let addrs: Addrs = Box::new(addrs.into_iter().map(|addr| SocketAddr::new(addr, 0)));
            Ok(addrs)
        })
    }
}

/// Who may be called.
pub(super) struct Rules {
    allow_http: bool,
    allowed: Vec<Allowed>,
}

impl Rules {
    pub(super) fn of(settings: &Settings) -> Self {
        Rules { allow_http: settings.allow_http, allowed: settings.allow_outbound.clone() }
    }

    fn judge_scheme(&self, url: &Url, host: &str) -> Result<(), Refused> {
        match url.scheme() {
            "https" => Ok(()),
            "http" if self.allow_http => Ok(()),
            "http" => Err(Refused(format!(
                "{host}: only https is called; call it so, or allow http in the worker with --allow-http"
            ))),
            _ => Err(Refused(format!("{host}: only https and http are called"))),
        }
    }

    /// Those of a host's addresses that may be called; at least one.
    fn filter(&self, host: &str, mut addrs: Vec<IpAddr>) -> Result<Vec<IpAddr>, Refused> {
        if self.allowed.iter().any(|allowed| allowed.is_host(host)) {
            return Ok(addrs);
        }
        let allowed = |addr: IpAddr| self.allowed.iter().any(|allowed| allowed.holds(addr));
        let mut inner = None;
        addrs.retain(|addr| match special(*addr) {
            Some(sort) if !allowed(*addr) => {
                inner = Some(sort);
                false
            }
            _ => true,
        });
        match inner {
            // The sort and not the address: whoever enqueued need not learn
            // how names resolve in here.
            Some(sort) if addrs.is_empty() => Err(Refused(format!(
                "{host} leads to {sort} address, which is not called; if it should be, allow the host or \
                 its network in the worker with --allow-outbound"
            ))),
            _ => Ok(addrs),
        }
    }
}

/// A call that the rules forbid: what, and the setting that would allow it.
#[derive(Clone, Debug)]
struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refused {}

/// An inner address, network or host that may be called all the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Allowed {
    Network { first: IpAddr, prefix: u8 },
    Host(String),
}

impl Allowed {
    fn holds(&self, addr: IpAddr) -> bool {
        match self {
            // A mapped address connects to the one inside.
            Allowed::Network { first, prefix } => {
                within(addr, *first, *prefix) || within(addr.to_canonical(), *first, *prefix)
            }
            Allowed::Host(_) => false,
        }
    }

    fn is_host(&self, host: &str) -> bool {
        matches!(self, Allowed::Host(allowed) if allowed.eq_ignore_ascii_case(host.trim_end_matches('.')))
    }
}

impl FromStr for Allowed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "`{text}` is no address, network or host; write it like 127.0.0.1, 10.0.0.0/8 or \
                 hooks.internal, without a scheme and a port"
            )
        };
        let (host, prefix) = match text.split_once('/') {
            Some((first, prefix)) => (first, Some(prefix)),
            None => (text, None),
        };
        if let Ok(first) = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
            let most = if first.is_ipv4() { 32 } else { 128 };
            let prefix = prefix.map_or(Ok(most), str::parse).map_err(|_| wrong())?;
            return if prefix <= most { Ok(Allowed::Network { first, prefix }) } else { Err(wrong()) };
        }
        match (Host::parse(host.trim_end_matches('.')), prefix) {
            (Ok(Host::Domain(host)), None) => Ok(Allowed::Host(host)),
            _ => Err(wrong()),
        }
    }
}

fn within(addr: IpAddr, first: IpAddr, prefix: u8) -> bool {
    // A prefix of nothing shifts everything out, which Rust leaves to us.
    match (addr, first) {
        (IpAddr::V4(addr), IpAddr::V4(first)) => {
            let differ = addr.to_bits() ^ first.to_bits();
            differ.checked_shr(32 - u32::from(prefix)).unwrap_or(0) == 0
        }
        (IpAddr::V6(addr), IpAddr::V6(first)) => {
            let differ = addr.to_bits() ^ first.to_bits();
            differ.checked_shr(128 - u32::from(prefix)).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// What sort of address it is, with its article, unless it is one of the open
/// internet. After IANA's registries of special-purpose addresses.
fn special(addr: IpAddr) -> Option<&'static str> {
    let listed = match addr {
        IpAddr::V4(_) => V4.iter().find(|(first, prefix, _)| within(addr, (*first).into(), *prefix)),
        IpAddr::V6(_) => None,
    };
    if let Some((_, _, sort)) = listed {
        return Some(sort);
    }
    let IpAddr::V6(v6) = addr else { return None };
    if let Some((_, _, sort)) = V6.iter().find(|(first, prefix, _)| within(addr, (*first).into(), *prefix)) {
        return Some(sort);
    }
    match v6.segments() {
        // 6to4 goes to the IPv4 address that it holds.
        [0x2002, high, low, ..] => {
            special(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)).into())
        }
        // Of IPv6, only 2000::/3 is given out.
        [0x2000..0x4000, ..] => None,
        _ => Some("a reserved"),
    }
}

const V4: &[(Ipv4Addr, u8, &str)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8, "an unspecified"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, "a private"),
    (Ipv4Addr::new(100, 64, 0, 0), 10, "a carrier's private (CGNAT)"),
    (Ipv4Addr::new(127, 0, 0, 0), 8, "a loopback"),
    (Ipv4Addr::new(169, 254, 0, 0), 16, "a link-local"),
    (Ipv4Addr::new(172, 16, 0, 0), 12, "a private"),
    (Ipv4Addr::new(192, 0, 0, 0), 24, "a protocol's"),
    (Ipv4Addr::new(192, 0, 2, 0), 24, "a documentation"),
    (Ipv4Addr::new(192, 88, 99, 0), 24, "a 6to4 relay's"),
    (Ipv4Addr::new(192, 168, 0, 0), 16, "a private"),
    (Ipv4Addr::new(198, 18, 0, 0), 15, "a benchmark"),
    (Ipv4Addr::new(198, 51, 100, 0), 24, "a documentation"),
    (Ipv4Addr::new(203, 0, 113, 0), 24, "a documentation"),
    (Ipv4Addr::new(224, 0, 0, 0), 4, "a multicast"),
    (Ipv4Addr::BROADCAST, 32, "a broadcast"),
    (Ipv4Addr::new(240, 0, 0, 0), 4, "a reserved"),
];

const V6: &[(Ipv6Addr, u8, &str)] = &[
    (Ipv6Addr::UNSPECIFIED, 128, "an unspecified"),
    (Ipv6Addr::LOCALHOST, 128, "a loopback"),
    (Ipv6Addr::new(0, 0, 0, 0, 0, 0xffff, 0, 0), 96, "an IPv4-mapped"),
    (Ipv6Addr::new(0x64, 0xff9b, 0, 0, 0, 0, 0, 0), 96, "a NAT64"),
    (Ipv6Addr::new(0x64, 0xff9b, 1, 0, 0, 0, 0, 0), 48, "a NAT64"),
    // Among them Teredo, which goes to an IPv4 address, and benchmarks.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23, "a protocol's"),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32, "a documentation"),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20, "a documentation"),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, "a private (ULA)"),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10, "a link-local"),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8, "a multicast"),
];

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::builtin::testing::Server;

    fn rules(allowed: &[&str]) -> Rules {
        Rules { allow_http: true, allowed: allowed.iter().map(|text| text.parse().unwrap()).collect() }
    }

    /// The way out for names that resolve to each of `answers` in turn, the last
    /// one for ever.
    fn lying(rules: Rules, answers: &[&[&str]]) -> Outbound {
        let mut answers: Vec<Vec<IpAddr>> = answers
            .iter()
            .rev()
            .map(|addrs| addrs.iter().map(|addr| addr.parse().unwrap()).collect())
            .collect();
        let last = answers[0].clone();
        answers.remove(0);
        let answers = Mutex::new(answers);
        let lookup = move |_: String| -> Found {
            let answer = answers.lock().unwrap().pop().unwrap_or_else(|| last.clone());
            Box::pin(async move { Ok(answer) })
        };
        Outbound::resolving(rules, Box::new(lookup)).unwrap()
    }

    async fn fetch(outbound: &Outbound, url: &str) -> Result<Vec<u8>, String> {
        let fetched = async { outbound.get(&outbound.target("source_url", url)?, 100).await };
        fetched.await.map_err(|failure| format!("{failure:?}"))
    }

    #[track_caller]
    fn assert_refused(answer: Result<Vec<u8>, String>, host: &str) {
        let refused = answer.unwrap_err();
        assert!(refused.starts_with(&format!("permanent: {host}")), "{refused}");
        assert!(refused.contains("--allow-outbound"), "{refused}");
    }

    /// Every sort of address that is not of the open internet.
    const INNER: &[&str] = &[
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "10.255.255.255",
        "100.64.0.1",
        "100.127.255.255",
        "127.0.0.1",
        "127.8.9.10",
        "169.254.169.254",
        "172.16.0.1",
        "172.31.255.255",
        "192.0.0.1",
        "192.0.2.1",
        "192.88.99.1",
        "192.168.0.1",
        "198.18.0.1",
        "198.19.255.255",
        "198.51.100.7",
        "203.0.113.7",
        "224.0.0.1",
        "239.255.255.255",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "::127.0.0.1",
        "::8.8.8.8",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::ffff:8.8.8.8",
        "::ffff:0:127.0.0.1",
        "64:ff9b::127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "64:ff9b::8.8.8.8",
        "64:ff9b:1::10.0.0.1",
        "100::1",
        "2001::1",
        "2001:0:7f00:1::",
        "2001:2::1",
        "2001:10::1",
        "2001:db8::1",
        "2002:7f00:1::",
        "2002:a00:1::1",
        "2002:a9fe:a9fe::",
        "2002:c0a8:101::1",
        "3fff::1",
        "4000::1",
        "5f00::1",
        "fc00::1",
        "fd12:3456::1",
        "fe80::1",
        "febf::1",
        "fec0::1",
        "ff02::1",
    ];

    /// Their neighbours outside.
    const OPEN: &[&str] = &[
        "1.1.1.1",
        "8.8.8.8",
        "9.255.255.255",
        "11.0.0.0",
        "100.63.255.255",
        "100.128.0.0",
        "126.255.255.255",
        "128.0.0.0",
        "169.253.255.255",
        "169.255.0.0",
        "172.15.255.255",
        "172.32.0.0",
        "192.0.1.0",
        "192.167.255.255",
        "192.169.0.0",
        "198.17.255.255",
        "198.20.0.0",
        "223.255.255.255",
        "2001:200::1",
        "2001:4860:4860::8888",
        "2002:808:808::1",
        "2606:4700::1111",
        "3ffe::1",
    ];

    #[test]
    fn every_sort_of_inner_address_is_refused_and_its_neighbours_are_not() {
        for addr in INNER {
            assert!(special(addr.parse().unwrap()).is_some(), "{addr}");
        }
        for addr in OPEN {
            assert_eq!(special(addr.parse().unwrap()), None, "{addr}");
        }
    }

    #[tokio::test]
    async fn no_name_leads_inside() {
        for addr in INNER {
            let outbound = lying(rules(&[]), &[&[addr]]);
            assert_refused(
                fetch(&outbound, "http://hooks.example.com/").await,
                "hooks.example.com leads to ",
            );
        }
    }

    #[tokio::test]
    async fn no_form_of_address_in_a_url_leads_inside() {
        let unasked = |_: String| -> Found { panic!("an address needs no resolver") };
        let outbound = Outbound::resolving(rules(&[]), Box::new(unasked)).unwrap();
        for addr in INNER {
            let host = if addr.contains(':') { format!("[{addr}]") } else { (*addr).to_owned() };
            assert_refused(fetch(&outbound, &format!("http://{host}:8080/")).await, "");
        }
        for (host, shown) in [
            ("2130706433", "127.0.0.1"),
            ("0x7f000001", "127.0.0.1"),
            ("0x7f.1", "127.0.0.1"),
            ("0177.0.0.1", "127.0.0.1"),
            ("127.1", "127.0.0.1"),
            ("127.0.0.1.", "127.0.0.1"),
            ("%31%32%37.0.0.1", "127.0.0.1"),
            ("１２７.0.0.1", "127.0.0.1"),
            ("127。0。0。1", "127.0.0.1"),
            ("0", "0.0.0.0"),
            ("[::ffff:127.0.0.1]", "[::ffff:7f00:1]"),
            ("[0:0:0:0:0:ffff:7f00:1]", "[::ffff:7f00:1]"),
            ("example.com@127.0.0.1", "127.0.0.1"),
            ("example.com:80@[::1]", "[::1]"),
            ("127.0.0.1\\@example.com", "127.0.0.1"),
            ("127.0.0.1#@example.com", "127.0.0.1"),
        ] {
            assert_refused(fetch(&outbound, &format!("http://{host}/")).await, shown);
        }
    }

    #[tokio::test]
    async fn a_name_that_changes_its_mind_gains_nothing() {
        let answer = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 4\r\n\r\nopen";
        let mut server = Server::answering(&[answer, answer]).await;
        let url = format!("http://rebind.example.com:{}/", server.port());
        // 127.0.0.2 is allowed and stands for an open address.
        let outbound = lying(rules(&["127.0.0.2"]), &[&["127.0.0.2"], &["127.0.0.1"]]);
        assert_eq!(fetch(&outbound, &url).await.unwrap(), b"open");
        assert!(server.heard().await.starts_with("GET / HTTP/1.1"));
        assert_refused(fetch(&outbound, &url).await, "rebind.example.com leads to a loopback");
        assert_eq!(server.heard_so_far(), None, "nobody knocked");
    }

    #[tokio::test]
    async fn of_mixed_answers_only_the_open_ones_are_called() {
        let mut server = Server::answering(&["HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nopen"]).await;
        let url = format!("http://mixed.example.com:{}/", server.port());
        // 127.0.0.2 is allowed and stands for an open address.
        let outbound = lying(rules(&["127.0.0.2"]), &[&["127.0.0.1", "10.0.0.1", "127.0.0.2", "::1"]]);
        assert_eq!(fetch(&outbound, &url).await.unwrap(), b"open");
        let host = server.heard_from().await;
        assert_eq!(host, "127.0.0.2", "the address that was called");
        assert_refused(
            fetch(&lying(rules(&[]), &[&["127.0.0.1", "10.0.0.1", "::1"]]), &url).await,
            "mixed.example.com",
        );
    }

    #[tokio::test]
    async fn what_is_allowed_is_called() {
        for allowed in ["127.0.0.1", "127.0.0.0/8", "0.0.0.0/0", "hooks.internal"] {
            let server = Server::answering(&["HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"]).await;
            let outbound = lying(rules(&[allowed]), &[&["127.0.0.1"]]);
            let answer = fetch(&outbound, &format!("http://Hooks.Internal:{}/", server.port())).await;
            assert_eq!(answer.unwrap(), b"hi", "{allowed}");
        }
        let mapped: IpAddr = "::ffff:10.1.2.3".parse().unwrap();
        assert!(rules(&["10.0.0.0/8"]).filter("a", vec![mapped]).is_ok());
        assert!(rules(&["11.0.0.0/8", "::1", "b"]).filter("a", vec![mapped]).is_err());
        assert!(rules(&["hooks.internal"]).filter("hooks.internal.", vec![mapped]).is_ok());
        assert!(rules(&["hooks.internal"]).filter("more.hooks.internal", vec![mapped]).is_err());
    }

    #[test]
    fn allowances_are_read() {
        let network = |text: &str, prefix| Allowed::Network { first: text.parse().unwrap(), prefix };
        for (text, allowed) in [
            ("127.0.0.1", network("127.0.0.1", 32)),
            ("10.0.0.0/8", network("10.0.0.0", 8)),
            ("::1", network("::1", 128)),
            ("[::1]", network("::1", 128)),
            ("fd00::/8", network("fd00::", 8)),
            ("Hooks.Internal.", Allowed::Host("hooks.internal".into())),
            ("localhost", Allowed::Host("localhost".into())),
        ] {
            assert_eq!(text.parse::<Allowed>().unwrap(), allowed);
        }
        for text in [
            "",
            "10.0.0.0/33",
            "::/129",
            "10.0.0.0/",
            "a/8",
            "a:80",
            "https://a",
            "0x7f.1",
            "a b",
            "10.0.0.0/-1",
        ] {
            let refused = text.parse::<Allowed>().unwrap_err();
            assert!(refused.contains("10.0.0.0/8"), "{text:?}: {refused}");
        }
    }

    #[tokio::test]
    async fn http_is_called_only_if_allowed_and_nothing_else_ever_is() {
        let outbound = Outbound::new(Rules { allow_http: false, allowed: Vec::new() }).unwrap();
        let refused = fetch(&outbound, "http://ada:s3cret@example.com/token").await.unwrap_err();
        assert!(refused.starts_with("permanent: example.com: only https"), "{refused}");
        assert!(refused.contains("--allow-http"), "{refused}");
        assert!(!refused.contains("s3cret") && !refused.contains("token"), "{refused}");
        let refused = fetch(&outbound, "ftp://example.com/").await.unwrap_err();
        assert!(refused.starts_with("permanent: example.com: only https and http"), "{refused}");
    }

    #[tokio::test]
    async fn messages_name_the_host_and_nothing_else_of_the_url() {
        let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let outbound = lying(rules(&["127.0.0.1"]), &[&["127.0.0.1"]]);
        let url = format!("http://ada:s3cret@hooks.example.com:{gone}/token?key=s3cret");
        let failed = fetch(&outbound, &url).await.unwrap_err();
        assert!(
            failed.starts_with(&format!("retry: hooks.example.com:{gone} could not be called: ")),
            "{failed}"
        );
        for hidden in ["ada", "s3cret", "token", "key"] {
            assert!(!failed.contains(hidden), "{failed}");
        }
    }

    #[tokio::test]
    async fn answers_decide_what_becomes_of_the_job() {
        for (answer, becomes) in [
            ("204 No Content", Ok(())),
            ("200 OK", Ok(())),
            (
                "302 Found\r\nLocation: http://127.0.0.1/",
                Err("retry: h answered 302 Found; redirects are not"),
            ),
            ("404 Not Found", Err("retry: h answered 404 Not Found")),
            ("410 Gone", Err("permanent: h answered 410 Gone: it wants no more of these")),
            ("429 Too Many Requests", Err("retry: h answered 429 Too Many Requests")),
            ("429 Too Many Requests\r\nRetry-After: 7", Err("retry after 7s: h answered 429")),
            ("503 Service Unavailable\r\nRetry-After: 8", Err("retry after 8s: h answered 503")),
            ("503 Service Unavailable\r\nRetry-After: 99999999", Err("retry after 86400s: h answered 503")),
            ("500 Internal Server Error\r\nRetry-After: 9", Err("retry: h answered 500")),
        ] {
            let server =
                Server::answering(&[&format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\n\r\n")]).await;
            let outbound = lying(rules(&["127.0.0.1"]), &[&["127.0.0.1"]]);
            let url = format!("http://h.example.com:{}/", server.port());
            let target = outbound.target("url", &url).unwrap();
            let posted = outbound.post(&target, HeaderMap::new(), b"{}".into()).await;
            let posted = posted.map(|_| ()).map_err(|failure| format!("{failure:?}"));
            let host = format!("h.example.com:{}", server.port());
            match (posted, becomes) {
                (Ok(()), Ok(())) => {}
                (Err(told), Err(begin)) => assert!(told.replace(&host, "h").starts_with(begin), "{told}"),
                (posted, becomes) => panic!("{answer}: {posted:?} and not {becomes:?}"),
            }
        }
    }

    #[test]
    fn a_wait_is_read_in_seconds_or_as_a_time() {
        let now = "2030-01-31T09:00:00Z".parse().unwrap();
        let wait = |text: &str| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, text.parse().unwrap())]);
            retry_after(&headers, now).map(|wait| wait.as_secs())
        };
        assert_eq!(wait("120"), Some(120));
        assert_eq!(wait("Thu, 31 Jan 2030 09:01:30 GMT"), Some(90));
        assert_eq!(wait("Thu, 31 Jan 2030 08:00:00 GMT"), Some(0), "in the past");
        assert_eq!(wait("Fri, 31 Jan 2031 09:00:00 GMT"), Some(86_400));
        for none in ["", "soon", "-1", "1.5"] {
            assert_eq!(wait(none), None, "{none}");
        }
        assert_eq!(retry_after(&HeaderMap::new(), now), None);
    }

    #[tokio::test]
    async fn a_long_answer_is_not_read_to_its_end() {
        let long = format!("HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n{}", "x".repeat(101));
        let server = Server::answering(&[&long]).await;
        let outbound = lying(rules(&["127.0.0.1"]), &[&["127.0.0.1"]]);
        let refused =
            fetch(&outbound, &format!("http://a.example.com:{}/", server.port())).await.unwrap_err();
        assert!(refused.starts_with("permanent: ") && refused.contains("over 100 bytes"), "{refused}");

        // It promises more than it sends and keeps the line open: only a reader
        // that stops by itself comes back.
        let endless =
            format!("HTTP/1.1 200 OK\r\nContent-Length: 999999999\r\n\r\n{}", "x".repeat(ANSWER + 1));
        let server = Server::answering(&[&endless]).await;
        let target = outbound.target("url", &format!("http://a.example.com:{}/", server.port())).unwrap();
        let status = outbound.post(&target, HeaderMap::new(), b"{}".into()).await.unwrap();
        assert_eq!(status, StatusCode::OK);
    }
}
