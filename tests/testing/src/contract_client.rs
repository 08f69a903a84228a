//! Client of the wire contract with real keys and real TLS, for valid and invalid requests, over the protocol that an
//! agent negotiates.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderValue, Request, Response, header};
use http_body_util::{BodyExt as _, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use rustls::RootCertStore;
use serde_json::{Value, json};
use tidewatch_api::identity::{Epoch, RuntimeId, TrustDomain};
use tidewatch_contract::{
    certificate,
    signature::{self, Headers, Message, Nonce, Signer},
};
use tidewatch_kit::tls;
use tidewatch_trust::{Ca, PemIdentity};

use crate::landscape::now;

/// Client of one runtime: its certificate, its key, its connection.
pub struct ContractClient {
    client: Client<hyper_rustls::HttpsConnector<HttpConnector>, Full<Bytes>>,
    signer: Signer,
    runtime: RuntimeId,
    authority: String,
    epoch: Epoch,
}

/// A request in parts, each of which a test may corrupt.
pub struct TestRequest {
    /// Path, optionally with a query.
    pub path: String,
    /// `Content-Type`.
    pub content_type: String,
    /// The body.
    pub body: Vec<u8>,
    /// Signature header fields; `None` for none.
    pub signature: Option<Headers>,
}

impl ContractClient {
    /// A runtime with a certificate of this CA, which trusts the receiver's certificate by another CA.
    ///
    /// # Errors
    /// When the certificate cannot be made.
    pub fn new(issuer: &Ca, trusted: &Ca, domain: &TrustDomain, runtime: &RuntimeId, address: &str) -> Result<Self> {
        let identity = issuer.make_runtime(runtime, domain, now(), tidewatch_trust::RUNTIME_VALIDITY)?;
        Self::with_identity(&identity, trusted, runtime, address)
    }

    /// The same with a given certificate.
    ///
    /// # Errors
    /// When the certificate cannot be used.
    pub fn with_identity(identity: &PemIdentity, trusted: &Ca, runtime: &RuntimeId, address: &str) -> Result<Self> {
        Self::trusting(identity, trusted.trust_bundle().store()?, runtime, address)
    }

    /// The same with a given certificate and trusted roots.
    ///
    /// # Errors
    /// When the certificate cannot be used.
    pub fn trusting(identity: &PemIdentity, roots: RootCertStore, runtime: &RuntimeId, address: &str) -> Result<Self> {
        let identity = identity.identity()?;
        let config = tls::client(Some(&identity), roots)?;
        let connector = hyper_rustls::HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_only()
            .enable_all_versions()
            .build();
        let leaf = identity.chain.first().context("a leaf")?;
        Ok(Self {
            client: Client::builder(TokioExecutor::new()).build(connector),
            signer: Signer::new(&identity.key, certificate::fingerprint(leaf))?,
            runtime: runtime.clone(),
            authority: address.parse::<SocketAddr>()?.to_string(),
            epoch: Epoch::new(7),
        })
    }

    /// A well-formed batch of one event of the watch `kyma`, signed with this counter.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn event(&self, sequence: u64, counter: u64) -> Result<TestRequest> {
        self.sign("/v3/events", "application/cloudevents-batch+json", &self.batch(&self.runtime, sequence), counter)
    }

    /// A batch of one event that names any runtime as its source.
    pub fn batch(&self, source: &RuntimeId, sequence: u64) -> Value {
        json!([{
            "specversion": "1.0", "type": "io.kyma-project.tidewatch.object.changed.v1", "source": format!("/runtimes/{source}"),
            "subject": "operator.kyma-project.io/v1beta2/kymas/kyma-system/default",
            "id": format!("{}-{sequence}", self.epoch), "sequence": sequence.to_string(),
            "data": {"watch": "kyma", "manager": "lifecycle-manager", "kind": "Kyma", "uid": "u", "resourceVersion": "1",
                     "generation": 1, "change": "spec", "delta": format!("{:032x}", 0)},
        }])
    }

    /// Signs any JSON for any path.
    ///
    /// # Errors
    /// When it cannot be signed.
    pub fn sign(&self, path: &str, content_type: &str, body: &Value, counter: u64) -> Result<TestRequest> {
        let body = body.to_string().into_bytes();
        let message = Message { method: "POST", authority: &self.authority, path, content_type };
        let signature = self.signer.sign(&message, &body, Nonce { epoch: self.epoch, counter }, now())?;
        Ok(TestRequest {
            path: path.to_owned(),
            content_type: content_type.to_owned(),
            body,
            signature: Some(signature),
        })
    }

    /// Sends it, and returns the response with its JSON body (`null` when there is none).
    ///
    /// # Errors
    /// When there is no response: the handshake failed, or the connection broke.
    pub async fn send(&self, request_parts: &TestRequest) -> Result<Response<Value>> {
        let mut request = Request::post(format!("https://{}{}", self.authority, request_parts.path))
            .header(header::CONTENT_TYPE, &request_parts.content_type)
            .body(Full::new(Bytes::from(request_parts.body.clone())))?;
        if let Some(Headers { content_digest, signature_input, signature }) = &request_parts.signature {
            let headers = request.headers_mut();
            headers.insert(signature::CONTENT_DIGEST, HeaderValue::from_str(content_digest)?);
            headers.insert(signature::SIGNATURE_INPUT, HeaderValue::from_str(signature_input)?);
            headers.insert(signature::SIGNATURE, HeaderValue::from_str(signature)?);
        }
        let (parts, body) = self.client.request(request).await?.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok(Response::from_parts(parts, serde_json::from_slice(&body).unwrap_or_default()))
    }
}
