//! What carries the requests: an HTTP client over TLS, over whatever opens connections.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{
        Client, ResponseFuture,
        connect::{Connect, HttpConnector},
    },
    rt::{TokioExecutor, TokioTimer},
};
use rustls::ClientConfig;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// A connection whose other end is gone without a word is noticed after a PING and the wait for its answer: well within the half
/// minute in which an agent that was cut off shall be back.
const PING: Duration = Duration::from_secs(15);
const PING_ANSWER: Duration = Duration::from_secs(5);
const WINDOW: u32 = 64 << 10;

/// Sends one request; one connection serves all of them.
pub(super) type Exchange = Box<dyn Fn(Request<Full<Bytes>>) -> ResponseFuture + Send + Sync>;

/// Makes HTTP clients, one for each identity.
#[derive(Clone)]
pub struct Dial(Arc<dyn Fn(ClientConfig) -> Exchange + Send + Sync>);

impl Dial {
    /// Over TCP.
    #[must_use]
    pub fn tcp() -> Self {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_nodelay(true);
        connector.set_keepalive(Some(PING));
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        Self::over(connector)
    }

    /// Over what a connector opens; TLS comes on top of it.
    pub fn over<C>(connector: C) -> Self
    where
        C: Clone + Send + Sync + 'static,
        HttpsConnector<C>: Connect + Clone,
    {
        Self(Arc::new(move |tls| {
            let connector = HttpsConnectorBuilder::new()
                .with_tls_config(tls)
                .https_only()
                .enable_all_versions()
                .wrap_connector(connector.clone());
            let client = Client::builder(TokioExecutor::new())
                .timer(TokioTimer::new())
                .pool_timer(TokioTimer::new())
                .pool_max_idle_per_host(1)
                // The connection is kept over a heartbeat interval, however long the receiver makes it.
                .pool_idle_timeout(None)
                .http2_initial_stream_window_size(WINDOW)
                .http2_initial_connection_window_size(WINDOW)
                .http2_keep_alive_interval(PING)
                .http2_keep_alive_timeout(PING_ANSWER)
                .http2_keep_alive_while_idle(true)
                .build(connector);
            Box::new(move |request| client.request(request))
        }))
    }

    /// Nothing is connected yet.
    pub(super) fn client(&self, tls: ClientConfig) -> Exchange {
        (self.0)(tls)
    }
}
