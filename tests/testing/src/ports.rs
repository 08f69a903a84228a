//! Free TCP ports on loopback.
//!
//! Ports are below the kernel's ephemeral range. A port of that range could be taken by an outgoing connection while
//! its server is down (a client that retries can even connect to itself), and a killed server could then not return to
//! its port.

use std::{
    collections::BTreeSet,
    fs,
    hash::{BuildHasher as _, RandomState},
    io,
    net::{Ipv4Addr, TcpListener},
};

use parking_lot::Mutex;

/// The lowest port handed out.
const LOWEST: u16 = 15_000;
/// Ports that are tried before the kernel chooses one.
const TRIES: usize = 64;

/// Ports that this process has handed out, so that no two of its children get the same port before either has bound it.
static ASSIGNED: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port of 127.0.0.1 that was free a moment ago. Another process may take it meanwhile: the caller must be ready to
/// retry with another one.
///
/// # Errors
/// If no port can be bound at all.
pub fn free() -> io::Result<u16> {
    let mut assigned = ASSIGNED.lock();
    let highest = ephemeral_start();
    for _ in 0..TRIES {
        let port = random_between(LOWEST, highest);
        if !assigned.contains(&port) && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            assigned.insert(port);
            return Ok(port);
        }
    }
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr().map(|address| address.port())
}

/// Start of the kernel's ephemeral range; its usual value where it cannot be read.
fn ephemeral_start() -> u16 {
    const USUAL: u16 = 32_768;
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let start = range.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(USUAL);
    if start > LOWEST + 1_000 { start } else { USUAL }
}

fn random_between(low: u16, high: u16) -> u16 {
    // The standard library seeds each `RandomState` anew from the system.
    let span = u64::from(high - low);
    low + u16::try_from(RandomState::new().hash_one(()) % span).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_differ_and_stay_below_the_kernels_range() {
        let ports: BTreeSet<u16> = (0..20).map(|_| free().expect("a free port")).collect();
        assert_eq!(ports.len(), 20);
        assert!(ports.iter().all(|port| (LOWEST..ephemeral_start()).contains(port)), "{ports:?}");
    }
}
