//! Resource limits of a process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::progress;

/// Raises the soft limit of open files to the hard limit, for thousands of connections. On failure the limit stays.
pub fn raise_open_files() {
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        progress::print_line(&format!("cannot raise the limit of open files: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_becomes_the_hard_limit() {
        raise_open_files();
        let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
        assert_eq!(current, maximum);
    }
}
