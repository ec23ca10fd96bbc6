//! Which calls are allowed: the schemes, all public addresses, and the internal
//! addresses that the operator allows. `address` lists the internal addresses.

use std::error::Error;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use url::{Host, Url};

use super::address::special_category;
use crate::builtin::Settings;
use crate::network::Network;

/// Decides which URLs and addresses may be called.
pub(in crate::builtin) struct Rules {
    allow_http: bool,
    allowed: Vec<Allowed>,
}

impl Rules {
    pub(in crate::builtin) fn of(settings: &Settings) -> Self {
        Rules { allow_http: settings.allow_http, allowed: settings.allow_outbound.clone() }
    }

    pub(super) fn check_scheme(&self, url: &Url, host: &str) -> Result<(), Refused> {
        match url.scheme() {
            "https" => Ok(()),
            "http" if self.allow_http => Ok(()),
            "http" => Err(Refused(format!(
                "{host}: only https URLs may be called; use https, or allow http in the worker with `allow_http` (--allow-http)"
            ))),
            _ => Err(Refused(format!("{host}: only https and http URLs may be called; use one of them"))),
        }
    }

    /// The addresses of a host that may be called. An error if all of them are refused.
    pub(super) fn filter(&self, host: &str, mut addrs: Vec<IpAddr>) -> Result<Vec<IpAddr>, Refused> {
        if self.allowed.iter().any(|allowed| allowed.is_host(host)) {
            return Ok(addrs);
        }
        let is_allowed = |addr: IpAddr| self.allowed.iter().any(|allowed| allowed.contains(addr));
        let mut refused = None;
        addrs.retain(|addr| match special_category(*addr) {
            Some(category) if !is_allowed(*addr) => {
                refused = Some(category);
                false
            }
            _ => true,
        });
        match refused {
            // Names the category and not the address: the caller that enqueued the job
            // must not learn how names resolve in the internal network.
            Some(category) if addrs.is_empty() => Err(Refused(format!(
                "{host} resolves to {category} address, which jobs may not call; to allow it, list the host \
                 or its network in the worker's `allow_outbound` (--allow-outbound)"
            ))),
            _ => Ok(addrs),
        }
    }
}

/// A call that the rules forbid. The message names the setting that would allow it.
#[derive(Clone, Debug)]
pub(super) struct Refused(String);

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for Refused {}

/// An internal address, network or host that may be called although it is not public. Parses
/// `127.0.0.1`, `10.0.0.0/8` and `hooks.internal`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Allowed {
    /// All addresses of a network.
    Network(Network),
    /// A host name, whatever it resolves to.
    Host(String),
}

impl Allowed {
    fn contains(&self, addr: IpAddr) -> bool {
        match self {
            Allowed::Network(network) => network.contains(addr),
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
        let invalid = || {
            format!(
                "`{text}` is not an address, a network or a host; write it like 127.0.0.1, 10.0.0.0/8 or \
                 hooks.internal, without a scheme or a port"
            )
        };
        if let Ok(network) = text.parse() {
            return Ok(Allowed::Network(network));
        }
        match Host::parse(text.trim_end_matches('.')) {
            Ok(Host::Domain(host)) => Ok(Allowed::Host(host)),
            _ => Err(invalid()),
        }
    }
}

#[cfg(all(test, feature = "sqlite"))]
impl Rules {
    /// Rules that allow http and these entries.
    pub(super) fn allowing(allowed: &[&str]) -> Self {
        Rules { allow_http: true, allowed: allowed.iter().map(|text| text.parse().unwrap()).collect() }
    }
}

#[cfg(all(test, feature = "sqlite"))]
mod tests {
    use super::*;

    #[test]
    fn an_entry_allows_only_its_network_or_its_host() {
        let rules = Rules::allowing;
        let mapped: IpAddr = "::ffff:10.1.2.3".parse().unwrap();
        assert!(rules(&["10.0.0.0/8"]).filter("a", vec![mapped]).is_ok());
        assert!(rules(&["11.0.0.0/8", "::1", "b"]).filter("a", vec![mapped]).is_err());
        assert!(rules(&["hooks.internal"]).filter("hooks.internal.", vec![mapped]).is_ok());
        assert!(rules(&["hooks.internal"]).filter("more.hooks.internal", vec![mapped]).is_err());
    }

    #[test]
    fn addresses_networks_and_hosts_are_parsed() {
        let network = |text: &str, prefix| Allowed::Network(Network::new(text.parse().unwrap(), prefix));
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
            let error = text.parse::<Allowed>().unwrap_err();
            assert!(error.contains("10.0.0.0/8"), "{text:?}: {error}");
        }
    }
}
