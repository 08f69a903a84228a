//! The connection of one simulated agent, and its signed requests.

use std::{convert::Infallible, future::ready, net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context as _, Result};
use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{HeaderValue, Request, StatusCode, header};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Full, Limited, StreamBody};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use rustls::{ClientConfig, pki_types::ServerName};
use tidewatch_contract::{
    certificate,
    heartbeat::CertificateState,
    signature::{self, Headers, Message, Nonce, Signer},
};
use tidewatch_kit::tls::{self, Identity};
use tokio::{net::TcpStream, sync::Notify, time::timeout};
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::IssuedIdentity;
use crate::landscape::now;

/// Deadline of a request in agents: connecting, request and whole response.
pub(super) const DEADLINE: Duration = Duration::from_secs(15);
/// Read buffer of an agent's connection, in bytes.
const BUFFER: usize = 64 << 10;
const ANSWER_BYTES: usize = 256 << 10;

/// Failure of a request without a usable response.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection.
    #[error("connect to the receiver")]
    Connect(#[source] std::io::Error),
    /// The connection broke.
    #[error("exchange HTTP with the receiver")]
    Http(#[source] hyper::Error),
    /// The response broke off, or is longer than 256 KiB.
    #[error("read the receiver's response")]
    Read(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The response is not JSON of the contract.
    #[error("decode the receiver's response")]
    Decode(#[source] serde_json::Error),
    /// The request could not be signed or built.
    #[error("build a request")]
    Build,
    /// The deadline of 15 s passed.
    #[error("the receiver did not answer in time")]
    Deadline,
}

/// A response.
#[derive(Debug)]
pub struct BufferedResponse {
    /// Status code.
    pub status: StatusCode,
    /// `Retry-After` in seconds, if present.
    pub retry_after: Option<Duration>,
    /// The whole body.
    pub body: Bytes,
    /// The connection ends with this response.
    pub is_last: bool,
}

/// See the module. Connects with the first request.
pub struct SignedClient {
    address: SocketAddr,
    authority: String,
    tls: TlsConnector,
    /// Configuration for the connections of [`SignedClient::connect_http2`].
    http2: TlsConnector,
    signer: Signer,
    certificate: CertificateState,
    sender: Option<http1::SendRequest<Full<Bytes>>>,
    /// Notified when a connection ends.
    ended: Arc<Notify>,
    /// The last response announced the end of its connection.
    is_end_announced: bool,
}

impl SignedClient {
    /// A client with this identity that trusts these roots.
    ///
    /// # Errors
    /// When the identity is not usable.
    pub fn new(identity: &Identity, roots: rustls::RootCertStore, address: SocketAddr) -> Result<Self> {
        let leaf = identity.chain.first().context("no certificate in the chain")?;
        let fingerprint = certificate::fingerprint(leaf);
        let mut config: ClientConfig = tls::client(Some(identity), roots)?;
        let mut only = |protocol: &[u8]| {
            config.alpn_protocols = vec![protocol.to_vec()];
            TlsConnector::from(Arc::new(config.clone()))
        };
        // Agent and receiver negotiate HTTP/1.1.
        let tls = only(b"http/1.1");
        let http2 = only(b"h2");
        // Informational: the receiver makes no decision by it.
        let not_after = jiff::Timestamp::from_second(now() + 86_400)?.to_string();
        Ok(Self {
            address,
            authority: address.to_string(),
            tls,
            http2,
            signer: Signer::new(&identity.key, fingerprint.clone())?,
            certificate: CertificateState { not_after, fingerprint, renewal_failed_since: None },
            sender: None,
            ended: Arc::default(),
            is_end_announced: false,
        })
    }

    /// Replaces the identity; the next request opens a new connection with it.
    ///
    /// # Errors
    /// When the identity is not usable.
    pub fn set_identity(&mut self, enrolled: IssuedIdentity) -> Result<()> {
        let ended = self.ended.clone();
        let authority = self.authority.clone();
        *self = Self { ended, authority, ..Self::new(&enrolled.identity, enrolled.roots, self.address)? };
        Ok(())
    }

    /// Connects to another address from the next request on. The authority, which each request signs, stays.
    pub fn connect_to(&mut self, address: SocketAddr) {
        (self.address, self.sender) = (address, None);
    }

    /// Notified when a connection ends.
    pub(super) fn ended(&self) -> Arc<Notify> {
        self.ended.clone()
    }

    /// The last response announced the end of its connection.
    pub(super) fn is_end_announced(&self) -> bool {
        self.is_end_announced
    }

    /// The certificate's state, for heartbeats.
    pub(super) fn certificate(&self) -> &CertificateState {
        &self.certificate
    }

    /// Signs a request and sends it.
    ///
    /// # Errors
    /// [`RequestError`]; the next request opens a new connection.
    pub async fn post(
        &mut self,
        path: &str,
        content_type: &str,
        body: Bytes,
        nonce: Nonce,
    ) -> Result<BufferedResponse, RequestError> {
        let request = self.sign(path, content_type, body, nonce)?;
        self.send(request).await
    }

    /// Signs a request, to be sent once or, against the contract, repeatedly.
    ///
    /// # Errors
    /// [`RequestError::Build`].
    pub fn sign(
        &self,
        path: &str,
        content_type: &str,
        body: Bytes,
        nonce: Nonce,
    ) -> Result<Request<Full<Bytes>>, RequestError> {
        let message = Message { method: "POST", authority: &self.authority, path, content_type };
        let signed = self.signer.sign(&message, &body, nonce, now()).map_err(|_| RequestError::Build)?;
        let Headers { content_digest, signature_input, signature } = signed;
        let value = |text: String| HeaderValue::try_from(text).map_err(|_| RequestError::Build);
        Request::post(path)
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, content_type)
            .header(signature::CONTENT_DIGEST, value(content_digest)?)
            .header(signature::SIGNATURE_INPUT, value(signature_input)?)
            .header(signature::SIGNATURE, value(signature)?)
            .body(Full::new(body))
            .map_err(|_| RequestError::Build)
    }

    /// Sends a request as it is.
    ///
    /// # Errors
    /// [`RequestError`]; the next request opens a new connection.
    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<BufferedResponse, RequestError> {
        let answer = timeout(DEADLINE, self.exchange(request)).await.unwrap_or(Err(RequestError::Deadline));
        if answer.is_err() {
            self.sender = None;
        }
        answer
    }

    /// Opens a new HTTP/2 connection to any server that it trusts.
    ///
    /// # Errors
    /// [`RequestError`].
    pub async fn connect_http2(&self, address: SocketAddr) -> Result<TlsStream<TcpStream>, RequestError> {
        timeout(DEADLINE, dial(address, &self.http2)).await.unwrap_or(Err(RequestError::Deadline))
    }

    /// Sends a signed request on a connection of its own without the last byte of its body, and waits until the receiver
    /// answers or closes the connection.
    ///
    /// # Errors
    /// [`RequestError`], as a rule [`RequestError::Http`] once the receiver has closed the connection.
    pub async fn hold_body(&self, path: &str, body: Bytes, nonce: Nonce) -> Result<StatusCode, RequestError> {
        let request = self.sign(path, "application/cloudevents-batch+json", body.clone(), nonce)?;
        let length = body.len();
        let incomplete = stream::once(ready(Ok::<_, Infallible>(Frame::data(body.slice(..length.saturating_sub(1))))));
        let (mut head, _) = request.into_parts();
        head.headers.insert(header::CONTENT_LENGTH, length.into());
        let request = Request::from_parts(head, StreamBody::new(incomplete.chain(stream::pending())));
        let mut sender =
            timeout(DEADLINE, connect(self.address, &self.tls)).await.unwrap_or(Err(RequestError::Deadline))?;
        sender.ready().await.map_err(RequestError::Http)?;
        Ok(sender.send_request(request).await.map_err(RequestError::Http)?.status())
    }

    async fn exchange(&mut self, request: Request<Full<Bytes>>) -> Result<BufferedResponse, RequestError> {
        // A connection that the receiver closed after its last response never becomes ready again.
        let ready = match &mut self.sender {
            Some(sender) => sender.ready().await.is_ok(),
            None => false,
        };
        let sender = match &mut self.sender {
            Some(sender) if ready => sender,
            slot => {
                let (sender, connection) = open(self.address, &self.tls).await?;
                let ended = self.ended.clone();
                tokio::spawn(async move {
                    let _ = connection.await;
                    ended.notify_one();
                });
                slot.insert(sender)
            }
        };
        let response = exchange(sender, request).await?;
        self.is_end_announced = response.is_last;
        Ok(response)
    }
}

/// Sends a request, and reads its whole response.
pub(super) async fn exchange(
    sender: &mut http1::SendRequest<Full<Bytes>>,
    request: Request<Full<Bytes>>,
) -> Result<BufferedResponse, RequestError> {
    sender.ready().await.map_err(RequestError::Http)?;
    let (head, body) = sender.send_request(request).await.map_err(RequestError::Http)?.into_parts();
    let body = Limited::new(body, ANSWER_BYTES).collect().await.map_err(RequestError::Read)?.to_bytes();
    let retry_after = head.headers.get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
    let is_last = head.headers.get(header::CONNECTION).is_some_and(|value| value == "close");
    Ok(BufferedResponse { status: head.status, retry_after: retry_after.map(Duration::from_secs), body, is_last })
}

async fn dial(address: SocketAddr, tls: &TlsConnector) -> Result<TlsStream<TcpStream>, RequestError> {
    let tcp = TcpStream::connect(address).await.map_err(RequestError::Connect)?;
    let _ = tcp.set_nodelay(true);
    tls.connect(ServerName::from(address.ip()), tcp).await.map_err(RequestError::Connect)
}

pub(super) async fn connect<B>(address: SocketAddr, tls: &TlsConnector) -> Result<http1::SendRequest<B>, RequestError>
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let (sender, connection) = open(address, tls).await?;
    // The task ends with the last sender; its error shows in the next request.
    tokio::spawn(connection);
    Ok(sender)
}

type Connection<B> = http1::Connection<TokioIo<TlsStream<TcpStream>>, B>;

async fn open<B>(
    address: SocketAddr,
    tls: &TlsConnector,
) -> Result<(http1::SendRequest<B>, Connection<B>), RequestError>
where
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let stream = dial(address, tls).await?;
    http1::Builder::new().max_buf_size(BUFFER).handshake(TokioIo::new(stream)).await.map_err(RequestError::Http)
}
