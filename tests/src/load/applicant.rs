//! How a simulated agent comes by its identity: a key of its own, a request for its certificate and a token of its runtime, over a
//! connection on which only the receiver proves who it is. It asks until it gets one, and waits between two tries as agents do.

use std::{net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use http::{Request, StatusCode, header};
use http_body_util::Full;
use rcgen::{CertificateParams, KeyPair};
use rustls::RootCertStore;
use tidewatch_shared::{
    enrolment::{CERTIFICATES_PATH, CONTENT_TYPE, CertificateAnswer, CertificateRequest},
    identity::RuntimeId,
    tls::{self, Identity},
};
use tokio::time::{sleep_until, timeout};
use tokio_rustls::TlsConnector;

use super::{
    Answer, Fault, Memory, Outcome, Tally,
    agent::{Gate, fastrand},
    voice::{self, DEADLINE},
};
use crate::fake::FakeCluster;

/// One that may ask for the certificate of a runtime, again and again.
pub struct Applicant {
    pub(super) runtime: RuntimeId,
    pub(super) cluster: FakeCluster,
    pub(super) memory: Memory,
    pub(super) tally: Arc<Tally>,
    pub(super) office: Office,
    /// It has found nobody for hours, and so comes at any moment between two of its tries; otherwise it comes now.
    pub(super) has_waited: bool,
}

/// Where certificates are to be had, and who must be there.
#[derive(Clone)]
pub struct Office {
    address: SocketAddr,
    tls: TlsConnector,
}

impl Office {
    /// At this address, under a certificate of these roots.
    ///
    /// # Errors
    /// When the roots cannot be used.
    pub fn new(address: SocketAddr, roots: RootCertStore) -> Result<Self> {
        let mut config = tls::client_without_identity(roots)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self { address, tls: TlsConnector::from(Arc::new(config)) })
    }
}

/// What was issued.
pub struct Enrolled {
    /// The identity.
    pub identity: Identity,
    /// Whom to trust with it.
    pub roots: RootCertStore,
}

impl Applicant {
    /// Asks until it has a certificate.
    ///
    /// # Errors
    /// When no key, token or request can be made, or what was issued is not usable.
    pub async fn enrol(&self) -> Result<Enrolled> {
        let mut random = fastrand(&self.memory);
        let mut gate = if self.has_waited { Gate::after_long(&mut random) } else { Gate::default() };
        loop {
            sleep_until(gate.until()).await;
            let key = KeyPair::generate()?;
            let asked = timeout(DEADLINE, self.ask(self.request(&key)?)).await.unwrap_or(Err(Fault::Deadline));
            match asked {
                Ok(Answer { status: StatusCode::OK, body, .. }) => {
                    let enrolled = read(&body, &key)?;
                    self.tally.enrolled();
                    return Ok(enrolled);
                }
                // Neither would become better by itself.
                Ok(Answer { status: StatusCode::BAD_REQUEST | StatusCode::FORBIDDEN, body, .. }) => {
                    bail!("{} gets no certificate: {}", self.runtime, String::from_utf8_lossy(&body))
                }
                Ok(Answer { status, retry_after, .. }) => {
                    self.tally.refused(status);
                    gate.after(Ok(Outcome::Refused(status, retry_after)), &mut random);
                }
                Err(fault) => {
                    self.tally.fault();
                    gate.after(Err(fault), &mut random);
                }
            }
        }
    }

    /// With a token as new as the file of an agent has it.
    fn request(&self, key: &KeyPair) -> Result<Request<Full<Bytes>>> {
        // Names in it would be ignored.
        let request = CertificateParams::new(Vec::<String>::new())?.serialize_request(key)?.pem()?;
        let body = CertificateRequest { runtime: self.runtime.clone(), request }.to_json()?;
        let token = self.cluster.token().ok().context("sign a token")?;
        let request = Request::post(CERTIFICATES_PATH)
            .header(header::HOST, self.office.address.to_string())
            .header(header::CONTENT_TYPE, CONTENT_TYPE)
            .header(header::AUTHORIZATION, format!("Bearer {token}"));
        Ok(request.body(Full::from(body))?)
    }

    /// Over a connection that is used once, as nobody comes back soon.
    async fn ask(&self, request: Request<Full<Bytes>>) -> Result<Answer, Fault> {
        let mut sender = voice::connect(self.office.address, &self.office.tls).await?;
        voice::exchange(&mut sender, request).await
    }
}

fn read(body: &[u8], key: &KeyPair) -> Result<Enrolled> {
    let CertificateAnswer { chain, trust_bundle, .. } = CertificateAnswer::parse(body)?;
    let identity = Identity::from_pem(chain.as_bytes(), key.serialize_pem().as_bytes())?;
    Ok(Enrolled { identity, roots: tls::roots(&tls::certificates(trust_bundle.as_bytes())?)? })
}
