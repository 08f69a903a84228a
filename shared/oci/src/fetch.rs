//! Pulls manifests and blobs (OCI distribution specification, *Pull*). Each response is bounded in bytes and time, and
//! each byte is verified against its digest and declared size.

mod body;
mod challenge;
mod error;
mod google;
#[cfg(test)]
mod habits;
mod manifest;
mod redirect;
#[cfg(test)]
mod tests;
mod token;

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderValue, Request, Response, StatusCode, Uri,
    header::{ACCEPT, AUTHORIZATION, USER_AGENT},
    response::Parts,
};
use http_body_util::Full;
use tidewatch_kit::metrics::ResultLabel;
use tokio::time::timeout;
use tower::{BoxError, ServiceExt as _, util::BoxCloneSyncService};

pub use body::{Body, Size};
pub use error::{FetchError, RedirectError, Stage};
pub use google::{METADATA_ADDRESS, MetadataServer, is_google};
pub use manifest::ImageManifest;

use super::{
    component::is_tag,
    credentials::{AllowedHost, Credentials, Origin, RegistryTarget, is_repository},
    digest::Digest,
    metrics::Metrics,
};
use challenge::Challenge;
use token::{Authorization, Authorizations, Scope};

/// Limit of a manifest, in bytes (the least that registries must accept, OCI distribution specification).
const MAX_MANIFEST_BYTES: u64 = 4 << 20;
/// Timeout of name resolution, TCP, proxy and TLS of a new connection, together.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout from a request to the head of its response, the connection included.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout of a fetch, with authorization and redirects.
pub const FETCH_TIMEOUT: Duration = Duration::from_secs(120);
const CONTENT_DIGEST: &str = "docker-content-digest";
const USER_AGENT_VALUE: HeaderValue =
    HeaderValue::from_static(concat!("tidewatch-receiver/", env!("CARGO_PKG_VERSION")));

/// Sends one request, over a connection or in a test without one.
pub type Transport = BoxCloneSyncService<Request<Full<Bytes>>, Response<Body>, BoxError>;

/// Connections of a client.
#[derive(Clone)]
pub struct Transports {
    /// To the registry, its token servers and the allowed hosts, at any address.
    pub known: Transport,
    /// To hosts that only a redirect names: at public addresses.
    pub public: Transport,
}

#[cfg(any(test, feature = "testing"))]
impl From<Transport> for Transports {
    /// The same for all hosts.
    fn from(transport: Transport) -> Self {
        Self { known: transport.clone(), public: transport }
    }
}

/// Who named the host of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    /// An operator: the registry's own host, and allowed hosts.
    Known,
    /// A redirect of the registry.
    Public,
}

/// What a token is requested for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// To read.
    Pull,
    /// To read and to write.
    Push,
}

impl Access {
    /// Actions of a scope (distribution token specification).
    const fn actions(self) -> &'static str {
        match self {
            Self::Pull => "pull",
            Self::Push => "pull,push",
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
    transports: Transports,
    google: Option<Arc<MetadataServer>>,
    allowed: Arc<[AllowedHost]>,
    authorizations: Arc<Authorizations>,
    metrics: Metrics,
}

impl Fetcher {
    /// Creates a client. Token realms, and redirects of manifests, may name the allowed hosts beside the registry's own.
    pub fn new(transports: Transports, allowed: Arc<[AllowedHost]>, metrics: Metrics) -> Self {
        Self { transports, google: None, allowed, authorizations: Arc::default(), metrics }
    }

