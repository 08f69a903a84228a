//! An OCI registry on loopback (OCI distribution specification): one repository, monolithic uploads, with the
//! authentications of registries.

use std::{collections::BTreeMap, convert::Infallible, net::SocketAddr, sync::Arc};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use serde_json::Value;
use tidewatch_oci::digest::Digest;
use tokio::net::TcpListener;

/// Repository that the registry has; others do not exist.
const REPOSITORY: &str = "/v2/modules/component-descriptors/kyma-project.io/module/sample/";
/// Media type of the manifests that it accepts.
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";

/// What the registry demands.
#[derive(Clone, Copy)]
pub(crate) enum Access {
    Anonymous,
    /// This password of the user `tide`.
    Password(&'static str),
    /// A token for the scope, issued for this password of the user `tide`, or for this refresh token. `HEAD` is not
    /// supported.
    Token(&'static str),
    /// This token.
    Fixed(&'static str),
}

#[derive(Default)]
pub(crate) struct Content {
    pub(crate) blobs: BTreeMap<String, Bytes>,
    /// Manifests by tag.
    pub(crate) manifests: BTreeMap<String, Bytes>,
    /// Method and path of each request, without the repository.
    pub(crate) received: Vec<String>,
}

/// A running registry.
pub(crate) struct Registry {
    address: SocketAddr,
    pub(crate) content: Arc<Mutex<Content>>,
}

impl Registry {
    /// Starts a registry that is empty; with a password, it is that of the user `tide`.
    pub(crate) async fn start(password: Option<&'static str>) -> Self {
        Self::with(password.map_or(Access::Anonymous, Access::Password)).await
    }

    /// Starts a registry that is empty.
    pub(crate) async fn with(access: Access) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let content = Arc::new(Mutex::default());
        let shared = content.clone();
        tokio::spawn(async move {
            while let Ok((tcp, _)) = listener.accept().await {
                let content = shared.clone();
                tokio::spawn(async move {
                    let service = service_fn(move |request| respond(request, content.clone(), access));
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(tcp), service).await;
                });
            }
        });
        Self { address, content }
    }

    /// Its address with the path of the repositories, for the command line.
    pub(crate) fn url(&self) -> String {
        format!("http://{}/modules", self.address)
    }

    /// Takes the requests so far.
    pub(crate) fn received(&self) -> Vec<String> {
        std::mem::take(&mut self.content.lock().received)
    }
}

async fn respond(
    request: Request<Incoming>,
    content: Arc<Mutex<Content>>,
    access: Access,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    let mut content = content.lock();
    let path = parts.uri.path().strip_prefix(REPOSITORY).unwrap_or("");
    content.received.push(format!("{} {path}", parts.method));
    let given = parts.headers.get(header::AUTHORIZATION).map(|value| value.to_str().unwrap());
    let basic = |password: &str| format!("Basic {}", STANDARD.encode(format!("tide:{password}")));
    if let (Access::Token(secret), "/token") = (access, parts.uri.path()) {
        let body = String::from_utf8(body.to_vec()).unwrap();
        let refresh = format!("refresh_token={secret}&");
        let is_known = given == Some(&basic(secret)) || parts.method == Method::POST && body.contains(&refresh);
        let asked = format!("{}{body}", parts.uri.query().unwrap_or_default());
        return Ok(match (is_known, asked.contains("push")) {
            (false, _) => status(StatusCode::UNAUTHORIZED, "who are you?"),
            (true, false) => status(StatusCode::OK, r#"{"token": "reads"}"#),
            (true, true) => status(StatusCode::OK, r#"{"access_token": "writes"}"#),
        });
    }
    let is_read = [Method::GET, Method::HEAD].contains(&parts.method);
    let is_permitted = match access {
        Access::Anonymous => true,
        Access::Password(password) => given == Some(&basic(password)),
        Access::Token(_) => given == Some("Bearer writes") || is_read && given == Some("Bearer reads"),
        Access::Fixed(token) => given == Some(&format!("Bearer {token}")),
    };
    if !is_permitted {
        let host = parts.headers[header::HOST].to_str().unwrap();
        let challenge = match access {
            Access::Anonymous | Access::Password(_) => "Basic realm=\"test\"".to_owned(),
            Access::Token(_) | Access::Fixed(_) => format!("Bearer realm=\"http://{host}/token\",service=\"test\""),
        };
        let mut refusal = status(StatusCode::UNAUTHORIZED, "who are you?");
        refusal.headers_mut().insert(header::WWW_AUTHENTICATE, challenge.parse().unwrap());
        return Ok(refusal);
    }
    if let (Access::Token(_), &Method::HEAD) = (access, &parts.method) {
        return Ok(status(StatusCode::METHOD_NOT_ALLOWED, ""));
    }
    let query = parts.uri.query().unwrap_or_default();
    let media_type = parts.headers.get(header::CONTENT_TYPE).map(|value| value.to_str().unwrap());
    Ok(match (parts.method, path.split_once('/')) {
        (Method::POST, Some(("blobs", "uploads/"))) => {
            let mut session = status(StatusCode::ACCEPTED, "");
            let location = format!("{REPOSITORY}blobs/uploads/1?state=a%3Db");
            session.headers_mut().insert(header::LOCATION, location.parse().unwrap());
            session
        }
        (Method::PUT, Some(("blobs", "uploads/1"))) => {
            let digest = query.strip_prefix("state=a%3Db&digest=").unwrap_or_default();
            if digest != Digest::of(&body).to_string() {
                return Ok(status(StatusCode::BAD_REQUEST, "DIGEST_INVALID"));
            }
            content.blobs.insert(digest.to_owned(), body);
            status(StatusCode::CREATED, "")
        }
        (Method::PUT, Some(("manifests", tag))) => {
            let is_complete = references(&body).iter().all(|digest| content.blobs.contains_key(digest));
            if media_type != Some(MANIFEST) || !is_complete {
                return Ok(status(StatusCode::BAD_REQUEST, "MANIFEST_BLOB_UNKNOWN"));
            }
            content.manifests.insert(tag.to_owned(), body);
            status(StatusCode::CREATED, "")
        }
        (Method::GET | Method::HEAD, Some(("blobs", digest))) => found(content.blobs.get(digest)),
        (Method::GET | Method::HEAD, Some(("manifests", tag))) => found(content.manifests.get(tag)),
        _ => status(StatusCode::NOT_FOUND, "NAME_UNKNOWN"),
    })
}

/// Digests that a manifest refers to.
fn references(manifest: &[u8]) -> Vec<String> {
    let manifest: Value = serde_json::from_slice(manifest).unwrap();
    let layers = manifest["layers"].as_array().unwrap().iter().chain([&manifest["config"]]);
    layers.map(|reference| reference["digest"].as_str().unwrap().to_owned()).collect()
}

fn found(content: Option<&Bytes>) -> Response<Full<Bytes>> {
    content.map_or_else(|| status(StatusCode::NOT_FOUND, "UNKNOWN"), |content| Response::new(content.clone().into()))
}

fn status(code: StatusCode, message: &'static str) -> Response<Full<Bytes>> {
    let mut response = Response::new(message.into());
    *response.status_mut() = code;
    response
}
