//! Pushes an artefact to a registry (OCI distribution specification, *Push*): blobs in one request each, then the
//! manifest by its tag.

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::Args;
use http::{
    HeaderValue, Method, Request, Response, StatusCode, Uri,
    header::{CONTENT_TYPE, LOCATION, USER_AGENT},
    response::Parts,
};
use http_body_util::{BodyExt as _, Limited};
use serde::Serialize;
use strum::Display;
use thiserror::Error;
use tidewatch_kit::table;
use tidewatch_oci::{
    credentials::{Origin, RegistryAddress},
    digest::Digest,
    fetch::{Access, FETCH_TIMEOUT, FetchError, Reference},
};
use tokio::time::timeout;

use super::{
    artefact::{Artefact, Blob},
    registry::{Registry, RegistryFlags, explained},
};
use crate::block_on;

/// Maximum size of a response in bytes; only refusals have a body that is shown.
const MAX_RESPONSE_BYTES: usize = 64 << 10;
/// Characters of a refusal that are shown.
const MAX_MESSAGE_CHARS: usize = 200;
const USER_AGENT_VALUE: HeaderValue = HeaderValue::from_static(concat!("tidewatch/", env!("CARGO_PKG_VERSION")));

/// Flags of the push.
#[derive(Clone, Debug, Default, Args)]
#[group(skip)]
pub struct PushFlags {
    /// Push the artefact to this registry: host with optional port and path; with http:// in front for plain HTTP
    #[arg(long, value_name = "REGISTRY")]
    pub push: Option<RegistryAddress>,

    /// Replace another artefact with the same version in the registry
    #[arg(long, requires = "push")]
    pub overwrite: bool,

    /// Access to the registry.
    #[command(flatten)]
    pub registry: RegistryFlags,
}

impl PushFlags {
    /// Pushes the artefact, if the flags name a registry.
    pub(super) fn push(&self, artefact: &Artefact) -> Result<Option<Pushed>> {
        let Some(address) = &self.push else { return Ok(None) };
        let pushed = async {
            let registry = self.registry.connect(address.clone()).await?;
            push(&registry, artefact, self.overwrite).await
        };
        block_on(pushed).map(Some)
    }
}

/// Effect of a push.
#[derive(Clone, Copy, Debug, Display, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub(super) enum Effect {
    /// The version is new in the registry.
    Created,
    /// The registry has exactly this artefact.
    Unchanged,
    /// Another artefact of the version was replaced.
    Replaced,
}

/// Result of a push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Pushed {
    /// Registry, repository and tag.
    pub(super) reference: String,
    /// Effect.
    pub(super) effect: Effect,
}

/// The version exists with another content.
#[derive(Debug, Error)]
#[error("{reference} exists with {}; a published version must not change, and --overwrite replaces it", existing(.digest))]
struct ExistsError {
    reference: String,
    /// Digest of the existing manifest; `None` if it is no image manifest.
    digest: Option<Digest>,
}

fn existing(digest: &Option<Digest>) -> String {
    digest.map_or_else(|| "other content".to_owned(), |digest| format!("the digest {digest}"))
}

/// Pushes the artefact. The tag is looked up first and written last, so a refused push has no effect, and an
/// interrupted one only leaves blobs, which the next push finds.
pub(super) async fn push(registry: &Registry, artefact: &Artefact, overwrite: bool) -> Result<Pushed> {
    let address = &registry.target.address;
    let repository = artefact.component.repository();
    let tag = artefact.component.tag();
    let reference = format!("{}/{}:{tag}", address.origin, address.repository(&repository));
    let effect = match registry.fetcher.manifest(&registry.target, &repository, Reference::Tag(&tag)).await {
        Ok((_, digest, _)) if digest == artefact.manifest.digest => Effect::Unchanged,
        Err(FetchError::NotFound { .. }) => Effect::Created,
        Ok(_) | Err(FetchError::Index { .. }) if overwrite => Effect::Replaced,
        Ok((_, digest, _)) => bail!(ExistsError { reference, digest: Some(digest) }),
        Err(FetchError::Index { .. }) => bail!(ExistsError { reference, digest: None }),
        Err(error) => return Err(explained(error)).with_context(|| format!("look up {reference}")),
    };
    if effect != Effect::Unchanged {
        let upload = Upload::new(registry, &repository);
        for blob in &artefact.blobs {
            upload.blob(blob).await.with_context(|| format!("upload the blob {}", blob.digest))?;
        }
        upload.manifest(&artefact.manifest, &tag).await.with_context(|| format!("write {reference}"))?;
    }
    Ok(Pushed { reference, effect })
}

/// Uploads to one repository.
struct Upload<'a> {
    registry: &'a Registry,
    /// Name of the repository below the path of the registry.
    repository: &'a str,
    /// URL of the repository.
    base: String,
}

impl<'a> Upload<'a> {
    fn new(registry: &'a Registry, repository: &'a str) -> Self {
        let address = &registry.target.address;
        let server = address.server();
        let base = format!("{}://{}/v2/{}", server.scheme(), server.authority(), address.repository(repository));
        Self { registry, repository, base }
    }

