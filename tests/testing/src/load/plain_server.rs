//! A server with the event port's TLS and HTTP and nothing behind it: the floor of a measurement, or a receiver that
//! refuses.

use std::{convert::Infallible, io, net::SocketAddr, sync::Arc};

use anyhow::{Context as _, Result};
use aws_lc_rs::{
    digest,
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_FIXED, ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair as _, UnparsedPublicKey,
    },
};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::{
    body::Incoming,
    server::conn::{http1, http2},
    service::service_fn,
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::{net::TcpListener, runtime, task::JoinSet};
use tokio_rustls::TlsAcceptor;

use crate::landscape::{Landscape, now};

/// Name of its threads, by which their CPU time is measured.
pub const THREADS: &str = "floor";
const BODY_BYTES: usize = 1 << 20;
const HEAD_BYTES: usize = 16 << 10;
const HEAD_FIELDS: usize = 32;
/// As long as the signature base of a request.
const SIGNED: [u8; 360] = [b'x'; 360];

/// The server's treatment of each request.
#[derive(Clone, Copy, Debug)]
pub enum ServerMode {
    /// Reads and hashes the body, verifies one P-256 signature, and answers 202: the least that any server that checks
    /// signatures does.
    Verify,
    /// Answers every request with this status.
    Answer(StatusCode),
    /// Reads and discards all bytes of a connection, and answers nothing.
    Read,
}

/// See the module. It has threads of its own, named [`THREADS`]; dropping it ends it.
pub struct PlainServer {
    address: SocketAddr,
    runtime: Option<runtime::Runtime>,
}

struct Handler {
    mode: ServerMode,
    public: UnparsedPublicKey<Vec<u8>>,
    signature: Vec<u8>,
}

impl PlainServer {
    /// Listens at this address, under a certificate that a landscape's agents trust.
    ///
    /// # Errors
    /// When the address is taken, or no certificate, key or thread can be made.
    pub fn start(landscape: &Landscape, address: SocketAddr, mode: ServerMode) -> Result<Self> {
        let names = ["127.0.0.1".try_into()?];
        let identity = landscape.ca().make_server(&names, now(), tidewatch_trust::SERVER_VALIDITY)?.identity()?;
        let config = tidewatch_kit::tls::server(&identity, landscape.ca().trust_bundle().store()?)?;
        Self::with(config, address, mode)
    }

    /// Listens at this address, with this TLS configuration.
    ///
    /// # Errors
    /// When the address is taken, or no key or thread can be made.
    pub fn with(config: ServerConfig, address: SocketAddr, mode: ServerMode) -> Result<Self> {
        let key = EcdsaKeyPair::generate(&ECDSA_P256_SHA256_FIXED_SIGNING).ok().context("make a key")?;
        let signature = key.sign(&SystemRandom::new(), &SIGNED).ok().context("sign")?.as_ref().to_vec();
        let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_FIXED, key.public_key().as_ref().to_vec());
        let handler = Arc::new(Handler { mode, public, signature });
        // As many threads as the receiver's gateway has.
        let runtime =
            runtime::Builder::new_multi_thread().worker_threads(2).thread_name(THREADS).enable_all().build()?;
        let listener = std::net::TcpListener::bind(address).with_context(|| format!("listen on {address}"))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let acceptor = TlsAcceptor::from(Arc::new(config));
        runtime.spawn(serve(listener, acceptor, handler));
        Ok(Self { address, runtime: Some(runtime) })
    }

    /// Address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for PlainServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Waiting for threads is not allowed inside a task.
            runtime.shutdown_background();
        }
    }
}

async fn serve(listener: std::net::TcpListener, acceptor: TlsAcceptor, handler: Arc<Handler>) -> io::Result<()> {
    let listener = TcpListener::from_std(listener)?;
    let mut connections = JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        let (tcp, _) = listener.accept().await?;
        let _ = tcp.set_nodelay(true);
        let acceptor = acceptor.clone();
        let handler = handler.clone();
        connections.spawn(async move {
            let Ok(mut stream) = acceptor.accept(tcp).await else { return };
            if matches!(handler.mode, ServerMode::Read) {
                let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
                return;
            }
            let service = service_fn(move |request| {
                let handler = handler.clone();
                async move { Ok::<_, Infallible>(handler.answer(request).await) }
            });
            // Each branch boxes its connection, so that it occupies only its own size.
            if stream.get_ref().1.alpn_protocol() == Some(b"h2") {
                let builder = http2::Builder::new(TokioExecutor::new());
                let _ = Box::pin(builder.serve_connection(TokioIo::new(stream), service)).await;
            } else {
                // As the event port.
                let mut builder = http1::Builder::new();
                builder.header_read_timeout(None).max_buf_size(HEAD_BYTES).max_headers(HEAD_FIELDS);
                let _ = Box::pin(builder.serve_connection(TokioIo::new(stream), service)).await;
            }
        });
    }
}

impl Handler {
    async fn answer(&self, request: Request<Incoming>) -> Response<Full<Bytes>> {
        let mut answer = Response::new(Full::default());
        let Ok(body) = Limited::new(request.into_body(), BODY_BYTES).collect().await else {
            *answer.status_mut() = StatusCode::PAYLOAD_TOO_LARGE;
            return answer;
        };
        *answer.status_mut() = match self.mode {
            ServerMode::Answer(status) => status,
            ServerMode::Read => StatusCode::NO_CONTENT,
            ServerMode::Verify => {
                std::hint::black_box(digest::digest(&digest::SHA256, &body.to_bytes()));
                let verified = self.public.verify(&SIGNED, &self.signature).is_ok();
                if verified { StatusCode::ACCEPTED } else { StatusCode::INTERNAL_SERVER_ERROR }
            }
        };
        answer
    }
}
