//! Networks from which clients connect.

use std::net::{IpAddr, Ipv6Addr};

/// The addresses of one customer: one of IPv4, a /64 of IPv6.
pub(super) fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => IpAddr::V4(address),
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_customer_are_one_network() {
        let of = |address: &str| network(address.parse().unwrap());
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
    }
}
