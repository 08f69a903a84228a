//! Identity in a folder, with the file names of a mounted Secret.

use std::{fs, io, path::Path};

use tidewatch_api::names::{CHAIN_KEY, PRIVATE_KEY_KEY, TRUST_BUNDLE_KEY};

use super::KeyMaterial;

/// Reads `tls.crt`, `tls.key` and `ca.crt`.
///
/// # Errors
/// That of the first file that cannot be read, with its name.
pub(super) fn read(folder: &Path) -> io::Result<KeyMaterial> {
    let file = |name: &str| {
        fs::read(folder.join(name)).map_err(|error| io::Error::new(error.kind(), format!("{name}: {error}")))
    };
    Ok(KeyMaterial { chain: file(CHAIN_KEY)?, key: file(PRIVATE_KEY_KEY)?, bundle: file(TRUST_BUNDLE_KEY)? })
}
