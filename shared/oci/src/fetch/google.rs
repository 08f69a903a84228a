//! Access tokens of the service account that Google Cloud attaches to a workload, from its metadata server.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header::HOST};
use http_body_util::Full;
use serde::Deserialize;
use tokio::{
    sync::Mutex,
    time::{Instant, timeout},
};
use tower::ServiceExt as _;

use super::{
    Fetcher, Transport, body,
    body::Size,
    error::{FetchError, clean},
};
use crate::credentials::{Credentials, Origin, Scheme};

/// Address of the metadata server: constant, so that no name server can lead the request elsewhere.
pub const METADATA_ADDRESS: &str = "http://169.254.169.254";
/// Its name, which it expects in the header `Host`.
const METADATA_HOST: &str = "metadata.google.internal";
const TOKEN_PATH: &str = "/computeMetadata/v1/instance/service-accounts/default/token";
/// Header that proves in a request that no browser or redirect sent it, and in a response that this server did.
const FLAVOR: &str = "metadata-flavor";
const FLAVOR_VALUE: &str = "Google";
/// User that Google's registries expect beside an access token.
const USER: &str = "oauth2accesstoken";
/// Limit of a response, in bytes.
const MAX_BYTES: u64 = 64 << 10;
/// Timeout of a response.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A token is not used in the last part of its lifetime. The server itself renews it 5 minutes before its end.
const MARGIN: Duration = Duration::from_secs(225);

/// Returns whether a server may get tokens of the metadata server: a registry of Google, with TLS.
pub fn is_google(server: &Origin) -> bool {
    let host = server.host();
    let is_below = |domain: &str| host.strip_suffix(domain).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'));
    server.scheme() == Scheme::Https && (host == "gcr.io" || is_below("gcr.io") || is_below("pkg.dev"))
}

/// The metadata server, and its last token.
pub struct MetadataServer {
    transport: Transport,
    address: String,
    cached: Mutex<Option<Cached>>,
}

struct Cached {
    token: String,
    until: Instant,
}

#[derive(Deserialize)]
struct Token {
    access_token: String,
    expires_in: u64,
}

impl MetadataServer {
    /// Creates a client of the server at [`METADATA_ADDRESS`], or at that of a test.
    pub fn new(transport: Transport, address: impl Into<String>) -> Self {
        Self { transport, address: address.into(), cached: Mutex::new(None) }
    }

    /// Returns the token, from the server if the last one ends soon. Concurrent calls share one request.
    async fn token(&self) -> Result<String, FetchError> {
        let mut cached = self.cached.lock().await;
        if let Some(kept) = cached.as_ref().filter(|kept| kept.until > Instant::now()) {
            return Ok(kept.token.clone());
        }
        let expired = |_| Err(FetchError::Timeout { stage: super::Stage::Head, after: TIMEOUT });
        let fetched = timeout(TIMEOUT, self.fetch()).await.unwrap_or_else(expired);
        let Token { access_token, expires_in } = fetched.map_err(|error| match error {
            known @ FetchError::Metadata(_) => known,
            other => FetchError::Metadata(clean(&other.to_string())),
        })?;
        let until = Instant::now() + Duration::from_secs(expires_in.min(86_400)).saturating_sub(MARGIN);
        *cached = Some(Cached { token: access_token.clone(), until });
        Ok(access_token)
    }

    async fn fetch(&self) -> Result<Token, FetchError> {
        let refused = |text: &str| FetchError::Metadata(text.to_owned());
        let uri: Uri = format!("{}{TOKEN_PATH}", self.address).parse().map_err(|_| refused("malformed address"))?;
        let request = Request::get(uri).header(HOST, METADATA_HOST).header(FLAVOR, FLAVOR_VALUE);
        let request = request.body(Full::new(Bytes::new())).map_err(|_| refused("malformed request"))?;
        let response = self.transport.clone().oneshot(request).await;
        let response = response.map_err(|error| FetchError::transport(error.as_ref()))?;
        if response.headers().get(FLAVOR).is_none_or(|value| value != FLAVOR_VALUE) {
            return Err(refused("another server answers at its address; is this Google Cloud?"));
        }
        match response.status() {
            StatusCode::OK => {}
            StatusCode::NOT_FOUND => return Err(refused("the workload has no service account")),
            status => return Err(FetchError::Metadata(format!("status {}", status.as_u16()))),
        }
        let content = body::read(response.into_body(), Size::AtMost(MAX_BYTES), None).await?;
        let token: Token = serde_json::from_slice(&content).map_err(|_| refused("the response has no token"))?;
        if token.access_token.is_empty() { Err(refused("the response has no token")) } else { Ok(token) }
    }
}

impl Fetcher {
    /// Credentials for a registry of Google.
    pub(super) async fn google_token(&self, server: &Origin) -> Result<Credentials, FetchError> {
        let refused = |text: String| FetchError::Metadata(text);
        if !is_google(server) {
            return Err(refused(format!("{server} is not a registry of Google")));
        }
        let metadata = self.google.as_ref().ok_or_else(|| refused("it is not set up".to_owned()))?;
        let password = metadata.token().await?;
        Ok(Credentials::Basic { username: USER.to_owned(), password })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        credentials::RegistryTarget,
        digest::Digest,
        metrics::Metrics,
        testing::{FakeRegistry, Reply},
        tls,
    };

    const REPOSITORY: &str = "project/modules/sample";
    const HOST_OF_REGISTRY: &str = "europe-docker.pkg.dev";

