//! What is done to the texts of a container (arguments, values of its environment) because it has no file system and no network of its
//! own here: paths below a mount lead to where the volume was laid out, and ports that it listens on are free ones of loopback.

use std::{collections::BTreeMap, fmt::Write as _, io, path::PathBuf};

use crate::ports;

/// Which free port of loopback stands for which port of the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ports {
    given: BTreeMap<u16, u16>,
}

impl Ports {
    /// The free port for a port of the container; the same one each time.
    pub(super) fn of(&mut self, port: u16) -> io::Result<u16> {
        if let Some(given) = self.given.get(&port) {
            return Ok(*given);
        }
        let free = ports::free()?;
        self.given.insert(port, free);
        Ok(free)
    }

    /// All that were given out, by port of the container.
    pub(super) const fn given(&self) -> &BTreeMap<u16, u16> {
        &self.given
    }
}

/// Mounts by path, and what counts as listening.
#[derive(Debug, Clone, Default)]
pub(super) struct Rewrite {
    /// Mount path and folder.
    pub(super) mounts: Vec<(String, PathBuf)>,
    /// Ports that the program is known to listen on, on its pod's loopback too.
    pub(super) known: Vec<u16>,
}

impl Rewrite {
    /// The text as the process gets it.
    pub(super) fn text(&self, text: &str, ports: &mut Ports) -> io::Result<String> {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            // Only at the beginning of a path or an address.
            let begins = !out.ends_with(|c: char| c.is_alphanumeric() || matches!(c, '/' | '.' | '-' | '_'));
            if let Some((folder, length)) = begins.then(|| self.mount(rest)).flatten() {
                out.push_str(&folder.to_string_lossy());
                rest = &rest[length..];
            } else if let Some((port, length)) = begins.then(|| self.listens(rest)).flatten() {
                let _ = write!(out, "127.0.0.1:{}", ports.of(port)?);
                rest = &rest[length..];
            } else {
                out.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
        Ok(out)
    }

    /// The longest mount that the text begins with, as a whole path or a folder of it.
    fn mount(&self, text: &str) -> Option<(&PathBuf, usize)> {
        let whole = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_'));
        let fits = |path: &str| text.strip_prefix(path).is_some_and(whole);
        let mounts = self.mounts.iter().map(|(path, folder)| (path.trim_end_matches('/'), folder));
        let fitting = mounts.filter(|(path, _)| !path.is_empty() && fits(path));
        fitting.max_by_key(|(path, _)| path.len()).map(|(path, folder)| (folder, path.len()))
    }

    /// An address to listen on: every address of the pod with any port, or its loopback with a known one.
    fn listens(&self, text: &str) -> Option<(u16, usize)> {
        let after = |host: &str| {
            let rest = text.strip_prefix(host)?;
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            Some((rest[..digits].parse().ok()?, host.len() + digits))
        };
        let known = |&(port, _): &(u16, usize)| self.known.contains(&port);
        let everywhere = after("0.0.0.0:").or_else(|| after("[::]:"));
        everywhere.or_else(|| after("127.0.0.1:").or_else(|| after("[::1]:")).filter(known))
    }
}

/// Replaces `$(NAME)` by the value of a variable, as Kubernetes does; `$$(NAME)` stays `$(NAME)`, and so does an unknown name.
pub(super) fn expand(text: &str, variables: &[(String, String)]) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        out.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        if let Some(escaped) = rest.strip_prefix('$') {
            out.push('$');
            rest = escaped;
            continue;
        }
        let reference = rest.strip_prefix('(').and_then(|inner| inner.split_once(')'));
        // The last one of a name counts.
        let known = reference.and_then(|(name, after)| {
            variables.iter().rev().find(|(known, _)| known == name).map(|(_, value)| (value, after))
        });
        match known {
            Some((value, after)) => {
                out.push_str(value);
                rest = after;
            }
            None => out.push('$'),
        }
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewrite() -> Rewrite {
        let mount = |path: &str, folder: &str| (path.to_owned(), PathBuf::from(folder));
        let mounts = vec![
            mount("/var/run/secrets", "/v/outer"),
            mount("/var/run/secrets/account/", "/v/account"),
            mount("/etc/id", "/v/etc/id"),
        ];
        Rewrite { mounts, known: vec![2113] }
    }

    fn text(text: &str) -> String {
        rewrite().text(text, &mut Ports::default()).expect("ports")
    }

    #[test]
    fn the_longest_mount_counts_and_only_whole_segments() {
        assert_eq!(text("--dir=/var/run/secrets/account/token"), "--dir=/v/account/token");
        assert_eq!(text("/var/run/secrets/account"), "/v/account");
        assert_eq!(text("/var/run/secrets/accounts"), "/v/outer/accounts");
        assert_eq!(text("/etc/id,/etc/id/a:/etc/idx"), "/v/etc/id,/v/etc/id/a:/etc/idx");
        assert_eq!(text("/root/etc/id"), "/root/etc/id");
        assert_eq!(text("ä=/etc/id"), "ä=/v/etc/id");
    }

    #[test]
    fn what_is_listened_on_gets_a_free_port_and_what_is_called_does_not() {
        let mut ports = Ports::default();
        let (rewrite, given) = (rewrite(), ports.of(2112).expect("a port"));
        let mut text = |text: &str| rewrite.text(text, &mut ports).expect("ports");
        assert_eq!(text("--metrics-address=0.0.0.0:2112"), format!("--metrics-address=127.0.0.1:{given}"));
        assert_eq!(text("[::]:2112"), format!("127.0.0.1:{given}"));
        assert_ne!(text("127.0.0.1:2113"), "127.0.0.1:2113");
        for called in ["127.0.0.1:9999", "https://127.0.0.1:2112", "10.0.0.0:2112", "0.0.0.0:x", "0.0.0.0:99999"] {
            assert_eq!(text(called), called);
        }
        assert_eq!(ports.given().keys().copied().collect::<Vec<_>>(), [2112, 2113]);
    }

    #[test]
    fn variables_are_expanded_as_kubernetes_does() {
        let variables = [("A", "1"), ("B", "$(A)"), ("A", "2")].map(|(name, value)| (name.into(), value.into()));
        assert_eq!(expand("$(A)-$(B)-$(C)-$$(A)-$A-$", &variables), "2-$(A)-$(C)-$(A)-$A-$");
    }
}
