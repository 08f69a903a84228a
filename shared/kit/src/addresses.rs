//! Allowed addresses of hosts that others name: networks, the ranges that are refused by default, and the flags that
//! allow and deny. Pure.

use std::{
    fmt,
    net::{AddrParseError, IpAddr, Ipv4Addr, Ipv6Addr},
    num::ParseIntError,
    str::FromStr,
};

use strum::IntoStaticStr;
use thiserror::Error;

/// A network: an address and its prefix length. Bits beyond the prefix are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cidr {
    network: IpAddr,
    prefix: u8,
}

/// Reason for which a text is not a network.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ParseCidrError {
    /// The part before the slash is not an address.
    #[error("`{0}` has no IP address before the slash")]
    Address(String, #[source] AddrParseError),
    /// The part after the slash is not a number.
    #[error("`{0}` has no number after the slash")]
    Prefix(String, #[source] ParseIntError),
    /// The prefix has more than 32 or 128 bits.
    #[error("the prefix of `{0}` is longer than the address")]
    TooLong(String),
    /// Bits beyond the prefix. `10.0.0.1/8` may be a typing error for one address; guessing would allow or deny a whole
    /// network.
    #[error("`{0}` has bits beyond its prefix")]
    HostBits(String),
}

impl Cidr {
    const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Self {
        Self { network: IpAddr::V4(Ipv4Addr::new(a, b, c, d)), prefix }
    }

    const fn v6(network: u128, prefix: u8) -> Self {
        Self { network: IpAddr::V6(Ipv6Addr::from_bits(network)), prefix }
    }

    /// True if the address is in this network. IPv4 and IPv6 never contain each other; [`AddressRules`] unwraps mapped
    /// addresses.
    pub fn contains(&self, address: IpAddr) -> bool {
        masked(address, self.prefix) == self.network
    }
}

/// The address with its bits beyond the prefix set to zero.
fn masked(address: IpAddr, prefix: u8) -> IpAddr {
    let prefix = u32::from(prefix);
    match address {
        IpAddr::V4(v4) => (v4 & Ipv4Addr::from_bits(!u32::MAX.checked_shr(prefix).unwrap_or(0))).into(),
        IpAddr::V6(v6) => (v6 & Ipv6Addr::from_bits(!u128::MAX.checked_shr(prefix).unwrap_or(0))).into(),
    }
}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    /// Parses `address/prefix`; an address alone is a network of one.
    fn from_str(text: &str) -> Result<Self, ParseCidrError> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let network: IpAddr = address.parse().map_err(|source| ParseCidrError::Address(text.to_owned(), source))?;
        let bits = if network.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => prefix.parse().map_err(|source| ParseCidrError::Prefix(text.to_owned(), source))?,
            None => bits,
        };
        if prefix > bits {
            return Err(ParseCidrError::TooLong(text.to_owned()));
        }
        if masked(network, prefix) != network {
            return Err(ParseCidrError::HostBits(text.to_owned()));
        }
        Ok(Self { network, prefix })
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

/// Reason for which an address is refused. The name is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ForbiddenReason {
    /// The receiver's own host.
    #[error("it is a loopback address")]
    Loopback,
    /// The receiver's own network segment.
    #[error("it is a link-local address")]
    LinkLocal,
    /// The unspecified address; many systems take it for the own host.
    #[error("it is an unspecified address")]
    Unspecified,
    /// A group of hosts.
    #[error("it is a multicast address")]
    Multicast,
    /// Broadcast, deprecated, or reserved for future use.
    #[error("it is a reserved address")]
    Reserved,
    /// A translation or a tunnel whose end cannot be read from the address with certainty.
    #[error("it is an address of a translation or a tunnel")]
    Tunnel,
    /// Metadata services of clouds, which issue credentials without authentication.
    #[error("it is an address of a cloud's metadata service")]
    Metadata,
    /// A network of `--deny-runtime-addresses`.
    #[error("its network is denied by the receiver's flags")]
    Denied,
    /// A network of a company or a cluster. Refused only by [`AddressRules::check_public`].
    #[error("it is a private address")]
    Private,
}

