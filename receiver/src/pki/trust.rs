//! What is trusted, and which revision of it.

use rustls::RootCertStore;
use rustls_pki_types::CertificateDer;
use tidewatch_shared::{certificate, tls};

/// Roots that agents and this receiver trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TrustBundle {
    roots: Vec<CertificateDer<'static>>,
    revision: String,
}

impl TrustBundle {
    /// Makes a bundle; order and doubles do not matter.
    #[must_use]
    pub fn of(mut roots: Vec<CertificateDer<'static>>) -> Self {
        roots.sort_by(|a, b| a.as_ref().cmp(b.as_ref()));
        roots.dedup();
        let revision = certificate::trust_revision(&roots);
        Self { roots, revision }
    }

    /// Reads a bundle.
    ///
    /// # Errors
    /// [`tls::TlsConfigError`]: also when it is empty or a root cannot be one. A bundle is taken whole or not at all.
    pub fn from_pem(pem: &[u8]) -> Result<Self, tls::TlsConfigError> {
        let roots = tls::certificates(pem)?;
        tls::roots(&roots)?;
        Ok(Self::of(roots))
    }

    /// This bundle and another one together, as during a rotation.
    #[must_use]
    pub fn with(&self, other: &Self) -> Self {
        Self::of(self.roots.iter().chain(&other.roots).cloned().collect())
    }

    /// Changes with the set of roots and with nothing else: 16 hex digits.
    #[must_use]
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// The roots, in a fixed order.
    #[must_use]
    pub fn roots(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    /// The bundle as PEM, the same text for the same set.
    #[must_use]
    pub fn to_pem(&self) -> String {
        self.roots.iter().map(|root| certificate::to_pem(root)).collect()
    }

    /// A trust store of it.
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
    use crate::pki::{CA_VALIDITY, Ca};

    #[test]
    fn the_revision_is_that_of_the_set() {
        let [a, b] = ["a", "b"].map(|name| Ca::generate(name, 1_800_000_000, CA_VALIDITY).unwrap().trust_bundle());
        assert_ne!(a.revision(), b.revision());
        let (both, reversed) = (a.with(&b), b.with(&a).with(&a));
        assert_eq!(both, reversed);
        assert_ne!(both.revision(), a.revision());
        assert_eq!(TrustBundle::from_pem(both.to_pem().as_bytes()).unwrap(), both);
        assert!(TrustBundle::from_pem(b"").is_err());
    }
}
