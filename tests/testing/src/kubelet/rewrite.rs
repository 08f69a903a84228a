//! Rewrites the texts of a container (arguments, values of its environment), because it has no file system and no
//! network of its own here: paths below a mount become paths of the volume's folder, and ports on which it listens
//! become free ports on loopback.

use std::{collections::BTreeMap, fmt::Write as _, io, path::PathBuf};

use crate::ports;

/// Free port on loopback for each port of the container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Ports {
    assigned: BTreeMap<u16, u16>,
}

impl Ports {
    /// The free port for a port of the container; stable across calls.
    pub(super) fn of(&mut self, port: u16) -> io::Result<u16> {
        if let Some(assigned) = self.assigned.get(&port) {
            return Ok(*assigned);
        }
        let free = ports::free()?;
        self.assigned.insert(port, free);
        Ok(free)
    }

    /// All assigned ports, by port of the container.
    pub(super) const fn assigned(&self) -> &BTreeMap<u16, u16> {
        &self.assigned
    }
}

/// Mounts and listening ports of a container.
#[derive(Debug, Clone, Default)]
pub(super) struct Rewrite {
    /// Mount path and folder.
    pub(super) mounts: Vec<(String, PathBuf)>,
    /// Ports on which the program listens, also on its pod's loopback.
    pub(super) known: Vec<u16>,
}

impl Rewrite {
    /// The rewritten text.
    pub(super) fn text(&self, text: &str, ports: &mut Ports) -> io::Result<String> {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            // Matches only at the beginning of a path or an address.
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

    /// The longest mount with which the text begins, as a whole path or a folder of it.
    fn mount(&self, text: &str) -> Option<(&PathBuf, usize)> {
        let whole = |rest: &str| !rest.starts_with(|c: char| c.is_alphanumeric() || matches!(c, '.' | '-' | '_'));
        let fits = |path: &str| text.strip_prefix(path).is_some_and(whole);
        let mounts = self.mounts.iter().map(|(path, folder)| (path.trim_end_matches('/'), folder));
        let fitting = mounts.filter(|(path, _)| !path.is_empty() && fits(path));
        fitting.max_by_key(|(path, _)| path.len()).map(|(path, folder)| (folder, path.len()))
    }

    /// A listening address: every address of the pod with any port, or its loopback with a known one.
    fn listens(&self, text: &str) -> Option<(u16, usize)> {
        let after = |host: &str| {
            let rest = text.strip_prefix(host)?;
            let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
            Some((rest[..digits].parse().ok()?, host.len() + digits))
        };
        let known = |&(port, _): &(u16, usize)| self.known.contains(&port);
        let wildcard = after("0.0.0.0:").or_else(|| after("[::]:"));
        wildcard.or_else(|| after("127.0.0.1:").or_else(|| after("[::1]:")).filter(known))
    }
}

/// Replaces `$(NAME)` by the value of a variable, as Kubernetes does; `$$(NAME)` becomes `$(NAME)`, and unknown names
/// stay.
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
        // The last variable of a name wins.
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
    fn listening_addresses_get_free_ports_and_client_addresses_stay() {
        let mut ports = Ports::default();
        let rewrite = rewrite();
        let assigned = ports.of(2112).expect("a port");
        let mut text = |text: &str| rewrite.text(text, &mut ports).expect("ports");
        assert_eq!(text("--metrics-address=0.0.0.0:2112"), format!("--metrics-address=127.0.0.1:{assigned}"));
        assert_eq!(text("[::]:2112"), format!("127.0.0.1:{assigned}"));
        assert_ne!(text("127.0.0.1:2113"), "127.0.0.1:2113");
        for client_address in
            ["127.0.0.1:9999", "https://127.0.0.1:2112", "10.0.0.0:2112", "0.0.0.0:x", "0.0.0.0:99999"]
        {
            assert_eq!(text(client_address), client_address);
        }
        assert_eq!(ports.assigned().keys().copied().collect::<Vec<_>>(), [2112, 2113]);
    }

    #[test]
    fn variables_are_expanded_as_kubernetes_does() {
        let variables = [("A", "1"), ("B", "$(A)"), ("A", "2")].map(|(name, value)| (name.into(), value.into()));
        assert_eq!(expand("$(A)-$(B)-$(C)-$$(A)-$A-$", &variables), "2-$(A)-$(C)-$(A)-$A-$");
    }
}
