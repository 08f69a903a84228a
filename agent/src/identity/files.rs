//! Identity in a folder, with the file names of a mounted Secret.

use std::{fs, path::PathBuf};

use tidewatch_api::names::{CHAIN_KEY, PRIVATE_KEY_KEY, TRUST_BUNDLE_KEY};

use super::{CredentialsError, KeyMaterial, Source};

/// A folder with `tls.crt`, `tls.key` and `ca.crt`.
impl Source for PathBuf {
    fn read(&mut self) -> Result<KeyMaterial, CredentialsError> {
        let file = |name| fs::read(self.join(name)).map_err(|error| CredentialsError::Read { name, error });
        Ok(KeyMaterial { chain: file(CHAIN_KEY)?, key: file(PRIVATE_KEY_KEY)?, bundle: file(TRUST_BUNDLE_KEY)? })
    }
}
