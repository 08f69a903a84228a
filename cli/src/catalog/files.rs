//! Files from the command line.

use std::{
    convert::Infallible,
    fmt, fs,
    io::{self, Read},
    path::PathBuf,
    str::FromStr,
};

use anyhow::{Context as _, Result, bail, ensure};
use tidewatch_receiver::controllers::catalog::check::Source;

/// Limit of all files in bytes, far above a thousand versions.
const MAX_BYTES: u64 = 64 << 20;

/// A file, or `-` for standard input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum File {
    /// Path of a file.
    Path(PathBuf),
    /// Standard input.
    Stdin,
}

impl FromStr for File {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(if text == "-" { Self::Stdin } else { Self::Path(text.into()) })
    }
}

impl fmt::Display for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(f),
            Self::Stdin => f.write_str("-"),
        }
    }
}

/// Reads the files, at most [`MAX_BYTES`] in all.
pub(super) fn read<'a>(files: impl IntoIterator<Item = &'a File>) -> Result<Vec<Source>> {
    let (mut sources, mut left, mut has_stdin) = (Vec::new(), MAX_BYTES, false);
    for file in files {
        let read: Box<dyn Read> = match file {
            File::Path(path) => Box::new(fs::File::open(path).with_context(|| format!("read {file}"))?),
            File::Stdin if has_stdin => bail!("standard input can be read only once"),
            File::Stdin => Box::new(io::stdin().lock()),
        };
        has_stdin |= *file == File::Stdin;
        let text = bounded(read, left).with_context(|| format!("read {file}"))?;
        left -= text.len() as u64;
        sources.push(Source { name: file.to_string().into(), text });
    }
    Ok(sources)
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
        assert!(read(&[File::Path("/no/such/file".into())]).is_err());
        assert_eq!(["-".parse(), "./-".parse()], [Ok(File::Stdin), Ok(File::Path("./-".into()))]);
    }
}
