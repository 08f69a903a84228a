//! Client of one runtime whose connections can be upgraded to WebSocket, for port-forwards of the operators' program.

use http::{Request, header::AUTHORIZATION};
use hyper_util::{client::legacy, rt::TokioExecutor};
use kube::{
    Client,
    client::{Body, middleware::BaseUriLayer},
};
use tower::ServiceBuilder;

use super::{
    client::{ClientParts, connector},
    connector::Protocols,
    kubeconfig::{KubeconfigError, RuntimeKubeconfig},
};

/// Builds a client under the rules of [`super::client::build`], except for the limits of responses: an upgraded
/// connection has no response body, and HTTP/2 has no such upgrade. It connects only when used.
///
/// # Errors
/// [`KubeconfigError::ForbiddenAddress`], [`KubeconfigError::NoPublicRoots`] and [`KubeconfigError::ClientCertificate`].
pub(super) fn build(parts: &ClientParts, kubeconfig: &RuntimeKubeconfig) -> Result<Client, KubeconfigError> {
    let (connector, authorization) = connector(parts, kubeconfig, Protocols::Http1)?;
    let client = legacy::Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
    let service = ServiceBuilder::new()
        .layer(BaseUriLayer::new(kubeconfig.server.clone()))
        .layer(parts.fence.layer())
        .map_request(move |mut request: Request<Body>| {
            if let Some(value) = &authorization {
                request.headers_mut().insert(AUTHORIZATION, value.clone());
            }
            request
        })
        .service(client);
    Ok(Client::new(service, "default"))
}
