//! A small TLS API server for tests, with its own certificates and one function that responds.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use base64::{Engine, engine::general_purpose::STANDARD};
use bytes::Bytes;
use futures::{Stream, StreamExt, future, stream};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody, combinators::UnsyncBoxBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use k8s_openapi::{ByteString, api::core::v1::Secret, apimachinery::pkg::apis::meta::v1::ObjectMeta};
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustls::{RootCertStore, ServerConfig, server::WebPkiClientVerifier};
use tidewatch_api::{key::KymaKey, names::KUBECONFIG_KEY};
use tidewatch_kit::tls;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::TlsAcceptor;

use crate::runtime_access::{AccessSecret, Metrics, RuntimeAccess, Settings};

pub(crate) type Reply = Response<UnsyncBoxBody<Bytes, Infallible>>;

/// A self-signed certificate, which is its own CA, for a name and for 127.0.0.1.
pub(crate) struct Party {
    certificate: rcgen::Certificate,
    key: KeyPair,
}

impl Party {
    pub(crate) fn new(name: &str) -> Self {
        Self::with(name, |_| {})
    }

    /// As [`Self::new`], with a certificate that has expired.
    pub(crate) fn expired(name: &str) -> Self {
        Self::with(name, |params| params.not_after = date_time_ymd(2020, 1, 1))
    }

    fn with(name: &str, change: impl FnOnce(&mut CertificateParams)) -> Self {
        let key = KeyPair::generate().unwrap();
        let names = [name.to_owned(), "127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).unwrap();
        change(&mut params);
        let certificate = params.self_signed(&key).unwrap();
        Self { certificate, key }
    }

    pub(crate) fn certificate_data(&self) -> String {
        STANDARD.encode(self.certificate.pem())
    }

    pub(crate) fn key_data(&self) -> String {
        STANDARD.encode(self.key.serialize_pem())
    }

    pub(crate) fn roots(&self) -> RootCertStore {
        tls::roots(&[self.certificate.der().clone()]).unwrap()
    }
}

/// A running API server; stops on drop.
pub(crate) struct ApiServer {
    pub(in crate::runtime_access) address: SocketAddr,
    pub(in crate::runtime_access) party: Party,
    /// Number of accepted connections.
    accepted: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl ApiServer {
    /// `client` is the certificate that clients must present; `protocols` are those of ALPN.
    pub(crate) async fn start(
        client: Option<&Party>,
        protocols: &[&[u8]],
        answer: impl Fn(&Request<Incoming>) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::counting(Party::new("runtime"), client, protocols, answer).await
    }

    /// As [`Self::start`], over HTTP/2 with this certificate.
    pub(crate) async fn presenting(
        party: Party,
        answer: impl Fn(&Request<Incoming>) -> Reply + Send + Sync + 'static,
    ) -> Self {
        Self::counting(party, None, &[b"h2"], answer).await
    }

    async fn counting(
        party: Party,
        client: Option<&Party>,
        protocols: &[&[u8]],
        answer: impl Fn(&Request<Incoming>) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let answer = Arc::new(answer);
        let accepted = Arc::<AtomicUsize>::default();
        let counter = accepted.clone();
        let serve = |listener, acceptor| serve(listener, acceptor, answer, counter);
        Self { accepted, ..Self::accept(party, client, protocols, serve).await }
    }

    /// Number of accepted connections, but for a server of [`Self::flooding`].
    pub(in crate::runtime_access) fn connections(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
    }

    /// As [`Self::start`], with an HTTP/2 server that sends these bytes on each connection again and again.
    pub(crate) async fn flooding(frames: Vec<u8>) -> Self {
        let party = Party::new("runtime");
        Self::accept(party, None, &[b"h2"], |listener, acceptor| flood(listener, acceptor, frames)).await
    }

    async fn accept<F: Future<Output = ()> + Send + 'static>(
        party: Party,
        client: Option<&Party>,
        protocols: &[&[u8]],
        serve: impl FnOnce(TcpListener, TlsAcceptor) -> F,
    ) -> Self {
        let builder =
            ServerConfig::builder_with_provider(tls::provider()).with_safe_default_protocol_versions().unwrap();
        let builder = match client {
            Some(client) => {
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(client.roots()), tls::provider());
                builder.with_client_cert_verifier(verifier.build().unwrap())
            }
            None => builder.with_no_client_auth(),
        };
        let key = rustls_pki_types::PrivateKeyDer::try_from(party.key.serialize_der()).unwrap();
        let mut config = builder.with_single_cert(vec![party.certificate.der().clone()], key).unwrap();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, TlsAcceptor::from(Arc::new(config))));
        Self { address, party, accepted: Arc::default(), _tasks: tasks }
    }

    /// A kubeconfig for this server, with the given user.
    pub(crate) fn kubeconfig(&self, host: &str, user: &str) -> Vec<u8> {
        format!(
            "clusters: [{{name: a, cluster: {{server: 'https://{host}:{}', certificate-authority-data: {}}}}}]\n\
             users: [{{name: b, user: {{{user}}}}}]\ncontexts: [{{name: c, context: {{cluster: a, user: b}}}}]\n",
            self.address.port(),
            self.party.certificate_data()
        )
        .into_bytes()
    }

    /// A client of this server, by address, with the token `sesame`.
    pub(crate) fn client(&self, settings: Settings) -> kube::Client {
        let access = RuntimeAccess::new(settings, Metrics::default());
        let key = KymaKey::new("kcp-system", "kyma");
        access.set_secrets(&key, vec![secret("1", self.kubeconfig("127.0.0.1", "token: sesame"))]);
        access.client(&key).unwrap()
    }
}

