//! Resolves the components of modules to bytes from an OCI registry, and knows nothing of Kubernetes.
//!
//! The format of components is that of the Open Component Model (OCM). Modules without IO:
//!
//! | module | responsibility |
//! |---|---|
//! | [`digest`] | content digests |
//! | [`component`] | names and versions of components, their repositories and tags |
//! | [`archive`] | unpacks gzip and tar with limits |
//! | [`descriptor`] | component descriptors v2 and v3: the layer and the images of a module |
//! | [`excerpt`] | foreign texts in errors |
//! | [`signature`] | signatures of component descriptors: normal forms, trusted keys, contents that are covered |
//! | [`layer`] | layers: from the stored bytes to YAML, and from YAML to objects |
//!
//! Modules with IO:
//!
//! | module | responsibility |
//! |---|---|
//! | [`registry`] | lookups that never wait: one background fetch per key, retries, announced changes |
//! | [`fetch`] | manifests and blobs: limits, verification, redirects, authorization |
//! | [`credentials`] | address of the registry, and its credentials from a dockerconfigjson |
//! | [`key_folder`] | files with the trusted keys |
//! | [`store`] | contents by digest in a disposable folder, manifests of known tags |
//! | [`tls`] | connections: roots, proxy |
//! | [`flags`], [`metrics`] | flags and metrics |

pub mod archive;
pub mod component;
pub mod credentials;
pub mod descriptor;
pub mod digest;
pub mod excerpt;
pub mod fetch;
pub mod flags;
pub mod key_folder;
pub mod layer;
pub mod metrics;
pub mod registry;
pub mod signature;
pub mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls;
mod yaml;
