//! Root certificates of the system, for servers whose operator names none.

use std::sync::Arc;

use rustls::RootCertStore;

/// Root certificates of the system: those in the files that `SSL_CERT_FILE` and `SSL_CERT_DIR` name, else in the usual
/// places. The default has none.
#[derive(Clone, Debug)]
pub struct SystemRoots(Arc<RootCertStore>);

impl Default for SystemRoots {
    fn default() -> Self {
        RootCertStore::empty().into()
    }
}

impl From<RootCertStore> for SystemRoots {
    fn from(roots: RootCertStore) -> Self {
        Self(Arc::new(roots))
    }
}

impl SystemRoots {
    /// Reads the files; blocking. Unreadable and malformed certificates are logged and skipped.
    pub fn load() -> Self {
        let mut store = RootCertStore::empty();
        let system = rustls_native_certs::load_native_certs();
        for error in &system.errors {
            crate::log_error!(warn, error, "System root certificates cannot be read");
        }
        let (_, ignored) = store.add_parsable_certificates(system.certs);
        if ignored > 0 {
            tracing::warn!(ignored, "Some system root certificates are malformed");
        }
        store.into()
    }

    /// The certificates.
    pub const fn store(&self) -> &Arc<RootCertStore> {
        &self.0
    }
}