async fn serve<F>(listener: TcpListener, acceptor: TlsAcceptor, answer: Arc<F>, accepted: Arc<AtomicUsize>)
where
    F: Fn(&Request<Incoming>) -> Reply + Send + Sync + 'static,
{
    let mut connections = JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        accepted.fetch_add(1, Ordering::Relaxed);
        let acceptor = acceptor.clone();
        let answer = answer.clone();
        connections.spawn(async move {
            let tls = match acceptor.accept(tcp).into_fallible().await {
                Ok(tls) => tls,
                Err((_, tcp)) => return drain(tcp).await,
            };
            let service = service_fn(move |request| future::ready(Ok::<_, Infallible>(answer(&request))));
            // Clients that give up end their connection with an error here.
            let _ = auto::Builder::new(TokioExecutor::new()).serve_connection(TokioIo::new(tls), service).await;
        });
    }
}

/// Sends the frames after SETTINGS until the client closes the connection; then accepts the next one.
async fn flood(listener: TcpListener, acceptor: TlsAcceptor, frames: Vec<u8>) {
    while let Ok((tcp, _)) = listener.accept().await {
        let Ok(mut tls) = acceptor.accept(tcp).await else { continue };
        let mut sent = tls.write_all(&[0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
        while sent.is_ok() {
            sent = tls.write_all(&frames).await;
        }
    }
}

/// Reads to the end: closing with unread data would reset the connection before the client reads the alert.
async fn drain(tcp: TcpStream) {
    let mut bytes = [0; 1024];
    while tcp.readable().await.is_ok() {
        match tcp.try_read(&mut bytes) {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            _ => {}
        }
    }
}

pub(crate) fn secret(resource_version: &str, kubeconfig: Vec<u8>) -> Arc<AccessSecret> {
    named_secret("access", resource_version, kubeconfig)
}

/// An access Secret with this name.
pub(crate) fn named_secret(name: &str, resource_version: &str, kubeconfig: Vec<u8>) -> Arc<AccessSecret> {
    let metadata = ObjectMeta {
        name: Some(name.to_owned()),
        resource_version: Some(resource_version.to_owned()),
        ..ObjectMeta::default()
    };
    let data = [(KUBECONFIG_KEY.to_owned(), ByteString(kubeconfig))].into();
    Arc::new(Secret { metadata, data: Some(data), ..Secret::default() }.into())
}

/// A response with one text.
pub(crate) fn text(status: u16, text: impl Into<Bytes>) -> Reply {
    chunks(status, stream::iter([text.into()]))
}

/// A response with a stream of texts, without `Content-Length`.
pub(crate) fn chunks(status: u16, texts: impl Stream<Item = Bytes> + Send + 'static) -> Reply {
    let body = StreamBody::new(texts.map(|text| Ok(Frame::data(text)))).boxed_unsync();
    Response::builder().status(status).body(body).unwrap()
}
