//! Connections to the receiver: TLS over a pluggable transport.

use std::{sync::Arc, time::Duration};

use http::Uri;
use hyper::{rt, service::Service};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::connect::{self, HttpConnector},
    service::TowerToHyperService,
};
use rustls::ClientConfig;

use crate::connection::{self, BoxError, Connection, ConnectionSettings, Connector};

/// Interval of PINGs. A dead peer is detected after a PING and its timeout, well within the half minute in which a
/// disconnected agent must be back.
const PING: Duration = Duration::from_secs(15);
const PING_ANSWER: Duration = Duration::from_secs(5);
/// Unanswered TCP keepalive probes before an HTTP/1.1 connection is closed, since HTTP/1.1 has no PINGs. A proxy that
/// terminates TCP answers them itself; a dead peer behind it is detected by the deadline of the next request.
const PROBES: u32 = 2;
/// TCP user timeout: no keepalive probes are sent while data is unacknowledged, so this bounds it to the same time.
#[cfg(target_os = "linux")]
const ACKNOWLEDGED: Duration = Duration::from_secs(PING.as_secs() + PING_ANSWER.as_secs() * PROBES as u64);
const WINDOW: u32 = 64 << 10;

/// Opens one connection per identity.
#[derive(Clone)]
pub struct Dialer(Arc<dyn Fn(ClientConfig) -> Connector + Send + Sync>);

impl Dialer {
    /// A dialer over TCP.
    #[must_use]
    pub fn tcp() -> Self {
        Self::over(connector())
    }

    /// A dialer over the streams of `connector`, with TLS on top.
    pub fn over<C>(connector: C) -> Self
    where
        C: Clone + Send + Sync + 'static,
        TowerToHyperService<HttpsConnector<C>>: Service<
                Uri,
                Error = BoxError,
                Response: rt::Read + rt::Write + connect::Connection + Unpin + Send + 'static,
                Future: Send + 'static,
            > + Send
            + Sync
            + 'static,
    {
        Self(Arc::new(move |tls| {
            connection::tls_connector(
                HttpsConnectorBuilder::new()
                    .with_tls_config(tls)
                    .https_only()
                    .enable_all_versions()
                    .wrap_connector(connector.clone()),
            )
        }))
    }

    /// A connection that is not opened yet.
    pub(crate) fn client(&self, tls: ClientConfig) -> Connection {
        let settings = ConnectionSettings {
            stream_window: WINDOW,
            connection_window: WINDOW,
            ping: PING,
            ping_answer: PING_ANSWER,
        };
        Connection::new((self.0)(tls), settings)
    }
}

fn connector() -> HttpConnector {
    let mut connector = connection::tcp_connector(PING);
    connector.set_keepalive_interval(Some(PING_ANSWER));
    connector.set_keepalive_retries(Some(PROBES));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(ACKNOWLEDGED));
    connector
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;
    use tokio::net::TcpListener;

    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn dialled_socket_has_keepalive_and_user_timeout() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("https://{}", listener.local_addr().unwrap()).parse().unwrap();
        let stream = TowerToHyperService::new(connector()).call(address).await.unwrap().into_inner();
        let socket = SockRef::from(&stream);
        assert!(socket.tcp_nodelay().unwrap() && socket.keepalive().unwrap());
        let probes = (socket.tcp_keepalive_time(), socket.tcp_keepalive_interval(), socket.tcp_keepalive_retries());
        assert_eq!((probes.0.unwrap(), probes.1.unwrap(), probes.2.unwrap()), (PING, PING_ANSWER, PROBES));
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(ACKNOWLEDGED));
    }
}
