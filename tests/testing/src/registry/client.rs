//! Client of a registry, as the OCI distribution specification 1.1 defines its requests: it authenticates when it is
//! challenged, and verifies every digest.

use std::time::Duration;

use aws_lc_rs::digest::{SHA256, digest};
use bytes::Bytes;
use http::{
    HeaderMap, Method, Request, Response, StatusCode,
    header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, LOCATION, WWW_AUTHENTICATE},
};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rustls::RootCertStore;
use serde::Deserialize;
use tidewatch_kit::{
    hex,
    tls::{self, TlsConfigError},
};
use tokio::time::timeout;

use super::Login;

/// Time for one request with its body.
const DEADLINE: Duration = Duration::from_secs(30);
/// Largest accepted body, in bytes.
const BODY_LIMIT: usize = 64 << 20;
/// Media type of blobs in requests.
const BLOB: &str = "application/octet-stream";
/// Accepted media types of manifests.
const MANIFESTS: &str = "application/vnd.oci.image.manifest.v1+json, application/vnd.oci.image.index.v1+json";

/// Failure of a request.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The request could not be built: a malformed repository, reference or token.
    #[error("{0}: build the request")]
    Build(&'static str, #[source] http::Error),
    /// There is no response.
    #[error("{0}: send the request")]
    Send(&'static str, #[source] hyper_util::client::legacy::Error),
    /// The body broke off or is too long.
    #[error("{0}: read the response")]
    Body(&'static str, #[source] Box<dyn std::error::Error + Send + Sync>),
    /// The deadline passed.
    #[error("{0}: no response within {DEADLINE:?}")]
    Deadline(&'static str),
    /// Registry or token server refused.
    #[error("{operation}: {status}: {body}")]
    Refused {
        /// The operation.
        operation: &'static str,
        /// Status of the response.
        status: StatusCode,
        /// Body of the response.
        body: String,
    },
    /// The response has not the specified form.
    #[error("{0}: the response has no usable {1}")]
    Malformed(&'static str, &'static str),
    /// The content has another digest.
    #[error("the content of {expected} has the digest {actual}")]
    Digest {
        /// The requested digest.
        expected: String,
        /// That of the content.
        actual: String,
    },
}

impl ClientError {
    /// Status of a refusal.
    #[must_use]
    pub const fn status(&self) -> Option<StatusCode> {
        match self {
            Self::Refused { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// See the module.
#[derive(Debug)]
pub struct RegistryClient {
    http: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    url: String,
    /// Credentials of the scheme Basic.
    basic: Option<String>,
}

/// A request that can be sent twice: without and with authorization.
struct Call<'a> {
    operation: &'static str,
    method: Method,
    url: &'a str,
    media_type: Option<&'a str>,
    body: Bytes,
}

impl<'a> Call<'a> {
    fn new(operation: &'static str, method: Method, url: &'a str) -> Self {
        Self { operation, method, url, media_type: None, body: Bytes::new() }
    }

    fn with(self, media_type: &'a str, body: Bytes) -> Self {
        Self { media_type: Some(media_type), body, ..self }
    }

    fn request(&self, authorization: Option<&str>) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = Request::builder().method(self.method.clone()).uri(self.url).header(ACCEPT, MANIFESTS);
        if let Some(media_type) = self.media_type {
            request = request.header(CONTENT_TYPE, media_type);
        }
        if let Some(authorization) = authorization {
            request = request.header(AUTHORIZATION, authorization);
        }
        request.body(Full::new(self.body.clone())).map_err(|error| ClientError::Build(self.operation, error))
    }
}

impl RegistryClient {
    /// A client for the base URL of a registry, with the PEM of its CA if it has TLS.
    ///
    /// # Errors
    /// The PEM is not a certificate.
    pub fn new(url: String, ca_pem: Option<&str>, login: Option<Login<'_>>) -> Result<Self, TlsConfigError> {
        let roots = match ca_pem {
            Some(pem) => tls::roots(&tls::certificates(pem.as_bytes())?)?,
            None => RootCertStore::empty(),
        };
        let config = tls::client_without_client_auth(roots)?;
        let connector = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().build();
        let http = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { http, url, basic: login.map(|login| login.basic()) })
    }

    /// Determines that the registry serves this API and accepts the login (*Determining Support*).
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn check(&self) -> Result<(), ClientError> {
        let url = format!("{}/v2/", self.url);
        self.call(Call::new("check the registry", Method::GET, &url), StatusCode::OK).await.map(drop)
    }

    /// Pulls a blob.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn blob(&self, repository: &str, digest: &str) -> Result<Bytes, ClientError> {
        let url = format!("{}/v2/{repository}/blobs/{digest}", self.url);
        let content = self.call(Call::new("pull a blob", Method::GET, &url), StatusCode::OK).await?.into_body();
        verified(digest, content)
    }

    /// Pulls a manifest by tag or digest.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn manifest(&self, repository: &str, reference: &str) -> Result<Bytes, ClientError> {
        let url = format!("{}/v2/{repository}/manifests/{reference}", self.url);
        let content = self.call(Call::new("pull a manifest", Method::GET, &url), StatusCode::OK).await?.into_body();
        if reference.contains(':') { verified(reference, content) } else { Ok(content) }
    }

    /// Pushes a blob (*Pushing a blob monolithically*: POST then PUT), and returns its digest.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn push_blob(&self, repository: &str, content: Bytes) -> Result<String, ClientError> {
        const OPERATION: &str = "push a blob";
        let url = format!("{}/v2/{repository}/blobs/uploads/", self.url);
        let session = self.call(Call::new(OPERATION, Method::POST, &url), StatusCode::ACCEPTED).await?;
        let location = session.headers().get(LOCATION).and_then(|location| location.to_str().ok());
        let location = location.ok_or(ClientError::Malformed(OPERATION, "location of the upload"))?;
        let digest = digest_of(&content);
        let base = if location.starts_with('/') { self.url.as_str() } else { "" };
        let separator = if location.contains('?') { '&' } else { '?' };
        let url = format!("{base}{location}{separator}digest={digest}");
        self.call(Call::new(OPERATION, Method::PUT, &url).with(BLOB, content), StatusCode::CREATED).await?;
        Ok(digest)
    }

    /// Pushes a manifest under a tag or its digest, and returns its digest.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn push_manifest(
        &self,
        repository: &str,
        reference: &str,
        media_type: &str,
        content: Bytes,
    ) -> Result<String, ClientError> {
        let url = format!("{}/v2/{repository}/manifests/{reference}", self.url);
        let digest = digest_of(&content);
        let call = Call::new("push a manifest", Method::PUT, &url).with(media_type, content);
        self.call(call, StatusCode::CREATED).await?;
        Ok(digest)
    }

    /// Deletes a manifest by its digest, with all tags that name it.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn delete_manifest(&self, repository: &str, digest: &str) -> Result<(), ClientError> {
        let url = format!("{}/v2/{repository}/manifests/{digest}", self.url);
        self.call(Call::new("delete a manifest", Method::DELETE, &url), StatusCode::ACCEPTED).await.map(drop)
    }

    /// Sends a request, and again with an authorization if it is challenged.
    async fn call(&self, call: Call<'_>, expected: StatusCode) -> Result<Response<Bytes>, ClientError> {
        let mut response = self.send(call.operation, call.request(None)?).await?;
        if response.status() == StatusCode::UNAUTHORIZED
            && let Some(authorization) = self.authorization(call.operation, response.headers()).await?
        {
            response = self.send(call.operation, call.request(Some(&authorization))?).await?;
        }
        accepted(call.operation, response, expected)
    }

    /// Meets the challenge of a response. `None` without a login.
    async fn authorization(&self, operation: &'static str, headers: &HeaderMap) -> Result<Option<String>, ClientError> {
        let Some(basic) = &self.basic else { return Ok(None) };
        let malformed = || ClientError::Malformed(operation, "challenge");
        let challenge = headers.get(WWW_AUTHENTICATE).and_then(|value| value.to_str().ok()).ok_or_else(malformed)?;
        if challenge.starts_with("Basic ") {
            return Ok(Some(format!("Basic {basic}")));
        }
        let parameter = |name| parameter(challenge, name).ok_or_else(malformed);
        let realm = parameter("realm")?;
        let service = encoded(parameter("service")?);
        // The registry's base path needs no scope.
        let scope = parameter("scope").map_or_else(|_| String::new(), |scope| format!("&scope={}", encoded(scope)));
        let url = format!("{realm}?service={service}{scope}");
        let request = Call::new("get a token", Method::GET, &url).request(Some(&format!("Basic {basic}")))?;
        let response = accepted("get a token", self.send("get a token", request).await?, StatusCode::OK)?;
        let answer: Token =
            serde_json::from_slice(response.body()).map_err(|_| ClientError::Malformed("get a token", "token"))?;
        Ok(Some(format!("Bearer {}", answer.token)))
    }

    async fn send(
        &self,
        operation: &'static str,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Bytes>, ClientError> {
        let exchange = async {
            let response = self.http.request(request).await.map_err(|error| ClientError::Send(operation, error))?;
            let (parts, body) = response.into_parts();
            let body = Limited::new(body, BODY_LIMIT).collect().await;
            let body = body.map_err(|error| ClientError::Body(operation, error))?.to_bytes();
            Ok(Response::from_parts(parts, body))
        };
        timeout(DEADLINE, exchange).await.unwrap_or(Err(ClientError::Deadline(operation)))
    }
}

