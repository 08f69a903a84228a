//! An identity in a folder, as a mounted Secret lays it out.

use std::{fs, path::PathBuf};

use super::{Load, Material, Source};

const CHAIN: &str = "tls.crt";
const KEY: &str = "tls.key";
const BUNDLE: &str = "ca.crt";

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
        Ok(Material { chain: self.file(CHAIN)?, key: self.file(KEY)?, bundle: self.file(BUNDLE)? })
    }
}
