//! Files from the command line.

use std::{
    fs::File,
    io::{self, Read},
};

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_author::check::Source;

/// Limit of all files in bytes, far above a thousand versions.
const MAX_BYTES: u64 = 64 << 20;
/// Reads the files, at most [`MAX_BYTES`] in all.
pub(crate) fn read<'a>(files: impl IntoIterator<Item = &'a String>) -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    let mut left = MAX_BYTES;
    let mut has_stdin = false;
    for file in files {
        let read: Box<dyn Read> = match open(file).with_context(|| format!("read {file}"))? {
            Some(opened) => Box::new(opened),
            None if has_stdin => bail!("standard input can be read only once"),
            None => {
                has_stdin = true;
                Box::new(io::stdin().lock())
            }
        };
        let text = bounded(read, left).with_context(|| format!("read {file}"))?;
        left -= text.len() as u64;
        sources.push(Source { name: file.as_str().into(), text });
    }
    Ok(sources)
}

/// Opens a file; `None` is standard input.
fn open(file: &str) -> io::Result<Option<File>> {
    if file == "-" { Ok(None) } else { File::open(file).map(Some) }
}

fn bounded(read: impl Read, left: u64) -> Result<String> {
    let mut bytes = Vec::new();
    read.take(left + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= left, "the files have more than {MAX_BYTES} bytes");
    String::from_utf8(bytes).context("not UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_files_and_binary_files_are_refused() {
        assert_eq!(bounded(&b"abc"[..], 3).unwrap(), "abc");
        assert!(bounded(&b"abcd"[..], 3).is_err());
        assert!(bounded(&b"\xff"[..], 3).is_err());
        assert!(read(&["/no/such/file".to_owned()]).is_err());
        assert!(matches!((open("-"), open("./-")), (Ok(None), Err(_))), "the name of a file may be a hyphen");
    }
}