#[derive(Deserialize)]
struct Token {
    token: String,
}

fn accepted(
    operation: &'static str,
    response: Response<Bytes>,
    expected: StatusCode,
) -> Result<Response<Bytes>, ClientError> {
    let status = response.status();
    if status == expected {
        return Ok(response);
    }
    let body = String::from_utf8_lossy(response.body()).into_owned();
    Err(ClientError::Refused { operation, status, body })
}

fn verified(expected: &str, content: Bytes) -> Result<Bytes, ClientError> {
    let actual = digest_of(&content);
    if actual == expected { Ok(content) } else { Err(ClientError::Digest { expected: expected.to_owned(), actual }) }
}

/// Digest of a content: `sha256:<hex>`.
#[must_use]
pub fn digest_of(content: &[u8]) -> String {
    format!("sha256:{}", hex::encode(digest(&SHA256, content).as_ref()))
}

fn encoded(text: &str) -> String {
    utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()
}

/// Value of a quoted parameter of a challenge, without escapes.
fn parameter<'a>(challenge: &'a str, name: &str) -> Option<&'a str> {
    let parameters = challenge.split_once(' ')?.1;
    let start = format!("{name}=\"");
    let rest = parameters.split_once(&start)?.1;
    rest.split_once('"').map(|(value, _)| value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_of_a_challenge_are_found() {
        let challenge =
            r#"Bearer realm="https://127.0.0.1:1/token",service="registry",scope="repository:a/b:pull,push""#;
        let of = |name| parameter(challenge, name);
        assert_eq!((of("realm"), of("service")), (Some("https://127.0.0.1:1/token"), Some("registry")));
        assert_eq!((of("scope"), of("error")), (Some("repository:a/b:pull,push"), None));
    }

    #[test]
    fn content_of_another_digest_is_refused() {
        let empty = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert!(verified(empty, Bytes::new()).is_ok());
        assert!(matches!(verified(empty, Bytes::from_static(b"x")), Err(ClientError::Digest { .. })));
    }
}
