//! Resource limits of a process.

use std::{env, fs, os::unix::process::CommandExt as _, process};

use crate::progress;

/// Raises the limit of open files for thousands of connections. Only a shell can raise the limit of a program without
/// unsafe code: if it is lower than `least`, the program re-executes itself below a shell that raises it. On failure
/// the limit stays. To be called first in `main`.
pub fn raise_open_files(least: u64) {
    const RAISED: &str = "TIDEWATCH_FILES_RAISED";
    let limits = fs::read_to_string("/proc/self/limits").unwrap_or_default();
    if env::var_os(RAISED).is_some() || open_files(&limits).is_some_and(|limit| limit >= least) {
        return;
    }
    let Ok(binary) = env::current_exe() else { return };
    let mut shell = process::Command::new("sh");
    shell.args(["-c", r#"ulimit -S -n "$(ulimit -H -n)"; exec "$0" "$@""#]).arg(binary).args(env::args_os().skip(1));
    let error = shell.env(RAISED, "1").exec();
    progress::print_line(&format!("cannot raise the limit of open files: {error}"));
}

/// The soft limit of open files in `/proc/<pid>/limits`.
fn open_files(limits: &str) -> Option<u64> {
    let soft = limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next())?;
    if soft == "unlimited" { Some(u64::MAX) } else { soft.parse().ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_found() {
        let own = open_files(&fs::read_to_string("/proc/self/limits").expect("readable"));
        assert!(own.is_some_and(|limit| limit > 2), "{own:?}");
        let line = "Max open files            1024                 524288               files     \n";
        assert_eq!(open_files(line), Some(1_024));
        assert_eq!(open_files(&line.replace("1024", "unlimited")), Some(u64::MAX));
        assert_eq!(open_files("Max processes 7 7"), None);
    }
}
