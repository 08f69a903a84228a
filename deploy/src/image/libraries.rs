//! The dynamic libraries of a program, as resolved by the loader of the build machine.

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use anyhow::{Context as _, Result, anyhow};

/// The files that the program needs to start, including the loader; empty for a static program.
pub(super) fn of(program: &Path) -> Result<BTreeSet<PathBuf>> {
    // ld.so(8): with this variable, the loader lists the objects that it would map, and the program does not run. A
    // static program has no loader and does run.
    read(program, Command::new(program).arg("--version").env("LD_TRACE_LOADED_OBJECTS", "1").output())
}

fn read(program: &Path, listed: io::Result<Output>) -> Result<BTreeSet<PathBuf>> {
    let listed = listed.and_then(|listed| {
        let reason = || io::Error::other(String::from_utf8_lossy(&listed.stderr).trim().to_owned());
        if listed.status.success() { Ok(listed.stdout) } else { Err(reason()) }
    });
    let listed = listed.with_context(|| format!("the libraries of {} cannot be listed", program.display()))?;
    let lines = String::from_utf8_lossy(&listed);
    let libraries: Result<_, _> = lines.lines().filter_map(|line| resolved(line).transpose()).collect();
    libraries.map_err(|library| anyhow!("cannot find {library}, which {} links", program.display()))
}

/// Parses one line: `name => path (address)`, or `path (address)` for the loader, or only a name for objects that the
/// kernel provides.
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
    use std::{os::unix::process::ExitStatusExt as _, process::ExitStatus};

    use super::*;

    #[test]
    fn a_failing_loader_is_an_error() {
        let output = |status, stderr: &str| Output {
            status: ExitStatus::from_raw(status),
            stdout: Vec::new(),
            stderr: stderr.into(),
        };
        let read = |listed| read(Path::new("program"), Ok(listed));
        assert!(read(output(0, "")).unwrap().is_empty());
        for status in [127 << 8, 11] {
            let refused = read(output(status, "cannot allocate memory\n")).unwrap_err();
            assert_eq!(format!("{refused:#}"), "the libraries of program cannot be listed: cannot allocate memory");
        }
    }

    #[test]
    fn lines_of_files_are_resolved() {
        let path = |text: &str| Ok(Some(PathBuf::from(text)));
        assert_eq!(resolved("\tlinux-vdso.so.1 (0x00007ffd)"), Ok(None));
        assert_eq!(resolved("\tlibc.so.6 => /lib/x/libc.so.6 (0x00007f)"), path("/lib/x/libc.so.6"));
        assert_eq!(resolved("\t/lib64/ld-linux-x86-64.so.2 (0x00007f)"), path("/lib64/ld-linux-x86-64.so.2"));
        assert_eq!(resolved("\tlibodd.so.1 => not found"), Err("libodd.so.1"));
        assert_eq!(resolved("\tstatically linked"), Ok(None));
    }
}
