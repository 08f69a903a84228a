//! Validating webhook for the operator's own resources, as many modules have one: it refuses too many replicas.

use std::{convert::Infallible, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    body::{Bytes, Incoming},
    server::conn::http1,
    service::service_fn,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustls::{
    ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;

/// Largest number of replicas that the webhook admits.
const MAX_REPLICAS: u64 = 10;
/// Largest body of a request in bytes; an API server sends objects of at most 1.5 MiB.
const BODY_LIMIT: usize = 4 << 20;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Server of the webhook.
pub(crate) struct Webhook {
    listener: TcpListener,
    tls: TlsAcceptor,
}

impl Webhook {
    /// Listens with the certificate `tls.crt` and the key `tls.key` of a folder.
    pub(crate) async fn bind(address: SocketAddr, folder: &Path) -> Result<Self> {
        let chain = CertificateDer::pem_file_iter(folder.join("tls.crt")).and_then(Iterator::collect);
        let chain = chain.context("read tls.crt")?;
        let key = PrivateKeyDer::from_pem_file(folder.join("tls.key")).context("read tls.key")?;
        let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key);
        let tls = TlsAcceptor::from(Arc::new(config.context("set up TLS")?));
        let listener = TcpListener::bind(address).await.with_context(|| format!("listen on {address}"))?;
        Ok(Self { listener, tls })
    }

    /// Answers until it is dropped.
    pub(crate) async fn serve(self) {
        let mut connections = JoinSet::new();
        loop {
            while connections.try_join_next().is_some() {}
            match self.listener.accept().await {
                Ok((stream, _)) => drop(connections.spawn(connection(self.tls.clone(), stream))),
                Err(error) => {
                    eprintln!("Accept failed: {error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    }
}

async fn connection(tls: TlsAcceptor, stream: TcpStream) {
    let Ok(Ok(stream)) = timeout(HANDSHAKE_TIMEOUT, tls.accept(stream)).await else { return };
    let mut server = http1::Builder::new();
    if let Err(error) = server.timer(TokioTimer::new()).serve_connection(TokioIo::new(stream), service_fn(answer)).await
    {
        eprintln!("Connection failed: {error}");
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let review = Limited::new(request.into_body(), BODY_LIMIT).collect().await.ok();
    let review = review.and_then(|body| serde_json::from_slice(&body.to_bytes()).ok()).and_then(|it| admit(&it));
    let (status, body) =
        review.map_or((StatusCode::BAD_REQUEST, Bytes::new()), |it| (StatusCode::OK, it.to_string().into()));
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    Ok(response)
}

/// Response to an AdmissionReview (`admission.k8s.io/v1`); `None` if the review has no request.
fn admit(review: &Value) -> Option<Value> {
    let uid = review.pointer("/request/uid")?;
    // There is no object in the review of a deletion.
    let replicas = review.pointer("/request/object/spec/replicas").and_then(Value::as_u64).unwrap_or_default();
    let mut response = json!({"uid": uid, "allowed": replicas <= MAX_REPLICAS});
    if replicas > MAX_REPLICAS {
        response["status"] = json!({"message": format!("at most {MAX_REPLICAS} replicas")});
    }
    Some(json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_review_is_answered_by_the_number_of_replicas() {
        let review = |replicas: u64| json!({"request": {"uid": "a", "object": {"spec": {"replicas": replicas}}}});
        let allowed = |review: &Value| admit(review).map(|it| it["response"]["allowed"].clone());
        assert_eq!(allowed(&review(10)), Some(json!(true)));
        assert_eq!(allowed(&review(11)), Some(json!(false)));
        let deletion = json!({"request": {"uid": "a", "object": null}});
        assert_eq!(admit(&deletion).map(|it| it["response"].clone()), Some(json!({"uid": "a", "allowed": true})));
        assert_eq!(allowed(&json!({})), None);
    }
}
