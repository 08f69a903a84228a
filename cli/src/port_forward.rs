//! Connections to ports of pods through an API server, as `kubectl port-forward` opens them: they arrive at the pod's
//! loopback, so listeners on loopback accept them.

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use tidewatch_kit::table;

use crate::request;

/// Sends one request to a port on the loopback of a pod and returns the body of the response, at most `limit` bytes.
///
/// # Errors
/// As [`request::send`]; also if the API server or the kubelet refuses the port-forward.
pub(crate) async fn send(
    pods: &Api<Pod>,
    pod: &str,
    port: u16,
    request: Request<Full<Bytes>>,
    limit: usize,
) -> Result<Bytes> {
    let forward = || format!("forward port {port} of the pod {pod}");
    // Dropping it ends neither the streams nor the connection; the process ends soon after.
    let mut forwarder = pods.portforward(pod, &[port]).await.with_context(forward)?;
    let (Some(stream), Some(refusal)) = (forwarder.take_stream(port), forwarder.take_error(port)) else {
        bail!("{}: there is no stream", forward());
    };
    let authority = format!("localhost:{port}");
    let response = request::send(stream, &authority, request, limit);
    tokio::select! {
        // The kubelet's reason arrives before the end of the stream, which is the error of the response.
        biased;
        Some(reason) = refusal => bail!("{}: {}", forward(), table::sanitize(reason.trim())),
        response = response => response,
    }
}
