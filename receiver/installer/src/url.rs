//! Address of a port as agents reach it.

use std::{fmt, str::FromStr};

use http::Uri;
use thiserror::Error;

/// Failure to parse a [`PublicUrl`].
#[derive(Debug, Error, PartialEq, Eq)]
#[error("not https://host or https://host:port")]
pub struct ParsePublicUrlError;

/// An origin `https://host:port`, without a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicUrl {
    host: String,
    port: u16,
}

impl PublicUrl {
    /// Host name, or an IP address without brackets.
    pub fn host(&self) -> &str {
        self.host.trim_start_matches('[').trim_end_matches(']')
    }

    /// Port, 443 if the URL contains none.
    pub const fn port(&self) -> u16 {
        self.port
    }
}

impl fmt::Display for PublicUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}:{}", self.host, self.port)
    }
}

impl FromStr for PublicUrl {
    type Err = ParsePublicUrlError;

    fn from_str(text: &str) -> Result<Self, ParsePublicUrlError> {
        let uri: Uri = text.to_ascii_lowercase().parse().map_err(|_| ParsePublicUrlError)?;
        let authority = uri.authority().ok_or(ParsePublicUrlError)?;
        let plain = uri.scheme_str() == Some("https")
            && matches!(uri.path(), "" | "/")
            && uri.query().is_none()
            && !authority.as_str().contains('@')
            && !authority.host().is_empty();
        // `Authority::port` is also absent for a port that is too large.
        let port = match authority.as_str().strip_prefix(authority.host()).unwrap_or_default() {
            "" => 443,
            port => port.trim_start_matches(':').parse().map_err(|_| ParsePublicUrlError)?,
        };
        (plain && port != 0).then(|| Self { host: authority.host().to_owned(), port }).ok_or(ParsePublicUrlError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_https_origins_are_accepted() {
        for (text, shown, host) in [
            ("https://KCP.example:8443", "https://kcp.example:8443", "kcp.example"),
            ("https://kcp.example/", "https://kcp.example:443", "kcp.example"),
            ("https://[::1]:1", "https://[::1]:1", "::1"),
        ] {
            let url: PublicUrl = text.parse().unwrap();
            assert_eq!((url.to_string().as_str(), url.host()), (shown, host));
        }
        for bad in [
            "http://a",
            "https://",
            "https://a/b",
            "https://a?b",
            "https://u@a",
            "a:1",
            "https://a:0",
            "https://a:",
            "https://a:84430",
            "https://[::1]:84430",
        ] {
            assert_eq!(bad.parse::<PublicUrl>(), Err(ParsePublicUrlError), "{bad}");
        }
    }
}