/// A forbidden address of a runtime, in the source chain of the error of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the runtime's address {address} is forbidden: {reason}")]
pub struct ForbiddenAddressError {
    /// The resolved address.
    pub address: IpAddr,
    /// The first rule that refused it.
    pub reason: ForbiddenReason,
}

/// Refused ranges. Metadata services come first, because their reason is more specific than "link-local".
const FORBIDDEN: &[(Cidr, ForbiddenReason)] = &[
    (Cidr::v4(169, 254, 169, 254, 32), ForbiddenReason::Metadata),
    (Cidr::v4(169, 254, 170, 2, 32), ForbiddenReason::Metadata), // task credentials, AWS
    (Cidr::v4(168, 63, 129, 16, 32), ForbiddenReason::Metadata), // platform host, Azure
    (Cidr::v4(100, 100, 100, 200, 32), ForbiddenReason::Metadata), // Alibaba
    (Cidr::v4(192, 0, 0, 192, 32), ForbiddenReason::Metadata),   // Oracle
    (Cidr::v6(0xfd00_0ec2_0000_0000_0000_0000_0000_0254, 128), ForbiddenReason::Metadata), // AWS
    (Cidr::v6(0xfd20_00ce_0000_0000_0000_0000_0000_0254, 128), ForbiddenReason::Metadata), // GCP
    (Cidr::v4(127, 0, 0, 0, 8), ForbiddenReason::Loopback),
    (Cidr::v6(1, 128), ForbiddenReason::Loopback),
    (Cidr::v4(169, 254, 0, 0, 16), ForbiddenReason::LinkLocal),
    (Cidr::v6(0xfe80 << 112, 10), ForbiddenReason::LinkLocal),
    (Cidr::v4(0, 0, 0, 0, 8), ForbiddenReason::Unspecified),
    (Cidr::v6(0, 128), ForbiddenReason::Unspecified),
    (Cidr::v4(224, 0, 0, 0, 4), ForbiddenReason::Multicast),
    (Cidr::v6(0xff00 << 112, 8), ForbiddenReason::Multicast),
    (Cidr::v4(240, 0, 0, 0, 4), ForbiddenReason::Reserved),
    (Cidr::v6(0xfec0 << 112, 10), ForbiddenReason::Reserved), // site-local, RFC 3879
    (Cidr::v6(0x0064_ff9b_0001 << 80, 48), ForbiddenReason::Tunnel), // local NAT64, RFC 8215
    (Cidr::v6(0x2001_0000 << 96, 32), ForbiddenReason::Tunnel), // Teredo, RFC 4380
];

/// Networks that are not reached from the internet (RFC 1918, RFC 6598, RFC 4193).
const PRIVATE: [Cidr; 5] = [
    Cidr::v4(10, 0, 0, 0, 8),
    Cidr::v4(172, 16, 0, 0, 12),
    Cidr::v4(192, 168, 0, 0, 16),
    Cidr::v4(100, 64, 0, 0, 10),
    Cidr::v6(0xfc00 << 112, 7),
];

/// Rules for addresses. An allowed network takes precedence over a denied one, because it is the narrower, deliberate
/// choice; private networks are not refused by default, because runtimes may be in a peered one.
#[derive(Clone, Debug, Default)]
pub struct AddressRules {
    /// `--allow-runtime-addresses`.
    pub allow: Vec<Cidr>,
    /// `--deny-runtime-addresses`.
    pub deny: Vec<Cidr>,
}

