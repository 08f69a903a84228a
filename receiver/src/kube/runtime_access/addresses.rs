//! Allowed addresses of runtimes: networks, the ranges that are refused by default, and the flags that allow and deny.
//! Pure.

use std::{
    fmt,
    net::{AddrParseError, IpAddr, Ipv4Addr, Ipv6Addr},
    num::ParseIntError,
    str::FromStr,
};

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
    #[must_use]
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.network, address) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                (network.to_bits() ^ address.to_bits()) & mask4(self.prefix) == 0
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                (network.to_bits() ^ address.to_bits()) & mask6(self.prefix) == 0
            }
            _ => false,
        }
    }
}

fn mask4(prefix: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix.min(32))).unwrap_or(0)
}

fn mask6(prefix: u8) -> u128 {
    u128::MAX.checked_shl(128 - u32::from(prefix.min(128))).unwrap_or(0)
}

impl FromStr for Cidr {
    type Err = ParseCidrError;

    /// Parses `address/prefix`; an address alone is a network of one.
    fn from_str(text: &str) -> Result<Self, ParseCidrError> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, Some(prefix)),
            None => (text, None),
        };
        let network: IpAddr = address.parse().map_err(|source| ParseCidrError::Address(text.to_owned(), source))?;
        let bits = if network.is_ipv4() { 32 } else { 128 };
        let prefix = match prefix {
            Some(prefix) => prefix.parse().map_err(|source| ParseCidrError::Prefix(text.to_owned(), source))?,
            None => bits,
        };
        if prefix > bits {
            return Err(ParseCidrError::TooLong(text.to_owned()));
        }
        let has_host_bits = match network {
            IpAddr::V4(network) => network.to_bits() & !mask4(prefix) != 0,
            IpAddr::V6(network) => network.to_bits() & !mask6(prefix) != 0,
        };
        if has_host_bits { Err(ParseCidrError::HostBits(text.to_owned())) } else { Ok(Self { network, prefix }) }
    }
}

impl fmt::Display for Cidr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.network, self.prefix)
    }
}

/// Reason for which an address is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForbiddenReason {
    /// The receiver's own host.
    Loopback,
    /// The receiver's own network segment.
    LinkLocal,
    /// The unspecified address; many systems take it for the own host.
    Unspecified,
    /// A group of hosts.
    Multicast,
    /// Broadcast, or reserved for future use.
    Reserved,
    /// Metadata services of clouds, which issue credentials without authentication.
    Metadata,
    /// A network of `--deny-runtime-addresses`.
    Denied,
}

impl ForbiddenReason {
    /// Metric label, of a closed set.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::LinkLocal => "link_local",
            Self::Unspecified => "unspecified",
            Self::Multicast => "multicast",
            Self::Reserved => "reserved",
            Self::Metadata => "metadata",
            Self::Denied => "denied",
        }
    }
}

impl fmt::Display for ForbiddenReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Loopback => "it is a loopback address",
            Self::LinkLocal => "it is a link-local address",
            Self::Unspecified => "it is an unspecified address",
            Self::Multicast => "it is a multicast address",
            Self::Reserved => "it is a reserved address",
            Self::Metadata => "it is an address of a cloud's metadata service",
            Self::Denied => "its network is denied by the receiver's flags",
        })
    }
}

/// A forbidden address of a runtime, in the source chain of a [`kube::Error`].
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
];

/// Rules for addresses. An allowed network takes precedence over a denied one, because it is the narrower, deliberate
/// choice; private networks are not refused by default, because runtimes may be in a peered one.
#[derive(Clone, Debug, Default)]
pub struct AddressRules {
    allow: Vec<Cidr>,
    deny: Vec<Cidr>,
}

impl AddressRules {
    /// Takes `--allow-runtime-addresses` and `--deny-runtime-addresses`.
    #[must_use]
    pub fn new(allow: Vec<Cidr>, deny: Vec<Cidr>) -> Self {
        Self { allow, deny }
    }

    /// Checks one resolved address. An IPv6 address that embeds an IPv4 address is checked as both, because the
    /// connection ends at the latter.
    ///
    /// # Errors
    /// [`ForbiddenAddressError`].
    pub fn check(&self, address: IpAddr) -> Result<(), ForbiddenAddressError> {
        let embedded = embedded_ipv4(address);
        let is_in =
            |network: &Cidr| network.contains(address) || embedded.is_some_and(|address| network.contains(address));
        if self.allow.iter().any(is_in) {
            return Ok(());
        }
        let denied = self.deny.iter().map(|network| (*network, ForbiddenReason::Denied));
        match FORBIDDEN.iter().copied().chain(denied).find(|(network, _)| is_in(network)) {
            Some((_, reason)) => Err(ForbiddenAddressError { address, reason }),
            None => Ok(()),
        }
    }
}

/// The IPv4 address that is embedded in a mapped, compatible, NAT64 (RFC 6052) or 6to4 (RFC 3056) address.
fn embedded_ipv4(address: IpAddr) -> Option<IpAddr> {
    const LOW: [Cidr; 3] = [
        Cidr::v6(0xffff_0000_0000, 96),                          // ::ffff:0:0/96
        Cidr::v6(0, 96),                                         // ::/96
        Cidr::v6(0x0064_ff9b_0000_0000_0000_0000_0000_0000, 96), // 64:ff9b::/96
    ];
    const SIX_TO_FOUR: Cidr = Cidr::v6(0x2002 << 112, 16);
    let IpAddr::V6(v6) = address else { return None };
    // `::` and `::1` do not embed an IPv4 address.
    if v6.is_unspecified() || v6.is_loopback() {
        return None;
    }
    let bits = v6.to_bits();
    let v4 = if LOW.iter().any(|network| network.contains(address)) {
        bits & u128::from(u32::MAX)
    } else if SIX_TO_FOUR.contains(address) {
        (bits >> 80) & u128::from(u32::MAX)
    } else {
        return None;
    };
    u32::try_from(v4).ok().map(|v4| IpAddr::V4(Ipv4Addr::from_bits(v4)))
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
        let rules = AddressRules::new(vec![], vec![cidr("10.96.0.0/12"), cidr("fd00:1::/32")]);
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
        for address in
            ["10.0.0.1", "192.168.1.1", "172.16.0.1", "203.0.113.9", "2001:db8::1", "fd00:2::1", "::ffff:10.0.0.1"]
        {
            assert_eq!(rules.check(ip(address)), Ok(()), "{address}");
        }
    }

    #[test]
    fn allowed_networks_take_precedence() {
        let rules = AddressRules::new(vec![cidr("127.0.0.1"), cidr("10.96.0.10")], vec![cidr("10.96.0.0/12")]);
        for address in ["127.0.0.1", "::ffff:127.0.0.1", "10.96.0.10"] {
            assert_eq!(rules.check(ip(address)), Ok(()), "{address}");
        }
        for address in ["127.0.0.2", "::1", "10.96.0.11", "169.254.169.254"] {
            assert!(rules.check(ip(address)).is_err(), "{address}");
        }
    }
}
