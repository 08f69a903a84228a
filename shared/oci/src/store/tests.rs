//! Tests of the store on a real folder.

use std::{fs, os::unix::fs::PermissionsExt as _};

use super::*;
use crate::testing::{of_reason, of_result};

fn digest(content: &[u8]) -> Digest {
    Digest::of(content)
}

async fn put(store: &Store, content: &'static [u8]) {
    store.put(digest(content), Bytes::from_static(content)).await;
}

async fn has(store: &Store, content: &'static [u8]) -> bool {
    store.get(digest(content)).await.is_some_and(|found| found == content)
}

fn open(folder: &tempfile::TempDir, max_bytes: u64) -> (Store, Metrics) {
    let metrics = Metrics::default();
    (Store::open(folder.path(), max_bytes, metrics.clone()), metrics)
}

#[tokio::test]
async fn content_and_tags_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (store, metrics) = open(&folder, 100);
    assert!(!has(&store, b"a").await);
    put(&store, b"a").await;
    store.set_tag("r/m:1".into(), Some(digest(b"a"))).await;
    assert!(has(&store, b"a").await);
    assert_eq!(
        (of_result(&metrics.store_reads, "hit"), of_result(&metrics.store_reads, "miss"), metrics.store_bytes.get()),
        (1, 1, 1)
    );
    let (again, metrics) = open(&folder, 100);
    assert!(has(&again, b"a").await);
    assert_eq!((again.tag("r/m:1"), again.tag("r/m:2"), metrics.store_bytes.get()), (Some(digest(b"a")), None, 1));
    let path = again.path(&digest(b"a")).unwrap();
    for (path, mode) in [(path.parent().unwrap(), 0o700), (&folder.path().join(FOLDER), 0o700), (&path, 0o600)] {
        assert_eq!(fs::metadata(path).unwrap().permissions().mode() & 0o777, mode, "{}", path.display());
    }
}

#[tokio::test]
async fn damaged_content_is_deleted() {
    let folder = tempfile::tempdir().unwrap();
    let (store, metrics) = open(&folder, 100);
    let path = store.path(&digest(b"abc")).unwrap();
    for damage in [&b"abd"[..], b"ab", b"abcd", b""] {
        put(&store, b"abc").await;
        fs::write(&path, damage).unwrap();
        assert!(!has(&store, b"abc").await && !path.exists());
        assert_eq!(metrics.store_bytes.get(), 0);
    }
    assert_eq!(of_result(&metrics.store_reads, "corrupt"), 4);
    put(&store, b"abc").await;
    fs::remove_file(&path).unwrap();
    assert!(!has(&store, b"abc").await);
    fs::write(folder.path().join(FOLDER).join(TAGS), "{").unwrap();
    assert_eq!(open(&folder, 100).0.tag("r/m:1"), None);
}

#[tokio::test]
async fn least_recently_used_content_is_evicted_at_the_limit() {
    let folder = tempfile::tempdir().unwrap();
    let (store, metrics) = open(&folder, 6);
    for content in [&b"aa"[..], b"bb", b"cc"] {
        put(&store, content).await;
    }
    assert!(has(&store, b"aa").await);
    put(&store, b"ddd").await;
    assert!(has(&store, b"aa").await && has(&store, b"ddd").await);
    assert!(!has(&store, b"bb").await && !has(&store, b"cc").await);
    assert_eq!((metrics.store_evictions.get(), metrics.store_bytes.get()), (2, 5));
    put(&store, b"larger than all").await;
    assert!(has(&store, b"ddd").await && !has(&store, b"larger than all").await);
    // A smaller limit applies at the next start.
    let (_, metrics) = open(&folder, 3);
    assert_eq!((metrics.store_evictions.get(), metrics.store_bytes.get()), (1, 3));
}

#[tokio::test]
async fn unfinished_and_foreign_files_are_deleted_at_start() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = open(&folder, 100);
    let path = store.path(&digest(b"a")).unwrap();
    let names = [path.with_extension("tmp"), path.with_file_name("README")];
    names.iter().for_each(|name| fs::write(name, "x").unwrap());
    open(&folder, 100);
    assert!(names.iter().all(|name| !name.exists()));
}

#[tokio::test]
async fn unusable_folder_stops_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "").unwrap();
    let metrics = Metrics::default();
    let store = Store::open(&file, 100, metrics.clone());
    put(&store, b"a").await;
    store.set_tag("r/m:1".into(), Some(digest(b"a"))).await;
    assert!(!has(&store, b"a").await);
    assert_eq!((of_reason(&metrics.store_errors, "open"), store.tag("r/m:1")), (1, Some(digest(b"a"))));
}

#[tokio::test]
async fn disk_that_fails_later_is_counted() {
    let folder = tempfile::tempdir().unwrap();
    let (store, metrics) = open(&folder, 100);
    put(&store, b"a").await;
    let blobs = store.path(&digest(b"a")).unwrap().parent().unwrap().to_owned();
    fs::remove_dir_all(&blobs).unwrap();
    // Below a file, each operation fails, also for root.
    fs::write(&blobs, "").unwrap();
    put(&store, b"b").await;
    assert!(!has(&store, b"a").await && !has(&store, b"b").await);
    assert_eq!((of_reason(&metrics.store_errors, "write"), of_reason(&metrics.store_errors, "read")), (1, 1));
    fs::remove_file(&blobs).unwrap();
    fs::create_dir(&blobs).unwrap();
    put(&store, b"b").await;
    assert!(has(&store, b"b").await);
}

#[test]
fn symbolic_link_is_not_taken_for_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(elsewhere.path(), folder.path().join(FOLDER)).unwrap();
    let (_, metrics) = open(&folder, 100);
    assert_eq!(of_reason(&metrics.store_errors, "open"), 1);
    assert_eq!(fs::read_dir(elsewhere.path()).unwrap().count(), 0);
}
