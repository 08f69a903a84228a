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
/// TCP probes that go unanswered before the same is said of a connection of HTTP/1.1.
const PROBES: u32 = 2;
const WINDOW: u32 = 64 << 10;

/// Makes connections, one for each identity.
#[derive(Clone)]
pub struct Dial(Arc<dyn Fn(ClientConfig) -> Open + Send + Sync>);

impl Dial {
    /// Over TCP.
    #[must_use]
    pub fn tcp() -> Self {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        // What PINGs are for HTTP/2.
        connector.set_keepalive(Some(PING));
        connector.set_keepalive_interval(Some(PING_ANSWER));
        connector.set_keepalive_retries(Some(PROBES));
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        Self::over(connector)
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
