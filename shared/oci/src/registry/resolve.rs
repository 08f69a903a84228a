//! From a component version to its descriptor, and from digests to the text of a layer: through the store, else from the
//! registry.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use bytes::Bytes;
use tidewatch_kit::{foreign_text, metrics::ResultLabel};
use tokio::{sync::Semaphore, task::spawn_blocking};

use super::key::{Key, LayerKey, LookupError, Value};
use crate::{
    component::ComponentVersion,
    credentials::{CredentialsError, RegistryTarget},
    descriptor::{self, Descriptor, DescriptorError},
    digest::Digest,
    fetch::{FetchError, Fetcher, ImageManifest, Reference, Size},
    layer,
    metrics::Metrics,
    signature::{self, ComponentKeys, Covered, SignatureError},
    store::Store,
};

/// Blobs of one layer.
const MAX_BLOBS: usize = 128;
/// Longest text of a mistake in a content, in characters.
const MAX_TEXT_CHARS: usize = 300;

/// Registry of the moment.
#[derive(Debug, Default)]
pub(super) struct Live {
    pub(super) target: Option<Arc<RegistryTarget>>,
    /// Mistake in the last Secret.
    pub(super) error: Option<CredentialsError>,
}

/// Fetches and decodes. Clones share everything.
#[derive(Clone)]
pub(super) struct Resolver {
    pub(super) fetcher: Fetcher,
    pub(super) store: Store,
    pub(super) live: Arc<ArcSwap<Live>>,
    /// Name of the Secret with the registry.
    pub(super) secret: Arc<str>,
    /// Keys that sign component descriptors; `None` if none have to be signed.
    pub(super) keys: Arc<ArcSwapOption<ComponentKeys>>,
    pub(super) metrics: Metrics,
    /// One layer is unpacked at a time: a small one may become large.
    pub(super) unpacking: Arc<Semaphore>,
}

impl Resolver {
    pub(super) async fn resolve(&self, key: &Key) -> Result<Value, LookupError> {
        match key {
            Key::Descriptor(component) => {
                self.descriptor(key, component).await.map(|descriptor| Value::Descriptor(Arc::new(descriptor)))
            }
            Key::Layer(layer) => self.layer(key, layer).await.map(|text| Value::Layer(Arc::new(text))),
        }
    }

    /// A known tag needs no request for it: module versions are immutable. A tag becomes known when its descriptor was
    /// decoded and, if keys are given, verified; it is read again if that fails, since it may be signed later.
    async fn descriptor(&self, key: &Key, component: &ComponentVersion) -> Result<Descriptor, LookupError> {
        let target = self.target()?;
        let repository = component.repository();
        let tag = component.tag();
        let artefact = format!("{}/{}:{tag}", target.address.origin, target.address.repository(&repository));
        if let Some(known) = self.store.tag(&artefact) {
            match self.descriptor_at(key, component, &target, Reference::Digest(known)).await {
                Err(error) if matches!(error.fetch(), Some(FetchError::NotFound { .. })) => {
                    self.store.set_tag(artefact.clone(), None).await;
                }
                // The keys may be wrong, and the registry down until they are right again.
                Err(LookupError::Untrusted { .. }) => {}
                result => return result.map(|(descriptor, _)| descriptor),
            }
        }
        let (descriptor, digest) = self.descriptor_at(key, component, &target, Reference::Tag(&tag)).await?;
        self.store.set_tag(artefact, Some(digest)).await;
        Ok(descriptor)
    }

    async fn descriptor_at(
        &self,
        key: &Key,
        component: &ComponentVersion,
        target: &Arc<RegistryTarget>,
        reference: Reference<'_>,
    ) -> Result<(Descriptor, Digest), LookupError> {
        let repository = component.repository();
        let fetched = |error| LookupError::Fetch { key: key.clone(), error };
        let (manifest, digest) = self.manifest(target, &repository, reference).await.map_err(fetched)?;
        let limit = descriptor::MAX_CONFIG_BYTES as u64;
        if manifest.config.size > limit {
            return Err(fetched(FetchError::TooLarge { limit }));
        }
        let size = Size::Exactly(manifest.config.size);
        let config = self.blob(Some(target), &repository, manifest.config.digest, size).await.map_err(fetched)?;
        let pointer =
            descriptor::component_descriptor_pointer(&config).map_err(|error| unusable(key, &error.to_string()))?;
        let size = Size::Exactly(pointer.size);
        let content = self.blob(Some(target), &repository, pointer.digest, size).await.map_err(fetched)?;
        let expected = component.clone();
        let keys = self.keys.load_full();
        let decoding = spawn_blocking(move || decode(&pointer.media_type, &content, &expected, keys.as_deref()));
        let decoded = decoding.await.map_err(|_| LookupError::Aborted(key.clone()))?;
        match decoded.map_err(|error| unusable(key, &error.to_string()))? {
            Decoded::Unverified(descriptor) => Ok((descriptor, digest)),
            Decoded::Verified(verified) => {
                let covered = match verified {
                    Ok(covered) => self.covered(key, target, covered).await?,
                    Err(error) => Err(error),
                };
                let result = covered.as_ref().err().map_or("ok", SignatureError::reason);
                self.metrics.verifications.get_or_create(&ResultLabel { result }).inc();
                let covered = covered.map_err(|error| LookupError::Untrusted { key: key.clone(), error });
                covered.map(|descriptor| (descriptor, digest))
            }
        }
    }