    /// Adds the metadata server, for targets with [`Credentials::GoogleMetadata`].
    #[must_use]
    pub fn with_google(self, server: MetadataServer) -> Self {
        Self { google: Some(Arc::new(server)), ..self }
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
        let resource = Resource::Manifest(reference);
        let size = Size::AtMost(MAX_MANIFEST_BYTES);
        let fetched = self.bounded(target, repository, resource, size).await.and_then(|fetched| {
            let Fetched { parts, content, announced } = fetched;
            let digest = Digest::of(&content);
            match reference {
                Reference::Digest(expected) => verify(expected, digest, &parts)?,
                Reference::Tag(_) => {
                    // What the registry announced counts, also if the content comes from the host of a redirect.
                    for expected in announced.into_iter().chain(content_digest(&parts.headers)?) {
                        verify(expected, digest, &parts)?;
                    }
                }
            }
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
        let verified = fetched
            .and_then(|Fetched { parts, content, .. }| verify(digest, Digest::of(&content), &parts).map(|()| content));
        self.count(verified)
    }

    fn count<T>(&self, fetched: Result<T, FetchError>) -> Result<T, FetchError> {
        let result = fetched.as_ref().err().map_or("ok", FetchError::reason);
        self.metrics.fetches.get_or_create(&ResultLabel { result }).inc();
        fetched
    }

    /// Sends one request to the registry itself, with the authorization that it demands for an access to a repository,
    /// and returns the response as it is: redirects are not followed, and statuses other than 401 are the caller's matter.
    /// The caller limits the time, which an upload needs more of, and the body of the response.
    ///
    /// # Errors
    /// [`FetchError`].
    pub async fn exchange(
        &self,
        target: &RegistryTarget,
        repository: &str,
        access: Access,
        request: &Request<Bytes>,
    ) -> Result<Response<Body>, FetchError> {
        let repository = target.address.repository(repository);
        if !is_repository(&repository) {
            return Err(FetchError::Name("repository"));
        }
        if Origin::of(request.uri()) != Some(target.address.server()) {
            return Err(FetchError::Name("URL of the registry"));
        }
        let scope = Scope { repository: &repository, access };
        let known = self.authorizations.get(target, scope);
        let response = self.transmit(authorized(request.clone(), known.as_ref()), Trust::Known).await?;
        let refusal = Refusal::of(&response, known.is_some());
        let is_demanded = refusal.status == StatusCode::UNAUTHORIZED;
        let Some(authorization) = self.renewed(target, scope, refusal).await? else {
            return Ok(response);
        };
        drop(response);
        let response = self.transmit(authorized(request.clone(), Some(&authorization.header)), Trust::Known).await?;
        self.keep(target, scope, authorization, response.status(), is_demanded)?;
        Ok(response)
    }

    async fn bounded(
        &self,
        target: &RegistryTarget,
        repository: &str,
        resource: Resource<'_>,
        size: Size,
    ) -> Result<Fetched, FetchError> {
        let expired = |_| Err(FetchError::Timeout { stage: Stage::Whole, after: FETCH_TIMEOUT });
        timeout(FETCH_TIMEOUT, self.fetch(target, repository, resource, size)).await.unwrap_or_else(expired)
    }

    async fn fetch(
        &self,
        target: &RegistryTarget,
        repository: &str,
        resource: Resource<'_>,
        size: Size,
    ) -> Result<Fetched, FetchError> {
        let repository = checked(target, repository, resource)?;
        let server = target.address.server();
        let uri = format!("{}://{}/v2/{repository}/{}", server.scheme(), server.authority(), resource.path());
        let uri: Uri = uri.parse().map_err(|_| FetchError::Name("repository"))?;
        let answer = self.authorized(target, &repository, &uri, resource).await?;
        let status = answer.response.status();
        if status != StatusCode::OK {
            let artefact = artefact(&target.address.origin, &repository, resource);
            let headers = answer.response.headers();
            return Err(match (answer.host, status.is_client_error()) {
                (Some(host), true) if !RETRIED.contains(&status) => {
                    FetchError::Redirected { host, status: status.as_u16() }
                }
                _ => FetchError::of_status(status, headers, artefact, target.credentials.is_some()),
            });
        }
        let (parts, body) = answer.response.into_parts();
        let content = body::read(body, size, Some(&self.metrics.received)).await?;
        Ok(Fetched { content, parts, announced: answer.announced })
    }

    /// Sends a request with a known authorization, and with another one if the registry refuses it.
    async fn authorized(
        &self,
        target: &RegistryTarget,
        repository: &str,
        uri: &Uri,
        resource: Resource<'_>,
    ) -> Result<Answer, FetchError> {
        let scope = Scope { repository, access: Access::Pull };
        let known = self.authorizations.get(target, scope);
        let answer = self.redirected(target, uri, known.as_ref(), resource).await?;
        if answer.host.is_some() {
            // The challenge of a storage server is none of the registry's.
            return Ok(answer);
        }
        let refusal = Refusal::of(&answer.response, known.is_some());
        let is_demanded = refusal.status == StatusCode::UNAUTHORIZED;
        let Some(authorization) = self.renewed(target, scope, refusal).await? else {
            return Ok(answer);
        };
        drop(answer);
        let answer = self.redirected(target, uri, Some(&authorization.header), resource).await?;
        if answer.host.is_none() {
            self.keep(target, scope, authorization, answer.response.status(), is_demanded)?;
        }
        Ok(answer)
    }

    /// Decides on a response of the registry: returns another authorization to send, or `None` if the response is final.
    ///
    /// A registry may answer requests for private repositories with 403 or 404 without a challenge. If no credentials were
    /// sent yet, it is asked for the challenge; a request with credentials then gets the content, or the same status.
    async fn renewed(
        &self,
        target: &RegistryTarget,
        scope: Scope<'_>,
        refusal: Refusal,
    ) -> Result<Option<Authorization>, FetchError> {
        let Refusal { status, challenge, was_authorized } = refusal;
        let with_credentials = target.credentials.is_some();
        let is_refused = match status {
            StatusCode::UNAUTHORIZED => true,
            // A kept authorization may have expired.
            StatusCode::FORBIDDEN => was_authorized || with_credentials || challenge.is_some(),
            StatusCode::NOT_FOUND => with_credentials && !was_authorized,
            _ => false,
        };
        if !is_refused {
            return Ok(None);
        }
        self.authorizations.remove(target, scope);
        let challenge = match challenge {
            None if was_authorized || with_credentials => self.challenge(target).await?,
            challenge => challenge,
        };
        match challenge {
            Some(challenge) => self.authorize(target, scope, challenge).await.map(Some),
            None if status == StatusCode::UNAUTHORIZED => Err(FetchError::Unauthorized { with_credentials }),
            None => Ok(None),
        }
    }

    /// Asks the registry for its challenge, which some registries send with a status of success. If there is none, user and
    /// password are sent as Basic.
    async fn challenge(&self, target: &RegistryTarget) -> Result<Option<Challenge>, FetchError> {
        let server = target.address.server();
        let request = Request::get(format!("{}://{}/v2/", server.scheme(), server.authority())).body(Bytes::new());
        let response = self.send(request.map_err(|_| FetchError::Name("registry"))?, Trust::Known).await?;
        let status = response.status();
        let is_passing = status == StatusCode::TOO_MANY_REQUESTS || status == StatusCode::REQUEST_TIMEOUT;
        if is_passing || status.is_server_error() {
            // Without its challenge, user and password could go to the registry instead of its token server.
            let with_credentials = target.credentials.is_some();
            return Err(FetchError::of_status(status, response.headers(), "/v2/".to_owned(), with_credentials));
        }
        let fallback = match target.credentials {
            Some(Credentials::Basic { .. }) => Some(Challenge::Basic),
            _ => None,
        };
        Ok(Challenge::of(response.headers()).or(fallback))
    }

    /// Keeps an authorization for the next requests if the registry demanded it by 401, or if it led to this status of success.
    /// One that only answers a 403 or 404, and leads to the same status, may be the wrong one.
    fn keep(
        &self,
        target: &RegistryTarget,
        scope: Scope<'_>,
        authorization: Authorization,
        status: StatusCode,
        is_demanded: bool,
    ) -> Result<(), FetchError> {
        if status == StatusCode::UNAUTHORIZED {
            return Err(FetchError::Unauthorized { with_credentials: target.credentials.is_some() });
        }
        if is_demanded || status.is_success() || status.is_redirection() {
            self.authorizations.put(target, scope, authorization);
        }
        Ok(())
    }

    /// Sends a request and follows permitted redirects. The authorization is sent to the registry's origin only, and not
    /// any more once a redirect has led elsewhere.
    async fn redirected(
        &self,
        target: &RegistryTarget,
        uri: &Uri,
        authorization: Option<&HeaderValue>,
        resource: Resource<'_>,
    ) -> Result<Answer, FetchError> {
        let registry = target.address.server();
        let is_manifest = matches!(resource, Resource::Manifest(_));
        // A tag has no digest that its content is verified against; a blob is that of its digest, or refused.
        let reach = if is_manifest { Trust::Known } else { Trust::Public };
        let mut uri = uri.clone();
        let mut trust = Trust::Known;
        let mut redirects = 0;
        let mut is_own = true;
        let mut announced = None;
        loop {
            let origin = Origin::of(&uri).ok_or(FetchError::Redirect(RedirectError::Location))?;
            is_own &= origin == registry;
            let mut request = Request::get(uri.clone());
            if is_manifest {
                request = request.header(ACCEPT, manifest::ACCEPT);
            }
            let request = request.body(Bytes::new()).map_err(|_| FetchError::Name("repository"))?;
            let response = self.send(authorized(request, authorization.filter(|_| is_own)), trust).await?;
            if !response.status().is_redirection() {
                let host = (!is_own).then(|| origin.host().to_owned());
                return Ok(Answer { response, host, announced });
            }
            if redirects == redirect::MAX_REDIRECTS {
                return Err(FetchError::Redirect(RedirectError::TooMany));
            }
            if is_own && is_manifest {
                announced = content_digest(response.headers())?.or(announced);
            }
            let hop = redirect::target(&uri, response.headers(), &registry, &self.allowed, reach);
            redirect::Hop { uri, trust } = hop.map_err(FetchError::Redirect)?;
            redirects += 1;
        }
    }

    async fn send(&self, request: Request<Bytes>, trust: Trust) -> Result<Response<Body>, FetchError> {
        let expired = |_| Err(FetchError::Timeout { stage: Stage::Head, after: HEAD_TIMEOUT });
        timeout(HEAD_TIMEOUT, self.transmit(request, trust)).await.unwrap_or_else(expired)
    }

    async fn transmit(&self, mut request: Request<Bytes>, trust: Trust) -> Result<Response<Body>, FetchError> {
        request.headers_mut().entry(USER_AGENT).or_insert(USER_AGENT_VALUE);
        let host = request.uri().host().unwrap_or_default().to_owned();
        let transport = match trust {
            Trust::Known => &self.transports.known,
            Trust::Public => &self.transports.public,
        };
        let response = transport.clone().oneshot(request.map(Full::new)).await;
        response.map_err(|error| match trust {
            Trust::Known => FetchError::transport(error.as_ref()),
            Trust::Public => FetchError::to_public(error.as_ref(), &host),
        })
    }
}

/// Statuses of a storage server that say nothing about the URL.
const RETRIED: [StatusCode; 2] = [StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT];

/// Response of the registry that may ask for another authorization.
struct Refusal {
    status: StatusCode,
    challenge: Option<Challenge>,
    /// The request had an authorization that an earlier request was accepted with.
    was_authorized: bool,
}

impl Refusal {
    fn of(response: &Response<Body>, was_authorized: bool) -> Self {
        Self { status: response.status(), challenge: Challenge::of(response.headers()), was_authorized }
    }
}

/// Last response of a chain of redirects.
struct Answer {
    response: Response<Body>,
    /// Host that sent it, if a redirect led away from the registry.
    host: Option<String>,
    /// Digest of a manifest, from a redirect of the registry.
    announced: Option<Digest>,
}

/// Content that is not verified yet.
struct Fetched {
    parts: Parts,
    content: Bytes,
    /// See [`Answer::announced`].
    announced: Option<Digest>,
}

fn authorized(mut request: Request<Bytes>, authorization: Option<&HeaderValue>) -> Request<Bytes> {
    if let Some(authorization) = authorization {
        request.headers_mut().insert(AUTHORIZATION, authorization.clone());
    }
    request
}

/// Returns the full name of the repository, if the names can be in a URL.
fn checked(target: &RegistryTarget, repository: &str, resource: Resource<'_>) -> Result<String, FetchError> {
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
fn content_digest(headers: &HeaderMap) -> Result<Option<Digest>, FetchError> {
    let Some(value) = headers.get(CONTENT_DIGEST) else { return Ok(None) };
    let malformed = FetchError::Malformed("its header Docker-Content-Digest is not a digest");
    let Ok(value) = value.to_str() else { return Err(malformed) };
    if !value.starts_with("sha256:") {
        return Ok(None);
    }
    value.parse().map(Some).map_err(|_| malformed)
}

/// Compares the digest of a content with the expected one. A web page in its place is named as such.
fn verify(expected: Digest, actual: Digest, parts: &Parts) -> Result<(), FetchError> {
    match expected == actual {
        true => Ok(()),
        false if manifest::content_type(&parts.headers) == Some("text/html") => {
            Err(FetchError::Malformed(manifest::WEB_PAGE))
        }
        false => Err(FetchError::DigestMismatch { expected, actual }),
    }
}
