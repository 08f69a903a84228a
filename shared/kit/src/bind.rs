//! TCP listeners for both address families.

use std::{
    io::{self, ErrorKind},
    net::{Ipv4Addr, SocketAddr},
};

use socket2::SockRef;
use tokio::net::{TcpListener, TcpSocket};

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1_024;

/// Binds an address. `[::]` serves IPv4 as well; on a machine without IPv6, `0.0.0.0` replaces it.
///
/// # Errors
/// The address cannot be bound.
pub fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    bind_with(address, TcpSocket::new_v6)
}

/// [`bind`] with the function that creates IPv6 sockets.
fn bind_with(address: SocketAddr, new_v6: impl FnOnce() -> io::Result<TcpSocket>) -> io::Result<TcpListener> {
    let SocketAddr::V6(v6) = address else { return start(TcpSocket::new_v4()?, address) };
    if !v6.ip().is_unspecified() {
        return start(new_v6()?, address);
    }
    let replacement = || start(TcpSocket::new_v4()?, (Ipv4Addr::UNSPECIFIED, v6.port()).into());
    // The kernel may lack IPv6, or have it switched off for every interface.
    let Ok(socket) = new_v6() else { return replacement() };
    // The system's default may be to serve IPv6 alone.
    SockRef::from(&socket).set_only_v6(false)?;
    match start(socket, address) {
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => replacement(),
        bound => bound,
    }
}

fn start(socket: TcpSocket, address: SocketAddr) -> io::Result<TcpListener> {
    // A restarted process binds its address while connections of the previous one still linger.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn unspecified_address_serves_both_families() {
        let listener = bind("[::]:0".parse().unwrap()).unwrap();
        let port = listener.local_addr().unwrap().port();
        for host in ["127.0.0.1", "::1"] {
            assert!(TcpStream::connect((host, port)).await.is_ok(), "{host}");
        }
    }

    #[tokio::test]
    async fn ipv4_replaces_the_unspecified_address_on_a_machine_without_ipv6() {
        let without_ipv6 = || Err(io::Error::other("address family not supported"));
        let listener = bind_with("[::]:0".parse().unwrap(), without_ipv6).unwrap();
        assert_eq!(listener.local_addr().unwrap().ip(), Ipv4Addr::UNSPECIFIED);
        assert!(bind_with("[::1]:0".parse().unwrap(), without_ipv6).is_err(), "a chosen address is not replaced");
    }

    #[tokio::test]
    async fn address_in_use_is_an_error() {
        let first = bind("[::]:0".parse().unwrap()).unwrap();
        let error = bind(first.local_addr().unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrInUse);
    }
}
