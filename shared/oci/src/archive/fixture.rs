//! Archives for tests, hostile ones included.

use std::io::Write as _;

use flate2::{Compression, write::GzEncoder};
use tar::{Builder, EntryType, Header};

/// A tar archive of regular files, with paths that a well-behaved writer refuses.
pub(crate) fn tar(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = Builder::new(Vec::new());
    for (path, content) in files {
        builder.append(&header(path, EntryType::Regular, content.len() as u64), *content).unwrap();
    }
    builder.into_inner().unwrap()
}

/// Header of an entry.
pub(crate) fn header(path: &str, kind: EntryType, size: u64) -> Header {
    let mut header = Header::new_ustar();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_size(size);
    header.set_cksum();
    header
}

/// Compresses a content.
pub(crate) fn gzip(content: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(content).unwrap();
    encoder.finish().unwrap()
}