    /// Compares the content of the module's layer with the signed digest, unless its reference is this digest: fetched and
    /// stored blobs have that of their reference.
    async fn covered(
        &self,
        key: &Key,
        target: &Arc<RegistryTarget>,
        covered: Covered,
    ) -> Result<Result<Descriptor, SignatureError>, LookupError> {
        let Covered { descriptor, raw_manifest } = covered;
        let Some((signed, layer)) = raw_manifest.zip(descriptor.raw_manifest.as_ref()) else {
            return Ok(Ok(descriptor));
        };
        let repository = descriptor.repository().to_string();
        let content = self.content(key, Some(target), &repository, &layer.digests).await?;
        let verifying = spawn_blocking(move || signed.verify(&content));
        let verified = verifying.await.map_err(|_| LookupError::Aborted(key.clone()))?;
        Ok(verified.map(|()| descriptor))
    }

    async fn layer(&self, key: &Key, layer: &LayerKey) -> Result<String, LookupError> {
        let LayerKey { repository, digests, kind } = layer;
        // Stored content needs no registry, and thus no credentials.
        let target = self.target();
        let content = match self.content(key, target.as_ref().ok(), repository, digests).await {
            Ok(content) => content,
            Err(error) => {
                if error.fetch().is_some() {
                    target?;
                }
                return Err(error);
            }
        };
        let _permit = self.unpacking.acquire().await;
        let kind = *kind;
        let text = spawn_blocking(move || layer::yaml_text(kind, &content)).await;
        let text = text.map_err(|_| LookupError::Aborted(key.clone()))?;
        text.map_err(|error| unusable(key, &error.to_string()))
    }

    /// The concatenation of blobs.
    async fn content(
        &self,
        key: &Key,
        target: Option<&Arc<RegistryTarget>>,
        repository: &str,
        digests: &[Digest],
    ) -> Result<Bytes, LookupError> {
        if !(1..=MAX_BLOBS).contains(&digests.len()) {
            return Err(LookupError::Blobs(key.clone()));
        }
        let mut blobs = Vec::new();
        let mut bytes = 0;
        for digest in digests {
            let size = Size::AtMost(layer::MAX_STORED_BYTES.saturating_sub(bytes) as u64);
            let blob = self.blob(target, repository, *digest, size).await;
            let blob = blob.map_err(|error| LookupError::Fetch { key: key.clone(), error })?;
            bytes += blob.len();
            blobs.push(blob);
        }
        Ok(<[Bytes; 1]>::try_from(blobs).map_or_else(|blobs| blobs.concat().into(), |[only]| only))
    }

    async fn manifest(
        &self,
        target: &RegistryTarget,
        repository: &str,
        reference: Reference<'_>,
    ) -> Result<(ImageManifest, Digest), FetchError> {
        if let Reference::Digest(digest) = reference
            && let Some(content) = self.store.get(digest).await
        {
            return Ok((ImageManifest::parse(&content, None, repository)?, digest));
        }
        let (manifest, digest, content) = self.fetcher.manifest(target, repository, reference).await?;
        self.store.put(digest, content).await;
        Ok((manifest, digest))
    }

    /// Reads a blob from the store, else from the registry, if there is one.
    async fn blob(
        &self,
        target: Option<&Arc<RegistryTarget>>,
        repository: &str,
        digest: Digest,
        size: Size,
    ) -> Result<Bytes, FetchError> {
        if let Some(content) = self.store.get(digest).await {
            return size.verify(content.len() as u64).map(|()| content);
        }
        let target = target.ok_or(FetchError::Unauthorized { with_credentials: false })?;
        let content = self.fetcher.blob(target, repository, digest, size).await?;
        self.store.put(digest, content.clone()).await;
        Ok(content)
    }

    fn target(&self) -> Result<Arc<RegistryTarget>, LookupError> {
        let live = self.live.load();
        let secret = || self.secret.to_string();
        live.target.clone().ok_or_else(|| match live.error {
            Some(error) => LookupError::SecretMalformed { secret: secret(), error },
            None => LookupError::SecretMissing { secret: secret() },
        })
    }
}

/// A component descriptor as decoded.
enum Decoded {
    /// No keys are given.
    Unverified(Descriptor),
    /// The contents that a signature covers.
    Verified(Result<Covered, SignatureError>),
}

fn decode(
    media_type: &str,
    content: &[u8],
    expected: &ComponentVersion,
    keys: Option<&ComponentKeys>,
) -> Result<Decoded, DescriptorError> {
    let document = descriptor::parse(media_type, content)?;
    let descriptor = document.descriptor(expected)?;
    let Some(keys) = keys else { return Ok(Decoded::Unverified(descriptor)) };
    Ok(Decoded::Verified(signature::verify(&document, keys).and_then(|_| signature::cover(descriptor))))
}

/// A mistake in a content. Its text may quote the content.
fn unusable(key: &Key, text: &str) -> LookupError {
    LookupError::Unusable { key: key.clone(), text: foreign_text::line(text, MAX_TEXT_CHARS) }
}
