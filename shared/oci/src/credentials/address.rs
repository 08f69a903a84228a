//! Addresses of registries, and the hosts that requests may leave for.

use std::{fmt, str::FromStr};

use http::Uri;
use strum::{Display, EnumString};
use thiserror::Error;

/// Longest accepted address, in bytes.
const MAX_BYTES: usize = 512;

/// Failure to parse a [`RegistryAddress`] or an [`AllowedHost`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AddressError {
    /// Host or port is malformed.
    #[error("not a host with optional port")]
    Host,
    /// The scheme is unknown.
    #[error("the scheme is neither https nor http")]
    Scheme,
    /// The path is not that of a repository (OCI distribution spec, *Pulling manifests*).
    #[error("the path is not a repository's: lower-case letters, digits and . _ - in segments")]
    Path,
}

/// Protocol of a registry.
#[derive(Clone, Copy, Debug, Display, EnumString, PartialEq, Eq)]
#[strum(serialize_all = "lowercase")]
pub enum Scheme {
    /// Plain HTTP, for registries without TLS in the same network.
    Http,
    /// HTTP over TLS.
    Https,
}

impl Scheme {
    const fn default_port(self) -> u16 {
        match self {
            Self::Http => 80,
            Self::Https => 443,
        }
    }
}

/// Scheme, host and port of a server (RFC 6454).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin {
    scheme: Scheme,
    host: String,
    port: u16,
}

impl Origin {
    /// Returns the origin of an absolute URI; `None` for other schemes, and for a URI with user information.
    pub fn of(uri: &Uri) -> Option<Self> {
        let scheme: Scheme = uri.scheme_str()?.parse().ok()?;
        let (host, port) = host_and_port(uri.authority()?.as_str()).ok()?;
        Some(Self { scheme, host, port: port.unwrap_or(scheme.default_port()) })
    }

    /// Protocol.
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Host name in lower case, or an IP address, in brackets if it is of version 6.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Port, also if it is the scheme's default.
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Host, with the port unless it is the scheme's default.
    pub fn authority(&self) -> String {
        let Self { host, port, .. } = self;
        if *port == self.scheme.default_port() { host.clone() } else { format!("{host}:{port}") }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.scheme == Scheme::Http {
            f.write_str("http://")?;
        }
        f.write_str(&self.authority())
    }
}

/// Address of a registry: an origin, and the path below which its repositories are.
///
/// Parses from `host`, `host:port` and `host/path`, optionally with a scheme. `http://` means plain HTTP; no scheme,
/// `https://` and `oci://` mean HTTPS. The paths `/v1` and `/v2`, which docker writes into its configuration, denote the API's version
/// and are dropped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RegistryAddress {
    /// Server.
    pub origin: Origin,
    /// Prefix of each repository, without slashes at its ends; may be empty.
    pub path: String,
}

impl RegistryAddress {
    /// Appends a path to the prefix of the repositories.
    ///
    /// # Errors
    /// [`AddressError::Path`].
    pub fn below(mut self, path: &str) -> Result<Self, AddressError> {
        self.path = join(&self.path, path.trim_matches('/'));
        Self::check_path(&self.path).map(|()| self)
    }

    /// Checks a prefix of repositories, which may be empty.
    ///
    /// # Errors
    /// [`AddressError::Path`].
    pub fn check_path(path: &str) -> Result<(), AddressError> {
        if path.is_empty() || is_repository(path) { Ok(()) } else { Err(AddressError::Path) }
    }

    /// Server of the API. That of `docker.io` is `index.docker.io`, as all clients know.
    pub fn server(&self) -> Origin {
        let Origin { scheme, host, port } = &self.origin;
        let host = if host == "docker.io" { "index.docker.io" } else { host };
        Origin { scheme: *scheme, host: host.to_owned(), port: *port }
    }

    /// Returns the full name of a repository on this server.
    pub fn repository(&self, repository: &str) -> String {
        join(&self.path, repository)
    }
}

/// The form of the flag: `http://` only for plain HTTP, no default port.
impl fmt::Display for RegistryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { origin, path } = self;
        let slash = if path.is_empty() { "" } else { "/" };
        write!(f, "{origin}{slash}{path}")
    }
}

impl FromStr for RegistryAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.len() > MAX_BYTES {
            return Err(AddressError::Host);
        }
        let (scheme, rest) = match text.split_once("://") {
            None => (Scheme::Https, text),
            Some(("https" | "oci", rest)) => (Scheme::Https, rest),
            Some(("http", rest)) => (Scheme::Http, rest),
            Some(_) => return Err(AddressError::Scheme),
        };
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        let (host, port) = host_and_port(authority)?;
        let path = match path.trim_matches('/') {
            "v1" | "v2" => "",
            path => path,
        };
        let origin = Origin { scheme, host, port: port.unwrap_or(scheme.default_port()) };
        Self { origin, path: String::new() }.below(path)
    }
}

/// A host that redirects and token realms may name beside the registry's own: `host`, with any port, or `host:port`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllowedHost {
    host: String,
    port: Option<u16>,
}

impl AllowedHost {
    /// Returns whether requests may be sent to this server.
    pub fn permits(&self, origin: &Origin) -> bool {
        self.host == origin.host && self.port.is_none_or(|port| port == origin.port)
    }
}