    /// Uploads a blob that the repository does not have: POST for a session, PUT with the content.
    async fn blob(&self, blob: &Blob) -> Result<()> {
        let known =
            self.send(Method::HEAD, &format!("{}/blobs/{}", self.base, blob.digest), None, Bytes::new()).await?;
        if known.status() == StatusCode::OK {
            return Ok(());
        }
        let uploads = format!("{}/blobs/uploads/", self.base);
        let session = self.send(Method::POST, &uploads, None, Bytes::new()).await?;
        let parts = accepted(session, StatusCode::ACCEPTED)?;
        let location = self.location(&parts)?;
        let separator = if location.contains('?') { '&' } else { '?' };
        let place = format!("{location}{separator}digest={}", blob.digest);
        let written =
            self.send(Method::PUT, &place, Some("application/octet-stream"), blob.content.clone().into()).await?;
        accepted(written, StatusCode::CREATED).map(drop)
    }

    async fn manifest(&self, manifest: &Blob, tag: &str) -> Result<()> {
        let place = format!("{}/manifests/{tag}", self.base);
        let written =
            self.send(Method::PUT, &place, Some(&manifest.media_type), manifest.content.clone().into()).await?;
        accepted(written, StatusCode::CREATED).map(drop)
    }

    /// URL of an upload session. It must be on the registry itself, which gets the credentials.
    fn location(&self, parts: &Parts) -> Result<String> {
        let location = parts.headers.get(LOCATION).and_then(|value| value.to_str().ok());
        let location = location.context("the response has no Location for the upload")?;
        let origin = self.registry.target.address.server();
        if location.starts_with('/') && !location.starts_with("//") {
            return Ok(format!("{}://{}{location}", origin.scheme(), origin.authority()));
        }
        let uri: Option<Uri> = location.parse().ok();
        match uri.as_ref().and_then(Origin::of) {
            Some(to) if to == origin => Ok(location.to_owned()),
            Some(to) => bail!("the registry refers the upload to another server, {to}"),
            None => bail!("the Location of the upload is malformed"),
        }
    }

    async fn send(&self, method: Method, uri: &str, media_type: Option<&str>, body: Bytes) -> Result<Response<Bytes>> {
        let mut request = Request::builder().method(method).uri(uri).header(USER_AGENT, USER_AGENT_VALUE);
        if let Some(media_type) = media_type {
            request = request.header(CONTENT_TYPE, media_type);
        }
        let request = request.body(body).context("build the request")?;
        let Registry { target, fetcher } = self.registry;
        let exchange = async {
            let response = fetcher.exchange(target, self.repository, Access::Push, &request).await;
            let (parts, body) = response.map_err(explained)?.into_parts();
            let body = Limited::new(body, MAX_RESPONSE_BYTES).collect().await;
            let body = body.map_err(|error| anyhow::anyhow!(error)).context("read the response")?.to_bytes();
            Ok(Response::from_parts(parts, body))
        };
        let expired = || format!("no response within {} s", FETCH_TIMEOUT.as_secs());
        timeout(FETCH_TIMEOUT, exchange).await.with_context(expired)?
    }
}

/// Checks the status of a response.
fn accepted(response: Response<Bytes>, expected: StatusCode) -> Result<Parts> {
    let (parts, body) = response.into_parts();
    if parts.status == expected {
        return Ok(parts);
    }
    let message: String = String::from_utf8_lossy(&body).trim().chars().take(MAX_MESSAGE_CHARS).collect();
    bail!("the registry answered {} instead of {}: {}", parts.status, expected.as_u16(), table::sanitize(&message))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_status_and_message() {
        let mut response = Response::new(Bytes::from_static(b"no\x1b[31m entry\n"));
        *response.status_mut() = StatusCode::FORBIDDEN;
        let text = accepted(response, StatusCode::CREATED).unwrap_err().to_string();
        assert_eq!(text, "the registry answered 403 Forbidden instead of 201: no\u{fffd}[31m entry");
    }

    #[tokio::test]
    async fn upload_is_sent_to_the_registry_itself_only() {
        let address = "http://reg.example.org:5000/a".parse().unwrap();
        let registry = RegistryFlags::default().connect(address).await.unwrap();
        let upload = Upload::new(&registry, "b");
        let location = |location: Option<&'static str>| {
            let mut response = Response::new(());
            if let Some(location) = location {
                response.headers_mut().insert(LOCATION, HeaderValue::from_static(location));
            }
            upload.location(&response.into_parts().0).map_err(|error| error.to_string())
        };
        let own = "http://reg.example.org:5000/v2/a/b/blobs/uploads/1?x=y";
        assert_eq!(location(Some("/v2/a/b/blobs/uploads/1?x=y")).as_deref(), Ok(own));
        assert_eq!(location(Some(own)).as_deref(), Ok(own));
        for (other, cause) in [
            (Some("http://reg.example.org/v2"), "another server"),
            (Some("https://reg.example.org:5000/v2"), "another server"),
            (Some("//evil.example.org/v2"), "malformed"),
            (Some("uploads/1"), "malformed"),
            (None, "no Location"),
        ] {
            let error = location(other).unwrap_err();
            assert!(error.contains(cause), "{other:?}: {error}");
        }
    }
}
