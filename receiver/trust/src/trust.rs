//! Trust bundles and their revision.

use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use tidewatch_contract::certificate::{self, KeyId};
use tidewatch_kit::tls;

/// Roots that agents and this receiver trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustBundle {
    roots: Vec<CertificateDer<'static>>,
    revision: String,
    /// Subject key identifiers of the roots that have one.
    authorities: Vec<KeyId>,
}

impl TrustBundle {
    /// Builds a bundle; order and duplicates do not matter.
    pub fn of(mut roots: Vec<CertificateDer<'static>>) -> Self {
        roots.sort_by(|a, b| a.as_ref().cmp(b.as_ref()));
        roots.dedup();
        let revision = certificate::trust_revision(&roots);
        let authorities = roots.iter().filter_map(|root| KeyId::of_subject(root).ok().flatten()).collect();
        Self { roots, revision, authorities }
    }

    /// Reads a bundle from PEM.
    ///
    /// # Errors
    /// [`tls::TlsConfigError`]: also when it is empty or a root is unusable. A bundle is taken completely or not at all.
    pub fn from_pem(pem: &[u8]) -> Result<Self, tls::TlsConfigError> {
        let roots = tls::certificates(pem)?;
        tls::roots(&roots)?;
        Ok(Self::of(roots))
    }

    /// Union of this bundle and another one, as during a rotation.
    pub fn with(&self, other: &Self) -> Self {
        Self::of(self.roots.iter().chain(&other.roots).cloned().collect())
    }

    /// Revision of the set of roots: 16 hex digits that change with the set and with nothing else.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// True if one of the roots has this key.
    pub fn has_authority(&self, authority: &KeyId) -> bool {
        self.authorities.contains(authority)
    }

    /// The roots, in a fixed order.
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// Expiry of the first root to expire, Unix time; `None` if none can be read.
    pub(crate) fn first_end(&self) -> Option<i64> {
        self.roots.iter().filter_map(|root| certificate::not_after(root).ok()).min()
    }

    /// The bundle as PEM; equal sets give equal text.
    pub fn to_pem(&self) -> String {
        self.roots.iter().map(|root| certificate::to_pem(root)).collect()
    }

    /// Builds a trust store.
    ///
    /// # Errors
    /// [`tls::TlsConfigError`].
    pub fn store(&self) -> Result<RootCertStore, tls::TlsConfigError> {
        tls::roots(&self.roots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CA_VALIDITY, Ca};

    #[test]
    fn revision_depends_only_on_the_set_of_roots() {
        let [a, b] = ["a", "b"].map(|name| Ca::generate(name, 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle());
        assert_ne!(a.revision(), b.revision());
        let both = a.with(&b);
        let reversed = b.with(&a).with(&a);
        assert_eq!(both, reversed);
        assert_ne!(both.revision(), a.revision());
        assert_eq!(TrustBundle::from_pem(both.to_pem().as_bytes()).unwrap(), both);
        assert!(TrustBundle::from_pem(b"").is_err());
    }
}
