//! What a program links dynamically, as the loader of this machine resolves it.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use super::ImageError;

/// The files that must be there for the program to start, the loader included; none for a static one.
pub(super) fn of(program: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let list = |source| ImageError::List { program: program.to_owned(), source };
    // ld.so(8): with this variable the loader names what it would map, and the program does not run.
    let listed = Command::new(program).env("LD_TRACE_LOADED_OBJECTS", "1").output().map_err(list)?;
    let lines = String::from_utf8_lossy(&listed.stdout).into_owned();
    let mut libraries = Vec::new();
    for line in lines.lines() {
        match resolved(line) {
            Ok(path) => libraries.extend(path),
            Err(library) => {
                let library = library.to_owned();
                return Err(ImageError::Library { program: program.to_owned(), library });
            }
        }
    }
    libraries.sort();
    libraries.dedup();
    Ok(libraries)
}

/// One line: `name => path (address)`, or `path (address)` for the loader, or a name alone for what the kernel provides.
fn resolved(line: &str) -> Result<Option<PathBuf>, &str> {
    let line = line.trim();
    let place = match line.split_once(" => ") {
        Some((name, place)) if place.starts_with("not found") => return Err(name),
        Some((_, place)) => place,
        None => line,
    };
    let path = place.split_once(" (").map_or(place, |(path, _)| path);
    Ok(path.starts_with('/').then(|| PathBuf::from(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_a_file_or_none() {
        let path = |text: &str| Ok(Some(PathBuf::from(text)));
        assert_eq!(resolved("\tlinux-vdso.so.1 (0x00007ffd)"), Ok(None));
        assert_eq!(resolved("\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f)"), path("/lib/x/libc.so.6"));
        assert_eq!(resolved("\t/lib64/ld-linux-x86-64.so.2 (0x00007f)"), path("/lib64/ld-linux-x86-64.so.2"));
        assert_eq!(resolved("\tlibodd.so.1 => not found"), Err("libodd.so.1"));
        assert_eq!(resolved("\tstatically linked"), Ok(None));
    }
}
