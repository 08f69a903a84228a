//! Pulls manifests and blobs (OCI distribution specification, *Pull*). Each response is bounded in bytes and time, and
//! each byte is verified against its digest and declared size.

mod body;
mod challenge;
mod error;
mod manifest;
mod redirect;
#[cfg(test)]
mod tests;
mod token;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderValue, Request, Response, StatusCode, Uri,
    header::{ACCEPT, AUTHORIZATION, USER_AGENT},
};
use http_body_util::Full;
use tokio::time::timeout;
use tower::{BoxError, ServiceExt as _, util::BoxCloneSyncService};

pub use body::{Body, Size};
pub use error::{FetchError, RedirectError, Stage};
pub use manifest::{BlobReference, ImageManifest};

use super::{
    credentials::{AllowedHost, Origin, RegistryTarget, is_repository},
    digest::Digest,
    metrics::Metrics,
};
use challenge::Challenge;
use token::Authorizations;

/// Limit of a manifest, in bytes (the least that registries must accept, OCI distribution specification).
const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// Longest tag (OCI distribution specification).
const MAX_TAG_BYTES: usize = 128;
const CONTENT_DIGEST: &str = "docker-content-digest";
const USER_AGENT_VALUE: HeaderValue =
    HeaderValue::from_static(concat!("tidewatch-receiver/", env!("CARGO_PKG_VERSION")));

/// Sends one request, over a connection or in a test without one.
pub type Transport = BoxCloneSyncService<Request<Full<Bytes>>, Response<Body>, BoxError>;

/// Limits of each fetch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Timeout of name resolution, TCP, proxy and TLS of a new connection, together.
    pub connect: Duration,
    /// Timeout from a request to the head of its response, the connection included.
    pub head: Duration,
    /// Timeout of a fetch, with authorization and redirects.
    pub whole: Duration,
    /// Time in which a body must make progress.
    pub window: Duration,
    /// Bytes that each window must bring.
    pub progress: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(10),
            head: Duration::from_secs(20),
            whole: Duration::from_secs(120),
            window: Duration::from_secs(10),
            progress: 16 << 10,
        }
    }
}

/// Tag or digest of a manifest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reference<'a> {
    /// Mutable name.
    Tag(&'a str),
    /// Content.
    Digest(Digest),
}

/// A manifest or blob of a repository.
#[derive(Clone, Copy)]
enum Resource<'a> {
    Manifest(Reference<'a>),
    Blob(Digest),
}

impl Resource<'_> {
    fn path(self) -> String {
        match self {
            Self::Manifest(Reference::Tag(tag)) => format!("manifests/{tag}"),
            Self::Manifest(Reference::Digest(digest)) => format!("manifests/{digest}"),
            Self::Blob(digest) => format!("blobs/{digest}"),
        }
    }
}

/// Client of a registry. Clones share connections and tokens.
#[derive(Clone)]
pub struct Fetcher {
    transport: Transport,
    allowed: Arc<[AllowedHost]>,
    limits: Limits,
    authorizations: Arc<Authorizations>,
    metrics: Metrics,
}

impl Fetcher {
    /// Creates a client. Redirects and token realms may name the allowed hosts beside the registry's own.
    #[must_use]
    pub fn new(transport: Transport, allowed: Arc<[AllowedHost]>, limits: Limits, metrics: Metrics) -> Self {
        Self { transport, allowed, limits, authorizations: Arc::default(), metrics }
    }

