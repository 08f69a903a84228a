//! Identity in a folder, with the file names of a mounted Secret.

use std::{fs, path::PathBuf};

use tidewatch_shared::names::{CHAIN_KEY, PRIVATE_KEY_KEY, TRUST_BUNDLE_KEY};

use super::{CredentialsError, KeyMaterial, Source};

/// `tls.crt`, `tls.key` and `ca.crt` of one folder.
pub(crate) struct IdentityFiles {
    folder: PathBuf,
}

impl IdentityFiles {
    /// Creates a source for a folder, without reading it.
    pub(crate) const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn file(&self, name: &'static str) -> Result<Vec<u8>, CredentialsError> {
        fs::read(self.folder.join(name)).map_err(|error| CredentialsError::Read { name, error })
    }
}

impl Source for IdentityFiles {
    fn read(&mut self) -> Result<KeyMaterial, CredentialsError> {
        let (chain, key) = (self.file(CHAIN_KEY)?, self.file(PRIVATE_KEY_KEY)?);
        Ok(KeyMaterial { chain, key, bundle: self.file(TRUST_BUNDLE_KEY)? })
    }
}
