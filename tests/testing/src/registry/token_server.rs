//! Authorization service of a registry (distribution token specification): signed tokens for user and password.

use std::{
    convert::Infallible,
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use aws_lc_rs::{
    rand::SystemRandom,
    signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair},
};
use base64::{
    Engine as _,
    prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD},
};
use bytes::Bytes;
use http::{Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use percent_encoding::percent_decode_str;
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, KeyPair, KeyUsagePurpose};
use serde_json::{Value, json};
use tidewatch_kit::tls::{self, Identity, TlsConfigError};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    task::{AbortHandle, JoinSet},
};
use tokio_rustls::TlsAcceptor;

use super::Login;

const ISSUER: &str = "tokens of the test bed";
const SERVICE: &str = "registry of the test bed";
/// Lifetime of a token in seconds.
const LIFETIME: i64 = 300;

/// Failure to start the server.
#[derive(Debug, thiserror::Error)]
pub enum TokenServerError {
    /// The key of the tokens or its certificate cannot be made.
    #[error("make the certificate of the tokens")]
    Certificate(#[source] rcgen::Error),
    /// The key of the tokens cannot sign.
    #[error("use the key of the tokens")]
    Key(#[source] aws_lc_rs::error::KeyRejected),
    /// The certificate of the server is not usable.
    #[error("set up TLS")]
    Tls(#[source] TlsConfigError),
    /// No port is free.
    #[error("listen on loopback")]
    Listen(#[source] io::Error),
}

/// See the module. Ends when dropped.
#[derive(Debug)]
pub(super) struct TokenServer {
    realm: String,
    certificate: String,
    task: AbortHandle,
}

impl TokenServer {
    /// Listens on a free port, with TLS if there is an identity.
    pub(super) async fn start(identity: Option<Identity>) -> Result<Self, TokenServerError> {
        let (signer, certificate) = Signer::create()?;
        let tls = identity.as_ref().map(tls::server_without_client_auth).transpose().map_err(TokenServerError::Tls)?;
        let acceptor = tls.map(|config| TlsAcceptor::from(Arc::new(config)));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.map_err(TokenServerError::Listen)?;
        let address: SocketAddr = listener.local_addr().map_err(TokenServerError::Listen)?;
        let scheme = if acceptor.is_some() { "https" } else { "http" };
        let task = tokio::spawn(accept(listener, acceptor, Arc::new(signer))).abort_handle();
        Ok(Self { realm: format!("{scheme}://{address}/token"), certificate, task })
    }

    /// URL that issues tokens.
    pub(super) fn realm(&self) -> &str {
        &self.realm
    }

    /// Name of the registry in tokens.
    pub(super) const fn service(&self) -> &'static str {
        SERVICE
    }

    /// Name of this server in tokens.
    pub(super) const fn issuer(&self) -> &'static str {
        ISSUER
    }

    /// Certificate of the key that signs tokens, PEM.
    pub(super) fn certificate(&self) -> &str {
        &self.certificate
    }
}

impl Drop for TokenServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, signer: Arc<Signer>) {
    let mut connections = JoinSet::new();
    while let Ok((tcp, _)) = listener.accept().await {
        while connections.try_join_next().is_some() {}
        let acceptor = acceptor.clone();
        let signer = signer.clone();
        connections.spawn(async move {
            match acceptor {
                None => serve(tcp, signer).await,
                Some(acceptor) => {
                    if let Ok(stream) = acceptor.accept(tcp).await {
                        serve(stream, signer).await;
                    }
                }
            }
        });
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, signer: Arc<Signer>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let response = respond(&signer, &request);
        async move { Ok::<_, Infallible>(response) }
    });
    // The client handles the end of its connection.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

fn respond<B>(signer: &Signer, request: &Request<B>) -> Response<Full<Bytes>> {
    let authorization = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let (status, body) = if authorization == Some(&format!("Basic {}", Login::TEST.basic())) {
        let access = access(request.uri().query().unwrap_or_default());
        match signer.token(&access, Timestamp::now().as_second()) {
            Some(token) => (StatusCode::OK, json!({"token": token, "expires_in": LIFETIME})),
            None => (StatusCode::INTERNAL_SERVER_ERROR, json!({})),
        }
    } else {
        (StatusCode::UNAUTHORIZED, json!({"errors": [{"code": "UNAUTHORIZED"}]}))
    };
    let mut response = Response::new(Full::from(body.to_string()));
    *response.status_mut() = status;
    response
}

/// The requested access of a query: of each scope `type:name:action,action`, where the name may contain colons.
fn access(query: &str) -> Vec<Value> {
    let parameters = query.split('&').filter_map(|parameter| parameter.split_once('='));
    let scopes = parameters
        .filter(|(name, _)| *name == "scope")
        .map(|(_, value)| percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned());
    let of_scope = |scope: &str| {
        let (kind, rest) = scope.split_once(':')?;
        let (name, actions) = rest.rsplit_once(':')?;
        let actions: Vec<_> = actions.split(',').collect();
        Some(json!({"type": kind, "name": name, "actions": actions}))
    };
    scopes.flat_map(|scopes| scopes.split(' ').filter_map(of_scope).collect::<Vec<_>>()).collect()
}

/// Signs tokens (JWS, RFC 7515) with ES256.
struct Signer {
    key: EcdsaKeyPair,
    /// Certificate of the key, DER in base64.
    certificate: String,
}

impl Signer {
    /// Creates a key, and its certificate as PEM.
    fn create() -> Result<(Self, String), TokenServerError> {
        let key = KeyPair::generate().map_err(TokenServerError::Certificate)?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, ISSUER);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature, KeyUsagePurpose::KeyCertSign];
        let certificate = params.self_signed(&key).map_err(TokenServerError::Certificate)?;
        let signing = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &key.serialize_der());
        let signing = signing.map_err(TokenServerError::Key)?;
        Ok((Self { key: signing, certificate: BASE64_STANDARD.encode(certificate.der()) }, certificate.pem()))
    }

    /// A token for this access from `now` on, in seconds since 1970; `None` if the system provides no random bytes.
    fn token(&self, access: &[Value], now: i64) -> Option<String> {
        let header = json!({"typ": "JWT", "alg": "ES256", "x5c": [self.certificate]});
        let claims = json!({
            "iss": ISSUER, "sub": Login::TEST.user, "aud": SERVICE,
            "iat": now, "nbf": now, "exp": now + LIFETIME, "access": access,
        });
        let encode = |part: &Value| BASE64_URL_SAFE_NO_PAD.encode(part.to_string());
        let signed = format!("{}.{}", encode(&header), encode(&claims));
        let signature = self.key.sign(&SystemRandom::new(), signed.as_bytes()).ok()?;
        Some(format!("{signed}.{}", BASE64_URL_SAFE_NO_PAD.encode(signature.as_ref())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_parsed_with_all_their_actions() {
        let expected = json!([
            {"type": "repository", "name": "a/b", "actions": ["pull", "push"]},
            {"type": "repository", "name": "host:1/c", "actions": ["pull"]},
        ]);
        let query = "service=x&scope=repository%3Aa%2Fb%3Apull%2Cpush+repository:host:1/c:pull&scope=broken";
        assert_eq!(Value::from(access(query)), expected);
    }

    #[test]
    fn only_the_login_gets_a_token() {
        let (signer, _) = Signer::create().expect("a key");
        let status = |login: Option<Login<'_>>| {
            let request = Request::get("/token?scope=repository:a:pull");
            let request = match login {
                Some(login) => request.header(header::AUTHORIZATION, format!("Basic {}", login.basic())),
                None => request,
            };
            respond(&signer, &request.body(()).expect("a request")).status()
        };
        assert_eq!(status(Some(Login::TEST)), StatusCode::OK);
        assert_eq!(status(Some(Login { password: "wrong", ..Login::TEST })), StatusCode::UNAUTHORIZED);
        assert_eq!(status(None), StatusCode::UNAUTHORIZED);
    }
}
