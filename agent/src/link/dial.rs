//! How the receiver is reached: over TLS, over whatever opens connections.

use std::{sync::Arc, time::Duration};

use http::Uri;
use hyper::{rt, service::Service};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::connect::{self, HttpConnector},
    service::TowerToHyperService,
};
use rustls::ClientConfig;

use crate::connection::{self, BoxError, Connection, Open, Terms};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection whose other end is gone without a word is noticed after a PING and the wait for its answer: well within the half
/// minute in which an agent that was cut off shall be back.
const PING: Duration = Duration::from_secs(15);
const PING_ANSWER: Duration = Duration::from_secs(5);
/// Over HTTP/1.1 there are no PINGs but probes of TCP; so many go unanswered before a connection is given up. They reach as far as TCP does: a
/// proxy that ends it answers them itself, and who is gone behind it is noticed by the next request, which is not answered in time.
const PROBES: u32 = 2;
/// There are no probes while a request waits to be acknowledged: it may do so for as long.
#[cfg(target_os = "linux")]
const ACKNOWLEDGED: Duration = Duration::from_secs(PING.as_secs() + PING_ANSWER.as_secs() * PROBES as u64);
const WINDOW: u32 = 64 << 10;

/// Makes connections, one for each identity.
#[derive(Clone)]
pub struct Dial(Arc<dyn Fn(ClientConfig) -> Open + Send + Sync>);

impl Dial {
    /// Over TCP.
    #[must_use]
    pub fn tcp() -> Self {
        Self::over(connector())
    }

    /// Over what a connector opens; TLS comes on top of it.
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
            connection::over(
                HttpsConnectorBuilder::new()
                    .with_tls_config(tls)
                    .https_only()
                    .enable_all_versions()
                    .wrap_connector(connector.clone()),
            )
        }))
    }

    /// Nothing is opened yet.
    pub(super) fn client(&self, tls: ClientConfig) -> Connection {
        let terms = Terms { stream_window: WINDOW, connection_window: WINDOW, ping: PING, ping_answer: PING_ANSWER };
        Connection::new((self.0)(tls), terms)
    }
}

fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_keepalive(Some(PING));
    connector.set_keepalive_interval(Some(PING_ANSWER));
    connector.set_keepalive_retries(Some(PROBES));
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(ACKNOWLEDGED));
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector
}

#[cfg(test)]
mod tests {
    use socket2::SockRef;
    use tokio::net::TcpListener;

    use super::*;

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_dialled_socket_notices_who_is_gone() {
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
