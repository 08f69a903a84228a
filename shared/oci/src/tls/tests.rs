//! Tests over real connections on the loopback interface.

use std::{fs, path::Path};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::ServerConfig;
use rustls_pki_types::PrivatePkcs8KeyDer;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional},
    net::TcpListener,
    task::JoinSet,
};

use super::*;
use crate::{
    credentials::RegistryTarget,
    digest::Digest,
    fetch::{FetchError, Fetcher, Size, Stage},
    metrics::Metrics,
    testing::{FakeRegistry, Reply},
};

pub(crate) type Ca = CertifiedIssuer<'static, KeyPair>;

pub(crate) fn ca() -> Ca {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

fn server(ca: &Ca) -> ServerConfig {
    server_of(ca, &["localhost"])
}

/// Server with a certificate for these names.
pub(crate) fn server_of(ca: &Ca, names: &[&str]) -> ServerConfig {
    let key = KeyPair::generate().unwrap();
    let params = CertificateParams::new(names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>()).unwrap();
    let chain = vec![params.signed_by(&key, ca).unwrap().der().clone()];
    ServerConfig::builder_with_provider(tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(chain, PrivatePkcs8KeyDer::from(key.serialize_der()).into())
        .unwrap()
}

/// Fetches a blob of four bytes.
async fn fetch(address: &str, ca_file: &Path, proxy: Matcher, connect: Duration) -> Result<Bytes, FetchError> {
    let roots = roots(Some(&ca_file.to_owned())).unwrap();
    let lookup = Arc::new(system_lookup);
    let transports = transports_with(roots, proxy, connect, AddressRules::default(), lookup).unwrap();
    let fetcher = Fetcher::new(transports, [].into(), Metrics::default());
    let target = RegistryTarget::new(address.parse().unwrap(), None);
    fetcher.blob(&target, "repository", Digest::of(b"blob"), Size::Exactly(4)).await
}

fn direct() -> Matcher {
    Matcher::builder().build()
}

fn registry() -> FakeRegistry {
    let registry = FakeRegistry::default();
    registry.blob("repository", b"blob");
    registry
}

#[tokio::test]
async fn registry_is_trusted_by_the_ca_file_only() {
    let folder = tempfile::tempdir().unwrap();
    let ours = ca();
    let other = ca();
    let ours_file = folder.path().join("ours.pem");
    let other_file = folder.path().join("other.pem");
    fs::write(&ours_file, ours.pem()).unwrap();
    fs::write(&other_file, other.pem()).unwrap();
    let registry = registry();
    let (port, _server) = registry.listen(Some(server(&ours))).await;
    let address = format!("localhost:{port}");
    assert_eq!(fetch(&address, &ours_file, direct(), CONNECT_TIMEOUT).await, Ok("blob".into()));
    let refused = fetch(&address, &other_file, direct(), CONNECT_TIMEOUT).await.err().unwrap();
    assert!(matches!(&refused, FetchError::Transport(text) if text.contains("invalid peer certificate")), "{refused}");
    // The certificate is for another name.
    let refused = fetch(&format!("127.0.0.1:{port}"), &ours_file, direct(), CONNECT_TIMEOUT).await.err().unwrap();
    assert!(matches!(&refused, FetchError::Transport(text) if text.contains("not valid for")), "{refused}");
    assert_eq!(registry.received().len(), 1);
}

#[tokio::test]
async fn broken_connections_are_errors_of_the_transport() {
    let folder = tempfile::tempdir().unwrap();
    let ca = ca();
    let file = folder.path().join("ca.pem");
    fs::write(&file, ca.pem()).unwrap();
    let registry = registry();
    let (port, _server) = registry.listen(None).await;
    let address = format!("http://localhost:{port}");
    assert_eq!(fetch(&address, &file, direct(), CONNECT_TIMEOUT).await, Ok("blob".into()));
    let truncated = Reply::Of(200, vec![("content-length", "4".into())], "blo".into());
    for reply in [Reply::Broken("bl".into()), Reply::Down, truncated] {
        registry.script("/blobs/", [reply]);
        let error = fetch(&address, &file, direct(), CONNECT_TIMEOUT).await.err().unwrap();
        assert!(matches!(error, FetchError::Transport(_)), "{error}");
    }
    let closed = TcpListener::bind(("127.0.0.1", 0)).await.unwrap().local_addr().unwrap().port();
    let error = fetch(&format!("http://localhost:{closed}"), &file, direct(), CONNECT_TIMEOUT).await.err().unwrap();
    assert!(matches!(&error, FetchError::Transport(text) if text.contains("refused")), "{error}");
}

#[tokio::test]
async fn handshake_is_part_of_the_time_to_connect() {
    let folder = tempfile::tempdir().unwrap();
    let ca = ca();
    let file = folder.path().join("ca.pem");
    fs::write(&file, ca.pem()).unwrap();
    // The kernel accepts the connection, and nothing answers the handshake.
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let address = format!("localhost:{}", listener.local_addr().unwrap().port());
    let error = fetch(&address, &file, direct(), Duration::from_millis(50)).await;
    assert_eq!(error, Err(FetchError::Timeout { stage: Stage::Connect, after: CONNECT_TIMEOUT }));
}

#[tokio::test]
async fn registry_is_reached_through_the_proxy() {
    let folder = tempfile::tempdir().unwrap();
    let ca = ca();
    let file = folder.path().join("ca.pem");
    fs::write(&file, ca.pem()).unwrap();
    let (port, _server) = registry().listen(Some(server(&ca))).await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let proxy_port = listener.local_addr().unwrap().port();
    let mut proxy = JoinSet::new();
    proxy.spawn(async move {
        let (mut client, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        let mut byte = [0];
        while !head.ends_with(b"\r\n\r\n") {
            client.read_exact(&mut byte).await.unwrap();
            head.extend_from_slice(&byte);
        }
        let mut server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        client.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        // The client may close without a notification of TLS.
        let _ = copy_bidirectional(&mut client, &mut server).await;
        String::from_utf8(head).unwrap()
    });
    let matcher = Matcher::builder().https(format!("http://u:p@localhost:{proxy_port}")).build();
    let address = format!("localhost:{port}");
    assert_eq!(fetch(&address, &file, matcher, CONNECT_TIMEOUT).await, Ok("blob".into()));
    let head = proxy.join_next().await.unwrap().unwrap().to_lowercase();
    assert!(head.starts_with(&format!("connect localhost:{port} http/1.1\r\n")), "{head}");
    assert!(head.contains("proxy-authorization: basic dtpw\r\n"), "{head}");
}

#[test]
fn unusable_ca_file_is_an_error_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ca.pem");
    assert!(matches!(roots(Some(&file)), Err(TlsError::Read { .. })));
    let damaged = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    for content in ["", "no PEM", damaged] {
        fs::write(&file, content).unwrap();
        assert!(matches!(roots(Some(&file)), Err(TlsError::Ca { .. })), "{content}");
    }
    // As for clients in Go, what is no root among roots is skipped.
    let good = || ca().pem();
    fs::write(&file, [&good(), damaged, &good()].concat()).unwrap();
    fs::write(folder.path().join("good.pem"), good()).unwrap();
    let count = |file: &Path| roots(Some(&file.to_owned())).unwrap().len();
    assert_eq!(count(&file), count(&folder.path().join("good.pem")) + 1);
    fs::write(&file, vec![b'\n'; MAX_CA_BYTES + 1]).unwrap();
    assert!(matches!(roots(Some(&file)), Err(TlsError::TooLarge(_))));
}
