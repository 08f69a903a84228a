//! The connection of one simulated agent, and its signed requests.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tidewatch_shared::{
    certificate,
    heartbeat::CertificateState,
    signature::{self, Headers, Message, Nonce, Signer},
    tls::{self, Identity},
};
use tokio::{net::TcpStream, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::Enrolled;
use crate::landscape::now;

/// For a request and its whole answer, connecting included, as agents have it.
pub(super) const DEADLINE: Duration = Duration::from_secs(15);
/// What an agent reads ahead, in bytes.
const BUFFER: usize = 64 << 10;
const ANSWER_BYTES: usize = 256 << 10;

/// Why there was no answer.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// No connection.
    #[error("connect to the receiver")]
    Connect(#[source] std::io::Error),
    /// The connection broke.
    #[error("speak to the receiver")]
    Speak(#[source] hyper::Error),
    /// The answer broke off, or is longer than 256 KiB.
    #[error("read the receiver's answer")]
    Read(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The answer is not what the contract says.
    #[error("the receiver's answer is not readable")]
    Unreadable(#[source] serde_json::Error),
    /// The request could not be signed or built.
    #[error("make a request")]
    Make,
    /// 15 s passed.
    #[error("the receiver did not answer in time")]
    Deadline,
}

/// What came back.
#[derive(Debug)]
pub struct Answer {
    /// Its status.
    pub status: StatusCode,
    /// `Retry-After` in seconds, if it said so.
    pub retry_after: Option<Duration>,
    /// Its body.
    pub body: Bytes,
}

/// See the module. Connects when it has something to say.
pub struct Voice {
    address: SocketAddr,
    authority: String,
    tls: TlsConnector,
    /// For connections of its own.
    http2: TlsConnector,
    signer: Signer,
    certificate: CertificateState,
    sender: Option<http1::SendRequest<Full<Bytes>>>,
}

impl Voice {
    /// A voice with this identity, which trusts these roots.
    ///
    /// # Errors
    /// When the identity is not usable.
    pub fn new(identity: &Identity, roots: rustls::RootCertStore, address: SocketAddr) -> Result<Self> {
        let leaf = identity.chain.first().context("a leaf")?;
        let fingerprint = certificate::fingerprint(leaf);
        let mut config: ClientConfig = tls::client(identity, roots)?;
        let mut only = |protocol: &[u8]| {
            config.alpn_protocols = vec![protocol.to_vec()];
            TlsConnector::from(Arc::new(config.clone()))
        };
        // The first is what an agent and the receiver agree on.
        let (tls, http2) = (only(b"http/1.1"), only(b"h2"));
        // Informational: nothing of the receiver rests on it.
        let not_after = jiff::Timestamp::from_second(now() + 86_400)?.to_string();
        Ok(Self {
            address,
            authority: address.to_string(),
            tls,
            http2,
            signer: Signer::new(&identity.key, fingerprint.clone())?,
            certificate: CertificateState { not_after, fingerprint, renewal_failed_since: None },
            sender: None,
        })
    }

    /// Speaks with another identity from now on, over a connection of its own.
    ///
    /// # Errors
    /// When the identity is not usable.
    pub fn adopt(&mut self, enrolled: Enrolled) -> Result<()> {
        *self = Self::new(&enrolled.identity, enrolled.roots, self.address)?;
        Ok(())
    }

    /// What its heartbeats say of its certificate.
    pub(super) fn certificate(&self) -> &CertificateState {
        &self.certificate
    }

    /// Signs a request and sends it.
    ///
    /// # Errors
    /// [`Fault`]; the next request connects anew.
    pub async fn post(&mut self, path: &str, content_type: &str, body: Bytes, nonce: Nonce) -> Result<Answer, Fault> {
        let request = self.signed(path, content_type, body, nonce)?;
        self.say(request).await
    }

    /// A signed request, to be said once or, wrongly, again and again.
    ///
    /// # Errors
    /// [`Fault::Make`].
    pub fn signed(
        &self,
        path: &str,
        content_type: &str,
        body: Bytes,
        nonce: Nonce,
    ) -> Result<Request<Full<Bytes>>, Fault> {
        let message = Message { method: "POST", authority: &self.authority, path, content_type };
        let signed = self.signer.sign(&message, &body, nonce, now()).map_err(|_| Fault::Make)?;
        let Headers { content_digest, signature_input, signature } = signed;
        let value = |text: String| HeaderValue::try_from(text).map_err(|_| Fault::Make);
        Request::post(path)
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, content_type)
            .header(signature::CONTENT_DIGEST, value(content_digest)?)
            .header(signature::SIGNATURE_INPUT, value(signature_input)?)
            .header(signature::SIGNATURE, value(signature)?)
            .body(Full::new(body))
            .map_err(|_| Fault::Make)
    }

    /// Sends a request as it is.
    ///
    /// # Errors
    /// [`Fault`]; the next request connects anew.
    pub async fn say(&mut self, request: Request<Full<Bytes>>) -> Result<Answer, Fault> {
        let answer = timeout(DEADLINE, self.exchange(request)).await.unwrap_or(Err(Fault::Deadline));
        if answer.is_err() {
            self.sender = None;
        }
        answer
    }

    /// A connection of its own, to anybody whom it trusts and who speaks HTTP/2.
    ///
    /// # Errors
    /// [`Fault`].
    pub async fn stream_to(&self, address: SocketAddr) -> Result<TlsStream<TcpStream>, Fault> {
        timeout(DEADLINE, dial(address, &self.http2)).await.unwrap_or(Err(Fault::Deadline))
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<Answer, Fault> {
        // One that the receiver ended, as it said with its last answer, is never ready again.
        let ready = match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        };
        let sender = match &mut self.sender {
            Some(sender) if ready => sender,
            slot => slot.insert(connect(self.address, &self.tls).await?),
        };
        exchange(sender, request).await
    }
}

/// Sends a request, and reads its whole answer.
pub(super) async fn exchange(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<Answer, Fault> {
    sender.ready().await.map_err(Fault::Speak)?;
    let (head, body) = sender.send_request(request).await.map_err(Fault::Speak)?.into_parts();
    let body = Limited::new(body, ANSWER_BYTES).collect().await.map_err(Fault::Read)?.to_bytes();
    let retry_after = head.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    Ok(Answer { status: head.status, retry_after: retry_after.map(Duration::from_secs), body })
}

async fn dial(address: SocketAddr, tls: &TlsConnector) -> Result<TlsStream<TcpStream>, Fault> {
    let tcp = TcpStream::connect(address).await.map_err(Fault::Connect)?;
    let _ = tcp.set_nodelay(true);
    tls.connect(ServerName::from(address.ip()), tcp).await.map_err(Fault::Connect)
}

pub(super) async fn connect(address: SocketAddr, tls: &TlsConnector) -> Result<http1::SendRequest<Full<Bytes>>, Fault> {
    let stream = dial(address, tls).await?;
    let (sender, connection) =
        http1::Builder::new().max_buf_size(BUFFER).handshake(TokioIo::new(stream)).await.map_err(Fault::Speak)?;
    // It ends with the last sender; what ended it shows in the next request.
    tokio::spawn(connection);
    Ok(sender)
}