impl AddressRules {
    /// Checks one resolved address. An IPv6 address that embeds an IPv4 address is checked as both, because the
    /// connection ends at the latter.
    ///
    /// # Errors
    /// [`ForbiddenAddressError`].
    pub fn check(&self, address: IpAddr) -> Result<(), ForbiddenAddressError> {
        let is_in = is_in(address);
        if self.allow.iter().any(&is_in) {
            return Ok(());
        }
        let denied = self.deny.iter().map(|network| (*network, ForbiddenReason::Denied));
        match FORBIDDEN.iter().copied().chain(denied).find(|(network, _)| is_in(network)) {
            Some((_, reason)) => Err(ForbiddenAddressError { address, reason }),
            None => Ok(()),
        }
    }

    /// Checks one resolved address of a host that only a redirect names: also private networks are refused, unless they
    /// are allowed.
    ///
    /// # Errors
    /// [`ForbiddenAddressError`].
    pub fn check_public(&self, address: IpAddr) -> Result<(), ForbiddenAddressError> {
        let is_in = is_in(address);
        self.check(address)?;
        if PRIVATE.iter().any(&is_in) && !self.allow.iter().any(&is_in) {
            return Err(ForbiddenAddressError { address, reason: ForbiddenReason::Private });
        }
        Ok(())
    }
}

/// True for a network with the address, or with the IPv4 address that it embeds.
fn is_in(address: IpAddr) -> impl Fn(&Cidr) -> bool {
    let embedded = embedded_ipv4(address);
    move |network| network.contains(address) || embedded.is_some_and(|address| network.contains(address))
}

