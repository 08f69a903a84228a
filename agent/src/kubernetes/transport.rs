//! HTTPS to the API server: one connection, credentials that are read anew, and a new client when the trust bundle changes.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response, Uri, header, uri::PathAndQuery};
use http_body_util::{BodyExt, Full};
use hyper_rustls::{FixedServerNameResolver, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;

use super::{
    access::{Access, Connect},
    lane::{Body, Transport},
};
use crate::connection::{self, BoxError, Connection, Terms};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Receive windows: what a peer may send before we read it, and so what it may cost us.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 256 << 10;

/// See the module.
pub(super) struct Https {
    access: Access,
    current: Mutex<Current>,
}

/// A client, and the trust bundle that it was made of.
struct Current {
    bundle: Vec<u8>,
    http: Arc<Connection>,
}

impl Https {
    /// Nothing is connected yet.
    pub(super) fn new(access: Access) -> Result<Self, Connect> {
        let bundle = access.bundle.read()?;
        let http = client(&access, &bundle)?;
        Ok(Self { access, current: Mutex::new(Current { bundle, http }) })
    }

    /// The client for the trust bundle as it is now. A bundle that cannot be used leaves the old client in place.
    fn http(&self) -> Arc<Connection> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if self.access.bundle.may_change() {
            match self.access.bundle.read() {
                Ok(bundle) if bundle != current.bundle => match client(&self.access, &bundle) {
                    Ok(http) => *current = Current { bundle, http },
                    Err(error) => tracing::error!(error = %error, "The cluster's trust bundle is refused"),
                },
                Ok(_) => {}
                Err(error) => tracing::error!(error = %error, "The cluster's trust bundle cannot be read"),
            }
        }
        current.http.clone()
    }

    fn prepare(&self, request: Request<Full<Bytes>>) -> Result<Request<Bytes>, BoxError> {
        let mut request = request.map(|body| body.into_inner().unwrap_or_default());
        let mut address = self.access.server.clone().into_parts();
        let prefix = self.access.server.path().trim_end_matches('/');
        let path = request.uri().path_and_query().map_or("/", PathAndQuery::as_str);
        address.path_and_query = Some(format!("{prefix}{path}").parse()?);
        *request.uri_mut() = Uri::from_parts(address)?;
        if let Some(authorization) = self.access.authorization()? {
            request.headers_mut().insert(header::AUTHORIZATION, authorization);
        }
        Ok(request)
    }
}

impl Transport for Https {
    fn send(&self, request: Request<Full<Bytes>>) -> BoxFuture<'static, Result<Response<Body>, BoxError>> {
        let (request, http) = (self.prepare(request), self.http());
        Box::pin(async move {
            let answer = http.send(request?).await?;
            Ok(answer.map(BodyExt::boxed_unsync))
        })
    }
}

fn client(access: &Access, bundle: &[u8]) -> Result<Arc<Connection>, Connect> {
    let mut http = HttpConnector::new();
    http.enforce_http(false);
    http.set_nodelay(true);
    http.set_keepalive(Some(KEEP_ALIVE));
    http.set_connect_timeout(Some(CONNECT_TIMEOUT));
    let builder = HttpsConnectorBuilder::new().with_tls_config(access.tls(bundle)?).https_only();
    let builder = match access.server_name()? {
        Some(name) => builder.with_server_name_resolver(FixedServerNameResolver::new(name)),
        None => builder,
    };
    let https = builder.enable_all_versions().wrap_connector(http);
    let terms = Terms {
        stream_window: STREAM_WINDOW,
        connection_window: CONNECTION_WINDOW,
        ping: KEEP_ALIVE,
        ping_answer: KEEP_ALIVE / 2,
    };
    Ok(Arc::new(Connection::new(connection::over(https), terms)))
}