    fn token(token: &str, seconds: u64) -> Reply {
        let content = format!(r#"{{"access_token":"{token}","expires_in":{seconds},"token_type":"Bearer"}}"#);
        Reply::Of(200, vec![(FLAVOR, FLAVOR_VALUE.to_owned())], content.into())
    }

    /// A registry in the process, and a metadata server on the loopback interface.
    async fn fetcher(registry: &FakeRegistry, metadata: &FakeRegistry) -> (Fetcher, tokio::task::JoinSet<()>) {
        let (port, server) = metadata.listen(None).await;
        let allowed = ["evil.example.com".parse().unwrap()];
        let fetcher = Fetcher::new(registry.transport().into(), allowed.into(), Metrics::default());
        let metadata = MetadataServer::new(tls::direct(), format!("http://127.0.0.1:{port}"));
        (fetcher.with_google(metadata), server)
    }

    async fn blob(fetcher: &Fetcher, host: &str) -> Result<Bytes, FetchError> {
        let target = RegistryTarget::new(host.parse().unwrap(), Some(Credentials::GoogleMetadata));
        fetcher.blob(&target, REPOSITORY, Digest::of(b"blob"), Size::Exactly(4)).await
    }

    #[tokio::test]
    async fn token_of_the_service_account_is_sent_to_the_registry_and_kept() {
        let registry = FakeRegistry::default();
        registry.blob(REPOSITORY, b"blob");
        let realm = format!("Bearer realm=\"https://{HOST_OF_REGISTRY}/v2/token\",service=\"s\"");
        registry.protect("Bearer t", &realm);
        registry.script("/v2/token", [Reply::content(r#"{"token":"t"}"#)]);
        let metadata = FakeRegistry::default();
        metadata.script(TOKEN_PATH, [token("first", 3_599), token("second", 3_599)]);
        let (fetcher, _server) = fetcher(&registry, &metadata).await;
        for _ in 0..2 {
            // Each target needs a token of the registry, and the metadata server gives one for both.
            assert_eq!(blob(&fetcher, HOST_OF_REGISTRY).await, Ok("blob".into()));
        }
        let asked = metadata.received();
        assert_eq!(asked.len(), 1);
        assert_eq!(
            (&asked[0].headers["metadata-flavor"], &asked[0].headers["host"]),
            (&http::HeaderValue::from_static("Google"), &http::HeaderValue::from_static("metadata.google.internal"),)
        );
        let sent = Credentials::Basic { username: "oauth2accesstoken".into(), password: "first".into() };
        let sent = sent.basic().unwrap();
        let requests = registry.received().into_iter().filter(|request| request.uri.contains("/v2/token"));
        assert!(requests.into_iter().all(|request| request.authorization.as_deref() == sent.to_str().ok()));
    }

    #[tokio::test]
    async fn token_that_ends_soon_is_not_kept() {
        let registry = FakeRegistry::default();
        registry.blob(REPOSITORY, b"blob");
        registry.protect("Basic b2F1dGgyYWNjZXNzdG9rZW46dA==", "Basic");
        let metadata = FakeRegistry::default();
        metadata.script(TOKEN_PATH, [token("t", 225)]);
        let (fetcher, _server) = fetcher(&registry, &metadata).await;
        for _ in 0..2 {
            assert_eq!(blob(&fetcher, HOST_OF_REGISTRY).await, Ok("blob".into()));
        }
        assert_eq!(metadata.received().len(), 2);
    }

    #[tokio::test]
    async fn token_is_sent_nowhere_else() {
        for (host, realm) in [
            // Not even a listed host gets it.
            (HOST_OF_REGISTRY, "https://evil.example.com/token"),
            (HOST_OF_REGISTRY, "https://europe-docker.pkg.dev:444/token"),
            ("evil.example.com", "https://evil.example.com/token"),
            ("http://europe-docker.pkg.dev", "http://europe-docker.pkg.dev/token"),
        ] {
            let registry = FakeRegistry::default();
            registry.protect("Bearer t", &format!("Bearer realm=\"{realm}\""));
            registry.script("/token", [Reply::content(r#"{"token":"t"}"#)]);
            let metadata = FakeRegistry::default();
            metadata.script(TOKEN_PATH, [token("secret", 3_599)]);
            let (fetcher, _server) = fetcher(&registry, &metadata).await;
            assert!(blob(&fetcher, host).await.is_err());
            assert_eq!(registry.count("/token"), 0, "{host} {realm}");
            assert!(registry.received().iter().all(|request| request.authorization.is_none()), "{host} {realm}");
        }
    }

    #[tokio::test]
    async fn failures_of_the_metadata_server_are_named() {
        let flavored = |status: u16, content: &'static str| {
            Reply::Of(status, vec![(FLAVOR, FLAVOR_VALUE.to_owned())], content.into())
        };
        for (reply, cause) in [
            (flavored(404, ""), "the workload has no service account"),
            (flavored(503, ""), "status 503"),
            (flavored(200, "{}"), "the response has no token"),
            (flavored(200, r#"{"access_token":"","expires_in":9}"#), "the response has no token"),
            (Reply::content(r#"{"access_token":"t","expires_in":9}"#), "another server answers"),
            (Reply::Broken("{".into()), "issues no token"),
            (Reply::Down, "no exchange"),
        ] {
            let registry = FakeRegistry::default();
            registry.protect("Bearer t", "Basic");
            let metadata = FakeRegistry::default();
            metadata.script(TOKEN_PATH, [reply]);
            let (fetcher, _server) = fetcher(&registry, &metadata).await;
            let error = blob(&fetcher, HOST_OF_REGISTRY).await.err().unwrap();
            assert!(error.is_retryable() && error.to_string().contains(cause), "{error}");
        }
    }
}
