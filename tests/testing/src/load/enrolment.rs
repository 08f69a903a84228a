//! Enrolment of a simulated agent: a key of its own, a certificate request and a token of its runtime, over a
//! connection on which only the receiver authenticates. Retries until a certificate is issued, with the backoff of real
//! agents.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::Full;
use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use tidewatch_api::identity::RuntimeId;
use tidewatch_contract::enrolment::{CERTIFICATES_PATH, CONTENT_TYPE, CertificateRequest, CertificateResponse};
use tidewatch_kit::tls::{self, Identity};
use tokio::time::{sleep_until, timeout};
use tokio_rustls::TlsConnector;

use super::{
    AgentHandle, BufferedResponse, FleetCounters, RequestError, RequestOutcome,
    agent::{Backoff, jitter_source},
    client::{self, DEADLINE},
};
use crate::fake::FakeCluster;

/// Requests the certificate of one runtime, any number of times.
pub struct EnrolmentClient {
    pub(super) runtime: RuntimeId,
    pub(super) cluster: FakeCluster,
    pub(super) handle: AgentHandle,
    pub(super) counters: Arc<FleetCounters>,
    pub(super) endpoint: EnrolmentEndpoint,
    /// Starts with the longest backoff, as after hours without a receiver, so the first attempt comes at any moment of
    /// that pause; otherwise the first attempt is immediate.
    pub(super) is_backed_off: bool,
}

/// Address of the enrolment listener, and the roots that must have issued its certificate.
#[derive(Clone)]
pub struct EnrolmentEndpoint {
    address: SocketAddr,
    tls: TlsConnector,
}

impl EnrolmentEndpoint {
    /// An endpoint at this address, under a certificate of these roots.
    ///
    /// # Errors
    /// When the roots cannot be used.
    pub fn new(address: SocketAddr, roots: RootCertStore) -> Result<Self> {
        let mut config = tls::client(None, roots)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { address, tls: TlsConnector::from(Arc::new(config)) })
    }
}

/// An issued identity.
pub struct IssuedIdentity {
    /// Key and certificate chain.
    pub identity: Identity,
    /// Roots of the receiver's certificate.
    pub roots: RootCertStore,
}

impl EnrolmentClient {
    /// Retries until a certificate is issued.
    ///
    /// # Errors
    /// When no key, token or request can be made, the request is refused with 400 or 403, or the issued certificate is
    /// not usable.
    pub async fn enrol(&self) -> Result<IssuedIdentity> {
        let mut random = jitter_source(&self.handle);
        let mut backoff = if self.is_backed_off { Backoff::exhausted(&mut random) } else { Backoff::default() };
        loop {
            sleep_until(backoff.next_attempt()).await;
            let key = KeyPair::generate()?;
            let response =
                timeout(DEADLINE, self.send(self.request(&key)?)).await.unwrap_or(Err(RequestError::Deadline));
            match response {
                Ok(BufferedResponse { status: StatusCode::OK, body, .. }) => {
                    let enrolled = read(&body, &key)?;
                    self.counters.enrolled();
                    return Ok(enrolled);
                }
                // Retrying would not change either.
                Ok(BufferedResponse { status: StatusCode::BAD_REQUEST | StatusCode::FORBIDDEN, body, .. }) => {
                    bail!("{} gets no certificate: {}", self.runtime, String::from_utf8_lossy(&body))
                }
                Ok(BufferedResponse { status, retry_after, .. }) => {
                    self.counters.refused(status);
                    backoff.record(Ok(RequestOutcome::Refused(status, retry_after)), &mut random);
                }
                Err(fault) => {
                    self.counters.failed();
                    backoff.record(Err(fault), &mut random);
                }
            }
        }
    }

    /// Requests a certificate with a token of a random signature. Returns the status, which the receiver decides by the token
    /// keys of the runtime.
    ///
    /// # Errors
    /// When no request can be made, or the receiver does not answer.
    pub async fn forge(&self, key: &KeyPair, number: usize) -> Result<StatusCode> {
        let token = FakeCluster::forged_token(number).ok().context("draw a signature")?;
        let sent = self.send(self.request_with(key, &token)?);
        Ok(timeout(DEADLINE, sent).await.unwrap_or(Err(RequestError::Deadline))?.status)
    }

    /// Builds a request with a freshly signed token, as new as the kubelet's token file of an agent.
    fn request(&self, key: &KeyPair) -> Result<Request<Full<Bytes>>> {
        self.request_with(key, &self.cluster.token().ok().context("sign a token")?)
    }

    fn request_with(&self, key: &KeyPair, token: &str) -> Result<Request<Full<Bytes>>> {
        // Names in the CSR would be ignored.
        let request = CertificateParams::new(Vec::<String>::new())?.serialize_request(key)?.pem()?;
        let body = CertificateRequest { runtime: self.runtime.clone(), request }.to_json()?;
        let request = Request::post(CERTIFICATES_PATH)
            .header(header::HOST, self.endpoint.address.to_string())
            .header(header::CONTENT_TYPE, CONTENT_TYPE)
            .header(header::AUTHORIZATION, format!("Bearer {token}"));
        Ok(request.body(Full::from(body))?)
    }

    /// Sends the request over a connection of its own: the next enrolment is too far away to keep it.
    async fn send(&self, request: Request<Full<Bytes>>) -> Result<BufferedResponse, RequestError> {
        let mut sender = client::connect(self.endpoint.address, &self.endpoint.tls).await?;
        client::exchange(&mut sender, request).await
    }
}

fn read(body: &[u8], key: &KeyPair) -> Result<IssuedIdentity> {
    let CertificateResponse { chain, trust_bundle, .. } = CertificateResponse::parse(body)?;
    let identity = Identity::from_pem(chain.as_bytes(), key.serialize_pem().as_bytes())?;
    Ok(IssuedIdentity { identity, roots: tls::roots(&tls::certificates(trust_bundle.as_bytes())?)? })
}