    /// Fetches an image manifest, and returns it with its digest and content. One by digest is verified against it, one
    /// by tag against the registry's `Docker-Content-Digest`, if present.
    ///
    /// # Errors
    /// [`FetchError`].
    pub async fn manifest(
        &self,
        target: &RegistryTarget,
        repository: &str,
        reference: Reference<'_>,
    ) -> Result<(ImageManifest, Digest, Bytes), FetchError> {
        let (resource, size) = (Resource::Manifest(reference), Size::AtMost(MAX_MANIFEST_BYTES));
        let fetched = self.bounded(target, repository, resource, size).await.and_then(|(parts, content)| {
            let digest = Digest::of(&content);
            let expected = match reference {
                Reference::Digest(expected) => Some(expected),
                Reference::Tag(_) => content_digest(&parts)?,
            };
            verify(expected, digest)?;
            let artefact = artefact(&target.address.origin, &target.address.repository(repository), resource);
            let manifest = ImageManifest::parse(&content, manifest::content_type(&parts.headers), &artefact)?;
            Ok((manifest, digest, content))
        });
        self.count(fetched)
    }

    /// Fetches a blob and verifies it.
    ///
    /// # Errors
    /// [`FetchError`].
    pub async fn blob(
        &self,
        target: &RegistryTarget,
        repository: &str,
        digest: Digest,
        size: Size,
    ) -> Result<Bytes, FetchError> {
        let fetched = self.bounded(target, repository, Resource::Blob(digest), size).await;
        self.count(fetched.and_then(|(_, content)| verify(Some(digest), Digest::of(&content)).map(|()| content)))
    }

    fn count<T>(&self, fetched: Result<T, FetchError>) -> Result<T, FetchError> {
        self.metrics.fetched(fetched.as_ref().err().map_or("ok", FetchError::reason));
        fetched
    }

    async fn bounded(
        &self,
        target: &RegistryTarget,
        repository: &str,
        resource: Resource<'_>,
        size: Size,
    ) -> Result<(http::response::Parts, Bytes), FetchError> {
        let after = self.limits.whole;
        let expired = |_| Err(FetchError::Timeout { stage: Stage::Whole, after });
        timeout(after, self.fetch(target, repository, resource, size)).await.unwrap_or_else(expired)
    }

    async fn fetch(
        &self,
        target: &RegistryTarget,
        repository: &str,
        resource: Resource<'_>,
        size: Size,
    ) -> Result<(http::response::Parts, Bytes), FetchError> {
        let repository = checked(target, repository, resource)?;
        let origin = &target.address.origin;
        let uri = format!("{}://{}/v2/{repository}/{}", origin.scheme(), origin.authority(), resource.path());
        let uri: Uri = uri.parse().map_err(|_| FetchError::Name("repository"))?;
        let response = self.authorized(target, &repository, &uri, resource).await?;
        if response.status() != StatusCode::OK {
            let artefact = artefact(origin, &repository, resource);
            return Err(FetchError::of_status(response.status(), response.headers(), artefact));
        }
        let (parts, body) = response.into_parts();
        let content = body::read(body, size, &self.limits, |bytes| {
            self.metrics.received.inc_by(bytes as u64);
        });
        Ok((parts, content.await?))
    }

    /// Sends a request with a known authorization, and meets a challenge once.
    async fn authorized(
        &self,
        target: &RegistryTarget,
        repository: &str,
        uri: &Uri,
        resource: Resource<'_>,
    ) -> Result<Response<Body>, FetchError> {
        let known = self.authorizations.get(target, repository);
        let (response, own) = self.redirected(target, uri, known.as_ref(), resource).await?;
        if response.status() != StatusCode::UNAUTHORIZED {
            return Ok(response);
        }
        let refused = FetchError::Unauthorized { with_credentials: target.credentials.is_some() };
        if !own {
            // The challenge of a storage server is none of the registry's.
            return Err(refused);
        }
        self.authorizations.remove(target, repository);
        let challenge = Challenge::of(response.headers());
        drop(response);
        let authorization = self.authorize(target, repository, challenge).await?;
        let (response, _) = self.redirected(target, uri, Some(&authorization.header), resource).await?;
        if response.status() == StatusCode::UNAUTHORIZED {
            return Err(refused);
        }
        self.authorizations.put(target, repository, authorization);
        Ok(response)
    }

