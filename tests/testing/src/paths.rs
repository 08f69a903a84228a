//! Paths of the workspace and of its target folder.

use std::{
    env,
    path::{Path, PathBuf},
};

/// The workspace's root: the folder of the root `Cargo.toml`.
pub fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}

/// Cargo's target folder: `CARGO_TARGET_DIR`, if set, otherwise `target` in the workspace.
pub fn target() -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR") {
        Some(dir) => workspace().join(dir),
        None => workspace().join("target"),
    }
}