impl FromStr for AllowedHost {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let (host, port) = host_and_port(text)?;
        Ok(Self { host, port })
    }
}

/// Returns whether a text is a repository's name (OCI distribution spec), apart from rules on repeated separators.
pub(crate) fn is_repository(text: &str) -> bool {
    let is_segment = |segment: &str| {
        let bytes = segment.as_bytes();
        let plain = |byte: Option<&u8>| byte.is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        let inner = |byte: &u8| plain(Some(byte)) || matches!(byte, b'.' | b'_' | b'-');
        plain(bytes.first()) && plain(bytes.last()) && bytes.iter().all(inner)
    };
    text.len() <= MAX_BYTES && text.split('/').all(is_segment)
}

fn join(prefix: &str, path: &str) -> String {
    let parts: Vec<_> = [prefix, path].into_iter().filter(|part| !part.is_empty()).collect();
    parts.join("/")
}

/// Splits `host[:port]`, and lowers the case of the host.
fn host_and_port(text: &str) -> Result<(String, Option<u16>), AddressError> {
    let is_name =
        |host: &str| host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'));
    let (host, rest) = match text.strip_prefix('[') {
        Some(rest) => {
            let (address, rest) = rest.split_once(']').ok_or(AddressError::Host)?;
            let address: std::net::Ipv6Addr = address.parse().map_err(|_| AddressError::Host)?;
            (format!("[{address}]"), rest)
        }
        None => {
            let end = text.find(':').unwrap_or(text.len());
            let (host, rest) = text.split_at_checked(end).ok_or(AddressError::Host)?;
            if host.is_empty() || !is_name(host) {
                return Err(AddressError::Host);
            }
            (host.to_ascii_lowercase(), rest)
        }
    };
    let port = match rest.strip_prefix(':') {
        None if rest.is_empty() => None,
        None => return Err(AddressError::Host),
        Some(port) if port.bytes().all(|byte| byte.is_ascii_digit()) => {
            Some(port.parse().ok().filter(|port| *port != 0).ok_or(AddressError::Host)?)
        }
        Some(_) => return Err(AddressError::Host),
    };
    Ok((host, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_is_host_port_and_path() {
        for (text, origin, path) in [
            ("registry.example.com", "registry.example.com", ""),
            ("Registry.Example.com:443", "registry.example.com", ""),
            ("registry:5000/a/b-c/", "registry:5000", "a/b-c"),
            ("https://index.docker.io/v1/", "index.docker.io", ""),
            ("https://host/v2", "host", ""),
            ("oci://host/modules", "host", "modules"),
            ("http://localhost:5001", "http://localhost:5001", ""),
            ("[::1]:5000", "[::1]:5000", ""),
        ] {
            let address: RegistryAddress = text.parse().unwrap();
            assert_eq!((address.origin.to_string().as_str(), address.path.as_str()), (origin, path), "{text}");
        }
    }

    #[test]
    fn malformed_address_is_refused() {
        use AddressError::{Host, Path, Scheme};
        let long = "a".repeat(600);
        for (text, error) in [
            ("", Host),
            ("https://", Host),
            ("user@host", Host),
            ("host:", Host),
            ("host:0", Host),
            ("host:65536", Host),
            ("host:+80", Host),
            ("a b", Host),
            ("[::1", Host),
            ("[::1]5", Host),
            (&long, Host),
            ("ftp://host", Scheme),
            ("host/a?b", Path),
            ("host/../b", Path),
            ("host/a//b", Path),
            ("host/A", Path),
        ] {
            assert_eq!(text.parse::<RegistryAddress>(), Err(error), "{text}");
        }
    }

    #[test]
    fn server_of_docker_hub_is_not_its_name() {
        for (address, server) in [
            ("docker.io/example", "index.docker.io"),
            ("registry-1.docker.io", "registry-1.docker.io"),
            ("http://docker.io.example.com:5000/a", "http://docker.io.example.com:5000"),
        ] {
            assert_eq!(address.parse::<RegistryAddress>().unwrap().server().to_string(), server);
        }
    }

    #[test]
    fn sub_path_precedes_each_repository() {
        let address: RegistryAddress = "host/prod".parse().unwrap();
        assert_eq!(address.repository("x"), "prod/x");
        let below = address.clone().below("/modules/").unwrap();
        assert_eq!(below.repository("component-descriptors/a/b"), "prod/modules/component-descriptors/a/b");
        assert_eq!(address.clone().below("").unwrap(), address);
        assert_eq!(address.below("../x"), Err(AddressError::Path));
    }

    #[test]
    fn allowed_host_matches_whole_names_only() {
        let origin = |uri: &str| Origin::of(&uri.parse().unwrap());
        let storage = origin("https://storage.example.com/x").unwrap();
        for (host, permitted) in [
            ("storage.example.com", true),
            ("STORAGE.example.com:443", true),
            ("storage.example.com:80", false),
            ("example.com", false),
        ] {
            assert_eq!(host.parse::<AllowedHost>().unwrap().permits(&storage), permitted, "{host}");
        }
        for none in ["ftp://host/", "https://user@host/", "https://host:99999/"] {
            assert_eq!(none.parse().ok().and_then(|uri| Origin::of(&uri)), None, "{none}");
        }
    }
}