    /// Sends a request and follows permitted redirects. The authorization is sent to the registry's origin only.
    /// Returns the response, and true if that origin sent it.
    async fn redirected(
        &self,
        target: &RegistryTarget,
        uri: &Uri,
        authorization: Option<&HeaderValue>,
        resource: Resource<'_>,
    ) -> Result<(Response<Body>, bool), FetchError> {
        let registry = &target.address.origin;
        let (mut uri, mut redirects) = (uri.clone(), 0);
        loop {
            let own = Origin::of(&uri).as_ref() == Some(registry);
            let mut request = Request::get(uri.clone());
            if let Some(authorization) = authorization.filter(|_| own) {
                request = request.header(AUTHORIZATION, authorization);
            }
            if matches!(resource, Resource::Manifest(_)) {
                request = request.header(ACCEPT, manifest::IMAGE_MANIFEST);
            }
            let request = request.body(Bytes::new()).map_err(|_| FetchError::Name("repository"))?;
            let response = self.send(request).await?;
            if !response.status().is_redirection() {
                return Ok((response, own));
            }
            let refused = match resource {
                Resource::Manifest(_) => Some(RedirectError::NotBlob),
                Resource::Blob(_) => (redirects == redirect::MAX_REDIRECTS).then_some(RedirectError::TooMany),
            };
            if let Some(refused) = refused {
                return Err(FetchError::Redirect(refused));
            }
            uri = redirect::target(&uri, response.headers(), registry, &self.allowed).map_err(FetchError::Redirect)?;
            redirects += 1;
        }
    }

    async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, FetchError> {
        request.headers_mut().insert(USER_AGENT, USER_AGENT_VALUE);
        let Limits { head: after, connect, .. } = self.limits;
        match timeout(after, self.transport.clone().oneshot(request.map(Full::new))).await {
            Ok(response) => response.map_err(|error| FetchError::boxed(&error, connect)),
            Err(_) => Err(FetchError::Timeout { stage: Stage::Head, after }),
        }
    }
}

/// Returns the full name of the repository, if the names can be in a URL.
fn checked(target: &RegistryTarget, repository: &str, resource: Resource<'_>) -> Result<String, FetchError> {
    let is_tag = |tag: &str| {
        let inner = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        (1..=MAX_TAG_BYTES).contains(&tag.len()) && !tag.starts_with(['.', '-']) && tag.bytes().all(inner)
    };
    if let Resource::Manifest(Reference::Tag(tag)) = resource
        && !is_tag(tag)
    {
        return Err(FetchError::Name("tag"));
    }
    let repository = target.address.repository(repository);
    if is_repository(&repository) { Ok(repository) } else { Err(FetchError::Name("repository")) }
}

/// Reference of an artefact as in an image reference.
fn artefact(origin: &Origin, repository: &str, resource: Resource<'_>) -> String {
    match resource {
        Resource::Manifest(Reference::Tag(tag)) => format!("{origin}/{repository}:{tag}"),
        Resource::Manifest(Reference::Digest(digest)) | Resource::Blob(digest) => {
            format!("{origin}/{repository}@{digest}")
        }
    }
}

/// Reads `Docker-Content-Digest`. One of another algorithm is not compared.
fn content_digest(parts: &http::response::Parts) -> Result<Option<Digest>, FetchError> {
    let Some(value) = parts.headers.get(CONTENT_DIGEST) else { return Ok(None) };
    let malformed = FetchError::Malformed("its header Docker-Content-Digest is not a digest");
    let Ok(value) = value.to_str() else { return Err(malformed) };
    if !value.starts_with("sha256:") {
        return Ok(None);
    }
    value.parse().map(Some).map_err(|_| malformed)
}

fn verify(expected: Option<Digest>, actual: Digest) -> Result<(), FetchError> {
    match expected {
        Some(expected) if expected != actual => Err(FetchError::DigestMismatch { expected, actual }),
        _ => Ok(()),
    }
}
