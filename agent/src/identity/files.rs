//! An identity in a folder, as a mounted Secret lays it out.

use std::{fs, path::PathBuf};

use tidewatch_shared::names::{CHAIN_KEY, PRIVATE_KEY_KEY, TRUST_BUNDLE_KEY};

use super::{Load, Material, Source};

/// `tls.crt`, `tls.key` and `ca.crt` of one folder.
pub(crate) struct Files {
    folder: PathBuf,
}

impl Files {
    /// Reads nothing yet.
    pub(crate) const fn new(folder: PathBuf) -> Self {
        Self { folder }
    }

    fn file(&self, name: &'static str) -> Result<Vec<u8>, Load> {
        fs::read(self.folder.join(name)).map_err(|error| Load::Read { name, error })
    }
}

impl Source for Files {
    fn read(&mut self) -> Result<Material, Load> {
        let (chain, key) = (self.file(CHAIN_KEY)?, self.file(PRIVATE_KEY_KEY)?);
        Ok(Material { chain, key, bundle: self.file(TRUST_BUNDLE_KEY)? })
    }
}
