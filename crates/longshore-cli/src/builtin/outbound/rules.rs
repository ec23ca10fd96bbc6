//! What may be called: the schemes, and the addresses that an operator allows
//! beside those of the public internet.

use std::error::Error;
use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use url::{Host, Url};

use super::address::{special, within};
use crate::builtin::Settings;

/// Who may be called.
pub(in crate::builtin) struct Rules {
    allow_http: bool,
    allowed: Vec<Allowed>,
}

impl Rules {
    pub(in crate::builtin) fn of(settings: &Settings) -> Self {
        Rules { allow_http: settings.allow_http, allowed: settings.allow_outbound.clone() }
    }

    pub(super) fn judge_scheme(&self, url: &Url, host: &str) -> Result<(), Refused> {
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
    pub(super) fn filter(&self, host: &str, mut addrs: Vec<IpAddr>) -> Result<Vec<IpAddr>, Refused> {
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
pub(super) struct Refused(String);

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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
impl Rules {
    pub(super) fn allowing(allowed: &[&str]) -> Self {
        Rules { allow_http: true, allowed: allowed.iter().map(|text| text.parse().unwrap()).collect() }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_allowance_holds_for_its_network_or_its_host_alone() {
        let rules = Rules::allowing;
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
}