/// The IPv4 address that is embedded in a mapped, compatible, NAT64 (RFC 6052) or 6to4 (RFC 3056) address.
fn embedded_ipv4(address: IpAddr) -> Option<IpAddr> {
    let IpAddr::V6(v6) = address else { return None };
    let (high, low) = match v6.segments() {
        // `::` and `::1` do not embed an IPv4 address.
        [0, 0, 0, 0, 0, 0, 0, 0 | 1] => return None,
        [0, 0, 0, 0, 0, 0 | 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => {
            (high, low)
        }
        _ => return None,
    };
    Some(Ipv4Addr::from_bits(u32::from(high) << 16 | u32::from(low)).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn cidr(text: &str) -> Cidr {
        text.parse().unwrap()
    }

    #[test]
    fn networks_contain_addresses_of_their_prefix() {
        for (network, address, inside) in [
            ("10.0.0.0/8", "10.255.255.255", true),
            ("10.0.0.0/8", "11.0.0.0", false),
            ("10.1.2.3", "10.1.2.3", true),
            ("10.1.2.3/32", "10.1.2.4", false),
            ("0.0.0.0/0", "203.0.113.9", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::/0", "fe80::1", true),
            ("::1", "::1", true),
        ] {
            assert_eq!(cidr(network).contains(ip(address)), inside, "{network} {address}");
        }
        assert_eq!(cidr("10.0.0.0/8").to_string(), "10.0.0.0/8");
    }

    #[test]
    fn parse_errors_name_the_fault() {
        for (text, expected) in [
            ("", "has no IP address"),
            ("localhost/8", "has no IP address"),
            ("10.0.0.0/x", "has no number"),
            ("10.0.0.0/33", "longer than the address"),
            ("::/129", "longer than the address"),
            ("10.0.0.1/8", "bits beyond its prefix"),
            ("2001:db8::1/32", "bits beyond its prefix"),
        ] {
            let error = text.parse::<Cidr>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn addresses_of_the_receiver_and_of_clouds_are_forbidden() {
        let rules = AddressRules { allow: vec![], deny: vec![cidr("10.96.0.0/12"), cidr("fd00:1::/32")] };
        for (address, reason) in [
            ("127.0.0.1", ForbiddenReason::Loopback),
            ("127.255.255.254", ForbiddenReason::Loopback),
            ("::1", ForbiddenReason::Loopback),
            ("::ffff:127.0.0.1", ForbiddenReason::Loopback),
            ("::127.0.0.1", ForbiddenReason::Loopback),
            ("64:ff9b::127.0.0.1", ForbiddenReason::Loopback),
            ("2002:7f00:1::", ForbiddenReason::Loopback),
            ("169.254.1.1", ForbiddenReason::LinkLocal),
            ("fe80::1", ForbiddenReason::LinkLocal),
            ("febf::1", ForbiddenReason::LinkLocal),
            ("169.254.169.254", ForbiddenReason::Metadata),
            ("::ffff:169.254.169.254", ForbiddenReason::Metadata),
            ("fd00:ec2::254", ForbiddenReason::Metadata),
            ("fd20:ce::254", ForbiddenReason::Metadata),
            ("168.63.129.16", ForbiddenReason::Metadata),
            ("0.0.0.0", ForbiddenReason::Unspecified),
            ("0.1.2.3", ForbiddenReason::Unspecified),
            ("::", ForbiddenReason::Unspecified),
            ("224.0.0.1", ForbiddenReason::Multicast),
            ("ff02::1", ForbiddenReason::Multicast),
            ("255.255.255.255", ForbiddenReason::Reserved),
            ("fec0::1", ForbiddenReason::Reserved),
            ("feff::1", ForbiddenReason::Reserved),
            ("64:ff9b:1::127.0.0.1", ForbiddenReason::Tunnel),
            ("64:ff9b:1:fffe::a00:1", ForbiddenReason::Tunnel),
            ("2001::1", ForbiddenReason::Tunnel),
            ("2001:0:4136:e378:8000:63bf:80ff:fffe", ForbiddenReason::Tunnel),
            ("10.96.0.1", ForbiddenReason::Denied),
            ("::ffff:10.111.0.1", ForbiddenReason::Denied),
            ("fd00:1::1", ForbiddenReason::Denied),
        ] {
            assert_eq!(
                rules.check(ip(address)),
                Err(ForbiddenAddressError { address: ip(address), reason }),
                "{address}"
            );
        }
        for address in [
            "10.0.0.1",
            "192.168.1.1",
            "172.16.0.1",
            "203.0.113.9",
            "2001:db8::1",
            "fd00:2::1",
            "::ffff:10.0.0.1",
            "2001:1::1",
        ] {
            assert_eq!(rules.check(ip(address)), Ok(()), "{address}");
        }
    }

    #[test]
    fn private_networks_are_refused_for_redirects_only() {
        let rules = AddressRules { allow: vec![cidr("10.1.0.0/16")], deny: vec![cidr("203.0.113.0/24")] };
        for (address, reason) in [
            ("10.0.0.1", ForbiddenReason::Private),
            ("172.31.255.1", ForbiddenReason::Private),
            ("192.168.1.1", ForbiddenReason::Private),
            ("100.127.0.1", ForbiddenReason::Private),
            ("fd00::1", ForbiddenReason::Private),
            ("::ffff:10.0.0.1", ForbiddenReason::Private),
            ("64:ff9b::192.168.1.1", ForbiddenReason::Private),
            ("127.0.0.1", ForbiddenReason::Loopback),
            ("169.254.169.254", ForbiddenReason::Metadata),
            ("203.0.113.9", ForbiddenReason::Denied),
        ] {
            assert_eq!(
                rules.check_public(ip(address)),
                Err(ForbiddenAddressError { address: ip(address), reason }),
                "{address}"
            );
        }
        for address in ["10.1.0.1", "198.51.100.1", "172.32.0.1", "2001:db8::1"] {
            assert_eq!(rules.check_public(ip(address)), Ok(()), "{address}");
        }
    }

    #[test]
    fn allowed_networks_take_precedence() {
        let allow = vec![cidr("127.0.0.1"), cidr("10.96.0.10")];
        let rules = AddressRules { allow, deny: vec![cidr("10.96.0.0/12")] };
        for address in ["127.0.0.1", "::ffff:127.0.0.1", "10.96.0.10"] {
            assert_eq!(rules.check(ip(address)), Ok(()), "{address}");
        }
        for address in ["127.0.0.2", "::1", "10.96.0.11", "169.254.169.254"] {
            assert!(rules.check(ip(address)).is_err(), "{address}");
        }
    }
}
