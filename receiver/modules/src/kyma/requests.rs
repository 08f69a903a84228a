//! Requests for the Manifests of one Kyma.

use futures::{StreamExt as _, stream};
use kube::ResourceExt as _;
use tidewatch_api::{
    Manifest,
    key::{KymaKey, ManifestKey},
};
use tidewatch_fleet::stores::manifests::ManifestWriter;

use super::{Context, Error};

/// Requests that run concurrently.
const AT_ONCE: usize = 4;

/// Runs requests, up to [`AT_ONCE`] concurrently. They are created before the stream: created inside it, their lifetimes are too
/// general for the compiler to infer `Send`.
pub(super) async fn run<F: Future>(requests: Vec<F>) -> Vec<F::Output> {
    stream::iter(requests).buffered(AT_ONCE).collect().await
}

/// Runs a request that writes one Manifest, with the cache informed of its begin and result. Returns the Manifest as written;
/// `None` if it is gone.
pub(super) async fn write(
    ctx: &Context,
    key: &KymaKey,
    manifest: &Manifest,
    request: impl Future<Output = Result<Option<Manifest>, Error>>,
) -> Result<Option<Manifest>, Error> {
    let manifests = &ctx.stores.manifests;
    let of = ManifestKey::of(manifest);
    manifests.begin_write(of.clone(), key);
    let written = request.await?;
    match &written {
        Some(written) => manifests.wrote(written, ManifestWriter::Kyma),
        None => manifests.wrote_gone(&of, manifest.uid(), ManifestWriter::Kyma),
    }
    Ok(written)
}
