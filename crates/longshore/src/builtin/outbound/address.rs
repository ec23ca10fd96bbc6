//! Which addresses are on the public internet, and which belong to this machine, to
//! an internal network or to a special purpose. `rules` decides which of them may be
//! called.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::network::Network;

/// The category of a special address, with its article for messages, or `None` for a
/// public address. Follows IANA's registries of special-purpose addresses.
pub(super) fn special_category(addr: IpAddr) -> Option<&'static str> {
    let v6 = match addr {
        IpAddr::V4(_) => {
            let network =
                V4.iter().find(|(first, prefix, _)| Network::new((*first).into(), *prefix).contains(addr));
            return network.map(|(_, _, category)| *category);
        }
        IpAddr::V6(v6) => v6,
    };
    let network = V6.iter().find(|(first, prefix, _)| Network::new((*first).into(), *prefix).contains(addr));
    if let Some((_, _, category)) = network {
        return Some(category);
    }
    match v6.segments() {
        // 6to4 is routed to the IPv4 address inside.
        [0x2002, high, low, ..] => {
            special_category(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)).into())
        }
        // 2000::/3 is the only part of IPv6 that is assigned.
        [0x2000..0x4000, ..] => None,
        _ => Some("a reserved"),
    }
}

const V4: &[(Ipv4Addr, u8, &str)] = &[
    (Ipv4Addr::new(0, 0, 0, 0), 8, "an unspecified"),
    (Ipv4Addr::new(10, 0, 0, 0), 8, "a private"),
    (Ipv4Addr::new(100, 64, 0, 0), 10, "a carrier-grade NAT"),
    (Ipv4Addr::new(127, 0, 0, 0), 8, "a loopback"),
    (Ipv4Addr::new(169, 254, 0, 0), 16, "a link-local"),
    (Ipv4Addr::new(172, 16, 0, 0), 12, "a private"),
    (Ipv4Addr::new(192, 0, 0, 0), 24, "an IETF protocol"),
    (Ipv4Addr::new(192, 0, 2, 0), 24, "a documentation"),
    (Ipv4Addr::new(192, 88, 99, 0), 24, "a 6to4 relay"),
    (Ipv4Addr::new(192, 168, 0, 0), 16, "a private"),
    (Ipv4Addr::new(198, 18, 0, 0), 15, "a benchmarking"),
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
    // Includes the benchmarking network, and Teredo, whose addresses are routed to IPv4.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23, "an IETF protocol"),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32, "a documentation"),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20, "a documentation"),
    (Ipv6Addr::new(0xfc00, 0, 0, 0, 0, 0, 0, 0), 7, "a private (ULA)"),
    (Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 0), 10, "a link-local"),
    (Ipv6Addr::new(0xff00, 0, 0, 0, 0, 0, 0, 0), 8, "a multicast"),
];

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Addresses of every special category.
    pub(in crate::builtin::outbound) const SPECIAL: &[&str] = &[
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

    /// Public addresses, many of them next to a special network.
    const PUBLIC: &[&str] = &[
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
    fn every_category_of_special_address_is_recognised_and_its_neighbours_are_public() {
        for addr in SPECIAL {
            assert!(special_category(addr.parse().unwrap()).is_some(), "{addr}");
        }
        for addr in PUBLIC {
            assert_eq!(special_category(addr.parse().unwrap()), None, "{addr}");
        }
    }
}
