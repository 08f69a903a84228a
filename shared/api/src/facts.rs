//! Facts about Kymas and Manifests that readers of all of them need. A cache may have only the facts of an object.

mod kyma;
mod manifest;

use k8s_openapi::api::core::v1::ConfigMap;

pub use self::{
    kyma::{KymaFacts, ReducedKyma, RestDigest},
    manifest::{Flags, ManifestFacts, ReducedManifest},
};

/// Key of the ConfigMap [`PAUSE`](crate::names::PAUSE).
const PAUSE_KEY: &str = "pause";

/// Returns true if the ConfigMap [`PAUSE`](crate::names::PAUSE) pauses all runtimes.
pub fn pauses_all(map: Option<&ConfigMap>) -> bool {
    let value = map.and_then(|map| map.data.as_ref()?.get(PAUSE_KEY));
    value.is_some_and(|value| value.trim().eq_ignore_ascii_case("true"))
}
