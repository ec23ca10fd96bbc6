//! Networks of IP addresses, as settings name them: `10.0.0.0/8`, or a single address.

use std::net::IpAddr;
use std::str::FromStr;

/// All addresses that begin with the same bits. Parses `127.0.0.1`, `10.0.0.0/8` and `fd00::/8`.
///
/// ```
/// # use longshore::Network;
/// let private: Network = "10.0.0.0/8".parse().unwrap();
/// assert!(private.contains([10, 1, 2, 3].into()) && !private.contains([11, 1, 2, 3].into()));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    first: IpAddr,
    prefix: u8,
}

impl Network {
    /// The addresses that share the first `prefix` bits of `first`.
    #[cfg_attr(not(feature = "builtin"), expect(dead_code, reason = "the built-in kinds use it"))]
    pub(crate) const fn new(first: IpAddr, prefix: u8) -> Self {
        Network { first, prefix }
    }

    /// Whether the address belongs to the network. An IPv4-mapped IPv6 address is the IPv4 address.
    pub fn contains(&self, address: IpAddr) -> bool {
        self.has_prefix_of(address) || self.has_prefix_of(address.to_canonical())
    }

    fn has_prefix_of(&self, address: IpAddr) -> bool {
        // A prefix of 0 shifts by all bits, which only `checked_shr` allows.
        match (address, self.first) {
            (IpAddr::V4(address), IpAddr::V4(first)) => {
                let differ = address.to_bits() ^ first.to_bits();
                differ.checked_shr(32 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            (IpAddr::V6(address), IpAddr::V6(first)) => {
                let differ = address.to_bits() ^ first.to_bits();
                differ.checked_shr(128 - u32::from(self.prefix)).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let invalid =
            || format!("`{text}` is not an address or a network; write it like 127.0.0.1 or 10.0.0.0/8");
        let (first, prefix) = match text.split_once('/') {
            Some((first, prefix)) => (first, Some(prefix)),
            None => (text, None),
        };
        let first = first.trim_start_matches('[').trim_end_matches(']');
        let first: IpAddr = first.parse().map_err(|_| invalid())?;
        let bits = if first.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(bits), str::parse).map_err(|_| invalid())?;
        if prefix <= bits { Ok(Network { first, prefix }) } else { Err(invalid()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_contains_the_addresses_with_its_prefix() {
        for (network, inside, outside) in [
            ("127.0.0.1", "127.0.0.1", "127.0.0.2"),
            ("10.0.0.0/8", "::ffff:10.1.2.3", "11.0.0.0"),
            ("0.0.0.0/0", "255.255.255.255", "::1"),
            ("fd00::/8", "fdff::1", "fc00::1"),
            ("[::1]", "::1", "::2"),
        ] {
            let parsed: Network = network.parse().unwrap();
            assert!(parsed.contains(inside.parse().unwrap()), "{network}: {inside}");
            assert!(!parsed.contains(outside.parse().unwrap()), "{network}: {outside}");
        }
        for text in ["", "proxy", "10.0.0.0/33", "10.0.0.0/x", "::/129", "10.0.0.1:80"] {
            let error = text.parse::<Network>().unwrap_err();
            assert!(error.contains("10.0.0.0/8"), "{error}");
        }
    }
}
