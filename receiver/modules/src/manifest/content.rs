//! Content of modules' versions: layers from a registry, and Secrets of KCP.

use futures::future::{BoxFuture, FutureExt as _};
use serde_json::Value;
use tidewatch_api::{Manifest, key::ManifestKey};
use tidewatch_engine::{Content, ModuleObjects, SecretData, SecretsError};

use super::{Context, layers::layer_key};

/// Content of one Manifest's version.
pub(super) struct KcpContent<'a> {
    pub(super) ctx: &'a Context,
    pub(super) key: &'a ManifestKey,
}

impl Content for KcpContent<'_> {
    fn objects<'a>(&'a self, manifest: &'a Manifest) -> BoxFuture<'a, ModuleObjects> {
        async {
            match layer_key(manifest) {
                Ok(layer) => (self.ctx.layers)(self.key, &layer).await,
                Err(error) => ModuleObjects::Failed(error),
            }
        }
        .boxed()
    }

    fn secrets<'a>(
        &'a self,
        manifest: &'a Manifest,
        objects: &'a [Value],
    ) -> BoxFuture<'a, Result<SecretData, SecretsError>> {
        async {
            let Some(secrets) = &self.ctx.secrets else { return Ok(SecretData::default()) };
            secrets.data(manifest, objects).await
        }
        .boxed()
    }
}
