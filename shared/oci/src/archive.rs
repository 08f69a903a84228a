//! Unpacks gzip and tar contents, with a limit on the unpacked size.

use std::io::{self, Read};

use flate2::bufread::MultiGzDecoder;
use tar::{Archive, Entry};
use thiserror::Error;

use super::excerpt::{Excerpt, message};

/// Maximum number of entries that are looked at in a tar archive.
const MAX_ENTRIES: usize = 64;
/// First bytes of a gzip content (RFC 1952, section 2.3.1).
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// A content that cannot be unpacked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ArchiveError {
    /// It exceeds a limit when unpacked.
    #[error("the unpacked content exceeds {0} bytes")]
    TooLarge(usize),
    /// It is damaged, or ends early.
    #[error("cannot unpack the content: {0}")]
    Unpack(String),
    /// The archive has no file that is wanted.
    #[error("no file {0} among the first {MAX_ENTRIES} entries of the tar archive")]
    NoFile(&'static str),
    /// The path of the file leads out of the archive.
    #[error("the path {0} leads out of the tar archive")]
    Path(Excerpt),
}

/// Verdict on a regular file of an archive, by its path.
pub(super) enum Choice {
    /// The next entry is looked at.
    Skip,
    /// The file is read.
    Take,
    /// The archive is refused.
    Refuse,
}

/// Unpacks a content that may be compressed with gzip, recognised by its first bytes.
pub(super) fn unpacked(content: &[u8], limit: usize) -> Result<Vec<u8>, ArchiveError> {
    let mut unpacked = Vec::new();
    let read = Limited::of(content, limit).read_to_end(&mut unpacked);
    read.map(|_| unpacked).map_err(|error| failure(limit, &error))
}

/// Reads one regular file of a tar archive, which may be compressed with gzip. `limit` bounds the archive up to and with
/// that file, and `choose` gets each path in turn.
pub(super) fn file(
    content: &[u8],
    limit: usize,
    wanted: &'static str,
    choose: impl Fn(&str) -> Choice,
) -> Result<Vec<u8>, ArchiveError> {
    let failed = |error| failure(limit, &error);
    for entry in Archive::new(Limited::of(content, limit)).entries().map_err(failed)?.take(MAX_ENTRIES) {
        let mut entry = entry.map_err(failed)?;
        if !entry.header().entry_type().is_file() {
            continue;
        }
        let path = String::from_utf8_lossy(&entry.path_bytes()).into_owned();
        match choose(&path) {
            Choice::Skip => {}
            Choice::Refuse => return Err(ArchiveError::Path(Excerpt::of(&path))),
            Choice::Take => return read_entry(&mut entry).map_err(failed),
        }
    }
    Err(ArchiveError::NoFile(wanted))
}

fn read_entry<R: Read>(entry: &mut Entry<'_, R>) -> io::Result<Vec<u8>> {
    let size = entry.size();
    let mut file = Vec::new();
    entry.read_to_end(&mut file)?;
    // An archive that ends within an entry is an end of file to the reader of that entry.
    if file.len() as u64 == size { Ok(file) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

/// `tar` keeps the kind of an error of its reader, and only [`Limited`] has errors of this kind.
fn failure(limit: usize, error: &io::Error) -> ArchiveError {
    match error.kind() {
        io::ErrorKind::FileTooLarge => ArchiveError::TooLarge(limit),
        _ => ArchiveError::Unpack(message(error)),
    }
}

/// Reader of an unpacked content that fails beyond a limit.
struct Limited<'a> {
    from: Box<dyn Read + 'a>,
    left: usize,
}

impl<'a> Limited<'a> {
    fn of(content: &'a [u8], limit: usize) -> Self {
        let from: Box<dyn Read + 'a> =
            if content.starts_with(&GZIP) { Box::new(MultiGzDecoder::new(content)) } else { Box::new(content) };
        Self { from, left: limit }
    }
}

impl Read for Limited<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.left = self.left.checked_sub(read).ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(read)
    }
}

#[cfg(test)]
pub(super) mod fixture;
#[cfg(test)]
mod tests;
