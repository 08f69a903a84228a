//! Facts about Kymas and Manifests that readers of all of them need. A cache may have only the facts of an object.

mod kyma;
mod manifest;

pub use self::{
    kyma::{KymaFacts, ReducedKyma, RestDigest},
    manifest::{Flags, ManifestFacts, ReducedManifest},
};
