//! The folder of one test bed: `target/test-bed/<process id>-<number>`.
//!
//! A running test bed holds a lock in its folder. A new one removes the folders of test beds that are gone (a binary
//! that was killed, a static that was never dropped), except the last few kept ones.

use std::{
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::SystemTime,
};

use crate::{paths, progress::print_line};

const LOCK: &str = ".lock";
const KEEP: &str = ".keep";
/// Number of kept folders that stay, at some 150 MiB each.
const KEPT: usize = 5;

static NUMBER: AtomicU32 = AtomicU32::new(0);

/// Failure to make a folder.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// It cannot be made.
    #[error("make {0}")]
    Make(PathBuf, #[source] io::Error),
    /// The lock cannot be taken.
    #[error("lock {0}")]
    Lock(PathBuf, #[source] io::Error),
}

/// Marks a folder to be kept.
#[derive(Debug, Clone)]
pub(super) struct Keeper {
    path: PathBuf,
    kept: Arc<AtomicBool>,
}

impl Keeper {
    /// Keeps the folder; true on the first call.
    pub(super) fn keep(&self) -> bool {
        let first = !self.kept.swap(true, Ordering::Relaxed);
        if first {
            let _ = File::create(self.path.join(KEEP));
        }
        first
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }
}

/// Removed on drop unless kept.
#[derive(Debug)]
pub(super) struct Folder {
    keeper: Keeper,
    /// Held as long as the test bed lives, so that other processes do not remove the folder.
    _lock: File,
}

impl Folder {
    pub(super) fn create() -> Result<Self, FolderError> {
        Self::create_in(&paths::target().join("test-bed"))
    }

    fn create_in(root: &Path) -> Result<Self, FolderError> {
        fs::create_dir_all(root).map_err(|e| FolderError::Make(root.to_path_buf(), e))?;
        // Prevents a sweep between the creation of a folder and its lock.
        let _all = lock(&root.join(LOCK))?;
        sweep(root);
        let path = root.join(format!("{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed)));
        // A process with the same id may have left a kept folder.
        let _ = fs::remove_dir_all(&path);
        fs::create_dir(&path).map_err(|e| FolderError::Make(path.clone(), e))?;
        let lock = lock(&path.join(LOCK))?;
        Ok(Self { keeper: Keeper { path, kept: Arc::default() }, _lock: lock })
    }

    pub(super) fn path(&self) -> &Path {
        self.keeper.path()
    }

    pub(super) fn keep(&self) {
        self.keeper.keep();
    }

    pub(super) fn keeper(&self) -> Keeper {
        self.keeper.clone()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.keeper.kept.load(Ordering::Relaxed) {
            print_line(&format!("the test bed's logs and data are kept in {}", self.path().display()));
        } else {
            let _ = fs::remove_dir_all(self.path());
        }
    }
}

fn lock(path: &Path) -> Result<File, FolderError> {
    let failed = |e| FolderError::Lock(path.to_path_buf(), e);
    let file = File::options().create(true).truncate(false).write(true).open(path).map_err(failed)?;
    file.lock().map_err(failed)?;
    Ok(file)
}

/// Removes the folders that no running test bed locks. The next sweep retries failed removals.
fn sweep(root: &Path) {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    let abandoned = entries.map(|entry| entry.path()).filter(|path| path.is_dir() && !is_held(path));
    let (mut kept, dropped): (Vec<_>, Vec<_>) = abandoned.partition(|path| path.join(KEEP).exists());
    kept.sort_by_key(|path| path.join(KEEP).metadata().and_then(|m| m.modified()).unwrap_or(SystemTime::UNIX_EPOCH));
    let too_many = kept.len().saturating_sub(KEPT);
    for path in dropped.iter().chain(kept.iter().take(too_many)) {
        let _ = fs::remove_dir_all(path);
    }
}

fn is_held(path: &Path) -> bool {
    File::open(path.join(LOCK)).is_ok_and(|file| file.try_lock().is_err())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folders(root: &Path) -> usize {
        fs::read_dir(root).expect("a folder").flatten().filter(|entry| entry.path().is_dir()).count()
    }

    #[test]
    fn folder_is_removed_with_its_owner_unless_kept() {
        let root = tempfile::tempdir().expect("a folder");
        let plain = Folder::create_in(root.path()).expect("made");
        let kept = Folder::create_in(root.path()).expect("made");
        kept.keep();
        let path = kept.path().to_path_buf();
        drop((plain, kept));
        assert!(path.is_dir());
        assert_eq!(folders(root.path()), 1);
    }

    #[test]
    fn unlocked_folders_are_swept() {
        let root = tempfile::tempdir().expect("a folder");
        fs::create_dir(root.path().join("1-0")).expect("made");
        let _held = Folder::create_in(root.path()).expect("made");
        let _second = Folder::create_in(root.path()).expect("made");
        assert!(!root.path().join("1-0").exists());
        assert_eq!(folders(root.path()), 2);
    }

    #[test]
    fn only_the_newest_kept_folders_stay() {
        let root = tempfile::tempdir().expect("a folder");
        for number in 0..KEPT + 3 {
            let path = root.path().join(format!("1-{number}"));
            fs::create_dir(&path).expect("made");
            File::create(path.join(KEEP)).expect("written");
        }
        let _held = Folder::create_in(root.path()).expect("made");
        assert_eq!(folders(root.path()), KEPT + 1);
    }
}
